"""More models made to catch an optimizer out: what modules, tensors, types and the state around a call can be."""

from __future__ import annotations

import contextlib
import functools
import math
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from adversarial import Case, Inputs, Lambda, _of, _x
from torch import Tensor, nn
from torch.nn.utils import parametrize

# --- memory ---------------------------------------------------------------------------------------------------------


class Ring(nn.Module):
    """Writes each call's mean into the next row of a buffer through two views, and returns a view of the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("rows", torch.zeros(3, 8))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Any:
        half = self.rows[:, :4]
        half.view(3, 2, 2)[:, 1].add_(1)
        self.rows.index_copy_(0, self.place, self.inner(x).mean(0, keepdim=True))
        self.place.add_(1).remainder_(3)
        return self.rows.t(), self.rows.sum()


def _into_itself(m: Any, x: Tensor) -> Tensor:
    x[1:].copy_(m.inner(x)[:-1])
    x.t_()
    x.t_()
    return x


def _resized(m: Any, x: Tensor) -> Any:
    y = m.inner(x).clone()
    y.resize_(2, 8)
    z = torch.empty(0)
    torch.add(x, 1, out=z)
    return y, z


def _out_of_order(m: Any, x: Tensor) -> Any:
    y = m.inner(x)
    before = y.clone()
    view = y[::2]
    y.mul_(2)
    view.sub_(before[::2])
    swapped = torch.stack([y[1], y[0]])
    y[0], y[1] = swapped[0], swapped[1]
    return y, view, before


def _scattered(m: Any, x: Tensor) -> Any:
    y = m.inner(x)
    y[[0, 2]] = 7
    y[y > 6.5] *= 2
    y.diagonal().zero_()
    y.unfold(1, 3, 2)[..., 1].add_(0.5)
    y.masked_scatter_(y < -1, torch.ones(32))
    return y, y.real, y.detach()


def _odd_strides(device: torch.device) -> Inputs:
    """Sizes of one with strides of anything, columns first, channels last of one channel."""
    one = torch.randn(8, device=device).as_strided((1, 8), (77, 1))
    images = torch.randn(2, 1, 4, 4, device=device).to(memory_format=torch.channels_last)
    return (one, torch.randn(8, 4, device=device).t()), {"images": images}


def _mixed_layouts(m: Any, a: Tensor, b: Tensor, images: Tensor) -> Any:
    return m.inner(a) + b, images * 2 + b.mean(), images.contiguous(), (images + 1).flatten(1)


def _stride_zero(m: Any, x: Tensor) -> Any:
    y = m.inner(x).sum(0)
    return y.expand(3, 8), y[None].expand(2, 3, 8).transpose(0, 2), torch.broadcast_to(x[:1, :1], (4, 4))


# --- types and values -----------------------------------------------------------------------------------------------


def _many_dtypes(device: torch.device) -> Inputs:
    small = torch.randint(0, 256, (4, 8), dtype=torch.uint8, device=device)
    half = torch.randn(4, 8, device=device).bfloat16()
    whole = torch.randint(-9, 9, (4, 8), dtype=torch.int16, device=device)
    return (small, half, whole), {"one": torch.tensor(3.7, dtype=torch.float64, device=device)}


def _arithmetic(m: Any, small: Tensor, half: Tensor, whole: Tensor, one: Tensor) -> Any:
    flags = whole > 0
    return (
        small + small, small - 1, -small, whole // 3, whole % -4, whole / 2, whole**2, flags + flags, flags.sum(),
        half * 2.5, half + one, half + torch.full((1,), 1.0), whole + 0.5, whole * one, small.float().mean() + half,
        torch.cat([whole, flags], 1), torch.where(flags, half, one), whole >> 1, small & 7, ~flags,
        half.sum(dtype=torch.float64), torch.bucketize(half.float(), torch.ones(1)), flags.float().cumsum(1),
        small.bool(), torch.result_type(half, one), whole.clamp(min=0.5), half.pow(2).mean().item(),
    )  # fmt: skip


def _special(device: torch.device) -> Inputs:
    x = torch.randn(4, 8, device=device)
    x[0, 0], x[1, 1], x[2, 2], x[3] = math.nan, math.inf, -math.inf, -math.inf
    return (x,), {}


def _not_finite(m: Any, x: Tensor) -> Any:
    tied = torch.zeros(4, 8)
    return (
        x.max(1).values, x.amin(1), F.relu(x), x.clamp(1, -1), F.softmax(x, 1), F.log_softmax(x, -1),
        torch.nan_to_num(x), x.sum(1), F.gelu(x), F.silu(x), torch.sigmoid(x), F.softplus(x), torch.tanh(x),
        F.leaky_relu(x), F.hardtanh(x), tied.argmax(1), tied.max(1).indices, x.logsumexp(1), torch.fmax(x, tied),
        x.minimum(tied), torch.sign(-tied), 1 / -tied, x.sort(1).values, x.isnan(), F.layer_norm(x, (8,)),
    )  # fmt: skip


@dataclass
class Settings:
    """An argument that is an object with plain values."""

    scale: float = 2.0
    names: tuple[str, ...] = ("a", "b")


def _settings(device: torch.device) -> Inputs:
    x = torch.randn(4, 8, device=device)
    return (x, None, [None, 2]), {"mask": None, "settings": Settings(), "size": torch.Size([4, 8]), "array": np.ones(8)}


def _plain_arguments(m: Any, x: Tensor, nothing: Any, more: list[Any], **named: Any) -> Any:
    y = m.inner(x) * named["settings"].scale + more[1]
    return y.reshape(named["size"]) + torch.as_tensor(named["array"], dtype=y.dtype), named["mask"], nothing


@dataclass(frozen=True)
class Nested:
    """Results within results."""

    parts: tuple[Tensor, ...]
    inner: Any = None


def _nested(m: Any, x: Tensor) -> Any:
    y = m.inner(x)
    return types.SimpleNamespace(deep=Nested((y, x), Nested((y[0],), {"x": [x, (y, None)]})), view=y.view(-1))


class Marked(Tensor):
    """A tensor of another class."""


def _marked(device: torch.device) -> Inputs:
    return (torch.randn(4, 8, device=device).as_subclass(Marked),), {}


def _parameter(device: torch.device) -> Inputs:
    return (nn.Parameter(torch.randn(4, 8, device=device)),), {}


# --- modules --------------------------------------------------------------------------------------------------------


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.tril() * 2


def _parametrized() -> nn.Module:
    model = Lambda(lambda m, x: m.inner(x))
    parametrize.register_parametrization(model.inner, "weight", Doubled())
    return model


def _weight_normed() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Tanh())


def _spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh())


def _pruned() -> nn.Module:
    from torch.nn.utils import prune

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    prune.random_unstructured(model[0], "weight", 0.5)
    return model


class Flips(nn.Module):
    """Does one thing and the other in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.even = nn.Linear(8, 8), False

    def forward(self, x: Tensor) -> Tensor:
        self.even = not self.even
        return self.inner(x) if self.even else x * 2


class Remembers(nn.Module):
    """A recurrent model that keeps its hidden state for the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.cell(x, self.hidden)
        return self.hidden


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        return self(self.inner(x), depth - 1) if depth else x


class Answers(nn.Module):
    """Looks for attributes elsewhere when it has none."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def _own_forward() -> nn.Module:
    """The forward of this one object is another than its class's."""
    model = nn.Linear(8, 8)
    model.forward = lambda x: F.linear(x, model.weight) - 1  # type: ignore[method-assign]
    return model


def _new_forward(model: Any, call: int) -> None:
    if call == 2:
        kept = model.original if hasattr(model, "original") else model
        kept.forward = types.MethodType(lambda self, x: self.inner(x) * 3, kept)


def _partial() -> nn.Module:
    return Lambda(functools.partial(lambda scale, m, x: m.inner(x) * scale, 1.5))


def _prehooked() -> nn.Module:
    model = Lambda(lambda m, x, scale=1.0: m.inner(x) * scale)
    model.register_forward_pre_hook(lambda m, args, kwargs: (args, {"scale": 4.0}), with_kwargs=True)
    return model


def _load(model: Any, call: int) -> None:
    model.load_state_dict({name: torch.full_like(value, 0.1 * call) for name, value in model.state_dict().items()})


def _load_assigned(model: Any, call: int) -> None:
    if call == 2:
        state = {name: value.detach() * 0.5 for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)


def _freeze(model: Any, call: int) -> None:
    model.requires_grad_(call % 2 == 0)


def _tie_later(model: Any, call: int) -> None:
    if call == 2:
        model[2].weight = model[0].weight


# --- what is around a call ------------------------------------------------------------------------------------------


def _own_gradient(m: Any, x: Tensor) -> Tensor:
    """A force: the gradient of an energy, inside of the model."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(m.inner(x).square().sum(), x)
    return found.detach()


def _own_modes(m: Any, x: Tensor) -> Any:
    with torch.autocast(x.device.type, torch.bfloat16):
        y = m.inner(x)
    with torch.no_grad():
        z = m.inner(x)
    return y, z, torch.is_grad_enabled()


def _seeds(m: Any, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return m.inner(x) + torch.rand_like(x)


def _forks_dice(m: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        noise = torch.rand_like(x)
    return m.inner(x) + noise


def _given_dice(device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(9)
    return (torch.randn(4, 8, device=device),), {"generator": generator}


def _draws_from(m: Any, x: Tensor, generator: torch.Generator) -> Tensor:
    return m.inner(x) + torch.rand(4, 8, generator=generator)


def _raises_inside(m: Any, x: Tensor) -> Tensor:
    try:
        return m.inner(x.new_zeros(4, 9))
    except RuntimeError:
        return m.inner(x)


def _default_dtype(m: Any, x: Tensor) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return m.inner(x), torch.ones(2), x.mean() * torch.tensor(1.5)
    finally:
        torch.set_default_dtype(before)


def _counted(m: Any, x: Tensor) -> Any:
    kept, counts = torch.unique(x.round(), return_counts=True)
    return m.inner(x), kept, counts, torch.nonzero(x > 0), x[x > 0].numel()


def _many_draws(m: Any, x: Tensor) -> Any:
    order = torch.randperm(8, device=x.device)
    return m.inner(x)[:, order], torch.multinomial(torch.ones(4), 2), torch.bernoulli(torch.full((3,), 0.5)), order


def _inference_tensors(device: torch.device) -> Inputs:
    with torch.inference_mode():
        return (torch.randn(4, 8, device=device),), {}


@contextlib.contextmanager
def _on_device(device: torch.device) -> Iterator[None]:
    with torch.device(device):
        yield


def _vectorized(m: Any, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: m.inner(row).softmax(-1))(x)


def _jacobian(m: Any, x: Tensor) -> Tensor:
    return torch.func.jacrev(lambda y: m.inner(y).square().sum())(x)


# "tape" marks what the tape that stands in for CUDA graphs in tests cannot play again.
MODULES: tuple[Case, ...] = (
    Case("a ring of rows in a buffer, written through views", Ring, _x()),
    Case("copies a result into its input", _of(_into_itself), _x()),
    Case("resizes and fills what it is given", _of(_resized), _x(), marks=("tape",)),
    Case("writes to views before and after they are read", _of(_out_of_order), _x()),
    Case("scatters in place", _of(_scattered), _x(8, 8), refused="host"),
    Case("sizes of one with any stride", _of(_mixed_layouts), _odd_strides),
    Case("results with strides of zero", _of(_stride_zero), _x()),
    Case("arithmetic of many types", _of(_arithmetic), _many_dtypes, refused="host"),
    Case("numbers that are not finite, ties and negative zeros", _of(_not_finite), _special, exact=False),
    Case("arguments that are nothing, lists, objects and arrays", _of(_plain_arguments), _settings, missed="array"),
    Case("results in namespaces and dataclasses", _of(_nested), _x()),
    Case("a tensor of another class", _of(lambda m, x: m.inner(x)), _marked, refused="another kind"),
    Case("a parameter as an input", _of(lambda m, x: m.inner(x)), _parameter),
    Case("a parametrized weight", _parametrized, _x()),
    Case("weight normalization", _weight_normed, _x()),
    Case("spectral normalization in training", _spectral, _x(), train=True),
    Case("a pruned weight", _pruned, _x(), refused="hook"),
    Case("does one thing and the other in turns", Flips, _x(), observed=lambda m: m.even, refused="even"),
    Case("remembers its hidden state", Remembers, _x(), observed=lambda m: m.hidden, refused="hidden"),
    Case("calls itself", Recursive, _x()),
    Case("attributes found elsewhere", Answers, _x()),
    Case("a forward of its own", _own_forward, _x()),
    Case("another forward later", _of(lambda m, x: m.inner(x)), _x(), between=_new_forward, missed="forward"),
    Case("a partial function", _partial, _x()),
    Case("a hook before, with keywords", _prehooked, _x(), refused="hook"),
    Case("a state loaded", _of(lambda m, x: m.inner(x)), _x(), between=_load),
    Case("a state assigned", _of(lambda m, x: m.inner(x)), _x(), between=_load_assigned, missed="weight"),
    Case("parameters frozen and thawed", _of(lambda m, x: m.inner(x)), _x(), between=_freeze),
    Case("weights tied later", lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), _x(),
         between=_tie_later, missed="weight"),
    Case("a gradient taken inside", _of(_own_gradient), _x()),
    Case("modes switched inside", _of(_own_modes), _x()),
    Case("seeds inside", _of(_seeds), _x(), refused="seeds"),
    Case("dice of its own for a while", _of(_forks_dice), _x(), refused="seeds"),
    Case("dice given", _of(_draws_from), _given_dice, refused="Generator"),
    Case("an error caught inside", _of(_raises_inside), _x()),
    Case("another default type inside", _of(_default_dtype), _x()),
    Case("sizes that depend on values", _of(_counted), _x(), refused="host"),
    Case("draws of all kinds", _of(_many_draws), _x()),
    Case("tensors of inference mode", _of(lambda m, x: (m.inner(x), x[1:])), _inference_tensors),
    Case("a default device", _of(lambda m, x: m.inner(x) + torch.ones(8)), _x(), around=_on_device),
    Case("a function transform inside", _of(_vectorized), _x(), marks=("tape",)),
    Case("a jacobian inside", _of(_jacobian), _x()),
)  # fmt: skip
