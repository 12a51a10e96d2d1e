"""Cause: recompilation."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.planted.networks import HandNorm
from lab.planted.programs import ONE, bf16, compiler, fused_adamw, stack
from lab.planted.registry import Program, Setting, case


@case(
    "recompilation",
    "compile with dynamic=True",
    suite="planted",
    compiles=True,
    rounds=1,
    warmup=3,
    steps=15,
    planted_steps=6,
)
def recompile_each_shape(s: Setting, fixed: bool) -> Program:
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 256
    width, rows = s.pick(4096, 32), s.pick(16384, 8)
    chain = s.place(lambda: HandNorm(width))
    run = torch.compile(chain, backend=compiler(s), dynamic=fixed)
    weights = [torch.randn(width, width, device=s.device, dtype=torch.bfloat16) * 0.02 for _ in range(s.pick(12, 2))]
    source = torch.randn(rows + 256, width, device=s.device, dtype=torch.bfloat16)
    turn = itertools.count(1)

    @torch.no_grad()
    def step() -> None:
        x = source[: rows + 8 * (next(turn) % 32)]
        for weight in weights:
            x = run(x @ weight, x)

    return Program(step)


def sharpened(out: Tensor, center: Tensor, temp: Any) -> Tensor:
    """What a teacher thinks, made surer by how cold it is."""
    return torch.softmax((out.float() - center) / temp, dim=-1).to(out.dtype)


@case(
    "recompilation", "the temperature as a tensor", suite="twenty-fourth", compiles=True, both=True,
    **ONE | {"warmup": 3, "steps": 12, "planted_steps": 5},
)  # fmt: skip
def teacher_colder_every_step(s: Setting, fixed: bool) -> Program:
    """A network agrees with its own past, which is made surer step by step; a compiled function does that."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 256
    rows, seen, wide, kinds = s.pick(8192, 4), s.pick(2048, 8), s.pick(4096, 16), s.pick(4096, 16)
    student, teacher = (s.place(lambda: stack(seen, wide, wide, wide, wide // 4, kinds)) for _ in "ab")
    teacher.requires_grad_(False)
    sharpen = torch.compile(sharpened, backend=compiler(s), dynamic=False)
    a, b, center = bf16(s, rows, seen), bf16(s, rows, seen), torch.zeros(kinds, device=s.device)
    optimizer, turn = fused_adamw(student), itertools.count()

    def step() -> None:
        temp: Any = 0.07 - 0.03 * next(turn) / 1000
        with torch.no_grad():
            out = teacher(a)
            known = sharpen(out, center, torch.full((), temp, device=s.device) if fixed else temp)
            center.lerp_(out.mean(0).float(), 0.1)
        F.cross_entropy(student(b), known).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 0.004)

    return Program(step)
