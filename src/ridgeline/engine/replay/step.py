"""An optimizer's update as a recording, over the gradients that a recorded backward leaves where it always does.

Forward, backward and update are three recordings one behind the other: the device sees one step, and the update needs
no memory of its own. Whatever differs from what was recorded (other gradients, state or settings) is stepped as ever.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from operator import getitem, is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as _optimizers

from ridgeline.engine.capture.cuda_graph import Recording
from ridgeline.engine.capture.probe import restored_random
from ridgeline.engine.replay.fused_adamw import Launches, is_taken, staying, steps_itself
from ridgeline.engine.replay.training import GraphedTraining
from ridgeline.errors import NotGraphable

_COUNTING = (torch.optim.Adam, torch.optim.AdamW)
_KNOWN = (*_COUNTING, torch.optim.SGD)
_HOOKED = "the optimizer has hooks that a replay would not call"
_MOST_RECORDINGS = 4
"""An optimizer that is changed again and again is not worth recording again and again."""


class GraphedUpdate:
    """Takes an optimizer's steps: replayed where nothing has changed since it was recorded, else ``optimizer.step()``.

    The first step is the optimizer's own, which makes its state; the second is recorded. Learning rates that change
    from step to step (schedules) are read from the device from the first change on. ``misses`` says why steps were not
    replayed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, graphed: GraphedTraining) -> None:
        _refuse(optimizer, {id(parameter) for parameter, _ in graphed.gradients()})
        self.optimizer, self.graphed = optimizer, graphed
        self.replays = 0
        self.misses: dict[str, int] = {}
        self._recording: Recording | None = None
        self._launches: Launches | None = None
        self._num_recordings, self._refusal = 0, ""
        self._places: list[tuple[Tensor, int | None]] = []
        self._state: tuple[list[Any], list[str], list[Any]] = ([], [], [])
        self._held: list[Any] = []
        self._settings: list[dict[str, Any]] = []
        self._rates: list[Tensor] = []
        self._rate_values: list[float] = []

    def __call__(self) -> None:
        reason = self._obstacle()
        if not reason and self._stale():
            reason = self._record()
        if reason:
            self.misses[reason] = self.misses.get(reason, 0) + 1
            self.optimizer.step()
            return
        self._set_rates()
        assert self._recording is not None
        self._recording.replay()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers of the rate ask for
        self.replays += 1

    def _obstacle(self) -> str:
        """Why this step cannot be taken by any recording."""
        if not self._places:
            held = self.graphed.gradients()
            self._places = [(p, None if grad is None else grad.data_ptr()) for p, grad in held]
        for parameter, place in self._places:
            grad = parameter.grad
            if (None if grad is None else grad.data_ptr()) != place:
                return "gradients are elsewhere than the recorded backward leaves them"
        return _HOOKED if _hooked(self.optimizer) or not steps_itself(self.optimizer) else ""

    def _stale(self) -> bool:
        """Whether nothing is recorded, or not for the optimizer as it is now."""
        if self._recording is None or self._settled() != self._settings or not _same(self._holds(), self._held):
            return True
        boxes, names, values = self._state
        try:
            return not all(map(is_, map(getitem, boxes, names), values)) or self._num_state() != len(values)
        except LookupError:
            return True

    def _settled(self) -> list[dict[str, Any]]:
        """What a recording has taken from the optimizer as numbers; rates only while they are not on the device."""
        left_out = {"params", "lr"} if self._rates else {"params"}
        return [{k: v for k, v in group.items() if k not in left_out and not isinstance(v, Tensor)}
                for group in self.optimizer.param_groups]  # fmt: skip

    def _holds(self) -> list[Any]:
        """Its parameters, what it keeps of each, and settings on the device.

        Loading a state makes it keep others, with nothing else changed.
        """
        groups = self.optimizer.param_groups
        settings = [value for group in groups for value in group.values() if isinstance(value, Tensor)]
        return [*(p for group in groups for p in group["params"]), *self.optimizer.state.values(), *settings]

    def _num_state(self) -> int:
        return sum(len(box) for box in self.optimizer.state.values())

    def _record(self) -> str:
        """Records the update as it is now; says why not if it cannot."""
        if self._num_recordings >= _MOST_RECORDINGS:
            return self._refusal or "the optimizer is changed too often"
        if self._incomplete():
            return "the first step makes the optimizer's state"
        scheduled = self._num_recordings > 0 and self._rates_changed()
        self._num_recordings += 1
        self._recording = None
        if scheduled and not self._rates:
            if not all(group.get("fused") or group.get("capturable") for group in self.optimizer.param_groups):
                return "its learning rate is a number on the host, and changes"
            self._take_rates()
        try:
            self._recording = self._recorded()
        except NotGraphable as refusal:
            self._num_recordings, self._refusal = _MOST_RECORDINGS, str(refusal)
            return self._refusal
        found = [(box, name, value) for box in self.optimizer.state.values() for name, value in box.items()]
        self._state = [f[0] for f in found], [f[1] for f in found], [f[2] for f in found]
        self._settings, self._held = self._settled(), self._holds()
        return ""

    def _incomplete(self) -> bool:
        """Whether a step would make state: what is made while recording is not there afterwards."""
        for group in self.optimizer.param_groups:
            if isinstance(self.optimizer, _COUNTING) or group["momentum"]:
                if any(p.grad is not None and not self.optimizer.state.get(p) for p in group["params"]):
                    return True
        return False

    def _rates_changed(self) -> bool:
        return [group["lr"] for group in self.optimizer.param_groups] != [was.get("lr") for was in self._settings]

    def _take_rates(self) -> None:
        groups = self.optimizer.param_groups
        self._rates = [torch.zeros((), device=self._places[0][0].device) for _ in groups]
        self._rate_values = [float("nan")] * len(groups)

    def _set_rates(self) -> None:
        for i, (group, rate) in enumerate(zip(self.optimizer.param_groups, self._rates)):
            value = group["lr"]
            if not isinstance(value, Tensor) and value != self._rate_values[i]:
                rate.fill_(value)
                self._rate_values[i] = value

    def _recorded(self) -> Recording:
        gc.collect()  # recordings that nobody holds any more must not be destroyed while another is made
        launches = staying(self.optimizer) if is_taken(self.optimizer) else None
        step = self.optimizer.step if launches is None else launches
        with self._as_recorded(), restored_random(), self.graphed.keeping_gradients():
            recording, _ = self.graphed.executor.record(step, told=False)
        self._launches = launches  # a recording reads its tables
        return recording

    @contextmanager
    def _as_recorded(self) -> Iterator[None]:
        """Fused steps count on the device, only the word for it is missing; rates are read from there."""
        groups = self.optimizer.param_groups
        kept = [dict(group) for group in groups]
        try:
            for i, group in enumerate(groups):
                if isinstance(self.optimizer, _COUNTING):
                    group["capturable"] = True
                if self._rates and not isinstance(group["lr"], Tensor):
                    group["lr"] = self._rates[i]
            yield
        finally:
            for group, was in zip(groups, kept):
                group.update(was)


def _same(these: list[Any], those: list[Any]) -> bool:
    return len(these) == len(those) and all(map(is_, these, those))


def _hooked(optimizer: torch.optim.Optimizer) -> bool:
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    return any((*own, _optimizers._global_optimizer_pre_hooks, _optimizers._global_optimizer_post_hooks))


def _refuse(optimizer: torch.optim.Optimizer, mine: set[int]) -> None:
    """Optimizers whose replayed step could be another than their own."""
    if type(optimizer) not in _KNOWN:
        raise NotGraphable(f"a step of {type(optimizer).__name__} is not known to be the same when it is replayed")
    if _hooked(optimizer):
        raise NotGraphable(_HOOKED)
    if not steps_itself(optimizer):
        raise NotGraphable("the optimizer's step was replaced by another, which a replay would not call")
    for group in optimizer.param_groups:
        if isinstance(optimizer, _COUNTING) and not (group["fused"] or group["capturable"]):
            raise NotGraphable("the optimizer counts its steps on the host: make it with fused=True")
        if group.get("differentiable"):
            raise NotGraphable("the optimizer's step is itself differentiated")
        if any(isinstance(v, Tensor) and v.device != p.device for v in group.values() for p in group["params"]):
            raise NotGraphable("a setting of the optimizer is a tensor that is not where the parameters are")
    if any(id(p) not in mine for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
        raise NotGraphable("the optimizer updates parameters that are not the model's")
