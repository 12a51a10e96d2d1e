"""What every command has in common: quiet and verbose, JSON with a schema, names that cannot drive a terminal."""

from __future__ import annotations

import json

from rich.text import Text

from ridgeline.cli import draw


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
