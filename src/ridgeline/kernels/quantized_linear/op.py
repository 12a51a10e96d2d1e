"""Products of a few rows with a large weight of eight or four bits: ``linear`` that reads a half or a quarter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import KernelError
from ridgeline.kernels import tuning
from ridgeline.kernels.contract import Case, Trial, case, declare
from ridgeline.kernels.launcher import INTERPRETING, Kernel, Plans, launchable, num_sms
from ridgeline.kernels.linear.op import ACTIVATIONS, FewRowsPlan, epilogue_reason
from ridgeline.kernels.quantized_linear import config, kernel, reference

_VECTORS = ("k", "n", "x_stride", "w_stride", "residual_stride", "share")
_LOOSE = ("bias_ptr", "residual_ptr", "out_ptr", "scale_ptr")
_ROW = Kernel(kernel.narrow_row, vectors=_VECTORS, loose=_LOOSE)
_TILE = Kernel(kernel.narrow_tile, vectors=_VECTORS, loose=(*_LOOSE, "squares_ptr"))
_plans = Plans()


def quantized_linear(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    activation: str = "none",
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """``linear`` for at most 16 rows with a weight that ``narrow`` made, without gradients.

    The rest is as in ``linear``: RMSNorm of the rows before, activation, gate and residual after the product.
    """
    if activation not in ACTIVATIONS:
        raise KernelError(f"quantized_linear: activation is one of {', '.join(ACTIVATIONS)}, not {activation!r}")
    return QUANTIZED_LINEAR(input, weight, scale, bias, norm_weight, residual, eps, offset, activation, gated)


def quantize_weight(weight: Tensor, bits: int = 8) -> tuple[Tensor, Tensor]:
    """A weight [N, K] as ``quantized_linear`` takes it: signed bytes with a scale an output, or four bits with a scale
    for every 128 of an output (K is then a multiple of 128).
    """  # fmt: skip
    if bits not in (4, 8) or weight.dim() != 2 or not weight.is_floating_point():
        raise KernelError(f"narrow: a floating-point matrix in 8 or 4 bits, not {tuple(weight.shape)} in {bits}")
    if bits == 4 and weight.shape[1] % config.GROUP:
        raise KernelError(f"narrow: four bits take rows of a multiple of {config.GROUP}, not {weight.shape[1]}")
    return reference.narrowed(weight, bits)


def _forward(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    residual: Tensor | None,
    eps: float,
    offset: float,
    activation: str,
    gated: bool,
) -> Tensor:
    given = (x, weight, scale, bias, norm_weight, residual, eps, offset, activation, gated)
    if not launchable(x):
        return QUANTIZED_LINEAR.on_host(*given)  # type: ignore[return-value]
    key = (
        x.shape, x.stride(), x.dtype, weight.shape, weight.stride(), weight.dtype, bias is None, norm_weight is None,
        None if residual is None else residual.stride(), activation, gated, x.get_device(),
        (x.data_ptr() | weight.data_ptr() | (0 if norm_weight is None else norm_weight.data_ptr())) & 15,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        QUANTIZED_LINEAR.check(*given)
        plan = _plans[key] = _Plan(*given)
    return plan.run((weight, scale), x, bias, norm_weight, residual, eps, offset)


class _Plan(FewRowsPlan):
    """Launches for one set of shapes and layouts."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        residual: Tensor | None,
        eps: float,
        offset: float,
        activation: str,
        gated: bool,
    ) -> None:
        self.k, self.four = x.shape[-1], weight.dtype == torch.uint8
        self.n = weight.shape[0] // 2 if gated else weight.shape[0]
        self.rows = x.shape[:-1].numel()
        self.shape = (*x.shape[:-1], self.n)
        self.device, self.gated, self.has_norm = x.get_device(), gated, norm_weight is not None
        sizes: dict[str, Any] = {
            "rows": self.rows, "k": self.k, "n": self.n, "bits": 4 if self.four else 8, "gated": gated,
        }  # fmt: skip
        self.chosen = tuning.choose("quantized_linear", sizes, config.choose(**sizes, num_sms=num_sms(self.device)))
        self.flags = {
            "BIAS": bias is not None, "RESIDUAL": residual is not None, "GATED": gated,
            "ACT": ACTIVATIONS[activation],
        }  # fmt: skip
        self.itemsize = 1
        if self.rows and self.n:
            given = ((weight, scale), x, bias, norm_weight, residual, eps, offset)
            if self.chosen.kernel == "row":
                self.runs = self._bind_row(_ROW, {}, *given)
            else:
                self.runs = self._bind_tile(_TILE, {"FOUR": self.four, "PERMUTED": not INTERPRETING}, *given)


def _fake(x: Tensor, weight: Tensor, scale: Tensor, *rest: Any) -> Tensor:
    n = weight.shape[0] // 2 if rest[-1] else weight.shape[0]
    return x.new_empty((*x.shape[:-1], n))


def _support(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    activation: str = "none",
    gated: bool = False,
) -> str | None:
    if x.dim() < 1 or weight.dim() != 2 or weight.dtype not in (torch.int8, torch.uint8):
        return "input is [..., K], weight int8 [N, K] or uint8 [N, K / 2]"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"input is {x.dtype}; narrow weights are widened to bfloat16 or float16"
    k = weight.shape[1] * (2 if weight.dtype == torch.uint8 else 1)
    if x.shape[-1] != k or k == 0 or not weight.is_contiguous():
        return (
            f"input {tuple(x.shape)} and weight {tuple(weight.shape)} do not multiply, or are not dense"
        )
    if weight.dtype == torch.uint8 and k % config.GROUP:
        return f"four bits take rows of a multiple of {config.GROUP}, not {k}"
    if x.shape[:-1].numel() > config.MAX_ROWS:
        return f"input has {x.shape[:-1].numel()} rows; these kernels are for at most {config.MAX_ROWS}"
    if gated and weight.shape[0] % 2:
        return f"a gated weight has an even number of rows, not {weight.shape[0]}"
    return _scale_reason(weight, scale, k) or epilogue_reason(
        x, weight, bias, norm_weight, residual, activation, gated
    )


def _scale_reason(weight: Tensor, scale: Tensor, k: int) -> str | None:
    four = weight.dtype == torch.uint8
    shape = (weight.shape[0], k // config.GROUP) if four else (weight.shape[0],)
    kind = torch.float16 if four else torch.float32
    if tuple(scale.shape) != shape or scale.dtype != kind or not scale.is_contiguous():
        return f"scale is {scale.dtype} {tuple(scale.shape)}, not a dense {kind} {shape}"
    return None


def _cost(inputs: tuple[Any, ...], outputs: tuple[Any, ...], **kwargs: Any) -> dict[str, float]:
    """Every tensor once; two operations a weight and row."""
    x, weight = inputs[:2]
    k = x.shape[-1]
    flops = 2.0 * k * weight.shape[0] * (x.numel // max(1, k))
    return {"flops": flops, "matrix_flops": flops}


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    kind = getattr(torch, of.dtype)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, device=on, dtype=torch.float32, generator=generator)).to(kind)

    rows, k, n, bits = of["rows"], of["k"], of["n"], of["bits"]
    wide_n = 2 * n if of.get("gated") else n
    parts = of.get("parts", "")
    if on.type == "meta":
        weight = torch.empty((wide_n, k if bits == 8 else k // 2), device=on,
                             dtype=torch.int8 if bits == 8 else torch.uint8)  # fmt: skip
        scale = torch.empty((wide_n,) if bits == 8 else (wide_n, k // config.GROUP), device=on,
                            dtype=torch.float32 if bits == 8 else torch.float16)  # fmt: skip
    else:
        weight, scale = quantize_weight(draw(wide_n, k, scale=k**-0.5), bits)
    return (
        draw(rows, k), weight, scale, draw(wide_n) if "b" in parts else None, draw(k) if "n" in parts else None,
        draw(rows, n) if "r" in parts else None,
    )  # fmt: skip


def _plain(x: Tensor, weight: Tensor, scale: Tensor, bias: Any, norm: Any, residual: Any) -> Tensor:
    return quantized_linear(x, weight, scale, bias, norm_weight=norm, residual=residual)


def _gated(x: Tensor, weight: Tensor, scale: Tensor, bias: Any, norm: Any, residual: Any) -> Tensor:
    return quantized_linear(
        x, weight, scale, bias, norm_weight=norm, residual=residual, activation="silu", gated=True
    )  # fmt: skip


def _checks(gated: bool) -> tuple[Case, ...]:
    return tuple(
        case(dtype, rows=rows, k=k, n=n, parts=parts, gated=gated, bits=bits)
        for dtype in ("bfloat16", "float16")
        for rows, k, n, parts, bits in (
            (1, 64, 3, "b", 8), (1, 4096, 1000, "nr", 8), (2, 1000, 77, "bnr", 8), (16, 2048, 512, "bnr", 8),
            (5, 513, 64, "b", 8), (1, 14336, 512, "r", 8), (1, 128, 3, "b", 4), (1, 4096, 1000, "nr", 4),
            (3, 768, 130, "n", 4), (16, 2048, 512, "bnr", 4), (8, 14336, 256, "", 4), (1, 14336, 512, "r", 4),
        )
    )  # fmt: skip


def _races(gated: bool, shapes: tuple[tuple[int, int], ...], parts: str) -> tuple[Case, ...]:
    return tuple(
        case("bfloat16", rows=rows, k=k, n=n, parts=parts, gated=gated, bits=bits)
        for k, n in shapes
        for rows in (1, 4, 16)
        for bits in (8, 4)
    )


def _trial(call: Any, eager: Any, meant: Any, mistakes: dict[str, Any], gated: bool, races: tuple[Case, ...]) -> Trial:
    return Trial(
        make=_make, call=call, eager=eager, reference=meant, mistakes=mistakes, checks=_checks(gated), races=races,
        phases=("fwd",), constants=(0, 1, 2, 3, 4, 5), layouts=False,
    )  # fmt: skip


QUANTIZED_LINEAR = declare(
    name="quantized_linear",
    summary="at most 16 rows times a large weight of eight or four bits, RMSNorm before and gate and residual after it",
    schema="(Tensor x, Tensor weight, Tensor scale, Tensor? bias, Tensor? norm_weight, Tensor? residual, float eps,"
    " float offset, str activation, bool gated) -> Tensor",
    forward=_forward,
    infer=_forward,
    fake=_fake,
    reference=reference.forward,
    support=_support,
    cost=_cost,
    trials={
        "quantized_linear": _trial(
            _plain, reference.eager, reference.plain,
            {"neighbor's scale": reference.scales_moved, "halves of bytes swapped": reference.halves_swapped}, False,
            _races(False, ((4096, 6144), (4096, 4096), (14336, 4096), (4096, 128256)), ""),
        ),
        "quantized_linear_gated": _trial(
            _gated, reference.eager_gated, reference.gated, {"swapped": reference.gate_and_up_swapped}, True,
            _races(True, ((4096, 14336),), "n"),
        ),
    },
)  # fmt: skip
