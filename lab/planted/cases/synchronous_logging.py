"""Cause: synchronous logging."""

from __future__ import annotations

import csv
import itertools
import json
import os
import tempfile
import zlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.planted.networks import NextWord
from lab.planted.programs import SHORT, TRIED, adamw, bf16, fused_adamw, ints, language, stack
from lab.planted.registry import Program, Setting, case


@case("synchronous logging", "log every 100 steps from a value kept on the device", suite="planted")
def logging_each_step(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=1024, layers=8, heads=16)
    batch, length = s.pick(8, 2), s.pick(1024, 16)
    model, _ = language(s, shape, 8, 1024)
    optimizer = adamw(s, model)
    texts = [" ".join(f"w{i * j % 997}" for j in range(length // 4)) for i in range(64)]
    file = tempfile.NamedTemporaryFile("w", suffix=".jsonl")  # noqa: SIM115
    turn = itertools.count()

    def batch_of(i: int) -> Tensor:
        """Documents hashed to ids, joined and cut on the host, in Python, as many small trainers do."""
        words: list[int] = []
        while len(words) < batch * (length + 1):
            words.extend(zlib.crc32(word.encode()) % shape.vocab for word in texts[(i + len(words)) % 64].split())
        return s.pinned(torch.tensor(words[: batch * (length + 1)]).view(batch, length + 1))

    def step() -> None:
        ids = batch_of(i := next(turn)).to(s.device, non_blocking=True)
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not fixed:
            file.write(json.dumps({"step": i, "loss": loss.item()}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    return Program(step, close=file.close)


class UpdateRatios:
    """How far each weight moves beside how large it is, a row of a table for each step, as a lecture advises."""

    def __init__(self, params: dict[str, nn.Parameter], lr: float, stream: Any, every: int) -> None:
        self.params, self.lr, self.stream, self.every, self.turn = params, lr, stream, every, 0
        self.writer = csv.DictWriter(stream, ["step", *params])
        self.writer.writeheader()

    @torch.no_grad()
    def __call__(self) -> None:
        self.turn += 1
        if self.turn % self.every:
            return
        row = {
            name: ((self.lr * p.grad).std() / (p.data.std() + 1e-8)).log10().item() for name, p in self.params.items()
        }
        self.writer.writerow({"step": self.turn, **row})
        self.stream.flush()


@case("synchronous logging", "a row every hundredth step", suite="twenty-fifth", **SHORT)
def ratios_of_every_weight(s: Setting, fixed: bool) -> Program:
    """A model of names; how far each weight moves beside how large it is goes into a table in every step."""
    vocab, batch, length = s.pick(4096, 32), s.pick(16, 2), s.pick(512, 4)
    model = s.place(lambda: NextWord(vocab, s.pick(768, 16), s.pick(12, 2), s.pick(8, 1)))
    file = tempfile.TemporaryFile("w", newline="")  # noqa: SIM115 (open while the program runs)
    ratios = UpdateRatios(dict(model.named_parameters()), 1e-4, file, every=100 if fixed else 1)
    ids, optimizer = ints(s, vocab, batch, length), fused_adamw(model)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten()).backward()
        ratios()
        optimizer.step()

    return Program(step, close=file.close)


class ForceField(nn.Module):
    """Forces on atoms out of what is around them, predicted directly."""

    def __init__(self, d: int, depth: int) -> None:
        super().__init__()
        self.net = stack(d, *([d] * depth), 64)

    def forward(self, around: Tensor) -> Tensor:
        return self.net(around)


@case(
    "synchronous logging", "note heat and energy every thousandth move", suite="twenty-fourth", **TRIED | {"steps": 7}
)
def heat_noted_at_every_move(s: Setting, fixed: bool) -> Program:
    """Atoms moved by learned forces; after every move three numbers are written to a file."""
    atoms, around = s.pick(8192, 4), s.pick(2048, 64)
    forces = s.place(lambda: ForceField(around, s.pick(4, 1))).eval()
    x, v = bf16(s, atoms, around), bf16(s, atoms, 64)
    file = tempfile.TemporaryFile("w")  # noqa: SIM115 (open while the program runs)
    every, count = 1000 if fixed else 1, itertools.count(1)

    @torch.no_grad()
    def step() -> None:
        for _ in range(s.pick(16, 2)):
            f = forces(x)
            v.mul_(0.99).add_(f, alpha=0.01)
            x[:, :64].add_(v, alpha=0.01)
            if (i := next(count)) % every == 0:
                kinetic, strain = 0.5 * v.square().sum(), f.abs().max()
                file.write(f"{i},{kinetic.item():.4f},{strain.item():.4f},{x.mean().item():.6f}\n")
                file.flush()

    return Program(step, close=file.close)
