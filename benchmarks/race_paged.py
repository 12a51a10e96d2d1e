"""Paged decoding from 64 to 512 MB of cache: every configuration in turns with a bare read of as many bytes.

    python benchmarks/race_paged.py --out DIR [--budget-s 90] [--parts arrivals decode cases latent pieces graphs host]

Every case is checked first, against PyTorch in its own precision and for the same bits three times over. Rows are
written after every case. ``--write-pack FOLDER`` compiles what is launched, without a GPU; ``--show FILE`` prints a
recording as tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import importlib
import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from race_attention import clean_course, instead, timed

PARTS = ("edges", "together", "units", "arrivals", "decode", "latent", "cases", "graphs", "pieces", "cross", "resident",
         "host")  # fmt: skip
SHARES = {"edges": 0.15, "together": 0.3, "units": 0.35, "arrivals": 0.2, "decode": 0.45, "latent": 0.6, "cases": 0.9,
          "graphs": 0.97}  # fmt: skip
"""Of the time there is, by when a part ends; the others may take the rest."""

OVER: dict[str, dict[str, Any]] = {
    "now": {}, "joined early": {"early": 1}, "ends of one block": {"ends": 1}, "ends of two": {"ends": 2},
    "rows of 64": {"rows": 64}, "rows of 16": {"rows": 16}, "rows of 16, skips": {"rows": 16, "skips": True},
    "gathered": {"gathered": True}, "128 keys, skips": {"keys": 128, "num_stages": 3, "skips": True, "rows": 16},
    "units of 128 keys": {"keys": 128, "num_stages": 3, "skips": True, "rows": 16, "units": True, "inside": True,
                          "ends": 0, "max_registers": 128, "programs": 264},
}  # fmt: skip
"""What is changed of the analytical default, by name."""

TWO = {"programs": 264, "num_stages": 3, "queries": 3, "max_registers": 128}
THREE = {"programs": 396, "num_stages": 2, "queries": 2, "max_registers": 80, "skips": True}
SHORT_OVER: dict[str, dict[str, Any]] = {
    "now": {}, "cut, three programs": {**THREE, "units": False}, "cut, two programs": {**TWO, "units": False},
    "ends of one block": {"ends": 1, "units": False}, "ends of two": {"ends": 2, "units": False},
    "units, three programs": {**THREE, "units": True}, "units, two programs": {**TWO, "units": True},
    "rows of 64": {"rows": 64}, "rows of 16": {"rows": 16}, "rows of 16, skips": {"rows": 16, "skips": True},
}  # fmt: skip
"""The same for many sequences: how many programs a multiprocessor has, and whether they cut the line or take one whole
after the other."""

LATENT_OVER: dict[str, dict[str, Any]] = {"now": {}, "joined early": {"early": 1}}
"""The same for latent decoding of few heads."""

TOGETHER: dict[str, dict[str, Any]] = {
    "together": {}, "together, any lengths": {"even": 1000}, "one fewer": {"fewer": 1}, "two fewer": {"fewer": 2},
    "one a multiprocessor": {"lone": True}, "one of six blocks a multiprocessor": {"lone": True, "blocks": 6},
}  # fmt: skip
"""Clusters of as many programs as fit that take a sequence each: how ``config.joined_together`` is asked, how many
fewer programs a cluster has, or whether a multiprocessor has one of them."""

LONE = {1: 132, 2: 66, 3: 41, 4: 31, 5: 23, 6: 18, 7: 14}
"""Clusters of so many programs that were expected to fit with one program a multiprocessor."""

TOGETHER_EDGES = (
    (9, 32, 8, 128, 16), (2, 64, 8, 128, 16), (1, 24, 8, 128, 48), (3, 16, 4, 256, 64), (5, 8, 8, 64, 16),
    (64, 16, 1, 128, 64), (16, 40, 8, 128, 16), (24, 32, 8, 128, 16),
)  # fmt: skip
"""Batch, heads, key heads, head dim and page of checks of clusters."""

UNIT_EDGES = ((64, 32, 8, 128, 16), (70, 16, 8, 128, 64), (400, 7, 1, 128, 48))
"""The same of checks of programs that take one sequence after the other."""

UNIT_KEYS = 672

TOGETHER_LENGTHS = (0, 1, 17, 64, 65, 333, 1040, 5000)

DECODE_OVER: dict[str, dict[str, Any]] = {
    "now": {},
    "by a kernel": {"inside": False},
    "by a kernel of whole heads": {"inside": False, "columns": 256},
    "a share more": {"inside": False, "more": 1},
}
"""The same for decoding over a contiguous cache: who joins, columns of a joining program, shares."""

DECODE = (
    (1, 32, 8, 2112, 128, ""), (2, 32, 8, 512, 128, ""), (1, 32, 8, 1024, 128, "mask"), (8, 32, 8, 2048, 128, ""),
    (1, 32, 32, 2048, 128, ""), (4, 32, 8, 4096, 128, ""), (1, 64, 8, 8192, 128, ""), (16, 16, 16, 1000, 64, ""),
    (8, 32, 8, 4096, 128, "lengths"), (1, 32, 8, 32768, 128, ""), (5, 32, 8, 3000, 128, ""), (17, 32, 8, 2000, 128, ""),
    (40, 32, 8, 1000, 128, ""), (3, 32, 8, 8000, 128, ""),
)  # fmt: skip
"""Batch, heads, key heads, keys, head dim, what hides keys."""

ARRIVALS = (
    ("decode_attention", (2, 32, 8, 512, 128, "")), ("decode_attention", (8, 12, 4, 3000, 64, "lengths")),
    ("paged_attention", (16, 32, 8, 3000, 128, 16, False)), ("paged_attention", (70, 16, 1, 500, 128, 64, True)),
    ("paged_attention", (2, 32, 8, 512, 128, 16, True)),
)  # fmt: skip
"""Calls whose parts are joined by whoever comes last, and their sizes."""

FEW_LONG = 2
CASES = (
    (16, 32, 8, 3000, 128, 16, False), (4, 32, 8, 8000, 128, 16, False), (1, 32, 8, 16400, 128, 16, False),
    (64, 16, 1, 2050, 128, 64, False), (64, 32, 8, 1000, 128, 16, False), (100, 64, 8, 1200, 128, 16, True),
    (2, 64, 8, 8200, 128, 16, False), (2, 32, 8, 512, 128, 16, True), (8, 32, 8, 8192, 128, 64, False),
    (3, 32, 8, 7813, 128, 16, False), (32, 32, 8, 4000, 128, 64, False), (1, 32, 8, 2048, 128, 16, False),
    (12, 32, 8, 7900, 128, 16, False), (24, 32, 8, 2700, 128, 16, True),
    (300, 32, 8, 300, 128, 16, True),
    (5, 64, 8, 4800, 128, 16, False), (7, 32, 8, 5001, 128, 64, False), (1, 64, 8, 48000, 128, 16, False),
    (9, 32, 8, 7400, 64, 16, False), (5, 16, 4, 6500, 256, 64, False),
    (4, 32, 32, 2100, 128, 16, False), (256, 32, 8, 500, 128, 16, False),
    (6, 32, 8, 12000, 128, 16, True), (2, 32, 8, 20000, 128, 16, True), (12, 32, 4, 12000, 128, 16, True),
    (8, 64, 8, 3000, 128, 16, False), (11, 16, 2, 12000, 128, 32, False), (24, 32, 8, 1500, 128, 16, False),
    (128, 32, 8, 400, 128, 16, False), (128, 16, 16, 700, 128, 16, True), (5, 32, 8, 6000, 128, 16, False),
    (7, 28, 4, 9000, 128, 16, False), (16, 32, 8, 2000, 128, 16, False), (8, 32, 8, 4100, 128, 16, False),
    (16, 64, 8, 5000, 64, 16, False), (40, 32, 1, 8000, 128, 16, False), (60, 48, 1, 9000, 128, 64, True),
    (147, 64, 4, 1877, 128, 256, FEW_LONG), (290, 16, 4, 497, 128, 32, FEW_LONG),
    (47, 256, 32, 1190, 128, 64, FEW_LONG), (19, 32, 8, 3765, 128, 128, FEW_LONG),
    (24, 40, 10, 3212, 96, 16, FEW_LONG), (42, 160, 32, 913, 192, 64, FEW_LONG), (2, 128, 16, 13633, 192, 64, False),
    (4, 64, 16, 8381, 80, 64, True), (65, 32, 8, 1619, 64, 1, False), (40, 14, 2, 11378, 128, 8, False),
    (30, 32, 8, 3000, 128, 1, True), (16, 32, 8, 8000, 32, 16, False), (5, 64, 2, 20000, 256, 16, False),
    (60, 32, 8, 1900, 96, 64, True), (20, 8, 8, 2600, 192, 4, True), (213, 8, 8, 678, 64, 16, True),
    (120, 32, 8, 500, 64, 16, False),
)  # fmt: skip
"""Batch, heads, key heads, keys, head dim, page, uneven lengths (drawn evenly, or a few long among many short)."""

LATENT = (
    (64, 16, 1800, 64, False), (128, 16, 1300, 64, False), (16, 16, 3700, 64, False), (100, 16, 2000, 64, True),
    (40, 8, 3001, 16, False), (33, 16, 2200, 64, False), (64, 16, 4096, 64, False), (2, 16, 512, 64, False),
    (16, 16, 8192, 64, False), (5, 16, 11000, 64, False), (1, 16, 65536, 64, False), (8, 16, 9000, 64, False),
    (64, 64, 1800, 64, False), (100, 64, 2000, 64, True), (40, 32, 3001, 16, False), (2, 64, 54000, 64, False),
    (32, 128, 4096, 64, False), (100, 128, 1300, 64, True), (162, 64, 2063, 64, False), (91, 20, 4990, 64, True),
    (10, 32, 20000, 64, False),
)  # fmt: skip
"""Batch, heads, keys, page, uneven lengths."""

EDGES = ((32, 8, 128, 16), (16, 1, 128, 64), (8, 8, 64, 16), (24, 8, 256, 48), (32, 1, 128, 16), (96, 2, 64, 48),
         (32, 8, 96, 16), (24, 8, 192, 64), (20, 4, 128, 8), (32, 8, 128, 1), (24, 8, 192, 4), (16, 1, 256, 1),
         (64, 2, 192, 48), (32, 4, 80, 2))  # fmt: skip
"""Heads, key heads, head dim and page of checks with lengths at every border, over caches never written elsewhere."""

LATENT_EDGES = ((16, 16), (16, 64), (64, 16), (128, 64), (40, 32), (100, 48))
"""The same of latent decoding: heads and page."""

EDGE_LENGTHS, EDGE_KEYS = (0, 1, 15, 16, 17, 64, 65, 5000, 333), 5040
GRAPHS = ((1, 32, 8, 16400, 128, 16, False), (4, 32, 8, 8000, 128, 16, False), (16, 32, 8, 3000, 128, 16, False))
IN_A_GRAPH = 8
PIECES = (
    (64, 16, 1, 2050, 128, 64, False), (100, 64, 8, 1200, 128, 16, True), (1, 32, 8, 16400, 128, 16, False),
    (64, 32, 8, 1000, 128, 16, False),
)  # fmt: skip


def changed(over: dict[str, Any]) -> Any:
    """Inside, what the copy engine feeds is configured otherwise; the rest as it is."""
    from ridgeline.kernels.paged_attention import config

    before = config.choose

    def choose(*sizes: Any, **named: Any) -> Any:
        found = before(*sizes, **named)
        return dataclasses.replace(found, **over) if found.fed else found

    return instead(config, "choose", choose)


def joined(of: tuple[Any, ...], found: Any, asked: dict[str, Any]) -> Any:
    """A configuration by clusters."""
    from ridgeline.kernels.paged_attention import config

    sequences, fewer = of[0] * of[2], asked.get("fewer", 0)
    sizes = LONE if asked.get("lone") else config.BESIDE
    num = max((size for size, fit in sizes.items() if sequences <= fit), default=1)
    rest = {name: value for name, value in asked.items() if name not in ("fewer", "lone", "blocks")}
    made = config.joined_together(found, sequences, max(1, num - fewer), of[1] // of[2], **rest)
    if "blocks" not in asked:
        return made
    return dataclasses.replace(made, num_stages=asked["blocks"], programs=sequences * made.together)


def together_changed(of: tuple[Any, ...], asked: dict[str, Any]) -> Any:
    """Inside, what the copy engine feeds is taken by clusters."""
    from ridgeline.kernels.paged_attention import config

    before = config.choose
    return instead(
        config, "choose", lambda *sizes, **named: joined(of, before(*sizes, **{**named, "together": False}), asked)
    )


def apart() -> Any:
    """Inside, nothing is taken by clusters."""
    from ridgeline.kernels.paged_attention import config

    before = config.choose
    return instead(config, "choose", lambda *sizes, **named: before(*sizes, **{**named, "together": False}))


def clustered(of: tuple[Any, ...]) -> dict[str, Any]:
    """Clusters of a case by how they are asked for, each once."""
    from ridgeline.kernels.paged_attention import config

    found: dict[Any, tuple[str, Any]] = {}
    for name, asked in TOGETHER.items():
        if of[4] not in (64, 128) or of[5] % 16 or of[0] * of[2] > 264 or of[1] > 16 * of[2]:
            continue
        default = config.choose(of[0], of[2], of[3], of[4], 132, ratio=of[1] // of[2], fed=True, together=False)
        chosen = joined(of, default, asked)
        if of[-1] is True or name != "together, any lengths":
            found.setdefault(chosen, (name, partial(together_changed, of, asked)))
    return dict(found.values())


@contextmanager
def decode_changed(over: dict[str, Any]) -> Iterator[None]:
    """Inside, decoding over a contiguous cache is configured otherwise."""
    from ridgeline.kernels.decode_attention import config

    before, columns = config.choose, config.joined_columns

    def choose(*sizes: Any, **named: Any) -> Any:
        found = before(*sizes, **named)
        shares = found.shares + over.get("more", 0)
        stages = 3 if named["longest"] > config.FEW_BLOCKS * found.keys * shares else 2
        inside = over.get("inside", found.inside)
        return dataclasses.replace(found, inside=inside, shares=shares, num_stages=stages)

    def wide(heads: int, dim: int) -> int:
        return min(over.get("columns", columns(heads, dim)), dim)

    with instead(config, "choose", choose), instead(config, "joined_columns", wide):
        yield


def decode_ways(of: tuple[Any, ...]) -> dict[str, Any]:
    """Configurations of a case by name, each once."""
    from ridgeline.kernels.decode_attention import config

    sizes = dict(zip(("batch", "key_heads", "longest", "head_dim"), (of[0], of[2], of[3], of[4]), strict=True))
    found: dict[Any, tuple[str, Any]] = {}
    for name, over in DECODE_OVER.items():
        with decode_changed(over):
            chosen = config.choose(**sizes, num_sms=132)
            joined = config.joined_columns(of[0] * of[1], of[4]) if chosen.shares > 1 and not chosen.inside else 0
            found.setdefault((chosen, joined), (name, partial(decode_changed, over)))
    return dict(found.values())


def by_sequence() -> Any:
    """Inside, more than 128 sequences do not stand in one line."""
    from ridgeline.kernels.paged_attention import config

    return instead(config, "MAX_FED_LINED", 128)


def by_threads() -> Any:
    """Inside, threads read, and compute what they have read."""
    from ridgeline.kernels.paged_attention import config

    return instead(config, "takes_columns", lambda *sizes: False)


def latent_changed(over: dict[str, Any]) -> Any:
    """Inside, latent decoding of few heads is configured otherwise."""
    from ridgeline.kernels.latent_attention import config

    before = config.choose_few

    def choose(*sizes: Any, **named: Any) -> Any:
        found = before(*sizes, **named)
        return dataclasses.replace(found, **over) if found.fed else found

    return instead(config, "choose_few", choose)


def latent_ways(heads: int = 16) -> dict[str, Any]:
    """Configurations by name."""
    if heads > 16:
        return {"now": nullcontext, "by shares": by_shares}
    return {name: partial(latent_changed, over) for name, over in LATENT_OVER.items()}


def by_shares() -> Any:
    """Inside, many heads do not walk the line."""
    from ridgeline.kernels.latent_attention import config

    return instead(config, "takes_line", lambda *sizes: False)


def planned_latent(args: tuple[Any, ...]) -> Callable[[], Any]:
    """A call of latent decoding as it is configured now."""
    import torch

    from ridgeline.kernels.latent_attention import op

    query = args[0]
    out, scale = torch.empty(*query.shape[:2], 512, dtype=query.dtype, device=query.device), query.shape[2] ** -0.5
    lined = query.shape[1] <= 16 or op._fed(query, args[1], 512, op.config.takes_line)
    plan = (op._FewPlan if lined else op._Plan)(args[:4], out, scale)

    def run() -> Any:
        plan.run(args[:4], out, scale)
        return out

    return run


def latent_reading(args: tuple[Any, ...]) -> Callable[[], Any]:
    """The first of the two kernels of latent decoding of few heads alone."""
    import torch

    from ridgeline.kernels.latent_attention import op

    query = args[0]
    out, scale = torch.empty(*query.shape[:2], 512, dtype=query.dtype, device=query.device), query.shape[2] ** -0.5
    plan = op._FewPlan(args[:4], out, scale)
    return partial(plan.share, *plan.given(args[:4]), out, *plan.parts.room(out), scale * op.LOG2_E, *plan.rest)


def ways(of: tuple[Any, ...]) -> dict[str, Any]:
    """Configurations of a case by name."""
    from ridgeline.kernels.paged_attention import config

    over = SHORT_OVER if of[4] == 128 and of[0] * of[2] >= 3 * 132 else OVER
    default = config.choose(of[0], of[2], of[3], of[4], 132, ratio=of[1] // of[2], fed=True)
    over = {name: more for name, more in over.items() if name != "joined early" or not default.inside}
    over = {name: more for name, more in over.items() if fits_case(of, name, more)}
    found = {name: partial(changed, more) for name, more in over.items()} | clustered(of)
    found |= {"apart": apart} if default.even else {}
    found |= {"by threads": by_threads} if of[1] > 16 * of[2] or of[4] not in (64, 128, 256) or of[5] % 16 else {}
    return found | ({} if of[0] <= 128 else {"a program a sequence and head": by_sequence})


def fits_case(of: tuple[Any, ...], name: str, more: dict[str, Any]) -> bool:
    """Whether a change is one for these sizes: rows of large pages, gathering of small ones."""
    if "gathered" in more:
        return bool(of[5] == 8 or (of[5] == 16 and of[4] == 32))
    if "keys" in more:
        return bool(of[4] == 64 and of[3] < 1024 and of[5] % 16 == 0)
    return "rows" not in more or (of[5] % 32 == 0 and of[3] < 12000)


def paged_case(b: int, h: int, k: int, s: int, d: int, page: int, uneven: bool) -> Any:
    from ridgeline.kernels.contract import case

    return case("bfloat16", b=b, h=h, k=k, s=s, d=d, page=page, uneven=bool(uneven))


def decode_case(b: int, h: int, k: int, s: int, d: int, hide: str) -> Any:
    from ridgeline.kernels.contract import case

    return case("bfloat16", b=b, h=h, k=k, s=s, d=d, hide=hide)


def latent_case(b: int, h: int, s: int, page: int, uneven: bool) -> Any:
    from ridgeline.kernels.contract import case

    return case("bfloat16", b=b, h=h, s=s, d=512, e=64, page=page, uneven=uneven)


def wanted_variants(parts: Sequence[str] = PARTS) -> list[Any]:
    """Everything that is launched, all configurations included."""
    import host_calls
    import race_cross

    from ridgeline.kernels.variants import variants_of

    found: list[Any] = []
    for of in CASES if "cases" in parts else ():
        for way in ways(of).values():
            with way():
                found += variants_of("paged_attention", [paged_case(*of)])
    found += variants_of("paged_attention", [paged_case(*of) for of in PIECES]) if "pieces" in parts else []
    for of in DECODE if "decode" in parts else ():
        for way in decode_ways(of).values():
            with way():
                found += variants_of("decode_attention", [decode_case(*of)])
    for name, of in ARRIVALS if "arrivals" in parts else ():
        found += variants_of(name, [made_case(name, of)])
    for of in LATENT if "latent" in parts else ():
        for way in latent_ways(of[1]).values():
            with way():
                found += variants_of("paged_latent_attention", [latent_case(*of)])
    for of in EDGES if "edges" in parts else ():
        for way in ways((9, *of[:2], EDGE_KEYS, *of[2:])).values():
            with way():
                found += variants_of("paged_attention", [paged_case(9, *of[:2], EDGE_KEYS, *of[2:], False)])
    for edge in ((9, 32, 8, 128, 16), *TOGETHER_EDGES) if "together" in parts else ():
        of = (*edge[:3], EDGE_KEYS, *edge[3:])
        for way in clustered(of).values():
            with way():
                found += variants_of("paged_attention", [paged_case(*of, False)])
    for edge in UNIT_EDGES if "units" in parts else ():
        of = (*edge[:3], UNIT_KEYS, *edge[3:])
        for way in unit_ways(of).values():
            with way():
                found += variants_of("paged_attention", [paged_case(*of, False)])
    for heads, page in LATENT_EDGES if "latent" in parts and "edges" in parts else ():
        for way in latent_ways(heads).values():
            with way():
                found += variants_of("paged_latent_attention", [latent_case(9, heads, EDGE_KEYS, page, False)])
    if "host" in parts:
        found += host_calls.wanted_variants()
    if "cross" in parts:
        found += [*race_cross.variants(), *race_cross.resident_variants()]
    return list(dict.fromkeys(found))


def made_case(name: str, of: tuple[Any, ...]) -> Any:
    return (paged_case if name == "paged_attention" else decode_case)(*of)


def planned(args: tuple[Any, ...], room: str = "paged_attention") -> Callable[[], Any]:
    """A call of paged attention, or of decoding over a contiguous cache, as it is configured now."""
    import torch

    op = importlib.import_module(f"ridgeline.kernels.{room}.op")
    scale, out = args[0].shape[-1] ** -0.5, torch.empty_like(args[0])
    plan = op._Plan(args, out, scale)

    def run() -> Any:
        plan.run(args, out, scale)
        return out

    return run


def right(run: Callable[[], Any], meant: Any, **facts: Any) -> dict[str, Any]:
    """Whether a run agrees with PyTorch, and with itself."""
    import torch

    found = [run().clone() for _ in range(3)]
    off = float((found[0].float() - meant).norm() / meant.norm())
    same = all(torch.equal(found[0], x) for x in found[1:])
    return {**facts, "ok": off < 0.01 and same, "note": f"off by {off:.2e}, same bits {same}"}


class Track:
    """Both kinds of a cold L2, and what a copy reaches."""

    def __init__(self, rounds: int, with_latent: bool = True, dirty: bool = True) -> None:
        import torch

        from ridgeline.bench.race import Course, copy_bandwidth

        self.with_latent = with_latent
        self.courses = {"clean": clean_course(rounds), "dirty": Course(torch.device("cuda"), rounds=rounds)}
        for on in self.courses.values():
            on.budget_s = 3.0
        self.copied = copy_bandwidth(self.courses["dirty"])
        if not dirty:
            del self.courses["dirty"]

    def rows(self, runs: dict[str, Callable[[], Any]], num_bytes: int, **facts: Any) -> Iterator[dict[str, Any]]:
        for lines, on in self.courses.items():
            for row in timed(on, runs, num_bytes=num_bytes, lines=lines, **facts):
                yield {**row, "num_bytes": num_bytes, "share_frac": row.get("bytes_per_s", 0.0) / self.copied}


def bare(num_bytes: int) -> Callable[[], None]:
    """A read of so many bytes that does nothing with them."""
    import reading
    import torch

    data = torch.randint(0, 99, (num_bytes // 4,), dtype=torch.int32, device="cuda")
    return reading.run(data, 8, 4096, 1, "evict_first")


def copied(num_bytes: int) -> Callable[[], Any]:
    """A copy that moves so many bytes, half of them read and half of them written."""
    import torch

    source = torch.randint(0, 99, (num_bytes // 8,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def poisoned(args: tuple[Any, ...], num_caches: int, lengths: Sequence[int] = EDGE_LENGTHS) -> tuple[Any, ...]:
    """Arguments of these lengths, and what no sequence has written is no number."""
    import torch

    query, *caches, table, _ = args[: num_caches + 3]
    lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    page = caches[0].shape[1]
    used = torch.zeros(caches[0].shape[:2], dtype=torch.bool, device="cuda")
    for b, length in enumerate(lengths):
        key = torch.arange(length, device="cuda")
        used[table[b, key // page].long(), key % page] = True
    shape = (*used.shape, *(1 for _ in caches[0].shape[2:]))
    dirty = [torch.where(used.view(shape), x, float("nan")) for x in caches]
    clean = [torch.where(used.view(shape), x, 0.0) for x in caches]
    return (query, *dirty, table, lens), (query, *clean, table, lens)


def part_edges(end: float, track: Track) -> Iterator[dict[str, Any]]:
    """Every configuration on lengths at every border, over caches never written elsewhere."""
    import torch

    from ridgeline.kernels.contract import trials

    paged, latent = (trials()[name][1] for name in ("paged_attention", "paged_latent_attention"))
    draw = torch.Generator("cuda").manual_seed(3)
    for of in EDGES:
        args = paged.make(paged_case(9, *of[:2], EDGE_KEYS, *of[2:], False), torch.device("cuda"), draw)
        dirty, clean = poisoned(args, 2)
        meant = paged.eager(*clean).float().nan_to_num(0.0)
        for name, way in ways((9, *of[:2], EDGE_KEYS, *of[2:])).items():
            with way():
                yield right(planned(dirty), meant, what=name, case=f"edges {of}")
    for heads, page in LATENT_EDGES if track.with_latent else ():
        args = latent.make(latent_case(9, heads, EDGE_KEYS, page, False), torch.device("cuda"), draw)
        dirty, clean = poisoned(args, 1)
        meant = latent.eager(*clean).float().nan_to_num(0.0)
        for name, way in latent_ways(heads).items():
            with way():
                yield right(planned_latent(dirty), meant, what=name, case=f"edges latent {heads} {page}")


def edge_lengths(batch: int) -> Iterator[tuple[int, ...]]:
    """Lengths that are even, nearly even with a sequence of no keys among them, and uneven."""
    yield from ((one,) * batch for one in TOGETHER_LENGTHS)
    yield tuple(5000 - 64 * (i % 4) for i in range(batch))
    if batch > 1:
        yield (0, *((777,) * (batch - 1)))
        yield (5000, *((1,) * (batch - 1)))
        yield tuple((i * 997) % 5000 for i in range(batch))


def part_together(end: float, track: Track) -> Iterator[dict[str, Any]]:
    """Clusters on lengths at every border, even and uneven, over caches never written elsewhere."""
    import torch

    from ridgeline.kernels.contract import trials

    paged = trials()["paged_attention"][1]
    draw = torch.Generator("cuda").manual_seed(3)
    for way in ("together", "one of six blocks a multiprocessor"):
        num = beside(way)
        yield {"what": f"of 2 to 16 beside each other, {way}", "case": "clusters", "num": num, "note": str(num)}
    for edge in TOGETHER_EDGES:
        of = (*edge[:3], EDGE_KEYS, *edge[3:])
        args = paged.make(paged_case(*of, False), torch.device("cuda"), draw)
        runs = {}
        for name, way in clustered(of).items():
            with way():
                runs[name] = args_planned(args)
        yield from checked(runs, edge, lambda given: paged.eager(*given).float().nan_to_num(0.0), args, 2)


def part_units(end: float, track: Track) -> Iterator[dict[str, Any]]:
    """Sequences taken as they are asked for, on lengths at every border, over caches never written elsewhere."""
    import torch

    from ridgeline.kernels.contract import trials

    paged = trials()["paged_attention"][1]
    draw = torch.Generator("cuda").manual_seed(4)
    for edge in UNIT_EDGES:
        of = (*edge[:3], UNIT_KEYS, *edge[3:])
        args = paged.make(paged_case(*of, False), torch.device("cuda"), draw)
        runs = {}
        for name, way in unit_ways(of).items():
            with way():
                runs[name] = args_planned(args)
        sets = [[min(one, UNIT_KEYS) for one in lengths] for lengths in edge_lengths(edge[0])]
        yield from checked(runs, edge, lambda given: paged.eager(*given).float().nan_to_num(0.0), args, 2, sets)


def unit_ways(of: tuple[Any, ...]) -> dict[str, Any]:
    """Ways of taking many sequences that cut nothing."""
    return {name: partial(changed, over) for name, over in SHORT_OVER.items() if name.startswith("units")}


def beside(way: str = "together") -> list[int]:
    """Clusters of 2 to 16 programs that are on the device together."""
    import torch

    from ridgeline.kernels import launcher
    from ridgeline.kernels.contract import trials
    from ridgeline.kernels.paged_attention import op

    of = (9, 32, 8, EDGE_KEYS, 128, 16)
    args = trials()["paged_attention"][1].make(paged_case(*of, False), torch.device("cuda"), None)
    with clustered(of)[way]():
        plan = op._Plan(args, torch.empty_like(args[0]), 0.1)
    return [launcher.native().fitting(plan.share.args[0], size) for size in range(2, 17)]


def args_planned(args: tuple[Any, ...]) -> Callable[..., Any]:
    """A plan of paged attention, over any arguments like these; results are poisoned before."""
    import torch

    op = importlib.import_module("ridgeline.kernels.paged_attention.op")
    scale, out = args[0].shape[-1] ** -0.5, torch.empty_like(args[0])
    plan = op._Plan(args, out, scale)

    def run(given: tuple[Any, ...]) -> Any:
        plan.run(given, out.fill_(float("nan")), scale)
        return out

    return run


def checked(
    runs: dict[str, Callable[..., Any]], edge: tuple[int, ...], eager: Callable[..., Any], args: Any, num_caches: int,
    sets: Any = None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Every plan on every set of lengths: one row a plan, which says where it was wrong."""
    wrong: dict[str, list[str]] = {name: [] for name in runs}
    num = 0
    for lengths in sets or edge_lengths(edge[0]):
        num += 1
        dirty, clean = poisoned(args, num_caches, lengths)
        meant = eager(clean)
        for name, run in runs.items():
            found = right(partial(run, dirty), meant)
            nothing = bool((meant == 0).all()) and bool((run(dirty) == 0).all())
            if not (found["ok"] or nothing):
                wrong[name].append(f"{lengths[:3]} {found['note']}")
    for name, notes in wrong.items():
        yield {"what": name, "case": f"clusters {edge}", "ok": not notes, "num": num, "note": "; ".join(notes)[:600]}


def left_behind(num: int) -> None:
    """Fill what the next allocations will get with numbers, zeros, ones and no numbers in turn."""
    import torch

    fills = (float("nan"), 0.0, -1, 3e38)
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 22):
        kept = [torch.empty(size, device="cuda", dtype=torch.float32) for _ in range(6)]
        for one in kept:
            one.view(torch.int32).fill_(-1) if fills[num % 4] == -1 else one.fill_(fills[num % 4])


def part_arrivals(end: float, track: Track) -> Iterator[dict[str, Any]]:
    """Counters in scratch that holds anything, on two streams at a time, and in a graph played again and again."""
    import torch

    from ridgeline.kernels.contract import trials

    for name, of in ARRIVALS:
        trial = trials()[name][1]
        sets = [trial.make(made_case(name, of), torch.device("cuda"), torch.Generator("cuda").manual_seed(i))
                for i in range(4)]  # fmt: skip
        meant = [trial.call(*args) for args in sets]
        alone = [trial.eager(*args).float() for args in sets]
        off = max(float((a.float() - b).norm() / b.norm()) for a, b in zip(meant, alone, strict=True))
        yield {"case": f"{name} {of}", "what": "alone", "ok": off < 0.01, "note": f"off by {off:.2e}"}
        wrong = 0
        for i in range(40):
            left_behind(i)
            wrong += sum(not torch.equal(trial.call(*args), one) for args, one in zip(sets, meant, strict=True))
        yield {"case": f"{name} {of}", "what": "scratch that holds anything", "ok": not wrong, "note": f"{wrong} wrong"}
        yield {"case": f"{name} {of}", "what": "two streams", **on_streams(trial, sets, meant)}
        yield {"case": f"{name} {of}", "what": "a graph", **in_a_graph(trial, sets, meant)}


def on_streams(trial: Any, sets: list[Any], meant: list[Any]) -> dict[str, Any]:
    """The same calls from two streams at a time, many of them on their way at once."""
    import torch

    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    for i in range(100):
        with torch.cuda.stream(streams[i % 2]):
            found.append((i, trial.call(*sets[i // 2 % len(sets)])))
    torch.cuda.synchronize()
    wrong = sum(not torch.equal(one, meant[i // 2 % len(sets)]) for i, one in found)
    return {"ok": not wrong, "note": f"{wrong} of {len(found)} wrong"}


def in_a_graph(trial: Any, sets: list[Any], meant: list[Any]) -> dict[str, Any]:
    """All sets in one graph, played ten times, outputs poisoned before each."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [trial.call(*args) for args in sets]
    wrong = 0
    for i in range(10):
        left_behind(i)
        for one in found:
            one.fill_(float("nan"))
        graph.replay()
        wrong += sum(not torch.equal(a, b) for a, b in zip(found, meant, strict=True))
    return {"ok": not wrong, "note": f"{wrong} wrong"}


def part_decode(end: float, track: Track) -> Iterator[dict[str, Any]]:
    """Decoding over a contiguous cache: checked, then in turns, cold and where the L2 holds everything."""
    import torch

    from ridgeline.kernels.contract import trials

    trial = trials()["decode_attention"][1]
    for of in DECODE:
        if time.perf_counter() > end:
            return
        args = trial.make(decode_case(*of), torch.device("cuda"), torch.Generator("cuda").manual_seed(2))
        meant, runs = trial.eager(*args).float(), {}
        for name, way in decode_ways(of).items():
            with way():
                runs[name] = planned(args, "decode_attention")
        for name, run in list(runs.items()):
            found = right(run, meant, what=name, case=f"decode {of}")
            if not found["ok"]:
                del runs[name]
            yield found
        yield from track.rows(runs, 2 * args[1].nbytes, case=f"decode {of}")
        graphs = {name: recorded([run] * IN_A_GRAPH) for name, run in runs.items()}
        yield from track.rows(graphs, 2 * IN_A_GRAPH * args[1].nbytes, case=f"{IN_A_GRAPH} in a graph: decode {of}")


def part_cases(end: float, track: Track) -> Iterator[dict[str, Any]]:
    """Every configuration of every case, checked, then in turns with a bare read."""
    import torch

    from ridgeline.kernels.contract import trials

    trial = trials()["paged_attention"][1]
    for of in CASES:
        if time.perf_counter() > end:
            return
        args = trial.make(paged_case(*of), torch.device("cuda"), torch.Generator("cuda").manual_seed(2))
        if of[-1] == FEW_LONG:
            drawn = torch.rand(of[0], generator=torch.Generator().manual_seed(2))
            args[4].copy_((of[3] * 0.01**drawn).ceil().int())
        num_bytes, meant = trial.forward_bytes(args), trial.eager(*args).float()
        runs: dict[str, Callable[[], Any]] = {}
        for name, way in ways(of).items():
            with way():
                runs[name] = planned(args)
        for name, run in list(runs.items()):
            found = right(run, meant, what=name, case=str(of))
            if not found["ok"]:
                del runs[name]
            yield found
        runs |= {"bare read": bare(num_bytes), "copy": copied(num_bytes)}
        yield from track.rows(runs, num_bytes, case=str(of))


def part_latent(end: float, track: Track) -> Iterator[dict[str, Any]]:
    import torch

    from ridgeline.kernels.contract import trials

    trial = trials()["paged_latent_attention"][1]
    for of in LATENT:
        if time.perf_counter() > end:
            return
        args = trial.make(latent_case(*of), torch.device("cuda"), torch.Generator("cuda").manual_seed(2))
        num_bytes, meant = trial.forward_bytes(args), trial.eager(*args).float()
        runs: dict[str, Callable[[], Any]] = {}
        for name, way in latent_ways(of[1]).items():
            with way():
                runs[name] = planned_latent(args)
        for name, run in list(runs.items()):
            found = right(run, meant, what=name, case=f"latent {of}")
            if not found["ok"]:
                del runs[name]
            yield found
        if of[1] <= 16:
            runs["reading"] = latent_reading(args)
        runs |= {"bare read": bare(num_bytes), "copy": copied(num_bytes)}
        yield from track.rows(runs, num_bytes, case=f"latent {of}")


def recorded(runs: list[Callable[[], Any]]) -> Callable[[], None]:
    """These calls as one CUDA graph, and what they read and write kept: recording another graph gives back to the
    driver what nobody holds."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for run in runs:
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()

    def replay(held: list[Callable[[], Any]] = runs) -> None:
        graph.replay()

    return replay


def part_graphs(end: float, track: Track) -> Iterator[dict[str, Any]]:
    """Calls over caches of their own, one after the other in a graph, as the layers of a model are: time of one."""
    import torch

    from ridgeline.kernels.contract import trials

    trial = trials()["paged_attention"][1]
    for of in GRAPHS:
        if time.perf_counter() > end:
            return
        sets = [trial.make(paged_case(*of), torch.device("cuda"), torch.Generator("cuda").manual_seed(i))
                for i in range(IN_A_GRAPH)]  # fmt: skip
        num_bytes = trial.forward_bytes(sets[0])
        runs = {}
        for name, way in ways(of).items():
            with way():
                runs[name] = recorded([planned(args) for args in sets])
        runs["bare read"] = recorded([bare(num_bytes) for _ in sets])
        runs["copy"] = recorded([copied(num_bytes) for _ in sets])
        yield from track.rows(runs, num_bytes * IN_A_GRAPH, case=f"{IN_A_GRAPH} in a graph: {of}")
        del sets, runs
        torch.cuda.empty_cache()


def part_cross(end: float, track: Track) -> Iterator[dict[str, Any]]:
    """The cross layer; its rows have no bytes."""
    import race_cross

    yield from race_cross.measured(end, 11)


def part_resident(end: float, track: Track) -> Iterator[dict[str, Any]]:
    """Products of the cross layer whose rows stay in shared memory."""
    import race_cross

    yield from race_cross.resident_rows(end, 11)


def part_host(end: float, track: Track) -> Iterator[dict[str, Any]]:
    """What calls cost the host, repeated in C++ where the extension is there, and in Python."""
    import host_calls

    for row in host_calls.rows():
        yield row
        if time.perf_counter() > end:
            return


def part_pieces(end: float, track: Track) -> Iterator[dict[str, Any]]:
    """Where the microseconds go: the reading kernel alone, the joining one alone, both; and of one sequence with no key
    at all, or a block a program."""
    import torch

    from ridgeline.kernels.contract import trials
    from ridgeline.kernels.paged_attention import op

    trial = trials()["paged_attention"][1]
    for of in PIECES:
        if time.perf_counter() > end:
            return
        args = trial.make(paged_case(*of), torch.device("cuda"), torch.Generator("cuda").manual_seed(2))
        num_bytes, out, scale = trial.forward_bytes(args), torch.empty_like(args[0]), of[4] ** -0.5
        lengths = {"": args[4]}
        if of[0] == 1:
            lengths |= {f" {keys}": torch.full_like(args[4], keys) for keys in (0, 2112)}
        runs: dict[str, Callable[[], Any]] = {}
        for name, way in ways(of).items():
            with way():
                plan = op._Plan(args, out, scale)
            room = plan._room(out)
            count = [torch.zeros(plan.parts.sizes[4], dtype=torch.int64, device="cuda")] if plan.counts else []
            for keys, lens in lengths.items():
                given = (*args[:4], lens)
                runs[f"{name}: reading{keys}"] = partial(
                    plan.share, *given, out, *room, *count, scale * op.LOG2_E, *plan.rest
                )
                runs[f"{name}: whole{keys}"] = partial(plan.run, given, out, scale)
            runs[f"{name}: joining"] = partial(plan.parts.join, *room, args[4], out)
        word = torch.zeros(1, device="cuda")
        runs["a kernel of PyTorch's"] = partial(word.fill_, 1.0)
        yield from track.rows(runs, num_bytes, case=f"pieces: {of}")


def write_pack(folder: Path, jobs: int, parts: Sequence[str]) -> None:
    from ridgeline.kernels import pack

    wanted = wanted_variants(parts)
    pack.write(folder, wanted, jobs=jobs, progress=lambda done, total: print(done, "of", total, flush=True))
    print(f"{len(wanted)} variants in {folder}")


def compile_missing(jobs: int, parts: Sequence[str]) -> int:
    """Compile what no pack holds."""
    from ridgeline.kernels import pack

    wanted = [variant for variant in wanted_variants(parts) if pack.find(variant) is None]
    return sum(1 for _ in pack.compiled_all(wanted, jobs)) if wanted else 0


def shown(recording: dict[str, Any]) -> Iterator[str]:
    """A recording in tables: a case a row, microseconds and share of the copy bandwidth by configuration."""
    yield f"{recording['device']}, torch {recording['torch']}, copy {recording['copy_bytes_per_s'] / 1e12:.2f} TB/s"
    for part, rows in recording["parts"].items():
        wrong = [row for row in rows if not row.get("ok", True)]
        yield f"\n## {part}: {sum('ok' in row for row in rows)} checks, {len(wrong)} wrong"
        yield from (f"WRONG {row}" for row in wrong)
        yield from (f"- {json.dumps(row)}" for row in rows if "call" in row)
        timed_rows = [row for row in rows if "lines" in row and "median_s" in row]
        for lines in dict.fromkeys(row["lines"] for row in timed_rows):
            yield from _table(lines, [row for row in timed_rows if row["lines"] == lines])


def _table(title: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    names = list(dict.fromkeys(row["contender"] for row in rows))
    if len({row["case"] for row in rows}) == 1 and len(names) > 9:
        yield f"\n{title}\n"
        yield from (f"- {row['contender']}: {row['median_s'] * 1e6:.2f} µs" for row in rows)
        return
    yield f"\n| {title} | MB | {' | '.join(names)} |\n|{'---|' * (len(names) + 2)}"
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = {row["contender"]: row for row in rows if row["case"] == case}
        cells = [f"{mine[n]['median_s'] * 1e6:.1f} ({mine[n]['share_frac']:.2f})" if n in mine else "–" for n in names]
        yield f"| {case} | {next(iter(mine.values()))['num_bytes'] / 1e6:.0f} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget-s", type=float, default=90.0)
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--cases", type=int, default=99, help="of every part at most so many")
    parser.add_argument("--pick", type=int, nargs="+", help="of CASES only these, by number")
    parser.add_argument("--ways", nargs="+", help="configurations of paged and latent decoding, by name")
    parser.add_argument("--pick-latent", type=int, nargs="+", help="of LATENT only these, by number")
    parser.add_argument("--pick-edges", type=int, nargs="+", help="of edges only these, by number")
    parser.add_argument("--clean", action="store_true", help="no timing behind a flush that leaves dirty lines")
    parser.add_argument("--write-pack", type=Path)
    parser.add_argument("--show", type=Path)
    options = parser.parse_args()
    if options.show:
        with gzip.open(options.show, "rt") as file:
            print("\n".join(shown(json.load(file))))
        return
    if options.pick:
        globals()["CASES"] = tuple(CASES[i] for i in options.pick)
    for name in ("OVER", "SHORT_OVER", "LATENT_OVER", "TOGETHER") if options.ways else ():
        globals()[name] = {way: over for way, over in globals()[name].items() if way in options.ways}
    for name in ("TOGETHER_EDGES", "EDGES", "LATENT_EDGES") if options.pick_edges else ():
        globals()[name] = tuple(edge for i, edge in enumerate(globals()[name]) if i in options.pick_edges)
    if options.pick_latent:
        globals()["LATENT"] = tuple(LATENT[i] for i in options.pick_latent)
    if options.write_pack:
        write_pack(options.write_pack, options.jobs, options.parts)
        return
    for name in ("CASES", "LATENT", "DECODE"):
        globals()[name] = globals()[name][: options.cases]
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    found: dict[str, Any] = {"over": OVER, "parts": {}}

    def write() -> None:
        with gzip.open(options.out / "paged.json.gz", "wt") as file:
            json.dump(found, file)

    def give_up() -> None:
        found["note"] = "stopped: something never ended"
        print(found["note"], flush=True)
        write()
        os._exit(3)

    watch = threading.Timer(options.budget_s + 10, give_up)
    watch.daemon = True
    watch.start()
    found["num_compiled"] = compile_missing(options.jobs, options.parts)
    import torch

    track = Track(options.rounds, "latent" in options.parts, not options.clean)
    found |= {"torch": torch.__version__, "device": torch.cuda.get_device_name(), "copy_bytes_per_s": track.copied}
    ready, end = time.perf_counter(), began + options.budget_s - 2
    print(f"compiled {found['num_compiled']}, copy {track.copied / 1e12:.3f} TB/s", flush=True)
    for name in options.parts:
        rows = found["parts"][name] = []
        try:
            for row in globals()[f"part_{name}"](ready + (end - ready) * SHARES.get(name, 1.0), track):
                rows.append(row)
                print(name, line_of(row), flush=True)
                write()
        except Exception:
            rows.append({"note": traceback.format_exc()[-2000:]})
            print(name, "stopped:", traceback.format_exc()[-2000:], flush=True)
        print(f"{name}: {len(rows)} rows, {sum(not r.get('ok', True) for r in rows)} wrong, "
              f"{time.perf_counter() - began:.0f} s", flush=True)  # fmt: skip
        write()


def line_of(row: dict[str, Any]) -> str:
    """A row in a line."""
    if "call" in row or "errors" in row or "phase" in row:
        return json.dumps(row)
    if "median_s" not in row:
        return " ".join(str(row.get(key, "")) for key in ("case", "what", "contender", "ok", "note"))
    return (f"{row['case']} {row['lines']} {row['contender']}: {row['median_s'] * 1e6:.2f} µs "
            f"({row['low_s'] * 1e6:.1f}), {row['num_bytes'] / 1e6:.0f} MB, {row['share_frac']:.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
