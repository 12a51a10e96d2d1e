"""Resampling, regions, boxes and signals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ridgeline.capture.importers.onnx.file import torch_type
from ridgeline.capture.importers.onnx.registry import Call, items, op
from ridgeline.capture.importers.onnx.shapes import _axis
from ridgeline.capture.importers.program import Host

# --- resize ---------------------------------------------------------------------------------------------------------


def _positions(mode: str, num: int, size: int, scale: float, roi: tuple[float, float] | None) -> np.ndarray[Any, Any]:
    """Where in the input each output lies."""
    y = np.arange(num, dtype=np.float64)
    wide = scale * size
    if mode == "align_corners":
        return y * (size - 1) / (wide - 1) if wide != 1 else np.zeros(num)
    if mode == "asymmetric":
        return y / scale
    if mode == "tf_crop_and_resize":
        start, end = roi or (0.0, 1.0)
        if wide == 1:
            return np.full(num, (start + end) * (size - 1) / 2)
        return y * (end - start) * (size - 1) / (wide - 1) + start * (size - 1)
    if mode == "pytorch_half_pixel" and wide == 1:
        return np.full(num, -0.5)
    middle = size / 2 * (1 - num / wide) if mode == "half_pixel_symmetric" else 0.0
    return middle + (y + 0.5) / scale - 0.5


def _nearest(x: np.ndarray[Any, Any], mode: str) -> np.ndarray[Any, Any]:
    if mode == "floor":
        return np.floor(x)
    if mode == "ceil":
        return np.ceil(x)
    return np.floor(x + 0.5) if mode == "round_prefer_ceil" else np.ceil(x - 0.5)


def _cubic(t: np.ndarray[Any, Any], a: float) -> np.ndarray[Any, Any]:
    t = np.abs(t)
    near = (a + 2) * t**3 - (a + 3) * t**2 + 1
    far = a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a
    return np.where(t <= 1, near, np.where(t < 2, far, 0.0))


def _weights(n: Call, x: np.ndarray[Any, Any], size: int, scale: float) -> np.ndarray[Any, Any]:
    """The matrix that resamples one dim: rows are outputs."""
    mode, num = n.text("mode", "nearest"), len(x)
    out = np.zeros((num, size))
    rows = np.arange(num)
    if mode == "nearest":
        at = np.clip(_nearest(x, n.text("nearest_mode", "round_prefer_floor")), 0, size - 1).astype(np.int64)
        out[rows, at] = 1
        return out
    shrink = min(scale, 1.0) if n.integer("antialias") else 1.0
    reach = math.ceil((1 if mode == "linear" else 2) / shrink)
    first = np.floor(x)
    total = np.zeros(num)
    exclude = bool(n.integer("exclude_outside"))
    for offset in range(-reach, reach + 2):
        at = first + offset
        t = (at - x) * shrink
        w = np.maximum(1 - np.abs(t), 0) if mode == "linear" else _cubic(t, n.number("cubic_coeff_a", -0.75))
        if exclude:
            w = np.where((at < 0) | (at >= size), 0.0, w)
        np.add.at(out, (rows, np.clip(at, 0, size - 1).astype(np.int64)), w)
        total += w
    if exclude or shrink < 1:
        out /= np.where(total == 0, 1.0, total)[:, None]
    return out


@op("Resize Upsample", host=(1, 2, 3), grows=True)
def _resize(n: Call, x: Any, *rest: Any) -> Any:
    roi, scales, sizes = None, None, None
    if n.node.op == "Upsample" or n.opset < 11:
        scales = rest[0] if rest else torch.tensor(n.get("scales"))
    else:
        roi, scales, sizes = (*rest, None, None, None)[:3]
    legacy = n.node.op == "Upsample" or n.opset < 11
    where = n.text("coordinate_transformation_mode", "asymmetric" if legacy else "half_pixel")
    if legacy:
        n.node.attrs.setdefault("nearest_mode", b"floor")
    axes = [_axis(n, a, x.dim()) for a in n.ints("axes") or range(x.dim())]
    factor = [1.0] * x.dim()
    size = list(x.shape)
    if scales is not None and scales.numel():
        for a, s in zip(axes, items(scales)):
            if not 0 < s < 1e6:
                raise n.wrong(f"a scale of {s} cannot be")
            factor[a], size[a] = float(s), math.floor(x.shape[a] * float(s) + 1e-9)
    elif sizes is not None and sizes.numel():
        wanted = [int(s) for s in items(sizes)]
        policy = n.text("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            ratios = [w / x.shape[a] for a, w in zip(axes, wanted)]
            one = min(ratios) if policy == "not_larger" else max(ratios)
            for a in axes:
                factor[a], size[a] = one, math.floor(x.shape[a] * one + 0.5)
        else:
            for a, w in zip(axes, wanted):
                factor[a], size[a] = w / x.shape[a], w
    else:
        raise n.wrong("neither scales nor sizes are given")
    whole = [i for i in range(x.dim()) if size[i] != x.shape[i] or where == "tf_crop_and_resize"]
    quick = _interpolated(n, x, size, factor, where)
    if quick is not None:
        return quick
    limits = [None] * x.dim()
    if where == "tf_crop_and_resize" and roi is not None and roi.numel():
        flat = items(roi)
        for i, a in enumerate(axes):
            limits[a] = (flat[i], flat[i + len(axes)])  # type: ignore[call-overload]
    out, dtype = x, x.dtype
    work = torch.float64 if dtype is torch.float64 else torch.float32
    outside = None
    for a in whole:
        at = _positions(where, size[a], x.shape[a], factor[a], limits[a])
        if where != "tf_crop_and_resize" and factor[a] == 1.0 and size[a] == x.shape[a]:
            continue
        matrix = torch.from_numpy(_weights(n, at, x.shape[a], factor[a])).to(work)
        matrix = n.ctx.constant(matrix) if x.is_meta else matrix.to(x.device)
        out = torch.movedim(torch.matmul(torch.movedim(out.to(work), a, -1), matrix.t()), -1, a)
        if where == "tf_crop_and_resize":
            beyond = torch.from_numpy((at < 0) | (at > x.shape[a] - 1))
            shape = [1] * x.dim()
            shape[a] = size[a]
            beyond = beyond.reshape(shape)
            outside = beyond if outside is None else outside | beyond
    if outside is not None and bool(outside.any()):
        mask = n.ctx.constant(outside) if x.is_meta else outside.to(x.device)
        out = torch.where(mask, n.number("extrapolation_value", 0.0), out)
    if not dtype.is_floating_point:
        out = torch.round(out)
    return out.to(dtype)


def _interpolated(n: Call, x: Any, size: list[int], factor: list[float], where: str) -> Any:
    """PyTorch's own call where it is the same."""
    num = x.dim() - 2
    mode = n.text("mode", "nearest")
    if not 1 <= num <= 3 or size[:2] != list(x.shape[:2]) or not x.dtype.is_floating_point:
        return None
    if any(abs(s / d - f) > 1e-6 for s, d, f in zip(size, x.shape, factor)) or n.integer("exclude_outside"):
        return None
    if mode == "nearest":
        if where == "asymmetric" and n.text("nearest_mode", "round_prefer_floor") == "floor":
            return F.interpolate(x, tuple(size[2:]), mode="nearest")
        return None
    name = {("linear", 1): "linear", ("linear", 2): "bilinear", ("linear", 3): "trilinear", ("cubic", 2): "bicubic"}
    chosen = name.get((mode, num))
    if chosen is None or n.integer("antialias") or (mode == "cubic" and n.number("cubic_coeff_a", -0.75) != -0.75):
        return None
    if where not in ("half_pixel", "pytorch_half_pixel", "align_corners") or (
        where != "half_pixel" and any(s == 1 for s in size[2:])
    ):
        return None
    return F.interpolate(x, tuple(size[2:]), mode=chosen, align_corners=where == "align_corners")


@op("GridSample")
def _grid_sample(n: Call, x: Any, grid: Any) -> Any:
    mode = n.text("mode", "linear" if n.opset >= 20 else "bilinear")
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    if x.dim() == 5 and mode == "bicubic":
        raise n.wrong("cubic samples of volumes are not supported")
    if mode == "nearest" and x.dim() in (4, 5):
        # PyTorch rounds in the type of the grid, halves to even: as ONNX does
        pass
    return F.grid_sample(x, grid.to(x.dtype), mode, n.text("padding_mode", "zeros"), bool(n.integer("align_corners")))


@op("AffineGrid", host=(1,))
def _affine_grid(n: Call, theta: Any, size: Any) -> Any:
    return F.affine_grid(theta, items(size), bool(n.integer("align_corners")))


# --- regions and boxes ----------------------------------------------------------------------------------------------


def _bilinear(planes: Any, y: Any, x: Any) -> Any:
    """Samples of [c, h, w] at points; outside by more than one is zero."""
    height, width = planes.shape[-2:]
    outside = (y < -1) | (y > height) | (x < -1) | (x > width)
    y, x = y.clamp(min=0), x.clamp(min=0)
    y0, x0 = y.floor().clamp(max=height - 1), x.floor().clamp(max=width - 1)
    y1, x1 = (y0 + 1).clamp(max=height - 1), (x0 + 1).clamp(max=width - 1)
    y, x = torch.where(y0 >= height - 1, y0, y), torch.where(x0 >= width - 1, x0, x)
    ly, lx = y - y0, x - x0
    corners = [(1 - ly) * (1 - lx), (1 - ly) * lx, ly * (1 - lx), ly * lx]
    corners = [torch.where(outside, torch.zeros_like(c), c) for c in corners]
    flat = planes.flatten(-2)
    at = [(a.long() * width + b.long()) for a, b in ((y0, x0), (y0, x1), (y1, x0), (y1, x1))]
    return [flat[:, a] * c for a, c in zip(at, corners)]


@op("RoiAlign", host=(2,))
def _roi_align(n: Call, x: Any, rois: Any, batch: Any) -> Any:
    rows, cols = n.integer("output_height", 1), n.integer("output_width", 1)
    ratio, scale = n.integer("sampling_ratio"), n.number("spatial_scale", 1.0)
    half = (
        n.text("coordinate_transformation_mode", "half_pixel" if n.opset >= 16 else "output_half_pixel") == "half_pixel"
    )
    boxes = n.ctx.host(rois, f"the boxes of {n.where}") if x.is_meta else rois
    outs = []
    for i, b in enumerate(items(batch)):
        x1, y1, x2, y2 = (boxes[i] * scale - (0.5 if half else 0.0)).tolist()
        width, height = (x2 - x1, y2 - y1) if half else (max(x2 - x1, 1.0), max(y2 - y1, 1.0))
        step_y, step_x = height / rows, width / cols
        num_y = ratio or math.ceil(height / rows)
        num_x = ratio or math.ceil(width / cols)
        num_y, num_x = max(num_y, 1), max(num_x, 1)
        y = y1 + (torch.arange(rows * num_y, dtype=torch.float32) + 0.5) * step_y / num_y
        z = x1 + (torch.arange(cols * num_x, dtype=torch.float32) + 0.5) * step_x / num_x
        grid_y, grid_x = torch.meshgrid(y, z, indexing="ij")
        if x.is_meta:
            grid_y, grid_x = n.ctx.constant(grid_y), n.ctx.constant(grid_x)
        else:
            grid_y, grid_x = grid_y.to(x.device), grid_x.to(x.device)
        parts = _bilinear(x[int(b)], grid_y, grid_x)
        if n.text("mode", "avg") == "max":
            best = torch.maximum(torch.maximum(parts[0], parts[1]), torch.maximum(parts[2], parts[3]))
            outs.append(best.reshape(x.shape[1], rows, num_y, cols, num_x).amax((2, 4)))
        else:
            total = parts[0] + parts[1] + parts[2] + parts[3]
            outs.append(total.reshape(x.shape[1], rows, num_y, cols, num_x).mean((2, 4)))
    return torch.stack(outs).to(x.dtype) if outs else x.new_zeros((0, x.shape[1], rows, cols))


@op("MaxRoiPool", host=(1,))
def _max_roi_pool(n: Call, x: Any, rois: Any) -> Any:
    rows, cols = n.ints("pooled_shape")
    scale = n.number("spatial_scale", 1.0)
    outs = []
    for b, *box in rois.tolist():
        x1, y1, x2, y2 = (math.floor(v * scale + 0.5) for v in box)
        height, width = max(y2 - y1 + 1, 1), max(x2 - x1 + 1, 1)
        cells = []
        for i in range(rows):
            for j in range(cols):
                top, bottom = (min(max(int(f(k * height / rows)) + y1, 0), x.shape[2])
                               for f, k in ((math.floor, i), (math.ceil, i + 1)))  # fmt: skip
                left, right = (min(max(int(f(k * width / cols)) + x1, 0), x.shape[3])
                               for f, k in ((math.floor, j), (math.ceil, j + 1)))  # fmt: skip
                part = x[int(b), :, top:bottom, left:right]
                cells.append(part.amax((1, 2)) if bottom > top and right > left else x.new_zeros(x.shape[1]))
        outs.append(torch.stack(cells, 1).reshape(x.shape[1], rows, cols))
    return torch.stack(outs)


@op("NonMaxSuppression", raw=True)
def _nms(n: Call, env: Any, boxes: Any, scores: Any, most: Any = None, overlap: Any = None, least: Any = None) -> Any:
    shown: list[Any] = [
        None if v is None else n.ctx.host(v, f"the boxes of {n.where}") for v in (boxes, scores, most, overlap, least)
    ]
    all_boxes, all_scores = shown[0].double(), shown[1]
    limit = 0 if shown[2] is None or not shown[2].numel() else int(shown[2].reshape(-1)[0])
    threshold = 0.0 if shown[3] is None or not shown[3].numel() else float(shown[3].reshape(-1)[0])
    lowest = None if shown[4] is None or not shown[4].numel() else float(shown[4].reshape(-1)[0])
    picked = []
    for b in range(all_scores.shape[0]):
        box = all_boxes[b]
        if n.integer("center_point_box"):
            box = torch.cat([box[:, :2] - box[:, 2:] / 2, box[:, :2] + box[:, 2:] / 2], 1)
        first, last = torch.minimum(box[:, :2], box[:, 2:]), torch.maximum(box[:, :2], box[:, 2:])
        area = (last - first).prod(1)
        for c in range(all_scores.shape[1]):
            score = all_scores[b, c]
            order = torch.argsort(score, descending=True, stable=True).tolist()
            kept: list[int] = []
            for at in order:
                if len(kept) >= limit:
                    break
                if lowest is not None and not float(score[at]) > lowest:
                    continue
                if kept:
                    k = torch.tensor(kept)
                    inner = (torch.minimum(last[at], last[k]) - torch.maximum(first[at], first[k])).clamp(min=0).prod(1)
                    union = area[at] + area[k] - inner
                    if bool((torch.where(union > 0, inner / union, torch.zeros_like(union)) > threshold).any()):
                        continue
                kept.append(at)
            picked += [[b, c, at] for at in kept]
    return (Host(torch.tensor(picked, dtype=torch.int64).reshape(-1, 3)),)


# --- signals --------------------------------------------------------------------------------------------------------


@op("DFT", host=(1, 2))
def _dft(n: Call, x: Any, length: Any = None, axis: Any = None) -> Any:
    dim = n.integer("axis", 1) if n.opset < 20 else (-2 if axis is None else int(axis))
    dim = _axis(n, dim, x.dim())
    size = None if length is None else int(length)
    inverse, one_sided = bool(n.integer("inverse")), bool(n.integer("onesided"))
    wide = x.to(torch.float64) if x.dtype is torch.float64 else x.to(torch.float32)
    if inverse and one_sided:
        full = torch.complex(wide[..., 0], wide[..., 1])
        return torch.fft.irfft(full, size, dim).unsqueeze(-1).to(x.dtype)
    if x.shape[-1] == 1:
        signal = wide[..., 0]
        out = (
            torch.fft.rfft(signal, size, dim)
            if one_sided
            else (torch.fft.ifft(signal, size, dim) if inverse else torch.fft.fft(signal, size, dim))
        )
    else:
        signal = torch.complex(wide[..., 0], wide[..., 1])
        out = torch.fft.ifft(signal, size, dim) if inverse else torch.fft.fft(signal, size, dim)
        if one_sided:
            out = out.narrow(dim, 0, out.shape[dim] // 2 + 1)
    return torch.view_as_real(out).to(x.dtype)


@op("STFT", host=(1, 3))
def _stft(n: Call, x: Any, step: Any, window: Any = None, length: Any = None) -> Any:
    size = int(length) if length is not None else window.shape[0]
    hop = int(step)
    signal = (
        x[..., 0] if x.dim() == 3 and x.shape[-1] == 1 else x if x.dim() == 2 else torch.complex(x[..., 0], x[..., 1])
    )
    frames = signal.unfold(1, size, hop)
    if window is not None:
        frames = frames * window
    one_sided = bool(n.integer("onesided", 1)) and not frames.dtype.is_complex
    out = torch.fft.rfft(frames) if one_sided else torch.fft.fft(frames)
    return torch.view_as_real(out).to(x.dtype)


_WINDOWS = {
    "HannWindow": (0.5, 0.5, 0.0),
    "HammingWindow": (25 / 46, 21 / 46, 0.0),
    "BlackmanWindow": (0.42, 0.5, 0.08),
}


@op("HannWindow HammingWindow BlackmanWindow", host=(0,), grows=True)
def _window(n: Call, size: Any) -> Any:
    num = int(size)
    if num > 1 << 30:
        raise n.wrong(f"a window of {num} is too long")
    a, b, c = _WINDOWS[n.node.op]
    period = num if n.integer("periodic", 1) else num - 1
    at = torch.arange(num, dtype=torch.float64, device=n.device) * (2 * math.pi / period)
    out = a - b * torch.cos(at) + c * torch.cos(2 * at)
    return out.to(torch_type(n.integer("output_datatype", 1), n.where))


@op("MelWeightMatrix", host=(0, 1, 2, 3, 4))
def _mel(n: Call, bins: Any, length: Any, rate: Any, low: Any, high: Any) -> Any:
    num, size, sample = int(bins), int(length), int(rate)
    if not 0 < num <= 1 << 14 or not 0 < size <= 1 << 20:
        raise n.wrong(f"{num} bins of a transform of {size} cannot be")
    spectrum = size // 2 + 1
    edges = np.arange(num + 2, dtype=np.float64)
    lowest, highest = (2595 * math.log10(1 + float(f) / 700) for f in (low, high))
    mel = edges * (highest - lowest) / edges.shape[0] + lowest
    at = ((size + 1) * (700 * (10 ** (mel / 2595) - 1)) // sample).astype(np.int64)
    out = np.zeros((spectrum, num))
    for i in range(num):
        left, middle, right = at[i : i + 3]
        if middle == left:
            out[middle, i] = 1
        else:
            for j in range(left, middle + 1):
                out[j, i] = (j - left) / (middle - left)
        for j in range(middle, right):
            out[j, i] = (right - j) / (right - middle)
    return torch.from_numpy(out).to(torch_type(n.integer("output_datatype", 1), n.where))


# --- random ---------------------------------------------------------------------------------------------------------


def _random_type(n: Call, like: Any = None) -> Any:
    if "dtype" in n.node.attrs:
        return torch_type(n.integer("dtype"), n.where)
    return like.dtype if like is not None else torch.float32


@op("RandomNormalLike", eager=True)
def _normal_like(n: Call, x: Any) -> Any:
    return torch.randn_like(x, dtype=_random_type(n, x)) * n.number("scale", 1.0) + n.number("mean", 0.0)


@op("RandomUniformLike", eager=True)
def _uniform_like(n: Call, x: Any) -> Any:
    low, high = n.number("low", 0.0), n.number("high", 1.0)
    return torch.rand_like(x, dtype=_random_type(n, x)) * (high - low) + low


@op("RandomNormal", eager=True)
def _normal(n: Call) -> Any:
    shape = n.ints("shape")
    return torch.randn(shape, dtype=_random_type(n), device=n.device) * n.number("scale", 1.0) + n.number("mean", 0.0)


@op("RandomUniform", eager=True)
def _uniform(n: Call) -> Any:
    low, high = n.number("low", 0.0), n.number("high", 1.0)
    return torch.rand(n.ints("shape"), dtype=_random_type(n), device=n.device) * (high - low) + low


@op("Bernoulli", eager=True)
def _bernoulli(n: Call, x: Any) -> Any:
    return (torch.rand_like(x, dtype=x.dtype) < x).to(_random_type(n, x))


@op("Multinomial", eager=True)
def _multinomial(n: Call, x: Any) -> Any:
    out = torch.multinomial(torch.softmax(x, -1), n.integer("sample_size", 1), replacement=True)
    return out.to(torch_type(n.integer("dtype", 6), n.where))


@op("ImageDecoder", host=(0,))
def _image_decoder(n: Call, data: Any) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise n.wrong("decoding images needs Pillow: pip install pillow") from error
    import io

    with Image.open(io.BytesIO(data.numpy().tobytes())) as image:
        form = n.text("pixel_format", "RGB")
        pixels = np.array(image.convert("L" if form == "Grayscale" else "RGB"))
    pixels = pixels[..., None] if form == "Grayscale" else pixels[..., ::-1].copy() if form == "BGR" else pixels
    return torch.from_numpy(pixels)
