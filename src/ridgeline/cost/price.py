"""Pricing calls on a device: the family's time model under the device's calibration, remembered."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from ridgeline.basis import Basis
from ridgeline.cost import interval
from ridgeline.cost.calibration import Calibration, calibration_of
from ridgeline.cost.call import Call, Coef, Family, Time, family_of
from ridgeline.cost.correction import rows as leftover
from ridgeline.cost.time import recurrent, roofline, serving  # noqa: F401  (each module registers its family)
from ridgeline.cost.time.attention import calls as attention_calls  # noqa: F401
from ridgeline.cost.time.chip import Chip, chip_of
from ridgeline.cost.time.conv import conv  # noqa: F401
from ridgeline.cost.time.gemm import calls as matmul
from ridgeline.cost.time.rows import norm, reduction, softmax, weight_norm  # noqa: F401
from ridgeline.cost.time.stream import (  # noqa: F401
    elementwise,
    indexing,
    multi_tensor,
    pooling,
    sort_scan_topk,
    transfer,
)
from ridgeline.hardware import Device
from ridgeline.hardware import device as device_named

WARM_STEPS = 8
STREAMING_FRAC = 0.2
"""Share of a product's DRAM ramp that remains between the kernels of a model (fitted on whole models)."""
SERVED = frozenset({"gemm", "bmm", "attention"})
"""What serving frameworks have kernels of their own for."""
FRAMEWORK_ARCHS = ("hopper",)
"""Where PyTorch's own attention was measured on a sibling: FlashAttention-2 and cuDNN are not priced as what serves."""


class Price(NamedTuple):
    """A priced call with where its coefficients come from."""

    time: Time
    basis: Basis
    family: str
    width: float  # log half-width of the 90 % interval


class Pricer:
    """Prices calls on one device; without ``serving`` the kernels of serving frameworks are left out of account."""

    def __init__(self, device: Device, serving: bool = True) -> None:
        self.device, self.serving = device, serving
        self.chip: Chip = chip_of(device)
        self.designed_w = device_named(device.parent).tdp_w if device.parent else device.tdp_w
        self.calibration: Calibration = calibration_of(device)
        self.lowered: dict[tuple[object, ...], Any] = {}  # what nodes of equal meaning lower to
        self._prices: dict[int, dict[Call, Price]] = defaultdict(dict)  # by 3 * warm step + alone + flushed
        self._coefs: dict[tuple[str, str, bool, bool], tuple[Coef, Basis]] = {}

    def price(self, call: Call, warm_frac: float = 0.0, *, flushed: bool = True, alone: bool = False) -> Price:
        """What the call takes with this share of its inputs in L2 already.

        ``flushed`` is the state a cold measurement leaves: an L2 full of dirty lines that are written back while the
        call reads. In a model the L2 is never that dirty. ``alone`` is a call between events, as a flushed one always
        is: what was learned of those applies.
        """
        step = round(warm_frac * WARM_STEPS)
        prices = self._prices[3 * step + (2 if flushed else int(alone))]
        found = prices.get(call)
        if found is None:
            found = self._priced(call, step / WARM_STEPS, flushed, alone or flushed)
            # Calls a pricer remembers for each state of the L2; a study of endless shapes must not grow for ever
            if len(prices) >= 50_000:
                prices.clear()
            prices[call] = found
        return found

    def prefetch(self, wanted: Iterable[tuple[Call, float]]) -> None:
        """Price the plain products among these in one go: a model has many, and alone they are the slowest."""
        groups: dict[str, dict[tuple[Call, int], matmul.Problem]] = {}
        for call, warm_frac in wanted:
            if call.kind in matmul.KINDS:
                step, group = round(warm_frac * WARM_STEPS), groups.setdefault(call.dtype, {})
                if (call, step) in group or call in self._prices[3 * step]:
                    continue
                problem = matmul.plain_problem(call)
                if problem is not None and self.serving_entry(call) is None:
                    group[call, step] = problem
        for keys in groups.values():
            calls = [call for call, _ in keys]
            if len(calls) < 2 or self.device.kind != "gpu":
                continue
            coef, basis = self.coef(family_of("gemm"), calls[0], flushed=False, alone=False)
            warm_fracs = [step / WARM_STEPS for _, step in keys]
            times = matmul.many(calls, list(keys.values()), self.chip, coef, warm_fracs)
            for (call, step), time in zip(keys, times, strict=True):
                width = self.width(call, "gemm", None, basis, time.busy_s)
                self._prices[3 * step][call] = Price(time, basis, "gemm", width)

    def coef(self, family: Family, call: Call, *, flushed: bool, alone: bool) -> tuple[Coef, Basis]:
        key = (family.name, call.dtype, flushed, alone)
        found = self._coefs.get(key)
        if found is None:
            coef, basis = self.calibration.coef(family, call)
            if not flushed and "ramp_s" in coef:
                coef = {k: v * STREAMING_FRAC if k.endswith("ramp_s") else v for k, v in coef.items()}
            if alone and "alone_frac" in coef:
                coef = {**coef, "alone_frac": 1.0}
            found = self._coefs[key] = coef, basis
        return found

    def _priced(self, call: Call, warm_frac: float, flushed: bool, alone: bool) -> Price:
        family = family_of(call.kind)
        entry = self.serving_entry(call) if call.kind in SERVED else None
        if entry is not None:
            model = serving.attention if call.kind == "attention" else serving.gemm
            time, basis = model(call, self.chip, entry, warm_frac), self.calibration.basis
        else:
            coef, basis = self.coef(family, call, flushed=flushed, alone=alone)
            time = family.model(call, self.chip, coef, warm_frac)
            if alone and coef.get("leftover_frac"):
                time = _left_over(time, coef["leftover_frac"] * leftover.log_of(call, self.chip))
        if self.device.kind != "gpu":
            time = unlike_a_gpu(time)
        return Price(time, basis, family.name, self.width(call, family.name, entry, basis, time.busy_s))

    def serving_entry(self, call: Call) -> Mapping[str, Any] | None:
        """How serving frameworks' kernels were fitted here, if that is what the call is or all that is known."""
        if not self.serving:
            return None
        if call.kind in ("gemm", "bmm") and call.phase == "fwd":
            entry = self.calibration.entry("gemm", call.dtype)
            return entry if entry is not None and entry.get("library") == "cutlass" else None
        entries = self.calibration.families.get("attention", {})
        own = "all" in entries or self.chip.arch in FRAMEWORK_ARCHS
        # Attention libraries that serving frameworks bring along; PyTorch's own are fitted apart
        if call.kind != "attention" or not entries or (own and call.library not in ("fa3", "flashinfer", "trtllm")):
            return None
        return serving.entry_of(entries, call)

    def width(self, call: Call, family: str, entry: Mapping[str, Any] | None, basis: Basis, busy_s: float) -> float:
        if not self.calibration.intervals:
            found = entry or self.calibration.entry(family, call.dtype)
            if (unseen := self.calibration.unseen_width(found, family, call.dtype)) is not None:
                return unseen * interval.WIDER[basis] / interval.WIDER[Basis.DATASHEET]
            known = self.calibration.width(found)
            if known is not None:
                return known * interval.WIDER[basis]
        return interval.half_width(self.calibration.intervals, call, family, basis, busy_s)


def _left_over(time: Time, log: float) -> Time:
    return time._replace(busy_s=max(time.floor_s, time.busy_s * math.exp(log))) if log else time


def unlike_a_gpu(time: Time) -> Time:
    """The same call on a processor that no kernel model here describes (CPU, TPU, other accelerators)."""
    # Without SMs to fill, the GPU kernels' shapes say nothing: a share of the speed of light and a start are assumed.
    return Time(time.floor_s / 0.7 + 2e-6, time.floor_s, time.bound)


@lru_cache(maxsize=32)
def pricer_of(device: Device, serving: bool = True) -> Pricer:
    return Pricer(device, serving)
