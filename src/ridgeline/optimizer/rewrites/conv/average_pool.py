"""The mean of a convolution's neighbors is a convolution with wider taps and longer steps: no image in between.

The taps are the old ones blurred by the window: 3×3 taps and a window of 4×4 are 36 products a pixel where they were
16 · 9. Products are as accurate as float32, so that it does not matter what cuDNN would have made of either.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ridgeline.engine.autotune import Contest, may_time, prepared
from ridgeline.kernels.convolution import config
from ridgeline.kernels.convolution.op import CONVOLUTION, Sizes, planned
from ridgeline.kernels.convolution.reference import convolved
from ridgeline.kernels.tensorfloat import convolutions_round
from ridgeline.optimizer.rewrites.context import Scene
from ridgeline.optimizer.rewrites.conv.read import (
    CONVOLUTIONS,
    MOST_KINDS,
    Ints,
    convolutions,
    ints,
    num_kinds,
    settings_of,
)
from ridgeline.optimizer.rewrites.op_names import Call, call
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite

LEAST_ELEMENTS = 1 << 22
"""Of the image in between: below, laying out the taps costs what is saved."""
CONTEST = Contest()
Way = Callable[..., Tensor]
_decided: dict[Any, Way] = {}
_POOLS: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_active_modes = torch._C._len_torch_dispatch_stack


def averaged_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, padding: Ints, window: Ints, step: Ints
) -> Tensor:
    """A convolution whose result is averaged over windows; one opaque op to tracers."""
    if type(x) is Tensor and not _active_modes():
        return _averaged(x, weight, bias, padding, window, step)
    return torch.ops.ridgeline_optimizer.averaged_convolution(x, weight, bias, padding, window, step)


def _averaged(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Ints, window: Ints, step: Ints) -> Tensor:
    given = (x, weight, bias, padding, window, step)
    return _raced(*given) if x.is_cuda else at_once(*given)


def _raced(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Ints, window: Ints, step: Ints) -> Tensor:
    """By the way that won; once that is known, ways are not laid out again."""
    key = (x.shape, weight.shape, bias is None, tuple(padding), tuple(window), tuple(step), x.device)
    given = (x, weight, bias, padding, window, step)
    decided = _decided.get(key)
    if decided is not None:
        return decided(*given)
    tiles = _tiles(*given)
    ways: dict[str, Way] = {"apart": _apart} | {str(tile): partial(_ours, tile) for tile in tiles}
    if key not in CONTEST.won and may_time(x.device):
        prepared(partial(_plan, tile, *given) for tile in tiles)
    found = CONTEST.run(key, {name: partial(way, *given) for name, way in ways.items()}, x.device)
    won = CONTEST.won.get(key)
    if won in ways:
        _decided[key] = ways[won]
    return found


def wider(weight: Tensor, window: Ints) -> Tensor:
    """Taps blurred by a window: what a tap adds to a mean it adds from every place of the window."""
    edges = [each for size in reversed(window) for each in (size - 1, size - 1)]
    return _POOLS[len(window)](F.pad(weight, edges), list(window), 1)  # type: ignore[no-any-return]


def at_once(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Ints, window: Ints, step: Ints) -> Tensor:
    """One convolution in PyTorch."""
    ones, zeros = [1] * len(window), [0] * len(window)
    return convolved(x, wider(weight, window), bias, step, padding, ones, zeros, 1, False)


def _apart(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Ints, window: Ints, step: Ints) -> Tensor:
    """The convolution, then the mean, each the fastest way it is known."""
    from ridgeline.optimizer.rewrites.conv import (
        elementwise_epilogue as chains,  # rewrites run in the order of their import: behind this
    )
    from ridgeline.optimizer.rewrites.rows import (
        pool_cumsum as windows,  # rewrites run in the order of their import: behind this
    )

    ones, zeros = [1] * len(window), [0] * len(window)
    between = chains.chained_convolution(x, weight, bias, None, ones, padding, ones, zeros, 1, False, "")
    return windows.raced_pool(between, window, step, zeros, ones, True)


def _tiles(x: Tensor, weight: Tensor, bias: Any, padding: Ints, window: Ints, step: Ints) -> list[config.Tile]:
    sizes = _sizes(x, weight, padding, window, step)
    found = config.tiles(sizes.outputs, sizes.phase_pixels, False, sizes.num_terms)
    fitting = [tile for tile in found if tile.pixels * tile.channels <= config.MOST_EXACT]
    return [replace(tile, rounding="exact") for tile in fitting]


def _sizes(x: Tensor, weight: Tensor, padding: Ints, window: Ints, step: Ints) -> Sizes:
    ones, zeros = [1] * len(window), [0] * len(window)
    taps = [size + more - 1 for size, more in zip(weight.shape[2:], window, strict=True)]
    return Sizes(x, weight.new_empty(*weight.shape[:2], *taps), step, padding, ones, zeros, 1, False)


def _plan(tile: config.Tile, x: Tensor, weight: Tensor, bias: Tensor | None, padding: Ints, window: Ints,
          step: Ints) -> Any:  # fmt: skip
    ones, zeros = [1] * len(window), [0] * len(window)
    wide = wider(weight, window)
    return wide, planned(x, wide, bias, None, step, padding, ones, zeros, 1, False, "", tile=tile)


def _ours(tile: config.Tile, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    wide, plan = _plan(tile, x, weight, bias, *rest)
    return plan(x, wide, bias, None)  # type: ignore[no-any-return]


_op = torch.library.custom_op("ridgeline_optimizer::averaged_convolution", _averaged, mutates_args=())


@_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Ints, window: Ints, step: Ints) -> Tensor:
    return x.new_empty(_sizes(x, weight, padding, window, step).shape)


@rewrite(
    "averaged-convolution",
    summary="a float32 convolution averaged over windows becomes one with wider taps and longer steps, where faster",
    modes=(INFERENCE,),
    worth=Worth(eager=2.0, compiled=2.0, basis="a quarter of the products and no image between; by a race"),
    exact="reordered",
    needs_kernels=True,
)
def averaged_convolutions(scene: Scene) -> list[Match]:
    if scene.training or scene.autocast or not convolutions_round() or not torch.backends.cudnn.enabled:
        return []
    if num_kinds(scene, convolutions(scene)) > MOST_KINDS:
        return []
    return [match for node in scene.nodes if (match := _put(scene, call(node))) is not None]


def _put(scene: Scene, read: Call | None) -> Match | None:
    layer = _layer(scene, read)
    sizes = None if layer is None or read is None else _steps(layer, read)
    if read is None or layer is None or sizes is None:
        return None
    leaves = (layer["input"], layer["weight"], layer.get("bias"))
    x, weight, bias = (scene.value(leaf) for leaf in leaves)
    padding, window, step = sizes
    ones, zeros = [1] * len(window), [0] * len(window)
    refused = CONVOLUTION.support(x, wider(weight, window), bias, None, step, padding, ones, zeros, 1, False, "")
    if refused is not None or not scene.unchanged(leaves, (layer.node, read.node), read.node):
        return None
    new = scene.emit(read.node, averaged_convolution, *leaves, padding, window, step)
    if not scene.replace(read.node, new):
        return None
    scene.discard(read.node)
    return scene.match(new, f"{layer.op} {tuple(x.shape)}, mean of {math.prod(window)}")


def _steps(layer: Call, read: Call) -> tuple[Ints, Ints, Ints] | None:
    """(padding, window, step) of a plain convolution that is averaged over windows within its result."""
    settings, num = settings_of(layer), CONVOLUTIONS[layer.op]
    window, padding = ints(read.get("kernel_size"), num), ints(read.get("padding", 0), num)
    step = ints(read.get("stride") or window, num)
    if settings is None or window is None or step is None or padding is None or any(padding):
        return None
    if read.get("ceil_mode", False) or read.get("divisor_override") is not None:
        return None
    plain = settings[0] == settings[2] == [1] * num and settings[4] == 1 and not settings[5]
    return (settings[1], window, step) if plain else None


def _layer(scene: Scene, read: Call | None) -> Call | None:
    """The convolution of plain float32 images that a mean over windows is taken of, if nobody else reads it."""
    layer = call(read["input"]) if read is not None and read.op == "avg_pool" else None
    if layer is None or layer.op not in CONVOLUTIONS or len(layer.node.users) != 1:
        return None
    x, out = scene.tensor(layer["input"]), scene.tensor(layer.node)
    if x is None or out is None or not isinstance(layer["weight"], fx.Node) or x.dim() != CONVOLUTIONS[layer.op] + 2:
        return None
    plain = x.is_contiguous() and out.is_contiguous() and x.dtype == torch.float32
    return layer if plain and out.numel() >= LEAST_ELEMENTS else None
