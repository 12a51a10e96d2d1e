"""Training steps through ``rl.optimize`` on one GPU beside eager and ``torch.compile``: time, memory, candidates.

    python -m lab.optimize.train --out OUT --total-s 150 --budget-s 60 --jobs 4 --brief
    python -m lab.optimize.train --out OUT --only drift vit-base-train-64

Each model is searched in a process of its own, while another compiles it with ``torch.compile``'s default settings.
Several models run side by side; a process that is not compiling holds the device alone, and cores on which nothing
compiles. Then both alternate: whole steps in a plain loop (clearing gradients, forward, loss, backward, optimizer step)
of eager and ``torch.compile`` with the given optimizer; of the result with the optimizer passed to the search, called
in the same loop, through ``train_step``, and in a loop that clears gradients after the forward; and of the result with
an optimizer that no search has seen. If the result is eager or ``torch.compile`` itself, that is also timed in the
searching process, because two processes with the same code may differ by a few percent. Memory is the most that a step
allocates and reserves, weights and optimizer state included: of eager before the search, of the result after it.
``--brief`` leaves out of the searches: ``torch.compile`` for models of repeated blocks (it is measured beside them),
candidates that tune kernels, the breakdown by kernel and part, and one of the two runs of fifty steps. Models after
``--full`` are searched with the defaults: 120 s, ``torch.compile`` inside, nothing compiled by another process.

Models get the device in the order of their names on the command line, so that rows are finished one after another.
``--ahead`` processes compile ``torch.compile`` of the next models meanwhile, each within ``--rival-s``. ``--warm`` only
compiles it, keeps Inductor's results in ``--cache`` and may share the device; a run with the same ``--cache`` loads
them. ``--thrifty`` is brief, leaves out additional loops, gives each search the time it can still use, and lets it try
``torch.compile`` at the price of loading it. ``--few`` tries only the plain capture, ``torch.compile`` with and without
capture, and captured blocks, and prices nothing. ``--recorded`` adds ``torch.compile(mode="reduce-overhead")`` if
``--warm`` compiled it.

``steps`` are AdamW's alone. ``memory`` is what captures reserve beside eager steps, with fixed and with expandable
segments, and whether their gradients equal eager's. ``drift`` is that of fifty steps of GPT-2 from the same weights:
eager beside eager, beside eager from weights perturbed by one rounding step, and beside captured steps, with PyTorch's
usual and with deterministic kernels; with it come linear layers of odd sizes, plain and padded, forward and backward.
Everything is written as it is found.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab import ROOT
from lab.optimize import models as optimize_models

MARK = "RESULT "
DRIFT, STEPS, MEMORY, STOCK = "drift", "steps", "memory", "stock:"
ALONE = (DRIFT, STEPS, MEMORY)
DEFAULT = (STEPS, "gpt2-medium-train-8x512", "resnet50-train-64-nhwc", "bert-large-train-16x512",
           "llama1b-train-4x1024", "vit-base-train-64", "dit-xl2-train-16", "t5-base-train-8x512",
           "convnext-tiny-train-64", "qwen3moe-4l-train-2x1024", "dlrm-train-4096", "efficientnet-b0-train-64",
           "whisper-base-train-8", DRIFT)  # fmt: skip
LEAST_S, RIVALS_S, LAST_S = 35.0, 25.0, 12.0
THRIFTY_S = (12.0, 10.0, 6.0)
"""The least seconds for a search, those reserved after it, and those for the last rounds."""
LOADED_FRAC = 0.6
"""Time of ``torch.compile`` with its kernels on disk, as a share of the first time."""
RECORDED = "torch.compile recorded"
HERE_TOO = ", same process"
LEAST_CORES, TIMING_CORES = 12, 4
"""On machines with so many cores, those reserved for the process that holds the device."""
PHASES = ("prepare", "made", "_peak_bytes", "race", "prove", "recapture", "prove_without_dropout", "prove_in_training",
          "last_race", "regions", "parts", "_settle_winner", "facts_of")  # fmt: skip
ODD = ((4096, 1024, 50257), (8192, 1024, 30522), (4096, 1280, 51866), (8192, 479, 1024))
"""Rows, inputs and outputs of linear layers of odd sizes: the heads of GPT-2, BERT and Whisper, a layer of DLRM."""
ROUNDS = 5
WARM_S, TURN_S, MOST_STEPS = 0.03, 0.1, 100
"""Seconds of warm-up and of measurement per turn, and the most steps of either."""
POLL_S = 0.002
WRITTEN_S = 5.0
"""Seconds between writes of intermediate results."""
FULL_S = 120.0
"""The default budget."""


def main() -> None:
    asked = _arguments()
    if asked.table:
        print("\n".join(_table(asked.table)))
    elif asked.one:
        _child(asked)
    else:
        _parent(asked)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--total-s", type=float, default=150.0, help="Everything ends within this.")
    parser.add_argument("--budget-s", type=float, default=95.0, help="Of each search.")
    parser.add_argument("--only", nargs="*", default=list(DEFAULT))
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="Of the turns in the end.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--brief", action="store_true",
                        help="Searches over repeated blocks leave torch.compile out; no breakdowns.")  # fmt: skip
    parser.add_argument("--thrifty", action="store_true", help="Brief, and only the loops that rows are made of.")
    parser.add_argument("--few", action="store_true", help="Searches try recordings, torch.compile and blocks alone.")
    parser.add_argument("--ahead", type=int, default=0, help="torch.compile is made of so many models at once.")
    parser.add_argument("--rival-s", type=float, default=1e9, help="Seconds to make torch.compile of a model.")
    parser.add_argument("--warm", action="store_true", help="Only make torch.compile of each model, into --cache.")
    parser.add_argument("--cache", type=Path, default=None, help="Inductor's results, kept from run to run.")
    parser.add_argument("--recorded", action="store_true", help="Also torch.compile with reduced overhead.")
    parser.add_argument("--kinds", action="store_true", help="Brief searches still break times down by kind of kernel.")
    parser.add_argument("--full", nargs="*", default=[], help="Models searched with the default budget, not briefly.")
    parser.add_argument("--table", type=Path, default=None, help="Only print what a file of results says.")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--lock", default="", help=argparse.SUPPRESS)
    parser.add_argument("--marks", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.brief |= asked.thrifty
    asked.least_s, asked.rivals_s, asked.last_s = THRIFTY_S if asked.thrifty else (LEAST_S, RIVALS_S, LAST_S)
    return asked


# The parent starts one process per part, and keeps what each has written even if it is killed.


def _parent(asked: argparse.Namespace) -> None:
    asked.out.mkdir(parents=True, exist_ok=True)
    crew = Crew(asked)
    while (crew.any_waits() or crew.running) and crew.left_s() >= 3:
        crew.start()
        if not crew.running:
            break
        crew.collect()
        time.sleep(0.2)
    crew.end()
    if not asked.warm:
        print("\n".join(_table(asked.out / "optimize_train.json.gz")), flush=True)


class Crew:
    """The processes of a run: waiting, running since when, and the results of those that ended.

    Searches start in the order in which models are named, ``--jobs`` at once; the processes that compile
    ``torch.compile`` for them start earlier.
    """

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.began, self.written_s = asked, time.monotonic(), 0.0
        self.logs = Path(tempfile.mkdtemp())
        self.names = list(dict.fromkeys((*asked.full, *asked.only)))
        self.rivals = [f"{STOCK}{name}" for name in self.names if name not in ALONE]
        self.searches = [] if asked.warm else list(self.names)
        self.running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
        self.done: dict[str, Any] = {}

    def left_s(self) -> float:
        return self.asked.total_s - (time.monotonic() - self.began)

    def any_waits(self) -> bool:
        return bool(self.searches or (self.asked.warm and self.rivals))

    def start(self) -> None:
        """Start what may start, rivals first, because they take longest."""
        asked, making = self.asked, [name for name in self.running if name.startswith(STOCK) and not self._made(name)]
        ahead = asked.ahead or asked.jobs
        while self.rivals and len(making) < ahead and self.left_s() > asked.rivals_s:
            making.append(self.rivals[0])
            self._start(self.rivals.pop(0))
        searching = [name for name in self.running if not name.startswith(STOCK) and name not in (STEPS, MEMORY)]
        timely = self.left_s() > asked.least_s + asked.rivals_s
        while self.searches and len(searching) < asked.jobs and timely:
            searching.append(self.searches[0])
            self._start(self.searches.pop(0))
        for name in () if timely else self.searches:  # do not wait for its rivals
            self.done.setdefault(name, {"error": "not started: out of time"})
            (self.logs / f"{name}.gone").touch()
        self.searches = self.searches if timely else []

    def _start(self, name: str) -> None:
        rank = self.names.index(name.removeprefix(STOCK))
        process = _started(name, self.asked, self.logs, self.began + self.asked.total_s, rank)
        self.running[name] = (process, time.monotonic())

    def _made(self, name: str) -> bool:
        return (self.logs / f"{name}.ready").exists()

    def collect(self) -> None:
        """Collect ended processes, kill late ones, and write everything every few seconds."""
        for name, (process, since) in list(self.running.items()):
            late = name.startswith(STOCK) and not self._made(name) and time.monotonic() - since > self.asked.rival_s
            if late:
                process.kill()
                process.wait()
            if late or process.poll() is not None:
                why = f"not made in {self.asked.rival_s:.0f} s" if late else f"ended with {process.returncode}"
                self._ended(name, why)
        if time.monotonic() - self.began > self.written_s + WRITTEN_S:  # nothing is lost if this process is killed
            found = {name: _collected(self.logs / name, "ended from outside") for name in self.running}
            _write(self.asked, self.done | found, self.began)
            self.written_s = time.monotonic() - self.began

    def _ended(self, name: str, why: str) -> None:
        del self.running[name]
        self.done[name] = _collected(self.logs / name, why)
        (self.logs / f"{name}.gone").touch()  # releases those that wait for it
        if name == STEPS and not self.done[name].get("right"):
            (self.logs / "no-kernel").touch()  # a wrong or failing kernel must not affect the rest
        _write(self.asked, self.done, self.began)
        print(f"{time.monotonic() - self.began:6.1f} s  {name}: {_line(self.done[name])}", flush=True)

    def end(self) -> None:
        for name, (process, _) in list(self.running.items()):
            process.kill()
            process.wait()
            self._ended(name, "out of time")
        missed = self.rivals if self.asked.warm else []
        _write(self.asked, self.done | {name: {"error": "not started: out of time"} for name in missed}, self.began)


def _started(name: str, asked: argparse.Namespace, logs: Path, until: float, rank: int) -> subprocess.Popen[bytes]:
    full = name in asked.full
    budget_s = FULL_S if full else asked.budget_s
    lock = os.environ.get("RIDGELINE_DEVICE_LOCK") or str(logs / "lock")
    said = [f"--{word}" for word in ("kinds", "warm", "recorded") if getattr(asked, word)]
    said += [f"--{word}" for word in ("brief", "thrifty", "few") if getattr(asked, word) and not full]
    said += ["--cache", str(asked.cache)] if asked.cache else []
    command = [sys.executable, "-u", "-m", __spec__.name, "--one", name, "--budget-s", str(budget_s), "--rounds",
               str(asked.rounds), "--device", asked.device, "--lock", lock, "--marks", str(logs), "--until",
               str(until), "--rank", str(rank), *said]  # fmt: skip
    threads = max(2, ((os.cpu_count() or 8) - TIMING_CORES) // (asked.ahead or asked.jobs))
    settings = {"TORCHINDUCTOR_COMPILE_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2",
                "RIDGELINE_CACHE": tempfile.mkdtemp()}  # fmt: skip
    if full:
        settings["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    elif asked.cache:
        settings["TORCHINDUCTOR_CACHE_DIR"] = str(asked.cache)
    if name == DRIFT:
        settings["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # required by deterministic GEMMs
    with (logs / name).open("w") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **settings})


def _collected(path: Path, otherwise: str) -> dict[str, Any]:
    lines = path.read_text(errors="replace").splitlines()
    found = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
    said = [line for line in lines if not line.startswith(MARK)]
    merged: dict[str, Any] = {} if found and found[-1].get("finished") else {"error": otherwise}
    for each in found:
        merged |= each
    return merged | {"log": "\n".join(said)[-12000:]}


def _write(asked: argparse.Namespace, done: dict[str, Any], began: float) -> None:
    document = {"spent_s": time.monotonic() - began, "budget_s": asked.budget_s, "jobs": asked.jobs, "parts": done}
    with gzip.open(asked.out / "optimize_train.json.gz", "wt", encoding="utf-8") as file:
        json.dump(document, file)


def _line(found: dict[str, Any]) -> str:
    if "loop" in found:
        shown = "  ".join(f"{who} {s * 1e3:.2f} ms" for who, s in found["loop"].items())
        return f"{shown}  {found.get('winner')}  memory {found.get('peak_bytes')}"
    if "reserved_bytes" in found:
        return str(found["reserved_bytes"])
    if "compile_s" in found and "error" not in found:
        return f"made in {found['compile_s']:.1f} s{', from disk' if found.get('loaded') else ''}"
    if "distances" in found or "updates_s" in found:
        return str(found.get("distances") or {k: found[k] for k in ("updates_s", "apart", "right")})
    return f"{found.get('error')}: {found.get('log', '')[-600:]!r}"


def _table(path: Path) -> list[str]:
    """The results as Markdown."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        parts = json.load(file)["parts"]
    rows = {name: _joined(found, parts.get(f"{STOCK}{name}", {})) for name, found in parts.items()
            if name not in ALONE and not name.startswith(STOCK)}  # fmt: skip
    heads = ("model", "eager", "torch.compile", "result", "best of both / result", "train_step", "its optimizer not "
             "passed", "memory: eager, torch.compile, result; allocated (reserved)", "kept", "searched")  # fmt: skip
    lines = [_cells(*heads), _cells(*["---"] * len(heads)), *(_row(name, found) for name, found in rows.items())]
    lines += ["", *_means(rows), *_within(rows), ""]
    lines += [_cells("forward and backward", "eager", "torch.compile", "result", "memory by its receipt")]
    lines += [_cells(*["---"] * 5)]
    lines += [_raced(name, found["receipt"]) for name, found in rows.items() if "receipt" in found]
    lines += ["", *_step_table(parts.get(STEPS, {}))]
    drift = parts.get(DRIFT)
    return lines + (["", *_drift_table(drift)] if drift and "trails" in drift else [])


def _step_table(found: dict[str, Any]) -> list[str]:
    """AdamW's step alone."""
    if "updates_s" not in found:
        return []
    lines = ["| AdamW, bf16, all parameters | default | fused | ours | TB/s of ours | apart from fused |"]
    lines += [_cells(*["---"] * 6)]
    for name, ways in found["updates_s"].items():
        rate = 14 * found["numbers"][name] / ways["kernel"] / 1e12
        shown = [f"{1e3 * ways[way]:.3f} ms" for way in ("given", "fused", "kernel")]
        lines.append(_cells(f"{name}, {found['numbers'][name] / 1e6:.0f} million", *shown, f"{rate:.2f}",
                            f"{found['apart'][name]:.1e}"))  # fmt: skip
    return lines


def _joined(found: dict[str, Any], stock: dict[str, Any]) -> dict[str, Any]:
    """A model's row, with the memory of torch.compile from its own process if there were no common rounds.

    In older recordings the times of torch.compile and eager come from there, too.
    """
    peaks = {**stock.get("peak_bytes", {}), **found.get("peak_bytes", {})}
    loop = {**found.get("loop", {}), **stock.get("loop", {})}
    return found | ({"loop": loop, "peak_bytes": peaks} if loop else {})


def _means(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Geometric means over the rows that have both sides."""
    found = []
    for who in ("result", "train_step", "result, its optimizer not passed", "result, cleared late"):
        full = {name: row["loop"] for name, row in rows.items() if {"torch.compile", who} <= row.get("loop", {}).keys()}
        ratios = {name: min(loop["eager"], loop["torch.compile"]) / loop[who] for name, loop in full.items()}
        if ratios:
            mean, worst = statistics.geometric_mean(ratios.values()), min(ratios, key=lambda name: ratios[name])
            found.append(f"Best of eager and torch.compile over {who}: geometric mean {mean:.2f} of {len(ratios)}, "
                         f"least {ratios[worst]:.2f} ({worst}).")  # fmt: skip
    full = [row["loop"] for row in rows.values() if {RECORDED, "result"} <= row.get("loop", {}).keys()]
    if full:
        ratios = [loop[RECORDED] / loop["result"] for loop in full]
        shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        found.append(f"{RECORDED} over result: geometric mean {statistics.geometric_mean(ratios):.2f} ({shown}).")
    return found


def _within(rows: dict[str, dict[str, Any]]) -> list[str]:
    """The result beside the rival that it is, in one process."""
    found = []
    for name, row in rows.items():
        loop = row.get("loop", {})
        found += [f"{name}, in one process: {who.removesuffix(HERE_TOO)} {1e3 * seconds:.2f} ms, result "
                  f"{1e3 * loop['result']:.2f} ({seconds / loop['result']:.2f})."
                  for who, seconds in loop.items() if who.endswith(HERE_TOO)]  # fmt: skip
    return found


def _drift_table(drift: dict[str, Any]) -> list[str]:
    lines = ["| steps | farthest from eager's loss |", "|---|---|"]
    lines += [f"| {name} | {distance:.2e} |" for name, distance in drift.get("distances", {}).items()]
    lines += ["", "| rows × inputs × outputs | plain | padded | apart |", "|---|---|---|---|"]
    return lines + [_cells(f"{o['rows']} × {o['inputs']} × {o['outputs']}", f"{o['plain_ms']:.2f} ms",
                           f"{o['padded_ms']:.2f} ms", f"{o['apart']:.1e}") for o in drift.get("odd", [])]  # fmt: skip


def _cells(*values: str) -> str:
    return f"| {' | '.join(values)} |"


def _row(name: str, found: dict[str, Any]) -> str:
    loop, peaks = found.get("loop", {}), found.get("peak_bytes", {})
    if "result" not in loop:
        return _cells(name, *["–"] * 7, found.get("error", ""), "–")
    ms = {who: f"{1e3 * seconds:.2f}" for who, seconds in loop.items()}
    both = {"eager", "torch.compile"} <= set(loop)
    over = f"{min(loop['eager'], loop['torch.compile']) / loop['result']:.2f}" if both else "–"
    memory = ", ".join(f"{peaks[who][0] / 1e9:.2f} ({peaks[who][1] / 1e9:.2f})" if peaks.get(who) else "–" for who in
                       ("eager", "torch.compile", "result"))  # fmt: skip
    shown = (ms.get(who, "–") for who in ("eager", "torch.compile", "result"))
    rest = (ms.get(who, "–") for who in ("train_step", "result, its optimizer not passed"))
    return _cells(name, *shown, over, *rest, f"{memory} GB", found.get("winner", ""), f"{found['optimize_s']:.0f} s")


def _raced(name: str, receipt: dict[str, Any]) -> str:
    times = [f"{s * 1e3:.2f}" if s else "–" for s in (receipt["eager_s"], receipt["stock_s"], receipt["final_s"])]
    final_bytes = receipt["final_bytes"] or receipt["eager_bytes"]
    memory = "–" if not final_bytes else f"{receipt['eager_bytes'] / 1e9:.2f} → {final_bytes / 1e9:.2f} GB"
    return _cells(name, *times, memory)


# A child does one part.


def _child(asked: argparse.Namespace) -> None:
    try:
        kind = STOCK if asked.one.startswith(STOCK) else asked.one
        {DRIFT: _drifted, STEPS: _steps, MEMORY: _memory, STOCK: _stock}.get(kind, _searched)(asked)
        _tell({"finished": True})
    except Exception as error:
        said = f"{type(error).__name__}: {error}"[:400]
        _tell({"error": said, "trace": traceback.format_exc()[-2500:], "finished": True})


def _tell(found: dict[str, Any]) -> None:
    print(MARK + json.dumps(found), flush=True)


def _steps(asked: argparse.Namespace) -> None:
    """AdamW's step by PyTorch, fused and by our kernel: seconds, and the error of the kernel's weights."""
    import torch

    from ridgeline.optimizer.training import optimizer_update as update

    turn, on = Turn(asked.lock), torch.device(asked.device)
    sizes = {"GPT-2 medium": [(50257, 1024), (1024, 1024), *[(1024, 3072), (1024, 4096), (4096, 1024), (1024,)] * 24],
             "Llama 1B": [(128256, 2048), *[(2048, 8192), (8192, 2048), (2048, 8192), (2048, 2048)] * 16]}  # fmt: skip
    found: dict[str, Any] = {"updates_s": {}, "numbers": {}, "apart": {}}
    for name, shapes in sizes.items() if on.type == "cuda" else ():
        turn.take()
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(s, device=on, dtype=torch.bfloat16)) for s in shapes]
        found["apart"][name] = _steps_apart(params)
        for p in params:
            p.grad = torch.zeros_like(p)
        ways = update._ways(torch.optim.AdamW(params), list(update.WAYS))
        found["updates_s"][name] = {way: s.median_s for way, s in update._timed(ways, on).items()}
        found["numbers"][name] = sum(p.numel() for p in params)
        del params, ways
        torch.cuda.empty_cache()
        turn.give()
    right = all(apart < 1e-2 for apart in found["apart"].values())  # a rounding of bf16 is 2e-3
    _tell({**found, "right": right})


def _steps_apart(params: list[Any]) -> float:
    """The largest relative distance of the weights' change after three steps by the kernel from PyTorch's fused one."""
    import torch

    from ridgeline.engine.replay import fused_adamw as stepping

    kept, ends = [p.detach().clone() for p in params], []
    for taken in (False, True):
        optimizer = torch.optim.AdamW(params, lr=1e-2, fused=True)
        if taken:
            stepping.take_over(optimizer)
        for i in range(3):
            for j, p in enumerate(params):
                generator = torch.Generator(p.device).manual_seed(100 * i + j)
                p.grad = torch.randn(p.shape, device=p.device, dtype=torch.bfloat16, generator=generator)
            optimizer.step()
        ends.append([p.detach().clone() for p in params])
        with torch.no_grad():
            for p, was in zip(params, kept, strict=True):
                p.copy_(was)
    return max(float((a.float() - b.float()).norm() / (a.float() - w.float()).norm())
               for a, b, w in zip(*ends, kept, strict=True))  # fmt: skip


def _searched(asked: argparse.Namespace) -> None:
    import ridgeline as rl
    from ridgeline.optimizer.search import builds, order, prepare, proposals, stages
    from ridgeline.optimizer.search import search as searching
    from ridgeline.optimizer.search.budget import Budget
    from ridgeline.optimizer.training import optimizer_update as update

    turn, rivals = Turn(asked.lock, asked.rank), Rivals(asked)
    work = _built(asked.one, asked.device)
    until = asked.until or time.monotonic() + 10 * asked.budget_s
    left_s = Budget.left_s

    def left(budget: Any) -> float:  # time spent waiting for the lock does not count
        return min(left_s(budget) + turn.waited_s, until - asked.rivals_s - time.monotonic())

    Budget.left_s = left
    settle = update.settle

    def settled(*args: Any) -> Any:
        if asked.marks and (asked.marks / "no-kernel").exists():
            update.WAYS = ("fused",)
        return settle(*args)

    update.settle = settled
    if asked.brief:
        offered = _offered(stages.torch_compile, rivals if asked.thrifty else None)
        _replace_stage(stages.torch_compile, offered)
        proposals.Proposals.owed_s = lambda self, proposal, search: 0.0
        _replace_stage(stages.tuned, lambda make, search: iter(()))
        searching.parts = lambda search, *given: ()
        if not asked.kinds:
            searching.regions = lambda search, *given: ()
        searching.prove_in_training = lambda search: None  # the given optimizer is proved after the search
    if asked.few:
        order.Stages.proposals = _fewer(order.Stages.proposals)
        prepare.price = lambda search: None
    builds.build = turn.around(builds.build)
    prepare.price = turn.given(prepare.price)  # host time only
    searching.facts_of = turn.given(searching.facts_of)
    spent_s = _clocked(searching.Search)
    _overheard(searching.Search)
    for name in searching.COMPILERS:  # imports, before the device is held
        importlib.import_module(name)
    turn.take()
    turn.waited_s = 0.0
    eager_bytes = _eager_bytes(work)
    began = time.perf_counter()
    optimizer = work["optimizer"](work["model"])
    budget_s = max(asked.least_s, min(asked.budget_s, until - asked.rivals_s - time.monotonic()))
    fast = rl.optimize(work["model"], work["args"], work["kwargs"], mode="train", optimizer=optimizer,
                       loss=work["loss"], budget_s=budget_s)  # fmt: skip
    receipt = fast.receipt
    _tell({"optimize_s": time.perf_counter() - began - turn.waited_s, "waited_s": turn.waited_s,
           "winner": receipt.winner, "receipt": receipt.to_dict(), "text": str(receipt),
           "phases_s": spent_s})  # fmt: skip
    _beside(work, fast, optimizer, eager_bytes, asked, turn, rivals)
    _tell({"fallbacks": type(fast).fallbacks.fget(fast), "updates": _updates(fast)})

def _replace_stage(old: Any, new: Any) -> None:
    """Replace what a stage proposes, for every search of this process."""
    from dataclasses import replace

    from ridgeline.optimizer.search import order

    for name in ("INFERENCE", "TRAINING"):
        kept = (replace(stage, propose=new) if stage.propose is old else stage for stage in getattr(order, name))
        setattr(order, name, tuple(kept))


def _offered(stock: Any, rivals: Rivals | None) -> Any:
    """``torch.compile`` in a brief search: left out if blocks repeat, because it would take most of the time.

    If the other process has compiled it by then, it costs only loading its kernels. If a step cannot be captured,
    blocks gain little, and it is tried as usual.
    """
    from dataclasses import replace

    def offered(make: Any, search: Any) -> Any:
        loaded_s = rivals.loaded_s() if rivals else None
        if loaded_s is None:
            return iter(()) if make.facts.groups and not make.cannot_capture(search) else stock(make, search)
        return (replace(proposal, cost_s=min(proposal.cost_s, loaded_s)) for proposal in stock(make, search))

    return offered


def _fewer(proposals: Any) -> Any:
    """Propose only the candidates of the table; record the others as skipped, because later stages look them up."""
    from ridgeline.optimizer.backend import Report
    from ridgeline.optimizer.search.candidate import Built
    from ridgeline.optimizer.search.facts import GRAPHED, PLAIN
    from ridgeline.optimizer.search.facts import STOCK as COMPILED

    def chosen(self: Any, search: Any) -> Any:
        for proposal in proposals(self, search):
            name = proposal.candidate.name
            whole = name.startswith("blocks") and name.endswith(GRAPHED) and "−" not in name
            if name in (PLAIN, COMPILED, COMPILED + GRAPHED) or whole:
                yield proposal
            else:
                search.record(Built(proposal.candidate, search.problem.model, Report()), "skipped", "not asked for")

    return chosen


def _updates(fast: Any) -> dict[str, Any]:
    """How often ``train_step`` replayed the optimizer's update and the passes before it, and why it could not."""
    from ridgeline.engine.drop_in import state_of

    update = state_of(fast).update
    if update is None:
        return {}
    passes = {"replays": update.graphed.replays, "misses": update.graphed.misses}
    return {"replays": update.replays, "misses": update.misses, "passes": passes}


def _clocked(kind: Any) -> dict[str, float]:
    """Seconds that a search spends in each of its phases, filled while it runs."""
    spent_s: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    def around(name: str, method: Any) -> Any:
        def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(self, *args, **kwargs)
            finally:
                spent_s[name] += time.perf_counter() - began

        return timed

    from ridgeline.optimizer.search import search
    from ridgeline.optimizer.search.builds import Builds
    from ridgeline.optimizer.search.last_race import LastRace

    homes = {"made": Builds, "last_race": LastRace}
    for name in PHASES:
        home = homes.get(name) or (kind if hasattr(kind, name) else search)
        setattr(home, name, around(name, getattr(home, name)))
    return spent_s


def _overheard(kind: Any) -> None:
    """Print every verdict of a search."""
    note, began = kind.record, time.perf_counter()

    def noted(self: Any, built: Any, status: str, reason: str, **shown: Any) -> None:
        note(self, built, status, reason, **shown)
        entry = self.entries[built.candidate.name]
        ms = f"{entry.measured_s * 1e3:.2f} ms" if entry.measured_s else ""
        gigabytes = f"{entry.peak_bytes / 1e9:.2f} GB" if entry.peak_bytes else ""
        left = f"({self.budget.left_s():.0f} s left)"
        print(f"{time.perf_counter() - began:6.1f} s  {entry.name}: {status} {ms} {gigabytes} "
              f"built in {entry.build_s or 0:.1f} s  {reason}  {left}", flush=True)  # fmt: skip

    kind.record = noted


def _eager_bytes(work: dict[str, Any]) -> tuple[int, int] | None:
    """Peak memory, allocated and reserved, of eager steps in a fresh process."""
    step = _stepping(work, work["model"], work["optimizer"](work["model"]))
    for _ in range(2):
        step()
    found = _peak(step)
    work["model"].zero_grad(set_to_none=True)
    return found


def _beside(
    work: dict[str, Any], fast: Any, given: Any, eager_bytes: Any, asked: Any, turn: Turn, rivals: Rivals
) -> None:
    """Whole steps of the result in turns with the rivals; without them, with eager on the searched model."""
    model = work["model"]
    ways = {"result": _stepping(work, fast, given)}
    ways["train_step"] = lambda: fast.train_step(*work["args"], **work["kwargs"])
    if not asked.thrifty:
        ways["result, its optimizer not passed"] = _stepping(work, fast, work["optimizer"](model))
        ways["result, cleared late"] = _stepping(work, fast, given, late=True)
    peaks: dict[str, Any] = {"eager": eager_bytes}
    failed: dict[str, str] = {}
    _warmed(ways, peaks, failed, names=tuple(ways))
    _tell({"peak_bytes": peaks, "loop_failed": failed, "met": False})
    ways |= _rivals_here(work, fast)
    _freed()
    if not rivals.ready():
        alone = {"eager": _stepping(work, model, work["optimizer"](model))} | ways
        _tell({"loop": _in_turns(alone, 1 if asked.thrifty else 2)})
        del alone
        _freed()
        turn.give()
        rivals.wait()
        turn.take()
    if rivals.ready():
        told = rivals.ask("warm")
        _tell({"peak_bytes": told["peak_bytes"] | peaks, "rivals_failed": told["loop_failed"]})
        _in_turns(ways, asked.rounds, rivals, lambda loop: _tell({"loop": loop, "met": True}))
    turn.give()


def _rivals_here(work: dict[str, Any], fast: Any) -> dict[str, Callable[[], Any]]:
    """The rival that was returned, with default settings, in this process."""
    from ridgeline.engine.drop_in import state_of

    state, model = state_of(fast), work["model"]
    calls = {f"{plan.name}{HERE_TOO}": plan.call for plan in state.plans.values() if plan.name == "torch.compile"}
    calls |= {} if state.plans else {f"eager{HERE_TOO}": model}
    return {who: _stepping(work, call, work["optimizer"](model)) for who, call in calls.items()}


class Turn(optimize_models.Turn):
    """The process that holds the device runs on reserved cores, on which nothing compiles.

    The device goes to the waiting process that was named first: with a plain lock a search of four candidates waited
    66 s for its third.
    """

    def __init__(self, path: str, rank: int = 0) -> None:
        super().__init__(path)
        self.rank, self.queue = rank, Path(f"{path}.queue")
        if path:
            self.queue.mkdir(exist_ok=True)
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        some = TIMING_CORES if len(cores) >= LEAST_CORES else 0
        self.timing, self.others = cores[-some:], cores[: len(cores) - some]
        _run_on(self.others)

    def take(self) -> None:
        began = time.perf_counter()
        if self.file:
            mark = self.queue / f"{self.rank:04d}.{os.getpid()}"
            mark.touch()
            while self._comes_later(mark.name) or not self._locked():
                time.sleep(POLL_S)
            mark.unlink()
        self.waited_s += time.perf_counter() - began
        _run_on(self.timing)

    def _comes_later(self, own: str) -> bool:
        """Whether a process that was named earlier is waiting; killed processes do not wait."""
        return any(name < own and Path(f"/proc/{name.split('.')[1]}").exists() for name in os.listdir(self.queue))

    def _locked(self) -> bool:
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[arg-type]
        except BlockingIOError:
            return False
        return True

    def give(self) -> None:
        _run_on(self.others)
        super().give()

    def given(self, method: Any) -> Any:
        """A method that needs no device, with the device released meanwhile."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.give()
            try:
                return method(*args, **kwargs)
            finally:
                self.take()

        return run


def _run_on(cores: list[int]) -> None:
    """Pin all threads of this process to these cores; child processes inherit them."""
    for thread in os.listdir("/proc/self/task") if cores else ():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(thread), cores)


class Rivals:
    """The process with eager and ``torch.compile``, which steps on request: one file per request."""

    def __init__(self, asked: Any) -> None:
        self.marks, self.name, self.num, self.cache = asked.marks, asked.one, 0, asked.cache
        self.until = (asked.until or time.monotonic() + 600) - asked.last_s

    def ready(self) -> bool:
        return self.marks is not None and (self.marks / f"{STOCK}{self.name}.ready").exists() and not self.gone()

    def loaded_s(self) -> float | None:
        """Seconds to load ``torch.compile``, if another process has compiled it; None otherwise."""
        if self.ready():
            told = json.loads((self.marks / f"{STOCK}{self.name}.ready").read_text())
            return told["compile_s"] * (1.0 if told["loaded"] else LOADED_FRAC)
        kept = self.cache / f"{self.name}.rival.json" if self.cache else None
        return LOADED_FRAC * json.loads(kept.read_text())["compile_s"] if kept and kept.exists() else None

    def gone(self) -> bool:
        return (self.marks / f"{STOCK}{self.name}.gone").exists()

    def wait(self) -> None:
        while self.marks is not None and not self.ready() and not self.gone() and time.monotonic() < self.until:
            time.sleep(0.1)

    def ask(self, what: str) -> dict[str, Any]:
        told = self.marks / f"{STOCK}{self.name}.told.{self.num}"
        (self.marks / f"{STOCK}{self.name}.ask.{self.num}").write_text(what)
        while not told.exists():
            if self.gone():
                raise RuntimeError("the process with torch.compile has ended")
            time.sleep(POLL_S)
        self.num += 1
        return json.loads(told.read_text())


def _stock(asked: argparse.Namespace) -> None:
    """The rivals: eager and ``torch.compile`` with default settings and the given optimizer."""
    turn, name = Turn(""), asked.one.removeprefix(STOCK)
    work = _built(name, asked.device)
    ways, apart = _rival_ways(work, asked, name)
    for num, what in enumerate(() if asked.warm else _questions(asked, name)):
        turn.take()
        if what == "warm":
            found: dict[str, Any] = {"peak_bytes": {}, "loop_failed": {}}
            _warmed(ways, found["peak_bytes"], found["loop_failed"], names=tuple(ways))
            found["peak_bytes"] |= apart
        else:
            found = _round(ways, num)
        _tell(found if what == "warm" else {})
        _answer(asked.marks / f"{asked.one}.told.{num}", found)
        turn.give()


def _rival_ways(work: dict[str, Any], asked: argparse.Namespace, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Steps of eager and of compiled code; a mark with the build time is written when they are ready.

    ``reduce-overhead`` is added if asked for and compiled by ``--warm``, because compiling it takes as long again. Its
    CUDA graphs keep their memory, so peak memory of the others is measured before, and returned.
    """
    import torch

    apart: dict[str, Any] = {}

    optimizer = work["optimizer"](work["model"])
    ways = {"eager": _stepping(work, work["model"], optimizer)}
    ways["torch.compile"] = _stepping(work, torch.compile(work["model"]), optimizer)
    kept = asked.cache / f"{name}.rival.json" if asked.cache else None
    cold = json.loads(kept.read_text()) if kept and kept.exists() else {}
    found = {"compile_s": _seconds(ways["torch.compile"]), "loaded": bool(cold), "cold": cold}
    _tell(found)
    if asked.warm and kept is not None:
        _answer(kept, found)
    _freed()
    if asked.recorded and (asked.warm or "recorded_s" in cold):
        recorded = _stepping(work, torch.compile(work["model"], mode="reduce-overhead"), optimizer)
        _warmed(ways, apart, {}, names=tuple(ways))
        try:
            found["recorded_s"] = sum(_seconds(recorded) for _ in range(3))  # the third call captures
            ways[RECORDED] = recorded
        except Exception as error:
            found["recorded_failed"] = f"{type(error).__name__}: {error}"[:300]
        _tell(found)
        if asked.warm and kept is not None:
            _answer(kept, found)
    _answer(asked.marks / f"{asked.one}.ready", found)
    return ways, apart


def _seconds(step: Callable[[], Any]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def _questions(asked: argparse.Namespace, name: str) -> Any:
    """Requests, in order, until the requesting process has ended."""
    num = 0
    while not (asked.marks / f"{name}.gone").exists():
        path = asked.marks / f"{asked.one}.ask.{num}"
        if path.exists() and (what := path.read_text()):
            num += 1
            yield what
        time.sleep(POLL_S)


def _answer(path: Path, found: dict[str, Any]) -> None:
    path.with_name(path.name + "~").write_text(json.dumps(found))
    path.with_name(path.name + "~").rename(path)  # atomic


def _freed() -> None:
    """Release cached memory for other processes."""
    import torch

    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def _stepping(work: dict[str, Any], call: Any, optimizer: Any, late: bool = False) -> Callable[[], Any]:
    """A training step; ``late`` if gradients are cleared between the forward and the backward."""
    from ridgeline.optimizer.search.loss import Loss

    loss = work["loss"] or Loss(None)

    def step() -> Any:
        if not late:
            optimizer.zero_grad(set_to_none=True)
        value = loss(call(*work["args"], **work["kwargs"]))
        if late:
            optimizer.zero_grad(set_to_none=True)
        value.backward()
        optimizer.step()
        return value.detach()

    return step


def _warmed(ways: dict[str, Any], peaks: dict[str, Any], failed: dict[str, str], names: tuple[str, ...]) -> None:
    """Warm up every way and measure its peak memory; one that fails is left out."""
    for who in names:
        try:
            for _ in range(3):
                ways[who]()
            peaks[who] = _peak(ways[who])
        except Exception as error:
            failed[who] = f"{type(error).__name__}: {error}"[:300]
            del ways[who]


def _in_turns(ways: dict[str, Any], rounds: int, rivals: Rivals | None = None, told: Any = None) -> dict[str, float]:
    """Median seconds per step of each, in turns with the rivals', if any.

    ``told`` is called with intermediate results.
    """
    found: list[dict[str, float]] = []
    for i in range(rounds + 1):
        found.append(_round(ways, i) | (rivals.ask("time") if rivals else {}))
        if told is not None and i >= 2:
            told(_medians(found))
    return _medians(found)


def _round(ways: dict[str, Any], i: int) -> dict[str, float]:
    """Seconds per step of each, over three in a row and a tenth of a second; the order changes from round to round.

    The first steps of a turn are not counted: cores that waited for another process are slow at first (a step of
    7.4 ms took 7.8 for the first).
    """
    from ridgeline.optimizer.search.timing import in_turn

    seconds = {}
    for who, step in in_turn(list(ways.items()), i):
        one_s = _timed(step, 1)
        _timed(step, max(1, min(MOST_STEPS, int(WARM_S / one_s))))
        seconds[who] = _timed(step, max(3, min(MOST_STEPS, int(TURN_S / one_s))))
    return seconds


def _medians(found: list[dict[str, float]]) -> dict[str, float]:
    return {who: statistics.median(seconds[who] for seconds in found[1:]) for who in found[0]}


# The models: those of workloads.py, and some that are used only here.


def _built(name: str, device: str) -> dict[str, Any]:
    """A model on the device with its inputs, its loss (None if it has its own) and its optimizer."""
    from lab import workloads
    from ridgeline.optimizer.search.loss import Loss

    optimize_models.EXTRA |= {each: _training(make) for each, make in TRAINED.items()}
    work = optimize_models.built(name, device)
    kind = workloads.WORKLOADS[name].optimizer if name in workloads.WORKLOADS else "adamw"
    return work | {"loss": None if "labels" in work["kwargs"] else Loss(None), "optimizer": _optimizer(str(kind))}


def _optimizer(kind: str) -> Callable[[Any], Any]:
    import torch

    def make(model: Any) -> Any:
        parameters = [p for p in model.parameters() if p.requires_grad]
        if kind.startswith("sgd"):
            return torch.optim.SGD(parameters, lr=1e-5, momentum=0.9 if kind.endswith("momentum") else 0.0)
        return torch.optim.AdamW(parameters, lr=1e-5, fused=True if kind.endswith("fused") else None)

    return make


def _training(make: Any) -> Any:
    return lambda: (*make(), "train")


def _t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    from lab import workloads

    config = T5Config(d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12, vocab_size=32128,
                      pad_token_id=0, decoder_start_token_id=0)  # fmt: skip
    ids, labels = workloads._ids(32128, 8, 512), workloads._ids(32128, 8, 128)
    return T5ForConditionalGeneration(config), (), {"input_ids": ids, "labels": labels, "use_cache": False}


def _whisper() -> Any:
    import torch
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    from lab import workloads

    config = WhisperConfig(d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8,
                           decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048)  # fmt: skip
    kwargs = {"input_features": torch.randn(8, 80, 3000), "labels": workloads._ids(51865, 8, 128), "use_cache": False}
    return WhisperForConditionalGeneration(config), (), kwargs


def _whisper_small() -> Any:
    import torch
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    from lab import workloads

    config = WhisperConfig(d_model=768, encoder_layers=12, decoder_layers=12, encoder_attention_heads=12,
                           decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072)  # fmt: skip
    kwargs = {"input_features": torch.randn(8, 80, 3000), "labels": workloads._ids(51865, 8, 192), "use_cache": False}
    return WhisperForConditionalGeneration(config), (), kwargs


def _mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    from lab import workloads

    config = MixtralConfig(hidden_size=1024, intermediate_size=3584, num_hidden_layers=8, num_attention_heads=16,
                           num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2,
                           vocab_size=32000)  # fmt: skip
    ids = workloads._ids(32000, 4, 1024)
    return MixtralForCausalLM(config), (), {"input_ids": ids, "labels": ids, "use_cache": False}


def _unet() -> Any:
    import torch

    from lab.optimize.networks import UNet

    return UNet(), (torch.randn(16, 4, 64, 64), torch.rand(16)), {}


def _dcn() -> Any:
    import torch

    from lab import workloads
    from lab.optimize.networks import CrossNetwork

    return CrossNetwork(), (torch.randn(8192, 13), workloads._ids(100_000, 8192, 26)), {}


def _clip() -> Any:
    """CLIP: images and captions with a contrastive loss."""
    import torch
    from transformers import CLIPConfig, CLIPModel

    from lab import workloads

    kwargs = {"input_ids": workloads._ids(49408, 128, 77), "pixel_values": torch.randn(128, 3, 224, 224)}
    return CLIPModel(CLIPConfig()), (), {**kwargs, "return_loss": True}


def _speech() -> Any:
    import torch
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    from lab import workloads

    config = Wav2Vec2Config(num_labels=10, apply_spec_augment=False)
    kwargs = {"input_values": torch.randn(8, 160000), "labels": workloads._ids(10, 8, 1)[:, 0]}
    return Wav2Vec2ForSequenceClassification(config), (), kwargs


def _lora() -> Any:
    from lab import workloads
    from lab.optimize.networks import adapted

    model, args, kwargs = workloads.WORKLOADS["llama1b-train-4x1024"].build()
    return adapted(model, ("q_proj", "v_proj")), args, kwargs


def _checkpointed(drops: bool = False) -> Any:
    """GPT-2 with activation checkpointing; ``drops`` keeps its dropout."""
    from lab import workloads

    model, args, kwargs = workloads.WORKLOADS["gpt2-medium-train-8x512"].build()
    for part in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(model.config, part, 0.1 if drops else 0.0)
    model = type(model)(model.config)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, args, kwargs


def _graph() -> Any:
    import torch

    from lab import workloads
    from lab.optimize.networks import Messages

    edges = workloads._ids(170_000, 2, 1_200_000)
    kwargs = {"x": torch.randn(170_000, 128), "edges": edges, "labels": workloads._ids(40, 170_000, 1)[:, 0]}
    return Messages(), (), kwargs


def _cast() -> Any:
    from lab import workloads
    from lab.optimize.networks import Cast

    model, (image,), kwargs = workloads._timm("resnet50", 64)
    return Cast(model), (image.float(),), kwargs


def _cast_words() -> Any:
    """GPT-2 as trainers run it with ``bf16=True``: float32 weights, forward under autocast."""
    from lab import workloads
    from lab.optimize.networks import Cast

    model, args, kwargs = workloads.WORKLOADS["gpt2-medium-train-8x512"].build()
    return Cast(model), args, kwargs


def _masked_words() -> Any:
    """BERT with its head, called without a mask."""
    from transformers import BertConfig, BertForMaskedLM

    from lab import workloads

    ids = workloads._ids(30522, 32, 128)
    return BertForMaskedLM(BertConfig()), (), {"input_ids": ids, "labels": ids}


def _t5_small() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    from lab import workloads

    config = T5Config(pad_token_id=0, decoder_start_token_id=0)
    ids, labels = workloads._ids(32128, 8, 128), workloads._ids(32128, 8, 64)
    return T5ForConditionalGeneration(config), (), {"input_ids": ids, "labels": labels, "use_cache": False}


def _words() -> Any:
    from lab import workloads
    from lab.optimize.networks import Words

    return Words(), (), {"ids": workloads._ids(10_000, 35, 20), "labels": workloads._ids(10_000, 35, 20)}


def _columns() -> Any:
    import torch

    from lab import workloads
    from lab.optimize.networks import Table

    kwargs = {"names": workloads._ids(1000, 1024, 10), "numbers": torch.randn(1024, 20)}
    return Table(), (), {**kwargs, "labels": workloads._ids(2, 1024, 1)[:, 0]}


def _few_columns() -> Any:
    """Small enough for a host without a GPU, to test this script."""
    import torch

    from lab import workloads
    from lab.optimize.networks import Table

    kwargs = {"names": workloads._ids(20, 8, 2), "numbers": torch.randn(8, 4, dtype=torch.float32)}
    return Table(2, 4, 20, 8).float(), (), {**kwargs, "labels": workloads._ids(2, 8, 1)[:, 0]}


def _segments() -> Any:
    import torch
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    from lab import workloads

    kwargs = {"pixel_values": torch.randn(4, 3, 512, 512), "labels": workloads._ids(150, 4, 512, 512)}
    return SegformerForSemanticSegmentation(SegformerConfig(num_labels=150)), (), kwargs


def _detector() -> Any:
    import torch

    from lab import workloads
    from lab.optimize.networks import Detector

    kwargs = {"image": torch.randn(4, 3, 640, 640), "kinds": workloads._ids(91, 4, 8), "boxes": torch.rand(4, 8, 4)}
    return Detector(), (), kwargs


def _citations() -> Any:
    """A citation graph of the size of common benchmarks."""
    import torch

    from lab import workloads
    from lab.optimize.networks import Messages

    kwargs = {"x": torch.randn(2708, 1433), "edges": workloads._ids(2708, 2, 10_556)}
    return Messages(1433, 64, 7), (), {**kwargs, "labels": workloads._ids(7, 2708, 1)[:, 0]}


def _waves() -> Any:
    import torch

    from lab.optimize.networks import Waves

    kwargs = {"field": torch.randn(16, 3, 64, 64, dtype=torch.float32)}
    return Waves(), (), {**kwargs, "labels": torch.randn(16, 1, 64, 64, dtype=torch.float32)}


def _sketches() -> Any:
    import torch

    from lab.optimize.networks import Sketches

    return Sketches(), (), {"image": torch.randn(128, 3, 64, 64)}


def _piano() -> Any:
    import torch

    from lab.optimize.networks import Notes

    kwargs = {name: (torch.rand(32, 400, 88) < 0.05).float() for name in ("played", "labels")}
    return Notes().float(), (), kwargs


def _judge() -> Any:
    import torch

    from lab.optimize.networks import Judge

    kwargs = {"image": torch.randn(128, 3, 32, 32).float(), "labels": torch.randn(128).sign().float()}
    return Judge().float(), (), kwargs


def _translator() -> Any:
    from lab import workloads
    from lab.optimize.networks import Translator

    names = ("source", "target", "labels")
    return Translator().float(), (), {name: workloads._ids(10_000, 32, 64) for name in names}


def _player() -> Any:
    import torch

    from lab import workloads
    from lab.optimize.networks import Player

    kwargs = {"frames": workloads._ids(256, 256, 4, 84, 84).to(torch.uint8), "taken": workloads._ids(6, 256, 1)[:, 0]}
    given = {name: torch.randn(256, dtype=torch.float32) for name in ("gain", "labels")}
    return Player().float(), (), {**kwargs, "before": torch.full((256,), -1.8, dtype=torch.float32), **given}


def _timm(name: str, batch: int) -> Any:
    def make() -> Any:
        from lab import workloads

        return workloads._timm(name, batch)

    return make


TRAINED = {
    "t5-base-train-8x512": _t5, "whisper-base-train-8": _whisper, "convnext-tiny-train-64": _timm("convnext_tiny", 64),
    "efficientnet-b0-train-64": _timm("efficientnet_b0", 64), "bert-base-words-train-32x128": _masked_words,
    "swin-tiny-train-32": _timm("swin_tiny_patch4_window7_224", 32), "whisper-small-train-8": _whisper_small,
    "mixtral-8l-train-4x1024": _mixtral, "unet-train-16": _unet, "dcn-train-8192": _dcn, "clip-b32-train-128": _clip,
    "wav2vec2-base-train-8x10s": _speech, "llama1b-lora-train-4x1024": _lora, "graph-train-170k": _graph,
    "gpt2-medium-checkpointed-train-8x512": _checkpointed, "resnet50-amp-train-64": _cast,
    "gpt2-medium-amp-train-8x512": _cast_words, "t5-small-train-8x128": _t5_small, "lstm-train-35x20": _words,
    "table-train-1024": _columns, "segformer-b0-train-4": _segments, "detector-train-4": _detector,
    "citations-train-2708": _citations, "resnet18-train-16": _timm("resnet18", 16),
    "mobilenetv3-train-32": _timm("mobilenetv3_small_100", 32), "waves-train-16": _waves,
    "sketches-train-128": _sketches, "table-train-8": _few_columns, "piano-train-32x400": _piano,
    "judge-train-128": _judge, "translator-train-32x64": _translator, "player-train-256": _player,
    "gpt2-medium-checkpointed-drops-train-8x512": lambda: _checkpointed(drops=True),
}  # fmt: skip


def _timed(step: Any, num: int) -> float:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(num):
        step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / num


def _peak(step: Any) -> tuple[int, int] | None:
    """Peak bytes allocated and reserved in a step."""
    import torch

    if not torch.cuda.is_available():
        return None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


# Memory of captures.


def _memory(asked: argparse.Namespace) -> None:
    """Bytes reserved by eager steps and by captures of them, and the error of the captures' gradients."""
    from ridgeline.engine.capture import cuda_graph as executor

    found: dict[str, Any] = {}
    for name in ("resnet50-train-64-nhwc", "gpt2-medium-train-8x512", "vit-base-train-64"):
        work = _built(name, asked.device)
        found[name] = {"eager": _reserved(work, work["model"])}
        for way in (False, True):
            with executor.growing(way):
                found[name]["growing" if way else "segments"] = _recorded(work)
        _tell({"reserved_bytes": found})
        del work
        _freed()


def _reserved(work: dict[str, Any], call: Any) -> int:
    """Peak bytes reserved for forward and backward, without the optimizer."""
    import torch

    step = _stepping(work, call, torch.optim.SGD(work["model"].parameters(), lr=0.0))
    for _ in range(2):
        step()
    work["model"].zero_grad(set_to_none=True)
    found = (_peak(step) or (0, 0))[1]
    work["model"].zero_grad(set_to_none=True)
    return found


def _recorded(work: dict[str, Any]) -> dict[str, Any]:
    import torch

    from ridgeline.engine.replay.training import graph_training

    model, losses, norms = work["model"], [], []
    call = graph_training(model, work["args"], work["kwargs"], model, loss=work["loss"])
    held = _reserved(work, call)
    for each in (model, call):
        torch.manual_seed(1)
        losses.append(float(_stepping(work, each, torch.optim.SGD(model.parameters(), lr=0.0))()))
        grads = [p.grad.float().norm() for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.stack(grads).norm()))
        model.zero_grad(set_to_none=True)
    found = {"reserved": held, "pool": call.pool_bytes(), "losses": losses, "norms": norms, "misses": call.misses}
    del call
    _freed()
    return found


# Drift.


def _odd(rows: int, inputs: int, outputs: int, device: str) -> dict[str, Any]:
    """Milliseconds of a linear layer forward and backward, plain and padded, the least of several rounds."""
    import torch

    from ridgeline.optimizer.in_place.padded_linear import padded_linear

    layer = torch.nn.Linear(inputs, outputs, bias=False, device=device, dtype=torch.bfloat16)
    x = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(rows, outputs, device=device, dtype=torch.bfloat16)

    def plain() -> Any:
        return torch.autograd.grad(layer(x), (x, layer.weight), grad)

    def padded() -> Any:
        return torch.autograd.grad(padded_linear(x, layer.weight), (x, layer.weight), grad)

    ways: dict[str, Any] = {"plain_ms": plain, "padded_ms": padded}
    found = {who: 1e3 * min(_timed(way, 5) for _ in range(4)) for who, way in ways.items()}
    apart = max(float((a - b).norm() / b.norm()) for a, b in zip(padded(), plain(), strict=True))
    return {"rows": rows, "inputs": inputs, "outputs": outputs, **found, "apart": apart}


def _drifted(asked: argparse.Namespace) -> None:
    import torch

    small = asked.device == "cpu"
    turn = Turn(asked.lock)
    turn.take()
    _tell({"odd": [_odd(*(size // 16 if small else size for size in sizes), asked.device) for sizes in ODD]})
    turn.give()
    trails: dict[str, list[float]] = {}
    for exact in (False, True):
        torch.use_deterministic_algorithms(exact)
        for kind in ("eager", "eager again", "perturbed", "recorded"):
            name = f"{kind}, deterministic" if exact else kind
            turn.take()
            trails[name] = _trail(kind, asked.device, small)
            turn.give()
            _tell({"trails": trails, "distances": _distances(trails)})
    torch.use_deterministic_algorithms(False)


def _distances(trails: dict[str, list[float]]) -> dict[str, float]:
    """The largest relative difference of a loss from eager's."""
    found = {}
    for name, losses in trails.items():
        eager = trails["eager, deterministic" if name.endswith("deterministic") else "eager"]
        found[name] = max(abs(a - b) / abs(a) for a, b in zip(eager, losses, strict=True))
    return found


def _trail(kind: str, device: str, small: bool) -> list[float]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import lab.workloads  # noqa: F401  (lets transformers be imported beside a torchvision of another build)
    from ridgeline.engine.drop_in import Optimized, Plan, plain_step
    from ridgeline.engine.replay.inference import graph_training
    from ridgeline.engine.replay.step import GraphedUpdate
    from ridgeline.optimizer.search.loss_curve import _perturb

    width, depth, vocabulary = (64, 2, 128) if small else (768, 12, 50257)
    config = GPT2Config(n_layer=depth, n_embd=width, n_head=width // 64, vocab_size=vocabulary, resid_pdrop=0.0,
                        embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(config).to(device, torch.bfloat16).train()
    ids = torch.randint(0, 100, (2, 8) if small else (8, 256)).to(device)
    kwargs = {"input_ids": ids, "labels": ids, "use_cache": False}
    if kind == "perturbed":
        _perturb(list(model.parameters()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    call, update = model, None
    if kind == "recorded":
        graphed = graph_training(model, (), kwargs, model, executor=_stand_in() if device == "cpu" else None)
        call = Optimized(model, [Plan(graphed.signature, graphed)], mode="train")
        update = GraphedUpdate(optimizer, graphed)
    losses = []
    for _ in range(50):
        losses.append(plain_step(call, optimizer, None, (), kwargs, update))
    if update is not None:
        print("replayed", graphed.replays, "updates", update.replays, update.misses, graphed.misses, flush=True)
    return [float(value) for value in losses]


def _stand_in() -> Any:
    sys.path.insert(0, str(ROOT / "tests" / "unit" / "optimizer"))
    from recorder import TapeExecutor

    return TapeExecutor()


if __name__ == "__main__":
    main()
