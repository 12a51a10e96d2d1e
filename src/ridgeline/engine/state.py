"""What a search calls besides the model, and puts back: a loss with weights, statistics and notes of its own.

A search calls a loss hundreds of times. What it keeps (centers that follow the data, a running mean, weights that are
trained with the model's) is the caller's as much as the model's buffers are, and so are modules that the model's code
knows by a global name. Nothing of them is part of a result; all of it has to be as it was when training begins.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.engine.example_inputs import WEIGHTS_BYTES, same, writable
from ridgeline.engine.guards.check import Watch
from ridgeline.engine.guards.code_reads import functions_of, library
from ridgeline.errors import NotGraphable


class Beside:
    """Everything that a loss and the model's code hold outside of the model, as it is now."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any] | None, others: Iterable[Tensor] = ()) -> None:
        named = _named(functions_of(model), _holds)
        mine = [] if loss is None else [loss, *_named(_functions(loss), _keeps)]
        self._watches = [_watch(each, model) for each in (mine, named)]
        own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        held = {id(t): t for watch in self._watches if watch is not None for _, t in watch.tensors.values()}
        held |= {id(tensor): tensor for tensor in others}
        found = [tensor for tensor in held.values() if id(tensor) not in own and _plain(tensor)]
        self._values = _kept(found)
        self._gradients = [(t, t.grad, None if t.grad is None else t.grad.detach().clone())
                           for t in found if t.requires_grad and t.is_leaf]  # fmt: skip

    def restore(self) -> None:
        """Values and gradients as they were; names that a loss has bound since stay, as what a first call sets up."""
        for tensor, was in self._values:
            if not same(tensor.detach(), was):
                with torch.no_grad(), writable(tensor):
                    tensor.detach().copy_(was)
        for tensor, grad, copy in self._gradients:
            tensor.grad = grad
            if grad is not None and copy is not None:
                with torch.no_grad():
                    grad.detach().copy_(copy)

    def hand_back(self) -> None:
        """Names, lists and counters of the loss too: the caller's loop begins where it would have."""
        if self._watches[0] is not None:
            self._watches[0].restore()
        self.restore()


@contextmanager
def left_alone(model: nn.Module, loss: Callable[..., Any] | None, others: Iterable[Tensor] = ()) -> Iterator[None]:
    """Inside, what is beside the model may change; it is put back."""
    kept = Beside(model, loss, others)
    try:
        yield
    finally:
        kept.hand_back()


def _watch(held: list[Any], model: nn.Module) -> Watch | None:
    try:
        return Watch(tuple(held), without=model.modules()) if held else None
    except NotGraphable:  # a generator, say, whose place nobody can put back
        return None


def _functions(loss: Callable[..., Any]) -> list[types.FunctionType]:
    """The code of a loss, whatever it is wrapped in."""
    while isinstance(loss, partial):
        loss = loss.func
    if isinstance(loss, types.MethodType):
        return _functions(loss.__func__)
    return [loss] if isinstance(loss, types.FunctionType) else functions_of(loss)


def _named(functions: Iterable[types.FunctionType], wanted: Callable[[Any], bool]) -> list[Any]:
    """What code knows by global names, as far as it is wanted."""
    found: dict[int, Any] = {}
    for function in functions:
        if not library(function.__code__.co_filename):
            for name in _names(function.__code__):
                value = function.__globals__.get(name)
                if wanted(value):
                    found[id(value)] = value
    return list(found.values())


def _names(code: types.CodeType) -> set[str]:
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _keeps(value: Any) -> bool:
    """Whether calls of a loss may leave something there: a log, say."""
    return isinstance(value, list | dict | set) or _holds(value)


def _holds(value: Any, depth: int = 0) -> bool:
    """Whether something is a module or a tensor, or a few of them."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple) and depth < 2:
        return any(_holds(each, depth + 1) for each in value[:64])
    return isinstance(value, nn.Module | Tensor)


def _plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


def _kept(tensors: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Copies of what is small: data that a loss looks up may be large, and is not written to."""
    found, left = [], WEIGHTS_BYTES
    for tensor in sorted(tensors, key=lambda each: each.nbytes):
        left -= tensor.nbytes
        if left < 0:
            break
        found.append((tensor, tensor.detach().clone()))
    return found
