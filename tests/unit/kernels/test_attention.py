"""Attention without a GPU: the reference, its gradients, what is refused, what the compiler makes of the kernels."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from ridgeline.errors import KernelError
from ridgeline.kernels import attention, supports
from ridgeline.kernels.attention import config, kernel, op
from ridgeline.kernels.gluon import Unplaced, gluon_facts


def drawn(*shape):
    return torch.randn(shape, requires_grad=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (3, 1)])
def test_outputs_and_gradients_are_those_of_pytorch(causal, heads, key_heads):
    q, k, v = drawn(2, heads, 33, 16), drawn(2, key_heads, 33, 16), drawn(2, key_heads, 33, 16)
    ours = attention(q, k, v, causal)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(ours, theirs)
    seed = torch.randn_like(ours)
    for mine, meant in zip(torch.autograd.grad(ours, (q, k, v), seed), torch.autograd.grad(theirs, (q, k, v), seed)):
        torch.testing.assert_close(mine, meant, rtol=1e-4, atol=2e-6)


def test_the_last_row_sees_the_last_key_when_aligned_to_the_lower_right():
    q, k, v = drawn(1, 1, 3, 8), drawn(1, 1, 10, 8), drawn(1, 1, 10, 8)
    whole = attention(q[:, :, -1:], k, v)
    torch.testing.assert_close(attention(q, k, v, True, lower_right=True)[:, :, -1:], whole)
    assert not torch.allclose(attention(q, k, v, True)[:, :, -1:], whole)


def test_rows_that_see_no_key_are_zero():
    q, k, v = drawn(1, 1, 5, 8), drawn(1, 1, 2, 8), drawn(1, 1, 2, 8)
    out = attention(q, k, v, True, lower_right=True)
    assert torch.equal(out[:, :, :3], torch.zeros_like(out[:, :, :3]))
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize(
    ("q", "k", "words"),
    [
        ((1, 3, 8, 64), (1, 2, 8, 64), "no multiple"),
        ((1, 2, 8, 160), (1, 2, 8, 160), "multiples of 8 to 128"),
        ((1, 2, 8, 12), (1, 2, 8, 12), "multiples of 8"),
        ((1, 2, 8, 64), (2, 2, 8, 64), "differ in batch"),
    ],
)
def test_what_no_kernel_takes_is_said(q, k, words):
    half = torch.empty(q, dtype=torch.float16), torch.empty(k, dtype=torch.float16), torch.empty(k, dtype=torch.float16)
    answer = supports("attention", *half, False, 1.0, 0)
    assert not answer and words in answer.reason


def test_float32_is_refused_with_the_reason():
    x = torch.empty(1, 2, 8, 64)
    assert "bfloat16 or float16" in supports("attention", x, x, x, False, 1.0, 0).reason
    with pytest.raises(KernelError, match="bfloat16 or float16"):
        op.ATTENTION.check(x, x, x, False, 1.0, 0)


def test_what_the_copy_engine_cannot_reach_is_copied_and_nothing_else():
    dense = torch.empty(1, 8, 2, 64, dtype=torch.float16).transpose(1, 2)
    assert op._reachable(dense) is dense
    wide = torch.empty(1, 2, 8, 65, dtype=torch.float16)[..., :64]
    for odd in (dense.transpose(2, 3), wide, dense[:, :1].expand(1, 2, 8, 64)):
        assert op._reachable(odd) is not odd
        assert torch.equal(op._reachable(odd).nan_to_num(), odd.nan_to_num())


def test_the_registered_op_passes_opcheck():
    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    torch.library.opcheck(op.ATTENTION.op, (x, x.detach(), x.detach(), True, 0.3, 0))


def test_few_programs_share_a_group_of_heads_and_many_do_not():
    assert config.key_split(16 * 8, 8, 132, True) == 8
    assert config.key_split(128 * 8, 8, 132, True) == 1
    assert config.key_split(10, 1, 132, True) == 1


def test_heads_together_keep_their_keys_in_the_l2():
    assert config.heads_together(64, 8, 16384, 128) == 24
    assert config.heads_together(64, 8, 2048, 128) == 64
    assert config.heads_together(4, 1, 1_000_000, 128) == 1


def blocks(rows, dim):
    x = Unplaced((2, 8, 512, dim), torch.bfloat16)
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    block = [1, 1, rows, config.padded(dim)]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


def meta(dtype):
    return torch.empty(16, dtype=dtype, device="meta")


@pytest.mark.parametrize("causal", [False, True])
def test_the_forward_kernel_uses_the_tensor_cores_and_keeps_everything_in_registers(causal):
    args = (blocks(64, 128), blocks(128, 128), blocks(128, 128), meta(torch.bfloat16), meta(torch.float32), 2, 8, 8,
            512, 512, 0, 128, 8, 0.1)
    options = {"BM": 128, "BN": 128, "D": 128, "STAGES": 2, "CAUSAL": causal, "num_warps": 4, "maxnreg": 168}
    facts = gluon_facts(kernel.forward, args, options)
    assert facts.num("HGMMA") == (96 if causal else 64)
    assert facts.num("UTMALDG") > 0, "blocks come by the copy engine"
    assert facts.num("USETMAXREG") > 0, "warps are specialized"
    assert facts.num_spills <= 4, "at most a scalar or two"
    assert facts.num("STG.E.128") >= 16, "results leave in 16-byte pieces"
    assert facts.shared_bytes <= 227 * 1024


@pytest.mark.parametrize("causal", [False, True])
def test_the_backward_kernels_issue_seven_products_without_spilling_accumulators(causal):
    common = {"D": 128, "STAGES": 2, "CAUSAL": causal, "num_warps": 4, "maxnreg": 168}
    queries = (blocks(64, 128), blocks(64, 128), blocks(128, 128), blocks(128, 128), meta(torch.bfloat16),
               meta(torch.float32), meta(torch.float32),
               512, 2, 8, 8, 512, 512, 0, 128, 8, 0.1, 0.1)  # fmt: skip
    facts = gluon_facts(kernel.backward_queries, queries, {"BM": 128, "BN": 128, **common})
    assert facts.num("HGMMA") == 96 and facts.num_spills <= 40
    numbers = numbers_of(2 * 8 * 512)
    keys = (blocks(64, 128), blocks(128, 128), blocks(128, 128), blocks(64, 128), numbers, numbers,
            meta(torch.bfloat16), meta(torch.bfloat16),
            512, 2, 8, 8, 1, 512, 512, 0, 128, 0.1, 0.1)  # fmt: skip
    facts = gluon_facts(kernel.backward_keys, keys, {"BM": 64, "BN": 128, **common})
    assert facts.num("HGMMA") == 96
    assert facts.num_spills <= 40 and facts.shared_bytes <= 227 * 1024
    assert facts.num("RED") == 0 and facts.num("ATOM") == 0, "no atomics: the same bits every time"


def numbers_of(num):
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return TensorDescriptor(Unplaced((num,), torch.float32), [num], [1], [64], flat)
