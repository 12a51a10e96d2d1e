"""A stand-in for a GPU: real PyTorch programs run on ``meta`` tensors and leave a Kineto trace with device events.

    with StandIn() as gpu:
        net = nn.Linear(4096, 4096, device=gpu.device)
        trace = gpu.record(step, steps=3)

The profiler of PyTorch records the ops as they nest, with shapes. Their times are then laid out again: every op costs
the host a fixed time, every op that a GPU has a kernel for launches one, and a stream runs kernels one after another
for as long as a roofline of an H100 says. What meta tensors cannot do (``.item()``, ``.cpu()``, copies, streams,
collectives, graphs) is marked in the profile and played the same way. Nothing depends on the machine's own speed.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile, record_function

MARK = "stand-in "
UNRECORDED = 0.5
"""Of the host time of ops and calls, what is left when nothing is recorded: the median of recordings on an H200."""
Event = dict[str, Any]

#: Ops whose whole subtree on a GPU is the kernels named here; those not listed launch by what is inside of them.
_NVJET, _SGEMM = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "ampere_sgemm_128x64_tn"
_ATEN = "void at::native::"
_ELEMENTWISE = (
    _ATEN + "vectorized_elementwise_kernel<4, at::native::{0}, std::array<char*, 3ul> >(int, at::native::{0})"
)
_REDUCE = _ATEN + "reduce_kernel<512, 1, at::native::ReduceOp<{0}, unsigned int, float, 4, 4> >"
KERNELS: dict[str, tuple[str, ...]] = {
    "aten::mm": ("gemm",), "aten::addmm": ("gemm",), "aten::bmm": ("gemm",), "aten::baddbmm": ("gemm",),
    "aten::_grouped_mm": ("gemm",),
    "aten::convolution": ("conv",), "aten::convolution_backward": ("dgrad", "wgrad"),
    "aten::_scaled_dot_product_flash_attention": ("flash",),
    "aten::_scaled_dot_product_flash_attention_backward": ("flash_bwd",),
    "aten::native_layer_norm": (_ATEN + "(anonymous namespace)::vectorized_layer_norm_kernel<{dtype}, float>",),
    "aten::native_layer_norm_backward": (
        _ATEN + "(anonymous namespace)::layer_norm_grad_input_kernel_vectorized<{dtype}, float>",
        _ATEN + "(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<{dtype}, float>"),
    "aten::_fused_rms_norm": (_ATEN + "(anonymous namespace)::vectorized_layer_norm_kernel<{dtype}, float, true>",),
    "aten::native_batch_norm": ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<__nv_bfloat16, float>",),
    "aten::cudnn_batch_norm": ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<__nv_bfloat16, float>",),
    "aten::native_batch_norm_backward": ("void cudnn::bn_bw_1C11_kernel_new<__nv_bfloat16, float>",),
    "aten::native_group_norm": (_ATEN + "(anonymous namespace)::RowwiseMomentsCUDAKernel<{dtype}>",
                                _ATEN + "(anonymous namespace)::ComputeFusedParamsCUDAKernel<{dtype}>",
                                _ELEMENTWISE.format("GroupNormKernelImplInternal<{dtype}>")),
    "aten::native_group_norm_backward": (
        _ATEN + "(anonymous namespace)::ComputeInternalGradientsCUDAKernel<{dtype}>",
        _ELEMENTWISE.format("GroupNormBackwardKernelImplInternal<{dtype}>")),
    "aten::_softmax": (_ATEN + "(anonymous namespace)::cunn_SoftMaxForward<4, {dtype}, float, {dtype}>",),
    "aten::_softmax_backward_data": (_ATEN + "(anonymous namespace)::cunn_SoftMaxBackward<4, {dtype}, float>",),
    "aten::_log_softmax": (_ATEN + "(anonymous namespace)::cunn_SoftMaxForward<4, {dtype}, float, {dtype}, "
                           "at::native::(anonymous namespace)::LogSoftMaxForwardEpilogue>",),
    "aten::_log_softmax_backward_data": (
        _ATEN + "(anonymous namespace)::cunn_SoftMaxBackward<4, {dtype}, float, LogSoftMaxBackwardEpilogue>",),
    "aten::nll_loss_forward": (_ATEN + "(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float>",),
    "aten::nll_loss_backward": (_ATEN + "(anonymous namespace)::nll_loss_backward_reduce_cuda_kernel_2d<float>",),
    "aten::embedding": (_ATEN + "(anonymous namespace)::indexSelectLargeIndex<{dtype}, long, unsigned int>",),
    "aten::embedding_dense_backward": (
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<long>",
        _ATEN + "(anonymous namespace)::compute_grad_weight<{dtype}>",
        _ATEN + "(anonymous namespace)::sum_and_scatter<{dtype}>"),
    "aten::_embedding_bag": (_ATEN + "(anonymous namespace)::EmbeddingBag_updateOutputKernel_sum_mean<{dtype}, long>",),
    "aten::topk": (_ATEN + "sbtopk::gatherTopK<{dtype}, unsigned int, 2, false>",
                   _ATEN + "bitonicSortKVInPlace<2, -1, 16, 16, {dtype}, long>"),
    "aten::sort": ("void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<{dtype}>",),
    "aten::multinomial": (_ATEN + "(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4>",
                          _REDUCE.format("ArgMaxOps<float>")),
    "aten::native_dropout": (_ATEN + "(anonymous namespace)::fused_dropout_kernel_vec<{dtype}, float, unsigned int>",),
    "aten::native_dropout_backward": (_ATEN + "(anonymous namespace)::masked_scale_kernel<{dtype}>",),
    "aten::cat": (_ATEN + "(anonymous namespace)::CatArrayBatchedCopy_vectorized<at::native::(anonymous namespace)::"
                  "OpaqueType<2u>, unsigned int, 3, 64, 64>",),
    "aten::cumsum": ("void at::native::tensor_kernel_scan_innermost_dim<long, std::plus<long> >",),
    "aten::max_pool2d_with_indices": (_ATEN + "(anonymous namespace)::max_pool_forward_nhwc<{dtype}, int>",),
    "aten::max_pool2d_with_indices_backward": (_ATEN + "(anonymous namespace)::max_pool_backward_nhwc<{dtype}>",),
    "aten::nonzero": ("void at_cuda_detail::cub::DeviceReduceSingleTileKernel<long>",
                      "void at_cuda_detail::cub::DeviceSelectSweepKernel<long>"),
    "aten::_fused_adamw_": (_ATEN + "(anonymous namespace)::multi_tensor_apply_kernel<at::native::"
                            "FusedOptimizerTensorListMetadata<4>, at::native::FusedAdamMathFunctor<float, 4> >",),
}  # fmt: skip
for _op in ("sum", "mean", "amax", "max", "min", "norm", "linalg_vector_norm", "argmax", "var_mean", "any", "all",
            "logsumexp", "std", "var", "prod"):  # fmt: skip
    KERNELS[f"aten::{_op}"] = (_REDUCE.format(f"{_op.title()}Ops<{{dtype}}, float, float, {{dtype}}>"),)
for _op in ("index", "gather", "index_select", "index_put_", "index_add_", "scatter_add_", "scatter_", "scatter",
            "index_copy_", "masked_select", "_index_put_impl_", "index_put", "index_add"):  # fmt: skip
    KERNELS[f"aten::{_op}"] = (_ATEN + f"index_elementwise_kernel<128, 4, at::native::gpu_{_op}_kernel<{{dtype}}> >",)
for _op in ("_foreach_add_", "_foreach_mul_", "_foreach_lerp_", "_foreach_addcmul_", "_foreach_addcdiv_",
            "_foreach_sqrt", "_foreach_div_", "_foreach_norm", "_foreach_copy_", "_foreach_zero_"):  # fmt: skip
    KERNELS[f"aten::{_op}"] = (
        _ATEN + "(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        f"TensorListMetadata<3>, at::native::(anonymous namespace)::PointwiseOpListFunctor<float, 3>, {_op[9:]}>",
    )
_POINTWISE = """
add add_ sub sub_ rsub mul mul_ div div_ neg abs exp exp_ log sqrt rsqrt pow square sin cos tanh sigmoid relu relu_
gelu silu clamp clamp_ clamp_min clamp_min_ where masked_fill masked_fill_ lerp lerp_ addcmul addcmul_ addcdiv
addcdiv_ maximum minimum eq ne lt le gt ge logical_and logical_or logical_not bitwise_and isnan softplus
threshold_backward gelu_backward silu_backward tanh_backward sigmoid_backward triu tril reciprocal erf fill_ zero_
copy_ bernoulli_ normal_ uniform_ random_ elu leaky_relu elu_backward leaky_relu_backward mse_loss mse_loss_backward
hardtanh hardtanh_ arange one_hot log1p floor round fmod remainder isinf isfinite
""".split()
for _op in _POINTWISE:
    KERNELS.setdefault(f"aten::{_op}", ("pointwise",))
_NAMES = {"add_": "CUDAFunctor_add", "add": "CUDAFunctor_add", "fill_": "FillFunctor", "zero_": "FillFunctor",
          "mul": "BinaryFunctor<MulFunctor>", "relu": "clamp_min"}  # fmt: skip
_DTYPES = {"c10::BFloat16": 2, "c10::Half": 2, "float": 4, "double": 8, "long int": 8, "int": 4, "bool": 1,
           "unsigned char": 1, "signed char": 1, "long": 8}  # fmt: skip


@dataclass(slots=True)
class _Node:
    name: str
    args: Event
    category: str
    children: list[_Node] = field(default_factory=list)


class StandIn(TorchFunctionMode):
    """Entered as a context: calls that need a device are played, everything else runs on meta tensors."""

    device = torch.device("meta")

    def __init__(self, *, host: float = 1.0, name: str = "NVIDIA H100 80GB HBM3") -> None:
        super().__init__()
        self.host = host  # how slow the host is, of a common one
        self.facts: Event = {}
        self.marks: list[Event] = []  # what happened at each mark in the profile
        self.properties = {"id": 0, "name": name, "totalGlobalMem": 85_000_000_000, "computeMajor": 9,
                           "computeMinor": 0, "warpSize": 32, "numSms": 132}  # fmt: skip
        self.values: Iterator[float] = iter(lambda: 0.5, None)

    def __enter__(self) -> StandIn:
        """Tensors are made on ``meta`` unless asked otherwise, and fused attention has its kernel, in every thread."""
        self._left = ExitStack()
        self._left.enter_context(torch.device("meta"))
        self._left.callback(setattr, F, "scaled_dot_product_attention", F.scaled_dot_product_attention)
        F.scaled_dot_product_attention = _attention
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._left.close()

    # ------------------------------------------------------------------ what programs call

    def work(self, ms: float, name: str = "") -> None:
        """Host code that takes this long: decoding a picture, a tokenizer, a lock. Unnamed code leaves no span."""
        with self._mark("work", ms=ms, name=name):
            pass

    @contextmanager
    def stream(self, number: int) -> Iterator[None]:
        with self._mark("stream", number=number):
            yield

    def graphed(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """The function captured as one CUDA graph, and replayed."""

        def replayed() -> Any:
            with self._mark("graph"):
                return run()

        return replayed

    def compiled(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The function compiled: light ops that follow each other are generated kernels."""

        def called(*args: Any) -> Any:
            with (
                record_function("Torch-Compiled Region: 0/0"),
                record_function("## Call CompiledFxGraph fabc ##"),
                self._mark("fused"),
            ):
                return run(*args)

        return called

    def collective(self, name: str, tensor: Tensor, *, overlap: bool = False, late_ms: float = 0.0) -> None:
        """A collective among eight ranks on its own stream; without ``overlap`` the compute stream waits for it."""
        self._note("collective", op=name, bytes=tensor.numel() * tensor.element_size(), overlap=overlap,
                   late_ms=late_ms)  # fmt: skip

    def wait(self, stream: int) -> None:
        """The current stream waits for what another has been given."""
        self._note("wait", stream=stream)

    def synchronize(self) -> None:
        self._note("sync", call="cudaDeviceSynchronize")

    def event_synchronize(self) -> None:
        self._note("sync", call="cudaEventSynchronize")

    def malloc(self, num: int = 1, *, free: bool = False) -> None:
        for _ in range(num):
            self._note("malloc", call="cudaFree" if free else "cudaMalloc")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is not None and first.is_meta and name in ("item", "__bool__", "__float__", "__int__", "__index__"):
            self._note("item")
            value = next(self.values)
            return bool(value) if name == "__bool__" else int(value) if name in ("__int__", "__index__") else value
        if first is not None and first.is_meta and name in ("cpu", "tolist", "numpy"):
            self._note("copy", way="DtoH", bytes=first.numel() * first.element_size(), pinned=False, blocking=True)
            found = torch.zeros(first.shape if first.numel() < 10_000 else (1,), dtype=first.dtype, device="cpu")
            return found if name == "cpu" else found.tolist()
        if first is not None and name in ("to", "cuda") and first.device.type == "cpu" and "meta" in map(str, args[1:]):
            pinned, later = bool(getattr(first, "is_pinned_here", False)), bool(kwargs.get("non_blocking"))
            self._note("copy", way="HtoD", bytes=first.numel() * first.element_size(), pinned=pinned,
                       blocking=not (pinned and later))  # fmt: skip
            return torch.empty_like(first, device="meta")
        if name == "pin_memory" and first is not None:
            found = first.clone()
            found.is_pinned_here = True
            return found
        if name == "nonzero" and first is not None and first.is_meta:
            self._note("item")  # the number of elements is read
            return torch.empty(max(1, first.numel() // 8), first.dim(), dtype=torch.long, device="meta")
        return func(*args, **kwargs)

    def _note(self, kind: str, **facts: Any) -> None:
        with self._mark(kind, **facts):
            pass

    @contextmanager
    def _mark(self, kind: str, **facts: Any) -> Iterator[None]:
        self.marks.append({"kind": kind, **facts})
        with torch._C.DisableTorchFunction(), record_function(f"{MARK}{len(self.marks) - 1}"):
            yield

    # ------------------------------------------------------------------ what comes out

    def record(self, step: Callable[[], object], path: Path, *, steps: int = 3, warmup: int = 1, shapes: bool = True,
               marks: bool = True, timed: bool = True) -> float:  # fmt: skip
        """Writes the trace of some steps; seconds of a step that nothing records, which it tells if ``timed``."""
        for _ in range(warmup):
            step()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorder:
            for i in range(steps):
                with record_function(f"ProfilerStep#{i + 3}") if marks else nullcontext():
                    step()
        with tempfile.TemporaryDirectory() as folder:
            raw = Path(folder) / "raw.json"
            recorder.export_chrome_trace(str(raw))
            events = json.loads(raw.read_text())["traceEvents"]
        nodes = _tree(events)
        step_s = _Player(UNRECORDED * self.host, shapes, self.marks).play(nodes, steps)
        player = _Player(self.host, shapes, self.marks)
        player.play(nodes, steps)
        noted = {"unprofiled_step_s": step_s, "unprofiled_spread_s": 0.01 * step_s, "num_cores": 16,
                 "num_usable_cores": 16} if timed else {}  # fmt: skip
        document = {"schemaVersion": 1, "deviceProperties": [self.properties], "ridgeline": noted | self.facts,
                    "traceEvents": player.events}  # fmt: skip
        path.write_text(json.dumps(document))
        return step_s


def _attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
               is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
    """Fused attention as a GPU runs it; meta tensors would take the reference form apart."""
    if attn_mask is not None:
        raise NotImplementedError("the stand-in has fused attention without a mask alone")
    times = q.shape[1] // k.shape[1]
    if enable_gqa and times > 1:
        k, v = (x[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2) for x in (k, v))
    found: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    return found


def _tree(events: Sequence[Event]) -> list[_Node]:
    """Ops and annotations of the main thread as they nest."""
    chosen = [e for e in events if e.get("ph") == "X" and e.get("cat") in ("cpu_op", "user_annotation")]
    chosen.sort(key=lambda e: (e["ts"], -e["dur"]))
    top: list[_Node] = []
    open_: list[tuple[float, _Node]] = []
    for event in chosen:
        while open_ and open_[-1][0] <= event["ts"]:
            open_.pop()
        node = _Node(event["name"], event.get("args", {}), event["cat"])
        (open_[-1][1].children if open_ else top).append(node)
        open_.append((event["ts"] + event["dur"], node))
    return top


class _Player:
    """Plays nodes on a host clock and streams; microseconds."""

    def __init__(self, host: float, shapes: bool, marks: Sequence[Event]) -> None:
        self.events: list[Event] = []
        self.marks = marks
        self.now, self.host, self.shapes = 1000.0, host, shapes
        self.free: dict[int, float] = {}
        self.stream = 7
        self.thread = 100
        self.correlation = 1000
        self.in_graph: list[tuple[str, float, Event]] | None = None
        self.fused: list[float] | None = None

    def play(self, nodes: Sequence[_Node], steps: int) -> float:
        began = self.now
        for node in nodes:
            self._node(node)
        self._call("cudaDeviceSynchronize", until=max(self.free.values(), default=0.0))
        return (self.now - began) / steps / 1e6

    def _span(self, name: str, category: str, start: float, end: float, args: Event | None = None) -> None:
        took = round(max(0.0, end - start), 3)
        self.events.append({"ph": "X", "cat": category, "name": name, "pid": 100, "tid": self.thread,
                            "ts": round(start, 3), "dur": took, "args": args or {}})  # fmt: skip

    def _call(self, name: str, us: float = 3.0, until: float = 0.0) -> int:
        """A runtime call; with ``until`` it returns once the device is that far."""
        self.correlation += 1
        start = self.now
        self.now = max(self.now + us * self.host, until + 4.0 if until > self.now else 0.0)
        self._span(name, "cuda_runtime", start, self.now, {"correlation": self.correlation, "cbid": 211})
        return self.correlation

    def _kernel(self, name: str, us: float, args: Event, blocks: float, category: str = "kernel") -> float:
        """A kernel on the current stream, launched now or with the graph around it."""
        if self.in_graph is not None and category == "kernel":
            self.in_graph.append((name, us, args))
            return 0.0
        call = {"kernel": "cudaLaunchKernel", "gpu_memset": "cudaMemsetAsync"}.get(category, "cudaMemcpyAsync")
        number = self._call(call, 4.0)
        return self._on_device(name, us, {**args, "grid": [max(1, int(blocks)), 1, 1], "block": [128, 1, 1]}, number,
                               category)  # fmt: skip

    def _on_device(self, name: str, us: float, args: Event, number: int, category: str = "kernel",
                   least: float = 4.0) -> float:  # fmt: skip
        start = max(self.now + least, self.free.get(self.stream, 0.0) + 1.0)
        self.free[self.stream] = start + us
        args = {**args, "device": 0, "stream": self.stream, "correlation": number}
        self.events.append({"ph": "X", "cat": category, "name": name, "pid": 0, "tid": self.stream,
                            "ts": round(start, 3), "dur": round(us, 3), "args": args})  # fmt: skip
        return start + us

    def _node(self, node: _Node) -> None:
        if node.name.startswith(MARK):
            self._marked(self.marks[int(node.name.removeprefix(MARK))], node)
            return
        if node.name.startswith("autograd::engine::evaluate_function") and self.thread == 100:
            self.thread = 200  # as a GPU's gradients are made by a thread of their own
            self._node(node)
            self.thread = 100
            return
        quiet = self.in_graph is not None or node.name.startswith(("aten::_reshape_alias", "aten::is_"))
        start = self.now
        self.now += 0.0 if quiet else (4.0 if node.category == "cpu_op" else 2.0) * self.host
        whole = node.name.startswith("aten::_f") or bool(_numbers(node)[0])  # lists of scalars have no recorded sizes
        if (kernels := KERNELS.get(node.name)) and node.category == "cpu_op" and whole:
            self._launches(node, kernels)
        else:
            for child in node.children:
                self._node(child)
        self.now += 0.0 if quiet else 1.5 * self.host
        if not quiet:
            kept = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs", "Sequence number", "Fwd thread id")
            args = {key: value for key, value in node.args.items() if key in kept and (self.shapes or key[0] in "SF")}
            self._span(node.name, node.category, start, self.now, args)

    def _launches(self, node: _Node, kernels: Sequence[str]) -> None:
        numbers, dtype, width = _numbers(node)
        numbers = numbers or [1]
        moved = sum(numbers) * width
        out = max(numbers) * width
        for kernel in kernels:
            if kernel in ("gemm", "conv", "dgrad", "wgrad", "flash", "flash_bwd"):
                if kernel in ("dgrad", "wgrad", "conv"):
                    self._turned(node, kernel, dtype, width)
                name, us, blocks = _product(kernel, node, dtype, width)
                start = self.now
                self._kernel(name, us, {}, blocks)
                if kernel.startswith("flash") and self.in_graph is None:  # the op inside has rows before heads
                    inner = "aten::_flash_attention_" + ("backward" if kernel == "flash_bwd" else "forward")
                    dims = [[d[0], d[2], d[1], d[3]] if len(d) == 4 else d for d in node.args["Input Dims"]]
                    args = {"Input Dims": dims, "Input type": node.args["Input type"]} if self.shapes else {}
                    self._span(inner, "cpu_op", start - 0.5, self.now + 0.5, args)
                if kernel == "conv" and _bias(node):
                    size = _conv_out(node) * width
                    self._kernel(_ELEMENTWISE.format("CUDAFunctor_add<c10::BFloat16>"), 1.5 + 2 * size / 2.7e6, {},
                                 size / 4096)  # fmt: skip
                continue
            both = moved if "reduce" in kernel or "foreach" in node.name or "fused_adam" in node.name.lower() \
                else moved + out  # fmt: skip
            if self.fused is not None and (kernel == "pointwise" or "reduce" in kernel or "norm" in kernel):
                self._kernel(f"triton_poi_fused_{node.name[6:].strip('_')}_{self.correlation % 7}", 1.3 + out / 2.7e6,
                             {}, out / 4096)  # fmt: skip
                continue
            if node.name in ("aten::zero_", "aten::fill_") and numbers[0] > 1 and node.name == "aten::zero_":
                self._kernel("Memset (Device)", 1.0 + out / 2.8e6, {"bytes": int(out)}, 1, "gpu_memset")
                continue
            strided = node.name == "aten::copy_" and _is_strided(node)
            name = kernel.format(dtype=dtype)
            if kernel == "pointwise":
                bare = node.name[6:].rstrip("_") if node.name[6:] not in _NAMES else _NAMES[node.name[6:]]
                name = _ELEMENTWISE.format(f"{bare}<{dtype}>")
                if node.name == "aten::copy_":
                    name = (_ATEN + "elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
                            "direct_copy_kernel_cuda> >") if strided else _ATEN + \
                        "unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>"  # fmt: skip
            self._kernel(name, 1.3 + both / (1.6e6 if strided else 2.7e6), {}, max(numbers) / 1024)

    def _turned(self, node: _Node, kernel: str, dtype: str, width: int) -> None:
        """cuDNN's Tensor Core kernels want channels last, which a network has if its weights have it (meta tensors lose
        the layout of what is computed): else pictures are turned before each of its kernels."""
        strides, shapes = (node.args.get(name) or [] for name in ("Input Strides", "Input Dims"))
        picture, weight = (0, 1) if kernel == "conv" else (1, 2)
        if len(shapes) <= weight or len(shapes[picture]) != 4 or len(strides) <= weight or dtype == "float":
            return
        if strides[weight][1] != 1 and shapes[weight][1] > 1:
            size = math.prod(shapes[picture]) * width
            name = "void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float, false, true>"
            self._kernel(name, 1.5 + 2 * size / 1.8e6, {}, size / 4096)

    def _marked(self, fact: Event, node: _Node) -> None:
        kind, host = fact["kind"], self.host
        if kind == "work":
            start = self.now
            self.now += fact["ms"] * 1e3
            if fact["name"]:
                self._span(fact["name"], "user_annotation", start, self.now)
        elif kind == "stream":
            before, self.stream = self.stream, fact["number"]
            self._children(node)
            self.stream = before
        elif kind == "graph":
            self.in_graph = []
            self._children(node)
            works, self.in_graph = self.in_graph, None
            number = self._call("cudaGraphLaunch", 12.0 + 0.02 * len(works))
            for i, (name, us, args) in enumerate(works):
                args = {**args, "grid": [132, 1, 1], "block": [128, 1, 1], "graph node id": i + 1}
                self._on_device(name, us, args, number, least=6.0)
        elif kind == "fused":
            self.fused = []
            self._children(node)
            self.fused = None
        elif kind == "item":
            start = self.now
            self.now += 6.0 * host
            number = self._call("cudaMemcpyAsync", 5.0)
            end = self._on_device("Memcpy DtoH (Device -> Pageable)", 1.5, {"bytes": 8}, number, "gpu_memcpy")
            self._call("cudaStreamSynchronize", 2.0, until=end)
            self._span("aten::_local_scalar_dense", "cpu_op", start + 2.0, self.now)
            self.now += 1.0
            self._span("aten::item", "cpu_op", start, self.now, {"Input Dims": [[]], "Input type": ["float"]})
        elif kind == "copy":
            start = self.now
            self.now += 6.0 * host
            number = self._call("cudaMemcpyAsync", 5.0)
            memory = "Pinned" if fact["pinned"] else "Pageable"
            way = f"{memory} -> Device" if fact["way"] == "HtoD" else f"Device -> {memory}"
            us = 1.5 + fact["bytes"] / (50e3 if fact["pinned"] else 9e3)
            end = self._on_device(f"Memcpy {fact['way']} ({way})", us, {"bytes": fact["bytes"]}, number, "gpu_memcpy")
            if fact["blocking"]:
                self._call("cudaStreamSynchronize", 2.0, until=end)
            self._span("aten::copy_", "cpu_op", start + 2.0, self.now)
            self.now += 1.0
            self._span("aten::to", "cpu_op", start, self.now)
        elif kind == "sync":
            self._call(fact["call"], 3.0, until=max(self.free.values(), default=0.0))
        elif kind == "malloc":
            free = fact["call"] == "cudaFree"
            self._call(
                fact["call"], 250.0 if free else 180.0, until=max(self.free.values(), default=0.0) if free else 0
            )
        elif kind == "wait":
            self._call("cudaStreamWaitEvent", 2.0)
            self.free[self.stream] = max(self.free.get(self.stream, 0.0), self.free.get(fact["stream"], 0.0))
        elif kind == "collective":
            self._collective(fact)
        else:
            self._children(node)

    def _collective(self, fact: Event) -> None:
        start, compute = self.now, self.stream
        self.now += 8.0 * self.host
        number = self._call("cudaLaunchKernelExC", 5.0)
        ready = self.free.get(compute, 0.0)
        self.stream = 20
        self.free[20] = max(self.free.get(20, 0.0), ready)
        us = 12.0 + fact["bytes"] / 380e3 * (1.75 if fact["op"] == "AllReduce" else 0.9) + fact["late_ms"] * 1e3
        args = {"Collective name": fact["op"].lower(), "In msg nelems": fact["bytes"] // 2, "dtype": "BFloat16",
                "Out msg nelems": fact["bytes"] // 2, "Group size": 8, "Process Group Name": "0",
                "Process Group Ranks": list(range(8)), "grid": [24, 1, 1], "block": [544, 1, 1]}  # fmt: skip
        name = f"ncclDevKernel_{fact['op']}_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        end = self._on_device(name, us, args, number)
        self.stream = compute
        if not fact["overlap"]:
            self.free[compute] = max(self.free.get(compute, 0.0), end)
        self._span(f"nccl:{fact['op'].lower()}", "user_annotation", start + 1.0, self.now)
        self.now += 2.0
        self._span("c10d::allreduce_", "cpu_op", start, self.now)

    def _children(self, node: _Node) -> None:
        for child in node.children:
            self._node(child)


def _numbers(node: _Node) -> tuple[list[int], str, int]:
    """Elements of every tensor that an op was given, the type of the first, and its bytes."""
    shapes, types = node.args.get("Input Dims") or [], node.args.get("Input type") or []
    found, dtype = [], ""
    for shape, kind in zip(shapes, types, strict=False):
        if kind in _DTYPES and not (shape and isinstance(shape[0], list)):
            found.append(math.prod(shape))
            dtype = dtype or kind
        elif shape and isinstance(shape[0], list):
            found.append(sum(math.prod(one) for one in shape))
            dtype = dtype or "float"
    return found, dtype, _DTYPES.get(dtype, 4)


def _is_strided(node: _Node) -> bool:
    strides, shapes = node.args.get("Input Strides") or [], node.args.get("Input Dims") or []
    return len(strides) > 1 and len(shapes) > 1 and shapes[0] == shapes[1] and strides[0] != strides[1]


def _bias(node: _Node) -> bool:
    shapes = node.args.get("Input Dims") or []
    return len(shapes) > 2 and bool(shapes[2])


def _conv_out(node: _Node) -> int:
    x, w = node.args["Input Dims"][:2]
    concrete = node.args.get("Concrete Inputs") or []
    stride = json.loads(concrete[3]) if len(concrete) > 3 and concrete[3] else [1]
    return int(x[0] * w[0] * math.prod(size / stride[min(i, len(stride) - 1)] for i, size in enumerate(x[2:])))


def _product(kernel: str, node: _Node, dtype: str, width: int) -> tuple[str, float, float]:
    """Name, microseconds and blocks of a product, a convolution or attention, by a roofline."""
    shapes = [shape for shape in node.args["Input Dims"] if shape and not isinstance(shape[0], list)]
    moved = sum(math.prod(shape) for shape in shapes) * width
    if kernel.startswith("flash"):
        q, k = (shapes[3], shapes[4]) if kernel == "flash_bwd" and len(shapes) > 4 else (shapes[0], shapes[1])
        b, h, m, d = q
        flops = 4.0 * b * h * m * k[2] * d * (2.5 if kernel == "flash_bwd" else 1.0)
        name = (
            "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64>>"
            if kernel == "flash_bwd"
            else "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>"
        )
        return name, 3.0 + max(flops / 400e6, moved / 2.7e6), b * h * max(1, m // 64)
    if kernel in ("conv", "dgrad", "wgrad"):
        if kernel != "conv":
            shapes = shapes[1:]
        w = shapes[1]
        out = _conv_out(node) if kernel == "conv" else math.prod(next(s for s in node.args["Input Dims"] if s))
        flops = 2.0 * out * math.prod(w[1:])
        if dtype == "float":
            sort = "fprop" if kernel == "conv" else kernel
            return f"sm80_xmma_{sort}_implicit_gemm_f32f32_f32f32_f32_nhwckrsc_nhwc_" \
                "tilesize128x128x16_stage4_warpsize2x2x1_g1_ffma_simple_t1r3s3_execute_kernel__5x_cudnn", \
                3.0 + max(flops / 45e6, moved / 2.7e6), out / 16384  # fmt: skip
        name = (
            f"sm90_xmma_{'fprop' if kernel == 'conv' else kernel}_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_"
            "tilesize128x128x64_warpgroupsize1x1x1_g1_execute_segment_k_off_kernel__5x_cudnn"
        )
        return name, 3.0 + max(flops / 450e6, moved / 2.7e6), out / 16384
    pair = [shape for shape in shapes if len(shape) >= 2][-2:]
    (*batch, m, k), n = pair[0], pair[1][-1]
    flops = 2.0 * math.prod(batch) * m * n * k
    moved = math.prod(batch) * (m * k + k * n + m * n) * width
    blocks = math.prod(batch) * math.ceil(m / 128) * math.ceil(n / 128)
    if dtype == "float":
        return _SGEMM, 2.5 + max(flops / 48e6, moved / 2.7e6), blocks
    odd = width == 2 and any(size % 8 for size in (m if len(batch) else 8, n, k))
    if odd:
        return "cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_32x1_tn_align1", \
            2.5 + max(flops / 60e6, moved / 2.0e6), blocks * 16  # fmt: skip
    return _NVJET, 2.5 + max(flops / 620e6, moved / 2.8e6), blocks
