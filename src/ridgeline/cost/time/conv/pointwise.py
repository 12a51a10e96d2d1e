"""Pointwise convolutions: plain products."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, exp
from typing import Any

from ridgeline.cost.calibration import calibration_of
from ridgeline.cost.call import ITEMSIZE, Call, Coef, family_of
from ridgeline.cost.correction import gemm_attention as residue
from ridgeline.cost.time.conv.kernel_choice import LEARNED_ARCH, MEASURED
from ridgeline.cost.time.conv.problem import SMS, Conv, Cost, Site, sum_costs
from ridgeline.cost.time.gemm import calls as matmul
from ridgeline.cost.time.gemm.simt import COEFFICIENTS, classic_timing
from ridgeline.hardware import device

_GEMM_TILES = ((64, 32), (64, 64), (128, 128), (128, 256))


@dataclass(frozen=True, slots=True)
class Product:
    """``batch`` products of m x k by k x n, the bytes they move, and whether several SMs may share an inner loop."""

    batch: int
    m: int
    n: int
    k: int
    read_bytes: float
    written_bytes: float
    split: bool = False


def _gemm_s(site: Site, product: Product, dtype: str, unaligned: bool = False) -> float:
    """Seconds of a GEMM: the best tile, or the bytes."""
    coef, chip = site.coef, site.chip
    frac = coef["gemm_odd_frac" if unaligned else "gemm_frac"]
    rate = frac * chip.tensor_flops_per_s[dtype] / (2.0 * chip.num_sms * chip.clock_hz)
    item_per_cycle = ITEMSIZE[dtype] / coef["gemm_bytes_per_cycle"]
    best, steps = 1e30, -(-product.k // 64)
    for high, wide in _GEMM_TILES:
        step = max(high * wide * 64 / rate, (high + wide) * 64 * item_per_cycle) + coef["gemm_step_cycles"]
        waves = product.batch * -(-product.m // high) * -(-product.n // wide) / chip.num_sms
        shared = max(steps * waves, min(steps, coef["gemm_split_depth"] / 64.0))
        passes = shared if product.split else steps * ceil(waves)
        best = min(best, passes * step)
    memory = site.dram_s(product.read_bytes + product.written_bytes, "gemm_dram_frac")
    memory = memory * (coef["gemm_odd"] if unaligned else 1.0) + site.ramp_s(product.read_bytes, "gemm_ramp_cycles")
    return site.cycles_s(coef["gemm_start_cycles"]) + float((site.cycles_s(best) ** 3 + memory**3) ** (1.0 / 3.0))


@lru_cache(maxsize=16)
def _product_coef(dtype: str, ramp: float) -> Coef:
    """What products were fitted to where convolutions were, with this share of their DRAM ramp."""
    coef = calibration_of(device(MEASURED)).coef(family_of("gemm"), Call("gemm", dtype))[0]
    return {name: value * ramp if name.endswith("ramp_s") else value for name, value in coef.items()}


def product_of(conv: Conv, op: str) -> tuple[str, dict[str, Any]]:
    """The library's product of a pointwise pass, as a call: one for each image where channels come first.

    Images whose rows are aligned take as long as one product of all their pixels: the filters are read once.
    """
    px, rows = conv.in_px, conv.n * conv.in_px
    if conv.channels_last:
        m, n, k, layout = {"fwd": (rows, conv.o, conv.c, "nt"), "dgrad": (rows, conv.c, conv.o, "nn"),
                           "wgrad": (conv.o, conv.c, rows, "tn")}[op]  # fmt: skip
        return "gemm", {"m": m, "n": n, "k": k, "layout": layout}
    m, n, k, layout = {"fwd": (conv.o, px, conv.c, "nn"), "dgrad": (conv.c, px, conv.o, "tn"),
                       "wgrad": (conv.o, conv.c, px, "nt")}[op]  # fmt: skip
    if op != "wgrad" and _product_alignment(conv) == 8:
        return "gemm", {"m": m, "n": rows, "k": k, "layout": layout}
    return "bmm", {"b": conv.n, "m": m, "n": n, "k": k, "layout": layout}


def product_features(conv: Conv, dims: dict[str, Any]) -> list[float]:
    """A pointwise pass's product, as the factor learned for it asks for it."""
    b, m, n, k = dims.get("b", 1), dims["m"], dims["n"], dims["k"]
    return [float(conv.dtype == "tf32"), float(conv.channels_last), _product_alignment(conv), conv.in_px % 8,
            conv.c % 8, conv.o % 8, b, m, n, k, b * m * n, b * m * n * k, m * n, b * (m * k + n * k + m * n), b * n * k,
            m * k, min(m, n), -(-m // 128) * -(-n // 128) * b / SMS, -(-m // 64) * -(-n // 64) * b / SMS, n % 64,
            m % 64, k % 64]  # fmt: skip


def library_product(site: Site, conv: Conv, op: str) -> Cost:
    """A pointwise pass as the library of products runs it, before what was learned of these products."""
    kind, dims = product_of(conv, op)
    chip = site.chip if site.chip.origin else replace(site.chip, origin=MEASURED)
    time = matmul.model(Call(kind, conv.dtype, "fwd", "cublas", tuple(dims.items())), chip,
                        _product_coef(conv.dtype, site.coef["ramp_s"]), site.warm_frac)  # fmt: skip
    if op == "wgrad" and conv.dtype == "tf32" and not conv.channels_last:  # few products with such loops were recorded
        return min(time.busy_s, _long_product_s(site, conv)), time.num_kernels
    return time.busy_s, time.num_kernels


def _long_product_s(site: Site, conv: Conv) -> float:
    """The product of a pointwise weight gradient, its inner loop shared by SMs where it may be."""
    read, pixels = (conv.input_bytes + conv.output_bytes) * (1.0 - site.warm_frac), conv.n * conv.in_px
    if conv.channels_last:
        product = Product(1, conv.o, conv.c, pixels, read, conv.weight_bytes, pixels >= 4096)
    else:
        slowed = round(conv.in_px * misalignment(site, conv))
        product = Product(conv.n, conv.o, conv.c, slowed, read, conv.n * conv.o * conv.c * 4.0)
    return _gemm_s(site, product, conv.dtype, _odd(conv))


def _learned_product(site: Site, conv: Conv, op: str) -> Cost | None:
    """The same times that factor; None where products of convolutions were not measured."""
    if site.chip.arch != LEARNED_ARCH or conv.dtype not in ("bf16", "fp16", "tf32"):
        return None
    seconds, kernels = library_product(site, conv, op)
    trees, share = residue.kernel_trees(f"product.{op}"), site.coef["residue_frac"]
    if trees is None or not share:
        return seconds, kernels
    log = residue.logs(trees, [product_features(conv, product_of(conv, op)[1])])[0]
    return seconds * exp(share * log), kernels


def misalignment(site: Site, conv: Conv) -> float:
    """Slowdown of a GEMM over channels-first images whose rows do not start on 16 bytes."""
    row_bytes = conv.in_px * conv.itemsize
    if conv.channels_last or row_bytes % 16 == 0:
        return 1.0
    return site.coef["gemm_half_aligned" if row_bytes % 8 == 0 else "gemm_unaligned"]


def _odd(conv: Conv) -> bool:
    """Rows of channels off 16 bytes: those of the filters, and of the images where channels come last."""
    return bool(conv.c % 8 or (conv.o % 8 and conv.channels_last))


def pointwise_forward(site: Site, conv: Conv, op: str) -> Cost:
    """A forward pass or an input gradient of one tap as products."""
    if (known := _learned_product(site, conv, op)) is not None:
        return known
    read_bytes, written_bytes = conv.input_bytes + conv.weight_bytes, conv.output_bytes
    columns, depth = conv.o, conv.c
    if op == "dgrad":
        read_bytes, written_bytes = conv.output_bytes + conv.weight_bytes, conv.input_bytes
        columns, depth = conv.c, conv.o
    batch, rows = (1, conv.n * conv.in_px) if conv.channels_last else (conv.n, conv.in_px)
    if conv.itemsize <= 2 and _product_alignment(conv) < 8:
        return _odd_product(site, conv, batch, rows, columns, depth)
    slowed = round(depth * misalignment(site, conv))
    product = Product(batch, rows, columns, slowed, read_bytes * (1.0 - site.warm_frac), written_bytes)
    return _gemm_s(site, product, conv.dtype, _odd(conv)), 1


def _product_alignment(conv: Conv) -> int:
    """Elements up to eight by which rows of images and filters are aligned."""
    rows = (conv.c, conv.o) if conv.channels_last else (conv.c, conv.in_px)
    return next(step for step in (8, 4, 2, 1) if all(row % step == 0 for row in rows))


def _odd_product(site: Site, conv: Conv, batch: int, rows: int, columns: int, depth: int) -> Cost:
    """The kernels of older generations that the library of products runs for rows off 16 bytes."""
    group = "odd1." if _product_alignment(conv) == 1 else "odd2."
    coef = {name: site.coef[group + name] for name in COEFFICIENTS}
    timing = classic_timing(site.chip, coef, b=batch, m=rows, n=columns, k=depth, dtype=conv.dtype,
                            warm_frac=site.warm_frac)  # fmt: skip
    return float(timing.expected_s[0]), int(timing.num_kernels[0])


def pointwise_weight_grad(site: Site, conv: Conv) -> Cost:
    """Images, or stretches of pixels, each give a partial gradient; a second kernel adds them up."""
    reduce_s = site.cycles_s(site.coef["gemm_reduce_cycles"])
    if (known := _learned_product(site, conv, "wgrad")) is not None:
        return known if conv.channels_last else sum_costs(known, (reduce_s, 1))
    if conv.channels_last:
        split = conv.n * conv.in_px >= 4096
        return _long_product_s(site, conv) + reduce_s * split, 1 + split
    partial = conv.n * conv.o * conv.c * 4.0
    if conv.itemsize <= 2 and _product_alignment(conv) < 8:
        return sum_costs(_odd_product(site, conv, conv.n, conv.o, conv.c, conv.in_px), (reduce_s, 1))
    moved_s = site.dram_s(partial * (1.0 - site.held(partial)), "gemm_dram_frac")
    return _long_product_s(site, conv) + reduce_s + moved_s, 2


def transposed_product(conv: Conv) -> bool:
    """Channels-first weight gradients of one tap that are transposed first: small images, or few input channels."""
    small = conv.in_px <= 256 and min(conv.c, conv.o) >= 192
    lopsided = conv.in_px >= 3136 and conv.c <= 48 and conv.o >= 384
    return not conv.channels_last and not _odd(conv) and (small or lopsided)


def small_images(conv: Conv) -> bool:
    """Channels-first images too small for a GEMM each, in a batch large enough to transpose instead."""
    enough = 256 if conv.in_px <= 100 else 400
    return not conv.channels_last and conv.in_px <= 200 and conv.n >= 16 and min(conv.c, conv.o) >= enough
