"""The model a person gets back: called like the original, it *is* the original in every way but speed.

An ``Optimized`` shares the original's attributes (parameters, configuration, hooks, training flag: one dictionary), is
an instance of its class and so passes wherever the model did. Calls that look like those that were verified run as
planned; all others run the model itself, and say so once.
"""

from __future__ import annotations

import abc
import copy
import inspect
import operator
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ridgeline.engine import autocast as casts
from ridgeline.engine.compat.transformers import Sliding, Stood, is_stand_in
from ridgeline.engine.guards.call_match import Matcher
from ridgeline.engine.guards.check import Watch
from ridgeline.engine.guards.tensor_queries import Questions
from ridgeline.engine.pytree import Flat, slots_of
from ridgeline.engine.replay.compiled import Shortcut
from ridgeline.engine.replay.inference import MISSED, Graphed, GraphedTraining, Miss
from ridgeline.engine.signature import Signature, TooLarge, difference
from ridgeline.errors import OptimizeError

_STATE = "_ridgeline_state"
_tracer = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)
"""PyTorch's tracer where it looks at every function that is called from here on: it is to find the model's."""
_transforms = torch._C._functorch.maybe_current_level
"""Inside of ``vmap`` and the like, tensors have no memory to look at: the model itself is what is transformed."""
_dispatch_modes = torch._C._len_torch_dispatch_stack
_tracing = torch._C._get_tracing_state
_inferring, _any_autocast = torch.is_inference_mode_enabled, torch._C._is_any_autocast_enabled
_MOST_MATCHERS = 4
_MOST_REASONS = 8
_REPLAYED = (Graphed, GraphedTraining, Shortcut)
"""Calls that watch the model themselves, and say where they cannot answer."""


class RunsEagerly(UserWarning):
    """A call was made that no plan was verified for; it ran as the original model."""


class Unplanned:
    """Says that no plan answers a call with a stand-in for its cache, which nobody but a plan is given."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


@dataclass(slots=True)
class Plan:
    """How calls of one signature are run."""

    signature: Signature
    call: Callable[..., Any]
    name: str = "plan"
    watch: Watch | None = None
    """What must not have changed since the plan was verified; by default what compilers do not guard."""
    matcher: Matcher | None = None
    """Knows calls of the signature at a glance; made from the signature if not given."""


class Guarded:
    """A plan that is PyTorch's own compiler, which looks at everything else itself: at a glance, since its own look
    leaves cold caches, in which every Python call around it takes several times as long (20 to 50 µs for what takes 5).

    Autocast and the like are the compiler's to notice, but for whether there is any: it would compile another time.
    """

    __slots__ = ("_cast", "_grad", "_names", "_num", "_own", "_training", "_wanted", "_watch", "call")

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        assert plan.matcher is not None and plan.matcher.plain is not None and plan.watch is not None
        self.call, self._watch = plan.call.forward, plan.watch  # type: ignore[attr-defined]  # past a module around it
        self._wanted, self._num, self._names = plan.matcher.plain
        self._grad, self._training = plan.signature.ambient[:2]
        self._cast, self._own = bool(plan.signature.ambient[3]), vars(model)

    @classmethod
    def of(cls, plan: Plan, model: Any) -> Guarded | None:
        """For calls that take tensors and plain values."""
        stock = type(plan.call).__name__ == "OptimizedModule" and plan.watch is not None
        return cls(plan, model) if stock and plan.matcher is not None and plan.matcher.plain else None

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if (len(args) != self._num or tuple(kwargs) != self._names or torch.is_grad_enabled() is not self._grad
                or _inferring() or _dispatch_modes() or _any_autocast() is not self._cast
                or self._own["training"] is not self._training):  # fmt: skip
            return False
        for value, (kind, want) in zip((*args, *kwargs.values()) if kwargs else args, self._wanted):
            if kind is not Tensor:
                if value is not want:  # equal ones are compared by a longer look
                    return False
                continue
            shape, stride, dtype, device, asks = want
            if (value.__class__ is not Tensor or value.shape != shape or value.dtype is not dtype
                    or value.stride() != stride or value.device != device or value.is_nested
                    or (asks is not value.requires_grad and self._grad)):  # fmt: skip
                return False
        return self._watch.same()


@dataclass(slots=True)
class State:
    """What an ``Optimized`` knows besides the model's own attributes."""

    model: Any
    mode: str
    receipt: Any
    optimizer: Any = None
    loss: Callable[..., Tensor] | None = None
    update: Callable[[], Any] | None = None
    plans: dict[Signature, Plan] = field(default_factory=dict)
    matchers: list[tuple[Matcher, Plan]] = field(default_factory=list)
    fallbacks: dict[str, int] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)
    guarded: Guarded | None = None
    recorded: Graphed | None = None
    """A recording that is asked first, whether it knows a call at a glance."""
    questions: Questions | None = None
    """What the model's code asks besides values, where plans do not look at that themselves."""
    begun: bool = False
    """Whether a call has left on the model what calls leave there: the first one that has to is no word worth."""
    sliding: Sliding | None = None
    """What stands for caches with windows that slide, where the model was optimized for one."""

    def slid(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call whose cache has windows that slide, with what stands for it; ``MISSED`` for one that has none."""
        assert self.sliding is not None
        stood = self.sliding.stood(args, kwargs)
        if stood is None:
            return MISSED
        result = self._stood(stood)
        if result.__class__ is Unplanned and self._widened(stood, args, kwargs):
            result = self._stood(stood)
        if result.__class__ is not Unplanned:
            return stood.settled(result)
        return MISSED if self._knows(args, kwargs) else self.eager(result.reason, args, kwargs)

    def _stood(self, stood: Stood) -> Any:
        """What a plan makes of a call with a stand-in, or that none takes it."""
        recorded = torch.is_grad_enabled()
        for plan in self.plans.values():
            if isinstance(plan.call, Graphed):
                result = plan.call.quick(stood.args, stood.kwargs, recorded)
                if result is not MISSED:
                    return result
        return self.run(stood.args, stood.kwargs)

    def _widened(self, stood: Stood, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call has got a plan now: a window that has filled is recorded when one is first seen."""
        assert self.sliding is not None
        made = self.sliding.recorded(stood, args, kwargs, self.plans)
        if made is not None:
            self.add(Plan(made.signature, made, "the model recorded"))
        return made is not None

    def _knows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether there is a plan for a call with the cache itself."""
        grad = torch.is_grad_enabled() and self.mode != "inference"
        try:
            return Signature.of(args, kwargs, self.model, grad=grad) in self.plans
        except TooLarge:
            return False

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorded = torch.is_grad_enabled()
        grad = recorded and self.mode != "inference"
        for matcher, plan in self.matchers:
            flat = matcher.fits(args, kwargs, self.model, grad)
            if flat is not None:
                return self._planned(plan, flat, args, kwargs, recorded and not grad)
        try:
            signature = Signature.of(args, kwargs, self.model, grad=grad)
        except TooLarge:
            return self.eager("an argument holds too many objects to compare", args, kwargs)
        found = self.plans.get(signature)
        if found is None:
            return self.eager(self._why(signature), args, kwargs)
        return self._planned(found, signature.flat, args, kwargs, recorded and not grad)

    def add(self, plan: Plan) -> None:
        if plan.call is self.model:
            return
        if plan.watch is None and plan.call.__class__ not in _REPLAYED:
            plan.watch = Watch(self.model, hooks_only=True)
        plan.matcher = plan.matcher or getattr(plan.call, "matcher", None) or Matcher.of(plan.signature)
        plan.signature = plan.signature.detached()
        self.plans[plan.signature] = plan
        if plan.matcher is not None and len(self.matchers) < _MOST_MATCHERS:
            self.matchers.append((plan.matcher, plan))
        if self.guarded is None and self.questions is None:
            self.guarded = Guarded.of(plan, self.model)
        if self.mode == "inference" and self.recorded is None and isinstance(plan.call, Graphed):
            self.recorded = plan.call

    def _planned(self, plan: Plan, flat: Flat, args: tuple[Any, ...], kwargs: dict[str, Any], quiet: bool) -> Any:
        """As planned; ``quiet`` if gradients are on and not wanted."""
        if quiet and any(tensor.requires_grad for tensor in flat.tensors):
            reason = "an input requires gradients, and the model was optimized for inference"
            return self.eager(reason, args, kwargs, 5)
        call = plan.call
        if self.questions is not None and (reason := self.questions.unlike(flat.tensors)):
            return self.eager(reason, args, kwargs, 5)
        if call.__class__ in _REPLAYED:
            result = call.replay(flat)
            if result.__class__ is not Miss:
                return result
            if result.usual and not self.begun:
                self.begun = True
                return self.model(*args, **kwargs)
            if result.stale:
                return self.eager(result.reason, args, kwargs, 5)
            call = call.call
        elif plan.watch is not None and not plan.watch.same():
            return self.eager("; ".join(plan.watch.changes()[:3]), args, kwargs, 5)
        if torch.is_inference_mode_enabled() and not any(tensor.is_inference() for tensor in flat.tensors):
            with torch.inference_mode(False), torch.no_grad():  # what was compiled was compiled outside of it
                return call(*args, **kwargs)
        if quiet:
            with torch.no_grad():
                return call(*args, **kwargs)
        return call(*args, **kwargs)

    def _why(self, signature: Signature) -> str:
        if len(self.fallbacks) >= _MOST_REASONS:  # a cache that grows differs at every call, and telling how takes time
            return "other calls than those that were verified"
        reasons = [difference(known, signature) for known in self.plans]
        return min((reason for reason in reasons if reason), key=len, default="the call was not verified")

    def eager(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any], depth: int = 4) -> Any:
        """The original model, with a word about why, once a reason."""
        if self.sliding is not None and any(map(is_stand_in, (*args, *kwargs.values()))):
            return Unplanned(reason)
        with self.lock:
            said = reason not in self.fallbacks and len(self.fallbacks) < _MOST_REASONS
            self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1
        if said:
            warnings.warn(f"this call runs as the original model: {reason}", RunsEagerly, stacklevel=depth)
        return self.model(*args, **kwargs)


class Optimized:
    """A drop-in for a model, with verified plans for the calls it was optimized for.

    ``Optimized(model, plans)`` is an instance of the model's own class whose attributes are the model's own: what is
    set on one is seen on the other. ``.original`` is the model, ``.receipt`` says what was done, ``.fallbacks`` which
    calls ran eagerly and why; where the model has such a name of its own, the name is the model's. For inference,
    results carry no gradients unless an input asks for them.
    """

    __slots__ = ()

    def __new__(cls, *given: Any, **named: Any) -> Any:
        if cls is Optimized:
            return _made(*given, **named)
        return cls.__mro__[cls.__mro__.index(Optimized) + 1](*given, **named)  # one more of the model's own class

    def __init_subclass__(cls) -> None:
        """A registry of the model's classes does not hear of this one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Everything is done in ``__new__``: the attributes are the model's, and are not to be initialized again."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # in words that the tracer knows
            return self._ridgeline_state.model(*args, **kwargs)  # type: ignore[attr-defined]
        state = state_of(self)
        if not state.plans or _tracer() is not None:
            return state.model(*args, **kwargs)
        if state.recorded is not None:
            result = state.recorded.quick(args, kwargs, torch.is_grad_enabled())
            if result is not MISSED:
                return result
        if _transforms() is not None or _carried():
            return state.model(*args, **kwargs)
        guarded = state.guarded
        if guarded is not None and guarded.takes(args, kwargs):
            return guarded.call(*args, **kwargs)
        if state.sliding is not None:
            result = state.slid(args, kwargs)
            if result is not MISSED:
                return result
        return state.run(args, kwargs)

    def add(self, plan: Plan) -> None:
        """Runs calls of the plan's signature as it says from now on; a plan that is the model itself needs nothing."""
        state_of(self).add(plan)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """How the calls that were verified are run."""
        return tuple(state_of(self).plans.values())

    @property
    def original(self) -> Any:
        """The model that was optimized."""
        return state_of(self).model

    @property
    def model(self) -> Any:
        """The model that was optimized; if it has a part called ``model``, that part, as the original would answer."""
        state = state_of(self)
        return getattr(state.model, "model", state.model) if isinstance(state.model, nn.Module) else state.model

    @property
    def receipt(self) -> Any:
        """What was changed, what it gained, and what was rejected and why."""
        return state_of(self).receipt

    @property
    def fallbacks(self) -> dict[str, int]:
        """Reasons for which calls ran as the original model, and how often."""
        return dict(state_of(self).fallbacks)

    def train_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """One step of training: gradients cleared, forward, backward, the optimizer's step. Returns the loss."""
        state = state_of(self)
        if state.optimizer is None:
            raise OptimizeError("train_step needs an optimizer: optimize(model, …, mode='train', optimizer=…)")
        return plain_step(self, state.optimizer, state.loss, args, kwargs, state.update)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the model with no plans: they hold addresses of the original's parameters."""
        state = state_of(self)
        return Optimized(copy.deepcopy(state.model, memo), mode=state.mode, receipt=state.receipt)

    def _replicate_for_data_parallel(self) -> Any:
        """A replica on another device is the model's: plans hold addresses on this one."""
        return state_of(self).model._replicate_for_data_parallel()

    def __prepare_scriptable__(self) -> Any:
        """What TorchScript compiles is the model itself."""
        return state_of(self).model

    def __copy__(self) -> Any:
        return copy.copy(state_of(self).model)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as the model itself, and loaded without us: plans are for this process."""
        return operator.getitem, ((state_of(self).model,), 0)


class _OptimizedCallable(Optimized):
    """An optimized function or other callable that is no module; its attributes are read from the original."""

    __slots__ = (_STATE, "__weakref__")

    def __getattr__(self, name: str) -> Any:
        return getattr(state_of(self).model, name)

    def __repr__(self) -> str:
        return f"Optimized({state_of(self).model!r})"


def _carried() -> bool:
    """Whether tensors carry more than values: tangents of forward differentiation, or a trace that is being taken."""
    return forward_ad._current_level >= 0 or _tracing() is not None


def state_of(optimized: Any) -> State:
    """What an ``Optimized`` knows, whatever names its model has of its own."""
    return object.__getattribute__(optimized, _STATE)


def _untraced(function: Any) -> None:
    """Has PyTorch's tracer begin with what a function calls, as it does for its own ``Module.__call__``.

    Where it began with ours, a model's forward was a function called from another module, and PyTorch insists on
    importing the modules of such: models that were typed, or read and run, failed in its tracer.
    """
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy") and hasattr(frames, "get_eval_frame_callback"):
        plain = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        frames.set_code_exec_strategy(function.__code__, plain)


for _function in (Optimized.__call__, state_of):
    _untraced(_function)


def replay_updates(optimized: Any, update: Callable[[], Any] | None) -> None:
    """From now on ``train_step`` takes the optimizer's steps this way."""
    state_of(optimized).update = update


def slide(optimized: Any, sliding: Sliding) -> Any:
    """From now on caches with windows that slide are stood in for."""
    state_of(optimized).sliding = sliding
    return optimized


def with_receipt(optimized: Any, receipt: Any) -> Any:
    """The same, with another receipt."""
    state_of(optimized).receipt = receipt
    return optimized


_CLASSES: dict[tuple[type, frozenset[str]], type] = {}
_NAMES = ("add", "fallbacks", "model", "original", "plans", "receipt", "train_step")


def _made(model: Any, plans: Iterable[Plan] = (), *, mode: str = "inference", receipt: Any = None,
          optimizer: Any = None, loss: Callable[..., Tensor] | None = None,
          update: Callable[[], Any] | None = None, asked: Iterable[str] = ()) -> Any:  # fmt: skip
    if mode not in ("inference", "train"):
        raise OptimizeError(f"mode is {mode!r}: 'inference' or 'train'")
    made: Any = object.__new__(_class_for(model))
    if isinstance(made, nn.Module):
        object.__setattr__(made, "__dict__", model.__dict__)
    state = State(model, mode, receipt, optimizer, loss, update)
    asked = frozenset(asked or getattr(receipt, "asked", ()))
    state.questions = Questions(asked) if asked and mode == "inference" else None
    object.__setattr__(made, _STATE, state)
    for plan in plans:
        state.add(plan)
    return made


def _class_for(model: Any) -> type:
    """The class of an optimized model: the model's own, called differently, under the same name.

    What the model calls by one of our names stays the model's, in its methods above all.
    """
    cls = type(model)
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        return _OptimizedCallable
    own = frozenset(name for name in _NAMES if name != "model" and _has(model, name))
    if (cls, own) not in _CLASSES:
        _CLASSES[cls, own] = _class_of(cls, own)
    return _CLASSES[cls, own]


def _class_of(cls: type, own: frozenset[str]) -> type:
    body: dict[str, Any] = {"__slots__": (_STATE,), "__module__": cls.__module__, "__qualname__": cls.__qualname__,
                            "__doc__": cls.__doc__}  # fmt: skip
    body |= {name: _passed_on(name) for name in slots_of(cls)}
    body |= {name: inspect.getattr_static(cls, name) if hasattr(cls, name) else _held(name) for name in own}
    maker: Any = abc.ABCMeta if isinstance(cls, abc.ABCMeta) else type
    return maker.__new__(type(cls), cls.__name__, (Optimized, cls), body)  # past a metaclass of the model's own


def _has(model: nn.Module, name: str) -> bool:
    held = (vars(model), *(vars(model).get(inner, {}) for inner in ("_parameters", "_buffers", "_modules")))
    return hasattr(type(model), name) or any(name in each for each in held)


def _held(name: str) -> property:
    """A name that the model keeps among its attributes, buffers or parts, where PyTorch looks where this finds none."""

    def read(self: Any) -> Any:
        if name in vars(self):
            return vars(self)[name]
        raise AttributeError(name)

    return property(read, lambda self, value: vars(self).__setitem__(name, value))


def _passed_on(name: str) -> property:
    """A slot of the model's class, which the model alone has."""
    return property(lambda self: getattr(state_of(self).model, name),
                    lambda self, value: setattr(state_of(self).model, name, value))  # fmt: skip


def plain_step(model: Callable[..., Any], optimizer: Any, loss: Callable[..., Tensor] | None, args: tuple[Any, ...],
               kwargs: dict[str, Any], update: Callable[[], Any] | None = None) -> Tensor:  # fmt: skip
    """A step of training as a person writes it; ``update`` is what stands for the optimizer's own step."""

    def differentiated() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        value = loss_of(model(*args, **kwargs), loss)
        with casts.off():
            value.backward()
        return value

    if isinstance(optimizer, torch.optim.LBFGS):  # which asks for the loss as often as it likes
        return optimizer.step(differentiated).detach()  # type: ignore[arg-type, return-value, union-attr]
    value = differentiated()
    (update or optimizer.step)()
    return value.detach()


def loss_of(output: Any, loss: Callable[..., Tensor] | None) -> Tensor:
    """The scalar to differentiate: what ``loss`` makes of the output, its ``.loss``, or the output itself."""
    if loss is not None:
        return loss(output)
    value = getattr(output, "loss", None)
    if value is None and isinstance(output, dict):
        value = output.get("loss")
    if value is None and isinstance(output, tuple | list) and output:
        value = output[0]
    value = output if value is None else value
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise OptimizeError("the output has no .loss and is not one number: give loss=, a function of the output")
    return value
