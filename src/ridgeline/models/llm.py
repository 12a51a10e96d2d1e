"""Decoder-only language models: dense and mixture-of-experts, with the attention variants that are in use."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.errors import ModelError, nearest
from ridgeline.graph import Graph, Kind, typed
from ridgeline.graph.backward import differentiate
from ridgeline.models.card import MODES, ModelCard, Request, find, register
from ridgeline.models.moe import Experts, moe_layer
from ridgeline.models.net import BOOL, FP32, INT64, Net


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: low-rank queries and a compressed key-value cache."""

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The shape of a decoder-only transformer, by the names its config file uses."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    kv_heads: int = 0
    head_dim: int = 0
    tied: bool = False
    act: str = "silu"
    gated: bool = True
    norm: str = "rms_norm"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    fused: bool = False  # one projection for q, k, v and one for gate, up
    conv1d: bool = False  # GPT-2's c_attn and learned positions
    positions: int = 0  # rows of a learned position table; 0 means rotary
    post_norms: bool = False  # Gemma: a norm behind attention and feed-forward as well
    embed_scale: bool = False
    final_softcap: bool = False
    score_softcap: bool = False
    windows: tuple[int, ...] = (0,)  # the period of attention windows over layers; 0 is full attention
    sinks: bool = False
    experts: Experts | None = None
    latent: Latent | None = None
    core: str = "sdpa"  # or unfused: scores and probabilities in memory, as before fused attention
    dropout: bool = False  # on probabilities and behind attention and feed-forward
    score_dropout: bool = True  # on probabilities too, where there is dropout
    lora: int = 0  # rank of the adapters beside the attention's projections; everything else is frozen
    lora_out: bool = True  # adapters also behind the attention, not beside queries, keys and values alone

    @property
    def d(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def hkv(self) -> int:
        return self.kv_heads or self.heads


class _Writer:
    """Writes one decoder: holds what every layer shares."""

    def __init__(self, config: Decoder, request: Request) -> None:
        self.c, self.r = config, request
        self.net = Net(
            request.card.name, request.mode, request.precision, batch=request.batch, seq=request.seq, kv=request.kv
        )
        self.net.fused_norms = bool(request["fused_norms"])
        self.net.frozen = config.lora > 0
        self.decode = request.mode == "decode"
        self.past = request.kv if self.decode else 0
        self.s = 1 if self.decode else request.seq
        self.caching = self.decode or (request.mode != "train" and bool(request["use_cache"]))
        self.new_cache: list[int] = []
        self.donated: list[int] = []
        self.cos = self.sin = -1

    def graph(self) -> Graph:
        net, c, r = self.net, self.c, self.r
        tokens = net.input("input_ids", typed((r.batch, self.s), INT64))
        body = "transformer" if c.conv1d else "model"
        net.enter(body)
        h, table = net.embedding(tokens, c.vocab, c.hidden, "wte" if c.conv1d else "embed_tokens")
        h = self.positions(h)
        h = self.layers(h)
        h = self.norm(h, "ln_f" if c.conv1d else "norm")
        net.exit()
        return self.head(h, table, tokens)

    def positions(self, h: int) -> int:
        net, c = self.net, self.c
        if c.embed_scale:
            h = net.pointwise("mul", h, scalars=1)
        if not c.positions:
            self.cos, self.sin = rotary_table(net, self.s, c.latent.rope if c.latent else c.d)
            return h
        where = net.fill("arange", self.s, dt=INT64)
        if self.past:
            where = net.pointwise("add", where, scalars=1)
        places, _ = net.embedding(net.reshape(where, 1, self.s), c.positions, c.hidden, "wpe")
        return net.add(h, places)

    def layers(self, h: int) -> int:
        c = self.c
        dense = c.experts.dense_layers if c.experts else 0
        if dense:
            h = self.stack(h, dense, (0,), moe=False)
        whole, rest = divmod(c.layers - dense, len(c.windows))
        h = self.stack(h, whole, c.windows, moe=c.experts is not None)
        return self.stack(h, 1, c.windows[:rest], moe=c.experts is not None) if rest else h

    def stack(self, h: int, times: int, windows: tuple[int, ...], *, moe: bool) -> int:
        net = self.net
        with net.repeat(times, "h" if self.c.conv1d else "layers"):
            inner = net.carry(h)
            h = inner
            for window in windows:
                h = self.layer(h, window, moe)
            net.close_carry(inner, h)
        return h

    def layer(self, h: int, window: int, moe: bool) -> int:
        net, c = self.net, self.c
        first, second = ("ln_1", "ln_2") if c.conv1d else ("input_layernorm", "post_attention_layernorm")
        x = self.norm(h, first)
        net.enter("attn" if c.conv1d else "self_attn")
        x = self.latent_attention(x, c.latent) if c.latent else self.attention(x, window)
        net.exit()
        if c.post_norms:
            x, second = self.norm(x, second), "pre_feedforward_layernorm"
        h = net.add(h, self.dropped(x))
        x = self.norm(h, second)
        net.enter("mlp")
        x = moe_layer(net, x, c.experts, c.act) if moe and c.experts else self.feed_forward(x, c.ffn)
        net.exit()
        if c.post_norms:
            x = self.norm(x, "post_feedforward_layernorm")
        return net.add(h, self.dropped(x))

    def dropped(self, x: int) -> int:
        """Dropout: a mask of a byte an element, drawn and multiplied in."""
        net = self.net
        if not (self.c.dropout and net.train):
            return x
        mask = net.node("random", [], [typed(net.shape(x), BOOL)], fn="bernoulli")[0]
        return net.node("pointwise", [x, mask], [typed(net.shape(x), net.dt)], fn="mul")[0]

    def adapted(self, x: int, out: int, name: str) -> int:
        """A frozen projection and its adapter's share, if the model is fine-tuned through one."""
        net, c = self.net, self.c
        if not c.lora:
            return out
        net.frozen = False
        low = net.linear(net.linear(x, c.lora, f"{name}.lora_a"), net.shape(out)[-1], f"{name}.lora_b")
        net.frozen = True
        return net.add(out, low)

    def norm(self, x: int, name: str) -> int:
        return self.net.rms_norm(x, name) if self.c.norm == "rms_norm" else self.net.layer_norm(x, name)

    def attention(self, x: int, window: int) -> int:
        net, c = self.net, self.c
        q, k, v = self.projections(x)
        if c.qk_norm:
            q, k = net.rms_norm(q, "q_norm"), net.rms_norm(k, "k_norm")
        b, s, d = self.r.batch, self.s, c.d
        q, k, v = net.permute(q, b, c.heads, s, d), net.permute(k, b, c.hkv, s, d), net.permute(v, b, c.hkv, s, d)
        if not c.positions:
            q, k = apply_rotary(net, q, self.cos, self.sin), apply_rotary(net, k, self.cos, self.sin)
        if self.caching:
            k, v = self.cached(k, "keys", window), self.cached(v, "values", window)
        out = self.sdpa(q, k, v, window)
        name = "c_proj" if c.conv1d else "o_proj"
        flat = net.unheads(out)
        out = net.linear(flat, c.hidden, name, bias=c.o_bias)
        return self.adapted(flat, out, name) if c.lora_out else out

    def unfused(self, q: int, k: int, v: int) -> int:
        """Scores, masked softmax in one kernel, dropout, weighted sum: four passes over [b, h, s, s]."""
        net = self.net
        scores = net.bmm(q, k, trans_b=True)
        probabilities = net.softmax(scores)
        return net.bmm(self.dropped(probabilities) if self.c.score_dropout else probabilities, v)

    def sdpa(self, q: int, k: int, v: int, window: int) -> int:
        if self.c.core == "unfused" and self.c.hkv == self.c.heads:
            return self.unfused(q, k, v)
        if self.c.sinks:
            sinks = self.net.weight("sinks", self.c.heads)
            return self.net.attention(q, k, v, causal=self.s > 1, window=window or None, sinks=sinks)
        return self.net.attention(q, k, v, causal=self.s > 1, window=window or None, softcap=self.c.score_softcap)

    def projections(self, x: int) -> tuple[int, int, int]:
        """q, k and v as [b, s, heads, d]."""
        net, c = self.net, self.c
        b, s, d = self.r.batch, self.s, c.d
        wide, narrow = c.heads * d, c.hkv * d
        if c.fused or c.conv1d:
            both = net.linear(x, wide + 2 * narrow, "c_attn" if c.conv1d else "qkv_proj", bias=c.qkv_bias)
            both = self.adapted(x, both, "qkv_proj")
            q, k, v = net.split(both, (wide, narrow, narrow))
        else:
            q = net.linear(x, wide, "q_proj", bias=c.qkv_bias)
            k = net.linear(x, narrow, "k_proj", bias=c.qkv_bias)
            v = net.linear(x, narrow, "v_proj", bias=c.qkv_bias)
        return net.reshape(q, b, s, c.heads, d), net.reshape(k, b, s, c.hkv, d), net.reshape(v, b, s, c.hkv, d)

    def cached(self, new: int, name: str, window: int) -> int:
        """Append to the cache as a growing concatenation; windowed layers keep only their window."""
        net = self.net
        b, h, s, d = net.shape(new)
        parts, past = [new], min(self.past, window - 1) if window else self.past
        if past:
            old = net.value(net.type(b, h, past, d), Kind.INPUT, count=net.repeats, name=f"past_key_values.*.{name}")
            self.donated.append(old)
            parts = [old, new]
        whole = net.stacked(net.cat(parts, -2, shape=(b, h, past + s, d)))
        self.new_cache.append(whole)
        return whole

    def feed_forward(self, x: int, ffn: int) -> int:
        net, c = self.net, self.c
        if c.conv1d:
            inner = self.activated(net.linear(x, ffn, "c_fc", bias=True))
            return net.linear(inner, c.hidden, "c_proj", bias=True)
        if not c.gated:
            inner = self.activated(net.linear(x, ffn, "up_proj", bias=c.mlp_bias))
            return net.linear(inner, c.hidden, "down_proj", bias=c.mlp_bias)
        if c.fused:
            gate, up = net.split(net.linear(x, 2 * ffn, "gate_up_proj"), (ffn, ffn))
        else:
            gate, up = net.linear(x, ffn, "gate_proj", bias=c.mlp_bias), -1
        gate = net.pointwise(c.act, gate)
        if up < 0:
            up = net.linear(x, ffn, "up_proj", bias=c.mlp_bias)
        return net.linear(net.mul(gate, up), c.hidden, "down_proj", bias=c.mlp_bias)

    def activated(self, x: int) -> int:
        """The activation; GPT-2's own approximation of GELU is spelled out, op by op, as Hugging Face runs it."""
        net = self.net
        if self.c.act != "gelu_new":
            return net.pointwise(self.c.act, x)
        cubic = net.pointwise("mul", net.pointwise("pow", x), scalars=1)
        inside = net.pointwise("tanh", net.pointwise("mul", net.add(x, cubic), scalars=1))
        return net.mul(net.pointwise("mul", x, scalars=1), net.pointwise("add", inside, scalars=1))

    def latent_attention(self, x: int, m: Latent) -> int:
        """DeepSeek's attention as its reference runs it: the compressed keys and values are expanded before use."""
        net, c = self.net, self.c
        b, s, h = self.r.batch, self.s, c.heads
        q = net.linear(
            net.rms_norm(net.linear(x, m.q_rank, "q_a_proj"), "q_a_layernorm"), h * (m.nope + m.rope), "q_b_proj"
        )
        q = net.permute(net.reshape(q, b, s, h, m.nope + m.rope), b, h, s, m.nope + m.rope)
        q_nope, q_rope = net.split(q, (m.nope, m.rope))
        low, k_rope = net.split(net.linear(x, m.kv_rank + m.rope, "kv_a_proj_with_mqa"), (m.kv_rank, m.rope))
        wide = net.linear(net.rms_norm(low, "kv_a_layernorm"), h * (m.nope + m.value), "kv_b_proj")
        wide = net.permute(net.reshape(wide, b, s, h, m.nope + m.value), b, h, s, m.nope + m.value)
        k_nope, v = net.split(wide, (m.nope, m.value))
        q_rope = apply_rotary(net, q_rope, self.cos, self.sin, interleaved=True)
        k_rope = apply_rotary(net, net.reshape(k_rope, b, 1, s, m.rope), self.cos, self.sin, interleaved=True)
        k = net.cat((k_nope, net.expand_view(k_rope, b, h, s, m.rope)), -1)
        q = net.cat((q_nope, q_rope), -1)
        if self.caching:
            k, v = self.cached(k, "keys", 0), self.cached(v, "values", 0)
        out = net.attention(q, k, v, causal=s > 1)
        return net.linear(net.unheads(out), c.hidden, "o_proj")

    def head(self, h: int, table: int, tokens: int) -> Graph:
        net, c, r = self.net, self.c, self.r
        if r.mode == "prefill" and self.s > 1:
            h = net.slice(h, r.batch, 1, c.hidden)
        logits = net.linear(h, c.vocab, "lm_head", weight=table if c.tied else None, wide=True)
        if c.final_softcap:
            logits = net.pointwise("mul", net.pointwise("tanh", net.pointwise("mul", logits, scalars=1)), scalars=1)
        if net.train:
            return net.finish([causal_loss(net, logits, tokens)], frees=False)
        if self.donated:
            net.meta["donated"] = tuple(self.donated)
        return net.finish([logits, *self.new_cache])


def rotary_table(net: Net, s: int, d: int) -> tuple[int, int]:
    """cos and sin of the positions, as [1, s, d]; made once for all layers."""
    net.enter("rotary_emb")
    where = net.reshape(net.cast(net.fill("arange", s, dt=INT64), FP32), 1, s, 1)
    inverse = net.reshape(net.buffer("inv_freq", d // 2, dt=FP32), 1, 1, d // 2)
    angles = net.mul(where, inverse)
    angles = net.cat((angles, angles), -1)
    cos = net.cast(net.pointwise("mul", net.pointwise("cos", angles), scalars=1), net.dt)
    sin = net.cast(net.pointwise("mul", net.pointwise("sin", angles), scalars=1), net.dt)
    net.exit()
    return cos, sin


def apply_rotary(net: Net, x: int, cos: int, sin: int, *, interleaved: bool = False) -> int:
    """x·cos + rotate_half(x)·sin on [b, h, s, d], op by op."""
    b, h, s, d = net.shape(x)
    if interleaved:
        x = net.contiguous(net.permute(net.reshape(x, b, h, s, d // 2, 2), b, h, s, 2, d // 2))
        x = net.reshape(x, b, h, s, d)
    plain = net.mul(x, cos)
    first, second = net.slice(x, b, h, s, d // 2), net.slice(x, b, h, s, d // 2)
    turned = net.cat((net.pointwise("neg", second), first), -1, shape=(b, h, s, d))
    return net.add(plain, net.mul(turned, sin))


def causal_loss(net: Net, logits: int, tokens: int) -> int:
    """Next-token cross-entropy in fp32: shifted labels, as language-model trainers compute it."""
    b, s, v = net.shape(logits)
    wide = net.cast(logits, FP32)
    labels = net.contiguous(net.slice(net.pad(tokens, (b, s + 1)), b, s), transposed=False)
    return net.cross_entropy(net.reshape(wide, b * s, v), net.reshape(labels, b * s))


def decoder(name: str, config: Decoder, *, batch: int, seq: int, mode: str = "train", precision: str = "bf16",
            optimizer: str = "adamw_fused") -> Graph:  # fmt: skip
    """The graph of a decoder known by its dimensions only: a row of a table of results, an idea."""
    card = ModelCard(name, name, "llm", 0, "given", {"seq": seq, "kv": seq}, {"use_cache": True, "fused_norms": True})
    request = Request(card, batch, seq, seq, 0, mode, precision, card.options)
    graph = _build(config, request)
    return differentiate(graph, optimizer=optimizer) if mode == "train" else graph


def _build(config: Decoder, request: Request) -> Graph:
    if config.positions:
        total = request.kv + 1 if request.mode == "decode" else request.seq
        if total > config.positions:
            size, least = ("kv", config.positions - 1) if request.mode == "decode" else ("seq", config.positions)
            request.at_most(size, least, "transformer.wpe.weight")
    return _Writer(config, request).graph()


_DECODERS: dict[str, Decoder] = {}


def shape_of(name: str) -> Decoder:
    """The shape of a decoder-only language model of the zoo, for those who price it by other means than a graph."""
    card, _ = find(name)
    if card.name not in _DECODERS:
        raise ModelError(f"{card.name} is not a decoder-only language model{nearest(card.name, _DECODERS)}")
    return _DECODERS[card.name]


def _add(
    name: str,
    title: str,
    num_params: int,
    source: str,
    config: Decoder,
    *,
    seq: int = 2048,
    aliases: tuple[str, ...] = (),
    family: str = "llm",
) -> None:
    sizes = {"seq": seq, "kv": seq - 1 if config.positions else seq}
    card = ModelCard(
        name, title, family, num_params, source, sizes, {"use_cache": True, "fused_norms": True}, MODES, aliases, True
    )
    register(card, lambda request: _build(config, request))
    _DECODERS[name] = config


_add(
    "llama3-8b",
    "Llama 3 8B",
    8_030_261_248,
    "meta-llama/Meta-Llama-3-8B config.json",
    Decoder(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256),
    aliases=("llama3.1-8b", "llama-3-8b"),
)
_add(
    "llama3-70b",
    "Llama 3 70B",
    70_553_706_496,
    "meta-llama/Meta-Llama-3-70B config.json",
    Decoder(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256),
    aliases=("llama3.1-70b", "llama3.3-70b", "llama-3-70b"),
)
_add(
    "llama3.1-405b",
    "Llama 3.1 405B",
    405_853_388_800,
    "meta-llama/Llama-3.1-405B config.json",
    Decoder(layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256),
    aliases=("llama3-405b", "llama-3.1-405b"),
)
_add(
    "llama3.2-1b",
    "Llama 3.2 1B",
    1_235_814_400,
    "meta-llama/Llama-3.2-1B config.json",
    Decoder(layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256, tied=True),
)
_add(
    "llama3.2-3b",
    "Llama 3.2 3B",
    3_212_749_824,
    "meta-llama/Llama-3.2-3B config.json",
    Decoder(layers=28, hidden=3072, heads=24, kv_heads=8, ffn=8192, vocab=128256, tied=True),
)
_add(
    "llama2-7b",
    "Llama 2 7B",
    6_738_415_616,
    "meta-llama/Llama-2-7b-hf config.json",
    Decoder(layers=32, hidden=4096, heads=32, ffn=11008, vocab=32000),
)
_add(
    "llama2-13b",
    "Llama 2 13B",
    13_015_864_320,
    "meta-llama/Llama-2-13b-hf config.json",
    Decoder(layers=40, hidden=5120, heads=40, ffn=13824, vocab=32000),
)
_add(
    "llama2-70b",
    "Llama 2 70B",
    68_976_648_192,
    "meta-llama/Llama-2-70b-hf config.json",
    Decoder(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=32000),
)
_add(
    "mistral-7b",
    "Mistral 7B v0.1",
    7_241_732_096,
    "mistralai/Mistral-7B-v0.1 config.json",
    Decoder(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000, windows=(4096,)),
)
_add(
    "qwen2.5-7b",
    "Qwen2.5 7B",
    7_615_616_512,
    "Qwen/Qwen2.5-7B config.json",
    Decoder(layers=28, hidden=3584, heads=28, kv_heads=4, ffn=18944, vocab=152064, qkv_bias=True),
)
_add(
    "qwen2.5-72b",
    "Qwen2.5 72B",
    72_706_203_648,
    "Qwen/Qwen2.5-72B config.json",
    Decoder(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=29568, vocab=152064, qkv_bias=True),
)
_add(
    "qwen3-8b",
    "Qwen3 8B",
    8_190_735_360,
    "Qwen/Qwen3-8B config.json",
    Decoder(layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=12288, vocab=151936, qk_norm=True),
)
_add(
    "qwen3-32b",
    "Qwen3 32B",
    32_762_123_264,
    "Qwen/Qwen3-32B config.json",
    Decoder(layers=64, hidden=5120, heads=64, kv_heads=8, head_dim=128, ffn=25600, vocab=151936, qk_norm=True),
)
_add(
    "gemma2-9b",
    "Gemma 2 9B",
    9_241_705_984,
    "google/gemma-2-9b config.json",
    Decoder(
        layers=42,
        hidden=3584,
        heads=16,
        kv_heads=8,
        head_dim=256,
        ffn=14336,
        vocab=256000,
        tied=True,
        act="gelu",
        post_norms=True,
        embed_scale=True,
        final_softcap=True,
        score_softcap=True,
        windows=(4096, 0),
    ),
)
_add(
    "gemma3-27b",
    "Gemma 3 27B, the language model",
    27_009_346_304,
    "google/gemma-3-27b-pt config.json, text_config",
    Decoder(
        layers=62,
        hidden=5376,
        heads=32,
        kv_heads=16,
        head_dim=128,
        ffn=21504,
        vocab=262208,
        tied=True,
        act="gelu",
        qk_norm=True,
        post_norms=True,
        embed_scale=True,
        windows=(1024, 1024, 1024, 1024, 1024, 0),
    ),
)
_add(
    "gpt2-xl",
    "GPT-2 XL",
    1_557_611_200,
    "openai-community/gpt2-xl config.json",
    Decoder(
        layers=48,
        hidden=1600,
        heads=25,
        ffn=6400,
        vocab=50257,
        tied=True,
        act="gelu",
        norm="layer_norm",
        qkv_bias=True,
        o_bias=True,
        conv1d=True,
        positions=1024,
    ),
    seq=1024,
)
_add(
    "gpt3-175b",
    "GPT-3 175B",
    174_604_259_328,
    "Brown et al. 2020, table 2.1, in GPT-2's architecture",
    Decoder(
        layers=96,
        hidden=12288,
        heads=96,
        ffn=49152,
        vocab=50257,
        tied=True,
        act="gelu",
        norm="layer_norm",
        qkv_bias=True,
        o_bias=True,
        conv1d=True,
        positions=2048,
    ),
)
_add(
    "phi-3-mini",
    "Phi-3 mini 4k",
    3_821_079_552,
    "microsoft/Phi-3-mini-4k-instruct config.json",
    Decoder(layers=32, hidden=3072, heads=32, ffn=8192, vocab=32064, fused=True, windows=(2047,)),
)
_add(
    "mixtral-8x7b",
    "Mixtral 8x7B",
    46_702_792_704,
    "mistralai/Mixtral-8x7B-v0.1 config.json",
    Decoder(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000, experts=Experts(8, 2, 14336)),
    family="moe",
)
_add(
    "mixtral-8x22b",
    "Mixtral 8x22B",
    140_620_634_112,
    "mistralai/Mixtral-8x22B-v0.1 config.json",
    Decoder(layers=56, hidden=6144, heads=48, kv_heads=8, ffn=16384, vocab=32000, experts=Experts(8, 2, 16384)),
    family="moe",
)
_add(
    "qwen3-30b-a3b",
    "Qwen3 30B-A3B",
    30_532_122_624,
    "Qwen/Qwen3-30B-A3B config.json",
    Decoder(
        layers=48,
        hidden=2048,
        heads=32,
        kv_heads=4,
        head_dim=128,
        ffn=6144,
        vocab=151936,
        qk_norm=True,
        experts=Experts(128, 8, 768),
    ),
    family="moe",
)
_add(
    "qwen3-235b-a22b",
    "Qwen3 235B-A22B",
    235_093_634_560,
    "Qwen/Qwen3-235B-A22B config.json",
    Decoder(
        layers=94,
        hidden=4096,
        heads=64,
        kv_heads=4,
        head_dim=128,
        ffn=12288,
        vocab=151936,
        qk_norm=True,
        experts=Experts(128, 8, 1536),
    ),
    family="moe",
)
_add(
    "gpt-oss-20b",
    "gpt-oss 20B",
    20_914_757_184,
    "openai/gpt-oss-20b config.json",
    Decoder(
        layers=24,
        hidden=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        ffn=2880,
        vocab=201088,
        qkv_bias=True,
        o_bias=True,
        sinks=True,
        windows=(128, 0),
        experts=Experts(32, 4, 2880, bias=True, router="pick_first"),
    ),
    family="moe",
)
_add(
    "gpt-oss-120b",
    "gpt-oss 120B",
    116_829_156_672,
    "openai/gpt-oss-120b config.json",
    Decoder(
        layers=36,
        hidden=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        ffn=2880,
        vocab=201088,
        qkv_bias=True,
        o_bias=True,
        sinks=True,
        windows=(128, 0),
        experts=Experts(128, 4, 2880, bias=True, router="pick_first"),
    ),
    family="moe",
)
_add(
    "deepseek-v3",
    "DeepSeek-V3 without the MTP module",
    671_026_404_352,
    "deepseek-ai/DeepSeek-V3 config.json",
    Decoder(
        layers=61,
        hidden=7168,
        heads=128,
        ffn=18432,
        vocab=129280,
        latent=Latent(1536, 512, 128, 64, 128),
        experts=Experts(256, 8, 2048, shared=2048, router="sigmoid_groups", groups=8, top_groups=4, dense_layers=3),
    ),
    family="moe",
    aliases=("deepseek-r1",),
)
_add(
    "kimi-k2",
    "Kimi K2 (language model of K2.5 as well)",
    1_026_408_209_408,
    "moonshotai/Kimi-K2-Instruct config.json",
    Decoder(
        layers=61,
        hidden=7168,
        heads=64,
        ffn=18432,
        vocab=163840,
        latent=Latent(1536, 512, 128, 64, 128),
        experts=Experts(384, 8, 2048, shared=2048, router="sigmoid_groups", dense_layers=1),
    ),
    family="moe",
    aliases=("kimi-k2.5",),
)
_add(
    "minimax-m2",
    "MiniMax-M2 (M2.5 as well) without the MTP modules",
    228_689_320_448,
    "MiniMaxAI/MiniMax-M2 config.json",
    Decoder(
        layers=62,
        hidden=3072,
        heads=48,
        kv_heads=8,
        head_dim=128,
        ffn=1536,
        vocab=200064,
        qk_norm=True,
        experts=Experts(256, 8, 1536, router="sigmoid_groups"),
    ),
    family="moe",
    aliases=("minimax-m2.5",),
)
