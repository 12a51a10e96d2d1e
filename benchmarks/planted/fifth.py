"""A fifth, small suite of planted causes: for a figure after the fourth one had been learned from."""

from __future__ import annotations

import gc
import itertools
from contextlib import nullcontext

import cases
import fourthnets as own
import fresh
import freshnets as nets
import nets as firstnets
import numpy as np
import torch
import torch.nn.functional as F
from cases import Photos, Program, Setting, case, end_workers, frozen, graphed, precision
from cases import training as train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@case("synchronization", "sizes of levels as Python numbers", stack=False)
def levels_asked(s: Setting, fixed: bool) -> Program:
    """Every layer asks the device how large the levels of a pyramid are, as some detectors do."""
    width, layers = s.pick(1024, 32), s.pick(10, 2)
    blocks = s.place(lambda: nn.ModuleList(nets.EncoderBlock(width, s.pick(16, 2), nets.fused) for _ in range(layers)))
    sizes = s.pick([512, 256, 128, 128], [8, 4, 2, 2])
    there = torch.tensor(sizes, device=s.device)
    x = torch.randn(s.pick(12, 2), sum(sizes), width, device=s.device, dtype=torch.bfloat16)

    @torch.no_grad()
    def step() -> None:
        y = x
        for block in blocks:
            parts = y.split(sizes if fixed else there.tolist(), 1)
            y = block(torch.cat([part + 0.01 * i for i, part in enumerate(parts)], 1))

    return Program(step)


@case("unfused attention", "F.scaled_dot_product_attention", stack=False)
def answers_attend_by_hand(s: Setting, fixed: bool) -> Program:
    width, heads, length = s.pick(1024, 32), s.pick(16, 2), s.pick(768, 16)
    layers = s.place(lambda: nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(s.pick(5, 2))))
    optimizer = fresh.adamw(s, layers)
    x = torch.randn(s.pick(12, 2), length, width, device=s.device, dtype=torch.bfloat16)
    later = torch.ones(length, length, dtype=torch.bool, device=s.device).triu(1)

    def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if fixed:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = torch.matmul(q, k.transpose(2, 3)) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(later, torch.finfo(scores.dtype).min)
        return torch.matmul(F.softmax(scores, -1, dtype=torch.float32).to(q.dtype), v)

    def step() -> None:
        y = x
        for layer in layers:
            qkv = layer(y).view(*y.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)
            y = y + mixed(*qkv.unbind(0)).transpose(1, 2).reshape(y.shape)
        F.mse_loss(y, x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("misaligned sizes", "round the hidden width from 5461 up to 5504", stack=False)
def hidden_5461(s: Setting, fixed: bool) -> Program:
    width, hidden = s.pick(2048, 32), s.pick(5504 if fixed else 5461, 48)
    blocks = s.place(
        lambda: nn.ModuleList(own.GatedBlock(width, s.pick(16, 2), hidden, own.norm_fused) for _ in range(3))
    )
    optimizer = fresh.adamw(s, blocks)
    x = torch.randn(s.pick(6, 2), s.pick(1024, 16), width, device=s.device, dtype=torch.bfloat16)

    def step() -> None:
        y = x
        for block in blocks:
            y = block(y)
        F.mse_loss(y, x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("host-bound", "replay the committee from a CUDA graph", stack=False)
def committee_one_by_one(s: Setting, fixed: bool) -> Program:
    width, rows = s.pick(512, 16), s.pick(256, 4)
    make = lambda: nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 8))
    members = s.place(lambda: nn.ModuleList(make() for _ in range(s.pick(40, 3)))).eval()
    x = torch.randn(rows, width, device=s.device, dtype=torch.bfloat16)
    votes = torch.zeros(rows, 8, device=s.device, dtype=torch.bfloat16)

    @torch.no_grad()
    def run() -> None:
        votes.copy_(torch.stack([member(x).softmax(-1) for member in members]).mean(0))

    return Program(graphed(run) if fixed and s.cuda else run)


@case("unfused optimizer", "SGD(..., fused=True)", stack=False)
def momentum_tensor_by_tensor(s: Setting, fixed: bool) -> Program:
    model = fresh.nhwc(s.place(lambda: firstnets.ResNet(s.pick((3, 3, 4, 3), (1, 1)), s.pick(64, 8))))
    how = {"fused": s.cuda} if fixed else {"foreach": False}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4, nesterov=True, **how)
    pictures, labels = fresh.images(s, 128, 192)
    return Program(train(model, optimizer, itertools.cycle([(fresh.nhwc(pictures), labels)])))


@case("pageable copy", "pin the features and copy them with non_blocking=True", stack=False)
def features_pageable(s: Setting, fixed: bool) -> Program:
    rows, width = s.pick(24576, 8), s.pick(1024, 16)
    sizes = [width, *([s.pick(4096, 32)] * s.pick(4, 2)), 8]
    make = lambda: [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    model = s.place(lambda: nn.Sequential(*make())).eval()
    host = [torch.randn(rows, width) for _ in range(2)]
    feed = itertools.cycle([s.pinned(part) for part in host] if fixed else host)

    @torch.no_grad()
    def step() -> None:
        model(next(feed).to(s.device, non_blocking=fixed).to(torch.bfloat16))

    return Program(step)


@case("needless recompute", "drop checkpointing: the activations fit", stack=False)
def gates_recomputed(s: Setting, fixed: bool) -> Program:
    width = s.pick(2048, 32)
    blocks = s.place(
        lambda: nn.ModuleList(own.GatedBlock(width, s.pick(16, 2), s.pick(5632, 48), own.norm_fused) for _ in range(4))
    )
    optimizer = fresh.adamw(s, blocks)
    x = torch.randn(s.pick(8, 2), s.pick(1024, 16), width, device=s.device, dtype=torch.bfloat16)

    def step() -> None:
        y = x
        for block in blocks:
            y = block(y) if fixed else checkpoint(block, y, use_reentrant=False)
        F.mse_loss(y, x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("weights cast every step", "keep the weights in bf16 instead of casting under autocast", stack=False)
def pictures_embedded_under_autocast(s: Setting, fixed: bool) -> Program:
    side, dtype = s.pick(224, 32), torch.bfloat16 if fixed else torch.float32
    model = s.place(lambda: firstnets.Vit(s.shape(width=1664, layers=6, heads=16, causal=False), side), dtype).eval()
    pictures = torch.randint(0, 255, (s.pick(12, 2), 3, side, side), dtype=torch.uint8, device=s.device)
    labels = torch.zeros(pictures.shape[0], dtype=torch.long, device=s.device)

    @torch.no_grad()
    def step() -> None:
        with nullcontext() if fixed else torch.autocast(s.device, torch.bfloat16):
            for _ in range(3):
                model(pictures, labels)

    return Program(step)


@case("gradient memsets", "zero_grad(set_to_none=True)", stack=False)
def words_zeroed(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=1536, layers=3, heads=12, vocab=65536)
    model, batches = cases.language(s, shape, 4, 1024)
    optimizer = fresh.adamw(s, model)

    def step() -> None:
        optimizer.zero_grad(set_to_none=fixed)
        model(*next(batches)).backward()
        optimizer.step()

    return Program(step)


@case("data loader", "num_workers=2 → 10", rounds=1, warmup=12, steps=16, stack=False)
def photos_two_workers(s: Setting, fixed: bool) -> Program:
    crop = s.pick(160, 32)
    model = s.place(lambda: firstnets.Vit(s.shape(width=768, layers=6, heads=12, causal=False), crop))
    workers = s.pick(10, 2) if fixed else s.pick(2, 1)
    data = Photos(s.pick(192, 48), crop)
    loader = torch.utils.data.DataLoader(
        data, s.pick(64, 4), num_workers=workers, pin_memory=s.cuda, persistent_workers=True
    )
    feed = iter(loader)
    batches = (tuple(t.to(s.device, non_blocking=True) for t in batch) for batch in feed)
    return Program(train(model, fresh.adamw(s, model), batches), close=lambda: end_workers(feed))


@case("NCHW convolution", "model and images in channels_last", stack=False)
def served_channels_first(s: Setting, fixed: bool) -> Program:
    model = s.place(lambda: firstnets.ResNet(s.pick((3, 4, 6, 3), (1, 1)), s.pick(64, 8))).eval()
    pictures, labels = fresh.images(s, 192, 224)
    if fixed:
        model, pictures = fresh.nhwc(model, pictures)

    @torch.no_grad()
    def step() -> None:
        model(pictures, labels)

    return Program(step)


@case("round trip through the host", "normalize and sort on the device", stack=False)
def neighbors_sought_on_host(s: Setting, fixed: bool) -> Program:
    model, batch = fresh.encoder(s, 1024, 6, 16, 256).eval(), s.pick(48, 2)
    ids = torch.randint(0, s.pick(30000, 100), (batch, s.pick(256, 16)), device=s.device)
    bank = torch.randn(s.pick(20000, 50), s.pick(1024, 32), device=s.device)
    known, turned = bank.cpu().numpy(), torch.arange(s.pick(20000, 50), device=s.device)

    @torch.no_grad()
    def step() -> None:
        found = model.trunk(ids).mean(1).float()
        if fixed:
            order = (F.normalize(found, dim=1) @ bank.T).topk(10, 1).indices
        else:
            there = found.cpu().numpy()
            there = there / np.linalg.norm(there, axis=1, keepdims=True)
            order = torch.from_numpy(np.argsort(-(there @ known.T), axis=1)[:, :10].copy()).to(s.device)
        turned[order].sum()

    return Program(step, lambda: precision("high"))


@case("garbage collection", "gc.freeze() after setup and gc.disable() in the loop", rounds=1, steps=14, stack=False)
def segmenter_collected(s: Setting, fixed: bool) -> Program:
    model = fresh.nhwc(s.place(lambda: own.Segmenter(s.pick((64, 128, 256, 512), (8, 16)), 21)))
    pictures = fresh.nhwc(fresh.images(s, 24, 256)[0])
    classes = torch.randint(0, 21, (pictures.shape[0], *pictures.shape[2:]), device=s.device)
    kept = [{"picture": i, "boxes": [(i, i + 1)]} for i in range(s.pick(150_000, 900))]
    learn = train(model, fresh.sgd(s, model), itertools.cycle([(pictures, classes)]))

    def step() -> None:
        learn()
        if not fixed:
            gc.collect()

    return Program(step, frozen if fixed else nullcontext, close=kept.clear)
