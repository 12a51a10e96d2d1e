"""Thousands of damaged trace files: each must end in an answer or a clear refusal, soon and in little memory.

    python -m lab.fuzz.traces [--num 20000] [--seconds 600] [--seed 0] [SEED_FILE …]

Seeds are small traces made here in every dialect, saved columns, an Nsight Systems export, and any files given (their
first 200 kB). Each is damaged in one to four ways: cut off, bytes flipped, pieces deleted, doubled or moved, numbers
made huge, tokens replaced, compressed and damaged then. Whatever comes out is analyzed.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import random
import resource
import sqlite3
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from lab import ROOT

sys.path.insert(0, str(ROOT / "tests" / "unit" / "trace"))
import dialects

from ridgeline.errors import RidgelineError
from ridgeline.trace import read, save, steps, totals
from ridgeline.trace.collectives import calls_of, collectives
from ridgeline.trace.critical import critical_path
from ridgeline.trace.idle import idle_causes, idle_places
from ridgeline.trace.kernels import launches, work_by
from ridgeline.trace.memory import peaks
from ridgeline.trace.quality import quality

MAX_SECONDS_A_FILE = 20.0
_TOKENS = (b"null", b"-1", b"1e400", b"NaN", b'""', b"[]", b"{}", b"99999999999999999999", b'"\\ud800"',
           b"true", b"-0.0", b"[[[[[[", b"}}}}", b'"', b"\\", b"\x00", b"\xff\xfe", b'"ph": "X"',
           b'"traceEvents": [')  # fmt: skip


def seeds(folder: Path) -> dict[str, bytes]:
    """Whole files to damage."""
    plain = dialects.modern()
    found = {"modern.json": json.dumps(plain).encode(), "pretty.json": json.dumps(plain, indent=2).encode()}
    for name in ("of_2021", "in_nanoseconds", "as_pairs", "of_rocm", "of_mtia", "with_arrows", "gpu_only"):
        found[f"{name}.json"] = json.dumps(getattr(dialects, name)(plain)).encode()
    found["decimals.json"] = dialects.absolute_decimals(dialects.modern(base=False)).encode()
    (folder / "seed.json").write_bytes(found["modern.json"])
    save(read(folder / "seed.json"), folder / "seed.trace")
    found["saved.trace"] = (folder / "seed.trace").read_bytes()
    found["export.sqlite"] = export(folder / "seed.sqlite")
    return found


def export(path: Path) -> bytes:
    """A small export in the schema of Nsight Systems."""
    path.unlink(missing_ok=True)
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        db.executemany("INSERT INTO StringIds VALUES (?, ?)", [(1, "gemm"), (2, "cudaLaunchKernel"), (3, "step")])
        db.execute('CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, "end" INTEGER, deviceId INTEGER, '
                   "streamId INTEGER, correlationId INTEGER, demangledName INTEGER)")  # fmt: skip
        db.execute('CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, "end" INTEGER, correlationId INTEGER, '
                   "globalTid INTEGER, nameId INTEGER)")  # fmt: skip
        for i in range(50):
            db.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,0,7,?,1)", (i * 1000 + 500, i * 1000 + 1300, i)
            )
            db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,1,2)", (i * 1000, i * 1000 + 300, i))
    db.close()
    return path.read_bytes()


def damaged(data: bytes, rng: random.Random) -> bytes:
    """One to four kinds of damage."""
    for _ in range(rng.randint(1, 4)):
        data = rng.choice(_DAMAGE)(data, rng)
        if not data:
            break
    return data


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _flip(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 30)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _delete(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.randint(1, 200) :]


def _double(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    piece = data[at : at + rng.randint(1, 400)]
    return data[:at] + piece * rng.randint(2, 50) + data[at:]


def _move(data: bytes, rng: random.Random) -> bytes:
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[b:] + data[a:b] + data[:a]


def _token(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + rng.choice(_TOKENS) + data[at + rng.randint(0, 6) :]


def _digits(data: bytes, rng: random.Random) -> bytes:
    spots = [i for i in range(len(data)) if data[i : i + 1].isdigit()][:4000]
    if not spots:
        return data
    at = rng.choice(spots)
    return data[:at] + b"9" * rng.choice((1, 5, 12, 19, 40, 400)) + data[at + 1 :]


def _packed(data: bytes, rng: random.Random) -> bytes:
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as out:
        out.write(data)
    return rng.choice((_cut, _flip))(packed.getvalue(), rng)


_DAMAGE = (_cut, _flip, _delete, _double, _move, _token, _token, _digits, _packed)


def analyze(path: Path) -> str:
    """``refused``, ``partial`` (says so), or ``answered``."""
    try:
        trace = read(path, cache=False)
    except RidgelineError as error:
        return "refused" if len(str(error)) > 20 else "refused without a reason"
    found = totals(trace)["all"]
    assert abs(found["busy_ms"] + found["idle_ms"] - found["total_ms"]) <= 1e-6 * max(1.0, found["total_ms"]), found
    quality(trace), steps(trace), idle_causes(trace), idle_places(trace), work_by(trace), launches(trace)
    collectives(calls_of(trace)), peaks(trace), critical_path(trace)
    return "partial" if trace.notes else "answered"


def fuzz(num: int, seconds: float, seed: int, more: list[Path]) -> Counter[str]:
    """Damages, reads and counts; a crash is printed with the file that caused it."""
    counts: Counter[str] = Counter()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = seeds(folder) | {f"given{i}_{path.name}": path.read_bytes()[:200_000] for i, path in enumerate(more)}
        names = sorted(whole)
        for n in range(num):
            if time.monotonic() - began > seconds:
                break
            rng = random.Random(f"{seed} {n}")
            chosen = rng.choice(names)
            path = folder / f"case{Path(chosen).suffix}"
            path.write_bytes(damaged(whole[chosen], rng))
            started = time.monotonic()
            try:
                counts[analyze(path)] += 1
            except Exception:
                counts["crashed"] += 1
                print(f"case {seed}/{n} from {chosen}:\n{traceback.format_exc(limit=-4)}", file=sys.stderr)
            if time.monotonic() - started > MAX_SECONDS_A_FILE:
                counts["slow"] += 1
                print(f"case {seed}/{n} from {chosen} took {time.monotonic() - started:.1f} s", file=sys.stderr)
    return counts


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("files", nargs="*", type=Path)
    options.add_argument("--num", type=int, default=20_000)
    options.add_argument("--seconds", type=float, default=3600.0)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    counts = fuzz(given.num, given.seconds, given.seed, given.files)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(json.dumps({"files": sum(counts[k] for k in ("refused", "partial", "answered", "crashed")), **counts,
                      "peak_mb": round(peak_mb)}))  # fmt: skip
    sys.exit(1 if counts["crashed"] or counts["slow"] else 0)


if __name__ == "__main__":
    main()
