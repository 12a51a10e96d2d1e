"""A template's graphs are those that its writer would have written."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from ridgeline.graph import Builder, Graph, Kind, TensorType, save, tensor, typed, verify
from ridgeline.graph.template import Template


def written(sizes: list[Any]) -> Graph:
    """A product and what comes behind it, with a tail only for more than one row."""
    rows, cols = sizes
    made = Builder("net", rows=rows)
    dt = tensor((1,), "bf16").dtype
    x = made.input("x", TensorType((rows, 64), dt))
    with made.repeat(3, "layers"):
        inner = made.carry(x)
        weight = made.param("weight", TensorType((64, 64), dt))
        out = made.node("matmul", [inner, weight], [typed((rows, 64), dt)], b=1, m=rows, n=64, k=64)[0]
        made.close_carry(inner, out)
    wide = made.value(typed((rows * 64, cols), dt), Kind.ACTIVATION, storage_bytes=rows * 4096)
    made.node("copy", [out], [wide], fn="expand")
    if rows > 1:
        made.node("pointwise", [wide], [typed((rows * 64, cols), dt)], fn="neg")
    return made.finish([wide])


@pytest.mark.parametrize("sizes", [(4, 7), (2, 1), (9, 64)])
def test_a_template_gives_the_graph_that_would_be_written(sizes: tuple[int, int]) -> None:
    made, wanted = Template((4, 7), written).at(sizes), written(list(sizes))
    assert made is not None
    assert made == wanted
    assert made.content_hash == wanted.content_hash
    assert str(made) == str(wanted)
    assert made.meta == wanted.meta
    verify(made)


def test_sizes_of_another_structure_have_no_graph_here() -> None:
    assert Template((4, 7), written).at((1, 7)) is None
    assert Template((1, 7), written).at((4, 7)) is None


def test_values_are_written_out_when_first_asked_for() -> None:
    made = Template((4, 7), written).at((5, 6))
    assert made is not None
    assert "values" not in made.__dict__
    assert made.values is made.values
    with pytest.raises(AttributeError, match="no lines"):
        made.lines  # type: ignore[attr-defined]  # noqa: B018


def test_a_graph_of_a_template_is_copied_changed_and_sent_as_a_plain_one(tmp_path: Any) -> None:
    made = Template((4, 7), written).at((5, 6))
    assert made is not None
    sent = pickle.loads(pickle.dumps(made))  # noqa: S301
    assert sent == made
    assert "template" not in sent.__dict__
    renamed = replace(made, name="other")
    assert (renamed.name, renamed.values) == ("other", made.values)
    assert "template" not in renamed.__dict__
    save(made, tmp_path / "graph.json")


def test_nodes_without_sizes_are_shared_and_those_with_are_not() -> None:
    template = Template((4, 7), written)
    first, second = template.at((5, 6)), template.at((6, 5))
    assert first is not None
    assert second is not None
    pairs = list(zip(first.nodes(), second.nodes(), strict=True))
    assert [a[0] is b[0] for a, b in pairs] == [False, True, True]
    assert [a[0].attrs.get("m") for a, _ in pairs] == [5, None, None]
