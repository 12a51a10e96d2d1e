"""A nineteenth suite: 27 ordinary scripts, more of them of causes that few programs had before, each in a net or a
spelling that no suite had; and ten programs thought to be well, recorded with their Python stacks.

As in the eighteenth, a cause counts where its fix brings 5 % of the planted step and three times what both programs
vary by (half of the two quartile ranges of their step times, added) at least; both are judged from step times alone,
before any rule is asked. A finding over 2 % in a fixed or healthy program is false unless the advice, done and timed,
brings more than noise.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import eighteenth
import fresh
import freshnets
import nineteenthnets as nets
import numpy as np
import seventeenth
import torch
import torch.nn.functional as F
from cases import CASES, Prefetch, Program, Setting, case, compiler, end_workers, graphed
from eighteenth import EVERY, LINES, ONE
from fourth import swapped
from ninth import _bf16, _ints, _optimized
from sixth import _crowd
from tenth import TRIED
from torch import Tensor, nn

healthy = case("none", "nothing", **LINES)


def _learning(s: Setting, model: nn.Module, loss: Any, replayed: bool = False) -> Program:
    """Steps of fused AdamW, one by one or out of a graph."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=replayed and s.cuda)
    learn = _optimized(optimizer, loss)
    return Program(graphed(learn) if replayed and s.cuda else learn)


def _asked(run: Any) -> Program:
    return Program(torch.inference_mode()(run))


# ---------------------------------------------------------------- what is fed


@case("cpu affinity", "let the process use every core", **ONE | {"warmup": 8, "steps": 12})
def gestures_on_two_cores(s: Setting, fixed: bool) -> Program:
    """Eight workers turn and stretch recordings, all of them on two cores."""
    frames, joints, num = s.pick(128, 8), s.pick(25, 3), s.pick(8, 1)
    model = s.place(lambda: nets.Moved(6 * joints, s.pick(768, 16), s.pick(12, 2), s.pick(6, 1), 60))
    scope = nullcontext if fixed else functools.partial(fresh._cores, 2)
    with scope():
        loader = torch.utils.data.DataLoader(
            nets.Gestures(frames, joints), s.pick(96, 2), num_workers=num, pin_memory=s.cuda, persistent_workers=True
        )
        feed: Iterator[Any] = iter(loader)

    def loss() -> Tensor:
        moved, kinds = (part.to(s.device, non_blocking=True) for part in next(feed))
        return F.cross_entropy(model(moved.bfloat16()), kinds)

    return Program(_optimized(fresh.adamw(s, model), loss), scope, close=lambda: end_workers(feed))


@case("pageable copy", "pin the fields, and copy the next ones ahead with non_blocking=True", **TRIED)
def fields_out_of_arrays(s: Setting, fixed: bool) -> Program:
    """Weather as it lies in an array of numpy, moved to the device where the step begins."""
    model = s.place(lambda: nets.Weather(20, s.pick(8, 4), s.pick(1024, 16), s.pick(16, 2), s.pick(6, 1)))
    known = np.random.default_rng(0).standard_normal((s.pick(32, 2), 20, s.pick(128, 8), s.pick(256, 8)), np.float32)
    host: Iterator[Any] = itertools.cycle([(s.pinned(torch.from_numpy(known)),)])
    feed = iter(Prefetch(s, host)) if fixed else ((torch.from_numpy(known).to(s.device),) for _ in itertools.count())

    def loss() -> Tensor:
        (fields,) = next(feed)
        return F.mse_loss(*model(fields.bfloat16()))

    return Program(_optimized(fresh.adamw(s, model), loss))


@case("pinned copy on the compute stream", "copy the next films on a stream of their own", **TRIED)
def films_in_line(s: Setting, fixed: bool) -> Program:
    """Films of bytes in pinned memory, copied where the step begins, without waiting."""
    num, long, side = s.pick(96, 2), s.pick(16, 2), s.pick(192, 32)
    cube = 2 * 16 * 16 * 3
    model = s.place(lambda: nets.Clips(cube, s.pick(512, 16), s.pick(8, 2), s.pick(2, 1), 400))
    films = torch.randint(0, 255, (num, long // 2 * (side // 16) ** 2, cube), dtype=torch.uint8)
    host: Iterator[Any] = itertools.cycle([(s.pinned(films), s.pinned(torch.randint(0, 400, (num,))))])
    here = lambda found: tuple(part.to(s.device, non_blocking=True) for part in found)
    feed = iter(Prefetch(s, host)) if fixed else map(here, host)

    def loss() -> Tensor:
        seen, kinds = next(feed)
        return F.cross_entropy(model(seen.bfloat16()), kinds)

    return Program(_optimized(fresh.adamw(s, model), loss))


@case("many small copies", "all texts of a batch in one pinned tensor", **TRIED)
def texts_moved_one_by_one(s: Setting, fixed: bool) -> Program:
    """Bags of words: each text goes to the device by itself, and there they are put in a row."""
    num, words, wide = s.pick(640, 4), s.pick(60_000, 64), s.pick(1024, 16)
    rng = np.random.default_rng(0)
    texts = [torch.from_numpy(rng.integers(0, words, int(n))) for n in rng.integers(20, 200, num)]
    ends = torch.tensor([0, *itertools.accumulate(len(text) for text in texts)])
    flat, begins = s.pinned(torch.cat(texts)), ends[:-1].to(s.device)
    bags = s.place(lambda: nn.EmbeddingBag(words, wide))
    head = s.place(lambda: nets.perceptron(wide, wide, wide, 20))
    kinds, both = _ints(s, 20, num), nn.ModuleList([bags, head])

    def loss() -> Tensor:
        here = flat.to(s.device, non_blocking=True) if fixed else torch.cat([text.to(s.device) for text in texts])
        return F.cross_entropy(head(bags(here, begins)), kinds)

    return Program(_optimized(torch.optim.SGD(both.parameters(), lr=1e-3, fused=s.cuda), loss))


@case("host code", "what was played lies on the device, and is drawn there", **TRIED | {"steps": 7})
def moves_out_of_a_list(s: Setting, fixed: bool) -> Program:
    """Values learned from what was played, which is kept in a list and stacked field by field."""
    rows, seen, wide = s.pick(1024, 4), s.pick(128, 4), s.pick(1024, 8)
    rng, draw = np.random.default_rng(0), random.Random(0)
    look = lambda: rng.standard_normal(seen, np.float32)
    one = lambda i: (look(), int(rng.integers(8)), float(rng.random()), look(), bool(i % 50))
    played = [one(i) for i in range(s.pick(20_000, 20))]
    field = lambda moves, i: torch.from_numpy(np.stack([np.asarray(move[i], np.float32) for move in moves]))
    stacked = lambda moves: [field(moves, i) for i in range(5)]
    stored = [part.to(s.device) for part in stacked(played)] if fixed else []
    make = lambda: nets.perceptron(seen, wide, wide, 8)
    model, known = s.place(make), s.place(make).requires_grad_(False)

    def drawn() -> list[Tensor]:
        if fixed:
            which = torch.randint(0, len(played), (rows,), device=s.device)
            return [part[which] for part in stored]
        return [part.to(s.device) for part in stacked(draw.sample(played, rows))]

    def loss() -> Tensor:
        now, did, won, after, on = drawn()
        wanted = won + 0.99 * on * known(after.bfloat16()).amax(1).float()
        found = model(now.bfloat16()).gather(1, did.long()[:, None])[:, 0]
        return F.smooth_l1_loss(found.float(), wanted)

    return Program(_optimized(fresh.adamw(s, model), loss))


@case("host code", "draw the neighbors on the device", **TRIED | {"steps": 7})
def friends_drawn_in_python(s: Setting, fixed: bool) -> Program:
    """People described by some of their friends and by some of theirs, drawn from lists."""
    nodes, wide, num = s.pick(100_000, 32), s.pick(256, 8), s.pick(512, 4)
    friends = nets.Friends(nodes, s.pick(12, 4), s.device)
    known, kinds = _bf16(s, nodes, wide), _ints(s, 40, num)
    first, second = (s.place(lambda: nn.Linear(2 * wide, wide)) for _ in range(2))
    head, draw = s.place(lambda: nn.Linear(wide, 40)), random.Random(1)

    def drawn() -> tuple[Tensor, Tensor, Tensor]:
        if fixed:
            own = torch.randint(0, nodes, (num,), device=s.device)
            near = friends.on_device(own, 10)
            return own, near, friends.on_device(near, 5)
        chosen = draw.sample(range(nodes), num)
        close = friends.by_list(chosen, 10)
        own, near, far = (torch.tensor(row, device=s.device) for row in (chosen, close, friends.by_list(close, 5)))
        return own, near, far

    def loss() -> Tensor:
        own, near, far = drawn()
        inner = F.relu(first(torch.cat((known[near], known[far].view(-1, 5, wide).mean(1)), 1)))
        outer = F.relu(second(torch.cat((known[own], inner.view(-1, 10, wide).mean(1)), 1)))
        return F.cross_entropy(head(outer), kinds)

    return Program(_optimized(fresh.adamw(s, nn.ModuleList([first, second, head])), loss))


# ---------------------------------------------------------------- who waits for whom


@case("synchronization", "take the first length that helps with torch.where, asking nobody", **TRIED)
def lengths_tried_until_one_helps(s: Setting, fixed: bool) -> Program:
    """A step downhill, as long as it goes down: each length is tried, and the host looks whether it helps."""
    return _lengths(s, fixed)


def _lengths(s: Setting, fixed: bool, joined: bool = False) -> Program:
    wide, rows = s.pick(4096, 16), s.pick(512, 4)
    first, second = (_bf16(s, wide, wide) * wide**-0.5 for _ in range(2))
    at, wanted = _bf16(s, rows, wide), _bf16(s, rows, wide)
    cost = lambda x: F.mse_loss(torch.tanh(x @ first) @ second, wanted)
    lengths = [2.0 ** (20 - i) for i in range(s.pick(24, 3))]
    placed = torch.tensor(lengths, device=s.device, dtype=torch.bfloat16).unbind(0)

    def tried(length: Tensor, slope: Tensor, now: Tensor, best: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
        new = at - length * slope
        helps = cost(new) < now * 0.5
        return torch.where(helps & ~found, new, best), found | helps

    tried_at_once = torch.compile(tried, backend=compiler(s), dynamic=False)

    def step() -> None:
        x = at.clone().requires_grad_()
        now = cost(x)
        (slope,) = torch.autograd.grad(now, x)
        with torch.no_grad():
            best, found = at, torch.zeros((), dtype=torch.bool, device=s.device)
            for length in placed if joined else ():
                best, found = tried_at_once(length, slope, now, best, found)
            for length in () if joined else lengths:
                new = torch.sub(at, slope, alpha=length)
                helps = cost(new) < now * 0.5
                if fixed:
                    best = torch.where(helps & ~found, new, best)
                    found |= helps
                elif helps.item():
                    best = new
                    break
            at.lerp_(best, 1e-3)

    return Program(step)


@case("synchronous logging", "print the table every fiftieth step", **TRIED | {"steps": 7})
def confusions_printed(s: Setting, fixed: bool) -> Program:
    """What is taken for what, as a table that is printed after every step."""
    kinds, wide, rows = s.pick(48, 6), s.pick(2048, 16), s.pick(8192, 8)
    model = s.place(lambda: nets.perceptron(wide, wide, wide, wide, kinds))
    x, truth, table = _bf16(s, rows, wide), _ints(s, kinds, rows), torch.zeros(kinds * kinds, device=s.device)
    ones, optimizer, turns = torch.ones(rows, device=s.device), fresh.adamw(s, model), itertools.count(1)
    file = tempfile.TemporaryFile("w")  # noqa: SIM115 (open while the program runs)

    def step() -> None:
        found = model(x)
        F.cross_entropy(found, truth).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        table.index_add_(0, truth * kinds + found.detach().argmax(1), ones)
        if not fixed or not next(turns) % EVERY:
            shown = table.view(kinds, kinds).cpu().numpy()
            print(np.array2string(shown, threshold=sys.maxsize, precision=0), file=file, flush=True)

    return Program(step, close=file.close)


@case("round trip through the host", "cumsum and searchsorted on the device", **TRIED)
def particles_drawn_again_on_host(s: Setting, fixed: bool) -> Program:
    """A cloud of guesses moved by a learned law, weighed, and drawn again by weight, with numpy."""
    return _particles(s, fixed)


def _particles(s: Setting, fixed: bool, joined: bool = False) -> Program:
    num, deep = s.pick(131_072, 32), s.pick(32, 4)
    model = s.place(lambda: nets.perceptron(deep, s.pick(512, 8), s.pick(512, 8), deep, act=nn.Tanh)).eval()
    cloud, seen = _bf16(s, num, deep), _bf16(s, deep)
    rng = np.random.default_rng(0)

    def again(weights: Tensor) -> Tensor:
        if fixed:
            points = (torch.arange(num, device=s.device) + torch.rand((), device=s.device)) / num
            return torch.searchsorted(weights.cumsum(0), points).clamp_(max=num - 1)
        shares = weights.cpu().numpy()
        points = (np.arange(num) + rng.random()) / num
        drawn = np.searchsorted(np.cumsum(shares), points).clip(max=num - 1)
        return torch.from_numpy(drawn).to(s.device)

    def follow(at: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
        moved = at + 0.1 * by + 0.05 * torch.randn_like(at)
        return moved, torch.softmax(-(moved - seen).float().square().sum(1), 0)

    follow_all = torch.compile(follow, backend=compiler(s), dynamic=False) if joined else follow

    def step() -> None:
        moved, weights = follow_all(cloud, model(cloud))
        cloud.copy_(moved[again(weights)])

    return _asked(step)


# ---------------------------------------------------------------- the host's own time


@case("cpu contention", "end the jobs that take its cores", **ONE | {"warmup": 6, "steps": 20})
def control_learned_in_a_crowd(s: Setting, fixed: bool) -> Program:
    """Two judges and who acts, small nets in many launches, beside three busy processes for every core."""
    seen, wide, rows = s.pick(64, 4), s.pick(512, 8), s.pick(1024, 4)
    actor = s.place(lambda: nets.perceptron(seen, wide, wide, wide, 8))
    judges = s.place(lambda: nn.ModuleList(nets.perceptron(seen + 8, wide, wide, wide, 1) for _ in range(4)))
    now, won = _bf16(s, rows, seen), _bf16(s, rows)
    both = nn.ModuleList([actor, judges])

    def loss() -> Tensor:
        did = torch.tanh(actor(now))
        found = [judge(torch.cat((now, did), 1))[:, 0] for judge in judges]
        return sum(F.smooth_l1_loss(one, won) for one in found) - torch.stack(found).amin(0).mean()

    scope = nullcontext if fixed else functools.partial(_crowd, s.pick(3 * (os.cpu_count() or 1), 1))
    return Program(_optimized(fresh.adamw(s, both), loss), scope)


@case("garbage collection", "no gc.collect() after each batch", **ONE)
def parses_then_collected(s: Setting, fixed: bool) -> Program:
    """Sentences scored in four batches; after each somebody tidies up, while all parses lie in memory."""
    model, num = s.place(lambda: nets.Moved(128, s.pick(512, 16), s.pick(8, 2), s.pick(4, 1), 2)).eval(), s.pick(32, 2)
    batches = [_bf16(s, num, s.pick(256, 4), 128) for _ in range(s.pick(4, 2))]
    words = s.pick(8000, 20)
    kept = [{"word": str(i), "head": [i // 2], "children": [[2 * i], [2 * i + 1]]} for i in range(words)]
    scores = list[Tensor]()

    def step(held: Any = kept) -> None:
        scores.clear()
        for batch in batches:
            scores.append(model(batch).softmax(-1)[:, 1])
            if not fixed:
                gc.collect()

    return _asked(step)


@case("allocator", "no bound on splitting, and none on the memory: the rest of it is free", **ONE)
def requests_under_a_bound(s: Setting, fixed: bool) -> Program:
    """Requests of all lengths, in a process that was given little more memory than the longest takes, with a setting
    that is often advised where memory runs out."""
    wide = s.pick(2048, 16)
    model = s.place(lambda: nets.perceptron(wide, 4 * wide, wide)).eval()
    lengths = s.pick((13_000, 16_500, 21_000, 14_500, 18_500, 23_500), (3, 5))
    x = _bf16(s, max(lengths), wide)

    @torch.inference_mode()
    def step() -> None:
        for length in lengths:
            model(x[:length]).norm(dim=-1)

    return Program(step, nullcontext if fixed or not s.cuda else functools.partial(_bounded, step))


@contextmanager
def _bounded(step: Any) -> Iterator[None]:
    """The process may have little more memory than its step needs at once, and large pieces of it stay whole."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    most, there = torch.cuda.max_memory_allocated(), torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings("max_split_size_mb:128")
    try:
        for more in (1.05, 1.15, 1.3):
            torch.cuda.set_per_process_memory_fraction((more * most + 64e6) / there)
            try:
                step()
                step()
                break
            except torch.cuda.OutOfMemoryError:
                torch.cuda.empty_cache()
        yield
    finally:
        torch.cuda.memory._set_allocator_settings("max_split_size_mb:1000000")
        torch.cuda.set_per_process_memory_fraction(1.0)


@case("small batch", "all voices in one batch", **TRIED | {"steps": 7})
def voices_one_by_one(s: Setting, fixed: bool) -> Program:
    """Who speaks, of 24 recordings, one after the other."""
    model = s.place(lambda: nets.Voices(80, s.pick(512, 16), s.pick(8, 2), s.pick(6, 1))).eval()
    heard = _bf16(s, s.pick(24, 3), s.pick(400, 4), 80)

    def step() -> None:
        model(heard) if fixed else torch.cat([model(one[None]) for one in heard])

    return _asked(step)


@case("host-bound", "replay the plan from a CUDA graph", **TRIED)
def plans_made_eagerly(s: Setting, fixed: bool) -> Program:
    """The best of many ways to act, looked for three times over, each way followed twelve steps ahead."""
    return _plans(s, replayed=fixed)


def _plans(s: Setting, replayed: bool, joined: bool = False, more: int = 0) -> Program:
    """``joined`` compiles a step ahead, ``more`` columns of zeros make its product's rows a multiple of 16 bytes."""
    ways, deep, ahead = s.pick(1024, 8), s.pick(32, 4), s.pick(12, 2)
    law = s.place(lambda: nets.perceptron(deep + 4 + more, s.pick(512, 8), s.pick(512, 8), deep, act=nn.ELU)).eval()
    rest = (torch.zeros(ways, more, device=s.device, dtype=torch.bfloat16),) if more else ()
    now, mean = _bf16(s, deep), torch.zeros(ahead, 4, device=s.device, dtype=torch.bfloat16)

    def follow(at: Tensor, act: Tensor, cost: Tensor) -> tuple[Tensor, Tensor]:
        at = at + 0.1 * law(torch.cat((at, act, *rest), 1))
        return at, cost + at.float().square().mean(1)

    ahead_by_one = torch.compile(follow, backend=compiler(s), dynamic=False) if joined else follow

    @torch.no_grad()
    def plan() -> None:
        wide = torch.ones_like(mean)
        for _ in range(3):
            acts = mean + wide * torch.randn(ways, ahead, 4, device=s.device, dtype=torch.bfloat16)
            at, cost = now.expand(ways, -1), torch.zeros(ways, device=s.device)
            for i in range(ahead):
                at, cost = ahead_by_one(at, acts[:, i], cost)
            best = acts[cost.topk(s.pick(64, 2), largest=False).indices]
            mean.copy_(best.mean(0))
            wide = best.std(0)

    return Program(graphed(plan) if replayed and s.cuda else plan)


# ---------------------------------------------------------------- kernels


@case("unfused attention", "need_weights=False", **TRIED)
def weights_that_nobody_reads(s: Setting, fixed: bool) -> Program:
    """PyTorch's own attention, which also returns its weights unless told not to."""
    wide = s.pick(512, 16)
    model = s.place(
        lambda: nn.Sequential(*(nets.Weighed(wide, s.pick(8, 2), weights=not fixed) for _ in range(s.pick(4, 1))))
    )
    x = _bf16(s, s.pick(12, 2), s.pick(1024, 4), wide)
    return _learning(s, model, lambda: F.mse_loss(model(x), x))


@case("misaligned sizes", "pad the codes to a multiple of 64", **TRIED)
def codes_and_one_that_hides(s: Setting, fixed: bool) -> Program:
    """Pictures as words out of a book of 16,384, and one more for what is hidden."""
    codes, room = s.pick(16_448 if fixed else 16_385, 24 if fixed else 17), s.pick(256, 4)
    model = s.place(lambda: nets.Painted(codes, s.pick(768, 16), s.pick(12, 2), s.pick(4, 1), room))
    ids = _ints(s, s.pick(16_385, 17), s.pick(64, 2), room)
    return _learning(s, model, lambda: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()))


@case("fp32 logits", "logits as they are", **TRIED)
def taught_in_fp32(s: Setting, fixed: bool) -> Program:
    """A small network learns what a large one thinks of the next word, in fp32 to be on the safe side."""
    return _taught(s, Tensor.contiguous if fixed else Tensor.float, _nearness)


def _nearness(found: Tensor, wanted: Tensor) -> Tensor:
    found, wanted = (F.log_softmax(x, -1).flatten(0, 1) for x in (found, wanted))
    return F.kl_div(found, wanted, reduction="batchmean", log_target=True)


def _taught(s: Setting, cast: Callable[[Tensor], Tensor], near: Callable[[Tensor, Tensor], Tensor]) -> Program:
    vocab, room = s.pick(32_000, 64), s.pick(512, 4)
    small = s.place(lambda: nets.Told(vocab, s.pick(512, 16), s.pick(8, 2), s.pick(4, 1), room))
    large = s.place(lambda: nets.Told(vocab, s.pick(768, 16), s.pick(12, 2), s.pick(4, 1), room)).eval()
    ids = _ints(s, vocab, s.pick(16, 2), room)

    def loss() -> Tensor:
        with torch.no_grad():
            wanted = cast(large(ids))
        return near(cast(small(ids)), wanted)

    return _learning(s, small, loss)


@case("unfused pointwise chain", "torch.compile what changes the colors", compiles=True, **ONE)
def colors_changed_in_steps(s: Setting, fixed: bool) -> Program:
    """Pictures made brighter and duller on the device before a network sees them."""
    torch._dynamo.reset()
    model = fresh.nhwc(s.place(lambda: nets.Cropped(s.pick(384, 16), s.pick(6, 2), s.pick(2, 1), 100))).eval()
    num, side = s.pick(192, 2), s.pick(224, 32)
    pictures = torch.rand(num, 3, side, side, device=s.device)
    change = torch.compile(nets.changed_colors, backend=compiler(s), dynamic=False) if fixed else nets.changed_colors

    @torch.no_grad()
    def step() -> None:
        model(fresh.nhwc(change(pictures, torch.rand(5, num, device=s.device)).bfloat16()))

    return Program(step)


def _filled(s: Setting, lengths: np.ndarray, long: int) -> tuple[Tensor, float]:
    real = torch.arange(long)[None] < torch.from_numpy(lengths)[:, None]
    return real.to(s.device), float(real.float().mean())


@case("padding", "fill up to the longest of the batch", **TRIED)
def speech_filled_to_thirty_seconds(s: Setting, fixed: bool) -> Program:
    """What people say takes three to twelve seconds, and the network is given thirty of each."""
    limit = s.pick(1500, 24)
    lengths = np.random.default_rng(0).integers(limit // 10, limit * 2 // 5, s.pick(48, 2))
    long = -(-int(lengths.max()) // 8) * 8 if fixed else limit
    model = s.place(lambda: nets.Heard(128, s.pick(768, 16), s.pick(12, 2), s.pick(4, 1)))
    real, share = _filled(s, lengths, long)
    frames, said = _bf16(s, len(lengths), long, 128), _ints(s, 64, len(lengths), long)

    def loss() -> Tensor:
        each = F.cross_entropy(model(frames, real).flatten(0, 1), said.flatten(), reduction="none")
        return (each * real.flatten()).sum() / len(lengths)

    facts = {"padding": [{"argument": "real", "real_frac": share}]}
    return Program(_optimized(fresh.adamw(s, model), loss), facts=facts)


@case("padding", "molecules of like size together", **TRIED)
def atoms_filled_to_the_largest(s: Setting, fixed: bool) -> Program:
    """Molecules of 12 to 96 atoms, all filled up to the largest of the set; two batches a step."""
    limit = s.pick(96, 8)
    drawn = np.random.default_rng(0).lognormal(float(np.log(limit / 4)), 0.4, s.pick(128, 8))
    lengths = np.clip(drawn.astype(int), limit // 8, limit)
    lengths = np.sort(lengths) if fixed else lengths
    model = s.place(lambda: nets.Bonds(s.pick(128, 8), s.pick(32, 8), s.pick(2, 1)))
    optimizer, batches, shares = fresh.adamw(s, model), [], []
    for part in np.split(lengths, 2):
        long = -(-int(part.max()) // 8) * 8 if fixed else limit
        real, share = _filled(s, part, long)
        batches.append((_ints(s, 100, len(part), long), _bf16(s, len(part), long, 3), real, _bf16(s, len(part))))
        shares.append(share)

    def step() -> None:
        for kinds, places, real, wanted in batches:
            F.mse_loss(model(kinds, places, real), wanted).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return Program(step, facts={"padding": [{"argument": "real", "real_frac": sum(shares) / len(shares)}]})


@case("graph break", "eval(): nothing is left out where nobody learns", compiles=True, both=True, **ONE)
def features_of_a_network_that_drops(s: Setting, fixed: bool) -> Program:
    """Features of a compiled network whose layers ask a random number whether to be left out, and never are."""
    torch._dynamo.reset()
    wide = s.pick(768, 16)
    model = s.place(
        lambda: nn.Sequential(*(nets.Dropping(wide, s.pick(12, 2), 0.0) for _ in range(s.pick(4, 2))))
    ).train(not fixed)
    run, x = torch.compile(model, backend=compiler(s), dynamic=False), _bf16(s, s.pick(4, 2), s.pick(256, 4), wide)

    @torch.no_grad()
    def step() -> None:
        for _ in range(s.pick(9, 1)):
            run(x)

    return Program(step)


@case(
    "recompilation", "keep what counts the steps in a tensor", compiles=True,
    **ONE | {"warmup": 1, "steps": 9, "planted_steps": 4},
)  # fmt: skip
def steps_counted_in_the_network(s: Setting, fixed: bool) -> Program:
    """Gates that open as time goes by: the module counts its steps in a number, and is compiled."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 256
    wide, rows = s.pick(2048, 16), s.pick(8192, 4)
    gates = s.place(lambda: nets.Warming(wide))
    weights = [_bf16(s, wide, wide) * 0.02 for _ in range(s.pick(8, 2))]
    run, x = torch.compile(gates, backend=compiler(s), dynamic=False), _bf16(s, rows, wide)
    share = torch.ones((), device=s.device, dtype=torch.bfloat16)

    @torch.no_grad()
    def step() -> None:
        y = x
        for weight in weights:
            y = y @ weight
        run(y, x, share.mul_(0.99)) if fixed else run(y, x)

    return Program(step)


# ---------------------------------------------------------------- memory


@case("index backward", "F.embedding(graph, told)", **TRIED)
def graphs_told_by_index(s: Setting, fixed: bool) -> Program:
    """Every node is told what its whole graph is like, out of one row for each graph."""
    num, each, wide = s.pick(32, 2), s.pick(2048, 4), s.pick(512, 16)
    model = s.place(lambda: nets.Context(wide, s.pick(4, 2), indexed=not fixed))
    x, graph = _bf16(s, num * each, wide), torch.arange(num, device=s.device).repeat_interleave(each)
    return _learning(s, model, lambda: F.mse_loss(model(x, graph, num, each), x))


@case("dense embedding gradient", "nn.EmbeddingBag(sparse=True)", **ONE)
def pieces_of_words_dense(s: Setting, fixed: bool) -> Program:
    """Texts as bags of pieces of words, each a row of a table of four million."""
    rows, wide, num = s.pick(4_000_000, 64), s.pick(128, 8), s.pick(4096, 4)
    with torch.device(s.device):
        bags = nn.EmbeddingBag(rows, wide, sparse=fixed)
        head = nn.Linear(wide, 50)
    ids, kinds = _ints(s, rows, num, s.pick(60, 3)), _ints(s, 50, num)
    optimizer = torch.optim.SGD([*bags.parameters(), *head.parameters()], lr=1e-2)
    return Program(_optimized(optimizer, lambda: F.cross_entropy(head(bags(ids)), kinds)))


@case("gradient memsets", "p.grad = None", **TRIED)
def critics_zeroed_in_place(s: Setting, fixed: bool) -> Program:
    """A large critic learns five times a step; what it learned before is zeroed where it lies."""
    wide = s.pick(8192, 16)
    model = s.place(lambda: nets.perceptron(wide, wide, wide, wide, 1, act=lambda: nn.LeakyReLU(0.2)))
    real, made, optimizer = _bf16(s, s.pick(128, 2), wide), _bf16(s, s.pick(128, 2), wide), fresh.sgd(s, model)

    def step() -> None:
        for _ in range(s.pick(5, 2)):
            for p in model.parameters():
                if fixed:
                    p.grad = None
                elif p.grad is not None:
                    p.grad.zero_()
            (model(made).mean() - model(real).mean()).backward()
            optimizer.step()

    return Program(step)


@case("weights streamed from the host", "keep the teacher on the device", **ONE | {"warmup": 3, "steps": 5})
def teacher_fetched_every_step(s: Setting, fixed: bool) -> Program:
    """Somebody who knows better is moved to the device, asked, and moved away again."""
    wide, rows = s.pick(1024, 16), s.pick(8192, 4)
    small = s.place(lambda: nets.perceptron(wide, wide, wide, wide, act=nn.GELU))
    inner = s.pick(4096, 16)
    large = s.place(lambda: nets.perceptron(wide, inner, inner, inner, wide, act=nn.GELU)).eval().requires_grad_(False)
    x = _bf16(s, rows, wide)
    if not fixed:
        large.cpu()

    def loss() -> Tensor:
        if fixed:
            return F.mse_loss(small(x), large(x))
        large.to(s.device)
        wanted = large(x)
        large.to("cpu")
        return F.mse_loss(small(x), wanted)

    return Program(_optimized(fresh.adamw(s, small), loss))


@case("weights streamed from the host", "all adapters on the device", **TRIED)
def adapters_fetched_for_each_request(s: Setting, fixed: bool) -> Program:
    """Four customers ask, each with changes to the weights of their own, which lie in pinned memory."""
    wide, deep, num = s.pick(4096, 16), s.pick(512, 2), s.pick(6, 2)
    base = s.place(lambda: nn.ModuleList(nn.Linear(wide, wide) for _ in range(num))).eval()
    draw = lambda *size: torch.randn(*size, device=s.device).mul_(0.01).bfloat16()
    made = [[(draw(deep, wide), draw(wide, deep)) for _ in range(num)] for _ in range(4)]
    kept = made if fixed else [[tuple(s.pinned(part.cpu()) for part in pair) for pair in one] for one in made]
    asked = [_bf16(s, s.pick(1024, 2), wide) for _ in range(4)]

    def step() -> None:
        for x, changes in zip(asked, kept, strict=True):
            for layer, (down, up) in zip(base, changes, strict=True):
                down, up = down.to(s.device, non_blocking=True), up.to(s.device, non_blocking=True)
                x = F.relu(layer(x) + F.linear(F.linear(x, down), up))

    return _asked(step)


# ---------------------------------------------------------------- well


@healthy
def healthy_swapped_words(s: Setting, fixed: bool) -> Program:
    """A small network swaps words, and a large one finds which were swapped."""
    vocab, room, num = s.pick(30_528, 64), s.pick(256, 4), s.pick(64, 2)
    small = s.place(lambda: nets.Painted(vocab, s.pick(256, 16), s.pick(4, 2), s.pick(4, 1), room))
    large = s.place(lambda: nets.Painted(64, s.pick(768, 16), s.pick(12, 2), s.pick(6, 1), room))
    large.codes = s.place(lambda: nn.Embedding(vocab, s.pick(768, 16)))
    ids, hidden = _ints(s, vocab, num, room), torch.rand(num, room, device=s.device) < 0.15

    def loss() -> Tensor:
        found = small(ids.masked_fill(hidden, 3))
        swapped = torch.where(hidden, found.detach().argmax(-1), ids)
        right = F.cross_entropy(found.flatten(0, 1), ids.flatten())
        return right + F.cross_entropy(large(swapped).flatten(0, 1), (swapped != ids).long().flatten())

    return _learning(s, nn.ModuleList([small, large]), loss)


@healthy
def healthy_queue(s: Setting, fixed: bool) -> Program:
    """Pictures told apart from those of the steps before, which lie in a row."""
    wide, side, num, deep = s.pick(512, 16), s.pick(224, 32), s.pick(256, 2), s.pick(128, 8)
    make = lambda: fresh.nhwc(s.place(lambda: nets.Cropped(wide, s.pick(8, 2), s.pick(6, 1), deep)))
    model, slow = make(), make().requires_grad_(False)
    x, y = (fresh.nhwc(_bf16(s, num, 3, side, side)) for _ in range(2))
    queue = F.normalize(_bf16(s, s.pick(256 * 48, 8), deep), dim=-1)
    turns, optimizer = itertools.cycle(range(len(queue) // num)), fresh.adamw(s, model)
    own = torch.arange(num, device=s.device)

    def step() -> None:
        begin = next(turns) * num
        with torch.no_grad():
            torch._foreach_lerp_(list(slow.parameters()), list(model.parameters()), 0.001)
            queue[begin : begin + num] = F.normalize(slow(y), dim=-1)
        F.cross_entropy(F.normalize(model(x), dim=-1) @ queue.T / 0.2, own + begin).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@healthy
def healthy_crops(s: Setting, fixed: bool) -> Program:
    """A network that agrees with its own past about small parts of pictures."""
    wide, num, out = s.pick(384, 16), s.pick(160, 2), s.pick(8192, 16)
    make = lambda: fresh.nhwc(s.place(lambda: nets.Cropped(wide, s.pick(6, 2), s.pick(8, 1), out)))
    model, slow = make(), make().requires_grad_(False)
    whole, parts = (
        fresh.nhwc(_bf16(s, many * num, 3, side, side)) for many, side in ((2, s.pick(224, 32)), (6, s.pick(96, 16)))
    )
    optimizer = fresh.adamw(s, model)

    def step() -> None:
        with torch.no_grad():
            wanted = (slow(whole) / 0.04).softmax(-1).view(2, num, out).mean(0)
        found = torch.cat((model(whole), model(parts))) / 0.1
        F.cross_entropy(found, wanted.repeat(8, 1)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch._foreach_lerp_(list(slow.parameters()), list(model.parameters()), 0.004)

    return Program(step)


@healthy
def healthy_mobile(s: Setting, fixed: bool) -> Program:
    """A network for telephones, trained in channels_last."""
    return _mobile(s, replayed=False)


def _mobile(s: Setting, replayed: bool) -> Program:
    model = fresh.nhwc(s.place(lambda: nets.Mobile(s.pick((32, 64, 128, 192), (8, 16)), s.pick(3, 1), 1000)))
    num, side = s.pick(128, 2), s.pick(224, 32)
    x, kinds = fresh.nhwc(_bf16(s, num, 3, side, side)), _ints(s, 1000, num)
    return _learning(s, model, lambda: F.cross_entropy(model(x), kinds), replayed)


@healthy
def healthy_smooth_critic(s: Setting, fixed: bool) -> Program:
    """A critic of pictures whose slopes are kept near one, which takes slopes of slopes."""
    return _critic(s, replayed=False)


def _critic(s: Setting, replayed: bool) -> Program:
    model = fresh.nhwc(s.place(lambda: nets.Critic(s.pick((128, 256, 512, 1024), (8, 16)))))
    num, side = s.pick(128, 2), s.pick(128, 16)
    real, made = (fresh.nhwc(_bf16(s, num, 3, side, side)) for _ in range(2))

    def loss() -> Tensor:
        between = torch.lerp(real, made, 0.5).requires_grad_()
        (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        steep = torch.linalg.vector_norm(slope.flatten(1), dim=1)
        return model(made).mean() - model(real).mean() + 10 * (steep - 1).square().mean()

    return _learning(s, model, loss, replayed)


@healthy
def healthy_merged_tokens(s: Setting, fixed: bool) -> Program:
    """Pictures seen in fewer and fewer words, like ones merged on the way."""
    return _merged(s, replayed=False)


def _merged(s: Setting, replayed: bool) -> Program:
    wide, num, long = s.pick(768, 16), s.pick(192, 2), s.pick(196, 16)
    model = s.place(lambda: nets.layers(wide, s.pick(12, 2), s.pick(8, 2))).eval()
    x = _bf16(s, num, long, wide)

    @torch.no_grad()
    def step() -> None:
        y = x
        for layer in model:
            y = nets.merged(layer(y), s.pick(16, 2))

    return Program(graphed(step) if replayed and s.cuda else step)


@healthy
def healthy_shared_keys(s: Setting, fixed: bool) -> Program:
    """A decoder whose queries share keys, four to one; losses are kept on the device."""
    vocab, room = s.pick(16_384, 64), s.pick(1024, 8)
    model = s.place(lambda: nets.Told(vocab, s.pick(1024, 16), s.pick(16, 4), s.pick(6, 1), room, shared=s.pick(4, 2)))
    ids, total = _ints(s, vocab, s.pick(12, 2), room), torch.zeros((), device=s.device)

    def loss() -> Tensor:
        found = F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
        total.add_(found.detach())
        return found

    return _learning(s, model, loss)


@healthy
def healthy_spoken_lengths(s: Setting, fixed: bool) -> Program:
    """Letters made as long as they sound, on the device, and spoken."""
    num, letters, frames = s.pick(96, 2), s.pick(128, 4), s.pick(768, 8)
    model = s.place(lambda: nets.Spoken(128, s.pick(512, 16), s.pick(8, 2), s.pick(6, 1), 80))
    ids, wanted = _ints(s, 128, num, letters), _bf16(s, num, frames, 80)
    place = torch.rand(num, frames, device=s.device).mul_(letters).long().sort(1).values
    long = torch.zeros(num, letters, device=s.device).scatter_add_(1, place, torch.ones(num, frames, device=s.device))

    def loss() -> Tensor:
        heard, guessed = model(ids, place)
        return F.l1_loss(heard, wanted) + F.mse_loss(guessed.float(), long.log1p())

    return _learning(s, model, loss)


@healthy
def healthy_captions(s: Setting, fixed: bool) -> Program:
    """Words under pictures, learned with slopes clipped over all weights at once."""
    vocab, room, side, num = s.pick(32_000, 64), s.pick(64, 4), s.pick(224, 32), s.pick(192, 2)
    model = fresh.nhwc(s.place(lambda: nets.Captions(vocab, s.pick(768, 16), s.pick(12, 2), s.pick(4, 1), room)))
    pictures, ids = fresh.nhwc(_bf16(s, num, 3, side, side)), _ints(s, vocab, num, room)
    optimizer = fresh.adamw(s, model)

    def step() -> None:
        F.cross_entropy(model(pictures, ids).flatten(0, 1), ids.roll(-1, 1).flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@healthy
def healthy_weather_foretold(s: Setting, fixed: bool) -> Program:
    """Four times six hours ahead, each from the one before; what comes out is fetched a step later."""
    model = s.place(lambda: nets.Weather(20, s.pick(8, 4), s.pick(1024, 16), s.pick(16, 2), s.pick(6, 1))).eval()
    x = _bf16(s, s.pick(32, 2), 20, s.pick(128, 8), s.pick(256, 8))
    kept = s.pinned(torch.zeros(4, x.shape[0], dtype=torch.bfloat16))

    def step() -> None:
        cut = model(x)[1]
        for i in range(4):
            cut = model.out(model.trunk(model.enter(cut)))
            kept[i].copy_(cut.flatten(1).mean(1), non_blocking=True)

    return _asked(step)


# ---------------------------------------------------------------- what they may be told, done


@case("host-bound", "capture the step in a CUDA graph", **TRIED)
def again_healthy_mobile(s: Setting, fixed: bool) -> Program:
    return _mobile(s, replayed=fixed)


@case("host-bound", "capture the step in a CUDA graph", **TRIED)
def again_healthy_smooth_critic(s: Setting, fixed: bool) -> Program:
    return _critic(s, replayed=fixed)


@case("host-bound", "replay the layers from a CUDA graph", **TRIED)
def again_healthy_merged_tokens(s: Setting, fixed: bool) -> Program:
    return _merged(s, replayed=fixed)


@case("fp32 logits", "a loss that is compiled", compiles=True, **ONE)
def again_taught_in_fp32(s: Setting, fixed: bool) -> Program:
    torch._dynamo.reset()
    near = torch.compile(_nearness, backend=compiler(s), dynamic=False) if fixed else _nearness
    return _taught(s, Tensor.contiguous, near)


@case("unfused pointwise chain", "torch.compile a step ahead, in the graph", compiles=True, **ONE)
def again_plans_made_eagerly(s: Setting, fixed: bool) -> Program:
    torch._dynamo.reset()
    return _plans(s, replayed=True, joined=fixed)


@case("misaligned sizes", "four columns of zeros more", **TRIED)
def again_plans_padded(s: Setting, fixed: bool) -> Program:
    return _plans(s, replayed=True, more=4 if fixed else 0)


@case("unfused pointwise chain", "torch.compile what moves and weighs", compiles=True, **ONE)
def again_particles_drawn_again_on_host(s: Setting, fixed: bool) -> Program:
    torch._dynamo.reset()
    return _particles(s, fixed=True, joined=fixed)


@case("unfused pointwise chain", "torch.compile a try", compiles=True, **ONE)
def again_lengths_tried_until_one_helps(s: Setting, fixed: bool) -> Program:
    torch._dynamo.reset()
    return _lengths(s, fixed=True, joined=fixed)


# ---------------------------------------------------------------- what programs of other suites were told, done


@case("host-bound", "capture the step in a CUDA graph", **TRIED)
def again_healthy_questions_answered(s: Setting, fixed: bool) -> Program:
    return eighteenth._questions(s, replayed=fixed)


@case("fp32 logits", "the loss of logits as they are, outside of autocast", **ONE)
def again_adapters_judged_as_they_are(s: Setting, fixed: bool) -> Program:
    return seventeenth._tuned_adapters(s, compiled=False, wide_loss=not fixed)


@case("unfused pointwise chain", "torch.compile the rotation", compiles=True, **ONE)
def again_healthy_drawn_words(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return CASES["healthy_drawn_words"].build(s, True)
    with swapped("rotated", torch.compile(freshnets.rotated, backend=compiler(s), dynamic=False)):
        return CASES["healthy_drawn_words"].build(s, True)
