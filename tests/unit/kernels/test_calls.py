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

SHARED = {("linear_cross_entropy", "argument 1 shorter in 0"), ("varlen_attention", "argument 2 shorter in 2")}
"""Rows of logits are as long as whole accesses: 5,000 classes and 4,999 have the same kernels. Values of 63 columns are
padded to 64."""

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
            anew = (len(found), plans()) != before or (name, what) in SHARED
            assert anew or name == "cross_layer", f"{what} took the plan of another call"


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
    q, k, v = (torch.empty(64, 2, 64, dtype=torch.bfloat16, device="meta") for _ in range(3))
    starts = torch.tensor([0, 64], dtype=torch.int32)
    with collecting(), torch.no_grad(), pytest.raises(KernelError, match="different devices"):
        kernels.varlen_attention(q, k, v, starts, starts, 64, 64)


def test_decoding_takes_a_tensor_for_its_result():
    for name in ("paged_attention", "paged_latent_attention", "decode_attention"):
        trial = trials()[name][1]
        of = trial.checks[0]
        args = trial.make(of, torch.device("cpu"), torch.Generator().manual_seed(0))
        meant = trial.call(*args)
        out = torch.full_like(meant, float("nan"))
        assert trial.call(*args, out=out) is out and torch.equal(out, meant)
        with collecting(), torch.no_grad():
            there = trial.make(of, torch.device("meta"), None)
            with pytest.raises(KernelError, match="out must be"):
                trial.call(*there, out=torch.empty(1, device="meta"))
            assert trial.call(*there, out=torch.empty_like(meant, device="meta")).shape == meant.shape


def test_rows_of_a_sequence_without_keys_have_zeros_and_gradients():
    q, k, v = (torch.randn(n, heads, 16).bfloat16().requires_grad_() for n, heads in ((9, 4), (6, 2), (6, 2)))
    q_starts, k_starts = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 9], [0, 0, 6]))
    out = kernels.varlen_attention(q, k, v, q_starts, k_starts, 5, 6, True)
    out.float().sum().backward()
    assert torch.equal(out[:5], torch.zeros(5, 4, 16, dtype=torch.bfloat16)) and bool((q.grad[:5] == 0).all())
    assert all(bool(x.grad.isfinite().all()) and x.grad.count_nonzero() for x in (q, k, v))
