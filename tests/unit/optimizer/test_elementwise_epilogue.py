"""Convolutions and what is behind them, pooling, scans, long rows, sums: what is matched, and that it is right."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("triton")

from ridgeline.optimizer.backend import Report, compiled
from ridgeline.optimizer.rewrites.conv import elementwise_epilogue as chains
from ridgeline.optimizer.rewrites.linear import split_gemm as halves
from ridgeline.optimizer.rewrites.rows import long_rows as lengths
from ridgeline.optimizer.rewrites.rows import pool_cumsum as windows


class Behind(nn.Module):
    """A layer, something with the same number of channels, and a function of both."""

    def __init__(self, layer: nn.Module, function: Any, shape: tuple[int, ...] = (6, 1, 1)) -> None:
        super().__init__()
        self.layer, self.function, self.by = layer, function, nn.Parameter(torch.randn(shape))

    def forward(self, x: Any) -> Any:
        return self.function(self.layer(x), self.by)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # what PyTorch begins with
    monkeypatch.setattr(torch.backends.cudnn, "enabled", True)
    for module in (chains, lengths, windows):
        monkeypatch.setattr(module, "LEAST_ELEMENTS", 1)
    monkeypatch.setattr(lengths, "LEAST_COLS", 1)


def ran(model: Any, inputs: tuple[Any, ...], *rewrites: str) -> tuple[Any, Any, list[str]]:
    report = Report()
    with torch.no_grad():
        found = compiled(model, rewrites=rewrites, report=report)(*inputs)
        meant = model(*inputs)
    assert not report.refusals
    return found, meant, [match.what for match in report.matches]


CONV = lambda: nn.Conv2d(3, 6, 3)


@pytest.mark.parametrize(
    ("layer", "function", "chain"),
    [
        (CONV, lambda y, by: F.mish(F.relu(y) + by), "relu shifts@0 mish"),
        (CONV, lambda y, by: torch.tanh(y - by) / 2, "shifts@0 tanh scale=0.5"),
        (CONV, lambda y, by: (torch.min(y, torch.tensor(0.5)) + by) * 2, "most=0.5 shifts@0 scale=2.0"),
        (CONV, lambda y, by: (lambda z: z * torch.clamp((z + 3) / 6, 0, 1))(F.relu(y)), "relu hardswish"),
        (CONV, lambda y, by: torch.tanh(F.softplus(y)) * y, "mish"),
        (CONV, lambda y, by: F.gelu(F.leaky_relu(y * by)), "scales@0 leaky=0.01 gelu"),
        (lambda: nn.ConvTranspose2d(3, 6, 3, 2, 1, 1), lambda y, by: F.hardtanh(torch.sigmoid(y) * y),
         "silu least=-1.0 most=1.0"),
        (CONV, lambda y, by: torch.tanh((y * 2).min(1, keepdim=True)[0]), "scale=2.0|min"),
        (CONV, lambda y, by: y.max(dim=1)[0], "|max"),
        (CONV, lambda y, by: torch.logsumexp(F.relu(y), dim=1, keepdim=True), "relu|logsumexp"),
        (CONV, lambda y, by: torch.sigmoid(torch.softmax(y, 1)), "|softmax|sigmoid"),
        (CONV, lambda y, by: torch.sigmoid((torch.softmax(y * by, 1) + by) * 2),
         "scales@0|softmax|shifts@1 scale=2.0 sigmoid"),
        (CONV, lambda y, by: torch.softmax(y, 1).permute(0, 2, 3, 1).sigmoid(), "|softmax"),
        (CONV, lambda y, by: F.adaptive_avg_pool2d(F.gelu(y), 1).squeeze(-1), "gelu|mean"),
        (CONV, lambda y, by: (F.relu(y) * by).mean((-1, 2)), "relu scales@0|mean"),
        (CONV, lambda y, by: F.relu(y).mean([2, 3], keepdim=True) + by, "relu|mean"),
        (CONV, lambda y, by: F.adaptive_avg_pool2d(y, (1, 2)), ""),
        (CONV, lambda y, by: y.mean(2), ""),
        (CONV, lambda y, by: y.max(dim=1), ""),
        (CONV, lambda y, by: torch.softmax(y, 2), ""),
        (CONV, lambda y, by: y + y.clone(), ""),
        (CONV, lambda y, by: F.gelu(y, approximate="tanh"), ""),
        (CONV, lambda y, by: torch.relu(y.permute(0, 2, 3, 1)), ""),
        (CONV, lambda y, by: y + torch.ones(10, 10), ""),
    ],
)  # fmt: skip
def test_what_follows_a_convolution_goes_into_it(layer: Any, function: Any, chain: str) -> None:
    found, meant, whats = ran(Behind(layer(), function), (torch.randn(2, 3, 12, 12),), "convolution-chain")
    torch.testing.assert_close(found, meant, rtol=1e-5, atol=1e-5)
    assert len(whats) == 1 and whats[0].endswith(f", {chain}" if chain else ")")


def test_a_convolution_of_a_convolution_goes_into_a_kernel_too() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 6, 1), nn.ReLU())
    found, meant, whats = ran(model, (torch.randn(2, 4, 12, 12),), "convolution-chain")
    torch.testing.assert_close(found, meant, rtol=1e-5, atol=1e-5)
    assert len(whats) == 2 and whats[1].endswith(", relu")


def test_networks_of_many_convolutions_keep_their_own() -> None:
    sizes = (3, 4, 5, 6, 7, 8)
    model = nn.Sequential(*(nn.Conv2d(a, b, 3) for a, b in itertools.pairwise(sizes)))
    assert not ran(model, (torch.randn(1, 3, 16, 16),), "convolution-chain")[2]


def test_without_tensor_float_convolutions_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        assert not ran(nn.Conv2d(3, 6, 3), (torch.randn(1, 3, 8, 8),), "convolution-chain")[2]
    finally:
        torch.backends.cudnn.allow_tf32 = before


def exclusive(x: Any) -> Any:
    return torch.cat((torch.zeros_like(x.select(1, 0).unsqueeze(1)), x.narrow(1, 0, x.size(1) - 1).cumsum(1)), 1)


@pytest.mark.parametrize(
    ("function", "inputs", "what"),
    [
        (lambda x: torch.cumsum(x, 1), (torch.randn(3, 9),), "cumsum (3, 9)"),
        (lambda x: x.cumprod(0), (torch.randn(3, 9),), "cumprod (3, 9)"),
        (lambda x: x.flip(1).cumsum(1).flip(1), (torch.randn(3, 9),), "cumsum (3, 9) backwards"),
        (exclusive, (torch.randn(3, 9),), "cumsum (3, 9) before itself"),
        (lambda x, m: (x * m).cumsum(1), (torch.randn(3, 9), torch.randn(3, 9) > 0), "cumsum (3, 9) masked"),
        (lambda x: x.flip(0).cumsum(1).flip(0), (torch.randn(3, 9),), "cumsum (3, 9)"),
        (nn.MaxPool3d(3, 2, 1, 2), (torch.randn(1, 2, 9, 9, 9),), "max pool (1, 2, 9, 9, 9)"),
        (nn.AvgPool1d(4, 1, 2), (torch.randn(1, 2, 9),), "mean pool (1, 2, 9)"),
    ],
)
def test_scans_and_pools_are_found_as_people_write_them(function: Any, inputs: Any, what: str) -> None:
    found, meant, whats = ran(function, inputs, "scan", "pool")
    torch.testing.assert_close(found, meant)
    assert whats == [what]


@pytest.mark.parametrize("pool", [nn.MaxPool2d(3, 2, ceil_mode=True), nn.AvgPool2d(3, 2, 1, count_include_pad=False)])
def test_pools_that_count_otherwise_stay(pool: nn.Module) -> None:
    assert not ran(pool, (torch.randn(1, 2, 8, 8),), "pool")[2]


@pytest.mark.parametrize(
    ("function", "shape", "what"),
    [
        (nn.InstanceNorm2d(4), (2, 4, 5, 3), "norm of rows of 15"),
        (nn.GroupNorm(2, 4), (2, 4, 5, 3), "norm of rows of 30"),
        (nn.LayerNorm((4, 3)), (2, 4, 3), "norm of rows of 12"),
        (lambda x: torch.log_softmax(x, 1), (3, 9), "log_softmax of rows of 9"),
        (lambda x: x / x.abs().mean(1, keepdim=True), (3, 9), "l1 of rows of 9"),
        (lambda x: x / torch.norm(x, p=2, dim=1, keepdim=True), (3, 9), "l2 of rows of 9"),
        (lambda x: torch.softmax(x.view(2, 4, -1), 2).view(2, 4, 5, 3) * torch.arange(4.0).view(1, 4, 1, 1),
         (2, 4, 5, 3), "softmax of rows of 15, scaled"),
        (lambda x: torch.arange(8.0).view(2, 4, 1) * torch.softmax(x, -1), (2, 4, 9), "softmax of rows of 9, scaled"),
        (lambda x: torch.softmax(x, -1) * torch.ones(1), (2, 4, 9), "softmax of rows of 9, scaled"),
        (lambda x: torch.softmax(x, -1) * torch.arange(2.0).view(2, 1, 1), (2, 4, 9), "softmax of rows of 9"),
        (lambda x: torch.softmax(x, -1) * torch.arange(9.0), (2, 4, 9), "softmax of rows of 9"),
        (lambda x: torch.softmax(x, -1) * x, (2, 4, 9), "softmax of rows of 9"),
    ],
)
def test_long_rows_are_found_as_people_write_them(function: Any, shape: Any, what: str) -> None:
    found, meant, whats = ran(function, (torch.randn(*shape),), "long-rows")
    torch.testing.assert_close(found, meant, rtol=1e-5, atol=1e-5)
    assert whats == [what]


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (nn.InstanceNorm2d(4, track_running_stats=True), (2, 4, 5, 3)),
        (lambda x: x / torch.norm(x, p=3, dim=1, keepdim=True), (3, 9)),
        (lambda x: x / x.abs().mean(0, keepdim=True), (3, 9)),
        (lambda x: torch.softmax(x, 0), (3, 9)),
    ],
)
def test_rows_of_another_kind_stay(function: Any, shape: Any) -> None:
    assert not ran(function, (torch.randn(*shape),), "long-rows")[2]


@pytest.mark.parametrize(("width", "causal", "num"), [(512, False, 1), (512, True, 0), (64, False, 0)])
def test_attention_too_wide_for_fused_kernels_is_two_products(width: int, causal: bool, num: int) -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    inputs = tuple(torch.randn(1, 2, 128, width) for _ in range(3))
    found, meant, whats = ran(attend, inputs, "wide-attention")
    torch.testing.assert_close(found, meant, rtol=1e-4, atol=1e-5)
    assert len(whats) == num


def test_wide_attention_may_lay_the_heads_of_a_position_side_by_side() -> None:
    q, k, v = (torch.randn(2, 3, 128, 512) for _ in range(3))
    found = halves.unfused_attention(q, k, v, 512**-0.5, turned=True)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v), rtol=1e-4, atol=1e-5)
    assert found.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(
    ("library", "rounding", "agreeing"),
    [
        ("exact", "exact", {"a"}),
        ("nearest", "nearest", {"a", "b"}),
        ("even", "even", {"a", "b"}),
        ("cut", "cut", {"a", "b"}),
        ("weights cut", "weights cut", {"a", "b"}),
        ("own", "cut", {"a", "b"}),
    ],
)
def test_a_convolution_is_as_accurate_as_pytorchs_and_so_are_its_rivals(
    monkeypatch: pytest.MonkeyPatch, library: str, rounding: str, agreeing: set[str]
) -> None:
    results = {"exact": 1.0, "nearest": 1.001, "cut": 0.9995, "own": 0.9996, "weights cut": 1.0003, "image cut": 1.0004,
               "even": 1.0012}  # fmt: skip
    monkeypatch.setattr(chains, "may_time", lambda device: True)
    monkeypatch.setattr(chains, "_library", lambda settings, chain, *given: torch.tensor(results[library]))
    monkeypatch.setattr(chains, "_ours", lambda settings, chain, tile, *given: torch.tensor(results[tile.rounding]))
    monkeypatch.setattr(chains, "_accuracy", {})
    others: Any = {"a": lambda *given: torch.tensor(1.0), "b": lambda *given: torch.tensor(1.002)}
    tile = chains.config.Tile(128, 128)
    given = (torch.zeros(1, 3, 8, 8), torch.zeros(4, 3, 3, 3), None, None)
    settings = ((1, 1), (0, 0), (1, 1), (0, 0), 1, False)
    found = chains._accuracy_of(("key", torch.device("cpu")), given, settings, "", tile, others)
    assert found == chains.Accuracy(rounding, frozenset(agreeing))


@pytest.mark.parametrize(
    ("inputs", "transposed", "first"),
    [(3, False, ["nearest", "exact"]), (64, False, ["nearest", "even"]), (3, True, ["even", "nearest"])],
)
def test_the_likely_rounding_of_a_convolution_is_compiled_first(
    inputs: int, transposed: bool, first: list[str]
) -> None:
    """Each that is tried is a kernel to compile; cuDNN takes thin images in float32, and transposed ones never."""
    weight = torch.empty(*((inputs, 32) if transposed else (32, inputs)), 3, 3)
    sizes = chains.Sizes(torch.empty(1, inputs, 8, 8), weight, (1, 1), (0, 0), (1, 1), (0, 0), 1, transposed)
    assert chains._likely(sizes)[:2] == first and sorted(chains._likely(sizes)) == sorted(chains.config.ROUNDINGS)
    expected = chains._expected(sizes, [chains.config.Tile(128, 32), chains.config.Tile(256, 32)])
    last = "exact" if "exact" in first else first[0]
    assert [tile.rounding for tile in expected] == [*first, last]


@pytest.mark.parametrize(
    ("function", "num"),
    [
        (F.scaled_dot_product_attention, 1),
        (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5), 1),
        (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=torch.eye(24).bool()), 0),
        (lambda q, k, v: F.scaled_dot_product_attention(q.half(), k.half(), v.half()), 0),
    ],
)
def test_float32_attention_goes_to_the_tensor_cores(
    function: Any, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halves, "LEAST_ATTENTION_FLOPS", 1.0)
    q, k, v = (torch.randn(2, 24, 3, 16).transpose(1, 2) for _ in range(3))
    found, meant, whats = ran(function, (q, k, v), "attention", "float32-attention")
    torch.testing.assert_close(found, meant, rtol=1e-5, atol=1e-5)
    assert sum("float32 attention" in what for what in whats) == num and found.stride() == meant.stride()


def test_float32_attention_of_other_shapes_is_the_librarys() -> None:
    from ridgeline.kernels.split_gemm.attend import fits

    q, k, wide = torch.empty(2, 4, 8, 32), torch.empty(2, 4, 9, 32), torch.empty(2, 4, 8, 256)
    assert fits(q, k, k, False) and not fits(q, k, k, True) and not fits(wide, wide, wide, False)
    assert not fits(q, k[:, :2], k[:, :2], False) and not fits(q.mT.contiguous().mT, k, k, False)
