"""Entry points of a source tree: where the package is on the path but not installed, PyTorch still finds our backend.

A GPU host often takes no installs. ``torch.compile(backend="ridgeline")`` looks names up among the entry points of
distributions, and importing the optimizer to register it would cost ``import ridgeline`` seconds; so the import
announces a distribution that has the one entry point, and nothing is loaded before somebody asks for it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXTS = {
    "METADATA": "Metadata-Version: 2.1\nName: ridgeline-source\nVersion: 0\n",
    "entry_points.txt": "[torch_dynamo_backends]\nridgeline = ridgeline.optimizer.backend:backend\n",
}


class SourceTree:
    """A finder of no modules and of one distribution."""

    @staticmethod
    def find_spec(*_: Any, **__: Any) -> None:
        return None

    @staticmethod
    def find_distributions(context: Any = None) -> Iterator[Any]:
        from importlib.metadata import Distribution

        class Source(Distribution):
            def read_text(self, filename: str) -> str | None:
                return TEXTS.get(filename)

            def locate_file(self, path: Any) -> Any:
                raise FileNotFoundError(f"{path}: a source tree lists no files")

        if getattr(context, "name", None) in (None, "ridgeline-source"):
            yield Source()


def announce() -> None:
    """Once a process."""
    if SourceTree not in sys.meta_path:
        sys.meta_path.append(SourceTree)
