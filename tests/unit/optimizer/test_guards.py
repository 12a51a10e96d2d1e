"""What a model reads besides its inputs, and whether it is noticed when it changes."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch.nn.functional as F
from recorder import TapeExecutor
from torch import nn

from ridgeline.engine.guards import native as glancing
from ridgeline.engine.guards.check import Watch
from ridgeline.engine.guards.code_reads import library
from ridgeline.engine.replay.inference import graph_inference
from ridgeline.errors import NotGraphable


class Config:
    """Settings that modules share."""

    def __init__(self) -> None:
        self.scale = 2.0
        self.nested = {"deep": [1, 2]}


class Model(nn.Module):
    """A little of everything."""

    kinds = ["a"]

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.table = torch.zeros(3)
        self.steps = [1, 2, 3]
        self.big = 123_456

    def forward(self, x: Any) -> Any:
        return self.inner(x)


def _set(path: str, value: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            model = model[int(parent)] if parent.isdigit() else getattr(model, parent)
        setattr(model, name, value)

    return change


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a parameter": (_set("inner.0.weight", nn.Parameter(torch.zeros(2, 2))), "weight"),
    "a parameter's memory": (lambda m: setattr(m.inner[0].weight, "data", torch.zeros(2, 2)), "weight moved"),
    "a parameter taken away": (_set("inner.0.bias", None), "bias"),
    "a parameter added": (lambda m: m.inner[1].register_parameter("more", nn.Parameter(torch.zeros(1))), "more"),
    "a parameter where none was": (lambda m: m.register_parameter("own", nn.Parameter(torch.zeros(1))), "own"),
    "a buffer": (_set("inner.1.running_mean", torch.ones(2)), "running_mean"),
    "a module": (lambda m: m.inner.__setitem__(0, nn.Linear(2, 2)), "inner"),
    "a module added": (lambda m: m.inner.append(nn.ReLU()), "inner"),
    "one part's training flag": (_set("inner.1.training", False), "training"),
    "an attribute": (_set("big", 5), "big"),
    "a new attribute": (_set("fresh", 5), "fresh"),
    "an attribute taken away": (lambda m: delattr(m, "big"), "big"),
    "a tensor attribute": (_set("table", torch.ones(3)), "table"),
    "a list": (lambda m: m.steps.append(4), "steps"),
    "an item of a list": (lambda m: m.steps.__setitem__(0, 9), "steps"),
    "a setting": (_set("config.scale", 3.0), "scale"),
    "a nested setting": (lambda m: m.config.nested.__setitem__("deep", []), "deep"),
    "an item deep inside": (lambda m: m.config.nested["deep"].append(1), "deep"),
    "a hook": (lambda m: m.inner[0].register_forward_hook(lambda *a: None), "hook"),
    "a hook before": (lambda m: m.register_forward_pre_hook(lambda *a: None), "hook"),
    "a hook backward": (lambda m: m.inner.register_full_backward_hook(lambda *a: None), "hook"),
    "something on its class": (lambda m: Model.kinds.append("b"), "kinds"),
    "another forward": (_set("inner.0.forward", lambda x: x), "linear layer"),
    "a global hook": (lambda m: nn.modules.module.register_module_forward_hook(lambda *a: None), "hook"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed_and_named(name: str) -> None:
    model = Model()
    watch = Watch(model)
    assert watch.same()
    change, word = CHANGES[name]
    handle = change(model)
    try:
        assert not watch.same()
        assert any(word in told for told in watch.changes()), watch.changes()
    finally:
        if hasattr(handle, "remove"):
            handle.remove()
        Model.kinds = ["a"]


def test_what_a_replay_does_itself_is_no_change() -> None:
    model = Model()
    watch = Watch(model)
    with torch.no_grad():
        model.inner[0].weight.add_(1)
        model.inner[1].running_mean.mul_(0.5)
    model.load_state_dict(model.state_dict())
    model.big = int("123456")  # an equal number is the same
    assert watch.same()
    assert watch._quick()  # and the next comparison is quick again


def test_everything_is_put_back() -> None:
    model = Model()
    watch = Watch(model)
    weight, steps = model.inner[0].weight, model.steps
    for change, _ in list(CHANGES.values())[:17]:
        change(model)
    watch.restore()
    assert model.inner[0].weight is weight
    assert model.steps is steps and steps == [1, 2, 3]
    assert model.big == 123_456 and not hasattr(model, "fresh")
    assert len(model.inner) == 2
    assert model.config.scale == 2.0


def test_contents_on_the_host_matter_where_the_capture_is_elsewhere() -> None:
    model = Model()
    watch = Watch(model)
    watch.hold_host_to("cuda")
    assert watch.same()
    model.table.add_(1)
    assert not watch.same()
    assert watch.changes() == ["Model.table was written to"]


def test_a_tensor_without_one_address_cannot_be_watched() -> None:
    model = nn.Linear(2, 2)
    model.odd = torch.nn.Buffer(torch.zeros(2)).as_subclass(_Strange)
    with pytest.raises(NotGraphable, match="_Strange"):
        Watch(model)


class _Strange(torch.Tensor):
    pass


class Instantiates(OrderedDict[str, Any]):
    """Makes a new object whenever it is asked, as the table of activations in transformers does."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


def test_a_table_that_makes_things_when_asked_has_not_changed() -> None:
    model = nn.Linear(2, 2)
    model.table = Instantiates(silu=nn.SiLU)
    watch = Watch(nn.Sequential(model))
    assert watch.same() and not watch.changes()
    model.table["silu"] = nn.GELU
    assert not watch.same()
    watch.restore()
    assert watch.same()


class Counted(nn.Module):
    """Counts its calls on its class, as registering hooks does."""

    num = 0.0

    def forward(self, x: Any) -> Any:
        return F.relu(x)


def _followed(model: nn.Module) -> Watch:
    watch = Watch(model)
    relu: Any = nn.functional.relu
    watch.follow({Counted.forward.__code__: globals(), relu.__code__: relu.__globals__})
    assert watch.same()
    return watch


@pytest.mark.parametrize("spilled", [False, True])
def test_code_that_is_replaced_is_noticed_also_where_its_neighbors_change_all_the_time(
    monkeypatch: Any, spilled: bool
) -> None:
    watch = _followed(Counted())
    for number in range(3 if spilled else 0):
        monkeypatch.setattr(Counted, "more", object(), raising=False)
        monkeypatch.setattr(F, "more", number, raising=False)
        assert watch.same()
    if spilled:
        assert watch._quick() and not any(space.cls is Counted for space in watch._spaces.values())
    for holder, name in ((Counted, "forward"), (F, "relu"), (torch, "relu")):
        with monkeypatch.context() as patched:
            patched.setattr(holder, name, lambda *args, **kwargs: args[-1])
            assert not watch.same() and any(name in change for change in watch.changes())
        assert watch.same()


def test_a_method_that_hides_one_of_a_tensor_or_of_a_layer_is_noticed(monkeypatch: Any) -> None:
    watch = _followed(Counted())
    monkeypatch.setattr(torch.Tensor, "softmax", lambda x, dim: x, raising=False)
    assert watch.changes() == ["Tensor.softmax was replaced"]


def test_a_hook_that_only_lets_gradients_through_is_no_hook_to_a_capture() -> None:
    def make_inputs_require_grads(module: Any, given: Any, output: torch.Tensor) -> None:
        output.requires_grad_(True)

    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_hook(make_inputs_require_grads)
    assert Watch(model).hooks()
    make_inputs_require_grads.__module__ = "transformers.modeling_utils"
    assert not Watch(model).hooks()
    model[0].register_forward_hook(lambda module, given, output: output * 2)
    assert Watch(model).hooks()


TYPED = """
import torch
from torch import nn

GAIN, TABLE = 2.0, [1.0]

class Typed(nn.Module):
    shift = 1.0

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) * GAIN + self.shift + TABLE[0]
"""


@pytest.mark.parametrize("file", ["<string>", "<stdin>", "<ipython-input-3-4d3a>", "/gone/model.py"])
@pytest.mark.parametrize("name", ["a_file_that_was_run", "__main__", None])
def test_code_that_was_typed_or_run_is_watched_as_a_file_is(file: str, name: str | None) -> None:
    names: dict[str, Any] = {} if name is None else {"__name__": name}
    exec(compile(TYPED, file, "exec"), names)
    model, x = names["Typed"](), torch.randn(2, 4)
    changes: list[Callable[[], Any]] = [
        lambda: names.update(GAIN=3.0), lambda: setattr(names["Typed"], "shift", 2.0),
        lambda: names["TABLE"].append(2.0),
    ]  # fmt: skip
    for change in changes:
        recording = graph_inference(model, (x,), {}, model, executor=TapeExecutor())
        assert recording.watch.same()
        change()
        assert not recording.watch.same()
        with torch.no_grad():
            assert torch.equal(recording(x), model(x))


@pytest.mark.parametrize("file", ["<eval_with_key>.3", "<frozen importlib._bootstrap>", torch.__file__, ""])
def test_what_tracers_and_libraries_made_is_not(file: str) -> None:
    assert library(file)


class Doubled(nn.Linear):
    """A linear layer and twice what it gives."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("look", ["in C", "in Python"])
@pytest.mark.parametrize("hooks_only", [False, True])
def test_a_layer_of_another_class_is_noticed_and_put_back(look: str, hooks_only: bool, monkeypatch: Any) -> None:
    if look == "in Python":
        monkeypatch.setattr(glancing, "native", lambda: None)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    watch = Watch(model, hooks_only=hooks_only)
    assert (type(watch.glance) is glancing.Plain) == (look == "in Python" or glancing.native() is None)
    assert watch.same()
    model[0].__class__ = Doubled
    assert not watch.same() and not watch.addressed() and watch.changes() == ["0 is a Doubled now"]
    watch.restore()
    assert watch.same() and type(model[0]) is nn.Linear


@pytest.mark.parametrize("write", ["numpy", "data", "storage"])
def test_what_is_written_to_memory_of_the_host_past_its_version_is_noticed(write: str) -> None:
    """A recording on a device has read it once, or Python has."""
    values = np.array([1.0, 2.0], dtype=np.float32)
    model = nn.Module()
    model.scales = torch.from_numpy(values)
    watch = Watch(model)
    watch.hold_host_to("cuda")
    assert watch.same()
    if write == "numpy":
        values[1] = 3.0
    elif write == "data":
        model.scales.data.fill_(3.0)
    else:
        model.scales.untyped_storage()[0] = 7
    assert not watch.same() and "scales" in watch.changes()[0]
    watch.restore()
    assert watch.same() and values.tolist() == [1.0, 2.0]
