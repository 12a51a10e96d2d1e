"""Grows the trees of ``cost/correction/rows.py``: what the structure of norms, sums, sorts and attention leaves over.

    python -m lab.fit.rows_correction [--device h200] [--leave 6043,6033] [--folds] [--write] [--intervals]

Learns from ``operators_seed*`` and from the judging samples that were read before (``blind_seed*``, ``unseen_seed*``),
but for those that ``--leave`` names, whose error it prints. ``--folds`` leaves every judging sample out once, a third
of them at a time. ``--write`` grows the trees from everything that is not left out. ``--intervals`` writes the widths
that held nine tenths of the judging samples: of these calls as told by trees that did not see them (``--folds``), of
products by trees that learned from none of those samples (``lab/fit/gemm_correction.py``).
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from typing import Any

import numpy as np

from lab.fit.gemm_correction import Measured, grow, save
from lab.fit.recordings import DATA, load_operators, update_calibration
from lab.validate.operators import class_of, errors
from ridgeline.bench.fitting import Sample, intervals, sample
from ridgeline.cost.call import Call, family_of
from ridgeline.cost.correction import gemm_attention as residue
from ridgeline.cost.correction import rows as leftover
from ridgeline.cost.correction.gemm_attention import Boosted
from ridgeline.cost.price import Pricer
from ridgeline.hardware import device

TREES, DEPTH, CLIP = 150, 4, 0.1
LEAST = 60
"""Rows of a pool below which it gets no trees."""
FOLDS = ((6003, 6033, 2001, 6063), (6013, 1003, 6043), (6023, 2, 6053))
JUDGES = ("blind_seed*", "unseen_seed*")
Row = tuple[int, dict[str, Any], list[float], float, float, float]  # seed, row, features, structure, events, measured


def call_of(row: dict[str, Any]) -> Call:
    return Call(row["kind"], row["dtype"], row["phase"], row["library"], tuple(row["shape"].items()))


def without(pricer: Pricer) -> Pricer:
    """The same prices with no trees behind them."""
    for entries in pricer.calibration.families.values():
        for entry in entries.values():
            entry["coef"].pop("leftover_frac", None)
    return pricer


def pools(name: str) -> dict[str, list[Row]]:
    """Every measured call by pool."""
    rows = [row for pattern in ("operators_seed*", *JUDGES)
            for row in load_operators(name, pattern) if leftover.pool_of(call_of(row))]  # fmt: skip
    pricer, found = without(Pricer(device(name))), defaultdict[str, list[Row]](list)
    for e in errors(rows, pricer):
        call, more_s = call_of(e["row"]), math.exp(e["log"]) * e["measured_s"] - e["busy_s"]
        values = leftover.features(call, pricer.chip.num_sms)
        found[leftover.pool_of(call)].append((e["row"]["seed"], e["row"], values, e["busy_s"], more_s, e["measured_s"]))
    return {pool: some for pool, some in found.items() if len(some) >= LEAST}


def measured(rows: list[Row]) -> Measured:
    return Measured(np.array([row[2] for row in rows]), *(np.array([row[i] for row in rows]) for i in (3, 4, 5)))


def grown(rows: list[Row]) -> Boosted:
    return grow(measured(rows), TREES, CLIP, DEPTH)


def judge(
    found: dict[str, list[Row]], left: tuple[int, ...], told: dict[str, list[tuple[float, float]]]
) -> list[tuple[Sample, float, float]]:
    """Errors of structure and of trees on the samples left out, added to what is known by pool and class."""
    seen = []
    for pool, rows in found.items():
        mine = [row for row in rows if row[0] in left]
        if not mine:
            continue
        logs = np.clip(grown([row for row in rows if row[0] not in left]).logs(measured(mine).rows), -residue.BOUND,
                       residue.BOUND)  # fmt: skip
        for (_, row, _, busy_s, more_s, measured_s), log in zip(mine, logs.tolist(), strict=True):
            pair = abs((busy_s + more_s) / measured_s - 1), abs((busy_s * math.exp(log) + more_s) / measured_s - 1)
            for key in (pool, class_of(row), f"sample {row['seed']}, {class_of(row)}"):
                told[key].append(pair)
            told_s = busy_s * math.exp(log)
            seen.append((sample(row), told_s, math.log((told_s + more_s) / measured_s)))
    return seen


def widths(name: str, seen: list[tuple[Sample, float, float]]) -> dict[str, Any]:
    """Intervals with those of products and of calls left out replaced; the range of sizes that was fitted stays."""
    rows = [row for pattern in JUDGES for row in load_operators(name, pattern) if row["kind"] in ("gemm", "bmm")]
    pricer = Pricer(device(name))
    known = pricer.calibration.intervals
    seen = seen + [(e["sample"], e["busy_s"], e["log"]) for e in errors(rows, pricer)]
    new = intervals(seen)
    for key, entry in new["kinds"].items():
        low_s, high_s = known["kinds"].get(key, entry)["domain_s"]
        entry["domain_s"] = [min(low_s, entry["domain_s"][0]), max(high_s, entry["domain_s"][1])]
    return {**known, "kinds": {**known["kinds"], **new["kinds"]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--leave", default="", help="seeds of judging samples to keep out")
    parser.add_argument("--folds", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--intervals", action="store_true")
    options = parser.parse_args()
    found, left = pools(options.device), tuple(int(seed) for seed in options.leave.split(",") if seed)
    told = defaultdict[str, list[tuple[float, float]]](list)
    seen = [row for fold in (FOLDS if options.folds else (left,)) for row in judge(found, fold, told)]
    for key, pairs in sorted(told.items()):
        before, after = np.mean(pairs, axis=0)
        print(f"{key:76s} n {len(pairs):4d}  {before:.2%} -> {after:.2%}")
    if options.write:
        trees = {f"{options.device}/{pool}": grown([row for row in rows if row[0] not in left])
                 for pool, rows in found.items()}  # fmt: skip
        save(DATA / residue.LEFT_OVER, trees)
        families = Pricer(device(options.device)).calibration.families
        names = {family_of(pool.partition(".")[0]).name for pool in found}
        for name in names:
            families[name]["all"]["coef"]["leftover_frac"] = 1.0
        update_calibration(options.device, families={name: families[name] for name in names})
    if options.intervals and options.folds:
        update_calibration(options.device, intervals=widths(options.device, seen))


if __name__ == "__main__":
    main()
