"""What cuDNN takes for a convolution: learned from a few hundred thousand answers of its own heuristic.

The heuristic behaves like decision trees over the sizes of the problem and what they leave over when divided by tile
sides; ``lab/fit/cudnn_choice.py`` grows trees over such features from its answers, which cuDNN also gives where
there is no GPU (``lab/record/cudnn_heuristic.py``). They are of cuDNN 9.19 on a Hopper chip with 132 SMs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np

from ridgeline.cost.time.conv.implicit_gemm import Choice
from ridgeline.resources import data_dir

FILE, VOTES = "selection.npz", "votes.npz"
"""Where trees are kept, and those that vote beside them, which only convolutions need."""
LEAF = 255
"""Feature number of a leaf; its ``right`` is then the number of the answer."""
_TILES = ((64, 64), (128, 64), (64, 128), (128, 128), (256, 64), (256, 128), (128, 256), (128, 32))
_SMS = 132


@dataclass(frozen=True, slots=True)
class Shape:
    """A convolution's sizes; ``op`` is fwd, dgrad or wgrad, of ``dtype`` half (either kind), tf32 or fp32."""

    op: str
    dtype: str
    last: bool
    n: int
    c: int
    o: int
    groups: int
    taps: int
    side: int
    stride: int
    pad: int
    height: int
    width: int
    out_px: int


def _left(value: int, sides: Sequence[int]) -> list[float]:
    return [float(value % side) for side in sides]


def features(s: Shape) -> list[float]:
    """Sizes, products of sizes, what is left over in tiles, and how full tiles and waves are."""
    wide, tall, in_px = s.c // s.groups, s.o // s.groups, s.height * s.width
    rows_in, rows_out, deep, high = s.n * in_px, s.n * s.out_px, wide * s.taps, tall * s.taps
    rows, columns = {"fwd": (rows_out, tall), "dgrad": (rows_in, wide), "wgrad": (tall, deep)}[s.op]
    found = [float(s.dtype == "fp16"), float(s.last), s.n, s.c, s.o, s.groups, s.side, s.stride, s.pad, s.height,
             s.width, in_px, s.out_px, rows_in, rows_out, wide, tall, deep, high, rows_out * tall, rows_in * wide,
             rows_out * tall * deep, rows / columns, rows_out / deep, s.n * s.height]  # fmt: skip
    found += _left(rows_in, (32, 64, 128, 256)) + _left(rows_out, (32, 64, 128, 256))
    found += _left(wide, (8, 16, 32, 64, 128, 256)) + _left(tall, (8, 16, 32, 64, 128, 256))
    found += _left(deep, (16, 32, 64, 128, 256)) + _left(high, (16, 32, 64, 128, 256))
    for down, across in _TILES:
        tiles = -(-rows // down) * -(-columns // across)
        found += [tiles, tiles / (-(-tiles // _SMS) * _SMS), rows * columns / (tiles * down * across)]
    return found


@dataclass(frozen=True, slots=True)
class Tree:
    """A decision tree in the order it is walked: a node's left child follows it, its right one is numbered."""

    feature: tuple[int, ...]
    limit: tuple[float, ...]
    right: tuple[int, ...]

    def answer(self, values: Sequence[float]) -> int:
        at, feature, limit, right = 0, self.feature, self.limit, self.right
        while feature[at] != LEAF:
            at = at + 1 if values[feature[at]] <= limit[at] else right[at]
        return right[at]


@dataclass(frozen=True, slots=True)
class Selector:
    """One tree of a pass of one type: which choice, and into how many slices where the choice can be sliced."""

    tree: Tree
    choices: tuple[Choice, ...]
    slices: Tree | None


@dataclass(frozen=True, slots=True)
class Forest:
    """The file: all trees' nodes one after another, where each begins and ends, and what the answers' numbers mean."""

    feature: np.ndarray
    value: np.ndarray
    limits: np.ndarray
    places: dict[str, list[int]]
    choices: dict[str, list[str]]

    def tree(self, name: str) -> Tree | None:
        """A tree from its nodes in walking order: a limit's number, or a leaf's answer, for each."""
        if name not in self.places:
            return None
        first, last, first_limit, last_limit = self.places[name]
        feature, value = self.feature[first:last].tolist(), self.value[first:last].tolist()
        table = self.limits[first_limit:last_limit].astype(float).tolist()
        limit, right, open_nodes = [0.0] * len(feature), [0] * len(feature), list[int]()
        for at, kind in enumerate(feature):
            if kind != LEAF:
                limit[at] = table[value[at]]
                open_nodes.append(at)
                continue
            right[at] = value[at]
            if open_nodes:
                right[open_nodes.pop()] = at + 1
        return Tree(tuple(feature), tuple(limit), tuple(right))


@cache
def forest(name: str = FILE) -> Forest:
    """All trees of libraries' choices in a file."""
    with np.load(data_dir() / name, allow_pickle=False) as file:
        index = json.loads(str(file["index"]))
        return Forest(file["feature"], file["value"], file["limits"], index["places"], index["choices"])


def pool_of(s: Shape) -> str:
    """Trees are grown apart by pass, type and whether there are groups, of one channel or more, or one tap alone."""
    kind = s.dtype if s.dtype in ("tf32", "fp32") else "half"
    if s.groups > 1:
        return f"{s.op}.{kind}.{'depth' if s.groups == s.c else 'groups'}"
    return f"{s.op}.{kind}.{'point' if s.taps == 1 and s.stride == 1 else 'dense'}"


VOTERS = ("~2", "~3", "~4")
"""Endings of the names of trees that vote: where one is often wrong, others grown from parts of the answers do."""


@cache
def _selectors(pool: str) -> tuple[Selector, ...]:
    files = ((forest(), pool), *((forest(VOTES), f"{pool}{ending}") for ending in VOTERS))
    slices = forest().tree(f"{pool}.slices")
    return tuple(
        Selector(tree, tuple(choice_of(text) for text in known.choices[name]), slices)
        for known, name in files
        if (tree := known.tree(name)) is not None
    )


def choice_of(text: str) -> Choice:
    """``"tma 128 128 64 4 2 1"`` → the choice: way, tile, cluster, whether a last wave may be shared."""
    way, *numbers = text.split()
    rows, columns, depth, down, across, shared = (int(number) for number in numbers)
    return Choice(way, rows, columns, depth, down, across, bool(shared))


def text_of(choice: Choice) -> str:
    sizes = (choice.rows, choice.columns, choice.depth, choice.cluster_rows, choice.cluster_columns, int(choice.shared))
    return " ".join((choice.way, *map(str, sizes)))


SLICED = ("copy", "warp", "warp_strided", "plain")


@lru_cache(maxsize=4096)
def choose(s: Shape) -> tuple[Choice, ...]:
    """What the library takes, as each tree of the pool tells it; none for a pass that nothing was learned of."""
    selectors = _selectors(pool_of(s))
    if not selectors:
        return ()
    values, first = features(s), selectors[0].choices
    return tuple(_sliced(selector.choices[selector.tree.answer(values)], first, selector.slices, values)
                 for selector in selectors)  # fmt: skip


def _sliced(choice: Choice, numbered: tuple[Choice, ...], slices: Tree | None, values: list[float]) -> Choice:
    """The choice with its slices, which a tree tells from the number that the choice has in the first tree."""
    if slices is None or choice.way not in SLICED or choice not in numbered:
        return choice
    return replace(choice, split=slices.answer([*values, numbered.index(choice)]))
