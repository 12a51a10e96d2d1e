"""Paged decoding by more than one way, in turns, on shapes that are drawn: what a default is decided by.

    python benchmarks/race_paged_ways.py --out DIR --warm --jobs 14                       (compiles, times nothing)
    python benchmarks/race_paged_ways.py --out DIR --kinds wide --budget-s 20
    python benchmarks/race_paged_ways.py --table data/recordings/h200/paged_ways1.json.gz

Kinds are what drawn shapes (``race_paged_random.py``, other seeds) lost most in: many heads on a key, heads of 80 to
112 columns, uneven lengths where clusters were chosen. Every way is first tried on lengths at every
border over caches that are no numbers elsewhere, then compared with PyTorch and with itself on each shape, then timed
in turns with the others, a bare read and a copy of as many bytes. One file a kind, written again after every shape.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import race_paged
import race_paged_random as drawn
from race_attention import instead

BEGAN = time.perf_counter()
SEED, POOL = 11, 400
KINDS = {"wide": 8, "odd": 7, "clusters": 3, "tails": 8}
"""Shapes of each kind."""

EDGES: dict[str, tuple[tuple[int, ...], ...]] = {
    "wide": ((71, 1, 128, 8), (128, 2, 128, 64), (48, 1, 256, 4), (96, 2, 64, 16), (128, 1, 256, 48), (40, 1, 96, 16)),
    "odd": ((24, 8, 80, 16), (20, 10, 112, 1), (12, 2, 96, 32)),
    "clusters": (),
    "tails": ((64, 8, 64, 64), (32, 8, 128, 16), (24, 8, 256, 32)),
}
"""Heads, key heads, head dim and page of checks at every border."""


def kind_of(of: dict[str, Any]) -> str:
    """What a drawn shape is raced for; empty where it is one of those that are as they were."""
    from ridgeline.kernels.paged_attention import config

    ratio = of["h"] // of["k"]
    if ratio > 16:
        return "wide" if of["d"] != 192 else ""
    if of["d"] in (80, 96, 112):
        return "odd"
    found = config.choose(of["b"], of["k"], of["s"], of["d"], 132, ratio=ratio, fed=True, page=of["page"])
    if found.even:
        return "clusters" if of["lengths"] == "uneven" else ""
    line = not (found.units or found.gathered or of["d"] == 192)
    return "tails" if line and of["b"] >= 16 and of["lengths"] != "even" and size_of(of) <= TAILS_BYTES else ""


TAILS_BYTES = 280e6
"""Caches up to which ends of sequences are raced: larger ones reach what is asked."""


def size_of(of: dict[str, Any]) -> float:
    """Bytes of a cache, about."""
    return float(of["b"] * of["s"] * drawn.key_bytes(of) * drawn.LENGTHS[of["lengths"]])


def picked(kinds: list[str], seed: int = SEED) -> list[dict[str, Any]]:
    """The first of each kind that a seed draws, kinds in turns."""
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for of in drawn.shapes(seed, POOL, 0):
        mine = found.get(kind_of(of))
        if mine is not None and len(mine) < KINDS[kind_of(of)]:
            mine.append(of)
    most = max(map(len, found.values()))
    return [mine[i] for i in range(most) for mine in found.values() if i < len(mine)]


def rows_from(least: int) -> Any:
    """Inside, so many heads on a key and more are rows of the products."""
    from ridgeline.kernels.paged_attention import config

    return instead(config, "TALL_FROM", least)


def side_by_side(beside: bool) -> Any:
    """Inside, neighbors take key heads of the same keys where threads feed, or nobody does."""
    from ridgeline.kernels.paged_attention import config

    return instead(config, "takes_beside", lambda *sizes: beside)


def skipping(skips: bool) -> Any:
    """Inside, pages of a last block that have no keys are copied or not."""
    from ridgeline.kernels.paged_attention import config

    choose = config.choose
    return instead(config, "choose", lambda *sizes, **named: replace(choose(*sizes, **named), skips=skips))


def ways(of: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """By name, the one of before first."""
    kind = kind_of(of)
    if kind == "wide":
        return {"before": partial(rows_from, 999), "rows": partial(rows_from, 17)}
    if kind == "odd":
        beside = {"beside": partial(side_by_side, True)} if of["k"] > 1 else {}
        return {"before": partial(side_by_side, False), "rows": partial(rows_from, 1), **beside}
    if kind == "tails" or of["lengths"] == "edges":
        return {"before": partial(skipping, False), "skips": partial(skipping, True)}
    return {"before": nullcontext, "apart": race_paged.apart}


def edge_shapes(kinds: list[str]) -> Iterator[dict[str, Any]]:
    """Small ones, nine sequences each."""
    for kind in kinds:
        for edge in EDGES[kind]:
            heads, key_heads, dim, page = edge
            yield {"name": "paged_attention", "b": 9, "h": heads, "k": key_heads, "s": race_paged.EDGE_KEYS, "d": dim,
                   "page": page, "dtype": "bfloat16", "lengths": "edges"}  # fmt: skip


def wanted_variants(kinds: list[str], seed: int = SEED) -> list[Any]:
    from ridgeline.kernels.variants import variants_of

    found: list[Any] = []
    for of in (*edge_shapes(kinds), *picked(kinds, seed)):
        for way in ways(of).values():
            with way():
                found += variants_of(of["name"], [drawn.case_of(of)])
    return list(dict.fromkeys(found))


def made(of: dict[str, Any], seed: int) -> tuple[Any, tuple[Any, ...]]:
    import torch

    from ridgeline.kernels.contract import trials

    trial = trials()[of["name"]][1]
    return trial, trial.make(drawn.case_of(of), torch.device("cuda"), torch.Generator("cuda").manual_seed(seed))


def edge_rows(kinds: list[str]) -> Iterator[dict[str, Any]]:
    """Every way on lengths at every border."""
    for of in edge_shapes(kinds):
        trial, args = made(of, 3)
        dirty, clean = race_paged.poisoned(args, 2)
        meant = trial.eager(*clean).float().nan_to_num(0.0)
        for name, way in ways(of).items():
            with way():
                yield race_paged.right(race_paged.planned(dirty), meant, what=name, **of)


def measured(of: dict[str, Any], seed: int, track: race_paged.Track) -> dict[str, Any]:
    """One shape: which ways are right, and µs of each, of a bare read and of a copy."""
    import torch

    trial, args = made(of, seed)
    args[4].copy_(torch.tensor(drawn.drawn_lengths(of, seed), dtype=torch.int32))
    num_bytes, meant, runs, notes = trial.forward_bytes(args), trial.eager(*args).float(), {}, {}
    for name, way in ways(of).items():
        with way():
            runs[name] = race_paged.planned(args)
        checked = race_paged.right(runs[name], meant)
        notes[name] = checked["note"] if checked["ok"] else f"WRONG {checked['note']}"
    del meant
    torch.cuda.empty_cache()
    runs |= {"bare read": race_paged.bare(num_bytes), "copy": race_paged.copied(num_bytes)}
    rows = {row["contender"]: row["median_s"] for row in track.rows(runs, num_bytes) if "median_s" in row}
    return {**of, "kind": kind_of(of), "num_bytes": num_bytes, "notes": notes, "s_by": rows}


def measure(asked: argparse.Namespace) -> None:
    import torch

    watch = threading.Timer(asked.budget_s + 10, lambda: os._exit(3))  # something never ended
    watch.daemon = True
    watch.start()
    track = race_paged.Track(asked.rounds, dirty=False)
    found: dict[str, Any] = {"seed": asked.seed, "device": torch.cuda.get_device_name(), "torch": torch.__version__,
                             "copy_bytes_per_s": track.copied, "edges": [], "rows": [], "errors": []}  # fmt: skip
    path = asked.out / f"paged_ways_{'_'.join(asked.kinds)}.json.gz"

    def write() -> None:
        path.write_bytes(gzip.compress(json.dumps(found).encode()))

    for row in edge_rows(asked.kinds):
        found["edges"].append(row)
        print("edge", "right" if row["ok"] else "WRONG", row["what"], drawn.told(row), row["note"], flush=True)
        write()
    for of in picked(asked.kinds, asked.seed):
        if time.perf_counter() - BEGAN > asked.budget_s:
            found["errors"].append({**of, "error": "no time left"})
            continue
        try:
            row = measured(of, asked.seed, track)
            found["rows"].append(row)
            times = " ".join(f"{who} {s * 1e6:.1f}" for who, s in row["s_by"].items())
            print(drawn.told(row), f"{row['num_bytes'] / 1e6:.0f} MB:", times, row["notes"], flush=True)
        except Exception as error:
            found["errors"].append({**of, "error": str(error)[:300], "trace": traceback.format_exc()[-1200:]})
            print("FAILED", drawn.told(of), error, flush=True)
        write()
        torch.cuda.empty_cache()
    write()
    print(f"{len(found['rows'])} shapes, {len(found['errors'])} not; {time.perf_counter() - BEGAN:.0f} s")


def table(found: dict[str, Any]) -> Iterator[str]:
    """Every shape and way for a note, in Markdown, with shares of the large copy."""
    copy = found["copy_bytes_per_s"]
    yield f"{found['device']}, seed {found['seed']}, copy of 1 GiB {copy / 1e12:.2f} TB/s."
    for row in found["rows"]:
        told = (f"{who} {s * 1e6:.1f} ({row['num_bytes'] / s / copy:.0%})" for who, s in row["s_by"].items())
        yield f"| {row['kind']} | {drawn.told(row)} | {row['num_bytes'] / 1e6:.0f} | {' · '.join(told)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="a recording to print for a note")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget-s", type=float, default=20.0)
    parser.add_argument("--pack", type=Path, help="compile what is launched into this folder, and time nothing")
    parser.add_argument("--warm", action="store_true", help="compile what is launched, and time nothing")
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile")
    asked = parser.parse_args()
    if asked.table:
        return print("\n".join(table(json.loads(gzip.decompress(asked.table.read_bytes())))))
    if asked.pack:
        from ridgeline.kernels import pack

        made_pack = pack.write(asked.pack, wanted_variants(asked.kinds, asked.seed), jobs=asked.jobs)
        return print(f"{len(made_pack.entries)} kernels in {time.perf_counter() - BEGAN:.0f} s")
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.warm:
        from ridgeline.kernels import pack

        missing = [one for one in wanted_variants(asked.kinds, asked.seed) if pack.find(one) is None]
        done = sum(1 for _ in pack.compiled_all(missing, asked.jobs))
        return print(f"{done} of {len(missing)} compiled, {time.perf_counter() - BEGAN:.0f} s")
    measure(asked)


if __name__ == "__main__":
    main()
