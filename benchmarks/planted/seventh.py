"""A seventh suite: healthy programs of kinds no suite before had, and causes in other spellings."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import cases
import fresh
import numpy as np
import seventhnets as nets
import torch
import torch.nn.functional as F
from cases import Prefetch, Program, Setting, case, end_workers, graphed, precision
from cases import training as train
from healthy import HEALTHY, healthy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.data import DataLoader, Dataset, IterableDataset

# ---------------------------------------------------------------- nothing to find


@healthy
def healthy_graph_convolutions(s: Setting, fixed: bool) -> Program:
    """Neighbors are summed by a sparse product, forward and backward."""
    nodes, width = s.pick(160_000, 60), s.pick(256, 16)
    graph = nets.neighborhood(nodes, s.pick(1_500_000, 200), s.device)
    model = s.place(lambda: nets.GraphNet(width, s.pick(4, 2), s.pick(48, 4)), torch.float32)
    x, labels = torch.randn(nodes, width, device=s.device), torch.randint(0, 4, (nodes,), device=s.device)
    step = train(model, fresh.adamw(s, model), itertools.cycle([(graph, x, labels)]))
    return Program(step, lambda: precision("high"))


@healthy
def healthy_recurrence(s: Setting, fixed: bool) -> Program:
    """A language model over an LSTM of cuDNN's."""
    vocab, size = s.pick(8192, 96), s.pick((192, 512), (6, 2))
    model = s.place(lambda: nets.Recurrent(vocab, s.pick(1024, 16), 2))
    return Program(train(model, fresh.adamw(s, model), fresh.tokens(s, *size, vocab)))


@healthy
def healthy_adapters(s: Setting, fixed: bool) -> Program:
    """Low-rank adapters beside frozen weights, all in bf16; only the adapters have gradients and moments."""
    width, layers = s.pick(2048, 32), s.pick(4, 2)
    block = lambda: nets.AdaptedBlock(width, s.pick(16, 2), s.pick(8192, 48), s.pick(32, 8))
    blocks = s.place(lambda: nn.Sequential(*(block() for _ in range(layers))))
    optimizer = torch.optim.AdamW([p for p in blocks.parameters() if p.requires_grad], lr=1e-4, fused=True)
    x = torch.randn(s.pick(16, 2), s.pick(1024, 16), width, device=s.device, dtype=torch.bfloat16)

    def step() -> None:
        F.mse_loss(blocks(x), x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@healthy
def healthy_two_towers(s: Setting, fixed: bool) -> Program:
    """Pictures and their captions, told from those of all others in the batch."""
    batch, width, layers, heads = s.pick(1024, 4), s.pick(768, 32), s.pick(3, 2), s.pick(12, 2)
    seer = s.place(lambda: nets.Patches(s.pick(128, 16), s.pick(16, 4), width, layers, heads))
    reader = s.place(lambda: nets.Reader(s.pick(32768, 96), width, layers, heads, s.pick(64, 8)))
    pictures = torch.randint(0, 255, (batch, 3, s.pick(128, 16), s.pick(128, 16)), dtype=torch.uint8, device=s.device)
    ids = torch.randint(0, s.pick(32768, 96), (batch, s.pick(64, 8)), device=s.device)
    optimizer, own = fresh.adamw(s, nn.ModuleList([seer, reader])), torch.arange(batch, device=s.device)

    def step() -> None:
        seen, read = F.normalize(seer.trunk(pictures), dim=-1), F.normalize(reader.trunk(ids), dim=-1)
        likeness = 20.0 * seen @ read.T
        loss = (F.cross_entropy(likeness, own) + F.cross_entropy(likeness.T, own)) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@healthy
def healthy_painter_and_critic(s: Setting, fixed: bool) -> Program:
    """Two networks that learn from each other, each with its own optimizer, in channels_last."""
    batch, width = s.pick(768, 4), s.pick(128, 8)
    painter, critic = (
        fresh.nhwc(s.place(make)) for make in (lambda: nets.Painter(128, width), lambda: nets.Critic(width))
    )
    adam = lambda part: torch.optim.Adam(part.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True)
    to_paint, to_judge = adam(painter), adam(critic)
    real = fresh.nhwc(torch.randn(batch, 3, 64, 64, device=s.device, dtype=torch.bfloat16))

    def step() -> None:
        z = torch.randn(batch, 128, 1, 1, device=s.device, dtype=torch.bfloat16)
        painted = painter(z)
        loss = F.softplus(-critic(real)).mean() + F.softplus(critic(painted.detach())).mean()
        loss.backward()
        to_judge.step()
        critic.requires_grad_(False)
        F.softplus(-critic(painted)).mean().backward()
        to_paint.step()
        critic.requires_grad_(True)
        to_judge.zero_grad(set_to_none=True)
        to_paint.zero_grad(set_to_none=True)

    return Program(step)


@healthy
def healthy_guided_sampler(s: Setting, fixed: bool) -> Program:
    """Denoising with and without a condition in one batch, four steps from one CUDA graph."""
    model, batch = fresh.nhwc(fresh.unet(s, 192)).eval(), s.pick(12, 2)
    latent, time = fresh.noisy(s, batch, 64)
    latent, both = fresh.nhwc(latent), torch.cat((time, torch.zeros_like(time)))

    @torch.no_grad()
    def run() -> None:
        with_it, without = model(latent.repeat(2, 1, 1, 1), both).chunk(2)
        latent.sub_(0.01 * torch.lerp(without, with_it, 4.0))

    once = graphed(run) if s.cuda else run

    def step() -> None:
        for _ in range(4):
            once()

    return Program(step)


@healthy
def healthy_picture_server(s: Setting, fixed: bool) -> Program:
    """Requests uploaded beside the work, answers copied back without waiting and read a step later."""
    side, batch = s.pick(224, 16), s.pick(192, 2)
    model = s.place(lambda: nets.Patches(side, s.pick(14, 4), s.pick(1024, 32), s.pick(6, 2), s.pick(16, 2))).eval()
    host = [(s.pinned(torch.randint(0, 255, (batch, 3, side, side), dtype=torch.uint8)),) for _ in range(2)]
    feed, answers = iter(Prefetch(s, itertools.cycle(host))), s.pinned(torch.zeros(batch, dtype=torch.long))
    ready = torch.cuda.Event() if s.cuda else None
    served: list[int] = []

    @torch.inference_mode()
    def step() -> None:
        (pictures,) = next(feed)
        best = model.head(model.trunk(pictures)).argmax(-1)
        if ready is not None:
            ready.synchronize()
        served[:] = answers.tolist()
        answers.copy_(best, non_blocking=True)
        if ready is not None:
            ready.record()

    return Program(step)


@healthy
def healthy_choosing_experts(s: Setting, fixed: bool) -> Program:
    """Experts that choose their tokens: batches of equal size, nothing to ask on the host."""
    width, layers = s.pick(2048, 32), s.pick(4, 2)
    make = lambda: nets.ChoosingExperts(width, s.pick(4096, 64), s.pick(16, 4))
    blocks = s.place(lambda: nn.Sequential(*(make() for _ in range(layers))))
    x = torch.randn(s.pick(24576, 32), width, device=s.device, dtype=torch.bfloat16)
    optimizer = fresh.adamw(s, blocks)

    def step() -> None:
        F.mse_loss(blocks(x), x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@healthy
def healthy_half_precision(s: Setting, fixed: bool) -> Program:
    """fp32 weights under autocast to fp16, with a scaler that a fused optimizer asks on the device."""
    side = s.pick(224, 16)
    make = lambda: nets.Patches(side, s.pick(14, 4), s.pick(1024, 32), s.pick(3, 2), s.pick(16, 2))
    model = s.place(make, torch.float32)
    pictures = torch.randint(0, 255, (s.pick(160, 2), 3, side, side), dtype=torch.uint8, device=s.device)
    labels = torch.randint(0, 1000, (len(pictures),), device=s.device)
    optimizer, scaler = fresh.adamw(s, model), torch.amp.GradScaler(s.device, enabled=s.cuda, init_scale=256.0)

    def step() -> None:
        with torch.autocast(s.device, torch.float16 if s.cuda else torch.bfloat16):
            loss = model(pictures, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@healthy
def healthy_mixer(s: Setting, fixed: bool) -> Program:
    places, width, layers = s.pick(256, 16), s.pick(1024, 32), s.pick(4, 2)
    blocks = s.place(lambda: nn.Sequential(*(nets.MixerBlock(places, width) for _ in range(layers))))
    x = torch.randn(s.pick(160, 2), places, width, device=s.device, dtype=torch.bfloat16)
    optimizer = fresh.adamw(s, blocks)

    def step() -> None:
        F.mse_loss(blocks(x), x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@healthy
def healthy_perplexity(s: Setting, fixed: bool) -> Program:
    """Eight batches judged, their losses summed on the device, one number read at the end."""
    shape = s.shape(width=2048, layers=4, heads=16, vocab=32768)
    model, batches = cases.language(s, shape, 8, 1024)
    model, seen = model.eval(), [0.0]

    @torch.inference_mode()
    def step() -> None:
        total = torch.zeros((), device=s.device)
        for _ in range(8):
            total += model(*next(batches))
        seen[:] = [total.item() / 8]

    return Program(step)


@healthy
def healthy_waves(s: Setting, fixed: bool) -> Program:
    """Fourier transforms in place of attention."""
    width, layers = s.pick(1024, 32), s.pick(4, 2)
    blocks = s.place(lambda: nn.Sequential(*(nets.Waved(width) for _ in range(layers))))
    x = torch.randn(s.pick(32, 2), s.pick(1024, 16), width, device=s.device, dtype=torch.bfloat16)
    optimizer = fresh.adamw(s, blocks)

    def step() -> None:
        F.mse_loss(blocks(x), x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("none", "nothing", **HEALTHY | {"rounds": 1, "warmup": 16})
def healthy_streamed_text(s: Setting, fixed: bool) -> Program:
    """Texts read by workers, uploaded beside the work."""
    return _texts(s, s.pick(10, 2), beside=True)


# ---------------------------------------------------------------- causes


class Texts(IterableDataset[tuple[Tensor, Tensor]]):
    """Endless compressed texts, unpacked, split and looked up word by word."""

    def __init__(self, words: int, vocab: int) -> None:
        rng = np.random.default_rng(0)
        self.words, self.known = words, {f"w{i}": i for i in range(vocab)}
        draw = lambda: " ".join(f"w{i}" for i in rng.integers(0, vocab, 8 * words))
        self.blobs = [zlib.compress(draw().encode()) for _ in range(16)]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rng = random.Random(0)
        while True:
            text = zlib.decompress(self.blobs[rng.randrange(16)]).decode().split()
            start = rng.randrange(self.words)
            ids = [self.known.get(word.lower().strip(".,"), 0) for word in text[start : start + self.words]]
            yield torch.tensor(ids), torch.tensor(rng.randrange(16))


def _texts(s: Setting, workers: int, beside: bool = False) -> Program:
    words, vocab = s.pick(512, 16), s.pick(30720, 90)
    model = s.place(lambda: nets.Reader(vocab, s.pick(1024, 32), s.pick(4, 2), s.pick(16, 2), words))
    loader = DataLoader(
        Texts(words, vocab), s.pick(48, 2), num_workers=workers, pin_memory=s.cuda, persistent_workers=workers > 0,
        prefetch_factor=4 if workers else None,
    )  # fmt: skip
    feed = iter(loader)
    sent = (tuple(part.to(s.device, non_blocking=True) for part in batch) for batch in feed)
    batches = iter(Prefetch(s, feed)) if beside else sent
    return Program(train(model, fresh.adamw(s, model), batches), close=lambda: end_workers(feed))


@case("data loader", "num_workers=0 → 10", rounds=1, warmup=12, steps=16, planted_steps=10, stack=False)
def texts_read_in_the_loop(s: Setting, fixed: bool) -> Program:
    return _texts(s, s.pick(10, 2) if fixed else 0)


class Series(Dataset[Tensor]):
    """Batches of measured series, as large tensors."""

    def __init__(self, size: tuple[int, ...]) -> None:
        self.kept = torch.randn(2, *size)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, i: int) -> Tensor:
        return self.kept[i % 2].clone()


@case("pageable copy", "DataLoader(..., pin_memory=True)", rounds=1, warmup=12, steps=16, stack=False)
def batches_never_pinned(s: Setting, fixed: bool) -> Program:
    """Copied with non_blocking=True, which does nothing for memory that is not pinned."""
    size, width = s.pick((64, 512, 64), (2, 16, 8)), s.pick(1024, 32)
    enter = s.place(lambda: nn.Linear(size[-1], width))
    layers = s.place(lambda: nn.Sequential(*(nets.layer(width, s.pick(16, 2)) for _ in range(s.pick(3, 2)))))
    optimizer = fresh.adamw(s, nn.ModuleList([enter, layers]))
    loader = DataLoader(
        Series(size), None, num_workers=s.pick(3, 2), pin_memory=fixed and s.cuda, persistent_workers=True
    )
    feed = iter(loader)

    def step() -> None:
        x = enter(next(feed).to(s.device, non_blocking=True).to(torch.bfloat16))
        F.mse_loss(layers(x), x.detach()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step, close=lambda: end_workers(feed))


@case("host-bound", "flip, brighten and shift all pictures at once", stack=False)
def pictures_changed_one_by_one(s: Setting, fixed: bool) -> Program:
    side, batch = s.pick(224, 16), s.pick(160, 4)
    model = s.place(lambda: nets.Patches(side, s.pick(14, 4), s.pick(768, 32), s.pick(4, 2), s.pick(12, 2)))
    pictures = torch.randint(0, 255, (batch, 3, side, side), dtype=torch.uint8, device=s.device).to(torch.bfloat16)
    labels, optimizer = torch.randint(0, 1000, (batch,), device=s.device), fresh.adamw(s, model)

    def one(picture: Tensor) -> Tensor:
        picture = picture.flip(-1) if random.random() < 0.5 else picture
        picture = picture * random.uniform(0.8, 1.2)
        return (picture + random.uniform(-8.0, 8.0)).clamp(0.0, 255.0)

    def together() -> Tensor:
        flipped = torch.rand(batch, 1, 1, 1, device=s.device) < 0.5
        bright = torch.rand(2, batch, 1, 1, 1, device=s.device, dtype=torch.bfloat16)
        changed = torch.where(flipped, pictures.flip(-1), pictures)
        return torch.addcmul(bright[0] * 16 - 8, changed, bright[1] * 0.4 + 0.8).clamp_(0.0, 255.0)

    def step() -> None:
        changed = together() if fixed else torch.stack([one(picture) for picture in pictures])
        model(changed, labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("synchronization", "add losses and norms up on the device and read them every 100 steps", stack=False)
def losses_summed_on_host(s: Setting, fixed: bool) -> Program:
    """A trainer's loop: four accumulated batches, clipped, scheduled, and a running mean in Python."""
    vocab, size = s.pick(30720, 90), s.pick((16, 512), (2, 16))
    model = s.place(lambda: nets.Reader(vocab, s.pick(1024, 32), s.pick(4, 2), s.pick(16, 2), size[1]))
    ids = [torch.randint(0, vocab, size, device=s.device) for _ in range(4)]
    labels, optimizer = torch.randint(0, 16, size[:1], device=s.device), fresh.adamw(s, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 100))
    kept = torch.zeros((), device=s.device)
    total = [0.0, 0.0]

    def step() -> None:
        for part in ids:
            loss = model(part, labels) / len(ids)
            loss.backward()
            if fixed:
                kept.add_(loss.detach())
            else:
                total[0] += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        total[1] = 0.0 if fixed else float(norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("synchronization", "look the masked nodes up once, before the loop", stack=False)
def nodes_masked_in_each_layer(s: Setting, fixed: bool) -> Program:
    """Every layer is probed on some of the nodes, chosen by a mask: how many they are is asked on the host."""
    nodes, width, layers = s.pick(100_000, 60), s.pick(128, 16), s.pick(10, 2)
    graph = nets.neighborhood(nodes, s.pick(400_000, 200), s.device)
    model = s.place(lambda: nets.GraphNet(width, layers, s.pick(48, 4)), torch.float32).eval()
    x, labels = torch.randn(nodes, width, device=s.device), torch.randint(0, 4, (nodes,), device=s.device)
    mask = torch.rand(nodes, device=s.device) < 0.3
    rows, right = mask.nonzero().flatten(), torch.zeros(layers, device=s.device)

    @torch.no_grad()
    def step() -> None:
        y = x
        for i, (product, norm) in enumerate(zip(model.layers, model.norms, strict=True)):
            y = y + F.relu(torch.sparse.mm(graph, product(norm(y))))
            probed, truth = (
                (y.index_select(0, rows), labels.index_select(0, rows)) if fixed else (y[mask], labels[mask])
            )
            right[i] = (model.head(probed).argmax(-1) == truth).float().mean()

    return Program(step, lambda: precision("high"))


@case("fp32 matmul", 'torch.set_float32_matmul_precision("high")', stack=False)
def stock_layers_in_fp32(s: Setting, fixed: bool) -> Program:
    vocab, size = s.pick(30720, 90), s.pick((24, 512), (2, 16))
    make = lambda: nets.Reader(vocab, s.pick(1024, 32), s.pick(4, 2), s.pick(16, 2), size[1])
    model = s.place(make, torch.float32)
    ids, labels = torch.randint(0, vocab, size, device=s.device), torch.randint(0, 16, size[:1], device=s.device)
    step = train(model, fresh.adamw(s, model), itertools.cycle([(ids, labels)]))
    return Program(step, lambda: precision("high" if fixed else "highest"))


@case("NCHW convolution", "model and pictures in channels_last", stack=False)
def upscaler_channels_first(s: Setting, fixed: bool) -> Program:
    model = s.place(lambda: nets.Upscaler(s.pick(128, 8), s.pick(8, 2)))
    size = s.pick((24, 3, 96, 96), (2, 3, 8, 8))
    small, large = (
        torch.randn(*size[:2], t * size[2], t * size[3], device=s.device, dtype=torch.bfloat16) for t in (1, 2)
    )
    if fixed:
        model, small, large = fresh.nhwc(model, small, large)
    return Program(train(model, fresh.adamw(s, model), itertools.cycle([(small, large)])))


@case("unfused optimizer", "the optimizer's updates over lists of weights (torch._foreach_…)", stack=False)
def lion_one_by_one(s: Setting, fixed: bool) -> Program:
    vocab, size = s.pick(30720, 90), s.pick((20, 512), (2, 16))
    model = s.place(lambda: nets.Reader(vocab, s.pick(1024, 32), s.pick(8, 2), s.pick(16, 2), size[1]))
    ids, labels = torch.randint(0, vocab, size, device=s.device), torch.randint(0, 16, size[:1], device=s.device)
    return Program(train(model, nets.Lion(model.parameters(), 1e-5, fixed), itertools.cycle([(ids, labels)])))


@case("small batch", "one batch of 48 requests instead of 48 batches of one", stack=False, rounds=1, steps=6, warmup=2)
def requests_one_by_one(s: Setting, fixed: bool) -> Program:
    vocab, length = s.pick(30720, 90), s.pick(128, 16)
    model = s.place(lambda: nets.Reader(vocab, s.pick(768, 32), s.pick(10, 2), s.pick(12, 2), length)).eval()
    ids = torch.randint(0, vocab, (s.pick(48, 3), length), device=s.device)

    @torch.inference_mode()
    def step() -> None:
        for request in (ids,) if fixed else ids.split(1):
            model.trunk(request)

    return Program(step)


@case("unfused attention", "F.scaled_dot_product_attention", stack=False)
def latents_attend_by_einsum(s: Setting, fixed: bool) -> Program:
    width, heads, batch = s.pick(1024, 32), s.pick(16, 2), s.pick(16, 2)
    parts = s.place(lambda: nn.ModuleList(nets.Perceiver(width, heads, fixed) for _ in range(s.pick(4, 2))))
    z = torch.randn(batch, s.pick(512, 4), width, device=s.device, dtype=torch.bfloat16)
    x = torch.randn(batch, s.pick(2048, 16), width, device=s.device, dtype=torch.bfloat16)
    optimizer = fresh.adamw(s, parts)

    def step() -> None:
        y = z
        for part in parts:
            y = part(y, x)
        F.mse_loss(y, z).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("fp32 logits", "leave the logits in bf16 for the smoothed loss", stack=False)
def smoothed_in_fp32(s: Setting, fixed: bool) -> Program:
    """A translator: PyTorch's own encoder and decoder layers, a loss with smoothed labels."""
    vocab, width, heads, size = s.pick(48000, 96), s.pick(1024, 32), s.pick(16, 2), s.pick((32, 256), (2, 8))
    how: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
    model = s.place(lambda: nn.Transformer(width, heads, 3, 3, 4 * width, **how))
    tokens, head = s.place(lambda: nn.Embedding(vocab, width)), s.place(lambda: nn.Linear(width, vocab, bias=False))
    optimizer = fresh.adamw(s, nn.ModuleList([model, head]))
    later = nn.Transformer.generate_square_subsequent_mask(size[1], device=s.device, dtype=torch.bfloat16)
    feed = fresh.tokens(s, *size, vocab)

    def step() -> None:
        source, target = next(feed)
        there, here = tokens(source).detach(), tokens(target).detach()
        logits = head(model(there, here, tgt_mask=later, tgt_is_causal=True)).flatten(0, 1)
        loss = F.cross_entropy(logits if fixed else logits.float(), target.flatten(), label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("needless recompute", "drop checkpoint_sequential: the activations fit", stack=False)
def mixer_in_segments(s: Setting, fixed: bool) -> Program:
    places, width, layers = s.pick(256, 16), s.pick(1024, 32), s.pick(6, 2)
    blocks = s.place(lambda: nn.Sequential(*(nets.MixerBlock(places, width) for _ in range(layers))))
    x = torch.randn(s.pick(96, 2), places, width, device=s.device, dtype=torch.bfloat16)
    optimizer = fresh.adamw(s, blocks)

    def step() -> None:
        y = blocks(x) if fixed else checkpoint_sequential(blocks, 2, x, use_reentrant=False)
        F.mse_loss(y, x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("round trip through the host", "count on the device", stack=False)
def confusion_counted_on_host(s: Setting, fixed: bool) -> Program:
    """A segmenter judged: its classes are copied to the host and counted by NumPy."""
    model = fresh.nhwc(s.place(lambda: nets.Labeler(s.pick(128, 8), s.pick(5, 2), 21))).eval()
    side, batch = s.pick(256, 16), s.pick(16, 2)
    pictures = fresh.nhwc(torch.randn(batch, 3, side, side, device=s.device, dtype=torch.bfloat16))
    truth = torch.randint(0, 21, (batch, side, side), device=s.device)
    there, counts = truth.cpu().numpy(), np.zeros(441, np.int64)
    kept = torch.zeros(441, device=s.device)

    @torch.no_grad()
    def step() -> None:
        found = model(pictures).argmax(1)
        if fixed:
            kept.add_(torch.histc((truth * 21 + found).float(), 441, 0, 441))
        else:
            np.add(counts, np.bincount((there * 21 + found.cpu().numpy()).ravel(), minlength=441), out=counts)

    return Program(step)


@case("weights cast every step", "keep the frozen weights in bf16 instead of casting under autocast", stack=False)
def adapters_under_autocast(s: Setting, fixed: bool) -> Program:
    width, layers, dtype = s.pick(2560, 32), s.pick(4, 2), torch.bfloat16 if fixed else torch.float32
    block = lambda: nets.AdaptedBlock(width, s.pick(20, 2), s.pick(10240, 48), s.pick(32, 8))
    blocks = s.place(lambda: nn.Sequential(*(block() for _ in range(layers))), dtype)
    optimizer = torch.optim.AdamW([p for p in blocks.parameters() if p.requires_grad], lr=1e-4, fused=True)
    x = torch.randn(s.pick(6, 2), s.pick(1024, 16), width, device=s.device, dtype=torch.bfloat16)

    def step() -> None:
        with nullcontext() if fixed else torch.autocast(s.device, torch.bfloat16):
            y = blocks(x)
        F.mse_loss(y, x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("dense embedding gradient", "nn.Embedding(..., sparse=True)", stack=False)
def skipgrams_dense(s: Setting, fixed: bool) -> Program:
    """Words and their neighbors, told from five that were drawn."""
    words, width, batch = s.pick(1_000_000, 200), s.pick(256, 16), s.pick(32768, 8)
    tables = s.place(lambda: nn.ModuleList(nn.Embedding(words, width, sparse=fixed) for _ in range(2)), torch.float32)
    optimizer = torch.optim.SGD(tables.parameters(), lr=0.025)
    middle = torch.randint(0, words, (batch,), device=s.device)
    around = torch.randint(0, words, (batch, 6), device=s.device)
    truth = torch.zeros(batch, 6, device=s.device)
    truth[:, 0] = 1.0

    def step() -> None:
        likeness = torch.bmm(tables[1](around), tables[0](middle)[:, :, None])[:, :, 0]
        F.binary_cross_entropy_with_logits(likeness, truth).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("misaligned sizes", "pad the features from 1433 to 1440", stack=False)
def features_of_1433(s: Setting, fixed: bool) -> Program:
    nodes, features = s.pick(131_072, 32), s.pick(1440 if fixed else 1433, 24)
    model = s.place(lambda: nets.Hops(features, s.pick(1024, 16), 3, s.pick(64, 8)))
    hops = tuple(torch.randn(nodes, features, device=s.device, dtype=torch.bfloat16) for _ in range(3))
    labels = torch.randint(0, 8, (nodes,), device=s.device)
    return Program(train(model, fresh.adamw(s, model), itertools.cycle([(hops, labels)])))


@case("unfused pointwise chain", "F.mish", stack=False)
def mish_in_steps(s: Setting, fixed: bool) -> Program:
    model = fresh.nhwc(s.place(lambda: nets.Dark(s.pick((64, 128, 256, 512), (8, 16)), not fixed)))
    pictures, labels = fresh.images(s, 128, 224)
    return Program(train(model, fresh.sgd(s, model), itertools.cycle([(fresh.nhwc(pictures), labels)])))
