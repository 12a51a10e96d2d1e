"""Judges whether a candidate is correct: outputs, gradients and state of a call against a reference in higher
precision, with tolerances derived from eager's own error."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.bench.verdict import FEW_FLOOR, MAX_FLOOR, RMS_FLOOR, TIMES_EAGER, Error, error_of
from ridgeline.engine import autocast as casts
from ridgeline.engine.example_inputs import Before, Inputs, State, leaves, same
from ridgeline.kernels.tensorfloat import products_in
from ridgeline.optimizer.search.loss_curve import perturbed
from ridgeline.optimizer.search.statistical_test import EXCESS, SPREAD, WIDE_STEP, Moments, Runs, beyond_chance

Call = Callable[..., Any]
MAX_ELEMENTS = 1 << 26
"""Elements kept of all observed tensors together; larger tensors are sampled at a regular, odd stride."""
LEAST_ELEMENTS = 1 << 16
NO_DIGIT, TIMES_NOISE = 0.5, 8.0
"""Relative error from which a result of eager is noise (the gradient of a key's bias is zero but for rounding), and how
many times larger the noise of another kernel may be."""
FAR_FRAC = 1e-2
"""If even float32 is off by percents, every other rounding is as accurate and differs visibly: results may then differ
from eager's by a hundredth of their size."""
LEAST_DRAWS, MOST_DRAWS = 8, 32
"""Number of calls over which the means of a random model must agree."""
GRADIENT = "gradient of "
"""Prefix of the names of gradients."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that a call left behind: its elements or a regular sample of them, complex numbers as pairs."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    values: Tensor


@dataclass(frozen=True, slots=True)
class Verdict:
    """The worst compared tensor: its error, eager's error and the allowed error."""

    ok: bool
    what: str
    num_compared: int
    rms_frac: float
    eager_rms_frac: float
    allowed_rms_frac: float
    largest: float
    eager_largest: float
    allowed_largest: float
    reference: str
    reason: str = ""
    notes: tuple[str, ...] = ()
    most_rms_frac: float = 0.0  # the largest allowed error of any tensor compared
    like_eagers: bool = True  # whether float32 outputs equal eager's to within 9e-5

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if not self.ok:
            return f"WRONG: {self.reason}"
        return (
            f"error {self.rms_frac:.1e} (eager's own {self.eager_rms_frac:.1e}, allowed {self.allowed_rms_frac:.1e}) "
            f"at {self.what or 'the output'}, the worst of {self.num_compared}, against {self.reference}"
        )

    def to_dict(self) -> dict[str, Any]:
        return {key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in asdict(self).items()}  # fmt: skip


@dataclass(slots=True)
class Subject:
    """What is proved: a model, its inputs, and how it is called."""

    model: nn.Module
    inputs: Inputs
    mode: str
    loss: Call
    state: State
    step: float = field(init=False)  # rounding step of the coarsest dtype in the model

    def __post_init__(self) -> None:
        self.step = coarsest_step(self.model, self.inputs)

    def observe(
        self,
        call: Call,
        inputs: Inputs,
        parameters: dict[str, Tensor] | None = None,
        changed: Callable[[], list[tuple[str, Tensor]]] | None = None,
    ) -> list[Leaf]:
        """Outputs, changed inputs and state, and gradients in training; the state is restored afterwards."""
        named = parameters if parameters is not None else dict(self.model.named_parameters())
        before = Before(inputs)
        try:
            output, found = self._called(call, inputs, named)
            found += [(f"output{'.' if name else ''}{name}", tensor) for name, tensor in leaves(output)]
            found += [(f"input {name}", tensor) for name, tensor in before.changed()]
            found += (changed or self.state.changed)()
            absent = sum(p.requires_grad for p in named.values()) if self.mode == "train" else 0
            absent -= sum(name.startswith(GRADIENT) for name, _ in found)  # of layers skipped in this call
            limit = max(LEAST_ELEMENTS, MAX_ELEMENTS // max(1, len(found) + max(0, absent)))
            return [_leaf(name, tensor, limit) for name, tensor in found]
        finally:
            self.state.restore()

    def _called(self, call: Call, inputs: Inputs, named: dict[str, Tensor]) -> tuple[Any, list[tuple[str, Tensor]]]:
        if self.mode == "infer":
            with torch.no_grad():
                return call(*inputs.args, **inputs.kwargs), []
        output = call(*inputs.args, **inputs.kwargs)
        wanted = {name: p for name, p in named.items() if p.requires_grad}
        wanted |= {f"input {name}": t for name, t in inputs.named() if t.requires_grad and t.is_leaf}
        kept = {name: p.grad for name, p in wanted.items()}
        for p in wanted.values():
            p.grad = None
        value = self.loss(output)
        with casts.off():
            value.backward()
        found = [(f"{GRADIENT}{name}", p.grad) for name, p in wanted.items() if p.grad is not None]
        for name, p in wanted.items():
            p.grad = kept[name]
        return output, found


def coarsest_step(model: nn.Module, inputs: Inputs) -> float:
    """The rounding step of the coarsest dtype among parameters, inputs and autocast."""
    found = [t.dtype for t in [*model.parameters(), *inputs.tensors()] if t.is_floating_point()]
    kinds = {t.device.type for t in [*model.parameters(), *inputs.tensors()]}
    found += [torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)]
    return max((torch.finfo(dtype).eps for dtype in found), default=torch.finfo(torch.float32).eps)


def _leaf(name: str, tensor: Tensor, limit: int) -> Leaf:
    held = tensor.detach()
    flat = (torch.view_as_real(held.resolve_conj()) if held.is_complex() else held).reshape(-1)
    stride = flat.numel() // limit | 1 if flat.numel() > limit else 1
    return Leaf(name, tensor.dtype, tuple(tensor.shape), flat[::stride].clone())


class Prover:
    """Holds eager's and the reference's results on fresh inputs, and judges candidates against them."""

    def __init__(
        self, subject: Subject, *, num_inputs: int = 2, random: bool = False, num_draws: int = LEAST_DRAWS
    ) -> None:
        self.subject, self.random, self.num_draws = subject, random, num_draws
        self._eager_moments: dict[int, tuple[dict[str, Moments], dict[str, Moments]]] = {}
        self._noise: frozenset[str] | None = None
        self._spare: dict[int, list[Error]] = {}
        self.notes: list[str] = []
        self.cases: list[tuple[Inputs, list[Leaf], list[Leaf]]] = []
        self.reference = ""
        self.error_budget = 0.0
        self.rounded = False
        self._prepare(num_inputs)

    def _prepare(self, num_inputs: int) -> None:
        if self.random:
            self.reference = f"the mean of {self.num_draws} eager runs"
            self.notes.append(
                "the model draws random numbers: judged by the means and spreads of runs, not by elements"
            )
            self.cases = [(self._taken(0)[0], [], [])]
            return
        for seed in range(num_inputs):
            inputs, eager = self._taken(seed)
            reference = self._referenced(inputs, eager)
            if reference is not None:
                self.cases.append((inputs, eager, reference))
            else:  # eager's own results as the reference would reject every other rounding
                self.notes.append(f"one input fewer: no {self.reference} reference for it")

    def _taken(self, seed: int) -> tuple[Inputs, list[Leaf]]:
        """Fresh inputs that the model accepts, and its results on them."""
        return self.subject.inputs.taken(seed, lambda inputs: self.subject.observe(self.subject.model, inputs))

    def _referenced(self, inputs: Inputs, eager: list[Leaf]) -> list[Leaf] | None:
        """The results in float64, else in float32, else eager's own (with a note).

        None if earlier inputs had a reference of higher precision and these have none.
        """
        before = self.reference
        for dtype, word in ((torch.float64, "float64"), (torch.float32, "float32")):
            if torch.finfo(dtype).eps >= self.subject.step or (self.reference and self.reference != word):
                continue
            if _too_large(self.subject.model, dtype):
                self.notes.append(f"no {word} reference: the weights would not fit beside the model's own")
                continue
            try:
                found = widened(self.subject, inputs, dtype)
            except Exception as error:  # an op without this dtype, or no memory: try the next dtype
                self.notes.append(f"no {word} reference: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
                _forget_memory()
                continue
            if [(leaf.name, leaf.shape) for leaf in found] == [(leaf.name, leaf.shape) for leaf in eager]:
                self.reference = word
                return found
        self.reference = self.reference or "eager PyTorch"
        return eager if before in ("", "eager PyTorch") else None

    def case_of(self, inputs: Inputs) -> tuple[Inputs, list[Leaf], list[Leaf]]:
        """Inputs with the results of eager and of the reference, or eager's twice if there is no reference."""
        eager = self.subject.observe(self.subject.model, inputs.copied())
        return inputs, eager, self._referenced(inputs, eager) or eager

    def judge(self, call: Call, error_budget: float = 0.0, *, rounded: bool = False) -> Verdict:
        """Judge a candidate. With ``error_budget`` results may be that far from the reference, whatever eager's error.

        ``rounded`` tolerates convolutions rounded to TensorFloat-32 where eager's are not, within 1e-4 elementwise.
        """
        self.error_budget, self.rounded = error_budget, rounded
        if self.random:
            # A result up to twice beyond what is allowed may be chance (correlated elements count as fewer): it is
            # judged again over three times as many runs.
            verdict, badness = self._judged_by(call, self.num_draws, 0)
            if not verdict.ok and badness <= 2.0:
                verdict, _ = self._judged_by(call, 3 * self.num_draws, 4 * self.num_draws)
            return verdict
        worst: Verdict | None = None
        like_eagers = True
        for i, (inputs, eager, reference) in enumerate(self.cases):
            found = self.subject.observe(call, inputs.copied())
            like_eagers = like_eagers and all(map(_like, found, eager))
            verdict = self._compared(found, eager, reference)
            if not verdict.ok and verdict.num_compared and self.subject.step > WIDE_STEP:
                verdict = self._compared(found, eager, reference, self._perturbed_errors(i))
            worst = verdict if worst is None or _badness(verdict) > _badness(worst) else worst
            if not verdict.ok:
                break
        assert worst is not None
        return replace(worst, like_eagers=like_eagers)

    def _perturbed_errors(self, case: int) -> list[Error]:
        """The worst error of each result over eager calls with one weight in 1,024 perturbed by one rounding step.

        A router may send a token to another expert because of one rounding, which is most of the error then. All that
        follows is rounded differently; the perturbation itself adds 2 % to an error. Without this, gradients of a small
        Mixtral were called wrong for another summation order in attention, two times in six.
        """
        if case not in self._spare:
            self._spare[case] = []
            inputs, _, reference = self.cases[case]
            weights = [p for p in self.subject.model.parameters() if p.is_floating_point()]
            with suppress(torch.OutOfMemoryError):  # no memory for a second set of weights: keep eager's own error
                for seed in range(4):
                    with perturbed(weights, 1 / 1024, seed):
                        again = self.subject.observe(self.subject.model, inputs.copied())
                    self._spare[case] = _worse(self._spare[case], again, reference)
        return self._spare[case]

    def _compared(self, found: list[Leaf], eager: list[Leaf], reference: list[Leaf],
                  spare: Sequence[Error] = ()) -> Verdict:  # fmt: skip
        names = [leaf.name for leaf in eager]
        if [leaf.name for leaf in found] != names:
            odd = set(names) ^ {leaf.name for leaf in found}
            return self._wrong(f"other results than eager: {', '.join(sorted(odd)[:4]) or 'in another order'}")
        worst: Verdict | None = None
        most = 0.0
        for i, (ours, theirs, wide) in enumerate(zip(found, eager, reference, strict=True)):
            if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
                return self._wrong(f"{ours.name} is {ours.dtype} {ours.shape}, eager's {theirs.dtype} {theirs.shape}")
            verdict = self._leaf_verdict(ours, theirs, wide, len(found), spare[i] if spare else None)
            most = max(most, verdict.allowed_rms_frac)
            worst = verdict if worst is None or _badness(verdict) > _badness(worst) else worst
        if worst is None:
            return self._wrong("the model returns nothing that could be compared")
        return replace(worst, most_rms_frac=most)

    def _leaf_verdict(self, ours: Leaf, theirs: Leaf, wide: Leaf, num: int, spare: Error | None = None) -> Verdict:
        exact = not ours.values.is_floating_point()
        reference = wide.values if exact else wide.values.double()
        distance = _mismatch if exact else error_of
        error, eager = distance(ours.values, reference), distance(theirs.values, reference)
        if spare is not None and not exact:
            eager = _worse_of(eager, spare)
        allowed_rms, allowed_largest = allowed(eager, reference, 0.0 if exact else self._step(ours.dtype))
        if ours.name.startswith(GRADIENT) and self._step(ours.dtype) > WIDE_STEP:
            # The largest error expected of that many normal errors.
            finite = reference[reference.isfinite()]
            if finite.numel() > 1:
                scale = allowed_rms * float(finite.square().mean().sqrt())
                # The largest of n normal errors is √(2 ln n) times their root mean square; those of gradients in half
                # types are up to this much larger, because they sum products that cancel. Of Whisper's 481 gradients
                # one was 3 % beyond twice eager's largest, with two thirds of the allowed root mean square.
                allowed_largest = max(allowed_largest, 1.5 * math.sqrt(2.0 * math.log(finite.numel())) * scale)
        if self.error_budget and not exact:
            finite = reference[reference.isfinite()]
            scale = float(finite.abs().max()) if finite.numel() else 0.0
            allowed_rms = max(allowed_rms, self.error_budget)
            # A single element may be off by this many error budgets, relative to the largest element of its tensor.
            allowed_largest = max(allowed_largest, 4.0 * self.error_budget * scale)
        ok = error.num_misplaced <= eager.num_misplaced
        ok = ok and error.rms_frac <= allowed_rms and error.largest <= allowed_largest
        if self.rounded and not ok and not exact and error.num_misplaced <= eager.num_misplaced:
            allowed_rms = max(allowed_rms, 5e-4)  # half a step of TensorFloat-32
            near = torch.allclose(ours.values, theirs.values, 1e-4, 1e-4, equal_nan=True)
            ok = error.rms_frac <= allowed_rms and near
        ok = ok or same(ours.values, theirs.values)  # bitwise equal to eager
        differs = self._differs_from_eager(ours, theirs, eager.rms_frac) if ok and not exact else ""
        if differs:
            return Verdict(False, ours.name, num, error.rms_frac, eager.rms_frac, allowed_rms, error.largest,
                           eager.largest, allowed_largest, self.reference, differs, tuple(self.notes))  # fmt: skip
        reason = "" if ok else (
            f"{ours.name}: rms {error.rms_frac:.2e} of {allowed_rms:.2e} allowed (eager {eager.rms_frac:.2e}), "
            f"largest {error.largest:.2e} of {allowed_largest:.2e}, {error.num_misplaced} not finite where eager is"
        )  # fmt: skip
        return Verdict(ok, ours.name, num, error.rms_frac, eager.rms_frac, allowed_rms, error.largest, eager.largest,
                       allowed_largest, self.reference, reason, tuple(self.notes))  # fmt: skip

    def _differs_from_eager(self, ours: Leaf, theirs: Leaf, eager_frac: float) -> str:
        """Why an accurate result is rejected: the model amplifies rounding, and the result differs from eager's."""
        if self.subject.mode == "infer" and (num := int((ours.values.isfinite() & ~theirs.values.isfinite()).sum())):
            return f"{ours.name}: {num} are finite where eager's overflow on the way"
        wide = self.subject.mode == "infer" and self._step(ours.dtype) <= WIDE_STEP
        settled = self.error_budget >= FAR_FRAC or eager_frac < FAR_FRAC / (1.0 + TIMES_EAGER)
        if not wide or settled:
            return ""
        apart = error_of(ours.values, theirs.values.double())
        if apart.rms_frac <= FAR_FRAC or apart.largest <= 1e-5:  # small enough to be zero but for rounding
            return ""
        return (f"{ours.name}: {apart.rms_frac:.1e} from eager's, which is {eager_frac:.1e} from {self.reference} "
                "itself: the model amplifies rounding")  # fmt: skip

    def _step(self, dtype: torch.dtype) -> float:
        own = torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0
        return max(own, self.subject.step)

    def _wrong(self, reason: str) -> Verdict:
        return unproved(reason, self.reference, tuple(self.notes))

    def _judged_by(self, call: Call, num: int, first: int) -> tuple[Verdict, float]:
        """The verdict over ``num`` runs and its excess; a second set of eager's runs shows what chance alone does."""
        inputs, model = self.cases[0][0], self.subject.model
        if num not in self._eager_moments:
            self._eager_moments[num] = (self._moments(model, inputs, first, num),
                                        self._moments(model, inputs, first + num, num))  # fmt: skip
        eager, again, found = _alike(*self._eager_moments[num], self._moments(call, inputs, first + 2 * num, num))
        if eager.keys() != found.keys() or any(eager[name].mean.shape != found[name].mean.shape for name in eager):
            return self._wrong("other results than eager"), math.inf
        worst: tuple[float, str, tuple[float, float, float, float]] = (0.0, "", (0.0, 1.0, EXCESS, SPREAD))
        for name, moments in eager.items():
            if name in self._rounding_noise():
                badness = math.sqrt(found[name].energy / max(moments.energy, again[name].energy, 1e-300)) / TIMES_NOISE
                worst = max(worst, (badness, f"{name}, noise", (badness * TIMES_NOISE, 1.0, TIMES_NOISE, SPREAD)))
                continue
            shown = beyond_chance(moments, again[name], found[name], self.subject.step)
            badness = max(shown[0] / shown[2], max(shown[1], 1 / shown[1]) / shown[3])
            worst = max(worst, (badness, name, shown))
        badness, where, (excess, ratio, allowed_excess, allowed_ratio) = worst
        reason = "" if badness <= 1 else (
            f"{where}: means of {num} runs {excess:.1f} times as far apart (squared) as chance explains "
            f"({allowed_excess:.1f} allowed), spread {ratio:.2f} of eager's ({allowed_ratio:.2f} allowed)"
        )  # fmt: skip
        return Verdict(badness <= 1, where, len(eager), excess, 1.0, allowed_excess, ratio, 1.0, allowed_ratio,
                       f"the mean of {num} eager runs", reason, tuple(self.notes)), badness  # fmt: skip

    def _rounding_noise(self) -> frozenset[str]:
        """Gradients that are rounding noise: perturbing the weights by one rounding step changes them much.

        If that moves most gradients by a millionth, one that moves by 2 % is noise.
        """
        if self._noise is not None:
            return self._noise
        self._noise = frozenset()
        if self.subject.mode != "train":
            return self._noise
        try:
            first = self._gradients()
            with perturbed([p for p in self.subject.model.parameters() if p.requires_grad]):
                again = self._gradients()
        except torch.OutOfMemoryError:  # no memory for a second set of weights: nothing counts as noise
            return self._noise
        moved = {name: float((grad - again[name]).norm() / grad.norm()) for name, grad in first.items()
                 if name in again and grad.shape == again[name].shape and grad.any()}  # fmt: skip
        if moved:
            most = min(NO_DIGIT, max(0.02, 1000.0 * statistics.median(moved.values())))
            self._noise = frozenset(name for name, frac in moved.items() if frac > most)
        return self._noise

    def _gradients(self) -> dict[str, Tensor]:
        """Eager's gradients, always with the same random numbers."""
        torch.manual_seed(1234)
        found = self.subject.observe(self.subject.model, self.cases[0][0].copied())
        return {leaf.name: leaf.values.double() for leaf in found if leaf.name.startswith("gradient")}

    def _moments(self, call: Call, inputs: Inputs, first: int, num: int) -> dict[str, Moments]:
        """Mean and variance of every floating-point result over runs with different random numbers.

        A gradient missing in a run, because its layer was skipped, counts as zero.
        """
        runs: dict[str, Runs] = {}
        for draw in range(first, first + num):
            torch.manual_seed(1234 + 977 * draw)
            for leaf in self.subject.observe(call, inputs.copied()):
                if leaf.values.is_floating_point():
                    runs.setdefault(leaf.name, Runs()).add(leaf.values)
        for name, found in runs.items():
            if name.startswith(GRADIENT):
                found.add_zeros(num)
        return {name: found.moments() for name, found in runs.items()}


def _alike(*sides: dict[str, Moments]) -> Iterator[dict[str, Moments]]:
    """Every side with all results: add zeros for those that appear in some runs only."""
    known = {name: moments for side in sides for name, moments in side.items() if moments.num_absent}
    return (side | {name: moments.nothing() for name, moments in known.items() if name not in side} for side in sides)


def unproved(reason: str, reference: str = "", notes: tuple[str, ...] = ()) -> Verdict:
    """The verdict on a candidate that could not be compared."""
    return Verdict(False, "", 0, math.inf, 0.0, 0.0, math.inf, 0.0, 0.0, reference, reason, notes)


def allowed(eager: Error, reference: Tensor, step: float) -> tuple[float, float]:
    """Twice eager's own error, plus what rounding explains where eager happens to be exact."""
    finite = reference[reference.isfinite()] if reference.is_floating_point() else reference
    scale = float(finite.abs().max()) if step and finite.numel() else 0.0
    # Rounding steps of float32 and float64 that are tolerated: sums in these types keep the order of summation, which
    # rounding to a half type hides, and eager's own order may happen to be exact.
    rms_floor, max_floor = (RMS_FLOOR, MAX_FLOOR) if step > WIDE_STEP else (4.0, 16.0)
    times = TIMES_EAGER if eager.rms_frac < NO_DIGIT else TIMES_NOISE
    rms = times * eager.rms_frac + (rms_floor + FEW_FLOOR / max(1, reference.numel()) ** 0.5) * step
    return rms, times * eager.largest + max_floor * step * scale


def _worse(errors: Sequence[Error], found: Sequence[Leaf], reference: Sequence[Leaf]) -> list[Error]:
    """The elementwise worse of known errors and those of another call."""
    if [leaf.name for leaf in found] != [leaf.name for leaf in reference]:
        return list(errors)
    new = [error_of(leaf.values, wide.values.double()) if leaf.values.is_floating_point()
           else _mismatch(leaf.values, wide.values) for leaf, wide in zip(found, reference, strict=True)]  # fmt: skip
    return [_worse_of(a, b) for a, b in zip(errors, new, strict=True)] if errors else new


def _worse_of(a: Error, b: Error) -> Error:
    return Error(max(a.rms_frac, b.rms_frac), max(a.largest, b.largest), a.num_misplaced)


def _like(ours: Leaf, theirs: Leaf) -> bool:
    """Whether a float32 output equals eager's to within 9e-5, absolute and relative: KernelBench allows 1e-4, and other
    inputs have other errors. Other dtypes are judged elsewhere."""
    wide = ours.name.startswith("output") and ours.dtype is theirs.dtype is torch.float32
    if not wide or ours.shape != theirs.shape:
        return True
    return torch.allclose(ours.values, theirs.values, 9e-5, 9e-5, equal_nan=True)


def _mismatch(found: Tensor, reference: Tensor) -> Error:
    """Integers and booleans are equal or not."""
    if found.shape != reference.shape:
        return Error(math.inf, math.inf, reference.numel())
    differing = (found != reference).sum()
    return Error(float(differing) / max(1, reference.numel()), float(differing > 0), 0)


def _badness(verdict: Verdict) -> tuple[bool, float]:
    share = verdict.rms_frac / verdict.allowed_rms_frac if verdict.allowed_rms_frac else 0.0
    return not verdict.ok, share


def widened(subject: Subject, inputs: Inputs, dtype: torch.dtype) -> list[Leaf]:
    """What the model leaves behind with parameters, buffers and inputs in a wider dtype."""
    experts = plain_experts(subject.model) if dtype is torch.float64 else nullcontext()
    with products_in("ieee"), casts.off(), experts, Widened(subject.model, dtype) as wide:
        parameters = {name: wide.of(tensor) for name, tensor in wide.parameters}

        def changed() -> list[tuple[str, Tensor]]:
            pairs = [(name, wide.made.get(id(tensor)), kept) for name, tensor, kept in subject.state.tensors]
            return [(f"state {name}", now) for name, now, kept in pairs
                    if now is not None and not torch.equal(now, kept.to(now.dtype))]  # fmt: skip

        return subject.observe(subject.model, inputs.converted(dtype), parameters, changed)


@contextmanager
def plain_experts(model: nn.Module) -> Iterator[None]:
    """Run transformers' experts one after another: grouped GEMMs have no float64."""
    configs = {id(config): config for part in model.modules() if (config := vars(part).get("config")) is not None}
    kept = [(config, name) for config in configs.values()
            if isinstance(name := getattr(config, "_experts_implementation", None), str)]  # fmt: skip
    try:
        for config, _ in kept:
            config._experts_implementation = "eager"
        yield
    finally:
        for config, name in kept:
            config._experts_implementation = name


class Widened:
    """A model whose tensors are replaced by wider ones inside the context."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype
        self.parameters = list(model.named_parameters())
        self.made: dict[int, Tensor] = {}
        self.kept: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def of(self, tensor: Tensor) -> Tensor:
        """The wide counterpart of a tensor, one for all its uses."""
        if id(tensor) not in self.made:
            kind = self.dtype.to_complex() if tensor.is_complex() else self.dtype
            counts = tensor.is_floating_point() or tensor.is_complex()
            wide = tensor.detach().to(kind, copy=True) if counts else tensor.detach().clone()
            self.made[id(tensor)] = wide.requires_grad_(tensor.requires_grad)
        return self.made[id(tensor)]

    def __enter__(self) -> Widened:
        for module in self.model.modules():
            for held in (module._parameters, module._buffers, vars(module)):
                self._swap(held)
            weights = vars(module).get("_flat_weights")  # recurrent modules keep lists of their weights
            if isinstance(weights, list):
                lists = ("_flat_weights", "_flat_weight_refs")
                kept = {name: vars(module)[name] for name in lists if name in vars(module)}
                self.kept.append((vars(module), kept))
                vars(module)["_flat_weights"] = [self.of(w) if isinstance(w, Tensor) else w for w in weights]
        return self

    def _swap(self, held: dict[str, Any]) -> None:
        found = {name: value for name, value in held.items() if isinstance(value, Tensor)}
        self.kept.append((held, found))
        held.update({name: self.of(value) for name, value in found.items()})

    def __exit__(self, *_: Any) -> None:
        for held, found in reversed(self.kept):
            held.update(found)


def _too_large(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a second set of weights in this dtype would take more than half of the free memory."""
    weights = [p for p in model.parameters() if p.device.type == "cuda"]
    if not weights:
        return False
    _forget_memory()  # the allocator's cached blocks are free too
    free, _ = torch.cuda.mem_get_info(weights[0].device)
    return dtype.itemsize * sum(p.numel() for p in weights) > 0.5 * free


def _forget_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
