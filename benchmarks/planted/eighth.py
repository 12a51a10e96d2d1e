"""An eighth suite: what was found in the seventh's fixed and healthy programs, done; healthy programs and causes of
further kinds. Fixed programs are also recorded as most people record: no shapes, no schedule, no marks of steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import again
import fresh
import seventhnets as seventh
import torch
import torch.nn.functional as F
from cases import CASES, Program, Setting, Step, case, compiler, graphed, precision
from cases import training as train
from healthy import HEALTHY
from sixth import _replayed
from torch import Tensor, nn

# ---------------------------------------------------------------- what is found in fixed programs, done


def _was(name: str, s: Setting) -> Program:
    return CASES[name].build(s, True)


@case("host-bound", "capture the step in a CUDA graph", stack=False)
def again_healthy_recurrence(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("healthy_recurrence", s)
    vocab, size = s.pick(8192, 96), s.pick((192, 512), (6, 2))
    model = s.place(lambda: seventh.Recurrent(vocab, s.pick(1024, 16), 2))
    ids = tuple(torch.randint(0, vocab, size, device=s.device) for _ in range(2))
    return Program(again._whole_step(s, model, again._capturable(model), ids))


@case("host-bound", "capture the four batches in a CUDA graph", stack=False)
def again_losses_summed_on_host(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("losses_summed_on_host", s)
    vocab, size = s.pick(30720, 90), s.pick((16, 512), (2, 16))
    model = s.place(lambda: seventh.Reader(vocab, s.pick(1024, 32), s.pick(4, 2), s.pick(16, 2), size[1]))
    ids = [torch.randint(0, vocab, size, device=s.device) for _ in range(4)]
    labels, optimizer = torch.randint(0, 16, size[:1], device=s.device), again._capturable(model)
    kept, params = torch.zeros((), device=s.device), list(model.parameters())

    def run() -> None:
        for part in ids:
            loss = model(part, labels) / len(ids)
            loss.backward()
            kept.add_(loss.detach())
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return Program(graphed(run) if s.cuda else run)


@case("host-bound", "replay the batch from a CUDA graph", stack=False)
def again_requests_one_by_one(s: Setting, fixed: bool) -> Program:
    return _replayed("requests_one_by_one", s, fixed)


@case("misaligned sizes", "24 classes in place of 21", stack=False)
def again_confusion_counted_on_host(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return _was("confusion_counted_on_host", s)
    model = fresh.nhwc(s.place(lambda: seventh.Labeler(s.pick(128, 8), s.pick(5, 2), 24))).eval()
    side, batch = s.pick(256, 16), s.pick(16, 2)
    pictures = fresh.nhwc(torch.randn(batch, 3, side, side, device=s.device, dtype=torch.bfloat16))
    truth, kept = torch.randint(0, 21, (batch, side, side), device=s.device), torch.zeros(441, device=s.device)

    @torch.no_grad()
    def step() -> None:
        found = model(pictures)[:, :21].argmax(1)
        kept.add_(torch.histc((truth * 21 + found).float(), 441, 0, 441))

    return Program(step)


# ---------------------------------------------------------------- nothing to find

PLAIN = HEALTHY | {"plain": True}
healthy = case("none", "nothing", **PLAIN)


class Shifted(nn.Module):
    """Attention inside of windows, every other layer's shifted by half of one."""

    def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BHWC: Tensor) -> Tensor:
        batch, high, wide, width = x_BHWC.shape
        w, shift = self.window, self.shift
        y = torch.roll(self.norm1(x_BHWC), (-shift, -shift), (1, 2)) if shift else self.norm1(x_BHWC)
        y = y.view(batch, high // w, w, wide // w, w, width).transpose(2, 3).reshape(-1, w * w, width)
        q, k, v = self.qkv(y).view(-1, w * w, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y = y.view(batch, high // w, wide // w, w, w, width).transpose(2, 3).reshape(x_BHWC.shape)
        x_BHWC = x_BHWC + (torch.roll(y, (shift, shift), (1, 2)) if shift else y)
        return x_BHWC + self.down(F.gelu(self.up(self.norm2(x_BHWC))))


def _learning(s: Setting, model: nn.Module, x: Tensor) -> Program:
    """A network that learns to give back what it is given."""
    optimizer = fresh.adamw(s, model)

    def step() -> None:
        F.mse_loss(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@healthy
def healthy_windows(s: Setting, fixed: bool) -> Program:
    width, heads, window, side = s.pick(768, 32), s.pick(12, 2), s.pick(8, 4), s.pick(32, 8)
    make = lambda i: Shifted(width, heads, window, (i % 2) * window // 2)
    model = s.place(lambda: nn.Sequential(*(make(i) for i in range(s.pick(4, 2)))))
    x = torch.randn(s.pick(64, 2), side, side, width, device=s.device, dtype=torch.bfloat16)
    return _learning(s, model, x)


@healthy
def healthy_autoencoder(s: Setting, fixed: bool) -> Program:
    """Pictures squeezed into a distribution and back, in channels_last."""
    wide, deep = s.pick(128, 8), s.pick(32, 4)
    conv = lambda inner, outer, stride=1: nn.Conv2d(inner, outer, 3, stride, 1)
    parts = lambda: [
        nn.Sequential(conv(3, wide), nn.ReLU(True), conv(wide, wide, 2), nn.ReLU(True), conv(wide, 2 * wide, 2),
                      nn.ReLU(True), conv(2 * wide, 2 * deep)),
        nn.Sequential(conv(deep, 2 * wide), nn.ReLU(True), nn.ConvTranspose2d(2 * wide, wide, 4, 2, 1), nn.ReLU(True),
                      nn.ConvTranspose2d(wide, wide, 4, 2, 1), nn.ReLU(True), conv(wide, 3)),
    ]  # fmt: skip
    encoder, decoder = fresh.nhwc(s.place(lambda: nn.ModuleList(parts())))
    optimizer = fresh.adamw(s, nn.ModuleList([encoder, decoder]))
    pictures, _ = fresh.images(s, 192, 128)
    pictures = fresh.nhwc(pictures)

    def step() -> None:
        mean, spread = encoder(pictures).chunk(2, 1)
        found = decoder(mean + torch.exp(0.5 * spread) * torch.randn_like(mean))
        apart = -0.5 * (1.0 + spread - mean.square() - spread.exp()).mean()
        (F.mse_loss(found, pictures) + 0.1 * apart).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@healthy
def healthy_points(s: Setting, fixed: bool) -> Program:
    """Clouds of points: the same layers for every point, and the largest answer of all."""
    return _points(s, _largest)


def _largest(z_CNK: Tensor) -> Tensor:
    return torch.relu(z_CNK).amax(1)


def _points(s: Setting, largest: Callable[[Tensor], Tensor]) -> Program:
    sizes = s.pick((64, 128, 1024, 1024), (8, 16))
    make = lambda: [
        part for i, o in itertools.pairwise((8, *sizes)) for part in (nn.Linear(i, o), nn.BatchNorm1d(o), nn.ReLU(True))
    ]
    each = s.place(lambda: nn.Sequential(*make()[:-1]), torch.float32)
    whole = s.place(lambda: nn.Sequential(nn.Linear(sizes[-1], 512), nn.ReLU(), nn.Linear(512, 40)), torch.float32)
    clouds, num = s.pick(128, 2), s.pick(2048, 8)
    x = torch.randn(clouds * num, 8, device=s.device)
    labels = torch.randint(0, 40, (clouds,), device=s.device)
    optimizer = fresh.adamw(s, nn.ModuleList([each, whole]))

    def step() -> None:
        seen = largest(each(x).view(clouds, num, -1))
        F.cross_entropy(whole(seen), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step, lambda: precision("high"))


class Rays(nn.Module):
    """Places along rays to colors."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        sizes = [64, *([width] * depth)]
        self.parts = nn.Sequential(
            *(part for i, o in itertools.pairwise(sizes) for part in (nn.Linear(i, o), nn.ReLU(True)))
        )
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.parts(x))


@healthy
def healthy_rays(s: Setting, fixed: bool) -> Program:
    """Many small products in a row, one for every place on every ray."""
    model = s.place(lambda: Rays(s.pick(512, 16), s.pick(8, 2)))
    x = torch.randn(s.pick(393216, 32), 64, device=s.device, dtype=torch.bfloat16)
    seen, optimizer = torch.randn(len(x), 8, device=s.device, dtype=torch.bfloat16), fresh.adamw(s, model)

    def step() -> None:
        F.mse_loss(model(x), seen).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@healthy
def healthy_gates(s: Setting, fixed: bool) -> Program:
    """A wide GRU of cuDNN's, read at its end."""
    width = s.pick(2048, 16)
    memory = s.place(lambda: nn.GRU(s.pick(256, 8), width))
    head = s.place(lambda: nn.Linear(width, 64))
    optimizer = fresh.adamw(s, nn.ModuleList([memory, head]))
    x = torch.randn(s.pick(96, 4), s.pick(1024, 2), s.pick(256, 8), device=s.device, dtype=torch.bfloat16)
    labels = torch.randint(0, 64, (x.shape[1],), device=s.device)

    def step() -> None:
        F.cross_entropy(head(memory(x)[0][-1]), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@healthy
def healthy_least_squares(s: Setting, fixed: bool) -> Program:
    """A factor of a matrix found by least squares, for all of its rows at once."""
    rows, rank, seen = s.pick(32768, 16), s.pick(64, 8), s.pick(256, 8)
    items = torch.randn(s.pick(100_000, 50), rank, device=s.device)
    picked = torch.randint(0, len(items), (rows, seen), device=s.device)
    values = torch.randn(rows, seen, 1, device=s.device)
    ridge = 0.1 * torch.eye(rank, device=s.device)
    found = torch.zeros(rows, rank, 1, device=s.device)

    @torch.no_grad()
    def step() -> None:
        known = items[picked]
        square = torch.baddbmm(ridge, known.transpose(1, 2), known)
        root, _ = torch.linalg.cholesky_ex(square)
        torch.cholesky_solve(torch.bmm(known.transpose(1, 2), values), root, out=found)

    return Program(step, lambda: precision("high"))


@healthy
def healthy_search(s: Setting, fixed: bool) -> Program:
    """The nearest of half a million vectors, by one product and a selection."""
    width = s.pick(768, 16)
    bank = torch.randn(s.pick(524_288, 64), width, device=s.device, dtype=torch.bfloat16)
    asked = torch.randn(s.pick(2048, 4), width, device=s.device, dtype=torch.bfloat16)

    @torch.inference_mode()
    def step() -> None:
        torch.topk(asked @ bank.T, 8, 1, sorted=False)

    return Program(step)


@healthy
def healthy_masked_words(s: Setting, fixed: bool) -> Program:
    """A language model of masked words whose head sees the masked places alone."""
    vocab, size, width = s.pick(30720, 96), s.pick((64, 512), (2, 16)), s.pick(1024, 32)
    model = s.place(lambda: seventh.Reader(vocab, width, s.pick(4, 2), s.pick(16, 2), size[1]))
    head = s.place(lambda: nn.Linear(width, vocab, bias=False))
    optimizer = fresh.adamw(s, nn.ModuleList([model, head]))
    ids = torch.randint(0, vocab, size, device=s.device)
    places = torch.randperm(ids.numel(), device=s.device)[: ids.numel() // 8 + 1].sort().values
    masked, truth = ids.flatten().index_fill(0, places, 3).view(size), ids.flatten()[places]

    def step() -> None:
        x = model.tokens(masked) + model.places
        for part in model.layers:
            x = part(x)
        chosen = model.norm(x.flatten(0, 1).index_select(0, places))
        F.cross_entropy(head(chosen), truth).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@healthy
def healthy_long_context(s: Setting, fixed: bool) -> Program:
    """One long document: attention takes most of the time."""
    width = s.pick(2048, 32)
    model = s.place(lambda: nn.Sequential(*(Causal(width, s.pick(16, 2)) for _ in range(2))))
    return _learning(s, model, torch.randn(1, s.pick(24576, 16), width, device=s.device, dtype=torch.bfloat16))


class Causal(nn.Module):
    """Attention to what came before, and a hidden layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BLC: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x_BLC)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BLC = x_BLC + self.out(mixed.transpose(1, 2).flatten(2))
        return x_BLC + self.down(F.silu(self.up(self.norm2(x_BLC))))


@healthy
def healthy_value_learning(s: Setting, fixed: bool) -> Program:
    """Values of states learned from a slowly following copy; large batches drawn on the device."""
    width, batch, seen = s.pick(2048, 16), s.pick(32768, 8), s.pick(1_000_000, 64)
    make = lambda: nn.Sequential(
        nn.Linear(64, width), nn.ReLU(True), nn.Linear(width, width), nn.ReLU(True), nn.Linear(width, 16)
    )
    model, slow = s.place(make), s.place(make).requires_grad_(False)
    states = torch.randn(seen, 64, device=s.device, dtype=torch.bfloat16)
    done, reward = torch.randint(0, 16, (seen,), device=s.device), torch.randn(seen, device=s.device)
    optimizer, fast, behind = fresh.adamw(s, model), list(model.parameters()), list(slow.parameters())

    def step() -> None:
        at = torch.randint(0, seen - 1, (batch,), device=s.device)
        with torch.no_grad():
            wanted = reward[at] + 0.99 * slow(states[at + 1]).amax(1)
        found = model(states[at]).gather(1, done[at][:, None])[:, 0]
        F.smooth_l1_loss(found.float(), wanted).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(behind, fast, 0.005)

    return Program(step)


@healthy
def healthy_graphed_parts(s: Setting, fixed: bool) -> Program:
    """Blocks captured forward and backward by make_graphed_callables, the optimizer outside."""
    width = s.pick(1024, 32)
    x = torch.randn(s.pick(16, 2), s.pick(512, 16), width, device=s.device, dtype=torch.bfloat16, requires_grad=True)
    model = s.place(lambda: nn.Sequential(*(Causal(width, s.pick(16, 2)) for _ in range(s.pick(6, 2)))))
    run = torch.cuda.make_graphed_callables(model, (x,)) if s.cuda else model
    optimizer, target = fresh.adamw(s, model), x.detach().clone()

    def step() -> None:
        F.mse_loss(run(x), target).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


# ---------------------------------------------------------------- causes


@case("weights cast every step", "keep the frozen encoder in bf16", stack=False, plain=True)
def probe_under_autocast(s: Setting, fixed: bool) -> Program:
    """A head learned over a frozen encoder, whose fp32 weights are cast again in every step."""
    side, width = s.pick(112, 16), s.pick(1536, 32)
    make = lambda: seventh.Patches(side, s.pick(14, 4), width, s.pick(8, 2), s.pick(16, 2))
    model = s.place(make, torch.bfloat16 if fixed else torch.float32).requires_grad_(False)
    head = s.place(lambda: nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1000)), torch.float32)
    pictures = torch.randint(0, 255, (s.pick(96, 2), 3, side, side), dtype=torch.uint8, device=s.device)
    labels, optimizer = torch.randint(0, 1000, (len(pictures),), device=s.device), fresh.adamw(s, head)

    def step() -> None:
        seen = model.trunk(pictures) if fixed else None
        with torch.autocast(s.device, torch.bfloat16):
            seen = model.trunk(pictures) if seen is None else seen
            loss = F.cross_entropy(head(seen), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("dense embedding gradient", "nn.Embedding(..., sparse=True)", stack=False, plain=True)
def buyers_and_goods_dense(s: Setting, fixed: bool) -> Program:
    """A matrix of purchases in two factors."""
    return Program(_purchases(s, fixed, s.pick(65536, 8)))


def _purchases(s: Setting, sparse: bool, batch: int) -> Step:
    sizes, width = s.pick((3_000_000, 600_000), (90, 60)), s.pick(96, 8)
    make = lambda: nn.ModuleList(nn.Embedding(num, width, sparse=sparse) for num in sizes)
    tables = s.place(make, torch.float32)
    optimizer = torch.optim.SGD(tables.parameters(), lr=0.1)
    who, what = (torch.randint(0, num, (batch,), device=s.device) for num in sizes)
    bought = torch.rand(batch, device=s.device).round()

    def step() -> None:
        score = (tables[0](who) * tables[1](what)).sum(1)
        F.binary_cross_entropy_with_logits(score, bought).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


@case("host-bound", "cut all boxes out at once", stack=False, plain=True)
def boxes_cut_one_by_one(s: Setting, fixed: bool) -> Program:
    """Features under every box, cut out and averaged in a loop."""
    model = fresh.nhwc(s.place(lambda: seventh.Labeler(s.pick(192, 8), s.pick(3, 2), s.pick(64, 8)))).eval()
    side, num, cut = s.pick(128, 16), s.pick(400, 4), s.pick(16, 4)
    pictures = fresh.nhwc(torch.randn(s.pick(24, 2), 3, side, side, device=s.device, dtype=torch.bfloat16))
    tops = [((7 * i) % (side - cut), (13 * i) % (side - cut)) for i in range(num)]
    reach = torch.arange(cut, device=s.device)
    top, left = (torch.tensor(part, device=s.device)[:, None] + reach for part in zip(*tops, strict=True))
    weight = torch.randn(s.pick(64, 8), 16, device=s.device, dtype=torch.bfloat16)

    @torch.no_grad()
    def step() -> None:
        features = model(pictures)[0]
        if fixed:
            means = features[:, top[:, :, None], left[:, None, :]].mean((2, 3)).T
        else:
            cuts = [features[:, y : y + cut, x : x + cut] for y, x in tops]
            means = torch.stack([(part * 1.0).mean((1, 2)) for part in cuts])
        (means @ weight).softmax(-1)

    return Program(step)


@case("unfused attention", "F.scaled_dot_product_attention with the slopes as its mask", stack=False, plain=True)
def slopes_added_by_hand(s: Setting, fixed: bool) -> Program:
    """Scores that fall with distance, by baddbmm, a softmax in fp32 and bmm."""
    width, heads, length, batch = s.pick(1024, 32), s.pick(16, 2), s.pick(1024, 16), s.pick(8, 2)
    layers = s.place(lambda: nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(s.pick(4, 2))))
    steep = torch.tensor([2.0 ** (-8 * (i + 1) / heads) for i in range(heads)], device=s.device)
    away = torch.arange(length, device=s.device)
    slopes = -(steep[:, None, None] * (away[None, :, None] - away[None, None, :]).abs()).to(torch.bfloat16)
    x = torch.randn(batch, length, width, device=s.device, dtype=torch.bfloat16)

    def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if fixed:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=slopes[None].expand(batch, -1, -1, -1))
        flat = [part.reshape(batch * heads, length, -1) for part in (q, k, v)]
        bias = slopes.repeat(batch, 1, 1)
        scores = torch.baddbmm(bias, flat[0], flat[1].transpose(1, 2), alpha=1 / math.sqrt(width // heads))
        return torch.bmm(F.softmax(scores, -1, dtype=torch.float32).to(v.dtype), flat[2]).view(q.shape)

    @torch.no_grad()
    def step() -> None:
        y = x
        for layer in layers:
            parts = layer(y).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            y = y + mixed(*parts).transpose(1, 2).flatten(2)

    return Program(step)


@case("unfused optimizer", "RMSprop(..., foreach=True), the default", stack=False, plain=True)
def rmsprop_tensor_by_tensor(s: Setting, fixed: bool) -> Program:
    size, vocab = s.pick((16, 512), (2, 16)), s.pick(30720, 90)
    model = s.place(lambda: seventh.Reader(vocab, s.pick(1024, 32), s.pick(8, 2), s.pick(16, 2), size[1]))
    ids, labels = torch.randint(0, vocab, size, device=s.device), torch.randint(0, 16, size[:1], device=s.device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-5, momentum=0.9, foreach=fixed)
    return Program(train(model, optimizer, itertools.cycle([(ids, labels)])))


@case("synchronization", "bf16 losses are finite: look every 100 steps", stack=False, plain=True)
def losses_asked_if_finite(s: Setting, fixed: bool) -> Program:
    """Two networks, and after each one's loss a question whether it may be used."""
    width, size = s.pick(1024, 32), s.pick((12, 512), (2, 16))
    models = [s.place(lambda: nn.Sequential(*(Causal(width, s.pick(16, 2)) for _ in range(3)))) for _ in range(2)]
    x = torch.randn(*size, width, device=s.device, dtype=torch.bfloat16)
    optimizer = fresh.adamw(s, nn.ModuleList(models))

    def step() -> None:
        for model in models:
            loss = F.mse_loss(model(x), x)
            if fixed or torch.isfinite(loss):
                loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


# ---------------------------------------------------------------- what is found in the programs above, done


@case(
    "unfused pointwise chain", "torch.compile the largest of all points", compiles=True, rounds=1, steps=12, stack=False
)
def again_healthy_points(s: Setting, fixed: bool) -> Program:
    return _points(s, torch.compile(_largest, backend=compiler(s), dynamic=False) if fixed else _largest)


@case("host-bound", "one batch in place of four", stack=False)
def again_buyers_and_goods_dense(s: Setting, fixed: bool) -> Program:
    """The same purchases a step."""
    num = 1 if fixed else 4
    once = _purchases(s, True, s.pick(65536, 8) * 4 // num)

    def step() -> None:
        for _ in range(num):
            once()

    return Program(step)
