"""Products of a few rows with a large weight: ``F.linear`` with RMSNorm before it, and gate and residual after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import KernelError
from ridgeline.kernels import tuning
from ridgeline.kernels.contract import DTYPES, Case, Trial, case, declare
from ridgeline.kernels.launcher import Kernel, Plans, launchable, num_sms, overlapping, vector_of
from ridgeline.kernels.linear import config, kernel, reference
from ridgeline.kernels.rows import as_rows, cdiv, float_reason, power_of_two

_VECTORS = ("k", "n", "x_stride", "w_stride", "residual_stride", "share")
_ROW = Kernel(kernel.linear_row, vectors=_VECTORS, loose=("bias_ptr", "residual_ptr", "out_ptr"))
_TILE = Kernel(kernel.linear_tile, vectors=_VECTORS, loose=("bias_ptr", "residual_ptr", "out_ptr", "squares_ptr"))
_JOIN = Kernel(kernel.linear_join, loose=("bias_ptr", "residual_ptr", "out_ptr", "squares_ptr"))
_plans = Plans()
ACTIVATIONS = {"none": 0, "silu": 1, "gelu_tanh": 2, "gelu": 3, "relu": 4}
EARLY = 1
"""When a kernel that may start early lets its own successor start: 1 at once, 2 when its weights are in."""


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    activation: str = "none",
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """``F.linear`` for at most 16 rows, without gradients.

    With ``norm_weight`` the rows are RMS-normalized first, by ``norm_weight + offset``. ``activation`` is applied to
    the product; with ``gated`` the weight is two of the same shape, one above the other, and the result is
    ``activation(input @ gate.T) * (input @ up.T)``. ``residual`` is added last.
    """
    if activation not in ACTIVATIONS:
        raise KernelError(f"linear: activation is one of {', '.join(ACTIVATIONS)}, not {activation!r}")
    return LINEAR(input, weight, bias, norm_weight, residual, eps, offset, activation, gated)


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    residual: Tensor | None,
    eps: float,
    offset: float,
    activation: str,
    gated: bool,
) -> Tensor:
    if not launchable(x):
        return LINEAR.on_host(x, weight, bias, norm_weight, residual, eps, offset, activation, gated)  # type: ignore[return-value]
    key = (
        x.shape, x.stride(), x.dtype, weight.shape, weight.stride(), bias is None, norm_weight is None,
        None if residual is None else residual.stride(), activation, gated, x.get_device(), overlapping(),
        (x.data_ptr() | weight.data_ptr() | (0 if norm_weight is None else norm_weight.data_ptr())) & 15,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        LINEAR.check(x, weight, bias, norm_weight, residual, eps, offset, activation, gated)
        plan = _plans[key] = _Plan(x, weight, bias, norm_weight, residual, eps, offset, activation, gated)
    return plan.run((weight,), x, bias, norm_weight, residual, eps, offset)


class FewRowsPlan:
    """What the plans of ``linear`` and ``quantized_linear`` share: layouts, the split over K, and the launches.

    ``runs`` are the bound kernels: a row kernel, a tile kernel, or a tile kernel with partial sums and ``linear_join``.
    """

    k: int
    n: int
    rows: int
    shape: tuple[int, ...]
    device: int
    gated: bool
    has_norm: bool
    chosen: config.Linear
    flags: dict[str, Any]
    itemsize: int  # of the weight
    shares = 1
    early = False
    runs: tuple[Any, ...] | None = None
    row_args: tuple[int, ...]
    join_args: tuple[int, ...]

    def _laid_out(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, int, Tensor | None, int]:
        flat, stride = as_rows(x)
        if residual is None:
            return flat, stride, None, self.n
        return flat, stride, *as_rows(residual)

    def _common(self, x: Tensor, weight: Tensor, norm_weight: Tensor | None, stride: int) -> dict[str, Any]:
        pointers = x.data_ptr() | weight.data_ptr() | (0 if norm_weight is None else norm_weight.data_ptr())
        # A stride that is only taken by one row may be anything.
        wide = (self.k, weight.stride(0), self.n, stride if self.rows > 1 else 0)
        return {
            "num_warps": self.chosen.num_warps, "num_stages": self.chosen.num_stages, "device": self.device,
            "vector": vector_of(self.itemsize, pointers, *wide),
        }  # fmt: skip

    def _bind_row(
        self, row: Kernel, constants: dict[str, Any], weights: tuple[Tensor, ...], x: Tensor, bias: Tensor | None,
        norm_weight: Tensor | None, residual: Tensor | None, eps: float, offset: float,
    ) -> tuple[Any, ...]:  # fmt: skip
        x, stride, residual, residual_stride = self._laid_out(x, residual)
        self.row_args = (self.k, self.n, stride, weights[0].stride(0), residual_stride)
        given = (x, *weights, *filled(x, bias, norm_weight, residual), x, *self.row_args, eps, offset)
        constants = {
            "M": self.rows, "BN": self.chosen.outputs, "BK": self.chosen.step,
            "V": min(16 // self.itemsize, self.chosen.step), "EVEN": self.k % self.chosen.step == 0,
            "NORM": self.has_norm, **self.flags, **constants,
        }  # fmt: skip
        grid = (cdiv(self.n, self.chosen.outputs),)
        return (row.bind(given, grid=grid, constants=constants, **self._common(x, weights[0], norm_weight, stride)),)

    def _bind_tile(
        self, tile: Kernel, constants: dict[str, Any], weights: tuple[Tensor, ...], x: Tensor, bias: Tensor | None,
        norm_weight: Tensor | None, residual: Tensor | None, eps: float, offset: float,
    ) -> tuple[Any, ...]:  # fmt: skip
        x, stride, residual, residual_stride = self._laid_out(x, residual)
        share = config.share_of(self.k, self.chosen)
        self.shares = cdiv(self.k, share)
        self.row_args = (self.rows, self.k, self.n, stride, weights[0].stride(0), residual_stride, share)
        out, squares = self._partial(x) if self.shares > 1 else (x, torch.empty(1, device=x.device))
        first_scaled = self.has_norm and x.dtype == torch.float16
        given = (x, *weights, *filled(x, bias, norm_weight, residual), out, squares, *self.row_args, eps, offset)
        constants = {
            "MP": max(16, power_of_two(self.rows)), "BN": self.chosen.outputs, "BK": self.chosen.step,
            "EVEN": self.k % self.chosen.step == 0, "NORM": self.has_norm, **self.flags, **constants,
            "WHOLE": self.shares == 1, "FIRST_SCALED": first_scaled,
        }  # fmt: skip
        common = self._common(x, weights[0], norm_weight, stride)
        bound = tile.bind(given, grid=(cdiv(self.n, self.chosen.outputs), self.shares), constants=constants, **common)
        if self.shares == 1:
            return (bound,)
        self.join_args = (self.shares, self.rows, self.k, self.n, residual_stride)
        join = _JOIN.bind(
            (out, squares, *filled(x, bias, residual), x, *self.join_args, eps),
            grid=(cdiv(self.n, 256), self.rows),
            constants={"BN": 256, "SCALED": self.has_norm and not first_scaled, **self.flags, "DEPENDENT": self.early},
            num_warps=2,
            device=self.device,
            vector=common["vector"],
        )
        return bound, join

    def _partial(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = self.n * (2 if self.gated else 1)
        part = torch.empty((self.shares, self.rows, wide), dtype=torch.float32, device=x.device)
        return part, torch.empty((self.shares, self.rows), dtype=torch.float32, device=x.device)

    def run(
        self, weights: tuple[Tensor, ...], x: Tensor, bias: Tensor | None, norm_weight: Tensor | None,
        residual: Tensor | None, eps: float, offset: float,
    ) -> Tensor:  # fmt: skip
        out = torch.empty(self.shape, dtype=x.dtype, device=x.device)
        if self.runs is None:
            return out
        x = x if x.is_contiguous() else as_rows(x)[0]
        residual = residual if residual is None or residual.is_contiguous() else as_rows(residual)[0]
        present = filled(x, bias, norm_weight, residual)
        if self.chosen.kernel == "row":
            self.runs[0](x, *weights, *present, out, *self.row_args, eps, offset)
        elif self.shares == 1:
            self.runs[0](x, *weights, *present, out, out, *self.row_args, eps, offset)
        else:
            part, squares = self._partial(x)
            self.runs[0](x, *weights, *present, part, squares, *self.row_args, eps, offset)
            self.runs[1](part, squares, *filled(x, bias, residual), out, *self.join_args, eps)
        return out


class _Plan(FewRowsPlan):
    """Launches for one set of shapes and layouts."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        residual: Tensor | None,
        eps: float,
        offset: float,
        activation: str,
        gated: bool,
    ) -> None:
        self.k = weight.shape[1]
        self.n = weight.shape[0] // 2 if gated else weight.shape[0]
        self.rows = x.numel() // self.k if self.k else x.shape[:-1].numel()
        self.shape = (*x.shape[:-1], self.n)
        self.device = x.get_device()
        self.gated, self.has_norm, self.itemsize = gated, norm_weight is not None, x.element_size()
        self.early = overlapping() and weight.nbytes <= config.EARLY_WEIGHT_BYTES and (self.rows == 1 or not gated)
        sizes = {
            "rows": self.rows, "k": self.k, "n": self.n, "itemsize": x.element_size(), "gated": gated,
            "early": self.early,
        }  # fmt: skip
        default = config.choose(**sizes, num_sms=num_sms(self.device), normed=self.has_norm)
        self.chosen = tuning.choose("linear", sizes, default)
        self.flags = {
            "BIAS": bias is not None, "RESIDUAL": residual is not None, "GATED": gated,
            "ACT": ACTIVATIONS[activation],
        }  # fmt: skip
        if self.rows and self.n:
            given = ((weight,), x, bias, norm_weight, residual, eps, offset)
            if self.chosen.kernel == "row":
                self.runs = self._bind_row(_ROW, {"DEPENDENT": EARLY if self.early else 0}, *given)
            else:
                self.runs = self._bind_tile(_TILE, {"DEPENDENT": self.early}, *given)


def filled(stand_in: Tensor, *optional: Tensor | None) -> tuple[Tensor, ...]:
    """Optional tensors, with another in the place of those that are not there: no kernel looks at it."""
    return tuple(stand_in if value is None else value for value in optional)


def _fake(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    n = weight.shape[0] // 2 if rest[-1] else weight.shape[0]
    return x.new_empty((*x.shape[:-1], n))


def _support(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    activation: str = "none",
    gated: bool = False,
) -> str | None:
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        return f"input {tuple(x.shape)} and weight {tuple(weight.shape)} do not multiply: [..., K] and [N, K]"
    rows = x.shape[:-1].numel()
    if rows > config.MAX_ROWS:
        return f"input has {rows} rows; these kernels are for at most {config.MAX_ROWS}, use F.linear"
    if weight.shape[1] == 0 or weight.stride(1) != 1 or weight.stride(0) < weight.shape[1]:
        return "weight's rows must be dense and there must be something to sum"
    if gated and weight.shape[0] % 2:
        return f"a gated weight has an even number of rows, not {weight.shape[0]}"
    if weight.dtype != x.dtype:
        return "input and weight are of different types"
    reason = epilogue_reason(x, weight, bias, norm_weight, residual, activation, gated)
    return float_reason(input=x) if reason is None else reason


def epilogue_reason(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    residual: Tensor | None,
    activation: str,
    gated: bool,
) -> str | None:
    """Why norm, bias, residual or activation are not supported; None if they are."""
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    if any(value.dtype != x.dtype for value in (bias, norm_weight, residual) if value is not None):
        return "input and what is added to the product are of different types"
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_contiguous()):
        return "bias is one dense number an output of the weight"
    if norm_weight is not None and (norm_weight.shape != x.shape[-1:] or not norm_weight.is_contiguous()):
        return "norm_weight is one dense number a column of the input"
    if residual is not None and residual.shape != (*x.shape[:-1], n):
        return f"residual is {tuple(residual.shape)}, the result {(*x.shape[:-1], n)}"
    return None if activation in ACTIVATIONS else f"activation is one of {', '.join(ACTIVATIONS)}"


def _cost(inputs: tuple[Any, ...], outputs: tuple[Any, ...], **kwargs: Any) -> dict[str, float]:
    """Every tensor once; two operations a weight and row."""
    x, weight = inputs[:2]
    flops = 2.0 * weight.numel * (x.numel // max(1, weight.shape[1]))
    return {"flops": flops, "matrix_flops": flops}


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    kind = getattr(torch, of.dtype)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, device=on, dtype=torch.float32, generator=generator)).to(kind)

    rows, k, n = of["rows"], of["k"], of["n"]
    wide = 2 * n if of.get("gated") else n
    parts = of.get("parts", "")
    return (
        draw(rows, k),
        draw(wide, k, scale=k**-0.5),
        draw(wide) if "b" in parts else None,
        draw(k) if "n" in parts else None,
        draw(rows, n) if "r" in parts else None,
    )


def _plain(x: Tensor, weight: Tensor, bias: Any, norm: Any, residual: Any) -> Tensor:
    return linear(x, weight, bias, norm_weight=norm, residual=residual)


def _gated(x: Tensor, weight: Tensor, bias: Any, norm: Any, residual: Any) -> Tensor:
    return linear(x, weight, bias, norm_weight=norm, residual=residual, activation="silu", gated=True)


def _checks(gated: bool) -> tuple[Case, ...]:
    return tuple(
        case(dtype, rows=rows, k=k, n=n, parts=parts, gated=gated)
        for dtype in DTYPES
        for rows, k, n, parts in (
            (1, 1, 1, ""), (1, 64, 3, "b"), (1, 4096, 1000, "nr"), (2, 1000, 77, "bnr"), (3, 768, 130, "n"),
            (5, 513, 64, "b"), (8, 4096, 1024, "r"), (16, 2048, 512, "bnr"), (16, 14336, 256, ""), (1, 14336, 512, "r"),
        )
    )  # fmt: skip


def _races(gated: bool, shapes: tuple[tuple[int, int], ...], parts: str) -> tuple[Case, ...]:
    return tuple(
        case("bfloat16", rows=rows, k=k, n=n, parts=parts, gated=gated) for k, n in shapes for rows in (1, 4, 16)
    )


def _trial(call: Any, eager: Any, meant: Any, mistakes: dict[str, Any], gated: bool, races: tuple[Case, ...]) -> Trial:
    return Trial(
        make=_make, call=call, eager=eager, reference=meant, mistakes=mistakes, checks=_checks(gated), races=races,
        phases=("fwd",), constants=(0, 1, 2, 3, 4), layouts=False,
    )  # fmt: skip


LINEAR = declare(
    name="linear",
    summary="at most 16 rows times a large weight, with RMSNorm before and gate and residual after it",
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor? norm_weight, Tensor? residual, float eps, float offset,"
    " str activation, bool gated) -> Tensor",
    forward=_forward,
    infer=_forward,
    fake=_fake,
    reference=reference.forward,
    support=_support,
    cost=_cost,
    trials={
        "linear": _trial(
            _plain, reference.eager, reference.plain,
            {"end of K lost": reference.last_column_lost, "five percent off": reference.unnormed}, False,
            _races(False, ((4096, 6144), (4096, 4096), (14336, 4096), (4096, 128256)), ""),
        ),
        "linear_gated": _trial(
            _gated, reference.eager_gated, reference.gated, {"swapped": reference.swapped}, True,
            _races(True, ((4096, 14336),), "n"),
        ),
    },
)  # fmt: skip
