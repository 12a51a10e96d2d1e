"""`ridgeline simulate` and `ridgeline plan` answer on one screen, as JSON and as files, and refuse politely."""

from __future__ import annotations

import json

import pytest

PLAN = ("--on", "h100-sxm*64", "--tp", "4", "--pp", "4", "--vp", "5", "--global-batch", "128", "--seq", "8192")


def test_the_answer_names_everything_that_was_asked(ridgeline):
    said = ridgeline("simulate", "llama3-70b", *PLAN, "--recompute", "full", "--tokens", "1T", width=140)
    assert said.code == 0
    for word in ("step", "90 % interval", "MFU", "HFU", "tokens/s", "bubble", "memory", "energy", "money", "basis",
                 "Where the time goes", "Memory of a rank", "days", "goodput", "failures", "MWh"):  # fmt: skip
        assert word in said.out, word


@pytest.mark.parametrize("width", [80, 100, 140])
def test_nothing_is_wider_than_the_terminal(ridgeline, width):
    said = ridgeline("simulate", "llama3-70b", *PLAN, "--tokens", "1T", width=width)
    assert max(len(line) for line in said.out.splitlines()) <= width


def test_json_is_complete_and_nothing_else(ridgeline):
    said = ridgeline("simulate", "llama3-70b", *PLAN, "--json", "--tokens", "300B")
    document = json.loads(said.out)
    assert document["num_devices"] == 64
    assert document["plan"]["dp"] == 4
    assert document["interval_s"][0] < document["step_s"] < document["interval_s"][1]
    assert sum(document["parts_s"].values()) == pytest.approx(document["step_s"])
    assert document["run"]["tokens"] == 3e11
    assert len(document["memory"]) == 4


def test_files_are_written(ridgeline, tmp_path):
    page, trace = tmp_path / "step.html", tmp_path / "step.json"
    said = ridgeline("simulate", "llama3-70b", *PLAN, "--html", str(page), "--trace", str(trace))
    assert said.code == 0
    text = page.read_text()
    assert "llama3-70b" in text
    assert "default-src 'none'" in text.replace("&#x27;", "'")
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--on", "h100-sxm*64", "--tp", "3"), ("tp=3 does not divide", "nearest legal plan")),
        (("--on", "h100-sxm*64", "--straggler", "0.5"), ("--straggler",)),
        (("--on", "h100-sxm*64", "--tokens", "lots"), ("15T",)),
        (("--on", "h100-sxm*64", "--stack", "megatronn"), ("unknown training stack",)),
        (("--on", "h101*64"), ("unknown device",)),
    ],
)
def test_mistakes_are_one_line(ridgeline, arguments, words):
    said = ridgeline("simulate", "llama3-8b", *arguments)
    assert said.code == 2
    assert said.err.count("\n") == 1
    for word in words:
        assert word in said.err


def test_a_straggler_is_simulated(ridgeline):
    times = [json.loads(ridgeline("simulate", "llama3-70b", *PLAN, "--json", *extra).out)["step_s"]
             for extra in ((), ("--straggler", "1.5", "--at-stage", "3"))]  # fmt: skip
    assert times[1] > 1.3 * times[0]


SEARCH = ("plan", "llama3-8b", "--on", "h100-sxm*16", "--global-batch", "64", "--seq", "4096", "--tp", "1", "--tp", "2",
          "--pp", "1", "--cp", "1", "--micro-batch", "1", "--recompute", "none", "--recompute", "full")  # fmt: skip


def test_plan_prints_the_best_why_and_what_matters(ridgeline):
    said = ridgeline(*SEARCH, width=150)
    assert said.code == 0
    for word in ("legal plans", "Best plans", "MFU", "The first spends", "What each choice of the first is worth"):
        assert word in said.out, word


def test_plan_as_json_and_html(ridgeline, tmp_path):
    page = tmp_path / "plans.html"
    said = ridgeline(*SEARCH, "--json", "--html", str(page))
    document = json.loads(said.out)
    assert document["best"][0]["step_s"] <= document["best"][-1]["step_s"]
    assert document["num_candidates"] > 3
    assert "frontier" in page.read_text()
