"""The commands of the store: what verbs keep, what is shown beside it, what changed."""

from __future__ import annotations

import json

import pytest

from ridgeline.cli.app import run
from ridgeline.store.record import Metric, Record
from ridgeline.store.store import Store

MODEL = ["llama3-8b", "--mode", "decode", "--batch", "4"]


@pytest.fixture
def url(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_STORE", str(tmp_path / "s.db"))
    monkeypatch.setenv("COLUMNS", "120")
    return str(tmp_path / "s.db")


def test_predict_keeps_its_result_and_shows_a_measurement_beside_the_next(url, tmp_path, capsys):
    assert run(["predict", *MODEL]) == 0
    assert "stored: run " in capsys.readouterr().err
    measured = {"model": "llama3-8b", "mode": "decode", "batch": 4, "on": "h200", "step_s": 0.02}
    (tmp_path / "m.json").write_text(json.dumps([measured]))
    assert run(["store", "import", str(tmp_path / "m.json")]) == 0
    assert run(["predict", *MODEL, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out[out.index("{\n") :])["mode"] == "decode"
    assert "step_s: predicted" in err
    assert "measured 20 ms" in err
    with Store(url) as store:
        assert [r.kind for r in store.runs()] == ["predict", "measurement", "predict"]
        assert len({r.thing for r in store.runs()}) == 1


def test_without_a_store_nothing_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("RIDGELINE_STORE", raising=False)
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path / "home"))
    assert run(["predict", *MODEL, "--json"]) == 0
    assert "stored" not in capsys.readouterr().err
    assert not (tmp_path / "home").exists()


def test_history_finds_a_regression_and_fails(url, capsys):
    with Store(url) as store:
        for day in range(1, 21):
            step_s = (0.01 if day < 15 else 0.011) * (1 + 0.002 * (day % 3))
            metrics = (Metric(name="step_s", value=step_s), Metric(name="tokens_per_s", value=1 / step_s))
            store.add(Record(kind="profile", subject="train.py", measured=True, at=f"2026-01-{day:02}T00:00:00",
                             metrics=metrics, git="a", environment={}))  # fmt: skip
    assert run(["history"]) == 0
    assert "train.py" in capsys.readouterr().out
    assert run(["history", "train.py"]) == 1
    assert "REGRESSED: +1" in capsys.readouterr().out
    assert run(["history", "train.py", "--metric", "tokens_per_s", "--json"]) == 1, "fewer tokens a second are worse"
    assert json.loads(capsys.readouterr().out)["series"][0]["levels"][1]["start"] == 14
    assert run(["history", "train.py", "--max-regression", "15%"]) == 0
    assert run(["history", "trian.py"]) == 2
    assert "did you mean 'train.py'" in capsys.readouterr().err


def test_runs_are_compared_by_id_tag_and_subject(url, capsys):
    with Store(url) as store:
        for name, step_s in (("a", 0.01), ("b", 0.02)):
            metrics = (Metric(name="step_s", value=step_s),)
            store.add(Record(kind="profile", subject=name, measured=True, metrics=metrics))
        first = store.runs(subject="a")[0].id
    assert run(["store", "tag", first[:8], "main"]) == 0
    assert run(["compare", "main", "b"]) == 0
    assert "2.000×" in capsys.readouterr().out
    assert run(["compare", "main", "b", "--metric", "energy_j"]) == 2
    assert "not every run has 'energy_j'" in capsys.readouterr().err


def test_a_gate_takes_its_baseline_from_the_store(url, tmp_path, capsys):
    steady, slow = tmp_path / "steady.json", tmp_path / "slow.json"
    steady.write_text(json.dumps([[0.02, 0.0201, 0.0199, 0.02]] * 3))
    slow.write_text(json.dumps([[0.03, 0.0301, 0.0299, 0.03]] * 3))
    assert run(["gate", "--baseline", str(steady), "--runs", str(steady)]) == 0
    assert run(["gate", "--baseline", "store:steady.json", "--runs", str(slow)]) == 1
    assert "regression" in capsys.readouterr().out
    assert run(["gate", "--baseline", "store:nothing", "--runs", str(slow)]) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["store", "vacuum"], "no action 'vacuum'"), (["store", "import"], "say what to import"),
        (["store", "export"], "say where to"), (["compare", "a"], "two runs or more"),
        (["predict", *MODEL, "--store", "mysql://x/y"], "no store of the kind 'mysql'"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(url, words, said, capsys):
    assert run(words) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
