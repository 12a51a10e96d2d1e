"""Weights of eight and four bits without a GPU: what they restore, what is refused, and what the compiler makes."""

import pytest
import torch

pytest.importorskip("triton")

import torch.nn.functional as F

from ridgeline.errors import KernelError
from ridgeline.kernels import launcher, quantize_weight, quantized_linear, supports, tuning
from ridgeline.kernels.compiler import facts_of
from ridgeline.kernels.linear.config import Linear
from ridgeline.kernels.quantized_linear import reference
from ridgeline.kernels.quantized_linear.op import QUANTIZED_LINEAR


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("bits", "most"), [(8, 0.008), (4, 0.11)])
def test_narrow_weights_restore_to_within_their_steps(bits, most):
    weight = drawn(64, 512)
    q, scale = quantize_weight(weight, bits)
    found = reference.restored(q, scale, torch.float32)
    assert (found - weight).norm() / weight.norm() < most
    assert q.nbytes * (8 // bits) == weight.numel()


def test_integers_that_fit_are_kept_exactly_and_in_their_places():
    weight = torch.randint(-7, 8, (16, 256), generator=torch.Generator().manual_seed(1)).float()
    weight[:, ::128] = 7
    q, scale = quantize_weight(weight, 4)
    assert torch.equal(reference.restored(q, scale, torch.float32), weight)
    weight[:, 0] = 127
    assert torch.equal(reference.restored(*quantize_weight(weight, 8), torch.float32), weight)


def test_a_cut_largest_weight_may_cost_less_than_a_coarse_step():
    weight = drawn(32, 1280)
    plain = (weight.unflatten(1, (-1, 128)).abs().amax(2, keepdim=True) / 7).half().float()
    rounded = ((weight.unflatten(1, (-1, 128)) / plain).round().clamp(-8, 7) * plain).flatten(1)
    found = reference.restored(*quantize_weight(weight, 4), torch.float32)
    assert (found - weight).norm() < 0.97 * (rounded - weight).norm()


@pytest.mark.parametrize("bits", [8, 4])
def test_it_is_a_linear_layer_with_norm_gate_and_sum(bits):
    x, g, r, b = drawn(2, 3, 128).bfloat16(), drawn(128).bfloat16(), drawn(2, 3, 10).bfloat16(), drawn(20).bfloat16()
    q, scale = quantize_weight(drawn(20, 128), bits)
    full = reference.restored(q, scale, torch.float32)
    gate, up = F.linear(F.rms_norm(x.float(), (128,), g.float(), 1e-6), full, b.float()).chunk(2, -1)
    found = quantized_linear(x, q, scale, b, norm_weight=g, activation="silu", gated=True, residual=r)
    torch.testing.assert_close(found, (F.silu(gate) * up + r.float()).bfloat16())


def test_a_weight_of_zeros_stays_zero():
    for bits in (8, 4):
        assert not reference.restored(*quantize_weight(torch.zeros(4, 128), bits), torch.float32).any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": drawn(17, 256).bfloat16()}, "at most 16"),
        ({"x": drawn(2, 256)}, "float32"),
        ({"x": drawn(2, 128).bfloat16()}, "do not multiply"),
        ({"scale": torch.ones(9)}, "scale"),
        ({"bias": drawn(8)}, "different types"),
    ],
)
def test_what_no_kernel_takes_is_said(change, words):
    q, scale = quantize_weight(drawn(8, 256), 8)
    given = {"x": drawn(2, 256).bfloat16(), "weight": q, "scale": scale, "bias": None} | change
    assert words in supports("quantized_linear", *given.values()).reason


def test_four_bits_want_whole_groups():
    with pytest.raises(KernelError, match="multiple of 128"):
        quantize_weight(drawn(4, 100), 4)


def _variants(rows, n, k, bits, chosen=None):
    x = torch.empty(rows, k, dtype=torch.bfloat16, device="meta")
    of = {8: (k, torch.int8, (n,), torch.float32), 4: (k // 2, torch.uint8, (n, k // 128), torch.float16)}[bits]
    w = torch.empty(n, of[0], dtype=of[1], device="meta")
    scale = torch.empty(of[2], dtype=of[3], device="meta")
    with launcher.collecting() as found, tuning.forced("quantized_linear", chosen or _default(rows, k, n, bits)):
        QUANTIZED_LINEAR(x, w, scale, None, None, None, 1e-6, 0.0, "none", False)
    return [facts_of(launcher.kernel(variant.kernel).function, variant) for variant in found[:1]][0]


def _default(rows, k, n, bits):
    from ridgeline.kernels.quantized_linear import config

    return config.choose(rows, k, n, bits, False, 132)


def test_four_bits_become_halves_without_conversions_and_reach_the_tensor_cores_from_registers():
    made = _variants(4, 4096, 4096, 4)
    assert made.num_spills == 0 and made.num("I2F") == 0
    assert made.num("HGMMA") + made.num("HMMA") > 0 and made.num("STS") <= 4
    assert made.num("PRMT") > 0 and made.num("HADD2") > 0


def test_one_row_of_eight_bits_reads_sixteen_bytes_a_thread():
    made = _variants(1, 4096, 4096, 8)
    assert made.num_spills == 0 and made.num("LDG.E.EF.128") > 0 and made.num("LDG.E.U8") == 0


def test_small_tiles_read_shared_memory_in_words():
    made = _variants(1, 4096, 4096, 4, Linear("tile", 16, 128, 1, 4))
    assert made.num("LDS.64") > 0 and made.num("LDS.U16") == 0
