"""Models that a compiler would get wrong by tensors alone: memory, state, types and what changes between calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from adversarial import Lambda
from adversarial_callers import CallerCase, x
from torch import Tensor, nn

Given = Callable[[int], tuple[Any, ...]]
Change = Callable[[Any, int], Any]


class Held(nn.Module):
    """A layer, some buffers and a function of all."""

    def __init__(self, function: Callable[..., Any], **buffers: Tensor) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.other = nn.Linear(8, 8)
        self.function = function
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Both:
    value: Tensor
    count: int
    nothing: None = None


def state(m: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in m.state_dict().items()}


def one(number: int) -> tuple[Any, ...]:
    return (x(number),)


def called(given: Given = one, change: Change | None = None, num: int = 3) -> Callable[[Any], Iterator[Any]]:
    """Calls one after the other; what they return, what they leave of their inputs, and the model's state."""

    def script(m: Any) -> Iterator[Any]:
        for number in range(num):
            if change is not None:
                change(m, number)
            args = given(number)
            found = m(*args)
            yield found, args
            yield state(m)

    return script


def _numbers(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found] if found.requires_grad else []
    if isinstance(found, dict):
        found = list(found.values())
    if hasattr(found, "__dataclass_fields__"):
        found = list(vars(found).values())
    return [each for item in found for each in _numbers(item)] if isinstance(found, list | tuple) else []


def summed(found: Any) -> Tensor:
    """A loss of everything that can be differentiated."""
    return sum(each.float().square().sum() for each in _numbers(found))  # type: ignore[return-value]


def learned(given: Given = one, change: Change | None = None, num: int = 3) -> Callable[[Any], Iterator[Any]]:
    """Steps of training, with the gradients of inputs that ask for them."""

    def script(m: Any) -> Iterator[Any]:
        for number in range(num):
            if change is not None:
                change(m, number)
            args = given(number)
            m.zero_grad(set_to_none=number % 2 == 0)
            found = m(*args)
            summed(found).backward()
            yield [each.detach().clone() for each in _numbers(found)]
            yield [each.grad for each in args if isinstance(each, Tensor) and each.is_leaf]
            yield {name: None if p.grad is None else p.grad.clone() for name, p in m.named_parameters()}
            with torch.no_grad():
                for parameter in m.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(0.1 * parameter.grad)
            yield state(m)

    return script


def at(number: int, change: Callable[[Any], Any]) -> Change:
    """A change before the call of that number."""
    return lambda m, now: change(m) if now == number else None


MEMORY: list[CallerCase] = []
STEPS: list[CallerCase] = []


def _both(name: str, function: Callable[..., Any] | None = None, given: Given = one, *, model: Any = None,
          change: Change | None = None, train: bool = False, learns: bool = True, calls: bool = True,
          **buffers: Tensor) -> None:  # fmt: skip
    """A model in inference and in training."""
    make = model or (lambda: Held(function, **{key: value.clone() for key, value in buffers.items()}))
    if calls:
        MEMORY.append(CallerCase(name, make, called(given, change), lambda: (given(0), {}), train=train))
    if learns:
        STEPS.append(CallerCase(name, make, learned(given, change), lambda: (given(0), {}), train=True, grad=True))


# --- memory ---------------------------------------------------------------------------------------------------------


def _windows(m: Any, a: Tensor) -> Any:
    seen = a.as_strided((5, 8), (4, 1))
    total = m.inner(seen).sum(0)
    a[1:3].mul_(2)
    return total, seen, seen.sum()


def _exchanged(m: Any, a: Tensor, b: Tensor) -> Any:
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)
    return m.inner(a) - b


def _overlapping(number: int) -> tuple[Tensor, Tensor]:
    base = x(number, 4, 12)
    return base[:, :8], base[:, 4:]


def _written_meanwhile(m: Any, a: Tensor) -> Any:
    left, right = a.chunk(2, -1)
    before = right.clone()
    left.mul_(2)
    right.add_(left)
    return m.inner(a), before, left


def _many_views(m: Any, a: Tensor) -> Any:
    y = m.inner(a)
    return y, y.view(-1), y.t(), y[1:], y.detach(), y.as_strided((3, 3), (1, 1))


def _late_views(m: Any, a: Tensor) -> Any:
    y = m.inner(a)
    row = y[1]
    y = y * 2
    y[1] += row
    y[:, ::2].zero_()
    return y, row


def _scattered(m: Any, a: Tensor) -> Any:
    places = torch.tensor([0, 0, 2], device=a.device)
    a.index_put_((places,), a[:3].clone(), accumulate=True)
    return m.inner(a.index_add(0, places, a[:3]))


_both("windows over an input that is then written to", _windows, learns=False)
_both("two inputs exchanged", _exchanged, lambda n: (x(n), x(n + 50)), learns=False)
_both("two inputs exchanged that overlap", lambda m, a, b: _exchanged(m, a, b), _overlapping, learns=False)
_both("halves of an input written to in turn", _written_meanwhile, learns=False)
_both("one result in six views", _many_views, learns=False)
_both("results written to through views made before", _late_views)
_both("an input scattered into itself", _scattered, learns=False)
_both("a parameter, a part of it and its transpose returned",
      lambda m, a: (m.inner.weight, m.inner.weight[2:4], m.inner.weight.t(), m.inner(a)), learns=False)  # fmt: skip
_both("an input returned with a view of it", lambda m, a: (a, a[:, 1:], m.inner(a)), learns=False)
_both("a result put into an input by out", lambda m, a: (torch.add(a, 1, out=a), m.inner(a)), learns=False)
_both("an input given twice, written to once", lambda m, a, b: m.inner(a.add_(1)) + b, lambda n: (x(n),) * 2,
      learns=False)  # fmt: skip
_both("an expanded input", lambda m, a: (m.inner(a), a.sum(0)), lambda n: (x(n, 1, 8).expand(4, 8),))
_both("an input with windows over itself", lambda m, a: (m.inner(a), a[0]), lambda n: (x(n, 20).unfold(0, 8, 4),))
_both("a result read from a row that is overwritten", lambda m, a: torch.cat([m.inner(a)[:1].clone(), a.neg_()[:1]]),
      learns=False)  # fmt: skip
_both("an input laid out otherwise at every call", lambda m, a: (m.inner(a), a * 2),
      lambda n: ((x(n), x(n, 8, 4).t(), x(n, 8, 8)[::2], x(n, 4, 16)[:, ::2])[n],))  # fmt: skip
_both("sizes of one with odd strides", lambda m, a: m.inner(a).squeeze(0),
      lambda n: (x(n, 64).as_strided((1, 4, 8), (3 + n, 8, 1)),))  # fmt: skip
_both("images with channels last", lambda m, a: (m.inner(a), a + 1),
      lambda n: (x(n, 2, 3, 4, 8).contiguous(memory_format=torch.channels_last),))  # fmt: skip
_both("nothing, and then something", lambda m, a: (m.inner(a), a.sum(0), a.numel()),
      lambda n: (x(n, (0, 4, 0)[n], 8),))  # fmt: skip

# --- values that decide ---------------------------------------------------------------------------------------------


def _until(m: Any, a: Tensor) -> Any:
    turns = 0
    while a.abs().max() > 0.5 and turns < 20:
        a, turns = m.inner(a).tanh() * 0.7, turns + 1
    return a, turns


def _counted(m: Any, a: Tensor) -> Any:
    for _ in range(int(a.abs().sum()) % 3):
        a = m.inner(a)
    return m.inner(a) * 2


_both("a loop until something is small", _until, learns=False)
_both("a loop as often as a value says", _counted)
_both("a branch on a sum", lambda m, a: m.inner(a) if a.sum() > 0 else m.other(a))
_both("a branch on a parameter", lambda m, a: m.inner(a) * (2 if m.inner.weight.sum() > 0 else 3),
      change=at(1, lambda m: m.inner.weight.data.neg_()))  # fmt: skip
_both("rows chosen by their values", lambda m, a: m.inner(a[a[:, 0] > 0]).sum(0))
_both("an index that is a value", lambda m, a: m.inner(a)[:, int(a.argmax()) % 8])
_both("a number of the host's in the result", lambda m, a: (m.inner(a), float(a.sum()), a.shape[0]))
_both("what is not a number decides", lambda m, a: m.inner(torch.nan_to_num(a)) if a.isnan().any() else m.inner(a) * 2,
      lambda n: (x(n) if n != 1 else x(n) / 0 * 0,))  # fmt: skip
_both("a branch on a size", lambda m, a: m.inner(a) if a.shape[0] > 3 else m.other(a),
      lambda n: (x(n, (4, 2, 4)[n], 8),))  # fmt: skip
_both("a branch on a type", lambda m, a: m.inner(a.float()) * (2 if a.dtype == torch.float64 else 3),
      lambda n: (x(n).to((torch.float32, torch.float64, torch.float32)[n]),))  # fmt: skip

# --- state ----------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """Batch statistics of some kind, twice in a call."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8, **settings)

    def forward(self, a: Tensor) -> Tensor:
        return self.norm(self.inner(a)) + self.norm(a)


def _ring(m: Any, a: Tensor) -> Any:
    m.ring[m.place % 3] = a[0].detach()
    m.place += 1
    return m.inner(m.ring.clone()) + m.ring[0]


def _rebound(m: Any, a: Tensor) -> Any:
    m.total = m.total * 0.5 + a.detach().sum()
    return m.inner(a) * m.total.sigmoid()


def _extremes(m: Any, a: Tensor) -> Any:
    with torch.no_grad():
        m.low.copy_(torch.minimum(m.low, a.min()))
        m.high.mul_(0.9).add_(a.max(), alpha=0.1)
    return m.inner((a - m.low) / (m.high - m.low + 1))


def _sliced(m: Any, a: Tensor) -> Any:
    early = m.table.sum()
    m.table[1:3, :4] += a[:2, :4].detach()
    return m.inner(a) + m.table[1], early


def _normalized(m: Any, a: Tensor) -> Any:
    with torch.no_grad():
        m.inner.weight.div_(m.inner.weight.norm(dim=1, keepdim=True))
    return m.inner(a)


ZERO = torch.zeros(())
for _name, _settings in {"no momentum": {"momentum": None}, "no statistics": {"track_running_stats": False},
                         "no weights": {"affine": False}}.items():  # fmt: skip
    _both(f"a norm of {_name}", model=lambda settings=_settings: Normed(**settings), train=True)
_both("norms in training and not, in turns", model=Normed, train=True, change=lambda m, n: m.train(n != 1))
_both("a ring of rows", _ring, ring=torch.zeros(3, 8), place=torch.zeros((), dtype=torch.int64))
_both("a total that is another tensor every time", _rebound, total=ZERO)
_both("extremes so far", _extremes, low=ZERO, high=ZERO + 1)
_both("a part of a table written to between two reads", _sliced, table=torch.zeros(4, 8))
_both("a weight normalized in every call", _normalized, calls=True, learns=False)
_both("a count of eight bits that overflows", lambda m, a: (m.inner(a), m.count.add_(100).clone()),
      count=torch.zeros((), dtype=torch.uint8))  # fmt: skip
_both("a state loaded midway", lambda m, a: m.inner(a) + m.total, total=ZERO,
      change=at(1, lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()})))  # fmt: skip
_both("a parameter replaced midway", lambda m, a: m.inner(a),
      change=at(1, lambda m: setattr(m.inner, "weight", nn.Parameter(torch.ones(8, 8)))))  # fmt: skip
_both("another type midway", lambda m, a: m.inner(a.to(m.inner.weight.dtype)),
      change=lambda m, n: m.to(torch.float64 if n == 1 else torch.float32))  # fmt: skip
_both("a buffer widened midway", lambda m, a: m.inner(a) + m.total, total=ZERO,
      change=at(1, lambda m: m.register_buffer("total", torch.ones(8))))  # fmt: skip

# --- what is drawn --------------------------------------------------------------------------------------------------


def _dropping(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(8, 8), layer(), nn.Linear(8, 8))


for _layer in (nn.Dropout(0.5), nn.Dropout(0.0), nn.Dropout(1.0), nn.Dropout(0.3, inplace=True), nn.AlphaDropout(0.2),
               nn.FeatureAlphaDropout(0.2), nn.RReLU()):  # fmt: skip
    _both(f"{_layer!r} in training", model=_dropping(lambda layer=_layer: layer), train=True)
_both("dropping that is switched on, off and changed", model=_dropping(lambda: nn.Dropout(0.5)),
      change=lambda m, n: (m.train(n != 1), setattr(m[1], "p", 0.5 if n < 2 else 0.9)), train=True)  # fmt: skip
_both("dropping in inference too", lambda m, a: F.dropout(m.inner(a), 0.5, training=True))
_both("noise of every kind", lambda m, a: (m.inner(a + torch.randn_like(a)), torch.rand(3), a.sigmoid().bernoulli(),
      torch.randperm(5), torch.multinomial(a.softmax(-1), 2)), learns=False)  # fmt: skip
_both("seeds between calls", lambda m, a: m.inner(a) * torch.rand(8), change=lambda m, n: torch.manual_seed(n // 2))
_both("a layer left out by chance", lambda m, a: m.inner(a) if torch.rand(()) > 0.5 else m.other(a))

# --- weights that are shared ----------------------------------------------------------------------------------------


def _tied(tie: Callable[[Held], Any], function: Callable[..., Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        made = Held(function)
        tie(made)
        return made

    return make


def _forward(m: Any, a: Tensor) -> Any:
    return m.other(m.inner(a)) + F.linear(a, m.inner.weight.t())


def _overlaid(m: Held) -> None:
    """Two parameters over one memory, shifted by a row."""
    memory = torch.randn(9, 8)
    m.inner.weight, m.other.weight = nn.Parameter(memory[:8]), nn.Parameter(memory[1:])


TIES: dict[str, Callable[[Any], Any]] = {
    "one weight in two layers": lambda m: setattr(m.other, "weight", m.inner.weight),
    "one layer under two names": lambda m: setattr(m, "other", m.inner),
    "two weights over one memory": lambda m: setattr(m.other, "weight", nn.Parameter(m.inner.weight.data)),
    "a weight that is another's transpose": lambda m: setattr(m.other, "weight", nn.Parameter(m.inner.weight.data.t())),
    "weights over one memory, a row apart": _overlaid,
    "a bias that is a row of a weight": lambda m: setattr(m.inner, "bias", nn.Parameter(m.inner.weight.data[0])),
    "a bias of one number": lambda m: setattr(m.inner, "bias", nn.Parameter(torch.ones(1).expand(8), False)),
}
for _name, _tie in TIES.items():
    _both(_name, model=_tied(_tie, _forward))
    _both(f"{_name}, later", _forward, change=at(1, _tie))
_both("a weight written to in forward and shared", model=_tied(TIES["two weights over one memory"], _normalized),
      learns=False)  # fmt: skip

# --- hooks ----------------------------------------------------------------------------------------------------------


def _slope(grad: Tensor) -> Tensor:
    return grad * 2


def _hooked_inside(m: Any, a: Tensor) -> Any:
    y = m.inner(a)
    if y.requires_grad:
        y.register_hook(_slope)
    return m.other(y)


def _doubled(parameter: Any) -> None:
    parameter.grad.mul_(2)


HOOKS: dict[str, Callable[[Any], Any]] = {
    "a hook that replaces a result": lambda m: m.inner.register_forward_hook(lambda *given: given[-1] * 2),
    "a hook that writes to a result": lambda m: m.inner.register_forward_hook(lambda a, b, c: c.mul_(2)),
    "a hook that replaces arguments": lambda m: m.inner.register_forward_pre_hook(lambda a, b: (b[0] + 1,)),
    "a hook that names arguments": lambda m: m.register_forward_pre_hook(lambda a, b, c: ((b[0] + 1,), c),
                                                                         with_kwargs=True),
    "a hook on gradients of a layer": lambda m: m.inner.register_full_backward_hook(
        lambda a, b, c: tuple(each if each is None else each * 2 for each in b)),
    "a hook on gradients before a layer": lambda m: m.inner.register_full_backward_pre_hook(lambda a, b: (b[0] * 2,)),
    "a hook on a parameter": lambda m: m.inner.weight.register_hook(_slope),
    "a hook after gradients are added": lambda m: m.inner.weight.register_post_accumulate_grad_hook(
        _doubled),
}  # fmt: skip
for _name, _hook in HOOKS.items():
    _both(_name, model=_tied(_hook, _forward))
    _both(f"{_name}, later", _forward, change=at(1, _hook))
_both("a hook on a tensor inside", _hooked_inside)

# --- types ----------------------------------------------------------------------------------------------------------


def _promoted(m: Any, a: Tensor, b: Any) -> Any:
    found = (a + b, a * b, a > b, torch.where(a > 0, a, b), torch.maximum(a, torch.as_tensor(b, dtype=a.dtype)))
    return (*found, m.inner(a.float().real if a.is_complex() else a.float()))


KINDS = {
    "integers and halves": lambda n: (x(n).bfloat16(), x(n).mul(9).to(torch.int32)),
    "a number of 64 bits without dims": lambda n: (x(n), torch.tensor(1.5 + n, dtype=torch.float64)),
    "an integer without dims": lambda n: (x(n).half(), torch.tensor(3 + n)),
    "halves and a number in float32": lambda n: (x(n).bfloat16(), torch.tensor([1.0009765625 + n])),
    "halves and a number of Python's": lambda n: (x(n).bfloat16(), 1.0009765625),
    "a flag and numbers": lambda n: (x(n), x(n) > n),
    "two kinds of halves": lambda n: (x(n).half(), x(n).bfloat16()),
    "bytes that overflow": lambda n: (x(n).mul(99).to(torch.uint8), x(n).mul(99).to(torch.int8)),
    "integers that overflow": lambda n: (x(n).mul(2**30).to(torch.int32), 3),
    "zeros of either sign, infinite and none": lambda n: (x(n) * 0, x(n) / 0),
    "very large and very small": lambda n: (x(n) * 1e38, x(n) * 1e-45),
}
for _name, _given in KINDS.items():
    _both(_name, _promoted, _given, learns=False)
_both("complex numbers", lambda m, a: (a * 2, a.conj(), a.abs(), torch.view_as_real(a), m.inner(a.real)),
      lambda n: (torch.complex(x(n), x(n + 1)),), learns=False)  # fmt: skip
_both("complex numbers differentiated", lambda m, a: torch.fft.fft(m.inner(a)).abs())
_both("inputs of another type at every call", lambda m, a: m.inner(a.float()) + a,
      lambda n: (x(n).to((torch.float32, torch.bfloat16, torch.int64)[n]),))  # fmt: skip
_both("sums of flags and of bytes", lambda m, a: (m.inner(a), (a > 0).sum(), (a > 0).float().mean(),
      a.to(torch.uint8).sum(), a.to(torch.int8).cumsum(0), (a > 0) + (a < 0)))  # fmt: skip
_both("division of integers", lambda m, a, b: (a / b, a // b, a % b, torch.div(a, b, rounding_mode="trunc"),
      m.inner(a.float())), lambda n: (x(n).mul(99).to(torch.int64), x(n).abs().mul(9).to(torch.int64) + 1 + n),
      learns=False)  # fmt: skip
_both("powers that leave integers", lambda m, a: (a.pow(2), a.float().pow(0.5), 2 ** a.clamp(0, 3), m.inner(a.float())),
      lambda n: (x(n).mul(9).to(torch.int64),))  # fmt: skip

# --- calls and results ----------------------------------------------------------------------------------------------


def _under(around: Callable[[], Any], calls: tuple[int, ...] = (1,)) -> Callable[[Any], Iterator[Any]]:
    def script(m: Any) -> Iterator[Any]:
        for number in range(3):
            if number in calls:
                with around():
                    found = m(x(number))
            else:
                found = m(x(number))
            yield found.detach(), found.dtype

    return script


def _asking(number: int) -> tuple[Tensor]:
    return (x(number).requires_grad_(),)


for _name, _around in {
    "inference mode": torch.inference_mode, "no gradients": torch.no_grad, "gradients": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}.items():  # fmt: skip
    MEMORY.append(CallerCase(f"a call under {_name}", lambda: Lambda(lambda m, a: m.inner(a).relu()), _under(_around)))
    MEMORY.append(CallerCase(f"a call outside of {_name}", lambda: Lambda(lambda m, a: m.inner(a).relu()),
                      _under(_around, (0, 2)), around=_around))  # fmt: skip
_both("an input that asks for gradients", lambda m, a: (m.inner(a), a * 2), _asking)
_both("an input that asks for gradients now and then", lambda m, a: m.inner(a),
      lambda n: (x(n).requires_grad_(n == 1),))  # fmt: skip
_both("two inputs that ask, one of them returned", lambda m, a, b: (m.inner(a) * b, b),
      lambda n: (*_asking(n), *_asking(n + 9)))  # fmt: skip
_both("another number of rows at every call", lambda m, a: (m.inner(a), a.mean(0)), lambda n: (x(n, (4, 5, 1)[n], 8),))
_both("a named tuple", lambda m, a: Pair(m.inner(a), a.detach() * 2))
_both("a dataclass with a number and nothing", lambda m, a: Both(m.inner(a), len(a)))
_both("a dictionary with nothing in it", lambda m, a: {"a": m.inner(a), "b": None, "c": [], "d": 1.5})
_both("one result twice", lambda m, a: (lambda y: (y, y))(m.inner(a)))
_both("one result and its history cut off", lambda m, a: (lambda y: (y, y.detach() + 1))(m.inner(a)))
_both("a layer frozen midway", lambda m, a: m.other(m.inner(a)), change=at(1, lambda m: m.inner.requires_grad_(False)))
_both("a result that does not depend on a layer", lambda m, a: m.inner(a) + 0 * m.other(a).detach())
_both("a layer that is not reached", lambda m, a: m.inner(a))
_both("gradients that a layer stops", lambda m, a: m.other(m.inner(a).detach()) + m.inner(a))
