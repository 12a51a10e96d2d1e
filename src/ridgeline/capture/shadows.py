"""Real values beside fake tensors: integers, masks and small constants stay known, so control flow on them is real.

A shadow is an ordinary CPU tensor kept on the fake one. It is made by running the same op on the shadows of the
inputs, and lost when data nobody knows flows in. Where a model asks for a value that hangs on unknown floats, a stated
assumption answers: routing is balanced, nothing is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes as outside_modes

from ridgeline.capture.translate import base_name, is_mutable

MAX_FLOAT_CONSTANT_ELEMENTS = 4096

_SHADOW = "_rl_shadow"
_UNDEFINED_RANDOM = frozenset(
    "rand randn rand_like randn_like normal uniform bernoulli exponential multinomial".split()
)


def shadow_of(t: torch.Tensor) -> torch.Tensor | None:
    """The real value of a fake tensor, or None where it is unknown."""
    return t.__dict__.get(_SHADOW)


def give_shadow(t: torch.Tensor, value: torch.Tensor | None) -> None:
    if value is None:
        t.__dict__.pop(_SHADOW, None)
    else:
        t.__dict__[_SHADOW] = value


def affordable(t: torch.Tensor, *, constant: bool = False) -> bool:
    """Whether a tensor like this is worth knowing: integers up to 4 M elements, floats only while small."""
    if t.dtype.is_floating_point or t.dtype.is_complex:
        return t.numel() <= (MAX_FLOAT_CONSTANT_ELEMENTS if constant else 1_000_000)  # max float elements
    return t.numel() <= 4_000_000  # max int elements


def with_shadows(tree: Any) -> Any:
    """The same arguments with every fake tensor replaced by its shadow."""
    if isinstance(tree, torch.Tensor):
        return shadow_of(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)([with_shadows(item) for item in tree])
    if isinstance(tree, dict):
        return {key: with_shadows(item) for key, item in tree.items()}
    return tree


def run_real(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run an op on the shadows of its arguments, outside every mode."""
    with outside_modes(), torch.no_grad():
        return func(*with_shadows(args), **with_shadows(kwargs))


def follow(func: Any, args: Any, kwargs: Any, ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> bool:
    """Give the outputs of an op just run on fakes their shadows; True where they had to be assumed."""
    if not ins:
        _follow_factory(func, args, kwargs, outs)
        return False
    known = [t for t in ins if _SHADOW in t.__dict__]
    if len(known) == len(ins) and func.namespace == "aten" and all(affordable(o) for o in outs):
        try:
            real = run_real(func, args, kwargs)
        except (RuntimeError, NotImplementedError):  # the host has no such kernel: what it would say stays unknown
            if is_mutable(func):
                _forget_written(func, args)
            return assume_indices(func, args, kwargs, outs)
        if outs:
            _assign(outs, real)
        return False
    if known and is_mutable(func):
        _forget_written(func, args)
    return assume_indices(func, args, kwargs, outs)


def _follow_factory(func: Any, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> None:
    if not all(affordable(o, constant=True) for o in outs):
        return
    if any(o.dtype.is_floating_point for o in outs) and base_name(func) in _UNDEFINED_RANDOM:
        # A uniform draw is taken as its mean: a branch on it goes the likelier way
        if base_name(func) == "rand":
            with outside_modes():
                for out in outs:
                    give_shadow(out, torch.full(tuple(out.shape), 0.5, dtype=out.dtype))
        return
    real = run_real(func, args, kwargs)
    if base_name(func).startswith("empty"):
        with outside_modes():
            real.zero_()
    _assign(outs, real)


def _assign(outs: Sequence[torch.Tensor], real: Any) -> None:
    flat = [real] if isinstance(real, torch.Tensor) else [r for r in _leaves(real) if isinstance(r, torch.Tensor)]
    if len(flat) == len(outs):
        for out, value in zip(outs, flat, strict=True):
            give_shadow(out, value)


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, (list, tuple)):
        return [leaf for item in tree for leaf in _leaves(item)]
    return [tree]


def _forget_written(func: Any, args: Any) -> None:
    """Unknown data was written into a known tensor: forget it, and every view of it through the shared shadow."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for t in _leaves(value):
                if isinstance(t, torch.Tensor):
                    give_shadow(t, None)


# --- assumptions about data only a run would know -------------------------------------------------------------------

ROUTING = "routing is balanced: indices picked from unknown scores are spread round-robin"


def assume_indices(func: Any, args: Any, kwargs: Any, outs: Sequence[torch.Tensor]) -> bool:
    """Balanced indices for what topk, sort, argmax and multinomial pick from unknown floats."""
    maker = _PICKERS.get(base_name(func))
    if maker is None:
        return False
    picked = [o for o in outs if o.dtype == torch.int64 and affordable(o)]
    if not picked or not args or not isinstance(args[0], torch.Tensor):
        return False
    with outside_modes():
        for out in picked:
            give_shadow(out, maker(args, kwargs, out))
    return True


def _dim_of(args: Any, kwargs: Any, at: int, default: int | None = -1) -> int | None:
    value = args[at] if len(args) > at else kwargs.get("dim", default)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _pick_topk(args: Any, kwargs: Any, out: torch.Tensor) -> torch.Tensor:
    dim = (_dim_of(args, kwargs, 2) or 0) % max(out.dim(), 1) if out.dim() else 0
    dim = dim if len(args) > 2 or "dim" in kwargs else max(out.dim() - 1, 0)
    # 0, 1, 2, … modulo `num`, running fastest along `dim`
    shape = tuple(out.shape)
    num = int(args[0].shape[dim]) if args[0].dim() else 1
    moved = [s for i, s in enumerate(shape) if i != dim] + [shape[dim]] if shape else []
    flat = torch.arange(math.prod(shape)) % max(num, 1)
    return flat.reshape(moved).movedim(-1, dim).contiguous() if shape else flat.reshape(())


def _pick_arg(args: Any, kwargs: Any, out: torch.Tensor) -> torch.Tensor:
    dim = _dim_of(args, kwargs, 1, None)
    num = args[0].numel() if dim is None or not args[0].dim() else int(args[0].shape[dim])
    return (torch.arange(out.numel()) % max(num, 1)).reshape(tuple(out.shape))


def _pick_sort(args: Any, kwargs: Any, out: torch.Tensor) -> torch.Tensor:
    if not out.dim():
        return torch.zeros((), dtype=torch.int64)
    dims = [a for a in args[1:] if isinstance(a, int) and not isinstance(a, bool)]
    dim = int(kwargs.get("dim", dims[0] if dims else -1)) % out.dim()
    shape = [1] * out.dim()
    shape[dim] = int(out.shape[dim])
    return torch.arange(out.shape[dim]).reshape(shape).expand(tuple(out.shape)).contiguous()


def _pick_multinomial(args: Any, kwargs: Any, out: torch.Tensor) -> torch.Tensor:
    return (torch.arange(out.numel()) * 7919 % max(int(args[0].shape[-1]), 1)).reshape(tuple(out.shape))


_PICKERS: dict[str, Callable[[Any, Any, torch.Tensor], torch.Tensor]] = {
    "topk": _pick_topk, "argmax": _pick_arg, "argmin": _pick_arg, "max": _pick_arg, "min": _pick_arg,
    "sort": _pick_sort, "argsort": _pick_sort, "multinomial": _pick_multinomial,
    "kthvalue": _pick_arg, "mode": _pick_arg, "median": _pick_arg,
}  # fmt: skip
