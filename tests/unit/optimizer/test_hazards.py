"""Behavior that hangs on something far away: recorded and noticed, or refused, on the CPU with a stand-in for CUDA graphs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

import compare
import hazards
import perils
from adversarial import Case
from recorder import TapeExecutor

CPU = torch.device("cpu")
AT = SimpleNamespace(device=CPU, executor=TapeExecutor, exact=True)
pytestmark = pytest.mark.filterwarnings("ignore::ridgeline.optimizer.optimized.RunsEagerly", "ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hazards, "FILE", tmp_path / "scale")
    logging.getLogger("hazard").addHandler(logging.NullHandler())
    hazards.reset()
    perils.reset()
    yield
    hazards.reset()


@pytest.mark.parametrize("case", hazards.CASES, ids=lambda case: case.name)
def test_a_hazard_gives_what_it_gives_eagerly_or_is_refused(case: Case) -> None:
    compare.check(case, CPU, TapeExecutor)


@pytest.mark.parametrize("peril", perils.PERILS, ids=lambda peril: peril.name)
def test_a_peril_leaves_what_it_leaves_eagerly_or_is_refused(peril: perils.Peril) -> None:
    perils.check(peril, AT)
