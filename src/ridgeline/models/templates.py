"""Networks asked for again at other sizes: written once with symbols, then made from that in a tenth of the time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from ridgeline.graph import Graph
from ridgeline.graph.symbol import SymbolError
from ridgeline.graph.template import Template
from ridgeline.models.card import Request

MAX_VARIANTS = 8
"""Templates kept of one network: a batch of one, a window that is not full and the like are graphs of their own."""


class _Kind:
    """A network in one mode, precision and set of options: its templates, the last used first."""

    def __init__(self) -> None:
        self.templates: list[Template] = []

    def at(self, sizes: tuple[int, ...]) -> Graph | None:
        for template in self.templates:
            graph = template.at(sizes)
            if graph is not None:
                if template is not self.templates[0]:
                    self.templates = [template, *(t for t in self.templates if t is not template)]
                return graph
        return None


@lru_cache(maxsize=64)
def _kind(*key: object) -> _Kind:
    return _Kind()


def graph_of(request: Request, optimizer: str, write: Callable[[Request], Graph]) -> Graph:
    """The graph that ``write`` gives, written anew only for sizes that give it another structure."""
    options = tuple(request.options.items())
    kind = _kind(request.card.name, request.mode, request.precision, optimizer, options)
    sizes = (request.batch, request.seq, request.kv)
    return kind.at(sizes) or _first(kind, sizes, request, write)


def _first(kind: _Kind, sizes: tuple[int, ...], request: Request, write: Callable[[Request], Graph]) -> Graph:
    try:
        made = Template(sizes, lambda symbols: write(_with(request, *symbols)))
    except SymbolError:  # as an error does that names a size; without symbols it can
        return write(request)
    kind.templates = [made, *kind.templates[: MAX_VARIANTS - 1]]
    return made.at(sizes) or write(request)


def _with(request: Request, batch: int, seq: int, kv: int) -> Request:
    return replace(request, batch=batch, seq=seq, kv=kv)
