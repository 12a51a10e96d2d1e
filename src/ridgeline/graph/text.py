"""A graph as text: one line a node, blocks as loops, meant to be read and diffed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ridgeline.graph.types import RESIDENT, Graph, Item, Node
from ridgeline.units import show_bytes


def to_text(graph: Graph, max_items: int | None = None) -> str:
    """The whole graph, or its header and first ``max_items`` nodes and blocks."""
    lines = [*_header(graph), *_residents(graph)]
    shown = graph.items if max_items is None else graph.items[:max_items]
    phase = ""
    for item in shown:
        first = _first(item)
        if first is not None and first.phase != phase:
            phase = first.phase
            lines.append(f"-- {phase}")
        lines.extend(_item_lines(graph, item))
    if len(shown) < len(graph.items):
        lines.append(f"… {len(graph.items) - len(shown)} more items")
    lines.append("return " + ", ".join(f"%{o}" for o in graph.outputs))
    return "\n".join(lines) + "\n"


def _header(graph: Graph) -> Iterator[str]:
    num_lines = sum(1 for _ in graph.nodes())
    yield (f"graph {graph.name} ({graph.mode}): {graph.num_nodes:,} nodes ({num_lines:,} written), "
           f"{graph.num_params:,} parameters in {show_bytes(graph.param_bytes)}, hash {graph.content_hash}")
    if graph.meta:
        yield "meta " + " ".join(f"{key}={_attr(graph.meta[key])}" for key in sorted(graph.meta))


def _residents(graph: Graph) -> Iterator[str]:
    for v in graph.values:
        if v.kind in RESIDENT and v.alias is None:
            yield f"{v.kind} {_written(graph, v.id)}" + (f"  # {v.name}" if v.name else "")


def _first(item: Item) -> Node | None:
    if isinstance(item, Node):
        return item
    return item.nodes[0] if item.nodes else None


def _item_lines(graph: Graph, item: Item) -> Iterator[str]:
    if isinstance(item, Node):
        yield _node_line(graph, item)
        return
    order = " in reverse" if item.reverse else ""
    yield f"repeat {item.repeat} × {item.module or 'block'}{order} {{"
    for c in item.carries:
        yield f"  carry {_written(graph, c.inner)} = %{c.init}, then %{c.next}"
    for node in item.nodes:
        yield "  " + _node_line(graph, node)
    yield "}"


def _node_line(graph: Graph, node: Node) -> str:
    left = ", ".join(_written(graph, o) for o in node.outputs)
    line = f"{left} = " if left else ""
    line += f"{node.op}({', '.join(f'%{i}' for i in node.inputs)})"
    line += "".join(f" {key}={_attr(node.attrs[key])}" for key in sorted(node.attrs))
    if node.frees:
        line += " frees " + ",".join(f"%{f}" for f in node.frees)
    notes = [note for note in (node.module, node.target, node.source) if note]
    return line + (f"  # {' · '.join(notes)}" if notes else "")


def _written(graph: Graph, value: int) -> str:
    v = graph.values[value]
    stack = f"×{v.count}" if v.count > 1 else ""
    return f"%{v.id}:{v.type}{stack}" + (f"@%{v.alias}" if v.alias is not None else "")


def _attr(value: Any) -> str:
    if isinstance(value, str):
        return value if value.isidentifier() else repr(value)
    if isinstance(value, Sequence):
        return "(" + ",".join(_attr(v) for v in value) + ")"
    return str(value)
