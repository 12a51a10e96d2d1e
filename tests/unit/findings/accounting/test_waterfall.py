"""The waterfall: each instant in one bar, idle time by what the host did, kernels against their floor."""

from __future__ import annotations

import pytest

from ridgeline.findings.accounting.account import account
from ridgeline.findings.accounting.waterfall import Waterfall, waterfall_of
from ridgeline.hardware import device as device_named
from ridgeline.trace import Kind, TraceBuilder
from ridgeline.trace.table import Trace

MS = 1e-3


class Run:
    """A trace made by hand; times in milliseconds."""

    def __init__(self) -> None:
        self.build = TraceBuilder("by hand")

    def host(self, name: str, start: float, length: float, kind: Kind = Kind.OP, thread: int = 1, **more) -> int:
        return self.build.add(name, f"host {thread}", start * MS, length * MS, kind=kind, thread=thread, **more)

    def kernel(self, start: float, length: float, launch: int = -1, name: str = "gemm", **more) -> int:
        kind = more.pop("kind", Kind.KERNEL)
        return self.build.add(name, "GPU 0", start * MS, length * MS, kind=kind, device=more.pop("device", 0),
                              stream=more.pop("stream", 7), launch=launch, **more)  # fmt: skip

    def launched(self, called: float, start: float, length: float, thread: int = 1, **more) -> int:
        call = self.host("cudaLaunchKernel", called, 0.005, Kind.RUNTIME, thread)
        return self.kernel(start, length, call, **more)

    def bars(self, start: float, end: float, num_steps: int = 1, **more) -> Waterfall:
        found = waterfall_of(self.build.build(), int(start * 1e6), int(end * 1e6), num_steps, **more)
        assert sum(bar.ns for bar in found.bars) == found.total_ns
        return found


def ms(found: Waterfall, key: str) -> float:
    bar = found.bar(key)
    return bar.ms if bar else 0.0


def test_a_kernel_is_split_at_its_floor():
    run = Run()
    run.kernel(0, 4, extra={"floor_s": 1 * MS})
    found = run.bars(0, 4)
    assert (ms(found, "floor"), ms(found, "kernels:gemm")) == (1.0, 3.0)
    assert found.floor_frac == 1.0


def test_a_kernel_without_a_floor_is_said_to_have_none():
    run = Run()
    run.kernel(0, 4)
    found = run.bars(0, 4)
    assert ms(found, "unpriced:gemm") == 4.0
    assert "floor is known for 0%" in found.notes[0]


def test_a_floor_above_the_measured_time_makes_no_negative_bar():
    run = Run()
    run.kernel(0, 4, extra={"floor_s": 9 * MS})
    assert ms(run.bars(0, 4), "floor") == 4.0


def test_of_overlapping_kernels_and_copies_each_instant_counts_once():
    run = Run()
    run.kernel(0, 4)
    run.kernel(2, 4, stream=8, name="softmax")
    run.kernel(5, 3, stream=9, name="Memcpy HtoD (Pinned -> Device)", kind=Kind.MEMCPY, extra={"copy": "HtoD pinned"})
    found = run.bars(0, 8)
    assert [ms(found, key) for key in ("unpriced:gemm", "unpriced:softmax", "copy:HtoD pinned")] == [4.0, 2.0, 2.0]


def test_idle_time_is_what_the_launching_thread_did():
    run = Run()
    run.kernel(0, 1)
    run.host("enumerate(DataLoader)#next", 0.5, 3.5, Kind.DATALOADER)
    run.host("gc", 4, 1, Kind.GC)
    run.host("aten::mm", 5, 2)
    run.launched(6, 7.03, 1)
    found = run.bars(0, 8.03)
    assert ms(found, "idle:loader") == pytest.approx(3.0)
    assert ms(found, "idle:collector") == pytest.approx(1.0)
    assert ms(found, "idle:op") == pytest.approx(1.0)
    assert ms(found, "idle:launch_call") == pytest.approx(0.005)
    assert found.named_idle_frac < 1.0  # the last millisecond before the kernel has no explanation


def test_a_collection_inside_the_loader_is_the_collectors():
    run = Run()
    run.kernel(0, 1)
    outer = run.host("enumerate(DataLoader)#next", 1, 4, Kind.DATALOADER)
    run.host("gc", 2, 1, Kind.GC, parent=outer)
    run.launched(5, 5.01, 1)
    found = run.bars(0, 6)
    assert ms(found, "idle:collector") == pytest.approx(1.0)
    assert ms(found, "idle:loader") == pytest.approx(3.0)


def test_while_a_thread_waits_in_a_frame_the_thread_it_handed_over_to_counts():
    run = Run()
    run.launched(0, 0.01, 1)
    run.host("train.py(9): backward", 0.5, 4.5, Kind.PYTHON)
    run.host("aten::mul", 1.2, 2, thread=2)
    run.launched(3.15, 3.2, 0.1, thread=2)
    run.launched(5, 5.01, 1)
    found = run.bars(0.01, 6.01)
    assert ms(found, "idle:op") == pytest.approx(1.95)
    assert ms(found, "idle:python") > 1.0


def test_a_slow_op_on_a_new_shape_is_first_use_work():
    run = Run()
    run.launched(0, 0.1, 0.1)
    at = 0.3
    for length in range(6):
        took = 2.0 if length in (0, 3) else 0.02
        shapes = "[[1, 4]]" if length < 3 else "[[1, 5]]"
        run.host("aten::_cudnn_attention_forward", at, took, extra={"shapes": shapes})
        run.launched(at + took - 0.008, at + took + 0.01, 0.01)
        at += took + 0.05
    found = run.bars(0.1, at)
    assert ms(found, "idle:first_use") == pytest.approx(4.0, abs=0.1)


def test_a_slow_op_that_is_never_quick_is_no_first_use_work():
    """A recurrent layer launches all of its steps in one op."""
    run = Run()
    for at in (0.1, 0.2, 0.3):
        run.host("aten::add", at, 0.02, extra={"shapes": "[[8, 64]]"})
    run.host("aten::_cudnn_rnn", 1.0, 3.0, extra={"shapes": "[[100, 8, 64]]"})
    run.launched(4.0, 4.1, 1)
    found = run.bars(0, 6)
    assert ms(found, "idle:first_use") == 0.0 and ms(found, "idle:op") == pytest.approx(3.06, abs=0.1)


@pytest.mark.parametrize(
    ("frame", "is_first"),
    [
        ("triton/runtime/autotuner.py(225): run", False),
        ("torch/_inductor/codecache.py(1131): __call__", False),
        ("torch/_inductor/compile_fx.py(760): compile_fx_inner", True),
        ("triton/runtime/autotuner.py(160): _bench", True),
    ],
)
def test_a_call_of_compiled_code_is_no_first_use_work(frame, is_first):
    run = Run()
    run.host(frame, 0.0, 2.0, Kind.PYTHON)
    run.launched(2.0, 2.1, 1)
    assert (ms(run.bars(0, 3.1), "idle:first_use") > 0) == is_first


def test_a_module_loaded_in_a_gap_is_first_use_work():
    run = Run()
    run.kernel(0, 1)
    run.host("cuModuleLoadData", 1, 2, Kind.RUNTIME)
    run.launched(3, 3.01, 1)
    assert ms(run.bars(0, 4), "idle:first_use") == pytest.approx(2.0)


def test_kernels_of_a_graph_that_were_not_recorded_are_not_idle_time():
    run = Run()
    graph = run.host("cudaGraphLaunch", 0, 0.1, Kind.RUNTIME)
    run.kernel(0.2, 1, graph)
    run.kernel(9, 1, graph)
    found = run.bars(0.2, 10)
    assert found.bar("idle:graph").stage == "unrecorded"
    assert ms(found, "idle:graph") > 7.0


def test_a_file_without_host_events_says_so():
    run = Run()
    run.kernel(0, 1)
    run.kernel(5, 1)
    found = run.bars(0, 6)
    assert ms(found, "idle:no_host") == pytest.approx(4.0)
    assert found.named_idle_frac == 0.0 and any("no host events" in note for note in found.notes)


def test_a_host_without_spans_is_outside_of_ops_between_two_and_unrecorded_after_the_last():
    run = Run()
    run.launched(0, 0.01, 1)
    run.launched(50, 50.01, 1)
    found = run.bars(0.01, 80)
    assert ms(found, "idle:host_code") == pytest.approx(48.99)
    assert ms(found, "idle:unrecorded") == pytest.approx(28.99)
    assert found.named_idle_frac == pytest.approx(0.63, abs=0.01)


def test_bubbles_of_a_simulated_schedule_are_a_bar():
    run = Run()
    run.kernel(0, 1)
    run.build.add("bubble", "GPU 0", 1 * MS, 2 * MS, kind=Kind.BUBBLE, device=0, stream=7)
    run.kernel(3, 1)
    assert ms(run.bars(0, 4), "idle:bubble") == pytest.approx(2.0)


def _all_reduce(number: int, start: float, **more) -> Trace:
    run = Run()
    extra = {"collective": "all_reduce", "message_bytes": 1000, **more}
    run.kernel(start, 10 - start, kind=Kind.COMMUNICATION, name="ncclDevKernel_AllReduce", rank=number, extra=extra)
    return run.build.build()


def test_waiting_for_most_ranks_skew_of_the_last_and_the_transfer_are_apart():
    others = [_all_reduce(number, start) for number, start in ((1, 3), (2, 2), (3, 7))]
    found = waterfall_of(_all_reduce(0, 1), 1_000_000, 10_000_000, others=others)
    assert (ms(found, "comm:wait"), ms(found, "comm:skew"), ms(found, "comm:transfer")) == (1.0, 5.0, 3.0)


def test_a_transfer_is_split_at_what_the_link_needs_for_its_bytes():
    trace = _all_reduce(0, 1, message_bytes=450_000_000, group_size=8)  # 1.75 of it over 450 GB/s
    found = account(trace, device_named("h100-sxm"))
    assert ms(found, "comm:floor") == pytest.approx(1.75)
    assert ms(found, "comm:bandwidth") == pytest.approx(7.25)
    assert found.bar("comm:transfer") is None


def test_a_group_of_several_hosts_needs_its_link_out_of_the_host():
    one, two = (account(_all_reduce(0, 1, message_bytes=10_000_000, group_size=size), device_named("h100-sxm"))
                for size in (8, 16))  # fmt: skip
    assert 0 < ms(one, "comm:floor") <= ms(two, "comm:floor")


def test_of_one_rank_what_exceeds_the_fastest_equal_call_is_named():
    run = Run()
    for start, length in ((0, 1), (2, 1), (4, 3)):
        run.kernel(start, length, kind=Kind.COMMUNICATION, name="ncclAllReduce",
                   extra={"collective": "all_reduce", "message_bytes": 1000})  # fmt: skip
    found = run.bars(0, 7)
    assert (ms(found, "comm:wait_alone"), ms(found, "comm:transfer")) == (2.0, 3.0)


def test_recompute_and_casts_are_avoidable():
    run = Run()
    run.kernel(0, 1, phase="recompute")
    copy = run.host("aten::copy_", 0, 0.1, extra={"dtypes": '["c10::BFloat16", "float", ""]'})
    call = run.host("cudaLaunchKernel", 0.05, 0.01, Kind.RUNTIME, parent=copy)
    run.kernel(1, 1, call, name="unrolled_elementwise_kernel", op="aten::copy_")
    found = run.bars(0, 2)
    assert (ms(found, "avoidable:recompute"), ms(found, "avoidable:casts")) == (1.0, 1.0)


def test_a_chain_of_light_kernels_is_charged_for_the_bytes_it_moves_again():
    run = Run()
    for i in range(3):
        run.kernel(i, 1, name="vectorized_elementwise_kernel",
                   extra={"read_bytes": 2**20, "written_bytes": 2**20, "floor_s": 0.5 * MS})  # fmt: skip
    found = run.bars(0, 3)
    assert ms(found, "avoidable:passes") == pytest.approx(0.5 + 0.9 + 0.5, abs=1e-3)


def test_a_step_is_the_mean_over_steps_and_devices():
    run = Run()
    for device in (0, 1):
        for start in (0, 10):
            run.kernel(start, 4, device=device)
    found = run.bars(0, 20, num_steps=2)
    assert found.step_ms == 10.0 and found.num_devices == 2
    assert ms(found, "unpriced:gemm") == 4.0


def test_a_program_on_the_host_alone_is_accounted_for():
    run = Run()
    run.host("aten::mm", 0, 3)
    run.host("aten::add", 4, 1)
    found = account(run.build.build())
    assert sum(bar.ns for bar in found.bars) == found.total_ns
    assert found.bars[0].stage == "host" and ms(found, "host:op") == pytest.approx(4.0)


def test_an_empty_trace_has_no_bars():
    assert account(TraceBuilder("empty").build()).bars == ()


def test_every_bar_says_what_generally_helps_and_where_it_is():
    run = Run()
    run.kernel(0, 1, module="layers.0", op="aten::mm")
    run.host("aten::mm", 1, 2, module="layers.1", source="train.py:7")
    run.launched(2, 3.01, 1)
    for bar in run.bars(0, 4.01).bars:
        assert bar.remedy and bar.parts and bar.label
    place = run.bars(0, 4.01).bar("idle:op").parts[0]
    assert (place.module, place.source, place.name) == ("layers.1", "train.py:7", "aten::mm")


def test_the_cost_of_the_recording_is_a_bar_of_its_own_and_the_rest_sums_to_the_step_without_it():
    run = Run()
    run.kernel(0, 4)
    run.host("enumerate(DataLoader)#next", 4, 2, Kind.DATALOADER)
    run.host("aten::mm", 6, 3)
    run.launched(8.995, 9, 1)
    found = run.bars(0, 10).without_recording(8.5)
    assert sum(bar.ns for bar in found.bars) == found.total_ns == 10_000_000
    assert ms(found, "recording") == pytest.approx(1.5) and found.unrecorded_ms == pytest.approx(8.5)
    assert ms(found, "idle:op") == pytest.approx(1.5, abs=0.01) and ms(found, "idle:loader") == pytest.approx(2.0)
    assert sum(bar.frac for bar in found.bars if bar.key != "recording") == pytest.approx(1.0)


def test_a_step_that_is_longer_without_the_recording_has_no_such_bar():
    run = Run()
    run.kernel(0, 4)
    assert run.bars(0, 4).without_recording(5.0).bar("recording") is None


def test_a_recording_cannot_cost_more_than_the_device_is_idle():
    run = Run()
    run.kernel(0, 4)
    run.host("aten::mm", 4, 1)
    run.launched(5, 5, 1)
    found = run.bars(0, 6).without_recording(1.0)
    assert sum(bar.ns for bar in found.bars) == found.total_ns and ms(found, "unpriced:gemm") == 5.0


def test_a_finding_is_about_the_bars_that_its_spans_are_in():
    run = Run()
    run.kernel(0, 1)
    loader = run.host("enumerate(DataLoader)#next", 1, 4, Kind.DATALOADER)
    slow = run.launched(5, 5.01, 3, name="softmax")
    found, trace = run.bars(0, 8.01), run.build.build()
    assert [bar.key for bar in found.bars_of(trace, [loader])] == ["idle:loader"]
    assert [bar.key for bar in found.bars_of(trace, [slow])] == ["idle:loader", "unpriced:softmax"]
    assert found.bars_of(trace, []) == []
    assert found.with_findings({"idle:loader": ["data-loader"]}).bar("idle:loader").findings == ("data-loader",)


def _trained(after: str, no_grad: bool = False) -> Trace:
    """A pass with gradients, then the same four products without, and an op behind them."""
    run, at = Run(), 0.0
    for number in range(8):
        known = {"sequence": min(number, 4) if no_grad else number, "shapes": f"[[{number % 4 + 1}, 8], [8, 8]]"}
        op = run.host("aten::mm", at, 0.1, phase="forward", step=0, extra=known)
        call = run.host("cudaLaunchKernel", at + 0.01, 0.02, Kind.RUNTIME, parent=op)
        run.kernel(at + 0.1, 0.5, call, op="aten::mm", step=0)
        at += 1.0
    run.host(after, at, 0.1, phase="forward", step=0, extra={"sequence": 8})
    for number in range(4):
        run.host("MmBackward0", at + 1 + number, 0.1, phase="backward", step=0, extra={"sequence": number})
    run.launched(at + 4.05, at + 4.2, 0.5)
    return run.build.build()


@pytest.mark.parametrize(
    ("after", "no_grad", "again_ms"),
    [("aten::argmax", False, 2.0), ("aten::_log_softmax", False, 0.0), ("aten::argmax", True, 0.0)],
)
def test_a_pass_that_autograd_records_for_nothing_is_avoidable_if_its_outputs_are_counted(after, no_grad, again_ms):
    found = waterfall_of(_trained(after, no_grad), 0, 14_000_000)
    assert ms(found, "avoidable:again") == pytest.approx(again_ms)


@pytest.mark.parametrize(
    ("op", "extra", "key"),
    [
        ("aten::cat", {"shapes": "[[[8, 16384, 128], [8, 1, 128]], []]"}, "avoidable:grown"),
        ("aten::cat", {"shapes": "[[[8, 512, 128], [8, 512, 128]], []]"}, "unpriced:copy"),
        ("aten::mul", {"concrete": '["", "0."]'}, "avoidable:zero"),
        ("aten::mul", {"concrete": '["", "0.5"]'}, "unpriced:pointwise"),
    ],
)
def test_tensors_grown_by_copies_and_factors_of_zero_are_avoidable(op, extra, key):
    run = Run()
    span = run.host(op, 0, 0.1, extra=extra)
    call = run.host("cudaLaunchKernel", 0.01, 0.02, Kind.RUNTIME, parent=span)
    name = "CatArrayBatchedCopy" if op == "aten::cat" else "vectorized_elementwise_kernel"
    run.kernel(1, 1, call, name=name, op=op)
    assert ms(run.bars(1, 2), key) == 1.0
