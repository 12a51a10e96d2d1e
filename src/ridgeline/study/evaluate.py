"""Evaluators: what predict, simulate and serve say of points, in columns, with the reason where a point cannot be.

A measure is a column in SI units; ``x.low`` and ``x.high`` are its 90 % interval. A point that cannot be built or run
has no measures and a reason. Nothing here depends on the order or the company in which points come.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.cost.estimate import estimate
from ridgeline.cost.fleet import Predictions, estimate_fleet
from ridgeline.cost.prediction import Prediction
from ridgeline.errors import RidgelineError
from ridgeline.graph import Graph
from ridgeline.hardware import device as device_named
from ridgeline.hardware.fleet import Fleet, fleet
from ridgeline.models import build
from ridgeline.models.card import yielded
from ridgeline.plan import Plan
from ridgeline.study.price import Bill
from ridgeline.study.space import Columns, Space

ALIASES = {
    "step": "step_s", "time": "step_s", "latency": "step_s", "tpot": "tpot_s", "ttft": "ttft_s", "energy": "energy_j",
    "power": "power_w", "area": "area_mm2", "throughput": "tokens_per_s", "error": "error_frac",
    "peak": "peak_bytes", "e2e": "e2e_s", "mfu": "mfu_frac", "co2": "co2_g_per_mtoken",
}  # fmt: skip
PRICED = {
    "area_mm2", "materials_usd", "unit_usd", "usd_per_hour", "usd_per_mtoken", "co2_g_per_mtoken", "embodied_kg",
    "yield_frac", "usd_per_step",
}  # fmt: skip
"""Measures that need the bill of the chip."""
PREDICT = (
    "step_s", "busy_s", "floor_s", "host_s", "energy_j", "power_w", "throttle", "peak_bytes", "fits", "tokens_per_s",
    "tpot_s", "ttft_s", "energy_j_per_token", "rent_usd_per_mtoken", "error_frac", *sorted(PRICED),
)  # fmt: skip
SIMULATE = (
    "step_s", "tokens_per_s", "tokens_per_s_per_device", "mfu_frac", "bubble_frac", "exposed_s", "energy_j", "usd",
    "peak_bytes", "fits", "rent_usd_per_mtoken", "num_devices", "error_frac", *sorted(PRICED),
)  # fmt: skip
SERVE = (
    "ttft_s", "tpot_s", "e2e_s", "ttft_p99_s", "tpot_p99_s", "tokens_per_s", "tokens_per_s_per_device",
    "tokens_per_s_per_user", "requests_per_s", "energy_j_per_token", "usd", "rent_usd_per_mtoken", "num_devices",
    "error_frac", *sorted(PRICED),
)  # fmt: skip
MEASURES = {"predict": PREDICT, "simulate": SIMULATE, "serve": SERVE}
WITH_INTERVAL = ("step_s", "tpot_s", "ttft_s", "tokens_per_s", "usd_per_mtoken", "energy_j_per_token")


def evaluated(space: Space, points: Columns, wanted: frozenset[str], errors: Mapping[str, float]) -> Columns:
    """Measures of the points, and ``reason``; ``errors`` is the measured output error by precision."""
    num = len(next(iter(points.values())))
    found: Columns = {"reason": np.full(num, "", dtype=object)}
    run = {"predict": _predict, "simulate": _simulate, "serve": _serve}[space.evaluator]
    for setting, index in _settings(space, points):
        part = {name: values[index] for name, values in points.items()}
        made = run(space, setting, part, wanted)
        if "error_frac" in wanted:
            precision = str(setting.get("precision") or space.options.get("precision") or "bf16")
            made["error_frac"] = np.full(len(index), errors.get(precision, np.nan))
            if precision not in errors:
                none = f"no measured output error of {space.model} in {precision}"
                made["reason"] = np.where(made["reason"] == "", none, made["reason"])
        for name, values in made.items():
            if name not in found:
                found[name] = np.full(num, np.nan)
            found[name][index] = values
    found["reason"] = found["reason"].astype(str)
    return found


def _settings(space: Space, points: Columns) -> Iterator[tuple[dict[str, Any], NDArray[np.intp]]]:
    """Points that differ only in their devices' and assumptions' numbers, together."""
    names = [axis.name for axis in space.axes if axis.kind not in ("device", "price")]
    if space.evaluator != "predict":  # these build a cluster for each point
        names = [axis.name for axis in space.axes if axis.kind != "price"]
    num = len(next(iter(points.values())))
    codes = np.zeros(num, dtype=np.int64)
    for name in names:
        levels, where = np.unique(points[name], return_inverse=True)
        codes = np.unique(codes * len(levels) + where, return_inverse=True)[1].reshape(-1)
    order = np.argsort(codes, kind="stable")
    for index in np.split(order, np.flatnonzero(np.diff(codes[order])) + 1):
        yield {name: _plain(points[name][index[0]]) for name in names}, index


def _plain(value: Any) -> Any:
    found = value.item() if hasattr(value, "item") else value
    return int(found) if isinstance(found, float) and found.is_integer() else found


def _nothing(num: int, reason: str) -> Columns:
    return {"reason": np.full(num, reason, dtype=object)}


# predict


@lru_cache(maxsize=64)
def _graph(model: str, options: tuple[tuple[str, Any], ...]) -> Graph:
    return build(model, **dict(options))


def graph_at(space: Space, setting: Mapping[str, Any]) -> Graph:
    """The network of a point."""
    fixed = {**space.options, **setting}
    options = {axis: value for axis, value in fixed.items() if axis not in ("on", "model", "execution")}
    kinds = {axis.name: axis.kind for axis in space.axes}
    options = {key: value for key, value in options.items() if kinds.get(key, space.kind(key)) == "option"}
    return _graph(str(setting.get("model", space.model)), tuple(sorted(options.items())))


def fleet_at(space: Space, setting: Mapping[str, Any], points: Columns) -> Fleet:
    """The devices of points that begin from one device."""
    num = len(next(iter(points.values())))
    changes = {axis.name: (np.asarray(points[axis.name], dtype=np.float64), axis.is_factor)
               for axis in space.axes if axis.kind == "device"}  # fmt: skip
    parent = device_named(str(setting.get("on", space.on)))
    fixed = {key: value for key, value in space.options.items() if space.kind(key) == "device"}
    return fleet(parent.override(**fixed) if fixed else parent, changes, num)


def prediction_at(space: Space, point: Mapping[str, Any]) -> Prediction:
    """The whole prediction of one point, op by op."""
    from ridgeline.cost.fleet import device_at

    one = {name: np.array([value]) for name, value in point.items()}
    made = fleet_at(space, point, one)
    setting = {axis.name: _plain(point[axis.name]) for axis in space.axes if axis.kind not in ("device", "price")}
    return estimate(graph_at(space, setting), device_at(made, 0), str(setting.get("execution", space.execution)))


def _predict(space: Space, setting: dict[str, Any], points: Columns, wanted: frozenset[str]) -> Columns:
    num = len(next(iter(points.values())))
    try:
        graph = graph_at(space, setting)
        made = fleet_at(space, setting, points)
        found = _over_distinct(graph, made, str(setting.get("execution", space.execution)))
    except RidgelineError as error:
        return _nothing(num, str(error))
    columns = found.columns()
    step_s = columns["expected_s"]
    unit = yielded(graph.name, graph.meta, str(graph.meta.get("mode", graph.mode)))
    count = float(unit[1]) if unit else np.nan
    with np.errstate(divide="ignore", invalid="ignore"):
        made_columns: Columns = {
            "reason": made.wrong.astype(object), "step_s": step_s, "step_s.low": columns["low_s"],
            "step_s.high": columns["high_s"], "busy_s": columns["busy_s"], "floor_s": columns["floor_s"],
            "host_s": columns["host_s"], "energy_j": columns["energy_j"], "power_w": columns["energy_j"] / step_s,
            "throttle": columns["throttle"], "peak_bytes": columns["peak_bytes"],
            "fits": (columns["peak_bytes"] <= columns["capacity_bytes"]).astype(float),
            "tokens_per_s": count / step_s, "tokens_per_s.low": count / columns["high_s"],
            "tokens_per_s.high": count / columns["low_s"], "energy_j_per_token": columns["energy_j"] / count,
            "rent_usd_per_mtoken": columns["usd"] / count * 1e6,
        }  # fmt: skip
        for name in ("tpot_s", "ttft_s"):
            if (graph.mode == "decode") == (name == "tpot_s"):
                made_columns |= {name: step_s, f"{name}.low": columns["low_s"], f"{name}.high": columns["high_s"]}
        if wanted & PRICED:
            priced(made_columns, Bill(made.parent, made.numbers, _assumed(space, points)), count,
                   made_columns["power_w"], 1.0)  # fmt: skip
    for name, values in made_columns.items():
        if name != "reason":
            made_columns[name] = np.where(made.wrong == "", values, np.nan)
    return made_columns


def _over_distinct(graph: Graph, made: Fleet, execution: str) -> Predictions:
    """Price each distinct device once: capacities of links and prices change no time."""
    ignored = ("price_usd_per_hour", "dram.capacity_bytes", "scale_up", "scale_out", "pcie", "idle_w")
    keys = [made.numbers[field] for field in made.asked if not field.startswith(ignored)]
    keys.append(made.wrong == "")
    if len(keys) == 1:
        keys.append(np.zeros(len(made)))
    table = np.stack([np.asarray(key, dtype=np.float64) for key in keys], axis=1)
    rows = np.ascontiguousarray(table).view(np.dtype((np.void, table.dtype.itemsize * table.shape[1]))).reshape(-1)
    _, first, where = np.unique(rows, return_index=True, return_inverse=True)
    alive = np.flatnonzero(made.wrong[first] == "")
    small = estimate_fleet(graph, made.part(first[alive]), execution)
    place = np.full(len(first), -1)
    place[alive] = np.arange(len(alive))
    at = place[where.reshape(-1)]
    columns = {
        name: np.where(at >= 0, values[np.maximum(at, 0)] if len(values) else np.nan, np.nan)
        for name, values in small.columns().items()
    }
    numbers = made.numbers
    with np.errstate(invalid="ignore"):
        columns["capacity_bytes"] = numbers["dram.capacity_bytes"]
        columns["usd"] = columns["expected_s"] / 3600.0 * numbers["price_usd_per_hour"]
    return Predictions(**columns)


def priced(columns: Columns, bill: Bill, per_step: Any, power_w: Any, num_devices: Any) -> None:
    """Add what the chips cost, for a step that yields ``per_step`` on so many of them."""
    totals, step_s = bill.totals(), columns["step_s"]
    hour_usd = totals["usd_per_hour"] * num_devices
    grams = sum(bill.grams_an_hour(power_w).values()) * num_devices
    for name in ("area_mm2", "yield_frac", "materials_usd", "unit_usd", "usd_per_hour", "embodied_kg"):
        columns[name] = totals[name] + 0.0 * step_s
    columns["usd_per_step"] = hour_usd / 3600.0 * step_s
    for end in ("", ".low", ".high"):
        if f"step_s{end}" in columns:
            columns[f"usd_per_mtoken{end}"] = hour_usd / 3600.0 * columns[f"step_s{end}"] / per_step * 1e6
    columns["co2_g_per_mtoken"] = grams / 3600.0 * step_s / per_step * 1e6


def _assumed(space: Space, points: Columns) -> dict[str, Any]:
    """Assumptions of the bill that the space fixes or varies."""
    fixed = {key: value for key, value in space.options.items() if space.kind(key) == "price"}
    return fixed | {axis.name: points[axis.name] for axis in space.axes if axis.kind == "price"}


# simulate and serve


def _cluster(space: Space, setting: Mapping[str, Any]) -> str:
    """The cluster of a point as it would be written."""
    given = {**space.options, **setting}
    name = str(given.get("on", space.on))
    if "num_devices" in given:
        name = f"{name.partition('*')[0].strip()}*{int(given['num_devices'])}"
    kinds = {axis.name: axis for axis in space.axes}
    words = []
    for key, value in given.items():
        if space.kind(key) in ("device", "cluster"):
            factor = "x" if key in kinds and kinds[key].is_factor else ""
            words.append(f"{key}={value}{factor}")
    return " ".join([name, *words])


def _simulate(space: Space, setting: dict[str, Any], points: Columns, wanted: frozenset[str]) -> Columns:
    from ridgeline.sim.request import simulated

    num = len(next(iter(points.values())))
    given = {**space.options, **setting}
    known = {f.name for f in fields(Plan)}
    choices = {key: value for key, value in given.items() if key in known}
    try:
        step = simulated(
            str(given.get("model", space.model)), _cluster(space, setting), None, stack=str(given.get("stack", "")),
            trouble=None, seq=int(given["seq"]) if "seq" in given else None, choices=choices,
        )  # fmt: skip
    except RidgelineError as error:
        return _nothing(num, str(error))
    made = step.to_dict()
    low, high = made["interval_s"]
    tokens = float(made["tokens"])
    numbers = {
        "step_s": made["step_s"], "step_s.low": low, "step_s.high": high, "tokens_per_s": tokens / made["step_s"],
        "tokens_per_s.low": tokens / high, "tokens_per_s.high": tokens / low,
        "tokens_per_s_per_device": made["tokens_per_s_per_device"], "mfu_frac": made["mfu_frac"],
        "bubble_frac": made["bubble_frac"], "exposed_s": made["exposed_s"], "energy_j": made["energy_j"],
        "usd": made["usd"], "peak_bytes": made["peak_bytes"], "fits": float(made["fits"]),
        "rent_usd_per_mtoken": made["usd"] / tokens * 1e6, "num_devices": float(made["num_devices"]),
    }  # fmt: skip
    columns: Columns = {name: np.full(num, float(value)) for name, value in numbers.items()}
    columns["reason"] = np.full(num, "", dtype=object)
    if wanted & PRICED:
        bill = Bill(step.cluster.device, None, _assumed(space, points))
        power_w = made["energy_j"] / made["step_s"] / made["num_devices"]
        priced(columns, bill, tokens, power_w, float(made["num_devices"]))
    return columns


def _serve(space: Space, setting: dict[str, Any], points: Columns, wanted: frozenset[str]) -> Columns:
    from ridgeline.sim.serving.compose import Wanted, deployment_of
    from ridgeline.sim.serving.metrics import metrics
    from ridgeline.sim.serving.simulate import simulate
    from ridgeline.sim.serving.workload import closed, opened

    num = len(next(iter(points.values())))
    given = {**space.options, **setting}
    known = {f.name for f in fields(Wanted)}
    try:
        deployment = deployment_of(
            str(given.get("model", space.model)), _cluster(space, setting),
            Wanted(**{key: value for key, value in given.items() if key in known}),
        )  # fmt: skip
        isl, osl, ratio = int(given.get("isl", 1024)), int(given.get("osl", 1024)), float(given.get("ratio", 0.8))
        if "rate" in given:
            load = opened(float(given["rate"]), isl, osl, num=int(given.get("requests", 500)),
                          burst=float(given.get("burst", 1.0)), ratio=ratio, seed=0)  # fmt: skip
        else:
            load = closed(int(given.get("concurrency", 32)), isl, osl, num=int(given.get("requests", 0)), ratio=ratio,
                          seed=0)  # fmt: skip
        served = simulate(deployment, load)
        made = metrics(served, None).to_dict()
    except RidgelineError as error:
        return _nothing(num, str(error))
    rate, ends = made["output_tokens_per_s"], made["intervals"]["output_tokens_per_s"]
    numbers = {
        **{f"{name}_s{end}": made[f"{name}_s"][key] for name in ("ttft", "tpot", "e2e")
           for end, key in (("", "mean"), (".low", "low"), (".high", "high"))},
        "ttft_p99_s": made["ttft_s"]["p99"], "tpot_p99_s": made["tpot_s"]["p99"], "tokens_per_s": rate,
        "tokens_per_s.low": ends[0], "tokens_per_s.high": ends[1], "usd": made["usd"],
        "tokens_per_s_per_device": made["output_tokens_per_s_per_device"],
        "tokens_per_s_per_user": made["tokens_per_s_per_user"], "requests_per_s": made["requests_per_s"],
        "energy_j_per_token": made["energy_j_per_token"], "rent_usd_per_mtoken": made["usd_per_million_output"],
        "num_devices": float(made["num_devices"]), "step_s": 1.0 / rate, "step_s.low": 1.0 / ends[1],
        "step_s.high": 1.0 / ends[0],
    }  # fmt: skip
    columns: Columns = {name: np.full(num, float(value)) for name, value in numbers.items()}
    columns["reason"] = np.full(num, "", dtype=object)
    if wanted & PRICED:
        power_w = made["energy_j"] / made["wall_s"] / made["num_devices"]
        priced(columns, Bill(deployment.device, None, _assumed(space, points)), 1.0, power_w, made["num_devices"])
    return columns


def known_names(space: Space, points: Mapping[str, Any] | None = None) -> dict[str, str]:
    """What an expression may name: measures, axes and numbers of the device; people's words to columns."""
    measures = MEASURES[space.evaluator]
    found = {name: name for name in measures} | {axis.name: axis.name for axis in space.axes}
    return found | {word: name for word, name in ALIASES.items() if name in measures and word not in found}


