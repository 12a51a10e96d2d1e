"""Fixed programs of the first suite in which something is still found, and what doing that as well brings."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import cases
import nets
import numpy as np
import torch
from cases import CASES, Prefetch, Program, Setting, Step, case, end_workers, graphed

UNTRACED: dict[str, Any] = {"traced": False, "stack": False}
"""Their traces are those of the fixed programs of the first suite."""


def _was(name: str) -> Callable[[Setting], Program]:
    return lambda s: CASES[name].build(s, True)


def _capturable(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=torch.cuda.is_available())


def _whole_step(s: Setting, model: Any, optimizer: torch.optim.Optimizer, inputs: tuple[Any, ...]) -> Step:
    """A training step in one CUDA graph; gradients stay where they are."""

    def run() -> None:
        model(*inputs).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return graphed(run) if s.cuda else run


@case("host-bound", "capture the step in a CUDA graph", rounds=1, warmup=14, steps=18, **UNTRACED)
def again_loader_no_workers(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("loader_no_workers")(s)
    side, crop, batch = s.pick(224, 48), s.pick(160, 32), s.pick(48, 4)
    model = s.place(lambda: nets.Vit(s.shape(width=1024, layers=16, heads=16, causal=False), crop))
    pictures = torch.zeros(batch, 3, crop, crop, dtype=torch.uint8, device=s.device)
    labels = torch.zeros(batch, dtype=torch.long, device=s.device)
    again = _whole_step(s, model, _capturable(model), (pictures, labels))
    loader = torch.utils.data.DataLoader(
        cases.Photos(side, crop), batch, num_workers=s.pick(6, 2), pin_memory=s.cuda, persistent_workers=True
    )
    feed = iter(loader)

    def step() -> None:
        for into, new in zip((pictures, labels), next(feed), strict=True):
            into.copy_(new, non_blocking=True)
        again()

    return Program(step, close=lambda: end_workers(feed))


@case("host-bound", "capture the compiled blocks in a CUDA graph", compiles=True, **UNTRACED)
def again_graph_breaks(s: Setting, fixed: bool) -> Program:
    program = _was("graph_breaks")(s)
    return Program(graphed(program.step)) if fixed and s.cuda else program


@case("host-bound", "replay the token from a CUDA graph", **UNTRACED)
def again_sample_on_host(s: Setting, fixed: bool) -> Program:
    program = _was("sample_on_host")(s)
    return Program(graphed(program.step)) if fixed and s.cuda else program


@case("host-bound", "capture the step in a CUDA graph", **UNTRACED)
def again_small_batch(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("small_batch")(s)
    shape, batch, length = s.shape(width=1024, layers=8, heads=16, vocab=32000), s.pick(8, 2), s.pick(512, 16)
    model, batches = cases.language(s, shape, batch, length)
    x, y = (t.clone() for t in next(batches))
    again = _whole_step(s, model, _capturable(model), (x, y))

    def step() -> None:
        for into, new in zip((x, y), next(batches), strict=True):
            into.copy_(new)
        again()

    return Program(step)


@case("host-bound", "capture the step in a CUDA graph", **UNTRACED)
def again_nchw_conv(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("nchw_conv")(s)
    model = s.place(lambda: nets.ResNet(s.pick((3, 4, 6, 3), (1, 1)), s.pick(64, 8)))
    side, batch = s.pick(224, 32), s.pick(96, 2)
    images = torch.randn(batch, 3, side, side, device=s.device, dtype=torch.bfloat16)
    labels = torch.randint(0, 1000, (batch,), device=s.device)
    model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=s.cuda)
    return Program(_whole_step(s, model, optimizer, (images, labels)))


@case("host-bound", "a CUDA graph for each of the recurring batches", **UNTRACED)
def again_padded_batch(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("padded_batch")(s)
    shape, batch, room = (
        s.shape(width=1024, layers=8, heads=16, vocab=16384, causal=False),
        s.pick(64, 4),
        s.pick(512, 64),
    )
    model = s.place(lambda: nets.Decoder(shape, room))
    optimizer, rng = _capturable(model), np.random.default_rng(0)
    batches = [cases.ragged(s, rng, batch, room, shape.vocab, 4) for _ in range(3)]

    def run(parts: Any) -> None:
        for ids, targets, mask in parts:
            model(ids, targets, mask).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    made = [(lambda parts=parts: run(parts)) for parts in batches]
    turns = itertools.cycle([graphed(one) for one in made] if s.cuda else made)
    return Program(lambda: next(turns)())


@case("pinned copy on the compute stream", "copy the next batch on a side stream", **UNTRACED)
def again_pageable_copy(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("pageable_copy")(s)
    model, optimizer, batches = cases.tower(s, 4096, 4096, 12)
    feed = itertools.cycle([(s.pinned(x), s.pinned(y)) for x, y in batches])
    return Program(cases.training(model, optimizer, iter(Prefetch(s, feed))))


@case("pinned copy on the compute stream", "copy the next batch on a side stream", **UNTRACED)
def again_small_copies(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("small_copies")(s)
    model, optimizer, _ = cases.tower(s, 4096, 4096, 10)
    features, rows, width = s.pick(256, 4), s.pick(4096, 8), s.pick(4096, 32)
    packed = s.pinned(torch.stack([torch.randn(rows, width // features) for _ in range(features)]))
    y = torch.randn(rows, 8, dtype=torch.bfloat16, device=s.device)
    feed = iter(Prefetch(s, itertools.cycle([(packed,)])))

    def step() -> None:
        (ready,) = next(feed)
        model(torch.cat(list(ready.unbind(0)), dim=1), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("host code", "batches prepared before the loop", **UNTRACED)
def again_logging_each_step(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("logging_each_step")(s)
    shape = s.shape(width=1024, layers=8, heads=16)
    model, _ = cases.language(s, shape, 8, 1024)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    size = (s.pick(8, 2), s.pick(1024, 16) + 1)
    feed = itertools.cycle([s.pinned(torch.randint(0, shape.vocab, size)) for _ in range(8)])

    def step() -> None:
        ids = next(feed).to(s.device, non_blocking=True)
        model(ids[:, :-1], ids[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)
