"""A ninth suite: causes and healthy programs of yet other kinds; each is recorded with our schedule and as most people
record (no shapes, no schedule, no marks of steps), the planted ones as well."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import fresh
import ninthnets as own
import numpy as np
import torch
import torch.nn.functional as F
from cases import Prefetch, Program, Setting, Step, case, end_workers, graphed, precision
from cases import training as train
from healthy import HEALTHY
from torch import Tensor, nn

PLAIN: dict[str, Any] = {"stack": False, "plain": True}
healthy = case("none", "nothing", **HEALTHY | PLAIN)


def _optimized(optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> Step:
    """One step of learning from whatever gives the loss."""

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _bf16(s: Setting, *size: int) -> Tensor:
    return torch.randn(*size, device=s.device, dtype=torch.bfloat16)


def _ints(s: Setting, high: int, *size: int) -> Tensor:
    return torch.randint(0, high, size, device=s.device)


# ---------------------------------------------------------------- policies in simulated worlds


def _world(
    s: Setting, num: int, width: int
) -> tuple[nn.Module, dict[str, Tensor], Callable[[Callable[[], None]], None]]:
    """Worlds of a few numbers on the device, a policy, and one move in all of them."""
    model = s.place(lambda: own.Policy(32, width, 8))
    state = {"at": _bf16(s, num, 32), "left": _ints(s, 200, num), "won": torch.zeros(num, device=s.device)}
    pushes, drift = _bf16(s, 8, 32), _bf16(s, 32, 32) * 0.1
    ids = torch.arange(num, device=s.device)

    @torch.no_grad()
    def move(end: Callable[[], None]) -> None:
        scores, _ = model(state["at"])
        noise = torch.empty_like(scores).exponential_()
        chosen = (scores.softmax(-1) / noise).argmax(-1)
        state["at"].copy_(torch.tanh(torch.addmm(pushes[chosen], state["at"], drift)))
        state["won"].add_(state["at"][ids, chosen])
        state["left"].sub_(1)
        end()

    return model, state, move


def _reset(state: dict[str, Tensor]) -> None:
    """Worlds whose time is over begin again, without anybody asking which."""
    over = state["left"] <= 0
    state["at"].masked_fill_(over[:, None], 0.0)
    state["left"].masked_fill_(over, 200)


@case("synchronization", "reset the worlds that are over with masked_fill_, asking nobody", **PLAIN)
def worlds_asked_if_over(s: Setting, fixed: bool) -> Program:
    _, state, move = _world(s, s.pick(4096, 8), s.pick(1024, 16))

    def asked() -> None:
        if (state["left"] <= 0).any().item():
            _reset(state)

    def step() -> None:
        for _ in range(24):
            move((lambda: _reset(state)) if fixed else asked)

    return Program(step)


@case("host-bound", "replay the moves from a CUDA graph", **PLAIN)
def worlds_moved_eagerly(s: Setting, fixed: bool) -> Program:
    _, state, move = _world(s, s.pick(2048, 8), s.pick(512, 16))

    def run() -> None:
        for _ in range(16):
            move(lambda: _reset(state))

    return Program(graphed(run) if fixed and s.cuda else run)


@healthy
def healthy_worlds(s: Setting, fixed: bool) -> Program:
    """Moves replayed from a graph, then the policy learns from large batches of them."""
    model, state, move = _world(s, s.pick(16384, 8), s.pick(2048, 16))
    run = lambda: move(lambda: _reset(state))
    moved = graphed(run) if s.cuda else run
    optimizer, batch = fresh.adamw(s, model), _bf16(s, s.pick(131072, 16), 32)
    done, gained = _ints(s, 8, len(batch), 1), _bf16(s, len(batch), 1)

    def loss() -> Tensor:
        scores, worth = model(batch)
        return F.cross_entropy(scores, done[:, 0]) + F.mse_loss(worth, gained)

    learn = _optimized(optimizer, loss)

    def step() -> None:
        for _ in range(8):
            moved()
        learn()

    return Program(step)


# ---------------------------------------------------------------- sound


def _spoken(s: Setting, batch: int, **how: Any) -> tuple[nn.Module, Callable[[], Tensor]]:
    bands, frames, width, letters = s.pick(80, 16), s.pick(1600, 64), s.pick(768, 32), s.pick(64, 8)
    model = s.place(lambda: own.Spoken(bands, width, s.pick(8, 2), s.pick(12, 2), letters, **how))
    sound, said = _bf16(s, batch, frames, bands), _ints(s, letters - 1, batch, s.pick(120, 4)) + 1
    places, num = (frames // 4,) * batch, (said.shape[1],) * batch

    def loss() -> Tensor:
        chances = model(sound).float().log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(chances, said, places, num)

    return model, loss


@healthy
def healthy_spoken(s: Setting, fixed: bool) -> Program:
    """Speech to letters, learned by CTC."""
    model, loss = _spoken(s, s.pick(48, 2))
    return Program(_optimized(fresh.adamw(s, model), loss))


@case("needless recompute", "drop the checkpoints: 140 GB are free", **PLAIN)
def spoken_in_segments(s: Setting, fixed: bool) -> Program:
    model, loss = _spoken(s, s.pick(40, 2), recompute=not fixed)
    return Program(_optimized(fresh.adamw(s, model), loss))


# ---------------------------------------------------------------- pictures


def _pyramid(s: Setting, batch: int, last: bool) -> tuple[nn.Module, Tensor]:
    model = s.place(lambda: own.Pyramid(s.pick((64, 128, 256, 512), (8, 16, 16, 16)), s.pick(3, 1), s.pick(92, 12)))
    side = s.pick(512, 64)
    pictures = _bf16(s, s.pick(batch, 2), 3, side, side)
    return (fresh.nhwc(model), fresh.nhwc(pictures)) if last else (model, pictures)


@case("NCHW convolution", "model and pictures in channels_last", **PLAIN)
def pyramid_channels_first(s: Setting, fixed: bool) -> Program:
    model, pictures = _pyramid(s, 24, fixed)
    loss = lambda: sum((level.square().mean() for level in model(pictures)), torch.zeros((), device=s.device))
    return Program(_optimized(fresh.sgd(s, model), loss))


@healthy
def healthy_boxes(s: Setting, fixed: bool) -> Program:
    """Objects found: the best boxes of each picture, and the overlapping ones weighed down, on the device."""
    model, pictures = _pyramid(s, 64, last=True)
    model.eval()
    num = s.pick(512, 8)

    @torch.inference_mode()
    def step() -> None:
        flat = torch.cat([level.flatten(2).transpose(1, 2) for level in model(pictures)], 1).float()
        best, which = flat[..., 4:].amax(-1).topk(num, 1)
        boxes = flat[..., :4].gather(1, which[..., None].expand(-1, -1, 4))
        low, high = boxes[..., :2] - boxes[..., 2:].exp(), boxes[..., :2] + boxes[..., 2:].exp()
        shared = torch.minimum(high[:, :, None], high[:, None]) - torch.maximum(low[:, :, None], low[:, None])
        overlap = shared.clamp_min_(0.0).prod(-1).triu_(1).amax(1)
        (best - overlap).topk(num // 4, 1)

    return Program(step)


@healthy
def healthy_outlines(s: Setting, fixed: bool) -> Program:
    """A class for every point of pictures that come over a stream of their own."""
    side, batch = s.pick(256, 32), s.pick(48, 2)
    model = fresh.nhwc(s.place(lambda: own.Outliner(s.pick(96, 8), s.pick(24, 8))))
    host = fresh.nhwc(torch.randn(batch, 3, side, side).bfloat16())
    truth = torch.randint(0, s.pick(24, 8), (batch, side // 2, side // 2))
    batches = iter(Prefetch(s, itertools.cycle([(s.pinned(host), s.pinned(truth))])))
    return Program(train(model, fresh.sgd(s, model), batches))


@healthy
def healthy_counted_evaluation(s: Setting, fixed: bool) -> Program:
    """Pictures of bytes copied ahead, normalized by the first weights, right answers counted on the device."""
    model = fresh.nhwc(fresh.plain(s, (128, 256, 512), 3)).eval()
    side, batch, kept = s.pick(160, 16), s.pick(128, 2), torch.zeros(2, device=s.device)
    host = (torch.randint(0, 255, (batch, 3, side, side), dtype=torch.uint8), torch.randint(0, 1000, (batch,)))
    batches = iter(Prefetch(s, itertools.cycle([(s.pinned(fresh.nhwc(host[0])), s.pinned(host[1]))])))

    @torch.inference_mode()
    def step() -> None:
        pictures, labels = next(batches)
        x = pictures.to(torch.bfloat16)
        for stage in model.stages:
            x = stage(x)
        best = model.head(x.mean((2, 3))).topk(5, 1).indices == labels[:, None]
        kept.add_(torch.stack((best[:, 0].sum(), best.sum())))

    return Program(step)


@case("unfused pointwise chain", "F.hardswish in place of its formula", **PLAIN)
def hardswish_in_steps(s: Setting, fixed: bool) -> Program:
    model = fresh.nhwc(s.place(lambda: own.Mobile(s.pick(256, 8), s.pick(6, 2), in_steps=not fixed)))
    pictures, labels = fresh.images(s, 96, 128)
    return Program(train(model, fresh.sgd(s, model), itertools.cycle([(fresh.nhwc(pictures), labels)])))


def _patches(s: Setting, batch: int, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, Callable[[], Tensor]]:
    patch, num = s.pick(16, 4), s.pick(256, 16)
    model = s.place(lambda: own.Masked(patch, num, s.pick(1024, 32), s.pick(8, 2), s.pick(16, 4)), dtype)
    patches = torch.randn(s.pick(batch, 2), num, 3 * patch * patch, device=s.device, dtype=dtype)
    return model, lambda: model(patches)


@healthy
def healthy_masked_patches(s: Setting, fixed: bool) -> Program:
    """A quarter of every picture's patches, drawn on the device, is read; all are painted."""
    model, loss = _patches(s, 256)
    return Program(_optimized(fresh.adamw(s, model), loss))


@case("fp32 matmul", "torch.set_float32_matmul_precision('high')", **PLAIN)
def patches_in_fp32(s: Setting, fixed: bool) -> Program:
    model, loss = _patches(s, 48, torch.float32)
    return Program(_optimized(fresh.adamw(s, model), loss), lambda: precision("high" if fixed else "highest"))


@case("pinned copy on the compute stream", "copy the next volumes on a side stream", **PLAIN)
def scans_in_line(s: Setting, fixed: bool) -> Program:
    model = s.place(lambda: own.Scans(s.pick(64, 8))).to(memory_format=torch.channels_last_3d)
    side, batch = s.pick(64, 16), s.pick(40, 2)
    draw = lambda: (torch.randn(batch, 8, side, side, side).bfloat16(), torch.randint(0, 16, (batch,)))
    host = itertools.cycle([tuple(s.pinned(part) for part in draw()) for _ in range(2)])
    ahead = iter(Prefetch(s, host)) if fixed else (tuple(t.to(s.device, non_blocking=True) for t in b) for b in host)
    return Program(train(model, fresh.sgd(s, model), ahead))


@case("none", "nothing", **HEALTHY | PLAIN | {"rounds": 1, "warmup": 1, "steps": 4})
def healthy_full_memory(s: Setting, fixed: bool) -> Program:
    """Large pictures, whose activations would not fit if they were all kept."""
    model = fresh.nhwc(s.place(lambda: own.Deep(s.pick(64, 8), s.pick(24, 2))))
    pictures = fresh.nhwc(_bf16(s, s.pick(24, 2), 3, s.pick(1024, 16), s.pick(1024, 16)))
    return Program(_optimized(fresh.sgd(s, model), lambda: model(pictures)))


# ---------------------------------------------------------------- text


class Chat(nn.Module):
    """A decoder with grouped queries: how likely each of the given tokens was."""

    def __init__(self, vocab: int, width: int, layers: int, heads: int, groups: int, by_hand: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        make = lambda: own.Grouped(width, heads, groups, causal=True, by_hand=by_hand)
        self.blocks = nn.ModuleList(make() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def logits(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def forward(self, ids: Tensor, following: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(ids).flatten(0, 1), following.flatten())


def _chat(s: Setting, layers: int, **how: Any) -> nn.Module:
    sizes = (32768, 1536, layers, 12, 4) if not s.tiny else (96, 32, 2, 4, 2)
    return s.place(lambda: Chat(*sizes, **how))


@case("unfused attention", "F.scaled_dot_product_attention(…, is_causal=True, enable_gqa=True)", **PLAIN)
def chat_attends_by_hand(s: Setting, fixed: bool) -> Program:
    model, size = _chat(s, 6, by_hand=not fixed), s.pick((8, 1024), (2, 16))
    batch = (_ints(s, s.pick(32768, 96), *size), _ints(s, s.pick(32768, 96), *size))
    return Program(train(model, fresh.adamw(s, model), itertools.cycle([batch])))


def _preferred(s: Setting, size: tuple[int, int], score: Callable[[Tensor, Tensor], Tensor]) -> Program:
    """The better of two answers made likelier, measured against a frozen copy."""
    model, frozen = _chat(s, 4), _chat(s, 4).requires_grad_(False)
    ids = _ints(s, s.pick(32768, 96), size[0], size[1] + 1)
    given, said = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def loss() -> Tensor:
        with torch.no_grad():
            before = score(frozen.logits(given), said)
        better, worse = (score(model.logits(given), said) - before).chunk(2)
        return -F.logsigmoid(0.1 * (better - worse)).mean()

    return Program(_optimized(fresh.adamw(s, model), loss))


def _likely(logits: Tensor, said: Tensor) -> Tensor:
    return -F.cross_entropy(logits.flatten(0, 1), said.flatten(), reduction="none").view(said.shape).sum(1)


def _likely_in_fp32(logits: Tensor, said: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(2, said[..., None])[..., 0].sum(1)


@case("fp32 logits", "cross_entropy over the bf16 logits in place of float().log_softmax().gather()", **PLAIN)
def preferences_in_fp32(s: Setting, fixed: bool) -> Program:
    return _preferred(s, s.pick((8, 1024), (2, 16)), _likely if fixed else _likely_in_fp32)


@healthy
def healthy_preferences(s: Setting, fixed: bool) -> Program:
    return _preferred(s, s.pick((12, 1024), (2, 16)), _likely)


@healthy
def healthy_local_prefill(s: Setting, fixed: bool) -> Program:
    """A long prompt, each window of which attends to itself and to the one before."""
    width, heads, window, num = s.pick(2048, 32), s.pick(16, 2), s.pick(512, 8), s.pick(96, 3)
    make = lambda: nn.ModuleList((nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, 4 * width),
                                  nn.Linear(4 * width, width), nn.LayerNorm(width), nn.LayerNorm(width)))  # fmt: skip
    layers = s.place(lambda: nn.ModuleList(make() for _ in range(s.pick(4, 2))))
    x0, here = _bf16(s, num, window, width), torch.arange(window, device=s.device)
    away = here[:, None] + window - torch.arange(2 * window, device=s.device)
    near = (away >= 0) & (away < window)

    @torch.inference_mode()
    def step() -> None:
        x = x0
        for qkv, out, up, down, norm1, norm2 in layers:
            q, k, v = qkv(norm1(x)).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            k, v = (torch.cat((part.roll(1, 0), part), 2) for part in (k, v))
            x = x + out(F.scaled_dot_product_attention(q, k, v, attn_mask=near).transpose(1, 2).flatten(2))
            x = x + down(F.gelu(up(norm2(x))))

    return Program(step)


@healthy
def healthy_beams(s: Setting, fixed: bool) -> Program:
    """The next token of several continuations each, kept with their keys, the whole of it replayed from a graph."""
    width, heads, room, vocab = s.pick(2048, 32), s.pick(16, 2), s.pick(512, 16), s.pick(32768, 96)
    texts, beams, layers = s.pick(32, 2), 4, s.pick(6, 2)
    make = lambda: nn.ModuleList((nn.Linear(width, 3 * width), nn.Linear(width, width),
                                  nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                                                nn.Linear(4 * width, width))))  # fmt: skip
    parts = s.place(lambda: nn.ModuleList(make() for _ in range(layers)))
    table, head = s.place(lambda: nn.Embedding(vocab, width)), s.place(lambda: nn.Linear(width, vocab, bias=False))
    kept = [_bf16(s, 2, texts * beams, heads, room, width // heads) for _ in range(layers)]
    ids, total = _ints(s, vocab, texts * beams, 1), torch.zeros(texts, beams, device=s.device)
    base, at = torch.arange(texts, device=s.device)[:, None] * beams, torch.tensor([room - 1], device=s.device)

    @torch.no_grad()
    def run() -> None:
        x = table(ids)
        for (qkv, out, hidden), store in zip(parts, kept, strict=True):
            q, k, v = qkv(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            store.index_copy_(3, at, torch.stack((k, v)))
            mixed = F.scaled_dot_product_attention(q, store[0], store[1])
            x = x + out(mixed.transpose(1, 2).flatten(2))
            x = x + hidden(x)
        chances = head(x[:, 0]).float().log_softmax(-1).view(texts, beams, vocab) + total[:, :, None]
        best, which = chances.flatten(1).topk(beams, 1)
        total.copy_(best - best.amax(1, keepdim=True))
        came = (base + which // vocab).flatten()
        ids.copy_((which % vocab).view(-1, 1))
        for store in kept:
            store.copy_(store.index_select(1, came))

    again = graphed(run) if s.cuda else run

    def step() -> None:
        for _ in range(3):
            again()

    return Program(step)


def _batches(s: Setting, num: int, size: tuple[int, int]) -> tuple[nn.Module, Step]:
    """A step over several batches, annotated as a trainer would."""
    model, vocab = _chat(s, 4), s.pick(32768, 96)
    parts = [(_ints(s, vocab, *size), _ints(s, vocab, *size)) for _ in range(num)]
    optimizer, note = fresh.adamw(s, model), torch.profiler.record_function

    def step() -> None:
        for given, said in parts:
            with note("forward"):
                loss = model(given, said) / num
            with note("backward"):
                loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return model, step


@case("small batch", "two batches of eight texts in place of sixteen of one", **PLAIN)
def texts_accumulated_one_by_one(s: Setting, fixed: bool) -> Program:
    length = s.pick(256, 16)
    return Program(_batches(s, *((2, (8, length)) if fixed else (16, (1, length))))[1])


@healthy
def healthy_accumulated(s: Setting, fixed: bool) -> Program:
    """Gradients of eight batches that fill the device, added up; no more would fit in earnest."""
    return Program(_batches(s, 8, s.pick((6, 1024), (2, 16)))[1])


# ---------------------------------------------------------------- tables, sessions, numbers


def _sessions(s: Setting, width: int, batch: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    items, length, drawn = s.pick(100_000, 200), s.pick(200, 8), s.pick(2048, 16)
    model = s.place(lambda: own.Sessions(items, s.pick(width, width % 32 + 32), s.pick(4, 2), 4, length))
    seen = _ints(s, items, s.pick(batch, 2), length)
    truth = _ints(s, drawn, seen.numel())
    return model, lambda: F.cross_entropy(model(seen, _ints(s, items, drawn)), truth)


@healthy
def healthy_sessions(s: Setting, fixed: bool) -> Program:
    """What comes next of 100,000 items, learned against a few thousand drawn ones."""
    model, loss = _sessions(s, 512, 192)
    return Program(_optimized(fresh.adamw(s, model), loss))


@case("misaligned sizes", "a width of 512 in place of 500", **PLAIN)
def sessions_of_500(s: Setting, fixed: bool) -> Program:
    model, loss = _sessions(s, 512 if fixed else 500, 128)
    return Program(_optimized(fresh.adamw(s, model), loss))


@case("unfused optimizer", "NAdam(…, foreach=True), the default", **PLAIN)
def nadam_tensor_by_tensor(s: Setting, fixed: bool) -> Program:
    model, loss = _patches(s, 64)
    return Program(_optimized(torch.optim.NAdam(model.parameters(), lr=1e-4, foreach=fixed), loss))


@case("many small copies", "one pinned tensor for all fields, copied once", **PLAIN)
def fields_copied_one_by_one(s: Setting, fixed: bool) -> Program:
    rows, fields = s.pick(8192, 8), s.pick(120, 4)
    model = s.place(lambda: nn.Sequential(nn.Linear(8 * fields, s.pick(2048, 32)), nn.ReLU(),
                                          nn.Linear(s.pick(2048, 32), s.pick(2048, 32)), nn.ReLU(),
                                          nn.Linear(s.pick(2048, 32), 16)))  # fmt: skip
    columns = {f"field {i}": torch.randn(rows, 8).bfloat16() for i in range(fields)}
    packed = s.pinned(torch.cat(list(columns.values()), 1))
    labels, optimizer = _ints(s, 16, rows), fresh.adamw(s, model)

    def loss() -> Tensor:
        if fixed:
            x = packed.to(s.device, non_blocking=True)
        else:
            x = torch.cat([column.to(s.device) for column in columns.values()], 1)
        return F.cross_entropy(model(x), labels)

    return Program(_optimized(optimizer, loss))


class Logged(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """What people looked at, a line of JSON for each visit, parsed and hashed one by one."""

    def __init__(self, items: int, length: int) -> None:
        rng = np.random.default_rng(0)
        visit = lambda: [{"item": int(i), "at": float(i) / 7, "kind": "view"} for i in rng.integers(0, items, length)]
        self.lines = [json.dumps({"user": i, "visits": visit()}) for i in range(32)]
        self.items = items

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        visits = json.loads(self.lines[i % 32])["visits"]
        ids = [(one["item"] * 2654435761 + i) % self.items for one in visits if one["kind"] == "view"]
        times = [one["at"] for one in visits]
        return torch.tensor(ids), torch.tensor(times)


@case("data loader", "num_workers=0 → 8", **PLAIN | {"rounds": 1, "warmup": 10, "steps": 14, "planted_steps": 10})
def visits_parsed_in_the_loop(s: Setting, fixed: bool) -> Program:
    items, length, batch = s.pick(100_000, 200), s.pick(200, 8), s.pick(96, 4)
    model = s.place(lambda: own.Sessions(items, s.pick(512, 32), s.pick(6, 2), s.pick(8, 2), length))
    workers = s.pick(8, 2) if fixed else 0
    loader = torch.utils.data.DataLoader(
        Logged(items, length), batch, num_workers=workers, pin_memory=s.cuda, persistent_workers=workers > 0
    )
    feed, optimizer, drawn = iter(loader), fresh.adamw(s, model), s.pick(2048, 16)
    truth = _ints(s, drawn, batch * length)

    def loss() -> Tensor:
        seen, _ = (part.to(s.device, non_blocking=True) for part in next(feed))
        return F.cross_entropy(model(seen, _ints(s, items, drawn)), truth)

    return Program(_optimized(optimizer, loss), close=lambda: end_workers(feed))


def _clusters(s: Setting, num: int, points: int, width: int) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Points, centers, and which center is the nearest of each."""
    x, centers = torch.randn(points, width, device=s.device), torch.randn(num, width, device=s.device)
    return x, centers, lambda to: torch.addmm((to * to).sum(1), x, to.T, alpha=-2.0).argmin(1)


@healthy
def healthy_clusters(s: Setting, fixed: bool) -> Program:
    """Points to the nearest of many centers, and the centers moved to their mean."""
    x, centers, nearest = _clusters(s, s.pick(4096, 4), s.pick(262144, 32), s.pick(256, 8))
    ones = torch.ones(len(x), device=s.device)

    @torch.no_grad()
    def step() -> None:
        which = nearest(centers)
        count = torch.zeros(len(centers), device=s.device).index_add_(0, which, ones)
        total = torch.zeros_like(centers).index_add_(0, which, x)
        centers.copy_(total / count.clamp_min_(1.0)[:, None])

    return Program(step, lambda: precision("high"))


@case("round trip through the host", "move the centers on the device, by index_add_", **PLAIN)
def centers_moved_on_host(s: Setting, fixed: bool) -> Program:
    x, centers, nearest = _clusters(s, s.pick(1024, 4), s.pick(65536, 32), s.pick(64, 8))
    points, ones = x.cpu().numpy(), torch.ones(len(x), device=s.device)

    @torch.no_grad()
    def step() -> None:
        which = nearest(centers)
        if fixed:
            count = torch.zeros(len(centers), device=s.device).index_add_(0, which, ones)
            total = torch.zeros_like(centers).index_add_(0, which, x)
            centers.copy_(total / count.clamp_min_(1.0)[:, None])
            return
        order = which.cpu().numpy()
        count = np.bincount(order, minlength=len(centers))
        total = np.stack([np.bincount(order, column, len(centers)) for column in points.T], 1)
        centers.copy_(torch.from_numpy((total / np.maximum(count, 1)[:, None]).astype(np.float32)))

    return Program(step, lambda: precision("high"))


@healthy
def healthy_potential(s: Setting, fixed: bool) -> Program:
    """A potential found from charges by Fourier transforms over boxes, in fp32."""
    side, boxes = s.pick(192, 8), s.pick(32, 2)
    charge = torch.randn(boxes, side, side, side, device=s.device)
    waves = [torch.fft.fftfreq(side, device=s.device).square()] * 2 + [
        torch.fft.rfftfreq(side, device=s.device).square()
    ]
    weight = 1.0 / (waves[0][:, None, None] + waves[1][:, None] + waves[2] + 1e-6)

    @torch.no_grad()
    def step() -> None:
        charge.copy_(torch.fft.irfftn(torch.fft.rfftn(charge, dim=(1, 2, 3)).mul_(weight), dim=(1, 2, 3)))

    return Program(step)


@healthy
def healthy_density(s: Setting, fixed: bool) -> Program:
    """A density matrix made idempotent, in fp64 since chemistry asks for it."""
    size = s.pick(4096, 16)
    raw = torch.randn(size, size, device=s.device, dtype=torch.float64)
    density = torch.linalg.qr(raw + raw.T).Q.mul_(0.5)

    @torch.no_grad()
    def step() -> None:
        square = density @ density
        torch.addmm(square, square, density, beta=3.0, alpha=-2.0, out=raw)

    return Program(step)
