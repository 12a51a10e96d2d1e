"""Driving perception: BEVFormer over cameras and PointPillars over lidar."""

from __future__ import annotations

from ridgeline.graph import Graph, TensorType
from ridgeline.models.card import ModelCard, Request, register
from ridgeline.models.dense import feature_pyramid, frozen_resnet
from ridgeline.models.net import INT64, Net
from ridgeline.models.vision import conv_bn


def deformable(
    net: Net, query: int, value: int, heads: int, levels: int, points: int, name: str, *, cameras: int = 1
) -> int:
    """Each query samples ``points`` places of every level's map and mixes them by learned weights."""
    rows, queries, hidden = net.shape(query)
    d = hidden // heads
    net.enter(name)
    keys = net.linear(value, hidden, "value_proj", bias=True)
    where = net.linear(query, heads * levels * points * 2, "sampling_offsets", bias=True)
    weights = net.linear(query, heads * levels * points, "attention_weights", bias=True)
    weights = net.softmax(net.reshape(weights, rows, queries, heads, levels * points))
    places = net.add(
        net.reshape(where, rows, queries, heads, levels * points, 2),
        net.buffer("reference_points", rows, queries, 1, 1, 2),
    )
    tokens = net.shape(keys)[1]
    maps = net.permute(net.reshape(keys, rows * cameras, tokens, heads, d), rows * cameras, heads, tokens, d)
    grid = net.permute(places, rows, heads, queries, levels * points, 2)
    sampled = net.node(
        "resize", [maps, grid], [net.type(rows, heads, d, queries, levels * points)], fn="grid_sampler_2d", which="fwd"
    )[0]
    mixed = net.mul(
        sampled,
        net.reshape(
            net.permute(weights, rows, heads, queries, levels * points), rows, heads, 1, queries, levels * points
        ),
    )
    out = net.reduce("sum", mixed, (-1,))
    out = net.contiguous(net.permute(out, rows, queries, heads, d))
    out = net.linear(net.reshape(out, rows, queries, hidden), hidden, "output_proj", bias=True)
    net.exit()
    return out


def _feed_forward(net: Net, x: int, ffn: int, name: str) -> int:
    y = net.linear(
        net.pointwise("relu", net.linear(x, ffn, f"{name}.0", bias=True)), net.shape(x)[-1], f"{name}.1", bias=True
    )
    return net.add(x, y)


def _bevformer(r: Request) -> Graph:
    cameras, side, hidden, ffn = r["cameras"], r["bev"], 256, 512
    r.multiple_of("image", 32, "the backbone's last stage has stride 32")
    net = Net(r.card.name, r.mode, r.precision, batch=r.batch, image=r.image)
    # ResNet-101 and a pyramid over every camera; all levels as one sequence of tokens
    height, width = r.image, r.image * 16 // 9 // 32 * 32
    pixels = net.input("images", net.type(r.batch * cameras, 3, height, width))
    maps = frozen_resnet(net, pixels, (3, 4, 23, 3))[1:]
    levels = feature_pyramid(net, maps, hidden)
    levels.append(net.conv(levels[-1], hidden, 3, "fpn.extra", stride=2, bias=True))
    flat = []
    for level in levels:
        n, c, h, w = net.shape(level)
        flat.append(net.permute(net.reshape(level, n, c, h * w), n, h * w, c))
    tokens = net.cat(flat, 1)
    tokens = net.add(tokens, net.weight("cams_embeds", 1, 1, hidden))
    cells = side * side
    queries = net.weight("bev_embedding.weight", 1, cells, hidden)
    places = net.weight("positional_encoding", 1, 2 * side, hidden // 2)
    rows = net.reshape(
        net.gather("index", [places, net.buffer("cells", cells, dt=INT64)], cells, hidden), 1, cells, hidden
    )
    start = net.add(net.expand_view(queries, r.batch, cells, hidden), rows)
    previous = net.input("previous_bev", net.type(r.batch, cells, hidden))
    x = start
    with net.repeat(6, "encoder.layers"):
        inner = net.carry(x)
        x = _bev_layer(net, inner, previous, tokens, cameras, ffn)
        net.close_carry(inner, x)
    return _detect(net, r, x, hidden, ffn)


def _bev_layer(net: Net, x: int, previous: int, tokens: int, cameras: int, ffn: int) -> int:
    """Attend to the last frame's map, then to the cameras that see each cell, then a feed-forward."""
    b, cells, hidden = net.shape(x)
    both = net.cat((previous, x), 1)
    y = deformable(net, x, both, 8, 1, 8, "temporal_attn")
    x = net.layer_norm(net.add(x, y), "norms.0")
    seen = max(1, cells // 4)  # a quarter of the map falls into each camera's view
    packed = net.gather("index", [x, net.buffer("visible", b * cameras * seen, dt=INT64)], b * cameras, seen, hidden)
    y = deformable(net, packed, tokens, 8, 4, 8, "spatial_attn")
    slots = net.scatter(
        "index_add",
        [net.fill("zeros", b, cells, hidden), y, net.buffer("visible", b * cameras * seen, dt=INT64)],
        b,
        cells,
        hidden,
    )
    y = net.linear(net.pointwise("div", slots, scalars=1), hidden, "spatial_attn.fuse", bias=True)
    x = net.layer_norm(net.add(x, y), "norms.1")
    return net.layer_norm(_feed_forward(net, x, ffn, "ffn"), "norms.2")


def _detect(net: Net, r: Request, bev: int, hidden: int, ffn: int) -> Graph:
    """A six-layer decoder of 900 object queries over the map."""
    b, objects = r.batch, 900
    memory = net.reshape(bev, *net.shape(bev))
    asked = net.expand_view(net.weight("query_embedding.weight", 1, objects, hidden), b, objects, hidden)
    y = net.add(asked, net.weight("query_positions.weight", 1, objects, hidden))
    with net.repeat(6, "decoder.layers"):
        inner = net.carry(y)
        y = _object_layer(net, inner, memory, ffn)
        net.close_carry(inner, y)
    classes, boxes = net.linear(y, 10, "cls_branches", bias=True), net.linear(y, 10, "reg_branches", bias=True)
    if not net.train:
        return net.finish([classes, boxes])
    labels = net.input("labels", TensorType((b * objects,), INT64))
    loss = net.cross_entropy(net.reshape(classes, b * objects, 10), labels)
    return net.finish([net.add(loss, net.mse(boxes, net.input("targets", net.type(b, objects, 10))))], frees=False)


def _object_layer(net: Net, x: int, memory: int, ffn: int) -> int:
    hidden = net.shape(x)[-1]
    net.enter("self_attn")
    q, k, v = (
        net.heads(part, 8, hidden // 8)
        for part in net.split(net.linear(x, 3 * hidden, "in_proj", bias=True), (hidden,) * 3)
    )
    y = net.linear(net.unheads(net.attention(q, k, v, causal=False)), hidden, "out_proj", bias=True)
    net.exit()
    x = net.layer_norm(net.add(x, y), "norms.0")
    x = net.layer_norm(net.add(x, deformable(net, x, memory, 8, 1, 4, "cross_attn")), "norms.1")
    return net.layer_norm(_feed_forward(net, x, ffn, "ffn"), "norms.2")


register(
    ModelCard(
        "bevformer",
        "BEVFormer, cameras to a bird's-eye view",
        "driving",
        65_574_804,
        "Li et al. 2022, base configuration with a plain ResNet-101; parameters as counted here",
        {"image": 928},
        {"cameras": 6, "bev": 200},
    ),
    _bevformer,
)


# PointPillars.


def _pointpillars(r: Request) -> Graph:
    net = Net(r.card.name, r.mode, r.precision, batch=r.batch)
    pillars, points, rows, cols = r["pillars"] * r.batch, 32, 496, 432
    x = net.linear(net.input("voxels", net.type(pillars, points, 10)), 64, "vfe.pfn_layers.0.linear")
    x = net.batch_norm(net.reshape(net.permute(x, pillars, 64, points), pillars, 64, points), "vfe.pfn_layers.0.norm")
    x = net.reduce("amax", net.pointwise("relu", x), (2,))
    index = net.input("voxel_coords", TensorType((pillars,), INT64))
    canvas = net.fill("zeros", r.batch, 64, rows, cols)
    x = net.scatter("index_put", [canvas, x, index], r.batch, 64, rows, cols, num=pillars)
    levels = []
    for i, (depth, width) in enumerate(((3, 64), (5, 128), (5, 256))):
        net.enter(f"backbone_2d.blocks.{i}")
        x = conv_bn(net, x, width, 3, "0.conv", "0.bn", stride=2)
        with net.repeat(depth, "layers"):
            inner = net.carry(x)
            x = conv_bn(net, inner, width, 3, "conv", "bn")
            net.close_carry(inner, x)
        y = net.conv(x, 128, 2**i, "deblock.0", stride=2**i, padding=0, transposed=True)
        levels.append(net.pointwise("relu", net.batch_norm(y, "deblock.1")))
        net.exit()
    x = net.cat(levels, 1)
    heads = [
        net.conv(x, o, 1, f"dense_head.{name}", bias=True)
        for name, o in (("conv_cls", 18), ("conv_box", 42), ("conv_dir_cls", 12))
    ]
    if not net.train:
        return net.finish(heads)
    losses = [net.mse(h, net.input(f"target_{i}", net.type(*net.shape(h)))) for i, h in enumerate(heads)]
    return net.finish([net.add(net.add(losses[0], losses[1]), losses[2])], frees=False)


register(
    ModelCard(
        "pointpillars",
        "PointPillars",
        "driving",
        4_834_888,
        "Lang et al. 2019 as OpenPCDet configures it for KITTI",
        {},
        {"pillars": 12_000},
    ),
    _pointpillars,
)
