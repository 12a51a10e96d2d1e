"""How many channels and steps a program of the scan holds at once."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.rows import clamp, power_of_two


@dataclass(frozen=True, slots=True)
class Chunk:
    """Channels, steps and warps of a program."""

    channels: int
    steps: int
    num_warps: int = 1


def default(dim: int, length: int, state: int) -> Chunk:
    """One warp, so that steps are joined in registers and between lanes, never between warps."""
    steps = clamp(power_of_two(length), 1, 32)
    # numbers of state that a warp holds for a chunk of steps: 32 a thread, four tensors of them at a time
    room = max(1, 1024 // (steps * power_of_two(state)))
    return Chunk(clamp(1 << (room.bit_length() - 1), 1, max(1, min(8, power_of_two(dim)))), steps)
