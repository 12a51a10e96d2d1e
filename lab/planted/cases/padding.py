"""Cause: padding."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.planted.networks import Decoder, ResidualLayer, Trunk
from lab.planted.programs import TRIED, adamw, bf16, fused_adamw, ints
from lab.planted.registry import Program, Setting, case


def ragged(s: Setting, rng: np.random.Generator, batch: int, room: int, vocab: int, parts: int) -> list[Any]:
    """Documents of very different lengths in ``parts`` batches, each padded to a multiple of 64."""
    lengths = np.clip(rng.lognormal(np.log(room / 4), 0.7, batch), 8, room).astype(int)
    lengths[0] = room
    lengths = np.sort(lengths) if parts > 1 else lengths
    made = []
    for chunk in np.split(lengths, parts):
        longest = min(room, -(-int(chunk.max()) // 64) * 64)
        mask = torch.arange(longest)[None] < torch.as_tensor(chunk)[:, None]
        ids = torch.randint(0, vocab, mask.shape) * mask
        targets = torch.where(mask, ids, torch.full_like(ids, -100))
        made.append((ids.to(s.device), targets.to(s.device), mask[:, None, None].to(s.device)))
    return made


@case("padding", "sort by length and pad each quarter of the batch to its own longest", suite="planted")
def padded_batch(s: Setting, fixed: bool) -> Program:
    shape, batch, room = (
        s.shape(width=1024, layers=8, heads=16, vocab=16384, causal=False),
        s.pick(64, 4),
        s.pick(512, 64),
    )
    model = s.place(lambda: Decoder(shape, room))
    optimizer, rng = adamw(s, model), np.random.default_rng(0)
    batches = [ragged(s, rng, batch, room, shape.vocab, 4 if fixed else 1) for _ in range(3)]
    feed = itertools.cycle(batches)
    real = float(np.mean([mask.float().mean().item() for parts in batches for _, _, mask in parts]))

    def step() -> None:
        for ids, targets, mask in next(feed):
            model(ids, targets, mask).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step, facts={"padding": [{"argument": "mask", "real_frac": real}]})


def _filled(s: Setting, lengths: np.ndarray, long: int) -> tuple[Tensor, float]:
    real = torch.arange(long)[None] < torch.from_numpy(lengths)[:, None]
    return real.to(s.device), float(real.float().mean())


class Panoramas(nn.Module):
    """Views wider than they are high, as patches; where a view has no patch is said by a mask."""

    def __init__(self, piece: int, dim: int, heads: int, depth: int, answers: int, columns: int, rows: int) -> None:
        super().__init__()
        self.enter, self.trunk = nn.Linear(piece, dim), Trunk(dim, heads, depth)
        self.answer = nn.Linear(dim, answers)
        self.row, self.column = nn.Embedding(rows, dim), nn.Embedding(columns, dim)

    def forward(self, pieces: Tensor, patch_mask: Tensor) -> Tensor:
        """Pieces are (n, rows, columns, piece)."""
        x = self.enter(pieces) + self.row.weight[: pieces.size(1), None] + self.column.weight
        x = self.trunk(x.flatten(1, 2), patch_mask[:, None, None])
        share = patch_mask.to(x.dtype)[..., None]
        return self.answer((x * share).sum(1) / share.sum(1))


@case("padding", "fill up to the highest of the batch", suite="twenty-fifth", **TRIED)
def panoramas_in_squares(s: Setting, fixed: bool) -> Program:
    """Places recognized by panoramas, which are three times as wide as high and are put into squares."""
    columns, batch, piece = s.pick(32, 8), s.pick(16, 2), s.pick(768, 12)
    heights = np.random.default_rng(4).integers(columns // 4, columns // 3 + 1, batch)
    rows = int(heights.max()) if fixed else columns
    real, share = _filled(s, heights * columns, rows * columns)
    model = s.place(lambda: Panoramas(piece, s.pick(1024, 16), s.pick(16, 2), s.pick(8, 1), 365, columns, columns))
    whole = bf16(s, batch, columns, columns, piece)
    pieces = (whole[:, :rows] * real.view(batch, rows, columns, 1)).contiguous()
    places, optimizer = ints(s, 365, batch), fused_adamw(model)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(pieces, real), places).backward()
        optimizer.step()

    return Program(step, facts={"padding": [{"argument": "patch_mask", "real_frac": share}]})


class ReadEncoder(nn.Module):
    """Pieces of DNA, letters in groups, as one vector each."""

    def __init__(self, vocab: int, d: int, h: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(ResidualLayer(d, h) for _ in range(depth))

    def forward(self, kmers: Tensor, attention_mask: Tensor) -> Tensor:
        x, seen = self.embed(kmers), attention_mask[:, None, None]
        for layer in self.layers:
            x = layer(x, seen)
        weight = attention_mask[..., None].to(x.dtype)
        return (x * weight).sum(1) / weight.sum(1)


@case("padding", "padding=True in place of padding='max_length'", suite="twenty-fourth", **TRIED)
def reads_filled_to_512(s: Setting, fixed: bool) -> Program:
    """Vectors of what a sequencer reads, some 150 letters each, every one filled up to the model's limit."""
    vocab, batch, limit = s.pick(4096, 64), s.pick(256, 2), s.pick(512, 32)
    lengths = np.random.default_rng(4).integers(limit // 4 - limit // 32, limit // 4, batch) + 1
    long = limit // 4 if fixed else limit
    real, share = _filled(s, lengths, long)
    model = s.place(lambda: ReadEncoder(vocab, s.pick(768, 16), s.pick(12, 2), s.pick(6, 1))).eval()
    kmers = ints(s, vocab, batch, long) * real

    def embed() -> Tensor:
        return F.normalize(model(kmers, real), dim=-1)

    facts = {"padding": [{"argument": "attention_mask", "real_frac": share}]}
    return Program(torch.inference_mode()(embed), facts=facts)
