"""Models made to catch an optimizer out, as data: each must give what it gives eagerly, or be refused with a reason."""

from __future__ import annotations

import contextlib
import enum
import itertools
import random
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A model, its inputs, what happens between calls, and whether a recording of it may be made."""

    name: str
    model: Callable[[], Any]
    inputs: Callable[[torch.device], Inputs]
    refused: str = ""
    """A pattern of the reason for which it must be refused; empty if it must be recorded."""
    missed: str = ""
    """A pattern of the reason for which calls after the first must run eagerly; empty if they must be replayed."""
    missed_elsewhere: str = ""
    """The same on a device that is not the host."""
    between: Callable[[Any, int], Any] | None = None
    """Done to the model before the call of that number."""
    around: Callable[[torch.device], contextlib.AbstractContextManager[Any]] = lambda device: contextlib.nullcontext()
    train: bool = False
    observed: Callable[[Any], Any] = lambda model: None
    """What else there is to compare after each call."""
    raises: type[Exception] | None = None
    exact: bool = True
    state: bool = True
    """Whether a refusal can put everything back: an iterator cannot be turned back, nor can dice."""
    marks: tuple[str, ...] = field(default=())


class Lambda(nn.Module):
    """A module around a function of (module, inputs)."""

    def __init__(self, function: Callable[..., Any], width: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def _of(function: Callable[..., Any], width: int = 8) -> Callable[[], nn.Module]:
    return lambda: Lambda(function, width)


def _x(*shape: int) -> Callable[[torch.device], Inputs]:
    return lambda device: ((torch.randn(*(shape or (4, 8)), device=device),), {})


# --- outputs of all types -------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """A result that is a dataclass."""

    value: Tensor
    name: str = "answer"
    nothing: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Frozen:
    """A result that can not be set after it is made."""

    value: Tensor
    pair: tuple[Tensor, int]


class Color(enum.Enum):
    """A plain value."""

    RED = 1


Point = namedtuple("Point", "x y")


class Holder:
    """An ordinary object with tensors inside."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.count = 0
        self.parts = [tensor]


def _many_types(m: Any, x: Tensor) -> Any:
    y = m.inner(x)
    shared = [y]
    return {
        "none": None, "text": "a", "int": 3, "float": float("nan"), "bool": True, "complex": 1j, "enum": Color.RED,
        "tuple": (y, y + 1), "point": Point(y, x), "ordered": OrderedDict(a=y), "set": {1, 2}, "dtype": y.dtype,
        "size": y.shape, "answer": Answer(y), "frozen": Frozen(y, (y * 2, 7)), "top": torch.topk(y, 2),
        "shared": shared, "again": shared, "device": y.device, "slice": slice(1, 2), "object": Holder(y), 5: (),
        "empty": y[:0], "scalar": y.sum(),
    }  # fmt: skip


def _itself(m: Any, x: Tensor) -> Any:
    made: list[Any] = [m.inner(x)]
    made.append(made)
    return made


def _model_output(m: Any, x: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    y = m.inner(x)
    return BaseModelOutput(last_hidden_state=y, hidden_states=(x, y))


# --- aliasing and writing -------------------------------------------------------------------------------------------


def _write_input(m: Any, x: Tensor) -> Tensor:
    x.add_(1)
    return m.inner(x)


def _write_view_of_input(m: Any, x: Tensor) -> Tensor:
    x[1:3, ::2].mul_(2)
    return m.inner(x)


def _in_place_chain(m: Any, x: Tensor) -> Tensor:
    y = m.inner(x)
    z = y.view(-1)
    z[::3] = 0
    y.relu_()
    return y + z.view_as(y)


def _views_of_input(m: Any, x: Tensor) -> Any:
    return x.view(-1)[3:], x.t(), x[0], m.inner(x).t(), x


def _views_of_output(m: Any, x: Tensor) -> Any:
    y = m.inner(x)
    return y, y[0], y.t(), y.expand(2, *y.shape), y.view(-1)[1::2]


def _parameters_returned(m: Any, x: Tensor) -> Any:
    return m.inner.weight, m.inner.weight.t(), m.inner.bias[2:], m.inner(x)


def _overlapping(device: torch.device) -> Inputs:
    base = torch.randn(10, 8, device=device)
    return (base[:6], base[3:9]), {}


def _write_overlapping(m: Any, a: Tensor, b: Tensor) -> Tensor:
    a.add_(1)
    b.mul_(2)
    return m.inner(a) + m.inner(b)


def _twice(device: torch.device) -> Inputs:
    x = torch.randn(4, 8, device=device)
    return (x, x), {"z": x}


def _same_and_write(m: Any, a: Tensor, b: Tensor, z: Tensor) -> Any:
    a.mul_(2)
    return m.inner(b) + z, b


def _folded(device: torch.device) -> Inputs:
    return (torch.randn(32, device=device).as_strided((6, 8), (4, 1)),), {}


def _transposed(device: torch.device) -> Inputs:
    return (torch.randn(8, 4, device=device).t(),), {"y": torch.randn(4, 24, device=device)[:, 3:19:2]}


def _expanded(device: torch.device) -> Inputs:
    return (torch.randn(1, 8, device=device).expand(4, 8),), {"y": torch.randn((), device=device).expand(4, 8)}


def _odd_offset(device: torch.device) -> Inputs:
    return (torch.randn(4 * 8 + 1, device=device)[1:].view(4, 8),), {}


def _write_expanded(m: Any, x: Tensor) -> Tensor:
    y = m.inner(x)
    x[:1].add_(1)
    return y + x


# --- state ----------------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.inner(x) * self.calls + self.mean, self.calls


class Rebinding(nn.Module):
    """Replaces its buffer instead of writing to it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.9 + x.mean(0) * 0.1
        return x - self.mean


class Tally(nn.Module):
    """Counts its calls in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.calls = 0
        self.log: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(self.calls)
        return self.inner(x) * self.calls


class Lazy(nn.Module):
    """Sets something up in its first call and leaves it alone afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(8.0, device=x.device)
        return self.inner(x) + self.table


class Listed(nn.Module):
    """Appends to a list that is not its attribute."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.watcher = {"log": log}

    def forward(self, x: Tensor) -> Tensor:
        self.watcher["log"].append("called")
        return self.inner(x)


@dataclass(slots=True)
class Slotted:
    """A holder without a dictionary."""

    count: int = 0


class Hidden(nn.Module):
    """Keeps its count where it is hard to see."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.inner, self.where = nn.Linear(8, 8), where
        self.seen: set[int] = set()
        self.array = np.zeros(3)
        self.slotted = Slotted()
        self.counter = itertools.count()
        self.dice = random.Random(3)
        self.numpy_dice = np.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        kinds = {"set": lambda: self.seen.add(len(self.seen)) or len(self.seen), "counter": lambda: next(self.counter),
                 "array": self._array, "slots": self._slotted, "dice": self.dice.random,
                 "numpy dice": lambda: float(self.numpy_dice.random())}  # fmt: skip
        return self.inner(x) * kinds[self.where]()

    def _array(self) -> float:
        self.array += 1
        return float(self.array[0])

    def _slotted(self) -> int:
        self.slotted.count += 1
        return self.slotted.count


SCALE = 2.0
LOG: list[str] = []


def _reads_global(m: Any, x: Tensor) -> Tensor:
    return m.inner(x) * SCALE


def _change_global(model: Any, call: int) -> None:
    global SCALE
    SCALE = 2.0 + call


def _appends_global(m: Any, x: Tensor) -> Tensor:
    LOG.append("called")
    return m.inner(x)


def _closure() -> nn.Module:
    factor = [3.0]
    model = Lambda(lambda m, x: m.inner(x) * factor[0])
    model.change = lambda: factor.__setitem__(0, factor[0] + 1)
    return model


class ClassCount(nn.Module):
    """Counts on its class."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return self.inner(x)


def _prints(m: Any, x: Tensor) -> Tensor:
    print("forward")
    return m.inner(x)


# --- control flow, values, randomness -------------------------------------------------------------------------------


def _branches(m: Any, x: Tensor) -> Tensor:
    return m.inner(x) if x.sum() > 0 else x


def _loops(m: Any, x: Tensor) -> Tensor:
    for _ in range(int(x.abs().sum().item()) % 3 + 1):
        x = m.inner(x)
    return x


def _selects(m: Any, x: Tensor) -> Tensor:
    return m.inner(x)[x[:, 0] > 0]


def _random_host(m: Any, x: Tensor) -> Tensor:
    return m.inner(x) * random.random()


def _noise(m: Any, x: Tensor) -> Tensor:
    return m.inner(x) + torch.randn_like(x)


def _dropout(m: Any, x: Tensor) -> Tensor:
    return F.dropout(m.inner(x), 0.5, m.training)


def _promotes(m: Any, x: Tensor, y: Tensor) -> Any:
    whole = torch.ones(4, 8, dtype=torch.int32, device=x.device)
    small = torch.full((), 2.5, dtype=torch.float64, device=x.device)
    return x + y, y * small, whole / 3, whole + small, torch.where(x > 0, x, y), y.sum() + x, (x > 0) + whole, 2 * y


def _halves(device: torch.device) -> Inputs:
    return (torch.randn(4, 8, device=device), torch.randn(4, 8, device=device).half()), {}


class Square(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2 * ctx.saved_tensors[0]


def _refuses_negative(m: Any, x: Tensor) -> Tensor:
    if x.shape[0] == 4:
        raise ValueError("four rows are too many")
    return m.inner(x)


# --- caches ---------------------------------------------------------------------------------------------------------


class Layer:
    """One layer of a cache that is replaced as it grows, with a count in Python."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys
        self.length = keys.shape[0]


class Cache:
    """A list of layers, and where the next token goes."""

    def __init__(self, layers: list[Layer]) -> None:
        self.layers = layers
        self.seen: Tensor | None = None


def _grows(m: Any, x: Tensor, cache: Cache) -> Any:
    for layer in cache.layers:
        layer.keys = torch.cat([layer.keys, m.inner(x)])
        layer.length += x.shape[0]
        x = x + layer.keys.sum(0)
    cache.seen = x
    return x, cache


def _growing(device: torch.device) -> Inputs:
    layers = [Layer(torch.randn(5, 8, device=device)) for _ in "ab"]
    return (torch.randn(1, 8, device=device),), {"cache": Cache(layers)}


class Fixed:
    """A cache whose memory stays and is written to, with its position as a tensor."""

    def __init__(self, device: torch.device) -> None:
        self.keys = torch.zeros(16, 8, device=device)
        self.position = torch.zeros((), dtype=torch.long, device=device)


def _fills(m: Any, x: Tensor, cache: Fixed) -> Tensor:
    where = torch.arange(x.shape[0], device=x.device) + cache.position
    cache.keys.index_copy_(0, where, m.inner(x))
    cache.position.add_(x.shape[0])
    return x @ cache.keys.t()


def _fixed(device: torch.device) -> Inputs:
    cache = Fixed(device)
    cache.position.fill_(3)
    return (torch.randn(1, 8, device=device),), {"cache": cache}


def _list_input(m: Any, xs: list[Tensor], log: dict[str, Any]) -> Tensor:
    xs.append(m.inner(xs[0]))
    log["last"] = xs[-1]
    log.pop("first", None)
    return xs[0] + xs[1]


def _lists(device: torch.device) -> Inputs:
    return ([torch.randn(4, 8, device=device)],), {"log": {"first": 1}}


# --- changes after the plan was made --------------------------------------------------------------------------------


def _step(model: Any, call: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def _replace(model: Any, call: int) -> None:
    if call == 2:
        model.inner.weight = nn.Parameter(model.inner.weight.detach() * 2)


def _swap_data(model: Any, call: int) -> None:
    if call == 2:
        model.inner.weight.data = model.inner.weight.data * 2


def _swap_module(model: Any, call: int) -> None:
    if call == 2:
        model.inner = nn.Linear(8, 8, device=model.inner.weight.device)
        with torch.no_grad():
            model.inner.weight.fill_(0.5)
            model.inner.bias.fill_(0.25)


def _to_train(model: Any, call: int) -> None:
    model.train(call % 2 == 0)


def _to_double(model: Any, call: int) -> None:
    if call == 2:
        model.double()
        model.float()


def _hook(model: Any, call: int) -> None:
    if call == 2:
        model.inner.register_forward_hook(lambda module, args, output: output * 2)


def _attribute(model: Any, call: int) -> None:
    model.factor = float(call)


def _factor(m: Any, x: Tensor) -> Tensor:
    return m.inner(x) * getattr(m, "factor", 1.0)


class Brings(nn.Module):
    """Keeps tensors on the host, makes some there, and brings them along at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.table = torch.arange(8.0)
        self.pick = torch.tensor([2, 0, 1])

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) * self.table.to(x.device) + torch.tensor([1.0, 2.0] * 4, device=x.device)
        shift = torch.zeros(8, device=x.device)
        shift.copy_(torch.linspace(0, 1, 8))
        brought = self.table[:4].to(x.device)
        brought += 1
        return y[self.pick, ::2] * brought + shift[[3, 1, 0, 2]]


def _change_table(model: Any, call: int) -> None:
    model.table.add_(1)


class Tied(nn.Module):
    """Uses one weight twice, under two names, one of them as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.embed(ids)), self.embed.weight[1]


class Blocks(nn.Module):
    """Lists and dictionaries of modules, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        self.blocks = nn.ModuleList([block, nn.Linear(8, 8), block])
        self.named = nn.ModuleDict({"norm": nn.LayerNorm(8)})
        self.scales = nn.ParameterList([torch.full((8,), 2.0)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + x
        return self.named["norm"](x) * self.scales[0]


def _normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())


def _hooked() -> nn.Module:
    model = Lambda(lambda m, x: m.inner(x))
    model.inner.register_forward_hook(lambda module, args, output: output + 1)
    return model


@contextlib.contextmanager
def _autocast(device: torch.device) -> Iterator[None]:
    with torch.autocast(device.type, torch.bfloat16):
        yield


def _inference(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.inference_mode()


def _sparse(device: torch.device) -> Inputs:
    return (torch.eye(8, device=device).to_sparse(),), {}


def _with_dict(device: torch.device) -> Inputs:
    x = torch.randn(4, 8, device=device)
    return (), {"batch": {"x": x, "mask": x > 0, "name": "n", "width": 8}, "flags": (True, None, 1.5)}


def _plain_values(m: Any, batch: dict[str, Any], flags: tuple[Any, ...]) -> Any:
    return {"y": m.inner(batch["x"]).masked_fill(batch["mask"], flags[2]), "name": batch["name"]}


def _ids(device: torch.device) -> Inputs:
    return (torch.randint(0, 16, (2, 5), device=device),), {}


def _empty(device: torch.device) -> Inputs:
    return (torch.randn(0, 8, device=device),), {}


def _complex(m: Any, x: Tensor) -> Any:
    z = torch.complex(m.inner(x), x)
    return z * z.conj().resolve_conj(), z.abs(), torch.view_as_real(z)


def _conjugated(m: Any, x: Tensor) -> Tensor:
    return torch.complex(x, m.inner(x)).conj()


def _generator(m: Any, x: Tensor) -> Iterator[Tensor]:
    y = m.inner(x)
    return (y[i] for i in range(2))


def _large(device: torch.device) -> Inputs:
    return (torch.randn(600, 1024, device=device),), {}


CASES: tuple[Case, ...] = (
    Case("plain", _of(lambda m, x: m.inner(x)), _x()),
    Case("outputs of many types", _of(_many_types), _x()),
    Case("an output that contains itself", _of(_itself), _x()),
    Case("a model output", _of(_model_output), _x(), marks=("transformers",)),
    Case("a generator returned", _of(_generator), _x(), refused="generator"),
    Case("inputs of many types", _of(_plain_values), _with_dict),
    Case("no input at all", _of(lambda m: m.inner.weight.sum(0)), lambda device: ((), {})),
    Case("writes to its input", _of(_write_input), _x()),
    Case("writes to a view of its input", _of(_write_view_of_input), _x()),
    Case("writes to a view of an intermediate", _of(_in_place_chain), _x()),
    Case("returns views of its input", _of(_views_of_input), _x()),
    Case("returns views of one result", _of(_views_of_output), _x()),
    Case("returns parameters and views of them", _of(_parameters_returned), _x()),
    Case("returns its input alone", _of(lambda m, x: x), _x()),
    Case("overlapping inputs, written to", _of(_write_overlapping), _overlapping),
    Case("one tensor given three times, written to", _of(_same_and_write), _twice),
    Case("transposed and strided inputs", _of(lambda m, x, y: m.inner(x) + y), _transposed),
    Case("expanded inputs", _of(lambda m, x, y: m.inner(x) + y), _expanded),
    Case("an expanded input, written to", _of(_write_expanded), lambda d: (_expanded(d)[0], {})),
    Case("an input folded over itself", _of(lambda m, x: m.inner(x)), _folded),
    Case("an input at an odd address", _of(lambda m, x: m.inner(x)), _odd_offset),
    Case("an empty input", _of(lambda m, x: (m.inner(x), x.sum())), _empty),
    Case("large results kept", _of(lambda m, x: (m.inner(x), x * 2), 1024), _large, exact=False),
    Case("dtypes that promote", _of(_promotes), _halves),
    Case("complex numbers", _of(_complex), _x()),
    Case("a lazily conjugated result", _of(_conjugated), _x(), refused="layout|type"),
    Case("a sparse input", _of(lambda m, x: torch.sparse.mm(x, m.inner.weight)), _sparse, refused="another kind"),
    Case("counts in a buffer", Counting, _x()),
    Case("replaces a buffer", Rebinding, _x(), refused="mean", observed=lambda m: m.mean.clone()),
    Case("batch statistics in training", _normed, _x(), train=True),
    Case("batch statistics in inference", _normed, _x()),
    Case("counts in Python", Tally, _x(), refused="calls|log", observed=lambda m: (m.calls, list(m.log))),
    Case("sets up in the first call", Lazy, _x()),
    Case("appends to a list", lambda: Listed([]), _x(), refused="log", observed=lambda m: len(m.watcher["log"])),
    Case("counts on its class", ClassCount, _x(), refused="calls|state"),
    Case("counts in a set", lambda: Hidden("set"), _x(), refused="seen"),
    Case("counts in an array", lambda: Hidden("array"), _x(), refused="array"),
    Case("counts in slots", lambda: Hidden("slots"), _x(), refused="slotted"),
    Case("counts with an iterator", lambda: Hidden("counter"), _x(), refused="counter", state=False),
    Case("throws its own dice", lambda: Hidden("dice"), _x(), refused="dice|random", state=False),
    Case("throws dice of numpy's", lambda: Hidden("numpy dice"), _x(), refused="dice", state=False),
    Case("prints", _of(_prints), _x(), refused="prints"),
    Case("reads a global that changes", _of(_reads_global), _x(), missed="SCALE", between=_change_global),
    Case("appends to a global list", _of(_appends_global), _x(), refused="LOG"),
    Case("reads a closure that changes", _closure, _x(), missed="changed", between=lambda m, call: m.change()),
    Case("branches on values", _of(_branches), _x(), refused="host"),
    Case("loops as values say", _of(_loops), _x(), refused="host"),
    Case("selects by values", _of(_selects), _x(), refused="host"),
    Case("random numbers of the host", _of(_random_host), _x(), refused="host"),
    Case("noise", _of(_noise), _x()),
    Case("dropout in inference", _of(_dropout), _x()),
    Case("dropout in training", _of(_dropout), _x(), train=True),
    Case("constants brought from the host", Brings, _x()),
    Case("a constant on the host that changes", Brings, _x(), missed_elsewhere="written to", between=_change_table),
    Case("a weight used twice", Tied, _ids),
    Case("modules in lists", Blocks, _x()),
    Case("a function with its own backward", _of(lambda m, x: Square.apply(m.inner(x))), _x()),
    Case("a cache that grows", _of(_grows), _growing),
    Case("a cache that is filled, elsewhere each time", _of(_fills), _fixed, missed="elsewhere"),
    Case("lists and dictionaries changed", _of(_list_input), _lists),
    Case("parameters updated", _of(lambda m, x: m.inner(x)), _x(), between=_step),
    Case("a parameter replaced", _of(lambda m, x: m.inner(x)), _x(), between=_replace, missed="weight"),
    Case("a parameter's data replaced", _of(lambda m, x: m.inner(x)), _x(), between=_swap_data, missed="weight"),
    Case("a module replaced", _of(lambda m, x: m.inner(x)), _x(), between=_swap_module, missed="inner"),
    Case("train and eval switched", _of(_dropout), _x(), between=_to_train, missed="training"),
    Case("moved to another dtype and back", _of(lambda m, x: m.inner(x)), _x(), between=_to_double, missed="moved"),
    Case("an attribute that changes", _of(_factor), _x(), between=_attribute, missed="factor"),
    Case("a hook from the start", _hooked, _x(), refused="hook"),
    Case("a hook added later", _of(lambda m, x: m.inner(x)), _x(), between=_hook, missed="hook"),
    Case("autocast", _of(lambda m, x: m.inner(x)), _x(), around=_autocast, between=_step),
    Case("inference mode", _of(lambda m, x: (m.inner(x), x[1:])), _x(), around=_inference),
    Case("raises", _of(_refuses_negative), _x(), refused="four rows", raises=ValueError),
)  # fmt: skip
