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


@pytest.mark.parametrize(("drop", "kept"), [(0.0, False), (0.5, True)])
def test_no_random_state_is_kept_for_parts_that_draw_nothing(drop: float, kept: bool) -> None:
    real, executor = torch.utils.checkpoint.get_device_states, _Asking()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(drop)).train()
    checks.graph_training(model, (torch.randn(2, 8),), {}, model, executor=executor)
    assert len(executor.told) == 2
    assert all((asked is real) == kept for asked in executor.told)
    assert kept or executor.told[0](torch.ones(1)) == ([], [])
    assert torch.utils.checkpoint.get_device_states is real
