"""Chooses how an optimizer updates: as given, fused or by our kernel, captured or not; measured, then proved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.engine.drop_in import Optimized, plain_step, replay_updates, state_of
from ridgeline.engine.example_inputs import Inputs, State
from ridgeline.engine.replay import fused_adamw as stepping
from ridgeline.engine.replay.step import GraphedUpdate
from ridgeline.engine.replay.training import GraphedTraining
from ridgeline.engine.state import left_alone
from ridgeline.errors import NotGraphable
from ridgeline.optimizer.search.loss import Loss
from ridgeline.optimizer.search.loss_curve import LEAST_STEPS, STEPS, LossCurves, Step, compared, put_back
from ridgeline.optimizer.search.timing import NOISE_FRAC, Comparison, Contender, Timed, Track, compare, in_turn

FUSED = "the optimizer updates all parameters in one kernel (fused=True)"
KERNEL = "the optimizer updates all parameters in our kernel"
WAYS = ("fused", "kernel")
"""Updates that are tried beside the given one: PyTorch's fused one, and our AdamW kernel."""
RECORDED = "train_step replays the optimizer's update"
_KNOWN = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_ROUNDS = 7
LOOP_ROUNDS, MIN_LOOP_ROUNDS, LOOP_STEPS, AMPLE = 5, 3, 2, 2.0
"""Rounds in which whole steps with each update alternate, fewer if time is short; steps in a row."""


def settle(made: Optimized, optimizer: torch.optim.Optimizer, inputs: Inputs, loss: Callable[..., Any] | None,
           eager_s: float, left_s: float) -> list[str]:  # fmt: skip
    """Fuse the optimizer if that is faster, capture its update if possible, and prove both over a training run.

    What diverges from eager training is undone, and nothing changes if ``left_s`` are too few to tell (``eager_s`` is
    an eager step without the update). Returns notes on what was done.
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    with _gradients_kept(state_of(made).model), left_alone(state_of(made).model, loss, held):
        before = _settings(optimizer)
        try:
            # Eager calls that one step of both runs takes, with their updates.
            affordable = left_s / (3.0 * STEPS * eager_s)
            return _settled(made, optimizer, inputs, loss, affordable, _rounds(affordable, eager_s))
        except Exception as error:  # not proved: restored
            why = str(error) if isinstance(error, _Unproved) else f"{type(error).__name__}: {error}"
            _put_back(optimizer, before)
            return [f"the optimizer is left as it is: {why}"]


class _Unproved(Exception):
    """A changed optimizer was not shown to be correct."""


def _settled(made: Optimized, optimizer: torch.optim.Optimizer, inputs: Inputs, loss: Callable[..., Any] | None,
             affordable: float, rounds: int) -> list[str]:  # fmt: skip
    """``affordable`` is the number of proofs that there is time for, ``rounds`` that of races in the loop."""
    given, (fast, gain) = cloned(optimizer), fastest(optimizer)
    steps = min(STEPS, int(affordable * STEPS))
    way, lost = _in_the_loop(made, optimizer, fast, inputs, loss, rounds) if steps >= LEAST_STEPS else (fast, [])
    adopt(optimizer, way)
    update = recorded(made, optimizer)
    if way is None and update is None:
        return lost
    if steps < LEAST_STEPS:
        raise _Unproved(f"{LEAST_STEPS} steps to prove it take longer than what is left")
    found = _tracked(made, given, optimizer, inputs, loss, steps)
    if not found.ok:
        raise _Unproved(str(found))
    replay_updates(made, update)
    alone = f": {gain.speedup:.2f}× as fast" if gain and way == fast else ""
    how = [f"{KERNEL if way == 'kernel' else FUSED}{alone}"] if way else []
    return [*lost, *how, *([RECORDED] if update else []), f"with this optimizer, {found}"]


def _rounds(affordable: float, eager_s: float) -> int:
    least = LOOP_ROUNDS if affordable >= AMPLE else MIN_LOOP_ROUNDS
    # Seconds of rounds that are always worth while, and the most of them: short steps, which are bound by the host,
    # need more than five.
    return max(least, min(25, int(0.6 / (2 * (LOOP_STEPS + 1) * eager_s))))


def again(made: Optimized, optimizer: torch.optim.Optimizer, notes: tuple[str, ...]) -> None:
    """Apply again what was proved earlier for this model and optimizer, according to the receipt's notes."""
    for way, words in (("fused", FUSED), ("kernel", KERNEL)):
        if any(note.startswith(words) for note in notes):
            adopt(optimizer, way)
    replay_updates(made, recorded(made, optimizer) if RECORDED in notes else None)


def described(optimizer: torch.optim.Optimizer) -> str:
    """The optimizer's type and settings, without learning rates, which a proof does not depend on."""
    groups = [{k: v for k, v in sorted(group.items()) if k not in ("params", "lr", "initial_lr", "fused")}
              for group in optimizer.param_groups]  # fmt: skip
    return f"{type(optimizer).__qualname__} {groups}"


def recorded(made: Optimized, optimizer: torch.optim.Optimizer) -> GraphedUpdate | None:
    """The captured update of the optimizer, if the model's plan keeps gradients at fixed addresses."""
    for plan in state_of(made).plans.values():
        call = getattr(plan.call, "call", None) if not isinstance(plan.call, GraphedTraining) else plan.call
        if isinstance(call, GraphedTraining):
            try:
                return GraphedUpdate(optimizer, call)
            except NotGraphable:
                return None
    return None


def adopt(optimizer: torch.optim.Optimizer, way: str | None) -> None:
    """Switch an optimizer to this update; None leaves it unchanged."""
    if way is not None:
        fuse(optimizer)  # the kernel leaves the first step, which creates the state, to PyTorch's fused update
    if way == "kernel" and stepping.takes(optimizer):
        stepping.take_over(optimizer)


def fuse(optimizer: torch.optim.Optimizer) -> bool:
    """Switch an optimizer to PyTorch's fused update, if there is one and no other was chosen."""
    if not fusible(optimizer):
        return False
    for group in optimizer.param_groups:
        group["fused"] = True
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), Tensor):  # on the host until now
            state["step"] = state["step"].to(parameter.device, torch.float32)
    return True


def fusible(optimizer: torch.optim.Optimizer) -> bool:
    groups = optimizer.param_groups
    untouched = all(g.get("fused") is None and g.get("foreach") is None and not g.get("differentiable") for g in groups)
    parameters = [p for group in groups for p in group["params"]]
    fit = all(p.is_cuda and p.is_floating_point() and type(p) is nn.Parameter for p in parameters)
    return type(optimizer) in _KNOWN and untouched and fit and bool(parameters)


def cloned(optimizer: torch.optim.Optimizer, **changes: Any) -> torch.optim.Optimizer:
    """A new optimizer of the same kind over the same parameters and settings, without state."""
    kind = type(optimizer) if type(optimizer) in _KNOWN else torch.optim.AdamW
    kept = (lambda group: group) if kind is type(optimizer) else (lambda group: {"params": group["params"]})
    return kind([{**kept(group), "params": list(group["params"]), **changes} for group in optimizer.param_groups])


def fastest(optimizer: torch.optim.Optimizer) -> tuple[str | None, Comparison | None]:
    """The update that is faster than the given one beyond noise, if any, and by how much.

    Steps with a learning rate of zero change nothing; all updates share one state.
    """
    able = {"fused": fusible(optimizer), "kernel": stepping.takes(optimizer)}
    names = [name for name in WAYS if able[name]]
    if not names:
        return None, None
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    try:
        timed = _timed(_ways(optimizer, names), parameters[0].device)
    finally:
        for parameter, grad in zip(parameters, kept, strict=True):
            parameter.grad = grad
    best: str | None = None
    for name in names:
        if compare(timed[best or "given"], timed[name]).faster:
            best = name
    return best, compare(timed["given"], timed[best]) if best else None


def _in_the_loop(made: Optimized, optimizer: torch.optim.Optimizer, way: str | None, inputs: Inputs,
                 loss: Callable[..., Any] | None, rounds: int) -> tuple[str | None, list[str]]:  # fmt: skip
    """The fastest update with which whole steps are no slower than as given; notes on those that lost."""
    lost: list[str] = []
    for each in {"kernel": ("kernel", "fused"), "fused": ("fused",), None: ()}[way]:
        found = in_whole_steps(made, optimizer, each, inputs, loss, rounds)
        if found.speedup >= 1.0 - NOISE_FRAC:
            return each, lost
        lost.append(f"optimizer: {each} is faster alone, and whole steps with it are {found.speedup:.3f}× as fast")
    return None, lost


def in_whole_steps(made: Optimized, optimizer: torch.optim.Optimizer, way: str, inputs: Inputs,
                   loss: Callable[..., Any] | None, rounds: int = LOOP_ROUNDS) -> Comparison:  # fmt: skip
    """The speedup of whole steps with this update over those with the given one.

    A synchronized step hides host time that a loop does not: our kernel, 2.4 times as fast alone, made eager steps of
    wav2vec2, which are bound by the host, 4 % slower (H200).
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept, state = [p.detach().clone() for p in parameters], State(state_of(made).model)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    try:
        ways = _ways(optimizer, [way])
        steps = {name: _step(made, each, inputs, Loss(loss)) for name, each in ways.items()}
        timed = _looped(steps, kept[0].device, rounds)
    finally:
        put_back(parameters, kept)
        state.restore()
    return compare(timed["given"], timed[way])


def _looped(steps: dict[str, Step], device: torch.device, rounds: int) -> dict[str, Timed]:
    """Time whole steps in turns, several in a row as in a loop; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds + 1):
        for name, step in in_turn(list(steps.items()), i):
            seconds[name].append(_row_s(step, device))
    return {name: Timed(tuple(found[1:])) for name, found in seconds.items()}


def _row_s(step: Step, device: torch.device) -> float:
    step()  # warm-up after another update
    _wait(device)
    began = time.perf_counter()
    for _ in range(LOOP_STEPS):
        step()
    _wait(device)
    return (time.perf_counter() - began) / LOOP_STEPS


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Updated:
    """A contender whose turns include an update, with optimizer state in the layout of its weights.

    Contenders whose weights have the same addresses share one optimizer.
    """

    def __init__(self, runner: Contender, track: Track, optimizer: torch.optim.Optimizer | None,
                 trials: dict[tuple[int, ...], torch.optim.Optimizer]) -> None:  # fmt: skip
        self.runner, self.track, self.optimizer, self.trials = runner, track, optimizer, trials
        self.trial: torch.optim.Optimizer | None = None
        self.kept: list[tuple[nn.Parameter, Tensor]] = []

    @contextmanager
    def switched(self) -> Iterator[Callable[..., Any]]:
        with self.runner.switched() as call:
            if self.trial is None:
                self.trial = self._made()
            self.track.update = self.trial.step
            try:
                yield call
            finally:
                self.track.update = None

    def _made(self) -> torch.optim.Optimizer:
        places = tuple(p.data_ptr() for p in self.track.parameters)
        if places not in self.trials:
            trial = self.trials[places] = _trial(self.track, self.optimizer)
            self.kept = [(p, p.detach().clone()) for group in trial.param_groups for p in group["params"]]
        return self.trials[places]

    def put_back(self) -> None:
        """Restore the weights, if this contender created the optimizer."""
        if self.kept:
            with self.runner.switched():
                put_back([p for p, _ in self.kept], [was for _, was in self.kept])


@contextmanager
def updating(track: Track, optimizer: torch.optim.Optimizer | None, runners: Mapping[str, Contender]
             ) -> Iterator[tuple[str, dict[str, Updated]]]:  # fmt: skip
    """Contenders with an update in each step, as in loops, and the optimizer's name.

    The given optimizer with its best update, or PyTorch's AdamW; the learning rate is zero. Weights are restored,
    because NaN survives a rate of zero.
    """
    trials: dict[tuple[int, ...], torch.optim.Optimizer] = {}
    found = {name: Updated(runner, track, optimizer, trials) for name, runner in runners.items()}
    kind = torch.optim.AdamW if optimizer is None else type(cloned(optimizer))
    try:
        yield kind.__name__, found
    finally:
        for each in found.values():
            each.put_back()


def _trial(track: Track, optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    if optimizer is None:
        return torch.optim.AdamW(track.parameters, lr=0.0, weight_decay=0.0)
    way, _ = fastest(optimizer)
    trial = cloned(optimizer, lr=0.0, weight_decay=0.0)
    adopt(trial, way)
    return trial


def _ways(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, torch.optim.Optimizer]:
    """The given optimizer and the other updates, at a learning rate of zero, sharing the moments of the first."""
    given = cloned(optimizer, lr=0.0, weight_decay=0.0)
    given.step()
    found = {"given": given}
    for name in names:
        way = found[name] = cloned(optimizer, lr=0.0, weight_decay=0.0)
        for parameter, box in given.state.items():
            way.state[parameter] = {k: v.clone() if k == "step" else v for k, v in box.items()}
        adopt(way, name)
    return found


def _timed(ways: dict[str, torch.optim.Optimizer], device: torch.device) -> dict[str, Timed]:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_ROUNDS + 2):
        for name, way in ways.items():
            seconds[name].append(_step_s(way, device))
    return {name: Timed(tuple(found[2:])) for name, found in seconds.items()}


def _step_s(optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    _wait(device)
    began = time.perf_counter()
    optimizer.step()
    _wait(device)
    return time.perf_counter() - began


def _tracked(made: Optimized, given: torch.optim.Optimizer, optimizer: torch.optim.Optimizer, inputs: Inputs,
             loss: Callable[..., Any] | None, steps: int) -> LossCurves:  # fmt: skip
    """Compare a run of eager steps with the original optimizer and one of the result with the changed optimizer."""
    model: Any = state_of(made).model
    value = Loss(loss)

    def eager() -> Step:
        return _step(model, cloned(given), inputs, value)

    def result() -> Step:
        trial = cloned(optimizer)
        if stepping.is_taken(optimizer):
            stepping.take_over(trial)
        return _step(made, trial, inputs, value, recorded(made, trial))

    parameters = [p for p in model.parameters() if p.requires_grad]
    return compared(eager, result, parameters, State(model), steps, type(given).__name__)


def _step(call: Callable[..., Any], optimizer: torch.optim.Optimizer, inputs: Inputs, loss: Loss,
          update: GraphedUpdate | None = None) -> Step:  # fmt: skip
    def step() -> Tensor:
        ready = inputs.reused()
        return plain_step(call, optimizer, loss, ready.args, dict(ready.kwargs), update).clone()

    return step


def _settings(optimizer: torch.optim.Optimizer) -> tuple[list[dict[str, Any]], dict[Any, dict[str, Any]]]:
    return [dict(group) for group in optimizer.param_groups], {p: dict(box) for p, box in optimizer.state.items()}


def _put_back(optimizer: torch.optim.Optimizer, before: tuple[list[dict[str, Any]], dict[Any, dict[str, Any]]]) -> None:
    stepping.give_back(optimizer)
    for group, was in zip(optimizer.param_groups, before[0], strict=True):
        group.update(was)
    for parameter, box in before[1].items():
        optimizer.state[parameter].update(box)


@contextmanager
def _gradients_kept(model: nn.Module) -> Iterator[None]:
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, grad in kept:
            parameter.grad = grad
