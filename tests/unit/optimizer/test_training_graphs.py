"""Recorded training against eager training, on the CPU with a stand-in that has the memory of a CUDA graph."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

import training_checks as checks
from recorder import TapeExecutor

CPU = torch.device("cpu")


@pytest.mark.parametrize("check", checks.CHECKS, ids=[check.__name__ for check in checks.CHECKS])
def test_recorded_training(check: Callable[[Any], None]) -> None:
    check(SimpleNamespace(device=CPU, executor=TapeExecutor, exact=True))
