"""``keys.index_copy_(2, index, k); values.index_copy_(2, index, v)`` in one launch.

It writes into its arguments, so it is no primitive of the contract: it is registered by itself, with what it mutates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.cache_append import kernel, reference
from ridgeline.kernels.contract import NAMESPACE
from ridgeline.kernels.launcher import INTERPRETING, Kernel, Plans, launchable, recording, vector_of
from ridgeline.kernels.rope.op import ROPE
from ridgeline.kernels.rows import cdiv, float_reason, power_of_two

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
_TURN = Kernel(kernel.rope_append, vectors=("d", "half", *_TURN_STRIDES), loose=("index_ptr", "ahead_ptr"))
_turn_plans = Plans()
AHEAD_BYTES = 24 << 20
"""Of a weight that is read after attention, as much is fetched into the L2 meanwhile: what stays there beside keys."""
NEAR_BYTES = 16 << 20
"""Keys and values up to this are fetched too; with more of them memory is busy anyway, and nothing is fetched."""
_FETCHERS = 128


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
    interleaved: bool, ahead: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Turn queries and keys, [batch, heads, new, head dim], write keys and values into a cache; the queries, turned.

    ``ahead`` is a weight that is read soon after and that nothing writes until then: while a graph is recorded, the
    launch brings it nearer, and starts before the one ahead of it has ended.
    """
    if not launchable(keys) or turning_refusal(keys, values, index, q, k, v, cos, sin) is not None:
        return reference.rope_append(keys, values, index, q, k, v, cos, sin, interleaved)
    out = torch.empty_like(q)
    tensors = (keys, values, q, k, v, out)
    if ahead is not None and (not recording() or INTERPRETING or not _fetchable(ahead)):
        ahead = None
    known = (keys.dtype, cos.dtype, index.dtype, keys.shape, q.shape, cos.shape, cos.stride(), interleaved,
             *(x.stride() for x in tensors), keys.get_device(), _pointers(*tensors, cos, sin) & 15,
             None if ahead is None else (ahead.dtype, ahead.nbytes, AHEAD_BYTES))  # fmt: skip
    plan = _turn_plans.get(known)
    if plan is None:
        plan = _turn_plans[known] = _turning(keys, values, index, q, k, v, cos, sin, out, interleaved, ahead)
    plan[0](keys, values, index, q, k, v, cos, sin, out, out if ahead is None else ahead, *plan[1])
    return out


def _fetchable(ahead: Tensor) -> bool:
    """Whether a weight lies in one piece, from a multiple of 16 bytes on, and any of it is wanted."""
    return AHEAD_BYTES > 0 and ahead.is_contiguous() and ahead.nbytes >= 1 << 16 and ahead.data_ptr() % 16 == 0


def _turning(
    keys: Tensor, values: Tensor, index: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor,
    out: Tensor, interleaved: bool, ahead: Tensor | None,
) -> tuple[Any, tuple[int, ...]]:  # fmt: skip
    dim, half = q.shape[3], min(cos.shape[-1], q.shape[3] // 2)
    strides = [stride for x in (keys, values, q, k, v, out) for stride in x.stride()[:3]]
    strides += [cos.stride(0) if cos.dim() == 3 and cos.shape[0] > 1 else 0, cos.stride(-2)]
    new, heads, pairs = q.shape[0] * q.shape[2], q.shape[1] + k.shape[1], q.shape[0] * k.shape[1]
    fetchers = 0 if ahead is None else cdiv(_FETCHERS, new)
    near = NEAR_BYTES // max(1, 2 * pairs * dim * keys.element_size())
    rest = (q.shape[1], q.shape[2], keys.shape[2], half, dim, *strides, heads, k.shape[1], near,
            0 if ahead is None else min(AHEAD_BYTES, ahead.nbytes))  # fmt: skip
    run = _TURN.bind(
        (keys, values, index, q, k, v, cos, sin, out, out if ahead is None else ahead, *rest),
        grid=(new, heads + fetchers),
        constants={
            "D": power_of_two(dim), "HALF": power_of_two(half), "INTERLEAVED": interleaved, "TAIL": dim > 2 * half,
            "AHEAD": fetchers, "SHARES": fetchers * new // pairs if _in_rows(keys) and _in_rows(values) else 0,
            "DEPENDENT": ahead is not None,
        },
        num_warps=1,
        device=keys.get_device(),
        vector=vector_of(keys.element_size(), _pointers(keys, values, q, k, v, out, cos, sin), dim, half, *strides),
    )  # fmt: skip
    return run, rest


def _in_rows(cache: Tensor) -> bool:
    """Whether the positions of a head lie one after the other, each in whole accesses of 16 bytes."""
    dim = cache.shape[3]
    return cache.stride(2) == dim and dim * cache.element_size() % 16 == 0 and cache.data_ptr() % 16 == 0


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
    "bool interleaved, Tensor? ahead=None) -> Tensor",
)
ROPE_APPEND.register_fake(lambda keys, values, index, q, k, v, cos, sin, interleaved, ahead=None: torch.empty_like(q))
