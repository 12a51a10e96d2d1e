"""Fit what measured architectures have in common, and judge it on each architecture left out of its own fit.

A coefficient of an architecture is a common value, times a contrast between the two generations of matrix instructions,
times its own deviation, in units that datasheet and library tell (``unmeasured.architectures``). All three are found
together, with priors that pull contrasts and deviations to nothing; a device nobody measured has no deviation. Each of
four architectures in turn is predicted by the other three. Run from the repository root (some minutes of one core):

    python -m lab.fit.unmeasured ../shared/silicon [--write]

``--write`` then fits all four and writes data/unmeasured_architectures.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from lab.fit.published_kernels import (
    CACHE,
    DECODE,
    DECODE_PROTOCOL,
    FOLDERS,
    GEMM_PROTOCOL,
    PREFILL,
    QUANTIZE,
    SOURCE,
    Suite,
    attention_suites,
    gemm_suites,
)
from ridgeline.basis import Basis
from ridgeline.cost.calibration import Calibration
from ridgeline.cost.price import FRAMEWORK_ARCHS, Pricer
from ridgeline.cost.time.attention import tiles as attention
from ridgeline.cost.time.chip import Floats, chip_of
from ridgeline.cost.unmeasured import architectures as strangers
from ridgeline.hardware import device
from ridgeline.validation import operators as check

MEMBERS = {"ampere": "a100-sxm-80gb", "ada": "l40s", "hopper": "h100-sxm", "blackwell": "b200"}
KIN = {"hopper": "h200", "blackwell": "gb200"}
"""Further devices of architectures left out, of which no row is in any fit."""
KEYS = ("bf16", "fp8", "prefill", "decode")
WINDOWS = {"prefill": "prefill_window", "decode": "decode_window"}
NUM_FIT, NUM_JUDGED = {"bf16": 300}, 1500
SD_COMMON, SD_CONTRAST, SD_OWN = 0.7, 0.25, 0.25
"""Logarithms by which a common value may leave its start, a contrast and a deviation nothing. Set before judging, one
for all kinds; a contrast that the generation of instructions does not explain is held to a fifth."""
SD_SAME = 0.05
NUM_EFFECTIVE, MISS = 60.0, 0.1
"""Rows of a device count as so many that are each missed by this much: what structure misses is no noise."""
SOFT = 0.06
COVERAGE = 0.9
DENSER = 0.35
"""Half the logarithm of the energy of an operation with operands in registers over one that reads shared memory."""
_GEMM_START = {
    "ramp_s": 1e-9, "ramp_bytes": 5e7, "launch_s": 2.2e-6, "fanout_s": 7e-7, "gap_s": 3e-7, "tensor_frac": 0.9,
    "l2_frac": 0.8, "dram_frac": 0.8, "kstep_s": 1.5e-7, "kstep_cold_s": 1.5e-8, "epilogue_frac": 0.3,
    "splitk_s": 2.5e-6, "exposed_frac": 0.3, "power_frac": 1.75, "power_tau_s": 3e-4, "writeback_frac": 0.2,
}  # fmt: skip
_PREFILL_START = {name: attention.GENERIC[name] for name in PREFILL} | CACHE | {"power_frac": 1.75}
_DECODE_START = {name: attention.GENERIC[name] for name in DECODE} | DECODE_PROTOCOL
_DECODE_START["regroup_s"] = 2 / 3 * _DECODE_START["launch_s"]  # two kernels where a call has three
STARTS = {
    "bf16": _GEMM_START | GEMM_PROTOCOL, "fp8": _GEMM_START | GEMM_PROTOCOL | QUANTIZE, "prefill": _PREFILL_START,
    "decode": _DECODE_START,
}  # fmt: skip
_PIPELINE = frozenset({"gap_s", "tensor_frac", "l2_frac", "kstep_s", "kstep_cold_s", "epilogue_frac", "power_frac"})
CONTRASTS = {
    "bf16": _PIPELINE, "fp8": _PIPELINE, "prefill": frozenset({"tensor_frac", "serial_frac", "power_frac"}),
    "decode": frozenset({"load_frac"}),
}  # fmt: skip
"""What the generation of matrix instructions changes: how the units are fed, and at what energy."""
FIXED = {"bf16": ("ramp_s", "ramp_bytes"), "fp8": ("ramp_s", "ramp_bytes", "splitk_s")}


@dataclass(frozen=True)
class Common:
    """What a fit found: common values and contrasts, as ``strangers.coefficients`` reads them, and the members' own."""

    common: dict[str, float]
    contrast: dict[str, float]
    own: dict[str, dict[str, float]]
    protocol: tuple[str, ...]
    key: str
    unseen: dict[str, float] = field(default_factory=dict)

    def shared(self) -> dict[str, object]:
        """The entry of ``data/unmeasured_architectures.json``."""
        rounded = {name: float(f"{value:.4g}") for name, value in self.common.items()}
        moved = {name: round(value, 3) for name, value in self.contrast.items() if abs(value) >= 5e-4}
        return {"common": rounded, "contrast": moved, "protocol": list(self.protocol), "unseen": self.unseen}

    def coef(self, suite: Suite) -> dict[str, float]:
        """Coefficients of a suite's device as if nobody had measured its architecture."""
        found = strangers.coefficients(self.shared(), device(suite.device), suite.note)
        return {name: value for name, value in found.items() if name in suite.start}


@dataclass(frozen=True)
class _Member:
    """One device's rows, and where its coefficients are among the unknowns."""

    suite: Suite
    rows: pd.DataFrame
    measured: Floats
    units: Floats
    side: float
    place: int
    weight: float

    def residuals(self, names: Sequence[str], logs: Floats, limit: float) -> Floats:
        coef = dict(zip(names, np.exp(logs) * self.units, strict=True))
        if "tensor_frac" in coef:
            coef["tensor_frac"] = min(coef["tensor_frac"], limit)
        known = {name: value for name, value in coef.items() if name in self.suite.start}
        missed = np.log(self.suite.predict({**self.suite.start, **known}, self.rows)) - self.measured
        return self.weight * np.sign(missed) * SOFT * np.sqrt(2 * (np.sqrt(1 + (missed / SOFT) ** 2) - 1))


def _members(suites: Sequence[Suite], names: Sequence[str], num_fit: int) -> list[_Member]:
    found = []
    for place, suite in enumerate(suites):
        rows, on = suite.rows.sample(min(num_fit, len(suite.rows)), random_state=0), device(suite.device)
        units = np.array([strangers.unit_of(name, on, suite.note) for name in names])
        weight = float(np.sqrt(NUM_EFFECTIVE / len(rows)) / MISS)
        side = strangers.side_of(on.arch)
        found.append(_Member(suite, rows, np.log(rows["measured_s"].to_numpy()), units, side, place, weight))
    return found


def fit_common(suites: Sequence[Suite], key: str, contrast: Mapping[str, float] | None = None) -> Common:
    """Common values, contrasts and deviations of some architectures; ``contrast`` is what is expected of the second."""
    start = STARTS[key]
    names = [name for name in start if name not in FIXED.get(key, ())]
    count, base = len(names), np.log([start[name] for name in names])
    members = _members(suites, names, NUM_FIT.get(key, 500))
    limits = [strangers.tensor_limit(device(member.suite.device)) for member in members]
    sds = _spreads(names, key, len(members))
    expected = np.zeros(len(sds))
    expected[count : 2 * count] = [(contrast or {"power_frac": DENSER}).get(name, 0.0) for name in names]

    def logs(x: Floats, member: _Member) -> Floats:
        own = x[(2 + member.place) * count : (3 + member.place) * count]
        return base + x[:count] + member.side * x[count : 2 * count] + own

    def residuals(x: Floats) -> Floats:
        parts = [m.residuals(names, logs(x, m), limit) for m, limit in zip(members, limits, strict=True)]
        return np.concatenate([*parts, (x - expected) / sds])

    def slopes(x: Floats) -> Floats:
        blocks = [_slope(m, names, logs(x, m), limit, len(x)) for m, limit in zip(members, limits, strict=True)]
        return np.vstack([*blocks, np.diag(1 / sds)])

    found = least_squares(residuals, expected, jac=slopes, max_nfev=15 if key == "bf16" else 25, x_scale=sds).x
    common = start | dict(zip(names, np.exp(base + found[:count]).tolist(), strict=True))
    moved = dict(zip(names, found[count : 2 * count].tolist(), strict=True))
    own = {m.suite.device: dict(zip(names, (np.exp(logs(found, m)) * m.units).tolist(), strict=True)) for m in members}
    return Common(common, moved, own, suites[0].protocol, key)


def _spreads(names: Sequence[str], key: str, num_members: int) -> Floats:
    contrasts = [SD_CONTRAST if name in CONTRASTS[key] else SD_SAME for name in names]
    return np.array([SD_COMMON] * len(names) + contrasts + [SD_OWN] * (len(names) * num_members))


def _slope(member: _Member, names: Sequence[str], logs: Floats, limit: float, size: int, step: float = 5e-3) -> Floats:
    """Derivatives of one member's residuals: its coefficients are sums of three unknowns each."""
    at, count = member.residuals(names, logs, limit), len(names)
    block = np.zeros((len(at), size))
    for i, name in enumerate(names):
        if name not in member.suite.start:
            continue
        moved = logs.copy()
        moved[i] += step
        slope = (member.residuals(names, moved, limit) - at) / step
        block[:, i], block[:, count + i], block[:, (2 + member.place) * count + i] = slope, member.side * slope, slope
    return block


# Judging

Suites = Mapping[str, Mapping[str, Suite]]


def suites_of(tables: Path, names: Sequence[str]) -> dict[str, dict[str, Suite]]:
    """All suites of some devices, by device and key."""
    found = {}
    for name in names:
        chip, folder = chip_of(device(name)), tables / FOLDERS[name]
        every = gemm_suites(name, folder, chip) + attention_suites(name, folder, chip)
        found[name] = {suite.key: suite for suite in every}
    return found


def fit_without(suites: Suites, arch: str | None) -> dict[str, Common]:
    """What all architectures but one have in common, by key; eight-bit products expect the contrast of wider ones."""
    donors = [suites[name] for other, name in MEMBERS.items() if other != arch]
    found: dict[str, Common] = {}
    for key in KEYS:
        contrast = {**found["bf16"].contrast} if key == "fp8" else None
        found[key] = fit_common([donor[key] for donor in donors if key in donor], key, contrast)
    return found


def judged(suite: Suite, common: Common) -> Floats:
    """Logarithms of predicted over measured of a suite's rows."""
    rows = _judged_rows(suite)
    return np.log(suite.predict({**suite.start, **common.coef(suite)}, rows) / rows["measured_s"].to_numpy())


def _judged_rows(suite: Suite) -> pd.DataFrame:
    return suite.rows.sample(min(NUM_JUDGED, len(suite.rows)), random_state=1)


REGIMES = ((0.0, 12e-6, "below 12 us"), (12e-6, 50e-6, "to 50 us"), (50e-6, 1e-3, "to 1 ms"), (1e-3, 1e9, "longer"))


def regimes(suite: Suite, logs: Floats) -> str:
    """Mean error and bias of calls that launches, latencies and caches, or throughput bound."""
    measured, errors = _judged_rows(suite)["measured_s"].to_numpy(), np.expm1(logs)
    parts = []
    for low, high, words in REGIMES:
        if (within := (measured >= low) & (measured < high)).any():
            size, bias = 100 * np.abs(errors[within]).mean(), 100 * errors[within].mean()
            parts.append(f"{words} {size:.0f} ({bias:+.0f}) %, n {within.sum()}")
    return "; ".join(parts)


def report(name: str, key: str, logs: Floats, inside: float | None = None) -> None:
    errors = np.expm1(logs)
    held = "" if inside is None else f"  inside {100 * inside:3.0f} %"
    print(
        f"{name:14} {key:15} n={len(errors):5} MAPE {100 * np.abs(errors).mean():5.1f} %  median "
        f"{100 * np.median(np.abs(errors)):5.1f} %  bias {100 * errors.mean():+6.1f} %{held}", flush=True
    )  # fmt: skip


def judge(suites: Suites) -> dict[str, dict[str, Floats]]:
    """Each architecture by the others: logarithms of predicted over measured, by key and architecture."""
    found: dict[str, dict[str, Floats]] = {}
    for arch, name in MEMBERS.items():
        began, fitted = time.time(), fit_without(suites, arch)
        for key, common in fitted.items():
            for judged_key in filter(suites[name].__contains__, (key, WINDOWS.get(key, ""))):
                found.setdefault(judged_key, {})[arch] = judged(suites[name][judged_key], common)
                report(name, judged_key, found[judged_key][arch])
                print("    " + regimes(suites[name][judged_key], found[judged_key][arch]), flush=True)
        for key in filter(fitted.__contains__, suites.get(KIN.get(arch, ""), {})):
            report(KIN[arch], key, judged(suites[KIN[arch]][key], fitted[key]))
        as_users_get_it(suites[name], fitted)
        print(f"{arch} left out: {time.time() - began:.0f} s", flush=True)
    return found


def width(found: Mapping[str, Mapping[str, Floats]], key: str, without: str = "") -> float:
    """log half-width that held 90 % of the rows of architectures left out, each as heavy as another."""
    rng = np.random.default_rng(0)
    logs = np.concatenate([rng.choice(logs, 1000) for arch, logs in found[key].items() if arch != without])
    return round(float(np.quantile(np.abs(logs), 0.9)), 3)


def covered(found: Mapping[str, Mapping[str, Floats]], key: str, arch: str, wider: float) -> float:
    """Share of an architecture's rows inside the interval that the others left out ask for; windows have no own one."""
    base = next((name for name, local in WINDOWS.items() if local == key), key)
    return float(np.mean(np.abs(found[key][arch]) <= wider * width(found, base, arch)))


def widening(found: Mapping[str, Mapping[str, Floats]]) -> float:
    """How much wider the interval of a fifth architecture must be than four ask for: 90 % on average in their place."""
    shares = [[covered(found, key, arch, 1 + i / 20) for key in KEYS for arch in found[key]] for i in range(21)]
    return next((1 + i / 20 for i, share in enumerate(shares) if np.mean(share) >= COVERAGE), 2.0)


def as_users_get_it(suites: Mapping[str, Suite], fitted: Mapping[str, Common], num_rows: int = 200) -> None:
    """The same through ``predict_call``, with the device's own calibration hidden: what is judged is what is used."""
    on = device(next(iter(suites.values())).device)
    families: dict[str, dict[str, object]] = {}
    for key, common in fitted.items():
        if key in suites:
            entry = strangers.entry_of({**common.shared(), "unseen": {"width": 0.3}}, on, suites[key].note)
            families.setdefault(suites[key].family, {})[key] = entry
    pricer = Pricer(on)
    pricer.calibration = Calibration("", families, basis=Basis.DATASHEET)
    with mock.patch.object(check, "pricer_of", return_value=pricer):
        for key in filter(suites.__contains__, ("bf16", "prefill", "decode")):
            suite = suites[key]
            rows = suite.rows.sample(num_rows, random_state=2)
            times = [check.predict_call(on, **_call(key, row, on.arch)).expected_s for row in rows.to_dict("records")]
            report(on.name, f"{key}, as used", np.log(times / rows["measured_s"].to_numpy()))


def _call(key: str, row: Mapping[str, object], arch: str) -> dict[str, object]:
    if key == "bf16":
        shape = {name: row[name] for name in "mnk"}
        return {"kind": "gemm", "dtype": "bf16", "phase": "fwd", "library": "cublas", "shape": shape}
    length = row["kv_length"] if key == "decode" else row["isl"]
    shape = {"b": row["batch_size"], "h": row["num_heads"], "hkv": row["hkv"], "s": 1 if key == "decode" else length,
             "skv": length, "d": row["head_dim"], "causal": 1}  # fmt: skip
    library = "fa3" if arch in FRAMEWORK_ARCHS else "fa2"
    return {"kind": "attention", "dtype": "bf16", "phase": "fwd", "library": library, "shape": shape}


def write(path: Path, suites: Suites, found: Mapping[str, Mapping[str, Floats]], wider: float) -> None:
    families: dict[str, dict[str, object]] = {}
    for key, common in fit_without(suites, None).items():
        family = suites[MEMBERS["hopper"]][key].family
        unseen = {"width": round(wider * width(found, key), 3)}
        families.setdefault(family, {})[key] = {**common.shared(), "unseen": unseen}
    content = {"source": SOURCE, "basis": "fitted", "members": list(MEMBERS.values()), "families": families}
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", type=Path, help="folder with one folder of Parquet tables per device")
    parser.add_argument("--write", action="store_true", help="then fit all architectures and write the data file")
    parser.add_argument("--out", type=Path, default=Path("data") / strangers.FILE)
    options = parser.parse_args()
    suites = suites_of(options.tables, [*MEMBERS.values(), *KIN.values()])
    found = judge(suites)
    wider = widening(found)
    print(f"\nintervals by the other architectures left out, {wider:.2f} times as wide")
    for key, by_arch in found.items():
        for arch, logs in by_arch.items():
            report(MEMBERS[arch], key, logs, covered(found, key, arch, wider))
    if options.write:
        write(options.out, suites, found, wider)


if __name__ == "__main__":
    main()
