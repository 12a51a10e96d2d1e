"""Finding a device by the name a person types, with changes to imagine one that does not exist."""

from __future__ import annotations

import re
import tomllib
from functools import cache, lru_cache
from pathlib import Path

from ridgeline.errors import HardwareError, nearest
from ridgeline.hardware.device import Device
from ridgeline.hardware.files import load_device
from ridgeline.resources import data_dir

_ALIASES = "aliases.toml"
_VENDOR_WORDS = re.compile(r"^(?:(?:nvidia|amd|intel|google|aws|habana|geforce|tesla|instinct|quadro)-)+")


def device(description: str | Device) -> Device:
    """The device called ``description``, with any changes: ``device("h200 hbm_bandwidth=2x sms=160")``."""
    return description if isinstance(description, Device) else _described(description)


def devices() -> tuple[str, ...]:
    """The canonical names of every device that has a file, sorted."""
    return tuple(sorted(path.stem for path in _folder().glob("*.toml") if path.name != _ALIASES))


@lru_cache(maxsize=256)
def _described(description: str) -> Device:
    first, *later = description.split(";")
    name, changes = _split(first)
    found = _loaded(_canonical(name))
    for group in (changes, *(_split(text, named=False)[1] for text in later)):
        found = found.override(**group)
    return found


def _split(text: str, *, named: bool = True) -> tuple[str, dict[str, str | float]]:
    """``'rtx 4090 l2=100 MB sms=2x'`` → the name, and the changes in the order written."""
    words, changes, key = list[str](), dict[str, str | float](), ""
    for token in re.sub(r"\s*=\s*", "=", text.replace(",", " ")).split():
        word, equals, value = token.partition("=")
        if equals:
            key = word
            if not key or not value or key in changes:
                raise HardwareError(f"cannot read {token!r} in {text!r}: write each change once, such as sms=160")
            changes[key] = value
        elif key:
            changes[key] = f"{changes[key]}{token}"
        else:
            words.append(token)
    if bool(words) != named:
        raise HardwareError(f"cannot read {text!r}: write a device name and then its changes, such as 'h200 sms=160'")
    return "-".join(words), changes


def _canonical(name: str) -> str:
    word = re.sub(r"[\s_-]+", "-", name.strip().lower()).strip("-")
    for candidate in (word, _VENDOR_WORDS.sub("", word)):
        plain = re.fullmatch(r"[a-z0-9][a-z0-9.+-]{0,99}", candidate) is not None and candidate != "aliases"
        if plain and (_folder() / f"{candidate}.toml").is_file():
            return candidate
        if candidate in _aliases():
            return _aliases()[candidate]
    meant = nearest(word, [*devices(), *_aliases()])
    raise HardwareError(f"unknown device {name!r}{meant} `ridgeline devices` lists them all")


@cache
def _loaded(name: str) -> Device:
    return load_device(_folder() / f"{name}.toml")


@cache
def _aliases() -> dict[str, str]:
    path = _folder() / _ALIASES
    entries = tomllib.loads(path.read_text(encoding="utf-8"))
    return {alias: target for target, words in entries.items() for alias in words}


def _folder() -> Path:
    return data_dir() / "devices"
