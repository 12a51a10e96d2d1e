"""Graph neural networks over a given number of nodes and edges: GCN and GraphSAGE."""

from __future__ import annotations

from ridgeline.graph import Graph, Kind, TensorType
from ridgeline.models.card import ModelCard, Request, register
from ridgeline.models.net import INT64, Net


def _aggregate(net: Net, x: int, edges: int, sources: int, targets: int, *, weights: int | None = None) -> int:
    """Sum (or weighted sum) of neighbors: gather along edges, scatter-add into their targets."""
    nodes, width = net.shape(x)
    messages = net.gather("index_select", [x, sources], edges, width)
    if weights is not None:
        messages = net.mul(messages, weights)
    return net.scatter(
        "index_add", [net.fill("zeros", nodes, width), messages, targets], nodes, width, dim=0, num=edges
    )


def _start(r: Request, features: int) -> tuple[Net, int, int, int]:
    net = Net(r.card.name, r.mode, r.precision, batch=r.batch, nodes=r["nodes"], edges=r["edges"])
    x = net.input("x", net.type(r.batch * r["nodes"], features))
    ends = [net.input(name, TensorType((r.batch * r["edges"],), INT64)) for name in ("sources", "targets")]
    return net, x, ends[0], ends[1]


def _finish(net: Net, logits: int) -> Graph:
    if not net.train:
        return net.finish([logits])
    rows = net.shape(logits)[0]
    return net.finish([net.cross_entropy(logits, net.input("labels", TensorType((rows,), INT64)))], frees=False)


def _gcn(r: Request) -> Graph:
    net, x, sources, targets = _start(r, 128)
    edges = r.batch * r["edges"]
    weights = net.value(net.type(edges, 1), Kind.BUFFER, name="edge_norm")
    for i, width in enumerate((256, 256, 40)):
        net.enter(f"convs.{i}")
        x = net.linear(x, width, "lin")
        x = net.add(_aggregate(net, x, edges, sources, targets, weights=weights), net.weight("bias", width))
        net.exit()
        if i < 2:
            x = net.pointwise("relu", net.batch_norm(x, f"bns.{i}"))
    return _finish(net, x)


def _sage(r: Request) -> Graph:
    net, x, sources, targets = _start(r, 100)
    edges = r.batch * r["edges"]
    degrees = net.value(net.type(net.shape(x)[0], 1), Kind.BUFFER, name="degrees")
    for i, width in enumerate((256, 256, 47)):
        net.enter(f"convs.{i}")
        mean = net.pointwise("div", _aggregate(net, x, edges, sources, targets), degrees)
        x = net.add(net.linear(mean, width, "lin_l", bias=True), net.linear(x, width, "lin_r"))
        net.exit()
        x = net.pointwise("relu", x) if i < 2 else x
    return _finish(net, x)


register(
    ModelCard(
        "gcn",
        "GCN on ogbn-arxiv",
        "gnn",
        110_120,
        "OGB leaderboard, ogbn-arxiv GCN",
        {},
        {"nodes": 169_343, "edges": 2_332_486},
    ),
    _gcn,
)
register(
    ModelCard(
        "graphsage",
        "GraphSAGE on ogbn-products",
        "gnn",
        206_895,
        "OGB leaderboard, ogbn-products GraphSAGE",
        {},
        {"nodes": 2_449_029, "edges": 123_718_280},
    ),
    _sage,
)
