"""A program run without values: every shape, type and argument checked, and its memory counted, before anything is
allocated. For files that somebody else made: ten lines of JSON can ask for terabytes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ridgeline.engine.file.execute import interpret, last_uses
from ridgeline.engine.file.program import Program, Step
from ridgeline.errors import EngineError
from ridgeline.units import show_bytes


@contextmanager
def _quiet() -> Iterator[None]:
    """PyTorch logs what it cannot run with a traceback; our error says it in a line."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def peak_bytes(
    program: Program, shapes: Sequence[Sequence[int]], weights: Mapping[str, Tensor], limit_bytes: int, what: str
) -> int:
    """Most bytes that values need at once, weights left out; an error where a step cannot run or that is too much.

    Counted from the storages that live between steps: what a kernel needs inside of it is not known here.
    """
    with _quiet(), FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fakes = dict[str, Any]()

        def weight(name: str) -> Any:
            if name not in fakes:
                real = weights[name]
                fakes[name] = mode.from_tensor(real)
                owned.add(fakes[name].untyped_storage()._cdata)
            return fakes[name]

        owned, largest = set[int](), 0
        inputs = [torch.empty(tuple(shape), dtype=getattr(torch, given.dtype))
                  for shape, given in zip(shapes, program.inputs, strict=True)]  # fmt: skip
        owned |= {each.untyped_storage()._cdata for each in inputs}
        live: dict[int, int] = {}
        alive: dict[int, int] = {}  # value → storage

        def count(index: int, step: Step, results: list[Any]) -> None:
            nonlocal largest
            for number, found in zip(step.out, results, strict=False):
                if isinstance(found, Tensor):
                    storage = found.untyped_storage()
                    if storage._cdata not in owned:
                        live[storage._cdata] = storage.nbytes()
                        alive[number] = storage._cdata
            total = sum(live.values())
            largest = max(largest, total)
            if total > limit_bytes:
                raise EngineError(f"{what}: step {index} ({step.op}) needs {show_bytes(total)} of memory, and "
                                  f"{show_bytes(limit_bytes)} are allowed (memory_limit)")  # fmt: skip
            for number in dead.get(index, ()):
                gone = alive.pop(number, None)
                if gone is not None and gone not in alive.values():
                    live.pop(gone, None)

        dead, at = last_uses(program), [0]

        def each(index: int, step: Step, results: list[Any]) -> None:
            at[0] = index + 1
            count(index, step, results)

        try:
            interpret(program, inputs, weight, torch.device("cpu"), each)
        except EngineError:
            raise
        except Exception as error:
            step = program.steps[min(at[0], len(program.steps) - 1)] if program.steps else None
            first = str(error).strip().splitlines()
            raise EngineError(f"{what}: step {at[0]} ({step.op if step else 'outputs'}) cannot run: "
                              f"{ascii(first[0][:200])[1:-1] if first else error!r}") from None  # fmt: skip
    return largest
