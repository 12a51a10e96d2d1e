"""Ways to compute a convolution and a product on the device: each agrees with float64 as far as the library does."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from ridgeline.optimizer.rewrites.conv import elementwise_epilogue as chains
from ridgeline.optimizer.rewrites.linear import gemv as vectors
from ridgeline.optimizer.rewrites.linear import split_gemm as halves


def error(found, meant):
    return float((found.double() - meant).norm() / meant.norm())


@pytest.mark.parametrize("pool", ["", "mean"])
@pytest.mark.parametrize(
    ("transposed", "inputs", "outputs"),
    [(False, 32, 48), (False, 3, 20), (True, 32, 16)],
    ids=["plain", "thin", "turned"],
)
def test_every_way_to_convolve_is_as_accurate_as_the_library(transposed, inputs, outputs, pool):
    torch.manual_seed(0)
    x = torch.rand(3, inputs, 33, 30, device="cuda")
    weight = torch.randn(*((inputs, outputs) if transposed else (outputs, inputs)), 3, 3, device="cuda")
    bias, vectors = torch.randn(outputs, device="cuda"), torch.randn(1, outputs, device="cuda")
    settings = ([2, 2] if transposed else [1, 1], [1, 1], [1, 1], [0, 0], 1, transposed)
    wide = [each.double() for each in (x, weight, bias)]
    call = F.conv_transpose2d if transposed else F.conv2d
    meant = F.gelu(call(*wide, settings[0], 1)) * vectors.double().view(1, -1, 1, 1)
    meant = meant.mean((2, 3), keepdim=True) if pool else meant
    args = (x, weight, bias, vectors, settings, f"gelu scales@0{'|' if pool else ''}{pool}")
    ways = chains._ways(("test", transposed, inputs, pool, x.device), *args)
    own = error(ways["library"](*args[:4]), meant)
    assert own < 2e-3 and len(ways) >= 2
    for name, way in ways.items():
        assert error(way(*args[:4]), meant) <= 2 * own + 1e-6, name


@pytest.mark.parametrize(
    ("m", "n", "k", "linear"), [(128, 512, 1024, True), (300, 260, 777, False), (256, 384, 64, False)]
)
def test_every_way_to_multiply_is_as_accurate_as_float32(m, n, k, linear):
    torch.manual_seed(0)
    a, bias = torch.rand(m, k, device="cuda"), torch.randn(n, device="cuda") if linear else None
    b = torch.rand(n, k, device="cuda").t() if linear else torch.rand(k, n, device="cuda")
    meant = a.double() @ b.double() + (bias.double() if linear else 0)
    own = error(halves._library(a, b, bias), meant)
    for name in ("digits", "halves") if linear else ("halves",):
        assert error(halves._WAYS[name](a, b, bias), meant) <= 2 * own + 5e-7, name


@pytest.mark.parametrize(
    ("m", "n", "k", "name"),
    [(1000, 3000, 64, "halves"), (1000, 3001, 40, "halves"), (3000, 1000, 32, "halves"), (9000, 48, 512, "tall"),
     (9000, 20, 300, "tall")],
)  # fmt: skip
@pytest.mark.parametrize("linear", [False, True])
def test_products_of_few_terms_or_columns_are_as_accurate_as_float32(m, n, k, name, linear):
    torch.manual_seed(0)
    a, bias = torch.rand(m, k, device="cuda"), torch.randn(n, device="cuda") if linear else None
    b = torch.randn(n, k, device="cuda").t() if linear else torch.randn(k, n, device="cuda")
    meant = a.double() @ b.double() + (bias.double() if linear else 0)
    own = error(halves._library(a, b, bias), meant)
    assert error(halves._WAYS[name](a, b, bias), meant) <= 2 * own + 5e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("n", "k"), [(1024, 20), (128, 8), (3000, 33)])
def test_places_of_the_largest_are_in_order_with_ties_and_what_is_no_number(dtype, n, k):
    from ridgeline.kernels.top_k.op import top_k
    from ridgeline.kernels.top_k.reference import forward

    torch.manual_seed(0)
    x = torch.randint(-50, 50, (9, 500, n), device="cuda").to(dtype)
    x[0, :, 3], x[1, :, 7], x[2, 5, [9, 17]], x[3, 0] = float("-inf"), float("inf"), float("nan"), float("-inf")
    for largest in (True, False):
        assert torch.equal(top_k(x, k, largest), forward(x.float(), k, largest))


@pytest.mark.parametrize("inputs", [3, 32], ids=["thin", "wide"])
def test_what_is_no_number_stays_none_in_every_way_to_convolve(inputs):
    torch.manual_seed(0)
    x, weight = torch.rand(3, inputs, 33, 30, device="cuda"), torch.randn(48, inputs, 3, 3, device="cuda")
    settings = ([1, 1], [0, 0], [1, 1], [0, 0], 1, False)  # what NaN times padding is hangs on who convolves
    ways = chains._ways(("no number", inputs, x.device), x, weight, None, None, settings, "")
    ways = {name: way for name, way in ways.items() if "library" not in name and name != "channels last"}
    x[0, 1, 9, 9], x[1, 2, 20, 20], x[2, 0, 5, 5] = 0.0, 0.0, float("inf")
    x[0, 1, 9, 9] /= x[1, 2, 20, 20]
    weight[7, 0, 0, 0] = x[0, 1, 9, 9]
    assert int(x[0, 1, 9, 9].view(torch.int32)) & 0x7FFFFFFF == 0x7FFFFFFF, "NaN as a GPU makes it: nothing but ones"
    meant = F.conv2d(x.cpu(), weight.cpu()).to(x.device)  # cuDNN may spread what it meets over tiles
    assert ways
    for name, way in ways.items():
        found = way(x, weight, None, None)
        assert torch.equal(found.isnan(), meant.isnan()), name
        assert torch.equal(found.isinf(), meant.isinf()), name


def kept(x, how):
    """TensorFloat-32's ten bits of numbers: the nearest, cut off, or the nearest and of two the even one."""
    bits = x.view(torch.int32)
    return ((bits + (0x1000, 0, 0xFFF + ((bits >> 13) & 1))[how]) & -8192).view(torch.float32).double()


WAYS = {name: way for name, way in chains.config.ROUNDINGS.items() if name != "exact"}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("rounding", WAYS)
def test_each_factor_of_a_convolution_is_rounded_or_cut_off_as_asked(rounding, last):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 32, 33, 30, device="cuda"), torch.randn(32, 48, 3, 3, device="cuda")
    x, weight = ((each.view(torch.int32) & -4096).view(torch.float32) for each in (x, weight))  # half of them ties
    tile = chains.config.Tile(128, 64, 32, 4, 3, rounding=rounding, last=last)
    found = chains._ours(([1, 1], [1, 1], [1, 1], [0, 0], 1, True), "", tile, x, weight, None, None)
    for other, (image_how, weights_how) in WAYS.items():
        meant = F.conv_transpose2d(kept(x, image_how), kept(weight, weights_how), padding=1)
        assert (error(found, meant) < 2e-5) == (other == rounding), other


def test_a_race_on_the_device_is_decided_once():
    x, weight = torch.rand(2, 16, 64, 64, device="cuda"), torch.randn(32, 16, 3, 3, device="cuda")
    settings = ([1, 1], [0, 0], [1, 1], [0, 0], 1, False)
    first = chains.chained_convolution(x, weight, None, None, *settings, "relu")
    num = len(chains.CONTEST.won)
    again = chains.chained_convolution(x, weight, None, None, *settings, "relu")
    assert len(chains.CONTEST.won) == num and torch.equal(first, again)
    torch.testing.assert_close(first, F.relu(F.conv2d(x, weight)), rtol=1e-2, atol=5e-2)


@pytest.mark.parametrize(("m", "n", "k", "weight"), [(256, 256, 65536, False), (130, 200, 32768, True)])
def test_long_sums_in_pieces_are_as_accurate_as_the_library(m, n, k, weight):
    torch.manual_seed(0)
    a, b = torch.rand(m, k, device="cuda"), torch.rand(n, k, device="cuda").t()
    b = b if weight else b.contiguous()
    meant = a.double() @ b.double()
    assert halves.num_pieces(a, b) > 1
    assert error(halves._in_pieces(a, b, None), meant) <= 2 * error(a @ b, meant) + 5e-7


@pytest.mark.parametrize("shape", [(300, 70001), (2048, 65536)])
def test_a_matrix_times_a_vector_is_as_accurate_as_the_library(shape):
    torch.manual_seed(0)
    a, b = torch.rand(shape, device="cuda"), torch.rand(shape[1], 1, device="cuda")
    meant = a.double() @ b.double()
    assert error(vectors._ours(a, b), meant) <= 2 * error(a @ b, meant) + 5e-7


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("length", "keys", "width"), [(1000, 1000, 32), (512, 777, 64), (300, 300, 96), (130, 65, 128)]
)
def test_float32_attention_is_as_accurate_as_the_librarys(length, keys, width, causal):
    torch.manual_seed(0)
    keys = length if causal else keys
    q, k, v = (torch.rand(2, num, 4, width, device="cuda").transpose(1, 2) for num in (length, keys, keys))
    meant = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)
    own = error(F.scaled_dot_product_attention(q, k, v, is_causal=causal), meant)
    for turned in (False, True):
        found = halves.attend(q, k, v, width**-0.5, causal, turned)
        assert error(found, meant) <= 2 * own + 2e-7 and found.transpose(1, 2).is_contiguous() == turned
    again = halves.raced_attention(q, k, v, width**-0.5, causal, True)
    assert error(again, meant) <= 2 * own + 2e-7


def test_wide_attention_is_found_and_laid_as_the_librarys_on_the_device():
    from ridgeline.optimizer.backend import Report, compiled

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 256, 512, device="cuda") for _ in range(3))
    report = Report()
    with torch.no_grad():
        own = F.scaled_dot_product_attention(q, k, v)
        found = compiled(F.scaled_dot_product_attention, rewrites=["wide-attention"], report=report)(q, k, v)
        meant = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert report.counts() == {"wide-attention": 1} and found.stride() == own.stride()
    assert error(found, meant) <= 2 * error(own, meant) + 1e-6
