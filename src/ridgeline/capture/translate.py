"""ATen calls translated to the graph's vocabulary: which op a dispatch is, and the problem it poses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ridgeline.errors import CaptureError

Attrs = dict[str, Any]
Meaning = tuple[str, Attrs]


@dataclass(slots=True)
class Call:
    """One dispatch with its tensors: what a rule looks at."""

    name: str  # base name without namespace, overload and trailing underscore
    overload: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ins: list[torch.Tensor]
    outs: list[torch.Tensor]

    def arg(self, index: int, keyword: str, default: Any = None) -> Any:
        if index < len(self.args):
            return self.args[index]
        return self.kwargs.get(keyword, default)


class UnknownOp(CaptureError):
    """An operator that is neither in the vocabulary's table nor declared by its owner."""

    def __init__(self, op_name: str, module: str, source: str) -> None:
        where = f"module {module or '(top level)'!r}" + (f", {source}" if source else "")
        super().__init__(
            f"no meaning known for operator {op_name!r} called in {where}: "
            f"declare what it costs with @ridgeline.cost_of({op_name!r})"
        )
        self.op_name, self.module, self.source = op_name, module, source


Rule = Callable[[Call], Meaning]
_RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    """Register a rule for the base names given, each once."""

    def register(fn: Rule) -> Rule:
        for name in names.split():
            assert name not in _RULES, name
            _RULES[name] = fn
        return fn

    return register


def fixed(names: str, op: str, **attrs: Any) -> None:
    """Names whose meaning is their own name as ``fn`` and nothing more."""

    def meaning(call: Call) -> Meaning:
        return op, {"fn": call.name, **attrs}

    rule(names)(meaning)


def meaning_of(func: Any) -> Rule | None:
    """The rule of an overload: by name, else by what its schema and tags say; None when nobody knows."""
    return _meaning_of(func)


@cache
def _meaning_of(func: Any) -> Rule | None:
    name = base_name(func)
    found = _RULES.get(name)
    if found is not None and func.namespace in ("aten", "prims", "ridgeline", "prim"):
        return found
    if func.namespace in ("_c10d_functional", "c10d"):
        return _wait if name == "wait_tensor" else _collective
    if func.namespace != "aten":
        return None
    if name.startswith("_foreach_"):
        return _foreach
    if is_view(func) or torch.Tag.inplace_view in func.tags:
        return _view
    if _is_pointwise(func, name):
        return _pointwise
    if name.startswith(("linalg_", "_linalg_")):
        return _linalg
    if name.endswith(("_backward", "_backward_data")) and base_of_backward(name) in _POINTWISE:
        return _pointwise
    return None


def _is_pointwise(func: Any, name: str) -> bool:
    """By the tag of the overload or, where an in-place form lacks it, of any overload of the plain one."""
    if torch.Tag.pointwise in func.tags or name in _POINTWISE:
        return True
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())


def base_of_backward(name: str) -> str:
    return name.removesuffix("_data").removesuffix("_backward")


@cache
def base_name(func: Any) -> str:
    """``aten::add_.Tensor`` → ``add``; ``aten::_foreach_add_.List`` → ``_foreach_add``."""
    name = func._schema.name.split("::")[1]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


@cache
def is_view(func: Any) -> bool:
    """Whether the overload only hands out another look at its first tensor's storage."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


@cache
def is_composite(func: Any) -> bool:
    """Whether eager PyTorch never runs this op as one, but as others."""
    if func.namespace != "aten" or not func._can_decompose():
        return False
    return not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CPU")


@cache
def is_mutable(func: Any) -> bool:
    return bool(func._schema.is_mutable)


# --- shapes ---------------------------------------------------------------------------------------------------------


def column_major(t: torch.Tensor) -> bool:
    """Whether the last two dims are stored transposed, as a GEMM library sees it."""
    rows, cols = t.stride()[-2:]
    return bool(rows == 1 and cols != 1 and t.shape[-1] > 1)


def _normal_dims(dims: Any, ndim: int) -> list[int]:
    if dims is None or dims == []:
        return list(range(ndim))
    listed = [dims] if isinstance(dims, int) else list(dims)
    return sorted(d % max(ndim, 1) for d in listed)


def _rows(t: torch.Tensor, dim: int) -> tuple[int, int, int]:
    """(independent rows, their length, stride in elements) of a tensor seen along ``dim``."""
    if t.dim() == 0:
        return 1, 1, 1
    length = int(t.shape[dim])
    inner = math.prod(t.shape[dim % t.dim() + 1 :])
    return (t.numel() // length if length else 0), length, inner


def _element_order(t: torch.Tensor, dims: list[int] | None = None) -> tuple[int, ...]:
    """Dims longer than one (or those given), from slowest to fastest varying in memory."""
    chosen = [d for d in range(t.dim()) if t.shape[d] > 1] if dims is None else dims
    return tuple(sorted(chosen, key=lambda d: (-t.stride(d), d)))


def _reordered(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether a copy between the two changes which elements are neighbors."""
    if source.dim() != target.dim() or source.dim() < 2 or 0 in source.stride():
        return False
    dims = [d for d in range(source.dim()) if source.shape[d] > 1 and target.shape[d] > 1]
    return _element_order(source, dims) != _element_order(target, dims)


# --- linear algebra -------------------------------------------------------------------------------------------------


def _product(b: int, a: torch.Tensor, w: torch.Tensor, **more: Any) -> Meaning:
    m, k, n = int(a.shape[-2]), int(a.shape[-1]), int(w.shape[-1])
    return "matmul", {"b": b, "m": m, "n": n, "k": k, "trans_a": column_major(a), "trans_b": column_major(w), **more}


@rule("mm _int_mm")
def _mm(call: Call) -> Meaning:
    return _product(1, call.args[0], call.args[1])


def _added(call: Call, out_dim: int) -> Attrs:
    """A vector added is a bias; a whole matrix is an accumulator that is read."""
    added = call.args[0]
    beta = call.kwargs.get("beta", 1)
    if beta == 0:
        return {}
    if added.dim() < out_dim or math.prod(added.shape[:-1]) == 1 or 0 in added.stride():
        return {"bias": True}
    return {"accumulate": True}


@rule("addmm _addmm_activation sspaddmm")
def _addmm(call: Call) -> Meaning:
    more = _added(call, 2)
    if call.name == "_addmm_activation":
        more["epilogue"] = "gelu" if call.kwargs.get("use_gelu") else "relu"
    return _product(1, call.args[1], call.args[2], **more)


@rule("bmm")
def _bmm(call: Call) -> Meaning:
    return _product(int(call.args[0].shape[0]), call.args[0], call.args[1])


@rule("baddbmm")
def _baddbmm(call: Call) -> Meaning:
    return _product(int(call.args[1].shape[0]), call.args[1], call.args[2], **_added(call, 3))


@rule("addbmm")
def _addbmm(call: Call) -> Meaning:
    return _product(int(call.args[1].shape[0]), call.args[1], call.args[2], accumulate=True)


@rule("mv")
def _mv(call: Call) -> Meaning:
    m, k = call.args[0].shape
    return "matmul", {"b": 1, "m": int(m), "n": 1, "k": int(k), "trans_a": column_major(call.args[0])}


@rule("addmv")
def _addmv(call: Call) -> Meaning:
    m, k = call.args[1].shape
    return "matmul", {"b": 1, "m": int(m), "n": 1, "k": int(k), "trans_a": column_major(call.args[1]), "bias": True}


@rule("dot vdot")
def _dot(call: Call) -> Meaning:
    return "matmul", {"b": 1, "m": 1, "n": 1, "k": int(call.args[0].numel())}


@rule("addr")
def _addr(call: Call) -> Meaning:
    m, n = int(call.args[1].numel()), int(call.args[2].numel())
    return "matmul", {"b": 1, "m": m, "n": n, "k": 1, "accumulate": True}


@rule("_scaled_mm _scaled_mm_v2")
def _scaled_mm(call: Call) -> Meaning:
    return _product(1, call.args[0], call.args[1], epilogue="scale")


@rule("_grouped_mm _scaled_grouped_mm")
def _grouped_mm(call: Call) -> Meaning:
    a, w = call.args[0], call.args[1]
    if a.dim() == 3 and w.dim() == 3:
        return _product(int(a.shape[0]), a, w)
    offs = call.arg(2, "offs") if call.name == "_grouped_mm" else call.arg(4, "offs")
    groups = int(w.shape[0]) if w.dim() == 3 else int(a.shape[0]) if a.dim() == 3 else int(offs.shape[0])
    attrs = {"trans_a": column_major(a), "trans_b": column_major(w)}
    if a.dim() == 2 and w.dim() == 2:  # the contracted dim is split among the groups: a weight gradient
        m, n, k = int(a.shape[0]), int(w.shape[1]), int(a.shape[1])
        return "grouped_matmul", {"groups": groups, "m": m, "n": n, "k": k, "which": "reduction", **attrs}
    m = int(a.shape[0]) if a.dim() == 2 else int(a.shape[1]) * 1
    return "grouped_matmul", {
        "groups": groups,
        "m": m,
        "n": int(w.shape[-1]),
        "k": int(a.shape[-1]),
        "which": "rows",
        **attrs,
    }


@rule("convolution _convolution cudnn_convolution convolution_overrideable")
def _convolution(call: Call) -> Meaning:
    x, w, bias = call.args[0], call.args[1], call.args[2]
    stride, padding, dilation, transposed = call.args[3:7]
    groups = int(call.args[8])
    attrs = _conv_attrs(x, w, call.outs[0], stride, padding, dilation, bool(transposed), groups)
    return "conv", {**attrs, "which": "fwd", "bias": bias is not None}


@rule("convolution_backward")
def _convolution_backward(call: Call) -> Meaning:
    grad, x, w, bias_sizes, stride, padding, dilation, transposed, _, groups, mask = call.args[:11]
    attrs = _conv_attrs(x, w, grad, stride, padding, dilation, bool(transposed), int(groups))
    grads = [name for name, wanted in zip(("input", "weight", "bias"), mask, strict=True) if wanted]
    return "conv", {**attrs, "which": "bwd", "grads": grads, "bias": bool(bias_sizes)}


def _conv_attrs(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    groups: int,
) -> Attrs:
    num = w.dim() - 2
    return {
        "n": int(x.shape[0]) if x.dim() == num + 2 else 1, "c": int(x.shape[-num - 1]), "o": int(y.shape[-num - 1]),
        "spatial": list(map(int, x.shape[-num:])), "out_spatial": list(map(int, y.shape[-num:])),
        "kernel": list(map(int, w.shape[2:])), "stride": _spread(stride, num), "padding": _spread(padding, num),
        "dilation": _spread(dilation, num), "groups": groups, "transposed": transposed,
        "layout": "channels_last" if _is_channels_last(x) or _is_channels_last(w) else "contiguous",
    }  # fmt: skip


def _spread(values: Any, num: int) -> list[int]:
    listed = [int(v) for v in values]
    return listed * num if len(listed) == 1 else listed


def _is_channels_last(t: torch.Tensor) -> bool:
    if t.dim() not in (4, 5) or t.shape[1] == 1 or math.prod(t.shape[2:]) == 1:
        return False
    return _element_order(t)[-1:] == (1,)


@rule("attention attention_backward")
def _attention(call: Call) -> Meaning:
    q, k, v, mask = call.args[0:4]
    dropout, causal = call.args[4], call.args[5]
    attrs = {
        "b": math.prod(q.shape[:-3]), "h": int(q.shape[-3]), "hkv": int(k.shape[-3]), "s": int(q.shape[-2]),
        "skv": int(k.shape[-2]), "d": int(q.shape[-1]), "dv": int(v.shape[-1]), "causal": bool(causal),
        "mask": mask is not None, "dropout": float(dropout), "backend": None,
    }  # fmt: skip
    if call.name == "attention_backward":
        attrs |= {"which": "bwd", "bias_grad": bool(call.args[6])}
    return "attention", attrs


@rule("rnn rnn_backward")
def _rnn(call: Call) -> Meaning:
    x = call.args[0]
    cell, hidden, layers, bidirectional, seq, batch = call.args[3:9]
    attrs = {"cell": cell, "layers": int(layers), "hidden": int(hidden), "input": int(x.shape[-1]), "seq": int(seq),
             "batch": int(batch), "bidirectional": bool(bidirectional)}  # fmt: skip
    return "rnn", attrs | ({"which": "bwd"} if call.name == "rnn_backward" else {})


@rule("_fft_r2c _fft_c2r _fft_c2c")
def _fft(call: Call) -> Meaning:
    x, dims = call.args[0], call.args[1]
    real = call.outs[0] if call.name == "_fft_c2r" else x
    length = math.prod(int(real.shape[d]) for d in dims)
    inverse = call.name == "_fft_c2r" or (call.name == "_fft_c2c" and not call.args[3])
    return "fft", {
        "length": length,
        "batch": real.numel() // max(length, 1),
        "real": call.name != "_fft_c2c",
        "inverse": inverse,
    }


@rule(
    "_linalg_svd linalg_qr linalg_inv_ex cholesky linalg_cholesky_ex linalg_eigh _linalg_eigh triangular_solve "
    "linalg_solve_triangular _linalg_det _linalg_slogdet linalg_lu_factor_ex _linalg_solve_ex linalg_lstsq "
    "cholesky_solve cholesky_inverse linalg_householder_product geqrf linalg_matrix_exp linalg_eig linalg_lu_solve "
    "linalg_ldl_factor_ex linalg_pinv linalg_cross ormqr inverse linalg_lu lu_unpack"
)
def _linalg(call: Call) -> Meaning:
    a = call.ins[0]
    n = int(a.shape[-1]) if a.dim() else 1
    square = math.prod(a.shape[-2:]) if a.dim() >= 2 else 1
    return "linalg", {
        "fn": call.name.removeprefix("_").removeprefix("linalg_"),
        "n": n,
        "batch": a.numel() // max(square, 1),
    }


# --- communication ---------------------------------------------------------------------------------------------------


def _collective(call: Call) -> Meaning:
    """Bytes are those of the largest side: gathered or yet to be scattered."""
    sides = [sum(t.numel() * t.element_size() for t in ts) for ts in (call.ins, call.outs)]
    fn = call.name.strip("_").replace("_into_tensor", "").replace("_tensor", "").replace("_coalesced", "")
    return "collective", {"fn": fn, "num_bytes": int(max(sides)), "num_ranks": _num_ranks(call)}


def _num_ranks(call: Call) -> int:
    sizes = [a for a in call.args if isinstance(a, int) and not isinstance(a, bool)]
    names = [a for a in call.args if isinstance(a, str)]
    if sizes and call.name.startswith(("all_gather", "reduce_scatter")):
        return int(sizes[0])
    if not names:
        return int(torch.distributed.get_world_size())
    from torch.distributed.distributed_c10d import _resolve_process_group

    return int(_resolve_process_group(names[-1]).size())


def _wait(call: Call) -> Meaning:
    return "view", {"fn": "wait_tensor"}


# --- memory-bound families ------------------------------------------------------------------------------------------

_POINTWISE = frozenset(
    "threshold gelu silu sigmoid tanh hardtanh leaky_relu elu hardswish hardsigmoid softplus log_sigmoid glu mish "
    "softshrink hardshrink rrelu_with_noise native_dropout prelu logit softsign relu6 celu selu".split()
)

_POINTWISE_NAMES = """
    where masked_fill lerp addcmul addcdiv clamp clamp_min clamp_max log_sigmoid_forward log_sigmoid_backward glu
    glu_backward mish_backward hardtanh elu_backward _masked_scale tril triu isin fmod remainder floor_divide
    gelu gelu_backward silu_backward threshold_backward tanh_backward sigmoid_backward hardswish_backward
    hardsigmoid_backward hardtanh_backward leaky_relu_backward softplus_backward logit_backward softshrink_backward
    hardshrink_backward native_dropout_backward _prelu_kernel _prelu_kernel_backward polar complex bucketize
    searchsorted bitwise_and bitwise_or bitwise_xor bitwise_not __and__ __or__ __xor__ __lshift__ __rshift__ heaviside
    isfinite isnan isinf isposinf isneginf nan_to_num real_if_close angle conj_physical sgn _conj_physical
    _neg_view_copy
    special_entr special_erfcx special_i0e special_i1 special_i1e special_log_ndtr special_ndtri special_xlog1py
    special_zeta polygamma igamma igammac fill_mask renorm frac trunc rsub pow float_power square glu_jvp ldexp
    gelu_quick swiglu masked_fill_backward rrelu_with_noise rrelu_with_noise_backward cross
    _fused_rms_norm_rope index_fill_backward view_as_real_copy nextafter hypot logaddexp logaddexp2 copysign
""".split()


def _pointwise(call: Call) -> Meaning:
    attrs: Attrs = {"fn": call.name}
    scalars = sum(1 for t in call.ins if t.dim() == 0)
    if scalars and call.outs and call.outs[0].dim():
        attrs["scalars"] = scalars
    return "pointwise", attrs


for _name in _POINTWISE_NAMES:
    if _name not in _RULES:
        rule(_name)(_pointwise)


@rule("native_dropout _fused_dropout")
def _dropout(call: Call) -> Meaning:
    return "pointwise", {"fn": "dropout", "rng": True}


def _view(call: Call) -> Meaning:
    return "view", {"fn": call.name}


_LOOKS = """unsafe_split unsafe_chunk unsafe_split_with_sizes _unsafe_view _reshape_alias lift_fresh lift alias detach
    _conj _neg_view _assert_tensor_metadata"""

for _name in _LOOKS.split():
    rule(_name)(_view)


@rule("clone _to_copy copy expand_copy _copy_from _copy_from_and_resize")
def _copy(call: Call) -> Meaning:
    name = call.name
    if name == "copy":
        source, target = call.args[1], call.args[0]
        fn = "copy" if source.dtype == target.dtype else "to"
    else:
        source, target = call.ins[0], call.outs[0]
        fn = "to" if name == "_to_copy" else name
    attrs: Attrs = {"fn": fn}
    if _reordered(source, target):
        attrs["transposed"] = True
    return "copy", attrs


@rule("cat stack concat hstack")
def _cat(call: Call) -> Meaning:
    dim = int(call.arg(1, "dim", 0))
    attrs: Attrs = {"fn": call.name, "dim": dim % max(call.outs[0].dim(), 1)}
    if any(_reordered(t, call.outs[0]) for t in call.ins if t.dim() == call.outs[0].dim()):
        attrs["transposed"] = True
    return "copy", attrs


fixed(
    "constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
    "replication_pad3d reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward "
    "replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward repeat tile roll flip rot90 "
    "im2col col2im pixel_shuffle pixel_unshuffle channel_shuffle slice_scatter select_scatter diagonal_scatter "
    "as_strided_scatter slice_backward select_backward diagonal_backward unfold_backward diag_embed "
    "_pack_padded_sequence _pack_padded_sequence_backward block_diag split_with_sizes_copy split_copy unbind_copy "
    "view_copy permute_copy transpose_copy t_copy slice_copy select_copy squeeze_copy unsqueeze_copy narrow_copy "
    "_chunk_cat unfold_copy as_strided_copy detach_copy alias_copy tril_indices_copy _nested_tensor_from_mask "
    "_reshape_copy resize resize_as resize_output trace_backward _transform_bias_rescale_qkv native_channel_shuffle",
    "copy",
)
fixed("zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full fill zero arange linspace logspace "
      "eye scalar_tensor tril_indices triu_indices empty_strided_zero range fill_diagonal _efficientzerotensor vander",
      "fill")  # fmt: skip
fixed("empty empty_like empty_strided new_empty new_empty_strided empty_permuted set resize_storage", "alloc")
fixed("rand randn rand_like randn_like randint randint_like randperm bernoulli uniform normal multinomial exponential "
      "random log_normal geometric cauchy poisson binomial _standard_gamma _sample_dirichlet normal_functional "
      "_dirichlet_grad", "random")  # fmt: skip


@rule(
    "sum mean amax amin aminmax prod any all norm linalg_vector_norm var var_mean std std_mean logsumexp argmax argmin "
    "count_nonzero nansum nanmean max min median nanmedian mode kthvalue trace dist equal histc bincount "
    "_unique2 unique_dim unique_consecutive var_mean_correction _is_any_true _is_all_true allclose "
    "_histogramdd_from_bin_tensors quantile nanquantile unique"
)
def _reduce(call: Call) -> Meaning:
    x = call.ins[0]
    if call.name in ("max", "min") and len(call.ins) == 2 and not call.overload.startswith("dim"):
        return "pointwise", {"fn": f"{call.name}imum"}
    index = 2 if call.name in ("norm", "linalg_vector_norm", "kthvalue") else 1
    dims = call.arg(index, "dim")
    if not isinstance(dims, (int, list, tuple)) or isinstance(dims, bool):
        dims = None
    keep = call.outs and call.outs[0].dim() == x.dim()
    return "reduce", {"fn": call.name, "dims": _normal_dims(list(dims) if isinstance(dims, tuple) else dims, x.dim()),
                      "keepdim": bool(keep)}  # fmt: skip


def _with_which(attrs: Attrs, call: Call) -> Attrs:
    return {**attrs, "which": "bwd"} if "_backward" in call.name else attrs


@rule("native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward")
def _row_norm(call: Call) -> Meaning:
    backward = call.name.endswith("backward")
    x, shape = (call.args[1], call.args[2]) if backward else (call.args[0], call.args[1])
    c = math.prod(int(s) for s in shape)
    fn = "rms_norm" if "rms" in call.name else "layer_norm"
    if backward:
        weight = call.args[4] if fn == "rms_norm" else call.args[5]
        mask = call.args[5] if fn == "rms_norm" else call.args[7]
        return "norm", {
            "fn": fn,
            "n": x.numel() // max(c, 1),
            "c": c,
            "affine": weight is not None,
            "which": "bwd",
            "grads": [g for g, wanted in zip(("input", "weight", "bias"), mask, strict=False) if wanted],
        }
    return "norm", {"fn": fn, "n": x.numel() // max(c, 1), "c": c, "affine": call.arg(2, "weight") is not None}


@rule("rms_norm rms_norm_backward")
def _rms_norm(call: Call) -> Meaning:
    backward = call.name.endswith("backward")
    x, shape = (call.args[1], call.args[2]) if backward else (call.args[0], call.args[1])
    weight = call.args[4] if backward else call.args[2]
    c = math.prod(int(s) for s in shape)
    attrs: Attrs = {"fn": "rms_norm", "n": x.numel() // max(c, 1), "c": c, "affine": weight is not None}
    if backward:
        attrs |= {
            "which": "bwd",
            "grads": [g for g, wanted in zip(("input", "weight"), call.args[5], strict=True) if wanted],
        }
    return "norm", attrs


@rule("_weight_norm_interface _weight_norm_interface_backward")
def _weight_norm(call: Call) -> Meaning:
    v = call.args[1] if call.name.endswith("backward") else call.args[0]
    dim = int(call.args[4] if call.name.endswith("backward") else call.arg(2, "dim", 0))
    n = int(v.shape[dim])
    return "norm", _with_which({"fn": "weight_norm", "n": n, "c": v.numel() // max(n, 1), "affine": True}, call)


@rule("native_group_norm native_group_norm_backward")
def _group_norm(call: Call) -> Meaning:
    backward = call.name.endswith("backward")
    x = call.args[1] if backward else call.args[0]
    n, channels, inner, groups = call.args[5:9] if backward else call.args[3:7]
    weight = call.args[4] if backward else call.args[1]
    attrs = {"fn": "group_norm", "n": int(n) * int(groups), "c": int(channels) * int(inner) // int(groups),
             "channels": int(channels), "affine": weight is not None, "layout": _norm_layout(x)}  # fmt: skip
    return "norm", _with_which(attrs, call)


@rule(
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm "
    "_batch_norm_with_update _batch_norm_no_update native_batch_norm_backward cudnn_batch_norm_backward "
    "batch_norm_backward miopen_batch_norm"
)
def _batch_norm(call: Call) -> Meaning:
    backward = call.name.endswith("backward")
    x = call.args[1] if backward and not call.name.startswith("cudnn") else call.args[0]
    channels = int(x.shape[1])
    attrs = {"fn": "batch_norm", "n": channels, "c": x.numel() // max(channels, 1), "channels": channels,
             "training": _batch_norm_trains(call), "layout": _norm_layout(x),
             "affine": call.args[2 if backward else 1] is not None}  # fmt: skip
    return "norm", _with_which(attrs, call)


def _batch_norm_trains(call: Call) -> bool:
    if call.name in ("_native_batch_norm_legit_no_training", "_batch_norm_no_update"):
        return False
    if call.name == "_batch_norm_with_update":
        return True
    at = 7 if call.name == "native_batch_norm_backward" else 5
    flag = call.arg(at, "training", True)
    if call.name == "_native_batch_norm_legit" and call.overload.startswith("no_stats"):
        flag = call.arg(3, "training", True)
    return bool(flag) if isinstance(flag, bool) else True


def _norm_layout(x: torch.Tensor) -> str:
    return "channels_last" if _is_channels_last(x) else "contiguous"


@rule(
    "_softmax _log_softmax _safe_softmax softmax log_softmax _softmax_backward_data _log_softmax_backward_data "
    "_masked_softmax _masked_softmax_backward"
)
def _softmax(call: Call) -> Meaning:
    backward = "_backward" in call.name
    x = call.args[0]
    dim = call.arg(2 if backward or call.name.startswith("_masked") else 1, "dim", -1)
    dim = -1 if dim is None else int(dim)
    n, c, inner = _rows(x, dim)
    attrs: Attrs = {"n": n, "c": c, "log": "log" in call.name, "inner": inner}
    if call.name == "_safe_softmax":
        attrs["safe"] = True
    return "softmax", {**attrs, "which": "bwd"} if backward else attrs


@rule("nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward")
def _nll_loss(call: Call) -> Meaning:
    x = call.args[1] if "backward" in call.name else call.args[0]
    c = int(x.shape[1]) if x.dim() > 1 else int(x.shape[0])
    return "loss", _with_which({"fn": "nll_loss", "n": x.numel() // max(c, 1), "c": c}, call)


@rule(
    "mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward "
    "binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits soft_margin_loss "
    "soft_margin_loss_backward multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_forward "
    "multilabel_margin_loss_backward _ctc_loss _ctc_loss_backward kl_div l1_loss _cdist_forward _cdist_backward "
    "_use_cudnn_ctc_loss _cudnn_ctc_loss _euclidean_dist _pdist_forward _pdist_backward"
)
def _loss(call: Call) -> Meaning:
    x = call.args[1] if call.name.endswith("backward") else call.args[0]
    c = int(x.shape[-1]) if x.dim() else 1
    fn = call.name.removeprefix("_").removesuffix("_backward").removesuffix("_forward")
    return "loss", _with_which({"fn": fn, "n": x.numel() // max(c, 1), "c": c}, call)


@rule("embedding")
def _embedding(call: Call) -> Meaning:
    table, index = call.args[0], call.args[1]
    return "embedding", {"rows": int(table.shape[0]), "cols": int(table.shape[1]), "num": index.numel()}


@rule("embedding_dense_backward")
def _embedding_backward(call: Call) -> Meaning:
    grad, index, rows = call.args[0], call.args[1], int(call.args[2])
    return "embedding", {"rows": rows, "cols": int(grad.shape[-1]), "num": index.numel(), "which": "bwd"}


_BAG_MODES = {0: "sum", 1: "mean", 2: "max"}


@rule("_embedding_bag _embedding_bag_forward_only")
def _embedding_bag(call: Call) -> Meaning:
    table, index, offsets = call.args[0:3]
    last = call.arg(7, "include_last_offset", False)
    bags = int(offsets.numel()) - (1 if last else 0)
    return "embedding_bag", {"v": int(table.shape[0]), "d": int(table.shape[1]), "b": bags,
                             "l": index.numel() / max(bags, 1), "fn": _BAG_MODES[int(call.arg(4, "mode", 0))],
                             "weighted": call.arg(6, "per_sample_weights") is not None}  # fmt: skip


@rule("_embedding_bag_dense_backward _embedding_bag_backward")
def _embedding_bag_backward(call: Call) -> Meaning:
    dense = call.name == "_embedding_bag_dense_backward"
    grad, index = call.args[0], call.args[1]
    rows, mode = (call.args[5], call.args[7]) if dense else (call.args[6], call.args[8])
    bags = int(grad.shape[0])
    return "embedding_bag", {"v": int(rows), "d": int(grad.shape[1]), "b": bags, "l": index.numel() / max(bags, 1),
                             "fn": _BAG_MODES[int(mode)], "which": "bwd"}  # fmt: skip


@rule("_embedding_bag_per_sample_weights_backward")
def _bag_weights_backward(call: Call) -> Meaning:
    return "gather", {"fn": "bag_weights_backward", "num": call.outs[0].numel()}


@rule(
    "index index_select gather take masked_select take_along_dim _unsafe_index repeat_interleave "
    "_unsafe_masked_index index_select_out"
)
def _gather(call: Call) -> Meaning:
    attrs: Attrs = {"fn": call.name, "num": call.outs[0].numel() if call.outs else 0}
    if call.name in ("gather", "index_select"):
        attrs["dim"] = int(call.args[1]) % max(call.args[0].dim(), 1)
    return "gather", attrs


@rule(
    "scatter scatter_add scatter_reduce index_put _index_put_impl index_add index_copy index_fill put "
    "masked_scatter index_reduce gather_backward index_select_backward _unsafe_index_put masked_scatter_backward "
    "_unsafe_masked_index_put_accumulate embedding_renorm"
)
def _scatter(call: Call) -> Meaning:
    # Elements written: those of the source, or of the index where the source is a scalar
    sources = [t for t in call.ins[1:] if t.is_floating_point() or t.dtype == call.ins[0].dtype]
    source = sources[-1] if sources and sources[-1].dim() else (call.ins[-1] if len(call.ins) > 1 else call.ins[0])
    num_scattered = int(source.numel())
    attrs: Attrs = {"fn": call.name.lstrip("_").removesuffix("_impl"), "num": num_scattered}
    accumulates = call.name in ("scatter_add", "scatter_reduce", "index_add", "index_reduce")
    if "index_put" in call.name and len(call.args) > 3:
        accumulates = bool(call.args[3])
    if accumulates:
        attrs["reduce"] = "sum"
    if call.name.startswith(("scatter", "index_add", "index_copy", "index_fill")) and isinstance(call.args[1], int):
        attrs["dim"] = int(call.args[1]) % max(call.args[0].dim(), 1)
    return "scatter", attrs


@rule("cumsum cumprod logcumsumexp cummax cummin _cummax_helper _cummin_helper cumsum_backward")
def _scan(call: Call) -> Meaning:
    n, c, _ = _rows(call.args[0], int(call.arg(1, "dim", -1)))
    return "scan", {"fn": call.name, "n": n, "c": c}


@rule("sort argsort msort")
def _sort(call: Call) -> Meaning:
    dim = call.kwargs.get("dim", next((a for a in call.args[1:] if isinstance(a, int) and not isinstance(a, bool)), -1))
    n, c, _ = _rows(call.args[0], int(dim))
    return "sort", {"n": n, "c": c, "stable": bool(call.kwargs.get("stable", False))}


@rule("topk")
def _topk(call: Call) -> Meaning:
    n, v, _ = _rows(call.args[0], int(call.arg(2, "dim", -1)))
    return "topk", {"n": n, "v": v, "k": int(call.args[1]), "sorted": bool(call.arg(4, "sorted", True))}


@rule("value_selecting_reduction_backward")
def _value_selecting_backward(call: Call) -> Meaning:
    return "scatter", {"fn": "value_selecting_backward", "num": call.ins[0].numel()}


_POOLS = (
    "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d "
    "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool1d "
    "adaptive_max_pool2d adaptive_max_pool3d max_unpool2d max_unpool3d fractional_max_pool2d fractional_max_pool3d"
)
_POOL_GRADS = ("max_pool2d_with_indices_backward max_pool3d_with_indices_backward avg_pool2d_backward "
               "avg_pool3d_backward "
               "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward adaptive_max_pool2d_backward "
               "adaptive_max_pool3d_backward max_pool2d_backward fractional_max_pool2d_backward")  # fmt: skip


@rule(_POOLS)
def _pool(call: Call) -> Meaning:
    return "pool", _pool_attrs(call, call.args[0], call.outs[0], 1)


@rule(_POOL_GRADS)
def _pool_backward(call: Call) -> Meaning:
    return "pool", {**_pool_attrs(call, call.args[1], call.args[0], 2), "which": "bwd"}


def _pool_attrs(call: Call, x: torch.Tensor, y: torch.Tensor, at: int) -> Attrs:
    fn = call.name.lstrip("_").removesuffix("_backward").removesuffix("_with_indices")
    num = int(fn[-2]) if fn.endswith("d") and fn[-2].isdigit() else 2
    spatial, out = list(map(int, x.shape[-num:])), list(map(int, y.shape[-num:]))
    if "adaptive" in fn or "unpool" in fn or "fractional" in fn:
        kernel = [max(1, -(-i // o)) for i, o in zip(spatial, out, strict=True)]
        stride = list(kernel)
    else:
        kernel = _spread(call.args[at], num)
        given = call.args[at + 1] if len(call.args) > at + 1 else []
        stride = _spread(given, num) if given else kernel
    return {"fn": fn, "kernel": kernel, "stride": stride, "spatial": spatial, "out_spatial": out,
            "n": int(x.shape[0]) if x.dim() == num + 2 else 1, "c": int(x.shape[-num - 1])}  # fmt: skip


@rule(
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d "
    "upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_nearest_exact1d "
    "_upsample_nearest_exact2d _upsample_nearest_exact3d grid_sampler_2d grid_sampler_3d upsample_nearest1d_backward "
    "upsample_nearest2d_backward upsample_nearest3d_backward upsample_linear1d_backward upsample_bilinear2d_backward "
    "upsample_bicubic2d_backward upsample_trilinear3d_backward _upsample_bilinear2d_aa_backward "
    "_upsample_bicubic2d_aa_backward _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward "
    "grid_sampler_2d_backward grid_sampler_3d_backward affine_grid_generator affine_grid_generator_backward "
    "cudnn_grid_sampler cudnn_grid_sampler_backward"
)
def _resize(call: Call) -> Meaning:
    return "resize", _with_which({"fn": call.name.lstrip("_").removesuffix("_backward")}, call)


@rule("nonzero nonzero_static argwhere")
def _nonzero(call: Call) -> Meaning:
    return "nonzero", {"num": int(call.outs[0].shape[0]) if call.outs and call.outs[0].dim() else 0}


@rule("_local_scalar_dense _linalg_check_errors")
def _sync(call: Call) -> Meaning:
    return "sync", {"fn": "item"}


def _foreach(call: Call) -> Meaning:
    fn = call.name.removeprefix("_foreach_")
    lists = [a for a in call.args if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor)]
    first = lists[0]
    numel = sum(t.numel() for t in first)
    reads = len(lists) - (1 if fn in ("zero", "copy") else 0)
    writes = 1 if call.outs or is_inplace_foreach(call) else 0
    return "foreach", {"fn": fn, "num_tensors": len(first), "numel": numel, "reads": reads, "writes": writes}


def is_inplace_foreach(call: Call) -> bool:
    return call.name.startswith("_foreach_")


@rule("_foreach_norm")
def _foreach_norm(call: Call) -> Meaning:
    tensors = call.args[0]
    return "foreach", {"fn": "norm", "num_tensors": len(tensors), "numel": sum(t.numel() for t in tensors), "reads": 1,
                       "writes": 0}  # fmt: skip


@rule("_fused_adam _fused_adamw _fused_sgd _fused_adagrad")
def _fused_optimizer(call: Call) -> Meaning:
    tensors = call.args[0]
    fn = call.name.removeprefix("_fused_")
    attrs = {"fn": fn, "num_tensors": len(tensors), "numel": sum(t.numel() for t in tensors)}
    states = call.args[2] if len(call.args) > 2 and isinstance(call.args[2], (list, tuple)) and call.args[2] else None
    if states:
        attrs["state_dtype"] = dtype_name(states[0].dtype)
    return "optimizer", attrs


@rule("_amp_foreach_non_finite_check_and_unscale")
def _unscale(call: Call) -> Meaning:
    tensors = call.args[0]
    numel = sum(t.numel() for t in tensors)
    return "foreach", {"fn": "unscale", "num_tensors": len(tensors), "numel": numel, "reads": 1,
                       "writes": 1}  # fmt: skip


fixed("_amp_update_scale", "pointwise")
fixed(
    "quantize_per_tensor quantize_per_channel dequantize fake_quantize_per_tensor_affine_cachemask "
    "fake_quantize_per_channel_affine_cachemask _fake_quantize_learnable_per_tensor_affine "
    "fake_quantize_per_tensor_affine_cachemask_backward fake_quantize_per_channel_affine_cachemask_backward",
    "quantize",
)
fixed("sym_size sym_numel sym_stride sym_storage_offset is_same_size is_pinned _assert_async _assert_scalar "
      "_has_compatible_shallow_copy_type _version record_stream set_data is_coalesced _nested_tensor_size "
      "_assert_scalar_functional _functional_assert_async",
      "host")  # fmt: skip


_TARGETS = {
    "ridgeline.attention.default": "aten.scaled_dot_product_attention.default",
    "ridgeline.attention_backward.default": "aten._scaled_dot_product_attention_backward.default",
    "ridgeline.rms_norm.default": "aten._fused_rms_norm.default",
    "ridgeline.rms_norm_backward.default": "aten._fused_rms_norm_backward.default",
    "ridgeline.rnn.default": "aten._cudnn_rnn.default",
    "ridgeline.rnn_backward.default": "aten._cudnn_rnn_backward.default",
}


@cache
def target_of(func: Any) -> str:
    """What the framework calls it on CUDA."""
    return _TARGETS.get(str(func), str(func))


@cache
def dtype_name(dt: torch.dtype) -> str:
    return str(dt).removeprefix("torch.")
