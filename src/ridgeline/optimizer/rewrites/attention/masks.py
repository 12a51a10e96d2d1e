"""Analyzes attention masks: separates constant patterns, such as causality, from masks that depend on keys alone."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.optimizer.rewrites.context import GraphContext, is_removable, is_written
from ridgeline.optimizer.rewrites.op_names import call, cast_target

MAX_ELEMENTS = {"cuda": 1 << 30, "cpu": 1 << 27}
"""The largest constant computed at compile time: a gigabyte of booleans on a GPU, an eighth of it on a host."""
BLOCKED = -1e4
"""An additive mask with this value or less hides a key in any dtype."""
_MAKERS = (torch.arange, torch.ones, torch.zeros, torch.full, torch.tensor, torch.eye, torch.tril_indices,
           torch.triu_indices)  # fmt: skip
_LIKES = ("new_ones", "new_zeros", "new_full", "new_tensor", "ones_like", "zeros_like", "full_like")


@dataclass(frozen=True, slots=True)
class Pattern:
    """The keys that a row sees: all, those up to its own position plus ``shift``, or a window of those.

    A window that is not causal includes ``behind`` keys after the row's own.
    """

    causal: bool
    shift: int = 0
    window: int | None = None
    behind: int = -1

    @property
    def sides(self) -> tuple[int, int] | None:
        """Keys before and after a row's own, as our kernel takes them; -1 leaves it to causality."""
        return None if self.window is None else (self.window - 1, self.behind)


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask as a constant pattern, and factors that depend on batch element and key alone."""

    pattern: Pattern
    keys: tuple[fx.Node, ...]
    buffers: tuple[fx.Node, ...]


def analyze_mask(ctx: GraphContext, node: fx.Node, rows: int, keys: int) -> Mask | None:
    """The parts of a boolean mask (true: visible), or of a constant additive one; None for anything else."""
    key = ("mask", node, rows, keys)
    if key not in ctx.notes:
        ctx.notes[key] = _analyze_mask(ctx, node, rows, keys)
    return ctx.notes[key]


def _analyze_mask(ctx: GraphContext, node: fx.Node, rows: int, keys: int) -> Mask | None:
    value = ctx.tensor(node)
    if value is None or value.dim() > 4:
        return None
    if value.dtype is torch.bool:
        return _boolean(ctx, node, rows, keys)
    known = Constants(ctx)
    found = known.of(node)
    allowed = None if found is None else allowed_by(found)
    pattern = None if allowed is None else pattern_of(allowed, rows, keys)
    return None if pattern is None else Mask(pattern, (), tuple(known.buffers))


def allowed_by(additive: Tensor) -> Tensor | None:
    """Where a constant additive mask is zero; None if its other values do not hide."""
    free, blocked = additive == 0, additive <= BLOCKED
    return free if bool((free | blocked).all()) else None


def _boolean(ctx: GraphContext, node: fx.Node, rows: int, keys: int) -> Mask | None:
    known = Constants(ctx)
    constant: Tensor | None = None
    on_keys = []
    for factor in conjuncts(ctx, node):
        value = known.of(factor)
        if value is not None:
            constant = value if constant is None else constant & value
        elif depends_on_keys(ctx, factor, keys):
            on_keys.append(factor)
        elif (alike := _one_row(ctx, factor)) is not None and depends_on_keys(ctx, alike, keys):
            on_keys.append(alike)
        else:
            return None
    pattern = Pattern(causal=False) if constant is None else pattern_of(constant, rows, keys)
    return None if pattern is None else Mask(pattern, tuple(on_keys), tuple(known.buffers))


def conjuncts(ctx: GraphContext, node: fx.Node) -> list[fx.Node]:
    """The factors of a conjunction, each of which broadcasts to its shape."""
    read = call(node)
    if read is None or ctx.dtype(node) is not torch.bool:
        return [node]
    if read.op in ("and", "mul"):
        sides = [side for side in (read["input"], read["other"]) if side is not True]
        if all(isinstance(side, fx.Node) and ctx.dtype(side) is torch.bool for side in sides):
            return [factor for side in sides for factor in conjuncts(ctx, side)]
        return [node]
    inner = read.given.get("input")
    if not isinstance(inner, fx.Node) or ctx.dtype(inner) is not torch.bool:
        return [node]
    passes = read.op in ("contiguous", "expand") or cast_target(read) is torch.bool or read.op == "to"
    return conjuncts(ctx, inner) if passes else [node]


def _one_row(ctx: GraphContext, node: Any, depth: int = 8) -> fx.Node | None:
    """A mask with one row, if all rows of the mask are equal: expanded by a view, then negated, or repeated for heads
    that are merged into the batch (speech synthesis, hand-written translation models)."""
    shape, read = ctx.shape(node), call(node)
    if shape is None or len(shape) < 2 or ctx.dtype(node) is not torch.bool or depth == 0:
        return None
    if shape[-2] == 1:
        return node
    inner = None if read is None else read.given.get("input")
    before = ctx.shape(inner)
    if read is None or before is None:
        return None
    if read.op == "expand" and len(before) == len(shape) and before[-2] == 1:
        sizes = (*shape[:-2], 1, shape[-1])
        return inner if before == sizes else ctx.emit(node, torch.Tensor.expand, inner, sizes)
    added = read.given.get("dim")
    times = tuple(read.given.get("repeats", ())) if read.op == "repeat" else ()
    turns = read.op in ("not", "logical_not")
    adds = read.op == "unsqueeze" and isinstance(added, int) and added % len(shape) < len(shape) - 2
    repeats = len(times) == len(shape) == len(before) and times[-2:] == (1, 1) and all(type(n) is int for n in times)
    alike = _one_row(ctx, inner, depth - 1) if turns or adds or repeats else None
    if alike is None:
        return None
    if turns:
        return ctx.emit(node, torch.logical_not, alike)
    if adds:
        return ctx.emit(node, torch.unsqueeze, alike, added)
    return ctx.emit(node, torch.Tensor.repeat, alike, times)


def depends_on_keys(ctx: GraphContext, node: fx.Node, keys: int) -> bool:
    """Whether a factor is the same for every head and row: [B, 1, 1, keys], or fewer leading dims."""
    shape = ctx.shape(node)
    if shape is None or not shape or len(shape) > 4 or shape[-1] != keys:
        return False
    padded = (1,) * (4 - len(shape)) + shape
    return padded[1] == 1 and padded[2] == 1


def pattern_of(allowed: Tensor, rows: int, keys: int) -> Pattern | None:
    """The pattern of a constant boolean, if it is equal for all batch elements and heads."""
    if allowed.dtype is not torch.bool or allowed.dim() > 4:
        return None
    while allowed.dim() > 2:
        if allowed.shape[0] > 1 and not bool((allowed == allowed[:1]).all()):
            return None
        allowed = allowed[0]
    if any(have not in (1, want) for have, want in zip(reversed(allowed.shape), (keys, rows))):
        return None
    allowed = allowed.expand(rows, keys)
    if bool(allowed.all()):
        return Pattern(causal=False)
    return _causal_pattern(allowed, rows, keys)


def _causal_pattern(allowed: Tensor, rows: int, keys: int) -> Pattern | None:
    rows_, keys_ = (torch.arange(num, device=allowed.device) for num in (rows, keys))
    distance = rows_.unsqueeze(1) - keys_.unsqueeze(0)
    for shift in dict.fromkeys((0, keys - rows)):
        if torch.equal(allowed, distance >= -shift):
            return Pattern(causal=True, shift=shift)
        seen = int(allowed.sum(1).max())
        if torch.equal(allowed, (distance >= -shift) & (distance < seen - shift)):
            return Pattern(causal=True, shift=shift, window=seen)
    return _window(allowed, distance)


def _window(allowed: Tensor, distance: Tensor) -> Pattern | None:
    """A window to both sides of every row's own key."""
    seen = distance[allowed]
    before, behind = (int(seen.max()), -int(seen.min())) if seen.numel() else (-1, -1)
    rows, keys = distance.shape
    if rows > keys or min(before, behind) < 0:
        return None
    if not torch.equal(allowed, (distance <= before) & (distance >= -behind)):
        return None
    return Pattern(causal=False, window=before + 1, behind=behind)


class Constants:
    """Evaluates nodes that depend on no input: index ranges, filled tensors and what is computed from them.

    A tensor that the graph writes to is not constant. Buffers of the model count as constants; those that were read are
    recorded, so that the graph can be guarded.
    """

    def __init__(self, ctx: GraphContext) -> None:
        self._context = ctx
        self._known: dict[fx.Node, Any] = {}
        given = [x.device for x in ctx.example_inputs if isinstance(x, Tensor) and not x.is_meta]
        self._device = next((on for on in given if on.type == "cuda"), torch.device("cpu"))
        self.buffers: list[fx.Node] = []

    def of(self, node: Any) -> Tensor | None:
        """The value of a tensor-valued node, or None if it depends on an input or is too large."""
        try:
            with torch.no_grad():
                found = self._value(node)
        except (_NotConstant, RuntimeError, TypeError, IndexError, ValueError):
            return None
        return found if isinstance(found, Tensor) else None

    def _value(self, node: Any) -> Any:
        if not isinstance(node, fx.Node):
            return self._device if isinstance(node, torch.device) else node
        if node not in self._known:
            self._known[node] = self._computed(node)
        return self._known[node]

    def _computed(self, node: fx.Node) -> Any:
        shape = self._context.shape(node)
        if shape is not None and _num(shape) > MAX_ELEMENTS[self._device.type]:
            raise _NotConstant
        if node.op == "placeholder":
            return self._buffer(node)
        if node.op not in ("call_function", "call_method") or is_written(self._context, node):
            raise _NotConstant  # for example made empty and filled with lengths later, as in speech encoders
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if name in _LIKES:
            return self._like(node, str(name))
        read = call(node)
        if read is not None and read.op == "type_as" and (wanted := cast_target(read)) is not None:
            return self._value(read["input"]).to(wanted)  # only the dtype of the other tensor matters
        if node.target not in _MAKERS and not is_removable(node) and node.target is not operator.getitem:
            raise _NotConstant
        args, kwargs = self._arguments(node)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args = torch.utils._pytree.tree_map(self._value, tuple(node.args))
        kwargs = {key: torch.utils._pytree.tree_map(self._value, value) for key, value in node.kwargs.items()}
        if "device" in kwargs or node.target in _MAKERS:
            kwargs["device"] = self._device
        return args, kwargs

    def _like(self, node: fx.Node, name: str) -> Tensor:
        """A filled tensor with the shape and dtype of another."""
        meant = self._context.tensor(node)
        if meant is None or name == "new_tensor":
            raise _NotConstant
        rest = node.args[1:]
        fills = {"ones": 1, "zeros": 0}
        kind = name.removeprefix("new_").removesuffix("_like")
        fill = fills[kind] if kind in fills else self._value(node.kwargs.get("fill_value", rest[-1] if rest else None))
        if not isinstance(fill, (int, float, bool)):
            raise _NotConstant
        return torch.full(tuple(meant.shape), fill, dtype=meant.dtype, device=self._device)

    def _buffer(self, node: fx.Node) -> Tensor:
        real = self._context.real(node)
        is_buffer = "_buffers_" in str(node.target) and real is not None and not real.requires_grad
        is_buffer = is_buffer and not is_written(self._context, node)
        if not is_buffer or real is None:
            raise _NotConstant
        self.buffers.append(node)
        return real.detach().to(self._device)


class _NotConstant(Exception):
    """The node depends on an input."""


def _num(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def watch(ctx: GraphContext, buffers: Sequence[fx.Node]) -> None:
    """Guard the graph against writes to buffers that it relied on."""
    for node in dict.fromkeys(buffers):
        index, real = ctx.input_index(node), ctx.real(node)
        if index is not None and real is not None:
            ctx.watches.append(unchanged_since(index, real))


def unchanged_since(index: int, real: Tensor) -> Callable[[Sequence[Any]], bool]:
    """A guard on the graph's arguments: the same memory, unwritten since now."""
    pointer, version = real.data_ptr(), real._version

    def holds(args: Sequence[Any]) -> bool:
        now = args[index]
        return now.data_ptr() == pointer and now._version == version

    return holds
