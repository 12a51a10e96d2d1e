"""Published serving runs as deployments and workloads: what a row says, and how its run was set up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ridgeline.errors import InputError, RidgelineError
from ridgeline.hardware import device as device_named
from ridgeline.sim.serving.anatomy import Layers, anatomy
from ridgeline.sim.serving.deployment import Layout, precision
from ridgeline.sim.serving.engine import engine
from ridgeline.sim.serving.metrics import metrics
from ridgeline.sim.serving.simulate import Deployment, Pool, simulate
from ridgeline.sim.serving.worker import Speculation
from ridgeline.sim.serving.workload import Workload, closed
from ridgeline.validation.publications import Fact, publications
from ridgeline.validation.verdict import Judged, Row, Unused

LENGTH_RATIO = 0.8
"""The benchmark client draws lengths evenly from this share of the nominal one up to it, ten requests a slot."""


@dataclass(frozen=True, slots=True)
class Run:
    """One published run: how to simulate it and what was measured."""

    key: str
    deployment: Deployment
    workload: Workload
    ttft_s: float
    tpot_s: float
    mode: str
    group: str  # rows whose errors are reported together
    was_repaired: bool
    row: Mapping[str, str]


def judge(rows: Sequence[Row]) -> Iterator[Judged | Unused]:
    """Mean time to first token and per output token of every run, each beside the simulation of its row."""
    doubts = contradictions([row.columns for row in rows])
    for index, row in enumerate(rows):
        source = f"{row.text('mode')}/{row.text('backend')}/{row.text('system')}"
        try:
            found = list(_judged(row, run_of_row(row.columns), source))
        except (RidgelineError, ValueError, KeyError) as error:
            yield Unused(row=row.line, source=source, why=str(error))
            continue
        for verdict in found:
            why = doubts.get((index, verdict.metric))
            yield Unused(row=row.line, source=source, why=why) if why else verdict


_SAME = (
    "backend", "model_path", "system", "precision", "mode", "isl", "osl", "tp_size", "pp_size", "attention_dp_size",
    "moe_tp_size", "moe_ep_size", "prefill_num_workers", "prefill_tp_size", "prefill_attention_dp_size",
    "decode_num_workers", "decode_tp_size", "decode_attention_dp_size",
)  # fmt: skip
LOAD_RATIO, WITNESSES = 4, 2


def contradictions(rows: Sequence[Mapping[str, str]]) -> dict[tuple[int, str], str]:
    """Measurements that two others of the same deployment make impossible, by (row, metric): more load never makes a
    token faster, nor a first token come sooner. Simulations play no part in this."""
    groups: dict[tuple[str, ...], dict[tuple[float, float, float], list[int]]] = {}
    for index, row in enumerate(rows):
        try:
            load, ttft, tpot = (float(row[n]) for n in ("concurrency", "silicon_ttft_ms", "silicon_tpot_ms"))
        except (KeyError, ValueError):
            continue
        same = tuple(row.get(name, "") for name in _SAME)
        groups.setdefault(same, {}).setdefault((load, ttft, tpot), []).append(index)
    found: dict[tuple[int, str], str] = {}
    for runs in groups.values():
        for run, indices in runs.items():
            # ttft ratio
            tpots, ttfts = _against(run, runs, 2, 1.25), _against(run, runs, 1, 1.5)  # tpot ratio
            for index in indices:
                if tpots >= WITNESSES:
                    why = "two runs of the same deployment under other loads contradict its time per token"
                    found[index, "tpot_mean"] = found[index, "ttft_mean"] = why
                elif ttfts >= WITNESSES:
                    found[index, "ttft_mean"] = "two runs of the same deployment contradict its first token: a stall"
    return found


def _against(run: tuple[float, ...], runs: Iterable[tuple[float, ...]], column: int, ratio: float) -> int:
    """Other runs of which either the lighter is slower, or the heavier faster, by more than ``ratio``."""
    load, value = run[0], run[column]
    lighter = sum(1 for other in runs if other[0] * LOAD_RATIO <= load and other[column] > ratio * value)
    heavier = sum(1 for other in runs if other[0] >= load * LOAD_RATIO and other[column] * ratio < value)
    return lighter + heavier


def _judged(row: Row, run: Run, source: str) -> Iterator[Judged]:
    found = metrics(simulate(run.deployment, run.workload))
    layout = run.deployment.pool.layout
    what = (
        f"{run.deployment.anatomy.name} {run.deployment.precision.name}, tp {layout.tp} dp {layout.attention_dp} "
        f"ep {layout.ep}, {row.text('isl')} in {row.text('osl')} out, {run.workload.concurrency} in flight"
    )
    for metric, measured_s, predicted in (
        ("ttft_mean", run.ttft_s, found.ttft_s), ("tpot_mean", run.tpot_s, found.tpot_s)
    ):  # fmt: skip
        yield Judged(
            row=row.line, key=f"{run.key}/{metric}", source=source, what=what, metric=metric, unit="s",
            measured=measured_s, predicted=predicted.mean, low=predicted.low, high=predicted.high,
        )  # fmt: skip


LAYOUTS: Mapping[str, Callable[[Layout], Layout]] = {
    "as recorded": lambda given: given,
    "experts": lambda given: replace(given, ep=given.tp),
    "no expert parallelism": lambda given: replace(given, ep=1),
    "attention groups": lambda given: Layout(tp=1, pp=given.pp, attention_dp=given.tp, ep=given.tp),
    "one tensor group": lambda given: Layout(tp=given.attention_dp * given.tp, pp=given.pp, ep=given.ep),
}
"""How a script splits an instance, by the names of data/publications/serving.toml."""


def run_of_row(row: Mapping[str, str]) -> Run:
    """The run of a row, launched as data/publications/serving.toml says the public scripts launched it."""
    known = publications("serving")
    system = known["system"].choose({"system": row["system"]})
    if not system:
        raise InputError(f"unknown system {row['system']!r}")
    made, device = anatomy(row["model_path"]), device_named(system["device"])
    ttft_s, tpot_s = float(row["silicon_ttft_ms"]) / 1e3, float(row["silicon_tpot_ms"]) / 1e3
    if not (ttft_s > 0 and tpot_s > 0):
        raise InputError("no measured latency")
    version, disaggregated = row.get("backend_version") or "", row["mode"] == "disagg"
    isl, osl, concurrency = int(row["isl"]), int(row["osl"]), int(float(row["concurrency"]))
    written = row.get("moe_quant_mode") or row.get("gemm_quant_mode") or row.get("precision") or "bf16"
    facts: dict[str, Fact] = {
        "backend": row["backend"], "version": version, "system": row["system"], "model": made.name,
        "sparse": made.is_sparse, "blackwell": device.arch == "blackwell", "disaggregated": disaggregated,
        "early": not version and not disaggregated,  # of the first two months
        "isl": isl, "osl": osl, "lengths": f"{isl // 1024}k{osl // 1024}k", "concurrency": concurrency,
        "written": written, "recorded_ep": int(float(row.get("moe_ep_size") or 1)),
    }  # fmt: skip
    facts["format"] = known["format"].choose(facts).get("format", written)
    if refused := known["refused"].choose(facts):
        raise InputError(refused["why"])
    pool, repaired = _pool(row, "decode_" if disaggregated else "")
    if not disaggregated and pool.num_devices > 8:  # the hosts of these runs; more is the total of several instances
        raise InputError(f"{pool.num_devices} devices in one aggregated instance: widths are inconsistent")
    layout = pool.layout
    for table in ("recorded_layout", "layout"):
        if not disaggregated:
            layout = LAYOUTS[known[table].choose(facts | _widths(layout)).get("layout", "as recorded")](layout)
    prefill, bent = _pool(row, "prefill_") if disaggregated else (None, False)
    facts |= _widths(layout) | {"concurrency_a_group": concurrency // layout.attention_dp}
    draft = known["drafts"].choose(facts)
    facts["drafted"] = bool(draft)
    facts["generation"] = known["generation"].choose(facts).get("generation", row["backend"])
    settings = known["engine"].choose(facts)
    kv, state_bytes = settings.pop("kv"), settings.pop("state_bytes", 0)
    used = engine(str(facts["generation"]), device).change(**settings)
    if state_bytes:
        made = replace(made, layers=tuple(_with_states(group, state_bytes) for group in made.layers))
    deployment = Deployment(
        made, device, precision(str(facts["format"]), kv, sparse=made.is_sparse), used, replace(pool, layout=layout),
        prefill, Speculation(draft["draft"], draft["accept_frac"]) if draft else None,
    )  # fmt: skip
    work = closed(concurrency, isl, osl, ratio=LENGTH_RATIO)
    group = f"{row['mode']}/{used.name}/{device.arch}"
    repaired = repaired or bent or layout != pool.layout
    return Run(row["id"], deployment, work, ttft_s, tpot_s, row["mode"], group, repaired, row)


def _widths(layout: Layout) -> dict[str, Fact]:
    groups = layout.attention_dp
    return {"tp": layout.tp, "attention_dp": groups, "ep": layout.ep, "all_groups_served": all_served(groups)}


def all_served(groups: int) -> int:
    """Requests that have to finish, in any order, until every attention group has room for a new one."""
    return round(groups * sum(1 / k for k in range(1, groups + 1)))


def _with_states(group: Layers, itemsize: int) -> Layers:
    if group.mixer.recurrence is None:
        return group
    recurrence = replace(group.mixer.recurrence, state_itemsize=itemsize)
    return replace(group, mixer=replace(group.mixer, recurrence=recurrence))


def _whole(text: str | None) -> int:
    if not text:
        raise InputError("a parallel width is missing")
    value = float(text)
    if value != int(value) or value < 1:
        raise InputError(f"width {text} is not a whole number")
    return int(value)


def _pool(row: Mapping[str, str], prefix: str) -> tuple[Pool, bool]:
    """The instances of a row. Three bookkeeping slips of the file are put right: a width multiplied by its expert
    parallelism, and by its attention data parallelism; experts said to be sliced finer than their blocks of scales."""
    words = ("tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    tp, pp, dp, moe_tp, moe_ep = (_whole(row.get(prefix + word)) for word in words)
    replicas = _whole(row[prefix + "num_workers"]) if prefix else 1
    if moe_tp == moe_ep > 1 and tp == moe_tp * moe_ep and dp == 1:
        return Pool(Layout(tp=moe_ep, pp=pp, ep=moe_ep), replicas), True
    if moe_tp == moe_ep > 1 and dp == moe_tp * moe_ep and tp == 1:
        return Pool(Layout(tp=1, pp=pp, attention_dp=moe_ep, ep=moe_ep), replicas), True
    if dp == tp > 1 and moe_tp == 1 and moe_ep == tp * dp:
        return Pool(Layout(tp=1, pp=pp, attention_dp=dp, ep=dp), replicas), True
    if moe_ep == 1 and tp == 1 and dp == moe_tp > 16:  # an expert has 2,048 columns in blocks of 128
        return Pool(Layout(tp=1, pp=pp, attention_dp=dp, ep=dp), replicas), True
    if tp * dp != moe_tp * moe_ep:
        raise InputError(
            f"widths are inconsistent: tp {tp} × attention_dp {dp} is not moe_tp {moe_tp} × moe_ep {moe_ep}"
        )
    return Pool(Layout(tp=tp, pp=pp, attention_dp=dp, ep=moe_ep), replicas), False
