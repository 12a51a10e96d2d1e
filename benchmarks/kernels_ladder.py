"""The backward pass of RMSNorm from naive to final, each step timed: the numbers of docs/guide/kernels.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

import ridgeline.kernels as rk
from ridgeline.bench.race import Course
from ridgeline.kernels import tuning
from ridgeline.kernels.rms_norm.config import Backward

ROWS, COLS = 16384, 4096


@triton.jit
def one_row_each(dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, cols, BLOCK: tl.constexpr):
    """One program a row; every program adds its row to the weight's gradient with atomics."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    m = c < cols
    x = tl.load(x_ptr + row * cols + c, mask=m, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * cols + c, mask=m, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + c, mask=m, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_ptr + row)
    normed = x * rstd
    mean = tl.sum(dy * w * normed, axis=0) / cols
    tl.store(dx_ptr + row * cols + c, ((dy * w - normed * mean) * rstd).to(dx_ptr.dtype.element_ty), mask=m)
    tl.atomic_add(dw_ptr + c, dy * normed, mask=m)


def climb(attempt: Callable[[str, Callable[[], Any]], Any]) -> Iterator[dict[str, Any]]:
    """Every step's seconds and bytes a second, counting each tensor once."""
    course = Course(torch.device("cuda"), rounds=30)
    x = torch.randn(ROWS, COLS, device="cuda", dtype=torch.float32).bfloat16()
    w = (1 + 0.3 * torch.randn(COLS, device="cuda")).bfloat16()
    dy = torch.randn(ROWS, COLS, device="cuda", dtype=torch.float32).bfloat16()
    num_bytes = 3 * x.nbytes + 2 * w.nbytes
    for name, run in steps(x, w, dy):
        seconds = attempt(name, lambda run=run: statistics.median(course.turns({"x": run})["x"]))
        if seconds:
            yield {"step": name, "s": seconds, "tb_s": num_bytes / seconds / 1e12}


def steps(x: Tensor, w: Tensor, dy: Tensor) -> Iterator[tuple[str, Callable[[], Any]]]:
    def composed(x: Tensor, w: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * w.float()).to(x.dtype)

    def gradient(call: Callable[..., Tensor]) -> Callable[[], Any]:
        leaves = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
        y = call(*leaves)
        return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)

    yield "PyTorch, written out", gradient(composed)
    yield "F.rms_norm", gradient(lambda x, w: F.rms_norm(x, (COLS,), w, 1e-6))
    rstd = torch.rsqrt(x.float().square().mean(-1) + 1e-6)
    dx, dw = torch.empty_like(x), torch.zeros(COLS, device="cuda", dtype=torch.float32)
    yield "one program a row, atomics", lambda: (
        dw.zero_(), one_row_each[(ROWS,)](dy, x, w, rstd, dx, dw, COLS, BLOCK=COLS, num_warps=8),
    )  # fmt: skip
    ladder = (
        ("persistent, one program an SM", Backward(1, COLS, 8, 1, 1, True)),
        ("two programs an SM", Backward(1, COLS, 8, 1, 2, True)),
        ("next row on its way", Backward(1, COLS, 8, 2, 2, True)),
        ("next two rows on their way", Backward(1, COLS, 8, 3, 2, True)),
    )
    for name, config in ladder:
        with tuning.forced("rms_norm.backward", config):
            run = gradient(lambda x, w: rk.rms_norm(x, w, 1e-6))
            run()
            yield name, run
