"""A gate fails for slowdowns that are real, and for no other."""

from __future__ import annotations

import json

import numpy as np
import pytest
from stage import Stage, healthy

from ridgeline.errors import FindingError, InputError
from ridgeline.findings.gate import gate, student_cdf, student_quantile
from ridgeline.findings.regression import gate_runs, runs_of
from ridgeline.trace import write_chrome


def _runs(num: int, step_s: float, noise: float, seed: int, steps: int = 20) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    return [list(step_s * np.exp(noise * rng.normal()) * np.exp(0.01 * rng.normal(size=steps))) for _ in range(num)]


def test_student_is_the_known_distribution():
    assert student_cdf(0.0, 5) == pytest.approx(0.5)
    assert student_quantile(0.95, 4) == pytest.approx(2.1318, abs=1e-4)
    assert student_quantile(0.95, 1) == pytest.approx(6.3138, abs=1e-4)
    assert student_quantile(0.975, 1000) == pytest.approx(1.9623, abs=1e-4)
    assert student_cdf(-1.5, 7) == pytest.approx(1 - student_cdf(1.5, 7))


def test_a_real_slowdown_beyond_the_limit_is_a_regression():
    found = gate(_runs(5, 0.100, 0.005, 0), _runs(5, 0.108, 0.005, 1), 0.03)
    assert found.verdict == "regression" and found.failed
    assert found.low_frac < 0.08 < found.high_frac
    assert found.p_slower < 0.01


def test_a_slowdown_within_the_limit_passes():
    assert gate(_runs(5, 0.100, 0.003, 2), _runs(5, 0.101, 0.003, 3), 0.03).verdict == "ok"


def test_scatter_alone_does_not_fail_a_build():
    failed = [gate(_runs(3, 0.1, 0.05, 2 * s), _runs(3, 0.1, 0.05, 2 * s + 1), 0.03).failed for s in range(200)]
    assert np.mean(failed) < 0.08


def test_a_real_slowdown_is_seen_in_most_builds():
    failed = [gate(_runs(4, 0.1, 0.01, 2 * s), _runs(4, 0.107, 0.01, 2 * s + 1), 0.03).failed for s in range(100)]
    assert np.mean(failed) > 0.9


def test_much_scatter_is_said_to_be_inconclusive():
    found = gate([[0.1], [0.13], [0.08]], [[0.11], [0.15], [0.1]], 0.03)
    assert found.verdict == "inconclusive" and not found.failed
    assert any("more runs" in note for note in found.notes)


def test_one_odd_run_does_not_decide():
    baseline = _runs(5, 0.1, 0.003, 4)
    runs = [*_runs(4, 0.1, 0.003, 5), [0.3] * 20]
    assert not gate(baseline, runs, 0.03).failed


def test_a_faster_run_is_an_improvement():
    assert gate(_runs(5, 0.1, 0.003, 6), _runs(5, 0.08, 0.003, 7), 0.03).verdict == "improvement"


def test_nothing_to_compare_is_an_error():
    with pytest.raises(FindingError, match="at least one run"):
        gate([], [[0.1]], 0.03)
    with pytest.raises(FindingError, match="without steps"):
        gate([[]], [[0.1]], 0.03)


def _record(folder, name: str, slow: bool):
    stage = Stage()
    for _ in range(5):
        with stage.step():
            healthy(stage, 10)
            stage.kernel("cunn_SoftMaxForward<4>", 900.0 if slow else 300.0, op="aten::_softmax", module="model.head")
    folder.mkdir(exist_ok=True)
    write_chrome(stage.trace(), folder / f"{name}.json")


def test_the_root_cause_is_in_the_message(tmp_path):
    for i in range(3):
        _record(tmp_path / "base", f"run{i}", slow=False)
        _record(tmp_path / "new", f"run{i}", slow=True)
    found = gate_runs(tmp_path / "base", tmp_path / "new", 0.03)
    assert found.failed
    assert "softmax" in found.message and "slower kernels" in found.message
    assert found.causes[0].delta_ms == pytest.approx(0.6, rel=0.02)


def test_step_times_may_come_as_json(tmp_path):
    (tmp_path / "base.json").write_text(json.dumps([[0.1, 0.1, 0.1, 0.1], [0.101, 0.1, 0.1, 0.1]]))
    (tmp_path / "new.json").write_text(json.dumps({"a": [0.12, 0.12, 0.12, 0.12], "b": [0.121, 0.12, 0.12, 0.12]}))
    found = gate_runs(tmp_path / "base.json", tmp_path / "new.json", 0.03)
    assert found.failed and found.difference is None
    assert found.verdict.slowdown_frac == pytest.approx(0.2, abs=0.01)


def test_a_missing_folder_says_what_to_give(tmp_path):
    with pytest.raises(FindingError, match="folder of traces"):
        runs_of(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no trace"):
        runs_of(tmp_path / "empty")
