"""Cause: data loader."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lab.planted.networks import ResidualLayer, Tokens
from lab.planted.programs import LOADED, end_workers, fused_adamw, patches, photos
from lab.planted.registry import Program, Setting, case


@case("data loader", "num_workers=0 → 6", suite="planted", rounds=1, warmup=14, steps=18, planted_steps=15)
def loader_no_workers(s: Setting, fixed: bool) -> Program:
    return photos(s, 6 if fixed else 0)


@case("data loader", "num_workers=1 → 6", suite="planted", rounds=1, warmup=14, steps=18)
def loader_one_worker(s: Setting, fixed: bool) -> Program:
    return photos(s, 6 if fixed else 1)


class Sketches(Dataset[tuple[Tensor, int]]):
    """Drawings as strokes of a pen, put on a canvas point by point."""

    def __init__(self, side: int, strokes: int, points: int, length: int = 1_000_000) -> None:
        self.side, self.strokes, self.points, self.length = side, strokes, points, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        rng = np.random.default_rng(index)
        canvas = np.zeros((self.side, self.side), np.float32)
        along = np.linspace(0, 1, self.points)
        for _ in range(self.strokes):
            begin, bend, end = rng.uniform(0, self.side - 1, (3, 2))
            path = np.outer((1 - along) ** 2, begin) + np.outer(2 * along * (1 - along), bend) + np.outer(along**2, end)
            rows, columns = np.rint(path).astype(np.int64).T
            np.add.at(canvas, (rows, columns), 32.0)
        return torch.from_numpy(np.minimum(canvas, 255).astype(np.uint8)), index % 340


@case("data loader", "num_workers=2 → 12", suite="twenty-fifth", **LOADED)
def sketches_by_two_workers(s: Setting, fixed: bool) -> Program:
    """Drawings told apart, put on a canvas stroke by stroke by two workers."""
    side, batch = s.pick(128, 16), s.pick(128, 2)
    data = Sketches(side, s.pick(14, 2), s.pick(160, 8))
    loader = DataLoader(
        data, batch_size=batch, num_workers=s.pick(12 if fixed else 2, 1), pin_memory=s.cuda, persistent_workers=True
    )
    it: Any = iter(loader)
    net = s.place(lambda: Tokens(64, s.pick(512, 16), s.pick(8, 2), s.pick(6, 1), 340))
    opt = fused_adamw(net)

    def step() -> None:
        canvas, label = next(it)
        canvas = canvas.to(s.device, non_blocking=True).to(torch.bfloat16).div_(255)
        loss = F.cross_entropy(net(patches(canvas[:, None], 8)), label.to(s.device, non_blocking=True))
        opt.zero_grad()
        loss.backward()
        opt.step()

    return Program(step, close=lambda: end_workers(it))


class CloudPairs(Dataset[tuple[Tensor, Tensor]]):
    """Two views of each of many clouds of points: cut near a place, turned, squeezed and shaken."""

    def __init__(self, points: int, kept: int, length: int = 1_000_000) -> None:
        self.clouds = np.random.default_rng(3).standard_normal((32, points, 3)).astype(np.float32)
        self.kept, self.length = kept, length

    def __len__(self) -> int:
        return self.length

    def view(self, cloud: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        center = cloud[rng.integers(len(cloud))]
        near = np.argpartition(((cloud - center) ** 2).sum(1), self.kept)[: self.kept]
        a = rng.uniform(0, 2 * np.pi)
        turn = np.array([[np.cos(a), -np.sin(a), 0], [np.sin(a), np.cos(a), 0], [0, 0, 1]], np.float32)
        cut = (cloud[near] - center) @ turn * rng.uniform(0.8, 1.25, 3).astype(np.float32)
        return (cut + 0.01 * rng.standard_normal(cut.shape)).astype(np.float32)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        rng = np.random.default_rng(i)
        cloud = self.clouds[i % 32]
        return torch.from_numpy(self.view(cloud, rng)), torch.from_numpy(self.view(cloud, rng))


class CloudEncoder(nn.Module):
    """Points in groups of 32 as tokens, and one vector for the whole cloud."""

    def __init__(self, d: int, h: int, depth: int, out: int) -> None:
        super().__init__()
        self.embed = nn.Linear(96, d)
        self.layers = nn.ModuleList(ResidualLayer(d, h) for _ in range(depth))
        self.head = nn.Linear(d, out)

    def forward(self, points: Tensor) -> Tensor:
        x = self.embed(points.flatten(1).unflatten(1, (-1, 96)))
        for layer in self.layers:
            x = layer(x)
        return F.normalize(self.head(x.mean(1)), dim=-1)


def info_nce(a: Tensor, b: Tensor, tau: float = 0.1) -> Tensor:
    scores = a @ b.t() / tau
    same = torch.arange(len(a), device=a.device)
    return 0.5 * (F.cross_entropy(scores, same) + F.cross_entropy(scores.t(), same))


@case("data loader", "num_workers=2 → 12", suite="twenty-fourth", **LOADED)
def clouds_viewed_by_two_workers(s: Setting, fixed: bool) -> Program:
    """Clouds of points told apart from others by two views of each, which workers cut and turn."""
    points, kept, batch = s.pick(20_480, 64), s.pick(2048, 32), s.pick(64, 2)
    workers = s.pick(12 if fixed else 2, 1)
    loader = DataLoader(
        CloudPairs(points, kept), batch, num_workers=workers, pin_memory=s.cuda, persistent_workers=True
    )
    feed: Any = iter(loader)
    model = s.place(lambda: CloudEncoder(s.pick(768, 16), s.pick(12, 2), s.pick(12, 1), s.pick(256, 8)))
    optimizer = fused_adamw(model)

    def step() -> None:
        views = torch.cat([view.to(s.device, non_blocking=True) for view in next(feed)])
        info_nce(*model(views.to(torch.bfloat16)).chunk(2)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step, close=lambda: end_workers(feed))
