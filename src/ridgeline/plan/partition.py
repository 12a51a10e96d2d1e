"""A training graph on one rank of a plan: sharded, differentiated, recomputed, narrowed, and cut into its pieces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ridgeline.errors import PlanError
from ridgeline.graph import Block, Graph, Kind, Node, Phase
from ridgeline.graph.backward import differentiate
from ridgeline.graph.build import with_frees
from ridgeline.plan import recompute
from ridgeline.plan.fused import with_attention, with_joins, with_permutes
from ridgeline.plan.layout import Mesh
from ridgeline.plan.plan import Plan
from ridgeline.plan.precision import narrowed
from ridgeline.plan.shard import shard, unsplittable

HEAD, TAIL = "head", "tail"
"""What runs before the first block (embedding) and after the last (final norm, logits, loss)."""


def forward_of(graph: Graph) -> Graph:
    """The forward part of a training graph, as it was before anything was differentiated."""
    if graph.mode != "train":
        return graph
    items = tuple(i for i in graph.items if _phase(i) is Phase.FORWARD)
    values = tuple(replace(v, count=1) if v.kind is Kind.ACTIVATION and v.count > 1 else v for v in graph.values)
    return replace(graph, items=items, values=values)


def _phase(item: Node | Block) -> Phase:
    return item.nodes[0].phase if isinstance(item, Block) else item.phase


def mesh_of(plan: Plan) -> Mesh:
    return Mesh(plan.tp, plan.cp, plan.ep, plan.etp, plan.sequence_parallel and plan.tp > 1)


def rank_graph(graph: Graph, plan: Plan, *, fused: bool = True) -> Graph:
    """What one rank computes for one micro-batch, all layers: forward, and for training backward and optimizer."""
    # One device, and the graph as it is
    if (
        plan.world == 1
        and graph.mode == "train"
        and (plan.recompute == "none" and plan.precision in ("bf16", "fp16", "fp32", "tf32") and not plan.attention)
    ):
        return replace(graph, meta={**graph.meta, "networked": True})
    local = _local(graph, plan)
    if graph.mode != "train":
        return local
    local = with_attention(local, plan.attention)
    local = with_joins(with_permutes(local)) if fused else local
    whole = {at: recompute.saved_bytes(local, at, back) for at, back in recompute.pairs(local)}
    local = replace(local, meta={**local.meta, "layer_bytes": whole})
    local = narrowed(_rerun(local, plan), plan.precision)
    return with_frees(recompute.fused_pointwise(local) if fused else local)


def _local(graph: Graph, plan: Plan) -> Graph:
    """Sharded and differentiated again; where nothing is split, the graph's own backward pass stays as it is."""
    mesh, meta = mesh_of(plan), {"networked": True}
    optimizer = "none" if plan.world > 1 else str(graph.meta.get("optimizer", "adamw"))
    if mesh == Mesh() and plan.expert_imbalance == 1.0 and optimizer == "none":
        items = tuple(i for i in graph.items if _phase(i) is not Phase.OPTIMIZER)
        return replace(graph, items=items, meta={**graph.meta, **meta})
    local = forward_of(graph)
    if mesh != Mesh() or not unsplittable(graph):
        local = shard(local, mesh, ring=plan.cp_kind == "ring", imbalance=plan.expert_imbalance)
    local = replace(local, meta={**local.meta, **meta})
    return local if graph.mode != "train" else differentiate(local, optimizer=optimizer)


def _rerun(local: Graph, plan: Plan) -> Graph:
    local = recompute.rerun(local, _regathered)
    if plan.recompute == "none":
        return local
    if plan.recompute == "full":
        return recompute.rerun(local, recompute.everything, whole=plan.execution != "eager")
    if plan.recompute == "selective":
        return recompute.rerun(local, recompute.core_attention, recompute.weight_gradient)
    return recompute.rerun(local, recompute.in_modules(plan.recompute.removeprefix("selective:").split("+")))


def _regathered(node: Node) -> bool:
    """Gathered activations are not kept: the weight gradient gathers them once more."""
    return node.op == "collective" and node.attrs["fn"] == "all_gather" and node.attrs["group"] == "tp"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the model that a pipeline stage holds whole: the head, one layer of a block, or the tail."""

    name: str
    repeat: int  # how many of these the model has
    layers: int  # transformer layers in one of them; models with alternating windows repeat several together
    param_numel: int  # elements one rank holds of one of them, experts apart
    expert_numel: int
    frozen_numel: int  # resident, never trained
    saved_bytes: int  # activations of one micro-batch kept for backward, one of them
    working_bytes: int  # alive only while a pass runs: what is recomputed, or its largest activations
    carried_bytes: int  # what flows into it from the layer before


@dataclass(frozen=True, slots=True)
class Partition:
    """A rank's graph and its pieces in model order: head, blocks, tail."""

    graph: Graph
    pieces: tuple[Piece, ...]

    @property
    def num_layers(self) -> int:
        return sum(p.repeat * p.layers for p in self.pieces if p.name not in (HEAD, TAIL))

    @property
    def blocks(self) -> tuple[Piece, ...]:
        return tuple(p for p in self.pieces if p.name not in (HEAD, TAIL))


def partition(graph: Graph, plan: Plan, *, fused: bool = True) -> Partition:
    """Cut a model for a plan; ``fused`` is whether elementwise chains are one kernel each (compiled or hand-fused)."""
    local = rank_graph(graph, plan, fused=fused)
    if not any(isinstance(i, Block) for i in local.items):
        if plan.pp > 1:
            raise PlanError(f"{graph.name} has no repeated layers: nothing to cut into {plan.pp} pipeline stages")
    fore = recompute.forward_blocks(local)
    backs = dict(recompute.pairs(local))
    ids = _param_piece(local, fore)
    made = []
    for number, at in enumerate(fore):
        block = local.items[at]
        assert isinstance(block, Block)
        saved = recompute.saved_bytes(local, at, backs[at], narrow=plan.narrow_activations) if at in backs else 0
        again = max(0, int(local.meta.get("layer_bytes", {}).get(at, saved)) - saved)
        made.append(
            _piece(
                local,
                f"{block.module or 'layer'}{number}",
                block.repeat,
                ids,
                number,
                saved,
                list(block.nodes),
                sum(local.values[c.inner].type.num_bytes for c in block.carries),
                again,
            )
        )
    outside = [i for i in local.items if isinstance(i, Node) and i.phase is Phase.FORWARD]
    # Plain forward nodes that come before the first block
    first = fore[0] if fore else len(local.items)
    split = sum(isinstance(i, Node) and i.phase is Phase.FORWARD for i in local.items[:first])
    head = _piece(local, HEAD, 1, ids, -1, 0, outside[:split], 0)
    kept = _outside_saved(local, fore)
    tail = _piece(local, TAIL, 1, ids, len(fore), kept, outside[split:], made[-1].carried_bytes if made else 0)
    return Partition(local, (head, *made, tail))


def _param_piece(graph: Graph, fore: list[int]) -> Mapping[int, int]:
    """Which piece first uses each resident tensor: -1 the head, then blocks by number, then the tail."""
    found: dict[int, int] = {}
    number = -1
    for at, item in enumerate(graph.items):
        if at in fore:
            number = fore.index(at)
            nodes = item.nodes if isinstance(item, Block) else ()
        else:
            nodes = (item,) if isinstance(item, Node) else ()
            if fore and at > fore[-1]:
                number = len(fore)
            elif not fore:
                number = -1
            else:
                number = -1 if at < fore[0] else number
        for node in nodes:
            if node.phase is Phase.FORWARD:
                for value in node.inputs:
                    found.setdefault(_root(graph, value), number)
    return found


def _root(graph: Graph, value: int) -> int:
    while (alias := graph.values[value].alias) is not None:
        value = alias
    return value


def _piece(graph: Graph, name: str, repeat: int, ids: Mapping[int, int], number: int, saved: int, nodes: list[Node],
           carried: int, again: int = 0) -> Piece:  # fmt: skip
    wide: Mapping[int, int] = graph.meta.get("narrow", {})
    used = {_root(graph, wide.get(v, v)) for v, at in ids.items() if at == number}
    mine = [graph.values[v] for v in used]
    params = [v for v in mine if v.kind is Kind.PARAM]
    experts = sum(v.type.numel * v.count for v in params if len(v.type.shape) == 3)
    plain = sum(v.type.numel * v.count for v in params if len(v.type.shape) != 3)
    weights = [v for v in mine if v.kind is Kind.BUFFER and v.name.endswith((".weight", "_proj"))]
    frozen = sum(v.type.numel * v.count for v in weights)
    largest = max((graph.values[o].type.num_bytes for n in nodes for o in n.outputs), default=0)
    working = max(again, 2 * largest) if name != TAIL else largest // 2
    # The heart of a layer: attention, or the softmax over scores where attention is spelled out
    layers = max(
        1,
        sum((n.op == "attention" or (n.op == "softmax" and len(graph.type_of(n.inputs[0]).shape) == 4)) for n in nodes),
    )
    held = layers if number >= 0 and name != TAIL else 0
    return Piece(name, repeat, held, plain // repeat, experts // repeat, frozen // repeat, saved, working, carried)


def _outside_saved(graph: Graph, fore: list[int]) -> int:
    """Activations made outside blocks that the backward pass reads: logits, the last norm's input."""
    made = {_root(graph, o) for i in graph.items if isinstance(i, Node) and i.phase is Phase.FORWARD for o in i.outputs}
    read: set[int] = set()
    for item in graph.items:
        for node in item.nodes if isinstance(item, Block) else (item,):
            if node.phase is Phase.BACKWARD:
                read.update(_root(graph, v) for v in node.inputs)
    kinds = graph.values
    return sum(kinds[r].type.num_bytes for r in made & read if kinds[r].kind is Kind.ACTIVATION)
