"""``ridgeline study``: sweep chips, models, plans and prices; the frontier, what matters, what excludes the rest."""

from __future__ import annotations

import hashlib
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from ridgeline.cli.draw import DIM, console, percent, print_json, table
from ridgeline.cli.history import shown_value
from ridgeline.cli.settings import settings_of
from ridgeline.errors import InputError, nearest
from ridgeline.store import transfer
from ridgeline.store.record import canonical
from ridgeline.store.store import Store
from ridgeline.study.run import Spec, Study, infeasible, opened, run
from ridgeline.study.space import Space
from ridgeline.units import show_seconds

ACTIONS = ("list", "show", "frontier", "why", "export", "rm")
KEYS = ("name", "model", "on", "evaluator", "execution", "options", "vary", "minimize", "maximize", "subject_to",
        "keep", "budget", "sampler", "seed", "errors")  # fmt: skip
ALL_INFEASIBLE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Everything that was asked for on the command line."""

    words: tuple[str, ...]
    on: str
    evaluator: str
    execution: str
    options: Mapping[str, Any]
    vary: tuple[str, ...]
    minimize: tuple[str, ...]
    maximize: tuple[str, ...]
    subject_to: tuple[str, ...]
    keep: tuple[str, ...]
    budget: int
    sampler: str
    seed: int
    workers: int
    ray: str
    url: str | None
    name: str
    resume: bool
    sure: bool
    top: int
    csv: Path | None
    parquet: Path | None
    json: bool


def run_study(asked: Asked) -> int:
    """The exit code: 3 where no point is feasible."""
    first = asked.words[0]
    if first in ACTIONS:
        return _act(asked, first, asked.words[1:])
    if len(asked.words) > 1:
        raise InputError(f"one model, spec.toml or action ({', '.join(ACTIONS)}); found {' '.join(asked.words)!r}")
    spec, name = (_from_file(Path(first), asked) if first.endswith(".toml") else _from_words(first, asked))
    with Store(asked.url) as store:
        spec = _with_errors(spec, store)
        unnamed = not asked.name and not first.endswith(".toml")
        if unnamed and any(kept.spec != spec.to_dict() for kept in store.studies(name)):
            name += "-" + hashlib.blake2b(canonical(spec.to_dict()).encode(), digest_size=3).hexdigest()
        try:
            study = run(spec, store, asked.name or name, workers=asked.workers, ray=asked.ray, resume=asked.resume,
                        progress=_progress if sys.stderr.isatty() and not asked.json else None)  # fmt: skip
        except KeyboardInterrupt:
            print(f"\ninterrupted; what was evaluated is kept in {store.name}: the same line with --resume goes on",
                  file=sys.stderr)  # fmt: skip
            raise
        return _show(study, asked, store)


def _with_errors(spec: Spec, store: Store) -> Spec:
    """The spec with the output errors that were measured of the model, where an expression asks for them."""
    if "error_frac" not in spec.needed() or spec.errors:
        return spec
    found: dict[str, float] = {}
    for record in store.runs(subject=spec.space.model, measured=True):
        error, precision = record.value("output_error_frac"), record.settings.get("precision")
        if error is not None and precision:
            found[str(precision)] = error
    return Spec(**{**{f: getattr(spec, f) for f in Spec.__dataclass_fields__}, "errors": tuple(sorted(found.items()))})


def _from_words(model: str, asked: Asked) -> tuple[Spec, str]:
    vary = dict[str, str]()
    for text in asked.vary:
        axis, equals, levels = text.partition("=")
        if not equals or not axis.strip() or not levels.strip():
            raise InputError(f"cannot read --vary {text!r}: write sms=100..240/4, batch=1,2,4,…,512 or l2=1x..4x")
        if axis.strip() in vary:
            raise InputError(f"{axis.strip()} is varied twice")
        vary[axis.strip().replace("-", "_")] = levels
    space = Space(model=model, on=asked.on, vary=vary, evaluator=asked.evaluator, execution=asked.execution,
                  options=dict(asked.options))  # fmt: skip
    spec = Spec(space, asked.minimize, asked.maximize, asked.subject_to, asked.keep, asked.budget, asked.sampler,
                asked.seed)  # fmt: skip
    return spec, f"{model}-{'-'.join(vary)}"[:80]


def _from_file(path: Path, asked: Asked) -> tuple[Spec, str]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not TOML: {error}") from error
    for key in found:
        if key not in KEYS:
            raise InputError(f"{path}: a study has no {key!r}{nearest(key, KEYS)}")
    if "model" not in found:
        raise InputError(f'{path}: name the model: model = "llama3-70b"')

    def words(key: str) -> tuple[str, ...]:
        given = found.get(key, ())
        return (given,) if isinstance(given, str) else tuple(str(word) for word in given)

    for key in ("vary", "options", "errors"):
        if not isinstance(found.get(key, {}), dict):
            raise InputError(f"{path}: {key} is a table: [{key}]")
    space = Space(
        model=str(found["model"]), on=str(found.get("on", "h200")), vary=found.get("vary", {}),
        evaluator=str(found.get("evaluator", "predict")), execution=str(found.get("execution", "eager")),
        options=found.get("options", {}),
    )  # fmt: skip
    try:
        spec = Spec(space, words("minimize"), words("maximize"), words("subject_to"), words("keep"),
                    int(found.get("budget", asked.budget)), str(found.get("sampler", asked.sampler)),
                    int(found.get("seed", asked.seed)),
                    tuple((name, float(error)) for name, error in sorted(found.get("errors", {}).items())))  # fmt: skip
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: budget, seed and errors are numbers ({error})") from error
    return spec, str(found.get("name", path.stem))


def _progress(done: int, total: int) -> None:
    print(f"\r{done:,} of {total:,} points", end="" if done < total else "\n", file=sys.stderr, flush=True)


def _act(asked: Asked, action: str, words: Sequence[str]) -> int:
    with Store(asked.url) as store:
        if action == "list":
            return _list(store, asked.json)
        if not words:
            raise InputError(f"name a study: `ridgeline study {action} NAME`; `ridgeline study list` lists them")
        if action == "rm":
            row = store.study(words[0])
            store.remove_study(row.id)
            print(f"removed study {row.name} with {row.num_points:,} points")
            return 0
        study = opened(store, words[0])
        if action == "export":
            for path in (asked.csv, asked.parquet):
                if path:
                    print(transfer.write_table(study.table(), path, "csv" if path is asked.csv else "parquet"))
            if not (asked.csv or asked.parquet):
                raise InputError("say where to: --csv FILE or --parquet FILE")
            return 0
        if action == "why":
            if len(words) != 3 or not all(word.isdigit() for word in words[1:]):
                raise InputError("name a study and two points: `ridgeline study why NAME 12 840`")
            return _why(study, int(words[1]), int(words[2]), asked)
        return _show(study, asked, store)


def _list(store: Store, json: bool) -> int:
    rows = store.studies()
    if json:
        print_json({"studies": [{"name": r.name, "id": r.id, "state": r.state, "points": r.num_points, "at": r.at}
                                for r in rows]})  # fmt: skip
        return 0
    made = table("Studies", ("name", "left"), ("points", "right"), ("state", "left"), ("begun", "left"))
    for row in rows:
        made.add_row(row.name, f"{row.num_points:,}", row.state, row.at[:16])
    console().print(made if rows else f"no study is kept in {store.name}")
    return 0


def _notes(study: Study, wanted: Sequence[str]) -> Iterator[str]:
    """Why a study has nothing to choose from."""
    for axis in study.spec.space.axes:
        if len(axis.levels) == 1:
            yield f"{axis.name} has one level, {axis.levels[0]}: A..B/STEP counts by steps, A..B:4 has four levels"
    for name in dict.fromkeys(wanted):
        if len(study.feasible) and np.isnan(study.columns[name][study.feasible]).all():
            mode = {"tpot_s": "decode", "ttft_s": "prefill"}.get(name)
            yield f"no point has {name}" + (f", the time of a {mode} step: --option mode={mode}" if mode else "")


def _show(study: Study, asked: Asked, store: Store) -> int:
    """The frontier with its measures, what matters, and what excludes points."""
    for path, kind in ((asked.csv, "csv"), (asked.parquet, "parquet")):
        if path:
            transfer.write_table(study.table(), path, kind)
    num = len(study.feasible)
    objectives = study.spec.objectives()
    found = study.frontier(asked.sure) if objectives and num else study.feasible[:0]
    if asked.json:
        print_json({
            "name": study.name, "points": len(study), "feasible": num, "outcomes": dict(study.outcomes),
            "frontier": [_clean(study.point(int(n)) | {"point": int(n)}) for n in found],
            "sensitivities": study.sensitivities(),
        })  # fmt: skip
        return 0 if num else ALL_INFEASIBLE
    out = console()
    if not num:
        print(f"error: {infeasible(study)}", file=sys.stderr)
        return ALL_INFEASIBLE
    out.print(Text(f"{study.name}: {len(study):,} points, {num:,} feasible, {len(found):,} on the "
                   f"{'sure ' if asked.sure else ''}frontier", style="bold"))  # fmt: skip
    for note in _notes(study, [name for text, expression, _ in objectives for name in expression.names()]):
        out.print(Text(f"• {note}", style=DIM))
    if objectives:
        order = found[study.costs()[_places(study, found), 0].argsort(kind="stable")]
        _points(study, order, asked.top, objectives)
        _sensitivities(study)
    for reason, count in study.outcomes.most_common(6):
        if reason:
            out.print(Text(f"{count:,} excluded: {reason}", style=DIM))
    out.print(Text(f"kept as {study.name!r} in {store.name}; `ridgeline study why {study.name} A B` compares two "
                   "points op by op", style=DIM))  # fmt: skip
    return 0


def _places(study: Study, points: Any) -> Any:
    return study.feasible.searchsorted(points)


def _points(study: Study, order: Any, top: int, objectives: Sequence[Any]) -> None:
    axes = [axis.name for axis in study.spec.space.axes]
    names = list(dict.fromkeys(name for _, expression, _ in objectives for name in expression.names()))
    made = table("Frontier", ("point", "right"), *((name, "right") for name in axes if name in study.columns),
                 *((name, "right") for name in names if name not in axes))  # fmt: skip
    for column in made.columns[1 + len(axes) :]:
        column.no_wrap = False  # an interval goes into a second line, and is never cut
    step = max(1, -(-len(order) // top))  # spread over the frontier
    for number in order[::step]:
        point = study.point(int(number))
        cells = [_level(study, axis, point[axis]) for axis in axes]
        for name in names:
            if name not in axes:
                low, high = point.get(f"{name}.low"), point.get(f"{name}.high")
                ends = f" ({shown_value(name, low)} … {shown_value(name, high)})" if low is not None else ""
                cells.append(f"{shown_value(name, point[name])}{ends}")
        made.add_row(f"{number}", *cells)
    console().print(made)
    if step > 1:
        console().print(Text(f"every {step}th of {len(order):,}; --top, --csv and --json give more", style=DIM))


def _level(study: Study, axis: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    found = next(a for a in study.spec.space.axes if a.name == axis)
    return f"{value:.4g}x" if found.is_factor else f"{value:,.6g}"


def _sensitivities(study: Study) -> None:
    found = study.sensitivities()
    axes = [axis.name for axis in study.spec.space.axes]
    made = table("What matters (share of the variance)", ("", "left"), *((axis, "right") for axis in axes))
    for text, shares in found.items():
        made.add_row(text, *(percent(shares[axis]) for axis in axes))
    if found:
        console().print(made)


def _why(study: Study, a: int, b: int, asked: Asked) -> int:
    rows = study.why(a, b)
    if asked.json:
        print_json({"a": _clean(study.point(a)), "b": _clean(study.point(b)), "rows": rows})
        return 0
    out, points = console(), (study.point(a), study.point(b))
    changed = [axis.name for axis in study.spec.space.axes if points[0][axis.name] != points[1][axis.name]]
    for label, point in zip("AB", points, strict=True):
        what = ", ".join(f"{name}={_level(study, name, point[name])}" for name in changed)
        out.print(Text(f"{label}  {what or 'the same point'}  {point['reason']}", style=DIM))
    made = table("What differs", ("module", "left"), ("op", "left"), ("A", "right"), ("B", "right"),
                 ("B − A", "right"), ("bound", "left"))  # fmt: skip
    for row in rows[: asked.top]:
        if row["delta_s"]:
            bound = row["a_bound"] if row["a_bound"] == row["b_bound"] else f"{row['a_bound']} → {row['b_bound']}"
            sign = "+" if row["delta_s"] > 0 else "−"
            made.add_row(row["module"] or "–", row["op"], show_seconds(row["a_s"]), show_seconds(row["b_s"]),
                         f"{sign}{show_seconds(abs(row['delta_s']))}", bound)  # fmt: skip
    out.print(made)
    return 0


def _clean(point: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: what is unknown is null."""
    return {key: None if isinstance(value, float) and value != value else value for key, value in point.items()}


def options_of(words: Sequence[str]) -> dict[str, Any]:
    """Fixed settings as key=value."""
    return dict(settings_of(words))


