"""Ops on shapes, indices and positions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ridgeline.capture.importers.onnx.elementwise import WIDE, widened
from ridgeline.capture.importers.onnx.file import torch_type
from ridgeline.capture.importers.onnx.registry import Call, items, op
from ridgeline.capture.importers.program import Host
from ridgeline.capture.importers.weights import TensorRef


@op("Constant", raw=True)
def _constant(n: Call, env: Any) -> Any:
    for key, make in (("value_float", torch.float32), ("value_int", torch.int64), ("value_floats", torch.float32),
                      ("value_ints", torch.int64)):  # fmt: skip
        if key in n.node.attrs:
            return (Host(torch.tensor(n.get(key), dtype=make)),)
    if "value_string" in n.node.attrs:
        return (np.array(n.text("value_string"), dtype=object),)
    if "value_strings" in n.node.attrs:
        return (np.array(n.texts("value_strings"), dtype=object),)
    value = n.get("value", n.get("sparse_value"))
    if value is None:
        raise n.wrong("a constant without a value")
    return (n.evaluate.constant(n.ctx, value),)


@op("Shape", raw=True)
def _shape(n: Call, env: Any, x: Any) -> Any:
    shape = list(x.t.shape if isinstance(x, Host) else x.shape)
    end = n.get("end")
    return (Host(torch.tensor(shape[n.integer("start") : end if end is not None else len(shape)], dtype=torch.int64)),)


@op("Size", raw=True)
def _size(n: Call, env: Any, x: Any) -> Any:
    return (Host(torch.tensor(math.prod(x.t.shape if isinstance(x, Host) else x.shape), dtype=torch.int64)),)


@op("Reshape", host=(1,))
def _reshape(n: Call, x: Any, shape: Any = None) -> Any:
    wanted = [int(d) for d in items(shape)]
    if not n.integer("allowzero"):
        wanted = [x.shape[i] if d == 0 and i < len(x.shape) else d for i, d in enumerate(wanted)]
    if isinstance(x, np.ndarray):
        return x.reshape(wanted)
    if -1 in wanted and 0 in wanted:
        rest = math.prod(d for d in wanted if d > 0)
        wanted = [max(x.numel() // max(rest, 1), 0) if d == -1 else d for d in wanted]
    return x if list(x.shape) == wanted else x.reshape(wanted)


@op("Flatten")
def _flatten(n: Call, x: Any) -> Any:
    axis = n.integer("axis", 1)
    axis = axis + x.dim() if axis < 0 else axis
    wanted = (math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))
    return x if tuple(x.shape) == wanted else x.reshape(wanted)


@op("Transpose")
def _transpose(n: Call, x: Any) -> Any:
    perm = n.ints("perm") or list(range(len(x.shape)))[::-1]
    if isinstance(x, np.ndarray):
        return x.transpose(perm)
    if perm == list(range(x.dim())):
        return x
    moved = [i for i, p in enumerate(perm) if p != i]
    return torch.transpose(x, *moved) if len(moved) == 2 else torch.permute(x, perm)


def _axes(n: Call, given: Any, rank: int) -> list[int] | None:
    axes = n.ints("axes") if given is None else [int(a) for a in items(given)]
    return None if axes is None else [_axis(n, a, rank) for a in axes]


def _axis(n: Call, axis: int, rank: int) -> int:
    if not -rank <= axis < max(rank, 1):
        raise n.wrong(f"axis {axis} of a tensor of rank {rank}")
    return axis % max(rank, 1)


@op("Squeeze", host=(1,))
def _squeeze(n: Call, x: Any, axes: Any = None) -> Any:
    wanted = _axes(n, axes, len(x.shape))
    if wanted is None:
        wanted = [i for i, d in enumerate(x.shape) if d == 1]
    if any(x.shape[a] != 1 for a in wanted):
        raise n.wrong(f"squeezes dims {wanted} of {list(x.shape)}, which are not 1")
    shape = [d for i, d in enumerate(x.shape) if i not in wanted]
    if isinstance(x, np.ndarray):
        return x.reshape(shape)
    return torch.squeeze(x, wanted[0]) if len(wanted) == 1 else x.reshape(shape)


@op("Unsqueeze", host=(1,))
def _unsqueeze(n: Call, x: Any, axes: Any = None) -> Any:
    given = n.ints("axes") if axes is None else items(axes)
    rank = len(x.shape) + len(given)
    for axis in sorted(_axis(n, a, rank) for a in given):
        x = np.expand_dims(x, axis) if isinstance(x, np.ndarray) else torch.unsqueeze(x, axis)
    return x


@op("Concat")
def _concat(n: Call, *xs: Any) -> Any:
    if isinstance(xs[0], np.ndarray):
        return np.concatenate(xs, n.integer("axis", 1))
    axis = _axis(n, n.integer("axis", 1), xs[0].dim())
    return torch.cat(xs, axis) if len(xs) > 1 else xs[0]


@op("Split", host=(1,))
def _split(n: Call, x: Any, sizes: Any = None) -> Any:
    axis = _axis(n, n.integer("axis"), x.dim())
    given = n.ints("split") if sizes is None else [int(s) for s in items(sizes)]
    if given is None:
        num = n.integer("num_outputs", n.num_outputs)
        each = -(-x.shape[axis] // num)
        given = [each] * (x.shape[axis] // each) + ([x.shape[axis] % each] if x.shape[axis] % each else [])
        given += [0] * (num - len(given))
    if sum(given) != x.shape[axis]:
        raise n.wrong(f"splits a dim of {x.shape[axis]} into {given[:8]}")
    return tuple(torch.split(x, given, axis))


@op("Slice", host=(1, 2, 3, 4))
def _slice(n: Call, x: Any, starts: Any = None, ends: Any = None, axes: Any = None, steps: Any = None) -> Any:
    first = n.ints("starts") if starts is None else items(starts)
    last = n.ints("ends") if ends is None else items(ends)
    where = (n.ints("axes") if axes is None else items(axes)) or list(range(len(first)))
    step = [1] * len(first) if steps is None else items(steps)
    index: list[Any] = [slice(None)] * x.dim()
    flipped = []
    for s, e, a, by in zip(first, last, where, step):
        a = _axis(n, int(a), x.dim())
        size = x.shape[a]
        span = range(*slice(int(s), int(e), int(by)).indices(size))
        if by < 0:
            flipped.append(a)
            span = span[::-1]
        start, stop = (span[0], span[-1] + 1) if len(span) else (0, 0)
        if (start, stop, abs(by)) != (0, size, 1):
            index[a] = slice(start, stop, abs(int(by)))
    while index and index[-1] == slice(None):
        index.pop()
    out = x[tuple(index)] if index else x
    return torch.flip(out, flipped) if flipped else out


@op("Gather", known=(1,))
def _gather(n: Call, x: Any, index: Any) -> Any:
    axis = _axis(n, n.integer("axis"), len(x.shape))
    if isinstance(x, np.ndarray):
        return np.take(x, index.numpy(), axis=axis)
    size = x.shape[axis]
    if not index.is_meta and index.numel() <= 4096 and type(index) is torch.Tensor and index.device.type == "cpu":
        if index.numel() and (int(index.min()) < -size or int(index.max()) >= size):
            raise n.wrong(f"index {int(index.max())} of a dim of {size}")
        if index.numel() == 1 and index.dim() == 0:
            return torch.select(x, axis, int(index))
        index = n.put(torch.where(index < 0, index + size, index))
        return _picked(n, x, axis, index)
    is_weight = isinstance(x, torch.nn.Parameter) or n.ctx.origins.get(id(x), ("", False))[1]
    if not is_weight and (index.is_meta or type(index) is not torch.Tensor or index.numel() > 4096):
        index = torch.where(index < 0, index + size, index)  # an embedding's ids count from the start
    return _picked(n, x, axis, index)


def _picked(n: Call, x: Any, axis: int, index: Any) -> Any:
    if axis == 0 and x.dim() == 2 and x.dtype.is_floating_point and index.dtype in (torch.int64, torch.int32):
        return F.embedding(index, x)
    if index.dim() == 1:
        return torch.index_select(x, axis, index)
    out = torch.index_select(x, axis, index.reshape(-1))
    return out.reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])


def _wrapped(n: Call, index: Any, size: int) -> Any:
    """Indices counted from the start."""
    return n.put(torch.where(index < 0, index + size, index))


@op("GatherElements", known=(1,))
def _gather_elements(n: Call, x: Any, index: Any) -> Any:
    axis = _axis(n, n.integer("axis"), x.dim())
    return torch.gather(x, axis, _wrapped(n, index.to(torch.int64), x.shape[axis]))


@op("GatherND", known=(1,))
def _gather_nd(n: Call, x: Any, index: Any) -> Any:
    batch, depth = n.integer("batch_dims"), index.shape[-1]
    index = index.to(torch.int64)
    parts = [_wrapped(n, index[..., i], x.shape[batch + i]) for i in range(depth)]
    lead = []
    for b in range(batch):
        shape = [1] * (index.dim() - 1)
        shape[b] = x.shape[b]
        lead.append(torch.arange(x.shape[b], device=x.device).reshape(shape))
    return x[(*lead, *parts)]


_REDUCED = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@op("ScatterElements Scatter", known=(1,))
def _scatter_elements(n: Call, x: Any, index: Any, updates: Any) -> Any:
    axis = _axis(n, n.integer("axis"), x.dim())
    index = _wrapped(n, index.to(torch.int64), x.shape[axis])
    how = n.text("reduction", "none")
    if how == "none":
        return torch.scatter(x, axis, index, updates)
    return torch.scatter_reduce(x, axis, index, updates, _REDUCED[how])


@op("ScatterND", known=(1,))
def _scatter_nd(n: Call, x: Any, index: Any, updates: Any) -> Any:
    depth = index.shape[-1]
    index = index.to(torch.int64)
    how = n.text("reduction", "none")
    parts = tuple(_wrapped(n, index[..., i], x.shape[i]) for i in range(depth))
    if how == "none":
        return torch.index_put(x, parts, updates)
    if how == "add":
        return torch.index_put(x, parts, updates, accumulate=True)
    inner = math.prod(x.shape[depth:])
    flat = torch.zeros_like(parts[0])
    for i, part in enumerate(parts):
        flat = flat * x.shape[i] + part
    at = flat.reshape(-1, 1) * inner + torch.arange(inner, device=x.device)
    out = torch.scatter_reduce(x.reshape(-1), 0, at.reshape(-1), updates.reshape(-1), _REDUCED[how])
    return out.reshape(x.shape)


@op("Expand", host=(1,), grows=True)
def _expand(n: Call, x: Any, shape: Any) -> Any:
    wanted = list(torch.broadcast_shapes(tuple(x.shape), tuple(int(d) for d in items(shape))))
    return x if list(x.shape) == wanted else x.expand(wanted)


@op("Tile", host=(1,), grows=True)
def _tile(n: Call, x: Any, repeats: Any) -> Any:
    return torch.tile(x, tuple(items(repeats)))


@op("ConstantOfShape", host=(0,), grows=True)
def _constant_of_shape(n: Call, shape: Any) -> Any:
    value = n.get("value")
    fill = value.read() if isinstance(value, TensorRef) else torch.zeros(1)
    wanted = [int(d) for d in items(shape)]
    if any(d < 0 for d in wanted):
        raise n.wrong(f"shape {wanted} has a negative dim")
    if fill.dtype in WIDE:
        return torch.full(wanted, fill.reshape(()).to(WIDE[fill.dtype]).item(), dtype=WIDE[fill.dtype],
                          device=n.device).to(fill.dtype)  # fmt: skip
    return torch.full(wanted, fill.reshape(()).item(), dtype=fill.dtype, device=n.device)


@op("Range", host=(0, 1, 2), grows=True)
def _range(n: Call, start: Any, limit: Any, delta: Any) -> Any:
    first, last, by = (t.reshape(()).item() for t in (start, limit, delta))
    if by == 0 or (last - first) / by > 1 << 30:
        raise n.wrong(f"a range from {first} to {last} by {by} is too long")
    num = max(math.ceil((last - first) / by), 0)
    if start.dtype.is_floating_point:
        return (torch.arange(num, dtype=torch.float64, device=n.device) * by + first).to(start.dtype)
    if not num:
        return torch.empty(0, dtype=start.dtype, device=n.device)
    return torch.arange(first, first + num * by, by, dtype=start.dtype, device=n.device)


@op("EyeLike")
def _eye_like(n: Call, x: Any) -> Any:
    dtype = torch_type(n.integer("dtype"), n.where) if "dtype" in n.node.attrs else x.dtype
    rows = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    cols = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
    return (cols - rows == n.integer("k")).to(dtype)


@op("OneHot", host=(1, 2), grows=True)
def _one_hot(n: Call, index: Any, depth: Any, values: Any) -> Any:
    num = int(depth.reshape(-1)[0])
    axis = _axis(n, n.integer("axis", -1), index.dim() + 1)
    off, on = items(values)
    wrapped = torch.remainder(index.to(torch.int64), num).unsqueeze(axis)
    shape = [1] * (index.dim() + 1)
    shape[axis] = num
    inside = ((index >= -num) & (index < num)).unsqueeze(axis)
    hot = (wrapped == torch.arange(num, device=index.device).reshape(shape)) & inside
    return torch.where(hot, on, off).to(values.dtype)


@op("NonZero")
def _non_zero(n: Call, x: Any) -> Any:
    known(n, x)
    return torch.nonzero(x).t() if x.dim() else torch.nonzero(x.reshape(1)).t()[:0]


def known(n: Call, x: Any) -> None:
    """The shape of the result hangs on the data: no plan without it."""
    if x.is_meta and n.ctx.static:
        n.ctx.host(x, f"the shape of the result of {n.where}")


@op("Compress")
def _compress(n: Call, x: Any, condition: Any) -> Any:
    known(n, condition)
    where = torch.nonzero(condition.reshape(-1)).reshape(-1)
    if "axis" not in n.node.attrs:
        return torch.index_select(x.reshape(-1), 0, where)
    return torch.index_select(x, _axis(n, n.integer("axis"), x.dim()), where)


@op("Unique")
def _unique(n: Call, x: Any) -> Any:
    known(n, x)
    axis = n.get("axis")
    flat = x.reshape(-1) if axis is None else x
    dim = 0 if axis is None else _axis(n, axis, x.dim())
    values, inverse, counts = torch.unique(flat, sorted=True, return_inverse=True, return_counts=True, dim=dim)
    num = values.shape[dim]
    positions = torch.arange(inverse.numel(), device=x.device)
    first = torch.full((num,), inverse.numel(), dtype=torch.int64, device=x.device)
    first = first.scatter_reduce(0, inverse, positions, "amin")
    if not n.integer("sorted", 1):
        order = torch.argsort(first)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(num, device=x.device))
        values, counts, first, inverse = values.index_select(dim, order), counts[order], first[order], back[inverse]
    return values, first, inverse, counts


@op("TopK", host=(1,))
def _top_k(n: Call, x: Any, k: Any = None) -> Any:
    num = n.integer("k") if k is None else int(k.reshape(-1)[0])
    dim = _axis(n, n.integer("axis", -1), x.dim())
    largest = bool(n.integer("largest", 1))
    if x.dtype in WIDE:
        values, index = torch.topk(x.to(WIDE[x.dtype]), num, dim, largest, True)
        return values.to(x.dtype), index
    if x.numel() <= 1 << 16 and not x.is_meta and x.device.type == "cpu" and type(x) is torch.Tensor:
        # Ties go to the lower index, which a stable sort keeps
        values, index = torch.sort(x, dim=dim, descending=largest, stable=True)
        return values.narrow(dim, 0, num), index.narrow(dim, 0, num)
    return torch.topk(x, num, dim, largest, True)


def _arg(n: Call, x: Any, fn: Any) -> Any:
    axis, keep = _axis(n, n.integer("axis"), x.dim()), bool(n.integer("keepdims", 1))
    if n.integer("select_last_index"):
        at = fn(torch.flip(x, [axis]), axis, keepdim=keep)
        return x.shape[axis] - 1 - at
    return fn(x, axis, keepdim=keep)


@op("ArgMax")
def _arg_max(n: Call, x: Any) -> Any:
    return _arg(n, x, torch.argmax)


@op("ArgMin")
def _arg_min(n: Call, x: Any) -> Any:
    return _arg(n, x, torch.argmin)


@op("Trilu", host=(1,))
def _trilu(n: Call, x: Any, k: Any = None) -> Any:
    diagonal = 0 if k is None else max(min(int(k), 1 << 31), -(1 << 31))
    return (torch.triu if n.integer("upper", 1) else torch.tril)(x, diagonal)


@op("DepthToSpace")
def _depth_to_space(n: Call, x: Any) -> Any:
    b, c, h, w = x.shape
    size = n.integer("blocksize")
    if n.text("mode", "DCR") == "CRD":
        return F.pixel_shuffle(x, size)
    out = x.reshape(b, size, size, c // size**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return out.reshape(b, c // size**2, h * size, w * size)


@op("SpaceToDepth")
def _space_to_depth(n: Call, x: Any) -> Any:
    b, c, h, w = x.shape
    size = n.integer("blocksize")
    out = x.reshape(b, c, h // size, size, w // size, size).permute(0, 3, 5, 1, 2, 4)
    return out.reshape(b, c * size**2, h // size, w // size)


@op("ReverseSequence", host=(1,))
def _reverse_sequence(n: Call, x: Any, lengths: Any) -> Any:
    time, batch = n.integer("time_axis"), n.integer("batch_axis", 1)
    index = torch.arange(x.shape[time]).repeat(x.shape[batch], 1)
    for row, length in enumerate(items(lengths)):
        index[row, :length] = index[row, :length].flip(0)
    index = index if batch < time else index.t()
    shape = [x.shape[d] if d in (time, batch) else 1 for d in range(x.dim())]
    at = index.reshape(shape)
    at = n.ctx.constant(at) if x.is_meta else at.to(x.device)
    return torch.gather(x, time, at.expand(x.shape))


@op("CumSum", host=(1,))
def _cum_sum(n: Call, x: Any, axis: Any) -> Any:
    dim = _axis(n, int(axis.reshape(-1)[0]), x.dim())
    if n.integer("reverse"):
        x = torch.flip(x, [dim])
    out = torch.cumsum(x, dim, dtype=x.dtype)
    if n.integer("exclusive"):
        out = out - x
    return torch.flip(out, [dim]) if n.integer("reverse") else out


@op("Pad", host=(1, 2, 3), grows=True)
def _pad(n: Call, x: Any, pads: Any = None, value: Any = None, axes: Any = None) -> Any:
    amounts = n.ints("pads") if pads is None else [int(p) for p in items(pads)]
    fill = n.number("value", 0.0) if value is None or value.numel() == 0 else value.reshape(()).item()
    where = list(range(x.dim())) if axes is None else [_axis(n, int(a), x.dim()) for a in items(axes)]
    half = len(amounts) // 2
    before, after = [0] * x.dim(), [0] * x.dim()
    for i, a in enumerate(where):
        before[a], after[a] = amounts[i], amounts[i + half]
    mode = n.text("mode", "constant")
    flat = [p for d in reversed(range(x.dim())) for p in (before[d], after[d])]
    if not any(flat):
        return x
    if mode == "constant":
        while len(flat) > 2 and flat[-2:] == [0, 0]:
            flat = flat[:-2]
        return F.pad(x, flat, value=fill) if x.dtype is not torch.bool else F.pad(x.to(torch.uint8), flat).to(x.dtype)
    for d in range(x.dim()):
        if before[d] or after[d]:
            x = torch.index_select(x, d, _mirrored(n, x, x.shape[d], before[d], after[d], mode))
    return x


def _mirrored(n: Call, x: Any, size: int, before: int, after: int, mode: str) -> Any:
    at = np.arange(-before, size + after)
    if mode == "edge":
        at = np.clip(at, 0, size - 1)
    elif mode == "wrap":
        at = at % size
    else:
        period = max(2 * (size - 1), 1)
        at = np.abs((at + period * (abs(int(at.min())) // period + 1)) % period)
        at = np.where(at >= size, period - at, at)
    index = torch.from_numpy(at.astype(np.int64))
    return n.ctx.constant(index) if x.is_meta else index.to(x.device)


@op("CenterCropPad", host=(1,))
def _center_crop_pad(n: Call, x: Any, shape: Any) -> Any:
    axes = [_axis(n, a, x.dim()) for a in n.ints("axes") or range(x.dim())]
    for a, size in zip(axes, items(shape)):
        have = x.shape[a]
        if have > size:
            x = x.narrow(a, (have - size) // 2, size)
        elif have < size:
            pads = [0, 0] * x.dim()
            first = (size - have) // 2
            pads[2 * (x.dim() - 1 - a)], pads[2 * (x.dim() - 1 - a) + 1] = first, size - have - first
            x = F.pad(x, pads)
    return x


@op("Col2Im", host=(1, 2))
def _col2im(n: Call, x: Any, shape: Any, block: Any) -> Any:
    size, kernel = items(shape), items(block)
    num = len(size)
    dilation, stride = n.ints("dilations") or [1] * num, n.ints("strides") or [1] * num
    pads = n.ints("pads") or [0] * 2 * num
    if num == 2 and pads[:2] == pads[2:]:
        return F.fold(x, tuple(size), tuple(kernel), tuple(dilation), tuple(pads[:2]), tuple(stride))
    padded = [s + pads[i] + pads[i + num] for i, s in enumerate(size)]
    counts = [(p - d * (k - 1) - 1) // s + 1 for p, d, k, s in zip(padded, dilation, kernel, stride)]
    batch, channels = x.shape[0], x.shape[1] // math.prod(kernel)
    flat = np.zeros((math.prod(kernel), math.prod(counts)), dtype=np.int64)
    for i, k in enumerate(np.ndindex(*kernel)):
        for j, c in enumerate(np.ndindex(*counts)):
            flat[i, j] = np.ravel_multi_index([c[d] * stride[d] + k[d] * dilation[d] for d in range(num)], padded)
    at = torch.from_numpy(flat.reshape(-1))
    at = n.ctx.constant(at) if x.is_meta else at.to(x.device)
    out = torch.zeros((batch, channels, math.prod(padded)), dtype=x.dtype, device=x.device)
    out = torch.index_add(out, 2, at, x.reshape(batch, channels, -1)).reshape(batch, channels, *padded)
    for d in range(num):
        out = out.narrow(2 + d, pads[d], size[d])
    return out


# --- reductions -----------------------------------------------------------------------------------------------------


def _log_sum(x: Any, axes: Any, keep: bool) -> Any:
    return torch.log(torch.sum(x, axes, keepdim=keep))


def _prod(x: Any, axes: Any, keep: bool) -> Any:
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis, keepdim=keep)
    return x


def _mean(x: Any, axes: Any, keep: bool) -> Any:
    if x.dtype.is_floating_point:
        return torch.mean(x, axes, keepdim=keep)
    num = math.prod(x.shape[a] for a in axes)
    return torch.div(torch.sum(x, axes, keepdim=keep), num, rounding_mode="trunc").to(x.dtype)


_REDUCTIONS = {
    "ReduceSum": lambda x, a, k: torch.sum(x, a, keepdim=k, dtype=x.dtype),
    "ReduceMean": _mean,
    "ReduceMax": lambda x, a, k: torch.amax(x, a, keepdim=k),
    "ReduceMin": lambda x, a, k: torch.amin(x, a, keepdim=k),
    "ReduceProd": _prod,
    "ReduceL1": lambda x, a, k: torch.sum(torch.abs(x), a, keepdim=k, dtype=x.dtype),
    "ReduceL2": lambda x, a, k: torch.linalg.vector_norm(x, 2, a, keepdim=k) if x.dtype.is_floating_point
    else torch.sqrt(torch.sum(x * x, a, keepdim=k).to(torch.float64)).to(x.dtype),
    "ReduceLogSum": _log_sum,
    "ReduceLogSumExp": lambda x, a, k: torch.logsumexp(x, a, keepdim=k),
    "ReduceSumSquare": lambda x, a, k: torch.sum(x * x, a, keepdim=k, dtype=x.dtype),
}  # fmt: skip


def _reduction(n: Call, fn: Any, x: Any, axes: Any = None) -> Any:
    keep = bool(n.integer("keepdims", 1))
    chosen = _axes(n, axes, x.dim())
    if not chosen:
        if n.integer("noop_with_empty_axes"):
            chosen = []
            if n.node.op in ("ReduceL1",):
                return torch.abs(x)
            if n.node.op in ("ReduceSumSquare",):
                return x * x
            if n.node.op in ("ReduceL2",):
                return torch.abs(x)
            if n.node.op in ("ReduceLogSum",):
                return torch.log(x)
            return x
        chosen = list(range(x.dim()))
    chosen = sorted(set(chosen))
    if any(x.shape[a] == 0 for a in chosen) and n.node.op in ("ReduceMax", "ReduceMin"):
        low = n.node.op == "ReduceMax"
        shape = [1 if i in chosen else d for i, d in enumerate(x.shape)]
        shape = shape if keep else [d for i, d in enumerate(x.shape) if i not in chosen]
        if x.dtype is torch.bool:
            return torch.full(shape, not low, device=x.device)
        most = math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).max
        least = -math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
        return torch.full(shape, least if low else most, dtype=x.dtype, device=x.device)
    if not chosen:
        return x
    return widened(lambda t: fn(t, chosen, keep), x)


for _name, _fn in _REDUCTIONS.items():
    op(_name, host=(1,))(lambda n, x, axes=None, fn=_fn: _reduction(n, fn, x, axes))


# --- strings --------------------------------------------------------------------------------------------------------


@op("StringConcat")
def _string_concat(n: Call, a: Any, b: Any) -> Any:
    return np.asarray(np.asarray(a, dtype=object) + np.asarray(b, dtype=object), dtype=object)


@op("StringSplit")
def _string_split(n: Call, x: Any) -> Any:
    delimiter, most = n.text("delimiter") or None, n.get("maxsplit")
    rows = [text.split(delimiter, -1 if most is None else most) if text or delimiter else [] for text in x.reshape(-1)]
    widest = max((len(row) for row in rows), default=0)
    made = np.array([row + [""] * (widest - len(row)) for row in rows], dtype=object)
    return made.reshape(*x.shape, widest), torch.tensor([len(row) for row in rows], dtype=torch.int64).reshape(
        tuple(x.shape)
    )


@op("RegexFullMatch")
def _regex(n: Call, x: Any) -> Any:
    import re

    pattern = n.text("pattern")
    if re.search(r"[*+}]\)*[*+{]|\\[1-9]", pattern) or len(pattern) > 1000:
        raise n.wrong("its pattern repeats a repetition or refers back, which may take forever: simplify it")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise n.wrong(f"its pattern cannot be read: {error}") from error
    made = [compiled.fullmatch(text[:10_000]) is not None for text in x.reshape(-1)]
    return torch.tensor(made, dtype=torch.bool).reshape(tuple(x.shape))


@op("StringNormalizer")
def _string_normalizer(n: Call, x: Any) -> Any:
    change, sensitive = n.text("case_change_action", "NONE"), bool(n.integer("is_case_sensitive"))
    stop = n.texts("stopwords") or []
    stop = set(stop if sensitive else [word.lower() for word in stop])
    rows = [[w for w in row if (w if sensitive else w.lower()) not in stop] for row in np.atleast_2d(x)]
    act = {"LOWER": str.lower, "UPPER": str.upper}.get(change, lambda w: w)
    rows = [[act(w) for w in row] or [""] for row in rows]
    made = np.array(rows, dtype=object)
    return made if x.ndim == 2 else made[0]


@op("TfIdfVectorizer", host=(0,))
def _tf_idf(n: Call, x: Any) -> Any:
    counts, indexes = n.ints("ngram_counts"), n.ints("ngram_indexes")
    pool = n.ints("pool_int64s") or n.texts("pool_strings")
    low, high, skips = n.integer("min_gram_length"), n.integer("max_gram_length"), n.integer("max_skip_count")
    weights = n.get("weights") or [1.0] * len(indexes)
    known_grams, at = {}, 0
    num = 0
    for size, start in enumerate(counts, 1):
        end = counts[size] if size < len(counts) else len(pool)
        for first in range(start, end, size):
            known_grams[tuple(pool[first : first + size])] = num
            num += 1
        at = end
    assert at == len(pool) or not counts
    rows = x.numpy() if isinstance(x, torch.Tensor) else x
    flat = rows.reshape(1, -1) if rows.ndim < 2 else rows
    out = np.zeros((flat.shape[0], max(indexes) + 1), dtype=np.float32)
    for r, row in enumerate(flat.tolist()):
        for size in range(low, high + 1):
            for skip in range(1, (skips + 1 if size > 1 else 1) + 1) if size > 1 else (1,):
                for start in range(len(row) - skip * (size - 1)):
                    gram = tuple(row[start : start + skip * size : skip][:size])
                    if gram in known_grams:
                        out[r, indexes[known_grams[gram]]] += 1
    mode = n.text("mode")
    spread = np.zeros(out.shape[1], dtype=np.float32)
    for i, index in enumerate(indexes):
        spread[index] = weights[i]
    if mode == "IDF":
        out = (out > 0) * spread
    elif mode == "TFIDF":
        out = out * spread
    made = torch.from_numpy(out.astype(np.float32))
    return made.reshape(-1) if rows.ndim < 2 else made
