"""Parameter counts of the zoo against the libraries the networks come from: equal, not close."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from zoo_reference import REFERENCES

from ridgeline.models import build, models

CARDS = {card.name: card for card in models()}


@pytest.mark.parametrize("name", REFERENCES)
def test_parameters_equal_those_of_the_reference_implementation(name: str) -> None:
    expected = sum(p.numel() for p in REFERENCES[name]().parameters())
    assert build(name).num_params == expected == CARDS[name].num_params
