"""Graphs cut where blocks repeat: where the cuts are, that equal pieces are compiled once, and when nothing is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func

from ridgeline.optimizer import backend
from ridgeline.optimizer.backend import Report, Traced, rewritten
from ridgeline.optimizer.compile import pieces

WIDTH, NUM_LAYERS = 8, 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = torch.chunk(self.up(self.norm(x)), 2, dim=-1)
        mixed = torch.cat([torch.sigmoid(gate) * value, value], -1)
        for _ in range(6):
            mixed = mixed * 0.5 + mixed.tanh()
        return x + self.down(mixed)


class Tower(nn.Module):
    def __init__(self, make: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(make() for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x).softmax(-1)


class Counting:
    """A compiler that runs graphs as they are and remembers them."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, gm: Any, examples: list[Any]) -> Callable[..., Any]:
        self.seen.append(len(examples))
        return gm.forward


def traced(model: nn.Module, *args: Any) -> tuple[Callable[..., Any], Counting, list[int] | None]:
    """The model with its graph in pieces, the compiler that saw them, and how many nodes each has."""
    counting = Counting()
    sizes: list[int] | None = None

    def backend(gm: Any, examples: Any) -> Callable[..., Any]:
        nonlocal sizes
        ctx = rewritten(gm, examples, rewrites=())
        found = pieces.cut(ctx)
        sizes = None if found is None else [len(piece.nodes) for piece in found]
        return pieces.compiled_in_pieces(ctx, counting) or ctx.gm.forward

    fast = torch.compile(model, backend=backend, dynamic=False)
    fast(*args)
    return fast, counting, sizes


def test_equal_layers_are_compiled_once_and_give_the_same_numbers() -> None:
    model, x = Tower(), torch.randn(4, WIDTH)
    fast, counting, sizes = traced(model, x)
    assert sizes is not None and len(sizes) == NUM_LAYERS + 2 and len(set(sizes[1:-1])) == 1
    assert len(counting.seen) == 3, "what is before the layers, one layer, what is behind them"
    again = torch.randn(4, WIDTH)
    assert torch.equal(fast(again), model(again))


def test_gradients_pass_through_the_pieces() -> None:
    model, x = Tower(), torch.randn(4, WIDTH, requires_grad=True)
    fast, counting, _ = traced(model, x)
    wanted = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    found = torch.autograd.grad(fast(x).square().sum(), [x, *model.parameters()])
    assert len(counting.seen) == 3
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_gradients_pass_where_a_rewrite_reaches_over_a_seam() -> None:
    """The sum of a layer and the norm of the next are one kernel: what it made was thought to need no gradient."""
    seen = []

    def compiler(gm: Any, examples: list[Any]) -> Callable[..., Any]:
        seen.append([tuple(each.shape) for each in examples if each.requires_grad and each.dim() == 2])
        return aot_module_simplified(gm, examples, fw_compiler=lambda graph, _: make_boxed_func(graph))

    def backend(gm: Any, examples: Any) -> Callable[..., Any]:
        report = Report()
        ctx = rewritten(gm, examples, rewrites=("norm-call", "norm-residual"), report=report)
        assert report.counts()["norm-residual"] == NUM_LAYERS - 1
        chain = pieces.compiled_in_pieces(ctx, compiler)
        assert chain is not None
        return chain

    torch.manual_seed(0)
    model, x = Tower(), torch.randn(4, WIDTH)
    fast = torch.compile(model, backend=backend, dynamic=False)
    wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    found = torch.autograd.grad(fast(x).square().sum(), list(model.parameters()))
    assert len(seen) < NUM_LAYERS
    apart = [float((a - b).norm() / a.norm()) for a, b in zip(wanted, found, strict=True)]
    assert max(apart) < 1e-4, apart


def test_layers_that_differ_in_a_number_are_compiled_apart() -> None:
    model = Tower()
    model.layers[2].norm.eps = 0.5
    _, counting, _ = traced(model, torch.randn(4, WIDTH))
    assert len(counting.seen) == 4, "what is before, the layers, the odd one and what is behind"


class Stage(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(5))
        self.scale = width

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def test_layers_within_unlike_stages_are_found() -> None:
    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList(Stage(n) for n in (2, 3))

        def forward(self, x: Tensor) -> Tensor:
            for stage in self.stages:
                x = stage(x)
            return x

    model, x = Stages(), torch.randn(4, WIDTH)
    fast, counting, sizes = traced(model, x)
    assert sizes is not None and len(counting.seen) <= 4 and torch.equal(fast(x), model(x))


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(12):
            x = self.conv(x.unsqueeze(1)).squeeze(1).tanh()
        return x


def test_convolutions_stay_together_because_a_compiler_chooses_their_layout() -> None:
    assert traced(Tower(Convolved), torch.randn(4, WIDTH))[2] is None


class WritesThroughViews(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y[0].zero_()
        return y


def test_memory_with_two_names_at_a_seam_is_not_written_by_a_piece() -> None:
    class Shared(Tower):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            row = x[1]
            for layer in self.layers:
                x.add_(layer(x))
            return self.last(x) + row.sum()

    model, x = Shared(), torch.randn(4, WIDTH)
    fast, _, sizes = traced(model, x)
    assert sizes is None and torch.equal(fast(x), model(x))


def test_memory_of_one_name_may_be_written() -> None:
    model, x = Tower(WritesThroughViews), torch.randn(4, WIDTH)
    fast, counting, sizes = traced(model, x)
    assert torch.equal(fast(x), model(x))
    assert sizes is None or len(counting.seen) < len(sizes)


def test_a_model_is_traced_once_for_many_ways_to_lower_it() -> None:
    model, x = Tower(), torch.randn(4, WIDTH)
    traced_model = Traced(model)
    reports = [Report(), Report()]
    plain = traced_model.lowered(rewrites=(), report=reports[0])
    with torch.no_grad():
        expected = model(x)
        assert torch.equal(plain(x), expected)
        torch._dynamo.utils.counters.clear()
        other = traced_model.lowered(rewrites=("identity",), compiler="inductor", report=reports[1])
        assert torch.allclose(other(x), expected, atol=1e-6)
        num_traced = torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)
        assert torch.equal(plain(x), expected), "the first way still runs"
    assert num_traced == 0, "the second way needed no trace"
    assert [report.graphs for report in reports] == [1, 1]


def test_what_was_made_for_a_way_goes_with_its_call() -> None:
    model, x = Tower(), torch.randn(4, WIDTH)
    traced_model = Traced(model)
    graphs = []
    collected = traced_model._collector.collected

    def keep(gm: Any, examples: Any) -> Any:
        graphs.append(collected(gm, examples))
        return graphs[-1]

    traced_model._run = torch.compile(model, backend=keep, dynamic=False)
    first, second = traced_model.lowered(rewrites=()), traced_model.lowered(rewrites=())
    first(x), second(x)
    assert len(graphs) == 1 and len(graphs[0].calls) == 2
    del first
    assert len(graphs[0].calls) == 1
    second(x)


def _decoder() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import Qwen3Config, Qwen3Model

    config = Qwen3Config(hidden_size=32, intermediate_size=64, num_hidden_layers=5, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=8, vocab_size=99)  # fmt: skip
    return Qwen3Model(config), {"input_ids": torch.randint(0, 99, (2, 12)), "use_cache": False}


def _both() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import T5Config, T5Model

    config = T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=5, num_heads=4, vocab_size=99, dropout_rate=0.0)
    ids = torch.randint(0, 99, (2, 10))
    return T5Model(config), {"input_ids": ids, "decoder_input_ids": ids[:, :6]}


@pytest.mark.parametrize("make", [_decoder, _both])
@pytest.mark.parametrize("training", [False, True])
def test_networks_in_pieces_compute_what_they_do_whole(
    make: Callable[[], tuple[nn.Module, dict[str, Any]]], training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    from torch._dynamo.backends.debugging import aot_eager

    compiled: list[int] = []

    def lowered(ctx: Any, inputs: Any, compiler: str, options: Any) -> Callable[..., Any]:
        chain = pieces.compiled_in_pieces(ctx, lambda gm, ex: (compiled.append(1), aot_eager(gm, ex))[1])
        assert chain is not None
        return chain

    monkeypatch.setattr(backend, "_lowered", lowered)
    torch.manual_seed(0)
    model, kwargs = make()
    model.train(training)
    fast = backend.compiled(model, compiler="inductor")
    with torch.set_grad_enabled(training):
        expected, found = model(**kwargs)[0], fast(**kwargs)[0]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert 3 <= len(compiled) <= 5, "what is before, between and behind, and a layer of each kind"
        if training:
            weights = list(model.parameters())
            probe = torch.randn_like(expected)
            wanted = torch.autograd.grad((expected * probe).sum(), weights)
            given = torch.autograd.grad((found * probe).sum(), weights)
            for a, b in zip(given, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
