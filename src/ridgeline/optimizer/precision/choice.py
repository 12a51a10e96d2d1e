"""Chooses formats for quantized layers within an error budget, and the next choice after one was proved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ridgeline.optimizer.precision.sensitivity import Choice, Gains, Layer, choose, measured, own_error, total_error
from ridgeline.optimizer.receipt import QuantizedLayer
from ridgeline.optimizer.search.judge import Prover

FIRST_FRAC = 0.8
"""Share of the error budget that the first choice may fill by its estimate."""
MOST_TRIES = 3


@dataclass(frozen=True, slots=True)
class Study:
    """All layers with their possible formats, eager's own error and the error budget."""

    layers: tuple[Layer, ...]
    own_frac: float
    error_budget: float

    @property
    def room(self) -> float:
        """What is left for the squared errors of layers."""
        return self.error_budget**2 - self.own_frac**2

    @property
    def refusal(self) -> str:
        """Why no layer can be quantized, if so."""
        if self.room <= 0:
            return (f"no fewer bits: eager itself is {self.own_frac:.1e} from the reference, and error_budget is "
                    f"{self.error_budget:.1e}: results may not be farther than that")  # fmt: skip
        if not any(layer.choices for layer in self.layers):
            return "no fewer bits: no linear layer of this call has another format on this device"
        if not any(choice.gain_s > 0 for layer in self.layers for choice in layer.choices):
            return "no fewer bits: no layer gains by another format on this device"
        return ""

    def chosen(self, frac: float) -> dict[str, Choice]:
        return choose(list(self.layers), frac * self.room)

    def next_frac(self, frac: float, chosen: Mapping[str, Choice], error_frac: float) -> float | None:
        """The share of the budget to try next, given the measured error; None if the choice would be the same."""
        meant = sum(choice.error_frac**2 for choice in chosen.values())
        real = max(error_frac**2 - self.own_frac**2, 1e-3 * meant)
        if not math.isfinite(real) or meant <= 0:
            return 0.25 * frac if not math.isfinite(real) else None
        # Share of the error budget that the next choice may fill, given the measured error.
        found = 0.85 * meant / real
        # More than all of the estimate's room is right where errors turned out smaller than estimated.
        return None if self.chosen(found) == dict(chosen) else found

    def rows(self, chosen: Mapping[str, Choice]) -> tuple[QuantizedLayer, ...]:
        """The rows of the receipt."""
        return tuple(QuantizedLayer(
            name=layer.name, format=choice.format, local_frac=choice.local_frac, error_frac=choice.error_frac,
            gain_s=choice.gain_s, basis="measured alone" if layer.alone else "as the nearest of its kind",
        ) for layer in self.layers if (choice := chosen.get(layer.name)) is not None)  # fmt: skip

    def summary(self, chosen: Mapping[str, Choice]) -> str:
        alone = sum(layer.alone for layer in self.layers)
        sums = f"errors add up to {total_error(self.own_frac, chosen):.1e} by the estimate, eager's {self.own_frac:.1e}"
        return f"fewer bits: {len(chosen)} of {len(self.layers)} layers, {alone} measured alone; {sums}"


def study(prover: Prover, error_budget: float, budget_s: float) -> Study:
    """Measure every layer on the given inputs."""
    case = prover.case_of(prover.subject.inputs)
    # Share of the search's time for measuring layers one by one.
    layers = measured(prover.subject, case, 0.15 * budget_s, Gains())
    return Study(tuple(layers), own_error(case[1], case[2]), error_budget)
