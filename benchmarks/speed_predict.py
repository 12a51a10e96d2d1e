"""How many predictions of networks of the zoo one process makes a second.

    python benchmarks/speed_predict.py [--model llama3-8b deepseek-v3] [--execution eager] [--trials 7]

Shapes never asked before (all memories of prices emptied before each trial), the same ones again, decoding at ever new
lengths, and training at new shapes. CPU seconds of the process; the best trial counts: on a shared machine the others
measure its neighbors.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import ridgeline as rl
from ridgeline.cost.price import pricer_of

BATCHES, SEQS, LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12), tuple(range(128, 128 + 16 * 64, 64)), range(512, 640)
SHAPES = [{"batch": batch, "seq": seq} for batch, seq in product(BATCHES, SEQS)]
DECODED = [{"mode": "decode", "batch": 8, "kv": kv} for kv in LENGTHS]
TRAINED = [{"mode": "train", "batch": batch, "seq": seq} for batch, seq in product((1, 2), SEQS)]


def rate(predict: Callable[[dict[str, Any]], object], asked: list[dict[str, Any]], trials: int,
         before: Callable[[], None] = lambda: None) -> float:  # fmt: skip
    """The most predictions a second over the trials."""
    best_s = float("inf")
    for _ in range(trials):
        before()
        began = time.process_time()
        for options in asked:
            predict(options)
        best_s = min(best_s, time.process_time() - began)
    return len(asked) / best_s


def rates(model: str, on: str, execution: str, trials: int) -> Iterable[tuple[str, float]]:
    def predict(options: dict[str, Any]) -> object:
        return rl.predict(model, on=on, execution=execution, **options).expected_s

    def forget() -> None:
        pricer_of.cache_clear()
        predict({"batch": 64, "seq": 96})

    yield "at new shapes", rate(predict, SHAPES, trials, forget)
    yield "repeated", rate(predict, SHAPES, trials)
    yield "decoding", rate(predict, DECODED, trials, forget)
    yield "training", rate(predict, TRAINED, trials, forget)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", default=["llama3-8b"])
    parser.add_argument("--on", default="h200")
    parser.add_argument("--execution", default="eager")
    parser.add_argument("--trials", type=int, default=7)
    options = parser.parse_args()
    for model in options.model:
        found = rates(model, options.on, options.execution, options.trials)
        print(f"{model}, a second: " + ", ".join(f"{number:.0f} {what}" for what, number in found), flush=True)


if __name__ == "__main__":
    main()
