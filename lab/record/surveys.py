"""Further samples: operators whose time models are weak or whose kernels libraries choose, and some to judge by."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from ridgeline.bench.sampling import Draw, Point, between, drawn


def weak_points(seed: int, scale: float = 1.0) -> Iterator[Point]:
    """Convolutions, odd products, scatters and transfers."""
    return drawn(_WEAK, seed, scale)


def general_points(seed: int, scale: float = 1.0) -> Iterator[Point]:
    """Every kind that ``ridgeline validate`` promises, in proportions somebody might check."""
    return drawn(_GENERAL, seed, scale)


def convolution_points(seed: int, scale: float = 1.0) -> Iterator[Point]:
    """Convolutions of every sort to judge by, single precision as PyTorch leaves it: rounded to tf32."""
    return drawn(_CONVOLUTIONS, seed, scale)


def choice_points(seed: int, scale: float = 1.0) -> Iterator[Point]:
    """Convolutions of every sort and odd products, many, to tell which kernel a library takes for which shape."""
    return drawn(_CHOICES, seed, scale)


def _size(rng: random.Random, low: int, high: int) -> int:
    """Log-uniform; half of them multiples of 64, a third multiples of 8 or 16, the rest as they fall."""
    value = between(rng, low, high)
    grain = rng.choices((128, 64, 16, 8, 1), (25, 25, 15, 18, 17))[0]
    return max(1, round(value / grain)) * grain if value > grain else value


def _dtype(rng: random.Random, weights: tuple[int, int, int] = (65, 15, 20)) -> str:
    return rng.choices(("bf16", "fp16", "fp32"), weights)[0]


def _general_gemm(rng: random.Random) -> Point | None:
    for _ in range(100):
        m, n, k = _size(rng, 1, 16384), _size(rng, 16, 16384), _size(rng, 16, 16384)
        dtype = rng.choices(("bf16", "fp16", "fp32", "fp8"), (68, 12, 12, 8))[0]
        if dtype == "fp8":
            n, k = max(16, n // 16 * 16), max(16, k // 16 * 16)
        if 2.0 * m * n * k <= (4e11 if dtype == "fp32" else 2e12) and m * n + m * k + n * k < 8e8:
            shape: dict[str, Any] = {"m": m, "n": n, "k": k}
            if dtype != "fp8":
                shape["layout"] = rng.choices(("nt", "nn"), (60, 40))[0]
            phase = "bwd" if dtype != "fp8" and rng.random() < 0.15 else "fwd"
            return Point("gemm", dtype, phase, "cublas", shape)
    return None


def _general_bmm(rng: random.Random) -> Point | None:
    for _ in range(100):
        b, m, n, k = between(rng, 2, 256), _size(rng, 16, 4096), _size(rng, 16, 4096), _size(rng, 16, 2048)
        if 2.0 * b * m * n * k < 1e12 and b * (m * n + m * k + n * k) < 4e8:
            phase = "bwd" if rng.random() < 0.15 else "fwd"
            shape = {"b": b, "m": m, "n": n, "k": k, "layout": rng.choices(("nn", "nt"), (70, 30))[0]}
            return Point("bmm", _dtype(rng, (70, 15, 15)), phase, "cublas", shape)
    return None


def _general_attention(rng: random.Random) -> Point | None:
    for _ in range(200):
        hkv = rng.choice((1, 2, 4, 8, 12, 16, 32))
        h = hkv * rng.choices((1, 2, 4, 8), (50, 10, 25, 15))[0]
        s = 1 if (decode := rng.random() < 0.15) else _size(rng, 64, 16384)
        skv = _size(rng, 64, 32768) if decode else s if rng.random() < 0.85 else _size(rng, 64, 8192)
        b, d = between(rng, 1, 128 if decode else 64), rng.choices((64, 128, 96, 80, 256, 32), (40, 42, 5, 5, 5, 3))[0]
        work = b * h * s * skv * d
        if not 1e7 < work < 1e12 or b * max(h * s, hkv * skv) * d > 3e8:
            continue
        causal = int(skv == s and rng.random() < 0.5)
        library = "fa2" if decode else rng.choices(("fa2", "cudnn"), (60, 40))[0]
        phase = "bwd" if not decode and rng.random() < 0.35 else "fwd"
        shape = {"b": b, "h": h, "hkv": hkv, "s": s, "skv": skv, "d": d, "causal": causal}
        return Point("attention", "bf16" if rng.random() < 0.85 else "fp16", phase, library, shape)
    return None


def _rows(kind: str, phase: str) -> Draw:
    def draw(rng: random.Random) -> Point:
        c = _size(rng, 32, 32768)
        n = max(1, min(_size(rng, 1, 262144), int(3e8 / c)))
        return Point(kind, _dtype(rng), phase, "aten", {"n": n, "c": c})

    return draw


def _channels(rng: random.Random, low: int = 8, high: int = 2048) -> int:
    """As networks have them: powers of two and their sums mostly, else multiples of 8, a few arbitrary."""
    if rng.random() < 0.55:
        return rng.choice([c for c in (16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 2048)
                           if low <= c <= high])  # fmt: skip
    value = between(rng, low, high)
    return max(8, value // 8 * 8) if rng.random() < 0.8 else value


def _conv_shape(rng: random.Random, sort: str) -> dict[str, int] | None:
    k = rng.choices((1, 3, 5, 7), (0 if sort == "depthwise" else 30, 45, 13, 12))[0]
    h = rng.choice((7, 8, 14, 16, 20, 28, 32, 40, 56, 64, 80, 112, 128, 160, 224, 256))
    w = h if rng.random() < 0.8 else rng.choice((7, 14, 16, 28, 32, 56, 64, 112, 128))
    stride, n, groups = rng.choices((1, 2, 4), (68, 28, 4))[0], between(rng, 1, 256), 1
    if sort == "dense":
        c, o = (3 if rng.random() < 0.07 else _channels(rng)), _channels(rng)
    elif sort == "depthwise":
        c = o = groups = _channels(rng)
    else:
        groups = rng.choices((2, 4, 8, 16, 32, 64), (15, 15, 15, 15, 30, 10))[0]
        c, o = (groups * rng.choice((1, 2, 4, 8, 12, 16, 24, 32, 64)) for _ in range(2))
        if rng.random() < 0.6:
            o = c
        if max(c, o) > 2048 or c == groups:
            return None
    out = -(-h // stride) * -(-w // stride)
    flops, numel = 2.0 * n * o * out * (c // groups) * k * k, n * max(h * w * c, out * o)
    if not (2e6 < flops < 4e11 and numel < 1.5e8):
        return None
    shape = {"n": n, "c": c, "h": h, "w": w, "o": o, "k": k, "stride": stride, "groups": groups}
    return shape | {"nhwc": 1} if rng.random() < 0.4 else shape


def _conv(phase: str, sorts: tuple[int, int, int], dtypes: tuple[int, int, int] = (60, 15, 25)) -> Draw:
    """``sorts``: how often dense, depthwise and grouped filters come."""

    def draw(rng: random.Random) -> Point | None:
        sort, dtype = rng.choices(("dense", "depthwise", "grouped"), sorts)[0], _dtype(rng, dtypes)
        for _ in range(300):
            shape = _conv_shape(rng, sort)
            if shape is not None:
                return Point("conv2d", dtype, phase, "cudnn", shape)
        return None

    return draw


def _free_conv_shape(rng: random.Random, sort: str) -> dict[str, int] | None:
    """Nothing of a network: every dimension log-uniform, channels in eights more often than not."""
    k, stride = rng.choices((1, 3, 5, 7), (28, 44, 14, 14))[0], 1 if rng.random() < 0.68 else 2
    n, h = between(rng, 1, 128), between(rng, 7, 256)
    w = h if rng.random() < 0.7 else between(rng, 7, 256)
    grain = rng.choices((64, 32, 16, 8, 1), (22, 22, 18, 20, 18))[0]
    c, o = (max(grain, round(between(rng, 4, 1536) / grain) * grain) for _ in range(2))
    groups = 1
    if sort == "depthwise":
        o = groups = c
    elif sort == "grouped":
        groups = rng.choice((2, 3, 4, 6, 8, 16, 32, 64))
        c, o = (max(1, v // groups) * groups for v in (c, c if rng.random() < 0.5 else o))
        if c == groups:
            return None
    out = -(-h // stride) * -(-w // stride)
    flops, numel = 2.0 * n * o * out * (c // groups) * k * k, n * max(h * w * c, out * o)
    if not (1e6 < flops < 3e11 and numel < 1.2e8):
        return None
    return {"n": n, "c": c, "h": h, "w": w, "o": o, "k": k, "stride": stride, "groups": groups}


def _any_conv(phase: str, sort: str, dtypes: Sequence[int], max_flops: float = 3e11) -> Draw:
    """Half as networks have them, half free; a quarter channels last. ``dtypes``: bf16, fp16, fp32, tf32."""

    def draw(rng: random.Random) -> Point | None:
        dtype = rng.choices(("bf16", "fp16", "fp32", "tf32"), dtypes)[0]
        for _ in range(300):
            shape = (_conv_shape if rng.random() < 0.5 else _free_conv_shape)(rng, sort)
            if shape is None:
                continue
            out = -(-shape["h"] // shape["stride"]) * -(-shape["w"] // shape["stride"])
            work = 2.0 * shape["n"] * out * shape["o"] * (shape["c"] // shape["groups"]) * shape["k"] ** 2
            if work > max_flops * (0.3 if dtype == "fp32" else 1.0):
                continue
            shape.pop("nhwc", None)
            return Point("conv2d", dtype, phase, "cudnn", shape | {"nhwc": 1} if rng.random() < 0.28 else shape)
        return None

    return draw


def _bag(phase: str) -> Draw:
    def draw(rng: random.Random) -> Point:
        d = rng.choice((16, 32, 64, 128, 256, 512))
        b, length = between(rng, 64, 65536), between(rng, 1, 128)
        shape = {"v": between(rng, 1e3, min(3e8 / d, 5e6)), "d": d, "b": b, "l": max(1, min(length, 2_000_000 // b))}
        return Point("embedding_bag", rng.choice(("fp32", "fp32", "bf16", "fp16")), phase, "aten", shape)

    return draw


def _loss(phase: str) -> Draw:
    def draw(rng: random.Random) -> Point:
        v = rng.choice((10, 100, 1000, 10000, 32000, 50257, 128256)) if rng.random() < 0.6 else _size(rng, 8, 160000)
        shape = {"n": between(rng, 8, max(9.0, min(65536, 4e8 / v))), "v": v}
        return Point("cross_entropy", _dtype(rng, (50, 10, 40)), phase, "aten", shape)

    return draw


def _topk(rng: random.Random) -> Point:
    v = _size(rng, 16, 160000)
    k = min(v, rng.choice((1, 2, 4, 5, 8, 10, 16, 32, 50, 64, 100, 128)))
    shape = {"n": between(rng, 1, max(2.0, min(65536, 2e8 / v))), "v": v, "k": k}
    return Point("topk", _dtype(rng, (40, 10, 50)), "fwd", "aten", shape)


def _line(kind: str) -> Draw:
    def draw(rng: random.Random) -> Point:
        dtype = rng.choice(("fp32", "fp32", "bf16", "int64", "int32"))
        if rng.random() < 0.75:
            return Point(kind, dtype, "fwd", "aten", {"n": between(rng, 256, 3e7)})
        c = between(rng, 32, 65536)
        return Point(kind, dtype, "fwd", "aten", {"n": between(rng, 2, max(3, 2e7 / c)), "c": c})

    return draw


def _odd_size(rng: random.Random, low: int, high: int) -> int:
    value = between(rng, low, high)
    grain = rng.choices((64, 8, 4, 2, 1), (20, 15, 20, 15, 30))[0]
    return max(1, round(value / grain)) * grain if value > grain else value


def _odd(dtype: str, batched: bool, max_flops: float = 3e11) -> Draw:
    """Products that libraries have no favorite kernel for: full precision, or rows off 16-byte boundaries."""

    def draw(rng: random.Random) -> Point | None:
        for _ in range(300):
            top, low = (2048, 8) if batched else (12288, 16)
            b = between(rng, 2, 512) if batched else 1
            m, n, k = _odd_size(rng, low if batched else 1, top), _odd_size(rng, low, top), _odd_size(rng, low, top)
            wide = dtype in ("fp32", "tf32")
            if not wide and not (n % 8 or k % 8 or m % 8):
                continue
            if 2.0 * b * m * n * k > max_flops or b * (m * n + m * k + n * k) > 2e8:
                continue
            layout = rng.choices(("nt", "nn", "tn"), (45, 40, 0 if batched else 15))[0]
            phase = "bwd" if rng.random() < 0.06 else "fwd"
            shape: dict[str, Any] = {"m": m, "n": n, "k": k, "layout": layout}
            return Point("bmm" if batched else "gemm", dtype, phase, "cublas", {"b": b, **shape} if batched else shape)
        return None

    return draw


def _index_put(rng: random.Random) -> Point:
    dtype = rng.choice(("bf16", "fp32"))
    if rng.random() < 0.5:
        f = rng.choice((8, 16, 27, 32, 64))
        shape = {"b": between(rng, 16, 16384), "f": f, "pairs": between(rng, 8, f * f)}
    else:
        d = rng.choice((1, 1, 16, 64, 128, 768))
        shape = {"v": between(rng, 100, 1e6 if d < 128 else 1e5), "d": d, "n": between(rng, 64, min(5e5, 5e7 / d))}
    return Point("index_put", dtype, "fwd", "aten", shape)


def _weight_norm(rng: random.Random) -> Point:
    dim = int(rng.random() < 0.5)
    c = rng.choice((3, 16, 64, 128, 256, 1024)) if dim else between(rng, 64, 16384)
    n = between(rng, 64, 4e6 / c) if dim else between(rng, 16, min(8192, 2e7 / c))
    phase = "bwd" if rng.random() < 0.4 else "fwd"
    return Point("weight_norm", rng.choice(("bf16", "fp32")), phase, "aten", {"n": n, "c": c, "dim": dim})


def _transfer(rng: random.Random) -> Point:
    pinned, to_host = int(rng.random() < 0.5), int(rng.random() < 0.5)
    shape = {"num_bytes": between(rng, 64, 1.5e8), "pinned": pinned, "to_host": to_host}
    if not pinned and to_host and rng.random() < 0.5:
        shape["fresh"] = 1
    return Point("transfer", "uint8", "fwd", "driver", shape)


_ROW_KINDS = ("layer_norm", "rms_norm", "softmax", "gelu")

_WEAK: Sequence[tuple[Draw, int]] = [
    (_conv("fwd", (60, 18, 22)), 1150),
    (_conv("bwd", (60, 18, 22)), 850),
    (_odd("fp32", batched=False), 330),
    (_odd("tf32", batched=False), 170),
    (_odd("bf16", batched=False), 330),
    (_odd("fp16", batched=False), 80),
    (_odd("fp32", batched=True), 180),
    (_odd("tf32", batched=True), 60),
    (_odd("bf16", batched=True), 260),
    (_odd("fp16", batched=True), 60),
    (_bag("bwd"), 60),
    (_topk, 50),
    (_line("cumsum"), 30),
    (_line("sort"), 30),
    (_index_put, 70),
    (_weight_norm, 50),
    (_transfer, 80),
]

_GENERAL: Sequence[tuple[Draw, int]] = [
    (_general_gemm, 210),
    (_general_bmm, 70),
    (_general_attention, 130),
    *[(_rows(kind, phase), 24) for kind in _ROW_KINDS for phase in ("fwd", "bwd")],
    (_rows("add", "fwd"), 24),
    (_rows("sum_dim0", "fwd"), 30),
    (_conv("fwd", (72, 16, 12), (70, 12, 18)), 70),
    (_conv("bwd", (72, 16, 12), (70, 12, 18)), 45),
    (_bag("fwd"), 24),
    (_bag("bwd"), 16),
    (_loss("fwd"), 24),
    (_loss("bwd"), 16),
    (_topk, 30),
    (_line("sort"), 25),
    (_line("cumsum"), 25),
]

_CONVOLUTIONS: Sequence[tuple[Draw, int]] = [
    (_any_conv("fwd", "dense", (60, 12, 0, 28)), 60),
    (_any_conv("bwd", "dense", (60, 12, 0, 28)), 35),
    (_any_conv("fwd", "depthwise", (60, 12, 0, 28)), 15),
    (_any_conv("bwd", "depthwise", (60, 12, 0, 28)), 10),
    (_any_conv("fwd", "grouped", (60, 12, 0, 28), 1e11), 40),
    (_any_conv("bwd", "grouped", (60, 12, 0, 28), 1e11), 25),
]

_CHOICES: Sequence[tuple[Draw, int]] = [
    (_any_conv("fwd", "dense", (70, 10, 15, 5)), 2400),
    (_any_conv("bwd", "dense", (70, 10, 15, 5)), 1700),
    (_any_conv("fwd", "depthwise", (65, 15, 15, 5)), 450),
    (_any_conv("bwd", "depthwise", (65, 15, 15, 5)), 350),
    (_any_conv("fwd", "grouped", (65, 12, 18, 5), 1e11), 1000),
    (_any_conv("bwd", "grouped", (65, 12, 18, 5), 1e11), 800),
    (_odd("bf16", batched=False), 450),
    (_odd("fp16", batched=False), 100),
    (_odd("fp32", batched=False), 350),
    (_odd("tf32", batched=False), 120),
    (_odd("bf16", batched=True), 300),
    (_odd("fp32", batched=True), 200),
    (_general_gemm, 500),
    (_general_bmm, 300),
]
