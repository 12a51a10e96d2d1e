"""Names of modules put on rewritten code while it is recorded; at other times they cost a look at a flag."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import fx
from torch.profiler import record_function

from ridgeline.optimizer.rewrites.context import where
from ridgeline.profiler.marks import MODULE


class Labels:
    """Whether runs are being recorded, and which block is running."""

    __slots__ = ("around", "on")

    def __init__(self) -> None:
        self.on, self.around = False, ""


_labels = Labels()


@contextmanager
def labeled() -> Iterator[None]:
    """While open, rewritten graphs run node by node under the names of the modules their nodes came from."""
    _labels.on = True
    try:
        yield
    finally:
        _labels.on, _labels.around = False, ""


@contextmanager
def _inside(path: str) -> Iterator[None]:
    before, _labels.around = _labels.around, path
    try:
        with record_function(MODULE + path):
            yield
    finally:
        _labels.around = before


def in_block(path: str) -> Any:
    """Around the call of a block: its name on everything inside, while a run is recorded."""
    return _inside(path) if _labels.on else nullcontext()


def nameable(gm: fx.GraphModule) -> Callable[..., Any]:
    """The graph as it runs; while a run is recorded, node by node with names."""

    def run(*args: Any) -> Any:
        return Named(gm).run(*args) if _labels.on else gm.forward(*args)

    return run


class Named(fx.Interpreter):
    """Runs a graph with every node under the name of its module."""

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        with record_function(MODULE + _path(n)):
            return super().run_node(n)


def _path(node: fx.Node) -> str:
    """The module of a node; a block that was compiled alone knows itself by no name, and runs under one."""
    return ".".join(part for part in (_labels.around, where(node)) if part)
