"""The front door opens fast, and with numpy at most."""

from __future__ import annotations

import json
import subprocess
import sys

_SCRIPT = """
import json, sys
before = set(sys.modules)
import ridgeline
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_importing_ridgeline_imports_few_modules_and_no_framework():
    """28 modules, in a few milliseconds."""
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True)
    modules = json.loads(done.stdout)
    frameworks = {"torch", "triton", "onnx", "jax", "transformers", "scipy", "pyarrow", "pandas", "matplotlib"}
    assert len(modules) < 60 and not {name.partition(".")[0] for name in modules} & frameworks
