"""Canonical names for ops in FX graphs: functions, methods and operators alike."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx


@dataclass(frozen=True, slots=True)
class Call:
    """A node read as an op: its canonical name and its arguments by name, without omitted defaults."""

    op: str
    given: dict[str, Any]
    node: fx.Node

    def __getitem__(self, name: str) -> Any:
        return self.given[name]

    def get(self, name: str, default: Any = None) -> Any:
        found = self.given.get(name, default)
        return default if found is None else found


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A conversion as a function, for rewrites to insert."""
    return x.to(dtype)


_functions: dict[Any, tuple[str, tuple[str, ...]]] = {}
_methods: dict[str, tuple[str, tuple[str, ...]]] = {}


def _spell(op: str, names: str, *targets: Any) -> None:
    """Register targets that mean ``op`` with these arguments in this order; a star takes all that follow."""
    for target in targets:
        table: dict[Any, Any] = _methods if isinstance(target, str) else _functions
        if target is not None:
            table.setdefault(target, (op, tuple(names.split())))


def _both(op: str, names: str, *more: Any) -> None:
    """Register an op that exists as a function of torch and as a method with the same name and arguments."""
    _spell(op, names, op, getattr(torch, op, None), getattr(torch.Tensor, op, None), *more)


for _name, _operator in (
    ("add", operator.add), ("sub", operator.sub), ("mul", operator.mul), ("div", operator.truediv),
    ("pow", operator.pow), ("matmul", operator.matmul),
):  # fmt: skip
    _both(_name, {"add": "input other alpha", "sub": "input other alpha"}.get(_name, "input other"), _operator)
_spell("mul", "input other", "multiply", torch.multiply)
_spell("sub", "input other alpha", "subtract", torch.subtract)
_spell("div", "input other", "divide", torch.divide, "true_divide", torch.true_divide)
_spell("rsub", "input other alpha", torch.rsub, "__rsub__")
_spell("neg", "input", "neg", torch.neg, operator.neg, "negative", torch.negative)
for _name in "square rsqrt sqrt reciprocal exp sigmoid tanh erf log abs cos sin logical_not".split():
    _both(_name, "input")
_spell("abs", "input", abs, operator.abs)
_spell("not", "input", operator.invert, torch.bitwise_not, "bitwise_not")
_spell("logical_not", "input", "logical_not", torch.logical_not)
_spell("and", "input other", operator.and_, torch.bitwise_and, "bitwise_and", torch.logical_and, "logical_and")
for _name in ("and", "or"):
    _spell(_name, "input other", f"__{_name}__", getattr(torch.Tensor, f"__{_name}__"))
_spell("or", "input other", operator.or_, torch.bitwise_or, "bitwise_or", torch.logical_or, "logical_or")
for _name, _operator in (
    ("eq", operator.eq), ("ne", operator.ne), ("lt", operator.lt), ("le", operator.le),
    ("gt", operator.gt), ("ge", operator.ge),
):  # fmt: skip
    _both(_name, "input other", _operator)
    _spell(_name, "input other", f"__{_name}__", getattr(torch.Tensor, f"__{_name}__"))  # torch 2.11 traces these
for _name, _method in (
    ("add", "add"), ("sub", "sub"), ("mul", "mul"), ("div", "truediv"), ("pow", "pow"), ("matmul", "matmul"),
):  # fmt: skip
    _spell(_name, "input other", f"__{_method}__", getattr(torch.Tensor, f"__{_method}__"))
for _name, _method in (("abs", "abs"), ("neg", "neg"), ("not", "invert")):
    _spell(_name, "input", f"__{_method}__", getattr(torch.Tensor, f"__{_method}__"))
for _name in ("add", "mul"):  # reflected operators commute
    _spell(_name, "input other", f"__r{_name}__", getattr(torch.Tensor, f"__r{_name}__"))
_both("mean", "input dim keepdim dtype")
_both("sum", "input dim keepdim dtype")
_both("var", "input dim correction keepdim")
_both("std", "input dim correction keepdim")
_both("logsumexp", "input dim keepdim")
_both("amax", "input dim keepdim")
_both("amin", "input dim keepdim")
_both("argmax", "input dim keepdim")
_both("argmin", "input dim keepdim")
_both("max", "input dim keepdim")
_both("min", "input dim keepdim")
_both("topk", "input k dim largest sorted")
_both("sort", "input dim descending stable")
_both("argsort", "input dim descending stable")
_spell("linalg_norm", "input ord dim keepdim dtype", torch.linalg.vector_norm)
_spell("linear", "input weight bias", F.linear, torch._C._nn.linear)
_spell("bmm", "input other", torch.bmm, "bmm")
_spell("baddbmm", "input batch1 batch2 beta alpha", torch.baddbmm, "baddbmm")
_spell("mm", "input other", torch.mm, "mm")
_spell("mv", "input other", torch.mv, "mv")
_spell("addmm", "bias input other", torch.addmm)
_spell("conv1d", "input weight bias stride padding dilation groups", F.conv1d, torch.conv1d)
_spell("conv2d", "input weight bias stride padding dilation groups", F.conv2d, torch.conv2d)
_spell("conv3d", "input weight bias stride padding dilation groups", F.conv3d, torch.conv3d)
_spell(
    "conv_transpose2d", "input weight bias stride padding output_padding groups dilation",
    F.conv_transpose2d, torch.conv_transpose2d,
)  # fmt: skip
for _name, _call in (("conv_transpose1d", F.conv_transpose1d), ("conv_transpose3d", F.conv_transpose3d)):
    _spell(_name, "input weight bias stride padding output_padding groups dilation", _call, getattr(torch, _name))
_spell("batch_norm", "input running_mean running_var weight bias training momentum eps", F.batch_norm)
_spell(
    "instance_norm", "input running_mean running_var weight bias use_input_stats momentum eps", F.instance_norm
)
_spell("layer_norm", "input normalized_shape weight bias eps", F.layer_norm, torch.layer_norm)
_spell("rms_norm", "input normalized_shape weight eps", F.rms_norm, getattr(torch, "rms_norm", None))
_spell("group_norm", "input num_groups weight bias eps", F.group_norm, torch.group_norm)
_spell("softmax", "input dim _stacklevel dtype", F.softmax)
_spell("softmax", "input dim dtype", torch.softmax, "softmax", torch.special.softmax)
_spell("log_softmax", "input dim _stacklevel dtype", F.log_softmax)
_spell("log_softmax", "input dim dtype", torch.log_softmax, "log_softmax")
_spell("silu", "input inplace", F.silu, getattr(torch._C._nn, "silu", None))
_spell("gelu", "input approximate", F.gelu, torch._C._nn.gelu)
_spell("relu", "input inplace", F.relu)
_spell("relu", "input", torch.relu, "relu")
_spell("leaky_relu", "input negative_slope inplace", F.leaky_relu, torch._C._nn.leaky_relu)
_spell("hardtanh", "input min_val max_val inplace", F.hardtanh)
for _name in "mish hardswish hardsigmoid relu6".split():
    _spell(_name, "input inplace", getattr(F, _name))
_spell("softplus", "input beta threshold", F.softplus)
_spell("glu", "input dim", F.glu, torch._C._nn.glu)
_spell("dropout", "input p training inplace", F.dropout, F.alpha_dropout, F.feature_alpha_dropout)
_spell("dropout", "input p training inplace", F.dropout1d, F.dropout2d, F.dropout3d)
_spell("dropout", "input p training", torch.dropout, torch.feature_dropout, torch.alpha_dropout)
_spell("embedding", "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse", F.embedding)
_spell(
    "embedding_bag",
    "input weight offsets max_norm norm_type scale_grad_by_freq mode sparse per_sample_weights include_last_offset"
    " padding_idx",
    F.embedding_bag,
)
_spell(
    "attention", "query key value attn_mask dropout_p is_causal scale enable_gqa",
    F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention,
)  # fmt: skip
_spell(
    "cross_entropy", "input target weight size_average ignore_index reduce reduction label_smoothing", F.cross_entropy
)
_spell("cat", "tensors dim", torch.cat, torch.concat, torch.concatenate)
_spell("stack", "tensors dim", torch.stack)
_spell("chunk", "input chunks dim", torch.chunk, "chunk")
_spell("split", "input split_size dim", torch.split, "split", torch.functional.split)
_spell("split", "input split_size dim", torch.split_with_sizes, "split_with_sizes")
_spell("unbind", "input dim", torch.unbind, "unbind")
_spell("getitem", "input index", operator.getitem, "__getitem__")
_spell("transpose", "input dim0 dim1", torch.transpose, "transpose", torch.swapaxes, "swapaxes", "swapdims")
_spell("transpose", "input dim0 dim1", torch.swapdims)
_spell("t", "input", torch.t, "t")
_spell("mT", "input", torch.adjoint, "adjoint")
_spell("permute", "input *dims", "permute", torch.permute)
_spell("view", "input *shape", "view")
_spell("reshape", "input *shape", "reshape", torch.reshape)
_spell("expand", "input *shape", "expand")
_spell("repeat_interleave", "input repeats dim", torch.repeat_interleave, "repeat_interleave")
_spell("repeat", "input *repeats", "repeat")
_spell("flatten", "input start_dim end_dim", torch.flatten, "flatten")
_spell("unflatten", "input dim sizes", torch.unflatten, "unflatten")
_spell("unsqueeze", "input dim", torch.unsqueeze, "unsqueeze")
_spell("squeeze", "input dim", torch.squeeze, "squeeze")
_spell("contiguous", "input memory_format", "contiguous")
_spell("clone", "input memory_format", "clone", torch.clone)
_spell("detach", "input", "detach", torch.detach)
_spell("to", "input *to", "to", cast, "type")
_spell("type_as", "input other", "type_as")
for _name in "float half bfloat16 double bool int long".split():
    _spell(_name, "input memory_format", _name)
_spell("masked_fill", "input mask value", "masked_fill", torch.masked_fill)
_spell("where", "condition input other", torch.where)
_spell("where", "input condition other", "where")
_spell("tril", "input diagonal", torch.tril, "tril")
_spell("triu", "input diagonal", torch.triu, "triu")
_spell("diag", "input diagonal", torch.diag, "diag")
_spell("diag_embed", "input offset dim1 dim2", torch.diag_embed, "diag_embed")
_spell("pad", "input pad mode value", F.pad, getattr(torch._C._nn, "pad", None))
_spell("diff", "input n dim prepend append", torch.diff, "diff")
_spell("cumsum", "input dim dtype", torch.cumsum, "cumsum")
_spell("cumprod", "input dim dtype", torch.cumprod, "cumprod")
_spell("narrow", "input dim start length", torch.narrow, "narrow")
_spell("select", "input dim index", torch.select, "select")
_spell("norm", "input p dim keepdim dtype", torch.norm, "norm", torch.functional.norm)
_spell(
    "max_pool", "input kernel_size stride padding dilation ceil_mode return_indices",
    F.max_pool1d, F.max_pool2d, F.max_pool3d, torch.max_pool1d, torch.max_pool2d, torch.max_pool3d,
)  # fmt: skip
_spell("avg_pool", "input kernel_size stride padding ceil_mode count_include_pad divisor_override",
       F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)  # fmt: skip
_spell("adaptive_avg_pool", "input output_size", F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d,
       torch.adaptive_avg_pool1d)  # fmt: skip
_spell("interpolate", "input size scale_factor mode align_corners recompute_scale_factor antialias", F.interpolate)
_spell("flip", "input *dims", torch.flip, "flip")
for _name in "minimum maximum remainder floor_divide fmod logical_xor bitwise_xor".split():
    _both(_name, "input other")
_spell("remainder", "input other", operator.mod, "__mod__", torch.Tensor.__mod__)
_spell("floor_divide", "input other", operator.floordiv, "__floordiv__", torch.Tensor.__floordiv__)
_both("clamp", "input min max")
_both("all", "input dim keepdim")
_both("any", "input dim keepdim")
for _name in "new_ones new_zeros new_full".split():
    _spell(_name, "input *size", _name)
for _name in "ones_like zeros_like full_like".split():
    _spell(_name, "input fill_value", getattr(torch, _name))
for _name in "view_as_real view_as_complex".split():
    _spell(_name, "input", getattr(torch, _name))
_spell("dot_einsum", "equation *operands", torch.einsum, torch.functional.einsum)

FLOATS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}
CASTS = FLOATS | {"bool": torch.bool, "int": torch.int32, "long": torch.int64}


def call(node: Any) -> Call | None:
    """The node as an op with named arguments; None for unknown ops, in-place ops and ``out=``."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return None
    if "out" in node.kwargs:
        return None
    if node.target is getattr:
        return _attribute(node)
    table: dict[Any, Any] = _methods if node.op == "call_method" else _functions
    try:
        found = table.get(node.target)
    except TypeError:
        return None
    return None if found is None else _named(found[0], found[1], node)


def _attribute(node: fx.Node) -> Call | None:
    """Attributes such as ``x.mT``, which are traced as ``getattr``."""
    op = {"mT": "mT", "T": "t"}.get(str(node.args[1])) if len(node.args) == 2 else None
    value = node.meta.get("example_value")
    if op is None or not isinstance(value, torch.Tensor) or value.is_complex() or (op == "t" and value.dim() != 2):
        return None
    return Call(op, {"input": node.args[0]}, node)


def _named(op: str, names: tuple[str, ...], node: fx.Node) -> Call | None:
    given: dict[str, Any] = {}
    for position, value in enumerate(node.args):
        if position >= len(names):
            return None
        if names[position].startswith("*"):
            rest = node.args[position:]
            given[names[position][1:]] = _flat(rest)
            break
        given[names[position]] = value
    for name, value in node.kwargs.items():
        given[_synonym(name)] = value
    if given.get("inplace") is True:
        return None
    return Call("rounded_div" if given.get("rounding_mode") is not None else op, given, node)


def _flat(rest: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(rest[0]) if len(rest) == 1 and isinstance(rest[0], (tuple, list, torch.Size)) else rest


_SYNONYMS = {
    "x": "input", "axis": "dim", "keepdims": "keepdim", "exponent": "other", "mat2": "other", "vec": "other",
}  # fmt: skip


def _synonym(name: str) -> str:
    """Map keyword names that differ between a function and a method."""
    return _SYNONYMS.get(name, name)


def cast_target(found: Call) -> torch.dtype | None:
    """The dtype of a call that only converts; None for anything else."""
    if found.op in CASTS:
        return CASTS[found.op]
    if found.op == "type_as":
        value = found["other"].meta.get("example_value") if isinstance(found["other"], fx.Node) else None
        return value.dtype if isinstance(value, torch.Tensor) else None
    if found.op != "to":
        return None
    wanted = [v for v in (*found.get("to", ()), found.given.get("dtype")) if isinstance(v, torch.dtype)]
    return wanted[0] if len(wanted) == 1 else None
