"""Published files kept beside the checkout, too large to be part of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_published(repo_dir: Path) -> Path:
    places = [Path(os.environ["RIDGELINE_SHARED"])] if "RIDGELINE_SHARED" in os.environ else []
    places += [repo_dir.parent / "shared", repo_dir.parent.parent / "shared"]
    found = next((place / "published" for place in places if (place / "published").is_dir()), None)
    if found is None:
        pytest.skip("no folder of published measurements beside the checkout")
    return found
