"""``sequence_convolution``: ``F.conv1d`` in groups, of 16-bit sequences whose channels lie last."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels import tuning
from ridgeline.kernels.contract import Case, Trial, case, declare
from ridgeline.kernels.grouped_conv1d import config, kernel, reference
from ridgeline.kernels.launcher import Kernel, Plans, launchable
from ridgeline.kernels.rows import cdiv, power_of_two

_FORWARD = Kernel(kernel.sequence_forward, vectors=("size_in", "size_out"), loose=("bias_ptr",))
_plans = Plans()
NARROW = (torch.bfloat16, torch.float16)
VECTOR, MOST_OF_GROUP = 8, 128


def sequence_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, groups: int) -> Tensor:
    """``F.conv1d(x, weight, bias, padding=padding, groups=groups)`` without gradients.

    x is [batch, channels, steps] with channels next to each other, and so is the result.
    """
    return SEQUENCE_CONVOLUTION(x, weight, bias, padding, groups)


def _forward(x: Tensor, w: Tensor, bias: Tensor | None, padding: int, groups: int) -> Tensor:
    if not launchable(x):
        return SEQUENCE_CONVOLUTION.on_host(x, w, bias, padding, groups)
    batch, _, length = x.shape
    outputs, size_in, taps = w.shape
    out_length = length + 2 * padding - taps + 1
    numbers = (length, out_length, groups, size_in, outputs // groups, taps, padding)
    kind = None if bias is None else (bias.dtype, bias.shape, bias.stride())
    key = (*numbers, x.shape, x.stride(), x.dtype, w.shape, w.dtype, kind, x.get_device(), x.data_ptr() & 15)
    run = _plans.get(key)
    if run is None:
        SEQUENCE_CONVOLUTION.check(x, w, bias, padding, groups)
        run = _plans[key] = _plan(x, bias, batch, numbers)
    out = x.new_empty((batch, out_length, outputs))
    by_tap = w.view(groups, -1, size_in, taps).permute(0, 3, 2, 1).contiguous()
    run(x, by_tap, out if bias is None else bias, out, *numbers)
    return out.transpose(1, 2)


def _plan(x: Tensor, bias: Tensor | None, batch: int, numbers: tuple[int, ...]) -> Any:
    _, out_length, groups, size_in, size_out, _, _ = numbers
    wide_in, wide_out = (max(16, power_of_two(size)) for size in (size_in, size_out))
    sizes = {"steps": out_length, "inputs": size_in, "outputs": size_out}
    chosen = tuning.choose("sequence_convolution", sizes, config.default(out_length, wide_in, wide_out))
    return _FORWARD.bind(
        (x, x, x if bias is None else bias, x, *numbers),
        grid=(cdiv(out_length, chosen.rows), batch * groups),
        constants={"BM": chosen.rows, "BN": wide_out, "BK": wide_in, "BIAS": bias is not None},
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        device=x.get_device(),
        vector=VECTOR,
    )  # fmt: skip


def _support(x: Tensor, w: Tensor, bias: Tensor | None, padding: int, groups: int) -> str | None:
    if x.dtype not in NARROW or w.dtype != x.dtype or (bias is not None and not bias.is_floating_point()):
        return "sequence and weight are not of one 16-bit type"
    if x.dim() != 3 or w.dim() != 3 or groups < 1 or x.shape[1] != groups * w.shape[1] or w.shape[0] % groups:
        return f"{tuple(x.shape)} by {tuple(w.shape)} in {groups} groups"
    sizes = w.shape[1], w.shape[0] // groups
    if any(size % VECTOR or size > MOST_OF_GROUP for size in sizes):
        return f"groups of {sizes} channels: multiples of {VECTOR}, {MOST_OF_GROUP} at most"
    results = x.shape[0] * (x.shape[2] + 2 * padding + 128) * w.shape[0]
    if x.numel() == 0 or x.shape[2] + 2 * padding < w.shape[2] or max(x.numel(), w.numel(), results) >= 2**31:
        return "no steps, or 2³¹ elements"
    if x.stride() != (x.shape[1] * x.shape[2], 1, x.shape[1]):
        return "channels do not lie last"
    if bias is not None and (bias.shape != w.shape[:1] or bias.stride(0) != 1):
        return "the bias is one dense number an output"
    return "the sequence does not begin at 16 bytes" if _is_real(x) and x.data_ptr() % 16 else None


def _is_real(x: Tensor) -> bool:
    return type(x) is Tensor and not x.is_meta


def _cost(inputs: tuple[Any, ...], outputs: tuple[Any, ...], **kwargs: Any) -> dict[str, Any]:
    """Every tensor moved once."""
    flops = 2.0 * outputs[0].numel * inputs[1].shape[1] * inputs[1].shape[2]
    return {"flops": flops, "matrix_flops": flops}


def _fake(x: Tensor, w: Tensor, bias: Tensor | None, padding: int, groups: int) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[2] + 2 * padding - w.shape[2] + 1, w.shape[0])).transpose(1, 2)


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    dtype = getattr(torch, of.dtype)
    size_in, size_out, taps, groups = of["size_in"], of["size_out"], of["taps"], of["groups"]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=on, dtype=torch.float32, generator=generator)

    x = draw(of["b"], of["t"], groups * size_in).to(dtype).transpose(1, 2)
    weight = (draw(groups * size_out, size_in, taps) * (size_in * taps) ** -0.5).to(dtype)
    return x, weight, draw(groups * size_out).to(dtype), of["padding"], groups


SMALL = (
    case("float16", b=2, t=13, groups=2, size_in=8, size_out=16, taps=4, padding=2),
    case("float16", b=1, t=20, groups=3, size_in=16, size_out=8, taps=3, padding=0),
)
CHECKS = (
    *SMALL,
    case("bfloat16", b=2, t=499, groups=16, size_in=64, size_out=64, taps=128, padding=64),
    case("bfloat16", b=3, t=200, groups=4, size_in=48, size_out=48, taps=19, padding=9),
    case("float16", b=1, t=70, groups=2, size_in=128, size_out=96, taps=31, padding=15),
)
RACES = (case("bfloat16", b=4, t=499, groups=16, size_in=64, size_out=64, taps=128, padding=64),)

SEQUENCE_CONVOLUTION = declare(
    name="sequence_convolution",
    summary="conv1d in groups of 16-bit sequences whose channels lie last",
    schema="(Tensor x, Tensor w, Tensor? bias, int padding, int groups) -> Tensor",
    forward=_forward,
    infer=_forward,
    fake=_fake,
    reference=reference.forward,
    support=_support,
    cost=_cost,
    trial=Trial(
        make=_make,
        call=sequence_convolution,
        eager=reference.forward,
        reference=reference.forward,
        mistakes={"taps turned": reference.turned, "bias lost": reference.biasless},
        checks=CHECKS,
        races=RACES,
        phases=("fwd",),
        constants=(0, 1, 2),
        layouts=False,
    ),
)
