"""Rewrites and substituted kernels on a GPU: every spelling in two types, whole models, a training step."""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from ridgeline.optimizer.backend import Report, compiled
from ridgeline.optimizer.in_place.substitution import apply, revert
from ridgeline.optimizer.rewrites import recommended, rewrites

_path = Path(__file__).resolve().parents[1] / "unit" / "optimizer" / "spellings.py"
_spec = importlib.util.spec_from_file_location("spellings", _path)
assert _spec is not None and _spec.loader is not None
spellings = importlib.util.module_from_spec(_spec)
sys.modules["spellings"] = spellings
_spec.loader.exec_module(spellings)


def _error(found: Any, meant: Any) -> float:
    leaves = torch.utils._pytree.tree_leaves
    worst = 0.0
    for a, b in zip(leaves(found), leaves(meant), strict=True):
        size = b.double().square().mean().sqrt().clamp_min(1e-30)
        worst = max(worst, float((a.double() - b.double()).square().mean().sqrt() / size))
    return worst


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", spellings.SPELLINGS, ids=lambda case: case.name)
def test_a_spelling_is_as_right_as_eager(case: Any, dtype: Any) -> None:
    model, args = case.make()
    wide = copy.deepcopy(model).double().cuda()
    model = model.to("cuda", dtype)
    args = tuple(x.cuda().to(dtype) if x.is_floating_point() else x.cuda() for x in args)
    trains = "inference" not in rewrites()[case.rewrite].modes
    fast = compiled(model, rewrites=(case.rewrite,), options={"attention": "always"})
    with torch.set_grad_enabled(trains):
        meant = wide(*(x.double() if x.is_floating_point() else x for x in args))
        ours, theirs = _error(fast(*args), meant), _error(model(*args), meant)
    assert ours <= 2 * theirs + (3e-3 if dtype is torch.bfloat16 else 1e-6)


def _llama() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=512,
    )
    return transformers.LlamaForCausalLM(config).eval().to("cuda", torch.bfloat16)


@pytest.mark.parametrize("compiler", ["none", "inductor"])
def test_a_model_with_all_recommended_rewrites_is_as_right_as_eager(compiler: str) -> None:
    model, ids, report = _llama(), torch.randint(0, 500, (2, 64), device="cuda"), Report()
    wide = copy.deepcopy(model).float()
    names = recommended("inference", compiler, "cuda")
    fast = compiled(model, rewrites=names, compiler=compiler, report=report)
    with torch.no_grad():
        meant = wide(ids).logits
        ours, theirs = _error(fast(ids).logits, meant), _error(model(ids).logits, meant)
    assert ours <= 2 * theirs + 1e-3
    assert not [r for r in report.refusals if "Error" in r.why]


def test_a_step_with_all_recommended_rewrites_has_the_gradients_of_eager() -> None:
    model, ids = _llama(), torch.randint(0, 500, (2, 64), device="cuda")
    wide = copy.deepcopy(model).float()
    fast = compiled(model, rewrites=recommended("training", "inductor", "cuda"), compiler="inductor")

    def gradients(call: Any, of: Any) -> list[Any]:
        return list(torch.autograd.grad(call(ids, labels=ids).loss, list(of.parameters())))

    meant = gradients(wide, wide)
    ours, theirs = _error(gradients(fast, model), meant), _error(gradients(model, model), meant)
    assert ours <= 2 * theirs + 1e-3


def test_a_model_with_kernels_in_place_is_as_right_as_eager_and_comes_back() -> None:
    model, ids = _llama(), torch.randint(0, 500, (2, 64), device="cuda")
    wide = copy.deepcopy(model).float()
    with torch.no_grad():
        meant, eager = wide(ids).logits, model(ids).logits
        apply(model)
        ours = _error(model(ids).logits, meant)
        revert(model)
        assert torch.equal(model(ids).logits, eager)
    assert ours <= 2 * _error(eager, meant) + 1e-3
