"""Lines carried over between recordings, and kernels that find their nodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ridgeline.api import link, predict
from ridgeline.profiler.lines import with_lines, with_module_lines
from ridgeline.profiler.nodes import canonical, node_runs
from ridgeline.trace import Kind, TraceBuilder


def recording(ops, *, sources=(), step=0):
    build = TraceBuilder("run")
    for i, name in enumerate(ops):
        source = sources[i] if sources else ""
        op = build.add(name, "main", i * 1e-3, 5e-4, kind=Kind.OP, op=name, step=step, source=source)
        call = build.add("cudaLaunchKernel", "main", i * 1e-3 + 1e-5, 1e-6, kind=Kind.RUNTIME, parent=op, step=step)
        build.add(f"kernel {i}", "GPU 0 stream 7", i * 1e-3 + 1e-4, 2e-4, kind=Kind.KERNEL, device=0, stream=7,
                  launch=call, op=name, step=step)  # fmt: skip
    return build.build()


def test_lines_of_a_stacked_step_reach_the_kernels_of_a_plain_one():
    plain = recording(["aten::mm", "aten::add", "aten::mm"])
    stacked = recording(
        ["aten::mm", "mylib::debug", "aten::add", "aten::mm"], sources=["a.py:1", "x.py:9", "a.py:2", "b.py:3"]
    )
    found = with_lines(plain, stacked)
    kernels = np.flatnonzero(found.gpu)
    assert [found.text("source", row) for row in kernels] == ["a.py:1", "a.py:2", "b.py:3"]


def test_a_module_without_a_line_has_that_of_the_nearest_around_it():
    build = TraceBuilder("run")
    for module in ("blocks.0.mlp.up", "head", "Net", ""):
        build.add("aten::mm", "main", 0.0, 1e-3, kind=Kind.OP, module=module)
    lines = {"blocks.0": "net.py:8", "Net": "net.py:20", "": "net.py:20"}
    trace = replace(build.build(), meta={"ridgeline": {"module_lines": lines}})
    found = with_module_lines(trace)
    assert [found.text("source", i) for i in range(4)] == ["net.py:8", "net.py:20", "net.py:20", ""]


def test_every_spelling_of_attention_is_one():
    names = ("_flash_attention_forward", "_cudnn_attention_forward", "scaled_dot_product_attention")
    assert {canonical(name) for name in names} == {"attention"}


def test_a_trace_without_a_device_needs_one_named(graph_of_zoo):
    from ridgeline.errors import InputError

    with pytest.raises(InputError, match="on="):
        link(recording(["aten::mm"]), graph_of_zoo)


@pytest.fixture
def graph_of_zoo():
    from ridgeline.models import build

    return build("bert-large", batch=1, seq=128)


def test_runs_of_nodes_are_unrolled_in_dispatch_order(graph_of_zoo):
    prediction = predict(graph_of_zoo)
    runs = node_runs(prediction)
    assert sum(run.expected_s for run in runs) == pytest.approx(prediction.busy_s, rel=1e-6)
    layers = [run.module.split(".")[1] for run in runs if run.module.startswith("layers.")]
    assert not layers or layers == sorted(layers, key=int)
    assert len({run.label for run in runs}) == len(runs)
