"""What may follow a product element by element: the links of a chain, as device code, as PyTorch and by name.

A chain is text: ``"scale=2.0 relu shift@0"``. A link with ``=`` has a number, one with ``@`` a vector with an element a
channel. The kernel is compiled for a chain, so a link costs what its arithmetic costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.function import jit

LINKS: dict[str, Callable[..., Tensor]] = {
    "relu": lambda x, v: F.relu(x),
    "leaky": lambda x, v: F.leaky_relu(x, v),
    "sigmoid": lambda x, v: torch.sigmoid(x),
    "tanh": lambda x, v: torch.tanh(x),
    "silu": lambda x, v: F.silu(x),
    "gelu": lambda x, v: F.gelu(x),
    "mish": lambda x, v: F.mish(x),
    "softplus": lambda x, v: F.softplus(x),
    "hardswish": lambda x, v: F.hardswish(x),
    "hardsigmoid": lambda x, v: F.hardsigmoid(x),
    "least": lambda x, v: torch.clamp(x, min=v),  # a number from below, NaN stays
    "most": lambda x, v: torch.clamp(x, max=v),
    "scale": lambda x, v: x * v,
    "shift": lambda x, v: x + v,
    "scales": lambda x, v: x * v,
    "shifts": lambda x, v: x + v,
}
"""Every link by name with what it means; its code in the kernel is its place here."""
CODES = {name: code for code, name in enumerate(LINKS)}
VECTORS = ("scales", "shifts")
_LOG2E = tl.constexpr(1.4426950408889634)

POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "min": lambda x: x.amin(1, keepdim=True),
    "max": lambda x: x.amax(1, keepdim=True),
    "logsumexp": lambda x: torch.logsumexp(x, 1, keepdim=True),
    "softmax": lambda x: torch.softmax(x, 1),
    "mean": lambda x: x.mean(tuple(range(2, x.dim())), keepdim=True),
}
"""What may become of a pixel's channels, or of a channel's pixels (``mean``), at the end of a chain, after a bar:
``"relu|min"``; the code is its place. Links may follow what leaves all channels, after another: ``"|softmax|relu"``."""
Link = tuple[str, float | int | None]


def parts_of(chain: str) -> tuple[str, str, str]:
    """(links, pool, links behind it) of a chain."""
    links, _, rest = chain.partition("|")
    pool, _, after = rest.partition("|")
    return links, pool, after


def ended(x: Tensor, pool: str, after: str, vectors: Sequence[Tensor]) -> Tensor:
    """What is left of a chain after its links, in PyTorch."""
    return followed(POOLS[pool](x), after, vectors)


def links_of(chain: str) -> tuple[Link, ...]:
    """The links of a chain: (name, its number, the place of its vector, or None)."""
    found: list[Link] = []
    for word in chain.split():
        name, _, number = word.partition("=")
        name, _, place = name.partition("@")
        if (
            name not in LINKS
            or bool(number) != (name in ("leaky", "least", "most", "scale", "shift"))
            or bool(place) != (name in VECTORS)
        ):
            raise ValueError(f"no link {word!r}")
        found.append((name, float(number) if number else int(place) if place else None))
    return tuple(found)


def coded(chain: str) -> tuple[float, ...]:
    """A chain as the kernel takes it: code and number or place of every link, one after the other."""
    found: list[float] = []
    for name, value in links_of(chain):
        found += [float(CODES[name]), 0.0 if value is None else float(value)]
    return tuple(found)


def followed(x: Tensor, chain: str, vectors: Sequence[Tensor], channel_dim: int = 1) -> Tensor:
    """A chain's links in PyTorch, in the type of x."""
    for name, value in links_of(chain):
        given: Any = value
        if name in VECTORS:
            shape = [1] * x.dim()
            shape[channel_dim] = -1
            given = vectors[int(value or 0)].to(x.dtype).view(shape)
        x = LINKS[name](x, given)
    return x


@jit
def linked(x, vectors_ptr, channel, inside, CHANNELS: tl.constexpr, LINKS: tl.constexpr):
    """A tile after all links of a chain; ``channel`` says of which channel its elements are, where it spreads to x."""
    for i in tl.static_range(len(LINKS) // 2):
        x = link(x, vectors_ptr, channel, inside, CHANNELS, LINKS[2 * i], LINKS[2 * i + 1])
    return x


@jit
def link(x, vectors_ptr, channel, inside, CHANNELS: tl.constexpr, CODE: tl.constexpr, VALUE: tl.constexpr):
    """A tile after one link; comparisons are written so that NaN stays NaN."""
    if CODE == 0:
        x = tl.where(x < 0, 0.0, x)
    elif CODE == 1:
        x = tl.where(x < 0, x * VALUE, x)
    elif CODE == 2:
        x = tl.sigmoid(x)
    elif CODE == 3:
        x = tanh(x)
    elif CODE == 4:
        x = x * tl.sigmoid(x)
    elif CODE == 5:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif CODE == 6:
        x = mish(x)
    elif CODE == 7:
        x = softplus(x)
    elif CODE == 8:
        gate = tl.where(x < -3.0, 0.0, tl.where(x > 3.0, 6.0, x + 3.0))
        x = x * gate * (1.0 / 6.0)
    elif CODE == 9:
        x = tl.where(x < -3.0, 0.0, tl.where(x > 3.0, 1.0, (x + 3.0) * (1.0 / 6.0)))
    elif CODE == 10:
        x = tl.where(x < VALUE, VALUE, x)
    elif CODE == 11:
        x = tl.where(x > VALUE, VALUE, x)
    elif CODE == 12:
        x = x * VALUE
    elif CODE == 13:
        x = x + VALUE
    else:
        vector = tl.load(vectors_ptr + int(VALUE) * CHANNELS + channel, mask=inside, other=0.0)
        x = x * vector if CODE == 14 else x + vector
    return x


@jit
def smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def pooled(x, inside, POOL: tl.constexpr):
    """[pixels, channels] to a number a pixel: smallest, largest, or the logarithm of the sum of exponentials."""
    if POOL == 1:
        return tl.reduce(tl.where(inside, x, float("inf")), 1, smaller)
    top = tl.reduce(tl.where(inside, x, float("-inf")), 1, larger)
    if POOL == 2:
        return top
    shift = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    return shift + tl.log(tl.sum(tl.where(inside, tl.exp(x - shift[:, None]), 0.0), 1))


@jit
def softmax_of(x, inside):
    top = tl.max(tl.where(inside, x, float("-inf")), 1)
    e = tl.where(inside, tl.exp(x - top[:, None]), 0.0)
    return e / tl.sum(e, 1)[:, None]


@jit
def tanh(x):
    """By exponentials where they lose nothing, by a series close to zero, where they cancel."""
    size = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp2(size * (2 * _LOG2E)) + 1.0)
    square = x * x
    series = -0.053968254 + square * (0.021869488 - square * 0.0088632355)
    close = x + x * square * (-0.33333334 + square * (0.13333334 + square * series))
    return tl.where(size < 0.3, close, tl.where(x < 0, -far, far))


@jit
def mish(x):
    """x · tanh(log(1 + eˣ)) = x · (e² + 2e) / (e² + 2e + 2) with e = eˣ; past 20 it is x."""
    e = tl.exp2(tl.where(x > 20.0, 20.0, x) * _LOG2E)
    top = e * (e + 2.0)
    return tl.where(x > 20.0, x, x * (top / (top + 2.0)))


@jit
def softplus(x):
    """log(1 + eˣ), which past 20 is x; small e keeps its digits by the quotient of the logarithm's own rounding."""
    e = tl.exp2(tl.where(x > 20.0, 20.0, x) * _LOG2E)
    one = 1.0 + e
    off = one - 1.0
    log = tl.where(off == 0.0, e, tl.log(one) * (e / tl.where(off == 0.0, 1.0, off)))
    return tl.where(x > 20.0, x, log)
