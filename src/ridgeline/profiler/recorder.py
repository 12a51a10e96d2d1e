"""Records a running program: warm-up found by itself, power beside the steps, overhead measured and stated."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ridgeline.errors import InputError, nearest
from ridgeline.profiler.floors import with_floors
from ridgeline.profiler.lines import with_lines, with_module_lines
from ridgeline.profiler.marks import Masks, collections_marked, forward_lines, modules_marked, roots
from ridgeline.profiler.sampler import Sampler, Samples
from ridgeline.profiler.steady import LEAST_STEPS, Steady, steady
from ridgeline.trace import Trace, read

if TYPE_CHECKING:
    from ridgeline.profiler.callback import StepCallback

WATCHING, SETTLING, RECORDING = "watching", "settling", "recording"
PAUSING, TRACING_LINES, DONE = "pausing", "tracing lines", "done"
BLOCK = "block"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to record."""

    steps: int = 3
    warmup: int | None = None
    max_warmup: int = 60
    shapes: bool = True
    stack: bool = False
    modules: bool = True
    power: bool = True
    memory: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise InputError(f"steps is {self.steps}: at least one step must be recorded")
        if self.warmup is not None and self.warmup < 0:
            raise InputError(f"warmup is {self.warmup}: give the number of steps to let pass, or None to find it")
        if self.max_warmup < 1:
            raise InputError(f"max_warmup is {self.max_warmup}: at least one step must pass to be timed")


def wanted_of(options: dict[str, Any]) -> Wanted:
    """What was asked for by name; an unknown name suggests the nearest."""
    known = [field.name for field in fields(Wanted)]
    for name in options:
        if name not in known:
            raise InputError(f"profile has no option {name!r}{nearest(name, known)}")
    return Wanted(**options)


class Run:
    """A recording. ``step()`` after every step; without steps, the whole block is one.

    Unprofiled steps are timed until their level holds; the next ones run under the profiler; the rest of the program
    runs as if nothing had happened. ``trace`` is the result, ``file`` the Kineto file it was read from.
    """

    def __init__(
        self,
        out: str | os.PathLike[str] | None = None,
        model: nn.Module | Iterable[nn.Module] | None = None,
        wanted: Wanted | None = None,
    ) -> None:
        self.wanted = wanted or Wanted()
        self.models = [model] if isinstance(model, nn.Module) else list(model or ())
        self.file = Path(out) if out is not None else Path(tempfile.mkdtemp(prefix="ridgeline-")) / "trace.json"
        self._lines = self.file.with_name(self.file.name.split(".json")[0] + ".lines.json")
        if not self.file.parent.is_dir():
            raise InputError(f"cannot write {self.file}: there is no folder {self.file.parent}")
        if not self.file.name.endswith((".json", ".json.gz")):
            raise InputError(f"{self.file}: a recording is JSON, give it a name that ends in .json or .json.gz")
        for old in (self.file, self._lines):
            old.unlink(missing_ok=True)
        self.state = BLOCK
        self.facts: dict[str, Any] = {}
        self.notes: list[str] = []
        self._watch = _Watch()
        self._session: _Session | None = None
        self._trace: Trace | None = None
        self._num_left = 0

    # ---------------------------------------------------------------- the user's side

    def __enter__(self) -> Run:
        self._open(stack=False)
        return self

    def __exit__(self, kind: Any, error: Any, where: Any) -> None:
        if self.state == DONE:
            return
        if self.state in (WATCHING, SETTLING):
            self._abandon()
        elif self._session is not None:
            self._finish_early()
        self.state = DONE

    def step(self) -> None:
        """One step of the program has ended."""
        if self.state == BLOCK:
            self._abandon()
            self.state = WATCHING
            self._watch.mark()
        elif self.state == WATCHING:
            self._watch.mark()
            self._start_when_steady()
        elif self.state == SETTLING:
            self._settled()
        elif self.state == RECORDING:
            self._recorded()
        elif self.state == PAUSING:
            # A step later: PyTorch's stack tracer corrupts memory if it starts in the call that ended another session
            self._open(stack=True)
            self._require().begin([])
            self.state = TRACING_LINES
        elif self.state == TRACING_LINES:
            session = self._require()
            session.end()
            session.export(self._lines, {})
            self._session = None
            self.state = DONE

    @property
    def done(self) -> bool:
        """Whether everything that was wanted is recorded."""
        return self.state == DONE

    @property
    def trace(self) -> Trace:
        """The recorded run as a span table."""
        if self._trace is None:
            self._trace = self._read()
        return self._trace

    # ---------------------------------------------------------------- states

    def _start_when_steady(self) -> None:
        """The warm-up has passed when it was said to, when the level holds, or when patience ends."""
        times = self._watch.times_s()
        found = steady(times)
        num = self._watch.num
        fixed = self.wanted.warmup
        if fixed is not None:
            if num < fixed + LEAST_STEPS:
                return
            found = found or _level_of(times, fixed)
        elif found is None and num < self.wanted.max_warmup:
            return
        if found is None:
            self.notes.append(
                f"the step time never settled within {self.wanted.max_warmup} steps: what follows may still be warm-up"
            )
            found = _level_of(times, len(times) // 2)
        self._note_steady(found)
        self._open(stack=False)
        self.state = SETTLING

    def _note_steady(self, found: Steady | None) -> None:
        if found is None:
            return
        self.facts |= {
            "warmup_steps": found.first,
            "unprofiled_step_s": found.step_s,
            "unprofiled_spread_s": found.spread_s,
            "unprofiled_num": found.num,
        }
        self.notes.append(
            f"steady after {found.first} steps (last change of level): {found.step_s * 1e3:.3f} ms a step "
            f"± {found.spread_s * 1e3:.3f}, median of {found.num} without the profiler"
        )

    def _settled(self) -> None:
        """The first step under the profiler pays for its start, and is thrown away."""
        session = self._require()
        session.begin(self._model_roots() if self.wanted.modules else [])
        self._num_left = self.wanted.steps
        self.state = RECORDING

    def _recorded(self) -> None:
        self._num_left -= 1
        session = self._require()
        if self._num_left:
            session.step()
            return
        self._close(session, self.file, self.wanted.steps)
        self.state = PAUSING if self.wanted.stack else DONE

    def _finish_early(self) -> None:
        """The program ended within the recording: what there is, is kept."""
        session = self._require()
        if self.state == TRACING_LINES:
            session.end()
            self._session = None
            return
        if self.state == RECORDING and self._num_left == self.wanted.steps:
            self.notes.append("the program ended before a recorded step was complete")
        if self.state == BLOCK:
            self.notes.append(
                "no steps were marked: the block is recorded whole, warm-up included, and its overhead is not measured "
                "(call run.step() after every step)"
            )
        self._close(session, self.file, max(1, self.wanted.steps - self._num_left) if self.state == RECORDING else 1)

    def _abandon(self) -> None:
        if self._session is not None:
            self._session.end()
            self._session = None

    # ---------------------------------------------------------------- profiler sessions

    def _open(self, *, stack: bool) -> None:
        self._session = _Session(self.wanted, stack=stack)
        if self.state == BLOCK:
            self._session.begin(self._model_roots() if self.wanted.modules else [])

    def _model_roots(self) -> list[nn.Module]:
        """The models to name: those given, else those alive now; they may be made after the recording began."""
        return roots(self.models)

    def _require(self) -> _Session:
        assert self._session is not None, f"no session in state {self.state}"
        return self._session

    def _close(self, session: _Session, path: Path, num_steps: int) -> None:
        wall_s = session.end()
        samples = session.samples
        if self.state == RECORDING:
            profiled_s = wall_s / num_steps
            self.facts["profiled_step_s"] = profiled_s
            base_s = self.facts.get("unprofiled_step_s")
            if base_s:
                self.facts["overhead_frac"] = profiled_s / base_s - 1.0
                noise = self.facts.get("unprofiled_spread_s", 0.0)
                seen = "" if abs(profiled_s - base_s) > 2 * noise else ", which is within the noise of the step"
                self.notes.append(
                    f"recorded steps take {profiled_s * 1e3:.3f} ms: {profiled_s / base_s - 1.0:+.1%} overhead{seen}"
                )
        if session.num_modules == 0 and self.wanted.modules:
            self.notes.append("no module was found to name: pass the model with profile(model=…)")
        if samples is not None and samples.source not in ("NVML", "nvidia-smi"):
            self.notes.append(f"power: {samples.source}")
        self.facts |= session.facts() | {
            "notes": list(self.notes),
            "power_source": samples.source if samples else "off",
        }
        self.facts["module_lines"] = session.module_lines
        session.export(path, self.facts | {"counters": _columns(samples)})
        self._session = None

    def _read(self) -> Trace:
        if not self.file.exists():
            raise InputError(
                f"nothing was recorded: the program made {self._watch.num} steps, which is too few to find its steady "
                f"state and record {self.wanted.steps} (at least {LEAST_STEPS + 1 + self.wanted.steps}); "
                "make more steps, or give warmup=0"
            )
        trace = read(self.file, cache=False)
        trace = with_module_lines(trace)
        if self._lines.exists():
            trace = with_lines(trace, read(self._lines, cache=False))
        trace, coverage = with_floors(trace)
        if coverage.num_kernels:
            self.notes.append(f"{coverage.frac:.0%} of the device's time has a floor from the shapes of its ops")
        return replace(trace, notes=(*dict.fromkeys((*trace.notes, *self.notes)),))

    def callback(self) -> StepCallback:
        """For a Trainer's list of callbacks: it calls ``step`` by itself."""
        from ridgeline.profiler.callback import StepCallback

        return StepCallback(self)


def _level_of(times_s: list[float], first: int) -> Steady | None:
    tail = sorted(times_s[first:])
    if not tail:
        return None
    middle = tail[len(tail) // 2]
    spread = sorted(abs(t - middle) for t in tail)[len(tail) // 2]
    return Steady(first, middle, spread, len(tail))


def _columns(samples: Samples | None) -> dict[str, Any]:
    if samples is None:
        return {}
    return {name: {"at_ns": at_ns, "value": value} for name, (at_ns, value) in samples.columns().items()}


@dataclass(slots=True)
class _Watch:
    """Times of unprofiled steps: the device's clock where there is one, read without waiting for it."""

    moments: list[Any] = field(default_factory=list)

    @property
    def num(self) -> int:
        return max(0, len(self.moments) - 1)

    def mark(self) -> None:
        if not torch.cuda.is_available():
            self.moments.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.moments.append(event)

    def times_s(self) -> list[float]:
        """Of the steps that are over on the device as well."""
        found = []
        for before, after in zip(self.moments, self.moments[1:], strict=False):
            if isinstance(after, float):
                found.append(after - before)
            elif after.query():
                found.append(before.elapsed_time(after) * 1e-3)
            else:
                break
        return found


class _Session:
    """One use of the profiler, with ranges for modules and collections, and the board sampled beside it."""

    def __init__(self, wanted: Wanted, *, stack: bool) -> None:
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        self.profiler = profile(
            activities=activities,
            record_shapes=wanted.shapes,
            with_stack=stack,
            profile_memory=wanted.memory,
            schedule=None,
        )
        self.with_stack = stack
        self.stack = ExitStack()
        self.sampler = Sampler(board_index(os.environ)) if wanted.power and not stack else None
        self.samples: Samples | None = None
        self.masks: Masks | None = None
        self.num_modules = 0
        self.module_lines: dict[str, str] = {}
        self.running = False
        self.began_s = 0.0
        self._step: Any = None
        self._num = 0
        self._padding: list[dict[str, Any]] = []
        # Preparing is the expensive part; it happens a step ahead of what is kept.
        self.profiler.prepare_trace()

    def begin(self, models: list[nn.Module]) -> None:
        """Everything from here on is kept; the device is idle at the start."""
        _synchronize()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.module_lines = forward_lines(models)
        self.masks = Masks(models)
        self.profiler.start_trace()
        self.running = True
        if not self.with_stack:  # the stack's tracer must not meet Python code that runs inside a collection
            self.stack.enter_context(collections_marked())
        self.num_modules = self.stack.enter_context(modules_marked(models)) if models else 0
        if self.sampler:
            self.sampler.start()
        if not self.with_stack:
            self._open_step()
        self.began_s = time.perf_counter()

    def _open_step(self) -> None:
        self._step = torch.profiler.record_function(f"ProfilerStep#{self._num}")
        self._step.__enter__()
        self._num += 1

    def step(self) -> None:
        self._step.__exit__(None, None, None)
        self._open_step()

    def end(self) -> float:
        """Stops; gives the seconds since the beginning, until the device was idle."""
        if not self.running:
            self.profiler.start_trace()
            self.profiler.stop_trace()
            return 0.0
        self.running = False
        _synchronize()
        wall_s = time.perf_counter() - self.began_s
        if self._step is not None:
            self._step.__exit__(None, None, None)
        self.stack.close()
        self.profiler.stop_trace()
        self.samples = self.sampler.stop() if self.sampler else None
        self._padding = self.masks.close() if self.masks else []
        return wall_s

    def facts(self) -> dict[str, Any]:
        """What is known of the process and the device."""
        found: dict[str, Any] = {"num_cores": os.cpu_count(), "torch": torch.__version__}
        if hasattr(os, "sched_getaffinity"):
            found["num_usable_cores"] = len(os.sched_getaffinity(0))
        if self._padding:
            found["padding"] = self._padding
        if torch.cuda.is_available():
            found |= {
                "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
                "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
                "total_bytes": torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory,
            }
        return found

    def export(self, path: Path, facts: dict[str, Any]) -> None:
        """The Kineto file with the facts in it; compressed if its name ends in .gz."""
        plain = path.with_suffix("") if path.suffix == ".gz" else path
        try:
            self.profiler.export_chrome_trace(str(plain))
            if facts:
                _append(plain, facts)
            if plain != path:
                with plain.open("rb") as made, gzip.open(path, "wb", compresslevel=4) as packed:
                    shutil.copyfileobj(made, packed, 1 << 20)
                plain.unlink()
        except (OSError, RuntimeError) as error:
            raise InputError(f"cannot write {path}: {error}") from error


def _append(path: Path, facts: dict[str, Any]) -> None:
    """Add the facts as the document's last key: the profiler closes a trace with one brace."""
    text = json.dumps(facts, separators=(",", ":"), allow_nan=False, default=str)
    with path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        size = file.tell()
        file.seek(max(0, size - 256))
        tail = file.read()
        brace = tail.rfind(b"}")
        if brace < 0:
            return
        file.seek(max(0, size - 256) + brace)
        file.write(b',"ridgeline":' + text.encode() + b"}\n")
        file.truncate()


def board_index(environ: Mapping[str, str]) -> int:
    """The driver's number of the device in use: PyTorch counts only those it is shown."""
    current = torch.cuda.current_device() if torch.cuda.is_available() else 0
    shown = [word.strip() for word in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return int(shown[current]) if current < len(shown) and shown[current].isdigit() else current


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
