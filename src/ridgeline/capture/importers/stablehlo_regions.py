"""StableHLO's ops that reduce, order, gather and scatter: their bodies run on whole tensors at once."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from ridgeline.capture.importers.stablehlo_ops import MASKS, Call, op, ordered, padded, total, wrapped

MAX_RANKED = 4096
"""Elements that are sorted by comparing each with each."""


def simple(block: Any, count: int = 1) -> str:
    """The op of a body that applies one to an accumulated and a new value; empty for any other."""
    if count != 1 or len(block.nodes) != 1 or block.results != block.nodes[0].outputs:
        return ""
    node = block.nodes[0]
    return node.op.split(".")[1] if sorted(node.inputs) == sorted(block.params) else ""


def neutral(kind: str, dtype: torch.dtype, number: Any) -> bool:
    """Whether a number changes nothing as the first of a reduction."""
    if number is None:
        return False
    if dtype == torch.bool:
        return bool(number) == (kind in ("and", "multiply", "minimum"))
    least, most = (-float("inf"), float("inf")) if dtype.is_floating_point else (
        (0, 0) if dtype.is_complex else (torch.iinfo(dtype).min, torch.iinfo(dtype).max))  # fmt: skip
    return bool({"add": number == 0, "multiply": number == 1, "maximum": number == least,
                 "minimum": number == most}.get(kind))  # fmt: skip


def reduced(call: Call, args: Sequence[torch.Tensor], inits: Sequence[torch.Tensor], dims: Sequence[int],
            numbers: Sequence[Any]) -> list[torch.Tensor]:  # fmt: skip
    kind, count = simple(call.node.regions[0], len(args)), len(args)
    x, dims = args[0], sorted(dims)
    whole = not (x.is_floating_point() or x.is_complex())
    if not dims:
        kind = ""
    out: torch.Tensor | None = None
    empty = any(x.shape[d] == 0 for d in dims)
    if x.dtype == torch.bool and kind in ("or", "and", "maximum", "minimum", "add", "multiply"):
        out = x.any(dims) if kind in ("or", "maximum", "add") else x.all(dims)
    elif kind == "add":
        out = wrapped(call, x.sum(dims, dtype=x.dtype), call.kind.element)
    elif kind == "multiply" and (not whole or call.kind.element not in MASKS):
        out = x
        for dim in reversed(dims):
            out = out.prod(dim, dtype=x.dtype)
    elif kind in ("maximum", "minimum") and not empty and not x.is_complex() and call.kind.element != "ui64":
        out = x.amax(dims) if kind == "maximum" else x.amin(dims)
    if out is not None:
        if neutral(kind, x.dtype, numbers[0]):
            return [out]
        return call.computed(0, [inits[0].expand(out.shape) if inits[0].dim() == 0 else inits[0], out])
    # Any other body: halves on halves, in order
    keep = [d for d in range(x.dim()) if d not in dims]
    found = [t.permute([*keep, *dims]).reshape([*[x.shape[d] for d in keep], prod(x.shape[d] for d in dims)])
             for t in args]  # fmt: skip
    size = found[0].shape[-1]
    while size > 1:
        half = size // 2
        sides = [t[..., side : 2 * half : 2] for side in (0, 1) for t in found]
        made = call.computed(0, sides)
        found = [torch.cat([m.expand(t[..., :half].shape), t[..., 2 * half :]], -1) if size % 2 else m
                 for m, t in zip(made, found)]  # fmt: skip
        size = size - half
    shape = [x.shape[d] for d in keep]
    starts = [t.expand(shape) for t in inits]
    if size == 0:
        return starts
    return [t.expand(shape) for t in call.computed(0, [*starts, *[t.squeeze(-1) for t in found]])][:count]


@op("reduce")
def _reduce(call: Call, *args: torch.Tensor) -> Any:
    half = len(args) // 2
    return reduced(call, args[:half], args[half:], call.get("dimensions"),
                   [call.scalar(half + i) for i in range(half)])  # fmt: skip


def windows(x: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> torch.Tensor:
    """Every window of a tensor, its dims behind those that count windows."""
    for dim, (size, stride, dilation) in enumerate(zip(sizes, strides, dilations)):
        span = (size - 1) * dilation + 1
        x = x.unfold(dim, span, stride)[..., ::dilation]
    return x


@op("reduce_window")
def _reduce_window(call: Call, *args: torch.Tensor) -> Any:
    half, rank = len(args) // 2, args[0].dim()
    sizes = call.get("window_dimensions")
    strides, base = call.get("window_strides") or [1] * rank, call.get("base_dilations") or [1] * rank
    dilations, pads = call.get("window_dilations") or [1] * rank, call.get("padding") or [[0, 0]] * rank
    numbers = [call.scalar(half + i) for i in range(half)]
    kind, x = simple(call.node.regions[0], half), args[0]
    wide = [d for d in range(rank) if sizes[d] > 1]
    plain_step = all(s == 1 for s in (*strides, *base, *dilations))
    is_neutral = half == 1 and neutral(kind, x.dtype, numbers[0])
    if is_neutral and len(wide) == 1 and plain_step and kind in ("add", "multiply", "maximum", "minimum") and (
            sizes[wide[0]] == x.shape[wide[0]] and x.dtype != torch.bool and call.kind.element != "ui64"):  # fmt: skip
        (dim,) = wide
        before = (sizes[dim] - 1, 0)
        if tuple(pads[dim]) in (before, before[::-1]) and not any(any(p) for d, p in enumerate(pads) if d != dim):
            turned = tuple(pads[dim]) != before
            x = torch.flip(x, [dim]) if turned else x
            if kind in ("add", "multiply"):
                made = (torch.cumsum if kind == "add" else torch.cumprod)(x, dim, dtype=x.dtype)
            else:
                made = (torch.cummax if kind == "maximum" else torch.cummin)(x, dim)[0]
            return wrapped(call, torch.flip(made, [dim]) if turned else made)
    pooled = is_neutral and kind in ("add", "maximum") and x.is_floating_point() and 1 <= len(wide) <= 2 and rank >= 3
    if pooled and all(s == 1 for s in base) and all(strides[d] == 1 and not any(pads[d]) and dilations[d] == 1
                                                    for d in range(rank) if d not in wide):  # fmt: skip
        rest = [d for d in range(rank) if d not in wide]
        order = [*rest, *wide]
        y = x.permute(order)
        lead = y.shape[: len(rest)]
        y = y.reshape(-1, 1, *y.shape[len(rest) :]) if len(rest) != 2 else y
        y = padded(y, args[1], numbers[0], [0, 0, *[pads[d][0] for d in wide]], [0, 0, *[pads[d][1] for d in wide]])
        window, step, apart = ([v[d] for d in wide] for v in (sizes, strides, dilations))
        if kind == "maximum":
            y = (F.max_pool1d if len(wide) == 1 else F.max_pool2d)(y, window, step, 0, apart)
        elif all(d == 1 for d in apart):
            y = (F.avg_pool1d if len(wide) == 1 else F.avg_pool2d)(y, window, step) * prod(window)
        else:
            pooled = False
        if pooled:
            y = y.reshape(*lead, *y.shape[-len(wide) :])
            return y.permute([order.index(d) for d in range(rank)])
    low, high = [p[0] for p in pads], [p[1] for p in pads]
    views = [windows(padded(t, init, number, low, high, [b - 1 for b in base]), sizes, strides, dilations)
             for t, init, number in zip(args[:half], args[half:], numbers)]  # fmt: skip
    return reduced(call, views, args[half:], range(rank, 2 * rank), numbers)


@op("select_and_scatter")
def _select_and_scatter(call: Call, x: torch.Tensor, source: torch.Tensor, init: torch.Tensor) -> torch.Tensor:
    rank, block = x.dim(), call.node.regions[0]
    direction = block.nodes[-1].attrs.get("comparison_direction") if len(block.nodes) == 1 else ""
    if direction not in ("GE", "GT", "LE", "LT") or simple(call.node.regions[1]) != "add":
        raise call.wrong("selects or scatters by more than a comparison and a sum, which is not supported")
    sizes, strides = call.get("window_dimensions") or [1] * rank, call.get("window_strides") or [1] * rank
    pads = call.get("padding") or [[0, 0]] * rank
    low, high = [p[0] for p in pads], [p[1] for p in pads]
    most = direction in ("GE", "GT")
    edge = -float("inf") if most else float("inf")
    if not x.is_floating_point():
        edge = torch.iinfo(x.dtype).min if most else torch.iinfo(x.dtype).max
    filled = padded(x, x.new_full((), edge), edge, low, high)
    places = torch.arange(x.numel(), device=x.device).reshape(x.shape)
    places = padded(places, places.new_full((), -1), -1, low, high)
    views = windows(filled, sizes, strides, [1] * rank).flatten(rank)
    spots = windows(places, sizes, strides, [1] * rank).flatten(rank)
    best = (views.argmax(-1) if most else views.argmin(-1)).unsqueeze(-1)
    at = torch.gather(spots, -1, best).reshape(-1)
    out = init.expand(x.numel()).clone() if init.dim() == 0 else init
    return out.index_add(0, at, source.reshape(-1)).reshape(x.shape)


# --- places ---------------------------------------------------------------------------------------------------------


def _starts(indices: torch.Tensor, vector: int) -> torch.Tensor:
    """Index vectors as the last dim."""
    return indices.unsqueeze(-1) if vector == indices.dim() else indices.movedim(vector, -1)


@op("gather dynamic_gather")
def _gather(call: Call, x: torch.Tensor, indices: torch.Tensor, sizes: Any = None) -> torch.Tensor:
    n = call.get("dimension_numbers")
    sizes = call.sizes(2) if sizes is not None else call.get("slice_sizes")
    starts = _starts(indices.to(torch.int64), n["index_vector_dim"])
    mapped, gone = n["start_index_map"], [*n["collapsed_slice_dims"], *n["operand_batching_dims"]]
    batch = list(starts.shape[:-1])
    rank, windowed = x.dim(), [d for d in range(x.dim()) if d not in gone]
    out_rank = len(batch) + len(windowed)
    offsets = n["offset_dims"]
    lead = [d for d in range(out_rank) if d not in offsets]
    order = [(lead + list(offsets)).index(d) for d in range(out_rank)]
    full = all(sizes[d] == x.shape[d] for d in range(rank) if d not in mapped)
    if len(mapped) == 1 and not n["operand_batching_dims"] and mapped[0] in gone and full:
        (dim,) = mapped
        flat = torch.clamp(starts.reshape(-1), 0, x.shape[dim] - 1)
        if dim == 0 and rank == 2:
            made = F.embedding(flat, x).reshape([*batch, *[x.shape[d] for d in windowed]])
        else:
            made = torch.index_select(x, dim, flat).movedim(dim, 0).reshape([*batch, *[x.shape[d] for d in windowed]])
        return made.permute(order) if order != list(range(out_rank)) else made
    index = _places(call, x, starts, [sizes[d] for d in range(rank)], mapped, n["operand_batching_dims"],
                    n["start_indices_batching_dims"], n["index_vector_dim"], clamp=True)  # fmt: skip
    made = x[tuple(index)].reshape([*batch, *[sizes[d] for d in windowed]])
    return made.permute(order)


def _places(call: Call, x: torch.Tensor, starts: torch.Tensor, sizes: Sequence[int], mapped: Sequence[int],
            own: Sequence[int], theirs: Sequence[int], vector: int, *, clamp: bool) -> list[torch.Tensor]:  # fmt: skip
    """An index for each dim of the operand, of the shape: batch dims, then one per dim of the operand."""
    batch, rank = list(starts.shape[:-1]), x.dim()
    found = []
    for dim in range(rank):
        shape = [1] * (len(batch) + rank)
        shape[len(batch) + dim] = sizes[dim]
        at = torch.arange(sizes[dim], device=starts.device).reshape(shape)
        if dim in mapped:
            start = starts[..., list(mapped).index(dim)].reshape([*batch, *[1] * rank])
            at = at + (torch.clamp(start, 0, x.shape[dim] - sizes[dim]) if clamp else start)
        elif dim in own:
            place = theirs[list(own).index(dim)]
            place -= place > vector
            shape = [1] * (len(batch) + rank)
            shape[place] = batch[place]
            at = at + torch.arange(batch[place], device=starts.device).reshape(shape)
        found.append(at)
    return found


@op("scatter")
def _scatter(call: Call, *args: torch.Tensor) -> Any:
    count = (len(args) - 1) // 2
    block = call.node.regions[0]
    kind = simple(block, count)
    if not kind and count == 1 and not block.nodes and block.results == block.params[1:]:
        kind = "replace"
    if kind not in ("replace", "add", "multiply", "maximum", "minimum", "and", "or"):
        raise call.wrong("updates by a body of its own: only sums, products, extremes and replacements are supported")
    x, indices, updates = args
    n = call.get("scatter_dimension_numbers")
    mapped = n["scattered_dims_to_operand_dims"]
    gone = [*n["inserted_window_dims"], *n["input_batching_dims"]]
    starts = _starts(indices.to(torch.int64), n["index_vector_dim"])
    window = n["update_window_dims"]
    lead = [d for d in range(updates.dim()) if d not in window]
    sizes, rest = [1] * x.dim(), [d for d in range(x.dim()) if d not in gone]
    for dim, of in zip(rest, window):
        sizes[dim] = updates.shape[of]
    index = _places(call, x, starts, sizes, mapped, n["input_batching_dims"], n["scatter_indices_batching_dims"],
                    n["index_vector_dim"], clamp=False)  # fmt: skip
    flat: Any = 0
    inside: Any = None
    for dim, at in enumerate(index):
        flat = flat * x.shape[dim] + at
        if dim in mapped:
            good = (at >= 0) & (at < x.shape[dim])
            inside = good if inside is None else inside & good
    shape = [*starts.shape[:-1], *sizes]
    if isinstance(flat, int):
        flat = torch.zeros(shape, dtype=torch.int64, device=starts.device)
    if inside is not None:
        flat = torch.where(inside, flat, x.numel())  # one element too many takes what falls outside
    flat = flat.expand(shape).reshape(-1)
    values = updates.permute([*lead, *window]).reshape(-1)
    base = torch.cat([x.reshape(-1), x.new_zeros(1)])
    if x.dtype == torch.bool:
        kind = {"add": "maximum", "or": "maximum", "multiply": "minimum", "and": "minimum"}.get(kind, kind)
        base, values = base.to(torch.uint8), values.to(torch.uint8)
    if kind in ("and", "or"):
        raise call.wrong("updates integers bit by bit, which is not supported: add distinct bits instead")
    if kind == "replace":
        base = torch.index_put(base, (flat,), values)
    elif kind == "add":
        base = wrapped(call, torch.index_put(base, (flat,), values, accumulate=True))
    elif call.kind.element == "ui64" and kind != "multiply":
        how = "amax" if kind == "maximum" else "amin"
        base = ordered(torch.scatter_reduce(ordered(base), 0, flat, ordered(values), how))
    else:
        how = {"multiply": "prod", "maximum": "amax", "minimum": "amin"}[kind]
        base = wrapped(call, torch.scatter_reduce(base, 0, flat, values, how))
    return base[:-1].reshape(x.shape).to(x.dtype)


def _start(call: Call, at: int, t: torch.Tensor, most: int) -> Any:
    """Where a slice starts, clamped: a number where it is known."""
    known = call.known(at)
    if known is not None:
        return min(max(int(known.item()), 0), most)
    return torch.clamp(t.to(torch.int64), 0, most)


@op("dynamic_slice")
def _dynamic_slice(call: Call, x: torch.Tensor, *starts: torch.Tensor) -> torch.Tensor:
    for dim, size in enumerate(call.get("slice_sizes")):
        most = x.shape[dim] - size
        if most == 0:
            continue
        start = _start(call, dim + 1, starts[dim], most)
        if isinstance(start, int):
            x = x.narrow(dim, start, size)
        else:
            x = torch.index_select(x, dim, torch.arange(size, device=x.device) + start)
    return x


@op("dynamic_update_slice")
def _dynamic_update_slice(call: Call, x: torch.Tensor, update: torch.Tensor, *starts: torch.Tensor) -> torch.Tensor:
    dims = [d for d in range(x.dim()) if x.shape[d] != update.shape[d]]
    found = [_start(call, d + 2, starts[d], x.shape[d] - update.shape[d]) for d in dims]

    def put(x: torch.Tensor, at: int) -> torch.Tensor:
        if at == len(dims):
            return update
        dim, start = dims[at], found[at]
        size = update.shape[dim]
        if isinstance(start, int):
            return torch.slice_scatter(x, put(x.narrow(dim, start, size), at + 1), dim, start, start + size)
        index = torch.arange(size, device=x.device) + start
        last = at + 1 == len(dims)
        return torch.index_copy(x, dim, index, update if last else put(torch.index_select(x, dim, index), at + 1))

    return put(x, 0)


# --- order ----------------------------------------------------------------------------------------------------------


def sort_key(call: Call, args: Sequence[torch.Tensor]) -> tuple[torch.Tensor, bool] | None:
    """The key that a comparator compares, where it compares one of each side, and whether the order descends."""
    block = call.node.regions[0]
    last = block.nodes[-1] if block.nodes else None
    if last is None or last.op != "stablehlo.compare" or block.results != last.outputs:
        return None
    made = {out: node for node in block.nodes for out in node.outputs}
    params = {value: at for at, value in enumerate(block.params)}

    def same(a: int, b: int) -> bool:
        if a in params or b in params:
            return a in params and b in params and params[a] % 2 == 0 and params[b] == params[a] + 1
        if a not in made or b not in made:
            return a == b
        one, two = made[a], made[b]
        if one is two:
            return not one.inputs
        pairs = list(zip(one.inputs, two.inputs))
        return (one.op == two.op and one.attrs == two.attrs and len(one.inputs) == len(two.inputs)
                and all(same(i, j) or (i == j and i not in params) for i, j in pairs))  # fmt: skip

    direction = last.attrs.get("comparison_direction")
    if direction not in ("LT", "GT") or not same(*last.inputs):
        return None
    # The body's results for both sides, the right one being the left one's place
    inner = type(block)(block.params, block.types, block.nodes[:-1], [last.inputs[0]])
    kept = call.node.regions[0]
    call.node.regions[0] = inner
    try:
        (key,) = call.computed(0, [t for t in args for _ in range(2)])
    finally:
        call.node.regions[0] = kept
    if last.attrs.get("compare_type") == "TOTALORDER" and key.is_floating_point():
        key = total(key)
    if last.in_types[0].element == "ui64":
        key = ordered(key)
    return None if key.is_complex() else (key, direction == "GT")


@op("sort")
def _sort(call: Call, *args: torch.Tensor) -> Any:
    dim = call.get("dimension", -1) % max(args[0].dim(), 1)
    size = args[0].shape[dim] if args[0].dim() else 1
    if size < 2:
        return list(args)
    found = sort_key(call, args)
    if found is not None:
        key, most_first = found
        stable = bool(call.get("is_stable", False)) or len(args) > 1
        values, order = torch.sort(key.expand(args[0].shape), dim=dim, descending=most_first, stable=stable)
        if len(args) == 1 and key is args[0]:
            return values
    else:
        if size > MAX_RANKED:
            raise call.wrong(f"sorts {size:,} elements by a comparator of its own, which is done up to {MAX_RANKED:,}: "
                             "sort by one key")  # fmt: skip
        moved = [t.movedim(dim, -1) for t in args]
        pairs = [t for m in moved for t in (m.unsqueeze(-1), m.unsqueeze(-2))]
        less = call.computed(0, pairs)[0]  # [..., i, j]: i before j
        more = call.computed(0, [t for m in moved for t in (m.unsqueeze(-2), m.unsqueeze(-1))])[0]
        at = torch.arange(size, device=less.device)
        first = less | (~more & (at.unsqueeze(-1) < at))
        order = torch.argsort(first.sum(-2), dim=-1).movedim(-1, dim)
    return [torch.gather(t, dim, order) for t in args]


@op("chlo.top_k")
def _top_k(call: Call, x: torch.Tensor) -> Any:
    if call.kind.element == "ui64":
        x = ordered(x)
    # The lowest of equal places comes first, which torch.topk does not promise
    _, order = torch.sort(total(x) if x.is_floating_point() else x, dim=-1, descending=True, stable=True)
    values = torch.gather(x, -1, order)
    values, order = values[..., : call.get("k")], order[..., : call.get("k")]
    return (ordered(values) if call.kind.element == "ui64" else values), order.to(torch.int32)


@op("fft")
def _fft(call: Call, x: torch.Tensor) -> torch.Tensor:
    kind, dims = call.get("fft_type"), list(range(-len(call.get("fft_length")), 0))
    if kind == "IRFFT":
        return torch.fft.irfftn(x, s=call.get("fft_length"), dim=dims)
    return {"FFT": torch.fft.fftn, "IFFT": torch.fft.ifftn, "RFFT": torch.fft.rfftn}[kind](x, dim=dims)


@op("triangular_solve")
def _triangular_solve(call: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    how, upper = call.get("transpose_a", "NO_TRANSPOSE"), not call.get("lower")
    if how != "NO_TRANSPOSE":
        a, upper = (a.mH if how == "ADJOINT" else a.mT), not upper
    wide = torch.float32 if a.dtype in (torch.float16, torch.bfloat16) else a.dtype
    return torch.linalg.solve_triangular(a.to(wide), b.to(wide), upper=upper, left=bool(call.get("left_side")),
                                         unitriangular=bool(call.get("unit_diagonal"))).to(b.dtype)  # fmt: skip


@op("cholesky")
def _cholesky(call: Call, a: torch.Tensor) -> torch.Tensor:
    lower = bool(call.get("lower"))
    found = torch.linalg.cholesky(a if lower else a.mH)
    return found if lower else found.mH
