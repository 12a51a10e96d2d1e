"""Recorded calls on a real GPU: the adversarial models, training, caches, the host's cost of a replay, and memory.

    python benchmarks/optimize_run_check.py --out results [--budget-s 90] [--device cpu]

With ``--device cpu`` everything but the timings runs with the stand-in of the unit tests, in small.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import itertools
import json
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "unit" / "optimizer")]

import torch
import training_checks
from adversarial import CASES
from compare import check
from recorder import TapeExecutor
from torch import nn

from ridgeline.engine.capture.cuda_graph import CudaExecutor
from ridgeline.engine.drop_in import Optimized, Plan, plain_step
from ridgeline.engine.replay.inference import graph_inference, graph_training
from ridgeline.engine.replay.step import GraphedUpdate
from ridgeline.errors import NotGraphable


class Log:
    """Results as they come, on disk after each."""

    def __init__(self, folder: Path, budget_s: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "optimize_run_check.json.gz"
        self.rows: list[dict[str, Any]] = []
        self.began = time.perf_counter()
        self.budget_s = budget_s

    def spent(self) -> bool:
        return time.perf_counter() - self.began > self.budget_s

    def run(self, group: str, name: str, work: Callable[[], Any]) -> None:
        row: dict[str, Any] = {"group": group, "name": name}
        if self.spent():
            row["skipped"] = True
        else:
            began = time.perf_counter()
            try:
                row["result"] = work()
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"
                row["trace"] = traceback.format_exc()[-2500:]
            row["wall_s"] = round(time.perf_counter() - began, 3)
        self.rows.append(row)
        self.path.write_bytes(gzip.compress(json.dumps(self.rows, default=str).encode()))
        said = row.get("error") or row.get("result") or "skipped"
        print(group, "|", name, "|", said, f"| {row.get('wall_s')} s", flush=True)


def healthy(at: Any) -> None:
    """CUDA is usable after whatever was tried: random numbers, allocation, another recording."""
    if at.device.type != "cuda":
        return
    torch.cuda.synchronize()
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.manual_seed(5)
    first = torch.rand(8, device="cuda")
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(8, device="cuda"))
    torch.empty(1 << 24, device="cuda").zero_()


def host_cost(at: Any, call: Callable[[], Any], num: int = 300) -> float:
    """Seconds the host spends in a call when it never waits."""
    for _ in range(5):
        call()
    sync(at)
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(num // 10):
            call()
        best = min(best, (time.perf_counter() - began) / (num // 10))
        sync(at)
    return best


def device_time(at: Any, call: Callable[[], Any], num: int = 20) -> float:
    for _ in range(3):
        call()
    sync(at)
    began = time.perf_counter()
    for _ in range(num):
        call()
    sync(at)
    return (time.perf_counter() - began) / num


def sync(at: Any) -> None:
    if at.device.type == "cuda":
        torch.cuda.synchronize()


def recording(model: nn.Module, at: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    graphed = graph_inference(model, args, kwargs, model, executor=at.executor() if at.fake else None)
    return Optimized(model, [Plan(graphed.signature, graphed)]), graphed


# --- groups ---------------------------------------------------------------------------------------------------------


def adversarial(log: Log, at: Any) -> None:
    for case in CASES:
        def work(case: Any = case) -> str:
            try:
                return check(case, at.device, at.executor)
            finally:
                healthy(at)

        log.run("adversarial", case.name, work)


def training(log: Log, at: Any) -> None:
    for one in training_checks.CHECKS:
        def work(one: Any = one) -> str:
            try:
                one(at)
            finally:
                healthy(at)
            return "as eager"

        log.run("training", one.__name__, work)


def recovery(log: Log, at: Any) -> None:
    """Captures that fail in the middle leave CUDA usable, and the next recording works."""

    class Sneaky(nn.Module):
        """Waits for the device in a way that only a capture notices."""

        def __init__(self, how: str) -> None:
            super().__init__()
            self.inner, self.how, self.always = nn.Linear(8, 8), how, False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x) + torch.rand_like(x)
            if torch._C._cuda_isCurrentStreamCapturing() or self.always:
                if self.how == "item":
                    y = y * y.sum().item()
                elif self.how == "synchronize":
                    torch.cuda.synchronize()
                elif self.how == "raise":
                    raise ValueError("in the middle")
                elif self.how == "to cpu":
                    y = y + y.cpu().to(x.device)
            return y

    def work(how: str) -> str:
        model = Sneaky(how).to(at.device)
        x = torch.randn(4, 8, device=at.device)
        said = ""
        for always in (True, False):  # in every call, or only in a capture, so that the capture itself is what fails
            model.always = always
            try:
                graph_inference(model, (x,), {}, model, executor=at.executor())
                raise AssertionError("was recorded")
            except NotGraphable as error:
                said += f" | {error}"
            healthy(at)
        plain = nn.Linear(8, 8).to(at.device)
        fast, graphed = recording(plain, at, x)
        with torch.no_grad():
            assert torch.equal(fast(x), plain(x))
        assert graphed.replays == 1
        return said

    for how in ("item", "synchronize", "raise", "to cpu"):
        if not at.fake:
            log.run("recovery", how, lambda how=how: work(how))


def llama(at: Any, layers: int, hidden: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_hidden_layers=layers, hidden_size=hidden, intermediate_size=int(hidden * 3.5) // 64 * 64,
                         num_attention_heads=max(2, hidden // 128), num_key_value_heads=max(2, hidden // 512),
                         vocab_size=128256 if hidden == 4096 else 512, head_dim=min(128, hidden // 2))  # fmt: skip
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(at.device), torch.no_grad():
            torch.manual_seed(0)
            return LlamaForCausalLM(config).to(at.device).eval()
    finally:
        torch.set_default_dtype(before)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


def static_cache(model: Any, at: Any, length: int) -> Any:
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=length)
    c = model.config
    cache.early_initialization(1, c.num_key_value_heads, c.head_dim, torch.bfloat16, at.device)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
        layer.cumulative_length.fill_(length - 20)
    return cache


def rewind(cache: Any, length: int) -> None:
    for layer in cache.layers:
        layer.cumulative_length.fill_(length)


def decode(log: Log, at: Any) -> None:
    sizes = (32, 4096, 2048) if at.device.type == "cuda" else (2, 64, 32)
    layers, hidden, length = sizes
    model = llama(at, layers, hidden)
    ids = torch.randint(0, 500, (1, 1), device=at.device)

    def static() -> dict[str, Any]:
        torch.manual_seed(1)
        mine = static_cache(model, at, length)
        torch.manual_seed(1)
        theirs = static_cache(model, at, length)
        torch.manual_seed(1)
        third = static_cache(model, at, length)
        began = time.perf_counter()
        before = torch.cuda.memory_reserved() if at.device.type == "cuda" else 0
        fast, graphed = recording(model, at, ids, past_key_values=mine, use_cache=True)
        took = time.perf_counter() - began
        after = torch.cuda.memory_reserved() if at.device.type == "cuda" else 0
        same = []
        with torch.no_grad():
            for step in range(4):
                token = torch.full_like(ids, 7 + step)
                a = fast(token, past_key_values=mine, use_cache=True)
                b = model(token, past_key_values=theirs, use_cache=True)
                c = model(token, past_key_values=third, use_cache=True)
                pairs = list(zip(mine.layers, theirs.layers))
                same.append({"logits": apart(a.logits, b.logits), "eager again": apart(c.logits, b.logits),
                             "keys": max(apart(x.keys, y.keys) for x, y in pairs),
                             "place": int(pairs[0][0].cumulative_length - pairs[0][1].cumulative_length)})  # fmt: skip
                assert a.past_key_values is mine
            found = {"same": same, "replays": graphed.replays, "misses": graphed.misses, "record_s": took,
                     "reserved_more_bytes": after - before}  # fmt: skip
            if at.device.type == "cuda":
                def one(m: Any, cache: Any) -> Callable[[], Any]:
                    def call() -> None:
                        rewind_fast(cache)
                        m(ids, past_key_values=cache, use_cache=True)
                    return call
                def rewind_fast(cache: Any) -> None:
                    torch._foreach_zero_([layer.cumulative_length for layer in cache.layers])
                found["eager_s"] = device_time(at, one(model, theirs))
                found["graphed_s"] = device_time(at, one(fast, mine))
                found["graphed_host_s"] = host_cost(at, one(fast, mine), 100)
                signature = graphed.signature
                found["watch_s"] = host_cost(at, graphed.watch.same, 1000)
                from ridgeline.engine.signature import Signature
                kw = {"past_key_values": mine, "use_cache": True}
                found["signature_s"] = host_cost(at, lambda: Signature.of((ids,), kw, model, grad=False), 300)
                del signature
        return found

    def dynamic() -> dict[str, Any]:
        from transformers import DynamicCache

        def cache() -> Any:
            torch.manual_seed(3)
            made = DynamicCache(config=model.config)
            c = model.config
            for i in range(layers):
                shape = (1, c.num_key_value_heads, 24, c.head_dim)
                made.update(torch.randn(shape, device=at.device, dtype=torch.bfloat16),
                            torch.randn(shape, device=at.device, dtype=torch.bfloat16), i)  # fmt: skip
            return made

        fast, graphed = recording(model, at, ids, past_key_values=cache(), use_cache=True)
        same = []
        with torch.no_grad():
            kept = []
            for step in range(3):
                token = torch.full_like(ids, 7 + step)
                mine, theirs = cache(), cache()
                a = fast(token, past_key_values=mine, use_cache=True)
                b = model(token, past_key_values=theirs, use_cache=True)
                kept.append((a, b))
            for a, b in kept:
                pairs = list(zip(a.past_key_values.layers, b.past_key_values.layers))
                same.append({"logits": apart(a.logits, b.logits), "keys": max(apart(x.keys, y.keys) for x, y in pairs),
                             "values": max(apart(x.values, y.values) for x, y in pairs)})  # fmt: skip
                assert a.past_key_values.get_seq_length() == 25
        return {"same": same, "replays": graphed.replays, "misses": graphed.misses}

    def prefill() -> dict[str, Any]:
        tokens = torch.randint(0, 500, (1, 64 if at.device.type == "cuda" else 8), device=at.device)
        fast, graphed = recording(model, at, tokens, use_cache=True)
        with torch.no_grad():
            a, b = fast(tokens, use_cache=True), model(tokens, use_cache=True)
        told = graphed._studio._told
        return {"apart": apart(a.logits, b.logits), "told": told, "cache": type(a.past_key_values).__name__,
                "length": a.past_key_values.get_seq_length(), "replays": graphed.replays}  # fmt: skip

    def generate() -> dict[str, Any]:
        fast, graphed = recording(model, at, ids, past_key_values=static_cache(model, at, length), use_cache=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            a = fast.generate(ids.expand(1, 4).contiguous(), max_new_tokens=8, do_sample=False, pad_token_id=0)
            b = model.generate(ids.expand(1, 4).contiguous(), max_new_tokens=8, do_sample=False, pad_token_id=0)
        return {"same": torch.equal(a, b), "replays": graphed.replays, "fallbacks": len(fast.fallbacks)}

    log.run("decode", "static cache", static)
    log.run("decode", "dynamic cache", dynamic)
    log.run("decode", "prefill", prefill)
    log.run("decode", "generate", generate)


def compiled(log: Log, at: Any) -> None:
    """Recordings of compiled calls: the compiled code is what is recorded."""

    def work(training: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 256)).to(at.device)
        x = torch.randn(64, 256, device=at.device)
        call = torch.compile(model)
        executor = at.executor() if at.fake else None
        if training:
            graphed = graph_training(call, (x,), {}, model, executor=executor)
            fast = Optimized(model, [Plan(graphed.signature, graphed)], mode="train")
            fast(x).square().mean().backward()
            mine = model[0].weight.grad.clone()
            model.zero_grad()
            model(x).square().mean().backward()
            return {"apart": apart(mine, model[0].weight.grad), "replays": graphed.replays}
        inference = graph_inference(call, (x,), {}, model, executor=executor)
        fast = Optimized(model, [Plan(inference.signature, inference)])
        with torch.no_grad():
            return {"apart": apart(fast(x), model(x)), "replays": inference.replays,
                    "eager_s": device_time(at, lambda: model(x), 100),
                    "compiled_s": device_time(at, lambda: call(x), 100),
                    "graphed_s": device_time(at, lambda: fast(x), 100)}  # fmt: skip

    if not at.fake:
        log.run("compiled", "inference", lambda: work(False))
        log.run("compiled", "training", lambda: work(True))


def costs(log: Log, at: Any) -> None:
    def host(width: int, depth: int) -> dict[str, float]:
        model = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)]).to(at.device).eval()
        x = torch.randn(16, width, device=at.device)
        fast, graphed = recording(model, at, x)
        moving = itertools.cycle([torch.randn_like(x) for _ in range(7)])
        with torch.no_grad():
            found = {"eager_host_s": host_cost(at, lambda: model(x)), "graphed_host_s": host_cost(at, lambda: fast(x)),
                     "watch_s": host_cost(at, graphed.watch.same, 1000)}  # fmt: skip
            if at.device.type == "cuda":
                found["graphed_moving_host_s"] = host_cost(at, lambda: fast(next(moving)))
                flat = graphed.matcher.fits((x,), {}, model, False)
                found["fits_s"] = host_cost(at, lambda: graphed.matcher.fits((x,), {}, model, False))
                found["replay_s"] = host_cost(at, lambda: graphed.replay(flat))
                take = graphed._variants[-1].home
                found["graph_launch_s"] = host_cost(at, take.recording.replay)
                found["fill_s"] = host_cost(at, lambda: graphed._variants[-1].statics.fill([x]))
                found["copies_s"] = host_cost(at, take.copies)
        return found

    log.run("host cost", "one layer", lambda: host(64, 1))
    log.run("host cost", "fifty layers", lambda: host(64, 50))

    def large() -> dict[str, float]:
        width = 4096 if at.device.type == "cuda" else 600
        model = nn.Sequential(nn.Linear(width, width), nn.GELU()).to(at.device).eval()
        x = torch.randn(8192 if at.device.type == "cuda" else 500, width, device=at.device)
        fast, _ = recording(model, at, x)
        other = x.clone()
        with torch.no_grad():
            kept = [fast(x) for _ in range(4)]
            assert all(torch.equal(a, kept[0]) for a in kept)
            found = {"eager_s": device_time(at, lambda: model(x)),
                     "graphed_same_input_s": device_time(at, lambda: fast(x)),
                     "graphed_other_input_s": device_time(at, lambda: fast(other))}  # fmt: skip

            def loop() -> None:
                for _ in range(4):
                    out = fast(x)
                    del out
            def held() -> None:
                for _ in range(4):
                    out = fast(x)
                out.data_ptr()
            found["dropped_s"], found["rebound_s"] = device_time(at, loop, 5) / 4, device_time(at, held, 5) / 4
        return found

    log.run("memory traffic", "large inputs and outputs", large)


def step_cost(log: Log, at: Any) -> None:
    def gpt(depth: int, width: int) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(n_layer=depth, n_embd=width, n_head=width // 64, vocab_size=50257 if width > 64 else 128,
                            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
        torch.manual_seed(0)
        return GPT2LMHeadModel(config).to(at.device, torch.bfloat16).train()

    def work() -> dict[str, Any]:
        cuda = at.device.type == "cuda"
        size = (12, 768, 8, 256) if cuda else (1, 64, 2, 8)
        ids = torch.randint(0, 100, size[2:], device=at.device)
        found: dict[str, Any] = {}
        losses = []
        for kind in ("eager", "eager again", "graphed", "whole"):
            model = gpt(*size[:2])
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
            run: Any = model
            if kind in ("graphed", "whole"):
                began = time.perf_counter()
                executor = at.executor() if at.fake else None
                graphed = graph_training(model, (ids,), {"labels": ids}, model, executor=executor)
                run = Optimized(model, [Plan(graphed.signature, graphed)], mode="train")
                found["record_s"] = time.perf_counter() - began
            update = GraphedUpdate(optimizer, graphed) if kind == "whole" else None
            trail = []

            def step(run: Any = run, optimizer: Any = optimizer, trail: Any = trail, update: Any = update) -> None:
                trail.append(plain_step(run, optimizer, None, (ids,), {"labels": ids}, update))

            for _ in range(4):
                step()
            sync(at)
            if cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            if cuda:
                found[f"{kind}_s"] = device_time(at, step, 10)
                found[f"{kind}_peak_bytes"] = torch.cuda.max_memory_allocated()
                found[f"{kind}_reserved_bytes"] = torch.cuda.max_memory_reserved()
            losses.append([float(v) for v in trail])
            del model, optimizer, run, step
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
        found["losses"] = losses
        found["track"] = [max(abs(a - b) / abs(a) for a, b in zip(losses[0], other)) for other in losses[1:]]
        found["pool_bytes"] = graphed.pool_bytes()
        found["replays"], found["misses"] = (graphed.replays, update.replays), update.misses
        return found

    log.run("training step", "gpt2", work)


def threads(log: Log, at: Any) -> None:
    import threading

    def work() -> str:
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]).to(at.device).eval()
        inputs = [torch.randn(64, 256, device=at.device) for _ in range(4)]
        fast, graphed = recording(model, at, inputs[0])
        wrong: list[str] = []

        def run(i: int) -> None:
            stream = torch.cuda.Stream() if at.device.type == "cuda" else None
            sync(at)
            with torch.no_grad(), torch.cuda.stream(stream) if stream else torch.no_grad():
                expected = model(inputs[i])
                for _ in range(50):
                    got = fast(inputs[i])
                    if not torch.allclose(got, expected, rtol=1e-5, atol=1e-5):
                        wrong.append(str(i))

        workers = [threading.Thread(target=run, args=(i,)) for i in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not wrong, wrong
        assert graphed.replays == 200
        return "as eager"

    log.run("threads", "four threads on four streams", work)


GROUPS: dict[str, Callable[[Log, Any], None]] = {
    "adversarial": adversarial, "training": training, "recovery": recovery, "costs": costs, "threads": threads,
    "compiled": compiled, "step": step_cost, "decode": decode,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=90.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--groups", default=",".join(GROUPS))
    chosen = parser.parse_args()
    device = torch.device(chosen.device, 0) if chosen.device == "cuda" else torch.device(chosen.device)
    fake = device.type != "cuda"
    torch.backends.cuda.matmul.allow_tf32 = False
    executor: Any = TapeExecutor if fake else (lambda: CudaExecutor(device))
    at = SimpleNamespace(device=device, executor=executor, exact=fake, fake=fake)
    log = Log(chosen.out, chosen.budget_s)
    for name in re.split(",", chosen.groups):
        try:
            GROUPS[name](log, at)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            log.rows.append({"group": name, "error": said, "trace": traceback.format_exc()})
            print(name, "failed:", error, flush=True)
    failed = [row for row in log.rows if "error" in row]
    log.run("summary", "all", lambda: {"rows": len(log.rows), "failed": [r.get("name") or r["group"] for r in failed]})


if __name__ == "__main__":
    main()
