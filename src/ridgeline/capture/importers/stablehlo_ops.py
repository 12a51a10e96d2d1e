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
    if node.op == "stablehlo.custom_call" and target not in ("shape_assertion", "Sharding"):
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
    "round_nearest_afz": lambda t: torch.trunc(t) + torch.where(torch.abs(torch.frac(t)) >= 0.5, torch.sign(t), 0),
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
        if number is None and fn in (torch.add, torch.mul) and not b.is_complex():
            first = call.scalar(0)
            if first is not None and a.shape == b.shape:
                a, number = b, first
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
    if number is None and a.is_floating_point() and a.shape == b.shape:
        a, b, number = b, a, call.scalar(0)
    if number is not None and number == number:
        if number == (-float("inf") if most else float("inf")):
            return a
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
    number = call.scalar(1)
    if number is not None and 0 <= number < bits < 64 and name != "shift_right_arithmetic":
        if name == "shift_left":
            return wrapped(call, torch.bitwise_left_shift(a, number))
        return torch.bitwise_right_shift(a if call.kind.unsigned else a.to(torch.int64) & ((1 << bits) - 1),
                                         number).to(a.dtype)  # fmt: skip
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
    left, right = (t if order == sorted(order) else t.permute(order)
                   for t, order in ((a, [*batch_a, *rest_a, *sum_a]), (b, [*batch_b, *sum_b, *rest_b])))  # fmt: skip
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
    if 0 in (call.out.shape or ()):
        return x.new_zeros(call.out.shape or (), dtype=dtype)
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


def _custom_call(call: Call, *args: Any) -> Sequence[Any]:
    if why := left_out(call.node):
        raise call.wrong(f"is not supported: {why}")
    if call.get("call_target_name") == "Sharding":
        return args
    if not bool(call.ctx.host(args[0], call.node.where)):
        told = str(call.get("error_message", "")) or "sizes of the inputs"
        raise call.wrong(f"does not hold: {told[:300]}; give inputs of sizes that the function was exported for")
    return []


CONTROL.update({"stablehlo.while": _while, "stablehlo.if": _case, "stablehlo.case": _case,
                "stablehlo.custom_call": _custom_call})  # fmt: skip
