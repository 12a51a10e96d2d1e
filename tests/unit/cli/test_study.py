"""``ridgeline study`` and ``ridgeline price`` as they are typed."""

from __future__ import annotations

import csv
import json

import pytest

from ridgeline.cli.app import run

DECODE = ["study", "llama3-8b", "--option", "mode=decode", "--vary", "batch=1,4", "--vary", "hbm_bandwidth=1x,2x"]


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_STORE", str(tmp_path / "s.db"))
    monkeypatch.setenv("COLUMNS", "150")
    return str(tmp_path / "s.db")


def test_a_study_prints_its_frontier_and_is_found_again(store, tmp_path, capsys):
    words = [*DECODE, "--minimize", "tpot", "--minimize", "usd_per_mtoken", "--name", "d"]
    assert run([*words, "--csv", str(tmp_path / "d.csv")]) == 0
    out = capsys.readouterr().out
    assert "d: 4 points, 4 feasible" in out
    assert "What matters" in out
    assert len(list(csv.DictReader((tmp_path / "d.csv").read_text().splitlines()))) == 4
    assert run(["study", "show", "d", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["feasible"] == 4
    assert run(["study", "why", "d", "0", "3"]) == 0
    assert "What differs" in capsys.readouterr().out
    assert run(["study", "list"]) == 0
    assert run(["study", "rm", "d"]) == 0
    assert run(["study", "show", "d"]) == 2


def test_another_study_of_the_same_axes_is_kept_beside_the_first_unless_it_is_named(store, capsys):
    assert run(DECODE) == 0
    assert run([*DECODE, "--minimize", "tpot"]) == 0
    assert run([*DECODE, "--minimize", "tpot"]) == 0
    capsys.readouterr()
    assert run(["study", "list", "--json"]) == 0
    names = {study["name"] for study in json.loads(capsys.readouterr().out)["studies"]}
    assert len(names) == 2
    assert "llama3-8b-batch-hbm_bandwidth" in names
    assert run([*DECODE, "--minimize", "tpot", "--name", "llama3-8b-batch-hbm_bandwidth"]) == 2
    assert "another spec" in capsys.readouterr().err


def test_a_spec_in_a_file_is_the_same_study(store, tmp_path, capsys):
    (tmp_path / "spec.toml").write_text(
        'model = "llama3-8b"\nminimize = "tpot"\nsubject_to = ["tpot<1ns"]\n[options]\nmode = "decode"\n'
        '[vary]\nsms = "100..140/20"\n'
    )
    assert run(["study", str(tmp_path / "spec.toml")]) == 3
    err = capsys.readouterr().err
    assert "all 3 points are infeasible: 3: not tpot<1ns" in err
    assert err.count("\n") == 1
    assert run(["study", "show", "spec", "--json"]) == 3
    (tmp_path / "spec.toml").write_text('model = "llama3-8b"\nminimise = "tpot"\n')
    assert run(["study", str(tmp_path / "spec.toml")]) == 2
    assert "no 'minimise'; did you mean 'minimize'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*DECODE, "--vary", "smss=1,2"], "no axis 'smss'; did you mean 'sms'"),
        (["study", "llama3-8b"], "nothing is varied"),
        ([*DECODE, "--vary", "batch"], "cannot read --vary"), ([*DECODE, "--minimize", "1 +"], "something is missing"),
        ([*DECODE, "--ray", "cluster.example:6379"], "no token is set"), (["study", "why", "x", "1"], "no study 'x'"),
        (["price", "h200", "--assume", "margins=1"], "no assumption 'margins'"), (["price", "h300"], "unknown device"),
        (["price", "h200", "--as", "gift"], "not priced as 'gift'"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(store, words, said, capsys, monkeypatch):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    assert run(words) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_price_has_intervals_and_sources(store, capsys):
    assert run(["price", "h200 sms=160", "--json"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out)
    low, high = found["intervals"]["usd_per_hour"]
    assert low < found["usd_per_hour"] < high
    assert all(row["source"] and row["date"] for row in found["matters"])
    assert run(["price", "h200"]) == 0
    assert "What matters for an hour" in capsys.readouterr().out


def test_a_study_without_a_frontier_says_why(store, capsys):
    words = ["study", "llama3-8b", "--vary", "hbm_bandwidth=1x..4x/4", "--vary", "batch=1,4", "--minimize", "tpot"]
    assert run(words) == 0
    out = capsys.readouterr().out
    assert "hbm_bandwidth has one level" in out
    assert "no point has tpot_s, the time of a decode step: --option mode=decode" in out
