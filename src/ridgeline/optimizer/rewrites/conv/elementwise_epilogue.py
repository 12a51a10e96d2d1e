"""Fuses float32 convolutions with the elementwise ops after them: one kernel of ours, or the library's.

A race at the first run of a shape decides (``contest``), with cuDNN's own algorithms timed too, so that a convolution
behind this rewrite is never slower than cuDNN's beyond noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.engine.autotune import Contest, may_time, prepared
from ridgeline.kernels.convolution import config
from ridgeline.kernels.convolution.links import POOLS, parts_of
from ridgeline.kernels.convolution.op import CONVOLUTION, MEAN, SOFTMAX, Sizes, link_, planned, turn
from ridgeline.kernels.convolution.reference import convolved
from ridgeline.kernels.convolution.reference import forward as meant
from ridgeline.kernels.tensorfloat import convolutions_round
from ridgeline.optimizer.rewrites.context import GraphContext
from ridgeline.optimizer.rewrites.conv.read import (
    CONVOLUTIONS,
    MOST_KINDS,
    Ints,
    Settings,
    convolutions,
    num_kinds,
    settings_of,
)
from ridgeline.optimizer.rewrites.op_names import Call, call
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite

LEAST_ELEMENTS = 1 << 18
LEAST_LAST = 16
"""With fewer channels channels last does not pay."""
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
CONTEST = Contest()
_accuracy: dict[Any, Accuracy] = {}
_decided: dict[Any, Any] = {}
_active_modes = torch._C._len_torch_dispatch_stack


def chained_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, vectors: Tensor | None, stride: Ints, padding: Ints,
    dilation: Ints, output_padding: Ints, groups: int, transposed: bool, chain: str,
) -> Tensor:  # fmt: skip
    """A convolution and its chain; one opaque op for tracers."""
    args = (x, weight, bias, vectors, stride, padding, dilation, output_padding, groups, transposed, chain)
    if type(x) is Tensor and not _active_modes():
        return _chained(*args)
    return torch.ops.ridgeline_optimizer.chained_convolution(*args)


def _chained(
    x: Tensor, weight: Tensor, bias: Tensor | None, vectors: Tensor | None, stride: Ints, padding: Ints,
    dilation: Ints, output_padding: Ints, groups: int, transposed: bool, chain: str,
) -> Tensor:  # fmt: skip
    settings = (stride, padding, dilation, output_padding, groups, transposed)
    if not x.is_cuda:
        return meant(x, weight, bias, vectors, *settings, chain)
    key = (x.shape, weight.shape, bias is None, chain, *map(tuple, settings[:4]), groups, transposed, x.device)
    decided = _decided.get(key)
    if decided is not None:
        return decided(x, weight, bias, vectors)
    found = _raced(key, x, weight, bias, vectors, settings, chain)
    name = CONTEST.won.get(key)
    if name is not None:  # decided: call it directly from now on
        _decided[key] = _ways(key, x, weight, bias, vectors, settings, chain)[name]
    return found


def _raced(
    key: Any, x: Tensor, weight: Tensor, bias: Tensor | None, vectors: Tensor | None, settings: Settings, chain: str
) -> Tensor:
    ways = _ways(key, x, weight, bias, vectors, settings, chain)
    given = (x, weight, bias, vectors)
    return CONTEST.run(key, {name: partial(way, *given) for name, way in ways.items()}, x.device)


Way = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


def _ways(
    key: Any, x: Tensor, weight: Tensor, bias: Tensor | None, vectors: Tensor | None, settings: Settings, chain: str
) -> dict[str, Way]:
    """The library's implementation and equally accurate ones, ours with every tile worth trying."""
    found: dict[str, Way] = {"library": partial(_library, settings, chain)}
    sizes = Sizes(x, weight, *settings)
    others = _others(sizes, settings, chain)
    depthwise, given = sizes.is_depthwise, (x, weight, bias, vectors)
    links, pool, _ = parts_of(chain)
    shown = links if pool == MEAN else chain  # a mean does not depend on the order of pixels
    together = pool not in ("", MEAN)
    tiles = () if depthwise else config.tiles(sizes.outputs, sizes.phase_pixels, together, sizes.num_terms)
    flops = 2.0 * math.prod(sizes.shape) * sizes.num_terms
    tiles += config.turned(tiles, sizes.inputs, sizes.groups, sizes.num_terms, flops)
    unknown = bool(tiles) and key not in CONTEST.won and may_time(key[-1])
    if unknown:
        _prepare(given, settings, shown, _expected(sizes, tiles[:1] if pool == MEAN else tiles))
    first = tiles[0] if tiles else None
    accuracy = _accuracy_of(key, given, settings, shown, first, _others(sizes, settings, shown))
    found |= {name: way for name, way in others.items() if name in accuracy.agreeing}
    if depthwise:
        return found | {"ours": partial(_ours, settings, chain, None)}
    most = config.MOST_EXACT if accuracy.rounding == "exact" else math.inf
    fitting = [tile for tile in tiles if tile.pixels * tile.channels <= most]
    rounded = {str(tile): replace(tile, rounding=accuracy.rounding) for tile in fitting}
    if unknown:
        _prepare(given, settings, chain, rounded.values())
    return found | {name: partial(_ours, settings, chain, tile) for name, tile in rounded.items()}


def _others(sizes: Sizes, settings: Settings, chain: str) -> dict[str, Way]:
    """The library's other algorithms, which may be less accurate."""
    found: dict[str, Way] = {"library, timed": partial(_timed, settings, chain)}
    if len(sizes.shape) in _LAST and sizes.groups == 1 and min(sizes.inputs, sizes.outputs) >= LEAST_LAST:
        found["channels last"] = partial(_channels_last, settings, chain)
    return found


def _expected(sizes: Sizes, tiles: Iterable[config.Tile]) -> list[config.Tile]:
    """Tiles in the order of expected use: cuDNN on an H200 computes thin and grouped images in float32."""
    first, *rest = tiles
    likely, next_, *_ = _likely(sizes)
    wanted = [replace(tile, rounding="exact" if next_ == "exact" else likely) for tile in rest]
    return [replace(first, rounding=likely), replace(first, rounding=next_), *wanted]


def _likely(sizes: Sizes) -> list[str]:
    """Roundings of the factors, the likely ones first; every one that is tried is a kernel to compile.

    cuDNN rounds both factors of transposed convolutions to nearest even (all seven measured on an H200; some as plain
    ones), and those of plain convolutions away from zero (both measured).
    """
    if sizes.transposed:
        first = ["even", "nearest"]
    else:
        first = ["nearest", "exact" if sizes.inputs < LEAST_LAST or sizes.groups > 1 else "even"]
    return [*first, *(each for each in config.ROUNDINGS if each not in first)]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How PyTorch rounds the factors of a convolution, and which other implementations are as accurate."""

    rounding: str = "nearest"
    agreeing: frozenset[str] = frozenset()
    apart: dict[str, float] = field(default_factory=dict, compare=False)  # the largest difference, by implementation


def _accuracy_of(
    key: Any, given: tuple[Any, ...], settings: Settings, chain: str, tile: config.Tile | None, others: dict[str, Way]
) -> Accuracy:
    """Find out how eager PyTorch rounds factors: to TensorFloat-32, truncated both or one, or not at all.

    A rounding that agrees but for the order of sums is taken at once; otherwise the closest. If eager computes in
    float32, so must cuDNN's other algorithms.
    """
    if key in _accuracy or not may_time(key[-1]):
        return _accuracy.get(key, Accuracy())
    reference = _library(settings, chain, *given)
    # The relative difference from the library's result that another order of sums explains.
    near = 1e-5 * float(reference.abs().max())
    apart: dict[str, float] = {}
    rounding = "exact" if tile is None else _rounding_of(reference, near, given, settings, chain, tile, apart)
    agreeing = frozenset(
        name for name, way in others.items() if rounding != "exact" or _apart(way, given, reference) <= near
    )
    _accuracy[key] = Accuracy(rounding, agreeing, apart)
    return _accuracy[key]


def _prepare(given: tuple[Any, ...], settings: Settings, chain: str, tiles: Iterable[config.Tile]) -> None:
    """Compile the kernels of several tiles in parallel."""
    prepared(partial(planned, *given, *settings, chain, tile=tile) for tile in tiles)


def _rounding_of(
    reference: Tensor, near: float, given: tuple[Any, ...], settings: Settings, chain: str, tile: config.Tile,
    apart: dict[str, float],
) -> str:  # fmt: skip
    x, weight, *_ = given
    for rounding in _likely(Sizes(x, weight, *settings)):
        apart[rounding] = _apart(partial(_ours, settings, chain, replace(tile, rounding=rounding)), given, reference)
        if apart[rounding] <= near:
            return rounding
    rounded = [each for each in apart if each != "exact"]
    return min(rounded, key=lambda each: apart[each])  # eager has a rounding of its own, and so may we


def _apart(way: Way, given: tuple[Any, ...], reference: Tensor) -> float:
    """The largest difference of an implementation from a reference; infinite if it does not run."""
    try:
        return float((way(*given) - reference).abs().max())
    except Exception:  # a tile that does not fit, or no algorithm: it loses its race
        return math.inf


def _ours(
    settings: Settings, chain: str, tile: Any, x: Tensor, weight: Tensor, bias: Tensor | None, vectors: Tensor | None
) -> Tensor:
    return planned(x, weight, bias, vectors, *settings, chain, tile=tile)(x, weight, bias, vectors)


def _library(
    settings: Settings, chain: str, x: Tensor, weight: Tensor, bias: Tensor | None, vectors: Tensor | None
) -> Tensor:
    """The convolution as in eager PyTorch, then the chain in place."""
    links, pool, after = parts_of(chain)
    linked = link_(convolved(x, weight, bias, *settings).contiguous(), vectors, links)
    return link_(POOLS[pool](linked), vectors, after)


def _timed(settings: Settings, chain: str, *given: Any) -> Tensor:
    """The same with cuDNN's algorithm chosen by timing, once per shape."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        return _library(settings, chain, *given)
    finally:
        torch.backends.cudnn.benchmark = before


def _channels_last(
    settings: Settings, chain: str, x: Tensor, weight: Tensor, bias: Tensor | None, vectors: Tensor | None
) -> Tensor:
    """cuDNN on channels-last images, for which it is fastest; the chain is applied while the layout is restored."""
    form = _LAST[x.dim()]
    laid = turn(x, torch.empty_like(x, memory_format=form), None, back=False)
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        found = convolved(laid, weight.contiguous(memory_format=form), bias, *settings)
    finally:
        torch.backends.cudnn.benchmark = before
    links, pool, after = parts_of(chain)
    if not found.is_contiguous(memory_format=form):
        return link_(POOLS[pool](link_(found.contiguous(), vectors, links)), vectors, after)
    room = torch.empty_like(found, memory_format=torch.contiguous_format)
    return link_(POOLS[pool](turn(found, room, vectors, links, back=True)), vectors, after)


_op = torch.library.custom_op("ridgeline_optimizer::chained_convolution", _chained, mutates_args=())


@_op.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, vectors: Tensor | None, stride: Ints, padding: Ints,
    dilation: Ints, output_padding: Ints, groups: int, transposed: bool, chain: str,
) -> Tensor:  # fmt: skip
    return CONVOLUTION.fake(x, weight, bias, vectors, stride, padding, dilation, output_padding, groups, transposed,
                            chain)  # fmt: skip


@rewrite(
    "convolution-chain",
    summary="float32 convolutions and elementwise ops after them become one kernel, where it beats cuDNN's",
    modes=(INFERENCE,),
    worth=Worth(eager=1.5, compiled=1.3, basis="copies between layouts and a pass less; the faster is taken by a race"),
    needs_kernels=True,
)
def convolution_chain(ctx: GraphContext) -> list[Match]:
    if ctx.training or ctx.autocast or not convolutions_round() or not torch.backends.cudnn.enabled:
        return []
    every = convolutions(ctx)
    if num_kinds(ctx, every) > MOST_KINDS:
        return []
    nodes = [read.node for read in every]  # read again one by one: their inputs may have been replaced
    layers = (read for node in nodes if (read := _layer(ctx, node)) is not None)
    return [match for read in layers if (match := _put(ctx, read)) is not None]


def _layer(ctx: GraphContext, node: fx.Node) -> Call | None:
    """A convolution of contiguous float32 images, large enough to matter."""
    read = call(node)
    if read is None or read.op not in CONVOLUTIONS or not isinstance(read["weight"], fx.Node):
        return None
    x, out = ctx.tensor(read["input"]), ctx.tensor(node)
    if x is None or out is None or ctx.shape(node) is None or x.dim() != CONVOLUTIONS[read.op] + 2:
        return None
    plain = x.is_contiguous() and out.is_contiguous() and out.numel() >= LEAST_ELEMENTS
    return read if plain and x.dtype == torch.float32 else None


def _put(ctx: GraphContext, read: Call) -> Match | None:
    settings = settings_of(read)
    if settings is None:
        return None
    last, words, vectors = chain_behind(ctx, read.node)
    last, pool, kept = pool_behind(ctx, last, settings)
    chain = " ".join(words) + (f"|{pool}" if pool else "")
    if pool == SOFTMAX:
        last, words, vectors = chain_behind(ctx, last, vectors)
        chain += f"|{' '.join(words)}" if words else ""
    leaves = (read["input"], read["weight"], read.get("bias"))
    values = [ctx.value(leaf) for leaf in leaves]
    like = None if not vectors else values[1].new_empty(len(vectors), _num_channels(ctx, read))
    if CONVOLUTION.support(*values, like, *settings, chain) is not None:
        return None
    inside = _between(read.node, last)
    if not ctx.unchanged((*leaves, *vectors), inside, last):
        return None
    stacked = _stacked(ctx, last, vectors, _num_channels(ctx, read))
    new = ctx.emit(last, chained_convolution, *leaves, stacked, *settings, chain)
    gone = list(range(2, values[0].dim())) if pool == MEAN else [1]
    new = new if kept else ctx.emit(last, torch.squeeze, new, gone)
    if not ctx.replace(last, new):
        return None
    ctx.discard(last)
    return ctx.match(new, f"{read.op} {tuple(values[0].shape)}{f', {chain}' if chain else ''}")


def _num_channels(ctx: GraphContext, read: Call) -> int:
    return (ctx.shape(read.node) or (0, 0))[1]


def _between(first: fx.Node, last: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes between the convolution and the end of its chain, used only inside."""
    found, waiting = [], [last]
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found.append(node)
        if node is not first:
            waiting += [each for each in node.all_input_nodes if _reaches(each, first)]
    return tuple(found)


def _reaches(node: fx.Node, first: fx.Node) -> bool:
    """Whether a node depends on the convolution within a few steps."""
    waiting: list[fx.Node] = [node]
    seen: set[fx.Node] = set()
    while waiting:
        each = waiting.pop()
        if each is first:
            return True
        if each in seen or len(seen) > 64:
            continue
        seen.add(each)
        waiting += each.all_input_nodes
    return False


def _stacked(ctx: GraphContext, before: fx.Node, vectors: tuple[fx.Node, ...], channels: int) -> fx.Node | None:
    return ctx.emit(before, stacked_vectors, list(vectors), channels) if vectors else None


def stacked_vectors(vectors: list[Tensor], channels: int) -> Tensor:
    """One row per vector, numbers expanded; a single vector is returned unchanged."""
    if len(vectors) == 1 and vectors[0].numel() == channels:
        return vectors[0].reshape(1, channels)
    return torch.stack([each.reshape(-1).expand(channels) for each in vectors])


# chains of elementwise ops ------------------------------------------------------------------------------------------


def chain_behind(
    ctx: GraphContext, node: fx.Node, before: tuple[fx.Node, ...] = ()
) -> tuple[fx.Node, list[str], tuple[fx.Node, ...]]:
    """(last node, links, vectors) of the longest chain of elementwise ops after a convolution; vectors are numbered
    after those in ``before``."""
    words: list[str] = []
    vectors: list[fx.Node] = list(before)
    while True:
        found = _gated(node) or _single(ctx, node, vectors)
        if found is None or ctx.shape(found[0]) != ctx.shape(node) or ctx.dtype(found[0]) != torch.float32:
            return node, words, tuple(vectors)
        following, links = found
        if not ctx.tensor(following).is_contiguous():  # type: ignore[union-attr]
            return node, words, tuple(vectors)
        node = following
        words += links


def pool_behind(ctx: GraphContext, node: fx.Node, settings: Settings) -> tuple[fx.Node, str, bool]:
    """(last node, pool, keepdim) if a chain ends in a reduction over all channels or all pixels."""
    nothing, shape = (node, "", True), ctx.shape(node) or ()
    users = list(node.users)
    read = call(users[0]) if len(users) == 1 else None
    if read is None or read.given.get("input") is not node or settings[4] != 1:
        return nothing
    dim = read.given.get("dim")
    dims = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
    if _averages(read, dims, len(shape)):
        return users[0], MEAN, read.op != "mean" or bool(read.get("keepdim", False))
    if shape[1] > config.MOST_POOLED:
        return nothing
    if len(dims) != 1 or not isinstance(dims[0], int) or dims[0] % len(shape) != 1 or read.given.get("dtype"):
        return nothing
    if read.op in ("softmax", "logsumexp"):
        return users[0], read.op, read.op == "softmax" or bool(read.get("keepdim", False))
    picked = list(users[0].users)
    values = call(picked[0]) if len(picked) == 1 else None
    if read.op in ("min", "max") and values is not None and values.op == "getitem" and values["index"] == 0:
        return picked[0], read.op, bool(read.get("keepdim", False))
    return nothing


def _averages(read: Call, dims: tuple[Any, ...], num: int) -> bool:
    """Whether a call is the mean over all pixels."""
    whole = all(isinstance(dim, int) for dim in dims) and sorted(dim % num for dim in dims) == list(range(2, num))
    return pooled_to_one(read) or (read.op == "mean" and whole and read.given.get("dtype") is None)


_PLAIN = {name: name for name in ("relu", "sigmoid", "tanh", "silu", "mish", "hardswish", "hardsigmoid")}


def _single(ctx: GraphContext, node: fx.Node, vectors: list[fx.Node]) -> tuple[fx.Node, list[str]] | None:
    """The only user of a node as links."""
    if len(node.users) != 1:
        return None
    user = next(iter(node.users))
    read = call(user)
    if read is None:
        return None
    links = _function(read, node) or _bounded(read, node) or _arithmetic(ctx, read, node, vectors)
    return None if links is None else (user, links)


def _function(read: Call, node: fx.Node) -> list[str] | None:
    """A unary function as links."""
    if read.given.get("input") is not node or any(
        value is node for name, value in read.given.items() if name != "input"
    ):
        return None
    if read.op in _PLAIN:
        return [_PLAIN[read.op]]
    if read.op == "gelu":
        return ["gelu"] if read.get("approximate", "none") == "none" else None
    if read.op == "softplus":
        return ["softplus"] if read.get("beta", 1) == 1 and read.get("threshold", 20) == 20 else None
    if read.op == "leaky_relu":
        slope = _number(read.get("negative_slope", 0.01))
        return None if slope is None else [f"leaky={slope!r}"]
    if read.op == "relu6":
        return ["least=0.0", "most=6.0"]
    if read.op in ("hardtanh", "clamp"):
        names = ("min_val", "max_val") if read.op == "hardtanh" else ("min", "max")
        default = (-1.0, 1.0) if read.op == "hardtanh" else (None, None)
        return _bounds(*(read.get(name, value) for name, value in zip(names, default, strict=True)))
    return None


def _bounded(read: Call, node: fx.Node) -> list[str] | None:
    """The minimum or maximum of a node and a number wrapped in a tensor."""
    word = {"min": "most", "minimum": "most", "max": "least", "maximum": "least"}.get(read.op)
    other = read.given.get("other", read.given.get("dim"))
    if word is None or read.given.get("input") is not node or not isinstance(other, fx.Node):
        return None
    made = other.target is torch.tensor and other.op == "call_function" and not other.kwargs.get("requires_grad")
    number = _number(other.args[0]) if made and other.args else None
    dtype = other.kwargs.get("dtype") if made else None
    return None if number is None or dtype not in (None, torch.float32) else [f"{word}={number!r}"]


def _bounds(low: Any, high: Any) -> list[str] | None:
    found = []
    for word, bound in (("least", low), ("most", high)):
        if bound is None:
            continue
        number = _number(bound)
        if number is None:
            return None
        found.append(f"{word}={number!r}")
    return found or None


def _arithmetic(ctx: GraphContext, read: Call, node: fx.Node, vectors: list[fx.Node]) -> list[str] | None:
    """A sum, difference, product or quotient with a number or with one number per channel."""
    if read.op not in ("add", "sub", "mul", "div") or read.given.get("rounding_mode") or read.given.get("alpha"):
        return None
    a, b = read.given.get("input"), read.given.get("other")
    if a is node and b is node:
        return ["scale=2.0"] if read.op == "add" else None
    other = b if a is node else a
    if a is not node and read.op in ("sub", "div"):
        return None
    number = _number(other)
    if number is not None:
        return _with_number(read.op, number)
    if not isinstance(other, fx.Node) or not _is_channelwise(ctx, other, node) or read.op in ("sub", "div"):
        return _negated(ctx, read, other, node, vectors)
    vectors.append(other)
    return [f"{'shifts' if read.op == 'add' else 'scales'}@{len(vectors) - 1}"]


def _negated(ctx: GraphContext, read: Call, other: Any, node: fx.Node, vectors: list[fx.Node]) -> list[str] | None:
    """A difference as a sum with the negated vector, which is added to the graph."""
    if read.op != "sub" or not isinstance(other, fx.Node) or not _is_channelwise(ctx, other, node):
        return None
    vectors.append(ctx.emit(read.node, torch.neg, other))
    return [f"shifts@{len(vectors) - 1}"]


def _with_number(op: str, number: float) -> list[str] | None:
    if op == "div":
        return [f"scale={1.0 / number!r}"] if number else None
    if op == "mul":
        return [f"scale={number!r}"]
    return [f"shift={number if op == 'add' else -number!r}"]


def _is_channelwise(ctx: GraphContext, other: fx.Node, node: fx.Node) -> bool:
    """Whether a float32 tensor has one element, or one per channel that broadcasts over batch and pixels."""
    shape, sizes = ctx.shape(other), ctx.shape(node)
    if shape is None or sizes is None or ctx.dtype(other) != torch.float32:
        return False
    x, y = ctx.tensor(other), ctx.tensor(node)
    if x is None or y is None or x.device != y.device:  # a number on the host
        return False
    full = (1,) * (len(sizes) - len(shape)) + shape
    return len(full) == len(sizes) and all(
        size == 1 or (dim == 1 and size == sizes[1]) for dim, size in enumerate(full)
    )


def _gated(node: fx.Node) -> tuple[fx.Node, list[str]] | None:
    """A node times a function of itself: SiLU and mish as separate ops."""
    if len(node.users) != 2:
        return None
    for product in node.users:
        read = call(product)
        if read is None or read.op != "mul":
            continue
        pair = (read.given.get("input"), read.given.get("other"))
        gate = pair[1] if pair[0] is node else pair[0] if pair[1] is node else None
        if not isinstance(gate, fx.Node) or len(gate.users) != 1 or node not in _roots(gate):
            continue
        link = _gate_link(gate, node)
        if link is not None and set(node.users) <= {product, *_steps(gate, node)}:
            return product, [link]
    return None


def _roots(gate: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = [gate]
    for _ in range(6):
        waiting = [each for node in waiting for each in node.all_input_nodes]
        found |= set(waiting)
    return found


def _steps(gate: fx.Node, node: fx.Node) -> list[fx.Node]:
    """The nodes from a gate back to its argument."""
    found: list[fx.Node] = []
    at = gate
    while at is not node and len(found) < 6:
        found.append(at)
        sources = at.all_input_nodes
        if len(sources) != 1:
            return []
        at = sources[0]
    return found


def _gate_link(gate: fx.Node, node: fx.Node) -> str | None:
    """The link for the product of a node with this gate."""
    read = call(gate)
    if read is None:
        return None
    if read.op == "sigmoid" and read["input"] is node:
        return "silu"
    if read.op == "hardsigmoid" and read["input"] is node:
        return "hardswish"
    inner = call(read.given.get("input"))
    if read.op == "tanh" and inner is not None and inner["input"] is node and _function(inner, node) == ["softplus"]:
        return "mish"
    if read.op == "clamp" and _bounds(read.get("min"), read.get("max")) == ["least=0.0", "most=1.0"]:
        return "hardswish" if _is_sixth(inner, node) else None
    return None


def _is_sixth(read: Call | None, node: fx.Node) -> bool:
    """Whether a call is (node + 3) / 6."""
    if read is None or read.op != "div" or _number(read.given.get("other")) != 6:
        return False
    shifted = call(read.given.get("input"))
    return shifted is not None and shifted.op == "add" and (
        (shifted.given.get("input") is node and _number(shifted.given.get("other")) == 3)
        or (shifted.given.get("other") is node and _number(shifted.given.get("input")) == 3)
    )  # fmt: skip


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def contests() -> Mapping[Any, str]:
    """The winning implementation of every convolution that was raced."""
    return CONTEST.won


def pooled_to_one(read: Call) -> bool:
    """Whether an adaptive pooling is the mean over all pixels."""
    size = read.given.get("output_size")
    ones = all(each == 1 for each in size) if isinstance(size, (tuple, list)) else size == 1
    return read.op == "adaptive_avg_pool" and ones
