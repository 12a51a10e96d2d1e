"""Steps of ATen as kernels of our own, compiled on any machine: what C over the CUDA driver launches without cuBLAS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.engine.file.program import Program, Step
from ridgeline.errors import EngineError, KernelError


@dataclass(frozen=True, slots=True)
class Launch:
    """A plain launch of a compiled kernel, its arguments on tensors without memory."""

    name: str
    cubin: bytes
    num_warps: int
    shared_bytes: int
    kinds: tuple[str, ...]
    grid: tuple[int, int, int]
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Product:
    """A linear layer that waits for the step behind it, which becomes its epilogue."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None

    def fused(self, activation: str = "none", added: Tensor | None = None) -> Tensor:
        """``activation(x @ weight.T + bias + added)`` by one kernel."""
        from ridgeline import kernels

        n, k = self.weight.shape
        rows = None if added is None else added.reshape(-1, n)
        made = kernels.dense(self.x.reshape(-1, k), self.weight, self.bias, added=rows, activation=activation)
        return made.reshape(*self.x.shape[:-1], n)


ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
EPILOGUES = ("aten::add.Tensor", "aten::relu.default", "aten::gelu.default", "aten::silu.default")


class LaunchesOnly(TorchDispatchMode):
    """Inside, an op of ours runs its own Python, and whatever is more than allocations, views and launches is an error:
    the copies and fills of ATen would be missing from what was told."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from ridgeline import kernels

        if func.namespace == "ridgeline_kernels":
            with self:
                return kernels.primitive(func._schema.name.partition("::")[2]).forward(*args)
        found = func(*args, **(kwargs or {}))
        known = {x.untyped_storage()._cdata for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        made = [x for x in pytree.tree_leaves(found) if isinstance(x, Tensor)]
        viewed = all(x.untyped_storage()._cdata in known for x in made)
        if func._schema.is_mutable or not (viewed or func._schema.name.partition("::")[2] in ALLOCATIONS):
            raise EngineError(f"{func._schema.name} around a kernel is not written to C: hand over contiguous tensors")
        return found


def waiting_products(program: Program) -> frozenset[int]:
    """Linear layers that nobody but one step reads, which can be their epilogue."""
    readers = dict[int, list[Step]]()
    for step in program.steps:
        for number in step.values():
            readers.setdefault(number, []).append(step)
    return frozenset(
        step.out[0] for step in program.steps
        if step.op == "aten::linear.default" and [s.op in EPILOGUES for s in readers.get(step.out[0], [])] == [True]
    )  # fmt: skip


def lowered(
    step: Step, args: list[Any], kwargs: dict[str, Any], waits: bool, tell: Callable[[Launch], None]
) -> Any:
    """The result of a step by our kernels on tensors without memory, each launch told; None where there is none.

    A product that waits for its epilogue is returned as a ``Product``.
    """
    from ridgeline import kernels
    from ridgeline.kernels import launcher, pack
    from ridgeline.kernels.compiler import compile_variant

    def launched(kernel: Any, variant: Any, grid: tuple[int, int], special: bool, *given: Any) -> None:
        if special:
            raise EngineError(f"kernel {kernel.name} takes a cluster, tensor maps or the whole device, and the C "
                              "runner makes plain launches")  # fmt: skip
        types, divisible = dict(variant.types), dict(variant.divisible)
        for name, value in zip(types, given, strict=True):
            if isinstance(value, Tensor) and value.storage_offset() * value.element_size() % divisible.get(name, 1):
                raise EngineError(f"kernel {kernel.name} would read {name} unaligned")
        made = pack.find(variant) or compile_variant(kernel.function, variant)
        tell(Launch(made.name, made.cubin, made.num_warps, made.shared_bytes, tuple(types.values()), (*grid, 1), given))

    def call() -> Any:
        held = [value for value in args if isinstance(value, Product)]
        if step.op == "aten::linear.default":
            product = Product(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("bias"))
            return product if waits else product.fused()
        if held and step.op == "aten::add.Tensor" and not kwargs:
            (other,) = (value for value in args if value is not held[0])
            return held[0].fused(added=other)
        if held:
            kind = step.op.partition("::")[2].partition(".")[0]
            tanh = kind == "gelu" and kwargs.get("approximate") == "tanh"
            return held[0].fused(activation="gelu_tanh" if tanh else kind)
        if step.op == "aten::layer_norm.default" and len(args[1]) == 1:
            given: list[Any] = [*args[2:5], *[None, None, 1e-5][len(args) - 2 :]]
            return kernels.layer_norm(args[0], *given[:3])
        if step.op == "aten::rms_norm.default" and len(args[1]) == 1:
            return kernels.rms_norm(args[0], args[2] if len(args) > 2 else None, args[3] if len(args) > 3 else None)
        if step.op == "aten::gelu.default":
            return kernels.gelu(args[0], kwargs.get("approximate", "none"))
        if step.op == "aten::softmax.int" and not kwargs and args[1] in (-1, args[0].dim() - 1):
            return kernels.softmax(args[0])
        if step.op.startswith("ridgeline_kernels::"):
            return kernels.primitive(step.op.partition("::")[2].partition(".")[0])(*args, **kwargs)
        return None

    try:
        with launcher.lowering(launched), LaunchesOnly():
            return call()
    except KernelError as error:
        raise EngineError(f"{step.op}{' in ' + step.module if step.module else ''}: {error}") from None
