"""Recognizes what a module computes by trying it: normalizations, gated feed-forward layers, rotary embeddings.

Nothing is concluded from names. A module is run on random inputs of several magnitudes, and its results are compared
with the formula's, so that a different position of eps or another activation shows.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_MAGNITUDES = (1e-4, 1e-2, 1.0, 30.0)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_none": F.gelu,
}


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm, or LayerNorm if ``centered``, over the last dim; ``offset`` is added to the weight."""

    eps: float
    centered: bool
    offset: float


@dataclass(frozen=True, slots=True)
class Gated:
    """down(act(gate(x)) · up(x)): the names of the children, and the activation. Gate and up may be one child."""

    gate: str
    up: str
    down: str
    activation: str
    halves: str  # "apart", or which half of the common GEMM is the gate: "first", "second"
    drops: bool  # whether the module has dropout, so that the formula holds in evaluation only


def norm_of(module: nn.Module) -> Norm | None:
    """The normalization that a module without children computes, or None."""
    if next(module.children(), None) is not None or not _takes_one_tensor(module):
        return None
    own = dict(module.named_parameters(recurse=False))
    if not set(own) <= {"weight", "bias"} or any(p.dim() != 1 for p in own.values()) or "weight" not in own:
        return None
    if next(module.buffers(recurse=False), None) is not None:
        return None
    values = {name: value for name, value in vars(module).items() if isinstance(value, float) and 0 < value < 1e-2}
    likely = sorted(values, key=lambda name: "eps" not in name)
    for eps in dict.fromkeys(values[name] for name in likely):
        for centered, offset in ((False, 0.0), (True, 0.0), (False, 1.0)):
            found = Norm(eps, centered, offset)
            if ("bias" in own) <= centered and _agrees(module, found, own["weight"].shape[0]):
                return found
    return None


def _takes_one_tensor(module: nn.Module) -> bool:
    try:
        wanted = [
            p for p in inspect.signature(module.forward).parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]  # fmt: skip
    except (TypeError, ValueError):
        return False
    return len(wanted) == 1


@torch.no_grad()
def _agrees(module: nn.Module, norm: Norm, width: int) -> bool:
    """Whether a copy of the module with random weights computes the formula, in float32 on the host."""
    try:
        trial = copy.deepcopy(module).to("cpu", torch.float32)
        generator = torch.Generator().manual_seed(0)
        for parameter in trial.parameters(recurse=False):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5 + 0.3)
        for magnitude in _MAGNITUDES:
            x = (torch.randn(3, 5, width, generator=generator) + 0.2) * magnitude
            found = trial(x)
            if not isinstance(found, Tensor) or found.shape != x.shape or not _close(found, _expected(trial, norm, x)):
                return False
        half = trial.to(torch.bfloat16)(x.to(torch.bfloat16))
        return bool(half.dtype is torch.bfloat16)
    except Exception:  # a module that cannot be tried is not recognized
        return False


def _expected(module: Any, norm: Norm, x: Tensor) -> Tensor:
    wide = x.double()
    if norm.centered:
        wide = wide - wide.mean(-1, keepdim=True)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps) * (module.weight.double() + norm.offset)
    bias = getattr(module, "bias", None)
    return (y if bias is None else y + bias.double()).float()


def _close(found: Tensor, expected: Tensor) -> bool:
    scale = expected.abs().max().clamp_min(1e-12)
    # Relative, in float32: an eps of 1e-6 in the wrong place is off by 0.5 at the smallest magnitude.
    return bool(((found.float() - expected).abs().max() / scale) < 2e-5)


def gated_of(module: nn.Module) -> Gated | None:
    """The gated layer that a module with two or three linear children computes, or None."""
    linears = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)
               and isinstance(getattr(child, "weight", None), Tensor) and child.weight.dim() == 2}  # fmt: skip
    others = [child for name, child in module.named_children() if name not in linears]
    bare = all(next(child.parameters(), None) is None for child in others)
    own = next(module.parameters(recurse=False), None)
    if len(linears) not in (2, 3) or own is not None or not bare:
        return None
    if not _takes_one_tensor(module):
        return None
    for gate, up, down, halves in _roles(linears):
        seen = _observed(module, linears, gate, up, down)
        if seen is None:
            continue
        for name, activation in ACTIVATIONS.items():
            if _explains(seen, activation, halves):
                return Gated(gate, up, down, name, halves, _drops(module))
    return None


def _drops(module: nn.Module) -> bool:
    """Whether a module may have dropout: as a child, or as a rate among its attributes."""
    named = any("drop" in name.lower() for name in (*vars(module), *dict(module.named_children())))
    return named or any("Dropout" in type(child).__name__ for child in module.children())


def _roles(linears: dict[str, nn.Module]) -> list[tuple[str, str, str, str]]:
    """Possible assignments of gate, up and down to the children, by their sizes."""
    found = []
    sizes = {name: (child.in_features, child.out_features) for name, child in linears.items()}  # type: ignore[attr-defined]
    if len(linears) == 2:
        for first, down in (tuple(linears), tuple(linears)[::-1]):
            if sizes[first][1] == 2 * sizes[down][0]:
                found += [(first, first, down, half) for half in ("first", "second")]
        return found
    for down in linears:
        gate, up = (name for name in linears if name != down)
        if sizes[gate] == sizes[up] and sizes[gate][1] == sizes[down][0]:
            found += [(gate, up, down, "apart"), (up, gate, down, "apart")]
    return found


@torch.no_grad()
def _observed(module: nn.Module, linears: Any, gate: str, up: str, down: str) -> tuple[Tensor, Tensor, Tensor] | None:
    """(gate's output, up's output, down's input) on a random input; None if the module works differently."""
    given: list[Tensor] = []
    weight = linears[gate].weight
    if weight.is_meta:
        return None
    handle = linears[down].register_forward_pre_hook(lambda _, args: given.append(args[0]))
    try:
        generator = torch.Generator(device=weight.device).manual_seed(0)
        x = torch.randn(5, linears[gate].in_features, generator=generator, device=weight.device, dtype=torch.float32)
        x = x.to(weight.dtype)
        modes = [(each, each.training) for each in module.modules()]
        module.eval()
        try:
            returned = module(x)
        finally:
            for each, training in modes:
                each.training = training
        if len(given) != 1 or not isinstance(returned, Tensor) or not torch.equal(returned, linears[down](given[0])):
            return None
        return linears[gate](x), linears[up](x), given[0]
    except Exception:  # a module that cannot be tried is not recognized
        return None
    finally:
        handle.remove()


def _explains(seen: tuple[Tensor, Tensor, Tensor], activation: Any, halves: str) -> bool:
    """Whether down's input is act(gate) · up, to within the rounding of its dtype."""
    gate, up, given = seen
    if halves != "apart":
        first, second = gate.chunk(2, -1)
        gate, up = (first, second) if halves == "first" else (second, first)
    meant = activation(gate) * up
    if meant.shape != given.shape or meant.dtype != given.dtype:
        return False
    step = torch.finfo(given.dtype).eps
    scale = meant.float().abs() + meant.float().abs().mean()
    return bool(((meant.float() - given.float()).abs() <= 4 * step * scale).all())


@torch.no_grad()
def rotary_of(function: Callable[..., Any]) -> bool | None:
    """The rotation of a function(q, k, cos, sin): False for halves, True for interleaved, None for anything else."""
    from ridgeline.kernels.rope import reference

    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    if names[:4] != ["q", "k", "cos", "sin"]:
        return None
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 7, 16, generator=generator) for heads in (4, 2))
    half = torch.randn(2, 7, 8, generator=generator)
    for interleaved in (False, True):
        table = half.repeat_interleave(2, -1) if interleaved else torch.cat((half, half), -1)
        cos, sin = table.cos(), table.sin()
        try:
            found = function(q, k, cos, sin)
        except Exception:  # a function that cannot be tried is not recognized
            return None
        meant = reference.forward(q, k, half.cos(), half.sin(), interleaved, 2)
        if len(found) == 2 and all(
            torch.allclose(a, b, atol=1e-5, rtol=1e-5) for a, b in zip(found, meant, strict=True)
        ):
            return interleaved
    return None


def scan_of(function: Callable[..., Any]) -> bool:
    """Whether a function of x, delta, A, B and C is the selective scan, with and without its optional arguments."""
    from ridgeline.kernels.selective_scan import reference

    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x, delta, rates = drawn(2, 3, 5), drawn(2, 3, 5), -drawn(3, 4).abs()
    b, c = drawn(2, 4, 5), drawn(2, 4, 5)
    whole = (drawn(3), drawn(2, 3, 5), drawn(3), True)
    for d, z, bias, softplus in (whole, (None, None, None, False)):
        step = delta if softplus else delta.abs()
        try:
            with torch.no_grad():
                found = function(x, step, rates, b, c, D=d, z=z, delta_bias=bias, delta_softplus=softplus,
                                 return_last_state=True)  # fmt: skip
                y, state = found
        except Exception:  # a function that cannot be tried is not recognized
            return False
        meant = reference.forward(x, step, rates, b, c, d, z, bias, softplus)
        if any(a.shape != m.shape or not torch.allclose(a, m, atol=1e-5, rtol=1e-5) for a, m in zip((y, state), meant)):
            return False
    return True
