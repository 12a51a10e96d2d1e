"""Design-space exploration: spaces, samplers, evaluation in batches, frontiers, and what a chip costs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os

    from ridgeline.study.run import Study
    from ridgeline.study.space import Space

__all__ = ["Space", "study"]


def study(
    space: Space,
    *,
    minimize: str | Sequence[str] = (),
    maximize: str | Sequence[str] = (),
    subject_to: str | Sequence[str] = (),
    keep: str | Sequence[str] = (),
    budget: int = 10_000,
    sampler: str = "auto",
    seed: int = 0,
    workers: int = 1,
    ray: str = "",
    store: str | os.PathLike[str] | None = None,
    name: str = "study",
    resume: bool = False,
    errors: Mapping[str, float] | None = None,
) -> Study:
    """Evaluate points of a space and find their frontier.

    Objectives and conditions are expressions of measures and axes (``"usd_per_mtoken"``, ``"fits and tpot<40ms"``).
    Points are kept in ``store`` (or ``RIDGELINE_STORE``; without either, for this process only). ``errors`` is the
    measured output error by precision, for ``error_frac``.
    """
    import os

    from ridgeline.store.store import Store
    from ridgeline.study.run import Spec, run

    def words(given: str | Sequence[str]) -> tuple[str, ...]:
        return (given,) if isinstance(given, str) else tuple(given)

    spec = Spec(space, words(minimize), words(maximize), words(subject_to), words(keep), budget, sampler, seed,
                tuple(sorted((errors or {}).items())))  # fmt: skip
    url = store or os.environ.get("RIDGELINE_STORE") or ":memory:"
    with Store(url) as opened:
        return run(spec, opened, name, workers=workers, ray=ray, resume=resume)


def __getattr__(name: str) -> Any:
    if name == "Space":
        from ridgeline.study.space import Space

        return Space
    raise AttributeError(f"module 'ridgeline.study' has no attribute {name!r}")


class _Package(ModuleType):
    """``ridgeline.study`` is this package once anything imported it, and the verb before: both can be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Study:
        return study(*args, **kwargs)


sys.modules[__name__].__class__ = _Package
