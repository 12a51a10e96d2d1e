"""Embedding bags keep their table's size through the backward pass."""

from __future__ import annotations

import torch

import ridgeline as rl


def test_the_gradient_of_a_bag_knows_its_table_and_its_bags():
    with torch.device("meta"):
        bag = torch.nn.EmbeddingBag(5000, 64, mode="sum")
        ids = torch.zeros(128, 7, dtype=torch.int64)
    graph = rl.capture(bag, args=(ids,), mode="train", optimizer="sgd")
    forward, backward = (node for node, _ in graph.nodes() if node.op == "embedding_bag")
    for node in (forward, backward):
        assert (node.attrs["v"], node.attrs["d"], node.attrs["b"], node.attrs["l"]) == (5000, 64, 128, 7)
    assert backward.attrs["which"] == "bwd" and backward.attrs["fn"] == forward.attrs["fn"] == "sum"
