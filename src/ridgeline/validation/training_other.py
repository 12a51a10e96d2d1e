"""Published training of vision, language, speech and recommendation networks beside ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ridgeline.errors import InputError, RidgelineError
from ridgeline.models import models
from ridgeline.validation.spelling import number_format, plain, whole_number
from ridgeline.validation.verdict import Judged, Row, Unused
from ridgeline.validation.workload import Workload, answer, count_of, device_of

_NO_NETWORK = ("maskrcnn", "fastpitch", "rgat", "minigo", "rnnt", "flux")
_DATA_BATCH = {"efficientnet-b0": 128, "efficientnet-widese-b0": 128, "efficientnet-b4": 64,
               "efficientnet-widese-b4": 64}  # fmt: skip
"""Where a table gives no batch: a usual one; the rate hardly depends on it there."""
JASPER_FRAMES = 1600  # a padded batch of LibriSpeech, at most 16.7 s of 10 ms frames
BERT_TOKENS = 256  # MLPerf's BERT skips padding; samples of 512 hold about half
PRETRAINING_TOKENS = 344  # the same in the examples' second phase, which skips padding too, with longer documents
EXCHANGED_FRAC = 0.05
"""MLPerf's first DLRM keeps rows of frequent categories on every rank: few travel. Elsewhere all do."""
SENTENCE = 32  # tokens of a WMT sentence, with padding


class Shape(NamedTuple):
    """A network with its options, items of one sample, and what a table calls a batch in samples."""

    network: str
    options: tuple[tuple[str, Any], ...] = ()
    items: float = 1.0
    factor: float = 1.0
    params: float | None = None


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
    if plain(row.text("model")).startswith(_NO_NETWORK):
        raise InputError(f"{row.text('model')} is not in the zoo, or not for training")
    shape = _shape(row)
    precision, stack = _precision(row, shape.network), stack_of(row)
    ranks = whole_number(row.text("num_devices")) or 0
    if ranks < 1:
        raise InputError("the number of devices is not stated")
    batch, accumulation = _batch(row, shape), _accumulation(row, precision)
    if shape.network == "bert-large" and batch >= 1024:  # some tables give what is accumulated, not what runs at once
        batch //= accumulation
    name = device_of(row.text("device"), "training_other")
    params = shape.params if shape.params is not None else _params(shape.network)
    wide = 2.0 if precision == "fp16" else 4.0
    frac = EXCHANGED_FRAC if stack == "mlperf-hugectr-train" and shape.network == "dlrm" else 1.0
    looked_up = frac * 26 * 128 * 2.0 * batch if shape.network.startswith("dlrm") else 0.0
    return Workload(
        stack=stack, device=name, network=shape.network, batch=batch, precision=precision, mode="train",
        exchange_bytes=looked_up,
        items=batch * shape.items * ranks, options=shape.options, factor=shape.factor, ranks=ranks,
        gradient_bytes=wide * params, accumulation=accumulation, system=_system(name, ranks),
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


def stack_of(row: Row) -> str:
    """The software generation: containers of the examples repository by framework, MLPerf submissions by framework."""
    source, framework = row.text("source"), row.text("framework").lower()
    if "DeepLearningExamples" in source:
        if "tensorflow" in framework:
            return "ngc-xla-train" if "XLA=Yes" in row.text("notes") else "ngc-tensorflow-train"
        if "pretraining" in plain(row.text("device")) or plain(row.text("model")) == "dlrm":
            return "ngc-fused-train"  # kernels of their own, CUDA graphs
        return "ngc-mxnet-train" if "mxnet" in framework else "ngc-pytorch-train"
    if "/NVIDIA/" not in source and not re.search(r"nvidia|\bngc\b", framework):  # others submit with its containers
        raise InputError(f"no coefficients for the software of this submission ({row.text('framework')})")
    if "hugectr" in source or "/dlrm" in source:  # the second recommender came with embedding collections
        return "mlperf-hugectr-train-v2" if "dcnv2" in plain(row.text("model")) else "mlperf-hugectr-train"
    kind = "vision" if re.search(r"resnet|unet3d|ssd|retinanet", source) else "language"
    return f"mlperf-{kind}-train"


def _shape(row: Row) -> Shape:
    model = row.text("model")
    for pattern, make in _SHAPES:
        if re.match(pattern, plain(model)):
            return make(row)
    raise InputError(f"{model} is not in the zoo")


def _bert(row: Row) -> Shape:
    notes = row.text("notes")
    found = re.search(r"Sequence length=(\d+)", notes, re.IGNORECASE)
    if "mlcommons" in row.text("source"):
        return Shape("bert-large", (("head", "none"), ("seq", BERT_TOKENS)))
    seq = int(found.group(1)) if found else 384
    if seq == 512 and "pretraining" in plain(row.text("device")):
        seq = PRETRAINING_TOKENS
    return Shape("bert-large", (("head", "none"), ("seq", seq)))


def _xl(row: Row) -> Shape:
    base = "Base model" in row.text("source")
    seq = 192 if base else 384
    name = "transformer-xl-base" if base else "transformer-xl-large"
    return Shape(name, (("seq", seq),), items=seq, params=192e6 if base else 283e6)


def _nnunet(row: Row) -> Shape:
    if "Dimension=2" in row.text("notes"):
        return Shape("nnunet-2d", (("image", 192),), factor=160 / 192)
    return Shape("nnunet-3d")


def _efficientnet(row: Row) -> Shape:
    found = re.search(r"Model=(efficientnet-[a-z0-9-]+)", row.text("notes"))
    if not found:
        raise InputError("which EfficientNet is not stated")
    return Shape(found.group(1))


def _dlrm(row: Row) -> Shape:
    return Shape("dlrm", params=2.5e6)  # tables are split over ranks; their lookups travel as all-to-alls


_SHAPES: tuple[tuple[str, Callable[[Row], Shape]], ...] = (
    (r"bert", _bert),
    (r"transformerxl", _xl),
    (r"resnet50", lambda row: Shape("resnet50")),
    (r"nnunet", _nnunet),
    (r"jasper", lambda row: Shape("jasper-10x5", (("seq", JASPER_FRAMES),))),
    (r"efficientnet", _efficientnet),
    (r"stablediffusionv?2|sdv?2", lambda row: Shape("sd2-unet")),
    (r"ncf|neuralcollaborative", lambda row: Shape("ncf")),
    (r"ssd300", lambda row: Shape("ssd300-r50")),
    (r"retinanet", lambda row: Shape("retinanet-x50")),
    (r"dlrm(dcn)?v2", lambda row: Shape("dlrm-dcnv2", params=20e6)),
    (r"dlrm", _dlrm),
    (r"transformerbig", lambda row: Shape("transformer-big", (("seq", SENTENCE),), items=SENTENCE)),
    (r"wide(&|and)deep", lambda row: Shape("wide-and-deep")),
    (r"3dunet|unet3d", lambda row: Shape("unet3d")),
    (r"resnext101", lambda row: Shape("resnext101-32x4d")),
    (r"seresnext101", lambda row: Shape("se-resnext101-32x4d")),
)


def _precision(row: Row, network: str) -> str:
    text = row.text("precision").lower()
    if text.startswith("see submission"):  # NVIDIA's train in half precision, recommenders with tf32 products
        return "fp16"
    found = number_format(text)
    if found in ("fp16", "tf32", "fp32"):
        return found
    raise InputError(f"the precision is not stated ({text!r})")


def _batch(row: Row, shape: Shape) -> int:
    text = row.text("per_device_batch").lower()
    if not text:
        if shape.network in _DATA_BATCH:
            return _DATA_BATCH[shape.network]
        raise InputError("the batch is not stated")
    if "/" in text:  # mixed precision first, full precision second
        text = text.split("/")[0 if _precision(row, "") == "fp16" else 1]
    value = count_of(text)
    if shape.network == "transformer-big":
        value /= SENTENCE
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


def _params(network: str) -> float:
    return next(float(card.num_params) for card in models() if card.name == network)
