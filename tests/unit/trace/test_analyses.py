"""Each analysis answers rightly on a small run whose answer is plain to see."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from ridgeline.errors import InputError
from ridgeline.trace import Kind, TraceBuilder, concat, steps, totals
from ridgeline.trace.breakdown import device_shares, stream_shares
from ridgeline.trace.collectives import arrivals, bus_factor, calls_of, collectives, sort_of, stragglers
from ridgeline.trace.critical import critical_path, path_shares
from ridgeline.trace.energy import energy_by_step, with_energy
from ridgeline.trace.idle import idle_causes, idle_places
from ridgeline.trace.job import survey_traces
from ridgeline.trace.kernels import against_floor, launches, queue_depth, recomputed, tensor_core, tensor_cores, work_by
from ridgeline.trace.memory import over_time, peaks
from ridgeline.trace.quality import quality

US = 1e-6


class Run:
    """A recorded run in microseconds: a host thread that launches kernels on a device."""

    def __init__(self, title="run", rank=0):
        self.build, self.rank = TraceBuilder(title), rank
        self.build.describe(format="kineto")

    def host(self, name, start, end, kind=Kind.OP, **more):
        return self.build.add(name, "thread 1", start * US, (end - start) * US, kind=kind, rank=self.rank,
                              op=name if kind is Kind.OP else more.pop("op", ""), thread=0, **more)  # fmt: skip

    def call(self, start, end, name="cudaLaunchKernel", **more):
        return self.host(name, start, end, Kind.RUNTIME, **more)

    def work(self, name, start, end, launch=-1, kind=Kind.KERNEL, stream=7, **more):
        return self.build.add(name, f"GPU 0 stream {stream}", start * US, (end - start) * US, kind=kind, device=0,
                              stream=stream, launch=launch, rank=self.rank, **more)  # fmt: skip

    def done(self):
        return self.build.build()


def _causes(trace):
    return {row.cause: round(row.total_s / US, 3) for row in idle_causes(trace)}


def test_idle_time_while_the_host_is_late_is_launch_bound():
    run = Run()
    run.work("a", 10, 20, run.call(0, 5))
    run.work("b", 60, 70, run.call(50, 55))
    assert _causes(run.done()) == {"launch_bound": 40.0}


def test_idle_time_in_the_data_loader_is_the_loaders():
    run = Run()
    run.work("a", 10, 20, run.call(0, 5))
    run.host("enumerate(DataLoader)#x.__next__", 15, 80, Kind.DATALOADER)
    run.work("b", 100, 110, run.call(90, 95))
    assert _causes(run.done()) == {"dataloader": 60.0, "launch_bound": 20.0}


def test_idle_time_after_a_wait_for_the_device_is_synchronization():
    run = Run()
    run.work("a", 10, 20, run.call(0, 5))
    run.call(6, 22, "cudaStreamSynchronize")
    run.work("b", 40, 50, run.call(30, 35))
    assert _causes(run.done()) == {"synchronization": 10.0, "launch_bound": 10.0}


def test_idle_time_in_the_allocator_is_told_from_the_rest():
    run = Run()
    run.work("a", 10, 20, run.call(0, 5))
    run.call(20, 50, "cudaMalloc")
    run.work("b", 65, 70, run.call(60, 62))
    assert _causes(run.done()) == {"allocator": 30.0, "launch_bound": 15.0}


def test_queued_kernels_have_small_gaps_of_the_devices_own():
    run = Run()
    calls = [run.call(i, i + 1) for i in range(3)]
    for i, call in enumerate(calls):
        run.work("k", 10 + 12 * i, 20 + 12 * i, call)
    assert _causes(run.done()) == {"device_gap": 4.0}


def test_a_queued_graph_that_shows_nothing_was_not_recorded():
    run = Run()
    graph = run.call(0, 5, "cudaGraphLaunch")
    run.work("a", 10, 20, graph)
    run.work("b", 5020, 5030, graph)
    trace = run.done()
    assert _causes(trace) == {"unrecorded": 4950.0, "device_gap": 50.0}
    assert quality(trace).has("graph_replays") and quality(trace).verdict == "poor"


def test_exposed_copies_and_collectives_are_named():
    run = Run()
    run.work("a", 0, 10)
    run.work("Memcpy", 10, 30, kind=Kind.MEMCPY, extra={"copy": "HtoD pageable"})
    run.work("nccl", 25, 50, kind=Kind.COMMUNICATION, stream=20)
    run.work("b", 40, 60)
    assert _causes(run.done()) == {"pageable_copy": 15.0, "communication": 15.0}


def test_places_name_the_op_and_line_to_blame():
    run = Run()
    run.work("a", 10, 20, run.call(0, 5))
    run.call(6, 22, "cudaStreamSynchronize", source="train.py:7", op="aten::item")
    run.work("b", 40, 50, run.call(30, 35))
    worst = next(row for row in idle_places(run.done()) if row.cause == "synchronization")
    assert (worst.source, worst.op, worst.name) == ("train.py:7", "aten::item", "cudaStreamSynchronize")


def test_idle_causes_add_up_to_idle_time_on_any_trace():
    rng = np.random.default_rng(3)
    for _ in range(20):
        run, at = Run(), 0.0
        for _ in range(30):
            at += rng.exponential(10)
            call = run.call(
                at, at + rng.uniform(1, 8), str(rng.choice(["cudaLaunchKernel", "cudaMalloc", "cudaStreamSynchronize"]))
            )
            kind = Kind(int(rng.choice([1, 1, 2, 3])))
            begun = at + rng.exponential(20)
            run.work(
                "k", begun, begun + rng.exponential(15), call if rng.random() < 0.8 else -1, kind, int(rng.integers(3))
            )
        trace = run.done()
        found = totals(trace)["all"]
        assert sum(row.idle_s for row in idle_causes(trace)) * 1e3 == pytest.approx(found["idle_ms"], abs=1e-5)
        exposed = found["exposed_comm_ms"] + found["exposed_memcpy_ms"]
        assert sum(row.exposed_s for row in idle_causes(trace)) * 1e3 == pytest.approx(exposed, abs=1e-5)


def test_a_simulated_run_without_launches_has_its_bubbles_named():
    build = TraceBuilder("simulated")
    build.add("f", "device", 0.0, 10 * US)
    build.add("wait", "device", 10 * US, 30 * US, kind=Kind.BUBBLE, device=0)
    build.add("b", "device", 40 * US, 10 * US)
    assert _causes(build.build()) == {"bubble": 30.0}


def test_overlap_is_told_from_exposure():
    run = Run()
    run.work("a", 0, 40)
    run.work("nccl", 20, 60, kind=Kind.COMMUNICATION, stream=20)
    shares = device_shares(run.done())[0].shares
    assert (shares.exposed_comm_s, shares.overlapped_comm_s) == (pytest.approx(20 * US), pytest.approx(20 * US))
    assert shares.overlap_frac == pytest.approx(0.5) and shares.total_s == pytest.approx(60 * US)
    assert [row.shares.idle_s for row in stream_shares(run.done())] == [pytest.approx(20 * US), pytest.approx(20 * US)]


def test_a_step_lasts_until_its_last_kernel_and_the_next_begins_there():
    run = Run()
    run.host("ProfilerStep#0", 0, 50, Kind.STEP, step=0)
    run.host("ProfilerStep#1", 50, 90, Kind.STEP, step=1)
    run.work("a", 10, 70, run.call(1, 5, step=0), step=0)
    run.work("b", 75, 95, run.call(52, 55, step=1), step=1)
    found = steps(run.done())
    assert [(s.number, round(s.start_s / US), round(s.end_s / US)) for s in found] == [(0, 0, 70), (1, 70, 95)]
    assert found[1].categories_s["kernel"] == pytest.approx(20 * US)
    assert sum(found[0].categories_s.values()) == pytest.approx(found[0].total_s)


def test_a_trace_without_steps_is_one_stretch():
    run = Run()
    run.work("a", 10, 30)
    assert [(s.number, s.total_s) for s in steps(run.done())] == [(-1, pytest.approx(20 * US))]


def test_the_critical_path_tiles_its_window_and_takes_the_later_cause():
    run = Run()
    first = run.call(0, 5)
    run.work("a", 8, 50, first)
    run.work("b", 50, 60, run.call(6, 10))  # waits for a
    run.call(12, 62, "cudaDeviceSynchronize")
    run.work("c", 100, 120, run.call(90, 95))  # waits for the host
    path = critical_path(run.done())
    assert path[0].start_s == 0.0 and path[-1].end_s == pytest.approx(120 * US)
    assert all(a.end_s == pytest.approx(b.start_s, abs=1e-12) for a, b in pairwise(path))
    trace = run.done()
    kernels = [trace.text("name", s.span) for s in path if s.sort == "kernel"]
    assert kernels == ["a", "b", "c"]
    spent = {}
    for s in path:
        spent[s.sort] = spent.get(s.sort, 0.0) + s.duration_s / US
    assert spent["kernel"] == pytest.approx(72) and spent["wait"] == pytest.approx(2)
    assert path_shares(trace, path)[0].total_s == pytest.approx(42 * US)


def test_the_critical_path_crosses_to_the_rank_that_came_late():
    runs = []
    for rank, arrives in ((0, 10), (1, 70)):
        run = Run(rank=rank)
        run.work("compute", 5, arrives, run.call(0, 2))
        run.work("ncclAllReduce", arrives, 100, run.call(2, 4), Kind.COMMUNICATION, extra={"collective": "all_reduce"})
        runs.append(run.done())
    job = concat(runs, "job")
    path = critical_path(job, arrivals=arrivals(job))
    compute = [s for s in path if s.sort == "kernel"]
    assert [s.rank for s in compute] == [1] and compute[0].duration_s == pytest.approx(65 * US)
    assert {row.cause: round(row.exposed_s / US, 3) for row in idle_causes(job) if row.exposed_s} == {
        "straggler": 30.0,
        "communication": 30.0,
    }


def test_an_unknown_step_or_range_is_refused():
    run = Run()
    run.work("a", 0, 1)
    with pytest.raises(InputError, match="no step 9"):
        critical_path(run.done(), step=9)
    with pytest.raises(InputError, match="0 ranges named 'x'"):
        critical_path(run.done(), annotation="x")


def _ranks(arrive, num_bytes=1000):
    found = []
    for rank, times in enumerate(arrive):
        run = Run(rank=rank)
        for n, at in enumerate(times):
            run.work("ncclAllReduce", at, 100 * n + 90, kind=Kind.COMMUNICATION,
                     extra={"collective": "allreduce", "group_size": 4, "message_bytes": num_bytes})  # fmt: skip
        found.append(run.done())
    return found


def test_collectives_are_matched_and_the_late_rank_is_named():
    calls = [c for trace in _ranks([(0, 110), (5, 105), (40, 100)]) for c in calls_of(trace)]
    found = collectives(calls)
    assert [(c.sort, c.num_ranks, c.last_rank) for c in found] == [("all_reduce", 3, 2), ("all_reduce", 3, 0)]
    assert found[0].skew_s == pytest.approx(40 * US) and found[0].transfer_s == pytest.approx(50 * US)
    assert found[0].bus_bytes_per_s == pytest.approx(1000 * 1.5 / (50 * US))
    assert [(s.rank, s.num_last) for s in stragglers(calls)] == [(2, 1), (0, 1), (1, 0)]


def test_collectives_are_paired_by_time_where_a_recording_began_late():
    early, late = Run(rank=0), Run(rank=1)
    for n, at in enumerate((0, 110, 205)):
        early.work("ncclAllReduce", at, 100 * n + 90, kind=Kind.COMMUNICATION)
    late.work("ncclAllReduce", 250, 291, kind=Kind.COMMUNICATION)
    calls = [c for run in (early, late) for c in calls_of(run.done())]
    assert [(c.num_ranks, c.last_rank) for c in collectives(calls)] == [(1, 0), (1, 0), (2, 1)]


def test_bus_factors_are_those_of_the_algorithms():
    assert bus_factor("all_reduce", 4) == 1.5 and bus_factor("all_gather", 4) == 0.75
    assert bus_factor("broadcast", 8) == 1.0 and math.isnan(bus_factor("", 8))
    names = ("ncclDevKernel_ReduceScatter_Sum", "nccl:_all_gather_base", "ncclKernel_SendRecv", "x")
    assert [sort_of(name) for name in names] == [
        "reduce_scatter", "all_gather", "send_recv", "",
    ]  # fmt: skip


def test_a_job_is_surveyed_rank_by_rank():
    job = survey_traces(iter(_ranks([(0, 110), (5, 105), (40, 100)])))
    assert [row.rank for row in job.ranks] == [0, 1, 2] and len(job.collectives) == 2
    assert job.stragglers[0].rank == 2


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_tn", "yes"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", "yes"),
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_32x4_nt_align4>", "yes"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x256x8_stage3_warpsize1x4x1_ffma", "no"),
        ("volta_sgemm_128x64_nn", "no"),
        ("void implicit_convolve_sgemm<float, float, 1024>", "no"),
        ("void at::native::vectorized_elementwise_kernel<4>", "unknown"),
    ],
)
def test_kernel_names_tell_whether_tensor_cores_are_used(name, answer):
    assert tensor_core(name) == answer


def test_tables_group_work_and_tell_what_tensor_cores_could_do():
    run = Run()
    op = run.host("aten::linear", 0, 20)
    call = run.call(2, 4, parent=op, op="aten::linear")
    run.work("volta_sgemm_128x64_nn", 10, 40, call, op="aten::linear", extra={"floor_s": 10 * US, "energy_j": 2.0})
    run.work("relu", 40, 50, run.call(5, 25))
    trace = run.done()
    found = tensor_cores(trace)
    assert found.eligible_frac == pytest.approx(0.75) and found.used_s == 0.0
    by_op = {row.key: row for row in work_by(trace, "op")}
    assert by_op["aten::linear"].total_s == pytest.approx(30 * US) and by_op["aten::linear"].energy_j == 2.0
    assert by_op["aten::linear"].over_floor_s == pytest.approx(20 * US) and math.isnan(by_op[""].floor_s)
    assert [(row.key, row.times_floor) for row in against_floor(trace, "name")] == [
        ("volta_sgemm_128x64_nn", pytest.approx(3))
    ]
    with pytest.raises(InputError, match="did you mean 'module'"):
        work_by(trace, "modul")


def test_launches_count_short_kernels_and_what_is_queued():
    run = Run()
    for i in range(3):
        run.work("k", 20 + 5 * i, 22 + 5 * i, run.call(4 * i, 4 * i + 3))
    found = launches(run.done())
    assert (found.num_linked, found.num_short, found.num_under_10us) == (3, 3, 3)
    assert found.max_depth == 3 and found.median_call_s == pytest.approx(3 * US)
    at, depth = queue_depth(run.done())
    assert depth.tolist() == [1, 2, 3, 2, 1, 0] and at[0] == 0.0


def test_the_peak_of_memory_names_its_holders():
    build = TraceBuilder("memory")
    for name, start, end, size in (("conv", 0, 50, 100), ("relu", 10, 20, 40), ("norm", 30, 60, 10)):
        build.add("[memory]", "memory", start * US, (end - start) * US, kind=Kind.ALLOCATION, device=0, thread=0,
                  op=name, phase="forward", extra={"bytes": size})  # fmt: skip
    for at, value in ((0, 1100.0), (10, 1140.0), (20, 1100.0), (30, 1110.0)):
        build.count("allocated_bytes (GPU 0)", at * US, value)
    trace = build.build()
    peak = peaks(trace)[0]
    assert (peak.allocated_bytes, peak.recorded_bytes, peak.earlier_bytes) == (1140, 140, 1000)
    assert [(h.op, h.num_bytes) for h in peak.holders] == [("conv", 100), ("relu", 40)]
    assert over_time(trace)["forward"][1] == [100, 140, 100, 110, 10, 0]
    assert peak.categories == (("before the recording", 1000), ("forward", 140))


def test_counters_of_categories_are_no_devices_of_their_own():
    """A timeline has one counter for all and one for each category; all of them were taken for totals."""
    build = TraceBuilder("timeline")
    for at, parts in ((0, (70, 10)), (10, (70, 50)), (20, (70, 20))):
        build.count("memory_bytes", at * US, float(sum(parts)))
        for name, value in zip(("parameter", "activation"), parts, strict=True):
            build.count(f"memory_bytes: {name}", at * US, float(value))
    (peak,) = peaks(build.build())
    assert (peak.device, peak.allocated_bytes, peak.reserved_bytes) == (0, 120, -1)
    assert peak.categories == (("parameter", 70), ("activation", 50))
    assert peak.to_dict()["by_category"] == {"parameter": 70, "activation": 50}


def test_stages_and_devices_have_peaks_of_their_own():
    build = TraceBuilder("many")
    for name, value in (("memory_bytes stage 3", 5.0), ("memory_bytes (GPU 1)", 7.0), ("allocated_bytes (host)", 9.0)):
        build.count(name, 0.0, value)
    assert [(peak.device, peak.allocated_bytes, peak.categories) for peak in peaks(build.build())] == [
        (3, 5, ()),
        (1, 7, ()),
    ]


def test_a_recording_of_the_first_use_of_a_device_says_so():
    """A launch of four seconds loads code; one that waits for a busy device, or a wait, does not."""
    build = TraceBuilder("cold")
    build.add("kernel", "GPU 0 stream 7", 0.0, 1e-3, kind=Kind.KERNEL, device=0, stream=7)
    build.add("cudaLaunchKernel", "host", 2e-3, 4.0, kind=Kind.RUNTIME, thread=1)
    build.add("kernel", "GPU 0 stream 7", 4.1, 1e-3, kind=Kind.KERNEL, device=0, stream=7)
    found = quality(build.build())
    assert found.has("cold") and found.verdict == "poor"
    build = TraceBuilder("warm")
    build.add("kernel", "GPU 0 stream 7", 0.0, 4.0, kind=Kind.KERNEL, device=0, stream=7)
    build.add("cudaLaunchKernel", "host", 2e-3, 3.9, kind=Kind.RUNTIME, thread=1)
    build.add("cudaDeviceSynchronize", "host", 4.0, 3.0, kind=Kind.RUNTIME, thread=1)
    build.add("kernel", "GPU 0 stream 7", 7.0, 1.0, kind=Kind.KERNEL, device=0, stream=7)
    assert not quality(build.build()).has("cold")


def test_quality_of_a_sound_trace_is_good():
    run = Run()
    for i in range(4):
        run.host(f"ProfilerStep#{i}", 100 * i, 100 * i + 99, Kind.STEP, step=i)
        op = run.host("aten::mm", 100 * i, 100 * i + 8, step=i, module="m", source="a.py:1", extra={"shapes": "[[1]]"})
        run.work("k", 100 * i + 10, 100 * i + 90, run.call(100 * i + 1, 100 * i + 5, parent=op, step=i), step=i)
    assert quality(run.done()).to_dict() == {"verdict": "good", "issues": []}


def test_quality_names_what_is_missing_and_what_it_does():
    run = Run()
    run.build.describe(clock_ns=1000, truncated="it ends early", num_lost=5)
    run.host("aten::mm", 0, 10)
    for i in range(20):
        run.work("k", 10 * i + 20, 10 * i + 26, run.call(i, i + 1) if i % 2 else -1)
    found = {issue.code: issue for issue in quality(run.done()).issues}
    assert {"truncated", "unreadable", "unlinked", "clock", "no_shapes", "no_stacks", "no_modules", "no_steps"} <= set(
        found
    )
    assert "10 of 20" in found["unlinked"].what and "instead of" in found["unlinked"].effect
    assert quality(run.done()).verdict == "poor"


def test_quality_sees_clocks_that_disagree_and_kernels_that_were_dropped():
    run = Run()
    for i in range(10):
        run.work("k", 100 * i, 100 * i + 150, run.call(100 * i + 20, 100 * i + 30))
        run.call(100 * i + 40, 100 * i + 50)
    codes = {issue.code for issue in quality(run.done()).issues}
    assert {"clock_skew", "dropped_kernels", "overlap"} <= codes


def test_a_trace_of_the_host_alone_says_so():
    run = Run()
    run.host("aten::mm", 0, 10)
    assert quality(run.done()).has("no_device") and idle_causes(run.done()) == [] and critical_path(run.done())


def test_energy_of_steps_and_ops_adds_up():
    run = Run()
    for i in range(2):
        run.host(f"ProfilerStep#{i}", 100 * i, 100 * (i + 1), Kind.STEP, step=i)
        run.work("k", 100 * i + 20, 100 * i + 70, step=i, op="mm")
        run.work("nccl", 100 * i + 60, 100 * i + 80, kind=Kind.COMMUNICATION, stream=9, step=i, op="comm")
    for at, watts in ((0, 100.0), (50, 300.0), (150, 200.0)):
        run.build.count("power_w", at * US, watts)
    trace = with_energy(run.done())
    found = energy_by_step(trace)
    assert [row.energy_j for row in found] == [pytest.approx(0.02), pytest.approx(0.025)]
    assert found[0].busy_j == pytest.approx(100 * 30e-6 + 300 * 30e-6) and found[0].mean_w == pytest.approx(200)
    by_op = {row.key: row.energy_j for row in work_by(trace, "op")}
    assert sum(by_op.values()) == pytest.approx(sum(row.busy_j for row in found))
    assert by_op["comm"] == pytest.approx(300 * 10e-6 + 200 * 10e-6)
    assert energy_by_step(Run().done()) == []


def test_recomputed_work_is_told_from_the_backward_pass():
    run = Run()
    node = run.host("autograd::engine::evaluate_function: CheckpointFunctionBackward", 0, 100)
    repeat = run.host("CheckpointFunctionBackward", 1, 99, parent=node)
    forward = run.host("aten::mm", 2, 20, parent=repeat)
    inner = run.host("autograd::engine::evaluate_function: MmBackward0", 30, 60, parent=repeat)
    run.work("again", 200, 210, run.call(3, 5, parent=forward))
    run.work("gradient", 210, 240, run.call(31, 35, parent=inner))
    trace = run.done()
    assert [trace.text("name", int(i)) for i in np.flatnonzero(recomputed(trace))] == ["again"]
    build = TraceBuilder("simulated")
    build.add("f", "device", 0.0, 1.0, phase="forward")
    build.add("f", "device", 1.0, 1.0, phase="recompute")
    assert recomputed(build.build()).tolist() == [False, True]


def test_shares_of_a_device_name_its_rank():
    run = Run(rank=3)
    run.work("a", 0, 10)
    assert [(row.rank, row.device, row.stream) for row in device_shares(run.done())] == [(3, 0, -1)]
    assert [(row.rank, row.device, row.stream) for row in stream_shares(run.done())] == [(3, 0, 7)]
