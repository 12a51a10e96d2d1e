"""What eager PyTorch does on CUDA and not on CPU: fused attention, dropout, norms, recurrent cells, autocast's lists.

The overrides sit in the dispatcher for the time of a capture, so that every way of calling an op meets them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from ridgeline.capture.shadows import outside_modes, shadow_of
from ridgeline.errors import CaptureError

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_MAX_FUSED_HEAD_DIM = 256

# --- our own ops: one dispatch where CUDA has one -------------------------------------------------------------------

_OPS = torch.library.Library("ridgeline", "DEF")
_OPS.define("attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float dropout, bool causal) -> (Tensor, Tensor)")
_OPS.define("attention_backward(Tensor q, Tensor k, Tensor v, Tensor? mask, float dropout, bool causal, "
            "bool bias_grad, Tensor out, Tensor lse, Tensor grad) -> (Tensor, Tensor, Tensor, Tensor?)")  # fmt: skip
_OPS.define("rms_norm(Tensor x, SymInt[] shape, Tensor? weight) -> (Tensor, Tensor)")
_OPS.define("rms_norm_backward(Tensor grad, Tensor x, SymInt[] shape, Tensor rstd, Tensor? weight, bool[] wanted) "
            "-> (Tensor, Tensor?)")  # fmt: skip
_RNN_ARGS = ("Tensor x, Tensor[] state, Tensor[] params, str cell, int hidden, int layers, bool bidirectional, "
             "int seq, int batch, bool train")  # fmt: skip
_OPS.define(f"rnn({_RNN_ARGS}) -> Tensor[]")
_OPS.define(f"rnn_backward({_RNN_ARGS}, Tensor[] saved, Tensor[] grads) -> Tensor[]")


def _attention_meta(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool) -> tuple[Any, Any]:
    """Fused kernels write their output as [b, s, h, d] in memory."""
    *lead, h, s, _ = q.shape
    out = q.new_empty((*lead, s, h, v.shape[-1])).transpose(-2, -3)
    return out, q.new_empty((*lead, h, s), dtype=torch.float32)


def _attention_backward_meta(
    q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, bias_grad: bool, out: Any, lse: Any, grad: Any
) -> tuple[Any, Any, Any, Any]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(mask) if bias_grad else None


def _rms_norm_meta(x: Any, shape: Any, weight: Any) -> tuple[Any, Any]:
    kept = [*x.shape[: x.dim() - len(shape)], *[1] * len(shape)]
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(kept, dtype=torch.float32)


def _rms_norm_backward_meta(grad: Any, x: Any, shape: Any, rstd: Any, weight: Any, wanted: Any) -> tuple[Any, Any]:
    return torch.empty_like(x), torch.empty_like(weight) if wanted[1] else None


def _rnn_meta(
    x: Any,
    state: Any,
    params: Any,
    cell: str,
    hidden: int,
    layers: int,
    bidirectional: bool,
    seq: int,
    batch: int,
    train: bool,
) -> list[Any]:
    directions = 2 if bidirectional else 1
    gates = {"lstm": 4, "gru": 3}.get(cell, 1)
    out = x.new_empty((*x.shape[:-1], state[0].shape[-1] * directions))
    kept = layers * directions * seq * batch * hidden * (gates + 1) if train else 0
    return [out, *[torch.empty_like(s) for s in state], x.new_empty((kept,))]


def _rnn_backward_meta(x: Any, state: Any, params: Any, *more: Any) -> list[Any]:
    return [torch.empty_like(t) for t in (x, *state, *params)]


for _name, _meta in (("attention", _attention_meta), ("attention_backward", _attention_backward_meta),
                     ("rms_norm", _rms_norm_meta), ("rms_norm_backward", _rms_norm_backward_meta),
                     ("rnn", _rnn_meta), ("rnn_backward", _rnn_backward_meta)):  # fmt: skip
    _OPS.impl(_name, _meta, "Meta")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool) -> Any:
        out, lse = torch.ops.ridgeline.attention(q, k, v, mask, dropout, causal)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.options = (dropout, causal, mask is not None and mask.requires_grad)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, mask, out, lse = ctx.saved_tensors
        dq, dk, dv, dmask = torch.ops.ridgeline.attention_backward(q, k, v, mask, *ctx.options, out, lse, grads[0])
        return dq, dk, dv, dmask, None, None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, shape: Any, weight: Any) -> Any:
        out, rstd = torch.ops.ridgeline.rms_norm(x, shape, weight)
        ctx.save_for_backward(x, rstd, weight)
        ctx.shape = shape
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, rstd, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[2]]
        dx, dweight = torch.ops.ridgeline.rms_norm_backward(grads[0], x, ctx.shape, rstd, weight, wanted)
        return dx, None, dweight


class _Rnn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: Any, num_state: int, x: Any, *tensors: Any) -> Any:
        state, params = list(tensors[:num_state]), list(tensors[num_state:])
        *outs, reserve = torch.ops.ridgeline.rnn(x, state, params, *options)
        ctx.save_for_backward(x, *tensors, outs[0], reserve)
        ctx.options, ctx.num_state = options, num_state
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *rest = ctx.saved_tensors
        state, params, saved = rest[: ctx.num_state], rest[ctx.num_state : -2], rest[-2:]
        given = [g for g in grads if g is not None]
        made = torch.ops.ridgeline.rnn_backward(x, state, params, *ctx.options, saved, given)
        return None, None, *made


# --- overrides of composite ops -------------------------------------------------------------------------------------


def _attend(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """The one fused call CUDA makes, or its math fallback where no fused kernel takes the problem."""
    if not _has_fused_kernel(query, key, value, attn_mask, enable_gqa):
        return aten._scaled_dot_product_attention_math.default(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    mask = _additive_mask(attn_mask, query)
    head_dim = query.shape[-1]
    if head_dim % 8:
        pad = (0, 8 - head_dim % 8)
        query, key, value = (torch.nn.functional.pad(t, pad) for t in (query, key, value))
    out = _call_attention(query, key, value, mask, dropout_p, is_causal)
    return out[..., :head_dim] if head_dim % 8 else out


def _call_attention(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool) -> Any:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, mask)):
        return _Attention.apply(q, k, v, mask, dropout, causal)
    return torch.ops.ridgeline.attention(q, k, v, mask, dropout, causal)[0]


def _has_fused_kernel(q: Any, k: Any, v: Any, mask: Any, grouped: bool) -> bool:
    """Flash takes half types without mask, cuDNN half types up to 256 wide, the memory-efficient one all but groups."""
    if q.dim() != 4 or q.dtype not in (*_HALF, torch.float32):
        return False
    if mask is not None and mask.dim() and mask.shape[-1] > 1 and mask.stride(-1) != 1:
        return False  # every fused kernel reads masks along their last dim (T5's position bias is transposed)
    half = q.dtype in _HALF
    flash = half and mask is None and q.shape[-1] == v.shape[-1] <= _MAX_FUSED_HEAD_DIM
    grouped = grouped or q.shape[1] != k.shape[1]
    return flash or not grouped or (half and q.shape[-1] <= _MAX_FUSED_HEAD_DIM)


def _additive_mask(mask: Any, q: Any) -> Any:
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        additive = torch.zeros_like(mask, dtype=q.dtype)
        mask = additive.masked_fill_(mask.logical_not(), -math.inf)
    return mask


def _dropout(input: Any, p: float, train: bool) -> Any:
    if p == 0 or not train or input.numel() == 0:
        return input
    return aten.native_dropout.default(input, p, train)[0]


def _rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """One fused kernel, unless the weight is of another type."""
    if weight is None or weight.dtype == input.dtype:
        if torch.is_grad_enabled() and (input.requires_grad or (weight is not None and weight.requires_grad)):
            return _RmsNorm.apply(input, list(normalized_shape), weight)
        return torch.ops.ridgeline.rms_norm(input, list(normalized_shape), weight)[0]
    wide = input.float() if input.dtype in _HALF else input
    dims = list(range(-len(normalized_shape), 0))
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    normed = wide * torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + eps)
    return (normed if weight is None else normed * weight).to(input.dtype)


def _softmax(self: Any, dim: int, dtype: Any = None) -> Any:
    """fp16 widens inside the kernel; bf16 is widened by a copy first."""
    if dtype is torch.float32 and self.dtype is torch.float16:
        return aten._softmax.default(self, dim, True)
    wide = self if dtype is None else self.to(dtype)
    return aten._softmax.default(wide, dim, False)


def _log_softmax(self: Any, dim: int, dtype: Any = None) -> Any:
    if dtype is torch.float32 and self.dtype is torch.float16:
        return aten._log_softmax.default(self, dim, True)
    wide = self if dtype is None else self.to(dtype)
    return aten._log_softmax.default(wide, dim, False)


def _one_hot(self: Any, num_classes: int = -1) -> Any:
    if num_classes == -1:
        num_classes = int(self.max().item()) + 1
    zeros = torch.zeros((*self.shape, num_classes), dtype=torch.int64, device=self.device)
    return zeros.scatter_(-1, self.unsqueeze(-1), 1)


def _recurrent(cell: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The padded and the packed entry of a recurrent family."""

    def run(
        x: Any, state: Any, params: Any, layers: int, train: bool, bidirectional: bool, seq: int, batch: int
    ) -> Any:
        state = [s.contiguous() for s in state]
        options = (cell, int(params[1].shape[1]), layers, bidirectional, seq, batch, train)
        if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *state, *params)):
            outs = _Rnn.apply(options, len(state), x, *state, *params)
        else:
            outs = torch.ops.ridgeline.rnn(x, state, list(params), *options)[:-1]
        return tuple(outs)

    def padded(
        input: Any,
        hx: Any,
        params: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        state = list(hx) if cell == "lstm" else [hx]
        batch, seq = (input.shape[0], input.shape[1]) if batch_first else (input.shape[1], input.shape[0])
        return run(input, state, params, num_layers, train, bidirectional, int(seq), int(batch))

    def packed(
        data: Any,
        batch_sizes: Any,
        hx: Any,
        params: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> Any:
        state = list(hx) if cell == "lstm" else [hx]
        seq = int(batch_sizes.shape[0])
        return run(data, state, params, num_layers, train, bidirectional, seq, -(-int(data.shape[0]) // max(seq, 1)))

    return padded, packed


def _steps(batch_sizes: Any) -> list[int]:
    known = shadow_of(batch_sizes)
    if known is None:
        raise CaptureError("the lengths of a packed sequence are unknown: pass real integer lengths")
    with outside_modes():
        return [int(n) for n in known]


def _pad_packed(data: Any, batch_sizes: Any, batch_first: bool, padding_value: float, total_length: int) -> Any:
    """Step by step back to a rectangle, a copy for each run of equal batch sizes."""
    sizes = _steps(batch_sizes)
    out = data.new_full((max(len(sizes), total_length), sizes[0], *data.shape[1:]), padding_value)
    at = start = 0
    for step in range(1, len(sizes) + 1):
        if step == len(sizes) or sizes[step] != sizes[start]:
            rows = (step - start) * sizes[start]
            block = data[at : at + rows].view(step - start, sizes[start], *data.shape[1:])
            out[start:step, : sizes[start]].copy_(block)
            at, start = at + rows, step
    with outside_modes():
        lengths = torch.tensor([sum(n > row for n in sizes) for row in range(sizes[0])])
    return (out.transpose(0, 1) if batch_first else out), lengths


def _pack_padded_backward(grad: Any, input_size: Any, batch_sizes: Any, batch_first: bool) -> Any:
    shape = [input_size[1], input_size[0], *input_size[2:]] if batch_first else list(input_size)
    out = grad.new_zeros(shape)
    at = 0
    for step, rows in enumerate(_steps(batch_sizes)):
        out[step, :rows].copy_(grad[at : at + rows])
        at += rows
    return out.transpose(0, 1) if batch_first else out


def overrides() -> dict[str, Callable[..., Any]]:
    """CUDA's way through ops that decide by device, by overload name."""
    made: dict[str, Callable[..., Any]] = {
        "scaled_dot_product_attention": _attend, "dropout": _dropout, "rms_norm": _rms_norm, "softmax.int": _softmax,
        "log_softmax.int": _log_softmax, "one_hot": _one_hot, "_pad_packed_sequence": _pad_packed,
        "_pack_padded_sequence_backward": _pack_padded_backward,
    }  # fmt: skip
    for cell in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        padded, packed = _recurrent(cell)
        made |= {f"{cell}.input": padded, f"{cell}.data": packed}
    return made


# --- autocast -------------------------------------------------------------------------------------------------------

_TO_FP32 = """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm group_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss hinge_embedding_loss kl_div l1_loss
    margin_ranking_loss dist pdist renorm logsumexp upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d""".split()
_TO_FP32_BY_DTYPE = "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum sum sum.dim_IntList".split()
_TO_HALF = "prelu addmv addr mv".split()
_TO_WIDEST = "addcdiv addcmul atan2 cross dot vdot scatter_add".split()


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _cast(tree: Any, target: torch.dtype, eligible: tuple[torch.dtype, ...]) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.to(target) if tree.dtype in eligible else tree
    if isinstance(tree, (list, tuple)):
        return type(tree)([_cast(item, target, eligible) for item in tree])
    return tree


def _without_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def _casting(name: str, target: Callable[..., torch.dtype | None]) -> Callable[..., Any]:
    op = _overload(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            wanted = target(args, kwargs)
            if wanted is None:
                return op(*args, **kwargs)
            eligible = (*_HALF, torch.float32)
            return op(*_cast(args, wanted, eligible), **{k: _cast(v, wanted, eligible) for k, v in kwargs.items()})

    return kernel


def _choosing_dtype(name: str) -> Callable[..., Any]:
    op = _overload(name)
    at = next((i for i, a in enumerate(op._schema.arguments) if a.name == "dtype" and not a.kwarg_only), None)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            given = kwargs.get("dtype") is not None or (at is not None and len(args) > at and args[at] is not None)
            if args[0].dtype in _HALF and not given:
                args = args[:at] if at is not None else args
                kwargs["dtype"] = torch.float32
            return op(*args, **kwargs)

    return kernel


def _widest(args: Any, kwargs: Any) -> torch.dtype | None:
    dtypes = {t.dtype for t in args if isinstance(t, torch.Tensor) and t.is_floating_point()}
    return torch.float32 if torch.float32 in dtypes and dtypes & set(_HALF) else None


def _autocast_kernels() -> dict[str, Callable[..., Any]]:
    made: dict[str, Callable[..., Any]] = {}
    for name in _TO_FP32:
        made[name] = _casting(name, lambda args, kwargs: torch.float32)
    for name in _TO_FP32_BY_DTYPE:
        made[name] = _choosing_dtype(name)
    for name in _TO_HALF:
        made[name] = _casting(name, lambda args, kwargs: torch.get_autocast_dtype("cuda"))
    for name in _TO_WIDEST:
        made[name] = _casting(name, _widest)
    return {
        name: kernel
        for name, kernel in made.items()
        if not bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"))
    }


class _AutocastState:
    """CUDA's autocast carried by the CPU's switch while capturing; the CPU's own does nothing to an accelerator."""

    def __init__(self) -> None:
        self.is_enabled, self.set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled
        self.dtype, self.set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype
        self.cuda_dtype = torch.get_autocast_dtype("cuda")

    def enabled(self, device_type: str | None = None) -> bool:
        return bool(self.is_enabled("cpu")) if device_type in (None, "cuda") else False

    def dtype_of(self, device_type: str) -> Any:
        if device_type != "cuda":
            return self.dtype(device_type)
        return self.dtype("cpu") if self.is_enabled("cpu") else self.cuda_dtype

    def init(
        self, context: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
    ) -> None:
        context.device, context._enabled = device_type, enabled and device_type == "cuda"
        context.fast_dtype = dtype if dtype is not None else self.cuda_dtype
        context._cache_enabled = torch.is_autocast_cache_enabled() if cache_enabled is None else cache_enabled

    def enter(self, context: Any) -> Any:
        if context.device == "cuda":
            context.prev = (self.is_enabled("cpu"), self.dtype("cpu"), torch.is_autocast_cache_enabled())
            self.set_enabled("cpu", context._enabled)
            self.set_dtype("cpu", context.fast_dtype)
            torch.autocast_increment_nesting()
            torch.set_autocast_cache_enabled(context._cache_enabled)
        return context

    def exit(self, context: Any, *_: Any) -> bool:
        if context.device == "cuda":
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            self.set_enabled("cpu", context.prev[0])
            self.set_dtype("cpu", context.prev[1])
            torch.set_autocast_cache_enabled(context.prev[2])
        return False


@contextmanager
def _cuda_autocast() -> Iterator[None]:
    state = _AutocastState()
    before = (state.is_enabled("cpu"), state.dtype("cpu"))
    outer = state.is_enabled("cuda")
    cls = torch.amp.autocast_mode.autocast
    patches = [
        _replaced(cls, "__init__", lambda self, *a, **k: state.init(self, *a, **k)),
        _replaced(cls, "__enter__", lambda self: state.enter(self)),
        _replaced(cls, "__exit__", lambda self, *a: state.exit(self, *a)),
        _replaced(torch, "is_autocast_enabled", state.enabled),
        _replaced(torch, "get_autocast_dtype", state.dtype_of),
        _replaced(torch, "get_autocast_gpu_dtype", lambda: state.dtype_of("cuda")),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        state.set_enabled("cpu", outer)
        state.set_dtype("cpu", state.cuda_dtype)
        try:
            yield
        finally:
            torch.clear_autocast_cache()
            state.set_enabled("cpu", before[0])
            state.set_dtype("cpu", before[1])


# --- torch.cuda without a GPU ---------------------------------------------------------------------------------------


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _cuda_calls() -> dict[str, Any]:
    """Calls models make on the way; on a machine with a GPU too, a capture must not touch it."""
    properties = SimpleNamespace(name="accelerator", major=9, minor=0, multi_processor_count=132,
                                 total_memory=80 * 10**9, warp_size=32,
                                 shared_memory_per_block_optin=232448)  # fmt: skip
    stream = SimpleNamespace(
        synchronize=_nothing, wait_stream=_nothing, wait_event=_nothing, record_event=_nothing, cuda_stream=0
    )
    return {
        "synchronize": _nothing, "empty_cache": _nothing, "set_device": _nothing, "reset_peak_memory_stats": _nothing,
        "get_device_capability": lambda *_: (9, 0), "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: "accelerator", "current_device": lambda: 0, "current_stream": lambda *_: stream,
        "is_bf16_supported": lambda *_, **__: True, "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "is_current_stream_capturing": lambda: False, "manual_seed": _nothing, "manual_seed_all": _nothing,
    }  # fmt: skip


@contextmanager
def cuda_eager() -> Iterator[None]:
    """For the time being, ops on CPU tensors take the paths CUDA would take."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, kernel in overrides().items():
            for key in ("AutogradCPU", "CPU"):
                library.impl(name, kernel, key)
        for name, kernel in _autocast_kernels().items():
            library.impl(name, kernel, "AutocastCPU")
        with ExitStack() as stack:
            for name, call in _cuda_calls().items():
                if hasattr(torch.cuda, name):
                    stack.enter_context(_replaced(torch.cuda, name, call))
            stack.enter_context(
                _replaced(torch.backends.cudnn, "is_acceptable", lambda _: False)
            )  # no weights to flatten
            stack.enter_context(_cuda_autocast())
            yield
    finally:
        library._destroy()
