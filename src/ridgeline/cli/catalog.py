"""``ridgeline devices`` and ``ridgeline models``: what there is, and everything about one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ridgeline.hardware import Device, device, devices
from ridgeline.units import show_bytes, show_flops

if TYPE_CHECKING:
    from ridgeline.models import ModelCard


def show_devices(name: str | None, as_json: bool) -> None:
    """All devices in a table, or every number of one with its basis and source."""
    from ridgeline.cli import draw

    if as_json:
        found = [device(name)] if name else [device(each) for each in devices()]
        draw.print_json([_device_document(each) for each in found] if name is None else _device_document(found[0]))
    elif name:
        _show_device(device(name))
    else:
        _show_all_devices()


def _device_document(found: Device) -> dict[str, Any]:
    numbers = {
        key: {"value": value, "basis": str(found.provenance(key).basis), "source": found.provenance(key).source}
        for key, value in found.numbers().items()
    }
    return {
        "name": found.name,
        "title": found.title,
        "vendor": found.vendor,
        "arch": found.arch,
        "kind": found.kind,
        "release_year": found.release_year,
        "price_date": found.price_date,
        "parent": found.parent,
        "calibrated": _calibrated(found),
        "numbers": numbers,
    }


def _calibrated(found: Device) -> bool:
    from ridgeline.cost.calibration import calibration_of

    return bool(calibration_of(found).device)


def _show_all_devices() -> None:
    from ridgeline.cli import draw

    out = draw.console()
    wide = out.width >= 110
    made = draw.table(
        "",
        ("device", "left"),
        ("arch", "left"),
        ("memory", "right"),
        ("bandwidth", "right"),
        ("bf16", "right"),
        ("TDP", "right"),
        ("an hour", "right"),
        *((("year", "right"), ("calibrated", "left"), ("vendor", "left")) if wide else ()),
    )
    for name in devices():
        found = device(name)
        hourly = f"${found.price_usd_per_hour:.2f}" if found.price_usd_per_hour else "–"
        cells = [
            found.name,
            found.arch if wide else found.arch[:12],
            show_bytes(found.dram.capacity_bytes),
            f"{show_bytes(found.dram.bandwidth_bytes_per_s)}/s",
            f"{show_flops(found.peak_flops_per_s('tensor', 'bf16'))}/s",
            f"{found.tdp_w:.0f} W",
            hourly,
        ]
        made.add_row(
            *([*cells, str(found.release_year), "yes" if _calibrated(found) else "", found.vendor] if wide else cells)
        )
    out.print(made)
    out.print(
        f"{len(devices())} devices; `ridgeline devices NAME` shows every number of one, with its basis and source",
        style=draw.DIM,
    )


def _show_device(found: Device) -> None:
    from ridgeline.cli import draw

    out = draw.console()
    state = (
        "calibrated"
        if _calibrated(found)
        else "not calibrated: its datasheet and the behavior of its architecture family are used"
    )
    out.print(found.title if not found.is_imagined else f"{found.name} (imagined, from {found.parent})", style="bold")
    out.print(f"{found.vendor} · {found.arch} · {found.kind} · {found.release_year} · {state}", style=draw.DIM)
    sources: dict[str, int] = {}
    made = draw.table("", ("number", "left"), ("value", "right"), ("basis", "left"), ("source", "right"))
    for key, value in found.numbers().items():
        where = found.provenance(key)
        made.add_row(
            key,
            shown(key, value, found),
            draw.basis(where.basis),
            f"[{sources.setdefault(where.source, len(sources) + 1)}]",
        )
    out.print(made)
    for source, number in sources.items():
        out.print(f"[{number}] {source}", style=draw.DIM)


def shown(key: str, value: float, found: Device) -> str:
    """A number of a device in the unit its name says."""
    if key.startswith(("tensor.", "vector.")):
        return f"{show_flops(value)}/s"
    if key.endswith("bytes_per_s"):
        return f"{show_bytes(value)}/s"
    if key.endswith("_bytes"):
        return show_bytes(value)
    if key.endswith("_hz"):
        return f"{value / 1e6:,.0f} MHz"
    if key.endswith("_w"):
        return f"{value:g} W"
    if key.endswith("usd_per_hour"):
        return f"${value:.2f} ({found.price_date})"
    return f"{value:,.0f}"


def show_models(name: str | None, as_json: bool) -> None:
    """All networks in a table, or what can be asked of one."""
    from ridgeline.cli import draw
    from ridgeline.models import models
    from ridgeline.models.card import find

    cards = [find(name)[0]] if name else models()
    if as_json:
        documents = [
            {
                "name": card.name,
                "title": card.title,
                "family": card.family,
                "num_params": card.num_params,
                "source": card.source,
                "defaults": dict(card.defaults),
                "options": dict(card.options),
                "modes": list(card.modes),
                "aliases": list(card.aliases),
            }
            for card in cards
        ]
        draw.print_json(documents[0] if name else documents)
    elif name:
        _show_model(cards[0])
    else:
        _show_all_models(cards)


def show_count(value: float) -> str:
    """Parameters as people say them: 8.03 B."""
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}" if value < 999.5 * scale else f"{value / scale:,.0f} {unit}"
    return f"{value:g}"


def _show_all_models(cards: list[ModelCard]) -> None:
    from ridgeline.cli import draw

    out = draw.console()
    wide = out.width >= 110
    made = draw.table(
        "",
        ("model", "left"),
        ("family", "left"),
        ("parameters", "right"),
        ("sizes", "left"),
        *((("modes", "left"), ("title", "left")) if wide else ()),
    )
    for card in cards:
        sizes = " ".join(f"{key}={value}" for key, value in card.defaults.items()) or "–"
        made.add_row(
            card.name,
            card.family,
            show_count(card.num_params),
            sizes,
            *([" ".join(card.modes), card.title] if wide else []),
        )
    out.print(made)
    out.print(f"{len(cards)} networks; `ridgeline models NAME` shows what can be asked of one", style=draw.DIM)


def _show_model(card: ModelCard) -> None:
    from rich.table import Table

    from ridgeline.cli import draw

    out = draw.console()
    out.print(card.title, style="bold")
    grid = Table.grid(padding=(0, 2))
    options = " ".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in card.options.items()
    )
    facts = {
        "name": card.name,
        "also called": ", ".join(card.aliases),
        "family": card.family,
        "parameters": f"{card.num_params:,}",
        "sizes": " ".join(f"--{key} {value}" for key, value in card.defaults.items()),
        "modes": ", ".join(card.modes),
        "options": options,
        "source": card.source,
    }
    for label, value in facts.items():
        if value:
            grid.add_row(label, value)
    out.print(grid)
    out.print(f"\nridgeline predict {card.name} --on h200 --batch 1", style=draw.DIM)
