"""Operator graphs: types, vocabulary, building, expanding, verifying, text and files."""

from ridgeline.graph.build import Builder, root_of, with_frees
from ridgeline.graph.expand import FlatNode, expand, slot_times
from ridgeline.graph.ops import OpDecl, declare, op, ops
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
)

__all__ = [
    "RESIDENT", "Block", "Builder", "Carry", "FlatNode", "Graph", "Item", "Kind", "Node", "OpDecl", "Phase",
    "TensorType", "Value", "declare", "expand", "op", "ops", "root_of", "slot_times", "tensor", "with_frees",
]  # fmt: skip
