"""Cause: NCHW convolution."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.planted.programs import TRIED, bf16, ints, training
from lab.planted.registry import Program, Setting, case


class Bottleneck(nn.Module):
    def __init__(self, inner: int, outer: int, narrow: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, narrow, 1, bias=False), nn.BatchNorm2d(narrow)
        self.conv2 = nn.Conv2d(narrow, narrow, 3, stride, 1, bias=False)
        self.bn2, self.bn3 = nn.BatchNorm2d(narrow), nn.BatchNorm2d(outer)
        self.conv3 = nn.Conv2d(narrow, outer, 1, bias=False)
        self.down: nn.Module = nn.Identity()
        if stride != 1 or inner != outer:
            self.down = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        return F.relu(self.bn3(self.conv3(y)) + self.down(x), inplace=True)


class ResNet(nn.Module):
    """ResNet-50 when the depths are 3, 4, 6, 3."""

    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)
        )
        stages, inner = [], width
        for i, depth in enumerate(depths):
            narrow, outer = width * 2**i, width * 2**i * 4
            for j in range(depth):
                stages.append(Bottleneck(inner, outer, narrow, 2 if i and not j else 1))
                inner = outer
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(inner, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.stages(self.stem(images)).mean((2, 3))), labels)


@case("NCHW convolution", "model and images in channels_last", suite="planted")
def nchw_conv(s: Setting, fixed: bool) -> Program:
    model = s.place(lambda: ResNet(s.pick((3, 4, 6, 3), (1, 1)), s.pick(64, 8)))
    side, batch = s.pick(224, 32), s.pick(96, 2)
    images = torch.randn(batch, 3, side, side, device=s.device, dtype=torch.bfloat16)
    labels = torch.randint(0, 1000, (batch,), device=s.device)
    if fixed:
        model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=s.cuda)
    return Program(training(model, optimizer, itertools.cycle([(images, labels)])))


class ConvUnit(nn.Module):
    """Convolution, norm, activation."""

    def __init__(self, c_in: int, c_out: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, bias=False)
        self.bn, self.act = nn.BatchNorm2d(c_out), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class PartialStage(nn.Module):
    """Half of the channels go through convolutions, whose every outcome is kept; all are joined at the end."""

    def __init__(self, c_in: int, c_out: int, depth: int) -> None:
        super().__init__()
        self.down, self.split = ConvUnit(c_in, c_out, 3, 2), ConvUnit(c_out, c_out, 1)
        self.parts = nn.ModuleList(
            nn.Sequential(ConvUnit(c_out // 2, c_out // 2), ConvUnit(c_out // 2, c_out // 2)) for _ in range(depth)
        )
        self.join = ConvUnit((2 + depth) * (c_out // 2), c_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = list(self.split(self.down(x)).chunk(2, dim=1))
        for part in self.parts:
            kept.append(part(kept[-1]))
        return self.join(torch.cat(kept, dim=1))


class Detector(nn.Module):
    """What lies in each cell of a picture, by stages of partial convolutions."""

    def __init__(self, widths: tuple[int, ...], depth: int, answers: int) -> None:
        super().__init__()
        self.stem = ConvUnit(3, widths[0], 3, 2)
        self.stages = nn.Sequential(*(PartialStage(a, b, depth) for a, b in itertools.pairwise(widths)))
        self.head = nn.Conv2d(widths[-1], answers, 1)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(pictures)))


@case("NCHW convolution", "network and pictures in channels_last", suite="twenty-fifth", **TRIED)
def detector_channels_first(s: Setting, fixed: bool) -> Program:
    """What lies where in a picture, by stages half of whose channels go through convolutions."""
    side, num = s.pick(256, 32), s.pick(96, 2)
    net = s.place(lambda: Detector(s.pick((64, 128, 256, 512), (8, 8, 16)), s.pick(2, 1), 80))
    images = bf16(s, num, 3, side, side)
    if fixed:
        net, images = net.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
    cells = side // s.pick(16, 8)
    targets = ints(s, 80, num, cells, cells)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9, fused=s.cuda)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(images), targets).backward()
        optimizer.step()

    return Program(step)


def conv_bn(a: int, b: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True))


class Hourglass(nn.Module):
    """Looks at a picture in smaller and smaller sizes, and adds what it saw on the way back."""

    def __init__(self, d: int, sizes: int) -> None:
        super().__init__()
        self.beside, self.down, self.up = conv_bn(d, d), conv_bn(d, d, 2), conv_bn(d, d)
        self.inside = Hourglass(d, sizes - 1) if sizes > 1 else conv_bn(d, d)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.up(self.inside(self.down(x)))
        return self.beside(x) + F.interpolate(seen, scale_factor=2.0, mode="nearest")


class CenterNet(nn.Module):
    """Where the middles of things are, as a heat map for each kind, and how large they are."""

    def __init__(self, bands: int, d: int, sizes: int, turns: int, kinds: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_bn(bands, d // 2, 2), conv_bn(d // 2, d, 2))
        self.glasses = nn.Sequential(*(Hourglass(d, sizes) for _ in range(turns)))
        self.heat, self.size = (nn.Sequential(conv_bn(d, d), nn.Conv2d(d, kinds, 1)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.glasses(self.stem(x))
        return self.heat(x), self.size(x)


@case(
    "NCHW convolution",
    "the network in channels_last, and no .contiguous() behind permute",
    suite="twenty-fourth",
    **TRIED,
)
def centers_channels_first(s: Setting, fixed: bool) -> Program:
    """Ships found by their middles in pictures of eight bands, which come with their bands last."""
    batch, side = s.pick(16, 2), s.pick(512, 32)
    model = s.place(lambda: CenterNet(8, s.pick(256, 16), s.pick(3, 2), s.pick(2, 1), 8))
    model = model.to(memory_format=torch.channels_last) if fixed else model
    pictures, marks = bf16(s, batch, side, side, 8), (torch.rand(batch, 8, side // 4, side // 4) < 0.01).to(s.device)
    marks = marks.to(torch.bfloat16)
    marks = marks.contiguous(memory_format=torch.channels_last) if fixed else marks
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=s.cuda)

    def step() -> None:
        images = pictures.permute(0, 3, 1, 2)
        heat, size = model(images if fixed else images.contiguous())
        loss = F.binary_cross_entropy_with_logits(heat, marks) + 0.1 * F.smooth_l1_loss(size, marks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return Program(step)
