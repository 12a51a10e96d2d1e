"""Quantized weights, updated when the parameters they were made from change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ridgeline.errors import OptimizeError
from ridgeline.optimizer.precision.formats import FORMATS


class Packed:
    """One or several stacked parameters in a format; the quantized tensors keep their addresses."""

    __slots__ = ("format", "parameters", "seen", "tensors")

    def __init__(self, parameters: Sequence[Tensor], format: str) -> None:
        self.parameters, self.format = tuple(parameters), format
        self.tensors = self._made()
        self.seen = self._marks()

    @torch.no_grad()
    def _made(self) -> tuple[Tensor, ...]:
        first = self.parameters[0]
        joined = first.detach() if len(self.parameters) == 1 else torch.cat([p.detach() for p in self.parameters])
        return tuple(tensor.contiguous() for tensor in FORMATS[self.format].make(joined))

    def _marks(self) -> list[tuple[int, int]]:
        return [(p._version, p.data_ptr()) for p in self.parameters]

    def refresh(self) -> bool:
        """Quantize again, in place, if a parameter was written to or moved; returns whether it was."""
        now = self._marks()
        if now == self.seen:
            return False
        for kept, new in zip(self.tensors, self._made(), strict=True):
            kept.copy_(new)
        self.seen = now
        return True


class WeightBank:
    """All quantized weights of a model, by parameter."""

    def __init__(self, model: nn.Module, plan: Mapping[str, str]) -> None:
        known = dict(model.named_modules())
        missing = [name for name in plan if not isinstance(known.get(name), nn.Linear)]
        if missing:
            raise OptimizeError(f"no linear layer {missing[0]!r} in this {type(model).__name__}")
        self.formats = {id(known[name].weight): (name, format) for name, format in plan.items()}
        self._kept = [known[name].weight for name in plan]  # keeps the ids valid
        self._packed: dict[tuple[Any, ...], Packed] = {}
        self._versions: list[int] = []

    def format_of(self, parameter: Any) -> str | None:
        found = self.formats.get(id(parameter))
        return None if found is None else found[1]

    def packed(self, parameters: Sequence[Tensor], format: str) -> Packed:
        """The quantized tensors of these parameters, the same for every caller."""
        key = (format, *map(id, parameters))
        if key not in self._packed:
            self._packed[key] = Packed(parameters, format)
            self._versions = []
        return self._packed[key]

    def refresh(self) -> None:
        """Quantize again what was written to; takes ten microseconds for 200 unchanged layers.

        Moved parameters are noticed by the graph's inputs or the capture's guards.
        """
        now = [parameter._version for packed in self._packed.values() for parameter in packed.parameters]
        if now != self._versions:
            for packed in self._packed.values():
                packed.refresh()
            self._versions = now

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for packed in self._packed.values() for tensor in packed.tensors)


class Refreshable(Protocol):
    """Weights derived from others, which must be updated when those change."""

    def refresh(self) -> Any: ...


class RefreshedCall:
    """A call that first updates derived weights."""

    def __init__(self, call: Callable[..., Any], bank: Refreshable) -> None:
        self.call, self.bank = call, bank

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.bank.refresh()
        return self.call(*args, **kwargs)
