"""`ridgeline serve` answers on one screen, as JSON, as files, and refuses politely."""

from __future__ import annotations

import json

import pytest

QUICK = ("serve", "llama3-8b", "--on", "h200*1", "--concurrency", "8", "--isl", "256", "--osl", "64")


@pytest.mark.parametrize("width", [80, 120])
def test_a_deployment_is_shown_on_one_screen(ridgeline, width):
    said = ridgeline(*QUICK, "--slo-ttft", "1", "--sweep", width=width)
    assert said.code == 0
    for word in ("TTFT", "TPOT", "p99", "tokens/s/user", "$/M output", "keep the SLO", "basis"):
        assert word in said.out
    assert max(len(line) for line in said.out.splitlines()) <= width


def test_json_holds_every_figure_in_si_units(ridgeline):
    found = json.loads(ridgeline(*QUICK, "--json").out)
    assert found["ttft_s"]["low"] < found["ttft_s"]["mean"] < found["ttft_s"]["high"]
    assert found["deployment"]["num_devices"] == 1 and found["basis"] in ("fitted", "assumed", "datasheet")
    low, high = found["intervals"]["usd_per_million_output"]
    assert low < found["usd_per_million_output"] < high
    assert found["num_requests"] == 80 and found["usd_per_million_output"] > 0


def test_report_and_timeline_are_written(ridgeline, tmp_path):
    page, trace = tmp_path / "a.html", tmp_path / "a.json"
    said = ridgeline(*QUICK, "--html", str(page), "--trace", str(trace))
    assert said.code == 0 and "capacity_tokens" in page.read_text() and "replica 0" in trace.read_text()


def test_a_search_prints_the_frontier(ridgeline, tmp_path):
    options = ("--search", "--slo-tpot", "0.05", "--isl", "256", "--osl", "64", "--tp", "1")
    said = ridgeline("serve", "llama3-8b", "--on", "h200*2", *options, "--html", str(tmp_path / "s.html"))
    assert said.code == 0 and "Cheapest" in said.out and (tmp_path / "s.html").exists()
    found = json.loads(ridgeline("serve", "llama3-8b", "--on", "h200*2", *options, "--json").out)
    assert found["best"]["keeps_slo"] and found["frontier"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--rate", "2"), "give one kind of load"),
        (("--engine", "vlm"), "did you mean 'vllm'"),
        (("--setting", "chunk"), "name=value"),
        (("--disagg", "two"), "PxN+DxM"),
        (("--tp", "3"), "do not divide"),
        (("--precision", "fp7"), "no precision 'fp7'"),
    ],
)
def test_mistakes_are_one_line_that_says_what_to_do(ridgeline, options, words):
    said = ridgeline(*QUICK, *options)
    assert said.code == 2 and words in said.err and len(said.err.strip().splitlines()) == 1
