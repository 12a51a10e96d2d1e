"""Published inference of vision, language, speech and recommendation networks beside ours."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from ridgeline.errors import InputError, RidgelineError
from ridgeline.hardware import device
from ridgeline.validation.spelling import number_format, plain
from ridgeline.validation.verdict import Judged, Row, Unused
from ridgeline.validation.workload import Workload, answer, count_of, device_of

SQUAD_TOKENS = 180  # mean of the development set; the engines skip padding
KITS_WINDOWS = 58  # windows of 128³ in a KiTS19 case at half overlap, on average
PAIRS = 270  # user-item pairs in a sample of MLPerf's recommenders, on average
DENOISING = 20  # steps, each with and without the prompt
LARGE_CASE = 1.95  # the case at the 90th percentile against the mean one
TABLES_BYTES = 26e9  # of MLPerf's recommenders with one byte an element
SPEECH_FRAMES = 740  # mean of LibriSpeech dev-clean
FIRST_SAMPLE = 0.35  # what the first random length exceeds half of the longest by
SERVER_FRAC = 0.93
"""Load under a latency bound as a share of the offline rate: the median of NVIDIA's pairs of results."""
_NETWORKS: tuple[tuple[str, str, tuple[tuple[str, Any], ...], float], ...] = (
    (r"resnet50", "resnet50", (), 1.0),
    (r"resnext101", "resnext101-32x4d", (), 1.0),
    (r"seresnext101", "se-resnext101-32x4d", (), 1.0),
    (r"bert6b", "bert-6b", (("head", "none"), ("width", 4096), ("layers", 32)), 1.0),
    (r"bertbase", "bert-base", (("head", "none"),), 1.0),
    (r"bertlarge|bert99", "bert-large", (("head", "none"),), 1.0),
    (r"retinanet", "retinanet-x50", (), 1.0),
    (r"3dunet|unet3d", "unet3d", (), 1.0),
    (r"rnnt", "rnnt", (("seq", SPEECH_FRAMES),), 1.0),
    (r"dlrm(dcn)?v2", "dlrm-dcnv2", (), 1.0),
    (r"dlrm", "dlrm", (), 1.0),
    (r"sdxl|stablediffusionxl", "sdxl-unet", (), 1.0),
    (r"ncf|neuralcollaborative", "ncf", (), 1.0),
    (r"ssd300", "ssd300-r50", (), 1.0),
    (r"nnunet", "nnunet-3d", (), 1.0),
)
_DEFAULT_BATCH = {"resnet50": 2048, "bert-large": 512, "retinanet-x50": 16, "unet3d": 8, "rnnt": 2048, "dlrm": 300_000,
                  "dlrm-dcnv2": 200_000, "sdxl-unet": 8}  # fmt: skip
"""Offline batches where a submission's is not recorded; the rate hardly depends on them."""


def judge(rows: Sequence[Row]) -> Iterator[Judged | Unused]:
    """Each row beside the batch it describes, in seconds a batch."""
    for row in rows:
        try:
            yield _judged(row)
        except RidgelineError as error:
            yield Unused(row=row.line, source=source_of(row), why=str(error))


def source_of(row: Row) -> str:
    """Every MLPerf result is a file of its own: its round and submitter are the source."""
    text = row.text("source")
    found = re.search(r"inference_results_(v[\d.]+)", text)
    return f"mlcommons/inference_results_{found.group(1)}" if found else text


def _judged(row: Row) -> Judged:
    work = workload(row)
    expected_s, low_s, high_s = answer(work)
    what = f"{work.network} batch {work.batch} on {work.ranks}× {work.device}, {work.precision}, {work.stack}"
    return Judged(
        row=row.line, key=f"{row.text('config_id')}|{row.text('metric')}", source=source_of(row),
        what=f"{what}, {row.text('scenario')}", metric=row.text("scenario"), unit="s",
        measured=measured_s(row, work), predicted=expected_s, low=low_s, high=high_s,
    )  # fmt: skip


def workload(row: Row) -> Workload:
    """The batch a row describes, or why it cannot be known."""
    network, options, factor = _network(row)
    stack, precision = stack_of(row), _precision(row, network)
    batch, devices = _batch(row, network), int(row.number("num_devices") or 1)
    name = device_of(row.text("device"), "inference_other")
    if network.startswith("dlrm") and device(name).dram.capacity_bytes < TABLES_BYTES:
        raise InputError(f"the tables do not fit into the memory of {name}: part of the lookups leave the device")
    tensor_ranks = _tensor_ranks(row)
    if network.startswith("bert"):
        options = (*options, ("seq", _tokens(row)))
    samples, passes = float(batch), 1.0
    if network == "sdxl-unet":
        batch, passes = 2 * batch, float(DENOISING)
    elif network.startswith("dlrm"):
        samples = batch / PAIRS
    elif network == "unet3d":
        large = LARGE_CASE if row.text("scenario") == "SingleStream" else 1.0
        samples, passes = 1.0, large * KITS_WINDOWS / batch
    return Workload(
        stack=stack, device=name, network=network, batch=batch, precision=precision, mode="infer",
        items=samples * (devices if tensor_ranks == 1 and row.text("scenario") in ("Offline", "Server") else 1),
        options=options, factor=factor, passes=passes,
        tensor_ranks=tensor_ranks, system=f"{name}*8",
    )  # fmt: skip


def measured_s(row: Row, work: Workload) -> float:
    """Seconds of one batch."""
    value, unit = row.number("value"), row.text("unit")
    if value is None or value <= 0:
        raise InputError(f"no value: {row.text('value')!r}")
    if "latency" in row.text("metric").lower():
        return value if unit == "s" or (work.network == "ncf" and value < 0.1) else value * 1e-3
    power = re.fullmatch(r"e\+(\d+)", unit)
    rate = value * 10.0 ** int(power.group(1)) if power else value
    return work.items / rate * (SERVER_FRAC if row.text("scenario") == "Server" else 1.0)


def stack_of(row: Row) -> str:
    engine = row.text("engine").lower()
    if _is_tensorrt(row):
        model = plain(row.text("model"))
        if "dlrm" in model:  # lookups and interactions are plugins of their own
            return "tensorrt-dlrm-v2" if "v2" in model else "tensorrt-dlrm"
        return "tensorrt"
    if plain(engine).startswith("fastertransformer"):
        mode = row.text("precision").lower()
        return f"fastertransformer-{mode}" if mode in ("int8-v1", "int8-v2") else "fastertransformer"
    if engine.startswith(("tf baseline", "tensorflow")):
        return "tensorflow-1-infer"
    if engine.startswith("torchscript"):
        return "torchscript-infer"
    if engine.startswith("pytorch 2.1 "):
        return "pytorch-2.1-fused" if "fused" in engine else "pytorch-2.1"
    if engine.split(" ")[0] in ("pytorch", "mxnet"):
        return f"ngc-{engine.split(' ')[0]}-infer"
    raise InputError(f"no coefficients for {row.text('engine') or 'an engine that is not named'}")


def _is_tensorrt(row: Row) -> bool:
    return bool(re.match(r"(nvidia )?(tensorrt|trt)(?!.?llm)", row.text("engine").lower()))


def _network(row: Row) -> tuple[str, tuple[tuple[str, Any], ...], float]:
    model = row.text("model")
    if plain(model) == "efficientnet":
        found = re.search(r"Model=(efficientnet-[a-z0-9-]+)", row.text("notes"))
        if not found:
            raise InputError("which EfficientNet is not stated")
        return found.group(1), (), 1.0
    if plain(model) == "transformerbig":
        raise InputError("a translation decodes token by token with a beam, which is not one pass")
    for pattern, name, options, factor in _NETWORKS:
        if re.match(pattern, plain(model)):
            return name, options, factor
    raise InputError(f"{model} is not in the zoo")


def _precision(row: Row, network: str) -> str:
    text = row.text("precision").lower()
    if "use_fp8=True" in row.text("notes") or "fp8" in text:
        return "fp8"
    if network == "dlrm-dcnv2":  # the first round and the stricter accuracy keep half precision, whatever they declare
        loose = row.text("task") == "dlrm-v2-99" and not re.match(r"tensorrt 9\.0", row.text("engine").lower())
        return "int8" if loose else "fp16"
    if found := number_format(text):
        return found
    if text or not _is_tensorrt(row):
        raise InputError("the precision is not stated, and two tables of the source differ in it alone")
    if network == "rnnt":
        return "fp16"
    hopper = re.search(r"h100|h200|gh200|b200", row.text("device").lower())
    return ("fp8" if hopper else "fp16") if row.text("task") == "bert-99.9" else "int8"


def _batch(row: Row, network: str) -> int:
    text = row.text("batch")
    if row.text("scenario") == "SingleStream" and network != "unet3d":
        return 1
    if row.text("scenario") == "MultiStream":
        return 8
    if not text:
        if network in _DEFAULT_BATCH and _is_tensorrt(row):
            return _DEFAULT_BATCH[network]
        raise InputError("the batch is not stated")
    found = re.search(r"'(?:unet|dlrm-v2)': (\d+)(?: \* (\d+))?", text)
    if found:
        first, second = int(found.group(1)), int(found.group(2) or 1)
        return first if network == "sdxl-unet" else first * second
    return max(1, round(count_of(re.split(r"[/ ]", text)[0])))


def _tokens(row: Row) -> int:
    found = re.search(r"seq (\d+)", row.text("input"))
    if found:
        filled = _filled_frac(row) if plain(row.text("model")).startswith("bert6b") else 1.0
        return round(int(found.group(1)) * filled)
    noted = re.search(r"Sequence Length=(\d+)", row.text("notes"))
    return int(noted.group(1)) if noted else SQUAD_TOKENS


def _filled_frac(row: Row) -> float:
    """Tokens of FasterTransformer's large model that are no padding, which it skips: all would beat the device's peak.

    Lengths are drawn at random, up to the longest, and by one seed, so the first sample is as long in every row.
    """
    batch = max(1, round(row.number("batch") or 1))
    return 0.5 + FIRST_SAMPLE / batch


def _tensor_ranks(row: Row) -> int:
    found = re.search(r"tp(\d+) pp(\d+)", row.text("engine").lower())
    if found and int(found.group(2)) > 1:
        raise InputError("stages of a pipeline for one batch are not modeled")
    return int(found.group(1)) if found else 1
