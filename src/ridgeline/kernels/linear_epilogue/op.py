"""``dense``: a linear layer or pointwise convolution of many rows, with norm, bias, sum and activation in its end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels import tuning
from ridgeline.kernels.contract import Case, Trial, case, declare
from ridgeline.kernels.launcher import Kernel, Plans, launchable, vector_of
from ridgeline.kernels.linear_epilogue import config, kernel, reference
from ridgeline.kernels.rows import cdiv

ACTIVATIONS = {"none": 0, "relu": 1, "silu": 2, "gelu": 3, "gelu_tanh": 4, "relu6": 5, "hardswish": 6}
_LOOSE = ("bias_ptr", "mean_ptr", "var_ptr", "gamma_ptr", "beta_ptr")
_FORWARD = Kernel(kernel.dense_forward, vectors=("n", "k", "x_step", "w_step", "added_step"), loose=_LOOSE)
_FINISH = Kernel(kernel.dense_finish, vectors=("n",), loose=_LOOSE)
_plans, _finish_plans = Plans(), Plans()
NARROW = (torch.bfloat16, torch.float16)
VECTOR = 8
"""16-bit numbers of a 16-byte access."""


def dense(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, added: Tensor | None = None, mean: Tensor | None = None,
    var: Tensor | None = None, gamma: Tensor | None = None, beta: Tensor | None = None, eps: float = 1e-5,
    activation: str = "none", last: bool = False,
) -> Tensor:  # fmt: skip
    """``act(norm(x @ weight.T + bias) + added)`` of 16-bit numbers, without gradients; x is [rows, inputs].

    The norm is batch norm in evaluation, by ``mean``, ``var``, ``gamma``, ``beta`` and ``eps``. ``last`` adds ``added``
    behind the activation instead of before it.
    """
    return DENSE(x, weight, bias, added, mean, var, gamma, beta, eps, activation, last)


def _forward(
    x: Tensor, w: Tensor, bias: Tensor | None, added: Tensor | None, mean: Tensor | None, var: Tensor | None,
    gamma: Tensor | None, beta: Tensor | None, eps: float, activation: str, last: bool,
) -> Tensor:  # fmt: skip
    args = (x, w, bias, added, mean, var, gamma, beta, eps, activation, last)
    return tiled(*args) if launchable(x) else DENSE.on_host(*args)


def tiled(
    x: Tensor, w: Tensor, bias: Tensor | None, added: Tensor | None, mean: Tensor | None, var: Tensor | None,
    gamma: Tensor | None, beta: Tensor | None, eps: float, activation: str, last: bool,
    tile: config.Tile | None = None,
) -> Tensor:  # fmt: skip
    """The product by one kernel, with this tile or the usual one."""
    out = x.new_empty((x.shape[0], w.shape[0]))
    run, numbers = planned(x, w, bias, added, mean, var, gamma, beta, eps, activation, last, tile)
    run(x, w, out, *(out if each is None else each for each in (added, bias, mean, var, gamma, beta)), *numbers)
    return out


def planned(
    x: Tensor, w: Tensor, bias: Tensor | None, added: Tensor | None, mean: Tensor | None, var: Tensor | None,
    gamma: Tensor | None, beta: Tensor | None, eps: float, activation: str, last: bool,
    tile: config.Tile | None = None,
) -> tuple[Any, tuple[Any, ...]]:  # fmt: skip
    """The launch of a product, compiled, and the numbers it is launched with."""
    m, k = x.shape
    n = w.shape[0]
    columns = (bias, mean, var, gamma, beta)
    steps = (x.stride(0), w.stride(0), n if added is None else added.stride(0))
    kinds = tuple(None if each is None else each.dtype for each in columns)
    pointers = x.data_ptr() | w.data_ptr() | (0 if added is None else added.data_ptr())
    key = (m, n, k, x.dtype, steps, kinds, added is None, activation, last, tile, x.get_device(), pointers & 15)
    run = _plans.get(key)
    if run is None:
        DENSE.check(x, w, bias, added, mean, var, gamma, beta, eps, activation, last)
        chosen = tile or tuning.choose("dense", {"m": m, "n": n, "k": k}, config.default(m, n, k))
        out = x.new_empty((1, n))
        run = _plans[key] = _bound(x, w, out, added, columns, (m, n, k, *steps, eps), activation, last, chosen)
    return run, (m, n, k, *steps, eps)


def _bound(
    x: Tensor, w: Tensor, out: Tensor, added: Tensor | None, columns: tuple[Tensor | None, ...],
    numbers: tuple[Any, ...], activation: str, last: bool, chosen: config.Tile,
) -> Any:  # fmt: skip
    m, n, k = numbers[:3]
    return _FORWARD.bind(
        (x, w, out, *(out if each is None else each for each in (added, *columns)), *numbers),
        grid=(cdiv(m, chosen.rows) * cdiv(n, chosen.cols),),
        constants={
            "BM": chosen.rows, "BN": chosen.cols, "BK": chosen.depth, "GROUP": chosen.group,
            "EVEN": k % chosen.depth == 0, **_ends(added, columns, activation, last),
        },
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        device=x.get_device(),
        vector=VECTOR,
    )  # fmt: skip


def _ends(
    added: Tensor | None, columns: tuple[Tensor | None, ...], activation: str, last: bool
) -> dict[str, int | bool]:
    bias, mean, _, gamma, beta = columns
    return {"BIAS": bias is not None, "NORM": mean is not None, "GAMMA": gamma is not None, "BETA": beta is not None,
            "ADDED": added is not None, "LAST": last, "ACT": ACTIVATIONS[activation]}  # fmt: skip


def finished(
    y: Tensor, bias: Tensor | None, added: Tensor | None, mean: Tensor | None, var: Tensor | None,
    gamma: Tensor | None, beta: Tensor | None, eps: float, activation: str, last: bool,
) -> Tensor:  # fmt: skip
    """What follows a product, in place of it and in one pass; ``y`` and ``added`` are dense [rows, outputs]."""
    if not launchable(y):
        wide = [None if t is None else t.float() for t in (y, bias, added, mean, var, gamma, beta)]
        return y.copy_(reference.finish(*wide, eps, activation, last))  # type: ignore[call-arg, arg-type]
    m, n = y.shape
    columns = (bias, mean, var, gamma, beta)
    kinds = tuple(None if each is None else each.dtype for each in columns)
    pointers = y.data_ptr() | (0 if added is None else added.data_ptr())
    key = (m, n, y.dtype, kinds, added is None, activation, last, pointers & 15, y.get_device())
    run = _finish_plans.get(key)
    given = [y if each is None else each for each in (added, *columns)]
    if run is None:
        chosen = tuning.choose("dense.finish", {"m": m, "n": n}, config.FINISH)
        run = _finish_plans[key] = _FINISH.bind(
            (y, y, *given, m, n, eps),
            grid=(cdiv(m, chosen.rows), cdiv(n, chosen.cols)),
            constants={"ROWS": chosen.rows, "COLS": chosen.cols, **_ends(added, columns, activation, last)},
            num_warps=chosen.num_warps,
            device=y.get_device(),
            vector=vector_of(y.element_size(), pointers, n),
        )
    run(y, y, *given, m, n, eps)
    return y


def _support(
    x: Tensor, w: Tensor, bias: Tensor | None = None, added: Tensor | None = None, mean: Tensor | None = None,
    var: Tensor | None = None, gamma: Tensor | None = None, beta: Tensor | None = None, eps: float = 1e-5,
    activation: str = "none", last: bool = False,
) -> str | None:  # fmt: skip
    if x.dtype not in NARROW or any(t is not None and t.dtype != x.dtype for t in (w, added)):
        return "x, weight and added are not all of one 16-bit type"
    if activation not in ACTIVATIONS:
        return f"no activation {activation!r}: one of {', '.join(ACTIVATIONS)}"
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1] or min(x.shape[0], *w.shape) == 0:
        return f"{tuple(x.shape)} by {tuple(w.shape)}: x is [rows, inputs], weight [outputs, inputs]"
    if added is not None and added.shape != (x.shape[0], w.shape[0]):
        return f"added is {tuple(added.shape)}, not a number for every result"
    return _layout_reason(x, w, added) or _columns_reason(w.shape[0], bias, mean, var, gamma, beta)


def _layout_reason(x: Tensor, w: Tensor, added: Tensor | None) -> str | None:
    if x.shape[1] % VECTOR or w.shape[0] % VECTOR:
        return f"sizes are not multiples of {VECTOR}: rows would not begin at 16 bytes"
    for tensor in (x, w, added):
        if tensor is None:
            continue
        if tensor.stride(1) != 1 or tensor.stride(0) % VECTOR or (not tensor.is_meta and tensor.data_ptr() % 16):
            return "rows of x, weight or added do not lie dense from multiples of 16 bytes"
    return None


def _columns_reason(n: int, *columns: Tensor | None) -> str | None:
    if (columns[1] is None) != (columns[2] is None):
        return "mean and var come together"
    for each in columns:
        if each is not None and (each.shape != (n,) or each.stride(0) != 1 or not each.is_floating_point()):
            return "bias and norm are one dense number a column"
    return None


def _cost(inputs: tuple[Any, ...], outputs: tuple[Any, ...], **kwargs: Any) -> dict[str, Any]:
    """Every tensor moved once."""
    flops = 2.0 * inputs[0].numel * inputs[1].shape[0]
    return {"flops": flops, "matrix_flops": flops}


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    m, n, k, parts = of["m"], of["n"], of["k"], of.get("parts", "")
    dtype = getattr(torch, of.dtype)

    def draw(*shape: int, scale: float = 1.0, positive: bool = False) -> Tensor:
        drawn = torch.randn(*shape, device=on, dtype=torch.float32, generator=generator) * scale
        return (drawn.abs() + 0.5 if positive else drawn).to(dtype)

    def some(letter: str, *shape: int, positive: bool = False) -> Tensor | None:
        return draw(*shape, positive=positive) if letter in parts else None

    x, w = draw(m, k), draw(n, k, scale=k**-0.5)
    norm = (some("n", n), some("n", n, positive=True), some("g", n), some("e", n))
    return x, w, some("b", n), some("a", m, n), *norm, 1e-5, of.get("activation", "none"), "l" in parts


def _call(
    x: Tensor, w: Tensor, bias: Any, added: Any, mean: Any, var: Any, gamma: Any, beta: Any, eps: float,
    activation: str, last: bool,
) -> Tensor:  # fmt: skip
    return dense(x, w, bias, added=added, mean=mean, var=var, gamma=gamma, beta=beta, eps=eps, activation=activation,
                 last=last)  # fmt: skip


PACKS = tuple(
    case("bfloat16", m=4096, n=128, k=k, parts=parts, activation=activation)
    for parts, activation in (("nge", "relu"), ("ngea", "relu"), ("nge", "none"), ("ngea", "none"), ("nge", "silu"),
                              ("b", "gelu"))
    for k in (64, 512)
)  # fmt: skip
CHECKS = (
    case("bfloat16", m=1000, n=256, k=64, parts="nagep", activation="relu"),
    case("bfloat16", m=1568, n=64, k=256, parts="nge", activation="relu"),
    case("float16", m=333, n=96, k=24, parts="ngea", activation="none"),
    case("bfloat16", m=777, n=1152, k=192, parts="nge", activation="silu"),
    case("bfloat16", m=129, n=512, k=2048, parts="bngea", activation="gelu"),
    case("float16", m=257, n=40, k=240, parts="bal", activation="gelu_tanh"),
    case("bfloat16", m=65, n=72, k=200, parts="n", activation="hardswish"),
    case("bfloat16", m=4, n=16, k=8, parts="", activation="relu6"),
    case("bfloat16", m=12608, n=4096, k=1024, parts="b", activation="gelu"),
)
RACES = (
    case("bfloat16", m=401408, n=256, k=64, parts="ngea", activation="relu"),
    case("bfloat16", m=401408, n=64, k=256, parts="nge", activation="relu"),
    case("bfloat16", m=100352, n=512, k=128, parts="ngea", activation="relu"),
    case("bfloat16", m=25088, n=1024, k=256, parts="ngea", activation="relu"),
    case("bfloat16", m=6272, n=2048, k=512, parts="ngea", activation="relu"),
    case("bfloat16", m=200704, n=96, k=16, parts="nge", activation="silu"),
    case("bfloat16", m=12608, n=4096, k=1024, parts="b", activation="gelu"),
)

DENSE = declare(
    name="dense",
    summary="act(norm(x @ wᵀ + bias) + added) of 16-bit numbers for many rows",
    schema="(Tensor x, Tensor w, Tensor? bias, Tensor? added, Tensor? mean, Tensor? var, Tensor? gamma, Tensor? beta, "
           "float eps, str activation, bool last) -> Tensor",
    forward=_forward,
    infer=_forward,
    fake=lambda x, w, *_: x.new_empty((x.shape[0], w.shape[0])),
    reference=reference.forward,
    support=_support,
    cost=_cost,
    trial=Trial(
        make=_make,
        call=_call,
        eager=reference.forward,
        reference=reference.forward,
        mistakes={"norm forgotten": reference.unscaled, "sum lost": reference.sum_lost},
        checks=CHECKS,
        races=RACES,
        packs=PACKS,
        phases=("fwd",),
        constants=tuple(range(8)),
        layouts=False,
    ),
)  # fmt: skip
