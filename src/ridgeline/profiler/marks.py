"""Ranges a recording gets while it runs: one for each module's forward pass, one for each garbage collection."""

from __future__ import annotations

import gc
import inspect
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

MODULE = "rl.module:"
_TORCH = Path(torch.__file__).parent
GC = "python gc generation"


def roots(models: Iterable[nn.Module] = ()) -> list[nn.Module]:
    """The given models, or every module alive that is no other's child."""
    given = list(models)
    if given:
        return given
    alive = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
    inner = {id(child) for module in alive for child in module.children()}
    wrapped = {id(module) for module in alive if type(module).__name__ == "OptimizedModule"}
    return [module for module in alive if id(module) not in inner and id(module) not in wrapped and has_parts(module)]


def has_parts(module: nn.Module) -> bool:
    """Losses and activations that stand alone are no models."""
    return any(True for _ in module.parameters()) or any(True for _ in module.children())


def paths(models: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """Every module by its dotted path; the root by its class, and later roots' parts below theirs."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for place, model in enumerate(models):
        top = type(model).__name__
        for path, module in model.named_modules():
            full = (path if not place else f"{top}.{path}") if path else top
            if id(module) not in seen:
                seen.add(id(module))
                number = 1
                while (name := full if number == 1 else f"{full}~{number}") in found:
                    number += 1
                found[name] = module
    return found


def forward_lines(models: Iterable[nn.Module]) -> dict[str, str]:
    """Where each module's forward pass is written, ``file:line``, unless PyTorch wrote it; the path "" is the top."""
    models = list(models)
    found = {path: _forward_line(module) for path, module in paths(models).items()}
    found |= {"": _forward_line(models[0])} if models else {}
    return {path: line for path, line in found.items() if line}


def _forward_line(module: nn.Module) -> str:
    if not _takes_hooks(module):
        return ""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or Path(code.co_filename).is_relative_to(_TORCH):
        return ""
    file = Path(code.co_filename)
    here = Path.cwd()
    return f"{file.relative_to(here) if file.is_relative_to(here) else file.name}:{code.co_firstlineno}"


@contextmanager
def modules_marked(models: Iterable[nn.Module], only: Callable[[str], bool] | None = None) -> Iterator[int]:
    """While open, every forward pass of a module is a range named by its path; gives the number of modules.

    ``only`` chooses by path: a hook on a module that is compiled would have it compiled anew.
    """
    opened = threading.local()
    handles = []
    taking = {path: module for path, module in paths(models).items() if _takes_hooks(module)}
    named = {path: module for path, module in taking.items() if only is None or only(path)}
    try:
        for path, module in named.items():
            enter, leave = _pair(getattr(module, "import_path", path), opened)  # of an imported model: the file's name
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave, always_call=True))
        yield len(named)
    finally:
        for handle in handles:
            handle.remove()


def _takes_hooks(module: nn.Module) -> bool:
    """Whether Python runs around a module's calls: TorchScript's interpreter calls scripted parts by itself."""
    return not isinstance(module, torch.jit.ScriptModule)


def _pair(path: str, opened: threading.local) -> tuple[Callable[..., None], Callable[..., None]]:
    def enter(module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not hasattr(opened, "stack"):
            opened.stack = []
        mark = record_function(MODULE + path)
        mark.__enter__()
        opened.stack.append((path, mark))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        stack = getattr(opened, "stack", [])
        while stack and any(name == path for name, _ in stack):
            name, mark = stack.pop()  # a child whose forward raised was never left
            mark.__exit__(None, None, None)
            if name == path:
                return

    return enter, leave


@contextmanager
def collections_marked() -> Iterator[None]:
    """While open, every collection of Python's garbage collector is a range."""
    opened: list[Any] = []

    def mark(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            opened.append(record_function(f"{GC} {info['generation']}"))
            opened[-1].__enter__()
        elif opened:
            opened.pop().__exit__(None, None, None)

    gc.callbacks.append(mark)
    try:
        yield
    finally:
        gc.callbacks.remove(mark)


OTHER_MASKS = re.compile(
    r"causal|global|head|loss|label|special|masked_pos|time_ind|look_ahead|(^|_)(attn|src|tgt|memory)_mask$"
)
"""Arguments that are masks, and not of padding: who may look at whom, what is hidden, what counts."""


class Masks:
    """Notes the padding masks that models are called with, and counts their real share once the recording is over."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.kept: dict[str, torch.Tensor] = {}
        self.handles = [
            model.register_forward_pre_hook(self._note, with_kwargs=True)
            for model in models
            if type(model).__name__ != "OptimizedModule" and _takes_hooks(model)
        ]

    def _note(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        for name, value in kwargs.items():
            if (isinstance(value, torch.Tensor)
        and "mask" in name
        and not OTHER_MASKS.search(name)
        and value.dim() == 2
        and not value.dtype.is_floating_point):
                self.kept[f"{type(module).__name__}.{name}"] = value

    def close(self) -> list[dict[str, Any]]:
        """What share of each mask is real; the rest is padding."""
        for handle in self.handles:
            handle.remove()
        masks = {name: mask != 0 for name, mask in self.kept.items()}
        rows = [
            {"argument": name, "real_frac": _real_frac(name, mask)}
            for name, mask in masks.items()
            if _is_of_texts(name, mask)
        ]
        self.kept.clear()
        return rows


def _is_of_texts(name: str, mask: torch.Tensor) -> bool:
    """Whether a mask can be of texts that were filled up, at one end or at both: what is real of each lies together.
    Patches and frames that are hidden from a network lie anywhere, and a square is as likely who may look at whom."""
    square = mask.shape[0] == mask.shape[1] and not re.search("attention|pad", name)
    turns = (mask[:, 1:] != mask[:, :-1]).sum(1)
    return not square and mask.numel() > 0 and int(turns.max()) <= 2


def _real_frac(name: str, mask: torch.Tensor) -> float:
    """The share that is set; of a mask of padding whose first or last column is not set, what is not."""
    share = float(mask.float().mean().item())
    outside = "pad" in name and not name.endswith("key_padding_mask")  # of those whoever reads it knows
    begins, ends = (not bool(mask[:, at].any()) for at in (0, -1))
    return 1.0 - share if outside and (begins or ends) and share < 1.0 else share
