"""Paged decoding without a GPU: the reference, what is refused, and what the compiler makes of it."""

import pytest
import torch

pytest.importorskip("triton")

from ridgeline.kernels import launcher, paged_attention, supports
from ridgeline.kernels.compiler import compile_variant, facts_of, facts_of_cubin, hinted, triton_kernel
from ridgeline.kernels.contract import case, trials
from ridgeline.kernels.paged_attention import config, reference
from ridgeline.kernels.variants import variants_of

TRIAL = trials()["paged_attention"][1]


def made(**sizes):
    of = case("float32", **{"b": 2, "h": 4, "k": 2, "s": 50, "d": 16, "page": 16, "uneven": True, **sizes})
    return TRIAL.make(of, torch.device("cpu"), torch.Generator().manual_seed(0))


def test_it_is_attention_over_the_keys_of_each_sequence():
    q, k, v, table, lens = made()
    out = paged_attention(q, k, v, table, lens)
    for i in range(2):
        keys = k[table[i].long()].flatten(0, 1)[: lens[i]].repeat_interleave(2, 1)
        values = v[table[i].long()].flatten(0, 1)[: lens[i]].repeat_interleave(2, 1)
        p = torch.softmax(torch.einsum("hd,shd->hs", q[i], keys) * 16**-0.5, -1)
        torch.testing.assert_close(out[i], torch.einsum("hs,shd->hd", p, values))


def test_a_sequence_without_keys_gets_zeros():
    q, k, v, table, lens = made()
    lens[1] = 0
    assert torch.equal(paged_attention(q, k, v, table, lens)[1], torch.zeros(4, 16))


def test_keys_come_by_asynchronous_16_byte_copies_and_nothing_spills():
    for variant in variants_of("paged_attention", TRIAL.races[1:2]):
        facts = facts_of(launcher.kernel(variant.kernel).function, variant)
        assert facts.num_spills == 0
        if variant.kernel.endswith("share"):
            assert facts.num("LDGSTS.E.BYPASS.128") >= 16 and facts.num("HMMA") > 0


def share_of(of, chosen=None, monkeypatch=None):
    """The kernel that reads the cache, and what the compiler made of it."""
    if chosen is not None:
        monkeypatch.setattr(config, "choose", lambda *sizes, **named: chosen)
        launcher.forget_plans()
    (variant,) = (v for v in variants_of("paged_attention", [of]) if v.kernel == "paged_share")
    launcher.forget_plans()
    return variant, facts_of(launcher.kernel(variant.kernel).function, variant)


LONG = case("bfloat16", b=1, h=32, k=8, s=32768, d=128, page=16, uneven=False)


def test_two_blocks_are_on_their_way_in_every_program_that_fits():
    variant, facts = share_of(LONG)
    block = facts.num("LDGSTS") // variant.num_stages
    assert variant.num_stages == 4 and block >= 16, "three blocks before the loop, one in it"
    programs = config.choose(1, 8, 32768, 128, 132).programs // 132
    assert facts.shared_bytes >= 3 * config.BLOCK_BYTES
    assert programs * (facts.shared_bytes + 1024) <= 228 * 1024
    assert programs * 32 * variant.num_warps * facts.num_registers <= 65536


def test_through_registers_the_next_block_is_on_its_way_without_spills(monkeypatch):
    _, facts = share_of(LONG, config.Paged(32, 396, 4, 1, 2, True, 168), monkeypatch)
    assert facts.num_registers <= 168 and facts.num_spills == 0, "three programs fit on a multiprocessor"
    assert facts.num("LDGSTS") == 0 and facts.num("LDG.E.EF.128") >= 16


def test_the_copy_engine_feeds_six_blocks_and_what_it_reads_leaves_first(monkeypatch):
    chosen = config.Paged(64, 132, 4, 6, leaves=True, max_registers=config.FED_REGISTERS, fed=True)
    monkeypatch.setattr(config, "choose", lambda *sizes, **named: chosen)
    launcher.forget_plans()
    (variant,) = (v for v in variants_of("paged_attention", [LONG]) if v.kernel == "paged_columns")
    launcher.forget_plans()
    made = compile_variant(launcher.kernel(variant.kernel).function, variant)
    facts = facts_of_cubin(made)
    assert facts.num("HGMMA") == 8 + 8 and facts.num_spills == 0, "heads are columns: scores and sums of 64 keys"
    assert facts.num("UTMALDG") == 2 + 2 * 8, "queries, and 16 keys by 64 columns of keys and values a copy"
    assert 6 * config.BLOCK_BYTES <= facts.shared_bytes <= 227 * 1024
    ptx = triton_kernel(launcher.kernel(variant.kernel).function, variant).asm["ptx"]
    assert hinted(ptx).count("L2::cache_hint") == 18 and "cache_hint" not in ptx


@pytest.mark.parametrize(
    ("dtype", "d", "h"), [("float32", 128, 32), ("bfloat16", 256, 32), ("bfloat16", 64, 512)], ids=str
)
def test_wide_heads_float32_and_many_heads_a_key_fit(dtype, d, h):
    sizes = {"b": 2, "k": 8, "s": 3000, "page": 16, "uneven": False}
    _, facts = share_of(case(dtype, d=d, h=h, **sizes))
    assert facts.shared_bytes <= 227 * 1024 and facts.num_spills <= 8


def test_the_line_is_cut_for_every_multiprocessor_and_long_batches_by_sequence():
    assert config.choose(1, 8, 32768, 128, 132).programs == config.choose(256, 8, 300, 128, 132).programs == 264
    assert config.choose(1025, 8, 300, 128, 132).programs == 0
    assert [config.lined(batch) for batch in (1, 32, 33, 1000)] == [32, 32, 128, 1024]
    assert [config.parts_of(264, n) for n in (1, 8, 9, 64)] == [64, 64, 32, 8]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v, t, n: (q[:, :3], k, v, t, n), "no multiple"),
        (lambda q, k, v, t, n: (q, k, v, t.long(), n), "int32"),
        (lambda q, k, v, t, n: (q, k, v, t[:1], n), "one row a sequence"),
        (lambda q, k, v, t, n: (q, k, v.half(), t, n), "different types"),
        (lambda q, k, v, t, n: (q[..., :8], k, v, t, n), "head dims"),
    ],
)
def test_what_no_kernel_takes_is_said(change, words):
    assert words in supports("paged_attention", *change(*made()), 1.0).reason


def test_the_race_counts_the_cache_once():
    args = made(uneven=False)
    assert TRIAL.forward_bytes(args) == 2 * 100 * 2 * 16 * 4 + 2 * args[0].nbytes
    torch.testing.assert_close(reference.eager(*args), reference.public(*args))
