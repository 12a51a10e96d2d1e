"""`ridgeline predict` answers on one screen, as JSON, as files, and refuses politely."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

import ridgeline as rl
from ridgeline.cli.prediction_view import totals


@pytest.mark.parametrize("width", [80, 100, 118, 140, 200])
def test_nothing_is_wider_than_the_terminal(ridgeline, width):
    said = ridgeline("predict", "llama3-8b", "--on", "h200", width=width)
    assert said.code == 0
    assert max(len(line) for line in said.out.splitlines()) <= width


@pytest.mark.parametrize("width", [80, 120, 140])
@pytest.mark.parametrize("options", [("--mode", "train"), ("--mode", "decode"), ("--execution", "compiled")])
def test_numbers_are_never_cut(ridgeline, width, options):
    out = ridgeline("predict", "llama3-8b", *options, width=width).out
    tables = out[out.index("By op") :]
    assert not re.search(r"\d ?…(?! )|\d \S?…\s|× …|/…", tables), tables


def test_the_summary_says_everything_that_was_asked(ridgeline):
    out = ridgeline("predict", "llama3-8b", width=140).out
    for word in (
        "wall time",
        "90 % interval",
        "device busy",
        "floor",
        "speed of light",
        "host",
        "MFU",
        "tokens/s",
        "peak memory",
        "fits",
        "energy",
        "power",
        "money",
        "basis",
        "bound",
        "By op",
        "Longest",
    ):
        assert word in out, word


def test_json_is_json_alone_and_agrees_with_python(ridgeline):
    said = ridgeline("predict", "llama3-8b", "--seq", "512", "--json")
    document = json.loads(said.out)
    p = rl.predict("llama3-8b", on="h200", seq=512)
    assert document["expected_s"] == pytest.approx(p.expected_s)
    assert document["peak_bytes"] == p.peak_bytes
    assert len(document["rows"]) == len(p.rows())
    assert document["rate"]["unit"] == "tokens"
    assert document["rate"]["num"] == 512
    assert 0 < document["utilization"]["mfu_frac"] <= 1


def test_several_devices_are_compared(ridgeline):
    said = ridgeline("predict", "resnet50", "--on", "h100-sxm", "--on", "h200 hbm_bandwidth=2x", width=140)
    assert "Compared" in said.out
    assert said.out.count("wall time") >= 3
    several = json.loads(ridgeline("predict", "resnet50", "--on", "h200", "--on", "a100-sxm-80gb", "--json").out)
    assert [p["device"] for p in several["predictions"]] == ["h200", "a100-sxm-80gb"]


@pytest.mark.parametrize("by", ["op", "module", "phase", "bound", "kernel", "basis"])
def test_every_breakdown_adds_up_to_the_busy_time(by):
    p = rl.predict("bert-base", on="h200")
    assert sum(total.expected_s for total in totals(p.rows(), by)) == pytest.approx(p.busy_s)


def test_a_model_that_does_not_fit_is_predicted_and_says_by_how_much(ridgeline):
    said = ridgeline("predict", "llama3-405b", "--on", "h200", "--top", "0")
    assert said.code == 0
    assert "does not fit: misses" in said.out
    assert "what would make it fit" in " ".join(said.out.split())


def test_rates_know_what_a_step_yields(ridgeline):
    for argv, unit, num in (
        (("llama3-8b", "--mode", "decode", "--batch", "4"), "tokens", 4),
        (("resnet50", "--batch", "8"), "images", 8),
        (("dlrm", "--batch", "2048"), "samples", 2048),
    ):
        rate = json.loads(ridgeline("predict", *argv, "--json").out)["rate"]
        assert (rate["unit"], rate["num"]) == (unit, num)


def test_options_of_the_network_are_handed_on(ridgeline):
    assert ridgeline("predict", "bert-base", "--option", "head=mlm", "--top", "0").code == 0
    assert "has no option 'haed'" in ridgeline("predict", "bert-base", "--option", "haed=mlm").err
    assert "write key=value" in ridgeline("predict", "bert-base", "--option", "head").err
    assert "given twice" in ridgeline("predict", "bert-base", "--seq", "8", "--option", "seq=16").err


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (("predict", "llama3-9b"), "did you mean 'llama3-8b'"),
        (("predict", "llama3-8b", "--on", "h2000"), "did you mean"),
        (("predict", "llama3-8b", "--execution", "compile"), "did you mean 'compiled'"),
        (("predict", "llama3-8b", "--mode", "trian"), "did you mean 'train'"),
        (("predict", "llama3-8b", "--by", "modul"), "did you mean 'module'"),
        (("predict", "llama3-8b", "--bach", "3"), "--batch"),
        (("predict", "llama3-8b", "--image", "3"), "has no image"),
        (("predcit", "llama3-8b"), "predict"),
        (("predict",), "model"),
        (("predict", "missing.json"), "missing.json"),
        (("predict", "missing.py:make"), "no such file"),
        (("predict", "script.py"), "script.py:make"),
    ],
)
def test_a_mistake_is_one_line_with_a_cure_and_exit_code_two(ridgeline, argv, hint):
    said = ridgeline(*argv)
    assert said.code == 2
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert hint.lower() in said.err.lower()
    assert said.out == ""


def test_a_saved_graph_is_predicted_as_it_was(ridgeline, tmp_path):
    path = tmp_path / "bert.json.gz"
    rl.save(rl.build("bert-base", seq=128), path)
    document = json.loads(ridgeline("predict", str(path), "--json").out)
    assert document["expected_s"] == pytest.approx(rl.predict("bert-base", seq=128).expected_s)
    assert "has its sizes already" in ridgeline("predict", str(path), "--batch", "2").err


def test_a_script_may_return_a_graph_and_take_options(ridgeline, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "import ridgeline as rl\ndef make(batch=1):\n    return rl.build('bert-base', batch=batch, seq=128)\n"
    )
    document = json.loads(ridgeline("predict", f"{script}:make", "--batch", "4", "--json").out)
    assert document["expected_s"] == pytest.approx(rl.predict("bert-base", batch=4, seq=128).expected_s)
    assert "takes no 'seq'" in ridgeline("predict", f"{script}:make", "--seq", "4").err
    assert "did you mean 'make'" in ridgeline("predict", f"{script}:mak").err


def test_a_script_sees_its_own_name_as_the_command_line(ridgeline, tmp_path):
    script = tmp_path / "asks.py"
    script.write_text(
        "import argparse, sys\nimport ridgeline as rl\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--batch', type=int, default=3)\nasked, seen = parser.parse_args(), [sys.argv]\n"
        "def make():\n    seen.append(sys.argv)\n    return rl.build('resnet50', batch=asked.batch)\n"
    )
    before = list(sys.argv)
    said = ridgeline("predict", f"{script}:make", "--json")
    assert said.code == 0, said.err
    assert sys.modules["asks"].seen == [[str(script)], [str(script)]] and sys.argv == before


def test_an_error_in_a_script_names_its_line(ridgeline, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("def make():\n    return 1 / 0\n")
    said = ridgeline("predict", f"{script}:make")
    assert said.code == 2
    assert "broken.py:2" in said.err and "ZeroDivisionError" in said.err
    script.write_text("def make(:\n")
    assert "broken.py:1" in ridgeline("predict", f"{script}:make").err


def test_a_module_from_a_script_is_captured(ridgeline, tmp_path):
    pytest.importorskip("torch")
    script = tmp_path / "net.py"
    script.write_text(
        "import torch\n"
        "def make():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))\n"
        "    return model, (torch.zeros(8, 64),), {}\n"
    )
    infer = json.loads(ridgeline("predict", f"{script}:make", "--json").out)
    train = json.loads(ridgeline("predict", f"{script}:make", "--mode", "train", "--json").out)
    assert train["flops"] > 2 * infer["flops"] > 0
    assert "no mode 'decode'" in ridgeline("predict", f"{script}:make", "--mode", "decode").err


def test_files_are_written_where_asked(ridgeline, tmp_path):
    html, trace = tmp_path / "r.html", tmp_path / "t.json"
    said = ridgeline("predict", "bert-base", "--html", str(html), "--trace", str(trace), "--json")
    json.loads(said.out)
    assert html.read_text().startswith("<!doctype html>")
    lanes = {e["args"]["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "thread_name"}
    assert lanes == {"host", "device", "modules"}
    ridgeline("predict", "bert-base", "--on", "h200", "--on", "l4", "--html", str(html), "--top", "0")
    assert (tmp_path / "r-h200.html").exists() and (tmp_path / "r-l4.html").exists()
    assert "choose a folder" in ridgeline("predict", "bert-base", "--html", str(tmp_path / "no" / "r.html")).err


def test_names_are_never_read_as_markup(ridgeline, tmp_path):
    script = tmp_path / "odd.py"
    script.write_text(
        "import ridgeline as rl\n"
        "from dataclasses import replace\n"
        "def make():\n"
        "    g = rl.build('bert-base', seq=128)\n"
        "    items = tuple(replace(i, module='[red]x[/red]<b>') if hasattr(i, 'op') else i for i in g.items)\n"
        "    return replace(g, name='[bold]odd[/bold]', items=items)\n"
    )
    out = ridgeline("predict", f"{script}:make", "--by", "module", width=140).out
    assert "[bold]odd[/bold]" in out
    assert "[red]x[/red]<b>" in out


def test_the_largest_llm_is_predicted_from_a_cold_start_in_a_million_calls_and_without_a_framework():
    """Calls of functions, imports included: 704,000 of them take half a second on an idle machine."""
    script = (
        "import sys\n"
        "num = 0\n"
        "def note(frame, event, arg):\n"
        "    global num\n"
        "    num += event in ('call', 'c_call')\n"
        "sys.setprofile(note)\n"
        "from ridgeline.cli.app import run\n"
        "run(['predict', 'llama3-405b', '--on', 'h200'])\n"
        "sys.setprofile(None)\n"
        "found = [m for m in ('torch', 'transformers', 'scipy', 'pandas') if m in sys.modules]\n"
        "print(num, found, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    num, _, frameworks = done.stderr.strip().partition(" ")
    assert int(num) < 1_000_000 and frameworks == "[]"


def test_a_reader_that_stops_early_gets_no_traceback():
    command = f"{sys.executable} -m ridgeline predict llama3-8b --json | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "{\n"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("function", "said"), [
    ("bare", "Linear, called with the 0 arguments that bare() returns, failed at m.py: TypeError: … "
             "; let bare() return (model, args)"),
    ("raises", "Raises, called with the 1 argument that raises() returns, failed at m.py:5: KeyError: 'nothing'"),
])  # fmt: skip
def test_an_error_in_a_forward_is_one_line(ridgeline, tmp_path, monkeypatch, function, said):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.py").write_text(
        "import torch\n\nclass Raises(torch.nn.Module):\n    def forward(self, x):\n        raise KeyError('nothing')\n"
        "\ndef raises():\n    return Raises(), (torch.ones(2),)\n\ndef bare():\n    return torch.nn.Linear(2, 2)\n"
    )
    found = ridgeline("predict", f"m.py:{function}")
    assert found.code == 2 and found.err.count("\n") == 1
    assert all(part in found.err for part in said.split(" … ")), found.err
