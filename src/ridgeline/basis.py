"""Where a number comes from; a sum takes the worst of its terms."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from ridgeline.errors import InputError, nearest


class Basis(IntEnum):
    """Ordered from most to least trustworthy, so that ``max`` is the worst."""

    MEASURED = 0
    FITTED = 1
    DATASHEET = 2
    ASSUMED = 3

    def __str__(self) -> str:
        return self.name.lower()

    @classmethod
    def parse(cls, text: str) -> Basis:
        key = text.strip().upper()
        if key not in cls.__members__:
            raise InputError(f"unknown basis {text!r}{nearest(text, map(str, cls))}")
        return cls[key]


def worst(bases: Iterable[Basis]) -> Basis:
    """The basis of a combination: no better than its weakest part; nothing combined is exact."""
    return max(bases, default=Basis.MEASURED)
