"""A rule is one value: its detector, how far its gains are to be trusted, and what else its time may be lost to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Literal

from ridgeline.errors import FindingError
from ridgeline.findings.context.candidate import Candidate
from ridgeline.findings.context.context import TraceContext
from ridgeline.findings.replay.calibration import DEVICE_SLACK, HOST_SLACK, USUAL, USUAL_OF_HOST, Trust

Detector = Callable[[TraceContext], Candidate | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One cause of lost time, and everything that is known of it.

    ``order`` is smaller the more specific the cause is: rules book the time they explain in this order. ``suspect``
    finds the same cause on less evidence; it never makes a finding, only an alternative to one.
    """

    name: str
    version: int
    order: int
    detect: Detector
    suspect: Detector | None
    saves: Literal["host", "device"]  # where most of the gain is: a recording stretches host time
    trust: Trust
    more_at_best: float  # of the upper end, what gains were seen past it
    is_general: bool  # says that the host is slow, where no other rule knows why
    is_ambiguous: bool  # reads the cause out of a pattern that other causes leave as well
    alternative_to: tuple[str, ...] | None  # findings whose time may be lost to this; None for every ambiguous one
    tell: str  # what to look at or to try, to tell this cause from others

    @property
    def slack(self) -> float:
        """Of either end of an interval, beyond the noise."""
        return HOST_SLACK if self.saves == "host" else DEVICE_SLACK


_RULES: dict[str, Rule] = {}


def rule(
    name: str,
    *,
    order: int,
    version: int = 1,
    saves: Literal["host", "device"] = "device",
    trust: Trust | None = None,
    more_at_best: float = 0.0,
    suspect: Detector | None = None,
    is_general: bool = False,
    is_ambiguous: bool = False,
    alternative_to: tuple[str, ...] | None = None,
    tell: str = "",
) -> Callable[[Detector], Detector]:
    """Register a detector with all that belongs to its rule; a name is taken once."""

    def register(detect: Detector) -> Detector:
        if name in _RULES:
            raise FindingError(f"two rules are called {name!r}: rename one of them")
        _RULES[name] = Rule(
            name=name,
            version=version,
            order=order,
            detect=detect,
            suspect=suspect,
            saves=saves,
            trust=trust or (USUAL_OF_HOST if saves == "host" else USUAL),
            more_at_best=more_at_best,
            is_general=is_general,
            is_ambiguous=is_ambiguous,
            alternative_to=alternative_to,
            tell=tell,
        )
        return detect

    return register


def rules() -> list[Rule]:
    """Every rule, the most specific first; each module in ``rules/`` registers its own."""
    import ridgeline.findings.rules as package

    for module in iter_modules(package.__path__):
        import_module(f"{package.__name__}.{module.name}")
    return sorted(_RULES.values(), key=lambda found: (found.order, found.name))


def rule_named(name: str) -> Rule:
    if name not in _RULES:
        rules()
    return _RULES[name]


def is_general(name: str) -> bool:
    """Whether the rule of this name says that the host is slow, where no other knows why."""
    return name in {found.name for found in rules() if found.is_general}
