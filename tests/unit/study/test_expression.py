"""The language of objectives and constraints: what it means, what it refuses, and that it never runs Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.errors import InputError, RidgelineError
from ridgeline.study.expression import parse, text_of

COLUMNS = {"a": np.array([1.0, 2.0, 3.0]), "b": np.array([3.0, 2.0, 1.0]), "word": np.array(["x", "y", "x"])}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", [1, 2, 3]), ("a + b * 2", [7, 6, 5]), ("(a + b) * 2", [8, 8, 8]), ("-a + 1", [0, -1, -2]),
        ("a < b", [1, 0, 0]), ("a < b or a > b and b < 2", [1, 0, 1]), ("not a < b", [0, 1, 1]),
        ("a <= 2000m", [1, 1, 0]), ("a > 150%", [0, 1, 1]), ("min(a, 2) / 2", [0.5, 1, 1]), ("a*1k", [1e3, 2e3, 3e3]),
        ("word == 'x'", [1, 0, 1]), ("a - b - 1", [-3, -1, 1]), ("max(a, b) >= 40ms", [1, 1, 1]),
        ("a != b", [1, 0, 1]), ("a >= b", [0, 1, 1]), ("a == b", [0, 1, 0]), ("a > b", [0, 0, 1]),
        ("a <= 150%", [1, 0, 0]), ("abs(a - 2)", [1, 0, 1]), ("sqrt(a * a)", [1, 2, 3]),
    ],
)  # fmt: skip
def test_an_expression_means_what_it_says(text, expected):
    assert np.asarray(parse(text).value(COLUMNS), dtype=float).tolist() == expected


@pytest.mark.parametrize(
    "text",
    [
        "", "a +", "(a", "a b", "a < 40 parsecs", "__import__('os').system('x')", "a; b", "a.b()", "eval(a)", "min(a)",
        "lambda: 1", "a[0]", "1 if a else 2", "a := 3", "f'{a}'", "((((" * 50 + "a", "a" * 2000, "missing",
    ],
)  # fmt: skip
def test_what_is_no_expression_is_refused_in_one_line(text):
    with pytest.raises(InputError) as caught:
        parse(text).value(COLUMNS)
    assert "\n" not in str(caught.value)


def test_conditions_joined_by_and_fail_one_by_one():
    found = parse("fits and tpot<40ms and (a or b)", {"tpot": "tpot_s"})
    assert [part.text for part in found.parts()] == ["fits", "tpot_s < 0.04", "a or b"]
    assert found.names() == ("fits", "tpot_s", "a", "b")


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text):
    try:
        tree = parse(text)
    except RidgelineError:
        return
    assert parse(text_of(tree.tree)).tree == parse(text_of(parse(text_of(tree.tree)).tree)).tree


@pytest.mark.parametrize(
    "text",
    [
        "a - (b - 1)", "a - b - 1", "a * (b - 1)", "a / (b * 2) - 1", "a / b * 2", "(0 - a) * b", "-a * b", "-(a - b)",
        "not (a < b or b < 2)", "not a < b or b < 2", "(a < b or b < 2) and a > 2", "a < b or b < 2 and a > 2",
        "(a < b) == (b < 2)", "min(a - 1, b) - (a - b)", "(not a < b) + 1", "word == 'x' and not (a < 2 and b < 2)",
    ],
)  # fmt: skip
def test_an_expression_written_out_again_means_the_same(text):
    first = parse(text)
    again = parse(text_of(first.tree))
    assert np.array_equal(first.value(COLUMNS), again.value(COLUMNS)), text_of(first.tree)


def test_a_logarithm_is_the_natural_one():
    assert parse("log(a)").value({"a": np.array([1.0, np.e])}).tolist() == [0.0, 1.0]
