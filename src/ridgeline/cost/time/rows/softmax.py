"""Time of softmax, log-softmax, cross-entropy and NLL loss as ATen's kernels and Inductor's fused ones run them."""

from __future__ import annotations

from math import ceil, log2

from ridgeline.cost.call import ITEMSIZE, Call, Coef, Time, family, memory_floor_s
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.time.rows.rowwise import (
    Kernel,
    dimensions,
    issue_seconds,
    kernel,
    left_over,
    reread_bytes,
    reread_frac,
    resident_blocks,
    rounds,
    spilled,
    stream_s,
    triton_coef,
    triton_rows,
)
from ridgeline.cost.time.stream import elementwise as stream
from ridgeline.errors import CostError

WARP_MAX_FORWARD = 2048
WARP_MAX_BACKWARD = 1024
SMEM_BYTES = 48 * 1024 - 128
VECTOR_BYTES = 16

DEFAULTS: dict[str, float] = {
    # --- shared by every kernel ---
    "launch_cycles": 1600.0,  # an empty kernel as a profiler sees it
    "dram_frac": 0.951,  # of the datasheet bandwidth a long stream reaches
    "l2_frac": 0.84,  # of the L2 bandwidth
    "evict_frac": 0.233,  # dirty share of a cold L2 that a stream must write back
    "evict_ramp_frac": 0.381,  # stream length, in L2 capacities, at which half of that is paid
    "reread_frac": 1.24,  # of the L2 the rows in flight may fill and still be found there by the next pass
    "left_frac": 0.753,  # of the L2 the tensors of one kernel may fill and still be found there by the next kernel
    "tail_frac": 1.0,  # share of the last partial wave of blocks that is waited for
    "miss_cycles": 800.0,  # a load that goes to DRAM instead of L2
    # Of each kernel: .first cycles once, .block cycles of latency a block, .step more per iteration (.miss when its
    # loads go to DRAM), .base and .issue SM cycles of issue slots a block and an iteration, .power of the overlap.
    # --- softmax_warp_forward: rows of at most 2048 in the registers of one warp ---
    "warp.first": 449.0,
    "warp.step": 80.6,  # latency per element a lane has room for
    "warp.half": 113.0,  # … more per 16-bit element it holds
    "warp.div": 88.7,  # … more for the division that log-softmax spares
    "warp.base": 155.0,
    "warp.issue": 1.11,
    "warp.issue_half": 14.6,
    "warp.power": 1.65,
    # --- softmax_warp_backward ---
    "warpb.first": 503.0,
    "warpb.step": 18.2,
    "warpb.half": 72.4,
    "warpb.log": 133.0,  # the exponential of log-softmax
    "warpb.base": 71.0,
    "warpb.issue_half": 7.12,
    "warpb.power": 1.44,
    # --- cunn_SoftMaxForwardReg: rows of at most 9216 in the registers of a block, one block an SM ---
    "reg.first": 291.0,
    "reg.block": 298.0,
    "reg.step": 610.0,
    "reg.half": 33.1,
    "reg.div": 102.0,
    "reg.burst": 0.627,  # share of the memory time that the one block of an SM does not hide behind its arithmetic
    # --- cunn_SoftMaxForwardSmem ---
    "smem.first": 44.1,
    "smem.block": 3320.0,
    "smem.step": 1520.0,
    "smem.issue": 261.0,
    "smem.power": 1.47,
    # --- cunn_SoftMaxForward: three passes over global memory ---
    "plain.first": 1880.0,
    "plain.step": 1630.0,  # latency of one vectorized iteration, all passes
    "plain.tail": 87.3,  # … of one scalar iteration at the end of the row
    "plain.miss": 515.0,
    "plain.div": 65.2,
    "plain.issue": 39.7,
    "plain.issue_half": 79.7,
    "plain.issue_tail": 965.0,
    "plain.issue_div": 178.0,
    "plain.power": 1.69,
    # --- cunn_SoftMaxBackwardSmem ---
    "smemb.first": 1060.0,
    "smemb.step": 920.0,
    "smemb.miss": 966.0,
    "smemb.issue": 152.0,
    "smemb.power": 2.49,
    # --- cunn_SoftMaxBackward ---
    "plainb.first": 2280.0,
    "plainb.step": 860.0,
    "plainb.tail": 834.0,
    "plainb.miss": 721.0,
    "plainb.log": 223.0,
    "plainb.issue": 85.7,
    "plainb.issue_tail": 37.9,
    "plainb.power": 1.51,
    # --- one block of nll_loss over all rows ---
    "nll.first": 736.0,
    "nll.step": 989.0,  # a dependent pair of loads, target then log-probability
    "nll.miss": 470.0,  # … more when the target comes from DRAM
    "nll.far": 624.0,  # … more when the log-probabilities have left the L2
    "nllb.first": 580.0,
    "nllb.step": 458.0,
    "nllb.miss": 496.0,
    "nllb.far": 31.0,
    # --- elementwise helpers ---
    "mul.first": 394.0,
    "fill.dram_frac": 0.948,  # of the datasheet bandwidth a fill reaches
    "fill.half_frac": 0.75,  # of that, when filling 16-bit elements
    **triton_coef(946, 248, 424, 1240, 215, 499, 205, 8.0, 519),
    "triton.online": 3.81,  # arithmetic of the online maximum and sum of a looped softmax, over a plain sum
}


def _rows(call: Call) -> tuple[int, int, float]:
    width = "v" if call.kind in ("cross_entropy", "nll_loss") else "c"
    dims = dimensions(call, "n", width)
    return dims["n"], dims[width], ITEMSIZE[call.dtype]


def _pow2(width: int) -> int:
    return 1 << max(0, ceil(log2(width)))


def _warp_shape(rows: int, width: int) -> tuple[int, int, int]:
    """(blocks, elements a lane has room for, elements it holds) of the kernels that give a row to a warp or less."""
    padded = _pow2(width)
    lanes, batch = min(padded, 32), 2 if padded <= 128 else 1
    return ceil(rows / (128 // lanes * batch)), padded // lanes * batch, ceil(width / lanes) * batch


def _first(key: str, coef: Coef, warm: float) -> float:
    """Cycles paid once: the pipeline fills, and the first loads come from DRAM unless warm."""
    return coef[key + ".first"] + coef["miss_cycles"] * (1.0 - warm)


def _warp_forward(rows: int, width: int, size: float, is_log: bool, chip: Chip, coef: Coef, warm: float) -> Kernel:
    blocks, held, used = _warp_shape(rows, width)
    half, div = size < 4, not is_log
    touch = half * coef["warp.half"] + div * coef["warp.div"]
    issue = coef["warp.base"] + held * coef["warp.issue"] + used * half * coef["warp.issue_half"]
    moved = rows * width * size
    waves = rounds(blocks, chip.num_sms * resident_blocks(128, 24 + 1.2 * held), coef["tail_frac"])
    return kernel(
        "softmax_warp_forward", chip, coef, coef["warp.power"], _first("warp", coef, warm),
        waves, held * coef["warp.step"] + used * touch, issue_seconds(chip, blocks, issue),
        stream_s(chip, coef, moved, moved, warm),
    )  # fmt: skip


def _warp_backward(rows: int, width: int, size: float, is_log: bool, chip: Chip, coef: Coef, warm: float) -> Kernel:
    blocks, held, used = _warp_shape(rows, width)
    half = size < 4
    touch = half * coef["warpb.half"] + is_log * coef["warpb.log"]
    moved = rows * width * size
    waves = rounds(blocks, chip.num_sms * resident_blocks(128, 24 + 2.2 * held), coef["tail_frac"])
    return kernel(
        "softmax_warp_backward", chip, coef, coef["warpb.power"], _first("warpb", coef, warm),
        waves, held * coef["warpb.step"] + used * touch,
        issue_seconds(chip, blocks, coef["warpb.base"] + used * half * coef["warpb.issue_half"]),
        stream_s(chip, coef, 2 * moved, moved, warm),
    )  # fmt: skip


def _shared_forward(rows: int, width: int, size: float, is_log: bool, chip: Chip, coef: Coef, warm: float) -> Kernel:
    steps = ceil(width * size / VECTOR_BYTES / 1024)
    moved = rows * width * size
    return kernel(
        "cunn_SoftMaxForwardSmem", chip, coef, coef["smem.power"], _first("smem", coef, warm),
        rounds(rows, chip.num_sms * 2, coef["tail_frac"]), coef["smem.block"] + steps * coef["smem.step"],
        issue_seconds(chip, rows, width / 1024 * coef["smem.issue"]), stream_s(chip, coef, moved, moved, warm),
    )  # fmt: skip


def _plain_forward(rows: int, width: int, size: float, is_log: bool, chip: Chip, coef: Coef, warm: float) -> Kernel:
    lanes = int(VECTOR_BYTES / size) * 1024
    steps, tail = width // lanes, ceil(width % lanes / 1024)
    div = (not is_log) * coef["plain.div"]
    issue = coef["plain.issue"] + (size < 4) * coef["plain.issue_half"] + (not is_log) * coef["plain.issue_div"]
    moved = rows * width * size
    read = moved + 2 * reread_bytes(rows, width * size, 2, 2, chip, coef)
    chain = steps * (coef["plain.step"] + div) + tail * coef["plain.tail"]
    chain += coef["plain.miss"] * (steps + tail) * (1.0 - warm)
    chain += coef["plain.miss"] * 2 * (steps + tail) * reread_frac(rows, width * size, 2, 2, chip, coef)
    return kernel(
        "cunn_SoftMaxForward", chip, coef, coef["plain.power"], _first("plain", coef, warm),
        rounds(rows, chip.num_sms * 2, coef["tail_frac"]), chain,
        issue_seconds(chip, rows, width / 1024 * issue + tail * coef["plain.issue_tail"]),
        stream_s(chip, coef, read, moved, warm),
    )  # fmt: skip


def _backward_threads(width: int, vector: int) -> int:
    limit = min(width // vector, 1024)
    threads = 1
    while threads < limit / 2:
        threads *= 2
    return max(32, threads)


def _shared_backward(rows: int, width: int, size: float, is_log: bool, chip: Chip, coef: Coef, warm: float) -> Kernel:
    vector = int(VECTOR_BYTES / size)
    threads = _backward_threads(width, vector)
    steps = ceil(width / vector / threads)
    resident = max(1, min(resident_blocks(threads, 40), int(chip.smem_bytes / (width * size + 128))))
    moved = rows * width * size
    return kernel(
        "cunn_SoftMaxBackwardSmem", chip, coef, coef["smemb.power"], _first("smemb", coef, warm),
        rounds(rows, chip.num_sms * resident, coef["tail_frac"]),
        steps * (coef["smemb.step"] + coef["smemb.miss"] * (1.0 - warm)),
        issue_seconds(chip, rows, width / 1024 * coef["smemb.issue"]), stream_s(chip, coef, 2 * moved, moved, warm),
    )  # fmt: skip


def _plain_backward(rows: int, width: int, size: float, is_log: bool, chip: Chip, coef: Coef, warm: float) -> Kernel:
    vector = int(VECTOR_BYTES / size)
    threads = _backward_threads(width, vector)
    steps, tail = width // (vector * threads), ceil(width % (vector * threads) / threads)
    resident = resident_blocks(threads, 40)
    issue = coef["plainb.issue"]
    moved = rows * width * size
    read = 2 * moved + reread_bytes(rows, width * size, resident, 3, chip, coef)
    step = coef["plainb.step"] + is_log * coef["plainb.log"]
    chain = steps * step + tail * coef["plainb.tail"]
    chain += coef["plainb.miss"] * (steps + tail) * (1.0 - warm)
    return kernel(
        "cunn_SoftMaxBackward", chip, coef, coef["plainb.power"], _first("plainb", coef, warm),
        rounds(rows, chip.num_sms * resident, coef["tail_frac"]), chain,
        issue_seconds(chip, rows, width / 1024 * issue + tail * threads / 1024 * coef["plainb.issue_tail"]),
        stream_s(chip, coef, read, moved, warm),
    )  # fmt: skip


def _forward(rows: int, width: int, size: float, is_log: bool, chip: Chip, coef: Coef, warm: float) -> Kernel:
    if width <= WARP_MAX_FORWARD and width * size <= 4 * WARP_MAX_FORWARD:
        return _warp_forward(rows, width, size, is_log, chip, coef, warm)
    if width <= (9 * 1024):  # register max
        step = coef["reg.step"] + (size < 4) * coef["reg.half"] + (not is_log) * coef["reg.div"]
        moved = rows * width * size
        return kernel(
            "cunn_SoftMaxForwardReg", chip, coef, 1.0, _first("reg", coef, warm),
            rounds(rows, chip.num_sms, coef["tail_frac"]), coef["reg.block"] + width / 1024 * step, 0.0,
            coef["reg.burst"] * stream_s(chip, coef, moved, moved, warm),
        )  # fmt: skip
    aligned = width * size % VECTOR_BYTES == 0
    choice = _shared_forward if aligned and width * size < SMEM_BYTES else _plain_forward
    return choice(rows, width, size, is_log, chip, coef, warm)


def _backward(rows: int, width: int, size: float, is_log: bool, chip: Chip, coef: Coef, warm: float) -> Kernel:
    if width <= WARP_MAX_BACKWARD and width * size <= 4 * WARP_MAX_BACKWARD:
        return _warp_backward(rows, width, size, is_log, chip, coef, warm)
    aligned = width * size % VECTOR_BYTES == 0
    choice = _shared_backward if aligned and width * size < SMEM_BYTES else _plain_backward
    return choice(rows, width, size, is_log, chip, coef, warm)


def _fill(moved: float, size: float, chip: Chip, coef: Coef) -> Kernel:
    frac = coef["fill.dram_frac"] * (coef["fill.half_frac"] if size < 4 else 1.0)
    return kernel("fill", chip, coef, 1.0, 0.0, 0.0, 0.0, 0.0, moved / (chip.dram_bytes_per_s * frac))


def _nll_threads(rows: int) -> int:
    return int(min(1024, max(32, 2 ** round(log2(max(1.0, rows / 16))))))


def _nll_forward(rows: int, width: int, size: float, chip: Chip, coef: Coef, warm: float) -> Kernel:
    steps = ceil(rows / _nll_threads(rows))
    far = spilled(rows * width * size, coef["left_frac"] * chip.l2_bytes)
    chain = steps * (coef["nll.step"] + coef["nll.miss"] * (1.0 - warm) + far * coef["nll.far"])
    return kernel("nll_loss_forward", chip, coef, 1.0, coef["nll.first"], 1.0, chain, 0.0, 0.0)


def kernels(call: Call, chip: Chip, coef: Coef, warm_frac: float) -> list[Kernel]:
    """The kernels the library launches for this call, in order, each with its time."""
    rows, width, size = _rows(call)
    if rows <= 0 or width <= 0:
        return []
    moved = rows * width * size
    if call.library == "inductor" and call.kind in ("softmax", "log_softmax"):
        forward = call.phase == "fwd"
        weight = coef["triton.online"] if forward else 1.0
        return triton_rows(rows, width, size, 1 if forward else 2, chip, coef, warm_frac, weight)
    is_log = call.kind != "softmax"
    if call.phase == "fwd":
        made = [] if call.kind == "nll_loss" else [_forward(rows, width, size, is_log, chip, coef, warm_frac)]
        if call.kind in ("cross_entropy", "nll_loss"):
            made.append(_nll_forward(rows, width, size, chip, coef, warm_frac))
        return made
    if call.kind == "softmax":
        first = _first("mul", coef, warm_frac)
        mul = kernel("mul", chip, coef, 1.0, first, 0.0, 0.0, 0.0, stream_s(chip, coef, 2 * moved, moved, warm_frac))
        return [mul, _backward(rows, width, size, False, chip, coef, max(warm_frac, left_over(3 * moved, chip, coef)))]
    if call.kind == "log_softmax":
        return [_backward(rows, width, size, True, chip, coef, warm_frac)]
    steps = ceil(rows / _nll_threads(rows))
    far = spilled(rows * width * size, coef["left_frac"] * chip.l2_bytes)
    chain = steps * (coef["nllb.step"] + coef["nllb.miss"] * (1.0 - warm_frac) + far * coef["nllb.far"])
    nll_backward = kernel("nll_loss_backward", chip, coef, 1.0, coef["nllb.first"], 1.0, chain, 0.0, 0.0)
    made = [_fill(moved, size, chip, coef), nll_backward]
    if call.kind == "cross_entropy":
        made.append(_backward(rows, width, size, True, chip, coef, max(warm_frac, 0.5 * left_over(moved, chip, coef))))
    return made


def _compulsory_bytes(call: Call) -> tuple[float, float]:
    """(read, written) that no implementation avoids."""
    rows, width, size = _rows(call)
    moved = rows * width * size
    if call.kind == "nll_loss":
        return (rows * (8 + size), size) if call.phase == "fwd" else (rows * 8.0, moved)
    if call.kind == "cross_entropy":
        return (moved, 0.0) if call.phase == "fwd" else (moved, moved)
    return (moved, moved) if call.phase == "fwd" else (2 * moved, moved)


def _compiled_loss(call: Call, chip: Chip, warm_frac: float) -> Time:
    """One fused pass over the logits (two when the gradient is written), then the mean over rows: never recorded, so
    priced as any fused kernel that moves these bytes."""
    n, v = call.dims()["n"], call.dims()["v"]
    size = ITEMSIZE[call.dtype]
    read, written = n * v * size, n * v * size if call.phase == "bwd" else n * 8.0
    # Instructions an element takes in a fused loss: maximum, exponential and sum, kept online
    one_pass = stream.Sweep(n * v, read, written, 1, 16.0, size, "fused")
    rows = stream.Sweep(n, n * 8.0, 8.0, 1, 1.0, 4.0, "fused")
    busy_s = stream.sweep_s(chip, stream.DEFAULTS, one_pass, warm_frac)
    if call.phase == "fwd":
        busy_s += stream.sweep_s(chip, stream.DEFAULTS, rows, 1.0)
    floor_s = memory_floor_s(chip, read, written, warm_frac)
    return Time(max(floor_s, busy_s), floor_s, "memory", 2 if call.phase == "fwd" else 1)


@family("softmax", "softmax log_softmax cross_entropy nll_loss", DEFAULTS)
def model(call: Call, chip: Chip, coef: Coef, warm_frac: float) -> Time:
    """Row-wise softmax and the losses made of it."""
    if call.phase not in ("fwd", "bwd"):
        raise CostError(f"{call.kind} has phases fwd and bwd, not {call.phase!r}")
    if call.kind == "cross_entropy" and call.library == "inductor":
        return _compiled_loss(call, chip, warm_frac)
    made = kernels(call, chip, coef, warm_frac)
    if not made:
        return Time(0.0, 0.0, "latency", 0)
    read, written = _compulsory_bytes(call)
    floor_s = memory_floor_s(chip, read, written, warm_frac)
    return Time(max(floor_s, sum(k[1] for k in made)), floor_s, max(made, key=lambda k: k[1])[2], len(made))
