"""``ridgeline serve``: a deployment under load, or the search for one, as tables, JSON, a report and a timeline."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from ridgeline.api import serve
from ridgeline.cli import draw
from ridgeline.cli.keep import keep
from ridgeline.errors import InputError
from ridgeline.sim.serving.compose import Wanted
from ridgeline.sim.serving.metrics import Metrics, Slo
from ridgeline.sim.serving.result import Serving
from ridgeline.sim.serving.search import Candidate, Need, Searched, search
from ridgeline.sim.serving.simulate import Served
from ridgeline.sim.serving.workload import Workload, closed, opened, recorded, static
from ridgeline.units import show_seconds


@dataclass(frozen=True, slots=True)
class Load:
    """What arrives, as the command line says it."""

    concurrency: int | None
    rate: float | None
    batch: int | None
    trace_file: Path | None
    isl: int
    osl: int
    requests: int | None
    burst: float
    ratio: float
    seed: int
    users: int | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """Where results go."""

    json: bool
    html: Path | None
    trace: Path | None
    sweep: bool


def workload_of(load: Load) -> Workload:
    """Exactly one kind of load; without any, 32 requests in flight."""
    given = [name for name in ("concurrency", "rate", "batch", "trace_file") if getattr(load, name) is not None]
    if len(given) > 1:
        raise InputError(f"--{' and --'.join(n.replace('_', '-') for n in given)}: give one kind of load")
    if load.trace_file is not None:
        return recorded(load.trace_file)
    if load.batch is not None:
        return static(load.batch, load.isl, load.osl)
    if load.rate is not None:
        return opened(load.rate, load.isl, load.osl, num=load.requests or 2000, burst=load.burst, ratio=load.ratio,
                      seed=load.seed)  # fmt: skip
    return closed(load.concurrency or 32, load.isl, load.osl, num=load.requests or 0, ratio=load.ratio, seed=load.seed)


def serve_and_show(model: str, on: str, load: Load, slo: Slo, wanted: Wanted, output: Output) -> None:
    """Simulate, print, and write the files that were asked for."""
    work = workload_of(load)
    spans = 200_000 if output.trace else 0  # max spans
    made = serve(model, on, work, slo, spans=spans, **asdict(wanted))
    served, found = made.served, made.metrics
    points = _sweep(model, on, load, slo, wanted, made) if output.sweep or output.html else ()
    if output.json:
        draw.print_json(document(made, points))
    else:
        show(served, found, slo)
        if output.sweep:
            _show_points(points, "Throughput against latency")
    keep("serve", model, lambda: document(made, points), device=on, quiet=output.json,
         settings={"workload": work.title, **{k: v for k, v in asdict(wanted).items() if v}})  # fmt: skip
    if output.html:
        from ridgeline.web.serving import write_served

        path = write_served(title_of(served), served, found, points, output.html)
        print(f"report: {path}", file=sys.stderr)
    if output.trace:
        from ridgeline.trace import write_chrome

        timeline = made.trace()
        print(f"trace: {write_chrome(timeline, output.trace)}, open it at https://ui.perfetto.dev", file=sys.stderr)
        for note in timeline.notes:
            print(f"trace: {note}", file=sys.stderr)


def search_and_show(model: str, on: str, load: Load, slo: Slo, wanted: Wanted, output: Output) -> None:
    """The cheapest deployment that keeps the SLO, and the frontier."""
    if load.rate and load.users:
        raise InputError("--rate and --users: give one kind of load")
    need = Need(load.isl, load.osl, slo, load.rate or 0.0, load.burst, load.ratio, load.users or 0)
    found = search(model, on, need, wanted, None if output.json else _progress())
    if not output.json and sys.stderr.isatty():
        print(file=sys.stderr)
    keep("serve search", model, lambda: searched_document(found), device=on, quiet=output.json,
         settings={k: v for k, v in asdict(need).items() if v})  # fmt: skip
    if output.json:
        draw.print_json(searched_document(found))
        return
    out = draw.console()
    if found.best is not None:
        _show_points((found.best,), "Cheapest that keeps the SLO" if slo.asks else "Cheapest")
        if need.users:
            out.print(f"{need.users:,} users need {found.best.num_devices} of the devices of {on}")
        if found.best.command:
            out.print(Text("one replica: ", style=draw.DIM) + Text(found.best.command), soft_wrap=True)
    else:
        out.print("Nothing that was tried keeps the SLO: loosen it, take more devices, or quantize.", style="yellow")
    out.print()
    _show_points(found.frontier, "Nothing beats these in both tokens/s/user and tokens/s/device")
    refused = [c for c in found.candidates if c.found is None]
    for candidate in refused[:6]:
        out.print(Text(f"left out: {candidate.title} {candidate.precision}: {candidate.why}", style=draw.DIM))
    if len(refused) > 6:
        out.print(Text(f"… and {len(refused) - 6} more; --json lists them", style=draw.DIM))
    if output.html:
        from ridgeline.web.serving import write_search

        print(f"report: {write_search(f'{model} on {on}', found, output.html)}", file=sys.stderr)


def _progress() -> Any:
    def tell(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {total} layouts", end="", file=sys.stderr, flush=True)

    return tell


def _sweep(model: str, on: str, load: Load, slo: Slo, wanted: Wanted, asked: Serving) -> tuple[Candidate, ...]:
    """The same deployment at other loads: closed loops of growing concurrency, and the one that was asked for."""
    from ridgeline.sim.serving.search import CONCURRENCIES, KEPT_FRAC

    points: list[Candidate] = []
    for concurrency in sorted({*CONCURRENCIES[:9], asked.served.workload.concurrency} - {0}):
        work = closed(concurrency, load.isl, load.osl, ratio=load.ratio, seed=load.seed)
        is_asked = concurrency == asked.served.workload.concurrency
        made = asked if is_asked else serve(model, on, work, slo, **asdict(wanted))
        found, deployment = made.metrics, made.served.deployment
        name, devices = deployment.precision.name, deployment.num_devices
        points.append(Candidate("this", name, devices, concurrency, found, found.good_frac >= KEPT_FRAC))
    return tuple(points)


def show(served: Served, found: Metrics, slo: Slo) -> None:
    """The deployment in a line, latencies, then everything else."""
    out = draw.console()
    out.print(Text(title_of(served), style="bold"))
    out.print(Text(f"{served.workload.title}; {served.deployment.engine.title}", style=draw.DIM))
    made = draw.table("", ("latency", "left"), ("mean", "right"), ("90 % interval", "right"),
                      ("p50", "right"), ("p90", "right"), ("p99", "right"))  # fmt: skip
    for name, spread in (
        ("first token (TTFT)", found.ttft_s), ("per output token (TPOT)", found.tpot_s), ("end to end", found.e2e_s)
    ):  # fmt: skip
        interval = f"{show_seconds(spread.low)} – {show_seconds(spread.high)}"
        made.add_row(
            name, *[show_seconds(spread.mean), interval, *(show_seconds(spread.percentiles[p]) for p in (50, 90, 99))]
        )
    out.print(made)
    out.print()
    figures = draw.table("", ("", "left"), ("", "right"), ("", "left"), ("", "right"))
    figures.show_header = False
    rows = [
        ("output tokens/s", f"{found.output_tokens_per_s:,.0f}"),
        ("tokens/s/device", f"{found.output_tokens_per_s_per_device:,.0f}"),
        ("requests/s", f"{found.requests_per_s:,.2f}"),
        ("tokens/s/user", f"{found.tokens_per_s_per_user:,.1f}"),
        ("cache, peak", draw.percent(found.cache_peak_frac)),
        ("cache, mean", draw.percent(found.cache_mean_frac)),
        ("mean batch", f"{found.mean_running:,.1f}"),
        ("preemptions", f"{found.preemptions:,}"),
        ("energy a token", f"{found.energy_j_per_token:,.2f} J"),
        ("energy in all", f"{found.energy_j / 3.6e6:,.2f} kWh"),
        ("$/M output tokens", draw.money(found.usd_per_million_output)),
        ("with prompts", draw.money(found.usd_per_million_tokens)),
        ("requests", f"{found.num_requests:,}"),
        ("time simulated", show_seconds(found.wall_s)),
    ]
    if slo.asks:
        rows += [("keep the SLO", draw.percent(found.good_frac)), ("goodput", f"{found.goodput_per_s:,.2f}/s")]
    if found.reused_frac:
        rows += [("prompt tokens reused", draw.percent(found.reused_frac))]
    pairs = rows
    for left, right in zip(pairs[::2], [*pairs[1::2], *([("", "")] if len(pairs) % 2 else [])], strict=True):
        figures.add_row(*left, *right)
    out.print(figures)
    if found.num_skipped:
        out.print(Text(f"latencies without the first {found.num_skipped} requests, which start all at once", draw.DIM))
    if found.waiting_at_end:
        share = f"{found.waiting_at_end:,} of {found.num_requests:,} requests"
        out.print(Text(f"overloaded: {share} wait when the last arrives, and the wait grows with the run: "
                       "lower the rate, or add devices", style="red"))  # fmt: skip
    basis = Text("basis: ") + draw.basis(found.basis)
    out.print(basis + Text(f"; intervals hold 90 % of published runs of this engine (±{math.expm1(found.width):.0%})"))


def title_of(served: Served) -> str:
    """The deployment in one line."""
    d = served.deployment
    pools = [f"{d.prefill.replicas} prefill × {_layout(d.prefill.layout)}"] if d.prefill else []
    kind = "decode × " if d.prefill else "× "
    pools.append(f"{d.pool.replicas} {kind}{_layout(d.pool.layout)}")
    spec = f", drafts of {d.speculation.draft}" if d.speculation else ""
    return (
        f"{d.anatomy.name} in {d.precision.name} on {d.num_devices} × {d.device.name}: {' + '.join(pools)}, "
        f"cache in {d.precision.kv}{spec}"
    )


def _layout(layout: Any) -> str:
    parts = [f"tp {layout.tp}"]
    for name, word in (("attention_dp", "dp attention"), ("ep", "ep"), ("pp", "pp")):
        if getattr(layout, name) > 1:
            parts.append(f"{word} {getattr(layout, name)}")
    return " ".join(parts)


def _show_points(points: tuple[Candidate, ...], title: str) -> None:
    out = draw.console()
    made = draw.table(title, ("deployment", "left"), ("devices", "right"), ("load", "right"), ("TTFT", "right"),
                      ("TPOT", "right"), ("/user", "right"), ("/device", "right"), ("$/M", "right"), ("SLO", "right"),
                      tight=True)  # fmt: skip
    for point in points:
        made.add_row(*_point_cells(point))
    out.print(made)
    out.print(Text("/user and /device are output tokens a second; $/M is for a million of them", style=draw.DIM))


def _point_cells(point: Candidate) -> list[Text | str]:
    found = point.found
    if found is None:
        return [f"{point.title} {point.precision}", str(point.num_devices), "", "", "", "", "", "", "–"]
    kept = Text(f"{found.good_frac:.0%}", style="green" if point.keeps else "red")
    return [
        f"{point.title} {point.precision}", str(point.num_devices), str(point.concurrency or ""),
        show_seconds(found.ttft_s.mean), show_seconds(found.tpot_s.mean), f"{found.tokens_per_s_per_user:,.1f}",
        f"{found.output_tokens_per_s_per_device:,.0f}", draw.money(found.usd_per_million_output), kept,
    ]  # fmt: skip


def document(made: Serving, points: tuple[Candidate, ...] = ()) -> dict[str, Any]:
    """What ``--json`` prints."""
    return made.to_dict() | ({"sweep": [candidate_document(point) for point in points]} if points else {})


def candidate_document(point: Candidate) -> dict[str, Any]:
    found = point.found.to_dict() if point.found else None
    return {"title": point.title, "precision": point.precision, "num_devices": point.num_devices,
            "concurrency": point.concurrency, "keeps_slo": point.keeps, "why": point.why, "command": point.command,
            "found": found}  # fmt: skip


def searched_document(found: Searched) -> dict[str, Any]:
    return {
        "best": candidate_document(found.best) if found.best else None,
        "frontier": [candidate_document(c) for c in found.frontier],
        "candidates": [candidate_document(c) for c in found.candidates],
    }
