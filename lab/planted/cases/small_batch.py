"""Cause: small batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.planted.networks import Tokens
from lab.planted.programs import SHORT, TRIED, adamw, asked, bf16, ints, language
from lab.planted.registry import Program, Setting, case


@case("small batch", "one batch of 8 instead of 8 accumulated batches of 1", suite="planted")
def small_batch(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=1024, layers=8, heads=16, vocab=32000)
    batch, length = s.pick(8, 2), s.pick(512, 16)
    model, batches = language(s, shape, batch, length)
    optimizer, micro = adamw(s, model), batch if fixed else 1

    def step() -> None:
        ids, targets = next(batches)
        for part, wanted in zip(ids.split(micro), targets.split(micro), strict=True):
            (model(part, wanted) * (micro / batch)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("small batch", "all points of the path in one batch", suite="twenty-fifth", **SHORT)
def attributions_point_by_point(s: Setting, fixed: bool) -> Program:
    """Which patches made a network answer as it did: slopes along a path, a pass for each of its points."""
    num, places, piece, points = s.pick((4, 196, 768, 16), (2, 4, 12, 3))
    model = s.place(lambda: Tokens(piece, s.pick(768, 16), s.pick(12, 2), s.pick(8, 1), 1000)).eval()
    model.requires_grad_(False)
    pieces, kinds = bf16(s, num, places, piece), ints(s, 1000, num)
    alphas = [(i + 0.5) / points for i in range(points)]
    shares = torch.tensor(alphas, device=s.device, dtype=torch.bfloat16)

    def slopes(at: Tensor, wanted: Tensor) -> Tensor:
        at = at.requires_grad_()
        return torch.autograd.grad(model(at).gather(1, wanted[:, None]).sum(), at)[0]

    def integrated() -> Tensor:
        if fixed:
            path = (shares[:, None, None, None] * pieces).flatten(0, 1)
            found = slopes(path, kinds.repeat(points)).unflatten(0, (points, num)).float().sum(0)
        else:
            found = torch.zeros(pieces.shape, device=s.device)
            for share in shares.unbind(0):
                found += slopes(share * pieces, kinds)
        return (found / points * pieces).sum(-1)

    return Program(integrated)


class Outliner(nn.Module):
    """An encoder and a decoder with skips, for windows of a large picture."""

    def __init__(self, bands: int, widths: tuple[int, ...], kinds: int) -> None:
        super().__init__()
        pair = lambda a, b: nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(b, b, 3, padding=1), nn.ReLU(inplace=True)
        )
        inner = (bands, *widths[:-1])
        self.down = nn.ModuleList(pair(a, b) for a, b in zip(inner, widths))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in zip(widths[-2::-1], widths[:0:-1]))
        self.up = nn.ModuleList(pair(2 * a, a) for a in widths[-2::-1])
        self.head = nn.Conv2d(widths[0], kinds, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for i, down in enumerate(self.down):
            x = down(F.max_pool2d(x, 2) if i else x)
            seen.append(x)
        for grow, up, skip in zip(self.grow, self.up, seen[-2::-1]):
            x = up(torch.cat((grow(x), skip), 1))
        return self.head(x)


def windows_of(picture: Tensor, side: int, stride: int) -> Tensor:
    """Windows that overlap, as a batch in channels_last."""
    cut = picture[0].unfold(1, side, stride).unfold(2, side, stride)
    return cut.permute(1, 2, 0, 3, 4).flatten(0, 1).contiguous(memory_format=torch.channels_last)


def stitched(found: Tensor, size: int, side: int, stride: int) -> Tensor:
    return F.fold(found.flatten(1).t()[None], (size, size), side, stride=stride)


@case("small batch", "thirty-two windows in one pass", suite="twenty-fourth", **TRIED | {"steps": 7})
def windows_outlined_in_turn(s: Setting, fixed: bool) -> Program:
    """Fields outlined in a picture from above, by windows that overlap, each looked at by itself."""
    side, stride, bands, kinds = s.pick(128, 16), s.pick(112, 8), 8, 8
    size = side + stride * s.pick(7, 1)
    net = s.place(lambda: Outliner(bands, s.pick((96, 192, 384), (8, 16)), kinds)).eval()
    net = net.to(memory_format=torch.channels_last)
    picture, many = bf16(s, 1, bands, size, size), 32 if fixed else 1

    def outline() -> Tensor:
        windows = windows_of(picture, side, stride)
        found = torch.cat([net(some) for some in windows.split(many)])
        return stitched(found, size, side, stride).argmax(1)

    return asked(outline)
