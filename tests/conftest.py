"""Tiers by folder, skips that say why, and the few fixtures that every tier shares."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from ridgeline.capture.vision_ops import allow_unmatched_torchvision

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


allow_unmatched_torchvision()  # as `ridgeline` does before it runs a file


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


SLOW = frozenset(
    f"test_{name}.py"
    for name in (
        "training_graphs search_adversarial capture_models compiled graphed search contract pieces zoo_flops loops "
        "training_families injected_causes adversarial_rewrites backend products chains paged_attention "
        "latent_attention recurrent caches constants substitution tables sliding"
    ).split()
)
"""The longest files form the tier ``slow``: ``-m "not slow"`` leaves them out while one works, CI never does."""


@pytest.hookimpl(tryfirst=True)  # before -m chooses by these marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (tier := _tier(item.path)) is not None:
            item.add_marker(tier)
        if item.path.name in SLOW:
            item.add_marker("slow")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not _has_cuda():
        pytest.skip("no CUDA device")


@pytest.fixture(autouse=True, scope="module")
def _few_objects() -> None:
    """Recordings collect garbage, which takes half a second with all that libraries made; it is set aside."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def repo_dir() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def num_calls() -> Callable[[Callable[[], object]], int]:
    """Counts the functions that something calls: its cost, which no other machine and no load changes."""

    def count(run: Callable[[], object]) -> int:
        num = 0

        def note(frame: object, event: str, arg: object) -> None:
            nonlocal num
            num += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            run()
        finally:
            sys.setprofile(before)
        return num

    return count


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Measurements kept beside the checkout, too large to be part of it; tests that need them skip elsewhere."""
    given = os.environ.get("RIDGELINE_SHARED")
    for folder in [Path(given)] if given else [ROOT.parent / "shared", ROOT.parent.parent / "shared"]:
        if folder.is_dir():
            return folder
    pytest.skip("no folder of shared measurements beside the checkout")
