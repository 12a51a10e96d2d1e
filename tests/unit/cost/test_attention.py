"""The attention time model: masks, waves, grouped queries, decoding and backward."""

from __future__ import annotations

import numpy as np
import pytest

from ridgeline.cost.time.attention.tiles import (
    COEFFICIENTS,
    DEFAULTS,
    LIBRARIES,
    attention_timing,
    defaults,
    library_named,
)
from ridgeline.cost.time.chip import MEMORY_BOUND, Chip, Timing, chip_of
from ridgeline.errors import CostError
from ridgeline.hardware import device


@pytest.fixture(scope="module")
def h200() -> Chip:
    return chip_of(device("h200"))


def prefill(chip: Chip, s: int = 8192, **options: object) -> Timing:
    shape = {"b": 1, "h": 32, "hkv": 8, "s": s, "skv": s, "d": 128, **options}
    return attention_timing(chip, {}, **shape)  # type: ignore[arg-type]


def test_long_causal_prefill_runs_near_the_measured_rate(h200: Chip) -> None:
    rate = 4 * 32 * 128 * 16384**2 / 2 / prefill(h200, 16384).expected_s[0]
    assert 0.55 < rate / 989.4e12 < 0.72  # FlashAttention-3 reaches 650 TFLOP/s here


def test_causal_masks_save_almost_half(h200: Chip) -> None:
    full, causal = (prefill(h200, 16384, causal=flag).expected_s[0] for flag in (False, True))
    assert 1.75 < full / causal < 2.05


def test_a_window_makes_time_linear_in_length(h200: Chip) -> None:
    short, long = (prefill(h200, s, window=1024).expected_s[0] for s in (16384, 32768))
    assert 1.8 < long / short < 2.2


def test_a_window_as_long_as_the_keys_changes_nothing_but_the_tail(h200: Chip) -> None:
    assert prefill(h200, 4096, window=4096).expected_s[0] == pytest.approx(prefill(h200, 4096).expected_s[0], rel=0.02)


def test_narrow_heads_pay_more_for_exponentials(h200: Chip) -> None:
    wide = prefill(h200, 16384, h=16, d=128).expected_s[0]
    narrow = prefill(h200, 16384, h=32, d=64).expected_s[0]
    assert narrow > 1.15 * wide


def test_decoding_streams_keys_at_dram_speed(h200: Chip) -> None:
    times = attention_timing(h200, {}, b=64, h=32, hkv=8, s=1, skv=8192, d=128, library="decode")
    kv_bytes = 64 * 8 * 8192 * 128 * 4
    assert times.bound[0] == MEMORY_BOUND
    assert 0.8 < kv_bytes / 4.8e12 / times.expected_s[0] < 0.95


def test_decoding_one_sequence_splits_its_keys(h200: Chip) -> None:
    one = attention_timing(h200, {}, b=1, h=8, hkv=1, s=1, skv=65536, d=128, library="decode").expected_s[0]
    assert one < 60e-6  # one SM alone would need more than 300 us


def test_kernels_that_split_groups_only_do_not_split_single_heads() -> None:
    l40s = chip_of(device("l40s"))
    times = attention_timing(l40s, {}, b=1, h=[1, 8], hkv=1, s=1, skv=65536, d=128, library="fa2_decode")
    single, grouped = times.expected_s
    assert single > 10 * grouped


def test_fp8_keys_halve_decoding(h200: Chip) -> None:
    shape = {"b": 64, "h": 32, "hkv": 8, "s": 1, "skv": 16384, "d": 128}
    half, full = (
        attention_timing(h200, {}, library="decode", kv_dtype=kv, **shape).expected_s[0]  # type: ignore[arg-type]
        for kv in ("fp8", "bf16")
    )
    assert 1.7 < full / half < 2.1


def test_backward_costs_two_to_four_forwards(h200: Chip) -> None:
    forward, backward = (prefill(h200, 8192, phase=phase, library="fa2").expected_s[0] for phase in ("fwd", "bwd"))
    assert 2.0 < backward / forward < 4.0


def test_queries_that_follow_a_cache_see_all_of_it(h200: Chip) -> None:
    chunk = prefill(h200, 1024, skv=16384).expected_s[0]
    alone = prefill(h200, 1024).expected_s[0]
    assert chunk > 4 * alone


def test_expected_never_beats_the_floor(h200: Chip) -> None:
    times = prefill(h200, 16384)
    assert times.expected_s[0] >= times.floor_s[0] > 0


def test_columns_broadcast_and_keep_order(h200: Chip) -> None:
    lengths = np.array([512.0, 4096.0, 128.0])
    together = attention_timing(h200, {}, b=2, h=16, hkv=4, s=lengths, skv=lengths, d=64).expected_s
    alone = [attention_timing(h200, {}, b=2, h=16, hkv=4, s=s, skv=s, d=64).expected_s[0] for s in lengths]
    assert together == pytest.approx(alone)


def test_every_default_names_every_coefficient() -> None:
    for key, coef in DEFAULTS.items():
        assert set(coef) == set(COEFFICIENTS), key


def test_defaults_prefer_the_same_manner_of_kernel() -> None:
    assert defaults("hopper", "fa3") is DEFAULTS["hopper/fa3"]
    assert defaults("turing", "decode") is DEFAULTS["ampere/decode"]
    assert all(defaults("cdna3", library) for library in LIBRARIES)


def test_unfused_attention_is_an_error_that_says_how_to_price_it() -> None:
    with pytest.raises(CostError, match="two products and softmax"):
        library_named("math")


def test_unknown_phase_is_an_error(h200: Chip) -> None:
    with pytest.raises(CostError, match="bwd"):
        prefill(h200, phase="backward")
