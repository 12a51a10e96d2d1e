"""The few largest or smallest elements of rows: found however people ask for them, and only where they are meant."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))

from torch import Tensor

from ridgeline.optimizer.backend import Report, compiled
from ridgeline.optimizer.rewrites import recommended
from ridgeline.optimizer.rewrites.rows import top_k

K = 5


@pytest.fixture(autouse=True)
def _small(monkeypatch: Any) -> None:
    monkeypatch.setattr(top_k, "LEAST_ELEMENTS", 1)


def _both(function: Callable[..., Any], *args: Tensor) -> tuple[Any, Any, int]:
    torch._dynamo.reset()
    report = Report()
    with torch.no_grad():
        meant = function(*(x.clone() for x in args))
        fast = compiled(Of(function), rewrites=("top_k",), report=report)
        return fast(*(x.clone() for x in args)), meant, report.counts().get("top_k", 0)


class Of(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def _nearest(x: Tensor) -> Tensor:
    inner = -2 * torch.matmul(x.transpose(2, 1), x)
    square = torch.sum(x**2, dim=1, keepdim=True)
    return (-square - inner - square.transpose(2, 1)).topk(k=K, dim=-1)[1]


def _written(x: Tensor) -> Tensor:
    found = x.sort(dim=-1)[1][:, :, :K]
    found[found == 3] = 0
    return found.reshape(-1, K) + 1


FOUND: dict[str, Callable[[Tensor], Any]] = {
    "nearest": _nearest,
    "topk of a function": lambda x: torch.topk(x, K, dim=2, largest=False, sorted=False).indices + 1,
    "both": lambda x: tuple(part + 1 for part in torch.topk(x.softmax(-1), K)),
    "values": lambda x: torch.topk(x, K)[0].softmax(-1),
    "distances sorted": lambda x: x.argsort(dim=-1)[:, :, :K].reshape(-1, K),
    "sorted downward": lambda x: torch.sort(x, descending=True)[1][..., :K] * 2,
    "sorted, both": lambda x: tuple(part[..., :K].reshape(-1, K) for part in x.sort(-1)),
    "picked by": lambda x: x[torch.arange(2)[:, None, None], :, x.argsort(-1)[:, :, :K]],
}


@pytest.mark.parametrize("function", FOUND.values(), ids=list(FOUND))
def test_the_few_largest_are_found_however_they_are_asked_for(function: Callable[[Tensor], Any]) -> None:
    torch.manual_seed(0)
    found, meant, num = _both(function, torch.randn(2, 6, 40) if function is not _nearest else torch.randn(2, 3, 40))
    assert num == 1
    for a, b in zip(found if isinstance(found, tuple) else (found,), meant if isinstance(meant, tuple) else (meant,)):
        assert a.shape == b.shape and a.dtype == b.dtype
        if function is not FOUND["topk of a function"]:  # which may be in any order
            assert torch.equal(a, b)
        assert torch.equal(a.sort(-1).values, b.sort(-1).values)


LEFT: dict[str, Callable[[Tensor], Any]] = {
    "another dim": lambda x: x.topk(K, dim=1)[1],
    "whole numbers": lambda x: (x * 100).long().topk(K)[1],
    "all of a sort": lambda x: x.sort(-1)[1],
    "the end of a sort": lambda x: x.argsort(-1)[..., -K:],
    "some and all of a sort": lambda x: (lambda pair: (pair[0][..., :K], pair[1]))(x.sort(-1)),
    "rows of a sort": lambda x: x.argsort(-1)[:K],
    "too many": lambda x: torch.cat([x] * 3, -1).topk(100)[1],
    "turned": lambda x: x.transpose(1, 2).topk(K)[1],
    "written to": _written,
    "returned as it lies": lambda x: x.argsort(-1)[..., :K],
    "the pair itself": lambda x: torch.topk(x, K),
}


@pytest.mark.parametrize("function", LEFT.values(), ids=list(LEFT))
def test_what_is_not_that_is_left_alone(function: Callable[[Tensor], Any]) -> None:
    torch.manual_seed(0)
    found, meant, num = _both(function, torch.randn(2, 40, 40))
    assert num == (1 if function is LEFT["the pair itself"] else 0)
    for a, b in zip(found if isinstance(found, tuple) else (found,), meant if isinstance(meant, tuple) else (meant,)):
        assert torch.equal(a, b)


def test_rows_that_change_in_between_are_not_read_later() -> None:
    def function(x: Tensor) -> Tensor:
        pair = x.topk(K)
        x.mul_(-1.0)
        return pair[1] + x.argmax(-1, keepdim=True)

    torch.manual_seed(0)
    found, meant, _ = _both(function, torch.randn(2, 6, 40))
    assert torch.equal(found, meant)


def test_it_is_tried_where_kernels_are() -> None:
    assert all("top_k" in recommended("inference", compiler, "cuda") for compiler in ("none", "inductor"))
    assert "top_k" not in recommended("training", "inductor", "cuda")
