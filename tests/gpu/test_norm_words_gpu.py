"""Backward passes of norms whose 16-bit rows wait in shared memory: right at every length, start and number of rows."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional

from ridgeline.bench.check import check_case
from ridgeline.kernels import layer_norm, rms_norm, tuning
from ridgeline.kernels.contract import case
from ridgeline.kernels.rms_norm.config import again
from ridgeline.kernels.variants import variants_of

pytestmark = pytest.mark.usefixtures("packed")
WAYS = [
    ("layer_norm", "bfloat16", 4101, 4099, (4, 2, 4, False)), ("layer_norm", "float16", 777, 5003, (4, 3, 3, False)),
    ("layer_norm", "bfloat16", 300, 7001, (8, 2, 2, False)), ("layer_norm", "bfloat16", 270, 12289, (16, 3, 1, False)),
    ("layer_norm", "bfloat16", 400, 16384, (16, 2, 1, False)), ("layer_norm", "float16", 9, 2052, (4, 3, 5, True)),
    ("layer_norm", "bfloat16", 1, 4096, (4, 2, 4, False)), ("layer_norm", "bfloat16", 5000, 1001, (2, 3, 8, False)),
    ("rms_norm", "bfloat16", 4101, 4099, (4, 3, 4, True)), ("rms_norm", "float16", 300, 7002, (8, 3, 2, True)),
    ("rms_norm", "bfloat16", 300, 20480, (16, 2, 1, False)), ("rms_norm", "bfloat16", 5, 4096, (4, 3, 4, True)),
]  # fmt: skip
PAST = [
    ("add_rms_norm", "bfloat16", 700, 14336, (8, 3, 1, False)), ("add_rms_norm", "float16", 500, 16384, (8, 2, 1)),
    ("add_rms_norm", "bfloat16", 300, 18432, (16, 2, 1)), ("add_rms_norm", "bfloat16", 900, 5376, (8, 3, 2, True)),
    ("add_rms_norm", "bfloat16", 3, 4096, (4, 3, 4, True)), ("add_layer_norm", "bfloat16", 700, 14336, (8, 3, 1)),
    ("add_layer_norm", "float16", 300, 18432, (8, 2, 1)), ("add_layer_norm", "bfloat16", 900, 8192, (8, 3, 2, False)),
    ("add_layer_norm", "bfloat16", 2500, 1600, (2, 2, 8, False)),
]  # fmt: skip
"""Norms of sums, to whose gradients another one is added."""


def wanted_variants() -> list[Any]:
    """What this file launches, for a pack."""
    found = []
    for name, dtype, rows, cols, way in PAST:
        with tuning.forced(f"{name.removeprefix('add_')}.backward", again(cols, *way)):
            found += variants_of(name, [case(dtype, rows=rows, cols=cols)])
    for name, dtype, rows, cols, way in WAYS:
        with tuning.forced(f"{name}.backward", again(cols, *way)):
            found += variants_of(name, [case(dtype, rows=rows, cols=cols)])
    return list(dict.fromkeys(found))


@pytest.mark.parametrize(("name", "dtype", "rows", "cols", "way"), WAYS)
def test_rows_that_wait_in_shared_memory_have_the_right_gradients(name, dtype, rows, cols, way):
    with tuning.forced(f"{name}.backward", again(cols, *way)):
        found = check_case(name, case(dtype, rows=rows, cols=cols), torch.device("cuda"), 1)
    wrong = [finding for finding in found if not finding.ok]
    assert found and not wrong, wrong


@pytest.mark.parametrize(("name", "dtype", "rows", "cols", "way"), PAST)
def test_gradients_past_the_norm_are_added_to_rows_that_wait_in_shared_memory(name, dtype, rows, cols, way):
    with tuning.forced(f"{name.removeprefix('add_')}.backward", again(cols, *way)):
        found = check_case(name, case(dtype, rows=rows, cols=cols), torch.device("cuda"), 1)
    wrong = [finding for finding in found if not finding.ok]
    assert found and not wrong, wrong


@pytest.mark.parametrize("cols", [4096, 4099])
def test_norms_without_weights_and_with_a_weight_alone(cols):
    torch.manual_seed(0)
    x = torch.randn(600, cols, device="cuda", dtype=torch.bfloat16) + 3
    w, dy = torch.randn(cols, device="cuda", dtype=torch.bfloat16), torch.randn_like(x)
    with tuning.forced("layer_norm.backward", again(cols, 4, 2, 4, False)):
        for weight in (None, w):
            ours, theirs = [value.detach().requires_grad_() for value in (x, x.double())]
            wide = None if weight is None else weight.double()
            layer_norm(ours, weight).backward(dy)
            functional.layer_norm(theirs, (cols,), wide).backward(dy.double())
            torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-2, atol=1e-2)
    with tuning.forced("rms_norm.backward", again(cols, 4, 3, 4, True)):
        ours, theirs = [value.detach().requires_grad_() for value in (x, x.double())]
        rms_norm(ours, w, 1e-6, offset=1.0).backward(dy)
        functional.rms_norm(theirs, (cols,), w.double() + 1.0, 1e-6).backward(dy.double())
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-2, atol=1e-2)
