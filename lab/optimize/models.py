"""Real networks through ``rl.optimize`` on one GPU: eager, torch.compile and the result, with receipts.

Each model runs in a process of its own, several at a time, because most of a search is compilation. A process that is
not compiling holds a lock, so that no other uses the device. Results are written after every model, and every entry of
a search at once, to ``progress.jsonl``; a search that would run past the end gets less time:

    python -m lab.optimize.models --out OUT --total-s 290 --budget-s 35

A run with ``--warm`` before it, which may share the device, compiles everything and times nothing: Inductor and Triton
keep what they compile on disk. With ``--rival-first`` torch.compile and its capture come first. ``--tuned NAME …``
names models that are also timed beside max-autotune, which ``--warm`` then compiles in processes of its own.
``--again`` optimizes a second time, in the same process and in a new one that finds the result on disk.

After the search the result is timed again by an independent loop (same inputs every call, synchronized at both ends),
beside eager, and its output is compared with eager's. With ``--rivals`` eager, torch.compile and
torch.compile(mode="max-autotune") are timed on a second, fresh model, as far as the time allows. While others tune,
their kernels also run on the device: ``loop`` holds the lower quartile of rounds in turns, and ``median`` the median.
Further networks are in ``lab/optimize/zoo.py`` and ``lab/optimize/more_networks.py``.
"""

from __future__ import annotations

import argparse
import fcntl
import gzip
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MARK = "RESULT "
ENDING_S, LEAST_S = 15.0, 45.0
"""Seconds that a child needs after its search, and the least that a search needs."""
RIVALS = ("eager", "torch.compile", "max-autotune")
TUNE = "max-autotune of "
DEFAULT = (
    "bert-large-32x512", "llama8b-decode-1x2048", "resnet50-128", "vit-large-64", "llama8b-decode-static-1x2048",
    "bert-large-train-16x512", "dlrm-8192", "convnext-base-64", "llama8b-8l-prefill-1x2048", "gpt2-medium-train-8x512",
    "whisper-large-encoder-8", "dit-xl2-32", "t5-large-8x512", "qwen3moe-4l-prefill-2x1024", "bert-large-1x128",
    "llama1b-train-4x1024", "dit-xl2-train-16", "resnet50-train-64-nhwc", "swin-base-32", "efficientnet-b0-64",
    "mamba-370m-2x512", "dlrm-train-4096", "vit-base-train-64", "wav2vec2-large-4x160000",
)  # fmt: skip


def main() -> None:
    asked = _arguments()
    if asked.one:
        _child(asked)
    else:
        _parent(asked)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--total-s", type=float, default=290.0, help="Everything ends within this.")
    parser.add_argument("--budget-s", type=float, default=35.0, help="Of each search.")
    parser.add_argument("--models", nargs="*", default=list(DEFAULT))
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--again", action="store_true", help="Also time a second optimize of the same model.")
    parser.add_argument("--rivals", action="store_true", help="Also torch.compile and max-autotune, on a fresh model.")
    parser.add_argument("--untuned", action="store_true", help="Of the rivals not max-autotune, which takes minutes.")
    parser.add_argument("--tuned", nargs="*", default=[], help="Models beside which max-autotune is timed: --rivals.")
    parser.add_argument("--bare", action="store_true", help="No breakdowns of the result by kernels and parts.")
    parser.add_argument("--candidates", nargs="*", default=[], help="Try only these candidates, by name.")
    parser.add_argument("--rival-first", action="store_true", help="torch.compile and its recording before all others.")
    parser.add_argument("--warm", action="store_true", help="Only make candidates, for compilers to remember them.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--alone", choices=("", "tune", "reread"), default="", help=argparse.SUPPRESS)
    parser.add_argument("--lock", default="", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args()


# The parent starts one process per model.


def _parent(asked: argparse.Namespace) -> None:
    asked.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    lock = os.environ.get("RIDGELINE_DEVICE_LOCK") or str(Path(tempfile.mkdtemp()) / "device.lock")
    tuned = [TUNE + name for name in asked.tuned if asked.warm and name in asked.models]
    waiting, running, done = [*tuned, *asked.models], {}, []
    least_s = (10.0 if asked.warm else min(asked.budget_s, LEAST_S)) + ENDING_S
    while waiting or running:
        left_s = asked.total_s - (time.monotonic() - began)
        while waiting and len(running) < asked.jobs and left_s > least_s:
            name = waiting.pop(0)
            running[name] = (_started(name, asked, lock, began + asked.total_s), time.monotonic())
        if left_s < 4 or (not running and left_s <= least_s):
            break
        for name, (process, _) in list(running.items()):
            if process.poll() is not None:
                done.append(_collected(name, process))
                del running[name]
                _write(asked, done, began)
        time.sleep(0.2)
    for name, (process, _) in running.items():
        process.kill()
        process.wait()
        late = _collected(name, process)
        done.append(late if "loop" in late else {"model": name, "error": "out of time", "log": _log_of(process)})
    done += [{"model": name, "error": "not started: out of time"} for name in waiting]
    _write(asked, done, began)
    _print(done)


def _started(name: str, asked: argparse.Namespace, lock: str, until: float) -> subprocess.Popen[str]:
    plain = name.removeprefix(TUNE)
    command = [sys.executable, "-m", __spec__.name, "--one", plain, "--budget-s", str(asked.budget_s), "--lock", lock,
               "--device", asked.device, "--out", str(asked.out), "--until", str(until),
               *(f"--{name}" for name in ("again", "bare") if getattr(asked, name)),
               *(("--alone", "tune") if plain != name else ()),
               *(("--rivals",) if asked.rivals or plain in asked.tuned else ()),
               *(("--untuned",) if asked.untuned or (asked.tuned and plain not in asked.tuned) else ()),
               *(("--rival-first",) if asked.rival_first else ()), *(("--warm",) if asked.warm else ()),
               *(("--candidates", *asked.candidates) if asked.candidates else ())]  # fmt: skip
    threads = max(4, (os.cpu_count() or 8) // asked.jobs)
    settings = {"TORCHINDUCTOR_COMPILE_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2",
                "RIDGELINE_CACHE": tempfile.mkdtemp()}  # fmt: skip
    file = tempfile.TemporaryFile("w+")  # noqa: SIM115  (read when the process has ended)
    process = subprocess.Popen(
        command, stdout=file, stderr=subprocess.STDOUT, text=True, env={**os.environ, **settings}
    )
    process.kept = file  # type: ignore[attr-defined]
    return process


def _log_of(process: Any) -> str:
    process.kept.seek(0)
    return process.kept.read()[-3000:]


def _collected(name: str, process: Any) -> dict[str, Any]:
    process.kept.seek(0)
    text = process.kept.read()
    for line in reversed(text.splitlines()):
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    return {"model": name, "error": f"ended with {process.returncode}", "log": text[-3000:]}


def _write(asked: argparse.Namespace, done: list[dict[str, Any]], began: float) -> None:
    document = {"spent_s": time.monotonic() - began, "budget_s": asked.budget_s, "jobs": asked.jobs, "models": done}
    with gzip.open(asked.out / "optimize_models.json.gz", "wt", encoding="utf-8") as file:
        json.dump(document, file)
    print(f"{time.monotonic() - began:6.1f} s  {_line(done[-1])}" if done else "", flush=True)


def _line(found: dict[str, Any]) -> str:
    if "error" in found:
        return f"{found['model']:30} {found['error']}  {found.get('log', '')[-300:]!r}"
    loop = found["loop"]
    shown = "  ".join(f"{who} {s * 1e3:8.3f} ms" for who, s in loop.items())
    best = min([s for who, s in loop.items() if who != "ridgeline"])
    return (f"{found['model']:30} {shown}  best/ours {best / loop['ridgeline']:.3f}  {found['receipt']['winner']}  "
            f"search {found['optimize_s']:.1f} s  rms {found['rms']}{_second(found)}")  # fmt: skip


def _second(found: dict[str, Any]) -> str:
    """Seconds of a second search: in the same process, and in a new one including its first call."""
    anew = found.get("anew")
    told = f"  again {found['again_s']:.2f} s" if "again_s" in found else ""
    if isinstance(anew, dict) and "optimize_s" in anew:
        told += f", anew {anew['optimize_s']:.2f} s and {anew['calls_s'][0]:.2f} s for the first call"
    return told


def _print(done: list[dict[str, Any]]) -> None:
    good = [found for found in done if "loop" in found]
    for found in done:
        print(_line(found))
    for who, rivals in (("eager", RIVALS[:1]), ("best of eager and torch.compile", RIVALS[:2]),
                        ("best of all three", RIVALS)):  # fmt: skip
        full = [f for f in good if all(r in f["loop"] for r in rivals)]
        ratios = [min(f["loop"][r] for r in rivals) / f["loop"]["ridgeline"] for f in full]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            print(f"against {who}: geometric mean {mean:.3f}, worst {min(ratios):.3f}, {len(ratios)} models")


# A child builds one model, optimizes it and times the result.


class Turn:
    """A lock on the device, released while a process compiles, so that no other kernels run during its timings."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "w") if path else None  # noqa: SIM115  (held as long as the process lives)
        self.waited_s = 0.0

    def take(self) -> None:
        began = time.perf_counter()
        if self.file:
            fcntl.flock(self.file, fcntl.LOCK_EX)
        self.waited_s += time.perf_counter() - began

    def give(self) -> None:
        if self.file:
            fcntl.flock(self.file, fcntl.LOCK_UN)

    def without(self, work: Any) -> Any:
        """Run host-only ``work`` with the device released.

        Five children held it for six seconds each to import a compiler, price a model and partition it: a third of a
        call of 92 s.
        """

        def done(*args: Any, **kwargs: Any) -> Any:
            self.give()
            try:
                return work(*args, **kwargs)
            finally:
                self.take()

        return done

    def around(self, build: Any) -> Any:
        """``build`` of a candidate, with the device released while it compiles.

        Kernels that are autotuned at their first run are timed meanwhile, and other kernels may disturb them.
        """

        def built(candidate: Any, *args: Any, **kwargs: Any) -> Any:
            alone = not candidate.compiles or kwargs.get("base") is not None
            return (build if alone else self.without(build))(candidate, *args, **kwargs)

        return built


def _child(asked: argparse.Namespace) -> None:
    found: dict[str, Any] = {}
    work = {"": _measured, "tune": _tuned, "reread": _reread}[asked.alone]
    try:
        for found in work(asked):
            print(MARK + json.dumps(found), flush=True)
    except Exception as error:
        word = "rival_error" if "loop" in found else "error"
        trouble = {"model": asked.one, word: f"{type(error).__name__}: {error}"[:400]}
        print(MARK + json.dumps(found | trouble | {"log": traceback.format_exc()[-2500:]}), flush=True)


def _measured(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The results so far, again after each rival."""
    import torch

    import ridgeline as rl
    from ridgeline.engine.example_inputs import Inputs
    from ridgeline.optimizer.search import builds, order, prepare, stages, summary
    from ridgeline.optimizer.search import search as searching
    from ridgeline.optimizer.search.budget import Budget
    from ridgeline.optimizer.search.last_race import LastRace
    from ridgeline.optimizer.search.timing import Track

    turn = Turn("" if asked.warm else asked.lock)
    work = built(asked.one, asked.device)
    inputs = Inputs(work["args"], work["kwargs"])
    builds.build = turn.around(builds.build)
    prepare.forecast = turn.without(prepare.forecast)
    prepare.substitutable = turn.without(prepare.substitutable)
    left_s = Budget.left_s
    for name in searching.COMPILERS:
        importlib.import_module(name)
    turn.take()
    turn.waited_s = 0.0
    until = asked.until or time.monotonic() + 10 * asked.budget_s

    def left(budget: Any) -> float:  # time spent waiting for the lock does not count
        return min(left_s(budget) + turn.waited_s, until - ENDING_S - time.monotonic())

    Budget.left_s = left
    searching.Search.record = _told(asked, searching.Search.record)
    searching.Search.accept = _log_accepted(asked, searching.Search.accept)
    if asked.rival_first:
        order.Stages.proposals = _rival_first(order.Stages.proposals)
    if asked.candidates:
        order.Stages.proposals = _only(frozenset(asked.candidates), order.Stages.proposals)
    if asked.warm:
        searching.Search.judge, LastRace.last_race = _unjudged, _warmed
        _replace_stage(stages.without_kernels, _as_if_behind(stages.without_kernels))
    tables: dict[str, Any] = {}
    summary.regions_of = _with_tables(summary.regions_of, tables)
    if asked.bare:
        searching.regions = searching.parts = lambda search, *ignored: ()
    began = time.perf_counter()
    fast = rl.optimize(work["model"], work["args"], work["kwargs"], mode=work["mode"], budget_s=asked.budget_s)
    optimize_s = time.perf_counter() - began - turn.waited_s
    track = Track(work["model"], inputs, work["mode"], None, torch.device(asked.device))
    track.settle(work["model"])
    track.copies = [inputs]
    loop, peaks = _loop(track, {"eager": work["model"], "ridgeline": fast})
    rms = _distance(track, work["model"], fast, inputs) if work["mode"] == "infer" else None
    found = {
        "model": asked.one, "mode": work["mode"], "loop": loop, "peak_bytes": peaks, "rms": rms,
        "optimize_s": optimize_s, "receipt": fast.receipt.to_dict(), "text": str(fast.receipt),
        "fallbacks": type(fast).fallbacks.fget(fast) if hasattr(type(fast), "fallbacks") else {},
    }  # fmt: skip
    found |= {"contests": _contests(), "kernels": tables}
    turn.give()
    yield found
    if asked.rivals:
        yield from _with_rivals(asked, found, track, fast, turn)
    if asked.again:
        del fast
        began = time.perf_counter()
        rl.optimize(work["model"], work["args"], work["kwargs"], mode=work["mode"], budget_s=asked.budget_s)
        found["again_s"] = time.perf_counter() - began
        yield found
        yield found | {"anew": _in_a_new_process(asked, turn)}


def _tuned(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compile max-autotune of one model, so that the next process finds it on disk."""
    import torch

    work = built(asked.one, asked.device)
    began = time.perf_counter()
    call = torch.compile(work["model"], mode="max-autotune")
    with torch.no_grad():
        for _ in range(2):
            call(*work["args"], **work["kwargs"])
    yield {"model": TUNE + asked.one, "error": f"made in {time.perf_counter() - began:.1f} s"}


def _in_a_new_process(asked: argparse.Namespace, turn: Turn) -> Any:
    """The time of a new process that finds the result on disk, alone on the device."""
    command = [sys.executable, "-m", __spec__.name, "--one", asked.one, "--alone", "reread",
               "--budget-s", str(asked.budget_s), "--device", asked.device]  # fmt: skip
    turn.take()
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    finally:
        turn.give()
    lines = [line for line in told.splitlines() if line.startswith(MARK)]
    return json.loads(lines[-1].removeprefix(MARK)) if lines else told[-1000:]


def _reread(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    import torch

    import ridgeline as rl

    work = built(asked.one, asked.device)
    inputs = work["args"], work["kwargs"]
    marks = [time.perf_counter()]
    with torch.no_grad():
        fast = rl.optimize(work["model"], *inputs, mode=work["mode"], budget_s=asked.budget_s)
        marks.append(time.perf_counter())
        for _ in range(3):
            fast(*inputs[0], **inputs[1])
            if asked.device != "cpu":
                torch.cuda.synchronize()
            marks.append(time.perf_counter())
    spent_s = [after - before for before, after in pairwise(marks)]
    yield {"model": asked.one, "optimize_s": spent_s[0], "calls_s": spent_s[1:], "winner": fast.receipt.winner,
           "remembered": fast.receipt.cached, "notes": list(fast.receipt.notes)}  # fmt: skip


def _contests() -> dict[str, Any]:
    """Milliseconds of every implementation in races at first runs, by rewrite and problem."""
    from ridgeline.optimizer.in_place import padded_linear as padding
    from ridgeline.optimizer.rewrites.attention import short_sequences as short
    from ridgeline.optimizer.rewrites.attention import window_bias as shifted
    from ridgeline.optimizer.rewrites.conv import batch_norm_epilogue as pointwise
    from ridgeline.optimizer.rewrites.conv import elementwise_epilogue as chains
    from ridgeline.optimizer.rewrites.conv import positional_conv as positions
    from ridgeline.optimizer.rewrites.conv import resize as resizes
    from ridgeline.optimizer.rewrites.conv import stem as stems
    from ridgeline.optimizer.rewrites.linear import activation_epilogue as epilogue
    from ridgeline.optimizer.rewrites.rows import index_add as sums
    from ridgeline.optimizer.rewrites.rows import top_k

    raced = (chains, epilogue, padding, pointwise, positions, resizes, shifted, short, stems, sums, top_k)
    return {
        module.__name__.rpartition(".")[2]: {
            str(key): {way: round(1e3 * seconds, 4) for way, seconds in found.items()}
            for key, found in module.CONTEST.seconds.items()
        }
        for module in raced
    }


def _only(wanted: frozenset[str], proposals: Any) -> Any:
    """The candidates asked for and the plain capture, which costs a second; all others are recorded as skipped."""
    from ridgeline.optimizer.backend import Report
    from ridgeline.optimizer.search.candidate import Built

    def chosen(stages: Any, search: Any) -> Iterator[Any]:
        for proposal in proposals(stages, search):
            if proposal.candidate.name in wanted or proposal.candidate.name in ("graph", "graph, guessing"):
                yield proposal
            else:
                search.record(Built(proposal.candidate, search.problem.model, Report()), "skipped", "not asked for")

    return chosen


def _unjudged(search: Any, built: Any, proposal: Any) -> None:
    """Replace the race by releasing the candidate: with --warm it is only compiled."""
    search.record(built, "slower", "made, not timed")
    built.release()


def _warmed(search: Any) -> Any:
    """End the process without clean-up: with --warm the compiled code is all it is for."""
    os._exit(0)

def _replace_stage(old: Any, new: Any) -> None:
    """Replace what a stage proposes, for every search of this process."""
    from dataclasses import replace

    from ridgeline.optimizer.search import order

    for name in ("INFERENCE", "TRAINING"):
        kept = (replace(stage, propose=new) if stage.propose is old else stage for stage in getattr(order, name))
        setattr(order, name, tuple(kept))


def _as_if_behind(without: Any) -> Any:
    """Propose what is proposed where torch.compile leads: with --warm nothing is timed, so nothing does."""

    def made(make: Any, search: Any) -> Iterator[Any]:
        before, proposals = search.best, without(make, search)
        search.best = SimpleNamespace(candidate=SimpleNamespace(is_stock=True))
        try:
            first = next(proposals, None)
        finally:
            search.best = before
        if first is not None:
            yield first
            yield from proposals

    return made


def _rival_first(proposals: Any) -> Any:
    """Propose torch.compile and its capture before anything else is compiled."""
    from ridgeline.optimizer.search.stages import torch_compile

    def ordered(stages: Any, search: Any) -> Iterator[Any]:
        for proposal in proposals(stages, search):
            if proposal.candidate.compiles and "torch.compile" not in search.entries:
                yield from torch_compile(stages.make, search)
            if not proposal.candidate.compiler.startswith("stock") or proposal.candidate.name not in search.entries:
                yield proposal

    return ordered


def _log_accepted(asked: argparse.Namespace, accept: Any) -> Any:
    """Append every accepted candidate to progress.jsonl, with its measured speedup over the best before it."""

    def logged(search: Any, built: Any, against: Any, *rest: Any) -> None:
        found = {"model": asked.one, "name": built.candidate.name, "status": "leads", "speedup": against.speedup,
                 "reason": f"of {search.best.candidate.name}", "low": against.low, "high": against.high}  # fmt: skip
        with open(asked.out / "progress.jsonl", "a") as file:
            file.write(json.dumps(found) + "\n")
        accept(search, built, against, *rest)

    return logged


def _told(asked: argparse.Namespace, note: Any) -> Any:
    """Also append every recorded entry to a file, which outlives the process."""
    began = time.perf_counter()

    def noted(search: Any, built: Any, status: str, reason: str, **given: Any) -> None:
        note(search, built, status, reason, **given)
        entry = search.entries[built.candidate.name]
        found = {"model": asked.one, "at_s": round(time.perf_counter() - began, 1), "name": entry.name,
                 "status": status, "reason": reason[:200], "measured_s": entry.measured_s, "build_s": entry.build_s,
                 "speedup": entry.speedup, "left_s": round(search.budget.left_s(), 1)}  # fmt: skip
        with open(asked.out / "progress.jsonl", "a") as file:
            file.write(json.dumps(found) + "\n")

    return noted


def _with_rivals(asked: argparse.Namespace, found: dict[str, Any], track: Any, fast: Any, turn: Turn) -> Iterator[Any]:
    """Repeat the loop beside a fresh model after each rival is compiled; the device is released meanwhile, which may
    disturb the measurements of max-autotune."""
    import torch

    from ridgeline.engine.example_inputs import Inputs
    from ridgeline.optimizer.search.timing import Track

    fresh = built(asked.one, asked.device)
    other = Track(fresh["model"], Inputs(fresh["args"], fresh["kwargs"]), fresh["mode"], None, track.device)
    contenders = {"ridgeline": (track, fast), "eager": (other, fresh["model"])}
    tunes = fresh["mode"] == "infer" and not asked.untuned
    modes = {"torch.compile": None} | ({"max-autotune": "max-autotune"} if tunes else {})
    other.settle(fresh["model"])
    other.copies = [other.inputs]
    for who, mode in modes.items():
        began = time.perf_counter()
        call = torch.compile(fresh["model"], mode=mode)
        for _ in range(3):
            other.turn_s(call, 1)
        contenders[who] = (other, call)
        turn.take()
        loop, median = _turns(contenders)
        tables = {name: _kernels(*contenders[name]) for name in (who, "ridgeline")}
        turn.give()
        found = found | {"loop": loop, "median": median, f"{who} compile_s": time.perf_counter() - began}
        found["kernels"] = found.get("kernels", {}) | tables
        yield found


def _with_tables(regions_of: Any, tables: dict[str, Any]) -> Any:
    """The breakdown at the end of a search, with kernel tables of torch.compile and of the result."""

    def asked(track: Any, eager: Any, best: Any, stock: Any) -> Any:
        for who, each in {"ridgeline": best, "torch.compile": stock}.items():
            if each is not None:
                with each.switched() as call:
                    tables[who] = _kernels(track, call)
        return regions_of(track, eager, best, stock)

    return asked


def _kernels(track: Any, call: Any, num: int = 40) -> list[tuple[str, int, float]] | str:
    """Kernels of one call: name, count, total microseconds; the longest first."""
    import torch

    from ridgeline.bench.clock import device_events

    if track.device.type != "cuda":
        return "no device"
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            track.turn_s(call, 1)
        total_s: dict[str, list[float]] = {}
        for _, name, seconds in device_events(profile):
            total_s.setdefault(name[:140], []).append(seconds)
    except Exception as error:  # a table that fails leaves the timings
        return f"{type(error).__name__}: {error}"[:200]
    ordered = sorted(total_s.items(), key=lambda item: -sum(item[1]))[:num]
    return [(name, len(each), round(1e6 * sum(each), 2)) for name, each in ordered]


def _turns(contenders: dict[str, tuple[Any, Any]]) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds per call of each on its own harness: lower quartile and median of rounds in turns."""
    rounds: dict[str, list[float]] = {who: [] for who in contenders}
    for track, call in contenders.values():
        track.turn_s(call, 1)
    for _ in range(15):
        for who, (track, call) in contenders.items():
            rounds[who].append(track.turn_s(call, 1 if track.mutates else 5))
    low = {who: statistics.quantiles(found, n=4)[0] for who, found in rounds.items()}
    return low, {who: statistics.median(found) for who, found in rounds.items()}


def _loop(track: Any, contenders: dict[str, Any]) -> tuple[dict[str, float], dict[str, int | None]]:
    """Seconds per call in a plain loop, median of rounds in turns; and peak memory."""
    for call in contenders.values():
        for _ in range(2):
            track.turn_s(call, 1)
    rounds: dict[str, list[float]] = {who: [] for who in contenders}
    for _ in range(9):
        for who, call in contenders.items():
            rounds[who].append(track.turn_s(call, 1 if track.mutates else 5))
    peaks = {who: _peak(track, call) for who, call in contenders.items()}
    return {who: statistics.median(found) for who, found in rounds.items()}, peaks


def _peak(track: Any, call: Any) -> int | None:
    import torch

    if track.device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    track.turn_s(call, 1)
    return torch.cuda.max_memory_allocated()


def _distance(track: Any, eager: Any, fast: Any, inputs: Any) -> float:
    """Root mean square distance of the outputs over eager's own size."""
    import torch

    from ridgeline.engine.example_inputs import leaves

    track.restore()
    ready = [inputs.reused(), inputs.reused()]
    with torch.no_grad():
        first = [
            t.float().clone() for _, t in leaves(eager(*ready[0].args, **ready[0].kwargs)) if t.is_floating_point()
        ]
        track.restore()
        second = [t.float() for _, t in leaves(fast(*ready[1].args, **ready[1].kwargs)) if t.is_floating_point()]
    track.restore()
    pairs = [float((a - b).norm() / a.norm().clamp(min=1e-30)) for a, b in zip(first, second, strict=True)]
    return max(pairs)


def built(name: str, device: str) -> dict[str, Any]:
    """The model on the device, with its inputs."""
    import torch

    from lab import workloads
    from lab.optimize import more_networks  # noqa: F401  (adds to the zoo)
    from lab.optimize import zoo as optimize_zoo

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        if name in EXTRA:
            model, args, kwargs, mode = EXTRA[name]()
        elif name in optimize_zoo.ZOO:
            (model, args, kwargs), mode = optimize_zoo.ZOO[name](), "infer"
        else:
            work = workloads.WORKLOADS[name]
            model, args, kwargs = work.build()
            mode = work.mode
    torch.set_default_dtype(torch.float32)
    model = model.to(device)
    return {"model": model.train() if mode == "train" else model.eval(), "args": args, "kwargs": kwargs, "mode": mode}


def _static_decode() -> tuple[Any, tuple[Any, ...], dict[str, Any], str]:
    import torch
    from transformers import StaticCache

    from lab import workloads

    model = workloads._llama(32)
    cache = StaticCache(config=model.config, max_cache_len=2112)
    length = 2048
    for layer in range(model.config.num_hidden_layers):
        keys, values = torch.randn(2, 1, 8, length, 128).unbind(0)
        cache.update(keys, values, layer, {"cache_position": torch.arange(length)})
    kwargs = {
        "input_ids": torch.randint(0, 1000, (1, 1)),
        "position_ids": torch.full((1, 1), length, dtype=torch.int64),
        "cache_position": torch.tensor([length]),
        "past_key_values": cache,
        "use_cache": True,
    }
    return model, (), kwargs, "infer"


def _prefill() -> tuple[Any, tuple[Any, ...], dict[str, Any], str]:
    """A prefill as in generation: the cache is returned with the logits."""
    import torch

    from lab import workloads

    return workloads._llama(32), (), {"input_ids": torch.randint(0, 128256, (1, 2048))}, "infer"


def _mamba() -> tuple[Any, tuple[Any, ...], dict[str, Any], str]:
    import torch
    from transformers import MambaConfig, MambaModel

    model = MambaModel(MambaConfig(hidden_size=1024, num_hidden_layers=8, vocab_size=50280))
    return model, (), {"input_ids": torch.randint(0, 50280, (2, 512)), "use_cache": False}, "infer"


EXTRA = {
    "llama8b-decode-static-1x2048": _static_decode,
    "llama8b-prefill-1x2048": _prefill,
    "mamba-370m-2x512": _mamba,
}


def _tiny(kind: str) -> Any:
    """Networks for a machine without a GPU, to test this script."""
    import torch
    from torch import nn

    def make() -> tuple[Any, tuple[Any, ...], dict[str, Any], str]:
        layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64)) for _ in range(3)]
        return nn.Sequential(*layers), (torch.randn(8, 64),), {}, kind

    return make


EXTRA |= {"tiny": _tiny("infer"), "tiny-train": _tiny("train")}

if __name__ == "__main__":
    main()
