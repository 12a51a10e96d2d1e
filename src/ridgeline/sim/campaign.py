"""A whole training run: steps, failures, checkpoints, and what is left of the time, in days, joules and dollars."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ridgeline.errors import InputError
from ridgeline.sim.step import Step

FAILURES_PER_DEVICE_DAY = 419 / (54 * 16384)
"""Unexpected interruptions of Llama 3's 405B run: 419 in 54 days on 16,384 H100 (Llama 3 paper, table 5)."""
RESTART_S = 900.0
"""From a failure to the next step: detect, replace, reload, warm up (assumed; large runs report 5 to 30 minutes)."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """A run of so many tokens; ``goodput_frac`` is the share of the wall time that made progress."""

    tokens: float
    num_steps: int
    days: float
    goodput_frac: float
    num_failures: float
    checkpoint_every_s: float
    checkpoint_s: float
    energy_j: float
    usd: float
    interval_days: tuple[float, float]

    def to_dict(self) -> dict[str, float | int | list[float]]:
        found = {name: getattr(self, name) for name in self.__slots__ if name != "interval_days"}
        return {**found, "interval_days": list(self.interval_days)}


def campaign(step: Step, tokens: float) -> Campaign:
    """What training on ``tokens`` takes, at the checkpoint interval that loses least (Young and Daly)."""
    if tokens < step.tokens:
        raise InputError(f"a run of {tokens:g} tokens is less than one step of {step.tokens:,}")
    num_steps = math.ceil(tokens / step.tokens)
    training_s = num_steps * step.step_s
    per_s = FAILURES_PER_DEVICE_DAY * step.plan.world / 86400.0
    # Sustained rate of a training cluster's storage (Llama 3 paper, section 3.3.1: 2 TB/s sustained, 7 TB/s peak)
    # Of a parameter: master copy, two moments and the narrow weights
    # Share of writing a checkpoint that stops training; the rest is copied in the background (assumed)
    checkpoint_s = 0.2 * step.num_params * 14.0 / 2e12 + 1.0
    every_s = min(training_s, math.sqrt(2.0 * checkpoint_s / per_s))
    lost = checkpoint_s / every_s + per_s * (RESTART_S + every_s / 2.0)
    wall_s = training_s * (1.0 + lost)
    scale = wall_s / training_s
    low, high = (s * num_steps * scale / 86400.0 for s in step.interval_s)
    return Campaign(
        tokens, num_steps, wall_s / 86400.0, 1.0 / scale, per_s * wall_s, every_s, checkpoint_s,
        step.energy_j * num_steps * scale, wall_s / 3600.0 * step.cluster.price_usd_per_hour, (low, high),
    )  # fmt: skip
