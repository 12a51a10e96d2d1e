"""Deadlines for compilation: compilers are interrupted between two steps, so that nothing is left half done.

Compile times are estimated from the number of kernels, and hosts differ by factors, so a compilation that may not fit
is started all the same.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from ridgeline.errors import OptimizeError

STEPS = (
    ("torch._dynamo.symbolic_convert", "InstructionTranslatorBase", "step"),
    ("torch.fx.interpreter", "Interpreter", "run_node"),
    ("torch._inductor.scheduler", "Scheduler", "can_fuse"),
    ("torch._inductor.codegen.simd", "SIMDScheduling", "codegen_node"),
    ("torch._inductor.codegen.cpp", "CppScheduling", "codegen_node"),
    ("torch._inductor.cpu_vec_isa", "VecISA", "check_build"),
    ("torch._inductor.async_compile", "AsyncCompile", "cpp_pybinding"),
    ("torch._inductor.select_algorithm", "AlgorithmSelectorCache", "__call__"),
    ("torch._inductor.runtime.triton_heuristics", "CachingAutotuner", "autotune_to_one_config"),
    ("torch._inductor.runtime.triton_heuristics", "CachingAutotuner", "coordinate_descent_tuning"),
)
"""The interruptible steps: of the tracer, of FX interpreters, of Inductor's scheduler and code generation, of its C++
compiler (probing instructions, building a kernel), and of its autotuning. A step itself is never interrupted, because
an aborted probe would be taken for missing instructions."""


class OutOfTime(OptimizeError):
    """A compilation exceeded its deadline."""


@contextmanager
def within(seconds: float | None, *, importing: bool = True) -> Iterator[None]:
    """Make compilers raise OutOfTime at their first step after so many seconds, in any thread; None is no limit.

    Tracers wrap exceptions, so OutOfTime is raised again outside. ``importing`` imports the compilers if needed.
    """
    if seconds is None:
        yield
        return
    end = time.perf_counter() + seconds
    said = f"not made within {seconds:.0f} s, which was all the time there was"
    late: list[bool] = []

    def timed(step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def looked(*args: Any, **kwargs: Any) -> Any:
            if time.perf_counter() > end:
                late.append(True)
                raise OutOfTime(said)
            return step(*args, **kwargs)

        return looked

    kept = [(kind, name, vars(kind)[name]) for kind, name in _steps(importing)]
    try:
        for kind, name, step in kept:
            setattr(kind, name, timed(step))
        yield
    except Exception as error:
        if late:
            raise OutOfTime(said) from error
        raise
    finally:
        for kind, name, step in kept:
            setattr(kind, name, step)


def _steps(importing: bool = True) -> Iterator[tuple[type, str]]:
    """The steps that this release of PyTorch has; ``importing`` also those not imported yet."""
    for module, owner, name in STEPS:
        kind = getattr(importlib.import_module(module) if importing else sys.modules.get(module), owner, None)
        if kind is not None and callable(vars(kind).get(name)):
            yield kind, name
