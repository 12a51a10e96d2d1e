"""Cause: pageable copy."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.planted.networks import ResidualLayer, Tokens
from lab.planted.programs import TRIED, Prefetch, asked, bf16, fused_adamw, patches, tower
from lab.planted.registry import Program, Setting, case


@case("pageable copy", "pin the batch and copy with non_blocking=True", suite="planted")
def pageable_copy(s: Setting, fixed: bool) -> Program:
    model, optimizer, batches = tower(s, 4096, 4096, 12)
    batches = [(s.pinned(x), s.pinned(y)) for x, y in batches] if fixed else batches
    feed = itertools.cycle(batches)

    def step() -> None:
        x, y = (t.to(s.device, non_blocking=fixed) for t in next(feed))
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case(
    "pageable copy",
    "pin what is read, and copy the next batch ahead with non_blocking=True",
    suite="twenty-fifth",
    **TRIED,
)
def replay_mapped_from_a_file(s: Setting, fixed: bool) -> Program:
    """What an agent saw lies in a file that is mapped into memory; each batch goes to the device from there."""
    shape = s.pick((3, 1024, 9, 84, 84), (3, 2, 9, 24, 24))
    file = tempfile.TemporaryFile()  # noqa: SIM115 (mapped while the program runs)
    replay = np.memmap(file, np.uint8, "w+", shape=shape)
    replay[:] = np.random.default_rng(0).integers(0, 255, shape, np.uint8)
    pinned: Iterator[Any] = itertools.cycle([(s.pinned(torch.from_numpy(np.array(one))),) for one in replay])
    ahead, turns = iter(Prefetch(s, pinned)) if fixed else None, itertools.cycle(range(3))
    critic = s.place(lambda: Tokens(9 * 144, s.pick(512, 16), s.pick(8, 2), s.pick(4, 1), 6))
    target, optimizer = bf16(s, shape[1], 6), fused_adamw(critic)

    def update() -> None:
        obs = next(ahead)[0] if ahead is not None else torch.from_numpy(replay[next(turns)]).to(s.device)
        q = critic(patches(obs.to(torch.bfloat16).div_(255), 12))
        F.mse_loss(q, target).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(update, close=file.close)


class DepthVit(nn.Module):
    """Frames of depth and brightness, seen in patches of 16, and one vector for each."""

    def __init__(self, channels: int, d: int, h: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(channels * 256, d)
        self.layers = nn.ModuleList(ResidualLayer(d, h) for _ in range(depth))

    def forward(self, frames: Tensor) -> Tensor:
        B, C, H, W = frames.shape
        patches = frames.view(B, C, H // 16, 16, W // 16, 16).permute(0, 2, 4, 1, 3, 5).reshape(B, -1, C * 256)
        x = self.embed(patches)
        for layer in self.layers:
            x = layer(x)
        return x.mean(1)


@case(
    "pageable copy",
    "pin the frames, and copy the next ones ahead with non_blocking=True",
    suite="twenty-fourth",
    **TRIED,
)
def depths_out_of_an_array(s: Setting, fixed: bool) -> Program:
    """Frames of a depth camera lie in arrays as they were read, and are described by a network."""
    frames, channels, high, wide = s.pick(32, 2), 2, s.pick(384, 16), s.pick(640, 32)
    rng = np.random.default_rng(8)
    clips = [rng.random((frames, channels, high, wide), dtype=np.float32) for _ in range(2)]
    model = s.place(lambda: DepthVit(channels, s.pick(768, 16), s.pick(12, 2), s.pick(8, 1))).eval()
    pinned: Iterator[Any] = itertools.cycle([(s.pinned(torch.from_numpy(clip)),) for clip in clips])
    ahead, order = iter(Prefetch(s, pinned)) if fixed else None, itertools.cycle(clips)

    def describe() -> Tensor:
        clip = next(ahead)[0] if ahead is not None else torch.as_tensor(next(order), device=s.device)
        return model(clip.to(torch.bfloat16))

    return asked(describe)
