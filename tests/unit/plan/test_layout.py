"""Shares of tensors that ranks hold."""

from __future__ import annotations

from ridgeline.graph.types import tensor
from ridgeline.plan.layout import Layout, Mesh, local_type, pieces


def test_the_fullest_rank_holds_whole_units() -> None:
    assert [pieces(12, 4), pieces(13, 4), pieces(1, 4)] == [3, 4, 1]
    assert [pieces(640, 4, 128), pieces(512, 4, 128), pieces(64, 4, 128)] == [256, 128, 128]


def test_context_and_tensor_ranks_split_the_dims_that_are_theirs() -> None:
    mesh = Mesh(tp=4, cp=2)
    assert local_type(tensor((8, 64, 32)), Layout(cp=1, tp=2), mesh).shape == (8, 32, 8)
    assert local_type(tensor((8, 64, 32)), Layout(), mesh).shape == (8, 64, 32)
    assert Layout(cp=1, tp=2).shifted(1) == Layout(cp=2, tp=3)


def test_ranks_of_an_expert_all_see_its_tokens_and_their_own_columns() -> None:
    assert local_type(tensor((8, 32)), Layout(home=False), Mesh(ep=4, etp=2)).shape == (16, 16)


def test_heads_are_split_whole() -> None:
    assert local_type(tensor((8, 640)), Layout(tp=1, unit=128), Mesh(tp=4)).shape == (8, 256)
