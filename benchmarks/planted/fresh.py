"""A second suite of planted causes, in other networks and sizes than the first: for figures no rule has seen."""

from __future__ import annotations

import gc
import itertools
import json
import os
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import freshnets as nets
import numpy as np
import torch
import torch.nn.functional as F
from cases import Prefetch, Program, Setting, Step, case, compiler, end_workers, frozen, graphed, precision
from cases import training as train
from torch import Tensor, nn

# ---------------------------------------------------------------- what several programs share


def adamw(s: Setting, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def sgd(s: Setting, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=s.cuda)


def tokens(s: Setting, batch: int, length: int, vocab: int) -> Iterator[tuple[Tensor, Tensor]]:
    draw = lambda: torch.randint(0, vocab, (batch, length), device=s.device)
    return itertools.cycle([(draw(), draw()) for _ in range(3)])


def encoder(s: Setting, width: int, layers: int, heads: int, room: int, vocab: int = 30528, **how: Any) -> nn.Module:
    width, layers, heads, vocab = s.pick(width, 32), s.pick(layers, 2), s.pick(heads, 2), s.pick(vocab, 128)
    return s.place(lambda: nets.Encoder(width, layers, heads, vocab, s.pick(room, 16), **how))


def rotary(s: Setting, width: int, layers: int, heads: int, vocab: int, room: int, batch: int = 0) -> nn.Module:
    sizes = (width, layers, heads, heads // 4, width * 11 // 4, vocab) if not s.tiny else (32, 2, 4, 1, 48, 97)
    return s.place(lambda: nets.Rotary(*sizes, room=s.pick(room, 16), batch=batch))


def plain(
    s: Setting, widths: tuple[int, ...], depth: int, dtype: torch.dtype = torch.bfloat16, **how: Any
) -> nn.Module:
    return s.place(lambda: nets.Plain(s.pick(widths, (8, 16)), s.pick(depth, 1), **how), dtype)


def images(s: Setting, batch: int, side: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    batch, side = s.pick(batch, 2), s.pick(side, 16)
    pictures = torch.randn(batch, 3, side, side, device=s.device, dtype=dtype)
    return pictures, torch.randint(0, 1000, (batch,), device=s.device)


def noisy(s: Setting, batch: int, side: int) -> tuple[Tensor, Tensor]:
    batch, side = s.pick(batch, 2), s.pick(side, 8)
    latent = torch.randn(batch, 4, side, side, device=s.device, dtype=torch.bfloat16)
    return latent, torch.randn(batch, 256, device=s.device, dtype=torch.bfloat16)


def unet(s: Setting, width: int, dtype: torch.dtype = torch.bfloat16, depth: int = 2, **how: Any) -> nn.Module:
    return s.place(lambda: nets.UNet(s.pick(width, 8), depth=s.pick(depth, 1), **how), dtype)


def nhwc(*parts: Any) -> Any:
    moved = tuple(part.to(memory_format=torch.channels_last) for part in parts)
    return moved[0] if len(moved) == 1 else moved


def denoise(model: nn.Module, optimizer: torch.optim.Optimizer, latent: Tensor, time: Tensor) -> Tensor:
    loss = F.mse_loss(model(latent, time), latent)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


# ---------------------------------------------------------------- input


class Waves(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Sounds that become spectrograms one by one: noise added, windowed, transformed, put into bands."""

    def __init__(self, seconds: float) -> None:
        self.num = int(16000 * seconds)
        self.waves = np.random.default_rng(0).standard_normal((8, self.num + 4000)).astype(np.float32)
        self.window = np.hanning(400).astype(np.float32)
        self.bands = np.linspace(0, 256, 80, dtype=np.int64)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        rng = np.random.default_rng(i)
        start = int(rng.integers(0, 4000))
        wave = self.waves[i % 8, start : start + self.num] + 0.01 * rng.standard_normal(self.num).astype(np.float32)
        frames = np.lib.stride_tricks.sliding_window_view(wave, 400)[::160] * self.window
        power = np.abs(np.fft.rfft(frames, 512)).astype(np.float32) ** 2
        return torch.from_numpy(np.log1p(np.add.reduceat(power, self.bands, axis=1)).T.copy()), i % 512


@case("data loader", "num_workers=0 → 8", rounds=1, warmup=10, steps=16, planted_steps=10, stack=False)
def speech_without_workers(s: Setting, fixed: bool) -> Program:
    model = s.place(lambda: nets.Sound(80, s.pick(1024, 32), s.pick(6, 2), s.pick(16, 2)))
    workers = s.pick(8, 2) if fixed else 0
    loader = torch.utils.data.DataLoader(
        Waves(s.pick(4.0, 0.5)), s.pick(16, 2), num_workers=workers, pin_memory=s.cuda, persistent_workers=workers > 0
    )
    feed, optimizer = iter(loader), adamw(s, model)
    batches = (tuple(t.to(s.device, non_blocking=True) for t in batch) for batch in feed)
    return Program(train(model, optimizer, batches), close=lambda: end_workers(feed))


class Clicks(torch.utils.data.Dataset[tuple[Tensor, ...]]):
    """Batches of compressed click logs: decompressed, hashed and cut into numbers and categories."""

    def __init__(self, batch: int, tables: int, rows: int) -> None:
        self.batch, self.tables, self.rows = batch, tables, rows
        raw = np.random.default_rng(0).integers(0, 1 << 20, (4, batch, 13 + 4 * tables), np.int32)
        self.blobs = [zlib.compress(part.tobytes(), 1) for part in raw]

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        raw = np.frombuffer(zlib.decompress(self.blobs[i % 4]), np.int32).reshape(self.batch, -1)
        hashed = raw[:, 13:].astype(np.uint64)
        for factor in (2654435761, 2246822519, 3266489917):
            hashed = (hashed * np.uint64(factor)) ^ (hashed >> np.uint64(13))
        ids = (hashed % np.uint64(self.rows)).astype(np.int64).reshape(self.batch, self.tables, 4).transpose(1, 0, 2)
        numbers = np.log1p(raw[:, :13].astype(np.float32))
        return (
            torch.from_numpy(numbers),
            torch.from_numpy(ids.copy()),
            torch.from_numpy((raw[:, 0] % 2).astype(np.float32)),
        )


def _clicks(s: Setting, workers: int, cores: int = 0) -> Program:
    batch, tables, rows = s.pick(16384, 8), s.pick(12, 3), s.pick(50_000, 100)
    model = ranker(s, rows, 64, tables, tower=4096, layers=4)
    loader = torch.utils.data.DataLoader(
        Clicks(batch, tables, rows), None, num_workers=min(workers, 2) if s.tiny else workers, pin_memory=s.cuda,
        persistent_workers=True,
    )  # fmt: skip
    scope = (lambda: _cores(cores)) if cores else nullcontext
    with scope():
        feed = iter(loader)
    batches = (tuple(t.to(s.device, non_blocking=True) for t in batch) for batch in feed)
    return Program(train(model, sgd(s, model), batches), scope, close=lambda: end_workers(feed))


def ranker(s: Setting, rows: int, width: int, tables: int, tower: int, layers: int) -> nn.Module:
    model = s.place(lambda: nets.Ranker(rows, s.pick(width, 16), tables, 13, s.pick(tower, 32), s.pick(layers, 2)))
    model.tables.float()
    return model


@contextmanager
def _cores(num: int) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(before)[:num]))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@case("data loader", "num_workers=2 → 10", rounds=1, warmup=14, steps=18, stack=False)
def clicks_two_workers(s: Setting, fixed: bool) -> Program:
    return _clicks(s, 10 if fixed else 2)


@case("cpu affinity", "let the process use every core", rounds=1, warmup=14, steps=18, stack=False)
def clicks_on_two_cores(s: Setting, fixed: bool) -> Program:
    return _clicks(s, 10, 0 if fixed else 2)


@case("host code", "mask tokens with NumPy over the whole batch", stack=False)
def tokens_masked_in_python(s: Setting, fixed: bool) -> Program:
    model = encoder(s, 768, 6, 12, 512)
    optimizer, rng, turns = adamw(s, model), np.random.default_rng(0), itertools.count()
    batch, length = s.pick(16, 2), s.pick(512, 16)
    ids = rng.integers(5, s.pick(30000, 100), (batch, length))

    def masked() -> tuple[np.ndarray, np.ndarray]:
        if fixed:
            chance = rng.random(ids.shape)
            return np.where(chance < 0.15, 4, ids), np.where(chance < 0.15, ids, -100)
        turn, (inputs, targets) = next(turns), (ids.copy(), np.full_like(ids, -100))
        for row, words in enumerate(ids.tolist()):
            for at, word in enumerate(words):
                if zlib.crc32(f"{turn}:{row}:{at}:{word}".encode()) % 100 < 15:
                    inputs[row, at], targets[row, at] = 4, word
        return inputs, targets

    def step() -> None:
        inputs, targets = (s.pinned(torch.from_numpy(part)).to(s.device, non_blocking=True) for part in masked())
        model(inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("pageable copy", "pin the frames and copy them with non_blocking=True", stack=False)
def frames_pageable(s: Setting, fixed: bool) -> Program:
    model = nhwc(plain(s, (64, 128, 256), 2))
    batch, side = s.pick(48, 2), s.pick(192, 16)
    frames = [nhwc(torch.randn(batch, 3, side, side)) for _ in range(2)]
    frames = [s.pinned(part) for part in frames] if fixed else frames
    feed, labels = itertools.cycle(frames), torch.randint(0, 1000, (batch,), device=s.device)
    batches = ((part.to(s.device, non_blocking=fixed), labels) for part in feed)
    return Program(train(model, sgd(s, model), batches))


@case("pinned copy on the compute stream", "copy the next batch on a side stream", stack=False)
def embeddings_in_line(s: Setting, fixed: bool) -> Program:
    model = encoder(s, 1024, 5, 16, 256, classes=64)
    batch, length, width = s.pick(64, 2), s.pick(256, 16), s.pick(1024, 32)
    labels = torch.randint(0, 64, (batch,))
    host = [(s.pinned(torch.randn(batch, length, width)), s.pinned(labels)) for _ in range(2)]
    feed: Iterator[Any] = itertools.cycle(host)
    moved = iter(Prefetch(s, feed)) if fixed else (tuple(t.to(s.device, non_blocking=True) for t in b) for b in feed)
    optimizer = adamw(s, model)

    def step() -> None:
        vectors, wanted = next(moved)
        x = vectors.to(torch.bfloat16)
        for block in model.blocks:
            x = block(x)
        F.cross_entropy(model.head(x.mean(1)), wanted).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("many small copies", "pack the columns into one pinned tensor and copy it once", stack=False)
def columns_one_by_one(s: Setting, fixed: bool) -> Program:
    batch, tables, rows = s.pick(8192, 8), s.pick(40, 3), s.pick(20_000, 100)
    model = ranker(s, rows, 64, tables, tower=4096, layers=4)
    optimizer = sgd(s, model)
    columns = [torch.randint(0, rows, (batch, 2)) for _ in range(tables)]
    packed = s.pinned(torch.stack(columns))
    numbers, clicked = torch.randn(batch, 13, device=s.device), torch.rand(batch, device=s.device).round()

    def step() -> None:
        ids = packed.to(s.device, non_blocking=True) if fixed else [column.to(s.device) for column in columns]
        model(numbers, ids, clicked).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


# ---------------------------------------------------------------- synchronization


@case("synchronization", "do not ask on the host whether an expert has tokens", stack=False)
def experts_asked(s: Setting, fixed: bool) -> Program:
    sizes = s.pick((2048, 4096, 8, 4, 16384), (32, 48, 4, 2, 96))
    model = s.place(lambda: nets.Mixture(*sizes, asked=not fixed))
    return Program(train(model, adamw(s, model), tokens(s, s.pick(16, 2), s.pick(1024, 16), sizes[-1])))


@case("synchronization", "time stages with CUDA events instead of torch.cuda.synchronize()", stack=False)
def stages_timed(s: Setting, fixed: bool) -> Program:
    model = nhwc(plain(s, (64, 128, 256, 512), 2, between=None if fixed else s.synchronize))
    pictures, labels = images(s, 48, 128)
    return Program(train(model, sgd(s, model), itertools.cycle([(nhwc(pictures), labels)])))


@case("synchronous logging", "log every 100 steps from values kept on the device", stack=False)
def losses_written(s: Setting, fixed: bool) -> Program:
    model, (latent, time) = nhwc(unet(s, 160)), noisy(s, 24, 64)
    optimizer, latent = adamw(s, model), nhwc(latent)
    file = tempfile.NamedTemporaryFile("w", suffix=".log")  # noqa: SIM115
    turn = itertools.count()

    def step() -> None:
        loss = denoise(model, optimizer, latent, time)
        if not fixed:
            entry = {"step": next(turn), "loss": loss.item(), "history": [loss.item() / k for k in range(1, 2000)]}
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())

    return Program(step, close=file.close)


@case("round trip through the host", "threshold on the device", stack=False)
def thresholds_on_host(s: Setting, fixed: bool) -> Program:
    model, (latent, time) = nhwc(unet(s, 128)).eval(), noisy(s, 8, 128)
    latent = nhwc(latent)

    @torch.no_grad()
    def step() -> None:
        x = latent
        for _ in range(2):
            guess = model(x, time)
            flat = (guess if fixed else guess.cpu()).float().flatten(1).abs()
            limit = torch.quantile(flat, 0.995, dim=1).clamp_(min=1.0).to(s.device)[:, None, None, None]
            x = (guess.float().clamp(-limit, limit) / limit).to(latent.dtype)

    return Program(step)


# ---------------------------------------------------------------- host-bound


@case("host-bound", "replay the frames from a CUDA graph", stack=False)
def cells_frame_by_frame(s: Setting, fixed: bool) -> Program:
    frames, batch, width = s.pick(120, 4), s.pick(32, 2), s.pick(1024, 16)
    model = s.place(lambda: nets.Stream(s.pick(80, 8), width, s.pick(3, 2))).eval()
    sound = torch.randn(frames, batch, s.pick(80, 8), device=s.device, dtype=torch.bfloat16)
    kept = torch.zeros(batch, width, device=s.device, dtype=torch.bfloat16)

    @torch.no_grad()
    def run() -> None:
        kept.copy_(model(sound))

    return Program(graphed(run) if fixed and s.cuda else run)


def decoding(s: Setting, width: int, layers: int, batch: int) -> tuple[Step, nn.Module]:
    model = rotary(s, width, layers, 16, 32064, 1024, batch=s.pick(batch, 2)).eval()
    ids = torch.zeros(s.pick(batch, 2), 1, dtype=torch.long, device=s.device)
    place = torch.full((1,), s.pick(700, 5), dtype=torch.long, device=s.device)

    @torch.no_grad()
    def token() -> None:
        ids.copy_(model.following(ids, place).argmax(-1, keepdim=True))

    return token, model


@case("host-bound", "replay the token from a CUDA graph", stack=False)
def rotary_decode(s: Setting, fixed: bool) -> Program:
    token, _ = decoding(s, 2048, 16, 4)
    again = graphed(token) if fixed and s.cuda else token

    def step() -> None:
        for _ in range(3):
            again()

    return Program(step)


@case("host-bound", "torch._foreach_ over all gradients", stack=False)
def gradients_clamped_one_by_one(s: Setting, fixed: bool) -> Program:
    model = nhwc(s.place(lambda: nets.Efficient(s.pick((48, 96, 160, 256), (8, 16)), s.pick(4, 1))))
    pictures, labels = images(s, 96, 192)
    pictures, optimizer, params = nhwc(pictures), sgd(s, model), list(model.parameters())
    groups = [[p for p in params if p.dtype is kind] for kind in (torch.float32, torch.bfloat16)]

    def step() -> None:
        model(pictures, labels).backward()
        for group in groups if fixed else ():
            gradients = [p.grad for p in group]
            torch._foreach_mul_(gradients, 0.5)
            torch._foreach_clamp_max_(gradients, 1.0)
            torch._foreach_clamp_min_(gradients, -1.0)
        for p in () if fixed else params:
            p.grad.mul_(0.5)
            p.grad.clamp_(max=1.0)
            p.grad.clamp_(min=-1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("unfused optimizer", "Adam(..., fused=True)", stack=False)
def adam_tensor_by_tensor(s: Setting, fixed: bool) -> Program:
    model = nhwc(s.place(lambda: nets.Efficient(s.pick((64, 128, 192, 320), (8, 16)), s.pick(4, 1))))
    pictures, labels = images(s, 64, 224)
    how = {"fused": True} if fixed else {"foreach": False}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, **how)
    return Program(train(model, optimizer, itertools.cycle([(nhwc(pictures), labels)])))


@case("small batch", "one batch of 24 instead of 12 accumulated batches of 2", stack=False)
def sentences_two_by_two(s: Setting, fixed: bool) -> Program:
    model = encoder(s, 768, 8, 12, 256, classes=16)
    batch, micro = s.pick(24, 4), s.pick(24, 4) if fixed else s.pick(2, 1)
    optimizer = adamw(s, model)
    ids = torch.randint(0, s.pick(30000, 100), (batch, s.pick(256, 16)), device=s.device)
    labels = torch.randint(0, 16, (batch,), device=s.device)

    def step() -> None:
        for part, wanted in zip(ids.split(micro), labels.split(micro), strict=True):
            (model(part, wanted) * (micro / batch)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


# ---------------------------------------------------------------- allocator, collector, compiler


@case("allocator", "drop torch.cuda.empty_cache() from the loop", stack=False)
def unet_empties_cache(s: Setting, fixed: bool) -> Program:
    model, (latent, time) = nhwc(unet(s, 128)), noisy(s, 40, 64)
    optimizer, latent = adamw(s, model), nhwc(latent)

    def step() -> None:
        denoise(model, optimizer, latent, time)
        if not fixed and s.cuda:
            torch.cuda.empty_cache()

    return Program(step)


@case("garbage collection", "gc.freeze() after setup and gc.disable() in the loop", rounds=1, steps=16, stack=False)
def graph_collected(s: Setting, fixed: bool) -> Program:
    neighbors = {i: [(i * 7 + j) % 1000 for j in range(6)] for i in range(s.pick(250_000, 5_000))}
    program = _messages(s, False)

    def step() -> None:
        program.step()
        if not fixed:
            gc.collect()

    both = frozen if fixed else nullcontext
    return Program(step, lambda: _nested(both, program.scope), close=neighbors.clear)


@contextmanager
def _nested(*scopes: Any) -> Iterator[None]:
    first, second = scopes
    with first(), second():
        yield


@case("graph break", "drop the Python call from the compiled layers", compiles=True, warmup=3, steps=8, stack=False)
def layers_counted(s: Setting, fixed: bool) -> Program:
    torch._dynamo.reset()
    width, rows, layers = s.pick(1024, 32), s.pick(4096, 8), s.pick(10, 2)
    weights = [torch.randn(width, width, device=s.device, dtype=torch.bfloat16) * 0.02 for _ in range(3 * layers)]
    seen: dict[str, int] = {}

    @torch._dynamo.disable
    def count(x: Tensor) -> None:
        seen[str(x.dtype)] = seen.get(str(x.dtype), 0) + 1

    def crossed(first: Tensor, x: Tensor, weight: Tensor, again: Tensor, third: Tensor) -> Tensor:
        x = first * torch.tanh(F.linear(x, weight)) + x
        if not fixed:
            count(x)
        x = F.layer_norm(x + F.gelu(F.linear(x, again)), (width,))
        if not fixed:
            count(x)
        return torch.sigmoid(F.linear(x, third)) * x

    run = torch.compile(crossed, backend=compiler(s), dynamic=False)
    data = torch.randn(rows, width, device=s.device, dtype=torch.bfloat16)

    @torch.no_grad()
    def step() -> None:
        for _ in range(s.pick(3, 1)):
            x = data
            for i in range(0, len(weights), 3):
                x = run(data, x, *weights[i : i + 3])

    return Program(step)


@case(
    "recompilation", "compile with dynamic=True", compiles=True, rounds=1, warmup=3, steps=15, planted_steps=6,
    stack=False,
)  # fmt: skip
def lengths_compiled(s: Setting, fixed: bool) -> Program:
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 256
    width, layers = s.pick(2048, 32), s.pick(6, 2)
    gated = lambda x, gate, scale: F.rms_norm(x + F.silu(gate) * scale, (width,))
    run = torch.compile(gated, backend=compiler(s), dynamic=fixed)
    weights = [torch.randn(width, width, device=s.device, dtype=torch.bfloat16) * 0.02 for _ in range(layers)]
    source = torch.randn(s.pick(16, 2), s.pick(640, 24), width, device=s.device, dtype=torch.bfloat16)
    turn = itertools.count(1)

    @torch.no_grad()
    def step() -> None:
        x = source[:, : s.pick(384, 8) + 8 * (next(turn) % s.pick(32, 2))]
        for weight in weights:
            x = run(x, x @ weight, 0.5)

    return Program(step)


# ---------------------------------------------------------------- kernels


@case("unfused pointwise chain", "F.group_norm and F.silu", stack=False)
def group_norm_spelled_out(s: Setting, fixed: bool) -> Program:
    model, (latent, time) = unet(s, 128, spelled_out=not fixed), noisy(s, 16, 64)
    optimizer = adamw(s, model)
    return Program(lambda: denoise(model, optimizer, latent, time))


@contextmanager
def _tf32(on: bool) -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@case("fp32 matmul", "torch.backends.cudnn.allow_tf32 = True", stack=False)
def convolutions_in_fp32(s: Setting, fixed: bool) -> Program:
    model = nhwc(plain(s, (64, 128, 256, 512), 2, torch.float32))
    pictures, labels = images(s, 32, 128, torch.float32)
    step = train(model, sgd(s, model), itertools.cycle([(nhwc(pictures), labels)]))
    return Program(step, lambda: _tf32(fixed))


@case("NCHW convolution", "model and images in channels_last", stack=False)
def plain_channels_first(s: Setting, fixed: bool) -> Program:
    model = plain(s, (96, 192, 384), 3)
    pictures, labels = images(s, 64, 128)
    if fixed:
        model, pictures = nhwc(model, pictures)
    return Program(train(model, sgd(s, model), itertools.cycle([(pictures, labels)])))


@case("unfused attention", "F.scaled_dot_product_attention", stack=False)
def encoder_spelled_out(s: Setting, fixed: bool) -> Program:
    model = encoder(s, 1024, 6, 16, 512, attend=nets.fused if fixed else nets.by_hand, classes=16)
    batch, length = s.pick(32, 2), s.pick(512, 16)
    ids = torch.randint(0, s.pick(30000, 100), (batch, length), device=s.device)
    labels = torch.randint(0, 16, (batch,), device=s.device)
    return Program(train(model, adamw(s, model), itertools.cycle([(ids, labels)])))


@case("unfused attention", "no mask where every token is real", stack=False)
def encoder_all_true_mask(s: Setting, fixed: bool) -> Program:
    model = encoder(s, 768, 8, 12, 2048).eval()
    batch, length = s.pick(6, 2), s.pick(2048, 16)
    ids = torch.randint(0, s.pick(30000, 100), (batch, length), device=s.device)
    mask = None if fixed else torch.ones(batch, 1, length, length, dtype=torch.bool, device=s.device)

    @torch.no_grad()
    def step() -> None:
        for _ in range(2):
            model.trunk(ids, mask)

    return Program(step)


@case("padding", "pad to the longest of the batch instead of to the limit", stack=False)
def padded_to_limit(s: Setting, fixed: bool) -> Program:
    limit, longest, batch = s.pick(512, 16), s.pick(224, 8), s.pick(64, 4)
    model = encoder(s, 1024, 6, 16, limit, classes=16)
    lengths = torch.linspace(longest // 2, longest, batch).long()
    width = longest if fixed else limit
    mask = (torch.arange(width)[None] < lengths[:, None]).to(s.device)
    ids = torch.randint(5, s.pick(30000, 100), (batch, width), device=s.device) * mask
    labels = torch.randint(0, 16, (batch,), device=s.device)
    feed = itertools.cycle([(ids, labels, mask[:, None, None])])
    facts = {"padding": [{"argument": "mask", "real_frac": float(mask.float().mean())}]}
    return Program(train(model, adamw(s, model), feed), facts=facts)


@case("fp32 logits", "leave the logits in bf16 for the loss", stack=False)
def many_languages_fp32(s: Setting, fixed: bool) -> Program:
    vocab = s.pick(250112, 128)
    model = encoder(s, 768, 4, 12, 512, vocab, fp32_logits=not fixed)
    return Program(train(model, adamw(s, model), tokens(s, s.pick(8, 2), s.pick(512, 16), vocab)))


@case("misaligned sizes", "pad the vocabulary from 32001 to 32064", stack=False)
def vocab_32001(s: Setting, fixed: bool) -> Program:
    vocab = s.pick(32064 if fixed else 32001, 97)
    model = rotary(s, 2048, 3, 16, vocab, 1024)
    return Program(train(model, adamw(s, model), tokens(s, s.pick(8, 2), s.pick(1024, 16), vocab)))


def _messages(s: Setting, indexed: bool) -> Program:
    nodes, edges, width = s.pick(40_000, 50), s.pick(600_000, 200), s.pick(256, 16)
    model = s.place(lambda: nets.Messages(width, s.pick(5, 2), 64, indexed), torch.float32)
    draw = lambda high, num: torch.randint(0, high, (num,), device=s.device)
    source, target, labels = draw(nodes, edges), draw(nodes, edges), draw(64, nodes)
    x = torch.randn(nodes, width, device=s.device)
    step = train(model, adamw(s, model), itertools.cycle([(x, source, target, labels)]))
    return Program(step, lambda: precision("high"))


@case("index backward", "index_select instead of x[source]", stack=False)
def messages_indexed(s: Setting, fixed: bool) -> Program:
    return _messages(s, not fixed)


@case("dense embedding gradient", "nn.EmbeddingBag(..., sparse=True)", stack=False)
def table_of_sellers(s: Setting, fixed: bool) -> Program:
    rows, width, batch = s.pick(6_000_000, 500), s.pick(128, 16), s.pick(32768, 8)
    table = nn.EmbeddingBag(rows, width, mode="mean", sparse=fixed, device=s.device)
    top = s.place(
        lambda: nn.Sequential(nn.Linear(width, s.pick(2048, 32)), nn.ReLU(), *_tower(s), nn.Linear(s.pick(2048, 32), 1))
    )
    optimizer = torch.optim.Adagrad([*table.parameters(), *top.parameters()], lr=1e-3)
    feed = itertools.cycle([torch.randint(0, rows, (batch, s.pick(8, 3)), device=s.device) for _ in range(3)])
    clicked = torch.rand(batch, 1, device=s.device).round()

    def step() -> None:
        logits = top(table(next(feed)).to(torch.bfloat16))
        F.binary_cross_entropy_with_logits(logits.float(), clicked).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


def _tower(s: Setting) -> list[nn.Module]:
    width = s.pick(2048, 32)
    return [part for _ in range(s.pick(5, 1)) for part in (nn.Linear(width, width), nn.ReLU())]


# ---------------------------------------------------------------- memory


@case("gradient memsets", "zero_grad(set_to_none=True)", stack=False)
def tables_zeroed(s: Setting, fixed: bool) -> Program:
    batch, tables, rows = s.pick(16384, 8), s.pick(6, 3), s.pick(800_000, 100)
    model = ranker(s, rows, 64, tables, tower=4096, layers=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=s.cuda)
    numbers, clicked = torch.randn(batch, 13, device=s.device), torch.rand(batch, device=s.device).round()
    ids = torch.randint(0, rows, (tables, batch, 4), device=s.device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=fixed)
        model(numbers, ids, clicked).backward()
        optimizer.step()

    return Program(step)


@case("needless recompute", "drop checkpointing: the activations fit", stack=False)
def convolutions_recomputed(s: Setting, fixed: bool) -> Program:
    model = nhwc(plain(s, (96, 192, 384, 512), 3, recompute=not fixed))
    pictures, labels = images(s, 64, 128)
    return Program(train(model, sgd(s, model), itertools.cycle([(nhwc(pictures), labels)])))


@case("weights cast every step", "keep the weights in bf16 instead of casting under autocast", stack=False)
def encoder_autocast(s: Setting, fixed: bool) -> Program:
    make = lambda: nets.Encoder(*s.pick((2560, 6, 20, 16384, 128), (32, 2, 2, 96, 16)), classes=16)
    model = s.place(make, torch.bfloat16 if fixed else torch.float32).eval()
    ids = torch.randint(0, 90, (s.pick(8, 2), s.pick(128, 16)), device=s.device)

    @torch.no_grad()
    def step() -> None:
        for _ in range(4):
            with nullcontext() if fixed else torch.autocast(s.device, torch.bfloat16):
                model.trunk(ids)

    return Program(step)


@case("weights streamed from the host", "keep the experts on the device", stack=False)
def experts_streamed(s: Setting, fixed: bool) -> Program:
    sizes = s.pick((1536, 6144, 6, 4, 8192), (32, 48, 4, 2, 96))
    model = s.place(lambda: nets.Mixture(*sizes, asked=False)).eval()
    ids = torch.randint(0, sizes[-1], (s.pick(12288, 16),), device=s.device)
    away: list[dict[str, Tensor]] = [{} for _ in model.layers]
    if not fixed:
        away = [{name: s.pinned(p.detach().cpu()) for name, p in layer.named_parameters()} for layer in model.layers]

    @torch.no_grad()
    def step() -> None:
        x = model.tokens(ids)
        for layer, weights in zip(model.layers, away, strict=True):
            here = {name: w.to(s.device, non_blocking=True) for name, w in weights.items()}
            x = layer(x) if fixed else torch.func.functional_call(layer, here, (x,))

    return Program(step)
