"""What the host spends on an op: the reason a fast GPU waits."""

from __future__ import annotations

import pytest

from ridgeline.cost.host import DEFAULTS, between_events_s, host_s
from ridgeline.graph import Node, Phase, ops


def spent(
    op: str, phase: Phase = Phase.FORWARD, training: bool = False, num_kernels: int = 1, **attrs: object
) -> float:
    return host_s(Node(op, (), (), attrs, phase), DEFAULTS, training, num_kernels)


@pytest.mark.parametrize("op", ops())
def test_every_op_costs_the_host_microseconds(op: str) -> None:
    attrs = {"num_tensors": 1} if op in ("foreach", "optimizer") else {}
    assert 1e-6 < spent(op, **attrs) < 1e-3


def test_a_view_is_cheaper_than_a_launch_and_a_product_dearer() -> None:
    assert spent("view") < spent("pointwise") < spent("matmul") < spent("attention")


def test_modules_entered_on_the_way_cost_extra() -> None:
    assert spent("matmul", calls=3) == pytest.approx(spent("matmul") + 3 * DEFAULTS["module_s"])


def test_each_tensor_of_a_list_costs_extra() -> None:
    few, many = (spent("foreach", num_tensors=n) for n in (1, 101))
    assert many - few == pytest.approx(100 * DEFAULTS["foreach_tensor_s"])


def test_kernels_beyond_the_first_cost_a_launch_each() -> None:
    assert spent("norm", num_kernels=4) == pytest.approx(spent("norm") + 3 * DEFAULTS["kernel_s"])


def test_recording_for_the_backward_pass_costs_in_training_only() -> None:
    assert spent("matmul", training=True) == pytest.approx(spent("matmul") + DEFAULTS["grad_s"])
    assert spent("matmul", Phase.OPTIMIZER, training=True) == spent("matmul")


def test_the_autograd_engine_costs_on_every_backward_op() -> None:
    assert spent("matmul", Phase.BACKWARD, training=True) == pytest.approx(spent("matmul") + DEFAULTS["engine_s"])


def test_a_convolution_s_gradients_look_for_their_plans() -> None:
    plain, gradient = (spent("conv", Phase.BACKWARD, which=which) for which in ("fwd", "bwd"))
    assert gradient - plain == pytest.approx(DEFAULTS["conv_grad_s"])


def test_groups_launched_one_by_one_are_as_slow_as_the_host() -> None:
    coef = DEFAULTS
    alone = between_events_s("conv2d", 1e-4, 1, coef)
    assert alone == pytest.approx(1e-4 + coef["event_s"])
    fed = between_events_s("conv2d", 1e-4, 128, coef)
    assert fed == pytest.approx(128 * coef["group_launch_s"] - coef["event_lead_s"])
    assert between_events_s("sort", 1e-4, 128, coef) == pytest.approx(
        1e-4 + coef["event_s"] + 127 * coef["event_gap_s"]
    )
