"""Everything under tests/gpu, by several processes on one device; what failed there is run again alone.

    python -m lab.gpu_tests --pack FOLDER --jobs 2        (without a GPU: compiles all that the tests launch)
    RIDGELINE_KERNEL_PACK=FOLDER python -m lab.gpu_tests --out gpu_tests.json --seconds 200
    python -m lab.gpu_tests --rest gpu_tests.json --out rest.json        (what failed there or was not reached)

A process takes ten seconds and more to import, so tests are dealt out in chunks of many; neighbors are alike, so a
chunk holds every n-th of its file. Searches go first, then kernels: most tests are of them. Tests that have seconds in
them fail beside others now and then, which is why failures are repeated when nobody else is there. Results are written
after every chunk.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from lab import ROOT

FOLDER = "tests/gpu"
LONG = {"test_optimize_train_gpu": 3, "test_optimize_search_gpu": 2, "test_optimize_parts_gpu": 2,
        "test_harness_gpu": 2, "test_optimize_precision_gpu": 8}  # fmt: skip
CHUNKS = {"test_kernels_gpu": 120, "test_attention_gpu": 30, "test_decode_gpu": 30, **LONG}
CHUNK = 26
"""Tests of a chunk, by file. Searches of half a minute go first and few to a chunk: begun last, they end it all."""
ENDING_S = 8.0
"""Seconds below which nothing is begun any more."""
GOOD = ("PASSED", "SKIPPED", "XFAIL")


@dataclass
class Run:
    """What became of every test, side by side and again."""

    out: Path
    ends: float
    first: dict[str, str] = field(default_factory=dict)
    again: dict[str, str] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def left_s(self) -> float:
        return self.ends - time.monotonic()

    def note(self, into: dict[str, str], names: list[str], text: str) -> None:
        with self.lock:
            into.update({name: _verdict(name, text) for name in names})
            bad = [name for name in names if into[name] not in GOOD]
            self.logs.update(dict.fromkeys(bad[:1], text[-20_000:]))
            self.out.write_text(json.dumps({"first": self.first, "again": self.again, "logs": self.logs}))
            print(
                f"{self.left_s():5.0f} s left  {len(names):4d} of {names[0].split('::')[0]}, {len(bad)} bad", flush=True
            )


def main() -> None:
    asked = _arguments()
    sys.path[:0] = [str(ROOT / FOLDER)]
    if asked.pack:
        write_pack(asked.pack, asked.jobs)
        return
    run = Run(asked.out, time.monotonic() + asked.seconds)
    names = rest(asked.rest) if asked.rest else collected(asked.only)
    run.first.update(dict.fromkeys(names, "NOT RUN"))
    side_by_side(run, chunks(names), asked.jobs, asked.alone_s)
    _tell("side by side", run.first)
    missed = [name for name in names if run.first[name] == "NOT RUN"]
    for bad in ([name for name in names if run.first[name] not in (*GOOD, "NOT RUN")], missed):
        if bad and run.left_s() > ENDING_S:  # what failed has a process of its own: its reasons are printed at the end
            run.note(run.again, bad, _tested(bad, run.left_s()))
            _tell("alone", run.again)
    last = run.first | run.again
    for name in names:
        if last[name] not in (*GOOD, "NOT RUN"):
            print(last[name], name)
    sys.exit(any(verdict not in GOOD for verdict in last.values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pack", type=Path, help="only compile what the tests launch, into this folder")
    parser.add_argument("--out", type=Path, default=Path("gpu_tests.json"))
    parser.add_argument("--seconds", type=float, default=600.0, help="everything ends within this")
    parser.add_argument("--alone-s", type=float, default=40.0, help="of these, for what failed")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--only", nargs="*", default=[FOLDER], help="files, folders or tests")
    parser.add_argument("--rest", type=Path, help="what did not pass in this file of an earlier run, and nothing else")
    return parser.parse_args()


def write_pack(folder: Path, jobs: int) -> None:
    """Kernels of all files that name theirs (``wanted_variants``)."""
    import importlib

    from ridgeline.kernels import pack

    files = [file for file in sorted((ROOT / FOLDER).glob("test_*.py")) if "def wanted_variants" in file.read_text()]
    wanted = [each for file in files for each in importlib.import_module(file.stem).wanted_variants()]
    made = pack.write(folder, wanted, jobs=jobs, direct=False)
    print(f"{len(made.entries)} kernels of {len(files)} files in {folder}")


def rest(earlier: Path) -> list[str]:
    """Tests that failed or were not reached, by the file of a run."""
    told = json.loads(earlier.read_text())
    names = [name for name, verdict in (told["first"] | told["again"]).items() if verdict not in GOOD]
    return names or sys.exit(f"every test passed in {earlier}")


def collected(only: list[str]) -> list[str]:
    """All tests marked for a GPU, by name."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", *only]
    listed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    names = [line for line in listed.stdout.splitlines() if "::" in line]
    if not names:
        sys.exit(f"no test was found in {' '.join(only)}:\n{listed.stdout[-2000:]}{listed.stderr[-2000:]}")
    return names


def chunks(names: list[str]) -> list[list[str]]:
    """Tests dealt out file by file: long ones first, then kernels, of which most else is made, then the files with
    fewest, so that a short time cuts files, not kinds."""
    files: dict[str, list[str]] = {}
    for name in names:
        files.setdefault(name.split("::")[0], []).append(name)
    found = []
    for file in sorted(files, key=lambda file: (_turn(Path(file).stem), len(files[file]))):
        count = -(-len(files[file]) // CHUNKS.get(Path(file).stem, CHUNK))
        found += [files[file][i::count] for i in range(count)]
    return found


def _turn(stem: str) -> int:
    return 0 if stem in LONG else 1 if stem in CHUNKS else 2


def side_by_side(run: Run, dealt: list[list[str]], jobs: int, alone_s: float) -> None:
    waiting: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    for chunk in dealt:
        waiting.put(chunk)

    def work() -> None:
        while (left := run.left_s() - alone_s) > ENDING_S:
            try:
                chunk = waiting.get_nowait()
            except queue.Empty:
                return
            run.note(run.first, chunk, _tested(chunk, left))

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _tested(names: list[str], seconds: float) -> str:
    """What pytest printed; of a process that is stopped, what it had printed by then."""
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-m", "gpu", "-p", "no:cacheprovider", *names]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=seconds, cwd=ROOT, check=False)
        except subprocess.TimeoutExpired:
            log.write("\nout of time\n")
        log.seek(0)
        return log.read()


def _verdict(name: str, text: str) -> str:
    found = re.search(re.escape(name) + r"\s+(PASSED|FAILED|ERROR|SKIPPED|XFAIL)", text)
    return found.group(1) if found else "NOT RUN"


def _tell(which: str, verdicts: dict[str, str]) -> None:
    print(f"{which}: {dict(collections.Counter(verdicts.values()))}", flush=True)


if __name__ == "__main__":
    main()
