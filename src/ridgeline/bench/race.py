"""Primitives against their contenders in one run: interleaved, cold L2, medians, random data.

A row is one contender at one case in one phase: ``fwd`` without gradients, ``bwd`` the gradient alone, ``step`` both,
``call`` the time a small case takes from Python when called again and again, launch included.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.bench.clock import FLUSH_BYTES
from ridgeline.bench.contenders import GRADIENT_IN_FORWARD, Call, compiled_form, contenders
from ridgeline.kernels.contract import Case, Trial, trials

PHASES = ("fwd", "bwd", "step", "call")


@dataclass(frozen=True, slots=True)
class Row:
    """One contender's time on one case; spread is the 10th to the 90th percentile."""

    primitive: str
    dtype: str
    sizes: str
    phase: str
    contender: str
    median_s: float
    low_s: float
    high_s: float
    num: int
    num_bytes: int
    note: str = ""

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.median_s if self.median_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Course:
    """The track: a flush buffer and the protocol by which runners take turns on it."""

    def __init__(self, device: torch.device, rounds: int = 15, budget_s: float = 0.4) -> None:
        self.device = device
        self.rounds = rounds
        self.budget_s = budget_s
        self.flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)

    def turns(self, runs: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
        """Seconds of every repetition of every runner, taken in turns, each with a cold L2."""
        slowest_s = max(self._once(run) for run in runs.values())
        rounds = max(5, min(self.rounds, int(self.budget_s / (len(runs) * (slowest_s + 1.5e-4)))))
        marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in runs}
        order = list(runs.items())
        for i in range(rounds):
            for name, run in order[i % len(order) :] + order[: i % len(order)]:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self.flush.zero_()
                # About 210 µs of an idle device before the clock starts, so that the host's part is over before the
                # device's begins. 80 µs were enough on a quiet host; on a busy one `torch.autograd.grad` alone took 90.
                torch.cuda._sleep(400_000)
                start.record()
                run()
                end.record()
                marks[name].append((start, end))
        torch.cuda.synchronize(self.device)
        return {name: [a.elapsed_time(b) * 1e-3 for a, b in pairs] for name, pairs in marks.items()}

    def calls(self, runs: dict[str, Callable[[], Any]], num: int = 100, repeats: int = 7) -> dict[str, list[float]]:
        """Seconds a call takes when made again and again from Python, the device included, in turns."""
        found: dict[str, list[float]] = {name: [] for name in runs}
        for run in runs.values():
            for _ in range(20):
                run()
        for _ in range(repeats):
            for name, run in runs.items():
                torch.cuda.synchronize(self.device)
                began = time.perf_counter()
                for _ in range(num):
                    run()
                torch.cuda.synchronize(self.device)
                found[name].append((time.perf_counter() - began) / num)
        return found

    def _once(self, run: Callable[[], Any]) -> float:
        for _ in range(3):
            run()
        torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        run()
        torch.cuda.synchronize(self.device)
        return time.perf_counter() - began


def race(
    name: str,
    of: Case,
    course: Course,
    *,
    phases: Sequence[str] = ("fwd", "bwd"),
    compiled: bool = True,
    liger: bool = True,
    seed: int = 0,
    callers: Mapping[str, Call] | None = None,
) -> list[Row]:
    """All contenders over one case; one that fails gets a row that says so.

    ``callers``: contenders made before, where compiling them anew would take too long.
    """
    trial = trials()[name][1]
    if compiled and callers is None:
        torch._dynamo.reset()
    if trial.laps is not None:
        return _laps(name, trial, of, course, phases, seed, compiled)
    rows: list[Row] = []
    callers = callers or contenders(name, trial, compiled=compiled, liger=liger)
    generator = torch.Generator(course.device).manual_seed(seed)
    args = trial.make(of, course.device, generator)
    for phase in phases:
        runs: dict[str, Callable[[], Any]] = {}
        for who, caller in callers.items():
            if phase == "bwd" and (who, name) in GRADIENT_IN_FORWARD:
                continue
            try:
                runs[who] = runner(caller, args, phase, trial.constants)
                runs[who]()
                torch.cuda.synchronize(course.device)
            except Exception as error:  # a contender that cannot run the case loses it, and is named
                runs.pop(who, None)
                rows.append(_row(name, of, phase, who, [], 0, f"{type(error).__name__}: {str(error)[:160]}"))
        num_bytes = moved_bytes(trial, args, phase)
        timed = course.calls(runs) if phase == "call" else course.turns(runs)
        rows += [_row(name, of, phase, who, samples, num_bytes) for who, samples in timed.items()]
        del runs
    return rows


def _laps(
    name: str, trial: Trial, of: Case, course: Course, phases: Sequence[str], seed: int, compiled: bool
) -> list[Row]:
    """Contenders that change their own state: prepared once, then timed lap by lap."""
    assert trial.laps is not None
    made = trial.laps(of, course.device, torch.Generator(course.device).manual_seed(seed))
    runs, rows = {}, []
    entrants = dict(made.runs)
    if compiled and made.compilable is not None:
        entrants["compiled"] = compiled_form(made.compilable)
    for who, run in entrants.items():
        try:
            run()
            torch.cuda.synchronize(course.device)
            runs[who] = run
        except Exception as error:
            rows.append(_row(name, of, phases[0], who, [], 0, f"{type(error).__name__}: {str(error)[:160]}"))
    for phase in phases:
        timed = course.calls(runs) if phase == "call" else course.turns(runs)
        rows += [_row(name, of, phase, who, samples, made.num_bytes) for who, samples in timed.items()]
    return rows


def runner(
    caller: Callable[..., Any], args: tuple[Any, ...], phase: str, constants: tuple[int, ...] = ()
) -> Callable[[], Any]:
    """A repeatable run of one phase over copies of its own: a contender may overwrite its inputs."""
    if phase in ("fwd", "call"):
        own = [_copy(value) for value in args]

        def forward() -> Any:
            with torch.no_grad():
                return caller(*own)

        return forward
    leaves = [value if i in constants else _leaf(value) for i, value in enumerate(args)]
    wanted = [value for value in leaves if isinstance(value, Tensor) and value.requires_grad]
    if phase == "step":

        def step() -> Any:
            outputs = _smooth(caller(*leaves))
            return torch.autograd.grad(outputs, wanted, [torch.ones_like(o) for o in outputs], allow_unused=True)

        return step
    # Forward calls before a backward pass is timed, for everybody: a call's first times are not its last
    for _ in range(4):
        outputs = _smooth(caller(*leaves))
    seeds = [torch.randn_like(value) for value in outputs]
    return lambda: torch.autograd.grad(outputs, wanted, seeds, retain_graph=True, allow_unused=True)


def moved_bytes(trial: Trial, args: tuple[Any, ...], phase: str) -> int:
    """The fewest bytes a phase must move: every tensor in and out once, unless the declaration knows better."""
    with torch.no_grad():
        outputs = trial.call(*args)
    outs = sum(t.nbytes for t in (outputs if isinstance(outputs, tuple) else (outputs,)))
    ins = sum(t.nbytes for t in args if isinstance(t, Tensor))
    floats = sum(t.nbytes for t in args if isinstance(t, Tensor) and t.is_floating_point())
    forward = trial.forward_bytes(args) if trial.forward_bytes else ins + outs
    backward = trial.backward_bytes(args) if trial.backward_bytes else ins + outs + floats
    return {"fwd": forward, "call": forward, "bwd": backward, "step": forward + backward}[phase]


def _row(name: str, of: Case, phase: str, who: str, samples: list[float], num_bytes: int, note: str = "") -> Row:
    ordered = sorted(samples) or [math.nan]
    tenth = len(ordered) // 10
    sizes = " ".join(f"{key}={value}" for key, value in of.sizes)
    return Row(
        name, of.dtype, sizes, phase, who, statistics.median(ordered), ordered[tenth], ordered[-1 - tenth],
        len(samples), num_bytes, note,
    )  # fmt: skip


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    copy = _copy(value.detach())
    return copy.requires_grad_() if copy.is_floating_point() else copy


def _copy(value: Any) -> Any:
    """The same tensor elsewhere, its layout kept: a clone would make a transposed one dense in its own order too."""
    return value.clone(memory_format=torch.preserve_format) if isinstance(value, Tensor) else value


def _smooth(outputs: Any) -> list[Tensor]:
    return [o for o in (outputs if isinstance(outputs, (tuple, list)) else (outputs,)) if o.requires_grad]


@dataclass(frozen=True, slots=True)
class Standing:
    """How a primitive did in a phase: geometric mean of the best contender's time over ours, and the losses."""

    primitive: str
    phase: str
    num_cases: int
    speedup: float
    num_lost: int


def standings(rows: Iterable[Row]) -> list[Standing]:
    """Our speed against the best contender of each case, by primitive and phase."""
    groups: dict[tuple[str, str], list[float]] = {}
    for ours, best in paired(rows):
        groups.setdefault((ours.primitive, ours.phase), []).append(best.median_s / ours.median_s)
    return [
        Standing(name, phase, len(found), math.exp(statistics.fmean(map(math.log, found))), sum(r < 1 for r in found))
        for (name, phase), found in groups.items()
    ]


def paired(rows: Iterable[Row]) -> list[tuple[Row, Row]]:
    """Our row and the best contender's, case by case."""
    cases: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        if not math.isnan(row.median_s):
            cases.setdefault((row.primitive, row.dtype, row.sizes, row.phase), []).append(row)
    found = []
    for together in cases.values():
        ours = [row for row in together if row.contender == "ridgeline"]
        others = [row for row in together if row.contender != "ridgeline"]
        if ours and others:
            found.append((ours[0], min(others, key=lambda row: row.median_s)))
    return found


def copy_bandwidth(course: Course, num_bytes: int = 1 << 30) -> float:
    """Bytes read and written a second by a large device-to-device copy: the ceiling of everything here."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=course.device)
    target = torch.empty_like(source)
    samples = course.turns({"copy": lambda: target.copy_(source)})["copy"]
    return 2 * num_bytes / statistics.median(samples)
