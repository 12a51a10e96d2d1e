"""Numbers that checkpointed parts draw twice, in a recording: in the forward, and in the backward the same once more.

PyTorch keeps the generator's state before such a part and goes back to it. While work is recorded no state can be read,
and kernels take their place in the numbers from memory that every replay fills: a place within the recording, added to
where the generator stood before it. So where a part begins within the numbers of a call is noted while the call runs
as ever; each part that is computed again has a generator of its own, which stands there before the backward is
replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint

from ridgeline.errors import NotGraphable

if TYPE_CHECKING:
    from ridgeline.engine.capture.cuda_graph import Recording

_CHECKPOINT: Any = torch.utils.checkpoint
MOST_PARTS = 256
"""Parts that are computed again: each takes two small kernels a step to be told where it stands."""


class Rewound:
    """Where checkpointed parts begin in the numbers of a call, and the generators that they draw from again."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator
        self.places: list[int] = []
        self.states: list[Any] = []
        self._counted = False
        self._num_asked = self._seed = self._offset = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """A call and its backward as they are without recording, in which parts say where they begin."""
        began, found, kept = self.generator.get_offset(), [], _CHECKPOINT.get_device_states

        def noted(*args: Any) -> Any:
            found.append(self.generator.get_offset() - began)
            return kept(*args)

        with _replaced(_CHECKPOINT, "get_device_states", noted):
            yield
        if self._counted and found != self.places:
            raise NotGraphable("checkpointed parts draw other numbers at every call")
        if len(found) > MOST_PARTS:
            raise NotGraphable(f"more than {MOST_PARTS} parts that draw numbers are computed again in the backward")
        self.places, self._counted = found, True

    def begin(self) -> None:
        """Before a forward and its backward are recorded."""
        self.states, self._num_asked = [], 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Parts are numbered instead of keeping a state, and go back to their generator instead of to a state."""
        fork = torch.random.fork_rng

        @contextmanager
        def forked(*args: Any, **kwargs: Any) -> Iterator[None]:
            stood = self.generator.graphsafe_get_state()
            try:
                with fork(*args, **kwargs):
                    yield
            finally:
                self.generator.graphsafe_set_state(stood)

        with (
            _replaced(_CHECKPOINT, "get_device_states", self._numbered),
            _replaced(_CHECKPOINT, "set_device_states", self._go_back),
            _replaced(torch.random, "fork_rng", forked),
        ):
            yield

    def _numbered(self, *args: Any) -> tuple[list[int], list[Any]]:
        number, self._num_asked = self._num_asked, self._num_asked + 1
        if number >= len(self.places):
            raise NotGraphable("more checkpointed parts are recorded than there were in the calls before")
        return [], [number]

    def _go_back(self, devices: Any, states: list[Any], **ignored: Any) -> None:
        self.generator.graphsafe_set_state(self.states[states[0]].graphsafe_get_state())

    def note(self) -> None:
        """Where the generator stands before a forward."""
        self._seed, self._offset = self.generator.initial_seed(), self.generator.get_offset()

    def rewind(self) -> None:
        """Every part's generator as the part's own forward found it."""
        for state, place in zip(self.states, self.places, strict=True):
            state.manual_seed(self._seed)
            state.set_offset(self._offset + place)

    def followed(self, recording: Recording, part: str) -> Recording:
        """A recorded forward, or its backward, that knows where numbers stood before the forward.

        Between the two the generators of the backward are made: while it is recorded they cannot be.
        """
        if not self.places:
            return recording
        if part == "first":
            self.states = [self.generator.clone_state() for _ in self.places]
        return _Ahead(self.note if part == "first" else self.rewind, recording)


class _Ahead:
    """A recording with something done before each replay."""

    def __init__(self, before: Callable[[], None], inner: Recording) -> None:
        self.before, self.inner = before, inner

    def replay(self) -> None:
        self.before()
        self.inner.replay()


@contextmanager
def _replaced(home: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(home, name)
    setattr(home, name, value)
    try:
        yield
    finally:
        setattr(home, name, kept)
