"""Cause: garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.planted.networks import NextWord
from lab.planted.programs import ONE, adamw, bf16, ints, language, training
from lab.planted.registry import Program, Setting, case


@contextmanager
def frozen() -> Iterator[None]:
    """What exists stays frozen: whoever runs next in the process would otherwise pay for it."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@case("garbage collection", "gc.freeze() after setup and gc.disable() in the loop", suite="planted", rounds=1, steps=18)
def collect_each_step(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=1024, layers=8, heads=16)
    model, batches = language(s, shape, 8, 1024)
    train = training(model, adamw(s, model), batches)
    index = [{"name": f"record {i}", "span": [i, i + 1]} for i in range(s.pick(200_000, 20_000))]

    def step() -> None:
        train()
        if not fixed:
            gc.collect()

    return Program(step, frozen if fixed else nullcontext, close=index.clear)


def conversations(num: int) -> list[dict[str, Any]]:
    """What was said to an assistant, kept for all who may come back."""
    return [
        {"user": i, "turns": [{"role": "user", "tokens": [i % 7, i % 11]}, {"role": "assistant", "tokens": [i % 13]}]}
        for i in range(num)
    ]


@case("garbage collection", "no gc.collect() after each request", suite="twenty-fifth", **ONE | {"steps": 10})
def request_that_collects(s: Setting, fixed: bool) -> Program:
    """An assistant that keeps all conversations in memory, and tidies up after each batch of requests."""
    kept = conversations(s.pick(24_000, 10))
    vocab, batch, length = s.pick(16_384, 32), s.pick(32, 2), s.pick(512, 4)
    model = s.place(lambda: NextWord(vocab, s.pick(1024, 16), s.pick(16, 2), s.pick(6, 1))).eval()
    ids = ints(s, vocab, batch, length)

    @torch.inference_mode()
    def handle(held: Any = kept) -> Tensor:
        try:
            hidden = model.trunk(model.embed(ids))
            return model.unembed(hidden[:, -1]).argmax(-1)
        finally:
            if not fixed:
                gc.collect()

    return Program(handle)


def task_index(num: int) -> dict[str, dict[str, Any]]:
    """Which samples there are of which class, and where."""
    return {
        f"class_{i}": {"alphabet": f"a{i % 50}", "shots": [{"file": f"{i}_{j}.png", "turn": 90 * j} for j in range(4)]}
        for i in range(num)
    }


def run_with(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    for i, w in enumerate(weights):
        x = F.linear(x, w)
        x = x if i == len(weights) - 1 else F.relu_(x)
    return x


@case("garbage collection", "no gc.collect() after each task", suite="twenty-fourth", **ONE | {"steps": 10})
def tasks_tidied_up_after(s: Setting, fixed: bool) -> Program:
    """Weights from which two steps lead far; after each task somebody tidies up what its copies might have left."""
    dim, rows, depth = s.pick(2048, 8), s.pick(4096, 4), s.pick(4, 2)
    index = task_index(s.pick(30_000, 10))
    weights = [nn.Parameter(bf16(s, dim, dim) * dim**-0.5) for _ in range(depth)]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
    tasks = [(bf16(s, rows, dim), bf16(s, rows, dim)) for _ in range(s.pick(4, 2))]

    def adapt(x: Tensor, y: Tensor) -> list[Tensor]:
        fast: list[Tensor] = [w.detach().requires_grad_() for w in weights]
        for _ in range(2):
            slopes = torch.autograd.grad(F.mse_loss(run_with(fast, x), y), fast)
            with torch.no_grad():
                fast = [w.requires_grad_() for w in torch._foreach_add(fast, slopes, alpha=-0.01)]
        return list(torch.autograd.grad(F.mse_loss(run_with(fast, x), y), fast))

    def step(held: Any = index) -> None:
        total: list[Tensor] = []
        for x, y in tasks:
            slopes = adapt(x, y)
            total = slopes if not total else list(torch._foreach_add(total, slopes))
            if not fixed:
                gc.collect()
        for w, slope in zip(weights, total):
            w.grad = slope
        optimizer.step()
        optimizer.zero_grad()

    return Program(step)
