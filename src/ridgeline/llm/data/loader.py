"""Where sequences come from: token files, or text in JSONL and parquet shards that is tokenized on the way.

A global batch has slots, one sequence each. A loader answers for any of them, so that the sequences of a step do not
depend on how many ranks share them.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import InputError, MissingExtra
from ridgeline.llm.data.permutation import Permutation
from ridgeline.llm.data.tokens import TokenFile

Rows = NDArray[np.int64]


class Loader(Protocol):
    eos: int

    def rows(self, step: int, slots: Sequence[int]) -> Rows:
        """Sequences [slots, length + 1] of a step: inputs, and their targets one token on."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


class TokenLoader:
    """Windows of a token file in an order that seed and epoch decide. Its position is the step alone."""

    def __init__(self, file: TokenFile, length: int, global_batch: int, seed: int, shuffle: bool = True) -> None:
        self.file, self.length, self.global_batch = file, length, global_batch
        self.eos = file.info.eos
        self.num_windows = (len(file.tokens) - 1) // length
        if self.num_windows < 1:
            raise InputError(f"{file.path} has {len(file.tokens):,} tokens; a sequence needs {length + 1:,}")
        self._seed, self._shuffle = seed, shuffle
        self._order: tuple[int, Permutation] | None = None

    def rows(self, step: int, slots: Sequence[int]) -> Rows:
        found = np.empty((len(slots), self.length + 1), dtype=np.int64)
        for row, slot in zip(found, slots, strict=True):
            epoch, index = divmod(step * self.global_batch + slot, self.num_windows)
            if self._shuffle:
                if self._order is None or self._order[0] != epoch:
                    self._order = epoch, Permutation(self.num_windows, f"{self._seed}:{epoch}")
                index = self._order[1][index]
            row[:] = self.file.tokens[index * self.length : (index + 1) * self.length + 1]
        return found

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


class TextLoader:
    """Documents of JSONL or parquet shards. Each slot of the global batch reads a lane of its own.

    Shards are cut into units (ranges of bytes, row groups) whose order seed and epoch decide; lane i takes the units
    i, i + lanes, …. A lane's position is (epoch, unit, document, token) of the next token it gives: all a checkpoint
    needs, whatever was tokenized ahead.
    """

    def __init__(
        self,
        patterns: Sequence[str],
        encode: Callable[[str], Sequence[int]],
        eos: int,
        length: int,
        global_batch: int,
        seed: int,
        column: str = "text",
        unit_bytes: int = 1 << 20,
    ) -> None:
        self.eos, self.length, self.lanes = eos, length, global_batch
        self._encode, self._seed, self._column = encode, seed, column
        shards = sorted({name for pattern in patterns for name in glob.glob(pattern)})
        if not shards:
            raise InputError(f"no shards match {', '.join(patterns)}")
        self.units = [unit for shard in shards for unit in _units(shard, unit_bytes)]
        if len(self.units) < global_batch:
            raise InputError(
                f"{len(shards)} shards have {len(self.units)} pieces of {unit_bytes:,} bytes for {global_batch} sequences a "
                f"step: set data.unit_bytes to {max(1, unit_bytes * len(self.units) // global_batch // 2):,}, or tokenize "
                "the text with `ridgeline llm tokenize`"
            )
        self._positions = [[0, 0, 0, 0] for _ in range(self.lanes)]
        # What is left of each lane's document, with the place of its first token, and the documents behind it
        self._open: dict[int, tuple[tuple[list[int], Sequence[int]] | None, Iterator[Any]]] = {}

    def rows(self, step: int, slots: Sequence[int]) -> Rows:
        """The next sequence of each lane: steps have to be asked for in turn."""
        return np.stack([self._next(lane) for lane in slots])

    def _next(self, lane: int) -> Rows:
        left, documents = self._open.get(lane) or (None, self._documents(lane, self._positions[lane]))
        wanted, got = self.length + 1, []  # one token more than the lane moves on by: the last target
        while wanted:
            (epoch, unit, document, start), ids = left or next(documents)
            left = None
            got.append(np.asarray(ids[:wanted], dtype=np.int64))
            wanted -= len(got[-1])
        # The last token given is the first of the next sequence
        used = len(got[-1]) - 1
        self._positions[lane] = [epoch, unit, document, start + used]
        self._open[lane] = (self._positions[lane], ids[used:]), documents
        return np.concatenate(got)

    def _documents(self, lane: int, position: Sequence[int]) -> Iterator[tuple[list[int], Sequence[int]]]:
        """Documents of a lane from a position on, with the place of their first token."""
        epoch, ordinal, skipped, token = position
        while True:
            found = ordinal > 0
            order = Permutation(len(self.units), f"{self._seed}:{epoch}")
            while lane + ordinal * self.lanes < len(self.units):
                unit = self.units[order[lane + ordinal * self.lanes]]
                for number, text in enumerate(_texts(unit, self._column)):
                    found = True
                    if number >= skipped:
                        ids = [*self._encode(text), self.eos]
                        yield [epoch, ordinal, number, token], ids[token:]
                        token = 0
                ordinal, skipped = ordinal + 1, 0
            if not found:
                raise InputError(f"the pieces of text of lane {lane} hold no document: raise data.unit_bytes")
            epoch, ordinal = epoch + 1, 0

    def state(self) -> dict[str, Any]:
        return {"lanes": {str(lane): self._positions[lane] for lane in self._open}}

    def restore(self, state: dict[str, Any]) -> None:
        lanes = state["lanes"]
        if lanes and max(map(int, lanes)) >= self.lanes:
            raise InputError(f"the checkpoint read {max(map(int, lanes)) + 1} lanes of text and this run has {self.lanes}: "
                             "keep batch.sequences as it was")  # fmt: skip
        self._positions = [list(lanes.get(str(lane), (0, 0, 0, 0))) for lane in range(self.lanes)]
        self._open.clear()


Unit = tuple[str, int, int]


def _units(shard: str, unit_bytes: int) -> list[Unit]:
    if shard.endswith(".parquet"):
        return [(shard, group, -1) for group in range(_parquet(shard).num_row_groups)]
    size = Path(shard).stat().st_size
    return [(shard, start, min(start + unit_bytes, size)) for start in range(0, size, unit_bytes)]


def _texts(unit: Unit, column: str) -> Iterator[str]:
    """The documents of a unit; a line belongs to the range of bytes it starts in."""
    shard, start, stop = unit
    if stop < 0:
        file = _parquet(shard)
        if column not in file.schema_arrow.names:
            raise InputError(f"{shard} has no column {column!r}: it has {', '.join(file.schema_arrow.names)}")
        yield from (text for text in file.read_row_group(start, columns=[column])[column].to_pylist() if text)
        return
    with open(shard, "rb") as file:
        if start:
            file.seek(start - 1)
            file.readline()
        while file.tell() < stop and (line := file.readline()):
            if line.strip():
                try:
                    text = json.loads(line)[column]
                except (ValueError, KeyError, TypeError):
                    at = file.tell() - len(line)
                    raise InputError(f"{shard}: the line at byte {at:,} is no JSON object with {column!r}") from None
                if text:
                    yield text


def _parquet(shard: str) -> Any:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise MissingExtra("pyarrow", "fit", "reading parquet shards") from None
    return ParquetFile(shard)


def documents_of(patterns: Sequence[str], column: str = "text") -> Iterator[str]:
    """All documents of shards in order: what `ridgeline llm tokenize` reads."""
    shards = sorted({name for pattern in patterns for name in glob.glob(pattern)})
    if not shards:
        raise InputError(f"no shards match {', '.join(patterns)}")
    for shard in shards:
        if shard.endswith(".txt"):
            yield Path(shard).read_text()
        else:
            for unit in _units(shard, 1 << 30):
                yield from _texts(unit, column)
