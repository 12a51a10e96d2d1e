"""Are we right? Whole networks captured without a GPU beside their recordings from an H200."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("timm")

from ridgeline.api import predict
from ridgeline.cost.prediction import Prediction

NAMES = (
    "llama8b-8l-prefill-1x2048",
    "llama8b-8l-decode-32x1024",
    "bert-large-32x512",
    "vit-large-64",
    "dit-xl2-32",
    "resnet50-128-nhwc",
    "whisper-large-encoder-8",
    "dlrm-8192",
    "llama8b-4l-train-2x2048",
    "vit-base-train-64",
)
Compared = dict[str, tuple[dict[str, Any], Prediction, dict[str, float]]]


@pytest.fixture(scope="module")
def judges() -> Iterator[tuple[ModuleType, ModuleType]]:
    from lab.fit import recordings
    from lab.validate import models

    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield recordings, models
    finally:
        torch.set_default_dtype(dtype)


@pytest.fixture(scope="module")
def recorded(judges: tuple[ModuleType, ModuleType]) -> dict[str, Compared]:
    """Predicted over measured, by execution and workload."""
    recordings, validation = judges
    found: dict[str, Compared] = {"eager": {}, "compiled": {}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graphs = {name: validation.captured(name) for name in NAMES}
    for row in recordings.load_models("h200"):
        if row["name"] in graphs:
            p = predict(graphs[row["name"]], on="h200", execution=row["execution"])
            found[row["execution"]][row["name"]] = row, p, validation.compared(row, p)
    return found


@pytest.fixture
def compared(recorded: dict[str, Compared]) -> Compared:
    return recorded["eager"]


def mean_error(compared: Compared, column: str) -> float:
    found = {name: ratio[column] - 1.0 for name, (_, _, ratio) in compared.items()}
    for name, error in found.items():
        print(f"{name:28s} {column} {error:+.1%}")
    mean = sum(map(abs, found.values())) / len(found)
    print(f"{column}: mean absolute error {mean:.1%}")
    return mean


def test_busy_time_is_predicted(compared: Compared) -> None:
    assert mean_error(compared, "busy") <= 0.08


@pytest.mark.parametrize("name", NAMES)
def test_no_network_is_far_off(compared: Compared, name: str) -> None:
    row, p, ratio = compared[name]
    assert abs(ratio["busy"] - 1.0) <= 0.15, f"{p.busy_s:.4g} s predicted, {row['busy_s']:.4g} s measured"


def test_peak_memory_is_predicted(compared: Compared) -> None:
    assert mean_error(compared, "memory") <= 0.04


def test_power_is_predicted(compared: Compared) -> None:
    assert mean_error(compared, "power") <= 0.15


def test_wall_time_is_predicted(compared: Compared) -> None:
    assert mean_error(compared, "wall") <= 0.15


def test_no_network_beats_its_floor(compared: Compared) -> None:
    for row, p, _ in compared.values():
        assert row["busy_s"] > 0.98 * p.floor_s, row["name"]


def test_most_measurements_lie_in_their_intervals(compared: Compared) -> None:
    inside = [ratio["busy_inside"] for _, _, ratio in compared.values()]
    assert sum(inside) / len(inside) >= 0.75


def test_kernels_are_counted_nearly_as_recorded(compared: Compared) -> None:
    """Libraries add small ones of their own (workspace fills, split reductions), so that counts only nearly agree."""
    for row, p, ratio in compared.values():
        ratio["kernels"] = p.num_kernels / row["num_kernels"]
    assert mean_error(compared, "kernels") <= 0.15


def test_compiled_networks_are_predicted_from_the_same_capture(recorded: dict[str, Compared]) -> None:
    compiled = recorded["compiled"]
    assert len(compiled) >= 5
    assert mean_error(compiled, "busy") <= 0.08 and mean_error(compiled, "wall") <= 0.15
    assert all(abs(ratio["busy"] - 1.0) <= 0.15 for _, _, ratio in compiled.values())
