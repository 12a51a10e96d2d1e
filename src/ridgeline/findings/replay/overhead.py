"""Taking the recording out of a recorded run: the host ran slower than it does, the device did not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ridgeline.findings.replay.loop import Loop
from ridgeline.findings.replay.replay import Program, Seconds

USUAL_FRAC = 0.45
"""What is left of recorded host time when nothing is recorded, at best: 0.41 to 0.75 over programs recorded with shapes
on an H200 whose step the host decides, half of them below 0.5."""
UNTIMED_FRACS = (0.5, 0.25, 0.9)
"""What is left of recorded host time where nobody measured the step: likeliest, at best and at worst. Over 256
recordings with shapes or stacks on an H200 a host at 0.5 explains the unrecorded step within 1.7 % in the median (the
recorded one within 16 %); one in twenty of those that the recording slowed lies below the second, and a tenth needs
more than three quarters. Recordings without either cost as much (17: 5 % in the mean at 0.5, 11 at 0.7, 22 as
recorded)."""
LONG_FRACS = (0.5, 0.85)
"""Of a long stretch between calls, what is left at best: of one full of ops, which are recorded as well, and of one
without any, which shares its cores with what records (0.90 to 0.97 of it in four planted round trips)."""
BARE_FRACS = (1.0, 0.7)
"""The same where no ops were recorded, or nothing was recorded at all, as in a predicted timeline."""
HIDDEN = 0.92
LEAST_FRAC = 0.35
"""No recording makes a launch three times as long; a larger difference has other reasons."""
LEAST_WHOLE_FRAC = 0.1
"""A process on too few cores is slowed by what records it as well."""
MOST_S = 15e-6
"""No recorded op costs its host more than this (3 to 6 µs with shapes, up to 12 inside compiled regions)."""
CALL_COST, KEPT_FRAC = 0.5, 0.15
"""Recording a call of the driver against recording an op, and the share of any host time that is never the
recording's."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """The program as it runs unrecorded, by the likeliest host and by others that explain the same step."""

    program: Program
    frac: float  # of the recorded launching time that is left
    others: tuple[Program, ...]


def unrecorded(
    program: Program, ops: Seconds, step_s: float | None, loop: Loop, long_s: Seconds, untimed: tuple[float, ...]
) -> Hosts:
    """Hosts under which a step takes what it takes unrecorded.

    Two accounts of the recording's cost are kept, since a step's length does not tell them apart: all launching is
    stretched alike, or every recorded op (``ops`` of them before each call) and call costs the same. Where the device
    is what is waited for, nothing is known of the host: one as fast as it usually is stands beside the recorded one.
    Where launching would have to be less than a third, whatever the host does was slowed, or launching more than usual:
    of 13.5 ms of collections that were recorded 11.4 were there unrecorded, where 6.5 would be half of all.
    Where nobody measured the step, its host is what such recordings leave of it (``untimed``).
    """
    if step_s is None:
        return _guessed(program, ops, untimed, long_s)
    alike = _solved(lambda frac: _stretched(program, frac, long_s), 1.0, LEAST_FRAC, step_s, loop)
    main = program if alike is None else _stretched(program, alike, long_s)
    if alike in (None, LEAST_FRAC):  # launching alone does not explain it: whatever the host does may have been slowed
        whole = _solved(lambda frac: _stretched(program, frac, np.inf), 1.0, LEAST_WHOLE_FRAC, step_s, loop)
        # From here on a recorded step was slowed by more than what its device varies by.
        if whole is not None and whole > LEAST_WHOLE_FRAC and loop.step_s(program) > 1.05 * step_s:
            alone = _solved(lambda frac: _stretched(program, frac, long_s), 1.0, LEAST_WHOLE_FRAC, step_s, loop)
            unslowed = (_stretched(program, alone, long_s),) if alone is not None else ()
            return Hosts(_stretched(program, whole, np.inf), whole, unslowed)
    if alike is None:
        return Hosts(main, 1.0, _hidden(main, loop, long_s))
    each_s = _solved(lambda cost_s: _charged(program, ops, cost_s), 0.0, MOST_S, step_s, loop)
    charged = (_charged(program, ops, each_s),) if each_s is not None else ()
    return Hosts(main, alike, charged + (_hidden(main, loop, long_s, USUAL_FRAC / alike) if alike > USUAL_FRAC else ()))


def _guessed(program: Program, ops: Seconds, untimed: tuple[float, ...], long_s: Seconds | float) -> Hosts:
    """The likeliest host, the fastest (whose long stretches may be the recording's in part, too) and the slowest."""
    main, *others = (_stretched(program, frac, long_s) if frac < 1.0 else program for frac in untimed)
    if len(others) > 1:
        long = program.gap_s >= long_s
        left_s = np.maximum(LONG_FRACS[0] * program.gap_s, LONG_FRACS[1] * program.gap_s - MOST_S * ops)
        others[0] = replace(others[0], gap_s=np.where(long, left_s, others[0].gap_s))
    return Hosts(main, untimed[0], tuple(others))


def usual(program: Program, long_s: Seconds | float) -> Program:
    """The program with the host as fast as it usually is unrecorded."""
    return _stretched(program, USUAL_FRAC, long_s)


def _hidden(program: Program, loop: Loop, long_s: Seconds | float, frac: float = USUAL_FRAC) -> tuple[Program, ...]:
    """A faster host, if that hardly changes the step: a fix that shortens the device's part would run into it."""
    faster = _stretched(program, frac, long_s)
    return (faster,) if loop.step_s(faster) >= HIDDEN * loop.step_s(program) else ()


def _solved(make: Callable[[float], Program], recorded: float, least: float, step_s: float, loop: Loop) -> float | None:
    """The setting between ``recorded`` and ``least`` at which a step takes ``step_s``; None if the host is not what
    makes the difference."""
    as_recorded_s, at_least_s = loop.step_s(make(recorded)), loop.step_s(make(least))
    if as_recorded_s <= step_s:
        return None
    if at_least_s > step_s:
        return None if at_least_s > HIDDEN * as_recorded_s else least
    slow, fast = recorded, least
    for _ in range(12):
        middle = (slow + fast) / 2
        slow, fast = (middle, fast) if loop.step_s(make(middle)) > step_s else (slow, middle)
    return (slow + fast) / 2


def _stretched(program: Program, frac: float, long_s: Seconds | float) -> Program:
    """Launching takes a share of its time; long gaps and waits stay."""
    short = (program.gap_s < long_s) & (program.gap_s > 0)
    waits = program.waits_for >= 0
    return replace(
        program,
        gap_s=np.where(short, program.gap_s * frac, program.gap_s),
        own_s=np.where(waits, program.own_s, program.own_s * frac),
    )


def _charged(program: Program, ops: Seconds, cost_s: float) -> Program:
    """Every op and every call is cheaper by the same time; waits stay."""
    gap_s, own_s = program.gap_s, program.own_s
    waits = program.waits_for >= 0
    return replace(
        program,
        gap_s=np.where(gap_s > 0, np.maximum(KEPT_FRAC * gap_s, gap_s - cost_s * ops), gap_s),
        own_s=np.where(waits, own_s, np.maximum(KEPT_FRAC * own_s, own_s - CALL_COST * cost_s)),
    )
