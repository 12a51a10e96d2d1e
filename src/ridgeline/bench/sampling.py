"""Which operators a calibration measures: seeded random shapes over the ranges people use."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Point:
    """One operator to measure."""

    kind: str
    dtype: str
    phase: str
    library: str
    shape: dict[str, Any] = field(hash=False)


Draw = Callable[[random.Random], Point | None]


def points(seed: int = 0, scale: float = 1.0, compiled: bool = False) -> Iterator[Point]:
    """The whole calibration set, ``scale`` times as many shapes; ``compiled`` asks for Inductor's kernels instead."""
    return drawn(_COMPILED if compiled else _FAMILIES, seed, scale)


def drawn(families: Sequence[tuple[Draw, int]], seed: int, scale: float) -> Iterator[Point]:
    """Points of each family, ``scale`` times as many as it asks for; a family may pass over what cannot be."""
    rng = random.Random(seed)
    for family, count in families:
        for _ in range(max(1, round(count * scale))):
            point = family(rng)
            if point is not None:
                yield point


def between(rng: random.Random, low: float, high: float) -> int:
    """Log-uniform."""
    return round(low * (high / low) ** rng.random())


def _dim(rng: random.Random, low: int, high: int) -> int:
    """A dimension as found in models: mostly multiples of 128 or 64, some of 8, a few arbitrary."""
    value = between(rng, low, high)
    grain = rng.choices((256, 128, 64, 16, 8, 1), (30, 25, 15, 10, 10, 10))[0]
    return max(low, round(value / grain) * grain, 1) if value >= grain else value


_WIDTHS = (
    512,
    768,
    1024,
    1280,
    1536,
    2048,
    2560,
    3072,
    3584,
    4096,
    5120,
    6144,
    8192,
    11008,
    12288,
    14336,
    16384,
    28672,
    32000,
)


def _gemm(dtype: str, max_flops: float = 3e12) -> Callable[[random.Random], Point | None]:
    def draw(rng: random.Random) -> Point | None:
        for _ in range(100):
            model_like = rng.random() < 0.45
            m = (
                rng.choice((1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384))
                if model_like
                else _dim(rng, 1, 16384)
            )
            n = rng.choice(_WIDTHS) if model_like else _dim(rng, 32, 16384)
            k = rng.choice(_WIDTHS) if model_like else _dim(rng, 32, 16384)
            if dtype == "fp8":
                n, k = max(16, n // 16 * 16), max(16, k // 16 * 16)
            if dtype == "int8":
                m, n, k = max(32, m // 8 * 8), max(16, n // 16 * 16), max(16, k // 16 * 16)
            if 2.0 * m * n * k <= max_flops and m * n + m * k + n * k < 1.2e9:
                layout = (
                    rng.choices(("nt", "nn", "tn"), (60, 25, 15))[0]
                    if dtype in ("bf16", "fp16", "fp32", "tf32")
                    else "nt"
                )
                phase = "bwd" if dtype == "bf16" and rng.random() < 0.07 else "fwd"
                return Point("gemm", dtype, phase, "cublas", {"m": m, "n": n, "k": k, "layout": layout})
        return None

    return draw


def _bmm(rng: random.Random) -> Point | None:
    for _ in range(100):
        b, m, n, k = between(rng, 2, 512), _dim(rng, 16, 4096), _dim(rng, 16, 4096), _dim(rng, 16, 4096)
        if 2.0 * b * m * n * k < 2e12 and b * (m * n + m * k + n * k) < 6e8:
            dtype = rng.choices(("bf16", "fp16", "fp32"), (80, 10, 10))[0]
            phase = "bwd" if rng.random() < 0.15 else "fwd"
            return Point(
                "bmm", dtype, phase, "cublas", {"b": b, "m": m, "n": n, "k": k, "layout": rng.choice(("nn", "nt"))}
            )
    return None


def _grouped(rng: random.Random) -> Point:
    groups = rng.choice((4, 8, 16, 32, 64, 128))
    m = between(rng, groups, 32768) // 8 * 8 + 8
    return Point(
        "grouped_gemm",
        "bf16",
        "fwd",
        "cublas",
        {"groups": groups, "m": m, "n": rng.choice(_WIDTHS[:12]), "k": rng.choice(_WIDTHS[:12])},
    )


def _attention(library: str, phase: str, mask: bool = False) -> Callable[[random.Random], Point | None]:
    def draw(rng: random.Random) -> Point | None:
        for _ in range(200):
            d = rng.choices((64, 128, 96, 80, 256, 72, 32), (35, 45, 4, 6, 5, 3, 2))[0]
            hkv = rng.choice((1, 2, 4, 8, 8, 12, 16, 16, 32))
            group = rng.choices((1, 4, 8, 2), (55, 20, 15, 10))[0] if not mask else 1
            h = hkv * group
            s = between(rng, 64, 16384)
            s = s if rng.random() < 0.35 else max(64, round(s / 128) * 128)
            skv = s if rng.random() < 0.85 else max(64, between(rng, 64, 8192) // 64 * 64)
            b = between(rng, 1, 64)
            causal = int(rng.random() < 0.5) if skv == s and not mask else 0
            if (
                4.0 * b * h * s * skv * d < 4e12
                and b * s * h * d < 4e8
                and b * h * s * skv > 2e5
                and (not mask or b * s * skv < 4e8)
            ):
                shape = {"b": b, "h": h, "hkv": hkv, "s": s, "skv": skv, "d": d, "causal": causal}
                if mask:
                    shape["mask"] = 1
                dtype = "bf16" if rng.random() < 0.85 else "fp16"
                return Point("attention", dtype, phase, library, shape)
        return None

    return draw


def _decode(rng: random.Random) -> Point | None:
    for _ in range(100):
        hkv, group = rng.choice((1, 4, 8, 16, 32)), rng.choice((1, 4, 8))
        shape = {
            "b": between(rng, 1, 256),
            "h": hkv * group,
            "hkv": hkv,
            "s": 1,
            "skv": _dim(rng, 64, 32768),
            "d": rng.choice((64, 128, 128)),
            "causal": 0,
        }
        if 2.0 * shape["b"] * shape["skv"] * shape["h"] * shape["d"] < 2e9:
            return Point("attention", "bf16", "fwd", "fa2", shape)
    return None


def _rows(
    kind: str,
    phase: str = "fwd",
    library: str = "aten",
    low: float = 1e4,
    high: float = 3e8,
    dtypes: tuple[str, ...] = ("bf16", "bf16", "bf16", "fp16", "fp32", "fp32"),
    max_c: int = 40000,
) -> Callable[[random.Random], Point]:
    def draw(rng: random.Random) -> Point:
        numel = between(rng, low, high)
        c = min(_dim(rng, 16, max_c), numel)
        n = max(1, round(numel / c))
        return Point(kind, rng.choice(dtypes), phase, library, {"n": n, "c": c})

    return draw


def _heads(kind: str) -> Callable[[random.Random], Point]:
    def draw(rng: random.Random) -> Point:
        h, d = rng.choice((8, 12, 16, 32, 40)), rng.choice((64, 128, 96))
        tokens = between(rng, 16, 65536)
        b = rng.choice((1, 2, 4, 8, 16))
        return Point(
            kind,
            rng.choice(("bf16", "bf16", "fp32")),
            "fwd",
            "aten",
            {"b": b, "s": max(1, tokens // b), "h": h, "d": d},
        )

    return draw


def _cat(rng: random.Random) -> Point:
    base = _rows("cat", high=1e8)(rng)
    return Point(
        "cat",
        base.dtype,
        "fwd",
        "aten",
        {**base.shape, "c2": base.shape["c"] if rng.random() < 0.6 else _dim(rng, 16, 4096)},
    )


def _conv(phase: str, depthwise: bool = False) -> Callable[[random.Random], Point | None]:
    def draw(rng: random.Random) -> Point | None:
        for _ in range(200):
            c = rng.choice((3, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 2048))
            o = c if depthwise else rng.choice((16, 32, 64, 96, 128, 192, 256, 320, 384, 512, 640, 1024, 1280, 2048))
            k = rng.choice((3, 5, 7)) if depthwise else rng.choices((1, 3, 5, 7, 2, 4), (35, 45, 4, 6, 5, 5))[0]
            hw = rng.choice((7, 8, 14, 16, 28, 32, 56, 64, 112, 128, 224, 256))
            stride = rng.choices((1, 2, k), (70, 25, 5))[0]
            n = between(rng, 1, 256)
            groups = c if depthwise else rng.choices((1, 32), (92, 8))[0]
            out = (hw // stride) ** 2
            flops = 2.0 * n * o * out * (c // groups) * k * k if c % groups == 0 else 1e99
            if c % groups or o % groups or flops > 1.2e12 or n * hw * hw * max(c, o) > 3e8 or flops < 2e6:
                continue
            dtype = rng.choices(("bf16", "fp16", "fp32"), (75, 10, 15))[0]
            shape = {
                "n": n,
                "c": c,
                "h": hw,
                "w": hw,
                "o": o,
                "k": k,
                "stride": stride,
                "groups": groups,
                "nhwc": int(rng.random() < 0.4),
            }
            return Point("conv2d", dtype, phase, "cudnn", shape)
        return None

    return draw


def _image(kind: str, phase: str = "fwd") -> Callable[[random.Random], Point | None]:
    def draw(rng: random.Random) -> Point | None:
        for _ in range(100):
            shape: dict[str, Any] = {
                "n": between(rng, 1, 256),
                "c": rng.choice((32, 64, 128, 256, 320, 512, 640, 1024, 2048)),
                "h": (hw := rng.choice((7, 8, 14, 16, 28, 32, 56, 64, 112, 128))),
                "w": hw,
            }
            if not 1e4 < shape["n"] * shape["c"] * hw * hw < 2e8:
                continue
            if kind == "group_norm":
                shape["groups"] = 32
            if kind in ("max_pool2d", "avg_pool2d"):
                shape |= {"k": 3 if kind == "max_pool2d" else 2, "stride": 2}
            if kind == "batch_norm":
                shape["training"] = 1 if phase == "bwd" else int(rng.random() < 0.6)
            if kind not in ("upsample2x",):
                shape["nhwc"] = int(rng.random() < 0.4)
            return Point(
                kind, rng.choice(("bf16", "bf16", "fp32")), phase, "cudnn" if kind == "batch_norm" else "aten", shape
            )
        return None

    return draw


def _table(kind: str, phase: str = "fwd") -> Callable[[random.Random], Point]:
    def draw(rng: random.Random) -> Point:
        d = rng.choice((16, 32, 64, 128, 256, 768, 1024, 4096))
        v = between(rng, 1e3, min(4e8 / d, 1e7))
        dtype = rng.choice(("bf16", "fp32"))
        return Point(kind, dtype, phase, "aten", {"v": v, "d": d, "n": between(rng, 64, min(5e5, 2e8 / d))})

    return draw


def _bag(phase: str) -> Callable[[random.Random], Point]:
    def draw(rng: random.Random) -> Point:
        d = rng.choice((16, 32, 64, 128, 256))
        v, b, length = between(rng, 1e3, min(5e8 / d, 1e7)), between(rng, 128, 65536), between(rng, 1, 100)
        shape = {"v": v, "d": d, "b": b, "l": length}
        shape["l"] = max(1, min(shape["l"], 3_000_000 // shape["b"]))
        return Point("embedding_bag", rng.choice(("fp32", "fp32", "bf16")), phase, "aten", shape)

    return draw


def _loss(phase: str) -> Callable[[random.Random], Point]:
    def draw(rng: random.Random) -> Point:
        v = rng.choice((10, 100, 1000, 8192, 30522, 32000, 50257, 50304, 65536, 128256, 151936))
        return Point(
            "cross_entropy",
            rng.choice(("bf16", "fp32")),
            phase,
            "aten",
            {"n": between(rng, 8, min(32768, 6e8 / v)), "v": v},
        )

    return draw


def _topk(rng: random.Random) -> Point:
    v = rng.choice((8, 16, 64, 128, 256, 1000, 4096, 8192, 32000, 50257, 128256, 151936))
    return Point(
        "topk",
        rng.choice(("bf16", "fp32")),
        "fwd",
        "aten",
        {"n": between(rng, 1, min(65536, 3e8 / v)), "v": v, "k": min(v, rng.choice((1, 2, 4, 8, 10, 50, 64, 100)))},
    )


def _line(kind: str) -> Callable[[random.Random], Point]:
    def draw(rng: random.Random) -> Point:
        dtype = rng.choice(("fp32", "bf16", "int64"))
        if rng.random() < 0.6:
            return Point(
                kind,
                dtype if kind == "cumsum" or dtype != "int64" else "fp32",
                "fwd",
                "aten",
                {"n": between(rng, 256, 3e7)},
            )
        c = between(rng, 32, 65536)
        return Point(
            kind, "fp32" if dtype == "int64" else dtype, "fwd", "aten", {"n": between(rng, 2, max(3, 2e7 / c)), "c": c}
        )

    return draw


def _optimizer(library: str) -> Callable[[random.Random], Point]:
    def draw(rng: random.Random) -> Point:
        numel = between(rng, 4e3, 3e7)
        return Point(
            "adamw",
            rng.choice(("bf16", "fp32")),
            "fwd",
            library,
            {"numel": numel, "tensors": max(1, min(200, int(4e8 / numel), between(rng, 1, 200)))},
        )

    return draw


def _foreach(kind: str) -> Callable[[random.Random], Point]:
    def draw(rng: random.Random) -> Point:
        numel = between(rng, 4e3, 3e7)
        return Point(
            kind,
            rng.choice(("bf16", "fp32")),
            "fwd",
            "aten",
            {"numel": numel, "tensors": max(1, min(200, int(4e8 / numel), between(rng, 1, 200)))},
        )

    return draw


def _lstm(rng: random.Random) -> Point:
    return Point(
        "lstm",
        "bf16",
        "fwd",
        "cudnn",
        {
            "input": (h := rng.choice((256, 512, 1024))),
            "hidden": h,
            "layers": rng.choice((1, 2)),
            "seq": between(rng, 16, 256),
            "batch": between(rng, 1, 128),
        },
    )


def _conv1d(rng: random.Random) -> Point:
    c = rng.choice((80, 256, 512, 1024, 1536))
    o = rng.choice((256, 512, 1024, 1280))
    depth = rng.random() < 0.3
    return Point(
        "conv1d",
        "bf16",
        "fwd",
        "cudnn",
        {
            "n": between(rng, 1, 16),
            "c": c,
            "l": between(rng, 200, 8000),
            "o": c if depth else o,
            "k": rng.choice((3, 4)),
            "stride": rng.choice((1, 2)),
            "groups": c if depth else 1,
        },
    )


def _conv3d(rng: random.Random) -> Point:
    return Point(
        "conv3d",
        "bf16",
        "fwd",
        "cudnn",
        {
            "n": rng.choice((1, 2)),
            "c": rng.choice((1, 16, 32, 64)),
            "o": rng.choice((32, 64)),
            "t": 16,
            "h": (h := rng.choice((32, 64))),
            "w": h,
            "k": 3,
            "stride": rng.choice((1, 2)),
        },
    )


_FAMILIES: Sequence[tuple[Callable[[random.Random], Point | None], int]] = [
    (_gemm("bf16"), 900),
    (_gemm("fp16"), 60),
    (_gemm("fp32", 4e11), 110),
    (_gemm("tf32", 1e12), 60),
    (_gemm("fp8"), 120),
    (_gemm("int8"), 20),
    (_bmm, 170),
    (_grouped, 60),
    (_attention("fa2", "fwd"), 240),
    (_attention("fa2", "bwd"), 130),
    (_attention("cudnn", "fwd"), 130),
    (_attention("cudnn", "bwd"), 80),
    (_attention("efficient", "fwd", True), 50),
    (_attention("efficient", "bwd", True), 30),
    (_decode, 90),
    *[(_rows(kind, phase), 60) for kind in ("layer_norm", "rms_norm", "softmax", "gelu") for phase in ("fwd", "bwd")],
    (_rows("add"), 60),
    (_rows("sum_dim0"), 90),
    (_rows("sum_dim1"), 40),
    (_rows("mean_dim1"), 25),
    (_rows("sum_all"), 25),
    (_rows("argmax_dim1"), 15),
    (_rows("max_dim1"), 15),
    (_rows("norm_all"), 15),
    (_rows("log_softmax"), 20),
    (_rows("log_softmax", "bwd"), 15),
    *[
        (_rows(kind), 15)
        for kind in (
            "silu",
            "relu",
            "exp",
            "mul",
            "add_",
            "div",
            "where",
            "masked_fill",
            "pow2",
            "cos",
            "rsqrt",
            "gelu_tanh",
            "clamp",
        )
    ],
    (_rows("silu", "bwd"), 20),
    (_rows("add_row"), 25),
    (_rows("mul_col"), 25),
    (_rows("cast"), 50),
    (_rows("copy"), 25),
    (_rows("transpose", high=1e8), 40),
    (_rows("fill"), 15),
    (_rows("dropout"), 25),
    (_rows("dropout", "bwd"), 15),
    (_heads("add_strided"), 30),
    (_heads("permute0213"), 40),
    (_cat, 40),
    (_conv("fwd"), 300),
    (_conv("bwd"), 200),
    (_conv("fwd", True), 50),
    (_conv("bwd", True), 30),
    (_conv1d, 25),
    (_conv3d, 12),
    (_image("group_norm"), 40),
    (_image("group_norm", "bwd"), 25),
    (_image("batch_norm"), 50),
    (_image("batch_norm", "bwd"), 40),
    (_image("max_pool2d"), 20),
    (_image("max_pool2d", "bwd"), 15),
    (_image("avg_pool2d"), 10),
    (_image("adaptive_pool2d"), 15),
    (_image("upsample2x"), 20),
    (_table("embedding"), 40),
    (_table("embedding", "bwd"), 40),
    (_table("index_select"), 25),
    (_table("index_add"), 25),
    (_table("gather_rows"), 20),
    (_bag("fwd"), 70),
    (_bag("bwd"), 50),
    (_loss("fwd"), 60),
    (_loss("bwd"), 50),
    (_topk, 90),
    (_line("sort"), 80),
    (_line("cumsum"), 70),
    (_optimizer("foreach"), 25),
    (_optimizer("fused"), 30),
    *[(_foreach(k), 15) for k in ("foreach_add", "foreach_sqrt", "foreach_mul_", "foreach_addcdiv_")],
    (_lstm, 15),
]

_COMPILED: Sequence[tuple[Callable[[random.Random], Point | None], int]] = [
    (_rows(kind, phase, "inductor", low=3e5), 9)
    for kind in ("layer_norm", "rms_norm", "softmax", "gelu")
    for phase in ("fwd", "bwd")
] + [(_rows(kind, "fwd", "inductor", low=3e5), 8) for kind in ("add", "sum_dim0", "sum_dim1", "add_row")]
