"""Recommenders as people write them: bags of many tables, interactions in several spellings, cross layers, dropout."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.optimizer.backend import Report, compiled

TABLES, DIM, BATCH = 4, 16, 6
ALL = ("bags", "bag", "interaction", "cross")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def _run(model: nn.Module, args: tuple[Any, ...], rewrites: tuple[str, ...] = ALL) -> tuple[Any, Report]:
    report = Report()
    fast = compiled(model, rewrites=rewrites, report=report, fullgraph=True)
    with torch.no_grad():
        meant = model(*args)
        found = fast(*args)
    assert found.shape == meant.shape and found.dtype == meant.dtype
    assert torch.allclose(found, meant, atol=2e-5 * float(meant.abs().max())), (found - meant).abs().max()
    return fast, report


class Tables(nn.Module):
    """Bags of several tables side by side, as matrices of indices or with offsets."""

    def __init__(self, mode: str = "sum", **given: Any) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(20 + 5 * i, DIM, mode=mode, **given) for i in range(TABLES))

    def forward(self, ids: list[Tensor], offsets: list[Tensor] | None = None) -> Tensor:
        if offsets is None:
            return torch.cat([bag(i) for bag, i in zip(self.bags, ids, strict=True)], 1)
        return torch.cat([bag(i, o) for bag, i, o in zip(self.bags, ids, offsets, strict=True)], 1)


def _matrices() -> list[Tensor]:
    return [torch.randint(0, 20 + 5 * i, (BATCH, 2 + i)) for i in range(TABLES)]


def _ragged(last: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    ids, offsets = [], []
    for i in range(TABLES):
        lengths = torch.randint(0, 4, (BATCH,))
        lengths[0] = 2
        ids.append(torch.randint(0, 20 + 5 * i, (int(lengths.sum()),)))
        starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
        offsets.append(starts if last else starts[:-1])
    return ids, offsets


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_matrices_are_one_launch(mode: str) -> None:
    _, report = _run(Tables(mode), (_matrices(),))
    assert report.counts() == {"bags": 1} and "4 tables" in report.matches[0].what


@pytest.mark.parametrize("last", [False, True])
def test_bags_with_offsets_are_one_launch_empty_ones_included(last: bool) -> None:
    _, report = _run(Tables(include_last_offset=last), _ragged(last))
    assert report.counts() == {"bags": 1}


def test_tables_side_by_side_follow_their_parameters() -> None:
    model, ids = Tables(), _matrices()
    fast, _ = _run(model, (ids,))
    with torch.no_grad():
        model.bags[2].weight.mul_(-3.0)
        assert torch.allclose(fast(ids), model(ids), atol=1e-5)


@pytest.mark.parametrize("given", [{"padding_idx": 0}, {"max_norm": 1.0}])
def test_bags_with_more_to_them_are_left_alone(given: dict[str, Any]) -> None:
    _, report = _run(Tables(**given), (_matrices(),))
    assert report.counts() == {}


def test_a_table_used_twice_is_not_laid_anew() -> None:
    model = Tables()
    model.bags[1] = model.bags[0]
    ids = [torch.randint(0, 20, (BATCH, 2)) for _ in range(TABLES)]
    _, report = _run(model, (ids,), ("bags",))
    assert report.counts() == {}


def test_a_bag_in_training_has_pytorchs_gradient() -> None:
    model, (ids, offsets) = Tables("mean"), _ragged()
    report = Report()
    fast = compiled(model, rewrites=("bag",), report=report, fullgraph=True)
    weight = torch.linspace(0.5, 1.5, BATCH * TABLES * DIM).reshape(BATCH, -1)
    (fast(ids, offsets) * weight).sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    (model(ids, offsets) * weight).sum().backward()
    assert report.counts() == {"bag": TABLES}
    for a, p in zip(found, model.parameters(), strict=True):
        assert torch.allclose(a, p.grad, atol=1e-5)


def _dlrm(x: Tensor, features: list[Tensor]) -> Tensor:
    t = torch.cat([x, *features], dim=1).view((x.shape[0], -1, DIM))
    z = torch.bmm(t, torch.transpose(t, 1, 2))
    num = t.shape[1]
    li = torch.tensor([i for i in range(num) for j in range(i)])
    lj = torch.tensor([j for i in range(num) for j in range(i)])
    return torch.cat([x, z[:, li, lj]], dim=1)


def _torchrec(x: Tensor, features: list[Tensor]) -> Tensor:
    both = torch.cat((x.unsqueeze(1), torch.stack(features, 1)), dim=1)
    z = torch.bmm(both, both.transpose(1, 2))
    i, j = torch.triu_indices(len(features) + 1, len(features) + 1, offset=1)
    return torch.cat((x, z[:, i, j]), dim=1)


def _without_dense(x: Tensor, features: list[Tensor]) -> Tensor:
    both = torch.stack([x, *features], 1)
    z = both @ both.permute(0, 2, 1)
    i = torch.tril_indices(len(features) + 1, len(features) + 1, -1)
    return torch.relu(z[:, i[0], i[1]])


def _normed(x: Tensor, features: list[Tensor]) -> Tensor:
    both = F.layer_norm(torch.stack([x, *features], 1), (DIM,))
    z = torch.matmul(both, both.transpose(-1, -2))
    i = torch.tril_indices(len(features) + 1, len(features) + 1, -1)
    return z[:, i[0], i[1]]


def _with_diagonal(x: Tensor, features: list[Tensor]) -> Tensor:
    both = torch.stack([x, *features], 1)
    i = torch.tril_indices(len(features) + 1, len(features) + 1, 0)
    return torch.bmm(both, both.transpose(1, 2))[:, i[0], i[1]]


def _of_two_tensors(x: Tensor, features: list[Tensor]) -> Tensor:
    both = torch.stack([x, *features], 1)
    i = torch.tril_indices(len(features) + 1, len(features) + 1, -1)
    return torch.bmm(both, (both + 1).transpose(1, 2))[:, i[0], i[1]]


class Interacting(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.bottom = function, nn.Linear(5, DIM)

    def forward(self, x: Tensor, features: list[Tensor]) -> Tensor:
        return self.function(self.bottom(x), features) * 1.5


def _features() -> tuple[Tensor, list[Tensor]]:
    return torch.randn(BATCH, 5), [torch.randn(BATCH, DIM) for _ in range(TABLES)]


@pytest.mark.parametrize("function", [_dlrm, _torchrec, _without_dense, _normed])
def test_an_interaction_is_one_kernel_in_every_spelling(function: Any) -> None:
    model, args = Interacting(function), _features()
    fast, report = _run(model, args, ("interaction",))
    assert report.counts() == {"interaction": 1}, report.refusals
    leaves = [t.requires_grad_() for t in args[1]]
    weight = torch.linspace(0.5, 1.5, 64)
    torch._dynamo.reset()
    report = Report()
    fast = compiled(model, rewrites=("interaction",), report=report, fullgraph=True)
    found = torch.autograd.grad((fast(*args).flatten() * weight[:1]).sum(), [*leaves, model.bottom.weight])
    meant = torch.autograd.grad((model(*args).flatten() * weight[:1]).sum(), [*leaves, model.bottom.weight])
    assert report.counts() == {"interaction": 1}
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found, meant, strict=True))


@pytest.mark.parametrize("function", [_with_diagonal, _of_two_tensors])
def test_other_products_of_features_are_left_alone(function: Any) -> None:
    _, report = _run(Interacting(function), _features(), ("interaction",))
    assert report.counts() == {}


class Kept(nn.Module):
    """The pairs' places kept in a buffer, and tables in front: a whole recommender."""

    def __init__(self) -> None:
        super().__init__()
        self.tables, self.bottom, self.top = Tables(), nn.Linear(5, DIM), nn.Linear(DIM + 10, 1)
        self.register_buffer("pairs", torch.triu_indices(TABLES + 1, TABLES + 1, 1))

    def forward(self, x: Tensor, ids: list[Tensor]) -> Tensor:
        x = self.bottom(x)
        both = torch.stack([x, *(bag(i) for bag, i in zip(self.tables.bags, ids, strict=True))], 1)
        z = torch.bmm(both, both.transpose(1, 2))
        return self.top(torch.cat([x, z[:, self.pairs[0], self.pairs[1]]], 1))


def test_a_recommender_reads_its_features_where_the_bags_left_them() -> None:
    model, args = Kept(), (torch.randn(BATCH, 5), _matrices())
    fast, report = _run(model, args)
    assert report.counts() == {"bags": 1, "interaction": 1}
    with torch.no_grad():
        model.pairs.copy_(model.pairs.flip(1).contiguous())
        assert torch.allclose(fast(*args), model(*args), atol=1e-5), "other pairs are noticed"


class Crossing(nn.Module):
    def __init__(self, rank: int | None, order: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(rank or 24, 24) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(24, rank, bias=False) for _ in range(2)) if rank else None
        self.order = order

    def forward(self, x0: Tensor) -> Tensor:
        x = x0
        for i, up in enumerate(self.up):
            y = up(x if self.down is None else self.down[i](x))
            x = x0 * y + x if self.order else x + y * x0
        return x


@pytest.mark.parametrize("rank", [None, 8])
@pytest.mark.parametrize("order", [0, 1])
def test_cross_layers_are_one_kernel_each(rank: int | None, order: int) -> None:
    model, x = Crossing(rank, order), torch.randn(BATCH, 24)
    fast, report = _run(model, (x,))
    assert report.counts() == {"cross": 2}
    found = torch.autograd.grad(fast(x).square().sum(), list(model.parameters()))
    meant = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in zip(found, meant, strict=True))


class NotCrossing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 24)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        return x0 * self.up(x) + x0


def test_a_sum_with_another_tensor_is_no_cross_layer() -> None:
    _, report = _run(NotCrossing(), (torch.randn(BATCH, 24), torch.randn(BATCH, 24)))
    assert report.counts() == {}


class Dropping(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.Dropout, p: float = 0.25) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(32, 32), kind(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.linear(x))


def test_dropout_and_its_sum_are_one_kernel_in_training() -> None:
    model, x, report = Dropping(), torch.randn(400, 32), Report()
    fast = compiled(model, rewrites=("dropout-add",), report=report, fullgraph=True)
    y = model.linear(x)
    found = (fast(x) - x).detach()
    assert report.counts() == {"dropout-add": 1}
    kept = found != 0
    assert abs(float(kept.float().mean()) - 0.75) < 0.02
    assert torch.allclose(found[kept], y[kept] / 0.75, atol=1e-5), "what is kept is scaled"
    assert not torch.equal(kept, (fast(x) - x) != 0), "every call draws anew"
    torch.manual_seed(7)
    again = fast(x)
    torch.manual_seed(7)
    assert torch.equal(again, fast(x)), "and from PyTorch's generator"


@pytest.mark.parametrize(
    ("model", "train"), [(Dropping(), False), (Dropping(p=0.0), True), (Dropping(nn.AlphaDropout), True)]
)
def test_other_dropouts_are_left_alone(model: nn.Module, train: bool) -> None:
    report = Report()
    fast = compiled(model.train(train), rewrites=("dropout-add",), report=report, fullgraph=True)
    fast(torch.randn(4, 32))
    assert report.counts() == {}
