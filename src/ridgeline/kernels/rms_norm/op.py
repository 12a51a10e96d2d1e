"""RMSNorm: y = x / sqrt(mean(x²) + eps) · (weight + offset), forward and backward, with the residual add fused in."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import KernelError
from ridgeline.kernels import device, tuning
from ridgeline.kernels.compiler import POINTER_ALIGNMENT_BYTES
from ridgeline.kernels.contract import DTYPES, Case, Trial, case, common_rows, declare, elementwise_cost
from ridgeline.kernels.launcher import (
    INTERPRETING,
    Kernel,
    Plans,
    access_of,
    is_widest,
    launchable,
    num_sms,
    vector_of,
)
from ridgeline.kernels.rms_norm import config, gradient, kernel, reference, streamed
from ridgeline.kernels.rows import as_rows, cdiv, float_reason, template
from ridgeline.kernels.split_rows import most_registers, registers_of

_FORWARD = Kernel(kernel.rms_norm_forward, vectors=("cols", "x_stride"))
_FORWARD_LONG = Kernel(kernel.rms_norm_forward_long, vectors=("cols", "x_stride"))
_FORWARD_APART = Kernel(kernel.rms_norm_forward_apart, vectors=("width",))
_BACKWARD = Kernel(kernel.rms_norm_backward, vectors=("cols", "x_stride"))
_BACKWARD_LONG = Kernel(kernel.rms_norm_backward_long, vectors=("cols", "x_stride"))
_BACKWARD_AHEAD = Kernel(gradient.norm_backward_ahead, vectors=("cols", "x_stride"), loose=("mean_ptr", "rstd_ptr"))
_BACKWARD_WORDS = Kernel(streamed.norm_backward_words, vectors=("cols", "x_stride"), loose=("mean_ptr", "rstd_ptr"))
_WEIGHT_SHARE = Kernel(kernel.rms_norm_weight_share, vectors=("cols", "x_stride"))
REDUCE = Kernel(device.reduce_partials, vectors=("cols",))
_COPIES = Kernel(device.copy_shifted)
COPIED = 1024

_infer_plans, _forward_plans, _backward_plans = Plans(), Plans(), Plans()
_empty_like = torch.empty_like
EPS = torch.finfo(torch.float32).eps
"""PyTorch's default: the step of the type it computes in, whatever the type of x."""


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float | None = None, *, offset: float = 0.0, out: Tensor | None = None
) -> Tensor:
    """Normalize the last dim of ``x`` by its root mean square, as ``F.rms_norm`` does over one dim.

    ``offset`` is added to the weight (Gemma stores it less one). ``out`` takes the result where no gradient is needed.
    """
    if eps is None:
        eps = EPS
    if out is not None:
        return _into(out, x, weight, eps, offset)
    return RMS_NORM(x, weight, eps, offset)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float | None = None, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """``h = x + residual`` and its RMSNorm, in one pass: returns (norm of h, h)."""
    return ADD_RMS_NORM(x, residual, weight, EPS if eps is None else eps, offset)


def _into(out: Tensor, x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    if out.shape != x.shape or out.dtype != x.dtype or out.device != x.device or not out.is_contiguous():
        raise KernelError("rms_norm: out must be contiguous, with the shape, type and device of x")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, out)):
        raise KernelError("rms_norm: out= does not record gradients; call it under torch.no_grad()")
    if not launchable(x):
        return out.copy_(_infer(x, weight, eps, offset))
    _run(x, None, weight, eps, offset, save=False, y=out)
    return out


# --- running -----------------------------------------------------------------------------------------------------


def _forward(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    if not launchable(x):
        return RMS_NORM.on_host(x, weight, eps, offset)
    y, _, rstd = _run(x, None, weight, eps, offset, save=True)
    return y, rstd


def _infer(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    """The shortest way from Python to the device: one lookup, one allocation, one launch."""
    if weight is None or not (x.is_contiguous() and weight.is_contiguous()):
        return _infer_other(x, weight, eps, offset)
    key = (x.shape, weight.shape, x.dtype, weight.dtype, x.get_device(), (x.data_ptr() | weight.data_ptr()) & 15)
    plan = _infer_plans.get(key)
    if plan is None:
        if not launchable(x):
            return RMS_NORM.on_host(x, weight, eps, offset)[0]
        y = _empty_like(x)
        plan = _infer_plans[key] = _plan_forward(x, x, weight, y, y, y, x.shape[-1], save=False)
    run, rows, cols, _ = plan
    y = _empty_like(x)
    run(x, x, weight, y, y, y, rows, cols, cols, eps, offset)
    return y


def _infer_other(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    if not launchable(x):
        return RMS_NORM.on_host(x, weight, eps, offset)[0]
    return _run(x, None, weight, eps, offset, save=False)[0]


def _add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    if not launchable(x):
        return ADD_RMS_NORM.on_host(x, residual, weight, eps, offset)
    return _run(x, residual, weight, eps, offset, save=True)


def _add_infer(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    if not launchable(x):
        return ADD_RMS_NORM.on_host(x, residual, weight, eps, offset)[:2]
    return _run(x, residual, weight, eps, offset, save=False)[:2]


def _run(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, save: bool, y: Any = None
) -> tuple[Tensor, Any, Any]:
    if y is None:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
    h = y if residual is None else torch.empty_like(y)
    stride = x.shape[-1]
    if not x.is_contiguous():
        x, stride = as_rows(x)
    if residual is None:
        residual = x
    elif not residual.is_contiguous():
        residual = residual.contiguous()
    w = x if weight is None else weight
    key = (
        y.shape, w.shape, residual.shape, x.dtype, w.dtype, residual.dtype, stride, weight is None, residual is x, save,
        x.get_device(), (x.data_ptr() | w.data_ptr() | residual.data_ptr() | y.data_ptr()) & 15,
    )  # fmt: skip
    plan = _forward_plans.get(key)
    if plan is None:
        plan = _forward_plans[key] = _plan_forward(x, residual, weight, y, h, y, stride, save)
    run, rows, cols, stats = plan
    rstd = torch.empty_like(stats, memory_format=torch.contiguous_format) if save else y
    run(x, residual, w, y, h, rstd, rows, cols, stride, eps, offset)
    return y, h, rstd


def _plan_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, y: Tensor, h: Tensor, rstd: Tensor, stride: int, save: bool
) -> tuple[Any, int, int, Tensor]:
    has_residual = h is not y
    RMS_NORM.check(y, weight, 0.0, 0.0)
    if has_residual and (residual.shape.numel() != y.numel() or residual.dtype != y.dtype):
        raise KernelError("add_rms_norm: residual must have the shape and type of x")
    cols = y.shape[-1]
    rows = y.numel() // cols
    size = y.element_size()
    w = x if weight is None else weight
    stats = template(y.shape[:-1], torch.float32, y.device)
    pointers = x.data_ptr() | residual.data_ptr() | y.data_ptr() | h.data_ptr() | w.data_ptr()
    constants: dict[str, Any] = {"HAS_WEIGHT": weight is not None, "HAS_RESIDUAL": has_residual, "SAVE": save}
    kind = _FORWARD_LONG
    vector = vector_of(size, pointers, cols, stride)
    ends = ends_access(size, pointers, cols, stride)
    apart = config.apart(rows, cols // ends * ends, size) if ends else None
    chosen = tuning.choose(
        "rms_norm.forward",
        {"rows": rows, "cols": cols, "dtype": y.dtype},
        apart or config.forward(rows, cols, size, has_residual),
    )
    if ends and chosen.apart:
        return _plan_apart(chosen, x, residual, weight, y, h, rows, cols, stride, ends, save), rows, cols, stats
    if chosen.chunks:
        kind = _FORWARD
        vector, unaligned, chunks = pieces_of(chosen, size, pointers, cols, stride)
        constants |= {"ROWS": chosen.rows, "CHUNKS": chunks, "BLOCK": chosen.block, "UNALIGNED": unaligned,
                      "VECTOR": vector, "READS": "" if has_residual else chosen.reads,
                      "WRITES": chosen.writes, "EARLY": chosen.early}  # fmt: skip
    else:
        constants |= {"BLOCK": chosen.block or config.LONG_BLOCK}
    run = kind.bind(
        (x, residual, w, y, h, stats if save else rstd, rows, cols, stride, 0.0, 0.0),
        grid=(cdiv(rows, chosen.rows),),
        constants=constants,
        num_warps=chosen.num_warps,
        device=x.get_device(),
        vector=vector,
        max_registers=most_registers(chosen),
    )
    return run, rows, cols, stats


def _plan_apart(
    chosen: config.Forward, x: Tensor, residual: Tensor, weight: Tensor | None, y: Tensor, h: Tensor, rows: int,
    cols: int, stride: int, vector: int, save: bool,
) -> Any:  # fmt: skip
    """Unaligned rows, a program each, the weight from copies that start where rows can."""
    width, copies = plan_copies(weight, None, cols, vector, x)
    w = x if weight is None else weight
    stats = template(y.shape[:-1], torch.float32, y.device) if save else y
    run = _FORWARD_APART.bind(
        (x, residual, w, w, y, h, stats, cols, stride, width, 0.0, 0.0),
        grid=(rows,),
        constants={"HAS_WEIGHT": weight is not None, "HAS_RESIDUAL": h is not y, "SAVE": save,
                   "CHUNKS": cdiv(cols // vector * vector, chosen.block), "BLOCK": chosen.block, "VECTOR": vector,
                   "READS": "" if h is not y else chosen.reads, "DEPENDENT": weight is not None and not INTERPRETING},
        num_warps=chosen.num_warps,
        device=x.get_device(),
        vector=vector,
    )  # fmt: skip

    def plan(
        x: Tensor, residual: Tensor, w: Tensor, y: Tensor, h: Tensor, rstd: Tensor, rows: int, cols: int, stride: int,
        eps: float, offset: float,
    ) -> None:  # fmt: skip
        run(x, residual, w, copies(w, w, x), y, h, rstd, cols, stride, width, eps, offset)

    return plan


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, dh: Tensor | None, offset: float, want_dw: bool
) -> tuple[Tensor, Tensor]:
    if not launchable(x):
        return RMS_NORM_BACKWARD.on_host(dy, x, weight, rstd, dh, offset, want_dw)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    stride = x.shape[-1]
    if not x.is_contiguous():
        x, stride = as_rows(x)
    dy = dy if dy.is_contiguous() else dy.contiguous()
    dh = dh if dh is None or dh.is_contiguous() else dh.contiguous()
    w, extra = x if weight is None else weight, dy if dh is None else dh
    key = (
        dx.shape, w.shape, dy.shape, x.dtype, w.dtype, dy.dtype, stride, weight is None, dh is None, want_dw,
        offset != 0.0, x.get_device(), (x.data_ptr() | w.data_ptr() | dy.data_ptr() | extra.data_ptr()) & 15,
    )  # fmt: skip
    plan = _backward_plans.get(key)
    if plan is None:
        plan = _backward_plans[key] = _plan_backward(
            dy, x, weight, rstd, extra, dx, stride, dh is not None, want_dw, offset != 0.0
        )
    dw = torch.empty_like(w) if want_dw else w.new_empty(0)
    plan(dy, x, w, rstd, extra, dx, dw, offset)
    return dx, dw


def _plan_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dh: Tensor,
    dx: Tensor,
    stride: int,
    has_dh: bool,
    want_dw: bool,
    offset: bool,
) -> Any:
    RMS_NORM_BACKWARD.check(dy, dx, weight)
    cols = dx.shape[-1]
    rows = dx.numel() // cols
    size = max(dx.element_size(), dy.element_size())
    w = x if weight is None else weight
    pointers = x.data_ptr() | dy.data_ptr() | dx.data_ptr() | dh.data_ptr() | w.data_ptr()
    vector = vector_of(min(dx.element_size(), dy.element_size()), pointers, cols, stride)
    shifts = access_of(min(dx.element_size(), dy.element_size()), pointers, cols, stride)[1]
    packed_words = words_access(dy, x, w, pointers, rows, cols, stride)
    past = has_dh and packed_words and past_access(dh, x, shifts)
    chosen = tuning.choose(
        "rms_norm.backward",
        {"rows": rows, "cols": cols, "dtype": dx.dtype},
        (config.past_words(rows, cols) if past else None)
        or config.backward(rows, cols, size, unaligned=shifts, words=packed_words and not has_dh),
    )
    if packed_words and (chosen.again or chosen.ahead) and (past or not has_dh):
        gone = dh if past else None
        return _plan_backward_words(chosen, dy, x, weight, rstd, gone, dx, rows, cols, stride, want_dw, offset)
    flags = {"HAS_WEIGHT": weight is not None, "HAS_DH": has_dh}
    if not chosen.chunks:
        common = {"device": x.get_device(), "vector": vector, "num_warps": chosen.num_warps}
        return _plan_backward_long(dy, x, w, rstd, dh, dx, rows, cols, stride, want_dw, flags, common)
    programs = max(1, min(cdiv(rows, chosen.rows), chosen.programs_per_sm * num_sms(x.get_device())))
    unaligned, chunks = False, chosen.chunks
    if chosen.rows == 1:
        narrow = min(dx.element_size(), dy.element_size())
        vector, unaligned, chunks = pieces_of(chosen, narrow, pointers, cols, stride)
        programs = max(1, programs // vector) * vector if unaligned else programs
    partial = template((programs, config.share_pitch(cols) if unaligned else cols), torch.float32, x.device)
    early = chosen.early and not INTERPRETING
    run = _BACKWARD.bind(
        (dy, x, w, rstd, dh, dx, partial, rows, cols, stride, 0.0),
        grid=(programs,),
        constants=flags
        | {"WANT_DW": want_dw, "KEEP_WEIGHT": chosen.keep_weight, "ROWS": chosen.rows,
           "CHUNKS": chunks, "BLOCK": chosen.block, "STAGES": chosen.num_stages,
           "EARLY": want_dw and early, "UNALIGNED": unaligned, "VECTOR": vector},
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        device=x.get_device(),
        vector=vector,
    )  # fmt: skip
    reduce = plan_reduce(partial, w, programs, cols, x.get_device(), early=early)

    def plan(dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, dh: Tensor, dx: Tensor, dw: Tensor, offset: float) -> None:
        shares = torch.empty_like(partial, memory_format=torch.contiguous_format) if want_dw else dx
        run(dy, x, w, rstd, dh, dx, shares, rows, cols, stride, offset)
        if want_dw:
            reduce(shares, dw, dw, programs, cols)

    return plan


def words_access(dy: Tensor, x: Tensor, w: Tensor, pointers: int, rows: int, cols: int, stride: int) -> bool:
    """Whether a backward pass can read its rows as words: numbers of one type, in accesses of sixteen bytes; of rows
    that are unaligned there must be one for every place where they can start."""
    size = x.element_size()
    if not dy.dtype == x.dtype == w.dtype or INTERPRETING:
        return False
    ends = ends_access(size, pointers, cols, stride)
    return 0 < ends <= rows or is_widest(vector_of(size, pointers, cols, stride), size)


def past_access(dh: Tensor, x: Tensor, unaligned: bool) -> bool:
    """Whether rows that wait in shared memory can have a gradient past the norm added to them: 16-bit ones of one type
    that start with accesses."""
    return dh.dtype == x.dtype and x.element_size() == 2 and not unaligned


def plan_words(
    chosen: config.Backward, dy: Tensor, x: Tensor, weight: Tensor | None, stats: Tensor, dh: Tensor | None,
    dx: Tensor, partial: Tensor, rows: int, cols: int, stride: int, want_dw: bool, want_db: bool, centered: bool,
    offset: bool = False,
) -> Any:  # fmt: skip
    """Rows that wait in shared memory, two numbers a word, for as many programs as ``partial`` has rows. ``dh``: a
    gradient past the norm; ``offset``: a number is added to their weights."""
    if dh is not None and chosen.ahead:
        raise KernelError("gradients past a norm are not added to rows that are finished a turn later")
    vector = POINTER_ALIGNMENT_BYTES // x.element_size()
    share = config.stretch(cols // vector * vector, x.element_size(), chosen.split)
    gone = () if chosen.ahead else (dy if dh is None else dh,)
    return (_BACKWARD_AHEAD if chosen.ahead else _BACKWARD_WORDS).bind(
        (dy, x, x if weight is None else weight, stats, stats, *gone, dx, partial, rows, cols, stride, 0.0),
        grid=(partial.shape[-2] * chosen.split,),
        constants={"CENTERED": centered, "HAS_WEIGHT": weight is not None, "OFFSET": offset, "WANT_DW": want_dw,
                   "WANT_DB": want_db, "CHUNKS": cdiv(share, chosen.block), "BLOCK": chosen.block,
                   "SLOTS": chosen.num_stages, "EARLY": (want_dw or want_db) and chosen.early,
                   "UNALIGNED": cols % vector != 0, "SHARED": weights_in(chosen, x.element_size(), weight is not None)}
        | ({"SPLIT": chosen.split} if chosen.ahead else {"HAS_DH": dh is not None}),
        num_warps=chosen.num_warps,
        device=x.get_device(),
        vector=vector,
        max_registers=registers_of(chosen.num_warps, chosen.programs_per_sm),
        cluster=chosen.split,
    )  # fmt: skip


def _plan_backward_words(
    chosen: config.Backward, dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, dh: Tensor | None, dx: Tensor,
    rows: int, cols: int, stride: int, want_dw: bool, offset: bool,
) -> Any:  # fmt: skip
    w, on = x if weight is None else weight, x.get_device()
    programs = walkers(rows, chosen, start_places(x, cols), on)
    partial = template((programs, config.share_pitch(cols)), torch.float32, x.device)
    run = plan_words(chosen, dy, x, weight, rstd, dh, dx, partial, rows, cols, stride, want_dw, False, False, offset)
    reduce = plan_reduce(partial, w, programs, cols, on, early=chosen.early)

    def plan(dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, dh: Tensor, dx: Tensor, dw: Tensor, offset: float) -> None:
        shares = torch.empty_like(partial, memory_format=torch.contiguous_format) if want_dw else dx
        gone = () if chosen.ahead else (dh,)
        run(dy, x, w, rstd, rstd, *gone, dx, shares, rows, cols, stride, offset)
        if want_dw:
            reduce(shares, dw, dw, programs, cols)

    return plan


def weights_in(chosen: config.Backward, itemsize: int, given: bool) -> int:
    """Where weights wait: in registers (0), in shared memory (1), or in the L2 (2) where they do not fit there."""
    if not given or chosen.keep_weight:
        return 0
    if not chosen.ahead:
        return 1
    return 1 if config.shared_bytes(chosen, itemsize, chosen.num_stages, True) <= config.SHARED_BYTES else 2


def start_places(x: Tensor, cols: int) -> int:
    """In how many places of an access rows can start: every so many rows the same. Of 132 programs 128 walk over odd
    rows, where eight do, and all over even ones."""
    vector = POINTER_ALIGNMENT_BYTES // x.element_size()
    return vector // math.gcd(cols, vector)


def plan_copies(weight: Tensor | None, bias: Tensor | None, cols: int, vector: int, x: Tensor) -> tuple[int, Any]:
    """How long a copy of weights is for unaligned rows, and a call that makes one for every place
    where a row can start; the kernel after it may start early."""
    width = cdiv(cols, vector) * vector
    given = weight if weight is not None else bias
    if given is None:
        return width, lambda w, b, like: like
    made = template((2, vector, width), given.dtype, x.device)
    run = _COPIES.bind(
        (given, given, made, cols, width),
        grid=(cdiv(width, COPIED), vector),
        constants={"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None, "EARLY": not INTERPRETING,
                   "BLOCK": COPIED},
        num_warps=4,
        device=x.get_device(),
    )  # fmt: skip

    def copies(w: Tensor, b: Tensor, like: Tensor) -> Tensor:
        found = torch.empty_like(made, memory_format=torch.contiguous_format)
        run(w, b, found, cols, width)
        return found

    return width, copies


def ends_access(itemsize: int, pointers: int, cols: int, stride: int) -> int:
    """Elements of an access where rows are unaligned, read and written ones at the same place; else 0."""
    vector, unaligned = access_of(itemsize, pointers, cols, stride)
    return vector if unaligned and not (stride - cols) % vector else 0


def walkers(rows: int, chosen: Any, vector: int, device: int) -> int:
    """Programs that walk over rows, a multiple of what an access holds: all rows of one start at the same place. Those
    that share rows count as one."""
    programs = min(rows, chosen.programs_per_sm * num_sms(device) // chosen.split)
    return max(1, programs // vector) * vector


def pieces_of(chosen: Any, itemsize: int, pointers: int, cols: int, stride: int) -> tuple[int, bool, int]:
    """Elements of an access, whether rows are unaligned, and how many pieces such a row may reach into."""
    vector, unaligned = access_of(itemsize, pointers, cols, stride)
    if unaligned and (stride - cols) % vector:  # what is read and what is written start at different places
        return vector_of(itemsize, pointers, cols, stride), False, chosen.chunks
    return vector, unaligned, cdiv(cols + vector - 1, chosen.block) if unaligned else chosen.chunks


def _plan_backward_long(
    dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, dh: Tensor, dx: Tensor, rows: int, cols: int, stride: int,
    want_dw: bool, flags: dict[str, Any], common: dict[str, Any],
) -> Any:  # fmt: skip
    run = _BACKWARD_LONG.bind(
        (dy, x, w, rstd, dh, dx, rows, cols, stride, 0.0),
        grid=(rows,),
        constants=flags | {"BLOCK": config.LONG_BLOCK},
        **common,
    )
    block = 512
    groups = max(1, min(cdiv(rows, 8), cdiv(4 * num_sms(x.get_device()), cdiv(cols, block))))
    partial = template((groups, config.share_pitch(cols)), torch.float32, x.device)
    share = _WEIGHT_SHARE.bind(
        (dy, x, rstd, partial, rows, cols, stride),
        grid=(cdiv(cols, block), groups),
        constants={"ROWS": 8, "BLOCK": block},
        num_stages=3,
        **(common | {"num_warps": 8}),
    )
    reduce = plan_reduce(partial, w, groups, cols, x.get_device())

    def plan(dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, dh: Tensor, dx: Tensor, dw: Tensor, offset: float) -> None:
        run(dy, x, w, rstd, dh, dx, rows, cols, stride, offset)
        if want_dw:
            shares = torch.empty_like(partial, memory_format=torch.contiguous_format)
            share(dy, x, rstd, shares, rows, cols, stride)
            reduce(shares, dw, dw, groups, cols)

    return plan


def plan_reduce(
    partial: Tensor, out: Tensor, num_partials: int, cols: int, on: int, second: Any = None, early: bool = False,
    default: config.ColumnSums | None = None,
) -> Any:  # fmt: skip
    """The second half of a column sum: [num_partials, cols] to [cols], small enough to stay in the L2.

    With ``second``, two stacked arrays are summed into two tensors. ``early``: started while the first half ends.
    """
    pitch = partial.shape[-1]
    default = default or config.column_sums(num_partials)
    chosen = tuning.choose("column_sums", {"shares": num_partials, "cols": cols}, default)
    return REDUCE.bind(
        (partial, out, out if second is None else second, num_partials, cols),
        grid=(cdiv(cols, chosen.block), 1 if second is None else 2),
        constants={"PARTS": chosen.shares, "BLOCK": chosen.block, "UNALIGNED": pitch != cols, "DEPENDENT": early},
        num_warps=chosen.num_warps,
        device=on,
        vector=4 if pitch % 4 == 0 else 1,
    )


# --- the declaration ---------------------------------------------------------------------------------------------


def _fake(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _add_fake(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    y, rstd = _fake(x, weight, eps, offset)
    return y, torch.empty_like(y), rstd


def _backward_fake(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, dh: Tensor | None, offset: float, want_dw: bool
) -> tuple[Tensor, Tensor]:
    dw = x.new_empty(x.shape[-1] if want_dw else 0, dtype=x.dtype if weight is None else weight.dtype)
    return torch.empty_like(x, memory_format=torch.contiguous_format), dw


def _support(x: Tensor, weight: Tensor | None = None, *_: Any) -> str | None:
    if x.dim() < 1 or x.shape[-1] == 0:
        return "x needs a last dim of at least one element"
    if weight is not None and weight.shape != x.shape[-1:]:
        return f"weight has shape {tuple(weight.shape)}, the last dim of x is {x.shape[-1]}"
    if weight is not None and not weight.is_contiguous():
        return "weight must be contiguous"
    return float_reason(x=x, weight=weight)


def _backward_support(dy: Tensor, x: Tensor, weight: Tensor | None, *_: Any) -> str | None:
    if dy.shape != x.shape:
        return f"dy has shape {tuple(dy.shape)}, x {tuple(x.shape)}"
    return _support(x, weight) or float_reason(dy=dy)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, offset = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, output[1])
    ctx.offset = offset
    ctx.want_dw = weight is not None and weight.requires_grad


def _grads(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dy is None:
        return None, None, None, None
    x, weight, rstd = ctx.saved_tensors
    dx, dw = RMS_NORM_BACKWARD(dy, x, weight, rstd, None, ctx.offset, ctx.want_dw)
    return dx, dw if ctx.want_dw else None, None, None


def _add_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, _, offset = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], weight, output[2])
    ctx.offset = offset
    ctx.want_dw = weight is not None and weight.requires_grad


def _add_grads(ctx: Any, dy: Tensor | None, dh: Tensor | None, *_: Any) -> tuple[Any, ...]:
    h, weight, rstd = ctx.saved_tensors
    if dy is None:
        return dh, dh, None, None, None
    dx, dw = RMS_NORM_BACKWARD(dy, h, weight, rstd, dh, ctx.offset, ctx.want_dw)
    return dx, dx, dw if ctx.want_dw else None, None, None


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    dtype = getattr(torch, of.dtype)
    x = torch.randn(of["rows"], of["cols"], device=on, dtype=torch.float32, generator=generator).to(dtype)
    weight = (1 + 0.3 * torch.randn(of["cols"], device=on, dtype=torch.float32, generator=generator)).to(dtype)
    return x, weight, 1e-6


def _add_make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    x, weight, eps = _make(of, on, generator)
    return x, _make(of, on, generator)[0], weight, eps


CHECKS = tuple(
    case(dtype, rows=rows, cols=cols)
    for dtype in DTYPES
    for rows, cols in ((1, 2), (3, 7), (1, 4096), (1000, 128), (257, 1000), (64, 4096), (33, 5120), (19, 8192),
                       (9, 16384), (5, 20001), (3, 40000), (2, 131072), (300, 24576),
                       (900, 4099), (5001, 1001), (4101, 4099), (4100, 7001), (12300, 4096), (9001, 1001),
                       (4101, 2049), (700, 12289), (520, 18748), (520, 18749), (4200, 1248))
)  # fmt: skip
RACES = tuple(
    case(dtype, rows=rows, cols=cols)
    for dtype, rows, cols in (
        ("bfloat16", 16384, 4096), ("bfloat16", 8192, 8192), ("bfloat16", 4096, 16384), ("bfloat16", 8192, 5120),
        ("bfloat16", 2048, 4096), ("bfloat16", 131072, 128), ("bfloat16", 32768, 1024), ("bfloat16", 8192, 128),
        ("bfloat16", 16384, 2048), ("float32", 8192, 4096), ("float16", 16384, 3072),
        ("bfloat16", 65536, 2048), ("bfloat16", 32768, 4099),
    )
)  # fmt: skip
SMALL = tuple(case("bfloat16", rows=rows, cols=cols) for rows, cols in ((1, 4096), (16, 4096), (128, 1024)))

RMS_NORM_BACKWARD = declare(
    name="rms_norm_backward",
    repeats=True,
    keyed=True,
    summary="gradients of rms_norm, and of add_rms_norm with the gradient of its sum",
    schema="(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, Tensor? dh, float offset, bool want_dw)"
    " -> (Tensor, Tensor)",
    forward=_backward,
    fake=_backward_fake,
    reference=reference.backward,
    support=_backward_support,
    cost=elementwise_cost(12.0),
    num_results=2,
)
RMS_NORM = declare(
    name="rms_norm",
    repeats=True,
    keyed=True,
    summary="x / rms(x) · weight",
    schema="(Tensor x, Tensor? weight, float eps, float offset) -> (Tensor, Tensor)",
    forward=_forward,
    infer=_infer,
    fake=_fake,
    reference=reference.forward,
    support=_support,
    cost=elementwise_cost(5.0),
    setup=_setup,
    backward=_grads,
    trial=Trial(
        make=_make,
        call=rms_norm,
        eager=reference.eager,
        reference=reference.rms_norm,
        mistakes={
            "padded mean": reference.padded_mean,
            "last column lost": reference.last_column_lost,
            "weight ignored": reference.weight_ignored,
        },
        checks=CHECKS,
        races=RACES,
        small=SMALL,
        packs=common_rows(),
    ),
)
ADD_RMS_NORM = declare(
    name="add_rms_norm",
    repeats=True,
    keyed=True,
    summary="h = x + residual and rms_norm(h), in one pass",
    schema="(Tensor x, Tensor residual, Tensor? weight, float eps, float offset) -> (Tensor, Tensor, Tensor)",
    forward=_add_forward,
    infer=_add_infer,
    fake=_add_fake,
    reference=reference.add_forward,
    support=lambda x, residual, weight=None, *_: (
        _support(x, weight)
        or (
            None if (residual.shape, residual.dtype) == (x.shape, x.dtype) else "residual and x differ in shape or type"
        )
    ),
    cost=elementwise_cost(6.0),
    num_results=2,
    setup=_add_setup,
    backward=_add_grads,
    trial=Trial(
        make=_add_make,
        call=add_rms_norm,
        eager=reference.add_eager,
        reference=reference.add_rms_norm,
        mistakes={"residual ignored": reference.residual_ignored},
        checks=CHECKS,
        races=RACES[:6],
        small=SMALL,
        backward_bytes=lambda args: 4 * args[0].nbytes,  # the sum and two gradients in, one out
    ),
)
