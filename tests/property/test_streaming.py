"""Laws of the time models that stream, reduce, order, index, step and pool, for every shape and every chip."""

from __future__ import annotations

from math import isfinite

from hypothesis import given
from hypothesis import strategies as st

from ridgeline.cost.call import Call, Time, call, family_of
from ridgeline.cost.time import recurrent
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.time.rows import reduction
from ridgeline.cost.time.stream import elementwise as stream
from ridgeline.cost.time.stream import indexing, pooling
from ridgeline.cost.time.stream import multi_tensor as multitensor
from ridgeline.cost.time.stream import sort_scan_topk as ordering

FAMILIES = (indexing, multitensor, ordering, pooling, recurrent, reduction, stream)
POINTWISE = (
    "gelu silu relu exp tanh cos clamp add mul div where masked_fill add_row mul_col cast copy fill dropout random"
).split()
REDUCTIONS = "sum_dim0 sum_dim1 mean_dim1 sum_all argmax_dim1 max_dim1 norm_all".split()


@st.composite
def chips(draw: st.DrawFn) -> Chip:
    """GPUs from a laptop's to ones nobody has built."""
    return Chip(
        name="any", arch="any", num_sms=draw(st.integers(8, 400)), clock_hz=draw(st.floats(0.8e9, 3e9)),
        dram_bytes_per_s=draw(st.floats(1e11, 2e13)), l2_bytes=draw(st.floats(2e6, 3e8)),
        l2_bytes_per_s=draw(st.floats(1e12, 5e13)), smem_bytes=draw(st.floats(6e4, 3e5)), tensor_flops_per_s={},
        vector_flops_per_s=draw(st.floats(5e12, 2e14)), tdp_w=400.0, idle_w=40.0,
    )  # fmt: skip


def sizes(high: int) -> st.SearchStrategy[int]:
    return st.floats(0.0, 1.0).map(lambda x: round(high**x))


dtypes = st.sampled_from(("bf16", "fp16", "fp32"))
warmth = st.sampled_from((0.0, 0.4, 1.0))


@st.composite
def flat_calls(draw: st.DrawFn) -> Call:
    kind = draw(st.sampled_from((*POINTWISE, *REDUCTIONS, "transpose", "sort", "cumsum")))
    library = draw(st.sampled_from(("aten", "inductor"))) if kind in ("gelu", "add", "sum_dim0", "sum_dim1") else "aten"
    return call(kind, draw(dtypes), "fwd", library, n=draw(sizes(10_000_000)), c=draw(sizes(1_000_000)))


@st.composite
def table_calls(draw: st.DrawFn) -> Call:
    kind = draw(st.sampled_from(("embedding", "index_select", "gather_rows", "index_add", "embedding_bag", "topk")))
    if kind == "topk":
        width = draw(sizes(1_000_000))
        return call(kind, draw(dtypes), n=draw(sizes(1_000_000)), v=width, k=min(width, draw(sizes(1000))))
    phase = draw(st.sampled_from(("fwd", "bwd"))) if kind.startswith("embedding") else "fwd"
    shape = {"v": draw(sizes(10_000_000)), "d": draw(sizes(8192))}
    count = (
        {"b": draw(sizes(100_000)), "l": draw(sizes(1000))}
        if kind == "embedding_bag"
        else {"n": draw(sizes(1_000_000))}
    )
    return call(kind, draw(dtypes), phase, **shape, **count)


@st.composite
def list_calls(draw: st.DrawFn) -> Call:
    kind = draw(st.sampled_from(("adamw", "foreach_add", "foreach_sqrt", "foreach_mul_", "foreach_addcdiv_")))
    library = draw(st.sampled_from(("fused", "foreach"))) if kind == "adamw" else "aten"
    return call(kind, draw(dtypes), "fwd", library, numel=draw(sizes(10**9)), tensors=draw(sizes(2000)))


@st.composite
def image_calls(draw: st.DrawFn) -> Call:
    kind = draw(st.sampled_from(("max_pool2d", "avg_pool2d", "adaptive_pool2d", "upsample2x")))
    shape = {
        "n": draw(sizes(1024)),
        "c": draw(sizes(4096)),
        "h": 8 + draw(sizes(512)),
        "w": 8 + draw(sizes(512)),
        "k": 3,
        "stride": 2,
    }
    return call(kind, draw(dtypes), draw(st.sampled_from(("fwd", "bwd"))), nhwc=draw(st.integers(0, 1)), **shape)


calls = st.one_of(flat_calls(), table_calls(), list_calls(), image_calls())


def time(made: Call, chip: Chip, warm_frac: float) -> Time:
    found = family_of(made.kind)
    return found.model(made, chip, found.defaults, warm_frac)


def scaled(made: Call, **factors: int) -> Call:
    return Call(
        made.kind, made.dtype, made.phase, made.library, tuple((k, v * factors.get(k, 1)) for k, v in made.shape)
    )


def test_the_families_are_registered():
    assert {family_of(kind).model for kind in ("add", "reduce", "sort", "gather", "foreach", "pool", "lstm")} == {
        module.model for module in FAMILIES
    }


@given(calls, chips(), warmth)
def test_times_are_finite_and_never_beat_the_floor(made: Call, chip: Chip, warm_frac: float):
    found = time(made, chip, warm_frac)
    assert isfinite(found.busy_s) and 0.0 < found.floor_s <= found.busy_s
    assert found.num_kernels >= 1


@given(calls, chips(), warmth)
def test_the_same_call_takes_the_same_time(made: Call, chip: Chip, warm_frac: float):
    assert time(made, chip, warm_frac) == time(made, chip, warm_frac)


@given(calls, chips())
def test_warm_data_never_makes_an_operator_slower(made: Call, chip: Chip):
    assert time(made, chip, 1.0).busy_s <= time(made, chip, 0.0).busy_s * 1.0001


@given(st.sampled_from(POINTWISE), dtypes, sizes(1_000_000), sizes(100_000), st.integers(2, 9), chips(), warmth)
def test_more_rows_never_take_less_time(
    kind: str, dtype: str, n: int, c: int, factor: int, chip: Chip, warm_frac: float
):
    small = call(kind, dtype, n=8 * n, c=8 * c)
    assert time(scaled(small, n=factor), chip, warm_frac).busy_s >= time(small, chip, warm_frac).busy_s


@given(table_calls(), st.integers(2, 9), chips(), warmth)
def test_more_indices_never_take_less_time(made: Call, factor: int, chip: Chip, warm_frac: float):
    if made.kind != "topk" and made.phase == "fwd":
        more = scaled(made, n=factor, b=factor)
        assert time(more, chip, warm_frac).busy_s >= time(made, chip, warm_frac).busy_s * 0.9999


@given(list_calls(), st.integers(2, 9), chips())
def test_more_tensors_never_take_less_time(made: Call, factor: int, chip: Chip):
    assert time(scaled(made, tensors=factor), chip, 0.0).busy_s >= 0.8 * time(made, chip, 0.0).busy_s


@given(st.integers(1, 10**7), st.integers(1, 10**6), st.integers(1, 10**5), st.integers(8, 400))
def test_a_reduction_launch_covers_its_input(outer: int, reduced: int, inner: int, num_sms: int):
    made = reduction.launch(outer, reduced, inner, num_sms)
    rows = made.height if made.split_rows else 1
    lanes = made.width if inner == 1 else 1
    assert made.values * rows * lanes * made.splits >= reduced
    assert 1 <= made.width * made.height <= 512 and made.grid >= 1
