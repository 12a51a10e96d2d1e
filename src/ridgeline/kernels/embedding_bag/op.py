"""Embedding bags with ``F.embedding_bag``'s semantics, for one table or many in one launch, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ridgeline.errors import KernelError
from ridgeline.kernels import launcher, tuning
from ridgeline.kernels.contract import DTYPES, Case, Laps, Trial, case, declare
from ridgeline.kernels.embedding_bag import config, kernel, reference
from ridgeline.kernels.embedding_bag.reference import Rule
from ridgeline.kernels.embedding_bag.sums import Sorted, apply_rows, bags_of, sample_weight_grad
from ridgeline.kernels.launcher import Kernel, Plans, launchable, vector_of
from ridgeline.kernels.rows import FLOATS, cdiv, power_of_two, template

_FORWARD = Kernel(kernel.embedding_bag_forward, vectors=("dim",), loose=("indices_ptr", "offsets_ptr", "factor_ptr"))
_plans, _ends = Plans(), Plans()
MODES = ("sum", "mean")


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Rows of ``weight`` picked by ``input``, summed or averaged bag by bag, as ``F.embedding_bag``.

    Gradients are dense, the same bits every time. ``EmbeddingBags`` updates the tables without writing a gradient.
    """
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise KernelError("embedding_bag: max_norm, scale_grad_by_freq and sparse are F.embedding_bag's alone")
    if input.dim() == 2:
        if offsets is not None:
            raise KernelError("embedding_bag: offsets belong to a flat input; a matrix has a bag a row")
        offsets, include_last_offset = ends_of_rows(input), True
        input = input.reshape(-1)
        per_sample_weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
    if offsets is None:
        raise KernelError("embedding_bag: a flat input needs offsets")
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    return _bags(
        weight, input, offsets, None, int(include_last_offset), mode, per_sample_weights, None,
        -1 if padding_idx is None else padding_idx, None,
    )  # fmt: skip


def ends_of_rows(input: Tensor) -> Tensor:
    """Where each row of a matrix of indices starts, and the end; kept for the next of its size."""
    rows, length = input.shape
    if is_dynamo_compiling() or type(input) is not Tensor or not input.is_cuda or launcher.recording():
        return torch.arange(rows + 1, dtype=input.dtype, device=input.device) * length
    key = (rows, length, input.dtype, input.device)
    found = _ends.get(key)
    if found is None:
        with torch.inference_mode(False):  # a call that wants gradients may be the next
            found = _ends[key] = torch.arange(rows + 1, dtype=input.dtype, device=input.device) * length
    return found


def embedding_bags(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    starts: Tensor | None = None,
    *,
    mode: str = "sum",
    per_sample_weights: Tensor | None = None,
    scale_shift: Tensor | None = None,
    padding_idx: int = -1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Bags of many tables in one launch: returns [B, T·D], table beside table.

    Table t is the rows of ``weight`` from ``starts[t]`` on (an int64 tensor on the device; None: one table).
    ``indices`` are those of all bags of the first table, then of the second, and so on; ``offsets`` says where each of
    the T·B bags starts and, last, where the end is. ``scale_shift`` [R, 2] belongs to tables of uint8 codes, which
    are restored to ``dtype`` (float32 unless told).
    """
    num_tables = 1 if starts is None else starts.numel()
    rest = (mode, per_sample_weights, scale_shift, padding_idx, dtype)
    return _bags(weight, indices, offsets, starts, num_tables, *rest)


def _bags(
    weight: Tensor, indices: Tensor, offsets: Tensor, starts: Tensor | None, num_tables: int, mode: str,
    per_sample_weights: Tensor | None, scale_shift: Tensor | None, padding_idx: int, dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """No tables: one, whose last bag ends where the indices do, without an offset that says so."""
    if mode not in MODES:
        raise KernelError(f"embedding_bags: mode is one of {', '.join(MODES)}, not {mode!r}")
    if mode == "mean" and per_sample_weights is not None:
        raise KernelError("embedding_bags: weights of samples go with mode='sum'")
    kind = str(dtype or (weight.dtype if scale_shift is None else torch.float32)).removeprefix("torch.")
    return EMBEDDING_BAG(weight, indices, offsets, starts, per_sample_weights, scale_shift, num_tables, mode == "mean",
                         padding_idx, kind)  # fmt: skip


# --- running -----------------------------------------------------------------------------------------------------


def _forward(
    weight: Tensor, indices: Tensor, offsets: Tensor, starts: Tensor | None, factors: Tensor | None,
    scale_shift: Tensor | None, num_tables: int, mean: bool, padding: int, kind: str,
) -> Tensor:  # fmt: skip
    if not launchable(weight):
        given = (weight, indices, offsets, starts, factors, scale_shift, num_tables, mean, padding, kind)
        return EMBEDDING_BAG.on_host(*given)
    if not weight.is_contiguous():
        raise KernelError("embedding_bags: weight is not one contiguous matrix of rows")
    indices, offsets = indices.contiguous(), offsets.contiguous()
    factors = None if factors is None else factors.contiguous()
    key = (weight.shape, weight.dtype, indices.shape, indices.dtype, offsets.shape, offsets.dtype, starts is None,
           None if factors is None else factors.dtype, num_tables, mean, padding, kind, weight.get_device(),
           None if scale_shift is None else (scale_shift.shape, scale_shift.dtype), weight.data_ptr() & 15)  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        EMBEDDING_BAG.check(weight, indices, offsets, starts, factors, scale_shift, num_tables, mean, padding, kind)
        plan = _plans[key] = _plan_forward(
            weight, indices, offsets, starts, factors, scale_shift, num_tables, mean, padding, kind
        )
    run, like, numbers = plan
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    run(
        weight, weight if scale_shift is None else scale_shift, indices, offsets, indices if starts is None else starts,
        weight if factors is None else factors, out, *numbers,
    )  # fmt: skip
    return out


def _plan_forward(
    weight: Tensor, indices: Tensor, offsets: Tensor, starts: Tensor | None, factors: Tensor | None,
    scale_shift: Tensor | None, num_tables: int, mean: bool, padding: int, kind: str,
) -> tuple[Any, Tensor, tuple[int, ...]]:  # fmt: skip
    num_rows, dim = weight.shape
    num_bags, batch = bags_of(offsets, num_tables)
    like = template((batch, max(1, num_tables) * dim), getattr(torch, kind), weight.device)
    n = indices.numel()
    chosen = tuning.choose(
        "embedding_bag.forward",
        {"dim": dim, "bags": num_bags, "indices": n, "dtype": weight.dtype},
        config.forward(dim, weight.element_size(), n / max(1, num_bags), num_bags),
    )
    numbers = (num_rows, dim, num_bags, batch, offsets.numel(), n, padding)
    wide = min(power_of_two(dim), chosen.columns or dim * 2)
    run = _FORWARD.bind(
        (weight, weight if scale_shift is None else scale_shift, indices, offsets,
         indices if starts is None else starts, weight if factors is None else factors, like, *numbers),
        grid=(cdiv(num_bags, chosen.bags), cdiv(dim, wide)),
        constants={"MANY": starts is not None, "CODES": scale_shift is not None, "WEIGHTED": factors is not None,
                   "MEAN": mean, "PADDED": padding >= 0, "DIM": wide, "EXACT": dim % wide == 0, "BAGS": chosen.bags,
                   "AHEAD": chosen.ahead, "LATE": chosen.late},
        num_warps=chosen.num_warps,
        device=weight.get_device(),
        vector=vector_of(weight.element_size(), weight.data_ptr(), dim),
    )  # fmt: skip
    return run, like, numbers


def _backward(
    grad: Tensor, weight: Tensor, indices: Tensor, offsets: Tensor, starts: Tensor | None, factors: Tensor | None,
    num_tables: int, mean: bool, padding: int, want_factors: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not launchable(weight):
        given = (grad, weight, indices, offsets, starts, factors, num_tables, mean, padding, want_factors)
        return EMBEDDING_BAG_BACKWARD.on_host(*given)
    dense = torch.empty_like(weight, memory_format=torch.contiguous_format)
    found = Sorted(weight, indices, offsets, starts, factors, num_tables, mean, padding, dense=dense)
    apply_rows(found, grad, dense, None, None, None, Rule("none"))
    if not want_factors or factors is None:
        return dense, grad.new_empty(0)
    return dense, sample_weight_grad(found, weight, grad, factors.dtype)


# --- the declaration ---------------------------------------------------------------------------------------------


def _fake(
    weight: Tensor, indices: Tensor, offsets: Tensor, starts: Tensor | None, factors: Tensor | None,
    scale_shift: Tensor | None, num_tables: int, mean: bool, padding: int, kind: str,
) -> Tensor:  # fmt: skip
    batch = offsets.shape[0] if num_tables == 0 else (offsets.shape[0] - 1) // num_tables
    return weight.new_empty((batch, max(1, num_tables) * weight.shape[1]), dtype=getattr(torch, kind))


def _backward_fake(
    grad: Tensor, weight: Tensor, indices: Tensor, offsets: Tensor, starts: Tensor | None, factors: Tensor | None,
    num_tables: int, mean: bool, padding: int, want_factors: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dense = torch.empty_like(weight, memory_format=torch.contiguous_format)
    if not want_factors or factors is None:
        return dense, grad.new_empty(0)
    return dense, factors.new_empty(factors.shape)


def reason(
    weight: Tensor, indices: Tensor, offsets: Tensor, starts: Tensor | None = None, factors: Tensor | None = None,
    scale_shift: Tensor | None = None, num_tables: int = 1, *_: Any,
) -> str | None:  # fmt: skip
    if weight.dim() != 2 or not weight.is_contiguous() or 0 in weight.shape:
        return f"weight {tuple(weight.shape)} is not one contiguous matrix of rows"
    if indices.dim() != 1 or offsets.dim() != 1 or (num_tables and (offsets.numel() - 1) % num_tables):
        return "indices and offsets are no vectors with one offset a bag, and one more at the end"
    if any(t.dtype not in (torch.int32, torch.int64) for t in (indices, offsets)):
        return f"indices are {indices.dtype} and offsets {offsets.dtype}; int32 and int64 are known"
    if starts is not None and (starts.dtype != torch.int64 or starts.dim() != 1 or starts.numel() < num_tables):
        return "starts is no vector of int64 with a first row for each table"
    if factors is not None and (factors.shape != indices.shape or factors.dtype not in FLOATS):
        return "weights of samples are no floating-point vector as long as indices"
    if (weight.dtype == torch.uint8) != (scale_shift is not None):
        return "tables of uint8 codes have a scale_shift, others have none"
    if scale_shift is not None and (scale_shift.shape != (weight.shape[0], 2) or not scale_shift.is_contiguous()):
        return f"scale_shift {tuple(scale_shift.shape)} has not two numbers for each row"
    if weight.shape[1] > 1024:
        return f"rows of {weight.shape[1]} columns are longer than 1024"
    if weight.dtype not in (*FLOATS, torch.uint8):
        return f"weight is {weight.dtype}; tables are float32, float16, bfloat16 or uint8 codes"
    return None


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, indices, offsets, starts, factors, scale_shift, ctx.num_tables, ctx.mean, ctx.padding, _ = inputs
    if scale_shift is not None:
        raise KernelError("embedding_bags: tables of codes have no gradient")
    ctx.save_for_backward(weight, indices, offsets, starts, factors)
    ctx.want_factors = factors is not None and factors.requires_grad


def _grads(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    weight, indices, offsets, starts, factors = ctx.saved_tensors
    found = EMBEDDING_BAG_BACKWARD(
        grad, weight, indices, offsets, starts, factors, ctx.num_tables, ctx.mean, ctx.padding, ctx.want_factors
    )
    rest = (None,) * 5
    return found[0], None, None, None, found[1] if ctx.want_factors else None, *rest


def _gather_cost(inputs: tuple[Any, ...], outputs: tuple[Any, ...], **_: Any) -> dict[str, float]:
    """A row for every index, whatever the table's size; the output once."""
    weight, indices = inputs[0], inputs[1]
    row_bytes = weight.num_bytes / max(1, weight.shape[0])
    rest = sum(t.num_bytes for t in inputs[1:])
    elements = indices.numel * weight.shape[1]
    return {"flops": 2.0 * elements, "read_bytes": indices.numel * row_bytes + rest}


def _scatter_cost(inputs: tuple[Any, ...], outputs: tuple[Any, ...], **_: Any) -> dict[str, float]:
    """A row of the gradient for every index, keys sorted in four passes, and the dense gradient written."""
    grad, weight, indices = inputs[0], inputs[1], inputs[2]
    moved = indices.numel * (grad.num_bytes / max(1, grad.numel) * weight.shape[1] + 100)
    return {"flops": 2.0 * indices.numel * weight.shape[1], "read_bytes": moved}


def drawn_bags(of: Case, on: torch.device, generator: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """(indices, offsets, starts) of bags of random lengths around ``of["length"]``; fixed where that is one."""
    tables, batch, rows, mean_length = of["tables"], of["batch"], of["rows"], of["length"]
    if on.type == "meta":
        total = tables * batch * mean_length
        lengths = None
    elif mean_length == 1:
        lengths = torch.ones(tables * batch, dtype=torch.int64, device=on)
        total = tables * batch
    else:
        lengths = torch.randint(0, 2 * mean_length + 1, (tables * batch,), device=on, generator=generator)
        total = int(lengths.sum())
    index_type = getattr(torch, of.get("index", "int64"))
    indices = torch.randint(0, rows, (total,), device=on, generator=generator).to(index_type)
    if of.get("skewed") and on.type != "meta":  # half of all indices are a few hot rows
        hot = torch.rand(total, device=on, generator=generator) < 0.5
        indices = torch.where(hot, indices % 3, indices)
    offsets = torch.zeros(tables * batch + 1, dtype=index_type, device=on)
    if lengths is not None:
        offsets[1:] = lengths.cumsum(0)
    starts = torch.arange(tables, device=on) * rows if tables > 1 else None
    return indices, offsets, starts


def make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    indices, offsets, starts = drawn_bags(of, on, generator)
    weight = torch.randn(of["tables"] * of["rows"], of["dim"], device=on, dtype=torch.float32, generator=generator)
    weight = weight.to(getattr(torch, of.dtype))
    factors = None
    if of.get("weighted"):
        factors = torch.rand(indices.numel(), device=on, generator=generator, dtype=torch.float32).to(weight.dtype)
    scale_shift = None
    if of.get("codes"):
        weight, scale_shift = reference.coded_rows(weight)
    rest = (of["tables"], of.get("mode", "sum"), of.get("padding", -1), scale_shift)
    return weight, indices, offsets, starts, factors, *rest


def _call(
    weight: Tensor, indices: Tensor, offsets: Tensor, starts: Tensor | None, factors: Tensor | None, tables: int,
    mode: str, padding: int, scale_shift: Tensor | None,
) -> Tensor:  # fmt: skip
    return embedding_bags(weight, indices, offsets, starts, mode=mode, per_sample_weights=factors,
                          scale_shift=scale_shift, padding_idx=padding)  # fmt: skip


def _reference(
    weight: Tensor, indices: Tensor, offsets: Tensor, starts: Tensor | None, factors: Tensor | None, tables: int,
    mode: str, padding: int, scale_shift: Tensor | None,
) -> Tensor:  # fmt: skip
    args = (weight, indices, offsets, starts, factors, scale_shift, tables, mode == "mean", padding, "float64")
    return reference.forward(*args)


def _neighbor_table(*args: Any) -> Tensor:
    """Every table's rows taken from where the one before it starts."""
    weight, indices, offsets, starts, *rest = args
    return _reference(weight, indices, offsets, starts.roll(1), *rest)


def _last_lost(*args: Any) -> Tensor:
    """The last index of all is forgotten."""
    weight, indices, offsets, starts, factors, *rest = args
    changed = weight.clone()
    changed[indices[-1] + starts[-1]] = 0.0
    return _reference(changed, indices, offsets, starts, factors, *rest)


def drawn_tables(of: Case, on: torch.device, generator: Any) -> list[Tensor]:
    dtype = getattr(torch, of.dtype)
    return [
        torch.randn(of["rows"], of["dim"], device=on, dtype=torch.float32, generator=generator).to(dtype)
        for _ in range(of["tables"])
    ]


def per_table(indices: Tensor, offsets: Tensor, tables: int) -> list[tuple[Tensor, Tensor]]:
    """Each table's indices and offsets, as F.embedding_bag takes them."""
    batch = (offsets.numel() - 1) // tables
    ends = [int(value) for value in offsets[::batch].tolist()]
    return [
        (indices[ends[t] : ends[t + 1]], (offsets[t * batch : (t + 1) * batch] - ends[t]).contiguous())
        for t in range(tables)
    ]


def _laps(of: Case, on: torch.device, generator: torch.Generator) -> Laps:
    """All tables in one launch against ``F.embedding_bag`` on each, results side by side."""
    indices, offsets, starts = drawn_bags(of, on, generator)
    tables = drawn_tables(of, on, generator)
    weight = torch.cat(tables)
    scale_shift = None
    if of.get("codes"):
        weight, scale_shift = reference.coded_rows(weight)
    mode = of.get("mode", "sum")
    parts = per_table(indices, offsets, of["tables"])

    def eager() -> Tensor:
        with torch.no_grad():
            found = [
                torch.nn.functional.embedding_bag(i, w, o, mode=mode) for w, (i, o) in zip(tables, parts, strict=True)
            ]
            return torch.cat(found, 1)

    def ours() -> Tensor:
        with torch.no_grad():
            return embedding_bags(weight, indices, offsets, starts, mode=mode, scale_shift=scale_shift)

    row_bytes = of["dim"] * weight.element_size() + (8 if scale_shift is not None else 0)
    out = of["batch"] * of["tables"] * of["dim"] * (4 if scale_shift is not None else weight.element_size())
    moved = indices.numel() * row_bytes + out + indices.nbytes + offsets.nbytes
    return Laps({"ridgeline": ours, "eager": eager}, moved, eager)


def bags(dtype: str, tables: int, batch: int, rows: int, dim: int, length: int, **more: Any) -> Case:
    return case(dtype, tables=tables, batch=batch, rows=rows, dim=dim, length=length, **more)


SHAPES: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((1, 7, 50, 16, 3), {}),
    ((3, 33, 100, 64, 5), {"index": "int32", "mode": "mean"}),
    ((4, 65, 1000, 128, 20), {"skewed": True}),
    ((2, 100, 5000, 96, 1), {}),
    ((2, 40, 30, 32, 8), {"weighted": True}),
    ((1, 50, 20, 24, 6), {"mode": "mean", "padding": 3}),
    ((2, 17, 64, 300, 40), {"skewed": True, "index": "int32"}),
)
CHECKS = (
    *(bags(dtype, *sizes, **more) for dtype in DTYPES for sizes, more in SHAPES),
    bags("float32", 3, 33, 100, 64, 5, codes=True),
    bags("float32", 2, 9, 40, 200, 3, codes=True, mode="mean"),
)
RACES = (
    bags("float32", 26, 4096, 100_000, 128, 10), bags("float32", 26, 16384, 100_000, 64, 1),
    bags("float16", 26, 8192, 100_000, 128, 20), bags("float32", 26, 4096, 100_000, 128, 10, codes=True),
    bags("float32", 26, 512, 100_000, 128, 5, mode="mean", index="int32"),
)  # fmt: skip

EMBEDDING_BAG_BACKWARD = declare(
    name="embedding_bag_backward",
    summary="dense gradients of embedding bags, summed in a fixed order",
    schema="(Tensor grad, Tensor weight, Tensor indices, Tensor offsets, Tensor? starts, Tensor? sample_weights,"
    " int num_tables, bool mean, int padding, bool want_sample_weights) -> (Tensor, Tensor)",
    forward=_backward,
    fake=_backward_fake,
    reference=reference.backward,
    support=lambda grad, weight, indices, offsets, starts=None, factors=None, num_tables=1, *_: reason(
        weight, indices, offsets, starts, factors, None, num_tables
    ),
    cost=_scatter_cost,
    num_results=2,
)
EMBEDDING_BAG = declare(
    name="embedding_bag",
    summary="rows of one table or many, summed or averaged bag by bag in one launch",
    schema="(Tensor weight, Tensor indices, Tensor offsets, Tensor? starts, Tensor? sample_weights,"
    " Tensor? scale_shift, int num_tables, bool mean, int padding, str kind) -> Tensor",
    forward=_forward,
    fake=_fake,
    reference=reference.forward,
    support=reason,
    cost=_gather_cost,
    setup=_setup,
    backward=_grads,
    repeats=True,
    trials={
        "embedding_bags": Trial(
            make=make,
            call=_call,
            eager=reference.eager,
            reference=_reference,
            mistakes={"another table": _neighbor_table, "the last index lost": _last_lost},
            checks=CHECKS,
            races=RACES,
            packs=tuple(
                bags(dtype, 26, 4096, 100_000, dim, length)
                for dtype in ("float32", "float16")
                for dim in (16, 32, 64, 128, 256)
                for length in (1, 10, 50)
            ),
            phases=("fwd",),
            constants=(8,),
            laps=_laps,
            layouts=False,
        ),
        "embedding_bag": Trial(
            make=make,
            call=_call,
            eager=reference.eager,
            reference=_reference,
            raced=reference.raced,
            mistakes={"another table": _neighbor_table},
            checks=(CHECKS[2],),
            races=(bags("float32", 1, 16384, 200_000, 128, 20), bags("float32", 1, 65536, 200_000, 64, 1),
                   bags("float16", 1, 16384, 200_000, 128, 20, mode="mean")),
            small=(bags("float32", 1, 64, 1000, 64, 4),),
            constants=(8,),
            layouts=False,
            forward_bytes=lambda args: args[1].numel() * args[0].shape[1] * args[0].element_size() + args[1].nbytes,
            backward_bytes=lambda args: args[0].nbytes
            + args[1].numel() * args[0].shape[1] * args[0].element_size(),
        ),
    },
)  # fmt: skip
