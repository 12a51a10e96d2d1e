"""Narrow matrix products in training: operands quantized once, products in eight or four bits, results wide."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.dtypes import DType, dtype
from ridgeline.errors import PlanError, nearest
from ridgeline.graph import Block, Graph, Kind, Node, TensorType, Value


@dataclass(frozen=True, slots=True)
class Recipe:
    """A precision of training: what products compute in, and bytes a parameter and its states take."""

    name: str
    compute: str  # element type of the matrix products
    wide: str  # element type of activations
    weight_bytes: float  # kept for the products, all copies
    saved_bytes: float  # per element of a product's input kept for the weight gradient

    def kept_bytes(self, narrow_only: bool) -> float:
        """Bytes a parameter takes for the products: all copies, or the narrow one alone."""
        return dtype(self.compute).itemsize if narrow_only else self.weight_bytes

    @property
    def narrow(self) -> DType | None:
        return dtype(self.compute) if self.compute in ("fp8", "fp4") else None


RECIPES = {
    r.name: r
    for r in (
        Recipe("fp32", "fp32", "fp32", 4.0, 4.0),
        Recipe("tf32", "tf32", "fp32", 4.0, 4.0),
        Recipe("fp16", "fp16", "fp16", 2.0, 2.0),
        Recipe("bf16", "bf16", "bf16", 2.0, 2.0),
        Recipe("fp8", "fp8", "bf16", 2.0, 1.0),  # per-tensor scaling: a copy and its transpose
        Recipe("mxfp8", "fp8", "bf16", 2.06, 1.03),  # 32-element blocks along rows and along columns
        Recipe("nvfp4", "fp4", "bf16", 1.13, 0.56),
    )
}


def recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise PlanError(f"unknown precision {name!r}{nearest(name, RECIPES)}")
    return RECIPES[name]


def narrowed(graph: Graph, name: str) -> Graph:
    """The rank's training graph with the products of its layers in the recipe's narrow type."""
    narrow = recipe(name).narrow
    return graph if narrow is None else _Narrower(graph, narrow).run()


class _Narrower:
    def __init__(self, graph: Graph, narrow: DType) -> None:
        self.graph, self.narrow = graph, narrow
        self.values = list(graph.values)
        self.copies: dict[int, int] = {}  # value → its narrow copy
        self.made_in: dict[int, int] = {}  # copy → the item that made it

    def run(self) -> Graph:
        items = tuple(
            replace(item, nodes=self._nodes(item, at)) if isinstance(item, Block) else item
            for at, item in enumerate(self.graph.items)
        )
        narrow = {copy: value for value, copy in self.copies.items()}
        return replace(self.graph, items=items, values=tuple(self.values), meta={**self.graph.meta, "narrow": narrow})

    def _nodes(self, block: Block, at: int) -> tuple[Node, ...]:
        made: list[Node] = []
        for node in block.nodes:
            if node.op == "matmul" and self.values[node.inputs[0]].type.dtype.name == "fp32":
                made += self._on_tensor_cores(node)
                continue
            if not self._is_narrow(node):
                made.append(node)
                continue
            inputs = [self._copy(v, made, node, at, block.repeat) for v in node.inputs[:2]]
            made.append(replace(node, inputs=(*inputs, *node.inputs[2:])))
        return tuple(made)

    def _on_tensor_cores(self, node: Node) -> list[Node]:
        """A router's product in full precision runs on the matrix units in tf32."""
        inputs = []
        for value in node.inputs[:2]:
            seen = self.values[value]
            inputs.append(len(self.values))
            self.values.append(Value(inputs[-1], TensorType(seen.type.shape, dtype("tf32")), seen.kind, value))
        views = [Node("view", (v,), (i,), {"fn": "view"}, node.phase, node.module)
                 for v, i in zip(node.inputs[:2], inputs, strict=True)]  # fmt: skip
        return [*views, replace(node, inputs=(*inputs, *node.inputs[2:]))]

    def _is_narrow(self, node: Node) -> bool:
        """Products of layers with a parameter or for one; routers, adapters and attention stay wide."""
        if node.op == "grouped_matmul":
            return True
        if node.op != "matmul" or node.attrs["b"] > 1 or node.module.endswith(".gate"):
            return False
        wide = self.values[node.inputs[0]].type.dtype.name in ("bf16", "fp16")
        return wide and min(node.attrs["m"], node.attrs["n"], node.attrs["k"]) >= 128

    def _copy(self, value: int, made: list[Node], node: Node, at: int, repeat: int) -> int:
        known = self.copies.get(value)
        if known is not None:
            if self.made_in[known] not in (at, -1) and self.values[known].count == 1:
                self.values[known] = replace(self.values[known], count=repeat)
            return known
        seen = self.values[value]
        resident = seen.kind in (Kind.PARAM, Kind.BUFFER)
        type_ = TensorType(seen.type.shape, self.narrow)
        new = len(self.values)
        self.values.append(Value(new, type_, Kind.BUFFER if resident else Kind.ACTIVATION, None,
                                 seen.count if resident else 1, f"{seen.name}.narrow" if resident else ""))  # fmt: skip
        self.copies[value], self.made_in[new] = new, -1 if resident else at
        if not resident:
            other = len(self.values)  # the transposed copy, read by the weight gradient
            self.values.append(Value(other, type_))
            made.append(Node("quantize", (value,), (new, other), {"fn": self.narrow.name}, node.phase, node.module))
        return new
