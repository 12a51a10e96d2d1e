"""Numbers that are drawn on the host and decide nothing: layers dropped with probability zero.

Many encoders and decoders draw a number for every layer in training and drop the layer if it is below a probability,
which is zero by default. Compilers break their graphs there, and no recording may draw on the host. So the call is made
with the smallest and with the largest number there is: if the same is computed both times, and the numbers are compared
and used for nothing else, they decide nothing; a replay then only draws them, as a call would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ridgeline.engine.capture.probe import as_written

_aten = torch.ops.aten
_COMPARISONS = tuple(getattr(getattr(_aten, name), kind) for name in ("lt", "le", "gt", "ge")
                     for kind in ("Scalar", "Tensor"))  # fmt: skip
_READ = _aten._local_scalar_dense.default
LEAST, MOST = 0.0, 1.0 - 2.0**-24


class Dice:
    """The host's draws of single numbers, replaced by a given one."""

    def __init__(self) -> None:
        self.num = 0
        self.thrown: set[int] = set()
        self.kept: list[Tensor] = []

    @contextmanager
    def showing(self, value: float) -> Iterator[None]:
        """``torch.rand([])`` on the host is this value; all other draws are what they are."""
        draw, self.num = torch.rand, 0
        self.thrown.clear()

        def rand(*size: Any, **kwargs: Any) -> Tensor:
            given = size[0] if len(size) == 1 and isinstance(size[0], list | tuple) else size
            if list(given) not in ([], [1]) or kwargs or torch.get_default_device().type != "cpu":
                return draw(*size, **kwargs)
            self.num += 1
            shown = torch.full(tuple(given), value)
            self.thrown.add(shown.untyped_storage()._cdata)
            self.kept.append(shown)
            return shown

        self.kept.clear()
        torch.rand = rand  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.rand = draw


class _Course(TorchDispatchMode):
    """What is computed, and whether a thrown number goes anywhere but into a comparison."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # as observing does

    def __init__(self, dice: Dice) -> None:
        super().__init__()
        self.dice, self.compared = dice, True
        self.ops: list[tuple[Any, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        thrown = [t for t in given if t.layout is torch.strided and t.untyped_storage()._cdata in self.dice.thrown]
        result = func(*args, **kwargs)
        if not thrown:
            self.ops.append((func, [tuple(t.shape) for t in given]))
        elif func in _COMPARISONS:
            self.dice.thrown.add(result.untyped_storage()._cdata)
            self.dice.kept.append(result)
        elif func is not _READ:
            self.compared = False
        return result


def indifferent(call: Callable[[], Any], moved: Callable[[], bool]) -> int | None:
    """How many numbers a call draws on the host that decide nothing; None if some do.

    ``moved`` says whether the host's generator was used since it was last asked: draws that were not replaced.
    """
    courses = []
    for value in (LEAST, MOST):
        dice = Dice()
        course = _Course(dice)
        moved()
        with dice.showing(value), as_written(), course:
            call()
        if moved() or not course.compared or not dice.num:
            return None
        courses.append((dice.num, course.ops))
    return courses[0][0] if courses[0] == courses[1] else None


def served(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call with its draws answered."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with Dice().showing(MOST):
            return call(*args, **kwargs)

    return run


def draw(num: int) -> None:
    """The host's generator moves as it would in a call."""
    for _ in range(num):
        torch.rand([])
