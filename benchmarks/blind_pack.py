"""One pack for all races on drawn shapes, so that none of them compiles on the device.

    python benchmarks/blind_pack.py --pack kernels --jobs 2                   (without a device)
    RIDGELINE_KERNEL_PACK=kernels python benchmarks/race_random.py --seed 7 --num 8 --out results --budget-s 40

Holds what `race_random.py`, `race_families.py` and `race_paged_random.py` launch for these seeds and numbers of shapes,
and what parts of `sweep_rows.py` and `sweep_tables.py` do. `--count` says how many kernels that are, and compiles none.
`--real 12` has what `race_random.py --real --num 12` and parts of `sweep_rows.py` launch instead.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]


def wanted(asked: argparse.Namespace) -> Iterator[tuple[str, list[Any]]]:
    """Kernels of every script, by its name."""
    import race_families
    import race_paged_random
    import race_random
    import sweep_rows
    import sweep_tables

    if asked.real:
        import real_rows

        yield "real shapes", real_rows.wanted_variants(asked.real_seed, asked.real)
        if asked.row_parts:
            yield "sweep of rows", sweep_rows.wanted_variants(asked.row_parts.split(","))
        return
    yield "rows", race_random.wanted_variants(asked.rows_seed, asked.rows)
    yield "families", race_families.wanted_variants(asked.families_seed, asked.families, tuple(race_families.FAMILIES))
    yield "paged", race_paged_random.wanted_variants(asked.paged_seed, asked.paged, asked.latent)
    yield "sweep of rows", sweep_rows.wanted_variants(asked.row_parts.split(","))
    yield "sweep of tables", sweep_tables.wanted_variants(asked.table_parts.split(","))


def main() -> None:
    began, asked = time.perf_counter(), arguments()
    found: dict[Any, None] = {}
    for name, variants in wanted(asked):
        found |= dict.fromkeys(variants)
        print(f"{name}: {len(variants)} kernels, {len(found)} in all, {time.perf_counter() - began:.0f} s", flush=True)
    if asked.count:
        return
    from ridgeline.kernels import pack

    made = pack.write(asked.pack, found, jobs=asked.jobs, progress=told)
    size = (asked.pack / pack.CUBINS).stat().st_size
    print(f"{len(made.entries)} kernels, {size / 1e6:.1f} MB, {time.perf_counter() - began:.0f} s")


def told(done: int, total: int) -> None:
    if done % 50 == 0:
        print(f"{done} of {total}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pack", type=Path, default=Path("kernels"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--count", action="store_true")
    for name, seed, num in (("rows", 7, 8), ("families", 4, 3), ("paged", 4, 16)):
        parser.add_argument(f"--{name}-seed", type=int, default=seed)
        parser.add_argument(f"--{name}", type=int, default=num, help="shapes that are drawn")
    parser.add_argument("--latent", type=int, default=8)
    parser.add_argument("--real", type=int, default=0, help="so many shapes of models, and nothing else that is drawn")
    parser.add_argument("--real-seed", type=int, default=1)
    parser.add_argument("--row-parts", default="asked_early")
    parser.add_argument("--table-parts", default="crossed")
    return parser.parse_args()


if __name__ == "__main__":
    main()
