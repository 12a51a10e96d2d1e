"""Running forward ops again in the backward pass, so that what they made need not be kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ridgeline.graph import Block, Graph, Kind, Node, Phase, Value, root_of

Chosen = Callable[[Node], bool]
FUSED = frozenset({"pointwise", "copy"})
AGAIN = "recompute"
"""The target of a node that repeats a forward op: work of the hardware, not of the model."""


def pairs(graph: Graph) -> Iterator[tuple[int, int]]:
    """Indices of forward blocks and of the reversed blocks that are their gradients."""
    backward = [i for i, item in enumerate(graph.items) if isinstance(item, Block) and item.reverse]
    yield from zip(forward_blocks(graph), reversed(backward), strict=False)


def forward_blocks(graph: Graph) -> list[int]:
    """Indices of the blocks of the forward pass; an optimizer may have blocks of its own."""
    return [i for i, item in enumerate(graph.items)
            if isinstance(item, Block) and not item.reverse and item.nodes[0].phase is Phase.FORWARD]  # fmt: skip


def everything(node: Node) -> bool:
    """Full recomputation: only a layer's input is kept."""
    return True


def core_attention(node: Node) -> bool:
    """Selective recomputation: scores, probabilities and what follows from them inside attention."""
    if node.op in {"attention", "softmax"} or (node.op == "matmul" and node.attrs["b"] > 1):
        return True
    if node.module.rsplit(".", 1)[-1] not in ("self_attn", "attn", "attention", "core_attention"):
        return False
    return node.op == "random" or (
        node.op == "pointwise" and str(node.attrs["fn"]) in {"mul", "masked_fill", "where", "dropout"}
    )


def in_modules(words: Sequence[str]) -> Chosen:
    """Ops whose last module, or whose kind, is one of ``words``: mlp, layernorm, moe_act, mla_up_proj, moe …"""

    def chosen(node: Node) -> bool:
        return any(_means(word, node) for word in words)

    return chosen


def _means(word: str, node: Node) -> bool:
    module, op = node.module, node.op
    if word in ("core_attn", "core_attention"):
        return core_attention(node)
    if word in ("layernorm", "norm"):
        return op == "norm" and "layers" in module and "_a_" not in module
    if word in ("moe_act", "act"):
        return op == "pointwise" and (".experts" in module or module.endswith(".mlp"))
    if word == "mla_up_proj":
        return module.endswith(("q_b_proj", "kv_b_proj")) or (
            module.endswith("self_attn") and op in ("pointwise", "copy"))  # fmt: skip
    if word == "mlp":
        return ".mlp" in module and ".experts" not in module and ".gate" not in module
    if word == "moe":
        return ".mlp" in module
    return word in module


def weight_gradient(node: Node) -> bool:
    """A product that only makes a weight's gradient: nothing else in the backward pass waits for it."""
    return (node.op == "matmul" and bool(node.attrs.get("trans_a")) and node.attrs["b"] == 1) or (
        node.op == "grouped_matmul" and node.attrs.get("which") == "reduction")  # fmt: skip


def nobody(node: Node) -> bool:
    return False


def rerun(graph: Graph, chosen: Chosen, spared: Chosen = nobody, *, whole: bool = False) -> Graph:
    """The graph with chosen forward ops repeated at the start of their layer's backward pass.

    What ``spared`` readers read is kept as it is: attention's result is also the input of the product behind it. With
    ``whole`` a layer runs to its end though nobody reads the end, as checkpointing does that cannot stop early.
    """
    values, items = list(graph.values), list(graph.items)
    for fore, back in pairs(graph):
        first, second = items[fore], items[back]
        assert isinstance(first, Block)
        assert isinstance(second, Block)
        items[back] = _rerun_block(values, first, second, chosen, spared, whole=whole)
    return _recounted(replace(graph, values=tuple(values), items=tuple(items)))


def _rerun_block(values: list[Value], fore: Block, back: Block, chosen: Chosen, spared: Chosen = nobody, *,
                 whole: bool = False) -> Block:  # fmt: skip
    producers = {o: n for n in fore.nodes for o in n.outputs}
    again = _wanted([n for n in back.nodes if not spared(n)], producers, chosen)
    if whole:
        again = {id(n) for n in fore.nodes}
    fresh: dict[int, int] = {}
    clones = []
    for node in fore.nodes:
        if id(node) not in again:
            continue
        for out in node.outputs:
            old = values[out]
            alias = None if old.alias is None else fresh.get(old.alias, old.alias)
            fresh[out] = len(values)
            values.append(Value(len(values), old.type, Kind.ACTIVATION, alias, 1, "", old.storage_bytes))
        inputs = tuple(fresh.get(i, i) for i in node.inputs)
        clones.append(replace(node, inputs=inputs, outputs=tuple(fresh[o] for o in node.outputs),
                              phase=Phase.BACKWARD, target=AGAIN, frees=()))  # fmt: skip
    moved = tuple(n if spared(n) else replace(n, inputs=tuple(fresh.get(i, i) for i in n.inputs)) for n in back.nodes)
    return replace(back, nodes=(*clones, *moved))


def _wanted(readers: Sequence[Node], producers: dict[int, Node], chosen: Chosen) -> set[int]:
    """Identities of the forward nodes to run again: those whose results are read, and what these read in turn."""
    again: set[int] = set()
    stack = [i for n in readers for i in n.inputs if i in producers]
    while stack:
        node = producers[stack.pop()]
        if id(node) in again:
            continue
        source = producers.get(node.inputs[0]) if node.op == "view" and node.inputs else None
        if node.op == "view":
            wanted = source is not None and (_reaches(source, producers, chosen))
        else:
            wanted = chosen(node)
        if wanted:
            again.add(id(node))
            stack += [i for i in node.inputs if i in producers]
    return again


def _reaches(node: Node, producers: dict[int, Node], chosen: Chosen) -> bool:
    """Whether what a view looks at is recomputed."""
    while node.op == "view":
        above = producers.get(node.inputs[0])
        if above is None:
            return False
        node = above
    return chosen(node)


def fused_pointwise(graph: Graph) -> Graph:
    """Elementwise results that only elementwise gradients read are recomputed inside those kernels, for free."""
    values, items = list(graph.values), list(graph.items)
    for fore, back in pairs(graph):
        first, second = items[fore], items[back]
        assert isinstance(first, Block)
        assert isinstance(second, Block)
        producers = {o: n for n in first.nodes for o in n.outputs}
        kept = {root_of(values, i) for n in second.nodes if n.op not in FUSED | {"view"} for i in n.inputs}
        read = {root_of(values, i) for n in second.nodes for i in n.inputs}
        kept |= {r for r in read if r not in producers or producers[r].op not in FUSED}
        # Elementwise nodes whose output nothing heavy needs and whose inputs are kept, resident or cheap themselves
        found: set[int] = set()
        for node in first.nodes:
            if node.op not in FUSED or any(root_of(values, o) in kept for o in node.outputs):
                continue
            if all(_at_hand(values, i, producers, kept, found) for i in node.inputs):
                found.add(id(node))
        cheap = found
        items[back] = _rerun_block(values, first, second, lambda n, cheap=cheap: id(n) in cheap)  # type: ignore[misc]
    return _recounted(replace(graph, values=tuple(values), items=tuple(items)))


def _at_hand(values: Sequence[Value], value: int, producers: dict[int, Node], kept: set[int], found: set[int]) -> bool:
    root = root_of(values, value)
    maker = producers.get(root)
    return root in kept or maker is None or id(maker) in found


def _recounted(graph: Graph) -> Graph:
    """Only what backward passes still read is kept a slice an iteration."""
    values = list(graph.values)
    for fore, back in pairs(graph):
        first, second = graph.items[fore], graph.items[back]
        assert isinstance(first, Block)
        assert isinstance(second, Block)
        read = _chain(values, [i for n in second.nodes for i in n.inputs])
        local = {o for n in first.nodes for o in n.outputs} | {c.inner for c in first.carries}
        for at in local:
            if values[at].kind is Kind.ACTIVATION:
                values[at] = replace(values[at], count=first.repeat if at in read else 1)
    return replace(graph, values=tuple(values))


def _chain(values: Sequence[Value], start: Sequence[int]) -> set[int]:
    """Values and everything they alias."""
    found: set[int] = set()
    for value in start:
        at: int | None = value
        while at is not None and at not in found:
            found.add(at)
            at = values[at].alias
    return found


def saved_bytes(graph: Graph, fore: int, back: int, *, narrow: bool = False) -> int:
    """Activations that one iteration of a forward block keeps for its backward pass.

    With ``narrow``, what only elementwise gradients read is kept in eight bits.
    """
    first, second = graph.items[fore], graph.items[back]
    assert isinstance(first, Block)
    assert isinstance(second, Block)
    local = {o for n in first.nodes for o in n.outputs} | {c.inner for c in first.carries}
    roots = {_own_root(graph.values, i, local) for n in second.nodes for i in n.inputs if i in local}
    wide = {_own_root(graph.values, i, local) for n in second.nodes if n.op not in FUSED | {"view"} for i in n.inputs
            if i in local}  # fmt: skip
    kept = {r: graph.values[r].type for r in roots if r is not None}
    return sum(t.numel if narrow and r not in wide and t.dtype.bits > 8 else t.num_bytes for r, t in kept.items())


def _own_root(values: Sequence[Value], value: int, local: set[int]) -> int | None:
    """The storage of the block's own that a value lives in; None for one from outside."""
    at = value
    while (alias := values[at].alias) is not None and alias in local:
        at = alias
    return at if values[at].kind is Kind.ACTIVATION else None
