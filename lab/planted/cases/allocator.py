"""Cause: allocator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.planted.networks import ResidualLayer, Tokens
from lab.planted.programs import ONE, adamw, asked, bf16, fused_adamw, language, training
from lab.planted.registry import Program, Setting, case


@case("allocator", "drop torch.cuda.empty_cache() from the loop", suite="planted")
def empty_cache_each_step(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=1024, layers=8, heads=16)
    model, batches = language(s, shape, 8, 1024)
    train = training(model, adamw(s, model), batches)

    def step() -> None:
        train()
        if not fixed and s.cuda:
            torch.cuda.empty_cache()

    return Program(step)


def releases_memory(enabled: bool) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """A decorator: whatever the function took from the driver is given back."""

    def decorate(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def wrapped(*args: Any) -> Tensor:
            try:
                return function(*args)
            finally:
                if enabled:
                    torch.cuda.empty_cache()

        return wrapped

    return decorate


@case("allocator", "no empty_cache after each chunk", suite="twenty-fifth", **ONE)
def chunks_that_release_memory(s: Setting, fixed: bool) -> Program:
    """What changed between two passes of a satellite, chunk by chunk; a decorator gives memory back after each."""
    chunks, num, places, piece = s.pick((4, 32, 784, 256), (2, 2, 4, 8))
    net = s.place(lambda: Tokens(piece, s.pick(768, 16), s.pick(12, 2), s.pick(2, 1), 8)).eval()
    before, after = bf16(s, chunks, num, places, piece), bf16(s, chunks, num, places, piece)

    @releases_memory(s.cuda and not fixed)
    def changed(old: Tensor, new: Tensor) -> Tensor:
        return net(torch.where(new > old, new, -old)).argmax(-1)

    return asked(lambda: [changed(old, new) for old, new in zip(before, after)])


class TeacherOrStudent(nn.Module):
    def __init__(self, d: int, h: int, depth: int, out: int) -> None:
        super().__init__()
        self.embed = nn.Linear(768, d)
        self.layers = nn.ModuleList(ResidualLayer(d, h) for _ in range(depth))
        self.head = nn.Linear(d, out)

    def forward(self, patches: Tensor) -> Tensor:
        x = self.embed(patches)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def give_back(module: nn.Module, inputs: Any, output: Any) -> None:
    """A hook for networks that are only asked: what they needed is free for others afterwards."""
    torch.cuda.empty_cache()


@case("allocator", "no hook that empties the cache", suite="twenty-fourth", **ONE)
def teacher_gives_its_memory_back(s: Setting, fixed: bool) -> Program:
    """A small network learns what a large one sees; a hook gives the large one's memory back once it has answered."""
    batch, places, kinds = s.pick(64, 2), s.pick(256, 4), s.pick(1024, 8)
    teacher = s.place(lambda: TeacherOrStudent(s.pick(1280, 16), s.pick(20, 2), s.pick(4, 1), kinds)).eval()
    student = s.place(lambda: TeacherOrStudent(s.pick(640, 16), s.pick(10, 2), s.pick(6, 1), kinds))
    if s.cuda and not fixed:
        teacher.register_forward_hook(give_back)
    patches, optimizer = bf16(s, batch, places, 768), fused_adamw(student)

    def step() -> None:
        with torch.no_grad():
            known = F.log_softmax(teacher(patches) / 2, dim=-1)
        told = F.log_softmax(student(patches) / 2, dim=-1)
        F.kl_div(told, known, reduction="batchmean", log_target=True).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step)
