"""Training steps through ``rl.optimize`` on one GPU: time, memory, what was tried; and how far recorded steps drift.

    python benchmarks/optimize_train.py --out OUT --total-s 200 --budget-s 75 --jobs 3
    python benchmarks/optimize_train.py --out OUT --only drift stock:vit-base-train-64

Each model is searched in a process of its own. Afterwards a plain loop (gradients cleared, forward, loss, backward,
AdamW) times eager, the result called the same way, and the result's own ``train_step``; ``stock:`` before a model
compiles it as anyone does and times that loop, for searches too short to get there. The drift is that of fifty
steps of GPT-2 from the same weights: eager beside eager, beside eager from weights one rounding away, and beside
recorded steps, with PyTorch's usual kernels and with deterministic ones; with it come linear layers of odd sizes,
plain and padded, forward and backward. Everything is written as it is found.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]
MARK = "RESULT "
DRIFT, STOCK = "drift", "stock:"
DEFAULT = (DRIFT, "bert-large-train-16x512", "vit-base-train-64", "resnet50-train-64-nhwc",
           f"{STOCK}vit-base-train-64", f"{STOCK}resnet50-train-64-nhwc", "gpt2-medium-train-8x512", "dlrm-train-4096",
           f"{STOCK}bert-large-train-16x512", "llama1b-train-4x1024", "dit-xl2-train-16")  # fmt: skip
ODD = ((4096, 1024, 50257), (8192, 1024, 30522), (4096, 1280, 51866), (8192, 479, 1024))
"""Rows, inputs and outputs of linear layers of odd sizes: GPT-2's, BERT's and Whisper's heads, a DLRM's layer."""
ROUNDS = 7


def main() -> None:
    asked = _arguments()
    if asked.table:
        print("\n".join(_table(asked.table)))
    elif asked.one:
        _child(asked)
    else:
        _parent(asked)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--total-s", type=float, default=200.0, help="Everything ends within this.")
    parser.add_argument("--budget-s", type=float, default=75.0, help="Of each search.")
    parser.add_argument("--only", nargs="*", default=list(DEFAULT))
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--table", type=Path, default=None, help="Only print what a file of results says.")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--lock", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


# The parent starts one process a part, and keeps what each has written even where it has to be ended.


def _parent(asked: argparse.Namespace) -> None:
    asked.out.mkdir(parents=True, exist_ok=True)
    began, logs = time.monotonic(), Path(tempfile.mkdtemp())
    waiting, running, done = list(asked.only), {}, {}
    while waiting or running:
        left_s = asked.total_s - (time.monotonic() - began)
        while waiting and len(running) < asked.jobs and left_s > 45:
            name = waiting.pop(0)
            running[name] = _started(name, asked, logs, min(asked.budget_s, left_s - 40))
        if left_s < 3 or not running:
            break
        for name, process in list(running.items()):
            if process.poll() is not None:
                del running[name]
                done[name] = _collected(logs / name, f"ended with {process.returncode}")
                _write(asked, done, began)
                print(f"{time.monotonic() - began:6.1f} s  {name}: {_line(done[name])}", flush=True)
        time.sleep(0.2)
    for name, process in running.items():
        process.kill()
        done[name] = _collected(logs / name, "out of time")
        print(f"{name}: {_line(done[name])}", flush=True)
    _write(asked, done | {name: {"error": "not started: out of time"} for name in waiting}, began)


def _started(name: str, asked: argparse.Namespace, logs: Path, budget_s: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-u", __file__, "--one", name, "--budget-s", str(budget_s), "--device", asked.device,
               "--lock", str(logs / "lock")]  # fmt: skip
    settings = {"TORCHINDUCTOR_COMPILE_THREADS": "4", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2",
                "RIDGELINE_CACHE": tempfile.mkdtemp()}  # fmt: skip
    if name == DRIFT:
        settings["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # deterministic products ask for it
    with (logs / name).open("w") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **settings})


def _collected(path: Path, otherwise: str) -> dict[str, Any]:
    lines = path.read_text(errors="replace").splitlines()
    found = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
    said = [line for line in lines if not line.startswith(MARK)]
    merged: dict[str, Any] = {} if found and found[-1].get("finished") else {"error": otherwise}
    for each in found:
        merged |= each
    return merged | {"log": "\n".join(said)[-12000:]}


def _write(asked: argparse.Namespace, done: dict[str, Any], began: float) -> None:
    document = {"spent_s": time.monotonic() - began, "budget_s": asked.budget_s, "jobs": asked.jobs, "parts": done}
    with gzip.open(asked.out / "optimize_train.json.gz", "wt", encoding="utf-8") as file:
        json.dump(document, file)


def _line(found: dict[str, Any]) -> str:
    if "loop" in found:
        shown = "  ".join(f"{who} {s * 1e3:.2f} ms" for who, s in found["loop"].items())
        return f"{shown}  {found['winner']}  memory {found['peak_bytes']}"
    if "distances" in found:
        return str(found["distances"])
    return f"{found.get('error')}: {found.get('log', '')[-600:]!r}"


def _table(path: Path) -> list[str]:
    """What was found, as Markdown."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        parts = json.load(file)["parts"]
    heads = ("model", "eager", "torch.compile", "result", "× eager", "kept", "memory, eager → result",
             "step: eager → result → with its optimizer", "searched")  # fmt: skip
    lines = [_cells(*heads), _cells(*["---"] * len(heads))]
    lines += [_row(name, found) for name, found in parts.items() if name != DRIFT and not name.startswith(STOCK)]
    stock = {name: found for name, found in parts.items() if name.startswith(STOCK)}
    lines += ["", *(f"{name}: {_line(found)}, compiled in {found.get('compile_s', 0):.0f} s"
                    for name, found in stock.items())]  # fmt: skip
    drift = parts.get(DRIFT, {})
    lines += ["", "| steps | farthest from eager's loss |", "|---|---|"]
    lines += [f"| {name} | {distance:.2e} |" for name, distance in drift.get("distances", {}).items()]
    lines += ["", "| rows × inputs × outputs | plain | padded | apart |", "|---|---|---|---|"]
    return lines + [_cells(f"{o['rows']} × {o['inputs']} × {o['outputs']}", f"{o['plain_ms']:.2f} ms",
                           f"{o['padded_ms']:.2f} ms", f"{o['apart']:.1e}") for o in drift.get("odd", [])]  # fmt: skip


def _cells(*values: str) -> str:
    return f"| {' | '.join(values)} |"


def _row(name: str, found: dict[str, Any]) -> str:
    receipt = found.get("receipt")
    if receipt is None:
        return _cells(name, "–", "–", "–", "–", found.get("error", ""), "–", "–", "–")
    stock_s, final_bytes = receipt["stock_s"], receipt["final_bytes"] or receipt["eager_bytes"]
    loop = found.get("loop", {})
    whole = " → ".join(f"{loop[who] * 1e3:.1f}" for who in ("eager", "result", "result, its optimizer") if who in loop)
    memory = "–" if not final_bytes else f"{receipt['eager_bytes'] / 1e9:.2f} → {final_bytes / 1e9:.2f} GB"
    times = [f"{s * 1e3:.1f}" if s else "–" for s in (receipt["eager_s"], stock_s, receipt["final_s"])]
    return _cells(name, *times, f"{receipt['speedup']:.2f}", receipt["winner"], memory, whole or "–",
                  f"{receipt['spent_s']:.0f} s")  # fmt: skip


# A child does one part.


def _child(asked: argparse.Namespace) -> None:
    try:
        (_drifted if asked.one == DRIFT else _stock if asked.one.startswith(STOCK) else _searched)(asked)
        _tell({"finished": True})
    except Exception as error:
        said = f"{type(error).__name__}: {error}"[:400]
        _tell({"error": said, "trace": traceback.format_exc()[-2500:], "finished": True})


def _tell(found: dict[str, Any]) -> None:
    print(MARK + json.dumps(found), flush=True)


def _searched(asked: argparse.Namespace) -> None:
    import optimize_models
    import torch

    import ridgeline as rl
    from ridgeline.optimizer import search as searching

    turn = optimize_models.Turn(asked.lock)
    work = optimize_models.built(asked.one, asked.device)
    searching.build = turn.around(searching.build)
    left_s = searching.Search.left_s
    searching.Search.left_s = lambda self: left_s(self) + turn.waited_s  # waiting for others is no searching
    _overheard(searching.Search)
    turn.take()
    turn.waited_s = 0.0
    began = time.perf_counter()
    parameters = [p for p in work["model"].parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-5)
    fast = rl.optimize(work["model"], work["args"], work["kwargs"], mode="train", optimizer=optimizer,
                       budget_s=asked.budget_s)  # fmt: skip
    receipt = fast.receipt
    _tell({"optimize_s": time.perf_counter() - began, "waited_s": turn.waited_s, "winner": receipt.winner,
           "receipt": receipt.to_dict(), "text": str(receipt)})  # fmt: skip
    _tell(_loop(work, fast, optimizer))
    _tell({"fallbacks": type(fast).fallbacks.fget(fast)})
    turn.give()


def _stock(asked: argparse.Namespace) -> None:
    """``torch.compile`` with default settings: seconds of forward and backward and of a whole step, beside eager's."""
    import optimize_models
    import torch

    from ridgeline.optimizer.loss import Loss

    turn = optimize_models.Turn(asked.lock)
    work = optimize_models.built(asked.one.removeprefix(STOCK), asked.device)
    model, loss = work["model"], Loss(None)
    compiled, began = torch.compile(model), time.perf_counter()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)

    def stepping(call: Any, updates: bool) -> Any:
        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            loss(call(*work["args"], **work["kwargs"])).backward()
            if updates:
                optimizer.step()

        return step

    stepping(compiled, updates=True)()
    _tell({"compile_s": time.perf_counter() - began})
    turn.take()
    ways = {f"{who}{what}": stepping(call, updates) for who, call in (("eager", model), ("torch.compile", compiled))
            for what, updates in (("", False), (", step", True))}  # fmt: skip
    for step in ways.values():
        _timed(step, 3)
    seconds = {who: statistics.median(_timed(step, 3) for _ in range(ROUNDS)) for who, step in ways.items()}
    _tell({"loop": seconds, "winner": "", "peak_bytes": {who: _peak(step) for who, step in ways.items()}})
    turn.give()


def _overheard(kind: Any) -> None:
    """Every verdict of a search is printed when it falls."""
    note, began = kind._note, time.perf_counter()

    def noted(self: Any, built: Any, status: str, reason: str, **shown: Any) -> None:
        note(self, built, status, reason, **shown)
        entry = self.entries[built.candidate.name]
        ms = f"{entry.measured_s * 1e3:.2f} ms" if entry.measured_s else ""
        gigabytes = f"{entry.peak_bytes / 1e9:.2f} GB" if entry.peak_bytes else ""
        print(f"{time.perf_counter() - began:6.1f} s  {entry.name}: {status} {ms} {gigabytes} "
              f"built in {entry.build_s or 0:.1f} s  {reason}", flush=True)  # fmt: skip

    kind._note = noted


def _loop(work: dict[str, Any], fast: Any, given: Any) -> dict[str, Any]:
    """Seconds of a whole step in a plain loop, and the most memory of each way; AdamW as anyone makes it, then ours."""
    import torch

    from ridgeline.optimizer.loss import Loss

    model, loss = work["model"], Loss(None)
    plain = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)

    def stepping(call: Any, optimizer: Any) -> Any:
        def step() -> Any:
            optimizer.zero_grad(set_to_none=True)
            value = loss(call(*work["args"], **work["kwargs"]))
            value.backward()
            optimizer.step()
            return value.detach()

        return step

    def whole() -> Any:
        return fast.train_step(*work["args"], **work["kwargs"])

    ways = {"eager": stepping(model, plain), "result": stepping(fast, plain), "result, its optimizer":
            stepping(fast, given)}  # fmt: skip
    if hasattr(model, "config"):  # its output has a loss, or one number
        ways["train_step"] = whole
    found: dict[str, list[float]] = {}
    peaks, failed = {}, {}
    for who, step in ways.items():
        try:
            for _ in range(3):
                step()
            peaks[who] = _peak(step)
            found[who] = []
        except Exception as error:
            failed[who] = f"{type(error).__name__}: {error}"[:300]
    for _ in range(ROUNDS):
        for who in found:
            found[who].append(_timed(ways[who], 3))
    loop = {who: statistics.median(seconds) for who, seconds in found.items()}
    return {"loop": loop, "peak_bytes": peaks, "loop_failed": failed}


def _timed(step: Any, num: int) -> float:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(num):
        step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / num


def _peak(step: Any) -> tuple[int, int] | None:
    """Most bytes allocated and reserved in a step."""
    import torch

    if not torch.cuda.is_available():
        return None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


# The drift.


def _odd(rows: int, inputs: int, outputs: int, device: str) -> dict[str, Any]:
    """Milliseconds of a linear layer forward and backward, plain and padded, the least of rounds in turns."""
    import torch

    from ridgeline.optimizer.padding import padded_linear

    layer = torch.nn.Linear(inputs, outputs, bias=False, device=device, dtype=torch.bfloat16)
    x = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(rows, outputs, device=device, dtype=torch.bfloat16)

    def plain() -> Any:
        return torch.autograd.grad(layer(x), (x, layer.weight), grad)

    def padded() -> Any:
        return torch.autograd.grad(padded_linear(x, layer.weight), (x, layer.weight), grad)

    ways: dict[str, Any] = {"plain_ms": plain, "padded_ms": padded}
    found = {who: 1e3 * min(_timed(way, 5) for _ in range(4)) for who, way in ways.items()}
    apart = max(float((a - b).norm() / b.norm()) for a, b in zip(padded(), plain(), strict=True))
    return {"rows": rows, "inputs": inputs, "outputs": outputs, **found, "apart": apart}


def _drifted(asked: argparse.Namespace) -> None:
    import optimize_models
    import torch

    small = asked.device == "cpu"
    turn = optimize_models.Turn(asked.lock)
    turn.take()
    _tell({"odd": [_odd(*(size // 16 if small else size for size in sizes), asked.device) for sizes in ODD]})
    turn.give()
    trails: dict[str, list[float]] = {}
    for exact in (False, True):
        torch.use_deterministic_algorithms(exact)
        for kind in ("eager", "eager again", "nudged", "recorded"):
            name = f"{kind}, deterministic" if exact else kind
            turn.take()
            trails[name] = _trail(kind, asked.device, small)
            turn.give()
            _tell({"trails": trails, "distances": _distances(trails)})
    torch.use_deterministic_algorithms(False)


def _distances(trails: dict[str, list[float]]) -> dict[str, float]:
    """The largest difference of a loss from eager's, relative to it."""
    found = {}
    for name, losses in trails.items():
        eager = trails["eager, deterministic" if name.endswith("deterministic") else "eager"]
        found[name] = max(abs(a - b) / abs(a) for a, b in zip(eager, losses, strict=True))
    return found


def _trail(kind: str, device: str, small: bool) -> list[float]:
    import torch
    import workloads  # noqa: F401  (lets transformers be imported beside a torchvision of another build)
    from transformers import GPT2Config, GPT2LMHeadModel

    from ridgeline.optimizer.graphed import graph_training
    from ridgeline.optimizer.optimized import Optimized, Plan, plain_step
    from ridgeline.optimizer.steps import GraphedUpdate
    from ridgeline.optimizer.tracking import _nudge

    width, depth, vocabulary = (64, 2, 128) if small else (768, 12, 50257)
    config = GPT2Config(n_layer=depth, n_embd=width, n_head=width // 64, vocab_size=vocabulary, resid_pdrop=0.0,
                        embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(config).to(device, torch.bfloat16).train()
    ids = torch.randint(0, 100, (2, 8) if small else (8, 256)).to(device)
    kwargs = {"input_ids": ids, "labels": ids, "use_cache": False}
    if kind == "nudged":
        _nudge(list(model.parameters()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    call, update = model, None
    if kind == "recorded":
        graphed = graph_training(model, (), kwargs, model, executor=_stand_in() if device == "cpu" else None)
        call = Optimized(model, [Plan(graphed.signature, graphed)], mode="train")
        update = GraphedUpdate(optimizer, graphed)
    losses = []
    for _ in range(50):
        losses.append(plain_step(call, optimizer, None, (), kwargs, update))
    if update is not None:
        print("replayed", graphed.replays, "updates", update.replays, update.misses, graphed.misses, flush=True)
    return [float(value) for value in losses]


def _stand_in() -> Any:
    sys.path.insert(0, str(HERE.parent / "tests" / "unit" / "optimizer"))
    from recorder import TapeExecutor

    return TapeExecutor()


if __name__ == "__main__":
    main()
