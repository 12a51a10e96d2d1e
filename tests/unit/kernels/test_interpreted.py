"""Numerics of every kernel without a GPU, through Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("interpret.py")


def test_every_kernel_agrees_with_its_reference_on_the_interpreter():
    env = dict(os.environ) | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all right" in done.stdout
