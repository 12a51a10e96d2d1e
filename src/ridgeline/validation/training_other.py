"""Published training of vision, language, speech and recommendation networks beside ours."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ridgeline.errors import InputError, RidgelineError
from ridgeline.models import models
from ridgeline.validation.publications import Fact, publications
from ridgeline.validation.spelling import number_format, plain, whole_number
from ridgeline.validation.verdict import Judged, Row, Unused
from ridgeline.validation.workload import Workload, answer, count_of, device_of


class Shape(NamedTuple):
    """A network with its options, items of one sample, and how many of what a table counts make a sample."""

    network: str
    options: tuple[tuple[str, Any], ...]
    items: float
    factor: float
    params: float
    batch_divisor: float


def judge(rows: Sequence[Row]) -> Iterator[Judged | Unused]:
    """Each row beside the step it describes, in seconds a step."""
    for row in rows:
        try:
            yield _judged(row)
        except RidgelineError as error:
            yield Unused(row=row.line, source=row.text("source"), why=str(error))


def _judged(row: Row) -> Judged:
    work = workload(row)
    measured = measured_s(row, work)
    expected_s, low_s, high_s = answer(work)
    what = f"{work.network} batch {work.batch} on {work.ranks}× {work.device}, {work.precision}, {work.stack}"
    return Judged(
        row=row.line, key=f"{row.text('config_id')}|{row.text('metric')}", source=row.text("source"), what=what,
        metric="step time", unit="s", measured=measured, predicted=expected_s, low=low_s, high=high_s,
    )  # fmt: skip


def workload(row: Row) -> Workload:
    """The step a row describes, or why it cannot be known."""
    if plain(row.text("metric")) == "timetotrain":
        raise InputError("time to train depends on epochs and evaluation; step times come from logs alone")
    shape = _shape(row)
    precision, stack = _precision(row), stack_of(row)
    ranks = whole_number(row.text("num_devices")) or 0
    if ranks < 1:
        raise InputError("the number of devices is not stated")
    batch, accumulation = _batch(row, shape, precision), _accumulation(row, precision)
    if shape.network == "bert-large" and batch >= 1024:  # some tables give what is accumulated, not what runs at once
        batch //= accumulation
    name = device_of(row.text("device"), "training_other")
    exchanged = publications("training_other")["exchange"].choose({"stack": stack, "network": shape.network})
    return Workload(
        stack=stack, device=name, network=shape.network, batch=batch, precision=precision, mode="train",
        exchange_bytes=exchanged["exchanged_frac"] * 26 * 128 * 2.0 * batch,  # 26 tables, rows of 128 in two bytes
        items=batch * shape.items * ranks, options=shape.options, factor=shape.factor, ranks=ranks,
        gradient_bytes=(2.0 if precision == "fp16" else 4.0) * shape.params, accumulation=accumulation,
        system=_system(name, ranks),
    )  # fmt: skip


def measured_s(row: Row, work: Workload) -> float:
    """Seconds of one step of all ranks."""
    value = row.number("value")
    if value is None or value <= 0:
        raise InputError(f"no value: {row.text('value')!r}")
    if re.match(r"(step|iteration|iter)[_ ]?time", row.text("metric").lower()):
        return value / 1e3 if row.text("unit").lower().startswith("ms") else value
    if "per-GPU before v5.0" in row.text("unit") and not re.search(r"results_v5", row.text("source")):
        value *= work.ranks
    return work.items / value


def _words(row: Row) -> dict[str, Fact]:
    return {
        "source": row.text("source"), "framework": row.text("framework").lower(), "notes": row.text("notes"),
        "device": plain(row.text("device")), "model": plain(row.text("model")),
    }  # fmt: skip


def stack_of(row: Row) -> str:
    """The software generation."""
    found: str = publications("training_other")["stack"].choose(_words(row))["stack"]
    if not found:
        raise InputError(f"no coefficients for the software of this submission ({row.text('framework')})")
    return found


def _shape(row: Row) -> Shape:
    noted = re.search(r"Sequence length=(\d+)", row.text("notes"), re.IGNORECASE)
    facts = _words(row) | {"noted_seq": int(noted[1]) if noted else 0}
    said = publications("training_other")["network"].choose(facts)
    if not said:
        raise InputError(f"{row.text('model')} is not in the zoo")
    network: str = said["network"]
    if not network:
        raise InputError(f"{row.text('model')} is not in the zoo, or not for training")
    if network == "as noted":
        named = re.search(r"Model=(efficientnet-[a-z0-9-]+)", row.text("notes"))
        if not named:
            raise InputError("which EfficientNet is not stated")
        network = named[1]
    options = tuple((name, said[name]) for name in ("head", "seq", "image") if name in said)
    params = said.get("params") or next(float(card.num_params) for card in models() if card.name == network)
    return Shape(network, options, said.get("items", 1.0), said.get("factor", 1.0), params,
                 said.get("batch_divisor", 1.0))  # fmt: skip


def _precision(row: Row) -> str:
    text = row.text("precision").lower()
    if text.startswith("see submission"):  # NVIDIA's train in half precision, recommenders with tf32 products
        return "fp16"
    found = number_format(text)
    if found in ("fp16", "tf32", "fp32"):
        return found
    raise InputError(f"the precision is not stated ({text!r})")


def _batch(row: Row, shape: Shape, precision: str) -> int:
    text = row.text("per_device_batch").lower()
    if not text:
        usual = publications("training_other")["batch"].choose({"network": shape.network})
        if not usual:
            raise InputError("the batch is not stated")
        return int(usual["batch"])
    if "/" in text:  # mixed precision first, full precision second
        text = text.split("/")[0 if precision == "fp16" else 1]
    value = count_of(text) / shape.batch_divisor
    if value < 1:
        raise InputError("a sample is split over several devices, which is not modeled")
    return round(value)


def _accumulation(row: Row, precision: str) -> int:
    found = re.search(r"Accumulation steps[^=]*=(\d+) and (\d+)", row.text("notes"))
    if found:
        return int(found.group(2 if precision == "fp16" else 1))
    plain = re.search(r"[Aa]ccumulation(?: steps)?[^=;]*=(\d+)", row.text("notes"))
    return int(plain.group(1)) if plain else 1


def _system(name: str, ranks: int) -> str:
    if name in ("gb200", "gb300"):
        return f"{name}*{-(-ranks // 4) * 4}"
    size = 16 if name == "v100-sxm2-32gb" and ranks > 8 else 8
    return f"{name}*{ranks if ranks <= 8 else -(-ranks // size) * size}"
