"""What a model's code asks of tensors and of PyTorch besides values, and whether a call would be answered the same.

Plans for inference are made without gradients, of copies of the inputs that are nobody's views. Code that branches on
such things (``x.requires_grad``, ``x._base``, ``torch.is_grad_enabled()``) was answered once, while it was looked at: a
call that would be answered otherwise runs as the model itself.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ridgeline.engine.guards.code_reads import Lookups, installed, library, of_library

GRADIENTS, INPUTS, LEAVES = "gradients", "inputs", "leaves"
VIEWS, INFERENCE, CLASSES, OWN = "views", "inference", "classes", "own"
MISSING = "missing "
_OF_LEAVES = frozenset(("grad_fn", "is_leaf", "grad", "retains_grad", "_backward_hooks", "output_nr"))
_OF_AUTOGRAD = _OF_LEAVES | {"requires_grad"}
_OF_VIEWS = frozenset(("_base", "_is_view"))
_OF_PLACE = frozenset(("data_ptr", "storage", "untyped_storage", "storage_offset", "is_shared", "is_pinned",
                       "share_memory_", "_version", "__cuda_array_interface__", "__dlpack__"))  # fmt: skip
"""What is another for a copy, whatever it is of."""
_STATES: dict[Any, str] = {torch.is_grad_enabled: GRADIENTS, torch.is_inference_mode_enabled: INFERENCE}
_PASSING = ("torch/overrides.py", "torch/_tensor.py", "torch/utils/_contextlib.py")
_CLASSES = frozenset(("Parameter", "type", "__class__"))


def state_asked(function: Any) -> str | None:
    """What a function of PyTorch's tells of the state around a call."""
    try:
        return _STATES.get(function)
    except TypeError:  # a bound method of something that cannot be hashed
        return None


class Asking(TorchFunctionMode):
    """Notes what code asks of tensors, but for code of PyTorch's own.

    ``asked`` are the questions a plan depends on, ``places`` those that no copy answers as its original does, and
    ``weights`` which of the model's own tensors were asked for what.
    """

    def __init__(self, inputs: Iterable[Tensor], own: Iterable[Tensor]) -> None:
        super().__init__()
        self._inputs, self._own = frozenset(map(id, inputs)), frozenset(map(id, own))
        self.asked: set[str] = set()
        self.places: dict[str, str] = {}
        self.weights: dict[int, set[str]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _name_of(func)
        if (name in _OF_AUTOGRAD or name in _OF_VIEWS or name in _OF_PLACE or name == "is_inference") and args:
            frame = _caller()
            if frame is not None:
                self._note(name, args[0], frame)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, tensor: Any, frame: types.FrameType) -> None:
        if id(tensor) in self._own:
            self.weights.setdefault(id(tensor), set()).add(name)
        elif name == "is_inference":
            self.asked.add(INFERENCE)
        elif id(tensor) in self._inputs and name in _OF_PLACE and not installed(frame.f_code.co_filename):
            self.places[name] = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        elif id(tensor) in self._inputs and name in _OF_VIEWS:
            self.asked.add(VIEWS)
        elif name in _OF_AUTOGRAD:
            self.asked.add(GRADIENTS if id(tensor) not in self._inputs else LEAVES if name in _OF_LEAVES else INPUTS)


def asked_by_names(codes: Iterable[types.CodeType]) -> set[str]:
    """Questions that only the code itself shows: which class an input has, and whether it is some other tensor."""
    own = [code for code in codes if not library(code.co_filename) and not installed(code.co_filename)]
    found = {CLASSES} if any(not _CLASSES.isdisjoint(code.co_names) for code in own) else set()
    return found | ({OWN} if any(map(_compares, own)) else set())


@lru_cache(maxsize=4096)
def _compares(code: types.CodeType) -> bool:
    """Whether code asks which object something is."""
    before = ""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IS_OP" and before != "LOAD_CONST":
            return True
        if instruction.opname == "LOAD_GLOBAL" and instruction.argval == "id":
            return True
        before = before if instruction.opname == "CACHE" else instruction.opname
    return False


def missing(lookups: Lookups) -> set[str]:
    """Names that modules were asked for and did not have, which guards of compiled code do not look for later."""
    return {f"{MISSING}{owner.__name__} {word}" for owner, word in lookups
            if isinstance(owner, types.ModuleType) and word not in vars(owner) and not of_library(owner)
            and sys.modules.get(owner.__name__) is owner}  # fmt: skip


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name


def _caller() -> types.FrameType | None:
    """Whoever asked, unless it is PyTorch or the interpreter."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith(_PASSING):
        frame = frame.f_back
    return None if frame is None or library(frame.f_code.co_filename) else frame


class Questions:
    """Whether a call of inference is answered as the one that was looked at."""

    __slots__ = ("_checks", "names")

    def __init__(self, names: Iterable[str], own: frozenset[int] = frozenset()) -> None:
        self.names = frozenset(names)
        self._checks = [check for name, check in _CHECKS.items() if name in self.names]
        absent = [name.removeprefix(MISSING).split() for name in self.names if name.startswith(MISSING)]
        spaces = [(vars(sys.modules[home]), word) for home, word in absent if home in sys.modules]
        if spaces:
            self._checks.append(lambda tensors: _appeared(spaces))
        if OWN in self.names and own:
            self._checks.append(lambda tensors: _lies_in(tensors, own))

    def unlike(self, tensors: Sequence[Tensor]) -> str:
        """Why a call would be answered otherwise; empty if it would not."""
        for check in self._checks:
            if reason := check(tensors):
                return reason
        return ""


def _gradients(tensors: Sequence[Tensor]) -> str:
    asks = "gradients are recorded, and the model's code asks for that: call it under torch.no_grad()"
    return asks if torch.is_grad_enabled() else ""


def _inputs(tensors: Sequence[Tensor]) -> str:
    asked = any(each.requires_grad or each._backward_hooks or (each.is_leaf and each.grad is not None)
                for each in tensors)  # fmt: skip
    return "an input requires gradients, and the model's code asks for that" if asked else ""


def _views(tensors: Sequence[Tensor]) -> str:
    return "an input is a view, and the model's code asks for that" if any(each._is_view() for each in tensors) else ""


def _inference(tensors: Sequence[Tensor]) -> str:
    asked = torch.is_inference_mode_enabled() or any(each.is_inference() for each in tensors)
    return "inference mode is on, and the model's code asks for that" if asked else ""


def _classes(tensors: Sequence[Tensor]) -> str:
    asked = any(isinstance(each, nn.Parameter) for each in tensors)
    return "an input is a parameter, and the model's code asks for classes" if asked else ""


def _appeared(spaces: list[tuple[dict[str, Any], str]]) -> str:
    return next((f"{held.get('__name__')}.{word} is there now" for held, word in spaces if word in held), "")


def _lies_in(tensors: Sequence[Tensor], own: frozenset[int]) -> str:
    asked = any(each.layout is torch.strided and each.untyped_storage()._cdata in own for each in tensors)
    return "an input lies in the model's own memory, and its code asks which tensor is which" if asked else ""


_CHECKS: dict[str, Callable[[Sequence[Tensor]], str]] = {
    GRADIENTS: _gradients, INPUTS: _inputs, LEAVES: _inputs, VIEWS: _views, INFERENCE: _inference, CLASSES: _classes,
}  # fmt: skip
