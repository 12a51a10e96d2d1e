"""``ridgeline profile`` as typed."""

from __future__ import annotations

import json

import pytest

from ridgeline.cli.app import run

pytest.importorskip("torch")
SCRIPT = """
import sys, torch
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    net(torch.randn(2, 4)).sum().backward()
    optimizer.step()
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_json_has_steps_facts_and_ops_and_the_exit_code_is_the_scripts(script, tmp_path, capsys):
    out = tmp_path / "trace.json"
    code = run(["profile", "--out", str(out), "--steps", "2", "--warmup", "0", "--json", script, "20", "4"])
    document = json.loads(capsys.readouterr().out)
    assert code == 4 and out.exists()
    assert len(document["steps"]) == 2 and document["counted"] == "optimizer steps"
    assert document["facts"]["unprofiled_step_s"] > 0
    assert any(row["op"] == "aten::addmm" for row in document["ops"])


def test_the_table_names_ops_and_notes_say_what_recording_cost(script, tmp_path, capsys):
    out = str(tmp_path / "t.json")
    assert run(["profile", "--out", out, "--warmup", "0", script, "20", "0"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "3 steps recorded" in shown and "aten::" in shown and "overhead" in shown


def test_a_missing_script_is_one_line(capsys):
    assert run(["profile", "no_such.py"]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_the_scripts_own_failure_is_shown_and_returned(tmp_path, capsys):
    path = tmp_path / "broken.py"
    path.write_text("raise RuntimeError('mine')\n")
    assert run(["profile", "--out", str(tmp_path / "t.json"), str(path)]) == 1
    assert "RuntimeError: mine" in capsys.readouterr().err


def test_a_model_that_cannot_be_called_is_the_scripts_mistake(tmp_path, capsys):
    """It was a traceback of sixty lines through the search."""
    pytest.importorskip("torch")
    (tmp_path / "m.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(3, 3)\n")
    assert run(["optimize", f"{tmp_path / 'm.py'}:make", "--budget-s", "5"]) == 2
    said = capsys.readouterr().err
    assert "Linear.forward(input) cannot be called" in said and "returns (model, args, kwargs)" in said
    assert len([line for line in said.splitlines() if line.startswith("error:")]) == 1


def test_a_program_without_ops_prints_no_empty_table(tmp_path, monkeypatch, capsys):
    """Its title was broken into a column of letters."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.py").write_text("print('nothing')\n")
    assert run(["profile", "--no-power", "plain.py"]) == 0
    said = capsys.readouterr().out
    assert "1 step recorded" in said and "no op was recorded" in said and "time went" not in said
