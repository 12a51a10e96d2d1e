"""What the page of an explanation draws from: findings, one step's timeline, time by module, roofline, memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import RidgelineError
from ridgeline.findings.annotate import link_name
from ridgeline.findings.context.context import TraceContext
from ridgeline.findings.context.floors import with_work
from ridgeline.findings.context.gains import recorded_schedule
from ridgeline.findings.explanation import Explanation, idle_document, step_document
from ridgeline.findings.labels import IDLE_WORDS
from ridgeline.findings.replay.critical_path import critical_path
from ridgeline.trace.analyses.tables import TABLES
from ridgeline.trace.kind import Kind

MAX_SPANS = 6000
"""Spans of the timeline: more than a screen can tell apart."""
BAR_STYLES = {"floor": "--good", "kernels": "--latency", "unpriced": "--other", "avoidable": "--issue",
              "copies": "--memory", "communication": "--compute", "idle": "--bad", "host": "--bad",
              "unrecorded": "--other", "recording": "--line"}  # fmt: skip
HOST_KINDS = (Kind.OP, Kind.ANNOTATION, Kind.RUNTIME, Kind.DATALOADER, Kind.GC, Kind.PYTHON)


def explanation_data(found: Explanation) -> dict[str, Any]:
    """Everything the page shows."""
    from ridgeline import __version__

    scene = found.context
    return {
        "version": __version__,
        "title": found.title,
        "device": found.device,
        "verdict": found.verdict,
        "step_ms": found.step_ms,
        "recoverable_ms": found.recoverable_ms,
        "busy_frac": found.step_busy_frac,
        "totals": {name: dict(part) for name, part in found.totals.items()},
        "quality": _plain(found.quality),
        "replay": _replay(found),
        "steps": [step_document(step) for step in found.steps[:400]],
        "idle": idle_document(found.idle, found.places),
        "idle_words": IDLE_WORDS,
        "is_timed": scene is not None and scene.is_timed,
        "findings": [finding.to_dict() for finding in found.findings],
        "waterfall": _waterfall(found),
        "tables": _tables(found),
        "num_ranks": len(found.ranks),
        "gaps": [gap.to_dict() for gap in found.gaps],
        "timeline": _timeline(scene, found) if scene is not None else None,
        "modules": _modules(scene) if scene is not None else [],
        "roofline": _roofline(scene) if scene is not None else None,
        "memory": _memory(scene) if scene is not None else [],
        "held": [peak.to_dict() for peak in found.memory],
    }


def _waterfall(found: Explanation) -> dict[str, Any] | None:
    """Bars with their parts, and the spans that each part leads to."""
    if found.waterfall is None or found.context is None or not found.waterfall.bars:
        return None
    trace = found.context.trace
    document = found.waterfall.to_dict()
    for bar in document["bars"]:
        bar["style"] = BAR_STYLES[bar["stage"]]
        for part in bar["parts"]:
            part["spans"] = [
                [trace.words[int(trace.name[row])], round(float(trace.start_s[row]) * 1e3, 6),
                 round(float(trace.duration_s[row]) * 1e3, 6)]
                for row in part.pop("rows")
            ]  # fmt: skip
    return dict(_plain(document))


def _tables(found: Explanation) -> list[dict[str, Any]]:
    """Every table that has rows, the first of them."""
    if found.context is None:
        return []
    made = [found.table(name) for name in TABLES]
    return [{**_plain(table.top(400).to_dict()), "num_rows": len(table)} for table in made if len(table)]


def _plain(value: Any) -> Any:
    """Only what JSON knows."""
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, (np.floating, float)):
        return float(value) if np.isfinite(value) else None
    return value if isinstance(value, (str, int, bool)) or value is None else str(value)


def _replay(found: Explanation) -> dict[str, Any]:
    replay = found.replay
    return {
        "recorded_ms": replay.recorded_ms,
        "replayed_ms": replay.replayed_ms,
        "error_frac": replay.error_frac,
        "unexplained_frac": replay.unexplained_frac,
        "host_frac": replay.host_frac,
        "num_steps": replay.num_steps,
    }


def _timeline(scene: TraceContext, found: Explanation) -> dict[str, Any]:
    """One step: host threads, streams, and the critical path, with the spans of findings marked."""
    # The step in the middle of the window
    marks = [scene.window.start_ns, *scene.window.marks_ns, scene.window.end_ns]
    middle = (len(marks) - 1) // 2
    start_ns, end_ns = marks[middle], marks[middle + 1]
    trace = scene.trace
    inside = (scene.start_ns < end_ns) & (scene.end_ns > start_ns)
    device = np.flatnonzero(inside & trace.gpu)
    around = trace.of_kind(Kind.PYTHON) & (scene.start_ns <= start_ns) & (scene.end_ns >= end_ns)  # above the step
    host = np.flatnonzero(inside & trace.of_kind(*HOST_KINDS) & (trace.device < 0) & ~around)
    rows = np.concatenate((_longest(scene, device, MAX_SPANS // 2), _longest(scene, host, MAX_SPANS // 2)))
    marked = {row: number for number, finding in enumerate(found.findings) for row in finding.rows}
    words: dict[str, int] = {}
    lanes: dict[str, list[list[Any]]] = {}
    depth = _depths(scene, host)
    for row in rows[np.argsort(scene.start_ns[rows], kind="stable")].tolist():
        lanes.setdefault(_lane(scene, row), []).append(
            [
                round((int(scene.start_ns[row]) - start_ns) / 1e6, 6),
                round(float(trace.duration_s[row]) * 1e3, 6),
                words.setdefault(trace.words[int(trace.name[row])], len(words)),
                Kind(int(trace.kind[row])).name.lower(),
                marked.get(row, -1),
                depth.get(row, 0),
                words.setdefault(trace.words[int(trace.module[row])], len(words)),
            ]
        )
    return {
        "length_ms": (end_ns - start_ns) / 1e6,
        "words": list(words),
        "lanes": [
            [lane, spans] for lane, spans in sorted(lanes.items(), key=lambda item: not item[0].startswith("host"))
        ],
        "critical": _critical(scene, start_ns, end_ns),
        "left_out": int(len(device) + len(host) - len(rows)),
    }


def _longest(scene: TraceContext, rows: NDArray[np.intp], num: int) -> NDArray[np.intp]:
    order = np.argsort(-scene.trace.duration_s[rows], kind="stable")[:num]
    return rows[order]


def _depths(scene: TraceContext, rows: NDArray[np.intp]) -> dict[int, int]:
    """How many spans lie around each host span, steps not counted, whatever order those that start together are in."""
    parent, steps = scene.trace.parent, scene.trace.of_kind(Kind.STEP)
    found: dict[int, int] = {}
    for row in rows[np.lexsort((-scene.end_ns[rows], scene.start_ns[rows]))].tolist():
        above = int(parent[row])
        while above >= 0 and steps[above]:
            above = int(parent[above])
        found[row] = found.get(above, -1) + 1
    return found


def _lane(scene: TraceContext, row: int) -> str:
    trace = scene.trace
    if trace.device[row] >= 0:
        return f"GPU {int(trace.device[row])} stream {int(trace.stream[row])}"
    return f"host thread {int(trace.thread[row])}"


def _critical(scene: TraceContext, start_ns: int, end_ns: int) -> list[list[Any]]:
    """Stretches of the critical path inside the step; neighbors of a kind are drawn as one."""
    low_s, high_s = (start_ns - scene.window.start_ns) / 1e9, (end_ns - scene.window.start_ns) / 1e9
    made: list[list[Any]] = []
    longest_ms = 0.0
    for link in critical_path(scene.wiring.program, recorded_schedule(scene)):
        if link.end_s <= low_s or link.start_s >= high_s or link.duration_s <= 0:
            continue
        start_ms, end_ms = (max(link.start_s, low_s) - low_s) * 1e3, (min(link.end_s, high_s) - low_s) * 1e3
        side, name = "device" if link.kind in ("work", "queue") else "host", link_name(scene, link)
        if made and made[-1][2] == side and start_ms - made[-1][1] < 1e-3:
            made[-1][1] = end_ms
            if name and end_ms - start_ms > longest_ms:  # a stretch is called what most of it is
                longest_ms, made[-1][3] = end_ms - start_ms, name
        else:
            longest_ms = end_ms - start_ms if name else 0.0
            made.append([start_ms, end_ms, side, name])
    return made[: MAX_SPANS // 2]


def _modules(scene: TraceContext) -> list[dict[str, Any]]:
    """Device time a step by module, then op, then kernel; the page folds it into a flame graph."""
    trace, rows = scene.trace, scene.rows
    code = np.stack([trace.module[rows], trace.op[rows], trace.name[rows]], axis=1)
    distinct, inverse = np.unique(code, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    seconds = np.bincount(inverse, weights=scene.work_s, minlength=len(distinct)) / scene.num_steps
    counts = np.bincount(inverse, minlength=len(distinct)) / scene.num_steps
    heaviest = np.argsort(-seconds, kind="stable")[:3000]  # max nodes
    words = trace.words
    return [
        {
            "module": words[int(distinct[i][0])],
            "op": words[int(distinct[i][1])],
            "kernel": words[int(distinct[i][2])],
            "ms": round(float(seconds[i]) * 1e3, 6),
            "num": round(float(counts[i]), 3),
        }
        for i in heaviest.tolist()
    ]


def _roofline(scene: TraceContext) -> dict[str, Any] | None:
    """Kernels with known flops and bytes against the device's roofs; None where no shapes tell them."""
    trace, rows = with_work(scene), scene.rows
    flops, read, written = (trace.optional(name)[rows] for name in ("flops", "read_bytes", "written_bytes"))
    moved = np.maximum(read, 0).astype(float) + np.maximum(written, 0)
    known = np.isfinite(flops) & (flops > 0) & (moved > 0) & (scene.work_s > 0)
    floors = trace.optional("floor_s")[rows]
    if not known.any() or scene.device is None:
        return None
    chosen = _distinct(scene, np.flatnonzero(known), flops, moved)
    peaks = []
    for unit, dtype, label in (
        ("tensor", "bf16", "bf16 Tensor Cores"),
        ("tensor", "tf32", "TF32"),
        ("vector", "fp32", "fp32"),
    ):
        try:
            peaks.append([label, scene.device.peak_flops_per_s(unit, dtype)]) if scene.device else None
        except RidgelineError:
            continue
    kernel_s = scene.work_s[trace.of_kind(Kind.KERNEL, Kind.MEMSET)[rows]].sum()
    return {
        "coverage_frac": float(scene.work_s[known].sum() / kernel_s) if kernel_s > 0 else 0.0,
        "dram_bytes_per_s": scene.device.dram.bandwidth_bytes_per_s,
        "peaks": peaks,
        "dots": [
            {
                "name": trace.words[int(trace.name[rows[i]])],
                "flops": float(flops[i]),
                "bytes": float(moved[i]),
                "s": float(scene.work_s[i]),
                "floor_s": float(floors[i]) if np.isfinite(floors[i]) else None,
            }
            for i in chosen.tolist()
        ],
    }


def _distinct(
    scene: TraceContext, known: NDArray[np.intp], flops: NDArray[np.float64], moved: NDArray[np.float64]
) -> NDArray[np.intp]:
    """The longest of every kernel with the same work: a layer that runs eighty times is one dot."""
    order = known[np.argsort(-scene.work_s[known], kind="stable")]
    alike = np.stack([scene.trace.name[scene.rows[order]], flops[order], moved[order]], axis=1)
    first = np.unique(alike, axis=0, return_index=True)[1]
    return order[np.sort(first)[:400]]  # max dots


def _memory(scene: TraceContext) -> list[dict[str, Any]]:
    """Counters of bytes over time, thinned so that no peak is lost."""
    made = []
    for name, counter in scene.trace.counters.items():
        if "memory" not in name.lower() and "bytes" not in name.lower():
            continue
        step = max(1, -(-len(counter.value) // 1500))  # max points
        points = [
            [float(counter.at_s[start : start + step][0]), float(counter.value[start : start + step].max())]
            for start in range(0, len(counter.value), step)
        ]
        made.append({"name": name, "points": points})
    return made[:10]  # max curves
