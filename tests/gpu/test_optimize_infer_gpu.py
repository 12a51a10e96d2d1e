"""Rewrites of large inference on a GPU: patches, pointwise convolutions with their ends, GELU between products."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "unit" / "optimizer"))

import torch.nn.functional as F
from bottlenecks import Bottleneck, settled
from torch import nn

from ridgeline.optimizer.backend import Report, compiled
from ridgeline.optimizer.in_place import patch_embedding as patches
from ridgeline.optimizer.in_place.substitution import apply, revert
from ridgeline.optimizer.rewrites.conv import batch_norm_epilogue as pointwise
from ridgeline.optimizer.rewrites.conv import stem as stems
from ridgeline.optimizer.rewrites.linear import activation_epilogue as epilogue


def _error(found: Any, meant: Any) -> float:
    return float((found.double() - meant.double()).square().mean().sqrt() / meant.double().square().mean().sqrt())


@pytest.mark.parametrize("compiler", ["none", "inductor"])
@pytest.mark.parametrize("act", [nn.ReLU(inplace=True), nn.SiLU()])
def test_convolutions_with_their_ends_are_as_right_as_eager(compiler: str, act: Any) -> None:
    torch.manual_seed(0)
    model = settled(nn.Sequential(Bottleneck(256, 64, act), Bottleneck(256, 96, act))).cuda()
    x = torch.randn(8, 256, 30, 28, device="cuda").bfloat16().to(memory_format=torch.channels_last)
    report = Report()
    names = ("in-place", "pointwise", *(("convolution-end",) if compiler == "none" else ()))
    with torch.no_grad():
        fast = compiled(model, rewrites=names, compiler=compiler, report=report)
        found, own = fast(x), model(x)
        meant = model.double()(x.double())
    assert report.counts()["pointwise"] == 4, report.refusals
    assert found.stride() == own.stride()
    assert _error(found, meant) < 1.2 * _error(own, meant) + 1e-3


@pytest.mark.parametrize("compiler", ["none", "inductor"])
@pytest.mark.parametrize(("channels", "side", "stride"), [(128, 7, 1), (144, 3, 2), (240, 5, 1)])
def test_convolutions_that_keep_channels_apart_are_as_right_as_eager(
    compiler: str, channels: int, side: int, stride: int
) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(channels, channels, side, stride, padding=side // 2, groups=channels)]
    layers += [nn.BatchNorm2d(channels), nn.SiLU()] if side < 7 else []
    model = settled(nn.Sequential(*layers)).cuda()
    x = torch.randn(8, channels, 56, 56, device="cuda").bfloat16().to(memory_format=torch.channels_last)
    report = Report()
    with torch.no_grad():
        found = compiled(model, rewrites=("in-place", "depthwise"), compiler=compiler, report=report)(x)
        own = model(x)
        meant = model.double()(x.double())
    assert report.counts()["depthwise"] == 1, report.refusals
    assert found.stride() == own.stride()
    assert _error(found, meant) < 1.2 * _error(own, meant) + 1e-3


@pytest.mark.parametrize("compiler", ["none", "inductor"])
@pytest.mark.parametrize(("channels", "groups", "stride"), [(128, 32, 1), (216, 9, 2)])
def test_convolutions_in_groups_are_as_right_as_eager(compiler: str, channels: int, groups: int, stride: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(channels, channels, 3, stride, padding=1, groups=groups), nn.BatchNorm2d(channels), nn.ReLU()]
    model, report = settled(nn.Sequential(*layers)).cuda(), Report()
    x = torch.randn(8, channels, 56, 56, device="cuda").bfloat16().to(memory_format=torch.channels_last)
    with torch.no_grad():
        found = compiled(model, rewrites=("in-place", "grouped"), compiler=compiler, report=report)(x)
        own = model(x)
        meant = model.double()(x.double())
    assert report.counts()["grouped"] == 1, report.refusals
    assert found.stride() == own.stride()
    assert _error(found, meant) < 1.2 * _error(own, meant) + 1e-3


@pytest.mark.parametrize("compiler", ["none", "inductor"])
@pytest.mark.parametrize("kind", ["plain", "shifted", "called"])
def test_windows_with_biases_are_as_right_as_eager(compiler: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import test_window_bias

    for name, size in (("BATCH", 96), ("WINDOWS", 16), ("ROWS", 49), ("DIM", 32)):
        monkeypatch.setattr(test_window_bias, name, size)
    torch.manual_seed(0)
    model, report = test_window_bias.Windows(kind).cuda().bfloat16(), Report()
    x = torch.randn(96, 49, 4 * 32, device="cuda").bfloat16()
    with torch.no_grad():
        found = compiled(model, rewrites=("window-attention",), compiler=compiler, report=report)(x)
        own, meant = model(x), model.double()(x.double())
    assert report.counts()["window-attention"] == 1, report.refusals
    assert _error(found, meant) < 1.2 * _error(own, meant) + 1e-3


@pytest.mark.parametrize("compiler", ["none", "inductor"])
def test_group_norms_between_convolutions_are_as_right_as_eager_and_leave_channels_last(compiler: str) -> None:
    from test_patch_embedding import Residual

    torch.manual_seed(0)
    model, report = Residual(320).cuda().bfloat16().eval().to(memory_format=torch.channels_last), Report()
    x = torch.randn(2, 320, 64, 64, device="cuda").bfloat16().to(memory_format=torch.channels_last)
    with torch.no_grad():
        found = compiled(model, rewrites=("group-norm-last",), compiler=compiler, report=report)(x)
        own, meant = model(x), model.double()(x.double())
    assert report.counts()["group-norm-last"] == 2, report.refusals
    assert found.stride() == own.stride()
    assert _error(found, meant) < 1.2 * _error(own, meant) + 1e-3


@pytest.mark.parametrize("compiler", ["none", "inductor"])
def test_positions_along_sequences_are_as_right_as_eager(compiler: str) -> None:
    from test_positional_conv import Positions

    torch.manual_seed(0)
    model, report = Positions(1024, 128, 16).cuda().bfloat16().eval(), Report()
    x = torch.randn(4, 499, 1024, device="cuda").bfloat16()
    with torch.no_grad():
        names = ("sequence-convolution", "weight-norm")
        found = compiled(model, rewrites=names, compiler=compiler, report=report)(x)
        own, meant = model(x), model.double()(x.double())
    assert report.counts() == dict.fromkeys(names, 1), report.refusals
    assert found.stride() == own.stride()
    assert _error(found, meant) < 1.2 * _error(own, meant) + 1e-3


@pytest.mark.parametrize("compiler", ["none", "inductor"])
def test_convolutions_of_one_tap_are_as_right_as_eager(compiler: str) -> None:
    from test_positional_conv import Points

    torch.manual_seed(0)
    model, report = Points().cuda().bfloat16().eval(), Report()
    x = torch.randn(8, 64, 2048, device="cuda").bfloat16()
    with torch.no_grad():
        found = compiled(model, rewrites=("sequence-last",), compiler=compiler, report=report)(x)
        own, meant = model(x), model.double()(x.double())
    assert report.counts() == {"sequence-last": 3}, report.refusals
    assert found.stride() == own.stride()
    assert _error(found, meant) < 1.2 * _error(own, meant) + 1e-3


@pytest.mark.parametrize("compiler", ["none", "inductor"])
@pytest.mark.parametrize("norms", [False, True])
def test_convolutions_along_sequences_are_as_right_as_eager(compiler: str, norms: bool) -> None:
    from test_positional_conv import Front

    torch.manual_seed(0)
    model, report = Front(norms=norms, viewed=False).cuda().bfloat16().eval(), Report()
    x = torch.randn(8, 64, 4001, device="cuda").bfloat16()
    with torch.no_grad():
        found = compiled(model, rewrites=("sequence-last",), compiler=compiler, report=report)(x)
        own, meant = model(x), model.double()(x.double())
    assert report.counts()["sequence-last"] == 3, report.refusals
    assert _error(found, meant) < 1.2 * _error(own, meant) + 1e-3


@pytest.mark.parametrize("compiler", ["none", "inductor"])
def test_sequences_whose_channels_stay_apart_are_as_right_as_eager(compiler: str) -> None:
    """Both ways of a convolution of every channel by itself, raced; the layer before it is gated."""
    from ridgeline.optimizer.rewrites.conv import positional_conv as positions

    torch.manual_seed(0)
    wide, apart = torch.nn.Conv1d(256, 512, 1), torch.nn.Conv1d(256, 256, 31, padding=15, groups=256)
    layers = (wide, torch.nn.GLU(dim=1), apart, torch.nn.SiLU(), torch.nn.Conv1d(256, 256, 1))
    model, report = torch.nn.Sequential(*layers).cuda().bfloat16().eval(), Report()
    x = torch.randn(8, 256, 501, device="cuda").bfloat16()
    with torch.no_grad():
        names = ("sequence-last", "sequence-apart")
        found = compiled(model, rewrites=names, compiler=compiler, report=report)(x)
        own, meant = model(x), model.double()(x.double())
    assert report.counts() == {"sequence-last": 1, "sequence-apart": 1}, report.refusals
    assert found.stride() == own.stride()
    assert _error(found, meant) < 1.2 * _error(own, meant) + 1e-3
    raced = [ways for key, ways in positions.CONTEST.seconds.items() if key[0] == "apart"]
    assert raced and all(set(ways) == {"library", "ours"} for ways in raced)


def test_what_the_host_decides_inside_of_is_captured_in_pieces_and_results_stay() -> None:
    from ridgeline.engine.example_inputs import Inputs
    from ridgeline.optimizer.search.candidate import Candidate, build

    class Deciding(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = (torch.nn.Linear(256, 256) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            return self.last(y if float(y.float().sum()) > 0 else -y)

    torch.manual_seed(0)
    model = Deciding().cuda().bfloat16().eval()
    given = [torch.randn(64, 256, device="cuda").bfloat16() for _ in range(6)]
    pieces = Candidate(name="torch.compile in pieces", compiler="stock-pieces")
    built = build(pieces, model, Inputs((given[0],), {}), "infer")
    with torch.no_grad(), built.switched() as call:
        found = [call(x) for x in given]
        for x, made in zip(given, found, strict=True):
            torch.testing.assert_close(made, model(x), rtol=2e-2, atol=2e-2)


def test_every_way_of_a_pointwise_convolution_agrees() -> None:
    torch.manual_seed(0)
    rows, filters = (torch.randn(*s, device="cuda").bfloat16() for s in ((4001, 192), (384, 192)))
    added, vectors = torch.randn(4001, 384, device="cuda").bfloat16(), torch.rand(5, 384, device="cuda") + 0.5
    ends = (vectors[0], added, vectors[1], vectors[2], vectors[3], vectors[4], 1e-5, "silu", False)
    ways = pointwise._ways(rows, filters, ends)
    assert len(ways) == 3
    wide = [t.double() if isinstance(t, torch.Tensor) else t for t in ends]
    meant = pointwise.finish(F.linear(rows.double(), filters.double()), *wide)
    for name, way in ways.items():
        assert _error(way(), meant) < 5e-3, name


@pytest.mark.parametrize("size", [(16, 3, 224, 224), (4, 3, 224, 220)])
def test_patches_are_as_right_as_cudnn_and_lie_channels_last(size: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 256, 14, 14, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(size, device="cuda", dtype=torch.bfloat16)
    model = nn.Sequential(layer)
    with torch.no_grad():
        own, meant = model(x), F.conv2d(x.double(), layer.weight.double(), layer.bias.double(), stride=14)
        apply(model, ("patches",))
        found = model(x)
        revert(model)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert _error(found, meant) <= 1.1 * _error(own, meant) + 1e-4
    assert patches.is_patch_layer(layer)


@pytest.mark.parametrize("rewrite", ["gelu", "linear-activation"])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("compiler", ["none", "inductor"])
def test_gelu_between_products_is_as_right_as_eager(compiler: str, approximate: str, rewrite: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(approximate), nn.Linear(1024, 256)).cuda().bfloat16()
    x = torch.randn(1000, 256, device="cuda", dtype=torch.bfloat16)
    report = Report()
    with torch.no_grad():
        found, own = compiled(model, rewrites=(rewrite,), compiler=compiler, report=report)(x), model(x)
        meant = model.double()(x.double())
    assert report.counts() == {rewrite: 1}, report.refusals
    assert _error(found, meant) < 1.2 * _error(own, meant) + 1e-4


@pytest.mark.parametrize("kind", ["relu", "gelu", "gelu_tanh"])
def test_every_way_of_an_activated_product_agrees(kind: str) -> None:
    torch.manual_seed(0)
    x, w, b = (torch.randn(*s, device="cuda").bfloat16() for s in ((3001, 128), (512, 128), (512,)))
    ways = epilogue._ways(b, x, w.t(), kind)
    assert set(ways) == {"apart", "128x64x64", "128x128x64"} | ({"together"} if kind != "gelu" else set())
    act = {"relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda y: F.gelu(y, approximate="tanh")}[kind]
    meant = act(F.linear(x.double(), w.double(), b.double()))
    for name, way in ways.items():
        assert _error(way(), meant) < 5e-3, name


def test_gelu_of_extremes_is_pytorchs() -> None:
    from ridgeline.kernels import gelu

    x = torch.tensor([float("inf"), float("-inf"), float("nan"), -3e38, 3e38, 0.0, -0.0, 13.5, -13.5], device="cuda")
    for dtype in (torch.bfloat16, torch.float16):
        torch.testing.assert_close(gelu(x.to(dtype)), F.gelu(x.to(dtype)), equal_nan=True)


@pytest.mark.parametrize(("side", "filters", "padding"), [(224, 7, 3), (225, 3, 1)])
def test_a_stem_over_squares_is_as_right_as_cudnn(side: int, filters: int, padding: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, side, side, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(64, 3, filters, filters, device="cuda", dtype=torch.bfloat16)
    w = w.contiguous(memory_format=torch.channels_last)
    meant = F.conv2d(x.double(), w.double(), None, 2, padding)
    own, found = F.conv2d(x, w, None, 2, padding), stems.stem(x, w, None, [padding, padding])
    assert found.stride() == own.stride()
    for ours in (False, True):
        squares = stems.squares(x, w, None, [padding, padding], own=ours)
        assert _error(squares, meant) < 1.1 * _error(own, meant) + 1e-4
    assert _error(found, meant) < 1.1 * _error(own, meant) + 1e-4
    assert any(set(found) == {"library", "squares", "squares, one kernel"} for found in stems.CONTEST.seconds.values())


def test_rows_off_sixteen_bytes_take_the_library() -> None:
    rows = torch.randn(4001 * 64 + 1, device="cuda").bfloat16()[1:].view(4001, 64)
    filters = torch.randn(128, 64, device="cuda").bfloat16()
    ends = (None, None, None, None, None, None, 1e-5, "relu", False)
    assert set(pointwise._ways(rows, filters, ends)) == {"library"}
    even = rows.clone()
    pointwise.tiled(even, filters, *ends)
    with pytest.raises(Exception, match="16 bytes"):
        pointwise.tiled(rows, filters, *ends)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: Any, attention_mask: Any = None) -> Any:
        y = self.inner(x)
        return y if attention_mask is None else y * attention_mask.unsqueeze(-1).to(y.dtype)


def test_a_mask_is_looked_at_while_the_call_is_already_queued() -> None:
    from ridgeline.engine.example_inputs import Inputs
    from ridgeline.optimizer.search.candidate import Candidate, build

    torch.manual_seed(0)
    model = Masked().cuda().eval()
    ones = torch.ones(4, 8, dtype=torch.int64, device="cuda")
    some = ones.clone()
    some[1, 5:] = 0
    x, y = (torch.randn(4, 8, 64, device="cuda") for _ in range(2))
    inputs = Inputs((x,), {"attention_mask": ones})
    built = build(Candidate(name="a", graphed=True, unmasked=True), model, inputs, "infer")
    with torch.no_grad(), built.switched() as call:
        assert call.call.is_pure and call.holds.asked((x,), {"attention_mask": some})() is False
        for mask in (ones, some, ones, some.bool(), None):
            torch.testing.assert_close(call(y, attention_mask=mask), model(y, attention_mask=mask))
    assert call.call.replays >= 4
    built.undo()


class Attending(nn.Module):
    """As in Whisper: queries scaled beforehand, all three laid dense."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.out, self.heads = nn.Linear(width, width), heads

    def forward(self, x: Any) -> Any:
        b, rows, width = x.shape
        shape = (b, rows, self.heads, width // self.heads)
        q = (self.q(x) * 0.125).view(shape).transpose(1, 2).contiguous()
        k, v = (layer(x).view(shape).transpose(1, 2).contiguous() for layer in (self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, scale=1.0).transpose(1, 2).contiguous()
        return x + self.out(y.reshape(b, rows, width))


@pytest.mark.parametrize("compiler", ["none", "inductor"])
def test_attention_that_reads_heads_in_place_is_as_right_as_eager(compiler: str) -> None:
    torch.manual_seed(0)
    model = Attending(512, 8).cuda().bfloat16()
    x = torch.randn(4, 300, 512, device="cuda", dtype=torch.bfloat16)
    report = Report()
    names = ("attention-layout", "horizontal", "dense-rows")
    with torch.no_grad():
        found, own = compiled(model, rewrites=names, compiler=compiler, report=report)(x), model(x)
        meant = model.double()(x.double())
    assert report.counts()["attention-layout"] == 1, report.refusals
    assert found.stride() == own.stride()
    assert _error(found, meant) < 1.2 * _error(own, meant) + 1e-4


def test_experts_of_ours_inside_of_compiled_blocks_are_as_right_as_eager() -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("transformers.integrations.moe")
    from ridgeline.engine.example_inputs import Inputs
    from ridgeline.optimizer.search.candidate import Candidate, build

    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "intermediate_size": 512, "head_dim": 64, "num_experts": 8,
             "num_experts_per_tok": 2, "moe_intermediate_size": 128}  # fmt: skip
    config = transformers.Qwen3MoeConfig(**sizes)
    model = transformers.Qwen3MoeForCausalLM(config).to(device="cuda", dtype=torch.bfloat16).eval()
    exact = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    exact.load_state_dict(model.state_dict())
    given = {"input_ids": torch.randint(0, 512, (2, 128), device="cuda"), "use_cache": False}
    candidate = Candidate(name="x", compiler="inductor", scope="blocks", substituted=("experts",), graphed=True)
    with torch.no_grad():
        own = model(**given).logits
        built = build(candidate, model, Inputs((), given), "infer")
        with built.switched() as call:
            found = call(**given).logits.clone()
        built.release()
        meant = exact.to(device="cuda", dtype=torch.float64)(**given).logits
    close = (found.double() - meant).norm(dim=-1) / meant.norm(dim=-1)  # a token near two experts may take the other
    assert close.median() < 1.3 * ((own.double() - meant).norm(dim=-1) / meant.norm(dim=-1)).median() + 1e-3


@pytest.mark.parametrize("compiler", ["none", "inductor"])
def test_a_vocoders_chain_with_channels_last_is_as_right_as_eager(compiler: str) -> None:
    """Dilated convolutions that are added to what they were made of, behind a transposed one, all of them raced."""
    from test_vocoder import Vocoder

    from ridgeline.optimizer.rewrites.conv import positional_conv as positions

    torch.manual_seed(0)
    model, report = Vocoder(128).cuda().bfloat16().eval(), Report()
    model.last = torch.nn.Conv1d(32, 1, 7, padding=3).cuda().bfloat16()
    x = torch.randn(8, 40, 600, device="cuda").bfloat16()
    with torch.no_grad():
        found = compiled(model, rewrites=("identity", "sequence-chain"), compiler=compiler, report=report)(x)
        own, meant = model(x), model.double()(x.double())
    assert report.counts()["sequence-chain"] == 19, report.refusals
    assert found.stride() == own.stride()
    assert _error(found, meant) < 1.2 * _error(own, meant) + 1e-3
    raced = [ways for key, ways in positions.CONTEST.seconds.items() if key[0] == "raised"]
    assert raced and all(set(ways) == {"library", "last"} for ways in raced)


def test_blocks_are_captured_where_the_model_around_them_brings_a_number_from_the_host() -> None:
    """gpt-oss makes its masks with ``torch.tensor(0.0, device=…)``: the host waits for that copy."""
    from ridgeline.engine.example_inputs import Inputs
    from ridgeline.optimizer.search.candidate import Candidate, build

    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = (torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
            self.blocks = torch.nn.ModuleList(torch.nn.Sequential(*settled_copies(sizes)) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = torch.arange(x.shape[0], device=x.device)[:, None] % 2 == 0
            x = x + torch.where(kept, torch.tensor(0.0, device=x.device, dtype=x.dtype), 1.0)
            for block in self.blocks:
                x = x + block(x)
            return x

    def settled_copies(layers: Any) -> list[Any]:
        import copy

        return [copy.deepcopy(each) for each in layers]

    torch.manual_seed(0)
    model = Masked().cuda().bfloat16().eval()
    given = [torch.randn(64, 256, device="cuda").bfloat16() for _ in range(3)]
    blocks = Candidate(name="blocks + graph", compiler="inductor", scope="blocks", graphed=True)
    built = build(blocks, model, Inputs((given[0],), {}), "infer")
    with torch.no_grad(), built.switched() as call:
        for x in given:
            torch.testing.assert_close(call(x), model(x), rtol=2e-2, atol=2e-2)
    assert built.call.replays >= 3, built.call.misses


@pytest.mark.parametrize("compiler", ["none", "inductor"])
@pytest.mark.parametrize(
    ("rows", "dim", "causal"), [(40, 24, False), (16, 64, False), (77, 64, True), (99, 128, False)]
)
def test_attention_of_few_rows_is_as_right_as_eager(compiler: str, rows: int, dim: int, causal: bool) -> None:
    """Both ways, raced: tables, frames of a video at every pixel, short texts."""
    from ridgeline.optimizer.rewrites.attention import short_sequences as short

    def attend(x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.unflatten(-1, (3, 4, dim)).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2) * 2

    torch.manual_seed(0)
    x, report = torch.randn(1024, rows, 12 * dim, device="cuda").bfloat16(), Report()
    short.CONTEST.seconds.clear()
    with torch.no_grad():
        found = compiled(attend, rewrites=("short-attention",), compiler=compiler, report=report)(x)
        own, meant = attend(x), attend(x.double())
    assert report.counts() == {"short-attention": 1}, report.refusals
    assert _error(found, meant) < 1.2 * _error(own, meant) + 1e-3
    (ways,) = short.CONTEST.seconds.values() or ({"library": 0.0, "ours": 0.0},)  # known from the other compiler
    assert set(ways) == {"library", "ours"}
    q = torch.randn(1024, 4, rows, dim, device="cuda").bfloat16()
    bias = short.plain_bias(q, 4, rows, rows, causal)
    ours = short.short_attention(q, q, q, bias, dim**-0.5)
    wide = F.scaled_dot_product_attention(*(q.double(),) * 3, is_causal=causal, scale=dim**-0.5)
    assert _error(ours, wide) < 1e-2
