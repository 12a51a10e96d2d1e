"""Rows of embedding bags in order, long bags, odd widths, uneven sequences, passes that start early, uneven pieces."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch.nn import functional

from ridgeline.bench.check import check_case
from ridgeline.kernels import EmbeddingBags, embedding_bag, launcher, linear_cross_entropy, varlen_attention
from ridgeline.kernels.contract import case
from ridgeline.kernels.embedding_bag import config, sums
from ridgeline.kernels.grad_norm.op import LISTS
from ridgeline.kernels.variants import variants_of

pytestmark = pytest.mark.usefixtures("packed")
LISTS["nine million in five"] = (4_000_001, 5_000_000, 7, 300_003, 65)
LISTS["seven small"] = (64, 700, 9, 1000, 1500, 1, 4096)
ORDERS = tuple(
    (n, rows, chosen)
    for n, rows in ((1, 1), (33, 5), (5000, 474085), (8192, 300), (9000, 3), (70_001, 96713), (300_000, 1 << 20))
    for chosen in (config.order(n, rows), config.Order(512, 8, 16, 4), config.Order(2048, 5, 32, 8),
                   config.Order(512, 7, 16, 4, share=8), config.Order(1024, 8, 16, 8, share=4))
)  # fmt: skip


def bags(batch, rows, dim, length, **more):
    return case("float32", tables=1, batch=batch, rows=rows, dim=dim, length=length, **more)


def uneven(h, k, d, lengths, **more):
    given = {"causal": True, "window": None, "cap": 0.0} | more
    return case("bfloat16", h=h, k=k, d=d, q=lengths, kv=lengths, **given)


SEQUENCES = (
    uneven(14, 2, 128, (628, 1993, 380)), uneven(8, 2, 64, (1246, 180, 0, 861, 46, 2012, 1091, 1, 152)),
    uneven(4, 4, 128, (95, 284, 1766, 44), causal=False), uneven(6, 2, 96, (700, 90, 1300), window=(200, 0)),
    uneven(7, 1, 128, tuple(range(1, 300, 2))),
)  # fmt: skip
TASKS = [("varlen_attention", of) for of in SEQUENCES] + [
    ("embedding_bag", bags(900, 30011, 48, 5)),
    ("embedding_bag", bags(3000, 70001, 24, 20, mode="mean", index="int32")),
    ("embedding_bag", bags(20000, 777, 64, 6, skewed=True)),
    ("embedding_bag", bags(700, 50, 32, 8, padding=3)),
    ("embedding_bag", bags(9000, 30000, 16, 20)), ("embedding_bag", bags(9000, 33000, 16, 20, mode="mean")),
    ("embedding_bags_update", bags(3000, 900, 64, 10, optimizer="rowwise_adagrad")),
    ("embedding_bags_update", bags(9000, 5000, 32, 20, optimizer="adam", skewed=True)),
    ("embedding_bag", bags(20000, 4314, 64, 20, skewed=True)), ("embedding_bag", bags(5000, 2_000_003, 8, 20)),
    *(("embedding_bag", case(dtype, tables=1, batch=batch, rows=5000, dim=dim, length=length, **more))
      for dtype, batch, dim, length, more in (
          ("float16", 381, 192, 50, {"mode": "mean", "index": "int32"}), ("float32", 2834, 32, 50, {}),
          ("bfloat16", 370, 384, 20, {}), ("float32", 1091, 24, 20, {"weighted": True}),
          ("float16", 6970, 64, 50, {"padding": 3}), ("float32", 3, 1000, 100, {}), ("float32", 700, 8, 90, {}),
          ("float32", 2677, 256, 20, {"index": "int32"}), ("bfloat16", 426, 384, 8, {}),
          ("float32", 300, 200, 20, {"weighted": True}), ("float16", 500, 320, 9, {"mode": "mean", "padding": 2}))),
    ("embedding_bags", case("float32", tables=3, batch=200, rows=700, dim=100, length=40, codes=True)),
    *(("cross_layer", case(dtype, batch=batch, dim=dim, rank=rank))
      for dtype, batch, dim, rank in (("float16", 9800, 429, 0), ("bfloat16", 5000, 845, 0),
                                      ("bfloat16", 4300, 999, 40), ("float16", 39200, 429, 0),
                                      ("bfloat16", 16800, 1002, 21), ("bfloat16", 8500, 640, 64),
                                      ("float16", 4101, 1504, 128), ("bfloat16", 9001, 200, 16),
                                      ("float16", 4096, 2048, 32), ("float16", 5003, 200, 0),
                                      ("bfloat16", 4097, 256, 0), ("bfloat16", 9000, 72, 0),
                                      ("bfloat16", 1500, 256, 0), ("float16", 9001, 128, 0),
                                      ("bfloat16", 5001, 640, 48), ("float16", 700, 1504, 64))),
    *(("dropout_add", case(dtype, rows=rows, cols=cols, p=0.3))
      for dtype, rows, cols in (("bfloat16", 33, 4099), ("float16", 777, 6009), ("float32", 901, 3001),
                                ("bfloat16", 2, 8), ("bfloat16", 3000, 1024), ("float16", 5, 3),
                                ("float32", 169, 1912), ("float32", 3000, 1024), ("float32", 7, 9))),
    *(("linear_cross_entropy", case("bfloat16", rows=130, cols=cols, hidden=256)) for cols in (5000, 5003)),
    *(("adamw", case("float32", list="seven small", max_norm=bound, master=False)) for bound in (-1.0, 1.0)),
    *(("cross_entropy", case(dtype, rows=4100, cols=cols))
      for dtype, cols in (("bfloat16", 3191), ("float16", 2051), ("float32", 3191), ("float32", 4091))),
    *(("clip_grad_norm_", case(dtype, list="nine million in five", max_norm=bound))
      for dtype, bound in (("float32", 1.0), ("bfloat16", 0.5), ("float32", 1e9))),
    ("adamw", case("float32", list="nine million in five", max_norm=1.0, master=False)),
    ("adamw", case("bfloat16", list="nine million in five", max_norm=-1.0, master=True)),
    ("adamw_8bit", case("float32", list="nine million in five", max_norm=1.0, bits=8, master=False)),
    ("adamw_8bit", case("bfloat16", list="nine million in five", max_norm=-1.0, bits=8, master=True)),
    *(("rope", case(dtype, batch=2, seq=37, heads=heads, keys=keys, dim=dim))
      for dtype, heads, keys, dim in (("float16", 40, 8, 80), ("bfloat16", 20, 20, 80), ("float32", 40, 1, 72),
                                      ("bfloat16", 5, 1, 272))),
    ("group_norm", case("float16", batch=260, channels=128, side=20, groups=32)),
    ("group_norm", case("float16", batch=100, channels=384, side=14, groups=16)),
    ("group_norm", case("bfloat16", batch=60, channels=512, side=14, groups=32)),
    ("group_norm_silu", case("float32", batch=70, channels=896, side=14, groups=8)),
    ("group_norm_silu", case("bfloat16", batch=70, channels=256, side=36, groups=8)),
    ("group_norm_silu", case("float16", batch=40, channels=128, side=52, groups=16)),
]  # fmt: skip


def in_order(n: int, rows: int, chosen: config.Order, device: str) -> tuple[torch.Tensor, ...]:
    """(rows, rows in order, where they stood, what stood there)."""
    keys = torch.randint(0, rows + 1, (n,), dtype=torch.int32, device=device)
    if device == "cuda" and n % 2:  # half of them are a few hot rows
        keys = torch.where(torch.rand(n, device=device) < 0.5, keys % 3, keys)
    bags = torch.arange(7, n + 7, dtype=torch.int32, device=device)
    found = sums.put_in_order(keys, rows, chosen)
    return keys, *found, sums.put_in_order(keys, rows, chosen, bags)[1]


def wanted_variants():
    wanted = [variant for name, of in TASKS for variant in variants_of(name, [of])]
    with launcher.collecting() as found:
        for n, rows, chosen in ORDERS:
            in_order(n, rows, chosen, "meta")
    return list(dict.fromkeys([*wanted, *found]))


@pytest.mark.parametrize(("name", "of"), TASKS, ids=str)
def test_a_case_is_as_right_as_pytorch_and_repeats_bit_for_bit(name, of):
    wrong = [finding for finding in check_case(name, of, torch.device("cuda"), 5) if not finding.ok]
    assert not wrong, wrong


@pytest.mark.parametrize(("n", "rows", "chosen"), ORDERS, ids=str)
def test_rows_are_in_order_and_equal_ones_as_they_stood(n, rows, chosen):
    keys, found, places, bags = in_order(n, rows, chosen, "cuda")
    meant = torch.sort(keys, stable=True)
    assert torch.equal(found, meant.values) and torch.equal(places.long(), meant.indices)
    assert torch.equal(bags.long(), meant.indices + (7 if chosen.block else 0))


def test_gradients_of_bags_are_those_of_their_call_when_calls_repeat_without_python():
    weight = torch.randn(5003, 40, device="cuda", requires_grad=True)
    for i in range(6):
        indices = torch.randint(0, 5003, (2000,), device="cuda", generator=torch.Generator("cuda").manual_seed(i))
        offsets = torch.arange(0, 2000, 4, device="cuda")
        grad = torch.randn(500, 40, device="cuda")
        ours, theirs = (
            torch.autograd.grad(form(indices, weight, offsets, mode="sum"), weight, grad)[0]
            for form in (embedding_bag, functional.embedding_bag)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        square = indices.view(400, 5)
        torch.testing.assert_close(embedding_bag(square, weight), functional.embedding_bag(square, weight))


def test_a_step_on_other_bags_through_the_same_plan_is_theirs():
    tables = [EmbeddingBags([3001, 50], 24, optimizer="sgd", lr=0.5, device="cuda") for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    for i in range(6):
        generator = torch.Generator("cuda").manual_seed(i)
        indices = torch.randint(0, 50, (24_000,), device="cuda", generator=generator)
        offsets = torch.arange(0, 24_001, 4, device="cuda")
        grad = torch.randn(3000, 48, device="cuda", generator=generator)
        tables[0](indices, offsets).backward(grad)
        rows = (indices + torch.repeat_interleave(tables[1].starts, 12_000)).cpu()
        by_bag = grad.view(3000, 2, 24).transpose(0, 1).reshape(6000, 24).cpu().double()
        dense = torch.zeros(3051, 24, dtype=torch.float64).index_add_(0, rows, by_bag.repeat_interleave(4, 0))
        tables[1].weight -= (0.5 * dense).cuda()
        torch.testing.assert_close(tables[0].weight, tables[1].weight, rtol=1e-4, atol=1e-3)
        tables[1].weight.copy_(tables[0].weight)


@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_a_loss_scales_its_gradients_in_place_or_leaves_them(factor):
    x = torch.randn(70, 128, device="cuda").bfloat16().requires_grad_()
    weight = (128**-0.5 * torch.randn(1000, 128, device="cuda")).bfloat16().requires_grad_()  # logits of about one
    target = torch.randint(0, 1000, (70,), device="cuda")
    for _ in range(3):
        loss = linear_cross_entropy(x, weight, target) * factor
        kept = torch.autograd.grad(loss, (x, weight), retain_graph=True)  # copies: the graph may ask again
        found = torch.autograd.grad(loss, (x, weight))
        wide = [t.detach().double().requires_grad_() for t in (x, weight)]
        meant = torch.autograd.grad(functional.cross_entropy(wide[0] @ wide[1].T, target) * factor, wide)
        for ours, copied, theirs in zip(found, kept, meant, strict=True):
            assert torch.equal(ours, copied)
            torch.testing.assert_close(ours.double(), theirs, rtol=0.03, atol=1e-4)


def test_sequences_of_other_lengths_through_the_same_plan_are_theirs():
    q, k, v = (torch.randn(1500, n, 64, device="cuda").bfloat16() for n in (4, 2, 2))
    for lengths in ((700, 800), (1, 1499), (1499, 1), (0, 1500), (750, 750)):
        starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        found = varlen_attention(q, k, v, starts, starts, 1500, 1500, True)
        parts = zip(*(x.transpose(0, 1)[None].split(list(lengths), 2) for x in (q, k, v)), strict=True)
        meant = [
            functional.scaled_dot_product_attention(*(x.float() for x in each), is_causal=True, enable_gqa=True)
            for each in parts
            if each[0].numel()
        ]
        torch.testing.assert_close(found.float(), torch.cat(meant, 2)[0].transpose(0, 1), rtol=0.02, atol=0.02)
