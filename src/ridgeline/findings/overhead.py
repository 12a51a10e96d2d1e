"""Taking the recording out of a recorded run: the host ran slower than it does, the device did not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ridgeline.findings.replay import Program, run

USUAL_FRAC = 0.45
"""What is left of recorded host time when nothing is recorded: the median over cases recorded with shapes on an
H200."""
HIDDEN = 0.97
LEAST_FRAC = 0.35
"""No recording makes a launch three times as long; a larger difference has other reasons."""
STEPS = 12


def unrecorded(program: Program, step_s: float | None, num_steps: int, long_s: float) -> tuple[Program, float]:
    """The program with the host's launches sped up until a step takes what it takes unrecorded, and by how much.

    Without a measured ``step_s`` nothing is changed: the share is 1.
    """
    if step_s is None:
        return program, 1.0

    def taken(frac: float) -> float:
        return run(_faster(program, frac, long_s)).end_s / num_steps

    if taken(1.0) <= step_s:
        return program, 1.0
    if taken(LEAST_FRAC) > step_s:
        return _closest(program, taken(1.0), taken(LEAST_FRAC), long_s)
    low, high = LEAST_FRAC, 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if taken(middle) > step_s else (middle, high)
    return _faster(program, (low + high) / 2, long_s), (low + high) / 2


def hidden_host(program: Program, long_s: float) -> Program:
    """The program with the host as fast as it usually is unrecorded, if that hardly changes its length; else itself.

    Where the device is what is waited for, a step's length does not tell how much the recording slowed the host; a cure
    that shortens the device's part would run into that host.
    """
    faster = _faster(program, USUAL_FRAC, long_s)
    return faster if run(faster).end_s >= HIDDEN * run(program).end_s else program


def _closest(program: Program, as_recorded_s: float, at_least_s: float, long_s: float) -> tuple[Program, float]:
    """The host is not what differs: speed it up only if that is where most of the difference is."""
    if at_least_s > 0.97 * as_recorded_s:
        return program, 1.0
    return _faster(program, LEAST_FRAC, long_s), LEAST_FRAC


def _faster(program: Program, frac: float, long_s: float) -> Program:
    """Launching takes a share of its time; long gaps and waits stay."""
    short = (program.gap_s < long_s) & (program.gap_s > 0)
    waits = program.waits_for >= 0
    return replace(
        program,
        gap_s=np.where(short, program.gap_s * frac, program.gap_s),
        own_s=np.where(waits, program.own_s, program.own_s * frac),
    )
