"""The sample of weak spots and the general one: the same every time, legal, and disjoint in what they are for."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("torch")

from lab.record.surveys import general_points, weak_points
from ridgeline.bench.operators import kinds
from ridgeline.bench.sampling import Point
from ridgeline.cost.call import call
from ridgeline.cost.price import pricer_of
from ridgeline.hardware import device

WEAK, GENERAL = list(weak_points(3, 0.1)), list(general_points(1003, 0.2))
PROMISED = set(
    "gemm bmm attention layer_norm rms_norm softmax gelu add sum_dim0 conv2d embedding_bag cross_entropy topk sort "
    "cumsum".split()
)


def as_text(found: list[Point]) -> list[str]:
    return [f"{p.kind} {p.dtype} {p.phase} {p.library} {p.shape}" for p in found]


def test_a_seed_gives_the_same_points_again() -> None:
    assert as_text(list(general_points(1003, 0.2))) == as_text(GENERAL)
    assert as_text(list(general_points(1004, 0.2))) != as_text(GENERAL)


def test_the_general_sample_has_every_kind_that_is_promised() -> None:
    assert {p.kind for p in GENERAL} == PROMISED
    assert {p.phase for p in GENERAL} == {"fwd", "bwd"}


def test_every_point_can_be_made_and_priced() -> None:
    pricer = pricer_of(device("h200"))
    assert {p.kind for p in WEAK + GENERAL} <= set(kinds())
    for p in WEAK + GENERAL:
        assert pricer.price(call(p.kind, p.dtype, p.phase, p.library, **p.shape)).time.busy_s > 0


def test_grouped_convolutions_divide_their_channels() -> None:
    convs = [p.shape for p in WEAK + GENERAL if p.kind == "conv2d"]
    assert all(s["c"] % s["groups"] == 0 and s["o"] % s["groups"] == 0 for s in convs)
    assert len(Counter(s["groups"] for s in convs)) > 4


def test_odd_16_bit_products_have_a_side_off_eights() -> None:
    odd = [p.shape for p in WEAK if p.kind in ("gemm", "bmm") and p.dtype in ("bf16", "fp16")]
    assert odd and all(s["m"] % 8 or s["n"] % 8 or s["k"] % 8 for s in odd)
