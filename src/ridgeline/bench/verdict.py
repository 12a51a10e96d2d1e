"""Is a result right? Errors against a reference in higher precision, judged by what PyTorch itself reaches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TIMES_EAGER = 2.0
"""Our error may be this many times PyTorch's own, against the same reference."""

RMS_FLOOR, FEW_FLOOR, MAX_FLOOR = 0.25, 3.0, 2.0
"""In units of the output type's rounding step: what is forgiven where PyTorch happens to be exact.

A number at the end of a few roundings may be two or three steps off, and PyTorch's happen to be on it: three numbers of
a LayerNorm's gradient, two of a GroupNorm's. Over n numbers such luck fades as 1/√n.
"""


@dataclass(frozen=True, slots=True)
class Error:
    """Distance from a reference: root mean square relative to the reference's, and the largest element."""

    rms_frac: float
    largest: float
    num_misplaced: int  # elements that are NaN or infinite on one side only, or infinite with another sign


@dataclass(frozen=True, slots=True)
class Verdict:
    """An error, what was allowed, and which it is."""

    ok: bool
    error: Error
    eager: Error
    allowed_rms_frac: float
    allowed_largest: float

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        word = "ok" if self.ok else "WRONG"
        return (
            f"{word}: rms {self.error.rms_frac:.2e} of {self.allowed_rms_frac:.2e} allowed, "
            f"largest {self.error.largest:.2e} of {self.allowed_largest:.2e}, {self.error.num_misplaced} misplaced"
        )


def error_of(found: Tensor, reference: Tensor) -> Error:
    """How far a result is from a reference of the same shape."""
    if found.shape != reference.shape:
        return Error(float("inf"), float("inf"), reference.numel())
    found, reference = found.detach().to(reference.dtype), reference.detach()
    finite = found.isfinite() & reference.isfinite()
    same = finite | (found == reference) | (found.isnan() & reference.isnan())
    misplaced = int((~same).sum())
    if not bool(finite.any()):
        return Error(0.0, 0.0, misplaced)
    difference = torch.where(finite, found - reference, 0)
    scale = torch.where(finite, reference, 0).square().mean().sqrt()
    rms = difference.square().mean().sqrt()
    relative = float(rms / scale) if float(scale) > 0 else float(rms)
    return Error(relative, float(difference.abs().max()), misplaced)


def judge(found: Tensor, eager: Tensor, reference: Tensor, times: float | None = None) -> Verdict:
    """``found`` passes where its error is at most twice that of ``eager``, PyTorch's result in the same precision.

    ``times`` replaces the two where it would let too much pass.
    """
    times = TIMES_EAGER if times is None else times
    ours, theirs = error_of(found, reference), error_of(eager, reference)
    step = torch.finfo(eager.dtype).eps if eager.is_floating_point() else 0.0
    finite = reference[reference.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    rms = times * theirs.rms_frac + (RMS_FLOOR + FEW_FLOOR / max(1, reference.numel()) ** 0.5) * step
    largest = times * theirs.largest + MAX_FLOOR * step * scale
    ok = ours.num_misplaced <= theirs.num_misplaced and ours.rms_frac <= rms and ours.largest <= largest
    return Verdict(ok, ours, theirs, rms, largest)
