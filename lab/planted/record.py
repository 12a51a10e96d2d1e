"""Injects causes, measures what fixing them brings, and records traces of both; one command for a GPU machine.

    python -m lab.planted record --out FOLDER --budget 400 --suite planted
    python -m lab.planted record --out FOLDER --budget 100 --cases NAME... --warm-first 30 --timed-frac 0.8

Writes ``timings.json.gz`` (step times of every case, planted and fixed) and ``traces.tar`` (reduced Kineto traces, xz).
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

from lab import ROOT
from lab.planted.shrink import shrink, shrink_log

CASE_LIMIT_S = 75.0
TIMED_FRAC = 0.6
"""Of the budget, at most, for step times."""
SPARES = 3
"""Processes that have imported everything: importing takes ten seconds on a slow host."""


class Phase:
    """One kind of measurement over all cases, in a child that is replaced when a case hangs or kills it."""

    def __init__(self, name: str, folder: Path, args: argparse.Namespace, end_s: float) -> None:
        self.name, self.folder, self.args, self.end_s = name, folder, args, end_s
        self.log, self.read = folder / f"{name}.jsonl", 0
        self.done: dict[str, dict[str, Any]] = {}
        self.current, self.since_s = "", time.time()
        self.ready: list[tuple[Path, subprocess.Popen[bytes]]] = []

    def prepare(self, num: int = 1) -> None:
        """Start children that import what they need, and wait to be told their cases: they open no device before. The
        next one takes over at once where a case hangs or kills the one before."""
        for i in range(num):
            awaited = self.folder / f"{self.name}.awaited{i}"
            self.ready.append((awaited, self._start([], "--after", str(awaited))))

    def _begin(self, cases: list[str]) -> subprocess.Popen[bytes]:
        if not self.ready:
            return self._start(cases)
        awaited, child = self.ready.pop(0)
        partial = awaited.with_suffix(".part")
        partial.write_text(" ".join(cases))
        partial.rename(awaited)
        self.current, self.since_s = "", time.time()
        return child

    def end(self) -> None:
        """Nothing waits any longer."""
        for _, child in self.ready:
            self._stop(child)
        self.ready = []

    def run(self, on_done: Any) -> None:
        left = list(self.args.cases)
        while left and time.time() < self.end_s:
            child, before = self._begin(left), len(self.done)
            while child.poll() is None and not self._overdue():
                time.sleep(0.2)
                self._collect(on_done)
            if child.poll() is None:
                self._stop(child)
            self._collect(on_done)
            died = self.current or (left[0] if len(self.done) == before else "")
            if died and (child.returncode or time.time() > self.end_s):
                self.done.setdefault(died, {"event": "failed", "error": "killed, crashed or out of time"})
            left = [name for name in left if name not in self.done]

    def _start(self, cases: list[str], *more: str) -> subprocess.Popen[bytes]:
        env = os.environ | _caches(self.args.cache or tempfile.mkdtemp(dir=self.folder))
        if self.name == "trace":
            env["TORCH_TRACE"] = str(self.folder / "torch_trace")
        self.current, self.since_s = "", time.time()
        command = [sys.executable, "-m", "lab.planted.measure", self.name, *cases, "--folder", str(self.folder), *more]
        command += ["--device", self.args.device] + (["--tiny"] if self.args.tiny else [])
        output = (self.folder / f"{self.name}.out").open("ab")
        return subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)

    def _overdue(self) -> bool:
        return time.time() > self.end_s or time.time() - self.since_s > self.args.case_limit

    def _stop(self, child: subprocess.Popen[bytes]) -> None:
        """The child and its loader workers are one session: they end together."""
        os.killpg(child.pid, 9)
        child.wait()

    def _collect(self, on_done: Any) -> None:
        lines = self.log.read_text().splitlines()[self.read :] if self.log.exists() else []
        for line in lines:
            self.read += 1
            fact = json.loads(line)
            self.current, self.since_s = (fact["case"] if fact["event"] == "began" else ""), time.time()
            if fact["event"] in ("done", "failed"):
                self.done[fact["case"]] = fact
                took = f"{fact.get('case_s', 0):.1f} s"
                print(f"{self.name:6} {fact['case']:28} {fact['event']} {took} {fact.get('error', '')}", flush=True)
                on_done(fact)


def main() -> None:
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="planted-"))
    began = time.time()
    if args.warm:
        _warm(args, folder, _compiling(args.cases), args.budget)
        return
    timed_s = args.warm_first + (args.budget - args.warm_first) * args.timed_frac
    timing = Phase("time", folder, args, began + timed_s)
    tracing = Phase("trace", folder, args, began + args.budget * 0.97)
    if args.warm_first:
        _warm_first(args, folder, timing)
    tracing.prepare()
    timing.run(lambda fact: _write_timings(args, timing.done, {}))
    timing.end()
    args.cases = [name for name in args.cases if timing.done.get(name, {}).get("traced")]
    with ProcessPoolExecutor(6) as pool:
        jobs: list[Future[int]] = []
        tracing.run(lambda fact: jobs.extend(_shrink_jobs(pool, folder, fact, timing.done)))
        for job in jobs:
            job.result()
    tracing.end()
    _pack(args, folder)
    _write_timings(args, timing.done, tracing.done)
    print(_table(timing.done, tracing.done))
    shutil.rmtree(folder, ignore_errors=True)


def _caches(folder: Path | str) -> dict[str, str]:
    return {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}


def _asked(expression: str) -> list[str]:
    """Names from the registry; asked in a child, so that this process never imports torch."""
    code = f"import lab.planted.cases; from lab.planted.registry import CASES; print(*({expression}))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return found.stdout.split()


def _compiling(cases: list[str]) -> list[str]:
    known = _asked("name for name, case in CASES.items() if case.compiles")
    return [name for name in cases if name in known]


def _of_suites(suites: list[str]) -> list[str]:
    return _asked(f"name for name, case in CASES.items() if case.suite in {suites!r}")


def _warm_first(args: argparse.Namespace, folder: Path, timing: Phase) -> None:
    """Fills the cache while nothing is timed, and imports meanwhile; what did not get ready is timed last, so that it
    takes nothing from the others. Which programs compile is known once they are imported: those that do not are ready
    then."""
    args.cache = args.cache or folder / "cache"
    timing.prepare(SPARES)
    ready = _warm(args, folder, args.cases, args.warm_first)
    args.cases.sort(key=lambda name: name not in ready)


def _warm(args: argparse.Namespace, folder: Path, cases: list[str], seconds: float) -> list[str]:
    """A process for each program; what is not ready in time is ended. Those that are."""
    more = ["--folder", str(folder), "--device", args.device] + (["--tiny"] if args.tiny else [])
    children = {}
    for name in cases:
        command = [sys.executable, "-m", "lab.planted.measure", "warm", name, *more]
        children[name] = subprocess.Popen(command, env=os.environ | _caches(args.cache), start_new_session=True)
    end_s = time.time() + seconds
    for name, child in children.items():
        try:
            child.wait(max(0.1, end_s - time.time()))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
        print(f"warm   {name:28} {child.wait()}", flush=True)
    notes = (folder / "warm.jsonl").read_text() if (folder / "warm.jsonl").exists() else ""
    print(notes or "nothing got ready")
    facts = [json.loads(line) for line in notes.splitlines() if line.endswith("}")]
    return [fact["case"] for fact in facts if fact["event"] == "done"]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=400.0, help="seconds for everything")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the control flow")
    parser.add_argument("--suite", nargs="+", default=["planted"], help="tags of the cases to record")
    parser.add_argument("--case-limit", type=float, default=CASE_LIMIT_S, help="seconds for one case")
    parser.add_argument("--cache", type=Path, help="where compiled code is kept (not where compiling is timed)")
    parser.add_argument("--warm", action="store_true", help="only fill the cache, all programs side by side")
    parser.add_argument("--warm-first", type=float, default=0.0, help="seconds of the budget to fill the cache in")
    parser.add_argument("--timed-frac", type=float, default=TIMED_FRAC, help="of what is left, for step times")
    parser.add_argument("--cases", nargs="+", help="these alone, in place of a suite")
    args = parser.parse_args()
    args.cases = args.cases or _of_suites(args.suite)
    return args


def _shrink_jobs(
    pool: ProcessPoolExecutor, folder: Path, fact: dict[str, Any], timed: dict[str, Any]
) -> list[Future[int]]:
    if fact["event"] != "done":
        return []
    jobs = []
    for variant in (name for name in ("planted", "fixed", "stack", "plain", "planted-plain") if name in fact):
        source = folder / fact[variant]["file"]
        first = "planted" if "planted" in fact else "fixed"
        of = {"stack": first, "plain": "fixed", "planted-plain": "planted"}.get(variant, variant)
        facts = {
            "unprofiled_step_s": timed[fact["case"]][of]["median_s"],
            "unprofiled_spread_s": (timed[fact["case"]][of]["high_s"] - timed[fact["case"]][of]["low_s"]) / 2,
            "profiled_step_s": fact[variant]["profiled_mean_s"],
            "python_stack": variant == "stack",
            "clock_hz": timed[fact["case"]][of]["clock_hz"],
            "energy_j": timed[fact["case"]][of]["energy_j"],
            **fact[of]["facts"],
        }
        jobs.append(pool.submit(shrink, source, folder / f"{source.name}.xz", facts))
    return jobs


def _pack(args: argparse.Namespace, folder: Path) -> None:
    with tarfile.open(args.out / "traces.tar", "w") as tar:
        for path in sorted(folder.glob("*.json.xz")):
            tar.add(path, arcname=path.name)
        for path in sorted((folder / "torch_trace").glob("*.log")) if (folder / "torch_trace").exists() else []:
            short = path.with_suffix(".short")
            short.write_text(shrink_log(path))
            _add_small(tar, short, f"torch_trace/{path.name}.gz")
        snapshot = folder / "memory_snapshot.pickle"
        if snapshot.exists():
            _add_small(tar, snapshot, "memory_snapshot.pickle.gz")
        for name in ("time.out", "trace.out"):
            if (folder / name).exists():
                _add_small(tar, folder / name, f"{name}.gz")


def _add_small(tar: tarfile.TarFile, path: Path, name: str, limit_bytes: int = 1_500_000) -> None:
    packed = path.parent / (path.name + ".gz")
    packed.write_bytes(gzip.compress(path.read_bytes(), 9))
    if packed.stat().st_size <= limit_bytes:
        tar.add(packed, arcname=name)


def _write_timings(args: argparse.Namespace, timed: dict[str, Any], traced: dict[str, Any]) -> None:
    with gzip.open(args.out / "timings.json.gz", "wt") as out:
        json.dump({"environment": _environment(), "timed": timed, "traced": traced}, out)


def _environment() -> dict[str, Any]:
    """What the children ran on; asked in a child, so that this process never opens the device."""
    if not _KNOWN:
        _KNOWN.update(json.loads(subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True).stdout))
    return _KNOWN | {"python": sys.version.split()[0], "num_cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d")}


ASK = """
import json, torch
there = torch.cuda.is_available()
name = torch.cuda.get_device_name() if there else "cpu"
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "device": name}))
"""
_KNOWN: dict[str, Any] = {}


def _table(timed: dict[str, Any], traced: dict[str, Any]) -> str:
    head = f"{'case':28} {'cause':34} {'planted':>9} {'fixed':>9} {'gain':>9} {'profiled':>9} traced"
    rows = [_row(name, fact, traced.get(name, {})) for name, fact in timed.items()]
    done = [fact for fact in timed.values() if fact["event"] == "done" and "planted" in fact]
    gains = [fact["planted"]["median_s"] / fact["fixed"]["median_s"] for fact in done]
    foot = f"{len(gains)} cases, median speedup {statistics.median(gains):.2f}×" if gains else "no case"
    return "\n".join([head, *rows, foot])


def _row(name: str, fact: dict[str, Any], traced: dict[str, Any]) -> str:
    if fact["event"] != "done":
        return f"{name:28} failed: {fact.get('error', '')[:90]}"
    fixed = fact["fixed"]["median_s"] * 1e3
    planted = fact.get("planted", fact["fixed"])["median_s"] * 1e3
    profiled = traced.get("planted", traced.get("fixed", {})).get("profiled_mean_s", float("nan")) * 1e3
    figures = "  ".join(f"{value:8.2f}" for value in (planted, fixed, planted - fixed, profiled))
    return f"{name:28} {fact['cause']:34} {figures}  {traced.get('event', 'no')} {traced.get('error', '')[:60]}"


if __name__ == "__main__":
    main()
