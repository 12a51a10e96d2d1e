"""Time of operators over lists of tensors: optimizers and foreach kernels, chunk by chunk, launch by launch."""

from __future__ import annotations

from typing import NamedTuple

from ridgeline.cost.call import ITEMSIZE, Call, Coef, Time, family, memory_floor_s
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.time.stream.elementwise import blend, issue_s, resident_frac, timed

DEFAULTS: Coef = {
    "overlap": 6.27,  # exponent of the blend of latency, instructions and bytes
    "dram_frac": 0.87,  # share of the DRAM bandwidth a full launch reaches
    "l2_frac": 0.6,  # share of the L2 bandwidth
    "start_cycles": 3410.0,  # a launch with next to nothing to do
    "step_cycles": 143.0,  # one step of a lone block: compute 2048 elements
    "access_cycles": 132.0,  # and per tensor read or written
    "miss_cycles": 636.0,  # longer when loads come from DRAM
    "ragged_cycles": 85.0,  # longer per tensor when the length forbids vectors
    "access_instr": 18.8,  # issue slots per element and tensor read or written, with every SM full
    "ragged_instr": 17.9,  # more when the length forbids vectors
    "root_frac": 0.833,  # an out-of-place root issues this share
    "root_cycles": 235.0,  # but waits longer
    "adam_instr": 30.3,  # more per element of the fused optimizer
    "adam_cycles": 642.0,  # longer steps of it
    "adam_frac": 0.935,  # its seven streams reach this share of the others' bandwidth
    "step_kernel_cycles": 2700.0,  # its kernel that counts steps
}

_CHUNK, _STEP, _MAX_BLOCKS = 65536, 2048, 320
_BLOCKS_PER_SM = 4
_MAX_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}


class Pass(NamedTuple):
    """One operator over lists: how many it reads and writes, its kernel's arguments, and what sets it apart."""

    reads: int
    writes: int
    lists: int
    instr_frac: float = 1.0
    extra_instr: float = 0.0
    extra_cycles: float = 0.0
    dram_frac: float = 1.0


class Chunk(NamedTuple):
    """What one block works through: elements of each list, their width, and whether they come one by one."""

    elements: float
    size: float
    ragged: bool


def launches(num_tensors: int, chunks_each: int, lists: int) -> list[int]:
    """Blocks of each launch: at most 320, from at most as many tensors as fit into its arguments."""
    limit = _MAX_TENSORS[min(5, max(1, lists))]
    if limit * chunks_each <= _MAX_BLOCKS:
        full, rest = divmod(num_tensors, limit)
        return [limit * chunks_each] * full + ([rest * chunks_each] if rest else [])
    full, rest = divmod(num_tensors * chunks_each, _MAX_BLOCKS)
    return [_MAX_BLOCKS] * full + ([rest] if rest else [])


def _wave_s(chip: Chip, coef: Coef, one: Pass, blocks: int, chunk: Chunk, warm_frac: float) -> float:
    """Blocks that run together, a chunk each: a lone one waits, several share an SM's issue slots, all the memory."""
    accesses, cold = one.reads + one.writes, 1.0 - warm_frac
    step = coef["step_cycles"] + coef["access_cycles"] * accesses + coef["miss_cycles"] * cold + one.extra_cycles
    instr = coef["access_instr"] * accesses
    if chunk.ragged:
        step += coef["ragged_cycles"] * accesses
        instr += coef["ragged_instr"] * accesses
    instr = instr * one.instr_frac + one.extra_instr
    latency = max(1.0, chunk.elements / _STEP) * step / chip.clock_hz
    issue = issue_s(chip, blocks * chunk.elements * instr)
    moved = blocks * chunk.elements * chunk.size * accesses
    dram_s = moved * cold / (coef["dram_frac"] * one.dram_frac * chip.dram_bytes_per_s)
    memory = max(dram_s, moved / (coef["l2_frac"] * chip.l2_bytes_per_s))
    return blend(coef["overlap"], blend(coef["overlap"], latency, issue), memory)


def _launch_s(chip: Chip, coef: Coef, one: Pass, blocks: int, chunk: Chunk, warm_frac: float) -> float:
    """One launch: as many waves as its blocks need on this many SMs."""
    together = chip.num_sms * _BLOCKS_PER_SM
    full, rest = divmod(blocks, together)
    body = full * _wave_s(chip, coef, one, together, chunk, warm_frac) if full else 0.0
    if rest:
        body += _wave_s(chip, coef, one, rest, chunk, warm_frac)
    return coef["start_cycles"] / chip.clock_hz + body


def pass_s(
    chip: Chip, coef: Coef, one: Pass, numel: int, num_tensors: int, size: float, warm_frac: float
) -> tuple[float, int]:
    """Seconds and launches of one operator over ``num_tensors`` tensors of ``numel`` elements."""
    chunks = max(1, -(-numel // _CHUNK))
    blocks = launches(num_tensors, chunks, one.lists)
    if not blocks:
        return 0.0, 0
    longest, average = min(float(_CHUNK), float(numel)), numel / chunks
    elements = average + (longest - average) / (1.0 + chunks * num_tensors / (2.0 * chip.num_sms))
    chunk = Chunk(elements, size, numel % 4 != 0)
    full = _launch_s(chip, coef, one, blocks[0], chunk, warm_frac)
    last = full if blocks[-1] == blocks[0] else _launch_s(chip, coef, one, blocks[-1], chunk, warm_frac)
    return full * (len(blocks) - 1) + last, len(blocks)


_FOREACH = {"foreach_add": Pass(2, 1, 2), "foreach_mul_": Pass(1, 1, 1), "foreach_addcdiv_": Pass(3, 1, 3)}
_ADAMW = (
    Pass(1, 1, 1),  # decay
    Pass(2, 1, 2),  # first moment
    Pass(1, 1, 1),  # second moment, decayed
    Pass(2, 1, 3),  # and the squared gradient added: one list given twice
    Pass(1, 1, 2),  # root
    Pass(1, 1, 1),  # correction
    Pass(1, 1, 1),  # epsilon
    Pass(3, 1, 3),  # update
)
"""AdamW as the foreach calls it is made of."""


def _passes(call: Call, coef: Coef, dims: dict[str, int]) -> tuple[Pass, ...]:
    if call.kind == "adamw":
        fused = Pass(4, 3, 4, 1.0, coef["adam_instr"], coef["adam_cycles"], coef["adam_frac"])
        return (fused,) if call.library == "fused" else _ADAMW
    if call.kind == "foreach":
        return (Pass(dims["reads"], dims["writes"], dims.get("lists", max(1, dims["reads"]))),)
    if call.kind == "foreach_sqrt":
        return (Pass(1, 1, 2, coef["root_frac"], 0.0, coef["root_cycles"]),)
    return (_FOREACH[call.kind],)


def _lengths(call: Call, dims: dict[str, int]) -> tuple[int, int]:
    """Elements of a tensor and tensors; an average over tensors of many lengths is taken as one that allows vectors."""
    if call.kind == "foreach":
        num_tensors = max(1, dims["num_tensors"])
        numel = -(-dims["numel"] // num_tensors)
    else:
        numel, num_tensors = dims["numel"], dims["tensors"]
    averaged = call.kind == "foreach" or dims.get("mixed", 0)
    return (-(-numel // 4) * 4 if averaged else numel), num_tensors


@family("multitensor", "adamw foreach foreach_add foreach_sqrt foreach_mul_ foreach_addcdiv_", DEFAULTS)
def model(call: Call, chip: Chip, coef: Coef, warm_frac: float) -> Time:
    dims, size = call.dims(), ITEMSIZE[call.dtype]
    numel, num_tensors = _lengths(call, dims)
    if numel * num_tensors <= 0:
        return Time(0.0, 0.0, "latency", 0)
    busy_s, kernels = 0.0, 0
    if call.kind == "adamw" and call.library == "fused":
        busy_s, kernels = coef["step_kernel_cycles"] / chip.clock_hz, 1
    passes, warm, moved = _passes(call, coef, dims), warm_frac, float(numel) * num_tensors * size
    for one in passes:
        seconds, count = pass_s(chip, coef, one, numel, num_tensors, size, warm)
        busy_s, kernels = busy_s + seconds, kernels + count
        warm = max(warm, 0.8 * resident_frac(chip, 5.0 * moved))
    reads, writes = (4, 3) if call.kind == "adamw" else (passes[0].reads, passes[0].writes)
    floor_s = memory_floor_s(chip, reads * moved, writes * moved, warm_frac)
    return timed(busy_s, floor_s, "latency" if busy_s > 4.0 * floor_s else "memory", kernels)
