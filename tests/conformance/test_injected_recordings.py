"""Injected causes as recorded on an H200: their traces replay, and no kernel beats its floor."""

from __future__ import annotations

import numpy as np
import pytest

from lab.planted.recordings import injected_cases, suite_folder
from ridgeline.profiler.floors import with_floors
from ridgeline.trace import Trace, steps
from ridgeline.trace.snapshot import read_snapshot

CASES = {case.name: case for case in injected_cases(suite_folder("planted"))}
REPLAYED = ("item_each_layer", "nchw_conv", "fp32_matmul", "attention_spelled_out", "streamed_weights", "padded_batch")


@pytest.fixture(scope="module", params=REPLAYED)
def replayed(request) -> tuple[str, dict[str, Trace]]:
    case = CASES[request.param]
    return request.param, {variant: case.trace(variant) for variant in ("planted", "fixed")}


def test_traces_say_what_a_step_takes_without_the_profiler(replayed):
    name, traces = replayed
    for variant, trace in traces.items():
        facts = trace.meta["ridgeline"]
        timed = CASES[name].fixed if variant == "fixed" else CASES[name].injected
        assert facts["unprofiled_step_s"] == pytest.approx(timed.median_s, rel=1e-4)
        found = steps(trace)
        assert len(found) == 2
        assert sum(step.total_s for step in found) / 2 == pytest.approx(facts["profiled_step_s"], rel=0.05)


def test_kernels_have_floors_and_none_is_faster(replayed):
    _, traces = replayed
    for trace in traces.values():
        priced, coverage = with_floors(trace)
        assert coverage.frac > 0.85
        floor, spent = priced.extra["floor_s"], priced.duration_s
        known = ~np.isnan(floor) & (floor > 0)
        assert (spent[known] >= 0.98 * floor[known]).all()


def test_expected_times_of_products_are_those_measured(replayed):
    _, traces = replayed
    for trace in traces.values():
        priced, _ = with_floors(trace)
        rows = np.flatnonzero(trace.gpu & trace.matching("op", ["aten::mm"]) & ~np.isnan(priced.extra["expected_s"]))
        if len(rows) >= 20:
            ratio = priced.extra["expected_s"][rows].sum() / trace.duration_s[rows].sum()
            assert 0.85 < ratio < 1.15


def test_kernels_find_the_nodes_of_the_captured_graph():
    torch = pytest.importorskip("torch")
    import ridgeline as rl
    from lab.planted.networks import Decoder
    from lab.planted.registry import Shape
    from ridgeline.profiler.nodes import with_nodes

    with torch.device("meta"):
        model = Decoder(Shape(width=1024, layers=8, heads=16, vocab=50304), 1024).to(torch.bfloat16)
        ids = torch.zeros(8, 1024, dtype=torch.long)
    graph = rl.capture(
        model, args=(ids, ids), mode="train", optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True)
    )
    trace = CASES["empty_cache_each_step"].trace("fixed")
    linked, matched = with_nodes(trace, rl.predict(graph, on="h200"))
    assert matched.frac > 0.99 and matched.num_matched == matched.num_ops
    rows = linked.optional("node") > 0
    expected, floor = linked.extra["expected_s"][rows], linked.extra["floor_s"][rows]
    assert expected.sum() == pytest.approx(linked.duration_s[rows].sum(), rel=0.12)
    assert (linked.duration_s[rows] >= 0.98 * floor).all()
    attention = linked.matching("module", ["blocks.7.attention"]) & rows
    assert attention.any()


def test_the_recorded_memory_snapshot_names_the_fp32_logits_at_its_peak():
    memory = read_snapshot(suite_folder("planted") / "memory_snapshot.pickle.gz").devices[0]
    known = CASES["fp32_logits"].trace("planted").meta["ridgeline"]["peak_allocated_bytes"]
    assert memory.curve.allocated_bytes.max() == pytest.approx(known, rel=0.02)
    forward = [holder for holder in memory.at_peak() if holder.category == "activation"]
    assert forward[0].where == "benchmarks/planted/nets.py:116 forward"
    assert forward[0].num_bytes == pytest.approx(8 * 1024 * 128256 * 4, rel=0.01)
