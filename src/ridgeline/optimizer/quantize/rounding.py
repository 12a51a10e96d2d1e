"""Weights of four bits: how they are rounded so that what the layer returns changes least.

``nearest`` rounds each number by itself. ``gptq`` rounds column by column and lets the columns that follow make up for
the error, by the inputs' second moments. ``awq`` scales channels that carry large inputs up before and the inputs down.
``hadamard`` rotates channels, so that none stands out. Each is judged on the layer's own calibration inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.engine.file import ops

GROUP = 32
"""Columns of a row that share a scale."""
MOST = 7


@dataclass(frozen=True, slots=True)
class Rounded:
    """A weight of four bits. ``channels`` are what its columns were multiplied by, ``rotation`` the size of blocks."""

    method: str
    q: Tensor  # [N, K] signed, -8 to 7
    scale: Tensor  # [N, K / GROUP]
    channels: Tensor | None = None
    rotation: int = 0

    def restored(self) -> Tensor:
        """The weight it stands for, in the inputs' own channels."""
        wide = (self.q.float().reshape(*self.scale.shape, -1) * self.scale.unsqueeze(-1)).reshape(self.q.shape)
        wide = ops.hadamard(wide, self.rotation) if self.rotation else wide
        return wide if self.channels is None else wide / self.channels


def nearest(weight: Tensor) -> Rounded:
    scale = best_scale(weight)
    return Rounded("nearest", ops.rounded(weight, scale, MOST), scale)


def best_scale(weight: Tensor, weights: Tensor | None = None) -> Tensor:
    """The scale of each group, out of eight, that leaves the least squared error, weighted by channel if told."""
    whole = ops.row_scale(weight, MOST, GROUP)
    best, least = whole, torch.full_like(whole, float("inf"))
    for share in (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65):
        scale = whole * share
        q = ops.rounded(weight, scale, MOST).float().reshape(*scale.shape, -1)
        error = (q * scale.unsqueeze(-1) - weight.reshape(*scale.shape, -1)).square()
        if weights is not None:
            error = error * weights.reshape(1, scale.shape[1], -1)
        error = error.sum(-1)
        best = torch.where(error < least, scale, best)
        least = torch.minimum(error, least)
    return best


def gptq(weight: Tensor, moments: Tensor, damp: float = 0.01) -> Rounded:
    """``moments`` [K, K] is the sum of xᵀx over calibration rows."""
    n, k = weight.shape
    h = moments.double() + damp * moments.diagonal().mean().double() * torch.eye(k, dtype=torch.float64)
    dead = h.diagonal() <= 0
    h[dead, dead] = 1.0
    # Rows of the upper Cholesky factor of the inverse say how the error of a column is shared out to the next ones
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True)
    rest, q = weight.double().clone(), torch.zeros(n, k)
    scale = torch.zeros(n, k // GROUP)
    for start in range(0, k, GROUP):
        end = start + GROUP
        scale[:, start // GROUP] = best_scale(rest[:, start:end].float())[:, 0]
        errors = torch.zeros(n, GROUP, dtype=torch.float64)
        for j in range(start, end):
            step = scale[:, start // GROUP].double()
            q[:, j] = (rest[:, j] / step).round().clamp(-8, MOST).float()
            error = (rest[:, j] - q[:, j].double() * step) / factor[j, j]
            rest[:, j:end] -= error.unsqueeze(1) * factor[j, j:end]
            errors[:, j - start] = error
        rest[:, end:] -= errors @ factor[start:end, end:]
    return Rounded("gptq", q.to(torch.int8), scale)


def awq(weight: Tensor, inputs: Tensor) -> Rounded:
    """Channels times the inputs' mean magnitude to a power, the best of nine powers."""
    size = inputs.abs().mean(0).clamp_min(1e-8)
    meant, best, least = inputs @ weight.t(), None, float("inf")
    for power in range(9):
        channels = size ** (power / 8)
        channels = (channels / (channels.max() * channels.min()).sqrt()).clamp(1e-4, 1e4)
        made = nearest(weight * channels)
        found = Rounded("awq", made.q, made.scale, channels)
        error = float((inputs @ found.restored().t() - meant).square().sum())
        if error < least:
            best, least = found, error
    assert best is not None
    return best


def hadamard(weight: Tensor) -> Rounded | None:
    """The weight rotated in blocks as large as its columns allow."""
    size = weight.shape[1] & -weight.shape[1]
    if size < 16:
        return None
    size = min(size, 256)
    made = nearest(ops.hadamard(weight, size))
    return Rounded("hadamard", made.q, made.scale, rotation=size)


def rounded(weight: Tensor, inputs: Tensor, held_out: Tensor) -> Rounded:
    """The best way to round a weight for these inputs, judged on others."""
    found = [nearest(weight), awq(weight, inputs), gptq(weight, inputs.t() @ inputs), hadamard(weight)]
    meant = held_out @ weight.t()
    made = [each for each in found if each is not None]
    return min(made, key=lambda each: float((held_out @ each.restored().t() - meant).square().sum()))


def static_scales(weight: Tensor, inputs: Tensor, others: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Channels, weight, scale and inverse scales of a product of bytes.

    What channels of the inputs are divided by, and columns of the weight multiplied, moves a share of the difficulty
    from one to the other (SmoothQuant). The largest of few rows is not the largest of all, so there is room above it:
    the engine scales a row that does not fit, and the same layer as Q/DQ nodes clips it.
    How much of both is judged on ``others``, rows that the scales were not fitted to.
    """
    most_x, most_w = inputs.abs().amax(0), weight.abs().amax(0).clamp_min(1e-8)
    # A channel whose few inputs are small may have larger ones
    most_x = most_x.clamp_min(0.05 * float(most_x.mean())).clamp_min(1e-8)
    meant, least = others @ weight.t(), float("inf")
    best: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def tried(channels: Tensor, room: float) -> None:
        nonlocal best, least
        parts = int8_parts(weight, inputs, channels, room)
        rows = (ops.int8_linear(others, *parts) - meant).square().mean(1).sqrt()
        # Calls to come are judged one by one: what counts is a bad row, not the sum of all
        error = float(rows.mean() + 4 * rows.std(unbiased=False))
        if error < least:
            best, least = (channels, *parts), error

    for share in (0.0, 0.25, 0.5, 0.65, 0.8):
        channels = most_x**share / most_w ** (1 - share) if share else torch.ones_like(most_x)
        tried(channels / channels.log().mean().exp(), 1.2)
    assert best is not None
    channels = best[0]
    for room in (1.4, 1.7, 2.0):
        tried(channels, room)
    return best


def int8_parts(weight: Tensor, inputs: Tensor, channels: Tensor, room: float) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, scale an output and inverse scales of inputs whose largest magnitude times ``room`` becomes 127."""
    step = (inputs / channels).abs().max().clamp_min(1e-12) * room / 127
    wide = weight * channels
    scale = ops.row_scale(wide, 127.0)
    return ops.rounded(wide, scale, 127), scale * step, 1 / (channels * step)
