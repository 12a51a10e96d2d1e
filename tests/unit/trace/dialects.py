"""Small traces in every dialect that profilers have written, made here so that no file is needed."""

from __future__ import annotations

import json
from typing import Any

Event = dict[str, Any]
EPOCH_US = 1_700_000_000_000_000


def modern(*, base: bool = True, extra: tuple[Event, ...] = ()) -> dict[str, Any]:
    """Two steps as Kineto writes them since 2024: nanoseconds as decimals since a base, three kernels, one copy."""
    events = [
        _meta("process_name", 100, 0, "python"),
        _meta("thread_name", 100, 100, "thread 100 (python)"),
        host("user_annotation", "ProfilerStep#3", 0.0, 100.0),
        host("user_annotation", "ProfilerStep#4", 100.0, 100.0),
        host("python_function", "train.py(10): main", 0.0, 200.0),
        host("python_function", "nn.Module: Net_0", 5.0, 60.0),
        host("python_function", "nn.Module: Linear_1", 8.0, 40.0),
        host("python_function", "torch/nn/functional.py(5): linear", 9.0, 38.0),
        host("cpu_op", "aten::linear", 10.0, 35.0, shapes=[[64, 32], [16, 32]]),
        host("cpu_op", "aten::addmm", 12.0, 30.0, shapes=[[16], [64, 32], [32, 16]]),
        call("cudaLaunchKernel", 20.0, 5.25, 7),
        device("kernel", "sgemm", 30.125, 40.5, 7, grid=[4, 2, 1], block=[128, 1, 1]),
        call("cudaMemcpyAsync", 110.0, 4.0, 8),
        device("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 115.0, 10.0, 8, bytes=4096),
        call("cudaLaunchKernel", 130.0, 4.0, 9),
        device("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 135.0, 20.0, 9, stream=20),
        call("cudaLaunchKernel", 131.0, 1.0, 10),
        device("kernel", "relu", 145.0, 30.0, 10),
        *extra,
    ]
    head = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "computeMajor": 9}]}
    return head | {"traceEvents": events} | ({"baseTimeNanoseconds": EPOCH_US * 1000} if base else {})


def host(category: str, name: str, start: float, lasts: float, *, tid: Any = 100, shapes: Any = None) -> Event:
    args = {"Input Dims": shapes, "Input type": ["float"] * len(shapes)} if shapes else {}
    return {"ph": "X", "cat": category, "name": name, "pid": 100, "tid": tid, "ts": start, "dur": lasts, "args": args}


def call(name: str, start: float, lasts: float, correlation: int, category: str = "cuda_runtime") -> Event:
    return host(category, name, start, lasts) | {"args": {"correlation": correlation, "External id": correlation}}


def device(
    category: str, name: str, start: float, lasts: float, correlation: int, *, stream: int = 7, **args: Any
) -> Event:
    args = {"device": 0, "stream": stream, "correlation": correlation, **args}
    return {
        "ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream, "ts": start, "dur": lasts, "args": args,
    }  # fmt: skip


def _meta(what: str, pid: Any, tid: Any, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def mapped(document: dict[str, Any], change: Any) -> dict[str, Any]:
    """The document with every event changed; None drops it."""
    changed = (change(dict(event)) for event in document["traceEvents"])
    return document | {"traceEvents": [event for event in changed if event is not None]}


def of_2021(document: dict[str, Any]) -> dict[str, Any]:
    """Whole microseconds since 1970, capitalized categories, streams as text, ids in lower case."""
    words = {"kernel": "Kernel", "cpu_op": "Operator", "user_annotation": "Operator", "cuda_runtime": "Runtime",
             "gpu_memcpy": "Memcpy", "gpu_memset": "Memset"}  # fmt: skip

    def change(event: Event) -> Event | None:
        if event.get("cat") == "python_function":
            return None
        if event["ph"] == "X":
            on_device = event["cat"] in ("kernel", "gpu_memcpy")
            event |= {"cat": words[event["cat"]], "ts": EPOCH_US + int(event["ts"]), "dur": int(event["dur"])}
            event["tid"] = f"stream {event['tid']}" if on_device else str(event["tid"])
        return event

    found = mapped(document, change)
    return {key: value for key, value in found.items() if key != "baseTimeNanoseconds"}


def absolute_decimals(document: dict[str, Any]) -> str:
    """The dialect of spring 2024: nanoseconds as decimals since 1970, which a float cannot hold."""
    text = json.dumps(mapped(document, lambda e: e | {"ts": f"@{EPOCH_US + int(e['ts'])}.{_fraction(e)}@"}
                             if e["ph"] == "X" else e))  # fmt: skip
    return text.replace('"@', "").replace('@"', "")


def _fraction(event: Event) -> str:
    return f"{round(event['ts'] % 1 * 1000):03d}"


def in_nanoseconds(document: dict[str, Any]) -> dict[str, Any]:
    """Whole nanoseconds since 1970."""
    return mapped(document, lambda e: e | {"ts": EPOCH_US * 1000 + round(e["ts"] * 1000), "dur": round(e["dur"] * 1000)}
                  if e["ph"] == "X" else e)  # fmt: skip


def as_pairs(document: dict[str, Any]) -> dict[str, Any]:
    """Begin and end events in place of complete ones."""
    events: list[Event] = []
    for event in document["traceEvents"]:
        if event["ph"] != "X":
            events.append(event)
            continue
        rest = {key: value for key, value in event.items() if key != "dur"}
        events += [
            rest | {"ph": "B"},
            {"ph": "E", "pid": event["pid"], "tid": event["tid"], "ts": event["ts"] + event["dur"]},
        ]
    events.sort(key=lambda e: (e.get("ts", -1.0), e["ph"] == "B"))
    return document | {"traceEvents": events}


def of_rocm(document: dict[str, Any]) -> dict[str, Any]:
    """HIP's names for calls and copies."""
    names = {"cudaLaunchKernel": "hipLaunchKernel", "cudaMemcpyAsync": "hipMemcpyWithStream",
             "Memcpy HtoD (Pageable -> Device)": "CopyHostToDevice"}  # fmt: skip
    return mapped(document, lambda e: e | {"name": names.get(e["name"], e["name"])})


def of_mtia(document: dict[str, Any]) -> dict[str, Any]:
    words = {"kernel": "mtia_ccp_events", "cuda_runtime": "mtia_runtime"}
    return mapped(document, lambda e: e | {"cat": words.get(e.get("cat", ""), e.get("cat", ""))})


def gpu_only(document: dict[str, Any]) -> dict[str, Any]:
    return mapped(document, lambda e: e if e.get("cat") in ("kernel", "gpu_memcpy") or e["ph"] == "M" else None)


def cpu_only(document: dict[str, Any]) -> dict[str, Any]:
    return mapped(document, lambda e: None if e.get("cat") in ("kernel", "gpu_memcpy", "cuda_runtime") else e)
