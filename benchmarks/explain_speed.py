"""CPU-seconds and memory of explaining a trace, part by part.

    python benchmarks/explain_speed.py TRACE

Reading is without the cache; the parts after it are what `ridgeline explain` does before it prints.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from ridgeline.findings.annotate import annotate
from ridgeline.findings.context.context import Scene
from ridgeline.findings.explain import findings_of
from ridgeline.findings.explanation import summary_of
from ridgeline.profiler.floors import device_of
from ridgeline.trace import read
from ridgeline.trace.idle import idle_places
from ridgeline.trace.quality import quality


def main() -> None:
    trace = _timed("read", lambda: read(sys.argv[1], cache=False))
    _timed("totals, steps, idle causes", lambda: summary_of(trace))
    _timed("quality", lambda: quality(trace))
    _timed("idle places", lambda: idle_places(trace))
    scene = _timed("constraints and replay", lambda: Scene(trace, device_of(trace)))
    found = _timed("findings", lambda: findings_of(scene))
    _timed("annotated trace", lambda: annotate(scene, tuple(found)))
    print(f"{len(trace):,} spans, {int(trace.gpu.sum()):,} of them on a device; {scene.program.num_works:,} replayed")
    print(f"{len(found)} findings; {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB at most")


def _timed(part: str, work: Callable[[], Any]) -> Any:
    began = time.process_time()
    made = work()
    print(f"{part:28} {time.process_time() - began:6.2f} CPU-s", flush=True)
    return made


if __name__ == "__main__":
    main()
