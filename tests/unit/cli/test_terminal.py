"""What every command has in common: quiet and verbose, JSON with a schema, names that cannot drive a terminal."""

from __future__ import annotations

import json

import pytest
from rich.text import Text

from ridgeline.cli import draw
from ridgeline.cli.app import run


def test_every_json_document_says_which_schema_it_has(ridgeline):
    for argv in (("devices",), ("devices", "h200"), ("models",), ("predict", "bert-large")):
        assert json.loads(ridgeline(*argv, "--json").out)["schema"] == f"ridgeline.{argv[0]}/1"


def test_quiet_leaves_results_and_errors_alone(ridgeline, tmp_path):
    argv = ("predict", "bert-large", "--html", str(tmp_path / "r.html"))
    assert "report:" in ridgeline(*argv).err
    quiet = ridgeline("--quiet", *argv)
    assert quiet.err == "" and "wall time" in quiet.out
    assert "unknown device" in ridgeline("-q", "predict", "bert-large", "--on", "h2000").err


def test_verbose_says_how_long_it_took_and_where_an_error_arose(ridgeline):
    assert "took " in ridgeline("-v", "devices").err
    assert "Traceback" in ridgeline("-v", "predict", "no-such-model").err
    assert "Traceback" not in ridgeline("predict", "no-such-model").err


def test_a_name_cannot_send_commands_to_the_terminal(capsys):
    table = draw.table("", ("name", "left"))
    table.add_row("layer\x1b[2J\x07.weight")
    draw.console().print(table)
    draw.console().print(Text("\x1b]0;title\x07"))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\x07" not in shown and "layer" in shown
    assert draw.printable("a\x1b[2Jb\n") == "a\\x1b[2Jb\n"


def test_shells_complete_commands(ridgeline):
    assert "--install-completion" in ridgeline("--help").out


@pytest.mark.parametrize(("words", "wanted"), [
    ("predict llama3-7", ["llama3-70b"]), ("predict bert-base --on mi300", ["mi300a", "mi300x"]),
    ("serve deepseek", ["deepseek-v3"]), ("devices h20", ["h20", "h200"]), ("pri", ["price"]),
])  # fmt: skip
def test_shells_complete_networks_and_devices(words, wanted, monkeypatch, capsys):
    line = f"ridgeline {words}"
    for name, value in {"_RIDGELINE_COMPLETE": "complete_bash", "COMP_WORDS": line,
                        "COMP_CWORD": str(len(words.split()))}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        run(())
    assert capsys.readouterr().out.split() == wanted


def test_a_library_that_a_command_turns_out_to_need_is_one_line(ridgeline, monkeypatch):
    def needs_torch(*given: object) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr("ridgeline.cli.catalog.show_devices", needs_torch)
    said = ridgeline("devices")
    assert said.code == 2 and said.err == "error: devices needs torch: pip install 'ridgeline[torch]'\n"
