"""An eleventh suite: healthy programs and causes from other trades (state spaces, experts side by side, speculative
decoding, forecasts, video, atoms, operators, processes, stencils), and what fixed programs of the tenth were told."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import eleventhnets as nets
import fresh
import ninth
import ninthnets as own
import numpy as np
import torch
import torch.nn.functional as F
from cases import Prefetch, Program, Setting, case, compiler, end_workers, graphed, precision
from cases import training as train
from ninth import HEALTHY, PLAIN, _bf16, _ints, _optimized
from tenth import TRIED, _captured, _replayed
from torch import Tensor, nn

healthy = case("none", "nothing", **HEALTHY | PLAIN)
compiled = case("none", "nothing", **HEALTHY | PLAIN | {"compiles": True, "rounds": 1})


def _learning(s: Setting, model: nn.Module, loss: Callable[[], Tensor]) -> Program:
    return Program(_optimized(fresh.adamw(s, model), loss))


def _blocks(s: Setting, width: int, heads: int, layers: int, **how: Any) -> nn.Module:
    width, heads, layers = s.pick(width, 32), s.pick(heads, 2), s.pick(layers, 2)
    make = lambda: own.Grouped(width, heads, heads, **{"causal": False} | how)
    return s.place(lambda: nn.Sequential(*(make() for _ in range(layers))))


# ---------------------------------------------------------------- text


@healthy
def healthy_state_space(s: Setting, fixed: bool) -> Program:
    """Layers of long convolutions over texts of 4,096 places."""
    width, length = s.pick(1024, 32), s.pick(4096, 16)
    model = s.place(lambda: nn.Sequential(*(nets.LongConv(width, length) for _ in range(s.pick(4, 2)))))
    x = _bf16(s, s.pick(12, 2), length, width)
    return _learning(s, model, lambda: F.mse_loss(model(x), x))


@healthy
def healthy_retention(s: Setting, fixed: bool) -> Program:
    """Attention that decays, without a softmax, in chunks of 256."""
    width, chunk, num = s.pick(1024, 32), s.pick(256, 4), s.pick(16, 4)
    make = lambda: nets.Retention(width, s.pick(16, 2), chunk, num)
    model = s.place(lambda: nn.Sequential(*(make() for _ in range(s.pick(4, 2)))))
    x = _bf16(s, s.pick(12, 2), chunk * num, width)
    return _learning(s, model, lambda: F.mse_loss(model(x), x))


@healthy
def healthy_grouped_experts(s: Setting, fixed: bool) -> Program:
    """Sixteen experts, two for every token, by grouped products."""
    width = s.pick(2048, 32)
    make = lambda: nets.SideBySide(width, s.pick(4096, 64), s.pick(16, 4))
    model = s.place(lambda: nn.Sequential(*(make() for _ in range(s.pick(3, 2)))))
    x = _bf16(s, s.pick(16384, 32), width)
    return _learning(s, model, lambda: F.mse_loss(model(x), x))


@healthy
def healthy_drafted(s: Setting, fixed: bool) -> Program:
    """Four tokens drafted by a small network and judged by a large one at once, replayed from a graph."""
    batch, room, vocab, drafts = s.pick(16, 2), s.pick(1024, 16), s.pick(32768, 96), 4
    wide, thin = s.pick(4096, 32), s.pick(1024, 16)
    cached = lambda width, heads: nets.Cached(width, s.pick(heads, 2), batch, room)
    large = s.place(lambda: nn.ModuleList(cached(wide, 32) for _ in range(s.pick(8, 2)))).eval()
    small = s.place(lambda: nn.ModuleList(cached(thin, 8) for _ in range(2))).eval()
    tables = [s.place(lambda width=width: nn.Embedding(vocab, width)) for width in (wide, thin)]
    heads = [s.place(lambda width=width: nn.Linear(width, vocab, bias=False)) for width in (wide, thin)]
    ids = _ints(s, vocab, batch, drafts + 1)
    places = torch.arange(room - drafts - 1, room, device=s.device)

    @torch.no_grad()
    def run() -> None:
        for i in range(drafts):
            x = tables[1](ids[:, i : i + 1])
            for block in small:
                x = block(x, places[i : i + 1])
            ids[:, i + 1 : i + 2].copy_(heads[1](x).argmax(-1))
        x = tables[0](ids)
        for block in large:
            x = block(x, places)
        said = heads[0](x).argmax(-1)
        right = (said[:, :-1] == ids[:, 1:]).cumprod(1).sum(1, keepdim=True)
        ids[:, :1].copy_(said.gather(1, right))

    again = graphed(run) if s.cuda else run

    def step() -> None:
        for _ in range(4):
            again()

    return Program(step)


@healthy
def healthy_rewarded(s: Setting, fixed: bool) -> Program:
    """Answers made likelier by their reward against the group's, with ratios that are clipped."""
    model, vocab = ninth._chat(s, 4), s.pick(32768, 96)
    ids = _ints(s, vocab, s.pick(12, 2), s.pick(1024, 16) + 1)
    given, said = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    reward = torch.randn(len(ids), device=s.device)
    gain = ((reward - reward.mean()) / (reward.std() + 1e-4))[:, None]
    before = torch.randn(said.shape, device=s.device) * 0.01 - 10.0

    def loss() -> Tensor:
        logits = model.logits(given)
        likely = -F.cross_entropy(logits.flatten(0, 1), said.flatten(), reduction="none").view(said.shape)
        ratio = (likely - before).exp()
        return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()

    return _learning(s, model, loss)


@healthy
def healthy_translated(s: Setting, fixed: bool) -> Program:
    """Sentences read by an encoder and written by a decoder, with smoothed labels."""
    width, heads, vocab, layers = s.pick(1024, 32), s.pick(16, 2), s.pick(32768, 96), s.pick(4, 2)
    table = s.place(lambda: nn.Embedding(vocab, width))
    reader = _blocks(s, 1024, 16, 4)
    writer = s.place(lambda: nn.ModuleList(nets.Answering(width, heads, causal=True) for _ in range(layers)))
    head = s.place(lambda: nn.Linear(width, vocab, bias=False))
    size = s.pick((64, 256), (2, 8))
    read, written, wanted = (_ints(s, vocab, *size) for _ in range(3))

    def loss() -> Tensor:
        seen, x = reader(table(read)), table(written)
        for block in writer:
            x = block(x, seen)
        return F.cross_entropy(head(x).flatten(0, 1), wanted.flatten(), label_smoothing=0.1)

    return _learning(s, nn.ModuleList([table, reader, writer, head]), loss)


@healthy
def healthy_chunked_prefill(s: Setting, fixed: bool) -> Program:
    """A long prompt in chunks, each attending to what is kept of those before it."""
    from torch.nn.attention.bias import causal_lower_right

    width, chunk, num = s.pick(3072, 32), s.pick(4096, 8), s.pick(4, 2)
    make = lambda: nets.Cached(width, s.pick(24, 2), 1, chunk * num)
    blocks = s.place(lambda: nn.ModuleList(make() for _ in range(s.pick(4, 2)))).eval()
    x0 = _bf16(s, num, 1, chunk, width)
    places = torch.arange(chunk * num, device=s.device).view(num, chunk)

    @torch.inference_mode()
    def step() -> None:
        for i in range(num):
            x, upto = x0[i], (i + 1) * chunk
            for block in blocks:
                x = block(x, places[i], causal_lower_right(chunk, upto), upto)

    return Program(step)


@healthy
def healthy_reranker(s: Setting, fixed: bool) -> Program:
    """Pairs of questions and answers scored in fp16, with what is past their end hidden."""
    model = fresh.encoder(s, 1024, 6, 16, 256, classes=8).half().eval()
    size = s.pick((192, 256), (2, 16))
    ids = _ints(s, s.pick(30000, 100), *size)
    lengths = torch.randint(size[1] * 3 // 4, size[1], (size[0],), device=s.device)
    inside = (torch.arange(size[1], device=s.device) < lengths[:, None])[:, None, None]
    scores = torch.zeros(size[0], 8, dtype=torch.float16, device=s.device)

    @torch.inference_mode()
    def step() -> None:
        scores.copy_(model.head(model.trunk(ids, inside)[:, 0]))

    return Program(step)


@healthy
def healthy_in_eight_bits(s: Setting, fixed: bool) -> Program:
    """Hidden layers in fp8 with fixed scales."""
    width, rows, eight = s.pick(4096, 32), s.pick(16384, 32), torch.float8_e4m3fn
    one, wide = torch.ones((), device=s.device), 4 * width
    draw = lambda n, k: (torch.randn(n, k, device=s.device) * k**-0.5).to(eight)
    layers = [(draw(wide, width), draw(width, wide)) for _ in range(s.pick(4, 2))]
    scale, x0 = torch.ones(width, device=s.device, dtype=torch.bfloat16), _bf16(s, rows, width)

    def product(x: Tensor, weight: Tensor) -> Tensor:
        if not s.cuda:
            return x @ weight.to(x.dtype).T
        return torch._scaled_mm(x.to(eight), weight.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    @torch.inference_mode()
    def step() -> None:
        x = x0
        for up, down in layers:
            x = x + product(F.relu(product(F.rms_norm(x, (width,), scale), up)), down)

    return Program(step)


@healthy
def healthy_snapshots(s: Setting, fixed: bool) -> Program:
    """Weights copied to pinned memory beside the next step, for whoever writes them down."""
    model, vocab = ninth._chat(s, 4), s.pick(32768, 96)
    size = s.pick((12, 1024), (2, 16))
    batch, optimizer = (_ints(s, vocab, *size), _ints(s, vocab, *size)), fresh.adamw(s, model)
    params = list(model.parameters())
    kept = [s.pinned(torch.empty(p.shape, dtype=p.dtype)) for p in params]
    side = torch.cuda.Stream() if s.cuda else None

    def step() -> None:
        model(*batch).backward()
        if side:
            torch.cuda.current_stream().wait_stream(side)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if side:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side) if side else nullcontext(), torch.no_grad():
            for into, param in zip(kept, params, strict=True):
                into.copy_(param, non_blocking=True)

    return Program(step)


@compiled
def healthy_packed_texts(s: Setting, fixed: bool) -> Program:
    """Texts of different lengths packed into rows, each attending to itself alone, by flex attention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    width, heads, length, batch = s.pick(1024, 32), s.pick(16, 2), s.pick(4096, 16), s.pick(8, 2)
    ends = torch.rand(length, device=s.device).lt(8.0 / length).cumsum(0)
    same = lambda b, h, q, k: (ends[q] == ends[k]) & (q >= k)
    blocks = s.place(lambda: nn.ModuleList(own.Grouped(width, heads, heads, causal=True) for _ in range(s.pick(4, 2))))
    if s.cuda:
        mask = create_block_mask(same, None, None, length, length, device=s.device)
        run = torch.compile(flex_attention, dynamic=False)
        for block in blocks:
            block._mixed = lambda q, k, v: run(q, k, v, block_mask=mask)
    x = _bf16(s, batch, length, width)

    def loss() -> Tensor:
        y = x
        for block in blocks:
            y = block(y)
        return F.mse_loss(y, x)

    return _learning(s, blocks, loss)


@compiled
def healthy_compiled_server(s: Setting, fixed: bool) -> Program:
    """Requests through an encoder compiled with reduce-overhead, which replays a graph by itself."""
    model = _blocks(s, 1024, 16, 4).eval()
    run = torch.compile(model, **({"mode": "reduce-overhead"} if s.cuda else {"backend": compiler(s)}), dynamic=False)
    x = _bf16(s, s.pick(48, 2), s.pick(256, 8), s.pick(1024, 32))

    @torch.inference_mode()
    def step() -> None:
        run(x)

    return Program(step)


# ---------------------------------------------------------------- pictures, sound, video


@healthy
def healthy_queries(s: Setting, fixed: bool) -> Program:
    """Objects asked for by learned queries, each learned from the truth that is nearest to its answer."""
    width, num = s.pick(256, 16), s.pick(128, 4)
    stages = fresh.nhwc(fresh.plain(s, (64, 128, width), 2)).stages
    decoder = s.place(lambda: nn.ModuleList(nets.Answering(width, s.pick(8, 2)) for _ in range(s.pick(4, 2))))
    asked = nn.Parameter(_bf16(s, num, width))
    head = s.place(lambda: nn.Linear(width, 8))
    batch, side = s.pick(48, 2), s.pick(256, 16)
    pictures, truth = fresh.nhwc(_bf16(s, batch, 3, side, side)), _bf16(s, batch, s.pick(32, 2), 8)
    model = nn.ModuleList([stages, decoder, head])
    model.register_parameter("asked", asked)

    def loss() -> Tensor:
        x = pictures
        for stage in stages:
            x = stage(x)
        seen, y = x.flatten(2).transpose(1, 2), asked.expand(batch, -1, -1)
        for block in decoder:
            y = block(y, seen)
        found = head(y)
        with torch.no_grad():
            near = torch.cdist(found.float(), truth.float()).argmin(-1)
        return F.smooth_l1_loss(found, truth.gather(1, near[..., None].expand(-1, -1, 8)))

    return _learning(s, model, loss)


def _video(s: Setting, batch: int, **how: Any) -> tuple[nn.Module, Iterator[Any]]:
    model = s.place(lambda: nets.Video(s.pick(768, 32), s.pick(12, 2), s.pick(4, 2), **how))
    clips = _bf16(s, s.pick(batch, 2), s.pick(8, 4), s.pick(196, 6), 768)
    return model, itertools.cycle([(clips, _ints(s, 400, len(clips)))])


@healthy
def healthy_space_and_time(s: Setting, fixed: bool) -> Program:
    """Video whose places attend over their frame, then over time."""
    model, batches = _video(s, 24)
    return Program(train(model, fresh.adamw(s, model), batches))


@case("needless recompute", "drop the checkpoints: most of the memory is free", **PLAIN)
def clips_checkpointed(s: Setting, fixed: bool) -> Program:
    model, batches = _video(s, 20, recompute=not fixed)
    return Program(train(model, fresh.adamw(s, model), batches))


@healthy
def healthy_heard_on_device(s: Setting, fixed: bool) -> Program:
    """Sound as it was recorded; its spectrograms are made on the device, then read in patches."""
    num, bands, width = s.pick(160_000, 4096), s.pick(128, 16), s.pick(768, 32)
    waves, window = torch.randn(s.pick(64, 2), num, device=s.device), torch.hann_window(400, device=s.device)
    filters = torch.rand(201, bands, device=s.device)
    enter, blocks = s.place(lambda: nn.Linear(4 * bands, width)), _blocks(s, 768, 12, 6)
    head = s.place(lambda: nn.Linear(width, 512))
    labels = _ints(s, 512, len(waves))

    def loss() -> Tensor:
        with torch.no_grad():
            seen = torch.stft(waves, 400, 80, window=window, return_complex=True)
            loud = (seen.transpose(1, 2).abs().square_() @ filters).clamp_min_(1e-5).log_().to(torch.bfloat16)
        patches = loud[:, : loud.shape[1] // 4 * 4].unflatten(1, (-1, 4)).flatten(2)
        return F.cross_entropy(head(blocks(enter(patches)).mean(1)), labels)

    program = _learning(s, nn.ModuleList([enter, blocks, head]), loss)
    return Program(program.step, lambda: precision("high"))


@healthy
def healthy_faces(s: Setting, fixed: bool) -> Program:
    """Faces of 65,536 people told apart by angles, with a margin for the right one."""
    width, people, batch = s.pick(512, 16), s.pick(65536, 64), s.pick(512, 4)
    stages = fresh.nhwc(fresh.plain(s, (64, 128, 256, width), 2)).stages
    centers = nn.Parameter(_bf16(s, people, width))
    pictures, labels = fresh.nhwc(_bf16(s, batch, 3, s.pick(112, 16), s.pick(112, 16))), _ints(s, people, batch)
    margin = torch.full((batch, 1), -0.4, device=s.device, dtype=torch.bfloat16)
    model = nn.ModuleList([stages])
    model.register_parameter("centers", centers)

    def loss() -> Tensor:
        x = pictures
        for stage in stages:
            x = stage(x)
        near = F.normalize(x.mean((2, 3)), dim=-1) @ F.normalize(centers, dim=-1).T
        return F.cross_entropy(near.scatter_add(1, labels[:, None], margin) * 32.0, labels)

    return _learning(s, model, loss)


@healthy
def healthy_judged_while_training(s: Setting, fixed: bool) -> Program:
    """A batch is learned, another one judged, and the counts of both stay on the device."""
    blocks, head = _blocks(s, 1024, 16, 4), s.place(lambda: nn.Linear(s.pick(1024, 32), s.pick(1000, 8)))
    size = (s.pick(96, 2), s.pick(196, 8), s.pick(1024, 32))
    (x, labels), (held, truth) = ((_bf16(s, *size), _ints(s, s.pick(1000, 8), size[0])) for _ in range(2))
    right = torch.zeros(2, device=s.device)
    optimizer = fresh.adamw(s, nn.ModuleList([blocks, head]))

    def step() -> None:
        blocks.train()
        found = head(blocks(x).mean(1))
        F.cross_entropy(found, labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        blocks.eval()
        with torch.inference_mode():
            judged = head(blocks(held).mean(1))
            right.add_(torch.stack(((found.argmax(-1) == labels).sum(), (judged.argmax(-1) == truth).sum())))

    return Program(step)


# ---------------------------------------------------------------- tables and series


@healthy
def healthy_forecast(s: Setting, fixed: bool) -> Program:
    """Series cut into patches, every variable by itself, under autocast."""
    rows, num, patch, width = s.pick(1344, 4), s.pick(64, 4), 16, s.pick(512, 32)
    blocks = _blocks(s, 512, 8, 4).float()
    enter = s.place(lambda: nn.Linear(patch, width), torch.float32)
    leave = s.place(lambda: nn.Linear(width, 8), torch.float32)
    series, wanted = torch.randn(rows, num * patch, device=s.device), torch.randn(rows, num, 8, device=s.device)

    def loss() -> Tensor:
        with torch.autocast(s.device, torch.bfloat16):
            spread, mean = torch.std_mean(series, -1, keepdim=True)
            found = leave(blocks(enter(((series - mean) / (spread + 1e-5)).unflatten(1, (num, patch)))))
        return F.mse_loss(found.float(), wanted)

    return _learning(s, nn.ModuleList([enter, blocks, leave]), loss)


@healthy
def healthy_crossed_features(s: Setting, fixed: bool) -> Program:
    """Clicks judged by crossed features of frozen tables, fed beside the work."""
    batch, tables, rows, width = s.pick(65536, 8), s.pick(31, 3), s.pick(100_000, 50), s.pick(64, 8)
    table = _bf16(s, tables * rows, width)
    starts = torch.arange(tables, device=s.device) * rows
    wide = (tables + 1) * width
    model = s.place(lambda: nets.Crossed(wide, 3))
    bottom = s.place(lambda: nn.Linear(16, width))
    ids, numbers = torch.randint(0, rows, (batch, tables)), torch.randn(batch, 16).bfloat16()
    host = tuple(s.pinned(part) for part in (ids, numbers, torch.rand(batch).round()))
    batches = iter(Prefetch(s, itertools.cycle([host])))

    def loss() -> Tensor:
        ids, numbers, clicked = next(batches)
        seen = F.embedding(ids + starts, table).flatten(1)
        return F.binary_cross_entropy_with_logits(model(torch.cat((seen, bottom(numbers)), 1)).float(), clicked)

    return _learning(s, nn.ModuleList([model, bottom]), loss)


@healthy
def healthy_tables(s: Setting, fixed: bool) -> Program:
    """Rows of a table whose columns attend to each other."""
    columns, width, batch = s.pick(32, 4), s.pick(256, 32), s.pick(16384, 4)
    blocks, head = _blocks(s, 256, 8, 3), s.place(lambda: nn.Linear(width, 8))
    scale, shift = (nn.Parameter(_bf16(s, columns, width)) for _ in range(2))
    x, labels = _bf16(s, batch, columns, 1), _ints(s, 8, batch)
    model = nn.ModuleList([blocks, head])
    model.register_parameter("scale", scale)
    model.register_parameter("shift", shift)
    return _learning(s, model, lambda: F.cross_entropy(head(blocks(torch.addcmul(shift, x, scale))[:, 0]), labels))


class Series(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Lines of text, one for every moment; windows of them parsed, filled where values are missing, and scaled."""

    def __init__(self, length: int, columns: int) -> None:
        rng = np.random.default_rng(0)
        draw = lambda: [None if rng.random() < 0.05 else round(float(v), 4) for v in rng.standard_normal(columns)]
        self.lines = [json.dumps(draw()) for _ in range(4 * length)]
        self.length = length

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        start = i * 37 % (3 * self.length)
        rows = [json.loads(line) for line in self.lines[start : start + self.length]]
        values = np.array([[0.0 if v is None else v for v in row] for row in rows], np.float32)
        values = (values - values.mean(0)) / (values.std(0) + 1e-5)
        return torch.from_numpy(values), torch.tensor(i % 8)


@case("data loader", "num_workers=1 → 10", **PLAIN | {"rounds": 1, "warmup": 10, "steps": 14, "planted_steps": 10})
def windows_cut_by_one_worker(s: Setting, fixed: bool) -> Program:
    length, columns, width, workers = s.pick(64, 8), s.pick(64, 8), s.pick(1536, 32), s.pick(10, 2) if fixed else 1
    enter, head = s.place(lambda: nn.Linear(columns, width)), s.place(lambda: nn.Linear(width, 8))
    blocks, data = _blocks(s, 1536, 24, 6), Series(length, columns)
    loader = torch.utils.data.DataLoader(
        data, s.pick(64, 4), num_workers=workers, pin_memory=s.cuda, persistent_workers=True, prefetch_factor=4
    )
    feed = iter(loader)

    def loss() -> Tensor:
        values, labels = (part.to(s.device, non_blocking=True) for part in next(feed))
        return F.cross_entropy(head(blocks(enter(values.bfloat16())).mean(1)), labels)

    program = _learning(s, nn.ModuleList([enter, blocks, head]), loss)
    return Program(program.step, close=lambda: end_workers(feed))


# ---------------------------------------------------------------- science


@healthy
def healthy_atoms(s: Setting, fixed: bool) -> Program:
    """Energies of atoms from messages of their neighbors."""
    atoms, edges, bands = s.pick(65536, 16), s.pick(1_048_576, 64), s.pick(64, 8)
    model = s.place(lambda: nets.Atoms(s.pick(128, 16), bands, s.pick(3, 2)), torch.float32)
    ends = (_ints(s, atoms, edges), _ints(s, atoms, edges))
    given = (_ints(s, 100, atoms), torch.rand(edges, bands, device=s.device), *ends)
    return Program(train(model, fresh.adamw(s, model), itertools.cycle([given])), lambda: precision("high"))


@healthy
def healthy_operator(s: Setting, fixed: bool) -> Program:
    """A flow learned by an operator that mixes waves."""
    width, side, layers = s.pick(64, 4), s.pick(256, 16), s.pick(3, 2)
    model = s.place(lambda: nn.Sequential(*(nets.Wavy(width, s.pick(24, 4)) for _ in range(layers))), torch.float32)
    x = torch.randn(s.pick(16, 2), width, side, side, device=s.device)
    program = _learning(s, model, lambda: F.mse_loss(model(x), x))
    return Program(program.step, lambda: precision("high"))


@healthy
def healthy_process(s: Setting, fixed: bool) -> Program:
    """A Gaussian process whose parameters are learned: a kernel matrix, its factor, and solves with it."""
    num, width = s.pick(8192, 32), s.pick(32, 4)
    x, y = torch.randn(num, width, device=s.device), torch.randn(num, 1, device=s.device)
    scale, noise = (nn.Parameter(torch.ones((), device=s.device)) for _ in range(2))
    eye = torch.eye(num, device=s.device)
    optimizer = torch.optim.Adam([scale, noise], lr=1e-3, fused=True)

    def loss() -> Tensor:
        apart = torch.cdist(x, x).square_()
        root, _ = torch.linalg.cholesky_ex(torch.addcmul(torch.exp(-0.05 * scale * apart), eye, noise))
        half = torch.linalg.solve_triangular(root, y, upper=False)
        return half.square().sum() + 2.0 * root.diagonal().log().sum()

    return Program(_optimized(optimizer, loss), lambda: precision("high"))


@healthy
def healthy_physics(s: Setting, fixed: bool) -> Program:
    """A network that obeys an equation of second order, by derivatives of its derivatives."""
    width = s.pick(1024, 16)
    parts = lambda: (part for i in (8, width, width) for part in (nn.Linear(i, width), nn.Tanh()))
    model = s.place(lambda: nn.Sequential(*parts(), nn.Linear(width, 1)), torch.float32)
    points = torch.rand(s.pick(65536, 16), 8, device=s.device, requires_grad=True)

    def loss() -> Tensor:
        found = model(points)
        (slope,) = torch.autograd.grad(found.sum(), points, create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, 1].sum(), points, create_graph=True)
        return F.mse_loss(slope[:, 0], 0.1 * bend[:, 1])

    program = _learning(s, model, loss)
    return Program(program.step, lambda: precision("high"))


def _diffused(u: Tensor, out: Tensor) -> None:
    inner = u[1:-1, 1:-1, 1:-1]
    around = u[2:, 1:-1, 1:-1] + u[:-2, 1:-1, 1:-1] + u[1:-1, 2:, 1:-1] + u[1:-1, :-2, 1:-1]
    around = around + u[1:-1, 1:-1, 2:] + u[1:-1, 1:-1, :-2]
    out[1:-1, 1:-1, 1:-1].copy_(inner + 0.1 * (around - 6.0 * inner))


@compiled
def healthy_heat(s: Setting, fixed: bool) -> Program:
    """Heat that spreads through a block: a stencil in one compiled kernel."""
    side = s.pick(640, 10)
    pair = [torch.rand(side, side, side, device=s.device) for _ in range(2)]
    run = torch.compile(_diffused, backend=compiler(s), dynamic=False)

    @torch.no_grad()
    def step() -> None:
        for i in range(8):
            run(pair[i % 2], pair[1 - i % 2])

    return Program(step)


# ---------------------------------------------------------------- causes


@case("round trip through the host", "advantages by a product with a triangle of discounts, on the device", **PLAIN)
def gains_computed_on_host(s: Setting, fixed: bool) -> Program:
    """Advantages of what was done in many worlds, from rewards and values, then a policy that learns from them."""
    worlds, moves, states = s.pick(512, 4), s.pick(256, 8), s.pick(64, 8)
    model = s.place(lambda: own.Policy(states, s.pick(1024, 16), 8))
    seen = _bf16(s, worlds * (moves + 1), states)
    reward, done = torch.randn(worlds, moves, device=s.device), _ints(s, 8, worlds * moves)
    apart = torch.arange(moves, device=s.device)[:, None] - torch.arange(moves, device=s.device)
    discounts = torch.where(apart >= 0, 0.94 ** apart.float(), 0.0)

    def gains(worth: Tensor) -> Tensor:
        off = reward + 0.99 * worth[:, 1:] - worth[:, :-1]
        if fixed:
            return off @ discounts
        host, found = off.cpu().numpy(), np.zeros((worlds, moves), np.float32)
        last = np.zeros(worlds, np.float32)
        for i in reversed(range(moves)):
            found[:, i] = last = host[:, i] + 0.94 * last
        return torch.from_numpy(found).to(s.device)

    def loss() -> Tensor:
        scores, worth = model(seen)
        worth = worth.float().view(worlds, moves + 1)
        gain = gains(worth.detach())
        chosen = -F.cross_entropy(scores.view(worlds, moves + 1, -1)[:, :-1].flatten(0, 1), done, reduction="none")
        return F.mse_loss(worth[:, :-1], gain + worth[:, :-1].detach()) - (chosen * gain.flatten()).mean()

    return _learning(s, model, loss)


@case("synchronization", "the longest length as a number that the loader knows", **PLAIN)
def lengths_asked_in_each_layer(s: Setting, fixed: bool) -> Program:
    width, longest = s.pick(1024, 32), s.pick(384, 8)
    model = s.place(lambda: nets.Listening(width, s.pick(16, 2), s.pick(8, 2), asks=not fixed))
    x = _bf16(s, s.pick(32, 2), longest, width)
    lengths = torch.randint(longest // 2, longest, (len(x),), device=s.device)
    lengths[0] = longest
    return _learning(s, model, lambda: model(x, lengths, longest))


@case("index backward", "F.embedding(kinds, table) in place of table[kinds]", **PLAIN)
def kinds_indexed(s: Setting, fixed: bool) -> Program:
    """Every atom begins as its kind, of which there are twelve, looked up once more in every layer."""
    atoms, width, layers = s.pick(65536, 32), s.pick(512, 16), s.pick(6, 2)
    tables = nn.ParameterList(nn.Parameter(_bf16(s, 12, width)) for _ in range(layers))
    parts = s.place(lambda: nn.ModuleList(nn.Linear(width, width) for _ in range(layers)))
    kinds, x0 = _ints(s, 12, atoms), _bf16(s, atoms, width)

    def loss() -> Tensor:
        x = x0
        for table, part in zip(tables, parts, strict=True):
            x = x + F.silu(part(x + (F.embedding(kinds, table) if fixed else table[kinds])))
        return x.square().mean()

    return _learning(s, nn.ModuleList([tables, parts]), loss)


@case("host-bound", "replay the network from a CUDA graph", **PLAIN)
def positions_judged_eagerly(s: Setting, fixed: bool) -> Program:
    """A search that asks a network about small batches of positions, again and again."""
    num, places = s.pick(64, 2), s.pick(4672, 16)
    model = fresh.nhwc(s.place(lambda: nets.Judge(s.pick(128, 8), s.pick(8, 2), places))).eval()
    boards = fresh.nhwc(_bf16(s, num, 24, 8, 8))
    moves, value = torch.zeros(num, places, device=s.device), torch.zeros(num, 1, device=s.device)

    @torch.no_grad()
    def ask() -> None:
        likely, worth = model(boards)
        moves.copy_(likely)
        value.copy_(worth)

    again = graphed(ask) if fixed and s.cuda else ask

    def step() -> None:
        for _ in range(4):
            again()

    return Program(step)


def _focal(found: Tensor, truth: Tensor) -> Tensor:
    chance = torch.sigmoid(found)
    missed = F.binary_cross_entropy_with_logits(found, truth, reduction="none")
    right = chance * truth + (1 - chance) * (1 - truth)
    weight = 0.25 * truth + 0.75 * (1 - truth)
    return (weight * missed * ((1 - right) ** 2)).sum()


@case("unfused pointwise chain", "torch.compile the loss", compiles=True, **PLAIN | {"rounds": 1})
def focal_loss_by_formula(s: Setting, fixed: bool) -> Program:
    """A dense detector, whose loss weighs every class of every box."""
    width, classes = s.pick(256, 16), s.pick(720, 8)
    stages = fresh.nhwc(fresh.plain(s, (64, 128, width), 2)).stages
    head = fresh.nhwc(s.place(lambda: nn.Conv2d(width, classes, 3, 1, 1)))
    side = s.pick(320, 16)
    pictures = fresh.nhwc(_bf16(s, s.pick(24, 2), 3, side, side))
    focal = torch.compile(_focal, backend=compiler(s), dynamic=False) if fixed else _focal
    model = nn.ModuleList([stages, head])
    places = s.pick(40, 4)
    truth = fresh.nhwc((torch.rand(len(pictures), classes, places, places, device=s.device) < 0.001).float())

    def loss() -> Tensor:
        x = pictures
        for stage in stages:
            x = stage(x)
        return focal(head(x).float(), truth)

    return Program(_optimized(fresh.sgd(s, model), loss))


@case("pageable copy", "into a pinned buffer with non_blocking=True, looked at a batch later", **PLAIN)
def masks_fetched(s: Setting, fixed: bool) -> Program:
    """Classes of every point of scans, fetched batch by batch."""
    classes, side, batch = s.pick(24, 8), s.pick(256, 32), s.pick(64, 2)
    model = fresh.nhwc(s.place(lambda: own.Outliner(s.pick(96, 8), classes))).eval()
    pictures = fresh.nhwc(_bf16(s, batch, 3, side, side))
    points = side // 2
    empty = lambda: fresh.nhwc(torch.empty(batch, classes, points, points, dtype=torch.bfloat16))
    kept = [s.pinned(empty()) for _ in range(2)]
    beside, done = torch.cuda.Stream() if s.cuda else None, [torch.cuda.Event() if s.cuda else None for _ in range(2)]
    turn, seen = itertools.cycle((0, 1)), [0.0]

    def chances() -> Tensor:
        x, skips = pictures, []
        for part in model.down:
            x = part(x)
            skips.append(x)
        x = model.deep(x)
        for part, skipped in zip(model.up, reversed(skips[:-1]), strict=True):
            x = part(F.interpolate(x, scale_factor=2.0, mode="bilinear")) + skipped
        return model.head(x)

    def fetch(found: Tensor, now: int) -> None:
        if beside is None:
            kept[now].copy_(found)
            return
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            kept[now].copy_(found, non_blocking=True)
            found.record_stream(beside)
            done[now].record()
        done[1 - now].synchronize()

    @torch.inference_mode()
    def step() -> None:
        if not fixed:
            seen[0] = float(chances().cpu()[0, 0, 0, 0])
            return
        now = next(turn)
        fetch(chances(), now)
        seen[0] = float(kept[1 - now][0, 0, 0, 0])

    return Program(step)


@case("NCHW convolution", "model and pictures in channels_last", **PLAIN)
def depths_channels_first(s: Setting, fixed: bool) -> Program:
    model = s.place(lambda: nets.Depths(s.pick(96, 8), s.pick(3, 1)))
    side, batch = s.pick(320, 32), s.pick(32, 2)
    pictures, truth = _bf16(s, batch, 3, side, side), _bf16(s, batch, 8, side // 2, side // 2)
    if fixed:
        model, pictures, truth = fresh.nhwc(model), fresh.nhwc(pictures), fresh.nhwc(truth)
    return Program(train(model, fresh.sgd(s, model), itertools.cycle([(pictures, truth)])))


@case("misaligned sizes", "a width of 320 in place of 300", **PLAIN)
def molecules_of_300(s: Setting, fixed: bool) -> Program:
    width = 320 if fixed else 300
    width = s.pick(width, width // 10)
    nodes, edges = s.pick(131072, 32), s.pick(262144, 64)
    model = s.place(lambda: nets.Isomorphic(width, s.pick(5, 2)))
    batch = (_bf16(s, nodes, width), _ints(s, nodes, edges), _ints(s, nodes, edges), _ints(s, 128, nodes))
    return Program(train(model, fresh.adamw(s, model), itertools.cycle([batch])))


@case("small batch", "all frames in one batch", **PLAIN | {"rounds": 1, "steps": 6, "warmup": 2})
def frames_few_by_few(s: Setting, fixed: bool) -> Program:
    """Gradients of a few frames at a time, added up."""
    frames, blocks = s.pick(64, 16), _blocks(s, 768, 12, 4)
    head = s.place(lambda: nn.Linear(s.pick(768, 32), 64))
    x, labels = _bf16(s, frames, s.pick(196, 8), s.pick(768, 32)), _ints(s, 64, frames)
    optimizer = fresh.adamw(s, nn.ModuleList([blocks, head]))

    def step() -> None:
        size = frames if fixed else frames // 16
        for i in range(0, frames, size):
            loss = F.cross_entropy(head(blocks(x[i : i + size]).mean(1)), labels[i : i + size])
            (loss * size / frames).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("weights cast every step", "the denoiser in bf16 in place of autocast", **PLAIN)
def denoised_under_autocast(s: Setting, fixed: bool) -> Program:
    """Eight steps of a denoiser, each of which enters autocast anew."""
    width, dtype = s.pick(2048, 32), torch.bfloat16 if fixed else torch.float32
    model = _blocks(s, 2048, 16, 4).to(dtype).eval()
    noise = torch.randn(s.pick(4, 2), s.pick(768, 8), width, device=s.device, dtype=dtype)

    @torch.no_grad()
    def denoise(x: Tensor) -> Tensor:
        with torch.autocast(s.device, torch.bfloat16, enabled=not fixed):
            return model(x)

    def step() -> None:
        x = noise
        for _ in range(8):
            x = torch.lerp(x, denoise(x).to(x.dtype), 0.1)

    return Program(step)


@case("host-bound", "torch._foreach_… over all weights", **PLAIN)
def sharpness_tensor_by_tensor(s: Setting, fixed: bool) -> Program:
    """Weights moved uphill before the gradient that counts is taken, and back after it."""
    blocks = _blocks(s, 768, 12, 10)
    x = _bf16(s, s.pick(64, 2), s.pick(196, 8), s.pick(768, 32))
    params, optimizer = list(blocks.parameters()), fresh.adamw(s, blocks)
    loss = lambda: F.mse_loss(blocks(x), x)

    @torch.no_grad()
    def uphill(grads: list[Tensor]) -> list[Tensor]:
        if fixed:
            size = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
            torch._foreach_mul_(grads, 0.05 / (size + 1e-6))
            torch._foreach_add_(params, grads)
            return grads
        size = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in grads]))
        moved = [grad * (0.05 / (size + 1e-6)) for grad in grads]
        for param, move in zip(params, moved, strict=True):
            param.add_(move)
        return moved

    @torch.no_grad()
    def back(moved: list[Tensor]) -> None:
        if fixed:
            torch._foreach_sub_(params, moved)
            return
        for param, move in zip(params, moved, strict=True):
            param.sub_(move)

    def step() -> None:
        loss().backward()
        moved = uphill([param.grad for param in params])
        optimizer.zero_grad(set_to_none=True)
        loss().backward()
        back(moved)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("unfused attention", "F.scaled_dot_product_attention with the bias as its mask", **PLAIN)
def bias_added_by_hand(s: Setting, fixed: bool) -> Program:
    width, heads, length = s.pick(1024, 32), s.pick(16, 2), s.pick(512, 16)
    make = lambda: nets.Biased(width, heads, length, by_hand=not fixed)
    model = s.place(lambda: nn.Sequential(*(make() for _ in range(s.pick(4, 2)))))
    x = _bf16(s, s.pick(24, 2), length, width)
    return _learning(s, model, lambda: F.mse_loss(model(x), x))


# ---------------------------------------------------------------- what fixed programs of the tenth were told, done


@case("host-bound", "capture the step in a CUDA graph", **TRIED)
def again_answers_picked(s: Setting, fixed: bool) -> Program:
    model, vocab, size = ninth._chat(s, 6), s.pick(32768, 96), s.pick((4, 256), (2, 16))
    ids, said = _ints(s, vocab, *size), _ints(s, vocab, *size)
    places = (torch.rand(size, device=s.device) < 0.3).flatten().nonzero()[:, 0]
    wanted = said.flatten()[places]

    def loss() -> Tensor:
        x = model.tokens(ids)
        for block in model.blocks:
            x = block(x)
        return F.cross_entropy(model.head(model.norm(x).flatten(0, 1).index_select(0, places)), wanted)

    return _captured(s, fixed, model, loss)


@case("host-bound", "capture the step in a CUDA graph", **TRIED)
def again_beams_collected(s: Setting, fixed: bool) -> Program:
    model, size = ninth._chat(s, 6), s.pick((4, 512), (2, 16))
    batch = (_ints(s, s.pick(32768, 96), *size), _ints(s, s.pick(32768, 96), *size))
    return _captured(s, fixed, model, lambda: model(*batch))


@case("host-bound", "replay the embedding from a CUDA graph", **TRIED)
def again_retrieved_under_autocast(s: Setting, fixed: bool) -> Program:
    return _replayed("retrieved_under_autocast", s, fixed)


@case("host-bound", "capture the step in a CUDA graph", **TRIED)
def again_views_zeroed(s: Setting, fixed: bool) -> Program:
    width = s.pick(2048, 32)
    make = lambda: nn.Sequential(*(own.Grouped(width, s.pick(16, 2), s.pick(16, 2), causal=False) for _ in range(6)))
    model, x = s.place(make), _bf16(s, s.pick(4, 2), s.pick(256, 8), width)
    return _captured(s, fixed, model, lambda: model(x).square().mean())
