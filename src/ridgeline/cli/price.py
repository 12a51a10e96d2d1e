"""``ridgeline price``: what a chip costs to make, to buy and to run for an hour, and what it emits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from ridgeline.cli.draw import DIM, console, print_json, table
from ridgeline.cli.keep import keep
from ridgeline.errors import InputError, nearest
from ridgeline.hardware import device as device_named
from ridgeline.study.price import Bill, Figure, assumption_names, die_of, drawn, figures, matters

UNITS = {"area_mm2": "mm²", "yield_frac": "", "materials_usd": "$", "unit_usd": "$", "usd_per_hour": "$/h",
         "embodied_kg": "kg CO₂e", "g_per_hour": "g CO₂e/h"}  # fmt: skip
NAMES = {"area_mm2": "silicon", "yield_frac": "yield", "materials_usd": "bill of materials", "unit_usd": "price",
         "usd_per_hour": "an hour of use", "embodied_kg": "embodied carbon",
         "g_per_hour": "carbon of an hour"}  # fmt: skip


def price_and_show(description: str, assume: Mapping[str, Any], as_: str, top: int, json: bool) -> None:
    """Totals with intervals, their parts, and the assumptions that matter most."""
    for name, value in assume.items():
        if name not in assumption_names():
            raise InputError(f"no assumption {name!r}{nearest(name, assumption_names())}")
        if isinstance(value, (str, bool)):
            raise InputError(f"--assume {name}={value}: give a number")
    device = device_named(description)
    bill, draws = Bill(device, None, assume, as_), drawn(device, assume, as_)
    totals = figures(bill.totals(), draws.totals())
    parts = {
        "silicon by part, mm²": {name: Figure(float(v), float(v), float(v)) for name, v in bill.parts_mm2().items()},
        "bill of materials, $": figures(bill.materials_usd(), draws.materials_usd()),
        "an hour of use, $": figures(bill.hour_usd(), draws.hour_usd()),
        "embodied carbon, kg": figures(bill.embodied_kg(), draws.embodied_kg()),
        "carbon of an hour, g": figures(bill.grams_an_hour(), draws.grams_an_hour()),
    }
    moved = matters(device, "usd_per_hour", assume, as_)[:top]
    die = die_of(device)
    made = {
        "device": device.name, "as": as_, "die": {"name": die.name, "node": die.node, "dies": die.dies,
                                                  "published_mm2": die.published_mm2, "source": die.source},
        **{name: figure.value for name, figure in totals.items()},
        "intervals": {name: [figure.low, figure.high] for name, figure in totals.items()},
        "parts": {title: {name: [f.value, f.low, f.high] for name, f in rows.items()}
                  for title, rows in parts.items()},
        "matters": [{"name": a.name, "value": a.value, "low": a.low, "high": a.high, "basis": a.basis, "date": a.date,
                     "source": a.source, "usd_per_hour": [low, high]} for a, low, high in moved],
    }  # fmt: skip
    keep("price", device.name, lambda: made, device=device.name, settings={"as": as_, **assume}, quiet=json)
    if json:
        print_json(made)
        return
    out = console()
    out.print(Text(f"{device.name}, priced as {as_}", style="bold"))
    summary = table("", ("", "left"), ("", "right"), ("90 % interval", "right"))
    for name, figure in totals.items():
        summary.add_row(NAMES[name], _shown(figure.value, UNITS[name]),
                        f"{_shown(figure.low, '')} … {_shown(figure.high, '')}")  # fmt: skip
    out.print(summary)
    for title, rows in parts.items():
        detail = table(title, ("", "left"), ("", "right"), ("90 % interval", "right"))
        for name, figure in rows.items():
            ends = f"{_shown(figure.low, '')} … {_shown(figure.high, '')}" if figure.low < figure.high else ""
            detail.add_row(name, _shown(figure.value, ""), ends)
        out.print(detail)
    _matters(moved)
    known = f"die {die.name}, {die.node}: {die.source}"
    out.print(Text(f"{known}; every number with its source: `ridgeline price … --json` and data/costs", style=DIM))


def _matters(moved: Sequence[Any]) -> None:
    made = table("What matters for an hour ($ at the low and high end)", ("assumption", "left"), ("value", "right"),
                 ("$/h", "right"), ("date", "left"), ("source", "left"))  # fmt: skip
    made.columns[-1].no_wrap = False
    for assumption, low, high in moved:
        made.add_row(assumption.name, f"{assumption.value:g} ({assumption.low:g} … {assumption.high:g})",
                     f"{low:.2f} … {high:.2f}", assumption.date, assumption.source)  # fmt: skip
    console().print(made)


def _shown(value: float, unit: str) -> str:
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{text} {unit}".strip()
