"""``keys.index_copy_(2, index, k); values.index_copy_(2, index, v)`` in one launch.

It writes into its arguments, so it is no primitive of the contract: it is registered by itself, with what it mutates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.cache_append import kernel, reference
from ridgeline.kernels.contract import NAMESPACE
from ridgeline.kernels.launcher import Kernel, Plans, launchable, vector_of
from ridgeline.kernels.rope.op import ROPE
from ridgeline.kernels.rows import float_reason, power_of_two

_STRIDES = (
    "keys_b", "keys_h", "keys_s", "values_b", "values_h", "values_s", "k_b", "k_h", "k_l", "v_b", "v_h", "v_l",
)  # fmt: skip
_APPEND = Kernel(kernel.cache_append, vectors=("d", *_STRIDES), loose=("index_ptr",))
_plans = Plans()


def refusal(keys: Tensor, values: Tensor, index: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the kernel does not write these, or None."""
    if keys.dim() != 4 or keys.shape != values.shape or k.shape != v.shape or k.dim() != 4:
        return "caches are [batch, heads, longest, head dim], new keys and values [batch, heads, new, head dim]"
    if k.shape[:2] != keys.shape[:2] or k.shape[3] != keys.shape[3] or index.shape != k.shape[2:3]:
        return f"new keys {tuple(k.shape)} at {tuple(index.shape)} places do not go into {tuple(keys.shape)}"
    if {x.dtype for x in (keys, values, k, v)} != {keys.dtype} or index.dtype not in (torch.int64, torch.int32):
        return "caches and what is written are of different types, or places are no integers"
    if any(x.stride(3) != 1 for x in (keys, values, k, v)) or not index.is_contiguous():
        return "rows of head dim and places must be dense"
    return float_reason(keys=keys)


def append(keys: Tensor, values: Tensor, index: Tensor, k: Tensor, v: Tensor) -> None:
    """Write new keys and values at ``index`` of the third dim; places outside the cache are left out, not an error."""
    if not launchable(keys) or refusal(keys, values, index, k, v) is not None:
        reference.append(keys, values, index, k, v)
        return
    tensors = (keys, values, k, v)
    pointers = keys.data_ptr() | values.data_ptr() | k.data_ptr() | v.data_ptr()
    key = (
        keys.dtype,
        index.dtype,
        keys.shape,
        k.shape,
        *(x.stride() for x in tensors),
        keys.get_device(),
        pointers & 15,
    )
    plan = _plans.get(key)
    if plan is None:
        strides = tuple(stride for x in tensors for stride in x.stride()[:3])
        rest = (keys.shape[1], keys.shape[2], keys.shape[3], *strides)
        run = _APPEND.bind(
            (keys, values, index, k, v, *rest),
            grid=(keys.shape[0] * keys.shape[1], k.shape[2]),
            constants={"D": power_of_two(keys.shape[3])},
            num_warps=1,
            device=keys.get_device(),
            vector=vector_of(keys.element_size(), pointers, keys.shape[3], *strides),
        )
        plan = _plans[key] = (run, rest)
    plan[0](keys, values, index, k, v, *plan[1])


APPEND = torch.library.custom_op(
    f"{NAMESPACE}::cache_append",
    append,
    mutates_args=("keys", "values"),
    schema="(Tensor(a!) keys, Tensor(b!) values, Tensor index, Tensor k, Tensor v) -> ()",
)
APPEND.register_fake(lambda keys, values, index, k, v: None)


_TURN_STRIDES = (
    "keys_b", "keys_h", "keys_s", "values_b", "values_h", "values_s", "q_b", "q_h", "q_l", "k_b", "k_h", "k_l", "v_b",
    "v_h", "v_l", "out_b", "out_h", "out_l", "cos_b", "cos_l",
)  # fmt: skip
_TURN = Kernel(kernel.rope_append, vectors=("d", "half", *_TURN_STRIDES), loose=("index_ptr",))
_turn_plans = Plans()


def turning_refusal(
    keys: Tensor, values: Tensor, index: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor
) -> str | None:
    """Why the kernel does not turn and write these, or None."""
    reason = refusal(keys, values, index, k, v) or ROPE.support(q, k, cos, sin, False, 2)
    if reason is None and (q.stride(3) != 1 or cos.stride() != sin.stride() or cos.stride(-1) != 1):
        return "rows of queries and of tables must be dense, and both tables laid out alike"
    return reason


def rope_append(
    keys: Tensor, values: Tensor, index: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor,
    interleaved: bool,
) -> Tensor:  # fmt: skip
    """Turn queries and keys, [batch, heads, new, head dim], write keys and values into a cache; the queries, turned."""
    if not launchable(keys) or turning_refusal(keys, values, index, q, k, v, cos, sin) is not None:
        return reference.rope_append(keys, values, index, q, k, v, cos, sin, interleaved)
    out = torch.empty_like(q)
    tensors = (keys, values, q, k, v, out)
    known = (keys.dtype, cos.dtype, index.dtype, keys.shape, q.shape, cos.shape, cos.stride(), interleaved,
             *(x.stride() for x in tensors), keys.get_device(), _pointers(*tensors, cos, sin) & 15)  # fmt: skip
    plan = _turn_plans.get(known)
    if plan is None:
        plan = _turn_plans[known] = _turning(keys, values, index, q, k, v, cos, sin, out, interleaved)
    plan[0](keys, values, index, q, k, v, cos, sin, out, *plan[1])
    return out


def _turning(
    keys: Tensor, values: Tensor, index: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor,
    out: Tensor, interleaved: bool,
) -> tuple[Any, tuple[int, ...]]:  # fmt: skip
    dim, half = q.shape[3], min(cos.shape[-1], q.shape[3] // 2)
    strides = [stride for x in (keys, values, q, k, v, out) for stride in x.stride()[:3]]
    strides += [cos.stride(0) if cos.dim() == 3 and cos.shape[0] > 1 else 0, cos.stride(-2)]
    rest = (q.shape[1], q.shape[2], keys.shape[2], half, dim, *strides)
    run = _TURN.bind(
        (keys, values, index, q, k, v, cos, sin, out, *rest),
        grid=(q.shape[0] * q.shape[2], q.shape[1] + k.shape[1]),
        constants={
            "D": power_of_two(dim), "HALF": power_of_two(half), "INTERLEAVED": interleaved, "TAIL": dim > 2 * half,
        },
        num_warps=1,
        device=keys.get_device(),
        vector=vector_of(keys.element_size(), _pointers(keys, values, q, k, v, out, cos, sin), dim, half, *strides),
    )  # fmt: skip
    return run, rest


def _pointers(*tensors: Tensor) -> int:
    found = 0
    for tensor in tensors:
        found |= tensor.data_ptr()
    return found


ROPE_APPEND = torch.library.custom_op(
    f"{NAMESPACE}::rope_append",
    rope_append,
    mutates_args=("keys", "values"),
    schema="(Tensor(a!) keys, Tensor(b!) values, Tensor index, Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, "
    "bool interleaved) -> Tensor",
)
ROPE_APPEND.register_fake(lambda keys, values, index, q, k, v, cos, sin, interleaved: torch.empty_like(q))
