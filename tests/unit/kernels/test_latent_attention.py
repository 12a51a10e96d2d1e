"""Latent decoding without a GPU: the reference, what is refused, and what the compiler makes of it."""

import math

import pytest
import torch

pytest.importorskip("triton")

from ridgeline.kernels import launcher, paged_latent_attention, supports
from ridgeline.kernels.compiler import facts_of
from ridgeline.kernels.contract import case, trials
from ridgeline.kernels.latent_attention import config
from ridgeline.kernels.rows import cdiv
from ridgeline.kernels.variants import variants_of

TRIAL = trials()["paged_latent_attention"][1]


@pytest.fixture(autouse=True)
def _without_roles(monkeypatch):
    """What is said here of heads holds wherever nobody has them go by roles."""
    monkeypatch.setattr(config, "ROLES", "")
    monkeypatch.setattr(config, "NARROW", False)


def made(**sizes):
    of = case("float32", **{"b": 2, "h": 4, "s": 50, "d": 16, "e": 8, "page": 16, "uneven": True, **sizes})
    return TRIAL.make(of, torch.device("cpu"), torch.Generator().manual_seed(0))


def test_every_head_attends_the_same_vectors_and_takes_their_first_part():
    q, cache, table, lens, dim = made()
    out = paged_latent_attention(q, cache, table, lens, dim)
    for i in range(2):
        keys = cache[table[i].long()].flatten(0, 1)[: lens[i]]
        p = torch.softmax(q[i] @ keys.T * 24**-0.5, -1)
        torch.testing.assert_close(out[i], p @ keys[:, :16])


def test_a_sequence_without_keys_gets_zeros():
    q, cache, table, lens, dim = made()
    lens[1] = 0
    assert torch.equal(paged_latent_attention(q, cache, table, lens, dim)[1], torch.zeros(4, 16))


def test_pytorchs_own_form_agrees_with_the_reference():
    args = made()
    torch.testing.assert_close(TRIAL.eager(*args), TRIAL.reference(*args))


def compiled_for(**sizes):
    """The kernel that a case launches, and what the compiler made of it."""
    of = case("bfloat16", **{"b": 32, "h": 128, "s": 4096, "d": 512, "e": 64, "page": 64, "uneven": False, **sizes})
    (variant,) = (v for v in variants_of("paged_latent_attention", [of]) if v.kernel.startswith("latent"))
    return variant.kernel, facts_of(launcher.kernel(variant.kernel).function, variant)


def test_two_groups_share_the_scores_without_spills():
    name, facts = compiled_for(h=65)
    assert name == "latent_blocks"
    assert facts.num("HGMMA") == 2 * (36 + 4), "each group makes half of the scores and half of the columns"
    assert facts.num_spills == 0 and facts.shared_bytes <= 227 * 1024


@pytest.mark.parametrize(("heads", "page"), [(128, 48), (64, 16), (40, 32), (32, 64), (20, 128)])
def test_many_heads_walk_the_line_in_halves_that_wait_for_nobody(heads, page):
    name, facts = compiled_for(h=heads, page=page)
    assert name == "latent_line"
    assert facts.num("HGMMA") == 2 * (36 + 32), "each group has half of the heads, all keys and all columns"
    assert facts.num("UTMALDG") == 9 + 64 // math.gcd(page, 64), "queries, and a stripe of a block in tiles of a page"
    most = 160 if heads > 32 else 40
    assert facts.num_spills <= most and facts.shared_bytes <= 227 * 1024, "between sequences; few in a block"


def test_neighbors_take_the_same_stretch_where_heads_are_more_than_a_program_has():
    assert config.choose_line(32, 128, 4096, 132).programs == 66 and config.choose_line(32, 64, 4096, 132).borders
    assert config.takes_line(100, 512, 64, 48) and config.takes_line(17, 512, 64, 16)
    assert config.takes_line(32, 512, 64, 128) and [config.columns_of(n) for n in (17, 32, 33, 64)] == [16, 16, 32, 32]
    others = ((16, 512, 64, 16), (65, 512, 64, 16), (64, 512, 64, 8), (64, 512, 64, 128), (128, 512, 64, 64))
    assert not any(config.takes_line(*of) for of in others)


@pytest.mark.parametrize(("heads", "batch"), [(64, 100), (128, 100), (128, 200), (64, 2), (20, 300)])
def test_parts_of_many_heads_are_joined_without_spills(heads, batch):
    of = case("bfloat16", b=batch, h=heads, s=4096, d=512, e=64, page=16, uneven=False)
    (variant,) = (v for v in variants_of("paged_latent_attention", [of]) if v.kernel.startswith("paged"))
    facts = facts_of(launcher.kernel(variant.kernel).function, variant)
    assert facts.num_spills == 0 and 32 * variant.num_warps * facts.num_registers <= 32768


@pytest.mark.parametrize("page", [16, 32, 48])
def test_few_heads_are_columns_of_the_products_and_blocks_come_in_thirds(page):
    name, facts = compiled_for(h=16, b=16, page=page)
    assert name == "latent_ring" and facts.num("HGMMA") == 36 + 32, "scores of 576 dims, sums of 512: no head is padded"
    assert facts.num("UTMALDG") == 9 + 9 * 64 // math.gcd(page, 64), "queries, and a block in tiles of a page"
    assert facts.num_spills == 0 and facts.shared_bytes <= 227 * 1024


def test_pages_of_whole_blocks_are_fed_to_two_groups():
    name, facts = compiled_for(h=16, b=16)
    assert name == "latent_columns" and facts.num("HGMMA") == 2 * (36 + 16), "each group has half of the columns"
    assert facts.num_spills == 0 and facts.shared_bytes <= 227 * 1024


def test_few_heads_of_other_dims_are_columns_that_threads_read():
    name, facts = compiled_for(h=16, b=16, e=32)
    assert name == "latent_few" and facts.num("HGMMA") == 2 * 8, "512 columns by 32 keys: no head is padded to 64"
    assert facts.num_spills == 0 and 2 * (facts.shared_bytes + 1024) <= 228 * 1024


def test_sixteen_heads_are_columns_to_a_thousand_sequences():
    assert config.takes_few(16, 16, 8192, True) and config.takes_few(1024, 16, 64, True)
    assert config.takes_few(128, 8, 4096, False) and not config.takes_few(129, 8, 4096, False)
    assert not config.takes_few(1, 17, 512, True) and not config.takes_few(1025, 16, 64, True)


@pytest.mark.parametrize(("batch", "kernel"), [(1, "paged_join"), (16, "paged_join"), (100, "paged_border")])
def test_wide_parts_are_joined_by_about_two_programs_a_multiprocessor(batch, kernel):
    of = case("bfloat16", b=batch, h=16, s=4096, d=512, e=64, page=64, uneven=False)
    (variant,) = (v for v in variants_of("paged_latent_attention", [of]) if v.kernel.startswith("paged"))
    facts, constants = facts_of(launcher.kernel(variant.kernel).function, variant), dict(variant.constants)
    assert variant.kernel == kernel and facts.num_spills == 0
    programs = (batch * 16 if kernel == "paged_join" else 132) * 512 // constants["D"]
    assert 200 <= programs <= 600 and 32 * variant.num_warps * facts.num_registers * cdiv(programs, 132) <= 2 * 65536


@pytest.mark.parametrize("sizes", [{"page": 8}, {"e": 32}, {"d": 256}, {"h": 65, "page": 16}], ids=str)
def test_what_blocks_were_not_written_for_takes_the_general_kernel(sizes):
    of = case("bfloat16", **{"b": 1, "h": 64, "s": 512, "d": 512, "e": 64, "page": 64, "uneven": False, **sizes})
    assert "latent_share" in {v.kernel for v in variants_of("paged_latent_attention", [of])}


def test_the_kernel_uses_the_tensor_cores_on_asynchronous_copies():
    of = case("bfloat16", b=32, h=128, s=4096, d=512, e=64, page=8, uneven=False)
    (variant,) = (v for v in variants_of("paged_latent_attention", [of]) if v.kernel == "latent_share")
    facts = facts_of(launcher.kernel(variant.kernel).function, variant)
    assert facts.num("HGMMA") > 0 and facts.num("LDGSTS.E.BYPASS.128") >= 16
    assert facts.num_spills <= 40 and facts.shared_bytes <= 227 * 1024


def test_programs_take_64_heads_and_fill_the_device():
    assert config.choose(1, 128, 65536, 132) == config.Latent(64, 32, 66)
    assert config.choose(64, 16, 4096, 132).rows == 16
    assert config.choose_blocks(32, 128, 4096, 132).shares == 2
    assert config.choose_blocks(1, 128, 65536, 132).shares == 64


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, c, t, n, d: (q[..., :20], c, t, n, d), "of one dim"),
        (lambda q, c, t, n, d: (q, c, t, n, 30), "values take 30 of 24"),
        (lambda q, c, t, n, d: (q, c, t.long(), n, d), "int32"),
        (lambda q, c, t, n, d: (q, c, t[:1], n, d), "one row a sequence"),
        (lambda q, c, t, n, d: (q, c.half(), t, n, d), "cache"),
    ],
)
def test_what_no_kernel_takes_is_said(change, words):
    assert words in supports("paged_latent_attention", *change(*made()), 1.0).reason
