"""Compiled code called without its compiler's guards: what they look at is watched, as for recorded calls.

PyTorch's tracer looks through everything a model reads before every call, and so do we: twice as long before the first
kernel starts, which a call of a millisecond feels. A call that is one compiled graph needs no more than that graph, the
tensors it takes, and the way its results become the model's. Nothing is copied, nothing is recorded: inputs are read
where they are, results are new at every call.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.engine.capture.capture import Miss, Studio, restoring
from ridgeline.engine.guards.call_match import Matcher
from ridgeline.engine.guards.check import Watch
from ridgeline.engine.pytree import Flat
from ridgeline.engine.replay.outputs import Maker, Scene
from ridgeline.engine.replay.static_inputs import Statics
from ridgeline.engine.signature import Signature, recordable
from ridgeline.errors import NotGraphable

Call = Callable[..., Any]
MOST_BYTES = 12 << 30
"""Inputs are copied once while the call is looked at; of calls with more than this, the host's part is no matter.
Two of four gigabytes are read in 2 ms, of which guards and our look on top of them are a fiftieth."""
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class Heard:
    """One run of a compiled graph: what ran, what it was given and what it returned."""

    graph: Callable[..., Any]
    given: tuple[Any, ...]
    returned: Sequence[Any]


_listening = threading.local()


@contextlib.contextmanager
def hearing() -> Iterator[list[Heard]]:
    """Inside, every compiled graph of ours that runs on this thread is noted."""
    before = getattr(_listening, "heard", None)
    found: list[Heard] = []
    _listening.heard = found
    try:
        yield found
    finally:
        _listening.heard = before


def heard_on_this_thread() -> list[Heard] | None:
    """The list that ``hearing`` fills on this thread, or None outside of it."""
    return getattr(_listening, "heard", None)


@dataclass(frozen=True, slots=True)
class Here:
    """Where code runs as it does anyway: all that a studio asks of what would record."""

    device_type: str

    @property
    def generator(self) -> str:
        return self.device_type


class Shortcut:
    """A call that is one compiled graph, run without looking at anything but the watch."""

    def __init__(self, call: Call, matcher: Matcher, studio: Studio, way: Way) -> None:
        self.call, self.matcher, self.watch = call, matcher, studio.watch
        self.misses: dict[str, int] = {}
        self._graph, self._maker, self._outputs = way.graph, way.maker, way.outputs
        self._places, self._feed = way.places, way.feed
        self._single = way.single
        self._pure = studio.is_pure()
        self._questions = studio.questions
        self._hooks = Watch(self.watch.root, hooks_only=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flat = self.matcher.fits(args, kwargs, self.watch.root, False)
        if flat is None:
            return self._guarded("another call than the one that was looked at", args, kwargs)
        result = self.replay(flat)
        if result.__class__ is Miss:
            return (self.watch.root if result.stale else self.call)(*args, **kwargs)
        return result

    def replay(self, flat: Flat) -> Any:
        """The result of a call whose signature is known, or a miss. What changes nothing may start before the look."""
        if not (self.watch.addressed() if self._pure else self.watch.same()):
            return self._stale()
        if self._questions is not None and (reason := self._questions.unlike(flat.tensors)):
            self.misses[reason] = self.misses.get(reason, 0) + 1
            return Miss(reason, stale=True)
        feed = self._feed.copy()
        for at, place in self._places:
            feed[at] = flat.tensors[place]
        found = self._ran(feed, flat)
        if self._pure and not self.watch.same():
            return self._stale()
        if self._single >= 0:
            return found[self._single]
        return self._maker([found[i] for i in self._outputs], flat.tensors, flat.containers)

    def _ran(self, feed: list[Any], flat: Flat) -> Any:
        """The graph without gradients, and outside of inference mode, as it was compiled, unless inputs are of it."""
        if torch.is_inference_mode_enabled() and not any(tensor.is_inference() for tensor in flat.tensors):
            with torch.inference_mode(False), torch.no_grad():
                return self._graph(*feed)
        if not torch.is_grad_enabled():
            return self._graph(*feed)
        torch._C._set_grad_enabled(False)
        try:
            return self._graph(*feed)
        finally:
            torch._C._set_grad_enabled(True)

    def _stale(self) -> Miss:
        self._pure = False
        reason = "; ".join(self.watch.changes()[:3])
        self.misses[reason] = self.misses.get(reason, 0) + 1
        unknown = not self._hooks.same() or bool(self.watch.replaced()) or self.watch.beyond_guards()
        return Miss(reason, stale=unknown)  # guards know the rest of what was compiled, not hooks, nor all functions

    def _guarded(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.misses[reason] = self.misses.get(reason, 0) + 1
        return self.call(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Way:
    """From a call's tensors to its result: the graph, what it is fed, and what becomes of what it returns."""

    graph: Call
    feed: list[Any]
    places: tuple[tuple[int, int], ...]
    outputs: tuple[int, ...]
    maker: Maker
    single: int  # which of the graph's results is the call's, where it is one; else −1


def shortcut(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], model: Any) -> Shortcut:
    """A compiled call without its guards; raises NotGraphable with the reason where it is more than one graph.

    The call is made once. What it writes to the model is the caller's to put back.
    """
    with torch.inference_mode(False), torch.no_grad():
        signature = recordable(args, kwargs, model, grad=False)
        matcher = Matcher.of(signature)
        if matcher is None:
            raise NotGraphable("its arguments can only be told by walking through them")
        studio = Studio(call, model, Watch(model), Here(_device_type(signature)))  # type: ignore[arg-type]
        with restoring(studio.watch):
            return Shortcut(call, matcher, studio, _way(studio, signature, args, kwargs))


def _device_type(signature: Signature) -> str:
    kinds = {tensor.device.type for tensor in signature.flat.tensors}
    if len(kinds) != 1:
        raise NotGraphable("its inputs are on no one device")
    if sum(tensor.nbytes for tensor in signature.flat.tensors) > MOST_BYTES:
        raise NotGraphable("its inputs are too large to be copied for a look at the call")
    return kinds.pop()


def _way(studio: Studio, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Way:
    flat = signature.flat
    studio.refuse(flat)
    studio.group(flat)
    statics = Statics(flat.tensors, studio.groups)
    seen = studio.observe(flat, statics)
    studio.judge(seen, statics)
    if seen.waits:
        raise NotGraphable("the host waits for a value, and may do something else for another")
    if any(map(studio.is_written, studio.groups)):
        raise NotGraphable("it writes to its inputs")
    del statics
    studio.call(*args, **kwargs)  # whatever the first call sets up stays
    studio.look_again()
    with hearing() as heard:
        result = studio.call(*args, **kwargs)
    studio.refuse_changes()
    if len(heard) != 1:
        raise NotGraphable(f"it is {len(heard)} compiled graphs")
    return _told(heard[0], result, flat, studio)


def _told(heard: Heard, result: Any, flat: Flat, studio: Studio) -> Way:
    """How the one graph that was heard is fed and what becomes of its results."""
    inputs = {id(tensor): i for i, tensor in enumerate(flat.tensors)}
    places = tuple((at, inputs[id(value)]) for at, value in enumerate(heard.given) if id(value) in inputs)
    feed = [None if id(value) in inputs else value for value in heard.given]
    for value in feed:
        if isinstance(value, Tensor) and id(value) not in studio.watch.tensors:
            raise NotGraphable("its graph takes a tensor that is neither an input nor the model's")
        if not isinstance(value, (Tensor, *_PLAIN)):
            raise NotGraphable(f"its graph takes a {type(value).__name__}")
    scene = studio.scene(dict(enumerate(flat.tensors)), flat.containers)
    maker = scene.maker(result)
    outputs = _places_of(scene, heard.returned)
    single = outputs[0] if isinstance(result, Tensor) and len(outputs) == 1 else -1
    scene.settle()
    scene.outputs = []
    return Way(heard.graph, feed, places, outputs, maker, single)


def _places_of(scene: Scene, returned: Sequence[Any]) -> tuple[int, ...]:
    known = {id(value): i for i, value in enumerate(returned)}
    if any(id(tensor) not in known for tensor in scene.outputs):
        raise NotGraphable("a result is made outside of its graph")
    return tuple(known[id(tensor)] for tensor in scene.outputs)
