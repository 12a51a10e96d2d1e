"""How far replayed gains are from realized ones: factors on the worst and on the best case by rule, the noise of steps,
and what is left, by what rules promised before they had seen a case."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trust:
    """A realized gain lies between ``low`` times the worst and ``high`` times the best replayed one."""

    low: float
    high: float
    basis: str


USUAL = Trust(
    0.95,
    1.2,
    "fitted: of 86 causes planted on an H200, those that are removed on the device gained 0.95 times the replayed "
    "worst to 1.2 times the best, beside what a step varies by itself and 3 %",
)
USUAL_OF_HOST = Trust(
    1.0,
    1.25,
    "fitted: of 86 causes planted on an H200, those that are removed on the host gained the replayed worst to 1.25 "
    "times the best, beside what a step varies by itself and 15 %",
)
NOISE = 1.0
"""Of what half of the unrecorded steps lie within, on either side: the step that is measured after a change is another
sample of the same host."""
UNMEASURED_FRAC = 0.012
"""Of the step where nobody measured how much it varies: what eight programs differed by between two runs, in the median
(H200, the same day)."""
HOST_SLACK, DEVICE_SLACK = 0.15, 0.03
"""Split-conformal over 51 promises of rules that had not seen the cases (second and third suite): 41 hold with the
noise alone, and in 45 the gain lies past the nearer end by at most 2 % of it. By family, shrunk to all by 20 cases:
10 % of the end where the gain is host time (30 promises), 1 % on the device (21), where 3 are kept. No slack would hold
the other six: their rules did not see the cause. Of 197 promises by the thirteenth suite 88 of 109 gains of host time
were inside with those 10 %, 93 with 15, and 94 with 25.
``lab/planted/interval_slack.py --wanted 0.86``."""
