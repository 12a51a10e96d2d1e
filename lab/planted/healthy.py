"""Forty-two ordinary programs in which nothing is wrong, on the stand-in GPU: whatever they are told over 2 % is false.

    python -m lab.planted healthy [NAME …] [--keep FOLDER] [--recorded]

Sizes are such that the device, not the host, sets the pace, as in a program that somebody has looked after. Some are
recorded without shapes, without marks of steps, or with a slow host, as people do. With ``--recorded`` the controls
that were recorded on a GPU (``data/recordings``) are explained as well.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.planted.meta_networks import BF16, Block, FusedAdamW, Language, Step, ids, next_token, numbers, placed, trainer
from lab.planted.recordings import control_programs, suite_folder, suites
from lab.planted.score import WEIGHTY_FRAC, found_in
from lab.planted.stand_in import StandIn
from ridgeline.findings.explanation import explained, summary_of
from ridgeline.trace import read

Build = Callable[[StandIn], Step]


@dataclass(frozen=True, slots=True)
class Control:
    """A program without a cause, and how it is recorded."""

    build: Build
    shapes: bool = True
    marks: bool = True
    timed: bool = True
    steps: int = 2
    host: float = 1.0

    def __call__(self, gpu: StandIn) -> Step:
        return self.build(gpu)


CASES: dict[str, Control] = {}


def control(**how: float | bool) -> Callable[[Build], Build]:
    def register(build: Build) -> Build:
        CASES[build.__name__] = Control(build, **how)  # type: ignore[arg-type]
        return build

    return register


def loader(gpu: StandIn, ms: float = 0.2) -> None:
    """The next batch of a loader whose workers keep up."""
    gpu.work(ms, "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__")


def pictures(batch: int, channels: int, size: int) -> Tensor:
    return numbers(batch, channels, size, size).to(memory_format=torch.channels_last)


def convs(*channels: int, norm: bool = True) -> nn.Module:
    layers = list[nn.Module]()
    for a, b in pairwise(channels):
        layers += [nn.Conv2d(a, b, 3, padding=1, bias=not norm), *([nn.BatchNorm2d(b)] if norm else []), nn.ReLU(True)]
    return placed(nn.Sequential(*layers)).to(memory_format=torch.channels_last)


# ---------------------------------------------------------------- language models


@control()
def gpt_training(gpu: StandIn) -> Step:
    model = placed(Language(2048, 6))
    return trainer(model, next_token(model, 8, 1024))


@control(shapes=False, timed=False)
def gpt_training_without_shapes(gpu: StandIn) -> Step:
    model = placed(Language(2048, 6))
    return trainer(model, next_token(model, 8, 1024))


@control(marks=False, timed=False)
def gpt_training_without_steps(gpu: StandIn) -> Step:
    model = placed(Language(2048, 4))
    return trainer(model, next_token(model, 8, 1024))


@control(host=1.8)
def gpt_training_on_a_slow_host(gpu: StandIn) -> Step:
    model = placed(Language(3072, 4, 24))
    return trainer(model, next_token(model, 8, 2048))


@control()
def micro_batches_that_fill_the_device(gpu: StandIn) -> Step:
    model = placed(Language(2048, 4))
    optimizer, loss = FusedAdamW(list(model.parameters())), next_token(model, 4, 1024)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(4):
            loader(gpu)
            (loss() / 4).backward()
        optimizer.step()

    return step


@control()
def gradients_reduced_while_backward_runs(gpu: StandIn) -> Step:
    model = placed(Language(2048, 6))
    for block in model.blocks:
        block.up.weight.register_post_accumulate_grad_hook(
            lambda _: gpu.collective("AllReduce", numbers(12_000_000), overlap=True))  # fmt: skip
    return trainer(model, next_token(model, 8, 1024))


@control()
def weights_gathered_a_layer_ahead(gpu: StandIn) -> Step:
    model, tokens, target = placed(Language(2048, 6)), ids(8, 1024), ids(8 * 1024)

    def loss() -> Tensor:
        x = model.embed(tokens)
        for block in model.blocks:
            gpu.collective("AllGather", numbers(50_000_000), overlap=True)
            x = block(x)
        return F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), target)

    return trainer(model, loss)


@control()
def checkpoints_where_memory_is_full(gpu: StandIn) -> Step:
    from torch.utils.checkpoint import checkpoint

    model, tokens, target = placed(Language(2048, 6)), ids(8, 1024), ids(8 * 1024)

    def loss() -> Tensor:
        x = model.embed(tokens)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
        return F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), target)

    gpu.facts |= {"peak_allocated_bytes": 80_000_000_000, "peak_reserved_bytes": 83_000_000_000,
                  "total_bytes": 85_000_000_000}  # fmt: skip
    return trainer(model, loss)


@control()
def long_sequences(gpu: StandIn) -> Step:
    model = placed(Language(2048, 4))
    return trainer(model, next_token(model, 1, 16384))


@control()
def adapters_on_a_frozen_model(gpu: StandIn) -> Step:
    model = placed(Language(2048, 6)).requires_grad_(False)
    down = placed(nn.ModuleList(nn.Linear(2048, 64, bias=False) for _ in range(6)))
    up = placed(nn.ModuleList(nn.Linear(64, 2048, bias=False) for _ in range(6)))
    tokens, target, both = ids(8, 1024), ids(8 * 1024), nn.ModuleList([down, up])

    def loss() -> Tensor:
        x = model.embed(tokens)
        for block, a, b in zip(model.blocks, down, up, strict=True):
            x = block(x) + b(a(x))
        return F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), target)

    return trainer(both, loss)


@control()
def a_teacher_and_its_student(gpu: StandIn) -> Step:
    teacher, student = placed(Language(2048, 6)).requires_grad_(False), placed(Language(1536, 4, 12))
    tokens = ids(8, 1024)

    def loss() -> Tensor:
        with torch.no_grad():
            wanted = teacher(tokens).softmax(-1)
        return F.cross_entropy(student(tokens).flatten(0, 1), wanted.flatten(0, 1))

    return trainer(student, loss)


@control()
def a_scaler_that_reads_one_flag(gpu: StandIn) -> Step:
    model = placed(Language(2048, 6), torch.float16)
    return trainer(model, next_token(model, 8, 1024), lambda value: value.isfinite().all().item())


@control()
def clipped_and_averaged_by_lists(gpu: StandIn) -> Step:
    model = placed(Language(2048, 6))
    slow, own = [torch.empty_like(p) for p in model.parameters()], list(model.parameters())
    optimizer, loss = FusedAdamW(own), next_token(model, 8, 1024)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        grads = [p.grad for p in own]
        with torch.no_grad():
            norm = torch.stack(torch._foreach_norm(grads)).norm()
            torch._foreach_mul_(grads, (1.0 / (norm + 1e-6)).clamp(max=1.0))
            optimizer.step()
            torch._foreach_lerp_(slow, own, 0.001)

    return step


@control()
def losses_copied_without_waiting(gpu: StandIn) -> Step:
    model = placed(Language(2048, 6))
    kept = numbers(1000, dtype=torch.float32)
    return trainer(model, next_token(model, 8, 1024), lambda value: kept[3].copy_(value.detach()))


# ---------------------------------------------------------------- serving


def _decode(model: nn.Module, caches: list[Tensor], rows: int, width: int, length: int) -> Tensor:
    x = model.embed(ids(rows, 1))
    for block, cache in zip(model.blocks, caches, strict=True):
        q, k, v = block.qkv(block.one(x)).view(rows, 1, 3, block.heads, -1).permute(2, 0, 3, 1, 4)
        cache[0, :, :, length - 1 : length] = k
        cache[1, :, :, length - 1 : length] = v
        y = F.scaled_dot_product_attention(q, cache[0, :, :, :length], cache[1, :, :, :length])
        x = x + block.out(y.transpose(1, 2).reshape(rows, 1, width))
        x = x + block.down(F.gelu(block.up(block.two(x))))
    return model.head(model.norm(x))[:, -1].argmax(-1)


@control()
def decoding_out_of_a_graph(gpu: StandIn) -> Step:
    model = placed(Language(2048, 8)).requires_grad_(False)
    caches = [numbers(2, 64, 16, 2048, 128) for _ in range(8)]

    token = gpu.graphed(lambda: _decode(model, caches, 64, 2048, 2048))

    def step() -> None:
        for _ in range(8):
            token()

    return step


@control()
def decoding_with_growing_lengths(gpu: StandIn) -> Step:
    model = placed(Language(4096, 4, 32)).requires_grad_(False)
    caches = [numbers(2, 128, 32, 4096, 128) for _ in range(4)]

    def step() -> None:
        for i in range(6):
            _decode(model, caches, 128, 4096, 4000 + i)

    return step


@control()
def a_server_that_schedules_beside_the_device(gpu: StandIn) -> Step:
    """As vLLM runs: one graph a token, the scheduler works on the next batch meanwhile, one read at the end."""
    model = placed(Language(4096, 4, 32)).requires_grad_(False)
    caches = [numbers(2, 128, 32, 2048, 128) for _ in range(4)]

    token = gpu.graphed(lambda: _decode(model, caches, 128, 4096, 2048))

    def step() -> None:
        for _ in range(4):
            tokens = token()
            gpu.work(0.4, "scheduler")
            tokens.tolist()

    return step


@control(marks=False, shapes=False, timed=False)
def a_server_recorded_plainly(gpu: StandIn) -> Step:
    return a_server_that_schedules_beside_the_device(gpu)


@control()
def prompts_in_large_batches(gpu: StandIn) -> Step:
    model = placed(Language(2048, 8)).requires_grad_(False)
    tokens = ids(16, 1024)
    return lambda: model(tokens)[:, -1].argmax(-1)


@control()
def prompts_in_buckets(gpu: StandIn) -> Step:
    model = placed(Language(2048, 6)).requires_grad_(False)
    return lambda: [model(ids(8192 // length, length)) for length in (256, 512, 1024, 2048)]


@control()
def drafts_and_their_check(gpu: StandIn) -> Step:
    draft, model = placed(Language(1024, 2)).requires_grad_(False), placed(Language(4096, 4, 32)).requires_grad_(False)
    small, tokens = [numbers(2, 64, 16, 1024, 64) for _ in range(2)], ids(64, 5)

    drafted = gpu.graphed(lambda: [_decode(draft, small, 64, 1024, 1024) for _ in range(4)])
    checked = gpu.graphed(lambda: model(tokens))

    def step() -> None:
        for _ in range(3):
            drafted()
            checked()

    return step


@control()
def embeddings_of_texts_copied_ahead(gpu: StandIn) -> Step:
    model = placed(nn.Sequential(*(Block(1024, 16, causal=False) for _ in range(8)))).requires_grad_(False)
    texts = torch.zeros(64, 512, 1024, dtype=BF16, device="cpu").pin_memory()

    def step() -> None:
        with gpu.stream(21):
            texts.to(gpu.device, non_blocking=True)
        model(numbers(64, 512, 1024)).mean(1)

    return step


@control()
def a_split_model_at_large_batch(gpu: StandIn) -> Step:
    model = placed(nn.ModuleList(Block(8192, 64) for _ in range(2))).requires_grad_(False)
    x = numbers(8, 2048, 8192)

    def step() -> None:
        y = x
        for block in model:
            y = block(y)
            gpu.collective("AllReduce", numbers(2_000_000))

    return step


# ---------------------------------------------------------------- experts


@control()
def experts_grouped(gpu: StandIn) -> Step:
    width, rows = 2048, 16384
    up, down, x = numbers(8, width, 8192), numbers(8, 8192, width), numbers(rows, width)
    router = placed(nn.Linear(width, 8))
    model = nn.ParameterList([up.requires_grad_(), down.requires_grad_(), *router.parameters()])

    def loss() -> Tensor:
        gates, chosen = router(x).softmax(-1).topk(1)
        order = chosen.flatten().sort().indices
        each = x.index_select(0, order).view(8, rows // 8, width)
        made = torch.bmm(F.gelu(torch.bmm(each, up)), down).view(rows, width)
        return (torch.zeros_like(x).index_add(0, order, made) * gates).square().mean()

    return trainer(model, loss)


@control()
def few_large_experts_in_turn(gpu: StandIn) -> Step:
    """Four experts of a fixed capacity: nothing is read by the host, and each product fills the device."""
    width, rows = 4096, 16384
    experts = placed(nn.ModuleList(nn.Sequential(nn.Linear(width, 8192), nn.GELU(), nn.Linear(8192, width))
                                   for _ in range(4)))  # fmt: skip
    x = numbers(rows, width)

    def loss() -> Tensor:
        return torch.cat([expert(x[i * 4096 : (i + 1) * 4096]) for i, expert in enumerate(experts)]).square().mean()

    return trainer(experts, loss)


# ---------------------------------------------------------------- pictures and sound


@control()
def a_convolutional_network(gpu: StandIn) -> Step:
    model, x = convs(64, 128, 256, 256, 256), pictures(64, 64, 56)

    def loss() -> Tensor:
        loader(gpu)
        return model(x).mean((2, 3)).square().mean()

    return trainer(model, loss)


@control()
def a_convolutional_network_serving(gpu: StandIn) -> Step:
    model, x = convs(64, 128, 256, 256, 512).eval().requires_grad_(False), pictures(128, 64, 56)
    return lambda: model(x).mean((2, 3))


@control()
def denoising_in_batches(gpu: StandIn) -> Step:
    model = convs(64, 256, 256, 256, 64, norm=False).requires_grad_(False)

    def step() -> None:
        x = pictures(32, 64, 64)
        for _ in range(4):
            x = x - 0.1 * model(x)

    return step


@control()
def a_diffusion_transformer_with_guidance(gpu: StandIn) -> Step:
    model = placed(nn.Sequential(*(Block(1536, 24, causal=False) for _ in range(6)))).requires_grad_(False)

    def step() -> None:
        x = numbers(8, 1024, 1536)
        for _ in range(3):
            one, two = model(torch.cat((x, x))).chunk(2)
            x = x - 0.1 * torch.lerp(one, two, 7.5)

    return step


@control()
def a_vision_transformer_fed_by_workers(gpu: StandIn) -> Step:
    model, x = placed(nn.Sequential(*(Block(1024, 16, causal=False) for _ in range(6)))), numbers(128, 256, 1024)

    def loss() -> Tensor:
        loader(gpu, 0.4)
        return model(x).mean(1).square().mean()

    return trainer(model, loss)


@control()
def pictures_and_texts_together(gpu: StandIn) -> Step:
    one = placed(nn.Sequential(*(Block(1024, 16, causal=False) for _ in range(4))))
    two = placed(nn.Sequential(*(Block(1024, 16) for _ in range(4))))
    x, y, target = numbers(256, 64, 1024), numbers(256, 64, 1024), ids(256)

    def loss() -> Tensor:
        a, b = F.normalize(one(x).mean(1), dim=-1), F.normalize(two(y).mean(1), dim=-1)
        gpu.collective("AllGather", a)
        return F.cross_entropy((a @ b.t()).float(), target)

    return trainer(nn.ModuleList([one, two]), loss)


@control()
def two_networks_against_each_other(gpu: StandIn) -> Step:
    maker, judge = convs(64, 256, 256, 64), convs(64, 256, 256)
    first, second, x = FusedAdamW(list(maker.parameters())), FusedAdamW(list(judge.parameters())), pictures(32, 64, 64)

    def step() -> None:
        made = maker(x)
        second.zero_grad()
        (judge(x).mean() - judge(made.detach()).mean()).backward()
        second.step()
        first.zero_grad()
        judge(made).mean().backward()
        first.step()

    return step


@control()
def speech_encoded(gpu: StandIn) -> Step:
    model, x = placed(nn.Sequential(*(Block(1280, 20, causal=False) for _ in range(6)))), numbers(16, 1500, 1280)
    return trainer(model, lambda: (model(x) - x).square().mean())


@control()
def masks_for_every_pixel(gpu: StandIn) -> Step:
    model, x, target = convs(64, 128, 256, 256, 64), pictures(32, 64, 96), pictures(32, 64, 96)
    return trainer(model, lambda: (model(x) - target).square().mean())


# ---------------------------------------------------------------- other


@control()
def a_recommender(gpu: StandIn) -> Step:
    tables = [numbers(2_000_000, 128) for _ in range(8)]
    top = placed(nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1)))
    chosen = [ids(65536) for _ in tables]

    def loss() -> Tensor:
        loader(gpu)
        with torch.no_grad():
            found = [F.embedding(which, table) for which, table in zip(chosen, tables, strict=True)]
        return top(torch.cat(found, 1)).square().mean()

    return trainer(top, loss)


@control()
def two_towers(gpu: StandIn) -> Step:
    sizes = (1024, 4096, 4096, 256)

    def tower() -> nn.Module:
        return nn.Sequential(*(m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())))

    towers = placed(nn.ModuleList([tower(), tower()]))
    x, y, target = numbers(32768, 1024), numbers(32768, 1024), ids(32768)
    return trainer(towers, lambda: F.cross_entropy(towers[0](x)[:4096] @ towers[1](y)[:4096].t(), target[:4096]))


@control()
def messages_along_edges(gpu: StandIn) -> Step:
    first, second = placed(nn.Linear(256, 1024)), placed(nn.Linear(1024, 256))
    x, source, target = numbers(200_000, 256), ids(1_000_000), ids(1_000_000)

    def loss() -> Tensor:
        sent = x.index_select(0, source)
        return F.mse_loss(second(F.relu(first(torch.zeros_like(x).index_add(0, target, sent)))), x)

    return trainer(nn.ModuleList([first, second]), loss)


@control()
def rays_through_a_field(gpu: StandIn) -> Step:
    field = placed(
        nn.Sequential(nn.Linear(64, 256), nn.ReLU(True), nn.Linear(256, 256), nn.ReLU(True), nn.Linear(256, 8))
    )
    x = numbers(1_048_576, 64)

    return trainer(field, gpu.compiled(lambda: field(x).square().mean()))


@control()
def updates_from_a_buffer_on_the_device(gpu: StandIn) -> Step:
    sizes = (512, 4096, 4096, 16)
    policy = placed(nn.Sequential(*(m for a, b in pairwise(sizes)
                                    for m in (nn.Linear(a, b), nn.Tanh()))))  # fmt: skip
    buffer, optimizer = numbers(131072, 512), FusedAdamW(list(policy.parameters()))

    def step() -> None:
        for i in range(4):
            optimizer.zero_grad()
            policy(buffer[i * 32768 : (i + 1) * 32768]).square().mean().backward()
            optimizer.step()

    return step


@control()
def scores_counted_on_the_device(gpu: StandIn) -> Step:
    model, hits = placed(Language(2048, 6)).requires_grad_(False), numbers(dtype=torch.long)
    tokens, target = ids(8, 1024), ids(8, 1024)

    def step() -> None:
        for _ in range(4):
            hits.add_((model(tokens).argmax(-1) == target).sum())
        hits.item()

    return step


@control()
def a_compiled_transformer(gpu: StandIn) -> Step:
    model, x = placed(nn.Sequential(*(Block(2048, 16) for _ in range(4)))), numbers(8, 1024, 2048)

    return trainer(model, gpu.compiled(lambda: (model(x) - x).square().mean()))


@control(timed=False)
def one_stage_of_a_pipeline(gpu: StandIn) -> Step:
    model = placed(nn.Sequential(*(Block(2048, 16) for _ in range(3))))
    optimizer, x = FusedAdamW(list(model.parameters())), numbers(4, 2048, 2048)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(4):
            gpu.collective("SendRecv", x, overlap=True)
            y = model(x)
            gpu.collective("SendRecv", y, overlap=True)
            y.square().mean().backward()
        optimizer.step()

    return step


# ---------------------------------------------------------------- what is said of them


def told(name: str, folder: Path) -> tuple[str, ...]:
    """Findings over 2 % of the step."""
    case, file = CASES[name], folder / f"{name}.json"
    torch.manual_seed(0)
    with StandIn(host=case.host) as gpu:
        gpu.record(case.build(gpu), file, steps=case.steps, shapes=case.shapes, marks=case.marks, timed=case.timed)
    trace = read(file, cache=False)
    found = explained(trace, [summary_of(trace)])
    return tuple(f"{f.rule} {f.step_frac:.0%} ({f.low_ms:.2f} to {f.high_ms:.2f} of {found.step_ms:.2f} ms)"
                 for f in found.findings if f.step_frac > WEIGHTY_FRAC)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--keep", type=Path, help="leave the traces in this folder")
    parser.add_argument("--recorded", action="store_true", help="explain recorded controls as well")
    args = parser.parse_args()
    wrong = num = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for name in args.names or CASES:
            found = told(name, folder)
            num, wrong = num + 1, wrong + bool(found)
            print(f"{name:44} {', '.join(found) or 'nothing over 2 %'}", flush=True)
    if args.recorded:
        for program in (one for suite in suites() for one in control_programs(suite_folder(suite))):
            found = tuple(f"{rule} {share:.0%}" for rule, share in found_in(program))
            num, wrong = num + 1, wrong + bool(found)
            print(f"{program.name:44} {', '.join(found) or 'nothing over 2 %'}", flush=True)
    print(f"{wrong} of {num} healthy programs are told something over 2 % of their step")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
