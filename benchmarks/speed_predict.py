"""How many predictions of a network of the zoo one process makes a second.

    python benchmarks/speed_predict.py [--model llama3-8b] [--trials 7]

Shapes never asked before (all memories of prices emptied before each trial), the same ones again, and decoding at ever
new lengths. CPU seconds of the process; the best trial counts: on a shared machine the others measure its neighbors.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import product

import ridgeline as rl
from ridgeline.cost.price import pricer_of

BATCHES, SEQS, LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12), tuple(range(128, 128 + 16 * 64, 64)), range(512, 640)


def rate(predict: Callable[[], None], count: int, trials: int, before: Callable[[], None] = lambda: None) -> float:
    """The most predictions a second over the trials."""
    best_s = float("inf")
    for _ in range(trials):
        before()
        began = time.process_time()
        predict()
        best_s = min(best_s, time.process_time() - began)
    return count / best_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--on", default="h200")
    parser.add_argument("--trials", type=int, default=7)
    options = parser.parse_args()
    shapes = list(product(BATCHES, SEQS))

    def infer() -> None:
        for batch, seq in shapes:
            rl.predict(options.model, on=options.on, batch=batch, seq=seq)

    def decode() -> None:
        for kv in LENGTHS:
            rl.predict(options.model, on=options.on, mode="decode", batch=8, kv=kv)

    def forget() -> None:
        pricer_of.cache_clear()
        rl.predict(options.model, on=options.on, batch=64, seq=96)

    new, again = rate(infer, len(shapes), options.trials, forget), rate(infer, len(shapes), options.trials)
    lengths = rate(decode, len(LENGTHS), options.trials, forget)
    print(f"{options.model}: {new:.0f} a second at new shapes, {again:.0f} repeated, {lengths:.0f} decoding")


if __name__ == "__main__":
    main()
