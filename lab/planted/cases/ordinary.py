"""The programs of the stand-in on a real device, as cases that ``record`` times and records.

Without a device they run on meta tensors (``--tiny --device cpu``): the control flow alone is tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lab.planted import blind, healthy
from lab.planted.cases.controls import HEALTHY
from lab.planted.programs import graphed
from lab.planted.registry import Program, Setting, Step, case
from lab.planted.stand_in import StandIn


class Gpu:
    """What programs ask of the stand-in, done on CUDA."""

    device = torch.device("cuda")

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> Gpu:
        self._left = ExitStack()
        self._left.enter_context(torch.device("cuda"))
        return self

    def __exit__(self, *error: Any) -> None:
        self._left.close()

    def work(self, ms: float, name: str = "") -> None:
        with torch.profiler.record_function(name) if name else nullcontext():
            end_s = time.perf_counter() + ms * 1e-3
            while time.perf_counter() < end_s:
                pass

    @contextmanager
    def stream(self, number: int) -> Iterator[None]:
        side = self._left.__dict__.setdefault(f"stream {number}", torch.cuda.Stream())
        with torch.cuda.stream(side):
            yield

    def graphed(self, run: Callable[[], Any]) -> Callable[[], Any]:
        return graphed(run)

    def compiled(self, run: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(run)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def malloc(self, num: int = 1, *, free: bool = False) -> None:
        """The allocator asks for memory by itself, once its cache is empty."""
        if free:
            torch.cuda.empty_cache()

    def collective(self, name: str, tensor: Tensor, **how: Any) -> None:
        raise NotImplementedError("one device has nobody to talk to: leave this program out")


COLLECTIVE = frozenset(
    """gradients_reduced_one_by_one reduced_after_backward gradients_reduced_while_backward_runs
    weights_gathered_a_layer_ahead a_split_model_at_large_batch pictures_and_texts_together
    one_stage_of_a_pipeline""".split()
)
"""Programs of several devices, which one device cannot run."""


def _built(build: Callable[[Any, bool], Step]) -> Callable[[Setting, bool], Program]:
    def made(setting: Setting, fixed: bool) -> Program:
        gpu = Gpu() if setting.cuda else StandIn()
        with gpu:
            step = build(gpu, fixed)
        return Program(step=step, scope=lambda: gpu, facts=gpu.facts)

    return made


def _register() -> None:
    for name, one in blind.CASES.items():
        if name not in COLLECTIVE:
            build = _built(one.build)
            build.__name__ = name
            case(one.cause, one.remedy, suite="twenty-sixth")(build)
    for name, program in healthy.CASES.items():
        if name not in COLLECTIVE:
            build = _built(lambda gpu, _, program=program: program(gpu))
            build.__name__ = f"healthy_{name}"
            compiles = name in ("rays_through_a_field", "a_compiled_transformer")
            case("none", "", suite="ordinary", compiles=compiles, **HEALTHY)(build)


_register()
