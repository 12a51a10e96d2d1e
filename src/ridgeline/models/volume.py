"""Networks of medical segmentation: the 3D U-Net of MLPerf and nnU-Net in two and three dims."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.graph import Graph, TensorType
from ridgeline.models.card import ModelCard, Request, register
from ridgeline.models.net import INT64, Net


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """A U-Net of ``rank`` dims: widths from the finest level down, two convolutions a level."""

    rank: int
    widths: tuple[int, ...]
    channels: int
    classes: int
    act: str = "relu"


def _block(net: Net, x: int, o: int, name: str, c: Levels, *, stride: int = 1) -> int:
    """Convolution, instance norm, activation; instance norm is a group norm with a group for each channel."""
    y = net.group_norm(net.conv(x, o, 3, f"{name}.conv", stride=stride), o, f"{name}.norm")
    return net.inplace(c.act, y)


def _pair(net: Net, x: int, o: int, name: str, c: Levels, *, stride: int = 1) -> int:
    return _block(net, _block(net, x, o, f"{name}.0", c, stride=stride), o, f"{name}.1", c)


def _unet(c: Levels, r: Request) -> Graph:
    r.multiple_of("image", 2 ** (len(c.widths) - 1), "every level halves the resolution")
    net = Net(r.card.name, r.mode, r.precision, batch=r.batch, image=r.image)
    x = net.input("volume", net.type(r.batch, c.channels, *(r.image,) * c.rank))
    skips = list[int]()
    for i, width in enumerate(c.widths):
        x = _pair(net, x, width, f"down.{i}", c, stride=2 if i else 1)
        skips.append(x)
    for i in reversed(range(len(c.widths) - 1)):
        up = net.conv(x, c.widths[i], 2, f"up.{i}.transp", stride=2, padding=0, transposed=True)
        x = _pair(net, net.cat((up, skips[i]), 1), c.widths[i], f"up.{i}", c)
    # A class for every voxel, or in training the cross-entropy (a dice term beside it costs next to nothing)
    logits = net.conv(x, c.classes, 1, "head", bias=True)
    if not net.train:
        return net.finish([logits])
    shape, voxels = net.shape(logits), net.values[logits].type.numel // c.classes
    flat = net.contiguous(net.permute(logits, shape[0], *shape[2:], c.classes))
    labels = net.input("labels", TensorType((voxels,), INT64))
    return net.finish([net.cross_entropy(net.reshape(flat, voxels, c.classes), labels)], frees=False)


def _add(name: str, title: str, num_params: int, source: str, image: int, config: Levels) -> None:
    register(
        ModelCard(name, title, "segmentation", num_params, source, {"image": image}),
        lambda request: _unet(config, request),
    )


_MLPERF = "mlcommons/training image_segmentation, layers counted"
_NNUNET = "NVIDIA/DeepLearningExamples PyTorch/Segmentation/nnUNet, layers counted"
_add("unet3d", "3D U-Net on KiTS19", 31_189_443, _MLPERF, 128,
     Levels(rank=3, widths=(32, 64, 128, 256, 320, 320), channels=1, classes=3))  # fmt: skip
_add("nnunet-2d", "nnU-Net, two dims", 20_612_100, _NNUNET, 192,
     Levels(rank=2, widths=(32, 64, 128, 256, 512, 512), channels=4, classes=4, act="leaky_relu"))  # fmt: skip
_add("nnunet-3d", "nnU-Net, three dims", 31_192_068, _NNUNET, 128,
     Levels(rank=3, widths=(32, 64, 128, 256, 320, 320), channels=4, classes=4, act="leaky_relu"))  # fmt: skip
