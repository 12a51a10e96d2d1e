"""Where the seconds of a training search go when a budget is short or a host slow, on a made-up clock.

    python benchmarks/train_budget.py

Candidates take what they took on an H200 (``tests/unit/optimizer/test_budget.py``); a slow host takes a multiple of it
for all but kernels. Printed are whether ``torch.compile`` was measured, and the seconds spent. Needs no device.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "unit" / "optimizer")]

import test_budget as clock
from test_budget import Network

ALONE = {
    "resnet50": clock.NETWORKS["resnet50"], "efficientnet": Network(0.043, 948, 0, 4.0, 0.0, 60.0),
    "u-net": Network(0.045, 1421, 0, 8.0, 0.0, 50.0), "twice as many": Network(0.060, 2100, 0, 6.0, 0.0, 100.0),
    "t5-base": clock.LARGE["t5-base"], "gpt2-medium": clock.NETWORKS["gpt2-medium"],
}  # fmt: skip
"""As they would be with nothing else on their host, where that is known or can be guessed."""


class Patching:
    """What pytest's fixture does, without putting anything back."""

    def setattr(self, owner: Any, name: str, value: Any) -> None:
        setattr(owner, name, value)


def found(network: Network, budget_s: float, times: float) -> str:
    slowed = replace(network, traced_s=times * network.traced_s, blocks_s=times * network.blocks_s,
                     stock_s=times * network.stock_s)  # fmt: skip
    clock.PREPARED_S, between = 7.0 * times, (1 + times) / 2
    clock.JUDGED_S, clock.FIRST_PROOF_S = 3.0 * between, 4.0 * between
    run = clock.Run(Patching(), slowed, budget_s)
    entry = run.search.entries[clock.STOCK]
    measured = "yes" if entry.status == clock.SLOWER else "ended" if "within" in entry.reason else "no"
    return f"{measured} {run.now_s:.0f}"


def main() -> None:
    print("| network | " + " | ".join(f"{b:.0f} s, host × {t:.0f}" for b in (60, 120) for t in (1, 2)) + " |")
    print("|---" * 5 + "|")
    for name, network in ALONE.items():
        print(f"| {name} | " + " | ".join(found(network, b, t) for b in (60.0, 120.0) for t in (1.0, 2.0)) + " |")


if __name__ == "__main__":
    main()
