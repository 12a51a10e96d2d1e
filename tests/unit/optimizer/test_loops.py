"""Loops as people write them leave the same with recorded steps, on the CPU with a stand-in for CUDA graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

import loops
from recorder import TapeExecutor

CPU = torch.device("cpu")


@pytest.mark.filterwarnings("ignore::ridgeline.optimizer.optimized.RunsEagerly")
@pytest.mark.parametrize("loop", loops.LOOPS, ids=[loop.__name__ for loop in loops.LOOPS])
def test_a_loop_leaves_what_it_leaves_without_recordings(loop: Callable[..., None]) -> None:
    graphed = loops.compared(loop, SimpleNamespace(device=CPU, executor=TapeExecutor, exact=True))
    assert graphed.replays > 0
