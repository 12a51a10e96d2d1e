"""What a piece of code reads besides its arguments: names, imports, attributes, variables of the environment."""

from __future__ import annotations

import dis
import enum
import gc
import inspect
import os
import sys
import types
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _python_dispatch

from ridgeline.engine import OWN_CODE

PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size)
Free = dict[types.CodeType, set[tuple[int, ...]]]
"""What variables of functions that ran held which they have from around them, by ``id``."""
Lookups = Sequence[tuple[Any, str]]
"""Whom code asked for an attribute by a word, and the word; ``sys.modules`` for a module that it imported."""


def dispatch_registry(function: types.FunctionType) -> Any:
    """Which function answers for which type, where one is chosen by the type of its argument."""
    found = function.__dict__.get("registry")
    return found if isinstance(found, types.MappingProxyType) else None


def functions_with(codes: set[types.CodeType], free: Free) -> list[types.FunctionType]:
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
    return all(value is None or id(value) == seen or isinstance(value, PLAIN)
               for value, seen in zip(map(cell_content, function.__closure__ or ()), held))  # fmt: skip


def cell_content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def reads_environment(value: Any, attribute: str | None) -> bool:
    """Whether code that reads this of a global name asks for variables of the environment."""
    return value is os.environ or value is os.getenv or (value is os and attribute in ("environ", "getenv"))


def strings_named(code: types.CodeType, names: dict[str, Any]) -> tuple[str, ...]:
    """The strings that a piece of code names, by themselves or as globals."""
    named = [names.get(name) for name in code.co_names]
    return tuple(dict.fromkeys(word for word in (*code.co_consts, *named) if isinstance(word, str)))


def environment_values(names: tuple[str, ...]) -> tuple[str | None, ...]:
    return tuple(map(os.environ.get, names))


def kept_defaults(function: types.FunctionType) -> list[Any]:
    """Defaults of a function's arguments that outlive its calls and may change in them."""
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [value for value in held if not isinstance(value, (*PLAIN, *CODE, enum.Enum, types.EllipsisType))]


def methods_of_model(model: Any) -> list[types.FunctionType]:
    return [each for each in functions_of(model) if each.__closure__ or kept_defaults(each)]


def functions_of(model: Any) -> list[types.FunctionType]:
    """The functions of a model's classes and of those of its parts, as far as they are the model's own code."""
    classes = {type(part) for part in model.modules()} if isinstance(model, nn.Module) else {type(model)}
    functions = [value for cls in classes for part in cls.__mro__ for value in vars(part).values()]
    written = [each for each in functions if isinstance(each, types.FunctionType)]
    return list({id(each): each for each in written if not library(each.__code__.co_filename)}.values())
OBSERVING = (*OWN_CODE, str(_python_dispatch.__file__), str(torch.overrides.__file__))
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
    file = file_of(value)
    if file:
        return library(file)
    return not value.__flags__ & _HEAP_TYPE if isinstance(value, type) else value.__name__ in sys.builtin_module_names


def file_of(value: types.ModuleType | type) -> str:
    module = sys.modules.get(value.__module__) if isinstance(value, type) else value
    return getattr(module, "__file__", None) or ""
CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
         types.ModuleType, type)  # fmt: skip
_HEAP = 1 << 9
"""Classes that Python made, whose names can stand for something else later."""


def lookup_chain(value: Any) -> tuple[Any, ...]:
    """Where names of a module or a class are looked up."""
    if isinstance(value, types.ModuleType):
        return (value,)
    return tuple(part for part in value.__mro__ if part.__flags__ & _HEAP) if isinstance(value, type) else ()


def namespace_of(value: Any) -> dict[str, Any]:
    """The dictionary behind a module's or a class's names, which has a version."""
    if isinstance(value, types.ModuleType):
        return vars(value)
    (held,) = gc.get_referents(vars(value))
    return held


def code_of(value: Any) -> types.CodeType | None:
    """The code of a method as it stands in its class."""
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    return getattr(value, "__code__", None)


def installed(filename: str) -> bool:
    """Code of a package that somebody installed."""
    return "site-packages" in filename or "dist-packages" in filename


@lru_cache(maxsize=4096)
def attribute_chains(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
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
def weights_asked_for_gradients(code: types.CodeType) -> frozenset[str]:
    """Attributes that a piece of code asks whether they require gradients, or have them: ``self.weight.grad``."""
    found, before = set(), ""
    for instruction in dis.get_instructions(code):
        attribute = str(instruction.argval) if instruction.opname == "LOAD_ATTR" else ""
        if attribute in ("requires_grad", "grad") and before:
            found.add(before)
        before = before if instruction.opname == "CACHE" else attribute
    return frozenset(found)


def codes_of(functions: tuple[types.FunctionType, ...]) -> tuple[int, ...]:
    return tuple(id(part) for each in functions for part in (each.__code__, each.__defaults__))


def cached_functions(codes: dict[types.CodeType, dict[str, Any]]) -> dict[types.CodeType, dict[str, Any]]:
    """Functions behind ``lru_cache`` that code names: they ran once, and run again when that is cleared."""
    held = [names.get(name) for code, names in codes.items() if not library(code.co_filename) for name in code.co_names]
    found = [inspect.unwrap(value) for value in held if hasattr(value, "cache_clear") and callable(value)]
    return {each.__code__: each.__globals__ for each in found if isinstance(each, types.FunctionType)}


@lru_cache(maxsize=4096)
def identifiers_in(code: types.CodeType) -> frozenset[str]:
    """Words in a piece of code by which it may ask for names."""
    return frozenset(value for value in code.co_consts if isinstance(value, str) and value.isidentifier())


@lru_cache(maxsize=4096)
def attributes_of_others(code: types.CodeType) -> frozenset[str]:
    """Attributes that a piece of code reads of anything but ``self``."""
    found, before = set(), ""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_ATTR" and before != "self":
            found.add(str(instruction.argval))
        if instruction.opname != "CACHE":
            before = str(instruction.argval) if instruction.opname.startswith("LOAD_FAST") else ""
    return frozenset(found)


def imports_of(code: types.CodeType, package: str) -> list[types.ModuleType]:
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
