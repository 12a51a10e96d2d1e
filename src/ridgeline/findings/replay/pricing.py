"""What a kernel would take if it were done right, as a share of what it takes: the cost model's ratio of two calls."""

from __future__ import annotations

from functools import lru_cache

from ridgeline.cost.call import call
from ridgeline.cost.price import pricer_of
from ridgeline.errors import RidgelineError
from ridgeline.findings.context.shapes import Product
from ridgeline.hardware import Device

LEAST = 0.05


@lru_cache(maxsize=20_000)
def product_s(device: Device, product: Product, dtype: str) -> float | None:
    """What the library needs for the product in this dtype; None where the device cannot be priced."""
    try:
        kind = "bmm" if product.b > 1 else "gemm"
        dims = {"b": product.b} if product.b > 1 else {}
        priced = pricer_of(device).price(
            call(kind, dtype, "fwd", "cublas", **dims, m=product.m, n=product.n, k=product.k), flushed=False
        )
    except RidgelineError:
        return None
    return priced.time.busy_s


def product_ratio(device: Device | None, product: Product | None, now: str, then: str) -> float | None:
    """Time in dtype ``then`` over time in dtype ``now``."""
    if device is None or product is None:
        return None
    before, after = product_s(device, product, now), product_s(device, product, then)
    if before is None or after is None or before <= 0:
        return None
    return min(1.0, max(LEAST, after / before))


def aligned(product: Product, to: int = 64) -> Product:
    """The product with its sizes rounded up."""
    m, n, k = (-(-size // to) * to if size % 8 else size for size in product[1:])
    return Product(product.b, m, n, k)


def alignment_ratio(device: Device | None, product: Product | None, dtype: str, measured_s: float) -> float | None:
    """Expected time with sizes padded over measured time as they are."""
    after = product_s(device, aligned(product), dtype) if device is not None and product is not None else None
    return None if after is None or measured_s <= 0 else min(1.0, max(LEAST, after / measured_s))


@lru_cache(maxsize=5_000)
def attention_s(device: Device, dtype: str, b: int, h: int, s: int, d: int, causal: bool, phase: str) -> float | None:
    """What fused attention needs."""
    try:
        priced = pricer_of(device).price(
            call("attention", dtype, phase, "fa2", b=b, h=h, hkv=h, s=s, skv=s, d=d, causal=int(causal)), flushed=False
        )
    except RidgelineError:
        return None
    return priced.time.busy_s
