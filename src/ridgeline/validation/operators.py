"""Predicted against measured operators: what events around a call would read, and how far from what they did."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from ridgeline.cost import host, interval
from ridgeline.cost.call import ITEMSIZE, Call, kinds
from ridgeline.cost.lower.eager import default_backend
from ridgeline.cost.price import Pricer, pricer_of
from ridgeline.cost.time import serving
from ridgeline.dtypes import dtype as dtype_named
from ridgeline.errors import InputError, RidgelineError, nearest
from ridgeline.hardware import Device
from ridgeline.hardware import device as device_named

CACHES = ("cold", "warm")
KEPT_SHARE, LOST_SHARE = 0.3, 1.0
"""A repeated call finds everything in the L2 while it touches up to the first share of it, nothing from the second on
(fitted on 784 warm recordings of an H200)."""
_REQUIRED = {
    "gemm": "m n k",
    "bmm": "b m n k",
    "attention": "b h hkv s skv d causal",
    "layer_norm": "n c",
    "rms_norm": "n c",
    "softmax": "n c",
    "gelu": "n c",
    "add": "n c",
    "sum_dim0": "n c",
    "conv2d": "n c h w o k stride groups",
    "embedding_bag": "v d b l",
    "cross_entropy": "n v",
    "topk": "n v k",
    "sort": "n",
    "cumsum": "n",
}
_OPTIONAL = {
    "gemm": "b layout",
    "bmm": "layout",
    "attention": "mask window dv",
    "conv2d": "nhwc padding transposed tf32 dgrad wgrad",
}
_KIND_WORDS = {
    "matmul": "gemm",
    "mm": "gemm",
    "linear": "gemm",
    "batched_gemm": "bmm",
    "batched_matmul": "bmm",
    "sdpa": "attention",
    "attn": "attention",
    "flash_attention": "attention",
    "conv": "conv2d",
    "convolution": "conv2d",
    "sum_0": "sum_dim0",
    "xent": "cross_entropy",
    "scan": "cumsum",
}
_PHASE_WORDS = {"fwd": "fwd", "forward": "fwd", "bwd": "bwd", "backward": "bwd"}
_LIBRARY_WORDS = {
    "cublas": "cublas",
    "cublaslt": "cublas",
    "cudnn": "cudnn",
    "fa2": "fa2",
    "flashattention2": "fa2",
    "flashattn2": "fa2",
    "flash2": "fa2",
    "flash": "fa2",
    "flashattention": "fa2",
    "fa3": "fa3",
    "flashattention3": "fa3",
    "flashattn3": "fa3",
    "flash3": "fa3",
    "efficient": "efficient",
    "memefficient": "efficient",
    "aten": "aten",
    "torch": "aten",
    "pytorch": "aten",
    "eager": "aten",
    "native": "aten",
    "inductor": "inductor",
    "triton": "inductor",
    "compiled": "inductor",
    "torchcompile": "inductor",
    "foreach": "foreach",
    "fused": "fused",
}


class CallTime(NamedTuple):
    """Seconds between the events around a call: expected, its 90 % interval, and the speed of light."""

    expected_s: float
    low_s: float
    high_s: float
    floor_s: float


def predict_call(
    device: str | Device,
    kind: str,
    dtype: str,
    phase: str,
    library: str,
    shape: Mapping[str, Any],
    cache: str | None = None,
) -> CallTime:
    """What events around one library call would read on the device.

    ``cache`` is cold or warm; None is the state in which the device's calibration was measured (cold, or the loop of a
    serving framework).
    """
    return time_of(device, call_of(kind, dtype, phase, library, shape), cache)


def time_of(device: str | Device, found: Call, cache: str | None = None) -> CallTime:
    """The same for a call that was read already."""
    pricer = pricer_of(device_named(device))
    if found.kind == "attention" and found.library in ("aten", "inductor"):  # whatever PyTorch takes there
        dims = found.dims()
        backend = default_backend(pricer.chip.arch, found.dtype, dims["d"], masked=bool(dims.get("mask")))
        found = replace(found, library=backend)
    looped = _looped(found, pricer)
    flushed = (cache or "").strip().lower() != "warm"
    price = pricer.price(found, _warm_frac(found, pricer, cache, looped), flushed=flushed, alone=True)
    coef = {**host.DEFAULTS, **pricer.calibration.host}
    time = price.time
    expected_s = time.busy_s if looped else host.between_events_s(found.kind, time.busy_s, time.num_kernels, coef)
    low, high = interval.factors(price.width)
    return CallTime(expected_s, max(price.time.floor_s, expected_s * low), expected_s * high, price.time.floor_s)


def _looped(call: Call, pricer: Pricer) -> Mapping[str, Any] | None:
    """The calibration entry, if this call was only ever timed inside a serving framework's loop."""
    entry = pricer.serving_entry(call)
    if entry is None and call.kind in ("gemm", "bmm"):
        entry = pricer.calibration.entry("gemm", call.dtype)
    return entry if entry is not None and entry.get("protocol") else None


def call_of(kind: str, dtype: str, phase: str, library: str, shape: Mapping[str, Any]) -> Call:
    """The call that people's spellings mean; what cannot be read is an InputError."""
    name = _kind(kind)
    _check_keys(name, shape)
    dims = {key: _dim(name, key, value) for key, value in shape.items()}
    empty = [key for key in _REQUIRED.get(name, "").split() if key != "causal" and dims[key] < 1]
    if empty:
        raise InputError(f"{name}: {empty[0]}={dims[empty[0]]} must be at least 1")
    if name == "gemm" and dims.get("b", 1) != 1:
        name = "bmm"
    return Call(
        name,
        _computed(name, dtype_named(dtype.strip()).name, dims),
        _word("phase", phase, _PHASE_WORDS),
        _word("library", library, _LIBRARY_WORDS),
        tuple(dims.items()),
    )


def _computed(kind: str, dtype: str, dims: dict[str, Any]) -> str:
    """The type a call computes in: PyTorch rounds convolutions of fp32 tensors to tf32 unless told ``tf32=0``."""
    rounded = dims.pop("tf32", 1)
    return "tf32" if kind.startswith("conv") and dtype == "fp32" and rounded else dtype


def _squashed(word: str) -> str:
    return "".join(c for c in word.lower() if c.isalnum())


def _kind(word: str) -> str:
    spelled = {_squashed(name): name for name in (*kinds(), *_REQUIRED)} | {
        _squashed(w): k for w, k in _KIND_WORDS.items()
    }
    found = spelled.get(_squashed(word))
    if found is None:
        raise InputError(f"unknown kind {word!r}{nearest(word, _REQUIRED)}")
    return found


def _word(what: str, word: str, words: Mapping[str, str]) -> str:
    found = words.get(_squashed(word))
    if found is None:
        raise InputError(f"unknown {what} {word!r}{nearest(word, set(words.values()))}")
    return found


def _dim(kind: str, key: str, value: Any) -> Any:
    """A whole number, a flag as 0 or 1, or the letters of a layout."""
    if key == "layout":
        return str(value)
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return int(value.strip().lower() == "true")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InputError(f"{kind}: {key}={value!r} is not a number") from None
    if not number.is_integer() or not 0 <= number < 2**53:
        raise InputError(f"{kind}: {key}={value} is not a whole number a dimension can have")
    return int(number)


def _check_keys(kind: str, dims: Mapping[str, Any]) -> None:
    required = _REQUIRED.get(kind, "").split()
    known = [*required, *_OPTIONAL.get(kind, "").split()]
    unknown = [key for key in dims if required and key not in known]
    if unknown:
        raise InputError(f"{kind} has no {unknown[0]!r} in its shape{nearest(unknown[0], known)}")
    missing = [key for key in required if key not in dims]
    if missing:
        raise InputError(
            f"{kind} needs {', '.join(missing)} in its shape: write {';'.join(f'{key}=…' for key in required)}"
        )


def _warm_frac(call: Call, pricer: Pricer, cache: str | None, looped: Mapping[str, Any] | None) -> float:
    """All of a small call is found in the L2 when it ran just before; of a large one, what the L2 holds."""
    state = (cache or "").strip().lower()
    if state and state not in CACHES:
        raise InputError(f"unknown cache state {cache!r}{nearest(state, CACHES)}")
    if looped is not None and state != "cold":
        return serving.loop_warm_frac(call, pricer.chip, looped)
    if state != "warm":
        return 0.0
    share = footprint_bytes(call) / pricer.chip.l2_bytes
    return min(1.0, max(0.0, (LOST_SHARE - share) / (LOST_SHARE - KEPT_SHARE)))


def footprint_bytes(call: Call) -> float:
    """Bytes of all tensors a call touches, each once."""
    dims, size = call.dims(), ITEMSIZE[call.dtype]
    rule = _FOOTPRINT.get(call.kind)
    if rule is not None:
        return rule(dims, call.phase == "bwd") * size
    shape = [dims[key] for key in ("n", "c", "h", "w", "b", "s", "d", "v", "numel") if key in dims]
    num_tensors = 3 if call.phase == "bwd" or call.kind in ("add", "mul", "div") else 2
    return float(math.prod(shape) * size * num_tensors)


def _product(d: Mapping[str, int], backward: bool) -> float:
    inputs, out = d["m"] * d["k"] + d["k"] * d["n"], d["m"] * d["n"]
    return d.get("b", 1) * (2 * inputs + out if backward else inputs + out)


def _attention(d: Mapping[str, int], backward: bool) -> float:
    return d["b"] * d["d"] * 2 * (d["h"] * d["s"] + d["hkv"] * d["skv"]) * (2 if backward else 1)


def _conv(d: Mapping[str, int], backward: bool) -> float:
    image, weight = d["n"] * d["c"] * d["h"] * d["w"], d["o"] * (d["c"] // d["groups"]) * d["k"] ** 2
    out = d["n"] * d["o"] * (d["h"] // d["stride"]) * (d["w"] // d["stride"])
    return 2 * (image + weight) + out if backward else image + weight + out


def _sort(d: Mapping[str, int], backward: bool) -> float:
    return 4 * d["n"] * d.get("c", 1)  # keys in and out, and their 8-byte positions


_FOOTPRINT: dict[str, Callable[[Mapping[str, int], bool], float]] = {
    "gemm": _product,
    "bmm": _product,
    "attention": _attention,
    "conv2d": _conv,
    "sort": _sort,
    "sum_dim0": lambda d, _: d["n"] * d["c"],
    "sum_dim1": lambda d, _: d["n"] * d["c"],
    "topk": lambda d, _: d["n"] * d["v"],
    "cross_entropy": lambda d, backward: d["n"] * d["v"] * (3 if backward else 2),
    "embedding_bag": lambda d, _: d["b"] * d["d"] * (d["l"] + 1),
    "cumsum": lambda d, _: 2 * d["n"] * d.get("c", 1),
}


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """One measured call beside its prediction; ``ape`` is |predicted / measured − 1|."""

    line: int
    kind: str
    dtype: str
    phase: str
    library: str
    shape: str
    cache: str
    measured_s: float
    predicted_s: float
    low_s: float
    high_s: float
    floor_s: float
    ape: float
    inside: bool


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that could not be used, and why."""

    line: int
    reason: str
    text: str


@dataclass(frozen=True, slots=True)
class Score:
    """How far predictions are from measurements, as fractions; ``coverage`` is the share inside the 90 % interval."""

    n: int
    mape: float
    median_ape: float
    bias: float
    coverage: float


@dataclass(frozen=True, slots=True)
class Check:
    """Every row of a file of measurements, judged."""

    device: str
    rows: tuple[CheckedRow, ...]
    skipped: tuple[Skipped, ...]

    @property
    def all(self) -> Score:
        return score(self.rows)

    def by(self, key: str = "kind") -> dict[str, Score]:
        """Scores grouped by a column, in the order of their names."""
        groups: dict[str, list[CheckedRow]] = {}
        for row in self.rows:
            groups.setdefault(getattr(row, key), []).append(row)
        return {name: score(groups[name]) for name in sorted(groups)}

    def worst(self, num: int = 10) -> list[CheckedRow]:
        return sorted(self.rows, key=lambda row: -row.ape)[:num]

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "all": asdict(self.all),
            "by": {kind: asdict(found) for kind, found in self.by().items()},
            "rows": [asdict(row) for row in self.rows],
            "skipped": [asdict(row) for row in self.skipped],
        }


def score(rows: Sequence[CheckedRow]) -> Score:
    """Mean and median absolute percentage error, bias and coverage; no rows is an error of ours."""
    assert rows, "a score needs a row"
    apes = [row.ape for row in rows]
    bias = statistics.fmean(row.predicted_s / row.measured_s - 1.0 for row in rows)
    return Score(
        len(rows), statistics.fmean(apes), statistics.median(apes), bias, statistics.fmean(row.inside for row in rows)
    )


def check(device: str | Device, records: Iterable[tuple[int, Mapping[str, str]]]) -> Check:
    """Judge measured calls, given as (line, columns); a row that cannot be used is kept with its reason."""
    found = device_named(device)
    rows, skipped = list[CheckedRow](), list[Skipped]()
    for line, record in records:
        try:
            rows.append(_checked(found, line, record))
        except RidgelineError as error:
            skipped.append(Skipped(line, str(error), ",".join(str(value) for value in record.values())))
    if not rows:
        reason = f"; the first: line {skipped[0].line}: {skipped[0].reason}" if skipped else ""
        raise InputError(f"no row of the measurements can be used ({len(skipped)} skipped){reason}")
    return Check(found.name, tuple(rows), tuple(skipped))


def _checked(device: Device, line: int, record: Mapping[str, str]) -> CheckedRow:
    measured_s, shape = _measured_s(record["measured_s"]), _shape(record["shape"])
    cache = (record.get("cache") or "").strip().lower()
    call = call_of(record["kind"], record["dtype"], record["phase"], record["library"], shape)
    try:
        time = time_of(device, call, cache or None)
    except KeyError as error:
        raise InputError(f"{call.kind} needs {error.args[0]} in its shape") from None
    return CheckedRow(
        line,
        call.kind,
        dtype_named(record["dtype"].strip()).name,
        call.phase,
        call.library,
        record["shape"].strip(),
        cache or "as calibrated",
        measured_s,
        time.expected_s,
        time.low_s,
        time.high_s,
        time.floor_s,
        abs(time.expected_s / measured_s - 1.0),
        time.low_s <= measured_s <= time.high_s,
    )


def _measured_s(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"measured_s={text!r} is not a number of seconds") from None
    if not (value > 0 and math.isfinite(value)):
        raise InputError(f"measured_s={text} is not a positive time")
    return value


def _shape(text: str) -> dict[str, str]:
    dims: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value) or key in dims:
            raise InputError(f"cannot read {part!r} in shape {text!r}: write m=…;n=…;k=…, each once")
        dims[key] = value
    if not dims:
        raise InputError("the shape is empty: write m=…;n=…;k=…")
    return dims
