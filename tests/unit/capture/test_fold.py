"""Repeated structure is kept once, and unrolling gives the recording back."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn

from ridgeline.capture import capture
from ridgeline.capture.fold import first_difference, folded
from ridgeline.graph import Block, Graph, Kind
from ridgeline.graph.verify import problems

from .conftest import Mlp, live_bytes, nodes_of

X = torch.empty(64, 16, device="meta")


def blocks(graph: Graph) -> list[Block]:
    return [item for item in graph.items if isinstance(item, Block)]


def both(model: Any, args: tuple[Any, ...], **how: Any) -> tuple[Graph, Graph]:
    flat = capture(model, args, fold=False, **how)
    return flat, folded(flat)


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_unrolling_gives_the_recording_back(mode: str, checkpointed: bool) -> None:
    flat, made = both(Mlp(8, checkpointed=checkpointed), (X,), mode=mode)
    assert blocks(made)
    assert first_difference(made, flat) is None
    assert not problems(flat)
    assert not problems(made)
    assert made.num_nodes == flat.num_nodes
    assert made.num_params == flat.num_params
    assert max(live_bytes(made)) == max(live_bytes(flat))


def test_forward_and_backward_of_equal_layers_are_one_block_each() -> None:
    _, made = both(Mlp(12), (X,), mode="train")
    layers = [b for b in blocks(made) if b.module == "layers"]
    assert [b.reverse for b in layers] == [False, True]
    assert layers[0].repeat == layers[1].repeat >= 10
    assert {f"layers.*.{i}" for i in range(4)} <= {n.module for n in layers[0].nodes}


def test_the_size_does_not_grow_with_depth() -> None:
    few, many = (both(Mlp(n), (X,), mode="train")[1] for n in (8, 40))
    assert len(few.items) == len(many.items)
    assert len(few.values) == len(many.values)


def test_parameters_and_their_states_are_stacks() -> None:
    _, made = both(Mlp(10), (X,), mode="train")
    stacks = {v.kind for v in made.values if v.count > 1 and v.alias is None}
    assert {Kind.PARAM, Kind.STATE, Kind.GRAD} <= stacks
    assert sum(v.num_bytes * v.count for v in made.values if v.kind is Kind.STATE) == 2 * made.param_bytes


def test_patterns_of_several_layers_fold_too() -> None:
    class Alternating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(16, 16) if i % 2 else nn.LayerNorm(16) for i in range(16)])

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = torch.sin(layer(x))
            return x

    flat, made = both(Alternating(), (X,))
    (block,) = blocks(made)
    assert block.repeat >= 6
    assert {n.op for n in block.nodes} >= {"matmul", "norm"}
    assert first_difference(made, flat) is None


def test_skip_connections_across_layers_are_left_flat_rather_than_folded_wrong() -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(8)])

        def forward(self, x: Any) -> Any:
            seen = [x]
            for layer in self.layers:
                seen.append(layer(seen[-1]))
            return sum(a * b for a, b in zip(seen, reversed(seen), strict=True))

    flat, made = both(Skipping(), (X,), mode="train")
    assert first_difference(made, flat) is None
    assert made.num_nodes == flat.num_nodes


def test_shared_layers_fold_with_one_parameter() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)
            self.layers = nn.ModuleList([nn.Sequential(self.layer, nn.ReLU()) for _ in range(6)])

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    flat, made = both(Shared(), (X,), mode="train")
    assert made.num_params == 16 * 16 + 16
    assert first_difference(made, flat) is None


def test_captures_of_the_same_thing_hash_equal() -> None:
    one, other = (capture(Mlp(6), (X,), mode="train") for _ in range(2))
    assert one.content_hash == other.content_hash
    assert [n.attrs for n in nodes_of(one)] == [n.attrs for n in nodes_of(other)]
