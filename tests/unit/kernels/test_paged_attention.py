"""Paged decoding without a GPU: the reference, what is refused, and what the compiler makes of it."""

import pytest
import torch

pytest.importorskip("triton")

from ridgeline.kernels import launcher, paged_attention, supports
from ridgeline.kernels.compiler import facts_of
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


def test_through_registers_the_next_block_is_on_its_way_without_spills(monkeypatch):
    monkeypatch.setattr(config, "choose", lambda *sizes, **named: config.Paged(32, 8, 4, 1, max_registers=128))
    launcher.forget_plans()
    of = case("bfloat16", b=1, h=32, k=8, s=32768, d=128, page=16, uneven=False)
    (variant,) = (v for v in variants_of("paged_attention", [of]) if v.kernel == "paged_share")
    launcher.forget_plans()
    facts = facts_of(launcher.kernel(variant.kernel).function, variant)
    assert facts.num_registers <= 128 and facts.num_spills == 0, "four programs fit on a multiprocessor"
    assert facts.num("LDGSTS") == 0 and facts.num("LDG.E.EF.128") + facts.num("LDG.E.128") >= 16


def test_caches_of_some_tens_of_megabytes_go_through_registers_and_others_do_not():
    assert config.choose(1, 8, 20480, 128, 132).num_stages == 1
    assert config.choose(1, 8, 2048, 128, 132).num_stages == config.choose(1, 8, 32768, 128, 132).num_stages == 3
    assert config.choose(1, 8, 20480, 64, 132).num_stages == config.choose(1, 8, 20480, 128, 132, 4).num_stages == 3


def test_few_sequences_are_shared_by_many_programs_and_many_by_one():
    assert config.choose(1, 8, 32768, 128, 132).shares == 66
    assert config.choose(128, 32, 1024, 128, 132).shares == 1
    assert config.choose(1, 1, 100, 128, 132).shares == 1


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
