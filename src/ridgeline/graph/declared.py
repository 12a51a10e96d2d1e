"""Costs that owners of custom ops declare for them, so that an op nobody knows can still be priced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ridgeline.errors import CaptureError

CostFn = Callable[..., Mapping[str, float]]
"""``fn(inputs, outputs, **kwargs)`` of types → ``flops``, ``matrix_flops``, ``read_bytes``, ``written_bytes``."""

_FIELDS = frozenset({"flops", "matrix_flops", "read_bytes", "written_bytes"})
_COSTS: dict[str, CostFn] = {}


def cost_of(op_name: str, *, replace: bool = False) -> Callable[[CostFn], CostFn]:
    """Declare what a custom op costs: ``@cost_of("mylib::my_op")`` over a function of its tensor types.

    The function gets ``inputs`` and ``outputs`` (tuples of ``TensorType``) and the op's non-tensor arguments by name;
    it returns a dict with any of ``flops``, ``matrix_flops`` (the part that matrix units do), ``read_bytes`` and
    ``written_bytes``. Bytes left out are those of the inputs and outputs, each once.
    """
    if "::" not in op_name:
        raise CaptureError(f"custom op {op_name!r} needs its namespace: write it as 'namespace::op'")
    if op_name in _COSTS and not replace:
        raise CaptureError(f"the cost of {op_name!r} is declared twice: pass replace=True to mean it")

    def register(fn: CostFn) -> CostFn:
        _COSTS[op_name] = fn
        return fn

    return register


def declared_cost(op_name: str) -> CostFn | None:
    """The owner's cost function of ``namespace::op``, or None where nobody declared one."""
    return _COSTS.get(op_name)


def checked_cost(
    op_name: str, inputs: tuple[Any, ...], outputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, int]:
    """What the owner's function answers, complete and checked."""
    answer = dict(_COSTS[op_name](inputs, outputs, **kwargs))
    strange = set(answer) - _FIELDS
    if strange:
        raise CaptureError(f"the declared cost of {op_name!r} returned {sorted(strange)}: known are {sorted(_FIELDS)}")
    answer.setdefault("flops", 0)
    answer.setdefault("matrix_flops", 0)
    answer.setdefault("read_bytes", sum(t.num_bytes for t in inputs))
    answer.setdefault("written_bytes", sum(t.num_bytes for t in outputs))
    return {name: int(value) for name, value in answer.items()}
