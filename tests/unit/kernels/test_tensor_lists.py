"""Optimizers, clipping and quantization over lists, on the host: semantics, state dicts, errors, prices."""

from copy import deepcopy

import pytest
import torch

from ridgeline import kernels
from ridgeline.dtypes import dtype
from ridgeline.errors import KernelError
from ridgeline.graph.declared import checked_cost
from ridgeline.graph.types import TensorType
from ridgeline.kernels import tensor_lists
from ridgeline.kernels.adamw import reference

SIZES = ((70, 90), (7,), (), (5000,))


def params(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in SIZES]


def put_grads(tensors, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in tensors:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def stepped(tensors, made, steps=(1, 2, 3), before=lambda tensors: None):
    for seed in steps:
        put_grads(tensors, seed)
        before(tensors)
        made.step()
    return tensors


def agree(ours, theirs, **tolerance):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.3, "betas": (0.8, 0.9)}, {"maximize": True}])
def test_adamw_takes_pytorchs_steps(options):
    ours, theirs = params(), params()
    stepped(ours, kernels.AdamW(ours, 1e-2, **options))
    stepped(theirs, torch.optim.AdamW(theirs, 1e-2, **options))
    agree(ours, theirs, rtol=1e-5, atol=1e-6)


def test_adamw_clips_by_the_norm_of_everything_and_leaves_gradients_alone():
    ours, theirs = params(), params()
    made = kernels.AdamW([{"params": ours[:2]}, {"params": ours[2:], "lr": 1e-3}], 1e-2, max_norm=0.5)
    stepped(ours, made)
    kept = [p.grad.clone() for p in ours]
    other = torch.optim.AdamW([{"params": theirs[:2]}, {"params": theirs[2:], "lr": 1e-3}], 1e-2)
    stepped(theirs, other, before=lambda tensors: torch.nn.utils.clip_grad_norm_(tensors, 0.5))
    agree(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(made.norm, torch.nn.utils.get_total_norm(kept))
    put_grads(theirs, 3)
    assert all(torch.equal(a, b.grad) for a, b in zip(kept, theirs, strict=True))


def test_state_dicts_go_to_pytorch_and_come_back():
    ours, theirs = params(), params()
    mine, other = kernels.AdamW(ours, 1e-2), torch.optim.AdamW(theirs, 1e-2)
    stepped(ours, mine)
    stepped(theirs, other)
    mine.load_state_dict(deepcopy(other.state_dict()))
    other.load_state_dict(deepcopy(mine.state_dict()))
    stepped(ours, mine, (4,))
    stepped(theirs, other, (4,))
    agree(ours, theirs, rtol=1e-5, atol=1e-6)
    assert set(mine.state_dict()["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}


def test_moments_of_16_bit_parameters_stay_float32_when_loaded():
    ours = params(dtype=torch.bfloat16)
    mine = kernels.AdamW(ours, 1e-2, master_weights=True)
    stepped(ours, mine)
    again = kernels.AdamW(ours, 1e-2, master_weights=True)
    again.load_state_dict(deepcopy(mine.state_dict()))
    for p in ours:
        for name in ("exp_avg", "exp_avg_sq", "master"):
            assert again.state[p][name].dtype == torch.float32
            assert torch.equal(again.state[p][name], mine.state[p][name])
        assert torch.equal(p, mine.state[p]["master"].bfloat16())


def test_master_weights_gather_updates_too_small_for_bfloat16():
    p = [torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))]
    for master in (False, True):
        with torch.no_grad():
            p[0].fill_(1.0)
        made = kernels.AdamW(p, 1e-4, weight_decay=0.0, master_weights=master)
        for _ in range(40):
            p[0].grad = torch.ones_like(p[0])
            made.step()
        assert bool((p[0] < 1).all()) == master


def test_eight_bit_moments_are_codes_in_memory_and_numbers_in_the_state_dict():
    ours, exact = params(), params()
    mine = kernels.AdamW(ours, 1e-2, state_bits=8)
    stepped(ours, mine)
    stepped(exact, kernels.AdamW(exact, 1e-2))
    large = mine.state[ours[0]]
    assert large["exp_avg"].dtype == torch.int8 and large["exp_avg_sq"].dtype == torch.uint8
    assert mine.state[ours[1]]["exp_avg"].dtype == torch.float32, "too few elements to be worth codes"
    assert mine.state_dict()["state"][0]["exp_avg"].dtype == torch.float32
    moved = torch.cat([(a - b).detach().view(-1) for a, b in zip(ours, exact, strict=True)])
    assert moved.square().mean().sqrt() < 0.1 * 1e-2, "far less than the steps themselves"
    again = kernels.AdamW(ours, 1e-2, state_bits=8)
    again.load_state_dict(deepcopy(mine.state_dict()))
    assert torch.equal(again.state[ours[0]]["exp_avg"], large["exp_avg"])
    assert torch.equal(again.state[ours[0]]["exp_avg_sq"], large["exp_avg_sq"])


def test_codes_keep_what_is_not_zero_from_becoming_zero():
    v = torch.tensor([1.0, 1e-14, 0.0]).repeat(100)
    codes, scales = reference.coded(torch.zeros(300), v)[1::2]
    back = reference.decoded(torch.zeros(300, dtype=torch.int8), codes, torch.zeros(2), scales)[1]
    assert torch.equal(back == 0, v == 0)


def test_a_scalers_overflow_skips_the_step():
    ours = params()
    mine = kernels.AdamW(ours, 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    put_grads(ours, 1)
    ours[0].grad[0, 0] = torch.inf
    before = [p.detach().clone() for p in ours]
    scaler.step(mine)
    assert all(torch.equal(a, b) for a, b in zip(ours, before, strict=True))


def test_clip_grad_norm_is_pytorchs():
    ours, theirs = params(), params()
    for bound in (0.5, 1e6):
        for tensors in (ours, theirs):
            put_grads(tensors, 3)
        found, meant = kernels.clip_grad_norm_(ours, bound), torch.nn.utils.clip_grad_norm_(theirs, bound)
        torch.testing.assert_close(found, meant)
        agree([p.grad for p in ours], [p.grad for p in theirs])
    torch.testing.assert_close(kernels.grad_norm([p.grad for p in ours]), meant)
    ours[0].grad[0, 0] = torch.nan
    with pytest.raises(RuntimeError, match="not finite"):
        kernels.clip_grad_norm_(ours, 1.0, error_if_nonfinite=True)
    with pytest.raises(KernelError, match="2-norm"):
        kernels.clip_grad_norm_(ours, 1.0, norm_type=1.0)


def test_the_functional_form_updates_in_place():
    p, g, m, v = torch.ones(8), torch.full((8,), 2.0), torch.zeros(8), torch.zeros(8)
    step = torch.zeros(())
    norm = kernels.adamw_([p], [g], [m], [v], [step], lr=0.1, weight_decay=0.0, max_norm=1.0)
    torch.testing.assert_close(norm, g.norm())
    torch.testing.assert_close(p, torch.full((8,), 0.9), rtol=1e-4, atol=0)
    assert step == 1 and bool((m > 0).all())


def test_wrong_arguments_are_named():
    p = params()
    for options, word in (
        ({"state_bits": 16}, "32 or 8"),
        ({"betas": (1.0, 0.9)}, "betas"),
        ({"max_norm": -1}, "below"),
    ):
        with pytest.raises(KernelError, match=word):
            kernels.AdamW(p, **options)
    with pytest.raises(KernelError, match="dtype is one of"):
        kernels.quantize(p[0].detach(), torch.int16)
    with pytest.raises(KernelError, match="power of two"):
        kernels.quantize(torch.ones(2, 100), per="block", block=32)
    with pytest.raises(KernelError, match="per is one of"):
        kernels.quantize(torch.ones(2, 100), per="column")


def test_every_chunk_has_its_place_and_none_is_lost():
    chunks = tensor_lists.chunked((5, 0, 12, 4), 4, torch.device("cpu"))
    assert chunks.table.tolist() == [[0, 0], [0, 1], [2, 0], [2, 1], [2, 2], [3, 0]]
    assert chunks.num == 6 and chunks.length == 4


def test_chunks_grow_with_the_list_within_bounds():
    assert tensor_lists.chunk_length(1000, 256, 8192, -1) == 256
    assert tensor_lists.chunk_length(10**9, 256, 8192, -1) == 8192
    assert 256 < tensor_lists.chunk_length(10**6, 256, 8192, -1) < 8192


@pytest.mark.parametrize("per", ["tensor", "row", "block"])
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_quantized_numbers_come_back(kind, per):
    x = torch.randn(6, 256, generator=torch.Generator().manual_seed(1))
    q, scale = kernels.quantize(x, kind, per=per, block=64)
    assert q.dtype == kind and scale.shape == {"tensor": (), "row": (6, 1), "block": (6, 4)}[per]
    back = kernels.dequantize(q, scale, torch.float32)
    step = {torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3, torch.int8: 0.0}[kind]
    assert bool(((back - x).abs() <= step * x.abs() + 0.51 * x.abs().max() / 127).all())


def test_a_given_scale_is_used_and_what_is_outside_its_range_becomes_the_largest():
    q, scale = kernels.quantize(
        torch.tensor([[1.0, 1000.0, -1000.0]]), torch.int8, per="tensor", scale=torch.tensor(0.5)
    )
    assert q.tolist() == [[2, 127, -127]] and scale == 0.5


def test_an_optimizer_step_is_priced_by_what_it_moves():
    tensors = [TensorType((1000,), dtype("float32")) for _ in range(4)] + [TensorType((), dtype("float32"))]
    found = checked_cost("ridgeline_kernels::adamw", tuple(tensors), (), {})
    assert found["read_bytes"] == 16_004 and found["written_bytes"] == 12_004
