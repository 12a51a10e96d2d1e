"""``top_k``: where the few largest or smallest elements of every row are, in their order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ridgeline.kernels import tuning
from ridgeline.kernels.contract import Case, Trial, case, declare, elementwise_cost
from ridgeline.kernels.launcher import Kernel, Plans, launchable
from ridgeline.kernels.rows import power_of_two
from ridgeline.kernels.top_k import config, kernel, reference

_PLACES = Kernel(kernel.topmost_places, loose=("x_ptr", "out_ptr"))
_plans = Plans()
_active_modes = torch._C._len_torch_dispatch_stack
MOST_ELEMENTS, MOST_PLACES = 8192, 64
"""Of a row, what registers hold, and how often a row may be gone over before sorting it is quicker."""


def top_k(x: Tensor, k: int, largest: bool = True) -> Tensor:
    """Places of the ``k`` largest (or smallest) elements along the last dim, in order, the first of equals first."""
    if type(x) is Tensor and launchable(x) and not _active_modes() and not is_dynamo_compiling():
        return _forward(x, k, largest)
    return TOP_K(x, k, largest)


def _forward(x: Tensor, k: int, largest: bool) -> Tensor:
    if not launchable(x):
        return TOP_K.on_host(x, k, largest)  # type: ignore[return-value]
    x = x.contiguous()
    key = (x.shape, x.dtype, k, largest, x.get_device())
    launch = _plans.get(key)
    if launch is None:
        TOP_K.check(x, k, largest)
        launch = _plans[key] = _plan(x, k, largest)
    out = torch.empty((*x.shape[:-1], k), dtype=torch.int64, device=x.device)
    if out.numel():
        launch(x, out, x.shape[-1], k)
    return out


def _plan(x: Tensor, k: int, largest: bool) -> Any:
    n = x.shape[-1]
    chosen = tuning.choose("top_k", {"n": n, "k": k}, config.default(n, x.element_size()))
    return _PLACES.bind(
        (x, x.new_empty(1, dtype=torch.int64), n, k),
        grid=(x.numel() // n,),
        constants={"LARGEST": largest, "WIDE": x.element_size() == 4, "BN": power_of_two(n), "BK": power_of_two(k)},
        num_warps=chosen.num_warps,
        device=x.get_device(),
    )


def _support(x: Tensor, k: int, largest: bool) -> str | None:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or x.dim() < 1:
        return "elements are of 32 or 16 bits, in rows"
    n = x.shape[-1]
    if not 1 <= k <= min(n, MOST_PLACES) or not 16 <= n <= MOST_ELEMENTS:
        return f"up to {MOST_PLACES} places of rows of 16 to {MOST_ELEMENTS} elements"
    return "there are too many rows" if x.numel() // n >= 2**31 else None


def _fake(x: Tensor, k: int, largest: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], k), dtype=torch.int64)


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    x = torch.randn(*of["shape"], device=on, generator=generator).to(getattr(torch, of.dtype))
    return x, of["k"], of.get("largest", True)


def _called(x: Tensor, k: int, largest: bool) -> Tensor:
    """A check compares numbers: the elements that are at the places."""
    found = top_k(x, k, largest)
    return x.new_empty(found.shape) if x.is_meta else reference.at_places(x, found)


SMALL = (
    case("float32", shape=(3, 5, 37), k=4),
    case("float32", shape=(7, 64), k=9, largest=False),
    case("bfloat16", shape=(5, 130), k=20),
    case("bfloat16", shape=(2, 3, 48), k=48, largest=False),
    case("float16", shape=(6, 16), k=1),
)
CHECKS = (
    *SMALL,
    *(case(dtype, shape=(3, 501, n), k=k, largest=largest)
      for dtype in ("bfloat16", "float16", "float32") for n, k in ((1024, 20), (77, 5), (3001, 33), (8192, 64))
      for largest in (True, False)),
)  # fmt: skip
RACES = (
    case("bfloat16", shape=(32, 1024, 1024), k=20),
    case("float32", shape=(16, 1024, 2048), k=16, largest=False),
    case("float32", shape=(4096, 128), k=8),
)

TOP_K = declare(
    name="top_k",
    summary="places of the few largest or smallest elements of every row",
    schema="(Tensor x, int k, bool largest) -> Tensor",
    forward=_forward,
    infer=_forward,
    fake=_fake,
    reference=reference.forward,
    support=_support,
    cost=elementwise_cost(1.0),
    trial=Trial(
        make=_make,
        call=_called,
        eager=reference.eager,
        reference=reference.eager,
        mistakes={
            "last third": reference.last_left_out,
            "opposite": reference.opposite,
            "the first again": reference.first_again,
        },
        checks=CHECKS,
        races=RACES,
        small=SMALL,
        phases=("fwd",),
        constants=(0,),
        layouts=False,
    ),
)
