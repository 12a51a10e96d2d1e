"""A twentieth suite: 32 ordinary scripts with one cause each, in nets and spellings that no suite had; and ten programs
thought to be well, recorded with their Python stacks.

As in the two before, a cause counts where its fix brings 5 % of the planted step and three times what both programs
vary by (half of the two quartile ranges of their step times, added) at least; both are judged from step times alone,
before any rule is asked. ``EXPECTED`` says beforehand by which rule a cause should be named; the names after the first
count as well, since their advice is the same change. A finding over 2 % in a fixed or healthy program is false unless
the advice, done and timed, brings more than noise.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import fresh
import numpy as np
import torch
import torch.nn.functional as F
import twentiethnets as nets
from cases import Prefetch, Program, Setting, case, compiler, end_workers, graphed, precision
from eighteenth import EVERY, LINES, ONE
from nineteenth import _asked, _filled, _learning
from ninth import _bf16, _ints, _optimized
from tenth import TRIED
from torch import Tensor, nn

EXPECTED: dict[str, tuple[str, ...]] = {
    "beats_filtered_in_the_loop": ("data-loader",),
    "visits_parsed_by_a_generator": ("host-code", "data-loader"),
    "scans_unpacked_on_one_core": ("cpu-affinity",),
    "batches_made_by_a_thread": ("host-contention", "host-code", "data-loader"),
    "pictures_uploaded_as_they_come": ("pageable-copies",),
    "features_fetched_in_line": ("exposed-copies",),
    "molecules_moved_piece_by_piece": ("small-copies",),
    "nearness_asked_of_every_batch": ("value-read",),
    "words_timed_one_by_one": ("synchronize",),
    "histograms_of_every_norm": ("logging", "host-round-trip"),
    "priorities_kept_in_numpy": ("host-round-trip",),
    "samples_spoken_one_by_one": ("launch-bound",),
    "anchors_summed_weight_by_weight": ("tensor-loop", "launch-bound"),
    "students_taught_four_by_four": ("micro-batches", "small-batch"),
    "belief_weight_by_weight": ("unfused-optimizer",),
    "frames_drawn_then_emptied": ("allocator",),
    "episodes_then_collected": ("garbage-collection",),
    "rays_in_fp32": ("tensor-cores-unused",),
    "boards_channels_first": ("channels-first",),
    "sounds_attend_as_first_published": ("unfused-attention",),
    "points_joined_to_every_layer": ("misaligned-sizes",),
    "partition_squared_in_fp32": ("logits",),
    "speakers_indexed": ("index-backward",),
    "crossed_features_dense": ("dense-embedding-gradient",),
    "experts_zeroed_in_place": ("zero-grad",),
    "weights_loaded_for_each_customer": ("weight-streaming",),
    "adapters_checkpointed": ("recompute",),
    "answers_rewarded_under_autocast": ("weight-casts",),
    "pairs_filled_to_512": ("padding",),
    "balls_turned_in_steps": ("pointwise-chains",),
    "layers_that_look_before_they_clip": ("graph-breaks", "value-read"),
    "pictures_compiled_for_every_size": ("recompilation",),
}
healthy = case("none", "nothing", **LINES)


# ---------------------------------------------------------------- what is fed


@case("data loader", "num_workers=0 → 8", **ONE | {"warmup": 8, "steps": 12, "planted_steps": 9})
def beats_filtered_in_the_loop(s: Setting, fixed: bool) -> Program:
    """Hearts heard by twelve leads, filtered where the step runs, or by workers."""
    leads, long, num = 12, s.pick(2048, 16), s.pick(8, 1) if fixed else 0
    model = s.place(lambda: nets.Series(leads, 8, s.pick(768, 16), s.pick(12, 2), s.pick(6, 1), 5))
    loader = torch.utils.data.DataLoader(
        nets.Beats(leads, long), s.pick(64, 2), num_workers=num, pin_memory=s.cuda, persistent_workers=num > 0
    )
    feed: Iterator[Any] = iter(loader)

    def loss() -> Tensor:
        heard, kinds = (part.to(s.device, non_blocking=True) for part in next(feed))
        return F.cross_entropy(model(heard.bfloat16()), kinds)

    return Program(_optimized(fresh.adamw(s, model), loss), close=lambda: end_workers(feed))


@case("host code", "parse all lines once, before the loop", **TRIED | {"steps": 7})
def visits_parsed_by_a_generator(s: Setting, fixed: bool) -> Program:
    """Visits to a shop as lines of JSON, parsed by a generator that the loop goes through."""
    each, long = s.pick(64, 2), s.pick(32, 3)
    lines = nets.visits(s.pick(6 * 64, 4), long)
    parts = [lines[i : i + each] for i in range(0, len(lines), each)]
    known = [tuple(s.pinned(part) for part in nets.parsed(lines)) for lines in parts] if fixed else []
    feed: Iterator[Any] = itertools.cycle(known) if fixed else map(nets.parsed, itertools.cycle(parts))
    model = s.place(lambda: nets.Visits(50_000, s.pick(1024, 16), s.pick(16, 2), s.pick(8, 1)))

    def loss() -> Tensor:
        goods, about = (part.to(s.device, non_blocking=True) for part in next(feed))
        return F.cross_entropy(model(goods, about.bfloat16()).flatten(0, 1), (goods % 64).flatten())

    return Program(_optimized(fresh.adamw(s, model), loss))


@case("cpu affinity", "let the process use every core", **ONE)
def scans_unpacked_on_one_core(s: Setting, fixed: bool) -> Program:
    """Compressed scans, unpacked a batch ahead by eight threads, all of them on one core."""
    side, num = s.pick(256, 32), s.pick(24, 2)
    model = s.place(lambda: nets.Seen(1, 16, s.pick(1024, 16), s.pick(16, 2), s.pick(8, 1), 4))
    scope = nullcontext if fixed else functools.partial(fresh._cores, 1)
    with scope():
        pool = ThreadPoolExecutor(8, initializer=lambda: time.sleep(0.01))
        scans = nets.Scans(pool, side, num, s.pinned)
        list(pool.map(lambda _: time.sleep(0.01), range(8)))
    kinds = _ints(s, 4, num)

    def loss() -> Tensor:
        here = next(scans).to(s.device, non_blocking=True)[:, None]
        return F.cross_entropy(model(here.bfloat16() / 4096), kinds)

    return Program(_optimized(fresh.adamw(s, model), loss), scope, close=pool.shutdown)


@case("cpu contention", "workers in processes of their own, in place of a thread", **ONE | {"warmup": 6, "steps": 14})
def batches_made_by_a_thread(s: Setting, fixed: bool) -> Program:
    """Noisy texts made ahead by a thread of the same process, word by word: it and the loop take turns."""
    rows, long, words = s.pick(96, 2), s.pick(96, 4), s.pick(16_000, 64)
    model = s.place(lambda: nets.Words(words, s.pick(512, 16), s.pick(8, 2), s.pick(6, 1), long))
    texts = nets.Noised(rows, long, words)
    loader = torch.utils.data.DataLoader(texts, None, num_workers=s.pick(6, 1), persistent_workers=True)
    source = iter(loader) if fixed else nets.Threaded(texts)
    feed: Iterator[Tensor] = iter(source)

    def loss() -> Tensor:
        ids = next(feed).to(s.device, non_blocking=True)
        return F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())

    close = (lambda: end_workers(feed)) if fixed else source.close
    return Program(_optimized(fresh.adamw(s, model), loss), close=close)


# ---------------------------------------------------------------- copies


@case("pageable copy", "pin the pictures, and copy the next ones ahead with non_blocking=True", **TRIED)
def pictures_uploaded_as_they_come(s: Setting, fixed: bool) -> Program:
    """A server gathers pictures of sixteen requests, moves those of each to the device, and looks at all of them."""
    side, each = s.pick(224, 32), s.pick(8, 1)
    model = s.place(lambda: nets.Seen(3, 16, s.pick(768, 16), s.pick(12, 2), s.pick(12, 1), 1000)).eval()
    rng = np.random.default_rng(0)
    asked = [rng.random((each, 3, side, side), np.float32) for _ in range(s.pick(16, 2))]
    host: Iterator[Any] = itertools.cycle([tuple(s.pinned(torch.from_numpy(one)) for one in asked)])
    here = lambda: tuple(torch.from_numpy(one).to(s.device) for one in asked)
    feed = iter(Prefetch(s, host)) if fixed else (here() for _ in itertools.count())
    return _asked(lambda: model(torch.cat(next(feed)).bfloat16()).softmax(-1).topk(5))


@case("pinned copy on the compute stream", "fetch features on a stream of their own", **TRIED)
def features_fetched_in_line(s: Setting, fixed: bool) -> Program:
    """Features of pictures for a file: they go to pinned memory on the stream that computes."""
    side, num, wide = s.pick(224, 32), s.pick(192, 2), s.pick(1024, 16)
    model = s.place(lambda: nets.Seen(3, 16, wide, s.pick(16, 2), s.pick(6, 1), 8)).eval()
    x = _bf16(s, num, 3, side, side)
    rooms = itertools.cycle(s.pinned(torch.zeros(num, (side // 16) ** 2, wide)) for _ in range(2))
    side_stream = torch.cuda.Stream() if s.cuda and fixed else None

    def step() -> None:
        found, room = model.features(x).float(), next(rooms)
        if side_stream is None:
            room.copy_(found, non_blocking=True)
            return
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            room.copy_(found, non_blocking=True)
        found.record_stream(side_stream)

    return _asked(step)


@case("many small copies", "join the molecules on the host, and move them in four pinned copies", **TRIED)
def molecules_moved_piece_by_piece(s: Setting, fixed: bool) -> Program:
    """Molecules in a list: atoms, bonds and what is known of each go to the device by themselves, and are joined."""
    num, rng = s.pick(160, 3), np.random.default_rng(0)
    draw = lambda n: (
        torch.from_numpy(rng.standard_normal((n, 64), np.float32)), torch.from_numpy(rng.integers(0, n, (2, 2 * n))),
        torch.from_numpy(rng.standard_normal((2 * n, 16), np.float32)), torch.from_numpy(rng.random(1, np.float32)),
    )  # fmt: skip
    listed = [draw(int(n)) for n in rng.integers(20, 60, num)]
    begins = [0, *itertools.accumulate(len(one[0]) for one in listed)]
    graph = torch.repeat_interleave(torch.arange(num), torch.tensor([len(one[0]) for one in listed])).to(s.device)
    shift = torch.repeat_interleave(torch.tensor(begins[:-1]), torch.tensor([2 * len(one[0]) for one in listed]))
    shift = shift.to(s.device)
    joined = lambda parts: tuple(torch.cat(column, 1 if i == 1 else 0) for i, column in enumerate(zip(*parts)))
    packed = tuple(s.pinned(part) for part in joined(listed))
    model = s.place(lambda: nets.Molecules(64, 16, s.pick(512, 8), s.pick(4, 1)))

    def loss() -> Tensor:
        if fixed:
            atoms, bound, bonds, known = (part.to(s.device, non_blocking=True) for part in packed)
        else:
            atoms, bound, bonds, known = joined([tuple(part.to(s.device) for part in one) for one in listed])
        found = model(atoms.bfloat16(), bound + shift, bonds.bfloat16(), graph, num)
        return F.mse_loss(found.float(), known)

    return Program(_optimized(fresh.adamw(s, model), loss))


# ---------------------------------------------------------------- who waits for whom


@case("synchronization", "keep what is told on the device until all batches are through", **TRIED)
def nearness_asked_of_every_batch(s: Setting, fixed: bool) -> Program:
    """A policy learns from eight batches; how far it went from the old one and each loss is asked of every batch."""
    rows, seen, wide, acts = s.pick(24_576, 4), s.pick(256, 4), s.pick(1024, 8), 16
    model = s.place(lambda: nets.Actor(seen, wide, acts))
    now, did, won = _bf16(s, rows, seen), _ints(s, acts, rows), _bf16(s, rows)
    with torch.no_grad():
        old = F.log_softmax(model(now)[0].float(), -1).gather(1, did[:, None])[:, 0]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6, fused=True)
    told = list[Any]()

    def step() -> None:
        told.clear()
        for _ in range(s.pick(8, 2)):
            act, worth = model(now)
            chances = F.log_softmax(act.float(), -1)
            moved = chances.gather(1, did[:, None])[:, 0] - old
            ratio = moved.exp()
            gain = -torch.minimum(ratio * won, ratio.clamp(0.8, 1.2) * won).mean()
            value, spread = F.mse_loss(worth, won), (chances.exp() * chances).sum(-1).mean()
            near = (ratio - 1 - moved).mean()
            numbers = (near, gain, value, spread)
            told.append([part.detach() for part in numbers] if fixed else [part.item() for part in numbers])
            if not fixed and told[-1][0] > 1.5:
                break
            (gain + 0.5 * value + 0.01 * spread).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if fixed:
            told.append(torch.stack([part.float() for row in told for part in row]).tolist())

    return Program(step)


@case("synchronization", "time all words together, or with events that are read later", **TRIED)
def words_timed_one_by_one(s: Setting, fixed: bool) -> Program:
    """A translator writes 32 words out of a graph; how long each took is noted once the device is done with it."""
    run, spent = _translated(s, s.pick(16, 2), s.pick(3, 1)), list[float]()

    def step() -> None:
        spent.clear()
        for _ in range(s.pick(32, 2)):
            began = time.perf_counter()
            run()
            if not fixed:
                s.synchronize()
            spent.append(time.perf_counter() - began)

    return Program(step)


def _translated(s: Setting, num: int, deep: int) -> Any:
    """One more word for each of so many texts."""
    room, read, vocab = s.pick(128, 4), s.pick(256, 4), s.pick(32_000, 64)
    model = s.place(lambda: nets.Translator(vocab, s.pick(1024, 16), s.pick(16, 2), deep, num, room, read)).eval()
    ids, place = _ints(s, vocab, num, 1), torch.zeros(1, dtype=torch.long, device=s.device)
    real = torch.zeros(1, 1, 1, room, dtype=torch.bool, device=s.device)
    real[..., : room // 2] = True

    @torch.no_grad()
    def word() -> None:
        ids.copy_(model(ids, place + room // 2 - 1, real)[:, None])

    return graphed(word) if s.cuda else word


@case("synchronous logging", "look at the histograms every fiftieth step", **TRIED | {"steps": 7})
def histograms_of_every_norm(s: Setting, fixed: bool) -> Program:
    """How the slopes of norms and biases are spread, computed by numpy and written to a file for a board of charts."""
    words, long = s.pick(8192, 64), s.pick(512, 4)
    model = s.place(lambda: nets.Words(words, s.pick(512, 16), s.pick(8, 2), s.pick(8, 1), long))
    ids, optimizer, turns = _ints(s, words, s.pick(24, 2), long), fresh.adamw(s, model), itertools.count(1)
    shown = [(name, p) for name, p in model.named_parameters() if p.dim() == 1]
    file = tempfile.TemporaryFile("w")  # noqa: SIM115 (open while the program runs)

    def step() -> None:
        F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten()).backward()
        turn = next(turns)
        if not fixed or not turn % EVERY:
            for name, p in shown:
                counts, edges = np.histogram(p.grad.float().cpu().numpy(), bins=64)
                print(json.dumps([turn, name, counts.tolist(), edges.tolist()]), file=file)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step, close=file.close)


@case("round trip through the host", "torch.multinomial over priorities on the device", **TRIED | {"steps": 7})
def priorities_kept_in_numpy(s: Setting, fixed: bool) -> Program:
    """Values learned from moves that surprised most: how much each did is kept in numpy, and drawn from there."""
    kept, rows, seen, wide = s.pick(100_000, 32), s.pick(2048, 4), s.pick(128, 4), s.pick(1024, 8)
    moves, won = _bf16(s, kept, seen), torch.randn(kept, device=s.device)
    did = _ints(s, 8, kept)
    model = s.place(lambda: nets.perceptron(seen, wide, wide, wide, 8))
    rng, optimizer = np.random.default_rng(0), fresh.adamw(s, model)
    on_host, on_device = np.ones(kept), torch.ones(kept, device=s.device)

    def drawn() -> tuple[Any, Tensor, Tensor]:
        if fixed:
            which = torch.multinomial(on_device, rows, replacement=True)
            weight = (on_device[which] / on_device.sum() * kept).pow(-0.4)
            return which, which, weight / weight.max()
        chances = on_host / on_host.sum()
        chosen = rng.choice(kept, rows, p=chances)
        weight = (chances[chosen] * kept) ** -0.4
        here = torch.from_numpy((weight / weight.max()).astype(np.float32)).to(s.device)
        return chosen, torch.from_numpy(chosen).to(s.device), here

    def step() -> None:
        for _ in range(s.pick(4, 2)):
            where, which, weight = drawn()
            found = model(moves[which]).float().gather(1, did[which][:, None])[:, 0]
            off = found - won[which]
            (weight * off.square()).mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            surprise = (off.detach().abs() + 1e-3).pow(0.6)
            if fixed:
                on_device[which] = surprise
            else:
                on_host[where] = surprise.cpu().numpy()

    return Program(step)


# ---------------------------------------------------------------- the host's own time


@case("host-bound", "replay the samples from a CUDA graph", **TRIED)
def samples_spoken_one_by_one(s: Setting, fixed: bool) -> Program:
    """Sixty samples of sound for each of 64 voices, each drawn from what the one before makes likely."""
    model, num = s.place(lambda: nets.Voice(256, s.pick(512, 8))).eval(), s.pick(64, 2)
    last, state = _ints(s, 256, num), _bf16(s, num, s.pick(512, 8))

    @torch.no_grad()
    def speak() -> None:
        sample, past, said = last, state, []
        for _ in range(s.pick(60, 3)):
            sample, past = model(sample, past)
            said.append(sample)
        torch.stack(said)
        last.copy_(sample)
        state.copy_(past)

    return Program(graphed(speak) if fixed and s.cuda else speak)


@case("host-bound", "torch._foreach_ over all weights", **TRIED)
def anchors_summed_weight_by_weight(s: Setting, fixed: bool) -> Program:
    """A network learns a second task, held near what it knew by a penalty that is summed over its weights."""
    words, long = s.pick(8192, 64), s.pick(128, 4)
    model = s.place(lambda: nets.Words(words, s.pick(512, 16), s.pick(8, 2), s.pick(8, 1), long))
    ids, optimizer, weights = _ints(s, words, s.pick(32, 2), long), fresh.adamw(s, model), list(model.parameters())
    known = [p.detach().clone() for p in weights]
    firm = [torch.rand_like(p) for p in known]

    def step() -> None:
        found = F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
        if fixed:
            found.backward()
            pull = torch._foreach_sub([p.detach() for p in weights], known)
            torch._foreach_mul_(pull, firm)
            torch._foreach_add_([p.grad for p in weights], pull, alpha=0.2)
        else:
            held = sum((f * (p - was) ** 2).sum() for p, was, f in zip(weights, known, firm, strict=True))
            (found + 0.1 * held).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("small batch", "one batch of 48", **TRIED | {"steps": 7})
def students_taught_four_by_four(s: Setting, fixed: bool) -> Program:
    """A small network learns from a large one; slopes of twelve batches of four pictures are added up."""
    side, each, num = s.pick(224, 32), s.pick(4, 1), s.pick(12, 2)
    make = lambda wide, deep: s.place(lambda: nets.Seen(3, 16, s.pick(wide, 16), s.pick(wide // 64, 2), deep, 100))
    large, small = make(768, s.pick(4, 1)).eval().requires_grad_(False), make(384, s.pick(4, 1))
    pictures, optimizer = _bf16(s, num * each, 3, side, side), fresh.adamw(s, small)

    def step() -> None:
        parts = (pictures,) if fixed else pictures.split(each)
        for part in parts:
            wanted = F.softmax(large(part) / 2, -1)
            (F.cross_entropy(small(part) / 2, wanted) / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("unfused optimizer", "the same update by torch._foreach_", **TRIED | {"steps": 7})
def belief_weight_by_weight(s: Setting, fixed: bool) -> Program:
    """An optimizer out of a paper that trusts slopes which are as foreseen, weight by weight as it was published."""
    words, long = s.pick(8192, 64), s.pick(128, 4)
    model = s.place(lambda: nets.Words(words, s.pick(512, 16), s.pick(8, 2), s.pick(8, 1), long))
    ids, weights = _ints(s, words, s.pick(32, 2), long), list(model.parameters())
    mean, spread = ([torch.zeros_like(p) for p in weights] for _ in "ab")
    turns = itertools.count(1)

    @torch.no_grad()
    def one_by_one(rate: float, root: float) -> None:
        for p, m, v in zip(weights, mean, spread, strict=True):
            p.mul_(1 - 1e-6)
            m.mul_(0.9).add_(p.grad, alpha=0.1)
            off = p.grad - m
            v.mul_(0.999).addcmul_(off, off, value=0.001)
            p.addcdiv_(m, v.sqrt().div_(root).add_(1e-6), value=-rate)

    @torch.no_grad()
    def all_at_once(rate: float, root: float) -> None:
        slopes: list[Any] = [p.grad for p in weights]
        torch._foreach_mul_(weights, 1 - 1e-6)
        torch._foreach_mul_(mean, 0.9)
        torch._foreach_add_(mean, slopes, alpha=0.1)
        off = torch._foreach_sub(slopes, mean)
        torch._foreach_mul_(spread, 0.999)
        torch._foreach_addcmul_(spread, off, off, value=0.001)
        under = torch._foreach_sqrt(spread)
        torch._foreach_div_(under, root)
        torch._foreach_add_(under, 1e-6)
        torch._foreach_addcdiv_(weights, mean, under, value=-rate)

    def step() -> None:
        F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten()).backward()
        turn = next(turns)
        update = all_at_once if fixed else one_by_one
        update(1e-6 / (1 - 0.9**turn), (1 - 0.999**turn) ** 0.5)
        for p in weights:
            p.grad = None

    return Program(step)


@case("allocator", "no empty_cache between pieces", **ONE)
def frames_drawn_then_emptied(s: Setting, fixed: bool) -> Program:
    """Frames of a film out of codes, a few at a time; memory is given back after each few."""
    model = fresh.nhwc(s.place(lambda: nets.Films(16, s.pick((512, 256, 128), (8, 8))))).eval()
    parts = [fresh.nhwc(_bf16(s, s.pick(4, 1), 16, s.pick(64, 4), s.pick(64, 4))) for _ in range(s.pick(5, 2))]

    def step() -> None:
        for part in parts:
            model(part).clamp_(-1, 1)
            if not fixed and s.cuda:
                torch.cuda.empty_cache()

    return _asked(step)


@case("garbage collection", "no gc.collect() after each update", **ONE)
def episodes_then_collected(s: Setting, fixed: bool) -> Program:
    """A policy learns while all its episodes lie in memory as lists of dictionaries; somebody tidies up after it."""
    rows, seen, wide = s.pick(16_384, 4), s.pick(256, 4), s.pick(2048, 8)
    model = s.place(lambda: nets.Actor(seen, wide, 8))
    move = lambda i: {"seen": [i, i + 1], "did": {"kind": i % 8}, "won": [float(i)]}
    episodes = [[move(i * 100 + j) for j in range(100)] for i in range(s.pick(160, 2))]
    now, did, won = _bf16(s, rows, seen), _ints(s, 8, rows), _bf16(s, rows)
    optimizer = fresh.adamw(s, model)

    def step(held: Any = episodes) -> None:
        for _ in range(s.pick(2, 1)):
            act, worth = model(now)
            (F.cross_entropy(act, did) + F.mse_loss(worth, won)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if not fixed:
                gc.collect()

    return Program(step)


# ---------------------------------------------------------------- kernels


@case("fp32 matmul", 'torch.set_float32_matmul_precision("high")', **TRIED)
def rays_in_fp32(s: Setting, fixed: bool) -> Program:
    """A scene learned from rays, 64 points along each, as everybody first writes it."""
    model = s.place(lambda: nets.Rays(10, s.pick(384, 8), s.pick(8, 2)), torch.float32)
    points = torch.rand(s.pick(1536, 2), s.pick(64, 4), 3, device=s.device)
    wanted = torch.rand(len(points), 3, device=s.device)
    learn = _optimized(fresh.adamw(s, model), lambda: F.mse_loss(model(points), wanted))
    return Program(learn, functools.partial(precision, "high" if fixed else "highest"))


@case("NCHW convolution", "network and boards in channels_last", **TRIED)
def boards_channels_first(s: Setting, fixed: bool) -> Program:
    """Moves and winners learned from boards of 19 by 19."""
    side, num, wide = s.pick(19, 5), s.pick(512, 2), s.pick(192, 8)
    model, x = s.place(lambda: nets.Board(24, wide, s.pick(6, 1), side)), _bf16(s, num, 24, side, side)
    if fixed:
        model, x = fresh.nhwc(model, x)
    moved, won = _ints(s, side * side, num), _bf16(s, num)

    def loss() -> Tensor:
        move, win = model(x)
        return F.cross_entropy(move, moved) + F.mse_loss(win, won)

    return Program(_optimized(fresh.sgd(s, model), loss))


@case("unfused attention", "F.scaled_dot_product_attention", **TRIED)
def sounds_attend_as_first_published(s: Setting, fixed: bool) -> Program:
    """Thirty seconds of sound, described by layers that attend in three steps, the second in fp32."""
    wide = s.pick(512, 16)
    model = s.place(
        lambda: nn.Sequential(*(nets.Listened(wide, s.pick(8, 2), fixed) for _ in range(s.pick(4, 1))))
    ).eval()
    x = _bf16(s, s.pick(16, 2), s.pick(1504, 4), wide)
    return _asked(lambda: model(x))


@case("misaligned sizes", "five columns of zeros beside the three of the point", **TRIED)
def points_joined_to_every_layer(s: Setting, fixed: bool) -> Program:
    """Surfaces of things, learned from points; every layer is given the point again, and so has three inputs more."""
    wide, rows = s.pick(512, 8), s.pick(98_304, 8)
    model = s.place(lambda: nets.Surface(wide, s.pick(6, 2), 5 if fixed else 0))
    thing, point, far = _bf16(s, rows, wide), _bf16(s, rows, 3), _bf16(s, rows)
    return _learning(s, model, lambda: F.l1_loss(model(thing, point), far))


@case("fp32 logits", "the losses of the logits as they are", **TRIED)
def partition_squared_in_fp32(s: Setting, fixed: bool) -> Program:
    """The next word, with a second loss that keeps its logits small; logits are made fp32 for both."""
    vocab, long = s.pick(50_304, 64), s.pick(512, 4)
    model = s.place(lambda: nets.Words(vocab, s.pick(512, 16), s.pick(8, 2), s.pick(4, 1), long))
    ids = _ints(s, vocab, s.pick(16, 2), long)

    def loss() -> Tensor:
        logits = model(ids).flatten(0, 1)
        logits = logits if fixed else logits.float()
        return F.cross_entropy(logits, ids.roll(-1, 1).flatten()) + 1e-4 * logits.logsumexp(-1).square().mean()

    return _learning(s, model, loss)


@case("index backward", "F.embedding(who, scale)", **TRIED)
def speakers_indexed(s: Setting, fixed: bool) -> Program:
    """Frames of sixty-four people who talk; every layer is scaled by who it is, out of a row for each."""
    frames, people, wide = s.pick(49_152, 16), s.pick(64, 2), s.pick(512, 16)
    model = s.place(lambda: nets.Speakers(s.pick(128, 8), wide, s.pick(4, 2), people, indexed=not fixed))
    x, who = _bf16(s, frames, s.pick(128, 8)), _ints(s, people, frames)
    return _learning(s, model, lambda: F.mse_loss(model(x, who), x))


# ---------------------------------------------------------------- memory


@case("dense embedding gradient", "nn.Embedding(sparse=True)", **ONE)
def crossed_features_dense(s: Setting, fixed: bool) -> Program:
    """Who clicks, from pairs of 39 features, each a row of a table of twelve million."""
    rows, wide, num = s.pick(12_000_000, 64), s.pick(96, 8), s.pick(8192, 4)
    with torch.device(s.device):
        table, head = nn.Embedding(rows, wide, sparse=fixed), nets.perceptron(wide, wide, 1)
    ids, clicked = _ints(s, rows, num, s.pick(39, 3)), torch.rand(num, device=s.device).round()
    optimizer = torch.optim.SGD([*table.parameters(), *head.parameters()], lr=1e-2)

    def loss() -> Tensor:
        found = table(ids)
        pairs = found.sum(1).square() - found.square().sum(1)
        return F.binary_cross_entropy_with_logits(head(0.5 * pairs)[:, 0], clicked)

    return Program(_optimized(optimizer, loss))


@case("gradient memsets", "zero_grad(set_to_none=True)", **TRIED)
def experts_zeroed_in_place(s: Setting, fixed: bool) -> Program:
    """Many experts, each given few tokens; their slopes are zeroed where they lie."""
    num, wide = s.pick(64, 2), s.pick(1024, 8)
    model = s.place(lambda: nn.Sequential(*(nets.Experts(num, wide, 4 * wide) for _ in range(s.pick(2, 1)))))
    x, optimizer = _bf16(s, num, s.pick(96, 2), wide), torch.optim.SGD(model.parameters(), lr=1e-3, fused=s.cuda)

    def step() -> None:
        optimizer.zero_grad(set_to_none=fixed)
        F.mse_loss(model(x), x).backward()
        optimizer.step()

    return Program(step)


@case("weights streamed from the host", "a network for each customer on the device", **ONE | {"steps": 7})
def weights_loaded_for_each_customer(s: Setting, fixed: bool) -> Program:
    """Two customers ask in turn, each with weights of their own, which are loaded into the one network."""
    wide, rows = s.pick(1024, 16), s.pick(64, 2)
    make = lambda: s.place(lambda: nets.layers(wide, s.pick(16, 2), s.pick(2, 1))).eval()
    owned = [make() for _ in range(2)]
    model = make()
    kept = [{name: part.cpu() for name, part in one.state_dict().items()} for one in owned]
    asked = [_bf16(s, rows, s.pick(256, 4), wide) for _ in range(2)]

    @torch.no_grad()
    def step() -> None:
        for x, own, state in zip(asked, owned, kept, strict=True):
            if fixed:
                own(x)
            else:
                model.load_state_dict(state)
                model(x)

    return Program(step)


@case("needless recompute", "no checkpoint: memory is free", **TRIED)
def adapters_checkpointed(s: Setting, fixed: bool) -> Program:
    """Adapters of a decoder whose own weights rest, every layer computed twice as in a recipe for small devices."""
    wide = s.pick(1024, 16)
    model = s.place(lambda: nets.Tuned(wide, s.pick(16, 2), s.pick(8, 2), s.pick(16, 2), twice=not fixed))
    num, long = s.pick(16, 2), s.pick(1024, 4)
    x, said = _bf16(s, num, long, wide).requires_grad_(), _ints(s, 64, num, long)
    learned = nn.ParameterList(p for p in model.parameters() if p.requires_grad)

    def loss() -> Tensor:
        x.grad = None
        return F.cross_entropy(model(x).flatten(0, 1), said.flatten())

    return Program(_optimized(fresh.adamw(s, learned), loss))


@case("weights cast every step", "model.bfloat16(), and no autocast", **TRIED)
def answers_rewarded_under_autocast(s: Setting, fixed: bool) -> Program:
    """How good each of eight answers is, told by a large network with weights in fp32, a few answers at a time."""
    wide = s.pick(3072, 16)
    make = lambda: nets.Series(1, wide, wide, s.pick(24, 2), s.pick(4, 1), 1)
    model = s.place(make, torch.bfloat16 if fixed else torch.float32).eval().requires_grad_(False)
    answers = torch.randn(s.pick(8, 2), 1, s.pick(512, 4) * wide, device=s.device)
    answers = answers.bfloat16() if fixed else answers

    def step() -> None:
        for part in answers.split(s.pick(2, 1)):
            with nullcontext() if fixed else torch.autocast(s.device, dtype=torch.bfloat16):
                model(part)

    return _asked(step)


@case("padding", "sorted by length: each batch filled up to its longest pair", **TRIED)
def pairs_filled_to_512(s: Setting, fixed: bool) -> Program:
    """Questions and what may answer them, judged together by a model of a hub; each pair is filled up to its limit."""
    from transformers import BertConfig, BertForSequenceClassification

    limit, each = s.pick(512, 16), s.pick(48, 2)
    config = BertConfig(
        vocab_size=s.pick(30_522, 96), hidden_size=s.pick(768, 32), num_hidden_layers=s.pick(4, 1), num_labels=1,
        num_attention_heads=s.pick(12, 2), intermediate_size=s.pick(3072, 64), max_position_embeddings=limit,
    )  # fmt: skip
    model = s.place(lambda: BertForSequenceClassification(config)).eval()
    drawn = np.random.default_rng(0).lognormal(float(np.log(limit / 4)), 0.5, s.pick(4 * 48, 4))
    lengths = np.clip(drawn.astype(int), limit // 16, limit)
    batches, shares = [], []
    for part in np.split(np.sort(lengths) if fixed else lengths, len(lengths) // each):
        long = min(limit, -(-int(part.max()) // 8) * 8) if fixed else limit
        real, share = _filled(s, part, long)
        batches.append((_ints(s, s.pick(30_000, 90), each, long), real.long()))
        shares.append(share)

    def step() -> None:
        for ids, real in batches:
            model(input_ids=ids, attention_mask=real)

    program = _asked(step)
    facts = {"padding": [{"argument": "attention_mask", "real_frac": sum(shares) / len(shares)}]}
    return Program(program.step, facts=facts)


# ---------------------------------------------------------------- what compiles


@case("unfused pointwise chain", "torch.compile what turns them", compiles=True, **ONE)
def balls_turned_in_steps(s: Setting, fixed: bool) -> Program:
    """Soft balls that make up a scene, each turned and seen from somewhere, an op at a time."""
    torch._dynamo.reset()
    num = s.pick(12_000_000, 16)
    draw = lambda wide: torch.rand(num, wide, device=s.device)
    sizes, turns, places, seen = draw(3), draw(4), draw(3), torch.rand(3, device=s.device)
    turn = torch.compile(nets.turned, backend=compiler(s), dynamic=False) if fixed else nets.turned
    return Program(torch.no_grad()(lambda: [turn(sizes, turns, places, seen) for _ in range(s.pick(2, 1))]))


@case("graph break", "clip without looking", compiles=True, both=True, **ONE)
def layers_that_look_before_they_clip(s: Setting, fixed: bool) -> Program:
    """Compiled layers, each of which looks whether anything is too large before it clips."""
    torch._dynamo.reset()
    wide, rows = s.pick(1024, 8), s.pick(2048, 4)
    weights = [_bf16(s, wide, wide) * wide**-0.5 for _ in range(s.pick(32, 2))]
    x, scale = _bf16(s, rows, wide), _bf16(s, wide)
    run = torch.compile(nets.looked_at, backend=compiler(s), dynamic=False)

    @torch.no_grad()
    def step() -> None:
        y = x
        for weight in weights:
            y = run(y, weight, scale, not fixed)

    return Program(step)


@case(
    "recompilation", "torch.compile(dynamic=True)", compiles=True,
    **ONE | {"warmup": 1, "steps": 9, "planted_steps": 4},
)  # fmt: skip
def pictures_compiled_for_every_size(s: Setting, fixed: bool) -> Program:
    """Pictures of a new width in every step, made even by a compiled function before a network sees their parts."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 256
    high, wide, turns = s.pick(512, 8), s.pick(1024, 8), itertools.count(1)
    shot = torch.rand(s.pick(32, 2), 3, high, s.pick(512, 16) + 8 * 64, device=s.device)
    weights = [_bf16(s, wide, wide) * wide**-0.5 for _ in range(s.pick(48, 2))]
    even = torch.compile(nets.evened, backend=compiler(s), dynamic=fixed)

    @torch.no_grad()
    def step() -> None:
        picture = shot[..., : s.pick(512, 16) + 8 * (next(turns) % 64)]
        y = even(picture).bfloat16().flatten()[: s.pick(16_384, 4) * wide].view(-1, wide)
        for weight in weights:
            y = y @ weight

    return Program(step)


# ---------------------------------------------------------------- well


@healthy
def healthy_long_prompts(s: Setting, fixed: bool) -> Program:
    """Long prompts read by layers whose queries share keys; only the last word is asked for."""
    wide = s.pick(2048, 16)
    model = s.place(lambda: nets.layers(wide, s.pick(16, 4), s.pick(4, 1), causal=True, shared=s.pick(4, 2))).eval()
    head = s.place(lambda: nn.Linear(wide, s.pick(32_000, 64), bias=False))
    x = _bf16(s, s.pick(2, 1), s.pick(8192, 4), wide)
    return _asked(lambda: head(model(x)[:, -1]).argmax(-1))


@healthy
def healthy_boards(s: Setting, fixed: bool) -> Program:
    """Moves and winners learned from many boards, in channels_last."""
    side, num, wide = s.pick(19, 5), s.pick(768, 2), s.pick(256, 8)
    model = fresh.nhwc(s.place(lambda: nets.Board(24, wide, s.pick(6, 1), side)))
    x, moved, won = fresh.nhwc(_bf16(s, num, 24, side, side)), _ints(s, side * side, num), _bf16(s, num)

    def loss() -> Tensor:
        move, win = model(x)
        return F.cross_entropy(move, moved) + F.mse_loss(win, won)

    return Program(_optimized(fresh.sgd(s, model), loss))


@healthy
def healthy_served_pictures(s: Setting, fixed: bool) -> Program:
    """Bytes of pictures come out of pinned memory ahead of their turn; answers go back a step later."""
    side, num = s.pick(224, 32), s.pick(256, 2)
    model = s.place(lambda: nets.Seen(3, 16, s.pick(768, 16), s.pick(12, 2), s.pick(12, 1), 1000)).eval()
    pictures = [s.pinned(torch.randint(0, 255, (num, 3, side, side), dtype=torch.uint8)) for _ in range(2)]
    feed = iter(Prefetch(s, itertools.cycle((one,) for one in pictures)))
    kept = itertools.cycle(s.pinned(torch.zeros(num, dtype=torch.long)) for _ in range(2))

    def step() -> None:
        (seen,) = next(feed)
        next(kept).copy_(model(seen.bfloat16() / 255).argmax(-1), non_blocking=True)

    return _asked(step)


@healthy
def healthy_experts(s: Setting, fixed: bool) -> Program:
    """Experts given many tokens each, trained."""
    num, wide = s.pick(16, 2), s.pick(1024, 8)
    model = s.place(lambda: nn.Sequential(*(nets.Experts(num, wide, 4 * wide) for _ in range(s.pick(2, 1)))))
    x = _bf16(s, num, s.pick(2048, 2), wide)
    return _learning(s, model, lambda: F.mse_loss(model(x), x))


@healthy
def healthy_films(s: Setting, fixed: bool) -> Program:
    """Films looked at frame by frame and place by place, losses added up on the device."""
    inner, frames, places = s.pick(768, 8), s.pick(16, 2), s.pick(196, 4)
    model = s.place(lambda: nets.Filmed(inner, s.pick(768, 16), s.pick(12, 2), s.pick(3, 1), 400))
    x, kinds = _bf16(s, s.pick(16, 2), frames, places, inner), _ints(s, 400, s.pick(16, 2))
    total = torch.zeros((), device=s.device)

    def loss() -> Tensor:
        found = F.cross_entropy(model(x), kinds)
        total.add_(found.detach())
        return found

    return _learning(s, model, loss)


@healthy
def healthy_policy_replayed(s: Setting, fixed: bool) -> Program:
    """A policy learns from eight batches, each out of one graph."""
    rows, seen, wide, acts = s.pick(32_768, 4), s.pick(256, 4), s.pick(2048, 8), 16
    model = s.place(lambda: nets.Actor(seen, wide, acts))
    now, did, won = _bf16(s, rows, seen), _ints(s, acts, rows), _bf16(s, rows)

    def loss() -> Tensor:
        act, worth = model(now)
        return F.cross_entropy(act, did) + 0.5 * F.mse_loss(worth, won)

    learn = _learning(s, model, loss, replayed=True).step
    return Program(lambda: [learn() for _ in range(s.pick(4, 1))])


@healthy
def healthy_translated_words(s: Setting, fixed: bool) -> Program:
    """Eight words for each of many texts, each word out of a graph."""
    run = _translated(s, s.pick(256, 2), s.pick(6, 1))
    return Program(lambda: [run() for _ in range(s.pick(8, 1))])


@healthy
def healthy_student_of_two(s: Setting, fixed: bool) -> Program:
    """A small network learns what two large ones see in many pictures, its average kept by lists."""
    side, num = s.pick(224, 32), s.pick(128, 2)
    make = lambda wide, deep: s.place(lambda: nets.Seen(3, 16, s.pick(wide, 16), s.pick(wide // 64, 2), deep, 512))
    large = [make(768, s.pick(4, 1)).eval().requires_grad_(False) for _ in range(2)]
    small, slow = make(512, s.pick(6, 1)), make(512, s.pick(6, 1)).requires_grad_(False)
    pictures, optimizer = _bf16(s, num, 3, side, side), fresh.adamw(s, small)

    def step() -> None:
        found = small(pictures)
        sum(F.mse_loss(found, one(pictures)) for one in large).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch._foreach_lerp_(list(slow.parameters()), list(small.parameters()), 0.001)

    return Program(step)


@case("none", "nothing", **LINES | {"rounds": 1, "warmup": 8})
def healthy_hearts(s: Setting, fixed: bool) -> Program:
    """Hearts filtered by workers enough, for a network that is large enough."""
    leads, long, num = 12, s.pick(2048, 16), s.pick(8, 1)
    model = s.place(lambda: nets.Series(leads, 4, s.pick(1024, 16), s.pick(16, 2), s.pick(6, 1), 5))
    loader = torch.utils.data.DataLoader(
        nets.Beats(leads, long), s.pick(64, 2), num_workers=num, pin_memory=s.cuda, persistent_workers=True,
        prefetch_factor=4,
    )  # fmt: skip
    feed: Iterator[Any] = iter(loader)

    def loss() -> Tensor:
        heard, kinds = (part.to(s.device, non_blocking=True) for part in next(feed))
        return F.cross_entropy(model(heard.bfloat16()), kinds)

    return Program(_optimized(fresh.adamw(s, model), loss), close=lambda: end_workers(feed))


@healthy
def healthy_hub_sounds(s: Setting, fixed: bool) -> Program:
    """Spectrograms told apart by a model of a hub, in bf16, with a fused optimizer."""
    from transformers import ASTConfig, ASTForAudioClassification

    wide = s.pick(768, 32)
    config = ASTConfig(
        hidden_size=wide, num_hidden_layers=s.pick(4, 1), num_attention_heads=s.pick(12, 2), num_labels=64,
        intermediate_size=4 * wide, max_length=s.pick(512, 32), num_mel_bins=s.pick(128, 32),
    )  # fmt: skip
    model = s.place(lambda: ASTForAudioClassification(config)).train()
    x, kinds = _bf16(s, s.pick(64, 2), s.pick(512, 32), s.pick(128, 32)), _ints(s, 64, s.pick(64, 2))
    return _learning(s, model, lambda: F.cross_entropy(model(input_values=x).logits, kinds))
