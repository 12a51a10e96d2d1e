"""Where the time of an optimized decoding step goes on a GPU: before the launch, in the graph, behind it.

    python benchmarks/decode_split.py --out OUT [--budget-s 40] [--layers 32]

One Hugging Face Llama 8B over a static cache goes through ``optimize``; then the recorded graph alone is timed with
events and its kernels are listed, the call is timed with the same cache, with new containers around it and in a row
without waiting, and tokens at several lengths are compared with eager's. Written to ``--out`` as it comes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ridgeline as rl
from ridgeline.bench.clock import device_events
from ridgeline.engine import pytree as tree
from ridgeline.engine.example_inputs import Inputs
from ridgeline.engine.guards.dict_version import stillness
from ridgeline.engine.guards.fast_path import Lane

LENGTH, PLACES = 2048, 2112
ROUNDS = 21


class Book:
    """Findings, on disk after each."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.path, self.found = out / "decode_split.json", {}

    def add(self, name: str, find: Callable[[], Any]) -> None:
        try:
            self.found[name] = find()
        except Exception as error:  # one question that fails leaves the others
            self.found[name] = f"{type(error).__name__}: {error}"[:400]
        self.path.write_text(json.dumps(self.found, indent=1))
        print(name, self.found[name], flush=True)


class Clocked:
    """A recording that notes when it is launched."""

    def __init__(self, recording: Any) -> None:
        self.recording, self.at_s = recording, 0.0

    def replay(self) -> None:
        self.at_s = time.perf_counter()
        self.recording.replay()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=40.0)
    parser.add_argument("--layers", type=int, default=32)
    asked = parser.parse_args()
    book = Book(asked.out)
    model, kwargs = made(asked.layers)
    fast = rl.optimize(model, (), kwargs, budget_s=asked.budget_s)
    book.add("receipt", lambda: {"winner": fast.receipt.winner, "eager_s": fast.receipt.eager_s,
                                 "final_s": fast.receipt.final_s, "text": str(fast.receipt)})  # fmt: skip
    look(book, model, fast, kwargs)


def look(book: Any, model: Any, fast: Any, kwargs: dict[str, Any]) -> None:
    """Where the time of a call goes, and whether its numbers are right; ``book`` keeps what is found."""
    inputs = Inputs((), kwargs)
    kept = [(tensor, tensor.clone()) for _, tensor in inputs.named()]

    def restore() -> None:
        for tensor, was in kept:
            tensor.copy_(was)

    with torch.no_grad():
        graphed = fast.plans[0].call
        for _ in range(4):  # the next is told at a glance
            fast(**kwargs)
            restore()
        book.add("watch", lambda: {"dictionaries counted": stillness.counts, "told at a glance": told(fast, kwargs),
                                   "host_us": host_us(fast, graphed, kwargs)})  # fmt: skip
        restore()
        book.add("graph", lambda: graph_alone(fitting(fast, graphed, kwargs).home.recording, restore))
        book.add("same cache", lambda: calls(fast, graphed, lambda: kwargs, restore))
        book.add("new containers", lambda: calls(fast, graphed, lambda: dict(inputs.reused().kwargs), restore))
        book.add("after eager", lambda: calls(fast, graphed, lambda: after_eager(model, kwargs, restore), restore))
        book.add("in a row", lambda: in_a_row(fast, kwargs, restore))
        book.add("each waited for, nothing between", lambda: one_by_one(fast, kwargs, restore))
        book.add("in place", lambda: in_place(fast, graphed, kwargs, restore))
        book.add("numbers", lambda: numbers(model, fast, inputs, restore))
        book.add("misses", lambda: {"replays": graphed.replays, "misses": graphed.misses, "eager": fast.fallbacks})


def told(fast: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call is known without being looked at in full."""
    lane = fast.plans[0].call._lane
    return lane is not None and lane.take((), kwargs) is not None


def host_us(fast: Any, graphed: Any, kwargs: dict[str, Any], num: int = 50) -> dict[str, float]:
    """Microseconds of what is looked at before a launch, one after another, caches warm."""
    (plan,) = fast.plans
    flat = plan.matcher.fits((), kwargs, fast.original, False)
    parts = {
        "arguments": lambda: plan.matcher.fits((), kwargs, fast.original, False),
        "model": graphed.watch.same,
        "addresses": graphed.watch.addressed,
        "variant": lambda: graphed._variant(flat),
    }
    lane = graphed._lane
    if lane is not None:
        parts |= {
            "at a glance": lambda: lane.take((), kwargs),
            "at a glance: surroundings": lane._around.same,
            "at a glance: arguments": lambda: lane._call.take((), kwargs),
            "at a glance: model": graphed.watch.glance.same,
        }
    found = {}
    for name, run in parts.items():
        began = time.perf_counter()
        for _ in range(num):
            run()
        found[name] = (time.perf_counter() - began) / num * 1e6
    return found


def fitting(fast: Any, graphed: Any, kwargs: dict[str, Any]) -> Any:
    """The recording at the addresses of this call: others may be of inputs that are gone."""
    (plan,) = fast.plans
    return graphed._variant(plan.matcher.fits((), kwargs, fast.original, False))


def made(layers: int) -> tuple[Any, dict[str, Any]]:
    """Llama 8B with random weights, and a call for one token over 2,048."""
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    config = LlamaConfig(
        hidden_size=4096, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=14336, vocab_size=128256, max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
        cache = StaticCache(config=config, max_cache_len=PLACES)
        for layer in range(layers):
            keys, values = torch.randn(2, 1, 8, LENGTH, 128).unbind(0)
            cache.update(keys, values, layer, {"cache_position": torch.arange(LENGTH)})
        position = torch.full((1, 1), LENGTH, dtype=torch.int64)
        kwargs = {"input_ids": torch.randint(0, 1000, (1, 1)), "position_ids": position, "past_key_values": cache,
                  "use_cache": True}  # fmt: skip
    torch.set_default_dtype(torch.float32)
    return model, kwargs


def graph_alone(recording: Any, restore: Callable[[], None]) -> dict[str, Any]:
    """Seconds of a replay by events, and its kernels: how many of each, and their time together."""
    times = []
    for _ in range(ROUNDS):
        restore()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        recording.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    restore()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        recording.replay()
        torch.cuda.synchronize()
    restore()
    events = device_events(prof)
    seconds: Counter[str] = Counter()
    for _, name, each_s in events:
        seconds[name[:60]] += each_s
    num = Counter(name[:60] for _, name, _ in events)
    events = sorted(events)
    row = [
        (name[:24], round((at - events[0][0]) * 1e-3, 2), round(each_s * 1e6, 2)) for at, name, each_s in events
    ]
    return {"s": statistics.median(times), "least_s": min(times), "num_kernels": len(events),
            "kernels": [(name, num[name], total_s) for name, total_s in seconds.most_common()],
            "in order, start and microseconds": row[:40] + row[-8:]}  # fmt: skip


def calls(
    fast: Any, graphed: Any, given: Callable[[], dict[str, Any]], restore: Callable[[], None]
) -> dict[str, float]:
    """Medians of a call that is waited for: the whole, and the host's part before the launch."""
    takes = [take for variant in graphed._variants for take in (variant.home, *variant.loans)]
    clocks = [Clocked(take.recording) for take in takes]
    for take, clock in zip(takes, clocks, strict=True):
        take.recording = clock
    whole, before = [], []
    try:
        for _ in range(ROUNDS):
            restore()
            kwargs = given()
            torch.cuda.synchronize()
            began = time.perf_counter()
            fast(**kwargs)
            torch.cuda.synchronize()
            whole.append(time.perf_counter() - began)
            before.append(max(clock.at_s for clock in clocks) - began)
    finally:
        for take, clock in zip(takes, clocks, strict=True):
            take.recording = clock.recording
        restore()
    return {"s": statistics.median(whole), "least_s": min(whole), "before_launch_s": statistics.median(before)}


def after_eager(model: Any, kwargs: dict[str, Any], restore: Callable[[], None]) -> dict[str, Any]:
    """The arguments, after a call that leaves nothing of ours in the host's caches."""
    model(**kwargs)
    restore()
    return kwargs


def in_a_row(fast: Any, kwargs: dict[str, Any], restore: Callable[[], None], num: int = 32) -> dict[str, float]:
    """Seconds a token when nobody waits between tokens."""
    times = []
    for _ in range(5):
        restore()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(num):
            fast(**kwargs)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / num)
    restore()
    return {"s": statistics.median(times), "least_s": min(times)}


def one_by_one(fast: Any, kwargs: dict[str, Any], restore: Callable[[], None], num: int = 32) -> dict[str, float]:
    """Seconds a token when each is waited for before the next is asked for, as whoever samples on the host does."""
    times = []
    for _ in range(3):
        restore()
        torch.cuda.synchronize()
        for _ in range(num):
            began = time.perf_counter()
            fast(**kwargs)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    restore()
    return {"s": statistics.median(times), "least_s": min(times)}


class Stages:
    """Microseconds of what is done before a launch, as it is done, and whether a watched dictionary had changed."""

    def __init__(self) -> None:
        self.spent_us: dict[str, list[float]] = {}
        self.moves: list[int] = []

    def timed(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            began, moves = time.perf_counter(), stillness._moves
            try:
                return run(*args, **kwargs)
            finally:
                self.spent_us.setdefault(name, []).append((time.perf_counter() - began) * 1e6)
                self.moves.append(stillness._moves - moves)

        return wrapped


def in_place(fast: Any, graphed: Any, kwargs: dict[str, Any], restore: Callable[[], None], num: int = 24) -> Any:
    """The stages of calls that are waited for, nothing between: medians, and how often dictionaries had changed."""
    stages = Stages()
    (plan,) = fast.plans
    variant = fitting(fast, graphed, kwargs)
    places = [(type(plan.matcher), "fits"), (type(graphed.watch), "same"), (type(graphed.watch), "addressed"),
              (type(graphed), "_variant"), (type(variant), "start"), (type(variant), "finish"),
              (type(graphed), "replay"), (type(graphed), "quick"), (tree.Piece, "held"), (Lane, "take"),
              (type(graphed.watch), "still"), (type(variant), "fits"), (Lane, "apart")]  # fmt: skip
    kept = [(owner, name, getattr(owner, name)) for owner, name in places]
    try:
        for owner, name, run in kept:
            setattr(owner, name, stages.timed(f"{owner.__name__}.{name}", run))
        restore()
        for _ in range(num):
            fast(**kwargs)
            torch.cuda.synchronize()
    finally:
        for owner, name, run in kept:
            setattr(owner, name, run)
        restore()
    medians = {name: statistics.median(found) for name, found in stages.spent_us.items()}
    return {"us": medians, "dictionaries changed": sum(stages.moves), "of": num}


def numbers(model: Any, fast: Any, inputs: Inputs, restore: Callable[[], None]) -> list[dict[str, Any]]:
    """The result and the lengths after a token, over full, short and nearly empty caches, beside eager's."""
    cache, found = inputs.kwargs["past_key_values"], []
    for length in (LENGTH, PLACES - 1, 300, 1):
        outcomes = []
        for call in (model, fast):
            restore()
            for layer in cache.layers:
                layer.cumulative_length.fill_(length)
            inputs.kwargs["position_ids"].fill_(length)
            logits = call(**inputs.kwargs).logits.double()
            outcomes.append(
                (logits, [int(layer.cumulative_length) for layer in cache.layers], cache.layers[-1].keys.double())
            )
        (a, lengths, keys), (b, ours, our_keys) = outcomes
        found.append(
            {
                "length": length,
                "rms": float((a - b).norm() / a.norm()),
                "same_token": bool(a.argmax() == b.argmax()),
                "lengths": lengths == ours == [length + 1] * len(ours),
                "keys_rms": float((keys - our_keys).norm() / keys.norm()),
            }
        )
    restore()
    return found


if __name__ == "__main__":
    main()
