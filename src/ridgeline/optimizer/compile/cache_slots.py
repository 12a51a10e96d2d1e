"""Lets equal blocks with a key-value cache share compiled code, although each asks for its own layer by number.

A compiled block is told that it is layer 0, and given a cache of that one layer, so that all blocks look equal to the
tracer. The layer's tensors are passed as new objects over the same memory, because Dynamo compares tensors that are
marked as static by identity. The drop-path rate, which differs by block and has no effect in evaluation, is set to 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.engine.pytree import empty_like, slots_of

NUMBER = "layer_idx"
"""The attribute of transformers' blocks that holds their layer number."""
_GONE = object()


class Place:
    """The layer number of a block, if it and its parts have exactly one."""

    def __init__(self, block: nn.Module) -> None:
        held = [vars(part) for part in block.modules() if type(vars(part).get(NUMBER)) is int]
        numbers = {names[NUMBER] for names in held}
        self.number = numbers.pop() if len(numbers) == 1 else None
        self._held = held
        self._drop_rates = [
            (part, name, vars(part)[name])
            for part in block.modules() for name in ("drop_prob", "p")
            if type(part).__name__.endswith(("DropPath", "StochasticDepth")) and type(vars(part).get(name)) is float
        ]  # fmt: skip

    def call(self, run: Callable[..., Any], block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the compiled block as layer 0."""
        rates = [each for each in self._drop_rates if not each[0].training]
        for part, name, _ in rates:
            vars(part)[name] = 0.0
        try:
            return self._numbered(run, block, args, kwargs)
        finally:
            for part, name, value in rates:
                vars(part)[name] = value

    def _numbered(
        self, run: Callable[..., Any], block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run the compiled block with a cache of its own layer, if it is given a cache."""
        caches = {id(value): value for value in (*args, *kwargs.values()) if is_cache(value)}
        if self.number is None or len(caches) != 1:
            return run(block, *args, **kwargs)
        (cache,) = caches.values()
        alone = LayerCache.of(cache, self.number)
        if alone is None:
            return run(block, *args, **kwargs)
        given = [alone.cache if value is cache else value for value in args]
        named = {name: alone.cache if value is cache else value for name, value in kwargs.items()}
        for names in self._held:
            names[NUMBER] = 0
        try:
            result = run(block, *given, **named)
        finally:
            for names in self._held:
                names[NUMBER] = self.number
            alone.settle()
        return _handed(result, alone.cache, cache)


def is_cache(value: Any) -> bool:
    """Whether an object has a list of layers with an ``update`` method, or holds such objects by name."""
    if isinstance(value, nn.Module) or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    return _is_layered(value) or any(_is_layered(held) for held in vars(value).values())


def _is_layered(value: Any) -> bool:
    layers = getattr(value, "layers", None)
    return isinstance(layers, list) and callable(getattr(value, "update", None)) and not isinstance(value, nn.Module)


class LayerCache:
    """A cache of one layer of another cache; ``settle`` writes changes back."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._pairs: list[tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any]]] = []
        self._numbered: list[tuple[dict[int, Any], dict[int, Any]]] = []
        self.cache: Any = None

    @classmethod
    def of(cls, cache: Any, number: int) -> LayerCache | None:
        """None if the cache has no such layer, or a layer with slots."""
        alone = cls(number)
        alone.cache = alone._layered(cache) if _is_layered(cache) else alone._named(cache)
        return alone if alone.cache is not None else None

    def _layered(self, cache: Any) -> Any:
        grown = getattr(cache, "layer_class_to_replicate", None)
        while grown is not None and len(cache.layers) <= self._number:
            cache.layers.append(grown())
        layer = cache.layers[self._number] if self._number < len(cache.layers) else None
        if not _is_plain(cache) or not _is_plain(layer):
            return None
        # New tensor objects over the same memory; those that require gradients stay themselves.
        own = self._twin(layer, {
            name: held.detach() if isinstance(held, Tensor) and not (held.requires_grad and torch.is_grad_enabled())
            else held for name, held in vars(layer).items()
        })  # fmt: skip
        return self._twin(cache, {**vars(cache), "layers": [own]})

    def _named(self, cache: Any) -> Any:
        """A cache of several caches, as of encoder and decoder; entries by layer number move to 0."""
        if not _is_plain(cache):
            return None
        names = dict(vars(cache))
        for name, held in vars(cache).items():
            if _is_layered(held):
                names[name] = self._layered(held)
                if names[name] is None:
                    return None
            elif type(held) is dict and held and all(type(key) is int for key in held):
                names[name] = {0: held[self._number]} if self._number in held else {}
                self._numbered.append((held, names[name]))
        return self._twin(cache, names)

    def _twin(self, value: Any, names: dict[str, Any]) -> Any:
        made = empty_like(value)
        vars(made).update(names)
        self._pairs.append((vars(value), vars(made), dict(names)))
        return made

    def settle(self) -> None:
        """Write attributes that were rebound back to the cache and its layer."""
        for held, now, before in self._pairs:
            for name in before.keys() - now.keys():
                held.pop(name, None)
            for name, value in now.items():
                if value is not before.get(name, _GONE):
                    held[name] = value
        for numbered, own in self._numbered:
            if 0 in own:
                numbered[self._number] = own[0]


def _is_plain(value: Any) -> bool:
    return isinstance(getattr(value, "__dict__", None), dict) and not slots_of(type(value))


def _handed(result: Any, alone: Any, cache: Any) -> Any:
    """A block's result with the original cache in place of its own."""
    if result is alone:
        return cache
    if type(result) is tuple:
        return tuple(_handed(item, alone, cache) for item in result)
    return result
