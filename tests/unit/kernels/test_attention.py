"""Attention without a GPU: the reference, its gradients, what is refused, what the compiler makes of the kernels."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from ridgeline.errors import KernelError
from ridgeline.kernels import Support, attention, launcher, primitives, supports, varlen_attention
from ridgeline.kernels.attention import config, gradient, kernel, launch, op
from ridgeline.kernels.compiler import facts_of, triton_kernel
from ridgeline.kernels.contract import case
from ridgeline.kernels.variants import variants_of


def drawn(*shape):
    return torch.randn(shape, requires_grad=True)


def agree(ours, theirs, leaves):
    """Outputs and gradients of two ways to compute the same."""
    torch.testing.assert_close(ours, theirs)
    seed = torch.randn_like(ours)
    grads = [torch.autograd.grad(out, leaves, seed) for out in (ours, theirs)]
    for mine, meant in zip(*grads, strict=True):
        torch.testing.assert_close(mine, meant, rtol=1e-4, atol=4e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (3, 1)])
def test_outputs_and_gradients_are_those_of_pytorch(causal, heads, key_heads):
    q, k, v = drawn(2, heads, 33, 16), drawn(2, key_heads, 33, 16), drawn(2, key_heads, 33, 16)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    agree(attention(q, k, v, causal), theirs, (q, k, v))


@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_over_keys_is_pytorchs_attention_mask(causal):
    q, k, v = drawn(3, 4, 20, 16), drawn(3, 2, 20, 16), drawn(3, 2, 20, 24)
    mask = torch.rand(3, 20) < 0.5
    mask[:, 0] = True  # every row sees something, so PyTorch has an answer for every row
    seen = mask[:, None, None, :].expand(3, 1, 20, 20)
    seen = seen & torch.ones(20, 20, dtype=torch.bool).tril() if causal else seen
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    agree(attention(q, k, v, causal, key_mask=mask), theirs, (q, k, v))


def test_rows_whose_keys_are_all_masked_are_zero_and_pass_no_gradient():
    q, k, v = drawn(2, 1, 5, 8), drawn(2, 1, 7, 8), drawn(2, 1, 7, 8)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1] = False
    out = attention(q, k, v, key_mask=mask)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert torch.equal(grad[1], torch.zeros_like(grad[1])) and grad[0].isfinite().all()


@pytest.mark.parametrize(("causal", "window"), [(True, (3, 0)), (False, (2, 5)), (False, (-1, 2)), (False, (4, -1))])
def test_a_window_shows_so_many_keys_before_and_behind(causal, window):
    q, k, v = drawn(1, 2, 12, 8), drawn(1, 2, 15, 8), drawn(1, 2, 15, 8)
    at = torch.arange(15)[None, :] - torch.arange(12)[:, None] - 3
    left, right = window[0], 0 if causal else window[1]
    seen = (at <= right if right >= 0 else at > -99) & (at >= -left if left >= 0 else at > -99)
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    agree(attention(q, k, v, causal, lower_right=True, window=window), theirs, (q, k, v))


def test_a_cap_bends_scores_by_tanh():
    q, k, v = drawn(1, 2, 9, 8), drawn(1, 2, 9, 8), drawn(1, 2, 9, 8)
    p = torch.softmax(1.5 * torch.tanh(q @ k.transpose(-1, -2) * 8**-0.5 / 1.5), -1)
    agree(attention(q, k, v, softcap=1.5), p @ v, (q, k, v))


def test_a_sink_is_one_more_score_without_a_value():
    q, k, v, sinks = drawn(2, 4, 9, 8), drawn(2, 2, 9, 8), drawn(2, 2, 9, 8), drawn(4)
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 8**-0.5
    p = torch.softmax(torch.cat([scores, sinks[None, :, None, None].expand(2, 4, 9, 1)], -1), -1)[..., :-1]
    agree(attention(q, k, v, sinks=sinks), p @ v.repeat_interleave(2, 1), (q, k, v, sinks))


def test_sequences_of_different_length_are_attended_one_by_one():
    lens, keys = [5, 0, 9, 1], [7, 3, 9, 4]
    q, k, v = drawn(15, 4, 8), drawn(23, 2, 8), drawn(23, 2, 8)
    a, c = (torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (lens, keys))
    ours = varlen_attention(q, k, v, a, c, 9, 9, True)
    parts = []
    for i in range(4):
        one = (x[s[i] : s[i + 1]][None].transpose(1, 2) for x, s in ((q, a), (k, c), (v, c)))
        parts.append(attention(*one, True, lower_right=True)[0].transpose(0, 1))
    agree(ours, torch.cat(parts), (q, k, v))


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


def test_results_lie_as_the_query_does():
    x = torch.randn(2, 5, 3, 8)
    assert attention(*[x.transpose(1, 2)] * 3).transpose(1, 2).is_contiguous()
    assert attention(*[x] * 3).is_contiguous()


@pytest.mark.parametrize(
    ("q", "k", "words"),
    [
        ((1, 3, 8, 64), (1, 2, 8, 64), "no multiple"),
        ((1, 2, 8, 264), (1, 2, 8, 264), "multiples of 8 to 256"),
        ((1, 2, 8, 12), (1, 2, 8, 12), "multiples of 8"),
        ((1, 2, 8, 64), (2, 2, 8, 64), "differ in batch"),
    ],
)
def test_what_no_kernel_takes_is_said(q, k, words):
    half = torch.empty(q, dtype=torch.float16), torch.empty(k, dtype=torch.float16), torch.empty(k, dtype=torch.float16)
    answer = supports("attention", *half, False, 1.0, 0)
    assert not answer and words in answer.reason


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"key_mask": torch.ones(1, 9, dtype=torch.bool)}, "bool [batch, keys]"),
        ({"key_mask": torch.ones(1, 8)}, "bool [batch, keys]"),
        ({"sinks": torch.ones(3)}, "one floating-point logit a query head"),
        ({"scale": 0.0}, "scale is positive"),
        ({"softcap": -1.0}, "softcap positive"),
    ],
)
def test_an_option_that_no_kernel_takes_is_said(options, words):
    x = torch.empty(1, 2, 8, 64, dtype=torch.float16)
    assert words in (op._support(x, x, x, **options) or "")


def test_float32_is_refused_with_the_reason():
    x = torch.empty(1, 2, 8, 64)
    assert "bfloat16 or float16" in supports("attention", x, x, x, False, 1.0, 0).reason
    with pytest.raises(KernelError, match="bfloat16 or float16"):
        op.ATTENTION.check(x, x, x, False, 1.0, 0)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    assert "bfloat16" in supports("varlen_attention", x[0], x[0], x[0], starts, starts).reason
    assert "int32" in supports("varlen_attention", x[0], x[0], x[0], starts.long(), starts).reason


def test_what_the_copy_engine_cannot_reach_is_copied_and_nothing_else():
    dense = torch.zeros(1, 8, 2, 64, dtype=torch.float16).transpose(1, 2)
    assert launch.reachable(dense) is dense
    wide = torch.ones(1, 2, 8, 65, dtype=torch.float16)[..., :64]
    for odd in (dense.transpose(2, 3), wide, dense[:, :1].expand(1, 2, 8, 64)):
        assert launch.reachable(odd) is not odd
        assert torch.equal(launch.reachable(odd), odd)


def test_a_dim_of_one_never_spoils_a_map_of_blocks():
    x = torch.zeros(1, 1, 4, 64, dtype=torch.float16).as_strided((1, 1, 4, 64), (3, 5, 64, 1))
    assert launch.is_reachable(x)
    assert launch.blocks(x, 64, 64).strides == (8, 8, 64, 1)


@pytest.mark.parametrize("options", [{}, {"key_mask": True, "softcap": 3.0}, {"sinks": True, "left": 2}])
def test_the_registered_op_passes_opcheck(options):
    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    options = dict(options)
    if options.get("key_mask"):
        options["key_mask"] = torch.tensor([[True, True, False, True, True]])
    if options.get("sinks"):
        options["sinks"] = torch.randn(2, requires_grad=True)
    torch.library.opcheck(op.ATTENTION.op, (x, x.detach(), x.detach(), True, 0.3, 0), options)


def test_the_registered_op_of_uneven_sequences_passes_opcheck():
    x, starts = torch.randn(7, 2, 8, requires_grad=True), torch.tensor([0, 3, 7], dtype=torch.int32)
    torch.library.opcheck(op.VARLEN_ATTENTION.op, (x, x.detach(), x.detach(), starts, starts, 4, 4, True, 0.3))


def causal_rows(rows):
    return config.row_lengths(rows, rows, -2 * rows, 0, config.Attention(128, 128, 2))


def causal_keys(rows):
    return config.key_lengths(rows, rows, -2 * rows, 0, config.Attention(64, 128, 2))


def test_programs_share_a_group_of_heads_only_where_there_are_too_few_blocks():
    assert config.key_split(causal_keys(2048), 8, 8, 132) == 2
    assert config.key_split(causal_keys(4096), 8, 8, 132) == 1
    assert config.key_split(causal_keys(4096), 4, 7, 132) == 7
    assert config.key_split(causal_keys(1280), 1, 1, 132) == 1


def test_heads_together_keep_their_keys_in_the_l2():
    assert config.heads_together(64, 8, 16384, 128, causal_rows(16384), 132) <= 32
    assert config.heads_together(4, 1, 1_000_000, 128, causal_rows(1280), 132) == 1


@pytest.mark.parametrize(("heads", "ratio", "rows"), [(64, 8, 2048), (64, 8, 8192), (128, 1, 2048), (32, 1, 4096)])
def test_causal_tiles_are_ordered_so_that_programs_end_together(heads, ratio, rows):
    lengths = causal_rows(rows)
    group = config.heads_together(heads, ratio, rows, 128, lengths, 132)
    assert group % ratio == 0 and config.busy_frac(lengths, heads, group, 132) >= 0.96
    below = causal_keys(rows)
    assert config.busy_frac(below, 32, config.parts_together(32, below, 132), 132) >= 0.96


def test_tiles_of_one_length_go_head_by_head():
    assert config.heads_together(512, 1, 512, 64, (1,) * 4, 132) == 33
    assert config.heads_together(64, 8, 8192, 128, (1,) * 64, 132) == 8
    assert config.parts_together(16, (1,) * 64, 132) == 3 and config.parts_together(2, (1,) * 8, 132) == 2


def test_lengths_under_edges_are_those_the_kernels_walk():
    of = config.Attention(128, 128, 2)
    assert config.row_lengths(300, 300, -600, 0, of) == (3, 2, 1)
    assert config.row_lengths(300, 300, -600, 600, of) == (3, 3, 3)
    assert config.row_lengths(128, 1000, -2000, 872, of) == (8,)
    assert config.row_lengths(512, 512, -127, 0, of) == (2, 2, 2, 1)
    of = config.Attention(64, 128, 2)
    assert config.key_lengths(300, 300, -600, 0, of) == (5, 3, 1)
    assert config.key_lengths(512, 512, -127, 0, of) == (4, 4, 4, 2)


def test_programs_go_back_and_forth_over_all_tiles():
    """What a program takes is written in kernel.py; here the same sum, over a device of five."""
    found = sorted(j * 5 + p + (j % 2) * (4 - 2 * p) for p in range(5) for j in range(3))
    assert found == list(range(15))


def compiled(kernel, **sizes):
    """Facts of the one variant of a kernel that a case launches."""
    of = case("bfloat16", **{"b": 2, "h": 8, "k": 8, "l": 2048, "s": 2048, "d": 128, "causal": False, **sizes})
    (variant,) = (v for v in variants_of("attention", [of]) if v.kernel == kernel)
    return variant, facts_of(launcher.kernel(kernel).function, variant)


@pytest.mark.parametrize(
    ("sizes", "products", "spills"),
    [
        ({"causal": True}, 96, 40),
        ({"d": 64, "mask": 0.5}, 48, 40),
        ({"d": 192, "dv": 128, "causal": True}, 120, 40),
        ({"d": 192, "causal": True}, 120, 40),
        ({"window": (128, 0), "causal": True, "cap": 5.0, "sinks": True}, 128, 80),
    ],
)
def test_the_forward_kernel_uses_the_tensor_cores_and_keeps_everything_in_registers(sizes, products, spills):
    _, facts = compiled("attention_forward", **sizes)
    assert facts.num("HGMMA") == products
    assert facts.num("UTMALDG") > 0, "blocks come by the copy engine"
    assert facts.num("USETMAXREG") > 0, "warps are specialized"
    assert facts.num_spills <= spills, "at most a few scalars"
    assert facts.num("STG.E.128") >= sizes.get("dv", sizes.get("d", 128)) // 8, "results leave in 16-byte pieces"
    assert facts.shared_bytes <= 227 * 1024


def test_the_backward_kernels_issue_seven_products_without_spilling_accumulators():
    _, facts = compiled("attention_queries", causal=True)
    assert facts.num("HGMMA") == 96 and facts.num_spills <= 50
    _, facts = compiled("attention_keys", causal=True)
    assert facts.num("HGMMA") == 96
    assert facts.num_spills <= 100 and facts.shared_bytes <= 227 * 1024
    assert facts.num("RED") == 0 and facts.num("ATOM") == 0, "no atomics: the same bits every time"


def test_the_maps_of_blocks_are_those_the_compiler_asked_for():
    of = case("bfloat16", b=2, h=8, k=8, l=2048, s=2048, d=128, causal=True)
    for variant in variants_of("attention", [of]):
        made = triton_kernel(launcher.kernel(variant.kernel).function, variant)
        wanted = getattr(made.metadata, "tensordesc_meta", None) or []
        named = [kind for _, kind in variant.types if kind.startswith("tensordesc")]
        assert len(wanted) == len(named)
        for found, kind in zip(wanted, named, strict=True):
            block = tuple(int(n) for n in kind.split("[")[1].split("]")[0].split(","))
            x = torch.empty(block, dtype=torch.float32 if "fp32" in kind else torch.bfloat16)
            mine = launcher.Blocks(x, block, x.stride(), block)
            assert mine.type_name == kind
            assert list(mine.box) == list(found["block_size"])
            assert {0: 0, 128: 3}[mine.swizzle_bytes] == found["swizzle"]


def test_the_fused_backward_adds_dq_through_the_copy_engine_with_all_products_in_flight():
    of = case("bfloat16", b=2, h=8, k=8, l=2048, s=2048, d=128, causal=False, deterministic=False)
    variants = {v.kernel: v for v in variants_of("attention", [of])}
    assert "attention_queries" not in variants and "attention_keys" not in variants
    facts = facts_of(launcher.kernel("attention_fused").function, variants["attention_fused"])
    assert facts.num("UTMAREDG") == 2 and facts.num("RED") == 0
    assert facts.num("HGMMA") == 64
    assert facts.num("WARPGROUP.DEPBAR") <= 10, "the compiler waits after every product where registers run out"
    assert facts.num_spills <= 110 and facts.shared_bytes <= 227 * 1024


@pytest.mark.parametrize(
    ("sizes", "names"), [({"d": 64}, "heads of 64"), ({"cap": 9.0}, "a cap"), ({"causal": True}, "a causal mask")]
)
def test_where_the_fused_backward_was_not_written_or_is_slower_there_are_two_kernels(sizes, names):
    of = case("bfloat16", **{"b": 1, "h": 2, "k": 2, "l": 2048, "s": 2048, "d": 128, "causal": False} | sizes,
              deterministic=False)  # fmt: skip
    assert "attention_queries" in {v.kernel for v in variants_of("attention", [of])}, names


def bands():
    """Rows, keys and bands of many kinds: (rows, keys, lo, hi, band)."""
    generator = torch.Generator().manual_seed(0)

    def draw(least, most):
        return int(torch.randint(least, most + 1, (), generator=generator))

    for i in range(50):
        rows, keys = draw(1, 400), draw(0, 400)
        shift = (0, keys - rows)[i % 2]
        yield rows, keys, 0, 0, 0
        yield rows, keys, 0, shift + draw(0, 2) * draw(0, 90), 1
        yield rows, keys, shift - draw(0, 200), shift + draw(0, 90), 2


def seen_by(row, rows, keys, lo, hi, band):
    first = max(0, row + lo) if band == 2 else 0
    last = min(keys, row + hi + 1) if band else keys
    return range(first, max(first, last))


@pytest.mark.parametrize(("block", "tile"), [(128, 128), (64, 128), (32, 128)])
def test_groups_of_rows_visit_every_block_they_see_in_the_order_it_is_fed(block, tile):
    for rows, keys, lo, hi, band in bands():
        for m in range(-(-rows // tile)):
            first, stop = kernel._blocks_seen.fn(m, keys, lo, hi, tile, block, band)
            assert 0 <= first < stop
            for row0 in range(m * tile, (m + 1) * tile, 64):
                begin, end = kernel._plain_blocks.fn(row0, first, stop - 1, keys, lo, hi, block, band, False)
                middle = min(begin, stop - 1)
                upper = range(stop - 2, end - 1, -1) if band else ()
                visited = [stop - 1, *upper, *range(end - 1, begin - 1, -1)]
                visited += range(middle - 1, first - 1, -1) if band == 2 else ()
                assert visited == list(range(stop - 1, first - 1, -1)), "as the feeding warp goes"
                for row in range(row0, min(row0 + 64, rows)):
                    seen = seen_by(row, rows, keys, lo, hi, band)
                    assert not seen or (seen[0] // block >= first and seen[-1] // block < stop)
                    assert all(n * block in seen and (n + 1) * block - 1 in seen for n in range(begin, end))
                begin, end = kernel._plain_blocks.fn(row0, first, stop, keys, lo, hi, block, band, True)
                rising = [*(range(first, min(begin, stop)) if band == 2 else ()), *range(begin, end), *range(end, stop)]
                assert rising == list(range(first, stop)), "dQ goes the other way"


@pytest.mark.parametrize(("block", "tile", "least"), [(128, 64, 0), (128, 64, 1), (64, 64, 0), (128, 32, 0)])
def test_blocks_of_keys_meet_every_row_that_sees_them(block, tile, least):
    for rows, keys, lo, hi, band in bands():
        for n in range(-(-keys // block)):
            first, edge, past, stop = gradient._rows_seeing.fn(n, rows, lo, hi, tile, block, band, least)
            assert 0 <= first <= edge <= past <= stop <= -(-rows // tile)
            assert stop - first >= least
            for row in range(rows):
                seen = seen_by(row, rows, keys, lo, hi, band)
                mine = [key for key in range(n * block, min(keys, (n + 1) * block)) if key in seen]
                assert not mine or first <= row // tile < stop
                if edge <= row // tile < past:
                    assert len(mine) == min(keys, (n + 1) * block) - n * block, "no mask is looked at there"


def test_every_tile_is_taken_once_and_heads_that_share_go_together():
    for num, heads, group in ((4, 512, 33), (7, 10, 3), (1, 5, 5)):
        found = [kernel._tile.fn(i, num, heads, group, True) for i in range(num * heads)]
        assert sorted(found) == [(m, h) for m in range(num) for h in range(heads)]
        assert {h for _, h in found[: num * group]} == set(range(group))


@pytest.mark.parametrize(("dim", "width"), [(59, 59), (111, 111), (64, 33), (300, 300)])
def test_head_dims_that_no_kernel_takes_are_padded_or_composed(dim, width):
    q = torch.randn(2, 4, 8, dim, dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(2, 2, 8, d, dtype=torch.bfloat16) for d in (dim, width))
    found = attention(q, k, v, True)
    meant = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True
    )
    assert found.shape == meant.shape and found.dtype == torch.bfloat16
    assert (found - meant).norm() < 0.003 * meant.norm()
    (grad,) = torch.autograd.grad(found.float().square().sum(), q)
    (right,) = torch.autograd.grad(meant.square().sum(), q)
    assert (grad - right).norm() < 0.01 * right.norm()


def test_supports_answers_for_any_arguments_of_any_primitive():
    x = torch.randn(2, 4, 8, 64)
    for name in primitives():
        for args in ((), (None,), (None,) * 6, (x, (1, 2)), (x, x, x, True, None, False, None, (128, 0))):
            assert isinstance(supports(name, *args), Support)
