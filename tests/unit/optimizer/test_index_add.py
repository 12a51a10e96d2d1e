"""Sums by an index: what is found, that both ways give the same, that edges are sorted once, and what is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import torch.nn.functional as F

from ridgeline.optimizer.backend import Report, compiled
from ridgeline.optimizer.rewrites.rows import index_add as sums

N, M, E, D = 7, 9, 40, 6


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.setattr(sums, "LEAST_ELEMENTS", 1)


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every race, with what each way gave; bags win."""
    found: list[Any] = []

    def run(key: Any, ways: dict[str, Any], device: torch.device) -> torch.Tensor:
        found.append({name: way() for name, way in ways.items()})
        return found[-1]["bags"]

    monkeypatch.setattr(sums.CONTEST, "run", run)
    return found


def ran(call: Callable[..., Any], *args: Any) -> tuple[Any, Report]:
    report = Report()
    with torch.no_grad():
        return compiled(call, rewrites=("index-sums",), compiler="none", report=report)(*args), report


def gathered(x: Any, s: Any, t: Any, w: Any) -> Any:
    return torch.zeros_like(x).index_add_(0, t, x[s])


def stated(x: Any, s: Any, t: Any, w: Any) -> Any:
    total = torch.zeros(x.shape, dtype=x.dtype)
    total.index_add_(0, t, x.index_select(0, s))
    return total / 2


def out_of_place(x: Any, s: Any, t: Any, w: Any) -> Any:
    return x.new_zeros(x.shape[0], x.shape[1]).index_add(0, t, F.embedding(s, x))


def scattered(x: Any, s: Any, t: Any, w: Any) -> Any:
    messages = x[s]
    return torch.zeros_like(x).scatter_add_(0, t[:, None].expand_as(messages), messages)


def weighted(x: Any, s: Any, t: Any, w: Any) -> Any:
    return torch.zeros_like(x).index_add_(0, t, w[:, None] * x[s])


def made(x: Any, s: Any, t: Any, w: Any) -> Any:
    return torch.zeros_like(x).index_add_(0, t, torch.tanh(x[s] + 1))


def of_heads(x: Any, s: Any, t: Any, w: Any) -> Any:
    heads = x.view(x.shape[0], 2, -1)
    return torch.zeros_like(heads).index_add_(0, t, heads[s])


@pytest.mark.parametrize("call", [gathered, stated, out_of_place, scattered, weighted, made, of_heads])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_by_an_index_is_the_same_as_bags(call: Any, dtype: torch.dtype, raced: list[Any]) -> None:
    x, w = torch.randn(N, D, dtype=dtype), torch.rand(E, dtype=dtype)
    s, t = torch.randint(0, N, (E,)), torch.randint(0, N - 1, (E,))  # one sum is of nothing
    found, report = ran(call, x, s, t, w)
    assert report.counts() == {"index-sums": 1}
    (both,) = raced
    close = {"rtol": 3e-2, "atol": 6e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(both["bags"], both["library"], **close)
    torch.testing.assert_close(found, call(x, s, t, w), **close)
    assert found.stride() == call(x, s, t, w).stride()


def test_rows_counted_from_the_end_are_found(raced: list[Any]) -> None:
    x, s, t = torch.randn(N, D), torch.randint(-N, N, (E,)), torch.randint(0, N, (E,))
    found, _ = ran(gathered, x, s, t, None)
    torch.testing.assert_close(found, gathered(x, s, t, None))


def test_sums_between_two_kinds_of_nodes(raced: list[Any]) -> None:
    def call(x: Any, s: Any, t: Any) -> Any:
        return x.new_zeros(M, D).index_add_(0, t, x[s])

    x, s, t = torch.randn(N, D), torch.randint(-N, N, (E,)), torch.randint(0, M, (E,))
    found, report = ran(call, x, s, t)
    assert len(report.matches) == 1
    torch.testing.assert_close(found, call(x, s, t))


def test_layers_over_the_same_edges_share_one_sort(monkeypatch: pytest.MonkeyPatch, raced: list[Any]) -> None:
    sorts: list[int] = []
    own = torch.sort
    monkeypatch.setattr(torch, "sort", lambda *args, **kwargs: sorts.append(1) or own(*args, **kwargs))

    def call(x: Any, s: Any, t: Any) -> Any:
        for _ in range(3):
            x = torch.tanh(torch.zeros_like(x).index_add_(0, t, x[s]))
        return x

    x, s, t = torch.randn(N, D), torch.randint(0, N, (E,)), torch.randint(0, N, (E,))
    found, report = ran(call, x, s, t)
    assert len(report.matches) == 3 and len(sorts) == 1
    torch.testing.assert_close(found, call(x, s, t))


def test_nothing_is_sorted_where_the_library_won(monkeypatch: pytest.MonkeyPatch) -> None:
    x, s, t = torch.randn(N, D), torch.randint(0, N, (E,)), torch.randint(0, N, (E,))
    monkeypatch.setattr(sums.CONTEST, "won", {(E, N, x.device, x.shape, x.dtype, False, True): "library"})
    monkeypatch.setattr(torch, "sort", lambda *args, **kwargs: pytest.fail("sorted"))
    found, report = ran(gathered, x, s, t, None)
    assert len(report.matches) == 1
    torch.testing.assert_close(found, gathered(x, s, t, None))


def test_other_rows_over_edges_that_nobody_sorted_are_not_raced(
    raced: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, s, t = torch.randn(N, 2 * D), torch.randint(0, N, (E,)), torch.randint(0, N, (E,))
    monkeypatch.setattr(sums.CONTEST, "won", {(E, N, x.device, (N, D), x.dtype, False, True): "library"})
    found, report = ran(gathered, x, s, t, None)
    assert len(report.matches) == 1 and not raced
    torch.testing.assert_close(found, gathered(x, s, t, None))


@pytest.mark.parametrize(
    "call",
    [
        lambda x, s, t: torch.ones_like(x).index_add_(0, t, x[s]),
        lambda x, s, t: x.clone().index_add_(0, t, x[s]),
        lambda x, s, t: torch.zeros_like(x).index_add_(0, t, x[s], alpha=2),
        lambda x, s, t: torch.zeros(x.shape[0], E).index_add_(1, torch.arange(E), torch.ones(x.shape[0], E)),
        lambda x, s, t: torch.zeros_like(x).scatter_add_(0, t[:, None].repeat(1, D), x[s]),
        lambda x, s, t: torch.zeros(x.shape[0]).index_add_(0, t, x[s].sum(1)),
    ],
)
def test_other_sums_are_left_alone(call: Any) -> None:
    x, s, t = torch.randn(N, D), torch.randint(0, N, (E,)), torch.randint(0, N, (E,))
    found, report = ran(call, x, s, t)
    assert not report.matches
    torch.testing.assert_close(found, call(x, s, t))


def test_zeros_that_somebody_saw_are_left_alone() -> None:
    def call(x: Any, s: Any, t: Any) -> Any:
        total = torch.zeros_like(x)
        first = total[:2]
        total.index_add_(0, t, x[s])
        return total, first * 2

    x, s, t = torch.randn(N, D), torch.randint(0, N, (E,)), torch.randint(0, N, (E,))
    found, report = ran(call, x, s, t)
    assert not report.matches
    torch.testing.assert_close(found, call(x, s, t))


def test_an_index_that_is_written_between_two_sums_is_sorted_for_each(raced: list[Any]) -> None:
    def call(x: Any, s: Any, t: Any) -> Any:
        t = t + 0
        a = torch.zeros_like(x).index_add_(0, t, x[s])
        t.add_(1).remainder_(N)
        return a, torch.zeros_like(x).index_add_(0, t, x[s])

    x, s, t = torch.randn(N, D), torch.randint(0, N, (E,)), torch.randint(0, N, (E,))
    found, _ = ran(call, x, s, t)
    torch.testing.assert_close(found, call(x, s, t))
