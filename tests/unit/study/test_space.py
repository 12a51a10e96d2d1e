"""Axes as people write them, and points by number."""

from __future__ import annotations

import numpy as np
import pytest

from ridgeline.errors import InputError, RidgelineError
from ridgeline.study.space import Space


def axis(text, name="l2", **more):
    return Space("llama3-8b", vary={name: text}, **more).axes[0]


@pytest.mark.parametrize(
    ("name", "text", "levels", "is_factor"),
    [
        ("sms", "100..116/4", (100, 104, 108, 112, 116), False),
        ("batch", "1,2,4,…,64", (1, 2, 4, 8, 16, 32, 64), False),
        ("batch", "4,8,12,...,24", (4, 8, 12, 16, 20, 24), False), ("hbm_bandwidth", "1x..2x/0.5", (1, 1.5, 2), True),
        ("batch", "1,2,…,5", (1, 2, 3, 4, 5), False), ("batch", "1,2,…,16", (1, 2, 4, 8, 16), False),
        ("l2", "50MB,100MB", (50e6, 100e6), False), ("hbm_bandwidth", "1x..4x:4", (1, 2, 3, 4), True),
        ("precision", "bf16,fp8", ("bf16", "fp8"), False),
        ("execution", "eager,cudagraph", ("eager", "cudagraph"), False),
        ("on", "h200,b200", ("h200", "b200"), False), ("margin", "0.3,0.85", (0.3, 0.85), False),
        ("batch", range(1, 4), (1, 2, 3), False), ("sms", "130..132", (130, 131, 132), False),
    ],
)  # fmt: skip
def test_levels_are_read_as_written(name, text, levels, is_factor):
    found = axis(text, name)
    assert (found.levels, found.is_factor) == (levels, is_factor)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("smss", "1,2", "no axis 'smss'; did you mean 'sms'"), ("sms", "4..1", "ends where it begins"),
        ("sms", "100..200/0", "step is not above zero"), ("l2", "1x,50MB", "factors \\(2x\\) or values, not both"),
        ("batch", "1,2,…,7,9", "write two levels"), ("batch", "1,3,…,6", "is not reached"),
        ("l2", "big", "cannot read"),
        ("batch", "1..8", "give the step"), ("batch", "1,1", "a level twice"), ("batch", "1,,2", "a level is empty"),
        ("l2", "1x..100MB", "both ends"), ("sms", "0,4", "not above zero"), ("on", "h300", "unknown device"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(name, text, said):
    on, name, text = (text, "l2", "1x,2x") if name == "on" else ("h200", name, text)
    with pytest.raises(RidgelineError, match=said) as caught:
        axis(text, name, on=on)
    assert "\n" not in str(caught.value)


def test_every_point_of_the_grid_has_one_number():
    space = Space("llama3-8b", vary={"l2": "1x,2x,3x", "batch": "1,2", "sms": "100,120",
                                     "execution": "eager,compiled"})  # fmt: skip
    points = space.grid(np.arange(space.size))
    rows = set(zip(*(column.tolist() for column in points.values()), strict=True))
    assert len(rows) == space.size == 24
    part = space.grid(np.arange(7, 13))
    assert all((part[name] == points[name][7:13]).all() for name in points)
    assert [a.name for a in space.axes] == ["batch", "execution", "sms", "l2"], "devices change fastest, SMs first"


def test_ranges_are_drawn_between_their_ends_and_levels_are_levels():
    space = Space("llama3-8b", vary={"l2": "1x..3x", "batch": "1,2,4"})
    found = space.drawn(np.array([[0.0, 0.0], [0.99, 0.5]]))
    assert found["batch"].tolist() == [1, 4]
    assert found["l2"].tolist() == [1.0, 2.0]


def test_what_is_fixed_is_not_varied_too():
    with pytest.raises(InputError, match="fixed and varied"):
        _ = Space("llama3-8b", vary={"batch": "1,2"}, options={"batch": 4}).axes
    with pytest.raises(InputError, match="nothing is varied"):
        Space("llama3-8b")
