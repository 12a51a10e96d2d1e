"""Cause: round trip through the host."""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lab.planted.networks import Generator, Tokens
from lab.planted.programs import SHORT, bf16, ints, precision
from lab.planted.registry import Program, Setting, case


@case("round trip through the host", "sample on the device", suite="planted")
def sample_on_host(s: Setting, fixed: bool) -> Program:
    batch, room = s.pick(32, 2), s.pick(512, 8)
    model = s.place(lambda: Generator(s.shape(width=2048, layers=12, heads=16), batch, room)).eval()
    ids = torch.zeros(batch, 1, dtype=torch.long, device=s.device)
    place = torch.zeros(1, dtype=torch.long, device=s.device)

    @torch.no_grad()
    def token() -> None:
        logits = model(ids, place)
        if fixed:
            ids.copy_(torch.multinomial(torch.softmax(logits.float(), -1), 1))
        else:
            ids.copy_(torch.multinomial(torch.softmax(logits.cpu().float(), -1), 1))

    def step() -> None:
        for _ in range(4):
            token()

    return Program(step)


def ridge_in_numpy(kernel: Tensor, wanted: Tensor) -> Tensor:
    found = np.linalg.solve(kernel.cpu().numpy(), wanted.cpu().numpy())
    return torch.from_numpy(found).to(kernel.device)


def ridge_by_cholesky(kernel: Tensor, wanted: Tensor) -> Tensor:
    lower, _ = torch.linalg.cholesky_ex(kernel)
    return torch.cholesky_solve(wanted, lower)


@case("round trip through the host", "solve on the device, by Cholesky", suite="twenty-fifth", **SHORT)
def ridge_solved_by_numpy(s: Setting, fixed: bool) -> Program:
    """Few examples of new kinds: features by a network, and a ridge over them that is solved in closed form."""
    support, queries, places, piece, ways = s.pick((1024, 1024, 16, 256, 64), (12, 4, 2, 8, 4))
    dim = s.pick(768, 16)
    net = s.place(lambda: Tokens(piece, dim, s.pick(12, 2), s.pick(6, 1), dim)).eval()
    pieces = bf16(s, support + queries, places, piece)
    wanted = F.one_hot(ints(s, ways, support), ways).float()
    solve = ridge_by_cholesky if fixed else ridge_in_numpy
    eye = torch.eye(support, device=s.device)

    @torch.inference_mode()
    def adapt() -> Tensor:
        known, asked = net(pieces).float().split([support, queries])
        weights = solve(torch.addmm(eye, known, known.T, alpha=1 / dim), wanted)
        return asked @ (known.T @ weights)

    return Program(adapt, functools.partial(precision, "high"))
