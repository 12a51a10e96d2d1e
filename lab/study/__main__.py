"""``python -m lab.study million|search|kills [--points N] [--workers N] [--store FILE]``: one JSON document each."""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import ridgeline as rl
from ridgeline.store.store import Store
from ridgeline.study.frontier import frontier, hypervolume
from ridgeline.study.run import Spec, Study, opened, run

MEASURES = ("step_s", "energy_j", "peak_bytes", "tpot_s", "usd_per_mtoken", "fits")


def space(points: int) -> rl.Space:
    """Imagined devices that decode: 100 bandwidths, 25 sizes of the L2, 20 power limits, and SMs for the rest."""
    sms = max(1, round(points / 50_000))
    vary = {"hbm_bandwidth": "1x..4x:100", "l2": "0.5x..3x:25", "tdp": "0.7x..1.6x:20"}
    vary["sms"] = ",".join(str(100 + 6 * at) for at in range(sms))
    return rl.Space("llama3-8b", on="h200", execution="cudagraph", options={"mode": "decode", "batch": 8}, vary=vary)


def million(points: int, workers: int, store: Path) -> dict[str, object]:
    """CPU seconds, memory, disk and the time of the frontier of a study with 12 columns."""
    spec = Spec(space(points), minimize=("tpot", "usd_per_mtoken"), subject_to=("fits",), keep=MEASURES,
                budget=2 * points)  # fmt: skip
    began, clock = _cpu_s(), time.perf_counter()
    with Store(store) as kept:
        study = run(spec, kept, "million", workers=workers)
        spent, wall = _cpu_s() - began, time.perf_counter() - clock
        resident = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        begun = time.process_time()
        again = opened(kept, "million")
        reopened = time.process_time() - begun
    begun = time.process_time()
    found = again.frontier()
    frontier_s = time.process_time() - begun
    three = np.stack([again.columns[name] for name in ("tpot_s", "usd_per_mtoken", "energy_j")], axis=1)
    begun = time.process_time()
    wide = frontier(three)
    return {
        "points": len(study), "columns": len(spec.columns()), "workers": workers, "cpu_s": spent, "wall_s": wall,
        "points_per_cpu_s": len(study) / spent, "largest_process_mb": resident / 1024, "disk_mb": _size(store) / 1e6,
        "reopened_s": reopened, "frontier_s": frontier_s, "frontier": len(found), "frontier_of_3_s":
        time.process_time() - begun, "frontier_of_3": len(wide),
    }  # fmt: skip


def _cpu_s() -> float:
    return sum(os.times()[:4])


def _size(store: Path) -> int:
    return sum(path.stat().st_size for path in store.parent.glob(store.name + "*"))


SPACES = {
    "decoding chips": ({"hbm_bandwidth": "1x..4x:31", "sms": "100..220/8", "l2": "1x..4x:10", "batch": "1,2,4,…,64"},
                       ("tpot", "usd_per_mtoken"), {"mode": "decode"}),
    "prefill and power": ({"sms": "100..220/8", "clock": "0.8x..1.3x:11", "tdp": "0.5x..1.5x:21", "l2": "1x..3x:5"},
                          ("ttft", "energy_j", "area"), {"mode": "prefill", "seq": 1024}),
    "precision and memory": ({"memory": "40GB..200GB:9", "hbm_bandwidth": "0.5x..3x:26", "batch": "8,16,32,…,512",
                              "precision": "bf16,fp8", "sms": "80..200/20"},
                             ("tpot", "usd_per_mtoken"), {"mode": "decode", "kv": 4096}),
}  # fmt: skip


def searches(seeds: int) -> list[dict[str, object]]:
    """NSGA-II with a twentieth of the evaluations against the whole grid: its share of the hypervolume."""
    made = []
    for name, (vary, objectives, options) in SPACES.items():
        area = rl.Space("llama3-8b", on="h200", execution="cudagraph", options=options, vary=vary)
        whole = _studied(area, objectives, area.size, "grid", 0)
        reference = np.nanmax(whole.costs(), axis=0)
        best = hypervolume(whole.costs(), reference)
        shares = []
        for seed in range(seeds):
            quick = _studied(area, objectives, area.size // 20, "nsga2", seed)
            shares.append(hypervolume(quick.costs(), reference) / best)
        made.append({"space": name, "points": area.size, "budget": area.size // 20, "median": float(np.median(shares)),
                     "worst": min(shares), "seeds": seeds})  # fmt: skip
        print(json.dumps(made[-1]), file=sys.stderr, flush=True)
    return made


def _studied(area: rl.Space, objectives: tuple[str, ...], budget: int, sampler: str, seed: int) -> Study:
    spec = Spec(area, minimize=objectives, subject_to=("fits",), budget=budget, sampler=sampler, seed=seed)
    with Store(":memory:") as kept:
        return run(spec, kept, "s")


CHILD = "import sys; from lab.study.__main__ import child; child(sys.argv[1])"


def child(store: str) -> None:
    """One life of a study that will be killed."""
    with Store(store) as kept:
        run(_killed_spec(), kept, "killed", resume=True)


def _killed_spec() -> Spec:
    vary = {"hbm_bandwidth": "1x..4x:64", "sms": "100..220/4", "l2": "1x..4x:8"}
    area = rl.Space("llama3-8b", options={"mode": "decode"}, vary=vary)
    return Spec(area, minimize=("tpot", "area"), budget=10**6)


def kills(num: int, seed: int) -> dict[str, object]:
    """Kill -9 at random moments, resume, and compare with a study that nobody disturbed."""
    draw, lives = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/killed.db"
        while lives < num:
            life = subprocess.Popen([sys.executable, "-c", CHILD, store])
            time.sleep(draw.uniform(0.5, 6.0))
            if life.poll() is None:
                life.send_signal(signal.SIGKILL)
                lives += 1
            life.wait()
            if life.returncode == 0:
                Path(store).unlink()
        with Store(store) as kept:
            found, whole = run(_killed_spec(), kept, "killed", resume=True), None
            wrong = kept.check()
        with Store(":memory:") as kept:
            whole = run(_killed_spec(), kept, "whole")
    same = all(np.array_equal(values, found.columns[name], equal_nan=values.dtype.kind == "f")
               for name, values in whole.columns.items())  # fmt: skip
    return {"kills": lives, "points": len(whole), "identical": same, "wrong": wrong}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("million", "search", "kills"))
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--num", type=int, default=20)
    parser.add_argument("--store", type=Path, default=None)
    given = parser.parse_args()
    if given.what == "million":
        where = given.store or Path(tempfile.mkdtemp()) / "million.db"
        print(json.dumps(million(given.points, given.workers, where), indent=1))
    elif given.what == "search":
        print(json.dumps(searches(given.seeds), indent=1))
    else:
        print(json.dumps(kills(given.num, 0), indent=1))
