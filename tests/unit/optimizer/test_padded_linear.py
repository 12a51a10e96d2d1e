"""Padded products give what plain ones give, laid the same way, and are put only where they pay."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from ridgeline.engine import autocast as casts
from ridgeline.optimizer.in_place import attention_registry as hooks
from ridgeline.optimizer.in_place import padded_linear as padding
from ridgeline.optimizer.in_place.padded_linear import is_odd, padded_linear
from ridgeline.optimizer.in_place.substitution import apply, revert


@pytest.mark.parametrize(("outputs", "inputs", "bias"), [(101, 32, True), (96, 31, False), (77, 13, True), (64, 16, 1)])
def test_padding_changes_neither_results_nor_gradients_nor_layout(outputs: int, inputs: int, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64)
    x = torch.randn(3, 5, inputs, dtype=torch.float64, requires_grad=True)
    found = []
    for run in (layer, lambda x: padded_linear(x, layer.weight, layer.bias)):
        y = run(x)
        (y * torch.arange(y.numel()).view_as(y)).sum().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
        x.grad = None
        layer.zero_grad(set_to_none=True)
    for plain, padded in zip(*found, strict=True):
        torch.testing.assert_close(padded, plain, rtol=1e-12, atol=1e-12)
        assert padded.stride() == plain.stride()


@pytest.mark.parametrize("bias", [False, True])
def test_every_way_to_compute_an_odd_product_gives_the_same(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, x, seen = nn.Linear(16, 149, bias=bias), torch.randn(5, 16), {}

    def run(key: object, ways: dict[str, Any], device: torch.device) -> torch.Tensor:
        seen.update({name: way() for name, way in ways.items()})
        return seen["padded"]

    monkeypatch.setattr(padding.CONTEST, "run", run)
    padded_linear(x, layer.weight, layer.bias)
    assert set(seen) == {"padded", "plain", "parts, copied"}  # the last way needs a GPU and sixteen bits
    for found in seen.values():
        torch.testing.assert_close(found, layer(x).detach())
        assert found.is_contiguous()


def test_gradients_of_gradients_are_those_of_the_plain_product() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(11, 8, dtype=torch.float64, requires_grad=True), torch.randn(4, 8, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(padded_linear, (x.requires_grad_(), weight, None))


def test_only_large_odd_layers_of_sixteen_bits_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "RUNS_ON", frozenset({"cpu"}))
    model = nn.ModuleDict({
        "odd": nn.Linear(2048, 2051), "deep": nn.Linear(2051, 2048), "even": nn.Linear(2048, 2056),
        "small": nn.Linear(479, 1024), "wide": nn.Linear(2048, 2051),
    }).bfloat16()  # fmt: skip
    model["wide"].float()
    assert [name for name, module in model.named_children() if is_odd(module)] == ["odd", "deep"]
    done = apply(model, ("padding",))
    assert [each.where for each in done.replaced] == ["odd", "deep"]
    x = torch.randn(160, 2048, dtype=torch.bfloat16)
    torch.testing.assert_close(model["odd"](x), nn.functional.linear(x, model["odd"].weight, model["odd"].bias))
    assert model["odd"](x[:2]).grad_fn.name() == "AddmmBackward0"  # few rows: as it was
    assert "_Padded" in model["odd"](x).grad_fn.name()
    revert(model)
    assert "forward" not in vars(model["odd"])


def test_under_autocast_odd_layers_of_float32_are_padded_as_autocast_computes_them(monkeypatch: Any) -> None:
    monkeypatch.setattr(hooks, "RUNS_ON", frozenset({"cpu"}))
    torch.manual_seed(0)
    layer, x = nn.Linear(2048, 2051), torch.randn(160, 2048)
    assert not is_odd(layer) and not apply(nn.Sequential(layer), ("padding",)).replaced
    grads = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        meant = layer(x)
    grads.append(torch.autograd.grad(meant.float().square().sum(), list(layer.parameters())))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert len(apply(layer, ("padding",)).replaced) == 1
        found = layer(x)
    assert "_Padded" in found.grad_fn.name() and found.dtype == meant.dtype == torch.bfloat16
    torch.testing.assert_close(found, meant)
    grads.append(torch.autograd.grad(found.float().square().sum(), list(layer.parameters())))
    for mine, theirs in zip(*grads, strict=True):
        assert mine.dtype == torch.float32 and float((mine - theirs).norm()) <= 0.02 * float(theirs.norm())
    assert layer(x).dtype == torch.float32  # outside of autocast: as it was
    revert(layer)


class Casting(nn.Module):
    """Switches autocast on by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2048, 2051)

    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layer(x)


def test_layers_of_models_that_switch_autocast_on_by_themselves_are_padded_there(monkeypatch: Any) -> None:
    monkeypatch.setattr(hooks, "RUNS_ON", frozenset({"cpu"}))
    torch.manual_seed(0)
    model, x = Casting(), torch.randn(160, 2048)
    wrapped, plain = nn.Linear(2048, 2051), nn.Linear(2048, 2051)
    wrapped.forward = torch.autocast("cpu", dtype=torch.bfloat16)(wrapped.forward)  # as trainers put it around
    meant = model(x)
    assert casts.enters(model) and casts.enters(wrapped) and not casts.enters(plain)
    assert len(apply(model, ("padding",)).replaced) == 1
    found = model(x)
    assert "_Padded" in found.grad_fn.name() and found.dtype == meant.dtype == torch.bfloat16
    torch.testing.assert_close(found, meant)
    assert "_Padded" not in model.layer(x).grad_fn.name()  # called by itself, in float32


def rewritten(call: Any, x: Any) -> tuple[Any, list[str]]:
    from ridgeline.optimizer.backend import Report, compiled

    torch._dynamo.reset()
    report = Report()
    with torch.no_grad():
        found = compiled(call, rewrites=("odd-products",), compiler="none", report=report)(x)
    return found, [match.what for match in report.matches]


@pytest.mark.parametrize(
    ("outputs", "rows", "dtype", "num"),
    [
        (2051, 160, torch.bfloat16, 1),
        (2051, 160, torch.float16, 1),
        (2056, 160, torch.bfloat16, 0),  # whole pieces
        (2051, 160, torch.float32, 0),
        (2051, 64, torch.bfloat16, 0),  # few rows
        (101, 160, torch.bfloat16, 0),  # small
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_a_traced_graph_has_its_large_odd_products_raced(
    outputs: int, rows: int, dtype: torch.dtype, num: int, bias: bool
) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(2048, outputs, bias=bias)).to(dtype), torch.randn(2, rows // 2, 2048).to(dtype)
    found, whats = rewritten(model, x)
    assert len(whats) == num
    torch.testing.assert_close(found, model(x).detach())
    assert found.stride() == model(x).stride()


def test_odd_products_of_weights_that_lie_otherwise_are_left_alone() -> None:
    weight, x = torch.randn(2048, 2051).bfloat16().t(), torch.randn(160, 2048).bfloat16()
    found, whats = rewritten(lambda x: nn.functional.linear(x, weight), x)
    assert not whats
    torch.testing.assert_close(found, x @ weight.t())


def test_a_compiler_that_pads_by_itself_is_left_odd_products() -> None:
    from ridgeline.optimizer.rewrites import recommended

    assert "odd-products" in recommended("inference", "none")
    assert "odd-products" not in recommended("inference", "inductor")


def test_the_way_that_won_is_taken_while_somebody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording is watched by a mode; what is seen is one op, and what runs is the winner."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    layer, x, won = nn.Linear(16, 149), torch.randn(5, 16), []

    def run(key: object, ways: dict[str, Any], device: torch.device) -> torch.Tensor:
        won.append("parts, copied")
        return ways["parts, copied"]()

    monkeypatch.setattr(padding.CONTEST, "run", run)
    with torch.no_grad(), Watch() as watch:
        found = padded_linear(x, layer.weight, layer.bias)
    assert won and any("odd_product" in each for each in watch.seen)
    torch.testing.assert_close(found, layer(x).detach())
