"""A tenth suite: what was found in the ninth's fixed and healthy programs, done; and further healthy programs and
causes, recorded in both ways."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import fresh
import ninth
import ninthnets as own
import torch
import torch.nn.functional as F
from again import _capturable
from cases import CASES, Program, Setting, case, compiler, end_workers, graphed, precision
from cases import training as train
from ninth import HEALTHY, PLAIN, _bf16, _ints, _optimized
from torch import Tensor, nn

healthy = case("none", "nothing", **HEALTHY | PLAIN)
TRIED: dict[str, Any] = {"stack": False}

# ---------------------------------------------------------------- what is found in fixed programs, done


def _replayed(name: str, s: Setting, fixed: bool) -> Program:
    """A program without a backward pass, as it is or from a CUDA graph."""
    program = CASES[name].build(s, True)
    if not fixed or not s.cuda:
        return program
    with program.scope():
        return Program(graphed(program.step), program.scope)


def _captured(
    s: Setting, fixed: bool, model: nn.Module, loss: Callable[[], Tensor], before: Callable[[], object] = lambda: None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Program:  # fmt: skip
    """A training step, eager or in a CUDA graph, with the same optimizer; ``before`` stays outside of the graph."""
    optimizer = _capturable(model) if optimizer is None else optimizer

    def run() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    again = graphed(run) if fixed and s.cuda else run

    def step() -> None:
        before()
        again()

    return Program(step)


@case("host-bound", "replay the moves from a CUDA graph", **TRIED)
def again_worlds_asked_if_over(s: Setting, fixed: bool) -> Program:
    return _replayed("worlds_asked_if_over", s, fixed)


@case("host-bound", "replay the whole round from a CUDA graph", **TRIED)
def again_centers_moved_on_host(s: Setting, fixed: bool) -> Program:
    return _replayed("centers_moved_on_host", s, fixed)


@case("host-bound", "capture the step behind the copy in a CUDA graph", **TRIED)
def again_fields_copied_one_by_one(s: Setting, fixed: bool) -> Program:
    rows, fields, width = s.pick(8192, 8), s.pick(120, 4), s.pick(2048, 32)
    make = lambda: [nn.Linear(8 * fields, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 16)]
    model = s.place(lambda: nn.Sequential(*make()))
    packed, labels = s.pinned(torch.randn(rows, 8 * fields).bfloat16()), _ints(s, 16, rows)
    x = packed.to(s.device)
    loss = lambda: F.cross_entropy(model(x), labels)
    return _captured(s, fixed, model, loss, lambda: x.copy_(packed, non_blocking=True))


@case("host-bound", "capture both batches and the optimizer in a CUDA graph", **TRIED)
def again_texts_accumulated_one_by_one(s: Setting, fixed: bool) -> Program:
    model, vocab, size = ninth._chat(s, 4), s.pick(32768, 96), (8, s.pick(256, 16))
    parts = [(_ints(s, vocab, *size), _ints(s, vocab, *size)) for _ in range(2)]
    loss = lambda: sum((model(*part) / 2 for part in parts), torch.zeros((), device=s.device))
    return _captured(s, fixed, model, loss)


@case("host-bound", "capture the step in a CUDA graph", **TRIED)
def again_pyramid_channels_first(s: Setting, fixed: bool) -> Program:
    model, pictures = ninth._pyramid(s, 24, last=True)
    loss = lambda: sum((level.square().mean() for level in model(pictures)), torch.zeros((), device=s.device))
    return _captured(s, fixed, model, loss, optimizer=fresh.sgd(s, model))


@case("host-bound", "capture the step in a CUDA graph", **TRIED)
def again_patches_in_fp32(s: Setting, fixed: bool) -> Program:
    model, loss = ninth._patches(s, 48, torch.float32)
    with precision("high"):
        program = _captured(s, fixed, model, loss)
    return Program(program.step, lambda: precision("high"))


@case("host-bound", "capture the step in a CUDA graph", **TRIED)
def again_nadam_tensor_by_tensor(s: Setting, fixed: bool) -> Program:
    model, loss = ninth._patches(s, 64)
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-4, foreach=True, capturable=s.cuda and fixed)
    return _captured(s, fixed, model, loss, optimizer=optimizer)


@case("host-bound", "capture the step behind the loader in a CUDA graph", **TRIED | {"rounds": 1, "warmup": 10})
def again_visits_parsed_in_the_loop(s: Setting, fixed: bool) -> Program:
    items, length, batch, drawn = s.pick(100_000, 200), s.pick(200, 8), s.pick(96, 4), s.pick(2048, 16)
    model = s.place(lambda: own.Sessions(items, s.pick(512, 32), s.pick(6, 2), s.pick(8, 2), length))
    truth, seen = _ints(s, drawn, batch * length), torch.zeros(batch, length, dtype=torch.long, device=s.device)
    loss = lambda: F.cross_entropy(model(seen, _ints(s, items, drawn)), truth)
    learn = _captured(s, fixed, model, loss).step  # before a thread that pins memory is there: it would end the capture
    loader = torch.utils.data.DataLoader(
        ninth.Logged(items, length), batch, num_workers=s.pick(8, 2), pin_memory=s.cuda, persistent_workers=True
    )
    feed = iter(loader)

    def step() -> None:
        seen.copy_(next(feed)[0], non_blocking=True)
        learn()

    return Program(step, close=lambda: end_workers(feed))


def _in_channels_last(s: Setting, fixed: bool, batch: int) -> Program:
    model, loss = ninth._spoken(s, batch)
    if fixed:
        model.enter.to(memory_format=torch.channels_last)
    return Program(_optimized(fresh.adamw(s, model), loss))


@case("NCHW convolution", "the weights of the two convolutions in channels_last as well", **TRIED)
def again_healthy_spoken(s: Setting, fixed: bool) -> Program:
    return _in_channels_last(s, fixed, s.pick(48, 2))


@case("NCHW convolution", "the weights of the two convolutions in channels_last as well", **TRIED)
def again_spoken_in_segments(s: Setting, fixed: bool) -> Program:
    return _in_channels_last(s, fixed, s.pick(40, 2))


@case("synchronization", "letters as int32 on the host: cuDNN's CTC, which copies nothing back", **TRIED)
def again_letters_on_host(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return CASES["healthy_spoken"].build(s, True)
    model, _ = ninth._spoken(s, s.pick(48, 2))
    bands, frames, letters, batch = s.pick(80, 16), s.pick(1600, 64), s.pick(64, 8), s.pick(48, 2)
    sound = _bf16(s, batch, frames, bands)
    said = torch.randint(1, letters, (batch * s.pick(120, 4),), dtype=torch.int32)
    places, num = (frames // 4,) * batch, (s.pick(120, 4),) * batch

    def loss() -> Tensor:
        return F.ctc_loss(model(sound).float().log_softmax(-1).transpose(0, 1), said, places, num)

    return Program(_optimized(fresh.adamw(s, model), loss))


def _overlap(low: Tensor, high: Tensor) -> Tensor:
    shared = torch.minimum(high[:, :, None], high[:, None]) - torch.maximum(low[:, :, None], low[:, None])
    return shared.clamp_min(0.0).prod(-1).triu(1).amax(1)


@case("unfused pointwise chain", "torch.compile the overlaps of boxes", compiles=True, **TRIED | {"rounds": 1})
def again_healthy_boxes(s: Setting, fixed: bool) -> Program:
    model, pictures = ninth._pyramid(s, 64, last=True)
    model.eval()
    num = s.pick(512, 8)
    overlap = torch.compile(_overlap, backend=compiler(s), dynamic=False) if fixed else _overlap

    @torch.inference_mode()
    def step() -> None:
        flat = torch.cat([level.flatten(2).transpose(1, 2) for level in model(pictures)], 1).float()
        best, which = flat[..., 4:].amax(-1).topk(num, 1)
        boxes = flat[..., :4].gather(1, which[..., None].expand(-1, -1, 4))
        low, high = boxes[..., :2] - boxes[..., 2:].exp(), boxes[..., :2] + boxes[..., 2:].exp()
        (best - overlap(low, high)).topk(num // 4, 1)

    return Program(step)


# ---------------------------------------------------------------- nothing to find


@healthy
def healthy_results_a_step_later(s: Setting, fixed: bool) -> Program:
    """A server whose answers are copied to pinned memory while the next batch is computed, and read then."""
    model = fresh.encoder(s, 1024, 6, 16, 256).eval()
    size = (s.pick(64, 2), s.pick(256, 16))
    ids = [_ints(s, s.pick(30000, 100), *size) for _ in range(2)]
    out = [s.pinned(torch.empty(size[0], s.pick(1024, 32), dtype=torch.bfloat16)) for _ in range(2)]
    done = [torch.cuda.Event() if s.cuda else None for _ in range(2)]
    turn, said = itertools.cycle((0, 1)), [0.0]

    @torch.inference_mode()
    def step() -> None:
        now = next(turn)
        out[now].copy_(model.trunk(ids[now]).mean(1), non_blocking=True)
        if done[now] is not None:
            done[now].record()
            done[1 - now].synchronize()
        said[0] = float(out[1 - now][0, 0])

    return Program(step)


@healthy
def healthy_taught(s: Setting, fixed: bool) -> Program:
    """A large frozen network teaches a small one by the distribution of its answers."""
    teacher = fresh.nhwc(fresh.plain(s, (128, 256, 512), 3)).eval().requires_grad_(False)
    pupil = fresh.nhwc(fresh.plain(s, (64, 128, 256), 2))
    pictures, _ = fresh.images(s, 128, 128)
    pictures = fresh.nhwc(pictures)

    def answers(model: Any) -> Tensor:
        x = pictures
        for stage in model.stages:
            x = stage(x)
        return model.head(x.mean((2, 3)))

    def loss() -> Tensor:
        with torch.no_grad():
            wanted = answers(teacher).log_softmax(-1)
        return F.kl_div(answers(pupil).log_softmax(-1), wanted, reduction="batchmean", log_target=True)

    return Program(_optimized(fresh.sgd(s, pupil), loss))


@healthy
def healthy_two_views(s: Setting, fixed: bool) -> Program:
    """Two views of the same pictures, and a slow copy of the network that says what the other should see."""
    make = lambda: nn.Sequential(
        nn.Linear(s.pick(768, 16), s.pick(1024, 32)),
        *(own.Grouped(s.pick(1024, 32), s.pick(16, 2), s.pick(16, 2), causal=False) for _ in range(s.pick(6, 2))),
    )
    quick, slow = s.place(make), s.place(make).requires_grad_(False)
    head = s.place(lambda: nn.Linear(s.pick(1024, 32), s.pick(4096, 16)))
    views = [_bf16(s, s.pick(96, 2), s.pick(196, 8), s.pick(768, 16)) for _ in range(2)]
    fast, behind = list(quick.parameters()), list(slow.parameters())

    def loss() -> Tensor:
        with torch.no_grad():
            wanted = head(slow(views[0]).mean(1)).softmax(-1)
        return F.cross_entropy(head(quick(views[1]).mean(1)), wanted)

    learn = _optimized(fresh.adamw(s, nn.ModuleList([quick, head])), loss)

    def step() -> None:
        learn()
        with torch.no_grad():
            torch._foreach_lerp_(behind, fast, 0.004)

    return Program(step)


@healthy
def healthy_conjugate_gradients(s: Setting, fixed: bool) -> Program:
    """A large dense system solved by products with a vector, every scalar on the device, replayed from a graph."""
    size = s.pick(24576, 32)
    matrix = torch.eye(size, device=s.device) + 1e-6 * torch.rand(size, size, device=s.device)
    x, r = torch.zeros(size, 1, device=s.device), torch.randn(size, 1, device=s.device)
    p, old = r.clone(), (r * r).sum()

    @torch.no_grad()
    def run() -> None:
        for _ in range(4):
            product = matrix @ p
            along = old / (p * product).sum()
            x.addcmul_(p, along)
            r.addcmul_(product, along, value=-1.0)
            new = (r * r).sum()
            torch.addcmul(r, p, new / old, out=p)
            old.copy_(new)

    return Program(graphed(run) if s.cuda else run)


@healthy
def healthy_motion(s: Setting, fixed: bool) -> Program:
    """Clips through convolutions over space and then over time, in channels_last_3d."""
    width = s.pick(96, 8)
    make = lambda i: nn.Sequential(
        nn.Conv3d(8 if i == 0 else width, width, (1, 3, 3), 1, (0, 1, 1)), nn.ReLU(True),
        nn.Conv3d(width, width, (3, 1, 1), 1, (1, 0, 0)), nn.ReLU(True),
    )  # fmt: skip
    model = s.place(lambda: nn.Sequential(*(make(i) for i in range(s.pick(4, 1)))))
    model = model.to(memory_format=torch.channels_last_3d)
    side = s.pick(56, 8)
    clips = _bf16(s, s.pick(16, 2), 8, s.pick(16, 4), side, side).to(memory_format=torch.channels_last_3d)
    head = s.place(lambda: nn.Linear(width, 64))
    labels = _ints(s, 64, len(clips))
    loss = lambda: F.cross_entropy(head(model(clips).mean((2, 3, 4))), labels)
    return Program(_optimized(fresh.sgd(s, nn.ModuleList([model, head])), loss))


@healthy
def healthy_ensemble(s: Setting, fixed: bool) -> Program:
    """Thirty-two networks learned at once, their weights stacked for batched products."""
    num, rows, width = s.pick(32, 2), s.pick(2048, 8), s.pick(1024, 16)
    weights = [nn.Parameter(_bf16(s, num, width, width) * width**-0.5) for _ in range(4)]
    biases = [nn.Parameter(torch.zeros(num, 1, width, device=s.device, dtype=torch.bfloat16)) for _ in range(4)]
    x, wanted = _bf16(s, num, rows, width), _bf16(s, num, rows, width)
    optimizer = torch.optim.AdamW([*weights, *biases], lr=1e-4, fused=True)

    def loss() -> Tensor:
        y = x
        for weight, bias in zip(weights, biases, strict=True):
            y = F.relu(torch.baddbmm(bias, y, weight))
        return F.mse_loss(y, wanted)

    return Program(_optimized(optimizer, loss))


@healthy
def healthy_retrieval(s: Setting, fixed: bool) -> Program:
    """Texts and pictures by the thousand in one batch, told apart by all pairs of them."""
    text = fresh.encoder(s, 768, 4, 12, 64)
    picture = s.place(lambda: nn.Sequential(*(own.Grouped(s.pick(768, 32), s.pick(12, 2), s.pick(12, 2), causal=False)
                                              for _ in range(s.pick(4, 2)))))  # fmt: skip
    ids, patches = (
        _ints(s, s.pick(30000, 100), s.pick(1024, 2), s.pick(64, 16)),
        _bf16(s, s.pick(1024, 2), s.pick(49, 4), s.pick(768, 32)),
    )
    truth = torch.arange(len(ids), device=s.device)
    optimizer = fresh.adamw(s, nn.ModuleList([text, picture]))

    def loss() -> Tensor:
        a, b = F.normalize(text.trunk(ids).mean(1), dim=-1), F.normalize(picture(patches).mean(1), dim=-1)
        pairs = a @ b.T * 20.0
        return F.cross_entropy(pairs, truth) + F.cross_entropy(pairs.T, truth)

    return Program(_optimized(optimizer, loss))


# ---------------------------------------------------------------- causes


@case("gradient memsets", "zero_grad(set_to_none=True), the default", **PLAIN)
def views_zeroed(s: Setting, fixed: bool) -> Program:
    width = s.pick(2048, 32)
    make = lambda: nn.Sequential(*(own.Grouped(width, s.pick(16, 2), s.pick(16, 2), causal=False) for _ in range(6)))
    model, x = s.place(make), _bf16(s, s.pick(4, 2), s.pick(256, 8), width)
    optimizer = fresh.adamw(s, model)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=fixed)

    return Program(step)


@case("weights cast every step", "model.bfloat16() in place of autocast", **PLAIN)
def retrieved_under_autocast(s: Setting, fixed: bool) -> Program:
    width, dtype = s.pick(1536, 32), torch.bfloat16 if fixed else torch.float32
    make = lambda: nn.Sequential(*(own.Grouped(width, s.pick(12, 2), s.pick(12, 2), causal=False) for _ in range(6)))
    model = s.place(make, dtype).eval()
    x = torch.randn(s.pick(16, 2), s.pick(128, 8), width, device=s.device, dtype=dtype)

    @torch.inference_mode()
    def step() -> None:
        with torch.autocast(s.device, torch.bfloat16, enabled=not fixed):
            model(x).mean(1)

    return Program(step)


@case("unfused pointwise chain", "F.layer_norm in place of its formula", **PLAIN)
def norms_by_formula(s: Setting, fixed: bool) -> Program:
    width, layers = s.pick(2048, 32), s.pick(8, 2)
    parts = s.place(lambda: nn.ModuleList(nn.Linear(width, width) for _ in range(layers)))
    scale = nn.Parameter(torch.ones(layers, width, device=s.device, dtype=torch.bfloat16))
    x, optimizer = _bf16(s, s.pick(32768, 8), width), fresh.adamw(s, parts)

    def norm(y: Tensor, weight: Tensor) -> Tensor:
        if fixed:
            return F.layer_norm(y, (width,), weight)
        centered = y - y.mean(-1, keepdim=True)
        return centered / torch.sqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-5) * weight

    def loss() -> Tensor:
        y = x
        for part, weight in zip(parts, scale, strict=True):
            y = F.relu(part(norm(y, weight)))
        return y.square().mean()

    return Program(_optimized(optimizer, loss))


@case("synchronization", "index_select by places that are known beforehand, in place of a mask", **PLAIN)
def answers_picked(s: Setting, fixed: bool) -> Program:
    """The loss of the answer's tokens alone, and every layer told how many there are."""
    model, vocab, size = ninth._chat(s, 6), s.pick(32768, 96), s.pick((4, 256), (2, 16))
    ids, said = _ints(s, vocab, *size), _ints(s, vocab, *size)
    answer = torch.rand(size, device=s.device) < 0.3
    places = answer.flatten().nonzero()[:, 0]
    wanted = said.flatten()[places]

    def loss() -> Tensor:
        x = model.tokens(ids)
        for block in model.blocks:
            x = block(x)
            if not fixed and not x[answer].shape[0]:
                raise ValueError("no answer in the batch")
        x = model.norm(x)
        if not fixed:
            return F.cross_entropy(model.head(x[answer]), said[answer])
        return F.cross_entropy(model.head(x.flatten(0, 1).index_select(0, places)), wanted)

    return Program(_optimized(fresh.adamw(s, model), loss))


@case("garbage collection", "collect every few hundred steps", **PLAIN | {"rounds": 1})
def beams_collected(s: Setting, fixed: bool) -> Program:
    model, size = ninth._chat(s, 6), s.pick((4, 512), (2, 16))
    batch = (_ints(s, s.pick(32768, 96), *size), _ints(s, s.pick(32768, 96), *size))
    learn = train(model, fresh.adamw(s, model), itertools.cycle([batch]))
    kept = [[float(i), [i]] for i in range(s.pick(60_000, 100))]

    def step(held: Any = kept) -> None:
        learn()
        if not fixed:
            gc.collect()

    return Program(step)
