"""Decoding over a contiguous cache without a GPU: the reference, what is refused, what the compiler makes of it."""

import pytest
import torch

pytest.importorskip("triton")

import torch.nn.functional as F

from ridgeline.kernels import decode_attention, launcher, supports
from ridgeline.kernels.compiler import facts_of
from ridgeline.kernels.contract import case, trials
from ridgeline.kernels.decode_attention import config
from ridgeline.kernels.variants import variants_of

TRIAL = trials()["decode_attention"][1]


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


Q, K, V = drawn(2, 4, 1, 16), drawn(2, 2, 50, 16), drawn(2, 2, 51, 16)[:, :, 1:]


def test_it_is_attention_of_one_position_with_shared_key_heads():
    torch.testing.assert_close(decode_attention(Q, K, V), F.scaled_dot_product_attention(Q, K, V, enable_gqa=True))


@pytest.mark.parametrize("mask", [torch.rand(2, 1, 1, 50) < 0.5, drawn(1, 4, 1, 50), torch.rand(1, 50) < 0.7])
def test_masks_hide_or_are_added(mask):
    meant = F.scaled_dot_product_attention(Q, K, V, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(decode_attention(Q, K, V, mask), meant)


def test_lengths_end_each_sequence():
    found = decode_attention(Q, K, V, lengths=torch.tensor([7, 50]))
    for i, length in enumerate((7, 50)):
        meant = F.scaled_dot_product_attention(
            Q[i : i + 1], K[i : i + 1, :, :length], V[i : i + 1, :, :length], enable_gqa=True
        )
        torch.testing.assert_close(found[i : i + 1], meant)


def test_a_sequence_that_sees_nothing_gets_zeros():
    assert torch.equal(decode_attention(Q, K, V, torch.zeros(2, 1, 1, 50, dtype=torch.bool)), torch.zeros_like(Q))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((Q[:, :3], K, V), "no multiple"),
        ((Q.expand(2, 4, 2, 16), K, V), "[batch, heads, 1, head dim]"),
        ((Q, K, V.half()), "different types"),
        ((Q, K, V, torch.ones(2, 1, 1, 49)), "broadcast"),
        ((Q, K, V, torch.ones(2, 1, 1, 50, dtype=torch.int32)), "int32"),
        ((Q, K, V, None, torch.tensor([1.0, 2.0])), "lengths are"),
        ((Q, K, V, None, torch.tensor([1, 2, 3])), "one number a sequence"),
    ],
)
def test_what_no_kernel_takes_is_said(args, words):
    assert words in supports("decode_attention", *args, *(None,) * (5 - len(args)), 1.0).reason


def test_keys_come_by_asynchronous_16_byte_copies_and_nothing_spills():
    for variant in variants_of("decode_attention", TRIAL.races[:2]):
        made = facts_of(launcher.kernel(variant.kernel).function, variant)
        assert made.num_spills == 0
        if variant.kernel.endswith("share"):
            assert made.num("LDGSTS.E.BYPASS.128") >= 16 and made.num("HMMA") > 0


def test_one_sequence_is_shared_by_the_whole_device():
    assert config.choose(1, 8, 2048, 128, 132) == config.Decode(64, 32, 4, 2)
    assert config.choose(1, 8, 32768, 128, 132).num_stages == 3
    assert config.choose(128, 32, 1024, 128, 132).shares == 1


@pytest.mark.parametrize(("batch", "shares"), [(1, 33), (4, 8), (5, 6), (8, 4), (32, 1), (17, 2)])
def test_no_multiprocessor_has_more_to_read_than_most(batch, shares):
    assert config.choose(batch, 8, 4096, 128, 132).shares == shares


def test_few_shares_are_joined_by_the_last_program_and_many_by_small_ones():
    few, many = (case("bfloat16", b=b, h=32, k=8, s=2112, d=128, hide="") for b in (4, 1))
    (variant,) = variants_of("decode_attention", [few])
    made = facts_of(launcher.kernel(variant.kernel).function, variant)
    assert made.num_spills == 0 and made.num("ATOMG.E.ADD.64.STRONG.GPU") == 1
    (join,) = (v for v in variants_of("decode_attention", [many]) if v.kernel == "decode_join")
    assert dict(join.constants)["D"] == 32
