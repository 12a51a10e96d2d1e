"""The race of every family on shapes that nobody chose: what is drawn, what is compared of it, how it is summed up."""

import pytest

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def families():
    import ridgeline.kernels  # noqa: F401
    from lab.race import drawn_families

    return drawn_families


def names():
    return ("swiglu", "cross_entropy", "group_norm_silu", "rope", "quantize", "adamw", "embedding_bags", "cross_layer",
            "linear_cross_entropy", "attention", "varlen_attention")  # fmt: skip


@pytest.mark.parametrize("name", names())
def test_a_seed_draws_the_same_cases_and_another_draws_others(families, name):
    assert families.shapes(name, 3, 12) == families.shapes(name, 3, 12)
    assert len(set(families.shapes(name, 3, 12)) & set(families.shapes(name, 4, 12))) <= 3


def test_every_family_that_is_asked_for_is_declared(families):
    from ridgeline.kernels.contract import trials

    assert set(families.FAMILIES) <= set(trials())
    asked = {name for name, family in families.FAMILIES.items() if family.of_copy}
    assert {"swiglu", "quantize", "adamw", "clip_grad_norm_", "group_norm_silu"} <= asked
    assert dict(families.FAMILIES["dot_interaction"].times)["bwd"] == 2.0


@pytest.mark.parametrize("name", ["swiglu", "cross_entropy", "group_norm_silu", "quantize", "rope"])
def test_cases_are_small_and_large_and_of_every_type(families, name):
    cases = families.shapes(name, 1, 120)
    assert {of.dtype for of in cases} == {"bfloat16", "float16", "float32"}
    sizes = [families.item(of.dtype) * numbers(dict(of.sizes)) for of in cases]
    assert sum(size > 24 << 20 for size in sizes) > 40 and sum(size < 2 << 20 for size in sizes) > 10


def numbers(sizes):
    if "side" in sizes:
        return sizes["batch"] * sizes["channels"] * sizes["side"] ** 2
    if "seq" in sizes:
        return sizes["batch"] * sizes["seq"] * (sizes["heads"] + sizes["keys"]) * sizes["dim"]
    return sizes["rows"] * sizes["cols"]


@pytest.mark.parametrize("name", names())
def test_what_is_compared_is_of_the_same_kind_and_small(families, name):
    for of in families.shapes(name, 2, 12):
        small = families.fewer(of)
        assert small.dtype == of.dtype and [key for key, _ in small.sizes] == [key for key, _ in of.sizes]
        kept = dict(small.sizes)
        for key in (
            "kind",
            "per",
            "block",
            "d",
            "dim",
            "side",
            "channels",
            "groups",
            "mode",
            "causal",
            "own",
            "master",
        ):
            assert kept.get(key) == dict(of.sizes).get(key)
        if "list" in kept:
            assert sum(families.NAMED[kept["list"]]) <= 41 * 70_001
        elif "l" in kept:
            assert kept["l"] % 128 == dict(of.sizes)["l"] % 128 and kept["h"] % kept["k"] == 0


def test_blocks_divide_columns_and_groups_divide_channels(families):
    for name in ("quantize", "rms_norm_quant"):
        assert all(of["block"] == 0 or of["cols"] % of["block"] == 0 for of in families.shapes(name, 1, 60))
    assert all(of["channels"] % of["groups"] == 0 for of in families.shapes("group_norm", 1, 60))


def row(contender, s, case="a", family="swiglu", phase="fwd", num_bytes=100 << 20):
    return {"family": family, "phase": phase, "case": case, "num_bytes": num_bytes, "contender": contender, "s": s}


def test_the_summary_counts_what_reaches_the_figure_and_who_was_faster(families):
    took = (100 << 20) / 4e12
    rows = []
    for case, ours, bare in (("a", took / 0.95, took), ("b", took / 0.80, took / 0.85), ("c", took / 0.80, took)):
        rows += [row("ridgeline", ours, case), row("copy", bare, case), row("eager", 2 * ours, case)]
    rows += [row("ridgeline", 1e-6, "d", num_bytes=1 << 20), row("eager", 5e-7, "d", num_bytes=1 << 20)]
    rows += [row("ridgeline", 1e-5, "e", "dot_interaction"), row("eager", 1.8e-5, "e", "dot_interaction"),
             row("liger", None, "e", "dot_interaction")]  # fmt: skip
    found = {"copy_bytes_per_s": 4e12, "rows": rows, "seed": 1}
    gated, pairs = families.shares(found)
    assert (gated["num"], gated["large"], gated["reach"], gated["reach_as_large"]) == (4, 3, 1, 2)
    assert gated["lost"] == 1 and gated["worst"] == pytest.approx(0.5) and gated["least"] == pytest.approx(0.80)
    assert (pairs["below"], pairs["lost"], pairs["large"]) == (1, 0, 0)
    text = "\n".join(families.table(found))
    assert "| dot_interaction | fwd | 1 |" in text and "1.80 | 2.0 | 1 | 0 | 1.80 |" in text
