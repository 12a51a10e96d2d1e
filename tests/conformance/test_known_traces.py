"""Real traces that others ship come out as their own tools, and careful counting, say."""

from __future__ import annotations

import numpy as np
import pytest

from ridgeline.trace import Kind, read, steps, totals
from ridgeline.trace.steps import mean_categories_s

#: (total, busy, compute, exposed copies, idle) in ms; None where nobody has published it.
ALL = {
    "h100/owlv2_large": (1078.288, None, 552.189, 14.570, 511.529),
    "h100/falconsai_vit": (7.560, None, 1.225, None, 6.335),
    "h100/bert_small": (3.908, None, 0.3072, 0.0022, 3.598),
    "hta/ns_resolution_v100_ddp": (480.029, 472.462, None, None, 7.567),
    "hta/nccl_a100_ddp": (660.551, 157.500, None, None, 503.051),
    "hta/a100_rank0_of_16": (1231.461, 438.424, None, None, 793.037),
}
LINKED = {"hta/a100_rank0_of_16": (1229.072, 380.856, None, None, 848.216)}
KINETO_US = {
    0: {"total": 177_592, "kernel": 98_589, "memcpy": 1_915, "memset": 89, "runtime": 2_908, "dataloader": 59_262,
        "cpu_exec": 13_674, "other": 1_156},
    4: {"total": 141_068, "kernel": 99_145, "memcpy": 3_160, "memset": 98, "runtime": 10_564, "dataloader": 1_186,
        "cpu_exec": 22_665, "other": 4_251},
}  # fmt: skip


@pytest.fixture(scope="module")
def traces(shared_dir):
    folder = shared_dir / "traces"
    if not folder.is_dir():
        pytest.skip("no folder of shared traces")
    return folder


def _agree(found, known):
    keys = ("total_ms", "busy_ms", "compute_ms", "exposed_memcpy_ms", "idle_ms")
    for key, value in zip(keys, known, strict=True):
        if value is not None:  # published figures are rounded to their last digit
            digit = 10.0 ** -len(repr(value).partition(".")[2])
            assert found[key] == pytest.approx(value, rel=1e-3, abs=digit / 2), key


@pytest.mark.parametrize("name", ALL)
def test_totals_of_all_device_events_are_the_known_ones(traces, name):
    _agree(totals(read(traces / f"{name}.json.gz", cache=False))["all"], ALL[name])


@pytest.mark.parametrize("name", LINKED)
def test_totals_of_linked_events_alone_are_the_known_ones(traces, name):
    trace = read(traces / f"{name}.json.gz", cache=False)
    _agree(totals(trace)["linked"], LINKED[name])
    assert (int(trace.gpu.sum()), int(trace.linked.sum())) == (7747, 7747 - 872)


@pytest.mark.parametrize("workers", KINETO_US)
def test_steps_are_divided_as_kinetos_viewer_divided_them(traces, workers):
    found = steps(read(traces / f"kineto_resnet50/num_workers_{workers}.json.gz", cache=False))
    assert len(found) == 6
    means = mean_categories_s(found)
    for category, micros in KINETO_US[workers].items():
        assert means[category] * 1e6 == pytest.approx(micros, rel=1e-3, abs=0.5), category
    frac = means["kernel"] / means["total"]
    assert frac == pytest.approx({0: 0.5551, 4: 0.7027}[workers], abs=2e-4)


def test_nanoseconds_survive_where_a_number_would_round_them(traces):
    trace = read(traces / "hta/ns_resolution_v100_ddp.json.gz", cache=False)
    busy = trace.busy(trace.gpu)
    idle_ns = int(busy.end[-1] - busy.start[0]) - busy.total
    assert idle_ns == 7_574_738  # from the digits; as JSON numbers, a quarter of a microsecond apart, 7,566,750


def test_a_distributed_trace_has_its_collectives(traces):
    trace = read(traces / "hta/nccl_a100_ddp.json.gz", cache=False)
    comm = trace.gpu & trace.of_kind(Kind.COMMUNICATION)
    assert int(comm.sum()) == 21 and trace.ranks() == [0]
    assert (trace.optional("message_bytes")[comm] > 0).all()


@pytest.mark.parametrize("name", ["cpu_only", "rank_non_gpu"])
def test_a_trace_without_a_device_answers_with_nothing(traces, name):
    trace = read(traces / f"hta/{name}.json.gz", cache=False)
    assert len(trace) > 10 and totals(trace)["all"]["num_gpu_events"] == 0


def test_an_export_of_nsight_systems_shows_weights_streaming_over_the_bus(traces):
    trace = read(traces / "nsys/h100_2gpu_1s.sqlite", cache=False)
    for device in (0, 1):
        on = trace.device == device
        kernels, pinned = on & trace.of_kind(Kind.KERNEL), on & trace.matching("copy", ["HtoD pinned"])
        assert trace.busy(kernels).total / 1e6 == pytest.approx(22.39, rel=3e-3)
        assert trace.busy(pinned).total / 1e6 == pytest.approx(920.87, rel=1e-3)
        assert int(pinned.sum()) == 223
        assert trace.extra["bytes"][pinned].sum() / 1e6 == pytest.approx(25_475, rel=1e-3)
        both = kernels | pinned  # they never overlap
        assert trace.busy(both).total == trace.busy(kernels).total + trace.busy(pinned).total
        window = trace.end_ns[both].max() - trace.start_ns[both].min()
        assert window / 1e6 == pytest.approx(966.56, rel=1e-3)


def test_the_same_answers_come_without_the_fast_reader(traces):
    from ridgeline.trace.kineto import read_kineto

    path = traces / "h100/bert_small.json.gz"
    fast, plain = read_kineto(path), read_kineto(path, fast=False)
    assert fast.words == plain.words
    for column in ("name", "module", "op", "source", "kind", "start_s", "duration_s", "launch", "parent", "step"):
        assert np.array_equal(getattr(fast, column), getattr(plain, column)), column
    assert set(fast.extra) == set(plain.extra)
    for name, column in fast.extra.items():
        assert np.array_equal(column, plain.extra[name], equal_nan=column.dtype.kind == "f"), name


def test_python_stacks_give_modules_and_lines(traces):
    trace = read(traces / "h100/bert_small.json.gz", cache=False)
    kernels = np.flatnonzero(trace.gpu & trace.of_kind(Kind.KERNEL))
    modules = {trace.text("module", i) for i in kernels}
    assert any(m.endswith("BertIntermediate_0.Linear_4") for m in modules)
    assert all(trace.source[kernels] > 0)
