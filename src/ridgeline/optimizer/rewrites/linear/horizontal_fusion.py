"""Fuses linear layers that share their input into one GEMM: query, key and value projections, gate and up."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.engine.replay.static_inputs import is_alone
from ridgeline.optimizer.rewrites.context import Extra, GraphContext
from ridgeline.optimizer.rewrites.op_names import Call, call
from ridgeline.optimizer.rewrites.registry import INFERENCE, TRAINING, Match, Worth, rewrite


@rewrite(
    "horizontal",
    summary="linear layers that read the same input become one GEMM over concatenated weights",
    modes=(INFERENCE,),
    worth=Worth(
        eager=1.05,
        compiled=1.05,
        basis="the input is read once, launches fall by a third; skinny products fill the device",
    ),
    exact="reordered",
)
def horizontal(ctx: GraphContext) -> list[Match]:
    if ctx.training:
        return []
    found = []
    for group in _groups(ctx):
        match = _joined(ctx, group)
        if match is not None:
            found.append(match)
    return found


@rewrite(
    "side-by-side",
    summary="linear layers that read the same input become one GEMM over a copy of their weights, in training",
    modes=(TRAINING,),
    worth=Worth(
        eager=1.0,
        compiled=1.0,
        basis="BERT-large's step 1.014 (5 of 7 rounds) for 1.8 % more memory, on one H200; no other was measured, so "
        "nobody takes it unasked",
    ),
    exact="reordered",
)
def side_by_side(ctx: GraphContext) -> list[Match]:
    if not ctx.training:
        return []
    return [match for group in _groups(ctx) if (match := _trained(ctx, group)) is not None]


def _trained(ctx: GraphContext, group: list[Call]) -> Match | None:
    """One GEMM over weights concatenated in every step, so that parameters and gradients stay separate."""
    first = min(group, key=lambda read: ctx.position(read.node))
    last = max(group, key=lambda read: ctx.position(read.node))
    weights, biases = [read["weight"] for read in group], [read.get("bias") for read in group]
    nodes, real = [read.node for read in group], [ctx.real(weight) for weight in weights]
    if len({weight is not None and weight.requires_grad for weight in real}) > 1 or not _is_worth_a_copy(ctx, group):
        return None
    if not ctx.unchanged((first["input"], *weights, *biases), nodes, last.node):
        return None
    weight = ctx.emit(first.node, torch.cat, weights)
    bias = None if biases[0] is None else ctx.emit(first.node, torch.cat, biases)
    wide = ctx.emit(first.node, torch.nn.functional.linear, first["input"], weight, bias)
    sizes = [(ctx.shape(weight) or (0,))[0] for weight in weights]
    parts = ctx.emit(first.node, torch.split, wide, sizes, -1)
    for i, read in enumerate(group):
        ctx.replace_any_layout(read.node, ctx.emit(first.node, operator.getitem, parts, i))
    for node in nodes:
        ctx.discard(node)
    return ctx.match(
        wide, f"{len(group)} products of {tuple(ctx.shape(first['input']) or ())} → {'+'.join(map(str, sizes))}"
    )


def _is_worth_a_copy(ctx: GraphContext, group: list[Call]) -> bool:
    """Whether copying all weights, forward and backward, takes less time than what is saved.

    Saved are, for each GEMM but one, a sum of two gradients of the input, and its launches.
    """
    given = ctx.tensor(group[0]["input"])
    weights = [real for read in group if (real := ctx.real(read["weight"])) is not None]
    copied = sum(4 * weight.numel() * weight.element_size() for weight in weights)
    summed = 0 if given is None else 3 * given.numel() * given.element_size()
    # Bytes that could be read during the launches of a GEMM and its two backward GEMMs, and of a sum of gradients:
    # some 3 µs each in a CUDA graph.
    return copied <= (len(group) - 1) * (summed + 40e6)


def _groups(ctx: GraphContext) -> list[list[Call]]:
    """Groups of two or more linear layers with the same input, each weight a parameter without other users."""
    by_input: dict[tuple[Any, ...], list[Call]] = {}
    for node in ctx.nodes:
        read = call(node)
        if read is None or read.op != "linear" or not isinstance(read["input"], fx.Node):
            continue
        weight, bias = read["weight"], read.get("bias")
        if any(user.op == "output" for user in node.users):
            continue  # outputs keep memory of their own
        if _is_plain(ctx, weight) and (bias is None or _is_plain(ctx, bias)):
            key = (read["input"], bias is None, ctx.dtype(weight), (ctx.shape(weight) or (0, 0))[1])
            by_input.setdefault(key, []).append(read)
    return [group for group in by_input.values() if len(group) > 1 and _is_distinct(group)]


def _is_distinct(group: list[Call]) -> bool:
    """Whether every weight occurs once, used by this layer alone: a shared one would be packed twice."""
    weights = [read["weight"] for read in group]
    return len(set(weights)) == len(weights) and all(len(weight.users) == 1 for weight in weights)


def _is_plain(ctx: GraphContext, node: Any) -> bool:
    """Whether a node is a contiguous parameter in ordinary memory."""
    real = ctx.real(node)
    if real is None or type(real) not in (torch.nn.Parameter, Tensor) or not ctx.is_state(node):
        return False
    return real.layout is torch.strided and real.is_contiguous() and not real.is_inference()


def may_be_packed(parameters: Sequence[Tensor]) -> bool:
    """Whether parameters may be moved: each owns its whole storage, or they are already adjacent.

    Otherwise weights tied by their memory would be untied, and writes to an alias would not reach the model.
    """
    return are_adjacent(parameters) or all(
        x.untyped_storage().nbytes() == x.numel() * x.element_size() and is_alone(x) for x in parameters
    )


def are_adjacent(parameters: Sequence[Tensor]) -> bool:
    """Whether parameters are adjacent in one storage."""
    first = parameters[0]
    place = first.storage_offset()
    for x in parameters:
        if x.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or x.storage_offset() != place:
            return False
        place += x.numel()
    return True


def _joined(ctx: GraphContext, group: list[Call]) -> Match | None:
    first = min(group, key=lambda read: ctx.position(read.node))
    last = max(group, key=lambda read: ctx.position(read.node))
    weights, biases = [read["weight"] for read in group], [read.get("bias") for read in group]
    nodes = [read.node for read in group]
    if not ctx.unchanged((first["input"], *weights, *biases), nodes, last.node):
        return None
    groups = [weights] if biases[0] is None else [weights, biases]
    if not all(may_be_packed([ctx.real(node) for node in group]) for group in groups):  # type: ignore[misc]
        ctx.refuse(first.node, "a weight shares its memory with something else")
        return None
    weight = _side_by_side(ctx, weights)
    bias = None if biases[0] is None else _side_by_side(ctx, biases)
    wide = ctx.emit(first.node, torch.nn.functional.linear, first["input"], weight, bias)
    sizes = [(ctx.shape(read["weight"]) or (0,))[0] for read in group]
    start = 0
    for read, size in zip(group, sizes, strict=True):
        part = ctx.emit(first.node, columns, wide, start, size)
        ctx.replace_any_layout(read.node, part)
        start += size
    for node in nodes:
        ctx.discard(node)
    return ctx.match(
        wide, f"{len(group)} products of {tuple(ctx.shape(first['input']) or ())} → {'+'.join(map(str, sizes))}"
    )


def columns(wide: Tensor, start: int, size: int) -> Tensor:
    """Some columns of a GEMM's result, as a view."""
    return wide.narrow(-1, start, size)


def _side_by_side(ctx: GraphContext, nodes: Sequence[fx.Node]) -> fx.Node:
    indices = [ctx.input_index(node) for node in nodes]
    real = [ctx.real(node) for node in nodes]
    pack = Pack(indices)  # type: ignore[arg-type]
    rows = sum(x.shape[0] for x in real)  # type: ignore[union-attr]
    like = _stand_in(real[0], rows)  # type: ignore[arg-type]
    return ctx.extra_input(like, Extra(f"side_by_side_{len(ctx.extras)}", pack.current, pack.undo))


def _stand_in(like: Tensor, rows: int) -> Tensor:
    return torch.empty((rows, *like.shape[1:]), dtype=like.dtype, device="meta")


class Pack:
    """Concatenates parameters into one tensor, and makes them views of it, so that memory does not double.

    Writes to a parameter are writes to the pack. A parameter that was moved since is copied in again. A compiled block
    may serve several layers, so there is a pack for each set of parameters.
    """

    def __init__(self, indices: Sequence[int]) -> None:
        self._indices = tuple(indices)
        self._packs: dict[int, _Laid] = {}

    def current(self, args: Sequence[Any]) -> Tensor:
        found = self._packs.get(args[self._indices[0]].data_ptr())
        if found is not None:
            for index, pointer in zip(self._indices, found.pointers, strict=True):
                if args[index].data_ptr() != pointer:
                    break
            else:
                return found.pack
        return self._lay([args[index] for index in self._indices])

    @torch.no_grad()
    def _lay(self, parameters: Sequence[Tensor]) -> Tensor:
        self._packs = {key: laid for key, laid in self._packs.items() if laid.is_used()}
        if are_adjacent(parameters):
            first, rows = parameters[0].detach(), sum(x.shape[0] for x in parameters)
            pack = first.as_strided((rows, *first.shape[1:]), first.stride())
        elif not may_be_packed(parameters):  # of another layer than the traced one, or tied since
            return torch.cat([x.detach() for x in parameters])
        else:
            pack = torch.cat([x.detach() for x in parameters])
            start = 0
            for x in parameters:
                x.data = pack[start : start + x.shape[0]]
                start += x.shape[0]
        pointers = tuple(x.data_ptr() for x in parameters)
        self._packs[pointers[0]] = _Laid(pack, pointers, tuple(weakref.ref(x) for x in parameters))
        return pack

    def undo(self) -> None:
        """Give every parameter memory of its own again."""
        for laid in self._packs.values():
            for parameter, pointer in zip(laid.parameters, laid.pointers, strict=True):
                x = parameter()
                if x is not None and x.data_ptr() == pointer:
                    x.data = x.data.clone()
        self._packs = {}


@dataclass(frozen=True, slots=True)
class _Laid:
    """A pack, and its parameters with their addresses."""

    pack: Tensor
    pointers: tuple[int, ...]
    parameters: tuple[weakref.ref[Tensor], ...]

    def is_used(self) -> bool:
        """Whether the parameters are still views of the pack; otherwise it can be freed."""
        alive = [parameter() for parameter in self.parameters]
        return all(x is not None and x.data_ptr() == at for x, at in zip(alive, self.pointers, strict=True))
