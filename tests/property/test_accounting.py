"""The waterfall of any trace: it sums to the window to the nanosecond, and no bar is negative."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.findings.accounting.waterfall import Waterfall, waterfall_of
from ridgeline.trace import Kind, Trace, TraceBuilder

US = 1e-6
KERNELS = ("gemm", "ncclDevKernel_AllReduce", "Memcpy HtoD (Pageable -> Device)", "void softmax_warp_forward")
CALLS = ("cudaLaunchKernel", "cudaMemcpyAsync", "cudaStreamSynchronize", "cudaMalloc", "cuModuleLoadData",
         "cudaGraphLaunch")  # fmt: skip
HOST = ((Kind.OP, "aten::mm"), (Kind.PYTHON, "train.py(3): step"), (Kind.DATALOADER, "enumerate(DataLoader)#next"),
        (Kind.GC, "gc"), (Kind.ANNOTATION, "forward"), (Kind.PYTHON, "<built-in function sleep>"))  # fmt: skip
times = st.integers(0, 400)
lengths = st.integers(0, 80)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    build = TraceBuilder("drawn")
    if draw(st.booleans()):
        build.add("ProfilerStep#1", "host", 0.0, 400 * US, kind=Kind.STEP, thread=1, step=1)
    calls = []
    for _ in range(draw(st.integers(0, 12))):
        kind, name = draw(st.sampled_from(HOST))
        build.add(name, "host", draw(times) * US, draw(lengths) * US, kind=kind, thread=draw(st.integers(1, 3)),
                  module=draw(st.sampled_from(("", "layers.0"))))  # fmt: skip
    for _ in range(draw(st.integers(0, 12))):
        name, thread = draw(st.sampled_from(CALLS)), draw(st.integers(1, 3))
        row = build.add(name, "host", draw(times) * US, draw(lengths) * US, kind=Kind.RUNTIME, thread=thread)
        calls.append(row)
    for _ in range(draw(st.integers(0, 20))):
        name = draw(st.sampled_from(KERNELS))
        kind = Kind.COMMUNICATION if "nccl" in name else Kind.MEMCPY if "Memcpy" in name else Kind.KERNEL
        duration = draw(lengths)
        extra = {"floor_s": draw(st.integers(0, 120)) * US} if draw(st.booleans()) else {}
        if kind == Kind.COMMUNICATION:
            extra |= {"message_bytes": 1024, "collective": "all_reduce"}
        build.add(name, "GPU", draw(times) * US, duration * US, kind=kind, device=draw(st.integers(0, 1)),
                  stream=draw(st.integers(7, 8)), rank=0, extra=extra, phase=draw(st.sampled_from(("", "recompute"))),
                  launch=draw(st.sampled_from(calls)) if calls and draw(st.booleans()) else -1)  # fmt: skip
    if draw(st.booleans()):
        build.add("bubble", "GPU", draw(times) * US, draw(lengths) * US, kind=Kind.BUBBLE, device=0, stream=7)
    return build.build()


def sums_to_its_window(found: Waterfall) -> bool:
    return sum(bar.ns for bar in found.bars) == found.total_ns and all(bar.ns > 0 for bar in found.bars)


@settings(max_examples=40, deadline=None)
@given(traces(), times, lengths, st.integers(1, 3))
def test_bars_sum_to_the_window_and_none_is_negative(trace, start, length, num_steps):
    found = waterfall_of(trace, start * 1000, (start + length) * 1000, num_steps)
    assert sums_to_its_window(found)
    assert abs(sum(bar.ms for bar in found.bars) - (found.step_ms if found.bars else 0.0)) < 1e-9
    assert found.bars or not found.total_ns


@settings(max_examples=15, deadline=None)
@given(traces())
def test_parts_of_a_bar_never_exceed_it(trace):
    for bar in waterfall_of(trace, 0, 480_000, 1, max_parts=1000).bars:
        assert abs(sum(part.ms for part in bar.parts) - bar.ms) < 1e-9
        assert all(0 <= row < len(trace) for part in bar.parts for row in part.rows)
