"""The race on shapes that published models have: what is drawn, and how it is summed up."""

import math

import pytest

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def real():
    import ridgeline.kernels  # noqa: F401
    from lab.race import model_rows

    return model_rows


def test_a_seed_draws_the_same_cases_and_another_draws_others(real):
    for name in real.NAMES:
        assert real.shapes(name, 3, 12) == real.shapes(name, 3, 12)
        assert len(set(real.shapes(name, 3, 12)) & set(real.shapes(name, 4, 12))) <= 3


def test_every_function_that_is_asked_for_is_declared_and_has_its_figure(real):
    from ridgeline.kernels.contract import trials

    assert set(real.NAMES) <= set(trials())
    for name, family in real.FAMILIES.items():
        assert dict(family.of_copy) == {"fwd": 0.90, "bwd": 0.85} or dict(family.of_copy) == {"fwd": 0.90}, name


@pytest.mark.parametrize(("name", "known"), [("rms_norm", "HIDDEN"), ("swiglu", "GATED"), ("softmax", "VOCABULARIES")])
def test_columns_are_those_of_models_and_rows_what_batches_give(real, name, known):
    cases = real.shapes(name, 1, 200)
    rows = [of["rows"] for of in cases]
    assert {of["cols"] for of in cases} <= set(getattr(real, known))
    assert {of.dtype for of in cases} == {"bfloat16", "float16", "float32"}
    assert sum(n % 128 == 0 for n in rows) > 40 and sum(n % 2 for n in rows) > 20 and min(rows) < 64
    assert all(2 * of["rows"] * of["cols"] * (4 if of.dtype == "float32" else 2) <= 1.5e9 for of in cases)


def test_blocks_divide_columns_and_parameters_are_those_of_layers(real):
    for name in ("quantize", "rms_norm_quant", "layer_norm_quant"):
        assert all(of["block"] == 0 or of["cols"] % of["block"] == 0 for of in real.shapes(name, 1, 60))
    for of in real.shapes("adamw", 1, 30):
        sizes = real.families.NAMED[of["list"]]
        assert sizes[0] == math.isqrt(sizes[0]) ** 2 and math.isqrt(sizes[0]) in sizes


def row(contender, s, case="a", phase="fwd", num_bytes=100 << 20):
    return {"family": "swiglu", "phase": phase, "case": case, "num_bytes": num_bytes, "contender": contender, "s": s}


def test_the_summary_says_who_could_reach_the_figure_and_who_does(real):
    took = (100 << 20) / 4e12
    rows = []
    for case, ours, bare in (("a", took / 0.95, took), ("b", took / 0.80, took / 0.85), ("c", took / 0.80, took)):
        rows += [row("ridgeline", ours, case), row("copy", bare, case), row("eager", 2 * ours, case)]
    rows += [row("ridgeline", 1e-6, "d", num_bytes=1 << 20), row("liger", 5e-7, "d", num_bytes=1 << 20)]
    rows += [row("ridgeline", took / 0.9, "a", "bwd"), row("eager", took, "a", "bwd"), row("copy", took, "a", "bwd")]
    found = {"copy_bytes_per_s": 4e12, "rows": rows, "seed": 1}
    forward, backward = real.standings(found)
    assert (forward["num"], forward["large"], forward["possible"]) == (4, 3, 2)
    assert (forward["reach"], forward["reach_as_large"]) == (1, 2)
    assert forward["least_as_large"] == pytest.approx(0.80) and min(forward["beside"]) == pytest.approx(0.5)
    assert backward["reach"] == 1 and backward["beside"] == [pytest.approx(0.9)]
    text = "\n".join(real.table(found))
    assert "| all | fwd | 4 | 3 | 2 | 1 | 2 | 80% | 1.41 | 1 | 0.50 |" in text
