"""Grows the trees of ``cost/correction/gemm_attention.py``: what the structure of a product leaves over,
on measured products.

    python -m lab.fit.gemm_correction [--device h200] [--only half,fp8] [--learn]
                                       [--silicon ../shared/silicon] [--write]

Every product of ``operators_seed*`` is priced without them; trees learn the logarithm of measured over predicted time,
boosted with a clipped loss. Prints the error of the trees on the judging samples that were opened before
(``unseen_seed*``, ``blind_seed*``), unless ``--learn`` takes those in as well, for the trees that ship. ``--silicon``
also grows those of the devices known from serving frameworks' tables (``lab/fit/published_kernels.py`` says where
they come from).
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab.fit.recordings import DATA, load_operators, update_calibration
from lab.validate.operators import errors
from ridgeline.cost import host
from ridgeline.cost.correction import gemm_attention as residue
from ridgeline.cost.correction.gemm_attention import BOUND, Boosted, boosted, features, pool_of
from ridgeline.cost.price import Pricer
from ridgeline.cost.time.chip import Chip, chip_of
from ridgeline.cost.time.gemm import calls as matmul
from ridgeline.hardware import device

RATE, RIDGE = 0.1, 10.0
CLIP, NARROW_CLIP = 0.15, 0.08  # how much one row may pull; where noise is most of what is left
BINS, ROWS_FRAC, FEATURES_FRAC = 32, 0.8, 0.5



@dataclass(frozen=True, slots=True)
class Growth:
    """How many trees of how many questions, and how much one row may pull."""

    trees: int = 150
    depth: int = 4
    clip: float = CLIP


POOLS = {
    "half": Growth(300, 5, NARROW_CLIP), "half.odd": Growth(600, 7), "fp32": Growth(400, 7), "tf32": Growth(320, 6),
    "fp8": Growth(200, 5, NARROW_CLIP), "vector": Growth(300, 6), "half.alone.fwd": Growth(300, 5, NARROW_CLIP),
    "half.alone.bwd": Growth(300, 5, NARROW_CLIP), "fp8.alone.fwd": Growth(200, 5, NARROW_CLIP),
}  # fmt: skip
"""Of the products recorded here, chosen by the error on a recording left out (seeds 6005 and 6015)."""
MOST_ROWS = 9000  # of a table
PATH = DATA / residue.FILE
JUDGES = ("unseen_seed*", "blind_seed*")


def problem_of(row: dict[str, Any]) -> matmul.Problem:
    s = row["shape"]
    layout = s.get("layout", "nn" if row["kind"] == "bmm" else "nt")
    return s.get("b", 1), s["m"], s["n"], s["k"], layout


@dataclass(frozen=True, slots=True)
class Measured:
    """Features of products, what their structure says, what events add to that, and what was measured."""

    rows: np.ndarray
    busy_s: np.ndarray
    more_s: np.ndarray
    measured_s: np.ndarray

    @property
    def logs(self) -> np.ndarray:
        """What trees learn: kernels' time over that of the structure."""
        return np.asarray(np.log(np.maximum(self.measured_s - self.more_s, 0.3 * self.busy_s) / self.busy_s))

    @property
    def weight(self) -> np.ndarray:
        """A call that is mostly the events' own time says little."""
        return np.asarray(self.busy_s / (self.busy_s + self.more_s))

    def missed(self, logs: np.ndarray | float) -> float:
        told_s = self.busy_s * np.exp(np.clip(logs, -BOUND, BOUND)) + self.more_s
        return float(np.mean(np.abs(told_s / self.measured_s - 1)))

    def figures(self, logs: np.ndarray) -> dict[str, Any]:
        """How far products held out are off, as calibrations tell it."""
        off = np.log((self.busy_s * np.exp(np.clip(logs, -BOUND, BOUND)) + self.more_s) / self.measured_s)
        q05, q95 = (round(float(q), 4) for q in np.quantile(off, (0.05, 0.95)))
        ratio = np.exp(off) - 1
        share = {"mape": np.abs(ratio).mean(), "bias": ratio.mean(), "median_ape": np.median(np.abs(ratio))}
        rounded = {name: round(float(value), 4) for name, value in share.items()}
        return {"n": len(off), **rounded, "log_quantiles": {"q05": q05, "q95": q95}}

    def some(self, kept: np.ndarray) -> Measured:
        return Measured(self.rows[kept], self.busy_s[kept], self.more_s[kept], self.measured_s[kept])


def cuts_of(column: np.ndarray) -> np.ndarray:
    seen = np.unique(column)
    if len(seen) <= BINS:
        return np.asarray((seen[1:] + seen[:-1]) / 2)
    return np.unique(np.quantile(column, np.linspace(0, 1, BINS + 1)[1:-1]))


def question(
    columns: np.ndarray, widths: list[int], leaf: np.ndarray, pulls: tuple[np.ndarray, np.ndarray]
) -> tuple[int, int]:
    """The column and cut that, asked in all branches at once, explain most."""
    best, found, num = -1.0, (0, 0), int(leaf.max()) + 1
    pull, weight = pulls
    for at, (column, width) in enumerate(zip(columns, widths, strict=True)):
        if width < 2:
            continue
        place = leaf * width + column
        total = np.bincount(place, pull, num * width).reshape(num, width)
        count = np.bincount(place, weight, num * width).reshape(num, width)
        left, below = np.cumsum(total, 1), np.cumsum(count, 1)
        right, above = left[:, -1:] - left[:, :-1], below[:, -1:] - below[:, :-1]
        score = (left[:, :-1] ** 2 / (below[:, :-1] + RIDGE) + right**2 / (above + RIDGE)).sum(0)
        cut = int(np.argmax(score))
        if score[cut] > best:
            best, found = float(score[cut]), (at, cut)
    return found


def grow(given: Measured, trees: int, clip: float = CLIP, depth: int = 4) -> Boosted:
    """Trees one after another, each from most of the rows and half of the features, of what is left unexplained."""
    rng, rows, weight, logs = np.random.default_rng(0), given.rows, given.weight, given.logs
    cuts = [cuts_of(column) for column in rows.T]
    binned = np.stack([np.searchsorted(cut, column).astype(np.uint8) for cut, column in zip(cuts, rows.T, strict=True)])
    told, parts = np.zeros(len(rows)), ([], [], [])  # type: ignore[var-annotated]
    for _ in range(trees):
        left = np.clip(logs - told, -clip, clip) * weight
        drawn = np.nonzero(rng.random(len(rows)) < ROWS_FRAC)[0]
        asked = np.nonzero(rng.random(rows.shape[1]) < FEATURES_FRAC)[0]
        columns, widths = binned[asked][:, drawn], [len(cuts[at]) + 1 for at in asked]
        pulls, leaf, asked_of, limits = (left[drawn], weight[drawn]), np.zeros(len(rows), np.int64), [], []
        for _ in range(depth):
            place, cut = question(columns, widths, leaf[drawn], pulls)
            at = int(asked[place])
            leaf = leaf * 2 + (binned[at] > cut)
            asked_of.append(at)
            limits.append(cuts[at][cut])
        total = np.bincount(leaf[drawn], pulls[0], 1 << depth)
        values = RATE * total / (np.bincount(leaf[drawn], pulls[1], 1 << depth) + RIDGE)
        told += values[leaf]
        for part, value in zip(parts, (asked_of, limits, values), strict=True):
            part.append(value)
    return boosted(*(np.array(part) for part in parts))


def sets(rows: list[dict[str, Any]], pricer: Pricer) -> dict[str, Measured]:
    """Measured products by pool."""
    found: dict[str, list[tuple[list[float], float, float, float]]] = defaultdict(list)
    known = pricer.calibration.families["gemm"]
    coefs = {dtype: {**matmul.DEFAULTS, **entry["coef"], "alone_frac": 1.0} for dtype, entry in known.items()}
    for e in errors([r for r in rows if r["kind"] in ("gemm", "bmm") and r["phase"] == "fwd"], pricer):
        for pool, row in told_apart(e, pricer, coefs[e["row"]["dtype"]]):
            found[pool].append(row)
    return {
        pool: Measured(np.array([r[0] for r in some]), *(np.array([r[i] for r in some]) for i in (1, 2, 3)))
        for pool, some in found.items()
    }


def told_apart(
    e: dict[str, Any], pricer: Pricer, coef: matmul.Coef
) -> Iterator[tuple[str, tuple[list[float], float, float, float]]]:
    """A measured product as each of the pools has it that may tell its time: by events, or by its kernels alone."""
    problem, dtype, kernels = problem_of(e["row"]), e["row"]["dtype"], e["row"]["kernels"]
    pools = [p for phase in ("fwd", "bwd") for p in matmul.pools_of(problem, dtype, coef, phase) if p[0] in POOLS]
    seen = {paced: matmul.described(problem, dtype, pricer.chip, coef, paced) for paced in {p for _, p in pools}}
    for pool, paced in dict.fromkeys(pools):
        values, num = seen[paced]
        more_s = _late_s(num) if num else math.exp(e["log"]) * e["measured_s"] - e["busy_s"]
        of_kernels_s = sum(s for _, s in kernels) + _late_s(len(kernels))
        yield pool, (values, e["busy_s"], more_s, of_kernels_s if pool.endswith(".bwd") else e["measured_s"])


def _late_s(num: int) -> float:
    """What events add to so many kernels."""
    return float(host.DEFAULTS["event_s"] + host.DEFAULTS["event_gap_s"] * (num - 1))


def without(pricer: Pricer) -> Pricer:
    """The same prices with no trees behind them."""
    for entry in pricer.calibration.families.get("gemm", {}).values():
        entry["coef"].pop("residue_frac", None)
    return pricer


def save(path: Path, pools: dict[str, Boosted]) -> None:
    """Trees of one depth one after another; the index says how deep a pool's are, and where."""
    parts: dict[str, list[np.ndarray]] = defaultdict(list)
    index, ends = [], defaultdict[int, int](int)
    for name, trees in pools.items():
        num, depth = trees.feature.shape
        index.append([name, [depth, ends[depth], ends[depth] + num]])
        ends[depth] += num
        parts[f"feature{depth}"].append(trees.feature.astype(np.uint8))
        parts[f"limit{depth}"].append(trees.limit.astype(np.float32))
        parts[f"leaf{depth}"].append(trees.leaf.reshape(num, -1).astype(np.float16))
    whole = {name: np.concatenate(part) for name, part in parts.items()}
    np.savez_compressed(path, allow_pickle=False, index=np.array(json.dumps(index)), **whole)
    print(f"{path.name}: {path.stat().st_size} bytes, {sum(ends.values())} trees")


def recorded(name: str, only: str, learn: bool) -> dict[str, Boosted]:
    """Trees of a device whose products were recorded here; ``learn`` from the judging samples as well."""
    pricer = without(Pricer(device(name)))
    judges = {judge: load_operators(name, judge) for judge in JUDGES}
    given = sets([*load_operators(name), *(row for rows in judges.values() for row in rows if learn)], pricer)
    judges = {} if learn else {judge: sets(rows, pricer) for judge, rows in judges.items()}
    pools = {}
    for pool in (pool for pool in POOLS if not only or pool in only.split(",")):
        pools[f"{name}/{pool}"] = trees = told(f"{name}/{pool}", given[pool])
        for judge, samples in judges.items():
            if pool in samples:
                mine = samples[pool]
                after = mine.missed(trees.logs(mine.rows))
                print(f"{'':24s} {judge} ({len(mine.rows)}) {mine.missed(0.0):.2%} -> {after:.2%}", flush=True)
    return pools


FIGURES: dict[str, dict[str, Any]] = {}
"""Of each pool, on the products held out."""


def told(name: str, mine: Measured) -> Boosted:
    """Trees grown from everything; of tables, the error printed is of three quarters' trees on the fourth.

    Products recorded here are judged by samples that no tree has seen.
    """
    device_name, _, pool = name.partition("/")
    how = POOLS[pool] if device_name == "h200" else Growth()
    if device_name == "h200":
        print(f"{name:24s} n {len(mine.rows):5d}", flush=True)
        return grow(mine, how.trees, how.clip, how.depth)
    kept = np.random.default_rng(1).random(len(mine.rows)) < 0.75
    held, part = mine.some(~kept), grow(mine.some(kept), how.trees, how.clip, how.depth)
    FIGURES[name] = held.figures(part.logs(held.rows))
    after = held.missed(part.logs(held.rows))
    print(f"{name:24s} n {len(mine.rows):5d}  held out {held.missed(0.0):.2%} -> {after:.2%}", flush=True)
    return grow(mine, how.trees, how.clip, how.depth)


def tabled(name: str, folder: Path) -> dict[str, Boosted]:
    """Trees of a device known from serving frameworks' tables."""
    from lab.fit import published_kernels as fit_silicon

    chip = chip_of(device(name))
    known = json.loads((DATA / "calibrations" / f"{name}.json").read_text())["families"]["gemm"]
    pools = {}
    for suite in fit_silicon.gemm_suites(name, folder / fit_silicon.FOLDERS[name], chip):
        entry = known.get(suite.key, {})
        if entry.get("source") != fit_silicon.SOURCE:
            continue
        rows = suite.rows.sample(min(MOST_ROWS, len(suite.rows)), random_state=0)
        problems = [(1, int(m), int(n), int(k), "nt") for m, n, k in rows[["m", "n", "k"]].to_numpy()]
        values = np.array([features(p, suite.key, matmul.alignment(p, suite.key), chip.num_sms) for p in problems])
        busy_s = suite.predict({**entry["coef"], **entry["protocol"]}, rows)
        measured = Measured(values, busy_s, np.zeros(len(rows)), rows["measured_s"].to_numpy())
        pools[f"{name}/{pool_of(suite.key, 8)}"] = told(f"{name}/{suite.key}", measured)
    return pools | tabled_attention(name, folder, chip)


ATTENTION = ("prefill", "prefill_window", "decode", "decode_window")


def tabled_attention(name: str, folder: Path, chip: Chip) -> dict[str, Boosted]:
    """The same for attention with 16-bit keys and values."""
    from lab.fit import published_kernels as fit_silicon

    known = json.loads((DATA / "calibrations" / f"{name}.json").read_text())["families"]["attention"]
    pools = {}
    for suite in fit_silicon.attention_suites(name, folder / fit_silicon.FOLDERS[name], chip):
        entry = known.get(suite.key, {})
        if suite.key not in ATTENTION or entry.get("source") != fit_silicon.SOURCE:
            continue
        rows = suite.rows.sample(min(MOST_ROWS, len(suite.rows)), random_state=0)
        sizes = ("batch_size", "num_heads", "hkv", "isl", "kv_length", "head_dim", "window_size")
        values = [_attention_row(suite.key, row, chip) for row in rows[list(sizes)].astype(int).to_numpy().tolist()]
        busy_s = suite.predict({**entry["coef"], **entry["protocol"]}, rows)
        measured = Measured(np.array(values), busy_s, np.zeros(len(rows)), rows["measured_s"].to_numpy())
        pools[f"{name}/{suite.key}"] = told(f"{name}/{suite.key}", measured)
    return pools


def _attention_row(key: str, sizes: list[int], chip: Chip) -> list[float]:
    b, h, hkv, s, kv_length, d, window = sizes
    s, skv = (1, kv_length) if key.startswith("decode") else (s, s)
    dims = {"b": b, "h": h, "hkv": hkv, "s": s, "skv": skv, "d": d, "window": window}
    return residue.attention_features(dims, chip.num_sms)


def write(pools: dict[str, Boosted]) -> None:
    """The trees, beside those of devices that were not grown anew; and in calibrations, that there are some."""
    kept = {name: trees for name, trees in residue._pools().items() if name not in pools} if PATH.is_file() else {}
    save(PATH, kept | pools)
    for name in {pool.partition("/")[0] for pool in pools}:
        families = json.loads((DATA / "calibrations" / f"{name}.json").read_text())["families"]
        for key, entry in (*families["gemm"].items(), *families["attention"].items()):
            if {f"{name}/{pool}" for pool in (key, pool_of(key, 8), pool_of(key, 1))} & set(pools):
                entry["coef"]["residue_frac"] = 1.0
                if f"{name}/{key}" in FIGURES and "protocol" in entry:
                    entry["heldout"] = FIGURES[f"{name}/{key}"]
        update_calibration(name, families={family: families[family] for family in ("gemm", "attention")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="h200", help="recorded here; none for tables alone")
    parser.add_argument("--only", default="", help="pools of the recorded device, such as half,fp8")
    parser.add_argument("--silicon", type=Path, help="folder with one folder of tables for each device")
    parser.add_argument("--learn", action="store_true", help="from the judging samples too, for the trees that ship")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    pools = recorded(options.device, options.only, options.learn) if options.device != "none" else {}
    for name in ("h100-sxm", "a100-sxm-80gb", "b200", "gb200", "l40s") if options.silicon else ():
        pools |= tabled(name, options.silicon)
    if options.write:
        write(pools)


if __name__ == "__main__":
    main()
