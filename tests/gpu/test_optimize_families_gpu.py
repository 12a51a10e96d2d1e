"""Recommenders, dropout, autocast and experts on a GPU: rewritten and substituted code computes what eager does."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.engine.example_inputs import Inputs
from ridgeline.optimizer.backend import Report, compiled
from ridgeline.optimizer.in_place.substitution import apply, revert
from ridgeline.optimizer.rewrites import recommended
from ridgeline.optimizer.search.candidate import Candidate, build

TABLES, DIM, BATCH = 8, 64, 512


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(1000 + 7 * i, DIM, mode="sum") for i in range(TABLES))
        self.bottom, self.top = nn.Linear(13, DIM), nn.Linear(DIM + 36, 1)
        self.crosses = nn.ModuleList(nn.Linear(DIM + 36, DIM + 36) for _ in range(2))
        self.register_buffer("pairs", torch.triu_indices(TABLES + 1, TABLES + 1, 1))

    def forward(self, x: Tensor, ids: list[Tensor], offsets: list[Tensor]) -> Tensor:
        x = self.bottom(x)
        rows = [bag(i, o) for bag, i, o in zip(self.bags, ids, offsets, strict=True)]
        both = torch.stack([x, *rows], 1)
        z = torch.bmm(both, both.transpose(1, 2))
        y0 = y = torch.cat([x, z[:, self.pairs[0], self.pairs[1]]], 1)
        for cross in self.crosses:
            y = y0 * cross(y) + y
        return self.top(y)


def _recommender(dtype: torch.dtype) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    model = Recommender().cuda().to(dtype)
    for bag in model.bags:
        bag.weight.data.mul_(0.1)
    ids, offsets = [], []
    for i in range(TABLES):
        lengths = torch.randint(0, 5, (BATCH,), device="cuda")
        ids.append(torch.randint(0, 1000 + 7 * i, (int(lengths.sum()),), device="cuda"))
        offsets.append(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)[:-1]]))
    return model, (torch.randn(BATCH, 13, device="cuda", dtype=dtype), ids, offsets)


def _far(found: Tensor, meant: Tensor) -> float:
    return float((found.detach().double() - meant.detach().double()).norm() / meant.detach().double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("graphed", [False, True])
def test_a_recommender_is_one_launch_a_part_and_computes_the_same(dtype: torch.dtype, graphed: bool) -> None:
    model, args = _recommender(dtype)
    model.eval()
    candidate = Candidate(name="r", rewrites=("bags", "interaction", "cross"), graphed=graphed)
    built = build(candidate, model, Inputs(args), "infer")
    assert built.report.counts() == {"bags": 1, "interaction": 1, "cross": 2}, built.report.refusals
    with torch.no_grad():
        wide = Recommender().cuda().double()
        wide.load_state_dict(model.state_dict())
        meant = wide(args[0].double(), *args[1:])
        assert _far(built.call(*args), meant) < 2 * _far(model(*args), meant) + 1e-6


def test_a_recommender_trains_with_the_same_gradients() -> None:
    model, args = _recommender(torch.float32)
    report = Report()
    fast = compiled(model, rewrites=("bag", "interaction", "cross"), report=report, fullgraph=True)
    found = torch.autograd.grad(fast(*args).square().mean(), list(model.parameters()))
    meant = torch.autograd.grad(model(*args).square().mean(), list(model.parameters()))
    assert report.counts() == {"bag": TABLES, "interaction": 1, "cross": 2}
    for a, b in zip(found, meant, strict=True):
        assert _far(a, b) < 1e-3


def test_dropout_with_its_sum_keeps_its_share_and_its_gradient() -> None:
    x, residual = (torch.randn(4096, 1024, device="cuda", requires_grad=True) for _ in range(2))
    report = Report()
    fast = compiled(lambda a, b: F.dropout(a, 0.3, True) + b, rewrites=("dropout-add",), report=report, fullgraph=True)
    y = fast(x, residual)
    dx, dr = torch.autograd.grad(y.sum(), (x, residual))
    kept = dx != 0
    assert report.counts() == {"dropout-add": 1}
    assert abs(float(kept.float().mean()) - 0.7) < 0.01 and torch.equal(dr, torch.ones_like(dr))
    torch.testing.assert_close(y - residual, torch.where(kept, x / 0.7, 0.0), rtol=1e-5, atol=1e-5)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(256), nn.Linear(256, 768), nn.Linear(256, 256)
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 64)).transpose(1, 3).unbind(2)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("compiler", ["none", "inductor"])
@pytest.mark.parametrize("training", [False, True])
def test_rewrites_work_under_autocast_with_its_casts(compiler: str, training: bool) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x, report = Layer().cuda(), torch.randn(4, 128, 256, device="cuda"), Report()
    names = recommended("training" if training else "inference", compiler)
    fast = compiled(model, rewrites=names, compiler=compiler, report=report, fullgraph=True)
    wide = Layer().cuda().double()
    wide.load_state_dict(model.state_dict())
    with torch.set_grad_enabled(training):
        with torch.autocast("cuda", torch.bfloat16):
            found, eager = fast(x), model(x)
        meant = wide(x.double())
    assert found.dtype == eager.dtype and report.casts > 0
    assert _far(found, meant) < 2 * _far(eager, meant) + 1e-4
    if training:
        ours, theirs = (
            torch.autograd.grad(y.float().square().mean(), list(model.parameters())) for y in (found, eager)
        )
        exact = torch.autograd.grad(meant.square().mean(), list(wide.parameters()))
        for a, b, c in zip(ours, theirs, exact, strict=True):
            assert a.dtype == b.dtype and _far(a, c) < 2 * _far(b, c) + 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_in_place_work_under_autocast(dtype: Any) -> None:
    """Norms, the loss and an odd vocabulary, with weights as mixed training keeps them; types are eager's."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=8401, hidden_size=512, num_hidden_layers=2, num_attention_heads=8,
                                      num_key_value_heads=4, intermediate_size=1024)  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to("cuda", dtype)
    wide = transformers.LlamaForCausalLM(config).cuda().double()
    wide.load_state_dict(model.state_dict())
    ids = torch.randint(0, 8401, (4, 128), device="cuda")
    kwargs = {"input_ids": ids, "labels": ids, "use_cache": False}

    def step() -> tuple[Any, list[Tensor]]:
        with torch.autocast("cuda", torch.bfloat16):
            found = model(**kwargs)
        return found, list(torch.autograd.grad(found.loss, list(model.parameters())))

    eager, theirs = step()
    with torch.autocast("cuda", torch.bfloat16):
        done = apply(model).counts()
    assert done["an odd linear layer → padded_linear"] == 1 and done["LlamaRMSNorm → rms_norm"] == 5
    found, ours = step()
    revert(model)
    exact = torch.autograd.grad(wide(**kwargs).loss, list(wide.parameters()))
    assert found.loss.dtype == eager.loss.dtype and found.logits.dtype == eager.logits.dtype
    assert _far(found.logits, eager.logits) < 0.02
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert a.dtype == b.dtype and _far(a, c) < 2 * _far(b, c) + 1e-3


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_experts_compute_the_same_through_the_registry(tokens: int) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("transformers.integrations.moe")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(vocab_size=1000, hidden_size=512, num_hidden_layers=2, num_attention_heads=8,
                                         num_key_value_heads=4, num_experts=16, num_experts_per_tok=4,
                                         moe_intermediate_size=256, head_dim=64)  # fmt: skip
    model = transformers.Qwen3MoeModel(config).cuda().bfloat16().eval()
    ids = torch.randint(0, 1000, (1, tokens), device="cuda")
    with torch.no_grad():
        meant = model(ids).last_hidden_state
        assert apply(model, ("experts",)).replaced
        found = model(ids).last_hidden_state
        revert(model)
    assert _far(found, meant) < 2e-2
