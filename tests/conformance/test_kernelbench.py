"""Recordings of KernelBench-like problems: the note says what they say, and our ways were right wherever they ran."""

import gzip
import json
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2]
NOTE = (HOME / "benchmarks/2026-11-15-kernelbench.md").read_text()


def results(name):
    with gzip.open(HOME / "data/recordings/h200" / name, "rt") as file:
        return json.load(file)


RACE = results("kernelbench_race1.json.gz")


@pytest.mark.parametrize("found", RACE, ids=lambda found: found["name"])
def test_a_problem_stands_in_the_note_as_it_was_recorded(found):
    times = [f"{1e3 * found[key]:.2f}" for key in ("eager_s", "compiled_s", "ours_s")]
    assert f"| {found['level']} | {found['name']} | {' | '.join(times)} |" in NOTE
    assert found["right"]


def test_the_note_counts_what_was_recorded():
    num = {word: sum(found["verdict"] == word for found in RACE) for word in ("faster", "even", "slower")}
    words = f"{len(RACE)} problems: {num['faster']} faster, {num['even']} even, {num['slower']} slower, none wrong"
    assert words in NOTE


def test_a_float32_product_on_the_tensor_cores_never_lost_its_race_to_the_library_by_much():
    races = [race for found in RACE for race in found["more"].get("contests", {}).get("seconds", {}).values()]
    products = [race for race in races if "halves" in race]
    assert len(products) > 20 and all(min(race.values()) < race["library"] for race in products)


SEARCH = results("kernelbench_search1.json.gz")


@pytest.mark.parametrize("found", SEARCH, ids=lambda found: found["name"])
def test_a_searched_problem_stands_in_the_note_and_was_right(found):
    times = ["" if found[key] is None else f"{1e3 * found[key]:.2f}" for key in ("eager_s", "compiled_s", "ours_s")]
    assert f"| {found['name']} | {' | '.join(times)} |" in NOTE
    assert found["right"]


def test_the_note_counts_what_searches_came_to():
    words = ("faster", "even", "slower", "no rival")
    num = {word: sum(found["verdict"] == word for found in SEARCH) for word in words}
    told = f"{len(SEARCH)} problems: {num['faster']} faster, {num['even']} even, {num['slower']} slower"
    assert f"{told}, {num['no rival']} without a rival, none wrong." in NOTE
    assert num["faster"] >= (len(SEARCH) - num["no rival"]) / 2


def test_no_result_of_a_search_is_slower_than_eager():
    assert all(found["ours_s"] <= 1.02 * found["eager_s"] for found in SEARCH)


APART = results("kernelbench_apart1.json.gz")


@pytest.mark.parametrize("found", APART, ids=lambda found: found["name"])
def test_a_problem_timed_apart_stands_in_the_note_and_was_right(found):
    times = ["" if found[key] is None else f"{1e3 * found[key]:.2f}" for key in ("eager_s", "compiled_s", "ours_s")]
    assert f"| {found['name']} | {' | '.join(times)} |" in NOTE
    assert found["right"]


def test_the_note_counts_what_was_timed_apart():
    words = ("faster", "even", "slower", "no rival")
    num = {word: sum(found["verdict"] == word for found in APART) for word in words}
    told = f"{len(APART)} problems: {num['faster']} faster, {num['even']} even, {num['slower']} slower"
    assert f"{told}, {num['no rival']} without a rival, none wrong." in NOTE
    assert num["faster"] >= (len(APART) - num["no rival"]) / 2 and sum(num.values()) == len(APART)


def test_nothing_timed_apart_is_slower_than_eager_and_what_is_slower_is_named():
    assert all(found["over_eager"] > 0.98 for found in APART)
    causes = NOTE[NOTE.index("The causes:") : NOTE.index("- 2/23 was called wrong")]
    assert all(found["name"] in causes for found in APART if found["verdict"] == "slower")
