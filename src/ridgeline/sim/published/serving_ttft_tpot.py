"""Published serving runs as deployments and workloads: what a row says, and how its run was set up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.errors import InputError, RidgelineError
from ridgeline.hardware import Device
from ridgeline.hardware import device as device_named
from ridgeline.sim.published.verdict import Judged, Row, Unused
from ridgeline.sim.serving.anatomy import Anatomy, anatomy
from ridgeline.sim.serving.deployment import Layout, precision
from ridgeline.sim.serving.engine import Engine, engine
from ridgeline.sim.serving.metrics import metrics
from ridgeline.sim.serving.simulate import Deployment, Pool, simulate
from ridgeline.sim.serving.worker import Speculation
from ridgeline.sim.serving.workload import Workload, closed

SYSTEMS = {
    "a100_sxm": "a100-sxm-80gb", "h100_sxm": "h100-sxm", "h200_sxm": "h200", "b200_sxm": "b200", "gb200": "gb200",
    "l40s": "l40s", "b300_sxm": "b300", "gb300": "gb300",
}  # fmt: skip
ONE_HOST = 8
"""Devices of the hosts on which the aggregated runs were made; more is the total of several instances."""
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
LOAD_RATIO, TPOT_RATIO, TTFT_RATIO, WITNESSES = 4, 1.25, 1.5, 2


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
            tpots, ttfts = _against(run, runs, 2, TPOT_RATIO), _against(run, runs, 1, TTFT_RATIO)
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


def run_of_row(row: Mapping[str, str]) -> Run:
    if row["system"] not in SYSTEMS:
        raise InputError(f"unknown system {row['system']!r}")
    made, device = anatomy(row["model_path"]), device_named(SYSTEMS[row["system"]])
    concurrency, isl, osl = int(float(row["concurrency"])), int(row["isl"]), int(row["osl"])
    ttft_s, tpot_s = float(row["silicon_ttft_ms"]) / 1e3, float(row["silicon_tpot_ms"]) / 1e3
    if not (ttft_s > 0 and tpot_s > 0):
        raise InputError("no measured latency")
    disaggregated = row["mode"] == "disagg"
    recipe = recipe_of(row["backend"], made, device, row, concurrency, isl, disaggregated)
    form = _format(row, made)
    formats = precision(form, recipe.kv, sparse=made.is_sparse)
    if disaggregated:
        pool, repaired = _pool(row, "decode_")
        prefill, bent = _pool(row, "prefill_")
        deployment = Deployment(made, device, formats, recipe.engine, pool, prefill, recipe.speculation)
        repaired = repaired or bent
    else:
        pool, repaired = _pool(row, "")
        if pool.num_devices > ONE_HOST:
            raise InputError(f"{pool.num_devices} devices in one aggregated instance: widths are inconsistent")
        deployment = Deployment(made, device, formats, recipe.engine, pool, speculation=recipe.speculation)
    work = closed(concurrency, isl, osl, ratio=LENGTH_RATIO)
    group = f"{row['mode']}/{recipe.engine.name}/{device.arch}"
    return Run(row["id"], deployment, work, ttft_s, tpot_s, row["mode"], group, repaired, row)


def _format(row: Mapping[str, str], made: Anatomy) -> str:
    name = row.get("moe_quant_mode") or row.get("gemm_quant_mode") or row.get("precision") or "bf16"
    if made.name.startswith("gpt-oss"):
        return "mxfp4"  # the only four-bit checkpoint there is
    name = {"fp4": "nvfp4", "int4": "int4_wo", "bfloat16": "bf16"}.get(name, name)
    return "fp8_block" if name == "fp8" and made.is_sparse else name  # as the sparse models' fp8 checkpoints are


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
    if moe_ep == 1 and tp == 1 and dp == moe_tp > MOST_SLICES:
        return Pool(Layout(tp=1, pp=pp, attention_dp=dp, ep=dp), replicas), True
    if tp * dp != moe_tp * moe_ep:
        raise InputError(
            f"widths are inconsistent: tp {tp} × attention_dp {dp} is not moe_tp {moe_tp} × moe_ep {moe_ep}"
        )
    return Pool(Layout(tp=tp, pp=pp, attention_dp=dp, ep=moe_ep), replicas), False


MOST_SLICES = 16
"""An expert of 2,048 columns in blocks of 128: wider groups deal whole experts out."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the public launch scripts of these runs set an engine up."""

    engine: Engine
    kv: str
    speculation: Speculation | None = None


def recipe_of(
    backend: str, made: Anatomy, device: Device, row: Mapping[str, str], concurrency: int, isl: int, disaggregated: bool
) -> Recipe:
    """Engine settings by the launch scripts (SemiAnalysisAI/InferenceX, benchmarks/single_node, April 2026)."""
    base, new = engine(generation(backend, row), device), device.arch == "blackwell"
    name, four_bit = made.name, row.get("moe_quant_mode") == "nvfp4"
    settings: dict[str, Any] = {}
    if backend == "vllm":
        kv = "bf16" if name.startswith(("kimi", "minimax", "gpt-oss")) and not (new and name != "kimi-k2.5") else "fp8"
        kv = "fp8" if name.startswith("kimi") and four_bit else kv
        if new and name.startswith("minimax"):
            settings["chunk_tokens"] = max(2048, 2 * isl)
        if new and name.startswith("llama"):
            settings["graphed_prompts"] = False
    elif backend == "sglang":
        kv = "fp8" if new or name.startswith("qwen3.5") else "bf16"
        settings["chunk_tokens"] = _sglang_chunk(name, new, row)
        if four_bit and base.name == "sglang-0.5.6":
            settings["cold_chunk_s"] = COLD_CHUNK_S
        if new and not name.startswith("glm") and not disaggregated:
            settings["poll_steps"] = 30 if concurrency >= 16 else 10
    else:
        kv = "bf16" if name.startswith("gpt-oss") and not new else "fp8"
        settings |= _trtllm_settings(name, row, concurrency, isl)
    return Recipe(base.change(**settings), kv, _speculation(backend, made, row))


EARLY_VLLM = ("0.16.", "0.17.")
COLD_CHUNK_S = 65  # SGLang up to 0.5.6 with nvfp4 experts on Blackwell; docs/design/serving.md


def generation(backend: str, row: Mapping[str, str]) -> str:
    """The generation of an engine by its version. SGLang's runs without one and without expert parallelism are numbered
    far before those of 0.5.9, the others among them."""
    version = row.get("backend_version") or ""
    if backend == "trtllm" and version.startswith("1.1.0rc"):
        return "trtllm-1.1"
    if backend == "vllm" and version.startswith(EARLY_VLLM):
        return "vllm-0.17"
    if backend == "sglang" and row["mode"] == "agg":
        wide = float(row.get("moe_ep_size") or 1) > 1
        return "sglang-0.5.6" if version == "0.5.6" or not (version or wide) else backend
    return backend


def _speculation(backend: str, made: Anatomy, row: Mapping[str, str]) -> Speculation | None:
    """Runs that drafted tokens: the file does not say so, but their images and widths were used for nothing else."""
    version, new = row.get("backend_version") or "", row["system"].startswith(("b", "gb"))
    drafted = False
    if backend == "trtllm" and made.name.startswith("deepseek"):
        drafted = version == "1.2.0rc6.post3" or (version == "1.1.0rc2.post2" and row["model_path"].endswith("R1"))
    if backend == "sglang" and made.name.startswith("qwen3.5"):
        widths = (row.get("tp_size"), row.get("moe_ep_size"))
        drafted = new and row.get("precision") == "fp8" and [float(w or 0) for w in widths] == [4, 1]
    split = float(row.get("attention_dp_size") or 1) > 1
    return Speculation(1 if split else 3, ACCEPT_FRAC) if drafted else None


ACCEPT_FRAC = 0.62


def _trtllm_settings(name: str, row: Mapping[str, str], concurrency: int, isl: int) -> dict[str, Any]:
    """Token budgets, and how long prompts are held back for company."""
    groups, tp = int(float(row.get("attention_dp_size") or 1)), float(row.get("tp_size") or 8)
    if name.startswith("llama"):
        held = {"hold_steps": 20} if isl == 1024 and row["osl"] == "1024" and tp < 8 else {}
        return {"chunk_tokens": 16384, **held}
    if name.startswith("gpt-oss"):
        return {"chunk_tokens": 20000}
    held = {"hold_steps": 60, "hold_prompts": groups} if groups > 1 else {}
    return {"chunk_tokens": max(8192, math.ceil((concurrency + isl + 64) / 64) * 64), **held}


def _sglang_chunk(name: str, new: bool, row: Mapping[str, str]) -> int:
    if name.startswith("glm") and not new:
        return 8192
    if name.startswith("qwen3.5") and not new:
        return 16384
    return 16384 if row.get("moe_quant_mode") == "nvfp4" and name.startswith("deepseek") else 32768
