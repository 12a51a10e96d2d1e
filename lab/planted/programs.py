"""Training loops, data and helpers that the programs of several causes share."""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lab.planted.networks import Decoder, Tower, Vit
from lab.planted.registry import Program, Setting, Shape, Step


def ids(s: Setting, batch: int, length: int, vocab: int, num: int = 4) -> Iterator[tuple[Tensor, Tensor]]:
    """Token batches that are on the device already."""
    make = lambda: torch.randint(0, vocab, (batch, length + 1), device=s.device)
    batches = [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in (make() for _ in range(num))]
    return itertools.cycle(batches)


def adamw(s: Setting, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, **(options or {"fused": True}))


def training(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[tuple[Tensor, ...]]) -> Step:
    def step() -> None:
        model(*next(batches)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def language(s: Setting, shape: Shape, batch: int, length: int, dtype: torch.dtype = torch.bfloat16, **how: Any) -> Any:
    batch, length = s.pick(batch, 2), s.pick(length, 16)
    model = s.place(lambda: Decoder(shape, length, **how), dtype)
    return model, ids(s, batch, length, shape.vocab)


class Photos(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Compressed pictures: decompressed, cropped, flipped and brightened one by one."""

    def __init__(self, side: int, crop: int, length: int = 1_000_000) -> None:
        rng = np.random.default_rng(0)
        smooth = rng.integers(0, 255, (24, side // 4, side // 4, 3), np.uint8).repeat(4, 1).repeat(4, 2)
        noisy = smooth ^ rng.integers(0, 8, smooth.shape, np.uint8)
        self.blobs = [zlib.compress(image.tobytes(), 6) for image in noisy]
        self.side, self.crop, self.length = side, crop, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        rng = np.random.default_rng(i)
        image = np.frombuffer(zlib.decompress(self.blobs[i % 24]), np.uint8).reshape(self.side, self.side, 3)
        top, left = rng.integers(0, self.side - self.crop, 2)
        image = image[top : top + self.crop, left : left + self.crop]
        image = image[:, ::-1] if rng.random() < 0.5 else image
        bright = np.clip(image.astype(np.float32) * rng.uniform(0.8, 1.2), 0, 255).astype(np.uint8)
        return torch.from_numpy(np.ascontiguousarray(bright.transpose(2, 0, 1))), int(i % 1000)


def end_workers(feed: Any) -> None:
    if hasattr(feed, "_shutdown_workers"):
        feed._shutdown_workers()


@contextmanager
def one_core() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def photos(s: Setting, workers: int, one_core: bool = False) -> Program:
    side, crop, batch = s.pick(224, 48), s.pick(160, 32), s.pick(48, 4)
    shape = s.shape(width=1024, layers=16, heads=16, causal=False)
    model = s.place(lambda: Vit(shape, crop))
    optimizer = adamw(s, model)
    workers = min(workers, 2) if s.tiny else workers
    loader = torch.utils.data.DataLoader(
        Photos(side, crop), batch, num_workers=workers, pin_memory=s.cuda, persistent_workers=workers > 0, shuffle=False
    )
    scope = one_core if one_core else nullcontext
    with scope():
        feed = iter(loader)

    def step() -> None:
        images, labels = next(feed)
        images, labels = images.to(s.device, non_blocking=True), labels.to(s.device, non_blocking=True)
        model(images, labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step, scope, close=lambda: end_workers(feed))


def tower(s: Setting, rows: int, width: int, layers: int) -> tuple[nn.Module, torch.optim.Optimizer, list[Any]]:
    rows, width, layers = s.pick(rows, 8), s.pick(width, 32), s.pick(layers, 2)
    model = s.place(lambda: Tower(width, layers))
    draw = lambda columns: torch.randn(rows, columns, device=s.device).cpu()
    batches = [(draw(width), draw(8).bfloat16()) for _ in range(3)]
    return model, torch.optim.SGD(model.parameters(), lr=1e-4, fused=s.cuda), batches


class Prefetch:
    """Copies the next batch on a stream of its own while this one is computed."""

    def __init__(self, s: Setting, batches: Iterator[tuple[Tensor, ...]]) -> None:
        self.s, self.batches = s, batches
        self.stream = torch.cuda.Stream() if s.cuda else None
        self.ahead = self.copy()

    def copy(self) -> tuple[Tensor, ...]:
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            return tuple(t.to(self.s.device, non_blocking=True) for t in next(self.batches))

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        while True:
            if self.stream:
                torch.cuda.current_stream().wait_stream(self.stream)
                for t in self.ahead:
                    t.record_stream(torch.cuda.current_stream())
            ready, self.ahead = self.ahead, self.copy()
            yield ready


def graphed(run: Step) -> Step:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()

    def replay(kept: Step = run) -> object:
        """The graph holds addresses only: what they point to lives as long as the program that was captured."""
        graph.replay()
        return made

    return replay


def compiler(s: Setting) -> str:
    return "inductor" if s.cuda else "eager"


@contextmanager
def precision(how: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(how)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


TRIED: dict[str, Any] = {"stack": False}


ONE: dict[str, Any] = TRIED | {"rounds": 1}
"""What one program leaves in the process would burden the other."""


def asked(run: Any) -> Program:
    return Program(torch.inference_mode()(run))


def bf16(s: Setting, *size: int) -> Tensor:
    return torch.randn(*size, device=s.device, dtype=torch.bfloat16)


def ints(s: Setting, high: int, *size: int) -> Tensor:
    return torch.randint(0, high, size, device=s.device)


LOADED: dict[str, Any] = ONE | {"warmup": 8, "steps": 14, "planted_steps": 10}
"""Workers need some steps until what they made ahead is used up."""


SHORT: dict[str, Any] = TRIED | {"steps": 7}


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def sgd(s: Setting, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, fused=s.cuda)


def patches(pictures: Tensor, side: int) -> Tensor:
    """(n, c, h, w) cut into squares, a row of numbers for each."""
    cut = pictures.unflatten(3, (-1, side)).unflatten(2, (-1, side))
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def perceptron(*sizes: int, bias: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for wide_in, wide_out in itertools.pairwise(sizes):
        layers += [nn.Linear(wide_in, wide_out, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def stack(*sizes: int, last: bool = False) -> nn.Sequential:
    """Dense layers with ReLU that overwrites what it is given; none behind the last unless asked for."""
    parts: list[nn.Module] = []
    for i in range(len(sizes) - 1):
        parts += [nn.Linear(sizes[i], sizes[i + 1]), nn.ReLU(inplace=True)]
    return nn.Sequential(*(parts if last else parts[:-1]))
