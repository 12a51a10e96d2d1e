"""Scripts that try to catch an optimized model out: what a caller does with it and around it, over several calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from adversarial import Inputs, Lambda
from torch import Tensor, nn

Script = Callable[[Any], Iterator[Any]]


DEVICE = torch.device("cpu")


def x(number: int = 0, *shape: int) -> Tensor:
    """Values of their own, whatever was drawn before."""
    return torch.randn(*(shape or (4, 8)), generator=torch.Generator().manual_seed(number)).to(DEVICE)


@dataclass(frozen=True)
class CallerCase:
    """A model, the call it is optimized for, and a script of calls whose results must be eager's."""

    name: str
    model: Callable[[], Any]
    script: Script
    inputs: Callable[[], Inputs] = lambda: ((x(),), {})
    said: str = ""
    """A pattern of what must be said: why it was not recorded, or why a call was not replayed; empty if all are."""
    reset: Callable[[], Any] = lambda: None
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    train: bool = False
    grad: bool = False
    warm: bool = True
    snap: bool = True
    marks: tuple[str, ...] = field(default=())


def of(function: Callable[..., Any], width: int = 8) -> Callable[[], nn.Module]:
    return lambda: Lambda(function, width)


def calls(*change: Callable[[Any], Any], num: int = 2) -> Script:
    """A call, and after every change some more."""

    def script(m: Any) -> Iterator[Any]:
        for number in range(num):
            yield m(x(number))
        for at, each in enumerate(change):
            each(m)
            for number in range(num):
                yield m(x(10 * at + 20 + number))

    return script
