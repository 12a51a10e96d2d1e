"""Softmax over one dim, forward and backward, to rows of any length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels import split_rows, tuning
from ridgeline.kernels.compiler import POINTER_ALIGNMENT_BYTES
from ridgeline.kernels.contract import DTYPES, Case, Trial, case, declare, elementwise_cost
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
from ridgeline.kernels.rows import as_rows, cdiv, float_reason
from ridgeline.kernels.softmax import config, kernel, reference, streamed
from ridgeline.kernels.split_rows import Streamed

_FORWARD = Kernel(kernel.softmax_forward, vectors=("cols", "x_stride"))
_FORWARD_LONG = Kernel(kernel.softmax_forward_long, vectors=("cols", "x_stride"))
_BACKWARD = Kernel(kernel.softmax_backward, vectors=("cols",))
_BACKWARD_LONG = Kernel(kernel.softmax_backward_long, vectors=("cols",))
_FORWARD_ENDS = Kernel(kernel.softmax_forward_ends), Kernel(kernel.softmax_forward_ends_shared)
_BACKWARD_ENDS = Kernel(kernel.softmax_backward_ends), Kernel(kernel.softmax_backward_ends_shared)
_FORWARD_STREAMED = Kernel(
    streamed.softmax_forward_streamed,
    vectors=("cols", "x_stride", "length"),
    loose=("word_ptr",),
    cooperative=True,
)
_BACKWARD_STREAMED = Kernel(
    streamed.softmax_backward_streamed, vectors=("cols", "length"), loose=("word_ptr",), cooperative=True
)
_FORWARD_PACKED = Kernel(streamed.softmax_forward_packed, vectors=("cols", "x_stride"))
_forward_plans, _backward_plans = Plans(), Plans()


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Softmax along ``dim``, as ``torch.softmax``: kernels work along the last dim, others are moved there and back."""
    if dim in (-1, x.dim() - 1):
        return SOFTMAX(x)
    return SOFTMAX(x.movedim(dim, -1)).movedim(-1, dim)


def _forward(x: Tensor) -> Tensor:
    if x.is_contiguous():
        run = _forward_plans.get((x.shape, x.dtype, 0, x.get_device(), x.data_ptr() & 15))
        if run is not None:
            y = torch.empty_like(x)
            run(x, y)
            return y
    return _forward_planned(x) if launchable(x) else SOFTMAX.on_host(x)


def _forward_planned(x: Tensor) -> Tensor:
    if x.is_contiguous():
        y = torch.empty_like(x)
        stride = 0
    else:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        x, stride = as_rows(x)
    key = (y.shape, x.dtype, stride, x.get_device(), x.data_ptr() & 15)
    run = _forward_plans.get(key)
    if run is None:
        run = _forward_plans[key] = _plan_forward(x, y, stride)
    run(x, y)
    return y


def streamable(vector: int, itemsize: int) -> bool:
    """Whether rows can be copied to shared memory in accesses of at least eight bytes, on a device that does so."""
    return vector * itemsize >= 8 and not INTERPRETING  # streamed access bytes


def _plan_forward(x: Tensor, y: Tensor, stride: int) -> Any:
    SOFTMAX.check(y)
    cols = y.shape[-1]
    stride = stride or cols
    rows = y.numel() // cols
    size = y.element_size()
    pointers = x.data_ptr() | y.data_ptr()
    vector, unaligned = shift_of(size, pointers, cols, stride)
    common = {"device": x.get_device(), "vector": vector}
    streaming: Any = config.streamed_forward(cols, size) if streamable(vector, size) else None
    if size == 2 and is_widest(vector, size) and not INTERPRETING:
        streaming = config.packed(rows, cols, num_sms(x.get_device()), unaligned) or streaming
    chosen: Any = tuning.choose(
        "softmax.forward",
        {"rows": rows, "cols": cols, "dtype": y.dtype},
        streaming or _held(config.forward, rows, cols, size, vector, unaligned),
    )
    if isinstance(chosen, config.Packed):
        return _plan_packed(chosen, x, y, rows, cols, stride, unaligned)
    if isinstance(chosen, Streamed):
        found = split_rows.cut(chosen, rows, cols, x.get_device(), vector=vector, unaligned=unaligned)
        if found is not None:
            flags = {"UNALIGNED": unaligned, "KEPT": _kept(chosen, found, size)}
            run = split_rows.bind(_FORWARD_STREAMED, chosen, found, (x, y), rows, cols, (stride,), flags, common)
            return lambda x, y: run(x, y, stride)
        chosen = _held(config.forward, rows, cols, size, vector, unaligned)
    if chosen.ends and unaligned:
        return _plan_ends(_FORWARD_ENDS, chosen, (x, y), rows, (cols, stride), vector)
    tiles = cdiv(rows, chosen.rows)
    walking = chosen.chunks and chosen.programs_per_sm
    programs = min(tiles, chosen.programs_per_sm * num_sms(x.get_device())) if walking else tiles
    if not chosen.chunks:
        common["vector"] = vector_of(size, pointers, cols, stride)
    run = (_FORWARD if chosen.chunks else _FORWARD_LONG).bind(
        (x, y, rows, cols, stride),
        grid=(programs,),
        constants=_constants(chosen, cols, vector, unaligned),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        **common,
    )
    return lambda x, y: run(x, y, rows, cols, stride)


def _plan_packed(
    chosen: config.Packed, x: Tensor, y: Tensor, rows: int, cols: int, stride: int, unaligned: bool
) -> Any:
    """A row a program, or a share of one; as many programs as these."""
    num, block = chosen.cluster, 256 * chosen.num_warps
    access = POINTER_ALIGNMENT_BYTES // x.element_size()
    held = cols // access * access
    length = held if num == 1 else cdiv(cdiv(held, num), config.SHARE_STEP) * config.SHARE_STEP
    chunks, shortest = cdiv(length, block), cols - (num - 1) * length - (16 if unaligned else 0)
    run = _FORWARD_PACKED.bind(
        (x, y, cols, stride, length),
        grid=(rows * num,),
        constants={"SHARES": num, "CHUNKS": chunks, "FULL": min(chunks - (2 if unaligned else 1), shortest // block),
                   "SHARED": min(chosen.shared, chunks), "BLOCK": block, "UNALIGNED": unaligned, "READS": chosen.reads,
                   "WRITES": chosen.writes},
        num_warps=chosen.num_warps,
        max_registers=split_rows.registers_of(chosen.num_warps, chosen.programs_per_sm),
        device=x.get_device(),
        vector=access,
        cluster=num,
    )  # fmt: skip
    return lambda x, y: run(x, y, cols, stride, length)


def _kept(chosen: Any, found: split_rows.Cut, itemsize: int) -> bool:
    """Whether powers wait in registers: of 16-bit rows that several programs share."""
    return bool(getattr(chosen, "kept", False)) and itemsize == 2 and found.shares > 1 and chosen.lag == 1


def _held(choose: Any, rows: int, cols: int, itemsize: int, vector: int, unaligned: bool) -> config.Softmax:
    """The configuration for rows held in registers, or read twice."""
    if not unaligned:
        return choose(rows, cols, itemsize)
    found = choose(rows, cols // vector * vector, itemsize, True)
    apart = found.chunks > 1 or found.rows == 1  # shorter rows share a warp
    apart = apart and (choose is not config.forward or config.ends_pay(cols, itemsize))
    return config.with_ends(found) if apart and found.chunks else choose(rows, cols, itemsize, True)


def _plan_ends(
    kinds: tuple[Kernel, Kernel], chosen: config.Softmax, tensors: tuple[Tensor, ...], rows: int,
    numbers: tuple[int, ...], vector: int,
) -> Any:  # fmt: skip
    """Unaligned rows, their ends apart, one or several a program; ``numbers``: length and strides."""
    constants = {"CHUNKS": cdiv(numbers[0] // vector * vector, chosen.block), "BLOCK": chosen.block, "VECTOR": vector}
    if chosen.rows > 1:
        numbers, constants["ROWS"] = (rows, *numbers), chosen.rows
    run = kinds[chosen.rows > 1].bind(
        (*tensors, *numbers),
        grid=(cdiv(rows, chosen.rows),),
        constants=constants,
        num_warps=chosen.num_warps,
        device=tensors[0].get_device(),
        vector=vector,
    )
    return lambda *tensors: run(*tensors, *numbers)


def shift_of(itemsize: int, pointers: int, cols: int, stride: int) -> tuple[int, bool]:
    """Elements of an access, and whether rows are unaligned, those read and those written at the same place."""
    vector, unaligned = access_of(itemsize, pointers, cols, stride)
    if unaligned and (stride - cols) % vector:
        return vector_of(itemsize, pointers, cols, stride), False
    return vector, unaligned


def _constants(chosen: config.Softmax, cols: int, vector: int, unaligned: bool, staged: bool = True) -> dict[str, Any]:
    found: dict[str, Any] = {"BLOCK": chosen.block}
    if chosen.chunks:
        chunks = cdiv(cols + vector - 1, chosen.block) if unaligned else chosen.chunks
        found |= {"ROWS": chosen.rows, "CHUNKS": chunks, "UNALIGNED": unaligned, "VECTOR": vector,
                  "READS": chosen.reads, "WRITES": chosen.writes}  # fmt: skip
    if staged or not chosen.chunks:
        found |= {"STAGES": chosen.num_stages}
    return found


def _backward(dy: Tensor, y: Tensor) -> Tensor:
    if not launchable(y):
        return SOFTMAX_BACKWARD.on_host(dy, y)
    dx = torch.empty_like(y, memory_format=torch.contiguous_format)
    dy, y = dy.contiguous(), y.contiguous()
    key = (y.shape, dy.shape, y.dtype, dy.dtype, y.get_device(), (y.data_ptr() | dy.data_ptr()) & 15)
    run = _backward_plans.get(key)
    if run is None:
        run = _backward_plans[key] = _plan_backward(dy, y, dx)
    run(dy, y, dx)
    return dx


def _plan_backward(dy: Tensor, y: Tensor, dx: Tensor) -> Any:
    SOFTMAX_BACKWARD.check(dy, y)
    cols = y.shape[-1]
    rows = y.numel() // cols
    size = y.element_size()
    pointers = dy.data_ptr() | y.data_ptr() | dx.data_ptr()
    wide, least = max(size, dy.element_size()), min(size, dy.element_size())
    vector, unaligned = shift_of(least, pointers, cols, cols)
    common = {"device": y.get_device(), "vector": vector}
    narrow = streamable(vector, least) and not (unaligned and wide != least)
    streaming = config.streamed_backward(cols, wide) if narrow else None
    chosen: Any = tuning.choose(
        "softmax.backward",
        {"rows": rows, "cols": cols, "dtype": y.dtype},
        streaming or _held(config.backward, rows, cols, size, vector, unaligned),
    )
    if isinstance(chosen, Streamed):
        found = split_rows.cut(
            chosen, rows, cols, y.get_device(), vector=min(vector, POINTER_ALIGNMENT_BYTES // wide), unaligned=unaligned
        )
        if found is not None:
            flags = {"UNALIGNED": unaligned}
            return split_rows.bind(_BACKWARD_STREAMED, chosen, found, (dy, y, dx), rows, cols, (), flags, common)
        chosen = _held(config.backward, rows, cols, size, vector, unaligned)
    if chosen.ends and unaligned:
        return _plan_ends(_BACKWARD_ENDS, chosen, (dy, y, dx), rows, (cols,), vector)
    if not chosen.chunks:
        common["vector"] = vector_of(least, pointers, cols)
    run = (_BACKWARD if chosen.chunks else _BACKWARD_LONG).bind(
        (dy, y, dx, rows, cols),
        grid=(cdiv(rows, chosen.rows),),
        constants=_constants(chosen, cols, vector, unaligned, staged=False),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        **common,
    )
    return lambda dy, y, dx: run(dy, y, dx, rows, cols)


def _like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _support(x: Tensor, *_: Any) -> str | None:
    if x.dim() < 1 or x.shape[-1] == 0:
        return "x needs a last dim of at least one element"
    return float_reason(x=x)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _grads(ctx: Any, dy: Tensor) -> Tensor:
    return SOFTMAX_BACKWARD(dy, ctx.saved_tensors[0])


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    x = 2 * torch.randn(of["rows"], of["cols"], device=on, dtype=torch.float32, generator=generator)
    return (x.to(getattr(torch, of.dtype)),)


CHECKS = tuple(
    case(dtype, rows=rows, cols=cols)
    for dtype in DTYPES
    for rows, cols in ((1, 3), (3, 7), (1, 4096), (1000, 128), (257, 1000), (33, 5120), (9, 32768), (5, 50257),
                       (3, 65536), (2, 262144), (300, 40968), (1, 131072), (70, 150016), (140, 50260),
                       (900, 4097), (700, 1001), (300, 20001), (600, 50257), (70, 131075),
                       (270, 24000), (400, 50304), (300, 32768), (1100, 25000), (12300, 4096), (700, 16392),
                       (600, 20000), (280, 65528), (3001, 394), (1003, 177), (530, 1162), (700, 1232), (601, 1552),
                       (533, 2200), (3, 20724), (603, 430), (9, 250880))
)  # fmt: skip
RACES = tuple(
    case(dtype, rows=rows, cols=cols)
    for dtype, rows, cols in (
        ("bfloat16", 16384, 4096), ("bfloat16", 65536, 1024), ("bfloat16", 8192, 16384), ("bfloat16", 4096, 32768),
        ("bfloat16", 2048, 65536), ("bfloat16", 1024, 131072), ("bfloat16", 512, 262144), ("float32", 8192, 4096),
        ("bfloat16", 4096, 50257), ("bfloat16", 8192, 20000), ("bfloat16", 32768, 4097),
    )
)  # fmt: skip
SMALL = tuple(case("bfloat16", rows=rows, cols=cols) for rows, cols in ((1, 4096), (128, 1024)))

SOFTMAX_BACKWARD = declare(
    name="softmax_backward",
    repeats=True,
    keyed=True,
    summary="gradient of softmax",
    schema="(Tensor dy, Tensor y) -> Tensor",
    forward=_backward,
    fake=lambda dy, y: torch.empty_like(y, memory_format=torch.contiguous_format),
    reference=reference.backward,
    support=lambda dy, y: (
        (None if dy.shape == y.shape else "dy and y differ in shape") or _support(y) or float_reason(dy=dy)
    ),
    cost=elementwise_cost(4.0),
)
SOFTMAX = declare(
    name="softmax",
    repeats=True,
    keyed=True,
    summary="exp(x) / sum(exp(x)) along the last dim",
    schema="(Tensor x) -> Tensor",
    forward=_forward,
    infer=_forward,
    fake=_like,
    reference=reference.forward,
    support=_support,
    cost=elementwise_cost(8.0),
    setup=_setup,
    backward=_grads,
    trial=Trial(
        make=_make,
        call=softmax,
        eager=reference.eager,
        reference=reference.forward,
        mistakes={"padding counted": reference.pad_counted, "last block lost": reference.last_block_lost},
        checks=CHECKS,
        races=RACES,
        small=SMALL,
        backward_bytes=lambda args: 3 * args[0].nbytes,
    ),
)
