"""What the host looks at before a recorded decoding step starts, on any machine: microseconds, caches warm and cold.

    python benchmarks/decode_looks.py [--layers 32] [--rounds 60] [--plain]

A Llama of 32 tiny layers over a static cache is recorded by the tests' stand-in for CUDA graphs, whose replay does
nothing here. "Cold" means that 96 MB were touched before every call, as after a wait on a host that others use. On
Python 3.12 and later one question tells that no dictionary has changed; before, that answer is put in its place, so
that the rest is what a host with 3.12 does. ``--plain`` leaves the C helper out.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "unit" / "optimizer"))

import workloads  # noqa: F401  (lets transformers be imported beside a torchvision without its binary)
from decode_split import Clocked, Stages
from recorder import TapeExecutor

from ridgeline.engine import pytree as tree
from ridgeline.engine.drop_in import Optimized, Plan
from ridgeline.engine.guards import dict_version as version
from ridgeline.engine.guards import fast_path as lane
from ridgeline.engine.guards import native as glance
from ridgeline.engine.replay import inference as graphs
from ridgeline.engine.replay.inference import graph_inference

_ROOM = bytearray(96 << 20)


class Nothing:
    """A recording whose replay takes no time."""

    def replay(self) -> None:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])  # type: ignore[union-attr]
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--plain", action="store_true")
    asked = parser.parse_args()
    if asked.plain:
        glance.native.cache_clear()
        glance.native = lambda: None  # type: ignore[assignment]
    fast, kwargs, graphed = made(asked.layers)
    if not version.stillness.counts:
        type(version.stillness).now = lambda self: 0  # type: ignore[method-assign]
        version.stillness.counts = True
    gc.disable()
    with torch.no_grad():
        for _ in range(4):
            fast(**kwargs)
        print("told at a glance:", graphed._lane is not None)
        for name, before in (("warm", lambda: None), ("cold", touched)):
            print(name, {part: round(us, 1) for part, us in looks(fast, graphed, kwargs, before, asked.rounds).items()})


def made(layers: int) -> tuple[Any, dict[str, Any], Any]:
    """The model as ``optimize`` hands it out, the arguments of a call, and its recording."""
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64,
        vocab_size=64, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    cache = StaticCache(config=config, max_cache_len=32)
    with torch.no_grad():
        model(torch.randint(0, 64, (1, 8)), past_key_values=cache, use_cache=True)
    kwargs = {"input_ids": torch.randint(0, 64, (1, 1)), "position_ids": torch.full((1, 1), 8),
              "past_key_values": cache, "use_cache": True}  # fmt: skip
    graphed = graph_inference(model, (), kwargs, model, executor=TapeExecutor())
    for variant in graphed._variants:
        for take in (variant.home, *variant.loans):
            take.recording = Nothing()
    return Optimized(model, [Plan(graphed.signature, graphed)]), kwargs, graphed


def low(found: list[float]) -> float:
    """The lower quartile: others use this machine too."""
    return statistics.quantiles(found, n=4)[0]


def touched() -> None:
    """Everything else leaves the caches."""
    view = memoryview(_ROOM)
    view[::64] = bytes(len(_ROOM) // 64)


def looks(fast: Any, graphed: Any, kwargs: dict[str, Any], before: Callable[[], None], rounds: int) -> dict[str, float]:
    """Lower quartiles: until the launch, the whole call, and stages by name."""
    takes = [take for variant in graphed._variants for take in (variant.home, *variant.loans)]
    clocks = [Clocked(take.recording) for take in takes]
    for take, clock in zip(takes, clocks, strict=True):
        take.recording = clock
    until, whole = [], []
    for _ in range(rounds):
        before()
        began = time.perf_counter()
        fast(**kwargs)
        whole.append(time.perf_counter() - began)
        until.append(max(clock.at_s for clock in clocks) - began)
    found = {"until the launch": low(until) * 1e6, "whole": low(whole) * 1e6}
    for take, clock in zip(takes, clocks, strict=True):
        take.recording = clock.recording
    stages, (plan,) = Stages(), fast.plans
    places = [(type(plan.matcher), "fits"), (type(graphed.watch), "same"), (type(graphed.watch), "still"),
              (type(graphed), "_variant"), (tree.Piece, "held"), (lane.Lane, "take"), (graphs.Variant, "fits"),
              (graphs.Variant, "start"), (lane.Lane, "apart")]  # fmt: skip
    kept = [(owner, name, getattr(owner, name)) for owner, name in places]
    for owner, name, run in kept:
        setattr(owner, name, stages.timed(f"{owner.__name__}.{name}", run))
    for _ in range(rounds):
        before()
        fast(**kwargs)
    for owner, name, run in kept:
        setattr(owner, name, run)
    return found | {name: low(each) for name, each in stages.spent_us.items()}


if __name__ == "__main__":
    main()
