"""Grows the trees of ``cost/time/conv/cudnn_choice.py`` from answers of cuDNN's heuristic and writes them.

The answers are those of ``record/cudnn_heuristic.py``.

    python -m lab.fit.cudnn_choice ANSWERS.jsonl.gz... [--share 0.9] [--most 6000] [--write]

Needs scikit-learn, here alone. ``--share`` of the answers is grown from and the rest judges; ``--most`` bounds the
leaves of a tree; without ``--write`` it only reports. ``--vote`` leaves a pool's own tree as it is and adds three that
vote beside it, one from all answers and two from parts of answers and features. The trees of weight gradients in
groups are those of ``data/recordings/h200/cudnn_groups.jsonl.gz --only wgrad. --share 1.0``; the answers behind the
others were not kept.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.cost.time.conv.cudnn_choice import FILE, LEAF, SLICED, VOTERS, VOTES, Shape, features, pool_of, text_of
from ridgeline.cost.time.conv.implicit_gemm import CLUSTERED, Choice
from ridgeline.resources import data_dir

SIDES = {0: (128, 128), 1: (128, 64), 2: (128, 32), 3: (256, 128), 4: (256, 64), 5: (64, 64), 6: (128, 256),
         7: (64, 128), 8: (64, 32), 9: (64, 256), 10: (64, 16), 11: (32, 16), 12: (32, 32), 14: (16, 64), 15: (128, 16),
         16: (256, 32), 18: (64, 192), 19: (128, 192), 20: (256, 96), 23: (32, 128)}  # fmt: skip
"""Tiles by the value of the tile-size knob, as the names of the kernels that ran say."""
DEPTHS, BLOCKS = {0: 32, 1: 64, 2: 16}, {2: 16, 3: 32, 4: 64}
"""Depths of a step by the knobs that give it to one kind of kernel and the other."""
TILE, STAGE_DEPTH, BLOCK_DEPTH, SPLIT, SLICE, WORKSPACE, DOWN, ACROSS = 2, 13, 5, 0, 17, 25, 27, 28
ENGINES = {
    "fwd": {"tma": (62, 67), "copy": (45, 46), "analytic": (27, 35), "warp": (22, 23, 38, 41), "plain": (47, 48),
            "vector": (28,), "indexed": (1,), "direct": (0,), "simt": (70,), "product": (58,), "fourier": (3,),
            "winograd": (6,)},
    "dgrad": {"tma": (67, 71), "tma_strided": (73, 76), "copy": (57, 58), "copy_strided": (64, 65),
              "analytic": (59, 60), "warp": (22, 28), "warp_strided": (40, 43, 46, 56), "direct": (0,),
              "scatter": (25, 2, 1, 3), "simt": (74,), "product": (63,), "fourier": (50,), "winograd": (7,)},
    "wgrad": {"tma": (65, 68, 63), "copy": (49, 50, 33, 34, 47, 48, 45), "warp": (9, 10, 23, 30),
              "plain": (37, 39, 40), "direct": (0,), "shared": (16, 19), "atomic": (20,), "indexed": (1,),
              "simt": (67,), "product": (62,), "fourier": (18,), "winograd": (17,), "stencil": (61,)},
}  # fmt: skip
"""What the engines' kernels are, by the names that ran for 6,000 recorded convolutions. In the trees of dense weight
gradients, grown before, 16 is told as direct and 19 as winograd."""
WAY = {op: {engine: way for way, engines in ways.items() for engine in engines} for op, ways in ENGINES.items()}
TILED = (*CLUSTERED, "copy", "copy_strided", "analytic", "warp", "warp_strided", "plain", "simt")
LIBRARY = ("product", "fourier", "winograd")
"""Ways that call cuBLAS."""
STEPS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128)
"""Slices told apart: finer ones change no time."""
SLOW, SURE = ("indexed", "direct"), 12
"""Ways that take many times as long as the usual ones, and the answers a leaf must hold to be believed on them."""
MOST_SLICES = 2500
"""Leaves of a tree that tells slices."""


def choice_of(op: str, engine: int, knobs: Iterable[tuple[int, int]], channels: int) -> Choice:
    """An engine and its knobs in the terms of the time model."""
    values = dict(knobs)
    way = WAY[op].get(engine, "vector")
    if way not in TILED:
        return Choice(way)
    if values.get(TILE) not in SIDES:
        return Choice("direct")  # an engine without tiles, taken twice in 80,000 answers
    rows, columns = SIDES[values[TILE]]
    depth = DEPTHS[values[STAGE_DEPTH]] if STAGE_DEPTH in values else BLOCKS.get(values.get(BLOCK_DEPTH, 0), 8)
    shared = way in CLUSTERED and values.get(WORKSPACE, 1) == 0
    return Choice(way, rows, columns, depth, values.get(DOWN, 1), values.get(ACROSS, 1), shared,
                  _slices(op, way, values, channels))  # fmt: skip


def _slices(op: str, way: str, values: dict[int, int], channels: int) -> int:
    """Slices of the inner loop: a number, or, outside weight gradients, the channels of each."""
    if way not in SLICED:
        return 1
    if SLICE in values and op != "wgrad":
        return max(1, -(-channels // max(1, values[SLICE])))
    return max(1, values.get(SLICE, values.get(SPLIT, 1)))


def shape_of(op: str, dtype: str, x: Sequence[int], w: Sequence[int], y: Sequence[int], stride: Sequence[int],
             padding: Sequence[int], last: int) -> Shape:  # fmt: skip
    return Shape(op, dtype, bool(last), x[0], x[1], w[0], x[1] // w[1], math.prod(w[2:]), w[-1], stride[-1],
                 padding[-1], math.prod(x[2:-1]), x[-1], math.prod(y[2:]))  # fmt: skip


def answers(files: Sequence[Path]) -> Iterator[tuple[Shape, Choice, bool]]:
    """Shapes, choices, and whether a device that was there might have told otherwise."""
    for file in files:
        present = False
        with gzip.open(file, "rt") as lines:
            for line in lines:
                row = json.loads(line)
                if isinstance(row, dict):
                    present = bool(row["present"])
                elif row[8]:
                    shape, (engine, knobs, _) = shape_of(*row[:8]), row[8]
                    choice = choice_of(shape.op, engine, knobs, shape.c if shape.op == "fwd" else shape.o)
                    grouped = present and shape.groups > 1
                    if choice.way not in LIBRARY or grouped or told_by_devices(row):  # else one answer of three hundred
                        yield shape, choice, not present and told_by_devices(row)


def told_by_devices(row: Sequence[Any]) -> bool:
    """Where an engine that calls cuBLAS may be taken, which a device that is only described does not offer."""
    _, dtype, x, w, _, stride, *_ = row
    dense = x[1] == w[1]
    return dense and (dtype in ("fp32", "tf32") or (max(w[2:]) == 1 and max(stride) == 1))


def _grown(values: np.ndarray, labels: np.ndarray, most: int | None) -> Any:
    try:
        from sklearn.tree import DecisionTreeClassifier
    except ImportError:
        raise SystemExit("growing trees needs scikit-learn: pip install scikit-learn") from None
    return DecisionTreeClassifier(criterion="entropy", max_leaf_nodes=most, random_state=0).fit(values, labels)


def _best(tree: Any, above: np.ndarray, node: int, wary: np.ndarray) -> int:
    """A leaf's answer; one that would be wrong by many times is taken only from a leaf that holds many answers."""
    best = int(np.argmax(tree.value[node][0]))
    if not wary[best] or tree.n_node_samples[node] >= SURE:
        return best
    while node >= 0:
        other = np.where(wary, 0.0, tree.value[node][0])
        if other.max() > 0.0:
            return int(np.argmax(other))
        node = above[node]
    return best


def _flat(grown: Any, numbers: Sequence[int], wary: Sequence[bool] = ()) -> dict[str, np.ndarray]:
    """The tree in walking order; leaves with the same answer under one node become one."""
    tree = grown.tree_
    careful = np.array(wary, bool) if len(wary) else np.zeros(len(numbers), bool)
    above = np.full(tree.node_count, -1)
    for children in (tree.children_left, tree.children_right):
        above[children[children >= 0]] = np.flatnonzero(children >= 0)
    leaf: dict[int, int] = {}
    for node in range(tree.node_count - 1, -1, -1):  # children come after their parent
        left, other = tree.children_left[node], tree.children_right[node]
        if left < 0:
            leaf[node] = numbers[_best(tree, above, node, careful)]
        elif left in leaf and leaf[left] == leaf.get(other):
            leaf[node] = leaf[left]
    feature, limits, stack = list[int](), list[float](), [0]
    while stack:
        node = stack.pop()
        feature.append(LEAF if node in leaf else int(tree.feature[node]))
        limits.append(float(leaf[node]) if node in leaf else float(np.float32(tree.threshold[node])))
        if node not in leaf:
            stack += [int(tree.children_right[node]), int(tree.children_left[node])]
    table = sorted({limit for kind, limit in zip(feature, limits, strict=True) if kind != LEAF})
    place = {limit: number for number, limit in enumerate(table)}
    value = [int(limit) if kind == LEAF else place[limit] for kind, limit in zip(feature, limits, strict=True)]
    return {"feature": np.array(feature, np.uint8), "value": np.array(value, np.uint16),
            "limits": np.array(table, np.float32)}  # fmt: skip


@dataclass
class Grown:
    """All trees, in the order in which they are written."""

    feature: list[np.ndarray] = field(default_factory=list)
    value: list[np.ndarray] = field(default_factory=list)
    limits: list[np.ndarray] = field(default_factory=list)
    places: dict[str, list[int]] = field(default_factory=dict)
    choices: dict[str, list[str]] = field(default_factory=dict)

    def put(self, name: str, flat: dict[str, np.ndarray]) -> None:
        nodes, limits = sum(map(len, self.feature)), sum(map(len, self.limits))
        self.places[name] = [nodes, nodes + len(flat["feature"]), limits, limits + len(flat["limits"])]
        self.feature.append(flat["feature"])
        self.value.append(flat["value"])
        self.limits.append(flat["limits"])

    def keep(self, path: Path) -> None:
        """Take over the trees of a file that were not grown anew."""
        with np.load(path, allow_pickle=False) as file:
            index, grown = json.loads(str(file["index"])), set(self.choices)
            for name, (first, last, first_limit, last_limit) in index["places"].items():
                if name.removesuffix(".slices") not in grown:
                    self.put(name, {"feature": file["feature"][first:last], "value": file["value"][first:last],
                                    "limits": file["limits"][first_limit:last_limit]})  # fmt: skip
            self.choices |= {name: known for name, known in index["choices"].items() if name not in self.choices}

    def write(self, path: Path) -> None:
        index = json.dumps({"places": self.places, "choices": self.choices}, separators=(",", ":"))
        np.savez_compressed(path, feature=np.concatenate(self.feature), value=np.concatenate(self.value),
                            limits=np.concatenate(self.limits), index=np.array(index))  # fmt: skip


def _certain(told: list[tuple[Shape, Choice]], described: list[tuple[Shape, Choice]]) -> list[tuple[Shape, Choice]]:
    """Answers for a described device at shapes where the devices' own say that no way through cuBLAS is taken."""
    if not told:
        return described
    values = np.array([features(shape) for shape, _ in told], np.float32)
    tree = _grown(values, np.array([choice.way for _, choice in told]), None)
    ways = tree.predict(np.array([features(shape) for shape, _ in described], np.float32))
    return [row for row, way in zip(described, ways, strict=True) if way not in LIBRARY]


def _pool(grown: Grown, pool: str, rows: list[tuple[Shape, Choice]], share: float, most: int) -> None:
    values = np.array([features(shape) for shape, _ in rows], np.float32)
    texts = [text_of(choice) for _, choice in rows]
    known = sorted(set(texts))
    numbers = {text: number for number, text in enumerate(known)}
    labels, cut = np.array([numbers[text] for text in texts]), int(len(rows) * share)
    tree = _grown(values[:cut], labels[:cut], most)
    slow = [known[k].split()[0] in SLOW and pool.endswith("dense") for k in tree.classes_]
    flat = _flat(tree, [int(k) for k in tree.classes_], slow)
    grown.put(pool, flat)
    grown.choices[pool] = known
    line = f"{pool:22s} {len(rows):7d} answers, {len(known):3d} choices, {len(flat['feature']):6d} nodes"
    if cut < len(rows):
        told = tree.predict(values[cut:])
        ways = np.array([text.split()[0] for text in known])
        line += f", right {np.mean(told == labels[cut:]):.1%}, way {np.mean(ways[told] == ways[labels[cut:]]):.1%}"
    print(line + _slice(grown, pool, rows, values, labels, cut), flush=True)


def _vote(grown: Grown, pool: str, rows: list[tuple[Shape, Choice]], most: int) -> None:
    """Trees that vote beside a pool's own: one from all answers, the others each from parts of them."""
    from sklearn.tree import DecisionTreeClassifier

    values = np.array([features(shape) for shape, _ in rows], np.float32)
    texts = [text_of(choice) for _, choice in rows]
    known = sorted(set(texts))
    numbers = {text: number for number, text in enumerate(known)}
    labels, chance = np.array([numbers[text] for text in texts]), np.random.RandomState(0)
    for number, ending in enumerate(VOTERS):
        part = chance.rand(len(rows)) < (PART if number else 1.0)
        tree = DecisionTreeClassifier(
            criterion="entropy", max_features=SEEN if number else None, max_leaf_nodes=most, random_state=number
        ).fit(values[part], labels[part])
        flat = _flat(tree, [int(k) for k in tree.classes_])
        grown.put(f"{pool}{ending}", flat)
        grown.choices[f"{pool}{ending}"] = known
        print(f"{pool}{ending:22s} {part.sum():7d} answers, {len(known):3d} choices, {len(flat['feature']):6d} nodes")


PART, SEEN = 0.75, 0.5
"""Shares of the answers and of the features, at each question, that a voter grows from."""


def _slice(grown: Grown, pool: str, rows: list[tuple[Shape, Choice]], values: np.ndarray, labels: np.ndarray,
           cut: int) -> str:  # fmt: skip
    """The tree that tells slices from the shape and the choice."""
    sliced = [i for i, (_, choice) in enumerate(rows) if choice.way in SLICED]
    counts = np.array([min(STEPS, key=lambda s: abs(math.log(s / rows[i][1].split))) for i in sliced])
    if len(set(counts)) < 2:
        return ""
    with_choice = np.column_stack([values[sliced], labels[sliced]])
    grow = np.array(sliced) < cut
    tree = _grown(with_choice[grow], counts[grow], MOST_SLICES)
    flat = _flat(tree, [int(k) for k in tree.classes_])
    grown.put(f"{pool}.slices", flat)
    if grow.all():
        return f", slices {len(flat['feature'])} nodes"
    off = np.abs(np.log(tree.predict(with_choice[~grow]) / counts[~grow]))
    return f", slices {len(flat['feature'])} nodes, off by {np.exp(off.mean()) - 1.0:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answers", type=Path, nargs="+")
    parser.add_argument("--share", type=float, default=0.9)
    parser.add_argument("--most", type=int, default=12000, help="leaves of a tree at most")
    parser.add_argument("--only", default="", help="pools whose names contain one of these; the file keeps the others")
    parser.add_argument("--vote", action="store_true", help="add voters, leave the pools' own trees")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    pools: dict[str, list[tuple[Shape, Choice]]] = defaultdict(list)
    described: dict[str, list[tuple[Shape, Choice]]] = defaultdict(list)
    for shape, choice, unsure in answers(args.answers):
        (described if unsure else pools)[pool_of(shape)].append((shape, choice))
    for pool, rows in described.items():
        if "fp32" in pool or not pool.endswith(".point"):  # most of the others are products: those lost weigh too much
            pools[pool] += _certain(pools[pool], rows)
    print(Counter({pool: len(rows) for pool, rows in pools.items()}))
    grown = Grown()
    for pool in sorted(pools):
        if any(part in pool for part in args.only.split(",")):
            if args.vote:
                _vote(grown, pool, pools[pool], args.most)
            else:
                _pool(grown, pool, pools[pool], args.share, args.most)
    if args.write:
        path = data_dir() / (VOTES if args.vote else FILE)
        if args.only and path.is_file():
            grown.keep(path)
        grown.write(path)
        print(f"{path.stat().st_size / 1e3:.0f} kB in {path.name}")


if __name__ == "__main__":
    main()
