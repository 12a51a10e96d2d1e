"""The race on shapes that nobody chose, and what the race beside PyTorch's compiler keeps between its two runs."""

import importlib

import pytest

pytest.importorskip("triton")


def script(name):
    return importlib.import_module(f"lab.race.{name}")


def row(contender, s, num_bytes=100 << 20, phase="fwd", cols=4099):
    return {"primitive": "rms_norm", "phase": phase, "dtype": "bfloat16", "rows": 1, "cols": cols,
            "num_bytes": num_bytes, "contender": contender, "s": s}  # fmt: skip


def test_a_seed_draws_the_same_shapes_and_another_draws_others():
    drawn = script("drawn_rows").shapes
    assert drawn("softmax", 3, 40) == drawn("softmax", 3, 40)
    assert len(set(drawn("softmax", 3, 40)) & set(drawn("softmax", 4, 40))) <= 2


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "softmax"])
def test_shapes_are_of_every_kind(name):
    cases = script("drawn_rows").shapes(name, 1, 200)
    cols = [of["cols"] for of in cases]
    assert {of.dtype for of in cases} == {"bfloat16", "float16", "float32"}
    assert sum(c % 8 == 0 for c in cols) > 80 and sum(c % 2 == 1 for c in cols) > 10
    assert sum(c % 8 in (2, 4, 6) for c in cols) > 10, "even numbers that are no multiples of eight"
    sizes = [of["rows"] * of["cols"] * (4 if of.dtype == "float32" else 2) for of in cases]
    assert 80 < sum(2 * size > 64 << 20 for size in sizes) < 150 and min(of["rows"] for of in cases) < 16


def test_a_shape_reaches_the_figure_by_the_large_copy_or_by_one_of_its_own_size():
    found = {"copy_bytes_per_s": 4e12, "rows": []}
    took = (100 << 20) / 4e12
    for cols, ours, bare in ((1, took / 0.95, took), (2, took / 0.80, took / 0.85), (3, took / 0.80, took)):
        rivals = [row("ridgeline", ours, cols=cols), row("copy", bare, cols=cols), row("eager", 2 * ours, cols=cols)]
        found["rows"] += [*rivals, row("liger", None, cols=cols)]
    small = [row("ridgeline", 1e-6, 1 << 20, cols=4), row("eager", 5e-7, 1 << 20, cols=4)]
    (told,) = script("drawn_rows").shares({**found, "rows": found["rows"] + small})
    assert (told["num"], told["large"], told["reach"], told["reach_as_large"]) == (4, 3, 1, 2)
    assert told["lost"] == 1 and told["least"] == pytest.approx(0.80)
    assert told["over_best"] == pytest.approx((2 * 2 * 2 * 0.5) ** 0.25)


def test_what_was_chosen_beside_others_is_forgotten_and_what_was_compiled_stays(tmp_path):
    kept = tmp_path / "a" / "kernel.cubin"
    kept.parent.mkdir()
    kept.touch()
    (tmp_path / "a" / "x.best_config").touch()
    assert script("compiled").forget_choices(tmp_path) == 1
    assert kept.exists() and not list(tmp_path.rglob("*.best_config"))
