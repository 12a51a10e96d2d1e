from __future__ import annotations

import inspect

import ridgeline.errors as errors
from ridgeline.errors import MissingExtra, RidgelineError, nearest


def test_everything_raised_on_purpose_has_one_root():
    tree = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, Exception)]
    assert len(tree) > 5
    assert all(issubclass(c, RidgelineError) and c.__doc__ for c in tree)


def test_a_near_miss_is_suggested():
    assert nearest("h20O", ["h200", "a100", "l4"]) == "; did you mean 'h200'?"
    assert nearest("H200", ["h200"]) == "; did you mean 'h200'?"


def test_far_words_list_what_is_known_in_order_and_not_too_many():
    assert nearest("zzz", ["b", "a"]) == "; known: a, b"
    assert nearest("zzz", [f"name{i:02}" for i in range(20)]).endswith("name11, …")
    assert nearest("zzz", []) == ""


def test_a_missing_library_says_what_to_install():
    assert str(MissingExtra("torch", "torch", "capture")) == "capture needs torch: pip install 'ridgeline[torch]'"
