"""Labels nodes of rewritten graphs with their modules while a profiler runs; otherwise it costs one check of a flag."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import fx
from torch.profiler import record_function

from ridgeline.optimizer.rewrites.context import where
from ridgeline.profiler.marks import MODULE


class Labels:
    """Whether a run is profiled, and the block in progress."""

    __slots__ = ("around", "on")

    def __init__(self) -> None:
        self.on, self.around = False, ""


_labels = Labels()


@contextmanager
def labeled() -> Iterator[None]:
    """Run rewritten graphs node by node, each under the name of its module, inside the context."""
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
    """Label a block's call while a run is profiled."""
    return _inside(path) if _labels.on else nullcontext()


def nameable(gm: fx.GraphModule) -> Callable[..., Any]:
    """The graph's forward; while a run is profiled, node by node with labels."""

    def run(*args: Any) -> Any:
        return Named(gm).run(*args) if _labels.on else gm.forward(*args)

    return run


class Named(fx.Interpreter):
    """An interpreter that labels every node with its module."""

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        # A block that was compiled alone does not know its own path, but runs under it.
        with record_function(MODULE + ".".join(part for part in (_labels.around, where(n)) if part)):
            return super().run_node(n)
