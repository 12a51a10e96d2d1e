"""Where a call is looked at before it is recorded: what it writes, what it draws, what it may not do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from ridgeline.engine.capture.checkpoint_rng import Rewound
from ridgeline.engine.capture.cuda_graph import Executor, Recording, reason_of
from ridgeline.engine.capture.host_constants import Constants
from ridgeline.engine.capture.host_rng import indifferent, served
from ridgeline.engine.capture.probe import Observation, Values, observe, restored_random
from ridgeline.engine.capture.rnn_dropout import following, settled
from ridgeline.engine.capture.side_effects import Notes
from ridgeline.engine.capture.side_effects import found as found_notes
from ridgeline.engine.capture.silent_warnings import hushed, only_warns
from ridgeline.engine.guards.check import Watch
from ridgeline.engine.guards.tensor_queries import Questions
from ridgeline.engine.pytree import HOST_ELEMENTS, OPAQUE, SETS, STRANGE, VALUE, Flat, all_tokens, opaque, twin
from ridgeline.engine.replay.outputs import Scene
from ridgeline.engine.replay.static_inputs import Group, Statics, extent, grouped, view_of
from ridgeline.errors import NotGraphable

LENT_BYTES = 1 << 20
"""Results above this are lent without a copy while nobody holds the last loan; below, a copy costs next to nothing."""
PINNED_BYTES = 1 << 20
"""Inputs above this are read where the caller has them if they are where they were."""


class Miss:
    """Says that a call cannot be replayed as recorded; ``stale`` if the model is no more what was recorded.

    ``usual`` if that is how a model comes from its search: before its first call nobody needs to be told.
    """

    __slots__ = ("reason", "stale", "usual")

    def __init__(self, reason: str, *, stale: bool, usual: bool = False) -> None:
        self.reason, self.stale, self.usual = reason, stale, usual


class Studio:
    """A call, the model it computes, and the device that will record it."""

    def __init__(self, call: Callable[..., Any], model: Any, watch: Watch, executor: Executor) -> None:
        self.call, self.model, self.watch, self.executor = call, model, watch, executor
        self._uncompiled = call is model
        self._in_python = self._uncompiled or getattr(call, "in_python", False)
        self.groups: list[Group] = []
        self.written_model: list[Tensor] = []
        self.drawn: frozenset[str] = frozenset()
        self.host_draws = 0
        self._recurrent: torch.device | None = None
        self.rewound: Rewound | None = None
        self._seen = Observation()
        self.questions: Questions | None = None
        self._constants: Constants | None = None
        self.guesses = False  # whether values that the host reads may be guessed, and every replay asked for them
        self._told = self._hushed = False
        self.notes = Notes()
        self._given: list[Any] = []
        self._sets: list[tuple[set[Any], set[Any]]] = []
        self._nested: set[int] = set()
        self._written: set[int] = set()
        self._externals: dict[int, Tensor] = {}

    def group(self, flat: Flat) -> None:
        on_device = [i for i, t in enumerate(flat.tensors) if t.device.type == self.executor.device_type]
        self.groups = grouped(flat.tensors, on_device)
        self._nested = _nested(flat)

    def refuse(self, flat: Flat) -> None:
        members = [token[2] for token in all_tokens(flat.tokens) if token[0] == VALUE and isinstance(token[2], Enum)]
        boxes = [type(box) for box in flat.containers if hasattr(box, "__dict__")]
        self._given = [*opaque(flat), *members, *boxes]
        if hooks := self.watch.hooks():
            raise NotGraphable(f"the model has hooks that a replay would not call: {', '.join(hooks[:3])}")
        sparse = [name for name, tensor in self.watch.tensors.values() if tensor.layout is not torch.strided]
        if sparse:
            raise NotGraphable(f"the model holds a sparse tensor ({sparse[0]}), whose memory moves when it is written")
        for token in all_tokens(flat.tokens):
            if token[0] == STRANGE:
                raise NotGraphable(f"an input is a tensor of another kind ({token[2]})")
            if token[0] == OPAQUE and "cannot be compared" in repr(token[2]):
                raise NotGraphable(f"an argument is a {token[1].__name__}, which Python reads at every call")
        for tensor in flat.tensors:
            host = tensor.device.type != self.executor.device_type
            if host and (not flat.accelerated or tensor.numel() > HOST_ELEMENTS):
                raise NotGraphable(f"an input of {tensor.numel()} elements is on {tensor.device}: move it first")
            if tensor.is_conj() or tensor.is_neg():
                raise NotGraphable("an input is lazily conjugated or negated")

    def observe(self, flat: Flat, statics: Statics) -> Observation:
        """Observes the second of two calls: the first may import, compile, and set up what stays."""
        self._observed(flat, statics, profiled=False)
        self.watch = Watch(self.model, self._given)
        seen = self._observed(flat, statics, profiled=True)
        self.take_notes(seen)
        self.refuse_changes()
        if toggled := self.watch.toggled():
            raise NotGraphable(f"a call changes the model's state in Python: {'; '.join(toggled[:3])}")
        self._seen = seen
        self._complete()
        return seen

    def take_notes(self, seen: Observation) -> None:
        """What a call binds anew on the model, where a replay can do so; else it is a change, and refused."""

    def adopt_notes(self, seen: Observation, bound: Mapping[tuple[int, Any], Tensor], *, made: bool) -> None:
        """Takes what the observed call has ``bound`` for notes, if it changes nothing else."""
        words = (word for _, word in seen.lookups)
        notes = found_notes(self.watch, seen.used, seen.codes, words, bound, made=made)
        self.watch.accept(notes.slots)
        if not notes or self.watch.changes() or self.watch.toggled():
            return
        self.notes = notes
        notes.forget()
        self.watch = Watch(self.model, self._given, noted=notes.slots)

    def look_again(self) -> None:
        """Takes the model as it is after the first run of the call, which may lay its weights out anew."""
        if self.watch.same():
            return
        self.watch = Watch(self.model, self._given, noted=self.notes.slots)
        self._complete()

    def _complete(self) -> None:
        seen = self._seen
        self.watch.read_by(seen.codes, seen.lookups, seen.free)
        self.watch.asked_of(seen.weights, seen.answers)
        self.watch.follow(seen.codes)
        self.watch.hold_host_to(self.executor.device_type)
        own = frozenset(t.untyped_storage()._cdata for _, t in self.watch.tensors.values() if _has_memory(t))
        self.questions = Questions(seen.asked, own) if seen.asked else None

    def refuse_changes(self) -> None:
        if changes := self.watch.changes():
            raise NotGraphable(f"a call changes the model's state in Python: {'; '.join(changes[:3])}")

    def _observed(self, flat: Flat, statics: Statics, *, profiled: bool) -> Observation:
        with torch.no_grad():
            statics.fill(flat.tensors)
        arguments, _ = self.twin(flat, statics.tensors)
        given = [statics.tensors[g.indices[0]] for g in statics.groups]
        before = [_kind_of(tensor) for tensor in statics.tensors.values()]
        try:
            seen = observe(lambda: self.step(statics, arguments), given, self.watch, profiled=profiled,
                           inputs=statics.tensors.values())  # fmt: skip
            self._refuse_remade(before, statics)
            return seen
        except NotGraphable:
            raise
        except Exception as error:
            if "rule registered" not in str(error):  # an operator of higher order that no dispatch mode may look into
                raise NotGraphable(f"the model raises {type(error).__name__}: {error}") from error
        arguments, _ = self.twin(flat, statics.tensors)
        return observe(lambda: self.step(statics, arguments), given, self.watch, profiled=profiled, journaled=False,
                       inputs=statics.tensors.values())  # fmt: skip

    def _refuse_remade(self, before: list[Any], statics: Statics) -> None:
        """A call may write to what its inputs hold, but not make other tensors of them, nor change a set."""
        if before != [_kind_of(tensor) for tensor in statics.tensors.values()]:
            raise NotGraphable("it makes something else of an input in place: its size, memory or attributes")
        if any(list(given) != list(ours) for given, ours in self._sets):
            raise NotGraphable("it changes a set that it is given")

    def step(self, statics: Statics, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """All Python that a call leads to, once."""
        return self.model(*arguments[0], **arguments[1])

    def throw(self, seen: Observation, flat: Flat, statics: Statics) -> None:
        """Numbers drawn on the host that decide nothing are answered while recording, and drawn by every replay.

        A compiled call draws them itself, whatever they are: answered, it would be compiled anew for every answer.
        """
        if seen.drawn - {self.executor.generator} != {"cpu"}:
            return
        kept = Values(self.watch.buffers())

        def run() -> None:
            with torch.no_grad():
                statics.fill(flat.tensors)
            arguments, _ = self.twin(flat, statics.tensors)
            self.model(*arguments[0], **arguments[1])

        with restored_random() as drawn:
            num = indifferent(run, lambda: "cpu" in drawn())
        kept.put_back()
        if num:
            self.host_draws, self.call = num, served(self.call) if self._uncompiled else self.call
            seen.drawn -= {"cpu"}

    def judge(self, seen: Observation, statics: Statics) -> None:
        if seen.acts:
            raise NotGraphable(f"the model {seen.acts[0]}, which a replay would not")
        if seen.places:
            name, where = next(iter(seen.places.items()))
            raise NotGraphable(f"the model asks an input for {name} ({where}), which a copy of it answers otherwise")
        self.drawn, self._recurrent = seen.drawn, seen.recurrent
        host = seen.drawn - {self.executor.generator}
        if host:
            raise NotGraphable(f"random numbers are drawn on the host ({', '.join(sorted(host))})")
        mine = {statics.tensors[i].untyped_storage()._cdata: i for i in statics.tensors}
        models = {t.untyped_storage()._cdata for _, t in self.watch.tensors.values() if _has_memory(t)}
        strange = seen.written - mine.keys() - models
        if strange:
            raise NotGraphable("the model writes to a tensor that is neither an input nor its own")
        self._written = {mine[storage] for storage in seen.written if storage in mine}
        self.written_model = [t for _, t in self.watch.tensors.values()
                               if _has_memory(t) and t.untyped_storage()._cdata in seen.written]  # fmt: skip
        self._externals = {s: t for s, t in seen.externals.items() if s not in mine}

    def rehearse(self, run: Callable[[], Any]) -> None:
        """Runs as recordings run, first on the way that calls take.

        If the host has to wait there: without what only warns; with what the host brings to the device held there, and
        with what it reads of fixed values; and then on the way that code takes when it is told of a capture.
        """
        try:
            with self._hush():
                self.executor.rehearse(run, told=False)
        except NotGraphable as first:
            if not self._hushed and only_warns(first):
                self._hushed = True
                self.rehearse(run)
                return
            try:
                with self._hush():
                    self._rehearse_with_constants(run, first)
            except NotGraphable:
                self._constants = None
                try:
                    self.executor.rehearse(run, told=True)
                    self._told = True
                except NotGraphable:
                    if not (self.guesses and self.is_pure() and not self.host_draws):
                        raise first from None
                    with self._hush():
                        self._rehearse_with_constants(run, first, guessing=True)

    def _hush(self) -> AbstractContextManager[None]:
        return hushed() if self._hushed else nullcontext()

    def _rehearse_with_constants(self, run: Callable[[], Any], first: NotGraphable, *, guessing: bool = False) -> None:
        constants = Constants(self.executor.device_type, factories=self._in_python, guessing=guessing)
        with constants.collecting():
            self.executor.warm_up(run)
        if not constants:
            raise first
        with constants.serving():
            self.executor.rehearse(run, told=False)
        self._constants = constants

    def record(self, run: Callable[[], Any], executor: Executor | None = None, part: str = "whole"
               ) -> tuple[Recording, Any]:  # fmt: skip
        """Records a run, or the ``first`` or ``last`` part of one, and changes nothing that others see."""
        served = nullcontext() if self._constants is None else self._constants.serving(part)
        with restored_random(), served, self._hush(), self._states():
            state = settled(self._recurrent) if self._recurrent is not None and part != "last" else None
            recording, result = (executor or self.executor).record(run, told=self._told)
        self.refuse_changes()
        if self._recurrent is not None and state is not None:
            recording = following(recording, self._recurrent, state)
        return (self.rewound.followed(recording, part) if self.rewound else recording), result

    def right(self) -> Tensor | None:
        """While a run is recorded: whether what the host was told it has read is so."""
        return self._constants.right() if self._constants is not None else None

    def _states(self) -> AbstractContextManager[None]:
        """How checkpointed parts come to draw the same numbers again."""
        if self.rewound is not None and self.rewound.places and self._recurrent is None:
            return self.rewound.recording()
        return random_states(drawn=self.executor.generator in self.drawn)

    def is_written(self, group: Group) -> bool:
        return any(i in self._written for i in group.indices)

    def is_pure(self) -> bool:
        """Whether a replay whose results are thrown away has changed nothing."""
        return not self._written and not self.written_model and self.executor.generator not in self.drawn

    def in_place(self, group: Group) -> bool:
        """Whether a group is read and written where the caller has it: what lives in an object is likely to stay."""
        nested = all(i in self._nested for i in group.indices)
        return nested and (self.is_written(group) or group.num_bytes >= PINNED_BYTES)

    def twin(self, flat: Flat, tensors: dict[int, Tensor]) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], list[Any]]:
        """The arguments in containers of our own around the tensors of our own, and those containers in order."""
        replaced = {id(flat.tensors[i]): tensor for i, tensor in tensors.items()}
        memo: dict[int, Any] = {}
        made = twin(flat.root, replaced, memo)
        self._sets = memo.pop(SETS, [])
        return made, [*(memo[id(box)] for box in flat.containers), *self.notes.boxes]

    def scene(self, tensors: dict[int, Tensor], boxes: list[Any]) -> Scene:
        held = [t for _, t in self.watch.tensors.values() if _has_memory(t)]
        outer = {t.untyped_storage()._cdata: t for t in [*held, *self._externals.values()] if _has_memory(t)}
        return Scene(
            device_type=self.executor.device_type,
            inputs={id(tensor): i for i, tensor in tensors.items()},
            input_storages={t.untyped_storage()._cdata: (i, extent(t)[0]) for i, t in tensors.items()},
            containers={id(box): place for place, box in enumerate(boxes)},
            model_tensors={id(t): t for t in [*held, *self._externals.values()]},
            model_storages=outer,
            known=self.watch.known,
        )


@contextmanager
def uncached_casts() -> Iterator[None]:
    """Casts of weights under autocast happen inside a recording, not before it.

    Without autocast nothing is switched: compiled code asks for this switch too, and would be compiled anew.
    """
    if not any(torch.is_autocast_enabled(kind) for kind in ("cuda", "cpu")):
        yield
        return
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


@contextmanager
def random_states(*, drawn: bool) -> Iterator[None]:
    """Checkpointed parts keep no state of the device's random generator, or are refused.

    Where a call draws nothing from it, what is computed again needs no state. Where it does, a recording would have to
    go back in its own numbers (``rewound.py``): some versions of PyTorch say that they cannot, others record something.
    """
    home: Any = torch.utils.checkpoint
    kept = home.get_device_states
    home.get_device_states = _refuse_states if drawn else lambda *args: ([], [])
    try:
        yield
    finally:
        home.get_device_states = kept


def _refuse_states(*args: Any) -> Any:
    raise NotGraphable("the random generator's state is read, as checkpointing of parts that drop does")


@contextmanager
def restoring(watch: Watch) -> Iterator[None]:
    """A refusal leaves the model as it was, and every failure to record is a refusal."""
    try:
        yield
    except NotGraphable:
        watch.restore()
        raise
    except torch.OutOfMemoryError as error:
        watch.restore()
        raise NotGraphable("there is not enough memory to record it") from error
    except Exception as error:
        watch.restore()
        raise NotGraphable(reason_of(error)) from error


def counts(outputs: list[Tensor]) -> list[tuple[int, int]]:
    """Every storage of the results and how many hold it now, when only we do."""
    storages = {output.untyped_storage()._cdata: output for output in outputs}
    return [(storage, torch._C._storage_Use_Count(storage)) for storage in storages]


def holders(outputs: list[Tensor]) -> list[tuple[int, int, Any, int]]:
    """The same, and each storage as an object of Python's with how many hold that.

    Who keeps a result's storage and lets go of the result is not seen in the first number by every PyTorch.
    """
    storages = list({output.untyped_storage()._cdata: output.untyped_storage() for output in outputs}.values())
    rows = [(each._cdata, torch._C._storage_Use_Count(each._cdata), each) for each in storages]
    del storages
    refs = [sys.getrefcount(memory) for _, _, memory in rows]  # as ``Take`` counts: in a row, and by a name
    return [(*row, num) for row, num in zip(rows, refs)]


def alias(tensor: Tensor) -> Tensor:
    """Another tensor over the same memory, with nothing of the first's history."""
    return view_of(tensor, tensor.dtype, extent(tensor)[0], tensor.shape, tensor.stride())


def _kind_of(tensor: Tensor) -> tuple[Any, ...]:
    """What a tensor is besides what it holds."""
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad,
            {name: id(value) for name, value in tensor.__dict__.items() if name[:1] != "_"})  # fmt: skip


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type != "meta"


def _nested(flat: Flat) -> set[int]:
    """Places of the tensors that an object holds, as opposed to those given by themselves or in plain containers."""
    inside: set[int] = set()
    places = {id(tensor): i for i, tensor in enumerate(flat.tensors)}
    for box in flat.containers:
        if not isinstance(box, dict | list):
            inside |= {places[id(value)] for value in vars(box).values() if id(value) in places} if hasattr(
                box, "__dict__") else set()  # fmt: skip
    return inside


def own_copies(outputs: list[Tensor]) -> list[Tensor]:
    """Results in memory of their own; those that share memory still do."""
    storages = [output.untyped_storage()._cdata for output in outputs]
    if len(set(storages)) == len(outputs):
        return [_copy(output) for output in outputs]
    memory: dict[int, Tensor] = {}
    for output, key in zip(outputs, storages):
        if key not in memory:
            memory[key] = _bytes_of(output).clone()
    return [view_of(memory[key], o.dtype, extent(o)[0], o.shape, o.stride()) for o, key in zip(outputs, storages)]


def _bytes_of(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())  # type: ignore[call-overload]


def _copy(output: Tensor) -> Tensor:
    made = output.clone()
    if made.stride() == output.stride():
        return made
    low, high = extent(output)
    memory = view_of(output, torch.uint8, low, (high - low,), (1,)).clone()
    return view_of(memory, output.dtype, 0, output.shape, output.stride())
