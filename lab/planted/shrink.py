"""Kineto traces made small: what no analysis reads is dropped, the rest is stored by column and packed with xz."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ridgeline.trace.compact import packed

Event = dict[str, Any]
KEPT_ARGS = (
    "External id",
    "correlation",
    "stream",
    "device",
    "grid",
    "block",
    "registers per thread",
    "shared memory",
    "bytes",
    "memory bandwidth (GB/s)",
    "est. achieved occupancy %",
    "Sequence number",
    "Fwd thread id",
    "Input Dims",
    "Input type",
    "Input Strides",
    "Concrete Inputs",
    "Python id",
    "Python parent id",
    "Python module id",
    "context",
    "cuda_sync_kind",
    "name",
    "labels",
    "sort_index",
    "kernel_backend",
)
KEPT_FRAMES = (
    *("lab/planted/", "dataloader.py(", "optimizer.py(", "eval_frame.py(", "checkpoint.py("),
    *("nn.Module: ", "torch_dynamo_resume", "synchronize", "empty_cache", "print", "fsync", "collect"),
    *(f"<built-in method {name} of" for name in ("item", "cpu", "to", "tolist", "numpy", "flush", "write")),
)
TOLD = re.compile(
    r"log|print|metric|tensorboard|wandb|tqdm|compil|dynamo|triton|\bgc\b|data_?load|fetch|zero_grad|pad_sequence",
    re.IGNORECASE,
)
"""Frames that a rule may take for something."""


def shrink(source: Path, target: Path, facts: dict[str, Any]) -> int:
    """Write the reduced trace; the number of bytes written."""
    with source.open(encoding="utf-8") as file:
        trace = json.load(file)
    events = [_small(e) for e in trace["traceEvents"] if _wanted(e)]
    head = {k: v for k, v in trace.items() if k not in ("traceEvents", "traceName", "distributedInfo", "host_name")}
    target.write_bytes(packed(head | {"ridgeline": facts}, events))
    return target.stat().st_size


def _wanted(event: Event) -> bool:
    kind, category = event.get("ph"), event.get("cat", "")
    if kind == "M":
        return True
    if kind in ("s", "f"):
        return str(category) == "fwdbwd"
    if kind != "X":
        return False
    name = str(event["name"])
    return category != "python_function" or any(part in name for part in KEPT_FRAMES) or bool(TOLD.search(name))


def _small(event: Event) -> Event:
    small = {k: v for k, v in event.items() if k in ("ph", "cat", "name", "pid", "tid", "id", "bp", "ts", "dur")}
    if event["ph"] == "M":
        small.pop("ts", None)
    args = {k: v for k, v in event.get("args", {}).items() if k in KEPT_ARGS}
    small |= {"args": args} if args else {}
    if small.get("cat") == "python_function" and "/" in small["name"]:
        small["name"] = _relative(small["name"])
    return small


def _relative(frame: str) -> str:
    """Frames name files from the repository or the package on, not from the machine's root."""
    for root in ("site-packages/", "dist-packages/"):
        if root in frame:
            return frame.split(root, 1)[1]
    return frame


def shrink_log(source: Path) -> str:
    """A structured compile log with the payloads of graph breaks and recompilations, and without all others."""
    kept, wanted, keep = [], ("compilation_metrics", "graph_break_reason", "recompile_reasons", '"str"'), False
    for line in source.read_text(errors="replace").splitlines():
        if not line.startswith("\t"):
            keep = any(word in line[:200] for word in wanted)
            line = _short_metrics(line) if "compilation_metrics" in line[:200] else line
        if keep:
            kept.append(_relative(line) if line.startswith("\t") else line)
    return "\n".join(kept) + "\n"


def _short_metrics(line: str) -> str:
    """The configuration is repeated in every compilation's metrics; it is left out."""
    head, _, text = line.partition("] {")
    entry = json.loads("{" + text)
    if "compilation_metrics" not in entry:  # a backward pass has metrics of its own name
        return line
    dropped = ("dynamo_config", "inductor_config", "functorch_config", "stack_trace", "graph_node_shapes")
    facts = {k: v for k, v in entry["compilation_metrics"].items() if v is not None and k not in dropped}
    return f"{head}] {json.dumps(entry | {'compilation_metrics': facts})}"
