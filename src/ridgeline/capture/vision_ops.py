"""Lets timm and transformers be imported where torchvision was built for another torch.

PyPI's torchvision links against CUDA. Beside a CPU build of torch its binary does not load, its ops are missing, and
``import torchvision`` fails with ``operator torchvision::nms does not exist``; so do timm and parts of transformers.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


class _MissingVisionOps(importlib.abc.MetaPathFinder):
    """Looks at torchvision's binary just before torchvision is imported, and finds nothing itself."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            for folder in (spec.submodule_search_locations or ()) if spec else ():
                _define_unless_loaded(Path(folder))


def allow_unmatched_torchvision() -> None:
    """From now on ``import torchvision`` works beside a torch that its binary was not built for.

    The ops ``torchvision::nms`` and ``qnms`` are declared if the binary cannot be loaded; calling them is still an
    error, and everything else in timm and transformers runs. Costs nothing until torchvision is imported, and changes
    nothing where the binary loads. The command line does this before it runs a user's file.
    """
    if "torchvision" not in sys.modules and not any(isinstance(finder, _MissingVisionOps) for finder in sys.meta_path):
        sys.meta_path.insert(0, _MissingVisionOps())


_LIBRARIES: list[Any] = []
"""An op lives as long as the library object that declared it."""


def _define_unless_loaded(folder: Path) -> None:
    import torch

    for binary in folder.glob("_C*"):
        try:
            torch.ops.load_library(str(binary))
        except OSError:
            continue
    if hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(library)
