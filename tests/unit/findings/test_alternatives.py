"""What a finding's time may be lost to instead: told beside it on evidence of its own, and never a finding."""

from __future__ import annotations

from dataclasses import replace

import pytest
from stage import Stage, healthy

from ridgeline.errors import FindingError
from ridgeline.findings.rule import rule, rule_named
from ridgeline.trace import Kind

HALF, SINGLE = ["c10::BFloat16"] * 2, ["float"] * 2
PRODUCT = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT"
POINTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"


def _told(play, rounds: int = 2):
    stage = Stage()
    for _ in range(rounds):
        with stage.step():
            play(stage)
    return stage.findings()


def _passes(stage: Stage, rows: int, chosen: bool, num: int) -> None:
    """Passes over as many samples each, by a network that begins with a convolution, of 240 layers in all."""
    for _ in range(num):
        given = [[rows, 4, 64, 64], [512, 4, 3, 3]]
        stage.kernel(PRODUCT, 3.0, op="aten::conv2d", shapes=given, dtypes=HALF, host_us=40.0, blocks=8)
        for _ in range(240 // num):
            given = [[rows, 64, 512], [512, 512]]
            stage.kernel(PRODUCT, 3.0, op="aten::linear", shapes=given, dtypes=HALF, host_us=40.0, blocks=8)
        stage.kernel(POINTWISE, 3.0, op="aten::sub", shapes=[[rows, 4, 64, 64]] * 2, host_us=40.0)
        if chosen:
            stage.kernel(POINTWISE, 3.0, op="aten::argmax", shapes=[[rows, 64, 30000]], host_us=40.0)


@pytest.mark.parametrize(
    ("rows", "chosen", "num", "named"),
    [(1, False, 12, True), (64, False, 12, True), (1, True, 12, False), (64, False, 1, False)],
)
def test_passes_that_may_follow_from_each_other_are_launches_or_a_small_batch(rows, chosen, num, named):
    """Words that are chosen follow for sure, and layers of one pass are no passes."""
    first = _told(lambda stage: _passes(stage, rows, chosen, num))[0]
    assert first.rule == "launch-bound"
    assert ("micro-batches" in [other.rule for other in first.alternatives]) == named
    assert all(other.tell == rule_named(other.rule).tell != "" and other.high_ms > 0 for other in first.alternatives)


def _copies(stage: Stage, sizes: list[int]) -> None:
    for size in sizes:
        stage.copy("HtoD pageable", size, size / 6e9 * 1e6, waits=True)
    for _ in range(10):
        stage.kernel(PRODUCT, 100.0, op="aten::linear", shapes=[[64, 512], [512, 512]], dtypes=HALF)


@pytest.mark.parametrize(("sizes", "named"), [([2**22, 2**20] * 6, True), ([2**24] * 3, False)])
def test_many_tensors_that_come_in_every_round_may_be_weights(sizes, named):
    first = _told(lambda stage: _copies(stage, sizes))[0]
    assert first.rule == "slow-copies"
    assert [other.rule for other in first.alternatives] == ["weight-streaming"] * named


def test_an_alternative_changes_nothing_else_and_is_in_the_document(monkeypatch):
    def play(stage):
        _copies(stage, [2**22, 2**20] * 6)

    found = _told(play)
    monkeypatch.setattr("ridgeline.findings.explain.with_alternatives", lambda context, told, *more: told)
    assert _told(play) == [replace(one, alternatives=()) for one in found] != found
    assert found[0].to_dict()["alternatives"][0]["rule"] == "weight-streaming"


def _in_fp32(stage: Stage) -> None:
    for _ in range(20):
        stage.kernel("ampere_sgemm_128x64_tn", 500.0, op="aten::mm", shapes=[[4096, 4096]] * 2, dtypes=SINGLE)


def _collected(stage: Stage) -> None:
    healthy(stage)
    stage.host("gc.collect", 30_000.0, Kind.ANNOTATION)


@pytest.mark.parametrize("play", [_in_fp32, _collected])
def test_evidence_that_nothing_else_leaves_has_no_alternative(play):
    found = _told(play)
    assert found and not rule_named(found[0].rule).is_ambiguous and not any(one.alternatives for one in found)


def test_a_healthy_program_has_none():
    assert _told(healthy) == []


def test_a_rule_has_a_name_of_its_own():
    with pytest.raises(FindingError, match="two rules"):
        rule("padding", order=1)(rule_named("padding").detect)
