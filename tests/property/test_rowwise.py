"""Laws of the normalization and softmax time models, for every shape and every chip."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

from hypothesis import given
from hypothesis import strategies as st

from ridgeline.cost.call import Call, Time, call
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.time.rows import norm, softmax

ROW_KINDS = ("layer_norm", "rms_norm", "softmax", "log_softmax")


@st.composite
def chips(draw: st.DrawFn) -> Chip:
    """GPUs from a laptop's to ones nobody has built."""
    return Chip(
        name="any", arch="any", num_sms=draw(st.integers(8, 400)), clock_hz=draw(st.floats(0.8e9, 3e9)),
        dram_bytes_per_s=draw(st.floats(1e11, 2e13)), l2_bytes=draw(st.floats(2e6, 3e8)),
        l2_bytes_per_s=draw(st.floats(1e12, 5e13)), smem_bytes=draw(st.floats(6e4, 3e5)), tensor_flops_per_s={},
        vector_flops_per_s=1e13, tdp_w=400.0, idle_w=40.0,
    )  # fmt: skip


def sizes(high: int) -> st.SearchStrategy[int]:
    return st.floats(0.0, 1.0).map(lambda x: round(high**x))


dtypes = st.sampled_from(("bf16", "fp16", "fp32"))
phases = st.sampled_from(("fwd", "bwd"))
warmth = st.sampled_from((0.0, 0.4, 1.0))


@st.composite
def row_calls(draw: st.DrawFn) -> Call:
    kind = draw(st.sampled_from((*ROW_KINDS, "cross_entropy", "nll_loss")))
    library = draw(st.sampled_from(("aten", "inductor"))) if kind in ROW_KINDS else "aten"
    width = "v" if kind in ("cross_entropy", "nll_loss") else "c"
    return call(kind, draw(dtypes), draw(phases), library, n=draw(sizes(20_000_000)), **{width: draw(sizes(1_000_000))})


@st.composite
def image_calls(draw: st.DrawFn) -> Call:
    shape = {"n": draw(sizes(2048)), "c": 32 * draw(sizes(128)), "h": draw(sizes(512)), "w": draw(sizes(512)),
             "nhwc": draw(st.integers(0, 1))}  # fmt: skip
    if draw(st.booleans()):
        return call("group_norm", draw(dtypes), draw(phases), "aten", groups=32, **shape)
    return call("batch_norm", draw(dtypes), draw(phases), "cudnn", training=draw(st.integers(0, 1)), **shape)


def priced(made: Call, chip: Chip, warm_frac: float) -> Time:
    module = norm if made.kind.endswith("_norm") else softmax
    return module.model(made, chip, module.DEFAULTS, warm_frac)


@given(st.one_of(row_calls(), image_calls()), chips(), warmth)
def test_no_call_beats_its_floor(made, chip, warm_frac):
    time = priced(made, chip, warm_frac)
    assert isfinite(time.busy_s)
    assert 0.0 < time.floor_s <= time.busy_s
    assert time.num_kernels >= 1


@given(st.sampled_from(ROW_KINDS), dtypes, sizes(10_000_000), sizes(200_000), chips())
def test_more_rows_never_take_less_time(kind, dtype, rows, width, chip):
    fewer, more = (priced(call(kind, dtype, n=n, c=width), chip, 0.0).busy_s for n in (rows, rows + 1 + rows // 7))
    assert fewer <= more * (1 + 1e-9)


@given(st.one_of(row_calls(), image_calls()), chips())
def test_cold_inputs_never_take_less_time(made, chip):
    assert priced(made, chip, 1.0).busy_s <= priced(made, chip, 0.0).busy_s * (1 + 1e-9)


@given(row_calls(), chips(), st.floats(1.0, 4.0))
def test_more_bandwidth_never_takes_more_time(made, chip, factor):
    faster = replace(chip, dram_bytes_per_s=chip.dram_bytes_per_s * factor)
    assert priced(made, faster, 0.0).busy_s <= priced(made, chip, 0.0).busy_s * (1 + 1e-9)
