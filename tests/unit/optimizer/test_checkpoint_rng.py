"""Checkpointed parts of a recording go back to where their forward stood in the device's random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint as home

from ridgeline.engine.capture.checkpoint_rng import MOST_PARTS, Rewound
from ridgeline.errors import NotGraphable


class Generator:
    """A seed and a place in its numbers, held in a state that generators can share, as CUDA's are."""

    def __init__(self, state: dict[str, int] | None = None) -> None:
        self.state = state or {"seed": 5, "offset": 40}

    def initial_seed(self) -> int:
        return self.state["seed"]

    def get_offset(self) -> int:
        return self.state["offset"]

    def manual_seed(self, seed: int) -> None:
        self.state.update(seed=seed, offset=0)

    def set_offset(self, offset: int) -> None:
        self.state["offset"] = offset

    def draw(self, num: int) -> None:
        self.state["offset"] += num

    def clone_state(self) -> Generator:
        return Generator(dict(self.state))

    def graphsafe_get_state(self) -> Generator:
        return Generator(self.state)

    def graphsafe_set_state(self, other: Generator) -> None:
        self.state = other.state


class Replays:
    num = 0

    def replay(self) -> None:
        self.num += 1


def _called(generator: Generator, rewound: Rewound, *draws: int) -> None:
    with rewound.counting():
        for num in draws:
            generator.draw(num)
            home.get_device_states()


def test_parts_go_back_to_where_their_forward_stood() -> None:
    generator = Generator()
    rewound, before = Rewound(generator), home.get_device_states
    _called(generator, rewound, 8, 4)
    _called(generator, rewound, 8, 4)  # wherever the generator stands, the places are the call's own
    assert rewound.places == [8, 12] and home.get_device_states is before
    rewound.begin()
    main = generator.state
    with rewound.recording():
        kept = [home.get_device_states() for _ in rewound.places]
    forward = rewound.followed(Replays(), "first")
    with rewound.recording():
        for number in (1, 0):
            with torch.random.fork_rng(devices=kept[number][0], enabled=True):
                home.set_device_states(*kept[number], device_type="cuda")
                assert generator.state is rewound.states[number].state
            assert generator.state is main
    backward = rewound.followed(Replays(), "last")
    generator.manual_seed(9)
    generator.draw(100)
    forward.replay()
    generator.draw(16)
    backward.replay()
    assert [state.state for state in rewound.states] == [{"seed": 9, "offset": 108}, {"seed": 9, "offset": 112}]
    assert generator.state == {"seed": 9, "offset": 116}


def test_parts_that_begin_elsewhere_at_every_call_are_refused() -> None:
    generator = Generator()
    rewound = Rewound(generator)
    _called(generator, rewound, 8, 4)
    with pytest.raises(NotGraphable, match="other numbers at every call"):
        _called(generator, rewound, 4, 4)


def test_parts_that_come_only_with_the_capture_are_refused() -> None:
    rewound = Rewound(Generator())
    with rewound.recording(), pytest.raises(NotGraphable, match="more checkpointed parts"):
        home.get_device_states()


def test_very_many_parts_are_refused() -> None:
    generator = Generator()
    with pytest.raises(NotGraphable, match="computed again in the backward"):
        _called(generator, Rewound(generator), *[4] * (MOST_PARTS + 1))


def test_without_such_parts_a_capture_is_what_it_was() -> None:
    generator: Any = Generator()
    rewound, recording = Rewound(generator), Replays()
    _called(generator, rewound)
    assert rewound.followed(recording, "first") is recording and not rewound.states
