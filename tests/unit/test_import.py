"""The front door opens fast, and with numpy at most."""

from __future__ import annotations

import json
import os
import subprocess
import sys

_SCRIPT = """
import json, sys, time
start = time.perf_counter()
import ridgeline
took_s = time.perf_counter() - start
print(json.dumps([took_s, sorted(set(m.partition(".")[0] for m in sys.modules))]))
"""


def _import_once() -> tuple[float, set[str]]:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True, env=env)
    took_s, modules = json.loads(done.stdout)
    return took_s, set(modules)


def test_importing_ridgeline_takes_under_150_ms_and_no_framework():
    runs = [_import_once() for _ in range(5)]  # the first may still write bytecode
    assert min(took_s for took_s, _ in runs) < 0.150
    frameworks = {"torch", "triton", "onnx", "jax", "transformers", "scipy", "pyarrow", "pandas", "matplotlib"}
    assert not runs[-1][1] & frameworks
