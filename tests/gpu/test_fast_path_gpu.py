"""Recorded steps told at a glance on a GPU: what is changed behind their back is noticed there too."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "optimizer"))

import fast_path_changes
from fast_path_changes import CHANGES, Block, Scene

from ridgeline.engine.guards import native as glance
from ridgeline.engine.guards.dict_version import stillness

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("change", [None, *CHANGES], ids=lambda each: each.__name__[1:] if each else "nothing")
def test_a_step_is_told_at_a_glance_until_something_changes(change: Any, monkeypatch: Any) -> None:
    if glance.native() is None or not stillness.counts:
        pytest.skip("no C compiler here, or a Python that does not count changes of dictionaries")
    monkeypatch.setattr(Block, "gain", 2.0)
    monkeypatch.setattr(fast_path_changes, "SCALE", 1.0)
    scene = Scene("cuda")
    try:
        assert scene.glances() == 1
        if change is not None:
            with torch.device("cuda"):
                change(scene)
        scene.agree()
        scene.agree()
        scene.token = scene.token.clone()
        scene.agree()
    finally:
        fast_path_changes.WORDS.discard("b")
