"""Networks, data sets, loggers and optimizers of the twenty-fifth suite, each written as its author would have."""

from __future__ import annotations

import collections
import contextlib
import csv
import functools
import itertools
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import Dataset


class SelfAttention(nn.Module):
    """Queries, keys and values of one product; whoever may be seen is said by a mask or by an order."""

    def __init__(self, dim: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.to_qkv, self.to_out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.to_qkv(x).chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return self.to_out(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attends, then thinks about it."""

    def __init__(self, dim: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = SelfAttention(dim, heads, causal)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.attn_norm(x), mask)
        return x + self.mlp(self.mlp_norm(x))


class Trunk(nn.Module):
    """Layers one behind the other."""

    def __init__(self, dim: int, heads: int, depth: int, causal: bool = False) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(Layer(dim, heads, causal) for _ in range(depth)), nn.LayerNorm(dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


class Tokens(nn.Module):
    """Pieces of whatever it is, as vectors, through a trunk; one answer for each thing."""

    def __init__(self, piece: int, dim: int, heads: int, depth: int, answers: int) -> None:
        super().__init__()
        self.enter, self.trunk = nn.Linear(piece, dim), Trunk(dim, heads, depth)
        self.answer = nn.Linear(dim, answers)

    def forward(self, pieces: Tensor) -> Tensor:
        return self.answer(self.trunk(self.enter(pieces)).mean(1))


def patches(pictures: Tensor, side: int) -> Tensor:
    """(n, c, h, w) cut into squares, a row of numbers for each."""
    cut = pictures.unflatten(3, (-1, side)).unflatten(2, (-1, side))
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def perceptron(*sizes: int, bias: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for wide_in, wide_out in itertools.pairwise(sizes):
        layers += [nn.Linear(wide_in, wide_out, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


# ---------------------------------------------------------------- data


class Sketches(Dataset[tuple[Tensor, int]]):
    """Drawings as strokes of a pen, put on a canvas point by point."""

    def __init__(self, side: int, strokes: int, points: int, length: int = 1_000_000) -> None:
        self.side, self.strokes, self.points, self.length = side, strokes, points, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        rng = np.random.default_rng(index)
        canvas = np.zeros((self.side, self.side), np.float32)
        along = np.linspace(0, 1, self.points)
        for _ in range(self.strokes):
            begin, bend, end = rng.uniform(0, self.side - 1, (3, 2))
            path = np.outer((1 - along) ** 2, begin) + np.outer(2 * along * (1 - along), bend) + np.outer(along**2, end)
            rows, columns = np.rint(path).astype(np.int64).T
            np.add.at(canvas, (rows, columns), 32.0)
        return torch.from_numpy(np.minimum(canvas, 255).astype(np.uint8)), index % 340


COMPLEMENT = {"A": "T", "C": "G", "G": "C", "T": "A"}


class Genomes(Dataset[tuple[Tensor, int]]):
    """Stretches of a genome with a few letters misread, both strands, as words of six letters."""

    def __init__(self, words: int, length: int = 1_000_000) -> None:
        letters = np.random.default_rng(3).integers(0, 4, 65_536)
        self.text = "".join("ACGT"[i] for i in letters)
        self.known = {"".join(word): i for i, word in enumerate(itertools.product("ACGT", repeat=6))}
        self.words, self.length = words, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        start, draw = index * 977 % (len(self.text) - self.words - 6), random.Random(index)
        piece = self.text[start : start + self.words + 5]
        piece = "".join(letter if draw.random() > 0.02 else draw.choice("ACGT") for letter in piece)
        other = "".join(COMPLEMENT[letter] for letter in reversed(piece))
        ids = [[self.known[strand[i : i + 6]] for i in range(self.words)] for strand in (piece, other)]
        return torch.tensor(ids), index % 12


@contextlib.contextmanager
def bound_to_share(rank: int, ranks: int) -> Iterator[None]:
    """This rank gets its share of the host's cores, as a launcher for nodes with many ranks does it."""
    allowed = sorted(os.sched_getaffinity(0))
    each = max(1, len(allowed) // ranks)
    os.sched_setaffinity(0, allowed[rank * each : (rank + 1) * each])
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


class EventGrid:
    """What a camera of events saw, as a picture for each slice of time; on the host, or where the events are."""

    def __init__(self, batch: int, slices: int, height: int, width: int) -> None:
        self.shape = (batch, slices, height, width)

    def in_numpy(self, events: np.ndarray, into: Tensor) -> Tensor:
        batch, slices, height, width = self.shape
        grid = np.zeros(batch * slices * height * width, np.float32)
        which, t, y, x, sign = (events[i].astype(np.int64) for i in range(5))
        np.add.at(grid, ((which * slices + t) * height + y) * width + x, (2 * sign - 1).astype(np.float32))
        into.copy_(torch.from_numpy(grid).view(self.shape))
        return into

    def on_device(self, events: Tensor) -> Tensor:
        batch, slices, height, width = self.shape
        which, t, y, x, sign = events.long().unbind(0)
        grid = torch.zeros(batch * slices * height * width, device=events.device)
        grid.index_add_(0, ((which * slices + t) * height + y) * width + x, (2 * sign - 1).float())
        return grid.view(self.shape)

    def drawn(self, num: int, seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        highs = np.array([*self.shape, 2])[:, None]
        return (rng.random((5, num)) * highs).astype(np.int16)


def cameras(num: int) -> list[dict[str, Tensor]]:
    """What is known of each view of a scene, as a reader of scenes gives it."""
    draw = torch.Generator().manual_seed(0)
    return [
        {
            "pose": torch.randn(3, 4, generator=draw),
            "intrinsics": torch.rand(3, 3, generator=draw) + torch.eye(3),
            "range": torch.rand(2, generator=draw) + 1.0,
        }
        for _ in range(num)
    ]


def conversations(num: int) -> list[dict[str, Any]]:
    """What was said to an assistant, kept for all who may come back."""
    return [
        {"user": i, "turns": [{"role": "user", "tokens": [i % 7, i % 11]}, {"role": "assistant", "tokens": [i % 13]}]}
        for i in range(num)
    ]


class PackedRows(Dataset[tuple[Tensor, Tensor]]):
    """Columns of a table that lie in memory as bytes, a batch at a time."""

    def __init__(self, rows: int, columns: int, length: int = 100_000) -> None:
        self.table = np.random.default_rng(1).integers(0, 255, (2 * rows, columns), np.uint8)
        self.rows, self.length = rows, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * 131 % self.rows
        part = torch.from_numpy(self.table[start : start + self.rows].copy())
        return part, part[:, 0].long() % 8


# ---------------------------------------------------------------- what watches, tidies up, updates


class UpdateRatios:
    """How far each weight moves beside how large it is, a row of a table for each step, as a lecture advises."""

    def __init__(self, params: dict[str, nn.Parameter], lr: float, stream: Any, every: int) -> None:
        self.params, self.lr, self.stream, self.every, self.turn = params, lr, stream, every, 0
        self.writer = csv.DictWriter(stream, ["step", *params])
        self.writer.writeheader()

    @torch.no_grad()
    def __call__(self) -> None:
        self.turn += 1
        if self.turn % self.every:
            return
        row = {
            name: ((self.lr * p.grad).std() / (p.data.std() + 1e-8)).log10().item() for name, p in self.params.items()
        }
        self.writer.writerow({"step": self.turn, **row})
        self.stream.flush()


def releases_memory(enabled: bool) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """A decorator: whatever the function took from the driver is given back."""

    def decorate(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def wrapped(*args: Any) -> Tensor:
            try:
                return function(*args)
            finally:
                if enabled:
                    torch.cuda.empty_cache()

        return wrapped

    return decorate


class SlowGradients:
    """Adds to each slope what it was like for long, so that a network generalizes earlier."""

    def __init__(self, model: nn.Module, alpha: float = 0.98, weight: float = 2.0) -> None:
        self.params = dict(model.named_parameters())
        self.alpha, self.weight = alpha, weight
        self.slow = {name: torch.zeros_like(p) for name, p in self.params.items()}

    @torch.no_grad()
    def one_by_one(self) -> None:
        for name, p in self.params.items():
            self.slow[name] = self.slow[name] * self.alpha + p.grad * (1 - self.alpha)
            p.grad = p.grad + self.slow[name] * self.weight

    @torch.no_grad()
    def together(self) -> None:
        slow, grads = list(self.slow.values()), [p.grad for p in self.params.values()]
        torch._foreach_lerp_(slow, grads, 1 - self.alpha)
        torch._foreach_add_(grads, slow, alpha=self.weight)


class AmsGrad(torch.optim.Optimizer):
    """Adam that never forgets its largest second moment, a weight at a time, after the paper."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = 0
            state["m"], state["v"], state["v_max"] = (torch.zeros_like(p) for _ in range(3))
        state["step"] += 1
        beta1, beta2 = group["betas"]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        state["m"].mul_(beta1).add_(grad, alpha=1 - beta1)
        state["v"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        torch.maximum(state["v_max"], state["v"], out=state["v_max"])
        root = state["v_max"].sqrt().div_(math.sqrt(1 - beta2 ** state["step"])).add_(group["eps"])
        p.addcdiv_(state["m"], root, value=-group["lr"] / (1 - beta1 ** state["step"]))


# ---------------------------------------------------------------- vision


class ConvUnit(nn.Module):
    """Convolution, norm, activation."""

    def __init__(self, c_in: int, c_out: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, bias=False)
        self.bn, self.act = nn.BatchNorm2d(c_out), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class PartialStage(nn.Module):
    """Half of the channels go through convolutions, whose every outcome is kept; all are joined at the end."""

    def __init__(self, c_in: int, c_out: int, depth: int) -> None:
        super().__init__()
        self.down, self.split = ConvUnit(c_in, c_out, 3, 2), ConvUnit(c_out, c_out, 1)
        self.parts = nn.ModuleList(
            nn.Sequential(ConvUnit(c_out // 2, c_out // 2), ConvUnit(c_out // 2, c_out // 2)) for _ in range(depth)
        )
        self.join = ConvUnit((2 + depth) * (c_out // 2), c_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = list(self.split(self.down(x)).chunk(2, dim=1))
        for part in self.parts:
            kept.append(part(kept[-1]))
        return self.join(torch.cat(kept, dim=1))


class Detector(nn.Module):
    """What lies in each cell of a picture, by stages of partial convolutions."""

    def __init__(self, widths: tuple[int, ...], depth: int, answers: int) -> None:
        super().__init__()
        self.stem = ConvUnit(3, widths[0], 3, 2)
        self.stages = nn.Sequential(*(PartialStage(a, b, depth) for a, b in itertools.pairwise(widths)))
        self.head = nn.Conv2d(widths[-1], answers, 1)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(pictures)))


class Panoramas(nn.Module):
    """Views wider than they are high, as patches; where a view has no patch is said by a mask."""

    def __init__(self, piece: int, dim: int, heads: int, depth: int, answers: int, columns: int, rows: int) -> None:
        super().__init__()
        self.enter, self.trunk = nn.Linear(piece, dim), Trunk(dim, heads, depth)
        self.answer = nn.Linear(dim, answers)
        self.row, self.column = nn.Embedding(rows, dim), nn.Embedding(columns, dim)

    def forward(self, pieces: Tensor, patch_mask: Tensor) -> Tensor:
        """Pieces are (n, rows, columns, piece)."""
        x = self.enter(pieces) + self.row.weight[: pieces.size(1), None] + self.column.weight
        x = self.trunk(x.flatten(1, 2), patch_mask[:, None, None])
        share = patch_mask.to(x.dtype)[..., None]
        return self.answer((x * share).sum(1) / share.sum(1))


class TwinHead(nn.Module):
    """Two views of the same things should be told alike, and no two numbers should tell the same."""

    def __init__(self, seen: int, wide: int, in_fp32: bool) -> None:
        super().__init__()
        self.project, self.in_fp32 = perceptron(seen, wide, wide, wide), in_fp32

    def forward(self, both: Tensor) -> Tensor:
        z = self.project(both)
        one, other = (F.batch_norm(half, None, None, training=True) for half in z.chunk(2))
        if self.in_fp32:
            one, other = one.float(), other.float()
        matrix = (one / one.size(0)).T @ other
        diagonal = matrix.diagonal()
        apart = torch.linalg.vector_norm(matrix, dtype=torch.float32).square() - diagonal.float().square().sum()
        return (1 - diagonal.float()).square().sum() + 0.005 * apart


class SkippingLayer(nn.Module):
    """Of all tokens those that stand out most are thought about; the rest go by."""

    def __init__(self, dim: int, keep_frac: float, by_mask: bool) -> None:
        super().__init__()
        self.norm, self.keep_frac, self.by_mask = nn.LayerNorm(dim), keep_frac, by_mask
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        loud = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
        values, index = loud.topk(int(self.keep_frac * x.size(0)), sorted=False)
        if self.by_mask:
            keep = loud >= values.min()
            chosen = x[keep]
            x[keep] = chosen + self.mlp(self.norm(chosen))
            return x
        chosen = x.index_select(0, index)
        return x.index_copy_(0, index, chosen + self.mlp(self.norm(chosen)))


# ---------------------------------------------------------------- sound, words, proteins


class HopEnhancer(nn.Module):
    """One hop of sound at a time: gates that remember what came before."""

    def __init__(self, hop: int, dim: int, depth: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(hop, dim), nn.Linear(dim, hop)
        self.heard = nn.ModuleList(nn.Linear(dim, 2 * dim, bias=False) for _ in range(depth))
        self.kept = nn.ModuleList(nn.Linear(dim, 2 * dim) for _ in range(depth))

    def forward(self, hop: Tensor, states: Tensor) -> Tensor:
        x = self.enter(hop)
        for heard, kept, state in zip(self.heard, self.kept, states):
            x = F.glu(torch.addmm(kept(state), x, heard.weight.T))
            state.copy_(x)
        return self.leave(x)


class NextWord(nn.Module):
    """What comes next, for every place of a text."""

    def __init__(self, vocab: int, dim: int, heads: int, depth: int) -> None:
        super().__init__()
        self.embed, self.trunk = nn.Embedding(vocab, dim), Trunk(dim, heads, depth, causal=True)
        self.unembed = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.unembed(self.trunk(self.embed(ids)))


def surprise_by_one_hot(logits: Tensor, wanted: Tensor) -> Tensor:
    """The loss as a book defines it: a sum over all classes, of which one counts."""
    targets = F.one_hot(wanted, logits.size(-1))
    return -(targets * F.log_softmax(logits, dim=-1)).sum(dim=-1).mean()


class Residues(nn.Module):
    """Which residues of a protein are hidden; attention by whichever kernel the context allows."""

    def __init__(self, kinds: int, dim: int, heads: int, depth: int, reference: bool) -> None:
        super().__init__()
        self.embed, self.trunk = nn.Embedding(kinds, dim), Trunk(dim, heads, depth)
        self.tell, self.reference = nn.Linear(dim, kinds), reference

    def forward(self, ids: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH) if self.reference else contextlib.nullcontext():
            return self.tell(self.trunk(self.embed(ids)))


class Rerun(torch.autograd.Function):
    """Keeps what a block was given, and runs it again when its slopes are wanted."""

    @staticmethod
    def forward(ctx: Any, block: Callable[[Tensor], Tensor], x: Tensor, *weights: Tensor) -> Tensor:
        ctx.block, ctx.weights = block, weights
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.block(x)
        return (None, *torch.autograd.grad(out, (x, *ctx.weights), grad))


class Sparing(nn.Module):
    """A trunk whose layers keep what they were given alone."""

    def __init__(self, trunk: Trunk, spare: bool) -> None:
        super().__init__()
        self.trunk, self.spare = trunk, spare

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.trunk.layers:
            x = Rerun.apply(layer, x, *layer.parameters()) if self.spare else layer(x)
        return self.trunk.norm(x)


class Offloading(nn.Module):
    """A trunk whose first layers keep what they need for their slopes on the host."""

    def __init__(self, dim: int, heads: int, depth: int, away: bool) -> None:
        super().__init__()
        self.first, self.rest = Trunk(dim, heads, 2), Trunk(dim, heads, depth)
        self.away = away

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.autograd.graph.save_on_cpu(pin_memory=True) if self.away else contextlib.nullcontext()
        with kept:
            x = self.first(x)
        return self.rest(x)


# ---------------------------------------------------------------- scenes, chains of samples, solutions


class ViewsToScene(nn.Module):
    """A scene out of views: every patch is told along which ray it was seen."""

    def __init__(self, piece: int, dim: int, heads: int, depth: int, answers: int) -> None:
        super().__init__()
        self.enter, self.camera = nn.Linear(piece, dim), nn.Linear(23, dim)
        self.trunk, self.answer = Trunk(dim, heads, depth), nn.Linear(dim, answers)

    def forward(self, pieces: Tensor, pose: Tensor, intrinsics: Tensor, near_far: Tensor) -> Tensor:
        known = torch.cat([pose.flatten(1), intrinsics.flatten(1), near_far], dim=1).to(pieces.dtype)
        x = self.enter(pieces) + self.camera(known)[:, None]
        return self.answer(self.trunk(x))


def negative_log_likelihood(first: Tensor, second: Tensor, x: Tensor, minus_y: Tensor) -> Tensor:
    """For each chain: how unlikely what was seen is, given its small network."""
    found = torch.matmul(torch.tanh(torch.matmul(x, first)), second)
    return F.softplus(minus_y * found).sum((1, 2))


def hamiltonian_step(weights: tuple[Tensor, ...], x: Tensor, minus_y: Tensor, rounds: int, far: float) -> None:
    """New weights for all chains, some way along where they are drawn to; each chain moves or stays."""

    def kicked(share: float) -> Tensor:
        """Momentum after a pull of the data and of a normal prior."""
        with torch.enable_grad():
            here = [w.detach().requires_grad_() for w in at]
            unlikely = negative_log_likelihood(*here, x, minus_y)
            grads = torch.autograd.grad(unlikely.sum(), here)
        torch._foreach_add_(momentum, grads, alpha=-far * share)
        torch._foreach_add_(momentum, at, alpha=-far * share)
        return unlikely.detach()

    halves = lambda parts: sum(0.5 * part.square().sum((1, 2)) for part in parts)
    at, momentum = [w.clone() for w in weights], [torch.randn_like(w) for w in weights]
    before = halves(momentum) + halves(at)
    before = before + kicked(0.5)
    for i in range(rounds):
        torch._foreach_add_(at, momentum, alpha=far)
        unlikely = kicked(1.0 if i < rounds - 1 else 0.5)
    moves = torch.rand_like(before).log() < before - unlikely - halves(momentum) - halves(at)
    for w, new in zip(weights, at):
        w.copy_(torch.where(moves[:, None, None], new, w))


def ridge_in_numpy(kernel: Tensor, wanted: Tensor) -> Tensor:
    found = np.linalg.solve(kernel.cpu().numpy(), wanted.cpu().numpy())
    return torch.from_numpy(found).to(kernel.device)


def ridge_by_cholesky(kernel: Tensor, wanted: Tensor) -> Tensor:
    lower, _ = torch.linalg.cholesky_ex(kernel)
    return torch.cholesky_solve(wanted, lower)


# ---------------------------------------------------------------- what is compiled


def graded(frames: Tensor, exposure: Tensor, reached: Callable[[], None]) -> Tensor:
    """Frames of a film made ready for a screen; when each half is reached may be noted."""
    bright = frames * exposure
    light = 0.2126 * bright[0] + 0.7152 * bright[1] + 0.0722 * bright[2]
    red, green, blue = (torch.log1p(channel - 0.5 * light) for channel in bright.clamp(min=0.01).unbind(0))
    reached()
    tone = light / (1 + light)
    out = [torch.sigmoid(3 * (channel.expm1() * tone + 0.5 * light)) for channel in (red, green, blue)]
    return torch.stack(out)


class Stopwatch:
    """Notes when it was asked."""

    def __init__(self) -> None:
        self.moments = collections.deque[float](maxlen=100)

    def __call__(self) -> None:
        self.moments.append(time.perf_counter())


def unnoted() -> None:
    """Nobody asks."""


# ---------------------------------------------------------------- what is well


class BroadBlock(nn.Module):
    """A layer of a very broad model that attends over long texts."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attn = SelfAttention(dim, heads, causal=True)
        self.wide, self.narrow = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.narrow(F.relu(self.wide(x)))


class Experts(nn.Module):
    """As many tokens for each expert, all experts in one product."""

    def __init__(self, num: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num, dim, hidden) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(num, hidden, dim) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(F.relu(torch.bmm(x, self.up)), self.down)


def large_filters(width: int, depth: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Conv2d(width, width, 5, padding=2, bias=False) for _ in range(depth)))
