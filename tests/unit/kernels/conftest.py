"""Machine code is disassembled once, which takes as long as compiling it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="module")
def _disassembled_once() -> Iterator[None]:
    """Without the analysis that names the targets of indirect branches: a third less."""
    compiler = sys.modules.get("ridgeline.kernels.compiler")
    if compiler is None:
        yield
        return
    tool, kept = compiler._tool, dict[bytes, str]()

    def once(name: str, *args: str) -> str:
        if name != "nvdisasm" or args[:-1] != ("-c",):
            return tool(name, *args)
        code = Path(args[-1]).read_bytes()
        if code not in kept:
            kept[code] = tool(name, "-c", "-ndf", args[-1])
        return kept[code]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compiler, "_tool", once)
        yield
