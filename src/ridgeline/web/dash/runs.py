"""Runs of a store for the dashboard: lists, one number over time, one run, and what differs between two."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ridgeline.errors import InputError
from ridgeline.store.record import Record
from ridgeline.store.series import series_of
from ridgeline.store.store import Store
from ridgeline.web.dash import points
from ridgeline.web.dash.points import Tables

HIGHER_IS_BETTER = ("per_s", "_per_user", "mfu_frac", "good_frac", "speedup", "goodput")


def home(store: Store) -> dict[str, Any]:
    """What is kept."""
    names = ("thing", "subject", "device", "kind", "runs", "newest")
    return {"store": store.name, "things": [dict(zip(names, row)) for row in store.things()], "tags": store.tags()}


def listed(store: Store, kind: str, subject: str, thing: str, limit: int) -> list[dict[str, Any]]:
    """Runs, newest first."""
    found = store.runs(kind=kind, subject=subject, thing=thing, limit=max(1, min(limit, 2000)))
    return [brief(record) for record in reversed(found)]


def brief(record: Record) -> dict[str, Any]:
    return {
        "id": record.id, "kind": record.kind, "subject": record.subject, "device": record.device, "at": record.at,
        "thing": record.thing, "measured": record.measured, "version": record.version, "git": record.git,
        "metrics": {metric.name: metric.value for metric in record.metrics},
    }  # fmt: skip


def history(store: Store, kind: str, thing: str, metric: str) -> dict[str, Any]:
    """One number of one thing over time, split into levels where it changed beyond its noise."""
    records = store.runs(kind=kind, thing=thing)
    names = list(dict.fromkeys(found.name for record in records for found in record.metrics))
    if not names:
        raise InputError(f"no run of {thing!r} has a number")
    chosen = metric or ("step_s" if "step_s" in names else names[0])
    kept = [(record, found) for record in records for found in record.metrics if found.name == chosen]
    if not kept:
        raise InputError(f"no run of {thing!r} has {chosen!r}: they have {', '.join(names[:12])}")
    series = series_of([found.value for _, found in kept])
    higher_is_worse = not any(word in chosen for word in HIGHER_IS_BETTER)
    return {
        "kind": kind, "thing": thing, "metric": chosen, "metrics": names, "noise_frac": series.noise,
        "change": series.change, "regressed": series.regressed(0.03, higher_is_worse=higher_is_worse),
        "levels": [[level.start, level.stop, level.median] for level in series.levels],
        "runs": [{"id": record.id, "at": record.at, "value": found.value, "low": found.low, "high": found.high,
                  "version": record.version, "git": record.git,
                  "changed": bool(at) and record.subject_hash != kept[at - 1][0].subject_hash}
                 for at, (record, found) in enumerate(kept)],
    }  # fmt: skip


def whole(store: Store, name: str) -> dict[str, Any]:
    """One run with its document."""
    record = store.run(name)
    return {
        **brief(record), "settings": dict(record.settings), "environment": dict(record.environment),
        "numbers": [[m.name, m.value, m.low, m.high, m.basis] for m in record.metrics],
        "artifacts": [[a.kind, a.path, a.num_bytes] for a in record.artifacts],
        "document": store.document(record.id), "curve": serving_curve(store, record),
    }  # fmt: skip


def serving_curve(store: Store, record: Record) -> list[dict[str, Any]]:
    """Throughput a device against throughput a user of the loads that a serving run tried."""
    if record.kind not in ("serve", "serve search"):
        return []
    document = store.document(record.id)
    document = document if isinstance(document, Mapping) else {}
    tried = document.get("sweep") or document.get("candidates") or []
    best = {_words(one) for one in document.get("frontier") or [] if isinstance(one, Mapping)}
    curve = []
    for one in tried if isinstance(tried, list) else []:
        found = one.get("found") if isinstance(one, Mapping) else None
        if isinstance(found, Mapping):
            curve.append(_load(found) | {"title": _words(one), "frontier": _words(one) in best,
                                         "keeps_slo": bool(one.get("keeps_slo", True))})  # fmt: skip
    if not curve and "tokens_per_s_per_user" in document:
        curve.append(_load(document) | {"title": str(document.get("workload", "")), "frontier": True,
                                        "keeps_slo": True})  # fmt: skip
    return [one for one in curve if one["user"] is not None and one["device"] is not None][:5000]


def _words(candidate: Mapping[str, Any]) -> str:
    return f"{candidate.get('title', '')} {candidate.get('precision', '')} ×{candidate.get('concurrency', '')}".strip()


def _load(found: Mapping[str, Any]) -> dict[str, Any]:
    def mean(name: str) -> float | None:
        value = found.get(name)
        return _number(value.get("mean") if isinstance(value, Mapping) else value)

    return {"user": _number(found.get("tokens_per_s_per_user")), "ttft_s": mean("ttft_s"), "tpot_s": mean("tpot_s"),
            "device": _number(found.get("output_tokens_per_s_per_device")),
            "usd": _number(found.get("usd_per_million_output"))}  # fmt: skip


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


def differences(store: Store, tables: Tables, a: str, b: str) -> dict[str, Any]:
    """What differs between two runs or points: settings, numbers, and points op by op."""
    sides = [_side(store, tables, name) for name in (a, b)]
    numbers = [
        [name, sides[0]["numbers"].get(name), sides[1]["numbers"].get(name)]
        for name in dict.fromkeys([*sides[0]["numbers"], *sides[1]["numbers"]])
    ]
    settings = [
        [name, sides[0]["settings"].get(name), sides[1]["settings"].get(name)]
        for name in dict.fromkeys([*sides[0]["settings"], *sides[1]["settings"]])
        if sides[0]["settings"].get(name) != sides[1]["settings"].get(name)
    ]
    ops: list[dict[str, Any]] = []
    if sides[0]["study"] and sides[0]["study"] == sides[1]["study"]:
        with tables.lock:
            table = tables.table(store, sides[0]["study"], lambda found: found.row.columns)
        if table.spec is not None and table.spec.space.evaluator == "predict":
            ops = points.spoken(table, [side["number"] for side in sides]).why(0, 1)[:200]
    return {
        "a": sides[0]["title"], "b": sides[1]["title"], "numbers": numbers, "settings": settings, "ops": ops,
        "rest": list(_leaves_that_differ(sides[0]["document"], sides[1]["document"]))[:400],
    }  # fmt: skip


def _side(store: Store, tables: Tables, name: str) -> dict[str, Any]:
    kind, _, rest = name.partition(":")
    if kind == "point":
        study, _, number = rest.rpartition(":")
        if not number.isdigit():
            raise InputError(f"cannot read {name!r}: write point:STUDY:NUMBER")
        found = points.point(store, tables, study, int(number))
        values = found["values"]
        return {
            "title": f"point {number} of {found['name']}", "study": found["id"], "number": int(number),
            "settings": {axis: values[axis] for axis in found["axes"]} | {"reason": values.get("reason", "")},
            "numbers": {key: value for key, value in values.items()
                        if isinstance(value, float) and key not in found["axes"]}, "document": None,
        }  # fmt: skip
    record = store.run(rest if kind == "run" else name)
    facts = {"kind": record.kind, "subject": record.subject, "device": record.device, "version": record.version,
             "git": record.git, "model": record.subject_hash, "measured": record.measured}  # fmt: skip
    return {
        "title": f"{record.id[:10]} {record.kind} {record.at[:16]} {record.thing}", "study": "", "number": 0,
        "settings": {**facts, **record.settings, **{f"environment.{k}": v for k, v in record.environment.items()}},
        "numbers": {metric.name: metric.value for metric in record.metrics}, "document": store.document(record.id),
    }  # fmt: skip


def _leaves_that_differ(a: Any, b: Any, where: str = "") -> Iterator[list[Any]]:
    """(path, a, b) of the parts of two documents that are not equal."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in dict.fromkeys([*a, *b]):
            yield from _leaves_that_differ(a.get(key), b.get(key), f"{where}.{key}" if where else str(key))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for at, (one, other) in enumerate(zip(a, b)):
            name = one.get("module") or one.get("name") if isinstance(one, Mapping) else None
            yield from _leaves_that_differ(one, other, f"{where}[{name or at}]")
    elif a != b:
        yield [where, _shown(a), _shown(b)]


def _shown(value: Any) -> Any:
    if isinstance(value, (Mapping, Sequence)) and not isinstance(value, str):
        return json.dumps(value)[:120]
    return value
