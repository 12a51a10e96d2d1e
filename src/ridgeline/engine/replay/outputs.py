"""How the result of a recorded call is made again at every replay: same types, same aliasing, fresh containers."""

from __future__ import annotations

import enum
import types
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.engine.pytree import SEALED, attributes, empty_like, item_setter, remade_tuple, set_attributes
from ridgeline.engine.replay.static_inputs import extent, view_of
from ridgeline.errors import NotGraphable

Maker = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Any]], Any]
"""From the outputs of this replay, the caller's tensors and the caller's containers, a value for the caller."""

_WORDS = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, torch.layout,
          torch.memory_format, range, type(Ellipsis))  # fmt: skip
_CONSTANT = (*_WORDS, slice, enum.Enum, frozenset, type, nn.Module, types.BuiltinFunctionType, types.ModuleType)


@dataclass(slots=True)
class Scene:
    """What a recorded result can refer to besides memory of its own."""

    device_type: str
    inputs: dict[int, int]
    """``id`` of a tensor given to the recording → its place among the caller's."""
    input_storages: dict[int, tuple[int, int]]
    """Storage → place of an input in it, and where that input begins there, in bytes."""
    containers: dict[int, int]
    model_tensors: dict[int, Tensor]
    model_storages: dict[int, Tensor]
    known: set[int]
    outputs: list[Tensor] = field(default_factory=list)
    made: dict[int, Any] = field(default_factory=dict)
    """Containers made so far in this replay that are referred to more than once; emptied after it, since results that
    somebody holds are in the way of the next (CLIP's, in its results by name and by attribute, were)."""
    returned: set[int] = field(default_factory=set)
    """``id`` of every tensor of a result whose gradients are wanted: views of others among them stay views of them."""
    bases: list[Tensor] = field(default_factory=list)
    """What several results are views of that is no result itself: recorded as one, which they stay views of."""
    _placed: dict[int, int] = field(default_factory=dict)
    _met: dict[int, Any] = field(default_factory=dict)
    _shared: set[int] = field(default_factory=set)

    def maker(self, value: Any) -> Maker:
        """How to make a value again."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if id(value) in self.known or (isinstance(value, _CONSTANT) and _is_constant(value, self.known)):
            return lambda lent, given, held: value
        place = self.containers.get(id(value))
        if place is not None:
            return lambda lent, given, held: held[place]
        if isinstance(value, types.FunctionType | types.MethodType):
            return self._function(value)
        if isinstance(value, Iterator | torch.Generator):
            raise NotGraphable(f"it returns a {type(value).__name__}, which runs Python when it is read")
        if isinstance(value, set) and all(map(_is_plain, value)):
            return lambda lent, given, held: set(value)
        if isinstance(value, (*_CONSTANT, *SEALED, set)):
            raise NotGraphable(f"it returns a {type(value).__name__} that holds more than plain values")
        if isinstance(value, tuple):
            return self._tuple(value)
        return self._container(value)

    def _function(self, value: Any) -> Maker:
        """A function that is somebody's; one that the call made holds what it was made with."""
        holds = getattr(value, "__closure__", None) or value.__defaults__ or value.__kwdefaults__
        owned = isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module | type)
        if holds or (isinstance(value, types.MethodType) and not owned):
            raise NotGraphable(f"it returns a function ({value.__qualname__}), which may hold what this call made")
        return lambda lent, given, held: value

    def settle(self) -> None:
        """Lets go of the recorded result; what is left are the ways to make it again."""
        self._met.clear()
        self._placed.clear()
        self.bases.clear()

    def _tensor(self, value: Tensor) -> Maker:
        place = self.inputs.get(id(value))
        if place is not None:
            return lambda lent, given, held: given[place]
        if id(value) in self.model_tensors:
            return lambda lent, given, held: value
        if type(value) is not Tensor or value.layout is not torch.strided or value.is_conj() or value.is_neg():
            lazy = " that is lazily conjugated or negated" if value.is_conj() or value.is_neg() else ""
            raise NotGraphable(f"it returns a tensor of type {type(value).__name__}, layout {value.layout}{lazy}")
        if marks := [name for name in value.__dict__ if not name.startswith("_")]:
            raise NotGraphable(f"it returns a tensor with an attribute of its own ({marks[0]})")
        storage = value.untyped_storage()._cdata
        if storage in self.input_storages:
            return self._view_of_input(value, *self.input_storages[storage])
        if storage in self.model_storages:
            return _view_of_model(value, self.model_storages[storage])
        if value.device.type != self.device_type:
            return lambda lent, given, held: value.clone()
        if value.requires_grad and value._is_view() and self._is_kept(value):
            return self._view_of_output(value)
        index = self._place(value)
        return lambda lent, given, held: lent[index]

    def returns(self, tensors: Sequence[Tensor]) -> None:
        """Says what a result whose gradients are wanted is made of."""
        self.returned = {id(tensor) for tensor in tensors}
        bases = [tensor._base for tensor in tensors if tensor.requires_grad and tensor._base is not None]
        num = Counter(map(id, bases))
        self.bases = [base for base in bases if num[id(base)] > 1]

    def _is_kept(self, value: Tensor) -> bool:
        """Whether a view's base is recorded as a result, of the same type."""
        base = value._base
        known = id(base) in self.returned or any(base is each for each in self.bases)
        return base is not None and known and base.dtype == value.dtype

    def _place(self, value: Tensor) -> int:
        index = self._placed.setdefault(id(value), len(self.outputs))
        if index == len(self.outputs):
            self.outputs.append(value)
        return index

    def _view_of_output(self, value: Tensor) -> Maker:
        """Gradients flow back through the view to the result it is a view of."""
        assert value._base is not None
        index, size, stride = self._place(value._base), value.shape, value.stride()
        distance = value.storage_offset() - value._base.storage_offset()

        def make(lent: Sequence[Tensor], given: Sequence[Tensor], held: Sequence[Any]) -> Tensor:
            return lent[index].as_strided(size, stride, lent[index].storage_offset() + distance)

        return make

    def _view_of_input(self, value: Tensor, place: int, start: int) -> Maker:
        dtype, size, stride = value.dtype, value.shape, value.stride()
        distance = extent(value)[0] - start

        def make(lent: Sequence[Tensor], given: Sequence[Tensor], held: Sequence[Any]) -> Tensor:
            base = given[place]
            return _seen_as(base, dtype, base.storage_offset() * base.element_size() + distance, size, stride)

        return make

    def _tuple(self, value: tuple[Any, ...]) -> Maker:
        cls, makers = type(value), [self.maker(item) for item in value]
        if cls is tuple and len(makers) == 1:
            only = makers[0]
            return lambda lent, given, held: (only(lent, given, held),)
        return lambda lent, given, held: remade_tuple(cls, [make(lent, given, held) for make in makers])

    def _container(self, value: Any) -> Maker:
        held_by_name = attributes(value)
        if not isinstance(value, list | deque | dict) and held_by_name is None:
            raise NotGraphable(f"it returns a {type(value).__name__}, which cannot be made again")
        key = id(value)
        if key in self._met:  # the same object again, perhaps inside itself
            self._shared.add(key)
            return lambda lent, given, held: self.made[key]
        self._met[key] = value
        blank = empty_like(value)
        items = self._items(value)
        named = [(name, self.maker(item)) for name, item in (held_by_name or {}).items()]

        def make(lent: Sequence[Tensor], given: Sequence[Tensor], held: Sequence[Any]) -> Any:
            made = empty_like(blank)
            if key in self._shared:
                self.made[key] = made
            items(made, lent, given, held)
            if named:
                set_attributes(made, {name: maker(lent, given, held) for name, maker in named})
            return made

        return make

    def _items(self, value: Any) -> Callable[..., None]:
        if isinstance(value, list | deque):
            makers = [self.maker(item) for item in value]
            return lambda made, *around: made.extend([make(*around) for make in makers])
        if isinstance(value, dict):
            if strange := [key for key in value if not _is_plain(key) and not isinstance(key, _KEYS)]:
                raise NotGraphable(f"it returns a dictionary with a {type(strange[0]).__name__} for a key")
            keyed = [(key, self.maker(item)) for key, item in value.items()]
            put = item_setter(type(value))

            def fill(made: Any, *around: Any) -> None:
                for key, make in keyed:
                    put(made, key, make(*around))

            return fill
        return lambda made, *around: None


_KEYS = (type, nn.Module, types.FunctionType, enum.Enum)


def _is_plain(value: Any) -> bool:
    """Whether a value holds nothing that a call could have made: a word, a number, or several."""
    if isinstance(value, tuple | frozenset):
        return all(map(_is_plain, value))
    return isinstance(value, (*_WORDS, enum.Enum)) and not (attributes(value) and not isinstance(value, enum.Enum))


def _is_constant(value: Any, known: Set[int]) -> bool:
    """Whether a value that cannot change holds nothing that a call made."""
    if isinstance(value, slice):
        return all(map(_is_plain, (value.start, value.stop, value.step)))
    if isinstance(value, nn.Module):
        return id(value) in known
    if isinstance(value, type):
        return not any(isinstance(held, Tensor) for held in vars(value).values())
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, types.ModuleType | type)
    return isinstance(value, types.ModuleType) or _is_plain(value)


def _view_of_model(value: Tensor, base: Tensor) -> Maker:
    dtype, size, stride, start = value.dtype, value.shape, value.stride(), extent(value)[0]
    if base.requires_grad and not (value._base is not None and value._base.requires_grad):
        base = base.detach()
    return lambda lent, given, held: _seen_as(base, dtype, start, size, stride)


def _seen_as(base: Tensor, dtype: torch.dtype, start: int, size: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """A view, known to autograd as one where PyTorch has a way to make it."""
    if dtype == base.dtype:
        return base.as_strided(size, stride, start // base.element_size())
    return view_of(base, dtype, start, size, stride)


# --- what a call does to the containers it is given

Effect = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Any]], None]


def shots(containers: Sequence[Any]) -> list[tuple[Any, Any, dict[str, Any]]]:
    """What containers hold now."""
    return [(box, _contents(box), dict(attributes(box) or {})) for box in containers]


def _contents(box: Any) -> Any:
    if isinstance(box, dict):
        return dict(box)
    return list(box) if isinstance(box, list | deque) else None


def effects(before: Sequence[tuple[Any, Any, dict[str, Any]]], scene: Scene) -> list[Effect]:
    """What has to be done to the caller's containers so that they hold what these hold now."""
    found: list[Effect] = []
    for place, (box, contents, named) in enumerate(before):
        if isinstance(box, dict):
            found += _changed(contents, dict(box), place, scene, _set_item(type(box)), lambda held, key: held.pop(key))
            found += _ordered(contents, list(box), place, _set_item(type(box)))
        elif contents is not None and not _identical(contents, list(box)):
            found.append(_relist([scene.maker(item) for item in box], place))
        found += _changed(named, dict(attributes(box) or {}), place, scene,
                          lambda held, name, value: set_attributes(held, {name: value}), _drop)  # fmt: skip
    return found


def _set_item(cls: type) -> Callable[[Any, Any, Any], None]:
    return item_setter(cls)


def _drop(held: Any, name: str) -> None:
    object.__delattr__(held, name)


def _identical(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b))


def _changed(was: dict[Any, Any], now: dict[Any, Any], place: int, scene: Scene,
             put: Callable[[Any, Any, Any], None], drop: Callable[[Any, Any], Any]) -> list[Effect]:  # fmt: skip
    gone = [key for key in was if key not in now]
    new = [(key, scene.maker(value)) for key, value in now.items() if key not in was or was[key] is not value]

    def apply(lent: Sequence[Tensor], given: Sequence[Tensor], held: Sequence[Any]) -> None:
        box = held[place]
        for key in gone:
            drop(box, key)
        for key, make in new:
            put(box, key, make(lent, given, held))

    return [apply] if gone or new else []


def _ordered(was: dict[Any, Any], now: list[Any], place: int, put: Callable[[Any, Any, Any], None]) -> list[Effect]:
    """A dictionary's keys in the order in which a call left them, where it took some out and put them back."""
    kept = [key for key in was if key in now]
    if [*kept, *(key for key in now if key not in was)] == now:
        return []

    def apply(lent: Sequence[Tensor], given: Sequence[Tensor], held: Sequence[Any]) -> None:
        box = held[place]
        for key in now:
            put(box, key, box.pop(key))

    return [apply]


def _relist(makers: list[Maker], place: int) -> Effect:
    def apply(lent: Sequence[Tensor], given: Sequence[Tensor], held: Sequence[Any]) -> None:
        box = held[place]
        items = [make(lent, given, held) for make in makers]
        box.clear()
        box.extend(items)

    return apply
