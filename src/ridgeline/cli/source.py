"""What a person means by MODEL: a network of the zoo, a saved graph, or a function in a script of theirs."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ridgeline.capture.vision_ops import allow_unmatched_torchvision
from ridgeline.errors import InputError, RidgelineError, nearest
from ridgeline.graph import Graph

CAPTURE_MODES = ("infer", "train")


def graph_of(model: str, options: Mapping[str, Any], further: Sequence[str]) -> Graph:
    """The graph behind MODEL with the options that were given."""
    # `--option key=value` pairs; each key once
    found: dict[str, Any] = {}
    for text in further:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not key or not equals or not value:
            raise InputError(f"cannot read --option {text!r}: write key=value")
        if key in found or key in options:
            raise InputError(f"option {key!r} is given twice")
        found[key] = _value(value)
    asked = {**options, **found}
    script, colon, function = model.rpartition(":")
    if colon and script.endswith(".py"):
        # Call the function; a module it returns is captured, a graph is taken as it is
        path = Path(script)
        make = _function(path, function)
        taken = inspect.signature(make).parameters
        mine = {key: value for key, value in asked.items() if key in taken}
        rest = {key: value for key, value in asked.items() if key not in taken}
        made = _called(path, function, make, mine)
        if isinstance(made, Graph):
            _refuse(rest, (), f"{path}:{function} returned a graph")
            return made
        _refuse(rest, ("mode", "optimizer"), f"{path}:{function}({', '.join(taken)})")
        return _captured(path, function, made, {**mine, **rest})
    if is_model_file(model):
        from ridgeline.api import imported_graph
        from ridgeline.capture.importers import load

        return imported_graph(load(model), asked)
    if "dims" in asked:
        raise InputError(f"--dim is for model files, and {model!r} is none: use the options of the network")
    if model.endswith((".json", ".json.gz")):
        if asked:
            raise InputError(f"{model} is a saved graph and has its sizes already: leave out {', '.join(asked)}")
        return Graph.load(model)
    if model.endswith(".py"):
        raise InputError(f"{model} is a script: say which function makes the model, as {model}:make")
    from ridgeline.models import build

    return build(model, **asked)


def is_model_file(model: str) -> bool:
    """Whether MODEL is a file or folder that an importer reads."""
    from ridgeline.capture.importers import SUFFIXES

    path = Path(model)
    if path.is_dir():
        return any((path / name).exists() for name in ("config.json", "saved_model.pb"))
    is_other = model.endswith((".json.gz", ".py")) or (path.suffix == ".json" and path.name != "config.json")
    return model.lower().endswith(SUFFIXES) or (path.is_file() and not is_other)


def dims_of(texts: Sequence[str]) -> dict[str, int]:
    """Sizes of named dims, as ``batch=8``."""
    found: dict[str, int] = {}
    for text in texts:
        name, equals, size = (part.strip() for part in text.rpartition("="))
        if not name or not equals or not size.isdigit() or name in found:
            raise InputError(f"cannot read --dim {text!r}: write name=size, each name once, such as batch=8")
        found[name] = int(size)
    return found


def _value(text: str) -> Any:
    """A flag, a number or a word, as written."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def made_by(source: str, dims: Mapping[str, int] | None = None) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Model, args and kwargs that ``script.py:function`` returns: the model alone, or a tuple of two or three.

    A model file is loaded, and its args are made up: what is optimized are its shapes.
    """
    if is_model_file(source):
        from ridgeline.capture.importers import runnable

        return runnable(source, dims or {})
    if dims:
        raise InputError(f"--dim is for model files, and {source!r} is none")
    script, colon, function = source.rpartition(":")
    if not colon or not script.endswith(".py"):
        raise InputError(f"cannot read {source!r}: write script.py:function; it returns (model, args, kwargs)")
    path = Path(script)
    return _unpacked(path, function, _called(path, function, _function(path, function), {}))


def _refuse(options: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    for option in options:
        if option not in known:
            raise InputError(f"{what} takes no {option!r}: add it as a parameter of the function, or leave it out")


def _captured(path: Path, function: str, made: Any, asked: Mapping[str, Any]) -> Graph:
    model, args, kwargs = _unpacked(path, function, made)
    mode = asked.get("mode", "infer")
    if mode not in CAPTURE_MODES:
        raise InputError(
            f"a captured model has no mode {mode!r}{nearest(mode, CAPTURE_MODES)}; "
            "for a decode step, let the function return its arguments"
        )
    from ridgeline.capture import capture

    try:
        return capture(model, args, kwargs, mode=mode, optimizer=asked.get("optimizer", "adamw"))
    except RidgelineError:
        raise
    except Exception as error:
        if not any(frame.name == "_call_impl" for frame in traceback.extract_tb(error.__traceback__)):
            raise  # not in the model: a mistake of ours
        given = f"{len(args)} argument{'s' * (len(args) != 1)}" + "".join(f", {name}=" for name in kwargs)
        remedy = "" if args or kwargs else f"; let {function}() return (model, args)"
        blamed = _blamed(path, f"{type(model).__name__}, called with the {given} that {function}() returns,", error)
        raise InputError(f"{blamed}{remedy}") from error


def _unpacked(path: Path, function: str, made: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    given = made if isinstance(made, tuple) and made else (made,)
    model, args, kwargs = (*given, *((), {})[len(given) - 1 :])[:3]
    args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    if not callable(model) or not isinstance(kwargs, dict) or len(given) > 3:
        what = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise InputError(f"{path}:{function} must return (model, args, kwargs) or a graph, not {what}")
    return model, args, kwargs


def _function(path: Path, name: str) -> Callable[..., Any]:
    # The script as a module, with its folder importable as if it were run
    if not path.is_file():
        raise InputError(f"cannot read {path}: no such file")
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
    allow_unmatched_torchvision()
    try:
        with _alone(path):
            exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)
    except RidgelineError:
        raise
    except (Exception, SystemExit) as error:
        raise _blamed(path, "the script", error) from error
    found = getattr(module, name, None)
    if not callable(found):
        known = [word for word, value in vars(module).items() if inspect.isfunction(value)]
        raise InputError(f"{path} has no function {name!r}{nearest(name, known)}")
    return found  # type: ignore[no-any-return]


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """The script sees its own name as the command line, as if it were run without arguments: ours are not its."""
    argv = sys.argv
    sys.argv = [str(path)]
    try:
        yield
    finally:
        sys.argv = argv


def _called(path: Path, function: str, make: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    try:
        with _alone(path):
            return make(**options)
    except RidgelineError:
        raise
    except (Exception, SystemExit) as error:
        raise _blamed(path, f"{function}()", error) from error


def _blamed(path: Path, what: str, error: BaseException) -> InputError:
    """An error of the script itself, with the line of the script where it happened."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = lines[-1] if lines else getattr(error, "lineno", None)
    where = f"{path}:{line}" if line else str(path)
    return InputError(f"{what} failed at {where}: {type(error).__name__}: {error}")
