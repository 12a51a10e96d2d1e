"""Recording a program: its warm-up, its steps, its modules, and what could not be recorded."""

from __future__ import annotations

import gc
import json

import pytest
import torch

import ridgeline as rl
from ridgeline.errors import InputError
from ridgeline.profiler.marks import Masks
from ridgeline.profiler.recorder import Run, Wanted, board_index
from ridgeline.trace import Kind, steps


def names(trace, kind):
    return [trace.words[i] for i in trace.name[trace.of_kind(kind)]]


@pytest.fixture
def recorded(net, train, tmp_path):
    with rl.profile(net, tmp_path / "trace.json", steps=2, warmup=0) as run:
        for _ in range(40):
            train()
            run.step()
            if run.done:
                break
    return run


def test_steps_are_recorded_after_the_warm_up_and_the_rest_runs_free(recorded):
    assert recorded.done
    assert [step.number for step in steps(recorded.trace)] == [0, 1]
    assert recorded.trace.meta["ridgeline"]["unprofiled_num"] >= 5


def test_ops_have_module_paths_and_the_lines_of_their_forward_pass(recorded):
    trace = recorded.trace
    ops = trace.of_kind(Kind.OP)
    modules = {trace.words[i] for i in trace.module[ops]}
    assert {"blocks.0.0", "blocks.1.1", "head"} <= modules
    lines = {trace.words[i] for i in trace.source[ops & trace.matching("module", ["blocks.0.0"])]}
    assert len(lines) == 1 and next(iter(lines)).split(":")[0].endswith("conftest.py")


def test_shapes_are_recorded(recorded):
    trace = recorded.trace
    shapes = {trace.words[i] for i in trace.optional("shapes")}
    assert any("[4, 8]" in text for text in shapes)


def test_the_overhead_is_measured_and_stated(recorded):
    facts = recorded.trace.meta["ridgeline"]
    assert facts["overhead_frac"] == pytest.approx(facts["profiled_step_s"] / facts["unprofiled_step_s"] - 1)
    assert any("overhead" in note for note in recorded.trace.notes)
    assert any("without the profiler" in note for note in recorded.trace.notes)


def test_absent_power_is_said(recorded):
    if recorded.trace.meta["ridgeline"]["power_source"] not in ("NVML", "nvidia-smi"):
        assert any(note.startswith("power: none") for note in recorded.trace.notes)


def test_padding_is_counted_from_the_mask(recorded):
    assert recorded.trace.meta["ridgeline"]["padding"] == [{"argument": "Net.attention_mask", "real_frac": 0.5}]


def test_nothing_is_left_on_the_model(net, recorded):
    assert not net.head._forward_hooks and not net.head._forward_pre_hooks and not net._forward_pre_hooks


def test_the_file_is_a_kineto_trace_with_our_facts_in_its_head(recorded):
    document = json.loads(recorded.file.read_text())
    assert document["ridgeline"]["warmup_steps"] >= 0 and document["traceEvents"]


def test_a_block_without_steps_is_recorded_whole_and_says_so(train, tmp_path):
    with Run(tmp_path / "t.json") as run:
        train()
    assert any("no steps were marked" in note for note in run.trace.notes)
    assert "aten::addmm" in names(run.trace, Kind.OP)


def test_collections_appear_as_such(tmp_path, train):
    with Run(tmp_path / "t.json") as run:
        train()
        gc.collect()
    assert Kind.GC in set(run.trace.kind.tolist())


def test_too_few_steps_are_an_error_that_says_how_many(train, tmp_path):
    with Run(tmp_path / "t.json") as run:
        for _ in range(3):
            train()
            run.step()
    with pytest.raises(InputError, match="2 steps, which is too few"):
        _ = run.trace


def test_an_exception_of_the_program_is_its_own(train, tmp_path):
    run = Run(tmp_path / "t.json")

    def broken():
        with run:
            train()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert len(run.trace) > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [({"steps": 0}, "at least one step"), ({"warmup": -1}, "let pass"), ({"setps": 3}, "did you mean 'steps'")],
)
def test_impossible_wishes_are_refused(options, says):
    with pytest.raises(InputError, match=says):
        rl.profile(**options)


def test_a_place_that_cannot_be_written_is_refused_before_the_run(tmp_path):
    with pytest.raises(InputError, match="no folder"):
        Run(tmp_path / "nowhere" / "t.json")
    with pytest.raises(InputError, match=r"ends in \.json"):
        Run(tmp_path / "t.txt")


def test_a_trainer_drives_the_recording_through_callbacks(net, train, tmp_path):
    callback = Run(tmp_path / "t.json", wanted=Wanted(steps=1, warmup=0)).callback()
    callback.on_init_end(None, None, None)
    callback.on_train_begin(None, None, None, model=net)
    for _ in range(12):
        train()
        callback.on_step_end(None, None, None)
    callback.on_train_end(None, None, None)
    assert callback.run.done and len(steps(callback.run.trace)) == 1


@pytest.mark.parametrize(("shown", "index"), [("3,1", 3), ("", 0), ("GPU-8f2c", 0)])
def test_power_is_read_from_the_board_that_the_process_is_shown(shown, index):
    assert board_index({"CUDA_VISIBLE_DEVICES": shown}) == index


def test_a_stacked_step_is_recorded_one_step_after_the_others(net, train, tmp_path):
    with rl.profile(net, tmp_path / "t.json", steps=1, warmup=0, stack=True) as run:
        for _ in range(20):
            train()
            run.step()
    sources = {run.trace.words[i].rpartition(":")[0] for i in run.trace.source[run.trace.of_kind(Kind.OP)]}
    assert run.done and any(source.endswith("conftest.py") for source in sources)


LENGTHS = torch.tensor([2, 6, 3, 5])
FILLED = torch.arange(8)[None] < LENGTHS[:, None]
SCATTERED = torch.tensor([[1, 0, 1, 0, 0, 1, 0, 1]] * 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("argument", "mask", "noted"),
    [
        ("attention_mask", FILLED, 0.5),
        ("attention_mask", FILLED.flip(1), 0.5),
        ("padding_mask", ~FILLED[:, 1:], 3 / 7),  # set where there is nothing
        ("src_key_padding_mask", ~FILLED[:, 1:], 4 / 7),  # as it is: whoever reads it knows what that name means
        ("mask", torch.ones(8, 8, dtype=torch.bool).tril(), None),
        ("src_mask", torch.ones(4, 8, dtype=torch.bool).tril(), None),
        ("bool_masked_pos", FILLED, None),
        ("patch_mask", SCATTERED, None),
        ("global_attention_mask", FILLED, None),
    ],
)
def test_masks_of_other_things_than_padding_are_not_counted(argument, mask, noted):
    class Any(torch.nn.Module):
        def forward(self, x, **masks):
            return x

    model = Any()
    masks = Masks([model])
    model(torch.zeros(1), **{argument: mask})
    assert [row["real_frac"] for row in masks.close()] == ([pytest.approx(noted)] if noted else [])


def test_a_recording_is_compressed_if_its_name_says_so(tmp_path):
    import gzip

    file = tmp_path / "run.json.gz"
    with rl.profile(steps=1, warmup=0, out=file) as run:
        for _ in range(20):
            torch.ones(4) + 1
            run.step()
            if run.done:
                break
    assert gzip.decompress(file.read_bytes()).rstrip().endswith(b"}") and len(run.trace)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json.gz"]
