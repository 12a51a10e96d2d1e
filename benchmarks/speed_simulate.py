"""How long simulations and searches of training take, each in a process of its own, from the start of Python.

python benchmarks/speed_simulate.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CASES = {
    "405B on 16,384 H100, one step": (
        "import ridgeline as rl; rl.simulate('llama3.1-405b', 'h100-sxm*16384', tp=8, pp=16, vp=8, dp=128,"
        " micro_batch=1, global_batch=2048, seq=8192)"
    ),
    "405B on 131,072 H100, one step": (
        "import ridgeline as rl; rl.simulate('llama3.1-405b', 'h100-sxm*131072', tp=8, pp=16, vp=8, dp=1024,"
        " micro_batch=1, global_batch=16384, seq=8192)"
    ),
    "plan search, 70B on 1,024 H100": (
        "import ridgeline as rl; from ridgeline.sim.search import Space; f = rl.plans('llama3-70b', 'h100-sxm*1024',"
        " global_batch=1024, seq=8192, space=Space(vp=(1, 2, 4, 5, 8, 10), zero=(0, 1, 2, 3)));"
        " print(f.num_candidates, 'candidates', f.outcomes)"
    ),
}


def main() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    for title, code in CASES.items():
        runs = []
        for _ in range(1 if "search" in title else 3):
            before = os.times()
            started = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True, env=env)
            wall, after = time.perf_counter() - started, os.times()
            cpu = after.children_user + after.children_system - before.children_user - before.children_system
            runs.append((wall, cpu))
        wall, cpu = min(runs)
        print(f"{title}: {wall:.2f} s on the wall, {cpu:.2f} s of one core (load average {os.getloadavg()[0]:.1f})")


if __name__ == "__main__":
    main()
