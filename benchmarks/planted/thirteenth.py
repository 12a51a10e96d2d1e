"""A thirteenth suite: healthy programs that look like mistakes without being any (softmaxes that are no attention, work
done again by design, losses of every layer, inputs that are streamed, solvers that read), programs of a hub of models,
and causes in the same trades; and what was left to try of the twelfth."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import fresh
import ninth
import thirteenthnets as nets
import torch
import torch.nn.functional as F
from cases import CASES, Prefetch, Program, Setting, case, compiler, graphed, precision
from eleventh import _blocks, _learning
from ninth import HEALTHY, PLAIN, _bf16, _ints, _optimized
from tenth import TRIED
from torch import Tensor, nn

healthy = case("none", "nothing", **HEALTHY | PLAIN)
compiled = case("none", "nothing", **HEALTHY | PLAIN | {"compiles": True, "rounds": 1})

# ---------------------------------------------------------------- what was told, done


@case("fp32 logits", "the loss sequence by sequence, on logits that lie together as they are", **TRIED)
def again_healthy_multiple_choice(s: Setting, fixed: bool) -> Program:
    """Every half of a sequence's logits is contiguous by itself: no copy is needed for the loss."""
    if not fixed:
        return CASES["healthy_multiple_choice"].build(s, True)
    model, vocab, size = ninth._chat(s, 6).eval(), s.pick(32768, 96), s.pick((32, 512), (4, 16))
    ids, right = _ints(s, vocab, size[0], size[1] + 1), _ints(s, 4, size[0] // 4)
    given, said, count = ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), torch.zeros((), device=s.device)

    @torch.inference_mode()
    def step() -> None:
        logits = model.logits(given)
        each = [
            F.cross_entropy(logits[i, size[1] // 2 :], said[i, size[1] // 2 :], reduction="sum") for i in range(size[0])
        ]
        count.add_((torch.stack(each).view(size[0] // 4, 4).argmin(1) == right).sum())

    return Program(step)


# ---------------------------------------------------------------- softmaxes that are no attention


@healthy
def healthy_slots(s: Setting, fixed: bool) -> Program:
    """Pictures taken apart by slots that compete for their places."""
    width = s.pick(512, 16)
    slots, head = s.place(lambda: nets.Slots(width, s.pick(32, 4), 3)), s.place(lambda: nn.Linear(width, width))
    blocks = _blocks(s, 512, 8, 6)
    x, wanted = _bf16(s, s.pick(256, 2), s.pick(256, 8), s.pick(512, 32)), _bf16(s, s.pick(256, 2), width)
    enter = s.place(lambda: nn.Linear(s.pick(512, 32), width))
    loss = lambda: F.mse_loss(head(slots(enter(blocks(x))).mean(1)), wanted)
    return _learning(s, nn.ModuleList([slots, head, blocks, enter]), loss)


@healthy
def healthy_soft_experts(s: Setting, fixed: bool) -> Program:
    """Experts that are each given a mixture of all tokens."""
    width = s.pick(1024, 16)
    make = lambda: nets.SoftExperts(width, s.pick(32, 2), s.pick(8, 2))
    model = s.place(lambda: nn.Sequential(*(make() for _ in range(s.pick(6, 2)))))
    x = _bf16(s, s.pick(128, 2), s.pick(512, 8), width)
    return _learning(s, model, lambda: F.mse_loss(model(x), x))


# ---------------------------------------------------------------- work done again, or in several parts, by design


@healthy
def healthy_reversible(s: Setting, fixed: bool) -> Program:
    """Layers that work out what they were given from what they gave, instead of keeping it."""
    width = s.pick(1024, 16)
    model = s.place(lambda: nets.Reversible(width, s.pick(16, 2), s.pick(8, 2)))
    x = _bf16(s, s.pick(16, 2), s.pick(1024, 8), width).requires_grad_()
    return _learning(s, model, lambda: F.mse_loss(model(x), x.detach()))


@healthy
def healthy_judged_at_every_layer(s: Setting, fixed: bool) -> Program:
    """Every layer's guess is compared with the truth as soon as it is there; all losses are learned from at once."""
    width, classes = s.pick(1536, 32), s.pick(512, 8)
    blocks = _blocks(s, 1536, 24, 8)
    heads = s.place(lambda: nn.ModuleList(nn.Linear(width, classes) for _ in blocks))
    x, truth = _bf16(s, s.pick(16, 2), s.pick(512, 8), width), _ints(s, classes, s.pick(16, 2) * s.pick(512, 8))

    def loss() -> Tensor:
        y, total = x, torch.zeros((), device=s.device)
        for block, head in zip(blocks, heads, strict=True):
            y = block(y)
            total = total + F.cross_entropy(head(y).flatten(0, 1), truth)
        return total

    return _learning(s, nn.ModuleList([blocks, heads]), loss)


@healthy
def healthy_accumulated_mixed(s: Setting, fixed: bool) -> Program:
    """Four batches before the weights move, all of them inside of one autocast."""
    width = s.pick(2048, 16)
    model = s.place(lambda: nn.Sequential(*(nets.thinks(width) for _ in range(4))), torch.float32)
    optimizer = fresh.adamw(s, model)
    batches = [_bf16(s, s.pick(8192, 8), width) for _ in range(4)]

    def step() -> None:
        with torch.autocast(s.device, torch.bfloat16):
            for x in batches:
                F.mse_loss(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@healthy
def healthy_columns_mixed(s: Setting, fixed: bool) -> Program:
    """A table whose groups of columns come as they are, in fp32, each into a tower of its own under autocast."""
    sizes, width, rows = s.pick((256, 512, 128, 384), (8, 16, 8, 8)), s.pick(2048, 16), s.pick(32768, 8)
    towers = s.place(
        lambda: nn.ModuleList(nn.Sequential(nn.Linear(n, width), nn.ReLU(True)) for n in sizes), torch.float32
    )
    trunk = s.place(
        lambda: nn.Sequential(nn.Linear(4 * width, width), nn.ReLU(True), nn.Linear(width, width), nn.ReLU(True),
                              nn.Linear(width, 8)), torch.float32,
    )  # fmt: skip
    columns, truth = [torch.randn(rows, n, device=s.device) for n in sizes], _ints(s, 8, rows)

    def loss() -> Tensor:
        with torch.autocast(s.device, torch.bfloat16):
            return F.cross_entropy(trunk(torch.cat([t(x) for t, x in zip(towers, columns, strict=True)], 1)), truth)

    return _learning(s, nn.ModuleList([towers, trunk]), loss)


# ---------------------------------------------------------------- optimizers and solvers


@healthy
def healthy_plain_descent(s: Setting, fixed: bool) -> Program:
    """Large layers that follow their slope and nothing else, with the optimizer as it comes."""
    width = s.pick(6144, 16)
    layers = lambda: (part for _ in range(s.pick(40, 3)) for part in (nn.Linear(width, width), nn.ReLU()))
    model = s.place(lambda: nn.Sequential(*layers()))
    x = _bf16(s, s.pick(2048, 8), width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Program(_optimized(optimizer, lambda: F.mse_loss(model(x), x)))


@healthy
def healthy_deblurred(s: Setting, fixed: bool) -> Program:
    """A sharp picture sought by a quasi-Newton method, blurred again by Fourier transforms to be compared."""
    side, num = s.pick(2048, 16), s.pick(12, 2)
    sharp = torch.randn(num, side, side, device=s.device).requires_grad_()
    blur = torch.fft.rfft2(torch.rand(1, side, side, device=s.device))
    seen = torch.randn(num, side, side, device=s.device)
    optimizer = torch.optim.LBFGS([sharp], lr=0.1, max_iter=2, history_size=4)

    def compared() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = F.mse_loss(torch.fft.irfft2(torch.fft.rfft2(sharp) * blur, s=(side, side)), seen)
        loss.backward()
        return loss

    return Program(lambda: optimizer.step(compared))


@healthy
def healthy_principal(s: Setting, fixed: bool) -> Program:
    """The main directions of many samples, by products and a factorization in turns."""
    rows, width, num = s.pick(262_144, 32), s.pick(4096, 16), s.pick(256, 4)
    x, basis = _bf16(s, rows, width), torch.linalg.qr(torch.randn(width, num, device=s.device))[0]

    @torch.no_grad()
    def step() -> None:
        for _ in range(2):
            moved = x.T @ (x @ basis.bfloat16())
            basis.copy_(torch.linalg.qr(moved.float())[0])

    return Program(step, lambda: precision("high"))


@healthy
def healthy_factors(s: Setting, fixed: bool) -> Program:
    """Buyers and goods as short vectors, solved for in turns: a small system of equations for every one."""
    buyers, goods, deep = s.pick(32768, 16), s.pick(4096, 8), s.pick(64, 4)
    seen = (torch.rand(buyers, goods, device=s.device) < 0.05).float()
    left, right = torch.randn(buyers, deep, device=s.device), torch.randn(goods, deep, device=s.device)
    eye = 0.1 * torch.eye(deep, device=s.device)

    def solved(weights: Tensor, others: Tensor) -> Tensor:
        pairs = (others[:, :, None] * others[:, None, :]).flatten(1)
        systems = torch.addmm(eye.flatten(), weights, pairs).view(-1, deep, deep)
        factor = torch.linalg.cholesky_ex(systems)[0]
        return torch.cholesky_solve((weights @ others)[..., None], factor)[..., 0]

    @torch.no_grad()
    def step() -> None:
        left.copy_(solved(seen, right))
        right.copy_(solved(seen.T, left))

    return Program(step, lambda: precision("high"))


@healthy
def healthy_sparse_solver(s: Setting, fixed: bool) -> Program:
    """Unknowns on a grid, relaxed by products with a sparse matrix, for many right-hand sides."""
    side, sides = s.pick(1024, 8), s.pick(32, 2)
    num = side * side
    at = torch.arange(num, device=s.device)
    rows = torch.cat([at, at[1:], at[:-1], at[side:], at[:-side]])
    cols = torch.cat([at, at[:-1], at[1:], at[:-side], at[side:]])
    values = torch.cat([torch.full((num,), 4.1), torch.full((len(rows) - num,), -1.0)]).to(s.device)
    matrix = torch.sparse_coo_tensor(torch.stack((rows, cols)), values, (num, num)).coalesce().to_sparse_csr()
    x, b = torch.zeros(num, sides, device=s.device), torch.randn(num, sides, device=s.device)

    @torch.no_grad()
    def run() -> None:
        for _ in range(8):
            x.add_(torch.sub(b, matrix @ x), alpha=0.2)

    return Program(run)


# ---------------------------------------------------------------- reading of tables, memories and streams


@healthy
def healthy_cached_decode(s: Setting, fixed: bool) -> Program:
    """Tokens one after another out of a graph, with memory that was laid out before."""
    width, batch, length, layers = s.pick(2048, 32), s.pick(64, 2), s.pick(2048, 16), s.pick(8, 2)
    heads, groups, vocab = s.pick(16, 4), s.pick(4, 2), s.pick(32768, 96)
    model = s.place(lambda: nn.ModuleList(nets.Cached(width, heads, groups, batch, length) for _ in range(layers)))
    table, head = s.place(lambda: nn.Embedding(vocab, width)), s.place(lambda: nn.Linear(width, vocab, bias=False))
    token, at = _ints(s, vocab, batch, 1), torch.full((1,), length // 2, device=s.device)
    places = torch.arange(length, device=s.device)

    @torch.inference_mode()
    def run() -> None:
        x, seen = table(token), (places <= at).view(1, 1, 1, length)
        for layer in model.eval():
            x = layer(x, at, seen)
        token.copy_(head(x[:, -1]).argmax(-1, keepdim=True))
        at.add_(1).remainder_(length)

    return Program(graphed(run) if s.cuda else run)


@healthy
def healthy_bags(s: Setting, fixed: bool) -> Program:
    """Recommendations served from tables of many million rows."""
    rows, deep, batch, num = s.pick(20_000_000, 64), s.pick(64, 8), s.pick(32768, 4), s.pick(6, 2)
    tables = [_bf16(s, rows, deep) for _ in range(num)]
    rows_BK = [_ints(s, rows, batch, s.pick(24, 3)) for _ in range(num)]
    width = s.pick(2048, 16)
    tower = s.place(
        lambda: nn.Sequential(nn.Linear(num * deep, width), nn.ReLU(True), nn.Linear(width, width), nn.ReLU(True),
                              nn.Linear(width, 8)),
    ).eval()  # fmt: skip

    @torch.inference_mode()
    def step() -> None:
        found = [F.embedding_bag(i, table, mode="sum") for i, table in zip(rows_BK, tables, strict=True)]
        tower(torch.cat(found, 1)).argmax(-1)

    return Program(step)


@healthy
def healthy_streamed_frames(s: Setting, fixed: bool) -> Program:
    """Frames from pinned memory, copied ahead on a stream of their own and taking about as long as their network."""
    side, batch, wide = s.pick(512, 16), s.pick(256, 2), s.pick(48, 8)
    make = lambda: nn.Sequential(
        nn.Conv2d(3, wide, 3, 2, 1), nn.ReLU(True), nn.Conv2d(wide, 2 * wide, 3, 2, 1), nn.ReLU(True),
        nn.Conv2d(2 * wide, 2 * wide, 3, 2, 1), nn.ReLU(True), nn.Conv2d(2 * wide, 8, 1),
    )  # fmt: skip
    model = fresh.nhwc(s.place(make)).eval()
    host = [(s.pinned(torch.randint(0, 256, (batch, side, side, 3), dtype=torch.uint8)),) for _ in range(2)]
    ahead = iter(Prefetch(s, itertools.cycle(host)))

    @torch.inference_mode()
    def step() -> None:
        model(next(ahead)[0].permute(0, 3, 1, 2).bfloat16()).amax((2, 3))

    return Program(step)


@healthy
def healthy_hashed_grid(s: Setting, fixed: bool) -> Program:
    """A scene as features in hashed tables, learned together with a small network."""
    return _hashed(s, indexed=False)


def _hashed(s: Setting, indexed: bool) -> Program:
    levels, rows, points = s.pick(8, 2), s.pick(524_288, 32), s.pick(1_048_576, 16)
    model = s.place(lambda: nets.HashedGrid(levels, rows, 8, s.pick(256, 16), indexed))
    reach = (min(rows, s.pick(4096, 4) * 4**level) for level in range(levels))  # few corners where cells are large
    corners, wanted = torch.stack([_ints(s, high, points) for high in reach]), _bf16(s, points, 16)
    return _learning(s, model, lambda: F.mse_loss(model(corners), wanted))


@healthy
def healthy_grouped_sums(s: Setting, fixed: bool) -> Program:
    """Sums over groups of many million rows, the largest groups sought: a query, not a network."""
    rows, groups = s.pick(64_000_000, 64), s.pick(1_000_000, 8)
    key, value = _ints(s, groups, rows), torch.randn(rows, device=s.device)

    @torch.no_grad()
    def step() -> None:
        totals = torch.zeros(groups, device=s.device).index_add_(0, key, value)
        order = torch.argsort(key)
        ranked = torch.cumsum(value.index_select(0, order), 0)
        torch.topk(totals, min(1000, groups), sorted=True)
        ranked.amax()

    return Program(step)


# ---------------------------------------------------------------- sound, pictures, imagined worlds


@healthy
def healthy_raw_sound(s: Setting, fixed: bool) -> Program:
    """Sound as it is recorded, cut down by convolutions, then layers that attend."""
    width, heads = s.pick(768, 32), s.pick(12, 2)
    make = lambda w, h: ninth.own.Grouped(w, h, h, causal=False)
    model = s.place(lambda: nets.RawSound(width, heads, s.pick(8, 2), make))
    waves = _bf16(s, s.pick(16, 2), 1, s.pick(160_000, 2000))
    return _learning(s, model, lambda: model(waves).float().square().mean())


@healthy
def healthy_modern_convolutions(s: Setting, fixed: bool) -> Program:
    """Wide depthwise convolutions between norms over channels, in channels_last."""
    widths, depths = s.pick((128, 256, 512), (8, 16)), s.pick((3, 3, 6), (1, 1))
    body = fresh.nhwc(s.place(lambda: nets.modern_stages(widths, depths)))
    head = s.place(lambda: nn.Linear(widths[-1], s.pick(1000, 8)))
    pictures = fresh.nhwc(_bf16(s, s.pick(64, 2), 3, s.pick(224, 32), s.pick(224, 32)))
    truth = _ints(s, s.pick(1000, 8), s.pick(64, 2))
    loss = lambda: F.cross_entropy(head(body(pictures).mean((2, 3))), truth)
    return _learning(s, nn.ModuleList([body, head]), loss)


def _augmented(s: Setting, last: bool) -> Program:
    """Pictures turned and stretched on the device before they are learned from."""
    batch, side = s.pick(256, 2), s.pick(160, 32)
    model = s.place(lambda: nets.residual_net(s.pick(96, 8), s.pick(4, 2), s.pick(1000, 8)))
    pictures, truth = torch.rand(batch, 3, side, side, device=s.device), _ints(s, s.pick(1000, 8), batch)
    layout = torch.channels_last if last else torch.contiguous_format
    model = model.to(memory_format=layout)
    start = torch.eye(2, 3, device=s.device).expand(batch, -1, -1)

    def loss() -> Tensor:
        moved = start + 0.1 * torch.randn_like(start)
        grid = F.affine_grid(moved, list(pictures.shape), align_corners=False)
        turned = F.grid_sample(pictures, grid, align_corners=False)
        return F.cross_entropy(model(turned.to(torch.bfloat16, memory_format=layout)), truth)

    return Program(_optimized(fresh.sgd(s, model), loss))


@healthy
def healthy_augmented(s: Setting, fixed: bool) -> Program:
    return _augmented(s, last=True)


@healthy
def healthy_dreams(s: Setting, fixed: bool) -> Program:
    """Sixty-four imagined steps for many worlds at once, out of a graph."""
    width, batch = s.pick(1024, 16), s.pick(4096, 4)
    model = s.place(lambda: nets.Dreams(width, s.pick(32, 8))).eval()
    state, found = _bf16(s, batch, width), torch.zeros(batch, s.pick(32, 8), device=s.device, dtype=torch.bfloat16)

    @torch.no_grad()
    def run() -> None:
        found.copy_(model(state, s.pick(64, 3)))

    return Program(graphed(run) if s.cuda else run)


@healthy
def healthy_written_weights(s: Setting, fixed: bool) -> Program:
    """A network that writes the weights of another one, anew for every sample."""
    told, width, batch = s.pick(512, 8), s.pick(128, 8), s.pick(2048, 2)
    model = s.place(lambda: nets.Written(told, width))
    about, x = _bf16(s, batch, told), _bf16(s, batch, s.pick(1024, 8), width)
    return _learning(s, model, lambda: F.mse_loss(model(about, x), x))


@healthy
def healthy_scripted(s: Setting, fixed: bool) -> Program:
    """A network that was traced and frozen years ago, and is served as it is."""
    model = fresh.nhwc(s.place(lambda: nets.residual_net(s.pick(128, 8), s.pick(4, 2), s.pick(1000, 8)))).eval()
    pictures = fresh.nhwc(_bf16(s, s.pick(128, 2), 3, s.pick(192, 32), s.pick(192, 32)))
    with torch.no_grad():
        frozen = torch.jit.freeze(torch.jit.trace(model, pictures))

    @torch.no_grad()
    def step() -> None:
        frozen(pictures).argmax(-1)

    return Program(step)


# ---------------------------------------------------------------- texts


@healthy
def healthy_varlen(s: Setting, fixed: bool) -> Program:
    """Texts of different lengths one behind the other, none of them padded."""
    width, heads, layers = s.pick(1024, 32), s.pick(16, 2), s.pick(6, 2)
    lengths = s.pick((1013, 611, 1999, 333, 877, 1501, 277, 709, 1201, 463, 1777, 541), (5, 3, 8))
    ends = torch.tensor((0, *itertools.accumulate(lengths)), dtype=torch.int32, device=s.device)
    model = s.place(
        lambda: nn.ModuleList(nn.ModuleList([nets.Attends(width, heads), nets.thinks(width)]) for _ in range(layers))
    )
    x = _bf16(s, sum(lengths), width)

    def mixed(part: Any, x: Tensor) -> Tensor:
        q, k, v = (p.contiguous() for p in part.qkv(part.norm(x)).unflatten(-1, (3, heads, -1)).unbind(1))
        return x + part.out(_varlen(s, q, k, v, ends, max(lengths)).flatten(1))

    def loss() -> Tensor:
        y = x
        for attends, thinks in model:
            y = mixed(attends, y)
            y = y + thinks(y)
        return F.mse_loss(y, x)

    return _learning(s, model, loss)


def _varlen(s: Setting, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int) -> Tensor:
    if s.cuda:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(q, k, v, ends, ends, longest, longest)
    parts = (t.tensor_split(ends[1:-1].long().cpu()) for t in (q, k, v))
    each = (F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in part)) for part in zip(*parts, strict=True))
    return torch.cat([part.transpose(0, 1) for part in each])


def _hub(s: Setting, layers: int, vocab: int = 30528, dtype: torch.dtype = torch.bfloat16, **how: Any) -> nn.Module:
    """A text encoder as a hub of models has it."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "num_hidden_layers": layers}
    toy = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 2}
    config = BertConfig(vocab_size=s.pick(vocab, 96), attn_implementation="sdpa", **s.pick(sizes, toy), **how)
    return s.place(lambda: BertForMaskedLM(config), dtype)


@healthy
def healthy_hub_training(s: Setting, fixed: bool) -> Program:
    """Hidden words guessed by a model of a hub, with its dropout."""
    model = _hub(s, 8).train()
    ids = _ints(s, s.pick(30528, 96), s.pick(32, 2), s.pick(512, 8))
    labels = ids.masked_fill(torch.rand(ids.shape, device=s.device) > 0.15, -100)
    return _learning(s, model, lambda: model(input_ids=ids, labels=labels).loss)


@healthy
def healthy_hub_padded(s: Setting, fixed: bool) -> Program:
    """Texts of similar lengths through a model of a hub, with a mask for what is padded."""
    model = _hub(s, 12).eval()
    batch, length = s.pick(64, 2), s.pick(512, 8)
    ids = _ints(s, s.pick(30528, 96), batch, length)
    lengths = torch.linspace(0.8, 1.0, batch, device=s.device).mul(length).long()
    mask = (torch.arange(length, device=s.device) < lengths[:, None]).long()

    @torch.inference_mode()
    def step() -> None:
        model.bert(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0].float()

    return Program(step)


# ---------------------------------------------------------------- compiled


@compiled
def healthy_compiled_stages(s: Setting, fixed: bool) -> Program:
    """A network whose stages are compiled one by one, as is advised where they repeat."""
    torch._dynamo.reset()
    widths, depths = s.pick((128, 256, 512), (8, 16)), s.pick((3, 3, 6), (1, 1))
    body = fresh.nhwc(s.place(lambda: nets.modern_stages(widths, depths))).eval()
    run: Callable[[nn.Module], Any] = lambda part: torch.compile(part, backend=compiler(s), dynamic=False)
    parts = [run(part) if isinstance(part, nets.Modern) else part for part in body]
    pictures = fresh.nhwc(_bf16(s, s.pick(128, 2), 3, s.pick(224, 32), s.pick(224, 32)))

    @torch.no_grad()
    def step() -> None:
        x = pictures
        for part in parts:
            x = part(x)
        x.mean((2, 3))

    return Program(step)


class EightBits(nn.Module):
    """A layer whose weights and inputs are whole numbers, scaled for every row."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 127, (outer, inner), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(outer) * 1e-3)

    def forward(self, x: Tensor) -> Tensor:
        step = x.abs().amax(-1, keepdim=True).float() / 127
        rounded = (x / step).round().clamp(-127, 127).to(torch.int8)
        return (torch._int_mm(rounded, self.weight.T).float() * step * self.scale.float()).to(x.dtype)


@compiled
def healthy_whole_numbers(s: Setting, fixed: bool) -> Program:
    """Layers of whole numbers, compiled, so that rounding and scaling ride along with the products."""
    torch._dynamo.reset()
    width, rows = s.pick(4096, 32), s.pick(16384, 32)
    with torch.device(s.device):
        model = nn.Sequential(*(p for _ in range(s.pick(4, 2)) for p in (EightBits(width, width), nn.GELU()))).eval()
    run = torch.compile(model, backend=compiler(s), dynamic=False)
    x = _bf16(s, rows, width)

    @torch.no_grad()
    def step() -> None:
        run(x)

    return Program(step)


# ---------------------------------------------------------------- causes


def _said(s: Setting) -> tuple[Callable[[], None], Tensor]:
    """What says the next token of many texts, and which of them have ended."""
    width, batch, length, layers = s.pick(2048, 32), s.pick(256, 2), s.pick(1024, 16), s.pick(6, 2)
    heads, groups, vocab = s.pick(16, 4), s.pick(4, 2), s.pick(32768, 96)
    model = s.place(lambda: nn.ModuleList(nets.Cached(width, heads, groups, batch, length) for _ in range(layers)))
    table, head = s.place(lambda: nn.Embedding(vocab, width)), s.place(lambda: nn.Linear(width, vocab, bias=False))
    token, at = _ints(s, vocab, batch, 1), torch.full((1,), length // 2, device=s.device)
    ended, places = torch.zeros(batch, 1, dtype=torch.bool, device=s.device), torch.arange(length, device=s.device)

    def say() -> None:
        x, seen = table(token), (places <= at).view(1, 1, 1, length)
        for layer in model.eval():
            x = layer(x, at, seen)
        token.copy_(head(x[:, -1]).argmax(-1, keepdim=True))
        at.add_(1).remainder_(length)
        ended.logical_or_(token == vocab + 1)

    return say, ended


@case("synchronization", "ask after eight tokens whether all texts have ended", **PLAIN)
def ends_asked_for_every_token(s: Setting, fixed: bool) -> Program:
    """Tokens one after another, and after each the question whether all texts have ended."""
    say, ended = _said(s)

    @torch.inference_mode()
    def step() -> None:
        for i in range(8):
            say()
            if (not fixed or i == 7) and bool(ended.all()):
                break

    return Program(step)


@case("weights cast every step", "keep the weights in bf16 for inference", **PLAIN)
def hub_under_autocast(s: Setting, fixed: bool) -> Program:
    model = _hub(s, 12, dtype=torch.bfloat16 if fixed else torch.float32).eval()
    ids = _ints(s, s.pick(30528, 96), s.pick(64, 2), s.pick(256, 8))

    @torch.inference_mode()
    def step() -> None:
        with torch.autocast(s.device, torch.bfloat16, enabled=not fixed):
            model.bert(input_ids=ids).last_hidden_state[:, 0].float()

    return Program(step)


@case("needless recompute", "no gradient checkpointing: memory is free", **PLAIN)
def hub_checkpointed(s: Setting, fixed: bool) -> Program:
    model = _hub(s, 8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).train()
    if not fixed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = _ints(s, s.pick(30528, 96), s.pick(32, 2), s.pick(512, 8))
    return _learning(s, model, lambda: model(input_ids=ids, labels=ids).loss)


@case("NCHW convolution", "model and pictures in channels_last", **PLAIN)
def augmented_channels_first(s: Setting, fixed: bool) -> Program:
    return _augmented(s, last=fixed)


@case("index backward", "F.embedding in place of indexing the tables", **PLAIN)
def hashes_indexed(s: Setting, fixed: bool) -> Program:
    return _hashed(s, indexed=not fixed)


@case("pageable copy", "pin the columns and copy them with non_blocking=True", **PLAIN)
def columns_pageable(s: Setting, fixed: bool) -> Program:
    """Columns of a table come from memory as the reader left them."""
    width, rows = s.pick(2048, 16), s.pick(32768, 8)
    make = lambda: (p for n in (width, width, width) for p in (nn.Linear(n, width), nn.ReLU(True)))
    model = s.place(lambda: nn.Sequential(*make(), nn.Linear(width, 8)))
    host = [torch.randn(rows, width).bfloat16() for _ in range(2)]
    feed: Iterator[Tensor] = itertools.cycle([s.pinned(x) if fixed else x for x in host])
    loss = lambda: model(next(feed).to(s.device, non_blocking=fixed)).square().mean()
    return _learning(s, model, loss)


@case("unfused optimizer", "AdamW(fused=True)", **PLAIN)
def layers_updated_one_by_one(s: Setting, fixed: bool) -> Program:
    """Many small layers, each weight moved by itself."""
    model = _blocks(s, 512, 8, 16)
    x = _bf16(s, s.pick(64, 2), s.pick(256, 8), s.pick(512, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **({"fused": True} if fixed else {"foreach": False}))
    return Program(_optimized(optimizer, lambda: F.mse_loss(model(x), x)))
