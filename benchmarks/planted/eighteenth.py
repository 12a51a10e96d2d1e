"""An eighteenth suite: one ordinary script for each of 28 causes, nets and spellings that no suite had before, and nine
programs thought to be well, recorded with their Python stacks.

A cause counts where its fix brings 5 % of the planted step and three times what both programs vary by (half of the two
quartile ranges of their step times, added) at least; both are judged from step times alone, before any rule is asked.
"""

from __future__ import annotations

import functools
import gc
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import eighteenthnets as nets
import fresh
import numpy as np
import torch
import torch.nn.functional as F
from cases import Prefetch, Program, Setting, case, compiler, end_workers, graphed, precision
from ninth import HEALTHY, _bf16, _ints, _optimized
from tenth import TRIED
from torch import Tensor, nn

LINES: dict[str, Any] = HEALTHY | {"stack": True}
"""Programs thought to be well are also recorded with their Python stack, as many people do."""
healthy = case("none", "nothing", **LINES)
ONE: dict[str, Any] = TRIED | {"rounds": 1}
"""What one program leaves in the process would burden the other."""
EVERY = 50
"""Steps after which a script looks at what it has collected."""


def _rows(s: Setting, num: int, wide: int) -> Tensor:
    return _bf16(s, s.pick(num, 4), s.pick(wide, 16))


def _stack(s: Setting, wide: int, layers: int) -> nn.Sequential:
    return s.place(lambda: nn.Sequential(*(nets.Narrow(s.pick(wide, 16)) for _ in range(s.pick(layers, 2)))))


def _trunk(s: Setting, wide: int, heads: int, layers: int) -> nn.Module:
    return s.place(lambda: nets.encoder(s.pick(wide, 16), s.pick(heads, 2), s.pick(layers, 2)))


# ---------------------------------------------------------------- what is fed


@case("data loader", "num_workers=0 → 8", **ONE | {"warmup": 8, "steps": 12})
def proteins_read_in_the_loop(s: Setting, fixed: bool) -> Program:
    """Chains of letters, read and hidden letter by letter where the step runs, or by workers."""
    length, num = s.pick(512, 12), (s.pick(8, 1) if fixed else 0)
    model = s.place(lambda: nets.Chains(s.pick(512, 16), s.pick(8, 2), s.pick(8, 2), length))
    loader = torch.utils.data.DataLoader(
        nets.Proteins(length), s.pick(128, 2), num_workers=num, pin_memory=s.cuda, persistent_workers=num > 0
    )
    feed: Iterator[Any] = iter(loader)
    loss = lambda: model(*(part.to(s.device, non_blocking=True) for part in next(feed)))
    return Program(_optimized(fresh.adamw(s, model), loss), close=lambda: end_workers(feed))


@case("pageable copy", "pin the tiles, and copy the next ones ahead with non_blocking=True", **TRIED)
def tiles_pageable(s: Setting, fixed: bool) -> Program:
    """Pictures of twelve bands, as they come from a file."""
    model = fresh.nhwc(s.place(lambda: nets.Tiles(12, s.pick((64, 128, 256, 512), (8, 16)), 20)))
    size = (s.pick(24, 2), 12, s.pick(256, 16), s.pick(256, 16))
    batch = (fresh.nhwc(torch.randn(size)), torch.randint(0, 20, (size[0],)))
    host: Iterator[Any] = itertools.cycle([tuple(s.pinned(part) if fixed else part for part in batch)])
    feed = iter(Prefetch(s, host)) if fixed else (tuple(part.to(s.device) for part in found) for found in host)

    def loss() -> Tensor:
        tiles, kinds = next(feed)
        return F.cross_entropy(model(tiles.bfloat16()), kinds)

    return Program(_optimized(fresh.sgd(s, model), loss))


@case("pinned copy on the compute stream", "copy the next features on a stream of their own", **TRIED)
def features_probed_in_line(s: Setting, fixed: bool) -> Program:
    """A head learns from features that were computed once and lie in pinned memory."""
    wide, rows = s.pick(2048, 16), s.pick(16_384, 8)
    layers = lambda: nn.Sequential(
        nn.Linear(wide, 2 * wide), nn.GELU(), nn.Linear(2 * wide, 2 * wide), nn.GELU(), nn.Linear(2 * wide, 1000)
    )
    model = s.place(layers)
    batch = (s.pinned(torch.randn(rows, wide)), s.pinned(torch.randint(0, 1000, (rows,))))
    host: Iterator[Any] = itertools.cycle([batch])
    here = lambda found: tuple(part.to(s.device, non_blocking=True) for part in found)
    feed = iter(Prefetch(s, host)) if fixed else map(here, host)

    def loss() -> Tensor:
        known, kinds = next(feed)
        return F.cross_entropy(model(known.bfloat16()), kinds)

    return Program(_optimized(fresh.adamw(s, model), loss))


@case("many small copies", "all annotations of a batch in one pinned tensor", **TRIED)
def annotations_one_by_one(s: Setting, fixed: bool) -> Program:
    """A detector whose annotations come as a list of dictionaries."""
    num, wide = s.pick(64, 2), s.pick(256, 16)
    model = s.place(lambda: nets.Asked(wide, s.pick(8, 2), s.pick(6, 2), s.pick(100, 24)))
    places = _bf16(s, num, s.pick(400, 9), wide)
    listed = nets.drawn_boxes(num, np.random.default_rng(0))
    counts = [len(one["area"]) for one in listed]
    flat = [
        torch.cat([one[name].reshape(n, -1) for one, n in zip(listed, counts)]) for name in ("boxes", "labels", "area")
    ]
    packed = s.pinned(torch.cat(flat, 1))
    picture = torch.repeat_interleave(torch.arange(num), torch.tensor(counts)).to(s.device)
    asked = torch.cat([torch.arange(n) for n in counts]).to(s.device)

    def annotations() -> tuple[Tensor, Tensor, Tensor]:
        if fixed:
            boxes, kinds, area = packed.to(s.device, non_blocking=True).split((4, 1, 1), 1)
            return boxes, kinds[:, 0].long(), area[:, 0]
        here = [{name: part.to(s.device) for name, part in one.items()} for one in listed]
        boxes, kinds, area = (torch.cat([one[name] for one in here]) for name in ("boxes", "labels", "area"))
        return boxes, kinds, area

    def loss() -> Tensor:
        wanted, kinds, area = annotations()
        boxes, chances = model(places)
        off = F.l1_loss(boxes[picture, asked].float(), wanted, reduction="none").mean(1)
        return F.cross_entropy(chances[picture, asked], kinds) + (off * (2 - area)).mean()

    return Program(_optimized(fresh.adamw(s, model), loss))


@case("host code", "draw what was not bought on the device", **TRIED | {"steps": 7})
def negatives_drawn_in_python(s: Setting, fixed: bool) -> Program:
    """What people bought in a row, against things they did not, drawn one by one in Python."""
    num, long, wide, things = s.pick(512, 2), s.pick(64, 4), s.pick(512, 16), s.pick(50_000, 64)
    trunk = _trunk(s, 512, 8, 6)
    table = s.place(lambda: nn.Embedding(things, wide))
    both = nn.ModuleList([trunk, table])
    bought = _ints(s, things, num, long + 1)
    held = [set(row) for row in bought.tolist()]
    draw = random.Random(0)

    def negatives() -> Tensor:
        if fixed:
            return torch.randint(0, things, (num, long), device=s.device)
        rows = []
        for had in held:
            row = list[int]()
            while len(row) < long:
                thing = draw.randrange(things)
                if thing not in had:
                    row.append(thing)
            rows.append(row)
        return torch.tensor(rows, device=s.device)

    def loss() -> Tensor:
        found, right, wrong = trunk(table(bought[:, :-1])), table(bought[:, 1:]), table(negatives())
        return -F.logsigmoid((found * (right - wrong)).sum(-1).float()).mean()

    return Program(_optimized(fresh.adamw(s, both), loss))


# ---------------------------------------------------------------- who waits for whom


@case("synchronization", "a fixed number of rounds", **TRIED)
def rounds_until_it_settles(s: Setting, fixed: bool) -> Program:
    """A layer gone through until nothing changes, looked at in every round."""
    model = s.place(lambda: nets.Settling(s.pick(2048, 16))).eval()
    x = _rows(s, 2048, 2048)

    @torch.inference_mode()
    def step() -> None:
        given, z = model.outer(x), torch.zeros_like(x)
        for _ in range(s.pick(40, 3)):
            new = model(z, given)
            if not fixed and (new - z).abs().max().item() < 1e-9:
                break
            z = new

    return Program(step)


@case("synchronization", "no hooks that wait", **TRIED)
def blocks_timed_by_hooks(s: Setting, fixed: bool) -> Program:
    """Hooks around every block note how long it takes, which is only so once the device is done."""
    model, x, seen = _stack(s, 1024, 24), _rows(s, 4096, 1024), list[float]()

    def note(*_: Any) -> None:
        s.synchronize()
        seen.append(time.perf_counter())

    for block in () if fixed else model:
        block.register_forward_pre_hook(note)
        block.register_forward_hook(note)
    return Program(_optimized(fresh.adamw(s, model), lambda: F.mse_loss(model(x), x)))


@case("synchronous logging", "keep the scalars on the device, and write them every fiftieth step", **TRIED)
def scalars_written_every_step(s: Setting, fixed: bool) -> Program:
    """The loss, and how long the slopes of every block are, written to a file."""
    model, x = _stack(s, 1024, 16), _rows(s, 2048, 1024)
    optimizer, turns, kept = fresh.adamw(s, model), itertools.count(), list[Tensor]()
    file = tempfile.TemporaryFile()  # noqa: SIM115 (open while the program runs)
    writer = nets.Writer(file)

    def write(scalars: Tensor, at: int) -> None:
        for i, value in enumerate(scalars):
            writer.add(f"train/slope_{i}" if i else "train/loss", value.item(), at)

    def step() -> None:
        loss = F.mse_loss(model(x), x)
        loss.backward()
        sizes = [nn.utils.get_total_norm([p.grad for p in block.parameters()]).float() for block in model]
        scalars, at = torch.stack((loss.detach().float(), *sizes)), next(turns)
        if not fixed:
            write(scalars, at)
        else:
            kept.append(scalars)
        if len(kept) == EVERY:
            write(torch.stack(kept).mean(0).cpu(), at)
            kept.clear()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step, close=file.close)


@case("round trip through the host", "topk on the device", **TRIED)
def negatives_mined_on_host(s: Setting, fixed: bool) -> Program:
    """Pairs of texts; the nearest wrong ones are sought with numpy."""
    num, wide = s.pick(1024, 8), s.pick(512, 16)
    left, right = _trunk(s, 512, 8, 4), _trunk(s, 512, 8, 4)
    x, y = (_bf16(s, num, s.pick(32, 4), wide) for _ in range(2))
    hard, own = s.pick(16, 2), torch.arange(num, device=s.device)

    def nearest(near: Tensor) -> Tensor:
        if fixed:
            return near.topk(hard, 1).indices
        found = near.float().cpu().numpy()
        return torch.from_numpy(np.argpartition(-found, hard, axis=1)[:, :hard].copy()).to(s.device)

    def loss() -> Tensor:
        found, wanted = (F.normalize(net(given).mean(1), dim=-1) for net, given in ((left, x), (right, y)))
        near = found @ wanted.T
        right_ones, wrong = near[own, own], near.gather(1, nearest(near.detach()))
        return F.relu(0.2 + wrong - right_ones[:, None]).mean()

    return Program(_optimized(fresh.adamw(s, nn.ModuleList([left, right])), loss))


# ---------------------------------------------------------------- the host's own time


@case("host-bound", "replay the orbits from a CUDA graph", **TRIED)
def orbits_followed_eagerly(s: Setting, fixed: bool) -> Program:
    """Where things are after twenty steps of a learned law, four looks a step."""
    return _orbits(s, replayed=fixed, dtype=torch.float32)


def _orbits(s: Setting, replayed: bool, dtype: torch.dtype) -> Program:
    model = s.place(lambda: nets.Orbit(s.pick(256, 8)), dtype).eval()
    x = torch.randn(s.pick(1024, 4), 8, device=s.device, dtype=dtype)

    @torch.no_grad()
    def run() -> None:
        x.copy_(model(x, 0.01, s.pick(20, 2)).clamp(-3, 3))

    return Program(graphed(run) if replayed and s.cuda else run, functools.partial(precision, "high"))


@case("unfused optimizer", "the same update over lists of weights", **TRIED)
def lamb_weight_by_weight(s: Setting, fixed: bool) -> Program:
    """An optimizer out of a paper, written as it stands there."""
    model, x = _trunk(s, 768, 12, 12), _bf16(s, s.pick(24, 2), s.pick(512, 4), s.pick(768, 16))
    return Program(_optimized(nets.Lamb(model.parameters(), together=fixed), lambda: F.mse_loss(model(x), x)))


@case("small batch", "one batch of 32 in place of sixteen of 2", **TRIED | {"steps": 5})
def answers_learned_two_by_two(s: Setting, fixed: bool) -> Program:
    """Slopes of sixteen small batches, added up."""
    model, x = _trunk(s, 768, 12, 6), _bf16(s, s.pick(32, 4), s.pick(512, 4), s.pick(768, 16))
    optimizer, parts = fresh.adamw(s, model), (1 if fixed else s.pick(16, 2))

    def step() -> None:
        for part in x.chunk(parts):
            (F.mse_loss(model(part), part) / parts).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("allocator", "no empty_cache after each window", **TRIED)
def windows_then_emptied(s: Setting, fixed: bool) -> Program:
    """A large picture outlined window by window, memory given back after each."""
    model = fresh.nhwc(s.place(lambda: nets.Outliner(s.pick(64, 8), s.pick(4, 2)))).eval()
    side = s.pick(512, 16)
    windows = [fresh.nhwc(_bf16(s, s.pick(2, 1), 1, side, side)) for _ in range(s.pick(6, 2))]
    whole = torch.zeros(len(windows), side, side, dtype=torch.long, device=s.device)

    @torch.inference_mode()
    def step() -> None:
        for i, window in enumerate(windows):
            whole[i] = model(window).argmax(1)[0]
            if not fixed and s.cuda:
                torch.cuda.empty_cache()

    return Program(step)


@case("garbage collection", "no gc.collect() in the loop", **ONE)
def molecules_then_collected(s: Setting, fixed: bool) -> Program:
    """Many small objects lie around, and somebody looks through all of them after each step."""
    model, x = _stack(s, 1024, 12), _rows(s, 8192, 1024)
    learn = _optimized(fresh.adamw(s, model), lambda: F.mse_loss(model(x), x))
    kept = [{"atoms": [i, i + 1], "bonds": [[i, 1]], "name": str(i)} for i in range(s.pick(50_000, 50))]

    def step(held: Any = kept) -> None:
        learn()
        if not fixed:
            gc.collect()

    return Program(step, close=kept.clear)


@case("graph break", "no logger inside of what is compiled", compiles=True, both=True, **ONE)
def blocks_that_log_compiled(s: Setting, fixed: bool) -> Program:
    """A compiled network whose blocks tell a logger what is inside of them."""
    torch._dynamo.reset()
    block = lambda: nets.Narrow(s.pick(1024, 16), None if fixed else nets.tell)
    model = s.place(lambda: nn.Sequential(*(block() for _ in range(s.pick(16, 2))))).eval()
    run = torch.compile(model, backend=compiler(s), dynamic=False)
    x = _rows(s, 512, 1024)

    @torch.no_grad()
    def step() -> None:
        for _ in range(4):
            run(x)

    return Program(step)


# ---------------------------------------------------------------- kernels


@case("unfused pointwise chain", "torch.compile the wave", compiles=True, **ONE)
def waves_in_steps(s: Setting, fixed: bool) -> Program:
    """Frames of sound through layers that end in a wave, an op at a time."""
    torch._dynamo.reset()
    model, x = s.place(lambda: nets.Waved(s.pick(2048, 16), s.pick(8, 2))), _rows(s, 16_384, 2048)
    wave = torch.compile(nets.snake, backend=compiler(s), dynamic=False) if fixed else nets.snake
    return Program(_optimized(fresh.adamw(s, model), lambda: F.mse_loss(model(x, wave), x)))


@case("fp32 matmul", 'set_float32_matmul_precision("high")', **TRIED)
def genes_in_fp32(s: Setting, fixed: bool) -> Program:
    """How much of each gene there is, through a narrow middle and back."""
    return _genes(s, "high" if fixed else "highest", F.poisson_nll_loss)


def _genes(s: Setting, how: str, judged: Callable[[Tensor, Tensor], Tensor]) -> Program:
    genes, wide = s.pick(16_384, 16), s.pick(2048, 8)
    sizes = (genes, wide, wide, genes)
    layers = lambda: nn.Sequential(
        *(part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.LayerNorm(b), nn.ReLU()))
    )
    model, x = s.place(layers, torch.float32), torch.rand(s.pick(2048, 4), genes, device=s.device)
    learn = _optimized(fresh.adamw(s, model), lambda: judged(model(x), x))
    return Program(learn, functools.partial(precision, how))


@case("NCHW convolution", "network and pictures in channels_last", **TRIED)
def cells_outlined_channels_first(s: Setting, fixed: bool) -> Program:
    """Which pixels are of a cell."""
    model, side = s.place(lambda: nets.Outliner(s.pick(64, 8), s.pick(4, 2))), s.pick(256, 16)
    x, kinds = _bf16(s, s.pick(16, 2), 1, side, side), _ints(s, 2, s.pick(16, 2), side, side)
    if fixed:
        model, x = fresh.nhwc(model, x)
    return Program(_optimized(fresh.adamw(s, model), lambda: F.cross_entropy(model(x), kinds)))


def _written(s: Setting, vocab: int, wide: int, layers: int, batch: int, by_hand: bool) -> tuple[nn.Module, Tensor]:
    room, letters = s.pick(1024, 8), s.pick(vocab, 64)
    sizes = (letters, s.pick(wide, 16), s.pick(wide // 64, 2), s.pick(layers, 2), room)
    return s.place(lambda: nets.Written(*sizes, by_hand)), _ints(s, letters, s.pick(batch, 2), room)


@case("unfused attention", "F.scaled_dot_product_attention(is_causal=True)", **TRIED)
def letters_attend_by_hand(s: Setting, fixed: bool) -> Program:
    """Attention as many tutorials write it: masked, softened, dropped."""
    model, ids = _written(s, 8192, 768, 6, 12, by_hand=not fixed)
    loss = lambda: F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
    return Program(_optimized(fresh.adamw(s, model), loss))


@case("fp32 logits", "the loss of the logits as they are", **TRIED)
def code_judged_in_fp32(s: Setting, fixed: bool) -> Program:
    """Logits made fp32 before the loss, to be on the safe side."""
    model, ids = _written(s, 50_304, 768, 4, 8, by_hand=False)
    judged = (lambda x: x) if fixed else Tensor.float
    loss = lambda: F.cross_entropy(judged(model(ids)).flatten(0, 1), ids.roll(-1, 1).flatten())
    return Program(_optimized(fresh.adamw(s, model), loss))


@case("misaligned sizes", "pad the vocabulary to a multiple of 64", **TRIED)
def words_of_250002(s: Setting, fixed: bool) -> Program:
    """Hidden words of a hundred languages, of a table as large as one that everybody uses."""
    vocab, wide, room = s.pick(250_112 if fixed else 250_002, 64 if fixed else 50), s.pick(768, 16), s.pick(256, 8)
    model = s.place(lambda: nets.Guessed(vocab, wide, s.pick(12, 2), s.pick(6, 2), room))
    ids = _ints(s, s.pick(250_000, 48), s.pick(16, 2), room)
    loss = lambda: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    return Program(_optimized(fresh.adamw(s, model), loss))


@case("padding", "sorted by length: each batch is padded to its own longest", **TRIED | {"steps": 7})
def reviews_padded_to_the_limit(s: Setting, fixed: bool) -> Program:
    """Texts of all lengths, each filled up to 512 words; four batches a step."""
    limit, vocab = s.pick(512, 16), s.pick(30_528, 96)
    model = s.place(lambda: nets.Texts(vocab, s.pick(768, 16), s.pick(12, 2), s.pick(6, 2), limit))
    drawn = np.random.default_rng(0).lognormal(float(np.log(limit / 4)), 0.7, s.pick(128, 8))
    lengths = np.clip(drawn.astype(int), 4, limit)
    lengths = np.sort(lengths) if fixed else lengths
    batches, real = [], 0.0
    for part in np.split(lengths, 4):
        long = min(limit, -(-int(part.max()) // 8) * 8) if fixed else limit
        shown = torch.arange(long)[None] < torch.from_numpy(part)[:, None]
        batches.append((_ints(s, vocab, len(part), long), shown.to(s.device), _ints(s, 2, len(part))))
        real += float(shown.float().mean()) / 4
    optimizer = fresh.adamw(s, model)

    def step() -> None:
        for ids, shown, kinds in batches:
            F.cross_entropy(model(ids, shown), kinds).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return Program(step, facts={"padding": [{"argument": "real", "real_frac": real}]})


# ---------------------------------------------------------------- memory


@case("index backward", "F.embedding(far, table)", **TRIED)
def distances_indexed(s: Setting, fixed: bool) -> Program:
    """Attention with a bias by distance, out of a table that is indexed."""
    room, wide = s.pick(512, 8), s.pick(512, 16)
    model = s.place(lambda: nets.Distances(wide, s.pick(8, 2), s.pick(6, 2), room, room, indexed=not fixed))
    x = _bf16(s, s.pick(8, 2), room, wide)
    return Program(_optimized(fresh.adamw(s, model), lambda: F.mse_loss(model(x), x)))


@case("dense embedding gradient", "nn.Embedding(sparse=True)", **ONE)
def factors_dense(s: Setting, fixed: bool) -> Program:
    """Twenty million things, of which a step sees few."""
    rows, fields = s.pick(20_000_000, 64), s.pick(26, 3)
    with torch.device(s.device):
        model = nets.Factors(rows, s.pick(32, 4), sparse=fixed)
    ids, truth = _ints(s, rows, s.pick(4096, 4), fields), torch.rand(s.pick(4096, 4), device=s.device).round()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loss = lambda: F.binary_cross_entropy_with_logits(model(ids), truth)
    return Program(_optimized(optimizer, loss))


@case("gradient memsets", "zero_grad(set_to_none=True)", **TRIED)
def slopes_set_to_zero(s: Setting, fixed: bool) -> Program:
    """What everybody likes, through a narrow middle and back; slopes are zeroed where they lie."""
    things, wide = s.pick(65_536, 16), s.pick(4096, 8)
    model = s.place(lambda: nn.Sequential(nn.Linear(things, wide), nn.ReLU(), nn.Linear(wide, things)))
    x, optimizer = _rows(s, 512, 65_536), fresh.sgd(s, model)

    def step() -> None:
        optimizer.zero_grad(set_to_none=fixed)
        F.mse_loss(model(x), x).backward()
        optimizer.step()

    return Program(step)


@case("needless recompute", "no checkpoints: the memory is free", **TRIED)
def sounds_checkpointed(s: Setting, fixed: bool) -> Program:
    """Every layer computed twice, to spare memory that nobody needs."""
    wide = s.pick(768, 16)
    model = s.place(lambda: nets.Sounds(wide, s.pick(12, 2), s.pick(8, 2), again=not fixed))
    x, wanted = _bf16(s, s.pick(16, 2), s.pick(1024, 8), 128), _bf16(s, s.pick(16, 2), s.pick(1024, 8), wide)
    return Program(_optimized(fresh.adamw(s, model), lambda: F.mse_loss(model(x), wanted)))


@case("weights cast every step", "model.bfloat16()", **TRIED)
def queries_under_autocast(s: Setting, fixed: bool) -> Program:
    """A few short texts described by a large network, its weights in fp32."""
    wide = s.pick(4096, 16)
    layers = lambda: nn.Sequential(*(nets.Narrow(wide) for _ in range(s.pick(6, 2))))
    model = s.place(layers, torch.bfloat16 if fixed else torch.float32).eval()
    x = torch.randn(s.pick(256, 4), wide, device=s.device, dtype=torch.bfloat16 if fixed else torch.float32)

    @torch.inference_mode()
    def step() -> None:
        with torch.autocast(s.device, torch.bfloat16, enabled=not fixed):
            model(x).norm(dim=-1)

    return Program(step)


@case("weights streamed from the host", "keep the blocks on the device", **TRIED | {"steps": 5})
def blocks_offloaded(s: Setting, fixed: bool) -> Program:
    """Blocks lie in pinned memory, and each is brought when its turn comes."""
    model, x = _stack(s, 4096, 8).eval().requires_grad_(False), _rows(s, 4096, 4096)

    def bring(block: nn.Module, _: Any) -> None:
        for p in block.parameters():
            p.data = p.data.to(s.device, non_blocking=True)

    def drop(block: nn.Module, *_: Any) -> None:
        for p in block.parameters():
            p.data = away[p]

    away = {} if fixed else {p: s.pinned(p.data.cpu()) for p in model.parameters()}
    for block in () if fixed else model:
        drop(block)
        block.register_forward_pre_hook(bring)
        block.register_forward_hook(drop)

    @torch.no_grad()
    def step() -> None:
        model(x)

    return Program(step)


# ---------------------------------------------------------------- well


@healthy
def healthy_wide_sight(s: Setting, fixed: bool) -> Program:
    """A vision transformer of PyTorch's own layers; the loss is looked at every fiftieth step."""
    model = fresh.nhwc(s.place(lambda: nets.Sight(s.pick(224, 32), s.pick(768, 16), s.pick(12, 2), s.pick(6, 2))))
    side, num = s.pick(224, 32), s.pick(128, 2)
    x, kinds, turns = fresh.nhwc(_bf16(s, num, 3, side, side)), _ints(s, 1000, num), itertools.count(1)
    optimizer, total = fresh.adamw(s, model), torch.zeros((), device=s.device)

    def step() -> None:
        loss = F.cross_entropy(model(x), kinds)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total.add_(loss.detach())
        if not next(turns) % EVERY:
            print(f"loss {total.item() / EVERY:.3f}", file=nets.NOWHERE)

    return Program(step)


@healthy
def healthy_grouped_pictures(s: Setting, fixed: bool) -> Program:
    """Residual blocks with convolutions in groups, in channels_last."""
    model = fresh.nhwc(s.place(lambda: nets.Grouped(s.pick((128, 256, 512), (8, 16)), s.pick(8, 2))))
    side, num = s.pick(224, 32), s.pick(128, 2)
    x, kinds = fresh.nhwc(_bf16(s, num, 3, side, side)), _ints(s, 1000, num)
    return Program(_optimized(fresh.sgd(s, model), lambda: F.cross_entropy(model(x), kinds)))


@healthy
def healthy_foreseen(s: Setting, fixed: bool) -> Program:
    """Gated cells of cuDNN over long series."""
    return _foreseen(s, replayed=False)


def _foreseen(s: Setting, replayed: bool) -> Program:
    model = s.place(lambda: nets.Foreseen(s.pick(256, 8), s.pick(1024, 8), 2))
    x = _bf16(s, s.pick(256, 2), s.pick(129, 5), s.pick(256, 8))
    state = _bf16(s, 2, len(x), s.pick(1024, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=replayed and s.cuda)
    learn = _optimized(optimizer, lambda: F.mse_loss(model(x[:, :-1], state), x[:, 1:]))
    return Program(graphed(learn) if replayed and s.cuda else learn)


@healthy
def healthy_replayed_control(s: Setting, fixed: bool) -> Program:
    """Values learned from what was played, sixteen updates out of one graph."""
    wide, rows = s.pick(1024, 8), s.pick(4096, 4)
    layers = lambda: nn.Sequential(nn.Linear(64, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, 8))
    model, known = s.place(layers), s.place(layers).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=s.cuda)
    seen, after, won = _bf16(s, rows, 64), _bf16(s, rows, 64), _bf16(s, rows)

    def updates() -> None:
        for _ in range(16):
            wanted = torch.add(won, known(after).amax(1), alpha=0.99)
            F.smooth_l1_loss(model(seen).amax(1), wanted).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(list(known.parameters()), list(model.parameters()), 0.01)

    return Program(graphed(updates) if s.cuda else updates)


@healthy
def healthy_pairs_told_apart(s: Setting, fixed: bool) -> Program:
    """Pictures' and texts' features, each pair against all others."""
    wide, rows = s.pick(1024, 16), s.pick(8192, 4)
    left, right = _stack(s, 1024, 4), _stack(s, 1024, 4)
    x, y = _bf16(s, rows, wide), _bf16(s, rows, wide)
    both = nn.ModuleList([left, right])
    return Program(_optimized(fresh.adamw(s, both), lambda: nets.told_apart(left(x), right(y))))


@healthy
def healthy_counted_at_the_end(s: Setting, fixed: bool) -> Program:
    """A set looked over in eight batches; what is right is read once."""
    model = fresh.nhwc(s.place(lambda: nets.Tiles(12, s.pick((64, 128, 256, 512), (8, 16)), 20))).eval()
    side = s.pick(256, 16)
    batches = [(fresh.nhwc(_bf16(s, s.pick(48, 2), 12, side, side)), _ints(s, 20, s.pick(48, 2))) for _ in range(8)]
    right = torch.zeros((), dtype=torch.long, device=s.device)

    @torch.inference_mode()
    def step() -> None:
        for tiles, kinds in batches:
            right.add_((model(tiles).argmax(1) == kinds).sum())

    return Program(step)


@healthy
def healthy_questions_answered(s: Setting, fixed: bool) -> Program:
    """PyTorch's own encoder and decoder, dropped here and there, slopes clipped."""
    return _questions(s, replayed=False)


def _questions(s: Setting, replayed: bool) -> Program:
    wide = s.pick(512, 16)
    make = lambda: nn.Transformer(wide, s.pick(8, 2), s.pick(4, 1), s.pick(4, 1), 4 * wide, 0.1, batch_first=True)
    model, num = s.place(make), s.pick(64, 2)
    asked, said = _bf16(s, num, s.pick(256, 6), wide), _bf16(s, num, s.pick(128, 4), wide)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=replayed and s.cuda)

    def step() -> None:
        F.mse_loss(model(asked, said), said).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(graphed(step) if replayed and s.cuda else step)


@healthy
def healthy_copied_ahead(s: Setting, fixed: bool) -> Program:
    """Tiles come out of pinned memory while others are learned from, their losses scaled in fp16."""
    model = fresh.nhwc(s.place(lambda: nets.Tiles(12, s.pick((64, 128, 256, 512), (8, 16)), 20), torch.float32))
    size = (s.pick(32, 2), 12, s.pick(256, 16), s.pick(256, 16))
    host = (s.pinned(fresh.nhwc(torch.randn(size).half())), s.pinned(torch.randint(0, 20, (size[0],))))
    feed = iter(Prefetch(s, itertools.cycle([host])))
    optimizer, scaler = fresh.sgd(s, model), torch.amp.GradScaler(s.device)

    def step() -> None:
        tiles, kinds = next(feed)
        with torch.autocast(s.device, torch.float16 if s.cuda else torch.bfloat16):
            loss = F.cross_entropy(model(tiles), kinds)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("none", "nothing", compiles=True, **LINES | {"rounds": 1})
def healthy_compiled_blocks(s: Setting, fixed: bool) -> Program:
    """A network of blocks, compiled whole, trained."""
    torch._dynamo.reset()
    model, x = _stack(s, 1024, 8), _rows(s, 16_384, 1024)
    run = torch.compile(model, backend=compiler(s), dynamic=False)
    return Program(_optimized(fresh.adamw(s, model), lambda: F.mse_loss(run(x), x)))


# ---------------------------------------------------------------- what was told, done


@case("host-bound", "capture the step in a CUDA graph", **TRIED)
def again_healthy_foreseen(s: Setting, fixed: bool) -> Program:
    return _foreseen(s, replayed=fixed)


@case("fp32 matmul", "weights and places in bf16", **TRIED)
def again_orbits_followed_eagerly(s: Setting, fixed: bool) -> Program:
    return _orbits(s, replayed=True, dtype=torch.bfloat16 if fixed else torch.float32)


@case("unfused pointwise chain", "torch.compile the loss", compiles=True, **ONE)
def again_genes_in_fp32(s: Setting, fixed: bool) -> Program:
    torch._dynamo.reset()
    judged = torch.compile(F.poisson_nll_loss, backend=compiler(s), dynamic=False) if fixed else F.poisson_nll_loss
    return _genes(s, "high", judged)
