"""Published language-model inference: static batches, first tokens, maximum load and MLPerf, all simulated."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ridgeline.errors import InputError, RidgelineError
from ridgeline.hardware import Device
from ridgeline.hardware import device as device_named
from ridgeline.sim.serving.anatomy import Anatomy, anatomy, dense_of
from ridgeline.sim.serving.deployment import KV_BYTES, Layout, Precision, cache_tokens, precision
from ridgeline.sim.serving.engine import Engine, engine
from ridgeline.sim.serving.metrics import Metrics, metrics
from ridgeline.sim.serving.simulate import Deployment, Pool, simulate
from ridgeline.sim.serving.worker import Speculation
from ridgeline.sim.serving.workload import Workload, static
from ridgeline.validation.publications import Fact, publications
from ridgeline.validation.serving_ttft_tpot import LAYOUTS
from ridgeline.validation.spelling import catalog_name
from ridgeline.validation.verdict import Judged, Row, Unused


def _tables(table: str, **facts: Fact) -> dict[str, Any]:
    return publications("inference_llm")[table].choose(facts)


@dataclass(frozen=True, slots=True)
class Case:
    """One published number: how to simulate it, and the seconds it stands for."""

    deployment: Deployment
    workload: Workload
    measured_s: float
    metric: str  # total, ttft, decode, token (seconds an output token) or sample
    what: str


def judge(rows: Sequence[Row]) -> Iterator[Judged | Unused]:
    for row in rows:
        source = source_of(row)
        try:
            yield judged(row, case_of(row), source)
        except (RidgelineError, ValueError) as error:
            yield Unused(row=row.line, source=source, why=str(error))


def source_of(row: Row) -> str:
    """Who published it, and with what."""
    text = row.text("source")
    if known := _tables("source", source=text):
        return str(known["source"])
    found = re.search(r"TensorRT-LLM (?:\(post )?v[\d.]+", row.text("engine"))
    return found.group().replace("(post ", "after ") if found else text[:40]


def judged(row: Row, case: Case, source: str) -> Judged:
    served = simulate(case.deployment, case.workload)
    found = metrics(served)
    predicted = seconds_of(case, found)
    low, high = np.exp(-found.width), np.exp(found.width)
    return Judged(
        row=row.line, key=f"{row.text('config_id')}/{row.text('metric')}", source=source, what=case.what,
        metric=row.text("metric"), unit="s", measured=case.measured_s, predicted=predicted, low=predicted * low,
        high=predicted * high,
    )  # fmt: skip


def seconds_of(case: Case, found: Metrics) -> float:
    """The simulated counterpart of the published number."""
    if case.metric == "total":
        return found.wall_s
    if case.metric == "ttft":
        return found.ttft_s.mean
    if case.metric == "decode":
        return found.tpot_s.mean
    return 1 / (found.output_tokens_per_s if case.metric == "token" else found.requests_per_s)


def case_of(row: Row) -> Case:
    scenario, metric = row.text("scenario"), row.text("metric")
    if "forward pass" in scenario:
        raise InputError("a forward pass without a serving engine: compare it with `ridgeline predict`")
    if "trace replay" in scenario:
        raise InputError("the request trace that was replayed is not in the file")
    made, device = model_of(row), device_of(row)
    if "MLPerf" in scenario:
        return _mlperf(row, made, device)
    used, formats = engine_of(row, device), formats_of(row, made, device)
    layout, replicas = layout_of(row)
    said = _tables("benched", scenario=row.text("scenario"), engine=used.name, isl=row.number("isl") or 0,
                   osl=row.number("osl") or 0, sparse=made.is_sparse, attention_dp=layout.attention_dp,
                   ep=layout.ep)  # fmt: skip
    used = replace(used, memory_frac=said.get("memory_frac", used.memory_frac))
    layout = LAYOUTS[said.get("layout", "as recorded")](layout)
    if used.name == "trtllm-engine":  # compiled engines attend to everything unless a window is asked for
        layers = tuple(replace(group, mixer=replace(group.mixer, window=0)) for group in made.layers)
        made = replace(made, layers=layers)
    deployment = Deployment(made, device, formats, used, Pool(layout, replicas))
    what = f"{row.text('model')} on {layout.num_devices} × {device.name}, {row.text('isl')} in {row.text('osl')} out"
    if "max-load" in scenario:
        work = _queued(row, deployment, said.get("requests"))
        return Case(_offline(deployment), work, _per_token(row, deployment), "token", f"{what}, maximum load")
    return _static(row, deployment, metric, what)


def _static(row: Row, deployment: Deployment, metric: str, what: str) -> Case:
    batch, isl = _number(row, "batch"), _number(row, "isl")
    osl = int(row.number("osl") or (1 if metric == "ttft" else 0))
    value = _number(row, "value")
    if not osl:
        raise InputError("the number of output tokens is not given")
    work = static(batch, isl, osl)
    what = f"{what}, batch {batch}"
    made = _offline(deployment)
    if metric in ("total_latency", "ttft", "decode_latency_per_token"):
        kind = {"total_latency": "total", "ttft": "ttft"}.get(metric, "decode")
        return Case(made, work, value / 1e3, kind, what)
    if metric == "output_tokens_per_s":
        return Case(made, work, _per_token(row, deployment), "token", what)
    raise InputError(f"metric {metric!r} is not one a static batch is judged by")


def _number(row: Row, name: str) -> int:
    value = row.number(name)
    if value is None or value < 1:
        raise InputError(f"{name} is {row.text(name)!r}, not a number")
    return int(value)


def _per_token(row: Row, deployment: Deployment) -> float:
    """Seconds of the whole deployment for an output token."""
    rate = row.number("value")
    if not rate or rate <= 0:
        raise InputError("no throughput is given")
    per_device = "gpu" in row.text("unit").lower()
    return 1 / (rate * (deployment.num_devices if per_device else 1))


def _offline(deployment: Deployment) -> Deployment:
    """Without the front end of a server: batches are handed over in memory."""
    coef = {**deployment.engine.coef, "request_s": 0.0, "token_s": 0.0}
    return replace(deployment, engine=replace(deployment.engine, coef=coef))


def _queued(row: Row, deployment: Deployment, usual: int | None) -> Workload:
    """Everything waits from the start; as many requests as the source says, or enough to fill the cache thrice."""
    isl, osl = _number(row, "isl"), _number(row, "osl")
    found = re.search(r"num_requests (\d+)", row.text("notes"))
    kept = cache_tokens(
        deployment.anatomy, deployment.pool.layout, deployment.precision, deployment.device,
        deployment.engine.memory_frac, deployment.engine.counts_free, 0,
    )  # fmt: skip
    fits = max(1, min(deployment.engine.max_sequences, kept // (isl + osl)))
    said = int(found.group(1)) if found else usual
    return static(min(said or max(64, 3 * fits), 3000), isl, osl)  # past 3,000, throughput no longer changes


def model_of(row: Row) -> Anatomy:
    """By name where the zoo has it, else from the row's own figures."""
    name = row.text("model")
    try:
        return anatomy(name)
    except RidgelineError:
        pass
    sizes = {key: row.number(key) for key in ("layers", "hidden", "heads", "ffn", "vocab")}
    if any(value is None or value < 1 for value in sizes.values()):
        raise InputError(f"model {name!r} is not in the zoo and its row lacks a size")
    whole = {key: int(value or 0) for key, value in sizes.items()}
    kv = int(row.number("kv_heads") or whole["heads"])
    if kv < 1 or whole["heads"] % kv or whole["hidden"] < whole["heads"]:
        raise InputError(f"{whole['heads']} heads, {kv} of keys and a width of {whole['hidden']} make no model")
    gated = _tables("model", model=name.lower().replace(" ", "-"))["gated"]
    return dense_of(name, kv_heads=kv, gated=gated, source=row.text("source"), **whole)


def device_of(row: Row) -> Device:
    """The device a description names."""
    text = row.text("device")
    name = catalog_name(text, "inference_llm")
    if name is None:
        raise InputError(f"device {text!r} has no file")
    found = device_named(name)
    if found.kind != "gpu" or found.vendor.upper() != "NVIDIA":
        raise InputError(f"no serving kernels were measured on anything like {text}")
    return found


def engine_of(row: Row, device: Device) -> Engine:
    said = _tables("engine", engine=row.text("engine").lower())
    if "engine" not in said:
        raise InputError(said.get("why", f"engine {row.text('engine')!r} is not modeled"))
    return engine(said["engine"], device)


def formats_of(row: Row, made: Anatomy, device: Device) -> Precision:
    written, kv = row.text("precision").lower(), row.text("kv_precision").lower()
    wide = "fp8" not in {dtype for unit, dtype in device.peaks if unit == "tensor"}
    latent = made.is_sparse and made.layers[-1].mixer.latent is not None
    said = _tables("format", model=made.name, blackwell=device.arch == "blackwell", written=written,
                   fp8_device=not wide, latent=latent)  # fmt: skip
    name, kv = said.get("format", written), kv or said.get("kv", "")
    narrow = name in ("fp8", "fp8_block", "nvfp4") and not wide
    cache = kv if kv in KV_BYTES else "fp8" if narrow else ""
    return precision(name, cache, sparse=made.is_sparse)


def layout_of(row: Row) -> tuple[Layout, int]:
    tp, pp, num = (int(row.number(name) or 1) for name in ("tp", "pp", "num_devices"))
    label = re.search(r"(T?D?)EP(\d+)", row.text("notes"))
    if label and label.group(1) == "D":
        width = int(label.group(2))
        return Layout(tp=1, pp=pp, attention_dp=width, ep=width), max(1, num // (width * pp))
    ep = int(label.group(2)) if label and label.group(1) == "T" else 1
    return Layout(tp=tp, pp=pp, ep=ep), max(1, num // (tp * pp))


def _mlperf(row: Row, made: Anatomy, device: Device) -> Case:
    scenario = row.text("scenario")
    said = _tables("mlperf", scenario=scenario, config_id=row.text("config_id"))
    if "isl" not in said or not scenario.startswith(("MLPerf Offline", "MLPerf Server")):
        raise InputError("an interactive or single-stream scenario, shaped by latency limits that are not given")
    isl, osl = said["isl"], said["osl"]
    formats = formats_of(row, made, device)
    if device.arch == "blackwell" and not row.text("precision"):
        formats = precision("nvfp4", "fp8", sparse=made.is_sparse)
    latent = any(group.mixer.latent for group in made.layers)
    used = engine("trtllm", device) if latent else engine_of(row, device)  # no compiled engine knew latent attention
    num = _number(row, "num_devices")
    layout = _narrowest(made, device, formats, used, num)
    if latent and made.is_sparse:
        layout = LAYOUTS["attention groups"](layout)
    beams = Speculation(said["beams"] - 1, 0.0, 0.0, is_beams=True) if "beams" in said else None
    deployment = Deployment(made, device, formats, used, Pool(layout, 1), speculation=beams)
    # Lengths spread as in a data set: evenly from half to one and a half times the mean.
    rng = np.random.default_rng(0)
    read, write = (rng.integers(max(1, m // 2), m + m // 2 + 1, size=2000, dtype=np.int64) for m in (isl, osl))
    if "padded_osl" in said:
        read, write = np.full_like(read, read.max()), np.full_like(write, said["padded_osl"])
    work = Workload(read, write, np.zeros(2000), title="all at once")
    value, unit = row.number("value"), row.text("unit").lower()
    if not value or value <= 0:
        raise InputError("no rate is given")
    if unit.startswith("token") and value < 1000 and osl > 1 and "Server" in row.text("scenario"):
        raise InputError("a rate in tokens that can only be one in requests: the unit is uncertain")
    mlperf_rate = value / osl if unit.startswith("token") else value
    rate = mlperf_rate / (num / layout.num_devices) / said.get("offline_frac", 1.0)
    what = f"{row.text('model')} on {num} × {device.name}, {scenario.partition(';')[0]}"
    return Case(_offline(deployment), work, 1 / rate, "sample", what)


def _narrowest(made: Anatomy, device: Device, formats: Precision, used: Engine, num: int) -> Layout:
    """Submitters run as many replicas as fit: the least width with room for a good batch."""
    for tp in (1, 2, 4, 8, 16):
        if tp <= num:
            try:
                room = cache_tokens(made, Layout(tp=tp), formats, device, used.memory_frac, used.counts_free, 0)
            except InputError:
                continue
            if room >= 100_000:
                return Layout(tp=tp)
    raise InputError(f"{made.name} does not fit {num} × {device.name} in {formats.name}")
