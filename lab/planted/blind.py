"""Programs with one injected cause each, on the stand-in GPU: is the cause named, or its bar with the remedy?

    python -m lab.planted blind [NAME …] [--keep FOLDER]

Each program was written, with its cause, the bars in which its time must show and the words that its remedy must have,
before anything was explained. A cause counts as found if one of the first two findings names it or advises its remedy,
or if one of the two largest bars above the floor is its own and shows the remedy. The gain is what the fixed program
gains on the stand-in, which keeps its own clock: it tells whether the accounting is consistent, not what a GPU gains.
"""

from __future__ import annotations

import argparse
import itertools
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lab.planted.meta_networks import BF16, Block, FusedAdamW, Language, Step, ids, next_token, numbers, placed, trainer
from lab.planted.score import NAMES
from lab.planted.stand_in import StandIn
from ridgeline.findings.explanation import explained, summary_of
from ridgeline.trace import read


@dataclass(frozen=True, slots=True)
class Injected:
    """A program with a cause, and what an explanation must say of it."""

    build: Callable[[StandIn, bool], Step]
    cause: str  # as in ``lab.planted.score.NAMES``, or a new one
    bars: str  # pattern of the keys of bars that hold its time
    remedy: str  # pattern that its advice must have


CASES: dict[str, Injected] = {}


def injected(cause: str, bars: str, remedy: str, **more: bool) -> Callable[[Callable[[StandIn, bool], Step]], object]:
    def register(build: Callable[[StandIn, bool], Step]) -> object:
        CASES[build.__name__] = Injected(build, cause, bars, remedy, **more)
        return build

    return register


# ---------------------------------------------------------------- the programs


@injected(
    "a pass that is not needed", r"avoidable|kernels:gemm|floor", r"forward pass|work that the model does not need"
)
def accuracy_by_a_second_forward(gpu: StandIn, fixed: bool) -> Step:
    """Accuracy on the training batch: the network is run again for it, though the logits were just made."""
    model, tokens, target = placed(Language()), ids(4, 1024), ids(4 * 1024)
    optimizer, hits = FusedAdamW(list(model.parameters())), numbers(dtype=torch.long)

    def step() -> None:
        optimizer.zero_grad()
        logits = model(tokens).flatten(0, 1)
        F.cross_entropy(logits, target).backward()
        optimizer.step()
        with torch.no_grad():
            again = logits if fixed else model(tokens).flatten(0, 1)
            hits.add_((again.argmax(-1) == target).sum())

    return step


@injected("synchronization", r"idle:synchronize", r"later|less often|once|every N")
def end_of_text_asked_after_every_token(gpu: StandIn, fixed: bool) -> Step:
    model, tokens = placed(Language(2048, 12)).requires_grad_(False), ids(64, 1)

    def step() -> None:
        done = numbers(64, dtype=torch.bool)
        for i in range(8):
            done.logical_or_(model(tokens)[:, -1].argmax(-1) == 2)
            if not fixed or i == 7:
                done.all().item()

    return step


@injected(
    "unfused optimizer", r"kernels:|idle:(op|between_ops|launch_call)|avoidable:passes", r"foreach|fused|compile|graph"
)
def lion_for_each_weight(gpu: StandIn, fixed: bool) -> Step:
    """Lion as its paper writes it, weight by weight."""
    model = placed(Language(1024, 16, 16))
    loss, moments = next_token(model, 8, 512), [torch.empty_like(p) for p in model.parameters()]
    parameters = list(model.parameters())

    def step() -> None:
        for p in parameters:
            p.grad = None
        loss().backward()
        with torch.no_grad():
            grads = [p.grad for p in parameters]
            if fixed:
                torch._foreach_mul_(moments, 0.9)
                torch._foreach_add_(moments, grads, alpha=0.1)
                torch._foreach_add_(parameters, moments, alpha=-1e-4)
                return
            for p, g, m in zip(parameters, grads, moments, strict=True):
                update = m * 0.9 + g * 0.1
                p.mul_(1.0 - 1e-4 * 0.1)
                p.add_(torch.sign(update), alpha=-1e-4)
                m.mul_(0.99).add_(g, alpha=0.01)

    return step


@injected("host-bound", r"idle:(op|between_ops|launch_call)|kernels:", r"foreach|compile|graph|batch")
def teacher_averaged_weight_by_weight(gpu: StandIn, fixed: bool) -> Step:
    """A mean teacher: after each step its weights move toward the student's, one after another."""
    student, teacher = placed(Language(768, 24, 12, 8192)), placed(Language(768, 24, 12, 8192)).requires_grad_(False)
    mine, theirs = list(student.parameters()), list(teacher.parameters())

    def average(_: Tensor) -> None:
        with torch.no_grad():
            if fixed:
                torch._foreach_lerp_(theirs, mine, 0.001)
            else:
                for slow, fast in zip(theirs, mine, strict=True):
                    slow.mul_(0.999).add_(fast.detach(), alpha=0.001)

    return trainer(student, next_token(student, 2, 256, 8192), average)


@injected("host code", r"idle:(host_code|python|between_ops)", r"out of the step|vectoriz|worker|beside|code")
def a_tokenizer_inside_the_step(gpu: StandIn, fixed: bool) -> Step:
    model = placed(Language(1024, 8, 16))
    loss = next_token(model, 8, 1024)

    def tokenized() -> Tensor:
        if not fixed:
            gpu.work(14.0)
        return loss()

    return trainer(model, tokenized)


@injected("fp32 matmul", r"kernels:gemm", r"bf16|TF32|Tensor Core|precision")
def a_ranker_left_in_fp32(gpu: StandIn, fixed: bool) -> Step:
    dtype = BF16 if fixed else torch.float32
    sizes = (2048, 4096, 4096, 2048, 1)
    model = placed(nn.Sequential(*(m for a, b in itertools.pairwise(sizes)
                                   for m in (nn.Linear(a, b), nn.ReLU()))), dtype)  # fmt: skip
    x, y = numbers(8192, 2048, dtype=dtype), numbers(8192, 1, dtype=dtype)
    return trainer(model, lambda: (model(x) - y).square().mean())


@injected("synchronous logging", r"idle:synchronize", r"every N|less often|later|once")
def norms_of_all_layers_to_a_dashboard(gpu: StandIn, fixed: bool) -> Step:
    model = placed(Language(1024, 12, 16))

    def log(loss: Tensor) -> None:
        if not fixed:
            {"loss": loss.item()} | {name: p.grad.norm().item() for name, p in model.named_parameters()}

    return trainer(model, next_token(model, 4, 512), log)


@injected("NCHW convolution", r"avoidable:layout|kernels:layout", r"channels_last|memory format")
def a_unet_in_planes(gpu: StandIn, fixed: bool) -> Step:
    layers = [nn.Conv2d(64, 128, 3, padding=1), nn.SiLU(), *(m for _ in range(6) for m in (
        nn.Conv2d(128, 128, 3, padding=1), nn.SiLU())), nn.Conv2d(128, 64, 3, padding=1)]  # fmt: skip
    layout = torch.channels_last if fixed else torch.contiguous_format
    model = placed(nn.Sequential(*layers)).to(memory_format=layout)
    x = numbers(16, 64, 128, 128).to(memory_format=layout)
    return trainer(model, lambda: (model(x) - x).square().mean())


@injected(
    "cache grown by concatenation",
    r"kernels:copy|avoidable|unpriced:copy|floor",
    r"alloc|in place|index_copy|once|static",
)
def a_cache_joined_at_every_token(gpu: StandIn, fixed: bool) -> Step:
    """Keys and values of a long context: every token makes all of them anew by torch.cat."""
    width, layers, length = 2048, 8, 16384
    blocks = [placed(nn.Linear(width, 3 * width, bias=False)).requires_grad_(False) for _ in range(layers)]
    caches = [numbers(2, 8, 16, length + 8, 128) for _ in range(layers)]

    def step() -> None:
        for i in range(4):
            x = numbers(8, 1, width)
            for block, cache in zip(blocks, caches, strict=True):
                q, k, v = block(x).view(8, 1, 3, 16, 128).permute(2, 0, 3, 1, 4)
                if fixed:
                    cache[0, :, :, length + i : length + i + 1] = k
                    cache[1, :, :, length + i : length + i + 1] = v
                    keys, values = cache[0, :, :, : length + i + 1], cache[1, :, :, : length + i + 1]
                else:
                    keys = torch.cat((cache[0, :, :, : length + i], k), 2)
                    values = torch.cat((cache[1, :, :, : length + i], v), 2)
                x = F.scaled_dot_product_attention(q, keys, values).transpose(1, 2).reshape(8, 1, width)

    return step


@injected("small collectives", r"comm:", r"bucket|larger|fewer|flat")
def gradients_reduced_one_by_one(gpu: StandIn, fixed: bool) -> Step:
    model = placed(Language(512, 16, 8, 8192))
    parameters = list(model.parameters())
    flat = numbers(sum(p.numel() for p in parameters))
    optimizer, loss = FusedAdamW(parameters), next_token(model, 32, 512, 8192)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        for tensor in [flat] if fixed else [p.grad for p in parameters]:
            gpu.collective("AllReduce", tensor)
        optimizer.step()

    return step


@injected("exposed communication", r"comm:", r"[Oo]verlap")
def reduced_after_backward(gpu: StandIn, fixed: bool) -> Step:
    """All gradients are reduced once the backward pass is done, in large pieces."""
    model = placed(Language(2048, 8, 16))
    optimizer, loss = FusedAdamW(list(model.parameters())), next_token(model, 8, 1024)
    pieces = [numbers(32_000_000) for _ in range(16)]

    def step() -> None:
        optimizer.zero_grad()
        if fixed:
            for piece in pieces:
                gpu.collective("AllReduce", piece, overlap=True)
        loss().backward()
        if not fixed:
            for piece in pieces:
                gpu.collective("AllReduce", piece)
        optimizer.step()

    return step


@injected("needless recompute", r"avoidable:recompute", r"[Cc]heckpoint")
def every_block_checkpointed(gpu: StandIn, fixed: bool) -> Step:
    model = placed(Language(2048, 8, 16))
    tokens, target = ids(4, 1024), ids(4 * 1024)

    def loss() -> Tensor:
        x = model.embed(tokens)
        for block in model.blocks:
            x = block(x) if fixed else checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
        return F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), target)

    gpu.facts |= {"peak_allocated_bytes": 12_000_000_000, "total_bytes": 85_000_000_000}
    return trainer(model, loss)


@injected(
    "unfused attention",
    r"kernels:(softmax|gemm|pointwise|attention)|avoidable:passes|floor",
    r"scaled_dot_product|[Ff]lash|fuse",
)
def relative_places_added_by_hand(gpu: StandIn, fixed: bool) -> Step:
    class ByHand(Block):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if fixed:
                return super().attend(q, k, v)
            scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
            scores = scores.masked_fill(hidden, float("-inf"))
            return scores.softmax(-1) @ v

    hidden = numbers(1024, 1024, dtype=torch.bool)
    blocks = placed(nn.Sequential(*(ByHand(1024, 16) for _ in range(6))))
    x = numbers(8, 1024, 1024)
    return trainer(blocks, lambda: (blocks(x) - x).square().mean())


@injected("multiplied by zero", r"avoidable|kernels:gemm|floor", r"group|only|select|route|expert|needed")
def all_experts_for_all_tokens(gpu: StandIn, fixed: bool) -> Step:
    """Every expert sees every token; its output is then multiplied by a gate that is zero for most."""
    width, experts, tokens = 1024, 8, 8192
    up = [placed(nn.Linear(width, 4096, bias=False)) for _ in range(experts)]
    down = [placed(nn.Linear(4096, width, bias=False)) for _ in range(experts)]
    router, x = placed(nn.Linear(width, experts)), numbers(tokens, width)
    model = nn.ModuleList([*up, *down, router])

    def loss() -> Tensor:
        gates = router(x).softmax(-1)
        gates = gates * (gates >= gates.topk(2).values[:, -1:])
        found = torch.zeros_like(x)
        for i in range(experts):
            rows = x[: tokens // 4] if fixed else x
            gate = gates[: tokens // 4, i : i + 1] if fixed else gates[:, i : i + 1]
            made = down[i](F.gelu(up[i](rows))) * gate
            found = found + (F.pad(made, (0, 0, 0, tokens - tokens // 4)) if fixed else made)
        return found.square().mean()

    return trainer(model, loss)


@injected(
    "round trip through the host", r"copy|idle:(host_code|python|synchronize|copy_call)", r"on the (device|GPU)|device"
)
def boxes_sorted_on_the_host(gpu: StandIn, fixed: bool) -> Step:
    net = placed(nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 84))).requires_grad_(False)
    x = numbers(20000, 1024)

    def step() -> None:
        for _ in range(2):
            scores = net(x)
            if fixed:
                kept = scores.amax(-1).topk(100).indices
            else:
                table = scores.float().cpu()
                gpu.work(2.5)
                kept = torch.zeros(100, dtype=torch.long, device="cpu").to(gpu.device)
                del table
            scores.index_select(0, kept)

    return step


@injected("synchronization", r"idle:synchronize", r"later|less often|once|event|synchronize")
def layers_timed_with_synchronize(gpu: StandIn, fixed: bool) -> Step:
    model = placed(nn.ModuleList(Block(1024, 16) for _ in range(16))).requires_grad_(False)
    x = numbers(4, 256, 1024)

    def step() -> None:
        y = x
        for block in model:
            y = block(y)
            if not fixed:
                gpu.synchronize()
        gpu.synchronize()

    return step


@injected("data loader", r"idle:loader", r"worker")
def pictures_decoded_in_the_training_process(gpu: StandIn, fixed: bool) -> Step:
    class Pictures(torch.utils.data.Dataset[Tensor]):
        def __len__(self) -> int:
            return 64_000

        def __getitem__(self, i: int) -> Tensor:
            if not fixed:
                gpu.work(0.35)
            return torch.zeros(3, 8, 8, device="cpu")

    model = placed(nn.Sequential(*(Block(768, 12, causal=False) for _ in range(12))))
    feed, x = iter(torch.utils.data.DataLoader(Pictures(), batch_size=32, sampler=range(64_000))), numbers(32, 197, 768)

    def loss() -> Tensor:
        next(feed)
        return (model(x) - x).square().mean()

    return trainer(model, loss)


@injected("allocator", r"idle:allocator", r"empty_cache|expandable|alloc")
def memory_given_back_after_each_batch(gpu: StandIn, fixed: bool) -> Step:
    model = placed(Language(1024, 8, 16)).requires_grad_(False)
    tokens = ids(4, 512)

    def step() -> None:
        for _ in range(3):
            if not fixed:
                gpu.malloc(6)
            model(tokens)
            if not fixed:
                gpu.malloc(6, free=True)

    return step


@injected("small batch", r"idle:(op|between_ops|launch_call)|kernels:|floor", r"batch|graph|compile")
def guidance_in_two_passes(gpu: StandIn, fixed: bool) -> Step:
    """Classifier-free guidance: with the prompt and without it, one after another at batch one."""
    model = placed(nn.ModuleList(Block(1536, 24, causal=False) for _ in range(20))).requires_grad_(False)

    def run(x: Tensor) -> Tensor:
        for block in model:
            x = block(x)
        return x

    def step() -> None:
        x = numbers(1, 256, 1536)
        for _ in range(3):
            if fixed:
                one, two = run(torch.cat((x, x))).chunk(2)
            else:
                one, two = run(x), run(x)
            x = two + 7.5 * (one - two)

    return step


@injected("needless gradients", r"floor|kernels:|avoidable", r"no_grad|requires_grad|frozen|gradient")
def gradients_of_a_frozen_trunk(gpu: StandIn, fixed: bool) -> Step:
    """Only the head is trained, and the optimizer has only its weights, but the trunk still makes gradients."""
    trunk, head = (
        placed(nn.Sequential(*(Block(1024, 16, causal=False) for _ in range(8)))),
        placed(nn.Linear(1024, 100)),
    )
    trunk.requires_grad_(not fixed)
    x, target = numbers(16, 512, 1024), ids(16)
    optimizer = FusedAdamW(list(head.parameters()))

    def step() -> None:
        for p in (*trunk.parameters(), *head.parameters()):
            p.grad = None
        F.cross_entropy(head(trunk(x).mean(1)).float(), target).backward()
        optimizer.step()

    return step


@injected("weights cast every step", r"avoidable:casts|kernels:copy", r"type they are used in|cast|keep|bf16")
def master_weights_cast_in_every_layer(gpu: StandIn, fixed: bool) -> Step:
    dtype = BF16 if fixed else torch.float32
    weights = [numbers(4096, 4096, dtype=dtype).requires_grad_() for _ in range(24)]
    model, x = nn.ParameterList(weights), numbers(512, 4096)

    def loss() -> Tensor:
        y = x
        for weight in model:
            y = F.relu(F.linear(y, weight.to(BF16)))
        return y.float().square().mean()

    return trainer(model, loss)


@injected("pageable copy", r"copy:HtoD", r"pin")
def windows_from_ordinary_memory(gpu: StandIn, fixed: bool) -> Step:
    model = placed(nn.Sequential(nn.Linear(4096, 8192), nn.GELU(), nn.Linear(8192, 4096))).requires_grad_(False)
    windows = [torch.zeros(4096, 4096, dtype=BF16, device="cpu") for _ in range(2)]
    windows = [w.pin_memory() for w in windows] if fixed else windows

    def step() -> None:
        for window in windows:
            model(window.to(gpu.device, non_blocking=True))

    return step


# ---------------------------------------------------------------- what is said of them


@dataclass(frozen=True, slots=True)
class Said:
    """One program, and where its cause stands."""

    name: str
    cause: str
    place: int | None  # among the findings, 0 is first
    by_bar: bool
    step_ms: float
    gain_ms: float
    low_ms: float
    high_ms: float
    told: tuple[str, ...]
    bars: tuple[str, ...]
    told_when_fixed: tuple[str, ...]

    @property
    def found(self) -> bool:
        return self.by_bar or (self.place is not None and self.place < 2)

    @property
    def held(self) -> bool:
        return self.low_ms <= self.gain_ms <= self.high_ms


def said_of(name: str, folder: Path) -> Said:
    case, steps = CASES[name], {}
    for fixed in (False, True):
        torch.manual_seed(0)
        with StandIn() as gpu:
            step = case.build(gpu, fixed)
            steps[fixed] = gpu.record(step, folder / f"{name}.{'fixed' if fixed else 'planted'}.json", steps=2)
    found = [explained(trace, [summary_of(trace)]) for trace in (
        read(folder / f"{name}.{variant}.json", cache=False) for variant in ("planted", "fixed"))]  # fmt: skip
    planted, fixed_one = found
    rules = NAMES.get(case.cause, ())
    place = next((i for i, f in enumerate(planted.findings)
                  if f.rule in rules or (i < 2 and re.search(case.remedy, f.change))), None)  # fmt: skip
    largest = planted.waterfall.largest(2) if planted.waterfall else []
    by_bar = any(re.search(case.bars, bar.key) and re.search(case.remedy, bar.remedy) for bar in largest)
    own = planted.findings[place] if place is not None else None
    return Said(
        name, case.cause, place, by_bar, steps[False] * 1e3, (steps[False] - steps[True]) * 1e3,
        own.low_ms if own else 0.0, own.high_ms if own else 0.0,
        tuple(f"{f.rule} {f.low_ms:.2f}–{f.high_ms:.2f}" for f in planted.findings[:3]),
        tuple(f"{bar.key} {bar.frac:.0%}" for bar in largest),
        tuple(f"{f.rule} {f.step_frac:.0%}" for f in fixed_one.findings if f.step_frac > 0.02),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*CASES, []])
    parser.add_argument("--keep", type=Path, help="leave the traces in this folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        scores = []
        for name in args.names or CASES:
            one = said_of(name, folder)
            scores.append(one)
            place = "bar" if one.by_bar and (one.place is None or one.place > 1) else (
                "–" if one.place is None else str(one.place + 1))  # fmt: skip
            print(f"{one.name:42} {one.cause:28} {'yes' if one.found else 'NO':3} {place:4} step "
                  f"{one.step_ms:7.2f} gain "
                  f"{one.gain_ms:7.2f} [{one.low_ms:.2f}, {one.high_ms:.2f}] {'held' if one.held else ''}\n    told: "
                  f"{', '.join(one.told) or 'nothing'}\n    bars: {', '.join(one.bars)}\n    fixed: "
                  f"{', '.join(one.told_when_fixed) or 'nothing'}", flush=True)  # fmt: skip
    print(
        f"{sum(one.found for one in scores)} of {len(scores)} found, {sum(one.held for one in scores)} gains inside, "
        f"{sum(one.place is not None and one.place < 2 for one in scores)} by a finding"
    )


if __name__ == "__main__":
    main()
