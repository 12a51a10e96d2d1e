"""A differentiable call recorded as two CUDA graphs, forward and backward, behind one autograd function.

Gradients reach parameters and inputs through autograd, so hooks on them fire and ``.grad`` accumulates as ever. What
the recordings share is memory: activations live from a forward to its backward in one pool, and gradients may lie where
activations were. So a forward is replayed only when the last one has been differentiated or forgotten, and gradients
that somebody still holds are moved away first.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import _disable_current_modes

from ridgeline.engine import autocast as casts
from ridgeline.engine.capture.capture import LENT_BYTES, Miss, Studio, counts, own_copies, restoring, uncached_casts
from ridgeline.engine.capture.cuda_graph import LEGACY, Executor, Recording, Remake, executor_for
from ridgeline.engine.capture.host_rng import draw
from ridgeline.engine.capture.probe import Observation, Values, restored_random
from ridgeline.engine.capture.side_effects import bound as bound_notes
from ridgeline.engine.example_inputs import leaves
from ridgeline.engine.guards.call_match import Matcher
from ridgeline.engine.guards.check import Watch
from ridgeline.engine.guards.tensor_queries import LEAVES, VIEWS
from ridgeline.engine.pytree import Flat, TooLarge
from ridgeline.engine.replay.lifetimes import Readers
from ridgeline.engine.replay.outputs import Effect, Maker, Scene, effects, shots
from ridgeline.engine.replay.static_inputs import Statics, extent
from ridgeline.engine.signature import Signature, difference, recordable
from ridgeline.errors import NotGraphable, OptimizeError

_REQUIRES_GRAD, _VERSION = attrgetter("requires_grad"), attrgetter("_version")
_packing = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignored: None)
MOST_STRAYS = 2
"""Backward passes that no recording can take: each runs the forward once more, and so takes longer than a call without
recordings, which are given up after so many."""
_BEFORE = "ridgeline: older than the search"
OTHERS = "other results than the loss are differentiated: give loss=, which uses them"
TWICE = "a forward is differentiated more than once"
DEEPER = "gradients are themselves differentiated"


class Pending:
    """A forward that waits for its backward; alive as long as autograd holds it."""

    __slots__ = ("__weakref__", "done", "flat", "gone", "inputs", "versions", "weights")

    def __init__(self, flat: Flat, versions: list[int], weights: list[int]) -> None:
        self.flat, self.versions, self.weights = flat, versions, weights
        self.inputs = _tracked_versions(flat)
        self.done = self.gone = False


@dataclass(slots=True)
class Tracks:
    """The two recordings and the memory they meet the caller in."""

    statics: Statics
    forward: Recording
    backward: Recording
    outputs: list[Tensor]
    """Results, without their history."""
    differentiable: tuple[bool, ...]
    expected: tuple[bool, ...]
    """Results whose gradients the backward was recorded with."""
    grad_outputs: list[Tensor | None]
    grads: list[Tensor | None]
    """Gradients of the inputs and parameters asked for, in their order."""
    scene: Scene
    result: Maker
    effects: list[Effect]
    outputs_free: list[tuple[int, int]]
    grads_free: list[tuple[int, int]]
    lent: tuple[bool, ...]
    """Results that are handed out without a copy."""
    reach: list[set[int]] = field(default_factory=list)
    """For each result, which of the gradients depend on it."""
    passing: list[Tensor] = field(default_factory=list)
    """Results in memory that the backward writes to, which a loop that lets go of them before it does not need."""
    passing_free: list[tuple[int, int]] = field(default_factory=list)


class GraphedTraining:
    """A differentiable call that is replayed where it can be; ``misses`` says why it could not."""

    def __init__(self, call: Callable[..., Any], signature: Signature, studio: TrainingStudio, tracks: Tracks) -> None:
        self.call, self.signature, self.watch = call, signature.detached(), studio.watch
        self.matcher = Matcher.of(signature)
        self.misses: dict[str, int] = {}
        self.replays = 0
        self._studio, self._tracks, self._notes = studio, tracks, studio.notes
        self._parameters = studio.parameters
        self._asked = list(map(_REQUIRES_GRAD, studio.all_parameters))
        self._lock = threading.RLock()
        self._lent = tracks.lent
        self._last: weakref.ref[Pending] | None = None
        self._strays: list[str] = []
        self._readers = Readers([*tracks.outputs, *(grad for grad in tracks.grads if grad is not None)])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            signature = Signature.of(args, kwargs, self.watch.root)
        except TooLarge:
            return self._made("an argument holds too many objects", args, kwargs)
        if signature.tokens != self.signature.tokens or signature.ambient != self.signature.ambient:
            return self._made(difference(self.signature, signature), args, kwargs)
        result = self.replay(signature.flat)
        if result.__class__ is Miss:
            return (self.watch.root if result.stale else self.call)(*args, **kwargs)
        return result

    def replay(self, flat: Flat) -> Any:
        """The result of a call whose signature is known to be the recorded one, or a miss."""
        with self._lock:
            miss = self._obstacle()
            if miss is None:
                return self._replay(flat)
            self._count(miss.reason)
            return miss

    def pool_bytes(self) -> int:
        """Memory that the recordings hold: activations, gradients, workspaces."""
        return self._studio.executor.pool_bytes()

    def lend(self) -> None:
        """Large results are handed out without copies again: who kept some was a proof, which is over."""
        self._tracks.lent = self._lent

    def _obstacle(self) -> Miss | None:
        """Why the next call cannot be replayed, if it cannot."""
        if not self.watch.same():
            return Miss("; ".join(self.watch.changes()[:3]), stale=True)
        if self._notes and (none := self._notes.unlike()):
            return Miss(none, stale=True)
        if list(map(_REQUIRES_GRAD, self._studio.all_parameters)) != self._asked:
            return Miss("other parameters require gradients", stale=True)
        if len(self._strays) >= MOST_STRAYS:  # compiled code differentiates once, and keeps nothing for a second time
            return Miss(self._strays[-1], stale=self._strays != [OTHERS] * MOST_STRAYS)
        if torch.is_anomaly_enabled():
            return Miss("anomalies are looked for in every backward", stale=True)
        if _packing(True) is not None:
            return Miss("what the backward needs is packed by saved_tensors_hooks", stale=True)
        if self._studio.executor.is_recording():
            return Miss("the call itself is being recorded", stale=False)
        last = self._last() if self._last is not None else None
        if last is not None and not last.done:
            return Miss("the last forward still waits for its backward", stale=False)
        if self._readers.abroad:
            return Miss("a result or a gradient was handed to another process", stale=False)
        if not self._move_gradients():
            return Miss("gradients of an earlier step are still held outside of .grad", stale=False)
        spare = self._notes.spare() if self._notes else Counter()
        if not free(self._tracks.outputs_free, spare):
            self._tracks.lent = (False,) * len(self._tracks.lent)  # whoever keeps results gets copies from now on
            return Miss("a result of an earlier step is still held", stale=False)
        return None

    def _replay(self, flat: Flat) -> Any:
        tracks = self._tracks
        leaves = [flat.tensors[i] for i in self._studio.asking]
        self._notes.clear()
        results = _Replayed.apply(self, flat, *leaves, *self._parameters)
        held = [*flat.containers, *self._notes.boxes] if self._notes else flat.containers
        for effect in tracks.effects:
            effect(results, flat.tensors, held)
        if self._notes:
            self._notes.bound(self.watch)
        found = tracks.result(results, flat.tensors, held)
        if tracks.scene.made:
            tracks.scene.made.clear()
        return found

    # --- the two halves, called by autograd -------------------------------------------------------------------------

    def run_forward(self, flat: Flat) -> tuple[list[Tensor], Pending]:
        tracks = self._tracks
        with self._lock:
            self._studio.executor.arrive()
            self._readers.wait()
            self._readers.forget()  # nobody holds what was lent, or it would not be replayed
            tracks.statics.fill(flat.tensors)
            tracks.forward.replay()
            draw(self._studio.host_draws)
            if self._studio.written:
                tracks.statics.write_back(flat.tensors, self._studio.written)
            copies = iter(own_copies([o for o, lent in zip(tracks.outputs, tracks.lent) if not lent]))
            results = [o.detach() if lent else next(copies) for o, lent in zip(tracks.outputs, tracks.lent)]
            pending = Pending(flat, self._versions(), list(map(_VERSION, self._parameters)))
            self._last = weakref.ref(pending)
            self.replays += 1
        return results, pending

    def run_backward(self, pending: Pending, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        tracks = self._tracks
        self._check(pending)
        pending.gone = not torch._C._autograd._get_current_graph_task_keep_graph()
        if stray := self._stray(pending, given):
            return self._again(pending, given, stray)
        with self._lock, torch.no_grad():
            self._studio.executor.arrive()
            self._readers.wait()
            for mine, grad in zip(tracks.grad_outputs, given):
                if mine is not None:
                    mine.zero_() if grad is None else mine.copy_(grad)
            kept = self._kept()
            tracks.backward.replay()
            pending.done = True
            found = self._found(kept)
            for result, copy in kept:
                result.data.copy_(copy)  # to autograd nothing has changed
        return self._reached(found, given)

    def _found(self, kept: list[tuple[Tensor, Tensor]]) -> list[Tensor | None]:
        """Gradients as autograd takes them: an input's may be kept for long, a parameter's is known by ``.grad``."""
        grads, num = self._tracks.grads, len(self._studio.asking)
        if kept:
            return [None if g is None else g.clone() if i < num or _meets(g, kept) else g.detach()
                    for i, g in enumerate(grads)]  # fmt: skip
        if not num:
            return [None if g is None else g.detach() for g in grads]
        return [None if g is None else g.clone() if i < num else g.detach() for i, g in enumerate(grads)]

    def _kept(self) -> list[tuple[Tensor, Tensor]]:
        """Results that somebody holds and that the backward is about to write over, each with a copy of it.

        They get their contents back after it, and gradients that lie there are moved away.
        """
        count, tracks = torch._C._storage_Use_Count, self._tracks
        pairs = zip(tracks.passing, tracks.passing_free)
        return [(result, result.clone()) for result, (storage, held) in pairs if count(storage) > held]

    def _reached(self, found: list[Tensor | None], given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of what the differentiated results depend on: the others are none, not zero."""
        tracks = self._tracks
        if all(grad is not None for grad, expected in zip(given, tracks.expected) if expected):
            return found
        reached = set().union(*(reach for grad, reach in zip(given, tracks.reach) if grad is not None))
        return [grad if i in reached else None for i, grad in enumerate(found)]

    def _stray(self, pending: Pending, given: Sequence[Tensor | None]) -> str:
        """Why this backward is none that was recorded, if it is not."""
        if torch.is_grad_enabled():
            return DEEPER
        if pending.done:
            return TWICE
        others = any(grad is not None and not used for grad, used in zip(given, self._tracks.expected))
        return OTHERS if others else ""

    def _again(self, pending: Pending, given: Sequence[Tensor | None], stray: str) -> list[Tensor | None]:
        """Gradients by the model itself, whose forward is run once more."""
        if self._studio.is_moved():
            raise OptimizeError(f"{stray}, which a recorded step cannot do where numbers are drawn or state is "
                                "written: call the model that was optimized, .original")  # fmt: skip
        if pending.inputs != _tracked_versions(pending.flat):
            raise OptimizeError(f"{stray}, and an input was changed in place since the forward")
        pending.done = True
        self._strays.append(stray)
        return self._studio.differentiate(pending.flat, given, deeper=stray is DEEPER)

    def _check(self, pending: Pending) -> None:
        if pending.gone:
            raise OptimizeError("a recorded backward runs once after its forward: its activations are gone. For a "
                                "second one give the first retain_graph=True, as without recordings")  # fmt: skip
        if pending.weights != list(map(_VERSION, self._parameters)):
            raise OptimizeError("a parameter was changed in place between a recorded forward and its backward, which "
                                "would use it as it is now: take the optimizer's step after the backward")  # fmt: skip
        if self._notes and (path := self._notes.asking()):
            raise OptimizeError(f"the gradient of {path} is asked for, which a recorded backward computes for itself "
                                "alone: call the model that was optimized, .original")  # fmt: skip
        if pending.versions and pending.versions != self._versions():
            raise OptimizeError("a result of the recorded forward was changed in place before the backward: "
                                "change a copy of it, or call the model that was optimized, .original")  # fmt: skip

    def _versions(self) -> list[int]:
        return [output._version for output, lent in zip(self._tracks.outputs, self._tracks.lent) if lent]

    def gradients(self) -> list[tuple[Tensor, Tensor | None]]:
        """Every parameter that asks for gradients, and where the recorded backward leaves its own."""
        found = self._tracks.grads[len(self._studio.asking) :]
        return list(zip(self._parameters, found, strict=True))

    @contextmanager
    def keeping_gradients(self) -> Iterator[None]:
        """What comes to hold gradients meanwhile is a recording over them, and not in the way of the next replay."""
        count, tracks = torch._C._storage_Use_Count, self._tracks
        before = [count(storage) for storage, _ in tracks.grads_free]
        yield
        for parameter, grad in self.gradients():
            parameter.grad = None if grad is None else grad.detach()
        tracks.grads_free = [(storage, held + count(storage) - was)
                             for (storage, held), was in zip(tracks.grads_free, before)]  # fmt: skip

    @property
    def executor(self) -> Executor:
        return self._studio.executor

    def _move_gradients(self) -> bool:
        """Held gradients lie where replays write: those of parameters are moved away. False if others hold some.

        They stay the tensors they are, for loops that keep a list of them and clear what they hold.
        """
        counted = self._tracks.grads_free
        if free(counted):
            return True
        mine = {storage for storage, _ in counted}
        held = [p.grad for p in self._parameters if p.grad is not None and p.grad.untyped_storage()._cdata in mine]
        moved = Counter(grad.untyped_storage()._cdata for grad in held)
        count = torch._C._storage_Use_Count
        if any(count(storage) - moved[storage] > most for storage, most in counted):
            return False  # views of them, say, which have to stay views
        with torch.no_grad():  # one launch for many: loops that clear gradients behind the forward do this every step
            made = [torch.empty_like(grad) for grad in held]
            torch._foreach_copy_(made, held)
        for grad, copy in zip(held, made, strict=True):
            grad.data = copy
        return True

    def _made(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._count(reason)
        return self.call(*args, **kwargs)

    def _count(self, reason: str) -> None:
        self.misses[reason] = self.misses.get(reason, 0) + 1


class _Replayed(torch.autograd.Function):
    """The recorded call as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, graphed: GraphedTraining, flat: Flat, *leaves: Tensor) -> tuple[Tensor, ...]:
        results, ctx.pending = graphed.run_forward(flat)
        ctx.graphed = graphed
        ctx.set_materialize_grads(False)
        plain = [r for r, wanted in zip(results, graphed._tracks.differentiable) if not wanted]
        ctx.mark_non_differentiable(*plain)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.graphed.run_backward(ctx.pending, given))


def _meets(grad: Tensor, kept: list[tuple[Tensor, Tensor]]) -> bool:
    """Whether a gradient lies where a result does that was kept."""
    low, high = _reach(grad)
    return any(low < end and begin < high for begin, end in (_reach(result) for result, _ in kept))


def _reach(tensor: Tensor) -> tuple[int, int]:
    """First address and one past the last that a tensor reaches."""
    low, high = extent(tensor)
    start = tensor.data_ptr()
    return start, start + high - low


def _tracked_versions(flat: Flat) -> list[int]:
    return [tensor._version for tensor in flat.tensors if not tensor.is_inference()]


def free(counted: list[tuple[int, int]], spare: Mapping[int, int] | None = None) -> bool:
    """Whether nobody else holds these; ``spare`` is by how many each may be held besides."""
    count = torch._C._storage_Use_Count
    if not spare:
        return all(count(storage) <= held for storage, held in counted)
    return all(count(storage) <= held + spare.get(storage, 0) for storage, held in counted)


def graph_training(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], model: Any, *,
                   loss: Callable[[Any], Tensor] | None = None,
                   executor: Executor | None = None) -> GraphedTraining:  # fmt: skip
    """Records ``call(*args, **kwargs)`` and its backward; the result is differentiable like the call.

    ``loss`` is what will be differentiated, as a function of the output; by default its ``.loss`` if it has one, else
    everything in it that can be. Raises NotGraphable with the reason where a replay could differ from a call.
    """
    with torch.inference_mode(False), torch.enable_grad(), uncached_casts():
        signature = recordable(args, kwargs, model)
        watch = Watch(model)
        given = signature.flat.tensors + [tensor for _, tensor in watch.tensors.values()]
        studio = TrainingStudio(call, model, watch, executor or executor_for(given), loss)
        with restoring(watch):
            tracks = studio.record_training(signature.flat)
            studio.notes.put_back(watch)
    return GraphedTraining(call, signature, studio, tracks)


class TrainingStudio(Studio):
    """Where a forward and its backward are recorded."""

    def __init__(self, call: Callable[..., Any], model: Any, watch: Watch, executor: Executor,
                 loss: Callable[[Any], Tensor] | None) -> None:  # fmt: skip
        super().__init__(call, model, watch, executor)
        self.loss, self.casts = loss, casts.active()
        self._bound: dict[tuple[int, Any], Tensor] = {}
        self._adopt()

    def _adopt(self) -> None:
        held = [t for _, t in self.watch.tensors.values() if t.is_leaf and (t.is_floating_point() or t.is_complex())]
        self.all_parameters = [t for t in held if isinstance(t, nn.Parameter) or t.requires_grad]
        self.parameters = [t for t in self.all_parameters if t.requires_grad]
        self.asking: list[int] = []
        self.written: list[Any] = []

    def record_training(self, flat: Flat) -> Tracks:
        """Records; once more where a history that somebody holds keeps gradients on the stream it was made on.

        A weight that hooks make has one from the call before, and is held by the model itself.
        """
        made = [held.get(key) for _, held, key in self.watch.made()]
        if any(isinstance(weight, Tensor) and weight.grad_fn is not None for weight in made):
            self._renew()
        try:
            return self._recorded(flat)
        except NotGraphable as error:
            if LEGACY not in str(error):
                raise
        self._renew()
        return self._recorded(flat)

    def _renew(self) -> None:
        for parameter in self.parameters:
            renew_accumulator(parameter)

    def _recorded(self, flat: Flat) -> Tracks:
        gc.collect()  # histories that nobody holds any more keep parameters' gradients on the streams they were made on
        statics = self.ready(flat)
        with self.without_hooks():
            expected = self.warm(flat, statics)
            reach = self._reach(flat, statics) if sum(expected) > 1 else []
            gc.collect()  # recordings that nobody holds any more must not be destroyed while another is made
            with self.notes.aside():
                tracks = self._record(flat, statics, expected)
        tracks.reach = reach
        lent = [output for output, is_lent in zip(tracks.outputs, tracks.lent) if is_lent]
        tracks.outputs_free = counts(lent)  # now that nothing of the recorded call is left
        tracks.passing_free = counts(tracks.passing)
        return tracks

    def ready(self, flat: Flat) -> Statics:
        """Looks at the call, and makes the memory its inputs are copied to."""
        self.refuse(flat)
        self.asking = [i for i, t in enumerate(flat.tensors) if t.requires_grad]
        self.group(flat)
        if any(len(g.indices) > 1 for g in self.groups if any(i in self.asking for i in g.indices)):
            raise NotGraphable("inputs that require gradients share memory")
        statics = Statics(flat.tensors, self.groups)
        seen = self.observe(flat, statics)
        self.throw(seen, flat, statics)
        self.judge(seen, statics)
        self.rewound = self.executor.rewound() if self.executor.generator in self.drawn else None
        if not seen.asked.isdisjoint((VIEWS, LEAVES)):
            raise NotGraphable("the model asks what an input came from, which a copy of it answers otherwise")
        self._adopt_after()
        if any(self.is_written(g) for g in self.groups if any(i in self.asking for i in g.indices)):
            raise NotGraphable("an input that requires gradients is written to")
        self.written = [g for g in self.groups if self.is_written(g)]
        return statics

    def step(self, statics: Statics, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        """A forward and its backward, in which functions with one of their own and hooks run Python too."""
        result = super().step(statics, arguments)
        self._bound = bound_notes(self.watch)
        able = self._ends(result)
        wanted = [tensor for _, tensor in self.watch.tensors.values() if tensor.requires_grad and tensor.is_leaf]
        if able and wanted:
            _refuse_reentrant(able)
            with casts.off(), self.without_hooks(), torch.autograd.set_multithreading_enabled(False):
                torch.autograd.grad(able, wanted, [torch.ones_like(each) for each in able], allow_unused=True)
        return result

    def take_notes(self, seen: Observation) -> None:
        self.adopt_notes(seen, self._bound, made=True)
        self._bound = {}

    def _ends(self, result: Any) -> list[Tensor]:
        """Where a backward enters the model: the results that the loss comes from.

        What a loss of the caller's makes on the way is nobody's to keep: widened logits, say.
        """
        able = [tensor for _, tensor in leaves(result) if tensor.requires_grad]
        if self.loss is not None:
            loss = self.loss
            return _unseen(lambda found: _used(loss(found), able), result)
        value = _own_loss(result)
        return able if value is None else [value] if value.requires_grad else []

    def _adopt_after(self) -> None:
        """The watch was made anew by observing; parameters may have been made in the first call."""
        asking = self.asking
        self._adopt()
        self.asking = asking
        if not self.parameters and not self.asking:
            raise NotGraphable("nothing requires gradients")

    @contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Hooks on parameters fire when gradients reach them through autograd, not while recording."""
        kept = [(parameter, parameter._backward_hooks) for parameter in self.parameters if parameter._backward_hooks]
        for parameter, _ in kept:
            parameter._backward_hooks = None
        try:
            yield
        finally:
            for parameter, hooks in kept:
                parameter._backward_hooks = hooks

    # --- running ----------------------------------------------------------------------------------------------------

    def leaves(self, statics: Statics) -> dict[int, Tensor]:
        """The recording's inputs; those that ask for gradients are leaves of its own history."""
        return {i: t.detach().requires_grad_(i in self.asking) for i, t in statics.tensors.items()}

    def _outputs(self, result: Any, inputs: dict[int, Tensor], boxes: list[Any], before: Any
                 ) -> tuple[Scene, Maker, list[Effect]]:  # fmt: skip
        scene = self.scene(inputs, boxes)
        scene.returns([tensor for _, tensor in leaves(result)])
        maker = scene.maker(result)
        return scene, maker, effects(before, scene)

    def warm(self, flat: Flat, statics: Statics) -> tuple[bool, ...]:
        """Runs forward and backward where recordings run, and finds which results are differentiated."""
        kept = Values(self.written_model)
        found: list[tuple[bool, ...]] = []

        def run() -> None:
            with torch.no_grad():
                statics.fill(flat.tensors)
            kept.put_back()
            with self.rewound.counting() if self.rewound else nullcontext():
                both()
            self.notes.forget()

        def both() -> None:
            inputs = self.leaves(statics)
            arguments, boxes = self.twin(flat, inputs)
            before = shots(boxes)
            result = self.call(*arguments[0], **arguments[1])
            scene, *_ = self._outputs(result, inputs, boxes, before)
            self._refuse_views(scene)
            if not found:
                _refuse_reentrant(scene.outputs)
                found.append(self._expected(result, scene.outputs))
            _refuse_sparse(self._differentiate(scene.outputs, inputs, found[0], None))

        try:
            with restored_random():
                self.executor.warm_up(run)
                self.look_again()
                self.executor.warm_up(run)
                self.rehearse(run)
        finally:
            kept.put_back()
        self.refuse_changes()
        return found[0]

    def _refuse_views(self, scene: Scene) -> None:
        if not any(output.requires_grad for output in scene.outputs):
            raise NotGraphable("nothing of the result can be differentiated: it is an input, a view of one, or fixed")
        storages = [output.untyped_storage()._cdata for output in scene.outputs if output.requires_grad]
        if len(set(storages)) < len(storages):
            raise NotGraphable("results that can be differentiated share memory")

    def _expected(self, result: Any, outputs: list[Tensor]) -> tuple[bool, ...]:
        """Which results the loss depends on; a note on the way to one is differentiated with it."""
        able = [output for output in outputs if output.requires_grad]
        value = self.loss(result) if self.loss is not None else _own_loss(result)
        returned = [tensor for _, tensor in leaves(result) if tensor.requires_grad]
        self.notes.pass_through(set(_history(returned)) if self.notes else set())
        if value is None or not value.requires_grad:
            own = set(map(id, returned))
            return tuple(output.requires_grad and (not self.notes or id(output) in own) for output in outputs)
        used = {id(output) for output in _used(value, able)}
        if self.notes:
            asked = _edges(value, set(map(_edge, returned)))
            used = {id(output) for output in able if id(output) in used and _edge(output) in asked}
        return tuple(id(output) in used for output in outputs)

    def _reach(self, flat: Flat, statics: Statics) -> list[set[int]]:
        """For each result of the model itself, which inputs and parameters its history ends in."""
        kept = Values(self.written_model)
        with restored_random():
            with torch.no_grad():
                statics.fill(flat.tensors)
            inputs = self.leaves(statics)
            arguments, boxes = self.twin(flat, inputs)
            before = shots(boxes)
            result = self.model(*arguments[0], **arguments[1])
            scene, *_ = self._outputs(result, inputs, boxes, before)
        kept.put_back()
        self.notes.forget()
        places = {id(t): i for i, t in enumerate([*(inputs[i] for i in self.asking), *self.parameters])}
        return [{places[leaf] for leaf in _leaves_behind(output) if leaf in places} for output in scene.outputs]

    def _differentiate(self, outputs: list[Tensor], inputs: dict[int, Tensor], expected: tuple[bool, ...],
                       grads: list[Tensor | None] | None, *, deeper: bool = False) -> list[Tensor | None]:  # fmt: skip
        wanted = [output for output, used in zip(outputs, expected) if used]
        given = [torch.ones_like(o) for o in wanted] if grads is None else [g for g in grads if g is not None]
        leaves = [*(inputs[i] for i in self.asking), *self.parameters]
        with casts.off():
            return list(torch.autograd.grad(wanted, leaves, given, allow_unused=True, create_graph=deeper))

    def _record(self, flat: Flat, statics: Statics, expected: tuple[bool, ...]) -> Tracks:
        if self.rewound is not None:
            self.rewound.begin()
        inputs = self.leaves(statics)
        arguments, boxes = self.twin(flat, inputs)
        before = shots(boxes)
        forward, result = self.record(lambda: self.call(*arguments[0], **arguments[1]), part="first")
        scene, maker, applied = self._outputs(result, inputs, boxes, before)
        able = tuple(output.requires_grad for output in scene.outputs)
        owned = self.notes.owned()
        lent = tuple(output.untyped_storage().nbytes() >= LENT_BYTES or id(output) in owned for output in scene.outputs)
        remakes = {} if applied else self._vacated(scene.outputs, expected, lent)
        outputs: list[Any] = [None if i in remakes else output for i, output in enumerate(scene.outputs)]
        scene.outputs, result = [], None
        scene.settle()
        given, backward, grads = self._record_backward(outputs, inputs, expected)
        passing = {i: remake((forward, backward)) for i, remake in remakes.items()}
        plain = scene.outputs = [passing[i] if output is None else output.detach()  # their history held activations
                                 for i, output in enumerate(outputs)]  # fmt: skip
        return Tracks(statics, forward, backward, plain, able, expected, given, grads, scene, maker, applied,
                      [], counts([g for g in grads if g is not None]), lent, passing=[*passing.values()])  # fmt: skip

    def _vacated(self, outputs: list[Tensor], expected: tuple[bool, ...], lent: tuple[bool, ...]) -> dict[int, Remake]:
        """Large results that the backward need not keep, and how to make them again: eager loops let go of them.

        A vocabulary's logits were 0.16 of 6.3 GB of Whisper's step, and what made it reserve more than eager (H200).
        """
        if len(outputs) != len(expected):
            return {}
        storages = [output.untyped_storage()._cdata for output in outputs]
        return {i: self.executor.vacate(output) for i, output in enumerate(outputs)
                if lent[i] and not expected[i] and storages.count(storages[i]) == 1}  # fmt: skip

    def _record_backward(self, outputs: list[Any], inputs: dict[int, Tensor], expected: tuple[bool, ...]
                         ) -> tuple[list[Tensor | None], Recording, list[Tensor | None]]:  # fmt: skip
        if len(outputs) != len(expected):
            raise NotGraphable("a call returns another number of tensors than the one before")
        given = [torch.ones_like(o) if used else None for o, used in zip(outputs, expected)]

        def run() -> list[Tensor | None]:
            found = self._differentiate(outputs, inputs, expected, given)
            num = len(self.asking)
            return [*found[:num], *map(_laid, found[num:], self.parameters)]

        backward, grads = self.record(run, part="last")
        return given, backward, grads

    def is_moved(self) -> bool:
        """Whether a second call would be another than the first."""
        return bool(self.drawn or self.written or self.written_model)

    def differentiate(self, flat: Flat, given: Sequence[Tensor | None], *, deeper: bool) -> list[Tensor | None]:
        """Gradients that no backward was recorded for: the forward is run again, with history.

        ``deeper`` if the gradients are to be differentiated themselves, down to the inputs that were given.
        """
        with torch.enable_grad(), restored_random():
            inputs = {i: t if deeper else t.detach().requires_grad_(i in self.asking)
                      for i, t in enumerate(flat.tensors)}  # fmt: skip
            arguments, boxes = self.twin(flat, inputs)
            before = shots(boxes)
            with casts.on(self.casts):  # which is off by the time of a backward
                result = self.model(*arguments[0], **arguments[1])
            scene, *_ = self._outputs(result, inputs, boxes, before)
            used = tuple(grad is not None for grad in given)
            return self._differentiate(scene.outputs, inputs, used, list(given), deeper=deeper)


def _laid(grad: Tensor | None, parameter: Tensor) -> Tensor | None:
    """A parameter's gradient as it lies in ``.grad``: autograd copies one that is laid out in another way than the
    parameter, at every step and into memory of its own.

    Compiled convolutions leave theirs channels last: a small autoencoder's recorded updates were never replayed, for
    gradients that were elsewhere than recorded (H200).
    """
    if grad is None or grad.shape != parameter.shape or _steps(grad) == _steps(parameter):
        return grad
    laid = torch.empty_like(parameter, dtype=grad.dtype)
    return laid.copy_(grad) if _steps(laid) == _steps(parameter) else grad  # gaps are not kept, by autograd neither


def _steps(tensor: Tensor) -> list[int]:
    """Strides of the dims that have more than one place."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape) if size > 1]


def _leaves_behind(output: Tensor) -> set[int]:
    """The ``id`` of every tensor that a result's gradient would be accumulated into."""
    return {id(node.variable) for node in _history([output]) if hasattr(node, "variable")}


def _history(outputs: Sequence[Tensor]) -> Iterator[Any]:
    """Every step of autograd that results come from, once."""
    waiting: list[Any] = [output.grad_fn for output in outputs]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [after for after, _ in node.next_functions]


def _edge(tensor: Tensor) -> tuple[Any, int]:
    """Where a tensor's gradient enters the step that made it."""
    return tensor.grad_fn, tensor.output_nr


def _edges(value: Tensor, ends: set[tuple[Any, int]]) -> set[tuple[Any, int]]:
    """Every place that a value comes from, down to those where others end."""
    waiting, seen = [_edge(value)], set()
    while waiting:
        edge = waiting.pop()
        if edge[0] is not None and edge not in seen:
            seen.add(edge)
            waiting += [] if edge in ends else edge[0].next_functions
    return seen


def renew_accumulator(parameter: Tensor) -> None:
    """The parameter's next history ends in a node of its own: nodes stay on the stream they were made on.

    They live as long as anybody holds a result they led to: the last loss of a loop is enough. Autograd lets go of one
    when the parameter's type is changed, which is changed back at once; older histories keep theirs.
    """
    kept = parameter.data
    parameter.data = kept.new_empty(0, dtype=torch.float64 if kept.dtype != torch.float64 else torch.float32)
    parameter.data = kept


def _used(value: Any, able: list[Tensor]) -> list[Tensor]:
    """Of these results those that a value comes from; the value alone where it is one of them."""
    if not isinstance(value, Tensor) or not value.requires_grad or not able:
        return []
    if any(value is each for each in able):
        return [value]
    grads = torch.autograd.grad(value, able, torch.ones_like(value), retain_graph=True, allow_unused=True)
    return [each for each, grad in zip(able, grads) if grad is not None]


def _unseen(loss: Callable[..., Any], result: Any) -> Any:
    """A loss, which loops call by themselves: that it draws, seeds or prints is no obstacle to recording the model."""
    profile = sys.getprofile()
    sys.setprofile(None)
    try:
        with _disable_current_modes(), restored_random():
            return loss(result)
    finally:
        sys.setprofile(profile)


def mark_accumulators(parameters: Sequence[Tensor]) -> None:
    """Nodes that somebody holds now are known later by a mark; those that nobody holds are gone, mark and all."""
    for parameter in parameters:
        get_gradient_edge(parameter).node.metadata[_BEFORE] = True


def renew_accumulators(parameters: Sequence[Tensor]) -> None:
    """Nodes made since the marks are replaced; older ones are somebody's, and may have hooks."""
    for parameter in parameters:
        if _BEFORE not in get_gradient_edge(parameter).node.metadata:
            renew_accumulator(parameter)


def _refuse_reentrant(outputs: Sequence[Tensor]) -> None:
    """Gradients that a part hands to ``.grad`` by itself are seen by no one who asks for gradients by name."""
    if any(node.name() == "CheckpointFunctionBackward" for node in _history(outputs)):
        raise NotGraphable("parts are checkpointed with use_reentrant=True, which gives gradients to .grad alone; "
                           "use_reentrant=False can be recorded")  # fmt: skip


def _refuse_sparse(grads: Sequence[Tensor | None]) -> None:
    if any(grad is not None and grad.layout is not torch.strided for grad in grads):
        raise NotGraphable("a gradient is sparse, with as many entries as its rows happen to be: sparse=False of an "
                           "embedding can be recorded")  # fmt: skip


def _own_loss(result: Any) -> Tensor | None:
    value = getattr(result, "loss", None)
    if value is None and isinstance(result, dict):
        value = result.get("loss")
    return value if isinstance(value, Tensor) and value.numel() == 1 else None
