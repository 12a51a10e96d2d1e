"""When the programs of paged and latent decoding do what: the device's clock, read at their steps.

    python benchmarks/decode_marks.py --out DIR [--budget-s 60]

Kernels are the library's own with a clock read and a store put between their lines (``MARKS`` says where), compiled
from a copy of their source. Times are since the first program of the reading kernel began: least, median and largest
over programs, medians over rounds behind a flushed L2. What PyTorch's profiler says of the same launches, unmarked,
stands beside it.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

NUM_MARKS = 16
MARKS_AT = 1 << 17
"""Where marks begin in the buffer of maxima and sums, in words of eight bytes."""

HELPERS = '''

@gluon.jit
def _mark(ptr, which: gl.constexpr):
    at = ptr.to(gl.pointer_type(gl.int64), bitcast=True) + {at} + gl.program_id(0) * {num} + which
    now = gl.inline_asm_elementwise("mov.u64 $0, %globaltimer; // $1", "=l,r", [gl.program_id(0)], dtype=gl.int64,
                                    is_pure=False, pack=1)
    gl.store(at, now)


@gluon.jit
def _clock(of):
    return gl.inline_asm_elementwise("mov.u32 $0, %clock; // $1", "=r,r", [of], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _note(ptr, which: gl.constexpr, value):
    at = ptr.to(gl.pointer_type(gl.int64), bitcast=True) + {at} + gl.program_id(0) * {num} + which
    gl.store(at, value.to(gl.int64))


@triton.jit
def _mark_join(ptr, which: tl.constexpr):
    one = tl.program_id(0) + tl.program_id(1) * tl.num_programs(0)
    at = ptr.to(tl.pointer_type(tl.int64), bitcast=True) + {at} + (one % {joins} + {joins}) * {num} + which
    now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer; // $1", "=l,r", [one], dtype=tl.int64, is_pure=False,
                                    pack=1)
    tl.store(at, now)

'''
JOINS = 2048

STEPS = ("begins", "knows its stretch", "first block there", "last block there", "last products over", "ends",
         "first copy asked for", "last copy asked for", "last scores", "last probabilities stored", "part written",
         "came last", "joined")  # fmt: skip
WAITS = {13: "computing waits for blocks", 14: "feeding waits for room", 15: "feeding waits for pages and queries"}
JOIN_STEPS = ("begins", "may read", "ends")

PAGED = (
    ("    _let_join_start(EARLY == 1)\n", "{}    _mark(seen_ptr, 0)\n"),
    ("    kh, first = within // of_head, within % of_head\n    gl.warp", "{:.54}\n    _mark(seen_ptr, 1)\n    gl.warp"),
    ("    turn, num = left * 0, left * 0\n", "{}    waited, other = left * 0, left * 0\n"),
    ("                mbarrier.wait(full.index(slot), parity)\n",
     "                since = _clock(num)\n{}                waited += _clock(num) - since\n"
     "                if num == 0:\n                    _mark(seen_ptr, 2)\n                _mark(seen_ptr, 3)\n"),
    ("                mbarrier.wait(empty.index(slot), parity)\n",
     "                since = _clock(num)\n{}                waited += _clock(num) - since\n"),
    ("            after = _pages_of(table, first * KEYS, end, P, ROWS, KEYS // ROWS)\n",
     "            since = _clock(num)\n{}"),
    ("            mbarrier.expect(q_full.index(half), COLS * D * 2)\n",
     "            other += _clock(after[0]) - since\n{}"),
    ("                s = warpgroup_mma_wait(0, [s])\n", "{}                _mark(seen_ptr, 8)\n"),
    ("                p_smem.store(p.to(DTYPE))\n", "{}                _mark(seen_ptr, 9)\n"),
    ("            mbarrier.arrive(q_empty.index(half), count=1)\n", "{}            _mark(seen_ptr, 4)\n"),
    ("\n    _let_join_start(EARLY == 2)\n", "\n    _mark(seen_ptr, 5)\n    _note(seen_ptr, 13, waited + 1){}"),
    ("            length = gl.load(lens_ptr + b, mask=left > 0, other=0)\n\n\n@gluon.jit\ndef _columns(",
     "            length = gl.load(lens_ptr + b, mask=left > 0, other=0)\n    _note(seen_ptr, 14, waited + 1)\n"
     "    _note(seen_ptr, 15, other + 1)\n\n\n@gluon.jit\ndef _columns("),
    ("                tiles = key * 0 + KEYS // ROWS\n",
     "                if num == 0:\n                    _mark(seen_ptr, 6)\n                _mark(seen_ptr, 7)\n{}"),
    ("q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, bars,", "seen_ptr, {}"),
    ("                    arrivals.begin_group(count_ptr + begins, known)\n",
     "{}                    _mark(seen_ptr, 10)\n"),
    ("                        _join_parts(part_ptr,", "                        _mark(seen_ptr, 11)\n{}"),
    ("                        gl.store(count_ptr + begins, 0)\n", "{}                        _mark(seen_ptr, 12)\n"),
    ("    first = _program_of(start, each, longer)\n", "    _mark_join(seen_ptr, 0)\n{}"),
    ("    if (of_head == 0) | (first < last):\n", "    _mark_join(seen_ptr, 1)\n{}"),
    ("            tl.store(out_ptr + place * d + col, out.to(out_ptr.dtype.element_ty), mask=col < d)\n",
     "{}            _mark_join(seen_ptr, 2)\n"),
)  # fmt: skip
"""Lines of the paged kernels, and what becomes of them."""

LATENT = (
    ("    _let_join_start(EARLY == 1)\n", "{}    _mark(seen_ptr, 0)\n"),
    ("    b, first, left = _first_of(lens, batch, 1, KEYS, LEAST)\n", "{}    _mark(seen_ptr, 1)\n"),
    ("                mbarrier.wait(c_full.index(slot), (num // STAGES) & 1)\n",
     "{}                if num == 0:\n                    _mark(seen_ptr, 2)\n                _mark(seen_ptr, 3)\n"),
    ("                s = warpgroup_mma(c2_smem.index(slot).reshape([KEYS, E]), q2, s, is_async=True)\n"
     "                s = warpgroup_mma_wait(0, [s])\n", "{}                _mark(seen_ptr, 8)\n"),
    ("                p_smem.index(c).store(p.to(DTYPE))\n", "{}                _mark(seen_ptr, 9)\n"),
    ("            mbarrier.arrive(q_empty.index(half), count=1)\n", "{}            _mark(seen_ptr, 4)\n"),
    ("\n    _let_join_start(EARLY == 2)\n", "\n    _mark(seen_ptr, 5){}"),
    ("                slot, key = num % STAGES, block * KEYS\n"
     "                mbarrier.wait(c_empty.index(slot), ((num // STAGES) & 1) ^ 1)\n",
     "{}                if num == 0:\n                    _mark(seen_ptr, 6)\n                _mark(seen_ptr, 7)\n"),
    ("    q_desc, q2_desc, c_desc, c2_desc, q_smem, q2_smem, c_smem, c2_smem, bars, table_ptr, lens_ptr, table_b, b,"
     " first,\n", "    seen_ptr,\n{}"),
    ("(_feed_columns, (q_desc,", "(_feed_columns, (seen_ptr, q_desc,"),
)  # fmt: skip


def marked(source: str, changes: tuple[tuple[str, str], ...]) -> str:
    """A kernel's source with marks."""
    for line, becomes in changes:
        assert source.count(line) >= 1, f"no longer in the kernel: {line!r}"
        source = source.replace(line, becomes.format(line))
    helpers = HELPERS.format(at=MARKS_AT, num=NUM_MARKS, joins=JOINS)
    first = source.index("\n\n@triton.jit")
    return source[:first] + helpers + source[first:]


def loaded(path: Path, changes: tuple[tuple[str, str], ...], name: str, folder: Path) -> ModuleType:
    """The marked copy of a kernel module."""
    copy = folder / f"{name}.py"
    copy.write_text(marked(path.read_text(), changes))
    spec = importlib.util.spec_from_file_location(name, copy)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def substituted(folder: Path) -> None:
    """Have marked kernels launched instead of the library's; none of them comes from a pack."""
    from ridgeline.kernels import launcher, pack
    from ridgeline.kernels.latent_attention import kernel as latent_kernel
    from ridgeline.kernels.latent_attention import op as latent
    from ridgeline.kernels.paged_attention import kernel as paged_kernel
    from ridgeline.kernels.paged_attention import op as paged

    pack.find = lambda variant: None
    first = loaded(Path(paged_kernel.__file__), PAGED, "marked_paged", folder)
    second = loaded(Path(latent_kernel.__file__), LATENT, "marked_latent", folder)
    for module, name, function in (
        (paged, "_COLUMNS", first.paged_columns), (paged, "_JOIN", first.paged_join),
        (latent, "_COLUMNS", second.latent_columns),
    ):  # fmt: skip
        before = getattr(module, name)
        del launcher._kernels[before.name]
        made = launcher.Kernel(function, vectors=tuple(before.vectors), loose=tuple(before.loose),
                               dependent=before.dependent)  # fmt: skip
        setattr(module, name, made)


CASES = {
    "paged 67 MB": (1, 32, 8, 16400, 128, 16, False), "paged 131 MB": (4, 32, 8, 8000, 128, 16, False),
    "paged 9 MB": (1, 32, 8, 2112, 128, 16, False), "paged 269 MB": (8, 32, 8, 8192, 128, 64, False),
    "paged 197 MB, 300 short": (300, 32, 8, 300, 128, 16, True), "paged 136 MB, d=64": (9, 32, 8, 7400, 64, 16, False),
    "paged 68 MB, one key head": (64, 16, 1, 2050, 128, 64, False),
}  # fmt: skip
LATENTS = {
    "latent 69 MB": (16, 16, 3700, 64, False), "latent 76 MB": (1, 16, 65536, 64, False),
    "latent 135 MB": (64, 16, 1800, 64, False),
}  # fmt: skip

only: list[str] = []


def wanted() -> list[str]:
    """The cases that were asked for, by a piece of their names; all of them if none was."""
    return [name for name in (*CASES, *LATENTS) if not only or any(piece in name for piece in only)]


def planned(name: str, on: str) -> tuple[Any, tuple[Any, ...], Any, float]:
    """A plan, its arguments, room for its result, its scale."""
    import race_paged
    import torch

    from ridgeline.kernels.contract import trials
    from ridgeline.kernels.latent_attention import op as latent
    from ridgeline.kernels.paged_attention import op as paged

    if name in CASES:
        of, op, which = race_paged.paged_case(*CASES[name]), paged, "paged_attention"
    else:
        of, op, which = race_paged.latent_case(*LATENTS[name]), latent, "paged_latent_attention"
    generator = torch.Generator(on if on == "cuda" else "cpu").manual_seed(2)
    args = trials()[which][1].make(of, torch.device(on), generator)
    scale = args[0].shape[-1] ** -0.5
    if op is paged:
        out = torch.empty_like(args[0])
        return paged._Plan(args, out, scale), args, out, scale
    out = torch.empty(*args[0].shape[:2], 512, dtype=args[0].dtype, device=args[0].device)
    return latent._FewPlan(args[:4], out, scale), args[:4], out, scale


class Flush:
    """A cold L2 of clean lines, and an idle device behind it."""

    def __init__(self) -> None:
        import torch

        self.buffer = torch.zeros(64 << 20, dtype=torch.int32, device="cuda")
        self.out = torch.empty((), dtype=torch.int32, device="cuda")

    def __call__(self) -> None:
        import torch

        self.buffer.zero_()
        torch.amax(self.buffer, dim=0, out=self.out)
        torch.cuda._sleep(200_000)


def rounds_of(plan: Any, args: tuple[Any, ...], out: Any, scale: float, num: int) -> Iterator[Any]:
    """Marks of every round: [programs, marks] of reading and of joining, nanoseconds; 0 where nobody came."""
    import torch

    flush = Flush()
    part, _ = plan.parts.room(out)
    words = MARKS_AT + 2 * JOINS * NUM_MARKS
    seen = torch.zeros(2 * words, dtype=torch.float32, device="cuda")
    count = torch.zeros(2 * plan.parts.sizes[4], dtype=torch.int64, device="cuda")
    plan.parts.places = lambda _: (seen, (part, seen, count))
    for _ in range(num):
        seen.zero_()
        flush()
        plan.run(args, out, scale)
        torch.cuda.synchronize()
        marks = seen.view(torch.int64)[MARKS_AT:].view(2, JOINS, NUM_MARKS).cpu().numpy()
        yield marks[0], marks[1]


def spread(found: list[Any], names: tuple[str, ...], which: int) -> dict[str, list[float]]:
    """Of every step least, median and largest over programs in microseconds since reading began, medians of rounds."""
    rows: dict[str, list[float]] = {}
    for i, name in enumerate(names):
        columns = []
        for both in found:
            marks = both[which][:, i]
            there = marks[marks > 0]
            if there.size:
                since = (there - both[0][:, 0][both[0][:, 0] > 0].min()) / 1e3
                columns.append((since.min(), statistics.median(since.tolist()), since.max()))
        if columns:
            rows[name] = [round(statistics.median(x), 3) for x in zip(*columns, strict=True)]
    return rows


def lengths(found: list[Any]) -> dict[str, float]:
    """Of a program's own steps: microseconds from one to another, medians over programs and rounds."""
    pairs = {"begin to stretch": (0, 1), "stretch to first copy": (1, 6), "copy to first block": (6, 2),
             "last block to scores": (3, 8), "scores to probabilities": (8, 9), "probabilities to sums": (9, 4),
             "sums to end": (4, 5), "sums to part": (4, 10), "part to count": (10, 11),
             "joining": (11, 12)}  # fmt: skip
    rows = {}
    for name, (a, b) in pairs.items():
        steps = [(both[0][:, b] - both[0][:, a])[(both[0][:, a] > 0) & (both[0][:, b] > 0)] for both in found]
        if any(one.size for one in steps):
            rows[name] = round(statistics.median(float(x) for one in steps for x in one) / 1e3, 3)
    return rows


def waits(found: list[Any]) -> dict[str, list[float]]:
    """Of a program's waits, in thousands of its processor's cycles: least, median and largest over programs."""
    rows = {}
    for i, name in WAITS.items():
        values = [x for both in found for x in both[0][:, i].tolist() if x > 0]
        if values:
            rows[name] = [round(x / 1e3, 2) for x in (min(values), statistics.median(values), max(values))]
    return rows


def traced(run: Callable[[], Any], num: int = 12) -> list[dict[str, Any]]:
    """Kernels of a call as PyTorch's profiler saw them: name, microseconds since the first began, microseconds."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    flush = Flush()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(num):
            flush()
            run()
        torch.cuda.synchronize()
    found: dict[str, list[tuple[float, float]]] = {}
    begun = 0.0
    for event in sorted(prof.events(), key=lambda e: e.time_range.start):
        name = event.name
        if not any(word in name for word in ("paged_", "latent_", "shares_", "read_all")):
            continue
        if not any(word in name for word in ("join", "border")):
            begun = event.time_range.start
        found.setdefault(name, []).append((event.time_range.start - begun, event.time_range.end - begun))
    return [
        {"kernel": name, "begins_us": round(statistics.median(a for a, _ in spans), 2),
         "ends_us": round(statistics.median(b for _, b in spans), 2), "num": len(spans)}
        for name, spans in found.items()
    ]  # fmt: skip


def part_traces(end: float) -> Iterator[dict[str, Any]]:
    import race_paged

    for name in wanted():
        if time.perf_counter() > end:
            return
        plan, args, out, scale = planned(name, "cuda")
        yield {"case": name, "kernels": traced(lambda p=plan, a=args, o=out, s=scale: p.run(a, o, s))}
    for megabytes in (9, 67, 131):
        yield {"case": f"bare read {megabytes} MB", "kernels": traced(race_paged.bare(megabytes * 1_000_000))}


def part_marks(end: float, num: int) -> Iterator[dict[str, Any]]:
    for name in wanted():
        if time.perf_counter() > end:
            return
        found = list(rounds_of(*planned(name, "cuda"), num=num + 2))[2:]
        yield {"case": name, "reading": spread(found, STEPS, 0), "joining": spread(found, JOIN_STEPS, 1),
               "own": lengths(found), "waits": waits(found)}  # fmt: skip


def host_seconds(run: Callable[[], Any], calls: int = 100, repeats: int = 9) -> tuple[float, float]:
    """Seconds the host is busy with a call, median and least of repeats."""
    import torch

    for _ in range(20):
        run()
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        found.append((time.perf_counter() - began) / calls)
    return statistics.median(found), min(found)


def part_host(end: float) -> Iterator[dict[str, Any]]:
    """What a call is made of: the function, the primitive, its C++ part, the launch alone; and single allocations."""
    import host_calls
    import torch

    from ridgeline.kernels import contract, direct, launcher
    from ridgeline.kernels.files import cache_folder

    if direct.module() is None:  # before anything is launched: that is when primitives ask for it
        direct.build(cache_folder())
    names = {"attention 1×8×64×64": "attention", "attention 1×8×256×128": "attention", "rms_norm 64×1024": "rms_norm",
             "decode 2×32 over 8×512×128": "decode_attention", "paged 2×32 over 8×512×128": "paged_attention",
             "latent 2×16 over 512": "paged_latent_attention"}  # fmt: skip
    data = torch.zeros(64, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        yield {"call": "torch.empty", "host_s": host_seconds(lambda: torch.empty_like(data))}
        yield {"call": "relu", "host_s": host_seconds(lambda: torch.relu(data))}
        for name, (ours, theirs) in host_calls.calls("cuda").items():
            if name not in names or time.perf_counter() > end:
                continue
            made = contract.primitives()[names[name]]
            ours()
            given: list[Any] = []
            before, quick, made.quick = made.direct, made.quick, None

            def heard(*args: Any, given: list[Any] = given, made: Any = made) -> Any:
                given.append(args)
                return made.slow(*args)

            made.direct = heard
            ours()
            made.direct, made.quick = before, quick
            launches: list[Any] = []
            launcher.native().watch(lambda *args, kept=launches: kept.append(args))
            made.slow(*given[0])
            launcher.native().watch(None)
            row = {"call": name, "has_direct": before is not None, "num_launches": len(launches),
                   "whole_s": host_seconds(ours), "primitive_s": host_seconds(lambda: made(*given[0]))}  # noqa: B023
            if before is not None:
                row["direct_s"] = host_seconds(lambda: before(*given[0]))  # noqa: B023
            row["launches_s"] = [host_seconds(lambda: launcher.native().launch(*one)) for one in launches]  # noqa: B023
            row["pytorch_s"] = None if theirs is None else host_seconds(theirs)
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--parts", nargs="+", default=["host", "traces", "marks"])
    parser.add_argument("--only", nargs="+", default=[], help="pieces of the names of cases")
    options = parser.parse_args()
    only.extend(options.only)
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.perf_counter() + options.budget_s
    rows: list[dict[str, Any]] = []

    def write() -> None:
        with gzip.open(options.out / "decode_marks.json.gz", "wt") as file:
            json.dump(rows, file)

    def give_up() -> None:
        import os

        rows.append({"note": "stopped: something never ended"})
        write()
        os._exit(3)

    watch = threading.Timer(options.budget_s + 15, give_up)
    watch.daemon = True
    watch.start()
    parts = {"traces": part_traces, "host": part_host, "marks": partial(part_marks, num=options.rounds)}
    with tempfile.TemporaryDirectory() as folder:
        for part in options.parts:
            try:
                if part == "marks":
                    substituted(Path(folder))
                for row in parts[part](end):
                    rows.append(row)
                    print(json.dumps(row), flush=True)
                    write()
            except Exception:
                rows.append({"note": traceback.format_exc()[-2000:]})
                print(rows[-1]["note"], flush=True)
                write()


if __name__ == "__main__":
    main()
