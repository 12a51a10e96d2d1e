"""A twenty-second suite: 26 scripts with one cause each, written as different people write them, and ten programs that
are well.

A cause counts where its fix brings 5 % of the planted step and three times what both programs vary by (half of the two
quartile ranges of their step times, added) at least; both are judged from step times alone, before any rule is asked.
``EXPECTED`` says beforehand by which name a cause should be told, in the words that earlier suites used; the names
after the first count as well, since their advice is the same change. ``MISTAKEN`` says what a healthy program could be
taken for. A finding over 2 % in a fixed or healthy program is false unless its advice, done and timed, brings more than
noise.
"""

from __future__ import annotations

import functools
import gc
import itertools
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import fresh
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import twentysecondnets as nets
from cases import Prefetch, Program, Setting, case, compiler, end_workers, graphed, precision
from eighteenth import LINES, ONE
from nineteenth import _asked, _filled
from ninth import _bf16, _ints
from tenth import TRIED
from torch import Tensor
from torch.utils.data import DataLoader

EXPECTED: dict[str, tuple[str, ...]] = {
    "lines_of_text_by_one_worker": ("data-loader",),
    "radar_unpacked_under_taskset": ("cpu-affinity",),
    "log_mels_before_the_copy": ("host-code", "data-loader"),
    "points_of_a_lidar_in_double": ("pageable-copies",),
    "chunks_sent_when_needed": ("exposed-copies", "pageable-copies", "synchronize"),
    "phones_repeated_by_utterance": ("value-read", "synchronize"),
    "sampler_compares_its_timestep": ("value-read", "synchronize"),
    "activations_told_to_a_logger": ("logging", "value-read"),
    "paths_summed_word_by_word": ("launch-bound",),
    "adam_leaf_by_leaf": ("unfused-optimizer",),
    "episodes_one_at_a_time": ("micro-batches", "small-batch"),
    "phases_that_free_memory": ("allocator",),
    "callback_that_collects": ("garbage-collection",),
    "mixer_of_series_in_fp32": ("tensor-cores-unused",),
    "wide_residuals_channels_first": ("channels-first",),
    "heads_in_a_list": ("unfused-attention",),
    "spectra_of_2049_bins": ("misaligned-sizes",),
    "smoothing_laid_out": ("logits",),
    "facts_of_many_things_dense": ("dense-embedding-gradient",),
    "slopes_zeroed_by_hand": ("zero-grad",),
    "blocks_wrapped_to_recompute": ("recompute",),
    "items_through_convolutions_of_one": ("layout-copies", "channels-first"),
    "backbone_learns_for_nothing": ("needless-gradients", "redundant-pass"),
    "reviews_filled_to_the_limit": ("padding",),
    "lattice_in_steps": ("pointwise-chains",),
    "norm_left_out_of_compilation": ("graph-breaks",),
}
MISTAKEN: dict[str, str] = {
    "healthy_scores_streamed_in": "exposed or pageable copies",
    "healthy_book_read_at_once": "a small batch, unfused attention",
    "healthy_broad_words": "launches one by one, a small batch",
    "healthy_deep_filters": "convolutions in channels_first, a small batch",
    "healthy_bags_looked_up": "an indexed table, many small pieces",
    "healthy_filter_in_double": "fp32 products without tensor cores",
    "healthy_bytes_from_workers": "a data loader that is waited for",
    "healthy_loss_read_each_step": "a value read in every step",
    "healthy_pairs_in_one_square": "logits laid out for the loss",
    "healthy_broad_layer": "an unfused optimizer, padding",
}
LOADED: dict[str, Any] = ONE | {"warmup": 8, "steps": 14, "planted_steps": 10}
"""Workers need some steps until what they made ahead is used up."""
healthy = case("none", "nothing", **LINES)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


# ---------------------------------------------------------------- input


@case("data loader", "num_workers=1 → 10", **LOADED)
def lines_of_text_by_one_worker(s: Setting, fixed: bool) -> Program:
    """A reader of printed lines, which are drawn letter by letter by one worker."""
    width, batch = s.pick(1024, 64), s.pick(48, 2)
    model = s.place(lambda: nets.LineReader(s.pick(1024, 32), s.pick(16, 2), s.pick(8, 1)))
    workers = s.pick(10 if fixed else 1, 1)
    loader = DataLoader(
        nets.TextLines(width), batch, num_workers=workers, pin_memory=s.cuda, persistent_workers=True, drop_last=True
    )
    batches: Any = iter(loader)
    trainer = nets.Trainer(model, _adamw(model), nn.CrossEntropyLoss())

    def step() -> None:
        lines, letters = next(batches)
        lines = lines.to(s.device, non_blocking=True).to(torch.bfloat16).div_(255)
        trainer.training_step(lines, letters.to(s.device, non_blocking=True).flatten())

    return Program(step, close=lambda: end_workers(batches))


@case("cpu affinity", "let the process use every core", **ONE)
def radar_unpacked_under_taskset(s: Setting, fixed: bool) -> Program:
    """Rain foretold; eight threads unpack each batch, in a process that was started on one core."""
    side, batch = s.pick(128, 32), s.pick(24, 2)
    scope = nullcontext if fixed else functools.partial(fresh._cores, 1)
    with scope():
        pool = ThreadPoolExecutor(8)
        radar = nets.Radar(pool, side, batch)
        radar.load()
    model = s.place(lambda: nets.SensorNet(side, 1, s.pick(2048, 16), s.pick(16, 2), s.pick(4, 1)))
    soon, optimizer = _ints(s, 6, batch), _adamw(model)

    def step() -> None:
        now = radar.load().to(s.device).to(torch.bfloat16) / 64
        optimizer.zero_grad()
        F.cross_entropy(model(now), soon).backward()
        optimizer.step()

    return Program(step, scope, close=pool.shutdown)


@case("host preprocessing", "features on the device, out of the waves", **TRIED | {"steps": 7})
def log_mels_before_the_copy(s: Setting, fixed: bool) -> Program:
    """Words that are called out, recognized; the loop makes spectrograms before it moves anything."""
    batch, samples = s.pick(64, 2), s.pick(16_000, 400)
    waves = itertools.cycle([s.pinned(torch.randn(batch, samples)) for _ in range(3)])
    frontend = nets.LogMel(s.pick(400, 64), s.pick(160, 32), s.pick(80, 8)).to(s.device if fixed else "cpu")
    model = s.place(lambda: nets.SensorNet(s.pick(80, 8), 1, s.pick(768, 16), s.pick(12, 2), s.pick(4, 1)))
    labels, opt = _ints(s, 6, batch), _adamw(model)

    def train_one_batch() -> None:
        wave = next(waves)
        if fixed:
            mel = frontend(wave.to(s.device, non_blocking=True))
        else:
            mel = frontend(wave).to(s.device)
        loss = F.cross_entropy(model(mel.bfloat16()), labels)
        opt.zero_grad()
        loss.backward()
        opt.step()

    return Program(train_one_batch)


# ---------------------------------------------------------------- copies


@case("pageable copy", "pin the scans, and copy the next one ahead with non_blocking=True", **TRIED)
def points_of_a_lidar_in_double(s: Setting, fixed: bool) -> Program:
    """Things told apart by points that lie in arrays of doubles, as a reader of files left them."""
    batch, num, columns = s.pick(32, 2), s.pick(16_384, 8), 8
    rng = np.random.default_rng(1)
    scans = [rng.standard_normal((batch, num, columns)) for _ in range(3)]
    net = s.place(lambda: nets.PointNet(columns, s.pick((64, 128, 1024), (8, 16)), 40))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=s.cuda)
    labels, criterion = _ints(s, 40, batch), nn.CrossEntropyLoss()
    pinned: Iterator[Any] = itertools.cycle([(s.pinned(torch.from_numpy(scan)),) for scan in scans])
    ahead = iter(Prefetch(s, pinned)) if fixed else None
    order = itertools.cycle(scans)

    def step() -> None:
        points = next(ahead)[0] if ahead is not None else torch.from_numpy(next(order)).to(s.device)
        optimizer.zero_grad()
        criterion(net(points.to(torch.bfloat16)), labels).backward()
        optimizer.step()

    return Program(step)


@case("blocking copy", "non_blocking=True, on a stream of its own, a chunk ahead", **TRIED)
def chunks_sent_when_needed(s: Setting, fixed: bool) -> Program:
    """Many films watched at once, ten chunks a step; each is moved out of pinned memory when its turn comes."""
    films, places, pixels, dim = s.pick(64, 2), s.pick(196, 4), s.pick(768, 12), s.pick(512, 16)
    chunks = [s.pinned(torch.randint(0, 256, (films, places, pixels), dtype=torch.uint8)) for _ in range(s.pick(10, 2))]
    model = s.place(lambda: nets.ChunkNet(pixels, dim, s.pick(8, 2), s.pick(2, 1))).eval()
    stream = torch.cuda.Stream() if fixed and s.cuda else None

    def sent() -> Iterator[Tensor]:
        for chunk in chunks:
            yield chunk.to(s.device)

    def sent_ahead() -> Iterator[Tensor]:
        here = torch.cuda.current_stream()
        following = None
        for chunk in [*chunks, None]:
            ready = following
            if ready is not None:
                here.wait_stream(stream)
                ready.record_stream(here)
            if chunk is not None:
                with torch.cuda.stream(stream):
                    following = chunk.to(s.device, non_blocking=True)
            if ready is not None:
                yield ready

    def watch() -> Tensor:
        state = torch.zeros(films, 1, dim, device=s.device, dtype=torch.bfloat16)
        for chunk in sent_ahead() if stream is not None else sent():
            state = model(chunk, state)
        return state

    return _asked(watch)


# ---------------------------------------------------------------- who waits for whom


@case("synchronization", "frames of all phones by searchsorted and one lookup", **TRIED)
def phones_repeated_by_utterance(s: Setting, fixed: bool) -> Program:
    """Speech out of phones: what each becomes is repeated as long as it is spoken, an utterance at a time."""
    batch, phones, dim = s.pick(48, 2), s.pick(96, 4), s.pick(512, 16)
    durations = torch.randint(4, 12, (batch, phones))
    frames = int(durations.sum(1).max())
    durations = durations.to(s.device)
    model = s.place(lambda: nets.Speaker(80, dim, s.pick(8, 2), s.pick(3, 1), 80, vectorized=fixed))
    ids, mels, optimizer = _ints(s, 80, batch, phones), _bf16(s, batch, frames, 80), _adamw(model)

    def step() -> None:
        optimizer.zero_grad()
        F.l1_loss(model(ids, durations, frames), mels).backward()
        optimizer.step()

    return Program(step)


@case("synchronization", "timesteps as Python numbers", **TRIED)
def sampler_compares_its_timestep(s: Setting, fixed: bool) -> Program:
    """Plans drawn by a small diffusion model out of a graph; the loop goes through timesteps that are on the device."""
    plans, size, total = s.pick(4096, 2), s.pick(512, 8), s.pick(32, 3)
    model = s.place(lambda: nets.Planner(size, s.pick(2048, 16), s.pick(5, 1))).eval()
    x_in, t_in = _bf16(s, plans, size), torch.zeros(1, dtype=torch.long, device=s.device)
    eps = torch.zeros_like(x_in)
    betas = torch.linspace(1e-4, 0.02, total, device=s.device)
    alphas, alphas_bar = 1 - betas, (1 - betas).cumprod(0)

    @torch.no_grad()
    def predict() -> None:
        eps.copy_(model(x_in, t_in))

    run = graphed(predict) if s.cuda else predict
    timesteps = range(total - 1, -1, -1) if fixed else torch.arange(total - 1, -1, -1, device=s.device)

    @torch.no_grad()
    def sample() -> Tensor:
        x = torch.randn_like(x_in)
        for t in timesteps:
            x_in.copy_(x)
            t_in.fill_(t)
            run()
            x = (x - betas[t] / (1 - alphas_bar[t]).sqrt() * eps) / alphas[t].sqrt()
            x = x.to(x_in.dtype)
            if t > 0:
                x = x + (betas[t].sqrt() * torch.randn_like(x)).to(x.dtype)
        return x

    return Program(sample)


@case("synchronous logging", "log every fiftieth step", **TRIED | {"steps": 7})
def activations_told_to_a_logger(s: Setting, fixed: bool) -> Program:
    """A deep network for tables, whose blocks are watched by hooks that write to a log."""
    dim, rows = s.pick(1024, 8), s.pick(16_384, 4)
    model = s.place(lambda: nn.Sequential(*(nets.ResidualMlp(dim) for _ in range(s.pick(24, 2)))))
    file = tempfile.TemporaryFile("w")  # noqa: SIM115 (open while the program runs)
    monitor = nets.ActivationMonitor(model, nets.ResidualMlp, file, every=50 if fixed else 1)
    x, optimizer = _bf16(s, rows, dim), _adamw(model)

    def step() -> None:
        monitor.step += 1
        loss = F.smooth_l1_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return Program(step, close=file.close)


# ---------------------------------------------------------------- the host's own time


@case("host-bound", "the whole step out of a CUDA graph", **TRIED | {"steps": 7})
def paths_summed_word_by_word(s: Setting, fixed: bool) -> Program:
    """Names found in sentences: a tagger whose loss goes through the words one by one."""
    batch, words, tags = s.pick(256, 2), s.pick(48, 4), s.pick(24, 3)
    model = s.place(lambda: nets.Tagger(s.pick(20_000, 32), s.pick(512, 8), tags))
    ids, gold = _ints(s, s.pick(20_000, 32), batch, words), _ints(s, tags, batch, words)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=s.cuda)

    def train_step() -> None:
        model(ids, gold).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(graphed(train_step) if fixed and s.cuda else train_step)


@case("unfused optimizer", "torch.optim.AdamW(fused=True)", **TRIED | {"steps": 7})
def adam_leaf_by_leaf(s: Setting, fixed: bool) -> Program:
    """A language model trained in functional style: weights go in, new weights come out."""
    vocab, batch, length = s.pick(8192, 64), s.pick(32, 2), s.pick(512, 4)
    model = s.place(lambda: nets.Gpt(vocab, s.pick(768, 16), s.pick(12, 2), s.pick(8, 1)))
    ids = _ints(s, vocab, batch, length + 1)
    kept: dict[str, Any] = {"params": {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}}
    kept["state"] = nets.adam_init(kept["params"])
    optimizer = torch.optim.AdamW(kept["params"].values(), lr=1e-4, fused=True) if fixed else None

    def loss_fn(params: dict[str, Tensor]) -> Tensor:
        logits = torch.func.functional_call(model, params, (ids[:, :-1],))
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def step() -> None:
        params = kept["params"]
        grads = dict(zip(params, torch.autograd.grad(loss_fn(params), list(params.values()))))
        if optimizer is None:
            kept["params"], kept["state"] = nets.adam_update(params, grads, kept["state"])
            return
        for name, p in params.items():
            p.grad = grads[name]
        optimizer.step()
        optimizer.zero_grad()

    return Program(step)


@case("small batch", "all episodes in one pass", **TRIED | {"steps": 7})
def episodes_one_at_a_time(s: Setting, fixed: bool) -> Program:
    """A policy learns from twenty episodes, and takes the slopes of each by itself."""
    seen, hidden, acts = s.pick(128, 8), s.pick(4096, 16), 8
    policy = s.place(lambda: nets.ActorCritic(seen, hidden, acts))
    lengths = np.random.default_rng(0).integers(s.pick(200, 2), s.pick(500, 6), s.pick(20, 3)).tolist()
    episodes = [(_bf16(s, n, seen), _ints(s, acts, n), _bf16(s, n)) for n in lengths]
    joined = tuple(torch.cat(parts) for parts in zip(*episodes))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-5, fused=True)

    def reinforce(obs: Tensor, actions: Tensor, returns: Tensor) -> Tensor:
        logits, value = policy(obs)
        advantage = returns - value.detach()
        logp = -F.cross_entropy(logits, actions, reduction="none")
        return (-(logp * advantage).sum() + 0.5 * F.mse_loss(value, returns, reduction="sum")) / sum(lengths)

    def step() -> None:
        optimizer.zero_grad()
        for episode in [joined] if fixed else episodes:
            reinforce(*episode).backward()
        optimizer.step()

    return Program(step)


@case("allocator", "no empty_cache after each phase", **ONE)
def phases_that_free_memory(s: Setting, fixed: bool) -> Program:
    """Pictures painted and judged; a context gives memory back after each of the three phases of a step."""
    latent, batch = s.pick(128, 8), s.pick(512, 2)
    g = s.place(lambda: nets.generator(latent, s.pick((512, 256, 128), (16, 8)))).to(memory_format=torch.channels_last)
    d = s.place(lambda: nets.discriminator(s.pick((128, 256, 512), (8, 16)))).to(memory_format=torch.channels_last)
    opt_g, opt_d = (torch.optim.Adam(net.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True) for net in (g, d))
    side = s.pick(64, 16)
    real = _bf16(s, batch, 8, side, side).to(memory_format=torch.channels_last)
    freeing = functools.partial(nets.freeing_memory, s.cuda and not fixed)

    def step() -> None:
        z = _bf16(s, batch, latent, 1, 1)
        with freeing():
            F.softplus(-d(real)).mean().backward()
        with freeing():
            F.softplus(d(g(z).detach())).mean().backward()
            opt_d.step()
            opt_d.zero_grad()
        with freeing():
            F.softplus(-d(g(z))).mean().backward()
            opt_g.step()
            opt_g.zero_grad()
            opt_d.zero_grad()

    return Program(step)


@case("garbage collection", "no gc.collect() in a callback", **ONE | {"steps": 10})
def callback_that_collects(s: Setting, fixed: bool) -> Program:
    """Pictures told apart while the index of all annotations lies in memory; a callback looks through it each step."""
    index, side, batch = nets.annotations(s.pick(45_000, 10)), s.pick(224, 32), s.pick(96, 2)
    dim = s.pick(768, 16)
    model = s.place(lambda: nn.Sequential(nets.PatchNet(16, dim, s.pick(12, 2), s.pick(4, 1)), nn.Linear(dim, 80)))
    trainer = nets.Trainer(model, _adamw(model), nn.CrossEntropyLoss())
    if not fixed:
        trainer.callbacks.append(lambda trainer: gc.collect())
    images, labels = _bf16(s, batch, 3, side, side), _ints(s, 80, batch)

    def step(held: Any = index) -> None:
        trainer.training_step(images, labels)

    return Program(step)


# ---------------------------------------------------------------- kernels


@case("fp32 matmul", 'torch.set_float32_matmul_precision("high")', **TRIED)
def mixer_of_series_in_fp32(s: Setting, fixed: bool) -> Program:
    """Many series foretold together, mixed along time and across each other, in the precision they were made in."""
    time, variables, hidden, batch = s.pick((512, 512, 2048, 48), (8, 8, 16, 2))
    with torch.device(s.device):
        net = nn.Sequential(*(nets.MixerBlock(time, variables, hidden) for _ in range(s.pick(3, 1))))
    history, future = (torch.randn(batch, time, variables, device=s.device) for _ in "ab")
    optimizer = _adamw(net)

    def step() -> None:
        optimizer.zero_grad()
        F.mse_loss(net(history), future).backward()
        optimizer.step()

    return Program(step, functools.partial(precision, "high" if fixed else "highest"))


@case("NCHW convolution", "model and pictures in channels_last", **TRIED)
def wide_residuals_channels_first(s: Setting, fixed: bool) -> Program:
    """Small pictures told apart by a wide residual network."""
    net = s.place(lambda: nets.wide_resnet(s.pick((128, 256, 512), (8, 16)), s.pick(2, 1), 100))
    images, labels = _bf16(s, s.pick(384, 2), 3, 32, 32), _ints(s, 100, s.pick(384, 2))
    if fixed:
        net, images = net.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=s.cuda)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()

    return Program(step)


@case("unfused attention", "F.scaled_dot_product_attention(is_causal=True) in each head", **TRIED)
def heads_in_a_list(s: Setting, fixed: bool) -> Program:
    """The next character, by heads that are modules of their own, as in a lecture."""
    vocab, block, batch = s.pick(256, 16), s.pick(1024, 8), s.pick(32, 2)
    model = s.place(lambda: nets.CharModel(vocab, s.pick(512, 16), s.pick(4, 2), s.pick(3, 1), block, fused=fixed))
    xb, yb, optimizer = _ints(s, vocab, batch, block), _ints(s, vocab, batch, block), _adamw(model)

    def step() -> None:
        loss = model(xb, yb)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return Program(step)


@case("misaligned sizes", "the lowest 2048 bins: the last one is silent", **TRIED)
def spectra_of_2049_bins(s: Setting, fixed: bool) -> Program:
    """A singer taken out of a song, bin by bin of a spectrum that has one more than a power of two."""
    bins, frames, hidden = s.pick(2048 if fixed else 2049, 16 if fixed else 17), s.pick(49_152, 8), s.pick(1024, 16)
    net = s.place(lambda: nets.Unmix(bins, hidden))
    mix, voice = _bf16(s, frames, bins).abs_(), _bf16(s, frames, bins).abs_()
    optimizer = _adamw(net)

    def step() -> None:
        optimizer.zero_grad()
        F.mse_loss(net(mix), voice).backward()
        optimizer.step()

    return Program(step)


@case("logits laid out for the loss", "F.cross_entropy(label_smoothing=0.1)", **TRIED)
def smoothing_laid_out(s: Setting, fixed: bool) -> Program:
    """A language model whose smoothed targets are laid out in full, and compared by divergence."""
    vocab, batch, length = s.pick(32_000, 64), s.pick(16, 2), s.pick(512, 4)
    model = s.place(lambda: nets.Gpt(vocab, s.pick(512, 16), s.pick(8, 2), s.pick(4, 1)))
    ids, optimizer, criterion = _ints(s, vocab, batch, length + 1), _adamw(model), nets.LabelSmoothing(vocab, 0.1)

    def compute_loss() -> Tensor:
        out, y = model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
        if fixed:
            return F.cross_entropy(out, y, label_smoothing=0.1)
        return criterion(F.log_softmax(out, dim=-1), y) / y.numel()

    def step() -> None:
        compute_loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


# ---------------------------------------------------------------- memory


@case("dense embedding gradient", "nn.Embedding(sparse=True) with SparseAdam", **ONE)
def facts_of_many_things_dense(s: Setting, fixed: bool) -> Program:
    """Who did what to whom, out of eight million things, of which a step sees some."""
    entities, relations, num = s.pick(8_000_000, 64), s.pick(1000, 4), s.pick(32_768, 4)
    with torch.device(s.device):
        model = nets.TransE(entities, relations, s.pick(128, 8), sparse=fixed)
    if fixed:
        optimizer: torch.optim.Optimizer = torch.optim.SparseAdam(model.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    h, t, corrupted = (_ints(s, entities, num) for _ in range(3))
    r = _ints(s, relations, num)

    def step() -> None:
        optimizer.zero_grad()
        model(h, r, t, corrupted).backward()
        optimizer.step()

    return Program(step)


@case("gradient memsets", "p.grad = None", **TRIED)
def slopes_zeroed_by_hand(s: Setting, fixed: bool) -> Program:
    """A broad network for fingerprints of molecules, in a script that is older than zero_grad's default."""
    dim, rows = s.pick(8192, 8), s.pick(512, 4)
    net = s.place(lambda: nets.mlp(*([dim] * s.pick(7, 3)), bias=False))
    x, y = _bf16(s, rows, dim), _bf16(s, rows, dim)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, fused=s.cuda)

    def clear() -> None:
        for p in net.parameters():
            if fixed:
                p.grad = None
            elif p.grad is not None:
                p.grad.detach_()
                p.grad.zero_()

    def step() -> None:
        clear()
        F.mse_loss(net(x), y).backward()
        optimizer.step()

    return Program(step)


@case("needless recompute", "no checkpoint wrapper: memory is free", **TRIED)
def blocks_wrapped_to_recompute(s: Setting, fixed: bool) -> Program:
    """Latents of pictures denoised; every block is wrapped as in a recipe for many small devices."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping

    channels, batch, places = s.pick(16, 4), s.pick(64, 2), s.pick(256, 4)
    model = s.place(lambda: nets.DiT(channels, s.pick(1024, 16), s.pick(16, 2), s.pick(5, 1), 1000))
    if not fixed:
        wrapping.apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, nets.DiTBlock))
    latents, labels, optimizer = _bf16(s, batch, places, channels), _ints(s, 1000, batch), _adamw(model)

    def step() -> None:
        noise = torch.randn_like(latents)
        F.mse_loss(model(latents + noise, labels), noise).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step)


@case("copies between layouts", "nn.Linear in place of convolutions of width one", **TRIED)
def items_through_convolutions_of_one(s: Setting, fixed: bool) -> Program:
    """What somebody looks at next; the network of each place is written as convolutions, turned around twice."""
    items, users, length = s.pick(8192, 64), s.pick(96, 2), s.pick(256, 4)
    model = s.place(lambda: nets.NextItem(items, s.pick(512, 16), s.pick(8, 2), s.pick(4, 1), linear=fixed))
    seqs, optimizer = _ints(s, items, users, length), _adamw(model)
    liked, not_liked = _bf16(s, users, length, s.pick(512, 16)), _bf16(s, users, length, s.pick(512, 16))

    def step() -> None:
        feats = model(seqs)
        better = ((liked - not_liked) * feats).sum(-1)
        optimizer.zero_grad()
        (-F.logsigmoid(better).mean()).backward()
        optimizer.step()

    return Program(step)


@case("needless gradients", "backbone.requires_grad_(False)", **TRIED)
def backbone_learns_for_nothing(s: Setting, fixed: bool) -> Program:
    """A head learned over a network that stays as it is, though nobody told autograd."""
    dim, side, batch = s.pick(768, 16), s.pick(224, 32), s.pick(96, 2)
    model = s.place(lambda: nets.Probe(nets.PatchNet(16, dim, s.pick(12, 2), s.pick(5, 1)), dim, 200, freeze=fixed))
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-3, fused=True)
    images, labels = _bf16(s, batch, 3, side, side), _ints(s, 200, batch)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return Program(step)


@case("padding", "fill each batch up to its longest review", **TRIED)
def reviews_filled_to_the_limit(s: Setting, fixed: bool) -> Program:
    """Reviews of all lengths, rated by PyTorch's own encoder, each filled up to 512 words."""
    vocab, batch, limit = s.pick(30_000, 64), s.pick(64, 2), s.pick(512, 16)
    lengths = np.random.default_rng(2).integers(limit // 10, limit * 2 // 5, batch)
    long = -(-int(lengths.max()) // 8) * 8 if fixed else limit
    real, share = _filled(s, lengths, long)
    model = s.place(lambda: nets.ReviewEncoder(vocab, s.pick(768, 16), s.pick(12, 2), s.pick(4, 1)))
    input_ids, stars, optimizer = _ints(s, vocab, batch, long) * real, _ints(s, 5, batch), _adamw(model)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(input_ids, ~real), stars).backward()
        optimizer.step()

    return Program(step, facts={"padding": [{"argument": "pad_mask", "real_frac": share}]})


# ---------------------------------------------------------------- what compiles


@case("unfused pointwise chain", "torch.compile(collide)", compiles=True, **ONE)
def lattice_in_steps(s: Setting, fixed: bool) -> Program:
    """A fluid on a lattice: what meets at each place is worked out an op at a time."""
    torch._dynamo.reset()
    side = s.pick(3072, 8)
    f = torch.ones(9, side, side, device=s.device) + 0.01 * torch.rand(9, side, side, device=s.device)
    collide = torch.compile(nets.collide, backend=compiler(s), dynamic=False) if fixed else nets.collide

    @torch.no_grad()
    def step() -> None:
        g = f
        for _ in range(s.pick(5, 1)):
            g = nets.stream(collide(g, 0.6))
        f.copy_(g)

    return Program(step)


@case("graph break", "let the norm be compiled", compiles=True, both=True, **ONE)
def norm_left_out_of_compilation(s: Setting, fixed: bool) -> Program:
    """Compiled layers that call a norm which is kept from the compiler by a decorator."""
    torch._dynamo.reset()
    dim, rows = s.pick(2048, 8), s.pick(8192, 4)
    weights = [_bf16(s, dim, dim) * dim**-0.5 for _ in range(s.pick(24, 2))]
    x, scale, weight = _bf16(s, rows, dim), _bf16(s, dim), torch.ones(dim, device=s.device, dtype=torch.bfloat16)
    layer = torch.compile(nets.gated_residual, backend=compiler(s), dynamic=False)
    norm = nets.rms_norm if fixed else nets.rms_norm_uncompiled

    @torch.no_grad()
    def forward() -> Tensor:
        h = x
        for w in weights:
            h = layer(h, h @ w, scale, weight, norm)
        return h

    return Program(forward)


# ---------------------------------------------------------------- well


def _descended(optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def step() -> Tensor:
        found = loss()
        found.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return found

    return step


@healthy
def healthy_scores_streamed_in(s: Setting, fixed: bool) -> Program:
    """Rows to be ranked come out of pinned memory on a stream of their own; products have their activations inside."""
    rows, dim = s.pick(16_384, 4), s.pick(4096, 16)
    net = nets.RankNet(dim, s.pick(20, 2), s.device)
    batches = itertools.cycle([(s.pinned(_bf16(s, rows, dim).cpu()),) for _ in range(2)])
    ahead = iter(Prefetch(s, batches))
    return _asked(lambda: net(next(ahead)[0]).sum(1))


@healthy
def healthy_book_read_at_once(s: Setting, fixed: bool) -> Program:
    """One very long text through layers that attend."""
    dim = s.pick(2048, 16)
    model = s.place(lambda: nets.LongReader(dim, s.pick(16, 2), s.pick(2, 1))).eval()
    x = _bf16(s, 1, s.pick(32_768, 8), dim)
    return _asked(lambda: model(x))


@healthy
def healthy_broad_words(s: Setting, fixed: bool) -> Program:
    """Six words for each of many texts by very broad layers, each word out of a graph."""
    dim, batch, room = s.pick(12_288, 16), s.pick(192, 2), s.pick(64, 4)
    model = s.place(lambda: nets.BroadDecoder(dim, s.pick(96, 2), s.pick(2, 1), batch, room)).eval()
    x, place = _bf16(s, batch, dim), torch.zeros(1, dtype=torch.long, device=s.device)

    @torch.no_grad()
    def word() -> None:
        x.copy_(model(x, place).clamp_(-1, 1))
        place.add_(1).remainder_(room)

    run = graphed(word) if s.cuda else word
    return Program(lambda: [run() for _ in range(s.pick(6, 1))])


@healthy
def healthy_deep_filters(s: Setting, fixed: bool) -> Program:
    """Few pictures, and very wide convolutions in channels_last."""
    wide, num, side = s.pick(1024, 8), s.pick(64, 2), s.pick(28, 8)
    net = s.place(lambda: nets.deep_convolutions(wide, s.pick(4, 1), 16)).to(memory_format=torch.channels_last)
    x = _bf16(s, num, wide, side, side).to(memory_format=torch.channels_last)
    kinds, optimizer = _ints(s, 16, num), torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, fused=s.cuda)
    return Program(_descended(optimizer, lambda: F.cross_entropy(net(x), kinds)))


@healthy
def healthy_bags_looked_up(s: Setting, fixed: bool) -> Program:
    """What somebody saw, as sums of rows out of three large tables; a kernel for each."""
    rows, dim = s.pick(4_000_000, 64), s.pick(128, 8)
    tables = [_bf16(s, rows, dim) for _ in range(3)]
    ids = [_ints(s, rows, s.pick(196_608, 4), s.pick(96, 3)).int() for _ in range(3)]
    return _asked(lambda: [F.embedding_bag(some, table, mode="sum") for some, table in zip(ids, tables)])


@healthy
def healthy_filter_in_double(s: Setting, fixed: bool) -> Program:
    """The lowest states of a large matrix, filtered by polynomials in double precision, which they need."""
    size, states = s.pick(8192, 8), s.pick(2048, 4)
    a = torch.randn(size, size, device=s.device, dtype=torch.float64)
    h = (a + a.T) / (4 * size**0.5)
    x = torch.randn(size, states, device=s.device, dtype=torch.float64)

    @torch.no_grad()
    def filtered() -> Tensor:
        before, now = x, h @ x
        for _ in range(s.pick(5, 2)):
            before, now = now, torch.addmm(before, h, now, beta=-1, alpha=2)
        return now

    return Program(filtered)


@case("none", "nothing", **LINES | {"rounds": 1, "warmup": 8, "steps": 14})
def healthy_bytes_from_workers(s: Setting, fixed: bool) -> Program:
    """Rows of bytes by workers enough, pinned, copied a step ahead, for a network that takes long."""
    rows, columns, wide = s.pick(8192, 4), s.pick(2048, 8), s.pick(8192, 16)
    loader = DataLoader(
        nets.PackedRows(rows, columns), None, num_workers=s.pick(6, 1), pin_memory=s.cuda, persistent_workers=True,
        prefetch_factor=4,
    )  # fmt: skip
    feed: Any = iter(loader)
    ahead = iter(Prefetch(s, feed))
    net = s.place(lambda: nets.mlp(columns, wide, wide, wide, wide, 16, bias=False))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, fused=s.cuda)

    def loss() -> Tensor:
        x, kinds = next(ahead)
        return F.cross_entropy(net(x.to(torch.bfloat16).mul_(1 / 255)), kinds)

    return Program(_descended(optimizer, loss), close=lambda: end_workers(feed))


@healthy
def healthy_loss_read_each_step(s: Setting, fixed: bool) -> Program:
    """A broad network over very many rows; its loss is read in every step, which is long."""
    rows, wide = s.pick(32_768, 4), s.pick(8192, 16)
    net = s.place(lambda: nets.mlp(wide, wide, wide, wide // 8, bias=False))
    x, optimizer = _bf16(s, rows, wide), torch.optim.SGD(net.parameters(), lr=1e-3, fused=s.cuda)
    descend, history = _descended(optimizer, lambda: net(x).square().mean()), list[float]()
    return Program(lambda: history.append(descend().item()))


@healthy
def healthy_pairs_in_one_square(s: Setting, fixed: bool) -> Program:
    """Pictures and what is said of them, as features, told apart by one square of scores that is small beside it."""
    pairs, seen, wide = s.pick(8192, 4), s.pick(4096, 8), s.pick(8192, 16)
    left, right = (s.place(lambda: nets.mlp(seen, wide, wide, wide // 4, bias=False)) for _ in "ab")
    optimizer = torch.optim.SGD([*left.parameters(), *right.parameters()], lr=1e-3, fused=s.cuda)
    a, b, same = _bf16(s, pairs, seen), _bf16(s, pairs, seen), torch.arange(pairs, device=s.device)
    return Program(_descended(optimizer, lambda: F.cross_entropy(left(a) @ right(b).T, same)))


@healthy
def healthy_broad_layer(s: Setting, fixed: bool) -> Program:
    """One layer of a very broad language model, as a stage of a pipeline has it, with a fused optimizer."""
    dim = s.pick(6144, 16)
    layer = s.place(lambda: nets.BroadLayer(dim, s.pick(48, 2)))
    x = _bf16(s, s.pick(4, 2), s.pick(2048, 4), dim)
    return Program(_descended(_adamw(layer), lambda: layer(x).square().mean()))
