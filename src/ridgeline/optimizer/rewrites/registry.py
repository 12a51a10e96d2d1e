"""The registry of rewrites: what each changes, in which modes it is valid, its exactness and its expected gain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ridgeline.errors import OptimizeError, nearest

if TYPE_CHECKING:
    from ridgeline.optimizer.rewrites.context import GraphContext

INFERENCE, TRAINING = "inference", "training"
MODES = (INFERENCE, TRAINING)
EXACT = ("bits", "rounding", "reordered")
"""Same bits; the same arithmetic rounded elsewhere; another order of sums."""


@dataclass(frozen=True, slots=True)
class Match:
    """One place where a rewrite matched."""

    rewrite: str
    where: str
    what: str


@dataclass(frozen=True, slots=True)
class Worth:
    """The expected speedup of the replaced ops, in eager code and inside a compiled graph.

    A kernel of ours is opaque to a compiler and ends its fusions, so the two differ. ``basis`` is the source of the
    figures; the search measures.
    """

    eager: float
    compiled: float
    basis: str

    def under(self, compiler: str) -> float:
        return self.eager if compiler == "none" else self.compiled


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A named rewrite. Calling it changes the graph of a context, and returns its matches."""

    name: str
    summary: str
    modes: tuple[str, ...]
    exact: str
    worth: Mapping[str, Worth]
    needs_kernels: bool
    change: Callable[[GraphContext], list[Match]]

    def __call__(self, ctx: GraphContext) -> list[Match]:
        return self.change(ctx)


_rewrites: dict[str, Rewrite] = {}


def rewrite(
    name: str,
    *,
    summary: str,
    worth: Worth | Mapping[str, Worth],
    modes: Sequence[str] = MODES,
    exact: str = "rounding",
    needs_kernels: bool = False,
) -> Callable[[Callable[[GraphContext], list[Match]]], Callable[[GraphContext], list[Match]]]:
    """Register a function from a context to its matches under a name; a second registration is an error.

    ``worth`` is one figure, or one per mode. Rewrites run in the order of ``rewrites/order.py``.
    """
    if name in _rewrites:
        raise OptimizeError(f"rewrite {name!r} is registered twice")
    if exact not in EXACT or not set(modes) <= set(MODES):
        raise OptimizeError(f"rewrite {name!r}: exact is one of {EXACT}, modes are among {MODES}")
    table = dict.fromkeys(modes, worth) if isinstance(worth, Worth) else dict(worth)

    def register(change: Callable[[GraphContext], list[Match]]) -> Callable[[GraphContext], list[Match]]:
        _rewrites[name] = Rewrite(name, summary, tuple(modes), exact, table, needs_kernels, change)
        return change

    return register


def arrange(names: Sequence[str]) -> None:
    """Sort all registered rewrites by this list, which names each once."""
    if sorted(names) != sorted(_rewrites):
        apart = sorted(set(names) ^ _rewrites.keys())
        raise OptimizeError(f"rewrites/order.py and what is registered differ: {', '.join(apart) or 'a name twice'}")
    for name in names:
        _rewrites[name] = _rewrites.pop(name)


def rewrites() -> Mapping[str, Rewrite]:
    """All registered rewrites by name, in their order."""
    return _rewrites


def chosen(names: Iterable[str], mode: str) -> list[Rewrite]:
    """The rewrites with these names that are valid in this mode, in their order."""
    wanted = set(names)
    unknown = wanted - _rewrites.keys()
    if unknown:
        name = sorted(unknown)[0]
        raise OptimizeError(f"no rewrite {name!r}{nearest(name, _rewrites)}")
    return [each for each in _rewrites.values() if each.name in wanted and mode in each.modes]


def recommended(mode: str, compiler: str = "none", device: str = "cuda") -> tuple[str, ...]:
    """The rewrites that are expected to gain in this mode with this compiler; those with kernels only on CUDA."""
    return tuple(
        each.name
        for each in _rewrites.values()
        if mode in each.modes
        and each.worth[mode].under(compiler) > 1.0
        and (device == "cuda" or not each.needs_kernels)
    )
