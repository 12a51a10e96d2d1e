"""The factor learned for calls alone on the device: of their shape, bounded, and for such calls only."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.cost.call import Call, call
from ridgeline.cost.correction import gemm_attention as residue
from ridgeline.cost.correction import rows as leftover
from ridgeline.cost.price import Pricer, pricer_of
from ridgeline.cost.time.chip import chip_of
from ridgeline.hardware import device
from ridgeline.validation.operators import predict_call

CALLS = [
    call("gelu", "bf16", n=64, c=64),
    call("softmax", "fp32", "bwd", n=8192, c=4096),
    call("sum_dim0", "bf16", n=4096, c=768),
    call("sort", "fp32", n=100_000),
    call("embedding_bag", "fp32", v=10_000, d=64, b=512, l=20),
    call("attention", "bf16", "fwd", "fa2", b=2, h=16, hkv=16, s=1000, skv=1000, d=64, causal=1),
    call("attention", "bf16", "bwd", "cudnn", b=2, h=16, hkv=4, s=1024, skv=1024, d=128, causal=0),
]


def asked(wanted: Call, name: str = "h200", *, flushed: bool = True) -> float:
    return Pricer(device(name)).price(wanted, flushed=flushed).time.busy_s


@pytest.mark.parametrize("wanted", CALLS, ids=lambda c: f"{c.kind}-{c.phase}")
def test_the_factor_is_bounded_and_never_goes_below_the_floor(wanted: Call) -> None:
    chip = chip_of(device("h200"))
    log = leftover.log_of(wanted, chip)
    assert log != 0.0
    assert abs(log) <= residue.BOUND
    assert asked(wanted) >= pricer_of(device("h200")).price(wanted).time.floor_s


def test_calls_between_the_kernels_of_a_model_have_no_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    before = asked(CALLS[0], flushed=False)
    monkeypatch.setattr(leftover, "log_of", lambda *_: 0.4)
    assert asked(CALLS[0], flushed=False) == before
    assert asked(CALLS[0]) != before


def test_an_imagined_device_has_the_factor_of_the_measured_one_at_any_number_of_sms() -> None:
    chip = chip_of(device("h200"))
    imagined = replace(chip, name="imagined", num_sms=200)
    assert [leftover.log_of(wanted, imagined) for wanted in CALLS] == [
        leftover.log_of(wanted, chip) for wanted in CALLS
    ]


@pytest.mark.parametrize("name", ["h100-sxm", "b200", "a100-sxm-80gb"])
def test_devices_that_were_not_recorded_have_none(name: str) -> None:
    assert all(leftover.log_of(wanted, chip_of(device(name))) == 0.0 for wanted in CALLS)


def test_compiled_kernels_and_kinds_that_were_seldom_recorded_have_none() -> None:
    assert leftover.pool_of(call("softmax", "bf16", "fwd", "inductor", n=8, c=8)) == ""
    assert leftover.pool_of(call("dropout", "bf16", n=8, c=8)) == ""


def test_trees_ask_of_nothing_but_the_features() -> None:
    widths = {leftover.pool_of(wanted): len(leftover.features(wanted, 132)) for wanted in CALLS}
    for name, trees in residue.trees_in(residue.LEFT_OVER).items():
        kind = name.partition("/")[2].partition(".")[0]
        wide = widths["attention.fa2.fwd"] if kind == "attention" else widths["gelu.fwd"]
        assert trees.feature.max() < wide, name


def test_a_short_gelu_is_told_as_it_was_measured() -> None:
    """The structure alone charges its arithmetic for 0.26 µs that 48 recordings of up to 300,000 elements lack."""
    told = predict_call("h200", "gelu", "bf16", "fwd", "aten", {"n": 64, "c": 512})
    assert told.expected_s == pytest.approx(4.8e-6, rel=0.04)
