"""The factor learned for products: bounded, of measured devices alone, and what the trees in the file say."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from ridgeline.cost.calibration import SIBLINGS
from ridgeline.cost.call import Call
from ridgeline.cost.correction import gemm_attention as residue
from ridgeline.cost.price import pricer_of
from ridgeline.cost.time.chip import Chip, chip_of
from ridgeline.cost.time.conv import conv, depthwise, kernel_choice, pointwise, problem
from ridgeline.cost.time.conv.implicit_gemm import Choice, Problem
from ridgeline.cost.time.gemm import calls as matmul
from ridgeline.hardware import device

PROBLEMS = [(1, 2048, 4096, 4096, "nt"), (1, 7, 333, 4099, "nn"), (64, 128, 128, 64, "nt"), (1, 1, 16, 16, "tn")]


@pytest.fixture
def h200() -> Chip:
    return chip_of(device("h200"))


def logs(problems: list[residue.Problem], dtype: str, chip: Chip) -> list[float]:
    """What the factor says of aligned products."""
    rows = [residue.features(problem, dtype, 8, chip.num_sms) for problem in problems]
    return residue.logs(residue.trees_of(chip, residue.pool_of(dtype, 8)), rows)


def walked(trees: residue.Boosted, values: list[float]) -> float:
    """The sum of leaves, each reached by asking one question after another."""
    total = 0.0
    for number, (features, limits) in enumerate(zip(trees.feature, trees.limit, strict=True)):
        leaf = 0
        for feature, limit in zip(features, limits, strict=True):
            leaf = 2 * leaf + (values[feature] > limit)
        total += float(trees.leaf[number * 2 ** len(features) + leaf])
    return total


def test_all_trees_at_once_give_what_walking_them_gives(h200: Chip) -> None:
    trees = residue._pools()["h200/half"]
    rows = [residue.features(problem, "bf16", 8, h200.num_sms) for problem in PROBLEMS]
    assert trees.logs(np.array(rows)).tolist() == pytest.approx([walked(trees, row) for row in rows], abs=1e-6)


def test_trees_ask_of_nothing_but_the_features(h200: Chip) -> None:
    for name, trees in residue._pools().items():
        owner, _, pool = name.partition("/")
        if owner == residue.KERNELS:
            continue
        base, alone, _ = pool.partition(".alone")
        dtype = {"half": "bf16", "half.odd": "bf16", "vector": "fp32"}.get(base, base)
        if pool.startswith(("prefill", "decode")):
            width = len(residue.attention_features(dict.fromkeys(("b", "h", "hkv", "s", "skv", "d"), 8), h200.num_sms))
        else:
            problem = (1, 64, 65, 67, "nt") if pool == "half.odd" else (1, 1 if pool == "vector" else 64, 64, 64, "nt")
            chip = chip_of(device(owner))
            entry = pricer_of(device(chip.name)).calibration.entry("gemm", dtype)
            coef = {**matmul.DEFAULTS, **(entry["coef"] if entry else {})}
            width = len(matmul.described(problem, dtype, chip, coef, bool(alone))[0])
        assert trees.feature.max() < width, name


def test_trees_of_convolution_kernels_ask_of_nothing_but_their_features() -> None:
    shape = {"n": 8, "c": 64, "h": 28, "w": 28, "o": 64, "k": 3, "stride": 1, "groups": 1}
    given = problem.conv_of_call(Call("conv2d", "bf16", "fwd", "cudnn", tuple(shape.items())), shape)
    width = len(
        kernel_choice.kernel_features(given, Choice("tma", 128, 128, 64), Problem(6272, 64, 64, 9.0, 1e6, 1e6, 2.0))
    )
    widths = {"stencil": len(depthwise.stencil_features(given)),
              "product": len(pointwise.product_features(given, {"m": 1, "n": 1, "k": 1}))}  # fmt: skip
    pools = residue.trees_in(residue.KERNEL_FILE)
    assert len(pools) > 20
    for name, trees in pools.items():
        way = name.removeprefix(f"{residue.KERNELS}/").partition(".")[0]
        assert trees.feature.max() < widths.get(way, width), name


@pytest.mark.parametrize("shape", [{"groups": 64}, {"groups": 1, "k": 1}])
def test_stencils_and_pointwise_products_have_a_bounded_factor(shape: dict[str, int], h200: Chip) -> None:
    full = {"n": 8, "c": 64, "h": 28, "w": 28, "o": 64, "k": 3, "stride": 1, "nhwc": 1, **shape}
    asked = Call("conv2d", "bf16", "fwd", "cudnn", tuple(full.items()))
    coefs = [{**problem.DEFAULTS, "residue_frac": share} for share in (0.0, 1.0)]
    plain, told = (conv.model(asked, h200, coef, 0.0).busy_s for coef in coefs)
    assert plain != told and abs(math.log(told / plain)) <= residue.BOUND + 1e-9


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_factor_of_a_convolution_kernel_can_be_left_out(share: float, h200: Chip) -> None:
    shape = (("n", 64), ("c", 512), ("h", 14), ("w", 14), ("o", 512), ("k", 3), ("stride", 1), ("nhwc", 1))
    asked = Call("conv2d", "bf16", "fwd", "cudnn", shape)
    told = conv.model(asked, h200, {**problem.DEFAULTS, "residue_frac": share}, 0.0).busy_s
    bare = conv.model(asked, h200, {**problem.DEFAULTS, "residue_frac": 0.0}, 0.0).busy_s
    assert (told == bare) is (share == 0.0)


def test_the_factor_is_bounded_and_says_something(h200: Chip) -> None:
    found = logs(PROBLEMS, "bf16", h200)
    assert all(abs(log) <= residue.BOUND for log in found)
    assert max(map(abs, found)) > 0.001


def test_far_from_everything_measured_the_factor_is_still_bounded(h200: Chip) -> None:
    huge = [(1, 10**7, 10**7, 10**7, "nt"), (10**6, 1, 1, 1, "nn")]
    assert all(abs(log) <= residue.BOUND for dtype in ("bf16", "fp8") for log in logs(huge, dtype, h200))


def test_a_device_of_an_architecture_that_nobody_measured_has_none() -> None:
    assert logs(PROBLEMS, "bf16", chip_of(device("t4"))) == [0.0] * len(PROBLEMS)


def test_a_device_that_nobody_measured_takes_the_factor_of_a_sibling() -> None:
    pcie, sxm = (residue.trees_of(chip_of(device(name)), "half") for name in ("h100-pcie", "h100-sxm"))
    assert pcie is sxm is not None
    assert all(SIBLINGS[arch] == donor for arch, donor in residue.DONORS.items())


def test_an_imagined_device_keeps_the_factor_of_the_one_it_was_made_from(h200: Chip) -> None:
    imagined = chip_of(device("h200 hbm_bandwidth=2x"))
    assert logs(PROBLEMS, "bf16", imagined) == logs(PROBLEMS, "bf16", h200)


def test_the_factor_multiplies_what_the_structure_says(h200: Chip) -> None:
    call = Call("gemm", "bf16", "fwd", "cublas", (("m", 300), ("n", 4096), ("k", 1024)))
    coef = {**matmul.DEFAULTS, **pricer_of(device("h200")).calibration.families["gemm"]["bf16"]["coef"]}
    bare, told = (matmul.model(call, h200, {**coef, "residue_frac": share}, 0.0).busy_s for share in (0.0, 1.0))
    log = logs([(1, 300, 4096, 1024, "nt")], "bf16", h200)[0]
    assert told == pytest.approx(bare * math.exp(log))


@pytest.mark.parametrize(("dtype", "sizes"), [("bf16", (64, 512, 256)), ("fp8", (64, 512, 256)), ("bf16", (1, 67, 99))])
def test_calls_alone_and_gradients_have_trees_apart_and_models_do_not(
    dtype: str, sizes: tuple[int, int, int], h200: Chip
) -> None:
    pricer = pricer_of(device("h200"))
    call = Call("gemm", dtype, "fwd", "cublas", tuple(zip("mnk", sizes, strict=True)))
    between, inside = (pricer.price(call, flushed=False, alone=alone).time.busy_s for alone in (True, False))
    aligned = sizes[0] > 1
    assert (between != inside) is aligned and between == pytest.approx(inside, rel=0.5)
    coef = {**matmul.DEFAULTS, "alone_frac": 1.0}
    names = {phase: matmul.pools_of((1, *sizes, "nt"), dtype, coef, phase)[0][0] for phase in ("fwd", "bwd")}
    assert (names["fwd"] != names["bwd"]) is aligned and (aligned or names["fwd"] == "vector")


def test_no_factor_takes_a_product_below_its_floor(h200: Chip) -> None:
    starved = replace(h200, dram_bytes_per_s=1e9)
    coef = {**matmul.DEFAULTS, **pricer_of(device("h200")).calibration.families["gemm"]["bf16"]["coef"]}
    for m in (1, 64, 4096):
        call = Call("gemm", "bf16", "fwd", "cublas", (("m", m), ("n", 4096), ("k", 4096)))
        time = matmul.model(call, starved, coef, 0.0)
        assert time.busy_s >= time.floor_s


def test_many_products_at_once_are_priced_as_one_by_one(h200: Chip) -> None:
    coef = {**matmul.DEFAULTS, **pricer_of(device("h200")).calibration.families["gemm"]["bf16"]["coef"]}
    calls = [Call("gemm", "bf16", "fwd", "cublas", (("m", m), ("n", 4096), ("k", 1024))) for m in (8, 300, 5000)]
    calls.append(Call("grouped_gemm", "bf16", "fwd", "cublas", (("groups", 8), ("m", 2048), ("n", 512), ("k", 1024))))
    warm_fracs = [0.0, 0.5, 1.0, 0.25]
    together = matmul.many(calls, [matmul.plain_problem(call) for call in calls], h200, coef, warm_fracs)
    alone = [matmul.model(call, h200, coef, warm) for call, warm in zip(calls, warm_fracs, strict=True)]
    assert [t.busy_s for t in together] == pytest.approx([t.busy_s for t in alone])
    assert [t.num_kernels for t in together] == [t.num_kernels for t in alone]


@pytest.mark.parametrize("name", ["l40s", "b200", "a100-sxm-80gb", "h100-sxm", "gb200"])
def test_devices_of_the_tables_have_a_factor(name: str) -> None:
    assert any(logs(PROBLEMS, "bf16", chip_of(device(name))))


@pytest.mark.parametrize(("dtype", "n"), [("bf16", 4096), ("bf16", 4097), ("fp32", 1000), ("tf32", 1000)])
def test_more_bandwidth_and_warmer_operands_never_slow_a_learned_product(dtype: str, n: int) -> None:
    plain, wider = (pricer_of(device(name)) for name in ("h200", "h200 hbm_bandwidth=2x"))
    for m, k in ((1, 4096), (8, 16384), (300, 999), (5000, 640)):
        asked = Call("gemm", dtype, "fwd", "cublas", (("m", m), ("n", n), ("k", k)))
        base_s = plain.price(asked).time.busy_s
        assert wider.price(asked).time.busy_s <= base_s * (1 + 1e-9)
        assert plain.price(asked, 0.9).time.busy_s <= base_s * (1 + 1e-9)
