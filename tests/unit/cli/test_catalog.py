"""`ridgeline devices`, `models`, `calibrate` and the front door."""

from __future__ import annotations

import json

import pytest

import ridgeline as rl
from ridgeline.models import models


@pytest.mark.parametrize(
    "argv",
    [("devices",), ("devices", "h200"), ("models",), ("models", "llama3-8b"), ("--help",), ("predict", "--help")],
)
@pytest.mark.parametrize("width", [80, 140])
def test_catalogs_fit_the_terminal(ridgeline, argv, width):
    said = ridgeline(*argv, width=width)
    assert said.code == 0
    assert max(len(line) for line in said.out.splitlines()) <= width


def test_every_device_is_listed_by_its_full_name(ridgeline):
    out = ridgeline("devices").out
    assert all(name in out for name in rl.devices())


def test_every_network_is_listed_by_its_full_name(ridgeline):
    out = ridgeline("models").out
    assert all(card.name in out for card in models())


def test_a_device_shows_basis_and_source_of_every_number(ridgeline):
    out = ridgeline("devices", "h200").out
    h200 = rl.device("h200")
    assert all(key in out for key in h200.numbers())
    joined = " ".join(out.split())
    assert all(" ".join(h200.provenance(key).source.split()) in joined for key in h200.numbers())


def test_catalogs_as_json(ridgeline):
    assert {d["name"] for d in json.loads(ridgeline("devices", "--json").out)["devices"]} == set(rl.devices())
    one = json.loads(ridgeline("devices", "h200 sms=160", "--json").out)
    assert one["parent"] == "h200" and one["numbers"]["num_cores"] == {
        "value": 160,
        "basis": "assumed",
        "source": "imagined: sms=160",
    }
    assert {m["name"] for m in json.loads(ridgeline("models", "--json").out)["models"]} == {
        card.name for card in models()
    }
    assert json.loads(ridgeline("models", "llama3-8b", "--json").out)["num_params"] == 8_030_261_248


def test_unknown_names_suggest_the_nearest(ridgeline):
    assert "did you mean 'h200'" in ridgeline("devices", "hh200").err
    assert "did you mean 'resnet50'" in ridgeline("models", "resnet5").err


def test_the_version_and_the_help(ridgeline):
    assert ridgeline("--version").out == f"ridgeline {rl.__version__}\n"
    assert "predict" in ridgeline().out


def test_calibrating_without_a_gpu_says_where_to_run_it(ridgeline, tmp_path):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    said = ridgeline("calibrate", "--out", str(tmp_path / "c"))
    assert said.code == 2
    assert "no CUDA device here" in said.err
    assert not (tmp_path / "c").exists()
