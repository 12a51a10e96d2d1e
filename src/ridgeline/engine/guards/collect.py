"""What a model reads besides its inputs, collected from its modules, the objects they hold and the code that ran."""

from __future__ import annotations

import builtins
import gc
import logging
import os
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from operator import contains
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_globals
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils import parametrize

from ridgeline.engine.guards.code_reads import (
    CODE,
    OBSERVING,
    PLAIN,
    Free,
    Lookups,
    attribute_chains,
    attributes_of_others,
    cached_functions,
    code_of,
    codes_of,
    dispatch_registry,
    environment_values,
    file_of,
    functions_with,
    identifiers_in,
    imports_of,
    installed,
    kept_defaults,
    library,
    lookup_chain,
    methods_of_model,
    namespace_of,
    of_library,
    reads_environment,
    standard,
    strings_named,
    weights_asked_for_gradients,
)
from ridgeline.engine.guards.entries import (
    BOOKKEEPING,
    C_TYPES,
    HOOKS,
    INNER,
    LINEAR_ATTRIBUTES,
    DictGuard,
    Flag,
    GradientFlag,
    NameGuard,
    NamespaceGuard,
    Probe,
    TrainingFlag,
    derived_names,
    is_plain_linear,
)
from ridgeline.engine.guards.values import (
    GONE,
    MAX_COMPARED_ITEMS,
    context_objects,
    context_value,
    digest,
    gradient_state,
    is_class_object,
    is_consumed_by_reading,
    is_dead,
    is_long,
    is_runtime_object,
    is_setting,
    is_shared_memory,
    log_level,
    raw,
    reader_of,
)
from ridgeline.engine.pytree import slots_of
from ridgeline.errors import NotGraphable

GLOBAL_HOOKS = ("_global_backward_pre_hooks", "_global_backward_hooks", "_global_forward_hooks",
                 "_global_forward_pre_hooks")  # fmt: skip
_CLOSED = (types.BuiltinFunctionType, torch.Generator)
_DEPTH = 4
"""Objects within objects are watched this far whatever they are, and farther where the code that ran names the way."""
_NAMED_DEPTH = 32
_ANSWERING = frozenset("is_set locked qsize done cancelled is_alive isEnabledFor getEffectiveLevel".split())
"""Questions without arguments that objects of the interpreter's answer, and that code may branch on."""
_ANSWERING_HOMES = frozenset("threading _thread queue _queue logging multiprocessing asyncio concurrent".split())
_NOTED = frozenset(("getattr", "hasattr"))
"""Built-in names that stand for something else while somebody looks on."""
_MOST = 20_000
LINEAR_SETTINGS = frozenset(("in_features", "out_features", "training"))
_LOOKING_UP = frozenset("getattr globals vars __dict__ attrgetter modules __import__ import_module".split())
_WHOLE = frozenset(("vars", "__dict__", "attrgetter"))
_WEAKLY = (weakref.ref, *weakref.ProxyTypes)
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)


class Collection:
    """The state of a model besides its inputs.

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
        self._dicts: list[DictGuard] = []
        self._lists: list[tuple[str, Any, list[Any]]] = []
        self._cells: list[tuple[str, Any, Any]] = []
        self._names: list[NameGuard] = []
        self._spaces: dict[int, NamespaceGuard] = {}
        self._probes: list[Probe] = []
        self._kinds: list[tuple[str, Any, type]] = []
        self._dict_of: list[tuple[str, Any, dict[str, Any]]] = []
        self._strangers: list[tuple[str, Any]] = []
        self._kept: list[Any] = []
        self._empties: list[dict[Any, Any]] = []
        self._unhooked: list[dict[Any, Any]] = [getattr(module_globals, name) for name in GLOBAL_HOOKS]
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
        self._switches = [] if hooks_only else [*map(TrainingFlag, self._counted), *self._flags()]
        self._remember()

    def _remember(self) -> None:
        """Prepare the comparison of what was collected; whoever compares says how."""
        raise NotImplementedError

    def _look(self, model: Any) -> None:
        if isinstance(model, nn.Module):
            self._seen |= set(map(id, model.modules()))
            for path, module in model.named_modules():
                self._module(path or type(module).__name__, module)
        elif not isinstance(model, types.FunctionType):
            self._hold(type(model).__name__, model, 0)
        if self._hooks_only:
            return
        functions = [model] if isinstance(model, types.FunctionType) else methods_of_model(model)
        for function in functions:
            self._function(function, 0)

    def _flags(self) -> list[Flag]:
        return [GradientFlag(path, p) for path, p in self.tensors.values() if type(p) is nn.Parameter and p.is_leaf]

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
        # The forward of a linear layer reads parameters alone.
        if type(module) is nn.Linear and not derived_names(held) and is_plain_linear(held):
            self._counted.append(held)
            self._linear.append((path, held))
        else:
            self._dict(path, held, derived_names(held))
        self.known.add(id(module))
        if not of_library(type(module)) and not installed(file_of(type(module))):
            self._dict_of.append((path, module, held))
        if "parametrizations" in held.get("_modules", ()):
            self._name("parametrize's cache", vars(parametrize), "_cache_enabled")
        self._class(type(module))
        self._namespaces.setdefault(id(type(module)), (type(module).__name__, type(module)))
        if slots_of(type(module)):
            read = reader_of(module)
            assert read is not None
            self._probes.append(Probe(path, module, read, read()))
        for name in (*INNER, *HOOKS):
            self._dict(f"{path}.{name}", held.get(name, {}))
        for inner in (held.get("_parameters", {}), held.get("_buffers", {})):
            for name, value in inner.items():
                if name not in self._noted.get(id(inner), ()):
                    self._hold(f"{path}.{name}", value, 0)
        for name, value in held.items():
            made_by_calls = name in derived_names(held) or name in self._noted.get(id(held), ())
            if name not in BOOKKEEPING and not made_by_calls:
                self._hold(f"{path}.{name}", value, 0)

    def _written(self, cls: type) -> None:
        """Methods of a class, in whose place others may be put: compilers trust that there are none."""
        for part in () if (cls, "methods") in self._seen else lookup_chain(cls):
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
                if not key.startswith("__") and isinstance(value, (*PLAIN, list, dict, set, Tensor)):
                    self._name(f"{part.__name__}.{key}", vars(part), key, part)

    def _dict(self, owner: str, held: dict[Any, Any], derived: frozenset[str] = frozenset()) -> None:
        if not isinstance(held, dict):  # a scripted module's parts, which cannot be replaced
            return
        if held:
            self._dicts.append(self._entry(owner, held, derived, ordered=owner.rpartition(".")[2] in INNER))
        else:
            hooks = owner.rpartition(".")[2] in HOOKS
            (self._unhooked if hooks else self._empties).append(held)
            self._owners[id(held)] = owner

    def _entry(
        self, owner: str, held: dict[Any, Any], derived: frozenset[str] = frozenset(), *, ordered: bool = True
    ) -> DictGuard:
        noted = self._noted.get(id(held), set())
        was = {key: None if key in noted else value for key, value in raw(held).items()}  # notes are held by nobody
        return DictGuard(owner, held, was, derived | noted, ordered)

    def _hold(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, PLAIN) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, UninitializedParameter | UninitializedBuffer):
            raise NotGraphable(f"{path} has no size yet: call the model once before it is optimized")
        if isinstance(value, Tensor):
            self.tensors[id(value)] = (path, value)
        elif isinstance(value, types.GeneratorType):
            raise NotGraphable(f"{path} is a generator, whose state cannot be watched")
        elif is_consumed_by_reading(value):
            raise NotGraphable(f"{path} is a {type(value).__name__}, which goes on with every call that reads it")
        elif isinstance(value, types.FunctionType):
            self._function(value, depth)
        elif isinstance(value, types.MethodType):
            self._inside([(f"{path}.__self__", value.__self__), (path, value.__func__)], depth)
        elif isinstance(value, nn.Module):
            self._part(path, value)
        elif isinstance(value, types.ModuleType | type):
            self._namespaces.setdefault(id(value), (path, value))
        elif (held := context_objects(value)) is not None:
            read = partial(context_value, value)
            self._probes.append(Probe(path, value, read, read()))
            self._kept += held
            self._inside(((path, each) for each in held), depth)
        elif isinstance(value, types.MappingProxyType):
            self._inside(((path, each) for each in gc.get_referents(value)), depth)
        elif isinstance(value, C_TYPES) or (isinstance(value, memoryview) and value.contiguous):
            self._probes.append(Probe(path, value, read := partial(bytes, value), read()))
        elif is_shared_memory(value):
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
        elif is_runtime_object(value):
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
        dead = partial(is_dead, weakref.ref(met))
        self._probes.append(Probe(path, None, dead, False))
        if isinstance(getattr(met, "__dict__", None), dict) and not isinstance(met, Tensor | nn.Module):
            self._seen.add(id(met))
            self._object(path, met, depth)
        elif not isinstance(met, types.FunctionType | type):
            raise NotGraphable(f"{path} is a weak reference to a {type(met).__name__}, which cannot be watched")

    def _contents_held(self, path: str, value: Any, depth: int) -> None:
        if is_long(value):
            self._long.append((path, value))
        if (read := reader_of(value)) is not None:
            was = read()
            self._probes.append(Probe(path, value, read, set(was) if was is value else was))
            self._inside(((f"{path}.{name}", getattr(value, name, None)) for name in slots_of(type(value))), depth)
        if isinstance(value, dict):
            self.known.add(id(value))
            self._dicts.append(self._entry(path, value))
            # An ordered dictionary can be put in another order without a new version.
            if isinstance(value, OrderedDict) and len(value) < MAX_COMPARED_ITEMS:
                self._probes.append(Probe(path, value, order := partial(tuple, value), order()))
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
            for value in kept_defaults(function):
                self._hold(f"a default of {function.__qualname__}", value, depth + 1)
        for registry in gc.get_referents(registered) if (registered := dispatch_registry(function)) is not None else ():
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
        codes = {**codes, **cached_functions(codes)}
        own = {code: names for code, names in codes.items() if not library(code.co_filename)}
        words = {word for code in own for word in (*code.co_names, *identifiers_in(code))}
        self._words = frozenset(words | {word for _, word in lookups})
        self._ran = functions_with({code for code in own if not installed(code.co_filename)}, free or {})
        for function in self._ran:
            self._function(function, 0)
            for name in function.__dict__.keys() & self._words:
                self._name(f"{function.__qualname__}.{name}", function.__dict__, name)
        for owner, word in lookups:
            self._asked_for(owner, word)
        for code, names in own.items():
            for name, *attributes in attribute_chains(code):
                self._global(name, attributes, names)
                if reads_environment(names.get(name), attributes[0] if attributes else None):
                    self._environment(strings_named(code, names))
            self._imported(code, names)
            self._looked_up(code, names)
            if not installed(code.co_filename):
                self._built_in(code, names)
        self._attributes(frozenset(chain.from_iterable(map(attributes_of_others, own))))
        self._askers(frozenset(chain.from_iterable(map(weights_asked_for_gradients, own))))
        for path, value, depth in self._frontier:
            self._hold(path, value, depth)
        self._frontier = []
        for path, value in self._long:
            if path.rpartition(".")[2].rpartition(" ")[2].partition("[")[0] in self._words:
                self._probes.append(Probe(path, value, partial(digest, value), digest(value)))
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
                ask = partial(log_level, value) if isinstance(value, logging.Logger) else getattr(value, word, None)
                if callable(ask) and (id(value), word) not in self._seen:
                    self._seen.add((id(value), word))
                    self._probes.append(Probe(path, None, ask, ask()))
            held: dict[str, Any] = getattr(value, "__dict__", {})
            for name in held.keys() & words if isinstance(held, dict) else ():
                if isinstance(held[name], PLAIN) and name != "name":
                    self._name(f"{path}.{name}", held, name)

    def _built_in(self, code: types.CodeType, names: dict[str, Any]) -> None:
        """Built-in names that a model's own code reads: they may be replaced, or taken by a global of that name."""
        used = {name for name in code.co_names if name not in names and name in vars(builtins)} - _NOTED
        for name in used:
            if (id(builtins), name) not in self._seen:
                self._seen.add((id(builtins), name))
                self._names.append(NameGuard(f"builtins.{name}", vars(builtins), name, vars(builtins)[name]))
        free = frozenset(name for name in used if (id(names), "builtin", name) not in self._seen)
        if free:
            self._seen |= {(id(names), "builtin", name) for name in free}
            apart = partial(names.keys().isdisjoint, free)
            self._probes.append(Probe(f"a built-in name in {names.get('__name__')}", None, apart, True))

    def _global(self, name: str, attributes: list[str], names: dict[str, Any]) -> None:
        if name not in names:  # a builtin, or nothing
            if not hasattr(builtins, name):
                self._absent(f"the global {name}", names, name)
            elif not isinstance(vars(builtins)[name], CODE) and vars(builtins)[name] is not None:
                self._name(f"builtins.{name}", vars(builtins), name)
            return
        value = names[name]
        if isinstance(value, type) and not of_library(value) and not installed(file_of(value)):
            self._namespaces.setdefault(id(value), (name, value))
        if isinstance(value, types.ModuleType | type):
            self._way(name, value, attributes)
        elif isinstance(value, types.FunctionType):
            if dispatch_registry(value) is not None:
                self._function(value, 1)
            if not library(value.__code__.co_filename):
                for kept in kept_defaults(value):
                    self._hold(f"a default of {value.__qualname__}", kept, 1)
                if attributes and attributes[0] in value.__dict__:
                    self._name(f"{name}.{attributes[0]}", value.__dict__, attributes[0])
        elif not isinstance(value, types.BuiltinFunctionType):
            self._name(f"the global {name}", names, name)

    def _way(self, path: str, owner: types.ModuleType | type, attributes: Iterable[str]) -> None:
        """What attributes read one from the other lead to, through modules and classes."""
        for attribute in attributes:
            holder = next((p for p in lookup_chain(owner) if attribute in vars(p)), None)
            if holder is None or (of_library(owner) and not is_setting(vars(holder)[attribute])):
                return
            path, value = f"{path}.{attribute}", vars(holder)[attribute]
            if not isinstance(value, types.ModuleType | type):
                self._name(path, vars(holder), attribute, holder if isinstance(holder, type) else None)
                return
            owner = value

    def _imported(self, code: types.CodeType, names: dict[str, Any]) -> None:
        """Names of modules that a piece of code imports when it runs."""
        for module in imports_of(code, str(names.get("__package__") or "")):
            if module is os and not {"environ", "getenv"}.isdisjoint(code.co_names):
                self._environment(strings_named(code, names))
            for name in () if of_library(module) else vars(module).keys() & set(code.co_names):
                self._name(f"{module.__name__}.{name}", vars(module), name)

    def _looked_up(self, code: types.CodeType, names: dict[str, Any]) -> None:
        """Names that a piece of code asks for by a word; all of them where it has the whole dictionary."""
        if _LOOKING_UP.isdisjoint(code.co_names):
            return
        owners = [names.get(name) for name in code.co_names]
        owners += [sys.modules.get(word) for word in code.co_consts if isinstance(word, str)]
        if names.get("sys") is sys and {"sys", "modules"} <= set(code.co_names):
            owners += [module for module in list(sys.modules.values()) if not installed(file_of(module))]
        spaces = [vars(owner) for owner in owners if isinstance(owner, types.ModuleType) and not of_library(owner)]
        for held in [names, *spaces]:
            whole = not ({"globals"} if held is names else _WHOLE).isdisjoint(code.co_names)
            words = [key for key, value in held.items() if whole and isinstance(value, PLAIN) and key[:2] != "__"]
            read = () if held is names else code.co_names
            for word in held.keys() & {*identifiers_in(code), *read, *words}:
                self._name(f"{held.get('__name__')}.{word}", held, word)
        for word in identifiers_in(code) - names.keys() if "globals" in code.co_names else ():
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
            self._probes.append(Probe(f"{self.tensors.get(id(owner), ('a weight',))[0]}.{word}", owner, read, False))

    def _absent(self, path: str, held: Any, word: str) -> None:
        """A name that code asked for, and that was not there."""
        if (id(held), word) not in self._seen:
            self._seen.add((id(held), word))
            self._probes.append(Probe(path, held, partial(contains, held, word), False))

    def asked_of(self, asked: dict[int, set[str]], answers: Iterable[Callable[[], Any]] = ()) -> None:
        """Watches also what code asked of the model's tensors besides their values, and what of PyTorch's settings."""
        for ask in answers:
            with suppress(TypeError, RuntimeError):  # asked with an argument, which nobody saw
                self._probes.append(Probe(f"what {ask.__name__} tells", None, ask, ask()))
        for key in asked.keys() & self.tensors.keys():
            path, tensor = self.tensors[key]
            if "_version" in asked[key]:  # what is made of a weight once and kept until the weight changes
                read = partial(getattr, tensor, "_version")
                self._probes.append(Probe(f"{path}'s contents", tensor, read, read()))
            if not asked[key].isdisjoint(("requires_grad", "grad", "is_leaf")):
                state = partial(gradient_state, tensor)
                self._probes.append(Probe(f"{path}'s gradient", tensor, state, state()))

    def _attributes(self, others: frozenset[str]) -> None:
        """Marks on weights and on linear layers that code asks for."""
        words = self._words or frozenset()
        for path, tensor in list(self.tensors.values()):
            marks = getattr(tensor, "__dict__", {})
            for name in marks.keys() & words if marks else ():
                self._name(f"{path}.{name}", marks, name)
        for path, held in self._linear:
            for name in (held.keys() & words) - LINEAR_ATTRIBUTES | (LINEAR_SETTINGS & others & held.keys()):
                self._name(f"{path}.{name}", held, name)

    def _askers(self, names: frozenset[str]) -> None:
        """Whether weights ask for gradients and have them, of those that code asks."""
        for path, tensor in list(self.tensors.values()) if names else ():
            if path.rpartition(".")[2] in names:
                state = partial(gradient_state, tensor)
                self._probes.append(Probe(f"{path}'s gradient", tensor, state, state()))

    def _named(self) -> None:
        """Classes and modules that the model holds, or whose objects it holds: what code asks for by name."""
        done: set[int] = set()
        while waiting := [(key, *each) for key, each in self._namespaces.items() if key not in done]:
            for key, path, owner in waiting:
                done.add(key)
                before: list[Any] = []
                for part in lookup_chain(owner):
                    if not of_library(part):
                        self._names_of(path, part, before)
                        before.append(part)

    def _names_of(self, path: str, part: types.ModuleType | type, before: list[Any]) -> None:
        """What is read of one class, and that no class asked before it has such a name of its own."""
        for name in vars(part).keys() & (self._words or frozenset()):
            value = vars(part)[name]
            for each in before if isinstance(value, PLAIN) else ():
                if name not in vars(each):
                    self._space_of(each).was[name] = GONE
            if isinstance(value, type):
                self._namespaces.setdefault(id(value), (f"{path}.{name}", value))
            elif isinstance(value, (*PLAIN, list, dict, set, tuple, Tensor)) or is_class_object(value, part):
                self._name(f"{path}.{name}", vars(part), name, part if isinstance(part, type) else None)

    def follow(self, codes: dict[types.CodeType, dict[str, Any]]) -> None:
        """Watches also the functions and classes that these pieces of code name, and the methods that they are."""
        classes = {type(module) for module in self.root.modules()} if isinstance(self.root, nn.Module) else set()
        for code, names in codes.items():
            if code.co_filename.startswith(OBSERVING) or standard(code.co_filename):
                continue
            for name, *attributes in attribute_chains(code):
                value = names.get(name)
                if isinstance(value, CODE):
                    self._followed(code.co_filename, names, name, attributes)
                classes |= {value} if isinstance(value, type) else set()
        held = [owner for _, owner in self._namespaces.values() if isinstance(owner, type)]
        classes |= {owner for owner in held if not of_library(owner)}
        for cls in classes:
            self._methods_of(cls, codes)
        self._written_anew(codes)
        self._space_of(Tensor).was |= {key: vars(Tensor).get(key, GONE) for key in dir(torch._C.TensorBase)
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
            read = partial(codes_of, tuple(found.values()))
            self._probes.append(Probe("the code of a function", None, read, read()))

    def _followed(self, filename: str, names: dict[str, Any], name: str, attributes: list[str]) -> None:
        """What a global name and the attributes read of it lead to, as long as these are modules and classes."""
        value = names[name]
        if library(filename) or installed(filename):
            space = self._spaces.setdefault(id(names), NamespaceGuard(names.get("__name__", filename), names, {}))
            space.was[name] = value
        elif (id(names), name) not in self._seen:  # a script's names change at every step: looked at one by one
            self._seen.add((id(names), name))
            self._names.append(NameGuard(f"the global {name}", names, name, value))
        for attribute in attributes:
            holder = next((part for part in lookup_chain(value) if attribute in vars(part)), None)
            if holder is None or not isinstance(vars(holder)[attribute], CODE) or standard(file_of(holder)):
                return
            self._space_of(holder).was[attribute] = value = vars(holder)[attribute]

    def _methods_of(self, cls: type, codes: dict[types.CodeType, dict[str, Any]]) -> None:
        """Its methods that ran, wherever they come from, and that no class on the way to them has its own."""
        own: list[type] = []
        for part in lookup_chain(cls):
            own.append(part)
            ran = [key for key, value in vars(part).items() if code_of(value) in codes]
            for each in own if ran else ():
                self._space_of(each).was |= {key: vars(each).get(key, GONE) for key in ran}

    def _space_of(self, holder: types.ModuleType | type) -> NamespaceGuard:
        """The names of a module or a class."""
        held, cls = namespace_of(holder), holder if isinstance(holder, type) else None
        return self._spaces.setdefault(id(held), NamespaceGuard(holder.__name__, held, {}, cls))

    def _environment(self, names: tuple[str, ...]) -> None:
        """The variables that a piece of code may ask for: those it names."""
        if ("environment", names) not in self._seen:
            self._seen.add(("environment", names))
            read = partial(environment_values, names)
            self._probes.append(Probe("the environment", None, read, read()))

    def _name(self, path: str, holder: Any, key: str, owner: type | None = None, depth: int = 0) -> None:
        value = holder[key]
        mark = (id(owner or holder), key)
        if mark in self._seen or isinstance(value, CODE):
            return
        self._seen.add(mark)
        self._names.append(NameGuard(path, holder, key, value, owner))
        self._hold(path, value, depth + 1)
