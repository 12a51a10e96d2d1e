from __future__ import annotations

from ridgeline.graph import Graph, to_text


def test_the_text_of_a_small_graph(mlp: Graph):
    lines = to_text(mlp).splitlines()
    totals = "11 nodes (5 written), 4,608 parameters in 9.22 kB"
    assert lines[0] == f"graph mlp (infer): {totals}, hash {mlp.content_hash}"
    assert lines[1:] == [
        "meta batch=8",
        "input %0:bf16[8,16]  # x",
        "param %1:bf16[16,32]  # proj_in.weight",
        "param %4:bf16[32,32]×4  # layers.*.fc.weight",
        "-- forward",
        "%2:bf16[8,32] = matmul(%0, %1) b=1 k=16 m=8 n=32  # proj_in",
        "repeat 4 × layers {",
        "  carry %3:bf16[8,32]@%2 = %2, then %6",
        "  %5:bf16[8,32] = matmul(%3, %4) b=1 k=32 m=8 n=32  # layers.*.fc",
        "  %6:bf16[8,32] = pointwise(%3, %5) fn=add frees %3,%5  # layers.*",
        "}",
        "%7:bf16[256]@%6 = view(%6) fn=view",
        "%8:fp32[] = reduce(%7) dims=(0) fn=sum frees %6",
        "return %8",
    ]


def test_phases_and_direction_are_written(trained: Graph):
    text = to_text(trained)
    assert text.count("-- ") == 3
    assert "repeat 5 × layers in reverse {" in text


def test_long_graphs_can_be_cut(mlp: Graph):
    text = to_text(mlp, max_items=1)
    assert "… 3 more items" in text
    assert "repeat" not in text


def test_str_is_the_text(mlp: Graph):
    assert str(mlp) == to_text(mlp)
