"""Native libraries are loaded from private folders, and only if they hold what was built."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")

from ridgeline.engine.guards import native
from ridgeline.kernels.files import extension, install_library, is_installed, private_folder

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")


@needs_compiler
def test_a_library_that_was_built_loads_and_one_that_was_changed_is_built_again(tmp_path: Path) -> None:
    path = native.build(tmp_path / "cache")
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"x")
    with pytest.warns(UserWarning, match="not what was built"), pytest.raises(ImportError):
        extension("ridgeline_glance", path)
    assert native.build(tmp_path / "cache") == path and path.read_bytes() == content and is_installed(path)
    assert extension("ridgeline_glance", path).Glance


def test_a_folder_of_the_users_is_closed_to_others(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    assert private_folder(folder).stat().st_mode & 0o022 == 0


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_others_may_write_to_is_not_loaded(what: str, tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "cache")
    made, target = folder / "made.tmp", folder / "made.so"
    made.write_bytes(b"library")
    install_library(target, made)
    assert is_installed(target)
    (folder if what == "folder" else target).chmod(0o777)
    with pytest.warns(UserWarning, match="chmod go-w"), pytest.raises(ImportError, match="other users"):
        extension("made", target)


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    owner = folder.stat().st_uid
    if owner == 0:
        os.chown(folder, 12345, 12345)
    else:
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(PermissionError, match="RIDGELINE_KERNEL_CACHE"):
        private_folder(folder)
