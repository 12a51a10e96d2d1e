"""Shapes and dtypes that a trace recorded with its ops, and the products they mean."""

from __future__ import annotations

import json
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ridgeline.findings.replay.replay import Index
from ridgeline.trace.table import Trace

_PRODUCTS = {
    "aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::matmul": (0, 1), "aten::addmm": (1, 2), "aten::baddbmm": (1, 2),
    "aten::linear": (0, 1), "aten::_addmm_activation": (1, 2), "aten::_scaled_mm": (0, 1),
}  # fmt: skip
DTYPES = {
    "float": "fp32", "c10::half": "fp16", "c10::bfloat16": "bf16", "double": "fp64", "half": "fp16", "bfloat16": "bf16",
    "long int": "int64", "int": "int32", "long": "int64", "unsigned char": "uint8", "bool": "bool",
    "signed char": "int8", "c10::float8_e4m3fn": "fp8", "c10::float8_e5m2": "fp8",
}  # fmt: skip


class Product(NamedTuple):
    """``b`` products of m×k by k×n."""

    b: int
    m: int
    n: int
    k: int


def shaped_ops(trace: Trace, works: Index) -> Index:
    """The innermost op around each piece of work that has recorded shapes; -1 where there is none."""
    shapes = trace.optional("shapes")
    at = np.where(trace.launch[works] >= 0, trace.launch[works], -1).astype(np.int64)
    found = np.full(len(works), -1, dtype=np.int64)
    for _ in range(8):
        has = (at >= 0) & (found < 0)
        if not has.any():
            break
        hit = has & (shapes[np.maximum(at, 0)] > 0)
        found[hit] = at[hit]
        at = np.where(has, trace.parent[np.maximum(at, 0)], -1)
    return found


@lru_cache(maxsize=50_000)
def parsed(text: str) -> tuple[Any, ...]:
    """Recorded shapes or dtypes; what cannot be read is nothing."""
    if not text:
        return ()
    try:
        found = json.loads(text)
    except ValueError:
        return ()
    return tuple(found) if isinstance(found, list) else ()


def is_shape(value: Any) -> bool:
    """A list of sizes that a tensor can have; a damaged trace has others."""
    # No dim of a tensor is as large.
    return isinstance(value, list) and all(isinstance(size, int) and abs(size) < (1 << 48) for size in value)


def product_of(op: str, shapes: str) -> Product | None:
    """The matrix product an op asks for, or None; one of nothing (an expert without tokens) is none."""
    found = _asked_of(op, shapes)
    return found if found is not None and min(found) > 0 else None


def _asked_of(op: str, shapes: str) -> Product | None:
    places = _PRODUCTS.get(op)
    given = parsed(shapes)
    if places is None or len(given) <= max(places):
        return None
    a, b = given[places[0]], given[places[1]]
    if not (is_shape(a) and is_shape(b) and len(a) >= 1 and len(b) >= 1):
        return None
    if op == "aten::linear":
        return Product(1, prod(a[:-1]), b[0], a[-1])
    if len(a) < 2 or len(b) < 2:
        return None
    if len(b) == 2:
        return Product(1, prod(a[:-1]), b[-1], a[-1])
    return Product(prod(a[:-2]), a[-2], b[-1], a[-1])


def dtype_named(word: Any) -> str:
    """A recorded dtype in our words; empty if unknown."""
    return DTYPES.get(str(word).lower(), "")


def first_dtype(dtypes: str) -> str:
    """The dtype of the first tensor, in our words; empty if unknown."""
    return next((name for name in map(dtype_named, parsed(dtypes)) if name), "")


def first_shape(shapes: str) -> tuple[int, ...]:
    return next((tuple(shape) for shape in parsed(shapes) if is_shape(shape) and shape), ())
