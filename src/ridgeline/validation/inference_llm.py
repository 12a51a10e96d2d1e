"""Published language-model inference: static batches, first tokens, maximum load and MLPerf, all simulated."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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
from ridgeline.validation.spelling import catalog_name
from ridgeline.validation.verdict import Judged, Row, Unused

UNGATED = ("gpt-", "gpt3", "gpt2", "opt", "falcon", "megatron", "gpt_j", "gptj")
MOST_REQUESTS = 3000
"""Requests simulated of a run at maximum load: past this, throughput no longer changes."""
BENCHED = {  # requests by input and output tokens, as TensorRT-LLM's performance overview states them since 1.0
    (128, 2048): 3000, (128, 4096): 1500, (1000, 2000): 1500, (2048, 128): 3000, (2048, 2048): 1500, (5000, 500): 1500,
    (1000, 1000): 3000, (500, 2000): 3000, (20000, 2000): 1000, (1024, 1024): 3000, (8192, 1024): 1500,
    (1024, 8192): 1500, (32768, 1024): 1000, (1024, 32768): 1000,
}  # fmt: skip
BENCHED_MEMORY_FRAC = 0.9
"""Of the free memory, for the cache: the tool's default, which the same document raised to 0.95 in many cases."""
SERVER_FRAC = 0.92
"""MLPerf's server rate over the offline rate of the same system, the median of published pairs."""
BEAMS = 4
"""MLPerf's GPT-J searches this many beams: as many sequences over one prompt."""
WITHOUT_INFLIGHT, LONGEST_SUMMARY = ("mlpinf3.0-", "mlpinf3.1-"), 128
"""Rounds whose submissions batched statically: prompts padded to the longest, outputs as long as they may be."""

# (mean input, mean output) tokens of MLPerf's data sets, by a word of the scenario; recalled from its task descriptions
DATASETS = {
    "gptj": (870, 69), "llama2-70b": (294, 295), "mixtral": (275, 145), "llama3.1-405b": (9428, 684),
    "llama3.1-8b": (778, 73), "deepseek-r1": (800, 3880),
}  # fmt: skip


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
    for word, name in (
        ("FasterTransformer", "FasterTransformer"), ("fastertransformer", "FasterTransformer"), ("mlc", "MLPerf"),
        ("mlperf", "MLPerf"), ("LLMServingSim", "LLMServingSim"), ("NeuSight", "NeuSight"),
    ):  # fmt: skip
        if word in text:
            return name
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
    if "max-load" in scenario and used.name == "trtllm":
        used, layout = replace(used, memory_frac=BENCHED_MEMORY_FRAC), _benched(made, layout)
    if used.name == "trtllm-engine":
        made = _unwindowed(made)
    deployment = Deployment(made, device, formats, used, Pool(layout, replicas))
    what = f"{row.text('model')} on {layout.num_devices} × {device.name}, {row.text('isl')} in {row.text('osl')} out"
    if "max-load" in scenario:
        work = _queued(row, deployment)
        return Case(_offline(deployment), work, _per_token(row, deployment), "token", f"{what}, maximum load")
    return _static(row, deployment, metric, what)


def _unwindowed(made: Anatomy) -> Anatomy:
    """Compiled engines attend to everything unless a window is asked for when they run."""
    layers = tuple(replace(group, mixer=replace(group.mixer, window=0)) for group in made.layers)
    return replace(made, layers=layers)


def _benched(made: Anatomy, layout: Layout) -> Layout:
    """As the performance overview ran what it labels with a tensor width alone: whole experts on a rank and attention
    data parallel."""
    if not made.is_sparse or layout.attention_dp > 1 or layout.ep > 1:
        return layout
    return Layout(tp=1, pp=layout.pp, attention_dp=layout.tp, ep=layout.tp)


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


def _queued(row: Row, deployment: Deployment) -> Workload:
    """Everything waits from the start; as many requests as the source says, or enough to fill the cache thrice."""
    isl, osl = _number(row, "isl"), _number(row, "osl")
    found = re.search(r"num_requests (\d+)", row.text("notes"))
    room = cache_tokens(
        deployment.anatomy, deployment.pool.layout, deployment.precision, deployment.device,
        deployment.engine.memory_frac, deployment.engine.counts_free, 0,
    )  # fmt: skip
    fits = max(1, min(deployment.engine.max_sequences, room // (isl + osl)))
    said = int(found.group(1)) if found else BENCHED.get((isl, osl)) if deployment.engine.name == "trtllm" else None
    return static(min(said or max(64, 3 * fits), MOST_REQUESTS), isl, osl)


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
    gated = not name.lower().replace(" ", "-").startswith(UNGATED)
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
    text = row.text("engine").lower()
    if "megatron" in text:
        raise InputError("Megatron-LM's own generation loop is no serving engine, and how it batches is not described")
    if "fastertransformer" in text:
        return engine("fastertransformer", device)
    if "pytorch backend" in text:
        return engine("trtllm", device)
    if re.search(r"tensorrt|trt.?llm", text):
        return engine("trtllm-engine", device)
    if "vllm" in text:
        return engine("vllm", device)
    raise InputError(f"engine {row.text('engine')!r} is not modeled")


_SPELLED = {"bfloat16": "bf16", "half": "fp16", "float16": "fp16", "float32": "fp32", "float8": "fp8", "mxfp8": "fp8"}


def formats_of(row: Row, made: Anatomy, device: Device) -> Precision:
    name = _SPELLED.get(row.text("precision").lower(), row.text("precision").lower())
    kv = row.text("kv_precision").lower()
    if made.name.startswith("gpt-oss"):  # its cache is in eight bits on Blackwell, and left alone on Hopper
        name, kv = "mxfp4", kv or ("fp8" if device.arch == "blackwell" else "")
    name = {"fp4": "nvfp4", "": "fp8" if "fp8" in _dtypes(device) else "fp16"}.get(name, name)
    if name == "fp8" and made.is_sparse and made.layers[-1].mixer.latent:
        name = "fp8_block"
    narrow = name in ("fp8", "fp8_block", "nvfp4") and "fp8" in _dtypes(device)
    cache = kv if kv in KV_BYTES else "fp8" if narrow else ""
    return precision(name, cache, sparse=made.is_sparse)


def _dtypes(device: Device) -> set[str]:
    return {dtype for unit, dtype in device.peaks if unit == "tensor"}


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
    word = next((word for word in DATASETS if word in scenario), None)
    if word is None or not scenario.startswith(("MLPerf Offline", "MLPerf Server")):
        raise InputError("an interactive or single-stream scenario, shaped by latency limits that are not given")
    isl, osl = DATASETS[word]
    formats = formats_of(row, made, device)
    if device.arch == "blackwell" and not row.text("precision"):
        formats = precision("nvfp4", "fp8", sparse=made.is_sparse)
    latent = any(group.mixer.latent for group in made.layers)
    used = engine("trtllm", device) if latent else engine_of(row, device)  # no compiled engine knew latent attention
    num = _number(row, "num_devices")
    layout = _narrowest(made, device, formats, used, num)
    if latent:
        layout = _benched(made, layout)
    beams = Speculation(BEAMS - 1, 0.0, 0.0, is_beams=True) if word == "gptj" else None
    deployment = Deployment(made, device, formats, used, Pool(layout, 1), speculation=beams)
    work = _spread_lengths(isl, osl, 2000)
    if word == "gptj" and row.text("config_id").startswith(WITHOUT_INFLIGHT):
        work = replace(work, isl=np.full_like(work.isl, work.isl.max()), osl=np.full_like(work.osl, LONGEST_SUMMARY))
    rate = _mlperf_rate(row, osl) / (num / layout.num_devices) / (SERVER_FRAC if "Server" in scenario else 1.0)
    what = f"{row.text('model')} on {num} × {device.name}, {scenario.partition(';')[0]}"
    return Case(_offline(deployment), work, 1 / rate, "sample", what)


def _mlperf_rate(row: Row, osl: int) -> float:
    value, unit = row.number("value"), row.text("unit").lower()
    if not value or value <= 0:
        raise InputError("no rate is given")
    if unit.startswith("token") and value < 1000 and osl > 1 and "Server" in row.text("scenario"):
        raise InputError("a rate in tokens that can only be one in requests: the unit is uncertain")
    return value / osl if unit.startswith("token") else value


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


def _spread_lengths(isl: int, osl: int, num: int) -> Workload:
    """Lengths spread as in a data set: evenly from half to one and a half times the mean."""
    rng = np.random.default_rng(0)
    read, made = (rng.integers(max(1, m // 2), m + m // 2 + 1, size=num, dtype=np.int64) for m in (isl, osl))
    return Workload(read, made, np.zeros(num), title="all at once")
