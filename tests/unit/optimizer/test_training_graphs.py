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


class _Asking(TapeExecutor):
    """Asks, while it records, for the random state that checkpointed parts keep."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def record(self, run: Any, *, told: bool) -> Any:
        self.told.append(torch.utils.checkpoint.get_device_states)
        return super().record(run, told=told)


@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_a_recording_keeps_no_random_state_and_refuses_parts_that_need_one(drop: float) -> None:
    real, executor = torch.utils.checkpoint.get_device_states, _Asking()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(drop)).train()
    checks.graph_training(model, (torch.randn(2, 8),), {}, model, executor=executor)
    assert len(executor.told) == 2
    for asked in executor.told:
        if drop:
            with pytest.raises(checks.NotGraphable, match="random generator's state is read"):
                asked(torch.ones(1))
        else:
            assert asked(torch.ones(1)) == ([], [])
    assert torch.utils.checkpoint.get_device_states is real
