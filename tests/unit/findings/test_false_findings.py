"""Programs that were told something false: each plays one of them and fails without what keeps it from that."""

from __future__ import annotations

from stage import Stage, rules_of

HALF = ["c10::BFloat16"] * 2
PRODUCT = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT"


def _decodes(stage: Stage, steps: int, plan_us: float, first_length: int = 100) -> None:
    """A token a step: the first of 12 layers builds a plan for each new length, which the others find."""
    for step in range(steps):
        with stage.step():
            for layer in range(12):
                for _ in range(3):
                    stage.kernel(PRODUCT, 8.0, op="aten::linear", shapes=[[1, 2048], [2048, 2048]], dtypes=HALF)
                shapes = [[1, 16, 1, 128], *[[1, 16, first_length + step, 128]] * 2]
                stage.kernel("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 9.0, shapes=shapes, dtypes=HALF,
                             op="aten::_scaled_dot_product_cudnn_attention",
                             host_us=20.0 + (plan_us if layer == 0 else 0.0))  # fmt: skip


def test_plans_for_new_shapes_are_first_use_work_and_no_contention():
    stage = Stage()
    _decodes(stage, 8, 3000.0)
    found = stage.findings()
    assert found[0].rule == "first-use" and "host-contention" not in rules_of(found)
    assert found[0].cause.startswith("first-use work: a plan is built") and "bucket" in found[0].change
    assert found[0].low_ms < 3.0 < found[0].high_ms


def test_plans_of_a_warm_up_are_told_nothing():
    """One length, whose plan the first step builds."""
    stage = Stage()
    for _ in range(8):
        with stage.step():
            for layer in range(12):
                first = layer == 0 and stage.step_number == 0
                stage.kernel(PRODUCT, 60.0, op="aten::_scaled_dot_product_cudnn_attention", dtypes=HALF,
                             shapes=[[1, 16, 64, 128]] * 3, host_us=3020.0 if first else 20.0)  # fmt: skip
    assert stage.findings() == []
