"""Recommenders: embedding bags of many tables in one launch, fused dot interactions and cross layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.kernels import cross_layer, dot_interaction, embedding_bag, embedding_bags
from ridgeline.kernels.cross_layer.op import CROSS_LAYER
from ridgeline.kernels.dot_interaction.op import DOT_INTERACTION
from ridgeline.optimizer.rewrites.attention.masks import Constants, watch
from ridgeline.optimizer.rewrites.context import Extra, GraphContext, is_written
from ridgeline.optimizer.rewrites.linear.horizontal_fusion import Pack, _is_plain, columns, may_be_packed
from ridgeline.optimizer.rewrites.op_names import Call, call
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite

_NOTE = "lab/notes/families.md"


def joined_bags(
    weight: Tensor,
    starts: Tensor,
    edges: Tensor,
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor] | None,
    mode: str,
) -> Tensor:
    """Embedding bags of several concatenated tables: [B, T·D].

    ``edges`` are all offsets, or what is added to the given ones, for each bag of each table, and the end.
    """
    flat = torch.cat([each.reshape(-1) for each in indices])
    if offsets is None:
        return embedding_bags(weight, flat, edges, starts, mode=mode)
    batch = (edges.numel() - 1) // len(offsets)
    ends = torch.zeros_like(edges[-1:])
    whole = torch.cat([*(each[:batch] for each in offsets), ends.to(offsets[0].dtype)])
    return embedding_bags(weight, flat, whole + edges, starts, mode=mode)


@rewrite(
    "bags",
    summary="embedding bags of tables with the same width become one launch over concatenated tables",
    modes=(INFERENCE,),
    worth=Worth(eager=4.0, compiled=4.0, basis=f"4.0-8.5 times PyTorch's, {_NOTE}"),
    exact="reordered",
    needs_kernels=True,
)
def bags(ctx: GraphContext) -> list[Match]:
    if ctx.training:
        return []
    found = []
    for group in _bag_groups(ctx):
        match = _joined(ctx, group)
        if match is not None:
            found.append(match)
    return found


def _bag_groups(ctx: GraphContext) -> list[list[fx.Node]]:
    """Groups of two or more plain bags with the same width, dtype, mode, number of bags and kind of indices."""
    by_kind: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in ctx.nodes:
        read = call(node)
        if read is None or not _is_plain_bag(ctx, read) or any(user.op == "output" for user in node.users):
            continue
        weight, index = ctx.tensor(read["weight"]), ctx.tensor(read["input"])
        shape = ctx.shape(node)
        if weight is None or index is None or shape is None or not _is_plain(ctx, read["weight"]):
            continue
        offsets = ctx.tensor(read.get("offsets"))
        kind = (shape, weight.dtype, read.get("mode", "mean"), index.dtype, index.dim(),
                None if offsets is None else offsets.dtype, bool(read.get("include_last_offset", False)))  # fmt: skip
        by_kind.setdefault(kind, []).append(node)
    return [group for group in by_kind.values() if len(group) > 1]


def _is_plain_bag(ctx: GraphContext, read: Call) -> bool:
    """A sum or mean without sample weights, padding, max_norm or sparse gradients."""
    if read.op != "embedding_bag" or read.get("mode", "mean") not in ("sum", "mean"):
        return False
    special = ("max_norm", "per_sample_weights", "padding_idx")
    if any(read.given.get(name) is not None for name in special) or read.get("scale_grad_by_freq", False):
        return False
    index = ctx.shape(read["input"])
    return index is not None and 0 not in index and not (read.get("sparse", False) and ctx.training)


def _joined(ctx: GraphContext, nodes: list[fx.Node]) -> Match | None:
    group = [read for node in nodes if (read := call(node)) is not None]
    weights = [read["weight"] for read in group]
    inputs, offsets = [read["input"] for read in group], [read.get("offsets") for read in group]
    last = max(nodes, key=ctx.position)
    first = min(nodes, key=ctx.position)
    real = [ctx.real(weight) for weight in weights]
    if len(set(weights)) != len(weights) or any(len(weight.users) > 1 for weight in weights):
        return None
    if not may_be_packed(real) or not _fits(real):  # type: ignore[arg-type]
        ctx.refuse(first, "tables share memory with something else, or laying them side by side needs too much")
        return None
    before = all(ctx.position(each) < ctx.position(first) for each in (*inputs, *offsets) if each is not None)
    if not before or not ctx.unchanged((*weights, *inputs, *offsets), nodes, last):
        return None
    wide = _emit_bags(ctx, first, group)
    dim = (ctx.shape(weights[0]) or (0, 0))[1]
    for place, node in enumerate(nodes):
        part = ctx.emit(first, columns, wide, place * dim, dim)
        ctx.replace_any_layout(node, part)
    for node in nodes:
        ctx.discard(node)
    return ctx.match(wide, f"{len(nodes)} tables of {dim} columns, {(ctx.shape(wide) or (0,))[0]} bags each")


def _fits(tables: Sequence[Tensor]) -> bool:
    needed = sum(table.nbytes for table in tables)
    if tables[0].device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(tables[0].device)
    # Share of the free memory that concatenated tables may take.
    return needed <= 0.4 * free


def _emit_bags(ctx: GraphContext, at: fx.Node, group: list[Call]) -> fx.Node:
    weights = [ctx.real(read["weight"]) for read in group]
    indices, offsets = [read["input"] for read in group], [read.get("offsets") for read in group]
    device = weights[0].device  # type: ignore[union-attr]
    rows = torch.tensor([0, *(table.shape[0] for table in weights[:-1])], device=device).cumsum(0)  # type: ignore[union-attr]
    batch = (ctx.shape(group[0].node) or (0,))[0]
    counts = [torch.Size(ctx.shape(index) or ()).numel() for index in indices]
    starts = [sum(counts[:i]) for i in range(len(counts))]
    if offsets[0] is None:
        per_bag = [count // batch for count in counts]
        edges = [start + bag * each for start, each in zip(starts, per_bag, strict=True) for bag in range(batch)]
    else:
        edges = [start for start in starts for _ in range(batch)]
    kind = ctx.dtype(offsets[0] if offsets[0] is not None else indices[0])
    tensor = torch.tensor([*edges, sum(counts)], device=device, dtype=kind)
    pack = Pack([ctx.input_index(read["weight"]) for read in group])  # type: ignore[misc]
    like = torch.empty((int(rows[-1]) + weights[-1].shape[0], weights[0].shape[1]), dtype=weights[0].dtype,  # type: ignore[union-attr]
                       device="meta")  # fmt: skip
    weight = ctx.extra_input(like, Extra(f"tables_{len(ctx.extras)}", pack.current, pack.undo))
    given = None if offsets[0] is None else offsets
    mode = group[0].get("mode", "mean")
    return ctx.emit(at, joined_bags, weight, _constant(ctx, rows), _constant(ctx, tensor), indices, given, mode)


def _constant(ctx: GraphContext, value: Tensor) -> fx.Node:
    return ctx.extra_input(value, Extra(f"constant_{len(ctx.extras)}", lambda args: value))


@rewrite(
    "bag",
    summary="F.embedding_bag becomes our kernel, forward and dense gradient",
    worth=Worth(eager=2.0, compiled=2.0, basis=f"2.8 times PyTorch's forward and 2.2 times backward, {_NOTE}"),
    exact="reordered",
    needs_kernels=True,
)
def bag(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        read = call(node)
        if read is None or not _is_plain_bag(ctx, read) or ctx.dtype(read["weight"]) is None:
            continue
        names = ("input", "weight", "offsets", "mode", "include_last_offset")
        given = {name: read.given[name] for name in names if name in read.given}
        new = ctx.emit(node, embedding_bag, **given)
        if ctx.replace(node, new):
            ctx.discard(node)
            found.append(ctx.match(new, f"a table {ctx.shape(read['weight'])}, {ctx.shape(new)}"))
    return found


# Dot interaction.


@rewrite(
    "interaction",
    summary="dot products of all pairs of features, picked from a square matrix, become one kernel",
    worth=Worth(eager=4.0, compiled=3.0, basis=f"4.3 times PyTorch's forward and 25 times backward, {_NOTE}"),
    exact="reordered",
    needs_kernels=True,
)
def interaction(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        square = None if ctx.autocast else _pairs_of(ctx, node)
        if square is not None and (match := _interacted(ctx, node, *square)) is not None:
            found.append(match)
    return found


def _pairs_of(ctx: GraphContext, node: fx.Node) -> tuple[fx.Node, Tensor, list[fx.Node]] | None:
    """The features whose dot products a node picks, each pair once, and their positions in our kernel's order."""
    read = call(node)
    if read is None or read.op != "getitem" or not isinstance(read["index"], tuple) or len(read["index"]) != 3:
        return None
    every, i, j = read["index"]
    features = _squared(ctx, read["input"])
    if every != slice(None) or features is None or not isinstance(i, fx.Node) or not isinstance(j, fx.Node):
        return None
    known = Constants(ctx)
    rows, cols = known.of(i), known.of(j)
    num = (ctx.shape(features) or (0, 0, 0))[1]
    if rows is None or cols is None or rows.dim() != 1 or rows.shape != cols.shape or num < 2:
        return None
    high, low = torch.maximum(rows, cols).long(), torch.minimum(rows, cols).long()
    place = (high * (high - 1) // 2 + low).cpu()
    ordered = torch.arange(num * (num - 1) // 2)
    if bool((low < 0).any()) or bool((high >= num).any()) or bool((high == low).any()):
        return None
    return (features, place, known.buffers) if torch.equal(place.sort().values, ordered) else None


def _squared(ctx: GraphContext, node: Any) -> fx.Node | None:
    """x of x @ xᵀ, with x [B, F, D]."""
    read = call(node)
    if read is None or read.op not in ("bmm", "matmul"):
        return None
    a, b = read["input"], read["other"]
    turned = call(b)
    if turned is None or turned.given.get("input") is not a or len(ctx.shape(a) or ()) != 3:
        return None
    dims = {turned.given.get("dim0"), turned.given.get("dim1")} if turned.op == "transpose" else None
    if dims in ({1, 2}, {-1, -2}, {1, -1}, {2, -2}) or turned.op == "mT":
        return a
    return a if turned.op == "permute" and tuple(turned["dims"]) == (0, 2, 1) else None


def _interacted(
    ctx: GraphContext, node: fx.Node, features: fx.Node, place: Tensor, buffers: list[fx.Node]
) -> Match | None:
    dense, sparse = _parts(ctx, features)
    values = [ctx.value(each) for each in (dense, sparse)]
    if DOT_INTERACTION.support(*values) is not None or not ctx.unchanged((features,), (features,), node):
        return None
    both = ctx.emit(node, dot_interaction, dense, sparse)
    watch(ctx, buffers)
    dim = values[0].shape[1]
    ordered = torch.equal(place, torch.arange(place.numel()))
    whole = _beside(ctx, node, dense)
    if not ordered:
        moved = torch.cat([torch.arange(dim), dim + place]) if whole is not None else dim + place
        order = _constant(ctx, moved.to(values[0].device))
        both = ctx.emit(node, torch.index_select, both, 1, order)
    if whole is not None:
        ctx.replace_any_layout(whole, both)
        ctx.discard(whole)
    else:
        ctx.replace_any_layout(node, both if not ordered else ctx.emit(node, columns, both, dim, place.numel()))
        ctx.discard(node)
    return ctx.match(both, f"{values[1].shape[1] + 1} features of {dim} columns, {place.numel()} pairs")


def _beside(ctx: GraphContext, node: fx.Node, dense: fx.Node) -> fx.Node | None:
    """The concatenation [dense, pairs], if the pairs have no other user."""
    user = next(iter(node.users)) if len(node.users) == 1 else None
    read = call(user)
    if user is None or read is None or read.op != "cat" or read.get("dim", 0) not in (1, -1):
        return None
    parts = list(read["tensors"])
    return user if parts == [dense, node] and ctx.position(dense) < ctx.position(node) else None


def _parts(ctx: GraphContext, features: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The first feature and the others, before they were concatenated if that can be told."""
    read = call(features)
    source = read
    if read is not None and read.op in ("view", "reshape"):
        source = call(read["input"])
    pieces = list(source["tensors"]) if source is not None and source.op in ("cat", "stack") else []
    dim = source.get("dim", 0) if source is not None else 0
    shape = ctx.shape(features) or (0, 0, 0)
    flat = (shape[0], shape[2])
    if source is not None and pieces and dim in (1, -2 if source is read else -1):
        joined = (source.op == "stack" and source is read) or (source is not read and source.op == "cat")
        if joined and all(ctx.shape(piece) == flat for piece in pieces):
            return pieces[0], _stacked(ctx, features, pieces[1:])
        finite_mask = call(pieces[0])
        plain = finite_mask is not None and finite_mask.op == "unsqueeze" and finite_mask["dim"] in (1, -2)
        if source is read and source.op == "cat" and len(pieces) == 2 and plain and finite_mask is not None:
            return finite_mask["input"], pieces[1]
    dense = ctx.emit(features.next, torch.select, features, 1, 0)
    return dense, ctx.emit(dense.next, torch.narrow, features, 1, 1, shape[1] - 1)


def _stacked(ctx: GraphContext, features: fx.Node, pieces: list[fx.Node]) -> fx.Node:
    """Features side by side; a view if one launch made all of them."""
    dim = (ctx.shape(features) or (0, 0, 0))[2]
    wide = pieces[0].args[0] if pieces[0].target is columns else None
    at = features.next
    if isinstance(wide, fx.Node) and (ctx.shape(wide) or (0, 0))[1] == dim * len(pieces):
        places = [(piece.target is columns, piece.args[:2]) for piece in pieces]
        if places == [(True, (wide, i * dim)) for i in range(len(pieces))]:
            return ctx.emit(at, torch.unflatten, wide, 1, (len(pieces), dim))
    return ctx.emit(at, torch.stack, pieces, 1)


# Cross layers.


@rewrite(
    "cross",
    summary="x0 · (W x + b) + x of a cross network becomes one kernel, low rank or full",
    worth=Worth(eager=1.2, compiled=1.0, basis=f"1.1-1.6 times PyTorch's, {_NOTE}"),
    exact="reordered",
    needs_kernels=True,
)
def cross(ctx: GraphContext) -> list[Match]:
    found = []
    for node in ctx.nodes:
        given = None if ctx.autocast else _crossed(ctx, node)
        if given is None or CROSS_LAYER.support(*(ctx.value(each) for each in given)) is not None:
            continue
        inputs = [each for each in given if isinstance(each, fx.Node)]
        if not ctx.unchanged(inputs, (node,), node) or any(is_written(ctx, each) for each in inputs):
            continue
        new = ctx.emit(node, cross_layer, *given)
        if ctx.replace(node, new):
            ctx.discard(node)
            rank = "" if given[4] is None else " of low rank"
            found.append(ctx.match(new, f"cross layer {ctx.shape(given[0])}{rank}"))
    return found


def _crossed(ctx: GraphContext, node: fx.Node) -> tuple[Any, ...] | None:
    """(x0, x, weight, bias, down) of x0 · (W x + b) + x."""
    total = call(node)
    if total is None or total.op != "add" or total.given.get("alpha") not in (None, 1):
        return None
    for product, x in ((total["input"], total["other"]), (total["other"], total["input"])):
        times = call(product)
        if times is None or times.op != "mul" or len(product.users) != 1:
            continue
        for x0, mapped in ((times["input"], times["other"]), (times["other"], times["input"])):
            up = call(mapped)
            if up is None or up.op != "linear" or len(mapped.users) != 1 or not isinstance(x0, fx.Node):
                continue
            if up["input"] is x:
                return x0, x, up["weight"], up.get("bias"), None
            down = call(up["input"])
            plain = down is not None and down.op == "linear" and down.get("bias") is None
            if plain and down is not None and down["input"] is x and len(up["input"].users) == 1:
                return x0, x, up["weight"], up.get("bias"), down["weight"]
    return None
