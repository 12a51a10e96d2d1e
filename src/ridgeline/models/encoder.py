"""Text encoders and encoder-decoders: BERT, RoBERTa and T5."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.errors import ModelError, nearest
from ridgeline.graph import Graph, TensorType
from ridgeline.models.card import ModelCard, Request, register
from ridgeline.models.net import FP32, INT64, Net


@dataclass(frozen=True, slots=True, kw_only=True)
class Bert:
    """The shape of a BERT-like encoder."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    positions: int = 512
    types: int = 2
    roberta: bool = False


def self_attention(
    net: Net,
    x: int,
    heads: int,
    *,
    names: tuple[str, str, str],
    causal: bool = False,
    kv: int | None = None,
    bias: bool = True,
    key_bias: bool = True,
    width: int | None = None,
    mask: int | None = None,
) -> int:
    """Separate projections, attention, heads merged; ``kv`` makes it cross-attention."""
    width = width or net.shape(x)[-1]
    source = x if kv is None else kv
    d = width // heads
    q = net.heads(net.linear(x, width, names[0], bias=bias), heads, d)
    k = net.heads(net.linear(source, width, names[1], bias=bias and key_bias), heads, d)
    v = net.heads(net.linear(source, width, names[2], bias=bias), heads, d)
    return net.unheads(net.attention(q, k, v, causal=causal, mask=mask))


def bert_layer(net: Net, x: int, c: Bert) -> int:
    """A post-norm encoder layer."""
    net.enter("attention")
    net.enter("self")
    y = self_attention(net, x, c.heads, names=("query", "key", "value"))
    net.exit()
    net.enter("output")
    y = net.layer_norm(net.add(net.linear(y, c.hidden, "dense", bias=True), x), "LayerNorm")
    net.exit()
    net.exit()
    z = net.pointwise("gelu", net.linear(y, 4 * c.hidden, "intermediate.dense", bias=True))
    net.enter("output")
    z = net.layer_norm(net.add(net.linear(z, c.hidden, "dense", bias=True), y), "LayerNorm")
    net.exit()
    return z


def _bert(c: Bert, r: Request) -> Graph:
    longest = c.positions - 2 if c.roberta else c.positions
    r.at_most("seq", longest, "embeddings.position_embeddings.weight")
    if r["head"] not in ("mlm", "none"):
        raise ModelError(f"{r.card.name}: no head {r['head']!r}{nearest(r['head'], ('mlm', 'none'))}")
    net = Net(r.card.name, r.mode, r.precision, batch=r.batch, seq=r.seq)
    tokens = net.input("input_ids", TensorType((r.batch, r.seq), INT64))
    b, s = net.shape(tokens)
    net.enter("embeddings")
    words, table = net.embedding(tokens, c.vocab, c.hidden, "word_embeddings")
    kinds, _ = net.embedding(net.fill("zeros", b, s, dt=INT64), c.types, c.hidden, "token_type_embeddings")
    x = net.add(words, kinds)
    if c.roberta:
        mask = net.node("copy", [net.pointwise("ne", tokens, scalars=1)], [TensorType((b, s), INT64)], fn="to")[0]
        sums = net.node("scan", [mask], [TensorType((b, s), INT64)], fn="cumsum", n=b, c=s)[0]
        where = net.pointwise("add", net.mul(sums, mask), scalars=1)
    else:
        where = net.fill("arange", 1, s, dt=INT64)
    places, _ = net.embedding(where, c.positions, c.hidden, "position_embeddings")
    x = net.layer_norm(net.add(x, places), "LayerNorm")
    net.exit()
    net.enter("encoder")
    with net.repeat(c.layers, "layer"):
        inner = net.carry(x)
        x = bert_layer(net, inner, c)
        net.close_carry(inner, x)
    net.exit()
    if r["head"] == "none":
        first = net.slice(x, r.batch, c.hidden)
        pooled = net.pointwise("tanh", net.linear(first, c.hidden, "pooler.dense", bias=True))
        if not net.train:
            return net.finish([x, pooled])
        return net.finish([net.mse(pooled, net.input("target", net.type(r.batch, c.hidden)))], frees=False)
    net.enter("lm_head" if c.roberta else "cls.predictions")
    x = net.layer_norm(net.pointwise("gelu", net.linear(x, c.hidden, "dense", bias=True)), "layer_norm")
    logits = net.linear(x, c.vocab, "decoder", bias=True, weight=table)
    net.exit()
    if not net.train:
        return net.finish([logits])
    labels = net.input("labels", TensorType((r.batch, r.seq), INT64))
    rows = r.batch * r.seq
    return net.finish([net.cross_entropy(net.reshape(logits, rows, c.vocab), net.reshape(labels, rows))], frees=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class T5:
    """The shape of a T5 encoder-decoder."""

    layers: int
    hidden: int
    heads: int
    d: int
    ffn: int
    vocab: int
    gated: bool = False
    tied: bool = True
    buckets: int = 32


def _t5_attention(net: Net, x: int, c: T5, name: str, *, mask: int | None, kv: int | None = None) -> int:
    net.enter(name)
    y = self_attention(
        net,
        net.rms_norm(x, "layer_norm"),
        c.heads,
        names=("q", "k", "v"),
        kv=kv,
        bias=False,
        width=c.heads * c.d,
        mask=mask,
    )
    y = net.linear(y, c.hidden, "o")
    net.exit()
    return net.add(x, y)


def _t5_feed_forward(net: Net, x: int, c: T5, name: str) -> int:
    net.enter(name)
    y = net.rms_norm(x, "layer_norm")
    if c.gated:
        y = net.mul(net.pointwise("gelu", net.linear(y, c.ffn, "wi_0")), net.linear(y, c.ffn, "wi_1"))
    else:
        y = net.pointwise("relu", net.linear(y, c.ffn, "wi"))
    y = net.linear(y, c.hidden, "wo")
    net.exit()
    return net.add(x, y)


def t5_stack(net: Net, x: int, c: T5, name: str, *, memory: int | None = None) -> int:
    """One of T5's two stacks; with ``memory`` it is the decoder."""
    net.enter(name)
    # Bucketed distances looked up once and added to the scores of every layer
    s = net.shape(x)[1]
    causal = memory is not None
    net.enter("block.0.layer.0.SelfAttention.relative_attention_bias")
    far = net.pointwise("sub", net.fill("arange", s, 1, dt=INT64), net.fill("arange", 1, s, dt=INT64))
    near = net.pointwise("abs" if not causal else "minimum", far)
    logs = net.pointwise("log", net.pointwise("div", net.cast(near, FP32), scalars=1))
    large = net.pointwise(
        "add",
        net.node("copy", [net.pointwise("mul", logs, scalars=1)], [TensorType((s, s), INT64)], fn="to")[0],
        scalars=1,
    )
    bucket = net.pointwise("where", net.pointwise("minimum", large, scalars=1), near)
    table = net.weight("weight", c.buckets, c.heads)
    bias = net.reshape(net.permute(net.lookup(table, bucket), c.heads, s, s), 1, c.heads, s, s)
    net.exit()
    with net.repeat(c.layers, "block"):
        inner = net.carry(x)
        x = _t5_attention(net, inner, c, "layer.0.SelfAttention", mask=bias)
        if memory is not None:
            x = _t5_attention(net, x, c, "layer.1.EncDecAttention", mask=None, kv=memory)
        x = _t5_feed_forward(net, x, c, f"layer.{1 if memory is None else 2}.DenseReluDense")
        net.close_carry(inner, x)
    x = net.rms_norm(x, "final_layer_norm")
    net.exit()
    return x


def _t5(c: T5, r: Request) -> Graph:
    net = Net(r.card.name, r.mode, r.precision, batch=r.batch, seq=r.seq)
    out = r["target_seq"]
    source = net.input("input_ids", TensorType((r.batch, r.seq), INT64))
    target = net.input("decoder_input_ids", TensorType((r.batch, out), INT64))
    x, table = net.embedding(source, c.vocab, c.hidden, "shared")
    memory = t5_stack(net, x, c, "encoder")
    y = t5_stack(net, net.lookup(table, target), c, "decoder", memory=memory)
    if c.tied:
        y = net.pointwise("mul", y, scalars=1)
    logits = net.linear(y, c.vocab, "lm_head", weight=table if c.tied else None, wide=True)
    if not net.train:
        return net.finish([logits])
    labels = net.input("labels", TensorType((r.batch, out), INT64))
    rows = r.batch * out
    return net.finish([net.cross_entropy(net.reshape(logits, rows, c.vocab), net.reshape(labels, rows))], frees=False)


def _add_bert(name: str, title: str, num_params: int, source: str, config: Bert, aliases: tuple[str, ...] = ()) -> None:
    register(
        ModelCard(name, title, "encoder", num_params, source, {"seq": 512}, {"head": "mlm"}, aliases=aliases),
        lambda request: _bert(config, request),
    )


def _add_t5(name: str, title: str, num_params: int, source: str, config: T5) -> None:
    register(
        ModelCard(name, title, "encoder-decoder", num_params, source, {"seq": 512}, {"target_seq": 128}),
        lambda request: _t5(config, request),
    )


_add_bert(
    "bert-base",
    "BERT base with its masked-language head",
    109_514_298,
    "google-bert/bert-base-uncased config.json",
    Bert(layers=12, hidden=768, heads=12, vocab=30522),
)
_add_bert(
    "bert-large",
    "BERT large with its masked-language head",
    335_174_458,
    "google-bert/bert-large-uncased config.json",
    Bert(layers=24, hidden=1024, heads=16, vocab=30522),
)
_add_bert(
    "bert-6b",
    "a BERT of 6.6 billion parameters, as FasterTransformer's guide times it",
    6_590_203_706,
    "NVIDIA/FasterTransformer docs/bert_guide.md: 32 layers of 4096, 32 heads; layers counted",
    Bert(layers=32, hidden=4096, heads=32, vocab=30522, positions=1024),
)
_add_bert(
    "roberta-large",
    "RoBERTa large with its masked-language head",
    355_412_057,
    "FacebookAI/roberta-large config.json",
    Bert(layers=24, hidden=1024, heads=16, vocab=50265, positions=514, types=1, roberta=True),
)
_add_t5(
    "t5-large",
    "T5 large",
    737_668_096,
    "google-t5/t5-large config.json",
    T5(layers=24, hidden=1024, heads=16, d=64, ffn=4096, vocab=32128),
)
