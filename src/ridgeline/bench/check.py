"""Every primitive against its reference on a device: fresh inputs, odd layouts, poisoned outputs, gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.bench.verdict import Verdict, judge
from ridgeline.kernels.contract import Case, Trial, trials

LAYOUTS = ("contiguous", "sliced", "misaligned", "transposed")


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found about one output or gradient of one case."""

    primitive: str
    case: str
    layout: str
    what: str
    ok: bool
    note: str


def check_case(
    name: str, of: Case, device: torch.device, seed: int, layout: str = "contiguous", *, repeat: bool = True
) -> list[Finding]:
    """Outputs and gradients of one case, judged; and the same bits when run again."""
    trial = trials()[name][1]
    generator = torch.Generator(device).manual_seed(seed)
    args = tuple(laid_out(value, layout) for value in trial.make(of, device, generator))
    wide = tuple(value.double() if _is_float(value) else value for value in args)
    poison(device)
    ours = results(trial.call, args, seed, trial.constants)
    again = repeated(trial, args, seed) if repeat else ours
    eager = results(trial.eager, args, seed, trial.constants)
    reference = results(trial.reference, wide, seed, trial.constants)
    found = []
    for (what, mine), (_, second), (_, theirs), (_, meant) in zip(ours, again, eager, reference, strict=True):
        verdict: Verdict = judge(mine, theirs, meant, trial.times_eager)
        found.append(Finding(name, str(of), layout, what, bool(verdict), str(verdict)))
        if repeat and trial.deterministic:
            same = torch.equal(mine.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))
            found.append(Finding(name, str(of), layout, f"{what} twice", same, "bit for bit" if same else "differs"))
    return found


def repeated(trial: Trial, args: tuple[Any, ...], seed: int) -> list[tuple[str, Tensor]]:
    """The same once more, after as many calls as it takes until they are repeated without Python."""
    # Calls after the first until both passes of a call are repeated from their plans, where the first call is noted.
    for _ in range(2):
        results(trial.call, args, seed, trial.constants)
    poison(args_device(args))
    return results(trial.call, args, seed, trial.constants)


def args_device(args: tuple[Any, ...]) -> torch.device:
    return next(value.device for value in args if isinstance(value, Tensor))


def check_mistakes(name: str, of: Case, device: torch.device, seed: int) -> list[Finding]:
    """The tolerance rejects every declared wrong kernel, rounded to the case's type."""
    trial = trials()[name][1]
    args = trial.make(of, device, torch.Generator(device).manual_seed(seed))
    wide = tuple(value.double() if _is_float(value) else value for value in args)
    eager, meant = _tuple(trial.eager(*args)), _tuple(trial.reference(*wide))
    found = []
    for label, mistake in trial.mistakes.items():
        outputs = [o.to(e.dtype) for o, e in zip(_tuple(mistake(*wide)), eager, strict=True)]
        verdicts = [judge(o, e, m, trial.times_eager) for o, e, m in zip(outputs, eager, meant, strict=True)]
        found.append(Finding(name, str(of), "contiguous", label, not all(verdicts), "; ".join(map(str, verdicts))))
    return found


def results(call: Any, args: tuple[Any, ...], seed: int, constants: tuple[int, ...] = ()) -> list[tuple[str, Tensor]]:
    """Named outputs of a call and the gradients of its floating-point inputs, for the same random output gradients."""
    leaves = [
        value.detach().requires_grad_() if _is_float(value) and i not in constants else value
        for i, value in enumerate(args)
    ]
    outputs = _tuple(call(*leaves))
    found = [(f"output {i}", value.detach()) for i, value in enumerate(outputs)]
    wanted = [value for value in leaves if isinstance(value, Tensor) and value.requires_grad]
    smooth = [value for value in outputs if value.requires_grad]
    if not smooth or not wanted:
        return found
    generator = torch.Generator(smooth[0].device).manual_seed(seed + 1)
    seeds = [_like(value, generator) for value in smooth]
    grads = torch.autograd.grad(smooth, wanted, seeds, allow_unused=True)
    return found + [(f"gradient {i}", g) for i, g in enumerate(grads) if g is not None]


def _like(value: Tensor, generator: torch.Generator) -> Tensor:
    """The same gradient for every precision: drawn in float32, rounded through bfloat16."""
    drawn = torch.randn(value.shape, device=value.device, dtype=torch.float32, generator=generator)
    return drawn.bfloat16().to(value.dtype)


def laid_out(value: Any, layout: str) -> Any:
    """The same numbers in another layout; only matrices and larger floating-point tensors are moved."""
    if not _is_float(value) or value.dim() < 2 or layout == "contiguous":
        return value
    if layout == "sliced":  # rows of a wider tensor, as a fused projection leaves them
        wide = torch.full((*value.shape[:-1], 2 * value.shape[-1] + 8), float("nan"), device=value.device).to(
            value.dtype
        )
        wide[..., : value.shape[-1]] = value
        return wide[..., : value.shape[-1]]
    if layout == "misaligned":  # one element off every vector boundary
        flat = torch.full((value.numel() + 1,), float("nan"), device=value.device).to(value.dtype)
        flat[1:] = value.reshape(-1)
        return flat[1:].view(value.shape)
    return value.transpose(-1, -2).contiguous().transpose(-1, -2)


def poison(device: torch.device, num_bytes: int = 256 << 20) -> None:
    """Leave NaN in the memory that the next allocations will get: what a kernel forgets to write shows."""
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    blocks = [torch.full((size // 4,), float("nan"), device=device) for size in (num_bytes, 2 << 20, 1 << 20, 1 << 18)]
    blocks += [torch.full((128,), float("nan"), device=device) for _ in range(64)]
    del blocks


def check_all(name: str, device: torch.device, seed: int = 0) -> Iterator[Finding]:
    """Every declared case, each layout on the smaller ones, and every mistake."""
    trial = trials()[name][1]
    for i, of in enumerate(trial.checks):
        yield from check_case(name, of, device, seed + i)
    odd = [of for of in trial.checks if of.dtype == "bfloat16"][1:5]
    for i, of in enumerate(odd if trial.layouts else []):
        for layout in LAYOUTS[1:]:
            yield from check_case(name, of, device, seed + 100 + i, layout)
    yield from check_mistakes(name, mistake_case(trial), device, seed)


def mistake_case(trial: Trial) -> Case:
    """A case of middling size, in float32 where there is one: there a tolerance has no rounding to hide behind."""
    exact = [of for of in trial.checks if of.dtype == "float32"] or list(trial.checks)
    return exact[len(exact) // 2]


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
