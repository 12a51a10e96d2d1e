"""The cross layer without a GPU: who multiplies, what fits, and what the compiler makes of rows that stay."""

import sys

import pytest
import torch

pytest.importorskip("triton")

from ridgeline.kernels import launcher
from ridgeline.kernels.compiler import facts_of
from ridgeline.kernels.contract import case
from ridgeline.kernels.cross_layer import config
from ridgeline.kernels.variants import variants_of

op = sys.modules["ridgeline.kernels.cross_layer.op"]


def test_rows_that_stay_leave_room_for_everything_else():
    assert config.fits(config.Resident(4, 1), 512) and not config.fits(config.Resident(4, 2), 512)
    for k in range(16, config.LONGEST_RESIDENT + 1, 8):
        assert config.chunks(k) % 2 == 0 and config.chunks(k) * 64 >= k
        assert all(config.fits(config.resident(1 << 16, n, k, 2), k) for n in (64, 256, 1024, 4096))


def test_rows_stay_where_they_are_many_and_sums_are_short():
    assert config.resident(65536, 256, 256, 2).stages and not config.resident(1000, 256, 256, 2).stages
    assert not config.resident(65536, 512, 512, 2).stages and not config.resident(65536, 256, 256, 4).stages


def test_two_groups_take_turns_at_the_tensor_cores():
    found = variants_of("cross_layer", [case("bfloat16", batch=65536, dim=256, rank=0)])
    (variant,) = (v for v in found if v.kernel == "cross_resident")
    facts = facts_of(launcher.kernel(variant.kernel).function, variant)
    assert facts.num("HGMMA") == 2 * 4 * 8, "two groups, four chunks of two halves of rows and 64 terms"
    assert facts.num("UTMASTG") and facts.num("USETMAXREG") and facts.shared_bytes <= 232448


@pytest.mark.parametrize(("m", "n", "k"), [(512, 512, 16384), (1024, 1024, 16384), (256, 3456, 6000), (64, 64, 1000)])
def test_a_long_inner_dim_is_cut_into_equal_stretches(m, n, k):
    cuts = config.cuts(m, n, k, 132)
    assert k % cuts == 0 and (cuts == 1 or k // cuts >= 512)
    enough = cuts * -(-m // 128) * -(-n // 128) >= 264
    assert enough or k % (2 * cuts) or k // (2 * cuts) < 512


def test_small_products_and_those_of_other_types_are_left_to_cublas():
    assert config.is_large(16384, 1024, 1024) and not config.is_large(4096, 256, 256)
    assert not config.is_large(1 << 24, 4096, 16), "float32 itself is more accurate for a few terms"
    assert not config.is_wide(256, 256), "each number that is taken apart meets too few others"
    on_host = torch.empty(16384, 1024)
    assert not op._halved(on_host, on_host.mT) and not op._halved(on_host.bfloat16(), on_host.bfloat16().mT)


@pytest.mark.parametrize(("batch", "dim", "rank"), [(16384, 1024, 0), (16384, 3456, 256), (65536, 1024, 64)])
def test_float32_products_end_in_what_follows_them(batch, dim, rank):
    """One pass over x0 and x: no other kernel of the layer reads what the product wrote."""
    found = variants_of("cross_layer", [case("float32", batch=batch, dim=dim, rank=rank)])
    assert not [v for v in found if v.kernel == "cross_pointwise"]
    ends = [dict(v.constants) for v in found if v.kernel == "matmul_halves"]
    assert any(end["BY"] and end["MORE"] and end["SAVE"] for end in ends)
    assert any(end["MORE"] and not end["BY"] for end in ends), "and a gradient is added in the product that follows it"


def test_what_a_product_ends_in_is_read_in_whole_accesses():
    found = variants_of("cross_layer", [case("float32", batch=16384, dim=1024, rank=0)])
    variant = next(v for v in found if v.kernel == "matmul_halves" and dict(v.constants)["SAVE"])
    made = facts_of(launcher.kernel(variant.kernel).function, variant)
    assert made.num("LDG.E.128") >= 32 and made.num("STG.E.128") == made.num("STG") - 1


def test_a_wave_of_large_tiles_is_enough():
    assert config.product(2048, 1024, 1024, 2).bm == 128 and config.product(2048, 512, 512, 2).bm == 64
    assert not config.product(16384, 256, 256, 4).bm, "float32 is left to halves and to cuBLAS"


def test_stretches_of_a_product_add_up_to_it(monkeypatch):
    monkeypatch.setattr(op, "_halved", lambda a, b, least: True)
    a, b = torch.randn(2048, 40, dtype=torch.float32), torch.randn(2048, 24)
    assert config.cuts(40, 24, 2048, 132) == 4
    torch.testing.assert_close(op._product(a.mT, b), a.mT @ b, rtol=1e-5, atol=1e-3)


def test_odd_rows_are_multiplied_in_longer_ones_where_that_is_worth_its_launches():
    assert config.pitch(2605, 429, 2) == 432 and config.pitch(738, 845, 2, backward=True) == 848
    assert config.pitch(738, 845, 2) == 845 and config.pitch(300, 845, 2, backward=True) == 845
    assert config.pitch(65536, 429, 4) == 429 and config.pitch(65536, 512, 2) == 512


def test_a_copy_has_its_own_columns_zeros_and_what_is_put_behind_them():
    x, more = torch.randn(3, 5), torch.randn(3)
    wide = op.widened(x, 8, 4, more)
    assert wide.shape == (4, 8) and torch.equal(wide[:3, :5], x) and torch.equal(wide[:3, 5], more)
    assert not wide[:, 6:].any() and not wide[3].any()
    assert torch.equal(op.widened(x, 8, ones=True)[:, 5], torch.ones(3))
    assert torch.equal(op.widened(wide, 5, 3), x), "and is cut where it has fewer"


def test_a_low_rank_layer_ends_in_tiles_that_ask_for_everything_at_once():
    found = variants_of("cross_layer", [case("bfloat16", batch=16384, dim=640, rank=64)])
    assert {v.kernel for v in found} == {"cross_end", "cross_again", "cross_low_rank_weights", "reduce_partials"}
    for variant in (v for v in found if v.kernel in ("cross_end", "cross_again")):
        made = facts_of(launcher.kernel(variant.kernel).function, variant)
        assert made.num_registers * 32 * variant.num_warps * 4 <= 65536 and made.num_spills == 0, "four programs"
        assert made.num("HGMMA") and made.num("STG.E.128") and made.num("LDG.E.128"), variant.kernel


@pytest.mark.parametrize(("dtype", "dim", "rank", "ends"), [
    ("float32", 640, 64, False), ("bfloat16", 644, 64, False), ("bfloat16", 640, 20, False),
    ("bfloat16", 640, 48, True), ("bfloat16", 640, 128, True),
])  # fmt: skip
def test_other_ranks_types_and_widths_save_their_product(dtype, dim, rank, ends):
    found = {v.kernel for v in variants_of("cross_layer", [case(dtype, batch=16384, dim=dim, rank=rank)])}
    assert not found & {"cross_again", "cross_low_rank_weights"} and ("cross_end" in found) == ends


@pytest.mark.parametrize(("m", "n", "ends"), [(64950, 200, False), (22230, 128, True), (1500, 256, True),
                                              (1500, 512, False)])  # fmt: skip
def test_full_layers_of_few_columns_end_in_such_tiles_too(m, n, ends):
    forward = [v for v in variants_of("cross_layer", [case("float16", batch=m, dim=n, rank=0)])
               if dict(v.constants).get("CROSS")]  # fmt: skip
    assert {v.kernel for v in forward} == {"cross_end" if ends else "cross_product"}
    for variant in forward if ends else []:
        assert facts_of(launcher.kernel(variant.kernel).function, variant).num_spills == 0


def test_few_rows_of_a_low_rank_layer_save_the_product():
    few, many = (variants_of("cross_layer", [case("float16", batch=m, dim=640, rank=64)]) for m in (500, 5000))
    saved = [[v for v in found if dict(v.constants).get("SAVE")] for found in (few, many)]
    assert [v.kernel for v in saved[0]] == ["cross_end"] and not saved[1]


@pytest.mark.parametrize(("m", "n", "rank"), [(52115, 1504, 64), (4096, 128, 16), (20857, 512, 128)])
def test_shares_of_both_weights_gradients_cover_all_rows(m, n, rank):
    chosen = config.weights(m, n, rank)
    across = -(-n // chosen.columns)
    assert across * (132 * chosen.programs_per_sm // across) <= 132 * chosen.programs_per_sm
    stage_bytes = 2 * chosen.step * (chosen.columns + rank) * 2
    assert chosen.num_stages * stage_bytes <= 227 * 1024


def test_nothing_is_saved_that_the_backward_pass_computes_again():
    x0, x = (torch.randn(4200, 24, dtype=torch.float16) for _ in range(2))
    weight, bias, down = torch.randn(24, 16).half(), torch.randn(24).half(), torch.randn(16, 24).half()
    y, u, inner = op.CROSS_LAYER.op(x0, x, weight, bias, down)
    assert u.numel() == 0 and inner.shape == (4200, 16)
    leaves = [t.requires_grad_() for t in (x0, x, weight, bias, down)]
    grads = torch.autograd.grad(op.cross_layer(*leaves), leaves, torch.ones_like(y))
    meant = [t.detach().double().requires_grad_() for t in leaves]
    exact = torch.autograd.grad(op.reference.eager(*meant), meant, torch.ones_like(y).double())
    for found, right in zip(grads, exact, strict=True):
        assert (found.double() - right).abs().max() <= 5e-3 * right.abs().max()


@pytest.mark.parametrize("biased", [True, False])
def test_a_low_rank_layer_traces_as_it_runs(biased):
    """What is saved depends on sizes: fake and real results agree, compiled gradients are the eager ones."""
    x0, x = (torch.randn(4200, 24, dtype=torch.float16, requires_grad=True) for _ in range(2))
    weight, down = (torch.randn(shape, dtype=torch.float16, requires_grad=True) for shape in ((24, 16), (16, 24)))
    bias = torch.randn(24, dtype=torch.float16, requires_grad=True) if biased else None
    torch.library.opcheck(op.CROSS_LAYER.op, (x0, x, weight, bias, down))
    leaves = [t for t in (x0, x, weight, bias, down) if t is not None]
    compiled = torch.compile(op.cross_layer, fullgraph=True, backend="aot_eager")
    found, meant = (torch.autograd.grad(call(x0, x, weight, bias, down).float().sum(), leaves)
                    for call in (compiled, op.cross_layer))  # fmt: skip
    for a, b in zip(found, meant, strict=True):
        torch.testing.assert_close(a, b)
