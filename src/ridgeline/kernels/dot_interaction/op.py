"""Dot interaction: the dense vector beside all products of two features, forward and backward in one pass each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels import tuning
from ridgeline.kernels.autocast import narrowed
from ridgeline.kernels.contract import DTYPES, Case, Trial, case, declare
from ridgeline.kernels.dot_interaction import config, kernel, reference
from ridgeline.kernels.launcher import Kernel, Plans, launchable, vector_of
from ridgeline.kernels.rows import float_reason, power_of_two, template
from ridgeline.kernels.tensorfloat import products_round

_FORWARD = Kernel(kernel.dot_interaction_forward, vectors=("dim",), loose=("out_ptr",))
_BACKWARD = Kernel(kernel.dot_interaction_backward, vectors=("dim",), loose=("grad_ptr",))
_forward_plans, _backward_plans = Plans(), Plans()
MOST_FEATURES, MOST_COLUMNS = 128, 512


def dot_interaction(dense: Tensor, sparse: Tensor) -> Tensor:
    """DLRM's interaction of ``dense`` [B, D] with ``sparse`` [B, T, D]: returns [B, D + (T+1)T/2].

    The dense vector comes first, then the products of features i and j < i, row by row of the lower triangle, the dense
    vector being feature 0.
    """
    return DOT_INTERACTION(*narrowed(dense, sparse))


def _precision(x: Tensor) -> str:
    """Three products of tf32 parts are as good as float32; one where PyTorch's own products may use it."""
    return "tf32" if x.dtype != torch.float32 or products_round() else "tf32x3"


def _forward(dense: Tensor, sparse: Tensor) -> Tensor:
    if not launchable(dense):
        return DOT_INTERACTION.on_host(dense, sparse)
    dense, sparse = dense.contiguous(), sparse.contiguous()
    key = (sparse.shape, dense.shape, dense.dtype, sparse.dtype, dense.get_device(), _precision(dense),
           (dense.data_ptr() | sparse.data_ptr()) & 15)  # fmt: skip
    plan = _forward_plans.get(key)
    if plan is None:
        DOT_INTERACTION.check(dense, sparse)
        plan = _forward_plans[key] = _plan_forward(dense, sparse)
    run, like, numbers = plan
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    run(dense, sparse, out, *numbers)
    return out


def _sizes(sparse: Tensor) -> tuple[int, int, int]:
    """(features, columns, length of a result)."""
    num, dim = sparse.shape[1] + 1, sparse.shape[2]
    return num, dim, dim + num * (num - 1) // 2


def _constants(dense: Tensor, num: int, dim: int) -> dict[str, Any]:
    return {"PRECISION": _precision(dense), "FEATURES": max(16, power_of_two(num)), "DIM": max(16, power_of_two(dim))}


def _plan_forward(dense: Tensor, sparse: Tensor) -> tuple[Any, Tensor, tuple[int, ...]]:
    num, dim, width = numbers = _sizes(sparse)
    like = template((dense.shape[0], width), dense.dtype, dense.device)
    size = dense.element_size()
    chosen = tuning.choose(
        "dot_interaction.forward", {"features": num, "dim": dim, "dtype": dense.dtype}, config.forward(num, dim, size)
    )
    run = _FORWARD.bind(
        (dense, sparse, like, *numbers),
        grid=(dense.shape[0],),
        constants=_constants(dense, num, dim) | {"PIECE": min(chosen.piece, max(16, power_of_two(dim)))},
        num_warps=chosen.num_warps,
        device=dense.get_device(),
        vector=vector_of(size, dense.data_ptr() | sparse.data_ptr(), dim),
    )
    return run, like, numbers


def _backward(grad: Tensor, dense: Tensor, sparse: Tensor) -> tuple[Tensor, Tensor]:
    if not launchable(dense):
        return DOT_INTERACTION_BACKWARD.on_host(grad, dense, sparse)
    grad, dense, sparse = grad.contiguous(), dense.contiguous(), sparse.contiguous()
    d_dense, d_sparse = torch.empty_like(dense), torch.empty_like(sparse)
    key = (sparse.shape, dense.shape, dense.dtype, grad.dtype, dense.get_device(), _precision(dense),
           (dense.data_ptr() | sparse.data_ptr()) & 15)  # fmt: skip
    plan = _backward_plans.get(key)
    if plan is None:
        DOT_INTERACTION.check(dense, sparse)
        num, dim, _ = numbers = _sizes(sparse)
        size = dense.element_size()
        sizes = {"features": num, "dim": dim, "dtype": dense.dtype}
        chosen = tuning.choose("dot_interaction.backward", sizes, config.backward(num, dim, size))
        run = _BACKWARD.bind(
            (grad, dense, sparse, d_dense, d_sparse, *numbers),
            grid=(dense.shape[0],),
            constants=_constants(dense, num, dim),
            num_warps=chosen.num_warps,
            device=dense.get_device(),
            vector=vector_of(size, dense.data_ptr() | sparse.data_ptr(), dim),
        )
        plan = _backward_plans[key] = (run, numbers)
    run, numbers = plan
    run(grad, dense, sparse, d_dense, d_sparse, *numbers)
    return d_dense, d_sparse


# --- the declaration ---------------------------------------------------------------------------------------------


def _fake(dense: Tensor, sparse: Tensor) -> Tensor:
    num, dim = sparse.shape[1] + 1, sparse.shape[2]
    return dense.new_empty((dense.shape[0], dim + num * (num - 1) // 2))


def _support(dense: Tensor, sparse: Tensor, *_: Any) -> str | None:
    if dense.dim() != 2 or sparse.dim() != 3 or (sparse.shape[0], sparse.shape[2]) != tuple(dense.shape):
        return f"dense {tuple(dense.shape)} and sparse {tuple(sparse.shape)} are not [B, D] and [B, T, D]"
    if not (1 <= sparse.shape[1] < MOST_FEATURES and 1 <= dense.shape[1] <= MOST_COLUMNS):
        return f"{sparse.shape[1] + 1} features of {dense.shape[1]} columns; 128 of 512 are the most"
    if dense.dtype != sparse.dtype:
        return f"dense is {dense.dtype}, sparse {sparse.dtype}"
    if dense.element_size() * power_of_two(sparse.shape[1] + 1) * power_of_two(dense.shape[1]) > 64 << 10:
        return "one sample's features do not fit a multiprocessor"
    return float_reason(dense=dense)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grads(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return DOT_INTERACTION_BACKWARD(grad, *ctx.saved_tensors)


def _cost(times: int) -> Any:
    def cost(inputs: tuple[Any, ...], outputs: tuple[Any, ...], **_: Any) -> dict[str, float]:
        batch, tables, dim = inputs[-1].shape
        flops = 2.0 * times * batch * (tables + 1) ** 2 * dim
        return {"flops": flops, "matrix_flops": flops}

    return cost


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    batch, tables, dim = of["batch"], of["tables"], of["dim"]
    dtype = getattr(torch, of.dtype)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=on, dtype=torch.float32, generator=generator).to(dtype)

    return drawn(batch, dim), drawn(batch, tables, dim)


CHECKS = tuple(
    case(dtype, batch=batch, tables=tables, dim=dim)
    for dtype in DTYPES
    for batch, tables, dim in ((3, 1, 8), (33, 26, 128), (65, 26, 64), (17, 9, 40), (5, 40, 32), (9, 63, 100))
)
RACES = tuple(
    case(dtype, batch=batch, tables=tables, dim=dim)
    for dtype, batch, tables, dim in (
        ("bfloat16", 16384, 26, 128), ("float16", 65536, 26, 64), ("float32", 16384, 26, 128),
        ("bfloat16", 4096, 60, 128),
    )
)  # fmt: skip

DOT_INTERACTION_BACKWARD = declare(
    name="dot_interaction_backward",
    summary="gradients of dot_interaction",
    schema="(Tensor grad, Tensor dense, Tensor sparse) -> (Tensor, Tensor)",
    forward=_backward,
    fake=lambda grad, dense, sparse: (
        torch.empty_like(dense, memory_format=torch.contiguous_format),
        torch.empty_like(sparse, memory_format=torch.contiguous_format),
    ),
    reference=reference.backward,
    support=lambda grad, dense, sparse: _support(dense, sparse),
    cost=_cost(1),
    num_results=2,
)
DOT_INTERACTION = declare(
    name="dot_interaction",
    summary="DLRM's pairwise products of features beside the dense vector",
    schema="(Tensor dense, Tensor sparse) -> Tensor",
    forward=_forward,
    fake=_fake,
    reference=reference.forward,
    support=_support,
    cost=_cost(1),
    setup=_setup,
    backward=_grads,
    trial=Trial(
        make=_make,
        call=dot_interaction,
        eager=reference.eager,
        reference=reference.forward,
        mistakes={"upper triangle": reference.upper, "a column lost": reference.short},
        checks=CHECKS,
        races=RACES,
        small=(case("bfloat16", batch=64, tables=26, dim=64),),
    ),
)
