"""A twenty-fourth suite: 22 scripts with one cause each, half of them programs that ask, sample, score or simulate,
half of them learners of less common kinds, and five programs that are well.

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
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import nullcontext
from typing import Any

import fresh
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import twentyfourthnets as nets
from cases import Prefetch, Program, Setting, case, compiler, end_workers, graphed, precision
from eighteenth import LINES, ONE
from nineteenth import _asked, _filled
from ninth import _bf16, _ints
from tenth import TRIED
from torch import Tensor
from torch.utils.data import DataLoader

EXPECTED: dict[str, tuple[str, ...]] = {
    "replicas_swapped_in_turn": ("value-read", "synchronize"),
    "states_followed_frame_by_frame": ("launch-bound",),
    "windows_outlined_in_turn": ("micro-batches", "small-batch"),
    "reads_filled_to_512": ("padding",),
    "depths_out_of_an_array": ("pageable-copies",),
    "shards_scored_as_they_come": ("exposed-copies",),
    "heads_a_slice_at_a_time": ("unfused-attention",),
    "answers_judged_by_one_hot": ("logits",),
    "stages_timed_while_compiled": ("graph-breaks",),
    "heat_noted_at_every_move": ("logging", "value-read"),
    "calls_unpacked_on_one_core": ("cpu-affinity",),
    "clouds_viewed_by_two_workers": ("data-loader",),
    "targets_sent_to_each_head": ("exposed-copies", "synchronize", "pageable-copies"),
    "teacher_gives_its_memory_back": ("allocator",),
    "tasks_tidied_up_after": ("garbage-collection",),
    "views_decorrelated_in_fp32": ("tensor-cores-unused",),
    "centers_channels_first": ("channels-first",),
    "adan_of_the_paper": ("unfused-optimizer",),
    "selu_of_the_paper": ("pointwise-chains",),
    "slopes_begun_with_zeros": ("zero-grad",),
    "labels_for_pixels_computed_twice": ("recompute",),
    "teacher_colder_every_step": ("recompilation",),
}
MISTAKEN: dict[str, str] = {
    "healthy_long_memory": "a small batch, unfused attention",
    "healthy_committee_in_blocks": "many small pieces, a chain of pointwise work",
    "healthy_vectors_fetched_beside": "exposed or pageable copies",
    "healthy_modes_in_tf32": "fp32 products without tensor cores",
    "healthy_two_halves_of_a_batch": "small batches, gradients kept in memory",
}
LOADED: dict[str, Any] = ONE | {"warmup": 8, "steps": 14, "planted_steps": 10}
"""Workers need some steps until what they made ahead is used up."""
healthy = case("none", "nothing", **LINES)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


# ---------------------------------------------------------------- programs that ask, sample, score or simulate


@case("synchronization", "all pairs decided together by torch.where", **TRIED)
def replicas_swapped_in_turn(s: Setting, fixed: bool) -> Program:
    """Replicas of a system at sixteen temperatures walk by a learned energy, and neighbors exchange theirs."""
    replicas, walkers, coords = s.pick(16, 4), s.pick(1024, 4), s.pick(256, 8)
    potential = s.place(lambda: nets.Potential(coords, s.pick(2048, 16), s.pick(3, 1))).eval()
    x = _bf16(s, replicas, walkers, coords)
    beta = torch.linspace(1.0, 0.1, replicas, device=s.device)
    swap = nets.swap_together if fixed else nets.swap_in_turn

    @torch.no_grad()
    def sweep(first: int, x: Tensor, energy: Tensor) -> tuple[Tensor, Tensor]:
        moved = x + 0.05 * torch.randn_like(x)
        tried = potential(moved)
        accept = torch.rand_like(tried).log() < beta[:, None] * (energy - tried)
        x, energy = torch.where(accept[..., None], moved, x), torch.where(accept, tried, energy)
        swap(beta, energy.mean(1), torch.rand(replicas // 2, device=s.device), first)
        return x, energy

    @torch.no_grad()
    def step() -> Tensor:
        here, energy = x, potential(x)
        for i in range(s.pick(12, 2)):
            here, energy = sweep(i % 2, here, energy)
        x.copy_(here)
        return energy

    return Program(step)


@case("host-bound", "the whole recursion out of a CUDA graph", **TRIED)
def states_followed_frame_by_frame(s: Setting, fixed: bool) -> Program:
    """How likely many utterances are under a hidden Markov model, states followed from frame to frame."""
    batch, states, frames = s.pick(64, 2), s.pick(256, 4), s.pick(800, 20)
    start = torch.full((batch, states), 1 / states, device=s.device)
    moves = torch.softmax(torch.randn(states, states, device=s.device), dim=1)
    heard = torch.rand(frames, batch, states, device=s.device) + 0.5
    told = torch.zeros(batch, 1, device=s.device)

    @torch.no_grad()
    def score() -> None:
        told.copy_(nets.forward_algorithm(start, moves, heard))

    scope = functools.partial(precision, "high")
    with scope():
        run = graphed(score) if fixed and s.cuda else score
    return Program(run, scope)


@case("small batch", "thirty-two windows in one pass", **TRIED | {"steps": 7})
def windows_outlined_in_turn(s: Setting, fixed: bool) -> Program:
    """Fields outlined in a picture from above, by windows that overlap, each looked at by itself."""
    side, stride, bands, kinds = s.pick(128, 16), s.pick(112, 8), 8, 8
    size = side + stride * s.pick(7, 1)
    net = s.place(lambda: nets.Outliner(bands, s.pick((96, 192, 384), (8, 16)), kinds)).eval()
    net = net.to(memory_format=torch.channels_last)
    picture, many = _bf16(s, 1, bands, size, size), 32 if fixed else 1

    def outline() -> Tensor:
        windows = nets.windows_of(picture, side, stride)
        found = torch.cat([net(some) for some in windows.split(many)])
        return nets.stitched(found, size, side, stride).argmax(1)

    return _asked(outline)


@case("padding", "padding=True in place of padding='max_length'", **TRIED)
def reads_filled_to_512(s: Setting, fixed: bool) -> Program:
    """Vectors of what a sequencer reads, some 150 letters each, every one filled up to the model's limit."""
    vocab, batch, limit = s.pick(4096, 64), s.pick(256, 2), s.pick(512, 32)
    lengths = np.random.default_rng(4).integers(limit // 4 - limit // 32, limit // 4, batch) + 1
    long = limit // 4 if fixed else limit
    real, share = _filled(s, lengths, long)
    model = s.place(lambda: nets.ReadEncoder(vocab, s.pick(768, 16), s.pick(12, 2), s.pick(6, 1))).eval()
    kmers = _ints(s, vocab, batch, long) * real

    def embed() -> Tensor:
        return F.normalize(model(kmers, real), dim=-1)

    facts = {"padding": [{"argument": "attention_mask", "real_frac": share}]}
    return Program(torch.inference_mode()(embed), facts=facts)


@case("pageable copy", "pin the frames, and copy the next ones ahead with non_blocking=True", **TRIED)
def depths_out_of_an_array(s: Setting, fixed: bool) -> Program:
    """Frames of a depth camera lie in arrays as they were read, and are described by a network."""
    frames, channels, high, wide = s.pick(32, 2), 2, s.pick(384, 16), s.pick(640, 32)
    rng = np.random.default_rng(8)
    clips = [rng.random((frames, channels, high, wide), dtype=np.float32) for _ in range(2)]
    model = s.place(lambda: nets.DepthVit(channels, s.pick(768, 16), s.pick(12, 2), s.pick(8, 1))).eval()
    pinned: Iterator[Any] = itertools.cycle([(s.pinned(torch.from_numpy(clip)),) for clip in clips])
    ahead, order = iter(Prefetch(s, pinned)) if fixed else None, itertools.cycle(clips)

    def describe() -> Tensor:
        clip = next(ahead)[0] if ahead is not None else torch.as_tensor(next(order), device=s.device)
        return model(clip.to(torch.bfloat16))

    return _asked(describe)


@case("pinned copy on the compute stream", "copy the next shard on a stream of its own", **TRIED | {"steps": 7})
def shards_scored_as_they_come(s: Setting, fixed: bool) -> Program:
    """The nearest of very many vectors, which lie in pinned memory in shards and come to the device one by one."""
    rows, dim, num = s.pick(65_536, 8), s.pick(1024, 16), s.pick(16_384, 4)
    shards = [(s.pinned(_bf16(s, rows, dim).cpu()),) for _ in range(3)]
    queries = F.normalize(_bf16(s, num, dim), dim=-1)
    endless: Iterator[Any] = itertools.cycle(shards)
    here = lambda shard: (shard[0].to(s.device, non_blocking=True),)
    feed = iter(Prefetch(s, endless)) if fixed else map(here, endless)

    def search() -> Tensor:
        best = torch.full((num,), -1e4, device=s.device, dtype=torch.bfloat16)
        for (shard,) in itertools.islice(feed, len(shards)):
            best = torch.maximum(best, (queries @ shard.t()).amax(1))
        return best

    return _asked(search)


@case("unfused attention", "F.scaled_dot_product_attention over all heads", **TRIED)
def heads_a_slice_at_a_time(s: Setting, fixed: bool) -> Program:
    """Pictures drawn out of noise by a network whose attention is sliced, as one does where memory is short."""
    batch, places, channels, dim = s.pick(4, 1), s.pick(4096, 8), s.pick(8, 4), s.pick(512, 16)
    slice_size = None if fixed else s.pick(8, 2)
    model = s.place(lambda: nets.LatentDenoiser(channels, dim, s.pick(8, 2), s.pick(6, 1), slice_size)).eval()
    start, sigmas = _bf16(s, batch, places, channels), (1.0, 0.4, 0.0)

    def draw() -> Tensor:
        x = start
        for now, then in itertools.pairwise(sigmas):
            x = x + (then - now) * model(x)
        return x

    return _asked(draw)


@case("logits laid out for the loss", "F.cross_entropy(reduction='none') of the logits as they are", **TRIED)
def answers_judged_by_one_hot(s: Setting, fixed: bool) -> Program:
    """Which of several answers a language model finds likeliest; its words are picked out by products with one-hots."""
    vocab, batch, length = s.pick(50_304, 64), s.pick(16, 2), s.pick(512, 4)
    model = s.place(lambda: nets.Judge(vocab, s.pick(1024, 16), s.pick(16, 2), s.pick(6, 1))).eval()
    ids = _ints(s, vocab, batch, length + 1)
    likelihood = nets.likelihood_by_cross_entropy if fixed else nets.likelihood_by_one_hot
    return _asked(lambda: likelihood(model(ids[:, :-1]), ids[:, 1:]).sum(1).view(-1, 2).argmax(1))


@case("graph break", "no clock inside of what is compiled", compiles=True, both=True, **ONE)
def stages_timed_while_compiled(s: Setting, fixed: bool) -> Program:
    """Patterns that grow where two substances react; somebody wanted to know how long each stage takes."""
    torch._dynamo.reset()
    side = s.pick(4096, 8)
    u, v = torch.ones(side, side, device=s.device), torch.rand(side, side, device=s.device)
    advance = torch.compile(nets.gray_scott, backend=compiler(s), dynamic=False)
    tick = None if fixed else nets.StageClock()

    @torch.no_grad()
    def step() -> None:
        a, b = u, v
        for _ in range(s.pick(48, 2)):
            a, b = advance(a, b, tick)
        u.copy_(a)
        v.copy_(b)

    return Program(step)


@case("synchronous logging", "note heat and energy every thousandth move", **TRIED | {"steps": 7})
def heat_noted_at_every_move(s: Setting, fixed: bool) -> Program:
    """Atoms moved by learned forces; after every move three numbers are written to a file."""
    atoms, around = s.pick(8192, 4), s.pick(2048, 64)
    forces = s.place(lambda: nets.ForceField(around, s.pick(4, 1))).eval()
    x, v = _bf16(s, atoms, around), _bf16(s, atoms, 64)
    file = tempfile.TemporaryFile("w")  # noqa: SIM115 (open while the program runs)
    every, count = 1000 if fixed else 1, itertools.count(1)

    @torch.no_grad()
    def step() -> None:
        for _ in range(s.pick(16, 2)):
            f = forces(x)
            v.mul_(0.99).add_(f, alpha=0.01)
            x[:, :64].add_(v, alpha=0.01)
            if (i := next(count)) % every == 0:
                kinetic, strain = 0.5 * v.square().sum(), f.abs().max()
                file.write(f"{i},{kinetic.item():.4f},{strain.item():.4f},{x.mean().item():.6f}\n")
                file.flush()

    return Program(step, close=file.close)


@case("cpu affinity", "let the process use every core", **ONE | {"warmup": 6, "planted_steps": 6})
def calls_unpacked_on_one_core(s: Setting, fixed: bool) -> Program:
    """Telephone calls sorted; eight processes unpack those of the next batch, in a service that was given one core."""
    each, samples, processes = s.pick(4, 1), s.pick(64_000, 640), s.pick(8, 2)
    scope = nullcontext if fixed else functools.partial(fresh._cores, 1)
    blobs = nets.telephone_calls(each * processes, samples)
    shares = [blobs[i::processes] for i in range(processes)]
    with scope():
        pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("fork"))
        asked: list[Future[np.ndarray]] = [pool.submit(nets.unpack_calls, share) for share in shares]
        for one in asked:
            one.result()
    frame = s.pick(160, 16)
    model = s.place(lambda: nets.CallNet(frame, s.pick(1024, 16), s.pick(16, 2), s.pick(16, 1), 24)).eval()

    def serve() -> Tensor:
        waves = s.pinned(torch.from_numpy(np.concatenate([one.result() for one in asked])))
        asked[:] = [pool.submit(nets.unpack_calls, share) for share in shares]
        return model(waves.to(s.device, non_blocking=True).to(torch.bfloat16) / 32768)

    close = lambda: pool.shutdown(cancel_futures=True)
    return Program(torch.inference_mode()(serve), scope, close=close)


# ---------------------------------------------------------------- learners: what they are fed, what they wait for


@case("data loader", "num_workers=2 → 12", **LOADED)
def clouds_viewed_by_two_workers(s: Setting, fixed: bool) -> Program:
    """Clouds of points told apart from others by two views of each, which workers cut and turn."""
    points, kept, batch = s.pick(20_480, 64), s.pick(2048, 32), s.pick(64, 2)
    workers = s.pick(12 if fixed else 2, 1)
    loader = DataLoader(
        nets.CloudPairs(points, kept), batch, num_workers=workers, pin_memory=s.cuda, persistent_workers=True
    )
    feed: Any = iter(loader)
    model = s.place(lambda: nets.CloudEncoder(s.pick(768, 16), s.pick(12, 2), s.pick(12, 1), s.pick(256, 8)))
    optimizer = _adamw(model)

    def step() -> None:
        views = torch.cat([view.to(s.device, non_blocking=True) for view in next(feed)])
        nets.info_nce(*model(views.to(torch.bfloat16)).chunk(2)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step, close=lambda: end_workers(feed))


@case("blocking copy", "all targets a step ahead, with non_blocking=True on a stream of their own", **TRIED)
def targets_sent_to_each_head(s: Setting, fixed: bool) -> Program:
    """Two dozen tasks over one trunk; each head's targets go to the device where the head needs them."""
    rows, dim, out, tasks = s.pick(16_384, 4), s.pick(1024, 16), s.pick(128, 8), s.pick(24, 3)
    model = s.place(lambda: nets.ManyTasks(dim, out, tasks))
    x, optimizer = _bf16(s, rows, dim), _adamw(model)
    batches = [tuple(s.pinned(torch.rand(rows, out)) for _ in range(tasks)) for _ in range(2)]
    endless: Iterator[Any] = itertools.cycle(batches)
    feed = iter(Prefetch(s, endless)) if fixed else endless

    def step() -> None:
        seen, losses = model.trunk(x), []
        for head, target in zip(model.heads, next(feed)):
            losses.append(F.mse_loss(head(seen), target.to(s.device).to(torch.bfloat16)))
        torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step)


@case("allocator", "no hook that empties the cache", **ONE)
def teacher_gives_its_memory_back(s: Setting, fixed: bool) -> Program:
    """A small network learns what a large one sees; a hook gives the large one's memory back once it has answered."""
    batch, places, kinds = s.pick(64, 2), s.pick(256, 4), s.pick(1024, 8)
    teacher = s.place(lambda: nets.TeacherOrStudent(s.pick(1280, 16), s.pick(20, 2), s.pick(4, 1), kinds)).eval()
    student = s.place(lambda: nets.TeacherOrStudent(s.pick(640, 16), s.pick(10, 2), s.pick(6, 1), kinds))
    if s.cuda and not fixed:
        teacher.register_forward_hook(nets.give_back)
    patches, optimizer = _bf16(s, batch, places, 768), _adamw(student)

    def step() -> None:
        with torch.no_grad():
            known = F.log_softmax(teacher(patches) / 2, dim=-1)
        told = F.log_softmax(student(patches) / 2, dim=-1)
        F.kl_div(told, known, reduction="batchmean", log_target=True).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step)


@case("garbage collection", "no gc.collect() after each task", **ONE | {"steps": 10})
def tasks_tidied_up_after(s: Setting, fixed: bool) -> Program:
    """Weights from which two steps lead far; after each task somebody tidies up what its copies might have left."""
    dim, rows, depth = s.pick(2048, 8), s.pick(4096, 4), s.pick(4, 2)
    index = nets.task_index(s.pick(30_000, 10))
    weights = [nn.Parameter(_bf16(s, dim, dim) * dim**-0.5) for _ in range(depth)]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
    tasks = [(_bf16(s, rows, dim), _bf16(s, rows, dim)) for _ in range(s.pick(4, 2))]

    def adapt(x: Tensor, y: Tensor) -> list[Tensor]:
        fast: list[Tensor] = [w.detach().requires_grad_() for w in weights]
        for _ in range(2):
            slopes = torch.autograd.grad(F.mse_loss(nets.run_with(fast, x), y), fast)
            with torch.no_grad():
                fast = [w.requires_grad_() for w in torch._foreach_add(fast, slopes, alpha=-0.01)]
        return list(torch.autograd.grad(F.mse_loss(nets.run_with(fast, x), y), fast))

    def step(held: Any = index) -> None:
        total: list[Tensor] = []
        for x, y in tasks:
            slopes = adapt(x, y)
            total = slopes if not total else list(torch._foreach_add(total, slopes))
            if not fixed:
                gc.collect()
        for w, slope in zip(weights, total):
            w.grad = slope
        optimizer.step()
        optimizer.zero_grad()

    return Program(step)


# ---------------------------------------------------------------- learners: what the device does


@case("fp32 matmul", 'torch.set_float32_matmul_precision("high")', **TRIED)
def views_decorrelated_in_fp32(s: Setting, fixed: bool) -> Program:
    """Two views of each sample, and a loss that keeps features from repeating each other, in the default precision."""
    rows, seen, dim = s.pick(2048, 8), s.pick(2048, 8), s.pick(4096, 16)
    with torch.device(s.device):
        model = nets.Projector(seen, dim)
    a, b = (torch.randn(rows, seen, device=s.device) for _ in "ab")
    optimizer = _adamw(model)

    def step() -> None:
        optimizer.zero_grad()
        model(a, b).backward()
        optimizer.step()

    return Program(step, functools.partial(precision, "high" if fixed else "highest"))


@case("NCHW convolution", "the network in channels_last, and no .contiguous() behind permute", **TRIED)
def centers_channels_first(s: Setting, fixed: bool) -> Program:
    """Ships found by their middles in pictures of eight bands, which come with their bands last."""
    batch, side = s.pick(16, 2), s.pick(512, 32)
    model = s.place(lambda: nets.CenterNet(8, s.pick(256, 16), s.pick(3, 2), s.pick(2, 1), 8))
    model = model.to(memory_format=torch.channels_last) if fixed else model
    pictures, marks = _bf16(s, batch, side, side, 8), (torch.rand(batch, 8, side // 4, side // 4) < 0.01).to(s.device)
    marks = marks.to(torch.bfloat16)
    marks = marks.contiguous(memory_format=torch.channels_last) if fixed else marks
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=s.cuda)

    def step() -> None:
        images = pictures.permute(0, 3, 1, 2)
        heat, size = model(images if fixed else images.contiguous())
        loss = F.binary_cross_entropy_with_logits(heat, marks) + 0.1 * F.smooth_l1_loss(size, marks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return Program(step)


@case("unfused optimizer", "the same update over lists of weights", **TRIED | {"steps": 7})
def adan_of_the_paper(s: Setting, fixed: bool) -> Program:
    """Adapters, norms and biases of a network that rests otherwise, moved by an optimizer out of a paper."""
    dim, heads, narrow = s.pick(1024, 16), s.pick(16, 2), s.pick(64, 8)
    layers = s.place(lambda: nn.Sequential(*(nets.AdaptedLayer(dim, heads, narrow) for _ in range(s.pick(14, 2)))))
    optimizer = nets.Adan(nets.learning_parts(layers), lr=1e-4, lists=fixed)
    x, y = _bf16(s, s.pick(12, 2), s.pick(512, 4), dim), _bf16(s, s.pick(12, 2), s.pick(512, 4), dim)

    def step() -> None:
        F.mse_loss(layers(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step)


@case("unfused pointwise chain", "F.selu in place of its formula", **TRIED)
def selu_of_the_paper(s: Setting, fixed: bool) -> Program:
    """Cells sorted by what shines on them; a network that keeps itself even, by the formula it was published with."""
    dim, rows, kinds = s.pick(1024, 16), s.pick(32_768, 4), s.pick(16, 8)
    act = F.selu if fixed else nets.selu_of_the_paper
    net = s.place(lambda: nets.SelfNormalizing(dim, s.pick(10, 2), kinds, act))
    x, labels, optimizer = _bf16(s, rows, dim), _ints(s, kinds, rows), _adamw(net)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), labels).backward()
        optimizer.step()

    return Program(step)


@case("gradient memsets", "slopes that begin as None", **TRIED)
def slopes_begun_with_zeros(s: Setting, fixed: bool) -> Program:
    """What people bought, through a narrow middle and back; every step begins with slopes of zeros, made anew."""
    items, dim, rows = s.pick(98_304, 64), s.pick(4096, 16), s.pick(384, 4)
    model = s.place(lambda: nets.History(items, dim))
    bought = (torch.rand(rows, items, device=s.device) < 0.01).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=s.cuda)

    def step() -> None:
        for p in model.parameters():
            p.grad = None if fixed else torch.zeros_like(p)
        told = F.log_softmax(model(bought), dim=-1)
        (-(told * bought).sum(-1).mean()).backward()
        optimizer.step()

    return Program(step)


@case("needless recompute", "use_checkpoint=False: memory is free", **TRIED)
def labels_for_pixels_computed_twice(s: Setting, fixed: bool) -> Program:
    """A label for every pixel; blocks go through an autograd function that forgets what is inside of them."""
    batch, places, kinds, dim = s.pick(16, 2), s.pick(1024, 4), s.pick(24, 8), s.pick(768, 16)
    model = s.place(lambda: nets.Segmenter(dim, s.pick(12, 2), s.pick(8, 2), kinds, use_checkpoint=not fixed))
    patches, labels = _bf16(s, batch, places, 768), _ints(s, kinds, batch, places, 16)
    optimizer = _adamw(model)

    def step() -> None:
        F.cross_entropy(model(patches).flatten(0, 2), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step)


@case(
    "recompilation", "the temperature as a tensor", compiles=True, both=True,
    **ONE | {"warmup": 3, "steps": 12, "planted_steps": 5},
)  # fmt: skip
def teacher_colder_every_step(s: Setting, fixed: bool) -> Program:
    """A network agrees with its own past, which is made surer step by step; a compiled function does that."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 256
    rows, seen, wide, kinds = s.pick(8192, 4), s.pick(2048, 8), s.pick(4096, 16), s.pick(4096, 16)
    student, teacher = (s.place(lambda: nets.stack(seen, wide, wide, wide, wide // 4, kinds)) for _ in "ab")
    teacher.requires_grad_(False)
    sharpen = torch.compile(nets.sharpened, backend=compiler(s), dynamic=False)
    a, b, center = _bf16(s, rows, seen), _bf16(s, rows, seen), torch.zeros(kinds, device=s.device)
    optimizer, turn = _adamw(student), itertools.count()

    def step() -> None:
        temp: Any = 0.07 - 0.03 * next(turn) / 1000
        with torch.no_grad():
            out = teacher(a)
            known = sharpen(out, center, torch.full((), temp, device=s.device) if fixed else temp)
            center.lerp_(out.mean(0).float(), 0.1)
        F.cross_entropy(student(b), known).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 0.004)

    return Program(step)


# ---------------------------------------------------------------- well


def _descended(optimizer: torch.optim.Optimizer, losses: Callable[[], Iterator[Tensor]]) -> Callable[[], None]:
    def step() -> None:
        for loss in losses():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


@healthy
def healthy_long_memory(s: Setting, fixed: bool) -> Program:
    """Questions look twice through a memory of 65,536 places."""
    dim = s.pick(2048, 16)
    model = s.place(lambda: nets.Memory(dim, s.pick(16, 2))).eval()
    x, memory = _bf16(s, 1, s.pick(16_384, 4), dim), _bf16(s, 1, s.pick(65_536, 8), dim)
    return _asked(lambda: model(x, memory))


@healthy
def healthy_committee_in_blocks(s: Setting, fixed: bool) -> Program:
    """Four broad networks vote on very many rows, all of them in one product a layer."""
    dim = s.pick(8192, 16)
    committee = nets.Committee(s.pick(4, 2), dim, s.pick(4, 2), s.device)
    x = _bf16(s, s.pick(4096, 4), dim)
    return _asked(lambda: committee(x).mean(0))


@healthy
def healthy_vectors_fetched_beside(s: Setting, fixed: bool) -> Program:
    """Vectors of everything there is, fetched into pinned memory on a stream of their own while the next are made."""
    rows, dim = s.pick(8192, 4), s.pick(8192, 16)
    net = s.place(lambda: nets.stack(*([dim] * s.pick(9, 3)), s.pick(1024, 8))).eval()
    x, side = _bf16(s, rows, dim), torch.cuda.Stream() if s.cuda else None
    room = [s.pinned(torch.empty(rows, s.pick(1024, 8), dtype=torch.bfloat16)) for _ in range(2)]
    turn = itertools.cycle(room)

    def embed() -> None:
        found = net(x)
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
            found.record_stream(side)
        with torch.cuda.stream(side) if side is not None else nullcontext():
            next(turn).copy_(found, non_blocking=True)

    return _asked(embed)


@healthy
def healthy_modes_in_tf32(s: Setting, fixed: bool) -> Program:
    """The slowest modes of a large structure by repeated products in fp32 tensors, which TF32 may round."""
    size, modes = s.pick(16_384, 8), s.pick(4096, 4)
    a = torch.randn(size, size, device=s.device) / (2 * size**0.5)
    x = torch.randn(size, modes, device=s.device)

    @torch.no_grad()
    def iterate() -> Tensor:
        y = x
        for _ in range(s.pick(3, 2)):
            y = a @ y
        return y

    return Program(iterate, functools.partial(precision, "high"))


@healthy
def healthy_two_halves_of_a_batch(s: Setting, fixed: bool) -> Program:
    """A broad network over two halves of a batch, each of which fills the device."""
    rows, wide = s.pick(16_384, 4), s.pick(8192, 16)
    net = s.place(lambda: nets.stack(wide, wide, wide, wide // 8))
    halves = [_bf16(s, rows, wide) for _ in range(2)]
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, fused=s.cuda)
    return Program(_descended(optimizer, lambda: (0.5 * net(half).square().mean() for half in halves)))
