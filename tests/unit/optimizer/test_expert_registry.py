"""Mixtures of experts through transformers' registry: the same sums, the same state afterwards, what is left alone."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.integrations.moe")

from ridgeline.optimizer.in_place import attention_registry as hooks
from ridgeline.optimizer.in_place import expert_registry as experts
from ridgeline.optimizer.in_place.substitution import apply, revert


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels' references run here, so that what is substituted can be compared without a GPU."""
    monkeypatch.setattr(hooks, "RUNS_ON", frozenset({"cpu"}))
    torch.manual_seed(0)
    torch._dynamo.reset()


SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64,
}  # fmt: skip


def _model(kind: str, implementation: str = "grouped_mm") -> Any:
    t = transformers
    configs = {
        "mixtral": lambda: t.MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **SIZES),
        "qwen3": lambda: t.Qwen3MoeConfig(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48, head_dim=8,
                                          **SIZES),
    }  # fmt: skip
    model = t.AutoModelForCausalLM.from_config(configs[kind](), experts_implementation=implementation)
    return model.to(torch.bfloat16).eval()


def _ids() -> Any:
    return torch.randint(0, 50, (2, 9))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3"])
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_experts_compute_the_same_and_are_themselves_again(kind: str, implementation: str) -> None:
    model, ids = _model(kind, implementation), _ids()
    exact = _model(kind, "eager")
    exact.load_state_dict(model.state_dict())
    exact = exact.double()
    with torch.no_grad():
        meant, wide = model(ids).logits, exact(ids).logits
        done = apply(model, ("experts",))
        found = model(ids).logits
        assert done.counts() == {f"experts '{implementation}' → experts 'ridgeline'": 1}, str(done)
        far, own = ((each.double() - wide).norm() / wide.norm() for each in (found, meant))
        assert far <= 1.5 * own, (far, own)
        revert(model)
        assert model.config._experts_implementation_internal == implementation
        assert torch.equal(model(ids).logits, meant)


def _experts_of(model: Any) -> Any:
    return next(module for module in model.modules() if hasattr(module, "has_gate"))


def test_a_token_gets_its_own_experts_with_their_weights() -> None:
    module = _experts_of(_model("qwen3")).float()
    x, weights = torch.randn(5, 32), torch.rand(5, 3)
    index = torch.stack([torch.randperm(8)[:3] for _ in range(5)])
    index[2] = index[1]
    meant = torch.zeros(5, 32)
    for token in range(5):
        for place in range(3):
            gate, up = (module.gate_up_proj[index[token, place]] @ x[token]).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            meant[token] += weights[token, place] * (module.down_proj[index[token, place]] @ inner)
    module = module.bfloat16()
    with torch.no_grad():
        assert experts.takes(module, x.bfloat16(), weights)
        found = experts.experts(module, x.bfloat16(), index, weights).float()
    assert float((found - meant.detach()).norm() / meant.detach().norm()) < 1e-2


def test_what_is_not_plain_goes_to_transformers_own() -> None:
    module = _experts_of(_model("mixtral"))
    x, weights = torch.randn(5, 32).bfloat16(), torch.rand(5, 2)
    assert experts.takes(module.requires_grad_(False), x, weights)
    assert not experts.takes(module, x.float(), weights), "grouped products are bfloat16's"
    module.requires_grad_(True)
    assert not experts.takes(module, x, weights), "gradients are asked for"
    module.has_bias = True
    with torch.no_grad():
        assert not experts.takes(module, x, weights)


def test_gradients_flow_as_before() -> None:
    model, ids = _model("mixtral"), _ids()
    meant = torch.autograd.grad(model(ids).logits.float().square().mean(), list(model.parameters()), allow_unused=True)
    apply(model, ("experts",))
    found = torch.autograd.grad(model(ids).logits.float().square().mean(), list(model.parameters()), allow_unused=True)
    for a, b in zip(found, meant, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


def test_an_implementation_of_somebody_elses_is_left_alone() -> None:
    model = _model("mixtral")
    model.config._experts_implementation_internal = "deepgemm"
    done = apply(model, ("experts",))
    assert not done.replaced and "deepgemm" in str(done)


@pytest.mark.parametrize("width", [64, 1024, 2048, 2880, 3001])
def test_rows_wider_than_a_bags_are_summed_in_pieces(width: int) -> None:
    from ridgeline.optimizer.in_place.expert_registry import _summed

    torch.manual_seed(0)
    out, places, weights = torch.randn(14, width), torch.randperm(14).view(7, 2), torch.rand(7, 2)
    torch.testing.assert_close(_summed(out, places, weights), (out[places] * weights[..., None]).sum(1))


def test_a_tracer_sees_our_sum_over_experts_and_no_break() -> None:
    model, ids, seen = _model("qwen3"), _ids(), []

    def note(graph: Any, _: Any) -> Any:
        seen.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    with torch.no_grad():
        meant = model(ids, use_cache=False).logits
        apply(model, ("experts",))
        found = torch.compile(model, backend=note)(ids, use_cache=False).logits
        revert(model)
    assert len(seen) == 1 and sum("embedding_bag" in target for target in seen[0]) == 2
    assert (found - meant).norm() <= 0.02 * meant.norm()
