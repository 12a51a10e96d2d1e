"""A disk cache of searches, keyed by the model's code and sizes, the call, the device and library versions."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import tempfile
import types
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.engine.example_inputs import Inputs, leaves
from ridgeline.engine.guards.code_reads import library
from ridgeline.kernels.files import write_atomically
from ridgeline.kernels.tensorfloat import settings
from ridgeline.optimizer.receipt import Receipt
from ridgeline.optimizer.search.candidate import Candidate

FORMAT = 1
BUDGETS_S = (15.0, 60.0, 200.0)
"""Searches with budgets in the same range share a cache entry."""
_MARKS = ("_is_torch_compile",)
"""Attributes that compiling leaves on a model."""
_PLAIN = (int, float, bool, str, type(None), tuple, torch.dtype)


def folder() -> Path:
    """The folder of cached searches: ``$RIDGELINE_CACHE``, or ``ridgeline`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    own = os.environ.get("RIDGELINE_CACHE")
    base = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ridgeline"
    return base / "optimize"


def key_of(model: nn.Module, inputs: Inputs, settings: Mapping[str, Any]) -> str:
    """A hash of everything that a search's result depends on."""
    digest = hashlib.sha256()
    for line in (*_model_lines(model), *_input_lines(inputs), *_environment_lines()):
        digest.update(line.encode())
        digest.update(b"\n")
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:32]


def described(function: Any) -> str:
    """A function's bytecode as text."""
    if not isinstance(function, types.FunctionType):
        return f"{type(function).__module__}.{type(function).__qualname__} {getattr(function, '__qualname__', '')}"
    return "\n".join(_code_lines([function], set())) or function.__qualname__


def budget_class(budget_s: float) -> int:
    return sum(budget_s > limit for limit in BUDGETS_S)


def _model_lines(model: nn.Module) -> Iterator[str]:
    """The module tree: classes, plain attributes, sizes and dtypes of tensors, and each class's code once."""
    classes: dict[type, None] = {}
    for path, module in model.named_modules():
        classes[type(module)] = None
        settings = {
            key: value for key, value in vars(module).items() if isinstance(value, _PLAIN) and key not in _MARKS
        }
        yield f"{path}: {type(module).__module__}.{type(module).__qualname__} {sorted(settings.items(), key=str)}"
        own = {**module._parameters, **module._buffers}
        # Strides are left out: a search may have changed the layout of convolution weights.
        yield from (f"{path}.{name}: {t.dtype} {tuple(t.shape)} {t.device.type} {t.requires_grad}"
                    for name, t in own.items() if t is not None)  # fmt: skip
    yield str(getattr(model, "config", ""))
    seen: set[types.CodeType] = set()
    held = [value for module in model.modules() for value in vars(module).values()]
    yield from _code_lines([value for value in held if isinstance(value, types.FunctionType)], seen)
    for kind in classes:
        functions = [value for part in kind.__mro__ for value in vars(part).values()]
        yield from _code_lines([each for each in functions if isinstance(each, types.FunctionType)], seen)


def _code_lines(functions: Iterable[types.FunctionType], seen: set[types.CodeType]) -> Iterator[str]:
    """The bytecode of a model's own functions and of those they call: instructions, names and constants.

    Source text is missing for code run as a script, and ReLU and sigmoid differ only in a name.
    """
    waiting = list(functions)
    while waiting:
        function = inspect.unwrap(waiting.pop())
        code = getattr(function, "__code__", None)
        if code is None or code in seen or library(code.co_filename):
            continue
        seen.add(code)
        yield code.co_qualname
        for part in _nested(code):
            yield f"{part.co_code.hex()} {part.co_names} {part.co_varnames} {sorted(map(_told, part.co_consts))}"
            named = {name: function.__globals__[name] for name in part.co_names if name in function.__globals__}
            yield from (f"{name}={value!r}" for name, value in named.items() if _is_number(value))
            waiting += [value for value in named.values() if isinstance(value, types.FunctionType)]


def _is_number(value: Any) -> bool:
    """Whether a global is a number; strings may be process names, which differ every time."""
    if isinstance(value, tuple):
        return all(map(_is_number, value))
    return isinstance(value, (int, float, torch.dtype))


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and those defined in it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _nested(const)


def _told(const: Any) -> str:
    """A constant as text that is the same in every process: sets have no order, and code objects are listed apart."""
    if isinstance(const, types.CodeType):
        return const.co_name
    if isinstance(const, tuple):
        return str([_told(each) for each in const])
    return str(sorted(map(_told, const))) if isinstance(const, frozenset) else repr(const)


def _input_lines(inputs: Inputs) -> Iterator[str]:
    given = (inputs.args, dict(inputs.kwargs))
    for path, t in leaves(given):
        yield f"{path}: {t.dtype} {tuple(t.shape)} {t.stride()} {t.device.type} {t.requires_grad}"
    yield from _plain_lines(given)


def _plain_lines(item: Any, path: str = "") -> Iterator[str]:
    if isinstance(item, _PLAIN) and not isinstance(item, tuple):
        yield f"{path}={item!r}"
    elif isinstance(item, Mapping):
        for key, value in item.items():
            yield from _plain_lines(value, f"{path}.{key}")
    elif isinstance(item, (list, tuple)):
        for i, value in enumerate(item):
            yield from _plain_lines(value, f"{path}.{i}")
    elif not isinstance(item, Tensor):
        yield f"{path}: {type(item).__qualname__}"


def _environment_lines() -> Iterator[str]:
    yield f"torch {torch.__version__} format {FORMAT}"
    yield from _own_code()
    try:
        import triton
    except ImportError:
        yield "no triton"
    else:
        yield f"triton {triton.__version__}"
    if torch.cuda.is_available():
        yield f"{torch.cuda.get_device_name()} cuda {torch.version.cuda} cudnn {torch.backends.cudnn.version()}"
    autocast = [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cuda", "cpu")]
    yield f"{settings()} {autocast}"


@cache
def _own_code() -> tuple[str, ...]:
    """Hashes of our own source files: another version of the rewrites and kernels needs another search."""
    package = Path(__file__).resolve().parent.parent
    files = sorted(file for name in ("engine", "kernels", "optimizer") for file in (package / name).rglob("*.py"))
    return tuple(
        f"{file.relative_to(package)} {hashlib.sha256(file.read_bytes()).hexdigest()[:16]}" for file in files
    )


def load(key: str) -> tuple[Candidate, Receipt] | None:
    """The result of an earlier search with this key, if it can be read."""
    try:
        found = json.loads((folder() / f"{key}.json").read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            return None
        return Candidate.from_dict(found["candidate"]), Receipt.from_dict(found["receipt"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save(key: str, candidate: Candidate, receipt: Receipt) -> bool:
    """Store a search; False if the folder cannot be written."""
    document = {"format": FORMAT, "candidate": candidate.to_dict(), "receipt": receipt.to_dict()}
    try:
        folder().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder(), suffix=".part", delete=False, encoding="utf-8") as part:
            json.dump(document, part, allow_nan=False)
        write_atomically(folder() / f"{key}.json", Path(part.name))
    except OSError:
        return False
    return True


def forget(key: str) -> None:
    """Delete an entry that is no longer valid."""
    (folder() / f"{key}.json").unlink(missing_ok=True)
