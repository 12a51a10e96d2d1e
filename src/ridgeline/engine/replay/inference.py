"""Calls recorded once as CUDA graphs and replayed: microseconds of work for the host, the results of the call.

A recording knows addresses only. What is needed so that a caller cannot tell: inputs are copied to where the recording
reads them (or found there already); what the call writes to its inputs is written to the caller's; containers that the
call changes, such as key-value caches, are changed at every replay; results are built anew, of the same types; memory
lent to a caller is not overwritten while it is held; and everything else the model reads is watched.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from ridgeline.engine.capture.capture import (
    LENT_BYTES,
    PINNED_BYTES,
    Miss,
    Studio,
    alias,
    holders,
    own_copies,
    restoring,
    uncached_casts,
)
from ridgeline.engine.capture.cuda_graph import Executor, Recording, executor_for
from ridgeline.engine.capture.host_rng import draw
from ridgeline.engine.capture.probe import Observation, Values, restored_random
from ridgeline.engine.capture.side_effects import bound as bound_notes
from ridgeline.engine.guards.call_match import Late, Matcher
from ridgeline.engine.guards.check import Watch
from ridgeline.engine.guards.fast_path import Lane
from ridgeline.engine.guards.native import Places, address
from ridgeline.engine.pytree import Flat, TooLarge
from ridgeline.engine.replay.lifetimes import Readers
from ridgeline.engine.replay.outputs import Effect, Maker, Scene, effects, shots
from ridgeline.engine.replay.static_inputs import Group, Statics, grouped
from ridgeline.engine.replay.training import GraphedTraining, graph_training
from ridgeline.engine.signature import Signature, difference, recordable
from ridgeline.errors import NotGraphable

BRISK_S = 3e-3
"""A call shorter than this is worth sparing the host every copy."""
SHORT_S = 10e-3
"""A call shorter than this is worth sparing it the copies of inputs that lie where they lay."""
_LOANS = 2
_MOST_VARIANTS = 4
_SIGHTINGS = 2
_MOST_REASONS = 64


_use_count = torch._C._storage_Use_Count
_REQUIRES_GRAD = attrgetter("requires_grad")
GUESSED = "a value that the host reads is not the one it read when the call was recorded"
MISSED = object()
"""What a look at a glance answers where it cannot tell: the call is then looked at in full."""


@dataclass(slots=True)
class Take:
    """One recording with the memory its results lie in."""

    recording: Recording
    outputs: list[Tensor]
    scene: Scene
    result: Maker
    effects: list[Effect]
    free: list[tuple[int, int, Any, int]]
    """Storages of the results, how many hold each when no caller does, each as an object, and how many hold that."""
    right: Tensor | None = None
    """Whether the values that the host was told it has read are those of this replay, where some were guessed."""
    readers: Readers = field(init=False)

    def __post_init__(self) -> None:
        self.readers = Readers(self.outputs)

    def is_free(self) -> bool:
        for storage, held, memory, refs in self.free:  # a generator would take four times as long
            if _use_count(storage) > held or getrefcount(memory) > refs:
                return False
        return not self.readers or self.readers.done()

    def lend(self) -> list[Tensor]:
        return [output.detach() for output in self.outputs]

    def copies(self) -> list[Tensor]:
        return own_copies(self.outputs)

    def build(self, lent: Sequence[Tensor], flat: Flat, noted: list[Any]) -> Any:
        held = [*flat.containers, *noted] if noted else flat.containers
        for effect in self.effects:
            effect(lent, flat.tensors, held)
        found = self.result(lent, flat.tensors, held)
        if self.scene.made:
            self.scene.made.clear()
        return found


@dataclass(slots=True)
class Variant:
    """Recordings that read some inputs at fixed addresses of the caller's and the others from memory of their own."""

    pins: list[int]
    free: list[int]
    """The other inputs, which are copied."""
    packed: bytes
    """The same, for a look in C."""
    places: Places
    """Addresses of all inputs when it was recorded; those of the pinned ones count."""
    statics: Statics
    written: list[Group]
    home: Take
    """Its results are always copied."""
    loans: list[Take]
    """Their results are handed out as they are, while nobody holds those of before."""

    def fits(self, tensors: list[Tensor]) -> bool:
        return not self.pins or self.places.hold(tensors)

    def start(self, flat: Flat) -> Take:
        """Copies the inputs in and runs a recording whose results nobody holds."""
        if self.statics.groups:
            self.statics.fill(flat.tensors)
        for take in self.loans:
            if take.is_free():
                break
        else:
            take = self.home
        take.recording.replay()
        return take

    def finish(self, take: Take, flat: Flat, noted: list[Any]) -> Any:
        """Hands out what a recording has made, and writes what it wrote to its inputs to the caller's.

        ``noted`` are the model's own dictionaries in which calls leave something.
        """
        if self.written:
            self.statics.write_back(flat.tensors, self.written)
        return take.build(take.copies() if take is self.home else take.lend(), flat, noted)


class Graphed:
    """A call that is replayed where it can be and made where it cannot; ``misses`` says why it could not."""

    def __init__(self, call: Callable[..., Any], signature: Signature, studio: InferenceStudio) -> None:
        self.call = call
        self.signature = signature.detached()
        self.matcher = Matcher.of(signature)
        self.watch = studio.watch
        self.misses: dict[str, int] = {}
        self.before: Callable[[], Any] | None = None  # called before every replay
        self.replays = 0
        self._studio = studio
        self._variants = studio.variants
        self._pure = studio.is_pure()
        self._writes = not self._pure
        self._questions, self._notes = studio.questions, studio.notes
        self._lock = threading.RLock()
        self._sighted: dict[tuple[int, ...], int] = {}
        self._lane: Lane | None = None
        self._met: weakref.ref[Any] | None = None
        self._unlike = 0
        self._own = {id(variant) for variant in studio.variants}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flat = self.matcher.fits(args, kwargs, self.watch.root, False) if self.matcher is not None else None
        if flat is None:
            return self._walked(args, kwargs)
        return self._answer(self.replay(flat), args, kwargs)

    def _walked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            signature = Signature.of(args, kwargs, self.watch.root, grad=False)
        except TooLarge:
            return self._made("an argument holds too many objects", args, kwargs)
        if signature.tokens != self.signature.tokens or signature.ambient != self.signature.ambient:
            return self._made(difference(self.signature, signature), args, kwargs)
        return self._answer(self.replay(signature.flat), args, kwargs)

    def _answer(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if result.__class__ is Miss:
            return (self.watch.root if result.stale else self.call)(*args, **kwargs)
        return result

    def replay(self, flat: Flat) -> Any:
        """The result of a call whose signature is known to be the recorded one, or a miss."""
        with self._lock:
            executor = self._studio.executor
            # What changes nothing outside may start before all is compared, if its weights are where they were.
            if not (self.watch.addressed() if self._pure else self.watch.same()):
                return self._stale()
            if executor.is_recording():
                return self._miss("the call itself is being recorded", stale=False)
            if self._questions is not None and (reason := self._questions.unlike(flat.tensors)):
                return self._miss(reason, stale=True)
            if self._notes and (reason := self._notes.unlike()):
                return self._miss(reason, stale=True, usual=True)
            variant = self._variant(flat)
            if variant is None:
                return self._miss("an input that is used in place lies elsewhere", stale=False)
            if self._writes and self._studio.meets(flat, variant):
                return self._miss("an input lies in the model's own memory, and the call writes", stale=True)
            result = self._played(variant, flat, compared=not self._pure)
            if result.__class__ is not Miss:
                self._widen(flat)
            return result

    def quick(self, args: tuple[Any, ...], kwargs: dict[str, Any], recorded: bool) -> Any:
        """The result of a call that is like the last one at a glance, else ``MISSED``."""
        if self._lane is None:
            return MISSED
        with self._lock:
            lane = self._lane
            flat = lane.take(args, kwargs) if lane is not None else None
            if flat is None or lane is None or self._studio.executor.is_recording():
                return MISSED
            if recorded and any(map(_REQUIRES_GRAD, flat.tensors)):
                return MISSED
            if self._questions is not None and self._questions.unlike(flat.tensors):
                return MISSED
            for variant in self._variants:
                if variant.fits(flat.tensors):
                    found = self._played(variant, flat) if lane.apart(flat.tensors, variant.packed) else MISSED
                    return MISSED if found.__class__ is Miss else found
            return MISSED

    def _played(self, variant: Variant, flat: Flat, *, compared: bool = True) -> Any:
        """What a recording makes of a call; ``compared`` if all was looked at before it."""
        self._studio.executor.arrive()
        if self.before is not None:
            self.before()
        recorded = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            self._notes.clear()
            take = variant.start(flat)
            if take.right is not None and not bool(take.right):
                return self._miss(GUESSED, stale=False)
            if not compared and not self.watch.same():
                return self._stale()
            result = variant.finish(take, flat, self._notes.boxes)
            if self._notes:
                self._notes.bound(self.watch)
            if self._studio.host_draws:
                draw(self._studio.host_draws)
        finally:
            torch._C._set_grad_enabled(recorded)
        self.replays += 1
        return result

    def _widen(self, flat: Flat) -> None:
        """Calls like this one are told at a glance, once two in a row were given the same object.

        What every call changes cannot be: where one leaves notes, all are looked at in full.
        """
        if self._notes:
            return
        met = flat.piece[1] if isinstance(flat, Late) else None
        again = met is (None if self._met is None else self._met())
        self._met = None if met is None else weakref.ref(met)
        if (self._lane is not None and self._lane.renewed(flat)) or self._unlike >= _SIGHTINGS:
            return
        due = again and self.replays > 1
        self._lane = Lane.of(self.matcher, self.watch, flat) if due else None
        self._unlike += due and self._lane is None  # where it cannot be told at a glance, that is not tried for ever

    @property
    def is_pure(self) -> bool:
        """Whether a replay changes nothing but the memory of its own results."""
        return self._pure

    def forget_others(self) -> None:
        """Lets go of recordings at other places than those of the first call, whose inputs may be gone."""
        with self._lock:
            own = [variant for variant in self._variants if id(variant) in self._own]
            self._variants[:] = own or self._variants
            self._sighted.clear()

    def pool_bytes(self) -> int:
        """Memory that the recordings hold besides the caller's."""
        return self._studio.executor.pool_bytes()

    def _stale(self) -> Miss:
        self._pure = False  # a model that changed once is compared first from now on
        return self._miss("; ".join(self.watch.changes()[:3]), stale=True)

    def _variant(self, flat: Flat) -> Variant | None:
        for variant in self._variants:
            if variant.fits(flat.tensors):
                return variant
        return self._moved(flat)

    def _moved(self, flat: Flat) -> Variant | None:
        """Inputs that must be read in place and lie elsewhere now: recorded anew once they are seen there again.

        A cache that grows and is cut back lies in two places by turns, so the last few places are remembered.
        """
        places = tuple(flat.tensors[i].data_ptr() for i in self._studio.must_pin)
        times = self._sighted.pop(places, 0) + 1
        self._sighted[places] = times
        if len(self._sighted) > _MOST_VARIANTS:
            del self._sighted[next(iter(self._sighted))]
        if times < _SIGHTINGS:
            return None
        self._sighted[places] = -_MOST_REASONS  # where it fails it is not tried again at every call
        try:
            made = self._studio.record_at(flat)
        except NotGraphable:
            return None
        del self._sighted[places]
        self._variants.insert(0, made)
        del self._variants[_MOST_VARIANTS:]
        return made

    def _made(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._miss(reason, stale=False)
        return self.call(*args, **kwargs)

    def _miss(self, reason: str, *, stale: bool, usual: bool = False) -> Miss:
        if reason in self.misses or len(self.misses) < _MOST_REASONS:
            self.misses[reason] = self.misses.get(reason, 0) + 1
        return Miss(reason, stale=stale, usual=usual)


def graph_inference(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], model: Any, *,
                    executor: Executor | None = None, guesses: bool = False) -> Graphed:  # fmt: skip
    """Records ``call(*args, **kwargs)`` without gradients; ``model`` is what it computes, and whose state is watched.

    ``call`` may be the model or a compiled form of it. Raises NotGraphable with the reason where a replay could differ
    from a call: Python state that a call changes, values of tensors read on the host, hooks, random numbers drawn on
    the host. Nothing of the caller's is changed: inputs, buffers and random states are as before. With ``guesses``
    values that the host reads are taken to be what they were; every replay waits for the device and compares them, and
    where one is another the call is made as it is.
    """
    with _quiet():
        signature = recordable(args, kwargs, model, grad=False)
        watch = Watch(model)
        given = signature.flat.tensors + [tensor for _, tensor in watch.tensors.values()]
        studio = InferenceStudio(call, model, watch, executor or executor_for(given))
        studio.guesses = guesses
        with restoring(watch):
            studio.prepare(signature.flat)
            studio.notes.put_back(watch)
    return Graphed(call, signature, studio)


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def _quiet() -> Iterator[None]:
    """No gradients, no inference tensors, and casts of weights inside the recording rather than before it."""
    with uncached_casts(), torch.inference_mode(False), torch.no_grad():
        yield


class InferenceStudio(Studio):
    """Where calls without gradients are recorded."""

    def __init__(self, call: Callable[..., Any], model: Any, watch: Watch, executor: Executor) -> None:
        super().__init__(call, model, watch, executor)
        self.variants: list[Variant] = []
        self.must_pin: list[int] = []
        self._brisk = self._short = False
        self._own: frozenset[int] = frozenset()

    def prepare(self, flat: Flat) -> None:
        self.refuse(flat)
        self.group(flat)
        statics = Statics(flat.tensors, self.groups)
        seen = self.observe(flat, statics)
        self.throw(seen, flat, statics)
        self.judge(seen, statics)
        self.must_pin = [i for g in self.groups if self.in_place(g) for i in g.indices]
        self._warm(flat, statics)
        del statics  # copies of what is used in place; the recordings are made without them
        gc.collect()  # recordings that nobody holds any more must not be destroyed while another is made
        self._record_all(flat)
        self._own = frozenset(_storage_of(t) for _, t in self.watch.tensors.values() if t.layout is torch.strided)

    def take_notes(self, seen: Observation) -> None:
        self.adopt_notes(seen, bound_notes(self.watch), made=False)

    def _warm(self, flat: Flat, statics: Statics) -> None:
        kept = Values(self.written_model)

        def run() -> None:
            statics.fill(flat.tensors)
            kept.put_back()
            arguments, _ = self.twin(flat, statics.tensors)
            self.call(*arguments[0], **arguments[1])

        try:
            with restored_random():
                self.executor.warm_up(run)
                self.look_again()
                began = time.perf_counter()
                self.executor.warm_up(run)
                spent_s = time.perf_counter() - began
                self._brisk, self._short = spent_s < BRISK_S, spent_s < SHORT_S
                self.rehearse(run)
        finally:
            kept.put_back()
        self.refuse_changes()

    def _record_all(self, flat: Flat) -> None:
        least = 1 if self._short else PINNED_BYTES
        fixed = [g for g in self.groups if self.in_place(g)]
        more = [g for g in self.groups if g not in fixed and not self.is_written(g) and g.num_bytes >= least]
        if more:
            self.variants.append(self._variant(flat, [*fixed, *more], lends=True))
        self.variants.append(self._variant(flat, fixed, lends=not more))

    def meets(self, flat: Flat, variant: Variant) -> bool:
        """Whether an input that is copied lies in memory of the model: what is written to one would show in the other.

        Inputs that are read in place lie where they lay when they were recorded, and so does the model.
        """
        return any(_storage_of(flat.tensors[i]) in self._own for i in variant.free)

    def record_at(self, flat: Flat) -> Variant:
        """A variant for other addresses of the inputs that are used in place."""
        with _quiet():
            return self._variant(flat, [g for g in self.groups if self.in_place(g)], lends=False)

    def _variant(self, flat: Flat, pinned: Sequence[Group], *, lends: bool) -> Variant:
        """Records with some inputs in place."""
        pins = [i for g in pinned for i in g.indices]
        free = [g for g in self.groups if g not in pinned]
        statics = Statics(flat.tensors, free)
        tensors = {**statics.tensors, **{i: alias(flat.tensors[i]) for i in pins}}
        home, loans = self._takes(flat, tensors, lends)
        written = [g for g in free if self.is_written(g)]
        others = sorted(set(range(len(flat.tensors))).difference(pins))
        places = Places(list(map(address, flat.tensors)), pins)
        return Variant(pins, others, array("q", others).tobytes(), places, statics, written, home, loans)

    def _takes(self, flat: Flat, tensors: dict[int, Tensor], lends: bool) -> tuple[Take, list[Take]]:
        """A recording whose results are copied, and some whose results are lent.

        Recordings share a pool, and one may write where another had results. So large results are lent by the first of
        all: they are alive while the others are recorded, and none of those writes there. A quick call has a second one
        in a pool of its own, for callers who let go of a result only when they have the next. Small results of a quick
        call lie outside of the pool, and are copied there by the recording itself.
        """
        first = self._take(flat, tensors)
        num_bytes = sum(o.numel() * o.element_size() for o in first.outputs)
        if num_bytes >= LENT_BYTES:
            if not lends:
                return first, []
            more = [self._take(flat, tensors, executor=self.executor.fork())] if self._brisk else []
            return self._take(flat, tensors), [first, *more]
        if not self._brisk or not first.outputs:
            return first, []
        return first, [self._take(flat, tensors, first.outputs) for _ in range(_LOANS)]

    def _take(self, flat: Flat, tensors: dict[int, Tensor], like: Sequence[Tensor] = (),
              executor: Executor | None = None) -> Take:  # fmt: skip
        """One recording; its results in memory outside of the pool if it is told what they are like."""
        arguments, boxes = self.twin(flat, tensors)
        before = shots(boxes)
        scene = self.scene(tensors, boxes)
        outside = Statics(like, grouped(like, range(len(like))))

        def run() -> tuple[Maker, list[Effect], Tensor | None]:
            result = self.call(*arguments[0], **arguments[1])
            made = scene.maker(result), effects(before, scene), self.right()
            if like:
                outside.fill(scene.outputs)
            return made

        with self.notes.aside():
            recording, (maker, applied, right) = self.record(run, executor)
        if like:
            scene.outputs = [outside.tensors[i] for i in range(len(like))]
        scene.settle()
        return Take(recording, scene.outputs, scene, maker, applied, holders(scene.outputs), right)


__all__ = ["Graphed", "GraphedTraining", "Miss", "graph_inference", "graph_training"]
