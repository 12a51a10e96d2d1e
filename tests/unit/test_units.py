from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.errors import UnitError
from ridgeline.units import parse_quantity, show_bytes, show_flops, show_joules, show_ms, show_seconds, show_usd


@pytest.mark.parametrize(("text", "value"), [
    ("700", 700), ("1_000", 1000), ("-3.5", -3.5), ("2e3", 2000), (" 12 W ", 12),
    ("100MB", 1e8), ("50 MB", 5e7), ("96Mi", 96 * 2**20), ("96MiB", 96 * 2**20), ("80GiB", 80 * 2**30),
    ("4.8TB/s", 4.8e12), ("900GB/s", 9e11), ("400Gbps", 50e9), ("400Gbit/s", 50e9),
    ("989TFLOP/s", 989e12), ("989TFLOPS", 989e12), ("1.98PFLOPS", 1.98e15), ("1979TOPS", 1979e12),
    ("1980MHz", 1.98e9), ("5us", 5e-6), ("5µs", 5e-6), ("3ms", 3e-3), ("2.5kJ", 2500), ("4USD", 4),
])  # fmt: skip
def test_quantities_are_read_in_si(text: str, value: float):
    assert parse_quantity(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("text", ["", "fast", "MB", "12 parsecs", "1.2.3", "4 Gb", "nan", "inf", "--3", "1e999"])
def test_what_is_no_quantity_says_what_would_be(text: str):
    with pytest.raises(UnitError, match=r"100MB|use B, B/s"):
        parse_quantity(text)


@given(st.floats(1e-6, 1e12), st.sampled_from(["", "k", "M", "G", "Ki", "Mi", "Gi"]), st.sampled_from(["", "B", "B/s"]))
def test_a_prefix_scales_and_a_unit_does_not(number: float, prefix: str, unit: str):
    one = parse_quantity(f"1{prefix}{unit}")
    assert parse_quantity(f"{number!r}{prefix}{unit}") == pytest.approx(number * one)


def test_numbers_are_shown_with_three_digits_and_decimal_prefixes():
    assert show_bytes(16_060_522_496) == "16.1 GB"
    assert show_bytes(512) == "512 B"
    assert show_bytes(0) == "0 B"
    assert show_seconds(0.00123) == "1.23 ms"
    assert show_seconds(2.5e-6) == "2.5 µs"
    assert show_seconds(0) == "0 s"
    assert show_flops(1.23e15) == "1.23 PFLOP"
    assert show_joules(0.5) == "500 mJ"
    assert show_usd(12.345) == "$12.35"
    assert show_usd(0.00012) == "$0.00012"


@given(st.floats(1e-9, 1e15))
def test_shown_bytes_read_back_within_the_digits_shown(value: float):
    assert parse_quantity(show_bytes(value).replace(",", "")) == pytest.approx(value, rel=6e-3, abs=1e-12)


def test_milliseconds_never_have_an_exponent():
    assert [show_ms(value_s) for value_s in (3.365, 0.0693, 0.9996)] == ["3,365 ms", "69.3 ms", "1,000 ms"]
