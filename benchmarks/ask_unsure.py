"""cuDNN's heuristic asked where it teaches most: layers as networks have them, or shapes that trees disagree about.

    python benchmarks/ask_unsure.py --lib FOLDER --layers --num 44000 --out FILE.jsonl.gz
    python benchmarks/ask_unsure.py --lib FOLDER --num 100000 --out FILE.jsonl.gz ANSWERS.jsonl.gz…

The second grows three trees from the answers there are (two of other halves, one that sees a part of the features at a
time), draws shapes as ``ask_cudnn.py`` does and asks for those that the three do not tell alike. Answers are written
in the form that ``fit_selection.py`` reads. Needs scikit-learn, here alone, and no GPU.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from ask_cudnn import H200, Cudnn, Question, draw, questions
from fit_selection import answers, shape_of, told_by_devices

from ridgeline.cost.time.conv.cudnn_choice import Shape, features, pool_of, text_of

BATCH = 3000
LEAST_ROWS = 20
"""Of fewer, halves have nothing to disagree about."""
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
IMAGES = (32, 64, 96, 112, 128, 160, 192, 224, 256, 288, 299, 320, 384, 448, 480, 512, 640, 800, 1024)
STEMS = ((3, 1, 1), (3, 2, 1), (7, 2, 3), (7, 1, 3), (5, 1, 2), (4, 4, 0), (2, 2, 0), (16, 16, 0), (14, 14, 0),
         (8, 8, 0), (32, 32, 0), (3, 2, 0), (3, 1, 0))  # fmt: skip
"""Filter, stride and padding of first layers."""
STEM_OUTPUTS = (16, 24, 32, 40, 48, 64, 64, 96, 128, 192, 384, 768, 1024)
CHANNELS = (16, 24, 32, 40, 48, 64, 72, 80, 96, 112, 120, 128, 144, 160, 192, 224, 240, 256, 288, 320, 384, 448, 480,
            512, 576, 640, 672, 728, 768, 832, 960, 1024, 1152, 1280, 1536, 1920, 2048)  # fmt: skip
MAPS = (4, 7, 8, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 72, 80, 96, 112, 128, 160)
FILTERS = {(3, 1): 46, (3, 2): 18, (1, 2): 8, (5, 1): 8, (5, 2): 5, (7, 1): 5, (2, 2): 5, (4, 2): 5}
PADDINGS = {2: 0, 4: 1}
MOST_ELEMENTS = 8e8


def layer(rng: random.Random) -> Question | None:
    """A layer with sizes that networks have; none for a draw that makes no sense."""
    shape = _stem(rng) if rng.random() < 0.3 else _inner(rng)
    elements = shape["n"] * shape["h"] * shape["w"] * max(shape["c"], shape["o"])
    if elements > MOST_ELEMENTS or shape["k"] > shape["h"] + 2 * shape["padding"]:
        return None
    shape["nhwc"] = rng.randint(0, 1)
    dtype = rng.choices(("bf16", "fp16"), (4, 1))[0]
    asked = questions({"kind": "conv2d", "dtype": dtype, "phase": "fwd", "shape": shape})[0]
    ops = ("fwd", "fwd", "dgrad", "wgrad", *(("wgrad",) if shape["c"] < 8 else ()))
    return replace(asked, op=rng.choice(ops)) if min(asked.y) > 0 else None


def _stem(rng: random.Random) -> dict[str, int]:
    k, stride, padding = rng.choice(STEMS)
    side, outputs = rng.choice(IMAGES), rng.choice(STEM_OUTPUTS)
    return {"n": rng.choice(BATCHES), "c": rng.choice((3, 3, 3, 1, 4)), "o": outputs, "h": side, "w": side, "k": k,
            "stride": stride, "groups": 1, "padding": padding}  # fmt: skip


def _inner(rng: random.Random) -> dict[str, int]:
    channels, side = rng.choice(CHANNELS), rng.choice(MAPS)
    k, stride = rng.choices(list(FILTERS), list(FILTERS.values()))[0]
    batch = rng.choice(BATCHES) if rng.random() < 0.8 else rng.randint(1, 300)
    return {"n": batch, "c": channels, "o": _outputs(rng, channels), "h": side, "w": side, "k": k, "stride": stride,
            "groups": 1, "padding": PADDINGS.get(k, k // 2)}  # fmt: skip


def _outputs(rng: random.Random, channels: int) -> int:
    if rng.random() < 0.45:
        return channels
    if rng.random() < 0.5:
        return rng.choice(CHANNELS)
    return min(2048, max(16, int(channels * rng.choice((0.25, 0.5, 2, 4, 6))) // 8 * 8))


def shape_asked(q: Question) -> Shape:
    return shape_of(q.op, q.dtype, q.x, q.w, q.y, q.stride, q.padding, q.last)


class Doubt:
    """Three trees of every pool of shapes, and whether they disagree about one."""

    def __init__(self, files: Sequence[Path], seed: int) -> None:
        pools = defaultdict(list)
        for shape, choice, described in answers(files):
            if not described:
                pools[pool_of(shape)].append((features(shape), text_of(choice)))
        self.trees = {name: _three(rows, seed) for name, rows in pools.items() if len(rows) >= LEAST_ROWS}

    def about(self, asked: Sequence[Question]) -> list[Question]:
        by_pool = defaultdict(list)
        for question in asked:
            shape = shape_asked(question)
            by_pool[pool_of(shape)].append((question, features(shape)))
        return [q for name, rows in by_pool.items() if name in self.trees for q in self._split(name, rows)]

    def _split(self, name: str, rows: list[tuple[Question, Any]]) -> Iterator[Question]:
        values = np.array([row for _, row in rows], np.float32)
        told = [tree.predict(values) for tree in self.trees[name]]
        for i, (question, _) in enumerate(rows):
            if told[0][i] != told[1][i] or told[0][i] != told[2][i]:
                yield question


def _three(rows: list[tuple[Any, str]], seed: int) -> list[Any]:
    from sklearn.tree import DecisionTreeClassifier

    values, labels = np.array([row for row, _ in rows], np.float32), np.array([label for _, label in rows])
    chance = np.random.RandomState(seed).rand(len(labels))
    parts = ((chance < 0.6, None), (chance > 0.4, None), (chance >= 0, 0.6))
    return [
        DecisionTreeClassifier(criterion="entropy", random_state=i, max_features=seen).fit(values[kept], labels[kept])
        for i, (kept, seen) in enumerate(parts)
    ]


def chosen(args: argparse.Namespace) -> Iterator[Question]:
    """What is asked, one after another, without end."""
    rng = random.Random(args.seed)
    doubt = None if args.layers else Doubt(args.answers, args.seed)
    while True:
        if doubt is None:
            drawn = layer(rng)
            yield from () if drawn is None else (drawn,)
            continue
        batch = [q for q in (draw(rng) for _ in range(BATCH)) if q is not None]
        yield from doubt.about([q for q in batch if not told_by_devices([q.op, q.dtype, q.x, q.w, q.y, q.stride])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answers", type=Path, nargs="*")
    parser.add_argument("--lib", type=Path, required=True, help="folder of libcudnn.so.9")
    parser.add_argument("--layers", action="store_true", help="layers as networks have them, whatever trees say")
    parser.add_argument("--num", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if not (args.layers or args.answers):
        parser.error("nothing to disagree about: give files of answers, or --layers")
    cudnn, count = Cudnn(args.lib, H200), 0
    with gzip.open(args.out, "wt") as file:
        for q in chosen(args):
            try:
                found = cudnn.ask(q, 1)
            except RuntimeError:  # what cuDNN refuses it takes no engine for
                continue
            told = [found[0].engine, list(found[0].knobs), found[0].fallback] if found else []
            row = [q.op, q.dtype, list(q.x), list(q.w), list(q.y), list(q.stride), list(q.padding), int(q.last), told]
            file.write(json.dumps(row) + "\n")
            count += 1
            if count >= args.num:
                break
    print(f"{count} answers in {args.out}")


if __name__ == "__main__":
    main()
