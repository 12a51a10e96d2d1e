"""A twelfth suite: what the eleventh's fixed and healthy programs were told, done, and further healthy programs and
causes, for the rules as they were mended after it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import eleventhnets as nets
import fresh
import ninth
import ninthnets as own
import torch
import torch.nn.functional as F
from cases import CASES, Prefetch, Program, Setting, case, compiler, end_workers, graphed, precision
from eleventh import Series, _blocks, _learning
from ninth import HEALTHY, PLAIN, _bf16, _ints, _optimized
from sixth import _with
from tenth import TRIED, _captured
from torch import Tensor, nn

healthy = case("none", "nothing", **HEALTHY | PLAIN)
compiled = case("none", "nothing", **HEALTHY | PLAIN | {"compiles": True, "rounds": 1})
ONCE: dict[str, Any] = TRIED | {"rounds": 1}
"""One program after the other, in place of turns."""

# ---------------------------------------------------------------- what was told, done


class Padded(own.Policy):
    """A policy whose value has eight columns, of which one is read."""

    def __init__(self, states: int, width: int, actions: int) -> None:
        super().__init__(states, width, actions)
        self.worth = nn.Linear(width, 8)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        scores, worth = super().forward(states)
        return scores, worth[:, :1]


@case("misaligned sizes", "eight columns for the value, of which one is read", **TRIED)
def again_gains_computed_on_host(s: Setting, fixed: bool) -> Program:
    with _with(own, "Policy", Padded if fixed else own.Policy):
        return CASES["gains_computed_on_host"].build(s, True)


def _compiled_class(kind: type[nn.Module], s: Setting) -> type[nn.Module]:
    run = torch.compile(kind.forward, backend=compiler(s), dynamic=False)
    return type(kind.__name__, (kind,), {"forward": lambda self, x: run(self, x)})


@case("unfused pointwise chain", "torch.compile the crossed layers and their tower", compiles=True, **ONCE)
def again_healthy_crossed_features(s: Setting, fixed: bool) -> Program:
    with _with(nets, "Crossed", _compiled_class(nets.Crossed, s) if fixed else nets.Crossed):
        return CASES["healthy_crossed_features"].build(s, True)


@case("unfused pointwise chain", "torch.compile the layers around their transforms", compiles=True, **ONCE)
def again_healthy_state_space(s: Setting, fixed: bool) -> Program:
    with _with(nets, "LongConv", _compiled_class(nets.LongConv, s) if fixed else nets.LongConv):
        return CASES["healthy_state_space"].build(s, True)


@case(
    "allocator",
    "pinned memory for all batches in flight is taken once, before the loop",
    **ONCE | {"warmup": 10, "steps": 14},
)
def again_windows_cut_by_one_worker(s: Setting, fixed: bool) -> Program:
    """Blocks that were taken and given back stay with the allocator of pinned memory."""
    if fixed and s.cuda:
        taken = [torch.empty(num, dtype=torch.uint8, pin_memory=True) for num in (64 * 64 * 64 * 4, 512) * 96]
        del taken
    return CASES["windows_cut_by_one_worker"].build(s, True)


@case("host-bound", "capture the step behind the loader in a CUDA graph", **ONCE | {"warmup": 10, "steps": 14})
def again_windows_in_graph(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return CASES["windows_cut_by_one_worker"].build(s, True)
    length, columns, width, batch = s.pick(64, 8), s.pick(64, 8), s.pick(1536, 32), s.pick(64, 4)
    enter, head = s.place(lambda: nn.Linear(columns, width)), s.place(lambda: nn.Linear(width, 8))
    blocks = _blocks(s, 1536, 24, 6)
    values, labels = torch.zeros(batch, length, columns, device=s.device), _ints(s, 8, batch)
    loss = lambda: F.cross_entropy(head(blocks(enter(values.bfloat16())).mean(1)), labels)
    learn = _captured(s, True, nn.ModuleList([enter, blocks, head]), loss).step  # before memory is pinned by a thread
    data, num = Series(length, columns), s.pick(10, 2)
    loader = torch.utils.data.DataLoader(
        data, batch, num_workers=num, pin_memory=s.cuda, persistent_workers=True, prefetch_factor=4
    )
    feed = iter(loader)

    def step() -> None:
        for into, new in zip((values, labels), next(feed), strict=True):
            into.copy_(new, non_blocking=True)
        learn()

    return Program(step, close=lambda: end_workers(feed))


# ---------------------------------------------------------------- nothing to find


@healthy
def healthy_masked_diffusion(s: Setting, fixed: bool) -> Program:
    """Texts of which a drawn share is hidden, all of it filled in at once."""
    vocab, width, size = s.pick(32768, 96), s.pick(1024, 32), s.pick((24, 512), (2, 16))
    table, head = s.place(lambda: nn.Embedding(vocab, width)), s.place(lambda: nn.Linear(width, vocab, bias=False))
    blocks, ids = _blocks(s, 1024, 16, 6), _ints(s, vocab, *size)

    def loss() -> Tensor:
        share = torch.rand(size[0], 1, device=s.device) * 0.9 + 0.1
        hidden = torch.rand(size, device=s.device) < share
        logits = head(blocks(table(ids.masked_fill(hidden, vocab - 1))))
        each = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view(size)
        return (each * hidden / share).mean()

    return _learning(s, nn.ModuleList([table, head, blocks]), loss)


@healthy
def healthy_two_critics(s: Setting, fixed: bool) -> Program:
    """Two critics side by side in batched products, a policy that draws, and copies that follow slowly."""
    width, batch, states, actions = s.pick(1024, 16), s.pick(65536, 8), s.pick(96, 8), s.pick(32, 8)
    sizes = (states + actions, width, width, 8)
    make = lambda: nn.ParameterList(
        nn.Parameter(_bf16(s, 2, i, o) * i**-0.5) for i, o in itertools.pairwise(sizes)
    )  # fmt: skip
    fast, slow = make(), make().requires_grad_(False)
    policy = s.place(lambda: own.Policy(states, width, actions))
    seen, done, reward = _bf16(s, batch, states), _bf16(s, batch, actions), _bf16(s, batch, 1)
    params, behind = list(fast), list(slow)

    def worth(weights: Any, state: Tensor, action: Tensor) -> Tensor:
        x = torch.cat((state, action), 1).expand(2, -1, -1)
        for weight in weights[:-1]:
            x = F.relu(x @ weight, inplace=True)
        return (x @ weights[-1])[..., :1]

    def loss() -> Tensor:
        action = policy(seen)[0]
        action = torch.tanh(action + torch.randn_like(action))
        with torch.no_grad():
            wanted = torch.add(reward, worth(slow, seen, action).amin(0), alpha=0.99)
        learned = F.mse_loss(worth(fast, seen, done), wanted.expand(2, -1, -1))
        return learned - worth([weight.detach() for weight in fast], seen, action).amin(0).mean()

    learn = _optimized(fresh.adamw(s, nn.ModuleList([fast, policy])), loss)

    def step() -> None:
        learn()
        with torch.no_grad():
            torch._foreach_lerp_(behind, params, 0.005)

    return Program(step)


@healthy
def healthy_soft_clusters(s: Setting, fixed: bool) -> Program:
    """Points that belong to many centers by chances, and centers moved to their weighed mean."""
    points, num, width = s.pick(524_288, 32), s.pick(1024, 4), s.pick(256, 8)
    x, centers = torch.randn(points, width, device=s.device), torch.randn(num, width, device=s.device)

    @torch.no_grad()
    def step() -> None:
        chances = torch.addmm((centers * centers).sum(1), x, centers.T, beta=-0.5, alpha=1.0).softmax(-1)
        centers.copy_(chances.T @ x).div_(chances.sum(0).clamp_min_(1e-6)[:, None])

    return Program(step, lambda: precision("high"))


@healthy
def healthy_multiple_choice(s: Setting, fixed: bool) -> Program:
    """Four answers to each question, scored by how likely they are, and the right ones counted on the device."""
    model, vocab, size = ninth._chat(s, 6).eval(), s.pick(32768, 96), s.pick((32, 512), (4, 16))
    ids, right = _ints(s, vocab, size[0], size[1] + 1), _ints(s, 4, size[0] // 4)
    given, said, count = ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), torch.zeros((), device=s.device)

    @torch.inference_mode()
    def step() -> None:
        answer = model.logits(given)[:, size[1] // 2 :].flatten(0, 1)
        each = F.cross_entropy(answer, said[:, size[1] // 2 :].flatten(), reduction="none")
        count.add_((each.view(size[0] // 4, 4, -1).sum(-1).argmin(1) == right).sum())

    return Program(step)


@healthy
def healthy_codes(s: Setting, fixed: bool) -> Program:
    """Pictures as words of a book that moves with what it is used for."""
    wide, deep, words = s.pick(128, 8), s.pick(64, 8), s.pick(4096, 16)
    part = lambda i, o, stride=1: nn.Sequential(nn.Conv2d(i, o, 3, stride, 1), nn.ReLU(True))
    enter = lambda: nn.Sequential(part(3, wide, 2), part(wide, wide, 2), part(wide, wide), nn.Conv2d(wide, deep, 1))
    leave = lambda: nn.Sequential(
        part(deep, wide), nn.ConvTranspose2d(wide, wide, 4, 2, 1), nn.ReLU(True), nn.ConvTranspose2d(wide, 3, 4, 2, 1)
    )
    encoder, decoder = fresh.nhwc(s.place(lambda: nn.ModuleList([enter(), leave()])))
    book, count = torch.randn(words, deep, device=s.device), torch.ones(words, device=s.device)
    pictures = fresh.nhwc(_bf16(s, s.pick(128, 2), 3, s.pick(128, 16), s.pick(128, 16)))
    ones = torch.ones(len(pictures) * (pictures.shape[2] // 4) ** 2, device=s.device)

    def loss() -> Tensor:
        found = encoder(pictures)
        flat = found.permute(0, 2, 3, 1).flatten(0, 2)
        with torch.no_grad():
            which = torch.addmm((book * book).sum(1), flat.float(), book.T, alpha=-2.0).argmin(1)
            count.lerp_(torch.zeros_like(count).index_add_(0, which, ones), 0.01)
            mean = torch.zeros_like(book).index_add_(0, which, flat.float())
            book.lerp_(mean / count.clamp_min(1.0)[:, None], 0.01)
            word = book.index_select(0, which).to(found.dtype)
        near = F.mse_loss(flat, word)
        known = (flat + (word - flat).detach()).unflatten(0, (len(pictures), found.shape[2], -1)).permute(0, 3, 1, 2)
        return F.mse_loss(decoder(known), pictures) + 0.25 * near

    program = _learning(s, nn.ModuleList([encoder, decoder]), loss)
    return Program(program.step, lambda: precision("high"))


@healthy
def healthy_population(s: Setting, fixed: bool) -> Program:
    """Many slightly different networks judged at once, and the common one moved towards the better ones."""
    num, width, rows = s.pick(256, 4), s.pick(512, 8), s.pick(512, 4)
    center = [_bf16(s, width, width) * width**-0.5 for _ in range(3)]
    x, wanted = _bf16(s, rows, width), _bf16(s, rows, width)

    @torch.no_grad()
    def step() -> None:
        noise = [_bf16(s, num, width, width) for _ in center]
        y = x.expand(num, -1, -1)
        for weight, moved in zip(center, noise, strict=True):
            y = F.relu(torch.baddbmm(y @ weight, y, moved, alpha=0.02), inplace=True)
        score = (y - wanted).square_().mean((1, 2)).float()
        weights = ((score.mean() - score) / (score.std() + 1e-6)).bfloat16()
        for weight, moved in zip(center, noise, strict=True):
            weight.add_((weights @ moved.flatten(1)).view_as(weight), alpha=0.01 / num)

    return Program(step)


@healthy
def healthy_updated_in_backward(s: Setting, fixed: bool) -> Program:
    """Each weight is updated as soon as its gradient is there, and the gradient is dropped: memory is saved."""
    width = s.pick(3072, 32)
    model = _blocks(s, 3072, 24, 4)
    x = _bf16(s, s.pick(16, 2), s.pick(512, 8), width)
    optimizers = {param: torch.optim.AdamW([param], lr=1e-4, fused=True) for param in model.parameters()}

    def update(param: Tensor) -> None:
        optimizers[param].step()
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(update)
    return Program(lambda: F.mse_loss(model(x), x).backward())


@healthy
def healthy_beside_each_other(s: Setting, fixed: bool) -> Program:
    """Two encoders of two kinds of input, each on a stream of its own, compared at the end."""
    first, second = _blocks(s, 1024, 16, 4).eval(), _blocks(s, 1536, 24, 4).eval()
    heads = [s.place(lambda width=width: nn.Linear(width, 512)) for width in (s.pick(1024, 32), s.pick(1536, 32))]
    x, y = (
        _bf16(s, s.pick(64, 2), s.pick(256, 8), s.pick(1024, 32)),
        _bf16(s, s.pick(64, 2), s.pick(256, 8), s.pick(1536, 32)),
    )
    streams = [torch.cuda.Stream() if s.cuda else None for _ in range(2)]
    found: list[Tensor] = [x, y]

    @torch.inference_mode()
    def step() -> None:
        for i, (model, given) in enumerate(((first, x), (second, y))):
            if streams[i] is None:
                found[i] = heads[i](model(given).mean(1))
                continue
            streams[i].wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(streams[i]):
                found[i] = heads[i](model(given).mean(1))
        for stream in streams:
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)
        (F.normalize(found[0], dim=-1) @ F.normalize(found[1], dim=-1).T).argmax(-1)

    return Program(step)


def _flipped(spins: Tensor, chance: Tensor, parity: Tensor) -> Tensor:
    around = spins.roll(1, 0) + spins.roll(-1, 0) + spins.roll(1, 1) + spins.roll(-1, 1)
    flip = (chance < torch.exp(-0.88 * spins * around)) & parity
    return torch.where(flip, -spins, spins)


@compiled
def healthy_spins(s: Setting, fixed: bool) -> Program:
    """A magnet of many spins, flipped by turns like the fields of a board; one compiled kernel for a turn."""
    side = s.pick(16384, 8)
    spins, chance = torch.ones(side, side, device=s.device), torch.rand(side, side, device=s.device)
    rows = torch.arange(side, device=s.device)
    even = (rows[:, None] + rows) % 2 == 0
    run, state = torch.compile(_flipped, backend=compiler(s), dynamic=False), [spins]
    odd = ~even

    @torch.no_grad()
    def step() -> None:
        for parity in (even, odd) * 2:
            state[0] = run(state[0], chance.uniform_(), parity)

    return Program(step)


# ---------------------------------------------------------------- causes


class HandNormed(nn.Module):
    """A gated block whose norms are spelled out in fp32, as many model files have them."""

    def __init__(self, width: int, heads: int, hidden: int, by_hand: bool) -> None:
        super().__init__()
        self.heads, self.by_hand = heads, by_hand
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if not self.by_hand:
            return F.rms_norm(x, x.shape[-1:], weight, 1e-6)
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * wide.to(x.dtype)

    def forward(self, x_BLC: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x_BLC, self.norms[0])).unflatten(-1, (3, self.heads, -1))
        mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4).unbind(0), is_causal=True)
        x_BLC = x_BLC + self.out(mixed.transpose(1, 2).flatten(2))
        return x_BLC + self.down(F.silu(self.up(self.norm(x_BLC, self.norms[1]))))


@case("unfused pointwise chain", "F.rms_norm in place of its formula", **PLAIN)
def norms_in_fp32_by_hand(s: Setting, fixed: bool) -> Program:
    width = s.pick(2048, 32)
    make = lambda: HandNormed(width, s.pick(16, 2), s.pick(5632, 64), by_hand=not fixed)
    model = s.place(lambda: nn.Sequential(*(make() for _ in range(s.pick(4, 2)))))
    x = _bf16(s, s.pick(8, 2), s.pick(1024, 16), width)
    return _learning(s, model, lambda: F.mse_loss(model(x), x))


@case("allocator", "no torch.cuda.empty_cache() between playing and learning", **PLAIN)
def cache_emptied_between_phases(s: Setting, fixed: bool) -> Program:
    model = _blocks(s, 1024, 16, 6, causal=True)
    x, held = (
        _bf16(s, s.pick(16, 2), s.pick(512, 8), s.pick(1024, 32)),
        _bf16(s, s.pick(48, 2), s.pick(256, 8), s.pick(1024, 32)),
    )
    learn = _optimized(fresh.adamw(s, model), lambda: F.mse_loss(model(x), x))

    def step() -> None:
        with torch.no_grad():
            model(held)
        if not fixed and s.cuda:
            torch.cuda.empty_cache()
        learn()
        if not fixed and s.cuda:
            torch.cuda.empty_cache()

    return Program(step)


@case("pinned copy on the compute stream", "copy the next scans on a side stream", **PLAIN)
def codes_in_line(s: Setting, fixed: bool) -> Program:
    wide, side = s.pick(96, 8), s.pick(192, 16)
    make = lambda: nn.Sequential(
        nn.Conv2d(8, wide, 3, 2, 1), nn.ReLU(True), nn.Conv2d(wide, 2 * wide, 3, 2, 1), nn.ReLU(True),
        nn.Conv2d(2 * wide, 2 * wide, 3, 1, 1), nn.ReLU(True), nn.Conv2d(2 * wide, 16, 1),
    )  # fmt: skip
    model = fresh.nhwc(s.place(make))
    host = [(s.pinned(fresh.nhwc(torch.randn(s.pick(192, 2), 8, side, side).bfloat16())),) for _ in range(2)]
    feed: Iterator[Any] = itertools.cycle(host)
    ahead = iter(Prefetch(s, feed)) if fixed else (tuple(t.to(s.device, non_blocking=True) for t in b) for b in feed)
    return Program(_optimized(fresh.sgd(s, model), lambda: model(*next(ahead)).square().mean()))


@case("fp32 matmul", "torch.set_float32_matmul_precision('high')", **PLAIN)
def responses_in_fp32(s: Setting, fixed: bool) -> Program:
    """A wide network of an assay, learned in fp32 as it was loaded."""
    width = s.pick(2048, 16)
    parts = lambda: (part for i in (s.pick(1024, 8), width, width) for part in (nn.Linear(i, width), nn.SiLU()))
    model = s.place(lambda: nn.Sequential(*parts(), nn.Linear(width, 64)), torch.float32)
    x, wanted = (torch.randn(s.pick(16384, 8), n, device=s.device) for n in (s.pick(1024, 8), 64))
    program = _learning(s, model, lambda: F.mse_loss(model(x), wanted))
    return Program(program.step, lambda: precision("high" if fixed else "highest"))


@case("host-bound", "replay the walk from a CUDA graph", **PLAIN)
def walked_eagerly(s: Setting, fixed: bool) -> Program:
    """Samples drawn by following a slope that a small network gives, step by step."""
    model = s.place(lambda: own.Policy(s.pick(64, 8), s.pick(512, 16), s.pick(64, 8))).eval()
    x = _bf16(s, s.pick(2048, 4), s.pick(64, 8))

    @torch.no_grad()
    def run() -> None:
        for _ in range(24):
            slope, _ = model(x)
            x.add_(slope, alpha=0.01).add_(torch.randn_like(x), alpha=0.1)

    return Program(graphed(run) if fixed and s.cuda else run)
