"""DCNv2's cross layer, full or low-rank: y = x0 · (W x + b) + x, with everything around the products fused."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels import tuning
from ridgeline.kernels.autocast import narrowed
from ridgeline.kernels.call_cache import Unrepeatable, noting
from ridgeline.kernels.contract import DTYPES, Case, Primitive, Trial, case, declare, elementwise_cost
from ridgeline.kernels.cross_layer import config, kernel, reference, streamed
from ridgeline.kernels.launcher import INTERPRETING, Blocks, Kernel, Plans, launchable, num_sms, vector_of
from ridgeline.kernels.rms_norm.config import ColumnSums
from ridgeline.kernels.rms_norm.op import plan_reduce
from ridgeline.kernels.rows import cdiv, clamp, float_reason, power_of_two, template
from ridgeline.kernels.split_gemm.op import MATMUL, ended, ends_fit, tall_fits
from ridgeline.kernels.split_rows import registers_of
from ridgeline.kernels.tensorfloat import products_round

_PRODUCT = Kernel(kernel.cross_product, vectors=("n", "k"))
_RESIDENT = Kernel(streamed.cross_resident)
_POINTWISE = Kernel(kernel.cross_pointwise)
_BACKWARD = Kernel(kernel.cross_backward, vectors=("n", "p"))
_WIDEN = Kernel(kernel.cross_widen, vectors=("p",), loose=("x_ptr", "more_ptr"))
_NARROW = Kernel(kernel.cross_narrow, vectors=("p",), loose=("x0_ptr", "x_ptr", "y_ptr", "u_ptr"))
_WEIGHTS = Kernel(kernel.cross_low_rank_weights, vectors=("n",))
_END = Kernel(kernel.cross_end, vectors=("n", "k"), loose=("bias_ptr",))
_AGAIN = Kernel(kernel.cross_again, vectors=("n",), loose=("bias_ptr",))
_product_plans, _pointwise_plans, _backward_plans, _wide_plans = Plans(), Plans(), Plans(), Plans()
_low_rank_plans = Plans()
POINTWISE_BLOCK = 2048
ENDS = ("zeros", "ones", "more")
"""What the column behind a copy's own has."""
MAX_REGISTERS = 168
"""Of a thread when twelve warps start; the two computing groups take more from there."""


def cross_layer(
    x0: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, down: Tensor | None = None
) -> Tensor:
    """``x0 * (x @ weight.T + bias) + x``, all [B, D]; with ``down`` [r, D] and ``weight`` [D, r] the low-rank form.

    The first layer of a cross network has ``x0`` for both; gradients of the two add up as autograd adds them. Large
    products in float32 are made of halves (see ``matmul``), unless TensorFloat-32 is allowed: as accurate as float32.
    """
    x0, x, weight = narrowed(x0, x, weight)
    bias, down = (None if each is None else narrowed(each)[0] for each in (bias, down))
    return CROSS_LAYER(x0, x, weight, bias, down)


# --- running -----------------------------------------------------------------------------------------------------


def _forward(
    x0: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    if not launchable(x):
        return _on_host(x0, x, weight, bias, down)
    x0, x = x0.contiguous(), x.contiguous()
    if down is not None and _again(x, down):
        inner = _product(x, down.mT)
        return _cross(x0, x, inner, weight, bias, save=False)[0], x.new_empty(0), inner
    if _pitch(x) != x.shape[1]:
        y, u, inner = _wide_cross(x0, x, weight, bias, down, save=True)
        return y, u, x.new_empty(0) if down is None else inner
    inner = x if down is None else _product(x, down.mT, least=config.LEAST_FORWARD)
    y, u = _cross(x0, x, inner, weight, bias, save=True)
    return y, u, x.new_empty(0) if down is None else inner


def _on_host(
    x0: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The reference, without what the backward pass computes again."""
    if down is None or not _again(x, down):
        found: tuple[Tensor, Tensor, Tensor] = CROSS_LAYER.on_host(x0, x, weight, bias, down)
        return found
    y, _, inner = reference.forward(*(None if t is None else t.float() for t in (x0, x, weight, bias, down)))
    return y.to(x.dtype), x.new_empty(0), inner.to(x.dtype)


def _infer(x0: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor | None) -> Tensor:
    if not launchable(x):
        return _on_host(x0, x, weight, bias, down)[0]
    x0, x = x0.contiguous(), x.contiguous()
    if _pitch(x) != x.shape[1]:
        return _wide_cross(x0, x, weight, bias, down, save=False)[0]
    inner = x if down is None else _product(x, down.mT, least=config.LEAST_FORWARD)
    return _cross(x0, x, inner, weight, bias, save=False)[0]


def _cross(x0: Tensor, x: Tensor, a: Tensor, weight: Tensor, bias: Tensor | None, save: bool) -> tuple[Tensor, Tensor]:
    """The product with its epilogue, or cuBLAS and one pass."""
    bias = None if bias is None else bias.contiguous()
    key = (x.shape, a.shape, weight.shape, x.dtype, x0.dtype, weight.dtype, bias is None, save, x.get_device(),
           weight.is_contiguous(), (x0.data_ptr() | x.data_ptr() | a.data_ptr() | weight.data_ptr()) & 15)  # fmt: skip
    if key not in _product_plans:
        CROSS_LAYER.check(x0, x, weight, bias, None if a is x else a.new_empty(a.shape[1], x.shape[1], device="meta"))
        short = _plan_end(a, weight, x0, x, bias, cross=True, save=save)
        _product_plans[key] = short or _plan_product(a, weight, x0, x, bias, cross=True, save=save, turned=False)
    run = _product_plans[key]
    if run is None and _ends(a, weight.mT, x0, x, least=config.LEAST_FORWARD):
        return ended(a, weight.mT, bias, x0, x, save)
    if run is None:
        u = _product(a, weight.mT, bias, config.LEAST_FORWARD)
        return pointwise(u, x0, x), u
    y = torch.empty_like(x)
    u = torch.empty_like(x) if save else y
    run(a, weight, x0, x, bias, y, u)
    return y, u


def _again(x: Tensor, down: Tensor) -> config.Tile | None:
    """How the backward pass computes the second product again; None where the forward pass saves it."""
    if not config.is_short(x.shape[1], down.shape[0], x.element_size()):
        return None
    sizes = {"m": x.shape[0], "n": x.shape[1], "rank": down.shape[0]}
    chosen = tuning.choose("cross_layer.again", sizes, config.again(**sizes))
    return chosen if chosen.rows else None


def _low_rank_backward(
    dy: Tensor, x0: Tensor, inner: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, want_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if not launchable(dy):
        return CROSS_LOW_RANK_BACKWARD.on_host(dy, x0, inner, weight, bias, down, want_bias)
    dy, x0, weight, down = dy.contiguous(), x0.contiguous(), weight.contiguous(), down.contiguous()
    bias = None if bias is None else bias.contiguous()
    du, dx0, db = _computed_again(dy, x0, inner, weight, bias, down, want_bias)
    d_inner = du @ weight
    return du, dx0, add_product(d_inner, down, dy), d_inner, db


def _computed_again(
    dy: Tensor, x0: Tensor, inner: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, want_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of the product, of x0, of the bias)."""
    m, n = dy.shape
    du, dx0 = torch.empty_like(dy), torch.empty_like(x0)
    pointers = dy.data_ptr() | x0.data_ptr() | weight.data_ptr() | inner.data_ptr()
    key = (dy.shape, inner.shape[1], dy.dtype, bias is None, want_bias, "again", dy.get_device(), pointers & 15)
    plan = _low_rank_plans.get(key)
    if plan is None:
        plan = _low_rank_plans[key] = _plan_again(dy, inner, weight, bias, down, want_bias, pointers)
    run, reduce, like, groups, across = plan
    share = torch.empty_like(like, memory_format=torch.contiguous_format) if want_bias else du
    run(dy, x0, inner, weight, dy if bias is None else bias, du, dx0, share, m, n, across)
    db = dy.new_empty(n if want_bias else 0)
    if want_bias:
        reduce(share, db, db, groups, n)
    return du, dx0, db


def _plan_again(
    dy: Tensor, inner: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, want_bias: bool, pointers: int
) -> tuple[Any, Any, Tensor, int, int]:
    (m, n), on = dy.shape, dy.get_device()
    chosen = _again(dy, down) or config.again(config.LEAST_AGAIN, n, down.shape[0])
    groups, across = cdiv(m, chosen.rows), cdiv(n, chosen.columns)
    like = template((groups, n), torch.float32, dy.device)
    run = _AGAIN.bind(
        (dy, dy, inner, weight, dy if bias is None else bias, dy, dy, like if want_bias else dy, m, n, across),
        grid=(groups * across,),
        constants={"HAS_BIAS": bias is not None, "WANT_BIAS": want_bias, "RANK": inner.shape[1], "BM": chosen.rows,
                   "BN": chosen.columns},
        num_warps=chosen.num_warps,
        max_registers=registers_of(chosen.num_warps, chosen.programs_per_sm),
        device=on,
        vector=vector_of(dy.element_size(), pointers, n),
    )  # fmt: skip
    return run, plan_reduce(like, dy, groups, n, on), like, groups, across


def low_rank_weights(du: Tensor, x: Tensor, inner: Tensor, d_inner: Tensor) -> tuple[Tensor, Tensor]:
    """``du.T @ inner`` and ``d_inner.T @ x``, in one pass over all of them where that is chosen."""
    (m, n), rank = x.shape, inner.shape[1]
    x = x.contiguous()
    pointers = du.data_ptr() | x.data_ptr() | inner.data_ptr() | d_inner.data_ptr()
    key = (x.shape, rank, x.dtype, "weights", x.get_device(), pointers & 15)
    plan = _low_rank_plans.get(key)
    if plan is None:
        plan = _low_rank_plans[key] = _plan_weights(du, x, inner, pointers)
    run, reduce, like, groups, stretch = plan
    if run is None:
        return du.mT @ inner, d_inner.mT @ x
    part = torch.empty_like(like, memory_format=torch.contiguous_format)
    run(du, x, inner, d_inner, part, m, n, stretch)
    dw, d_down = x.new_empty((n, rank)), x.new_empty((rank, n))
    reduce(part, dw, d_down, groups, n * rank)
    return dw, d_down


def _plan_weights(du: Tensor, x: Tensor, inner: Tensor, pointers: int) -> tuple[Any, ...]:
    (m, n), rank, on = x.shape, inner.shape[1], x.get_device()
    sizes = {"m": m, "n": n, "rank": rank}
    chosen = tuning.choose("cross_layer.weights", sizes, config.weights(**sizes))
    if not chosen.columns:
        return None, None, None, 0, 0
    across = cdiv(n, chosen.columns)
    groups = clamp(chosen.programs_per_sm * num_sms(on) // across, 1, cdiv(m, chosen.step))
    stretch = cdiv(cdiv(m, groups), chosen.step) * chosen.step
    groups = cdiv(m, stretch)
    like = template((2, groups, n * rank), torch.float32, x.device)
    run = _WEIGHTS.bind(
        (du, x, inner, inner, like, m, n, stretch),
        grid=(across, groups),
        constants={"RANK": rank, "BN": chosen.columns, "BK": chosen.step, "STAGES": chosen.num_stages},
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        device=on,
        vector=vector_of(x.element_size(), pointers, n),
    )
    column, shares = template((n * rank,), x.dtype, x.device), power_of_two(groups)
    few = ColumnSums(shares, max(16, 4096 // shares), 4)
    return run, plan_reduce(like, column, groups, n * rank, on, second=column, default=few), like, groups, stretch


def _pitch(x: Tensor, backward: bool = False) -> int:
    """Columns of the rows in which x is multiplied: more than it has, where its own start inside accesses."""
    return config.pitch(x.shape[0], x.shape[1], x.element_size(), backward)


def _wide_cross(
    x0: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor | None, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The layer on copies whose rows start in whole accesses; its results have rows as they were."""
    CROSS_LAYER.check(x0, x, weight, bias, down)
    p = _pitch(x)
    if down is None:  # the bias is one more column of the weight, and x is one there: no launch of its own
        t = widened(x, p, ones=bias is not None) @ widened(weight, p, p, bias).mT
        return *narrowed_to(x, t, x0, save), x
    inner = widened(x, p) @ widened(down, p).mT
    by = widened(weight, inner.shape[1], p).mT
    t = inner @ by if bias is None else torch.addmm(widened(bias[None], p).view(p), inner, by)
    return *narrowed_to(x, t, x0, save), inner


def _plain(x: Tensor) -> bool:
    """Whether a kernel can be launched on x right here: a compiler that traces has passes of its own."""
    return type(x) in (Tensor, torch.nn.Parameter) and launchable(x)


def widened(x: Tensor, columns: int, rows: int = 0, more: Tensor | None = None, ones: bool = False) -> Tensor:
    """A copy of so many columns and rows: fewer than x has, or zeros in those that it has not. The first of these
    columns is ``more``, or ones, where that is asked for."""
    (m, n), rows = x.shape, rows or x.shape[0]
    if not _plain(x):
        if more is not None or ones:
            x = torch.cat([x, x.new_ones(m, 1) if more is None else more[:, None]], 1)
        return torch.nn.functional.pad(x, (0, columns - x.shape[1], 0, rows - m))
    x, end = x.contiguous(), "ones" if ones else "zeros" if more is None else "more"
    out = x.new_empty((rows, columns))
    key = (m, n, rows, columns, x.dtype, end, x.get_device())
    plan = _wide_plans.get(key)
    if plan is None:
        constants = {"END": ENDS.index(end)}
        args = (x, x if more is None else more, out, m, n, rows, columns)
        plan = _wide_plans[key] = _plan_wide(_WIDEN, args, rows, columns, constants, columns)
    run, across = plan
    run(x, x if more is None else more.contiguous(), out, m, n, rows, columns, across)
    return out


def narrowed_to(x: Tensor, t: Tensor, x0: Tensor | None, save: bool = False) -> tuple[Tensor, Tensor]:
    """(``x0 * t + x``, or ``t + x`` without an ``x0``; t), of the columns that x has."""
    (m, n), p = x.shape, t.shape[1]
    if not _plain(x) or not _plain(t):
        short = t[:, :n]
        return (short + x if x0 is None else x0 * short + x), short.contiguous()
    y = torch.empty_like(x)
    u = torch.empty_like(x) if save else y
    key = (m, n, p, x.dtype, x0 is None, save, x.get_device())
    plan = _wide_plans.get(key)
    if plan is None:
        constants = {"CROSS": x0 is not None, "SAVE": save}
        plan = _wide_plans[key] = _plan_wide(_NARROW, (t, x, x, y, u, m, n, p), m, n, constants, p)
    run, across = plan
    run(t, x if x0 is None else x0, x, y, u, m, n, p, across)
    return y, u


def _plan_wide(kind: Kernel, args: Any, rows: int, columns: int, constants: dict[str, Any], p: int) -> tuple[Any, int]:
    tile = config.backward(columns)
    across = cdiv(columns, tile.block)
    run = kind.bind(
        (*args, across),
        grid=(across * cdiv(rows, tile.rows),),
        constants={**constants, "ROWS": tile.rows, "BLOCK": tile.block},
        num_warps=tile.num_warps,
        device=args[0].get_device(),
        vector=vector_of(args[0].element_size(), 0, p),
    )
    return run, across


def add_product(a: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """``a @ weight + x`` in one pass over x, where our kernel is chosen for it."""
    key = (x.shape, a.shape, weight.shape, x.dtype, weight.dtype, "add", x.get_device(),
           weight.is_contiguous(), (x.data_ptr() | a.data_ptr() | weight.data_ptr()) & 15)  # fmt: skip
    if key not in _product_plans:
        tiles = partial(_plan_product, a, weight, x, x, None, cross=False, save=False, turned=True)
        short = _plan_end(a, weight, x, x, None, cross=False, save=False)
        _product_plans[key] = short or _plan_resident(a, weight, x) or tiles()
    run = _product_plans[key]
    if run is None:
        return torch.addmm(x, a, weight)
    y = torch.empty_like(x)
    run(a, weight, x, x, None, y, y)
    return y


def _halved(a: Tensor, b: Tensor, least: float = config.LEAST_FLOPS) -> bool:
    """Whether a product in float32 is made of halves: as accurate, and twice as fast or more. Not while tracing, where
    the compiler has products of its own, nor where TensorFloat-32 was asked for. A call that is repeated would not ask
    again: where that decides, none is noted."""
    plain = type(a) in (Tensor, torch.nn.Parameter) and a.dtype == b.dtype == torch.float32 and not INTERPRETING
    (m, k), n = a.shape, b.shape[1]
    if not plain or not launchable(a) or not config.is_large(m, n, k, least):
        return False
    if noting():
        raise Unrepeatable("whether a product may round to TensorFloat-32 is asked at every call")
    return not products_round() and (config.is_wide(m, n) or tall_fits(a, b))


def _ends(a: Tensor, b: Tensor, *more: Tensor, least: float = config.LEAST_FLOPS) -> bool:
    """Whether a product in float32 is made of halves, and what follows it done in the same pass."""
    return _halved(a, b, least) and ends_fit(a, b, *more)


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None, least: float = config.LEAST_FLOPS) -> Tensor:
    """``a @ b`` (+ ``bias``), by cuBLAS or by halves; a long inner dim in stretches that are added up."""
    if not _halved(a, b, least):
        return a @ b if bias is None else torch.addmm(bias, a, b)
    inner = a.shape[1]
    cuts = 1 if bias is not None else config.cuts(a.shape[0], b.shape[1], inner, num_sms(a.get_device()))
    if cuts == 1:
        whole: Tensor = MATMUL(a, b, bias)
        return whole
    stretches: Tensor = MATMUL(a.unflatten(1, (cuts, inner // cuts)).transpose(0, 1), b.unflatten(0, (cuts, -1)), None)
    return stretches.sum(0)


def _plan_product(
    a: Tensor, weight: Tensor, x0: Tensor, x: Tensor, bias: Tensor | None, *, cross: bool, save: bool, turned: bool
) -> Any:
    (m, k), n = a.shape, x.shape[1]
    sizes = {"m": m, "n": n, "k": k, "dtype": x.dtype, "cross": cross}
    chosen = tuning.choose("cross_layer.product", sizes, config.product(m, n, k, x.element_size()))
    same = {a.dtype, weight.dtype, x0.dtype, x.dtype} | (set() if bias is None else {bias.dtype})
    if not chosen.bm or len(same) > 1 or not weight.is_contiguous():
        return None
    pointers = a.data_ptr() | weight.data_ptr() | x0.data_ptr() | x.data_ptr()
    run = _PRODUCT.bind(
        (a, weight, x0, x, x if bias is None else bias, x, x, m, n, k),
        grid=(cdiv(m, chosen.bm) * cdiv(n, chosen.bn),),
        constants={"TURNED": turned, "CROSS": cross, "HAS_BIAS": bias is not None, "SAVE": save,
                   "EVEN": k % chosen.bk == 0, "EARLY": chosen.early, "BM": chosen.bm, "BN": chosen.bn, "BK": chosen.bk,
                   "STAGES": chosen.num_stages},
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        device=x.get_device(),
        vector=vector_of(x.element_size(), pointers, n, k),
    )  # fmt: skip

    def plan(a: Tensor, weight: Tensor, x0: Tensor, x: Tensor, bias: Tensor | None, y: Tensor, u: Tensor) -> None:
        run(a, weight, x0, x, x if bias is None else bias, y, u, m, n, k)

    return plan


def _plan_end(
    a: Tensor, weight: Tensor, x0: Tensor, x: Tensor, bias: Tensor | None, *, cross: bool, save: bool
) -> Any:
    """The layer, or its last gradient, by tiles that read all terms of their product at once; None where it is made
    otherwise."""
    (m, n), k = x.shape, a.shape[1]
    same = {a.dtype, weight.dtype, x0.dtype, x.dtype} | (set() if bias is None else {bias.dtype})
    if not config.can_end(n, k, x.element_size()) or len(same) > 1 or not weight.is_contiguous():
        return None
    sizes = {"m": m, "n": n, "terms": k, "cross": cross}
    chosen = tuning.choose("cross_layer.end", sizes, config.end(**sizes))
    if not chosen.rows:
        return None
    pointers, terms = a.data_ptr() | weight.data_ptr() | x0.data_ptr() | x.data_ptr(), power_of_two(k)
    across = cdiv(n, chosen.columns)
    run = _END.bind(
        (a, weight, x0, x, x if bias is None else bias, x, x, m, n, k, across),
        grid=(cdiv(m, chosen.rows) * across,),
        constants={"TURNED": not cross, "CROSS": cross, "HAS_BIAS": bias is not None, "SAVE": save,
                   "EXACT": terms == k, "TERMS": terms, "BM": chosen.rows, "BN": chosen.columns},
        num_warps=chosen.num_warps,
        max_registers=registers_of(chosen.num_warps, chosen.programs_per_sm),
        device=x.get_device(),
        vector=vector_of(x.element_size(), pointers, n, k),
    )  # fmt: skip

    def plan(a: Tensor, weight: Tensor, x0: Tensor, x: Tensor, bias: Tensor | None, y: Tensor, u: Tensor) -> None:
        run(a, weight, x0, x, x if bias is None else bias, y, u, m, n, k, across)

    return plan


def _plan_resident(a: Tensor, weight: Tensor, x: Tensor) -> Any:
    """``a @ weight + x`` whose rows stay in shared memory; None where tiles of their own are faster, or the copy engine
    cannot reach what it has to."""
    (m, k), n = a.shape, x.shape[1]
    sizes = {"m": m, "n": n, "k": k, "itemsize": x.element_size()}
    chosen = tuning.choose("cross_layer.resident", sizes, config.resident(**sizes))
    pointers = a.data_ptr() | weight.data_ptr() | x.data_ptr()
    alike = {a.dtype, weight.dtype, x.dtype} == {x.dtype} and x.element_size() == 2 and weight.is_contiguous()
    reachable = alike and a.is_contiguous() and m > 0 and vector_of(2, pointers, n, k) == 8 and not INTERPRETING
    if not chosen.stages or not reachable or not config.fits(chosen, k):
        return None
    rows, held = Blocks(a, (m, k), (k, 1), (128, 64)), Blocks(weight, (k, n), (n, 1), (64, 128))
    tiles, rest = Blocks(x, (m, n), (n, 1), (128, 128)), (cdiv(m, 128), cdiv(n, 128))
    run = _RESIDENT.bind(
        (rows, held, tiles, tiles, *rest),
        grid=(min(num_sms(x.get_device()), rest[0]),),
        constants={"CHUNKS": config.chunks(k), "STAGES": chosen.stages, "ENDS": chosen.ends},
        num_warps=4,
        max_registers=MAX_REGISTERS,
        device=x.get_device(),
        vector=8,
    )

    def plan(a: Tensor, weight: Tensor, x0: Tensor, x: Tensor, bias: Tensor | None, y: Tensor, u: Tensor) -> None:
        run(a, weight, x, y, *rest)

    return plan


def pointwise(u: Tensor, x0: Tensor, x: Tensor) -> Tensor:
    """``x0 * u + x``."""
    y = torch.empty_like(x)
    size = x.numel()
    key = (size, u.dtype, x0.dtype, x.dtype, x.get_device(), (u.data_ptr() | x0.data_ptr() | x.data_ptr()) & 15)
    run = _pointwise_plans.get(key)
    if run is None:
        run = _pointwise_plans[key] = _POINTWISE.bind(
            (u, x0, x, y, size),
            grid=(cdiv(size, POINTWISE_BLOCK),),
            constants={"BLOCK": POINTWISE_BLOCK},
            num_warps=8 if x.element_size() == 2 else 4,
            device=x.get_device(),
            vector=vector_of(x.element_size(), u.data_ptr() | x0.data_ptr() | x.data_ptr()),
        )
    run(u, x0, x, y, size)
    return y


def _backward(dy: Tensor, u: Tensor, x0: Tensor, want_bias: bool) -> tuple[Tensor, Tensor, Tensor]:
    if not launchable(dy):
        du, dx0, db = (found.to(dy.dtype) for found in reference.backward(dy.float(), u.float(), x0.float(), want_bias))
        return torch.nn.functional.pad(du, (0, _pitch(dy, True) - dy.shape[1])), dx0, db
    dy, u, x0 = dy.contiguous(), u.contiguous(), x0.contiguous()
    m, n = dy.shape
    key = (dy.shape, dy.dtype, u.dtype, x0.dtype, want_bias, dy.get_device(),
           (dy.data_ptr() | u.data_ptr() | x0.data_ptr()) & 15)  # fmt: skip
    plan = _backward_plans.get(key)
    if plan is None:
        plan = _backward_plans[key] = _plan_backward(dy, u, x0, want_bias)
    run, reduce, like, groups = plan
    p = _pitch(dy, True)
    du, dx0 = torch.empty_like(dy) if p == n else dy.new_empty((m, p)), torch.empty_like(x0)
    share = torch.empty_like(like, memory_format=torch.contiguous_format) if want_bias else du
    run(dy, u, x0, du, dx0, share, m, n, p)
    db = dy.new_empty(n if want_bias else 0)
    if want_bias:
        reduce(share, db, db, groups, n)
    return du, dx0, db


def _plan_backward(dy: Tensor, u: Tensor, x0: Tensor, want_bias: bool) -> tuple[Any, Any, Tensor, int]:
    (m, n), p = dy.shape, _pitch(dy, True)
    on = dy.get_device()
    chosen = tuning.choose("cross_layer.backward", {"m": m, "n": n, "dtype": dy.dtype}, config.backward(n))
    across = cdiv(n, chosen.block)
    groups = clamp(cdiv(chosen.programs_per_sm * num_sms(on), across), 1, max(1, cdiv(m, chosen.rows)))
    like = template((groups, n), torch.float32, dy.device)
    run = _BACKWARD.bind(
        (dy, u, x0, dy, x0, like if want_bias else dy, m, n, p),
        grid=(across, groups),
        constants={"WANT_BIAS": want_bias, "ROWS": chosen.rows, "BLOCK": chosen.block},
        num_warps=chosen.num_warps,
        device=on,
        vector=vector_of(dy.element_size(), dy.data_ptr() | u.data_ptr() | x0.data_ptr(), n),
    )
    return run, plan_reduce(like, dy, groups, n, on), like, groups


# --- the declaration ---------------------------------------------------------------------------------------------


def _fake(
    x0: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    inner = x.new_empty(0) if down is None else x.new_empty((x.shape[0], down.shape[0]))
    return y, x.new_empty(0) if down is not None and _again(x, down) else torch.empty_like(y), inner


def _support(
    x0: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, down: Tensor | None = None, *_: Any
) -> str | None:
    if x.dim() != 2 or x0.shape != x.shape:
        return f"x0 {tuple(x0.shape)} and x {tuple(x.shape)} are not both [B, D]"
    inner = x.shape[1] if down is None else down.shape[0]
    if weight.shape != (x.shape[1], inner) or (down is not None and down.shape[1] != x.shape[1]):
        return f"weight {tuple(weight.shape)} does not take {inner} columns to {x.shape[1]}"
    if bias is not None and bias.shape != x.shape[1:]:
        return f"bias has shape {tuple(bias.shape)}, not {tuple(x.shape[1:])}"
    if len({t.dtype for t in (x0, x, weight, bias) if t is not None}) > 1:
        return "x0, x, weight and bias differ in type"
    return float_reason(x=x)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x0, x, weight, bias, down = inputs
    ctx.set_materialize_grads(False)
    ctx.want_bias = bias is not None and bias.requires_grad
    ctx.wants = (x.requires_grad, weight.requires_grad, down is not None and down.requires_grad)
    again = down is not None and output[1].numel() == 0
    ctx.save_for_backward(x0, x, weight, down, output[1], output[2], bias if again else None)


def _added(a: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """``a @ weight + x``: our own kernels have 16 bits."""
    if a.dtype != torch.float32:
        found: Tensor = ADD_PRODUCT(a, weight, x)
        return found
    if _ends(a, weight, x):
        return ended(a, weight, None, None, x)[0]
    return _product(a, weight).add_(x) if _halved(a, weight) else torch.addmm(x, a, weight)


def _grads(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 5
    x0, x, weight, down, u, inner, bias = ctx.saved_tensors
    if down is not None and u.numel() == 0 and dy.numel():
        du, dx0, dx, d_inner, db = CROSS_LOW_RANK_BACKWARD(dy, x0, inner, weight, bias, down, ctx.want_bias)
        if ctx.wants[1] and ctx.wants[2] and _plain(dy) and _plain(x):
            dw, d_down = low_rank_weights(du, x, inner, d_inner)
        else:
            dw = du.mT @ inner if ctx.wants[1] else None
            d_down = d_inner.mT @ x if ctx.wants[2] else None
        return dx0, dx, dw, db if ctx.want_bias else None, d_down
    du, dx0, db = CROSS_LAYER_BACKWARD(dy, u, x0, ctx.want_bias)
    if du.shape != dy.shape:
        dx, dw, d_down = _wide_grads(ctx.wants, du, dy, x, weight, down, inner)
        return dx0, dx, dw, db if ctx.want_bias else None, d_down
    want_x, want_weight, want_down = ctx.wants
    dw = _product(du.mT, x if down is None else inner) if want_weight else None
    dx = d_down = None
    if down is None:
        dx = _added(du, weight, dy) if want_x else None
    elif want_x or want_down:
        d_inner = _product(du, weight)
        dx = _added(d_inner, down, dy) if want_x else None
        d_down = _product(d_inner.mT, x) if want_down else None
    return dx0, dx, dw, db if ctx.want_bias else None, d_down


def _wide_grads(
    wants: tuple[bool, ...], du: Tensor, dy: Tensor, x: Tensor, weight: Tensor, down: Tensor | None, inner: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x and of both weights from rows of ``du`` that start in whole accesses."""
    (n, p), (want_x, want_weight, want_down) = (dy.shape[1], du.shape[1]), wants
    dy = dy.contiguous()
    if down is None:
        dw = widened(du.mT @ widened(x, p), n, n) if want_weight else None
        return narrowed_to(dy, du @ widened(weight, p, p), None)[0] if want_x else None, dw, None
    dw = widened(du.mT @ inner, inner.shape[1], n) if want_weight else None
    if not (want_x or want_down):
        return None, dw, None
    d_inner = du @ widened(weight, weight.shape[1], p)
    dx = narrowed_to(dy, d_inner @ widened(down, p), None)[0] if want_x else None
    return dx, dw, widened(d_inner.mT @ widened(x, p), n) if want_down else None


def _product_cost(inputs: tuple[Any, ...], outputs: tuple[Any, ...], **_: Any) -> dict[str, float]:
    x, weight = inputs[1], inputs[2]
    elements = weight.numel + sum(t.numel for t in inputs[3:] if len(t.shape) == 2)
    flops = 2.0 * x.shape[0] * elements
    return {"flops": flops + 3.0 * x.numel, "matrix_flops": flops}


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    batch, dim, rank = of["batch"], of["dim"], of["rank"]
    dtype = getattr(torch, of.dtype)

    def drawn(*shape: int, by: float = 1.0) -> Tensor:
        return (by * torch.randn(*shape, device=on, dtype=torch.float32, generator=generator)).to(dtype)

    found = (drawn(batch, dim), drawn(batch, dim), drawn(dim, rank or dim, by=(rank or dim) ** -0.5), drawn(dim))
    return (*found, drawn(rank, dim, by=dim**-0.5)) if rank else found


CHECKS = tuple(
    case(dtype, batch=batch, dim=dim, rank=rank)
    for dtype in DTYPES
    for batch, dim, rank in ((3, 16, 0), (65, 100, 0), (257, 512, 0), (130, 1152, 0), (64, 96, 32), (200, 640, 128))
)
RACES = tuple(
    case("bfloat16", batch=batch, dim=dim, rank=rank)
    for batch, dim, rank in ((16384, 512, 0), (65536, 256, 0), (16384, 3456, 0), (16384, 3456, 256), (16384, 1024, 64))
)

CROSS_LAYER_BACKWARD = declare(
    name="cross_layer_backward",
    summary="the pointwise part of cross_layer's gradients, with the bias's sum",
    schema="(Tensor dy, Tensor u, Tensor x0, bool want_bias) -> (Tensor, Tensor, Tensor)",
    forward=_backward,
    fake=lambda dy, u, x0, want_bias: (
        dy.new_empty((dy.shape[0], _pitch(dy, True))),
        torch.empty_like(x0, memory_format=torch.contiguous_format),
        dy.new_empty(dy.shape[1] if want_bias else 0),
    ),
    reference=reference.backward,
    support=lambda dy, u, x0, *_: float_reason(dy=dy, u=u, x0=x0),
    cost=elementwise_cost(3.0),
    num_results=3,
    repeats=True,
)
CROSS_LOW_RANK_BACKWARD: Primitive = declare(
    name="cross_low_rank_backward",
    summary="all of the low-rank cross_layer's gradients but its weights'",
    schema="(Tensor dy, Tensor x0, Tensor inner, Tensor weight, Tensor? bias, Tensor down, bool want_bias)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    forward=_low_rank_backward,
    fake=lambda dy, x0, inner, weight, bias, down, want_bias: (
        torch.empty_like(dy, memory_format=torch.contiguous_format),
        torch.empty_like(x0, memory_format=torch.contiguous_format),
        torch.empty_like(dy, memory_format=torch.contiguous_format),
        torch.empty_like(inner, memory_format=torch.contiguous_format),
        dy.new_empty(dy.shape[1] if want_bias else 0),
    ),
    reference=reference.low_rank_backward,
    support=lambda dy, x0, inner, weight, bias, down, *_: float_reason(dy=dy, x0=x0, inner=inner),
    cost=lambda inputs, outputs, **_: {
        "flops": 6.0 * inputs[0].numel * inputs[2].shape[1],
        "matrix_flops": 6.0 * inputs[0].numel * inputs[2].shape[1],
    },
    num_results=5,
    repeats=True,
    multiplies=True,
)
ADD_PRODUCT: Primitive = declare(
    name="add_product",
    summary="a product added to a tensor: the last step of cross_layer's gradients",
    schema="(Tensor a, Tensor weight, Tensor x) -> Tensor",
    forward=lambda a, weight, x: (
        add_product(a.contiguous(), weight, x.contiguous()) if launchable(x) else ADD_PRODUCT.on_host(a, weight, x)
    ),
    fake=lambda a, weight, x: torch.empty_like(x, memory_format=torch.contiguous_format),
    reference=lambda a, weight, x: a @ weight + x,
    support=lambda a, weight, x: float_reason(a=a, weight=weight, x=x),
    cost=lambda inputs, outputs, **_: {
        "flops": 2.0 * inputs[0].numel * inputs[1].shape[1],
        "matrix_flops": 2.0 * inputs[0].numel * inputs[1].shape[1],
    },
    repeats=True,
    multiplies=True,
)
CROSS_LAYER = declare(
    name="cross_layer",
    summary="x0 · (W x + b) + x, full or low-rank",
    schema="(Tensor x0, Tensor x, Tensor weight, Tensor? bias, Tensor? down) -> (Tensor, Tensor, Tensor)",
    forward=_forward,
    infer=_infer,
    fake=_fake,
    reference=reference.forward,
    support=_support,
    cost=_product_cost,
    setup=_setup,
    backward=_grads,
    trial=Trial(
        make=_make,
        call=cross_layer,
        eager=reference.eager,
        reference=reference.meant,
        mistakes={"no residual": reference.no_residual, "bias outside": reference.bias_outside},
        checks=CHECKS,
        races=RACES,
        small=(case("bfloat16", batch=64, dim=256, rank=0),),
        forward_bytes=lambda args: 3 * args[0].nbytes + sum(t.nbytes for t in args[2:]),
        backward_bytes=lambda args: 6 * args[0].nbytes + 2 * sum(t.nbytes for t in args[2:]),
    ),
    repeats=True,
    multiplies=True,
)
