"""Cause: graph break."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lab.planted.networks import Decoder
from lab.planted.programs import ONE, compiler
from lab.planted.registry import Program, Setting, case


def _mix(up: Tensor, down: Tensor, x: Tensor) -> Tensor:
    normed = F.layer_norm(x, x.shape[-1:])
    return x + F.linear(F.gelu(F.linear(normed, up)), down) * 0.1


def _plain_block(up: Tensor, down: Tensor, qkv: Tensor, x: Tensor) -> Tensor:
    x = _mix(up, down, x)
    first, second, third = F.linear(F.layer_norm(x, x.shape[-1:]), qkv).chunk(3, -1)
    return x + torch.tanh(first) * torch.sigmoid(second) * third


def _checked_block(up: Tensor, down: Tensor, qkv: Tensor, x: Tensor) -> Tensor:
    x = _mix(up, down, x)
    if not torch.isfinite(x).all().item():
        raise FloatingPointError("the activations overflowed")
    first, second, third = F.linear(F.layer_norm(x, x.shape[-1:]), qkv).chunk(3, -1)
    if second.abs().max() > 1e4:
        second = second.clamp(-1e4, 1e4)
    return x + torch.tanh(first) * torch.sigmoid(second) * third


@case(
    "graph break",
    "drop the .item() check and the data-dependent branch from the compiled block",
    suite="planted",
    compiles=True,
)
def graph_breaks(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=768, layers=16, heads=12, vocab=4096)
    torch._dynamo.reset()
    model = s.place(lambda: Decoder(shape, s.pick(512, 16))).eval()
    block = torch.compile(_plain_block if fixed else _checked_block, backend=compiler(s), dynamic=False)
    ids = torch.randint(0, shape.vocab, (s.pick(8, 2), s.pick(512, 16)), device=s.device)

    @torch.no_grad()
    def step() -> None:
        for _ in range(s.pick(4, 1)):
            x = model.tokens(ids)
            for i, layer in enumerate(model.blocks):
                x = block(layer.mlp.up.weight, layer.mlp.down.weight, layer.attention.qkv.weight, x)
                if i % 8 == 7:
                    x = layer.norm1(x)

    return Program(step)


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


@case("graph break", "no stopwatch inside of what is compiled", suite="twenty-fifth", compiles=True, both=True, **ONE)
def film_graded_under_a_stopwatch(s: Setting, fixed: bool) -> Program:
    """Shots of a film made ready for a screen by compiled code, which notes when it is half through."""
    torch._dynamo.reset()
    frames = torch.rand(3, s.pick(24, 1), s.pick(1080, 8), s.pick(1920, 8), device=s.device)
    exposures = [torch.full((), share, device=s.device) for share in np.linspace(0.8, 1.2, s.pick(12, 2)).tolist()]
    grade = torch.compile(graded, backend=compiler(s), dynamic=False)
    reached = unnoted if fixed else Stopwatch()

    @torch.no_grad()
    def step() -> None:
        for exposure in exposures:
            grade(frames, exposure, reached)

    return Program(step)


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


@case("graph break", "no clock inside of what is compiled", suite="twenty-fourth", compiles=True, both=True, **ONE)
def stages_timed_while_compiled(s: Setting, fixed: bool) -> Program:
    """Patterns that grow where two substances react; somebody wanted to know how long each stage takes."""
    torch._dynamo.reset()
    side = s.pick(4096, 8)
    u, v = torch.ones(side, side, device=s.device), torch.rand(side, side, device=s.device)
    advance = torch.compile(gray_scott, backend=compiler(s), dynamic=False)
    tick = None if fixed else StageClock()

    @torch.no_grad()
    def step() -> None:
        a, b = u, v
        for _ in range(s.pick(48, 2)):
            a, b = advance(a, b, tick)
        u.copy_(a)
        v.copy_(b)

    return Program(step)
