"""Mixtures of experts: route, sort tokens by expert, grouped products, and sum back in order."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.graph import Kind, TensorType
from ridgeline.models.net import BOOL, FP8, FP32, INT32, INT64, Net


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: ``top`` of ``num`` run for each token, beside one of width ``shared`` that always does."""

    num: int
    top: int
    ffn: int
    shared: int = 0
    bias: bool = False
    router: str = "softmax_first"  # or pick_first (gpt-oss), sigmoid_groups (DeepSeek)
    groups: int = 1
    top_groups: int = 1
    dense_layers: int = 0  # leading layers with an ordinary feed-forward


def moe_layer(net: Net, x: int, e: Experts, act: str) -> int:
    """A sparse feed-forward over [b, s, hidden]."""
    b, s, hidden = net.shape(x)
    flat = net.reshape(x, b * s, hidden)
    net.enter("gate")
    weights, chosen = _ROUTERS[e.router](net, flat, e)
    net.exit()
    net.enter("experts")
    out = run_experts(net, flat, weights, chosen, e, act)
    net.exit()
    if e.shared:
        out = net.add(out, _shared_expert(net, flat, e, act))
    return net.reshape(out, b, s, hidden)


def _logits(net: Net, flat: int, e: Experts, *, bias: bool = False) -> int:
    """The router's product; routers stay in the activations' precision whatever the experts run in."""
    rows, hidden = net.shape(flat)
    operands = [flat, net.weight("weight", e.num, hidden)] + ([net.weight("bias", e.num)] if bias else [])
    return net.node(
        "matmul", operands, [net.type(rows, e.num)], b=1, m=rows, n=e.num, k=hidden, trans_b=True, bias=bias
    )[0]


def _topk(net: Net, x: int, k: int) -> tuple[int, int]:
    *lead, v = net.shape(x)
    rows = net.values[x].type.numel // v
    out = TensorType((*lead, k), net.values[x].type.dtype)
    best, index = net.node("topk", [x], [out, TensorType((*lead, k), INT64)], n=rows, v=v, k=k)
    return best, index


def _softmax_first(net: Net, flat: int, e: Experts) -> tuple[int, int]:
    scores = net.softmax(net.cast(_logits(net, flat, e), FP32))
    best, chosen = _topk(net, scores, e.top)
    best = net.pointwise("div", best, net.reduce("sum", best, (-1,), keepdim=True))
    return net.cast(best, net.dt), chosen


def _pick_first(net: Net, flat: int, e: Experts) -> tuple[int, int]:
    best, chosen = _topk(net, _logits(net, flat, e, bias=True), e.top)
    return net.softmax(best), chosen


def _sigmoid_groups(net: Net, flat: int, e: Experts) -> tuple[int, int]:
    """DeepSeek's: sigmoid scores, the best groups by their two best experts, then the best experts inside them."""
    rows, hidden = net.shape(flat)
    wide = net.cast(flat, FP32)
    weight = net.cast(net.weight("weight", e.num, hidden), FP32)
    logits = net.node(
        "matmul", [wide, weight], [TensorType((rows, e.num), FP32)], b=1, m=rows, n=e.num, k=hidden, trans_b=True
    )[0]
    scores = net.pointwise("sigmoid", logits)
    correction = net.value(TensorType((e.num,), FP32), Kind.BUFFER, count=net.repeats, name="e_score_correction_bias")
    choice = net.add(scores, correction)
    _, chosen = _topk(net, net.pointwise("masked_fill", choice, _group_mask(net, choice, e)), e.top)
    best = net.gather("gather", [scores, chosen], rows, e.top)
    best = net.pointwise("div", best, net.pointwise("add", net.reduce("sum", best, (-1,), keepdim=True), scalars=1))
    return net.cast(net.pointwise("mul", best, scalars=1), net.dt), chosen


def _group_mask(net: Net, choice: int, e: Experts) -> int:
    """True where an expert's group did not make it."""
    rows, per_group = net.shape(choice)[0], e.num // e.groups
    pairs, _ = _topk(net, net.reshape(choice, rows, e.groups, per_group), 2)
    _, kept = _topk(net, net.reduce("sum", pairs, (-1,)), e.top_groups)
    mask = net.scatter("scatter", [net.fill("zeros", rows, e.groups, dt=FP32), kept], rows, e.groups)
    wide = net.contiguous(
        net.expand_view(net.reshape(mask, rows, e.groups, 1), rows, e.groups, per_group), transposed=False
    )
    flat = net.node("copy", [net.reshape(wide, rows, e.num)], [TensorType((rows, e.num), BOOL)], fn="to")[0]
    return net.pointwise("logical_not", flat)


_ROUTERS = {"softmax_first": _softmax_first, "pick_first": _pick_first, "sigmoid_groups": _sigmoid_groups}


def run_experts(net: Net, flat: int, weights: int, chosen: int, e: Experts, act: str) -> int:
    """Every token through its experts, as one grouped product for gate and up and one for down."""
    rows, hidden = net.shape(flat)
    picks = rows * e.top
    sorted_ids, order = net.node("sort", [net.reshape(chosen, picks)], [TensorType((picks,), INT64)] * 2, n=1, c=picks)
    token = net.pointwise("floor_divide", order, scalars=1)
    x = net.gather("index", [flat, token], picks, hidden)
    scale = net.gather("index", [net.reshape(weights, picks), order], picks)
    ids = net.node("copy", [sorted_ids], [TensorType((picks,), INT32)], fn="to")[0]
    counts = net.node("reduce", [ids], [TensorType((e.num,), INT32)], fn="histc", dims=(0,))[0]
    offsets = net.node("scan", [counts], [TensorType((e.num,), INT64)], fn="cumsum", n=1, c=e.num)[0]
    both = _grouped(net, x, 2 * e.ffn, offsets, sorted_ids, "gate_up_proj", e)
    out = _grouped(net, _gated(net, both, e, act), hidden, offsets, sorted_ids, "down_proj", e)
    out = net.mul(out, net.reshape(scale, picks, 1))
    inverse = net.scatter("index_put", [order, net.fill("arange", picks, dt=INT64)], picks, num=picks)
    out = net.reshape(net.gather("index", [out, inverse], picks, hidden), rows, e.top, hidden)
    return net.reduce("sum", out, (1,))


def _grouped(net: Net, x: int, n: int, offsets: int, ids: int, name: str, e: Experts) -> int:
    m, k = net.shape(x)
    dt = FP8 if net.narrow else net.dt
    weight = net.param(name, TensorType((e.num, n, k), dt))
    if net.narrow:
        x = net.quantize(x)
    out = net.node(
        "grouped_matmul",
        [x, weight, offsets],
        [net.type(m, n)],
        groups=e.num,
        m=m,
        n=n,
        k=k,
        which="rows",
        trans_b=True,
    )[0]
    if not e.bias:
        return out
    return net.add(out, net.gather("index", [net.weight(f"{name}_bias", e.num, n), ids], m, n))


def _gated(net: Net, both: int, e: Experts, act: str) -> int:
    if not e.bias:
        gate, up = net.split(both, (e.ffn, e.ffn))
        return net.mul(net.pointwise(act, gate), up)
    rows = net.shape(both)[0]
    gate = net.pointwise("clamp", net.slice(both, rows, e.ffn))
    up = net.pointwise("clamp", net.slice(both, rows, e.ffn))
    glu = net.mul(gate, net.pointwise("sigmoid", net.pointwise("mul", gate, scalars=1)))
    return net.mul(net.pointwise("add", up, scalars=1), glu)


def _shared_expert(net: Net, flat: int, e: Experts, act: str) -> int:
    hidden = net.shape(flat)[-1]
    net.enter("shared_experts")
    gate = net.pointwise(act, net.linear(flat, e.shared, "gate_proj"))
    out = net.linear(net.mul(gate, net.linear(flat, e.shared, "up_proj")), hidden, "down_proj")
    net.exit()
    return out
