"""Networks, data sets and small trainers of the twenty-second suite, each written as its author would have."""

from __future__ import annotations

import bz2
import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import Dataset


def mlp(*sizes: int, act: type[nn.Module] = nn.ReLU, bias: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise(sizes):
        layers += [nn.Linear(n_in, n_out, bias=bias), act()]
    return nn.Sequential(*layers[:-1])


class Attention(nn.Module):
    """Self-attention by one product for queries, keys and values."""

    def __init__(self, dim: int, num_heads: int, causal: bool = False) -> None:
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.in_proj, self.out_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.in_proj(x).view(b, t, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out_proj(y.transpose(1, 2).reshape(b, t, c))


class EncoderBlock(nn.Module):
    """Pre-norm, four times as wide inside."""

    def __init__(self, dim: int, num_heads: int, causal: bool = False) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, num_heads, causal)
        self.ffn = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.ffn(self.ln_2(x))


def encoder(dim: int, num_heads: int, depth: int, causal: bool = False) -> nn.Sequential:
    return nn.Sequential(*(EncoderBlock(dim, num_heads, causal) for _ in range(depth)))


# ---------------------------------------------------------------- data


class TextLines(Dataset[tuple[Tensor, Tensor]]):
    """Lines of text for a reader: letters out of a font, put side by side, slanted, smeared and made noisy."""

    def __init__(self, width: int, length: int = 1_000_000) -> None:
        self.font = np.random.default_rng(7).integers(0, 256, (64, 32, 16)).astype(np.uint8)
        self.width, self.length = width, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        rng = np.random.default_rng(index)
        letters = rng.integers(0, 64, self.width // 16)
        page = self.font[letters].transpose(1, 0, 2).reshape(32, self.width)
        for row in range(32):
            page[row] = np.roll(page[row], row // 8)
        smeared = page // 2 + np.roll(page, 1, axis=1) // 4 + rng.integers(0, 24, page.shape, dtype=np.uint8)
        return torch.from_numpy(smeared), torch.from_numpy(letters.repeat(2))


class Radar:
    """Compressed pictures of rain, unpacked by a pool of threads whenever a batch is asked for."""

    def __init__(self, pool: ThreadPoolExecutor, side: int, batch: int) -> None:
        rng = np.random.default_rng(5)
        rain = rng.integers(0, 64, (8, side // 8, side // 8)).astype(np.uint8).repeat(8, 1).repeat(8, 2)
        noisy = rain + rng.integers(0, 4, rain.shape).astype(np.uint8)
        self.packed = [bz2.compress(one.tobytes()) for one in noisy]
        self.pool, self.side, self.batch = pool, side, batch

    def unpack(self, index: int) -> np.ndarray:
        return np.frombuffer(bz2.decompress(self.packed[index % 8]), np.uint8).reshape(self.side, self.side)

    def load(self) -> Tensor:
        return torch.from_numpy(np.stack(list(self.pool.map(self.unpack, range(self.batch)))))


class PackedRows(Dataset[tuple[Tensor, Tensor]]):
    """Rows of bytes that lie in memory as they are wanted, a batch of them at a time."""

    def __init__(self, rows: int, columns: int, length: int = 100_000) -> None:
        self.store = np.random.default_rng(0).integers(0, 256, (4 * rows, columns)).astype(np.uint8)
        self.rows, self.length = rows, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = np.random.default_rng(index).integers(0, 3 * self.rows)
        rows = self.store[start : start + self.rows].copy()
        return torch.from_numpy(rows), torch.from_numpy(rows[:, 0].astype(np.int64) % 16)


class LogMel(nn.Module):
    """Log-mel features of a batch of waves, wherever the waves are."""

    def __init__(self, n_fft: int, hop: int, n_mels: int) -> None:
        super().__init__()
        self.n_fft, self.hop = n_fft, hop
        self.register_buffer("window", torch.hann_window(n_fft))
        self.register_buffer("bank", torch.rand(n_fft // 2 + 1, n_mels) / n_fft)

    def forward(self, wave: Tensor) -> Tensor:
        spec = torch.stft(wave, self.n_fft, self.hop, window=self.window, return_complex=True)
        return torch.log(spec.abs().pow(2).transpose(1, 2) @ self.bank + 1e-6)


def annotations(num: int) -> list[dict[str, Any]]:
    """What a detection data set's index looks like once it is read."""
    return [
        {"id": i, "bbox": [i % 97, i % 89, 10, 20], "segmentation": [[float(i % 7), 1.0, 2.0]], "area": 200.0}
        for i in range(num)
    ]


# ---------------------------------------------------------------- trainers and callbacks


class Trainer:
    """The loop of somebody who wrote it once and reuses it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, criterion: Callable[..., Tensor]) -> None:
        self.model, self.optimizer, self.criterion = model, optimizer, criterion
        self.callbacks: list[Callable[[Trainer], None]] = []
        self.global_step = 0

    def training_step(self, inputs: Any, target: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(inputs), target)
        loss.backward()
        self.optimizer.step()
        self.global_step += 1
        for callback in self.callbacks:
            callback(self)


class ActivationMonitor:
    """Writes how large what every block puts out is, by hooks, to a log file."""

    def __init__(self, model: nn.Module, kind: type[nn.Module], stream: Any, every: int) -> None:
        self.logger = logging.Logger("activations")
        self.handler = logging.StreamHandler(stream)
        self.handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
        self.logger.addHandler(self.handler)
        self.step, self.every = 0, every
        for name, module in model.named_modules():
            if isinstance(module, kind):
                module.register_forward_hook(self.hook(name))

    def hook(self, name: str) -> Callable[..., None]:
        def log_stats(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if self.step % self.every:
                return
            out = output.detach().float()
            self.logger.info("%s std=%.5f absmax=%.5f", name, out.std().item(), out.abs().max().item())

        return log_stats


@contextlib.contextmanager
def freeing_memory(enabled: bool) -> Iterator[None]:
    """Whatever ran inside gives its memory back to the driver."""
    yield
    if enabled:
        torch.cuda.empty_cache()


# ---------------------------------------------------------------- vision


class LineReader(nn.Module):
    """A line of text cut into narrow columns, and an encoder over them."""

    def __init__(self, dim: int, heads: int, depth: int) -> None:
        super().__init__()
        self.enter, self.trunk, self.head = nn.Linear(32 * 8, dim), encoder(dim, heads, depth), nn.Linear(dim, 64)

    def forward(self, lines: Tensor) -> Tensor:
        columns = lines.unflatten(2, (-1, 8)).transpose(1, 2).flatten(2)
        return self.head(self.trunk(self.enter(columns))).flatten(0, 1)


class WideBlock(nn.Module):
    """Norm, ReLU, convolution, twice, as wide residual networks have it."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(c_in), nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(c_out), nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(c_in, c_out, 1, stride, bias=False) if c_in != c_out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(F.relu(self.bn1(x), inplace=True))
        return self.conv2(F.relu(self.bn2(out), inplace=True)) + self.shortcut(x)


def wide_resnet(widths: tuple[int, ...], blocks: int, classes: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)]
    for i, (c_in, c_out) in enumerate(zip((widths[0], *widths), widths)):
        layers += [WideBlock(c_in, c_out, 2 if i else 1), *(WideBlock(c_out, c_out, 1) for _ in range(blocks - 1))]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))


class PatchNet(nn.Module):
    """Patches of pictures through an encoder; gives one vector for each picture."""

    def __init__(self, patch: int, dim: int, heads: int, depth: int) -> None:
        super().__init__()
        self.patch, self.embed = patch, nn.Linear(3 * patch * patch, dim)
        self.trunk, self.norm = encoder(dim, heads, depth), nn.LayerNorm(dim)

    def forward(self, images: Tensor) -> Tensor:
        pieces = images.unflatten(3, (-1, self.patch)).unflatten(2, (-1, self.patch))
        patches = pieces.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return self.norm(self.trunk(self.embed(patches)).mean(1))


class Probe(nn.Module):
    """A head over a network that was trained before; whether that network learns as well is a flag."""

    def __init__(self, backbone: nn.Module, dim: int, classes: int, freeze: bool) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(dim, classes)
        if freeze:
            self.backbone.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(images))


def generator(latent: int, widths: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = [nn.ConvTranspose2d(latent, widths[0], 4, 1, 0, bias=False), nn.ReLU(True)]
    for c_in, c_out in itertools.pairwise(widths):
        layers += [nn.ConvTranspose2d(c_in, c_out, 4, 2, 1, bias=False), nn.ReLU(True)]
    return nn.Sequential(*layers, nn.ConvTranspose2d(widths[-1], 8, 4, 2, 1, bias=False), nn.Tanh())


def discriminator(widths: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for c_in, c_out in zip((8, *widths), widths):
        layers += [nn.Conv2d(c_in, c_out, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 1))


class PointNet(nn.Module):
    """The same small network for every point, and the largest of each feature over all points."""

    def __init__(self, columns: int, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.local, self.glob = mlp(columns, *widths), mlp(widths[-1], widths[-1] // 2, classes)

    def forward(self, points: Tensor) -> Tensor:
        return self.glob(self.local(points).amax(1))


class ChunkNet(nn.Module):
    """Chunks of a film one behind the other; what was seen before is carried along."""

    def __init__(self, pixels: int, dim: int, heads: int, depth: int) -> None:
        super().__init__()
        self.embed, self.trunk, self.carry = nn.Linear(pixels, dim), encoder(dim, heads, depth), nn.Linear(dim, dim)

    def forward(self, chunk: Tensor, state: Tensor) -> Tensor:
        x = self.embed(chunk.to(torch.bfloat16)) + state
        return self.carry(self.trunk(x).mean(1, keepdim=True))


class DiTBlock(nn.Module):
    """A block whose norms are shifted, scaled and gated by what it is told."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False)
        self.attn = Attention(dim, heads)
        self.ffn = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))
        self.ada = nn.Linear(dim, 6 * dim)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        a1, b1, g1, a2, b2, g2 = self.ada(F.silu(c))[:, None].chunk(6, dim=-1)
        x = x + g1 * self.attn(torch.addcmul(b1, self.norm1(x), 1 + a1))
        return x + g2 * self.ffn(torch.addcmul(b2, self.norm2(x), 1 + a2))


class DiT(nn.Module):
    """Denoises latents, told what they show."""

    def __init__(self, channels: int, dim: int, heads: int, depth: int, classes: int) -> None:
        super().__init__()
        self.proj_in, self.proj_out = nn.Linear(channels, dim), nn.Linear(dim, channels)
        self.label, self.blocks = nn.Embedding(classes, dim), nn.ModuleList(DiTBlock(dim, heads) for _ in range(depth))

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        x, c = self.proj_in(latents), self.label(labels)
        for block in self.blocks:
            x = block(x, c)
        return self.proj_out(x)


# ---------------------------------------------------------------- speech and music


class Speaker(nn.Module):
    """Phones to frames of a spectrogram: encoded, made as long as they are spoken, decoded."""

    def __init__(self, phones: int, dim: int, heads: int, depth: int, mels: int, vectorized: bool) -> None:
        super().__init__()
        self.embed, self.vectorized = nn.Embedding(phones, dim), vectorized
        self.encode, self.decode = encoder(dim, heads, depth), encoder(dim, heads, depth)
        self.to_mel = nn.Linear(dim, mels)

    def regulate(self, x: Tensor, durations: Tensor, frames: int) -> Tensor:
        """Every phone as often as it has frames; shorter utterances end in zeros."""
        if not self.vectorized:
            spoken = [torch.repeat_interleave(one, times, dim=0) for one, times in zip(x, durations)]
            spoken = [F.pad(one, (0, 0, 0, frames - one.size(0))) for one in spoken]
            return torch.stack(spoken)
        ends, at = durations.cumsum(1), torch.arange(frames, device=x.device).expand(x.size(0), -1).contiguous()
        index = torch.searchsorted(ends, at, right=True)
        padded = F.pad(x, (0, 0, 0, 1))
        rows = index + torch.arange(x.size(0), device=x.device)[:, None] * padded.size(1)
        return F.embedding(rows, padded.flatten(0, 1))

    def forward(self, phones: Tensor, durations: Tensor, frames: int) -> Tensor:
        x = self.encode(self.embed(phones))
        return self.to_mel(self.decode(self.regulate(x, durations, frames)))


class Unmix(nn.Module):
    """What of each frequency bin belongs to the singer."""

    def __init__(self, bins: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(bins, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.fc3 = nn.Linear(hidden, bins, bias=False)

    def forward(self, mix: Tensor) -> Tensor:
        return F.relu(self.fc3(F.relu(self.fc2(torch.tanh(self.fc1(mix)))))) * mix


# ---------------------------------------------------------------- language


class Head(nn.Module):
    """One head of self-attention, as a well-known lecture writes it."""

    def __init__(self, n_embd: int, head_size: int, block_size: int, fused: bool) -> None:
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        t = x.size(1)
        k, q, v = self.key(x), self.query(x), self.value(x)
        if self.fused:
            return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
        wei = q @ k.transpose(-2, -1) * k.size(-1) ** -0.5
        wei = wei.masked_fill(self.tril[:t, :t] == 0, float("-inf"))
        wei = F.softmax(wei, dim=-1)
        return wei @ v


class HeadsBlock(nn.Module):
    """Heads in a list, joined, and a network behind."""

    def __init__(self, n_embd: int, n_head: int, block_size: int, fused: bool) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(n_embd, n_embd // n_head, block_size, fused) for _ in range(n_head))
        self.proj = nn.Linear(n_embd, n_embd)
        self.ffwd = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.ReLU(), nn.Linear(4 * n_embd, n_embd))
        self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.ln1(x)
        x = x + self.proj(torch.cat([h(normed) for h in self.heads], dim=-1))
        return x + self.ffwd(self.ln2(x))


class CharModel(nn.Module):
    """The next character."""

    def __init__(self, vocab: int, n_embd: int, n_head: int, n_layer: int, block_size: int, fused: bool) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, n_embd), nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(*(HeadsBlock(n_embd, n_head, block_size, fused) for _ in range(n_layer)))
        self.lm_head = nn.Linear(n_embd, vocab)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1), device=idx.device))
        return F.cross_entropy(self.lm_head(self.blocks(x)).flatten(0, 1), targets.flatten())


class Gpt(nn.Module):
    """Words in, what the trunk makes of them out; the head is its own."""

    def __init__(self, vocab: int, dim: int, heads: int, depth: int) -> None:
        super().__init__()
        self.wte, self.trunk, self.ln_f = nn.Embedding(vocab, dim), encoder(dim, heads, depth, True), nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, idx: Tensor) -> Tensor:
        return self.lm_head(self.ln_f(self.trunk(self.wte(idx))))


class LabelSmoothing(nn.Module):
    """Smoothed targets laid out in full, as the annotated paper does it."""

    def __init__(self, size: int, smoothing: float) -> None:
        super().__init__()
        self.criterion = nn.KLDivLoss(reduction="sum")
        self.size, self.smoothing, self.confidence = size, smoothing, 1.0 - smoothing

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        true_dist = x.detach().clone()
        true_dist.fill_(self.smoothing / (self.size - 1))
        true_dist.scatter_(1, target.unsqueeze(1), self.confidence)
        return self.criterion(x, true_dist.clone().detach())


class Crf(nn.Module):
    """How unlikely a sequence of tags is: the sum over all paths is taken one word after another."""

    def __init__(self, num_tags: int) -> None:
        super().__init__()
        self.transitions = nn.Parameter(0.1 * torch.randn(num_tags, num_tags))
        self.start = nn.Parameter(torch.zeros(num_tags))
        self.register_buffer("kinds", torch.arange(num_tags))

    def forward(self, emissions: Tensor, tags: Tensor) -> Tensor:
        is_tag = (tags.unsqueeze(2) == self.kinds).float()
        moved = (is_tag[:, :-1] @ self.transitions.float()) * is_tag[:, 1:]
        gold = (emissions * is_tag).sum((1, 2)) + moved.sum((1, 2)) + is_tag[:, 0] @ self.start.float()
        alpha = self.start + emissions[:, 0]
        for t in range(1, emissions.size(1)):
            scores = alpha.unsqueeze(2) + self.transitions + emissions[:, t].unsqueeze(1)
            alpha = torch.logsumexp(scores, dim=1)
        return (torch.logsumexp(alpha, dim=1) - gold).mean()


class Tagger(nn.Module):
    """Word vectors that were learned elsewhere, a network, and a CRF."""

    def __init__(self, vocab: int, dim: int, num_tags: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim).requires_grad_(False)
        self.body = mlp(dim, 2 * dim, dim, act=nn.GELU)
        self.emit, self.crf = nn.Linear(dim, num_tags), Crf(num_tags)

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        return self.crf(self.emit(self.body(self.embed(words))).float(), tags)


class ReviewEncoder(nn.Module):
    """PyTorch's own encoder over reviews, told where they end."""

    def __init__(self, vocab: int, dim: int, heads: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=0)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.classify = nn.Linear(dim, 5)

    def forward(self, input_ids: Tensor, pad_mask: Tensor) -> Tensor:
        return self.classify(self.encoder(self.embed(input_ids), src_key_padding_mask=pad_mask)[:, 0])


# ---------------------------------------------------------------- recommenders, series, policies


class PointWiseFeedForward(nn.Module):
    """Two products for every place, as convolutions of width one; or as the products they are."""

    def __init__(self, dim: int, linear: bool) -> None:
        super().__init__()
        self.linear = linear
        self.conv1 = nn.Linear(dim, 4 * dim) if linear else nn.Conv1d(dim, 4 * dim, kernel_size=1)
        self.conv2 = nn.Linear(4 * dim, dim) if linear else nn.Conv1d(4 * dim, dim, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        if self.linear:
            return self.conv2(F.relu(self.conv1(x)))
        out = F.relu(self.conv1(x.transpose(-1, -2).contiguous()))
        return self.conv2(out).transpose(-1, -2).contiguous()


class NextItem(nn.Module):
    """What somebody looks at next."""

    def __init__(self, items: int, dim: int, heads: int, depth: int, linear: bool) -> None:
        super().__init__()
        self.item_emb = nn.Embedding(items, dim)
        self.attention = nn.ModuleList(Attention(dim, heads, causal=True) for _ in range(depth))
        self.forwards = nn.ModuleList(PointWiseFeedForward(dim, linear) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * depth))

    def forward(self, log_seqs: Tensor) -> Tensor:
        seqs = self.item_emb(log_seqs)
        for i, (attend, feed) in enumerate(zip(self.attention, self.forwards)):
            seqs = seqs + attend(self.norms[2 * i](seqs))
            seqs = seqs + feed(self.norms[2 * i + 1](seqs))
        return seqs


class TransE(nn.Module):
    """Facts as translations: a subject moved by a relation should be near its object."""

    def __init__(self, entities: int, relations: int, dim: int, sparse: bool) -> None:
        super().__init__()
        self.ent, self.rel = nn.Embedding(entities, dim, sparse=sparse), nn.Embedding(relations, dim, sparse=sparse)

    def distance(self, h: Tensor, r: Tensor, t: Tensor) -> Tensor:
        return (self.ent(h) + self.rel(r) - self.ent(t)).norm(p=1, dim=-1)

    def forward(self, h: Tensor, r: Tensor, t: Tensor, corrupted: Tensor) -> Tensor:
        return F.relu(1.0 + self.distance(h, r, t) - self.distance(h, r, corrupted)).mean()


class MixerBlock(nn.Module):
    """Mixes along time, then along variables."""

    def __init__(self, time: int, variables: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(variables), nn.LayerNorm(variables)
        self.temporal, self.features = nn.Linear(time, time), mlp(variables, hidden, variables)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.relu(self.temporal(self.norm1(x).transpose(1, 2))).transpose(1, 2)
        return x + self.features(self.norm2(x))


class ResidualMlp(nn.Module):
    """A block of a deep network for tables."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.relu(self.fc1(self.norm(x))))


class SensorNet(nn.Module):
    """What somebody does, from what sensors say."""

    def __init__(self, channels: int, patch: int, dim: int, heads: int, depth: int) -> None:
        super().__init__()
        self.patch, self.enter = patch, nn.Linear(patch * channels, dim)
        self.trunk, self.head = encoder(dim, heads, depth), nn.Linear(dim, 6)

    def forward(self, windows: Tensor) -> Tensor:
        pieces = windows.unflatten(1, (-1, self.patch)).flatten(2)
        return self.head(self.trunk(self.enter(pieces)).mean(1))


class ActorCritic(nn.Module):
    """What to do, and how good it is to be here."""

    def __init__(self, seen: int, hidden: int, actions: int) -> None:
        super().__init__()
        self.body = mlp(seen, hidden, hidden, hidden, act=nn.Tanh)
        self.pi, self.v = nn.Linear(hidden, actions), nn.Linear(hidden, 8)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(obs))
        return self.pi(h), self.v(h).mean(-1)


class Planner(nn.Module):
    """The noise in plans, from the plans and how noisy they are."""

    def __init__(self, plan: int, hidden: int, depth: int) -> None:
        super().__init__()
        self.enter, self.leave, self.steps = nn.Linear(plan, hidden), nn.Linear(hidden, plan), nn.Embedding(64, hidden)
        self.body = mlp(*([hidden] * (depth + 1)), act=nn.SiLU)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.leave(self.body(self.enter(x) + self.steps(t)))


# ---------------------------------------------------------------- functional style


def adam_init(params: dict[str, Tensor]) -> dict[str, Any]:
    zeros = lambda: {name: torch.zeros_like(p) for name, p in params.items()}
    return {"mu": zeros(), "nu": zeros(), "count": 0}


@torch.no_grad()
def adam_update(
    params: dict[str, Tensor], grads: dict[str, Tensor], state: dict[str, Any], lr: float = 1e-4
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """New weights and a new state from old ones, leaf by leaf, as one would write it in another framework."""
    count = state["count"] + 1
    mu = {n: 0.9 * state["mu"][n] + 0.1 * g for n, g in grads.items()}
    nu = {n: 0.999 * state["nu"][n] + 0.001 * g * g for n, g in grads.items()}
    mu_hat = {n: m / (1 - 0.9**count) for n, m in mu.items()}
    nu_hat = {n: v / (1 - 0.999**count) for n, v in nu.items()}
    new = {n: p - lr * (mu_hat[n] / (nu_hat[n].sqrt() + 1e-8) + 0.01 * p) for n, p in params.items()}
    return {n: p.requires_grad_() for n, p in new.items()}, {"mu": mu, "nu": nu, "count": count}


# ---------------------------------------------------------------- simulations and compiled parts

VELOCITIES = ((0, 0), (1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, 1), (-1, -1), (1, -1))
WEIGHTS = (4 / 9, 1 / 9, 1 / 9, 1 / 9, 1 / 9, 1 / 36, 1 / 36, 1 / 36, 1 / 36)


def collide(f: Tensor, omega: float) -> Tensor:
    """What flows at each place of a lattice after it met what else is there."""
    rho = f.sum(0)
    ux = (f[1] - f[3] + f[5] - f[6] - f[7] + f[8]) / rho
    uy = (f[2] - f[4] + f[5] + f[6] - f[7] - f[8]) / rho
    speed = 1.5 * (ux * ux + uy * uy)
    out = []
    for i, (cx, cy) in enumerate(VELOCITIES):
        cu = 3 * (cx * ux + cy * uy)
        equilibrium = WEIGHTS[i] * rho * (1 + cu + 0.5 * cu * cu - speed)
        out.append(f[i] + omega * (equilibrium - f[i]))
    return torch.stack(out)


def stream(f: Tensor) -> Tensor:
    return torch.stack([f[i].roll((cx, cy), (0, 1)) for i, (cx, cy) in enumerate(VELOCITIES)])


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    var = x.float().pow(2).mean(-1, keepdim=True)
    return (x.float() * torch.rsqrt(var + 1e-6)).to(x.dtype) * weight


rms_norm_uncompiled = torch.compiler.disable(rms_norm)
"""Left out of compilation after an upgrade once broke it."""


def gated_residual(x: Tensor, y: Tensor, scale: Tensor, weight: Tensor, norm: Callable[..., Tensor]) -> Tensor:
    x = x + scale * F.silu(y)
    return torch.tanh(norm(x, weight)) + 0.5 * x


# ---------------------------------------------------------------- what is well


class RankNet:
    """Products with their activations inside of them, for inference."""

    def __init__(self, dim: int, depth: int, device: str) -> None:
        draw = lambda *size: torch.randn(*size, device=device, dtype=torch.bfloat16)
        self.weights = [draw(dim, dim) * math.sqrt(2 / dim) for _ in range(depth)]
        self.biases = [draw(dim) * 0.01 for _ in range(depth)]
        self.out = draw(dim, 8) * dim**-0.5

    def __call__(self, x: Tensor) -> Tensor:
        for weight, bias in zip(self.weights, self.biases):
            x = torch._addmm_activation(bias, x, weight)
        return x @ self.out


FASTEST_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


class LongReader(nn.Module):
    """Layers that only attend, for very long texts, by the kernel that is fastest on this device."""

    def __init__(self, dim: int, heads: int, depth: int) -> None:
        super().__init__()
        self.heads, self.size = heads, dim // heads
        self.qkv = nn.ModuleList(nn.Linear(dim, 3 * dim, bias=False) for _ in range(depth))
        self.out = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for qkv, out in zip(self.qkv, self.out):
            q, k, v = qkv(x).unflatten(-1, (3, self.heads, self.size)).permute(2, 0, 3, 1, 4)
            with sdpa_kernel(FASTEST_FIRST, set_priority=True):
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = out(y.transpose(1, 2).flatten(2))
        return x


class BroadDecoder(nn.Module):
    """One more word for many texts by few, very broad layers; keys lie where they were laid out before."""

    def __init__(self, dim: int, heads: int, depth: int, batch: int, room: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.qkv = nn.ModuleList(nn.Linear(dim, 3 * dim, bias=False) for _ in range(depth))
        self.out = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(dim, 4 * dim, bias=False) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(4 * dim, dim, bias=False) for _ in range(depth))
        self.register_buffer("cache", torch.zeros(depth, 2, batch, heads, room, dim // heads))

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        for i, norm in enumerate(self.norms):
            q, k, v = self.qkv[i](norm(x)).unflatten(-1, (3, self.heads, 1, -1)).unbind(1)
            keys, values = self.cache[i]
            keys.index_copy_(2, place, k)
            values.index_copy_(2, place, v)
            x = x + self.out[i](F.scaled_dot_product_attention(q, keys, values).flatten(1))
            x = x + self.down[i](F.relu(self.up[i](x)))
        return x


def deep_convolutions(width: int, depth: int, classes: int) -> nn.Sequential:
    """Few, very wide convolutions, whose activations overwrite what they are given."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


class BroadLayer(nn.Module):
    """One layer of a very broad language model."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(dim), Attention(dim, heads, causal=True)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.down(F.relu(self.up(x), inplace=True))
