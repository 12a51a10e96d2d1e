"""Tiers by folder, skips that say why, and the few fixtures that every tier shares."""

from __future__ import annotations

import importlib.abc
import itertools
import os
import sys
import time
from collections.abc import Sequence
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
TIERS = ("unit", "property", "golden", "conformance", "gpu")

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a GPU host has what its image has, and the tests there need no hypothesis
    pass
else:
    # Examples are derived from the test, not drawn anew: a failure on one machine is a failure on all.
    settings.register_profile(
        "steady", derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("steady")


class _VisionOps(importlib.abc.MetaPathFinder):
    """Defines the two ops that torchvision expects of its binary, which a CPU build of torch cannot load."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            _define_vision_ops()
        return None


def _define_vision_ops() -> None:
    import torch

    if torch.cuda.is_available():
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(library)  # an op lives as long as the library object that defined it


_KEPT: list[object] = []
sys.meta_path.insert(0, _VisionOps())


def _tier(path: Path) -> str | None:
    parts = path.relative_to(ROOT / "tests").parts
    return parts[0] if parts[0] in TIERS else None


@cache
def _has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


PACE = "RIDGELINE_PACE"
EVERY = {"whole": 1, "usual": 4, "slow": 6}
"""Of the longest files a run of everything takes every n-th case: every second took 28 minutes of CPU and
16 by the clock, where 15 are allowed on two cores. ``RIDGELINE_PACE=whole`` runs all."""
USUAL_S = 0.12
"""CPU seconds of ``_loop`` up to which a machine is no slow one: where it took 0.14 to 0.19 everything took longer."""
WHOLE = 3000
"""Tests from which on a run is of everything; whoever names files gets all of them."""
LONGEST = frozenset(
    f"test_{name}.py"
    for name in (
        "training_graphs search_adversarial capture_models lane compiled graphed search traps snares contract pieces "
        "zoo_flops loops watch training_families hazards rewrites planted_causes adversarial_rewrites positions "
        "backend spelled_whole handed products chains narrowing paged_attention latent_attention recurrent ruses "
        "caches doubts constants substitution tables wiles sliding spellings rules chance"
    ).split()
)


def _loop() -> float:
    began, total = time.process_time(), 0
    for i in range(2_000_000):
        total += i * i % 7
    return time.process_time() - began


def pytest_configure(config: pytest.Config) -> None:
    """The first process looks how fast this machine is; workers are told."""
    if PACE not in os.environ:
        os.environ[PACE] = "usual" if min(_loop() for _ in range(3)) <= USUAL_S else "slow"


@pytest.hookimpl(tryfirst=True)  # before -m chooses by these marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (tier := _tier(item.path)) is not None:
            item.add_marker(tier)
    if len(items) > WHOLE and (every := EVERY[os.environ[PACE]]) > 1:
        _leave_out_most(items, every)


def _leave_out_most(items: list[pytest.Item], every: int) -> None:
    """Only every fourth or sixth case of the longest files runs, and the run says so."""
    left_out = pytest.mark.skip(reason=f"1 of {every} cases of a long file is run ({PACE}=whole runs all)")
    cases = [item for item in items if item.path.name in LONGEST and "[" in item.name]
    for _, file in itertools.groupby(cases, key=lambda item: item.path):
        for i, item in enumerate(file):
            if i % every:
                item.add_marker(left_out)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not _has_cuda():
        pytest.skip("no CUDA device")


@pytest.fixture(scope="session")
def repo_dir() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Measurements kept beside the checkout, too large to be part of it; tests that need them skip elsewhere."""
    given = os.environ.get("RIDGELINE_SHARED")
    for folder in [Path(given)] if given else [ROOT.parent / "shared", ROOT.parent.parent / "shared"]:
        if folder.is_dir():
            return folder
    pytest.skip("no folder of shared measurements beside the checkout")
