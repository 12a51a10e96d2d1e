"""What a recorded training step reserves beside an eager one, allocation by allocation, on one GPU.

    python benchmarks/train_memory.py --out OUT --only vit-base-train-64 dlrm-train-4096 --total-s 60
    python benchmarks/train_memory.py --table OUT/train_memory.json.gz

Forward and backward of a model as it is written: eager, recorded into segments as ever, and recorded into ranges that
grow. Of each: the most that is allocated and reserved in a step, what the recording's pool holds and what lies outside
of it, segment by segment, and every allocation while it ran or was recorded, so that another way to place them can be
tried without a device. Gradients are compared with eager's, number by number.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]
import optimize_train

DEFAULT = ("vit-base-train-64", "dlrm-train-4096", "t5-base-train-8x512", "resnet50-train-64-nhwc")
WAYS = {"eager": None, "segments": False, "growing": True}
EVENTS = 200_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--only", nargs="*", default=list(DEFAULT))
    parser.add_argument("--total-s", type=float, default=60.0, help="No model is begun after this.")
    parser.add_argument("--table", type=Path, default=None, help="Only print what a file of results says.")
    asked = parser.parse_args()
    each_model(asked, "train_memory.json.gz", _measured, _table)


def each_model(
    asked: argparse.Namespace, name: str, measured: Callable[[str, dict[str, Any]], None],
    table: Callable[[dict[str, Any]], list[str]],
) -> None:  # fmt: skip
    """Every model by itself, written as it goes; or what a file of before says."""
    if asked.table:
        with gzip.open(asked.table, "rt", encoding="utf-8") as file:
            print("\n".join(table(json.load(file))))
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    began, found = time.monotonic(), {}
    for model in asked.only:
        if time.monotonic() - began > asked.total_s:
            found[model] = {"error": "not started: out of time"}
            continue
        found[model] = {}
        try:
            measured(model, found[model])
        except Exception as error:
            found[model]["error"] = f"{type(error).__name__}: {error}"[:400] + traceback.format_exc()[-1500:]
        with gzip.open(asked.out / name, "wt", encoding="utf-8") as file:
            json.dump(found, file)
        print(f"{time.monotonic() - began:6.1f} s\n" + "\n".join(table({model: found[model]})), flush=True)


def _measured(name: str, found: dict[str, Any]) -> None:
    """Every way of a model; what one leaves is given back before the next."""
    from ridgeline.engine.capture import cuda_graph as executor

    work = optimize_train._built(name, "cuda")
    model, reference = work["model"], None
    for way, grows in WAYS.items():
        optimize_train._freed()
        call, made = model, {}
        with _history() as events:
            if grows is not None:
                with executor.growing(grows), _recordings() as recordings:
                    call = _graphed(work)
                made = {"recordings": recordings, "pool_bytes": call.pool_bytes(), "misses": call.misses}
            found[way] = made | _stepped(work, call)
            found[way]["segments"] = _segments(call)
        found[way]["events"] = events
        reference = reference or _gradients(work, call)
        grads = _gradients(work, call)  # of eager once more: sums whose order is left to chance differ by themselves
        found[way]["apart"] = _apart(grads, reference)
        del call, grads


def _graphed(work: dict[str, Any]) -> Any:
    from ridgeline.engine.replay.training import graph_training

    return graph_training(work["model"], work["args"], work["kwargs"], work["model"], loss=work["loss"])


def _stepped(work: dict[str, Any], call: Any) -> dict[str, Any]:
    """The most that a step allocates and reserves, after two others and with nothing left over from them."""
    import torch

    step = optimize_train._stepping(work, call, torch.optim.SGD(work["model"].parameters(), lr=0.0))
    for _ in range(2):
        step()
    work["model"].zero_grad(set_to_none=True)
    peak = optimize_train._peak(step) or (0, 0)
    work["model"].zero_grad(set_to_none=True)
    return {"allocated_bytes": peak[0], "reserved_bytes": peak[1]}


@contextmanager
def _history() -> Any:
    """Everything that is asked of the allocator meanwhile: what, address, bytes, stream."""
    import torch

    events: list[tuple[Any, ...]] = []
    torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=EVENTS)
    try:
        yield events
        traces = torch.cuda.memory._snapshot()["device_traces"]
        events += [(e["action"], e.get("addr", 0), e["size"], e.get("stream", 0)) for trace in traces for e in trace]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


@contextmanager
def _recordings() -> Any:
    """Bytes allocated before each recording, at its most and after it, and what is reserved then."""
    import torch

    from ridgeline.engine.capture import cuda_graph as executor

    record, found = executor.CudaExecutor.record, []

    def watched(self: Any, run: Any, *, told: bool) -> Any:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        made = record(self, run, told=told)
        after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        most = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        found.append({"before": before, "most": most, "after": after})
        return made

    executor.CudaExecutor.record = watched
    try:
        yield found
    finally:
        executor.CudaExecutor.record = record


def _segments(call: Any) -> list[dict[str, Any]]:
    """All segments: whether of the recording, bytes, bytes in use, and the sizes of blocks in use outside of it."""
    import torch

    studio = getattr(call, "_studio", None)
    pool = tuple(studio.executor.pool) if studio is not None else None
    found = []
    for segment in torch.cuda.memory_snapshot():
        used = [block["size"] for block in segment["blocks"] if block["state"] != "inactive"]
        of_pool = tuple(segment.get("segment_pool_id", ())) == pool
        found.append({"pool": of_pool, "bytes": segment["total_size"], "used": sum(used), "kind":
                      segment["segment_type"], "grows": segment.get("is_expandable"), "stream": segment["stream"],
                      "blocks": sorted(used)[-8:], "num_used": len(used)})  # fmt: skip
    return found


def _gradients(work: dict[str, Any], call: Any) -> list[Any]:
    import torch

    torch.manual_seed(1)
    optimize_train._stepping(work, call, torch.optim.SGD(work["model"].parameters(), lr=0.0))()
    found = [None if p.grad is None else p.grad.float().cpu() for p in work["model"].parameters()]
    work["model"].zero_grad(set_to_none=True)
    gc.collect()
    return found


def _apart(grads: list[Any], reference: list[Any]) -> float:
    """The largest distance of a gradient from eager's, relative to that gradient's length."""
    pairs = [(a, b) for a, b in zip(grads, reference, strict=True) if b is not None]
    return max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs)


def _table(found: dict[str, Any]) -> list[str]:
    """What was found, as Markdown."""
    lines = ["| model | way | allocated | reserved | over eager | pool | outside of it, in use | recordings at most | "
             "gradients apart |", f"|{'---|' * 9}"]  # fmt: skip
    for name, ways in found.items():
        for way in [w for w in WAYS if "reserved_bytes" in ways.get(w, {})]:
            lines.append(_row(name, way, ways[way], ways["eager"]["reserved_bytes"]))
        if "error" in ways:
            lines.append(f"| {name} | {ways['error'][:200]!r} |")
    return lines


def _row(name: str, way: str, made: dict[str, Any], eager_bytes: int) -> str:
    outside = [s for s in made["segments"] if not s["pool"]]
    shown = f"{sum(s['bytes'] for s in outside) / 1e9:.3f}, {sum(s['used'] for s in outside) / 1e9:.3f}"
    most = ", ".join(f"{r['most'][0] / 1e9:.3f} ({r['most'][1] / 1e9:.3f})" for r in made.get("recordings", ()))
    pool, apart = f"{made.get('pool_bytes', 0) / 1e9:.3f}", f"{made['apart']:.1e}"
    cells = (name, way, f"{made['allocated_bytes'] / 1e9:.3f}", f"{made['reserved_bytes'] / 1e9:.3f}",
             f"{made['reserved_bytes'] / eager_bytes:.3f}", pool, shown, most or "–", apart)  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
