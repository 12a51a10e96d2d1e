"""Recorded ops (name, shapes, dtypes, strides, arguments) as work the cost model can price; no framework needed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ridgeline.cost.work import Site
from ridgeline.graph import TensorType, tensor

#: Kineto's names of element types, in ours.
DTYPES = {
    "float": "fp32", "double": "fp64", "c10::half": "fp16", "c10::bfloat16": "bf16", "half": "fp16",
    "bfloat16": "bf16", "long int": "int64", "long": "int64", "int": "int32", "short int": "int16", "short": "int16",
    "signed char": "int8", "unsigned char": "uint8", "bool": "bool", "c10::float8_e4m3fn": "fp8",
    "c10::float8_e5m2": "fp8_e5m2", "c10::complex<float>": "complex64", "c10::complex<double>": "complex128",
}  # fmt: skip
_COMPARES = frozenset("eq ne lt le gt ge isnan isinf isfinite logical_and logical_or logical_not logical_xor".split())
_POINTWISE = frozenset(
    """add sub mul div neg abs exp log sqrt rsqrt reciprocal pow square sin cos tanh sigmoid relu gelu silu clamp
    clamp_min clamp_max where masked_fill lerp addcmul addcdiv maximum minimum hardtanh hardswish hardsigmoid elu
    leaky_relu softplus threshold gelu_backward silu_backward threshold_backward tanh_backward sigmoid_backward
    hardswish_backward hardsigmoid_backward hardtanh_backward leaky_relu_backward elu_backward native_dropout
    native_dropout_backward tril triu erf floor round sign bitwise_and bitwise_or bitwise_not bitwise_xor fmod
    remainder rsub log1p expm1 exp2 log2 ceil trunc""".split()
) | _COMPARES  # fmt: skip


@dataclass(frozen=True, slots=True)
class Seen:
    """One recorded call: its tensors in their places (None where an argument is no tensor), and other arguments."""

    name: str
    tensors: tuple[TensorType | None, ...]
    lists: tuple[tuple[TensorType, ...], ...]
    touched: tuple[float, ...]
    arguments: tuple[Any, ...]

    def tensor(self, place: int) -> TensorType:
        found = self.tensors[place] if place < len(self.tensors) else None
        if found is None:
            raise LookupError(f"{self.name} has no tensor in place {place}")
        return found

    def has(self, place: int) -> bool:
        return place < len(self.tensors) and self.tensors[place] is not None

    def argument(self, place: int) -> Any:
        if place >= len(self.arguments):
            raise LookupError(f"{self.name} has no argument {place}")
        return self.arguments[place]

    @property
    def ins(self) -> tuple[TensorType, ...]:
        return tuple(t for t in self.tensors if t is not None)


#: In a meaning's attributes: the places of the tensors that are read, where it is not all.
READ = "_read"
#: Generated kernels that may read a part of their operands only.
_PARTIAL = re.compile(r"embedding|index|gather|select|slice|cat|split|scatter|pool|constant_pad|roll")
Meaning = tuple[str, dict[str, Any], Sequence[TensorType]]
Rule = Callable[[Seen], Meaning]
_RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    def register(fn: Rule) -> Rule:
        for name in names.split():
            assert name not in _RULES, name
            _RULES[name] = fn
        return fn

    return register


@lru_cache(maxsize=100_000)
def site_of(
    op: str, shapes: str, dtypes: str, strides: str = "", concrete: str = "", in_lists: str = ""
) -> Site | None:
    """The work of a recorded op; None where the op is not known or too little was recorded to tell.

    ``in_lists`` is the element type of tensors in lists, which recordings leave out.
    """
    found = _rule_of(op)
    if found is None:
        return None
    try:
        seen = _without_out(_seen(base_name(op), shapes, dtypes, strides, concrete, in_lists))
        kind, attrs, outs = found(seen)
        read = attrs.pop(READ, range(len(seen.tensors)))
        places = [place for place in read if seen.tensors[place] is not None]
        ins = tuple(seen.tensor(place) for place in places) + (seen.lists[0] if kind == "copy" and seen.lists else ())
        touched = [seen.touched[place] for place in places]
        touched += [float(one.num_bytes) for one in ins[len(places) :]]
    except (LookupError, ValueError, TypeError, ArithmeticError):
        return None
    return Site(kind, attrs, ins, tuple(outs), tuple(touched), attrs.get("which") == "bwd", "", op)


def _rule_of(op: str) -> Rule | None:
    name = base_name(op)
    if name.startswith(("triton_poi_", "triton_red_", "triton_per_")) and not _PARTIAL.search(name):
        return _generated
    return _RULES.get(name) or (_pointwise if name in _POINTWISE else None)


def base_name(op: str) -> str:
    """``aten::add_`` as ``add``; other namespaces keep theirs."""
    name = op.removeprefix("aten::")
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def known(op: str) -> bool:
    """Whether there is a rule for the op."""
    return _rule_of(op) is not None


# ---------------------------------------------------------------- what was written down


def _seen(name: str, shapes: str, dtypes: str, strides: str, concrete: str, in_lists: str) -> Seen:
    sizes, kinds = _list(shapes), _list(dtypes)
    steps, values = _list(strides), _list(concrete)
    tensors, lists, touched = list[TensorType | None](), list[tuple[TensorType, ...]](), list[float]()
    for i, size in enumerate(sizes):
        kind = str(kinds[i]) if i < len(kinds) else ""
        step = steps[i] if i < len(steps) else None
        made = _tensor(size, kind, step)
        tensors.append(made)
        touched.append(_touched(made, step) if made is not None else 0.0)
        if kind == "TensorList" and isinstance(size, list) and in_lists:
            steps_of = step if isinstance(step, list) and len(step) == len(size) else [None] * len(size)
            made_of = [_listed(one, in_lists, its) for one, its in zip(size, steps_of, strict=True)]
            lists.append(tuple(made_of))
    return Seen(name, tuple(tensors), tuple(lists), tuple(touched), tuple(_value(value) for value in values))


_NUM_ARGUMENTS = {
    name: num
    for num, names in {
        1: "abs neg exp log sqrt rsqrt reciprocal sin cos tanh sigmoid erf floor round sign bitwise_not",
        2: "mul pow maximum minimum mm bmm bitwise_and bitwise_or bitwise_xor fmod tril triu cat",
        3: "add sub rsub clamp index_select",
        4: "addcmul addcdiv gather sum mean",
        5: "addmm baddbmm",
    }.items()
    for name in names.split()
}
"""Arguments of ops that may be given ``out=`` as one more, by their schemas."""


def _without_out(seen: Seen) -> Seen:
    """The op without ``out=``, which recordings list behind its arguments: it is written, not read."""
    num = _NUM_ARGUMENTS.get(seen.name, len(seen.tensors))
    if len(seen.tensors) <= num or seen.tensors[-1] is None:
        return seen
    return replace(seen, tensors=seen.tensors[:num], touched=seen.touched[:num], arguments=seen.arguments[:num])


def _list(text: str) -> list[Any]:
    found = json.loads(text) if text else []
    return found if isinstance(found, list) else []


def _tensor(size: Any, kind: str, step: Any) -> TensorType | None:
    name = DTYPES.get(kind.lower())
    if name is None or not isinstance(size, list) or not all(isinstance(n, int) for n in size):
        return None
    return tensor(tuple(size), name, layout_of(tuple(size), step))


def _listed(size: Any, dtype: str, step: Any) -> TensorType:
    if not isinstance(size, list) or not all(isinstance(n, int) for n in size):
        raise ValueError("a list of tensors without their shapes")
    return tensor(tuple(size), dtype, layout_of(tuple(size), step))


def layout_of(size: tuple[int, ...], step: Any) -> str:
    """The memory layout that strides mean; contiguous where none were recorded."""
    if not isinstance(step, list) or len(step) != len(size) or len(size) < 2:
        return "contiguous"
    real = [(n, s) for n, s in zip(size, step, strict=True) if n > 1]
    want, dense = 1, []
    for n, _ in reversed(real):
        dense.append(want)
        want *= n
    if [s for _, s in real] == dense[::-1]:
        return "contiguous"
    if len(size) in (4, 5) and size[1] > 1 and step[1] == 1 and _is_dense(real):
        return "channels_last"
    return "transposed" if _is_dense(real) and step[-1] != 1 else "strided"


def _is_dense(real: list[tuple[int, int]]) -> bool:
    want = 1
    for n, s in sorted(real, key=lambda pair: pair[1]):
        if s != want:
            return False
        want *= n
    return True


def _touched(made: TensorType, step: Any) -> float:
    """Bytes read of a tensor: a broadcast view reads its storage, not its shape."""
    if not isinstance(step, list) or len(step) != len(made.shape):
        return float(made.num_bytes)
    real = math.prod(n for n, s in zip(made.shape, step, strict=True) if s != 0)
    return float(real * made.dtype.itemsize)


def _value(text: Any) -> Any:
    """A recorded argument: a number, a flag, a list of them, or nothing."""
    word = str(text).strip()
    if word in ("", "None"):
        return None
    if word in ("True", "False"):
        return word == "True"
    if word.startswith("["):
        inner = word.strip("[]").split(",")
        return [_value(part) for part in inner if part.strip()]
    try:
        return int(word)
    except ValueError:
        return float(word)


# ---------------------------------------------------------------- products


def _product(b: int, a: TensorType, w: TensorType, **more: Any) -> Meaning:
    m, k, n = a.shape[-2], a.shape[-1], w.shape[-1]
    attrs = {
        "b": b,
        "m": m,
        "n": n,
        "k": k,
        "trans_a": a.layout == "transposed",
        "trans_b": w.layout == "transposed",
        **more,
    }
    out = tensor((b, m, n) if b > 1 else (m, n), a.dtype)
    return "matmul", attrs, (out,)


@rule("mm _int_mm _scaled_mm")
def _mm(seen: Seen) -> Meaning:
    return _product(1, seen.tensor(0), seen.tensor(1))


@rule("addmm _addmm_activation")
def _addmm(seen: Seen) -> Meaning:
    return _product(1, seen.tensor(1), seen.tensor(2), bias=True)


@rule("bmm")
def _bmm(seen: Seen) -> Meaning:
    return _product(seen.tensor(0).shape[0], seen.tensor(0), seen.tensor(1))


@rule("baddbmm")
def _baddbmm(seen: Seen) -> Meaning:
    return _product(seen.tensor(1).shape[0], seen.tensor(1), seen.tensor(2), accumulate=True)


@rule("convolution cudnn_convolution _convolution")
def _conv(seen: Seen) -> Meaning:
    x, w = seen.tensor(0), seen.tensor(1)
    cudnn = seen.name == "cudnn_convolution"
    padding, stride, dilation = (
        (seen.argument(2), seen.argument(3), seen.argument(4))
        if cudnn
        else (seen.argument(4), seen.argument(3), seen.argument(5))
    )
    groups, transposed = (seen.argument(5), False) if cudnn else (seen.argument(8), seen.argument(6))
    spatial = tuple(
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(x.shape[2:], w.shape[2:], stride, padding, dilation, strict=True)
    )
    if transposed:
        raise ValueError("the output of a transposed convolution is not recorded")
    y = tensor((x.shape[0], w.shape[0], *spatial), x.dtype, x.layout)
    return "conv", _conv_attrs(x, w, y, stride, groups) | {"which": "fwd", "bias": False}, (y,)


@rule("convolution_backward")
def _conv_backward(seen: Seen) -> Meaning:
    y, x, w = seen.tensor(0), seen.tensor(1), seen.tensor(2)
    wanted = [bool(flag) for flag in seen.argument(10)]
    grads = [name for name, flag in zip(("input", "weight", "bias"), wanted, strict=True) if flag]
    outs = [made for made, flag in zip((x, w), wanted, strict=False) if flag]
    attrs = _conv_attrs(x, w, y, seen.argument(4), seen.argument(9)) | {"transposed": bool(seen.argument(7))}
    return "conv", attrs | {"which": "bwd", "grads": grads, "bias": False}, outs or (x,)


def _conv_attrs(x: TensorType, w: TensorType, y: TensorType, stride: list[int], groups: int) -> dict[str, Any]:
    last = "channels_last" in (x.layout, w.layout)
    return {
        "n": x.shape[0], "c": x.shape[1], "o": y.shape[1], "spatial": list(x.shape[2:]),
        "out_spatial": list(y.shape[2:]), "kernel": list(w.shape[2:]), "stride": list(stride), "groups": int(groups),
        "transposed": False, "layout": "channels_last" if last else "contiguous",
    }  # fmt: skip


# ---------------------------------------------------------------- attention

#: name: (place of q, heads before length, library, which argument says causal, or -1)
_ATTENTION = {
    "_flash_attention_forward": (0, False, "fa2", 8),
    "_flash_attention_backward": (1, False, "fa2", 11),
    "_efficient_attention_forward": (0, False, "efficient", 9),
    "_efficient_attention_backward": (1, False, "efficient", 14),
    "_cudnn_attention_forward": (0, True, "cudnn", 10),
    "_cudnn_attention_backward": (1, True, "cudnn", 14),
}


@rule(" ".join(_ATTENTION))
def _attention(seen: Seen) -> Meaning:
    at, heads_first, backend, causal = _ATTENTION[seen.name]
    q, k, v = (seen.tensor(at + i) for i in range(3))
    if len(q.shape) == 3:  # sequences one behind the other: of equal lengths they are the least work
        num = seen.tensor(6 if at else 3).numel - 1
        attrs = {
            "b": num, "h": q.shape[1], "hkv": k.shape[1], "s": q.shape[0] // num, "skv": k.shape[0] // num,
            "d": q.shape[2], "dv": v.shape[2], "causal": bool(seen.argument(causal)), "mask": False, "dropout": 0.0,
            "backend": backend,
        }  # fmt: skip
        return "attention", attrs | ({"which": "bwd"} if at else {}), (q, k, v) if at else (q,)
    h, s = (1, 2) if heads_first else (2, 1)
    bias_at = 3 if at == 0 else (8 if backend == "cudnn" else 4)
    attrs = {
        "b": q.shape[0], "h": q.shape[h], "hkv": k.shape[h], "s": q.shape[s], "skv": k.shape[s], "d": q.shape[-1],
        "dv": v.shape[-1], "causal": bool(seen.argument(causal)), "mask": backend != "fa2" and seen.has(bias_at),
        "dropout": 0.0, "backend": backend,
    }  # fmt: skip
    if at:
        return "attention", attrs | {"which": "bwd"}, (q, k, v)
    return "attention", attrs, (tensor((*q.shape[:-1], v.shape[-1]), q.dtype),)


# ---------------------------------------------------------------- rows


@rule("native_layer_norm _fused_rms_norm")
def _row_norm(seen: Seen) -> Meaning:
    x, c = seen.tensor(0), math.prod(seen.argument(1))
    fn = "rms_norm" if "rms" in seen.name else "layer_norm"
    return "norm", {"fn": fn, "n": x.numel // max(c, 1), "c": c, "affine": seen.has(2)}, (x,)


@rule("native_layer_norm_backward _fused_rms_norm_backward")
def _row_norm_backward(seen: Seen) -> Meaning:
    x, c = seen.tensor(1), math.prod(seen.argument(2))
    fn = "rms_norm" if "rms" in seen.name else "layer_norm"
    attrs = {"fn": fn, "n": x.numel // max(c, 1), "c": c, "affine": True, "which": "bwd", "grads": ["input", "weight"]}
    return "norm", attrs, (x,)


@rule("native_batch_norm cudnn_batch_norm")
def _batch_norm(seen: Seen) -> Meaning:
    x = seen.tensor(0)
    return "norm", _batch_norm_attrs(x, bool(seen.argument(5))), (x,)


@rule("native_batch_norm_backward cudnn_batch_norm_backward")
def _batch_norm_backward(seen: Seen) -> Meaning:
    x = seen.tensor(0 if seen.name.startswith("cudnn") else 1)
    return "norm", _batch_norm_attrs(x, True) | {"which": "bwd"}, (x,)


def _batch_norm_attrs(x: TensorType, training: bool) -> dict[str, Any]:
    channels = x.shape[1]
    return {"fn": "batch_norm", "n": channels, "c": x.numel // max(channels, 1), "channels": channels,
            "training": training, "layout": x.layout, "affine": True}  # fmt: skip


@rule("_softmax _log_softmax")
def _softmax(seen: Seen) -> Meaning:
    return _softmax_of(seen, int(seen.argument(1)), {})


@rule("_softmax_backward_data _log_softmax_backward_data")
def _softmax_backward(seen: Seen) -> Meaning:
    return _softmax_of(seen, int(seen.argument(2)), {"which": "bwd"})


def _softmax_of(seen: Seen, dim: int, more: dict[str, Any]) -> Meaning:
    x = seen.tensor(0)
    c = x.shape[dim]
    inner = math.prod(x.shape[dim % len(x.shape) + 1 :])
    attrs = {"n": x.numel // max(c, 1), "c": c, "log": "log" in seen.name, "inner": inner, **more}
    return "softmax", attrs, (x,)


@rule("nll_loss_forward nll_loss_backward")
def _nll(seen: Seen) -> Meaning:
    backward = seen.name.endswith("backward")
    x = seen.tensor(1 if backward else 0)
    attrs = {"fn": "nll_loss", "n": x.shape[0] if len(x.shape) > 1 else 1, "c": x.shape[-1]}
    return "loss", attrs, (tensor((), x.dtype),)  # the zeros of a gradient are filled in by an op of their own


@rule("sum mean amax amin prod any all linalg_vector_norm argmax argmin var logsumexp")
def _reduce(seen: Seen) -> Meaning:
    x = seen.tensor(0)
    place = 2 if seen.name == "linalg_vector_norm" else 1
    dims = seen.arguments[place] if place < len(seen.arguments) else None
    listed = [dims] if type(dims) is int else dims if isinstance(dims, list) else None
    chosen = sorted(int(d) % max(len(x.shape), 1) for d in listed) if listed else list(range(len(x.shape)))
    left = tuple(n for i, n in enumerate(x.shape) if i not in chosen)
    kind = "int64" if seen.name.startswith("arg") else "bool" if seen.name in ("any", "all") else x.dtype
    return "reduce", {"fn": seen.name, "dims": chosen, "keepdim": False}, (tensor(left, kind),)


@rule("embedding")
def _embedding(seen: Seen) -> Meaning:
    table, index = seen.tensor(0), seen.tensor(1)
    attrs = {"rows": table.shape[0], "cols": table.shape[1], "num": index.numel}
    return "embedding", attrs, (tensor((*index.shape, table.shape[1]), table.dtype),)


@rule("embedding_dense_backward")
def _embedding_backward(seen: Seen) -> Meaning:
    grad, index, rows = seen.tensor(0), seen.tensor(1), int(seen.argument(2))
    rows = min(rows, index.numel)  # an op of its own zeroes the table, and has a price of its own
    attrs = {"rows": rows, "cols": grad.shape[-1], "num": index.numel, "which": "bwd"}
    return "embedding", attrs, (tensor((rows, grad.shape[-1]), grad.dtype),)


@rule("index_select gather")
def _gather(seen: Seen) -> Meaning:
    table, dim, index = seen.tensor(0), int(seen.argument(1)), seen.tensor(2)
    shape = list(table.shape)
    if seen.name == "gather":
        shape = list(index.shape)
    else:
        shape[dim] = index.numel
    out = tensor(tuple(shape), table.dtype)
    return "gather", {"fn": seen.name, "num": out.numel, "dim": dim % max(len(table.shape), 1)}, (out,)


# ---------------------------------------------------------------- streams


def _pointwise(seen: Seen) -> Meaning:
    ins = [t for t in seen.ins if t.shape] or list(seen.ins)
    if not ins:
        raise LookupError(f"{seen.name} has no tensors")
    kinds = [t.dtype for t in ins if t.dtype.family == "float"] or [ins[0].dtype]
    kind = max(kinds, key=lambda d: d.bits)
    rank = max(len(t.shape) for t in ins)
    padded = [(1,) * (rank - len(t.shape)) + t.shape for t in ins]
    out = tensor(
        tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*padded, strict=True)),
        "bool" if seen.name in _COMPARES else kind,
        ins[0].layout,
    )
    fn = "dropout" if seen.name == "native_dropout" else seen.name
    return "pointwise", {"fn": fn}, (out,)


@rule("copy")
def _copy(seen: Seen) -> Meaning:
    target, source = seen.tensor(0), seen.tensor(1)
    attrs: dict[str, Any] = {"fn": "copy" if source.dtype == target.dtype else "to", READ: (1,)}
    if source.layout != target.layout:
        attrs["transposed"] = True
    return "copy", attrs, (target,)


@rule("fill zero")
def _fill(seen: Seen) -> Meaning:
    return "fill", {"fn": seen.name, READ: ()}, (seen.tensor(0),)


@rule("cat")
def _cat(seen: Seen) -> Meaning:
    parts, dim = seen.lists[0], int(seen.argument(1))
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return "copy", {"fn": "cat", "dim": dim % len(shape)}, (tensor(tuple(shape), parts[0].dtype),)


@rule("_fused_adamw _fused_adam")
def _adamw(seen: Seen) -> Meaning:
    # Tensors of the first list; recordings leave long lists out
    if not seen.lists or not seen.lists[0]:
        raise LookupError(f"the tensors of {seen.name} were not recorded")
    params = seen.lists[0]
    attrs = {"fn": "adamw", "num_tensors": len(params), "numel": sum(one.numel for one in params)}
    return "optimizer", attrs, params


@rule("_foreach_add _foreach_mul _foreach_lerp _foreach_sqrt _foreach_div _foreach_addcmul _foreach_addcdiv")
def _foreach(seen: Seen) -> Meaning:
    first = seen.lists[0]
    attrs = {
        "fn": seen.name.removeprefix("_foreach_"),
        "num_tensors": len(first),
        "reads": len(seen.lists),
        "writes": 1,
    }
    return "foreach", attrs | {"numel": sum(one.numel for one in first)}, first


def _generated(seen: Seen) -> Meaning:
    """A kernel of the compiler's: every operand once, the last one written; what it computes costs next to nothing."""
    tensors = [t for t in seen.ins if t.shape]
    if not tensors:
        raise LookupError(f"{seen.name} has no tensors")
    total = sum(touched for touched, t in zip(seen.touched, seen.tensors, strict=True) if t is not None)
    written = float(tensors[-1].num_bytes)
    attrs = {"name": "generated", "flops": 0.0, "read_bytes": max(0.0, total - written), "written_bytes": written}
    return "custom", attrs, (tensors[-1],)


@rule("max_pool2d_with_indices")
def _pool(seen: Seen) -> Meaning:
    x, kernel, stride, padding = seen.tensor(0), seen.argument(1), seen.argument(2), seen.argument(3)
    spatial = tuple((n + 2 * p - k) // s + 1 for n, k, s, p in zip(x.shape[-2:], kernel, stride, padding, strict=True))
    out = tensor((*x.shape[:-2], *spatial), x.dtype, x.layout)
    return "pool", {"fn": "max_pool2d", "kernel": list(kernel)}, (out,)


def copied(num_bytes: int, *, pinned: bool) -> Site:
    """A copy between host and device, from its bytes alone."""
    moved = tensor((num_bytes,), "uint8")
    return Site("transfer", {"pinned": pinned}, (moved,), (moved,), (float(num_bytes),), False)
