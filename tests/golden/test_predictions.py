"""Did predictions change? Every figure of a spread of cases against the stored one; a change is seen, then accepted.

Accept with `python tests/golden/test_predictions.py --write`, and say in the commit why the figures moved.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ridgeline.api import predict

GOLDEN = Path(__file__).with_name("predictions.json")
FIELDS = ("expected_s", "busy_s", "floor_s", "peak_bytes", "energy_j")
CASES: list[dict[str, Any]] = [
    {"model": "llama3-8b"},
    {"model": "llama3-8b", "batch": 8, "seq": 1024, "execution": "compiled"},
    {"model": "llama3-8b", "mode": "decode", "batch": 32, "kv": 4096, "execution": "cudagraph"},
    {"model": "llama3-8b", "mode": "train", "seq": 2048},
    {"model": "llama3-8b", "precision": "fp8", "on": "b200"},
    {"model": "llama3-70b", "mode": "train", "seq": 4096, "execution": "compiled"},
    {"model": "llama3-70b", "mode": "prefill", "on": "mi300x"},
    {"model": "llama3.1-405b"},
    {"model": "deepseek-v3", "mode": "decode", "batch": 64, "on": "gb200"},
    {"model": "mixtral-8x7b", "seq": 1024, "on": "h100-sxm"},
    {"model": "gpt2-xl", "mode": "train", "execution": "compiled", "on": "a100-sxm-80gb"},
    {"model": "mixtral-8x7b", "batch": 3, "seq": 333, "execution": "compiled"},
    {"model": "deepseek-v3", "batch": 5, "seq": 700},
    {"model": "qwen3-8b", "mode": "decode", "batch": 7, "kv": 901, "execution": "cudagraph"},
    {"model": "gpt-oss-20b", "mode": "train", "seq": 500},
    {"model": "gemma2-9b", "mode": "prefill", "batch": 2, "seq": 999, "execution": "compiled"},
    {"model": "bert-large", "batch": 32, "seq": 512},
    {"model": "bert-large", "mode": "train", "batch": 16, "on": "v100-sxm2-32gb"},
    {"model": "t5-large", "batch": 8, "execution": "compiled"},
    {"model": "mamba-2.8b", "seq": 4096},
    {"model": "vit-l16", "batch": 64, "on": "l40s"},
    {"model": "resnet50", "batch": 128},
    {"model": "resnet50", "mode": "train", "batch": 64, "execution": "compiled"},
    {"model": "convnext-b", "batch": 64, "on": "rtx-4090"},
    {"model": "sdxl-unet", "batch": 2},
    {"model": "sd3-medium", "mode": "train", "on": "gh200"},
    {"model": "whisper-large-v3", "batch": 8, "on": "l4"},
    {"model": "dlrm", "batch": 8192, "execution": "cudagraph"},
    {"model": "dlrm", "mode": "train", "batch": 4096},
    {"model": "graphsage"},
    {"model": "llama3-8b", "on": "h200 hbm_bandwidth=2x sms=160"},
    {"model": "bert-large", "on": "tpu-v5p"},
    {"model": "resnet50", "on": "grace"},
]


def case_name(case: dict[str, Any]) -> str:
    return " ".join(str(value) if key == "model" else f"{key}={value}" for key, value in case.items())


def figures(case: dict[str, Any]) -> dict[str, float]:
    p = predict(**case)
    return {name: getattr(p, name) for name in FIELDS}


@pytest.fixture(scope="module")
def golden() -> dict[str, dict[str, float]]:
    return json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_a_prediction_is_what_it_was(case: dict[str, Any], golden: dict[str, dict[str, float]]) -> None:
    stored, found = golden[case_name(case)], figures(case)
    moved = [
        f"{name} {stored[name]:.6g} → {found[name]:.6g} ({found[name] / stored[name] - 1:+.2%})"
        for name in FIELDS
        if found[name] != pytest.approx(stored[name], rel=1e-6)
    ]
    assert not moved, f"{'; '.join(moved)}. If meant: python tests/golden/test_predictions.py --write"


def test_the_stored_cases_are_these(golden: dict[str, dict[str, float]]) -> None:
    assert list(golden) == [case_name(case) for case in CASES]


def test_a_small_change_would_be_seen(golden: dict[str, dict[str, float]]) -> None:
    figure = next(iter(golden.values()))["busy_s"]
    assert figure * 1.00001 != pytest.approx(figure, rel=1e-6)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("python tests/golden/test_predictions.py --write   stores the predictions of this checkout")
    GOLDEN.write_text(json.dumps({case_name(case): figures(case) for case in CASES}, indent=1) + "\n")
