"""Paged decoding on shapes that nobody chose: drawn from a seed, beside a bare read and a copy of as many bytes.

    python benchmarks/race_paged_random.py --pack kernels --jobs 12           (compiles ours, without a device)
    RIDGELINE_KERNEL_PACK=kernels python benchmarks/race_paged_random.py --out DIR --budget-s 40
    python benchmarks/race_paged_random.py --table data/recordings/h200/paged_random1.json.gz

Caches of 64 MiB to half a GiB: batches of 1 to 300, key heads and groups of public models and others, head dims of 64,
128 and 256 (one in eight another), pages of 16 to 256 keys (one in ten of fewer), lengths that are even, drawn evenly,
or a few long among many short; and latent caches of 8 to 128 heads. Every shape is first compared with PyTorch and with
itself, then timed in turns behind a flush that leaves clean lines. A summary says how many reach 85 % of the copy's
bandwidth, and how many as much of what a bare read of as many bytes has. One file, written again after every shape.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import random
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import race_paged

BEGAN = time.perf_counter()
FILE = "paged_random.json.gz"
ASKED = 0.85
LOW, HIGH = 64 << 20, 512 << 20
LONGEST = 131072
KEY_HEADS = (1, 2, 4, 4, 8, 8, 8, 8, 10, 16, 32)
GROUPS = (1, 2, 3, 4, 4, 4, 5, 6, 7, 8, 8, 12, 16)
WIDE_GROUPS = (24, 32, 48, 64, 71)
DIMS, ODD_DIMS = (64, 128, 128, 128, 256), (80, 96, 112, 192)
PAGES, SMALL_PAGES = (16, 16, 16, 32, 64, 64, 128, 256), (1, 4, 8)
LENGTHS = {"even": 1.0, "uneven": 0.5, "few long": 0.25}
"""How lengths are drawn, and about what part of the longest the average is."""

PRODUCT_FLOPS = 798e12
"""What a product of 8,192³ in bfloat16 reaches on this device: nobody who multiplies as much is faster."""

LATENT_HEADS, LATENT_PAGES = (8, 16, 16, 16, 20, 32, 64, 128), (16, 32, 64, 64, 128)


def between(rng: random.Random, low: float, high: float) -> float:
    """Evenly by size."""
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def one_paged(rng: random.Random) -> dict[str, Any]:
    key_heads = rng.choice(KEY_HEADS)
    group = rng.choice(WIDE_GROUPS if key_heads <= 2 and rng.random() < 0.3 else GROUPS)
    return {
        "name": "paged_attention", "b": round(between(rng, 1, 300)), "h": key_heads * group, "k": key_heads,
        "d": rng.choice(ODD_DIMS if rng.random() < 0.125 else DIMS),
        "page": rng.choice(SMALL_PAGES if rng.random() < 0.1 else PAGES),
    }  # fmt: skip


def one_latent(rng: random.Random) -> dict[str, Any]:
    return {
        "name": "paged_latent_attention", "b": round(between(rng, 1, 256)), "h": rng.choice(LATENT_HEADS), "d": 512,
        "e": 64, "page": rng.choice(LATENT_PAGES),
    }  # fmt: skip


def key_bytes(of: dict[str, Any]) -> int:
    """Of one key of one sequence."""
    return 2 * (of["d"] + of["e"] if "e" in of else 2 * of["k"] * of["d"])


def shapes(seed: int, num: int, num_latent: int) -> list[dict[str, Any]]:
    """The same for the same seed, other ones for another; latent ones last."""
    found: list[dict[str, Any]] = []
    for draw, many in ((one_paged, num), (one_latent, num_latent)):
        rng, end = random.Random(f"{draw.__name__} {seed}"), len(found) + many
        while len(found) < end:
            of = draw(rng)
            of |= {"dtype": rng.choice(("bfloat16", "bfloat16", "float16")), "lengths": rng.choice(list(LENGTHS))}
            if of["b"] < 4:
                of["lengths"] = "even"
            of["s"] = round(between(rng, LOW, HIGH) / key_bytes(of) / of["b"] / LENGTHS[of["lengths"]])
            if 32 <= of["s"] <= LONGEST:
                found.append(of)
    return found


def case_of(of: dict[str, Any]) -> Any:
    from ridgeline.kernels.contract import case

    sizes = {key: x for key, x in of.items() if key not in ("name", "dtype", "lengths")}
    return case(of["dtype"], **sizes, uneven=False)


def drawn_lengths(of: dict[str, Any], seed: int) -> list[int]:
    """One is always as long as the table allows."""
    rng = random.Random(f"{of} {seed}")
    if of["lengths"] == "even":
        return [of["s"]] * of["b"]
    if of["lengths"] == "uneven":
        return [of["s"], *(rng.randint(1, of["s"]) for _ in range(of["b"] - 1))]
    low = max(1, of["s"] // 100)
    return [of["s"], *(round(between(rng, low, of["s"])) for _ in range(of["b"] - 1))]


def wanted_variants(seed: int, num: int, num_latent: int) -> list[Any]:
    """What a pack must hold for these shapes."""
    from ridgeline.kernels.variants import variants_of

    found: list[Any] = []
    for of in shapes(seed, num, num_latent):
        found += variants_of(of["name"], [case_of(of)])
    return list(dict.fromkeys(found))


def measured(of: dict[str, Any], seed: int, track: race_paged.Track) -> dict[str, Any]:
    """One shape: right or not, and µs of ours, of a bare read and of a copy."""
    import torch

    from ridgeline.kernels.contract import trials

    trial = trials()[of["name"]][1]
    args = trial.make(case_of(of), torch.device("cuda"), torch.Generator("cuda").manual_seed(seed))
    at = 3 if "e" in of else 4
    args[at].copy_(torch.tensor(drawn_lengths(of, seed), dtype=torch.int32))
    num_bytes, meant = trial.forward_bytes(args), trial.eager(*args).float()
    checked = race_paged.right(lambda: trial.call(*args), meant)
    del meant
    torch.cuda.empty_cache()
    runs = {"ours": lambda: trial.call(*args), "bare read": race_paged.bare(num_bytes),
            "copy": race_paged.copied(num_bytes)}  # fmt: skip
    rows = {row["contender"]: row["median_s"] for row in track.rows(runs, num_bytes) if "median_s" in row}
    return {**of, "num_bytes": num_bytes, "ok": checked["ok"], "note": checked["note"], "s_by": rows}


def told(row: dict[str, Any]) -> str:
    """A shape in a few words."""
    heads = f"{row['h']} heads" if "e" in row else f"{row['h']}/{row['k']} heads of {row['d']}"
    kind = "latent " if "e" in row else ""
    return f"{kind}{row['b']} × {row['s']}, {row['lengths']}, {heads}, pages of {row['page']}, {row['dtype']}"


def table(found: dict[str, Any]) -> Iterator[str]:
    """The summary and every shape for a note, in Markdown; worst share of a bare read first."""
    copy = found["copy_bytes_per_s"]
    rows = [row for row in found["rows"] if "ours" in row["s_by"]]
    yield f"{found['device']}, seed {found['seed']}, copy of 1 GiB {copy / 1e12:.2f} TB/s."
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = [row for row in rows if row["name"] == name]
        shares = [row["num_bytes"] / row["s_by"]["ours"] / copy for row in mine]
        bare = [row["num_bytes"] / row["s_by"]["bare read"] / copy for row in mine]
        of_bare = [row["s_by"]["bare read"] / row["s_by"]["ours"] for row in mine]
        yield (f"- {name}: {sum(x >= ASKED for x in shares)} of {len(mine)} reach {ASKED:.0%} of the copy (a bare read "
               f"{sum(x >= ASKED for x in bare)}), {sum(x >= ASKED for x in of_bare)} of a bare read as large; "
               f"geometric means {mean(shares):.0%}, {mean(bare):.0%} and {mean(of_bare):.0%}; "
               f"{mean([floor_s(row) / row['s_by']['ours'] for row in mine]):.0%} of the floor")  # fmt: skip
    yield ""
    yield ("| shape | MB | ours, µs | bare read | copy | products alone | of the large copy | a bare read of it | "
           "of a bare read | of the floor |")  # fmt: skip
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in sorted(rows, key=lambda row: row["s_by"]["bare read"] / row["s_by"]["ours"]):
        ours, bare_s, copied = (row["s_by"][who] for who in ("ours", "bare read", "copy"))
        share, of_it = row["num_bytes"] / ours / copy, row["num_bytes"] / bare_s / copy
        yield (f"| {told(row)} | {row['num_bytes'] / 1e6:.0f} | {ours * 1e6:.1f} | {bare_s * 1e6:.1f} | "
               f"{copied * 1e6:.1f} | {num_flops(row) / PRODUCT_FLOPS * 1e6:.1f} | {share:.0%} | {of_it:.0%} | "
               f"{bare_s / ours:.0%} | {floor_s(row) / ours:.0%} |")  # fmt: skip


def num_flops(row: dict[str, Any]) -> float:
    """Of both products, without padding."""
    width = row["d"] + row.get("e", 0)
    keys = (row["num_bytes"] - 4 * row["b"] * row["h"] * width) / key_bytes(row)
    return float(2 * keys * row["h"] * (width + row["d"]))


def floor_s(row: dict[str, Any]) -> float:
    """The larger of a bare read of as many bytes and the products at their rate."""
    return max(float(row["s_by"]["bare read"]), num_flops(row) / PRODUCT_FLOPS)


def mean(shares: list[float]) -> float:
    return math.exp(sum(map(math.log, shares)) / len(shares))


def measure(asked: argparse.Namespace) -> None:
    import torch

    from ridgeline.kernels import pack

    missing = [one for one in wanted_variants(asked.seed, asked.num, asked.latent) if pack.find(one) is None]
    compiled = sum(1 for _ in pack.compiled_all(missing, asked.jobs)) if missing else 0
    track = race_paged.Track(asked.rounds, dirty=False)
    found: dict[str, Any] = {"seed": asked.seed, "device": torch.cuda.get_device_name(), "torch": torch.__version__,
                             "copy_bytes_per_s": track.copied, "rows": [], "errors": []}  # fmt: skip
    print(f"compiled {compiled}, copy {track.copied / 1e12:.2f} TB/s, {time.perf_counter() - BEGAN:.0f} s", flush=True)
    asked.out.mkdir(parents=True, exist_ok=True)
    watch = threading.Timer(asked.budget_s + 8, lambda: os._exit(3))  # something never ended
    watch.daemon = True
    watch.start()
    for of in shapes(asked.seed, asked.num, asked.latent):
        if time.perf_counter() - BEGAN > asked.budget_s:
            found["errors"].append({**of, "error": "no time left"})
            continue
        try:
            row = measured(of, asked.seed, track)
            found["rows"].append(row)
            times = " ".join(f"{who} {s * 1e6:.1f}" for who, s in row["s_by"].items())
            print("" if row["ok"] else f"WRONG {row['note']}", told(row), f"{row['num_bytes'] / 1e6:.0f} MB:", times,
                  f"{row['num_bytes'] / row['s_by']['ours'] / track.copied:.0%}", flush=True)  # fmt: skip
        except Exception as error:
            found["errors"].append({**of, "error": f"{type(error).__name__}: {str(error)[:300]}",
                                    "trace": traceback.format_exc()[-1200:]})  # fmt: skip
            print("FAILED", told(of), error, flush=True)
        (asked.out / FILE).write_bytes(gzip.compress(json.dumps(found).encode()))
        torch.cuda.empty_cache()
    (asked.out / FILE).write_bytes(gzip.compress(json.dumps(found).encode()))
    wrong = [told(row) for row in found["rows"] if not row["ok"]]
    print(f"wrong: {wrong}; {len(found['errors'])} not reached or failed; {time.perf_counter() - BEGAN:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="a recording to print for a note")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num", type=int, default=32, help="shapes of paged decoding")
    parser.add_argument("--latent", type=int, default=16, help="shapes of latent decoding")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--budget-s", type=float, default=40.0)
    parser.add_argument("--pack", type=Path, help="compile what these shapes need into this folder, and time nothing")
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile")
    asked = parser.parse_args()
    if asked.table:
        return print("\n".join(table(json.loads(gzip.decompress(asked.table.read_bytes())))))
    if asked.pack:
        from ridgeline.kernels import pack

        made = pack.write(asked.pack, wanted_variants(asked.seed, asked.num, asked.latent), jobs=asked.jobs)
        return print(f"{len(made.entries)} kernels in {time.perf_counter() - BEGAN:.0f} s")
    measure(asked)


if __name__ == "__main__":
    main()
