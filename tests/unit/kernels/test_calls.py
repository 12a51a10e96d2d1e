"""Calls after the first: plans that are known are for what they were made for, and for nothing else."""

import pytest
import torch

pytest.importorskip("triton")

from ridgeline import kernels
from ridgeline.errors import KernelError
from ridgeline.kernels import launcher
from ridgeline.kernels.contract import trials
from ridgeline.kernels.launcher import collecting

OTHER = {
    torch.bfloat16: torch.float16, torch.float16: torch.bfloat16, torch.float32: torch.bfloat16,
    torch.int32: torch.int64, torch.int64: torch.int32, torch.bool: torch.uint8,
}  # fmt: skip
BY_ADDRESS = {"adamw", "adamw_8bit", "clip_grad_norm_"}
"""Lists are known by the addresses of their tensors, which tensors without memory do not have."""

FOR_ANY = {"gelu", "gelu_tanh", "relu2"}
"""What is done to every element, whose shape is a number given at launch."""


def changed(args):
    """The same call with one tensor of another type, or one of another shape."""
    for i, x in enumerate(args):
        if not isinstance(x, torch.Tensor):
            continue
        if x.dtype in OTHER:
            yield f"argument {i} {OTHER[x.dtype]}", (*args[:i], x.to(OTHER[x.dtype]), *args[i + 1 :])
        for dim, size in enumerate(x.shape):
            if size > 1:
                yield f"argument {i} shorter in {dim}", (*args[:i], x.narrow(dim, 0, size - 1), *args[i + 1 :])


def plans():
    return sum(len(known) for known in launcher._all_plans)


NAMES = sorted(set(trials()) - BY_ADDRESS - FOR_ANY)


@pytest.mark.parametrize("name", NAMES)
def test_a_call_of_other_types_or_shapes_is_refused_or_planned_anew(name):
    trial = trials()[name][1]
    of = trial.checks[-1]
    with collecting() as found, torch.no_grad():
        args = trial.make(of, torch.device("meta"), None)
        trial.call(*args)
        for what, other in changed(args):
            before = len(found), plans()
            try:
                trial.call(*other)
            except (KernelError, RuntimeError):
                continue
            assert (len(found), plans()) != before or name == "cross_layer", f"{what} took the plan of another call"


def test_other_numbers_of_sequences_in_as_many_rows_are_another_plan():
    q, k, v = (torch.empty(256, n, 64, dtype=torch.bfloat16, device="meta") for n in (4, 2, 2))
    with collecting(), torch.no_grad():
        for num in (2, 5):
            starts = torch.empty(num, dtype=torch.int32, device="meta")
            kernels.varlen_attention(q, k, v, starts, starts, 256, 256, True)
        assert plans() == 2


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
def test_products_take_the_type_of_autocast_and_gradients_come_back_wide(narrow):
    q, k, v = (torch.randn(1, n, 9, 16, requires_grad=True) for n in (4, 2, 2))
    with torch.autocast("cpu", dtype=narrow):
        ours = kernels.attention(q, k, v, True)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        pairs = kernels.dot_interaction(torch.randn(3, 8), torch.randn(3, 2, 8))
    assert ours.dtype == theirs.dtype == pairs.dtype == narrow
    torch.testing.assert_close(ours, theirs, atol=0.03, rtol=0.03)
    ours.float().sum().backward()
    assert q.grad.dtype == torch.float32


def test_a_loss_under_autocast_takes_weights_of_float32_and_is_float32():
    x, weight = torch.randn(7, 16).bfloat16(), torch.randn(33, 16, requires_grad=True)
    target = torch.arange(7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = kernels.linear_cross_entropy(x, weight, target)
        theirs = torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, weight).float(), target)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0.02)
    ours.backward()
    assert weight.grad.dtype == torch.float32 and weight.grad.shape == weight.shape


def test_tensors_on_different_devices_are_refused_before_a_kernel_looks_at_them():
    q, k, v = (torch.empty(1, 2, 64, 64, dtype=torch.bfloat16, device="meta") for _ in range(3))
    with collecting(), torch.no_grad(), pytest.raises(KernelError, match="different devices"):
        kernels.attention(q, k, v, key_mask=torch.ones(1, 64, dtype=torch.bool))
