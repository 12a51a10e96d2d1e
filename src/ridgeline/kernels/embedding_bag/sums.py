"""Gradients of rows: indices sorted by row, and every row's gradients summed in a fixed order where they are needed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels import tuning
from ridgeline.kernels.embedding_bag import config, kernel, order
from ridgeline.kernels.embedding_bag.reference import OPTIMIZERS, Rule
from ridgeline.kernels.launcher import INTERPRETING, Kernel, Plans, vector_of
from ridgeline.kernels.rows import cdiv, power_of_two, template

_KEYS = Kernel(
    kernel.embedding_keys, vectors=("size",), loose=("indices_ptr", "offsets_ptr", "starts_ptr", "factor_ptr")
)
_UPDATE = Kernel(kernel.embedding_update, vectors=("dim",), loose=("key_ptr", "order_ptr", "bag_ptr", "share_ptr"))
_MERGE = Kernel(kernel.embedding_merge, vectors=("dim",), loose=("key_ptr",))
_WEIGHT_GRAD = Kernel(kernel.embedding_weight_grad, vectors=("dim",), loose=("key_ptr", "bag_ptr", "out_ptr"))
_PAIRS = Kernel(order.embedding_pairs, loose=("key_ptr", "bag_ptr", "sorted_ptr", "order_ptr"))
_DIGITS = Kernel(order.embedding_digits, loose=("key_ptr",))
_BEFORE = Kernel(order.embedding_before)
_SCATTER = Kernel(order.embedding_scatter, loose=("key_ptr", "order_ptr", "sorted_ptr", "placed_ptr"))
_key_plans, _update_plans, _weight_plans, _order_plans = Plans(), Plans(), Plans(), Plans()
CLEARED_AT_ONCE = 8192


def bags_of(offsets: Tensor, num_tables: int) -> tuple[int, int]:
    """(bags of all tables, bags of each); one offset more than bags says where the last ends, unless no table is
    asked for: then it is one, whose last bag ends where the indices do."""
    if num_tables == 0:
        return offsets.numel(), offsets.numel()
    batch = (offsets.numel() - 1) // num_tables
    return batch * num_tables, batch


class Sorted:
    """Indices of a batch sorted by row, ready for a backward pass: rows, where they stood (or, ``direct``, the bags
    they stood in), their bags and shares. ``dense``: a gradient that is cleared on the way."""

    __slots__ = ("bags", "batch", "direct", "keys", "num_tables", "order", "rows", "shares")

    def __init__(
        self, weight: Tensor, indices: Tensor, offsets: Tensor, starts: Tensor | None, factors: Tensor | None,
        num_tables: int, mean: bool, padding: int, dense: Tensor | None = None,
    ) -> None:  # fmt: skip
        num_rows = weight.shape[0]
        indices, offsets = indices.contiguous(), offsets.contiguous()
        factors = None if factors is None else factors.contiguous()
        num_bags, self.batch = bags_of(offsets, num_tables)
        self.num_tables, n = max(1, num_tables), indices.numel()
        chosen = order_of(n, num_rows)
        kind = torch.int32 if num_rows < 2**31 - 1 else torch.int64
        self.rows = torch.empty(n, dtype=kind, device=weight.device)
        self.bags = torch.empty(n, dtype=torch.int32, device=weight.device)
        shared = mean or factors is not None
        self.shares = torch.empty(n, dtype=torch.float32, device=weight.device) if shared else None
        key = (num_rows, kind, offsets.shape, offsets.dtype, indices.shape, indices.dtype, starts is None,
               None if factors is None else factors.dtype, num_tables, mean, padding, weight.get_device(),
               None if dense is None else (dense.shape, dense.dtype))  # fmt: skip
        ahead = min(32, power_of_two(max(1, n // max(1, num_bags))))
        bags = 1024 // ahead
        programs, size = cdiv(num_bags, bags), 0 if dense is None else dense.numel()
        numbers = (num_rows, num_bags, self.batch, offsets.numel(), n, padding, programs, size)
        args = (indices, offsets, indices if starts is None else starts, indices if factors is None else factors,
                self.rows, self.bags, self.rows if self.shares is None else self.shares,
                self.rows if dense is None else dense, *numbers)  # fmt: skip
        run = _key_plans.get(key)
        if run is None:
            run = _key_plans[key] = _KEYS.bind(
                args,
                grid=(programs + cdiv(size, CLEARED_AT_ONCE),),
                constants={"MANY": starts is not None, "WEIGHTED": factors is not None, "MEAN": mean,
                           "PADDED": padding >= 0, "BAGS": bags, "AHEAD": ahead,
                           "CLEARED": 0 if dense is None else CLEARED_AT_ONCE},
                num_warps=4,
                device=weight.get_device(),
                vector=1 if dense is None else vector_of(dense.element_size(), dense.data_ptr(), size),
            )  # fmt: skip
        run(*args)
        self.direct = not shared and chosen.block > 0
        self.keys, self.order = put_in_order(self.rows, num_rows, chosen, self.bags if self.direct else None)

    @classmethod
    def of(cls, keys: Tensor, order: Tensor, bags: Tensor, shares: Tensor, batch: int, num_tables: int) -> Sorted:
        """What was sorted before: ours tell the bags themselves where nothing has a share."""
        found = cls.__new__(cls)
        found.rows = found.keys = keys
        found.order, found.bags, found.batch, found.num_tables = order, bags, batch, num_tables
        found.shares = shares if shares.numel() else None
        found.direct = found.shares is None and order.dtype == torch.int32
        return found


def order_of(n: int, num_rows: int) -> config.Order:
    """How so many rows are put in order."""
    default = config.order(n, num_rows)
    return tuning.choose("embedding_bag.order", {"indices": n, "rows": num_rows}, default)


def put_in_order(
    rows: Tensor, num_rows: int, chosen: config.Order, bags: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(rows from the smallest on, where they stood or what ``bags`` had there), equal ones as they stood; rows are at
    most ``num_rows``."""
    n = rows.numel()
    if not n or chosen.block == 0:
        return torch.sort(rows, stable=True)
    key = (n, num_rows, chosen, rows.dtype, bags is None, rows.get_device())
    plan = _order_plans.get(key)
    if plan is None:
        plan = _order_plans[key] = (_plan_digits if chosen.bits else _plan_pairs)(rows, num_rows, chosen, bags)
    return plan(rows, bags)


def _plan_pairs(rows: Tensor, num_rows: int, chosen: config.Order, bags: Tensor | None) -> Any:
    n = rows.numel()
    placed = template((n,), torch.int32, rows.device)
    run = _PAIRS.bind(
        (rows, placed, rows, placed, n, num_rows),
        grid=(cdiv(n, chosen.block),),
        constants={"BAGS": bags is not None, "BLOCK": chosen.block, "WIDE": chosen.wide, "DEPENDENT": not INTERPRETING},
        num_warps=4,
        device=rows.get_device(),
    )

    def ordered(rows: Tensor, bags: Tensor | None) -> tuple[Tensor, Tensor]:
        keys, order = torch.empty_like(rows), torch.empty_like(placed, memory_format=torch.contiguous_format)
        run(rows, order if bags is None else bags, keys, order, n, num_rows)
        return keys, order

    return ordered


def _plan_digits(rows: Tensor, num_rows: int, chosen: config.Order, bags: Tensor | None) -> Any:
    """A count and a scatter for every digit, from the lowest on; between them the blocks before each are counted, where
    they are many."""
    n, blocks, bins = rows.numel(), cdiv(rows.numel(), chosen.block), 1 << chosen.bits
    placed = template((n,), torch.int32, rows.device)
    counted = template((blocks, bins), torch.int32, rows.device)
    common: dict[str, Any] = {"grid": (blocks,), "device": rows.get_device(), "num_warps": chosen.num_warps}
    constants = {"BINS": bins, "BLOCK": chosen.block, "DEPENDENT": not INTERPRETING}
    shifts = range(0, num_rows.bit_length(), chosen.bits)
    count = _DIGITS.bind((rows, counted, n, 0), constants=constants, **common)
    add = None
    if chosen.share:
        # summed at once
        add = _BEFORE.bind(
            (counted, counted, counted, blocks),
            grid=(bins // chosen.share,),
            constants={"BINS": bins, "SHARE": chosen.share, "AT_ONCE": 256, "DEPENDENT": not INTERPRETING},
            num_warps=4,
            device=rows.get_device(),
        )
    scatters = [
        _SCATTER.bind(
            (rows, placed, counted, counted, counted, rows, placed, n, blocks, 0),
            constants={"FIRST": first, "COUNTED": chosen.share > 0, "AT_ONCE": chosen.wide, **constants},
            **common,
        )
        for first in (True, False)
    ]

    def ordered(rows: Tensor, bags: Tensor | None) -> tuple[Tensor, Tensor]:
        order = torch.empty_like(placed, memory_format=torch.contiguous_format) if bags is None else bags
        counts, before = (torch.empty_like(counted, memory_format=torch.contiguous_format) for _ in range(2))
        total = counts.new_empty(bins)
        for shift in shifts:
            keys = torch.empty_like(rows)
            fresh = shift == 0 and bags is None
            there = order if fresh else torch.empty_like(order)
            count(rows, counts, n, shift)
            if add is not None:
                add(counts, before, total, blocks)
            scatters[not fresh](rows, order, counts, before, total, keys, there, n, blocks, shift)
            rows, order = keys, there
        return rows, order

    return ordered


def apply_rows(
    found: Sorted, grad: Tensor, target: Tensor, first: Tensor | None, second: Tensor | None, step: Tensor | None,
    rule: Rule,
) -> None:  # fmt: skip
    """Sum the gradient of every row that was used, and store it in ``target`` or take the optimizer's step there."""
    n, (num_rows, dim) = found.keys.numel(), target.shape
    if not n:
        return
    grad = grad.contiguous()
    optimizer = OPTIMIZERS.index(rule.optimizer)
    key = (n, target.shape, target.dtype, grad.dtype, found.batch, found.num_tables, found.shares is None, optimizer,
           found.direct, found.keys.dtype, target.get_device(), (grad.data_ptr() | target.data_ptr()) & 15)  # fmt: skip
    numbers = (rule.lr, rule.eps, rule.decay, rule.beta1, rule.beta2, math.log2(rule.beta1), math.log2(rule.beta2))
    none = found.bags
    states = (none if first is None else first, none if second is None else second)
    counted = none if step is None else step
    plan = _update_plans.get(key)
    if plan is None:
        plan = _update_plans[key] = _plan_update(found, grad, target, *states, counted, optimizer)
    update, merge, like, length = plan
    part = torch.empty_like(like, memory_format=torch.contiguous_format)
    shares = none if found.shares is None else found.shares
    update(
        found.keys, found.order, found.bags, shares, grad, target, *states, part, counted, n, num_rows, dim,
        found.batch, found.num_tables, length, *numbers,
    )  # fmt: skip
    merge(found.keys, target, *states, part, counted, n, num_rows, dim, length, *numbers)


def _plan_update(
    found: Sorted, grad: Tensor, target: Tensor, first: Tensor, second: Tensor, step: Tensor, optimizer: int
) -> tuple[Any, Any, Tensor, int]:
    n, (num_rows, dim) = found.keys.numel(), target.shape
    chosen = tuning.choose(
        "embedding_bag.update", {"dim": dim, "indices": n, "optimizer": optimizer}, config.update(dim, optimizer, n)
    )
    chunks = cdiv(n, chosen.length)
    like = template((chunks, 2, dim), torch.float32, target.device)
    common: dict[str, Any] = {
        "grid": (chunks,),
        "device": target.get_device(),
        "vector": vector_of(min(grad.element_size(), target.element_size()), grad.data_ptr() | target.data_ptr(), dim),
    }
    floats = (0.5,) * 7
    wide = power_of_two(dim)
    shares = found.bags if found.shares is None else found.shares
    update = _UPDATE.bind(
        (found.keys, found.order, found.bags, shares, grad, target, first, second, like, step, n, num_rows, dim,
         found.batch, found.num_tables, chosen.length, *floats),
        constants={"OPTIMIZER": optimizer, "SHARED": found.shares is not None, "DIRECT": found.direct, "DIM": wide,
                   "AHEAD": chosen.ahead},
        num_warps=chosen.num_warps,
        **common,
    )  # fmt: skip
    merge = _MERGE.bind(
        (found.keys, target, first, second, like, step, n, num_rows, dim, chosen.length, *floats),
        constants={"OPTIMIZER": optimizer, "DIM": wide, "PARTS": config.merged(dim)},
        num_warps=4,
        **common,
    )
    return update, merge, like, chosen.length


def sample_weight_grad(found: Sorted, weight: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of every sample's weight."""
    n, (num_rows, dim) = found.rows.numel(), weight.shape
    out = torch.empty(n, dtype=dtype, device=weight.device)
    grad = grad.contiguous()
    numbers = (n, num_rows, dim, found.batch, found.num_tables)
    key = (n, weight.shape, weight.dtype, grad.dtype, dtype, found.rows.dtype, found.batch, weight.get_device(),
           (grad.data_ptr() | weight.data_ptr()) & 15)  # fmt: skip
    run = _weight_plans.get(key)
    if run is None:
        wide = power_of_two(dim)
        block = max(4, 1024 // wide)
        run = _weight_plans[key] = _WEIGHT_GRAD.bind(
            (weight, grad, found.rows, found.bags, out, *numbers),
            grid=(cdiv(n, block),),
            constants={"DIM": wide, "BLOCK": block},
            num_warps=4,
            device=weight.get_device(),
            vector=vector_of(min(grad.element_size(), weight.element_size()), grad.data_ptr() | weight.data_ptr(), dim),
        )
    run(weight, grad, found.rows, found.bags, out, *numbers)
    return out
