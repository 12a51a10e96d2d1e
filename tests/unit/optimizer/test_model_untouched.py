"""``optimize`` leaves the model it is given, and the libraries the model comes from, as they were."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
transformers = pytest.importorskip("transformers")

from torch import Tensor, nn

import ridgeline as rl
from ridgeline.engine.drop_in import RunsEagerly
from ridgeline.engine.shallow_clone import shallow_clone
from ridgeline.optimizer.in_place import attention_registry as hooks
from ridgeline.optimizer.in_place.substitution import PARTS
from ridgeline.optimizer.search import search as searching
from ridgeline.optimizer.search.candidate import Candidate
from ridgeline.optimizer.search.facts import Proposal
from ridgeline.optimizer.search.order import Stages
from ridgeline.optimizer.search.timing import Timed

SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64,
}  # fmt: skip


def _causal(name: str, **more: Any) -> Callable[[], nn.Module]:
    return lambda: transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**SIZES | more))


def _encoder(name: str, head: str = "ForMaskedLM", **more: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, f"{name}{head}")(getattr(transformers, f"{name}Config")(**SIZES | more))


def _timm(name: str, **more: Any) -> Callable[[], nn.Module]:
    timm = pytest.importorskip("timm")
    return lambda: timm.create_model(name, num_classes=10, **more)


GROUPED = {"num_key_value_heads": 2}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": _causal("Llama", **GROUPED),
    "llama, tied": _causal("Llama", tie_word_embeddings=True),
    "mistral": _causal("Mistral", sliding_window=4, **GROUPED),
    "qwen2": _causal("Qwen2", **GROUPED),
    "qwen3": _causal("Qwen3", head_dim=8, **GROUPED),
    "gemma": _causal("Gemma", head_dim=8, **GROUPED),
    "gemma2": _causal("Gemma2", head_dim=8, **GROUPED),
    "phi3": _causal("Phi3", pad_token_id=0, **GROUPED),
    "gpt-neox": _causal("GPTNeoX"),
    "gpt2": lambda: transformers.AutoModelForCausalLM.from_config(
        transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=3, n_head=4)),
    "opt": _causal("OPT", ffn_dim=64, word_embed_proj_dim=32),
    "olmo2": _causal("Olmo2", **GROUPED),
    "mixtral": _causal("Mixtral", num_local_experts=4, num_experts_per_tok=2, **GROUPED),
    "bert": _encoder("Bert"),
    "roberta": _encoder("Roberta"),
    "electra": _encoder("Electra", embedding_size=32),
    "distilbert": lambda: transformers.DistilBertForMaskedLM(
        transformers.DistilBertConfig(vocab_size=50, dim=32, n_layers=3, n_heads=4, hidden_dim=64)),
    "modernbert": _encoder("ModernBert", pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1,
                           sep_token_id=2, local_attention=4),
    "t5": lambda: transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4)),
    "vit": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=8)),
    "timm vit": _timm("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=4),
    "timm resnet": _timm("resnet10t"),
    "timm convnext": _timm("convnext_atto", depths=(3, 1, 1, 1), dims=(8, 16, 24, 32)),
    "timm mobilenet": _timm("mobilenetv3_small_050"),
}  # fmt: skip


class Tail(nn.Module):
    """Layers that transformers does not have, a shared part, a part that is listed twice and a weight of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(3))
        self.again, self.listed = self.parts[0], [self.parts[1]]
        self.head = nn.Linear(8, 8)
        self.head.weight = self.parts[2][1].weight
        self.scale = self.parts[1][0].forward

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + part(x)
        return self.head(self.scale(self.again(x) + self.listed[0](x)))


class Recurrent(nn.Module):
    """Two layers of an LSTM in both directions over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(32, 50)
        self.cells = nn.LSTM(16, 16, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.cells(self.embedding(input_ids))[0])


class UNet(nn.Module):
    """Two scales of convolutions with group norm, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        def block(c: int, o: int) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(c, o, 3, padding=1), nn.GroupNorm(4, o), nn.SiLU())
        self.down, self.below, self.joined = block(3, 8), block(8, 16), block(16, 8)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down(x)
        coarse = self.below(nn.functional.max_pool2d(fine, 2))
        return self.out(self.joined(torch.cat((fine, self.up(coarse)), 1)))


class Recommender(nn.Module):
    """Bags of embeddings, dense features, and the products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, 8, mode="sum") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 8))
        self.top = nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: Tensor, input_ids: Tensor) -> Tensor:
        dense = self.bottom(x)
        parts = torch.stack((dense, *(bag(input_ids) for bag in self.bags)), 1)
        pairs = parts @ parts.mT
        rows, cols = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat((dense, pairs[:, rows, cols]), 1))


MODELS |= {
    "tied and aliased": Tail, "lstm": Recurrent, "u-net": UNet, "recommender": Recommender,
    "mamba": _causal("Mamba", state_size=4, num_hidden_layers=1),
    "olmoe": _causal("Olmoe", num_experts=2, num_experts_per_tok=1, num_hidden_layers=2, pad_token_id=0,
                     eos_token_id=1, **GROUPED),
}  # fmt: skip


def _given(name: str) -> dict[str, Any]:
    if name == "tied and aliased":
        return {"x": torch.randn(2, 8)}
    if name == "recommender":
        return {"x": torch.randn(2, 9), "input_ids": torch.randint(3, 50, (2, 9))}
    if name.startswith("timm") or name == "u-net":
        return {"x": torch.randn(2, 3, 32, 32)}
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 32, 32)}
    return {"input_ids": torch.randint(3, 50, (2, 9))}


def _tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _loss(output: Any) -> Tensor:
    return _tensor(output).float().square().mean()


def _functions() -> dict[tuple[str, str], int]:
    """What every function and class of the libraries is, by module and name."""
    return {(module, name): id(value) for module, held in list(sys.modules.items())
            if module.partition(".")[0] in ("transformers", "timm") and held is not None
            for name, value in list(vars(held).items()) if isinstance(value, types.FunctionType | type)
            if name[:2] != "__"}  # fmt: skip


def _attributes(model: nn.Module) -> list[Any]:
    """Every module's attributes, parameters, buffers, hooks, class and forward, by identity where it has one."""
    found: list[Any] = []
    for path, module in model.named_modules():
        held = {name: (id(value), repr(value)) if isinstance(value, str | int | float) else id(value)
                for name, value in vars(module).items()}  # fmt: skip
        inner = [[(name, id(value)) for name, value in each.items()] for each in (
            module._parameters, module._buffers, module._modules, module._forward_hooks, module._forward_pre_hooks)]
        found.append((path, type(module), module.forward.__func__, type(module).forward, held, inner))
    for tensor in (*model.parameters(), *model.buffers()):
        found.append((tensor.stride(), tensor.dtype, tensor.requires_grad, tensor.grad is None, tensor._backward_hooks))
    config = getattr(model, "config", None)
    return [*found, None if config is None else repr(sorted(map(str, vars(config).items())))]


def _observed(model: nn.Module, given: dict[str, Any], train: bool) -> list[Tensor]:
    """Outputs, and in training gradients, which are cleared; the same random numbers at every call."""
    torch.manual_seed(1)
    buffers = [each.clone() for each in model.buffers()]
    with torch.set_grad_enabled(train):
        output = _tensor(model(**given))
    found = [output.detach()]
    if train:
        _loss(output).backward()
        found += [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad(set_to_none=True)
    for each, kept in zip(model.buffers(), buffers, strict=True):
        each.copy_(kept)
    return found


CANDIDATES = {
    "kernels": Candidate(name="kernels", substituted=PARTS),
    "blocks": Candidate(name="blocks", rewrites=("identity",), scope="blocks", substituted=("attention", "loss")),
    "channels last": Candidate(name="channels last", layout="channels_last"),
}


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Kernels' references run here, and every candidate is ten times as fast as eager."""
    monkeypatch.setattr(hooks, "RUNS_ON", frozenset({"cpu"}))
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(searching.Track, "race", lambda self, runners, *given, **limits: {
        name: Timed((0.01 if name == "eager" else 0.001,) * 12) for name in runners})
    torch.manual_seed(0)
    torch._dynamo.reset()


def _optimized(monkeypatch: Any, model: nn.Module, given: dict[str, Any], mode: str, kind: str) -> Any:
    proposal = Proposal(CANDIDATES[kind], 0.1)
    monkeypatch.setattr(Stages, "proposals", lambda self, search: iter([proposal]))
    loss = {"loss": _loss} if mode == "train" else {}
    return rl.optimize(model, (), given, mode=mode, budget_s=30, use_cache=False, **loss)


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("name", list(MODELS))
def test_the_given_model_computes_trains_and_compiles_as_before(name: str, mode: str, monkeypatch: Any) -> None:
    train = mode == "train"
    model, given = MODELS[name]().train(train), _given(name)
    sibling = MODELS[name]().train(train)
    unmatched = ("modernbert", "gemma2", "t5", "timm convnext", "tied and aliased", "lstm", "u-net", "recommender",
                 "mamba", "olmoe")  # fmt: skip
    kind = "kernels" if train or name in unmatched else "blocks"
    if name == "timm mobilenet" or (name == "timm resnet" and not train):
        kind = "channels last"
    _observed(model, given, train)  # what a first call imports and leaves behind is the caller's
    libraries, before, meant = _functions(), _attributes(model), _observed(model, given, train)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    others, of_sibling = _attributes(sibling), _observed(sibling, given, train)
    fast = _optimized(monkeypatch, model, given, mode, kind)
    assert fast.receipt.winner == kind, str(fast.receipt)
    torch.testing.assert_close(_observed(fast, given, train), meant, rtol=1e-3, atol=1e-4)
    assert not fast.fallbacks
    assert _attributes(model) == before
    now = _functions()
    assert {key for key in libraries if now.get(key) != libraries[key]} == set()
    assert all(torch.equal(a, b) for a, b in zip(_observed(model, given, train), meant, strict=True))
    found = model.state_dict()
    assert list(found) == list(state) and all(torch.equal(found[key], state[key]) for key in state)
    assert _attributes(sibling) == others
    assert all(torch.equal(a, b) for a, b in zip(_observed(sibling, given, train), of_sibling, strict=True))
    if not train or name in ("llama", "lstm", "u-net", "recommender"):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager")
        torch.testing.assert_close(_observed(compiled, given, train), meant)


def test_a_function_that_turns_a_part_of_each_head_stays() -> None:
    model, given = MODELS["gpt-neox"]().eval(), _given("gpt-neox")
    with torch.no_grad():
        meant = model(**given).logits
        rl.apply(model, ("rotary",))
        assert torch.equal(model(**given).logits, meant)


def test_updates_of_the_original_and_assigned_weights_reach_its_clone() -> None:
    model, x = Tail(), torch.randn(2, 8)
    clone = shallow_clone(model)
    assert clone is not model and clone.again is clone.parts[0] and clone.listed[0] is clone.parts[1]
    assert clone.head.weight is clone.parts[2][1].weight and clone.scale.__self__ is clone.parts[1][0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clone(x).sum().backward()
    optimizer.step()
    assert torch.equal(clone(x), model(x))
    model.head.weight = nn.Parameter(torch.randn(8, 8))
    model.load_state_dict({key: value + 1 for key, value in model.state_dict().items()}, assign=True)
    assert torch.equal(clone(x), model(x))


@pytest.mark.parametrize("change", ["an attribute", "a hook", "a part", "a method"])
def test_what_changes_on_the_model_later_counts(change: str, monkeypatch: Any) -> None:
    class Own(Tail):
        pass

    model, x = Own().eval(), torch.randn(2, 8)
    fast = _optimized(monkeypatch, model, {"x": x}, "infer", "kernels")
    with torch.no_grad():
        torch.testing.assert_close(fast(x=x), model(x=x))
        assert not fast.fallbacks
        if change == "an attribute":
            model.parts[0][0].eps = 10.0
        elif change == "a hook":
            model.parts[0].register_forward_hook(lambda module, args, output: output + 1)
        elif change == "a part":
            model.parts[1] = nn.Identity()
        else:
            Own.forward = lambda self, x: x
        with nullcontext() if change == "a method" else pytest.warns(RunsEagerly):  # the clone has the class, too
            assert torch.equal(fast(x=x), model(x=x))
