"""Whether anything a model reads besides its inputs has changed since it was recorded, in microseconds.

A recording holds addresses and forgets Python. So what Python would have looked at is watched: parameters and buffers
(which object, which address), attributes of modules and of the objects they hold, lists, hooks, the names that the
model's code reads of its own and of other modules, and the functions and classes that ran, in whose place others may be
put. Dictionaries are compared by the version number the interpreter keeps of them.
"""

from __future__ import annotations

import array
import builtins
import ctypes
import dis
import enum
import gc
import inspect
import io
import itertools
import logging
import math
import os
import random
import sys
import threading
import types
import weakref
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from operator import attrgetter, contains, getitem, is_
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_globals
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils import _python_dispatch
from torch.utils.hooks import RemovableHandle

from ridgeline.engine import OWN_CODE
from ridgeline.engine.guards.dict_version import stillness, version
from ridgeline.engine.guards.native import address, form, glance
from ridgeline.engine.pytree import slots_of
from ridgeline.engine.replay.static_inputs import extent, view_of
from ridgeline.errors import NotGraphable

HOOKS = ("_backward_pre_hooks", "_backward_hooks", "_forward_hooks", "_forward_pre_hooks")
_INNER = ("_parameters", "_buffers", "_modules")
_BOOKKEEPING = frozenset((
    *HOOKS, *_INNER, "_non_persistent_buffers_set", "_is_full_backward_hook", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
))  # fmt: skip
_WATCHED_INSIDE = frozenset((*HOOKS, *_INNER))
_INCIDENTAL = ("_is_torch_compile", "_dynamo_")
"""Beginnings of what torch.compile leaves on models and weights, which no model reads."""
_GLOBAL_HOOKS = ("_global_backward_pre_hooks", "_global_backward_hooks", "_global_forward_hooks",
                 "_global_forward_pre_hooks")  # fmt: skip
Free = dict[types.CodeType, set[tuple[int, ...]]]
"""What variables of functions that ran held which they have from around them, by ``id``."""
Lookups = Sequence[tuple[Any, str]]
"""Whom code asked for an attribute by a word, and the word; ``sys.modules`` for a module that it imported."""
_PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size)
_CLOSED = (types.BuiltinFunctionType, torch.Generator)
_DEPTH = 4
"""Objects within objects are watched this far whatever they are, and farther where the code that ran names the way."""
_NAMED_DEPTH = 32
_LONG = 1024
"""Lists longer than this are compared by length, and larger arrays by shape, unless the code that runs names them."""
_RUNTIME = frozenset("logging threading _thread weakref torch re functools concurrent asyncio multiprocessing".split())
_MODELED = ("torch.distributions", "torch.nn.utils.rnn")
"""Parts of PyTorch whose objects are a model's settings."""
_FEW = 64
_OF_C = (ctypes._SimpleCData, ctypes.Structure, ctypes.Union, ctypes.Array)
_ANSWERING = frozenset("is_set locked qsize done cancelled is_alive isEnabledFor getEffectiveLevel".split())
"""Questions without arguments that objects of the interpreter's answer, and that code may branch on."""
_ANSWERING_HOMES = frozenset("threading _thread queue _queue logging multiprocessing asyncio concurrent".split())
_NOTED = frozenset(("getattr", "hasattr"))
"""Built-in names that stand for something else while somebody looks on."""
_LINEAR = frozenset((*vars(nn.Linear(1, 1)), "training"))
_MOST = 20_000
_HARMLESS_HOOKS = ("transformers.utils.output_capturing", "transformers.utils.generic")
"""Hooks that only collect what the same call returns."""
_FLAGGING_HOOKS = (("transformers.modeling_utils", "make_inputs_require_grads"),)
"""Hooks that only say of a result that gradients flow through it, which a recording has done once for all."""
_MAKING_HOOKS: tuple[type, ...] = (WeightNorm, SpectralNorm)
"""Hooks that make a weight of parameters before every call: what they compute is recorded with the call."""


@dataclass(slots=True)
class _Name:
    """A name in a module's or a class's dictionary, and what it stood for; ``owner`` is the class."""

    path: str
    holder: Any
    key: str
    value: Any
    owner: type | None = None


@dataclass(slots=True)
class _Probe:
    """Something whose contents have to be read to be compared: sets, arrays, iterators, objects with slots."""

    path: str
    value: Any
    read: Callable[[], Any]
    was: Any
    said: str = "changed"

    def restore(self) -> None:
        """Puts the contents back where that can be done."""
        if self.read() == self.was:
            return
        if isinstance(self.value, set) and isinstance(self.was, set | tuple):
            self.value.clear()
            self.value.update(self.was if isinstance(self.was, set) else self.was[0])
        elif isinstance(self.value, io.BytesIO | io.StringIO):
            self.value.seek(self.was[0])
        elif isinstance(self.value, OrderedDict):
            for key in self.was if self.value.keys() == set(self.was) else ():
                self.value.move_to_end(key)
        elif isinstance(self.value, _OF_C):
            ctypes.memmove(ctypes.addressof(self.value), self.was, len(self.was))
        elif isinstance(self.value, memoryview):
            self.value.cast("B")[:] = self.was
        elif isinstance(self.value, bytearray | array.array):
            del self.value[:]
            self.value.extend(self.was) if isinstance(self.value, bytearray) else self.value.frombytes(self.was)
        elif isinstance(self.was, bytes):
            self.value[...] = sys.modules["numpy"].ndarray(self.value.shape, self.value.dtype, self.was)
        elif isinstance(self.was, list):
            for name, mark in self.was:
                if isinstance(mark, tuple):
                    object.__setattr__(self.value, name, mark[1])


class _Training:
    """Whether a linear layer is in training mode, which it does not look at."""

    __slots__ = ("held", "path", "was")

    def __init__(self, held: dict[str, Any]) -> None:
        self.path, self.held = "a linear layer's training", held
        self.was = self.read()

    def read(self) -> Any:
        return self.held.get("training")

    def restore(self) -> None:
        self.held["training"] = self.was


class _Asking:
    """Whether a weight asks for a gradient, and which it has."""

    __slots__ = ("path", "tensor", "was")

    def __init__(self, path: str, tensor: Tensor) -> None:
        self.path, self.tensor = f"{path}'s gradient", tensor
        self.was = self.read()

    def read(self) -> tuple[bool, int | None]:
        return self.tensor.requires_grad, None if self.tensor.grad is None else id(self.tensor.grad)

    def restore(self) -> None:
        """What it asked for, and no gradient where there was none; one that was replaced is its holder's."""
        self.tensor.requires_grad_(self.was[0])
        if self.was[1] is None:
            self.tensor.grad = None


_Switch = _Training | _Asking


@dataclass(slots=True)
class _Held:
    """A dictionary that is watched, the name of who owns it and what was in it."""

    owner: str
    held: dict[Any, Any]
    was: dict[Any, Any]
    derived: frozenset[str] = frozenset()  # names whose values are made anew by every call
    ordered: bool = True
    """Whether the order of its keys counts: not where they are attributes of a module, which nobody goes through."""

    def in_order(self) -> bool:
        """Whether its keys follow each other as they did, but for those that every call binds."""
        now, was = ([key for key in keys if key not in self.derived] for keys in (self.held, self.was))
        return now == was


@dataclass(slots=True)
class _Space:
    """Names of a module or a class that were followed to code that ran, and what they stood for."""

    owner: str
    held: dict[str, Any]
    was: dict[str, Any]
    cls: type | None = None

    def replaced(self) -> list[str]:
        return [f"{self.owner}.{key} was replaced" for key, value in self.was.items()
                if self.held.get(key, _GONE) is not value]  # fmt: skip


class Watch:
    """The state of a model besides its inputs, and whether it is still the same.

    ``hooks_only`` watches what a compiler does not guard by itself: hooks that come later, modules that are replaced.
    ``shared_weights`` leaves out where weights lie, and adds methods of the model's classes: for a call that reads the
    same weights and copies of all other attributes.
    ``given`` are functions and modules among the arguments, which are told from others but not looked into;
    ``without`` are modules that somebody else watches, ``noted`` names in dictionaries (by their ``id``) that every
    call binds anew.
    """

    def __init__(self, model: Any, given: Sequence[Any] = (), *, hooks_only: bool = False, shared_weights: bool = False,
                 without: Iterable[nn.Module] = (), noted: Mapping[int, set[Any]] | None = None) -> None:  # fmt: skip
        self._hooks_only, self._noted, self._shared_weights = hooks_only, noted or {}, shared_weights
        self._words: frozenset[str] | None = None
        self._frontier: list[tuple[str, Any, int]] = []
        self._namespaces: dict[int, tuple[str, types.ModuleType | type]] = {}
        self._linear: list[tuple[str, dict[str, Any]]] = []
        self._long: list[tuple[str, Any]] = []
        self._counted: list[dict[str, Any]] = []
        self.tensors: dict[int, tuple[str, Tensor]] = {}
        self.known: set[int] = set()
        self._dicts: list[_Held] = []
        self._lists: list[tuple[str, Any, list[Any]]] = []
        self._cells: list[tuple[str, Any, Any]] = []
        self._names: list[_Name] = []
        self._spaces: dict[int, _Space] = {}
        self._probes: list[_Probe] = []
        self._kinds: list[tuple[str, Any, type]] = []
        self._dict_of: list[tuple[str, Any, dict[str, Any]]] = []
        self._strangers: list[tuple[str, Any]] = []
        self._kept: list[Any] = []
        self._empties: list[dict[Any, Any]] = []
        self._unhooked: list[dict[Any, Any]] = [getattr(module_globals, name) for name in _GLOBAL_HOOKS]
        self._owners: dict[int, str] = {}
        self._seen: set[Any] = set(map(id, without))
        self._elsewhere: list[Tensor] = []
        self._contents_of: list[int] = []
        self._ran: list[types.FunctionType] = []
        self.root = model
        self._look(model)
        for each in given:
            named = each.__name__ if isinstance(each, type) else type(each).__name__
            self._hold(f"the {named} given", each, 0)
        self._switches = [] if hooks_only else [*map(_Training, self._counted), *self._flags()]
        self._remember()

    def _look(self, model: Any) -> None:
        if isinstance(model, nn.Module):
            self._seen |= set(map(id, model.modules()))
            for path, module in model.named_modules():
                self._module(path or type(module).__name__, module)
        elif not isinstance(model, types.FunctionType):
            self._hold(type(model).__name__, model, 0)
        if self._hooks_only:
            return
        functions = [model] if isinstance(model, types.FunctionType) else _methods(model)
        for function in functions:
            self._function(function, 0)

    def _flags(self) -> list[_Switch]:
        return [_Asking(path, p) for path, p in self.tensors.values() if type(p) is nn.Parameter and p.is_leaf]

    # --- what is watched --------------------------------------------------------------------------------------------

    def _module(self, path: str, module: nn.Module) -> None:
        held = module.__dict__
        self._kinds.append((path, module, type(module)))
        if self._hooks_only:
            for name in ("_modules", *HOOKS):
                self._dict(f"{path}.{name}", held.get(name, {}))
            self._written(type(module))
            return
        if self._shared_weights:
            self._written(type(module))
        if type(module) is nn.Linear and not _derived(held) and _is_bare(held):  # whose forward reads parameters alone
            self._counted.append(held)
            self._linear.append((path, held))
        else:
            self._dict(path, held, _derived(held))
        self.known.add(id(module))
        if not of_library(type(module)) and not installed(_file_of(type(module))):
            self._dict_of.append((path, module, held))
        if "parametrizations" in held.get("_modules", ()):
            self._name("parametrize's cache", vars(parametrize), "_cache_enabled")
        self._class(type(module))
        self._namespaces.setdefault(id(type(module)), (type(module).__name__, type(module)))
        if slots_of(type(module)):
            read = _reader(module)
            assert read is not None
            self._probes.append(_Probe(path, module, read, read()))
        for name in (*_INNER, *HOOKS):
            self._dict(f"{path}.{name}", held.get(name, {}))
        for inner in (held.get("_parameters", {}), held.get("_buffers", {})):
            for name, value in inner.items():
                if name not in self._noted.get(id(inner), ()):
                    self._hold(f"{path}.{name}", value, 0)
        for name, value in held.items():
            if name not in _BOOKKEEPING and name not in _derived(held) and name not in self._noted.get(id(held), ()):
                self._hold(f"{path}.{name}", value, 0)

    def _written(self, cls: type) -> None:
        """Methods of a class, in whose place others may be put: compilers trust that there are none."""
        for part in () if (cls, "methods") in self._seen else _parts(cls):
            own = not of_library(part)
            kept = {key: value for key, value in vars(part).items() if key == "forward" or own}
            self._space_of(part).was |= {k: value for k, value in kept.items() if isinstance(value, types.FunctionType)}
        self._seen.add((cls, "methods"))

    def _class(self, cls: type) -> None:
        """Plain values and containers on the classes of the model's own code."""
        for part in cls.__mro__:
            if (part, "class") in self._seen or of_library(part):
                continue
            self._seen.add((part, "class"))
            for key, value in list(vars(part).items()):
                if not key.startswith("__") and isinstance(value, (*_PLAIN, list, dict, set, Tensor)):
                    self._name(f"{part.__name__}.{key}", vars(part), key, part)

    def _dict(self, owner: str, held: dict[Any, Any], derived: frozenset[str] = frozenset()) -> None:
        if not isinstance(held, dict):  # a scripted module's parts, which cannot be replaced
            return
        if held:
            self._dicts.append(self._entry(owner, held, derived, ordered=owner.rpartition(".")[2] in _INNER))
        else:
            hooks = owner.rpartition(".")[2] in HOOKS
            (self._unhooked if hooks else self._empties).append(held)
            self._owners[id(held)] = owner

    def _entry(
        self, owner: str, held: dict[Any, Any], derived: frozenset[str] = frozenset(), *, ordered: bool = True
    ) -> _Held:
        noted = self._noted.get(id(held), set())
        was = {key: None if key in noted else value for key, value in raw(held).items()}  # notes are held by nobody
        return _Held(owner, held, was, derived | noted, ordered)

    def _hold(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, _PLAIN) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, UninitializedParameter | UninitializedBuffer):
            raise NotGraphable(f"{path} has no size yet: call the model once before it is optimized")
        if isinstance(value, Tensor):
            self.tensors[id(value)] = (path, value)
        elif isinstance(value, types.GeneratorType):
            raise NotGraphable(f"{path} is a generator, whose state cannot be watched")
        elif _goes_on(value):
            raise NotGraphable(f"{path} is a {type(value).__name__}, which goes on with every call that reads it")
        elif isinstance(value, types.FunctionType):
            self._function(value, depth)
        elif isinstance(value, types.MethodType):
            self._inside([(f"{path}.__self__", value.__self__), (path, value.__func__)], depth)
        elif isinstance(value, nn.Module):
            self._part(path, value)
        elif isinstance(value, types.ModuleType | type):
            self._namespaces.setdefault(id(value), (path, value))
        elif (held := _surroundings(value)) is not None:
            read = partial(_surrounding, value)
            self._probes.append(_Probe(path, value, read, read()))
            self._kept += held
            self._inside(((path, each) for each in held), depth)
        elif isinstance(value, types.MappingProxyType):
            self._inside(((path, each) for each in gc.get_referents(value)), depth)
        elif isinstance(value, _OF_C) or (isinstance(value, memoryview) and value.contiguous):
            self._probes.append(_Probe(path, value, read := partial(bytes, value), read()))
        elif _is_shared(value):
            self._inside([(path, value.get_obj())], depth)
        elif isinstance(value, partial):
            held = [(path, value.func), (f"{path}.args", value.args), (f"{path}.keywords", value.keywords)]
            self._inside(held, depth)
        elif type(value) in _WEAKLY:
            self._weakly(path, value, depth)
        elif isinstance(value, _WEAK):
            self._inside([(path, value.data)], depth)  # type: ignore[union-attr]
        elif isinstance(value, _CLOSED) or depth > _NAMED_DEPTH or len(self._seen) > _MOST:
            return
        elif _foreign(value):
            self._strangers.append((path, value))
        elif depth > _DEPTH and self._words is None:  # looked at once it is known what the code that runs asks for
            self._seen.discard(id(value))
            self._frontier.append((path, value, depth))
        else:
            self._contents_held(path, value, depth)

    def _weakly(self, path: str, value: Any, depth: int) -> None:
        """What a weak reference leads to, and whether it still does; it is not kept alive."""
        met = value() if isinstance(value, weakref.ref) else value.__repr__.__self__
        if met is None or id(met) in self._seen:
            return
        dead = partial(_is_dead, weakref.ref(met))
        self._probes.append(_Probe(path, None, dead, False))
        if isinstance(getattr(met, "__dict__", None), dict) and not isinstance(met, Tensor | nn.Module):
            self._seen.add(id(met))
            self._object(path, met, depth)
        elif not isinstance(met, types.FunctionType | type):
            raise NotGraphable(f"{path} is a weak reference to a {type(met).__name__}, which cannot be watched")

    def _contents_held(self, path: str, value: Any, depth: int) -> None:
        if _is_long(value):
            self._long.append((path, value))
        if (read := _reader(value)) is not None:
            was = read()
            self._probes.append(_Probe(path, value, read, set(was) if was is value else was))
            self._inside(((f"{path}.{name}", getattr(value, name, None)) for name in slots_of(type(value))), depth)
        if isinstance(value, dict):
            self.known.add(id(value))
            self._dicts.append(self._entry(path, value))
            if isinstance(value, OrderedDict) and len(value) < _LONG:  # which can be put in order without a new version
                self._probes.append(_Probe(path, value, order := partial(tuple, value), order()))
            kept = {key: item for key, item in raw(value).items() if key not in self._noted.get(id(value), ())}
            self._inside(((f"{path}[{key!r}]", item) for key, item in kept.items()), depth)
        elif isinstance(value, list | tuple | deque):
            self.known.add(id(value))
            if not isinstance(value, tuple):
                self._lists.append((path, value, list(value)))
            self._inside(((f"{path}[{i}]", item) for i, item in enumerate(value)), depth)
        elif isinstance(getattr(value, "__dict__", None), dict):
            self._object(path, value, depth)
        elif read is None:
            self._strangers.append((path, value))

    def _object(self, path: str, value: Any, depth: int) -> None:
        """An object's attributes; of one far away those that code asks for."""
        held = value.__dict__
        self._namespaces.setdefault(id(type(value)), (type(value).__name__, type(value)))
        if depth > _DEPTH:
            for name in held.keys() & (self._words or ()):
                self._name(f"{path}.{name}", held, name, depth=depth)
            return
        self.known.add(id(value))
        self._kinds.append((path, value, type(value)))
        self._dict_of.append((path, value, held))
        self._dicts.append(self._entry(path, held))
        kept = {name: item for name, item in held.items() if name not in self._noted.get(id(held), ())}
        self._inside(((f"{path}.{name}", item) for name, item in kept.items()), depth)

    def _part(self, path: str, module: nn.Module) -> None:
        """A module that is no registered part of the model: in a tuple, a global name, given."""
        for name, each in module.named_modules():
            if each is module or id(each) not in self._seen:
                self._seen.add(id(each))
                self._module(f"{path}.{name}" if name else path, each)

    def _inside(self, items: Iterable[tuple[str, Any]], depth: int) -> None:
        for path, item in items:
            self._hold(path, item, depth + 1)

    def _function(self, function: types.FunctionType, depth: int) -> None:
        if not library(function.__code__.co_filename):
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
                self._cell(f"{name} in {function.__qualname__}", cell, depth)
            for value in _kept_defaults(function):
                self._hold(f"a default of {function.__qualname__}", value, depth + 1)
        for registry in gc.get_referents(registered) if (registered := _registry(function)) is not None else ():
            self._hold(f"the functions behind {function.__qualname__}", registry, depth + 1)

    def _cell(self, name: str, cell: Any, depth: int) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # not filled yet
            return
        if id(cell) in self._seen:
            return
        self._seen.add(id(cell))
        if not isinstance(value, type) or name.partition(" ")[0] != "__class__":
            self._cells.append((name, cell, value))
            self._hold(name, value, depth + 1)

    def read_by(self, codes: dict[types.CodeType, dict[str, Any]], lookups: Lookups = (),
                free: Free | None = None) -> None:  # fmt: skip
        """Watches also the names that these pieces of code read: globals, what they import, attributes far away.

        ``lookups`` are whom they asked for attributes by words that they may have put together, and the words; ``free``
        what the variables held that they have from around them, by which their functions are found.
        """
        codes = {**codes, **_remembering(codes)}
        own = {code: names for code, names in codes.items() if not library(code.co_filename)}
        words = {word for code in own for word in (*code.co_names, *_strings(code))}
        self._words = frozenset(words | {word for _, word in lookups})
        self._ran = _functions_of({code for code in own if not installed(code.co_filename)}, free or {})
        for function in self._ran:
            self._function(function, 0)
            for name in function.__dict__.keys() & self._words:
                self._name(f"{function.__qualname__}.{name}", function.__dict__, name)
        for owner, word in lookups:
            self._asked_for(owner, word)
        for code, names in own.items():
            for name, *attributes in _chains(code):
                self._global(name, attributes, names)
                if _is_environment(names.get(name), attributes[0] if attributes else None):
                    self._environment(_words(code, names))
            self._imported(code, names)
            self._looked_up(code, names)
            if not installed(code.co_filename):
                self._built_in(code, names)
        self._attributes(frozenset(chain.from_iterable(map(_of_others, own))))
        self._askers(frozenset(chain.from_iterable(map(_asked_weights, own))))
        for path, value, depth in self._frontier:
            self._hold(path, value, depth)
        self._frontier = []
        for path, value in self._long:
            if path.rpartition(".")[2].rpartition(" ")[2].partition("[")[0] in self._words:
                self._probes.append(_Probe(path, value, partial(_digest, value), _digest(value)))
        self._long = []
        self._named()
        self._asked_strangers()
        self._remember()

    def _asked_strangers(self) -> None:
        """What objects of the interpreter's answer that code asks: events, locks, queues, levels of logs."""
        words = self._words or frozenset()
        for path, value in self._strangers:
            home = type(value).__module__.partition(".")[0]
            for word in words & _ANSWERING if home in _ANSWERING_HOMES else ():
                ask = partial(_level, value) if isinstance(value, logging.Logger) else getattr(value, word, None)
                if callable(ask) and (id(value), word) not in self._seen:
                    self._seen.add((id(value), word))
                    self._probes.append(_Probe(path, None, ask, ask()))
            held: dict[str, Any] = getattr(value, "__dict__", {})
            for name in held.keys() & words if isinstance(held, dict) else ():
                if isinstance(held[name], _PLAIN) and name != "name":
                    self._name(f"{path}.{name}", held, name)

    def _built_in(self, code: types.CodeType, names: dict[str, Any]) -> None:
        """Built-in names that a model's own code reads: they may be replaced, or taken by a global of that name."""
        used = {name for name in code.co_names if name not in names and name in vars(builtins)} - _NOTED
        for name in used:
            if (id(builtins), name) not in self._seen:
                self._seen.add((id(builtins), name))
                self._names.append(_Name(f"builtins.{name}", vars(builtins), name, vars(builtins)[name]))
        free = frozenset(name for name in used if (id(names), "builtin", name) not in self._seen)
        if free:
            self._seen |= {(id(names), "builtin", name) for name in free}
            apart = partial(names.keys().isdisjoint, free)
            self._probes.append(_Probe(f"a built-in name in {names.get('__name__')}", None, apart, True))

    def _global(self, name: str, attributes: list[str], names: dict[str, Any]) -> None:
        if name not in names:  # a builtin, or nothing
            if not hasattr(builtins, name):
                self._absent(f"the global {name}", names, name)
            elif not isinstance(vars(builtins)[name], _CODE) and vars(builtins)[name] is not None:
                self._name(f"builtins.{name}", vars(builtins), name)
            return
        value = names[name]
        if isinstance(value, type) and not of_library(value) and not installed(_file_of(value)):
            self._namespaces.setdefault(id(value), (name, value))
        if isinstance(value, types.ModuleType | type):
            self._way(name, value, attributes)
        elif isinstance(value, types.FunctionType):
            if _registry(value) is not None:
                self._function(value, 1)
            if not library(value.__code__.co_filename):
                for kept in _kept_defaults(value):
                    self._hold(f"a default of {value.__qualname__}", kept, 1)
                if attributes and attributes[0] in value.__dict__:
                    self._name(f"{name}.{attributes[0]}", value.__dict__, attributes[0])
        elif not isinstance(value, types.BuiltinFunctionType):
            self._name(f"the global {name}", names, name)

    def _way(self, path: str, owner: types.ModuleType | type, attributes: Iterable[str]) -> None:
        """What attributes read one from the other lead to, through modules and classes."""
        for attribute in attributes:
            holder = next((p for p in _parts(owner) if attribute in vars(p)), None)
            if holder is None or (of_library(owner) and not _is_setting(vars(holder)[attribute])):
                return
            path, value = f"{path}.{attribute}", vars(holder)[attribute]
            if not isinstance(value, types.ModuleType | type):
                self._name(path, vars(holder), attribute, holder if isinstance(holder, type) else None)
                return
            owner = value

    def _imported(self, code: types.CodeType, names: dict[str, Any]) -> None:
        """Names of modules that a piece of code imports when it runs."""
        for module in _imports(code, str(names.get("__package__") or "")):
            if module is os and not {"environ", "getenv"}.isdisjoint(code.co_names):
                self._environment(_words(code, names))
            for name in () if of_library(module) else vars(module).keys() & set(code.co_names):
                self._name(f"{module.__name__}.{name}", vars(module), name)

    def _looked_up(self, code: types.CodeType, names: dict[str, Any]) -> None:
        """Names that a piece of code asks for by a word; all of them where it has the whole dictionary."""
        if _LOOKING_UP.isdisjoint(code.co_names):
            return
        owners = [names.get(name) for name in code.co_names]
        owners += [sys.modules.get(word) for word in code.co_consts if isinstance(word, str)]
        if names.get("sys") is sys and {"sys", "modules"} <= set(code.co_names):
            owners += [module for module in list(sys.modules.values()) if not installed(_file_of(module))]
        spaces = [vars(owner) for owner in owners if isinstance(owner, types.ModuleType) and not of_library(owner)]
        for held in [names, *spaces]:
            whole = not ({"globals"} if held is names else _WHOLE).isdisjoint(code.co_names)
            words = [key for key, value in held.items() if whole and isinstance(value, _PLAIN) and key[:2] != "__"]
            read = () if held is names else code.co_names
            for word in held.keys() & {*_strings(code), *read, *words}:
                self._name(f"{held.get('__name__')}.{word}", held, word)
        for word in _strings(code) - names.keys() if "globals" in code.co_names else ():
            self._absent(f"the global {word}", names, word)

    def _asked_for(self, owner: Any, word: str) -> None:
        """One attribute of a module or a class that code asked for; of all else what it holds is watched anyway."""
        if owner is sys.modules:
            owner, word = sys.modules.get(word), ""
        if isinstance(owner, types.FunctionType):
            owner, path = owner.__dict__, owner.__qualname__
            self._name(f"{path}.{word}", owner, word) if word in owner else self._absent(f"{path}.{word}", owner, word)
        elif isinstance(owner, types.ModuleType) and (word or not of_library(owner)):
            for name in (vars(owner).keys() & (self._words or ())) if not word else {word} & vars(owner).keys():
                self._name(f"{owner.__name__}.{name}", vars(owner), name)
            if word and word not in vars(owner):
                self._absent(f"{owner.__name__}.{word}", vars(owner), word)
        elif isinstance(owner, type):
            self._way(owner.__name__, owner, [word])
        elif isinstance(owner, Tensor) and not hasattr(owner, word):
            read = partial(hasattr, owner, word)
            self._probes.append(_Probe(f"{self.tensors.get(id(owner), ('a weight',))[0]}.{word}", owner, read, False))

    def _absent(self, path: str, held: Any, word: str) -> None:
        """A name that code asked for, and that was not there."""
        if (id(held), word) not in self._seen:
            self._seen.add((id(held), word))
            self._probes.append(_Probe(path, held, partial(contains, held, word), False))

    def asked_of(self, asked: dict[int, set[str]], answers: Iterable[Callable[[], Any]] = ()) -> None:
        """Watches also what code asked of the model's tensors besides their values, and what of PyTorch's settings."""
        for ask in answers:
            with suppress(TypeError, RuntimeError):  # asked with an argument, which nobody saw
                self._probes.append(_Probe(f"what {ask.__name__} tells", None, ask, ask()))
        for key in asked.keys() & self.tensors.keys():
            path, tensor = self.tensors[key]
            if "_version" in asked[key]:  # what is made of a weight once and kept until the weight changes
                read = partial(getattr, tensor, "_version")
                self._probes.append(_Probe(f"{path}'s contents", tensor, read, read()))
            if not asked[key].isdisjoint(("requires_grad", "grad", "is_leaf")):
                self._probes.append(_Probe(f"{path}'s gradient", tensor, partial(_asks, tensor), _asks(tensor)))

    def _attributes(self, others: frozenset[str]) -> None:
        """Marks on weights and on linear layers that code asks for."""
        words = self._words or frozenset()
        for path, tensor in list(self.tensors.values()):
            marks = getattr(tensor, "__dict__", {})
            for name in marks.keys() & words if marks else ():
                self._name(f"{path}.{name}", marks, name)
        for path, held in self._linear:
            for name in (held.keys() & words) - _LINEAR | (_LINEAR_PLAIN & others & held.keys()):
                self._name(f"{path}.{name}", held, name)

    def _askers(self, names: frozenset[str]) -> None:
        """Whether weights ask for gradients and have them, of those that code asks."""
        for path, tensor in list(self.tensors.values()) if names else ():
            if path.rpartition(".")[2] in names:
                self._probes.append(_Probe(f"{path}'s gradient", tensor, partial(_asks, tensor), _asks(tensor)))

    def _named(self) -> None:
        """Classes and modules that the model holds, or whose objects it holds: what code asks for by name."""
        done: set[int] = set()
        while waiting := [(key, *each) for key, each in self._namespaces.items() if key not in done]:
            for key, path, owner in waiting:
                done.add(key)
                before: list[Any] = []
                for part in _parts(owner):
                    if not of_library(part):
                        self._names_of(path, part, before)
                        before.append(part)

    def _names_of(self, path: str, part: types.ModuleType | type, before: list[Any]) -> None:
        """What is read of one class, and that no class asked before it has such a name of its own."""
        for name in vars(part).keys() & (self._words or frozenset()):
            value = vars(part)[name]
            for each in before if isinstance(value, _PLAIN) else ():
                if name not in vars(each):
                    self._space_of(each).was[name] = _GONE
            if isinstance(value, type):
                self._namespaces.setdefault(id(value), (f"{path}.{name}", value))
            elif isinstance(value, (*_PLAIN, list, dict, set, tuple, Tensor)) or _is_object(value, part):
                self._name(f"{path}.{name}", vars(part), name, part if isinstance(part, type) else None)

    def follow(self, codes: dict[types.CodeType, dict[str, Any]]) -> None:
        """Watches also the functions and classes that these pieces of code name, and the methods that they are."""
        classes = {type(module) for module in self.root.modules()} if isinstance(self.root, nn.Module) else set()
        for code, names in codes.items():
            if code.co_filename.startswith(_OBSERVING) or standard(code.co_filename):
                continue
            for name, *attributes in _chains(code):
                value = names.get(name)
                if isinstance(value, _CODE):
                    self._followed(code.co_filename, names, name, attributes)
                classes |= {value} if isinstance(value, type) else set()
        held = [owner for _, owner in self._namespaces.values() if isinstance(owner, type)]
        classes |= {owner for owner in held if not of_library(owner)}
        for cls in classes:
            self._methods_of(cls, codes)
        self._written_anew(codes)
        self._space_of(Tensor).was |= {key: vars(Tensor).get(key, _GONE) for key in dir(torch._C.TensorBase)
                                       if key not in vars(object)}  # fmt: skip
        self._remember()

    def _written_anew(self, codes: dict[types.CodeType, dict[str, Any]]) -> None:
        """Functions of the model's own that ran, whose code or defaults may be set: notebooks reload them that way."""
        own = {code: names for code, names in codes.items()
               if not library(code.co_filename) and not installed(code.co_filename)}  # fmt: skip
        values = [names.get(name) for names in {id(each): each for each in own.values()}.values() for name in names]
        spaces = [value for space in self._spaces.values() for value in space.was.values()]
        found = {id(each): each for each in (*values, *spaces, *self._ran)
                 if isinstance(each, types.FunctionType) and each.__code__ in own}  # fmt: skip
        if found and "functions" not in self._seen:
            self._seen.add("functions")
            read = partial(_codes_of, tuple(found.values()))
            self._probes.append(_Probe("the code of a function", None, read, read()))

    def _followed(self, filename: str, names: dict[str, Any], name: str, attributes: list[str]) -> None:
        """What a global name and the attributes read of it lead to, as long as these are modules and classes."""
        value = names[name]
        if library(filename) or installed(filename):
            space = self._spaces.setdefault(id(names), _Space(names.get("__name__", filename), names, {}))
            space.was[name] = value
        elif (id(names), name) not in self._seen:  # a script's names change at every step: looked at one by one
            self._seen.add((id(names), name))
            self._names.append(_Name(f"the global {name}", names, name, value))
        for attribute in attributes:
            holder = next((part for part in _parts(value) if attribute in vars(part)), None)
            if holder is None or not isinstance(vars(holder)[attribute], _CODE) or standard(_file_of(holder)):
                return
            self._space_of(holder).was[attribute] = value = vars(holder)[attribute]

    def _methods_of(self, cls: type, codes: dict[types.CodeType, dict[str, Any]]) -> None:
        """Its methods that ran, wherever they come from, and that no class on the way to them has its own."""
        own: list[type] = []
        for part in _parts(cls):
            own.append(part)
            ran = [key for key, value in vars(part).items() if _code_of(value) in codes]
            for each in own if ran else ():
                self._space_of(each).was |= {key: vars(each).get(key, _GONE) for key in ran}

    def _space_of(self, holder: types.ModuleType | type) -> _Space:
        """The names of a module or a class."""
        held, cls = _held_by(holder), holder if isinstance(holder, type) else None
        return self._spaces.setdefault(id(held), _Space(holder.__name__, held, {}, cls))

    def _environment(self, names: tuple[str, ...]) -> None:
        """The variables that a piece of code may ask for: those it names."""
        if ("environment", names) not in self._seen:
            self._seen.add(("environment", names))
            read = partial(_asked, names)
            self._probes.append(_Probe("the environment", None, read, read()))

    def _name(self, path: str, holder: Any, key: str, owner: type | None = None, depth: int = 0) -> None:
        value = holder[key]
        mark = (id(owner or holder), key)
        if mark in self._seen or isinstance(value, _CODE):
            return
        self._seen.add(mark)
        self._names.append(_Name(path, holder, key, value, owner))
        self._hold(path, value, depth + 1)

    def hold_host_to(self, device_type: str) -> None:
        """Watches also what tensors hold that are not on the recording's device: Python may have read them."""
        apart = [t for t in self._tensors if t.device.type != device_type]
        self._elsewhere = [t for t in apart if not t.is_inference()]
        self._contents_of = list(map(_WRITES, self._elsewhere))
        for tensor in apart if device_type != "cpu" else ():
            low, high = extent(tensor)
            if tensor.device.type == "cpu" and 0 < high - low < 64 * _LONG:  # numpy and ``.data`` leave its version
                memory = view_of(tensor.detach(), torch.uint8, low, (high - low,), (1,)).numpy()
                read, path = memory.tobytes, self.tensors[id(tensor)][0]
                self._probes.append(_Probe(path, memory, read, read(), "was written to"))
        self._remember()

    # --- comparing --------------------------------------------------------------------------------------------------

    def _remember(self) -> None:
        """Lines the watched things up for the quick comparison."""
        self._handles = RemovableHandle.next_id  # every hook that is registered anywhere takes the next number
        self._held = [*(entry.held for entry in self._dicts), *(space.held for space in self._spaces.values())]
        self._versions = list(map(version, self._held))
        self._still = -1
        if stillness.counts:  # those that are not compared by their version have to be asked for it once to be counted
            deque(map(version, chain(self._empties, self._counted)), maxlen=0)
        self._count = sum(map(len, self._counted))
        self._contents = [value for *_, value in self._cells]
        self._just_cells = [cell for _, cell, _ in self._cells]
        placed = () if self._shared_weights else self.tensors.values()
        self._tensors = [tensor for _, tensor in placed if _addressable(tensor)]
        self._addresses, self._forms = list(map(address, self._tensors)), list(map(form, self._tensors))
        self._glances()

    def _glances(self) -> None:
        """All that one look can tell: tensors, names, lists and probes. Deques and cells are few, and apart."""
        listed = [(held, i, value) for _, held, was in self._lists for i, value in enumerate(was) if len(was) < _LONG]
        named = [*listed, *((name.holder, name.key, name.value) for name in self._names)]
        rare = [row for row in named if isinstance(row[0], deque)]
        columns: list[list[Any]] = [[row[i] for row in rare] for i in range(3)]
        self._holders, self._keys, self._values = columns
        self._deques = [held for _, held, _ in self._lists if not isinstance(held, list)]
        self._deques_size = sum(map(len, self._deques))
        lists = [held for _, held, _ in self._lists if isinstance(held, list)]
        asks = [(probe.value if probe.read() is probe.value else probe.read, probe.was) for probe in self._probes]
        kinds: list[Any] = [(module, type, cls) for _, module, cls in self._kinds]
        kinds += [(value, vars, held) for _, value, held in self._dict_of]
        self.glance = glance(self._tensors, names=[*(row for row in named if not isinstance(row[0], deque)), *kinds],
                             lists=lists, asks=asks)  # fmt: skip

    def same(self) -> bool:
        """Whether nothing has changed since this watch was made or last refreshed."""
        if self._quick():
            return True
        if self.changes():
            return False
        self._refresh()
        return True

    def _quick(self) -> bool:
        now = stillness.now()
        if not self._looked_over(now == self._still):
            return False
        self._still = now
        return True

    def _looked_over(self, still: bool) -> bool:
        """One look at everything; at no dictionary if none that is watched has changed since the last."""
        try:
            return ((RemovableHandle.next_id == self._handles or not any(self._unhooked))
                    and (still or (not any(self._empties) and list(map(version, self._held)) == self._versions
                                   and sum(map(len, self._counted)) == self._count))
                    and (not self._deques or sum(map(len, self._deques)) == self._deques_size)
                    and (not self._holders or all(map(is_, map(getitem, self._holders, self._keys), self._values)))
                    and (not self._just_cells or all(map(is_, map(_contents, self._just_cells), self._contents)))
                    and (not self._elsewhere or list(map(_WRITES, self._elsewhere)) == self._contents_of)
                    and self.glance.same())  # fmt: skip
        except (LookupError, ValueError):
            return False

    def still(self, number: int) -> bool:
        """Whether nothing has changed, told at a glance: no dictionary since this number was counted, nor the rest."""
        return number == self._still and self._looked_over(True)

    @property
    def counted(self) -> int:
        """The number of the last look that found no dictionary changed."""
        return self._still

    def addressed(self) -> bool:
        """Whether every tensor is where it was, of the form it had, and names stand for what they stood for."""
        return self.glance.same()

    def changes(self) -> list[str]:
        """What has changed, by name; equal plain values are no change, nor are hooks that only collect."""
        found = [self._addition(held) for held in chain(self._unhooked, self._empties) if held and not _harmless(held)]
        for entry in self._dicts:
            found += _differences(entry)
        for space in self._spaces.values():
            found += space.replaced()
        found += [f"{path} is a {type(part).__name__} now" for path, part, cls in self._kinds if type(part) is not cls]
        found += [f"{path} has other attributes" for path, value, held in self._dict_of if vars(value) is not held]
        found += ["a linear layer was given an attribute"] if self._attributed() else []
        for path, held, was in self._lists:
            if len(held) != len(was) or not all(map(_alike, held, was)):
                found.append(f"{path} changed")
        found += [f"{name.path} changed" for name in self._names
                  if name.key not in name.holder or not _alike(name.holder[name.key], name.value)]  # fmt: skip
        found += [f"{probe.path} {probe.said}" for probe in self._probes if probe.read() != probe.was]
        found += [f"{path} changed" for path, cell, value in self._cells if not _alike(cell.cell_contents, value)]
        names = {id(tensor): path for path, tensor in self.tensors.values()}
        found += [f"{names[id(t)]} was written to" for t, was in zip(self._elsewhere, self._contents_of)
                  if t._version != was]  # fmt: skip
        found += [f"{names[id(t)]} moved to other memory" for t, was in zip(self._tensors, self._addresses)
                  if address(t) != was]  # fmt: skip
        found += [f"{names[id(t)]} has another type, size or stride" for t, was in zip(self._tensors, self._forms)
                  if form(t) != was]  # fmt: skip
        return list(dict.fromkeys(found))

    def replaced(self) -> list[str]:
        """Functions and classes in whose place others were put, and names that were not there: what guards of compiled
        code do not all look at."""
        names = [name for name in self._names if isinstance(name.value, _CODE)]
        return [*chain.from_iterable(space.replaced() for space in self._spaces.values()),
                *(f"{name.path} changed" for name in names if name.holder.get(name.key) is not name.value),
                *(f"{ask.path} changed" for ask in self._probes if ask.was is False and ask.read())]  # fmt: skip

    def rebound(self) -> list[tuple[str, dict[Any, Any], Any, Tensor]]:
        """Names that stood for a tensor and stand for another: their path, where they are held, and the first."""
        found = [(entry, key) for entry in self._dicts for key, was in entry.was.items()
                 if isinstance(was, Tensor) and isinstance(now := entry.held.get(key), Tensor) and now is not was
                 and key not in entry.derived]  # fmt: skip
        return [(f"{entry.owner}.{key}", entry.held, key, entry.was[key]) for entry, key in found]

    def made(self) -> list[tuple[str, dict[Any, Any], str]]:
        """Weights that hooks of PyTorch's make before every call: their path, and where they are held."""
        return [(f"{entry.owner}.{key}", entry.held, key) for entry in self._dicts for key in entry.derived]

    def accept(self, noted: Mapping[int, set[Any]]) -> None:
        """Names that every call binds anew are no changes from now on."""
        for entry in self._dicts:
            entry.derived |= noted.get(id(entry.held), set())

    def rebind(self, held: dict[Any, Any], key: Any) -> None:
        """One name as it was when this watch was made."""
        for entry in self._dicts:
            if entry.held is held:
                held.update({key: entry.was[key]}) if key in entry.was else held.pop(key, None)

    def detach(self) -> None:
        """What calls have bound since is kept without what led to it."""
        for entry in self._dicts:
            for key, value in raw(entry.held).items():
                if isinstance(value, Tensor) and value.grad_fn is not None and entry.was.get(key) is not value:
                    entry.held[key] = value.detach()

    def stamp(self, boxes: Iterable[dict[Any, Any]]) -> None:
        """Has seen that these dictionaries changed, and how."""
        mine = {id(box) for box in boxes}
        for i, held in enumerate(self._held):
            if id(held) in mine:
                self._versions[i] = version(held)

    def beyond_guards(self) -> bool:
        """Whether something changed that guards of compiled code may take for the same: the sign of a zero, an order,
        variables of functions, whatever has to be asked."""
        pairs = [(entry.held.get(key), value) for entry in self._dicts for key, value in entry.was.items()]
        pairs += [pair for _, held, was in self._lists for pair in zip(held, was)]
        pairs += [(name.holder.get(name.key), name.value) for name in self._names]
        return (any(now is not was and _seems(now, was) for now, was in pairs)
                or any(each.ordered and not each.in_order() for each in self._dicts)
                or any(probe.read() != probe.was for probe in self._probes)
                or any(not _alike(_content(cell), value) for _, cell, value in self._cells)
                or any(type(part) is not cls for _, part, cls in self._kinds)
                or any(vars(value) is not held for _, value, held in self._dict_of))  # fmt: skip

    def toggled(self) -> list[str]:
        """Switches of layers and weights that stand otherwise: no result hangs on them, but a call may change them."""
        return [f"{switch.path} changed" for switch in self._switches if switch.read() != switch.was]

    def _attributed(self) -> bool:
        return sum(map(len, self._counted)) != self._count

    def _addition(self, held: dict[Any, Any]) -> str:
        owner = self._owners.get(id(held), "")
        if owner.rpartition(".")[2] in _INNER:
            return f"{owner}.{next(iter(held))} is new"
        return f"a hook was added ({_hook(held)})"

    def _spill(self) -> None:
        """Names of what changed and was none of them are looked at one by one from now on: it may change every time."""
        for (place, space), was in zip(list(self._spaces.items()), self._versions[len(self._dicts) :]):
            if version(space.held) != was:
                self._names += [_Name(f"{space.owner}.{key}", space.held, key, value, space.cls)
                                for key, value in space.was.items() if value is not _GONE]  # fmt: skip
                del self._spaces[place]

    def _refresh(self) -> None:
        self._spill()
        self._unhooked = [hooks for hooks in self._unhooked if not hooks]
        for entry in self._dicts:
            entry.was = self._entry(entry.owner, entry.held).was
        self._lists = [(path, held, list(held)) for path, held, _ in self._lists]
        for name in self._names:
            name.value = name.holder[name.key]
        self._cells = [(path, cell, cell.cell_contents) for path, cell, _ in self._cells]
        self._remember()

    def restore(self) -> None:
        """Puts every watched dictionary, list and name back to what it held; tensors keep their contents."""
        for entry in self._dicts:
            noted = self._noted.get(id(entry.held), ())
            for key in [key for key in entry.held if key not in entry.was and key not in noted]:
                del entry.held[key]
            lost = {key: value for key, value in entry.was.items()
                    if entry.held.get(key, _GONE) is not value and key not in noted}  # fmt: skip
            entry.held.update(lost)
            if entry.ordered and not entry.in_order():
                kept = {key: entry.held[key] for key in (*entry.was, *entry.held) if key in entry.held}
                entry.held.clear()
                entry.held.update(kept)
        for _, held, was in self._lists:
            if len(held) != len(was) or not all(map(is_, held, was)):
                held.clear()
                held.extend(was)
        for name in self._names:
            if name.holder.get(name.key, _GONE) is not name.value:
                if name.owner is None:
                    name.holder[name.key] = name.value
                else:
                    setattr(name.owner, name.key, name.value)
        for _, cell, value in self._cells:
            cell.cell_contents = value
        for _, value, held in self._dict_of:
            if vars(value) is not held:
                value.__dict__ = held
        for _, module, cls in self._kinds:
            if type(module) is not cls:
                module.__class__ = cls
        for probe in self._probes:
            probe.restore()
        for switch in self._switches:
            if switch.read() != switch.was:
                switch.restore()

    def hooks(self) -> list[str]:
        """Hooks that a replay would not call."""
        entries = [entry.held for entry in self._dicts if entry.owner.rpartition(".")[2] in HOOKS]
        return [_hook(hooks) for hooks in chain(self._unhooked, entries) if hooks and not _harmless(hooks)]

    def buffers(self) -> list[Tensor]:
        """The tensors held that are not parameters: those a call may write to."""
        return [tensor for tensor in self._tensors if not isinstance(tensor, nn.Parameter)]


def _is_bare(held: dict[str, Any]) -> bool:
    """Whether a linear layer was given nothing but marks: what calls leave on one is looked at as on any other."""
    return held.keys() <= _LINEAR or all(isinstance(held[key], (bool, int, str)) for key in held.keys() - _LINEAR)


_LINEAR_PLAIN = frozenset(("in_features", "out_features", "training"))
_LOOKING_UP = frozenset("getattr globals vars __dict__ attrgetter modules __import__ import_module".split())
_WHOLE = frozenset(("vars", "__dict__", "attrgetter"))
_WEAKLY = (weakref.ref, *weakref.ProxyTypes)
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_contents = attrgetter("cell_contents")
_WRITES = attrgetter("_version")
_GONE = object()


def _addressable(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return False
    if type(tensor) not in (Tensor, nn.Parameter) and not isinstance(tensor, nn.Parameter):
        raise NotGraphable(f"the model holds a tensor of type {type(tensor).__name__}, which has no one address")
    return True


def _alike(now: Any, was: Any) -> bool:
    if now is was:
        return True
    return type(now) is type(was) and isinstance(now, (*_PLAIN, tuple, frozenset)) and bool(_equal(now, was))


def _seems(now: Any, was: Any) -> bool:
    """Whether two plain values are equal and not alike, such as zeros of either sign."""
    plain = isinstance(now, (*_PLAIN, tuple, frozenset)) and type(now) is type(was)
    return plain and not _alike(now, was) and bool(now == was)


def _equal(now: Any, was: Any) -> bool:
    if isinstance(now, tuple):
        return len(now) == len(was) and all(map(_alike, now, was))
    if isinstance(now, frozenset):
        return len(now) == len(was) and all(map(_alike, now, was))  # in order: that is what code goes through
    if isinstance(now, float):
        return (now == was and math.copysign(1.0, now) == math.copysign(1.0, was)) or (now != now and was != was)
    if isinstance(now, complex):
        return _equal(now.real, was.real) and _equal(now.imag, was.imag)
    return bool(now == was)


def raw(held: dict[Any, Any]) -> dict[Any, Any]:
    """What a dictionary holds; one that makes something of it whenever it is asked is not asked."""
    return dict(dict.items(held))


def _differences(entry: _Held) -> list[str]:
    now, was = raw(entry.held), entry.was
    hooked = entry.owner.rpartition(".")[2] in HOOKS
    if hooked and _harmless(now):
        return []
    if entry.ordered and now.keys() == was.keys() and not entry.in_order():
        return [f"{entry.owner} is in another order"]
    if any(now.get(key) is not was[key] for key in was.keys() & _WATCHED_INSIDE):
        return [f"{entry.owner} has other parts, weights or hooks"]
    kept = _BOOKKEEPING | entry.derived
    gone = [f"{entry.owner}.{key} is gone" for key in was if key not in now and key not in entry.derived]
    new = [f"{entry.owner}.{key} is new" for key in now
           if key not in was and not str(key).startswith(_INCIDENTAL) and key not in entry.derived]  # fmt: skip
    return gone + new + [f"{entry.owner}.{key} changed" for key in was
                         if key in now and key not in kept and not _alike(now[key], was[key])]  # fmt: skip


def _derived(held: dict[str, Any]) -> frozenset[str]:
    """Attributes of a module that hooks of PyTorch's make anew of its parameters before every call of it."""
    hooks = held.get("_forward_pre_hooks", {}).values()
    return frozenset(str(hook.name) for hook in hooks if type(hook) in _MAKING_HOOKS)


def _makes(hooks: dict[Any, Any]) -> bool:
    return bool(hooks) and all(type(hook) in _MAKING_HOOKS for hook in hooks.values())


def _harmless(hooks: dict[Any, Any]) -> bool:
    if _makes(hooks):
        return True
    named = [(getattr(hook, "__module__", ""), getattr(hook, "__name__", "")) for hook in hooks.values()]
    known = all(name[0] in _HARMLESS_HOOKS or name in _FLAGGING_HOOKS for name in named)
    return known and all(map(callable, hooks.values()))


def _hook(hooks: dict[Any, Any]) -> str:
    hook = next(iter(hooks.values()))
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def _foreign(value: Any) -> bool:
    """Objects of the interpreter and of PyTorch's runtime that reach everywhere and that no model branches on."""
    home = type(value).__module__
    return home.partition(".")[0] in _RUNTIME and not home.startswith(_MODELED)


def _reader(value: Any) -> Callable[[], Any] | None:
    """How to read what has no version number, as something that can be compared; None for what is seen otherwise."""
    if isinstance(value, set):
        if len(value) < _FEW and any(isinstance(item, int | float | complex) for item in value):
            return lambda: (tuple(value), tuple(map(type, value)))  # in order and by type: 1 equals True
        return lambda: value if len(value) < _LONG else len(value)  # compared in place: no copy at every call
    if _is_array(value):
        return value.tobytes if value.nbytes < 64 * _LONG else lambda: (value.shape, str(value.dtype))
    if isinstance(value, io.BytesIO | io.StringIO):
        return lambda: (value.tell(), value.getvalue())
    if type(value).__module__ == "numpy.random.mtrand":
        return lambda: repr(value.get_state(legacy=False))
    if isinstance(value, bytearray | array.array):
        return lambda: bytes(value) if len(value) < 8 * _LONG else len(value)
    if isinstance(value, random.Random):
        return value.getstate
    if type(value).__module__ == "numpy.random._generator":
        return lambda: repr(value.bit_generator.state)
    if type(value).__module__ == "itertools":
        return lambda: repr(value)
    if slots := slots_of(type(value)):
        return lambda: [(name, _mark(getattr(value, name, None))) for name in slots]
    return None


def _is_long(value: Any) -> bool:
    """Whether a list or an array is compared by its size, where no code is known to read it."""
    if isinstance(value, list | deque | bytearray | array.array):
        return len(value) >= _LONG
    return _is_array(value) and value.nbytes >= 64 * _LONG


def _digest(value: Any) -> int:
    """A number that changes with what a long list or a large array holds."""
    return hash(tuple(map(id, value))) if isinstance(value, list | deque) else zlib.crc32(bytes(value))


def _surroundings(value: Any) -> list[Any] | None:
    """What differs by thread or by context holds here that is more than a plain value; None for all else."""
    if isinstance(value, ContextVar):
        return [held for held in (value.get(None),) if not isinstance(held, _PLAIN)]
    if isinstance(value, threading.local):
        return [held for held in vars(value).values() if not isinstance(held, _PLAIN)]
    return None


def _surrounding(value: Any) -> Any:
    """The same as something that can be compared."""
    if isinstance(value, ContextVar):
        return _plainly(value.get(None))
    return tuple((name, _plainly(held)) for name, held in vars(value).items())


def _plainly(value: Any) -> Any:
    return (type(value), value) if isinstance(value, _PLAIN) else (type(value), id(value))


def _goes_on(value: Any) -> bool:
    """Whether reading something changes it, and nothing shows how far it was read."""
    known = isinstance(value, io.IOBase | itertools.count | itertools.repeat)
    return isinstance(value, Iterator) and not known and not hasattr(value, "__dict__") and not slots_of(type(value))


def _is_shared(value: Any) -> bool:
    """Whether a number or an array lies in memory that several processes see."""
    return type(value).__module__ == "multiprocessing.sharedctypes" and hasattr(value, "get_obj")


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)


def _is_setting(value: Any) -> bool:
    """Whether an attribute of a library's module is a value that somebody may set, and code go by."""
    plain = isinstance(value, _PLAIN) and not isinstance(value, torch.dtype | torch.device)
    return plain or (isinstance(value, list | set | dict) and len(value) < _FEW)


def _is_object(value: Any, part: Any) -> bool:
    """Whether a class of the model's own holds an object: one for all, or one that is asked for an attribute."""
    if not isinstance(part, type) or installed(_file_of(part)):
        return False
    return not isinstance(value, (*_CODE, staticmethod, classmethod, property, types.MemberDescriptorType,
                                  types.GetSetDescriptorType))  # fmt: skip


def _registry(function: types.FunctionType) -> Any:
    """Which function answers for which type, where one is chosen by the type of its argument."""
    found = function.__dict__.get("registry")
    return found if isinstance(found, types.MappingProxyType) else None


def _functions_of(codes: set[types.CodeType], free: Free) -> list[types.FunctionType]:
    """The functions whose code ran, by what they hold: a decorator's code is that of many."""
    frozen = gc.get_freeze_count()  # a search sets what there is aside, where nobody is found who refers to anything
    if frozen:
        gc.unfreeze()
    found = [each for each in gc.get_referrers(*codes) if isinstance(each, types.FunctionType)] if codes else []
    if frozen:
        gc.freeze()
    ran = [each for each in found if each.__code__ in codes]
    return [f for f in ran if not f.__closure__ or any(_could_be(f, held) for held in free.get(f.__code__, ()))]


def _could_be(function: types.FunctionType, held: tuple[int, ...]) -> bool:
    """Whether a function's variables are those that were seen; plain ones may have changed since."""
    return all(now is None or id(now) == was or isinstance(now, _PLAIN)
               for now, was in zip(map(_content, function.__closure__ or ()), held))  # fmt: skip


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _level(log: Any) -> tuple[Any, ...]:
    return log.getEffectiveLevel(), log.disabled, log.manager.disable


def _is_environment(value: Any, attribute: str | None) -> bool:
    """Whether code that reads this of a global name asks for variables of the environment."""
    return value is os.environ or value is os.getenv or (value is os and attribute in ("environ", "getenv"))


def _words(code: types.CodeType, names: dict[str, Any]) -> tuple[str, ...]:
    """The strings that a piece of code names, by themselves or as globals."""
    named = [names.get(name) for name in code.co_names]
    return tuple(dict.fromkeys(word for word in (*code.co_consts, *named) if isinstance(word, str)))


def _asked(names: tuple[str, ...]) -> tuple[str | None, ...]:
    return tuple(map(os.environ.get, names))


def _kept_defaults(function: types.FunctionType) -> list[Any]:
    """Defaults of a function's arguments that outlive its calls and may change in them."""
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [value for value in held if not isinstance(value, (*_PLAIN, *_CODE, enum.Enum, types.EllipsisType))]


def _mark(value: Any) -> Any:
    return (type(value), value) if isinstance(value, _PLAIN) else id(value)


def _methods(model: Any) -> list[types.FunctionType]:
    return [each for each in functions_of(model) if each.__closure__ or _kept_defaults(each)]


def functions_of(model: Any) -> list[types.FunctionType]:
    """The functions of a model's classes and of those of its parts, as far as they are the model's own code."""
    classes = {type(part) for part in model.modules()} if isinstance(model, nn.Module) else {type(model)}
    functions = [value for cls in classes for part in cls.__mro__ for value in vars(part).values()]
    written = [each for each in functions if isinstance(each, types.FunctionType)]
    return list({id(each): each for each in written if not library(each.__code__.co_filename)}.values())


_OBSERVING = (*OWN_CODE, str(_python_dispatch.__file__), str(torch.overrides.__file__))
"""Code that ran because somebody looked on, not because of the model; it keeps its state among its names."""
_LIBRARIES = tuple(str(Path(path).parent) for path in (torch.__file__, dis.__file__) if path)


_GENERATED = ("<eval_with_key", "<frozen", "<attrs", "<__array_function__")
"""What tracers and the interpreter name code that they made. All else in angle brackets was typed, or read by somebody
and run: ``<stdin>``, ``<string>``, a cell of a notebook. That is a model's own code as much as a file's."""
_HEAP_TYPE = 1 << 9


def library(filename: str) -> bool:
    """Code of PyTorch, of the interpreter and of this package: its state is not the model's."""
    if not filename or filename.startswith(_GENERATED):
        return True
    return filename.startswith((_LIBRARIES[0], *OWN_CODE)) or standard(filename)


def standard(filename: str) -> bool:
    """Code that came with the interpreter, which nobody replaces and which keeps its state among its names."""
    return filename.startswith(_LIBRARIES[1]) and not installed(filename)


def of_library(value: types.ModuleType | type) -> bool:
    """Whether a module or a class is a library's; one without a file was typed or run, unless it is built in."""
    file = _file_of(value)
    if file:
        return library(file)
    return not value.__flags__ & _HEAP_TYPE if isinstance(value, type) else value.__name__ in sys.builtin_module_names


def _file_of(value: types.ModuleType | type) -> str:
    module = sys.modules.get(value.__module__) if isinstance(value, type) else value
    return getattr(module, "__file__", None) or ""


_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
         types.ModuleType, type)  # fmt: skip
_HEAP = 1 << 9
"""Classes that Python made, whose names can stand for something else later."""


def _parts(value: Any) -> tuple[Any, ...]:
    """Where names of a module or a class are looked up."""
    if isinstance(value, types.ModuleType):
        return (value,)
    return tuple(part for part in value.__mro__ if part.__flags__ & _HEAP) if isinstance(value, type) else ()


def _held_by(value: Any) -> dict[str, Any]:
    """The dictionary behind a module's or a class's names, which has a version."""
    if isinstance(value, types.ModuleType):
        return vars(value)
    (held,) = gc.get_referents(vars(value))
    return held


def _code_of(value: Any) -> types.CodeType | None:
    """The code of a method as it stands in its class."""
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    return getattr(value, "__code__", None)


def installed(filename: str) -> bool:
    """Code of a package that somebody installed."""
    return "site-packages" in filename or "dist-packages" in filename


@lru_cache(maxsize=4096)
def _chains(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """Global names that a piece of code reads, each with the attributes that are read one from the other."""
    found: list[list[str]] = []
    open_ = False
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found.append([str(instruction.argval)])
            open_ = True
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and open_:
            found[-1].append(str(instruction.argval))
        elif instruction.opname not in ("PRECALL", "CACHE", "PUSH_NULL"):
            open_ = False
    return tuple(dict.fromkeys(map(tuple, found)))


@lru_cache(maxsize=4096)
def _asked_weights(code: types.CodeType) -> frozenset[str]:
    """Attributes that a piece of code asks whether they require gradients, or have them: ``self.weight.grad``."""
    found, before = set(), ""
    for instruction in dis.get_instructions(code):
        attribute = str(instruction.argval) if instruction.opname == "LOAD_ATTR" else ""
        if attribute in ("requires_grad", "grad") and before:
            found.add(before)
        before = before if instruction.opname == "CACHE" else attribute
    return frozenset(found)


def _codes_of(functions: tuple[types.FunctionType, ...]) -> tuple[int, ...]:
    return tuple(id(part) for each in functions for part in (each.__code__, each.__defaults__))


def _is_dead(reference: weakref.ref[Any]) -> bool:
    return reference() is None


def _remembering(codes: dict[types.CodeType, dict[str, Any]]) -> dict[types.CodeType, dict[str, Any]]:
    """Functions behind ``lru_cache`` that code names: they ran once, and run again when that is cleared."""
    held = [names.get(name) for code, names in codes.items() if not library(code.co_filename) for name in code.co_names]
    found = [inspect.unwrap(value) for value in held if hasattr(value, "cache_clear") and callable(value)]
    return {each.__code__: each.__globals__ for each in found if isinstance(each, types.FunctionType)}


def _asks(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.requires_grad, tensor.is_leaf and tensor.grad is not None


@lru_cache(maxsize=4096)
def _strings(code: types.CodeType) -> frozenset[str]:
    """Words in a piece of code by which it may ask for names."""
    return frozenset(value for value in code.co_consts if isinstance(value, str) and value.isidentifier())


@lru_cache(maxsize=4096)
def _of_others(code: types.CodeType) -> frozenset[str]:
    """Attributes that a piece of code reads of anything but ``self``."""
    found, before = set(), ""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_ATTR" and before != "self":
            found.add(str(instruction.argval))
        if instruction.opname != "CACHE":
            before = str(instruction.argval) if instruction.opname.startswith("LOAD_FAST") else ""
    return frozenset(found)


def _imports(code: types.CodeType, package: str) -> list[types.ModuleType]:
    """Modules that a piece of code imports when it runs, and those they are found through."""
    found: dict[str, Any] = {}
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            found |= {name: sys.modules[name] for name in _dotted(str(instruction.argval), package)
                      if name in sys.modules}  # fmt: skip
        elif instruction.opname == "IMPORT_FROM":
            found |= {f"{name}.{instruction.argval}": vars(module).get(str(instruction.argval))
                      for name, module in list(found.items()) if isinstance(module, types.ModuleType)}  # fmt: skip
    return [module for module in found.values() if isinstance(module, types.ModuleType)]


def _dotted(name: str, package: str) -> list[str]:
    """What a name to import may stand for, by itself or seen from a package or one around it."""
    ends = [name[:i] for i in range(1, len(name) + 1) if i == len(name) or name[i] == "."]
    around = [package[:i] for i in range(1, len(package) + 1) if i == len(package) or package[i] == "."]
    return [*ends, *around, *(f"{each}.{end}" for each in around for end in ends)]
