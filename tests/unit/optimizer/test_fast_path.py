"""Calls told at a glance: like the last one they run at once, and whatever was changed behind their back is noticed."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

import fast_path_changes
from fast_path_changes import CHANGES, Block, Cache, Scene

from ridgeline.engine import pytree as tree
from ridgeline.engine.guards import native as glance
from ridgeline.engine.guards.dict_version import Stillness, stillness, version
from ridgeline.engine.replay.inference import MISSED


@pytest.fixture
def counted(monkeypatch: Any) -> Iterator[None]:
    """Before Python 3.12 nothing counts changes of dictionaries: here all that were asked for are compared."""
    if stillness.counts:
        yield
        return
    asked: dict[int, dict[Any, Any]] = {}
    state = {"was": [], "moves": 0}

    def noted(held: dict[Any, Any]) -> Any:
        asked[id(held)] = held
        return version(held)

    def now(self: Any) -> int:
        found = [version(held) for held in asked.values()]
        if found != state["was"]:
            state["was"], state["moves"] = found, state["moves"] + 1
        return state["moves"]

    for module in ("guards.check", "pytree"):
        monkeypatch.setattr(f"ridgeline.engine.{module}.version", noted)
    monkeypatch.setattr(Stillness, "now", now)
    monkeypatch.setattr(stillness, "counts", True)
    tree._PIECES.clear()
    yield


@pytest.fixture
def scene(counted: None) -> Scene:
    if glance.native() is None:
        pytest.skip("no C compiler here")
    return Scene()


def test_the_same_call_is_told_at_a_glance(scene: Scene) -> None:
    assert scene.glances() == 1
    scene.agree()
    scene.agree()  # the cache has grown: its contents are nobody's business


def test_other_tokens_are_too_wherever_they_lie(scene: Scene) -> None:
    for _ in range(3):
        scene.token = torch.randn(1, 4)
        assert scene.glances() == 1
        scene.agree()


def test_a_model_that_holds_complex_numbers_is_looked_at_in_full(counted: None) -> None:
    """Such tensors are looked at in Python, which the helper in C was handed as its own: the search itself gave up."""
    from ridgeline.engine.drop_in import Optimized, Plan
    from ridgeline.engine.replay.inference import graph_inference

    class Turned(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.polar(torch.ones(4), torch.arange(4.0))

        def forward(self, x: Any) -> Any:
            return torch.view_as_real(torch.view_as_complex(x) * self.table)

    model, x = Turned().eval(), torch.randn(3, 4, 2)
    recording = graph_inference(model, (x,), {}, model, executor=fast_path_changes.TapeExecutor())
    fast = Optimized(model, [Plan(recording.signature, recording)])
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(3, 4, 2)
            torch.testing.assert_close(fast(x), model(x))
        model.table = model.table.conj()  # where it lay, of the same size
        torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize(
    ("change", "plain"),
    [*((change, False) for change in CHANGES), *((change, True) for change in CHANGES[::3])],
    ids=lambda each: each if isinstance(each, bool) else each.__name__[1:],
)
def test_what_is_changed_behind_its_back_is_noticed(change: Any, plain: bool, counted: None, monkeypatch: Any) -> None:
    if plain:
        monkeypatch.setattr(glance, "native", lambda: None)
        monkeypatch.setattr("ridgeline.engine.guards.fast_path.native", lambda: None)
    elif glance.native() is None:
        pytest.skip("no C compiler here")
    monkeypatch.setattr(Block, "gain", 2.0)
    monkeypatch.setattr(fast_path_changes, "SCALE", 1.0)
    scene = Scene()
    try:
        assert plain or scene.glances() == 1
        change(scene)
        scene.agree()
        scene.agree()
    finally:
        fast_path_changes.WORDS.discard("b")


def test_weights_written_in_place_are_read_anew(scene: Scene) -> None:
    with torch.no_grad():
        scene.model.blocks[0].linear.weight.mul_(2)
    assert scene.glances() == 1
    scene.agree()


def test_other_values_and_other_names_go_the_long_way(scene: Scene) -> None:
    scene.agree(flag=False)
    assert scene.recording.quick((scene.token, scene.cache, True), {}, False) is MISSED
    assert scene.recording.quick((scene.token,), {"flag": True, "cache": scene.cache}, False) is MISSED
    assert scene.recording.quick((scene.token, scene.cache), {"flag": 1}, False) is MISSED


def test_another_cache_goes_the_long_way(scene: Scene) -> None:
    scene.agree(cache=Cache())
    scene.agree()


@pytest.mark.parametrize(
    "around",
    [lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.device("meta"), torch.autograd.forward_ad.dual_level],
    ids=["autocast", "device", "tangents"],
)
def test_other_surroundings_go_the_long_way(around: Any, scene: Scene) -> None:
    with torch.no_grad(), around():
        assert scene.recording.quick((scene.token, scene.cache), {"flag": True}, False) is MISSED
    assert scene.glances() == 1


def test_settings_are_looked_at(scene: Scene) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert scene.recording.quick((scene.token, scene.cache), {"flag": True}, False) is MISSED
    finally:
        torch.use_deterministic_algorithms(False)
    assert scene.glances() == 1


def test_settings_that_say_the_same_in_other_words_are_told_at_a_glance_again(scene: Scene) -> None:
    kind = ("cuda", "matmul")
    before = torch._C._get_fp32_precision_getter(*kind)
    torch._C._set_fp32_precision_setter(*kind, "ieee" if before == "none" else "none")
    try:
        assert scene.recording.quick((scene.token, scene.cache), {"flag": True}, False) is MISSED
        for _ in range(3):
            scene.agree()
        assert scene.glances() == 1
    finally:
        torch._C._set_fp32_precision_setter(*kind, before)


def test_inputs_that_ask_for_gradients_run_as_written(scene: Scene) -> None:
    token = torch.randn(1, 4, requires_grad=True)
    assert scene.recording.quick((token, scene.cache), {"flag": True}, True) is MISSED
    with pytest.warns(UserWarning, match="requires gradients"):
        result = scene.fast(token, scene.cache, flag=True)
    assert result.requires_grad


def test_a_lane_keeps_nobody_alive(scene: Scene) -> None:
    held, lane = weakref.ref(scene.cache), scene.recording._lane
    assert lane is not None and lane._call is not None
    scene.cache = Cache()
    gc.collect()
    assert held() is None and lane._call is None and lane._piece is None  # nor its lists, and the tensors in them
    scene.agree()


def test_memory_that_was_taken_away_is_noticed(scene: Scene) -> None:
    weight = scene.model.blocks[0].linear.weight
    kept = weight.detach().clone()
    weight.untyped_storage().resize_(0)
    assert scene.recording.quick((scene.token, scene.cache), {"flag": True}, False) is MISSED
    assert any("moved to other memory" in word for word in scene.recording.watch.changes())
    weight.untyped_storage().resize_(kept.nbytes)
    with torch.no_grad():
        weight.copy_(kept)
    scene.agree()
