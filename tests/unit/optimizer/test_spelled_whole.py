"""Whole attention layers in the spellings of code that is no library's: what all rewrites together make of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton")

from ridgeline.optimizer.backend import Report, compiled
from ridgeline.optimizer.rewrites import recommended
from ridgeline.optimizer.rewrites.op_names import call

WIDTH, HEADS, LENGTH = 64, 4, 20


class Letters(nn.Module):
    """Attention by einsum, heads before positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.reshape(*t.shape[:2], HEADS, -1).permute(0, 2, 1, 3) for t in self.qkv(x).chunk(3, -1))
        weights = (torch.einsum("bhid,bhjd->bhij", q, k) * 0.25).softmax(-1)
        return self.out(torch.einsum("bhij,bhjd->bhid", weights, v).permute(0, 2, 1, 3).flatten(2))


class Complex(nn.Module):
    """As Llama was first published: complex angles, a mask of the type of the input, keys repeated for their heads."""

    def __init__(self, num_keys: int = 2) -> None:
        super().__init__()
        self.num_keys, width = num_keys, WIDTH // HEADS
        self.q, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, num_keys * width, bias=False) for _ in range(2))
        angles = torch.outer(torch.arange(32.0), 1e4 ** -(torch.arange(0, width, 2) / width))
        self.table = torch.polar(torch.ones_like(angles), angles)

    def turned(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.table[: x.shape[1]].view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH // HEADS)) for layer in (self.q, self.k, self.v))
        q, k = self.turned(q), self.turned(k)
        k, v = (t.repeat_interleave(HEADS // self.num_keys, dim=2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mask = torch.full((x.shape[1],) * 2, float("-inf"), device=x.device).triu(1).type_as(x)
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]) + mask
        mixed = F.softmax(scores.float(), -1).type_as(q) @ v
        return self.out(mixed.transpose(1, 2).contiguous().view(*x.shape))


class Module(nn.Module):
    """PyTorch's module with its weights asked for and not read, behind a mask made of booleans."""

    def __init__(self, diagonal: int = 0) -> None:
        super().__init__()
        self.attention, self.diagonal = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), diagonal

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        hidden = ~torch.tril(ones, self.diagonal)
        return self.attention(x, x, x, attn_mask=hidden)[0]


class Turned(nn.Module):
    """Channels before positions, as in diffusion's first networks: values are multiplied by weights that are turned."""

    def __init__(self, by_letters: bool = False, views: bool = False) -> None:
        super().__init__()
        self.qkv, self.by_letters, self.views = nn.Conv1d(WIDTH, 3 * WIDTH, 1), by_letters, views

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        q, k, v = self.qkv(x).reshape(x.shape[0] * HEADS, -1, x.shape[2]).chunk(3, 1)
        if self.by_letters:
            weights = torch.einsum("bct,bcs->bts", q * 0.5, k * 0.5)
            weights = torch.softmax(weights.float(), -1).type(weights.dtype)
            mixed = torch.einsum("bts,bcs->bct", weights, v)
        else:
            weights = F.softmax(torch.bmm(q.permute(0, 2, 1), k) * 0.25, dim=2)
            mixed = torch.bmm(v, weights.permute(0, 2, 1))
        return mixed.view(*x.shape) if self.views else mixed.reshape(*x.shape)


class Sides(nn.Module):
    """Segmenting anything, as published: positions are relative by rows and by columns of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.rows, self.columns = (nn.Parameter(torch.randn(n, n, WIDTH // HEADS) * 0.2) for n in (4, 5))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, batch * HEADS, length, -1).unbind(0)
        scores, sides = (q * 0.25) @ k.transpose(-2, -1), q.reshape(batch * HEADS, 4, 5, -1)
        rows = torch.einsum("bhwc,hkc->bhwk", sides, self.rows)
        columns = torch.einsum("bhwc,wkc->bhwk", sides, self.columns)
        scores = scores.view(-1, 4, 5, 4, 5) + rows[:, :, :, :, None] + columns[:, :, :, None, :]
        mixed = scores.view(-1, length, length).softmax(dim=-1) @ v
        return mixed.view(batch, HEADS, length, -1).permute(0, 2, 1, 3).reshape(batch, length, -1)


class Typed(nn.Module):
    """T5's: a bias in place, weights rounded to the type of the scores; ``.mT`` for keys."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.bias = nn.Parameter(torch.randn(1, HEADS, LENGTH, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.mT
        scores += self.bias
        return (F.softmax(scores.float(), dim=-1).type_as(scores) @ v).transpose(1, 2).reshape(*x.shape)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(Turned, {"attention": 1, "attention-kernel": 1}),
     (lambda: Turned(views=True), {"attention": 1, "attention-kernel": 1}),
     (lambda: Turned(by_letters=True), {"einsum": 2, "attention": 1, "attention-kernel": 1}),
     (Typed, {"in-place": 1, "attention": 1}),
     (Sides, {"attention": 1}),
     (Letters, {"einsum": 2, "attention": 1, "attention-kernel": 1}),
     (Complex, {"complex-rotary": 1, "attention": 1, "attention-kernel": 1}),
     (Module, {"in-place": 1, "multi-head": 1, "mask": 1, "attention-kernel": 1})],
)  # fmt: skip
def test_attention_in_a_strangers_spelling_becomes_one_kernel(kind: Any, expected: dict[str, int]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = kind().eval()
    x = torch.randn(2, LENGTH, WIDTH)
    with torch.no_grad():
        meant = model(x)
        model, x = model.bfloat16(), x.bfloat16()
        report = Report()
        fast = compiled(model, rewrites=recommended("inference", "none", "cuda"), report=report)
        theirs, ours = ((made.float() - meant).norm() / meant.norm() for made in (model(x), fast(x)))
    counts = report.counts()
    assert {name: counts.get(name, 0) for name in expected} == expected, (counts, report.refusals)
    assert float(ours) < 1.5 * float(theirs) + 1e-3


def test_a_row_that_sees_nothing_stays_what_pytorch_makes_of_it() -> None:
    torch._dynamo.reset()
    model, x, report = Module(diagonal=-1).eval(), torch.randn(2, LENGTH, WIDTH), Report()
    with torch.no_grad():
        fast = compiled(model, rewrites=recommended("inference", "none", "cuda"), report=report)
        torch.testing.assert_close(fast(x), model(x), equal_nan=True)
        assert bool(model(x)[:, 0].isnan().all())
    assert "multi-head" not in report.counts()


class Apart(nn.Module):
    """A Conformer's convolutions: gated, then each channel by itself; and a look back alone, cut at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Conv1d(WIDTH, 2 * WIDTH, 1), nn.Conv1d(WIDTH, WIDTH, 1)
        self.apart, self.norm = nn.Conv1d(WIDTH, WIDTH, 31, padding=15, groups=WIDTH), nn.BatchNorm1d(WIDTH)
        self.back = nn.Conv1d(WIDTH, WIDTH, 4, padding=3, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.apart(F.glu(self.wide(x.transpose(1, 2)), dim=1))
        y = self.narrow(F.silu(self.norm(y))).transpose(1, 2)
        return F.silu(self.back(y.transpose(1, 2))[:, :, : x.shape[1]].transpose(1, 2))


def test_sequences_whose_channels_stay_apart_lie_with_channels_last(monkeypatch: Any) -> None:
    from ridgeline.optimizer.rewrites.conv import positional_conv as positions

    monkeypatch.setattr(positions, "LEAST_NUMBERS", 0)
    monkeypatch.setattr(positions, "SMALL", 0)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x, report = Apart().eval(), torch.randn(2, LENGTH, WIDTH), Report()
    with torch.no_grad():
        meant = model(x)
        model, x = model.bfloat16(), x.bfloat16()
        fast = compiled(model, rewrites=("sequence-last", "sequence-apart"), report=report)
        theirs, ours = ((made.float() - meant).norm() / meant.norm() for made in (model(x), fast(x)))
        assert report.counts() == {"sequence-last": 2, "sequence-apart": 2}, report.refusals
        assert float(ours) < 1.5 * float(theirs) + 1e-3
        laid, own = [], positions._apart
        monkeypatch.setattr(positions, "_apart", lambda x, *rest: laid.append((x.stride(1), rest[-1])) or own(x, *rest))
        fast(x)
    assert laid == [(1, True), (1, False)]  # a Conformer's was turned twice; results lie as ever


def test_convolutions_that_are_added_to_their_input_keep_steps_last(monkeypatch: Any) -> None:
    """A vocoder's: only the first of each two could lie with channels last, and the second would turn it over."""
    from ridgeline.optimizer.rewrites.conv import positional_conv as positions

    class Pair(nn.Module):
        def __init__(self, added: bool) -> None:
            super().__init__()
            self.first, self.last, self.added = nn.Conv1d(64, 64, 3, padding=1), nn.Conv1d(64, 64, 3, padding=1), added

        def forward(self, x: Tensor) -> Tensor:
            y = self.last(F.leaky_relu(self.first(F.leaky_relu(x, 0.1)), 0.1))
            return x + y if self.added else y.transpose(1, 2).contiguous()

    monkeypatch.setattr(positions, "SMALL", 0)
    for added, expected in ((True, {}), (False, {"sequence-last": 2})):
        torch._dynamo.reset()
        model, report = Pair(added).eval().bfloat16(), Report()
        x = torch.randn(2, 64, LENGTH).bfloat16()
        with torch.no_grad():
            made = compiled(model, rewrites=("sequence-last",), report=report)(x)
            torch.testing.assert_close(made, model(x), rtol=2e-2, atol=2e-2)
        assert report.counts() == expected, report.refusals


def test_complex_numbers_are_gone_before_a_compiler_sees_them() -> None:
    torch._dynamo.reset()
    model, x, report = Complex().eval(), torch.randn(2, LENGTH, WIDTH), Report()
    with torch.no_grad():
        fast = compiled(model, rewrites=("complex-rotary",), compiler="inductor", report=report)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert report.counts() == {"complex-rotary": 2}, report.refusals


@pytest.mark.parametrize(
    ("method", "op"),
    [("__abs__", "abs"), ("__sub__", "sub"), ("__invert__", "not"), ("__neg__", "neg"), ("__le__", "le"),
     ("__truediv__", "div"), ("__rmul__", "mul"), ("__and__", "and"), ("__eq__", "eq"), ("__matmul__", "matmul")],
)  # fmt: skip
def test_operators_are_known_as_methods_too(method: str, op: str) -> None:
    """torch 2.11 traces some operators by the names of methods, and what is no known op is no constant."""
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    for node in (graph.call_method(method, (a, b)), graph.call_function(getattr(Tensor, method), (a, b))):
        args = (a,) if op in ("abs", "not", "neg") else (a, b)
        node.args = args
        found = call(node)
        assert found is not None and found.op == op and found["input"] is a


class Lengths(nn.Module):
    """Speech encoders of transformers: a mask that is made empty, marked at every text's last frame, and filled."""

    def __init__(self, backwards: bool) -> None:
        super().__init__()
        self.qkv, self.backwards = nn.Linear(WIDTH, 3 * WIDTH), backwards

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.backwards:
            seen = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
            seen[(torch.arange(x.shape[0], device=x.device), lengths - 1)] = 1
            seen = seen.flip([-1]).cumsum(-1).flip([-1]).bool()
        else:
            seen = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
            seen[0, 11:] = False
            seen[1, :] &= torch.arange(x.shape[1], device=x.device) < lengths[1]
        return F.scaled_dot_product_attention(q, k, v, seen[:, None, None, :].expand(-1, -1, x.shape[1], -1))


@pytest.mark.parametrize("backwards", [True, False])
def test_a_mask_that_is_written_to_after_it_was_made_is_no_constant(backwards: bool) -> None:
    torch.manual_seed(0)
    model, lengths = Lengths(backwards).eval(), torch.tensor([11, 7])
    x = torch.randn(2, LENGTH, WIDTH)
    with torch.no_grad():
        expected = model(x, lengths)
        found = compiled(model.bfloat16(), rewrites=recommended("inference", "none", "cuda"))(x.bfloat16(), lengths)
    torch.testing.assert_close(found.float(), expected, rtol=3e-2, atol=3e-2)
