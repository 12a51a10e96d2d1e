"""Kernels in Hugging Face models: what is found, that it computes the same, and that taking it out leaves no trace."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
transformers = pytest.importorskip("transformers")

from torch import nn

import ridgeline as rl
from ridgeline.errors import OptimizeError
from ridgeline.optimizer.in_place import attention_registry as hooks
from ridgeline.optimizer.in_place import substitution
from ridgeline.optimizer.in_place.attributes import place
from ridgeline.optimizer.in_place.recognition import gated_of, norm_of, rotary_of
from ridgeline.optimizer.in_place.substitution import apply, revert

SMALL: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels' references run here, so that what is substituted can be compared without a GPU."""
    monkeypatch.setattr(hooks, "RUNS_ON", frozenset({"cpu"}))
    torch.manual_seed(0)
    torch._dynamo.reset()


def _lm(config: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_config(config)


def _models() -> dict[str, tuple[Any, dict[str, int]]]:
    t = transformers
    rotary = {"apply_rotary_pos_emb → rope": 2, "ForCausalLMLoss → cross_entropy": 1}
    attention = {"attention 'sdpa' → attention 'ridgeline'": 1}
    return {
        "llama": (lambda: _lm(t.LlamaConfig(num_key_value_heads=2, **SMALL)),
                  {"LlamaRMSNorm → rms_norm": 5, "LlamaMLP → swiglu": 2} | rotary | attention),
        "gemma": (lambda: _lm(t.GemmaConfig(num_key_value_heads=2, head_dim=8, **SMALL)),
                  {"GemmaRMSNorm → rms_norm": 5, "GemmaMLP → geglu": 2} | rotary | attention),
        "qwen3": (lambda: _lm(t.Qwen3Config(num_key_value_heads=2, head_dim=8, **SMALL)),
                  {"Qwen3RMSNorm → rms_norm": 9, "Qwen3MLP → swiglu": 2} | rotary | attention),
        "phi3": (lambda: _lm(t.Phi3Config(num_key_value_heads=2, pad_token_id=0, **SMALL)),
                 {"Phi3RMSNorm → rms_norm": 5, "Phi3MLP → swiglu": 2} | rotary | attention),
        "gpt2": (lambda: _lm(t.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4)),
                 {"LayerNorm → layer_norm": 5, "ForCausalLMLoss → cross_entropy": 1} | attention),
        "bert": (lambda: t.BertModel(t.BertConfig(**SMALL)), {"LayerNorm → layer_norm": 5} | attention),
        "vit": (lambda: t.ViTModel(t.ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                               intermediate_size=64, image_size=32, patch_size=8)),
                {"LayerNorm → layer_norm": 5} | attention),
    }  # fmt: skip


def _inputs(name: str) -> dict[str, Any]:
    ids = torch.randint(3, 50, (2, 9))
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 32, 32)}
    if name == "bert":
        keep = torch.ones_like(ids)
        keep[1, 6:] = 0
        return {"input_ids": ids, "attention_mask": keep}
    return {"input_ids": ids, "labels": ids}


def _result(output: Any) -> Any:
    return output.logits if "logits" in output else output.last_hidden_state


def _state(model: Any) -> list[Any]:
    found: list[Any] = [copy.deepcopy(model.config.to_dict()), model.config._attn_implementation_internal]
    return found + [(sorted(m.__dict__), m.forward.__func__, type(m)) for m in model.modules()]


@pytest.mark.parametrize("name", list(_models()))
def test_a_model_computes_the_same_with_kernels_and_is_itself_again_without(name: str) -> None:
    make, expected = _models()[name]
    model, inputs = make().eval(), _inputs(name)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    before = _state(model)
    with torch.no_grad():
        meant = model(**inputs)
        done = apply(model)
        found = model(**inputs)
        torch.testing.assert_close(_result(found), _result(meant), rtol=1e-4, atol=1e-5)
        if "labels" in inputs:
            torch.testing.assert_close(found.loss, meant.loss, rtol=1e-5, atol=1e-5)
        counts = {k: v for k, v in done.counts().items() if k in expected}
        assert counts == expected and str(done)
        revert(model)
        assert _state(model) == before
        assert torch.equal(_result(model(**inputs)), _result(meant))


def test_gradients_are_the_same_with_kernels() -> None:
    model = _models()["llama"][0]()
    inputs = _inputs("llama")
    meant = torch.autograd.grad(model(**inputs).loss, list(model.parameters()))
    apply(model)
    found = torch.autograd.grad(model(**inputs).loss, list(model.parameters()))
    for a, b in zip(found, meant, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_results_gradients_and_types_are_the_same_with_kernels(
    name: str, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in float32, as mixed training keeps them: norms and the loss are kernels there too."""
    model, inputs, taken = _models()[name][0]().to(dtype).eval(), _inputs(name), list[str]()
    for kernel in ("layer_norm", "rms_norm", "CROSS_ENTROPY"):
        _counted(monkeypatch, kernel, taken)

    def step() -> tuple[Any, Any]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = model(**inputs)
        return found, torch.autograd.grad(found.loss, list(model.parameters()))

    meant, grads = step()
    assert not taken
    with torch.autocast("cpu", dtype=torch.bfloat16):
        apply(model)
    found, mine = step()
    assert taken.count("CROSS_ENTROPY") == 1 and (len(taken) == 6) is (dtype is torch.float32), taken
    assert found.loss.dtype == meant.loss.dtype and found.logits.dtype == meant.logits.dtype
    torch.testing.assert_close(found.loss, meant.loss, rtol=2e-3, atol=0)
    for a, b in zip(mine, grads, strict=True):
        assert a.dtype == b.dtype and float((a - b).norm()) <= 0.03 * float(b.norm()) + 1e-4


def _counted(monkeypatch: pytest.MonkeyPatch, name: str, taken: list[str]) -> None:
    """Notes every call of a kernel that is put in."""
    inner = getattr(substitution, name)

    class Counted:
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            taken.append(name)
            return inner(*args, **kwargs)

        def __getattr__(self, wanted: str) -> Any:
            return getattr(inner, wanted)

    monkeypatch.setattr(substitution, name, Counted())


def test_a_copy_of_a_model_with_kernels_is_its_own() -> None:
    model = _models()["llama"][0]().eval()
    apply(model, ("norm", "gate"))
    twin = copy.deepcopy(model)
    twin.model.norm.weight.data.mul_(2.0)
    x = torch.randn(1, 3, 32)
    torch.testing.assert_close(twin.model.norm(x), 2 * model.model.norm(x))


def test_applying_twice_or_an_unknown_part_is_refused() -> None:
    model = nn.Sequential(nn.LayerNorm(8))
    apply(model)
    with pytest.raises(OptimizeError, match="revert it first"):
        apply(model)
    revert(model)
    revert(model)
    with pytest.raises(OptimizeError, match="did you mean 'norm'"):
        apply(model, ("nrom",))


def test_the_verbs_are_public() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    assert rl.apply(model).counts() == {"LayerNorm → layer_norm": 1}
    rl.revert(model)
    assert "forward" not in model[0].__dict__


def test_a_padded_batch_under_kernels_and_a_compiler_sees_the_same_keys() -> None:
    model, inputs = _models()["bert"][0]().eval(), _inputs("bert")
    with torch.no_grad():
        meant = model(**inputs).last_hidden_state
        apply(model, ("attention",))
        fast = torch.compile(model, backend="eager")
        torch.testing.assert_close(fast(**inputs).last_hidden_state, meant, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_padded_causal_batch_sees_the_same_keys(side: str) -> None:
    model, inputs = _models()["llama"][0]().eval(), _inputs("bert")
    rows = inputs["attention_mask"].bool()
    if side == "left":
        inputs["attention_mask"] = inputs["attention_mask"].flip(1)
        rows = inputs["attention_mask"].bool()
    with torch.no_grad():
        meant = model(**inputs).logits
        apply(model, ("attention",))
        torch.testing.assert_close(model(**inputs).logits[rows], meant[rows], rtol=1e-4, atol=1e-5)


def test_generation_with_a_cache_goes_on_as_before() -> None:
    model = _models()["llama"][0]().eval()
    ids = torch.randint(3, 50, (2, 5))
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    meant = model.generate(ids, **options)
    apply(model)
    assert torch.equal(model.generate(ids, **options), meant)


class _EpsOutside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-6

    def forward(self, x: Any) -> Any:
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)


class _Scaled(nn.LayerNorm):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * 1.01


def test_modules_that_only_look_like_norms_are_not_taken_for_them() -> None:
    assert norm_of(_EpsOutside()) is None
    assert norm_of(_Scaled(16)) is None
    assert norm_of(nn.LayerNorm((4, 16))) is None
    found = norm_of(nn.LayerNorm(16, eps=3e-6))
    assert found is not None and found.centered and found.eps == 3e-6


class _Gated(nn.Module):
    def __init__(self, act: Any, extra: float = 1.0) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.act, self.extra = act, extra

    def forward(self, x: Any) -> Any:
        return self.three(self.act(self.two(x)) * self.one(x) * self.extra)


def test_gated_layers_are_recognized_by_what_they_compute() -> None:
    found = gated_of(_Gated(nn.SiLU()))
    assert found is not None and (found.gate, found.up, found.down, found.activation) == ("two", "one", "three", "silu")
    assert gated_of(_Gated(nn.GELU(approximate="tanh"))).activation == "gelu_tanh"  # type: ignore[union-attr]
    assert gated_of(_Gated(nn.ReLU())) is None
    assert gated_of(_Gated(nn.SiLU(), extra=1.5)) is None


def test_rotary_functions_are_recognized_by_what_they_compute() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    assert rotary_of(apply_rotary_pos_emb) is False
    assert rotary_of(lambda q, k, cos, sin: (q, k)) is None


def test_dropout_in_a_gated_layer_still_drops_in_training() -> None:
    class Dropping(_Gated):
        def __init__(self) -> None:
            super().__init__(nn.SiLU())
            self.dropout = nn.Dropout(0.9)

        def forward(self, x: Any) -> Any:
            return self.three(self.dropout(self.act(self.two(x)) * self.one(x)))

    model = nn.Sequential(Dropping()).eval()
    x = torch.randn(4, 8)
    meant = model(x)
    apply(model, ("gate",))
    torch.testing.assert_close(model(x), meant)
    model.train()
    torch.manual_seed(3)
    found = model(x)
    revert(model)
    torch.manual_seed(3)
    assert torch.equal(found, model(x))


def test_a_mask_of_ones_is_left_out_under_a_guard() -> None:
    from ridgeline.optimizer.search.redundant_arguments import simplified

    model, inputs = _models()["bert"][0]().eval(), _inputs("bert")
    assert simplified(model, (), inputs) is None
    ones = inputs | {"attention_mask": torch.ones_like(inputs["attention_mask"])}
    found = simplified(model, (), ones)
    assert found is not None
    args, kwargs, holds = found
    assert set(kwargs) == {"input_ids"} and holds((), ones) and not holds((), inputs)
    with torch.no_grad():
        torch.testing.assert_close(model(*args, **kwargs).last_hidden_state, model(**ones).last_hidden_state)
    by_place = simplified(model, (ones["input_ids"], ones["attention_mask"]), {})
    assert by_place is not None and by_place[0][1] is None


def _listening(part: nn.Module) -> None:
    part.register_forward_hook(lambda module, given, result: result * 2)


CHANGES: dict[str, Any] = {
    "epsilon": lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 0.5),
    "weight": lambda layer: setattr(layer.input_layernorm, "weight", nn.Parameter(torch.full((32,), 2.0))),
    "another activation": lambda layer: setattr(layer.mlp, "act_fn", nn.ReLU()),
    "a hook on the activation": lambda layer: _listening(layer.mlp.act_fn),
    "a hook on the gate": lambda layer: _listening(layer.mlp.gate_proj),
    "a forward of the activation's own": lambda layer: setattr(layer.mlp.act_fn, "forward", torch.relu),
    "a gate with a bias": lambda layer: setattr(layer.mlp, "gate_proj", _biased()),
}


def _biased() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(32, 64)


def _llama() -> Any:
    torch.manual_seed(0)
    return _lm(transformers.LlamaConfig(num_key_value_heads=2, **SMALL)).eval()


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_after_kernels_were_put_in_counts(change: str) -> None:
    ours, theirs, ids = _llama(), _llama(), torch.arange(12)[None]
    apply(ours)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits)
        for model in (ours, theirs):
            CHANGES[change](model.model.layers[0])
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits)


def test_a_class_whose_forward_is_replaced_later_computes_that(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = _llama(), torch.arange(12)[None]
    apply(model)
    norm = model.model.layers[0].input_layernorm
    monkeypatch.setattr(type(norm), "forward", lambda self, x: x * 2)
    with torch.no_grad():
        ours = model(ids).logits
        revert(model)
        torch.testing.assert_close(ours, model(ids).logits)


def test_a_replica_computes_with_its_own_weights() -> None:
    """Its forward was its original's, which computed with the original's weights on another device."""
    model, x = _llama(), torch.randn(2, 3, 32)
    apply(model)
    norm = model.model.layers[0].input_layernorm
    replica = norm._replicate_for_data_parallel()
    replica.weight = torch.full((32,), 3.0)
    with torch.no_grad():
        torch.testing.assert_close(replica(x), 3 * norm(x))
    revert(model)
    assert "_replicate_for_data_parallel" not in vars(norm)


def test_a_deep_copy_computes_with_its_own_weights() -> None:
    model, ids = _llama(), torch.arange(12)[None]
    apply(model)
    other, plain = copy.deepcopy(model), _llama()
    with torch.no_grad():
        for each in (other, plain):
            each.model.layers[0].input_layernorm.weight.fill_(3.0)
            each.model.layers[0].mlp.gate_proj.weight.fill_(0.1)
        torch.testing.assert_close(other(ids).logits, plain(ids).logits)
        torch.testing.assert_close(model(ids).logits, _llama()(ids).logits)


def _saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))  # noqa: S301  (our own)


@pytest.mark.parametrize("copied", [copy.deepcopy, _saved, _pickled], ids=["deepcopy", "save", "pickle"])
def test_a_copy_or_a_file_has_no_kernels_and_the_original_keeps_them(copied: Any) -> None:
    """Saving a model whole wrote a file that could not be loaded, and a name that only we register."""
    model, ids, before = _llama(), torch.arange(12)[None], _state(_llama())
    apply(model)
    other = copied(model)
    assert [names for names, *_ in _state(other)[2:]] == [names for names, *_ in before[2:]]
    assert other.config._attn_implementation_internal == "sdpa" != model.config._attn_implementation_internal
    assert other.model.layers[0].self_attn.config is other.config
    with torch.no_grad():
        torch.testing.assert_close(other(ids, labels=ids).loss, model(ids, labels=ids).loss)
        apply(other)
        revert(model)
        torch.testing.assert_close(other(ids).logits, model(ids).logits)
    assert other.config._attn_implementation_internal == hooks.NAME
    assert copied(model).config._attn_implementation_internal == "sdpa"
    revert(other)
    assert [names for names, *_ in _state(other)[2:]] == [names for names, *_ in before[2:]]


def test_a_shallow_copy_of_a_layer_computes_with_its_own_weights() -> None:
    model, x = _llama(), torch.randn(2, 3, 32)
    apply(model)
    norm = model.model.layers[0].input_layernorm
    other = copy.copy(norm)
    other._parameters = {"weight": nn.Parameter(torch.full((32,), 3.0))}
    with torch.no_grad():
        torch.testing.assert_close(other(x), 3 * norm(x))
    assert "forward" in vars(norm) and not {"forward", "__reduce_ex__"} & vars(other).keys()
    assert copy.copy(model).model is model.model


def test_a_forward_that_was_set_before_is_what_copies_have() -> None:
    model = nn.Sequential(nn.LayerNorm(8))
    undo = [place(model[0], "forward", torch.sin), place(model[0], "forward", torch.cos)]
    assert "forward" not in vars(copy.copy(model[0]))
    vars(model[0])["forward"] = torch.cos
    undo.pop()()
    assert model[0].forward is torch.sin
    undo.pop()()
    assert not {"forward", "__reduce_ex__"} & vars(model[0]).keys()
    model[0].forward = torch.tan
    undo = [place(model[0], "forward", torch.cos)]
    assert copy.copy(model[0]).forward is torch.tan and model[0].forward is torch.cos
    undo.pop()()
    assert model[0].forward is torch.tan
