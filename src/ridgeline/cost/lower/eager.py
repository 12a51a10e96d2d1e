"""From an op of the graph to the library calls that eager PyTorch makes for it.

Sizes may be symbols (``graph/symbol.py``), whose numbers nobody can look at: rules say ``trunc``, not ``int``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from math import trunc

from ridgeline.cost.call import ITEMSIZE, Call, call
from ridgeline.cost.time.stream.elementwise import alu_of
from ridgeline.cost.work import Site, conv_dtype, work_of
from ridgeline.errors import CostError
from ridgeline.graph import TensorType, ops, tensor

Calls = tuple[Call, ...]
Rule = Callable[[Site, str], Calls]
_RULES: dict[str, Rule] = {}


class NoLowering(CostError):
    def __init__(self, op: str, where: str) -> None:
        super().__init__(f"op {op!r} at {where or 'top level'} has no kernel: add a lowering to cost/lower/eager.py")


def lowering(*names: str) -> Callable[[Rule], Rule]:
    def register(fn: Rule) -> Rule:
        for name in names:
            if name in _RULES:
                raise CostError(f"op {name!r} is lowered twice")
            _RULES[name] = fn
        return fn

    return register


def lower(site: Site, arch: str) -> Calls:
    """The calls behind one op on a device of this architecture; none for views and empty tensors."""
    if ops()[site.op].free or (site.outs and site.out_numel == 0):
        return ()
    found = _RULES.get(site.op)
    if found is None:
        raise NoLowering(site.op, site.where)
    return found(site, arch)


def _phase(site: Site) -> str:
    return "bwd" if site.backward else "fwd"


def _unpacked(site: Site, weight: TensorType, rows: int, product: Call) -> Calls:
    """A product with weights quantized in blocks: few rows read them as they are, more unpack them before it."""
    if rows > 8:
        wide = int(weight.numel * ITEMSIZE[site.dtype])
        return _stream(site.dtype, weight.numel, weight.num_bytes, wide, 1, 4.0, vector=0, cast=1), product
    work = work_of(site)
    touched = min(1.0, rows / weight.shape[0]) if len(weight.shape) == 3 else 1.0  # experts that a row chose
    read = int(work.read_bytes - weight.num_bytes * (1 - touched))
    dims = (("flops", int(work.flops)), ("matrix_flops", int(work.flops)), ("read_bytes", read),
            ("written_bytes", int(work.written_bytes)))  # fmt: skip
    return (Call("roofline", site.dtype, "fwd", "packed_linear", dims),)


@lowering("matmul")
def _matmul(site: Site, arch: str) -> Calls:
    a = site.attrs
    dtype = "fp8" if site.dtype == "fp8_e5m2" else site.dtype  # both formats share a rate
    layout = ("t" if a.get("trans_a") else "n") + ("t" if a.get("trans_b", True) else "n")
    if a["b"] == 1:
        made = call("gemm", dtype, "fwd", "cublas", m=a["m"], n=a["n"], k=a["k"], layout=layout)
        is_packed = len(site.ins) > 1 and site.ins[1].dtype.family == "packed"
        return _unpacked(site, site.ins[1], a["m"], made) if is_packed else (made,)
    return (call("bmm", site.dtype, "fwd", "cublas", b=a["b"], m=a["m"], n=a["n"], k=a["k"], layout=layout),)


@lowering("grouped_matmul")
def _grouped(site: Site, arch: str) -> Calls:
    a = site.attrs
    made = call("grouped_gemm", site.dtype, "fwd", "cublas", groups=a["groups"], m=a["m"], n=a["n"], k=a["k"],
                reduction=int(a.get("which") == "reduction"))  # fmt: skip
    is_packed = len(site.ins) > 1 and site.ins[1].dtype.family == "packed"
    return _unpacked(site, site.ins[1], a["m"], made) if is_packed else (made,)


@lowering("conv")
def _conv(site: Site, arch: str) -> Calls:
    a = site.attrs
    grads = a.get("grads", ("input", "weight"))
    out_spatial = a.get("out_spatial") or tuple(s // t for s, t in zip(a["spatial"], a["stride"], strict=True))
    if math.prod(a["spatial"]) == 1 and a["groups"] == 1 and not site.backward:  # squeeze-and-excite: a plain product
        return (call("gemm", site.dtype, "fwd", "cublas", m=a["n"], n=a["o"], k=a["c"] * math.prod(a["kernel"])),)
    made = [
        call(
            "conv",
            conv_dtype(site.dtype),
            _phase(site),
            "cudnn",
            n=a["n"],
            c=a["c"],
            o=a["o"],
            groups=a["groups"],
            in_px=math.prod(a["spatial"]),
            out_px=math.prod(out_spatial),
            kernel_elems=math.prod(a["kernel"]),
            stride_max=max(a["stride"]),
            nhwc=int(a.get("layout") == "channels_last"),
            transposed=int(bool(a["transposed"])),
            dgrad=int("input" in grads),
            wgrad=int("weight" in grads),
            spatial_rank=len(a["spatial"]),
            width=a["spatial"][-1],
        )
    ]
    if a.get("bias") and not site.backward:
        out = site.outs[0]
        made.append(_stream(site.dtype, out.numel, out.num_bytes, out.num_bytes, 2, 1.0, vector=0, dims=3))
    if site.backward and "bias" in grads:
        positions = math.prod(out_spatial)
        made.append(
            call(
                "reduce",
                site.dtype,
                outer=a["n"],
                reduced=positions,
                inner=a["o"],
                out_bytes=int(a["o"] * ITEMSIZE[site.dtype]),
            )
        )
    return tuple(made)


@lowering("attention")
def _attention(site: Site, arch: str) -> Calls:
    a = site.attrs
    backend = a.get("backend") or sdpa_backend(site, arch)
    dims = {key: trunc(a[key]) for key in ("b", "h", "hkv", "s", "skv", "d", "causal")}
    if a.get("dv") and a["dv"] != a["d"]:
        dims["dv"] = trunc(a["dv"])
    if a.get("window"):
        dims["window"] = trunc(a["window"])
    if a.get("mask"):
        dims["mask"] = 1
    if backend == "math":
        return _math_attention(site)
    return (Call("attention", site.dtype, _phase(site), backend, tuple(dims.items())),)


def sdpa_backend(site: Site, arch: str) -> str:
    """What scaled_dot_product_attention picks for this call."""
    a = site.attrs
    head_dim = max(a["d"], a.get("dv") or 0)
    if head_dim % 8 and a.get("mask"):
        return "math"
    return default_backend(arch, site.dtype, head_dim, masked=bool(a.get("mask")))


def default_backend(arch: str, dtype: str, head_dim: int, *, masked: bool = False) -> str:
    """cuDNN on recent GPUs, FlashAttention-2 where it applies, else the memory-efficient kernel."""
    half = dtype in ("fp16", "bf16")
    # Architectures on which PyTorch's scaled_dot_product_attention tries cuDNN first
    if arch.startswith(("hopper", "blackwell")) and half and head_dim <= 128:
        return "cudnn"
    return "fa2" if half and head_dim <= 256 and not masked else "efficient"


def _math_attention(site: Site) -> Calls:
    """The unfused path: scaled operands in fp32, two products, mask, safe softmax, casts."""
    a = site.attrs
    b, h, s, skv, d = a["b"], a["h"], a["s"], a["skv"], a["d"]
    scores, q, k = b * h * s * skv, b * h * s * d, b * h * skv * d
    wide = 4
    made = [_stream("fp32", n, n * 2, n * wide, 1, 2.0, vector=0, cast=1) for n in (q, k, k)]
    made += [_stream("fp32", n, n * wide, n * wide, 1, 1.0) for n in (q, k)]
    made += [_stream("fp32", n, n * wide, n * wide, 1, 1.0, vector=0, dims=4) for n in (q, k)]
    made.append(call("bmm", "fp32", "fwd", "cublas", b=b * h, m=s, n=skv, k=d))
    if a.get("mask"):
        made.append(
            _stream("fp32", scores, scores * wide + h * s * skv * 2, scores * wide, 2, 1.0, vector=0, cast=1, dims=4)
        )
    made.append(call("softmax", "fp32", n=b * h * s, c=skv))
    made += _masked_rows(tensor((b * h * s, skv), "fp32"), b * h * s, skv)
    made.append(_stream("fp32", scores, scores * wide, scores * 2, 1, 2.0))
    made.append(_stream("fp32", k, k * wide, k * wide, 1, 1.0, vector=0, dims=4))
    made.append(call("bmm", "fp32", "fwd", "cublas", b=b * h, m=s, n=d, k=skv))
    made.append(_stream("fp32", q, q * wide, q * 2, 1, 2.0))
    return tuple(made) * (2 if site.backward else 1)


def _stream(
    dtype: str,
    numel: float,
    read_bytes: float,
    written_bytes: float,
    num_inputs: int,
    alu: float,
    *,
    vector: int = 1,
    transposed: int = 0,
    cast: int = 0,
    dims: int = 2,
    rows: int = 32,
    row_bytes: int = 0,
) -> Call:
    shape = (
        ("numel", trunc(numel)), ("read_bytes", trunc(read_bytes)), ("written_bytes", trunc(written_bytes)),
        ("num_inputs", num_inputs), ("alu", alu), ("vector", vector), ("transposed", transposed), ("cast", cast),
        ("dims", dims), ("rows", rows), ("row_bytes", row_bytes),
    )  # fmt: skip
    return Call("pointwise", dtype, "fwd", "aten", shape)


def _shape_path(site: Site) -> dict[str, int]:
    """Which elementwise kernel ATen takes: vectorized where operands line up, converting, indexing or transposing."""
    out = site.outs[0]
    if out.layout == "contiguous" and all(
        t.number == out.number and b >= t.num_bytes for t, b in zip(site.ins, site.in_bytes, strict=True)
    ):  # most of them: operands and result alike
        return {"vector": 1, "cast": 0, "dims": min(5, sum([d > 1 for d in out.shape])) or 1}
    tensors = [t for t in site.ins if t.numel > 1]
    same_shape = all(
        t.numel == out.numel and b >= t.num_bytes for t, b in zip(site.ins, site.in_bytes, strict=True) if t.numel > 1
    )
    layouts = {t.layout for t in (*tensors, out) if sum(d > 1 for d in t.shape) > 1}
    same_layout = len(layouts) <= 1 and "strided" not in layouts
    crossed = "transposed" in layouts and len(layouts) > 1 and same_shape
    widths = {t.dtype.name for t in (*tensors, out) if t.dtype.family != "bool"}
    mixed = len({t.dtype.name for t in tensors}) > 1 or (len(widths) > 1 and not _narrowing(tensors, out))
    path = {
        "vector": int(same_shape and same_layout and not mixed),
        "cast": int(mixed and same_shape and same_layout),
        "dims": min(5, sum(d > 1 for d in out.shape)) or 1,
    }
    if crossed:
        path |= {
            "transposed": 1,
            "rows": out.shape[-2] if len(out.shape) > 1 else 32,
            "row_bytes": trunc(out.shape[-1] * out.dtype.itemsize),
        }
    return path


def _made_contiguous(t: TensorType) -> Calls:
    """The copy a library makes inside when it only takes rows that lie one after the other."""
    if t.layout in ("contiguous", "channels_last") or t.numel <= 1:
        return ()
    crossed = (
        {
            "transposed": 1,
            "rows": t.shape[-2] if len(t.shape) > 1 else 32,
            "row_bytes": trunc(t.shape[-1] * t.dtype.itemsize),
        }
        if t.layout == "transposed"
        else {}
    )
    return (
        _stream(
            t.dtype.name, t.numel, t.num_bytes, t.num_bytes, 1, 1.0, vector=0, dims=min(4, len(t.shape)), **crossed
        ),
    )


def _narrowing(tensors: list[TensorType], out: TensorType) -> bool:
    """fp32 → bf16 and comparisons write narrow results from the vectorized kernel."""
    return len(tensors) == 1 and (out.dtype.bits < tensors[0].dtype.bits or out.dtype.family == "bool")


def function_of(site: Site) -> str:
    """What an elementwise op computes, by the name its instructions are counted under."""
    return "quantize" if site.op == "quantize" else str(site.attrs["fn"]).rstrip("_")


@lowering("pointwise", "quantize")
def _pointwise(site: Site, arch: str) -> Calls:
    fn = function_of(site)
    written = max(site.written_bytes, 1.0)
    read = site.read_bytes
    path = _shape_path(site)
    return (
        _stream(site.dtype, max(t.numel for t in site.outs), read, written, max(1, len(site.ins)), alu_of(fn), **path),
    )


@lowering("copy")
def _copy(site: Site, arch: str) -> Calls:
    fn, work = str(site.attrs["fn"]).rstrip("_"), work_of(site)
    out = site.outs[0]
    if fn in ("cat", "stack"):
        return _cat(site)
    if fn in ("roll", "flip"):
        return (_stream(site.dtype, out.numel, work.read_bytes, work.written_bytes, 1, 8.0, vector=0, dims=4),)
    path = _shape_path(site)
    source = site.ins[-1] if site.ins else out
    if site.attrs.get("transposed") or source.layout in ("strided", "transposed"):
        path["vector"], path["cast"] = 0, 0
    if path["vector"] and source.dtype == out.dtype:
        n = max(1, out.numel)
        return (call("copy", site.dtype, n=1, c=n),)
    return (_stream(site.dtype, out.numel, work.read_bytes, work.written_bytes, 1, 1.0, **path),)


def _cat(site: Site) -> Calls:
    """Concatenation copies aligned pieces side by side; the row is what lies behind the joined dim."""
    out = site.outs[0]
    dim = int(site.attrs.get("dim", 0)) % max(1, len(out.shape)) if out.shape else 0
    inner = math.prod(out.shape[dim + 1 :])
    parts = [t.shape[dim] if site.attrs["fn"] == "cat" and len(t.shape) == len(out.shape) else 1 for t in site.ins]
    rows = math.prod(out.shape[:dim])
    total = max(1, sum(parts)) * inner
    first = max(1, parts[0] * inner if parts else total)
    if any(
        t.layout != "contiguous" for t in site.ins
    ):  # element by element, one grid row per input: unequal inputs idle
        largest = max((t.numel for t in site.ins), default=1) * len(site.ins) / max(1, out.numel)
        return (
            _stream(
                site.dtype,
                out.numel,
                site.read_bytes,
                site.written_bytes,
                1,
                60.0 + 55.0 * (min(2.0, largest) - 1.0),
                vector=0,
                dims=4,
            ),
        )
    return (call("cat", site.dtype, n=max(1, rows), c=first, c2=max(0, total - first)),)


@lowering("fill")
def _fill(site: Site, arch: str) -> Calls:
    return (call("fill", site.outs[0].dtype.name, n=1, c=max(1, site.out_numel)),)


@lowering("random")
def _random(site: Site, arch: str) -> Calls:
    return (call("random", site.outs[0].dtype.name, n=1, c=max(1, site.out_numel)),)


@lowering("reduce")
def _reduce(site: Site, arch: str) -> Calls:
    source, fn = site.ins[0], str(site.attrs["fn"])
    outer, reduced, inner = reduced_extent(source.shape, site.attrs["dims"])
    dims = {"outer": outer, "reduced": reduced, "inner": inner, "out_bytes": trunc(site.written_bytes)}
    if fn.startswith("arg"):
        dims["index"] = 1
    elif fn in ("max", "min", "amax", "amin"):
        dims["guard"] = 1
    elif "norm" in fn:
        dims["norm"] = 1
    return (Call("reduce", source.dtype.name, "fwd", "aten", tuple(dims.items())),)


def reduced_extent(shape: tuple[int, ...], dims: object) -> tuple[int, int, int]:
    """A reduction seen as [outer, reduced, inner]: dims behind the last reduced one are inner."""
    rank = len(shape)
    chosen = (
        sorted({int(d) % rank for d in dims})
        if isinstance(dims, (tuple, list)) and dims and rank
        else list(range(rank))
    )
    reduced = math.prod(shape[d] for d in chosen)
    inner = math.prod(shape[chosen[-1] + 1 :]) if chosen else 1
    outer = max(1, math.prod(shape)) // max(1, reduced * inner)
    return max(1, outer), max(1, reduced), max(1, inner)


@lowering("norm")
def _norm(site: Site, arch: str) -> Calls:
    a = site.attrs
    fn, x = str(a["fn"]), max(site.ins, key=lambda t: t.numel)
    if "weight_norm" in fn:
        if a["n"] == x.shape[0]:  # norms of whole slices of the first dim
            return (call("weight_norm", x.dtype.name, _phase(site), n=a["n"], c=a["c"], dim=0),)
        last = max(1, x.shape[-1])
        return (call("weight_norm", x.dtype.name, _phase(site), n=x.numel // last, c=last, dim=1),)
    if fn in ("layer_norm", "rms_norm"):
        copies = [c for t in site.ins if t.numel == x.numel for c in _made_contiguous(t)]
        return (*copies, call(fn, x.dtype.name, _phase(site), n=a["n"], c=a["c"]))
    n, channels = x.shape[0], x.shape[1] if len(x.shape) > 1 else 1
    px = math.prod(x.shape[2:])
    nhwc = int(a.get("layout", x.layout) == "channels_last")
    if fn == "group_norm":
        return (
            call(
                "group_norm",
                x.dtype.name,
                _phase(site),
                n=n,
                c=channels,
                h=px,
                w=1,
                groups=max(1, a["n"] // max(1, n)),
                nhwc=nhwc,
            ),
        )
    if fn == "instance_norm":
        return (call("group_norm", x.dtype.name, _phase(site), n=n, c=channels, h=px, w=1, groups=channels, nhwc=nhwc),)
    return (
        call(
            "batch_norm",
            x.dtype.name,
            _phase(site),
            "cudnn",
            n=n,
            c=channels,
            h=px,
            w=1,
            training=int(bool(a.get("training", site.backward))),
            nhwc=nhwc,
        ),
    )


@lowering("softmax")
def _softmax(site: Site, arch: str) -> Calls:
    a, x = site.attrs, site.ins[0]
    kind = "log_softmax" if a.get("log") else "softmax"
    made = (*_made_contiguous(x), call(kind, x.dtype.name, _phase(site), n=a["n"], c=a["c"]))
    return (*made, *_masked_rows(x, a["n"], a["c"])) if a.get("safe") else made


def _masked_rows(x: TensorType, n: int, c: int) -> Calls:
    """What a safe softmax does besides: find rows that were all -inf, and write zeros there."""
    return (
        _stream(x.dtype.name, x.numel, x.num_bytes, x.numel, 1, 1.0),
        call("reduce", "bool", outer=n, reduced=c, inner=1, out_bytes=n),
        call("fill", x.dtype.name, n=1, c=1),
        _stream(x.dtype.name, x.numel, x.num_bytes + n, x.num_bytes, 3, 2.0, vector=0, dims=4),
    )


@lowering("loss")
def _loss(site: Site, arch: str) -> Calls:
    a = site.attrs
    if str(a["fn"]).startswith("nll"):
        return (call("nll_loss", site.dtype, _phase(site), n=a["n"], v=a["c"]),)
    out = max((*site.ins, *site.outs), key=lambda t: t.numel)
    made = [_stream(site.dtype, out.numel, site.read_bytes, out.num_bytes, max(1, len(site.ins)), 6.0)]
    if site.outs and site.outs[0].numel == 1 and out.numel > 1:
        made.append(call("reduce", site.dtype, outer=1, reduced=out.numel, inner=1, out_bytes=4))
    return tuple(made)


@lowering("cross_entropy")
def _cross_entropy(site: Site, arch: str) -> Calls:
    return (call("cross_entropy", site.dtype, _phase(site), n=site.attrs["n"], v=site.attrs["v"]),)


@lowering("embedding")
def _embedding(site: Site, arch: str) -> Calls:
    a = site.attrs
    dtype = site.outs[0].dtype.name if site.outs else site.dtype
    return (call("embedding", dtype, _phase(site), v=a["rows"], d=a["cols"], n=max(1, a["num"])),)


@lowering("embedding_bag")
def _embedding_bag(site: Site, arch: str) -> Calls:
    a = site.attrs
    return (call("embedding_bag", site.dtype, _phase(site), v=a["v"], d=a["d"], b=a["b"], l=max(1, round(a["l"]))),)


@lowering("gather")
def _gather(site: Site, arch: str) -> Calls:
    out = site.outs[0]
    row = out.shape[-1] if out.shape and site.attrs["fn"] in ("index_select", "index", "embedding") else 1
    return (
        call(
            "gather",
            out.dtype.name,
            rows=max(1, out.numel // max(1, row)),
            row_bytes=max(1, trunc(row * out.dtype.itemsize)),
            table_bytes=max(1, trunc(site.in_bytes[0]) if site.in_bytes else 1),
        ),
    )


@lowering("scatter")
def _scatter(site: Site, arch: str) -> Calls:
    source = max(site.ins[1:] or site.ins, key=lambda t: t.numel)
    indices = max((t.numel for t in site.ins[1:] if t.dtype.family == "int"), default=1)
    single = len(source.shape) > 1 and source.shape[-1] == indices != source.shape[0]  # elements, not rows, are picked
    if site.attrs["fn"] == "index_put" and site.attrs.get("reduce"):  # sorted by position, then added run by run
        if single:
            sets = max(1, source.numel // indices)
            return (call("index_put", source.dtype.name, count=indices, width=1, sets=sets, rows=indices),)
        width = max(1, source.numel // max(1, indices))
        rows = max(1, site.ins[0].numel // width)
        return (call("index_put", source.dtype.name, count=indices, width=width, sets=1, rows=rows),)
    row = source.shape[-1] if source.shape and str(site.attrs["fn"]).startswith("index") else 1
    return (
        call(
            "scatter",
            source.dtype.name,
            rows=max(1, source.numel // max(1, row)),
            row_bytes=max(1, trunc(row * source.dtype.itemsize)),
        ),
    )


@lowering("scan")
def _scan(site: Site, arch: str) -> Calls:
    return (call("cumsum", site.dtype, n=site.attrs["n"], c=site.attrs["c"]),)


@lowering("sort")
def _sort(site: Site, arch: str) -> Calls:
    return (call("sort", site.ins[0].dtype.name, n=site.attrs["n"], c=site.attrs["c"]),)


@lowering("topk")
def _topk(site: Site, arch: str) -> Calls:
    a = site.attrs
    return (call("topk", site.ins[0].dtype.name, n=a["n"], v=a["v"], k=a["k"]),)


@lowering("pool")
def _pool(site: Site, arch: str) -> Calls:
    source, out = max(site.ins, key=lambda t: t.numel), max(site.outs, key=lambda t: t.numel)
    window = math.prod(site.attrs["kernel"]) if site.attrs["kernel"] else 1
    return (
        call(
            "pool", source.dtype.name, _phase(site), in_numel=source.numel, out_numel=out.numel, window=max(1, window)
        ),
    )


@lowering("resize")
def _resize(site: Site, arch: str) -> Calls:
    source, out = max(site.ins, key=lambda t: t.numel), site.outs[0]
    return (
        call(
            "resize",
            source.dtype.name,
            _phase(site),
            in_numel=source.numel,
            out_numel=out.numel,
            window=1 if "nearest" in str(site.attrs["fn"]) else 4,
        ),
    )


@lowering("nonzero")
def _nonzero(site: Site, arch: str) -> Calls:
    numel = max(1, site.ins[0].numel)
    return (call("reduce", "int64", outer=1, reduced=numel, inner=1, out_bytes=8), call("cumsum", "int64", n=numel))


@lowering("foreach")
def _foreach(site: Site, arch: str) -> Calls:
    a = site.attrs
    return (
        call(
            "foreach",
            site.dtype,
            numel=a["numel"],
            num_tensors=a["num_tensors"],
            reads=a.get("reads", 1),
            writes=a.get("writes", 1),
        ),
    )


@lowering("optimizer")
def _optimizer(site: Site, arch: str) -> Calls:
    a = site.attrs
    tensors = max(1, a["num_tensors"])
    return (call("adamw", site.dtype, "fwd", "fused", numel=max(1, a["numel"] // tensors), tensors=tensors, mixed=1),)


@lowering("rnn")
def _rnn(site: Site, arch: str) -> Calls:
    a = site.attrs
    return (
        call(
            "lstm",
            site.dtype,
            _phase(site),
            "cudnn",
            input=a["input"],
            hidden=a["hidden"],
            layers=a["layers"] * (2 if a.get("bidirectional") else 1),
            seq=a["seq"],
            batch=a["batch"],
        ),
    )


@lowering("fft", "linalg", "custom")
def _declared(site: Site, arch: str) -> Calls:
    work = work_of(site)
    name = str(site.attrs.get("name") or site.attrs.get("fn") or site.op)
    products: Calls = ()
    if site.target.endswith("linear_cross_entropy.default") and work.matrix_flops:  # its products are cuBLAS's
        (rows, hidden), cols = site.ins[0].shape, site.ins[1].shape[0]
        num = round(work.matrix_flops / (2 * rows * hidden * cols))
        sizes = ((rows, cols, hidden, "nt"), (rows, hidden, cols, "nn"), (cols, hidden, rows, "tn"))[:num]
        products = tuple(
            call("gemm", site.dtype, "fwd", "cublas", m=m, n=n, k=k, layout=layout) for m, n, k, layout in sizes
        )
        logits = rows * cols * ITEMSIZE[site.dtype]  # read for the sums, then read and written by their gradient
        work = replace(work, matrix_flops=0.0, flops=work.flops - work.matrix_flops,
                       read_bytes=min(num, 2) * logits, written_bytes=(num > 1) * logits)  # fmt: skip
    if "varlen_attention" in site.target and work.matrix_flops:  # as fast as cuDNN's, of sequences of one length
        backward = "backward" in site.target
        (rows, heads, dim), (_, kv_heads, value_dim) = site.ins[backward].shape, site.ins[2 + backward].shape
        width = 4 * dim + 3 * value_dim if backward else dim + value_dim
        length = max(1, round(work.matrix_flops / (rows * heads * width)))
        if max(dim, value_dim) <= 128:
            dims = {"b": max(1, rows // length), "h": heads, "hkv": kv_heads, "s": length, "skv": length, "d": dim,
                    "causal": 1, **({"dv": value_dim} if value_dim != dim else {})}  # fmt: skip
            return (Call("attention", site.dtype, "bwd" if backward else "fwd", "cudnn", tuple(dims.items())),)
    return (
        *products,
        Call(
            "roofline",
            work.dtype,
            "fwd",
            name,
            (
                ("flops", int(work.flops)),
                ("matrix_flops", int(work.matrix_flops)),
                ("read_bytes", int(work.read_bytes)),
                ("written_bytes", int(work.written_bytes)),
            ),
        ),
    )


@lowering("transfer")
def _transfer(site: Site, arch: str) -> Calls:
    moved = int(max(site.read_bytes, site.written_bytes))
    return (call("transfer", site.dtype, num_bytes=moved, pinned=int(bool(site.attrs.get("pinned")))),)


@lowering("collective")
def _collective(site: Site, arch: str) -> Calls:
    raise CostError(
        f"{site.attrs['fn']} over {site.attrs['num_ranks']} ranks at {site.where or 'top level'}: a prediction is of "
        "one device, and a collective's time is the network's; capture the model without its process group"
    )


@lowering("sync")
def _sync(site: Site, arch: str) -> Calls:
    return (_stream("int64", 1, 8, 8, 1, 0.0),)
