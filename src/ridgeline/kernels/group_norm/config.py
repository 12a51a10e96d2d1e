"""Launch configurations of GroupNorm by shape."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rows import cdiv, clamp, power_of_two


@dataclass(frozen=True, slots=True)
class Groups:
    """Block and warps of the sums, stretches a group is cut into, block and warps of what is written."""

    block: int
    num_warps: int
    num_stretches: int
    out_block: int
    out_warps: int


def default(groups: int, length: int, positions: int, sms: int) -> Groups:
    """Groups are cut until every multiprocessor has eight programs; sixteen elements a thread throughout."""
    block = clamp(power_of_two(length), 32, 2048)
    stretches = clamp(cdiv(8 * sms, max(groups, 1)), 1, max(1, length // (2 * block)))
    out_block = clamp(power_of_two(positions), 32, 2048)
    return Groups(block, clamp(block // 512, 1, 4), min(stretches, 64), out_block, clamp(out_block // 512, 1, 4))
