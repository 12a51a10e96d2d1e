"""A whole step of training as one recording: gradients cleared, forward, backward and the optimizer's update."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import getitem, is_
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import NotGraphable
from ridgeline.optimizer.executor import Executor, Recording, executor_for
from ridgeline.optimizer.matcher import Matcher
from ridgeline.optimizer.optimized import loss_of, plain_step
from ridgeline.optimizer.signature import Signature, recordable
from ridgeline.optimizer.statics import Statics
from ridgeline.optimizer.studio import counts, restoring
from ridgeline.optimizer.training import TrainingStudio, free, uncached_casts
from ridgeline.optimizer.tree import Flat, TooLarge
from ridgeline.optimizer.watch import Watch

_COUNTING = (torch.optim.Adam, torch.optim.AdamW)
_KNOWN = (*_COUNTING, torch.optim.SGD)


class GraphedStep:
    """A step that is replayed where it can be, and taken as a person writes it where it cannot."""

    def __init__(self, studio: StepStudio, signature: Signature, statics: Statics, recording: Recording,
                 value: Tensor) -> None:  # fmt: skip
        self.signature, self.matcher = signature.detached(), Matcher.of(signature)
        self.misses: dict[str, int] = {}
        self.replays = 0
        self._studio, self._statics, self._recording, self._value = studio, statics, recording, value
        self._grads = [(p, p.grad) for p in studio.parameters if p.grad is not None]
        self._free = counts([grad for _, grad in self._grads if grad is not None])
        self._state = studio.state()
        self._settings = studio.settings()
        self._lock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        flat, reason = self._recognized(args, kwargs)
        with self._lock:
            reason = reason or self._obstacle()
            if flat is None or reason:
                self.misses[reason] = self.misses.get(reason, 0) + 1
                studio = self._studio
                return plain_step(studio.call, studio.optimizer, studio.loss, args, kwargs)
            return self._replay(flat)

    def _recognized(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Flat | None, str]:
        model = self._studio.model
        flat = self.matcher.fits(args, kwargs, model, torch.is_grad_enabled()) if self.matcher is not None else None
        if flat is not None:
            return flat, ""
        try:
            signature = Signature.of(args, kwargs, model)
        except TooLarge:
            return None, "an argument holds too many objects"
        return signature.flat, "" if signature == self.signature else "another call than the one recorded"

    def _obstacle(self) -> str:
        """Why the next step cannot be replayed, if it cannot."""
        studio = self._studio
        if not studio.watch.same():
            return "; ".join(studio.watch.changes()[:3])
        if studio.executor.is_recording():
            return "the step itself is being recorded"
        if studio.settings() != self._settings:
            return "the optimizer's settings changed"
        boxes, names, values = self._state
        try:
            kept = all(map(is_, map(getitem, boxes, names), values))
        except LookupError:
            kept = False
        if not kept:
            return "the optimizer's state was replaced"
        return "" if self._gradients_are_ours() else "gradients of an earlier step are still held"

    def _gradients_are_ours(self) -> bool:
        """Whether nobody but the parameters holds the gradients of the last step: the next one lies in their place."""
        for parameter, grad in self._grads:
            if parameter.grad is not grad:
                parameter.grad = grad
        return free(self._free)

    def _replay(self, flat: Flat) -> Tensor:
        self._studio.executor.arrive()
        with torch.no_grad():
            self._statics.fill(flat.tensors)
            self._recording.replay()
            self.replays += 1
            self._studio.optimizer._opt_called = True  # what schedulers of the learning rate ask for
            return self._value.clone()


def graph_step(call: Callable[..., Any], optimizer: torch.optim.Optimizer, args: tuple[Any, ...],
               kwargs: dict[str, Any], model: Any, *, loss: Callable[[Any], Tensor] | None = None,
               executor: Executor | None = None) -> GraphedStep:  # fmt: skip
    """Records ``zero_grad``, ``call(*args, **kwargs)``, the loss, its backward and ``optimizer.step()`` as one.

    Parameters, buffers and the optimizer's state are as before when this returns. For Adam and AdamW with
    ``fused=True`` or ``capturable=True``, and SGD; others are refused, as is whatever ``graph_training`` refuses.
    """
    with torch.inference_mode(False), torch.enable_grad(), uncached_casts():
        signature = recordable(args, kwargs, model)
        watch = Watch(model)
        given = signature.flat.tensors + [tensor for _, tensor in watch.tensors.values()]
        studio = StepStudio(call, model, watch, executor or executor_for(given), loss, optimizer)
        with restoring(watch), _gradients_kept(model):
            return studio.record_step(signature)


@contextmanager
def _gradients_kept(model: Any) -> Iterator[None]:
    """A refusal leaves the gradients that were there."""
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        for parameter, grad in kept:
            parameter.grad = grad
        raise


class StepStudio(TrainingStudio):
    """Where a whole step is recorded."""

    def __init__(self, call: Callable[..., Any], model: Any, watch: Watch, executor: Executor,
                 loss: Callable[[Any], Tensor] | None, optimizer: torch.optim.Optimizer) -> None:  # fmt: skip
        super().__init__(call, model, watch, executor, loss)
        self.optimizer = optimizer

    def record_step(self, signature: Signature) -> GraphedStep:
        flat = signature.flat
        self._refuse_optimizer()
        statics = self.ready(flat)
        if self.written or self.asking:
            raise NotGraphable("an input is written to or asks for gradients")
        with self.without_hooks():
            self.warm(flat, statics)
        self._set_up(self._used(flat, statics))
        gc.collect()  # recordings that nobody holds any more must not be destroyed while another is made
        recording, value = self._record_step(flat, statics)
        return GraphedStep(self, signature, statics, recording, value)

    def settings(self) -> list[dict[str, Any]]:
        """What a recording has taken from the optimizer as numbers; tensors are read on the device."""
        return [{k: v for k, v in group.items() if k != "params" and not isinstance(v, Tensor)}
                for group in self.optimizer.param_groups]  # fmt: skip

    def state(self) -> tuple[list[Any], list[str], list[Any]]:
        """Every tensor of the optimizer's state, by where it is found."""
        found = [(box, name, value) for box in self.optimizer.state.values() for name, value in box.items()]
        return [f[0] for f in found], [f[1] for f in found], [f[2] for f in found]

    def _refuse_optimizer(self) -> None:
        optimizer = self.optimizer
        if type(optimizer) not in _KNOWN:
            raise NotGraphable(f"a step of {type(optimizer).__name__} is not known to be the same when it is replayed")
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            raise NotGraphable("the optimizer has hooks that a replay would not call")
        for group in optimizer.param_groups:
            if isinstance(optimizer, _COUNTING) and not (group["fused"] or group["capturable"]):
                raise NotGraphable("the optimizer counts its steps on the host: make it with fused=True")
            if group.get("differentiable"):
                raise NotGraphable("the optimizer's step is itself differentiated")
        mine = {id(parameter) for parameter in self.parameters}
        if any(id(p) not in mine for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
            raise NotGraphable("the optimizer updates parameters that are not the model's")
        if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self.parameters):
            raise NotGraphable("parameters have hooks that a replay would not call")

    def _used(self, flat: Flat, statics: Statics) -> list[Tensor]:
        """The parameters that get gradients: the optimizer keeps state for those alone."""
        with torch.no_grad():
            statics.fill(flat.tensors)
        value = self._loss(flat, statics)
        grads = torch.autograd.grad(value, self.parameters, allow_unused=True)
        return [parameter for parameter, grad in zip(self.parameters, grads) if grad is not None]

    def _loss(self, flat: Flat, statics: Statics) -> Tensor:
        arguments, _ = self.twin(flat, self.leaves(statics))
        return loss_of(self.call(*arguments[0], **arguments[1]), self.loss)

    def _set_up(self, used: list[Tensor]) -> None:
        """The optimizer's state, made by a step that changes nothing: no gradient, no learning rate, no decay."""
        fresh = [parameter for parameter in used if not self.optimizer.state.get(parameter)]
        if not fresh:
            return
        if len(fresh) < len(used):
            raise NotGraphable("the optimizer has state for some parameters only")
        groups = self.optimizer.param_groups
        if not isinstance(self.optimizer, _COUNTING):
            if any(group["momentum"] for group in groups):
                raise NotGraphable("SGD makes its momentum in the first step: take one first")
            return
        settings = [{name: group[name] for name in ("lr", "weight_decay")} for group in groups]
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter) if any(parameter is u for u in used) else None
        try:
            for group in groups:
                rate = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
                group.update(lr=rate, weight_decay=0.0)
            self.optimizer.step()
        finally:
            for group, was in zip(groups, settings):
                group.update(was)
        for parameter in used:
            self.optimizer.state[parameter]["step"].zero_()
            parameter.grad = None

    def _record_step(self, flat: Flat, statics: Statics) -> tuple[Recording, Tensor]:
        counting = isinstance(self.optimizer, _COUNTING)
        counted = [g for g in self.optimizer.param_groups if counting and not g["capturable"]]

        def run() -> Tensor:
            for parameter in self.parameters:
                parameter.grad = None
            value = self._loss(flat, statics)
            value.backward()
            self.optimizer.step()
            return value.detach()

        for group in counted:
            group["capturable"] = True  # fused steps count on the device; only this word is missing
        try:
            return self.record(run)
        finally:
            for group in counted:
                group["capturable"] = False
