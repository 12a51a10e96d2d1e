"""Recommenders: DLRM with dot interactions, DLRM with deep crosses (DCNv2), and HSTU."""

from __future__ import annotations

from ridgeline.graph import Graph, TensorType
from ridgeline.models.card import ModelCard, Request, register
from ridgeline.models.net import INT64, Net

ROWS_2020 = (
    39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10, 2208, 11938, 155, 4,
    976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36,
)  # fmt: skip
"""Rows per categorical feature of Criteo 1TB as MLPerf's first DLRM caps them at 40 million."""

ROWS_2023 = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4,
    976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)  # fmt: skip
"""The same for MLPerf's DLRM-DCNv2 with the multi-hot data set."""

HOTS = (
    3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1,
)  # fmt: skip
"""Lookups per sample of each feature in the multi-hot data set."""

DIM, DENSE = 128, 13


def _bags(net: Net, rows: tuple[int, ...], hots: tuple[int, ...], batch: int) -> list[int]:
    """One pooled lookup per table."""
    out: list[int] = []
    for i, (v, hot) in enumerate(zip(rows, hots, strict=True)):
        net.enter(f"embeddings.{i}")
        table = net.weight("weight", v, DIM)
        indices = net.input(f"sparse_{i}", TensorType((batch * hot,), INT64))
        out += net.node("embedding_bag", [table, indices], [net.type(batch, DIM)], v=v, d=DIM, b=batch, l=hot, fn="sum")
        net.exit()
    return out


def _tower(net: Net, x: int, widths: tuple[int, ...], name: str, *, last_relu: bool) -> int:
    for i, width in enumerate(widths):
        x = net.linear(x, width, f"{name}.{2 * i}", bias=True)
        if last_relu or i < len(widths) - 1:
            x = net.pointwise("relu", x)
    return x


def _click(net: Net, logit: int, batch: int) -> Graph:
    """A click probability, or in training its binary cross-entropy."""
    if not net.train:
        return net.finish([net.pointwise("sigmoid", logit)])
    clicks = net.input("clicks", net.type(batch, 1))
    loss = net.node(
        "loss", [logit, clicks], [net.type()], fn="binary_cross_entropy_with_logits", n=batch, c=1, reduction="mean"
    )[0]
    return net.finish([loss], frees=False)


def _dlrm(r: Request) -> Graph:
    net = Net(r.card.name, r.mode, r.precision, batch=r.batch)
    bottom = _tower(net, net.input("dense", net.type(r.batch, DENSE)), (512, 256, DIM), "bot_l", last_relu=True)
    sparse = _bags(net, ROWS_2020, (1,) * 26, r.batch)
    features = net.reshape(net.cat((bottom, *sparse), 1), r.batch, 27, DIM)
    dots = net.node(
        "matmul", [features, features], [net.type(r.batch, 27, 27)], b=r.batch, m=27, n=27, k=DIM, trans_b=True
    )[0]
    pairs = net.gather("index", [dots, net.buffer("pairs", 351, dt=INT64)], r.batch, 351)
    x = _tower(net, net.cat((bottom, pairs), 1), (1024, 1024, 512, 256, 1), "top_l", last_relu=False)
    return _click(net, x, r.batch)


def _dcn(r: Request) -> Graph:
    net = Net(r.card.name, r.mode, r.precision, batch=r.batch)
    bottom = _tower(net, net.input("dense", net.type(r.batch, DENSE)), (512, 256, DIM), "dense_arch", last_relu=True)
    sparse = _bags(net, ROWS_2023, HOTS, r.batch)
    first = x = net.cat((bottom, *sparse), 1)
    width = net.shape(first)[1]
    for i in range(3):
        net.enter(f"crossnet.{i}")
        low = net.linear(x, 512, "V_kernel")
        x = net.add(net.mul(first, net.linear(low, width, "W_kernel", bias=True)), x)
        net.exit()
    return _click(net, _tower(net, x, (1024, 1024, 512, 256, 1), "over_arch", last_relu=False), r.batch)


def _hstu(r: Request) -> Graph:
    """Sequential transduction: pointwise-normalized attention, gated by a projection of its input."""
    layers, hidden, heads, items = 16, 256, 8, 26_744
    net = Net(r.card.name, r.mode, r.precision, batch=r.batch, seq=r.seq)
    s, d = r.seq, hidden // heads
    history = net.input("item_ids", TensorType((r.batch, s), INT64))
    x, table = net.embedding(history, items + 1, hidden, "item_embeddings")
    places, _ = net.embedding(net.fill("arange", 1, s, dt=INT64), s, hidden, "position_embeddings")
    x = net.add(net.pointwise("mul", x, scalars=1), places)
    with net.repeat(layers, "layers"):
        inner = net.carry(x)
        both = net.pointwise("silu", net.linear(net.layer_norm(inner, "input_norm", affine=False), 4 * hidden, "uvqk"))
        u, v, q, k = net.split(both, (hidden,) * 4)
        y = _pointwise_attention(net, net.heads(q, heads, d), net.heads(k, heads, d), net.heads(v, heads, d))
        y = net.mul(u, net.layer_norm(net.unheads(y), "output_norm", affine=False))
        x = net.add(net.linear(y, hidden, "o", bias=True), inner)
        net.close_carry(inner, x)
    x = net.layer_norm(x, "norm", affine=False)
    logits = net.linear(x, items + 1, "item_logits", weight=table)
    if not net.train:
        return net.finish([logits])
    rows = r.batch * s
    labels = net.input("labels", TensorType((rows,), INT64))
    return net.finish([net.cross_entropy(net.reshape(logits, rows, items + 1), labels)], frees=False)


def _pointwise_attention(net: Net, q: int, k: int, v: int) -> int:
    """silu(q·kᵀ + relative bias)/s·v under a causal mask: no softmax."""
    b, h, s, d = net.shape(q)
    flat = [net.reshape(net.contiguous(x), b * h, s, d) for x in (q, k, v)]
    scores = net.reshape(net.bmm(flat[0], flat[1], trans_b=True), b, h, s, s)
    offsets = net.gather(
        "index", [net.weight("rel_attn_bias.pos_w", 2 * s - 1), net.buffer("offsets", s * s, dt=INT64)], s * s
    )
    ages = net.gather(
        "index", [net.weight("rel_attn_bias.ts_w", 129), net.fill("bucketize", b * s * s, dt=INT64)], b * s * s
    )
    bias = net.add(net.reshape(ages, b, 1, s, s), net.reshape(offsets, 1, 1, s, s))
    weights = net.pointwise("silu", net.add(scores, bias))
    weights = net.mul(net.pointwise("div", weights, scalars=1), net.buffer("attn_mask", 1, 1, s, s))
    return net.reshape(net.bmm(net.reshape(weights, b * h, s, s), flat[2]), b, h, s, d)


def _ncf(r: Request) -> Graph:
    """Neural collaborative filtering on MovieLens 20M: a product of factors beside a tower."""
    users, items, factors, widths = 138_493, 26_744, 64, (256, 256, 128, 64)
    net = Net(r.card.name, r.mode, r.precision, batch=r.batch)
    user, item = (net.input(name, TensorType((r.batch,), INT64)) for name in ("user", "item"))
    pair = [
        net.embedding(ids, rows, cols, f"{name}_{kind}")[0]
        for kind, cols in (("mf", factors), ("mlp", widths[0] // 2))
        for ids, rows, name in ((user, users, "user"), (item, items, "item"))
    ]
    product, x = net.mul(pair[0], pair[1]), net.cat(pair[2:], 1)
    x = _tower(net, x, widths[1:], "mlp", last_relu=True)
    return _click(net, net.linear(net.cat((product, x), 1), 1, "final", bias=True), r.batch)


def _wide_and_deep(r: Request) -> Graph:
    """Outbrain click prediction: embeddings and a deep tower beside a linear model on one-hot features."""
    rows = (379_000, 300_000, 100_000, 4_000, 3_000, 2_500, 2_000, 1_000, 350, 250, 100, 100, 30, 10, 5, 5)
    net = Net(r.card.name, r.mode, r.precision, batch=r.batch)
    dense = net.input("dense", net.type(r.batch, 13))
    ids = [net.input(f"sparse_{i}", TensorType((r.batch,), INT64)) for i in range(len(rows))]
    deep = [net.embedding(x, v, 64, f"deep.{i}")[0] for i, (x, v) in enumerate(zip(ids, rows))]
    wide = [net.embedding(x, v, 1, f"wide.{i}")[0] for i, (x, v) in enumerate(zip(ids, rows))]
    x = _tower(net, net.cat((dense, *deep), 1), (1024, 1024, 1024, 1024, 1024, 1), "tower", last_relu=False)
    return _click(net, net.add(x, net.reduce("sum", net.cat(wide, 1), (1,), keepdim=True)), r.batch)


register(
    ModelCard(
        "ncf", "NeuMF on MovieLens 20M", "recommender", 31_832_577,
        "NVIDIA/DeepLearningExamples PyTorch/Recommendation/NCF, layers counted", {},
    ),
    _ncf,
)  # fmt: skip
register(
    ModelCard(
        "wide-and-deep", "Wide & Deep on Outbrain", "recommender", 56_765_087,
        "NVIDIA/DeepLearningExamples TensorFlow2/Recommendation/WideAndDeep; table sizes rounded, layers counted", {},
    ),
    _wide_and_deep,
)  # fmt: skip
register(
    ModelCard(
        "dlrm",
        "DLRM, dot interactions",
        "recommender",
        24_036_595_969,
        "MLPerf training v0.7: Criteo 1TB capped at 40 million rows, dim 128",
        {},
    ),
    _dlrm,
)
register(
    ModelCard(
        "dlrm-dcnv2",
        "DLRM with deep crosses",
        "recommender",
        26_151_671_809,
        "MLPerf training v3.0 DLRM-DCNv2: multi-hot Criteo 1TB, dim 128",
        {},
        aliases=("dcnv2",),
    ),
    _dcn,
)
register(
    ModelCard(
        "hstu-large",
        "HSTU large",
        "recommender",
        12_169_472,
        "Zhai et al. 2024, 16 layers of width 256 over MovieLens-20M's 26,744 items; parameters as counted here",
        {"seq": 256},
        aliases=("hstu",),
    ),
    _hstu,
)
