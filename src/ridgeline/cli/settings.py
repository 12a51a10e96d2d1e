"""Settings written as key=value on the command line."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.errors import InputError

Setting = int | float | bool | str


def settings_of(words: Sequence[str]) -> dict[str, Setting]:
    """Whole numbers, numbers, true and false are read as such; anything else stays text."""
    found: dict[str, Setting] = {}
    for word in words:
        name, mark, value = word.partition("=")
        if not mark or not name.strip() or not value.strip():
            raise InputError(f"setting {word!r}: write it as name=value")
        found[name.strip().replace("-", "_")] = _value(value.strip())
    return found


def _value(text: str) -> Setting:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
