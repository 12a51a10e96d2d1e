"""A micro-batch as the decoder takes it: sequences end to end, documents marked, this rank's part of the context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ridgeline.llm.model.loss import IGNORED

Array = NDArray[Any]


@dataclass(slots=True)
class MicroBatch:
    """Arrays of one micro-batch on the host; ``num_targets`` counts tokens that have a loss."""

    arrays: dict[str, Array]
    longest: int
    longest_key: int
    num_targets: int

    def padded(self, num_starts: int) -> dict[str, Array]:
        """The arrays with starts of empty documents behind the last, so that shapes repeat."""
        return {
            name: np.pad(array, (0, num_starts - len(array)), mode="edge") if name.endswith("starts") else array
            for name, array in self.arrays.items()
        }


def micro_batch(
    rows: Array, eos: int, *, document_mask: bool = True, context_rank: int = 0, context_size: int = 1
) -> MicroBatch:
    """Lay out sequences [B, length + 1]. A document ends behind ``eos``; what follows does not see it.

    With context parallelism each sequence is cut into 2 · ranks chunks; a rank has one from each end, which gives all
    ranks the same work under a causal mask.
    """
    num, length = rows.shape[0], rows.shape[1] - 1
    tokens, targets = rows[:, :-1], rows[:, 1:].astype(np.int64)
    opens = np.zeros((num, length), dtype=bool)
    opens[:, 0] = True
    if document_mask:
        opens[:, 1:] |= tokens[:, :-1] == eos
        targets = np.where(tokens == eos, IGNORED, targets)
    at = np.arange(length)
    first = np.maximum.accumulate(np.where(opens, at, 0), axis=1)  # where each token's document begins
    positions = at - first
    if context_size == 1:
        starts = np.append(np.flatnonzero(opens), num * length).astype(np.int32)
        arrays = {"x": tokens.reshape(-1), "positions": positions.reshape(-1), "starts": starts,
                  "targets": targets.reshape(-1)}  # fmt: skip
        return MicroBatch(arrays, length, length, int((targets != IGNORED).sum()))
    chunk = length // (2 * context_size)
    mine = np.concatenate(
        [np.arange(c * chunk, (c + 1) * chunk) for c in (context_rank, 2 * context_size - 1 - context_rank)]
    )
    # Where each token of the sequences lies once the ranks' tokens are gathered one rank after the other
    which = at // chunk
    owner = np.minimum(which, 2 * context_size - 1 - which)
    inside = at % chunk + np.where(which == owner, 0, chunk)
    gathered = (owner * num + np.arange(num)[:, None]) * 2 * chunk + inside
    starts_list, key_starts, keys = [0], [0], []
    for row in range(num):
        for c in (context_rank, 2 * context_size - 1 - context_rank):
            cuts = [c * chunk, *(i for i in range(c * chunk + 1, (c + 1) * chunk) if opens[row, i]), (c + 1) * chunk]
            for a, b in zip(cuts, cuts[1:], strict=False):
                keys.append(gathered[row, first[row, a] : b])
                starts_list.append(starts_list[-1] + b - a)
                key_starts.append(key_starts[-1] + len(keys[-1]))
    index = np.concatenate(keys)
    index = np.pad(index, (0, num * (2 * context_size + 1) * chunk - len(index)))  # the most there can be
    arrays = {
        "x": tokens[:, mine].reshape(-1), "positions": positions[:, mine].reshape(-1),
        "targets": targets[:, mine].reshape(-1), "starts": np.asarray(starts_list, dtype=np.int32),
        "key_starts": np.asarray(key_starts, dtype=np.int32), "key_index": index,
    }  # fmt: skip
    return MicroBatch(arrays, chunk, length, int((targets[:, mine] != IGNORED).sum()))


def stacked(batches: list[MicroBatch]) -> tuple[dict[str, torch.Tensor], int, int]:
    """All micro-batches of a step as tensors [micro-batches, …], and bounds of the longest document and keys of any."""
    most = max(len(b.arrays[name]) for b in batches for name in ("starts", "key_starts") if name in b.arrays)
    num_starts = 1 << max(2, (most - 1).bit_length())  # few distinct shapes: each is captured as a graph of its own
    padded = [b.padded(num_starts) for b in batches]
    arrays = {name: torch.from_numpy(np.stack([p[name] for p in padded])) for name in padded[0]}
    longest, longest_key = (max(getattr(b, name) for b in batches) for name in ("longest", "longest_key"))
    return arrays, 1 << (longest - 1).bit_length(), 1 << max(0, longest_key - 1).bit_length()
