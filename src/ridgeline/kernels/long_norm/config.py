"""How long rows are shared out."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.split_rows import Streamed

LEAST_COLS = 49152
"""From here on a row is better shared: one SM's rows, read twice, are together more than the L2 keeps."""
MOST_SHARES = 1024


@dataclass(frozen=True, slots=True)
class Shared:
    """Columns of a share, of a block, warps of a program and CTAs per SM."""

    share: int = 4096
    block: int = 2048
    num_warps: int = 8
    programs_per_sm: int = 4


@dataclass(frozen=True, slots=True)
class Held:
    """Columns of a share that stay in registers, 16 a thread and as many of the next row; four CTAs per SM."""

    share: int = 4096
    num_warps: int = 8
    programs_per_sm: int = 4
    max_registers: int = 64


def streamed(cols: int, num_sms: int) -> Streamed | None:
    """Shares of 32 KB: one is finished while the next is summed and another on its way; None for rows that all programs
    together have no room for (8.6 MB of an H200; 16 MB, one after the other without a next one, 0.50 ms, 0.36 below).

    Softmax of 4096×393216: 3.23 ms (a copy 3.03), 3.25 on eight warps of half the chunks, 3.36 one CTA per SM,
    3.57 to 3.95 in shares of 16 KB, 4.20 in registers. Group norm of 896×2097152 4.39 (6.43, 6.91, 4.51, 6.38; a copy
    3.54), of 1024×532512 1.25 (1.50 on eight warps, 1.87 in registers; a copy 1.03).
    """
    usual = Streamed(16, 4, 3, 2)
    return usual if cols <= 8192 * usual.programs_per_sm * num_sms else None


def held(weighed: bool) -> Held:
    """Weights of channels are looked up element by element, which takes registers: three programs then."""
    return Held(programs_per_sm=3, max_registers=80) if weighed else Held()


def shares(cols: int, num_programs: int, share: int) -> tuple[int, int]:
    """(number of shares of a row, columns of one): all programs together hold a row at least once."""
    length = max(share, -(-cols // min(num_programs, MOST_SHARES)))
    length = -(-length // 4) * 4
    return -(-cols // length), length
