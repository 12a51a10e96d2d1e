"""Layers: products, convolutions, pooling, norms, attention, losses."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

from ridgeline.capture.importers.onnx.elementwise import converted
from ridgeline.capture.importers.onnx.registry import Call, items, op
from ridgeline.capture.importers.onnx.shapes import _axis

# --- products -------------------------------------------------------------------------------------------------------


@op("MatMul")
def _matmul(n: Call, a: Any, b: Any) -> Any:
    if not a.dtype.is_floating_point and a.dtype in (torch.uint32, torch.uint64):
        return torch.matmul(a.to(torch.int64), b.to(torch.int64)).to(a.dtype)
    return torch.matmul(a, b)


@op("Gemm")
def _gemm(n: Call, a: Any, b: Any, c: Any = None) -> Any:
    alpha, beta = n.number("alpha", 1.0), n.number("beta", 1.0)
    a = a.t() if n.integer("transA") else a
    plain = alpha == 1.0 and beta == 1.0 and (c is None or c.dim() == 1) and a.dtype.is_floating_point
    if plain and n.integer("transB"):
        return F.linear(a, b, c)
    b = b.t() if n.integer("transB") else b
    if c is None or beta == 0:
        out = torch.mm(a, b)
        return out if alpha == 1.0 else out * alpha
    if not a.dtype.is_floating_point:
        return torch.mm(a, b) * int(alpha) + c * int(beta)
    return torch.addmm(c, a, b, beta=beta, alpha=alpha)


@op("Einsum")
def _einsum(n: Call, *xs: Any) -> Any:
    equation = n.text("equation").replace(" ", "")
    if any(x.dtype in (torch.int32, torch.int64) for x in xs):
        return torch.einsum(equation, *[x.double() for x in xs]).to(xs[0].dtype)
    return torch.einsum(equation, *xs)


@op("Det")
def _det(n: Call, x: Any) -> Any:
    return torch.linalg.det(x)


# --- convolutions and pooling ---------------------------------------------------------------------------------------


def windows(n: Call, size: list[int], kernel: list[int]) -> tuple[list[int], list[int], list[int], list[int]]:
    """Strides, dilations, and padding before and after, of every spatial dim."""
    num = len(kernel)
    stride, dilation = n.ints("strides") or [1] * num, n.ints("dilations") or [1] * num
    pads = n.ints("pads") or [0] * 2 * num
    if len(stride) != num or len(dilation) != num or len(pads) != 2 * num or len(size) != num:
        raise n.wrong(f"strides {stride}, dilations {dilation} and pads {pads} do not fit a kernel of {kernel}")
    if any(s < 1 for s in stride) or any(d < 1 for d in dilation):
        raise n.wrong(f"strides {stride} and dilations {dilation} must be positive")
    auto = n.text("auto_pad", "NOTSET")
    before, after = pads[:num], pads[num:]
    if auto == "VALID":
        before = after = [0] * num
    elif auto in ("SAME_UPPER", "SAME_LOWER"):
        before, after = [], []
        for s, k, by, d in zip(size, kernel, stride, dilation):
            total = max((-(-s // by) - 1) * by + (k - 1) * d + 1 - s, 0)
            small, large = total // 2, total - total // 2
            before.append(small if auto == "SAME_UPPER" else large)
            after.append(large if auto == "SAME_UPPER" else small)
    return stride, dilation, before, after


def padded(x: Any, before: list[int], after: list[int], value: float = 0.0) -> Any:
    flat = [p for b, a in zip(reversed(before), reversed(after)) for p in (b, a)]
    return F.pad(x, flat, value=value) if any(flat) else x


_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def convolved(n: Call, x: Any, w: Any, bias: Any = None, value: float = 0.0) -> Any:
    num = x.dim() - 2
    if num not in _CONV or w.dim() != x.dim():
        raise n.wrong(f"convolutions of {num} spatial dims are not supported")
    kernel = n.ints("kernel_shape") or list(w.shape[2:])
    stride, dilation, before, after = windows(n, list(x.shape[2:]), kernel)
    if before != after or value:
        x, before = padded(x, before, after, value), [0] * num
    return _CONV[num](x, w, bias, tuple(stride), tuple(before), tuple(dilation), n.integer("group", 1))


@op("Conv")
def _conv(n: Call, x: Any, w: Any, bias: Any = None) -> Any:
    return convolved(n, x, w, bias)


@op("ConvTranspose")
def _conv_transpose(n: Call, x: Any, w: Any, bias: Any = None) -> Any:
    num = x.dim() - 2
    if num not in _CONV_TRANSPOSE:
        raise n.wrong(f"convolutions of {num} spatial dims are not supported")
    kernel = n.ints("kernel_shape") or list(w.shape[2:])
    extra = n.ints("output_padding") or [0] * num
    stride, dilation = n.ints("strides") or [1] * num, n.ints("dilations") or [1] * num
    pads = n.ints("pads") or [0] * 2 * num
    before, after = pads[:num], pads[num:]
    auto, wanted = n.text("auto_pad", "NOTSET"), n.ints("output_shape")
    if wanted is not None or auto in ("SAME_UPPER", "SAME_LOWER"):
        wanted = wanted or [s * by for s, by in zip(x.shape[2:], stride)]
        before, after = [], []
        for i, size in enumerate(wanted[-num:]):
            total = stride[i] * (x.shape[2 + i] - 1) + extra[i] + (kernel[i] - 1) * dilation[i] + 1 - size
            half = total // 2
            before.append(half if auto == "SAME_UPPER" else total - half)
            after.append(total - before[-1])
    elif auto == "VALID":
        before = after = [0] * num
    fn = _CONV_TRANSPOSE[num]
    group = n.integer("group", 1)
    if (
        before == after
        and all(p >= 0 for p in before)
        and all(e < max(s, d) for e, s, d in zip(extra, stride, dilation))
    ):
        return fn(x, w, bias, tuple(stride), tuple(before), tuple(extra), group, tuple(dilation))
    out = fn(x, w, bias, tuple(stride), 0, 0, group, tuple(dilation))
    return padded(out, [-b for b in before], [e - a for a, e in zip(after, extra)])


def _pool_sizes(n: Call, size: list[int], kernel: list[int], stride: list[int], dilation: list[int],
                before: list[int], after: list[int]) -> list[int]:  # fmt: skip
    """Output sizes; with ceil_mode the last window must start inside the input or the padding before it."""
    out = []
    for i, s in enumerate(size):
        free = s + before[i] + after[i] - dilation[i] * (kernel[i] - 1) - 1
        num = free // stride[i] + 1
        if n.integer("ceil_mode"):
            num = -(-free // stride[i]) + 1
            if (num - 1) * stride[i] >= s + before[i]:
                num -= 1
        if num < 1:
            raise n.wrong(f"a window of {kernel} is larger than the input of {size}")
        out.append(num)
    return out


_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVG = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@op("MaxPool")
def _max_pool(n: Call, x: Any) -> Any:
    num = x.dim() - 2
    kernel = n.ints("kernel_shape")
    if num not in _MAX or kernel is None:
        raise n.wrong(f"pools over {num} spatial dims, which is not supported")
    size = list(x.shape[2:])
    stride, dilation, before, after = windows(n, size, kernel)
    counts = _pool_sizes(n, size, kernel, stride, dilation, before, after)
    narrow = x.dtype if not x.dtype.is_floating_point else None
    work = x.to(torch.float32) if narrow is not None else x
    indices = n.wants(1)
    simple = before == after and all(2 * p <= k for p, k in zip(before, kernel))
    if simple and not indices:
        out = _MAX[num](work, tuple(kernel), tuple(stride), tuple(before), tuple(dilation), n.get("ceil_mode", 0) == 1)
        if list(out.shape[2:]) == counts:
            return out if narrow is None else out.to(narrow)
    reach = [(c - 1) * s + d * (k - 1) + 1 for c, s, d, k in zip(counts, stride, dilation, kernel)]
    wide = padded(work, before, [max(r - s - b, 0) for r, s, b in zip(reach, size, before)], -math.inf)
    for d, r in enumerate(reach):
        wide = wide.narrow(2 + d, 0, r) if wide.shape[2 + d] > r else wide
    out = _MAX[num](wide, tuple(kernel), tuple(stride), 0, tuple(dilation), return_indices=indices)
    if not indices:
        return out if narrow is None else out.to(narrow)
    values, at = out
    rest, parts = at, []
    for d in reversed(range(num)):
        parts.append(rest % reach[d] - before[d])
        rest = torch.div(rest, reach[d], rounding_mode="floor")
    parts = parts[::-1]
    flat = torch.zeros_like(at)
    for d in range(num) if not n.integer("storage_order") else reversed(range(num)):
        flat = flat * size[d] + parts[d]
    lead = torch.arange(x.shape[0] * x.shape[1], device=x.device).reshape(x.shape[0], x.shape[1], *[1] * num)
    return (values if narrow is None else values.to(narrow)), flat + lead * math.prod(size)


def _window_sums(x: Any, kernel: list[int], stride: list[int], dilation: list[int], counts: list[int]) -> Any:
    """Sums over windows as a sum of strided slices."""
    total = None
    for offset in product(*[range(k) for k in kernel]):
        index = [slice(None), slice(None)]
        for o, d, s, c in zip(offset, dilation, stride, counts):
            index.append(slice(o * d, o * d + (c - 1) * s + 1, s))
        part = x[tuple(index)]
        total = part if total is None else total + part
    return total


@op("AveragePool")
def _average_pool(n: Call, x: Any) -> Any:
    num = x.dim() - 2
    kernel = n.ints("kernel_shape")
    size, include = list(x.shape[2:]), bool(n.integer("count_include_pad"))
    stride, dilation, before, after = windows(n, size, kernel)
    counts = _pool_sizes(n, size, kernel, stride, dilation, before, after)
    simple = before == after and all(d == 1 for d in dilation) and all(2 * p <= k for p, k in zip(before, kernel))
    if simple and num in _AVG and not (n.integer("ceil_mode") and include):
        out = _AVG[num](x, tuple(kernel), tuple(stride), tuple(before), bool(n.integer("ceil_mode")), include)
        if list(out.shape[2:]) == counts:
            return out
    reach = [(c - 1) * s + d * (k - 1) + 1 for c, s, d, k in zip(counts, stride, dilation, kernel)]
    right = [max(r - s - b, 0) for r, s, b in zip(reach, size, before)]
    ones = torch.ones((1, 1, *size), dtype=x.dtype, device=x.device)
    if include:
        inside = [min(a, r) for a, r in zip(after, right)]
        ones = padded(padded(ones, before, inside, 1.0), [0] * num, [r - i for r, i in zip(right, inside)])
    else:
        ones = padded(ones, before, right)
    total = _window_sums(padded(x, before, right), kernel, stride, dilation, counts)
    return total / _window_sums(ones, kernel, stride, dilation, counts)


@op("LpPool")
def _lp_pool(n: Call, x: Any) -> Any:
    p, kernel, size = n.integer("p", 2), n.ints("kernel_shape"), list(x.shape[2:])
    stride, dilation, before, after = windows(n, size, kernel)
    counts = _pool_sizes(n, size, kernel, stride, dilation, before, after)
    reach = [(c - 1) * s + d * (k - 1) + 1 for c, s, d, k in zip(counts, stride, dilation, kernel)]
    right = [max(r - s - b, 0) for r, s, b in zip(reach, size, before)]
    powers = torch.pow(torch.abs(padded(x, before, right)), p)
    return torch.pow(_window_sums(powers, kernel, stride, dilation, counts), 1 / p)


@op("GlobalAveragePool")
def _global_average(n: Call, x: Any) -> Any:
    if x.dim() == 4:
        return F.adaptive_avg_pool2d(x, 1)
    return torch.mean(x, list(range(2, x.dim())), keepdim=True)


@op("GlobalMaxPool")
def _global_max(n: Call, x: Any) -> Any:
    return torch.amax(x, list(range(2, x.dim())), keepdim=True)


@op("GlobalLpPool")
def _global_lp(n: Call, x: Any) -> Any:
    return torch.linalg.vector_norm(x, n.integer("p", 2), list(range(2, x.dim())), keepdim=True)


@op("MaxUnpool", host=(2,))
def _max_unpool(n: Call, x: Any, at: Any, shape: Any = None) -> Any:
    kernel = n.ints("kernel_shape")
    num = len(kernel)
    stride, pads = n.ints("strides") or [1] * num, n.ints("pads") or [0] * 2 * num
    natural = [(s - 1) * by - pads[i] - pads[i + num] + k
               for i, (s, by, k) in enumerate(zip(x.shape[2:], stride, kernel))]  # fmt: skip
    wanted = list(x.shape[:2]) + natural if shape is None else [int(d) for d in items(shape)]
    flat = torch.zeros(math.prod(list(x.shape[:2]) + natural), dtype=x.dtype, device=x.device)
    if shape is not None and wanted != list(x.shape[:2]) + natural:
        # Positions are those of the natural shape; the rest is padding after it
        flat = torch.scatter(flat, 0, at.reshape(-1), x.reshape(-1)).reshape(list(x.shape[:2]) + natural)
        return padded(flat, [0] * num, [w - f for w, f in zip(wanted[2:], natural)])
    return torch.scatter(flat, 0, at.reshape(-1), x.reshape(-1)).reshape(wanted)


@op("DeformConv")
def _deform_conv(n: Call, x: Any, w: Any, offset: Any, bias: Any = None, mask: Any = None) -> Any:
    if x.dim() != 4:
        raise n.wrong("deformable convolutions are supported on images only")
    kernel = list(w.shape[2:])
    stride, dilation, before, _after = windows(n, list(x.shape[2:]), kernel)
    groups, parts = n.integer("group", 1), n.integer("offset_group", 1)
    batch, channels, height, width = x.shape
    rows, cols = offset.shape[2:]
    taps = kernel[0] * kernel[1]
    shift = offset.reshape(batch, parts, taps, 2, rows, cols)
    ky = torch.arange(kernel[0], device=x.device, dtype=x.dtype).repeat_interleave(kernel[1]) * dilation[0]
    kx = torch.arange(kernel[1], device=x.device, dtype=x.dtype).repeat(kernel[0]) * dilation[1]
    oy = torch.arange(rows, device=x.device, dtype=x.dtype) * stride[0] - before[0]
    ox = torch.arange(cols, device=x.device, dtype=x.dtype) * stride[1] - before[1]
    y = shift[:, :, :, 0] + ky.reshape(1, 1, -1, 1, 1) + oy.reshape(1, 1, 1, -1, 1)
    z = shift[:, :, :, 1] + kx.reshape(1, 1, -1, 1, 1) + ox.reshape(1, 1, 1, 1, -1)
    grid = torch.stack([(z + 0.5) * 2 / width - 1, (y + 0.5) * 2 / height - 1], -1)
    grid = grid.reshape(batch * parts, taps * rows, cols, 2)
    planes = x.reshape(batch * parts, channels // parts, height, width)
    sampled = F.grid_sample(planes, grid, "bilinear", "zeros", False)
    sampled = sampled.reshape(batch, parts, channels // parts, taps, rows, cols)
    if mask is not None:
        sampled = sampled * mask.reshape(batch, parts, 1, taps, rows, cols)
    sampled = sampled.reshape(batch, groups, channels // groups * taps, rows * cols)
    weight = w.reshape(groups, w.shape[0] // groups, -1)
    out = torch.matmul(weight.unsqueeze(0), sampled).reshape(batch, w.shape[0], rows, cols)
    return out if bias is None else out + bias.reshape(1, -1, 1, 1)


# --- norms and softmax ----------------------------------------------------------------------------------------------


@op("BatchNormalization")
def _batch_norm(n: Call, x: Any, scale: Any, bias: Any, mean: Any, var: Any) -> Any:
    eps = n.number("epsilon", 1e-5)
    if not n.integer("training_mode"):
        if any(t.dtype != x.dtype for t in (scale, bias, mean, var)):
            shape = [1, -1] + [1] * (x.dim() - 2)
            wide = (x.to(torch.float32) - mean.reshape(shape)) / torch.sqrt(var.reshape(shape) + eps)
            return (wide * scale.reshape(shape) + bias.reshape(shape)).to(x.dtype)
        return F.batch_norm(x, mean, var, scale, bias, False, 0.0, eps)
    momentum = n.number("momentum", 0.9)
    axes = [0, *range(2, x.dim())]
    now = torch.mean(x, axes)
    spread = torch.var(x, axes, correction=0)
    out = F.batch_norm(x, now, spread, scale, bias, False, 0.0, eps)
    return out, mean * momentum + now * (1 - momentum), var * momentum + spread * (1 - momentum)


@op("InstanceNormalization")
def _instance_norm(n: Call, x: Any, scale: Any, bias: Any) -> Any:
    return F.instance_norm(x, None, None, scale, bias, True, 0.0, n.number("epsilon", 1e-5))


def _stash(n: Call, x: Any) -> Any:
    """The type that statistics are kept in."""
    return x.to(torch.float32) if n.integer("stash_type", 1) == 1 and x.dtype is not torch.float32 else x


@op("LayerNormalization")
def _layer_norm(n: Call, x: Any, scale: Any, bias: Any = None) -> Any:
    axis, eps = _axis(n, n.integer("axis", -1), x.dim()), n.number("epsilon", 1e-5)
    shape = tuple(x.shape[axis:])
    if tuple(scale.shape) == shape and (bias is None or tuple(bias.shape) == shape) and scale.dtype == x.dtype:
        out = F.layer_norm(x, shape, scale, bias, eps)
    else:
        out = F.layer_norm(x, shape, None, None, eps) * scale
        out = out if bias is None else out + bias
    if n.num_outputs == 1:
        return out
    wide = _stash(n, x)
    axes = list(range(axis, x.dim()))
    mean = torch.mean(wide, axes, keepdim=True)
    inverse = torch.rsqrt(torch.mean((wide - mean) ** 2, axes, keepdim=True) + eps)
    return out, mean, inverse


@op("RMSNormalization SimplifiedLayerNormalization")
def _rms_norm(n: Call, x: Any, scale: Any) -> Any:
    axis, eps = _axis(n, n.integer("axis", -1), x.dim()), n.number("epsilon", 1e-5)
    shape = tuple(x.shape[axis:])
    if tuple(scale.shape) == shape and scale.dtype == x.dtype:
        return F.rms_norm(x, shape, scale, eps)
    return (F.rms_norm(_stash(n, x), shape, None, eps)).to(scale.dtype) * scale


@op("GroupNormalization")
def _group_norm(n: Call, x: Any, scale: Any, bias: Any) -> Any:
    groups, eps = n.integer("num_groups", 1), n.number("epsilon", 1e-5)
    if n.opset < 21:  # one scale and bias a group
        each = x.shape[1] // groups
        scale, bias = scale.repeat_interleave(each), bias.repeat_interleave(each)
    return F.group_norm(x, groups, scale, bias, eps)


@op("LRN")
def _lrn(n: Call, x: Any) -> Any:
    size, alpha, beta = n.integer("size"), n.number("alpha", 1e-4), n.number("beta", 0.75)
    if size < 1 or size > 1 << 16:
        raise n.wrong(f"a size of {size} cannot be")
    return F.local_response_norm(x, size, alpha, beta, n.number("bias", 1.0))


@op("LpNormalization")
def _lp_norm(n: Call, x: Any) -> Any:
    size = torch.linalg.vector_norm(x, n.integer("p", 2), _axis(n, n.integer("axis", -1), x.dim()), keepdim=True)
    return torch.where(size == 0, torch.zeros_like(x), x / size)


@op("MeanVarianceNormalization")
def _mvn(n: Call, x: Any) -> Any:
    axes = n.ints("axes") or [0, 2, 3]
    centered = x - torch.mean(x, axes, keepdim=True)
    return centered / (torch.sqrt(torch.mean(centered * centered, axes, keepdim=True)) + 1e-9)


def _rows(n: Call, x: Any, fn: Any) -> Any:
    """Softmax and its like: along an axis, or before op set 13 over all dims from one on."""
    if n.opset >= 13:
        return fn(x, _axis(n, n.integer("axis", -1), x.dim()))
    axis = _axis(n, n.integer("axis", 1), x.dim())
    if axis == x.dim() - 1:
        return fn(x, -1)
    return fn(x.reshape(math.prod(x.shape[:axis]), -1), -1).reshape(x.shape)


@op("Softmax")
def _softmax(n: Call, x: Any) -> Any:
    return _rows(n, x, F.softmax)


@op("LogSoftmax")
def _log_softmax(n: Call, x: Any) -> Any:
    return _rows(n, x, F.log_softmax)


@op("Hardmax")
def _hardmax(n: Call, x: Any) -> Any:
    return _rows(n, x, lambda t, d: torch.zeros_like(t).scatter(d, torch.argmax(t, d, keepdim=True), 1.0))


@op("Dropout", host=(1, 2))
def _dropout(n: Call, x: Any, ratio: Any = None, training: Any = None) -> Any:
    share = 0.5 if ratio is None or ratio.numel() == 0 else float(ratio)
    if training is not None and bool(training) and share > 0:
        kept = torch.rand_like(x) >= share
        return x * kept.to(x.dtype) / (1 - share), kept
    return (x, torch.ones_like(x, dtype=torch.bool)) if n.wants(1) else x


# --- attention ------------------------------------------------------------------------------------------------------


@op("RotaryEmbedding")
def _rotary(n: Call, x: Any, cos: Any, sin: Any, positions: Any = None) -> Any:
    heads = n.integer("num_heads")
    flat = x.dim() == 3
    if flat:
        x = x.reshape(x.shape[0], x.shape[1], heads, -1)
    else:
        x = x.transpose(1, 2)
    width = n.integer("rotary_embedding_dim") or x.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    if positions is not None:
        cos, sin = F.embedding(positions, cos), F.embedding(positions, sin)
    cos, sin = (t[..., : width // 2].unsqueeze(2) for t in (cos, sin))
    if n.integer("interleaved"):
        a, b = turned[..., 0::2], turned[..., 1::2]
        out = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = turned[..., : width // 2], turned[..., width // 2 :]
        out = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    out = torch.cat([out, rest], -1) if rest.shape[-1] else out
    return out.flatten(2) if flat else out.transpose(1, 2)


@op("Attention")
def _attention(n: Call, q: Any, k: Any, v: Any, mask: Any = None, past_k: Any = None, past_v: Any = None) -> Any:
    flat = q.dim() == 3
    if flat:
        q, k, v = (
            t.reshape(t.shape[0], t.shape[1], h, -1).transpose(1, 2)
            for t, h in ((q, n.integer("q_num_heads")), (k, n.integer("kv_num_heads")), (v, n.integer("kv_num_heads")))
        )
    if past_k is not None:
        k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
    present_k, present_v = k, v
    causal, cap = bool(n.integer("is_causal")), n.number("softcap", 0.0)
    scale = n.get("scale")
    scale = 1 / math.sqrt(q.shape[-1]) if not scale else float(scale)
    if mask is not None and mask.shape[-1] < k.shape[2]:
        fill: Any = False if mask.dtype is torch.bool else -math.inf
        mask = F.pad(mask, (0, k.shape[2] - mask.shape[-1]), value=fill)
    past = 0 if past_k is None else past_k.shape[2]
    groups = q.shape[1] != k.shape[1]
    if (
        not cap
        and not n.wants(3)
        and not n.integer("softmax_precision")
        and not (causal and (mask is not None or past or q.shape[2] != k.shape[2]))
    ):
        out = F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=groups)
        out = out.transpose(1, 2).flatten(2) if flat else out
        return out, present_k, present_v
    if groups:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    bias = torch.zeros((q.shape[2], k.shape[2]), dtype=q.dtype, device=q.device)
    if causal:
        kept = torch.ones((q.shape[2], k.shape[2]), dtype=torch.bool, device=q.device).tril(past)
        bias = bias.masked_fill(~kept, -math.inf)
    if mask is not None:
        bias = torch.where(mask, bias, -math.inf) if mask.dtype is torch.bool else bias + mask
    root = math.sqrt(scale)
    # What the fourth output shows: raw scores, capped ones, those with the mask, or the weights
    raw = torch.matmul(q * root, k.transpose(-1, -2) * root)
    capped = cap * torch.tanh(raw / cap) if cap else raw
    masked = capped + bias
    wide = masked
    if n.get("softmax_precision"):
        wide = converted(wide, n.integer("softmax_precision"), True, n.where)
    weights = F.softmax(wide, -1)
    # A row that may look nowhere is zero
    weights = torch.where(torch.isneginf(torch.amax(bias, -1, keepdim=True)), 0.0, weights).to(q.dtype)
    out = torch.matmul(weights, v)
    shown = (raw, capped, masked, weights)[n.integer("qk_matmul_output_mode") % 4]
    return (out.transpose(1, 2).flatten(2) if flat else out), present_k, present_v, shown


# --- losses ---------------------------------------------------------------------------------------------------------


def _nll(n: Call, x: Any, target: Any, weight: Any) -> Any:
    # Written out: PyTorch's own raises on targets out of range, which ONNX ignores when they are ignore_index
    ignored = n.get("ignore_index")
    target = target.to(torch.int64)
    keep = torch.ones_like(target, dtype=torch.bool) if ignored is None else target != ignored
    safe = torch.where(keep, target, torch.zeros_like(target))
    picked = -torch.gather(x, 1, safe.unsqueeze(1)).squeeze(1)
    share = keep.to(x.dtype) if weight is None else F.embedding(safe, weight.reshape(-1, 1)).squeeze(-1) * keep
    loss = picked * share
    how = n.text("reduction", "mean")
    if how == "none":
        return loss
    return torch.sum(loss) if how == "sum" else torch.sum(loss) / torch.sum(share)


@op("NegativeLogLikelihoodLoss")
def _nll_loss(n: Call, x: Any, target: Any, weight: Any = None) -> Any:
    return _nll(n, x, target, weight)


@op("SoftmaxCrossEntropyLoss")
def _cross_entropy(n: Call, x: Any, target: Any, weight: Any = None) -> Any:
    log = F.log_softmax(x, 1)
    return _nll(n, log, target, weight), log
