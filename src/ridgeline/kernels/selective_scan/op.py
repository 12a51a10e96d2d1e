"""The selective scan of state-space models: a recurrence with a decay and an input of every step, gate and skip."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels import tuning
from ridgeline.kernels.contract import Case, Trial, case, declare
from ridgeline.kernels.launcher import Kernel, Plans, launchable
from ridgeline.kernels.rows import cdiv, float_reason, power_of_two
from ridgeline.kernels.selective_scan import config, kernel, reference

MAX_STATE = 256
_SCAN = Kernel(kernel.scan_forward)
_plans = Plans()


def selective_scan(
    x: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    softplus: bool = False,
) -> tuple[Tensor, Tensor]:
    """``h ← exp(Δ·a)·h + Δ·b·x`` and ``y = (c·h + d·x) · silu(z)`` over the steps of every channel; ``y``, last ``h``.

    ``x``, ``delta`` and ``z`` are [batch, channels, steps], ``b`` and ``c`` [batch, state, steps], ``a``
    [channels, state], ``d`` and ``delta_bias`` [channels]; any layout. The state is float32 and never rounded.
    """
    return SELECTIVE_SCAN(x, delta, a, b, c, d, z, delta_bias, softplus)


def _forward(
    x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, z: Tensor | None,
    delta_bias: Tensor | None, softplus: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    args = (x, delta, a, b, c, d, z, delta_bias, softplus)
    if not launchable(x):
        return SELECTIVE_SCAN.on_host(*args)  # type: ignore[return-value]
    y, last = _fake(*args)
    if y.numel() == 0:
        return y, last.zero_()
    tensors = _tensors(args)
    known = (softplus, *(None if t is None else (t.dtype, t.shape, t.stride()) for t in args[:-1]), x.get_device())
    run = _plans.get(known)
    if run is None:
        SELECTIVE_SCAN.check(*args)
        run = _plans[known] = _bound(tensors, args, y, last)
    run(*tensors, y, last, *_numbers(args))
    return y, last


def _tensors(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """What the kernel is given; another tensor stands where one is missing, and nobody looks at it."""
    x, delta, a, b, c, d, z, delta_bias, _ = args
    dense = [x if t is None else t.contiguous() for t in (d, delta_bias)]
    return x, delta, a.contiguous(), b, c, dense[0], x if z is None else z, dense[1]


def _numbers(args: tuple[Any, ...]) -> tuple[int, ...]:
    x, delta, a, b, c, _, z = args[:7]
    strides = (*x.stride(), *delta.stride(), *b.stride(), *c.stride(), *(x if z is None else z).stride())
    return x.shape[1], x.shape[2], a.shape[1], *strides


def _bound(tensors: tuple[Tensor, ...], args: tuple[Any, ...], y: Tensor, last: Tensor) -> Any:
    x, a, d, z, delta_bias, softplus = args[0], args[2], *args[5:]
    sizes = {"dim": x.shape[1], "length": x.shape[2], "state": a.shape[1]}
    chosen = tuning.choose("selective_scan", sizes | {"dtype": x.dtype}, config.default(**sizes))
    return _SCAN.bind(
        (*tensors, y, last, *_numbers(args)),
        grid=(cdiv(x.shape[1], chosen.channels), x.shape[0]),
        constants={
            "CHANNELS": chosen.channels, "STEPS": chosen.steps, "N": power_of_two(a.shape[1]), "SOFTPLUS": softplus,
            "DIRECT": d is not None, "GATED": z is not None, "BIASED": delta_bias is not None,
        },
        num_warps=chosen.num_warps,
        device=x.get_device(),
    )  # fmt: skip


def _fake(x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Any, z: Any, *_: Any) -> tuple[Tensor, Tensor]:
    """Results lie step by step, as the projection behind them wants to read them."""
    kind = x.dtype
    for other in (d, z):
        kind = kind if other is None else torch.promote_types(kind, other.dtype)
    batch, dim, length = x.shape
    y = torch.empty(batch, length, dim, dtype=kind, device=x.device).transpose(1, 2)
    return y, torch.empty(batch, dim, a.shape[1], dtype=torch.float32, device=x.device)


def _support(
    x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None = None, z: Tensor | None = None,
    delta_bias: Tensor | None = None, *_: Any,
) -> str | None:  # fmt: skip
    if x.dim() != 3 or delta.shape != x.shape or (z is not None and z.shape != x.shape):
        return "x, delta and z are [batch, channels, steps]"
    batch, dim, length = x.shape
    if a.dim() != 2 or a.shape[0] != dim or not 0 < a.shape[1] <= MAX_STATE:
        return f"a is [channels, state] with up to {MAX_STATE} numbers of state, not {tuple(a.shape)}"
    if b.shape != (batch, a.shape[1], length) or c.shape != b.shape:
        return "b and c are [batch, state, steps]"
    if any(t is not None and t.shape != (dim,) for t in (d, delta_bias)):
        return "d and delta_bias are [channels]"
    given = {"x": x, "delta": delta, "a": a, "b": b, "c": c, "d": d, "z": z, "delta_bias": delta_bias}
    return float_reason(**given)


def _cost(inputs: tuple[Any, ...], outputs: tuple[Any, ...], **kwargs: Any) -> dict[str, float]:
    """Seven operations on every number of state at every step."""
    x, _, a = inputs[:3]
    return {"flops": 7.0 * x.numel * a.shape[1]}


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    kind = getattr(torch, of.dtype)
    batch, dim, length, state = (of[name] for name in ("b", "d", "l", "n"))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=on, dtype=torch.float32, generator=generator)

    x = draw(batch, length, dim).to(kind).transpose(1, 2)  # as a projection leaves it
    rates = -torch.rand(dim, state, device=on, generator=generator) * 2 - 0.1
    b, c = (draw(batch, length, state).to(kind).transpose(1, 2) for _ in range(2))
    plain = (x, (0.5 * draw(batch, dim, length)).to(kind), rates, b, c)
    if not of.get("all", True):
        return (*(plain[0], plain[1].abs(), *plain[2:]), None, None, None, False)
    return (*plain, draw(dim), draw(batch, length, dim).to(kind).transpose(1, 2), draw(dim) - 2.0, True)


SELECTIVE_SCAN = declare(
    name="selective_scan",
    summary="the recurrence of selective state spaces, with gate and skip",
    schema="(Tensor x, Tensor delta, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? z, Tensor? delta_bias, "
    "bool softplus) -> (Tensor, Tensor)",
    forward=_forward,
    infer=_forward,
    num_results=2,
    fake=_fake,
    reference=reference.forward,
    support=_support,
    cost=_cost,
    trial=Trial(
        make=_make,
        call=selective_scan,
        eager=reference.forward,
        reference=reference.forward,
        mistakes={"state kept": reference.state_kept, "last step lost": reference.last_step_lost},
        checks=tuple(
            case(dtype, b=b, d=d, l=length, n=n, all=every)
            for dtype in ("float32", "bfloat16", "float16")
            for b, d, length, n, every in (
                (1, 3, 1, 1, True), (2, 5, 37, 16, True), (1, 64, 130, 16, False), (2, 33, 64, 7, True),
                (1, 16, 100, 64, True),
            )
        ),
        races=tuple(
            case("bfloat16", b=b, d=d, l=length, n=16, all=True) for b, d, length in ((2, 2048, 512), (1, 5120, 2048))
        ),
        phases=("fwd",),
        layouts=False,
        constants=tuple(range(8)),
        times_eager=2.5,  # the hardware's exponential is off by three units where the library's is by one
    ),
)  # fmt: skip
