"""Speech: Whisper and wav2vec 2.0."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.errors import ModelError
from ridgeline.graph import Graph, Kind, TensorType
from ridgeline.models.card import ModelCard, Request, register
from ridgeline.models.encoder import self_attention
from ridgeline.models.net import FP32, INT64, Net

_QKV = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Whisper:
    """The shape of a Whisper model; 30 seconds of audio are always 3000 frames, 1500 after the stem."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    mels: int
    frames: int = 3000
    positions: int = 448


def _attend(
    net: Net,
    x: int,
    c: Whisper,
    name: str,
    *,
    causal: bool = False,
    memory: int | None = None,
    caches: list[int] | None = None,
) -> int:
    """A pre-norm attention; scaled queries and contiguous heads as the reference makes them."""
    y = net.layer_norm(x, f"{name}_layer_norm")
    source = y if memory is None else memory
    d = c.hidden // c.heads
    net.enter(name)
    q = net.pointwise("mul", net.linear(y, c.hidden, "q_proj", bias=True), scalars=1)
    q = net.contiguous(net.heads(q, c.heads, d))
    k = net.contiguous(net.heads(net.linear(source, c.hidden, "k_proj"), c.heads, d))
    v = net.contiguous(net.heads(net.linear(source, c.hidden, "v_proj", bias=True), c.heads, d))
    if caches is not None:
        k, v = (net.stacked(net.cat((new,), -2)) for new in (k, v))
        caches += (k, v)
    y = net.linear(net.unheads(net.attention(q, k, v, causal=causal)), c.hidden, "out_proj", bias=True)
    net.exit()
    return net.add(x, y)


def _feed_forward(net: Net, x: int, hidden: int) -> int:
    y = net.layer_norm(x, "final_layer_norm")
    y = net.pointwise("gelu", net.linear(y, 4 * hidden, "fc1", bias=True))
    return net.add(x, net.linear(y, hidden, "fc2", bias=True))


def _decode_layer(net: Net, x: int, c: Whisper, memory: int, caches: list[int]) -> int:
    kept = None if net.train else caches
    x = _attend(net, x, c, "self_attn", causal=True, caches=kept)
    x = _attend(net, x, c, "encoder_attn", memory=memory, caches=kept)
    return _feed_forward(net, x, c.hidden)


def _step_layer(net: Net, x: int, c: Whisper, kv: int, caches: list[int], old: list[int]) -> int:
    """One new token: its keys and values join the cache, those of the audio are already there."""
    b, d = net.shape(x)[0], c.hidden // c.heads
    y = net.layer_norm(x, "self_attn_layer_norm")
    net.enter("self_attn")
    q, k, v = (net.heads(net.linear(y, c.hidden, name, bias=name != "k_proj"), c.heads, d) for name in _QKV)
    for new in (k, v):
        past = net.value(net.type(b, c.heads, kv, d), Kind.INPUT, count=net.repeats, name="past_key_values.*")
        old.append(past)
        caches.append(net.stacked(net.cat((past, new) if kv else (new,), -2)))
    y = net.unheads(net.attention(q, caches[-2], caches[-1], causal=False))
    x = net.add(x, net.linear(y, c.hidden, "out_proj", bias=True))
    net.exit()
    y = net.layer_norm(x, "encoder_attn_layer_norm")
    net.enter("encoder_attn")
    q = net.heads(net.linear(y, c.hidden, "q_proj", bias=True), c.heads, d)
    for name in ("k_proj", "v_proj"):  # resident but idle: their products are in the cache
        net.weight(f"{name}.weight", c.hidden, c.hidden)
    net.weight("v_proj.bias", c.hidden)
    k, v = (
        net.value(net.type(b, c.heads, c.frames // 2, d), Kind.INPUT, count=net.repeats, name="cross_key_values.*")
        for _ in "kv"
    )
    y = net.unheads(net.attention(q, k, v, causal=False))
    x = net.add(x, net.linear(y, c.hidden, "out_proj", bias=True))
    net.exit()
    return _feed_forward(net, x, c.hidden)


def _decoder(net: Net, c: Whisper, tokens: int, memory: int | None, kv: int) -> tuple[int, list[int]]:
    s = net.shape(tokens)[1]
    caches: list[int] = []
    old: list[int] = []
    net.enter("model.decoder")
    x, table = net.embedding(tokens, c.vocab, c.hidden, "embed_tokens")
    places = net.weight("embed_positions.weight", c.positions, c.hidden)
    x = net.add(x, net.slice(places, s, c.hidden))
    with net.repeat(c.layers, "layers"):
        inner = net.carry(x)
        x = (
            _step_layer(net, inner, c, kv, caches, old)
            if memory is None
            else _decode_layer(net, inner, c, memory, caches)
        )
        net.close_carry(inner, x)
    x = net.layer_norm(x, "layer_norm")
    net.exit()
    net.meta["donated"] = tuple(old)
    return net.linear(x, c.vocab, "proj_out", weight=table), caches


def _whisper(c: Whisper, r: Request) -> Graph:
    if r.mode == "decode":
        r.at_most("kv", c.positions - 1, "model.decoder.embed_positions.weight")
        return _whisper_step(c, r)
    r.at_most("seq", c.positions, "model.decoder.embed_positions.weight")
    net = Net(r.card.name, r.mode, r.precision, batch=r.batch, seq=r.seq)
    net.enter("model.encoder")
    x = net.input("input_features", net.type(r.batch, c.mels, c.frames))
    x = net.pointwise("gelu", net.conv(x, c.hidden, 3, "conv1", bias=True))
    x = net.pointwise("gelu", net.conv(x, c.hidden, 3, "conv2", stride=2, bias=True))
    length = net.shape(x)[-1]
    x = net.add(net.permute(x, r.batch, length, c.hidden), net.weight("embed_positions.weight", length, c.hidden))
    with net.repeat(c.layers, "layers"):
        inner = net.carry(x)
        x = _feed_forward(net, _attend(net, inner, c, "self_attn"), c.hidden)
        net.close_carry(inner, x)
    x = net.layer_norm(x, "layer_norm")
    net.exit()
    memory = x
    tokens = net.input("decoder_input_ids", TensorType((r.batch, r.seq), INT64))
    logits, caches = _decoder(net, c, tokens, memory, 0)
    if not net.train:
        return net.finish([logits, *caches])
    labels = net.input("labels", TensorType((r.batch, r.seq), INT64))
    rows = r.batch * r.seq
    return net.finish([net.cross_entropy(net.reshape(logits, rows, c.vocab), net.reshape(labels, rows))], frees=False)


def _whisper_step(c: Whisper, r: Request) -> Graph:
    """One decoder token; the encoder's weights are resident and idle."""
    net = Net(r.card.name, r.mode, r.precision, batch=r.batch, kv=r.kv)
    h = c.hidden
    stem = c.mels * h * 3 + h + h * h * 3 + h + c.frames // 2 * h
    layer = 4 * h * h + 3 * h + 8 * h * h + 5 * h + 4 * h
    whole = stem + c.layers * layer + 2 * h
    net.param("model.encoder (resident, idle)", net.type(whole))
    tokens = net.input("decoder_input_ids", TensorType((r.batch, 1), INT64))
    logits, caches = _decoder(net, c, tokens, None, r.kv)
    return net.finish([logits, *caches])


@dataclass(frozen=True, slots=True, kw_only=True)
class Wav2Vec2:
    """The shape of a wav2vec 2.0 encoder with a CTC head."""

    layers: int = 24
    hidden: int = 1024
    heads: int = 16
    vocab: int = 32
    channels: int = 512
    kernels: tuple[int, ...] = (10, 3, 3, 3, 3, 2, 2)
    strides: tuple[int, ...] = (5, 2, 2, 2, 2, 2, 2)


def _features(net: Net, c: Wav2Vec2, batch: int, samples: int) -> int:
    """The convolutional stem: 320 samples to a frame."""
    x = net.reshape(net.input("input_values", net.type(batch, samples)), batch, 1, samples)
    net.enter("feature_extractor.conv_layers")
    for i, (kernel, stride) in enumerate(zip(c.kernels, c.strides, strict=True)):
        net.enter(str(i))
        x = net.conv(x, c.channels, kernel, "conv", stride=stride, padding=0)
        if i == 0:
            x = net.group_norm(x, c.channels, "layer_norm")
        x = net.pointwise("gelu", x)
        net.exit()
    net.exit()
    net.enter("feature_projection")
    frames = net.shape(x)[-1]
    x = net.layer_norm(net.contiguous(net.permute(x, batch, frames, c.channels)), "layer_norm")
    x = net.linear(x, c.hidden, "projection", bias=True)
    net.exit()
    net.weight("masked_spec_embed", c.hidden)
    return x


def _positions(net: Net, x: int, c: Wav2Vec2) -> int:
    """A grouped convolution with normalized weights in place of position embeddings."""
    b, s, h = net.shape(x)
    net.enter("encoder.pos_conv_embed.conv")
    size, direction = net.weight("weight_g", 1, 1, 128), net.weight("weight_v", h, h // 16, 128)
    norm = net.reduce("norm", direction, (0, 1), keepdim=True)
    weight = net.mul(direction, net.pointwise("div", size, norm))
    y = net.node(
        "conv",
        [net.permute(x, b, h, s), weight, net.weight("bias", h)],
        [net.type(b, h, s + 1)],
        n=b,
        c=h,
        o=h,
        spatial=(s,),
        kernel=(128,),
        stride=(1,),
        padding=(64,),
        dilation=(1,),
        groups=16,
        transposed=False,
        which="fwd",
        out_spatial=(s + 1,),
        bias=True,
    )[0]
    y = net.pointwise("gelu", net.slice(y, b, h, s))
    net.exit()
    return net.add(x, net.permute(y, b, s, h))


def _wav2vec2(c: Wav2Vec2, r: Request) -> Graph:
    shortest = 400
    if r.seq < shortest:
        raise ModelError(
            f"{r.card.name}: seq={r.seq} samples are {shortest - r.seq} fewer than one frame of "
            f"feature_extractor needs ({shortest})"
        )
    net = Net(r.card.name, r.mode, r.precision, batch=r.batch, seq=r.seq)
    net.enter("wav2vec2")
    x = _positions(net, _features(net, c, r.batch, r.seq), c)
    net.enter("encoder")
    x = net.layer_norm(x, "layer_norm")
    with net.repeat(c.layers, "layers"):
        inner = net.carry(x)
        net.enter("attention")
        y = net.linear(self_attention(net, inner, c.heads, names=_QKV), c.hidden, "out_proj", bias=True)
        net.exit()
        y = net.layer_norm(net.add(inner, y), "layer_norm")
        net.enter("feed_forward")
        z = net.pointwise("gelu", net.linear(y, 4 * c.hidden, "intermediate_dense", bias=True))
        z = net.linear(z, c.hidden, "output_dense", bias=True)
        net.exit()
        x = net.layer_norm(net.add(y, z), "final_layer_norm")
        net.close_carry(inner, x)
    net.exit()
    net.exit()
    logits = net.linear(x, c.vocab, "lm_head", bias=True)
    return net.finish([_ctc(net, logits, r.batch)], frees=False) if net.train else net.finish([logits])


def _ctc(net: Net, logits: int, batch: int) -> int:
    b, s, v = net.shape(logits)
    labels = net.input("labels", TensorType((batch, max(1, s // 8)), INT64))
    logs = net.softmax(net.cast(logits, FP32), log=True)
    return net.node(
        "loss",
        [logs, labels],
        [TensorType((), FP32), TensorType((b, s, 2 * max(1, s // 8) + 1), FP32)],
        fn="ctc_loss",
        n=b * s,
        c=v,
        reduction="sum",
    )[0]


_LARGE = Whisper(layers=32, hidden=1280, heads=20, vocab=51866, mels=128)
register(
    ModelCard(
        "whisper-large-v3",
        "Whisper large v3",
        "speech",
        1_543_490_560,
        "openai/whisper-large-v3 config.json",
        {"seq": 448, "kv": 447},
        {},
        ("infer", "decode", "train"),
    ),
    lambda request: _whisper(_LARGE, request),
)
register(
    ModelCard(
        "wav2vec2-large",
        "wav2vec 2.0 large with its CTC head",
        "speech",
        315_461_792,
        "facebook/wav2vec2-large-960h config.json (seq counts audio samples, 16,000 a second)",
        {"seq": 160_000},
    ),
    lambda request: _wav2vec2(Wav2Vec2(), request),
)
