"""Small modules and readings that the capture tests share."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ridgeline.graph import RESIDENT, Graph, Node, expand


class Mlp(torch.nn.Module):
    """A residual stack of equal layers, with activation checkpointing on demand."""

    def __init__(self, layers: int = 6, width: int = 16, *, checkpointed: bool = False) -> None:
        super().__init__()
        nn = torch.nn
        self.layers = nn.ModuleList(
            [
                nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                for _ in range(layers)
            ]
        )
        self.checkpointed = checkpointed

    def forward(self, x: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x))
        return x


def nodes_of(graph: Graph) -> list[Node]:
    return [node for node, _ in graph.nodes()]


def ops_of(graph: Graph, phase: str = "forward") -> list[str]:
    return [node.op for node in nodes_of(graph) if node.phase == phase]


def kernels_of(graph: Graph, phase: str = "forward") -> list[str]:
    """Ops that do something on the device."""
    return [op for op in ops_of(graph, phase) if op not in ("view", "alloc", "host")]


def live_bytes(graph: Graph) -> list[int]:
    """Bytes of everything that is not resident, after each node of the unrolled schedule."""
    live: dict[tuple[int, int], int] = {}
    curve = []
    for flat in expand(graph, 10**9):
        for out in flat.outputs:
            if graph.values[out[0]].kind not in RESIDENT:
                live.setdefault(out, graph.values[out[0]].num_bytes)
        for freed in flat.frees:
            live.pop(freed, None)
        curve.append(sum(live.values()))
    return curve
