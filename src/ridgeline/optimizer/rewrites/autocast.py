"""Writes autocast's casts into the graph as nodes, so that rewrites see them.

The dtype in which autocast runs an op depends on op and device. Instead of repeating PyTorch's lists, the dtypes that
the tracer recorded are reproduced: GEMMs run in autocast's dtype; any other node is tried without autocast as it is,
then with its floating-point inputs in float32, then in autocast's dtype, and the first result with the recorded dtypes
is what autocast does. If none matches, the graph stays under autocast, and rewrites that depend on dtypes skip it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from ridgeline.engine.autocast import CAST, off
from ridgeline.optimizer.rewrites.context import GraphContext, is_written
from ridgeline.optimizer.rewrites.op_names import call, cast

ENTER = _enter_autocast
_PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "conv1d", "conv2d", "conv3d", "conv_transpose2d", "attention",
             "dot_einsum")  # fmt: skip
"""Ops that autocast always runs in its own dtype; fake tensors would accept mixed dtypes."""


@dataclass(slots=True)
class Writer:
    """Inserts casts while walking a graph; one per tensor and dtype, unless something writes to the tensor."""

    ctx: GraphContext
    made: dict[tuple[fx.Node, torch.dtype], fx.Node] = field(default_factory=dict)
    num: int = 0

    def cast(self, node: fx.Node, dtype: torch.dtype, before: fx.Node) -> fx.Node:
        if self.ctx.dtype(node) == dtype:
            return node
        if (node, dtype) in self.made:
            return self.made[node, dtype]
        new = self.ctx.emit(before, cast, node, dtype)
        self.num += 1
        if node.op == "placeholder" and not is_written(self.ctx, node):
            self.made[node, dtype] = new
        return new


def write_out(ctx: GraphContext, state: dict[str, torch.dtype]) -> int | None:
    """Insert every cast of a graph, which then runs without autocast; returns their number, or None if unknown.

    If None, the graph is half changed: the caller starts again with a copy.
    """
    stack = [dict(state)]
    writer = Writer(ctx)
    switches: list[fx.Node] = []
    for node in ctx.nodes:
        if node.target is _enter_autocast:
            stack.append(_entered(stack[-1], node))
            switches.append(node)
        elif node.target is _exit_autocast:
            if len(stack) > 1:
                stack.pop()
            switches.append(node)
        elif not _is_known(node, stack[-1]) or not _written_out(writer, node, stack[-1]):
            return None
    if len(stack) != 1:
        return None
    for node in reversed(switches):
        ctx.erase_writer(node)
    return writer.num


def _is_known(node: fx.Node, state: dict[str, torch.dtype]) -> bool:
    """Whether a node's behavior under autocast can be determined: no other autocast region, no inner graph."""
    if "autocast" in getattr(node.target, "__name__", ""):
        return False
    inner = node.op in ("call_module", "get_attr") or isinstance(node.target, torch._ops.HigherOrderOperator)
    return not (inner and state)


def _entered(state: dict[str, torch.dtype], node: fx.Node) -> dict[str, torch.dtype]:
    kind, dtype, enabled = (*node.args, None, None, True)[:3] if len(node.args) < 3 else node.args[:3]
    found = {name: value for name, value in state.items() if name != kind}
    if enabled:
        found[str(kind)] = dtype if isinstance(dtype, torch.dtype) else torch.get_autocast_dtype(str(kind))
    return found


def _written_out(writer: Writer, node: fx.Node, state: dict[str, torch.dtype]) -> bool:
    """Insert the casts that autocast makes for a node; False if they cannot be determined."""
    ctx = writer.ctx
    if node.op not in ("call_function", "call_method") or ctx.written(node) is not None:
        return True  # autocast does not change in-place ops
    floats = [each for each in node.all_input_nodes if _is_cast(ctx, each, state)]
    meant = _types(ctx.value(node))
    if not floats or meant is None:
        return True
    wide, narrow = torch.float32, state[ctx.tensor(floats[0]).device.type]  # type: ignore[union-attr]
    read = call(node)
    for dtype in (narrow,) if read is not None and read.op in _PRODUCTS else (None, wide, narrow):
        if _types(_tried(ctx, node, floats, dtype)) == meant:
            if dtype is not None:
                changed = {each: writer.cast(each, dtype, node) for each in floats}
                node.args = fx.node.map_arg(node.args, lambda each, of=changed: of.get(each, each))
                node.kwargs = fx.node.map_arg(node.kwargs, lambda each, of=changed: of.get(each, each))
            return True
    return False


def _is_cast(ctx: GraphContext, node: fx.Node, state: dict[str, torch.dtype]) -> bool:
    """Whether autocast may cast a node's value."""
    value = ctx.tensor(node)
    return value is not None and value.device.type in state and value.dtype in CAST


def _types(value: Any) -> Sequence[Any] | None:
    """Dtypes and shapes of everything a node returns; None if it returns no tensor or fails."""
    if value is None:
        return None
    leaves = torch.utils._pytree.tree_leaves(value)
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        return None
    return [(leaf.dtype, tuple(leaf.shape)) for leaf in leaves]


def _tried(ctx: GraphContext, node: fx.Node, floats: Sequence[fx.Node], dtype: torch.dtype | None) -> Any:
    """The dtypes and shapes a node returns without autocast, with its floating-point inputs as they are or cast."""

    def value(each: fx.Node) -> Any:
        found = ctx.value(each)
        return found.to(dtype) if dtype is not None and each in floats else found

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
    mode = next((v.fake_mode for v in map(ctx.value, floats) if hasattr(v, "fake_mode")), None)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(off())
            if mode is not None:
                stack.enter_context(mode)
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            return node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:  # mostly mixed dtypes, which autocast would not produce
        return None
