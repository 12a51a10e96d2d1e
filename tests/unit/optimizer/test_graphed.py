"""Recordings against eager calls, on the CPU with a stand-in that has the memory of a CUDA graph."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

from adversarial import CASES, Case
from compare import check
from recorder import TapeExecutor

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_an_adversarial_model_gives_what_it_gives_eagerly_or_is_refused(case: Case) -> None:
    if "transformers" in case.marks:
        pytest.importorskip("transformers")
    check(case, CPU, TapeExecutor)
