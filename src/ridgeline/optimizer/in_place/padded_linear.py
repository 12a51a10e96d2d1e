"""Linear layers with odd sizes, padded to whole tiles: a vocabulary of 50,257 costs a GEMM half of its speed or more.

16-bit rows that do not start at multiples of 16 bytes prevent wide accesses, and cuBLAS falls back to slow kernels in
the forward and in both GEMMs of the backward. Copies into padded memory cost one pass each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.engine.autocast import computed_in
from ridgeline.engine.autotune import Contest
from ridgeline.kernels import drop_padding

ALIGNED = 8
"""16-bit elements in 16 bytes, the widest access."""
WHOLE = 64
LEAST_ROWS, LEAST_WEIGHTS = 128, 1 << 22
"""Below these sizes copies cost what the GEMM gains: 1,024 outputs of 479 inputs take 0.90 ms padded and 0.45 plain,
50,257 of 1,024 take 2.9 and 10.4 (8,192 and 4,096 rows, forward and backward, H200)."""
NARROW = (torch.bfloat16, torch.float16)
CONTEST = Contest()
_active_modes = torch._C._len_torch_dispatch_stack


def is_odd(module: nn.Module, cast: bool = False) -> bool:
    """Whether a module is a large linear layer of an unaligned size.

    ``cast`` includes float32 weights, which autocast may convert at run time.
    """
    narrow = (*NARROW, torch.float32) if cast else NARROW
    if type(module) is not nn.Linear or computed_in(module.weight) not in narrow:
        return False
    return is_odd_size(*module.weight.shape)


def is_odd_size(outputs: int, inputs: int) -> bool:
    """Whether a weight is large and has an unaligned size."""
    return bool(outputs % ALIGNED or inputs % ALIGNED) and outputs * inputs >= LEAST_WEIGHTS


def padded_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` through padded memory; the result has the layout of ``F.linear``'s."""
    result: Tensor = _Padded.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return result


def forward_of(original: Callable[..., Any], devices: frozenset[str]) -> Callable[..., Any]:
    """The forward of a linear layer that pads where that pays."""

    def forward(self: Any, input: Tensor) -> Tensor:
        weight, bias, dtype = self.weight, self.bias, computed_in(self.weight)
        fits = input.device.type in devices and dtype in NARROW and computed_in(input) == dtype and input.numel() >= (
            LEAST_ROWS * weight.shape[1]
        )  # fmt: skip
        if not fits:
            found: Tensor = original(self, input)
            return found
        return padded_linear(input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    return forward


class _Padded(torch.autograd.Function):
    """Saves what ``F.linear`` saves: weights are padded again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.shifted = bias is not None
        return product_of(x.reshape(-1, weight.shape[1]), weight, bias).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        outputs, inputs = weight.shape
        wide = F.pad(grad.reshape(-1, outputs), (0, _lack(outputs)))
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = (wide @ _wide(weight))[:, :inputs].contiguous().view(x.shape)
        if ctx.needs_input_grad[1]:
            of_weight = (wide.t() @ _rows(x))[:outputs, :inputs].contiguous()
        if ctx.shifted and ctx.needs_input_grad[2]:
            of_bias = wide.sum(0)[:outputs]
        return of_x, of_weight, of_bias


def product_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The GEMM by the fastest way for its sizes, or by the first way where timing is not allowed.

    During a capture it is one op: otherwise GPT-2's captures kept padding whichever way had won.
    """
    ways = {"padded": partial(_padded, x, weight, bias), "plain": partial(F.linear, x, weight, bias)}
    if not weight.shape[1] % ALIGNED and weight.shape[0] > WHOLE:
        ways["parts, copied"] = partial(_parts, x, weight, bias, Tensor.contiguous)
        if x.is_cuda and x.dtype in NARROW:
            ways["parts, without_padding"] = partial(_parts, x, weight, bias, drop_padding)
    if torch.compiler.is_compiling():
        return ways["padded"]()
    if _active_modes() or type(x) not in (Tensor, nn.Parameter):  # one op for dispatch modes; inside, the fastest way
        return torch.ops.ridgeline_optimizer.odd_product(x, weight, bias)
    key = (x.shape, x.stride(), x.dtype, weight.shape, weight.stride(), bias is None, x.device)
    return CONTEST.run(key, ways, x.device)


_op = torch.library.custom_op("ridgeline_optimizer::odd_product", product_of, mutates_args=())


@_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _padded(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    outputs = weight.shape[0]
    shift = None if bias is None else F.pad(bias, (0, _lack(outputs)))
    return F.linear(_rows(x), _wide(weight), shift)[:, :outputs].contiguous()


def _parts(x: Tensor, weight: Tensor, bias: Tensor | None, without_padding: Callable[[Tensor], Tensor]) -> Tensor:
    """Two GEMMs, over whole tiles of columns and over the rest, into rows padded to whole tiles; weights stay unpadded.

    cuBLAS is slow with an odd number of columns, wherever they are written: GPT-2's last GEMM (50,257 words and 4,096
    tokens, H200) takes 4.40 ms plain, 4.39 into padded rows and 0.57 with 50,304 columns; padding the weight takes
    116 µs, PyTorch's copy of odd rows 470 (412 MB).
    """
    outputs = weight.shape[0]
    whole = outputs - outputs % WHOLE
    room = x.new_empty(x.shape[0], outputs + _lack(outputs))
    for some in (slice(0, whole), slice(whole, outputs)):
        if bias is None:
            torch.mm(x, weight[some].t(), out=room[:, some])
        else:
            torch.addmm(bias[some], x, weight[some].t(), out=room[:, some])
    return without_padding(room[:, :outputs])


def _lack(size: int) -> int:
    """Elements to the next whole tile; 0 if rows are aligned."""
    return -size % WHOLE if size % ALIGNED else 0


def _rows(x: Tensor) -> Tensor:
    return F.pad(x.reshape(-1, x.shape[-1]), (0, _lack(x.shape[-1])))


def _wide(weight: Tensor) -> Tensor:
    return F.pad(weight, (0, _lack(weight.shape[1]), 0, _lack(weight.shape[0])))
