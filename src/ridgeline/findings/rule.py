"""The rules: small functions that look at a scene and suspect one cause, in the order in which they may claim time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ridgeline.errors import FindingError
from ridgeline.findings.context.candidate import Candidate
from ridgeline.findings.context.context import TraceContext

Detector = Callable[[TraceContext], Candidate | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """A detector with its name and version; ``order`` is smaller the more specific the cause is."""

    name: str
    version: int
    order: int
    detect: Detector

    @property
    def suspect(self) -> Detector | None:
        """The same cause on less evidence: never a finding, only what a finding's time may have instead."""
        return _SUSPICIONS.get(self.name)


_RULES: dict[str, Rule] = {}
_SUSPICIONS: dict[str, Detector] = {}


def rule(name: str, *, version: int = 1, order: int) -> Callable[[Detector], Detector]:
    """Register a detector; a name is taken once."""

    def register(detect: Detector) -> Detector:
        if name in _RULES:
            raise FindingError(f"two rules are called {name!r}: rename one of them")
        _RULES[name] = Rule(name, version, order, detect)
        return detect

    return register


def suspicion(name: str) -> Callable[[Detector], Detector]:
    """Register what a rule suspects on less evidence than it asks for to tell; once for each rule."""

    def register(detect: Detector) -> Detector:
        if name in _SUSPICIONS:
            raise FindingError(f"the rule {name!r} has two suspicions: join them")
        _SUSPICIONS[name] = detect
        return detect

    return register


def rules() -> list[Rule]:
    """Every rule, the most specific first."""
    import ridgeline.findings.rules  # noqa: F401  (each module registers its own)

    return sorted(_RULES.values(), key=lambda found: (found.order, found.name))
