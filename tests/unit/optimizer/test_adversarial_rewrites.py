"""Models made to trap rewrites: every one computes what eager computes, with all rewrites on."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.optimizer.backend import Report, compiled
from ridgeline.optimizer.in_place.channels_last import channels_last_layers
from ridgeline.optimizer.rewrites import rewrites

ALL = tuple(rewrites())


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def _same(model: nn.Module, *calls: tuple[Any, ...], grads: bool = False) -> Report:
    """Call a model and its rewritten twin alike, several times: results, written inputs and state must agree."""
    report = Report()
    twin = copy.deepcopy(model)
    fast = compiled(twin, rewrites=ALL, report=report)
    for args in calls:
        ours, theirs = (tuple(x.clone() if isinstance(x, Tensor) else x for x in args) for _ in range(2))
        with torch.set_grad_enabled(grads):
            torch.manual_seed(1)
            found = fast(*ours)
            torch.manual_seed(1)
            meant = model(*theirs)
        torch.testing.assert_close(found, meant, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        for a, b in zip(twin.buffers(), model.buffers(), strict=True):
            torch.testing.assert_close(a, b)
    assert not [r for r in report.refusals if "Error" in r.why], report.refusals
    return report


class _Norm(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def test_a_residual_stream_written_in_place() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.lin = _Norm(), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            h = x + 1.0
            y = self.norm(h)
            h += self.lin(y)
            return self.norm(h) + h + y

    _same(Block(), (torch.randn(3, 16),), (torch.randn(3, 16),))


def test_an_input_written_in_place_between_a_norms_steps() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            x.add_(1.0)
            return x * scale

    assert "norm" not in _same(Writes(), (torch.randn(3, 16),)).counts()


def test_a_view_written_through_another_name() -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2.0
            left, right = y.chunk(2, -1)
            gate = F.silu(left)
            left.zero_()
            return gate * right + y.sum()

    _same(Views(), (torch.randn(3, 16),))


def test_a_mask_buffer_that_changes_with_every_call() -> None:
    class Shifting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.ones(6, 6, dtype=torch.bool).tril())

        def forward(self, q: Tensor) -> Tensor:
            out = F.scaled_dot_product_attention(q, q, q, attn_mask=self.seen)
            self.seen.copy_(self.seen.roll(1, 0) | torch.eye(6, dtype=torch.bool))
            return out

    q = torch.randn(1, 2, 6, 8)
    _same(Shifting(), (q,), (q,), (q,))


def test_weights_shared_between_layers_and_with_an_embedding() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 16)
            self.head = nn.Linear(16, 20, bias=False)
            self.head.weight = self.embed.weight
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
            self.b.weight = self.a.weight

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            return self.head(F.silu(self.a(x)) * self.b(x))

    _same(Tied(), (torch.randint(0, 20, (2, 5)),))


def test_weights_that_are_views_of_one_tensor_stay_so() -> None:
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            both = torch.randn(24, 16)
            self.a, self.b = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
            self.a.weight = nn.Parameter(both[:16])
            self.b.weight = nn.Parameter(both[8:])  # overlaps the first

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) * 2 + self.b(x) * 3

    model = Viewed()
    report = Report()
    fast = compiled(model, rewrites=ALL, report=report)
    x = torch.randn(3, 16)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
        model.a.weight[9].fill_(5.0)
        assert bool((model.b.weight[1] == 5.0).all())
        torch.testing.assert_close(fast(x), model(x))
    assert "horizontal" not in report.counts()


def test_control_flow_that_depends_on_data() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.lin = nn.LayerNorm(16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            above = x.sum() > 0
            x = self.norm(x)
            return self.lin(x).relu() if above else x * torch.sigmoid(x)

    _same(Branches(), (torch.randn(3, 16) + 1,), (torch.randn(3, 16) - 1,))


def test_inputs_that_are_not_contiguous() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.ln = _Norm(), nn.LayerNorm(16)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.ln(self.norm(x) + y).softmax(-1)

    wide = torch.randn(16, 3, 2).permute(2, 1, 0)
    _same(Block(), (wide, torch.randn(2, 3, 32)[..., ::2]))


def test_types_that_promote_in_the_middle() -> None:
    class Promotes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(16, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            h = x.float()
            return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))

    _same(Promotes(), (torch.randn(3, 16),), (torch.randn(3, 16).bfloat16(),))


def test_dropout_draws_what_eager_draws() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.drop = nn.Linear(16, 16), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            q = self.lin(x).view(3, 2, 2, 4)
            weights = F.dropout(torch.softmax(q @ q.transpose(-1, -2), -1), 0.3, self.training)
            return (weights @ q).flatten(1) + self.drop(x)

    _same(Drops().train(), (torch.randn(3, 16),), (torch.randn(3, 16),))


def test_hooks_still_run() -> None:
    seen: list[int] = []
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU())
    model[1].register_forward_hook(lambda module, args, out: out * 2)
    model[0].register_forward_pre_hook(lambda module, args: seen.append(1))
    _same(model, (torch.randn(3, 16),))
    assert seen


def test_gradients_stopped_in_the_middle_stay_stopped() -> None:
    class Stops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = _Norm()

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            return x * scale

    x = torch.randn(3, 16, requires_grad=True)
    fast = compiled(Stops(), rewrites=ALL)
    found = torch.autograd.grad(fast(x).square().sum(), x)[0]
    meant = torch.autograd.grad(Stops()(x).square().sum(), x)[0]
    torch.testing.assert_close(found, meant)


def test_training_state_and_gradients_with_batch_norm() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 4)
    ).train()
    twin = copy.deepcopy(model)
    fast = compiled(twin, rewrites=ALL)
    for _ in range(2):
        x = torch.randn(2, 3, 6, 6)
        fast(x).square().sum().backward()
        model(x).square().sum().backward()
    for a, b in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(twin[1].running_var, model[1].running_var)


class _Projected(nn.Module):
    """Three products of one input, which are laid side by side where nobody minds."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.softmax(self.q(x) @ self.k(x).t(), -1) @ self.v(x))


def _tied(model: _Projected) -> Tensor:
    model.out.weight = nn.Parameter(model.q.weight.data)
    return model.out.weight


ALIASES = {
    "a weight of another layer": _tied,
    "an alias that the caller has": lambda model: model.q.weight.detach(),
    "a state that the caller has": lambda model: model.state_dict()["k.bias"],
    "a part that the caller has": lambda model: model.v.weight.data[2:4],
    "an array that the caller has": lambda model: torch.from_numpy(model.v.weight.detach().numpy()),
    "memory that the caller has": lambda model: torch.empty(0).set_(model.k.weight.data.untyped_storage(), 0, (8, 8)),
}


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_a_weight_whose_memory_others_hold_stays_where_it_is(alias: Any) -> None:
    """Laid side by side it lay elsewhere, and what was written to its old memory no longer reached the model."""
    x, models = torch.randn(4, 8), [_Projected() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    held, report = [alias(model) for model in models], Report()
    fast = compiled(models[0], rewrites=("horizontal",), report=report)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), models[1](x))
        for each in held:
            each.mul_(3)
        torch.testing.assert_close(fast(x), models[1](x))
    assert any("shares its memory" in refusal.why for refusal in report.refusals)


def test_weights_that_are_tied_after_they_were_laid_side_by_side_stay_tied() -> None:
    x, models, report = torch.randn(4, 8), [_Projected() for _ in range(2)], Report()
    models[1].load_state_dict(models[0].state_dict())
    fast = compiled(models[0], rewrites=("horizontal",), report=report)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), models[1](x))
        assert report.counts() == {"horizontal": 1}
        for model in models:
            model.q.weight.data = model.out.weight.data
        torch.testing.assert_close(fast(x), models[1](x))
        for model in models:
            model.out.weight.mul_(3)
        torch.testing.assert_close(fast(x), models[1](x))


def test_a_weight_whose_memory_others_hold_is_not_laid_channels_last() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3))
    alias = model[0].weight.detach()
    assert [path for path, _ in channels_last_layers(model)] == ["1"] and alias.data_ptr() == model[0].weight.data_ptr()
