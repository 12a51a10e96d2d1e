"""Where the pieces of a tensor live: which dim each mesh axis splits, and how views carry that along."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from ridgeline.graph import TensorType

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """How one value is spread: the dims that context and tensor parallelism split, or a sum that is still owed.

    ``unit`` is the smallest piece along the tensor-parallel dim (a head's width). Tokens that live with their experts
    instead of their sequence are not at ``home``.
    """

    cp: int | None = None
    tp: int | None = None
    partial: bool = False
    unit: int = 1
    home: bool = True

    def shifted(self, by: int) -> Layout:
        """The same layout of a tensor with ``by`` more leading dims."""
        return replace(self, cp=None if self.cp is None else self.cp + by, tp=None if self.tp is None else self.tp + by)


WHOLE = Layout()


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes of the axes a layout may be split over."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sequence: bool = False  # norms and residuals split along the sequence by tensor-parallel ranks


def pieces(size: int, ways: int, unit: int = 1) -> int:
    """The largest share of ``size`` that one of ``ways`` ranks holds, in whole units."""
    units = max(1, size // unit)
    return -(-units // ways) * unit if size > 1 else size


def local_type(type_: TensorType, layout: Layout, mesh: Mesh) -> TensorType:
    """The part of a tensor that one rank holds."""
    shape = list(type_.shape)
    if layout.cp is not None:
        shape[layout.cp] = pieces(shape[layout.cp], mesh.cp)
    if layout.tp is not None:
        shape[layout.tp] = pieces(shape[layout.tp], mesh.tp, layout.unit)
    if not layout.home and len(shape) >= 2:  # an expert's ranks all see its tokens, each with its own columns
        shape[0] *= mesh.etp
        shape[-1] = pieces(shape[-1], mesh.etp)
    return TensorType(tuple(shape), type_.dtype, type_.layout)


def reshaped(old: Shape, new: Shape, dim: int | None, seq: int) -> int | None:
    """The dim of ``new`` that holds the outer part of ``dim`` of ``old``; tokens prefer the dim of length ``seq``."""
    if dim is None:
        return None
    for olds, news in _groups(old, new):
        if dim in olds:
            wide = [j for j in news if new[j] > 1]
            if not wide:
                return None
            exact = [j for j in wide if new[j] == old[dim]]
            tokens = [j for j in wide if new[j] == seq]
            return (exact or (tokens if len(olds) == 1 and old[dim] % seq == 0 else []) or wide)[0]
    return None


def _groups(old: Shape, new: Shape) -> list[tuple[list[int], list[int]]]:
    """Runs of dims of both shapes with equal products."""
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        olds, news = [i] if i < len(old) else [], [j] if j < len(new) else []
        left, right = old[i] if olds else 1, new[j] if news else 1
        i, j = i + len(olds), j + len(news)
        while left != right:
            if left < right and i < len(old):
                left, i = left * old[i], i + 1
                olds.append(i - 1)
            elif j < len(new):
                right, j = right * new[j], j + 1
                news.append(j - 1)
            else:
                break
        found.append((olds, news))
    return found


def permuted(old: Shape, new: Shape, dim: int | None) -> int | None:
    """Where ``dim`` went in a transpose known by its shapes; a swap of the two middle dims is tried first."""
    if dim is None:
        return None
    rank = len(old)
    swaps = [p for p in ((0, 2, 1, 3), (0, 1, 3, 2), (1, 0, 2), (0, 2, 1), (1, 0)) if len(p) == rank]
    for order in itertools.chain(swaps, itertools.permutations(range(rank)) if rank <= 6 else ()):
        if tuple(old[o] for o in order) == new:
            return order.index(dim)
    return None
