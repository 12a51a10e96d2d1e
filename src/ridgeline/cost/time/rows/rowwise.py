"""The time of a kernel whose blocks each walk a row: waves of blocks, latency chains, issue slots and DRAM traffic."""

from __future__ import annotations

from math import ceil

from ridgeline.cost.call import Call, Coef
from ridgeline.cost.time.chip import Chip
from ridgeline.errors import CostError

Kernel = tuple[str, float, str]
"""(name, seconds, bound) of one kernel."""


def dimensions(call: Call, *names: str) -> dict[str, int]:
    """The call's dimensions, with an error that names those it lacks."""
    dims = call.dims()
    missing = [name for name in names if name not in dims]
    if missing:
        raise CostError(f"{call.kind} needs the dimensions {' '.join(names)}: {' '.join(missing)} not given")
    return dims


def resident_blocks(threads: int, registers: float = 32.0) -> int:
    """Blocks that live on one SM at once, by threads, registers and block slots."""
    by_registers = int(65536 / (threads * registers))  # registers of an SM
    return max(1, min(2048 // threads, by_registers, 32))  # threads and blocks an SM holds


def rounds(blocks: float, slots: float, tail_frac: float) -> float:
    """How many times the slots are filled; ``tail_frac`` of the last partial filling is waited for."""
    full = blocks / slots
    return 1.0 if full <= 1.0 else full + tail_frac * (ceil(full) - full)


def spilled(footprint_bytes: float, capacity_bytes: float) -> float:
    """The share of a footprint that a cache of this capacity no longer holds when it is read again."""
    ratio = footprint_bytes / capacity_bytes
    ratio *= ratio
    ratio *= ratio
    return ratio / (1.0 + ratio)


def dram_s(chip: Chip, coef: Coef, moved_bytes: float, cold_frac: float) -> float:
    """DRAM time of a stream; a cold L2 first writes back the dirty lines that others left in it."""
    if moved_bytes <= 0.0:
        return 0.0
    evicted = cold_frac * coef["evict_frac"] * chip.l2_bytes
    evicted *= moved_bytes / (moved_bytes + coef["evict_ramp_frac"] * chip.l2_bytes)
    return (moved_bytes + evicted) / (chip.dram_bytes_per_s * coef["dram_frac"])


def kernel(
    name: str,
    chip: Chip,
    coef: Coef,
    power: float,
    first_cycles: float,
    rounds_of_blocks: float,
    chain_cycles: float,
    issue_s: float,
    memory_s: float,
) -> Kernel:
    """A kernel of equal blocks.

    ``first_cycles`` are paid once (pipeline fill, cold misses), ``chain_cycles`` is the serial latency of one block and
    ``issue_s`` the time the blocks of one SM need of its issue slots. Latency, issue and memory overlap as a norm of
    this ``power``: 1 when one follows the other, infinite when the longest hides the rest.
    """
    latency_s = chain_cycles * rounds_of_blocks / chip.clock_hz
    busy_s = (latency_s**power + issue_s**power + memory_s**power) ** (1.0 / power)
    busy_s += (coef["launch_cycles"] + first_cycles) / chip.clock_hz
    bound = "memory" if memory_s >= latency_s and memory_s >= issue_s else "issue" if issue_s > latency_s else "latency"
    return name, busy_s, bound


def issue_seconds(chip: Chip, blocks: float, cycles: float) -> float:
    """Time of the busiest SM when every block takes this many cycles of its issue slots."""
    return max(1.0, blocks / chip.num_sms) * cycles / chip.clock_hz


def stream_s(chip: Chip, coef: Coef, read_bytes: float, written_bytes: float, warm_frac: float) -> float:
    """Time of reading, from DRAM or from what is already in L2, and of writing."""
    cached_bytes_per_s = max(chip.l2_bytes_per_s * coef["l2_frac"], chip.dram_bytes_per_s * coef["dram_frac"])
    cached_s = read_bytes * warm_frac / cached_bytes_per_s
    return cached_s + dram_s(chip, coef, read_bytes * (1.0 - warm_frac) + written_bytes, 1.0 - warm_frac)


def reread_bytes(rows: float, row_bytes: float, resident: int, arrays: int, chip: Chip, coef: Coef) -> float:
    """Bytes of one array that a further pass reads from DRAM again: rows in flight that the L2 cannot hold."""
    return rows * row_bytes * reread_frac(rows, row_bytes, resident, arrays, chip, coef)


def reread_frac(rows: float, row_bytes: float, resident: int, arrays: int, chip: Chip, coef: Coef) -> float:
    """The share of the rows in flight that the L2 cannot hold until the next pass."""
    in_flight = min(rows, chip.num_sms * resident) * row_bytes * arrays
    return spilled(in_flight, coef["reread_frac"] * chip.l2_bytes)


def left_over(footprint_bytes: float, chip: Chip, coef: Coef) -> float:
    """The share of what the kernel before moved that the next one still finds in L2."""
    return 1.0 - spilled(footprint_bytes, coef["left_frac"] * chip.l2_bytes)


def looped_coef(
    key: str, first: float, block: float, step: float, miss: float, base: float, issue: float, power: float
) -> Coef:
    """The coefficients of one looped kernel.

    ``first`` cycles once, ``block`` cycles of latency a block, ``step`` more per iteration and ``miss`` when its loads
    go to DRAM, ``base`` and ``issue`` SM cycles of issue slots a block and a unit of work, ``power`` of their overlap.
    Zero says that the kernel has no such term.
    """
    return {
        f"{key}.first": first, f"{key}.block": block, f"{key}.step": step, f"{key}.miss": miss, f"{key}.base": base,
        f"{key}.issue": issue, f"{key}.power": power,
    }  # fmt: skip


def looped(
    key: str, chip: Chip, coef: Coef, blocks: float, resident: int, steps: float, work: float, warm: float,
    memory_s: float, extra_cycles: float = 0.0,
) -> Kernel:  # fmt: skip
    """A kernel whose blocks loop: ``steps`` iterations, ``work`` units of issue, ``extra_cycles`` of latency each."""
    cold = 1.0 - warm
    return kernel(
        key, chip, coef, coef[key + ".power"], coef[key + ".first"],
        rounds(blocks, chip.num_sms * resident, coef["tail_frac"]),
        coef[key + ".block"] + steps * (coef[key + ".step"] + coef[key + ".miss"] * cold) + extra_cycles,
        issue_seconds(chip, blocks, coef[key + ".base"] + work * coef[key + ".issue"]), memory_s,
    )  # fmt: skip


def triton_coef(
    first: float, issue: float, scalar: float, block: float, step: float, base: float, loop_issue: float,
    power: float, combine: float,
) -> Coef:  # fmt: skip
    """The coefficients of Inductor's row reductions.

    Rows of at most 1024 sit in registers, several a program: ``issue`` SM cycles per 1024 padded elements, ``scalar``
    when rows are not aligned to 16 bytes. Longer rows are looped over by a program each: ``block`` and ``step`` cycles
    of latency a row and 2048 elements, ``base`` and ``loop_issue`` SM cycles of issue. ``combine``: the small kernel
    that joins the parts of a split reduction.
    """
    return {
        "triton.first": first, "triton.issue": issue, "triton.scalar": scalar, "triton.block": block,
        "triton.step": step, "triton.base": base, "triton.loop_issue": loop_issue, "triton.power": power,
        "triton.combine": combine,
    }  # fmt: skip


def _triton_first(coef: Coef, warm: float) -> float:
    return coef["triton.first"] + coef["miss_cycles"] * (1.0 - warm)


def triton_persistent(rows: int, width: int, size: float, arrays: int, chip: Chip, coef: Coef, warm: float) -> Kernel:
    """Inductor's kernel that keeps whole rows in registers: reads ``arrays`` tensors, writes one."""
    moved = rows * width * size
    padded = rows * (1 << (width - 1).bit_length()) / 1024
    issue = coef["triton.issue"] if width * size % 16 == 0 else coef["triton.scalar"]
    return kernel(
        "triton_persistent", chip, coef, coef["triton.power"], _triton_first(coef, warm), 1.0, coef["triton.block"],
        issue_seconds(chip, padded, issue), stream_s(chip, coef, arrays * moved, moved, warm),
    )  # fmt: skip


def _triton_split(rows: int, width: int, size: float, arrays: int, chip: Chip, coef: Coef, warm: float) -> list[Kernel]:
    """Few long rows: each reduced by several programs, joined, and then mapped."""
    moved, first = rows * width * size, _triton_first(coef, warm)
    again = max(warm, left_over(arrays * moved, chip, coef))
    read_s = stream_s(chip, coef, arrays * moved, 0.0, warm)
    map_s = stream_s(chip, coef, arrays * moved, moved, again)
    return [
        kernel("triton_split", chip, coef, 1.0, first, 1.0, coef["triton.block"], 0.0, read_s),
        kernel("triton_combine", chip, coef, 1.0, coef["triton.combine"], 0.0, 0.0, 0.0, 0.0),
        kernel("triton_map", chip, coef, 1.0, first, 1.0, coef["triton.combine"], 0.0, map_s),
    ]


def triton_rows(
    rows: int, width: int, size: float, arrays: int, chip: Chip, coef: Coef, warm: float, weight: float = 1.0
) -> list[Kernel]:
    """Inductor's row reduction followed by a map over the row; ``weight`` scales the arithmetic of the looped form."""
    if width <= 1024:
        return [triton_persistent(rows, width, size, arrays, chip, coef, warm)]
    if rows < 2 * chip.num_sms and width >= 8192:
        return _triton_split(rows, width, size, arrays, chip, coef, warm)
    moved, steps = rows * width * size, width / 2048
    read = arrays * (moved + reread_bytes(rows, width * size, 4, arrays + 1, chip, coef))
    issue = weight * (coef["triton.base"] + steps * coef["triton.loop_issue"])
    return [
        kernel(
            "triton_looped", chip, coef, coef["triton.power"], _triton_first(coef, warm),
            rounds(rows, chip.num_sms * 4, coef["tail_frac"]), coef["triton.block"] + steps * coef["triton.step"],
            issue_seconds(chip, rows, issue), stream_s(chip, coef, read, moved, warm),
        )
    ]  # fmt: skip
