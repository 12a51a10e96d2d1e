"""A job of many ranks with one rank in memory: CPU-seconds and peak memory.

    python benchmarks/trace_ranks.py FOLDER [--num 1000]

The files of the folder are taken again and again, as links under new names, until there are as many ranks as asked for.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from ridgeline.trace.job import survey
from ridgeline.trace.read import trace_files


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path)
    options.add_argument("--num", type=int, default=1000)
    given = options.parse_args()
    files = [file.resolve() for file in trace_files(given.folder)]
    with tempfile.TemporaryDirectory() as name:
        for i in range(given.num):
            file = files[i % len(files)]
            (Path(name) / f"{i}_{file.name}").symlink_to(file)
        began = time.process_time()
        job = survey(name)
        spent_s = time.process_time() - began
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(f"{len(job.ranks)} ranks, {len(job.collectives)} collectives: {spent_s:.1f} CPU-s, peak {peak_mb:.0f} MB")


if __name__ == "__main__":
    main()
