"""Programs without a planted cause, written well: what is found in them over 2 % of the step must be true of them."""

from __future__ import annotations

import itertools
from typing import Any

import fresh
import freshnets as nets
import torch
import torch.nn.functional as F
from cases import Photos, Prefetch, Program, Setting, case, end_workers, graphed, precision
from cases import training as train
from torch import nn

HEALTHY: dict[str, Any] = {"variants": ("fixed",), "stack": False, "steps": 10}
"""One version, timed and recorded as the fixed one of a case."""


def healthy(build: Any) -> Any:
    return case("none", "nothing", **HEALTHY)(build)


@healthy
def healthy_rotary_training(s: Setting, fixed: bool) -> Program:
    model = fresh.rotary(s, 2048, 5, 16, 32064, 1024)
    return Program(
        train(model, fresh.adamw(s, model), fresh.tokens(s, s.pick(12, 2), s.pick(1024, 16), s.pick(32064, 97)))
    )


@healthy
def healthy_convolutions(s: Setting, fixed: bool) -> Program:
    model = fresh.nhwc(fresh.plain(s, (96, 192, 384, 768), 2))
    pictures, labels = fresh.images(s, 96, 128)
    host = (s.pinned(fresh.nhwc(pictures.cpu())), s.pinned(labels.cpu()))
    batches = iter(Prefetch(s, itertools.cycle([host])))
    return Program(train(model, fresh.sgd(s, model), batches))


@healthy
def healthy_encoder_inference(s: Setting, fixed: bool) -> Program:
    model = fresh.encoder(s, 1280, 8, 20, 512).eval()
    ids = torch.randint(0, s.pick(30000, 100), (s.pick(24, 2), s.pick(512, 16)), device=s.device)

    @torch.inference_mode()
    def step() -> None:
        model.trunk(ids)

    return Program(step)


@healthy
def healthy_graph_decode(s: Setting, fixed: bool) -> Program:
    token, _ = fresh.decoding(s, 2560, 12, 16)
    again = graphed(token) if s.cuda else token

    def step() -> None:
        for _ in range(4):
            again()

    return Program(step)


@healthy
def healthy_ranker(s: Setting, fixed: bool) -> Program:
    batch, tables, rows = s.pick(65536, 8), s.pick(8, 3), s.pick(100_000, 100)
    model = fresh.ranker(s, rows, 128, tables, tower=4096, layers=4)
    draw = lambda: (torch.randn(batch, 13), torch.randint(0, rows, (tables, batch, 2)), torch.rand(batch).round())
    host = [tuple(s.pinned(part) for part in draw()) for _ in range(2)]
    batches = iter(Prefetch(s, itertools.cycle(host)))
    return Program(train(model, fresh.sgd(s, model), batches))


@healthy
def healthy_messages(s: Setting, fixed: bool) -> Program:
    nodes, edges, width = s.pick(120_000, 50), s.pick(1_500_000, 200), s.pick(256, 16)
    model = s.place(lambda: nets.Messages(width, s.pick(4, 2), 64, indexed=False), torch.float32)
    draw = lambda high, num: torch.randint(0, high, (num,), device=s.device)
    batch = (torch.randn(nodes, width, device=s.device), draw(nodes, edges), draw(nodes, edges), draw(64, nodes))
    return Program(train(model, fresh.adamw(s, model), itertools.cycle([batch])), lambda: precision("high"))


@case("none", "nothing", **HEALTHY | {"rounds": 1, "warmup": 16})
def healthy_loader(s: Setting, fixed: bool) -> Program:
    model = fresh.nhwc(fresh.plain(s, (128, 256, 512), 3))
    workers = s.pick(10, 2)
    loader = torch.utils.data.DataLoader(
        Photos(s.pick(160, 48), s.pick(128, 32)), s.pick(48, 4), num_workers=workers, pin_memory=s.cuda,
        persistent_workers=True, prefetch_factor=4,
    )  # fmt: skip
    feed = iter(loader)
    batches = iter(Prefetch(s, feed))

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, pictures: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            pictures = pictures.contiguous(memory_format=torch.channels_last).to(torch.bfloat16)
            return self.inner(pictures.div_(127.5).sub_(1.0), labels)

    scaled = Scaled()
    return Program(train(scaled, fresh.sgd(s, scaled), batches), close=lambda: end_workers(feed))


@healthy
def healthy_diffusion_transformer(s: Setting, fixed: bool) -> Program:
    width, layers = s.pick(1536, 32), s.pick(6, 2)
    blocks = s.place(lambda: nn.ModuleList(nets.EncoderBlock(width, s.pick(24, 2), nets.fused) for _ in range(layers)))
    optimizer = fresh.adamw(s, blocks)
    noise = torch.randn(s.pick(24, 2), s.pick(512, 16), width, device=s.device, dtype=torch.bfloat16)

    def step() -> None:
        x = noise
        for block in blocks:
            x = block(x)
        F.mse_loss(x, noise).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)
