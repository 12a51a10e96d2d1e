"""Ops that work element by element, and conversions between element types."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ridgeline.capture.importers.onnx.file import FLOAT4, FLOAT4_VALUES, STRING, torch_type
from ridgeline.capture.importers.onnx.registry import Call, op

WIDE = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
"""Types that PyTorch stores and hardly computes with, and where they are computed."""


def widened(fn: Callable[..., Any], *args: Any) -> Any:
    """The function on types PyTorch computes with; the result in the type that was given."""
    narrow = next((a.dtype for a in args if isinstance(a, torch.Tensor) and a.dtype in WIDE), None)
    if narrow is None:
        return fn(*args)
    out = fn(*[a.to(WIDE[a.dtype]) if isinstance(a, torch.Tensor) and a.dtype in WIDE else a for a in args])
    return out if out.dtype is torch.bool else out.to(narrow)


def _truncated(a: Any, b: Any) -> Any:
    kinds = [x.dtype for x in (a, b) if isinstance(x, torch.Tensor)]
    if any(k.is_floating_point or k.is_complex for k in kinds):
        return (
            torch.div(a, b)
            if isinstance(a, torch.Tensor)
            else torch.mul(torch.reciprocal(b), a)
            if a != 1
            else (torch.reciprocal(b))
        )
    return torch.div(a, b, rounding_mode="trunc")


def _commuted(fn: Any) -> Callable[..., Any]:
    """A function of two whose first must be a tensor."""
    return lambda a, b: fn(a, b) if isinstance(a, torch.Tensor) else fn(b, a)


def _subtracted(a: Any, b: Any) -> Any:
    return torch.sub(a, b) if isinstance(a, torch.Tensor) else torch.rsub(b, a)


_BINARY = {
    "Add": _commuted(torch.add), "Mul": _commuted(torch.mul), "Sub": _subtracted, "Div": _truncated,
    "And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor,
    "BitwiseAnd": torch.bitwise_and, "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor,
}  # fmt: skip
for _name, _fn in _BINARY.items():
    op(_name, scalars=_name in ("Add", "Mul", "Sub", "Div"))(lambda n, a, b, fn=_fn: widened(fn, a, b))


@op("Equal")
def _equal(n: Call, a: Any, b: Any) -> Any:
    if isinstance(a, np.ndarray):
        return torch.from_numpy(np.asarray(a == b, dtype=bool))
    return widened(torch.eq, a, b)


_COMPARED = {"Greater": (torch.gt, torch.lt), "Less": (torch.lt, torch.gt), "GreaterOrEqual": (torch.ge, torch.le),
             "LessOrEqual": (torch.le, torch.ge)}  # fmt: skip
for _name, (_fn, _mirrored) in _COMPARED.items():
    op(_name, scalars=True)(lambda n, a, b, fn=_fn, mirrored=_mirrored:
                            widened(fn, a, b) if isinstance(a, torch.Tensor) else widened(mirrored, b, a))  # fmt: skip


@op("Pow", scalars=True)
def _pow(n: Call, a: Any, b: Any) -> Any:
    if not isinstance(a, torch.Tensor):
        return torch.pow(a, b)
    if isinstance(b, (int, float)):
        return torch.pow(a, int(b) if float(b).is_integer() else b)
    out = torch.pow(a.to(WIDE.get(a.dtype, a.dtype)), b.to(WIDE.get(b.dtype, b.dtype)))
    return out.to(a.dtype)


@op("Mod")
def _mod(n: Call, a: Any, b: Any) -> Any:
    return widened(torch.fmod if n.integer("fmod") else torch.remainder, a, b)


@op("BitShift")
def _shift(n: Call, a: Any, b: Any) -> Any:
    left = n.text("direction") == "LEFT"
    return widened(torch.bitwise_left_shift if left else torch.bitwise_right_shift, a, b)


@op("BitwiseNot")
def _bitwise_not(n: Call, a: Any) -> Any:
    return widened(torch.bitwise_not, a)


for _name, _fn in {"Max": torch.maximum, "Min": torch.minimum, "Sum": torch.add}.items():
    op(_name)(lambda n, *xs, fn=_fn: widened(lambda *ys: reduce(fn, ys), *xs))


@op("Mean")
def _mean(n: Call, *xs: Any) -> Any:
    return reduce(torch.add, xs) / len(xs)


@op("Where")
def _where(n: Call, mask: Any, a: Any, b: Any) -> Any:
    if isinstance(a, np.ndarray):
        return np.where(mask.numpy(), a, b)
    return torch.where(mask, a, b)


_UNARY = {
    "Acos": torch.acos, "Acosh": torch.acosh, "Asin": torch.asin, "Asinh": torch.asinh, "Atan": torch.atan,
    "Atanh": torch.atanh, "Ceil": torch.ceil, "Cos": torch.cos, "Cosh": torch.cosh, "Erf": torch.erf,
    "Exp": torch.exp, "Floor": torch.floor, "IsNaN": torch.isnan, "Log": torch.log, "Neg": torch.neg,
    "Not": torch.logical_not, "Reciprocal": torch.reciprocal, "Round": torch.round, "Sigmoid": torch.sigmoid,
    "Sign": torch.sign, "Sin": torch.sin, "Sinh": torch.sinh, "Sqrt": torch.sqrt, "Tan": torch.tan,
    "Tanh": torch.tanh, "Relu": torch.relu, "Softsign": F.softsign, "HardSwish": F.hardswish, "Mish": F.mish,
    "Softplus": F.softplus,
}  # fmt: skip
for _name, _fn in _UNARY.items():
    op(_name)(lambda n, x, fn=_fn: widened(fn, x) if x.dtype in WIDE else fn(x))


@op("Abs")
def _abs(n: Call, x: Any) -> Any:
    return x if x.dtype in WIDE else torch.abs(x)


@op("IsInf")
def _is_inf(n: Call, x: Any) -> Any:
    x = x.float() if x.dtype.itemsize == 1 else x
    if n.integer("detect_positive", 1) and n.integer("detect_negative", 1):
        return torch.isinf(x)
    if n.integer("detect_positive", 1):
        return torch.isposinf(x)
    return torch.isneginf(x) if n.integer("detect_negative", 1) else torch.zeros_like(x, dtype=torch.bool)


@op("LeakyRelu")
def _leaky_relu(n: Call, x: Any) -> Any:
    return F.leaky_relu(x, n.number("alpha", 0.01))


@op("Elu")
def _elu(n: Call, x: Any) -> Any:
    return F.elu(x, n.number("alpha", 1.0))


@op("Celu")
def _celu(n: Call, x: Any) -> Any:
    return F.celu(x, n.number("alpha", 1.0))


@op("Selu")
def _selu(n: Call, x: Any) -> Any:
    alpha, gamma = n.number("alpha", 1.67326319217681884765625), n.number("gamma", 1.05070102214813232421875)
    if abs(alpha - 1.6732632) < 1e-6 and abs(gamma - 1.0507010) < 1e-6:
        return F.selu(x)
    return gamma * torch.where(x > 0, x, alpha * torch.expm1(x))


@op("Gelu")
def _gelu(n: Call, x: Any) -> Any:
    return F.gelu(x, approximate=n.text("approximate", "none"))


@op("HardSigmoid")
def _hard_sigmoid(n: Call, x: Any) -> Any:
    alpha, beta = n.number("alpha", 0.2), n.number("beta", 0.5)
    if abs(alpha - 1 / 6) < 1e-6 and beta == 0.5:
        return F.hardsigmoid(x)
    return torch.clamp(x * alpha + beta, 0, 1)


@op("Swish")
def _swish(n: Call, x: Any) -> Any:
    alpha = n.number("alpha", 1.0)
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(x * alpha)


@op("PRelu")
def _prelu(n: Call, x: Any, slope: Any) -> Any:
    if (
        x.dtype.is_floating_point
        and x.dim() > 1
        and slope.numel() in (1, x.shape[1])
        and (slope.numel() == 1 or (slope.dim() == x.dim() - 1 and slope.shape[0] == x.shape[1]))
    ):
        return F.prelu(x, slope.reshape(-1))
    return torch.where(x > 0, x, x * slope)


@op("ThresholdedRelu")
def _thresholded(n: Call, x: Any) -> Any:
    return F.threshold(x, n.number("alpha", 1.0), 0.0)


@op("Shrink")
def _shrink(n: Call, x: Any) -> Any:
    lambd, bias = n.number("lambd", 0.5), n.number("bias", 0.0)
    wide = x if x.dtype.is_floating_point else x.float()
    out = torch.where(wide < -lambd, wide + bias, torch.where(wide > lambd, wide - bias, torch.zeros_like(wide)))
    return out.to(x.dtype)


@op("Clip", host=(1, 2))
def _clip(n: Call, x: Any, low: Any = None, high: Any = None) -> Any:
    if n.opset < 11:
        lowest, highest = n.get("min"), n.get("max")
    else:
        lowest, highest = (None if t is None else t.reshape(()).item() for t in (low, high))
    if lowest is None and highest is None:
        return x
    if lowest == 0 and highest == 6 and x.dtype.is_floating_point:
        return F.hardtanh(x, 0.0, 6.0)
    if lowest is not None and highest is not None and lowest > highest:
        return torch.full_like(x, highest)
    return widened(lambda t: torch.clamp(t, lowest, highest), x)


# --- conversions ----------------------------------------------------------------------------------------------------

_FLOAT8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0, torch.float8_e5m2: 57344.0,
               torch.float8_e5m2fnuz: 57344.0}  # fmt: skip


def converted(x: Any, element: int, saturate: bool, where: str, mode: str = "up") -> Any:
    """A value in another element type."""
    if isinstance(x, np.ndarray):
        return _from_text(x, element, where)
    if element == STRING:
        return _to_text(x)
    dtype = torch_type(element, where)
    if dtype in _FLOAT8_MAX:
        wide = x.to(torch.float32)
        most = _FLOAT8_MAX[dtype]
        if saturate:
            wide = torch.clamp(wide, -most, most)
        elif dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
            # The next value that would be is where rounding gives up
            gap = most * (1 + 2.0 ** (-4 if dtype is torch.float8_e4m3fnuz else -3) / 2)
            wide = (
                torch.where(wide.abs() >= most * (1 + 1 / 30), torch.full_like(wide, math.nan), wide) if gap else wide
            )
        return wide.to(dtype)
    if dtype is torch.float8_e8m0fnu:
        return _to_e8m0(x.to(torch.float32), saturate, mode)
    if element == FLOAT4:
        return _to_float4(x.to(torch.float32))
    if element in (21, 22, 25, 26):
        bits = 4 if element in (21, 22) else 2
        low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if element in (22, 26) else (0, (1 << bits) - 1)
        if x.dtype.is_floating_point:
            wide = torch.round(x.to(torch.float32)).to(torch.int32)
        else:
            wide = x.to(torch.int32)
        span = high - low + 1
        return (
            ((wide - low) % span + low).to(dtype) if not x.dtype.is_floating_point else wide.clamp(low, high).to(dtype)
        )
    if x.dtype in WIDE and dtype is not x.dtype:
        return x.to(WIDE[x.dtype]).to(dtype) if x.dtype is not torch.uint64 or dtype.is_floating_point else x.to(dtype)
    if dtype in WIDE and x.dtype.is_floating_point:
        return x.to(torch.int64).to(dtype)
    return x.to(dtype) if x.dtype != dtype else x


def _to_e8m0(x: Any, saturate: bool, mode: str) -> Any:
    """Powers of two: the exponent alone, rounded up, down or to the nearest."""
    mantissa, exponent = torch.frexp(x.abs())
    power = exponent - 1
    above = mantissa > 0.5
    if mode == "nearest":
        above = mantissa >= 0.75
    if mode != "down":
        power = power + above.to(power.dtype)
    bits = torch.clamp(power + 127, 0, 254)
    bits = torch.where(torch.isnan(x), torch.full_like(bits, 255), bits)
    bits = torch.where(torch.isinf(x), torch.full_like(bits, 254 if saturate else 255), bits)
    return bits.to(torch.uint8).view(torch.float8_e8m0fnu)


def _to_float4(x: Any) -> Any:
    """The nearest of the eight magnitudes, ties to the even one."""
    size = x.abs()
    edges = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
    at = torch.zeros_like(size)
    for i, edge in enumerate(edges):
        at = at + ((size > edge) if i % 2 == 0 else (size >= edge)).to(at.dtype)
    values = torch.zeros_like(size)
    for i, value in enumerate(FLOAT4_VALUES):
        values = torch.where(at == i, torch.full_like(values, value), values)
    values = torch.where(torch.isnan(x), torch.full_like(values, 6.0), values)
    return torch.copysign(values, x)


def _from_text(x: np.ndarray[Any, Any], element: int, where: str) -> Any:
    if element == STRING:
        return x
    dtype = torch_type(element, where)
    flat = [float(text) if dtype.is_floating_point else int(float(text)) for text in x.reshape(-1)]
    return (
        torch.tensor(flat, dtype=torch.float64 if dtype.is_floating_point else torch.int64).to(dtype).reshape(x.shape)
    )


def _to_text(x: Any) -> Any:
    made = np.empty(x.numel(), dtype=object)
    wide = (
        x.to(torch.float32)
        if x.dtype in (torch.bfloat16,) or (x.dtype.itemsize == 1 and x.dtype.is_floating_point)
        else x
    )
    values = wide.reshape(-1).numpy()
    for i, value in enumerate(values):
        if np.issubdtype(values.dtype, np.floating):
            text = (
                np.format_float_positional(value, unique=True, trim="-")
                if np.isfinite(value)
                else ("NaN" if np.isnan(value) else "INF" if value > 0 else "-INF")
            )
            made[i] = text
        else:
            made[i] = str(value)
    return made.reshape(tuple(x.shape))


@op("Cast")
def _cast(n: Call, x: Any) -> Any:
    return converted(x, n.integer("to"), bool(n.integer("saturate", 1)), n.where, n.text("round_mode", "up"))


_ELEMENT_OF = {torch_type(e, ""): e for e in (1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 24)}


@op("CastLike")
def _cast_like(n: Call, x: Any, like: Any) -> Any:
    element = STRING if isinstance(like, np.ndarray) else _ELEMENT_OF[like.dtype]
    return converted(x, element, bool(n.integer("saturate", 1)), n.where, n.text("round_mode", "up"))


@op("Identity", raw=True)
def _identity(n: Call, env: Any, x: Any) -> Any:
    return (x,)


@op("Optional", raw=True)
def _optional(n: Call, env: Any, x: Any = None) -> Any:
    return (x,)


@op("OptionalHasElement", raw=True)
def _optional_has(n: Call, env: Any, x: Any = None) -> Any:
    from ridgeline.capture.importers.program import Host

    return (Host(torch.tensor(x is not None)),)


@op("OptionalGetElement", raw=True)
def _optional_get(n: Call, env: Any, x: Any = None) -> Any:
    if x is None:
        raise n.wrong("the optional value holds nothing")
    return (x,)
