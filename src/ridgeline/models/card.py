"""The catalog: which networks exist, what can be asked of them, and the errors for what cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ridgeline.errors import ModelError, nearest
from ridgeline.graph import Graph

MODES = ("infer", "prefill", "decode", "train")
PRECISIONS = ("bf16", "fp16", "fp32", "tf32", "fp8")
SIZES = ("seq", "kv", "image")


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One network of the zoo: what it is, where its numbers come from, and what may be asked of it."""

    name: str
    title: str
    family: str
    num_params: int  # of the published or reference implementation
    source: str
    defaults: Mapping[str, int]  # sizes it takes (seq, kv, image) and what they are when not given
    options: Mapping[str, Any] = field(default_factory=dict)  # further keywords with their defaults
    modes: tuple[str, ...] = ("infer", "train")
    aliases: tuple[str, ...] = ()
    templated: bool = False  # whether its builder takes symbols for batch, seq and kv


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller asked for, checked and with defaults filled in."""

    card: ModelCard
    batch: int
    seq: int
    kv: int
    image: int
    mode: str
    precision: str
    options: Mapping[str, Any]

    def __getitem__(self, option: str) -> Any:
        return self.options[option]

    def at_most(self, size: str, limit: int, tensor: str) -> None:
        """Refuse a size that a fixed tensor of the network cannot serve."""
        asked = getattr(self, size)
        if asked > limit:
            raise ModelError(
                f"{self.card.name}: {size}={asked} is {asked - limit} more than {tensor} holds "
                f"({limit}); ask for {size} ≤ {limit}"
            )

    def multiple_of(self, size: str, step: int, why: str) -> None:
        """Refuse a size that does not divide as the network needs."""
        asked = getattr(self, size)
        if asked % step:
            raise ModelError(
                f"{self.card.name}: {size}={asked} is {asked % step} over a multiple of {step} ({why}); "
                f"the nearest legal ones are {asked - asked % step or step} and {asked - asked % step + step}"
            )


Build = Callable[[Request], Graph]
_CATALOG: dict[str, tuple[ModelCard, Build]] = {}
_ALIASES: dict[str, str] = {}


def register(card: ModelCard, build: Build) -> None:
    """Add a network; a name taken twice is an error."""
    for name in (card.name, *card.aliases):
        if name in _CATALOG or name in _ALIASES:
            raise ModelError(f"two networks are called {name!r}")
    _CATALOG[card.name] = (card, build)
    _ALIASES.update(dict.fromkeys(card.aliases, card.name))


def catalog() -> list[ModelCard]:
    return [card for card, _ in _CATALOG.values()]


def find(name: str) -> tuple[ModelCard, Build]:
    """The card and builder of ``name``; case and underscores are forgiven."""
    found = _CATALOG.get(name)
    if found is not None:
        return found
    key = name.strip().lower().replace("_", "-")
    key = _ALIASES.get(key, key)
    if key not in _CATALOG:
        raise ModelError(f"no network {name!r} in the zoo{nearest(key, [*_CATALOG, *_ALIASES])}")
    return _CATALOG[key]


def yielded(name: str, meta: Mapping[str, Any], mode: str) -> tuple[str, int] | None:
    """What one step of a network of the zoo yields: tokens, images or samples, and how many; None of others."""
    try:
        family = find(name)[0].family
    except ModelError:
        return None
    if "batch" not in meta:
        return None
    if family in {"llm", "moe", "state-space", "encoder"}:
        return "tokens", meta["batch"] * (1 if mode == "decode" else meta.get("seq", 1))
    images = family in {"vision", "detection", "segmentation", "diffusion", "multimodal"}
    return ("images" if images else "samples"), meta["batch"]


def check(
    card: ModelCard,
    *,
    batch: int,
    sizes: Mapping[str, int | None],
    mode: str,
    precision: str,
    optimizer: str,
    options: Mapping[str, Any],
) -> Request:
    """The request in full, or an error naming the option that cannot be."""
    _one_of(card, "mode", mode, card.modes)
    _one_of(card, "precision", precision, PRECISIONS)
    _one_of(card, "optimizer", optimizer, ("adamw", "adamw_fused", "sgd", "none"))
    if mode == "train" and precision == "fp8":
        raise ModelError(
            f"{card.name}: mode='train' has no fp8 recipe in the zoo; use precision='bf16', or capture your own model"
        )
    for option in options:
        if option not in card.options:
            raise ModelError(f"{card.name} has no option {option!r}{nearest(option, [*card.options, *card.defaults])}")
    filled = _sizes(card, batch, sizes, mode)
    chosen = {**card.options, **options} if options else card.options
    for option, value in options.items():
        default = card.options[option]
        if isinstance(default, bool) != isinstance(value, bool) or not isinstance(value, type(default)):
            raise ModelError(
                f"{card.name}: {option}={value!r} is a {type(value).__name__}, not a {type(default).__name__} "
                f"like its default {default!r}"
            )
        if isinstance(default, int) and not isinstance(default, bool) and value < 1:
            raise ModelError(f"{card.name}: {option}={value} is {1 - value} below the least legal value, 1")
    return Request(card, batch, filled["seq"], filled["kv"], filled["image"], mode, precision, chosen)


def _one_of(card: ModelCard, what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ModelError(f"{card.name}: no {what} {value!r}{nearest(str(value), known)} (it takes {', '.join(known)})")


def _sizes(card: ModelCard, batch: int, sizes: Mapping[str, int | None], mode: str) -> dict[str, int]:
    filled: dict[str, int] = {}
    for size in SIZES:
        asked = sizes[size]
        if asked is not None and size not in card.defaults:
            raise ModelError(f"{card.name} has no {size}{nearest(size, [*card.defaults, *card.options, 'batch'])}")
        filled[size] = card.defaults.get(size, 0) if asked is None else asked
    for size, value, least in (("batch", batch, 1), *((s, filled[s], 0 if s == "kv" else 1) for s in card.defaults)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            short = f", {least - value} too few" if isinstance(value, int) else ""
            raise ModelError(f"{card.name}: {size}={value!r} must be a whole number ≥ {least}{short}")
    if mode == "decode" and sizes["kv"] is None and sizes["seq"] is not None:
        filled["kv"] = filled["seq"]  # "decode at sequence 2048" means 2048 tokens are already there
    return filled
