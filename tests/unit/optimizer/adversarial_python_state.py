"""Still more models made to catch an optimizer out: state that is neither an input nor the model's, and odd inputs."""

from __future__ import annotations

import os
import threading
import warnings
from collections import namedtuple
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from adversarial import Case, Inputs, _of, _x
from torch import Tensor, nn
from torch.nn.modules import module as module_globals
from torch.utils.checkpoint import checkpoint

SCALE: ContextVar[float] = ContextVar("SCALE", default=1.0)
LOCAL = threading.local()
LOCAL.scale = 1.0
VARIABLE = "RIDGELINE_TEST_SCALE"
HOOKS: list[Any] = []
Pair = namedtuple("Pair", "a b")


def pick(*choices: Any) -> Any:
    """One of them, as the seed of the call says."""
    return choices[int(torch.randint(0, len(choices), (1,)))]


def with_one_of(*choices: Callable[[], Any]) -> Callable[[torch.device], Inputs]:
    """An input, and something else that differs from call to call."""
    return lambda device: ((torch.randn(4, 8, device=device), pick(*choices)()), {})


# --- what is around a call ------------------------------------------------------------------------------------------


def _global_hook(model: Any, call: int) -> None:
    while HOOKS:
        HOOKS.pop().remove()
    if call in (2, 3):
        HOOKS.append(module_globals.register_module_forward_hook(_half_more))


def _half_more(module: nn.Module, given: Any, result: Any) -> Any:
    return result * 1.5 if isinstance(module, nn.Linear) else None


def _environment(model: Any, call: int) -> None:
    os.environ[VARIABLE] = str(call)


def _from_environment(m: Any, x: Tensor) -> Tensor:
    return m.inner(x) * float(os.environ.get(VARIABLE, "1"))


def _warns(m: Any, x: Tensor) -> Tensor:
    warnings.warn("a model's own warning", UserWarning, stacklevel=1)
    return m.inner(x)


# --- what functions and modules keep --------------------------------------------------------------------------------


def _logged(x: Tensor, log: list[int] = []) -> Tensor:  # noqa: B006  (the adversarial default)
    log.append(1)
    return x * len(log)


class Forgetful(nn.Module):
    """Counts its calls in a default of its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        type(self).forward.__defaults__[0]["calls"] = 0  # every model begins anew

    def forward(self, x: Tensor, kept: dict[str, int] = {"calls": 0}) -> Tensor:  # noqa: B006
        kept["calls"] += 1
        return self.inner(x) * kept["calls"]


class Unregistered(nn.Module):
    """Weights and layers where no list of parameters finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.scale, self.layers, self.held = torch.ones(8), [nn.Linear(8, 8)], {"shift": (torch.ones(8),)}

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](self.inner(x)) * self.scale + self.held["shift"][0]


@torch.no_grad()
def _change_unregistered(model: Any, call: int) -> None:
    if call == 1:
        model.scale.mul_(2)
    elif call == 2:
        model.scale = torch.full((8,), 3.0)
    elif call == 3:
        model.layers[0].weight.add_(1)
    else:
        model.held["shift"] = (torch.zeros(8),)


class OwnCall(nn.Module):
    """Does more than its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) + 1

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Growing(nn.Module):
    """As many layers and factors as its dictionaries have."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ParameterDict({"a": torch.ones(8)})
        self.layers = nn.ModuleDict({"a": nn.Linear(8, 8)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        for factor in self.factors.values():
            x = x * factor
        return x


def _grow(model: Any, call: int) -> None:
    if call == 2:
        model.factors["b"] = nn.Parameter(torch.full((8,), 2.0, device=model.layers["a"].weight.device))
    elif call == 3:
        torch.manual_seed(3)
        model.layers["b"] = nn.Linear(8, 8).to(model.layers["a"].weight.device)


class Property(nn.Module):
    """Reads an attribute through a property."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.base = nn.Linear(8, 8), 1

    @property
    def scale(self) -> int:
        return self.base * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


class Switching(nn.Module):
    """Switches something of its layer at every call."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.inner, self.what = nn.Linear(8, 8), what

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "training":
            self.inner.train(not self.inner.training)
        elif self.what == "asking":
            self.inner.weight.requires_grad_(not self.inner.weight.requires_grad)
        else:
            self.inner.weight.grad = torch.ones(8, 8, device=x.device)
        return self.inner(x)

    def seen(self) -> Any:
        return self.inner.training, self.inner.weight.requires_grad, self.inner.weight.grad


class Shared(nn.Module):
    """Writes to a weight past its version, and reads a buffer that lies in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("row", self.inner.weight.detach()[0])

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.inner.weight.data[0] += 1
        return y + self.row


def _capped() -> nn.Module:
    return nn.Embedding(16, 8, max_norm=0.5)


def _numbers(device: torch.device) -> Inputs:
    return (torch.randint(0, 16, (5,), device=device),), {}


def _channels_last(model: Any, call: int) -> None:
    if call == 2:
        model.to(memory_format=torch.channels_last)


# --- inputs ---------------------------------------------------------------------------------------------------------


def _tagged(device: torch.device) -> Inputs:
    x = torch.randn(4, 8, device=device)
    x.scale = float(torch.randint(1, 5, (1,)))  # type: ignore[attr-defined]
    return (x,), {}


def _complex(device: torch.device) -> Inputs:
    x = torch.randn(4, 8, dtype=torch.complex64, device=device)
    return (pick(x.conj(), x),), {}


def _imaginary(device: torch.device) -> Inputs:
    x = torch.randn(4, 8, dtype=torch.complex64, device=device)
    return (pick(x.conj().imag, x.imag),), {}


def _reversed(m: Any, xs: list[Tensor]) -> Tensor:
    xs.reverse()
    return m.inner(xs[0]) - xs[1]


def _nothing(m: Any, x: Tensor) -> Any:
    y = m.inner(x)
    return y[:0], torch.cat([x[:0], y]), x[:, :0].sum(1), y[:, :0].softmax(0), x[:0].sum()


def _out(m: Any, x: Tensor) -> Any:
    made = torch.empty(4, 8, device=x.device)
    return torch.mul(m.inner(x), 2, out=made), torch.empty(0, device=x.device).set_(m.inner(x).detach())


def _rolled(m: Any, x: Tensor) -> Any:
    y = m.inner(x)
    return F.rrelu(y, training=True), F.alpha_dropout(x, 0.5, True), torch.multinomial(F.softmax(y, -1), 2)


# "host" marks what shows itself to one model at a time, or holds tensors that are not moved with it.
PYTHON_STATE: tuple[Case, ...] = (
    Case("a context variable", _of(lambda m, x: m.inner(x) * SCALE.get()), _x(), missed="SCALE",
         between=lambda m, call: SCALE.set(float(call))),
    Case("a value of the thread's", _of(lambda m, x: m.inner(x) * LOCAL.scale), _x(), missed="LOCAL",
         between=lambda m, call: setattr(LOCAL, "scale", float(call))),
    Case("a variable of the environment", _of(_from_environment), _x(), missed="environment", between=_environment),
    Case("a hook on all modules later", _of(lambda m, x: m.inner(x)), _x(), missed="hook", between=_global_hook),
    Case("warns at every call", _of(_warns), _x()),
    Case("counts in a default of a function", _of(lambda m, x: _logged(m.inner(x))), _x(), refused="_logged",
         marks=("host",)),
    Case("counts in a default of its forward", Forgetful, _x(), refused="calls", marks=("host",)),
    Case("tensors and layers in plain attributes", Unregistered, _x(), between=_change_unregistered,
         missed="layers|scale", marks=("host",)),
    Case("a call of its own", OwnCall, _x()),
    Case("dictionaries of layers and weights that grow", Growing, _x(), between=_grow, missed="is new"),
    Case("a property", Property, _x(), between=lambda m, call: setattr(m, "base", call), missed="base"),
    Case("switches a part to training and back", lambda: Switching("training"), _x(), refused="training",
         observed=Switching.seen),
    Case("freezes and thaws a weight", lambda: Switching("asking"), _x(), refused="gradient", observed=Switching.seen),
    Case("sets a gradient", lambda: Switching("gradient"), _x(), refused="gradient", observed=Switching.seen),
    Case("writes to a weight, a buffer lies in it", Shared, _x()),
    Case("an embedding that caps its own weight", _capped, _numbers),
    Case("laid out anew later", lambda: nn.Conv2d(3, 4, 3), _x(2, 3, 8, 8), between=_channels_last, missed="memory",
         exact=False),
    Case("equal values of other types", _of(lambda m, x, k: -m.inner(x) if isinstance(k, bool) else m.inner(x) * k),
         with_one_of(lambda: True, lambda: 1, lambda: 1.0), missed="not"),
    Case("zero and negative zero", _of(lambda m, x, k: m.inner(x) / k), with_one_of(lambda: 0.0, lambda: -0.0),
         missed="not"),
    Case("numbers of numpy's", _of(lambda m, x, k: m.inner(x) * k),
         with_one_of(lambda: np.float32(2), lambda: np.float64(2), lambda: 2.0), missed="args"),
    Case("dictionaries in another order", _of(lambda m, x, k: m.inner(x) * [*k.values()][0]),
         with_one_of(lambda: {"a": 2, "b": 3}, lambda: {"b": 3, "a": 2}), missed="keys"),
    Case("tuples and lists", _of(lambda m, x, k: m.inner(x) * len(k) + isinstance(k, list)),
         with_one_of(lambda: [1, 2], lambda: (1, 2)), missed="tuple|list"),
    Case("tuples with names", _of(lambda m, x, k: m.inner(x) + isinstance(k, Pair)),
         with_one_of(lambda: Pair(1, 2), lambda: (1, 2)), missed="tuple|Pair"),
    Case("an input with an attribute", _of(lambda m, x: m.inner(x) * x.scale), _tagged, refused="scale"),
    Case("conjugated now and then", _of(lambda m, x: x.resolve_conj() * 2), _complex, missed="conjugated"),
    Case("negated now and then", _of(lambda m, x: m.inner(x)), _imaginary, missed="negated"),
    Case("a list turned around", _of(_reversed),
         lambda device: (([torch.randn(4, 8, device=device), torch.randn(4, 8, device=device)],), {})),
    Case("takes from a dictionary", _of(lambda m, given: m.inner(given.pop("x")) + given["y"]),
         lambda device: (({"x": torch.randn(4, 8, device=device), "y": torch.randn(8, device=device)},), {})),
    Case("pieces of nothing", _of(_nothing), _x()),
    Case("results put into what is there", _of(_out), _x()),
    Case("dice of other kinds", _of(_rolled), _x()),
    Case("computed again for gradients", _of(lambda m, x: checkpoint(m.inner, x, use_reentrant=False)), _x()),
    Case("recurrent", lambda: nn.LSTM(8, 8, 2, batch_first=True), _x(2, 4, 8), exact=False),
    Case("a layer with a way of its own for inference",
         lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), _x(2, 4, 8), exact=False),
)  # fmt: skip
