"""Compilations that end when their time is up: between two of their steps, with nothing left half done.

What a compiler takes is priced by kernels counted, and hosts differ by factors. Where the price says that it will just
not fit, the time that is left is better spent on trying than not at all.
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
"""Steps of PyTorch's tracer, of whoever walks a graph, of Inductor's fusing and writing of kernels, of what it asks a
C++ compiler for (which instructions it knows, a kernel), and of its tuning: a product, or a kernel when first run. What
is asked stays unasked: a build that was stopped inside would be taken for instructions that do not work."""


class OutOfTime(OptimizeError):
    """A compiler took longer than it had."""


@contextmanager
def within(seconds: float | None, *, importing: bool = True) -> Iterator[None]:
    """Compilers raise OutOfTime at their first step after so many seconds, in whatever thread; None is no limit.

    Tracers wrap what is raised inside of them, so it is raised anew where it comes out. What does not compile need not
    import compilers for it (``importing``).
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
    """Those that this release of PyTorch has, where it has them; ``importing`` also those not imported yet."""
    for module, owner, name in STEPS:
        kind = getattr(importlib.import_module(module) if importing else sys.modules.get(module), owner, None)
        if kind is not None and callable(vars(kind).get(name)):
            yield kind, name
