"""Models whose behavior hangs on something far away: deep objects, odd containers, other modules, the world outside."""

from __future__ import annotations

import array
import datetime
import functools
import logging
import sys
import tempfile
import types
import uuid
import weakref
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from adversarial import Case, Inputs, Lambda, _of, _x
from adversarial_python_state import pick
from torch import Tensor, nn

# --- settings that code reads in other ways than by a name of its own -----------------------------------------------

SETTINGS = types.ModuleType("hazard_settings")
SETTINGS.scale = 2.0  # type: ignore[attr-defined]
SETTINGS.inner = types.ModuleType("hazard_settings.inner")  # type: ignore[attr-defined]
SETTINGS.inner.scale = 2.0
sys.modules |= {"hazard_settings": SETTINGS, "hazard_settings.inner": SETTINGS.inner}


class Options:
    """Settings as classes in classes."""

    class Deep:
        scale = 2.0


def _imported_inside(m: Any, x: Tensor) -> Tensor:
    import hazard_settings

    return m.inner(x) * hazard_settings.scale


def _imported_from(m: Any, x: Tensor) -> Tensor:
    from hazard_settings import scale

    return m.inner(x) * scale


def _imported_deep(m: Any, x: Tensor) -> Tensor:
    import hazard_settings.inner as inner

    return m.inner(x) * inner.scale


def _asked_by_word(m: Any, x: Tensor) -> Tensor:
    return m.inner(x) * getattr(SETTINGS, "scale")  # noqa: B009  (the adversarial read)


def _all_names(m: Any, x: Tensor) -> Tensor:
    return m.inner(x) * globals()["FACTOR"]


FACTOR = 2.0


def _set_global(name: str) -> Callable[[Any, int], None]:
    return lambda model, call: globals().__setitem__(name, 2.0 + call)


def _set(owner: Any, name: str = "scale") -> Callable[[Any, int], None]:
    return lambda model, call: setattr(owner, name, 2.0 + call)


# --- settings kept in odd places ------------------------------------------------------------------------------------


class Node:
    """An object that holds another."""

    def __init__(self, depth: int) -> None:
        self.scale = 2.0
        self.next = Node(depth - 1) if depth else None

    def last(self) -> Node:
        return self if self.next is None else self.next.last()


@dataclass(slots=True)
class Slots:
    """An object without a dictionary that holds a list and another of its kind."""

    scales: list[float] = field(default_factory=lambda: [2.0])
    more: Slots | None = None


class Bare:
    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = 1.0


class Clothed(Bare):
    """Slots of its base, and a dictionary of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0


class Kept(nn.Module):
    """Keeps its factor in one of many places, and changes it there."""

    def __init__(self, keep: Callable[[Any], Any], read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner, self.read = nn.Linear(8, 8), read
        self.kept = keep(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.read(self)


def _kept(keep: Callable[[Any], Any], read: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    return lambda: Kept(keep, read)


class Teller:
    """Something with a method."""

    def __init__(self) -> None:
        self.scale = 2.0

    def tell(self) -> float:
        return self.scale


def _scaled(scales: list[float], more: dict[str, float] | None = None) -> float:
    return scales[0] * (more or {}).get("more", 1.0)


class Counted(nn.Module):
    """A part that counts its calls, or reads what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(8, 8), 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


def _hidden_part() -> nn.Module:
    """A part in a list, where nothing registers it."""
    return Kept(lambda m: [Counted()], lambda m: 1.0).requires_grad_(False)


class Teacher(nn.Module):
    """Holds another model where no list of parts finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.teacher = (Counted(),)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) - self.teacher[0](x)


def _replace_teacher(model: Any, call: int) -> None:
    if call == 2:
        model.teacher[0].inner.weight = nn.Parameter(torch.full((8, 8), 0.5))
    if call == 3:
        model.teacher[0].scale = 5.0


GLOBAL_PART = Counted()


def _change_global_part(model: Any, call: int) -> None:
    GLOBAL_PART.scale = 2.0 + call


def _counts_in(where: str) -> Callable[[], nn.Module]:
    def keep(m: Any) -> Any:
        made = {"array": array.array("d", [0.0]), "bytes": bytearray(1), "weak": weakref.WeakKeyDictionary(),
                "user": UserDict(n=0), "partial": functools.partial(_scaled, [0.0])}  # fmt: skip
        return made[where]

    def read(m: Any) -> float:
        if where == "array" or where == "bytes":
            m.kept[0] += 1
            return float(m.kept[0])
        if where == "weak":
            m.kept[m.inner] = m.kept.get(m.inner, 0) + 1
            return float(m.kept[m.inner])
        if where == "user":
            m.kept["n"] += 1
            return float(m.kept["n"])
        m.kept.args[0][0] += 1
        return float(m.kept())

    return _kept(keep, read)


def _prior() -> nn.Module:
    return Kept(
        lambda m: torch.distributions.Normal(torch.zeros(8), torch.ones(8)), lambda m: m.kept.loc + m.kept.scale
    )


def _change_prior(model: Any, call: int) -> None:
    model.kept.loc = torch.full((8,), float(call))


def _tagged_weight() -> nn.Module:
    model = Lambda(lambda m, x: m.inner(x) * m.inner.weight.scale)
    model.inner.weight.scale = 2.0
    return model


def _change_tag(model: Any, call: int) -> None:
    model.inner.weight.scale = 2.0 + call


def _linear_attribute() -> nn.Module:
    model = Lambda(lambda m, x: m.inner(x) * m.inner.gain)
    model.inner.gain = 2.0
    return model


def _change_linear(model: Any, call: int) -> None:
    model.inner.gain = 2.0 + call


class Doubled(nn.Linear):
    """A linear layer and twice what it gives."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _double(model: Any, call: int) -> None:
    model.inner.__class__ = Doubled


def _asks_its_weight(m: Any, x: Tensor) -> Tensor:
    return m.inner(x) * (2.0 if m.inner.weight.requires_grad else 3.0) + (m.inner.bias.grad is None)


def _freeze(model: Any, call: int) -> None:
    model.inner.weight.requires_grad_(False)


def _give_gradient(model: Any, call: int) -> None:
    model.inner.bias.grad = torch.ones_like(model.inner.bias)


def _repeatable(model: Any, call: int) -> None:
    torch.backends.cudnn.deterministic = call > 0


def _change_width(model: Any, call: int) -> None:
    model.inner.out_features = 8 + call


# --- the world outside ----------------------------------------------------------------------------------------------


def _clock(m: Any, x: Tensor) -> Tensor:
    return m.inner(x) + 0 * datetime.datetime.now().microsecond


def _dice_of_the_system(m: Any, x: Tensor) -> Tensor:
    return m.inner(x) + 0 * (uuid.uuid4().int % 7)


FILE = Path(tempfile.gettempdir()) / "ridgeline-adversarial-scale"


def _reads_file(m: Any, x: Tensor) -> Tensor:
    return m.inner(x) * float(FILE.read_text())


def _write_file(model: Any, call: int) -> None:
    FILE.write_text(str(call))


def _logs(m: Any, x: Tensor) -> Tensor:
    logging.getLogger("adversarial").warning("forward")
    return m.inner(x)


def _writes_out(m: Any, x: Tensor) -> Tensor:
    sys.stdout.write("")
    return m.inner(x)


# --- functions put in another's place -------------------------------------------------------------------------------


def helper(x: Tensor) -> Tensor:
    return x * 2


def _patch_helper(model: Any, call: int) -> None:
    if call >= 2:
        globals()["helper"] = lambda x: x * 3
    else:
        globals()["helper"] = _original_helper


_original_helper = helper


class Methodical(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def shape(self, x: Tensor) -> Tensor:
        return x * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.shape(self.inner(x))


_original_shape = Methodical.shape


def _patch_method(model: Any, call: int) -> None:
    Methodical.shape = (lambda self, x: x * 3) if call >= 2 else _original_shape  # type: ignore[method-assign]


_original_silu = F.silu


def _patch_library(model: Any, call: int) -> None:
    F.silu = (lambda x: x * 3) if call >= 2 else _original_silu


# --- arguments ------------------------------------------------------------------------------------------------------


def _mirror(device: torch.device) -> Inputs:
    x, y = torch.randn(4, 8, device=device), torch.randn(4, 8, device=device)
    return pick((x, y), (x, x), (x, x.view(4, 8)), (x, x.t().contiguous().t())), {}


def _write_first(m: Any, a: Tensor, b: Tensor) -> Any:
    a.mul_(2)
    return m.inner(b), a


def _lists_that_may_be_one(device: torch.device) -> Inputs:
    x = torch.randn(4, 8, device=device)
    one, other = [x], [x + 1]
    return pick((one, one), (one, other), (one, [x])), {}


def _append_first(m: Any, a: list[Tensor], b: list[Tensor]) -> Any:
    a.append(m.inner(b[0]))
    return len(b) * b[-1]


def _named_in_any_order(device: torch.device) -> Inputs:
    x = torch.randn(4, 8, device=device)
    return (x,), pick({"a": 2.0, "b": 3.0}, {"b": 3.0, "a": 2.0}, {"a": 3.0, "b": 2.0})


def _first_named(m: Any, x: Tensor, **named: float) -> Tensor:
    return m.inner(x) * next(iter(named.values()))


def _quantized(device: torch.device) -> Inputs:
    x = torch.randn(4, 8, device=device)
    return (torch.quantize_per_tensor(x, pick(0.1, 0.2), pick(0, 3), torch.quint8),), {}


def _ragged(device: torch.device) -> Inputs:
    rows = pick([2, 3], [3, 2])
    return (torch.nested.nested_tensor([torch.randn(n, 8, device=device) for n in rows]),), {}


def _packed(device: torch.device) -> Inputs:
    lengths = pick([3, 2], [3, 1])
    return (nn.utils.rnn.pack_padded_sequence(torch.randn(3, 2, 8, device=device), lengths),), {}


def _user_dict(device: torch.device) -> Inputs:
    return (UserDict(x=torch.randn(4, 8, device=device), scale=pick(2.0, 3.0)),), {}


def _typed(device: torch.device) -> Inputs:
    x = torch.randn(4, 8, device=device)
    return (pick(x, x.double(), x.half(), x.to(torch.float8_e4m3fn)),), {}


def _scalar(device: torch.device) -> Inputs:
    return (torch.randn(4, 8, device=device), torch.randn((), device=device)), {}


def _several(device: torch.device) -> Inputs:
    return tuple(torch.randn(4, 8, device=device) for _ in range(pick(2, 3))), {}


def _optional(device: torch.device) -> Inputs:
    x = torch.randn(4, 8, device=device)
    return (x,), pick({}, {"mask": None}, {"mask": x > 0})


class Modular(nn.Module):
    """Is given a module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, part: nn.Module) -> Tensor:
        return part(self.inner(x))


PART = Counted()


def _with_part(device: torch.device) -> Inputs:
    return (torch.randn(4, 8, device=device), PART.to(device)), {}


def _change_part(model: Any, call: int) -> None:
    PART.scale = 2.0 + call


def _function_given() -> tuple[Callable[[torch.device], Inputs], Callable[[Any, int], None]]:
    held = {"scale": 2.0}

    def scaled(y: Tensor) -> Tensor:
        return y * held["scale"]

    return (lambda device: ((torch.randn(4, 8, device=device), scaled), {}),
            lambda model, call: held.__setitem__("scale", 2.0 + call))  # fmt: skip


_GIVEN, _CHANGE_GIVEN = _function_given()


class Point:
    """Compares equal to any of its kind."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point)

    def __hash__(self) -> int:
        return 1


class Number(int):
    """A whole number that is more than that."""

    scale = 1.0


def _numbered(device: torch.device) -> Inputs:
    made = Number(2)
    made.scale = float(torch.randint(1, 5, (1,)))
    return (torch.randn(4, 8, device=device), made), {}


def _weight_given(device: torch.device) -> Inputs:
    return (torch.randn(4, 8, device=device),), {}


# --- results --------------------------------------------------------------------------------------------------------

TABLE = torch.ones(8)


def _shared_constant(m: Any, x: Tensor) -> Any:
    return m.inner(x), TABLE


def _marked_result(m: Any, x: Tensor) -> Tensor:
    y = m.inner(x)
    y.tag = "made"  # type: ignore[attr-defined]
    return y


async def _awaited(m: Any, x: Tensor) -> Tensor:
    return m.inner(x)


def _function_result(m: Any, x: Tensor) -> Any:
    y = m.inner(x)
    return lambda: y


def _own_buffer(m: Any, x: Tensor) -> Any:
    m.inner.bias.data.add_(1)
    return m.inner.bias, m.inner(x)


CASES: tuple[Case, ...] = (
    Case("a module imported inside", _of(_imported_inside), _x(), missed="scale", between=_set(SETTINGS)),
    Case("a name imported inside", _of(_imported_from), _x(), missed="scale", between=_set(SETTINGS)),
    Case("a module inside of another", _of(_imported_deep), _x(), missed="scale", between=_set(SETTINGS.inner)),
    Case("two steps from a global", _of(lambda m, x: m.inner(x) * SETTINGS.inner.scale), _x(), missed="scale",
         between=_set(SETTINGS.inner)),
    Case("asked for by a word", _of(_asked_by_word), _x(), missed="scale", between=_set(SETTINGS)),
    Case("all global names", _of(_all_names), _x(), missed="FACTOR", between=_set_global("FACTOR")),
    Case("a class inside of a class", _of(lambda m, x: m.inner(x) * Options.Deep.scale), _x(), missed="scale",
         between=_set(Options.Deep)),
    Case("ten objects deep", _kept(lambda m: Node(10), lambda m: m.kept.last().scale), _x(), missed="scale",
         between=lambda m, call: setattr(m.kept.last(), "scale", 2.0 + call)),
    Case("a list in slots", _kept(lambda m: Slots(), lambda m: m.kept.scales[0]), _x(), missed="scales",
         between=lambda m, call: m.kept.scales.__setitem__(0, 2.0 + call)),
    Case("slots in slots", _kept(lambda m: Slots(more=Slots()), lambda m: m.kept.more.scales[0]), _x(),
         missed="more", between=lambda m, call: setattr(m.kept.more, "scales", [2.0 + call])),
    Case("slots and a dictionary", _kept(lambda m: Clothed(), lambda m: m.kept.scale), _x(), missed="scale",
         between=lambda m, call: setattr(m.kept, "scale", 2.0 + call)),
    Case("a method of an object", _kept(lambda m: Teller().tell, lambda m: m.kept()), _x(), missed="scale",
         between=lambda m, call: setattr(m.kept.__self__, "scale", 2.0 + call)),
    Case("what a partial function holds", _kept(lambda m: functools.partial(_scaled, [2.0]), lambda m: m.kept()), _x(),
         missed="kept", between=lambda m, call: m.kept.args[0].__setitem__(0, 2.0 + call)),
    Case("names of a partial function", _kept(lambda m: functools.partial(_scaled, [2.0], more={"more": 1.0}),
         lambda m: m.kept()), _x(), missed="kept",
         between=lambda m, call: m.kept.keywords["more"].__setitem__("more", 2.0 + call)),
    Case("one of many in a list", _kept(lambda m: [2.0] * 3000, lambda m: m.kept[2000]), _x(), missed="kept",
         between=lambda m, call: m.kept.__setitem__(2000, 2.0 + call)),
    Case("one of many in an array", _kept(lambda m: np.full(20_000, 2.0), lambda m: float(m.kept[9000])), _x(),
         missed="kept", between=lambda m, call: m.kept.__setitem__(9000, 2.0 + call)),
    Case("a module in words", _kept(lambda m: SETTINGS, lambda m: m.kept.scale), _x(), missed="scale",
         between=_set(SETTINGS)),
    Case("packed sequences", lambda: nn.LSTM(8, 8), _packed, refused="class|kind|host|PackedSequence", state=False),
    Case("a dictionary that is none", _of(lambda m, batch: m.inner(batch["x"]) * batch["scale"]), _user_dict,
         missed="args"),
    Case("one of several types", _of(lambda m, x: m.inner(x.float()) + x.dtype.itemsize), _typed, missed="args",
         marks=("host",)),
    Case("a number as a tensor", _of(lambda m, x, n: m.inner(x) * n), _scalar),
    Case("as many arguments as there are", _of(lambda m, *xs: m.inner(sum(xs)) / len(xs)), _several, missed="args"),
    Case("nothing at times", _of(lambda m, x, mask=None: m.inner(x if mask is None else x * mask)), _optional,
         missed="kwargs|more"),
    Case("a model held in a tuple", Teacher, _x(), missed="teacher", between=_replace_teacher, marks=("host",)),
    Case("a module that is a global", _of(lambda m, x: GLOBAL_PART(m.inner(x))), _x(), missed="scale|PART",
         between=_change_global_part, marks=("host",)),
    Case("a distribution", _prior, _x(), missed="loc|kept", between=_change_prior, marks=("host",)),
    Case("a mark on a weight", _tagged_weight, _x(), missed="scale", between=_change_tag),
    Case("a mark on a linear layer", _linear_attribute, _x(), missed="gain", between=_change_linear),
    Case("a layer of another class later", _of(lambda m, x: m.inner(x)), _x(), missed="is a Doubled",
         between=_double),
    Case("a weight that is asked whether it learns", _of(_asks_its_weight), _x(), missed="gradient", between=_freeze),
    Case("a weight that is asked for its gradient", _of(_asks_its_weight), _x(), missed="gradient",
         between=_give_gradient),
    Case("convolutions that are to repeat themselves", _of(lambda m, x: m.inner(x)), _x(), missed="determinism",
         between=_repeatable),
    Case("counts in an array of the standard library", _counts_in("array"), _x(), refused="kept"),
    Case("counts in bytes", _counts_in("bytes"), _x(), refused="kept"),
    Case("counts by what is alive", _counts_in("weak"), _x(), refused="kept", state=False),
    Case("counts in a dictionary of its own", _counts_in("user"), _x(), refused="kept|data"),
    Case("counts in a partial function", _counts_in("partial"), _x(), refused="kept"),
    Case("asks what day it is", _of(_clock), _x(), refused="now|clock|time"),
    Case("draws from the system", _of(_dice_of_the_system), _x(), refused="random"),
    Case("reads a file", _of(_reads_file), _x(), refused="file", between=_write_file),
    Case("logs", _of(_logs), _x(), refused="logs"),
    Case("writes to its output", _of(_writes_out), _x(), refused="writes|prints"),
    Case("a function replaced", _of(lambda m, x: helper(m.inner(x))), _x(), missed="helper", between=_patch_helper),
    Case("a method replaced", Methodical, _x(), missed="shape", between=_patch_method),
    Case("a function of the library replaced", _of(lambda m, x: F.silu(m.inner(x))), _x(), missed="silu",
         between=_patch_library),
    Case("inputs that may be one", _of(_write_first), _mirror, missed="same|share|args"),
    Case("lists that may be one", _of(_append_first), _lists_that_may_be_one, missed="same|again|args"),
    Case("named arguments in any order", _of(_first_named), _named_in_any_order, missed="keys|kwargs"),
    Case("quantized inputs", _of(lambda m, x: m.inner(x.dequantize())), _quantized, refused="another kind",
         marks=("host",)),
    Case("ragged inputs", _of(lambda m, x: m.inner(x).to_padded_tensor(0.0)), _ragged, state=False,
         refused="another kind"),
    Case("a module given", Modular, _with_part, missed="scale|args", between=_change_part, marks=("host",)),
    Case("a function given", _of(lambda m, x, f: f(m.inner(x))), _GIVEN, missed="scale|held", between=_CHANGE_GIVEN),
    Case("objects that say they are equal", _of(lambda m, x, p: m.inner(x) * p.scale),
         lambda d: ((torch.randn(4, 8, device=d), Point(pick(2.0, 3.0))), {}), missed="args"),
    Case("a number with more to it", _of(lambda m, x, n: m.inner(x) * n.scale), _numbered, missed="args"),
    Case("a constant that is everybody's", _of(_shared_constant), _x(), marks=("host",)),
    Case("a mark on a result", _of(_marked_result), _x(), refused="tag"),
    Case("a result to be awaited", _of(_awaited), _x(), refused="coroutine", state=False),
    Case("a result that is a function", _of(_function_result), _x(), refused="function", state=False),
    Case("writes past autograd to what it returns", _of(_own_buffer), _x()),
)  # fmt: skip


def reset() -> None:
    """Everything that cases change for everybody, as it was."""
    torch.backends.cudnn.deterministic = False
    SETTINGS.scale = SETTINGS.inner.scale = Options.Deep.scale = 2.0  # type: ignore[attr-defined]
    GLOBAL_PART.scale = PART.scale = 2.0
    _set_global("FACTOR")(None, 0)
    for patch in (_patch_helper, _patch_method, _patch_library):
        patch(None, 0)
    _CHANGE_GIVEN(None, 0)
    TABLE.fill_(1.0)
    _write_file(None, 1)
