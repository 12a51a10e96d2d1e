"""Reading a large trace and answering from it: CPU-seconds and memory, beside HolisticTraceAnalysis if it is there.

    python benchmarks/trace_reading.py TRACE.json [TRACE.json …] [--rival-python VENV/bin/python] [--no-msgspec]

Every run is a process of its own with one thread; CPU-seconds are user and system time of that process and its
children, imports included, and memory is its peak resident set. Both tools load the file and give temporal, kernel and
idle breakdowns, overlap of communication, launch statistics and queue length ("the same"); "everything" adds links to
modules and steps, idle causes with their places, quality, collectives, Tensor Cores and all other tables of ours. The
rival is asked through the interpreter of ``--rival-python``, where ``pip install traceinsight==0.6.1`` has been run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

OURS = """
import json, resource, sys, time
if {plain!r}:
    sys.modules["msgspec"] = None
from ridgeline.trace import read, steps, totals
from ridgeline.trace.breakdown import device_shares, stream_shares
from ridgeline.trace.collectives import calls_of, collectives
from ridgeline.trace.idle import idle_causes, idle_places
from ridgeline.trace.kernels import launches, queue_depth, tensor_cores, work_by
from ridgeline.trace.memory import peaks
from ridgeline.trace.quality import quality
began = time.process_time()
trace = read({path!r}, cache={cache})
read_s = time.process_time() - began
answers = [totals(trace), device_shares(trace), work_by(trace), idle_causes(trace), launches(trace),
           queue_depth(trace)]
if {everything}:
    answers += [stream_shares(trace), steps(trace), idle_places(trace), work_by(trace, "op"),
                work_by(trace, "module"), tensor_cores(trace), collectives(calls_of(trace)), peaks(trace),
                quality(trace)]
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps(dict(cpu_s=usage.ru_utime + usage.ru_stime, read_s=read_s, peak_mb=usage.ru_maxrss / 1e3,
                      spans=len(trace), idle_ms=answers[0]["all"]["idle_ms"],
                      linked_idle_ms=answers[0]["linked"]["idle_ms"])))
"""
RIVAL = """
import json, os, resource, tempfile
import hta
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files={{0: {path!r}}}, trace_dir=os.path.dirname({path!r}))
temporal = analysis.get_temporal_breakdown(visualize=False)
analysis.get_gpu_kernel_breakdown(visualize=False)
analysis.get_idle_time_breakdown(ranks=[0], visualize=False)
analysis.get_comm_comp_overlap(visualize=False)
analysis.get_cuda_kernel_launch_stats(ranks=[0], visualize=False)
analysis.get_queue_length_time_series(ranks=[0])
both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
row = temporal.iloc[0]
print(json.dumps(dict(cpu_s=sum(usage.ru_utime + usage.ru_stime for usage in both),
                      peak_mb=max(usage.ru_maxrss for usage in both) / 1e3,
                      linked_idle_ms=float(row["idle_time(us)"]) / 1e3)))
"""


def run(python: str, code: str) -> dict[str, float]:
    """One measurement in a process of its own."""
    alone = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    done = subprocess.run([python, "-c", code], env={**os.environ, **alone}, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"the run failed:\n{done.stderr[-2000:]}")
    return json.loads(lines[-1])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("traces", nargs="+", type=Path)
    options.add_argument("--rival-python", help="an interpreter that can import hta")
    options.add_argument("--no-msgspec", action="store_true", help="measure the reader of the standard library as well")
    options.add_argument("--repeats", type=int, default=3)
    given = options.parse_args()
    print("| trace | what | CPU-s | of it reading | peak MB | idle ms, all | idle ms, linked |")
    print("|---|---|---|---|---|---|---|")
    for trace in given.traces:
        _race(trace.resolve(), given)


def _race(path: Path, given: argparse.Namespace) -> None:
    def row(what: str, found: dict[str, float]) -> None:
        cells = [f"{found[key]:.2f}" if key in found else "" for key in ("cpu_s", "read_s")]
        cells += [f"{found['peak_mb']:.0f}"]
        cells += [f"{found[key]:.3f}" if key in found else "" for key in ("idle_ms", "linked_idle_ms")]
        print(f"| {path.name} | {what} | {' | '.join(cells)} |", flush=True)

    def ours(*, everything: bool = True, plain: bool = False, cache: bool = False) -> dict[str, float]:
        code = OURS.format(path=str(path), plain=plain, cache=cache, everything=everything)
        return min((run(sys.executable, code) for _ in range(given.repeats)), key=lambda found: found["cpu_s"])

    best = ours(everything=False)
    row("ridgeline, the same", best)
    row("ridgeline, everything", ours())
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RIDGELINE_CACHE"] = folder
        run(sys.executable, OURS.format(path=str(path), plain=False, cache=True, everything=False))
        row("ridgeline, everything, opened again", ours(cache=True))
        del os.environ["RIDGELINE_CACHE"]
    if given.no_msgspec:
        row("ridgeline without msgspec", ours(plain=True))
    if given.rival_python:
        rival = run(given.rival_python, RIVAL.format(path=str(path)))
        row("HolisticTraceAnalysis", rival)
        print(f"| {path.name} | ratio | {rival['cpu_s'] / best['cpu_s']:.1f}× | | "
              f"{rival['peak_mb'] / best['peak_mb']:.1f}× | | |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
