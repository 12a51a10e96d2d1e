"""``ridgeline kernels``: what there is, packing ahead of time, tuning, and the race on this machine's GPU."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from rich.text import Text

from ridgeline.cli import draw
from ridgeline.cli.keep import keep
from ridgeline.errors import InputError, KernelError, nearest
from ridgeline.units import show_bytes, show_seconds

ACTIONS = ("list", "race", "pack", "check", "tune")
SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def run_action(action: str, names: list[str], out: Path | None, jobs: int, compiled: bool, as_json: bool) -> None:
    """Do what was asked; no action lists the primitives."""
    if action not in ACTIONS:
        raise InputError(f"no action {action!r}{nearest(action, ACTIONS)}")
    import ridgeline.kernels  # noqa: F401  (declares everything)
    from ridgeline.kernels.contract import trials

    for name in names:
        if name not in trials():
            raise InputError(f"no kernel {name!r}{nearest(name, trials())}")
    chosen = names or list(trials())
    if action == "list":
        _list(chosen, as_json)
    elif action == "pack":
        from ridgeline.kernels import pack
        from ridgeline.kernels.variants import variants_of

        folder = out or pack.pack_folder()
        began = time.perf_counter()
        wanted = [v for name in chosen for aligned in (True, False) for v in variants_of(name, aligned=aligned)]
        screen = draw.console()
        with screen.status("compiling") as status:
            told = lambda n, all: status.update(f"compiled {n} of {all}")
            made = pack.write(folder, wanted, jobs=jobs, progress=told, direct=True)
        size = (folder / pack.CUBINS).stat().st_size
        took = show_seconds(time.perf_counter() - began)
        screen.print(f"{len(made.entries)} kernels for sm_90, {show_bytes(size)}, in {took}: {folder}")
        if folder != pack.pack_folder():
            screen.print(f"use it with RIDGELINE_KERNEL_PACK={folder}", style=draw.DIM)
    else:
        from ridgeline.bench.environment import environment

        if "device" not in environment():
            raise KernelError(f"`ridgeline kernels {action}` runs kernels: this machine has no CUDA device")
        {"race": _race, "check": _check, "tune": _tune}[action](chosen, out, compiled, as_json)


def _list(names: list[str], as_json: bool) -> None:
    from ridgeline.kernels.contract import primitives, trials

    known = trials()
    if as_json:
        found = {name: _described(*known[name]) for name in names}
        return draw.print_json({"functions": found, "primitives": sorted(primitives())})
    made = draw.table("Kernels", ("function", "left"), ("types", "left"), ("gradient", "left"), ("does", "left"))
    made.columns[0].min_width = max(map(len, names))
    made.columns[3].no_wrap = False
    for name in names:
        facts = _described(*known[name])
        types = " ".join(SHORT.get(kind, kind) for kind in facts["types"])
        made.add_row(Text(name, style="bold"), types, "yes" if facts["gradient"] else "", facts["does"])
    screen = draw.console()
    screen.print(made)
    screen.print(Text("`ridgeline.kernels.supports` says which arguments have one. Here they run as ") + _here())


def _described(made: Any, trial: Any) -> dict[str, Any]:
    """What a function is, the types its kernels are checked in, and whether they have a gradient."""
    types = sorted({of.dtype for of in trial.checks}, reverse=True)
    return {"primitive": made.name, "does": made.summary, "types": types, "gradient": made.backward is not None}


def _here() -> Text:
    """Whether this machine runs them as kernels."""
    from ridgeline.bench.environment import environment

    found = environment()
    if "device" not in found:
        return Text("PyTorch references: there is no CUDA device", style="yellow")
    if tuple(found["capability"]) < (8, 0):
        return Text(f"PyTorch references: compute capability {found['capability']} is below 8.0", style="yellow")
    return Text(f"kernels on {found['device']}", style="green")


def _race(names: list[str], out: Path | None, compiled: bool, as_json: bool) -> None:
    from ridgeline.bench.environment import environment
    from ridgeline.bench.race import Course, Row, copy_bandwidth, race
    from ridgeline.kernels.contract import trials
    from ridgeline.kernels.files import cache_folder

    course = Course(_device())
    ceiling = copy_bandwidth(course)
    rows: list[Row] = []
    screen = draw.console()
    for name in names:
        trial = trials()[name][1]
        for of, phases in [*((of, trial.phases) for of in trial.races), *((of, ("call",)) for of in trial.small)]:
            rows += race(name, of, course, phases=phases, compiled=compiled and phases != ("call",))
        if not as_json:
            screen.print(race_table(name, [row for row in rows if row.primitive == name], ceiling))
    # JSON has no NaN: a contender that could not run has no time
    document = {
        "environment": environment(),
        "copy_bytes_per_s": ceiling,
        "rows": [
            {
                key: None if isinstance(value, float) and math.isnan(value) else value
                for key, value in row.to_dict().items()
            }
            for row in rows
        ],
    }
    path = out or cache_folder() / "races" / f"{time.strftime('%Y-%m-%dT%H-%M-%S')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1))
    keep("race", " ".join(names), lambda: document, measured=True, device=str(environment().get("device", "")),
         files=[("race", path)])  # fmt: skip
    if as_json:
        return draw.print_json(document)
    screen.print(standings_table(rows))
    screen.print(f"stored: {path}", style=draw.DIM)


def _device() -> Any:
    import importlib

    return importlib.import_module("torch").device("cuda")


def race_table(name: str, rows: list[Any], ceiling: float) -> Any:
    """Every case of a primitive: our time and share of the copy bandwidth beside the contenders' times."""
    others = list(dict.fromkeys(row.contender for row in rows if row.contender != "ridgeline"))
    columns = [("dtype", "left"), ("sizes", "left"), ("phase", "left"), ("ridgeline", "right"), ("of copy", "right")]
    made = draw.table(name, *columns, *((other, "right") for other in others), ("× best", "right"))
    cases: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        cases.setdefault((row.dtype, row.sizes, row.phase), {})[row.contender] = row
    for (dtype, sizes, phase), together in cases.items():
        ours = together.get("ridgeline")
        rivals = [together[other].median_s for other in others if other in together]
        best = min((s for s in rivals if not math.isnan(s)), default=math.nan)
        cells = [_seconds(together.get(other)) for other in others]
        share = f"{ours.bytes_per_s / ceiling:.0%}" if ours and phase != "call" else "–"
        made.add_row(dtype, sizes, phase, _seconds(ours), share, *cells, _speedup(ours, best))
    return made


def _seconds(row: Any) -> str:
    return "–" if row is None or math.isnan(row.median_s) else show_seconds(row.median_s)


def _speedup(ours: Any, best_s: float) -> Text:
    if ours is None or math.isnan(best_s):
        return Text("–", style=draw.DIM)
    value = best_s / ours.median_s
    return Text(f"{value:.2f}×", style="green" if value >= 1 else "red")


def standings_table(rows: list[Any]) -> Any:
    from ridgeline.bench.race import standings

    made = draw.table(
        "Against the best contender", ("kernel", "left"), ("phase", "left"), ("cases", "right"), ("speedup", "right"),
        ("lost", "right"),
    )  # fmt: skip
    for found in standings(rows):
        style = "green" if found.speedup >= 1 else "red"
        lost = Text(str(found.num_lost), style="red" if found.num_lost else draw.DIM)
        made.add_row(
            found.primitive, found.phase, str(found.num_cases), Text(f"{found.speedup:.2f}×", style=style), lost
        )
    return made


def _check(names: list[str], out: Path | None, compiled: bool, as_json: bool) -> None:
    from dataclasses import asdict

    from ridgeline.bench.check import check_all

    found = {name: list(check_all(name, _device())) for name in names}
    wrong = [finding for findings in found.values() for finding in findings if not finding.ok]
    if as_json:
        return draw.print_json({"num": sum(map(len, found.values())), "wrong": [asdict(finding) for finding in wrong]})
    made = draw.table("Against the references", ("kernel", "left"), ("right", "right"), ("wrong", "right"))
    for name, findings in found.items():
        num_wrong = sum(not finding.ok for finding in findings)
        made.add_row(name, str(len(findings) - num_wrong), Text(str(num_wrong), style="red" if num_wrong else draw.DIM))
    draw.console().print(made)
    for finding in wrong:
        draw.console().print(f"{finding.primitive} {finding.case} {finding.layout} {finding.what}: {finding.note}")
    if wrong:
        raise KernelError(f"{len(wrong)} results are wrong on this machine: please report them")


def _tune(names: list[str], out: Path | None, compiled: bool, as_json: bool) -> None:
    from dataclasses import asdict

    from ridgeline.bench.race import Course
    from ridgeline.bench.tune import tune
    from ridgeline.kernels import tuning
    from ridgeline.kernels.contract import trials

    course = Course(_device())
    found = [tuned for name in names for of in trials()[name][1].races for tuned in tune(name, of, course)]
    if as_json:
        return draw.print_json({"file": str(tuning.tuning_file()), "tuned": [asdict(tuned) for tuned in found]})
    made = draw.table(
        "Tuned", ("kernel", "left"), ("case", "left"), ("default", "right"), ("best", "right"), ("kept", "left")
    )
    for tuned in found:
        made.add_row(tuned.kernel, tuned.case, show_seconds(tuned.default_s), show_seconds(tuned.best_s),
                     tuned.best if tuned.kept else "default")  # fmt: skip
    draw.console().print(made)
    draw.console().print(f"stored: {tuning.tuning_file()}", style=draw.DIM)
