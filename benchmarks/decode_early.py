"""What a decoding step gains from early starts: Llama 8B by hand, one way at a time.

    python benchmarks/decode_early.py --out OUT [--budget-s 60] [--layers 32]

The step is the one that ``optimize`` records (products with norms, gates and sums inside, keys turned into a static
cache, shared attention), built from random weights. Every way is recorded as a CUDA graph, its logits are compared bit
for bit with those of the first way, and replays of all are timed in turns. Written to ``--out`` as it comes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgeline.bench.clock import device_events
from ridgeline.kernels import decode_attention, launcher, rms_norm
from ridgeline.kernels.cache_append.op import rope_append
from ridgeline.kernels.linear import config as products_config
from ridgeline.kernels.linear import op as products
from ridgeline.optimizer.rewrites.attention.decode import attended
from ridgeline.optimizer.rewrites.linear.few_rows import product

DEVICE = "cuda"
HIDDEN, HEADS, KEY_HEADS, DIM, INNER, VOCABULARY, PLACES, LENGTH = 4096, 32, 8, 128, 14336, 128256, 2112, 2048


@dataclass(frozen=True, slots=True)
class Way:
    """How a step is recorded: what starts early, when products let go of their successors, up to which weights."""

    name: str
    products: bool = True
    attention: bool = False
    early: int = 1
    early_bytes: int = products_config.EARLY_WEIGHT_BYTES


WAYS = (
    Way("products early"),
    Way("nothing early", products=False),
    Way("attention early", attention=True),
    Way("all early, products late to let go", attention=True, early=2),
    Way("all early, gates too", attention=True, early_bytes=256 << 20),
    Way("all early, gates too, late to let go", attention=True, early=2, early_bytes=256 << 20),
)


class Step:
    """Weights and caches of a model, and a token through it."""

    def __init__(self, layers: int) -> None:
        def weight(*shape: int) -> Tensor:
            return torch.empty(*shape, device=DEVICE, dtype=torch.bfloat16).normal_(std=shape[-1] ** -0.5)

        torch.manual_seed(0)
        self.layers = [
            (weight(HIDDEN + 2 * KEY_HEADS * DIM, HIDDEN), weight(HIDDEN, HIDDEN), weight(2 * INNER, HIDDEN),
             weight(HIDDEN, INNER), torch.ones(HIDDEN, device=DEVICE, dtype=torch.bfloat16))
            for _ in range(layers)
        ]  # fmt: skip
        self.caches = [weight(2, 1, KEY_HEADS, PLACES, DIM).unbind(0) for _ in range(layers)]
        self.kept = [tuple(part.clone() for part in cache) for cache in self.caches]
        self.head, self.norm = weight(VOCABULARY, HIDDEN), torch.ones(HIDDEN, device=DEVICE, dtype=torch.bfloat16)
        self.x = weight(1, 1, HIDDEN) * HIDDEN**0.5
        self.place = torch.tensor([LENGTH], device=DEVICE)
        self.seen = torch.tensor([LENGTH + 1], device=DEVICE)
        angles = torch.rand(1, 1, DIM, device=DEVICE)
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def run(self, way: Way) -> Tensor:
        x = self.x
        for at, ((qkv, out, both, down, norm), (keys, values)) in enumerate(zip(self.layers, self.caches, strict=True)):
            wide = product(x, qkv, None, norm, None, 1e-5, 0.0, "none", False, way.products and at > 0)
            q, k, v = wide.view(1, 1, -1, DIM).transpose(1, 2).split([HEADS, KEY_HEADS, KEY_HEADS], 1)
            q = rope_append(keys, values, self.place, q, k, v, self.cos, self.sin, False)
            attend = attended if way.attention else _attended
            seen = attend(q, keys, values, None, None, False, self.seen).transpose(1, 2).reshape(1, 1, -1)
            x = product(seen, out, None, None, x, 0.0, 0.0, "none", False, way.products)
            inner = product(x, both, None, norm, None, 1e-5, 0.0, "silu", True, way.products)
            x = product(inner, down, None, None, x, 0.0, 0.0, "none", False, way.products)
        return product(rms_norm(x, self.norm, 1e-5), self.head, None, None, None, 0.0, 0.0, "none", False, way.products)


    def at(self, length: int, replay: Callable[[], None], logits: Tensor) -> Tensor:
        """The logits of a token behind so many; caches are as they were at first, since every step writes into them."""
        for cache, was in zip(self.caches, self.kept, strict=True):
            for part, before in zip(cache, was, strict=True):
                part.copy_(before)
        self.place.fill_(length)
        self.seen.fill_(length + 1)
        replay()
        torch.cuda.synchronize()
        return logits.clone()


def _attended(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: Any, is_key_mask: bool, lengths: Tensor) -> Tensor:
    return decode_attention(q, k, v, None, lengths)


@contextmanager
def set_to(way: Way) -> Iterator[None]:
    """The library's own constants as a way has them."""
    kept = products.EARLY, products_config.EARLY_WEIGHT_BYTES
    products.EARLY, products_config.EARLY_WEIGHT_BYTES = way.early, way.early_bytes
    launcher.forget_plans()
    try:
        yield
    finally:
        products.EARLY, products_config.EARLY_WEIGHT_BYTES = kept
        launcher.forget_plans()


def recorded(step: Step, way: Way) -> tuple[Any, Tensor]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with set_to(way), torch.no_grad():
        with torch.cuda.stream(stream), launcher.rehearsing():
            step.run(way)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step.run(way)
    return graph, logits


def replayed_s(graph: Any, num: int = 8) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(num):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3 / num


def timeline(graph: Any, num: int = 30) -> list[tuple[str, float, float]]:
    """Name, start and length in microseconds of the first kernels of a replay."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    events = device_events(profile)
    first = events[0][0]
    return [(name[:24], round((at - first) * 1e-3, 2), round(each_s * 1e6, 2)) for at, name, each_s in events[:num]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=60.0)
    parser.add_argument("--layers", type=int, default=32)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "layers": asked.layers, "ways": {}}

    def left_s() -> float:
        return asked.budget_s - (time.monotonic() - began)

    def save() -> None:
        with gzip.open(asked.out / "decode_early.json.gz", "wt") as file:
            json.dump(found, file)

    step = Step(asked.layers)
    graphs = _checked(step, found, lambda: left_s() > 12)
    save()
    rounds: dict[str, list[float]] = {name: [] for name in graphs}
    while left_s() > 6 and len(rounds["products early"]) < 25:
        for name in [*graphs] if len(rounds["products early"]) % 2 else reversed([*graphs]):
            rounds[name].append(replayed_s(graphs[name]))
    for name, times in rounds.items():
        found["ways"][name] |= {"s": statistics.median(times), "least_s": min(times), "num": len(times)}
        print(f"{name:44} {statistics.median(times) * 1e3:.4f} ms  least {min(times) * 1e3:.4f}", flush=True)
    save()
    best = min(graphs, key=lambda name: statistics.median(rounds[name]))
    for name in dict.fromkeys(("nothing early", "products early", "attention early", best)):
        if name in graphs:
            found["ways"][name]["timeline"] = timeline(graphs[name])
    save()
    print(f"best: {best}; {time.monotonic() - began:.1f} s", flush=True)


def _checked(step: Step, found: dict[str, Any], goes_on: Callable[[], bool]) -> dict[str, Any]:
    """Recordings of all ways whose logits are those of the first, bit for bit, at two lengths."""
    graphs: dict[str, Any] = {}
    meant: list[Tensor] = []
    for way in WAYS:
        if not goes_on():
            break
        try:
            graph, logits = recorded(step, way)
            results = [step.at(length, graph.replay, logits) for length in (LENGTH, 300, LENGTH)]
            meant = meant or results
            off = max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(results, meant))
            bits = all(map(torch.equal, results, meant))
            right = (bits if way.products else off < 0.02) and bool(results[0].isfinite().all())
            found["ways"][way.name] = {"right": right, "bits": bits, "off": off}
            print(f"{way.name:44} {'right' if right else 'WRONG'}  {off:.2e}", flush=True)
            if right:
                graphs[way.name] = graph
        except Exception as error:  # one way that fails leaves the others
            found["ways"][way.name] = {"error": f"{type(error).__name__}: {error}"[:400]}
            print(way.name, found["ways"][way.name], flush=True)
    return graphs


if __name__ == "__main__":
    main()
