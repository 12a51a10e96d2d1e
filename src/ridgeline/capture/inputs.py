"""What a step is called with: real tensors, meta tensors, or shapes with named dims and no memory at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgeline.dtypes import DType, dtype
from ridgeline.errors import CaptureError, nearest


@dataclass(frozen=True, slots=True)
class Dim:
    """A dim that gets its size from ``bindings`` at capture."""

    name: str


@dataclass(frozen=True, slots=True)
class Spec:
    """An input to be: shape, element type, and the one value integers and masks are filled with."""

    shape: tuple[int | Dim, ...]
    dtype: DType
    fill: int | None = None

    def bound(self, bindings: Mapping[str, int], where: str) -> tuple[int, ...]:
        """The shape with every named dim replaced by its size."""
        return tuple(self._size(dim, bindings, where) for dim in self.shape)

    def _size(self, dim: int | Dim, bindings: Mapping[str, int], where: str) -> int:
        if isinstance(dim, int):
            return dim
        if dim.name not in bindings:
            raise CaptureError(f"dim {dim.name!r} of input {where!r} has no size: pass bindings={{{dim.name!r}: …}}"
                               f"{nearest(dim.name, bindings)}")  # fmt: skip
        return int(bindings[dim.name])


def spec(shape: Sequence[int | str | Dim], dt: str | DType = "int64", *, fill: int | None = None) -> Spec:
    """An input described, not allocated: ``spec(("batch", 512), "int64")``; names are bound at capture."""
    return Spec(tuple(Dim(d) if isinstance(d, str) else d for d in shape), dtype(dt), fill)
