"""Programs with one planted cause each, and the same program with the fix."""

from __future__ import annotations

import gc
import itertools
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import nets
import numpy as np
import torch
import torch.nn.functional as F
from nets import Shape
from torch import Tensor, nn

Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a case runs, and whether at toy size."""

    device: str
    tiny: bool

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def pick(self, full: Any, toy: Any) -> Any:
        return toy if self.tiny else full

    def shape(self, **sizes: Any) -> Shape:
        toy = {"width": 32, "layers": 2, "heads": 2, "vocab": 97 if sizes.get("vocab", 0) % 8 else 96}
        toy |= {"hidden": 43 if sizes["hidden"] % 8 else 48} if sizes.get("hidden") else {}
        return Shape(**(sizes | toy if self.tiny else sizes))

    def place(self, make: Callable[[], nn.Module], dtype: torch.dtype = torch.bfloat16) -> Any:
        """The module, its weights drawn where they will live; batch norms keep fp32 as cuDNN wants them."""
        with torch.device(self.device):
            module = make().to(dtype)
        for part in module.modules():
            part.float() if isinstance(part, nn.BatchNorm2d) else None
        return module

    def pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self.cuda else tensor

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class Program:
    """Something that runs step by step; ``scope`` holds while it runs, ``close`` ends what it started."""

    step: Step
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    close: Callable[[], None] = lambda: None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Case:
    """A cause, the change that removes it, and how to build either program."""

    name: str
    cause: str
    change: str
    build: Callable[[Setting, bool], Program]
    rounds: int = 2
    warmup: int = 4
    steps: int = 9
    compiles: bool = False
    planted_steps: int = 0
    variants: tuple[str, ...] = ("planted", "fixed")
    stack: bool = True  # the planted program is also recorded with its Python stack
    traced: bool = True
    plain: bool = False  # also recorded without shapes, schedule and marks of steps
    both: bool = False  # the planted program compiles as well, and is warmed up


CASES: dict[str, Case] = {}


def case(cause: str, change: str, **plan: Any) -> Callable[[Callable[[Setting, bool], Program]], Any]:
    def register(build: Callable[[Setting, bool], Program]) -> Callable[[Setting, bool], Program]:
        if build.__name__ in CASES:
            raise ValueError(f"two cases are named {build.__name__}")
        CASES[build.__name__] = Case(build.__name__, cause, change, build, **plan)
        return build

    return register


# ---------------------------------------------------------------- what most programs share


def _ids(s: Setting, batch: int, length: int, vocab: int, num: int = 4) -> Iterator[tuple[Tensor, Tensor]]:
    """Token batches that are on the device already."""
    make = lambda: torch.randint(0, vocab, (batch, length + 1), device=s.device)
    batches = [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in (make() for _ in range(num))]
    return itertools.cycle(batches)


def _adamw(s: Setting, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, **(options or {"fused": True}))


def training(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[tuple[Tensor, ...]]) -> Step:
    def step() -> None:
        model(*next(batches)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def language(s: Setting, shape: Shape, batch: int, length: int, dtype: torch.dtype = torch.bfloat16, **how: Any) -> Any:
    batch, length = s.pick(batch, 2), s.pick(length, 16)
    model = s.place(lambda: nets.Decoder(shape, length, **how), dtype)
    return model, _ids(s, batch, length, shape.vocab)


# ---------------------------------------------------------------- input


class Photos(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Compressed pictures: decompressed, cropped, flipped and brightened one by one."""

    def __init__(self, side: int, crop: int, length: int = 1_000_000) -> None:
        rng = np.random.default_rng(0)
        smooth = rng.integers(0, 255, (24, side // 4, side // 4, 3), np.uint8).repeat(4, 1).repeat(4, 2)
        noisy = smooth ^ rng.integers(0, 8, smooth.shape, np.uint8)
        self.blobs = [zlib.compress(image.tobytes(), 6) for image in noisy]
        self.side, self.crop, self.length = side, crop, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        rng = np.random.default_rng(i)
        image = np.frombuffer(zlib.decompress(self.blobs[i % 24]), np.uint8).reshape(self.side, self.side, 3)
        top, left = rng.integers(0, self.side - self.crop, 2)
        image = image[top : top + self.crop, left : left + self.crop]
        image = image[:, ::-1] if rng.random() < 0.5 else image
        bright = np.clip(image.astype(np.float32) * rng.uniform(0.8, 1.2), 0, 255).astype(np.uint8)
        return torch.from_numpy(np.ascontiguousarray(bright.transpose(2, 0, 1))), int(i % 1000)


def photos(s: Setting, workers: int, one_core: bool = False) -> Program:
    side, crop, batch = s.pick(224, 48), s.pick(160, 32), s.pick(48, 4)
    shape = s.shape(width=1024, layers=16, heads=16, causal=False)
    model = s.place(lambda: nets.Vit(shape, crop))
    optimizer = _adamw(s, model)
    workers = min(workers, 2) if s.tiny else workers
    loader = torch.utils.data.DataLoader(
        Photos(side, crop), batch, num_workers=workers, pin_memory=s.cuda, persistent_workers=workers > 0, shuffle=False
    )
    scope = _one_core if one_core else nullcontext
    with scope():
        feed = iter(loader)

    def step() -> None:
        images, labels = next(feed)
        images, labels = images.to(s.device, non_blocking=True), labels.to(s.device, non_blocking=True)
        model(images, labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step, scope, close=lambda: end_workers(feed))


def end_workers(feed: Any) -> None:
    if hasattr(feed, "_shutdown_workers"):
        feed._shutdown_workers()


@contextmanager
def _one_core() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@case("data loader", "num_workers=0 → 6", rounds=1, warmup=14, steps=18, planted_steps=15)
def loader_no_workers(s: Setting, fixed: bool) -> Program:
    return photos(s, 6 if fixed else 0)


@case("data loader", "num_workers=1 → 6", rounds=1, warmup=14, steps=18)
def loader_one_worker(s: Setting, fixed: bool) -> Program:
    return photos(s, 6 if fixed else 1)


@case("cpu affinity", "let the process use every core", rounds=1, warmup=14, steps=18)
def affinity_one_core(s: Setting, fixed: bool) -> Program:
    return photos(s, 6, one_core=not fixed)


def tower(s: Setting, rows: int, width: int, layers: int) -> tuple[nn.Module, torch.optim.Optimizer, list[Any]]:
    rows, width, layers = s.pick(rows, 8), s.pick(width, 32), s.pick(layers, 2)
    model = s.place(lambda: nets.Tower(width, layers))
    draw = lambda columns: torch.randn(rows, columns, device=s.device).cpu()
    batches = [(draw(width), draw(8).bfloat16()) for _ in range(3)]
    return model, torch.optim.SGD(model.parameters(), lr=1e-4, fused=s.cuda), batches


@case("pageable copy", "pin the batch and copy with non_blocking=True")
def pageable_copy(s: Setting, fixed: bool) -> Program:
    model, optimizer, batches = tower(s, 4096, 4096, 12)
    batches = [(s.pinned(x), s.pinned(y)) for x, y in batches] if fixed else batches
    feed = itertools.cycle(batches)

    def step() -> None:
        x, y = (t.to(s.device, non_blocking=fixed) for t in next(feed))
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


class Prefetch:
    """Copies the next batch on a stream of its own while this one is computed."""

    def __init__(self, s: Setting, batches: Iterator[tuple[Tensor, ...]]) -> None:
        self.s, self.batches = s, batches
        self.stream = torch.cuda.Stream() if s.cuda else None
        self.ahead = self.copy()

    def copy(self) -> tuple[Tensor, ...]:
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            return tuple(t.to(self.s.device, non_blocking=True) for t in next(self.batches))

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        while True:
            if self.stream:
                torch.cuda.current_stream().wait_stream(self.stream)
                for t in self.ahead:
                    t.record_stream(torch.cuda.current_stream())
            ready, self.ahead = self.ahead, self.copy()
            yield ready


@case("pinned copy on the compute stream", "copy the next batch on a side stream")
def pinned_copy_in_line(s: Setting, fixed: bool) -> Program:
    model, optimizer, batches = tower(s, 24576, 4096, 6)
    feed: Iterator[Any] = itertools.cycle([(s.pinned(x), s.pinned(y)) for x, y in batches])
    if fixed:
        return Program(training(model, optimizer, iter(Prefetch(s, feed))))
    return Program(training(model, optimizer, (tuple(t.to(s.device) for t in batch) for batch in feed)))


@case("many small copies", "pack the features into one pinned tensor and copy it once")
def small_copies(s: Setting, fixed: bool) -> Program:
    model, optimizer, _ = tower(s, 4096, 4096, 10)
    features, rows, width = s.pick(256, 4), s.pick(4096, 8), s.pick(4096, 32)
    columns = [torch.randn(rows, width // features) for _ in range(features)]
    packed = s.pinned(torch.stack(columns))
    y = torch.randn(rows, 8, dtype=torch.bfloat16, device=s.device)

    def step() -> None:
        if fixed:
            parts = list(packed.to(s.device, non_blocking=True).unbind(0))
        else:
            parts = [column.to(s.device) for column in columns]
        model(torch.cat(parts, dim=1), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


# ---------------------------------------------------------------- synchronization


@case("synchronization", "keep the statistics on the device and read them every 100 steps")
def item_each_layer(s: Setting, fixed: bool) -> Program:
    kept: list[Any] = []

    def watch(i: int, x: Tensor) -> None:
        size = x.detach().norm()
        kept.append(size if fixed else size.item())

    shape = s.shape(width=1024, layers=12, heads=16, vocab=16384)
    model, batches = language(s, shape, 8, 1024, watch=watch)
    train = training(model, _adamw(s, model), batches)

    def step() -> None:
        kept.clear()
        train()

    return Program(step)


@case("synchronization", "clip_grad_norm_ once instead of .item() for every parameter")
def item_each_gradient(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=1024, layers=12, heads=16, vocab=16384)
    model, batches = language(s, shape, 8, 1024)
    optimizer, params = _adamw(s, model), list(model.parameters())

    def step() -> None:
        model(*next(batches)).backward()
        if fixed:
            nn.utils.clip_grad_norm_(params, 1.0)
        else:
            total = sum(p.grad.norm().item() ** 2 for p in params) ** 0.5
            if total > 1.0:
                torch._foreach_mul_([p.grad for p in params], 1.0 / total)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("synchronization", "drop the torch.cuda.synchronize() around every block")
def synchronize_each_block(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=1024, layers=12, heads=16, vocab=16384)
    watch = None if fixed else lambda i, x: s.synchronize()
    model, batches = language(s, shape, 8, 1024, watch=watch)
    return Program(training(model, _adamw(s, model), batches))


@case("synchronous logging", "log every 100 steps from a value kept on the device")
def logging_each_step(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=1024, layers=8, heads=16)
    batch, length = s.pick(8, 2), s.pick(1024, 16)
    model, _ = language(s, shape, 8, 1024)
    optimizer = _adamw(s, model)
    texts = [" ".join(f"w{i * j % 997}" for j in range(length // 4)) for i in range(64)]
    file = tempfile.NamedTemporaryFile("w", suffix=".jsonl")  # noqa: SIM115
    turn = itertools.count()

    def batch_of(i: int) -> Tensor:
        """Documents hashed to ids, joined and cut on the host, in Python, as many small trainers do."""
        words: list[int] = []
        while len(words) < batch * (length + 1):
            words.extend(zlib.crc32(word.encode()) % shape.vocab for word in texts[(i + len(words)) % 64].split())
        return s.pinned(torch.tensor(words[: batch * (length + 1)]).view(batch, length + 1))

    def step() -> None:
        ids = batch_of(i := next(turn)).to(s.device, non_blocking=True)
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not fixed:
            file.write(json.dumps({"step": i, "loss": loss.item()}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    return Program(step, close=file.close)


@case("round trip through the host", "sample on the device")
def sample_on_host(s: Setting, fixed: bool) -> Program:
    batch, room = s.pick(32, 2), s.pick(512, 8)
    model = s.place(lambda: nets.Generator(s.shape(width=2048, layers=12, heads=16), batch, room)).eval()
    ids = torch.zeros(batch, 1, dtype=torch.long, device=s.device)
    place = torch.zeros(1, dtype=torch.long, device=s.device)

    @torch.no_grad()
    def token() -> None:
        logits = model(ids, place)
        if fixed:
            ids.copy_(torch.multinomial(torch.softmax(logits.float(), -1), 1))
        else:
            ids.copy_(torch.multinomial(torch.softmax(logits.cpu().float(), -1), 1))

    def step() -> None:
        for _ in range(4):
            token()

    return Program(step)


# ---------------------------------------------------------------- host-bound


@case("host-bound", "capture the step in a CUDA graph")
def tiny_kernels_train(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=256, layers=12, heads=4, vocab=4096)
    model, batches = language(s, shape, 4, 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=s.cuda)
    x, y = (t.clone() for t in next(batches))

    def run() -> None:
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    again = graphed(run) if fixed and s.cuda else run

    def step() -> None:
        for into, new in zip((x, y), next(batches), strict=True):
            into.copy_(new)
        again()

    return Program(step)


def graphed(run: Step) -> Step:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay(kept: Step = run) -> None:
        """The graph holds addresses only: what they point to lives as long as the program that was captured."""
        graph.replay()

    return replay


@case("host-bound", "replay the decode step from a CUDA graph")
def tiny_kernels_decode(s: Setting, fixed: bool) -> Program:
    batch, room = s.pick(8, 2), s.pick(512, 8)
    model = s.place(lambda: nets.Generator(s.shape(width=1024, layers=24, heads=16, vocab=32000), batch, room)).eval()
    ids = torch.zeros(batch, 1, dtype=torch.long, device=s.device)
    place = torch.zeros(1, dtype=torch.long, device=s.device)

    @torch.no_grad()
    def token() -> None:
        ids.copy_(model(ids, place).argmax(-1, keepdim=True))

    again = graphed(token) if fixed and s.cuda else token

    def step() -> None:
        for _ in range(4):
            again()

    return Program(step)


@case("host-bound", "torch._foreach_lerp_ over all weights")
def ema_loop(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=1024, layers=12, heads=16, vocab=16384)
    model, batches = language(s, shape, 8, 1024)
    train, params = training(model, _adamw(s, model), batches), list(model.parameters())
    averages = [[p.detach().clone() for p in params] for _ in range(3)]

    @torch.no_grad()
    def step() -> None:
        with torch.enable_grad():
            train()
        for average, decay in zip(averages, (0.9, 0.99, 0.999), strict=True):
            if fixed:
                torch._foreach_lerp_(average, params, 1.0 - decay)
                continue
            for kept, p in zip(average, params, strict=True):
                kept.mul_(decay).add_(p * (1.0 - decay))

    return Program(step)


@case("unfused optimizer", "AdamW(..., fused=True)")
def adamw_loop(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=1024, layers=12, heads=16, vocab=16384)
    model, batches = language(s, shape, 8, 1024)
    options = {"fused": True} if fixed else {"foreach": False}
    return Program(training(model, _adamw(s, model, **options), batches))


@case("small batch", "one batch of 8 instead of 8 accumulated batches of 1")
def small_batch(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=1024, layers=8, heads=16, vocab=32000)
    batch, length = s.pick(8, 2), s.pick(512, 16)
    model, batches = language(s, shape, batch, length)
    optimizer, micro = _adamw(s, model), batch if fixed else 1

    def step() -> None:
        ids, targets = next(batches)
        for part, wanted in zip(ids.split(micro), targets.split(micro), strict=True):
            (model(part, wanted) * (micro / batch)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


# ---------------------------------------------------------------- allocator, collector, compiler


@case("allocator", "drop torch.cuda.empty_cache() from the loop")
def empty_cache_each_step(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=1024, layers=8, heads=16)
    model, batches = language(s, shape, 8, 1024)
    train = training(model, _adamw(s, model), batches)

    def step() -> None:
        train()
        if not fixed and s.cuda:
            torch.cuda.empty_cache()

    return Program(step)


@case("garbage collection", "gc.freeze() after setup and gc.disable() in the loop", rounds=1, steps=18)
def collect_each_step(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=1024, layers=8, heads=16)
    model, batches = language(s, shape, 8, 1024)
    train = training(model, _adamw(s, model), batches)
    index = [{"name": f"record {i}", "span": [i, i + 1]} for i in range(s.pick(200_000, 20_000))]

    def step() -> None:
        train()
        if not fixed:
            gc.collect()

    return Program(step, frozen if fixed else nullcontext, close=index.clear)


@contextmanager
def frozen() -> Iterator[None]:
    """What exists stays frozen: whoever runs next in the process would otherwise pay for it."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def compiler(s: Setting) -> str:
    return "inductor" if s.cuda else "eager"


@case("graph break", "drop the .item() check and the data-dependent branch from the compiled block", compiles=True)
def graph_breaks(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=768, layers=16, heads=12, vocab=4096)
    torch._dynamo.reset()
    model = s.place(lambda: nets.Decoder(shape, s.pick(512, 16))).eval()
    block = torch.compile(_plain_block if fixed else _checked_block, backend=compiler(s), dynamic=False)
    ids = torch.randint(0, shape.vocab, (s.pick(8, 2), s.pick(512, 16)), device=s.device)

    @torch.no_grad()
    def step() -> None:
        for _ in range(s.pick(4, 1)):
            x = model.tokens(ids)
            for i, layer in enumerate(model.blocks):
                x = block(layer.mlp.up.weight, layer.mlp.down.weight, layer.attention.qkv.weight, x)
                if i % 8 == 7:
                    x = layer.norm1(x)

    return Program(step)


def _mix(up: Tensor, down: Tensor, x: Tensor) -> Tensor:
    normed = F.layer_norm(x, x.shape[-1:])
    return x + F.linear(F.gelu(F.linear(normed, up)), down) * 0.1


def _plain_block(up: Tensor, down: Tensor, qkv: Tensor, x: Tensor) -> Tensor:
    x = _mix(up, down, x)
    first, second, third = F.linear(F.layer_norm(x, x.shape[-1:]), qkv).chunk(3, -1)
    return x + torch.tanh(first) * torch.sigmoid(second) * third


def _checked_block(up: Tensor, down: Tensor, qkv: Tensor, x: Tensor) -> Tensor:
    x = _mix(up, down, x)
    if not torch.isfinite(x).all().item():
        raise FloatingPointError("the activations overflowed")
    first, second, third = F.linear(F.layer_norm(x, x.shape[-1:]), qkv).chunk(3, -1)
    if second.abs().max() > 1e4:
        second = second.clamp(-1e4, 1e4)
    return x + torch.tanh(first) * torch.sigmoid(second) * third


@case("recompilation", "compile with dynamic=True", compiles=True, rounds=1, warmup=3, steps=15, planted_steps=6)
def recompile_each_shape(s: Setting, fixed: bool) -> Program:
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 256
    width, rows = s.pick(4096, 32), s.pick(16384, 8)
    chain = s.place(lambda: nets.HandNorm(width))
    run = torch.compile(chain, backend=compiler(s), dynamic=fixed)
    weights = [torch.randn(width, width, device=s.device, dtype=torch.bfloat16) * 0.02 for _ in range(s.pick(12, 2))]
    source = torch.randn(rows + 256, width, device=s.device, dtype=torch.bfloat16)
    turn = itertools.count(1)

    @torch.no_grad()
    def step() -> None:
        x = source[: rows + 8 * (next(turn) % 32)]
        for weight in weights:
            x = run(x @ weight, x)

    return Program(step)


@case("unfused pointwise chain", "torch.compile the norm, activation and residual", compiles=True)
def pointwise_chain(s: Setting, fixed: bool) -> Program:
    torch._dynamo.reset()
    width, rows, layers = s.pick(2048, 32), s.pick(16384, 8), s.pick(8, 2)
    chains = s.place(lambda: nn.ModuleList(nets.HandNorm(width) for _ in range(layers)))
    linears = s.place(lambda: nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers)))
    model = nn.ModuleList([chains, linears])
    forward = torch.compile(nets.HandNorm.forward, backend=compiler(s), dynamic=False) if fixed else None
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, fused=s.cuda)
    data = torch.randn(rows, width, device=s.device, dtype=torch.bfloat16)

    def step() -> None:
        x = data
        for chain, linear in zip(chains, linears, strict=True):
            y = linear(x)
            x = forward(chain, y, x) if forward else chain(y, x)
        F.mse_loss(x, data).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


# ---------------------------------------------------------------- kernels


@case("fp32 matmul", 'torch.set_float32_matmul_precision("high")')
def fp32_matmul(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=1024, layers=6, heads=16, vocab=8192)
    model, batches = language(s, shape, 4, 512, dtype=torch.float32)
    return Program(training(model, _adamw(s, model), batches), lambda: precision("high" if fixed else "highest"))


@contextmanager
def precision(how: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(how)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@case("NCHW convolution", "model and images in channels_last")
def nchw_conv(s: Setting, fixed: bool) -> Program:
    model = s.place(lambda: nets.ResNet(s.pick((3, 4, 6, 3), (1, 1)), s.pick(64, 8)))
    side, batch = s.pick(224, 32), s.pick(96, 2)
    images = torch.randn(batch, 3, side, side, device=s.device, dtype=torch.bfloat16)
    labels = torch.randint(0, 1000, (batch,), device=s.device)
    if fixed:
        model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=s.cuda)
    return Program(training(model, optimizer, itertools.cycle([(images, labels)])))


@case("unfused attention", "F.scaled_dot_product_attention(..., is_causal=True)")
def attention_spelled_out(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=1024, layers=6, heads=16, vocab=16384)
    model, batches = language(s, shape, 4, 2048, attend=nets.flash if fixed else nets.spelled_out)
    return Program(training(model, _adamw(s, model), batches))


@case("unfused attention", "is_causal=True instead of a dense additive mask")
def attention_dense_mask(s: Setting, fixed: bool) -> Program:
    shape, length = s.shape(width=1024, layers=8, heads=16, vocab=16384), s.pick(4096, 16)
    model, batches = language(s, shape, 2, length)
    mask = torch.full((length, length), float("-inf"), device=s.device, dtype=torch.bfloat16).triu(1)[None, None]
    feed = ((x, y, None if fixed else mask) for x, y in batches)
    return Program(training(model, _adamw(s, model), feed))


@case("padding", "sort by length and pad each quarter of the batch to its own longest")
def padded_batch(s: Setting, fixed: bool) -> Program:
    shape, batch, room = (
        s.shape(width=1024, layers=8, heads=16, vocab=16384, causal=False),
        s.pick(64, 4),
        s.pick(512, 64),
    )
    model = s.place(lambda: nets.Decoder(shape, room))
    optimizer, rng = _adamw(s, model), np.random.default_rng(0)
    batches = [ragged(s, rng, batch, room, shape.vocab, 4 if fixed else 1) for _ in range(3)]
    feed = itertools.cycle(batches)
    real = float(np.mean([mask.float().mean().item() for parts in batches for _, _, mask in parts]))

    def step() -> None:
        for ids, targets, mask in next(feed):
            model(ids, targets, mask).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step, facts={"padding": [{"argument": "mask", "real_frac": real}]})


def ragged(s: Setting, rng: np.random.Generator, batch: int, room: int, vocab: int, parts: int) -> list[Any]:
    """Documents of very different lengths in ``parts`` batches, each padded to a multiple of 64."""
    lengths = np.clip(rng.lognormal(np.log(room / 4), 0.7, batch), 8, room).astype(int)
    lengths[0] = room
    lengths = np.sort(lengths) if parts > 1 else lengths
    made = []
    for chunk in np.split(lengths, parts):
        longest = min(room, -(-int(chunk.max()) // 64) * 64)
        mask = torch.arange(longest)[None] < torch.as_tensor(chunk)[:, None]
        ids = torch.randint(0, vocab, mask.shape) * mask
        targets = torch.where(mask, ids, torch.full_like(ids, -100))
        made.append((ids.to(s.device), targets.to(s.device), mask[:, None, None].to(s.device)))
    return made


@case("fp32 logits", "leave the logits in bf16 for the loss")
def fp32_logits(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=1024, layers=2, heads=16, vocab=128256)
    model, batches = language(s, shape, 8, 1024, fp32_logits=not fixed)
    return Program(training(model, _adamw(s, model), batches))


@case("misaligned sizes", "pad the vocabulary from 50257 to 50304")
def vocab_50257(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=1024, layers=4, heads=16, vocab=50304 if fixed else 50257)
    model, batches = language(s, shape, 8, 1024)
    return Program(training(model, _adamw(s, model), batches))


@case("misaligned sizes", "round the hidden width from 2731 up to 2752")
def hidden_2731(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=1024, layers=8, heads=16, vocab=16384, hidden=2752 if fixed else 2731)
    model, batches = language(s, shape, 8, 1024)
    return Program(training(model, _adamw(s, model), batches))


@case("index backward", "F.embedding instead of table[index]")
def index_backward(s: Setting, fixed: bool) -> Program:
    shape, batch, length = s.shape(width=1024, layers=4, heads=16, vocab=16384), s.pick(8, 2), s.pick(1024, 16)
    model = s.place(lambda: nets.Typed(shape, length, by_index=not fixed))
    types = torch.randint(0, 4, (batch, length), device=s.device)
    feed = ((ids, targets, types) for ids, targets in _ids(s, batch, length, shape.vocab))
    return Program(training(model, _adamw(s, model), feed))


@case("dense embedding gradient", "nn.Embedding(..., sparse=True)")
def dense_embedding_gradient(s: Setting, fixed: bool) -> Program:
    rows, width, batch = s.pick(4_000_000, 500), s.pick(256, 16), s.pick(16384, 8)
    table = nn.EmbeddingBag(rows, width, mode="sum", sparse=fixed, device=s.device)
    top = s.place(lambda: nets.Tower(s.pick(4096, 32), s.pick(5, 2), inner=width))
    sgd = torch.optim.SGD(itertools.chain(table.parameters(), top.parameters()), lr=1e-3)
    ids = [torch.randint(0, rows, (batch, s.pick(20, 3)), device=s.device) for _ in range(3)]
    feed, y = itertools.cycle(ids), torch.randn(batch, 8, device=s.device, dtype=torch.bfloat16)

    def step() -> None:
        top(table(next(feed)), y).backward()
        sgd.step()
        sgd.zero_grad(set_to_none=True)

    return Program(step)


# ---------------------------------------------------------------- memory


@case("gradient memsets", "zero_grad(set_to_none=True)")
def zero_grad_memset(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=2048, layers=12, heads=16, vocab=8192)
    model, batches = language(s, shape, 4, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, fused=s.cuda)

    def step() -> None:
        optimizer.zero_grad(set_to_none=fixed)
        model(*next(batches)).backward()
        optimizer.step()

    return Program(step)


@case("needless recompute", "drop checkpointing: the activations fit")
def recompute(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=1024, layers=12, heads=16, vocab=16384)
    model, batches = language(s, shape, 8, 1024, recompute=not fixed)
    return Program(training(model, _adamw(s, model), batches))


@case("weights cast every step", "keep the weights in bf16 instead of casting under autocast")
def autocast_weights(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=2048, layers=12, heads=16, vocab=8192)
    model, batches = language(s, shape, 8, 256, dtype=torch.bfloat16 if fixed else torch.float32)
    model.eval()

    @torch.no_grad()
    def step() -> None:
        for _ in range(4):
            with nullcontext() if fixed else torch.autocast(s.device, torch.bfloat16):
                model.trunk(next(batches)[0])

    return Program(step)


@case("weights streamed from the host", "keep the layers on the device")
def streamed_weights(s: Setting, fixed: bool) -> Program:
    shape = s.shape(width=2048, layers=12, heads=16, vocab=8192)
    model, batches = language(s, shape, 4, 1024)
    model.eval()
    away: list[dict[str, Tensor]] = [{} for _ in model.blocks]
    if not fixed:
        away = [{name: s.pinned(p.detach().cpu()) for name, p in block.named_parameters()} for block in model.blocks]

    @torch.no_grad()
    def step() -> None:
        x = model.tokens(next(batches)[0])
        for block, weights in zip(model.blocks, away, strict=True):
            if fixed:
                x = block(x)
                continue
            here = {name: w.to(s.device, non_blocking=True) for name, w in weights.items()}
            x = torch.func.functional_call(block, here, (x,))
        model.norm(x)

    return Program(step)


@contextmanager
def running(programs: list[Program]) -> Iterator[None]:
    """Ends what the programs started, whatever happened."""
    with ExitStack() as stack:
        for program in programs:
            stack.callback(program.close)
        yield
