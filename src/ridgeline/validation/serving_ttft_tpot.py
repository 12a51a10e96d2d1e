"""Published serving runs as deployments and workloads: what a row says, and how its run was set up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.errors import InputError, RidgelineError
from ridgeline.hardware import Device
from ridgeline.hardware import device as device_named
from ridgeline.sim.serving.anatomy import Anatomy, Layers, anatomy
from ridgeline.sim.serving.deployment import Layout, precision
from ridgeline.sim.serving.engine import Engine, engine
from ridgeline.sim.serving.metrics import metrics
from ridgeline.sim.serving.simulate import Deployment, Pool, simulate
from ridgeline.sim.serving.worker import Speculation
from ridgeline.sim.serving.workload import Workload, closed
from ridgeline.validation.verdict import Judged, Row, Unused

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
    ttft_s, tpot_s = float(row["silicon_ttft_ms"]) / 1e3, float(row["silicon_tpot_ms"]) / 1e3
    if not (ttft_s > 0 and tpot_s > 0):
        raise InputError("no measured latency")
    run = _launch(row, made, device, _format(row, made))
    refuse_unknown_load(run, row)
    pool, repaired = _pool(row, "decode_" if run.disaggregated else "")
    if not run.disaggregated and pool.num_devices > ONE_HOST:
        raise InputError(f"{pool.num_devices} devices in one aggregated instance: widths are inconsistent")
    layout = as_launched(run, pool.layout)
    prefill, bent = _pool(row, "prefill_") if run.disaggregated else (None, False)
    recipe = recipe_of(run, device, layout)
    formats = precision(run.form, recipe.kv, sparse=made.is_sparse)
    deployment = Deployment(
        _states(run), device, formats, recipe.engine, replace(pool, layout=layout), prefill, recipe.speculation
    )
    repaired = repaired or bent or layout != pool.layout
    work = closed(run.concurrency, run.isl, run.osl, ratio=LENGTH_RATIO)
    group = f"{row['mode']}/{recipe.engine.name}/{device.arch}"
    return Run(row["id"], deployment, work, ttft_s, tpot_s, row["mode"], group, repaired, row)


def refuse_unknown_load(run: Launch, row: Mapping[str, str]) -> None:
    """From 21 November to 8 December 2025 the script for gpt-oss on H100 hosts with Docker kept 512 requests in flight
    whatever was asked, and let as many run as was asked, which the file does not hold."""
    old = run.backend == "vllm" and (run.is_early or run.version.startswith("0.11."))
    if old and run.concurrency == 512 and run.name.startswith("gpt-oss") and row["system"] == "h100_sxm":
        raise InputError("its launch script kept 512 in flight whatever was asked, and how many ran is not in the file")


def _states(run: Launch) -> Anatomy:
    """Quantized hybrids were served with recurrent states in 16 bits (--mamba-ssm-dtype)."""
    if run.form == "bf16" or not any(group.mixer.recurrence for group in run.anatomy.layers):
        return run.anatomy
    return replace(run.anatomy, layers=tuple(_short_states(group) for group in run.anatomy.layers))


def _short_states(group: Layers) -> Layers:
    kept = group.mixer.recurrence
    return replace(group, mixer=replace(group.mixer, recurrence=replace(kept, state_itemsize=2))) if kept else group


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


@dataclass(frozen=True, slots=True)
class Launch:
    """What decides a launch script's settings: the row's own words, read once."""

    backend: str
    version: str
    anatomy: Anatomy
    new: bool  # Blackwell
    form: str  # of the experts, or of everything
    isl: int
    osl: int
    concurrency: int
    disaggregated: bool
    said_ep: int  # expert parallelism as the file records it

    @property
    def name(self) -> str:
        return self.anatomy.name

    @property
    def lengths(self) -> str:
        return f"{self.isl // 1024}k{self.osl // 1024}k"

    @property
    def is_early(self) -> bool:
        """Of October and November 2025, when widths beyond tensor parallelism were set by the scripts, unrecorded."""
        return not self.version and not self.disaggregated

    @property
    def is_deepseek(self) -> bool:
        return self.name.startswith("deepseek")


def _launch(row: Mapping[str, str], made: Anatomy, device: Device, form: str) -> Launch:
    return Launch(
        row["backend"], row.get("backend_version") or "", made, device.arch == "blackwell", form, int(row["isl"]),
        int(row["osl"]), int(float(row["concurrency"])), row["mode"] == "disagg",
        int(float(row.get("moe_ep_size") or 1)),
    )  # fmt: skip


def as_launched(run: Launch, layout: Layout) -> Layout:
    """The widths a run was started with where its launch script chose others than the file records."""
    if run.disaggregated:
        return layout
    if run.backend == "vllm":
        return _vllm_layout(run, layout)
    plain = layout.attention_dp == layout.ep == 1 and run.anatomy.is_sparse
    if not (plain and run.is_early):
        return layout
    if run.backend == "sglang":
        return replace(layout, ep=layout.tp) if run.form == "nvfp4" else layout  # --enable-ep-moe
    return _early_trtllm_layout(run, layout)


def _vllm_layout(run: Launch, layout: Layout) -> Layout:
    if layout.attention_dp > 1:  # recorded as tp T, attention_dp T, moe_ep T²: scripts that do not split requests
        layout = Layout(tp=layout.attention_dp * layout.tp, pp=layout.pp, ep=layout.ep)
    if run.name.startswith("kimi"):
        return replace(layout, ep=1)  # the script passes tensor parallelism alone
    if run.name.startswith("minimax") and (run.version.startswith("0.17.") if run.new else layout.tp == 8):
        return replace(layout, ep=layout.tp)  # the script's test for expert parallelism was always true
    return layout


_SPLIT_ABOVE = {
    ("nvfp4", True): {"1k1k": 255, "1k8k": 255, "8k1k": 32},
    ("fp8_block", True): {"1k1k": 32, "1k8k": 64, "8k1k": 64},
    ("fp8_block", False): {"1k1k": 64, "1k8k": 64, "8k1k": 32},
}
"""Requests in flight above which DeepSeek under TensorRT-LLM 1.1 split them over attention groups, by (format, new)."""


def _early_trtllm_layout(run: Launch, layout: Layout) -> Layout:
    tp = layout.tp
    if run.is_deepseek:
        if run.concurrency > _SPLIT_ABOVE.get((run.form, run.new), {}).get(run.lengths, 10**9):
            return Layout(tp=1, pp=layout.pp, attention_dp=tp, ep=tp)
        alone = {4: {"1k1k": 32, "1k8k": 32}, 8: {"1k1k": 8, "1k8k": 16}}.get(tp, {}).get(run.lengths, 10**9)
        return layout if run.form == "nvfp4" and run.concurrency <= alone else replace(layout, ep=tp)
    if run.name.startswith("gpt-oss"):
        if run.new and run.concurrency >= 256:
            return Layout(tp=1, pp=layout.pp, attention_dp=tp, ep=tp)
        by_expert = tp in (4, 8) and run.isl == 1024 and run.concurrency >= 16 if run.new else True
        return replace(layout, ep=tp) if by_expert else layout
    return layout


def recipe_of(run: Launch, device: Device, layout: Layout) -> Recipe:
    """Engine settings by the launch scripts (SemiAnalysisAI/InferenceX, benchmarks/, October 2025 to April 2026)."""
    base = engine(generation(run), device)
    draft = _speculation(run, layout)
    kv, settings = {"vllm": _vllm, "sglang": _sglang}.get(run.backend, _trtllm)(run, layout, draft)
    if base.name == "sglang-0.5.6" and run.form in COLD_S:
        settings |= COLD_S[run.form]
    return Recipe(base.change(**settings), kv, draft)


COLD_S = {"nvfp4": {"cold_s": 3, "cold_chunk_s": 65}, "fp8_block": {"cold_chunk_s": 16}}
"""SGLang up to 0.5.6 on Blackwell; docs/design/serving.md."""


def generation(run: Launch) -> str:
    """The generation of an engine by its version; runs without one are of the first two months."""
    if run.backend == "trtllm":
        return "trtllm-1.1" if run.is_early or run.version.startswith(("1.1.0rc", "gpt-oss-dev")) else "trtllm"
    if run.backend == "vllm":
        if run.is_early or run.version.startswith(("0.10.", "0.11.")):
            return "vllm-0.11"
        return "vllm-0.17" if run.version.startswith(("0.13.", "0.14.", "0.15.", "0.16.", "0.17.")) else "vllm"
    old = run.is_early or run.version.startswith(("0.5.2", "0.5.3", "0.5.4", "0.5.5", "0.5.6"))
    return "sglang-0.5.6" if run.backend == "sglang" and old else run.backend


def _speculation(run: Launch, layout: Layout) -> Speculation | None:
    """Runs that drafted tokens: the file does not say so, but their images, widths or loads were used for nothing
    else. Some DeepSeek runs of SGLang 0.5.9 in fp8 remain that carry no such mark."""
    drafted, draft = False, 1 if layout.attention_dp > 1 else 3
    if run.backend == "trtllm" and run.is_deepseek:
        drafted = run.version == "1.2.0rc6.post3" or (run.version == "1.1.0rc2.post2" and run.name.endswith("r1"))
    if run.backend == "sglang" and run.new and run.form == "fp8_block" and not run.disaggregated:
        if run.name.startswith("qwen3.5"):
            drafted = (layout.tp, layout.ep) == (4, 1)
        elif run.is_deepseek and run.version == "0.5.9" and layout.tp == 8:
            drafted, draft = run.concurrency > (4 if run.isl == 8192 else 64), 2
    return Speculation(draft, ACCEPT_FRAC) if drafted else None


ACCEPT_FRAC = 0.62


def _vllm(run: Launch, layout: Layout, _: Speculation | None) -> tuple[str, dict[str, Any]]:
    name = run.name
    settings: dict[str, Any] = {}
    kimi = name.startswith("kimi") and run.form == "nvfp4"
    tuned = run.new and name.startswith("minimax") and not run.version.startswith("0.17.")  # from April 2026 on
    tuned |= kimi and run.said_ep == 1 and layout.tp == 4
    if tuned:
        settings |= {"chunk_tokens": max(2048, 2 * run.isl), "graph_tokens": 2048}
    if name.startswith("gpt-oss"):
        settings["graph_tokens"] = 2048  # max-cudagraph-capture-size
    if run.new and name.startswith("llama"):
        settings["graphed_prompts"] = False
    if name.startswith("minimax") and not run.new and layout.tp == 4 and layout.ep == 4:
        settings["max_sequences"] = 256
    if run.new and name.startswith(("llama", "gpt-oss")):
        settings["max_sequences"] = 512
    if run.form == "int4_wo" or (name.startswith("minimax") and not tuned and layout.ep != 4):
        settings["memory_frac"] = 0.95
    late_oss = run.new and name.startswith("gpt-oss") and not run.is_early
    others = not name.startswith(("gpt-oss", "kimi", "minimax"))
    return "fp8" if tuned or kimi or late_oss or others else "bf16", settings


def _sglang(run: Launch, layout: Layout, draft: Speculation | None) -> tuple[str, dict[str, Any]]:
    name, new = run.name, run.new
    kv = "fp8" if new or name.startswith("qwen3.5") else "bf16"
    chunk, most = 32768, 128
    if name.startswith("glm"):
        chunk, most = (32768 if new else 8192), 1024
    elif name.startswith("qwen3.5"):
        chunk, most = (32768 if new else 16384), (run.concurrency if draft else 128)
    elif run.is_deepseek and run.form == "nvfp4":
        chunk, most = 16384, 256
    elif run.is_deepseek and not new:
        most = 512 if run.lengths == "1k1k" else 256
    elif run.is_deepseek and draft:
        chunk, most = 16384, 512
    elif run.is_deepseek and layout.tp == 4:
        chunk, most = 8192, 32
    else:
        most = 1024 if not run.is_deepseek else most
    settings: dict[str, Any] = {"chunk_tokens": chunk, "max_sequences": 1024 if run.disaggregated else most}
    if new and not run.disaggregated and not (name.startswith("glm") and run.form != "nvfp4"):
        short = run.concurrency < 16 or name.startswith("glm") or chunk == 8192
        settings["poll_steps"] = 10 if short else 30
    if draft and name.startswith("qwen3.5"):
        settings["ahead"] = False  # drafts without SGLANG_ENABLE_SPEC_V2
    return kv, settings


def _trtllm(run: Launch, layout: Layout, draft: Speculation | None) -> tuple[str, dict[str, Any]]:
    """Token budgets, and how long prompts are held back for company."""
    name, groups = run.name, layout.attention_dp
    if name.startswith("llama"):
        held = {"hold_steps": 20} if run.lengths == "1k1k" and layout.tp < 8 else {}
        return "fp8", {"chunk_tokens": 16384, **held}
    if name.startswith("gpt-oss"):
        held = {"hold_steps": 50, "hold_prompts": all_served(groups)} if groups > 1 else {}
        return "fp8" if run.new and not run.is_early else "bf16", {"chunk_tokens": 20000, "max_sequences": 512, **held}
    return "fp8", _trtllm_deepseek(run, layout, draft)


def _trtllm_deepseek(run: Launch, layout: Layout, draft: Speculation | None) -> dict[str, Any]:
    """DeepSeek's budgets, and graphs of pieces, which leave attention and drafts to the host."""
    groups, conc = layout.attention_dp, run.concurrency
    settings: dict[str, Any] = {"hold_steps": 60, "hold_prompts": all_served(groups)} if groups > 1 else {}
    later = run.version.startswith("1.2.0rc6")
    settings["compiled"] = later and groups == 1 and _in_pieces(run, layout, draft)
    if draft and not run.disaggregated:
        share = (8 if run.form == "fp8_block" else 4) if later else groups
        batch = max(1, conc // share) if groups > 1 else conc
        return settings | {"max_sequences": batch, "chunk_tokens": _rounded((draft.draft + 1) * batch + run.isl)}
    settings["chunk_tokens"] = max(8192 if later or run.disaggregated else 0, _rounded(conc + run.isl))
    if run.version == "1.2.0rc6.post2" and run.form == "fp8_block" and run.lengths == "1k1k" and conc >= 64:
        settings["hold_steps"] = 40
    return settings


def all_served(groups: int) -> int:
    """Requests that have to finish, in any order, until every attention group has room for a new one."""
    return round(groups * sum(1 / k for k in range(1, groups + 1)))


def _in_pieces(run: Launch, layout: Layout, draft: Speculation | None) -> bool:
    """Whether the scripts of February 2026 turned graphs of pieces on."""
    conc, lengths = run.concurrency, run.lengths
    if run.form == "fp8_block":
        return conc > {"1k1k": 4, "1k8k": 8}.get(lengths, 16) if draft else conc >= (128 if lengths == "1k8k" else 64)
    if draft:
        return conc in {"1k1k": (32, 64, 128), "1k8k": (64,)}.get(lengths, ())
    return lengths == "1k1k" and layout.tp == layout.ep == 8


def _rounded(tokens: int) -> int:
    return (tokens + 64 + 63) // 64 * 64
