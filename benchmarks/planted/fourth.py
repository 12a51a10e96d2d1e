"""A fourth suite of planted causes, written from what people report: other networks, several habits at once, healthy
programs with nothing to find, and second fixes of what is still found in fixed programs."""

from __future__ import annotations

import copy
import itertools
import re
import tempfile
from collections.abc import Iterator
from typing import Any

import again
import cases
import fourthnets as own
import fresh
import freshnets as nets
import nets as firstnets
import numpy as np
import torch
import torch.nn.functional as F
from cases import CASES, Prefetch, Program, Setting, case, end_workers, graphed, precision
from cases import training as train
from healthy import HEALTHY, healthy
from third import Padded, swapped
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# ---------------------------------------------------------------- the host waits


@case("synchronization", "bf16 needs no search for infinities", stack=False)
def infinities_looked_for(s: Setting, fixed: bool) -> Program:
    width, layers = s.pick(1024, 32), s.pick(12, 2)
    blocks = s.place(lambda: nn.ModuleList(own.Careful(width, s.pick(16, 2), not fixed) for _ in range(layers))).eval()
    x = torch.randn(s.pick(24, 2), s.pick(512, 16), width, device=s.device, dtype=torch.bfloat16)

    @torch.no_grad()
    def step() -> None:
        y = x
        for block in blocks:
            y = block(y)

    return Program(step)


@case("synchronization", "sort tokens by expert once a layer", stack=False)
def experts_located(s: Setting, fixed: bool) -> Program:
    sizes = s.pick((2048, 5632, 8), (32, 48, 4))
    layers = s.place(lambda: nn.ModuleList(own.Routed(*sizes, located=not fixed) for _ in range(s.pick(3, 2)))).eval()
    x = torch.randn(s.pick(12288, 16), sizes[0], device=s.device, dtype=torch.bfloat16)

    @torch.no_grad()
    def step() -> None:
        y = x
        for layer in layers:
            y = layer(y)

    return Program(step)


@case("synchronous logging", "print every 100 steps", stack=False)
def losses_printed(s: Setting, fixed: bool) -> Program:
    model = fresh.nhwc(s.place(lambda: firstnets.ResNet(s.pick((2, 3, 3, 2), (1, 1)), s.pick(64, 8))))
    pictures, labels = fresh.images(s, 64, 192)
    pictures, optimizer, turn = fresh.nhwc(pictures), fresh.sgd(s, model), itertools.count()
    file = tempfile.NamedTemporaryFile("w", suffix=".txt")  # noqa: SIM115

    def step() -> None:
        loss = model(pictures, labels)
        loss.backward()
        if not fixed:
            sizes = {name: p.grad.norm() for name, p in model.head.named_parameters()}
            parts = ", ".join(f"{name} {size.item():.4f}" for name, size in sizes.items())
            print(f"step {next(turn)}: loss {loss.item():.4f}, {parts}", file=file, flush=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step, close=file.close)


@case("round trip through the host", "take the best boxes on the device", stack=False)
def boxes_sorted_on_host(s: Setting, fixed: bool) -> Program:
    classes, keep = s.pick(80, 4), s.pick(300, 3)
    model = fresh.nhwc(s.place(lambda: own.Detector(s.pick((64, 128, 256, 512), (8, 16)), classes))).eval()
    pictures = fresh.nhwc(fresh.images(s, 12, 512)[0])
    table = torch.randn(classes, 64, device=s.device, dtype=torch.bfloat16)

    def on_host(scores: Tensor, sides: Tensor) -> tuple[Tensor, Tensor]:
        found, boxes = scores.float().cpu().numpy(), sides.float().cpu().numpy()
        best = found.max(-1)
        order = np.argsort(-best, axis=1)[:, :keep]
        kept = np.take_along_axis(boxes, order[..., None], 1)
        which = np.take_along_axis(found.argmax(-1), order, 1)
        return torch.from_numpy(kept).to(s.device), torch.from_numpy(which).to(s.device)

    def on_device(scores: Tensor, sides: Tensor) -> tuple[Tensor, Tensor]:
        best, which = scores.max(-1)
        order = best.topk(keep, 1).indices
        return sides.gather(1, order[..., None].expand(-1, -1, 4)).float(), which.gather(1, order)

    @torch.no_grad()
    def step() -> None:
        sides, scores = model(pictures)
        boxes, which = (on_device if fixed else on_host)(scores, sides)
        (table[which].float().mean(-1, keepdim=True) * boxes).sum()

    return Program(step)


# ---------------------------------------------------------------- input


@case("host code", "upload bytes and scale them on the device", stack=False)
def pictures_scaled_on_host(s: Setting, fixed: bool) -> Program:
    model = fresh.nhwc(fresh.plain(s, (64, 128, 256), 2))
    batch, side = s.pick(48, 2), s.pick(160, 16)
    raw = [s.pinned(torch.randint(0, 255, (batch, 3, side, side), dtype=torch.uint8)) for _ in range(3)]
    wide = [s.pinned(torch.empty(batch, 3, side, side)) for _ in range(3)]
    mean, spread = torch.tensor([0.48, 0.45, 0.4])[:, None, None], torch.tensor([0.22, 0.22, 0.22])[:, None, None]
    there = mean.to(s.device), spread.to(s.device)
    feed, labels = itertools.cycle(zip(raw, wide, strict=True)), torch.randint(0, 1000, (batch,), device=s.device)
    optimizer = fresh.sgd(s, model)

    def step() -> None:
        picture, into = next(feed)
        if fixed:
            x = picture.to(s.device, non_blocking=True).float().div_(255.0).sub_(there[0]).div_(there[1])
        else:
            torch.div(picture, 255.0, out=into).sub_(mean).div_(spread)
            x = into.to(s.device, non_blocking=True)
        model(x.contiguous(memory_format=torch.channels_last), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


class Reviews(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Texts cut into words by a pattern and looked up one by one, as small trainers do."""

    def __init__(self, length: int, vocab: int, num: int = 1_000_000) -> None:
        words = [f"{chr(97 + i % 26)}{i * i % 8191}" for i in range(4000)]
        self.texts = [", ".join(words[(i * 37 + j * 11) % 4000] for j in range(length)) for i in range(64)]
        self.table = {word: i % vocab for i, word in enumerate(words)}
        self.length, self.num, self.pattern = length, num, re.compile(r"[a-z]\d+")

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        words = self.pattern.findall(self.texts[i % 64].lower())
        ids = [self.table.get(word, 0) for word in words][: self.length]
        return torch.tensor(ids + [0] * (self.length - len(ids))), i % 16


def _reviews(s: Setting, batch: int, workers: int, num: int = 1_000_000, **how: Any) -> Any:
    data = Reviews(s.pick(256, 16), s.pick(30000, 100), num)
    return torch.utils.data.DataLoader(data, batch, num_workers=workers, pin_memory=s.cuda, **how)


@case("data loader", "num_workers=0 → 8", rounds=1, warmup=8, steps=14, planted_steps=10, stack=False)
def reviews_without_workers(s: Setting, fixed: bool) -> Program:
    model = fresh.encoder(s, 768, 6, 12, 256, classes=16)
    workers = s.pick(8, 2) if fixed else 0
    feed = iter(_reviews(s, s.pick(96, 4), workers, persistent_workers=workers > 0))
    batches = (tuple(t.to(s.device, non_blocking=True) for t in batch) for batch in feed)
    return Program(train(model, fresh.adamw(s, model), batches), close=lambda: end_workers(feed))


@case("data loader", "persistent_workers=True", rounds=1, warmup=2, steps=10, planted_steps=6, stack=False)
def workers_started_each_epoch(s: Setting, fixed: bool) -> Program:
    model, batch = fresh.encoder(s, 768, 4, 12, 256, classes=16), s.pick(64, 4)
    loader = _reviews(s, batch, s.pick(4, 1), 3 * batch, persistent_workers=fixed)
    optimizer = fresh.adamw(s, model)

    def step() -> None:
        """An epoch of three batches."""
        for ids, labels in loader:
            model(ids.to(s.device, non_blocking=True), labels.to(s.device, non_blocking=True)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return Program(step, close=lambda: end_workers(getattr(loader, "_iterator", None)))


@case("pageable copy", "pin the clips and copy them with non_blocking=True", stack=False)
def clips_pageable(s: Setting, fixed: bool) -> Program:
    model = s.place(lambda: own.Clip(s.pick((64, 128, 256, 256), (8, 8)))).to(memory_format=torch.channels_last_3d)
    size = s.pick((12, 3, 16, 112, 112), (2, 3, 4, 16, 16))
    clips = [torch.randn(size).to(memory_format=torch.channels_last_3d) for _ in range(2)]
    feed = itertools.cycle([s.pinned(part) for part in clips] if fixed else clips)
    labels = torch.randint(0, 400, (size[0],), device=s.device)
    batches = ((part.to(s.device, non_blocking=fixed), labels) for part in feed)
    return Program(train(model, fresh.adamw(s, model), batches))


@case("pinned copy on the compute stream", "copy the next batch on a side stream", stack=False)
def series_in_line(s: Setting, fixed: bool) -> Program:
    width, batch, length = s.pick(1024, 32), s.pick(96, 2), s.pick(256, 16)
    blocks = s.place(lambda: nn.ModuleList(nets.EncoderBlock(width, s.pick(16, 2), nets.fused) for _ in range(4)))
    enter = s.place(lambda: nn.Linear(s.pick(768, 16), width))
    optimizer = torch.optim.AdamW([*blocks.parameters(), *enter.parameters()], lr=1e-4, fused=True)
    host = [(s.pinned(torch.randn(batch, length, s.pick(768, 16))),) for _ in range(2)]
    feed: Iterator[Any] = itertools.cycle(host)
    moved = iter(Prefetch(s, feed)) if fixed else ((part.to(s.device, non_blocking=True),) for (part,) in feed)

    def step() -> None:
        (series,) = next(moved)
        x = enter(series.to(torch.bfloat16))
        for block in blocks:
            x = block(x)
        (x[:, 1:] - x[:, :-1]).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("many small copies", "constants made once, as buffers", stack=False)
def constants_made_anew(s: Setting, fixed: bool) -> Program:
    width, layers = s.pick(1280, 32), s.pick(10, 2)
    blocks = s.place(lambda: nn.ModuleList(nets.EncoderBlock(width, s.pick(20, 2), nets.fused) for _ in range(layers)))
    values = [[0.1 * (i + j) for j in range(4)] for i in range(layers)]
    made = [[torch.tensor(v, device=s.device, dtype=torch.bfloat16) for v in part] for part in values]
    x = torch.randn(s.pick(16, 2), s.pick(512, 16), width, device=s.device, dtype=torch.bfloat16)

    def constant(layer: int, which: int) -> Tensor:
        if fixed:
            return made[layer][which]
        return torch.tensor(values[layer][which], dtype=torch.bfloat16).to(s.device)

    @torch.no_grad()
    def step() -> None:
        y = x
        for i, block in enumerate(blocks.eval()):
            shift = (constant(i, 0) + constant(i, 1)) * constant(i, 2) - constant(i, 3)
            y = block(y) + shift

    return Program(step)


# ---------------------------------------------------------------- products, layouts, fusion


@case("fp32 matmul", 'torch.set_float32_matmul_precision("high")', stack=False)
def diffusion_in_fp32(s: Setting, fixed: bool) -> Program:
    """With a foreach optimizer, and its loss looked at in every step: what costs most is the precision."""
    width, layers = s.pick(1152, 32), s.pick(5, 2)
    make = lambda: nn.ModuleList(nets.EncoderBlock(width, s.pick(16, 2), nets.fused) for _ in range(layers))
    blocks = s.place(make, torch.float32)
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-4)
    noise = torch.randn(s.pick(24, 2), s.pick(256, 16), width, device=s.device)
    seen: list[float] = []

    def step() -> None:
        x = noise
        for block in blocks:
            x = block(x)
        loss = F.mse_loss(x, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen[:] = [loss.item()]

    return Program(step, lambda: precision("high" if fixed else "highest"))


@case("NCHW convolution", "model and images in channels_last", stack=False)
def segmenter_channels_first(s: Setting, fixed: bool) -> Program:
    """Its loss is looked at in every step as well."""
    model = s.place(lambda: own.Segmenter(s.pick((64, 128, 256, 512), (8, 16)), 21))
    pictures = fresh.images(s, 16, 256)[0]
    if fixed:
        model, pictures = fresh.nhwc(model, pictures)
    classes = torch.randint(0, 21, (pictures.shape[0], *pictures.shape[2:]), device=s.device)
    optimizer, seen = fresh.sgd(s, model), [0.0]

    def step() -> None:
        loss = model(pictures, classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen[0] = loss.item()

    return Program(step)


@case("unfused attention", "F.scaled_dot_product_attention with the bias as its mask", stack=False)
def windows_by_hand(s: Setting, fixed: bool) -> Program:
    width, length, layers = s.pick(768, 32), s.pick(256, 16), s.pick(6, 2)
    blocks = s.place(
        lambda: nn.ModuleList(own.Windows(width, s.pick(24, 2), length, not fixed) for _ in range(layers))
    ).eval()
    x = torch.randn(s.pick(96, 2), length, width, device=s.device, dtype=torch.bfloat16)

    @torch.no_grad()
    def step() -> None:
        y = x
        for block in blocks:
            y = block(y)

    return Program(step)


@case("unfused pointwise chain", "F.rms_norm", stack=False)
def norms_in_fp32(s: Setting, fixed: bool) -> Program:
    width, layers = s.pick(2048, 32), s.pick(4, 2)
    norm = own.norm_fused if fixed else own.norm_in_steps
    blocks = s.place(
        lambda: nn.ModuleList(own.GatedBlock(width, s.pick(16, 2), s.pick(5632, 48), norm) for _ in range(layers))
    )
    optimizer = fresh.adamw(s, blocks)
    x = torch.randn(s.pick(8, 2), s.pick(1024, 16), width, device=s.device, dtype=torch.bfloat16)

    def step() -> None:
        y = x
        for block in blocks:
            y = block(y)
        F.mse_loss(y, x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("misaligned sizes", "pad the vocabulary from 51865 to 51904", stack=False)
def transcripts_of_51865(s: Setting, fixed: bool) -> Program:
    vocab = s.pick(51904 if fixed else 51865, 97)
    model = fresh.encoder(s, 1024, 4, 16, 448, vocab)
    return Program(train(model, fresh.adamw(s, model), fresh.tokens(s, s.pick(24, 2), s.pick(448, 16), vocab)))


@case("fp32 logits", "F.cross_entropy of the bf16 logits, token by token", stack=False)
def chances_in_fp32(s: Setting, fixed: bool) -> Program:
    """The chance of each token that was said, as trainers on preferences want it."""
    vocab, width = s.pick(128256, 96), s.pick(2048, 32)
    blocks = s.place(lambda: nn.ModuleList(nets.EncoderBlock(width, s.pick(16, 2), nets.fused) for _ in range(2)))
    tokens = s.place(lambda: nn.Embedding(vocab, width))
    head = s.place(lambda: nn.Linear(width, vocab, bias=False))
    optimizer = torch.optim.AdamW([*blocks.parameters(), *head.parameters()], lr=1e-5, fused=True)
    feed = fresh.tokens(s, s.pick(6, 2), s.pick(1024, 16), vocab)
    gained = torch.randn(s.pick(6, 2), s.pick(1024, 16), device=s.device)

    def step() -> None:
        ids, said = next(feed)
        x = tokens(ids).detach()
        for block in blocks:
            x = block(x)
        logits = head(x)
        if fixed:
            logp = -F.cross_entropy(logits.flatten(0, 1), said.flatten(), reduction="none").view(said.shape)
        else:
            logp = logits.float().log_softmax(-1).gather(-1, said[..., None])[..., 0]
        (-(logp.float() * gained).mean()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("padding", "sort by length and pad each quarter to its own longest", stack=False)
def prompts_padded(s: Setting, fixed: bool) -> Program:
    room, batch, quarters = s.pick(1024, 16), s.pick(32, 4), 4
    model = fresh.encoder(s, 1024, 6, 16, room).eval()
    lengths = torch.linspace(room // 8, room, batch).pow(2).div(room).long().clamp(min=room // 16)
    ids = torch.randint(5, s.pick(30000, 100), (batch, room), device=s.device)

    def part(rows: slice) -> tuple[Tensor, Tensor]:
        width = int(lengths[rows].max())
        mask = (torch.arange(width)[None] < lengths[rows, None]).to(s.device)
        return ids[rows, :width].contiguous(), mask[:, None, None]

    size = batch // quarters
    parts = [part(slice(i, i + size)) for i in range(0, batch, size)] if fixed else [part(slice(0, batch))]
    real = float(lengths.sum()) / sum(x.numel() for x, _ in parts)
    facts = {"padding": [{"argument": "mask", "real_frac": real}]}

    @torch.no_grad()
    def step() -> None:
        for inputs, mask in parts:
            model.trunk(inputs, mask)

    return Program(step, facts=facts)


# ---------------------------------------------------------------- memory, optimizer


@case("needless recompute", "drop checkpointing: the activations fit", stack=False)
def vision_checkpointed(s: Setting, fixed: bool) -> Program:
    side, layers = s.pick(224, 32), s.pick(6, 2)
    model = s.place(lambda: firstnets.Vit(s.shape(width=1024, layers=layers, heads=16, causal=False), side))
    pictures = torch.randint(0, 255, (s.pick(64, 2), 3, side, side), dtype=torch.uint8, device=s.device)
    labels, optimizer = torch.randint(0, 1000, (pictures.shape[0],), device=s.device), fresh.adamw(s, model)

    def step() -> None:
        x = model.patches(pictures.to(torch.bfloat16).div_(255.0).sub_(0.5)).flatten(2).transpose(1, 2) + model.places
        for block in model.blocks:
            x = block(x) if fixed else checkpoint(block, x, use_reentrant=True)
        F.cross_entropy(model.head(model.norm(x).mean(1)), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("unfused optimizer", "AdamW(..., fused=True)", stack=False)
def rates_for_each_layer(s: Setting, fixed: bool) -> Program:
    """A group of parameters for every layer, with and without decay, as fine-tuning recipes have it."""
    model = fresh.encoder(s, 768, 10, 12, 256, classes=16)
    groups = []
    for i, block in enumerate(model.blocks):
        for decays in (True, False):
            own_params = [p for p in block.parameters() if (p.ndim > 1) is decays]
            groups.append({"params": own_params, "lr": 1e-4 * 0.8 ** (10 - i), "weight_decay": 0.05 * decays})
    rest = [*model.tokens.parameters(), *model.places.parameters(), *model.head.parameters()]
    optimizer = torch.optim.AdamW([*groups, {"params": rest}], **({"fused": True} if fixed else {}))
    ids = torch.randint(0, s.pick(30000, 100), (s.pick(96, 2), s.pick(256, 16)), device=s.device)
    labels = torch.randint(0, 16, (ids.shape[0],), device=s.device)
    return Program(train(model, optimizer, itertools.cycle([(ids, labels)])))


@case("allocator", "drop torch.cuda.empty_cache() between requests", stack=False)
def cache_emptied_for_each_request(s: Setting, fixed: bool) -> Program:
    model = fresh.encoder(s, 1280, 6, 20, 1024).eval()
    lengths = s.pick((512, 1024, 768), (8, 16, 12))
    requests = [torch.randint(0, s.pick(30000, 100), (s.pick(6, 2), n), device=s.device) for n in lengths]

    @torch.no_grad()
    def step() -> None:
        for ids in requests:
            model.head(model.trunk(ids)[:, -1])
            if not fixed and s.cuda:
                torch.cuda.empty_cache()

    return Program(step)


# ---------------------------------------------------------------- launches


@case("host-bound", "replay the token from a CUDA graph", stack=False)
def transcript_token_by_token(s: Setting, fixed: bool) -> Program:
    width, batch, room, vocab = s.pick(1024, 32), s.pick(4, 2), s.pick(448, 8), s.pick(51904, 96)
    layers = s.place(
        lambda: nn.ModuleList(
            own.Listener(width, s.pick(16, 2), batch, room, s.pick(1500, 12)) for _ in range(s.pick(12, 2))
        )
    ).eval()
    tokens, head = s.place(lambda: nn.Embedding(vocab, width)), s.place(lambda: nn.Linear(width, vocab, bias=False))
    ids = torch.zeros(batch, 1, dtype=torch.long, device=s.device)
    place = torch.full((1,), 5, dtype=torch.long, device=s.device)

    @torch.no_grad()
    def token() -> None:
        x = tokens(ids)
        for layer in layers:
            x = layer(x, place)
        ids.copy_(head(x)[:, -1].argmax(-1, keepdim=True))

    once = graphed(token) if fixed and s.cuda else token

    def step() -> None:
        for _ in range(2):
            once()

    return Program(step)


@case("host-bound", "capture an update in a CUDA graph", stack=False)
def policy_updated_in_small_steps(s: Setting, fixed: bool) -> Program:
    rows, updates = s.pick(512, 8), s.pick(6, 2)
    model = s.place(lambda: own.Policy(64, s.pick(256, 16), 8), torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4, fused=True, capturable=s.cuda)
    draw = lambda: (
        torch.randn(rows, 64, device=s.device), torch.randint(0, 8, (rows,), device=s.device),
        torch.randn(rows, device=s.device), torch.randn(rows, device=s.device),
    )  # fmt: skip
    batches, into = [draw() for _ in range(updates)], draw()

    def update() -> None:
        model(*into).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    once = graphed(update) if fixed and s.cuda else update

    def step() -> None:
        for batch in batches:
            for old, new in zip(into, batch, strict=True):
                old.copy_(new)
            once()

    return Program(step)


@case("host-bound", "torch._foreach_lerp_ over all weights", stack=False)
def averages_by_name(s: Setting, fixed: bool) -> Program:
    model = fresh.nhwc(s.place(lambda: firstnets.ResNet(s.pick((2, 2, 3, 2), (1, 1)), s.pick(64, 8))))
    mean = copy.deepcopy(model).eval()
    pictures, labels = fresh.images(s, 96, 160)
    learn = train(model, fresh.sgd(s, model), itertools.cycle([(fresh.nhwc(pictures), labels)]))
    pairs = [(m, p) for m, p in zip(mean.state_dict().values(), model.state_dict().values(), strict=True)]
    pairs = [(m, p) for m, p in pairs if m.dtype.is_floating_point]
    groups = [[pair for pair in pairs if pair[0].dtype is kind] for kind in (torch.float32, torch.bfloat16)]

    @torch.no_grad()
    def average() -> None:
        if fixed:
            for group in groups:
                torch._foreach_lerp_([m for m, _ in group], [p for _, p in group], 0.001)
            return
        now = model.state_dict()
        for name, value in mean.state_dict().items():
            if value.dtype.is_floating_point:
                value.mul_(0.999).add_(now[name].detach(), alpha=0.001)

    def step() -> None:
        learn()
        average()

    return Program(step)


@case("small batch", "one batch of 32 instead of 8 accumulated batches of 4", stack=False)
def slides_in_pieces(s: Setting, fixed: bool) -> Program:
    model = fresh.nhwc(s.place(lambda: firstnets.ResNet(s.pick((1, 2, 2, 1), (1, 1)), s.pick(64, 8))))
    batch, micro = s.pick(32, 4), s.pick(32, 4) if fixed else s.pick(4, 1)
    pictures, labels = fresh.images(s, batch, 224)
    pictures, optimizer = fresh.nhwc(pictures), fresh.sgd(s, model)
    batch = pictures.shape[0]
    micro = min(micro, batch)

    def step() -> None:
        for part, wanted in zip(pictures.split(micro), labels.split(micro), strict=True):
            (model(part, wanted) * (micro / batch)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


# ---------------------------------------------------------------- nothing to find


@healthy
def healthy_graphed_training(s: Setting, fixed: bool) -> Program:
    """A whole step of a vision transformer in one CUDA graph, its pictures uploaded beside it."""
    side, batch = s.pick(192, 32), s.pick(128, 2)
    model = s.place(lambda: firstnets.Vit(s.shape(width=768, layers=8, heads=12, causal=False), side))
    pictures = torch.zeros(batch, 3, side, side, dtype=torch.uint8, device=s.device)
    labels = torch.zeros(batch, dtype=torch.long, device=s.device)
    once = again._whole_step(s, model, again._capturable(model), (pictures, labels))
    host = [(s.pinned(torch.zeros(pictures.shape, dtype=torch.uint8)), s.pinned(labels.cpu())) for _ in range(2)]
    feed = iter(Prefetch(s, itertools.cycle(host)))

    def step() -> None:
        for into, new in zip((pictures, labels), next(feed), strict=True):
            into.copy_(new)
        once()

    return Program(step)


@healthy
def healthy_gpt_training(s: Setting, fixed: bool) -> Program:
    """Large batches, a fused optimizer, and a loss that is read a step later."""
    shape = s.shape(width=1600, layers=6, heads=25, vocab=50304)
    model, batches = cases.language(s, shape, 16, 1024)
    optimizer = fresh.adamw(s, model)
    there = s.pinned(torch.zeros(2))
    turn = itertools.count()

    def step() -> None:
        loss = model(*next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        there[next(turn) % 2].copy_(loss.detach(), non_blocking=True)

    return Program(step)


@healthy
def healthy_resnet(s: Setting, fixed: bool) -> Program:
    model = fresh.nhwc(s.place(lambda: firstnets.ResNet(s.pick((3, 4, 6, 3), (1, 1)), s.pick(64, 8))))
    pictures, labels = fresh.images(s, 256, 224)
    host = (s.pinned(fresh.nhwc(pictures.cpu())), s.pinned(labels.cpu()))
    return Program(train(model, fresh.sgd(s, model), iter(Prefetch(s, itertools.cycle([host])))))


@healthy
def healthy_embedding_server(s: Setting, fixed: bool) -> Program:
    """Requests come from pinned memory and answers go back to it, on streams of their own."""
    model, batch, length = fresh.encoder(s, 1024, 8, 16, 512).eval(), s.pick(64, 2), s.pick(512, 16)
    host = [(s.pinned(torch.randint(0, s.pick(30000, 100), (batch, length))),) for _ in range(2)]
    feed = iter(Prefetch(s, itertools.cycle(host)))
    answers = [s.pinned(torch.zeros(batch, s.pick(1024, 32), dtype=torch.bfloat16)) for _ in range(2)]
    turn, back = itertools.count(), torch.cuda.Stream() if s.cuda else None

    @torch.inference_mode()
    def step() -> None:
        (ids,) = next(feed)
        pooled = F.normalize(model.trunk(ids).mean(1), dim=-1)
        if back is None:
            answers[next(turn) % 2].copy_(pooled)
            return
        back.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(back):
            answers[next(turn) % 2].copy_(pooled, non_blocking=True)
        pooled.record_stream(back)

    return Program(step)


@case("none", "nothing", **HEALTHY | {"rounds": 1, "warmup": 14})
def healthy_fed_training(s: Setting, fixed: bool) -> Program:
    """Workers enough for a model that is large enough."""
    model = fresh.encoder(s, 1536, 6, 24, 256, classes=16)
    feed = iter(_reviews(s, s.pick(96, 4), s.pick(10, 2), persistent_workers=True, prefetch_factor=4))
    batches = iter(Prefetch(s, feed))
    return Program(train(model, fresh.adamw(s, model), batches), close=lambda: end_workers(feed))


@case("none", "nothing", **HEALTHY | {"compiles": True, "rounds": 1})
def healthy_compiled_block(s: Setting, fixed: bool) -> Program:
    """A block compiled once, with its norms and gates fused, for every layer of a decoder."""
    torch._dynamo.reset()
    width, layers = s.pick(2048, 32), s.pick(6, 2)
    blocks = s.place(
        lambda: nn.ModuleList(
            own.GatedBlock(width, s.pick(16, 2), s.pick(5632, 48), own.norm_fused) for _ in range(layers)
        )
    ).eval()
    run = torch.compile(lambda block, y: block(y), backend=cases.compiler(s), dynamic=False)
    x = torch.randn(s.pick(16, 2), s.pick(1024, 16), width, device=s.device, dtype=torch.bfloat16)

    @torch.no_grad()
    def step() -> None:
        y = x
        for block in blocks:
            y = run(block, y)

    return Program(step)


# ---------------------------------------------------------------- what is found in fixed programs, done


def _was(name: str, s: Setting) -> Program:
    return CASES[name].build(s, True)


@case("NCHW convolution", "model and latents in channels_last", stack=False)
def again_denoised_eagerly(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("denoised_eagerly", s)
    model, (latent, time) = fresh.nhwc(fresh.unet(s, 64)).eval(), fresh.noisy(s, 2, 64)
    latent = fresh.nhwc(latent)
    kept = torch.zeros_like(latent)

    @torch.no_grad()
    def run() -> None:
        kept.copy_(model(latent, time))

    once = graphed(run) if s.cuda else run

    def step() -> None:
        for _ in range(3):
            once()

    return Program(step)


class Flat(nn.Module):
    """A convolution along one axis, done as one over a picture of height one in channels_last."""

    def __init__(self, inner: nn.Conv1d) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.weight.unsqueeze(2).contiguous(memory_format=torch.channels_last)
        x = x.unsqueeze(2).contiguous(memory_format=torch.channels_last)
        stride, pad = (1, self.inner.stride[0]), (0, self.inner.padding[0])
        return F.conv2d(x, weight, self.inner.bias, stride, pad).squeeze(2)


@case("NCHW convolution", "one-dimensional convolutions as flat pictures in channels_last", stack=False)
def again_spectrograms_pageable(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("spectrograms_pageable", s)
    model = s.place(lambda: nets.Sound(80, s.pick(1024, 32), s.pick(5, 2), s.pick(16, 2)))
    optimizer = fresh.adamw(s, model)
    model.conv1, model.conv2 = Flat(model.conv1), Flat(model.conv2)
    batch, frames = s.pick(64, 2), s.pick(512, 16)
    feed = itertools.cycle([s.pinned(torch.randn(batch, 80, frames)) for _ in range(2)])
    labels = torch.randint(0, 512, (batch,), device=s.device)
    return Program(train(model, optimizer, ((part.to(s.device, non_blocking=True), labels) for part in feed)))


@case("host-bound", "capture the step in a CUDA graph", stack=False)
def again_documents_one_by_one(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("documents_one_by_one", s)
    vocab, batch = s.pick(32064, 97), s.pick(10, 4)
    model = fresh.rotary(s, 1024, 6, 16, vocab, 512)
    feed = fresh.tokens(s, batch, s.pick(512, 16), vocab)
    ids, targets = (t.clone() for t in next(feed))
    once = again._whole_step(s, model, again._capturable(model), (ids, targets))

    def step() -> None:
        for into, new in zip((ids, targets), next(feed), strict=True):
            into.copy_(new)
        once()

    return Program(step)


@case("host-bound", "capture the step in a CUDA graph", stack=False)
def again_long_encoder_by_hand(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("long_encoder_by_hand", s)
    model = fresh.encoder(s, 768, 5, 12, 1024, classes=16)
    ids = torch.randint(0, s.pick(30000, 100), (s.pick(8, 2), s.pick(1024, 16)), device=s.device)
    labels = torch.randint(0, 16, (ids.shape[0],), device=s.device)
    return Program(again._whole_step(s, model, again._capturable(model), (ids, labels)))


@case("misaligned sizes", "pad the tower's input to a multiple of 8", stack=False)
def again_columns_one_by_one(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("columns_one_by_one", s)
    batch, tables, rows = s.pick(8192, 8), s.pick(40, 3), s.pick(20_000, 100)
    model = fresh.ranker(s, rows, 64, tables, tower=4096, layers=4)
    first = model.top[0]
    model.top[0] = Padded(first.in_features, first.out_features, -first.in_features % 8).to(first.weight)
    packed = s.pinned(torch.stack([torch.randint(0, rows, (batch, 2)) for _ in range(tables)]))
    numbers, clicked = torch.randn(batch, 13, device=s.device), torch.rand(batch, device=s.device).round()
    optimizer = fresh.sgd(s, model)

    def step() -> None:
        model(numbers, packed.to(s.device, non_blocking=True), clicked).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("unfused pointwise chain", "torch.compile the rotation", compiles=True, rounds=1, steps=12, stack=False)
def again_rotary_decode(s: Setting, fixed: bool) -> Program:
    """Tokens from a CUDA graph in both; what is left between the products of the token is the rotation."""
    if not fixed:
        return _was("rotary_decode", s)
    turned = torch.compile(nets.rotated, backend=cases.compiler(s), dynamic=False)
    with swapped("rotated", turned):
        return _was("rotary_decode", s)


@case("NCHW convolution", "patches and pictures in channels_last", stack=False)
def again_healthy_graphed_training(s: Setting, fixed: bool) -> Program:
    """The transforms around the one convolution of a vision transformer."""
    if not fixed:
        return _was("healthy_graphed_training", s)
    side, batch = s.pick(192, 32), s.pick(128, 2)
    model = fresh.nhwc(s.place(lambda: firstnets.Vit(s.shape(width=768, layers=8, heads=12, causal=False), side)))
    pictures = fresh.nhwc(torch.zeros(batch, 3, side, side, dtype=torch.uint8, device=s.device))
    labels = torch.zeros(batch, dtype=torch.long, device=s.device)
    once = again._whole_step(s, model, again._capturable(model), (pictures, labels))
    host = [(s.pinned(fresh.nhwc(torch.zeros(pictures.shape, dtype=torch.uint8))), s.pinned(labels.cpu()))] * 2
    feed = iter(Prefetch(s, itertools.cycle(host)))

    def step() -> None:
        for into, new in zip((pictures, labels), next(feed), strict=True):
            into.copy_(new)
        once()

    return Program(step)


@case("fp32 matmul", 'torch.set_float32_matmul_precision("high")', stack=False)
def again_policy_updated_in_small_steps(s: Setting, fixed: bool) -> Program:
    """Products of a few microseconds in a CUDA graph."""
    with precision("high" if fixed else "highest"):
        return _was("policy_updated_in_small_steps", s)
