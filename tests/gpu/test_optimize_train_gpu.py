"""Training steps on a device: what is recorded, what odd products gain, and that steps are those of eager training."""

from __future__ import annotations

import copy
import gc
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

import ridgeline as rl
from ridgeline.engine.capture.capture import uncached_casts
from ridgeline.engine.drop_in import Optimized, Plan, RunsEagerly, plain_step
from ridgeline.engine.example_inputs import Inputs, State
from ridgeline.engine.replay import fused_adamw as stepping
from ridgeline.engine.replay.step import GraphedUpdate
from ridgeline.engine.replay.training import TrainingStudio, graph_training
from ridgeline.optimizer.in_place.padded_linear import padded_linear
from ridgeline.optimizer.rewrites import recommended
from ridgeline.optimizer.search import prepare
from ridgeline.optimizer.search.candidate import Candidate, build
from ridgeline.optimizer.search.judge import Prover, Subject
from ridgeline.optimizer.search.loss import Loss
from ridgeline.optimizer.search.memory import WORKSPACE_BYTES
from ridgeline.optimizer.search.problem import Problem
from ridgeline.optimizer.search.search import Search

DEVICE = "cuda"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))


def _gpt(**more: Any) -> tuple[Any, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=1001, **more)
    ids = torch.randint(0, 1001, (4, 128), device="cuda")
    model = transformers.GPT2LMHeadModel(config).to("cuda", torch.bfloat16).train()
    return model, {"input_ids": ids, "labels": ids, "use_cache": False}


def _still() -> dict[str, Any]:
    return {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def test_a_language_model_is_captured_without_its_mask() -> None:
    model, kwargs = _gpt(**_still())
    graphed = graph_training(model, (), kwargs, model)
    assert not graphed._studio._told  # told of a capture, transformers builds a mask that costs the fast attention


@pytest.mark.filterwarnings("ignore:Deterministic behavior")
def test_deterministic_steps_are_those_of_eager_training_bit_by_bit() -> None:
    model, kwargs = _gpt(**_still())
    eager = copy.deepcopy(model)
    torch.use_deterministic_algorithms(True, warn_only=True)  # cuBLAS asks for a setting before it starts
    try:
        losses = []
        for each in (eager, model):
            optimizer = torch.optim.AdamW(each.parameters(), lr=1e-3, fused=True)
            call, update = each, None
            if each is model:
                graphed = graph_training(each, (), kwargs, each)
                call = Optimized(each, [Plan(graphed.signature, graphed)], mode="train")
                update = GraphedUpdate(optimizer, graphed)
            fast = Optimized(each, call.plans if update else (), mode="train", optimizer=optimizer, update=update)
            losses.append([float(fast.train_step(**kwargs)) for _ in range(8)])
        assert update is not None and update.replays == 7, update.misses
    finally:
        torch.use_deterministic_algorithms(False)
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]


def test_steps_with_a_loss_of_the_callers_are_captured() -> None:
    """What the loss was looked at with kept every gradient on the default stream, and no such step was recorded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()
    x, loss = torch.randn(32, 64, device="cuda"), lambda y: y.square().mean()
    graphed = graph_training(model, (x,), {}, model, loss=loss)
    grads = []
    for call in (model, graphed):
        model.zero_grad(set_to_none=True)
        loss(call(x)).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert graphed.replays == 1
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(*grads, strict=True))


def _peak_bytes(step: Any) -> int:
    for _ in range(3):
        step()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _step_of(model: Any, kwargs: dict[str, Any], optimizer: Any) -> Any:
    return lambda: plain_step(model, optimizer, None, (), kwargs)


def test_an_optimizer_and_its_model_are_optimized_together() -> None:
    model, kwargs = _gpt()
    eager_bytes = _peak_bytes(_step_of(model, kwargs, torch.optim.AdamW(model.parameters(), lr=0.0)))
    model.zero_grad(set_to_none=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    fast = rl.optimize(model, (), kwargs, mode="train", optimizer=optimizer, budget_s=25)
    assert fast.receipt.speedup > 1.2, str(fast.receipt)
    assert any("steps of AdamW" in note for note in fast.receipt.notes), str(fast.receipt)
    assert any(note.startswith("whole steps with AdamW: eager") for note in fast.receipt.notes), str(fast.receipt)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RunsEagerly)
        losses = [float(fast.train_step(**kwargs)) for _ in range(6)]
        out = fast(**kwargs)
        out.loss.backward()
    assert losses[-1] < losses[0]
    del out
    assert _peak_bytes(lambda: fast.train_step(**kwargs)) <= eager_bytes + WORKSPACE_BYTES


def test_nothing_of_a_search_stays_in_the_allocator() -> None:
    model, kwargs = _gpt()
    step = _step_of(model, kwargs, torch.optim.SGD(model.parameters(), lr=0.0))
    for _ in range(3):
        step()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    eager_bytes = torch.cuda.max_memory_reserved()
    model.zero_grad(set_to_none=True)
    fast = rl.optimize(model, (), kwargs, mode="train", budget_s=12)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        plain_step(fast, torch.optim.SGD(model.parameters(), lr=0.0), None, (), kwargs)
    assert torch.cuda.max_memory_reserved() <= eager_bytes + 2 * WORKSPACE_BYTES, str(fast.receipt)


class Worded(nn.Module):
    """Logits of a vocabulary, 102 MB of them, beside a loss whose backward does not read them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 100_000, bias=False)

    def forward(self, x: Any) -> dict[str, Any]:
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits, torch.arange(len(x), device=x.device)), "logits": logits}


def test_a_capture_does_not_keep_large_results_through_its_backward(monkeypatch: Any) -> None:
    model, pools = Worded().to(DEVICE, torch.bfloat16), []
    x = torch.randn(512, 64, device=DEVICE, dtype=torch.bfloat16)
    for vacates in (False, True):
        with monkeypatch.context() as patched:
            if not vacates:
                patched.setattr(TrainingStudio, "_vacated", lambda *given: {})
            graphed = graph_training(model, (x,), {}, model)
        expected = model.head(x).detach()
        result = graphed(x)
        result["loss"].backward()
        torch.testing.assert_close(result["logits"].detach(), expected)
        assert graphed.replays == 1
        pools.append(graphed.pool_bytes())
        del graphed, result
    assert pools[1] < pools[0] - 80e6, pools


def test_a_capture_in_memory_that_grows_takes_eager_steps_and_gives_its_memory_back() -> None:
    model, kwargs = _gpt(**_still())
    eager = copy.deepcopy(model)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    built = build(Candidate(name="graph", graphed=True, grows=True), model, Inputs((), kwargs), "train")
    losses = []
    for call, of in ((eager, eager), (built.call, model)):
        optimizer = torch.optim.SGD(of.parameters(), lr=1e-2)
        losses.append([float(plain_step(call, optimizer, None, (), kwargs)) for _ in range(4)])
        others = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(64)]  # beside the recording, not in it
        assert all(float(other[0]) == 7.0 for other in others)
        model.zero_grad(set_to_none=True)
        eager.zero_grad(set_to_none=True)
    assert losses[0] == pytest.approx(losses[1], rel=2e-2) and losses[1][-1] < losses[1][0]
    assert built.call.replays >= 4, built.call.misses
    del built, call, others, optimizer
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # PyTorch keeps one for every stream that multiplied
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + WORKSPACE_BYTES


def test_a_whole_model_compiled_in_pieces_has_gradients_as_right_as_eagers() -> None:
    model, kwargs = _gpt(**_still())
    chosen = recommended("training", "inductor", "cuda")
    built = build(Candidate(name="compiled", rewrites=chosen, compiler="inductor"), model, Inputs((), kwargs), "train")
    assert built.report.counts()["norm-residual"] > 4, built.report.counts()  # they reach over the seams
    subject = Subject(model, Inputs((), kwargs), "train", Loss(None), State(model))
    verdict = Prover(subject, num_inputs=1).judge(built.call)
    assert verdict, verdict.reason


def _cast_step(call: Any, optimizer: Any, kwargs: dict[str, Any]) -> float:
    """Autocast around the forward alone: in one that spans steps, PyTorch goes on with the casts of the first."""
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = call(**kwargs).loss
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def test_blocks_under_autocast_are_compiled_once_and_take_eager_steps() -> None:
    model, kwargs = _gpt(**_still())
    model.float()
    eager, chosen = copy.deepcopy(model), recommended("training", "none", "cuda")
    candidate = Candidate(name="rewritten blocks + graph", rewrites=chosen, scope="blocks", graphed=True)
    with torch.autocast("cuda", torch.bfloat16), uncached_casts():  # as a search does
        built = build(candidate, model, Inputs((), kwargs), "train")
    graphs, losses = built.report.graphs, []
    fast = Optimized(model, [Plan(built.call.signature, built.call)], mode="train")
    for each, call in ((eager, eager), (model, fast)):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-4, fused=True)
        losses.append([_cast_step(call, optimizer, kwargs) for _ in range(8)])
    assert built.call.replays >= 8 and built.report.graphs == graphs == 1, built.report.counts()
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)  # the casts of the first step, kept, would be 8 % off


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_adamw_by_our_kernel_takes_pytorchs_steps_captured_or_not(dtype: Any) -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(129, 300), nn.GELU(), nn.Linear(300, 7)).to("cuda", dtype) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    x = torch.randn(32, 129, device="cuda", dtype=dtype)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True) for model in models]
    calls: list[Any] = [models[0], models[1], None]
    graphed = graph_training(models[2], (x,), {}, models[2])
    calls[2] = Optimized(models[2], [Plan(graphed.signature, graphed)], mode="train")
    for optimizer in optimizers[1:]:
        assert stepping.takes(optimizer)
        stepping.take_over(optimizer)
    update = GraphedUpdate(optimizers[2], graphed)
    for i in range(8):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 1e-2 if i < 4 else 1e-2 / i  # a schedule from the middle on
        for call, optimizer, taken in zip(calls, optimizers, (None, None, update), strict=True):
            plain_step(call, optimizer, lambda y: y.float().square().mean(), (x,), {}, taken)
    assert update.replays >= 6, update.misses
    assert any(found is not None for found in vars(optimizers[1])["_ridgeline_launches"].values())
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-4
    for model in models[1:]:
        for p, q in zip(models[0].parameters(), model.parameters(), strict=True):
            assert float((p - q).detach().norm() / p.detach().norm()) < tolerance


def test_adamw_by_our_kernel_leaves_sets_of_gradients_that_change_with_every_step_to_pytorch() -> None:
    lists = [[nn.Parameter(torch.full((257, i + 1), 1.0, device="cuda")) for i in range(6)] for _ in range(2)]
    optimizers = [torch.optim.AdamW(parameters, lr=1e-2, fused=True) for parameters in lists]
    stepping.take_over(optimizers[1])
    for which in range(40):
        for parameters, optimizer in zip(lists, optimizers, strict=True):
            for i, parameter in enumerate(parameters):
                drawn = torch.Generator("cuda").manual_seed(100 * which + i)
                grad = torch.randn(parameter.shape, device="cuda", generator=drawn)
                parameter.grad = grad if (which * 7 + i) % 11 > 3 or which < 2 else None  # the first step has all
            optimizer.step()
    assert len(vars(optimizers[1])["_ridgeline_launches"]) <= stepping.MOST_PLANS
    for p, q in zip(*lists, strict=True):
        assert float((p - q).detach().norm() / (p - 1.0).detach().norm()) < 1e-4


class Convolved(nn.Module):
    """A few convolutions with their norms, channels last."""

    def __init__(self) -> None:
        super().__init__()
        widths = (8, 32, 64, 64)
        layers = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
                  for a, b in pairwise(widths)]  # fmt: skip
        self.layers, self.last = nn.Sequential(*layers), nn.Linear(widths[-1], 10)

    def forward(self, x: Any) -> Any:
        return self.last(self.layers(x).mean((2, 3)))


def test_convolutions_captured_with_timed_algorithms_have_eager_gradients() -> None:
    torch.manual_seed(0)
    model: Any = Convolved().to("cuda", torch.bfloat16, memory_format=torch.channels_last).train()
    x = torch.randn(16, 8, 32, 32, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    wide = copy.deepcopy(model).double()
    candidate = Candidate(name="graph", graphed=True, tries_convolutions=True)
    built = build(candidate, model, Inputs((x,), {}), "train", loss=None)
    assert not torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.benchmark_limit == 10
    weights = torch.linspace(-1, 1, 160, device="cuda", dtype=torch.float64).reshape(16, 10)

    def gradients(call: Any, of: Any, x: Any) -> list[Any]:
        of.zero_grad(set_to_none=True)
        (call(x).double() * weights).sum().backward()
        return [p.grad.double() for p in of.parameters()]

    expected = gradients(wide, wide, x.double())
    errors = [[float((a - b).norm() / b.norm()) for a, b in zip(gradients(call, model, x), expected, strict=True)]
              for call in (model, built.call)]  # fmt: skip
    assert all(ours <= 1.5 * theirs + 1e-3 for theirs, ours in zip(*errors, strict=True)), errors


class Dropped(nn.Module):
    """Convolutions with biases in front of batch norm, whose gradients are rounding, and paths dropped at random."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3)
        self.paths = nn.ModuleList(nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32)) for _ in range(2))
        self.last = nn.Sequential(nn.Dropout(0.2), nn.Linear(32, 10))

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        for path in self.paths:
            x = x + path(x).relu() * x.new_empty((len(x), 1, 1, 1)).bernoulli_(0.8) / 0.8
        return self.last(x.mean((2, 3)))


def test_what_is_compiled_of_a_random_model_with_batch_norm_is_right() -> None:
    """Compilers draw other numbers: whoever takes such a model for a plain one calls torch.compile wrong."""
    torch.manual_seed(0)
    model = Dropped().to(DEVICE).train()
    inputs = Inputs((torch.randn(32, 3, 24, 24, device=DEVICE),))
    search = Search(Problem(model=model, inputs=inputs, mode="train", device=torch.device(DEVICE), budget_s=60.0))
    prepare.prepare(search)
    assert search.random
    built = build(Candidate(name="torch.compile", compiler="stock"), model, inputs, "train")
    assert search.prove(built), search.prove(built).reason
    assert "gradient of paths.0.0.bias" in search.prover._rounding_noise()
    built.call = lambda x: 2.0 * model(x)
    assert not search.prove(built)
    search.track.hand_back()


@pytest.mark.parametrize(("outputs", "inputs"), [(50257, 256), (1024, 479)])
def test_odd_products_are_as_exact_as_plain_ones(outputs: int, inputs: int) -> None:
    """One of the first two products is rounded twice, √2 of the error, now among ours, now among the plain ones: so
    does cuBLAS choose in one run of four."""
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(512, inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(512, outputs, device="cuda", dtype=torch.bfloat16)
    wide = [t.detach().double() for t in (x, layer.weight, layer.bias, grad)]
    expected = [torch.addmm(wide[2], wide[0], wide[1].t()), wide[3] @ wide[1], wide[3].t() @ wide[0], wide[3].sum(0)]
    for run, errors in ((layer, []), (lambda x: padded_linear(x, layer.weight, layer.bias), [])):
        y = run(x)
        found = [y, *torch.autograd.grad(y, (x, layer.weight, layer.bias), grad)]
        errors += [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
        if run is layer:
            plain = errors
    assert all(ours <= 1.1 * max(plain[:2]) for ours in errors[:2]), (errors, plain)
    assert all(ours <= 1.1 * theirs for ours, theirs in zip(errors[2:], plain[2:], strict=True)), (errors, plain)
