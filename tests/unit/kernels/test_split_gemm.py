"""Float32 products from halves without a GPU: what is refused, what the compiler makes of it, why it is accurate."""

import pytest
import torch

pytest.importorskip("triton")

from ridgeline.kernels import launcher, matmul, supports
from ridgeline.kernels.compiler import facts_of
from ridgeline.kernels.split_gemm import config


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def collected(a, b, **given):
    with launcher.collecting() as found:
        matmul(a, b, **given)
    return {variant.kernel: variant for variant in found}


def test_it_is_a_product():
    a, b, bias = drawn(3, 4, 300), drawn(300, 8), drawn(8)
    torch.testing.assert_close(matmul(a, b, bias), a @ b + bias)
    torch.testing.assert_close(matmul(drawn(3, 4, 300), drawn(3, 300, 8)), drawn(3, 4, 300) @ drawn(3, 300, 8))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((drawn(4, 30), drawn(30, 8)), "more accurate"),
        ((drawn(4, 300).half(), drawn(300, 8).half()), "float32"),
        ((drawn(4, 300), drawn(301, 8)), "do not multiply"),
        ((drawn(2, 4, 300), drawn(3, 300, 8)), "[Z, M, K]"),
        ((drawn(4, 300), drawn(300, 8), drawn(4)), "bias"),
    ],
)
def test_what_no_kernel_takes_is_said(args, words):
    assert words in supports("matmul", *args).reason


@pytest.mark.parametrize("turned", [False, True])
def test_halves_come_by_asynchronous_copies_into_the_tensor_cores(turned):
    a, b = torch.empty(2048, 4096, device="meta"), torch.empty(4096, 4096, device="meta")
    found = collected(a, b.t() if turned else b)
    made = facts_of(launcher.kernel("matmul_halves").function, found["matmul_halves"])
    assert made.num_spills == 0 and made.shared_bytes <= 227 * 1024
    assert made.num("HGMMA") % 3 == 0 and made.num("HGMMA") > 0, "three products a block"
    assert made.num("LDGSTS.E.BYPASS.128") == made.num("LDGSTS") > 0


def test_sizes_that_are_no_whole_vectors_are_filled_up():
    found = collected(torch.empty(8205, 2949, device="meta"), torch.empty(2949, 5921, device="meta"))
    made = facts_of(launcher.kernel("matmul_halves").function, found["matmul_halves"])
    assert made.num("LDGSTS.E.BYPASS.128") == made.num("LDGSTS") > 0


def test_small_products_get_small_tiles():
    assert config.choose(4096, 4096, 4096, 132).rows == 128
    assert config.choose(512, 512, 1024, 132).rows == 64


@pytest.mark.parametrize("k", [32, 64])
def test_sums_of_one_block_leave_room_for_a_second_program(k):
    """Nothing is carried from block to block: half the registers, and one program waits while another writes."""
    found = collected(torch.empty(32768, k, device="meta"), torch.empty(k, 32768, device="meta"))["matmul_halves"]
    made = facts_of(launcher.kernel("matmul_halves").function, found)
    assert dict(found.constants)["SHORT"] and made.num_spills == 0
    assert made.num_registers <= 128 and 2 * made.shared_bytes <= 227 * 1024
    assert made.num("STG.E.128") == made.num("STG") - 1, "besides, whether the tile has NaN"


@pytest.mark.parametrize("n", [32, 48])
def test_many_rows_of_few_columns_are_read_once(n):
    found = collected(torch.empty(204800, 512, device="meta"), torch.empty(512, n, device="meta"))
    assert "matmul_split" not in found and dict(found["matmul_thin"].constants)["TURNED"]
    made = facts_of(launcher.kernel("matmul_thin").function, found["matmul_thin"])
    assert made.num_spills == 0 and made.shared_bytes <= 227 * 1024
    assert "matmul_split" in collected(torch.empty(204800, 512, device="meta"), torch.empty(512, 65, device="meta"))


def test_two_halves_hold_what_float32_sums_lose():
    """The arithmetic of the kernel in PyTorch: its error against float64 is below float32's own."""
    a, b = (torch.rand(64, 2048, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    meant = a.double() @ b.double().t()

    def split(x):
        scale = 2.0 ** (14 - x.abs().amax(1, keepdim=True).log2().floor())
        high = (x * scale).half()
        return high.double(), (x * scale - high.float()).half().double(), scale.double()

    (ah, al, sa), (bh, bl, sb) = split(a), split(b)
    found = (ah @ bh.t() + ah @ bl.t() + al @ bh.t()) / sa / sb.t()
    ours, theirs = ((y.double() - meant).norm() / meant.norm() for y in (found, a @ b.t()))
    assert ours < theirs
    assert ((ah @ bh.t()) / sa / sb.t() - meant).norm() / meant.norm() > 10 * theirs


def cut_off(x):
    """Float64 numbers with float32's 24 bits, the rest cut off, as tensor cores do."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2.0**24).trunc() / 2.0**24, exponent)


def emulated(a, b, together):
    """The sums of ``matmul_thin``: eight terms a step, cut off, over 32 of them; blocks added in float32."""
    whole = sums = torch.zeros(a.shape[0], b.shape[1])
    for block, first in enumerate(range(0, a.shape[1], 32)):
        part = torch.zeros(sums.shape, dtype=torch.float64)
        for i in range(first, min(first + 32, a.shape[1]), 8):
            part = cut_off(part + a[:, i : i + 8].double() @ b[i : i + 8].double())
        sums = sums + part.float()
        if block % together == together - 1:
            whole, sums = whole + sums, torch.zeros_like(sums)
    return whole + sums


@pytest.mark.parametrize("positive", [True, False])
def test_sums_of_sums_round_less_than_one_chain(positive):
    draw = torch.rand if positive else torch.randn
    a, b = (draw(shape, generator=torch.Generator().manual_seed(3)) for shape in ((12, 8192), (8192, 16)))
    meant = a.double() @ b.double()

    def missed(together):
        return float((emulated(a, b, together).double() - meant).norm() / meant.norm())

    assert missed(config.TOGETHER) < 0.75 * missed(1 << 20)
    assert missed(config.TOGETHER) < (1.5e-7 if positive else 2.2e-7)
