"""Places of the few largest elements of rows: what the compiler makes of them, and what is refused."""

import pytest
import torch

pytest.importorskip("triton")

from ridgeline.kernels import launcher, supports, top_k
from ridgeline.kernels.compiler import facts_of


def facts(dtype, *shape, k):
    with launcher.collecting() as found:
        top_k(torch.empty(*shape, device="meta", dtype=dtype), k)
    (variant,) = found
    return facts_of(launcher.kernel(variant.kernel).function, variant)


@pytest.mark.parametrize(
    ("dtype", "n", "k", "most"),
    [(torch.bfloat16, 1024, 20, 96), (torch.float16, 2048, 32, 176), (torch.float32, 1024, 20, 128),
     (torch.float32, 8192, 64, 168), (torch.float32, 128, 8, 40)],
)  # fmt: skip
def test_rows_stay_in_registers(dtype, n, k, most):
    found = facts(dtype, 32, 1024, n, k=k)
    assert found.num_spills == 0 and found.num_registers <= most
    assert found.num("LDG") > 0 and found.num("LDL") == 0


def test_one_warp_waits_for_nobody_between_two_turns():
    assert facts(torch.bfloat16, 32, 1024, 1024, k=20).num("BAR.SYNC") == 0


def test_the_first_of_equals_comes_first():
    x = torch.tensor([[1.0, 3.0, 3.0, float("nan"), -2.0, 3.0] + [0.0] * 12])
    assert top_k(x, 4).tolist() == [[3, 1, 2, 5]]
    assert top_k(x, 2, False).tolist() == [[4, 6]]


@pytest.mark.parametrize(
    ("x", "k"),
    [(torch.ones(4, 40).long(), 3), (torch.ones(4, 9000), 3), (torch.ones(4, 200), 65), (torch.ones(4, 40), 41)],
)
def test_what_no_kernel_takes_is_said(x, k):
    assert not supports("top_k", x, k, True) and supports("top_k", x, k, True).reason
