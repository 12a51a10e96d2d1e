"""Operator graphs: types, vocabulary, building, expanding, verifying, text and files."""

from ridgeline.graph.build import Builder, root_of, with_frees
from ridgeline.graph.expand import FlatNode, expand, slot_times
from ridgeline.graph.ops import OpDecl, declare, op, ops
from ridgeline.graph.serial import dumps, load, loads, save
from ridgeline.graph.text import to_text
from ridgeline.graph.types import (
    RESIDENT,
    Block,
    Carry,
    Graph,
    Item,
    Kind,
    Node,
    Phase,
    TensorType,
    Value,
    tensor,
    typed,
)
from ridgeline.graph.verify import problems, verify

__all__ = [
    "RESIDENT", "Block", "Builder", "Carry", "FlatNode", "Graph", "Item", "Kind", "Node", "OpDecl", "Phase",
    "TensorType", "Value", "declare", "dumps", "expand", "load", "loads", "op", "ops", "problems", "root_of", "save",
    "slot_times", "tensor", "to_text", "typed", "verify", "with_frees",
]  # fmt: skip
