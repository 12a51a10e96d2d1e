"""Sequence models of published benchmarks: Transformer-XL, the big translation Transformer, Jasper and RNN-T."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce

from ridgeline.graph import Graph, TensorType
from ridgeline.models.card import ModelCard, Request, register
from ridgeline.models.encoder import self_attention
from ridgeline.models.net import BOOL, INT64, Net

EXAMPLES = "NVIDIA/DeepLearningExamples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Xl:
    """A Transformer-XL: each segment attends to itself and to the states of the one before."""

    layers: int
    hidden: int
    heads: int
    d: int
    ffn: int
    divisor: int = 1  # each cluster of rarer words is so much narrower than the one before
    cutoffs: tuple[int, ...] = (19_997, 39_997, 199_997, 267_735)  # adaptive softmax over WikiText-103

    @property
    def clusters(self) -> tuple[tuple[int, int], ...]:
        """Words and width of every cluster, the frequent one first."""
        sizes = (high - low for low, high in zip((0, *self.cutoffs), self.cutoffs))
        return tuple((size, self.hidden // self.divisor**i) for i, size in enumerate(sizes))


_TAIL_FRAC = (0.03, 0.035, 0.005)
"""Tokens whose word is in each of the rarer clusters: assumed from how steeply word counts fall."""


def _relative_attention(net: Net, x: int, memory: int, places: int, c: Xl) -> int:
    """Scores of content and of relative position as two products, shifted against each other and added."""
    b, s, hidden = net.shape(x)
    both = net.cat((memory, x), 1)
    length = net.shape(both)[1]
    q, k, v = (
        net.heads(net.linear(source, c.heads * c.d, name), c.heads, c.d)
        for source, name in ((x, "q_net"), (both, "k_net"), (both, "v_net"))
    )
    rel = net.heads(net.linear(places, c.heads * c.d, "r_net"), c.heads, c.d)
    content = net.bmm(net.add(q, net.weight("r_w_bias", c.heads, 1, c.d)), k, trans_b=True)
    far = net.expand_view(rel, b, c.heads, length, c.d)
    where = net.bmm(net.add(q, net.weight("r_r_bias", c.heads, 1, c.d)), far, trans_b=True)
    shifted = net.contiguous(where)  # padded, viewed and sliced: one copy of all scores
    scores = net.pointwise("mul", net.add(content, shifted), scalars=1)
    masked = net.add(scores, net.buffer("mask", s, length))
    out = net.bmm(net.softmax(masked), v)
    y = net.linear(net.unheads(out), hidden, "o_net")
    return net.layer_norm(net.add(x, y), "layer_norm")


def _xl(c: Xl, r: Request) -> Graph:
    net = Net(r.card.name, r.mode, r.precision, batch=r.batch, seq=r.seq)
    tokens = net.input("input_ids", TensorType((r.batch, r.seq), INT64))
    x, tables = _words(net, tokens, c)
    places = net.input("positions", net.type(1, 2 * r.seq, c.hidden))
    memories = net.input("memory", net.type(r.batch, r.seq, c.hidden))
    with net.repeat(c.layers, "layers"):
        inner = net.carry(x)
        x = _relative_attention(net, inner, memories, places, c)
        y = net.pointwise("relu", net.linear(x, c.ffn, "CoreNet.0", bias=True))
        y = net.linear(y, c.hidden, "CoreNet.3", bias=True)
        x = net.layer_norm(net.add(x, y), "ff_norm")
        net.close_carry(inner, x)
    return _adaptive(net, r, x, tables, c)


def _words(net: Net, tokens: int, c: Xl) -> tuple[int, list[int]]:
    """Embedded tokens and the table of each cluster: slices of one table, or tables that get narrower."""
    if c.divisor == 1:
        x, table = net.embedding(tokens, c.cutoffs[-1], c.hidden, "word_emb")
        return x, [net.slice(table, size, width) for size, width in c.clusters]
    (size, width), *tails = c.clusters
    x, first = net.embedding(tokens, size, width, "emb_layers.0")
    tables, num = [first], math.prod(net.shape(tokens))
    for i, (frac, (size, width)) in enumerate(zip(_TAIL_FRAC, tails), start=1):
        few = net.input(f"tail_ids.{i}", TensorType((_tail(num, frac),), INT64))
        rows, table = net.embedding(few, size, width, f"emb_layers.{i}")
        wide = net.linear(rows, c.hidden, f"emb_projs.{i}")
        x = net.scatter("index_put", [x, few, wide], *net.shape(x))
        tables.append(table)
    return x, tables


def _tail(num: int, frac: float) -> int:
    return max(1, round(num * frac))


def _adaptive(net: Net, r: Request, x: int, tables: list[int], c: Xl) -> Graph:
    """The head of the adaptive softmax for all tokens, its tails for the few that need them."""
    rows = r.batch * r.seq
    flat = net.reshape(x, rows, c.hidden)
    logits = [net.linear(flat, c.cutoffs[0], "crit.head", weight=tables[0], bias=True)]
    for i, (frac, (size, width)) in enumerate(zip(_TAIL_FRAC, c.clusters[1:]), start=1):
        few = net.input(f"tail_rows.{i}", TensorType((_tail(rows, frac),), INT64))
        y = net.gather("index_select", [flat, few], _tail(rows, frac), c.hidden)
        if width != c.hidden:
            y = net.linear(y, width, f"crit.out_projs.{i}")
        logits.append(net.linear(y, size, f"crit.tail.{i}", weight=tables[i], bias=True))
    if not net.train:
        return net.finish([net.softmax(each, log=True) for each in logits])
    losses = [
        net.cross_entropy(each, net.input(f"labels.{i}", TensorType((net.shape(each)[0],), INT64)))
        for i, each in enumerate(logits)
    ]
    return net.finish([reduce(net.add, losses)], frees=False)


def _add_xl(name: str, title: str, num_params: int, seq: int, config: Xl) -> None:
    source = f"{EXAMPLES} PyTorch/LanguageModeling/Transformer-XL, layers counted; clusters of the adaptive softmax"
    card = ModelCard(name, title, "encoder", num_params, source, {"seq": seq})
    register(card, lambda request: _xl(config, request))


_BASE = Xl(layers=16, hidden=512, heads=8, d=64, ffn=2048)
_LARGE = Xl(layers=18, hidden=1024, heads=16, d=64, ffn=4096, divisor=4)
_add_xl("transformer-xl-base", "Transformer-XL base", 191_964_119, 192, _BASE)
_add_xl("transformer-xl-large", "Transformer-XL large", 283_446_135, 384, _LARGE)


# The translation Transformer.


def _layer(net: Net, x: int, heads: int, *, causal: bool, memory: int | None = None) -> int:
    """Post-norm attention, attention over the source where there is one, and the feed-forward."""
    hidden = net.shape(x)[-1]
    for name, kv in (("self_attn", None), *((("encoder_attn", memory),) if memory is not None else ())):
        net.enter(name)
        y = self_attention(net, x, heads, names=("q", "k", "v"), causal=causal and kv is None, kv=kv)
        y = net.linear(y, hidden, "out_proj", bias=True)
        net.exit()
        x = net.layer_norm(net.add(x, y), f"{name}_layer_norm")
    y = net.linear(net.pointwise("relu", net.linear(x, 4 * hidden, "fc1", bias=True)), hidden, "fc2", bias=True)
    return net.layer_norm(net.add(x, y), "final_layer_norm")


def _stack(net: Net, x: int, name: str, *, memory: int | None = None) -> int:
    with net.repeat(6, f"{name}.layers"):
        inner = net.carry(x)
        x = _layer(net, inner, 16, causal=memory is not None, memory=memory)
        net.close_carry(inner, x)
    return x


def _big(r: Request) -> Graph:
    vocab, hidden = 33_712, 1024
    net = Net(r.card.name, r.mode, r.precision, batch=r.batch, seq=r.seq)
    source, target = (net.input(name, TensorType((r.batch, r.seq), INT64)) for name in ("source", "target"))
    x, table = net.embedding(source, vocab, hidden, "embed_tokens")
    memory = _stack(net, x, "encoder")
    y = _stack(net, net.lookup(table, target), "decoder", memory=memory)
    logits = net.linear(y, vocab, "output", weight=table)
    if not net.train:
        return net.finish([logits])
    rows = r.batch * r.seq
    labels = net.input("labels", TensorType((rows,), INT64))
    return net.finish([net.cross_entropy(net.reshape(logits, rows, vocab), labels)], frees=False)


register(
    ModelCard("transformer-big", "Transformer big, English to German", "encoder-decoder", 210_878_464,
              f"{EXAMPLES} PyTorch/Translation/Transformer, layers counted", {"seq": 32}),
    _big,
)  # fmt: skip


# Jasper.


def _sub_block(net: Net, x: int, o: int, kernel: int, name: str, *, stride: int = 1, dilation: int = 1) -> int:
    """A convolution over frames that are there: those behind a sample's end are set to zero first."""
    padding = net.buffer(f"{name}.mask", net.shape(x)[0], 1, net.shape(x)[2], dt=BOOL)
    y = net.conv(net.pointwise("masked_fill", x, padding), o, kernel, f"{name}.conv", stride=stride, dilation=dilation)
    return net.batch_norm(y, f"{name}.bn")


def _active(net: Net, x: int) -> int:
    """ReLU, and in training dropout: a mask of a byte an element, drawn and multiplied in."""
    y = net.inplace("relu", x)
    if not net.train:
        return y
    mask = net.node("random", [], [TensorType(net.shape(y), BOOL)], fn="bernoulli")[0]
    return net.mul(y, mask)


def _jasper(r: Request) -> Graph:
    """Ten blocks of five convolutions with dense residuals over all earlier blocks, on 64 mel features."""
    net = Net(r.card.name, r.mode, r.precision, batch=r.batch, seq=r.seq)
    x = net.input("features", net.type(r.batch, 64, r.seq))
    x = _active(net, _sub_block(net, x, 256, 11, "prologue", stride=2))
    before = [x]
    for i, (width, kernel) in enumerate(
        w for w in ((256, 11), (384, 13), (512, 17), (640, 21), (768, 25)) for _ in range(2)
    ):
        x = before[-1]
        for j in range(4):
            x = _active(net, _sub_block(net, x, width, kernel, f"block.{i}.{j}"))
        x = _sub_block(net, x, width, kernel, f"block.{i}.4")
        for j, y in enumerate(before):
            x = net.add(x, _sub_block(net, y, width, 1, f"block.{i}.res.{j}"))
        before.append(_active(net, x))
    x = _active(net, _sub_block(net, before[-1], 896, 29, "epilogue.0", dilation=2))
    x = _active(net, _sub_block(net, x, 1024, 1, "epilogue.1"))
    logits = net.conv(x, 29, 1, "decoder", bias=True)
    b, classes, frames = net.shape(logits)
    flat = net.reshape(net.contiguous(net.permute(logits, b, frames, classes)), b * frames, classes)
    if not net.train:
        return net.finish([net.softmax(flat, log=True)])
    return net.finish([net.cross_entropy(flat, net.input("labels", TensorType((b * frames,), INT64)))], frees=False)


register(
    ModelCard("jasper-10x5", "Jasper 10x5 dense residual", "speech", 332_632_349,
              f"{EXAMPLES} PyTorch/SpeechRecognition/Jasper, layers counted", {"seq": 1600}),
    _jasper,
)  # fmt: skip


# RNN-T.


def _lstm(net: Net, x: int, hidden: int, layers: int, name: str) -> int:
    b, s, width = net.shape(x)
    net.enter(name)
    weights = [
        net.weight(f"{part}_l{i}", 4 * hidden, columns)
        for i in range(layers)
        for part, columns in (("weight_ih", width if i == 0 else hidden), ("weight_hh", hidden))
    ]
    weights += [net.weight(f"bias_{part}_l{i}", 4 * hidden) for i in range(layers) for part in ("ih", "hh")]
    out = net.node("rnn", [x, *weights], [net.type(b, s, hidden)], cell="lstm", layers=layers, hidden=hidden,
                   input=width, seq=s, batch=b)[0]  # fmt: skip
    net.exit()
    return out


def _rnnt(r: Request) -> Graph:
    """The encoder over stacked frames, and one step of prediction and joint network for every encoded frame."""
    net = Net(r.card.name, r.mode, r.precision, batch=r.batch, seq=r.seq)
    frames = -(-r.seq // 3)
    x = _lstm(net, net.input("features", net.type(r.batch, frames, 240)), 1024, 2, "encoder.pre_rnn")
    half = -(-frames // 2)
    x = net.reshape(net.pad(x, (r.batch, 2 * half, 1024)), r.batch, half, 2048)
    x = _lstm(net, x, 1024, 3, "encoder.post_rnn")
    words = net.input("labels", TensorType((r.batch, half), INT64))
    y, _ = net.embedding(words, 29, 320, "prediction.embed")
    y = _lstm(net, y, 320, 2, "prediction.dec_rnn")
    both = net.add(net.linear(x, 512, "joint.enc", bias=True), net.linear(y, 512, "joint.pred", bias=True))
    return net.finish([net.linear(net.pointwise("relu", both), 29, "joint.out", bias=True)])


register(
    ModelCard("rnnt", "RNN-T of MLPerf inference", "speech", 45_323_869,
              "mlcommons/inference speech_recognition/rnnt, layers counted", {"seq": 750}, modes=("infer",)),
    _rnnt,
)  # fmt: skip
