"""Cause: needless recompute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.planted.networks import ResidualLayer, Trunk
from lab.planted.programs import TRIED, adamw, bf16, fused_adamw, ints, language, training
from lab.planted.registry import Program, Setting, case


@case("needless recompute", "drop checkpointing: the activations fit", suite="planted")
def recompute(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=1024, layers=12, heads=16, vocab=16384)
    model, batches = language(s, shape, 8, 1024, recompute=not fixed)
    return Program(training(model, adamw(s, model), batches))


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


@case("needless recompute", "layers as they are: memory is free", suite="twenty-fifth", **TRIED)
def layers_run_again(s: Setting, fixed: bool) -> Program:
    """Turns of a conversation ranked; an autograd function of somebody's own runs each layer again for its slopes."""
    dim, batch, length = s.pick(1024, 16), s.pick(16, 2), s.pick(512, 4)
    model = s.place(lambda: Sparing(Trunk(dim, s.pick(16, 2), s.pick(8, 2)), spare=not fixed))
    turns, better, optimizer = bf16(s, batch, length, dim), bf16(s, dim), fused_adamw(model)

    def step() -> None:
        score = model(turns)[:, -1] @ better
        optimizer.zero_grad()
        F.softplus(score[::2] - score[1::2]).mean().backward()
        optimizer.step()

    return Program(step)


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
        self.blocks = nn.ModuleList(ResidualLayer(d, h) for _ in range(depth))
        self.head = nn.Linear(d, kinds * 16)

    def forward(self, patches: Tensor) -> Tensor:
        x = self.embed(patches)
        for block in self.blocks:
            if self.use_checkpoint:
                x = CheckpointFunction.apply(block, x, *block.parameters())
            else:
                x = block(x)
        return self.head(x).unflatten(-1, (16, -1))


@case("needless recompute", "use_checkpoint=False: memory is free", suite="twenty-fourth", **TRIED)
def labels_for_pixels_computed_twice(s: Setting, fixed: bool) -> Program:
    """A label for every pixel; blocks go through an autograd function that forgets what is inside of them."""
    batch, places, kinds, dim = s.pick(16, 2), s.pick(1024, 4), s.pick(24, 8), s.pick(768, 16)
    model = s.place(lambda: Segmenter(dim, s.pick(12, 2), s.pick(8, 2), kinds, use_checkpoint=not fixed))
    patches, labels = bf16(s, batch, places, 768), ints(s, kinds, batch, places, 16)
    optimizer = fused_adamw(model)

    def step() -> None:
        F.cross_entropy(model(patches).flatten(0, 2), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step)
