"""Detection and segmentation: DETR, RetinaNet, SegFormer and U-Net."""

from __future__ import annotations

from ridgeline.graph import Graph, Kind, TensorType
from ridgeline.models.card import ModelCard, Request, register
from ridgeline.models.encoder import self_attention
from ridgeline.models.net import FP32, INT64, Net
from ridgeline.models.vision import bottleneck, conv_bn, picture, start

# A ResNet whose batch norms are frozen: constants folded into a scale and a shift at every call.


def frozen_norm(net: Net, x: int, name: str) -> int:
    """x·scale + shift, both computed from buffers."""
    c = net.shape(x)[1]
    net.enter(name)
    weight, bias, mean, var = (
        net.value(net.type(c), Kind.BUFFER, count=net.repeats, name=f"{name}.{part}")
        for part in ("weight", "bias", "running_mean", "running_var")
    )
    scale = net.mul(weight, net.pointwise("rsqrt", net.pointwise("add", var, scalars=1)))
    shift = net.pointwise("sub", bias, net.mul(mean, scale))
    out = net.add(net.mul(x, net.reshape(scale, 1, c, 1, 1)), net.reshape(shift, 1, c, 1, 1))
    net.exit()
    return out


def _bottleneck(
    net: Net, x: int, width: int, *, stride: int = 1, project: bool = False, groups: int = 1, inner: int | None = None
) -> int:
    middle = inner or width
    y = net.inplace("relu", frozen_norm(net, net.conv(x, middle, 1, "conv1"), "bn1"))
    y = net.inplace("relu", frozen_norm(net, net.conv(y, middle, 3, "conv2", stride=stride, groups=groups), "bn2"))
    y = frozen_norm(net, net.conv(y, 4 * width, 1, "conv3"), "bn3")
    if project:
        x = frozen_norm(net, net.conv(x, 4 * width, 1, "downsample.0", stride=stride), "downsample.1")
    return net.inplace("relu", net.inplace("add", y, x))


def frozen_resnet(net: Net, x: int, depths: tuple[int, ...], *, groups: int = 1, widen: int = 1) -> list[int]:
    """Feature maps at strides 4, 8, 16 and 32; ResNeXt has groups of wider 3×3."""
    net.enter("backbone")
    x = net.inplace("relu", frozen_norm(net, net.conv(x, 64, 7, "conv1", stride=2), "bn1"))
    x = net.pool("max", x, 3, 2, 1)
    maps = []
    for i, depth in enumerate(depths):
        net.enter(f"layer{i + 1}.0")
        width = 64 * 2**i
        x = _bottleneck(net, x, width, stride=2 if i else 1, project=True, groups=groups, inner=width * widen)
        net.exit()
        with net.repeat(depth - 1, f"layer{i + 1}"):
            inner = net.carry(x)
            x = _bottleneck(net, inner, width, groups=groups, inner=width * widen)
            net.close_carry(inner, x)
        maps.append(x)
    net.exit()
    return maps


def feature_pyramid(net: Net, maps: list[int], width: int) -> list[int]:
    """Lateral 1×1 and output 3×3 convolutions, coarse maps added into finer ones."""
    net.enter("fpn")
    laterals = [net.conv(m, width, 1, f"inner_blocks.{i}", bias=True) for i, m in enumerate(maps)]
    for i in reversed(range(len(laterals) - 1)):
        laterals[i] = net.add(laterals[i], net.resize(laterals[i + 1], *net.shape(laterals[i])[2:]))
    out = [net.conv(m, width, 3, f"layer_blocks.{i}", bias=True) for i, m in enumerate(laterals)]
    net.exit()
    return out


def _retinanet(r: Request, *, classes: int = 91, groups: int = 1, widen: int = 1) -> Graph:
    r.multiple_of("image", 32, "the backbone's last stage has stride 32")
    net = start(r)
    maps = frozen_resnet(net, picture(net, r), (3, 4, 6, 3), groups=groups, widen=widen)
    levels = feature_pyramid(net, maps[1:], 256)
    levels.append(net.conv(levels[-1], 256, 3, "fpn.extra_blocks.p6", stride=2, bias=True))
    levels.append(net.conv(net.pointwise("relu", levels[-1]), 256, 3, "fpn.extra_blocks.p7", stride=2, bias=True))
    scores = _towers(net, levels, 9 * classes, "classification_head")
    boxes = _towers(net, levels, 9 * 4, "regression_head")
    if not net.train:
        return _detections(net, r, scores, boxes)
    wanted = net.input("target_scores", net.type(*net.shape(scores)))
    corners = net.input("target_boxes", net.type(*net.shape(boxes)))
    loss = net.node(
        "loss", [scores, wanted], [net.type()], fn="sigmoid_focal_loss", n=net.shape(scores)[1] * r.batch, c=classes
    )[0]
    return net.finish([net.add(loss, _l1(net, boxes, corners))], frees=False)


def _l1(net: Net, boxes: int, target: int) -> int:
    rows = net.values[boxes].type.numel // 4
    return net.node("loss", [boxes, target], [net.type()], fn="l1_loss", n=rows, c=4, reduction="mean")[0]


def _towers(net: Net, levels: list[int], o: int, name: str) -> int:
    """Four convolutions and a predictor, with one set of weights for every level; anchors side by side."""
    b = net.shape(levels[0])[0]
    net.enter(name)
    weights = [
        (net.weight(f"conv.{i}.weight", w, 256, 3, 3), net.weight(f"conv.{i}.bias", w))
        for i, w in enumerate((256,) * 4 + (o,))
    ]
    out = []
    for x in levels:
        for i, (weight, bias) in enumerate(weights):
            x = shared_conv(net, x, weight, bias)
            x = net.inplace("relu", x) if i < 4 else x
        h, w = net.shape(x)[2:]
        flat = net.contiguous(net.permute(x, b, h, w, o))
        out.append(net.reshape(flat, b, h * w * 9, o // 9))
    net.exit()
    return net.cat(out, 1)


def shared_conv(net: Net, x: int, weight: int, bias: int) -> int:
    """A 3×3 convolution with weights that other calls use too."""
    n, c, h, w = net.shape(x)
    o = net.shape(weight)[0]
    return net.node(
        "conv",
        [x, weight, bias],
        [net.type(n, o, h, w)],
        n=n,
        c=c,
        o=o,
        spatial=(h, w),
        kernel=(3, 3),
        stride=(1, 1),
        padding=(1, 1),
        dilation=(1, 1),
        groups=1,
        transposed=False,
        which="fwd",
        out_spatial=(h, w),
        bias=True,
    )[0]


def _detections(net: Net, r: Request, scores: int, boxes: int) -> Graph:
    """Scores through a sigmoid and the thousand best of each image."""
    b, anchors, classes = net.shape(scores)
    flat = net.reshape(net.pointwise("sigmoid", scores), b, anchors * classes)
    k = min(1000, anchors * classes)
    best, index = net.node("topk", [flat], [net.type(b, k), TensorType((b, k), INT64)], n=b, v=anchors * classes, k=k)
    picked = net.gather("gather", [boxes, net.pointwise("floor_divide", index, scalars=1)], b, k, 4)
    return net.finish([best, picked])


register(
    ModelCard(
        "retinanet-r50",
        "RetinaNet with ResNet-50 FPN",
        "detection",
        34_014_999,
        "torchvision retinanet_resnet50_fpn, COCO_V1 weights",
        {"image": 800},
    ),
    _retinanet,
)
register(
    ModelCard(
        "retinanet-x50",
        "RetinaNet with ResNeXt-50 FPN, 264 classes",
        "detection",
        37_060_652,
        "mlcommons/training single_stage_detector (OpenImages), layers counted",
        {"image": 800},
    ),
    lambda request: _retinanet(request, classes=264, groups=32, widen=2),
)


# SSD.


def _ssd(r: Request) -> Graph:
    """SSD300 on a ResNet-50 that stops after its third stage, whose stride is 1."""
    net = start(r)
    x = net.pool("max", conv_bn(net, picture(net, r), 64, 7, "conv1", "bn1", stride=2), 3, 2, 1)
    for i, depth in enumerate((3, 4, 6)):
        for j in range(depth):
            net.enter(f"layer{i + 1}.{j}")
            x = bottleneck(net, x, 64 * 2**i, stride=2 if i == 1 and j == 0 else 1, project=j == 0)
            net.exit()
    maps = [x]
    for i, (middle, o, stride, padding) in enumerate(
        ((256, 512, 2, 1), (256, 512, 2, 1), (128, 256, 2, 1), (128, 256, 1, 0), (128, 256, 1, 0))
    ):
        net.enter(f"additional_blocks.{i}")
        x = conv_bn(net, conv_bn(net, maps[-1], middle, 1, "0", "1"), o, 3, "3", "4", stride=stride, padding=padding)
        net.exit()
        maps.append(x)
    return _ssd_heads(net, r, maps)


def _ssd_heads(net: Net, r: Request, maps: list[int]) -> Graph:
    boxes, scores = list[int](), list[int]()
    for i, (x, anchors) in enumerate(zip(maps, (4, 6, 6, 6, 4, 4))):
        area = net.shape(x)[2] * net.shape(x)[3]
        for out, each, name in ((boxes, 4, "loc"), (scores, 81, "conf")):
            made = net.conv(x, anchors * each, 3, f"{name}.{i}", bias=True)
            out.append(net.reshape(made, r.batch, each, anchors * area))
    loc, conf = net.cat(boxes, 2), net.cat(scores, 2)
    if not net.train:
        return net.finish([loc, conf])
    rows = net.shape(conf)[2]
    flat = net.reshape(net.contiguous(net.permute(conf, r.batch, rows, 81)), r.batch * rows, 81)
    labels = net.input("labels", TensorType((r.batch * rows,), INT64))
    target = net.input("boxes", net.type(*net.shape(loc)))
    return net.finish([net.add(net.cross_entropy(flat, labels), _l1(net, loc, target))], frees=False)


register(
    ModelCard(
        "ssd300-r50", "SSD300 with ResNet-50", "detection", 22_894_902,
        "NVIDIA/DeepLearningExamples PyTorch/Detection/SSD, layers counted", {"image": 300},
    ),
    _ssd,
)  # fmt: skip


# DETR.


def _detr_attention(
    net: Net, x: int, places: int, heads: int, name: str, *, memory: int | None = None, memory_places: int | None = None
) -> int:
    """Positions are added to queries and keys, never to values."""
    hidden = net.shape(x)[-1]
    d = hidden // heads
    source = x if memory is None else memory
    net.enter(name)
    keyed = net.add(x, places)
    other = keyed if memory is None or memory_places is None else net.add(memory, memory_places)
    q = net.heads(net.linear(keyed, hidden, "q_proj", bias=True), heads, d)
    k = net.heads(net.linear(other, hidden, "k_proj", bias=True), heads, d)
    v = net.heads(net.linear(source, hidden, "v_proj", bias=True), heads, d)
    y = net.linear(net.unheads(net.attention(q, k, v, causal=False)), hidden, "out_proj", bias=True)
    net.exit()
    return net.layer_norm(net.add(x, y), f"{name}_layer_norm")


def _detr_feed_forward(net: Net, x: int, ffn: int) -> int:
    y = net.linear(net.pointwise("relu", net.linear(x, ffn, "fc1", bias=True)), net.shape(x)[-1], "fc2", bias=True)
    return net.layer_norm(net.add(x, y), "final_layer_norm")


def _detr(r: Request) -> Graph:
    hidden, heads, ffn, queries = 256, 8, 2048, 100
    r.multiple_of("image", 32, "the backbone's last stage has stride 32")
    net = start(r)
    x = frozen_resnet(net, picture(net, r), (3, 4, 6, 3))[-1]
    b, _, h, w = net.shape(x)
    rows = net.node(
        "scan", [net.fill("ones", b, h, w, dt=FP32)], [TensorType((b, h, w), FP32)], fn="cumsum", n=b * w, c=h
    )[0]
    angles = net.pointwise("div", net.reshape(rows, b, h, w, 1), net.fill("frequencies", hidden, dt=FP32))
    waves = net.cast(net.pointwise("sin", angles), net.dt)
    places = net.reshape(waves, b, h * w, hidden)
    x = net.conv(x, hidden, 1, "input_projection", bias=True)
    x = net.contiguous(net.permute(net.reshape(x, b, hidden, h * w), b, h * w, hidden))
    with net.repeat(6, "encoder.layers"):
        inner = net.carry(x)
        x = _detr_feed_forward(net, _detr_attention(net, inner, places, heads, "self_attn"), ffn)
        net.close_carry(inner, x)
    memory = net.reshape(x, b, h * w, hidden)
    asked = net.expand_view(net.weight("query_position_embeddings.weight", 1, queries, hidden), b, queries, hidden)
    y = net.fill("zeros", b, queries, hidden)
    with net.repeat(6, "decoder.layers"):
        inner = net.carry(y)
        y = _detr_attention(net, inner, asked, heads, "self_attn")
        y = _detr_attention(net, y, asked, heads, "encoder_attn", memory=memory, memory_places=places)
        y = _detr_feed_forward(net, y, ffn)
        net.close_carry(inner, y)
    y = net.layer_norm(y, "decoder.layernorm")
    classes = net.linear(y, 92, "class_labels_classifier", bias=True)
    for i in range(2):
        y = net.pointwise("relu", net.linear(y, 256, f"bbox_predictor.layers.{i}", bias=True))
    boxes = net.pointwise("sigmoid", net.linear(y, 4, "bbox_predictor.layers.2", bias=True))
    if not net.train:
        return net.finish([classes, boxes])
    labels = net.input("labels", TensorType((b * queries,), INT64))
    loss = net.cross_entropy(net.reshape(classes, b * queries, 92), labels)
    return net.finish([net.add(loss, _l1(net, boxes, net.input("target_boxes", net.type(b, queries, 4))))], frees=False)


register(
    ModelCard(
        "detr-r50",
        "DETR with ResNet-50",
        "detection",
        41_524_768,
        "facebook/detr-resnet-50 config.json",
        {"image": 800},
    ),
    _detr,
)


# SegFormer.


def _segformer_layer(net: Net, x: int, heads: int, shrink: int, side: int) -> int:
    b, s, c = net.shape(x)
    y = net.layer_norm(x, "layernorm_before")
    net.enter("attention")
    source = y
    if shrink > 1:
        image = net.reshape(net.permute(y, b, c, s), b, c, side, side)  # channels last: nothing moves
        image = net.conv(image, c, shrink, "sequence_reduction.sequence_reduction", stride=shrink, padding=0, bias=True)
        few = (side // shrink) ** 2
        source = net.layer_norm(net.permute(net.reshape(image, b, c, few), b, few, c), "sequence_reduction.layer_norm")
    y = self_attention(net, y, heads, names=("q_proj", "k_proj", "v_proj"), kv=source)
    x = net.add(net.linear(y, c, "o_proj", bias=True), x)
    net.exit()
    y = net.linear(net.layer_norm(x, "layernorm_after"), 4 * c, "mlp.fc1", bias=True)
    y = net.reshape(net.permute(y, b, 4 * c, s), b, 4 * c, side, side)
    y = net.conv(y, 4 * c, 3, "mlp.dwconv.dwconv", groups=4 * c, bias=True)
    y = net.pointwise("gelu", net.permute(net.reshape(y, b, 4 * c, s), b, s, 4 * c))
    return net.add(net.linear(y, c, "mlp.fc2", bias=True), x)


def _segformer(r: Request) -> Graph:
    widths, depths, heads, shrinks = (64, 128, 320, 512), (3, 6, 40, 3), (1, 2, 5, 8), (8, 4, 2, 1)
    r.multiple_of("image", 32, "stages at strides 4, 8, 16 and 32, shrunk to one grid")
    net = start(r)
    x, maps = picture(net, r), []
    for i, (c, depth) in enumerate(zip(widths, depths, strict=True)):
        net.enter(f"segformer.encoder.stages.{i}")
        x = net.conv(x, c, 3 if i else 7, "patch_embeddings.proj", stride=2 if i else 4, bias=True)
        b, _, side, _ = net.shape(x)
        s = side * side
        x = net.layer_norm(net.contiguous(net.permute(net.reshape(x, b, c, s), b, s, c)), "patch_embeddings.layer_norm")
        with net.repeat(depth, "blocks"):
            inner = net.carry(x)
            x = _segformer_layer(net, inner, heads[i], shrinks[i], side)
            net.close_carry(inner, x)
        x = net.contiguous(
            net.permute(net.reshape(net.layer_norm(x, "layer_norm"), b, side, side, c), b, c, side, side)
        )
        maps.append(x)
        net.exit()
    # Logits, or in training their per-pixel cross-entropy at four times the resolution
    logits = _segformer_head(net, maps)
    if not net.train:
        return net.finish([logits])
    b, c, h, w = net.shape(logits)
    wide = net.resize(logits, 4 * h, 4 * w, fn="upsample_bilinear2d")
    rows = b * 16 * h * w
    flat = net.reshape(net.contiguous(net.permute(wide, b, 4 * h, 4 * w, c)), rows, c)
    return net.finish([net.cross_entropy(flat, net.input("labels", TensorType((rows,), INT64)))], frees=False)


def _segformer_head(net: Net, maps: list[int]) -> int:
    """Every map to one width and the finest resolution, fused by a 1×1 convolution."""
    net.enter("decode_head")
    fine, same = net.shape(maps[0])[2:], []
    for i, m in enumerate(maps):
        b, c, h, w = net.shape(m)
        y = net.linear(
            net.permute(net.reshape(m, b, c, h * w), b, h * w, c), 768, f"linear_projections.{i}.proj", bias=True
        )
        y = net.reshape(net.permute(y, b, 768, h * w), b, 768, h, w)
        same.append(net.resize(y, *fine, fn="upsample_bilinear2d"))
    x = conv_bn(net, net.cat(same[::-1], 1), 768, 1, "linear_fuse", "batch_norm", act=None)
    x = net.conv(net.pointwise("relu", x), 150, 1, "classifier", bias=True)
    net.exit()
    return x


register(
    ModelCard(
        "segformer-b5",
        "SegFormer-B5",
        "segmentation",
        84_708_694,
        "nvidia/segformer-b5-finetuned-ade-640-640 config.json",
        {"image": 640},
    ),
    _segformer,
)


# U-Net.


def _double_conv(net: Net, x: int, o: int, name: str) -> int:
    net.enter(name)
    for i in (0, 3):
        x = conv_bn(net, x, o, 3, f"double_conv.{i}", f"double_conv.{i + 1}")
    net.exit()
    return x


def _unet(r: Request) -> Graph:
    r.multiple_of("image", 16, "four halvings")
    net = start(r)
    x = _double_conv(net, picture(net, r), 64, "inc")
    skips = []
    for i, o in enumerate((128, 256, 512, 1024)):
        skips.append(x)
        x = _double_conv(net, net.pool("max", x, 2, 2), o, f"down{i + 1}")
    for i, o in enumerate((512, 256, 128, 64)):
        x = net.conv(x, o, 2, f"up{i + 1}.up", stride=2, padding=0, bias=True, transposed=True)
        x = _double_conv(net, net.cat((skips.pop(), x), 1), o, f"up{i + 1}.conv")
    logits = net.conv(x, 2, 1, "outc.conv", bias=True)
    if not net.train:
        return net.finish([logits])
    b, c, h, w = net.shape(logits)
    flat = net.reshape(net.contiguous(net.permute(logits, b, h, w, c)), b * h * w, c)
    return net.finish([net.cross_entropy(flat, net.input("labels", TensorType((b * h * w,), INT64)))], frees=False)


register(
    ModelCard(
        "unet",
        "U-Net",
        "segmentation",
        31_037_698,
        "Ronneberger et al. 2015 with padding and batch norm, 3 channels, 2 classes",
        {"image": 512},
    ),
    _unet,
)
