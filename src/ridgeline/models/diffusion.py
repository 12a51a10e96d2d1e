"""Diffusion: the UNets of Stable Diffusion and the transformers DiT, SD3 and FLUX."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.graph import Graph, TensorType
from ridgeline.models.card import ModelCard, Request, register
from ridgeline.models.net import FP32, INT64, Net
from ridgeline.models.vision import fused_attention, mlp, patches


def denoise(net: Net, out: int) -> Graph:
    """The predicted noise, or in training its mean squared error."""
    if not net.train:
        return net.finish([out])
    return net.finish([net.mse(out, net.input("target", net.type(*net.shape(out))))], frees=False)


def sinusoid(net: Net, steps: int, width: int) -> int:
    """Sine and cosine features of a time step, in fp32 and then the working precision."""
    b = net.shape(steps)[0]
    angles = net.pointwise(
        "mul", net.reshape(net.cast(steps, FP32), b, 1), net.fill("frequencies", width // 2, dt=FP32)
    )
    both = net.cat((net.pointwise("sin", angles), net.pointwise("cos", angles)), -1)
    return net.cast(both, net.dt)


def two_layers(net: Net, x: int, width: int, name: str, act: str = "silu") -> int:
    """linear, activation, linear: how times, classes and pooled texts are embedded."""
    net.enter(name)
    x = net.linear(net.pointwise(act, net.linear(x, width, "linear_1", bias=True)), width, "linear_2", bias=True)
    net.exit()
    return x


# UNets.


@dataclass(frozen=True, slots=True, kw_only=True)
class Unet:
    """A conditional UNet as Stable Diffusion shapes it."""

    widths: tuple[int, ...]
    depths: tuple[int, ...]  # transformer layers per attention at each level; 0 is a level without attention
    heads: tuple[int, ...]
    text: int
    linear: bool  # the projections around a transformer are linear layers instead of 1×1 convolutions
    pooled: int = 0  # width of the added pooled-text and size features

    @property
    def mid_depth(self) -> int:
        return self.depths[-1] or 1


class _UnetWriter:
    def __init__(self, c: Unet, r: Request) -> None:
        self.c, self.r = c, r
        self.net = Net(r.card.name, r.mode, r.precision, batch=r.batch, seq=r.seq, image=r.image)
        self.text = self.net.input("encoder_hidden_states", self.net.type(r.batch, r.seq, c.text))
        self.time = -1

    def graph(self) -> Graph:
        net, c, r = self.net, self.c, self.r
        side = r.image // 8
        x = net.input("sample", net.type(r.batch, 4, side, side))
        self.time = self.embed_time()
        x = net.conv(x, c.widths[0], 3, "conv_in", bias=True)
        x, skips = self.down(x)
        x = self.mid(x)
        x = self.up(x, skips)
        x = net.pointwise("silu", net.group_norm(x, 32, "conv_norm_out"))
        return denoise(net, net.conv(x, 4, 3, "conv_out", bias=True))

    def embed_time(self) -> int:
        net, c, r = self.net, self.c, self.r
        wide = 4 * c.widths[0]
        steps = net.input("timestep", TensorType((r.batch,), INT64))
        emb = two_layers(net, sinusoid(net, steps, c.widths[0]), wide, "time_embedding")
        if c.pooled:
            extra = net.input("added_cond", net.type(r.batch, c.pooled))
            emb = net.add(emb, two_layers(net, extra, wide, "add_embedding"))
        return emb

    def down(self, x: int) -> tuple[int, list[int]]:
        net, c = self.net, self.c
        skips = [x]
        for i, width in enumerate(c.widths):
            net.enter(f"down_blocks.{i}")
            for j in range(2):
                x = self.level(x, width, i, j, c.depths[i])
                skips.append(x)
            if i < len(c.widths) - 1:
                x = net.conv(x, width, 3, "downsamplers.0.conv", stride=2, padding=1, bias=True)
                skips.append(x)
            net.exit()
        return x, skips

    def mid(self, x: int) -> int:
        net, c = self.net, self.c
        net.enter("mid_block")
        x = self.resnet(x, c.widths[-1], "resnets.0")
        x = self.transformer(x, c.mid_depth, c.heads[-1], "attentions.0")
        x = self.resnet(x, c.widths[-1], "resnets.1")
        net.exit()
        return x

    def up(self, x: int, skips: list[int]) -> int:
        net, c = self.net, self.c
        for i, level in enumerate(reversed(range(len(c.widths)))):
            net.enter(f"up_blocks.{i}")
            for j in range(3):
                x = self.level(net.cat((x, skips.pop()), 1), c.widths[level], level, j, c.depths[level])
            if level:
                _, width, side, _ = net.shape(x)
                x = net.conv(net.resize(x, 2 * side, 2 * side), width, 3, "upsamplers.0.conv", bias=True)
            net.exit()
        return x

    def level(self, x: int, width: int, at: int, j: int, depth: int) -> int:
        x = self.resnet(x, width, f"resnets.{j}")
        return self.transformer(x, depth, self.c.heads[at], f"attentions.{j}") if depth else x

    def resnet(self, x: int, width: int, name: str) -> int:
        net = self.net
        b, c = net.shape(x)[:2]
        net.enter(name)
        y = net.conv(net.pointwise("silu", net.group_norm(x, 32, "norm1")), width, 3, "conv1", bias=True)
        shift = net.linear(net.pointwise("silu", self.time), width, "time_emb_proj", bias=True)
        y = net.add(y, net.reshape(shift, b, width, 1, 1))
        y = net.conv(net.pointwise("silu", net.group_norm(y, 32, "norm2")), width, 3, "conv2", bias=True)
        if c != width:
            x = net.conv(x, width, 1, "conv_shortcut", bias=True)
        net.exit()
        return net.pointwise("div", net.add(x, y), scalars=1)  # by an output scale of one, but divided all the same

    def transformer(self, x: int, depth: int, heads: int, name: str) -> int:
        net = self.net
        b, c, h, w = net.shape(x)
        net.enter(name)
        y = net.group_norm(x, 32, "norm")
        if self.c.linear:
            y = net.contiguous(net.permute(net.reshape(y, b, c, h * w), b, h * w, c))
            y = net.linear(y, c, "proj_in", bias=True)
        else:
            y = net.conv(y, c, 1, "proj_in", bias=True)
            y = net.contiguous(net.permute(net.reshape(y, b, c, h * w), b, h * w, c))
        y = self.layers(y, depth, heads)
        if self.c.linear:
            y = net.linear(y, c, "proj_out", bias=True)
            y = net.contiguous(net.permute(net.reshape(y, b, h, w, c), b, c, h, w))
        else:
            y = net.contiguous(net.permute(net.reshape(y, b, h, w, c), b, c, h, w))
            y = net.conv(y, c, 1, "proj_out", bias=True)
        net.exit()
        return net.add(y, x)

    def layers(self, x: int, depth: int, heads: int) -> int:
        net = self.net
        with net.repeat(depth, "transformer_blocks"):
            inner = net.carry(x)
            x = net.add(self.attend(net.layer_norm(inner, "norm1"), None, heads, "attn1"), inner)
            x = net.add(self.attend(net.layer_norm(x, "norm2"), self.text, heads, "attn2"), x)
            x = net.add(self.geglu(net.layer_norm(x, "norm3")), x)
            net.close_carry(inner, x)
        return x

    def attend(self, x: int, context: int | None, heads: int, name: str) -> int:
        net = self.net
        width = net.shape(x)[-1]
        source = x if context is None else context
        net.enter(name)
        q = net.heads(net.linear(x, width, "to_q"), heads, width // heads)
        k = net.heads(net.linear(source, width, "to_k"), heads, width // heads)
        v = net.heads(net.linear(source, width, "to_v"), heads, width // heads)
        y = net.linear(net.unheads(net.attention(q, k, v, causal=False)), width, "to_out.0", bias=True)
        y = net.pointwise("div", y, scalars=1)
        net.exit()
        return y

    def geglu(self, x: int) -> int:
        net = self.net
        width = net.shape(x)[-1]
        value, gate = net.split(net.linear(x, 8 * width, "ff.net.0.proj", bias=True), (4 * width, 4 * width))
        return net.linear(net.mul(value, net.pointwise("gelu", gate)), width, "ff.net.2", bias=True)


def _unet(c: Unet, r: Request) -> Graph:
    step = 8 * 2 ** (len(c.widths) - 1)
    r.multiple_of("image", step, "the latent is an eighth and is halved at every level")
    return _UnetWriter(c, r).graph()


_SD15 = Unet(widths=(320, 640, 1280, 1280), depths=(1, 1, 1, 0), heads=(8, 8, 8, 8), text=768, linear=False)
_SD2 = Unet(widths=(320, 640, 1280, 1280), depths=(1, 1, 1, 0), heads=(5, 10, 20, 20), text=1024, linear=True)
_SDXL = Unet(widths=(320, 640, 1280), depths=(0, 2, 10), heads=(5, 10, 20), text=2048, linear=True, pooled=2816)
register(
    ModelCard(
        "sd15-unet",
        "Stable Diffusion 1.5 UNet",
        "diffusion",
        859_520_964,
        "stable-diffusion-v1-5/stable-diffusion-v1-5 unet/config.json",
        {"seq": 77, "image": 512},
    ),
    lambda request: _unet(_SD15, request),
)
register(
    ModelCard(
        "sd2-unet",
        "Stable Diffusion 2 UNet",
        "diffusion",
        865_910_724,
        "stabilityai/stable-diffusion-2-base unet/config.json",
        {"seq": 77, "image": 512},
    ),
    lambda request: _unet(_SD2, request),
)
register(
    ModelCard(
        "sdxl-unet",
        "Stable Diffusion XL UNet",
        "diffusion",
        2_567_463_684,
        "stabilityai/stable-diffusion-xl-base-1.0 unet/config.json",
        {"seq": 77, "image": 1024},
    ),
    lambda request: _unet(_SDXL, request),
)


# Transformers with adaptive layer norm.


def modulation(net: Net, cond: int, width: int, num: int, name: str) -> tuple[int, ...]:
    """``num`` shifts, scales and gates of [b, 1, width] from the condition."""
    b = net.shape(cond)[0]
    parts = net.split(net.linear(net.pointwise("silu", cond), num * width, name, bias=True), (width,) * num)
    return tuple(net.reshape(p, b, 1, width) for p in parts)


def modulated(net: Net, x: int, shift: int, scale: int, name: str) -> int:
    """layer_norm(x)·(1 + scale) + shift."""
    y = net.layer_norm(x, name, affine=False)
    return net.add(net.mul(y, net.pointwise("add", scale, scalars=1)), shift)


def _dit(r: Request) -> Graph:
    layers, hidden, heads, patch = 28, 1152, 16, 2
    r.multiple_of("image", 16, "the latent is an eighth, in patches of 2")
    net = Net(r.card.name, r.mode, r.precision, batch=r.batch, image=r.image)
    side = r.image // 8
    x = patches(net, net.input("x", net.type(r.batch, 4, side, side)), hidden, patch, "x_embedder.proj")
    tokens = net.shape(x)[1]
    x = net.add(x, net.weight("pos_embed", 1, tokens, hidden))
    cond = two_layers(net, sinusoid(net, net.input("t", TensorType((r.batch,), INT64)), 256), hidden, "t_embedder.mlp")
    label, _ = net.embedding(net.input("y", TensorType((r.batch,), INT64)), 1001, hidden, "y_embedder.embedding_table")
    cond = net.add(cond, label)
    with net.repeat(layers, "blocks"):
        inner = net.carry(x)
        x = _dit_block(net, inner, cond, heads)
        net.close_carry(inner, x)
    shift, scale = modulation(net, cond, hidden, 2, "final_layer.adaLN_modulation.1")
    x = net.linear(
        modulated(net, x, shift, scale, "final_layer.norm_final"), patch * patch * 8, "final_layer.linear", bias=True
    )
    half = side // patch
    x = net.permute(net.reshape(x, r.batch, half, half, patch, patch, 8), r.batch, 8, half, patch, half, patch)
    return denoise(net, net.reshape(net.contiguous(x), r.batch, 8, side, side))


def _dit_block(net: Net, x: int, cond: int, heads: int) -> int:
    hidden = net.shape(x)[-1]
    m = modulation(net, cond, hidden, 6, "adaLN_modulation.1")
    net.enter("attn")
    y = fused_attention(net, modulated(net, x, m[0], m[1], "norm1"), heads)
    net.exit()
    x = net.add(x, net.mul(m[2], y))
    net.enter("mlp")
    y = mlp(net, modulated(net, x, m[3], m[4], "norm2"), 4 * hidden, "gelu")
    net.exit()
    return net.add(x, net.mul(m[5], y))


register(
    ModelCard(
        "dit-xl2", "DiT-XL/2", "diffusion", 675_129_632, "Peebles and Xie 2023, facebookresearch/DiT", {"image": 256}
    ),
    _dit,
)


# Joint text-image transformers.


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """A transformer over text and image tokens together: SD3's and, with rotary positions, FLUX's."""

    double: int
    single: int
    hidden: int
    heads: int
    channels: int  # per patch
    text: int
    pooled: int
    rotary: bool
    guidance: bool = False
    grid: int = 0  # side of the fixed position table, for models without rotary positions

    @property
    def d(self) -> int:
        return self.hidden // self.heads


class _JointWriter:
    def __init__(self, c: Joint, r: Request) -> None:
        self.c, self.r = c, r
        self.net = Net(r.card.name, r.mode, r.precision, batch=r.batch, seq=r.seq, image=r.image)
        self.cond = self.cos = self.sin = -1

    def graph(self) -> Graph:
        net, c, r = self.net, self.c, self.r
        side = r.image // 16
        if c.rotary:
            x = net.linear(
                net.input("hidden_states", net.type(r.batch, side * side, c.channels)),
                c.hidden,
                "x_embedder",
                bias=True,
            )
        else:
            x = net.input("hidden_states", net.type(r.batch, c.channels // 4, 2 * side, 2 * side))
            x = patches(net, x, c.hidden, 2, "pos_embed.proj")
            x = net.add(x, net.buffer("pos_embed.pos_embed", 1, side * side, c.hidden))
        self.cond = self.condition()
        text = net.linear(
            net.input("encoder_hidden_states", net.type(r.batch, r.seq, c.text)),
            c.hidden,
            "context_embedder",
            bias=True,
        )
        if c.rotary:
            self.cos, self.sin = self.rotary_tables(r.seq + side * side)
        x, text = self.doubles(x, text)
        x = self.singles(x, text) if c.single else x
        scale, shift = modulation(net, self.cond, c.hidden, 2, "norm_out.linear")
        out = net.linear(modulated(net, x, shift, scale, "norm_out.norm"), c.channels, "proj_out", bias=True)
        return denoise(net, out)

    def condition(self) -> int:
        net, c, r = self.net, self.c, self.r
        net.enter("time_text_embed")
        steps = net.input("timestep", TensorType((r.batch,), FP32))
        cond = two_layers(net, sinusoid(net, steps, 256), c.hidden, "timestep_embedder")
        if c.guidance:
            strength = net.input("guidance", TensorType((r.batch,), FP32))
            cond = net.add(cond, two_layers(net, sinusoid(net, strength, 256), c.hidden, "guidance_embedder"))
        pooled = net.input("pooled_projections", net.type(r.batch, c.pooled))
        cond = net.add(cond, two_layers(net, pooled, c.hidden, "text_embedder"))
        net.exit()
        return cond

    def rotary_tables(self, s: int) -> tuple[int, int]:
        net, d = self.net, self.c.d
        net.enter("pos_embed")
        angles = net.pointwise("mul", net.fill("ids", s, 1, dt=FP32), net.fill("frequencies", d // 2, dt=FP32))
        cos, sin = (
            net.node("copy", [net.pointwise(fn, angles)], [TensorType((s, d), FP32)], fn="repeat")[0]
            for fn in ("cos", "sin")
        )
        net.exit()
        return cos, sin

    def rotate(self, x: int) -> int:
        """Rotary positions in fp32 over pairs of neighbors of [b, h, s, d]."""
        net = self.net
        b, h, s, d = net.shape(x)
        pairs = net.reshape(x, b, h, s, d // 2, 2)
        real, imag = net.slice(pairs, b, h, s, d // 2), net.slice(pairs, b, h, s, d // 2)
        turned = net.cat((net.pointwise("neg", imag), real), -1, shape=(b, h, s, d))
        left = net.mul(net.cast(x, FP32), self.cos)
        return net.cast(net.add(left, net.mul(net.cast(turned, FP32), self.sin)), net.dt)

    def qkv(self, x: int, names: tuple[str, str, str], norms: tuple[str, str]) -> list[int]:
        net, c = self.net, self.c
        b, s, _ = net.shape(x)
        out = []
        for i, name in enumerate(names):
            y = net.reshape(net.linear(x, c.hidden, name, bias=True), b, s, c.heads, c.d)
            if c.rotary and i < 2:
                y = net.rms_norm(y, norms[i])
            out.append(net.permute(y, b, c.heads, s, c.d))
        return out

    def doubles(self, x: int, text: int) -> tuple[int, int]:
        """Blocks with separate weights for text and image; the last of SD3 gives no text."""
        net, c = self.net, self.c
        last_differs = not c.single
        with net.repeat(c.double - last_differs, "transformer_blocks"):
            inner_x, inner_text = net.carry(x), net.carry(text)
            x, text = self.double(inner_x, inner_text, last=False)
            net.close_carry(inner_x, x)
            net.close_carry(inner_text, text)
        if last_differs:
            net.enter(f"transformer_blocks.{c.double - 1}")
            x, text = self.double(x, text, last=True)
            net.exit()
        return x, text

    def double(self, x: int, text: int, *, last: bool) -> tuple[int, int]:
        net, c, cond = self.net, self.c, self.cond
        m = modulation(net, cond, c.hidden, 6, "norm1.linear")
        t = modulation(net, cond, c.hidden, 2 if last else 6, "norm1_context.linear")
        image = self.qkv(
            modulated(net, x, m[0], m[1], "norm1.norm"),
            ("attn.to_q", "attn.to_k", "attn.to_v"),
            ("attn.norm_q", "attn.norm_k"),
        )
        words = self.qkv(
            modulated(net, text, t[0], t[1], "norm1_context.norm"),
            ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
            ("attn.norm_added_q", "attn.norm_added_k"),
        )
        order = (words, image) if c.rotary else (image, words)
        q, k, v = (net.cat(pair, 2) for pair in zip(*order, strict=True))
        if c.rotary:
            q, k = self.rotate(q), self.rotate(k)
        both = net.unheads(net.attention(q, k, v, causal=False))
        b, s, _ = net.shape(x)
        from_image, from_text = net.slice(both, b, s, c.hidden), net.slice(both, b, net.shape(text)[1], c.hidden)
        x = self.finish(x, net.linear(from_image, c.hidden, "attn.to_out.0", bias=True), m[2:], "norm2", "ff")
        if not last:
            text = self.finish(
                text,
                net.linear(from_text, c.hidden, "attn.to_add_out", bias=True),
                t[2:],
                "norm2_context",
                "ff_context",
            )
        return x, text

    def finish(self, x: int, attended: int, m: tuple[int, ...], norm: str, ff: str) -> int:
        """Gate the attention in, then a modulated feed-forward."""
        net, hidden = self.net, self.c.hidden
        x = net.add(x, net.mul(m[0], attended))
        y = modulated(net, x, m[1], m[2], norm)
        y = net.linear(
            net.pointwise("gelu", net.linear(y, 4 * hidden, f"{ff}.net.0.proj", bias=True)),
            hidden,
            f"{ff}.net.2",
            bias=True,
        )
        return net.add(x, net.mul(m[3], y))

    def singles(self, x: int, text: int) -> int:
        """Blocks over text and image as one sequence, attention and feed-forward side by side."""
        net, c = self.net, self.c
        b, s, _ = net.shape(x)
        x = net.cat((text, x), 1)
        with net.repeat(c.single, "single_transformer_blocks"):
            inner = net.carry(x)
            shift, scale, gate = modulation(net, self.cond, c.hidden, 3, "norm.linear")
            y = modulated(net, inner, shift, scale, "norm.norm")
            wide = net.pointwise("gelu", net.linear(y, 4 * c.hidden, "proj_mlp", bias=True))
            q, k, v = self.qkv(y, ("attn.to_q", "attn.to_k", "attn.to_v"), ("attn.norm_q", "attn.norm_k"))
            y = net.unheads(net.attention(self.rotate(q), self.rotate(k), v, causal=False))
            y = net.linear(net.cat((y, wide), -1), c.hidden, "proj_out", bias=True)
            x = net.add(inner, net.mul(gate, y))
            net.close_carry(inner, x)
        return net.slice(x, b, s, c.hidden)


def _joint(c: Joint, r: Request) -> Graph:
    r.multiple_of("image", 16, "the latent is an eighth, in patches of 2")
    if c.grid:
        r.at_most("image", 16 * c.grid, "pos_embed")
    return _JointWriter(c, r).graph()


_SD3 = Joint(double=24, single=0, hidden=1536, heads=24, channels=64, text=4096, pooled=2048, rotary=False, grid=192)
_FLUX = Joint(
    double=19, single=38, hidden=3072, heads=24, channels=64, text=4096, pooled=768, rotary=True, guidance=True
)
register(
    ModelCard(
        "sd3-medium",
        "Stable Diffusion 3 medium MMDiT",
        "diffusion",
        2_028_328_000,
        "stabilityai/stable-diffusion-3-medium-diffusers transformer/config.json",
        {"seq": 333, "image": 1024},
    ),
    lambda request: _joint(_SD3, request),
)
register(
    ModelCard(
        "flux-dev",
        "FLUX.1 dev",
        "diffusion",
        11_901_408_320,
        "black-forest-labs/FLUX.1-dev transformer/config.json",
        {"seq": 512, "image": 1024},
    ),
    lambda request: _joint(_FLUX, request),
)
