"""Every rewrite finds what people write, computes the same, and finds no near miss."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from ridgeline.optimizer.backend import Report, compiled
from ridgeline.optimizer.rewrites import recommended, rewrites

_spec = importlib.util.spec_from_file_location("spellings", Path(__file__).with_name("spellings.py"))
assert _spec is not None and _spec.loader is not None
spellings = importlib.util.module_from_spec(_spec)
sys.modules["spellings"] = spellings
_spec.loader.exec_module(spellings)


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return


def _grads(model: Any, args: Any, outputs: Any) -> list[Any]:
    """The gradient of a weighted sum of the outputs by every parameter and floating input."""
    leaves = [p for p in (*model.parameters(), *args) if p.requires_grad]
    flat = [o for o in torch.utils._pytree.tree_leaves(outputs) if o.requires_grad]
    total = sum((o.float() * torch.linspace(0.5, 1.5, o.numel()).reshape(o.shape)).sum() for o in flat)
    return list(torch.autograd.grad(total, leaves, allow_unused=True))


def _close(found: Any, meant: Any, tolerance: float) -> None:
    for a, b in zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(meant), strict=True):
        if a is None or b is None:
            assert a is b
            continue
        assert a.shape == b.shape and a.dtype == b.dtype
        scale = b.float().abs().max().clamp_min(1e-6)
        assert float((a.float() - b.float()).detach().abs().max() / scale.detach()) < tolerance


def _cast(case: Any, dtype: Any) -> tuple[Any, Any]:
    model, args = case.make()
    return model.to(dtype), tuple(x.to(dtype) if x.is_floating_point() else x for x in args)


_ANYWHERE = [case for case in spellings.SPELLINGS if "inference" in rewrites()[case.rewrite].modes]


@pytest.mark.parametrize("case", _ANYWHERE, ids=lambda case: case.name)
def test_a_spelling_is_found_and_computes_the_same(case: Any) -> None:
    for dtype in case.dtypes:
        model, args = _cast(case, dtype)
        tolerance = 2e-5 if dtype is torch.float32 else 2e-2
        report = Report()
        fast = compiled(model, rewrites=(case.rewrite,), report=report, fullgraph=True)
        with torch.no_grad():
            _close(fast(*args), model(*args), tolerance)
        assert report.counts() == {case.rewrite: case.matches}, report.refusals


@pytest.mark.parametrize("case", [c for c in spellings.SPELLINGS if c.training], ids=lambda case: case.name)
def test_a_spelling_has_the_same_gradients(case: Any) -> None:
    dtype = case.dtypes[0]
    model, args = _cast(case, dtype)
    args = tuple(x.requires_grad_() if x.is_floating_point() and x.shape[-1] != 8 else x for x in args)  # but tables
    tolerance = 5e-5 if dtype is torch.float32 else 3e-2
    report = Report()
    fast = compiled(model, rewrites=(case.rewrite,), report=report, fullgraph=True)
    found, meant = fast(*args), model(*args)
    _close(found, meant, tolerance)
    _close(_grads(model, args, found), _grads(model, args, meant), tolerance)
    assert report.counts().get(case.rewrite, 0) == (case.matches if "bias" not in case.name else 0), report.refusals


@pytest.mark.parametrize("case", spellings.MISSES, ids=lambda case: case.name)
def test_a_near_miss_is_left_alone(case: Any) -> None:
    model, args = case.make()
    report = Report()
    fast = compiled(model, rewrites=(case.rewrite,), report=report)
    with torch.no_grad():
        torch.manual_seed(1)
        found = fast(*args)
        torch.manual_seed(1)
        _close(found, model(*args), 1e-6)
    assert report.counts() == {}


def test_every_rewrite_has_a_spelling_and_a_worth() -> None:
    found = {case.rewrite for case in spellings.SPELLINGS}
    for name, each in rewrites().items():
        if each.change.__module__.rsplit(".", 1)[1] in _FAMILIES:
            assert name in found, name
        assert set(each.worth) == set(each.modes)
        assert all(w.eager > 0 and w.compiled > 0 and w.basis for w in each.worth.values())


def test_a_table_that_asks_for_a_gradient_is_no_constant() -> None:
    model, (q, k, freqs) = spellings.llama_rotary()
    report = Report()
    fast = compiled(model, rewrites=("rotary",), report=report)
    args = (q, k, freqs.requires_grad_())
    _close(_grads(model, args, fast(*args)), _grads(model, args, model(*args)), 1e-5)
    assert report.counts() == {} and report.refusals


def _joined(model: Any, rows: int) -> dict[str, int]:
    """How often layers of a training step were put side by side."""
    report = Report()
    compiled(model, rewrites=("side-by-side",), report=report)(torch.randn(rows, 64)).sum().backward()
    return report.counts()


class _Wide(torch.nn.Module):
    def __init__(self, num: int) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Linear(64, num, bias=False) for _ in range(2))

    def forward(self, x: Any) -> Any:
        return self.a(x) * self.b(x)


def test_weights_are_put_side_by_side_in_training_where_that_costs_less_than_it_saves() -> None:
    assert _joined(_Wide(64), 4) == {"side-by-side": 1}
    assert _joined(_Wide(1 << 16), 4) == {}  # 134 MB to copy for the launches of one product


def test_layers_of_which_some_are_frozen_are_not_put_side_by_side() -> None:
    model = _Wide(64)
    model.a.weight.requires_grad_(False)
    assert _joined(model, 4) == {}
    model.b.weight.grad = None
    model.a.weight.requires_grad_(True)
    torch._dynamo.reset()
    assert _joined(model, 4) == {"side-by-side": 1}


_FAMILIES = (
    "cleanup",
    "algebra",
    "fold",
    "attention",
    "gate",
    "norm",
    "rotary",
    "loss",
    "rows",
    "horizontal",
    "epilogue",
)


@pytest.mark.parametrize("op", ["eq", "ne", "lt", "le", "gt", "ge", "and", "or"])
def test_what_python_calls_an_operator_is_that_op(op: str) -> None:
    """torch 2.11 traces ``a == b`` as a method: masks of decoders, which compare with it, were no constants there."""
    from torch import fx

    from ridgeline.optimizer.rewrites.op_names import call

    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    own = getattr(torch.Tensor, f"__{op}__")
    for made in (graph.call_method(f"__{op}__", (a, b)), graph.call_function(own, (a, b))):
        read = call(made)
        assert read is not None and read.op == op and (read["input"], read["other"]) == (a, b)


def test_kernels_are_recommended_only_where_they_run() -> None:
    on_host = recommended("inference", "none", "cpu")
    assert not any(rewrites()[name].needs_kernels for name in on_host)
    assert "attention" in on_host and "norm" in recommended("inference", "none", "cuda")
    assert "norm" not in recommended("inference", "inductor", "cuda")


def test_attention_that_drops_weights_is_computed_once_after_its_mask_is_gone() -> None:
    from ridgeline.optimizer.backend import rewritten

    class Causal(torch.nn.Module):
        def forward(self, q: Any) -> Any:
            places = torch.arange(q.shape[-2])
            seen = places[:, None] >= places[None, :]
            return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=seen, dropout_p=0.1)

    found: list[Any] = []

    def keep(gm: Any, inputs: Any) -> Any:
        found.append(rewritten(gm, inputs, rewrites=["mask"]))
        return found[-1].gm

    torch.compile(Causal(), backend=keep)(torch.randn(2, 2, 8, 16, requires_grad=True))
    calls = [node for node in found[0].graph.nodes if "attention" in str(node.target)]
    assert len(calls) == 1 and calls[0].kwargs["is_causal"] and calls[0].kwargs["dropout_p"] == 0.1


def test_a_norm_that_adds_one_to_its_weight_still_does_behind_a_residual() -> None:
    def forward(self: Any, x: Any, h: Any) -> Any:
        total = x + h
        return total, total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + self.weight)

    model, report = spellings.Of(forward, weight=torch.randn(48) * 0.1), Report()
    args = torch.randn(3, 7, 48), torch.randn(3, 7, 48)
    fast = compiled(model, rewrites=("norm", "norm-residual"), report=report, fullgraph=True)
    with torch.no_grad():
        _close(fast(*args), model(*args), 2e-5)
    assert report.counts() == {"norm": 1, "norm-residual": 1}, report.refusals
