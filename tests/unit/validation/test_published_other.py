"""Published training and inference of other networks: what a row is taken to mean, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.errors import InputError
from ridgeline.validation import inference_other, training_other
from ridgeline.validation.registry import check_published
from ridgeline.validation.verdict import Row

EXAMPLES = "github:NVIDIA/DeepLearningExamples/PyTorch/x/README.md@1 (DGX A100 (8x A100 80GB))"


def training(**columns: str) -> Row:
    usual = {
        "source": EXAMPLES, "model": "ResNet-50 v1.5", "device": "NVIDIA DGX A100 (8x A100 80GB)", "num_devices": "8",
        "per_device_batch": "256", "precision": "amp", "framework": "PyTorch", "metric": "throughput",
        "value": "16621", "unit": "img/s", "config_id": "a",
    }  # fmt: skip
    return Row(2, usual | columns)


def inference(**columns: str) -> Row:
    usual = {
        "source": EXAMPLES, "model": "ResNet-50 v1.5", "device": "NVIDIA T4", "num_devices": "1", "batch": "8",
        "precision": "fp16", "engine": "PyTorch", "scenario": "benchmark", "metric": "latency_avg", "value": "10",
        "unit": "ms", "config_id": "b",
    }  # fmt: skip
    return Row(2, usual | columns)


def test_a_training_row_is_a_step_of_all_devices() -> None:
    work = training_other.workload(training())
    assert (work.network, work.batch, work.ranks, work.precision) == ("resnet50", 256, 8, "fp16")
    assert work.gradient_bytes == 2 * 25_557_032 and work.system == "a100-sxm-80gb*8"
    assert training_other.measured_s(training(), work) == pytest.approx(8 * 256 / 16621)


def test_accumulation_and_sequence_are_read_from_the_notes() -> None:
    notes = "Accumulation steps (TF32 and FP16)=64 and 32; Sequence length=128"
    work = training_other.workload(training(model="BERT-large", notes=notes, device="Pre-training NVIDIA DGX A100"))
    assert work.accumulation == 32 and dict(work.options)["seq"] == 128 and work.stack == "ngc-fused-train"
    full = training_other.workload(training(model="BERT-large", notes=notes, precision="tf32"))
    assert full.accumulation == 64 and full.stack == "ngc-pytorch-train"


def test_rates_a_device_before_version_five_are_summed() -> None:
    unit = "samples/s (as logged; appears per-GPU before v5.0)"
    old = training(model="RetinaNet", source="github:mlcommons/training_results_v4.0/NVIDIA/results/ssd", unit=unit,
                   precision="see submission (mixed)", value="100", per_device_batch="4.0")  # fmt: skip
    work = training_other.workload(old)
    assert training_other.measured_s(old, work) == pytest.approx(4 / 100)


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"metric": "time_to_train"}, "time to train depends on epochs"),
        ({"model": "Mask R-CNN"}, "not in the zoo"),
        ({"precision": "mystery"}, "the precision is not stated"),
        ({"per_device_batch": ""}, "the batch is not stated"),
        ({"per_device_batch": "0.5"}, "split over several devices"),
        ({"num_devices": ""}, "number of devices is not stated"),
        ({"device": "a laptop"}, "no device of the catalog"),
    ],
)
def test_what_a_training_row_lacks_is_named(columns: dict[str, str], why: str) -> None:
    with pytest.raises(InputError, match=why):
        training_other.workload(training(**columns))


def test_inference_rows_in_every_unit_are_seconds_a_batch() -> None:
    work = inference_other.workload(inference())
    assert inference_other.measured_s(inference(), work) == pytest.approx(0.010)
    rate = inference(metric="throughput", value="400", unit="img/s")
    assert inference_other.measured_s(rate, work) == pytest.approx(8 / 400)
    power = inference(metric="throughput", value="4", unit="e+02")
    assert inference_other.measured_s(power, work) == pytest.approx(8 / 400)


def test_offline_rates_are_of_all_devices_and_server_rates_below_them() -> None:
    columns = {"engine": "TensorRT 8.6.0", "num_devices": "8", "metric": "throughput", "value": "1000",
               "unit": "Samples/s", "device": "NVIDIA H100-SXM-80GB", "precision": "int8", "batch": "64"}  # fmt: skip
    offline, server = (inference(**columns, scenario=name) for name in ("Offline", "Server"))
    work = inference_other.workload(offline)
    assert work.items == 8 * 64 and work.stack == "tensorrt"
    assert inference_other.measured_s(server, work) < inference_other.measured_s(offline, work)


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"precision": ""}, "the precision is not stated"),
        ({"engine": "flax"}, "no coefficients for flax"),
        ({"model": "Transformer-big"}, "token by token"),
        ({"batch": ""}, "the batch is not stated"),
        ({"model": "dlrm-99", "engine": "TensorRT 8.6.0", "device": "NVIDIA L4", "precision": "int8"}, "do not fit"),
        ({"model": "BERT-6B", "engine": "FasterTransformer TP1 PP2", "input": "seq 128"}, "stages of a pipeline"),
    ],
)
def test_what_an_inference_row_lacks_is_named(columns: dict[str, str], why: str) -> None:
    with pytest.raises(InputError, match=why):
        inference_other.workload(inference(**columns))


@pytest.mark.parametrize("junk", ["", "n/s", "abc", "-1", "0", "nan", "inf", "{}", "1e30", "TP3 PP1", "x/y"])
def test_rows_of_junk_are_set_aside_and_end_nothing(junk: str) -> None:
    for row, module in ((training(), training_other), (inference(), inference_other)):
        for column in row.columns:
            verdicts = list(module.judge([Row(2, {**row.columns, column: junk})]))
            assert len(verdicts) == 1


@pytest.mark.parametrize(
    ("name", "most", "least_rows"), [("training_other", 0.115, 300), ("inference_other", 0.095, 870)]
)
def test_published_rows_hold(shared_published: Path, name: str, most: float, least_rows: int) -> None:
    """The figure of the issue is 15 %."""
    check = check_published(shared_published / f"{name}.csv")
    assert check.all is not None and check.all.n >= least_rows
    assert check.all.mape < most and abs(check.all.bias) < 0.04 and 0.84 < check.all.coverage < 0.97
    lines = {row.row for row in check.rows} | {row.row for row in check.unused}
    assert len(lines) == len(check.rows) + len(check.unused)


def test_others_who_submit_with_nvidias_containers_run_its_stack() -> None:
    source = "github:mlcommons/training_results_v5.0/Google/results/h200_nemo/stable_diffusion@0fdc28f01325"
    row = training(source=source, model="Stable Diffusion v2", framework="NVIDIA NeMo Framework Release 24.12")
    assert training_other.stack_of(row) == "mlperf-language-train"
    with pytest.raises(InputError, match="no coefficients for the software"):
        training_other.stack_of(training(source=source, framework="tinygrad, branch mlperf_training_v5.0"))


def test_random_lengths_of_a_large_batch_fill_half_and_the_first_is_long() -> None:
    row = {"model": "BERT-6B (32 layers)", "engine": "FasterTransformer TP1 PP1", "input": "seq 1024",
           "precision": "fp16"}  # fmt: skip
    lone, many = (
        dict(inference_other.workload(inference(batch=b, device="A100-SXM-80GB", **row)).options)["seq"]
        for b in ("1", "128")
    )
    assert 512 <= many <= 530 and 768 <= lone <= 1024
