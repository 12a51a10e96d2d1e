"""The backend: modes, reports, graph breaks, staleness of what was folded or laid side by side, and whole models."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ridgeline.errors import OptimizeError
from ridgeline.optimizer.backend import Report, Traced, compiled
from ridgeline.optimizer.rewrites import rewrites

ALL = tuple(rewrites())


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 8), nn.Linear(16, 24), nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        return torch.cat((self.a(x).relu(), self.b(x), self.c(x).view(-1, 2, 4).flatten(1)), -1)


@pytest.mark.parametrize("compiler", ["none", "inductor"])
def test_weights_side_by_side_follow_every_change_of_the_parameters(compiler: str) -> None:
    model, x, report = Projections(), torch.randn(3, 16), Report()
    fast = compiled(model, rewrites=("horizontal",), compiler=compiler, report=report)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
        assert report.counts() == {"horizontal": 1}
        model.b.weight.mul_(3.0)
        model.a.bias.fill_(7.0)
        torch.testing.assert_close(fast(x), model(x))
        model.c.weight.data = torch.randn(8, 16)
        torch.testing.assert_close(fast(x), model(x))
        model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()})
        torch.testing.assert_close(fast(x), model(x))
        model.a.weight = nn.Parameter(torch.randn(8, 16))
        torch.testing.assert_close(fast(x), model(x))


def test_weights_side_by_side_cost_no_memory_and_come_apart_again() -> None:
    model, x, report = Projections(), torch.randn(3, 16), Report()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fast = compiled(model, rewrites=("horizontal",), report=report)
    with torch.no_grad():
        fast(x)
    weights = [model.a.weight, model.b.weight, model.c.weight]
    assert len({w.untyped_storage().data_ptr() for w in weights}) == 1
    assert weights[0].untyped_storage().nbytes() == sum(w.numel() for w in weights) * 4
    report.undo()
    assert len({w.untyped_storage().data_ptr() for w in weights}) == 3
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))


def test_laying_weights_side_by_side_compiles_once() -> None:
    model, x, report = Projections(), torch.randn(3, 16), Report()
    fast = compiled(model, rewrites=("horizontal",), report=report)
    with torch.no_grad():
        for _ in range(4):
            fast(x)
    assert report.graphs == 1


def test_one_compiled_block_serves_layers_with_their_own_weights() -> None:
    layers, x, report = [Projections() for _ in range(3)], torch.randn(3, 16), Report()
    fast = compiled(Projections.forward, rewrites=("horizontal",), report=report)
    with torch.no_grad():
        for _ in range(2):
            for layer in layers:
                torch.testing.assert_close(fast(layer, x), layer(x))
        places = [layer.a.weight.data_ptr() for layer in layers]
        fast(layers[0], x)
        assert [layer.a.weight.data_ptr() for layer in layers] == places
    assert report.counts() == {"horizontal": report.graphs}


def test_two_compiled_forms_of_a_model_share_one_layout() -> None:
    model, x = Projections(), torch.randn(3, 16)
    with torch.no_grad():
        first = compiled(model, rewrites=("horizontal",))
        first(x)
        place = model.a.weight.data_ptr()
        second = compiled(model, rewrites=("horizontal", "identity"))
        torch.testing.assert_close(second(x), model(x))
        torch.testing.assert_close(first(x), model(x))
    assert model.a.weight.data_ptr() == place


def test_a_graph_that_needs_gradients_keeps_its_products_apart() -> None:
    model, report = Projections(), Report()
    compiled(model, rewrites=("horizontal",), report=report)(torch.randn(3, 16)).sum().backward()
    assert report.counts() == {} and model.a.weight.grad is not None


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Any) -> Any:
        return self.norm(self.conv(x)).relu()


@pytest.mark.parametrize("compiler", ["none", "inductor"])
def test_a_folded_norm_notices_changed_weights_and_statistics(compiler: str) -> None:
    model, x, report = Convolved().eval(), torch.randn(2, 3, 6, 6), Report()
    fast = compiled(model, rewrites=("fold-norm",), compiler=compiler, report=report)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
        assert report.counts() == {"fold-norm": 1}
        model.norm.running_var.mul_(4.0)  # type: ignore[operator]
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
        model.conv.weight.data = torch.randn_like(model.conv.weight)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
        model.train()
        model(x)
        model.eval()
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(6, 6, dtype=torch.bool).tril())

    def forward(self, q: Any) -> Any:
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=self.seen)


def test_a_mask_read_from_a_buffer_is_watched() -> None:
    model, q, report = Masked(), torch.randn(1, 2, 6, 8), Report()
    fast = compiled(model, rewrites=("mask",), report=report)
    with torch.no_grad():
        torch.testing.assert_close(fast(q), model(q))
        assert report.counts() == {"mask": 1}
        model.seen[:, 0] = True  # type: ignore[index, operator]
        model.seen[0, 3] = True  # type: ignore[index, operator]
        torch.testing.assert_close(fast(q), model(q))


def test_a_report_names_modules_and_graph_breaks() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Sequential(nn.LayerNorm(8)), nn.LayerNorm(8)

        def forward(self, x: Any) -> Any:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    report = Report()
    with torch.no_grad():
        compiled(Broken(), rewrites=("norm-call",), report=report)(torch.randn(3, 8))
    assert report.graphs == 2 and report.places("norm-call") == ["first.0", "second"]
    assert sum(report.breaks.values()) == 1
    assert "norm-call ×2" in str(report) and report.as_dict()["graphs"] == 2


def test_unknown_names_are_refused_with_a_hint() -> None:
    with pytest.raises(OptimizeError, match="did you mean 'norm'"):
        compiled(nn.LayerNorm(4), rewrites=("nrom",))(torch.randn(2, 4))
    with pytest.raises(OptimizeError, match="inductor"):
        compiled(nn.LayerNorm(4), compiler="inductr")


def test_the_backend_is_known_to_torch_compile_by_name() -> None:
    import ridgeline.optimizer  # noqa: F401

    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.randn(3, 8)
    fast = torch.compile(model, backend="ridgeline", options={"compiler": "none", "rewrites": ["norm-call"]})
    torch.testing.assert_close(fast(x), model(x))
    found = torch.autograd.grad(fast(x).square().sum(), list(model.parameters()))
    for a, b in zip(found, torch.autograd.grad(model(x).square().sum(), list(model.parameters())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def _layer(width: int = 16) -> Any:
    """A decoder layer as models write it, everything in it to be found."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(width))

        def forward(self, x: Any) -> Any:
            h = x.to(torch.float32)
            return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = Norm(), Norm()
            self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
            self.gate, self.up, self.down = nn.Linear(width, 32), nn.Linear(width, 32), nn.Linear(32, width)

        def forward(self, x: Any) -> Any:
            b, n, _ = x.shape
            h = self.before(x)
            q, k, v = (p(h).view(b, n, 2, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
            scores = q @ k.transpose(-1, -2) / 8**0.5 + torch.triu(torch.full((n, n), float("-inf")), 1)
            x = x + self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, -1))
            h = self.after(x)
            return x + self.down(torch.nn.functional.silu(self.gate(h)) * self.up(h))

    return Layer()


@pytest.mark.parametrize("compiler", ["none", "inductor"])
def test_all_rewrites_together_on_a_decoder_layer(compiler: str) -> None:
    model, x, report = _layer(), torch.randn(2, 5, 16), Report()
    fast = compiled(model, rewrites=ALL, compiler=compiler, report=report)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    counts = report.counts()
    assert counts["norm"] == 2 and counts["norm-residual"] == 1 and counts["horizontal"] == 2
    assert counts["attention"] == 1 and counts["gate"] == 1
    assert not [r for r in report.refusals if "Error" in r.why]


def test_all_rewrites_together_train_a_decoder_layer() -> None:
    model, x, report = _layer(), torch.randn(2, 5, 16), Report()
    fast = compiled(model, rewrites=ALL, compiler="inductor", report=report)
    found = torch.autograd.grad(fast(x).square().mean(), list(model.parameters()))
    meant = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    for a, b in zip(found, meant, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    assert "horizontal" not in report.counts() and report.counts()["norm"] == 2


@pytest.mark.parametrize("compiler", ["none", "inductor"])
def test_under_autocast_kernels_find_its_casts_written_out(compiler: str) -> None:
    model, x, report = _layer(), torch.randn(2, 5, 16), Report()
    fast = compiled(model, rewrites=ALL, report=report, compiler=compiler)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found, meant = fast(x), model(x)
        assert torch.is_autocast_enabled("cpu")
    assert found.dtype == meant.dtype
    torch.testing.assert_close(found, meant, rtol=2e-2, atol=2e-2)
    assert report.casts > 0 and {"norm", "gate", "attention"} <= set(report.counts())


def test_our_attention_is_chosen_where_it_was_measured_faster() -> None:
    from torch._subclasses import FakeTensorMode

    from ridgeline.optimizer.rewrites.attention.backends import wins

    with FakeTensorMode():
        wide, narrow, one = (
            torch.empty(1, 32, rows, dim, device="cuda", dtype=torch.bfloat16)
            for rows, dim in ((4096, 128), (4096, 64), (1, 128))
        )
        assert wins(wide, causal=True, masked=False, training=False)
        assert not wins(wide, causal=True, masked=False, training=True)
        assert not wins(wide, causal=False, masked=False, training=False)
        assert not wins(narrow, causal=True, masked=False, training=False)
        assert wins(narrow, causal=False, masked=True, training=True)
        assert not wins(one, causal=False, masked=True, training=False)


def test_a_graph_that_no_rewrite_changes_is_left_to_torch_compile_where_asked() -> None:
    torch._dynamo.reset()
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()) for _ in range(60)))
    with pytest.raises(Exception, match=r"it would be torch\.compile"):
        compiled(plain, compiler="inductor", options={"matched": True})(torch.randn(2, 4))
    few = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    report = Report()
    compiled(few, rewrites=(), options={"matched": True}, report=report)(torch.randn(2, 4))
    assert report.graphs == 1


def test_a_norm_without_weights_is_left_to_a_compiler_that_fuses_it() -> None:
    from ridgeline.optimizer.backend import rewritten

    found: dict[str, int] = {}
    for compiler in ("none", "inductor"):
        torch._dynamo.reset()

        def keep(gm: Any, inputs: Any, compiler: str = compiler) -> Any:
            report = Report()
            rewritten(gm, inputs, rewrites=["norm-call"], compiler=compiler, report=report)
            found[compiler] = len(report.matches)
            return gm.forward

        x = torch.randn(8, 64, requires_grad=True)
        torch.compile(lambda x: nn.functional.layer_norm(x, (64,)), backend=keep)(x)
    assert found == {"none": 1, "inductor": 0}


def test_a_graph_lowered_a_second_time_has_fixed_sizes() -> None:
    """Compilers that are handed tensors in place of the tracer's stand-ins take every size for a variable one."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    x = torch.randn(2, 3, 9, 9)
    traced = Traced(model)
    seen: list[Any] = []

    def noting(gm: Any, inputs: list[Any], **given: Any) -> Any:
        seen.extend(inputs)
        return gm.forward

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        traced.lowered(rewrites=(), compiler="none")(x)
        patch.setattr("torch._inductor.compile_fx.compile_fx", noting)
        traced.lowered(rewrites=(), compiler="inductor")(x)
    assert seen and all(isinstance(each, FakeTensor) for each in seen)
    assert all(type(size) is int for each in seen for size in each.shape)
    assert (2, 3, 9, 9) in [tuple(each.shape) for each in seen]


def test_a_graph_lowered_again_is_compiled_for_weights_as_they_lie_now() -> None:
    """Guards know parameters by identity: channels last, they are the same ones."""
    model = nn.Conv2d(4, 8, 3)
    x = torch.randn(2, 4, 9, 9)
    traced = Traced(model)
    with torch.no_grad():
        traced.lowered(rewrites=(), compiler="none")(x)
        meant = model(x)
        model.weight.data = model.weight.data.contiguous(memory_format=torch.channels_last)
        found = traced.lowered(rewrites=(), compiler="inductor")(x)
    torch.testing.assert_close(found, meant, rtol=1e-5, atol=1e-5)


def test_a_compiled_form_keeps_no_model_alive_that_nobody_holds() -> None:
    """PyTorch keeps every backend it was given: one that knew its model kept all weights of all problems of a run."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(2, 8)
    traced = Traced(model)
    run = traced.lowered(rewrites=(), compiler="none")
    with torch.no_grad():
        run(x)
    gone = weakref.ref(model)
    del model, traced, run
    gc.collect()
    assert gone() is None


def test_a_weight_of_a_compiled_model_can_be_swapped() -> None:
    """PyTorch refuses to swap what has weak references: the graph's notes held one to every weight."""
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    fast = torch.compile(model, backend="ridgeline", options={"compiler": "none"})
    with torch.no_grad():
        fast(x)
        torch.utils.swap_tensors(model.weight, nn.Parameter(torch.ones(8, 8)))
        torch.testing.assert_close(fast(x), x.sum(1, keepdim=True).expand(4, 8) + model.bias)
