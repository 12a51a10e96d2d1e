"""A third, small suite of planted causes: for figures after the second one had been learned from."""

from __future__ import annotations

import gc
import itertools
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import fresh
import freshnets as nets
import torch
import torch.nn.functional as F
from cases import Photos, Program, Setting, case, end_workers, frozen, graphed, precision
from cases import training as train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def _sentences(s: Setting, batch: int, length: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, s.pick(30000, 100), (s.pick(batch, 2), s.pick(length, 16)), device=s.device)
    return ids, torch.randint(0, 16, (ids.shape[0],), device=s.device)


@case("synchronization", "look at the activations every 100 steps", stack=False)
def stages_watched(s: Setting, fixed: bool) -> Program:
    model = fresh.nhwc(fresh.plain(s, (64, 128, 256, 512, 512), 2))
    seen: list[float] = []

    def look(module: nn.Module, given: Any, made: Tensor) -> None:
        seen.append(made.detach().float().abs().max().item())

    for stage in () if fixed else model.stages:
        stage.register_forward_hook(look)
    pictures, labels = fresh.images(s, 64, 128)
    step = train(model, fresh.sgd(s, model), itertools.cycle([(fresh.nhwc(pictures), labels)]))
    return Program(step, close=seen.clear)


@case("garbage collection", "gc.freeze() after setup and gc.disable() in the loop", rounds=1, steps=16, stack=False)
def decoder_collected(s: Setting, fixed: bool) -> Program:
    model = fresh.rotary(s, 2048, 4, 16, 32064, 1024)
    feed = fresh.tokens(s, s.pick(6, 2), s.pick(1024, 16), s.pick(32064, 97))
    step, kept = (
        train(model, fresh.adamw(s, model), feed),
        [{"id": i, "tags": [i]} for i in range(s.pick(120_000, 900))],
    )

    def collected() -> None:
        step()
        if not fixed:
            gc.collect()

    return Program(collected, frozen if fixed else nullcontext, close=kept.clear)


@case("synchronous logging", "keep metrics on the device and write them every 100 steps", stack=False)
def metrics_written(s: Setting, fixed: bool) -> Program:
    model = fresh.encoder(s, 1024, 8, 16, 256, classes=16)
    optimizer, batch = fresh.adamw(s, model), _sentences(s, 48, 256)
    file = tempfile.NamedTemporaryFile("w", suffix=".jsonl")  # noqa: SIM115
    params = list(model.parameters())[:48]

    def step() -> None:
        loss = model(*batch)
        loss.backward()
        if not fixed:
            entry = {str(i): p.grad.norm().item() for i, p in enumerate(params)} | {"loss": loss.item()}
            file.write(json.dumps(entry) + "\n")
            file.flush()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step, close=file.close)


@case("host-bound", "replay the denoising step from a CUDA graph", stack=False)
def denoised_eagerly(s: Setting, fixed: bool) -> Program:
    model, (latent, time) = fresh.unet(s, 64).eval(), fresh.noisy(s, 2, 64)
    kept = torch.zeros_like(latent)

    @torch.no_grad()
    def run() -> None:
        kept.copy_(model(latent, time))

    again = graphed(run) if fixed and s.cuda else run

    def step() -> None:
        for _ in range(3):
            again()

    return Program(step)


@case("unfused optimizer", "AdamW(..., fused=True)", stack=False)
def encoder_adamw_loop(s: Setting, fixed: bool) -> Program:
    model = fresh.encoder(s, 1024, 8, 16, 256, classes=16)
    how = {"fused": True} if fixed else {"foreach": False}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **how)
    return Program(train(model, optimizer, itertools.cycle([_sentences(s, 48, 256)])))


@case("weights cast every step", "keep the weights in bf16 instead of casting under autocast", stack=False)
def transformer_autocast(s: Setting, fixed: bool) -> Program:
    width, layers = s.pick(2048, 32), s.pick(8, 2)
    dtype = torch.bfloat16 if fixed else torch.float32
    blocks = s.place(
        lambda: nn.ModuleList(nets.EncoderBlock(width, s.pick(16, 2), nets.fused) for _ in range(layers)), dtype
    ).eval()
    x = torch.randn(s.pick(4, 2), s.pick(512, 16), width, device=s.device, dtype=dtype)

    @torch.no_grad()
    def step() -> None:
        with nullcontext() if fixed else torch.autocast(s.device, torch.bfloat16):
            for _ in range(2):
                y = x
                for block in blocks:
                    y = block(y)

    return Program(step)


@case("needless recompute", "drop checkpointing: the activations fit", stack=False)
def encoder_recomputed(s: Setting, fixed: bool) -> Program:
    model = fresh.encoder(s, 1280, 6, 20, 512, classes=16)
    optimizer, (ids, labels) = fresh.adamw(s, model), _sentences(s, 20, 512)

    def step() -> None:
        x = model.tokens(ids) + model.places.weight[: ids.shape[1]]
        for block in model.blocks:
            x = block(x) if fixed else checkpoint(block, x, use_reentrant=False)
        F.cross_entropy(model.head(x.mean(1)), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("fp32 matmul", 'torch.set_float32_matmul_precision("high")', stack=False)
def ranker_in_fp32(s: Setting, fixed: bool) -> Program:
    sizes = [s.pick(512, 16), *([s.pick(2048, 32)] * s.pick(5, 2)), 8]
    make = lambda: nn.Sequential(*(p for a, b in itertools.pairwise(sizes) for p in (nn.Linear(a, b), nn.ReLU())))
    model = s.place(make, torch.float32)
    optimizer, rows = fresh.adamw(s, model), s.pick(16384, 8)
    x, y = torch.randn(rows, sizes[0], device=s.device), torch.randn(rows, 8, device=s.device)

    def step() -> None:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step, lambda: precision("high" if fixed else "highest"))


@case("small batch", "one batch of 10 instead of 10 accumulated batches of 1", stack=False)
def documents_one_by_one(s: Setting, fixed: bool) -> Program:
    vocab, batch = s.pick(32064, 97), s.pick(10, 4)
    model = fresh.rotary(s, 1024, 6, 16, vocab, 512)
    optimizer, micro = fresh.adamw(s, model), batch if fixed else 1
    feed = fresh.tokens(s, batch, s.pick(512, 16), vocab)

    def step() -> None:
        ids, targets = next(feed)
        for part, wanted in zip(ids.split(micro), targets.split(micro), strict=True):
            (model(part, wanted) * (micro / batch)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("unfused attention", "F.scaled_dot_product_attention", stack=False)
def long_encoder_by_hand(s: Setting, fixed: bool) -> Program:
    model = fresh.encoder(s, 768, 5, 12, 1024, attend=nets.fused if fixed else nets.by_hand, classes=16)
    return Program(train(model, fresh.adamw(s, model), itertools.cycle([_sentences(s, 8, 1024)])))


@case("pageable copy", "pin the spectrograms and copy them with non_blocking=True", stack=False)
def spectrograms_pageable(s: Setting, fixed: bool) -> Program:
    model = s.place(lambda: nets.Sound(80, s.pick(1024, 32), s.pick(5, 2), s.pick(16, 2)))
    batch, frames = s.pick(64, 2), s.pick(512, 16)
    host = [torch.randn(batch, 80, frames) for _ in range(2)]
    feed = itertools.cycle([s.pinned(part) for part in host] if fixed else host)
    labels = torch.randint(0, 512, (batch,), device=s.device)
    batches = ((part.to(s.device, non_blocking=fixed), labels) for part in feed)
    return Program(train(model, fresh.adamw(s, model), batches))


@case("unfused pointwise chain", "F.layer_norm, F.gelu and F.dropout", stack=False)
def norm_and_gelu_by_hand(s: Setting, fixed: bool) -> Program:
    width, rows, layers = s.pick(1536, 32), s.pick(16384, 8), s.pick(6, 2)
    model = s.place(lambda: nn.ModuleList(nn.Linear(width, width) for _ in range(layers)))
    scale = nn.Parameter(torch.ones(width, device=s.device, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=1e-4, fused=s.cuda)
    data = torch.randn(rows, width, device=s.device, dtype=torch.bfloat16)

    def bent(x: Tensor) -> Tensor:
        if fixed:
            return F.gelu(F.layer_norm(x, (width,), scale))
        wide = x.float()
        centered = wide - wide.mean(-1, keepdim=True)
        normed = (centered / torch.sqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * scale
        return normed * 0.5 * (1.0 + torch.erf(normed / 1.4142135))

    def step() -> None:
        x = data
        for linear in model:
            x = x + bent(linear(x))
        F.mse_loss(x, data).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("data loader", "num_workers=1 → 8", rounds=1, warmup=12, steps=16, stack=False)
def pictures_one_worker(s: Setting, fixed: bool) -> Program:
    model = fresh.nhwc(fresh.plain(s, (64, 128, 256, 512), 2))
    workers = s.pick(8, 2) if fixed else 1
    loader = torch.utils.data.DataLoader(
        Photos(s.pick(160, 48), s.pick(128, 32)), s.pick(40, 4), num_workers=workers, pin_memory=s.cuda,
        persistent_workers=True,
    )  # fmt: skip
    feed = iter(loader)
    optimizer = fresh.sgd(s, model)

    def step() -> None:
        pictures, labels = (t.to(s.device, non_blocking=True) for t in next(feed))
        pictures = pictures.contiguous(memory_format=torch.channels_last).to(torch.bfloat16).div_(127.5).sub_(1.0)
        model(pictures, labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step, close=lambda: end_workers(feed))


# ---------------------------------------------------------------- what is found in healthy and fixed programs, done

UNTRACED: dict[str, Any] = {"traced": False, "stack": False}


@contextmanager
def swapped(name: str, value: Any) -> Iterator[None]:
    before = getattr(nets, name)
    setattr(nets, name, value)
    try:
        yield
    finally:
        setattr(nets, name, before)


@case("unfused pointwise chain", "torch.compile the rotation", compiles=True, rounds=1, steps=12, **UNTRACED)
def again_healthy_rotary_training(s: Setting, fixed: bool) -> Program:
    model = fresh.rotary(s, 2048, 5, 16, 32064, 1024)
    feed = fresh.tokens(s, s.pick(12, 2), s.pick(1024, 16), s.pick(32064, 97))
    step = train(model, fresh.adamw(s, model), feed)
    if not fixed:
        return Program(step)
    turned = torch.compile(nets.rotated, backend=fresh.compiler(s), dynamic=False)
    return Program(step, lambda: swapped("rotated", turned))


@case("misaligned sizes", "pad the tower's input to a multiple of 8", **UNTRACED)
def again_healthy_ranker(s: Setting, fixed: bool) -> Program:
    batch, tables, rows = s.pick(65536, 8), s.pick(8, 3), s.pick(100_000, 100)
    model = fresh.ranker(s, rows, 128, tables, tower=4096, layers=4)
    if fixed:
        first = model.top[0]
        extra = -first.in_features % 8
        model.top[0] = Padded(first.in_features, first.out_features, extra).to(first.weight)
    numbers, clicked = torch.randn(batch, 13, device=s.device), torch.rand(batch, device=s.device).round()
    ids = torch.randint(0, rows, (tables, batch, 2), device=s.device)
    return Program(train(model, fresh.sgd(s, model), itertools.cycle([(numbers, ids, clicked)])))


class Padded(nn.Linear):
    """A linear layer whose input gets a few zeros."""

    def __init__(self, inner: int, outer: int, extra: int) -> None:
        super().__init__(inner + extra, outer)
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (0, self.extra)))
