"""Are we right? Every operator recorded on an H200 beside its prediction, by family, with figures that must hold."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from lab.fit.intervals import FEW, Score, coverage
from lab.fit.intervals import operators as calls_of_samples
from ridgeline.cost.price import pricer_of
from ridgeline.cost.time.gemm.calls import alignment
from ridgeline.hardware import device

Error = dict[str, Any]
POINTWISE = set("gelu silu relu exp rsqrt cos pow2 gelu_tanh clamp add mul div add_ where masked_fill fill cast copy "
                "add_row mul_col add_strided permute0213 transpose cat dropout".split())  # fmt: skip
REDUCTIONS = set("sum_dim0 sum_dim1 mean_dim1 sum_all argmax_dim1 max_dim1 norm_all".split())
NORMS = {"layer_norm", "rms_norm", "group_norm", "batch_norm"}
SOFTMAXES = {"softmax", "log_softmax", "cross_entropy"}
CONVOLUTIONS = {"conv1d", "conv2d", "conv3d"}


def _aligned_gemm(row: dict[str, Any]) -> bool:
    s = row["shape"]
    if (row["kind"], row["dtype"], row["phase"]) != ("gemm", "bf16", "fwd"):
        return False
    return alignment((1, s["m"], s["n"], s["k"], s.get("layout", "nt")), "bf16") == 8


GROUPS: dict[str, tuple[Callable[[dict[str, Any]], bool], float]] = {
    "norms": (lambda r: r["kind"] in NORMS, 0.055),
    "softmaxes": (lambda r: r["kind"] in SOFTMAXES, 0.055),
    "pointwise": (lambda r: r["kind"] in POINTWISE, 0.055),
    "reductions": (lambda r: r["kind"] in REDUCTIONS, 0.065),
    "aligned bf16 gemm": (_aligned_gemm, 0.06),
    "all gemm": (lambda r: r["kind"] == "gemm", 0.09),
    "cudnn attention": (lambda r: r["kind"] == "attention" and r["library"] == "cudnn", 0.06),
    "all attention": (lambda r: r["kind"] == "attention", 0.06),
    "convolution": (lambda r: r["kind"] in CONVOLUTIONS, 0.16),
    "the rest": (lambda r: r["kind"] not in NORMS | SOFTMAXES | POINTWISE | REDUCTIONS | CONVOLUTIONS
                 | {"gemm", "attention"}, 0.09),
    "all": (lambda r: True, 0.085),
}  # fmt: skip


def _judged(pattern: str) -> list[Error]:
    """Recorded calls priced as the benchmark that prints the table does it."""
    from lab.fit import recordings
    from lab.validate import operators

    return operators.errors(recordings.load_operators("h200", pattern), pricer_of(device("h200")))


@pytest.fixture(scope="module")
def judged() -> list[Error]:
    return _judged("operators_seed[01]")


@pytest.fixture(scope="module")
def hard() -> list[Error]:
    """Shapes recorded because they were predicted badly: odd products, convolutions, scatters, transfers."""
    return _judged("operators_seed3")


@pytest.fixture(scope="module")
def unseen() -> list[Error]:
    return _judged("unseen_seed*")


def ape(error: Error) -> float:
    return abs(math.exp(error["log"]) - 1.0)


def mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def test_every_recorded_call_is_priced(judged: list[Error]) -> None:
    assert len(judged) > 10_000


@pytest.mark.parametrize("group", GROUPS)
def test_the_mean_error_of_a_family_stays_small(judged: list[Error], group: str) -> None:
    wanted, limit = GROUPS[group]
    members = [e for e in judged if wanted(e["row"])]
    found = mean(map(ape, members))
    by_kind: dict[str, list[float]] = defaultdict(list)
    for e in members:
        by_kind[f"{e['row']['kind']} {e['row']['phase']}"].append(ape(e))
    print(f"{group}: n {len(members)}, mean error {found:.1%} (limit {limit:.1%})")
    print(", ".join(f"{kind} {mean(v):.1%}" for kind, v in sorted(by_kind.items())))
    assert len(members) > 100 and found <= limit


def _groups(row: dict[str, Any]) -> bool:
    return row["kind"] == "conv2d" and 1 < row["shape"]["groups"] < row["shape"]["c"]


HARD: dict[str, tuple[Callable[[dict[str, Any]], bool], float]] = {
    "odd products": (lambda r: r["kind"] in ("gemm", "bmm"), 0.11),
    "convolutions, dense and depthwise": (lambda r: r["kind"] == "conv2d" and not _groups(r), 0.19),
    "convolutions in groups": (_groups, 0.46),
    "accumulating assignments": (lambda r: r["kind"] == "index_put", 0.07),
    "weight norms": (lambda r: r["kind"] == "weight_norm", 0.11),
    "transfers": (lambda r: r["kind"] == "transfer", 0.15),
}


@pytest.mark.parametrize("group", HARD)
def test_hard_shapes_are_predicted_within_the_stated_error(hard: list[Error], group: str) -> None:
    wanted, limit = HARD[group]
    members = [e for e in hard if wanted(e["row"])]
    found = mean(map(ape, members))
    print(f"{group}: n {len(members)}, mean error {found:.1%} (limit {limit:.1%})")
    assert len(members) >= 50 and found <= limit


def test_predictions_lean_to_neither_side(judged: list[Error]) -> None:
    assert abs(mean(math.exp(e["log"]) - 1.0 for e in judged)) < 0.03


def test_intervals_hold_what_they_promise(judged: list[Error]) -> None:
    inside = mean(float(abs(e["log"]) <= e["width"]) for e in judged)
    print(f"inside their 90 % intervals: {inside:.1%}")
    assert 0.85 <= inside <= 0.97


def test_nothing_measured_beats_its_floor(judged: list[Error]) -> None:
    beaten = [(e["row"]["kind"], e["row"]["shape"]) for e in judged if e["below_floor"]]
    assert not beaten, f"{len(beaten)} recordings are more than 2 % below their floor: {beaten[:5]}"


def test_half_the_time_would_fail(judged: list[Error]) -> None:
    """The limits are tight enough to notice a model that is off by a factor."""
    for wanted, limit in GROUPS.values():
        assert mean(abs(0.5 * math.exp(e["log"]) - 1.0) for e in judged if wanted(e["row"])) > 2 * limit


def test_shapes_that_no_fit_has_seen_are_predicted_as_well(unseen: list[Error]) -> None:
    """A third seed, recorded after the models were made and read by no fit."""
    plain = [e for e in unseen if e["row"]["kind"] not in CONVOLUTIONS]
    found, median = mean(map(ape, plain)), sorted(map(ape, unseen))[len(unseen) // 2]
    print(f"{len(unseen)} unseen calls: median error {median:.1%}, mean without convolutions {found:.1%}")
    assert found <= 0.062 and median <= 0.045


def test_intervals_hold_what_no_fit_has_seen(unseen: list[Error]) -> None:
    inside = mean(float(abs(e["log"]) <= e["width"]) for e in unseen)
    print(f"unseen calls inside their 90 % intervals: {inside:.1%}")
    assert 0.85 <= inside <= 0.97


def test_the_interval_of_each_family_holds_nine_of_ten_calls_that_no_fit_has_seen() -> None:
    families = defaultdict[str, list[Score]](list)
    for score in calls_of_samples("h200"):
        families[score.group].append(score)
    held = {name: coverage(own) for name, own in families.items() if len(own) >= FEW}
    assert len(held) >= 9 and all(0.85 <= share <= 0.95 for share in held.values()), held


def test_nothing_unseen_beats_its_floor(unseen: list[Error]) -> None:
    assert not [(e["row"]["kind"], e["row"]["shape"]) for e in unseen if e["below_floor"]]
