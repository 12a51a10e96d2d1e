"""Models whose code asks for more than values: what a tensor came from, names put together, names not there yet."""

from __future__ import annotations

import functools
import importlib
import operator
import os
import sys
import tempfile
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from adversarial import Case, Inputs, _of, _x
from torch import Tensor, nn

SETTINGS = types.ModuleType("doubt_settings")
SETTINGS.scale = 2.0  # type: ignore[attr-defined]
sys.modules["doubt_settings"] = SETTINGS
LAST = "le"
FACTOR = 2.0
FLAG = Path(tempfile.gettempdir()) / "ridgeline-query-flag"


def _set(model: Any, call: int) -> None:
    SETTINGS.scale = 2.0 + call  # type: ignore[attr-defined]


def _set_factor(model: Any, call: int) -> None:
    globals()["FACTOR"] = 2.0 + call


def _step(owner: Any, path: str) -> Any:
    return functools.reduce(getattr, path.split("."), owner)


@functools.lru_cache
def remembered(name: str) -> float:
    return SETTINGS.scale  # type: ignore[attr-defined]


def _clear(model: Any, call: int) -> None:
    _set(model, call)
    remembered.cache_clear()


# --- what a tensor is besides its values ----------------------------------------------------------------------------


def _asking(ask: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    """Doubles where the answer is yes."""
    return _of(lambda m, x: m.inner(x) * (2.0 if ask(x) else 3.0))


def _made(make: Callable[[Tensor], Tensor]) -> Callable[[torch.device], Inputs]:
    """Now a tensor as it is, now what is made of it, as the seed of the call says."""

    def inputs(device: torch.device) -> Inputs:
        x = torch.randn(8, 8, device=device)
        with torch.enable_grad():
            return (make(x) if torch.initial_seed() % 2 else x[:4].clone(),), {}

    return inputs


def _learning(x: Tensor) -> Tensor:
    return x[:4].clone().requires_grad_()


def _with_gradient(x: Tensor) -> Tensor:
    made = _learning(x)
    made.grad = torch.ones_like(made)
    return made


def _hooked(x: Tensor) -> Tensor:
    made = _learning(x)
    made.register_hook(lambda g: g)
    return made


COMMON = torch.ones(4, 8)


def _common(device: torch.device) -> Inputs:
    return (COMMON if torch.initial_seed() % 2 else torch.randn(4, 8, device=device),), {}


def _version(m: Any, x: Tensor) -> Tensor:
    return m.inner(x) * (1 + x._version)


class Folded(nn.Module):
    """Makes something of a weight once, and again when the weight was written to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.version, self.made = nn.Linear(8, 8), -1, torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        if self.version != self.inner.weight._version:
            self.version, self.made = self.inner.weight._version, self.inner.weight * 2
        return x @ self.made


def _write(model: Any, call: int) -> None:
    with torch.no_grad():
        model.inner.weight.mul_(1.5)


def _counts_learning(m: Any, x: Tensor) -> Tensor:
    return m.inner(x) * (1 + sum(parameter.requires_grad for parameter in m.parameters()))


def _freeze(model: Any, call: int) -> None:
    model.inner.weight.requires_grad_(call < 2)


# --- names ----------------------------------------------------------------------------------------------------------


def _put(holder: Callable[[Any], Any], name: str, value: Any = 1.0) -> Callable[[Any, int], None]:
    """A name that comes and goes."""
    return lambda model, call: setattr(holder(model), name, value) if call % 2 else _drop(holder(model), name)


def _drop(owner: Any, name: str) -> None:
    if name in vars(owner):
        delattr(owner, name)


def _here(model: Any) -> Any:
    return sys.modules[__name__]


def _maybe(m: Any, x: Tensor) -> Tensor:
    try:
        return m.inner(x) * MAYBE  # type: ignore[name-defined]
    except NameError:
        return m.inner(x)


class Plain:
    """Holds a number, and tells another."""

    def __init__(self) -> None:
        self.scale = 2.0

    @property
    def told(self) -> float:
        return 2.0


PLAIN = Plain()


def _tell(model: Any, call: int) -> None:
    Plain.told = property(lambda self: 2.0 + call)  # type: ignore[assignment, method-assign]


def scaled(y: Tensor, factor: float = 2.0) -> Tensor:
    return y * factor


def _other(y: Tensor, factor: float = 2.0) -> Tensor:
    return y * factor * 3


_CODES = (scaled.__code__, _other.__code__)


def _recode(model: Any, call: int) -> None:
    scaled.__code__ = _CODES[call % 2]


def _redefault(model: Any, call: int) -> None:
    scaled.__defaults__ = (2.0 + call,)


class Weakly(nn.Module):
    """Knows a thing by a weak reference or a proxy."""

    def __init__(self, refer: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner, self.thing = nn.Linear(8, 8), refer(PLAIN)

    def forward(self, x: Tensor) -> Tensor:
        met = self.thing() if isinstance(self.thing, weakref.ref) else self.thing
        return self.inner(x) * met.scale


def _scale_plain(model: Any, call: int) -> None:
    PLAIN.scale = 2.0 + call


class Given:
    """An argument whose setting is its class's."""

    scale = 2.0


GIVEN = Given()


def _scale_given(model: Any, call: int) -> None:
    Given.scale = 2.0 + call


def _flag(model: Any, call: int) -> None:
    FLAG.touch() if call % 2 else FLAG.unlink(missing_ok=True)


# --- containers -----------------------------------------------------------------------------------------------------


def _ordered(device: torch.device) -> Inputs:
    x = torch.randn(4, 8, device=device)
    return (x, OrderedDict(a=x + 1, b=x + 2)), {}


def _move(m: Any, x: Tensor, d: Any) -> Tensor:
    d.move_to_end("a")
    return m.inner(x) + next(iter(d.values()))


def _mapped(device: torch.device) -> Inputs:
    x = torch.randn(4, 8, device=device)
    return (x, {"a": x + 1, "b": x + 2}), {}


def _reorder(m: Any, x: Tensor, d: Any) -> Tensor:
    d["a"] = d.pop("a")
    d["c"] = m.inner(x)
    return m.inner(x) + next(iter(d.values()))


def _words(m: Any, x: Tensor) -> Any:
    return m.inner(x), str(x)


QUERY_CASES: tuple[Case, ...] = (
    Case("an input asked whether it requires gradients", _asking(lambda x: x.requires_grad), _made(_learning),
         missed="requires gradients"),
    Case("an input asked for its gradient", _asking(lambda x: x.grad is None), _made(_with_gradient),
         missed="requires gradients"),
    Case("an input asked for its history", _asking(lambda x: x.grad_fn is None), _made(lambda x: _learning(x) * 2),
         missed="requires gradients"),
    Case("an input asked whether it is a leaf", _asking(lambda x: x.is_leaf), _made(lambda x: _learning(x) * 2),
         missed="requires gradients"),
    Case("an input asked for its hooks", _asking(lambda x: x._backward_hooks), _made(_hooked),
         missed="requires gradients"),
    Case("an input asked for its base", _asking(lambda x: x._base is None), _made(lambda x: x[:4]), missed="view"),
    Case("an input asked whether it is a view", _asking(lambda x: x._is_view()), _made(lambda x: x[:4]), missed="view"),
    Case("an input that may be a parameter", _asking(lambda x: isinstance(x, nn.Parameter)),
         _made(lambda x: nn.Parameter(x[:4].clone(), requires_grad=False)), missed="parameter"),
    Case("an input that may be some other tensor", _asking(lambda x: x is COMMON), _common, missed="which tensor",
         marks=("host",)),
    Case("an input that may have some address", _asking(lambda x: id(x) == id(COMMON)), _common, missed="which tensor",
         marks=("host",)),
    Case("an input asked for its address", _asking(lambda x: x.data_ptr() % 64), _made(lambda x: x[1:5]),
         refused="data_ptr"),
    Case("an input asked where it begins", _of(lambda m, x: m.inner(x) * (1 + x.storage_offset())),
         _made(lambda x: x[1:5]), refused="storage_offset"),
    Case("an input asked how often it was written to", _of(_version), _made(lambda x: x[:4].clone().add_(1)),
         refused="_version"),
    Case("something made of a weight until that is written to", Folded, _x(), missed="weight's contents",
         between=_write),
    Case("weights counted that learn", _of(_counts_learning), _x(), missed="gradient", between=_freeze),
    Case("the text of a tensor", _of(_words), _x(), refused="text"),
    Case("a name put together", _of(lambda m, x: m.inner(x) * getattr(SETTINGS, "sca" + LAST)), _x(), missed="scale",
         between=_set),
    Case("a path of names", _of(lambda m, x: m.inner(x) * _step(SETTINGS, "sca" + LAST)), _x(), missed="scale",
         between=_set),
    Case("a name got by an operator", _of(lambda m, x: m.inner(x) * operator.attrgetter("sca" + LAST)(SETTINGS)), _x(),
         missed="scale", between=_set),
    Case("a global name put together", _of(lambda m, x: m.inner(x) * globals()["FAC" + _end()]), _x(),
         missed="FACTOR", between=_set_factor),
    Case("all that a module holds", _of(lambda m, x: m.inner(x) * vars(SETTINGS)["sca" + LAST]), _x(), missed="scale",
         between=_set),
    Case("the dictionary of a module", _of(lambda m, x: m.inner(x) * SETTINGS.__dict__["sca" + LAST]), _x(),
         missed="scale", between=_set),
    Case("a module among all", _of(lambda m, x: m.inner(x) * sys.modules["doubt_settings"].scale), _x(),
         missed="scale", between=_set),
    Case("a module by a name put together", _of(lambda m, x: m.inner(x) * sys.modules["doubt_" + _rest()].scale), _x(),
         missed="scale", between=_set),
    Case("a module imported by a function",
         _of(lambda m, x: m.inner(x) * importlib.import_module("doubt_" + _rest()).scale), _x(), missed="scale",
         between=_set),
    Case("what a function remembers", _of(lambda m, x: m.inner(x) * remembered("scale")), _x(), missed="scale",
         between=_clear),
    Case("a name that is not there yet", _of(lambda m, x: m.inner(x) * (2.0 if hasattr(SETTINGS, "late") else 3.0)),
         _x(), missed="late", between=_put(lambda m: SETTINGS, "late")),
    Case("a name with a default", _of(lambda m, x: m.inner(x) * getattr(SETTINGS, "la" + "te", 3.0)), _x(),
         missed="late", between=_put(lambda m: SETTINGS, "late")),
    Case("a global that is not there yet", _of(_maybe), _x(), missed="MAYBE", between=_put(_here, "MAYBE", 4.0)),
    Case("a global looked for", _of(lambda m, x: m.inner(x) * (2.0 if "MAYBE" in globals() else 3.0)), _x(),
         missed="MAYBE", between=_put(_here, "MAYBE")),
    Case("a mark that a weight has not yet", _of(lambda m, x: m.inner(x) * (2.0 if hasattr(m.inner.weight, "late")
         else 3.0)), _x(), missed="late", between=_put(lambda m: m.inner.weight, "late")),
    Case("a property replaced", _of(lambda m, x: m.inner(x) * PLAIN.told), _x(), missed="told", between=_tell),
    Case("a function reloaded", _of(lambda m, x: scaled(m.inner(x))), _x(), missed="the code of", between=_recode),
    Case("a function with other defaults", _of(lambda m, x: scaled(m.inner(x))), _x(), missed="the code of",
         between=_redefault),
    Case("a weak reference", lambda: Weakly(weakref.ref), _x(), missed="scale", between=_scale_plain),
    Case("a weak proxy", lambda: Weakly(weakref.proxy), _x(), missed="scale", between=_scale_plain),
    Case("a setting of an argument's class", _of(lambda m, x, g: m.inner(x) * g.scale),
         lambda d: ((torch.randn(4, 8, device=d), GIVEN), {}), missed="scale", between=_scale_given),
    Case("a file that may be there", _of(lambda m, x: m.inner(x) * (2.0 if os.path.exists(FLAG) else 3.0)), _x(),
         refused="files", between=_flag),
    Case("a dictionary whose order changes", _of(_move), _ordered),
    Case("a dictionary out of which is taken and put back", _of(_reorder), _mapped),
)  # fmt: skip


def _end() -> str:
    return "TOR"


def _rest() -> str:
    return "settings"


def reset() -> None:
    """Everything that cases change for everybody, as it was."""
    SETTINGS.scale = PLAIN.scale = Given.scale = 2.0  # type: ignore[attr-defined]
    _set_factor(None, 0)
    remembered.cache_clear()
    for owner, name in ((SETTINGS, "late"), (_here(None), "MAYBE")):
        _drop(owner, name)
    _tell(None, 0)
    scaled.__code__, scaled.__defaults__ = _CODES[0], (2.0,)
    COMMON.fill_(1.0)
    FLAG.unlink(missing_ok=True)
