"""StableHLO's ops as PyTorch calls.

Unsigned integers of 16, 32 and 64 bits, for which PyTorch lacks most operators, are carried as ``int32`` and ``int64``
with their value, and as ``int64`` with their bits. Bodies of reductions, comparators and updates are programs of
scalars: they run on whole tensors at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from ridgeline.capture.importers.program import Context, Host
from ridgeline.errors import ModelFileError

CARRIED = {
    "i1": torch.bool, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
    "ui8": torch.uint8, "ui16": torch.int32, "ui32": torch.int64, "ui64": torch.int64, "f16": torch.float16,
    "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64, "complex<f32>": torch.complex64,
    "complex<f64>": torch.complex128,
}  # fmt: skip
"""The element types of the format and those of PyTorch that carry them."""
MASKS = {"ui16": 0xFFFF, "ui32": 0xFFFFFFFF}
WIDTHS = {"i1": 8, "complex<f32>": 64, "complex<f64>": 128, "bf16": 16}
MAX_RANKED = 4096
"""Elements that are sorted by comparing each with each."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor's sizes, -1 where they are open, and element type; no sizes for what is no tensor."""

    shape: tuple[int, ...] | None
    element: str

    def __str__(self) -> str:
        if self.shape is None:
            return self.element
        return f"{self.element}[{', '.join('?' if d < 0 else str(d) for d in self.shape)}]"

    @property
    def unsigned(self) -> bool:
        return self.element.startswith("ui")

    @property
    def bits(self) -> int:
        return WIDTHS.get(self.element) or int(self.element.lstrip("uif"))


def native(element: str) -> torch.dtype:
    """The element type that a model gives and takes."""
    own = {"ui16": torch.uint16, "ui32": torch.uint32, "ui64": torch.uint64}
    return own.get(element) or CARRIED.get(element) or getattr(torch, element)  # type: ignore[no-any-return]


class Call:
    """One operation being run: its attributes, its types, and what its regions compute."""

    __slots__ = ("args", "ctx", "kind", "node", "out", "region")

    def __init__(self, node: Any, ctx: Context, region: Callable[[int, Sequence[Any]], list[Any]],
                 args: Sequence[Any]) -> None:  # fmt: skip
        self.node, self.ctx, self.region, self.args = node, ctx, region, args
        self.kind: TensorType = node.in_types[0] if node.in_types else node.out_types[0]
        self.out: TensorType = node.out_types[0] if node.out_types else self.kind

    def get(self, name: str, default: Any = None) -> Any:
        return self.node.attrs.get(name, default)

    def known(self, at: int) -> torch.Tensor | None:
        value = self.args[at]
        return value.t if isinstance(value, Host) else None

    def sizes(self, at: int) -> list[int]:
        """The integers of an operand."""
        return [int(v) for v in self.ctx.host(self.args[at], self.node.where).reshape(-1).tolist()]

    def scalar(self, at: int) -> Any:
        """A constant of one repeated element as a number."""
        t = self.known(at)
        if t is None or t.numel() == 0 or not (t.numel() == 1 or not any(t.stride())):
            return None
        return t[(0,) * t.dim()].item()

    def computed(self, at: int, given: Sequence[Any]) -> list[torch.Tensor]:
        return [v.t if isinstance(v, Host) else v for v in self.region(at, given)]

    def wrong(self, why: str) -> ModelFileError:
        return ModelFileError(f"{self.node.where} {why}")


OPS: dict[str, Callable[..., Any]] = {}
CONTROL: dict[str, Callable[..., Sequence[Any]]] = {}


def op(names: str) -> Callable[[Any], Any]:
    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for name in names.split():
            OPS[name if "." in name else f"stablehlo.{name}"] = fn
        return fn

    return register


def left_out(node: Any) -> str:
    """Why a known op is refused."""
    target = node.attrs.get("call_target_name")
    if node.op == "stablehlo.custom_call":
        return f"it calls {str(target)[:80]!r}, code of one backend: export for a platform that spells it out"
    if node.op in ("stablehlo.rng_bit_generator", "stablehlo.rng"):
        return "its random bits are those of one backend: draw them outside and pass them in, or use threefry keys"
    if node.op.split(".")[-1] in ("all_reduce", "all_gather", "all_to_all", "collective_permute", "reduce_scatter"):
        return "it exchanges data between devices: export the function of one device"
    return ""


def wrapped(call: Call, t: torch.Tensor, element: str = "") -> torch.Tensor:
    mask = MASKS.get(element or call.out.element)
    return t & mask if mask else t


def ordered(t: torch.Tensor) -> torch.Tensor:
    """The bits of 64-bit unsigned integers in the order of signed ones."""
    return t ^ torch.iinfo(torch.int64).min


# --- elementwise ----------------------------------------------------------------------------------------------------

_UNARY: dict[str, Callable[..., torch.Tensor]] = {
    "exponential": torch.exp, "exponential_minus_one": torch.expm1, "log": torch.log, "log_plus_one": torch.log1p,
    "logistic": torch.sigmoid, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "sine": torch.sin, "cosine": torch.cos,
    "tan": torch.tan, "tanh": torch.tanh, "floor": torch.floor, "ceil": torch.ceil, "round_nearest_even": torch.round,
    "is_finite": torch.isfinite, "imag": torch.imag, "real": torch.real, "chlo.acos": torch.acos,
    "chlo.acosh": torch.acosh, "chlo.asin": torch.asin, "chlo.asinh": torch.asinh, "chlo.atan": torch.atan,
    "chlo.atanh": torch.atanh, "chlo.cosh": torch.cosh, "chlo.sinh": torch.sinh, "chlo.tan": torch.tan,
    "chlo.erf": torch.erf, "chlo.erfc": torch.erfc, "chlo.erf_inv": torch.erfinv, "chlo.lgamma": torch.lgamma,
    "chlo.digamma": torch.digamma, "chlo.bessel_i1e": torch.special.i1e, "chlo.is_inf": torch.isinf,
    "chlo.square": torch.square, "optimization_barrier": lambda *t: t if len(t) > 1 else t[0],
    "round_nearest_afz": lambda t: torch.sign(t) * torch.floor(torch.abs(t) + 0.5),
    "cbrt": lambda t: torch.sign(t) * torch.abs(t).double().pow(1 / 3).to(t.dtype),
}  # fmt: skip


def _unary(fn: Callable[..., torch.Tensor], wide: bool) -> Callable[..., Any]:
    def run(call: Call, *args: torch.Tensor) -> Any:
        if wide and args[0].dtype in (torch.float16, torch.bfloat16):
            return fn(args[0].float()).to(args[0].dtype)
        return fn(*args)

    return run


for _name, _fn in _UNARY.items():
    op(_name)(_unary(_fn, _name.startswith("chlo.") or _name in ("tan", "cbrt")))


@op("abs negate sign not popcnt count_leading_zeros")
def _integer_unary(call: Call, x: torch.Tensor) -> torch.Tensor:
    name = call.node.op.split(".")[1]
    if name == "abs":
        return torch.abs(x)
    if name == "negate":
        return wrapped(call, torch.neg(x))
    if name == "not":
        return wrapped(call, torch.bitwise_not(x))
    if name == "sign":
        if x.is_complex():
            return torch.sgn(x)
        return torch.where(torch.isnan(x), x, torch.sign(x)) if x.is_floating_point() else torch.sign(x)
    bits = call.kind.bits
    wide = x.to(torch.int64) & (-1 if bits == 64 else (1 << bits) - 1)
    at = torch.arange(bits, device=x.device)
    found = (wide.unsqueeze(-1) >> at) & 1
    if name == "popcnt":
        return found.sum(-1).to(x.dtype)
    return (bits - (found * (at + 1)).amax(-1)).to(x.dtype)


_BINARY: dict[str, tuple[Callable[..., torch.Tensor], bool]] = {
    "add": (torch.add, True), "subtract": (torch.sub, True), "multiply": (torch.mul, True),
    "atan2": (torch.atan2, False), "complex": (torch.complex, False), "chlo.next_after": (torch.nextafter, False),
    "chlo.zeta": (torch.special.zeta, False),
}  # fmt: skip


def _binary(fn: Callable[..., torch.Tensor], scalars: bool) -> Callable[..., Any]:
    def run(call: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype == torch.bool:
            return {torch.add: torch.logical_or, torch.mul: torch.logical_and}[fn](a, b)
        number = call.scalar(1) if scalars and not b.is_complex() else None
        return wrapped(call, fn(a, b if number is None else number))

    return run


for _name, (_fn, _scalars) in _BINARY.items():
    op(_name)(_binary(_fn, _scalars))


@op("maximum minimum")
def _extreme(call: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    most = call.node.op.endswith("maximum")
    if a.is_complex():
        greater = (a.real > b.real) | ((a.real == b.real) & (a.imag > b.imag))
        return torch.where(greater if most else ~greater, a, b)
    if a.dtype == torch.bool:
        return torch.logical_or(a, b) if most else torch.logical_and(a, b)
    if call.kind.element == "ui64":
        a, b = ordered(a), ordered(b)
        return ordered(torch.maximum(a, b) if most else torch.minimum(a, b))
    number = call.scalar(1) if a.is_floating_point() else None
    if number is not None and number == number:
        if most and number == 0:
            return torch.relu(a)
        return torch.clamp_min(a, number) if most else torch.clamp_max(a, number)
    return torch.maximum(a, b) if most else torch.minimum(a, b)


@op("and or xor")
def _bitwise(call: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    name = call.node.op.split(".")[1]
    return {"and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor}[name](a, b)


@op("shift_left shift_right_logical shift_right_arithmetic")
def _shift(call: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    name, bits = call.node.op.split(".")[1], call.kind.bits
    over = (b < 0) | (b >= bits)
    by = torch.where(over, bits - 1, b)
    if name == "shift_left":
        return torch.where(over, 0, wrapped(call, torch.bitwise_left_shift(a, by)))
    if name == "shift_right_arithmetic":
        if call.kind.unsigned and bits < 64:
            narrow = {8: torch.int8, 16: torch.int16, 32: torch.int32}[bits]
            found = torch.bitwise_right_shift(a.to(narrow), by.to(narrow)).to(a.dtype)
            return wrapped(call, found)
        return torch.bitwise_right_shift(a, by)
    if bits == 64:
        low = torch.bitwise_right_shift(a, 1) & torch.iinfo(torch.int64).max
        found = torch.where(by == 0, a, torch.bitwise_right_shift(low, torch.clamp_min(by - 1, 0)))
        return torch.where(over, 0, found)
    wide = a.to(torch.int64) & ((1 << bits) - 1)
    return torch.where(over, 0, torch.bitwise_right_shift(wide, by.to(torch.int64))).to(a.dtype)


@op("divide remainder")
def _division(call: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    whole = call.node.op.endswith("divide")
    if a.is_floating_point() or a.is_complex():
        number = call.scalar(1) if not a.is_complex() else None
        return torch.div(a, b if number is None else number) if whole else torch.fmod(a, b)
    none = b == 0
    safe = torch.where(none, 1, b)
    if call.kind.element == "ui64":
        # Half of it divided, then put right
        half = torch.bitwise_right_shift(a, 1) & torch.iinfo(torch.int64).max
        quotient = torch.div(half, torch.where(safe < 0, 1, safe), rounding_mode="trunc") << 1
        rest = a - quotient * safe
        quotient = quotient + (ordered(rest) >= ordered(safe)).to(torch.int64)
        quotient = torch.where(safe < 0, (ordered(a) >= ordered(b)).to(torch.int64), quotient)
    elif call.kind.unsigned:
        quotient = torch.div(a, safe, rounding_mode="trunc")
    else:
        turned = safe == -1  # the least number has no opposite
        quotient = torch.where(turned, -a, torch.div(a, torch.where(turned, 1, safe), rounding_mode="trunc"))
    if whole:
        return torch.where(none, MASKS.get(call.kind.element, 255 if call.kind.element == "ui8" else -1), quotient)
    return torch.where(none, a, a - quotient * safe)


@op("power")
def _power(call: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.is_floating_point() or a.is_complex():
        number = call.scalar(1) if not a.is_complex() else None
        return torch.pow(a, b if number is None else number)
    if a.dtype == torch.bool:
        return a | ~b
    out, base, left = torch.ones_like(a), a, b
    for _ in range(call.kind.bits):
        out = torch.where((left & 1) == 1, wrapped(call, out * base), out)
        base, left = wrapped(call, base * base), left >> 1
    if call.kind.unsigned:
        return out
    sign = torch.where((b & 1) == 0, 1, -1).to(a.dtype)
    below = torch.where(a == 1, torch.ones_like(a), torch.where(a == -1, sign, torch.zeros_like(a)))
    return torch.where(b < 0, below, out)


_COMPARE = {"EQ": torch.eq, "NE": torch.ne, "LT": torch.lt, "LE": torch.le, "GT": torch.gt, "GE": torch.ge}


def total(t: torch.Tensor) -> torch.Tensor:
    """Integers in the total order of floats."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[t.dtype.itemsize]
    bits = t.view(whole)
    return torch.where(bits < 0, bits ^ torch.iinfo(whole).max, bits)


@op("compare")
def _compare(call: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    fn = _COMPARE[call.get("comparison_direction")]
    if call.get("compare_type") == "TOTALORDER" and a.is_floating_point():
        return fn(total(a), total(b))
    if call.kind.element == "ui64" and fn not in (torch.eq, torch.ne):
        return fn(ordered(a), ordered(b))
    number = call.scalar(1) if not a.is_complex() else None
    return fn(a, b if number is None else number)


@op("select")
def _select(call: Call, which: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(which, a, b)


@op("clamp")
def _clamp(call: Call, low: torch.Tensor, x: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    if call.node.in_types[1].element == "ui64":
        return ordered(torch.minimum(torch.maximum(ordered(x), ordered(low)), ordered(high)))
    return torch.minimum(torch.maximum(x, low), high)


def converted(x: torch.Tensor, of: TensorType, to: TensorType) -> torch.Tensor:
    dtype = CARRIED[to.element]
    if to.element == "i1":
        return x != 0
    if x.is_complex() and not dtype.is_complex:
        x = torch.real(x)
    if of.element == "ui64" and (dtype.is_floating_point or dtype.is_complex):
        high, low = (x >> 32) & 0xFFFFFFFF, x & 0xFFFFFFFF
        return (high.double() * 4294967296.0 + low.double()).to(dtype)
    if x.is_floating_point() and not (dtype.is_floating_point or dtype.is_complex):
        bits = to.bits
        least, most = (0, 2**bits - 1) if to.unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        wide = x.double() if x.dtype != torch.float64 else x
        whole = torch.trunc(torch.nan_to_num(wide, nan=0.0))
        if bits == 64:
            edge = 2.0**63
            if to.unsigned:
                upper = (whole - edge).clamp(0, edge * (1 - 2**-53)).to(torch.int64)
                found = torch.where(whole >= edge, upper ^ torch.iinfo(torch.int64).min,
                                    whole.clamp(0, edge * (1 - 2**-53)).to(torch.int64))  # fmt: skip
                return torch.where(whole >= 2.0**64, -1, found)
            found = whole.clamp(-edge, edge * (1 - 2**-53)).to(torch.int64)
            return torch.where(whole >= edge, most, found)
        return whole.clamp(least, most).to(torch.int64).to(dtype)
    found = x.to(dtype)
    mask = MASKS.get(to.element)
    return found & mask if mask and of.element != to.element else found


@op("convert")
def _convert(call: Call, x: torch.Tensor) -> torch.Tensor:
    return converted(x, call.kind, call.out) if call.kind.element != call.out.element else x


@op("bitcast_convert")
def _bitcast(call: Call, x: torch.Tensor) -> torch.Tensor:
    raw = {"ui16": torch.int16, "ui32": torch.int32}
    if call.kind.element in raw:
        x = x.to(raw[call.kind.element])
    dtype = raw.get(call.out.element, CARRIED[call.out.element])
    wide, narrow = x.dtype.itemsize, dtype.itemsize
    if wide == narrow:
        found = x.view(dtype)
    elif wide > narrow:
        found = x.contiguous().unsqueeze(-1).view(dtype)
    else:
        found = x.contiguous().view(dtype).squeeze(-1)
    if call.out.element in raw:
        found = found.to(CARRIED[call.out.element]) & MASKS[call.out.element]
    return found


@op("reduce_precision")
def _reduce_precision(call: Call, x: torch.Tensor) -> torch.Tensor:
    exponent, mantissa = call.get("exponent_bits"), call.get("mantissa_bits")
    known = {(5, 10): torch.float16, (8, 7): torch.bfloat16, (8, 23): torch.float32, (11, 52): torch.float64}
    if (exponent, mantissa) not in known:
        raise call.wrong(f"rounds to {exponent} bits of exponent and {mantissa} of mantissa, which no element type has")
    return x.to(known[exponent, mantissa]).to(x.dtype)


# --- shapes ---------------------------------------------------------------------------------------------------------


def _shape(call: Call, at: int | None = None) -> list[int]:
    return call.sizes(at) if at is not None else [int(d) for d in call.out.shape or ()]


@op("reshape dynamic_reshape")
def _reshape(call: Call, x: torch.Tensor, shape: Any = None) -> torch.Tensor:
    wanted = _shape(call, 1 if shape is not None else None)
    if not wanted and x.numel() != 1:
        return x  # a scalar of a body that runs on a whole tensor
    if x.numel() > 1 and not any(x.stride()):
        return x[(0,) * x.dim()].expand(wanted)
    return x.reshape(wanted)


@op("broadcast_in_dim dynamic_broadcast_in_dim")
def _broadcast(call: Call, x: torch.Tensor, shape: Any = None) -> torch.Tensor:
    wanted = _shape(call, 1 if shape is not None else None)
    dims = call.get("broadcast_dimensions") or []
    if not wanted and x.dim():
        return x
    sizes = [1] * len(wanted)
    order = sorted(range(len(dims)), key=lambda i: dims[i])
    x = x.permute(order) if order != list(range(len(dims))) else x
    for at, i in enumerate(order):
        sizes[dims[i]] = x.shape[at]
    return x.reshape(sizes).expand(wanted)


@op("transpose")
def _transpose(call: Call, x: torch.Tensor) -> torch.Tensor:
    return x.permute(call.get("permutation"))


@op("slice")
def _slice(call: Call, x: torch.Tensor) -> torch.Tensor:
    return x[tuple(map(slice, call.get("start_indices"), call.get("limit_indices"), call.get("strides")))]


@op("real_dynamic_slice")
def _real_dynamic_slice(call: Call, x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x[tuple(map(slice, call.sizes(1), call.sizes(2), call.sizes(3)))]


@op("reverse")
def _reverse(call: Call, x: torch.Tensor) -> torch.Tensor:
    return torch.flip(x, call.get("dimensions"))


@op("concatenate")
def _concatenate(call: Call, *args: torch.Tensor) -> torch.Tensor:
    return torch.cat(args, call.get("dimension"))


@op("get_dimension_size")
def _dimension_size(call: Call, x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(x.shape[call.get("dimension")], dtype=torch.int32)


@op("iota dynamic_iota")
def _iota(call: Call, shape: Any = None) -> torch.Tensor:
    wanted, dim = _shape(call, 0 if shape is not None else None), call.get("iota_dimension")
    sizes = [1] * len(wanted)
    sizes[dim] = wanted[dim]
    dtype = CARRIED[call.out.element]
    return torch.arange(wanted[dim]).to(dtype).reshape(sizes).expand(wanted)


@op("pad")
def _pad(call: Call, x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return padded(x, value, call.scalar(1), call.get("edge_padding_low"), call.get("edge_padding_high"),
                  call.get("interior_padding"))  # fmt: skip


def padded(x: torch.Tensor, value: torch.Tensor, number: Any, low: Sequence[int], high: Sequence[int],
           inner: Sequence[int] = ()) -> torch.Tensor:  # fmt: skip
    """Padding at the edges, which may cut, and between elements."""
    if inner and any(inner):
        for dim, between in enumerate(inner):
            if between and x.shape[dim] > 1:
                filled = value.expand([*x.shape[: dim + 1], between, *x.shape[dim + 1 :]])
                x = torch.cat([x.unsqueeze(dim + 1), filled], dim + 1).flatten(dim, dim + 1)
                x = x.narrow(dim, 0, x.shape[dim] - between)
    if not any(low) and not any(high):
        return x
    if number is not None and not x.is_complex() and x.dtype != torch.bool:
        flat = [n for pair in zip(reversed(low), reversed(high)) for n in pair]
        return F.pad(x, flat, value=number)
    for dim, (before, after) in enumerate(zip(low, high)):
        cut = x.narrow(dim, max(-before, 0), max(x.shape[dim] + min(before, 0) + min(after, 0), 0))
        shape = list(cut.shape)
        parts = [cut]
        if before > 0:
            parts.insert(0, value.expand([*shape[:dim], before, *shape[dim + 1 :]]))
        if after > 0:
            parts.append(value.expand([*shape[:dim], after, *shape[dim + 1 :]]))
        x = torch.cat(parts, dim) if len(parts) > 1 else cut
    return x


# --- products -------------------------------------------------------------------------------------------------------


@op("dot_general dot")
def _dot_general(call: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    numbers = call.get("dot_dimension_numbers") or {}
    batch_a, batch_b = numbers.get("lhs_batching_dimensions", []), numbers.get("rhs_batching_dimensions", [])
    sum_a = numbers.get("lhs_contracting_dimensions", [a.dim() - 1])
    sum_b = numbers.get("rhs_contracting_dimensions", [0])
    dtype = CARRIED[call.out.element]
    if a.dtype != dtype or b.dtype != dtype:
        a, b = a.to(dtype), b.to(dtype)
    rest_a = [d for d in range(a.dim()) if d not in batch_a and d not in sum_a]
    rest_b = [d for d in range(b.dim()) if d not in batch_b and d not in sum_b]
    shape = [a.shape[d] for d in [*batch_a, *rest_a]] + [b.shape[d] for d in rest_b]
    depth = prod(a.shape[d] for d in sum_a)
    whole = dtype == torch.bool
    left, right = a.permute([*batch_a, *rest_a, *sum_a]), b.permute([*batch_b, *sum_b, *rest_b])
    if whole:
        left, right = left.to(torch.int32), right.to(torch.int32)
    if batch_a:
        sizes = [a.shape[d] for d in batch_a]
        left = left.reshape(*sizes, prod(a.shape[d] for d in rest_a), depth)
        right = right.reshape(*sizes, depth, prod(b.shape[d] for d in rest_b))
    else:
        left = left.reshape(*[a.shape[d] for d in rest_a], depth) if rest_a else left.reshape(1, depth)
        right = right.reshape(depth, prod(b.shape[d] for d in rest_b))
    out = torch.matmul(left, right).reshape(shape)
    return out != 0 if whole else wrapped(call, out)


@op("convolution")
def _convolution(call: Call, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    n = call.get("dimension_numbers")
    spatial = len(n["input_spatial_dimensions"])
    if spatial > 3:
        raise call.wrong(f"has {spatial} spatial dims, and PyTorch convolves up to three: split it")
    dtype = CARRIED[call.out.element]
    work = dtype if dtype.is_floating_point or dtype.is_complex else torch.float64
    x, w = x.to(work), w.to(work)
    x = x.permute([n["input_batch_dimension"], n["input_feature_dimension"], *n["input_spatial_dimensions"]])
    w = w.permute([n["kernel_output_feature_dimension"], n["kernel_input_feature_dimension"],
                   *n["kernel_spatial_dimensions"]])  # fmt: skip
    strides = call.get("window_strides") or [1] * spatial
    inner, dilation = call.get("lhs_dilation") or [1] * spatial, call.get("rhs_dilation") or [1] * spatial
    pads = call.get("padding") or [[0, 0]] * spatial
    turned = [i + 2 for i, flag in enumerate(call.get("window_reversal") or []) if flag]
    if turned:
        w = torch.flip(w, turned)
    groups, batches = call.get("feature_group_count", 1), call.get("batch_group_count", 1)
    if batches > 1:  # groups of the batch, side by side as features
        size = x.shape[0] // batches
        x = x.reshape(batches, size, *x.shape[1:]).transpose(0, 1).reshape(size, -1, *x.shape[2:])
        groups = batches
    even = all(low == high >= 0 for low, high in pads) and all(d == 1 for d in inner)
    if not even:
        zero = x.new_zeros(())
        low, high = [p[0] for p in pads], [p[1] for p in pads]
        x = padded(x, zero, 0, [0, 0, *low], [0, 0, *high], [0, 0, *[d - 1 for d in inner]])
    if spatial == 0:
        x, w, strides, dilation, pads = x.unsqueeze(-1), w.unsqueeze(-1), [1], [1], [[0, 0]]
    fn: Callable[..., torch.Tensor] = [F.conv1d, F.conv1d, F.conv2d, F.conv3d][spatial]
    out = fn(x, w, None, strides, [p[0] for p in pads] if even else 0, dilation, groups)
    if spatial == 0:
        out = out.squeeze(-1)
    order = [n["output_batch_dimension"], n["output_feature_dimension"], *n["output_spatial_dimensions"]]
    out = out.permute([order.index(d) for d in range(len(order))])
    return out if work == dtype else wrapped(call, torch.round(out).to(dtype))


# --- reductions -----------------------------------------------------------------------------------------------------


def simple(block: Any, count: int = 1) -> str:
    """The op of a body that applies one to an accumulated and a new value; empty for any other."""
    if count != 1 or len(block.nodes) != 1 or block.results != block.nodes[0].outputs:
        return ""
    node = block.nodes[0]
    return node.op.split(".")[1] if sorted(node.inputs) == sorted(block.params) else ""


def neutral(kind: str, dtype: torch.dtype, number: Any) -> bool:
    """Whether a number changes nothing as the first of a reduction."""
    if number is None:
        return False
    if dtype == torch.bool:
        return bool(number) == (kind in ("and", "multiply", "minimum"))
    least, most = (-float("inf"), float("inf")) if dtype.is_floating_point else (
        (0, 0) if dtype.is_complex else (torch.iinfo(dtype).min, torch.iinfo(dtype).max))  # fmt: skip
    return bool({"add": number == 0, "multiply": number == 1, "maximum": number == least,
                 "minimum": number == most}.get(kind))  # fmt: skip


def reduced(call: Call, args: Sequence[torch.Tensor], inits: Sequence[torch.Tensor], dims: Sequence[int],
            numbers: Sequence[Any]) -> list[torch.Tensor]:  # fmt: skip
    kind, count = simple(call.node.regions[0], len(args)), len(args)
    x, dims = args[0], sorted(dims)
    whole = not (x.is_floating_point() or x.is_complex())
    if not dims:
        kind = ""
    out: torch.Tensor | None = None
    empty = any(x.shape[d] == 0 for d in dims)
    if x.dtype == torch.bool and kind in ("or", "and", "maximum", "minimum", "add", "multiply"):
        out = x.any(dims) if kind in ("or", "maximum", "add") else x.all(dims)
    elif kind == "add":
        out = wrapped(call, x.sum(dims, dtype=x.dtype), call.kind.element)
    elif kind == "multiply" and (not whole or call.kind.element not in MASKS):
        out = x
        for dim in reversed(dims):
            out = out.prod(dim, dtype=x.dtype)
    elif kind in ("maximum", "minimum") and not empty and not x.is_complex() and call.kind.element != "ui64":
        out = x.amax(dims) if kind == "maximum" else x.amin(dims)
    if out is not None:
        if neutral(kind, x.dtype, numbers[0]):
            return [out]
        return call.computed(0, [inits[0].expand(out.shape) if inits[0].dim() == 0 else inits[0], out])
    # Any other body: halves on halves, in order
    keep = [d for d in range(x.dim()) if d not in dims]
    found = [t.permute([*keep, *dims]).reshape([*[x.shape[d] for d in keep], prod(x.shape[d] for d in dims)])
             for t in args]  # fmt: skip
    size = found[0].shape[-1]
    while size > 1:
        half = size // 2
        made = call.computed(0, [*[t[..., 0 : 2 * half : 2] for t in found], *[t[..., 1 : 2 * half : 2] for t in found]])
        found = [torch.cat([m.expand(t[..., :half].shape), t[..., 2 * half :]], -1) if size % 2 else m
                 for m, t in zip(made, found)]  # fmt: skip
        size = size - half
    shape = [x.shape[d] for d in keep]
    starts = [t.expand(shape) for t in inits]
    if size == 0:
        return starts
    return [t.expand(shape) for t in call.computed(0, [*starts, *[t.squeeze(-1) for t in found]])][:count]


@op("reduce")
def _reduce(call: Call, *args: torch.Tensor) -> Any:
    half = len(args) // 2
    return reduced(call, args[:half], args[half:], call.get("dimensions"),
                   [call.scalar(half + i) for i in range(half)])  # fmt: skip


def windows(x: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> torch.Tensor:
    """Every window of a tensor, its dims behind those that count windows."""
    for dim, (size, stride, dilation) in enumerate(zip(sizes, strides, dilations)):
        span = (size - 1) * dilation + 1
        x = x.unfold(dim, span, stride)[..., ::dilation]
    return x


@op("reduce_window")
def _reduce_window(call: Call, *args: torch.Tensor) -> Any:
    half, rank = len(args) // 2, args[0].dim()
    sizes = call.get("window_dimensions")
    strides, base = call.get("window_strides") or [1] * rank, call.get("base_dilations") or [1] * rank
    dilations, pads = call.get("window_dilations") or [1] * rank, call.get("padding") or [[0, 0]] * rank
    numbers = [call.scalar(half + i) for i in range(half)]
    kind, x = simple(call.node.regions[0], half), args[0]
    wide = [d for d in range(rank) if sizes[d] > 1]
    plain_step = all(s == 1 for s in (*strides, *base, *dilations))
    is_neutral = half == 1 and neutral(kind, x.dtype, numbers[0])
    if is_neutral and len(wide) == 1 and plain_step and kind in ("add", "multiply", "maximum", "minimum") and (
            sizes[wide[0]] == x.shape[wide[0]] and x.dtype != torch.bool and call.kind.element != "ui64"):  # fmt: skip
        (dim,) = wide
        before = (sizes[dim] - 1, 0)
        if tuple(pads[dim]) in (before, before[::-1]) and not any(any(p) for d, p in enumerate(pads) if d != dim):
            turned = tuple(pads[dim]) != before
            x = torch.flip(x, [dim]) if turned else x
            if kind in ("add", "multiply"):
                made = (torch.cumsum if kind == "add" else torch.cumprod)(x, dim, dtype=x.dtype)
            else:
                made = (torch.cummax if kind == "maximum" else torch.cummin)(x, dim)[0]
            return wrapped(call, torch.flip(made, [dim]) if turned else made)
    pooled = is_neutral and kind in ("add", "maximum") and x.is_floating_point() and 1 <= len(wide) <= 2 and rank >= 3
    if pooled and all(s == 1 for s in base) and all(strides[d] == 1 and not any(pads[d]) and dilations[d] == 1
                                                    for d in range(rank) if d not in wide):  # fmt: skip
        rest = [d for d in range(rank) if d not in wide]
        order = [*rest, *wide]
        y = x.permute(order)
        lead = y.shape[: len(rest)]
        y = y.reshape(-1, 1, *y.shape[len(rest) :]) if len(rest) != 2 else y
        y = padded(y, args[1], numbers[0], [0, 0, *[pads[d][0] for d in wide]], [0, 0, *[pads[d][1] for d in wide]])
        window, step, apart = ([v[d] for d in wide] for v in (sizes, strides, dilations))
        if kind == "maximum":
            y = (F.max_pool1d if len(wide) == 1 else F.max_pool2d)(y, window, step, 0, apart)
        elif all(d == 1 for d in apart):
            y = (F.avg_pool1d if len(wide) == 1 else F.avg_pool2d)(y, window, step) * prod(window)
        else:
            pooled = False
        if pooled:
            y = y.reshape(*lead, *y.shape[-len(wide) :])
            return y.permute([order.index(d) for d in range(rank)])
    low, high = [p[0] for p in pads], [p[1] for p in pads]
    views = [windows(padded(t, init, number, low, high, [b - 1 for b in base]), sizes, strides, dilations)
             for t, init, number in zip(args[:half], args[half:], numbers)]  # fmt: skip
    return reduced(call, views, args[half:], range(rank, 2 * rank), numbers)


@op("select_and_scatter")
def _select_and_scatter(call: Call, x: torch.Tensor, source: torch.Tensor, init: torch.Tensor) -> torch.Tensor:
    rank, block = x.dim(), call.node.regions[0]
    direction = block.nodes[-1].attrs.get("comparison_direction") if len(block.nodes) == 1 else ""
    if direction not in ("GE", "GT", "LE", "LT") or simple(call.node.regions[1]) != "add":
        raise call.wrong("selects or scatters by more than a comparison and a sum, which is not supported")
    sizes, strides = call.get("window_dimensions") or [1] * rank, call.get("window_strides") or [1] * rank
    pads = call.get("padding") or [[0, 0]] * rank
    low, high = [p[0] for p in pads], [p[1] for p in pads]
    most = direction in ("GE", "GT")
    edge = -float("inf") if most else float("inf")
    if not x.is_floating_point():
        edge = torch.iinfo(x.dtype).min if most else torch.iinfo(x.dtype).max
    filled = padded(x, x.new_full((), edge), edge, low, high)
    places = torch.arange(x.numel(), device=x.device).reshape(x.shape)
    places = padded(places, places.new_full((), -1), -1, low, high)
    views = windows(filled, sizes, strides, [1] * rank).flatten(rank)
    spots = windows(places, sizes, strides, [1] * rank).flatten(rank)
    best = (views.argmax(-1) if most else views.argmin(-1)).unsqueeze(-1)
    at = torch.gather(spots, -1, best).reshape(-1)
    out = init.expand(x.numel()).clone() if init.dim() == 0 else init
    return out.index_add(0, at, source.reshape(-1)).reshape(x.shape)


# --- places ---------------------------------------------------------------------------------------------------------


def _starts(indices: torch.Tensor, vector: int) -> torch.Tensor:
    """Index vectors as the last dim."""
    return indices.unsqueeze(-1) if vector == indices.dim() else indices.movedim(vector, -1)


@op("gather dynamic_gather")
def _gather(call: Call, x: torch.Tensor, indices: torch.Tensor, sizes: Any = None) -> torch.Tensor:
    n = call.get("dimension_numbers")
    sizes = call.sizes(2) if sizes is not None else call.get("slice_sizes")
    starts = _starts(indices.to(torch.int64), n["index_vector_dim"])
    mapped, gone = n["start_index_map"], [*n["collapsed_slice_dims"], *n["operand_batching_dims"]]
    batch = list(starts.shape[:-1])
    rank, windowed = x.dim(), [d for d in range(x.dim()) if d not in gone]
    out_rank = len(batch) + len(windowed)
    offsets = n["offset_dims"]
    lead = [d for d in range(out_rank) if d not in offsets]
    order = [(lead + list(offsets)).index(d) for d in range(out_rank)]
    full = all(sizes[d] == x.shape[d] for d in range(rank) if d not in mapped)
    if len(mapped) == 1 and not n["operand_batching_dims"] and mapped[0] in gone and full:
        (dim,) = mapped
        flat = torch.clamp(starts.reshape(-1), 0, x.shape[dim] - 1)
        if dim == 0 and rank == 2:
            made = F.embedding(flat, x).reshape([*batch, *[x.shape[d] for d in windowed]])
        else:
            made = torch.index_select(x, dim, flat).movedim(dim, 0).reshape([*batch, *[x.shape[d] for d in windowed]])
        return made.permute(order) if order != list(range(out_rank)) else made
    index = _places(call, x, starts, [sizes[d] for d in range(rank)], mapped, n["operand_batching_dims"],
                    n["start_indices_batching_dims"], n["index_vector_dim"], clamp=True)  # fmt: skip
    made = x[tuple(index)].reshape([*batch, *[sizes[d] for d in windowed]])
    return made.permute(order)


def _places(call: Call, x: torch.Tensor, starts: torch.Tensor, sizes: Sequence[int], mapped: Sequence[int],
            own: Sequence[int], theirs: Sequence[int], vector: int, *, clamp: bool) -> list[torch.Tensor]:  # fmt: skip
    """An index for each dim of the operand, of the shape: batch dims, then one per dim of the operand."""
    batch, rank = list(starts.shape[:-1]), x.dim()
    found = []
    for dim in range(rank):
        shape = [1] * (len(batch) + rank)
        shape[len(batch) + dim] = sizes[dim]
        at = torch.arange(sizes[dim], device=starts.device).reshape(shape)
        if dim in mapped:
            start = starts[..., list(mapped).index(dim)].reshape([*batch, *[1] * rank])
            at = at + (torch.clamp(start, 0, x.shape[dim] - sizes[dim]) if clamp else start)
        elif dim in own:
            place = theirs[list(own).index(dim)]
            place -= place > vector
            shape = [1] * (len(batch) + rank)
            shape[place] = batch[place]
            at = at + torch.arange(batch[place], device=starts.device).reshape(shape)
        found.append(at)
    return found


@op("scatter")
def _scatter(call: Call, *args: torch.Tensor) -> Any:
    count = (len(args) - 1) // 2
    block = call.node.regions[0]
    kind = simple(block, count)
    if not kind and count == 1 and not block.nodes and block.results == block.params[1:]:
        kind = "replace"
    if kind not in ("replace", "add", "multiply", "maximum", "minimum", "and", "or"):
        raise call.wrong("updates by a body of its own: only sums, products, extremes and replacements are supported")
    x, indices, updates = args
    n = call.get("scatter_dimension_numbers")
    mapped = n["scattered_dims_to_operand_dims"]
    gone = [*n["inserted_window_dims"], *n["input_batching_dims"]]
    starts = _starts(indices.to(torch.int64), n["index_vector_dim"])
    window = n["update_window_dims"]
    lead = [d for d in range(updates.dim()) if d not in window]
    sizes, rest = [1] * x.dim(), [d for d in range(x.dim()) if d not in gone]
    for dim, of in zip(rest, window):
        sizes[dim] = updates.shape[of]
    index = _places(call, x, starts, sizes, mapped, n["input_batching_dims"], n["scatter_indices_batching_dims"],
                    n["index_vector_dim"], clamp=False)  # fmt: skip
    flat: Any = 0
    inside: Any = None
    for dim, at in enumerate(index):
        flat = flat * x.shape[dim] + at
        if dim in mapped:
            good = (at >= 0) & (at < x.shape[dim])
            inside = good if inside is None else inside & good
    shape = [*starts.shape[:-1], *sizes]
    if isinstance(flat, int):
        flat = torch.zeros(shape, dtype=torch.int64, device=starts.device)
    if inside is not None:
        flat = torch.where(inside, flat, x.numel())  # one element too many takes what falls outside
    flat = flat.expand(shape).reshape(-1)
    values = updates.permute([*lead, *window]).reshape(-1)
    base = torch.cat([x.reshape(-1), x.new_zeros(1)])
    if x.dtype == torch.bool:
        kind = {"add": "maximum", "or": "maximum", "multiply": "minimum", "and": "minimum"}.get(kind, kind)
        base, values = base.to(torch.uint8), values.to(torch.uint8)
    if kind in ("and", "or"):
        raise call.wrong("updates integers bit by bit, which is not supported: add distinct bits instead")
    if kind == "replace":
        base = torch.index_put(base, (flat,), values)
    elif kind == "add":
        base = wrapped(call, torch.index_put(base, (flat,), values, accumulate=True))
    elif call.kind.element == "ui64" and kind != "multiply":
        how = "amax" if kind == "maximum" else "amin"
        base = ordered(torch.scatter_reduce(ordered(base), 0, flat, ordered(values), how))
    else:
        how = {"multiply": "prod", "maximum": "amax", "minimum": "amin"}[kind]
        base = wrapped(call, torch.scatter_reduce(base, 0, flat, values, how))
    return base[:-1].reshape(x.shape).to(x.dtype)


def _start(call: Call, at: int, t: torch.Tensor, most: int) -> Any:
    """Where a slice starts, clamped: a number where it is known."""
    known = call.known(at)
    if known is not None:
        return min(max(int(known.item()), 0), most)
    return torch.clamp(t.to(torch.int64), 0, most)


@op("dynamic_slice")
def _dynamic_slice(call: Call, x: torch.Tensor, *starts: torch.Tensor) -> torch.Tensor:
    for dim, size in enumerate(call.get("slice_sizes")):
        most = x.shape[dim] - size
        if most == 0:
            continue
        start = _start(call, dim + 1, starts[dim], most)
        if isinstance(start, int):
            x = x.narrow(dim, start, size)
        else:
            x = torch.index_select(x, dim, torch.arange(size, device=x.device) + start)
    return x


@op("dynamic_update_slice")
def _dynamic_update_slice(call: Call, x: torch.Tensor, update: torch.Tensor, *starts: torch.Tensor) -> torch.Tensor:
    dims = [d for d in range(x.dim()) if x.shape[d] != update.shape[d]]
    found = [_start(call, d + 2, starts[d], x.shape[d] - update.shape[d]) for d in dims]

    def put(x: torch.Tensor, at: int) -> torch.Tensor:
        if at == len(dims):
            return update
        dim, start = dims[at], found[at]
        size = update.shape[dim]
        if isinstance(start, int):
            return torch.slice_scatter(x, put(x.narrow(dim, start, size), at + 1), dim, start, start + size)
        index = torch.arange(size, device=x.device) + start
        last = at + 1 == len(dims)
        return torch.index_copy(x, dim, index, update if last else put(torch.index_select(x, dim, index), at + 1))

    return put(x, 0)


# --- order ----------------------------------------------------------------------------------------------------------


def sort_key(call: Call, args: Sequence[torch.Tensor]) -> tuple[torch.Tensor, bool] | None:
    """What a comparator compares, where it is one comparison of the same of both sides, and whether the most is first."""
    block = call.node.regions[0]
    last = block.nodes[-1] if block.nodes else None
    if last is None or last.op != "stablehlo.compare" or block.results != last.outputs:
        return None
    made = {out: node for node in block.nodes for out in node.outputs}
    params = {value: at for at, value in enumerate(block.params)}

    def same(a: int, b: int) -> bool:
        if a in params or b in params:
            return a in params and b in params and params[a] % 2 == 0 and params[b] == params[a] + 1
        if a not in made or b not in made:
            return a == b
        one, two = made[a], made[b]
        if one is two:
            return not one.inputs
        return (one.op == two.op and one.attrs == two.attrs and len(one.inputs) == len(two.inputs)
                and all(same(i, j) or (i == j and i not in params) for i, j in zip(one.inputs, two.inputs)))  # fmt: skip

    direction = last.attrs.get("comparison_direction")
    if direction not in ("LT", "GT") or not same(*last.inputs):
        return None
    # The body's results for both sides, the right one being the left one's place
    inner = type(block)(block.params, block.types, block.nodes[:-1], [last.inputs[0]])
    kept = call.node.regions[0]
    call.node.regions[0] = inner
    try:
        (key,) = call.computed(0, [t for t in args for _ in range(2)])
    finally:
        call.node.regions[0] = kept
    if last.attrs.get("compare_type") == "TOTALORDER" and key.is_floating_point():
        key = total(key)
    if last.in_types[0].element == "ui64":
        key = ordered(key)
    return None if key.is_complex() else (key, direction == "GT")


@op("sort")
def _sort(call: Call, *args: torch.Tensor) -> Any:
    dim = call.get("dimension", -1) % max(args[0].dim(), 1)
    size = args[0].shape[dim] if args[0].dim() else 1
    if size < 2:
        return list(args)
    found = sort_key(call, args)
    if found is not None:
        key, most_first = found
        stable = bool(call.get("is_stable", False)) or len(args) > 1
        values, order = torch.sort(key.expand(args[0].shape), dim=dim, descending=most_first, stable=stable)
        if len(args) == 1 and key is args[0]:
            return values
    else:
        if size > MAX_RANKED:
            raise call.wrong(f"sorts {size:,} elements by a comparator of its own, which is done up to {MAX_RANKED:,}: "
                             "sort by one key")  # fmt: skip
        moved = [t.movedim(dim, -1) for t in args]
        pairs = [t for m in moved for t in (m.unsqueeze(-1), m.unsqueeze(-2))]
        less = call.computed(0, pairs)[0]  # [..., i, j]: i before j
        more = call.computed(0, [t for m in moved for t in (m.unsqueeze(-2), m.unsqueeze(-1))])[0]
        at = torch.arange(size, device=less.device)
        first = less | (~more & (at.unsqueeze(-1) < at))
        order = torch.argsort(first.sum(-2), dim=-1).movedim(-1, dim)
    return [torch.gather(t, dim, order) for t in args]


@op("chlo.top_k")
def _top_k(call: Call, x: torch.Tensor) -> Any:
    if call.kind.element == "ui64":
        x = ordered(x)
    # The lowest of equal places comes first, which torch.topk does not promise
    values, order = torch.sort(x, dim=-1, descending=True, stable=True)
    values, order = values[..., : call.get("k")], order[..., : call.get("k")]
    return (ordered(values) if call.kind.element == "ui64" else values), order.to(torch.int32)


@op("fft")
def _fft(call: Call, x: torch.Tensor) -> torch.Tensor:
    kind, dims = call.get("fft_type"), list(range(-len(call.get("fft_length")), 0))
    if kind == "IRFFT":
        return torch.fft.irfftn(x, s=call.get("fft_length"), dim=dims)
    return {"FFT": torch.fft.fftn, "IFFT": torch.fft.ifftn, "RFFT": torch.fft.rfftn}[kind](x, dim=dims)


@op("triangular_solve")
def _triangular_solve(call: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    how, upper = call.get("transpose_a", "NO_TRANSPOSE"), not call.get("lower")
    if how != "NO_TRANSPOSE":
        a, upper = (a.mH if how == "ADJOINT" else a.mT), not upper
    return torch.linalg.solve_triangular(a, b, upper=upper, left=bool(call.get("left_side")),
                                         unitriangular=bool(call.get("unit_diagonal")))  # fmt: skip


@op("cholesky")
def _cholesky(call: Call, a: torch.Tensor) -> torch.Tensor:
    lower = bool(call.get("lower"))
    found = torch.linalg.cholesky(a if lower else a.mH)
    return found if lower else found.mH


# --- control --------------------------------------------------------------------------------------------------------


def _while(call: Call, *args: Any) -> Sequence[Any]:
    values = list(args)
    while bool(call.ctx.host(call.region(0, values)[0], call.node.where)):
        call.ctx.step(call.node.where)
        values = call.region(1, values)
    return values


def _case(call: Call, which: Any, *_: Any) -> Sequence[Any]:
    at, count = int(call.ctx.host(which, call.node.where)), len(call.node.regions)
    if call.node.op == "stablehlo.if":
        return call.region(0 if at else 1, [])
    return call.region(at if 0 <= at < count else count - 1, [])


CONTROL.update({"stablehlo.while": _while, "stablehlo.if": _case, "stablehlo.case": _case})
