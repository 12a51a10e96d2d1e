"""What a chip costs, against published areas and bills of materials."""

from __future__ import annotations

import numpy as np
import pytest

from ridgeline.errors import InputError
from ridgeline.hardware import device
from ridgeline.hardware.fleet import fleet
from ridgeline.study.price import Bill, assumptions, die_of, drawn, figures, matters


@pytest.mark.parametrize(
    ("name", "published_mm2", "allowed"),
    # The parts of GA100 and Aldebaran were fitted to their die shots; GH100 and AD102 are told by them.
    [("a100-sxm-80gb", 826, 0.10), ("mi210", 724, 0.10), ("h100-sxm", 814, 0.10), ("l40s", 608.5, 0.10)],
)
def test_the_parts_add_up_to_the_published_die(name, published_mm2, allowed):
    assert sum(Bill(device(name)).parts_mm2().values()) == pytest.approx(published_mm2, rel=allowed)


@pytest.mark.parametrize(
    ("part", "published_mm2"), [("cores", 476.25), ("interconnect", 76.44), ("L2", 119.31), ("memory interface", 89.77)]
)
def test_parts_of_an_a100_are_those_of_its_die_shot(part, published_mm2):
    assert Bill(device("a100-sxm-80gb")).parts_mm2()[part] == pytest.approx(published_mm2, rel=0.06)


@pytest.mark.parametrize(
    ("name", "item", "published_usd"),
    [
        ("h100-sxm", "total", 3320), ("h100-sxm", "logic", 300), ("h100-sxm", "memory", 1350),
        ("h100-sxm", "package", 750), ("b200", "total", 6400), ("b200", "memory", 2900), ("b200", "package", 1100),
        ("b200", "lost in assembly", 1050), ("b200", "board and test", 480),
    ],
)  # fmt: skip
def test_published_bills_of_materials_lie_inside_the_intervals(name, item, published_usd):
    bills = [bill.materials_usd() for bill in (Bill(device(name)), drawn(device(name)))]
    made = figures(*({**bill, "total": sum(bill.values())} for bill in bills))
    assert made[item].low <= published_usd <= made[item].high


def test_every_assumption_has_an_interval_a_date_and_a_source():
    for found in assumptions().values():
        assert found.low <= found.value <= found.high, found
        assert found.source, found
        assert found.date[:2] == "20", found
        assert found.basis in ("datasheet", "fitted", "assumed"), found


def test_spare_cores_raise_the_yield_and_more_defects_lower_it():
    h100 = device("h100-sxm")
    area = Bill(h100).area_mm2()
    perfect = Bill(h100, {**h100.numbers(), "num_cores": 144})
    perfect.base = {**perfect.base, "num_cores": 144}
    assert perfect.die_yield(area, 1) < Bill(h100).die_yield(area, 1)
    assert Bill(h100, None, {"defects_per_cm2": 0.2}).die_yield(area, 1) < Bill(h100).die_yield(area, 1)


def test_a_chip_beyond_the_reticle_is_two_dies():
    big = Bill(device("h200 sms=264"))
    assert big.num_dies(big.area_mm2()) == 2
    assert big.area_mm2() > sum(big.parts_mm2().values())


def test_a_fleet_is_priced_as_each_device_alone():
    made = fleet(device("h200"), {"sms": (np.array([100.0, 132.0, 300.0]), False),
                                  "hbm_bandwidth": (np.array([1.0, 2.0, 1.5]), True)}, 3)  # fmt: skip
    many = Bill(made.parent, made.numbers).totals()
    for at, text in enumerate(["sms=100", "hbm_bandwidth=2x", "sms=300 hbm_bandwidth=1.5x"]):
        alone = Bill(device(f"h200 {text}")).totals()
        assert {name: float(values[at]) for name, values in many.items()} == pytest.approx(
            {name: float(value) for name, value in alone.items()}
        )


def test_margin_is_explicit_and_what_matters_is_ranked():
    h200 = device("h200")
    prices = [float(Bill(h200, None, None, kind).unit_usd()) for kind in ("internal", "cost-plus", "vendor-price")]
    assert prices == sorted(prices)
    assert float(Bill(h200, None, {"margin": 0.0}).unit_usd()) == pytest.approx(prices[0])
    moved = [abs(high - low) for _, low, high in matters(h200, "usd_per_hour")]
    assert moved == sorted(moved, reverse=True)
    with pytest.raises(InputError, match="no assumption 'margins'; did you mean 'margin'"):
        Bill(h200, None, {"margins": 0.5})


def test_a_die_that_is_not_known_is_guessed_and_says_so():
    assert die_of(device("mi300x")).source.startswith("guessed")
    assert Bill(device("mi300x")).totals()["unit_usd"] > 0
