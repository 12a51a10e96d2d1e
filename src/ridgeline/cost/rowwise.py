"""The time of one kernel whose blocks each walk one row: waves of blocks, latency chains, issue slots and DRAM traffic."""

from __future__ import annotations

from math import ceil

from ridgeline.cost.call import Coef
from ridgeline.cost.chip import Chip

THREADS_PER_SM = 2048
BLOCKS_PER_SM = 32
REGISTERS_PER_SM = 65536

Kernel = tuple[str, float, str]
"""(name, seconds, bound) of one kernel."""

LATENCY, ISSUE, MEMORY = "latency", "issue", "memory"


def resident_blocks(threads: int, registers: float = 32.0) -> int:
    """Blocks that live on one SM at once, by threads, registers and block slots."""
    by_registers = int(REGISTERS_PER_SM / (threads * registers))
    return max(1, min(THREADS_PER_SM // threads, by_registers, BLOCKS_PER_SM))


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
    ``issue_s`` the time the blocks of one SM need of its issue slots. Latency, issue and memory overlap as a norm of this
    ``power``: 1 when one follows the other, infinite when the longest hides the rest.
    """
    latency_s = chain_cycles * rounds_of_blocks / chip.clock_hz
    busy_s = (latency_s**power + issue_s**power + memory_s**power) ** (1.0 / power)
    busy_s += (coef["launch_cycles"] + first_cycles) / chip.clock_hz
    bound = MEMORY if memory_s >= latency_s and memory_s >= issue_s else ISSUE if issue_s > latency_s else LATENCY
    return name, busy_s, bound


def issue_seconds(chip: Chip, blocks: float, cycles: float) -> float:
    """Time of the busiest SM when every block takes this many cycles of its issue slots."""
    return max(1.0, blocks / chip.num_sms) * cycles / chip.clock_hz
