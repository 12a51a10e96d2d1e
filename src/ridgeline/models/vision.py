"""Image classifiers and their relatives: ViT, DeiT, Swin, ConvNeXt, ResNet, EfficientNet and CLIP."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ridgeline.graph import Graph, TensorType
from ridgeline.models.card import ModelCard, Request, register
from ridgeline.models.encoder import self_attention
from ridgeline.models.net import INT64, Net


def classify(net: Net, logits: int) -> Graph:
    """The logits, or in training the cross-entropy against labels."""
    if not net.train:
        return net.finish([logits])
    batch = net.shape(logits)[0]
    return net.finish([net.cross_entropy(logits, net.input("labels", TensorType((batch,), INT64)))], frees=False)


def picture(net: Net, r: Request, channels: int = 3) -> int:
    return net.input("pixel_values", net.type(r.batch, channels, r.image, r.image))


def start(r: Request) -> Net:
    return Net(r.card.name, r.mode, r.precision, batch=r.batch, image=r.image)


# Vision transformers.


@dataclass(frozen=True, slots=True, kw_only=True)
class Vit:
    layers: int
    hidden: int
    heads: int
    patch: int = 16
    classes: int = 1000


def fused_attention(net: Net, x: int, heads: int) -> int:
    """One projection for q, k and v, attention, and the output projection."""
    b, tokens, width = net.shape(x)
    d = width // heads
    both = net.reshape(net.linear(x, 3 * width, "qkv", bias=True), b, tokens, 3, heads, d)
    q, k, v = net.unbind(net.permute(both, 3, b, heads, tokens, d))
    return net.linear(net.unheads(net.attention(q, k, v, causal=False)), width, "proj", bias=True)


def mlp(net: Net, x: int, hidden: int, act: str = "gelu") -> int:
    width = net.shape(x)[-1]
    return net.linear(net.pointwise(act, net.linear(x, hidden, "fc1", bias=True)), width, "fc2", bias=True)


def vit_block(net: Net, x: int, heads: int) -> int:
    """A pre-norm block with a fused qkv projection."""
    y = net.layer_norm(x, "norm1")
    net.enter("attn")
    y = fused_attention(net, y, heads)
    net.exit()
    x = net.add(x, y)
    y = net.layer_norm(x, "norm2")
    net.enter("mlp")
    y = mlp(net, y, 4 * net.shape(x)[-1])
    net.exit()
    return net.add(x, y)


def patches(net: Net, x: int, hidden: int, patch: int, name: str, *, bias: bool = True) -> int:
    """Non-overlapping patches as a sequence [b, tokens, hidden]."""
    x = net.conv(x, hidden, patch, name, stride=patch, padding=0, bias=bias)
    b, _, *grid = net.shape(x)
    tokens = grid[0] * grid[1]
    return net.permute(net.reshape(x, b, hidden, tokens), b, tokens, hidden)


def with_class_token(net: Net, x: int, name: str, hidden: int) -> int:
    b = net.shape(x)[0]
    return net.cat((net.expand_view(net.weight(name, 1, 1, hidden), b, 1, hidden), x), 1)


def _vit(c: Vit, r: Request) -> Graph:
    r.multiple_of("image", c.patch, "patch_embed.proj takes whole patches")
    net = start(r)
    x = patches(net, picture(net, r), c.hidden, c.patch, "patch_embed.proj")
    x = with_class_token(net, x, "cls_token", c.hidden)
    x = net.add(x, net.weight("pos_embed", 1, net.shape(x)[1], c.hidden))
    with net.repeat(c.layers, "blocks"):
        inner = net.carry(x)
        x = vit_block(net, inner, c.heads)
        net.close_carry(inner, x)
    x = net.slice(net.layer_norm(x, "norm"), r.batch, c.hidden)
    return classify(net, net.linear(x, c.classes, "head", bias=True))


def _add_vit(name: str, title: str, num_params: int, source: str, config: Vit) -> None:
    register(
        ModelCard(name, title, "vision", num_params, source, {"image": 224}), lambda request: _vit(config, request)
    )


_add_vit("vit-b16", "ViT-B/16", 86_567_656, "timm vit_base_patch16_224", Vit(layers=12, hidden=768, heads=12))
_add_vit("vit-l16", "ViT-L/16", 304_326_632, "timm vit_large_patch16_224", Vit(layers=24, hidden=1024, heads=16))
_add_vit("deit-s16", "DeiT-S/16", 22_050_664, "timm deit_small_patch16_224", Vit(layers=12, hidden=384, heads=6))


# Swin.


def _swin(r: Request) -> Graph:
    dims, depths, heads, window = (128, 256, 512, 1024), (2, 2, 18, 2), (4, 8, 16, 32), 7
    r.multiple_of("image", 32, "four stages halve the resolution of 4-pixel patches")
    net = start(r)
    x = net.conv(picture(net, r), dims[0], 4, "patch_embed.proj", stride=4, padding=0, bias=True)
    b, _, side, _ = net.shape(x)
    x = net.layer_norm(net.contiguous(net.permute(x, b, side, side, dims[0])), "patch_embed.norm")
    for i, (dim, depth, num) in enumerate(zip(dims, depths, heads, strict=True)):
        net.enter(f"layers.{i}")
        if i:
            side //= 2
            x = _merge(net, x, side, dim)
        with net.repeat(depth // 2, "blocks"):
            inner = net.carry(x)
            x = _swin_block(net, inner, num, min(window, side), shifted=False)
            x = _swin_block(net, x, num, min(window, side), shifted=side > window)
            net.close_carry(inner, x)
        net.exit()
    x = net.reduce("mean", net.layer_norm(x, "norm"), (1, 2))
    return classify(net, net.linear(x, 1000, "head.fc", bias=True))


def _merge(net: Net, x: int, side: int, dim: int) -> int:
    """Each 2×2 neighborhood becomes one token of twice the width."""
    b = net.shape(x)[0]
    net.enter("downsample")
    x = net.contiguous(net.permute(net.reshape(x, b, side, 2, side, 2, dim // 2), b, side, side, 2, 2, dim // 2))
    x = net.linear(net.layer_norm(net.reshape(x, b, side, side, 2 * dim), "norm"), dim, "reduction")
    net.exit()
    return x


def _swin_block(net: Net, x: int, heads: int, window: int, *, shifted: bool) -> int:
    y = net.layer_norm(x, "norm1")
    net.enter("attn")
    y = _window_attention(net, y, heads, window, shifted=shifted)
    net.exit()
    x = net.add(x, y)
    y = net.layer_norm(x, "norm2")
    net.enter("mlp")
    y = mlp(net, y, 4 * net.shape(x)[-1])
    net.exit()
    return net.add(x, y)


def _window_attention(net: Net, x: int, heads: int, window: int, *, shifted: bool) -> int:
    b, side, _, c = net.shape(x)
    if shifted:
        x = net.node("copy", [x], [net.type(b, side, side, c)], fn="roll")[0]
    whole = -(-side // window) * window
    x = net.pad(x, (b, whole, whole, c))  # called, and copying, even where it adds nothing
    grid, area = whole // window, window * window
    x = net.contiguous(net.permute(net.reshape(x, b, grid, window, grid, window, c), b, grid, grid, window, window, c))
    y = _biased_attention(net, net.reshape(x, b * grid * grid, area, c), heads, window, grid if shifted else 0)
    y = net.permute(net.reshape(y, b, grid, grid, window, window, c), b, grid, window, grid, window, c)
    y = net.reshape(net.contiguous(y), b, whole, whole, c)
    if whole != side:
        y = net.contiguous(net.slice(y, b, side, side, c), transposed=False)
    return net.node("copy", [y], [net.type(b, side, side, c)], fn="roll")[0] if shifted else y


def _biased_attention(net: Net, x: int, heads: int, window: int, grid: int) -> int:
    """Attention inside windows, op by op: a learned bias for every offset, and with ``grid`` a mask between regions."""
    rows, area, width = net.shape(x)
    d = width // heads
    q, k, v = net.split(net.linear(x, 3 * width, "qkv", bias=True), (width,) * 3)
    q = net.contiguous(net.pointwise("mul", net.heads(q, heads, d), scalars=1))
    scores = net.bmm(q, net.contiguous(net.heads(k, heads, d)), trans_b=True)
    scores = net.add(scores, _window_bias(net, heads, window))
    if grid:
        mask = net.reshape(net.buffer("attn_mask", grid * grid, area, area), 1, grid * grid, 1, area, area)
        scores = net.add(net.reshape(scores, rows // grid**2, grid**2, heads, area, area), mask)
        scores = net.reshape(scores, rows, heads, area, area)
    y = net.bmm(net.softmax(scores), net.contiguous(net.heads(v, heads, d)))
    y = net.contiguous(net.permute(y, rows, area, heads, d))
    return net.linear(net.reshape(y, rows, area, width), width, "proj", bias=True)


def _window_bias(net: Net, heads: int, window: int) -> int:
    area = window * window
    table = net.weight("relative_position_bias_table", (2 * window - 1) ** 2, heads)
    index = net.buffer("relative_position_index", area * area, dt=INT64)
    bias = net.gather("index", [table, index], area * area, heads)
    bias = net.contiguous(net.permute(net.reshape(bias, area, area, heads), heads, area, area))
    return net.reshape(bias, 1, heads, area, area)


register(
    ModelCard("swin-b", "Swin-B", "vision", 87_768_224, "timm swin_base_patch4_window7_224", {"image": 224}), _swin
)


# ConvNeXt.


def _norm2d(net: Net, x: int, name: str) -> int:
    b, c, h, w = net.shape(x)
    y = net.layer_norm(net.contiguous(net.permute(x, b, h, w, c)), name)
    return net.permute(y, b, c, h, w)


def _convnext(r: Request) -> Graph:
    dims, depths = (128, 256, 512, 1024), (3, 3, 27, 3)
    r.multiple_of("image", 32, "a stem of 4 and three halvings")
    net = start(r)
    x = _norm2d(net, net.conv(picture(net, r), dims[0], 4, "stem.0", stride=4, padding=0, bias=True), "stem.1")
    for i, (dim, depth) in enumerate(zip(dims, depths, strict=True)):
        net.enter(f"stages.{i}")
        if i:
            x = net.conv(_norm2d(net, x, "downsample.0"), dim, 2, "downsample.1", stride=2, padding=0, bias=True)
        with net.repeat(depth, "blocks"):
            inner = net.carry(x)
            b, c, h, w = net.shape(inner)
            y = net.conv(inner, c, 7, "conv_dw", groups=c, bias=True)
            y = net.layer_norm(net.contiguous(net.permute(y, b, h, w, c)), "norm")
            net.enter("mlp")
            y = mlp(net, y, 4 * c)
            net.exit()
            y = net.mul(net.permute(y, b, c, h, w), net.reshape(net.weight("gamma", c), 1, c, 1, 1))
            x = net.add(y, inner)
            net.close_carry(inner, x)
        net.exit()
    x = net.layer_norm(net.reduce("mean", x, (2, 3)), "head.norm")
    return classify(net, net.linear(x, 1000, "head.fc", bias=True))


register(ModelCard("convnext-b", "ConvNeXt-B", "vision", 88_591_464, "timm convnext_base", {"image": 224}), _convnext)


# ResNet.


def conv_bn(
    net: Net,
    x: int,
    o: int,
    kernel: int,
    conv: str,
    norm: str,
    *,
    stride: int = 1,
    groups: int = 1,
    padding: int | None = None,
    act: str | None = "relu",
) -> int:
    x = net.batch_norm(net.conv(x, o, kernel, conv, stride=stride, groups=groups, padding=padding), norm)
    return net.inplace(act, x) if act else x


def bottleneck(
    net: Net, x: int, width: int, *, stride: int = 1, project: bool = False, groups: int = 1, inner: int | None = None,
    squeeze: int = 0,
) -> int:  # fmt: skip
    """1×1, 3×3, 1×1 with a shortcut; ``inner`` is the width of the 3×3 where it differs, ``squeeze`` the reduction of a
    gate over channels."""
    y = conv_bn(net, x, inner or width, 1, "conv1", "bn1")
    y = conv_bn(net, y, inner or width, 3, "conv2", "bn2", stride=stride, groups=groups)
    y = conv_bn(net, y, 4 * width, 1, "conv3", "bn3", act=None)
    if squeeze:
        y = _squeeze(net, y, 4 * width // squeeze, act="relu", names=("fc1", "fc2"))
    if project:
        x = conv_bn(net, x, 4 * width, 1, "downsample.0", "downsample.1", stride=stride, act=None)
    return net.inplace("relu", net.inplace("add", y, x))


def resnet_stages(
    net: Net, x: int, depths: tuple[int, ...], *, groups: int = 1, widen: int = 1, squeeze: int = 0
) -> list[int]:
    """Stem and the four stages; the feature maps at strides 4, 8, 16 and 32. ResNeXt has groups of wider 3×3."""
    x = conv_bn(net, x, 64, 7, "conv1", "bn1", stride=2)
    x = net.pool("max", x, 3, 2, 1)
    maps = []
    for i, depth in enumerate(depths):
        width = 64 * 2**i
        net.enter(f"layer{i + 1}.0")
        like = {"groups": groups, "inner": width * widen, "squeeze": squeeze}
        x = bottleneck(net, x, width, stride=2 if i else 1, project=True, **like)
        net.exit()
        with net.repeat(depth - 1, f"layer{i + 1}"):
            inner = net.carry(x)
            x = bottleneck(net, inner, width, **like)
            net.close_carry(inner, x)
        maps.append(x)
    return maps


def _resnet(depths: tuple[int, ...], r: Request, *, groups: int = 1, widen: int = 1, squeeze: int = 0) -> Graph:
    net = start(r)
    x = resnet_stages(net, picture(net, r), depths, groups=groups, widen=widen, squeeze=squeeze)[-1]
    x = net.reduce("mean", x, (2, 3))
    return classify(net, net.linear(x, 1000, "fc", bias=True))


register(
    ModelCard("resnet50", "ResNet-50", "vision", 25_557_032, "timm resnet50", {"image": 224}),
    lambda request: _resnet((3, 4, 6, 3), request),
)
register(
    ModelCard("resnet152", "ResNet-152", "vision", 60_192_808, "timm resnet152", {"image": 224}),
    lambda request: _resnet((3, 8, 36, 3), request),
)
register(
    ModelCard("resnext101-32x4d", "ResNeXt-101 32x4d", "vision", 44_177_704, "timm resnext101_32x4d", {"image": 224}),
    lambda request: _resnet((3, 4, 23, 3), request, groups=32, widen=2),
)
register(
    ModelCard("se-resnext101-32x4d", "SE-ResNeXt-101 32x4d", "vision", 48_955_416, "timm seresnext101_32x4d",
              {"image": 224}),
    lambda request: _resnet((3, 4, 23, 3), request, groups=32, widen=2, squeeze=16),
)  # fmt: skip


# EfficientNet.

_STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


def _inverted(net: Net, x: int, kernel: int, stride: int, factor: int, o: int, *, wide: bool) -> int:
    """Expand, depthwise, squeeze-and-excite, project."""
    c = net.shape(x)[1]
    y = conv_bn(net, x, c * factor, 1, "conv_pw", "bn1", act=None) if factor > 1 else x
    y = net.pointwise("silu", y) if factor > 1 else y
    y = conv_bn(
        net,
        y,
        c * factor,
        kernel,
        "conv_dw",
        "bn2" if factor > 1 else "bn1",
        stride=stride,
        groups=c * factor,
        act=None,
    )
    y = _squeeze(net, net.pointwise("silu", y), (c * factor if wide else c) // 4)
    y = conv_bn(net, y, o, 1, "conv_pwl", "bn3", act=None)
    return net.add(y, x) if stride == 1 and c == o else y


def _squeeze(
    net: Net, x: int, narrow: int, act: str = "silu", names: tuple[str, str] = ("conv_reduce", "conv_expand")
) -> int:
    """A gate over channels, made from their means."""
    c = net.shape(x)[1]
    net.enter("se")
    y = net.reduce("mean", x, (2, 3), keepdim=True)
    y = net.pointwise(act, net.conv(y, narrow, 1, names[0], bias=True))
    y = net.pointwise("sigmoid", net.conv(y, c, 1, names[1], bias=True))
    net.exit()
    return net.mul(x, y)


def _rounded(channels: float) -> int:
    """The nearest multiple of eight, never more than a tenth below."""
    near = max(8, int(channels + 4) // 8 * 8)
    return near if near >= 0.9 * channels else near + 8


def _efficientnet(r: Request, *, width: float = 1.0, depth: float = 1.0, wide: bool = False) -> Graph:
    """Stages widened and deepened together; ``wide`` squeezes the expanded channels instead of the block's input."""
    net = start(r)
    stem = conv_bn(net, picture(net, r), _rounded(32 * width), 3, "conv_stem", "bn1", stride=2, act=None)
    x = net.pointwise("silu", stem)
    for i, (blocks, kernel, stride, factor, o) in enumerate(_STAGES):
        for j in range(math.ceil(blocks * depth)):
            net.enter(f"blocks.{i}.{j}")
            x = _inverted(net, x, kernel, stride if j == 0 else 1, factor, _rounded(o * width), wide=wide)
            net.exit()
    x = net.pointwise("silu", conv_bn(net, x, _rounded(1280 * width), 1, "conv_head", "bn2", act=None))
    return classify(net, net.linear(net.reduce("mean", x, (2, 3)), 1000, "classifier", bias=True))


def _add_efficientnet(name: str, title: str, num_params: int, source: str, image: int, **scale: Any) -> None:
    register(
        ModelCard(name, title, "vision", num_params, source, {"image": image}),
        lambda request: _efficientnet(request, **scale),
    )


_add_efficientnet("efficientnet-b0", "EfficientNet-B0", 5_288_548, "timm efficientnet_b0", 224)
_add_efficientnet("efficientnet-b4", "EfficientNet-B4", 19_341_616, "timm efficientnet_b4", 380, width=1.4, depth=1.8)
_WIDE = "NVIDIA/DeepLearningExamples, efficientnet widese, layers counted"
_add_efficientnet("efficientnet-widese-b0", "EfficientNet-B0, wide squeeze", 8_423_848, _WIDE, 224, wide=True)
_add_efficientnet(
    "efficientnet-widese-b4", "EfficientNet-B4, wide squeeze", 34_927_246, _WIDE, 380, width=1.4, depth=1.8, wide=True
)


# CLIP.


def clip_layer(net: Net, x: int, heads: int, *, causal: bool, act: str = "quick_gelu") -> int:
    """A pre-norm layer of CLIP's towers."""
    hidden = net.shape(x)[-1]
    y = net.layer_norm(x, "layer_norm1")
    net.enter("self_attn")
    y = self_attention(net, y, heads, names=("q_proj", "k_proj", "v_proj"), causal=causal)
    y = net.linear(y, hidden, "out_proj", bias=True)
    net.exit()
    x = net.add(x, y)
    y = net.layer_norm(x, "layer_norm2")
    net.enter("mlp")
    y = net.linear(y, 4 * hidden, "fc1", bias=True)
    if act == "quick_gelu":
        y = net.mul(y, net.pointwise("sigmoid", net.pointwise("mul", y, scalars=1)))
    else:
        y = net.pointwise(act, y)
    y = net.linear(y, hidden, "fc2", bias=True)
    net.exit()
    return net.add(x, y)


def clip_tower(net: Net, x: int, layers: int, heads: int, *, causal: bool) -> int:
    with net.repeat(layers, "encoder.layers"):
        inner = net.carry(x)
        x = clip_layer(net, inner, heads, causal=causal)
        net.close_carry(inner, x)
    return x


def _clip_text(net: Net, r: Request) -> int:
    net.enter("text_model")
    tokens = net.input("input_ids", TensorType((r.batch, r.seq), INT64))
    x, _ = net.embedding(tokens, 49408, 768, "embeddings.token_embedding")
    places, _ = net.embedding(net.fill("arange", 1, r.seq, dt=INT64), 77, 768, "embeddings.position_embedding")
    x = clip_tower(net, net.add(x, places), 12, 12, causal=True)
    x = net.layer_norm(x, "final_layer_norm")
    last = net.node("reduce", [tokens], [TensorType((r.batch,), INT64)], fn="argmax", dims=(1,))[0]
    x = net.gather("index", [x, last], r.batch, 768)
    net.exit()
    return net.linear(x, 768, "text_projection")


def _unit(net: Net, x: int) -> int:
    return net.pointwise("div", x, net.reduce("norm", x, (-1,), keepdim=True))


def _clip(r: Request) -> Graph:
    r.multiple_of("image", 14, "vision_model.embeddings.patch_embedding takes whole patches")
    r.at_most("seq", 77, "text_model.embeddings.position_embedding.weight")
    net = Net(r.card.name, r.mode, r.precision, batch=r.batch, seq=r.seq, image=r.image)
    net.enter("vision_model")
    x = patches(net, picture(net, r), 1024, 14, "embeddings.patch_embedding", bias=False)
    x = with_class_token(net, x, "embeddings.class_embedding", 1024)
    places = net.weight("embeddings.position_embedding.weight", net.shape(x)[1], 1024)
    x = net.layer_norm(net.add(x, places), "pre_layrnorm")
    x = clip_tower(net, x, 24, 16, causal=False)
    x = net.layer_norm(net.slice(x, r.batch, 1024), "post_layernorm")
    net.exit()
    pictures, texts = _unit(net, net.linear(x, 768, "visual_projection")), _unit(net, _clip_text(net, r))
    logits = net.node(
        "matmul", [texts, pictures], [net.type(r.batch, r.batch)], b=1, m=r.batch, n=r.batch, k=768, trans_b=True
    )[0]
    logits = net.mul(logits, net.pointwise("exp", net.weight("logit_scale")))
    if not net.train:
        return net.finish([logits])
    labels = net.fill("arange", r.batch, dt=INT64)
    both = net.add(net.cross_entropy(logits, labels), net.cross_entropy(net.permute(logits, r.batch, r.batch), labels))
    return net.finish([net.pointwise("div", both, scalars=1)], frees=False)


register(
    ModelCard(
        "clip-vit-l14",
        "CLIP ViT-L/14",
        "multimodal",
        427_616_513,
        "openai/clip-vit-large-patch14 config.json",
        {"seq": 77, "image": 224},
    ),
    _clip,
)
