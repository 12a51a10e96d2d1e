"""Recorded programs whose words are damaged (names, shapes, dtypes): every rule must end in an answer.

    python -m lab.fuzz.findings [--seconds 60] [--seed 7]

Words are replaced by others of the same trace or by shapes and names that rules look for; structure stays as it is.
"""

from __future__ import annotations

import argparse
import random
import time
import traceback
from dataclasses import replace

from lab.planted.recordings import suite_folder, suites
from ridgeline.findings.context.context import TraceContext
from ridgeline.findings.explain import findings_of
from ridgeline.profiler.floors import device_of
from ridgeline.trace import Trace, read

SMALL_BYTES = 30_000
EACH = 4
ODD = (
    "[]", "[[]]", "[[1]]", "[[-1, -1]]", "[[281474976710655, 281474976710655]]", "[[0, 0], [0, 0], [0, 0], [0, 0]]",
    "{}", "null", "[[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 1, 3, 3]]", '["float"]',
    '["float", "c10::BFloat16"]', '[["a"]]', "[[1.5, 2]]", "[null, [3]]", "aten::linear", "aten::embedding",
    "Torch-Compiled Region: 0/0", "autograd::engine::evaluate_function: NllLossBackward0", "Optimizer.step#SGD.step",
    "aten::_index_put_impl_",
)  # fmt: skip


def damaged(trace: Trace, rng: random.Random) -> Trace:
    words = list(trace.words)
    for _ in range(rng.randint(1, 40)):
        at = rng.randrange(1, len(words))
        words[at] = rng.choice(ODD) if rng.random() < 0.6 else words[rng.randrange(len(words))]
    return replace(trace, words=tuple(words))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    rng, end_s, tried, failed = random.Random(args.seed), time.time() + args.seconds, 0, 0
    files = [file for suite in suites() for file in sorted(suite_folder(suite).glob("*.json.xz"))]
    files = [file for file in files if file.stat().st_size < SMALL_BYTES]
    while time.time() < end_s:
        trace = read(rng.choice(files), cache=False)
        for _ in range(EACH):
            tried += 1
            try:
                findings_of(TraceContext(damaged(trace, rng), device_of(trace) if rng.random() < 0.8 else None))
            except Exception:
                failed += 1
                traceback.print_exc(limit=-3)
    print(f"{tried} damaged traces, {failed} ended in an error")


if __name__ == "__main__":
    main()
