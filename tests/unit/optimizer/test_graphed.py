"""Recordings against eager calls, on the CPU with a stand-in that has the memory of a CUDA graph."""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

from adversarial import CASES, Case, Fixed, Lambda, _fills
from compare import check
from recorder import TapeExecutor
from torch import nn

from ridgeline.engine.capture import cuda_graph as executor
from ridgeline.engine.capture.capture import Studio
from ridgeline.engine.capture.cuda_graph import executor_for
from ridgeline.engine.capture.host_rng import indifferent
from ridgeline.engine.drop_in import Optimized, Plan
from ridgeline.engine.guards.check import Watch
from ridgeline.engine.pytree import flatten
from ridgeline.engine.replay.inference import Graphed, graph_inference, graph_training
from ridgeline.engine.replay.static_inputs import Statics
from ridgeline.engine.signature import recordable
from ridgeline.errors import NotGraphable

CPU = torch.device("cpu")


def _recorded(model: Any, *args: Any, **kwargs: Any) -> Graphed:
    return graph_inference(model, args, kwargs, model, executor=TapeExecutor())


def _wide() -> tuple[nn.Module, Graphed, torch.Tensor]:
    model = nn.Linear(8, 70_000).eval()
    x = torch.randn(8, 8)
    return model, _recorded(model, x), x


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_an_adversarial_model_gives_what_it_gives_eagerly_or_is_refused(case: Case) -> None:
    if "transformers" in case.marks:
        pytest.importorskip("transformers")
    check(case, CPU, TapeExecutor)


def test_a_large_result_is_lent_while_nobody_holds_the_last_one() -> None:
    model, graphed, x = _wide()
    places = {graphed(x).data_ptr() for _ in range(4)}
    assert len(places) == 1
    kept = [graphed(x * i) for i in range(4)]
    assert len({result.data_ptr() for result in kept}) == 4
    for i, result in enumerate(kept):
        assert torch.equal(result, model(x * i))
    view = graphed(x)[0]  # a view of a loan is a loan
    assert graphed(x).data_ptr() != view.data_ptr()


def test_a_cache_is_written_where_it_is_and_followed_when_it_moves() -> None:
    torch.manual_seed(0)
    model = Lambda(_fills).eval()
    mine, theirs = Fixed(CPU), Fixed(CPU)
    graphed = _recorded(model, torch.randn(1, 8), cache=mine)
    with torch.no_grad():
        for call in range(3):
            x = torch.randn(1, 8)
            assert torch.equal(graphed(x, cache=mine), model(x, cache=theirs))
            assert torch.equal(mine.keys, theirs.keys) and mine.position == call + 1
        assert graphed.replays == 3
        moved = Fixed(CPU)
        for call in range(4):  # elsewhere: made as a call, then recorded anew
            graphed(torch.randn(1, 8), cache=moved)
            assert moved.position == call + 1
        assert graphed.replays == 6
        graphed(torch.randn(1, 8), cache=mine)  # the first place is still known
    assert graphed.replays == 7
    assert graphed.misses == {"an input that is used in place lies elsewhere": 1}


def test_a_cache_that_lies_in_two_places_by_turns_is_captured_in_both() -> None:
    model = Lambda(_fills).eval()
    graphed = _recorded(model, torch.randn(1, 8), cache=Fixed(CPU))
    places = [Fixed(CPU), Fixed(CPU)]
    with torch.no_grad():
        for call in range(8):
            graphed(torch.randn(1, 8), cache=places[call % 2])
    assert graphed.replays == 6 and [int(place.position) for place in places] == [4, 4]
    assert graphed.misses == {"an input that is used in place lies elsewhere": 2}


def test_captures_at_places_of_trials_are_let_go_of_and_the_first_place_stays() -> None:
    """A proof's inputs are gone when a search ends: what was recorded there reads memory that is nobody's."""
    model, mine, trial = Lambda(_fills).eval(), Fixed(CPU), Fixed(CPU)
    graphed = _recorded(model, torch.randn(1, 8), cache=mine)
    num = len(graphed._variants)
    with torch.no_grad():
        for _ in range(3):
            graphed(torch.randn(1, 8), cache=trial)
        assert len(graphed._variants) == num + 1 and graphed.replays == 2
        graphed.forget_others()
        graphed(torch.randn(1, 8), cache=mine)
        assert len(graphed._variants) == num and graphed.replays == 3 and mine.position == 1
        graphed(torch.randn(1, 8), cache=trial)  # made as a call, as if never seen there
    assert graphed.replays == 3 and trial.position == 4


def test_capture_needs_one_cuda_device() -> None:
    with pytest.raises(NotGraphable, match="nothing of this call is on a CUDA device"):
        graph_inference(nn.Linear(2, 2), (torch.ones(1, 2),), {}, nn.Linear(2, 2))
    with pytest.raises(NotGraphable, match="on CUDA devices, not on meta"):
        executor_for([torch.ones(2, device="meta")])


def test_a_result_fed_back_is_read_before_it_is_overwritten() -> None:
    model = nn.Linear(8, 8).eval()
    graphed = _recorded(model, torch.randn(3, 8))
    mine = theirs = torch.randn(3, 8)
    with torch.no_grad():
        for _ in range(5):
            mine, theirs = graphed(mine), model(theirs)
            assert torch.equal(mine, theirs)
    assert graphed.replays == 5


def test_operators_that_no_mode_may_look_into_are_observed_from_outside() -> None:
    def refuses(x: torch.Tensor) -> torch.Tensor:
        if torch._C._len_torch_dispatch_stack():
            raise NotImplementedError("There was no rule registered for HigherOrderOperator and mode Journal")
        return x.add_(1)

    graphed = _recorded_from(refuses)
    assert graphed.written and graphed.codes


def _recorded_from(function: Any) -> Any:
    studio = Studio(function, function, Watch(function), TapeExecutor())
    flat = flatten(((torch.zeros(3),), {}))
    studio.group(flat)
    return studio.observe(flat, Statics(flat.tensors, studio.groups))


def test_a_call_that_lays_weights_out_anew_when_it_is_first_run_is_captured() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).train(), torch.randn(4, 8)
    laid: list[bool] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        if not laid:
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.data = tensor.data.clone()
            laid.append(True)
        return model(x)

    before = {name: value.clone() for name, value in model.state_dict().items()}
    graphed = graph_inference(call, (x,), {}, model, executor=TapeExecutor())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    other = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).train()
    other.load_state_dict(before)
    with torch.no_grad():
        assert torch.equal(graphed(x), other(x))
    assert graphed.replays == 1
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_call_that_moves_weights_every_time_is_refused() -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)

    def call(x: torch.Tensor) -> torch.Tensor:
        model.weight.data = model.weight.data.clone()
        return model(x)

    with pytest.raises(NotGraphable, match="weight moved"):
        graph_inference(call, (x,), {}, model, executor=TapeExecutor())


def test_what_others_do_when_garbage_is_collected_is_no_act_of_the_model() -> None:
    def clock(phase: str, info: Any) -> None:
        time.perf_counter()

    gc.callbacks.append(clock)
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        assert _recorded(nn.Sequential(*(nn.Linear(4, 4) for _ in range(8))).eval(), torch.randn(2, 4)) is not None
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(clock)


@pytest.mark.parametrize("training", [False, True])
def test_compiled_code_is_not_compiled_anew_to_be_captured(training: bool) -> None:
    compiled: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        compiled.append(gm)
        return gm.forward

    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(4, 8)
    call = torch.compile(model, backend=backend)
    with torch.set_grad_enabled(training):
        call(x)
        record = graph_training if training else graph_inference
        graphed = record(call, (x,), {}, model, executor=TapeExecutor())
        other = torch.randn(4, 8)
        assert torch.equal(graphed(other), model(other)) and graphed.replays == 1
    assert len(compiled) == 1


class _Holder(nn.Module):
    """A model that has compiled a part of itself."""

    def __init__(self, size: int, compiler: Any) -> None:
        super().__init__()
        self.part = torch.compile(nn.Sequential(nn.Linear(size, size), nn.GELU()), backend=compiler, dynamic=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x) + 1


def test_looking_at_compiled_code_keeps_neither_it_nor_its_kin_from_being_compiled() -> None:
    made: list[Any] = []
    ran: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        made.append(gm)
        return lambda *given: ran.append(gm) or gm.forward(*given)

    torch._dynamo.reset()
    first, second = _Holder(8, backend), _Holder(12, backend)
    x, y = torch.randn(4, 8), torch.randn(4, 12)
    with torch.no_grad():
        first(x)
        studio = Studio(first, first, Watch(first), TapeExecutor())
        flat = recordable((x,), {}, first, grad=False).flat
        studio.group(flat)
        seen = studio.observe(flat, Statics(flat.tensors, studio.groups))
        indifferent(lambda: first(x), lambda: False)
        assert not seen.written and len(made) == len(ran) == 1
        first(x)
        assert len(ran) == 2, "it still runs as compiled"
        second(y)
    assert len(made) == 2 and len(ran) == 3, "and another of its kind is compiled"


def test_who_asks_for_a_capture_hears_what_is_told_and_asks_the_same_function() -> None:
    asked = torch.cuda.is_current_stream_capturing
    for told in (True, False):
        with executor._answering(told):
            assert torch.cuda.is_current_stream_capturing is asked and asked() is told


@pytest.mark.parametrize("normed", [nn.utils.weight_norm, nn.utils.spectral_norm], ids=lambda each: each.__name__)
def test_weights_that_pytorchs_hooks_make_are_made_by_the_capture(normed: Any) -> None:
    """Vocoders and adversarial networks have them; every call of a module sets its weight anew."""
    torch.manual_seed(0)
    model = nn.Sequential(normed(nn.Conv1d(4, 8, 3)), nn.ReLU(), normed(nn.Conv1d(8, 4, 3))).eval()
    with torch.no_grad():
        graphed = _recorded(model, torch.randn(2, 4, 10))
        fast = Optimized(model, [Plan(graphed.signature, graphed)])
        for _ in range(4):
            x = torch.randn(2, 4, 10)
            torch.testing.assert_close(fast(x), model(x))
        next(model.parameters()).mul_(2.0)
        torch.testing.assert_close(fast(x), model(x))
        assert graphed.replays == 5
        for parameter in model.parameters():
            parameter.data = parameter.data * 2.0
        torch.testing.assert_close(fast(x), model(x))
        assert graphed.replays == 5
    model[0].register_forward_pre_hook(lambda module, given: (2 * given[0],))
    with pytest.raises(NotGraphable, match="hooks"):
        _recorded(model, torch.randn(2, 4, 10))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_that_hooks_make_are_made_by_captured_steps_with_their_gradients() -> None:
    model, x = nn.Sequential(nn.utils.weight_norm(nn.Conv1d(4, 8, 3))), torch.randn(2, 4, 10)
    graphed = graph_training(model, (x,), {}, model, loss=None, executor=TapeExecutor())
    found = []
    for call in (model, graphed):
        model.zero_grad()
        with torch.no_grad():
            model[0].weight_g.fill_(1.5)
        call(x).square().sum().backward()
        found.append([model[0].weight.detach(), model[0].weight_v.grad.clone(), model[0].weight_g.grad.clone()])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert graphed.replays == 1


def test_a_model_that_switches_to_inference_mode_by_itself_is_captured() -> None:
    class Inferring(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        @torch.inference_mode()
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            y += 1.0
            return y

    model = Inferring().eval()
    fast = _recorded(model, torch.randn(2, 4))
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 4)
            torch.testing.assert_close(fast(x), model(x))
    assert fast.replays == 3


def test_a_weight_that_is_swapped_for_another_is_noticed() -> None:
    """PyTorch swaps what nobody else holds: of a recording that is the stand-in's tape, which a CUDA graph has not."""
    model, x = nn.Linear(8, 8).eval(), torch.randn(4, 8)
    graphed = _recorded(model, x)
    for variant in graphed._variants:
        for take in (variant.home, *variant.loans):
            take.recording.calls.clear()
    graphed._studio.executor.tape = None
    with torch.no_grad():
        torch.utils.swap_tensors(model.weight, nn.Parameter(torch.ones(8, 8)))
        torch.testing.assert_close(graphed(x), model(x))
    assert any("weight moved" in reason for reason in graphed.misses)
