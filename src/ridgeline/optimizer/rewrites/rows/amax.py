"""Largest and smallest elements along a dim that is not the last: our kernel where a race shows it to be faster."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, fx

from ridgeline.engine.autotune import Contest
from ridgeline.kernels.amax.op import AMAX, amax
from ridgeline.optimizer.rewrites.context import Scene
from ridgeline.optimizer.rewrites.op_names import Call, call
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite

LEAST_ELEMENTS = 1 << 22
CONTEST = Contest()
_active_modes = torch._C._len_torch_dispatch_stack
_KINDS = {
    "max": (True, False), "min": (False, False), "amax": (True, False), "amin": (False, False),
    "argmax": (True, True), "argmin": (False, True),
}  # fmt: skip


def raced_extreme(x: Tensor, dim: int, largest: bool, place: bool, keepdim: bool) -> Tensor:
    """An amax by the library or by our kernel; one opaque op to tracers."""
    if type(x) is Tensor and not _active_modes():
        return _raced(x, dim, largest, place, keepdim)
    return torch.ops.ridgeline_optimizer.raced_extreme(x, dim, largest, place, keepdim)


def _raced(x: Tensor, dim: int, largest: bool, place: bool, keepdim: bool) -> Tensor:
    args = (x, dim, largest, place)
    ways = {"library": partial(_library, *args), "ours": partial(amax, *args)}
    if not place:
        ways["without places"] = partial(torch.amax if largest else torch.amin, x, dim)
    found = CONTEST.run((x.shape, x.dtype, dim, largest, place, x.device), ways, x.device)
    return found.unsqueeze(dim) if keepdim else found


def _library(x: Tensor, dim: int, largest: bool, place: bool) -> Tensor:
    if place:
        return x.argmax(dim) if largest else x.argmin(dim)
    return (x.max(dim) if largest else x.min(dim)).values


_op = torch.library.custom_op("ridgeline_optimizer::raced_extreme", _raced, mutates_args=())


@_op.register_fake
def _(x: Tensor, dim: int, largest: bool, place: bool, keepdim: bool) -> Tensor:
    found: Tensor = AMAX.fake(x, dim, largest, place)
    return found.unsqueeze(dim) if keepdim else found


@rewrite(
    "extremes",
    summary="largest and smallest elements along a dim that is not the last become our kernel, where that is faster",
    modes=(INFERENCE,),
    worth=Worth(eager=1.2, compiled=0.99, basis="no places found that nobody asks for; the faster is taken by a race"),
    exact="bits",
    needs_kernels=True,
)
def extremes(scene: Scene) -> list[Match]:
    if scene.training or scene.autocast:
        return []
    return [match for node in scene.nodes if (match := _put(scene, node)) is not None]


def _put(scene: Scene, node: fx.Node) -> Match | None:
    read = call(node)
    x = None if read is None or read.op not in _KINDS else scene.tensor(read.given.get("input"))
    if read is None or x is None or not x.is_contiguous() or x.numel() < LEAST_ELEMENTS:
        return None
    dim, out = read.given.get("dim"), _asked(read)
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if out is None or not isinstance(dim, int) or not scene.shape(read["input"]):
        return None
    largest, place = _KINDS[read.op]
    dim %= x.dim()
    if AMAX.support(x, dim, largest, place) is not None:
        return None
    if not scene.unchanged((read["input"],), (node, out), out):
        return None
    new = scene.emit(out, raced_extreme, read["input"], dim, largest, place, bool(read.get("keepdim", False)))
    if not scene.replace(out, new):
        return None
    scene.discard(out)
    return scene.match(new, f"{read.op} of {tuple(x.shape)} along {dim}")


def _asked(read: Call) -> fx.Node | None:
    """What is used of a call: itself, or the elements of a pair whose places nobody asks for."""
    if read.op not in ("max", "min"):
        return read.node
    users = list(read.node.users)
    picked = call(users[0]) if len(users) == 1 else None
    return users[0] if picked is not None and picked.op == "getitem" and picked["index"] == 0 else None
