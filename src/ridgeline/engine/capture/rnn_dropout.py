"""Dropout between cuDNN's recurrent layers in a recording: a state on the device that PyTorch hands to nobody.

PyTorch keeps one such state a device. After every seeding of the generator, restoring its state included, the next
layers draw a seed on the host, make another state and let go of the old one. So a recording made behind a seeding
failed, as the host waits for the seed, and one that was made would write to memory that is somebody else's after the
next seeding. A recording therefore has its state made before it, holds it, and begins it anew after a seeding.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.engine.capture.cuda_graph import Recording

_CALL = "aten::_cudnn_rnn"


def dropping(schema: Any, args: tuple[Any, ...]) -> torch.device | None:
    """The device of a call of recurrent layers that drop; None of any other call."""
    if schema.name != _CALL:
        return None
    given = dict(zip((argument.name for argument in schema.arguments), args))
    device: torch.device = given["input"].device
    return device if given["train"] and given["dropout"] > 0 else None


class _Handed(TorchDispatchMode):
    """The state that recurrent layers are called with."""

    state: Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == _CALL:
            self.state = args[-1]
        return func(*args, **(kwargs or {}))


def settled(device: torch.device) -> Tensor | None:
    """The state that layers take until the generator is seeded again: a layer of one number has it made, and shows it.

    None where such a layer does not take cuDNN's way.
    """
    with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings(), _Handed() as handed:
        warnings.simplefilter("ignore")  # weights that do not lie in one stretch are put together, with a word
        x = torch.zeros(1, 1, 1, device=device)
        weights = [torch.zeros(4, 1, device=device)] * 2 + [torch.zeros(4, device=device)] * 2
        torch.lstm(x, (x, x), weights, True, 1, 0.5, True, False, False)
    return handed.state


class Following:
    """A recording that holds the state its layers drop by, begun anew where the generator was."""

    def __init__(self, inner: Recording, state: Tensor, generator: torch.Generator) -> None:
        self.inner, self.state, self.generator = inner, state, generator
        self._seed, self._offset = -1, 0

    def replay(self) -> None:
        # A seeding that goes forward in the same numbers is not noticed: what is dropped is as random, not the same.
        if self.generator.initial_seed() != self._seed or self.generator.get_offset() < self._offset:
            self._begin()
        self.inner.replay()
        self._seed, self._offset = self.generator.initial_seed(), self.generator.get_offset()

    def _begin(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.state.copy_(_made(self.generator, self.state.device))


def following(inner: Recording, device: torch.device, state: Tensor) -> Recording:
    return Following(inner, state, torch.cuda.default_generators[_index(device)])


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _made(generator: torch.Generator, device: torch.device) -> Tensor:
    """A state as PyTorch makes one before the first layers after a seeding."""
    seed = int(torch.empty((), dtype=torch.int64, device=device).random_(generator=generator))
    made: Tensor = torch._cudnn_init_dropout_state(0.5, True, seed, dtype=torch.uint8, device=device)
    return made
