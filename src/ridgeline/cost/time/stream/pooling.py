"""Time of pooling and resizing: a thread per output walks its window with index arithmetic that outweighs its bytes."""

from __future__ import annotations

from ridgeline.cost.call import ITEMSIZE, Call, Coef, Time, family, memory_floor_s
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.time.rows import reduction
from ridgeline.cost.time.stream import elementwise as stream
from ridgeline.cost.time.stream.elementwise import Sweep, blend, issue_s, timed

DEFAULTS: Coef = {
    "overlap": 1.5,  # exponent of the blend of latency, instructions and bytes
    "start_cycles": 3140.0,  # a small grid
    "miss_cycles": 2140.0,  # longer when its input comes from DRAM
    "output_instr": 272.0,  # lane instructions per output: window bounds
    "window_instr": 30.1,  # and per element of the window
    "average_frac": 2.05,  # channels-last average pooling needs this many times more
    "last_frac": 1.12,  # channels-last maximum
    "last_start_cycles": 9530.0,  # channels-last maximum: a block first clears its shared memory
    "last_output_cycles": 454.0,  # and walks its image rows in turn, per output pixel up to 64
    "last_wide_frac": 1.4,  # longer with 32-bit elements, of which fewer fit
    "back_instr": 364.0,  # gradient of maximum pooling: lane instructions per input element
    "back_last_frac": 0.809,  # channels-last
    "back_small_frac": 1.47,  # images below 100 pixels leave lanes idle
    "back_last_start_cycles": 15800.0,  # channels-last: start
    "resize_instr": 79.9,  # nearest-neighbor resize, per output
    "resize_wide_frac": 1.17,  # 32-bit elements
    "linear_instr": 160.0,  # more for interpolation
}


def _window_s(
    chip: Chip, coef: Coef, outputs: float, window: float, call: Call, channels_last: bool, pixels: float, cold: float
) -> float:
    instr = coef["output_instr"] + coef["window_instr"] * window
    start = coef["start_cycles"] + coef["miss_cycles"] * cold
    latency = 0.0
    if channels_last and call.kind == "avg_pool2d":
        instr *= coef["average_frac"]
    elif channels_last:
        instr *= coef["last_frac"]
        wide = coef["last_wide_frac"] if ITEMSIZE[call.dtype] > 2.0 else 1.0
        latency = wide * (coef["last_start_cycles"] + coef["last_output_cycles"] * min(64.0, pixels)) / chip.clock_hz
    return start / chip.clock_hz + blend(coef["overlap"], latency, issue_s(chip, outputs * instr))


def _back_s(
    chip: Chip, coef: Coef, inputs: float, pixels: float, size: float, channels_last: bool, cold: float
) -> float:
    """Clear the gradient, then every input looks for the windows it won."""
    cleared = Sweep(inputs, 0.0, inputs * size, 0, stream.DEFAULTS["fill_instr"], size, "plain")
    block = min(256, 1 << max(5, (int(pixels) - 1).bit_length()))
    idle = -(-pixels // block) * block / max(1.0, pixels)
    instr = coef["back_instr"] * (coef["back_last_frac"] if channels_last else idle)
    if pixels < 100.0 and not channels_last:
        instr *= coef["back_small_frac"]
    latency = coef["back_last_start_cycles"] / chip.clock_hz if channels_last else 0.0
    start = (coef["start_cycles"] + coef["miss_cycles"] * cold) / chip.clock_hz
    return (
        stream.sweep_s(chip, stream.DEFAULTS, cleared, 0.0)
        + start
        + blend(coef["overlap"], latency, issue_s(chip, inputs * instr))
    )


def _resize_s(chip: Chip, coef: Coef, outputs: float, size: float, linear: bool, cold: float) -> float:
    instr = coef["resize_instr"] * (coef["resize_wide_frac"] if size > 2.0 else 1.0) + (
        coef["linear_instr"] if linear else 0.0
    )
    start = (coef["start_cycles"] + coef["miss_cycles"] * cold) / chip.clock_hz
    return start + issue_s(chip, outputs * instr)


def _adaptive(call: Call, chip: Chip, dims: dict[str, int], size: float, warm_frac: float) -> Time:
    """Pooling to one pixel is a mean over the image."""
    n, c, pixels = dims["n"], dims["c"], dims["h"] * dims["w"]
    view = (n, pixels, c) if dims.get("nhwc", 0) else (n * c, pixels, 1)
    out_bytes = n * c * size
    busy_s, kernels, _ = reduction.reduce_s(chip, reduction.DEFAULTS, view, size, out_bytes, warm_frac)
    return timed(busy_s, memory_floor_s(chip, pixels * out_bytes, out_bytes, warm_frac), "memory", kernels)


def _sizes(call: Call, dims: dict[str, int]) -> tuple[float, float, float, float]:
    """Input elements, output elements, window, output pixels of one image."""
    if call.kind in ("pool", "resize"):
        return dims["in_numel"], dims["out_numel"], dims.get("window", 1), dims.get("pixels", 64)
    images, h, w = dims["n"] * dims["c"], dims["h"], dims["w"]
    if call.kind == "upsample2x":
        return images * h * w, 4.0 * images * h * w, 1, 4.0 * h * w
    k, stride = dims["k"], dims["stride"]
    pad = k // 2 if call.kind == "max_pool2d" else 0
    out = ((h + 2 * pad - k) // stride + 1) * ((w + 2 * pad - k) // stride + 1)
    return images * h * w, float(images * out), k * k, out


@family("pooling", "max_pool2d avg_pool2d adaptive_pool2d upsample2x pool resize", DEFAULTS)
def model(call: Call, chip: Chip, coef: Coef, warm_frac: float) -> Time:
    dims, size = call.dims(), ITEMSIZE[call.dtype]
    if call.kind == "adaptive_pool2d" and call.phase == "fwd":
        return _adaptive(call, chip, dims, size, warm_frac)
    inputs, outputs, window, pixels = _sizes(call, dims) if call.kind != "adaptive_pool2d" else _spread(dims)
    if inputs * outputs <= 0:
        return Time(0.0, 0.0, "latency", 0)
    cold, channels_last, kernels = 1.0 - warm_frac, bool(dims.get("nhwc", 0)), 1
    read, written = min(inputs, outputs * window) * size, outputs * size
    if call.phase == "bwd":
        read, written = outputs * size, inputs * size
    if call.phase == "bwd" and call.kind in ("max_pool2d", "pool"):
        image = float(dims["h"] * dims["w"]) if "h" in dims else 256.0
        busy_s, kernels = _back_s(chip, coef, inputs, image, size, channels_last, cold), 2
    elif call.kind in ("upsample2x", "resize") or call.phase == "bwd":
        linear = not dims.get("nearest", 1)
        busy_s = _resize_s(chip, coef, max(inputs, outputs), size, linear, cold)
    else:
        busy_s = _window_s(chip, coef, outputs, window, call, channels_last, pixels, cold)
    floor_s = memory_floor_s(chip, read, written, warm_frac)
    return timed(busy_s, floor_s, "compute" if issue_s(chip, outputs) * 50.0 > floor_s else "memory", kernels)


def _spread(dims: dict[str, int]) -> tuple[float, float, float, float]:
    images, pixels = float(dims["n"] * dims["c"]), float(dims["h"] * dims["w"])
    return images * pixels, images, pixels, 1.0
