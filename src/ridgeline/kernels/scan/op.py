"""``torch.cumsum`` and ``torch.cumprod`` along any dim, forwards or backwards, with or without the element itself."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels import tuning
from ridgeline.kernels.contract import Case, Trial, case, declare, elementwise_cost
from ridgeline.kernels.launcher import Kernel, Plans, launchable, vector_of
from ridgeline.kernels.rows import cdiv
from ridgeline.kernels.scan import config, kernel, reference

_ROWS = Kernel(kernel.scan_rows, vectors=("cols", "inner"))
_plans = Plans()


def scan(
    x: Tensor, keep: Tensor | None = None, dim: int = -1, *, product: bool = False, reverse: bool = False,
    exclusive: bool = False,
) -> Tensor:  # fmt: skip
    """Cumulative sums (or products) of ``x`` (times the flags ``keep``) along ``dim``, without gradients.

    ``reverse`` begins at the end; ``exclusive`` leaves the element itself out, so that the first is 0 (or 1).
    """
    return SCAN(x, keep, dim, product, reverse, exclusive)


def _forward(x: Tensor, keep: Tensor | None, dim: int, product: bool, reverse: bool, exclusive: bool) -> Tensor:
    if not launchable(x):
        return SCAN.on_host(x, keep, dim, product, reverse, exclusive)  # type: ignore[return-value]
    x = x.contiguous()
    flags = x if keep is None else keep.contiguous()
    key = (x.shape, keep is None, dim, product, reverse, exclusive, x.get_device(), x.data_ptr() & 15)
    plan = _plans.get(key)
    if plan is None:
        SCAN.check(x, keep, dim, product, reverse, exclusive)
        plan = _plans[key] = _plan(x, keep, dim % x.dim(), product, reverse, exclusive)
    y = torch.empty_like(x)
    if x.numel():
        launch, sizes = plan
        launch(x, flags, y, *sizes)
    return y


def _plan(x: Tensor, keep: Tensor | None, dim: int, product: bool, reverse: bool, exclusive: bool) -> Any:
    cols, inner = x.shape[dim], math.prod(x.shape[dim + 1 :])
    rows = math.prod(x.shape[:dim])
    chosen = tuning.choose("scan", {"cols": cols, "inner": inner}, config.choose(cols, inner))
    neighbors = 1 if inner == 1 else max(2, chosen.inner)  # one means blocks of one dim, which have no neighbors
    launch = _ROWS.bind(
        (x, x if keep is None else keep, x, cols, inner),
        grid=(rows, cdiv(inner, neighbors)),
        constants={
            "PRODUCT": product, "KEPT": keep is not None, "REVERSE": reverse, "EXCLUSIVE": exclusive,
            "BC": chosen.cols, "BI": neighbors, "STAGES": chosen.num_stages,
        },
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        device=x.get_device(),
        vector=vector_of(4, x.data_ptr(), cols if inner == 1 else inner),
    )  # fmt: skip
    return launch, (cols, inner)


def _support(
    x: Tensor, keep: Tensor | None, dim: int, product: bool, reverse: bool, exclusive: bool
) -> str | None:  # fmt: skip
    if x.dtype != torch.float32 or (keep is not None and keep.dtype != torch.bool):
        return "numbers are float32, flags bool"
    if x.dim() == 0 or (keep is not None and keep.shape != x.shape):
        return "flags have the shape of the numbers, which have a dim to go along"
    inner = math.prod(x.shape[dim % x.dim() + 1 :])
    # most grid
    if cdiv(inner, 2) > 65535 or x.shape[dim] * inner >= 2**31:
        return "a row and its neighbors have too many elements"
    return None


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    x = torch.rand(*of["shape"], device=on, generator=generator)
    x = x + 0.5 if of.get("product") else x
    keep = torch.rand(*of["shape"], device=on, generator=generator) < 0.5 if of.get("keep") else None
    return x, keep, of.get("dim", -1), of.get("product", False), of.get("reverse", False), of.get("exclusive", False)


def _called(x: Tensor, keep: Tensor | None, dim: int, product: bool, reverse: bool, exclusive: bool) -> Tensor:
    return scan(x, keep, dim, product=product, reverse=reverse, exclusive=exclusive)


SMALL = (
    case("float32", shape=(3, 70)),
    case("float32", shape=(2, 65), product=True, reverse=True),
    case("float32", shape=(2, 64), keep=True, exclusive=True),
    case("float32", shape=(2, 33), exclusive=True, reverse=True),
    case("float32", shape=(2, 35, 5), dim=1),
    case("float32", shape=(40, 6), dim=0, reverse=True, exclusive=True),
)
CHECKS = (
    *SMALL,
    case("float32", shape=(17, 32768)),
    case("float32", shape=(5, 100001), reverse=True),
    case("float32", shape=(64, 4096), keep=True),
    case("float32", shape=(9, 8192), exclusive=True),
    case("float32", shape=(3, 1000), product=True),
    case("float32", shape=(4, 3000, 130), dim=1),
)
RACES = (
    case("float32", shape=(32768, 32768)),
    case("float32", shape=(16384, 32768), reverse=True),
    case("float32", shape=(64, 4096, 1024), dim=1),
)

SCAN = declare(
    name="scan",
    summary="cumulative sums and products along any dim",
    schema="(Tensor x, Tensor? keep, int dim, bool product, bool reverse, bool exclusive) -> Tensor",
    forward=_forward,
    infer=_forward,
    fake=lambda x, *rest: x.new_empty(x.shape),
    reference=reference.forward,
    support=_support,
    cost=elementwise_cost(2.0),
    trial=Trial(
        make=_make,
        call=_called,
        eager=reference.eager,
        reference=reference.forward,
        mistakes={"backwards": reference.backwards, "late": reference.late},
        checks=CHECKS,
        races=RACES,
        small=SMALL,
        phases=("fwd",),
        constants=(0, 1),
        layouts=False,
    ),
)
