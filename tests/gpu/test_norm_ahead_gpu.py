"""Backward passes of norms whose rows are finished a turn after their sums were taken: right at every length, start,
type and number of turns, with the same bits every time."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional

from ridgeline.bench.check import check_case
from ridgeline.kernels import layer_norm, rms_norm, tuning
from ridgeline.kernels.contract import case
from ridgeline.kernels.rms_norm.config import again, ahead
from ridgeline.kernels.variants import variants_of

pytestmark = pytest.mark.usefixtures("packed")
WAYS = [
    ("layer_norm", "bfloat16", 4101, 4099, (8, 3, 2)), ("layer_norm", "float16", 777, 5003, (8, 2, 2)),
    ("layer_norm", "bfloat16", 300, 7001, (16, 3, 1)), ("layer_norm", "bfloat16", 270, 12289, (16, 3, 1)),
    ("layer_norm", "bfloat16", 400, 14336, (8, 3, 1)), ("layer_norm", "float16", 9, 2052, (4, 3, 4)),
    ("layer_norm", "bfloat16", 1, 4096, (8, 3, 2)), ("layer_norm", "bfloat16", 9000, 735, (1, 3, 16)),
    ("layer_norm", "bfloat16", 265, 5376, (8, 3, 2)), ("layer_norm", "float32", 300, 10234, (16, 2, 1)),
    ("layer_norm", "float32", 5000, 503, (1, 2, 16)), ("rms_norm", "float32", 140, 14336, (16, 2, 1)),
    ("rms_norm", "bfloat16", 4101, 4099, (8, 3, 2)), ("rms_norm", "float16", 5001, 642, (1, 3, 12)),
    ("rms_norm", "bfloat16", 300, 16384, (16, 3, 1)), ("rms_norm", "bfloat16", 5, 4096, (4, 2, 4)),
    ("rms_norm", "float32", 4099, 1781, (4, 2, 4)), ("rms_norm", "bfloat16", 600, 2942, (4, 3, 4, True)),
    ("layer_norm", "bfloat16", 700, 12289, (8, 3, 2, False, 2)),
    ("layer_norm", "float16", 2101, 7001, (8, 3, 2, False, 2)),
    ("layer_norm", "bfloat16", 300, 14336, (8, 3, 2, False, 4)),
    ("layer_norm", "float32", 300, 15736, (16, 2, 1, False, 2)),
    ("layer_norm", "float32", 140, 15737, (8, 3, 2, False, 4)),
    ("layer_norm", "bfloat16", 1, 5376, (4, 3, 4, False, 2)),
    ("layer_norm", "bfloat16", 9, 5003, (4, 3, 4, False, 2)),
    ("layer_norm", "bfloat16", 900, 2064, (4, 3, 4, False, 2)),
    ("rms_norm", "bfloat16", 700, 18748, (16, 3, 1, False, 2)),
    ("rms_norm", "float32", 200, 13968, (8, 3, 2, False, 4)),
    ("rms_norm", "float16", 1101, 13055, (8, 3, 2, False, 2)),
    ("rms_norm", "bfloat16", 133, 8192, (8, 3, 2, True, 2)),
]  # fmt: skip
"""Function, type, rows, columns; warps, rows in shared memory, programs of a multiprocessor, whether weights stay in
registers, programs that share a row."""
FAR = (ahead(4099, 8, 3, 2), again(4099, 4, 3, 4))
STARTS = (2052, 2054, 2049)
"""Columns of rows that start in two places of an access, in four, in eight."""
BARE = ((4096, (8, 3, 2)), (4099, (8, 3, 2)), (4096, (4, 3, 4, False, 2)), (4099, (8, 3, 2, False, 2)))


def of(dtype: str, cols: int, way: tuple[Any, ...]) -> Any:
    warps, slots, programs, kept, split = (*way, False, 1)[:5] if len(way) < 4 else (*way, 1)[:5]
    return ahead(cols, warps, slots, programs, kept, 4 if dtype == "float32" else 2, split)


def wanted_variants() -> list[Any]:
    """What this file launches, for a pack."""
    found = []
    for name, dtype, rows, cols, way in WAYS:
        with tuning.forced(f"{name}.backward", of(dtype, cols, way)):
            found += variants_of(name, [case(dtype, rows=rows, cols=cols)])
    for chosen in FAR:
        with tuning.forced("layer_norm.backward", chosen):
            found += variants_of("layer_norm", [case(dtype, rows=700, cols=4099) for dtype in ("bfloat16", "float16")])
    for name in ("layer_norm", "rms_norm"):
        for cols in STARTS:
            with tuning.forced(f"{name}.backward", ahead(cols, 8, 3, 1)):
                found += variants_of(name, [case("bfloat16", rows=1901, cols=cols)])
    return list(dict.fromkeys(found))


@pytest.mark.parametrize(("name", "dtype", "rows", "cols", "way"), WAYS)
def test_rows_finished_a_turn_later_have_the_right_gradients(name, dtype, rows, cols, way):
    with tuning.forced(f"{name}.backward", of(dtype, cols, way)):
        found = check_case(name, case(dtype, rows=rows, cols=cols), torch.device("cuda"), 1)
    wrong = [finding for finding in found if not finding.ok]
    assert found and not wrong, wrong


@pytest.mark.parametrize(("cols", "way"), BARE)
def test_norms_without_weights_with_a_weight_alone_and_of_rows_that_lie_apart(cols, way):
    torch.manual_seed(0)
    x = torch.randn(600, cols + 8, device="cuda", dtype=torch.bfloat16)[:, :cols] + 3
    apart = torch.empty(600, cols + 8, device="cuda", dtype=torch.bfloat16)[:, :cols].copy_(x)
    w, dy = torch.randn(cols, device="cuda", dtype=torch.bfloat16), torch.randn_like(x)
    chosen = of("bfloat16", cols, way)
    for given in (x, apart):
        theirs = given.double().requires_grad_()
        for weight in (None, w):
            ours = given.detach().requires_grad_()
            with tuning.forced("layer_norm.backward", chosen):
                (mine,) = torch.autograd.grad(layer_norm(ours, weight), ours, dy)
            wide = None if weight is None else weight.double()
            (right,) = torch.autograd.grad(functional.layer_norm(theirs, (cols,), wide), theirs, dy.double())
            torch.testing.assert_close(mine.double(), right, rtol=1e-2, atol=1e-2)
        ours = given.detach().requires_grad_()
        with tuning.forced("rms_norm.backward", chosen):
            (mine,) = torch.autograd.grad(rms_norm(ours, w, 1e-6, offset=1.0), ours, dy)
        normed = functional.rms_norm(theirs, (cols,), w.double() + 1.0, 1e-6)
        torch.testing.assert_close(
            mine.double(), torch.autograd.grad(normed, theirs, dy.double())[0], rtol=1e-2, atol=1e-2
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chosen", FAR, ids=["ahead", "again"])
def test_rows_far_from_zero_are_as_exact_as_pytorchs(chosen, dtype):
    """Means are taken off the sums of 16-bit rows, not off their numbers: nothing of it must show."""
    torch.manual_seed(0)
    x = (torch.randn(700, 4099, device="cuda") + 40.0).to(dtype)
    w, b = ((1 + 0.3 * torch.randn(4099, device="cuda")).to(dtype) for _ in range(2))
    dy = (torch.randn(700, 4099, device="cuda") + 1.0).to(dtype)

    def gradients(form: Any, *given: torch.Tensor) -> list[torch.Tensor]:
        leaves = [value.detach().requires_grad_() for value in given]
        return list(torch.autograd.grad(form(*leaves), leaves, dy.to(given[0].dtype)))

    right = gradients(lambda x, w, b: functional.layer_norm(x, (4099,), w, b), x.double(), w.double(), b.double())
    theirs = gradients(lambda x, w, b: functional.layer_norm(x, (4099,), w, b), x, w, b)
    with tuning.forced("layer_norm.backward", chosen):
        ours = gradients(lambda x, w, b: layer_norm(x, w, b), x, w, b)
    for mine, other, meant in zip(ours, theirs, right, strict=True):
        assert (mine.double() - meant).abs().max() <= 2 * (other.double() - meant).abs().max()
        assert (mine.double() - meant).norm() <= 1.1 * (other.double() - meant).norm()


@pytest.mark.parametrize("cols", STARTS)
def test_even_rows_are_walked_over_by_as_many_programs_as_fit(cols):
    for name in ("layer_norm", "rms_norm"):
        with tuning.forced(f"{name}.backward", ahead(cols, 8, 3, 1)):
            found = check_case(name, case("bfloat16", rows=1901, cols=cols), torch.device("cuda"), 1)
        wrong = [finding for finding in found if not finding.ok]
        assert found and not wrong, wrong
