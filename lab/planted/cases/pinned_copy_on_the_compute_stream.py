"""Cause: pinned copy on the compute stream."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.planted.programs import TRIED, Prefetch, asked, bf16, tower, training
from lab.planted.registry import Program, Setting, case


@case("pinned copy on the compute stream", "copy the next batch on a side stream", suite="planted")
def pinned_copy_in_line(s: Setting, fixed: bool) -> Program:
    model, optimizer, batches = tower(s, 24576, 4096, 6)
    feed: Iterator[Any] = itertools.cycle([(s.pinned(x), s.pinned(y)) for x, y in batches])
    if fixed:
        return Program(training(model, optimizer, iter(Prefetch(s, feed))))
    return Program(training(model, optimizer, (tuple(t.to(s.device) for t in batch) for batch in feed)))


@case(
    "pinned copy on the compute stream",
    "copy the next shard on a stream of its own",
    suite="twenty-fourth",
    **TRIED | {"steps": 7},
)
def shards_scored_as_they_come(s: Setting, fixed: bool) -> Program:
    """The nearest of very many vectors, which lie in pinned memory in shards and come to the device one by one."""
    rows, dim, num = s.pick(65_536, 8), s.pick(1024, 16), s.pick(16_384, 4)
    shards = [(s.pinned(bf16(s, rows, dim).cpu()),) for _ in range(3)]
    queries = F.normalize(bf16(s, num, dim), dim=-1)
    endless: Iterator[Any] = itertools.cycle(shards)
    here = lambda shard: (shard[0].to(s.device, non_blocking=True),)
    feed = iter(Prefetch(s, endless)) if fixed else map(here, endless)

    def search() -> Tensor:
        best = torch.full((num,), -1e4, device=s.device, dtype=torch.bfloat16)
        for (shard,) in itertools.islice(feed, len(shards)):
            best = torch.maximum(best, (queries @ shard.t()).amax(1))
        return best

    return asked(search)
