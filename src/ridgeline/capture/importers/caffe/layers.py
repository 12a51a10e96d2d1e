"""Caffe's layers as PyTorch calls, each by its type in ``caffe.proto``."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from ridgeline.errors import ModelFileError

SOURCES = frozenset({"Data", "DummyData", "HDF5Data", "ImageData", "Input", "MemoryData", "WindowData", "AnnotatedData",
                     "DenseImageData"})  # fmt: skip
LEFT_OUT = frozenset({
    "Accuracy", "ContrastiveLoss", "EuclideanLoss", "HDF5Output", "HingeLoss", "InfogainLoss",
    "MultinomialLogisticLoss", "SigmoidCrossEntropyLoss", "Silence", "SoftmaxWithLoss", "SmoothL1Loss",
    "MultiBoxLoss", "DetectionEvaluate",
})  # fmt: skip
"""Losses and measures: a network that is run has no labels."""

Layer = Callable[..., Any]
LAYERS: dict[str, Layer] = {}


def layer(names: str) -> Callable[[Layer], Layer]:
    def register(fn: Layer) -> Layer:
        for name in names.split():
            LAYERS[name] = fn
        return fn

    return register


class Params:
    """One layer: its parameters, and its weights by what they are."""

    def __init__(self, name: str, kind: str, message: Any, weight: Callable[..., Any], where: str) -> None:
        self.name, self.kind, self.message, self._weight, self.where = name, kind, message, weight, where
        self.section: Any = {}

    def of(self, section: str) -> Params:
        found = self.message.get(section, [{}])[-1]
        if not isinstance(found, dict):
            raise self.wrong(f"{section} is no message")
        self.section = found
        return self

    def get(self, name: str, default: Any = None) -> Any:
        return self.section.get(name, [default])[-1]

    def number(self, name: str, default: float) -> Any:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(f"{name} is {value!r}, which is no number")
        return value

    def count(self, name: str, default: int = 0) -> int:
        value = self.number(name, default)
        if value != int(value) or abs(value) > 1 << 40:
            raise self.wrong(f"{name} is {value!r}, which cannot be")
        return int(value)

    def flag(self, name: str, default: bool) -> bool:
        return self.get(name, default) in (True, 1)

    def axis(self, rank: int, default: int = 1, name: str = "axis") -> int:
        axis = self.count(name, default)
        if not -rank <= axis < max(rank, 1):
            raise self.wrong(f"axis {axis} of a blob of rank {rank}")
        return axis % max(rank, 1)

    def spatial(self, name: str, short: str, num: int, default: int) -> list[int]:
        """A size for each spatial dim, from any of the ways to write it."""
        sides = [self.get(f"{short}_h"), self.get(f"{short}_w")]
        if num == 2 and any(side is not None for side in sides):
            return [int(side) if side is not None else default for side in sides]
        listed = [int(v) for v in self.section.get(name, [default])]
        return listed * num if len(listed) == 1 else listed

    def weight(self, what: str, index: int, shape: tuple[int, ...], **more: Any) -> Any:
        return self._weight(self, what, index, shape, **more)

    def wrong(self, why: str) -> ModelFileError:
        return ModelFileError(f"{self.where}: layer {self.name!r} ({self.kind}): {why}")


_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@layer("Convolution DepthwiseConvolution ConvolutionDepthwise")
def _convolution(p: Params, x: Any) -> Any:
    p.of("convolution_param")
    num = x.dim() - 2
    if num not in _CONV or p.count("axis", 1) != 1:
        raise p.wrong(f"convolutions of {num} spatial dims are not supported")
    kernel = p.spatial("kernel_size", "kernel", num, 0)
    out, group = p.count("num_output"), p.count("group", 1)
    if p.kind != "Convolution":
        group = x.shape[1]
    if min(kernel) < 1 or out < 1 or group < 1 or x.shape[1] % group or out % group:
        raise p.wrong(f"{out} outputs of {x.shape[1]} channels in {group} groups with a kernel of {kernel} cannot be")
    w = p.weight("weight", 0, (out, x.shape[1] // group, *kernel))
    b = p.weight("bias", 1, (out,)) if p.flag("bias_term", True) else None
    stride, pad = p.spatial("stride", "stride", num, 1), p.spatial("pad", "pad", num, 0)
    return _CONV[num](x, w, b, tuple(stride), tuple(pad), tuple(p.spatial("dilation", "dilation", num, 1)), group)


@layer("Deconvolution")
def _deconvolution(p: Params, x: Any) -> Any:
    p.of("convolution_param")
    num = x.dim() - 2
    kernel = p.spatial("kernel_size", "kernel", num, 0)
    out, group = p.count("num_output"), p.count("group", 1)
    if num not in _TRANSPOSED or min(kernel) < 1 or out < 1 or group < 1 or x.shape[1] % group or out % group:
        raise p.wrong(f"{out} outputs of {x.shape[1]} channels in {group} groups with a kernel of {kernel} cannot be")
    w = p.weight("weight", 0, (x.shape[1], out // group, *kernel))
    b = p.weight("bias", 1, (out,)) if p.flag("bias_term", True) else None
    stride, pad = p.spatial("stride", "stride", num, 1), p.spatial("pad", "pad", num, 0)
    dilation = p.spatial("dilation", "dilation", num, 1)
    return _TRANSPOSED[num](x, w, b, tuple(stride), tuple(pad), 0, group, tuple(dilation))


@layer("InnerProduct")
def _inner_product(p: Params, x: Any) -> Any:
    p.of("inner_product_param")
    axis, out = p.axis(x.dim()), p.count("num_output")
    inner = math.prod(x.shape[axis:])
    flipped = p.flag("transpose", False)
    w = p.weight("weight", 0, (inner, out) if flipped else (out, inner))
    b = p.weight("bias", 1, (out,)) if p.flag("bias_term", True) else None
    flat = x.flatten(axis) if x.dim() - axis > 1 else x
    return F.linear(flat, w.t() if flipped else w, b)


@layer("Pooling")
def _pooling(p: Params, x: Any) -> Any:
    p.of("pooling_param")
    how = p.get("pool", "MAX")
    is_max = how in ("MAX", 0)
    if how in ("STOCHASTIC", 2):
        raise p.wrong("stochastic pooling is not supported: use MAX or AVE")
    num = x.dim() - 2
    if num not in (2, 3):
        raise p.wrong(f"pooling of {num} spatial dims is not supported")
    if p.flag("global_pooling", False):
        dims = tuple(range(2, x.dim()))
        return torch.amax(x, dims, keepdim=True) if is_max else torch.mean(x, dims, keepdim=True)
    kernel, stride = p.spatial("kernel_size", "kernel", num, 0), p.spatial("stride", "stride", num, 1)
    pad = p.spatial("pad", "pad", num, 0)
    ceil = p.get("round_mode", "CEIL") not in ("FLOOR", 1) and p.flag("ceil_mode", True)
    if min(kernel) < 1 or min(stride) < 1:
        raise p.wrong(f"a kernel of {kernel} with strides of {stride} cannot be")
    # Caffe pads by more than half a window, too, and takes windows that begin past the input
    sizes = []
    for size, k, s, d in zip(x.shape[2:], kernel, stride, pad):
        n = (-(-(size + 2 * d - k) // s) if ceil else (size + 2 * d - k) // s) + 1
        sizes.append(n - 1 if d and (n - 1) * s >= size + d else n)
    out = None
    if all(2 * d <= k for d, k in zip(pad, kernel)):
        if is_max:
            pool = F.max_pool2d if num == 2 else F.max_pool3d
            out = pool(x, tuple(kernel), tuple(stride), tuple(pad), 1, ceil)
        else:
            average = F.avg_pool2d if num == 2 else F.avg_pool3d
            out = average(x, tuple(kernel), tuple(stride), tuple(pad), ceil, True)
    if out is None or list(out.shape[2:]) != sizes:
        raise p.wrong(f"windows of {kernel} with strides of {stride} and padding of {pad} leave the input")
    return out


@layer("BatchNorm BN")
def _batch_norm(p: Params, x: Any) -> Any:
    p.of("batch_norm_param")
    if p.kind == "BN":
        raise p.wrong("BN is a layer of one fork of Caffe: write it as BatchNorm and Scale")
    eps = p.number("eps", 1e-5)
    mean = p.weight("mean", 0, (x.shape[1],), scaled_by=2)
    var = p.weight("var", 1, (x.shape[1],), scaled_by=2)
    w = b = None
    follower = p.message.get("_scale")
    if follower is not None:
        scale: Params = follower[0]
        scale.of("scale_param")
        w = scale.weight("weight", 0, (x.shape[1],))
        b = scale.weight("bias", 1, (x.shape[1],)) if scale.flag("bias_term", False) else None
    return F.batch_norm(x, mean, var, w, b, False, 0.0, eps)


def _spread(p: Params, x: Any, t: Any, num_axes: int) -> Any:
    axis = p.axis(x.dim())
    return t.reshape(*t.shape, *[1] * (x.dim() - axis - t.dim())) if t.dim() else t


@layer("Scale")
def _scale(p: Params, x: Any, given: Any = None) -> Any:
    p.of("scale_param")
    axis, num = p.axis(x.dim()), p.count("num_axes", 1)
    shape = tuple(x.shape[axis:] if num == -1 else x.shape[axis : axis + num])
    w = p.weight("weight", 0, shape) if given is None else given
    out = x * _spread(p, x, w, num)
    if p.flag("bias_term", False):
        out = out + _spread(
            p, x, p.weight("bias", 0 if given is not None else 1, shape if given is None else tuple(given.shape)), num
        )
    return out


@layer("Bias")
def _bias(p: Params, x: Any, given: Any = None) -> Any:
    p.of("bias_param")
    axis, num = p.axis(x.dim()), p.count("num_axes", 1)
    shape = tuple(x.shape[axis:] if num == -1 else x.shape[axis : axis + num])
    return x + _spread(p, x, p.weight("bias", 0, shape) if given is None else given, num)


@layer("LRN")
def _lrn(p: Params, x: Any) -> Any:
    p.of("lrn_param")
    size, alpha, beta, k = p.count("local_size", 5), p.number("alpha", 1.0), p.number("beta", 0.75), p.number("k", 1.0)
    if not 0 < size < 1 << 16 or size % 2 == 0:
        raise p.wrong(f"a local size of {size} is not odd")
    if p.get("norm_region", "ACROSS_CHANNELS") in ("WITHIN_CHANNEL", 1):
        mean = F.avg_pool2d(x * x, size, 1, size // 2, count_include_pad=True)
        return x / torch.pow(1 + alpha * mean, beta)
    return F.local_response_norm(x, size, alpha, beta, k)


@layer("ReLU")
def _relu(p: Params, x: Any) -> Any:
    slope = p.of("relu_param").number("negative_slope", 0.0)
    return F.leaky_relu(x, slope) if slope else torch.relu(x)


@layer("PReLU")
def _prelu(p: Params, x: Any) -> Any:
    shared = p.of("prelu_param").flag("channel_shared", False)
    return F.prelu(x, p.weight("weight", 0, (1,) if shared else (x.shape[1],)))


@layer("Power")
def _power(p: Params, x: Any) -> Any:
    p.of("power_param")
    power, scale, shift = p.number("power", 1.0), p.number("scale", 1.0), p.number("shift", 0.0)
    out = x * scale if scale != 1 else x
    out = out + shift if shift else out
    return torch.pow(out, power) if power != 1 else out


@layer("Exp")
def _exp(p: Params, x: Any) -> Any:
    p.of("exp_param")
    base, out = p.number("base", -1.0), x * p.number("scale", 1.0) + p.number("shift", 0.0)
    return torch.exp(out) if base == -1 else torch.exp(out * math.log(base))


@layer("Log")
def _log(p: Params, x: Any) -> Any:
    p.of("log_param")
    base, out = p.number("base", -1.0), torch.log(x * p.number("scale", 1.0) + p.number("shift", 0.0))
    return out if base == -1 else out / math.log(base)


_PLAIN = {"AbsVal": torch.abs, "BNLL": F.softplus, "Sigmoid": torch.sigmoid, "TanH": torch.tanh, "ReLU6": F.relu6}
for _name, _fn in _PLAIN.items():
    LAYERS[_name] = lambda p, x, fn=_fn: fn(x)


@layer("ELU")
def _elu(p: Params, x: Any) -> Any:
    return F.elu(x, p.of("elu_param").number("alpha", 1.0))


@layer("Swish")
def _swish(p: Params, x: Any) -> Any:
    beta = p.of("swish_param").number("beta", 1.0)
    return F.silu(x) if beta == 1 else x * torch.sigmoid(x * beta)


@layer("Clip")
def _clip(p: Params, x: Any) -> Any:
    p.of("clip_param")
    return torch.clamp(x, p.number("min", -math.inf), p.number("max", math.inf))


@layer("Threshold")
def _threshold(p: Params, x: Any) -> Any:
    return (x > p.of("threshold_param").number("threshold", 0.0)).to(x.dtype)


@layer("Dropout")
def _dropout(p: Params, x: Any) -> Any:
    return x


@layer("Softmax")
def _softmax(p: Params, x: Any) -> Any:
    return F.softmax(x, p.of("softmax_param").axis(x.dim()))


@layer("Concat")
def _concat(p: Params, *xs: Any) -> Any:
    p.of("concat_param")
    return torch.cat(xs, p.axis(xs[0].dim(), p.count("concat_dim", 1)))


@layer("Eltwise")
def _eltwise(p: Params, *xs: Any) -> Any:
    p.of("eltwise_param")
    how, coeff = p.get("operation", "SUM"), p.section.get("coeff", [])
    out = xs[0]
    if how in ("SUM", 1):
        if coeff and len(coeff) != len(xs):
            raise p.wrong(f"{len(coeff)} coefficients for {len(xs)} inputs")
        scaled = [x if c == 1 else x * float(c) for x, c in zip(xs, coeff or [1] * len(xs))]
        out = scaled[0]
        for x in scaled[1:]:
            out = out + x
        return out
    for x in xs[1:]:
        out = out * x if how in ("PROD", 0) else torch.maximum(out, x)
    return out


@layer("Split")
def _split(p: Params, x: Any) -> Any:
    return tuple(x for _ in p.message.get("top", []))


@layer("Slice")
def _slice(p: Params, x: Any) -> Any:
    p.of("slice_param")
    axis = p.axis(x.dim(), p.count("slice_dim", 1))
    points, num = [int(v) for v in p.section.get("slice_point", [])], len(p.message.get("top", []))
    if points:
        edges = [0, *points, x.shape[axis]]
        sizes = [b - a for a, b in pairwise(edges)]
    else:
        sizes = [x.shape[axis] // max(num, 1)] * num
    return tuple(torch.split(x, sizes, axis))


@layer("Flatten")
def _flatten(p: Params, x: Any) -> Any:
    p.of("flatten_param")
    return torch.flatten(x, p.axis(x.dim()), p.axis(x.dim(), -1, "end_axis"))


@layer("Reshape")
def _reshape(p: Params, x: Any) -> Any:
    p.of("reshape_param")
    start, num = p.count("axis", 0), p.count("num_axes", -1)
    start = start + x.dim() + 1 if start < 0 else start
    end = x.dim() if num == -1 else start + num
    wanted = [int(d) for d in p.get("shape", {}).get("dim", [])]
    middle = [x.shape[start + i] if d == 0 else d for i, d in enumerate(wanted)]
    return x.reshape([*x.shape[:start], *middle, *x.shape[end:]])


@layer("Permute")
def _permute(p: Params, x: Any) -> Any:
    order = [int(v) for v in p.of("permute_param").section.get("order", [])]
    return torch.permute(x, [*order, *[d for d in range(x.dim()) if d not in order]])


@layer("Crop")
def _crop(p: Params, x: Any, like: Any) -> Any:
    p.of("crop_param")
    axis, offsets = p.axis(x.dim(), 2), [int(v) for v in p.section.get("offset", [0])]
    for i, d in enumerate(range(axis, x.dim())):
        x = x.narrow(d, offsets[i] if len(offsets) > 1 else offsets[0], like.shape[d])
    return x


@layer("Tile")
def _tile(p: Params, x: Any) -> Any:
    p.of("tile_param")
    times = [1] * x.dim()
    times[p.axis(x.dim())] = p.count("tiles", 1)
    return x.repeat(times)


@layer("Reduction")
def _reduction(p: Params, x: Any) -> Any:
    p.of("reduction_param")
    axis, how, coeff = p.axis(x.dim(), 0), p.get("operation", "SUM"), p.number("coeff", 1.0)
    flat = x.flatten(axis)
    made = {"SUM": lambda: flat.sum(-1), "ASUM": lambda: flat.abs().sum(-1), "SUMSQ": lambda: (flat * flat).sum(-1),
            "MEAN": lambda: flat.mean(-1)}  # fmt: skip
    names = {1: "SUM", 2: "ASUM", 3: "SUMSQ", 4: "MEAN"}
    out = made[names.get(how, how)]()
    return out * coeff if coeff != 1 else out


@layer("MVN")
def _mvn(p: Params, x: Any) -> Any:
    p.of("mvn_param")
    dims = list(range(1 if p.flag("across_channels", False) else 2, x.dim()))
    out = x - x.mean(dims, keepdim=True)
    if p.flag("normalize_variance", True):
        out = out / (torch.sqrt((out * out).mean(dims, keepdim=True)) + p.number("eps", 1e-9))
    return out


@layer("Normalize")
def _normalize(p: Params, x: Any) -> Any:
    p.of("norm_param")
    across, shared = p.flag("across_spatial", True), p.flag("channel_shared", True)
    size = torch.sqrt((x * x).sum([1, 2, 3] if across else [1], keepdim=True) + p.number("eps", 1e-10))
    w = p.weight("weight", 0, (1,) if shared else (x.shape[1],))
    return x / size * w.reshape(1, -1, 1, 1)


@layer("ArgMax")
def _arg_max(p: Params, x: Any) -> Any:
    p.of("argmax_param")
    k, shows = p.count("top_k", 1), p.flag("out_max_val", False)
    if "axis" in p.section:
        values, at = torch.topk(x, k, p.axis(x.dim()))
        return values if shows else at.to(x.dtype)
    values, at = torch.topk(x.flatten(1), k, -1)
    return torch.stack([at.to(x.dtype), values], 1) if shows else at.to(x.dtype).unsqueeze(1)


@layer("Embed")
def _embed(p: Params, x: Any) -> Any:
    p.of("embed_param")
    rows, width = p.count("input_dim"), p.count("num_output")
    out = F.embedding(x.to(torch.int64), p.weight("weight", 0, (rows, width)))
    return out + p.weight("bias", 1, (width,)) if p.flag("bias_term", True) else out


@layer("Im2col")
def _im2col(p: Params, x: Any) -> Any:
    p.of("convolution_param")
    kernel, stride = p.spatial("kernel_size", "kernel", 2, 1), p.spatial("stride", "stride", 2, 1)
    pad, dilation = p.spatial("pad", "pad", 2, 0), p.spatial("dilation", "dilation", 2, 1)
    out = F.unfold(x, kernel, dilation, pad, stride)
    sizes = [
        (s + 2 * d - w * (k - 1) - 1) // t + 1 for s, d, w, k, t in zip(x.shape[2:], pad, dilation, kernel, stride)
    ]
    return out.reshape(x.shape[0], -1, *sizes)


@layer("SPP")
def _spp(p: Params, x: Any) -> Any:
    p.of("spp_param")
    height, is_max = p.count("pyramid_height", 1), p.get("pool", "MAX") in ("MAX", 0)
    if not 0 < height <= 12:
        raise p.wrong(f"a pyramid of {height} levels cannot be")
    rows = []
    for level in range(height):
        bins = 2**level
        kernel = [-(-s // bins) for s in x.shape[2:]]
        pad = [(k * bins - s + 1) // 2 for k, s in zip(kernel, x.shape[2:])]
        pool = F.max_pool2d if is_max else F.avg_pool2d
        rows.append(pool(x, kernel, kernel, pad, ceil_mode=True).flatten(1))
    return torch.cat(rows, 1)


@layer("Filter BatchReindex")
def _by_data(p: Params, *xs: Any) -> Any:
    raise p.wrong("the shape of its result hangs on data: take the layer out of the network")


@layer("LSTM")
def _lstm(p: Params, x: Any, cont: Any, static: Any = None) -> Any:
    p.of("recurrent_param")
    hidden = p.count("num_output")
    if static is not None or p.flag("expose_hidden", False):
        raise p.wrong("static inputs and exposed hidden states are not supported")
    steps, batch = x.shape[:2]
    if steps > 4096:
        raise p.wrong(f"{steps} steps run one by one: at most 4,096 are supported")
    flat = x.flatten(2)
    gates = F.linear(flat, p.weight("weight_x", 0, (4 * hidden, flat.shape[2])), p.weight("bias", 1, (4 * hidden,)))
    w = p.weight("weight_h", 2, (4 * hidden, hidden))
    h = c = x.new_zeros((batch, hidden))
    rows = []
    for t in range(steps):
        keep = cont[t].reshape(batch, 1)
        i, f, o, g = torch.split(gates[t] + F.linear(h * keep, w), hidden, -1)
        c = torch.sigmoid(f) * c * keep + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        rows.append(h)
    return torch.stack(rows)


@layer("RNN")
def _rnn(p: Params, x: Any, cont: Any, static: Any = None) -> Any:
    p.of("recurrent_param")
    hidden = p.count("num_output")
    if static is not None or p.flag("expose_hidden", False) or x.shape[0] > 4096:
        raise p.wrong("static inputs, exposed hidden states and more than 4,096 steps are not supported")
    flat = x.flatten(2)
    given = F.linear(flat, p.weight("weight_x", 0, (hidden, flat.shape[2])), p.weight("bias", 1, (hidden,)))
    w = p.weight("weight_h", 2, (hidden, hidden))
    w_o, b_o = p.weight("weight_o", 3, (hidden, hidden)), p.weight("bias_o", 4, (hidden,))
    h = x.new_zeros((x.shape[1], hidden))
    rows = []
    for t in range(x.shape[0]):
        h = torch.tanh(given[t] + F.linear(h * cont[t].reshape(-1, 1), w))
        rows.append(torch.tanh(F.linear(h, w_o, b_o)))
    return torch.stack(rows)


@layer("Parameter")
def _parameter(p: Params) -> Any:
    shape = p.of("parameter_param").get("shape", {}).get("dim", [])
    return p.weight("weight", 0, tuple(int(d) for d in shape))


@layer("PriorBox")
def _prior_box(p: Params, x: Any, image: Any) -> Any:
    p.of("prior_box_param")
    lows, highs = p.section.get("min_size", []), p.section.get("max_size", [])
    ratios = [1.0]
    for ratio in p.section.get("aspect_ratio", []):
        if all(abs(ratio - r) > 1e-6 for r in ratios):
            ratios += [ratio, 1 / ratio] if p.flag("flip", True) else [ratio]
    rows, cols = x.shape[2:]
    height, width = image.shape[2:]
    step_y = p.number("step_h", p.number("step", 0)) or height / rows
    step_x = p.number("step_w", p.number("step", 0)) or width / cols
    sizes: list[tuple[float, float]] = []
    for i, low in enumerate(lows):
        sizes.append((low, low))
        if highs:
            sizes.append((math.sqrt(low * highs[i]),) * 2)
        sizes += [(low * math.sqrt(r), low / math.sqrt(r)) for r in ratios if abs(r - 1) > 1e-6]
    middle = p.number("offset", 0.5)
    y = (torch.arange(rows, dtype=x.dtype, device=x.device) + middle) * step_y
    z = (torch.arange(cols, dtype=x.dtype, device=x.device) + middle) * step_x
    boxes = []
    for w, h in sizes:
        boxes.append(torch.stack([
            ((z - w / 2) / width).expand(rows, cols), ((y - h / 2) / height).unsqueeze(1).expand(rows, cols),
            ((z + w / 2) / width).expand(rows, cols), ((y + h / 2) / height).unsqueeze(1).expand(rows, cols),
        ], -1))  # fmt: skip
    out = torch.stack(boxes, 2).reshape(1, 1, -1)
    out = out.clamp(0, 1) if p.flag("clip", False) else out
    spread = [float(v) for v in p.section.get("variance", [0.1])]
    spread = spread * 4 if len(spread) == 1 else spread
    extra = torch.cat([torch.full((1, 1, 1), v, dtype=x.dtype, device=x.device) for v in spread], 2)
    return torch.cat([out, extra.repeat(1, 1, out.shape[2] // 4)], 1)


def _decoded(p: Params, delta: Any, prior: Any, spread: Any) -> Any:
    """Boxes by their corners, from what a network says of each prior."""
    if not p.flag("variance_encoded_in_target", False):
        delta = delta * spread
    size = prior[..., 2:] - prior[..., :2]
    code = p.get("code_type", "CORNER")
    if code in ("CENTER_SIZE", 2):
        middle = delta[..., :2] * size + (prior[..., :2] + prior[..., 2:]) / 2
        half = torch.exp(delta[..., 2:]) * size / 2
        return torch.cat([middle - half, middle + half], -1)
    return prior + (delta * torch.cat([size, size], -1) if code in ("CORNER_SIZE", 3) else delta)


@layer("DetectionOutput")
def _detection_output(p: Params, loc: Any, conf: Any, priors: Any) -> Any:
    """SSD's detections as ``keep_top_k`` rows a picture; rows beyond those found are -1, as Caffe's own of none are."""
    p.of("detection_output_param")
    num_classes, background = p.count("num_classes"), p.count("background_label_id", 0)
    least, keep = p.number("confidence_threshold", -math.inf), p.count("keep_top_k", -1)
    suppression = p.get("nms_param", {})
    limit, top = float(suppression.get("nms_threshold", [0.3])[-1]), int(suppression.get("top_k", [-1])[-1])
    batch, num = loc.shape[0], priors.shape[2] // 4
    top = min(top, num) if top >= 0 else num
    if top > 2048 or num_classes < 2:
        raise p.wrong(f"{top} candidates of {num_classes} classes: give nms_param a top_k of at most 2048")
    prior, spread = (priors[:, i].reshape(1, num, 1, 4) for i in (0, 1))
    boxes = _decoded(p, loc.reshape(batch, num, -1, 4), prior, spread).transpose(1, 2)  # [picture, class, prior, 4]
    labels = [c for c in range(num_classes) if c != background]
    score, at = torch.topk(conf.reshape(batch, num, num_classes).transpose(1, 2)[:, labels], top, 2)
    boxes = boxes.expand(batch, len(labels), num, 4) if boxes.shape[1] == 1 else boxes[:, labels]
    boxes = torch.gather(boxes, 2, at.unsqueeze(-1).expand(batch, len(labels), top, 4))
    one, other = boxes.unsqueeze(3), boxes.unsqueeze(2)
    common = (torch.minimum(one[..., 2:], other[..., 2:]) - torch.maximum(one[..., :2], other[..., :2])).clamp(min=0)
    area = (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(-1)
    shared = common.prod(-1)
    overlaps = shared > limit * (area.unsqueeze(3) + area.unsqueeze(2) - shared)
    alive = score > least
    for i in range(top - 1):  # the best first, each removes what overlaps it
        removed = torch.logical_and(alive[..., i : i + 1], overlaps[..., i, i + 1 :])
        alive = torch.cat([alive[..., : i + 1], torch.logical_and(alive[..., i + 1 :], torch.logical_not(removed))], -1)
    rows = len(labels) * top
    keep = min(keep, rows) if keep >= 0 else rows
    best, where = torch.topk(torch.where(alive, score, -math.inf).reshape(batch, rows), keep, 1)
    found = best > -math.inf
    named = torch.tensor(labels, dtype=loc.dtype, device=loc.device)[where // top]
    order = torch.sort(torch.where(found, named, float(num_classes)), dim=1, stable=True)[1]
    image = torch.arange(batch, dtype=loc.dtype, device=loc.device).reshape(batch, 1).expand(batch, keep)
    corners = torch.gather(boxes.reshape(batch, rows, 4), 1, where.unsqueeze(-1).expand(batch, keep, 4))
    made = torch.cat([torch.stack([image, named, best], -1), corners], -1)
    made = torch.where(found.unsqueeze(-1), made, -1.0)
    return torch.gather(made, 1, order.unsqueeze(-1).expand(batch, keep, 7)).reshape(1, 1, batch * keep, 7)


@layer("ShuffleChannel")
def _shuffle(p: Params, x: Any) -> Any:
    return F.channel_shuffle(x, p.of("shuffle_channel_param").count("group", 1))


@layer("Interp")
def _interp(p: Params, x: Any) -> Any:
    p.of("interp_param")
    if "height" in p.section:
        size = (p.count("height"), p.count("width"))
    else:
        zoom, shrink = p.count("zoom_factor", 1), p.count("shrink_factor", 1)
        size = tuple(((s - 1) // shrink + 1) * zoom - (zoom - 1) for s in x.shape[2:])  # type: ignore[assignment]
    return F.interpolate(x, size, mode="bilinear", align_corners=True)
