"""A twenty-fifth suite: 26 scripts with one cause each, no cause twice, and eight programs that are well.

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
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import twentyfifthnets as nets
from cases import Prefetch, Program, Setting, case, compiler, end_workers, graphed, precision
from eighteenth import LINES, ONE
from nineteenth import _asked, _filled
from ninth import _bf16, _ints
from tenth import TRIED
from torch import Tensor
from torch.utils.data import DataLoader

EXPECTED: dict[str, tuple[str, ...]] = {
    "sketches_by_two_workers": ("data-loader",),
    "genomes_on_a_share_of_the_cores": ("cpu-affinity", "data-loader"),
    "events_counted_in_numpy": ("host-code", "data-loader"),
    "replay_mapped_from_a_file": ("pageable-copies",),
    "activations_saved_on_the_host": ("exposed-copies", "weight-streaming", "host-round-trip"),
    "cameras_moved_one_by_one": ("small-copies", "pageable-copies"),
    "tokens_that_stand_out_by_mask": ("value-read", "synchronize"),
    "hops_waited_for": ("synchronize",),
    "ratios_of_every_weight": ("logging", "value-read"),
    "ridge_solved_by_numpy": ("host-round-trip",),
    "chains_moved_eagerly": ("launch-bound",),
    "slow_slopes_one_by_one": ("tensor-loop", "launch-bound"),
    "attributions_point_by_point": ("micro-batches", "small-batch"),
    "amsgrad_after_the_paper": ("unfused-optimizer",),
    "chunks_that_release_memory": ("allocator",),
    "request_that_collects": ("garbage-collection",),
    "twins_correlated_in_fp32": ("tensor-cores-unused",),
    "detector_channels_first": ("channels-first",),
    "residues_by_the_reference_kernel": ("unfused-attention",),
    "masses_in_10001_bins": ("misaligned-sizes",),
    "surprise_by_one_hot": ("logits",),
    "slopes_begun_as_zeros": ("zero-grad",),
    "layers_run_again": ("recompute",),
    "panoramas_in_squares": ("padding",),
    "film_graded_under_a_stopwatch": ("graph-breaks",),
    "pictures_told_twice": ("redundant-pass",),
}
MISTAKEN: dict[str, str] = {
    "healthy_large_filters": "convolutions in channels_first, a small batch",
    "healthy_two_broad_batches": "small batches one after the other",
    "healthy_demand_in_tf32": "fp32 products without tensor cores",
    "healthy_prompts_of_a_broad_model": "padding, unfused attention, a small batch",
    "healthy_scores_read_a_turn_later": "a value read or a copy in every step",
    "healthy_columns_by_workers": "a data loader that is waited for",
    "healthy_experts_side_by_side": "padding, many small products",
    "healthy_inverse_by_products": "launches one by one, fp32 products",
}
LOADED: dict[str, Any] = ONE | {"warmup": 8, "steps": 14, "planted_steps": 10}
"""Workers need some steps until what they made ahead is used up."""
SHORT: dict[str, Any] = TRIED | {"steps": 7}
healthy = case("none", "nothing", **LINES)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _sgd(s: Setting, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, fused=s.cuda)


# ---------------------------------------------------------------- input


@case("data loader", "num_workers=2 → 12", **LOADED)
def sketches_by_two_workers(s: Setting, fixed: bool) -> Program:
    """Drawings told apart, put on a canvas stroke by stroke by two workers."""
    side, batch = s.pick(128, 16), s.pick(128, 2)
    data = nets.Sketches(side, s.pick(14, 2), s.pick(160, 8))
    loader = DataLoader(
        data, batch_size=batch, num_workers=s.pick(12 if fixed else 2, 1), pin_memory=s.cuda, persistent_workers=True
    )
    it: Any = iter(loader)
    net = s.place(lambda: nets.Tokens(64, s.pick(512, 16), s.pick(8, 2), s.pick(6, 1), 340))
    opt = _adamw(net)

    def step() -> None:
        canvas, label = next(it)
        canvas = canvas.to(s.device, non_blocking=True).to(torch.bfloat16).div_(255)
        loss = F.cross_entropy(net(nets.patches(canvas[:, None], 8)), label.to(s.device, non_blocking=True))
        opt.zero_grad()
        loss.backward()
        opt.step()

    return Program(step, close=lambda: end_workers(it))


@case("cpu affinity", "one rank on this host: let it use every core", **LOADED)
def genomes_on_a_share_of_the_cores(s: Setting, fixed: bool) -> Program:
    """Stretches of genomes; the launcher believes that sixteen ranks share the host, and gives this one its share."""
    words, dim = s.pick(1024, 8), s.pick(768, 16)
    scope = functools.partial(nets.bound_to_share, 0, 1 if fixed else 16)
    with scope():
        loader = DataLoader(
            nets.Genomes(words), s.pick(32, 2), num_workers=s.pick(8, 1), pin_memory=s.cuda, persistent_workers=True
        )
        stream: Any = iter(loader)
    embed = s.place(lambda: nn.Embedding(4096, dim // 8))
    model = s.place(lambda: nets.Tokens(dim, dim, s.pick(12, 2), s.pick(8, 1), 12))
    optimizer = torch.optim.AdamW([*embed.parameters(), *model.parameters()], lr=1e-4, fused=True)

    def train_batch() -> None:
        reads, species = (part.to(s.device, non_blocking=True) for part in next(stream))
        pieces = embed(reads).unflatten(2, (-1, 8)).flatten(3).flatten(1, 2)
        F.cross_entropy(model(pieces), species).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(train_batch, scope, close=lambda: end_workers(stream))


@case("host preprocessing", "events are copied, and counted on the device by index_add_", **SHORT)
def events_counted_in_numpy(s: Setting, fixed: bool) -> Program:
    """What a camera of events saw, counted for each pixel and slice of time before a network looks at it."""
    batch, slices, height, width = s.pick((24, 4, 240, 304), (2, 2, 16, 32))
    grid = nets.EventGrid(batch, slices, height, width)
    seen = [grid.drawn(s.pick(400_000, 64), seed) for seed in range(3)]
    events, order = itertools.cycle([(s.pinned(torch.from_numpy(one)),) for one in seen]), itertools.cycle(seen)
    ahead = iter(Prefetch(s, events)) if fixed else None
    rooms = itertools.cycle([s.pinned(torch.zeros(grid.shape)) for _ in range(3)])
    model = s.place(lambda: nets.Tokens(slices * 256, s.pick(1024, 16), s.pick(16, 2), s.pick(10, 1), 16))
    gestures, optimizer = _ints(s, 16, batch), _adamw(model)

    def step() -> None:
        if ahead is not None:
            frames = grid.on_device(next(ahead)[0])
        else:
            frames = grid.in_numpy(next(order), next(rooms)).to(s.device, non_blocking=True)
        optimizer.zero_grad()
        F.cross_entropy(model(nets.patches(frames.to(torch.bfloat16), 16)), gestures).backward()
        optimizer.step()

    return Program(step)


# ---------------------------------------------------------------- copies


@case("pageable copy", "pin what is read, and copy the next batch ahead with non_blocking=True", **TRIED)
def replay_mapped_from_a_file(s: Setting, fixed: bool) -> Program:
    """What an agent saw lies in a file that is mapped into memory; each batch goes to the device from there."""
    shape = s.pick((3, 1024, 9, 84, 84), (3, 2, 9, 24, 24))
    file = tempfile.TemporaryFile()  # noqa: SIM115 (mapped while the program runs)
    replay = np.memmap(file, np.uint8, "w+", shape=shape)
    replay[:] = np.random.default_rng(0).integers(0, 255, shape, np.uint8)
    pinned: Iterator[Any] = itertools.cycle([(s.pinned(torch.from_numpy(np.array(one))),) for one in replay])
    ahead, turns = iter(Prefetch(s, pinned)) if fixed else None, itertools.cycle(range(3))
    critic = s.place(lambda: nets.Tokens(9 * 144, s.pick(512, 16), s.pick(8, 2), s.pick(4, 1), 6))
    target, optimizer = _bf16(s, shape[1], 6), _adamw(critic)

    def update() -> None:
        obs = next(ahead)[0] if ahead is not None else torch.from_numpy(replay[next(turns)]).to(s.device)
        q = critic(nets.patches(obs.to(torch.bfloat16).div_(255), 12))
        F.mse_loss(q, target).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(update, close=file.close)


@case("activations kept on the host", "no save_on_cpu: memory is free", **SHORT)
def activations_saved_on_the_host(s: Setting, fixed: bool) -> Program:
    """Weather learned; what the first layers need for their slopes is kept on the host, as a recipe advises."""
    dim, batch, places = s.pick(1024, 16), s.pick(8, 2), s.pick(1024, 4)
    model = s.place(lambda: nets.Offloading(dim, s.pick(16, 2), s.pick(10, 1), away=not fixed))
    now, later, optimizer = _bf16(s, batch, places, dim), _bf16(s, batch, places, dim), _adamw(model)

    def step() -> None:
        loss = F.mse_loss(model(now), later)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step)


@case("many small copies", "stack what is known of the cameras, and copy it in three pinned tensors", **TRIED)
def cameras_moved_one_by_one(s: Setting, fixed: bool) -> Program:
    """A scene out of many views; what is known of each camera goes to the device field by field."""
    views, places, piece = s.pick(192, 3), s.pick(64, 4), s.pick(768, 12)
    known = nets.cameras(views)
    model = s.place(lambda: nets.ViewsToScene(piece, s.pick(768, 16), s.pick(12, 2), s.pick(8, 1), 32))
    pictures, wanted, optimizer = _bf16(s, views, places, piece), _bf16(s, views, places, 32), _adamw(model)

    def moved(name: str) -> Tensor:
        if fixed:
            return s.pinned(torch.stack([view[name] for view in known])).to(s.device, non_blocking=True)
        return torch.stack([view[name].to(s.device) for view in known])

    def step() -> None:
        scene = model(pictures, moved("pose"), moved("intrinsics"), moved("range"))
        F.l1_loss(scene, wanted).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step)


# ---------------------------------------------------------------- who waits for whom


@case("synchronization", "index_select and index_copy_ by the indices that topk gives", **TRIED)
def tokens_that_stand_out_by_mask(s: Setting, fixed: bool) -> Program:
    """Tokens of a film; half of them go by each layer, which is said by a mask."""
    num, dim = s.pick(8192, 16), s.pick(1024, 16)
    layers = s.place(
        lambda: nn.Sequential(*(nets.SkippingLayer(dim, 0.5, by_mask=not fixed) for _ in range(s.pick(32, 2))))
    ).eval()
    x = _bf16(s, num, dim)
    return _asked(lambda: layers(x.clone()))


@case("synchronization", "the caller waits once, for all hops", **TRIED)
def hops_waited_for(s: Setting, fixed: bool) -> Program:
    """Voices freed of noise hop by hop, each out of a graph; every hop is waited for by an event."""
    hops, voices, hop, dim, depth = s.pick((64, 512, 256, 2048, 3), (3, 2, 8, 16, 2))
    model = s.place(lambda: nets.HopEnhancer(hop, dim, depth)).eval()
    noisy, clean = _bf16(s, hops, voices, hop), _bf16(s, hops, voices, hop)
    states, x = torch.zeros_like(_bf16(s, depth, voices, dim)), _bf16(s, voices, hop)
    out = torch.zeros_like(x)

    @torch.no_grad()
    def enhance() -> None:
        out.copy_(model(x, states))

    run = graphed(enhance) if s.cuda else enhance

    @torch.no_grad()
    def step() -> None:
        for i in range(hops):
            x.copy_(noisy[i])
            run()
            clean[i].copy_(out)
            if s.cuda and not fixed:
                done = torch.cuda.Event()
                done.record()
                done.synchronize()

    return Program(step)


@case("synchronous logging", "a row every hundredth step", **SHORT)
def ratios_of_every_weight(s: Setting, fixed: bool) -> Program:
    """A model of names; how far each weight moves beside how large it is goes into a table in every step."""
    vocab, batch, length = s.pick(4096, 32), s.pick(16, 2), s.pick(512, 4)
    model = s.place(lambda: nets.NextWord(vocab, s.pick(768, 16), s.pick(12, 2), s.pick(8, 1)))
    file = tempfile.TemporaryFile("w", newline="")  # noqa: SIM115 (open while the program runs)
    ratios = nets.UpdateRatios(dict(model.named_parameters()), 1e-4, file, every=100 if fixed else 1)
    ids, optimizer = _ints(s, vocab, batch, length), _adamw(model)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten()).backward()
        ratios()
        optimizer.step()

    return Program(step, close=file.close)


@case("round trip through the host", "solve on the device, by Cholesky", **SHORT)
def ridge_solved_by_numpy(s: Setting, fixed: bool) -> Program:
    """Few examples of new kinds: features by a network, and a ridge over them that is solved in closed form."""
    support, queries, places, piece, ways = s.pick((1024, 1024, 16, 256, 64), (12, 4, 2, 8, 4))
    dim = s.pick(768, 16)
    net = s.place(lambda: nets.Tokens(piece, dim, s.pick(12, 2), s.pick(6, 1), dim)).eval()
    pieces = _bf16(s, support + queries, places, piece)
    wanted = F.one_hot(_ints(s, ways, support), ways).float()
    solve = nets.ridge_by_cholesky if fixed else nets.ridge_in_numpy
    eye = torch.eye(support, device=s.device)

    @torch.inference_mode()
    def adapt() -> Tensor:
        known, asked = net(pieces).float().split([support, queries])
        weights = solve(torch.addmm(eye, known, known.T, alpha=1 / dim), wanted)
        return asked @ (known.T @ weights)

    return Program(adapt, functools.partial(precision, "high"))


# ---------------------------------------------------------------- the host's own time


@case("host-bound", "the whole move out of a CUDA graph", **SHORT)
def chains_moved_eagerly(s: Setting, fixed: bool) -> Program:
    """Weights of small networks drawn by Hamiltonian Monte Carlo, many chains at once, an op at a time."""
    chains, rows, seen, hidden, rounds = s.pick((64, 512, 64, 32, 80), (2, 8, 4, 3, 3))
    draw = functools.partial(torch.randn, device=s.device)
    weights = (draw(chains, seen, hidden) * 0.1, draw(chains, hidden, 1) * 0.1)
    x, minus_y = draw(rows, seen), -draw(rows, 1).sign()
    move = torch.no_grad()(lambda: nets.hamiltonian_step(weights, x, minus_y, rounds, 0.01))
    with precision("high"):
        run = graphed(move) if fixed and s.cuda else move
    return Program(run, functools.partial(precision, "high"))


@case("host-bound", "torch._foreach_ over all slopes", **SHORT)
def slow_slopes_one_by_one(s: Setting, fixed: bool) -> Program:
    """Sums learned by a small transformer; what slopes were like for long is added to each of them by itself."""
    vocab, batch, length = s.pick(1024, 16), s.pick(32, 2), s.pick(256, 4)
    model = s.place(lambda: nets.NextWord(vocab, s.pick(512, 16), s.pick(8, 2), s.pick(24, 2)))
    ids, optimizer, slow = _ints(s, vocab, batch, length), _adamw(model), nets.SlowGradients(model)
    amplify = slow.together if fixed else slow.one_by_one

    def step() -> None:
        F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten()).backward()
        amplify()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step)


@case("small batch", "all points of the path in one batch", **SHORT)
def attributions_point_by_point(s: Setting, fixed: bool) -> Program:
    """Which patches made a network answer as it did: slopes along a path, a pass for each of its points."""
    num, places, piece, points = s.pick((4, 196, 768, 16), (2, 4, 12, 3))
    model = s.place(lambda: nets.Tokens(piece, s.pick(768, 16), s.pick(12, 2), s.pick(8, 1), 1000)).eval()
    model.requires_grad_(False)
    pieces, kinds = _bf16(s, num, places, piece), _ints(s, 1000, num)
    alphas = [(i + 0.5) / points for i in range(points)]
    shares = torch.tensor(alphas, device=s.device, dtype=torch.bfloat16)

    def slopes(at: Tensor, wanted: Tensor) -> Tensor:
        at = at.requires_grad_()
        return torch.autograd.grad(model(at).gather(1, wanted[:, None]).sum(), at)[0]

    def integrated() -> Tensor:
        if fixed:
            path = (shares[:, None, None, None] * pieces).flatten(0, 1)
            found = slopes(path, kinds.repeat(points)).unflatten(0, (points, num)).float().sum(0)
        else:
            found = torch.zeros(pieces.shape, device=s.device)
            for share in shares.unbind(0):
                found += slopes(share * pieces, kinds)
        return (found / points * pieces).sum(-1)

    return Program(integrated)


@case("unfused optimizer", "torch.optim.AdamW(amsgrad=True, fused=True)", **SHORT)
def amsgrad_after_the_paper(s: Setting, fixed: bool) -> Program:
    """Traffic foretold; an optimizer that somebody typed in from a paper, weight by weight."""
    batch, places, piece = s.pick((24, 256, 64), (2, 4, 8))
    model = s.place(lambda: nets.Tokens(piece, s.pick(768, 16), s.pick(12, 2), s.pick(12, 2), 64))
    if fixed:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, amsgrad=True, fused=True)
    else:
        optimizer = nets.AmsGrad(model.parameters(), lr=1e-4)
    past, soon = _bf16(s, batch, places, piece), _bf16(s, batch, 64)

    def step() -> None:
        optimizer.zero_grad()
        F.mse_loss(model(past), soon).backward()
        optimizer.step()

    return Program(step)


@case("allocator", "no empty_cache after each chunk", **ONE)
def chunks_that_release_memory(s: Setting, fixed: bool) -> Program:
    """What changed between two passes of a satellite, chunk by chunk; a decorator gives memory back after each."""
    chunks, num, places, piece = s.pick((4, 32, 784, 256), (2, 2, 4, 8))
    net = s.place(lambda: nets.Tokens(piece, s.pick(768, 16), s.pick(12, 2), s.pick(2, 1), 8)).eval()
    before, after = _bf16(s, chunks, num, places, piece), _bf16(s, chunks, num, places, piece)

    @nets.releases_memory(s.cuda and not fixed)
    def changed(old: Tensor, new: Tensor) -> Tensor:
        return net(torch.where(new > old, new, -old)).argmax(-1)

    return _asked(lambda: [changed(old, new) for old, new in zip(before, after)])


@case("garbage collection", "no gc.collect() after each request", **ONE | {"steps": 10})
def request_that_collects(s: Setting, fixed: bool) -> Program:
    """An assistant that keeps all conversations in memory, and tidies up after each batch of requests."""
    kept = nets.conversations(s.pick(24_000, 10))
    vocab, batch, length = s.pick(16_384, 32), s.pick(32, 2), s.pick(512, 4)
    model = s.place(lambda: nets.NextWord(vocab, s.pick(1024, 16), s.pick(16, 2), s.pick(6, 1))).eval()
    ids = _ints(s, vocab, batch, length)

    @torch.inference_mode()
    def handle(held: Any = kept) -> Tensor:
        try:
            hidden = model.trunk(model.embed(ids))
            return model.unembed(hidden[:, -1]).argmax(-1)
        finally:
            if not fixed:
                gc.collect()

    return Program(handle)


# ---------------------------------------------------------------- kernels


@case("fp32 matmul", "the products of both views in bf16, as they come", **TRIED)
def twins_correlated_in_fp32(s: Setting, fixed: bool) -> Program:
    """Two views of the same things; how their features go together is worked out in fp32, to be on the safe side."""
    rows, seen, wide = s.pick(4096, 8), s.pick(2048, 8), s.pick(8192, 16)
    head = s.place(lambda: nets.TwinHead(seen, wide, in_fp32=not fixed))
    views, optimizer = _bf16(s, rows, seen), _sgd(s, head)

    def step() -> None:
        optimizer.zero_grad()
        head(views).backward()
        optimizer.step()

    return Program(step)


@case("NCHW convolution", "network and pictures in channels_last", **TRIED)
def detector_channels_first(s: Setting, fixed: bool) -> Program:
    """What lies where in a picture, by stages half of whose channels go through convolutions."""
    side, num = s.pick(256, 32), s.pick(96, 2)
    net = s.place(lambda: nets.Detector(s.pick((64, 128, 256, 512), (8, 8, 16)), s.pick(2, 1), 80))
    images = _bf16(s, num, 3, side, side)
    if fixed:
        net, images = net.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
    cells = side // s.pick(16, 8)
    targets = _ints(s, 80, num, cells, cells)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9, fused=s.cuda)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(images), targets).backward()
        optimizer.step()

    return Program(step)


@case("unfused attention", "no sdpa_kernel(SDPBackend.MATH) around the network", **TRIED)
def residues_by_the_reference_kernel(s: Setting, fixed: bool) -> Program:
    """Hidden residues of proteins; a context that was once entered to compare numbers is still there."""
    num, length = s.pick(16, 2), s.pick(1024, 8)
    model = s.place(lambda: nets.Residues(32, s.pick(768, 16), s.pick(12, 2), s.pick(4, 1), reference=not fixed))
    ids, hidden, optimizer = _ints(s, 32, num, length), _ints(s, 32, num, length), _adamw(model)

    def step() -> None:
        loss = F.cross_entropy(model(ids).flatten(0, 1), hidden.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("misaligned sizes", "47 bins more, in which nothing lies", **TRIED)
def masses_in_10001_bins(s: Setting, fixed: bool) -> Program:
    """Molecules told by their mass spectra, from 0 to 1,000 by tenths, both ends included."""
    bins, rows, wide = s.pick(10_001, 17), s.pick(32_768, 4), s.pick(2048, 16)
    more = s.pick(47, 7) if fixed else 0
    net = s.place(lambda: nets.perceptron(bins + more, wide, wide, 512))
    spectra = F.pad(_bf16(s, rows, bins).abs_(), (0, more))
    kinds, optimizer = _ints(s, 512, rows), _adamw(net)

    def step() -> None:
        F.cross_entropy(net(spectra), kinds).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step)


@case("logits laid out for the loss", "F.cross_entropy", **TRIED)
def surprise_by_one_hot(s: Setting, fixed: bool) -> Program:
    """Notes of music foretold; the loss is a sum over all notes that there could be."""
    vocab, batch, length = s.pick(32_000, 48), s.pick(32, 2), s.pick(512, 4)
    model = s.place(lambda: nets.NextWord(vocab, s.pick(512, 16), s.pick(8, 2), s.pick(8, 1)))
    notes, optimizer = _ints(s, vocab, batch, length + 1), _adamw(model)
    criterion: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy if fixed else nets.surprise_by_one_hot

    def step() -> None:
        optimizer.zero_grad()
        criterion(model(notes[:, :-1]).flatten(0, 1), notes[:, 1:].flatten()).backward()
        optimizer.step()

    return Program(step)


# ---------------------------------------------------------------- memory, and what is done twice


@case("gradient memsets", "p.grad = None", **TRIED)
def slopes_begun_as_zeros(s: Setting, fixed: bool) -> Program:
    """Yields foretold from many measurements; slopes begin as new zeros in every step."""
    dim, rows = s.pick(6144, 8), s.pick(384, 4)
    net = s.place(lambda: nets.perceptron(*([dim] * s.pick(21, 3))))
    measured, yields, optimizer = _bf16(s, rows, dim), _bf16(s, rows, dim), _sgd(s, net)

    def step() -> None:
        for p in net.parameters():
            p.grad = None if fixed else torch.zeros_like(p)
        F.huber_loss(net(measured), yields).backward()
        optimizer.step()

    return Program(step)


@case("needless recompute", "layers as they are: memory is free", **TRIED)
def layers_run_again(s: Setting, fixed: bool) -> Program:
    """Turns of a conversation ranked; an autograd function of somebody's own runs each layer again for its slopes."""
    dim, batch, length = s.pick(1024, 16), s.pick(16, 2), s.pick(512, 4)
    model = s.place(lambda: nets.Sparing(nets.Trunk(dim, s.pick(16, 2), s.pick(8, 2)), spare=not fixed))
    turns, better, optimizer = _bf16(s, batch, length, dim), _bf16(s, dim), _adamw(model)

    def step() -> None:
        score = model(turns)[:, -1] @ better
        optimizer.zero_grad()
        F.softplus(score[::2] - score[1::2]).mean().backward()
        optimizer.step()

    return Program(step)


@case("padding", "fill up to the highest of the batch", **TRIED)
def panoramas_in_squares(s: Setting, fixed: bool) -> Program:
    """Places recognized by panoramas, which are three times as wide as high and are put into squares."""
    columns, batch, piece = s.pick(32, 8), s.pick(16, 2), s.pick(768, 12)
    heights = np.random.default_rng(4).integers(columns // 4, columns // 3 + 1, batch)
    rows = int(heights.max()) if fixed else columns
    real, share = _filled(s, heights * columns, rows * columns)
    model = s.place(lambda: nets.Panoramas(piece, s.pick(1024, 16), s.pick(16, 2), s.pick(8, 1), 365, columns, columns))
    whole = _bf16(s, batch, columns, columns, piece)
    pieces = (whole[:, :rows] * real.view(batch, rows, columns, 1)).contiguous()
    places, optimizer = _ints(s, 365, batch), _adamw(model)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(pieces, real), places).backward()
        optimizer.step()

    return Program(step, facts={"padding": [{"argument": "patch_mask", "real_frac": share}]})


@case("a pass that is not needed", "count hits in what the loss was made of", **TRIED)
def pictures_told_twice(s: Setting, fixed: bool) -> Program:
    """Leaves told apart; how often the network is right is asked of the network once more."""
    num, places, piece = s.pick((64, 196, 768), (2, 4, 12))
    model = s.place(lambda: nets.Tokens(piece, s.pick(768, 16), s.pick(12, 2), s.pick(8, 1), 100))
    leaves, kinds, optimizer = _bf16(s, num, places, piece), _ints(s, 100, num), _adamw(model)
    hits = torch.zeros((), device=s.device, dtype=torch.long)

    def step() -> None:
        optimizer.zero_grad()
        out = model(leaves)
        loss = F.cross_entropy(out, kinds)
        hits.add_(((out if fixed else model(leaves)).argmax(1) == kinds).sum())
        loss.backward()
        optimizer.step()

    return Program(step)


# ---------------------------------------------------------------- what compiles


@case("graph break", "no stopwatch inside of what is compiled", compiles=True, both=True, **ONE)
def film_graded_under_a_stopwatch(s: Setting, fixed: bool) -> Program:
    """Shots of a film made ready for a screen by compiled code, which notes when it is half through."""
    torch._dynamo.reset()
    frames = torch.rand(3, s.pick(24, 1), s.pick(1080, 8), s.pick(1920, 8), device=s.device)
    exposures = [torch.full((), share, device=s.device) for share in np.linspace(0.8, 1.2, s.pick(12, 2)).tolist()]
    grade = torch.compile(nets.graded, backend=compiler(s), dynamic=False)
    reached = nets.unnoted if fixed else nets.Stopwatch()

    @torch.no_grad()
    def step() -> None:
        for exposure in exposures:
            grade(frames, exposure, reached)

    return Program(step)


# ---------------------------------------------------------------- well


def _learned(optimizer: torch.optim.Optimizer, losses: Callable[[], Iterator[Tensor]]) -> Callable[[], None]:
    """Slopes of all losses, added up."""

    def step() -> None:
        for loss in losses():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


@healthy
def healthy_large_filters(s: Setting, fixed: bool) -> Program:
    """Textures described by wide filters of five by five, in channels_last."""
    wide, num, side = s.pick(1024, 8), s.pick(32, 2), s.pick(32, 8)
    net = s.place(lambda: nets.large_filters(wide, s.pick(4, 1))).to(memory_format=torch.channels_last).eval()
    x = _bf16(s, num, wide, side, side).to(memory_format=torch.channels_last)
    return _asked(lambda: net(x))


@healthy
def healthy_two_broad_batches(s: Setting, fixed: bool) -> Program:
    """A broad network whose slopes are added up over two batches, each as large as the device likes."""
    rows, wide = s.pick(8192, 4), s.pick(16_384, 16)
    net = s.place(lambda: nets.perceptron(wide, wide, wide // 4))
    parts, optimizer = _bf16(s, 2, rows, wide), _sgd(s, net)
    return Program(_learned(optimizer, lambda: (net(part).square().mean() / 2 for part in parts)))


@healthy
def healthy_demand_in_tf32(s: Setting, fixed: bool) -> Program:
    """Demand foretold by a broad network whose numbers stay in fp32, and its products on tensor cores."""
    rows, wide = s.pick(8192, 4), s.pick(12_288, 16)
    with torch.device(s.device):
        net = nets.perceptron(wide, wide, 256)
    past, soon = torch.randn(rows, wide, device=s.device), torch.randn(rows, 256, device=s.device)
    step = _learned(_sgd(s, net), lambda: iter([F.mse_loss(net(past), soon)]))
    return Program(step, functools.partial(precision, "high"))


@healthy
def healthy_prompts_of_a_broad_model(s: Setting, fixed: bool) -> Program:
    """Two long prompts through layers of a very broad model, all at once."""
    dim = s.pick(8192, 16)
    model = s.place(lambda: nn.Sequential(*(nets.BroadBlock(dim, s.pick(64, 2)) for _ in range(s.pick(2, 1))))).eval()
    prompts = _bf16(s, 2, s.pick(4096, 4), dim)
    return _asked(lambda: model(prompts))


@healthy
def healthy_scores_read_a_turn_later(s: Setting, fixed: bool) -> Program:
    """Rows scored; scores go to pinned memory on a stream of their own, and are read when the next batch runs."""
    rows, wide, answers = s.pick(16_384, 4), s.pick(8192, 16), s.pick(256, 4)
    net = s.place(lambda: nets.perceptron(wide, wide, answers)).eval()
    x, side = _bf16(s, rows, wide), torch.cuda.Stream() if s.cuda else None
    rooms = itertools.cycle([s.pinned(torch.zeros(rows, answers, dtype=torch.bfloat16)) for _ in range(2)])
    sent, told = list[tuple[Any, Tensor]](), list[float]()

    def send(scores: Tensor) -> None:
        room = next(rooms)
        if side is None:
            sent.append((None, room.copy_(scores)))
            return
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            room.copy_(scores, non_blocking=True)
            sent.append((side.record_event(), room))
        scores.record_stream(side)

    def step() -> None:
        send(net(x))
        if len(sent) > 1:
            done, room = sent.pop(0)
            if done is not None:
                done.synchronize()
            told.append(float(room[0, 0]))

    return _asked(step)


@case("none", "nothing", **LINES | {"rounds": 1, "warmup": 8, "steps": 14})
def healthy_columns_by_workers(s: Setting, fixed: bool) -> Program:
    """Columns of a table by workers enough, copied a step ahead, for a network that takes longer."""
    rows, columns, wide = s.pick(8192, 4), s.pick(2048, 8), s.pick(12_288, 16)
    loader = DataLoader(
        nets.PackedRows(rows, columns), None, num_workers=s.pick(6, 1), pin_memory=s.cuda, persistent_workers=True,
        prefetch_factor=3,
    )  # fmt: skip
    feed: Any = iter(loader)
    ahead = iter(Prefetch(s, feed))
    net = s.place(lambda: nets.perceptron(columns, wide, wide, 8))

    def losses() -> Iterator[Tensor]:
        x, kinds = next(ahead)
        yield F.cross_entropy(net(x.to(torch.bfloat16)), kinds)

    return Program(_learned(_sgd(s, net), losses), close=lambda: end_workers(feed))


@healthy
def healthy_experts_side_by_side(s: Setting, fixed: bool) -> Program:
    """Eight experts, as many tokens for each, all of them in one product; three layers."""
    num, dim, hidden = s.pick(8, 2), s.pick(6144, 8), s.pick(16_384, 16)
    layers = s.place(lambda: nn.Sequential(*(nets.Experts(num, dim, hidden) for _ in range(s.pick(3, 1))))).eval()
    tokens = _bf16(s, num, s.pick(1024, 4), dim)
    return _asked(lambda: layers(tokens))


@healthy
def healthy_inverse_by_products(s: Setting, fixed: bool) -> Program:
    """The inverse of a large matrix by nothing but products, each round of which doubles its digits."""
    size = s.pick(8192, 16)
    a = torch.randn(size, size, device=s.device)
    a = torch.eye(size, device=s.device) + a @ a.T / (4 * size)

    @torch.no_grad()
    def inverse() -> Tensor:
        x = a.T / 4
        for _ in range(s.pick(5, 2)):
            x = torch.addmm(x, x @ a, x, beta=2, alpha=-1)
        return x

    return Program(inverse, functools.partial(precision, "high"))
