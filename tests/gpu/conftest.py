"""Kernels of a file of tests, compiled before the first of them."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="module")
def packed(request, tmp_path_factory):
    """What the file's ``wanted_variants`` names is compiled first, by all cores, unless a pack has it."""
    from ridgeline.kernels import pack

    wanted = request.module.wanted_variants()
    with pytest.MonkeyPatch.context() as patch:
        if any(pack.find(variant) is None for variant in wanted):
            patch.setenv("RIDGELINE_KERNEL_PACK", str(tmp_path_factory.mktemp("pack")))
            pack.write(pack.pack_folder(), wanted, jobs=max(1, (os.cpu_count() or 2) - 2))
        yield
