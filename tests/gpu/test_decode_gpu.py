"""Lengths at every border, joins by borders, products whose rows stay, float32 by halves: forced where no default."""

from __future__ import annotations

import dataclasses
import threading
from contextlib import contextmanager, nullcontext

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from ridgeline.bench.check import check_case
from ridgeline.kernels import cross_layer, launcher, paged_attention, tuning
from ridgeline.kernels.contract import case, trials
from ridgeline.kernels.cross_layer import config as cross
from ridgeline.kernels.decode_attention import config as decode
from ridgeline.kernels.latent_attention import config as latent
from ridgeline.kernels.paged_attention import config as paged
from ridgeline.kernels.tensorfloat import products_in
from ridgeline.kernels.variants import variants_of

pytestmark = pytest.mark.usefixtures("packed")

PAGED = tuple(
    case("bfloat16", b=b, h=h, k=k, s=s, d=d, page=page, uneven=True)
    for b, h, k, s, d, page in (
        (130, 6, 2, 90, 128, 16), (40, 20, 4, 700, 64, 16), (70, 16, 1, 500, 128, 64), (9, 9, 3, 900, 256, 32),
        (3, 12, 2, 3000, 128, 16), (300, 10, 5, 200, 128, 16), (50, 5, 5, 260, 72, 16),
        (5, 16, 1, 2100, 64, 128),
    )
)  # fmt: skip
LATENT = tuple(
    case("bfloat16", b=b, h=h, s=s, d=512, e=64, page=page, uneven=True)
    for b, h, s, page in (
        (40, 16, 900, 64),
        (5, 5, 3000, 64),
        (100, 12, 300, 64),
        (20, 16, 400, 16),
        (200, 16, 150, 64),
    )
)
RESIDENT = (
    (cross.Resident(4, 1), case("bfloat16", batch=1000, dim=512, rank=0)),
    (cross.Resident(2, 2), case("float16", batch=20001, dim=512, rank=0)),
    (cross.Resident(4, 2), case("bfloat16", batch=34000, dim=256, rank=0)),
    (cross.Resident(6, 2), case("bfloat16", batch=129, dim=200, rank=0)),
    (cross.Resident(3, 2), case("float16", batch=18000, dim=328, rank=0)),
    (cross.Resident(4, 2), case("bfloat16", batch=40000, dim=96, rank=0)),
    (cross.Resident(6, 1), case("bfloat16", batch=17000, dim=1000, rank=256)),
    (cross.Resident(4, 2), case("float16", batch=3000, dim=640, rank=64)),
)
LENGTHS = (0, 1, 15, 16, 17, 64, 65, 5000, 333)
EDGES = tuple(
    ("paged_attention", case("bfloat16", b=9, h=h, k=k, s=5040, d=d, page=page, uneven=False))
    for h, k, d, page in (
        (32, 8, 128, 16), (16, 1, 128, 64), (8, 8, 64, 16), (20, 4, 64, 48), (24, 8, 256, 48), (32, 8, 96, 16),
        (24, 8, 192, 64), (20, 4, 128, 8), (32, 8, 128, 1), (24, 8, 192, 4), (16, 1, 256, 1), (20, 4, 80, 6),
    )
) + tuple(
    ("paged_latent_attention", case("bfloat16", b=9, h=h, s=5040, d=512, e=64, page=page, uneven=False))
    for h, page in ((16, 64), (5, 16), (16, 48))
)  # fmt: skip
WIDE = tuple(
    ("paged_attention", case("bfloat16", b=9, h=h, k=k, s=5040, d=d, page=page, uneven=False))
    for h, k, d, page in (
        (32, 1, 128, 16), (96, 2, 64, 48), (63, 1, 128, 64), (64, 2, 192, 48), (32, 1, 256, 64), (48, 2, 128, 3),
        (71, 1, 128, 8), (128, 2, 128, 64), (48, 1, 256, 4), (128, 1, 256, 48), (40, 1, 96, 16), (142, 2, 112, 1),
    )
) + tuple(
    ("paged_latent_attention", case("bfloat16", b=9, h=h, s=5040, d=512, e=64, page=page, uneven=False))
    for h, page in ((64, 16), (128, 48), (40, 32), (100, 48), (17, 16), (64, 64), (32, 128), (128, 64))
)  # fmt: skip
"""More heads that share keys than sixteen."""

MANY = tuple(
    case("bfloat16", b=b, h=h, s=s, d=512, e=64, page=page, uneven=True)
    for b, h, s, page in (
        (40, 64, 900, 32), (5, 128, 3000, 16), (200, 32, 150, 48), (3, 66, 2000, 32), (150, 32, 700, 64),
        (30, 20, 1500, 128), (7, 128, 2000, 48),
    )
)
"""Latent sequences of many heads, of any length."""

TALL = tuple(
    case(dtype, b=b, h=h, k=k, s=s, d=d, page=page, uneven=True)
    for dtype, b, h, k, s, d, page in (
        ("bfloat16", 5, 71, 1, 2100, 128, 8), ("float16", 130, 96, 2, 300, 64, 16),
        ("bfloat16", 3, 128, 1, 1500, 256, 64), ("bfloat16", 40, 80, 2, 700, 128, 16),
        ("float16", 7, 100, 1, 900, 96, 3), ("bfloat16", 9, 65, 1, 1000, 112, 16),
        ("bfloat16", 2, 48, 1, 9000, 256, 2), ("float16", 20, 256, 4, 1100, 64, 1),
    )
)  # fmt: skip
"""More heads on a key than 32, which are rows of the products, of any width and in pages of any size."""

ODD = tuple(
    case(dtype, b=b, h=h, k=k, s=s, d=d, page=page, uneven=True)
    for dtype, b, h, k, s, d, page in (
        ("bfloat16", 24, 40, 10, 900, 96, 16), ("float16", 7, 32, 8, 1500, 192, 64),
        ("bfloat16", 130, 12, 4, 300, 80, 48), ("bfloat16", 5, 9, 3, 4500, 160, 64),
        ("float16", 40, 8, 8, 700, 112, 16), ("bfloat16", 9, 32, 8, 1000, 40, 16),
        ("bfloat16", 3, 64, 2, 2100, 192, 16), ("bfloat16", 4, 32, 1, 1500, 256, 64),
        ("bfloat16", 24, 32, 8, 900, 128, 8), ("float16", 12, 32, 8, 1100, 64, 1),
        ("bfloat16", 130, 16, 4, 300, 128, 4), ("bfloat16", 5, 20, 4, 1800, 192, 1),
        ("float16", 3, 16, 2, 1500, 256, 2), ("bfloat16", 6, 64, 2, 900, 96, 5),
        ("bfloat16", 200, 8, 2, 90, 128, 1), ("bfloat16", 20, 16, 4, 700, 64, 8),
        ("float16", 33, 20, 4, 800, 128, 128),
    )
)  # fmt: skip
"""Heads that are padded in shared memory, pages of any number of keys, copies of few keys of large pages."""

SHORT = tuple(
    case(dtype, b=b, h=h, k=k, s=s, d=d, page=page, uneven=False)
    for dtype, b, h, k, s, d, page in (
        ("bfloat16", 300, 8, 2, 144, 128, 16), ("float16", 64, 64, 8, 624, 128, 48),
        ("bfloat16", 400, 16, 1, 192, 128, 64), ("bfloat16", 130, 16, 4, 912, 64, 16),
        ("float16", 213, 8, 8, 688, 64, 64),
    )
)  # fmt: skip
"""Many short sequences, taken whole as they are asked for; pages without keys are not copied."""

COUNTED = (
    ("decode_attention", case("bfloat16", b=2, h=32, k=8, s=512, d=128, hide="")),
    ("decode_attention", case("float16", b=5, h=12, k=4, s=3000, d=64, hide="lengths")),
    ("decode_attention", case("float32", b=9, h=6, k=2, s=1100, d=80, hide="mask")),
    ("paged_attention", case("bfloat16", b=16, h=32, k=8, s=3000, d=128, page=16, uneven=False)),
    ("paged_attention", case("bfloat16", b=70, h=16, k=1, s=500, d=128, page=64, uneven=True)),
    ("paged_attention", case("float16", b=3, h=9, k=3, s=2000, d=256, page=48, uneven=True)),
    ("paged_attention", case("bfloat16", b=40, h=20, k=4, s=700, d=64, page=32, uneven=True)),
)
HALVES = tuple(
    case("float32", batch=batch, dim=dim, rank=rank)
    for batch, dim, rank in ((16384, 512, 0), (6000, 1000, 0), (9000, 1536, 320))
)


APART = {"even": 0, "together": 1}
CLUSTERED = tuple(
    case(dtype, b=b, h=h, k=k, s=5040, d=d, page=page, uneven=False)
    for dtype, b, h, k, d, page in (
        ("bfloat16", 9, 32, 8, 128, 16), ("float16", 2, 64, 8, 128, 16), ("bfloat16", 1, 24, 8, 128, 48),
        ("bfloat16", 5, 8, 8, 64, 16), ("bfloat16", 64, 16, 1, 128, 64), ("float16", 16, 40, 8, 128, 16),
        ("bfloat16", 24, 32, 8, 128, 16),
    )
)  # fmt: skip
"""Sequences of 3, 12, 16, 5, 3 and 2 programs each, and of one."""

TOGETHER = tuple(
    case("bfloat16", b=b, h=h, k=k, s=5040, d=128, page=page, uneven=False)
    for b, h, k, page in ((4, 32, 8, 16), (16, 64, 8, 16), (7, 32, 8, 64), (64, 16, 1, 64), (32, 16, 8, 16))
)
"""What is taken by clusters of 6, 2, 4 and 2, or whole, unless told otherwise."""


@contextmanager
def chosen_with(paged_more, decode_more, latent_more=None):
    """Inside, these replace what was chosen, whatever the sizes."""

    def changed(choose, more):
        return lambda *sizes, **named: dataclasses.replace(choose(*sizes, **named), **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged, "choose", changed(paged.choose, paged_more))
        patch.setattr(latent, "choose_few", changed(latent.choose_few, latent_more or {}))
        patch.setattr(latent, "choose_narrow", changed(latent.choose_narrow, latent_more or {}))
        patch.setattr(decode, "choose", changed(decode.choose, decode_more))
        launcher.forget_plans()
        yield
    launcher.forget_plans()


@contextmanager
def without_roles():
    """Inside, few latent heads are read by groups of warps that do the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent, "NARROW", False)
        launcher.forget_plans()
        yield
    launcher.forget_plans()


def by_fine_stretches():
    """Inside, the line of few latent heads is cut by half a block."""
    return chosen_with({}, {}, {"keys": 32, "rows": 16, "least": 4, "ends": 2})


def by_borders():
    """Inside, parts are joined by borders."""
    more = {"borders": True, "inside": False, "units": False, **APART}
    return chosen_with(more, {"inside": False}, {"borders": True})


def by_the_last():
    """Inside, parts are joined by whoever comes last."""
    more = {"inside": True, "units": False, "max_registers": paged.LONE_REGISTERS, "beside": False, **APART}
    return chosen_with(more, {"inside": True})


def by_tickets():
    """Inside, sequences are taken whole, as they are asked for."""
    return chosen_with({"units": True, "inside": True, "ends": 0, **APART}, {})


def by_ends():
    """Inside, the end of a sequence counts where the line is cut."""
    return chosen_with({"units": False, "ends": 1, **APART}, {})


def by_ends_and_borders():
    """The same where parts are joined by borders, and ends count twice."""
    return chosen_with({"units": False, "ends": 2, "borders": True, "inside": False, **APART}, {})


@contextmanager
def by_clusters():
    """Inside, sequences are taken by clusters, or whole."""
    before = paged.choose

    def choose(batch, key_heads, longest, head_dim, num_sms, **named):
        found = before(batch, key_heads, longest, head_dim, num_sms, **{**named, "together": False})
        num = max((size for size, fit in paged.BESIDE.items() if batch * key_heads <= fit), default=1)
        return paged.joined_together(found, batch * key_heads, num, 16) if found.fed else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged, "choose", choose)
        launcher.forget_plans()
        yield
    launcher.forget_plans()


@contextmanager
def by_neighbors():
    """Inside, neighbors take key heads of the same keys wherever threads feed columns."""
    before = paged.choose

    def choose(batch, key_heads, *sizes, ratio=1, **named):
        found = before(batch, key_heads, *sizes, ratio=ratio, **named)
        gathered = found.gathered and not found.tall
        return paged.side_by_side(found, batch, key_heads, ratio) if gathered else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged, "choose", choose)
        launcher.forget_plans()
        yield
    launcher.forget_plans()


BESIDE = tuple(
    case(dtype, b=b, h=h, k=k, s=s, d=d, page=page, uneven=True)
    for dtype, b, h, k, s, d, page in (
        ("bfloat16", 55, 12, 2, 900, 80, 16), ("float16", 1, 24, 8, 9000, 112, 32),
        ("bfloat16", 130, 20, 10, 300, 80, 1), ("bfloat16", 3, 128, 32, 700, 72, 48),
        ("float16", 9, 40, 5, 1500, 96, 8),
    )
)  # fmt: skip
"""Heads that are no whole 64 bytes, and others, of several key heads."""

ENDLESS = tuple(
    case("float32", batch=batch, dim=dim, rank=rank)
    for batch, dim, rank in ((8192, 1024, 0), (256, 3456, 0), (16383, 512, 0), (16384, 1024, 256))
)
FEW = tuple(of for of in MANY if of["h"] <= 32)
FEW_EDGES = tuple(edge for edge in (*EDGES, *WIDE) if edge[0] == "paged_latent_attention" and edge[1]["h"] <= 32)
"""Latent sequences of at most 32 heads, of any length, and at every border."""

FEW_WAYS = (without_roles, by_fine_stretches)
"""How they are read where the configuration says so."""

JOINED = case("bfloat16", b=1, h=32, k=8, s=12000, d=128, page=16, uneven=False)
"""A call of two kernels, one after the other in the same scratch."""


def wanted_variants():
    found = variants_of("cross_layer", [*HALVES, *ENDLESS])
    found += variants_of("paged_attention", [JOINED, *SHORT, *TOGETHER])
    found += variants_of("paged_latent_attention", MANY) + variants_of("paged_attention", [*ODD, *TALL])
    for way in FEW_WAYS:
        with way():
            found += variants_of("paged_latent_attention", [*LATENT, *FEW, *(of for _, of in FEW_EDGES)])
    with by_neighbors():
        found += variants_of("paged_attention", BESIDE)
    for name, of in (*EDGES, *WIDE):
        found += variants_of(name, [of])
    with by_the_last():
        for name, of in (*EDGES, *COUNTED):
            found += variants_of(name, [of])
    with by_borders():
        found += variants_of("paged_attention", PAGED) + variants_of("paged_latent_attention", LATENT)
    for way in (nullcontext, by_the_last):
        with way():
            found += variants_of("paged_attention", PAGED)
    with by_clusters():
        found += variants_of("paged_attention", CLUSTERED)
    for way in (by_tickets, by_ends):
        with way():
            found += variants_of("paged_attention", SHORT)
    for way in (by_ends, by_ends_and_borders):
        with way():
            found += variants_of("paged_attention", PAGED)
    for chosen, of in RESIDENT:
        with tuning.forced("cross_layer.resident", chosen):
            found += variants_of("cross_layer", [of])
    return list(dict.fromkeys(found))


def wrong(name, of):
    return [finding for finding in check_case(name, of, torch.device("cuda"), 3) if not finding.ok]


@pytest.mark.parametrize("way", [by_ends, by_ends_and_borders])
@pytest.mark.parametrize("of", PAGED, ids=str)
def test_a_line_that_counts_ends_is_as_right_as_pytorch_and_repeats_bit_for_bit(of, way):
    with way():
        assert not wrong("paged_attention", of)


@pytest.mark.parametrize(("name", "of"), [*(("paged_attention", of) for of in PAGED),
                                          *(("paged_latent_attention", of) for of in LATENT)], ids=str)  # fmt: skip
def test_what_is_joined_by_borders_is_as_right_as_pytorch_and_repeats_bit_for_bit(name, of):
    with by_borders():
        assert not wrong(name, of)


def poisoned(query, caches, table, lens, page):
    """Arguments whose caches are no numbers where no sequence has a key, and the same with zeros there."""
    used = torch.zeros(caches[0].shape[:2], dtype=torch.bool, device="cuda")
    for b, length in enumerate(lens):
        key = torch.arange(length, device="cuda")
        used[table[b, key // page].long(), key % page] = True
    used = used.view(*used.shape, *(1 for _ in caches[0].shape[2:]))
    lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    return tuple((query, *(torch.where(used, x, other) for x in caches), table, lens) for other in (float("nan"), 0.0))


@pytest.mark.parametrize("of", ODD, ids=str)
def test_heads_of_any_width_and_pages_of_any_size_are_as_right_as_pytorch_and_repeat_bit_for_bit(of):
    kernels = {variant.kernel for variant in variants_of("paged_attention", [of])}
    assert ("paged_gathered" in kernels) == (of["page"] % 16 > 0 or of["d"] % 64 > 0) and "paged_share" not in kernels
    assert not wrong("paged_attention", of)


@pytest.mark.parametrize("of", TALL, ids=str)
def test_many_heads_on_a_key_as_rows_are_as_right_as_pytorch_and_repeat_bit_for_bit(of):
    assert "paged_tall" in {variant.kernel for variant in variants_of("paged_attention", [of])}
    assert not wrong("paged_attention", of)


@pytest.mark.parametrize("of", BESIDE, ids=str)
def test_neighbors_that_read_key_heads_of_the_same_keys_are_as_right_as_pytorch_and_repeat_bit_for_bit(of):
    with by_neighbors():
        assert all(dict(v.constants)["BESIDE"] for v in variants_of("paged_attention", [of]) if "gather" in v.kernel)
        assert not wrong("paged_attention", of)


@pytest.mark.parametrize("of", MANY, ids=str)
def test_latent_sequences_of_many_heads_are_as_right_as_pytorch_and_repeat_bit_for_bit(of):
    kernel = "latent_narrow" if of["h"] <= 32 else "latent_roles"
    assert kernel in {one.kernel for one in variants_of("paged_latent_attention", [of])}
    assert not wrong("paged_latent_attention", of)


@pytest.mark.parametrize("way", FEW_WAYS)
@pytest.mark.parametrize("of", [*LATENT, *FEW], ids=str)
def test_few_latent_heads_are_as_right_as_pytorch_by_every_way_and_repeat_bit_for_bit(of, way):
    with way():
        kernels = {one.kernel for one in variants_of("paged_latent_attention", [of])}
        assert ("latent_narrow" in kernels) == (way is by_fine_stretches)
        assert not wrong("paged_latent_attention", of)


AT_BORDERS = [(*edge, nullcontext) for edge in (*EDGES, *WIDE)] + [(*edge, by_the_last) for edge in EDGES]
AT_BORDERS += [(*edge, way) for edge in FEW_EDGES for way in FEW_WAYS]


@pytest.mark.parametrize(("name", "of", "way"), AT_BORDERS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_lengths_at_every_border_over_caches_that_nobody_has_written_elsewhere(name, of, way):
    trial = trials()[name][1]
    args = trial.make(of, torch.device("cuda"), torch.Generator("cuda").manual_seed(4))
    query, *caches, table, _ = args[:5] if name == "paged_attention" else args[:4]
    dirty, clean = poisoned(query, caches, table, LENGTHS, of["page"])
    with way():
        found = trial.call(*dirty)
    meant = trial.eager(*clean)
    assert found[0].count_nonzero() == 0 and found.isfinite().all()
    torch.testing.assert_close(found[1:], meant[1:], rtol=0.02, atol=0.01)


@pytest.mark.parametrize("way", [nullcontext, by_tickets, by_ends])
@pytest.mark.parametrize("of", SHORT, ids=str)
def test_many_short_sequences_of_every_length_over_caches_that_nobody_has_written_elsewhere(of, way):
    trial = trials()["paged_attention"][1]
    args = trial.make(of, torch.device("cuda"), torch.Generator("cuda").manual_seed(4))
    lens = [b * 7 % (of["s"] + 1) for b in range(of["b"])]
    dirty, clean = poisoned(args[0], args[1:3], args[3], lens, of["page"])
    with way():
        found, there = trial.call(*dirty), clean[4] > 0
        assert torch.equal(found, trial.call(*dirty))
    assert found[~there].count_nonzero() == 0 and found.isfinite().all()
    torch.testing.assert_close(found[there], trial.eager(*clean)[there], rtol=0.02, atol=0.02)


def lengths_of(batch):
    """Even, nearly even, and uneven ones."""
    yield from ((one,) * batch for one in (0, 1, 65, 1040, 5000))
    yield tuple(5000 - 64 * (i % 4) for i in range(batch))
    yield tuple((i * 997 + 5000) % 5001 for i in range(batch))
    yield (5000, *((1,) * (batch - 1)))


@pytest.mark.parametrize(("of", "way"), [*((of, by_clusters) for of in CLUSTERED),
                                         *((of, nullcontext) for of in TOGETHER)],
                         ids=lambda x: getattr(x, "__name__", str(x)))  # fmt: skip
def test_clusters_join_what_is_even_and_leave_the_rest_to_whoever_comes_last(of, way):
    trial = trials()["paged_attention"][1]
    args = trial.make(of, torch.device("cuda"), torch.Generator("cuda").manual_seed(4))
    with way():
        assert {variant.kernel for variant in variants_of("paged_attention", [of])} == {"paged_together"}
        assert of["b"] > 9 or not wrong("paged_attention", of), "larger ones would take the reference tens of gigabytes"
        for lens in lengths_of(of["b"]):
            dirty, clean = poisoned(args[0], args[1:3], args[3], lens, of["page"])
            out = torch.full_like(args[0], float("nan"))
            found, there = paged_attention(*dirty, out=out).clone(), clean[4] > 0
            assert found[~there].count_nonzero() == 0 and found.isfinite().all()
            torch.testing.assert_close(found[there], trial.eager(*clean)[there], rtol=0.02, atol=0.02)
            assert torch.equal(found, paged_attention(*dirty))


def test_clusters_of_two_streams_and_of_a_graph_do_not_disturb_each_other():
    trial, of = trials()["paged_attention"][1], CLUSTERED[0]
    sets = [trial.make(of, torch.device("cuda"), torch.Generator("cuda").manual_seed(i)) for i in range(3)]
    with by_clusters():
        meant, streams = [trial.call(*args) for args in sets], [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        found = []
        for i in range(60):
            with torch.cuda.stream(streams[i % 2]):
                found.append(trial.call(*sets[i % 3]))
        torch.cuda.synchronize()
        assert all(torch.equal(one, meant[i % 3]) for i, one in enumerate(found))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            played = [trial.call(*args) for args in sets]
        for _ in range(3):
            for one in played:
                one.fill_(float("nan"))
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(played, meant, strict=True))


BY_COUNTERS = [*((*of, by_the_last) for of in COUNTED), *(("paged_attention", of, by_tickets) for of in SHORT)]


@pytest.fixture(params=BY_COUNTERS, ids=lambda each: f"{each[0]} {each[1]} {each[2].__name__}")
def counted(request):
    """A call whose parts are joined by whoever comes last, or whose sequences are given out by a counter; three sets of
    arguments, and what each gives."""
    name, of, way = request.param
    trial = trials()[name][1]
    sets = [trial.make(of, torch.device("cuda"), torch.Generator("cuda").manual_seed(i)) for i in range(3)]
    with way():
        assert len({variant.kernel for variant in variants_of(name, [of])}) == 1, "no kernel joins"
        assert not wrong(name, of)
        yield trial.call, sets, [trial.call(*args) for args in sets]


def test_counters_may_lie_in_memory_that_holds_anything(counted):
    call, sets, meant = counted
    for fill in (0, -1, 0x7FC00000, 0x5A3C9E71, 12345):
        kept = [torch.full((size,), fill, device="cuda", dtype=torch.int32) for size in (1 << 12, 1 << 18, 1 << 22)]
        del kept
        assert all(torch.equal(call(*args), one) for args, one in zip(sets, meant, strict=True))


def test_streams_have_counters_of_their_own(counted):
    call, sets, meant = counted
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for i in range(60):
        with torch.cuda.stream(streams[i % 2]):
            found.append(call(*sets[i % 3]))
    torch.cuda.synchronize()
    assert all(torch.equal(one, meant[i % 3]) for i, one in enumerate(found))


def test_a_recorded_call_counts_from_nothing_whenever_it_is_played(counted):
    call, sets, meant = counted
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [call(*args) for args in sets]
    for _ in range(3):
        for one in found:
            one.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, meant, strict=True))


def test_scratch_is_kept_by_stream_and_two_calls_are_never_in_it_at_a_time():
    trial = trials()["paged_attention"][1]
    sets = [trial.make(JOINED, torch.device("cuda"), torch.Generator("cuda").manual_seed(i)) for i in range(2)]
    assert len({variant.kernel for variant in variants_of("paged_attention", [JOINED])}) == 2, "a kernel joins"
    meant = [paged_attention(*args) for args in sets]
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        played = paged_attention(*sets[0])
    found = {0: [], 1: []}

    def work(i):
        found[i] += [paged_attention(*sets[i]) for _ in range(150)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    torch.cuda.synchronize()
    for thread in threads:
        thread.start()
    with torch.cuda.stream(side):
        for _ in range(50):
            graph.replay()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert torch.equal(played, meant[0])
    assert all(torch.equal(one, meant[i]) for i in range(2) for one in found[i])


def test_sequences_without_keys_get_zeros_wherever_borders_are():
    trial = trials()["paged_attention"][1]
    for of in (PAGED[0], PAGED[2], PAGED[5]):
        q, k, v, table, lens = trial.make(of, torch.device("cuda"), torch.Generator("cuda").manual_seed(1))
        for empty in (slice(None), slice(1, None, 3), slice(0, 1), slice(-1, None)):
            fewer = lens.clone()
            fewer[empty] = 0
            meant = trial.eager(q, k, v, table, lens)[fewer > 0]
            for way in (by_borders, by_the_last, nullcontext):
                with way():
                    found = paged_attention(q, k, v, table, fewer, out=torch.full_like(q, float("nan")))
                assert found[fewer == 0].count_nonzero() == 0
                torch.testing.assert_close(found[fewer > 0], meant, rtol=0.05, atol=0.01)


@pytest.mark.parametrize(("chosen", "of"), RESIDENT, ids=str)
def test_products_whose_rows_stay_are_as_right_as_pytorch_and_repeat_bit_for_bit(chosen, of):
    with tuning.forced("cross_layer.resident", chosen):
        assert not wrong("cross_layer", of)


@pytest.mark.parametrize("of", HALVES, ids=str)
def test_float32_layers_by_halves_are_as_right_as_pytorch(of):
    assert not wrong("cross_layer", of)


def test_tensor_float_32_is_left_to_those_who_ask_for_it():
    args = trials()["cross_layer"][1].make(HALVES[0], torch.device("cuda"), torch.Generator("cuda").manual_seed(1))
    ours = [cross_layer(*args) for _ in range(4)][-1]
    with products_in("tf32"):
        theirs = cross_layer(*args)
    assert torch.equal(cross_layer(*args), ours)
    miss = (ours - theirs).abs().max() / ours.abs().max()
    assert 1e-5 < miss < 1e-2


@pytest.mark.parametrize("of", ENDLESS, ids=str)
def test_infinities_in_float32_cross_layers_are_what_pytorch_makes_of_them(of):
    """By halves, in tiles for few rows and in pieces; a NaN that the device made is one of nothing but ones."""
    trial = trials()["cross_layer"][1]
    args = trial.make(of, torch.device("cuda"), torch.Generator("cuda").manual_seed(1))
    args[1][5, 3], args[1][7, 1], args[1][11, 2] = float("inf"), float("inf"), -float("inf")
    args[1][9, 4] = torch.zeros((), device="cuda") / 0.0
    args[2][17, :4] = 0.0
    found, meant = trial.call(*args), trial.eager(*args)
    assert torch.equal(found.isnan(), meant.isnan()) and int(found.isnan().sum()) > 100
    assert torch.equal(found[found.isinf()], meant[meant.isinf()]) and (of["rank"] or int(found.isinf().sum()) > 100)
    leaves = [each.clone().requires_grad_() for each in args]
    ours, theirs = (torch.autograd.grad(call(*leaves).sum(), leaves) for call in (trial.call, trial.eager))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf())
