"""Numerics of every kernel without a GPU, through Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("interpret.py")
PARTS = 3
LIMIT_S = 1800
"""A part takes a minute by itself; this is for machines that have much else to do."""


@pytest.mark.parametrize("part", range(PARTS))
def test_every_kernel_agrees_with_its_reference_on_the_interpreter(part):
    env = dict(os.environ) | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), f"{part}/{PARTS}"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "nothing is left" in done.stdout
