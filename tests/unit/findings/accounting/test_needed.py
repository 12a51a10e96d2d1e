"""A recording beside the work its model needs."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ridgeline.findings.accounting.account import account
from ridgeline.findings.accounting.needed import compared, needed_of
from ridgeline.models import build
from ridgeline.trace import Kind, Trace, TraceBuilder

MS = 1e-3
GRAPH = build("resnet50", mode="train")


def trained(forward: int = 1, backward: int = 1, twice: int = -1) -> Trace:
    """A step that runs every convolution and product of the model so often; ``twice`` is one that runs once more."""
    made = TraceBuilder("resnet50")
    made.add("ProfilerStep#0", "host", 0.0, 1000 * MS, kind=Kind.STEP, thread=1, step=0)
    at = 0.0
    for number, ((sort, phase, sizes), num) in enumerate(needed_of(GRAPH).items()):
        for _ in range(int(num) * (forward if phase == "forward" else backward) + (number == twice)):
            op = made.add(*_op(sort, phase, sizes, at), kind=Kind.OP, thread=1, phase=phase, step=0,
                          extra=_arguments(sort, phase, sizes))  # fmt: skip
            call = made.add("cudaLaunchKernel", "host", at, 0.01 * MS, kind=Kind.RUNTIME, thread=1, parent=op, step=0)
            made.add("kernel", "GPU", at, 1 * MS, kind=Kind.KERNEL, device=0, stream=7, launch=call, phase=phase,
                     step=0)  # fmt: skip
            at += 1 * MS
    return made.build()


def _op(sort: str, phase: str, sizes: tuple[int, ...], at: float) -> tuple[str, str, float, float]:
    name = "aten::mm" if sort == "matmul" else "aten::convolution"
    return (name if phase == "forward" or sort == "matmul" else "aten::convolution_backward", "host", at, 0.5 * MS)


def _arguments(sort: str, phase: str, sizes: tuple[int, ...]) -> dict[str, str]:
    if sort == "matmul":
        return {"shapes": json.dumps([[32, sizes[0]], [sizes[0], sizes[1]]]), "dtypes": '["float", "float"]'}
    c, o, kh, kw, sh, sw, groups = sizes
    x, w, y = [8, c, 16 * sh, 16 * sw], [o, c // groups, kh, kw], [8, o, 16, 16]
    pad = f"[{(kh - 1) // 2}, {(kw - 1) // 2}]"
    if phase == "forward":
        said = ["", "", "", f"[{sh}, {sw}]", pad, "[1, 1]", "False", "[0, 0]", str(groups)]
        return {"shapes": json.dumps([x, w, []]), "dtypes": '["float", "float", ""]', "concrete": json.dumps(said)}
    said = ["", "", "", "[0]", f"[{sh}, {sw}]", pad, "[1, 1]", "False", "[0, 0]", str(groups), "[True, True, False]"]
    return {"shapes": json.dumps([y, x, w]), "dtypes": '["float", "float", "float"]', "concrete": json.dumps(said)}


def test_a_step_that_does_what_the_model_needs_has_nothing_to_spare():
    found = compared(trained(), GRAPH)
    assert found.extra_ms == 0 and found.num_batches == 1 and not found.notes


def test_micro_batches_are_no_extra_work():
    found = compared(trained(forward=4, backward=4), GRAPH)
    assert found.extra_ms == 0 and found.num_batches == 4


def test_an_extra_forward_pass_is_avoidable():
    trace = trained(forward=2)
    found = compared(trace, GRAPH)
    assert found.notes == ("2 forward passes where the model needs one",)
    forward = trace.gpu & (trace.phase == trace.word_id("forward"))
    assert found.extra_s.sum() == pytest.approx(trace.duration_s[forward].sum() / 2)
    bar = account(trace, extra_s=found.extra_s).bar("avoidable:extra")
    assert bar is not None and bar.ms == pytest.approx(1e3 * float(found.extra_s.sum()), rel=1e-6)


def test_a_third_backward_pass_is_avoidable():
    found = compared(trained(backward=3), GRAPH)
    assert found.notes == ("3 backward passes where the model needs one",)


def test_a_duplicated_layer_is_found_by_its_sizes():
    found = compared(trained(twice=3), GRAPH)
    extra = [need for need in found.needs if need.extra_ms > 0]
    assert len(extra) == 1 and extra[0].num_recorded == extra[0].num_needed + 1
    assert extra[0].extra_ms == pytest.approx(1.0)


def test_without_shapes_nothing_is_compared():
    trace = trained()
    bare = trace.with_columns(shapes=np.zeros(len(trace), np.int32))
    assert "nothing to compare" in compared(bare, GRAPH).notes[0]
