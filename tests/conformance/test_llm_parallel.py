"""Four processes over gloo: every kind of parallelism, and pairs of them, has the losses of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))
import llm_ranks

CASES: dict[str, dict[str, Any]] = {
    "dp": {"model": "llama", "plan": {"dp": 4}},
    "fsdp": {"model": "llama", "plan": {"dp": 4, "zero": 3}, "out": "saved", "save": True},
    "fsdp in groups": {"model": "llama", "plan": {"dp": 4, "zero": 2, "shard_group": 2}},
    "tp": {"model": "llama", "plan": {"tp": 4}},
    "pp": {"model": "llama", "plan": {"pp": 4}},
    "cp": {"model": "llama", "plan": {"cp": 4}},
    "ep": {"model": "mixtral", "plan": {"dp": 4, "ep": 4}},
    "fsdp tp": {"model": "qwen3", "plan": {"tp": 2, "dp": 2, "zero": 3}},
    "fsdp pp": {"model": "llama", "plan": {"pp": 2, "dp": 2, "zero": 2}},
    "fsdp cp": {"model": "llama", "plan": {"cp": 2, "dp": 2, "zero": 3}, "recompute": "full"},
    "fsdp ep": {"model": "mixtral", "plan": {"dp": 4, "ep": 2, "zero": 3}, "out": "experts", "save": True},
    "tp pp interleaved": {"model": "llama", "plan": {"pp": 2, "vp": 2, "tp": 2, "schedule": "interleaved"}},
    "tp cp": {"model": "gemma2", "plan": {"tp": 2, "cp": 2}},
    "tp ep": {"model": "gpt_oss", "plan": {"tp": 2, "dp": 2, "ep": 2}},
    "tp ep fsdp": {"model": "deepseek", "plan": {"tp": 2, "dp": 2, "ep": 2, "zero": 3}},
    "pp cp": {"model": "llama", "plan": {"pp": 2, "cp": 2}},
    "pp ep": {"model": "mixtral", "plan": {"pp": 2, "dp": 2, "ep": 2}},
    "cp ep": {"model": "mixtral", "plan": {"cp": 2, "dp": 2, "ep": 2}},
    "muon fsdp tp": {"model": "llama", "plan": {"tp": 2, "dp": 2, "zero": 3}, "optimizer": "muon"},
    # What four ranks with shards saved, goes on as two stages of two tensor-parallel ranks
    "resumed": {"model": "llama", "plan": {"pp": 2, "tp": 2}, "out": "saved", "resume": True},
    "experts resumed": {"model": "mixtral", "plan": {"cp": 2, "tp": 2, "ep": 2}, "out": "experts", "resume": True},
}
EIGHT: dict[str, dict[str, Any]] = {
    "fsdp tp pp": {"model": "llama", "plan": {"dp": 2, "tp": 2, "pp": 2, "zero": 3}},
    "fsdp cp ep tp": {"model": "mixtral", "plan": {"dp": 2, "cp": 2, "tp": 2, "ep": 4, "zero": 3}},
}


def _run(folder: Path, cases: dict[str, dict[str, Any]], ranks: int) -> dict[str, list[float]]:
    root = Path(__file__).resolve().parents[2]
    llm_ranks.make_files(folder)
    (folder / "cases.json").write_text(json.dumps(cases))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root / "src")}
    command = [sys.executable, str(root / "tests/conformance/llm_ranks.py"), str(folder), str(folder / "losses.json"),
               str(ranks)]  # fmt: skip
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, list[float]] = json.loads((folder / "losses.json").read_text())
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def losses(folder: Path) -> dict[str, list[float]]:
    return _run(folder, CASES, 4)


@pytest.fixture(scope="module")
def alone(folder: Path, losses: dict[str, list[float]]) -> dict[tuple[str, str], list[float]]:
    """Twice as many steps of each model in this process."""
    wanted = {(case["model"], case.get("optimizer", "adamw")) for case in CASES.values()}
    steps = 2 * llm_ranks.STEPS
    return {
        (model, optimizer): llm_ranks.losses_of(folder, {"model": model, "optimizer": optimizer, "steps": steps})
        for model, optimizer in wanted
    }


@pytest.mark.parametrize("name", CASES)
def test_losses_norms_and_balance_are_those_of_one_process(
    name: str, losses: dict[str, list[float]], alone: dict[tuple[str, str], list[float]]
) -> None:
    case = CASES[name]
    expected = alone[case["model"], case.get("optimizer", "adamw")]
    num = 3 * llm_ranks.STEPS
    start = num if case.get("resume") else 0
    assert losses[name] == pytest.approx(expected[start : start + num], rel=1e-5)


def test_one_process_goes_on_from_four(
    folder: Path, losses: dict[str, list[float]], alone: dict[tuple[str, str], list[float]]
) -> None:
    found = llm_ranks.losses_of(folder, {"model": "llama", "out": "saved", "resume": True})
    assert found == pytest.approx(alone["llama", "adamw"][3 * llm_ranks.STEPS :], rel=1e-5)


@pytest.mark.slow
def test_eight_processes_have_the_losses_of_one(tmp_path: Path) -> None:
    found = _run(tmp_path, EIGHT, 8)
    for name, case in EIGHT.items():
        assert found[name] == pytest.approx(llm_ranks.losses_of(tmp_path, {"model": case["model"]}), rel=1e-5), name
