"""Gluon kernels to sm_90 without a GPU: what the compiler made of them, read as for any other kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ridgeline.kernels.compiler import SM_90, Compiled, Facts, facts_of_cubin


@dataclass(frozen=True, slots=True)
class Unplaced:
    """A tensor that is nowhere: enough of one to describe blocks of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return 0

    def stride(self) -> tuple[int, ...]:
        strides = [1]
        for size in reversed(self.shape[1:]):
            strides.append(strides[-1] * size)
        return tuple(reversed(strides))


def gluon_facts(function: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Facts:
    """Registers, spills, shared memory and instructions of a Gluon kernel called so; needs no device."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", SM_90, 32)
    backend = make_backend(target)
    keywords = {**options, "sanitize_overflow": False}
    bind = create_function_from_signature(function.signature, function.params, backend)
    bound, specialization, chosen = bind(*args, **keywords)
    chosen, signature, constants, attrs = function._pack_args(backend, keywords, bound, specialization, chosen)
    made = triton.compile(GluonASTSource(function, signature, constants, attrs), target=target, options=chosen.__dict__)
    return facts_of_cubin(
        Compiled(made.metadata.name, made.asm["cubin"], made.metadata.num_warps, made.metadata.shared)
    )
