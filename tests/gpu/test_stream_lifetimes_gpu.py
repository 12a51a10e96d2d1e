"""Results that another stream reads after ``record_stream`` and ``del`` are not written over by the next replay."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from torch import nn

from ridgeline.engine.drop_in import Optimized, Plan
from ridgeline.engine.replay.inference import graph_inference
from ridgeline.engine.replay.training import graph_training

pytestmark = pytest.mark.gpu
CYCLES = 200_000_000
"""Some tenth of a second in which the other stream has not yet begun to read."""


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), device="cuda"))

    def forward(self, x: Any) -> Any:
        return x * self.scale


def _read_late(result: Any, stream: Any, into: Any) -> None:
    """Copies a result on another stream, which gets there long after the caller has let go of it."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        into.copy_(result)
    result.record_stream(stream)


@pytest.mark.parametrize("shape", [(1024, 1024), (8, 8)], ids=["large", "small"])
def test_a_lent_result_outlives_its_last_reference_for_a_stream_that_was_named(shape: tuple[int, int]) -> None:
    model, stream = Scaled(), torch.cuda.Stream()
    x = torch.ones(*shape, device="cuda")
    with torch.no_grad():
        recording = graph_inference(model, (x,), {}, model)
        fast = Optimized(model, [Plan(recording.signature, recording)])
        late = [torch.zeros_like(x) for _ in range(3)]
        for number, into in enumerate(late):
            _read_late(fast(x * (number + 1)), stream, into)
        for number in range(4):
            fast(x * -number)
        torch.cuda.synchronize()
        assert [into.unique().tolist() for into in late] == [[1.0], [2.0], [3.0]]
        assert recording.replays >= 7


def test_the_memory_is_lent_again_when_the_stream_is_done() -> None:
    model, stream = Scaled(), torch.cuda.Stream()
    x = torch.ones(1024, 1024, device="cuda")
    with torch.no_grad():
        recording = graph_inference(model, (x,), {}, model)
        result = recording(x)
        place = result.data_ptr()
        _read_late(result, stream, torch.zeros_like(x))
        del result
        assert recording(x).data_ptr() != place
        torch.cuda.synchronize()
        assert recording(x).data_ptr() == place


def test_recorded_steps_wait_for_who_reads_their_results_and_gradients() -> None:
    model, stream = Scaled(), torch.cuda.Stream()
    x = torch.ones(1024, 1024, device="cuda")
    graphed = graph_training(model, (x,), {}, model, loss=lambda y: y.sum())
    seen, slopes = torch.zeros_like(x), torch.zeros((), device="cuda")
    result = graphed(x * 3)
    _read_late(result, stream, seen)
    result.sum().backward()
    del result
    _read_late(model.scale.grad, stream, slopes)
    model.zero_grad(set_to_none=True)
    for _ in range(3):
        graphed(x * 5).sum().backward()
        model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    assert seen.unique().tolist() == [3.0]
    assert slopes.item() == pytest.approx(3.0 * x.numel())
    assert graphed.replays >= 3


def test_what_another_process_was_handed_is_never_written_again() -> None:
    model, x = Scaled(), torch.ones(1024, 1024, device="cuda")
    with torch.no_grad():
        recording = graph_inference(model, (x,), {}, model)
        result = recording(x)
        place = result.data_ptr()
        result.untyped_storage()._share_cuda_()
        del result
        assert place not in {recording(x).data_ptr() for _ in range(3)}
