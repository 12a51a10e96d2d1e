"""A sixth suite: what is still found in fixed programs, done; healthy programs of many kinds; further causes."""

from __future__ import annotations

import copy
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import again
import cases
import fourth
import fourthnets as own
import fresh
import freshnets as nets
import nets as firstnets
import torch
import torch.nn.functional as F
from cases import CASES, Photos, Prefetch, Program, Setting, case, end_workers, graphed, precision
from cases import training as train
from healthy import HEALTHY, healthy
from third import Padded, swapped
from torch import Tensor, nn

# ---------------------------------------------------------------- what is found in fixed programs, done


def _was(name: str, s: Setting) -> Program:
    return CASES[name].build(s, True)


def _replayed(name: str, s: Setting, fixed: bool) -> Program:
    """The fixed program of another suite, or the same from a CUDA graph: its inputs are on the device already."""
    program = _was(name, s)
    return replace(program, step=graphed(program.step)) if fixed and s.cuda else program


@case("pinned copy on the compute stream", "copy the next clips on a side stream", stack=False)
def again_clips_pageable(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("clips_pageable", s)
    model = s.place(lambda: own.Clip(s.pick((64, 128, 256, 256), (8, 8)))).to(memory_format=torch.channels_last_3d)
    size = s.pick((12, 3, 16, 112, 112), (2, 3, 4, 16, 16))
    host = [(s.pinned(torch.randn(size).to(memory_format=torch.channels_last_3d)),) for _ in range(2)]
    labels = torch.randint(0, 400, (size[0],), device=s.device)
    batches = ((clip, labels) for (clip,) in Prefetch(s, itertools.cycle(host)))
    return Program(train(model, fresh.adamw(s, model), batches))


@case("pinned copy on the compute stream", "copy the next frames on a side stream", stack=False)
def again_frames_pageable(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("frames_pageable", s)
    model, batch, side = fresh.nhwc(fresh.plain(s, (64, 128, 256), 2)), s.pick(48, 2), s.pick(192, 16)
    host = [(s.pinned(fresh.nhwc(torch.randn(batch, 3, side, side))),) for _ in range(2)]
    labels = torch.randint(0, 1000, (batch,), device=s.device)
    batches = ((part, labels) for (part,) in Prefetch(s, itertools.cycle(host)))
    return Program(train(model, fresh.sgd(s, model), batches))


@case("unfused optimizer", "AdamW(..., fused=True)", stack=False)
def again_diffusion_in_fp32(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("diffusion_in_fp32", s)
    width, layers = s.pick(1152, 32), s.pick(5, 2)
    make = lambda: nn.ModuleList(nets.EncoderBlock(width, s.pick(16, 2), nets.fused) for _ in range(layers))
    blocks = s.place(make, torch.float32)
    optimizer, seen = fresh.adamw(s, blocks), [0.0]
    noise = torch.randn(s.pick(24, 2), s.pick(256, 16), width, device=s.device)

    def step() -> None:
        x = noise
        for block in blocks:
            x = block(x)
        loss = F.mse_loss(x, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen[:] = [loss.item()]

    return Program(step, lambda: precision("high"))


class Remembering(own.Routed):
    """Splits tokens as the step before did; how many each expert got now is copied back without waiting."""

    kept: Tensor

    def _sorted(self, x_LC: Tensor, normed: Tensor, gates_L2: Tensor, chosen_L2: Tensor) -> Tensor:
        flat = chosen_L2.flatten()
        order = flat.argsort(stable=True)
        counts = torch.zeros(self.num, dtype=torch.long, device=x_LC.device)
        counts = counts.scatter_add_(0, flat, torch.ones_like(flat))
        sizes = self.kept.tolist()
        self.kept.copy_(counts, non_blocking=True)
        sizes = sizes if sum(sizes) == flat.numel() else counts.tolist()
        tokens, gates = order // 2, gates_L2.flatten()[order]
        out, parts = x_LC.clone(), (tokens.split(sizes), gates.split(sizes))
        for up, down, places, weight in zip(self.up, self.down, *parts, strict=True):
            out.index_add_(0, places, down(F.silu(up(normed[places]))) * weight[:, None])
        return out


@case("synchronization", "look at the counts a step later", stack=False)
def again_experts_located(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("experts_located", s)
    sizes = s.pick((2048, 5632, 8), (32, 48, 4))
    layers = s.place(lambda: nn.ModuleList(Remembering(*sizes, located=False) for _ in range(s.pick(3, 2)))).eval()
    for layer in layers:
        layer.kept = s.pinned(torch.zeros(sizes[2], dtype=torch.long))
    x = torch.randn(s.pick(12288, 16), sizes[0], device=s.device, dtype=torch.bfloat16)

    @torch.no_grad()
    def step() -> None:
        y = x
        for layer in layers:
            y = layer(y)

    return Program(step)


@case("data loader", "one endless epoch", rounds=1, warmup=4, steps=12, stack=False)
def again_workers_started_each_epoch(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("workers_started_each_epoch", s)
    model, batch = fresh.encoder(s, 768, 4, 12, 256, classes=16), s.pick(64, 4)
    feed = iter(fourth._reviews(s, batch, s.pick(4, 1), persistent_workers=True))
    optimizer = fresh.adamw(s, model)

    def step() -> None:
        """Three batches, as the epochs had."""
        for ids, labels in itertools.islice(feed, 3):
            model(ids.to(s.device, non_blocking=True), labels.to(s.device, non_blocking=True)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return Program(step, close=lambda: end_workers(feed))


@case("padding", "sort by length and pad each quarter of the batch to its own longest", stack=False)
def again_padded_to_limit(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("padded_to_limit", s)
    limit, longest, batch = s.pick(512, 16), s.pick(224, 8), s.pick(64, 4)
    model = fresh.encoder(s, 1024, 6, 16, limit, classes=16)
    optimizer, lengths = fresh.adamw(s, model), torch.linspace(longest // 2, longest, batch).long()

    def part(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        width = -(-int(rows.max()) // 8) * 8
        mask = (torch.arange(width)[None] < rows[:, None]).to(s.device)
        ids = torch.randint(5, s.pick(30000, 100), mask.shape, device=s.device) * mask
        return ids, torch.randint(0, 16, (len(rows),), device=s.device), mask[:, None, None]

    parts = [part(rows) for rows in lengths.split(batch // 4)]
    real = float(lengths.sum()) / sum(ids.numel() for ids, _, _ in parts)

    def step() -> None:
        for ids, labels, mask in parts:
            (model(ids, labels, mask) / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step, facts={"padding": [{"argument": "mask", "real_frac": real}]})


@case("NCHW convolution", "patches and pictures in channels_last", stack=False)
def again_vision_checkpointed(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("vision_checkpointed", s)
    side, layers = s.pick(224, 32), s.pick(6, 2)
    model = s.place(lambda: firstnets.Vit(s.shape(width=1024, layers=layers, heads=16, causal=False), side))
    pictures = torch.randint(0, 255, (s.pick(64, 2), 3, side, side), dtype=torch.uint8, device=s.device)
    model, pictures = fresh.nhwc(model, pictures)
    labels = torch.randint(0, 1000, (pictures.shape[0],), device=s.device)
    return Program(train(model, fresh.adamw(s, model), itertools.cycle([(pictures, labels)])))


@case("unfused pointwise chain", "torch.compile the policy", compiles=True, rounds=1, steps=16, stack=False)
def again_policy_compiled(s: Setting, fixed: bool) -> Program:
    """Updates from a CUDA graph in both."""
    if not fixed:
        return _was("policy_updated_in_small_steps", s)
    torch._dynamo.reset()
    with _with(own.Policy, "forward", torch.compile(own.Policy.forward, backend=cases.compiler(s), dynamic=False)):
        return _was("policy_updated_in_small_steps", s)


@case("unfused pointwise chain", "torch.compile the rotation", compiles=True, rounds=1, steps=12, stack=False)
def again_healthy_graph_decode(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("healthy_graph_decode", s)
    turned = torch.compile(nets.rotated, backend=cases.compiler(s), dynamic=False)
    with swapped("rotated", turned):
        return _was("healthy_graph_decode", s)


def _gate_in(z: Tensor) -> tuple[Tensor, Tensor]:
    y = F.silu(z)
    return y, y.mean((2, 3), keepdim=True)


def _gate_out(y: Tensor, gate: Tensor) -> Tensor:
    return y * torch.sigmoid(gate)


@contextmanager
def _with(owner: Any, name: str, value: Any) -> Iterator[None]:
    """A module or class with another function of that name."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@case("unfused pointwise chain", "torch.compile the gates", compiles=True, rounds=1, steps=12, stack=False)
def again_adam_tensor_by_tensor(s: Setting, fixed: bool) -> Program:
    return _gates_compiled(_was("adam_tensor_by_tensor", s), s) if fixed else _was("adam_tensor_by_tensor", s)


def _gates_compiled(program: Program, s: Setting) -> Program:
    torch._dynamo.reset()
    enter, leave = (torch.compile(f, backend=cases.compiler(s), dynamic=True) for f in (_gate_in, _gate_out))

    def forward(self: nets.Inverted, x: Tensor) -> Tensor:
        y, mean = enter(self.bn2(self.each(F.silu(self.bn1(self.wide(x))))))
        y = self.bn3(self.narrow(leave(y, self.excite(F.silu(self.squeeze(mean))))))
        return x + y if self.keeps else y

    return replace(program, scope=lambda: _with(nets.Inverted, "forward", forward))


@case("misaligned sizes", "pad the tower's input to a multiple of 8", stack=False)
def again_tables_zeroed(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("tables_zeroed", s)
    batch, tables, rows = s.pick(16384, 8), s.pick(6, 3), s.pick(800_000, 100)
    model = fresh.ranker(s, rows, 64, tables, tower=4096, layers=3)
    first = model.top[0]
    model.top[0] = Padded(first.in_features, first.out_features, -first.in_features % 8).to(first.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=s.cuda)
    numbers, clicked = torch.randn(batch, 13, device=s.device), torch.rand(batch, device=s.device).round()
    ids = torch.randint(0, rows, (tables, batch, 4), device=s.device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(numbers, ids, clicked).backward()
        optimizer.step()

    return Program(step)


@case("host-bound", "replay the step from a CUDA graph", stack=False)
def again_averages_by_name(s: Setting, fixed: bool) -> Program:
    return _replayed("averages_by_name", s, fixed)


@case("host-bound", "a CUDA graph of the requests", stack=False)
def again_cache_emptied_for_each_request(s: Setting, fixed: bool) -> Program:
    return _replayed("cache_emptied_for_each_request", s, fixed)


@case("host-bound", "replay the step from a CUDA graph", stack=False)
def again_losses_printed(s: Setting, fixed: bool) -> Program:
    return _replayed("losses_printed", s, fixed)


@case("host-bound", "a CUDA graph of the four batches", stack=False)
def again_prompts_padded(s: Setting, fixed: bool) -> Program:
    return _replayed("prompts_padded", s, fixed)


@case("host-bound", "replay the step from a CUDA graph", stack=False)
def again_slides_in_pieces(s: Setting, fixed: bool) -> Program:
    return _replayed("slides_in_pieces", s, fixed)


@case("host-bound", "replay the detector from a CUDA graph", stack=False)
def again_boxes_sorted_on_host(s: Setting, fixed: bool) -> Program:
    return _replayed("boxes_sorted_on_host", s, fixed)


@case("host-bound", "replay the embedding from a CUDA graph", stack=False)
def again_pictures_embedded_under_autocast(s: Setting, fixed: bool) -> Program:
    return _replayed("pictures_embedded_under_autocast", s, fixed)


@case("host-bound", "capture the step in a CUDA graph", stack=False)
def again_answers_attend_by_hand(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("answers_attend_by_hand", s)
    with _with(fresh, "adamw", _capturable):
        return _replayed("answers_attend_by_hand", s, fixed)


def _capturable(s: Setting, model: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW that a graph may capture."""
    return again._capturable(model)


@case("host-bound", "capture the step in a CUDA graph", rounds=1, warmup=12, steps=16, stack=False)
def again_photos_two_workers(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("photos_two_workers", s)
    crop, batch = s.pick(160, 32), s.pick(64, 4)
    model = s.place(lambda: firstnets.Vit(s.shape(width=768, layers=6, heads=12, causal=False), crop))
    pictures = torch.zeros(batch, 3, crop, crop, dtype=torch.uint8, device=s.device)
    labels = torch.zeros(batch, dtype=torch.long, device=s.device)
    once = again._whole_step(s, model, again._capturable(model), (pictures, labels))
    loader = torch.utils.data.DataLoader(
        Photos(s.pick(192, 48), crop), batch, num_workers=s.pick(10, 2), pin_memory=s.cuda, persistent_workers=True
    )
    feed = iter(loader)

    def step() -> None:
        for into, new in zip((pictures, labels), next(feed), strict=True):
            into.copy_(new, non_blocking=True)
        once()

    return Program(step, close=lambda: end_workers(feed))


# ---------------------------------------------------------------- nothing to find


@healthy
def healthy_mixed_resnet(s: Setting, fixed: bool) -> Program:
    """A ResNet in channels_last under autocast, its pictures uploaded beside it."""
    model = s.place(lambda: firstnets.ResNet(s.pick((3, 4, 6, 3), (1, 1)), s.pick(64, 8)), torch.float32)
    model = fresh.nhwc(model)
    pictures, labels = fresh.images(s, 256, 224)
    host = (s.pinned(fresh.nhwc(pictures.cpu())), s.pinned(labels.cpu()))
    batches, optimizer = iter(Prefetch(s, itertools.cycle([host]))), fresh.sgd(s, model)

    def step() -> None:
        with torch.autocast(s.device, torch.bfloat16):
            loss = model(*next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@healthy
def healthy_mixed_gpt(s: Setting, fixed: bool) -> Program:
    """fp32 weights under autocast, the loss outside of it; clipped gradients, a fused optimizer with a schedule."""
    shape = s.shape(width=2048, layers=5, heads=16, vocab=16384)
    model, batches = cases.language(s, shape, 12, 1024, dtype=torch.float32)
    params, optimizer = list(model.parameters()), fresh.adamw(s, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 100))

    def step() -> None:
        ids, targets = next(batches)
        with torch.autocast(s.device, torch.bfloat16):
            logits = model.head(model.trunk(ids))
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@healthy
def healthy_prefill(s: Setting, fixed: bool) -> Program:
    """A long prompt through a decoder with gated layers, the last token's logits at its end."""
    width, layers, length, vocab = s.pick(3072, 32), s.pick(6, 2), s.pick(16384, 16), s.pick(128256, 96)
    block = lambda: own.GatedBlock(width, s.pick(24, 2), s.pick(8192, 48), own.norm_fused)
    blocks = s.place(lambda: nn.ModuleList(block() for _ in range(layers))).eval()
    tokens, head = s.place(lambda: nn.Embedding(vocab, width)), s.place(lambda: nn.Linear(width, vocab, bias=False))
    ids = torch.randint(0, vocab, (s.pick(1, 2), length), device=s.device)

    @torch.inference_mode()
    def step() -> None:
        x = tokens(ids)
        for part in blocks:
            x = part(x)
        head(x[:, -1]).argmax(-1)

    return Program(step)


@healthy
def healthy_wide_decode(s: Setting, fixed: bool) -> Program:
    """Tokens of many sequences from a CUDA graph, each attending to its past and to what was heard."""
    width, batch, room, vocab = s.pick(1280, 32), s.pick(96, 2), s.pick(448, 8), s.pick(51904, 96)
    make = lambda: own.Listener(width, s.pick(20, 2), batch, room, s.pick(1500, 12))
    layers = s.place(lambda: nn.ModuleList(make() for _ in range(s.pick(8, 2)))).eval()
    tokens, head = s.place(lambda: nn.Embedding(vocab, width)), s.place(lambda: nn.Linear(width, vocab, bias=False))
    ids = torch.zeros(batch, 1, dtype=torch.long, device=s.device)
    place = torch.full((1,), 5, dtype=torch.long, device=s.device)

    @torch.no_grad()
    def token() -> None:
        x = tokens(ids)
        for layer in layers:
            x = layer(x, place)
        ids.copy_(head(x)[:, -1].argmax(-1, keepdim=True))

    once = graphed(token) if s.cuda else token

    def step() -> None:
        for _ in range(4):
            once()

    return Program(step)


@healthy
def healthy_unet_training(s: Setting, fixed: bool) -> Program:
    model = fresh.nhwc(fresh.unet(s, 192))
    latent, time = fresh.noisy(s, 24, 64)
    latent, optimizer = fresh.nhwc(latent), fresh.adamw(s, model)

    def step() -> None:
        fresh.denoise(model, optimizer, latent, time)

    return Program(step)


@healthy
def healthy_listener(s: Setting, fixed: bool) -> Program:
    """A speech encoder over thirty seconds of sound: 1,500 places after its convolutions."""
    model = s.place(lambda: nets.Sound(80, s.pick(1280, 32), s.pick(8, 2), s.pick(20, 2)))
    sounds = torch.randn(s.pick(16, 2), 80, s.pick(3000, 32), device=s.device, dtype=torch.bfloat16)
    labels = torch.randint(0, 512, (sounds.shape[0],), device=s.device)
    return Program(train(model, fresh.adamw(s, model), itertools.cycle([(sounds, labels)])))


@healthy
def healthy_sparse_ranker(s: Setting, fixed: bool) -> Program:
    """Tables with sparse gradients, a tower of aligned widths, batches uploaded beside it."""
    batch, tables, rows, width = s.pick(65536, 8), s.pick(15, 3), s.pick(1_000_000, 100), s.pick(128, 16)
    model = fresh.ranker(s, rows, width, tables, tower=4096, layers=4)
    for table in model.tables:
        table.sparse = True
    parts = [model.bottom, model.top, model.out]
    dense = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=1e-3, fused=s.cuda)
    sparse = torch.optim.SGD(model.tables.parameters(), lr=1e-3)
    draw = lambda: (torch.randn(batch, 13), torch.randint(0, rows, (tables, batch, 2)), torch.rand(batch).round())
    host = [tuple(s.pinned(part) for part in draw()) for _ in range(2)]
    batches = iter(Prefetch(s, itertools.cycle(host)))

    def step() -> None:
        model(*next(batches)).backward()
        for optimizer in (dense, sparse):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return Program(step)


@healthy
def healthy_biased_windows(s: Setting, fixed: bool) -> Program:
    """Attention with a learned bias for every head and pair of places, which no causal flag replaces."""
    width, length, layers = s.pick(1024, 32), s.pick(512, 16), s.pick(6, 2)
    blocks = s.place(lambda: nn.ModuleList(own.Windows(width, s.pick(16, 2), length, False) for _ in range(layers)))
    blocks = blocks.eval()
    x = torch.randn(s.pick(48, 2), length, width, device=s.device, dtype=torch.bfloat16)

    @torch.inference_mode()
    def step() -> None:
        y = x
        for block in blocks:
            y = block(y)

    return Program(step)


@healthy
def healthy_orthogonal_updates(s: Setting, fixed: bool) -> Program:
    """Matrices updated by Muon: products inside of the optimizer that no fused optimizer has."""
    width, layers = s.pick(2048, 32), s.pick(4, 2)
    block = lambda: own.GatedBlock(width, s.pick(16, 2), s.pick(5632, 48), own.norm_fused)
    blocks = s.place(lambda: nn.ModuleList(block() for _ in range(layers)))
    matrices = torch.optim.Muon([p for p in blocks.parameters() if p.ndim == 2], lr=1e-3)
    others = torch.optim.AdamW([p for p in blocks.parameters() if p.ndim != 2], lr=1e-4, fused=True)
    x = torch.randn(s.pick(24, 2), s.pick(1024, 16), width, device=s.device, dtype=torch.bfloat16)

    def step() -> None:
        y = x
        for part in blocks:
            y = part(y)
        F.mse_loss(y, x).backward()
        for optimizer in (matrices, others):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return Program(step)


@healthy
def healthy_averaged_training(s: Setting, fixed: bool) -> Program:
    """Micro-batches large enough, clipped gradients, and an average of the weights by lists."""
    shape, pieces = s.shape(width=1536, layers=6, heads=12, vocab=16384), 2
    model, batches = cases.language(s, shape, 12, 1024)
    mean, params, optimizer = copy.deepcopy(model).eval(), list(model.parameters()), fresh.adamw(s, model)
    kept = list(mean.parameters())

    def step() -> None:
        for _ in range(pieces):
            (model(*next(batches)) / pieces).backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(kept, params, 0.001)

    return Program(step)


@healthy
def healthy_committee(s: Setting, fixed: bool) -> Program:
    """The fixed program of the fifth suite whose small softmaxes were once taken for attention."""
    return _was("committee_one_by_one", s)


@case("none", "nothing", **HEALTHY | {"compiles": True, "rounds": 1})
def healthy_compiled_training(s: Setting, fixed: bool) -> Program:
    """A block compiled once, forward and backward, for every layer; norms and gates are fused."""
    torch._dynamo.reset()
    width, layers = s.pick(2048, 32), s.pick(5, 2)
    block = lambda: own.GatedBlock(width, s.pick(16, 2), s.pick(5632, 48), own.norm_in_steps)
    blocks = s.place(lambda: nn.ModuleList(block() for _ in range(layers)))
    run = torch.compile(lambda part, y: part(y), backend=cases.compiler(s), dynamic=False)
    optimizer = fresh.adamw(s, blocks)
    x = torch.randn(s.pick(12, 2), s.pick(1024, 16), width, device=s.device, dtype=torch.bfloat16)

    def step() -> None:
        y = x
        for part in blocks:
            y = run(part, y)
        F.mse_loss(y, x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


# ---------------------------------------------------------------- further causes


@contextmanager
def _crowd(num: int) -> Iterator[None]:
    """Busy processes beside this one."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
        for other in others:
            other.wait()


@case("cpu contention", "end the jobs that take its cores", rounds=1, warmup=6, steps=24, stack=False)
def launches_in_a_crowd(s: Setting, fixed: bool) -> Program:
    """Three busy processes for every core, beside a step that needs its host."""
    model = fresh.encoder(s, 768, 8, 12, 256, classes=16)
    ids = torch.randint(0, s.pick(30000, 100), (s.pick(8, 2), s.pick(256, 16)), device=s.device)
    labels = torch.randint(0, 16, (ids.shape[0],), device=s.device)
    step = train(model, fresh.adamw(s, model), itertools.cycle([(ids, labels)]))
    num = s.pick(3 * (os.cpu_count() or 1), 2)
    return Program(step, nullcontext if fixed else lambda: _crowd(num))


@case("weights cast every step", "one autocast region around all pieces of the batch", stack=False)
def weights_cast_for_each_piece(s: Setting, fixed: bool) -> Program:
    width, layers, pieces = s.pick(4096, 32), 2, 4
    block = lambda: own.GatedBlock(width, s.pick(32, 2), s.pick(11008, 48), own.norm_fused)
    blocks = s.place(lambda: nn.ModuleList(block() for _ in range(layers)), torch.float32)
    optimizer = fresh.adamw(s, blocks)
    x = torch.randn(s.pick(1, 2), s.pick(1024, 16), width, device=s.device)
    region = lambda: torch.autocast(s.device, torch.bfloat16)

    def piece() -> None:
        y = x
        for part in blocks:
            y = part(y)
        F.mse_loss(y, x).backward()

    def step() -> None:
        with region() if fixed else nullcontext():
            for _ in range(pieces):
                with nullcontext() if fixed else region():
                    piece()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("pageable copy", "pin the features and copy them with non_blocking=True", stack=False)
def vectors_pageable(s: Setting, fixed: bool) -> Program:
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


@case("unfused attention", "need_weights=False", stack=False)
def weights_needed_by_nobody(s: Setting, fixed: bool) -> Program:
    """nn.MultiheadAttention gives its weights back unless it is told not to, and then cannot be fused."""
    width, layers = s.pick(1024, 32), s.pick(6, 2)
    attend = s.place(lambda: nn.ModuleList(_attention(width, s.pick(16, 2)) for _ in range(layers)))
    norms = s.place(lambda: nn.ModuleList(nn.LayerNorm(width) for _ in range(layers)))
    optimizer = fresh.adamw(s, nn.ModuleList([attend, norms]))
    x = torch.randn(s.pick(16, 2), s.pick(512, 16), width, device=s.device, dtype=torch.bfloat16)

    def step() -> None:
        y = x
        for part, norm in zip(attend, norms, strict=True):
            h = norm(y)
            y = y + part(h, h, h, need_weights=not fixed)[0]
        F.mse_loss(y, x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


def _attention(width: int, heads: int) -> nn.Module:
    return nn.MultiheadAttention(width, heads, batch_first=True)


@case("synchronization", "bf16 needs no scaler", stack=False)
def gradients_scaled_for_bf16(s: Setting, fixed: bool) -> Program:
    """A scaler for half precision kept for bf16: every step it asks whether a gradient overflowed."""
    model = fresh.encoder(s, 1024, 8, 16, 512, classes=16).float()
    ids = torch.randint(0, s.pick(30000, 100), (s.pick(24, 2), s.pick(512, 16)), device=s.device)
    labels = torch.randint(0, 16, (ids.shape[0],), device=s.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(s.device, enabled=not fixed and s.cuda, init_scale=1.0, growth_interval=10**9)

    def step() -> None:
        with torch.autocast(s.device, torch.bfloat16):
            loss = model(ids, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("NCHW convolution", "model and clips in channels_last_3d", stack=False)
def clips_channels_first(s: Setting, fixed: bool) -> Program:
    model = s.place(lambda: own.Clip(s.pick((64, 128, 256, 512), (8, 8))))
    size = s.pick((12, 3, 16, 112, 112), (2, 3, 4, 16, 16))
    clips = torch.randn(size, device=s.device, dtype=torch.bfloat16)
    if fixed:
        model, clips = (part.to(memory_format=torch.channels_last_3d) for part in (model, clips))
    labels = torch.randint(0, 400, (size[0],), device=s.device)
    return Program(train(model, fresh.sgd(s, model), itertools.cycle([(clips, labels)])))


@case("host-bound", "torch._foreach_norm over all gradients", stack=False)
def norms_one_by_one(s: Setting, fixed: bool) -> Program:
    """The size of every gradient, kept on the device for a chart."""
    model = fresh.nhwc(s.place(lambda: nets.Efficient(s.pick((48, 96, 192, 320), (8, 16)), s.pick(4, 1))))
    pictures, labels = fresh.images(s, 128, 192)
    pictures, optimizer, params = fresh.nhwc(pictures), fresh.sgd(s, model), list(model.parameters())
    groups = [[p for p in params if p.dtype is kind] for kind in (torch.float32, torch.bfloat16)]
    charted: list[Any] = []

    def step() -> None:
        model(pictures, labels).backward()
        charted.clear()
        for group in groups:
            gradients = [p.grad for p in group]
            sizes = torch._foreach_norm(gradients) if fixed else [gradient.norm() for gradient in gradients]
            charted.append(torch.stack(sizes))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("fp32 logits", "shift the labels, and leave the logits in bf16", stack=False)
def logits_shifted_in_fp32(s: Setting, fixed: bool) -> Program:
    """Logits upcast, cut by one place and made contiguous, as causal models did for years."""
    vocab, width = s.pick(65536, 96), s.pick(1536, 32)
    blocks = s.place(lambda: nn.ModuleList(nets.EncoderBlock(width, s.pick(12, 2), nets.fused) for _ in range(3)))
    tokens = s.place(lambda: nn.Embedding(vocab, width))
    head = s.place(lambda: nn.Linear(width, vocab, bias=False))
    optimizer = torch.optim.AdamW([*blocks.parameters(), *head.parameters()], lr=1e-5, fused=True)
    feed = fresh.tokens(s, s.pick(8, 2), s.pick(1024, 16), vocab)

    def step() -> None:
        ids, labels = next(feed)
        x = tokens(ids).detach()
        for block in blocks:
            x = block(x)
        logits = head(x)
        if fixed:
            shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
            loss = F.cross_entropy(logits.flatten(0, 1), shifted.flatten())
        else:
            kept = logits.float()[:, :-1].contiguous()
            loss = F.cross_entropy(kept.flatten(0, 1), labels[:, 1:].contiguous().flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


# ---------------------------------------------------------------- what is found in the fixed programs above, done


@case("pinned copy on the compute stream", "copy the next vectors on a side stream", stack=False)
def again_vectors_pageable(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("vectors_pageable", s)
    rows, width = s.pick(24576, 8), s.pick(1024, 16)
    sizes = [width, *([s.pick(4096, 32)] * s.pick(4, 2)), 8]
    make = lambda: [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    model = s.place(lambda: nn.Sequential(*make())).eval()
    feed = iter(Prefetch(s, itertools.cycle([(s.pinned(torch.randn(rows, width)),) for _ in range(2)])))

    @torch.no_grad()
    def step() -> None:
        model(next(feed)[0].to(torch.bfloat16))

    return Program(step)


@case("host-bound", "capture the step in a CUDA graph", stack=False)
def again_launches_in_a_crowd(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("launches_in_a_crowd", s)
    with _with(fresh, "adamw", _capturable):
        return _replayed("launches_in_a_crowd", s, fixed)


@case("synchronous logging", "look at the loss a step later", stack=False)
def again_diffusion_read_later(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("again_diffusion_in_fp32", s)
    width, layers = s.pick(1152, 32), s.pick(5, 2)
    make = lambda: nn.ModuleList(nets.EncoderBlock(width, s.pick(16, 2), nets.fused) for _ in range(layers))
    blocks = s.place(make, torch.float32)
    optimizer, seen = fresh.adamw(s, blocks), [0.0]
    noise = torch.randn(s.pick(24, 2), s.pick(256, 16), width, device=s.device)
    there = s.pinned(torch.zeros(1))

    def step() -> None:
        x = noise
        for block in blocks:
            x = block(x)
        loss = F.mse_loss(x, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen[:] = there.tolist()
        there.copy_(loss.detach()[None], non_blocking=True)

    return Program(step, lambda: precision("high"))


@case("host-bound", "capture a batch in a CUDA graph", rounds=1, warmup=4, steps=12, stack=False)
def again_epochs_endless(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("again_workers_started_each_epoch", s)
    model, batch = fresh.encoder(s, 768, 4, 12, 256, classes=16), s.pick(64, 4)
    feed = iter(fourth._reviews(s, batch, s.pick(4, 1), persistent_workers=True))
    ids, labels = (part.to(s.device) for part in next(feed))
    once = again._whole_step(s, model, again._capturable(model), (ids, labels))

    def step() -> None:
        for new in itertools.islice(feed, 3):
            for into, part in zip((ids, labels), new, strict=True):
                into.copy_(part, non_blocking=True)
            once()

    return Program(step, close=lambda: end_workers(feed))


@case("unfused pointwise chain", "torch.compile the gates", compiles=True, rounds=1, steps=12, stack=False)
def again_norms_one_by_one(s: Setting, fixed: bool) -> Program:
    return _gates_compiled(_was("norms_one_by_one", s), s) if fixed else _was("norms_one_by_one", s)


@case("unfused pointwise chain", "torch.compile the norms", compiles=True, rounds=1, steps=12, stack=False)
def again_weights_cast_for_each_piece(s: Setting, fixed: bool) -> Program:
    """Norms of queries in bf16 with weights in fp32, which no fused kernel takes."""
    if not fixed:
        return _was("weights_cast_for_each_piece", s)
    torch._dynamo.reset()
    norm = torch.compile(own.norm_fused, backend=cases.compiler(s), dynamic=False)
    with _with(own, "norm_fused", norm):
        return _was("weights_cast_for_each_piece", s)


@case("unfused pointwise chain", "torch.compile the blocks", compiles=True, rounds=1, steps=12, stack=False)
def again_gradients_scaled_for_bf16(s: Setting, fixed: bool) -> Program:
    program = _was("gradients_scaled_for_bf16", s)
    if not fixed:
        return program
    torch._dynamo.reset()
    forward = torch.compile(nets.EncoderBlock.forward, backend=cases.compiler(s), dynamic=False)
    return replace(program, scope=lambda: _with(nets.EncoderBlock, "forward", forward))


@case("padding", "sorted by length: each batch is padded to its own longest", rounds=2, warmup=2, steps=5, stack=False)
def again_padded_in_order(s: Setting, fixed: bool) -> Program:
    """Four batches of the fixed program a step; sorted, a batch holds texts of similar length, and is as large."""
    longest, batch = s.pick(224, 8), s.pick(64, 4)
    model = fresh.encoder(s, 1024, 6, 16, s.pick(512, 16), classes=16)
    optimizer, mixed = fresh.adamw(s, model), torch.linspace(longest // 2, longest, batch).long()
    lengths = mixed.repeat_interleave(4).split(batch) if fixed else [mixed] * 4

    def padded(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mask = (torch.arange(-(-int(rows.max()) // 8) * 8)[None] < rows[:, None]).to(s.device)
        ids = torch.randint(5, s.pick(30000, 100), mask.shape, device=s.device) * mask
        return ids, torch.randint(0, 16, (len(rows),), device=s.device), mask[:, None, None]

    batches = [padded(rows) for rows in lengths]
    real = sum(int(rows.sum()) for rows in lengths) / sum(ids.numel() for ids, _, _ in batches)

    def step() -> None:
        for part in batches:
            model(*part).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return Program(step, facts={"padding": [{"argument": "mask", "real_frac": real}]})


@case("NCHW convolution", "patches and pictures in channels_last", stack=False)
def again_pictures_in_graph(s: Setting, fixed: bool) -> Program:
    """The embedding replayed from a graph in both."""
    side = s.pick(224, 32)
    model = s.place(lambda: firstnets.Vit(s.shape(width=1664, layers=6, heads=16, causal=False), side)).eval()
    pictures = torch.randint(0, 255, (s.pick(12, 2), 3, side, side), dtype=torch.uint8, device=s.device)
    if fixed:
        model, pictures = fresh.nhwc(model, pictures)
    labels = torch.zeros(pictures.shape[0], dtype=torch.long, device=s.device)

    @torch.no_grad()
    def run() -> None:
        for _ in range(3):
            model(pictures, labels)

    return Program(graphed(run) if s.cuda else run)
