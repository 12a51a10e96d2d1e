"""Cause: host preprocessing."""

from __future__ import annotations

import itertools

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lab.planted.networks import Tokens
from lab.planted.programs import SHORT, Prefetch, fused_adamw, ints, patches
from lab.planted.registry import Program, Setting, case


class EventGrid:
    """What a camera of events saw, as a picture for each slice of time; on the host, or where the events are."""

    def __init__(self, batch: int, slices: int, height: int, width: int) -> None:
        self.shape = (batch, slices, height, width)

    def in_numpy(self, events: np.ndarray, into: Tensor) -> Tensor:
        batch, slices, height, width = self.shape
        grid = np.zeros(batch * slices * height * width, np.float32)
        which, t, y, x, sign = (events[i].astype(np.int64) for i in range(5))
        np.add.at(grid, ((which * slices + t) * height + y) * width + x, (2 * sign - 1).astype(np.float32))
        into.copy_(torch.from_numpy(grid).view(self.shape))
        return into

    def on_device(self, events: Tensor) -> Tensor:
        batch, slices, height, width = self.shape
        which, t, y, x, sign = events.long().unbind(0)
        grid = torch.zeros(batch * slices * height * width, device=events.device)
        grid.index_add_(0, ((which * slices + t) * height + y) * width + x, (2 * sign - 1).float())
        return grid.view(self.shape)

    def drawn(self, num: int, seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        highs = np.array([*self.shape, 2])[:, None]
        return (rng.random((5, num)) * highs).astype(np.int16)


@case("host preprocessing", "events are copied, and counted on the device by index_add_", suite="twenty-fifth", **SHORT)
def events_counted_in_numpy(s: Setting, fixed: bool) -> Program:
    """What a camera of events saw, counted for each pixel and slice of time before a network looks at it."""
    batch, slices, height, width = s.pick((24, 4, 240, 304), (2, 2, 16, 32))
    grid = EventGrid(batch, slices, height, width)
    seen = [grid.drawn(s.pick(400_000, 64), seed) for seed in range(3)]
    events, order = itertools.cycle([(s.pinned(torch.from_numpy(one)),) for one in seen]), itertools.cycle(seen)
    ahead = iter(Prefetch(s, events)) if fixed else None
    rooms = itertools.cycle([s.pinned(torch.zeros(grid.shape)) for _ in range(3)])
    model = s.place(lambda: Tokens(slices * 256, s.pick(1024, 16), s.pick(16, 2), s.pick(10, 1), 16))
    gestures, optimizer = ints(s, 16, batch), fused_adamw(model)

    def step() -> None:
        if ahead is not None:
            frames = grid.on_device(next(ahead)[0])
        else:
            frames = grid.in_numpy(next(order), next(rooms)).to(s.device, non_blocking=True)
        optimizer.zero_grad()
        F.cross_entropy(model(patches(frames.to(torch.bfloat16), 16)), gestures).backward()
        optimizer.step()

    return Program(step)
