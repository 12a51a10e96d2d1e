"""Selective scans found in a model by what they compute, and put back."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("triton")

from ridgeline.kernels.selective_scan import op as scan_op
from ridgeline.kernels.selective_scan import reference
from ridgeline.optimizer.in_place import attention_registry as hooks
from ridgeline.optimizer.in_place.recognition import scan_of
from ridgeline.optimizer.in_place.substitution import apply, revert

calls: list[str] = []


def looped(
    x: Any, delta: Any, A: Any, B: Any, C: Any, D: Any = None, z: Any = None, delta_bias: Any = None,
    delta_softplus: bool = False, return_last_state: bool = False,
) -> Any:  # fmt: skip
    calls.append("loop")
    found = reference.forward(x, delta, A, B, C, D, z, delta_bias, delta_softplus)
    return found if return_last_state else found[0]


def halved(x: Any, delta: Any, A: Any, B: Any, C: Any, **given: Any) -> Any:
    given.pop("delta_softplus")
    y, state = looped(x, delta, A, B, C, **given)
    return y / 2, state


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def around(self: Any, *args: Any) -> Any:
        return function(self, *args)

    return around


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rates, self.skip = nn.Parameter(torch.rand(6, 4)), nn.Parameter(torch.rand(6))
        self.map = nn.Linear(6, 8)

    @decorated
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, c = self.map(x).transpose(1, 2).chunk(2, 1)
        turned = x.transpose(1, 2)
        return looped(turned, F.softplus(turned), -self.rates, b, c, D=self.skip, z=turned).transpose(1, 2)


def test_a_scan_is_known_by_what_it_computes() -> None:
    assert scan_of(looped)
    assert not scan_of(halved)
    assert not scan_of(lambda *args, **kwargs: None)


def test_a_loop_behind_a_decorator_is_replaced_for_one_model_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "RUNS_ON", frozenset({"cuda", "cpu"}))
    ran: list[int] = []
    host = scan_op.SELECTIVE_SCAN.infer
    monkeypatch.setattr(scan_op.SELECTIVE_SCAN, "infer", lambda *args: ran.append(1) or host(*args))
    model, other, x = nn.Sequential(Mixer()), Mixer(), torch.randn(2, 5, 6)
    with torch.no_grad():
        meant = model(x)
        assert apply(model, ("scan",)).counts() == {"looped → selective_scan": 1}
        calls.clear()
        torch.testing.assert_close(model(x), meant)
        assert ran == [1] and not calls
        other(x)
        assert calls == ["loop"]
    model(x).sum().backward()  # the kernel has no gradient: the loop runs
    assert calls == ["loop", "loop"] and model[0].rates.grad is not None
    revert(model)
    assert "forward" not in vars(model[0])
