"""Networks, data sets, samplers and an optimizer of the twenty-fourth suite, as their authors would have them."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import Dataset

# ---------------------------------------------------------------- what many share


def stack(*sizes: int, last: bool = False) -> nn.Sequential:
    """Dense layers with ReLU that overwrites what it is given; none behind the last unless asked for."""
    parts: list[nn.Module] = []
    for i in range(len(sizes) - 1):
        parts += [nn.Linear(sizes[i], sizes[i + 1]), nn.ReLU(inplace=True)]
    return nn.Sequential(*(parts if last else parts[:-1]))


class SelfAttention(nn.Module):
    def __init__(self, d: int, h: int) -> None:
        super().__init__()
        self.h = h
        self.to_qkv, self.proj = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d)

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        B, N, D = x.shape
        q, k, v = (t.view(B, N, self.h, D // self.h).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.proj(out.transpose(1, 2).reshape(B, N, D))


class Layer(nn.Module):
    def __init__(self, d: int, h: int) -> None:
        super().__init__()
        self.n1, self.n2, self.attn = nn.LayerNorm(d), nn.LayerNorm(d), SelfAttention(d, h)
        self.fc1, self.fc2 = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        x = x + self.attn(self.n1(x), mask, causal)
        return x + self.fc2(F.gelu(self.fc1(self.n2(x))))


# ---------------------------------------------------------------- what is fed


class CloudPairs(Dataset[tuple[Tensor, Tensor]]):
    """Two views of each of many clouds of points: cut near a place, turned, squeezed and shaken."""

    def __init__(self, points: int, kept: int, length: int = 1_000_000) -> None:
        self.clouds = np.random.default_rng(3).standard_normal((32, points, 3)).astype(np.float32)
        self.kept, self.length = kept, length

    def __len__(self) -> int:
        return self.length

    def view(self, cloud: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        center = cloud[rng.integers(len(cloud))]
        near = np.argpartition(((cloud - center) ** 2).sum(1), self.kept)[: self.kept]
        a = rng.uniform(0, 2 * np.pi)
        turn = np.array([[np.cos(a), -np.sin(a), 0], [np.sin(a), np.cos(a), 0], [0, 0, 1]], np.float32)
        cut = (cloud[near] - center) @ turn * rng.uniform(0.8, 1.25, 3).astype(np.float32)
        return (cut + 0.01 * rng.standard_normal(cut.shape)).astype(np.float32)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        rng = np.random.default_rng(i)
        cloud = self.clouds[i % 32]
        return torch.from_numpy(self.view(cloud, rng)), torch.from_numpy(self.view(cloud, rng))


class CloudEncoder(nn.Module):
    """Points in groups of 32 as tokens, and one vector for the whole cloud."""

    def __init__(self, d: int, h: int, depth: int, out: int) -> None:
        super().__init__()
        self.embed = nn.Linear(96, d)
        self.layers = nn.ModuleList(Layer(d, h) for _ in range(depth))
        self.head = nn.Linear(d, out)

    def forward(self, points: Tensor) -> Tensor:
        x = self.embed(points.flatten(1).unflatten(1, (-1, 96)))
        for layer in self.layers:
            x = layer(x)
        return F.normalize(self.head(x.mean(1)), dim=-1)


def info_nce(a: Tensor, b: Tensor, tau: float = 0.1) -> Tensor:
    scores = a @ b.t() / tau
    same = torch.arange(len(a), device=a.device)
    return 0.5 * (F.cross_entropy(scores, same) + F.cross_entropy(scores.t(), same))


MU_LAW = (np.sign(np.arange(256) - 127.5) * (256 ** (np.abs(np.arange(256) - 127.5) / 127.5) - 1) / 255 * 32767).astype(
    np.int16
)
TAPS = np.hanning(65).astype(np.float32) / 32


def telephone_calls(num: int, samples: int) -> list[bytes]:
    rng = np.random.default_rng(11)
    return [zlib.compress(rng.integers(96, 160, samples).astype(np.uint8).tobytes(), 6) for _ in range(num)]


def unpack_calls(blobs: Sequence[bytes]) -> np.ndarray:
    """What a worker process does with the calls it is given: unpack, expand, smooth."""
    waves = []
    for blob in blobs:
        wave = MU_LAW[np.frombuffer(zlib.decompress(blob), np.uint8)].astype(np.float32)
        waves.append(np.convolve(wave, TAPS, mode="same").astype(np.int16))
    return np.stack(waves)


class CallNet(nn.Module):
    """What a call is about, out of frames of samples."""

    def __init__(self, frame: int, d: int, h: int, depth: int, kinds: int) -> None:
        super().__init__()
        self.frame, self.embed = frame, nn.Linear(frame, d)
        self.layers = nn.ModuleList(Layer(d, h) for _ in range(depth))
        self.head = nn.Linear(d, kinds)

    def forward(self, wave: Tensor) -> Tensor:
        x = self.embed(wave.unflatten(1, (-1, self.frame)))
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class DepthVit(nn.Module):
    """Frames of depth and brightness, seen in patches of 16, and one vector for each."""

    def __init__(self, channels: int, d: int, h: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(channels * 256, d)
        self.layers = nn.ModuleList(Layer(d, h) for _ in range(depth))

    def forward(self, frames: Tensor) -> Tensor:
        B, C, H, W = frames.shape
        patches = frames.view(B, C, H // 16, 16, W // 16, 16).permute(0, 2, 4, 1, 3, 5).reshape(B, -1, C * 256)
        x = self.embed(patches)
        for layer in self.layers:
            x = layer(x)
        return x.mean(1)


class ManyTasks(nn.Module):
    """One trunk and a head for each task."""

    def __init__(self, d: int, out: int, tasks: int) -> None:
        super().__init__()
        self.trunk = stack(d, d, d, last=True)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.Linear(d, out)) for _ in range(tasks))


# ---------------------------------------------------------------- samplers and simulations


class Potential(nn.Module):
    """How much energy each walker of each replica has."""

    def __init__(self, coords: int, wide: int, depth: int) -> None:
        super().__init__()
        self.net = stack(coords, *([wide] * depth), 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).float().mean(-1)


def swap_in_turn(beta: Tensor, energy: Tensor, u: Tensor, first: int) -> None:
    """Neighbors on the ladder exchange their temperatures, each pair if its die says so."""
    for k, i in enumerate(range(first, len(beta) - 1, 2)):
        if u[k] < torch.exp((beta[i] - beta[i + 1]) * (energy[i] - energy[i + 1])):
            beta[i : i + 2] = beta[i : i + 2].flip(0)


def swap_together(beta: Tensor, energy: Tensor, u: Tensor, first: int) -> None:
    num = (len(beta) - first) // 2
    b, e = (t[first : first + 2 * num].view(num, 2) for t in (beta, energy))
    chance = torch.exp((b[:, 0] - b[:, 1]) * (e[:, 0] - e[:, 1]))
    b.copy_(torch.where((u[:num] < chance)[:, None], b.flip(1), b))


class ForceField(nn.Module):
    """Forces on atoms out of what is around them, predicted directly."""

    def __init__(self, d: int, depth: int) -> None:
        super().__init__()
        self.net = stack(d, *([d] * depth), 64)

    def forward(self, around: Tensor) -> Tensor:
        return self.net(around)


def gray_scott(u: Tensor, v: Tensor, tick: Callable[[str], None] | None) -> tuple[Tensor, Tensor]:
    """Two substances that spread and react; stages can be timed by whoever wants to know."""
    lap = lambda a: a.roll(1, 0) + a.roll(-1, 0) + a.roll(1, 1) + a.roll(-1, 1) - 4 * a
    du, dv = 0.16 * lap(u), 0.08 * lap(v)
    if tick is not None:
        tick("spread")
    uvv = u * v * v
    ru, rv = 0.035 * (1 - u) - uvv, uvv - 0.1 * v
    if tick is not None:
        tick("react")
    u, v = u + du + ru, v + dv + rv
    if tick is not None:
        tick("add")
    return u.clamp(0, 1), v.clamp(0, 1)


class StageClock:
    """When each stage of a simulation was passed."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}

    def __call__(self, stage: str) -> None:
        self.at[stage] = time.perf_counter()


def forward_algorithm(start: Tensor, moves: Tensor, heard: Tensor, every: int = 16) -> Tensor:
    """How likely each utterance is: states followed frame by frame, rescaled now and then."""
    alpha, total = start, torch.zeros(len(start), 1, device=start.device)
    for t, likelihood in enumerate(heard.unbind(0)):
        alpha = torch.mm(alpha, moves).mul_(likelihood)
        if t % every == every - 1:
            scale = alpha.sum(1, keepdim=True)
            total, alpha = total + scale.log(), alpha / scale
    return total


# ---------------------------------------------------------------- generation, retrieval, evaluation


class SpatialAttention(nn.Module):
    """Every place of a latent looks at every other: a few heads at a time, as on small devices, or by one kernel."""

    def __init__(self, d: int, h: int, slice_size: int | None) -> None:
        super().__init__()
        self.h, self.slice_size, self.scale = h, slice_size, (d // h) ** -0.5
        self.to_q, self.to_k, self.to_v = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.to_out = nn.Linear(d, d)

    def sliced(self, query: Tensor, key: Tensor, value: Tensor, slice_size: int) -> Tensor:
        out = torch.empty_like(query)
        for start in range(0, len(query), slice_size):
            part = slice(start, start + slice_size)
            scores = torch.einsum("bid,bjd->bij", query[part], key[part]) * self.scale
            out[part] = torch.einsum("bij,bjd->bid", scores.softmax(dim=-1), value[part])
        return out

    def forward(self, x: Tensor) -> Tensor:
        split = lambda t: t.unflatten(-1, (self.h, -1)).transpose(1, 2)
        query, key, value = split(self.to_q(x)), split(self.to_k(x)), split(self.to_v(x))
        if self.slice_size is None:
            out = F.scaled_dot_product_attention(query, key, value)
        else:
            flat = (t.flatten(0, 1) for t in (query, key, value))
            out = self.sliced(*flat, self.slice_size).unflatten(0, (-1, self.h))
        return self.to_out(out.transpose(1, 2).flatten(2))


class LatentDenoiser(nn.Module):
    def __init__(self, channels: int, d: int, h: int, depth: int, slice_size: int | None) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(channels, d), nn.Linear(d, channels)
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2 * depth))
        self.attns = nn.ModuleList(SpatialAttention(d, h, slice_size) for _ in range(depth))
        self.ffs = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d)) for _ in range(depth)
        )

    def forward(self, latents: Tensor) -> Tensor:
        x = self.inp(latents)
        for i, (attn, ff) in enumerate(zip(self.attns, self.ffs)):
            x = x + attn(self.norms[2 * i](x))
            x = x + ff(self.norms[2 * i + 1](x))
        return self.out(x)


class ReadEncoder(nn.Module):
    """Pieces of DNA, letters in groups, as one vector each."""

    def __init__(self, vocab: int, d: int, h: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(Layer(d, h) for _ in range(depth))

    def forward(self, kmers: Tensor, attention_mask: Tensor) -> Tensor:
        x, seen = self.embed(kmers), attention_mask[:, None, None]
        for layer in self.layers:
            x = layer(x, seen)
        weight = attention_mask[..., None].to(x.dtype)
        return (x * weight).sum(1) / weight.sum(1)


class Judge(nn.Module):
    """A language model that tells how likely each answer is."""

    def __init__(self, vocab: int, d: int, h: int, depth: int) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocab, d), nn.LayerNorm(d)
        self.layers = nn.ModuleList(Layer(d, h) for _ in range(depth))
        self.lm_head = nn.Linear(d, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, causal=True)
        return self.lm_head(self.norm(x))


def likelihood_by_one_hot(logits: Tensor, wanted: Tensor) -> Tensor:
    log_probs = F.log_softmax(logits.float(), dim=-1)
    return (F.one_hot(wanted, logits.shape[-1]) * log_probs).sum(-1)


def likelihood_by_cross_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    return -F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view_as(wanted)


class Outliner(nn.Module):
    """An encoder and a decoder with skips, for windows of a large picture."""

    def __init__(self, bands: int, widths: tuple[int, ...], kinds: int) -> None:
        super().__init__()
        pair = lambda a, b: nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(b, b, 3, padding=1), nn.ReLU(inplace=True)
        )
        inner = (bands, *widths[:-1])
        self.down = nn.ModuleList(pair(a, b) for a, b in zip(inner, widths))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in zip(widths[-2::-1], widths[:0:-1]))
        self.up = nn.ModuleList(pair(2 * a, a) for a in widths[-2::-1])
        self.head = nn.Conv2d(widths[0], kinds, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for i, down in enumerate(self.down):
            x = down(F.max_pool2d(x, 2) if i else x)
            seen.append(x)
        for grow, up, skip in zip(self.grow, self.up, seen[-2::-1]):
            x = up(torch.cat((grow(x), skip), 1))
        return self.head(x)


def windows_of(picture: Tensor, side: int, stride: int) -> Tensor:
    """Windows that overlap, as a batch in channels_last."""
    cut = picture[0].unfold(1, side, stride).unfold(2, side, stride)
    return cut.permute(1, 2, 0, 3, 4).flatten(0, 1).contiguous(memory_format=torch.channels_last)


def stitched(found: Tensor, size: int, side: int, stride: int) -> Tensor:
    return F.fold(found.flatten(1).t()[None], (size, size), side, stride=stride)


# ---------------------------------------------------------------- learning


class TeacherOrStudent(nn.Module):
    def __init__(self, d: int, h: int, depth: int, out: int) -> None:
        super().__init__()
        self.embed = nn.Linear(768, d)
        self.layers = nn.ModuleList(Layer(d, h) for _ in range(depth))
        self.head = nn.Linear(d, out)

    def forward(self, patches: Tensor) -> Tensor:
        x = self.embed(patches)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def give_back(module: nn.Module, inputs: Any, output: Any) -> None:
    """A hook for networks that are only asked: what they needed is free for others afterwards."""
    torch.cuda.empty_cache()


def task_index(num: int) -> dict[str, dict[str, Any]]:
    """Which samples there are of which class, and where."""
    return {
        f"class_{i}": {"alphabet": f"a{i % 50}", "shots": [{"file": f"{i}_{j}.png", "turn": 90 * j} for j in range(4)]}
        for i in range(num)
    }


def run_with(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    for i, w in enumerate(weights):
        x = F.linear(x, w)
        x = x if i == len(weights) - 1 else F.relu_(x)
    return x


class Projector(nn.Module):
    """Two views through the same layers, for a loss that keeps features from saying the same."""

    def __init__(self, seen: int, d: int) -> None:
        super().__init__()
        layer = lambda a: [nn.Linear(a, d, bias=False), nn.BatchNorm1d(d), nn.ReLU(inplace=True)]
        self.net = nn.Sequential(*layer(seen), *layer(d), nn.Linear(d, d, bias=False))
        self.norm = nn.BatchNorm1d(d, affine=False)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        za, zb = self.norm(self.net(a)), self.norm(self.net(b))
        c = za.t() @ zb / len(a)
        on = torch.diagonal(c)
        return (on - 1).square().sum() + 5e-3 * (c.square().sum() - on.square().sum())


def conv_bn(a: int, b: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True))


class Hourglass(nn.Module):
    """Looks at a picture in smaller and smaller sizes, and adds what it saw on the way back."""

    def __init__(self, d: int, sizes: int) -> None:
        super().__init__()
        self.beside, self.down, self.up = conv_bn(d, d), conv_bn(d, d, 2), conv_bn(d, d)
        self.inside = Hourglass(d, sizes - 1) if sizes > 1 else conv_bn(d, d)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.up(self.inside(self.down(x)))
        return self.beside(x) + F.interpolate(seen, scale_factor=2.0, mode="nearest")


class CenterNet(nn.Module):
    """Where the middles of things are, as a heat map for each kind, and how large they are."""

    def __init__(self, bands: int, d: int, sizes: int, turns: int, kinds: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_bn(bands, d // 2, 2), conv_bn(d // 2, d, 2))
        self.glasses = nn.Sequential(*(Hourglass(d, sizes) for _ in range(turns)))
        self.heat, self.size = (nn.Sequential(conv_bn(d, d), nn.Conv2d(d, kinds, 1)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.glasses(self.stem(x))
        return self.heat(x), self.size(x)


class AdaptedLayer(nn.Module):
    """A layer that rests, with two narrow networks that learn behind its halves."""

    def __init__(self, d: int, h: int, narrow: int) -> None:
        super().__init__()
        self.base = Layer(d, h)
        self.downs = nn.ModuleList(nn.Linear(d, narrow) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(narrow, d) for _ in range(2))

    def adapt(self, i: int, x: Tensor) -> Tensor:
        return x + self.ups[i](F.relu(self.downs[i](x), inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.adapt(0, self.base.attn(self.base.n1(x)))
        return x + self.adapt(1, self.base.fc2(F.gelu(self.base.fc1(self.base.n2(x)))))


def learning_parts(layers: nn.Module) -> list[nn.Parameter]:
    """Adapters, norms and biases learn; everything else rests."""
    learning = []
    for name, p in layers.named_parameters():
        p.requires_grad_("downs" in name or "ups" in name or ".n1" in name or ".n2" in name or name.endswith("bias"))
        learning += [p] if p.requires_grad else []
    return learning


class Adan(torch.optim.Optimizer):
    """Momentum of slopes and of how they change, weight by weight as in the paper, or over lists of weights."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-4, lists: bool = False) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.02, 0.08, 0.01), "eps": 1e-8})
        self.lists = lists

    def _begin(self, p: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        state = self.state[p]
        if not state:
            state["m"], state["v"], state["n"] = (torch.zeros_like(p) for _ in range(3))
            state["before"] = p.grad.clone()
        return state["m"], state["v"], state["n"], state["before"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            (self._all if self.lists else self._each)(params, group)

    def _each(self, params: list[Tensor], group: dict[str, Any]) -> None:
        b1, b2, b3 = group["betas"]
        for p in params:
            m, v, n, before = self._begin(p)
            change = p.grad - before
            m.mul_(1 - b1).add_(p.grad, alpha=b1)
            v.mul_(1 - b2).add_(change, alpha=b2)
            foreseen = p.grad + (1 - b2) * change
            n.mul_(1 - b3).addcmul_(foreseen, foreseen, value=b3)
            p.addcdiv_(m + (1 - b2) * v, n.sqrt().add_(group["eps"]), value=-group["lr"])
            before.copy_(p.grad)

    def _all(self, params: list[Tensor], group: dict[str, Any]) -> None:
        b1, b2, b3 = group["betas"]
        grads = [p.grad for p in params]
        ms, vs, ns, befores = (list(column) for column in zip(*(self._begin(p) for p in params)))
        changes = torch._foreach_sub(grads, befores)
        torch._foreach_mul_(ms, 1 - b1)
        torch._foreach_add_(ms, grads, alpha=b1)
        torch._foreach_mul_(vs, 1 - b2)
        torch._foreach_add_(vs, changes, alpha=b2)
        foreseen = torch._foreach_add(grads, changes, alpha=1 - b2)
        torch._foreach_mul_(ns, 1 - b3)
        torch._foreach_addcmul_(ns, foreseen, foreseen, value=b3)
        below = torch._foreach_sqrt(ns)
        torch._foreach_add_(below, group["eps"])
        torch._foreach_addcdiv_(params, torch._foreach_add(ms, vs, alpha=1 - b2), below, value=-group["lr"])
        torch._foreach_copy_(befores, grads)


SELU_ALPHA, SELU_SCALE = 1.6732632423543772, 1.0507009873554805


def selu_of_the_paper(x: Tensor) -> Tensor:
    return SELU_SCALE * torch.where(x > 0, x, SELU_ALPHA * (torch.exp(x) - 1))


class SelfNormalizing(nn.Module):
    """Dense layers that need no norm, since their activation keeps what goes through them even."""

    def __init__(self, d: int, depth: int, kinds: int, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(d, d) for _ in range(depth))
        self.head, self.act = nn.Linear(d, kinds), act
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=d**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.act(layer(x))
        return self.head(x)


class History(nn.Module):
    """Everything somebody bought, through a narrow middle, and back."""

    def __init__(self, items: int, d: int) -> None:
        super().__init__()
        self.enc1, self.enc2 = nn.Linear(items, d, bias=False), nn.Linear(d, d, bias=False)
        self.dec1, self.dec2 = nn.Linear(d, d, bias=False), nn.Linear(d, items, bias=False)

    def forward(self, bought: Tensor) -> Tensor:
        return self.dec2(F.relu_(self.dec1(F.relu_(self.enc2(F.relu_(self.enc1(bought)))))))


class CheckpointFunction(torch.autograd.Function):
    """Runs a block without keeping what is inside, and once more where slopes are asked for."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor, *params: Tensor) -> Tensor:
        ctx.run, ctx.params = run, params
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        return (None, *torch.autograd.grad(y, (x, *ctx.params), slopes[0]))


class Segmenter(nn.Module):
    """A label for every pixel, out of patches that look at each other."""

    def __init__(self, d: int, h: int, depth: int, kinds: int, use_checkpoint: bool) -> None:
        super().__init__()
        self.embed, self.use_checkpoint = nn.Linear(768, d), use_checkpoint
        self.blocks = nn.ModuleList(Layer(d, h) for _ in range(depth))
        self.head = nn.Linear(d, kinds * 16)

    def forward(self, patches: Tensor) -> Tensor:
        x = self.embed(patches)
        for block in self.blocks:
            if self.use_checkpoint:
                x = CheckpointFunction.apply(block, x, *block.parameters())
            else:
                x = block(x)
        return self.head(x).unflatten(-1, (16, -1))


def sharpened(out: Tensor, center: Tensor, temp: Any) -> Tensor:
    """What a teacher thinks, made surer by how cold it is."""
    return torch.softmax((out.float() - center) / temp, dim=-1).to(out.dtype)


# ---------------------------------------------------------------- what is well


class Memory(nn.Module):
    """Questions that look through a very long memory, twice."""

    def __init__(self, d: int, h: int) -> None:
        super().__init__()
        self.h = h
        self.to_q, self.to_kv = nn.Linear(d, d, bias=False), nn.Linear(d, 2 * d, bias=False)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        split = lambda t: t.unflatten(-1, (self.h, -1)).transpose(1, 2)
        keys, values = (split(t) for t in self.to_kv(memory).chunk(2, -1))
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
            for _ in range(2):
                x = F.scaled_dot_product_attention(split(self.to_q(x)), keys, values).transpose(1, 2).flatten(2)
        return x


class Committee:
    """Networks of one shape that vote, their weights in one block."""

    def __init__(self, members: int, d: int, depth: int, device: str) -> None:
        draw = lambda *size: torch.randn(*size, device=device, dtype=torch.bfloat16)
        self.weights = [draw(members, d, d) * math.sqrt(2 / d) for _ in range(depth)]
        self.members = members

    def __call__(self, x: Tensor) -> Tensor:
        x = x.expand(self.members, *x.shape)
        for weight in self.weights[:-1]:
            x = torch.bmm(x, weight).relu_()
        return torch.bmm(x, self.weights[-1])
