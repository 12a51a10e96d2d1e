"""Recorded calls on a real GPU against eager ones: the adversarial models, training, caches, and failed captures."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "unit" / "optimizer"))

import adversarial_python_state
import compare
import training_checks
import training_loops
from adversarial import CASES, Case
from compare import check
from torch import nn

from ridgeline.engine.capture.cuda_graph import CudaExecutor
from ridgeline.engine.replay.inference import graph_inference, graph_training
from ridgeline.errors import NotGraphable


def _executor() -> CudaExecutor:
    return CudaExecutor(torch.device("cuda", 0))


def _healthy() -> None:
    torch.cuda.synchronize()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.manual_seed(5)
    first = torch.rand(8, device="cuda")
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(8, device="cuda"))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_an_adversarial_model_gives_what_it_gives_eagerly_or_is_refused(case: Case) -> None:
    if "transformers" in case.marks:
        pytest.importorskip("transformers")
    check(case, torch.device("cuda", 0), _executor)
    _healthy()


HELD = [case for case in adversarial_python_state.PYTHON_STATE if "host" not in case.marks]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", HELD, ids=[case.name for case in HELD])
def test_a_snare_gives_what_it_gives_eagerly(case: Case, monkeypatch: Any) -> None:
    """Recorded or not; what may be recorded here is another matter than on the host."""
    monkeypatch.setenv(adversarial_python_state.VARIABLE, "1")
    device = torch.device("cuda", 0)
    eager, model = compare.build(case, device), compare.build(case, device)
    before = compare.snapshot(model)
    fast, _, _ = compare.optimize(case, model, device, _executor())
    assert compare.alike(compare.snapshot(model), before, exact=True), "recording left a trace"
    try:
        with torch.no_grad():
            kept = [compare._call(case, eager, fast, device, call) for call in range(1, compare.NUM_CALLS + 1)]
    finally:
        adversarial_python_state._global_hook(None, 0)
    assert all(compare.alike(ours, theirs, exact=exact) for ours, theirs, exact in kept)
    _healthy()


@pytest.mark.parametrize("one", training_checks.CHECKS, ids=[one.__name__ for one in training_checks.CHECKS])
def test_captured_training(one: Callable[[Any], None]) -> None:
    one(SimpleNamespace(device=torch.device("cuda", 0), executor=_executor, exact=False))
    _healthy()


@pytest.mark.filterwarnings("ignore::ridgeline.engine.drop_in.RunsEagerly")
@pytest.mark.parametrize("loop", training_loops.LOOPS, ids=[loop.__name__ for loop in training_loops.LOOPS])
def test_a_loop_leaves_what_it_leaves_without_captured_training(loop: Callable[..., None]) -> None:
    training_loops.compared(loop, SimpleNamespace(device=torch.device("cuda", 0), executor=_executor, exact=False))
    _healthy()


def test_a_capture_that_fails_leaves_earlier_captures_as_they_were() -> None:
    """They share the random generator's state with it, which took the failed capture for one that is under way."""
    torch.manual_seed(0)
    eager = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 4)).cuda()
    model, x = copy.deepcopy(eager), torch.randn(6, 8, device="cuda")
    graphed = graph_training(model, (x,), {}, model, executor=_executor())
    with pytest.raises(NotGraphable):
        _executor().record(lambda: torch.rand(4, device="cuda").sum().item(), told=False)
    ends = []
    for each, call in ((eager, eager), (model, graphed)):
        torch.manual_seed(3)
        found = []
        for _ in range(4):
            result = call(x)
            result.square().mean().backward()
            found += [result.detach().clone(), torch.rand(2, device="cuda")]
        ends.append([*found, each[0].weight.grad])
    assert graphed.replays == 4, graphed.misses
    for mine, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(mine, theirs)
    _healthy()


def test_checkpointed_layers_of_a_language_model_drop_what_eager_ones_drop() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=3, n_embd=64, n_head=2, vocab_size=96, n_positions=64)
    torch.manual_seed(0)
    eager = transformers.GPT2LMHeadModel(config).cuda().train()
    eager.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = copy.deepcopy(eager)
    ids = torch.randint(0, 96, (2, 32), device="cuda")
    kwargs = {"input_ids": ids, "labels": ids, "use_cache": False}
    graphed = graph_training(model, (), kwargs, model, executor=_executor())
    ends = []
    for each, call in ((eager, eager), (model, graphed)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        torch.manual_seed(3)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = call(**kwargs).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        ends.append((torch.stack(losses), each.transformer.h[0].mlp.c_fc.weight.detach(), torch.rand(2, device="cuda")))
    assert graphed.replays == 4
    for mine, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-5)
    _healthy()


class _Waits(nn.Module):
    """Waits for the device at every call, or only in a capture, where no rehearsal finds it."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.always = always

    def forward(self, x: Any) -> Any:
        y = self.inner(x) + torch.rand_like(x)
        return y * y.sum().item() if self.always or torch._C._cuda_isCurrentStreamCapturing() else y


@pytest.mark.parametrize("always", [True, False])
def test_a_capture_that_fails_leaves_the_device_usable(always: bool) -> None:
    model = _Waits(always).cuda()
    with pytest.raises(NotGraphable, match="host"):
        graph_inference(model, (torch.randn(4, 8, device="cuda"),), {}, model, executor=_executor())
    _healthy()


def test_inside_somebody_elses_recording_the_call_is_recorded_itself() -> None:
    model, x = nn.Linear(64, 64).cuda(), torch.randn(8, 64, device="cuda")
    graphed = graph_inference(model, (x,), {}, model)
    outer = torch.cuda.CUDAGraph()
    with torch.no_grad():
        with torch.cuda.graph(outer):
            result = graphed(x)
        x.normal_()
        outer.replay()
        assert torch.equal(result, model(x))
    assert graphed.misses == {"the call itself is being recorded": 1}


def test_lent_results_survive_replays_that_use_more_memory_than_they_do() -> None:
    torch.manual_seed(0)
    wide = nn.Linear(8192, 8192)
    model = nn.Sequential(nn.Linear(512, 8192), nn.GELU(), wide, nn.GELU(), nn.Linear(8192, 1024)).cuda()
    x = torch.randn(1024, 512, device="cuda")
    graphed = graph_inference(model, (x,), {}, model)
    with torch.no_grad():
        kept = [graphed(x * i) for i in range(1, 5)]
        for i, result in enumerate(kept, 1):
            assert torch.equal(result, model(x * i))
    assert graphed.replays == 4
    assert graphed.pool_bytes() > 2 * kept[0].numel() * 4


def test_a_capture_that_fails_gives_its_memory_back() -> None:
    """Five failed recordings of CLIP's step held 25 GB until the process ended."""
    executor, size = _executor(), 256 << 20
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()

    def run() -> float:
        return torch.zeros(size, dtype=torch.uint8, device="cuda")[:8].float().sum().item()

    for _ in range(3):
        with pytest.raises(NotGraphable):
            executor.record(run, told=False)
        _healthy()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < size // 4
