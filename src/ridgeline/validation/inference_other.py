"""Published inference of vision, language, speech and recommendation networks beside ours."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ridgeline.errors import InputError, RidgelineError
from ridgeline.hardware import device
from ridgeline.validation.publications import Fact, publications
from ridgeline.validation.spelling import number_format, plain
from ridgeline.validation.verdict import Judged, Row, Unused
from ridgeline.validation.workload import Workload, answer, count_of, device_of


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


def _tables(table: str, **facts: Fact) -> dict[str, Any]:
    return publications("inference_other")[table].choose(facts)


def workload(row: Row) -> Workload:
    """The batch a row describes, or why it cannot be known."""
    model = _tables("network", model=plain(row.text("model")))
    network = _network(row, model)
    stack, precision = stack_of(row), _precision(row, network)
    batch, devices = _batch(row, network), int(row.number("num_devices") or 1)
    name = device_of(row.text("device"), "inference_other")
    said = _tables("work", network=network, scenario=row.text("scenario"))
    if device(name).dram.capacity_bytes < said.get("tables_bytes", 0):
        raise InputError(f"the tables do not fit into the memory of {name}: part of the lookups leave the device")
    found = re.search(r"tp(\d+) pp(\d+)", row.text("engine").lower())
    if found and int(found.group(2)) > 1:
        raise InputError("stages of a pipeline for one batch are not modeled")
    tensor_ranks = int(found.group(1)) if found else 1
    options = tuple((key, model[key]) for key in ("head", "width", "layers", "seq") if key in model)
    if "seq" in said:
        options = (*options, ("seq", _tokens(row, said["seq"], model.get("first_sample"))))
    samples = 1.0 if "windows" in said else batch / said.get("pairs", 1.0)
    passes = float(said.get("passes", 1.0)) if "windows" not in said else said["windows"] / batch
    return Workload(
        stack=stack, device=name, network=network, batch=2 * batch if said.get("guided") else batch,
        precision=precision, mode="infer",
        items=samples * (devices if tensor_ranks == 1 and row.text("scenario") in ("Offline", "Server") else 1),
        options=options, passes=passes, tensor_ranks=tensor_ranks, system=f"{name}*8",
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
    said = _tables("work", network=work.network, scenario=row.text("scenario"))
    return float(work.items / rate * said.get("offline_frac", 1.0))


def stack_of(row: Row) -> str:
    """The software generation."""
    engine, precision = row.text("engine").lower(), row.text("precision").lower()
    found = _tables("stack", engine=engine, tensorrt=_is_tensorrt(row), model=plain(row.text("model")),
                    precision=precision)  # fmt: skip
    if not found:
        raise InputError(f"no coefficients for {row.text('engine') or 'an engine that is not named'}")
    return str(found["stack"])


def _is_tensorrt(row: Row) -> bool:
    return bool(re.match(r"(nvidia )?(tensorrt|trt)(?!.?llm)", row.text("engine").lower()))


def _network(row: Row, said: Mapping[str, Any]) -> str:
    if not said:
        raise InputError(f"{row.text('model')} is not in the zoo")
    if "why" in said:
        raise InputError(said["why"])
    if said["network"] != "as noted":
        return str(said["network"])
    found = re.search(r"Model=(efficientnet-[a-z0-9-]+)", row.text("notes"))
    if not found:
        raise InputError("which EfficientNet is not stated")
    return found[1]


def _precision(row: Row, network: str) -> str:
    text = row.text("precision").lower()
    if "use_fp8=True" in row.text("notes") or "fp8" in text:
        return "fp8"
    said = _tables("precision", network=network, task=row.text("task"), engine=row.text("engine").lower(),
                   device=row.text("device").lower(), tensorrt=_is_tensorrt(row))  # fmt: skip
    if found := said.get("declared") or number_format(text):
        return str(found)
    if text or "usual" not in said:
        raise InputError("the precision is not stated, and two tables of the source differ in it alone")
    return str(said["usual"])


def _batch(row: Row, network: str) -> int:
    text = row.text("batch")
    if row.text("scenario") == "SingleStream" and network != "unet3d":
        return 1
    if row.text("scenario") == "MultiStream":
        return 8
    if not text:
        usual = _tables("batch", network=network, tensorrt=_is_tensorrt(row))
        if not usual:
            raise InputError("the batch is not stated")
        return int(usual["batch"])
    found = re.search(r"'(?:unet|dlrm-v2)': (\d+)(?: \* (\d+))?", text)
    if found:
        first, second = int(found.group(1)), int(found.group(2) or 1)
        return first if network == "sdxl-unet" else first * second
    return max(1, round(count_of(re.split(r"[/ ]", text)[0])))


def _tokens(row: Row, usual: int, first_sample: float | None) -> int:
    """Tokens of a sample. FasterTransformer skips the padding of its large model: all would beat the device's peak.

    Lengths are drawn at random, up to the longest, and by one seed, so the first sample is as long in every row.
    """
    found = re.search(r"seq (\d+)", row.text("input"))
    if found:
        filled = 1.0 if first_sample is None else 0.5 + first_sample / max(1, round(row.number("batch") or 1))
        return round(int(found.group(1)) * filled)
    noted = re.search(r"Sequence Length=(\d+)", row.text("notes"))
    return int(noted.group(1)) if noted else usual
