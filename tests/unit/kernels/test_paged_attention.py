"""Paged decoding without a GPU: the reference, what is refused, and what the compiler makes of it."""

import ast
import dataclasses
import gzip
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from ridgeline.kernels import launcher, paged_attention, supports
from ridgeline.kernels.compiler import facts_of, hinted, triton_kernel
from ridgeline.kernels.contract import case, trials
from ridgeline.kernels.paged_attention import config, links, op, reference
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


@pytest.fixture
def no_clusters(monkeypatch):
    """The line is cut, whatever the sizes."""
    monkeypatch.setattr(config, "programs_together", lambda *sizes: 0)
    launcher.forget_plans()
    yield
    launcher.forget_plans()


LONG = case("bfloat16", b=1, h=32, k=8, s=32768, d=128, page=16, uneven=False)


def compiled_for(of, monkeypatch=None, chosen=None):
    """The kernel that reads the cache, and what the compiler made of it."""
    if chosen is not None:
        monkeypatch.setattr(config, "choose", lambda *sizes, **named: chosen)
        launcher.forget_plans()
    (variant,) = (v for v in variants_of("paged_attention", [of]) if v.kernel not in ("paged_join", "paged_border"))
    launcher.forget_plans()
    return variant, facts_of(launcher.kernel(variant.kernel).function, variant)


def test_threads_copy_a_block_ahead_in_every_program_that_fits(monkeypatch):
    chosen = config.choose(1, 8, 32768, 128, 132)
    variant, facts = compiled_for(LONG, monkeypatch, chosen)
    assert variant.kernel == "paged_share" and facts.num_spills == 0 and facts.num("HMMA") > 0
    assert facts.num("LDGSTS.E.BYPASS.128") == chosen.num_stages * 16, "two blocks before the loop, one in it"
    assert facts.shared_bytes >= 2 * config.BLOCK_BYTES
    programs = chosen.programs // 132
    assert programs * (facts.shared_bytes + 1024) <= 228 * 1024
    assert programs * 32 * variant.num_warps * facts.num_registers <= 65536


@pytest.mark.parametrize(("d", "page"), [(128, 16), (128, 64), (64, 32), (256, 128)])
def test_the_copy_engine_feeds_as_many_blocks_as_fit(d, page):
    of = case("bfloat16", b=1, h=32, k=8, s=4096, d=d, page=page, uneven=False)
    variant, facts = compiled_for(of)
    assert variant.kernel == "paged_columns" and facts.num_spills == 0
    keys = 128 if d == 64 else 64
    products = keys // 64 * d // 16 + d // 64 * keys // 16
    assert facts.num("HGMMA") == products, "heads are columns: scores and sums of a block of keys"
    copies = d // 64 * (keys // min(page, keys))
    assert facts.num("UTMALDG") == d // 64 + 2 * copies, "queries, keys and values"
    programs = config.choose(1, 8, 4096, d, 132, fed=True).programs // 132
    assert programs * (facts.shared_bytes + 1024) <= 228 * 1024
    assert programs * 256 * config.FED_REGISTERS <= 65536


def test_what_the_copy_engine_reads_leaves_the_l2_first_up_to_some_size():
    (variant,) = (v for v in variants_of("paged_attention", [LONG]) if v.kernel == "paged_columns")
    ptx = triton_kernel(launcher.kernel(variant.kernel).function, variant).asm["ptx"]
    assert hinted(ptx).count("L2::cache_hint") == 18 and "cache_hint" not in ptx
    plain, leaving = (
        facts_of(launcher.kernel(variant.kernel).function, v).instructions
        for v in (replaced(variant, LEAVES=False), variant)
    )
    assert plain["UTMALDG.4D"] == leaving["UTMALDG.4D"] == 16
    sizes = (config.choose(1, 8, keys, 128, 132, fed=True).leaves for keys in (32768, 1 << 20))
    assert list(sizes) == [True, False]


def replaced(variant, **constants):
    return dataclasses.replace(variant, constants=tuple((dict(variant.constants) | constants).items()))


@pytest.mark.parametrize(
    ("dtype", "d", "h"), [("float32", 128, 32), ("bfloat16", 76, 32), ("bfloat16", 64, 1040)], ids=str
)
def test_odd_heads_float32_and_many_heads_a_key_are_read_by_threads_and_fit(dtype, d, h):
    of = case(dtype, b=2, h=h, k=8, s=3000, d=d, page=16, uneven=False)
    variant, facts = compiled_for(of)
    assert variant.kernel == "paged_share"
    assert facts.shared_bytes <= 227 * 1024 and facts.num_spills <= 8


@pytest.mark.parametrize(("b", "s", "page"), [(5, 4096, 16), (132, 1500, 64)])
def test_heads_of_192_are_three_stripes_in_products_of_128_and_64_columns(b, s, page):
    of = case("bfloat16", b=b, h=32, k=8, s=s, d=192, page=page, uneven=False)
    variant, facts = compiled_for(of)
    constants = dict(variant.constants)
    assert variant.kernel == "paged_columns" and facts.num_spills == 0 and constants["D"] == 192 and constants["PADDED"]
    assert facts.num("HGMMA") == 3 * (4 + 4) and facts.num("UTMALDG") == 3 + 2 * 3 * (64 // constants["ROWS"])
    assert constants["ROWS"] == 16, "sequences that are short, or pages of 16"
    assert 2 * (facts.shared_bytes + 1024) <= 228 * 1024 and 2 * 256 * variant.max_registers <= 65536


@pytest.mark.parametrize(("b", "h", "d", "page"), [(1, 32, 128, 4), (132, 32, 96, 1), (5, 32, 192, 1), (9, 32, 64, 5),
                                                   (132, 16, 256, 2), (9, 256, 128, 12), (1, 32, 80, 16),
                                                   (132, 32, 160, 32), (9, 32, 72, 8), (2, 32, 40, 16)])  # fmt: skip
def test_pages_of_any_size_and_heads_of_any_width_are_gathered_by_threads_that_only_feed(b, h, d, page):
    of = case("bfloat16", b=b, h=h, k=8, s=4096, d=d, page=page, uneven=False)
    variant, facts = compiled_for(of)
    constants, stripes = dict(variant.constants), -(-d // 64)
    assert variant.kernel == "paged_gathered" and facts.num_spills == 0
    copies = 2 * constants["KEYS"] * stripes * 8 // 128
    assert facts.num("LDGSTS.E.BYPASS.128") == copies, "16 bytes at a time, zeros where there is no key"
    assert facts.num("ARRIVES.LDGSTSBAR") == 1 and facts.num("UTMALDG") == stripes, "queries alone"
    programs = 1 if d == 256 else 2
    assert programs * (facts.shared_bytes + 1024) <= 228 * 1024 and programs * 256 * variant.max_registers <= 65536


def test_what_the_copy_engine_or_threads_feed_is_known_by_its_sizes():
    assert all(config.takes_columns(8, 16, d, page) for d in (40, 72, 96, 128, 192, 256) for page in (1, 3, 8, 16, 64))
    assert not config.takes_columns(8, 16, 32, 16) and not config.takes_columns(8, 16, 76, 16)
    assert all(config.takes_columns(8, ratio, d, 4) for ratio in (64, 71, 128) for d in (64, 96, 128, 256))
    assert config.takes_columns(8, 32, 192, 16) and not config.takes_columns(8, 64, 192, 16)
    assert not config.takes_columns(8, 129, 64, 16), "three groups of warps with their sums"
    gathered = [config.choose(9, 8, 4096, 128, 132, ratio=4, fed=True, page=page).gathered for page in (4, 8, 16, 48)]
    assert gathered == [True, True, False, False]
    gathered = [config.choose(9, 8, 4096, d, 132, ratio=4, fed=True).gathered for d in (40, 64, 80, 112, 192, 224)]
    assert gathered == [True, False, True, True, False, True]
    assert not config.choose(400, 8, 300, 96, 132, ratio=4, fed=True).units, "tickets are drawn for the copy engine"


@pytest.mark.parametrize(("h", "d", "columns"), [(24, 128, 32), (32, 128, 32), (17, 64, 32), (32, 192, 32)])
def test_up_to_32_heads_that_share_keys_are_columns_in_two_programs_that_fit(h, d, columns):
    of = case("bfloat16", b=8, h=h, k=1, s=9000, d=d, page=16, uneven=False)
    variant, facts = compiled_for(of)
    assert variant.kernel == "paged_columns" and dict(variant.constants)["COLS"] == columns and facts.num_spills == 0
    assert 2 * (facts.shared_bytes + 1024) <= 228 * 1024 and 2 * 256 * variant.max_registers <= 65536


@pytest.mark.parametrize(("h", "d", "page", "programs"), [
    (33, 128, 16, 2), (64, 128, 8, 2), (48, 64, 64, 2), (71, 128, 8, 1), (128, 128, 256, 1), (48, 256, 8, 1),
    (128, 256, 32, 1), (40, 96, 16, 2), (128, 64, 1, 1),
])  # fmt: skip
def test_many_heads_on_a_key_are_rows_in_programs_that_fit_and_hand_on_no_probabilities(h, d, page, programs):
    of = case("bfloat16", b=8, h=h, k=1, s=9000, d=d, page=page, uneven=False)
    variant, facts = compiled_for(of)
    constants, groups = dict(variant.constants), -(-h // 64)
    wide = constants["D"]
    assert variant.kernel == "paged_tall" and constants["HEADS"] == 64 * groups and facts.num_spills <= 4
    assert facts.num("HGMMA") == groups * (wide // 16 + constants["KEYS"] // 16), "no product for each 64 columns"
    assert programs * (facts.shared_bytes + 1024) <= 228 * 1024 and constants["STAGES"] >= 2
    assert programs * 128 * (1 + groups) * variant.max_registers <= 65536


def ways_raced(kind):
    """Drawn shapes that were raced by several ways on an H200."""
    path = Path(__file__).parents[3] / "data" / "recordings" / "h200" / f"paged_ways1_{kind}.json.gz"
    return json.loads(gzip.decompress(path.read_bytes()))["rows"]


def test_neighbors_take_whole_rows_of_key_heads():
    def found(batch=5, key_heads=10, longest=9000, dim=80, page=16, ratio=3):
        return config.choose(batch, key_heads, longest, dim, 132, ratio=ratio, fed=True, page=page)

    beside = found()
    assert beside.gathered and beside.beside and not beside.inside and beside.programs == 260 and not beside.borders
    assert found(batch=100, key_heads=32).borders and found(ratio=24).beside and found(dim=112, page=1).beside
    assert not found(dim=96).beside and not found(dim=128, page=1).beside and not found(longest=3900).beside
    assert not any(found(key_heads=key_heads).beside for key_heads in (1, 100)) and not found(ratio=40).beside


def test_ways_are_those_that_were_faster_on_the_device():
    """Every drawn shape that was raced, and the default that follows from it."""
    counted = 0
    for row in (row for kind in ("wide", "odd_clusters") for row in ways_raced(kind)):
        seconds, ratio = row["s_by"], row["h"] // row["k"]
        longest = -(-row["s"] // row["page"]) * row["page"]
        found = config.choose(row["b"], row["k"], longest, row["d"], 132, ratio=ratio, fed=True, page=row["page"])
        if row["kind"] == "wide":
            assert seconds["rows"] < seconds["before"] / (1.15 if found.tall else 1.0), "much faster, or a little"
            counted += 1
        elif row["kind"] == "odd":
            assert found.beside == (seconds["beside"] < seconds["before"]) and seconds["rows"] > seconds["before"]
            counted += 1
    assert counted == 13


def test_the_line_is_cut_for_every_multiprocessor_and_long_batches_by_sequence():
    assert config.choose(1, 8, 32768, 128, 132).programs == config.choose(128, 8, 300, 128, 132).programs == 396
    assert config.choose(1, 8, 32768, 128, 132, fed=True).programs == 264
    assert config.choose(129, 8, 300, 128, 132).programs == 0 and config.takes_columns(1024, 4, 128, 16)
    assert not config.takes_columns(1025, 4, 128, 16)
    assert [config.lined(batch) for batch in (1, 32, 33, 128, 129)] == [32, 32, 128, 128, 1024]
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


@pytest.mark.parametrize(("b", "h", "k", "s", "kernel"), [
    (1, 32, 8, 8192, "paged_join"), (64, 16, 1, 2048, "paged_border"), (8, 32, 8, 2048, "paged_join"),
    (4, 32, 32, 2048, "paged_join"), (64, 32, 8, 2048, ""), (16, 32, 8, 2048, ""), (2, 32, 8, 512, ""),
])  # fmt: skip
@pytest.mark.usefixtures("no_clusters")
def test_few_parts_are_joined_by_the_last_program_and_many_by_a_kernel(b, h, k, s, kernel):
    of = case("bfloat16", b=b, h=h, k=k, s=s, d=128, page=16, uneven=False)
    found = {v.kernel: dict(v.constants) for v in variants_of("paged_attention", [of])}
    assert set(found) == {"paged_columns", kernel} - {""}
    assert (found["paged_columns"]["JOINS"] > 0) == (not kernel)
    assert (found["paged_columns"]["EARLY"] > 0) == bool(kernel), "nobody waits to start where nothing follows"


@pytest.mark.parametrize(
    ("h", "k", "d", "page"), [(32, 8, 128, 16), (16, 1, 128, 64), (16, 8, 64, 16), (9, 3, 256, 48)]
)
@pytest.mark.usefixtures("no_clusters")
def test_the_last_program_joins_without_spills_in_wide_loads_past_the_l1(h, k, d, page):
    of = case("bfloat16", b=132, h=h, k=k, s=1500, d=d, page=page, uneven=True)
    variant, facts = compiled_for(of)
    assert dict(variant.constants)["JOINS"] and facts.num_spills == 0
    wide = "LDG.E.64.STRONG.GPU" if d == 64 else "LDG.E.128.STRONG.GPU"
    assert facts.num(wide) > 0 and facts.num("ATOMG.E.CAS.64.STRONG.GPU") == facts.num("ATOMG.E.ADD.64.STRONG.GPU") == 1
    assert (1 if d == 256 else 2) * 256 * facts.num_registers <= 65536


@pytest.mark.usefixtures("no_clusters")
def test_a_border_is_joined_without_spills_whatever_shares_its_keys():
    of = case("bfloat16", b=64, h=16, k=1, s=2048, d=128, page=64, uneven=False)
    (variant,) = (v for v in variants_of("paged_attention", [of]) if v.kernel == "paged_border")
    facts = facts_of(launcher.kernel(variant.kernel).function, variant)
    assert facts.num_spills == 0 and facts.num_registers <= 128 and facts.num("ACQBULK") == 1


@pytest.mark.parametrize(
    ("b", "h", "k", "page", "together"), [(4, 32, 8, 16, 6), (64, 16, 1, 64, 2), (3, 64, 8, 16, 4), (32, 32, 8, 64, 1)]
)
def test_clusters_fit_beside_each_other_and_all_their_warps_arrive(b, h, k, page, together):
    variant, facts = compiled_for(case("bfloat16", b=b, h=h, k=k, s=8000, d=128, page=page, uneven=False))
    assert variant.kernel == "paged_together" and dict(variant.constants)["TOGETHER"] == together
    room = links.room_bytes(h // k, 128, together) if together > 1 else 0
    assert facts.num_spills == 0 and 2 * 256 * facts.num_registers <= 65536
    assert 2 * (facts.shared_bytes + room + 1024) <= 228 * 1024, "two programs a multiprocessor"
    arrivals = 5 if together > 1 else 0
    assert facts.num("UCGABAR_ARV") == arrivals, "four warps that compute, and four others"
    assert (facts.num("STAS") > 0) == (together > 1)


def test_sequences_are_taken_by_clusters_where_that_was_faster_on_the_device():
    taken = {}
    for (batch, heads, key_heads, keys, dim, page, uneven), by_kind in raced("paged_race15", ("clean",)).items():
        seconds, longest = by_kind["clean"], -(-keys // page) * page
        found = config.choose(batch, key_heads, longest, dim, 132, ratio=heads // key_heads, fed=True)
        if "together" in seconds and not config.lone_size(batch * key_heads):
            best = min(seconds["together"], seconds.get("one fewer", 1.0))
            taken[batch, key_heads, keys, uneven] = (found.even > 0, best / seconds["now"])
    assert len(taken) == 11 and all(ratio < 0.975 for chosen, ratio in taken.values() if chosen)
    assert sum(chosen for chosen, _ in taken.values()) == 5
    assert not any(ratio < 0.98 for chosen, ratio in taken.values() if not chosen)


def test_no_clusters_are_asked_for_where_none_were_raced():
    def size(b=4, k=8, longest=8000, d=128, sms=132, **more):
        found = config.choose(b, k, longest, d, sms, ratio=4, fed=True, **more)
        return found.together if found.even else 0

    assert size() == 6 and size(16) == 2 and size(7) == 4 and size(32) == 1
    assert size(8) == size(9, d=64) == 2 and size(3) == 4 and not size(3, d=64) and not size(5)
    assert not any((size(together=False), size(sms=114), size(d=64), size(longest=3000), size(1), size(24), size(40)))


def test_one_program_a_multiprocessor_is_enough_for_a_cluster_where_that_was_faster_on_the_device():
    ways, gained = {64: "one fewer", 72: "one fewer", 24: "one a multiprocessor"}, {}
    for (batch, heads, key_heads, keys, dim, page, _), by_kind in raced("paged_race17", ("clean",)).items():
        seconds, units = by_kind["clean"], batch * key_heads
        found = config.choose(batch, key_heads, -(-keys // page) * page, dim, 132, ratio=heads // key_heads, fed=True)
        if config.lone_size(units):
            assert found.even == config.LONE_QUARTERS and found.together == config.lone_size(units)
            gained[batch, key_heads, keys] = seconds[ways[units]] / seconds.get("apart", seconds["now"])
    assert len(gained) == 5 and max(gained.values()) < 0.95


def test_sequences_are_taken_whole_or_cut_with_their_ends_where_that_was_faster_on_the_device():
    lost, uneven = [], []
    for (batch, heads, key_heads, keys, dim, page, kind), by_kind in raced("paged_race17", ("clean",)).items():
        seconds = by_kind["clean"]
        found = config.choose(batch, key_heads, -(-keys // page) * page, dim, 132, ratio=heads // key_heads, fed=True)
        if "units, two programs" in seconds:
            taken, other = "units, two programs", "ends of one block"
            taken, other = (taken, other) if found.units else (other, taken)
            lost.append(seconds[taken] / seconds[other])
        if kind and not found.even:
            uneven.append(seconds["ends of one block"] / seconds["now"])
    assert len(lost) == 8 and max(lost) < 1.03 and min(lost) < 0.8
    assert len(uneven) == 8 and max(uneven) < 1.0 and min(uneven) < 0.9


def test_clusters_that_do_not_fit_are_not_taken(monkeypatch):
    asked = []
    monkeypatch.setattr(op, "fits", lambda run, clusters: asked.append(clusters))
    launcher.forget_plans()
    of = case("bfloat16", b=4, h=32, k=8, s=8000, d=128, page=16, uneven=False)
    assert {v.kernel for v in variants_of("paged_attention", [of])} == {"paged_together", "paged_columns", "paged_join"}
    assert set(asked) == {(39, 6)}
    launcher.forget_plans()


def raced(name, kinds):
    """Medians of every case that was raced on an H200, by the kind of cold L2 and by configuration."""
    path = Path(__file__).parents[3] / "data" / "recordings" / "h200" / f"{name}.json.gz"
    with gzip.open(path, "rt") as file:
        rows = [row for row in json.load(file)["parts"]["cases"] if row.get("lines") in kinds and "median_s" in row]
    found = {}
    for row in rows:
        by_kind = found.setdefault(ast.literal_eval(row["case"]), {kind: {} for kind in kinds})
        by_kind[row["lines"]][row["contender"]] = row["median_s"]
    return found


def test_who_joins_is_who_was_faster_on_the_device():
    lost = []
    for (batch, heads, key_heads, keys, dim, page, _), by_kind in raced("paged_race7", ("clean",)).items():
        seconds = by_kind["clean"]
        longest = -(-keys // page) * page
        sizes = (batch, key_heads, longest, dim, 132)
        found = config.choose(*sizes, ratio=heads // key_heads, fed=True, together=False)
        best = min(seconds["inside"], seconds["by a kernel"])
        lost.append(seconds["inside" if found.inside else "by a kernel"] / best)
    assert len(lost) == 22 and max(lost) < 1.01, "no choice loses more than a hundredth to the other"


@pytest.mark.parametrize(("b", "h", "k", "page"), [(300, 32, 8, 16), (100, 64, 8, 16), (400, 16, 1, 64)])
def test_many_short_sequences_are_taken_as_they_are_asked_for_and_no_page_without_keys_is_copied(b, h, k, page):
    variant, facts = compiled_for(case("bfloat16", b=b, h=h, k=k, s=300, d=128, page=page, uneven=True))
    assert variant.kernel == "paged_units" and facts.num_spills == 0
    assert 2 * (facts.shared_bytes + 1024) <= 228 * 1024 and 2 * 256 * facts.num_registers <= 65536
    atomics = sum(n for name, n in facts.instructions.items() if name.startswith("ATOMG"))
    assert atomics == 2, "a mark where there is none, and a ticket"
    tiles = 64 // min(page, config.SHORT_ROWS)
    assert facts.num("UTMALDG") == 2 + 2 * 2 * tiles, "queries, keys and values, whether they are copied or not"
    expected = sum(n for name, n in facts.instructions.items() if name.startswith("SYNCS.ARRIVE.TRANS64"))
    assert expected >= tiles, "as many bytes as pages that have keys"


def test_three_programs_are_for_short_sequences_of_shared_keys_alone():
    def short(b=300, k=8, longest=300, d=128, ratio=4):
        return config.choose(b, k, longest, d, 132, ratio=ratio, fed=True).skips

    assert short() and short(100, longest=640, ratio=8) and short(396, 1) and short(d=64, longest=1000, ratio=1)
    assert not (short(49) or short(longest=656) or short(d=64, longest=1024) or short(d=256) or short(ratio=1))


def test_three_programs_were_faster_on_the_device_and_skips_alone_were_not():
    found = raced("paged_race13", ("clean", "dirty"))
    assert len(found) == 2
    for seconds in found.values():
        for one in seconds.values():
            assert one["skips, three programs"] < one["now"] and abs(one["skips"] / one["now"] - 1) < 0.01
    (short,) = (seconds["clean"] for of, seconds in found.items() if of[0] == 300)
    assert short["skips, three programs"] < 0.95 * short["now"]


def test_who_feeds_is_who_was_faster_on_the_device():
    """In that race heads of 32, 80 and 96 went through the copy engine, which is slow where a box ends beyond a row."""
    rows, counted = [], 0
    for (batch, heads, key_heads, keys, dim, page, _), by_kind in raced("paged_race18", ("clean",)).items():
        seconds, ratio, longest = by_kind["clean"], heads // key_heads, -(-keys // page) * page
        found = config.choose(batch, key_heads, longest, dim, 132, ratio=ratio, fed=True, page=page)
        taken = config.takes_columns(batch, ratio, dim, page)
        if "rows of 64" in seconds:
            rows.append(seconds["now"] / seconds["rows of 64"])
        if "units of 128 keys" in seconds:
            assert found.units and found.keys == 128 and seconds["units of 128 keys"] < 0.9 * seconds["now"]
        if "by threads" in seconds:
            counted += 1
            gathered = seconds.get("gathered", seconds["now"])
            if dim in (80, 96):
                assert taken and found.gathered and seconds["now"] > 0.75 * seconds["by threads"], "by the copy engine"
            else:
                assert taken == (gathered < seconds["by threads"]) and (page != 8 or gathered < seconds["now"])
    assert len(rows) == 7 and max(rows) < 1.01 and min(rows) < 0.93 and counted == 11
