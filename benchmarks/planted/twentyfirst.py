"""A twenty-first suite: twenty programs that are well, each of which could be taken for one with a cause.

``MISTAKEN`` says what each could be taken for. They are recorded with their Python stacks as well. Whoever reads them
should find nothing over 2 % of the step; a finding over that is false unless its advice, done and timed, brings more
than noise. A program whose kernels take less than 80 % of its step is not well, and is struck before any rule reads it.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Iterator
from typing import Any

import fresh
import torch
import torch.nn.functional as F
import twentyfirstnets as nets
from cases import Prefetch, Program, Setting, case, compiler, end_workers, graphed, precision
from eighteenth import LINES
from nineteenth import _asked, _learning
from ninth import _bf16, _ints, _optimized
from thirteenth import _varlen
from torch import Tensor, nn

MISTAKEN: dict[str, str] = {
    "healthy_turned_maps": "a data loader that is waited for",
    "healthy_noted_songs": "synchronous logging, a value read in every step",
    "healthy_tags_judged": "a value read in every step, a pass that is not needed",
    "healthy_flow_averaged": "an unfused optimizer, a loop over tensors",
    "healthy_prefixed": "a dense mask that is not needed, unfused attention",
    "healthy_questions_packed": "padding, many small pieces",
    "healthy_fingerprints_mixed": "weights cast in every step",
    "healthy_fields_in_tf32": "fp32 products without tensor cores",
    "healthy_one_scan": "a small batch, convolutions in channels_first",
    "healthy_songs_sung": "launches one by one, sampling on the host",
    "healthy_crossed_clicks": "dense gradients of a table, an indexed backward pass",
    "healthy_flow_followed": "launches one by one",
    "healthy_roads": "an indexed backward pass, host code",
    "healthy_columns_ahead": "exposed or pageable copies, cores that are not used",
    "healthy_survivors": "reads of sizes, launches one by one",
    "healthy_rates_by_depth": "an unfused optimizer",
    "healthy_multiples_of_eight": "misaligned sizes",
    "healthy_games_in_memory": "micro-batches, host round trips",
    "healthy_spared_memory": "recompute that memory does not need",
    "healthy_turned_keys": "graph breaks, recompilation",
}
healthy = case("none", "nothing", **LINES)
GIB = 1 << 30


def _trained(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _left(s: Setting, left_gib: float, each_bytes: int) -> int:
    """How many rows of so many bytes fill the device, if so much is to be left."""
    return max(1, int((torch.cuda.mem_get_info()[0] - left_gib * GIB) // each_bytes)) if s.cuda else 64


# ---------------------------------------------------------------- fed, told and judged


@case("none", "nothing", **LINES | {"rounds": 1, "warmup": 8, "steps": 12})
def healthy_turned_maps(s: Setting, fixed: bool) -> Program:
    """Tiles of maps, made in batches by workers enough, pinned by the loader, and copied a step ahead."""
    side, num, workers = s.pick(128, 16), s.pick(64, 2), s.pick(10, 1)
    model = fresh.nhwc(s.place(lambda: nets.Tiles(s.pick((128, 256, 512), (8, 16)), s.pick(2, 1), 12)))
    loader = torch.utils.data.DataLoader(
        nets.Maps(side, num), None, num_workers=workers, pin_memory=s.cuda, persistent_workers=True, prefetch_factor=4
    )
    feed: Iterator[Any] = iter(loader)
    ahead = iter(Prefetch(s, feed))

    def loss() -> Tensor:
        tiles, kinds = next(ahead)
        return F.cross_entropy(model(tiles.permute(0, 3, 1, 2).to(torch.bfloat16).div_(255)), kinds)

    return Program(_optimized(fresh.sgd(s, model), loss), close=lambda: end_workers(feed))


@healthy
def healthy_noted_songs(s: Setting, fixed: bool) -> Program:
    """Songs as codes of eight books; what each step came to is written down by a thread, steps behind."""
    books, codes, long, num = 8, s.pick(1024, 16), s.pick(1024, 8), s.pick(16, 2)
    model = s.place(lambda: nets.Songs(books, codes, s.pick(1024, 16), s.pick(16, 2), s.pick(6, 1)))
    ids = _ints(s, codes, num, long, books)
    shifted = ids + codes * torch.arange(books, device=s.device)
    optimizer, params = fresh.adamw(s, model), list(model.parameters())
    file = tempfile.TemporaryFile("w")  # noqa: SIM115 (open while the program runs)
    diary = nets.Diary(file, lambda: s.pinned(torch.zeros(books + 1)), s.cuda)

    def step() -> None:
        found = model(shifted)
        each = F.cross_entropy(found[:, :-1].flatten(0, 2), ids[:, 1:].flatten(), reduction="none")
        by_book = each.view(-1, books).mean(0)
        by_book.mean().backward()
        norm = nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        diary.note(torch.cat((by_book.detach().float(), norm.float()[None])))

    def close() -> None:
        diary.close()
        file.close()

    return Program(step, close=close)


@healthy
def healthy_tags_judged(s: Setting, fixed: bool) -> Program:
    """Two batches to learn from, then two to be judged by; what was right is counted on the device."""
    vocab, long, num, tags = s.pick(32_000, 64), s.pick(512, 8), s.pick(32, 2), 32
    model = s.place(lambda: nets.Tagged(vocab, s.pick(768, 16), s.pick(12, 2), s.pick(4, 1), tags))
    learned = [(_ints(s, vocab, num, long), _ints(s, tags, num, long)) for _ in range(2)]
    kept = [(_ints(s, vocab, num, long), _ints(s, tags, num, long)) for _ in range(2)]
    optimizer, right = fresh.adamw(s, model), torch.zeros((), dtype=torch.long, device=s.device)

    def step() -> None:
        model.train()
        for ids, known in learned:
            _trained(optimizer, F.cross_entropy(model(ids).flatten(0, 1), known.flatten()))
        model.eval()
        with torch.inference_mode():
            for ids, known in kept:
                right.add_((model(ids).argmax(-1) == known).sum())

    return Program(step)


# ---------------------------------------------------------------- updates


@healthy
def healthy_flow_averaged(s: Setting, fixed: bool) -> Program:
    """Flows of latents learned with clipped slopes and an average of the weights, both by lists."""
    inner, places, num = s.pick(64, 8), s.pick(256, 4), s.pick(96, 2)
    make = lambda: nets.Flow(inner, s.pick(1024, 16), s.pick(16, 2), s.pick(5, 1), 1000, places)
    model, slow = s.place(make), s.place(make).requires_grad_(False)
    data, kinds, optimizer = _bf16(s, num, places, inner), _ints(s, 1000, num), fresh.adamw(s, model)
    params, averages = list(model.parameters()), list(slow.parameters())

    def step() -> None:
        noise, when = torch.randn_like(data), torch.rand(num, device=s.device, dtype=data.dtype)
        F.mse_loss(model(torch.lerp(noise, data, when[:, None, None]), when, kinds), data - noise).backward()
        nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(averages, params, 0.001)

    return Program(step)


@healthy
def healthy_rates_by_depth(s: Setting, fixed: bool) -> Program:
    """A network of pictures tuned with a rate for each depth, all of them planned, in groups of one fused optimizer."""
    inner, places, num, kinds = s.pick(768, 8), s.pick(196, 4), s.pick(192, 2), s.pick(128, 4)
    model = s.place(lambda: nets.Patches(inner, s.pick(768, 16), s.pick(12, 2), s.pick(5, 1), places, kinds))
    optimizer = torch.optim.AdamW(model.groups(1e-4, 0.75), fused=True)
    plan = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)
    x, known = _bf16(s, num, places, inner), _ints(s, kinds, num)

    def step() -> None:
        _trained(optimizer, F.cross_entropy(model(x), known, label_smoothing=0.1))
        plan.step()

    return Program(step)


@healthy
def healthy_survivors(s: Setting, fixed: bool) -> Program:
    """Who lives longer than whom, learned from all pairs by sums alone, each step out of a graph."""
    rows, seen, wide = s.pick(65_536, 8), s.pick(1024, 8), s.pick(2048, 8)
    model = s.place(lambda: nets.perceptron(seen, wide, wide, wide, 8))
    x, until = _bf16(s, rows, seen), torch.rand(rows, device=s.device)
    died = (torch.rand(rows, device=s.device) < 0.7).float()

    def loss() -> Tensor:
        order = until.argsort(descending=True)
        risk = model(x).float().mean(1).index_select(0, order).clamp(-20, 20)
        there, gone = risk.exp().cumsum(0).log(), died.index_select(0, order)
        return ((there - risk) * gone).sum() / gone.sum()

    return _learning(s, model, loss, replayed=True)


# ---------------------------------------------------------------- texts


@healthy
def healthy_prefixed(s: Setting, fixed: bool) -> Program:
    """Answers behind questions of different lengths: what may be seen is not causal, and a bool mask says it."""
    vocab, long, num = s.pick(8192, 64), s.pick(1024, 8), s.pick(16, 2)
    model = s.place(lambda: nets.Prefixed(vocab, s.pick(1024, 16), s.pick(16, 2), s.pick(4, 1)))
    ids, prefix = _ints(s, vocab, num, long), 1 + _ints(s, long // 2, num)
    at = torch.arange(long, device=s.device)
    mask = (at[None, :, None] >= at[None, None]) | (at[None, None] < prefix[:, None, None])

    def loss() -> Tensor:
        return F.cross_entropy(model(ids, mask[:, None]).flatten(0, 1), ids.roll(-1, 1).flatten())

    return _learning(s, model, loss)


@healthy
def healthy_questions_packed(s: Setting, fixed: bool) -> Program:
    """Questions of different lengths behind each other; each becomes the mean of what its words became."""
    wide, heads, num = s.pick(1024, 16), s.pick(16, 2), s.pick(192, 3)
    lengths = torch.randint(s.pick(24, 2), s.pick(384, 8), (num,))
    ends = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0))).to(s.device)
    short, longest, vocab = ends.int(), int(lengths.max()), s.pick(30_000, 64)
    words = s.place(lambda: nn.Embedding(vocab, wide)).eval()
    model = s.place(lambda: nets.layers(wide, heads, s.pick(10, 1))).eval()
    ids = _ints(s, vocab, int(lengths.sum()))

    def step() -> Tensor:
        x = words(ids)
        for layer in model:
            normed = layer.first(x)
            k, v = layer.kv(normed).unflatten(-1, (2, heads, -1)).unbind(1)
            found = _varlen(s, layer.q(normed).unflatten(-1, (heads, -1)), k, v, short, longest)
            x = x + layer.out(found.flatten(1))
            x = x + layer.down(F.gelu(layer.up(layer.second(x)), approximate="tanh"))
        return F.normalize(torch.segment_reduce(x.float(), "mean", offsets=ends, unsafe=True), dim=1)

    return _asked(step)


@healthy
def healthy_multiples_of_eight(s: Setting, fixed: bool) -> Program:
    """A language model of sizes nobody would choose, each of them a multiple of eight."""
    wide, heads, inner, vocab = s.pick((1352, 13, 3608, 8216), (16, 2, 24, 64))
    long, num = s.pick(1000, 8), s.pick(16, 2)
    trunk = s.place(lambda: nn.Sequential(*(nets.Gated(wide, heads, inner) for _ in range(s.pick(4, 1)))))
    words, out = s.place(lambda: nn.Embedding(vocab, wide)), s.place(lambda: nn.Linear(wide, vocab, bias=False))
    model, ids = nn.ModuleList([words, trunk, out]), _ints(s, vocab, num, long)
    loss = lambda: F.cross_entropy(out(trunk(words(ids))).flatten(0, 1), ids.roll(-1, 1).flatten())
    return _learning(s, model, loss)


@healthy
def healthy_songs_sung(s: Setting, fixed: bool) -> Program:
    """Eight sounds for each of many songs, drawn on the device; each sound comes out of one graph."""
    books, codes, wide, num, room = 4, s.pick(2048, 16), s.pick(2048, 16), s.pick(96, 2), s.pick(1024, 8)
    model = s.place(lambda: nets.Sung(books, codes, wide, s.pick(16, 2), s.pick(6, 1), num, room)).eval()
    shift, at = codes * torch.arange(books, device=s.device), torch.arange(room, device=s.device)
    ids, place = _ints(s, codes, num, 1, books) + shift, torch.full((1,), room - room // 8, device=s.device)

    @torch.no_grad()
    def sound() -> None:
        ids.copy_(model(ids, place, (at <= place)[None, None, None]) + shift)
        place.add_(1).clamp_(max=room - 1)

    run = graphed(sound) if s.cuda else sound
    return Program(lambda: [run() for _ in range(s.pick(8, 2))])


@case("none", "nothing", compiles=True, **LINES | {"rounds": 1})
def healthy_turned_keys(s: Setting, fixed: bool) -> Program:
    """A language model whose layers are compiled once for all of them, in a steady state."""
    torch._dynamo.reset()
    wide, heads, long, num, vocab = s.pick(1024, 16), s.pick(16, 2), s.pick(1024, 8), s.pick(16, 2), s.pick(8192, 64)
    trunk = s.place(lambda: nn.ModuleList(nets.Gated(wide, heads, s.pick(2816, 24)) for _ in range(s.pick(6, 2))))
    words, out = s.place(lambda: nn.Embedding(vocab, wide)), s.place(lambda: nn.Linear(wide, vocab, bias=False))
    for layer in trunk:
        layer.compile(backend=compiler(s), dynamic=False)
    each = wide // heads // 2
    angle = torch.arange(long)[:, None] * 10_000 ** (-torch.arange(each) / each)
    turned = torch.stack((angle.cos(), angle.sin())).to(s.device, torch.bfloat16)
    ids = _ints(s, vocab, num, long)

    def loss() -> Tensor:
        x = words(ids)
        for layer in trunk:
            x = layer(x, turned)
        return F.cross_entropy(out(x).flatten(0, 1), ids.roll(-1, 1).flatten())

    return _learning(s, nn.ModuleList([words, trunk, out]), loss)


# ---------------------------------------------------------------- precision


@healthy
def healthy_fingerprints_mixed(s: Setting, fixed: bool) -> Program:
    """What molecules do, by fingerprints: weights in fp32, products in bf16, rows so many that casts are few."""
    rows, bits, wide, does = s.pick(32_768, 4), s.pick(2048, 16), s.pick(4096, 16), s.pick(512, 8)
    model = s.place(lambda: nets.perceptron(bits, *([wide] * s.pick(5, 1)), does), torch.float32)
    x, known = _ints(s, 2, rows, bits).bfloat16(), _ints(s, 2, rows, does).bfloat16()

    def loss() -> Tensor:
        with torch.autocast(s.device, torch.bfloat16):
            return F.binary_cross_entropy_with_logits(model(x), known)

    return _learning(s, model, loss)


@healthy
def healthy_fields_in_tf32(s: Setting, fixed: bool) -> Program:
    """Fields foretold in fp32, whose products tensor cores may round."""
    rows, points, seen, wide = s.pick(4096, 4), s.pick(24_576, 8), s.pick(1024, 8), s.pick(2048, 16)
    model = s.place(lambda: nets.Fields(seen, wide, s.pick(4, 1), s.pick(512, 8)), torch.float32)
    measured, places = (torch.randn(size, device=s.device) for size in ((rows, seen), (points, 16)))
    known = torch.randn(rows, points, device=s.device)
    run = _learning(s, model, lambda: F.mse_loss(model(measured, places), known))
    return Program(run.step, lambda: precision("high"))


# ---------------------------------------------------------------- pictures


@healthy
def healthy_one_scan(s: Setting, fixed: bool) -> Program:
    """One scan in a batch, so large that more would change nothing; in channels_last."""
    side, kinds = s.pick(2048, 32), 8
    model = fresh.nhwc(s.place(lambda: nets.Outlined(8, s.pick((64, 128, 256), (8, 16)), kinds)))
    x, known = fresh.nhwc(_bf16(s, 1, 8, side, side)), _ints(s, 2, side * side, kinds).bfloat16()
    loss = lambda: F.binary_cross_entropy_with_logits(model(x), known)
    return Program(_optimized(fresh.sgd(s, model), loss))


@healthy
def healthy_flow_followed(s: Setting, fixed: bool) -> Program:
    """Pictures drawn along a flow, guided, two looks for each step of it, and the step out of a graph."""
    inner, places, num = s.pick(64, 8), s.pick(256, 4), s.pick(16, 2)
    model = s.place(lambda: nets.Flow(inner, s.pick(1024, 16), s.pick(16, 2), s.pick(6, 1), 1001, places)).eval()
    x, when = _bf16(s, num, places, inner), torch.zeros(1, device=s.device, dtype=torch.bfloat16)
    kinds = torch.cat((_ints(s, 1000, num), torch.full((num,), 1000, device=s.device)))

    def way(x: Tensor, when: Tensor) -> Tensor:
        asked, free = model(x.repeat(2, 1, 1), when.expand(2 * num), kinds).chunk(2)
        return torch.lerp(free, asked, 3.0)

    @torch.no_grad()
    def move() -> None:
        first = way(x, when)
        second = way(x + first / 32, when + 1 / 32)
        x.add_(first + second, alpha=1 / 64)
        when.add_(1 / 32).remainder_(1)

    run = graphed(move) if s.cuda else move
    return Program(lambda: [run() for _ in range(s.pick(2, 1))])


# ---------------------------------------------------------------- tables and graphs


@healthy
def healthy_crossed_clicks(s: Setting, fixed: bool) -> Program:
    """Who clicks, from 26 rows of a table of sixteen million whose slopes are sparse; the rest learns by itself."""
    rows, each, columns, num = s.pick(16_000_000, 64), s.pick(64, 8), s.pick(26, 3), s.pick(49_152, 4)
    with torch.device(s.device):
        table = nn.Embedding(rows, each, sparse=True)
    model = s.place(lambda: nets.Crossed(columns, each, s.pick(3, 1), s.pick(2048, 8)))
    ids, clicked = _ints(s, rows, num, columns), torch.rand(num, device=s.device).round()
    slow, fast = torch.optim.SGD(table.parameters(), lr=1e-2), fresh.adamw(s, model)

    def step() -> None:
        found = model(table(ids).flatten(1).to(torch.bfloat16))
        F.binary_cross_entropy_with_logits(found.float(), clicked).backward()
        for optimizer in (slow, fast):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return Program(step)


@healthy
def healthy_roads(s: Setting, fixed: bool) -> Program:
    """How busy crossings will be: neighbors lie in order, and are summed piece by piece in both directions."""
    nodes, wide = s.pick(160_000, 16), s.pick(256, 8)
    offsets, near = nets.roads(nodes, 6, s.device)
    model = s.place(lambda: nets.Crossings(16, wide, s.pick(3, 1)), torch.float32)
    x, known = torch.randn(nodes, 16, device=s.device), torch.randn(nodes, 8, device=s.device)
    run = _learning(s, model, lambda: F.smooth_l1_loss(model(x, offsets, near), known))
    return Program(run.step, lambda: precision("high"))


@healthy
def healthy_columns_ahead(s: Setting, fixed: bool) -> Program:
    """Many columns out of pinned memory, copied a step ahead on a stream of their own, by a process on eight cores."""
    rows, columns, wide, kinds = s.pick(49_152, 4), s.pick(512, 8), s.pick(4096, 8), 64
    model = s.place(lambda: nets.perceptron(columns, wide, wide, wide, kinds))
    draw = lambda: (torch.empty(rows, columns).uniform_(), torch.randint(0, kinds, (rows,)))
    host = [tuple(s.pinned(part) for part in draw()) for _ in range(2)]
    feed = iter(Prefetch(s, itertools.cycle(host)))

    def loss() -> Tensor:
        x, known = next(feed)
        return F.cross_entropy(model(x.to(torch.bfloat16)), known)

    run = _optimized(fresh.adamw(s, model), loss)
    return Program(run, functools.partial(fresh._cores, 8))


# ---------------------------------------------------------------- memory that is full


@healthy
def healthy_games_in_memory(s: Setting, fixed: bool) -> Program:
    """Moves learned from games that fill the device, in two parts: there is no room for both at once."""
    side, num, acts = s.pick(84, 8), s.pick(1024, 2), 16
    model, aim = (fresh.nhwc(s.place(lambda: nets.Player(s.pick(64, 8), acts))) for _ in "ab")
    aim.requires_grad_(False)
    games = torch.empty(_left(s, LEFT_GAMES_GIB, side * side * 8), side * side * 8, dtype=torch.uint8, device=s.device)
    games.view(torch.long).random_()
    optimizer = fresh.adamw(s, model)

    def seen(at: Tensor) -> Tensor:
        found = games.index_select(0, at).view(-1, side, side, 8).permute(0, 3, 1, 2)
        return found.to(torch.bfloat16).div_(255)

    def step() -> None:
        for _ in range(2):
            at = torch.randint(0, len(games) - 1, (num,), device=s.device)
            did, won = _ints(s, acts, num), torch.rand(num, device=s.device)
            with torch.no_grad():
                known = won + 0.99 * aim(seen(at + 1)).amax(1)
            found = model(seen(at)).gather(1, did[:, None])[:, 0]
            (F.smooth_l1_loss(found.float(), known.float()) / 2).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@healthy
def healthy_spared_memory(s: Setting, fixed: bool) -> Program:
    """Features of all films fill the device; what layers make of them is computed again, since it finds no room."""
    wide, long, num = s.pick(512, 16), s.pick(512, 4), s.pick(160, 2)
    model = s.place(lambda: nets.Spared(wide, s.pick(8, 2), s.pick(6, 2)))
    films = torch.zeros(_left(s, LEFT_FILMS_GIB, 2 * long * wide), long, wide, dtype=torch.bfloat16, device=s.device)
    films[:4096].normal_()

    def loss() -> Tensor:
        x = films.index_select(0, _ints(s, min(4096, len(films)), num))
        return F.mse_loss(model(x)[:, :-1], x[:, 1:])

    return _learning(s, model, loss)


LEFT_GAMES_GIB = 8.5
"""What games leave: enough for one part of a step and what is made on the way, not for two."""
LEFT_FILMS_GIB = 7.0
"""What films leave: enough for layers computed again, not for all that they make."""
