"""A prediction in the terminal: summary, breakdown, longest rows, notes; readable at 80 columns and better at 140."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ridgeline.basis import Basis, worst
from ridgeline.cli import draw
from ridgeline.cli.rates import rate_of
from ridgeline.cost.analyses.utilization import utilization
from ridgeline.cost.prediction import Prediction, Row
from ridgeline.units import show_bytes, show_flops, show_joules, show_seconds

WIDE = 118
"""Columns from which the summary stands in two halves and the tables have their wide form."""
ROOMY = 134
"""Columns from which the longest rows name their kernels too."""


def show(predictions: Sequence[Prediction], by: str, top: int) -> None:
    """Print one prediction in full, or several as summaries and a comparison."""
    out = draw.console()
    for prediction in predictions:
        out.print(summary(prediction, out.width))
        if len(predictions) == 1:
            _print_tables(out, prediction, by, top)
        for note in prediction.notes:
            style = "red" if note.startswith("does not fit") else draw.DIM
            grid = Table.grid(padding=(0, 1))
            grid.add_row(Text("•", style=style), Text(note, style=style))
            out.print(grid)
    if len(predictions) > 1:
        out.print(comparison(predictions, out.width))


def _print_tables(out: Console, prediction: Prediction, by: str, top: int) -> None:
    if not top:
        return
    out.print()
    out.print(breakdown(prediction, by, top, out.width))
    out.print()
    out.print(longest(prediction, top, out.width))


def summary(prediction: Prediction, width: int) -> RenderableType:
    """The panel that answers the question."""
    low, high = (show_seconds(end_s) for end_s in prediction.interval_s)
    lines: list[draw.Line] = [
        (
            "wall time",
            Text.assemble((show_seconds(prediction.expected_s), "bold"), (f"  90 % interval {low} … {high}", draw.DIM)),
        ),
        (
            "device busy",
            _with_bar(show_seconds(prediction.busy_s), prediction.busy_s, prediction.expected_s, "of the wall time"),
        ),
        ("floor", _floor_text(prediction)),
        ("host", _host_text(prediction)),
        (
            "work",
            f"{show_flops(prediction.flops)}, {show_bytes(sum(row.bytes for row in prediction.rows()))} moved, "
            f"{prediction.num_kernels:,} kernels",
        ),
        ("utilization", _utilization_text(prediction)),
    ]
    rate = rate_of(prediction)
    if rate:
        lines.append(("rate", Text.assemble((f"{_count(rate.per_s)} {rate.unit}/s", "bold"))))
    time, needs = draw.grid(lines), draw.grid(_need_lines(prediction))
    body: RenderableType
    if width >= WIDE:
        body = Table.grid(padding=(0, 3), expand=True)
        body.add_column(ratio=1)
        body.add_column(ratio=1)
        body.add_row(time, needs)
    else:
        body = Group(time, Text(), needs)
    graph, device = prediction.graph, prediction.device
    sizes = [
        f"{key} {graph.meta[key]}"
        for key in (("batch", "kv") if graph.mode == "decode" else ("batch", "seq", "image"))
        if graph.meta.get(key)
    ]
    what = [graph.mode, *filter(None, [str(graph.meta.get("precision", ""))]), *sizes, prediction.execution]
    called = device.title if width >= WIDE and not device.is_imagined else device.name
    return Panel(
        body,
        title=Text.assemble(
            (f" {graph.name} ", "bold"), ("on ", draw.DIM), (called, "bold"), (f" · {' · '.join(what)} ", draw.DIM)
        ),
        title_align="left",
        box=box.ROUNDED,
        border_style="cyan",
        padding=(0, 1),
    )


def _with_bar(shown: str, part: float, whole: float, of: str, style: str = "cyan") -> Text:
    frac = part / whole if whole else 0.0
    return Text.assemble(f"{shown}  ", draw.bar(frac, 12, style), f"  {draw.percent(frac)} ", (of, draw.DIM))


def _floor_text(p: Prediction) -> Text:
    return Text.assemble(
        f"{show_seconds(p.floor_s)}  ",
        ("the wall time is ", draw.DIM),
        draw.ratio(p.expected_s, p.floor_s),
        (" the speed of light", draw.DIM),
    )


def _host_text(p: Prediction) -> Text:
    if p.expected_s <= 0:
        return Text("–")
    idle = p.idle_s / p.expected_s
    style = "red" if idle > 0.3 else "yellow" if idle > 0.1 else "green"
    return Text.assemble(
        f"{show_seconds(p.host_s)} of calls  ",
        ("device idle ", draw.DIM),
        (f"{show_seconds(p.idle_s)}, {draw.percent(idle)}", style),
    )


def _utilization_text(p: Prediction) -> Text:
    used = utilization(p)
    return Text.assemble(
        (f"MFU {draw.percent(used.mfu_frac)}", "bold"), (f"  memory bandwidth {draw.percent(used.dram_frac)}", draw.DIM)
    )


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _need_lines(p: Prediction) -> list[draw.Line]:
    frac = p.peak_bytes / p.capacity_bytes
    if p.missing_bytes:
        verdict, style = f"does not fit: misses {show_bytes(p.missing_bytes)}", "bold red"
    # Share of the memory above which a step that fits is called tight: the driver and fragments need the rest
    elif frac > 0.92:
        verdict, style = "tight", "yellow"
    else:
        verdict, style = "fits", "green"
    kinds = sorted(p.memory.by_kind.items(), key=lambda item: -item[1])
    kinds_text = " · ".join(f"{kind} {show_bytes(num)}" for kind, num in kinds)
    slow = (
        f"  the limit stretches compute-bound kernels by {draw.percent(p.throttle - 1)}" if p.throttle > 1.001 else ""
    )
    power_text = Text.assemble(f"{p.power_w:.0f} W on average ", (f"of {p.device.tdp_w:.0f} W{slow}", draw.DIM))
    basis_meaning = {
        Basis.MEASURED: "read from a measurement",
        Basis.FITTED: "coefficients fitted on measurements of this device",
        Basis.DATASHEET: "part of it rests on the datasheet alone",
        Basis.ASSUMED: "part of it rests on assumed numbers",
    }[p.basis]
    return [
        (
            "peak memory",
            Text.assemble(
                (show_bytes(p.peak_bytes), "bold"),
                f" of {show_bytes(p.capacity_bytes)}  ",
                draw.bar(frac, 10, style.split()[-1]),
                "  ",
                (verdict, style),
            ),
        ),
        ("", Text(kinds_text, style=draw.DIM)),
        ("energy", Text.assemble((show_joules(p.energy_j), "bold"), (" a step", draw.DIM))),
        ("power", power_text),
        ("money", _money_text(p)),
        ("basis", Text.assemble(draw.basis(p.basis), (f"  {basis_meaning}", draw.DIM))),
    ]


def _money_text(p: Prediction) -> Text:
    rate, hourly = rate_of(p), p.device.price_usd_per_hour
    if not hourly:
        return Text("no price known", style=draw.DIM)
    per_million = f", {draw.money(rate.usd_per_million)} per million {rate.unit}" if rate else ""
    return Text.assemble(
        (draw.money(p.usd), "bold"), (f" a step{per_million}, at {draw.money(hourly)} an hour", draw.DIM)
    )


@dataclass(slots=True)
class Total:
    """Rows of one group, added up."""

    name: str
    rows: list[Row]

    def sum(self, column: str) -> float:
        return float(sum(row[column] for row in self.rows))

    @property
    def expected_s(self) -> float:
        return self.sum("expected_s")

    @property
    def basis(self) -> Basis:
        return worst(row.basis for row in self.rows)

    def bound(self) -> tuple[str, float]:
        """What limits most of the group's time, and how much of it."""
        shares: dict[str, float] = {}
        for row in self.rows:
            shares[row.bound] = shares.get(row.bound, 0.0) + row.expected_s
        name = max(shares, key=lambda key: shares[key])
        total = sum(shares.values())
        return name, shares[name] / total if total else 1.0


def totals(rows: Iterable[Row], key: str) -> list[Total]:
    """Rows grouped by a column, the longest group first."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(str(row[key]), []).append(row)
    return sorted((Total(name, found) for name, found in groups.items()), key=lambda total: -total.expected_s)


def breakdown(prediction: Prediction, by: str, top: int, width: int) -> Table:
    """Where the busy time goes, by op, module, phase, bound, kernel or basis."""
    wide = width >= WIDE
    made = draw.table(
        f"By {by}",
        (by, "left"),
        ("time", "right"),
        ("share of busy", "left"),
        ("× floor", "right"),
        ("bound", "left"),
        *((("FLOPs", "right"), ("bytes", "right"), ("energy", "right")) if wide else ()),
        ("kernels", "right"),
        ("basis", "left"),
        tight=not wide,
    )
    found = [total for total in totals(prediction.rows(), by) if total.expected_s > 0]
    cut = draw.shortened if by == "module" else draw.clipped
    cells = [_group_cells(total, prediction.busy_s, wide) for total in found[:top]]
    draw.add_rows(made, [*cells, *_rest_cells(found[top:], prediction.busy_s, wide)], width, cut)
    return made


def _group_cells(total: Total, busy_s: float, wide: bool) -> list[Text | str]:
    share = total.expected_s / busy_s if busy_s else 0.0
    name, part = total.bound()
    shown = Text.assemble(draw.bound(name), ("" if part > 0.995 else f" {part:.0%}", draw.DIM))
    wide_cells = (
        [show_flops(total.sum("flops")), show_bytes(total.sum("bytes")), show_joules(total.sum("energy_j"))]
        if wide
        else []
    )
    return [
        total.name or "(top level)",
        show_seconds(total.expected_s),
        _share(share, 14 if wide else 8),
        draw.ratio(total.expected_s, total.sum("floor_s")),
        shown,
        *wide_cells,
        f"{total.sum('num_kernels'):,.0f}",
        draw.basis(total.basis),
    ]


def _share(frac: float, cells: int) -> Text:
    return Text.assemble(f"{draw.percent(frac):>5} ", draw.bar(frac, cells))


def _rest_cells(rest: Sequence[Total], busy_s: float, wide: bool) -> list[list[Text | str]]:
    """One line for the groups that are not shown, if any."""
    if not rest:
        return []
    rest_s = sum(total.expected_s for total in rest)
    share = _share(rest_s / busy_s if busy_s else 0.0, 14 if wide else 8)
    return [[Text(f"{len(rest)} more", style=draw.DIM), show_seconds(rest_s), share]]


def longest(prediction: Prediction, top: int, width: int) -> Table:
    """The rows that take longest, each over all its runs."""
    wide = width >= WIDE
    made = draw.table(
        "Longest",
        ("module", "left"),
        ("op", "left"),
        ("runs", "right"),
        ("time", "right"),
        ("share", "right"),
        ("× floor", "right"),
        ("bound", "left"),
        ("achieved", "right"),
        *((("90 % interval", "right"), ("basis", "left")) if wide else ()),
        *((("kernel", "left"),) if width >= ROOMY else ()),
        tight=not wide,
    )
    rows = sorted((row for row in prediction.rows() if row.expected_s > 0), key=lambda row: -row.expected_s)
    draw.add_rows(made, [_row_cells(row, prediction.busy_s, width) for row in rows[:top]], width, draw.shortened)
    return made


def _row_cells(row: Row, busy_s: float, width: int) -> list[Text | str]:
    wide = width >= WIDE
    phase = {"forward": "", "backward": " bwd", "optimizer": " opt"}.get(row.phase, f" {row.phase}")
    cells: list[Text | str] = [
        row.module or row.name,
        f"{draw.clipped(row.op, (22 if wide else 13) - len(phase))}{phase}",
        f"{row.times:,}",
        show_seconds(row.expected_s),
        draw.percent(row.expected_s / busy_s if busy_s else 0.0),
        draw.ratio(row.expected_s, row.floor_s),
        draw.bound(row.bound),
        draw.speed(row.flops, row.bytes, row.expected_s, row.bound),
    ]
    if wide:
        cells += [f"{show_seconds(row.low_s)} … {show_seconds(row.high_s)}", draw.basis(row.basis)]
    if width >= ROOMY:
        cells.append(draw.clipped(row.kernel, 14))
    return cells


def comparison(predictions: Sequence[Prediction], width: int) -> Table:
    """Devices side by side; the ratio is to the first one's wall time."""
    wide = width >= WIDE
    made = draw.table(
        "Compared",
        ("device", "left"),
        ("wall time", "right"),
        ("speed", "right"),
        ("× floor", "right"),
        ("memory", "left"),
        ("energy", "right"),
        ("a step", "right"),
        *(
            (("90 % interval", "right"), ("busy", "right"), ("MFU", "right"), ("power", "right"), ("basis", "left"))
            if wide
            else ()
        ),
    )
    made.columns[0].no_wrap = False
    for p in predictions:
        first = predictions[0]
        fits = (
            Text(f"{show_bytes(p.peak_bytes)} fits", style="green")
            if not p.missing_bytes
            else Text(f"−{show_bytes(p.missing_bytes)}", style="red")
        )
        cells: list[Text | str] = [
            Text(p.device.name),
            Text(show_seconds(p.expected_s), style="bold"),
            f"{first.expected_s / p.expected_s:.2f}×" if p.expected_s else "–",
            draw.ratio(p.expected_s, p.floor_s),
            fits,
            show_joules(p.energy_j),
            draw.money(p.usd),
        ]
        if wide:
            low, high = (show_seconds(end_s) for end_s in p.interval_s)
            cells += [
                f"{low} … {high}",
                show_seconds(p.busy_s),
                draw.percent(utilization(p).mfu_frac),
                f"{p.power_w:.0f} W",
                draw.basis(p.basis),
            ]
        made.add_row(*cells)
    return made
