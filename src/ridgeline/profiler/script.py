"""Somebody's script or module, run as it would run alone, its steps found and recorded."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ridgeline.errors import InputError
from ridgeline.profiler.recorder import Run


@dataclass(frozen=True, slots=True)
class Ended:
    """How the program ended: its exit code, its own traceback if it failed, and what its steps were counted by."""

    code: int
    failure: str
    counted: str


def run_script(target: str, args: Sequence[str], run: Run, *, module: bool = False, step_on: str = "") -> Ended:
    """Run ``python target args…`` (``python -m`` for a module) in this process, and record it.

    A step is a call of ``step_on`` (``package.module:function``) if given, else an optimizer step, else, for
    programs that only infer, a batch from a DataLoader; a program with none of them is recorded whole.
    """
    if not module and not Path(target).is_file():
        raise InputError(f"{target} does not exist: give a Python script, or -m and a module's name")
    steps = _Steps(run)
    with ExitStack() as stack:
        stack.enter_context(_arguments(target, args, module))
        stack.enter_context(steps.counting(step_on))
        stack.enter_context(run)
        code, failure = _execute(target, module)
    return Ended(code, failure, steps.source)


def run_model(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Run) -> None:
    """Call a model until enough steps are recorded; a step is a call."""
    with torch.no_grad(), run:
        while not run.done:
            model(*args, **kwargs)
            run.step()


def _execute(target: str, module: bool) -> tuple[int, str]:
    try:
        if module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except SystemExit as leave:
        if leave.code is None or isinstance(leave.code, int):
            return leave.code or 0, ""
        return 1, str(leave.code)
    except Exception:
        # From the first line of the program on: how it was started is not its author's concern
        kind, error, where = sys.exc_info()
        while where is not None and where.tb_frame.f_code.co_filename.endswith(("profiler/script.py", "runpy.py")):
            where = where.tb_next
        while where is not None and where.tb_frame.f_code.co_filename == "<frozen runpy>":
            where = where.tb_next
        return 1, "".join(traceback.format_exception(kind, error, where))
    return 0, ""


@contextmanager
def _arguments(target: str, args: Sequence[str], module: bool) -> Iterator[None]:
    argv, path = sys.argv, sys.path[:]
    sys.argv = [target, *args]
    sys.path.insert(0, "" if module else str(Path(target).resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


class _Steps:
    """Counts the program's steps by the first clock that ticks."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.source = ""
        self.num_batches = 0

    @contextmanager
    def counting(self, step_on: str) -> Iterator[None]:
        if step_on:
            with _wrapped(step_on, lambda: self.tick(f"calls of {step_on}")):
                yield
            return
        handle = register_optimizer_step_post_hook(lambda *event: self.tick("optimizer steps"))
        try:
            with _batches(self._fetched):
                yield
        finally:
            handle.remove()

    def tick(self, source: str) -> None:
        if self.source and self.source != source:
            return
        self.source = source
        self.run.step()

    def _fetched(self) -> None:
        self.num_batches += 1
        # batches fetched without an optimizer step before the loader is taken for the clock
        if not self.source and self.num_batches <= 8:
            return
        if self.source in ("", "batches of a DataLoader"):
            self.tick("batches of a DataLoader")


@contextmanager
def _batches(fetched: Callable[[], None]) -> Iterator[None]:
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    plain = _BaseDataLoaderIter.__next__

    def following(self: Any) -> Any:
        fetched()  # the batch before is done with
        return plain(self)

    _BaseDataLoaderIter.__next__ = following
    try:
        yield
    finally:
        _BaseDataLoaderIter.__next__ = plain


@contextmanager
def _wrapped(where: str, called: Callable[[], None]) -> Iterator[None]:
    """The function ``package.module:function`` or ``…:Class.method`` calls back after each call, while open."""
    from importlib import import_module

    name, _, path = where.partition(":")
    try:
        owner: Any = import_module(name)
        *outer, last = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        plain = getattr(owner, last)
    except (ImportError, AttributeError, ValueError):
        raise InputError(f"cannot find {where!r} to count steps on: write package.module:function") from None

    def counted(*args: Any, **kwargs: Any) -> Any:
        try:
            return plain(*args, **kwargs)
        finally:
            called()

    setattr(owner, last, counted)
    try:
        yield
    finally:
        setattr(owner, last, plain)
