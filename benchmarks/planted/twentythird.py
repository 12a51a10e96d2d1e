"""A twenty-third suite: 22 training scripts with one cause each, written as different people write them, and five
training programs that are well.

A cause counts where its fix brings 5 % of the planted step and three times what both programs vary by (half of the two
quartile ranges of their step times, added) at least; both are judged from step times alone, before any rule is asked.
``EXPECTED`` says beforehand by which name a cause should be told, in the words that earlier suites used; the names
after the first count as well, since their advice is the same change. ``MISTAKEN`` says what a healthy program could be
taken for. A finding over 2 % in a fixed or healthy program is false unless its advice, done and timed, brings more than
noise.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import fresh
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import twentythirdnets as nets
from cases import Prefetch, Program, Setting, Step, case, compiler, end_workers, graphed, precision
from eighteenth import EVERY, LINES, ONE
from nineteenth import _filled
from ninth import _bf16, _ints
from tenth import TRIED
from torch import Tensor
from torch.utils.data import DataLoader

EXPECTED: dict[str, tuple[str, ...]] = {
    "tomograms_by_one_worker": ("data-loader",),
    "tremors_bound_to_a_rank": ("cpu-affinity",),
    "screens_as_tensors": ("pageable-copies",),
    "fine_level_kept_on_the_host": ("exposed-copies", "host-round-trip", "weight-streaming"),
    "worst_places_counted_by_picture": ("value-read", "synchronize", "tensor-loop"),
    "sound_coded_in_anomaly_mode": ("value-read", "synchronize", "host-code"),
    "previews_saved_every_step": ("logging", "value-read", "host-round-trip"),
    "cells_grown_step_by_step": ("launch-bound",),
    "residues_under_amsgrad": ("unfused-optimizer",),
    "crops_passed_apart": ("micro-batches", "small-batch"),
    "graphs_that_free_after_updates": ("allocator",),
    "captions_tidied_after": ("garbage-collection",),
    "views_correlated_in_fp32": ("tensor-cores-unused",),
    "joints_channels_first": ("channels-first",),
    "painted_by_slices": ("unfused-attention",),
    "codes_against_one_hot": ("logits",),
    "purchases_zeroed_by_list": ("zero-grad",),
    "weather_by_an_old_recipe": ("recompute",),
    "prompt_of_a_model_that_rests": ("needless-gradients", "redundant-pass"),
    "episodes_filled_to_the_longest_allowed": ("padding",),
    "samples_by_mixtures": ("pointwise-chains",),
    "layers_with_a_stopwatch": ("graph-breaks",),
}
MISTAKEN: dict[str, str] = {
    "healthy_long_scores": "a small batch, unfused attention",
    "healthy_near_to_all": "padding, a small batch",
    "healthy_shown_ahead": "exposed or pageable copies",
    "healthy_halved_pictures": "convolutions in channels_first",
    "healthy_fields_squeezed": "fp32 products without tensor cores",
}
LOADED: dict[str, Any] = ONE | {"warmup": 8, "steps": 14, "planted_steps": 10}
"""Workers need some steps until what they made ahead is used up."""
healthy = case("none", "nothing", **LINES)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _sgd(s: Setting, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, fused=s.cuda)


def _trained(optimizer: torch.optim.Optimizer, loss_fn: Callable[[], Tensor]) -> Step:
    def step() -> None:
        loss = loss_fn()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


# ---------------------------------------------------------------- input


@case("data loader", "num_workers=1 → 10", **LOADED)
def tomograms_by_one_worker(s: Setting, fixed: bool) -> Program:
    """Which organ a volume shows; volumes are turned, brightened and speckled by one worker."""
    loader = DataLoader(
        nets.Tomograms(s.pick(64, 8)), batch_size=s.pick(16, 2), num_workers=s.pick(10 if fixed else 1, 1),
        pin_memory=s.cuda, persistent_workers=True, drop_last=True,
    )  # fmt: skip
    data_iter: Any = iter(loader)
    model = s.place(lambda: nets.VolumeNet(s.pick(8, 4), s.pick(1024, 16), s.pick(16, 2), s.pick(12, 1)))
    optimizer = _adamw(model)

    def train_step() -> None:
        volumes, organs = next(data_iter)
        volumes = volumes.to(s.device, non_blocking=True).to(torch.bfloat16).div_(255)
        organs = organs.to(s.device, non_blocking=True)
        optimizer.zero_grad()
        F.cross_entropy(model(volumes), organs).backward()
        optimizer.step()

    return Program(train_step, close=lambda: end_workers(data_iter))


@case("cpu affinity", "let the process and its workers use every core", **LOADED)
def tremors_bound_to_a_rank(s: Setting, fixed: bool) -> Program:
    """Tremors told apart, out of eight stations a step; the launcher bound the process to the core of its rank, and so
    its six workers."""
    scope = nullcontext if fixed else functools.partial(fresh._cores, 1)
    dataset, stations, each = nets.Tremors(s.pick(4096, 64)), s.pick(8, 2), s.pick(16, 2)
    loader = DataLoader(
        dataset, each, num_workers=s.pick(6, 1), pin_memory=s.cuda, persistent_workers=True, drop_last=True,
        prefetch_factor=4,
    )  # fmt: skip
    with scope():
        feed: Any = iter(loader)
    model = s.place(lambda: nets.TremorNet(s.pick(32, 8), s.pick(768, 16), s.pick(12, 2), s.pick(8, 1)))
    kinds, optimizer = _ints(s, 3, stations * each), _adamw(model)

    def step() -> None:
        felt = [next(feed).to(s.device, non_blocking=True) for _ in range(stations)]
        optimizer.zero_grad()
        F.cross_entropy(model(torch.cat(felt).to(torch.bfloat16)), kinds).backward()
        optimizer.step()

    return Program(step, scope, close=lambda: end_workers(feed))


# ---------------------------------------------------------------- copies


@case("pageable copy", "pin the batches, and copy the next one ahead with non_blocking=True", **TRIED)
def screens_as_tensors(s: Setting, fixed: bool) -> Program:
    """Values of moves learned from screens; a memory of arrays becomes tensors on the device when it is asked."""
    moves, batch = s.pick(16, 4), s.pick(1024, 2)
    memory = nets.ReplayMemory(batch, s.pick(84, 8), moves)
    q_net, target = (
        s.place(lambda: nets.ScreenValues(s.pick(14, 4), s.pick(1024, 16), s.pick(2, 1), moves)) for _ in "qt"
    )
    target.requires_grad_(False)
    optimizer = torch.optim.Adam(q_net.parameters(), lr=1e-4, fused=True)
    order: Iterator[Any] = itertools.cycle(memory.batches)
    if fixed:
        pinned = [tuple(s.pinned(torch.from_numpy(array)) for array in batch) for batch in memory.batches]
        order = iter(Prefetch(s, itertools.cycle(pinned)))

    def sample() -> tuple[Tensor, ...]:
        return next(order) if fixed else tuple(torch.as_tensor(array, device=s.device) for array in next(order))

    def learn() -> None:
        obs, next_obs, actions, rewards = sample()
        with torch.no_grad():
            wanted = rewards + 0.99 * target(next_obs).amax(1)
        q = q_net(obs).gather(1, actions[:, None]).squeeze(1)
        optimizer.zero_grad()
        F.smooth_l1_loss(q.float(), wanted).backward()
        optimizer.step()

    return Program(learn)


@case("copies in line", "no save_on_cpu: memory is free", **ONE)
def fine_level_kept_on_the_host(s: Setting, fixed: bool) -> Program:
    """Films by patches of two sizes; what the fine layers need again is kept on the host meanwhile."""
    scope = nullcontext if fixed else functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=s.cuda)
    fine, coarse, depths = s.pick((512, 2048, (2, 6)), (16, 16, (1, 1)))
    model = s.place(lambda: nets.FineAndCoarse(s.pick(192, 8), fine, coarse, depths, scope))
    films, kinds = _bf16(s, s.pick(4, 2), s.pick(4096, 8), s.pick(192, 8)), _ints(s, 16, s.pick(4, 2))
    return Program(_trained(_adamw(model), lambda: F.cross_entropy(model(films), kinds)))


# ---------------------------------------------------------------- who waits for whom


@case("synchronization", "rank the losses of all pictures on the device", **TRIED)
def worst_places_counted_by_picture(s: Setting, fixed: bool) -> Program:
    """A detector that learns from things and from the worst places without one, as many as there are things thrice."""
    width, side, batch, classes = s.pick((256, 64, 32, 24), (8, 4, 2, 8))
    net = s.place(lambda: nets.AnchorNet(width, s.pick(6, 1), 2, classes)).to(memory_format=torch.channels_last)
    features = _bf16(s, batch, width, side, side).to(memory_format=torch.channels_last)
    there = torch.rand(batch, 2 * side * side, device=s.device) < s.pick(0.01, 0.2)
    labels = torch.randint_like(there, 1, classes, dtype=torch.long) * there
    mined = nets.mined_by_rank if fixed else nets.mined_by_image

    def multibox_loss() -> Tensor:
        scores = net(features)
        losses = F.cross_entropy(scores.flatten(0, 1).float(), labels.flatten(), reduction="none")
        return mined(losses.view_as(labels), labels)

    return Program(_trained(torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, fused=s.cuda), multibox_loss))


@case("synchronization", "set_detect_anomaly(False)", **ONE)
def sound_coded_in_anomaly_mode(s: Setting, fixed: bool) -> Program:
    """Frames of sound squeezed and restored, by a script in which somebody once looked for a NaN."""
    bins = s.pick(128, 8)
    model = s.place(lambda: nets.FrameCoder(bins, s.pick(768, 16), s.pick(12, 2), s.pick(8, 1)))
    frames = _bf16(s, s.pick(16, 2), s.pick(1024, 4), bins)
    scope = functools.partial(torch.autograd.set_detect_anomaly, not fixed)
    return Program(_trained(_adamw(model), lambda: F.mse_loss(model(frames), frames)), scope)


@case("synchronous logging", "save previews every fiftieth step", **ONE)
def previews_saved_every_step(s: Setting, fixed: bool) -> Program:
    """Pictures denoised; what the first would look like is saved after every step."""
    batch, places, pixels = s.pick((32, 1024, 192), (2, 4, 12))
    model = s.place(lambda: nets.Denoiser(pixels, s.pick(512, 16), s.pick(8, 2), s.pick(6, 1)))
    pictures, level, optimizer = _bf16(s, batch, places, pixels), _bf16(s, batch, 8), _adamw(model)
    file, turn, every = tempfile.TemporaryFile(), itertools.count(1), EVERY if fixed else 1  # noqa: SIM115

    def step() -> None:
        noise = torch.randn_like(pictures)
        noisy = pictures + noise
        found = model(noisy, level)
        optimizer.zero_grad()
        F.mse_loss(found, noise).backward()
        optimizer.step()
        if next(turn) % every == 0:
            nets.pictured(noisy[:1] - found[:1].detach(), file)

    return Program(step, close=file.close)


# ---------------------------------------------------------------- the host's own time


@case("host-bound", "the whole step out of a CUDA graph", **ONE | {"steps": 10})
def cells_grown_step_by_step(s: Setting, fixed: bool) -> Program:
    """Cells that grow into a picture in forty small steps, learned through all of them."""
    batch, side, channels = s.pick((8, 64, 16), (2, 4, 4))
    net = s.place(lambda: nets.Automaton(channels, s.pick(128, 8)))
    seed, wanted = torch.zeros(batch, side, side, channels), torch.rand(batch, side, side, channels)
    seed[:, side // 2, side // 2] = 1
    seed, wanted = (t.to(s.device, torch.bfloat16) for t in (seed, wanted))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True, capturable=s.cuda)
    step = _trained(optimizer, lambda: F.mse_loss(net(seed, s.pick(40, 2)), wanted))
    return Program(graphed(step) if fixed and s.cuda else step)


@case("unfused optimizer", "torch.optim.Adam(amsgrad=True, fused=True)", **TRIED)
def residues_under_amsgrad(s: Setting, fixed: bool) -> Program:
    """Hidden amino acids of chains; lists of weights once took too much memory, and so they were turned off."""
    model = s.place(lambda: nets.Residues(s.pick(512, 16), s.pick(8, 2), s.pick(24, 2)))
    how = {"fused": True} if fixed else {"foreach": False}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, amsgrad=True, weight_decay=1e-5, **how)
    chains, hidden = (_ints(s, 32, s.pick(16, 2), s.pick(512, 4)) for _ in "ab")
    return Program(_trained(optimizer, lambda: F.cross_entropy(model(chains).flatten(0, 1), hidden.flatten())))


@case("small batch", "join crops of one size", **TRIED)
def crops_passed_apart(s: Setting, fixed: bool) -> Program:
    """A student sees ten crops of each picture, a teacher the two large ones; each crop is a pass of the student's."""
    batch, large, small = s.pick((16, 224, 96), (2, 16, 8))
    make = lambda: nets.CropNet(s.pick(16, 4), s.pick(768, 16), s.pick(12, 2), s.pick(12, 1), s.pick(4096, 8))
    student, teacher = s.place(make), s.place(make).requires_grad_(False)
    crops = [_bf16(s, batch, 3, side, side) for side in [large] * 2 + [small] * s.pick(8, 2)]
    passed = nets.crops_by_size if fixed else nets.crops_apart

    def loss() -> Tensor:
        with torch.no_grad():
            wanted = (nets.crops_by_size(teacher, crops[:2]) / 0.04).softmax(-1).unflatten(0, (2, -1)).mean(0)
        found = (passed(student, crops) / 0.1).log_softmax(-1).unflatten(0, (len(crops), -1))
        return -(wanted * found).sum(-1).mean()

    return Program(_trained(_adamw(student), loss))


@case("allocator", "no empty_cache in a hook of the optimizer", **ONE)
def graphs_that_free_after_updates(s: Setting, fixed: bool) -> Program:
    """Nodes of many small graphs; a hook gives memory back after every update."""
    graphs, nodes, width = s.pick((256, 64, 1024), (2, 4, 16))
    model = s.place(lambda: nets.GraphLayers(width, s.pick(4, 1)))
    near = (torch.rand(graphs, nodes, nodes, device=s.device) < 0.1).to(torch.bfloat16) / 8
    x, optimizer = _bf16(s, graphs, nodes, width), _adamw(model)
    if s.cuda and not fixed:
        optimizer.register_step_post_hook(lambda *told: torch.cuda.empty_cache())
    return Program(_trained(optimizer, lambda: F.mse_loss(model(x, near), x)))


@case("garbage collection", "no gc.collect() after each step", **ONE)
def captions_tidied_after(s: Setting, fixed: bool) -> Program:
    """Pictures denoised while all that is said of them lies in memory; a decorator tidies up after each step."""
    batch, places, pixels = s.pick((16, 1024, 64), (2, 4, 8))
    model = s.place(lambda: nets.Denoiser(pixels, s.pick(768, 16), s.pick(12, 2), s.pick(6, 1)))
    said, pictures, level = nets.captions(s.pick(36_000, 10)), _bf16(s, batch, places, pixels), _bf16(s, batch, 8)

    def loss(held: Any = said) -> Tensor:
        noise = torch.randn_like(pictures)
        return F.mse_loss(model(pictures + noise, level), noise)

    step = _trained(_adamw(model), loss)
    return Program(step if fixed else nets.tidied(step))


# ---------------------------------------------------------------- kernels


@case("fp32 matmul", 'torch.set_float32_matmul_precision("high")', **TRIED)
def views_correlated_in_fp32(s: Setting, fixed: bool) -> Program:
    """Two views of pictures, whose features should agree and not repeat each other; their correlations are in fp32."""
    rows, seen, width = s.pick((8192, 2048, 4096), (8, 8, 16))
    net = s.place(lambda: nets.Projector(seen, width))
    one, two = _bf16(s, rows, seen), _bf16(s, rows, seen)
    step = _trained(_adamw(net), lambda: nets.redundancy(net(one), net(two)))
    return Program(step, functools.partial(precision, "high" if fixed else "highest"))


@case("NCHW convolution", "model and pictures in channels_last", **TRIED)
def joints_channels_first(s: Setting, fixed: bool) -> Program:
    """Where joints of people are, from pictures with depth and normals, down by strides and up again."""
    people, height, width, joints = s.pick((128, 256, 192, 16), (2, 32, 16, 4))
    net = s.place(lambda: nets.PoseNet(s.pick((256, 512, 1024), (8, 16)), joints))
    images, wanted = _bf16(s, people, 8, height, width), _bf16(s, people, joints, height // 4, width // 4)
    if fixed:
        net = net.to(memory_format=torch.channels_last)
        images, wanted = (t.to(memory_format=torch.channels_last) for t in (images, wanted))
    return Program(_trained(_adamw(net), lambda: F.mse_loss(net(images), wanted)))


@case("unfused attention", "F.scaled_dot_product_attention, without slices", **TRIED)
def painted_by_slices(s: Setting, fixed: bool) -> Program:
    """Latents of large pictures denoised; attention goes through heads in slices, as on a small card."""
    batch, places, channels = s.pick((4, 4096, 16), (2, 8, 4))
    slices = 0 if fixed else s.pick(8, 2)
    net = s.place(lambda: nets.Painter(channels, s.pick(512, 16), s.pick(8, 2), s.pick(3, 1), slices))
    latents, noise = _bf16(s, batch, places, channels), _bf16(s, batch, places, channels)
    return Program(_trained(_adamw(net), lambda: F.mse_loss(net(latents + noise), noise)))


@case("logits laid out for the loss", "F.cross_entropy", **TRIED)
def codes_against_one_hot(s: Setting, fixed: bool) -> Program:
    """Hidden codes of pictures guessed; what is right is laid out as ones among zeros."""
    codes, batch, places = s.pick((16_384, 64, 256), (32, 2, 4))
    model = s.place(lambda: nets.MaskedCodes(codes, s.pick(512, 16), s.pick(8, 2), s.pick(6, 1)))
    shown, hidden = (_ints(s, codes, batch, places) for _ in "ab")

    def loss() -> Tensor:
        logits = model(shown)
        if fixed:
            return F.cross_entropy(logits.flatten(0, 1), hidden.flatten())
        return -(F.one_hot(hidden, codes) * logits.log_softmax(dim=-1)).sum(dim=-1).mean()

    return Program(_trained(_adamw(model), loss))


# ---------------------------------------------------------------- memory and work that nobody needs


@case("gradient memsets", "p.grad = None", **TRIED)
def purchases_zeroed_by_list(s: Setting, fixed: bool) -> Program:
    """Very broad layers over what some people bought; slopes are zeroed all at once, where they lie."""
    width, people = s.pick(4096, 8), s.pick(256, 4)
    net = s.place(lambda: nets.Shelf(width, 4 * width, s.pick(10, 2)))
    bought, params = _bf16(s, people, width) * 0.1, list(net.parameters())
    optimizer = torch.optim.SGD(params, lr=1e-4, fused=s.cuda)

    def forget() -> None:
        if fixed:
            for p in params:
                p.grad = None
        elif params[0].grad is not None:
            torch._foreach_zero_([p.grad for p in params])

    def step() -> None:
        forget()
        F.mse_loss(net(bought), bought).backward()
        optimizer.step()

    return Program(step)


@case("needless recompute", "use_checkpoint=False: memory is free", **TRIED)
def weather_by_an_old_recipe(s: Setting, fixed: bool) -> Program:
    """The weather some hours later; layers are computed twice by a function out of an old repository."""
    batch, places, variables = s.pick((4, 2048, 256), (2, 4, 8))
    net = s.place(
        lambda: nets.Weather(variables, s.pick(1024, 16), s.pick(16, 2), s.pick(6, 2), use_checkpoint=not fixed)
    )
    now, later = (_bf16(s, batch, places, variables) for _ in "ab")
    return Program(_trained(_adamw(net), lambda: F.l1_loss(net(now), later)))


@case("needless gradients", "lm.requires_grad_(False)", **TRIED)
def prompt_of_a_model_that_rests(s: Setting, fixed: bool) -> Program:
    """A prompt of 32 vectors is learned for a language model; the optimizer has the prompt alone."""
    vocab, batch, length, num = s.pick((16_384, 16, 480, 32), (32, 2, 6, 2))
    width = s.pick(1024, 16)
    lm = s.place(lambda: nets.Promptable(vocab, width, s.pick(16, 2), s.pick(6, 1)))
    if fixed:
        lm.requires_grad_(False)
    prompt = nn.Parameter(_bf16(s, 1, num, width) * 0.02)
    optimizer = torch.optim.AdamW([prompt], lr=1e-3, fused=True)
    ids = _ints(s, vocab, batch, length)
    nothing = torch.full((batch, num - 1), -100, device=s.device)
    labels = torch.cat([nothing, ids, nothing[:, :1]], 1).flatten()

    def loss() -> Tensor:
        embedded = torch.cat([prompt.expand(batch, -1, -1), lm.words(ids)], 1)
        return F.cross_entropy(lm(embedded).flatten(0, 1), labels)

    return Program(_trained(optimizer, loss))


@case("padding", "fill each batch up to its longest episode", **TRIED)
def episodes_filled_to_the_longest_allowed(s: Setting, fixed: bool) -> Program:
    """What to do, learned from episodes of 100 to 400 moments, each filled up to 1,024."""
    batch, limit, seen, acts = s.pick((24, 1024, 128, 32), (2, 16, 8, 4))
    lengths = np.random.default_rng(3).integers(limit // 10, limit * 2 // 5, batch)
    long = -(-int(lengths.max()) // 8) * 8 if fixed else limit
    mask, share = _filled(s, lengths, long)
    model = s.place(lambda: nets.Imitator(seen, s.pick(768, 16), s.pick(12, 2), s.pick(6, 1), acts))
    states, done = _bf16(s, batch, long, seen), _bf16(s, batch, long, acts)
    num = int(lengths.sum()) * acts

    def loss() -> Tensor:
        wrong = F.mse_loss(model(states, mask), done, reduction="none")
        return (wrong * mask.unsqueeze(-1)).sum() / num

    return Program(_trained(_adamw(model), loss), facts={"padding": [{"argument": "mask", "real_frac": share}]})


# ---------------------------------------------------------------- what compiles


@case("unfused pointwise chain", "torch.compile(mixture_loss)", compiles=True, **ONE)
def samples_by_mixtures(s: Setting, fixed: bool) -> Program:
    """Samples of sound under mixtures of ten logistic distributions each, a loss of many steps."""
    torch._dynamo.reset()
    samples, rows = s.pick(64, 8), s.pick(32_768, 4)
    net = s.place(lambda: nets.SampleNet(samples, s.pick(1024, 16), s.pick(3, 1), s.pick(10, 2)))
    mixture_loss = nets.mixture_loss
    if fixed:
        mixture_loss = torch.compile(mixture_loss, backend=compiler(s), dynamic=False)
    before, after = _bf16(s, rows, samples), torch.rand(rows, samples, device=s.device) * 2 - 1
    return Program(_trained(_adamw(net), lambda: mixture_loss(net(before), after)))


@case("graph break", "no stopwatch inside of what is compiled", compiles=True, both=True, **ONE)
def layers_with_a_stopwatch(s: Setting, fixed: bool) -> Program:
    """Words through gated layers; what lies between products is compiled, and takes the time of its parts."""
    torch._dynamo.reset()
    words, width = s.pick(65_536, 4), s.pick(512, 8)
    between = torch.compile(nets.gated_layer, backend=compiler(s), dynamic=False)
    watch = None if fixed else nets.Stopwatch()
    net = s.place(lambda: nets.GatedText(width, s.pick(12, 2), between, watch))
    x, y = _bf16(s, words, width), _bf16(s, words, width)
    return Program(_trained(_adamw(net), lambda: F.mse_loss(net(x), y)))


# ---------------------------------------------------------------- well


@healthy
def healthy_long_scores(s: Setting, fixed: bool) -> Program:
    """One very long piece of music, learned by layers that only attend."""
    width = s.pick(2048, 16)
    net = s.place(lambda: nets.Score(width, s.pick(16, 2), s.pick(2, 1)))
    notes = _bf16(s, 1, s.pick(16_384, 8), width)
    return Program(_trained(_sgd(s, net), lambda: net(notes).square().mean()))


@healthy
def healthy_near_to_all(s: Setting, fixed: bool) -> Program:
    """A graph in which everything is somewhat near everything, learned whole."""
    num, width = s.pick((16_384, 2048), (8, 16))
    net = s.place(lambda: nets.DenseGraph(width, s.pick(2, 1)))
    near, nodes = torch.rand(num, num, device=s.device).to(torch.bfloat16) / num, _bf16(s, num, width)
    return Program(_trained(_sgd(s, net), lambda: net(near, nodes).square().mean()))


@healthy
def healthy_shown_ahead(s: Setting, fixed: bool) -> Program:
    """What somebody did, shown out of pinned memory a step ahead, to a network that takes long."""
    rows, seen, inner = s.pick((16_384, 2048, 8192), (4, 8, 16))
    net = s.place(lambda: nets.wide(seen, inner, inner, inner, 64))
    shown = [(s.pinned(_bf16(s, rows, seen).cpu()), s.pinned(torch.randint(64, (rows,)))) for _ in "ab"]
    ahead: Iterator[Any] = iter(Prefetch(s, itertools.cycle(shown)))

    def loss() -> Tensor:
        states, acts = next(ahead)
        return F.cross_entropy(net(states), acts)

    return Program(_trained(_sgd(s, net), loss))


@healthy
def healthy_halved_pictures(s: Setting, fixed: bool) -> Program:
    """Wide convolutions over pictures that are halved on their way, in channels_last."""
    width, num, side = s.pick((768, 48, 48), (8, 2, 8))
    net = s.place(lambda: nets.filters(width, s.pick(4, 2), 16)).to(memory_format=torch.channels_last)
    x = _bf16(s, num, width, side, side).to(memory_format=torch.channels_last)
    kinds = _ints(s, 16, num)
    return Program(_trained(_sgd(s, net), lambda: F.cross_entropy(net(x), kinds)))


@healthy
def healthy_fields_squeezed(s: Setting, fixed: bool) -> Program:
    """Fields of a simulation in fp32, squeezed and restored by products that tensor cores may round."""
    rows, width = s.pick((8192, 8192), (4, 16))
    net = s.place(lambda: nets.wide(width, width, width // 4, width), torch.float32)
    fields = torch.randn(rows, width, device=s.device)
    step = _trained(_sgd(s, net), lambda: F.mse_loss(net(fields), fields))
    return Program(step, functools.partial(precision, "high"))
