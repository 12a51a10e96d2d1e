"""A block's own place in a key-value cache: equal blocks ask for theirs by number, and compile to one graph a block.

While a block runs compiled, it is told that it is the first, and is handed a cache of one layer, its own. So all blocks
look alike to the tracer. Tensors of the layer are the same memory as other objects: those that a cache has marked as
staying where they are would be compared by identity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ridgeline.optimizer.tree import empty_like, slots_of

NUMBER = "layer_idx"
"""What transformers' blocks call their place."""
_GONE = object()


class Place:
    """The number that a block and its parts ask a cache with; none where they have none or several."""

    def __init__(self, block: nn.Module) -> None:
        held = [vars(part) for part in block.modules() if type(vars(part).get(NUMBER)) is int]
        numbers = {names[NUMBER] for names in held}
        self.number = numbers.pop() if len(numbers) == 1 else None
        self._held = held

    def call(self, run: Callable[..., Any], block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The block compiled, as the first of a cache of one where it is given a cache."""
        caches = {id(value): value for value in (*args, *kwargs.values()) if is_cache(value)}
        if self.number is None or len(caches) != 1:
            return run(block, *args, **kwargs)
        (cache,) = caches.values()
        alone = Alone.of(cache, self.number)
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
    """An object with a list of layers that are updated by number."""
    layers = getattr(value, "layers", None)
    return isinstance(layers, list) and callable(getattr(value, "update", None)) and not isinstance(value, nn.Module)


class Alone:
    """A cache of one layer, which is another cache's; ``settle`` tells the other what was changed."""

    def __init__(self, cache: Any, layer: Any) -> None:
        self._pairs = []
        own = self._twin(layer, {n: v.detach() if isinstance(v, Tensor) else v for n, v in vars(layer).items()})
        self.cache = self._twin(cache, {**vars(cache), "layers": [own]})

    @classmethod
    def of(cls, cache: Any, number: int) -> Alone | None:
        """None where the cache has no such layer or one that is not made of named things."""
        grown = getattr(cache, "layer_class_to_replicate", None)
        while grown is not None and len(cache.layers) <= number:
            cache.layers.append(grown())
        layer = cache.layers[number] if number < len(cache.layers) else None
        plain = all(isinstance(getattr(x, "__dict__", None), dict) and not slots_of(type(x)) for x in (cache, layer))
        return cls(cache, layer) if plain and layer is not None else None

    def _twin(self, value: Any, names: dict[str, Any]) -> Any:
        made = empty_like(value)
        vars(made).update(names)
        self._pairs.append((vars(value), vars(made), dict(names)))
        return made

    def settle(self) -> None:
        """What was given another meaning since is given it in the cache and its layer."""
        for held, now, before in self._pairs:
            for name in before.keys() - now.keys():
                held.pop(name, None)
            for name, value in now.items():
                if value is not before.get(name, _GONE):
                    held[name] = value


def _handed(result: Any, alone: Any, cache: Any) -> Any:
    """What a block returns, with the cache in the place of the one it was handed."""
    if result is alone:
        return cache
    if type(result) is tuple:
        return tuple(_handed(item, alone, cache) for item in result)
    return result
