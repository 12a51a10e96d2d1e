"""Measurable operators: from (kind, dtype, phase, library, shape) to a callable on fresh random inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from ridgeline.errors import InputError, nearest

Shape = Mapping[str, Any]
Run = Callable[[], Any]
Maker = Callable[["Request"], Run]
_MAKERS: dict[str, Maker] = {}
_TORCH = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "int64": torch.int64,
    "int32": torch.int32,
    "int8": torch.int8,
}


class Request:
    """One operator to be measured; makes its own random inputs and remembers which need gradients."""

    def __init__(self, kind: str, dtype: str, phase: str, library: str, shape: Shape, device: str = "cuda") -> None:
        self.kind, self.dtype, self.phase, self.library, self.shape, self.device = (
            kind,
            dtype,
            phase,
            library,
            shape,
            device,
        )
        self.leaves: list[torch.Tensor] = []

    def __getitem__(self, key: str) -> Any:
        return self.shape[key]

    def opt(self, key: str, default: Any) -> Any:
        return self.shape.get(key, default)

    def tensor(
        self, *size: int, dtype: torch.dtype | None = None, grad: bool = True, scale: float = 1.0
    ) -> torch.Tensor:
        """Random normal numbers; a leaf to differentiate when the phase is backward."""
        made = torch.randn(size, device=self.device, dtype=dtype or _TORCH[self.dtype])
        if scale != 1.0:
            made.mul_(scale)
        if grad and self.phase == "bwd":
            made.requires_grad_(True)
            self.leaves.append(made)
        return made

    def index(self, high: int, *size: int) -> torch.Tensor:
        return torch.randint(0, high, size, device=self.device)

    def line(self, high: int = 1 << 30) -> torch.Tensor:
        """Random numbers, n of them or n rows of c, whole ones below ``high`` where the element type asks for them."""
        size = (self["n"],) if "c" not in self.shape else (self["n"], self["c"])
        if self.dtype in ("int64", "int32"):
            return self.index(high, *size).to(_TORCH[self.dtype])
        return self.tensor(*size, grad=False)


def maker(*kinds: str) -> Callable[[Maker], Maker]:
    """Register how to make operators of these kinds."""

    def register(fn: Maker) -> Maker:
        for kind in kinds:
            if kind in _MAKERS:
                raise InputError(f"kind {kind!r} has two makers")
            _MAKERS[kind] = fn
        return fn

    return register


def kinds() -> list[str]:
    return sorted(_MAKERS)


def make(kind: str, dtype: str, phase: str, library: str, shape: Shape, device: str = "cuda") -> Run:
    """A callable that runs the operator once; in phase ``bwd`` only its gradient kernels."""
    if kind not in _MAKERS:
        raise InputError(f"unknown operator kind {kind!r}{nearest(kind, _MAKERS)}")
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    request = Request(kind, dtype, phase, library, shape, device)
    forward = _MAKERS[kind](request)
    if library == "inductor":
        torch._dynamo.reset()  # every shape its own static kernel, never the eager fallback after too many recompiles
        forward = torch.compile(forward, dynamic=False)
    return forward if phase == "fwd" else _backward(forward, request.leaves)


def _backward(forward: Run, leaves: list[torch.Tensor]) -> Run:
    out = forward()
    out = out[0] if isinstance(out, tuple) else out
    grad = torch.randn_like(out) if out.dim() else torch.ones_like(out)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


@maker("gemm")
def _gemm(r: Request) -> Run:
    m, n, k = r["m"], r["n"], r["k"]
    layout = r.opt("layout", "nt")  # nt = F.linear: both operands read along k
    if r.dtype == "fp8":
        a = torch.randn(m, k, device=r.device).to(torch.float8_e4m3fn)
        b = torch.randn(n, k, device=r.device).to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=r.device)
        return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    if r.dtype == "int8":
        a8 = torch.randint(-127, 127, (m, k), device=r.device, dtype=torch.int8)
        b8 = torch.randint(-127, 127, (n, k), device=r.device, dtype=torch.int8).t()
        return lambda: torch._int_mm(a8, b8)
    x = r.tensor(m, k) if layout[0] == "n" else r.tensor(k, m).t()
    w = r.tensor(k, n, scale=k**-0.5) if layout[1] == "n" else r.tensor(n, k, scale=k**-0.5).t()
    if r.opt("bias", 0):
        bias = r.tensor(n)
        return lambda: torch.addmm(bias, x, w)
    return lambda: torch.mm(x, w)


@maker("bmm")
def _bmm(r: Request) -> Run:
    x = r.tensor(r["b"], r["m"], r["k"])
    y = (
        r.tensor(r["b"], r["n"], r["k"]).transpose(1, 2)
        if r.opt("layout", "nn") == "nt"
        else r.tensor(r["b"], r["k"], r["n"])
    )
    return lambda: torch.bmm(x, y)


@maker("grouped_gemm")
def _grouped(r: Request) -> Run:
    g, m, n, k = r["groups"], r["m"], r["n"], r["k"]
    x, w = r.tensor(m, k), r.tensor(g, n, k).transpose(1, 2)
    ends = torch.tensor([(i + 1) * m // g for i in range(g)], device=r.device, dtype=torch.int32)
    return lambda: torch._grouped_mm(x, w, offs=ends)


@maker("attention")
def _attention(r: Request) -> Run:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = {
        "fa2": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }.get(r.library)
    q = r.tensor(r["b"], r["s"], r["h"], r["d"]).transpose(1, 2)
    k = r.tensor(r["b"], r["skv"], r["hkv"], r["d"]).transpose(1, 2)
    v = r.tensor(r["b"], r["skv"], r["hkv"], r["d"]).transpose(1, 2)
    gqa = r["h"] != r["hkv"]
    mask = None
    if r.opt("mask", 0):
        mask = torch.randn(r["b"], 1, r["s"], r["skv"], device=r.device, dtype=q.dtype)

    def run() -> torch.Tensor:
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=bool(r["causal"]), enable_gqa=gqa)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=bool(r["causal"]), enable_gqa=gqa)

    return run


@maker("layer_norm", "rms_norm")
def _norm(r: Request) -> Run:
    x, weight = r.tensor(r["n"], r["c"]), r.tensor(r["c"])
    if r.kind == "rms_norm":
        return lambda: F.rms_norm(x, (r["c"],), weight, 1e-6)
    bias = r.tensor(r["c"])
    return lambda: F.layer_norm(x, (r["c"],), weight, bias)


@maker("group_norm")
def _group_norm(r: Request) -> Run:
    x, weight, bias = r.tensor(r["n"], r["c"], r["h"], r["w"]), r.tensor(r["c"]), r.tensor(r["c"])
    if r.opt("nhwc", 0):
        x = x.detach().to(memory_format=torch.channels_last)
        if r.phase == "bwd":
            r.leaves[0] = x.requires_grad_(True)
    return lambda: F.group_norm(x, r["groups"], weight, bias)


@maker("batch_norm")
def _batch_norm(r: Request) -> Run:
    x = r.tensor(r["n"], r["c"], r["h"], r["w"])
    if r.opt("nhwc", 0):
        x = x.detach().to(memory_format=torch.channels_last)
        if r.phase == "bwd":
            r.leaves[0] = x.requires_grad_(True)
    weight, bias = r.tensor(r["c"]), r.tensor(r["c"])
    mean, var = torch.zeros_like(bias).detach(), torch.ones_like(bias).detach()
    training = bool(r.opt("training", 1))
    return lambda: F.batch_norm(x, mean, var, weight, bias, training)


@maker("softmax", "log_softmax")
def _softmax(r: Request) -> Run:
    x = r.tensor(r["n"], r["c"])
    return (lambda: F.softmax(x, -1)) if r.kind == "softmax" else (lambda: F.log_softmax(x, -1))


@maker("gelu", "silu", "relu", "exp", "tanh", "sigmoid", "neg", "rsqrt", "cos", "pow2", "gelu_tanh")
def _unary(r: Request) -> Run:
    x = r.tensor(r["n"], r["c"])
    fns: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "gelu": F.gelu,
        "silu": F.silu,
        "relu": F.relu,
        "exp": torch.exp,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "neg": torch.neg,
        "rsqrt": torch.rsqrt,
        "cos": torch.cos,
        "pow2": lambda t: t.pow(2),
        "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
    }
    fn = fns[r.kind]
    return lambda: fn(x)


@maker("add", "mul", "add_", "div", "where")
def _binary(r: Request) -> Run:
    x, y = r.tensor(r["n"], r["c"]), r.tensor(r["n"], r["c"])
    if r.kind == "add_":
        return lambda: x.add_(y)
    if r.kind == "where":
        cond = torch.rand(r["n"], r["c"], device=r.device) > 0.5
        return lambda: torch.where(cond, x, y)
    fn = {"add": torch.add, "mul": torch.mul, "div": torch.div}[r.kind]
    return lambda: fn(x, y)


@maker("add_row", "mul_col")
def _broadcast(r: Request) -> Run:
    x = r.tensor(r["n"], r["c"])
    y = r.tensor(r["c"]) if r.kind == "add_row" else r.tensor(r["n"], 1)
    return lambda: x + y if r.kind == "add_row" else x * y


@maker("add_strided")
def _strided(r: Request) -> Run:
    x = r.tensor(r["b"], r["s"], r["h"], r["d"]).transpose(1, 2)
    y = r.tensor(r["b"], r["h"], r["s"], r["d"])
    return lambda: x + y


@maker("cast")
def _cast(r: Request) -> Run:
    x = r.tensor(r["n"], r["c"])
    to = torch.float32 if r.dtype != "fp32" else torch.bfloat16
    return lambda: x.to(to)


@maker("copy", "transpose", "permute0213")
def _copy(r: Request) -> Run:
    if r.kind == "permute0213":
        x = r.tensor(r["b"], r["s"], r["h"], r["d"]).transpose(1, 2)
    else:
        x = r.tensor(r["n"], r["c"])
        x = x.t() if r.kind == "transpose" else x
    return lambda: x.clone(memory_format=torch.contiguous_format)


@maker("cat")
def _cat(r: Request) -> Run:
    x, y = r.tensor(r["n"], r["c"]), r.tensor(r["n"], r["c2"])
    return lambda: torch.cat([x, y], -1)


@maker("fill")
def _fill(r: Request) -> Run:
    x = r.tensor(r["n"], r["c"])
    return lambda: x.fill_(1.5)


@maker("dropout")
def _dropout(r: Request) -> Run:
    x = r.tensor(r["n"], r["c"])
    return lambda: F.dropout(x, 0.1, True)


@maker("sum_dim0", "sum_dim1", "mean_dim1", "sum_all", "argmax_dim1", "max_dim1", "norm_all")
def _reduce(r: Request) -> Run:
    x = r.tensor(r["n"], r["c"])
    fns: dict[str, Run] = {
        "sum_dim0": lambda: x.sum(0),
        "sum_dim1": lambda: x.sum(1),
        "mean_dim1": lambda: x.mean(-1, keepdim=True),
        "sum_all": lambda: x.sum(),
        "argmax_dim1": lambda: x.argmax(-1),
        "max_dim1": lambda: x.amax(-1),
        "norm_all": lambda: torch.linalg.vector_norm(x),
    }
    return fns[r.kind]


@maker("conv2d")
def _conv2d(r: Request) -> Run:
    kernel, stride, groups = r["k"], r["stride"], r["groups"]
    x = r.tensor(r["n"], r["c"], r["h"], r["w"], grad=False)
    weight = r.tensor(
        r["o"], r["c"] // groups, kernel, kernel, grad=False, scale=(r["c"] // groups * kernel**2) ** -0.5
    )
    if r.opt("nhwc", 0):
        x, weight = x.to(memory_format=torch.channels_last), weight.to(memory_format=torch.channels_last)
    if r.phase == "bwd":
        r.leaves += [x.requires_grad_(True), weight.requires_grad_(True)]
    return lambda: F.conv2d(x, weight, None, stride, r.opt("padding", kernel // 2), 1, groups)


@maker("conv1d")
def _conv1d(r: Request) -> Run:
    x = r.tensor(r["n"], r["c"], r["l"])
    weight = r.tensor(r["o"], r["c"] // r["groups"], r["k"])
    return lambda: F.conv1d(x, weight, None, r["stride"], r["k"] // 2, 1, r["groups"])


@maker("conv3d")
def _conv3d(r: Request) -> Run:
    x = r.tensor(r["n"], r["c"], r["t"], r["h"], r["w"])
    weight = r.tensor(r["o"], r["c"], r["k"], r["k"], r["k"])
    return lambda: F.conv3d(x, weight, None, r["stride"], r["k"] // 2)


@maker("embedding")
def _embedding(r: Request) -> Run:
    table, ids = r.tensor(r["v"], r["d"]), r.index(r["v"], r["n"])
    return lambda: F.embedding(ids, table)


@maker("embedding_bag")
def _embedding_bag(r: Request) -> Run:
    table = r.tensor(r["v"], r["d"])
    ids, ends = r.index(r["v"], r["b"] * r["l"]), torch.arange(0, r["b"] * r["l"], r["l"], device=r.device)
    return lambda: F.embedding_bag(ids, table, ends, mode="sum")


@maker("cross_entropy")
def _cross_entropy(r: Request) -> Run:
    logits, target = r.tensor(r["n"], r["v"]), r.index(r["v"], r["n"])
    return lambda: F.cross_entropy(logits, target)


@maker("topk")
def _topk(r: Request) -> Run:
    x = r.tensor(r["n"], r["v"], grad=False)
    return lambda: torch.topk(x, r["k"], -1)


@maker("sort")
def _sort(r: Request) -> Run:
    x = r.line()
    return lambda: torch.sort(x, -1)


@maker("cumsum")
def _cumsum(r: Request) -> Run:
    x = r.line(100)
    return lambda: torch.cumsum(x, -1)


@maker("index_select", "index_add", "gather_rows")
def _index(r: Request) -> Run:
    table, ids = r.tensor(r["v"], r["d"]), r.index(r["v"], r["n"])
    if r.kind == "index_select":
        return lambda: table.index_select(0, ids)
    if r.kind == "gather_rows":
        return lambda: table[ids]
    src = r.tensor(r["n"], r["d"])
    return lambda: table.index_add_(0, ids, src)


@maker("max_pool2d", "avg_pool2d", "adaptive_pool2d")
def _pool(r: Request) -> Run:
    x = r.tensor(r["n"], r["c"], r["h"], r["w"], grad=False)
    if r.opt("nhwc", 0):
        x = x.to(memory_format=torch.channels_last)
    if r.phase == "bwd":
        r.leaves.append(x.requires_grad_(True))
    fns: dict[str, Run] = {
        "max_pool2d": lambda: F.max_pool2d(x, r["k"], r["stride"], r["k"] // 2),
        "avg_pool2d": lambda: F.avg_pool2d(x, r["k"], r["stride"]),
        "adaptive_pool2d": lambda: F.adaptive_avg_pool2d(x, 1),
    }
    return fns[r.kind]


@maker("upsample2x")
def _upsample(r: Request) -> Run:
    x = r.tensor(r["n"], r["c"], r["h"], r["w"])
    mode = "nearest" if r.opt("nearest", 1) else "bilinear"
    return lambda: F.interpolate(x, scale_factor=2.0, mode=mode)


@maker("adamw")
def _adamw(r: Request) -> Run:
    params = [torch.nn.Parameter(r.tensor(r["numel"], grad=False)) for _ in range(r["tensors"])]
    for p in params:
        p.grad = torch.randn_like(p)
    options = {"fused": True} if r.library == "fused" else {"foreach": True}
    optimizer = torch.optim.AdamW(params, **options)
    return optimizer.step


@maker("foreach_add", "foreach_sqrt", "foreach_mul_", "foreach_addcdiv_")
def _foreach(r: Request) -> Run:
    xs, ys, zs = ([r.tensor(r["numel"], grad=False).abs_().add_(0.5) for _ in range(r["tensors"])] for _ in range(3))
    fns: dict[str, Run] = {
        "foreach_add": lambda: torch._foreach_add_(xs, ys),
        "foreach_sqrt": lambda: torch._foreach_sqrt(xs),
        "foreach_mul_": lambda: torch._foreach_mul_(xs, 0.999),
        "foreach_addcdiv_": lambda: torch._foreach_addcdiv_(xs, ys, zs, [-1e-3] * len(xs)),
    }
    return fns[r.kind]


@maker("lstm")
def _lstm(r: Request) -> Run:
    cell = torch.nn.LSTM(r["input"], r["hidden"], r["layers"]).to(r.device, _TORCH[r.dtype])
    x = r.tensor(r["seq"], r["batch"], r["input"])
    r.leaves.extend(cell.parameters() if r.phase == "bwd" else ())
    return lambda: cell(x)[0]


@maker("masked_fill", "clamp", "bitwise_not")
def _masked(r: Request) -> Run:
    x = r.tensor(r["n"], r["c"])
    mask = torch.rand(r["n"], r["c"], device=r.device) > 0.5
    if r.kind == "bitwise_not":
        return lambda: ~mask
    return (lambda: x.masked_fill(mask, 0.0)) if r.kind == "masked_fill" else (lambda: x.clamp(-1, 1))


@maker("index_put")
def _index_put(r: Request) -> Run:
    """Accumulating assignment: whole rows of a table, or (with ``pairs``) elements of the last two dims of a batch."""
    if "pairs" in r.shape:
        b, f = r["b"], r["f"]
        table, src = r.tensor(b, f, f), r.tensor(b, r["pairs"])
        first, second = r.index(f, r["pairs"]), r.index(f, r["pairs"])
        return lambda: torch.ops.aten.index_put_(table, [None, first, second], src, True)
    ids = r.index(r["v"], r["n"])
    if r["d"] == 1:
        line, values = r.tensor(r["v"]), r.tensor(r["n"])
        return lambda: line.index_put_((ids,), values, accumulate=True)
    rows, values = r.tensor(r["v"], r["d"]), r.tensor(r["n"], r["d"])
    return lambda: rows.index_put_((ids,), values, accumulate=True)


@maker("weight_norm")
def _weight_norm(r: Request) -> Run:
    """Norms over all but the first (``dim`` 0) or the last dim (``dim`` 1) of n rows of c."""
    v, dim = r.tensor(r["n"], r["c"]), r["dim"]
    g = r.tensor(*((r["n"], 1) if dim == 0 else (1, r["c"])))
    return lambda: torch._weight_norm_interface(v, g, dim)[0]


@maker("transfer")
def _transfer(r: Request) -> Run:
    """A copy over the bus: ``pinned`` host memory or not, ``to_host`` or from it, into a ``fresh`` buffer or a used."""
    on_host = torch.ones(r["num_bytes"], dtype=torch.uint8, pin_memory=bool(r["pinned"]) and r.device == "cuda")
    on_device = torch.ones(r["num_bytes"], dtype=torch.uint8, device=r.device)
    if r.opt("fresh", 0):
        return on_device.cpu if r["to_host"] else (lambda: on_host.to(r.device))
    to, source = (on_host, on_device) if r["to_host"] else (on_device, on_host)
    return lambda: to.copy_(source, non_blocking=bool(r["pinned"]))
