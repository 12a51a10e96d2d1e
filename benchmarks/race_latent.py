"""Latent decoding by more than one way, for at most 32 heads and for more: first right at every border, then raced.

    python benchmarks/race_latent.py --pack kernels --jobs 2                  (compiles all ways, without a device)
    RIDGELINE_KERNEL_PACK=kernels python benchmarks/race_latent.py --out DIR --budget-s 60
    python benchmarks/race_latent.py --table DIR/latent_ways.json.gz

Every new way is tried in a process of its own that is ended when its time is up, so that one that never ends costs
seconds: lengths at every border and hundreds of short sequences, over caches that are no numbers where no key is,
results poisoned before, the same bits three times. Ways that were right are then timed in turns with the one of before,
a bare read and a copy of as many bytes on known shapes and on drawn ones. Files are written after every row.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import race_paged
import race_paged_random as drawn
from race_attention import instead

BEGAN = time.perf_counter()
SEED, POOL = 32, 160
FILE, EDGES_S = "latent_ways.json.gz", 30.0
DRAWN = {"few": 7, "many": 3}
"""Drawn shapes of each kind: to 32 heads, and more."""

KNOWN = (
    (72, 32, 3554, 64, "even"), (35, 64, 10263, 64, "uneven"), (109, 32, 571, 64, "even"),
    (11, 16, 6143, 128, "even"), (232, 16, 4141, 64, "few long"),
)  # fmt: skip
"""Sequences, heads, keys, page and lengths of shapes that earlier notes have."""

EDGES = {
    "few": ((9, 32, 5040, 64), (9, 20, 5040, 16), (300, 32, 700, 64), (150, 16, 700, 48)),
    "many": ((9, 128, 5040, 64), (150, 100, 700, 48)),
}
"""Sequences, heads, keys and page of checks."""

WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "few": {
        "before": {"NARROW": False},
        "narrow": {},
        "fine": {"keys": 32, "rows": 32, "least": 4, "ends": 2},
        "by heads": {"borders": False},
        "wide borders": {"BORDER_TILES": ((2, 4096, 8), (2, 4096, 8))},
        "small borders": {"BORDER_TILES": ((2, 2048, 4), (2, 2048, 4))},
    },
    "many": {"before": {"ROLE_ENDS": 0}, "ends": {"ROLE_ENDS": 1}},
}
"""What each way has instead: names of the configuration, this kernel's or paged attention's, or fields of what is
chosen for few heads."""

TRIED = {"narrow": "few", "ends": "many"}
"""Ways that are tried at every border, and of which kind they are."""

LIKE = {"fine": "narrow", "by heads": "narrow", "wide borders": "narrow", "small borders": "narrow"}
"""Ways that are raced where another one, whose code they have, is right."""


def kind_of(of: dict[str, Any]) -> str:
    return "few" if of["h"] <= 32 else "many"


def shape(b: int, h: int, s: int, page: int, lengths: str) -> dict[str, Any]:
    return {"name": "paged_latent_attention", "b": b, "h": h, "d": 512, "e": 64, "page": page, "dtype": "bfloat16",
            "lengths": lengths, "s": s}  # fmt: skip


def raced(seed: int, known: bool) -> list[dict[str, Any]]:
    """Known shapes, then the first of each kind that a seed draws."""
    pool, found = drawn.shapes(seed, 0, POOL), [shape(*of) for of in KNOWN] if known else []
    for kind, num in DRAWN.items():
        found += [of for of in pool if kind_of(of) == kind][:num]
    return found


def changed(more: dict[str, Any]) -> Callable[..., Any]:
    """What is chosen for few heads, with these fields; copies bring no more than pages have."""
    from ridgeline.kernels.latent_attention import config

    choose = config.choose_narrow

    def chosen(*sizes: Any, **named: Any) -> Any:
        found = choose(*sizes, **named)
        return replace(found, **more | ({"rows": math.gcd(more["rows"], found.rows)} if "rows" in more else {}))

    return chosen


@contextmanager
def by(kind: str, way: str) -> Iterator[None]:
    """Inside, heads of this kind go this way."""
    from ridgeline.kernels.latent_attention import config
    from ridgeline.kernels.paged_attention import config as paged

    with ExitStack() as stack:
        more = WAYS[kind][way]
        for name in [name for name in more if name.isupper()]:
            stack.enter_context(instead(config if hasattr(config, name) else paged, name, more[name]))
        fields = {name: value for name, value in more.items() if not name.isupper()}
        if fields:
            stack.enter_context(instead(config, "choose_narrow", changed(fields)))
        yield


def wanted_variants(seed: int, known: bool, ways: Sequence[str] = ()) -> list[Any]:
    from ridgeline.kernels.variants import variants_of

    found: list[Any] = []
    tried = [(kind, way, shape(*edge, "edges")) for way, kind in TRIED.items() for edge in EDGES[kind]]
    raced_ways = [(kind_of(of), way, of) for of in raced(seed, known) for way in WAYS[kind_of(of)]]
    timed = [one for one in raced_ways if not ways or one[1] in ways]
    for kind, way, of in (*tried, *timed):
        with by(kind, way):
            found += variants_of(of["name"], [drawn.case_of(of)])
    return list(dict.fromkeys(found))


def plan_of(args: tuple[Any, ...]) -> tuple[Any, Any, float]:
    """A plan as it is configured now, room for its results, and a scale."""
    import torch

    from ridgeline.kernels.latent_attention import op

    query = args[0]
    out, scale = torch.empty(*query.shape[:2], 512, dtype=query.dtype, device=query.device), query.shape[2] ** -0.5
    heads, page, pages = query.shape[1], args[1].shape[1], args[2].shape[1]
    short = op.config.is_short(heads, page, pages * page)
    lined = heads <= op.config.FEW_HEADS or (not short and op._fed(query, args[1], 512, op.config.takes_line))
    return (op._FewPlan if lined else op._Plan)(args[:4], out, scale), out, scale


def planned(args: tuple[Any, ...], poison: bool) -> Callable[[tuple[Any, ...]], Any]:
    """Calls by one plan over any arguments like these."""
    plan, out, scale = plan_of(args)

    def run(given: tuple[Any, ...]) -> Any:
        plan.run(given[:4], out.fill_(float("nan")) if poison else out, scale)
        return out

    return run


def reading(args: tuple[Any, ...]) -> Callable[[], Any]:
    """The kernel that reads, without the one that joins."""
    from ridgeline.kernels.latent_attention import op

    plan, out, scale = plan_of(args)
    held, (part, seen, _) = plan.parts.places(out)
    given = plan.given(args[:4])

    def run(held: Any = held) -> None:
        plan.share(*given, out, part, seen, scale * op.LOG2_E, *plan.rest)

    return run


def made(of: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    import torch

    from ridgeline.kernels.contract import trials

    trial = trials()[of["name"]][1]
    return trial, trial.make(drawn.case_of(of), torch.device("cuda"), torch.Generator("cuda").manual_seed(SEED))


def length_sets(batch: int, longest: int) -> Iterator[tuple[int, ...]]:
    """As for clusters, each at most as long as the table; and borders of blocks in turns."""
    borders = (*race_paged.EDGE_LENGTHS, 63, 127, 128, 129, 191, 192, 193)
    sets = [*race_paged.edge_lengths(batch), tuple(borders[i % len(borders)] for i in range(batch))]
    yield from (tuple(min(one, longest) for one in lengths) for lengths in sets)


def edge_row(of: dict[str, Any], way: str) -> dict[str, Any]:
    """One shape by one way, on every set of lengths."""
    trial, args = made(of)
    with by(kind_of(of), way):
        run = planned(args, True)
    wrong, num = [], 0
    for lengths in length_sets(of["b"], of["s"]):
        dirty, clean = race_paged.poisoned(args[:4], 1, lengths)
        meant = trial.eager(*clean).float().nan_to_num(0.0)
        found = race_paged.right(lambda dirty=dirty: run(dirty), meant)
        nothing = bool((meant == 0).all()) and bool((run(dirty) == 0).all())
        num += 1
        if not (found["ok"] or nothing):
            wrong.append(f"{lengths[:4]} {found['note']}")
    return {**of, "what": way, "ok": not wrong, "num": num, "note": "; ".join(wrong)[:600]}


def try_edges(way: str, path: Path) -> None:
    """In a process of its own: rows of one way."""
    rows: list[dict[str, Any]] = []
    for edge in EDGES[TRIED[way]]:
        rows.append(edge_row(shape(*edge, "edges"), way))
        path.write_text(json.dumps(rows))


def edges(out: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of ways that are tried, and those that are right everywhere within their time."""
    jobs = {}
    for way in TRIED:
        path = out / f"edges_{way}.json"
        path.unlink(missing_ok=True)
        command = [sys.executable, __file__, "--edges", way, "--out", str(out)]
        jobs[way] = path, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    rows, right, end = [], [], time.perf_counter() + EDGES_S
    for way, (path, job) in jobs.items():
        try:
            said = job.communicate(timeout=max(0.1, end - time.perf_counter()))[1]
        except subprocess.TimeoutExpired:
            job.kill()
            said = f"not done in {EDGES_S:.0f} s"
        mine = json.loads(path.read_text()) if path.exists() else []
        if job.returncode != 0 or len(mine) < len(EDGES[TRIED[way]]):
            mine.append({"what": way, "ok": False, "num": 0, "note": said[-600:], **shape(0, 0, 0, 0, "edges")})
        rows += mine
        right += [way] * all(row["ok"] for row in mine)
    return rows, right


def measured(of: dict[str, Any], ways: list[str], seed: int, track: race_paged.Track) -> dict[str, Any]:
    """One shape: which ways are right, and seconds of each, of a bare read and of a copy."""
    import torch

    trial, args = made(of)
    args[3].copy_(torch.tensor(drawn.drawn_lengths(of, seed), dtype=torch.int32))
    num_bytes, meant, runs, notes = trial.forward_bytes(args), trial.eager(*args).float(), {}, {}
    for way in ways:
        with by(kind_of(of), way):
            plan = planned(args, False)
        runs[way] = lambda plan=plan: plan(args)
        checked = race_paged.right(runs[way], meant)
        notes[way] = checked["note"] if checked["ok"] else f"WRONG {checked['note']}"
    if "narrow" in ways:
        with by("few", "narrow"):
            runs["reading"] = reading(args)
    flops = 2.0 * float(args[3].sum()) * of["h"] * (512 + 64 + 512)
    del meant
    torch.cuda.empty_cache()
    runs |= {"bare read": race_paged.bare(num_bytes), "copy": race_paged.copied(num_bytes)}
    rows = {row["contender"]: row["median_s"] for row in track.rows(runs, num_bytes) if "median_s" in row}
    return {**of, "num_bytes": num_bytes, "flops": flops, "notes": notes, "s_by": rows}


def measure(asked: argparse.Namespace) -> None:
    path = asked.out / FILE
    found: dict[str, Any] = {"seed": asked.seed, "edges": [], "rows": [], "errors": []}

    def write() -> None:
        path.write_bytes(gzip.compress(json.dumps(found).encode()))

    found["edges"], right = edges(asked.out)
    write()
    for row in found["edges"]:
        word = "right" if row["ok"] else "WRONG"
        print("edge", word, row["what"], drawn.told(row), row["num"], row["note"], flush=True)
    watch = threading.Timer(max(5.0, asked.budget_s + 10 - (time.perf_counter() - BEGAN)), lambda: os._exit(3))
    watch.daemon = True
    watch.start()
    import torch

    track = race_paged.Track(asked.rounds, dirty=False)
    found |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_bytes_per_s": track.copied}
    for of in raced(asked.seed, asked.known):
        if time.perf_counter() - BEGAN > asked.budget_s:
            found["errors"].append({**of, "error": "no time left"})
            continue
        try:
            ways = [way for way in asked.ways or WAYS[kind_of(of)] if LIKE.get(way, way) in ("before", *right)]
            ways = [way for way in ways if way in WAYS[kind_of(of)]]
            row = measured(of, ways, asked.seed, track)
            found["rows"].append(row)
            print(next(lines(row, track.copied)), row["notes"], flush=True)
        except Exception as error:
            found["errors"].append({**of, "error": str(error)[:300], "trace": traceback.format_exc()[-1200:]})
            print("FAILED", drawn.told(of), error, flush=True)
        write()
        torch.cuda.empty_cache()
    write()
    print("\n".join(table(found)))
    print(f"{len(found['rows'])} shapes, {len(found['errors'])} not; {time.perf_counter() - BEGAN:.0f} s")


def lines(row: dict[str, Any], copy: float) -> Iterator[str]:
    """A shape for a note: µs, share of the large copy, TFLOP/s."""
    told = (
        f"{who} {s * 1e6:.1f} ({row['num_bytes'] / s / copy:.0%}, {row['flops'] / s / 1e12:.0f})"
        for who, s in row["s_by"].items()
    )
    floor = max(row["flops"] / drawn.PRODUCT_FLOPS, row["s_by"].get("bare read", 0.0))
    yield f"| {drawn.told(row)} | {row['num_bytes'] / 1e6:.0f} | {floor * 1e6:.1f} | {' · '.join(told)} |"


def table(found: dict[str, Any]) -> Iterator[str]:
    yield f"{found['device']}, copy of 1 GiB {found['copy_bytes_per_s'] / 1e12:.2f} TB/s; µs (share of it, TFLOP/s)"
    yield "| shape | MB | floor | ways |"
    for row in found["rows"]:
        yield from lines(row, found["copy_bytes_per_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="a recording to print for a note")
    parser.add_argument("--edges", choices=list(TRIED), help="only try one way at every border")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--ways", nargs="+", default=[], help="only these")
    parser.add_argument("--known", action=argparse.BooleanOptionalAction, default=True, help="known shapes first")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget-s", type=float, default=60.0)
    parser.add_argument("--pack", type=Path, help="compile what is launched into this folder, and time nothing")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile")
    asked = parser.parse_args()
    if asked.table:
        return print("\n".join(table(json.loads(gzip.decompress(asked.table.read_bytes())))))
    if asked.pack:
        from ridgeline.kernels import pack

        made_pack = pack.write(asked.pack, wanted_variants(asked.seed, asked.known, asked.ways), jobs=asked.jobs)
        return print(f"{len(made_pack.entries)} kernels in {time.perf_counter() - BEGAN:.0f} s")
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.edges:
        return try_edges(asked.edges, asked.out / f"edges_{asked.edges}.json")
    measure(asked)


if __name__ == "__main__":
    main()
