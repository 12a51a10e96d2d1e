"""Kernels that training frameworks write by hand where autograd would dispatch slow general ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ridgeline.graph import Block, Graph, Item, Node, Phase


def with_attention(graph: Graph, backend: str) -> Graph:
    """The graph with a given attention library instead of the framework's own choice."""
    if not backend:
        return graph
    return _mapped(graph, lambda n: replace(n, attrs={**n.attrs, "backend": backend}) if n.op == "attention" else n)


def with_permutes(graph: Graph) -> Graph:
    """Gradients of gathered rows as one pass that sums each row's copies, not as an indexed addition to zeros."""
    zeros = {n.outputs[0] for n, _ in graph.nodes() if n.op == "fill" and n.phase is Phase.BACKWARD}
    filled = {n.inputs[0] for n, _ in graph.nodes() if _adds_rows(n) and n.inputs[0] in zeros}
    values = list(graph.values)
    for node, _ in graph.nodes():
        if _adds_rows(node) and node.inputs[0] in filled:
            out = node.outputs[0]
            values[out] = replace(values[out], alias=None)
    made = _mapped(graph, lambda n: _summed(n, filled))
    items = tuple(_without(item, filled) for item in made.items)
    return replace(made, items=tuple(i for i in items if i is not None), values=tuple(values))


def with_joins(graph: Graph) -> Graph:
    """Concatenations written by the kernels that make the pieces: bytes move, no element asks where it belongs."""
    return _mapped(graph, _joined)


def _joined(node: Node) -> Node:
    if node.op != "copy" or node.attrs.get("fn") != "cat" or "layers" not in node.module:
        return node
    return replace(node, op="pointwise", attrs={"fn": "add"})


def _adds_rows(node: Node) -> bool:
    return node.op == "scatter" and node.attrs.get("fn") == "index_add" and node.phase is Phase.BACKWARD


def _summed(node: Node, filled: set[int]) -> Node:
    if not _adds_rows(node) or node.inputs[0] not in filled:
        return node
    return replace(node, op="pointwise", inputs=(node.inputs[1],), attrs={"fn": "add"})


def _without(item: Item, filled: set[int]) -> Item | None:
    """Zeros that nothing is added to any more are not written."""
    if isinstance(item, Node):
        return None if item.op == "fill" and item.outputs[0] in filled else item
    kept = [n for n in item.nodes if not (n.op == "fill" and n.outputs[0] in filled)]
    return replace(item, nodes=tuple(kept))


def _mapped(graph: Graph, change: Callable[[Node], Node]) -> Graph:
    def nodes(found: Sequence[Node]) -> tuple[Node, ...]:
        return tuple(change(n) for n in found)

    items = tuple(replace(i, nodes=nodes(i.nodes)) if isinstance(i, Block) else change(i) for i in graph.items)
    return replace(graph, items=items)
