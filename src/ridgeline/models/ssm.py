"""State-space language models: Mamba and Mamba-2."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.graph import Graph, Kind, TensorType
from ridgeline.models.card import MODES, ModelCard, Request, register
from ridgeline.models.llm import causal_loss
from ridgeline.models.net import FP32, INT64, Net


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpace:
    """The shape of a Mamba model; ``heads`` > 0 makes it Mamba-2."""

    layers: int
    hidden: int
    state: int
    vocab: int
    rank: int = 0  # of the step-size projection (Mamba)
    heads: int = 0
    chunk: int = 256
    kernel: int = 4

    @property
    def inner(self) -> int:
        return 2 * self.hidden


def _build(c: StateSpace, r: Request) -> Graph:
    net = Net(r.card.name, r.mode, r.precision, batch=r.batch, seq=r.seq)
    s = 1 if r.mode == "decode" else r.seq
    tokens = net.input("input_ids", TensorType((r.batch, s), INT64))
    net.enter("backbone")
    h, table = net.embedding(tokens, c.vocab, c.hidden, "embeddings")
    mixer = _step if r.mode == "decode" else _mamba2 if c.heads else _mamba
    with net.repeat(c.layers, "layers"):
        inner = net.carry(h)
        x = net.rms_norm(inner, "norm")
        net.enter("mixer")
        x = mixer(net, x, c)
        net.exit()
        h = net.add(inner, x)
        net.close_carry(inner, h)
    h = net.rms_norm(h, "norm_f")
    net.exit()
    if r.mode == "prefill" and s > 1:
        h = net.slice(h, r.batch, 1, c.hidden)
    logits = net.linear(h, c.vocab, "lm_head", weight=table)
    return net.finish([causal_loss(net, logits, tokens)], frees=False) if net.train else net.finish([logits])


def _mamba(net: Net, x: int, c: StateSpace) -> int:
    """One selective-scan mixer over a whole sequence."""
    b, s, _ = net.shape(x)
    both = net.permute(net.linear(x, 2 * c.inner, "in_proj"), b, 2 * c.inner, s)
    u, gate = net.split(both, (c.inner, c.inner), dim=1)
    u = net.pointwise("silu", _causal_conv(net, u, c))
    low = net.linear(net.contiguous(net.permute(u, b, s, c.inner)), c.rank + 2 * c.state, "x_proj")
    step, key, read = net.split(low, (c.rank, c.state, c.state))
    delta = net.linear(step, c.inner, "dt_proj", bias=True)
    decay = net.pointwise("neg", net.pointwise("exp", net.cast(net.weight("A_log", c.inner, c.state), FP32)))
    skip = net.weight("D", c.inner)
    y = net.node(
        "scan",
        [u, delta, decay, key, read, skip, gate],
        [net.type(b, c.inner, s)],
        fn="selective_scan",
        n=b * c.inner,
        c=s,
        state=c.state,
    )[0]
    return net.linear(net.contiguous(net.permute(y, b, s, c.inner)), c.hidden, "out_proj")


def _causal_conv(net: Net, x: int, c: StateSpace) -> int:
    """A depthwise convolution that sees only the past: padded on both sides, the tail dropped."""
    b, width, s = net.shape(x)
    out = net.conv(x, width, c.kernel, "conv1d", padding=c.kernel - 1, groups=width, bias=True)
    return net.slice(out, b, width, s)


def _mamba2(net: Net, x: int, c: StateSpace) -> int:
    """One Mamba-2 mixer: the chunked state-space dual, as matrix products inside and between chunks."""
    b, s, _ = net.shape(x)
    wide = net.linear(x, 2 * c.inner + 2 * c.state + c.heads, "in_proj")
    gate, mixed, step = net.split(wide, (c.inner, c.inner + 2 * c.state, c.heads))
    width = c.inner + 2 * c.state
    mixed = net.pointwise("silu", _causal_conv(net, net.permute(mixed, b, width, s), c))
    u, key, read = net.split(net.permute(mixed, b, s, width), (c.inner, c.state, c.state))
    delta = net.pointwise("softplus", net.add(step, net.weight("dt_bias", c.heads)))
    decay = net.mul(delta, net.pointwise("neg", net.pointwise("exp", net.weight("A_log", c.heads))))
    y = _chunked(net, u, key, read, delta, decay, c)
    y = net.add(
        y, net.mul(net.reshape(u, b, s, c.heads, c.inner // c.heads), net.reshape(net.weight("D", c.heads), c.heads, 1))
    )
    y = net.mul(net.reshape(y, b, s, c.inner), net.pointwise("silu", gate))
    return net.linear(net.rms_norm(y, "norm"), c.hidden, "out_proj")


def _chunked(net: Net, u: int, key: int, read: int, delta: int, decay: int, c: StateSpace) -> int:
    """Within chunks a masked product, across chunks a recurrence over their states."""
    b, s, _ = net.shape(u)
    size = min(c.chunk, s)
    num, d = -(-s // size), c.inner // c.heads
    if num * size != s:
        u, key, read = (net.pad(v, (b, num * size, net.shape(v)[-1])) for v in (u, key, read))
        delta, decay = (net.pad(v, (b, num * size, c.heads)) for v in (delta, decay))
    sums = net.node("scan", [decay], [net.type(b, num * size, c.heads)], fn="cumsum", n=b * num * c.heads, c=size)[0]
    steps = net.mul(net.reshape(u, b, num * size, c.heads, d), net.reshape(delta, b, num * size, c.heads, 1))
    heads = net.contiguous(net.permute(net.reshape(steps, b, num, size, c.heads, d), b, num, c.heads, size, d))
    keys, reads = net.reshape(key, b, num, size, c.state), net.reshape(read, b, num, size, c.state)
    scores = net.reshape(net.bmm(reads, keys, trans_b=True), b, num, 1, size, size)
    weights = net.pointwise(
        "exp", net.expand_view(net.reshape(sums, b, num, c.heads, size, 1), b, num, c.heads, size, size)
    )
    inside = net.bmm(net.mul(weights, scores), heads)
    weighted = net.mul(
        net.reshape(keys, b, num, 1, size, c.state), net.pointwise("exp", net.reshape(sums, b, num, c.heads, size, 1))
    )
    states = net.bmm(net.permute(weighted, b, num, c.heads, c.state, size), heads)
    carried = net.node(
        "scan", [states], [net.type(b, num, c.heads, c.state, d)], fn="chunk_state", n=b * c.heads * c.state * d, c=num
    )[0]
    wide = net.mul(
        net.reshape(reads, b, num, 1, size, c.state), net.pointwise("exp", net.reshape(sums, b, num, c.heads, size, 1))
    )
    total = net.add(inside, net.bmm(wide, carried))
    out = net.contiguous(net.permute(total, b, num, size, c.heads, d))
    out = net.reshape(out, b, num * size, c.heads, d)
    return out if num * size == s else net.slice(out, b, s, c.heads, d)


def _step(net: Net, x: int, c: StateSpace) -> int:
    """One token against the recurrent state: what replaces a cache of keys and values."""
    b = net.shape(x)[0]
    extra = 2 * c.state if c.heads else 0
    width = c.inner + extra
    wide = net.linear(x, 2 * c.inner + extra + c.heads, "in_proj")
    pieces = net.split(wide, (width, c.inner, c.heads) if c.heads else (width, c.inner))
    u, gate = _conv_step(net, pieces[0], width, c), pieces[1]
    if c.heads:
        u, key, read = net.split(u, (c.inner, c.state, c.state))
        delta = net.pointwise("softplus", net.add(pieces[2], net.weight("dt_bias", c.heads)))
        decay = net.pointwise("neg", net.pointwise("exp", net.weight("A_log", c.heads)))
        shape = (b, c.heads, c.inner // c.heads, c.state)
        delta, decay = net.reshape(delta, b, c.heads, 1, 1), net.reshape(decay, c.heads, 1, 1)
        skip = net.reshape(net.weight("D", c.heads), c.heads, 1)
    else:
        low = net.linear(u, c.rank + 2 * c.state, "x_proj")
        step, key, read = net.split(low, (c.rank, c.state, c.state))
        delta = net.pointwise("softplus", net.linear(step, c.inner, "dt_proj", bias=True))
        decay = net.pointwise("neg", net.pointwise("exp", net.weight("A_log", c.inner, c.state)))
        shape = (b, c.inner, 1, c.state)
        delta, decay = net.reshape(delta, b, c.inner, 1, 1), net.reshape(decay, c.inner, 1, c.state)
        skip = net.reshape(net.weight("D", c.inner), c.inner, 1)
    y = _state_step(net, u, key, read, delta, decay, shape)
    y = net.add(y, net.mul(skip, net.reshape(u, b, *shape[1:3])))
    y = net.mul(net.reshape(y, b, 1, c.inner), net.pointwise("silu", gate))
    return net.linear(net.rms_norm(y, "norm") if c.heads else y, c.hidden, "out_proj")


def _conv_step(net: Net, u: int, width: int, c: StateSpace) -> int:
    b = net.shape(u)[0]
    held = net.value(net.type(b, width, c.kernel), Kind.INPUT, count=net.repeats, name="cache.*.conv_state")
    rolled = net.node("copy", [held], [net.type(b, width, c.kernel)], fn="roll")[0]
    rolled = net.inplace("copy", rolled, net.reshape(u, b, width, 1))
    net.node("copy", [rolled], [held], fn="copy", inplace=True)
    net.enter("conv1d")
    kernel = net.reshape(net.weight("weight", width, 1, c.kernel), width, c.kernel)
    bias = net.weight("bias", width)
    net.exit()
    y = net.add(net.reduce("sum", net.mul(rolled, kernel), (-1,)), bias)
    return net.reshape(net.pointwise("silu", y), b, 1, width)


def _state_step(net: Net, u: int, key: int, read: int, delta: int, decay: int, shape: tuple[int, int, int, int]) -> int:
    """state ← state·exp(Δ·A) + Δ·B·u, and y = C·state."""
    b, outer, inner, n = shape
    held = net.value(TensorType(shape, net.dt), Kind.INPUT, count=net.repeats, name="cache.*.ssm_state")
    kept = net.mul(held, net.pointwise("exp", net.mul(delta, decay)))
    added = net.mul(net.mul(delta, net.reshape(key, b, 1, 1, n)), net.reshape(u, b, outer, inner, 1))
    state = net.add(kept, added)
    net.node("copy", [state], [held], fn="copy", inplace=True)
    y = net.node(
        "matmul",
        [net.reshape(state, b, outer * inner, n), net.reshape(read, b, n, 1)],
        [net.type(b, outer * inner, 1)],
        b=b,
        m=outer * inner,
        n=1,
        k=n,
    )[0]
    return net.reshape(y, b, outer, inner)


def _add(name: str, title: str, num_params: int, source: str, config: StateSpace) -> None:
    register(
        ModelCard(name, title, "state-space", num_params, source, {"seq": 2048}, {}, MODES),
        lambda request: _build(config, request),
    )


_add(
    "mamba-2.8b",
    "Mamba 2.8B",
    2_768_345_600,
    "state-spaces/mamba-2.8b-hf config.json",
    StateSpace(layers=64, hidden=2560, state=16, vocab=50280, rank=160),
)
_add(
    "mamba2-2.7b",
    "Mamba-2 2.7B",
    2_702_599_680,
    "state-spaces/mamba2-2.7b config.json",
    StateSpace(layers=64, hidden=2560, state=128, vocab=50288, heads=80),
)
