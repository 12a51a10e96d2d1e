"""Makes chains of convolutions along sequences channels last, as in vocoders, whose results are added to their inputs.

PyTorch always makes the steps of a sequence contiguous, and cuDNN's 16-bit kernels need channels there, so every input
and result is transposed. A single convolution gains nothing from another layout, because its result is added to a
tensor in the old one; a whole chain does.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ridgeline.kernels.grouped_conv1d.op import NARROW
from ridgeline.optimizer.rewrites.context import SMALL, GraphContext
from ridgeline.optimizer.rewrites.conv.positional_conv import CONTEST, _laid, along
from ridgeline.optimizer.rewrites.conv.read import settings_of
from ridgeline.optimizer.rewrites.op_names import Call, call
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite

LEAST_CHANNELS, LEAST_CONVOLUTIONS = 16, 4
_CONVOLUTIONS = ("conv1d", "conv_transpose1d")
_ALONE = (
    "gelu", "relu", "silu", "leaky_relu", "mish", "tanh", "hardswish", "elu", "sigmoid", "dropout", "neg", "clone",
    "batch_norm",
)  # fmt: skip
_BOTH = ("add", "sub", "mul", "div")
_OWN_LAYOUT = ("contiguous", "reshape")
"""Ops that return their own layout for any input."""
_active_modes = torch._C._len_torch_dispatch_stack


def raised(x: Tensor, weight: Tensor, stride: int, padding: int, more: int, dilation: int) -> Tensor:
    """``F.conv_transpose1d`` with channels last, by the faster implementation; one opaque op for tracers."""
    if type(x) is Tensor and not _active_modes():
        return _raised(x, weight, stride, padding, more, dilation)
    return torch.ops.ridgeline_optimizer.raised(x, weight, stride, padding, more, dilation)


def _raised(x: Tensor, weight: Tensor, stride: int, padding: int, more: int, dilation: int) -> Tensor:
    given = (x, weight, stride, padding, more, dilation)
    ways = {"library": partial(_by_library, *given), "last": partial(_as_image, *given)}
    key = ("raised", x.shape, x.stride(), weight.shape, *given[2:], x.dtype, x.device)
    return CONTEST.run(key, ways, x.device)


def _by_library(x: Tensor, weight: Tensor, stride: int, padding: int, more: int, dilation: int) -> Tensor:
    return _laid(F.conv_transpose1d(x, weight, None, stride, padding, more, 1, dilation), last=True)


def _as_image(x: Tensor, weight: Tensor, stride: int, padding: int, more: int, dilation: int) -> Tensor:
    """A sequence as an image of one row."""
    image, taps = (t.unsqueeze(2).contiguous(memory_format=torch.channels_last) for t in (x, weight))
    sizes: Any = ((1, stride), (0, padding), (0, more), 1, (1, dilation))
    return _laid(F.conv_transpose2d(image, taps, None, *sizes).squeeze(2), last=True)


_op = torch.library.custom_op("ridgeline_optimizer::raised", _raised, mutates_args=())


@_op.register_fake
def _(x: Tensor, weight: Tensor, stride: int, padding: int, more: int, dilation: int) -> Tensor:
    steps = (x.shape[2] - 1) * stride - 2 * padding + dilation * (weight.shape[2] - 1) + more + 1
    return x.new_empty((x.shape[0], steps, weight.shape[1])).transpose(1, 2)


def shifted_by(x: Tensor, bias: Tensor) -> Tensor:
    """Add a bias per channel, which a compiler fuses with the next op."""
    return x + bias.view(-1, 1)


@rewrite(
    "sequence-chain",
    summary="chains of convolutions along a sequence with residual sums run channels last",
    modes=(INFERENCE,),
    worth=Worth(eager=1.2, compiled=1.2, basis="HiFi-GAN with every other one turned took 1.14 times as long; untimed"),
    needs_kernels=True,
    exact="reordered",
)
def sequence_chains(ctx: GraphContext) -> list[Match]:
    if ctx.autocast:
        return []
    found = []
    for chain in _Chains(ctx).whole():
        found += [match for read in chain if (match := _turned(ctx, read)) is not None]
    return found


class _Chains:
    """Connected components of convolutions and elementwise ops on sequences."""

    def __init__(self, ctx: GraphContext) -> None:
        self.ctx = ctx
        self.above: dict[fx.Node, fx.Node] = {}
        self.spoiled: set[fx.Node] = set()
        self.joins: set[fx.Node] = set()
        self.layers = {read.node: read for node in ctx.nodes if (read := _wide(ctx, node)) is not None}
        waiting = list(self.layers)
        self.above = {node: node for node in waiting}
        while waiting:
            node = waiting.pop()
            for user in node.users:
                if self._takes(node, user) and user not in self.above:
                    self.above[user] = user
                    waiting.append(user)
                if user in self.above:
                    self.above[self._first(user)] = self._first(node)
        for node in list(self.above):
            self._look_at(node)

    def whole(self) -> list[list[Call]]:
        """The convolutions of every component that can change its layout and gains by it."""
        parts: dict[fx.Node, list[Call]] = {}
        spoiled, joins = {self._first(node) for node in self.spoiled}, {self._first(node) for node in self.joins}
        for node, read in self.layers.items():
            parts.setdefault(self._first(node), []).append(read)
        return [
            part for first, part in parts.items()
            if first not in spoiled and first in joins and sum(map(self._has_taps, part)) >= LEAST_CONVOLUTIONS
        ]  # fmt: skip

    def _first(self, node: fx.Node) -> fx.Node:
        while self.above[node] is not node:
            node = self.above[node]
        return node

    def _has_taps(self, read: Call) -> bool:
        return (self.ctx.shape(read["weight"]) or (0, 0, 1))[2] > 1

    def _takes(self, node: fx.Node, user: fx.Node) -> bool:
        """Whether a reader of a value keeps its layout, or transposes it itself."""
        read = call(user)
        if read is None or user.op == "output":
            self.spoiled.add(node)
            return False
        if read.op in _CONVOLUTIONS or read.op in _OWN_LAYOUT:
            return False
        passed = read.op in _ALONE or read.op in _BOTH
        if not passed or self.ctx.shape(user) != self.ctx.shape(node):
            self.spoiled.add(node)
            return False
        return True

    def _look_at(self, node: fx.Node) -> None:
        """The other operand of a sum must have the same layout, or be small; two components are joined."""
        read = call(node)
        if read is None or read.op not in _BOTH:
            return
        sides = [side for side in (read.given.get("input"), read.given.get("other")) if isinstance(side, fx.Node)]
        own = [side for side in sides if side in self.above]
        other = [side for side in sides if side not in self.above]
        if len(own) == 2:
            self.joins.add(node)
        for side in other:
            shape = self.ctx.shape(side)
            if shape is None or (len(shape) and shape[-1] != 1):
                self.spoiled.add(node)


def _wide(ctx: GraphContext, node: fx.Node) -> Call | None:
    """A 16-bit convolution of many channels along a long sequence."""
    read = call(node)
    settings = None if read is None or read.op not in _CONVOLUTIONS else settings_of(read)
    if read is None or settings is None or not isinstance(read["input"], fx.Node):
        return None
    x, weight, out = (ctx.tensor(each) for each in (read["input"], read["weight"], node))
    if x is None or weight is None or out is None or ctx.shape(node) is None or x.dim() != 3 or settings[4] != 1:
        return None
    channels = weight.shape[:2]
    even = min(channels) >= LEAST_CHANNELS and all(size % 8 == 0 for size in channels)
    alike = x.dtype in NARROW and weight.dtype == x.dtype
    return read if even and alike and out.numel() >= SMALL else None


def _turned(ctx: GraphContext, read: Call) -> Match | None:
    stride, padding, dilation, more, _, transposed = settings_of(read)  # type: ignore[misc]
    x, weight, bias = read["input"], read["weight"], read.get("bias")
    if not ctx.unchanged((x, weight, bias), (read.node,), read.node):
        return None
    if transposed:
        new = ctx.emit(read.node, raised, x, weight, stride[0], padding[0], more[0], dilation[0])
    else:
        new = ctx.emit(read.node, along, x, weight, None, stride[0], padding[0], dilation[0])
    new = new if bias is None else ctx.emit(read.node, shifted_by, new, bias)
    if (ctx.shape(new), ctx.dtype(new)) != (ctx.shape(read.node), ctx.dtype(read.node)):
        ctx.discard(new)
        return None
    ctx.replace_any_layout(read.node, new)
    ctx.discard(read.node)
    return ctx.match(new, f"{tuple(ctx.shape(weight) or ())}, channels last")
