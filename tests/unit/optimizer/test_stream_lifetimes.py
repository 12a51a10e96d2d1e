"""Memory that another stream still reads is not written to, with streams that a test ends by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

from recorder import TapeExecutor
from torch import nn

from ridgeline.engine.replay.inference import graph_inference
from ridgeline.engine.replay.lifetimes import Readers, name_abroad, name_reader
from ridgeline.engine.replay.training import graph_training


class Stream:
    """A stream whose work is done when a test says so; it is its own event."""

    device = "cpu"

    def __init__(self) -> None:
        self.idle = False

    def record_event(self) -> Stream:
        return self

    def query(self) -> bool:
        return self.idle


def test_results_go_elsewhere_until_a_stream_that_reads_the_last_one_is_done() -> None:
    model, x = nn.Linear(8, 70_000).eval(), torch.randn(8, 8)
    graphed, stream = graph_inference(model, (x,), {}, model, executor=TapeExecutor()), Stream()
    result = graphed(x)
    place = result.data_ptr()
    name_reader(result[:2], stream)
    del result
    for i in range(3):
        other = graphed(x * i)
        assert other.data_ptr() != place
        torch.testing.assert_close(other, model(x * i))
        del other
    stream.idle = True
    assert graphed(x).data_ptr() == place


def test_captured_steps_wait_for_streams_that_read_results_and_gradients(monkeypatch: Any) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(Readers, "wait", lambda self: waited.extend(self.streams))
    model, x, stream, other = nn.Linear(8, 70_000), torch.randn(8, 8), Stream(), Stream()
    graphed = graph_training(model, (x,), {}, model, executor=TapeExecutor())
    result = graphed(x)
    name_reader(result, stream)
    result.sum().backward()
    assert waited == [stream]
    name_reader(model.weight.grad, other)
    del result
    model.zero_grad(set_to_none=True)
    result = graphed(x)
    assert waited == [stream, stream, other]
    result.sum().backward()
    assert len(waited) == 3, "streams are waited for until the next forward, which nobody's memory outlives"


def test_what_another_process_was_handed_is_never_written_again() -> None:
    model, x = nn.Linear(8, 70_000), torch.randn(8, 8)
    graphed = graph_inference(model, (x,), {}, model, executor=TapeExecutor())
    result = graphed(x)
    place = result.data_ptr()
    with pytest.raises(Exception, match=r".*"):
        result.untyped_storage()._share_cuda_()  # no memory of a device's, which PyTorch says after we have heard of it
    del result
    assert place not in {graphed(x).data_ptr() for _ in range(3)}
    steps = graph_training(model, (x,), {}, model, executor=TapeExecutor())
    name_abroad(steps(x).untyped_storage())
    torch.testing.assert_close(steps(x), model(x))
    assert list(steps.misses) == ["a result or a gradient was handed to another process"]


def test_who_names_a_stream_is_heard_through_pytorchs_own_method() -> None:
    tensor, stream = torch.zeros(2), Stream()
    readers = Readers([tensor])
    with pytest.raises((TypeError, RuntimeError)):
        tensor[:1].record_stream(stream)  # no stream of PyTorch's, which says so after we have heard of it
    assert readers.streams == [stream]
    name_reader(torch.zeros(2), stream)
    assert torch.Tensor.record_stream.__name__ == "record_stream"
    del readers
    name_reader(tensor, stream)
