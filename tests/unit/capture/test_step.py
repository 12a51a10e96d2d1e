"""What a capture writes down: operators, places, lifetimes and kinds, with the model left as it was."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn

from ridgeline.capture import capture, cost_of, spec
from ridgeline.capture.translate import UnknownOp
from ridgeline.errors import CaptureError
from ridgeline.graph import Kind, Phase
from ridgeline.graph.verify import problems

from .conftest import Mlp, kernels_of, live_bytes, nodes_of, ops_of

X = torch.empty(8, 16, device="meta")


def test_a_linear_layer_is_one_matmul_with_bias_at_its_module_and_line() -> None:
    graph = capture(nn.Sequential(nn.Linear(16, 32)), (X,))
    matmul = next(n for n in nodes_of(graph) if n.op == "matmul")
    assert {k: matmul.attrs[k] for k in "bmnk"} == {"b": 1, "m": 8, "n": 32, "k": 16}
    assert matmul.attrs["bias"]
    assert matmul.attrs["trans_b"]
    assert matmul.module == "0"
    assert matmul.source.startswith("test_step:")
    assert matmul.target == "aten.addmm.default"


def test_views_are_nodes_and_own_no_memory() -> None:
    graph = capture(nn.Flatten(), (torch.empty(2, 3, 4, device="meta"),))
    view = nodes_of(graph)[0]
    assert view.op == "view"
    assert graph.values[view.outputs[0]].num_bytes == 0
    assert graph.values[view.outputs[0]].alias == view.inputs[0]


def test_training_has_forward_backward_and_a_steady_state_optimizer_step() -> None:
    graph = capture(Mlp(2), (X,), mode="train", fold=False)
    phases = [n.phase for n in nodes_of(graph)]
    assert phases == sorted(phases, key=[Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER].index)
    assert "foreach" in ops_of(graph, "optimizer")
    params = [v for v in graph.values if v.kind is Kind.PARAM and v.alias is None]
    states = [v for v in graph.values if v.kind is Kind.STATE and v.alias is None]
    grads = [v for v in graph.values if v.kind is Kind.GRAD and v.alias is None]
    assert sum(v.num_bytes for v in states) == 2 * sum(v.num_bytes for v in params)
    assert sum(v.num_bytes for v in grads) == sum(v.num_bytes for v in params)


def test_backward_nodes_belong_to_the_module_of_their_forward() -> None:
    graph = capture(Mlp(2), (X,), mode="train", fold=False)
    gelu_grad = [n for n in nodes_of(graph) if n.attrs.get("fn") == "gelu_backward"]
    assert [n.module for n in gelu_grad] == ["layers.1.2", "layers.0.2"]
    assert all(n.source.startswith("conftest:") for n in gelu_grad)


@pytest.mark.parametrize(
    "optimizer", ["adamw", "adam", "sgd", "sgd_momentum", "adamw_fused", "adagrad", "rmsprop", None]
)
def test_optimizers_by_name(optimizer: str | None) -> None:
    graph = capture(Mlp(2), (X,), mode="train", optimizer=optimizer)
    assert bool(ops_of(graph, "optimizer")) is (optimizer is not None)
    assert not problems(graph)


def test_an_optimizer_of_the_callers_own() -> None:
    graph = capture(Mlp(2), (X,), mode="train", optimizer=lambda p: torch.optim.NAdam(p, foreach=True))
    assert "foreach" in ops_of(graph, "optimizer")


def test_an_unknown_optimizer_suggests_the_nearest() -> None:
    with pytest.raises(CaptureError, match="did you mean 'adamw'"):
        capture(Mlp(2), (X,), mode="train", optimizer="adam_w")


def test_a_loss_of_the_callers_own_starts_the_backward_pass() -> None:
    graph = capture(nn.Linear(16, 4), (X,), mode="train", optimizer=None, loss=lambda out: out.square().sum())
    assert "pow" in {n.attrs.get("fn") for n in nodes_of(graph)}


def test_a_model_without_anything_to_train_says_so() -> None:
    with pytest.raises(CaptureError, match="pass loss="):
        capture(nn.ReLU(), (X,), mode="train")


def test_everything_made_in_a_forward_pass_is_freed_but_the_output() -> None:
    graph = capture(Mlp(4), (X,), fold=False)
    output_bytes = sum(graph.values[o].num_bytes for o in graph.outputs)
    assert live_bytes(graph)[-1] == output_bytes == 8 * 16 * 4


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.LSTM(16, 16))
    model[1].eval()
    weight, before = model[0].weight, {k: v.clone() for k, v in model.state_dict().items()}
    flags = [m.training for m in model.modules()]
    x, draws = torch.randn(8, 16), torch.get_rng_state()
    capture(nn.Sequential(*list(model)[:3]), (x,), mode="train")
    assert model[0].weight is weight
    assert model[0].weight.grad is None
    assert [m.training for m in model.modules()] == flags
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), draws)
    assert type(nn.Module.__call__) is type(lambda: 0)
    assert model[3](torch.randn(2, 1, 16))[0].shape == (2, 1, 16)


def test_a_failed_capture_leaves_no_trace_either() -> None:
    model = nn.Linear(16, 16)
    with pytest.raises(
        CaptureError, match=r"aten::addmm' called in module 'Linear', test_step:\d+, does not take"
    ):
        capture(model, (torch.randn(8, 5),))
    assert type(model.weight) is nn.Parameter
    assert torch.randn(2, 16).device.type == "cpu"
    assert model(torch.randn(2, 16)).shape == (2, 16)


def test_tied_weights_are_one_parameter() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(100, 16), nn.Linear(16, 100, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Any) -> Any:
            return self.head(self.embed(ids))

    graph = capture(Tied(), (torch.zeros(2, 4, dtype=torch.int64),), mode="train")
    assert graph.num_params == 1600
    grads = [v for v in graph.values if v.kind is Kind.GRAD and v.alias is None]
    assert sum(v.num_bytes for v in grads) == 6400


def test_activation_checkpointing_recomputes_and_holds_less() -> None:
    big = torch.empty(4096, 16, device="meta")
    plain = capture(Mlp(8), (big,), mode="train", optimizer=None, fold=False)
    cheap = capture(Mlp(8, checkpointed=True), (big,), mode="train", optimizer=None, fold=False)
    assert max(live_bytes(cheap)) < 0.5 * max(live_bytes(plain))
    recomputed = [n for n in nodes_of(cheap) if n.phase == "backward" and n.attrs.get("fn") == "gelu"]
    assert len(recomputed) == 8
    assert recomputed[0].module == "layers.7.2"


def test_control_flow_on_shapes_and_integers_is_real() -> None:
    class Branching(nn.Module):
        def forward(self, x: Any, lengths: Any) -> Any:
            if x.shape[0] > 4 and lengths.max().item() == 3:
                return x[lengths > 1].exp()
            return x.sin()

    graph = capture(Branching(), (torch.empty(6, 2, device="meta"), torch.tensor([0, 1, 2, 3, 2, 1])))
    exp = next(n for n in nodes_of(graph) if n.attrs.get("fn") == "exp")
    assert graph.out_types(exp)[0].shape == (3, 2)
    assert "sync" in kernels_of(graph)
    assert "nonzero" in kernels_of(graph)


def test_checks_over_unknown_floats_pass_and_are_noted() -> None:
    class Checked(nn.Module):
        def forward(self, x: Any) -> Any:
            if torch.isnan(x).any():
                raise ValueError("not a number")
            return x.relu()

    graph = capture(Checked(), (X,))
    assert "relu" in {n.attrs.get("fn") for n in nodes_of(graph)}
    assert any("any(...) is False" in a for a in graph.meta["assumptions"])


def test_routing_is_assumed_balanced() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(16, 4)
            self.experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])

        def forward(self, x: Any) -> Any:
            _, index = self.gate(x).topk(2, dim=-1)
            out = torch.zeros_like(x)
            for e, expert in enumerate(self.experts):
                rows, _ = torch.where(index == e)
                out.index_add_(0, rows, expert(x[rows]))
            return out

    graph = capture(Router(), (X,), fold=False)
    experts = [n.attrs["m"] for n in nodes_of(graph) if n.op == "matmul" and n.module.startswith("experts")]
    assert experts == [4, 4, 4, 4]
    assert any("balanced" in a for a in graph.meta["assumptions"])


def test_a_compiled_model_is_captured_as_it_is_written() -> None:
    assert kernels_of(capture(torch.compile(Mlp(2)), (X,))) == kernels_of(capture(Mlp(2), (X,)))


def test_inference_mode_inside_the_model_dispatches_the_same() -> None:
    class Inferring(Mlp):
        @torch.inference_mode()
        def forward(self, x: Any) -> Any:
            return super().forward(x)

    assert kernels_of(capture(Inferring(2), (X,))) == kernels_of(capture(Mlp(2), (X,)))


def test_devices_named_in_the_model_are_the_accelerator_and_the_host() -> None:
    class Moving(nn.Module):
        def forward(self, x: Any) -> Any:
            x = x.to("cuda")
            assert x.is_cuda
            assert x.device.type == "cuda"
            torch.cuda.synchronize()
            scale = torch.tensor([2.0] * 16).to(x.device)
            y = (x * scale).cpu()
            assert y.device.type == "cpu"
            return (y + 1).cuda() + torch.zeros(16, device="cuda")

    graph = capture(Moving(), (X,))
    assert [n.attrs["direction"] for n in nodes_of(graph) if n.op == "transfer"] == ["h2d", "d2h", "h2d"]
    assert [n.attrs["fn"] for n in nodes_of(graph) if n.op == "pointwise"] == ["mul", "add"]
    assert "add" in {n.attrs["fn"] for n in nodes_of(graph) if n.op == "host"}


def test_gradients_that_meet_are_added_in_place() -> None:
    graph = capture(Mlp(3), (torch.empty(8, 16, device="meta", requires_grad=True),), mode="train", optimizer=None)
    sums = [n for n in nodes_of(graph) if n.phase == "backward" and n.attrs.get("fn") == "add"]
    assert sums
    assert all(n.attrs.get("inplace") for n in sums)


def test_named_dims_are_bound_and_an_unbound_one_is_named() -> None:
    graph = capture(Mlp(2), (spec(("batch", 16), "fp32"),), bindings={"batch": 24})
    assert graph.values[graph.inputs[0]].type.shape == (24, 16)
    with pytest.raises(CaptureError, match="dim 'batch' of input '0' has no size"):
        capture(Mlp(2), (spec(("batch", 16), "fp32"),))


def test_tensors_inside_objects_become_inputs_and_the_objects_stay_untouched() -> None:
    class Holder:
        def __init__(self, t: Any) -> None:
            self.items = [{"t": t}]

    class Reads(nn.Module):
        def forward(self, holder: Holder) -> Any:
            holder.items[0]["t"] = holder.items[0]["t"] + 1
            return holder.items[0]["t"]

    given = Holder(torch.zeros(4))
    graph = capture(Reads(), (given,))
    assert graph.values[graph.inputs[0]].name == "0.items.0.t"
    assert torch.equal(given.items[0]["t"], torch.zeros(4))
    assert graph.meta["donated"] == [graph.inputs[0]]


def test_lazy_parameters_name_the_cure() -> None:
    with pytest.raises(CaptureError, match="run the model once"):
        capture(nn.LazyLinear(4), (X,))


@pytest.fixture(scope="module")
def scaled() -> Any:
    @torch.library.custom_op("ridgeline_tests::scaled", mutates_args=())
    def scaled(x: torch.Tensor, by: int) -> torch.Tensor:
        return x * by

    @scaled.register_fake
    def _(x: torch.Tensor, by: int) -> torch.Tensor:
        return torch.empty_like(x)

    class Scaled(nn.Module):
        def forward(self, x: Any) -> Any:
            return scaled(x, 3)

    return Scaled()


def test_an_op_nobody_knows_is_an_error_with_the_cure_until_its_cost_is_declared(scaled: Any) -> None:
    with pytest.raises(UnknownOp, match=r"declare what it costs with @ridgeline\.cost_of"):
        capture(scaled, (X,))

    @cost_of("ridgeline_tests::scaled")
    def cost(inputs: Any, outputs: Any, by: int) -> dict[str, float]:
        return {"flops": by * inputs[0].numel}

    node = nodes_of(capture(scaled, (X,)))[0]
    assert node.op == "custom"
    assert node.attrs["flops"] == 3 * 128
    assert node.attrs["read_bytes"] == node.attrs["written_bytes"] == 512
    with pytest.raises(CaptureError, match="declared twice"):
        cost_of("ridgeline_tests::scaled")(cost)


def test_a_mode_that_is_none_says_which_there_are() -> None:
    with pytest.raises(CaptureError, match="'infer' and 'train'"):
        capture(Mlp(2), (X,), mode="eval")


def test_module_calls_are_counted_for_the_host() -> None:
    graph = capture(Mlp(2), (X,), fold=False)
    assert sum(n.attrs.get("calls", 0) for n in nodes_of(graph)) == 1 + 2 * 5


def test_no_source_names_a_machines_folders() -> None:
    graph = capture(Mlp(2), (X,), mode="train")
    assert not any("/" in n.source or "/" in n.module for n in nodes_of(graph))


def test_packed_sequences_run_their_real_lengths() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(8, 16, batch_first=True)

        def forward(self, x: Any, lengths: Any) -> Any:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]

    graph = capture(Packed(), (torch.empty(3, 12, 8, device="meta"), torch.tensor([10, 8, 5])), mode="train")
    rnn = next(n for n in nodes_of(graph) if n.op == "rnn")
    assert graph.in_types(rnn)[0].shape == (23, 8)
    assert graph.mode == "train"


def test_sparse_gradients_and_hidden_kernels_name_the_cure() -> None:
    with pytest.raises(CaptureError, match="sparse=False"):
        capture(nn.Embedding(10, 4, sparse=True), (torch.tensor([1, 2]),), mode="train", optimizer=None)

    class Flex(nn.Module):
        def forward(self, q: Any) -> Any:
            from torch.nn.attention.flex_attention import flex_attention

            return flex_attention(q, q, q)

    with pytest.raises(CaptureError, match="hides what it runs"):
        capture(Flex(), (torch.empty(1, 2, 128, 16, device="meta"),))


def test_caches_a_model_keeps_are_emptied_of_fakes() -> None:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache: dict[str, Any] = {}

        def forward(self, x: Any) -> Any:
            if "positions" not in self.cache:
                self.cache["positions"] = torch.arange(16, device=x.device)
            return x + self.cache["positions"]

    model = Caching()
    assert [n.op for n in nodes_of(capture(model, (X,)))] == ["fill", "pointwise"]
    assert model.cache == {}


def test_something_that_is_no_module_says_so() -> None:
    with pytest.raises(CaptureError, match=r"no torch\.nn\.Module"):
        capture(lambda x: x, (X,))
