"""A stream of rows that begins transposed is laid dense once, in blocks and in whole graphs, with the same values."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from ridgeline.engine.example_inputs import Inputs
from ridgeline.optimizer.backend import Report, compiled
from ridgeline.optimizer.in_place import dense_residual as streams
from ridgeline.optimizer.search.candidate import Candidate, build


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Encoder(nn.Module):
    """As in speech: a convolution, its result seen as rows, positions added, layers."""

    def __init__(self, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.conv, self.place = nn.Conv1d(4, width, 3, padding=1), nn.Parameter(torch.randn(20, width))
        self.layers, self.norm = nn.ModuleList(Layer(width) for _ in range(layers)), nn.LayerNorm(width)

    def forward(self, x: Any) -> Any:
        x = self.conv(x).permute(0, 2, 1) + self.place
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


@pytest.fixture(autouse=True)
def _everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "LEAST_NUMBERS", 0)


def test_a_whole_graph_copies_once_and_every_sum_behind_it_is_dense() -> None:
    torch.manual_seed(0)
    model, x, report = Encoder().eval(), torch.randn(2, 4, 20), Report()
    with torch.no_grad():
        found = compiled(model, rewrites=("dense-rows",), report=report, fullgraph=True)(x)
        torch.testing.assert_close(found, model(x), rtol=1e-6, atol=1e-6)
    assert report.counts() == {"dense-rows": 1}, report.refusals


def test_blocks_are_handed_dense_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Encoder().eval(), torch.randn(2, 4, 20)
    copies = []
    kept = streams.is_transposed_rows
    monkeypatch.setattr(
        streams, "is_transposed_rows", lambda value: kept(value) and not copies.append(tuple(value.stride()))
    )
    candidate = Candidate(name="blocks", rewrites=("identity",), scope="blocks")
    built = build(candidate, model, Inputs((x,), {}), "infer")
    with torch.no_grad(), built.switched() as call:
        copies.clear()
        found = call(x)
        assert copies == [(320, 1, 20)]  # the first layer's input; the others' are dense
        torch.testing.assert_close(found, model(x), rtol=1e-6, atol=1e-6)
    built.undo()


def test_what_is_not_normalized_along_its_columns_is_left_as_it_lies() -> None:
    turned = torch.randn(2, 16, 20).transpose(1, 2)
    assert streams.contiguous_entry(Layer(16))(turned).is_contiguous()
    assert streams.contiguous_entry(Layer(8))(turned) is turned
    assert streams.contiguous_entry(nn.Conv1d(20, 20, 3))(turned) is turned
    image = torch.randn(2, 16, 4, 4).contiguous(memory_format=torch.channels_last)
    assert not streams.is_transposed_rows(image)


class Attending(nn.Module):
    """As in Whisper: queries scaled beforehand, all three laid dense."""

    def __init__(self, width: int, heads: int, factor: float) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.heads, self.factor = heads, factor

    def forward(self, x: Any) -> Any:
        b, rows, width = x.shape
        shape = (b, rows, self.heads, width // self.heads)
        q = (self.q(x) * self.factor).view(shape).transpose(1, 2).contiguous()
        k, v = (layer(x).view(shape).transpose(1, 2).contiguous() for layer in (self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, scale=1.0)
        return y.transpose(1, 2).reshape(b, rows, width)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [0.25, 0.3])
def test_attention_reads_heads_where_they_lie_and_scales_itself(dtype: Any, factor: float) -> None:
    torch.manual_seed(0)
    model, x = Attending(64, 4, factor).eval(), torch.randn(2, 12, 64)
    meant = model(x)
    model, report = model.to(dtype), Report()
    with torch.no_grad():
        found, own = compiled(model, rewrites=("attention-layout",), report=report)(x.to(dtype)), model(x.to(dtype))
    assert [match.what for match in report.matches] == ["3 copies and a scaling less"], report.refusals
    assert found.stride() == own.stride()
    error, eager = ((y.float() - meant).norm() / meant.norm() for y in (found, own))
    assert error < 1.3 * eager + 1e-4


def test_attention_in_float32_is_left_as_it_is() -> None:
    report = Report()
    with torch.no_grad():
        compiled(Attending(64, 4, 0.25), rewrites=("attention-layout",), report=report)(torch.randn(2, 12, 64))
    assert report.counts() == {}
