"""Time of pointwise operators and copies: bytes that stream past the SMs, instructions spent on each element.

Every kernel here is one pass over memory. Its time is the start-up of a grid, the ramp of the memory system, and
then the slower of moving the bytes and issuing the instructions, blended because blocks overlap the two.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ridgeline.cost.call import ITEMSIZE, Call, Coef, Time, family, memory_floor_s
from ridgeline.cost.time.chip import Chip
from ridgeline.errors import CostError, nearest

DEFAULTS: Coef = {
    "read_frac": 0.896,  # share of datasheet DRAM bandwidth that reads reach
    "write_frac": 0.952,  # the same for writes
    "l2_frac": 0.892,  # share of the L2 bandwidth that reads and writes of resident bytes reach
    "start_cycles": 2150.0,  # launch of the grid to its last block's exit, nothing to do
    "miss_cycles": 925.0,  # added when the first loads come from DRAM
    "ramp_cycles": 6460.0,  # lost while DRAM reaches its steady rate, in full for a long kernel
    "ramp_bytes": 83300000.0,  # traffic at which half of the ramp has been lost
    "overlap": 8.65,  # exponent of the blend of memory and instruction time: infinity is a perfect overlap
    "paced_overlap": 2.63,  # the same exponent for a fixed grid whose threads load, compute and store in turn
    "paced_cycles": 17.2,  # latency of one instruction of such a thread, up to its first store
    "vector_instr": 20.2,  # instructions per element around the arithmetic: vectorized kernel
    "chain_cycles": 4.38,  # latency of one dependent instruction of the arithmetic
    "strided_instr": 37.2,  # instructions per element of the index-computing kernel
    "strided_thread_instr": 69.7,  # instructions per thread of it, shared by its 4 (16-bit) or 2 elements
    "index_instr": 4.16,  # instructions per element, dimension and operand to turn an index into an offset
    "strided_start_cycles": 417.0,  # longer start of the index-computing kernel
    "narrow_start_cycles": 1100.0,  # longer still when a thread takes four narrow elements one by one
    "index_chain_cycles": 35.4,  # latency of one offset computation, four elements of a thread in turn
    "cast_start_cycles": 3090.0,  # longer start of the kernel that converts types as it loads
    "cast_instr": 89.4,  # its instructions per element
    "transposed_instr": 228.0,  # instruction slots an element takes whose warp touches 32 sectors
    "granule_bytes": 64.0,  # DRAM access unit, fetched whole for an element when reuse misses the L2
    "copy_start_cycles": 1970.0,  # the driver's copy kernel: start
    "copy_large_bytes": 1048576.0,  # from this size on the driver uses its bulk kernel
    "copy_large_start_cycles": 7560.0,  # whose start is longer
    "copy_frac": 0.902,  # its share of the DRAM bandwidth
    "store_start_cycles": 1660.0,  # start of a kernel that only writes
    "fill_frac": 0.993,  # its share of the DRAM bandwidth
    "fill_instr": 19.8,  # instructions per element of a fill
    "dropout_instr": 29.1,  # random-number instructions per element
    "dropout_thread_instr": 151.0,  # and per thread, shared by the vector width
    "cat_instr": 17.2,  # instructions per element, concatenation of 16-byte aligned rows
    "cat_element_instr": 51.5,  # and of unaligned rows, written element by element
    "cat_seam_instr": 112.0,  # added per byte when rows end inside a sector that leaves the L2 half-written
    "cat_seam_bytes": 63.6,  # row length at which half of it is saved
    "fused_frac": 0.916,  # a fused Triton kernel: share of the DRAM bandwidth
    "fused_alu": 1.26,  # its arithmetic instructions over those of the library's kernel
    "fused_ragged": 1.51,  # more instructions when an odd number of elements forbids vectors
    "fused_start_cycles": 2370.0,  # its start
}

ALU: dict[str, float] = {}
"""Scalar instructions per element of an aten function, beyond loading and storing it."""


def _cost(instructions: float, names: str) -> None:
    ALU.update(dict.fromkeys(names.split(), instructions))


# fmt: off
_cost(0.0, """fill zero zeros ones full zeros_like ones_like full_like empty copy clone contiguous alias
    view_as_real_copy real_if_close""")
_cost(1.0, """add sub rsub mul neg abs relu threshold clamp clip clamp_min clamp_max maximum minimum max min fmax fmin
    eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor
    and or xor lshift rshift ilshift irshift ixor iand ior bitwise_left_shift bitwise_right_shift lerp square
    addcmul hardtanh relu6 leaky_relu prelu prelu_kernel hardshrink softshrink positive sign sgn signbit
    copysign heaviside isnan isinf isfinite isposinf isneginf real imag conj conj_physical neg_view_copy complex
    pow2 deg2rad rad2deg masked_scale native_dropout_backward dropout_backward arange masked_fill index_fill
    where masked_scatter tril triu fill_mask threshold_backward relu_backward dropout_mask""")
_cost(2.0, """cast to to_copy convert floor ceil round trunc frac rsqrt reciprocal exp exp2 sqrt hardsigmoid hardswish
    nan_to_num mse_loss l1_loss smooth_l1_loss huber_loss nextafter ldexp frexp renorm cross rrelu_with_noise
    amp_update_scale""")
_cost(10.0, """div true_divide addcdiv log log2 log10 log1p expm1 sigmoid tanh_backward sigmoid_backward glu softsign
    logsigmoid log_sigmoid log_sigmoid_forward softplus elu selu celu logit special_xlog1py special_entr angle
    quantize""")
_cost(12.0, """silu tanh sinh cosh swish swiglu logaddexp logaddexp2 binary_cross_entropy_with_logits xlogy glu_jvp
    bucketize searchsorted isin""")
_cost(15.0, "gelu_tanh gelu_new gelu_quick quick_gelu mish fmod remainder floor_divide hypot fused_rms_norm_rope")
_cost(19.0, """cos sin tan asin acos atan atan2 asinh acosh atanh sinc arccos arcsin arctan arccosh arcsinh
    arctanh arctan2""")
_cost(21.0, """gelu erf erfc ndtr binary_cross_entropy special_log_ndtr special_erfcx i0
    special_i0e special_i1 special_i1e""")
_cost(23.0, "silu_backward mish_backward gelu_tanh_backward glu_backward")
_cost(36.0, """gelu_backward erfinv pow float_power lgamma digamma polar normal randn rand uniform bernoulli random
    exponential native_dropout fused_dropout dropout gcd lcm special_ndtri""")
_cost(120.0, "igamma igammac polygamma mvlgamma special_zeta special_airy_ai")
# fmt: on
_SERIES = tuple(
    f"special_{name}"
    for name in "bessel modified_bessel scaled_modified_bessel spherical_bessel chebyshev shifted_chebyshev hermite "
    "laguerre legendre".split()
)


@lru_cache(maxsize=1024)
def alu_of(fn: str) -> float:
    """Scalar instructions per element of the function ``fn`` (``aten.gelu.default`` and ``gelu_`` are ``gelu``)."""
    name = fn.removeprefix("aten.").removeprefix("aten::").split(".")[0].strip("_")
    if name in ALU:
        return ALU[name]
    base = name.removesuffix("_backward")
    if base != name and base in ALU:
        return ALU[base] + 2.0  # a gradient multiplies by what the function's derivative needs as well
    if name.startswith(_SERIES):
        return 60.0
    hint = nearest(name, ALU)
    raise CostError(f"no instruction count for pointwise function {fn!r}{hint}: add one in cost/stream.py")


class Sweep(NamedTuple):
    """One kernel's pass over memory: what it reads and writes, and how each element is handled."""

    numel: float
    read_bytes: float
    written_bytes: float
    num_inputs: float = 1.0
    alu: float = 1.0
    itemsize: float = 2.0
    path: str = "vector"  # vector, strided, transposed, cast, fused, copy; plain and paced: alu says it all
    dims: float = 2.0
    rows: float = 32.0  # transposed: neighbors in the output, a row apart in the input
    row_bytes: float = 0.0  # transposed: that distance


def memory_s(
    chip: Chip, coef: Coef, read_bytes: float, written_bytes: float, warm_frac: float, frac: float = 0.0
) -> float:
    """Steady and ramping time of the traffic: cold bytes at DRAM speed, all of them through the L2."""
    cold = 1.0 - warm_frac
    read_frac, write_frac = (frac, frac) if frac else (coef["read_frac"], coef["write_frac"])
    dram_s = (read_bytes / read_frac + written_bytes / write_frac) * cold / chip.dram_bytes_per_s
    l2_s = (read_bytes + written_bytes) / (coef["l2_frac"] * chip.l2_bytes_per_s)
    return dram_s if dram_s > l2_s else l2_s


def ramp_s(chip: Chip, coef: Coef, moved_bytes: float, warm_frac: float) -> float:
    """What the memory system loses until its steady rate, and the first miss."""
    cold_bytes = moved_bytes * (1.0 - warm_frac)
    cycles = coef["miss_cycles"] * (1.0 - warm_frac) + coef["ramp_cycles"] * cold_bytes / (
        cold_bytes + coef["ramp_bytes"]
    )
    return cycles / chip.clock_hz


def blend(power: float, a_s: float, b_s: float) -> float:
    """The slower of two overlapping times, with a rounded corner."""
    high, low = (a_s, b_s) if a_s > b_s else (b_s, a_s)
    if high <= 0.0:
        return 0.0
    blended: float = high * (1.0 + (low / high) ** power) ** (1.0 / power)
    return blended


_SPLIT_PIPES = frozenset(("volta", "turing", "ampere"))
"""Four warps a clock on 64 floating-point and 64 integer lanes: the peak in FLOP/s tells half of the issue rate."""


def issue_s(chip: Chip, instructions: float) -> float:
    """Time to issue scalar instructions on every lane of the chip."""
    per_s = chip.vector_flops_per_s / 2.0
    return instructions / (2.0 * per_s if chip.arch in _SPLIT_PIPES else per_s)


def _strided_instructions(coef: Coef, sweep: Sweep) -> float:
    per_thread = 4.0 if sweep.itemsize <= 2.0 else 2.0
    offsets = sweep.dims * (sweep.num_inputs + 1.0)
    return coef["strided_instr"] + coef["strided_thread_instr"] / per_thread + coef["index_instr"] * offsets + sweep.alu


def _instructions(coef: Coef, sweep: Sweep) -> float:
    path = sweep.path
    if path == "vector":
        return coef["vector_instr"] + sweep.alu
    if path == "strided":
        return _strided_instructions(coef, sweep)
    if path == "transposed":
        # Cache lines that a warp of a transposed pass touches, of the 32 it can
        lines_frac = min(1.0, sweep.rows / 32.0, sweep.row_bytes / 128.0 if sweep.row_bytes > 0.0 else 1.0)
        return max(_strided_instructions(coef, sweep), coef["transposed_instr"] * lines_frac)
    if path == "cast":
        return coef["cast_instr"] + sweep.alu
    if path == "fused":
        ragged = coef["fused_ragged"] if sweep.numel % 2 else 1.0
        return ragged * (coef["vector_instr"] + coef["fused_alu"] * sweep.alu)
    return sweep.alu


def _start_cycles(coef: Coef, sweep: Sweep, warm_frac: float) -> float:
    path = sweep.path
    if path == "copy":
        large = sweep.read_bytes >= coef["copy_large_bytes"]
        return coef["copy_large_start_cycles" if large else "copy_start_cycles"]
    if path == "fused":
        return coef["fused_start_cycles"]
    start = coef["start_cycles"] if sweep.read_bytes > 0.0 else coef["store_start_cycles"]
    if path == "paced":
        return start + coef["paced_cycles"] * sweep.alu
    if path == "plain":
        return start
    if path == "vector":
        return start + coef["chain_cycles"] * sweep.alu * (8.0 if sweep.itemsize <= 2.0 else 16.0 / sweep.itemsize)
    if path == "cast":
        return start + coef["cast_start_cycles"] * (1.0 - 0.5 * warm_frac)
    narrow = (
        coef["narrow_start_cycles"] * (1.0 - 0.5 * warm_frac) if sweep.itemsize <= 2.0 and path == "strided" else 0.0
    )
    per_thread = 4.0 if sweep.itemsize <= 2.0 else 2.0
    chain = coef["index_chain_cycles"] * per_thread * sweep.dims * (sweep.num_inputs + 1.0)
    return start + narrow + (coef["strided_start_cycles"] + chain) * (1.0 - 0.5 * warm_frac)


def _refetched_bytes(chip: Chip, coef: Coef, sweep: Sweep) -> float:
    """Extra DRAM reads of a transposed pass whose lines leave the L2 before their neighbors are wanted."""
    if sweep.path != "transposed" or sweep.row_bytes <= 0.0:
        return 0.0
    span_bytes = sweep.rows * min(128.0, sweep.row_bytes)
    missed = min(1.0, max(0.0, 2.0 * span_bytes / chip.l2_bytes - 1.0))
    return missed * max(0.0, sweep.numel * min(coef["granule_bytes"], sweep.row_bytes) - sweep.read_bytes)


_FRAC = {"copy": "copy_frac", "fused": "fused_frac"}


def sweep_s(chip: Chip, coef: Coef, sweep: Sweep, warm_frac: float) -> float:
    """Duration of one kernel that passes once over memory."""
    return _swept(chip, coef, sweep, warm_frac)[0]


def _swept(chip: Chip, coef: Coef, sweep: Sweep, warm_frac: float) -> tuple[float, float, float]:
    """How long a pass takes, and what issuing its instructions and moving its bytes take by themselves."""
    path, read, written = sweep.path, sweep.read_bytes, sweep.written_bytes
    streamed = memory = memory_s(chip, coef, read, written, warm_frac)
    if sweep.numel <= 0.0:
        return 0.0, 0.0, streamed
    if path in _FRAC or path == "transposed" or read <= 0.0:
        frac = coef[_FRAC[path]] if path in _FRAC else 0.0 if read > 0.0 else coef["fill_frac"]
        memory = memory_s(chip, coef, read + _refetched_bytes(chip, coef, sweep), written, warm_frac, frac)
    issue = issue_s(chip, sweep.numel * _instructions(coef, sweep))
    start = _start_cycles(coef, sweep, warm_frac) / chip.clock_hz
    ramp = ramp_s(chip, coef, read + written, warm_frac) if read > 0.0 else 0.0
    return start + ramp + blend(coef["paced_overlap" if path == "paced" else "overlap"], memory, issue), issue, streamed


def resident_frac(chip: Chip, live_bytes: float) -> float:
    """Share of freshly touched bytes that a following kernel still finds in the L2."""
    return min(1.0, max(0.0, 2.0 - 2.0 * live_bytes / chip.l2_bytes))


_UNARY = frozenset("gelu silu relu exp tanh sigmoid neg rsqrt cos pow2 gelu_tanh clamp bitwise_not".split())
_BINARY = frozenset("add mul div add_".split())


def _heads(dims: dict[str, int]) -> float:
    return float(dims["b"] * dims["s"] * dims["h"] * dims["d"])


def _kept_dims(*sizes: int) -> float:
    return float(max(1, sum(size > 1 for size in sizes)))


def _generic(call: Call, dims: dict[str, int], size: float) -> Sweep:
    path = "vector" if dims["vector"] else "cast" if dims.get("cast") else "strided"
    if dims.get("transposed"):
        path = "transposed"
    if call.library == "inductor":
        path = "fused"
    return Sweep(dims["numel"], dims["read_bytes"], dims["written_bytes"], dims["num_inputs"], dims["alu"], size, path,
                 dims.get("dims", 3), dims.get("rows", 32), dims.get("row_bytes", 0))  # fmt: skip


def _elementwise(call: Call, numel: float, size: float) -> Sweep | None:
    """Contiguous operands of one shape."""
    kind, moved = call.kind, numel * size
    if kind in _UNARY and call.phase == "fwd":
        return Sweep(numel, moved, moved, 1, ALU[kind], size)
    if kind in _UNARY:
        return Sweep(numel, 2 * moved, moved, 2, ALU.get(f"{kind}_backward", ALU[kind] + 2), size)
    if kind in _BINARY:
        return Sweep(numel, 2 * moved, moved, 2, ALU[kind.rstrip("_")], size)
    if kind == "where":
        return Sweep(numel, 2 * moved + numel, moved, 3, ALU["where"], size)
    if kind == "dropout" and call.phase == "bwd":
        return Sweep(numel, moved + numel, moved, 2, ALU["dropout_backward"], size)
    return None


def _rearranged(call: Call, dims: dict[str, int], numel: float, size: float) -> Sweep | None:
    """Broadcast, permuted or transposed operands."""
    kind, moved = call.kind, numel * size
    if kind in ("add_row", "mul_col"):
        n, c = dims["n"], dims["c"]
        contiguous = n == 1 if kind == "add_row" else c == 1
        return Sweep(
            numel,
            moved + (c if kind == "add_row" else n) * size,
            moved,
            2,
            1,
            size,
            "vector" if contiguous else "strided",
        )
    if kind == "transpose":
        path = "copy" if 1 in (dims["n"], dims["c"]) else "transposed"
        return Sweep(numel, moved, moved, 1, 0, size, path, 2, dims["n"], dims["c"] * size)
    if kind in ("permute0213", "add_strided"):
        inputs = 2 if kind == "add_strided" else 1
        whole = dims["s"] == 1 or dims["h"] == 1
        path = ("copy" if inputs == 1 else "vector") if whole else "strided"
        kept = _kept_dims(dims["b"], dims["s"], dims["h"], dims["d"])
        return Sweep(numel, inputs * moved, moved, inputs, inputs - 1, size, path, kept)
    return None


def _cat(coef: Coef, chip: Chip, dims: dict[str, int], size: float) -> Sweep:
    numel = float(dims["n"] * (dims["c"] + dims["c2"]))
    aligned = dims["c"] * size % 16 == 0 and dims["c2"] * size % 16 == 0
    alu = coef["cat_instr" if aligned else "cat_element_instr"]
    if dims["n"] > 1 and (dims["c"] * size % 32 or dims["c2"] * size % 32):
        row_bytes = (dims["c"] + dims["c2"]) * size / 2.0
        evicted = 1.0 - resident_frac(chip, 2.0 * numel * size)
        alu += coef["cat_seam_instr"] * size * evicted / (1.0 + row_bytes / coef["cat_seam_bytes"])
    return Sweep(numel, numel * size, numel * size, 2, alu, size, "paced")


def _special(call: Call, dims: dict[str, int], numel: float, size: float, coef: Coef) -> list[Sweep] | None:
    kind, moved = call.kind, numel * size
    if kind == "copy":
        return [Sweep(numel, moved, moved, 1, 0, size, "copy")]
    if kind == "fill":
        return [Sweep(numel, 0.0, moved, 0, coef["fill_instr"], size, "plain")]
    if kind == "random":
        alu = coef["dropout_instr"] + coef["dropout_thread_instr"] / 4.0
        return [Sweep(numel, 0.0, moved, 0, alu, size, "paced")]
    if kind == "masked_fill":
        return [Sweep(numel, moved, moved, 1, 0, size, "copy"), Sweep(numel, moved + numel, moved, 2, 1, size)]
    if kind == "dropout":
        width = 8.0 if size <= 2.0 else 4.0
        while width > 1.0 and numel % width:
            width /= 2.0
        alu = coef["dropout_instr"] + coef["dropout_thread_instr"] / (width if width > 1.0 else 4.0)
        return [Sweep(numel, moved, moved + numel, 1, alu, size, "paced")]
    if kind == "cast":
        wide = 2.0 if call.dtype == "fp32" else 4.0
        return [Sweep(numel, moved, numel * wide, 1, ALU["cast"], size, "vector" if call.dtype == "fp32" else "cast")]
    return None


def sweeps(call: Call, chip: Chip, coef: Coef) -> list[Sweep]:
    """The kernels of a pointwise or copying call."""
    dims, size = call.dims(), ITEMSIZE[call.dtype]
    if call.kind == "pointwise":
        return [_generic(call, dims, size)]
    if call.kind == "cat":
        return [_cat(coef, chip, dims, size)]
    numel = _heads(dims) if "h" in dims else float(dims["n"] * dims["c"])
    one = _elementwise(call, numel, size) or _rearranged(call, dims, numel, size)
    found = [one] if one is not None else _special(call, dims, numel, size, coef)
    if found is None:
        raise CostError(f"operator kind {call.kind!r} has no phase {call.phase!r}")
    if call.library == "inductor":
        return [sweep._replace(path="fused") for sweep in found]
    return found


@family(
    "stream",
    "pointwise gelu silu relu exp tanh sigmoid neg rsqrt cos pow2 gelu_tanh clamp bitwise_not add mul div add_ "
    "where masked_fill add_row mul_col add_strided permute0213 transpose cast copy cat fill dropout random",
    DEFAULTS,
)
def model(call: Call, chip: Chip, coef: Coef, warm_frac: float) -> Time:
    found = sweeps(call, chip, coef)
    busy_s, floor_s, issue_bound, warm = 0.0, 0.0, False, warm_frac
    for sweep in found:
        read_bytes, written_bytes = sweep.read_bytes, sweep.written_bytes
        spent_s, issue, memory = _swept(chip, coef, sweep, warm)
        busy_s += spent_s
        floor_s = max(floor_s, memory_floor_s(chip, read_bytes, written_bytes, warm))
        issue_bound = issue > memory
        if len(found) > 1:
            warm = max(warm, resident_frac(chip, read_bytes + written_bytes))
    return timed(busy_s, floor_s, bound_of(busy_s, floor_s, issue_bound, warm_frac), len(found))


def timed(busy_s: float, floor_s: float, bound: str, num_kernels: int) -> Time:
    """A time that never beats the speed of light."""
    return Time(max(busy_s, floor_s), floor_s, bound, num_kernels)


def bound_of(busy_s: float, floor_s: float, issue_bound: bool, warm_frac: float) -> str:
    """What limits a kernel: its start-up and latency when its bytes explain little of it."""
    if busy_s > 4.0 * floor_s and not issue_bound:
        return "latency"
    if issue_bound:
        return "compute"
    return "cache" if warm_frac > 0.5 else "memory"
