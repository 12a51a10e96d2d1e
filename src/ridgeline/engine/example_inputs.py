"""What a model is called with: copies that keep aliasing and layout, and fresh values of the same kind."""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from ridgeline.engine.guards.check import Watch
from ridgeline.errors import OptimizeError

Made = TypeVar("Made")
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size, type, nn.Module)
_JITTER = 0.25
_MASKING = -1e4
"""A float at or below this is a masked place, not a value: it stays as it is."""
WEIGHTS_BYTES = 1 << 28
"""Weights up to this are all copied for a first call, to see whether it writes to them."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arguments of one call."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def reused(self) -> Inputs:
        """New containers around the same tensors: a call may append to a cache without the next call seeing it."""
        return self._walked(_Copier(lambda t: t))

    def copied(self) -> Inputs:
        """Tensors of their own, with the layout and the aliasing of these."""
        return self._walked(_Copier(_Cloner()))

    def converted(self, dtype: torch.dtype) -> Inputs:
        """Copies with every floating-point tensor in another precision, complex ones of 32 bits and more too."""
        cloner = _Cloner()
        return self._walked(_Copier(lambda t: _converted(cloner(t), dtype)))

    def fresh(self, seed: int, *, integers: bool = True) -> Inputs:
        """Other values that are legal wherever these are: see ``fresh_values``; without ``integers`` those stay."""
        made = self.copied()
        for i, tensor in enumerate(made.tensors()):
            if not _overlapping(tensor) and (integers or tensor.is_floating_point()):
                tensor.detach().copy_(fresh_values(tensor, seed * 1000 + i))
        return made

    def taken(self, seed: int, call: Callable[[Inputs], Made]) -> tuple[Inputs, Made]:
        """Fresh inputs that a call takes, and what it makes of a copy of them.

        Integers may be bound by more than a table's size: the longest of some lengths is the length of a batch, and
        there are as many places for an image in a text as the image has patches. Where a call raises they stay as they
        are, and where it still does everything does.
        """
        for integers in (True, False):
            found = self.fresh(seed, integers=integers)
            try:
                return found, call(found.copied())
            except Exception:  # whatever it does not take is not what candidates are judged on
                continue
        found = self.copied()
        return found, call(found.copied())

    def tensors(self) -> list[Tensor]:
        return list(dict.fromkeys(tensor for _, tensor in self.named()))

    @property
    def has_cache(self) -> bool:
        """Whether a key-value cache is among the arguments: layers then ask for their own entry by number."""
        return any(is_cache(value) for value in (*self.args, *self.kwargs.values()))

    def named(self) -> list[tuple[str, Tensor]]:
        """Every tensor with its path, containers and caches looked into."""
        return list(leaves((self.args, dict(self.kwargs))))

    def _walked(self, copier: _Copier) -> Inputs:
        return Inputs(tuple(copier.copy(value) for value in self.args),
                      {key: copier.copy(value) for key, value in self.kwargs.items()})  # fmt: skip


def leaves(item: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside containers, model outputs, caches and other objects, in a fixed order."""
    if isinstance(item, Tensor):
        yield path, item
        return
    if isinstance(item, _PLAIN) or (callable(item) and not hasattr(item, "__dict__")):
        return
    seen = set() if seen is None else seen
    if id(item) in seen:
        return
    seen.add(id(item))
    for key, value in _parts(item):
        yield from leaves(value, f"{path}.{key}" if path else str(key), seen)


def _overlapping(tensor: Tensor) -> bool:
    """Expanded tensors hold a number in several places: they stay as they are."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _parts(item: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(item, Mapping):
        yield from item.items()
    elif isinstance(item, (list, tuple)):
        yield from enumerate(item)
    elif hasattr(item, "__dict__"):
        yield from vars(item).items()


def fresh_values(tensor: Tensor, seed: int) -> Tensor:
    """New values for a tensor such that every one of them is legal wherever the old one was.

    Indices are drawn from what lies between the smallest positive one and the old one, so no table is overrun; flags,
    sorted integers (offsets, positions) and masks stay; floats keep their sign and size within a quarter, and, every
    second time, change sign where both signs occur (so that a branch on a sum goes the other way).
    """
    generator = torch.Generator(tensor.device).manual_seed(seed)
    if tensor.numel() == 0 or tensor.is_complex() or tensor.dtype == torch.bool:
        return tensor.detach()
    if not tensor.is_floating_point():
        return _fresh_integers(tensor.detach(), generator)
    return _fresh_floats(tensor.detach(), generator, flip=(seed // 1000) % 2 == 1)


def _fresh_integers(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if int(tensor.max()) <= 1 or _sorted(tensor):
        return tensor.clone()
    least = int(tensor[tensor > 0].min())
    share = torch.rand(tensor.shape, generator=generator, device=tensor.device, dtype=torch.float64)
    drawn = least + (share * (tensor - least + 1).clamp(min=1)).floor()
    return torch.where(tensor > 0, torch.minimum(drawn.to(tensor.dtype), tensor), tensor)


def _sorted(tensor: Tensor) -> bool:
    """Offsets, positions, lengths that add up or that fall are in order along their last dim, and mean it."""
    if tensor.dim() == 0 or tensor.shape[-1] < 2:
        return False
    steps = tensor.diff(dim=-1)
    return bool((steps >= 0).all()) or bool((steps <= 0).all())


def _fresh_floats(tensor: Tensor, generator: torch.Generator, flip: bool) -> Tensor:
    wide = tensor.to(torch.float32) if tensor.dtype.itemsize < 4 else tensor
    if bool((wide <= _MASKING).any()):
        return tensor.clone()
    noise = torch.rand(wide.shape, generator=generator, device=wide.device, dtype=wide.dtype)
    made = wide * (1 - _JITTER + 2 * _JITTER * noise)
    both_signs = bool((wide < 0).any()) and bool((wide > 0).any())
    return (-made if flip and both_signs else made).to(tensor.dtype)


class _Cloner:
    """Clones of tensors; those that share memory share it in the copies too."""

    def __init__(self) -> None:
        self.storages: dict[tuple[torch.device, int], Any] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_meta:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        storage = tensor.untyped_storage()
        key = (tensor.device, storage.data_ptr())
        if key not in self.storages:
            self.storages[key] = storage.clone()
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        made.set_(self.storages[key], tensor.storage_offset(), tensor.shape, tensor.stride())
        return made.requires_grad_(tensor.requires_grad)


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    kind = dtype.to_complex() if tensor.is_complex() and dtype.itemsize >= 4 else dtype
    if not (tensor.is_floating_point() or kind.is_complex) or tensor.dtype == kind:
        return tensor
    return tensor.detach().to(kind).requires_grad_(tensor.requires_grad)


class _Copier:
    """Rebuilds containers and the objects that hold tensors; what holds none is handed on as it is."""

    def __init__(self, replace: Callable[[Tensor], Tensor]) -> None:
        self.replace = replace
        self.tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self.memo: dict[int, tuple[Any, Any]] = {}

    def copy(self, item: Any) -> Any:
        if isinstance(item, Tensor):
            if id(item) not in self.tensors:
                self.tensors[id(item)] = (item, self.replace(item))
            return self.tensors[id(item)][1]
        if isinstance(item, _PLAIN) or (callable(item) and not hasattr(item, "__dict__")):
            return item
        if id(item) not in self.memo:
            self.memo[id(item)] = (item, item)
            self.memo[id(item)] = (item, self._container(item))
        return self.memo[id(item)][1]

    def _container(self, item: Any) -> Any:
        if isinstance(item, dict):
            made = copy.copy(item)
            for key, value in item.items():
                made[key] = self.copy(value)
            return made
        if isinstance(item, tuple):
            parts = [self.copy(value) for value in item]
            return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
        if isinstance(item, list):
            return type(item)([self.copy(value) for value in item])
        if hasattr(item, "__dict__") and (is_cache(item) or next(leaves(item), None) is not None):
            return self._object(item)
        return item

    def _object(self, item: Any) -> Any:
        made = copy.copy(item)
        self.memo[id(item)] = (item, made)
        for key, value in list(vars(item).items()):
            object.__setattr__(made, key, self.copy(value))
        return made


def is_cache(item: Any) -> bool:
    """An empty cache holds no tensor yet, and the call fills it."""
    return any(kind.__name__ in ("Cache", "CacheLayerMixin") for kind in type(item).__mro__)


class Before:
    """The tensors of some inputs as they were before a call, to say which of them the call wrote to or put in."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.kept = [(tensor, tensor.detach().clone()) for _, tensor in inputs.named()]

    def written(self) -> list[int]:
        """Places of the tensors whose values are others now."""
        return [i for i, (tensor, kept) in enumerate(self.kept) if not same(tensor, kept)]

    def changed(self) -> list[tuple[str, Tensor]]:
        """Tensors that were written to, and those that are new, with their paths."""
        known = {id(tensor) for tensor, _ in self.kept}
        written = {id(self.kept[i][0]) for i in self.written()}
        return [(name, t) for name, t in self.inputs.named() if id(t) not in known or id(t) in written]


def same(tensor: Tensor, kept: Tensor) -> bool:
    """Whether two tensors hold the same numbers, what is not a number included."""
    if tensor.shape != kept.shape or tensor.layout != kept.layout:
        return False
    if tensor.layout is not torch.strided:
        return all(map(same, _inside(tensor), _inside(kept)))
    return torch.equal(tensor, kept) or bool(((tensor == kept) | (tensor != tensor) & (kept != kept)).all())


def _inside(tensor: Tensor) -> list[Tensor]:
    """The tensors that a sparse one is made of."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    places = (tensor.crow_indices, tensor.col_indices) if rows else (tensor.ccol_indices, tensor.row_indices)
    return [*(each() for each in places), tensor.values()]


_WRITTEN: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()
"""Names of the parameters that calls of a model were seen to write to: fifty steps put them back too."""


class State:
    """What calls may change about a model (buffers, attributes, lists and dictionaries it holds), to be put back."""

    def __init__(self, model: nn.Module) -> None:
        self.watch = Watch(model)
        self.rebinds = False  # whether calls change more than values: names, lists, counters
        self.random = RandomState()
        self.moving = [each for module in model.modules() for each in _moving(vars(module))]
        self.given: list[Callable[[], Any]] = []  # the same for what calls are given
        written = _WRITTEN.get(model, frozenset())
        self.tensors = [(name, t, t.detach().clone()) for name, t in self.watch.tensors.values()
                        if (name in written or not isinstance(t, nn.Parameter)) and not t.is_meta]  # fmt: skip
        self.weights: list[tuple[str, Tensor, Tensor]] = []  # parameters that calls write to

    def looking_for_written_weights(self, model: nn.Module) -> Callable[[], None]:
        """Keeps weights as they are before a first call; the returned function finds those that it wrote to."""
        suspects, known = {id(t): t for t in _suspected(model)}, {name for name, *_ in self.tensors}
        named = [(name, t) for name, t in self.watch.tensors.values()
                 if id(t) in suspects and name not in known and not t.is_meta]  # fmt: skip
        kept = [(name, tensor, tensor.detach().clone()) for name, tensor in named]

        def find() -> None:
            self.weights = [each for each in kept if not same(each[1].detach(), each[2])]
            self.tensors += self.weights
            _WRITTEN[model] = _WRITTEN.get(model, frozenset()) | {name for name, *_ in self.weights}
            kept.clear()

        return find

    def restore(self) -> None:
        """Everything as it was: values in place and, where calls change them, names bound as they were."""
        if self.rebinds:
            self.watch.restore()
        for put_back in (*self.moving, *self.given):
            put_back()
        for _, tensor, kept in self.tensors:
            if tensor.shape == kept.shape and not same(tensor, kept):
                with torch.no_grad(), writable(tensor):
                    tensor.detach().copy_(kept)
        self.random.restore()

    def changed(self) -> list[tuple[str, Tensor]]:
        """Tensors that are no longer what they were, by the names they are held under."""
        return [(f"state {name}", tensor) for name, tensor, kept in self.tensors if not same(tensor, kept)]


def _suspected(model: nn.Module) -> list[Tensor]:
    """Parameters that a call may write to: any, where a copy of all is small, else of layers that are known for it."""
    found = [p for p in model.parameters() if type(p) is nn.Parameter and p.layout is torch.strided]
    if sum(p.nbytes for p in found) <= WEIGHTS_BYTES:
        return list(found)
    known = {id(m.weight) for m in model.modules() if getattr(m, "max_norm", None) is not None and hasattr(m, "weight")}
    return [p for p in found if id(p) in known]


def writable(tensor: Tensor) -> AbstractContextManager[Any]:
    """Tensors made in inference mode are written to in it."""
    return torch.inference_mode() if tensor.is_inference() else nullcontext()


def given_dice(inputs: Inputs) -> list[Callable[[], Any]]:
    """How to put back generators that a call is given; an iterator cannot be, and the first call would use it up."""
    held = {f"args[{i}]": value for i, value in enumerate(inputs.args)} | dict(inputs.kwargs)
    for name, value in held.items():
        if _is_used_up(value):
            raise OptimizeError(f"{name} is an iterator, which one call uses up: give a list instead")
    return list(_moving(held))


def _moving(held: dict[str, Any]) -> Iterator[Callable[[], Any]]:
    """How to put back what moves when it is used: dice and iterators that a module keeps."""
    for name, value in list(held.items()):
        if isinstance(value, random.Random):
            yield partial(value.setstate, value.getstate())
        elif isinstance(value, np.random.RandomState):
            yield partial(value.set_state, value.get_state())
        elif isinstance(value, np.random.Generator):
            yield partial(setattr, value.bit_generator, "state", value.bit_generator.state)
        elif isinstance(value, torch.Generator):
            yield partial(value.set_state, value.get_state())
        elif _is_used_up(value):
            yield _rewound(held, name, value)


def _is_used_up(value: Any) -> bool:
    """Whether something is an iterator; a weak proxy has all methods, and says that it is anything."""
    return isinstance(value, Iterator) and not isinstance(value, nn.Module) and type(value) not in weakref.ProxyTypes


def _rewound(held: dict[str, Any], name: str, iterator: Iterator[Any]) -> Callable[[], Any]:
    """An iterator is put back as a copy of what it was; one that cannot be copied makes the search impossible."""
    try:
        kept = copy.deepcopy(iterator)
    except TypeError as error:
        raise OptimizeError(f"the model keeps an iterator in .{name}, which calls would use up: {error}") from error
    return lambda: held.__setitem__(name, copy.deepcopy(kept))


class RandomState:
    """The random number generators' states, of the host (PyTorch's, Python's, numpy's) and of every device in use."""

    def __init__(self) -> None:
        self.python = random.getstate()
        self.numpy: Any = np.random.get_state()
        self.host = torch.get_rng_state()
        self.devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.host)
        if self.devices:
            torch.cuda.set_rng_state_all(self.devices)

    def moved(self) -> bool:
        """Whether numbers were drawn since."""
        now = RandomState()
        pairs = zip([self.host, *self.devices], [now.host, *now.devices], strict=True)
        drawn = now.python != self.python or not np.array_equal(now.numpy[1], self.numpy[1])
        return drawn or now.numpy[2] != self.numpy[2] or not all(torch.equal(a, b) for a, b in pairs)
