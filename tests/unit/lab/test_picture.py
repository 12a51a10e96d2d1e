"""The README's picture shows what the command prints."""

from __future__ import annotations

from lab.picture import FILE, drawn, numbers


def test_the_picture_has_the_numbers_that_the_command_prints() -> None:
    assert numbers(drawn()) == numbers(FILE.read_text(encoding="utf-8")), "run python -m lab.picture"
