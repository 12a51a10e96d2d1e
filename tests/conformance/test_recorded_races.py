"""Races and checks recorded on the H200: figures that notes and README state are those of the recordings."""

import gzip
import importlib.util
import json
import math
import statistics
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("triton")

from ridgeline.bench.race import Row, paired

FOLDER = Path(__file__).resolve().parents[2] / "data" / "recordings" / "h200"


def recorded(name):
    return json.loads(gzip.decompress((FOLDER / name).read_bytes()))


def geometric_mean(ratios):
    return math.exp(statistics.fmean(map(math.log, ratios)))


@pytest.mark.parametrize(("phase", "stated"), [("fwd", 1.30), ("bwd", 1.65)])
def test_kernels_are_as_fast_as_the_note_says(phase, stated):
    rows = [Row(**row) for row in recorded("kernels_race2.json.gz")["race"]]
    ratios = [best.median_s / ours.median_s for ours, best in paired(rows) if ours.phase == phase]
    assert len(ratios) == 33
    assert geometric_mean(ratios) == pytest.approx(stated, abs=0.005)


def test_every_recorded_check_of_the_kernels_was_right_and_every_wrong_kernel_rejected():
    found = recorded("kernels_race2.json.gz")
    checks = [check for check in found["check"] if "ok" in check]  # the others name functions that time ran out for
    assert len(checks) == 2166 and all(check["ok"] for check in checks)
    assert len(found["mistakes"]) == 24 and all(mistake["ok"] for mistake in found["mistakes"])


@pytest.mark.parametrize(("phase", "stated"), [("fwd", 1.09), ("bwd", 0.87)])
def test_attention_is_as_fast_as_the_note_says(phase, stated):
    rows = json.loads((FOLDER / "attention_race.json").read_text())["rows"]
    tflops = {(row["case"], row["contender"]): row["tflops"] for row in rows if row["phase"] == phase}
    cases = {case for case, _ in tflops}
    assert len(cases) == 4
    ratios = [tflops[case, "ridgeline"] / tflops[case, "cudnn"] for case in cases]
    assert geometric_mean(ratios) == pytest.approx(stated, abs=0.005)


def figures(recording, name, phase, **sizes):
    """{contender: row} of the one recorded case that has these sizes."""
    rows = [Row(**row) for row in recorded(recording)["race"]]
    wanted = [f"{key}={value}" for key, value in sizes.items()]
    found = {
        row.contender: row
        for row in rows
        if row.primitive == name and row.phase == phase and all(word in row.sizes.split() for word in wanted)
    }
    assert set(found) >= {"ridgeline", "eager"}
    return found


@pytest.mark.parametrize(
    ("name", "phase", "sizes", "stated"),
    [
        ("adamw", "fwd", {"list": "gpt2", "max_norm": -1.0}, 1.18),
        ("adamw", "fwd", {"list": "llama1b", "max_norm": 1.0}, 2.02),
        ("embedding_bags_update", "step", {"optimizer": "sgd"}, 4.8),
        ("embedding_bag", "bwd", {"batch": 65536}, 0.99),
        ("cross_layer", "fwd", {"dim": 512}, 1.30),
    ],
)
def test_lists_and_tables_are_as_fast_as_their_note_says(name, phase, sizes, stated):
    found = figures("lists_race1.json.gz", name, phase, **sizes)
    assert found["eager"].median_s / found["ridgeline"].median_s == pytest.approx(stated, abs=0.006)


def test_adamw_reaches_the_share_of_the_copy_bandwidth_that_is_stated():
    copy = recorded("lists_race1.json.gz")["copy_bytes_per_s"]
    row = figures("lists_race1.json.gz", "adamw", "fwd", list="gpt2", max_norm=-1.0)["ridgeline"]
    assert row.bytes_per_s / copy == pytest.approx(0.95, abs=0.005)


def test_every_recorded_check_of_lists_and_tables_was_right():
    found = recorded("lists_race1.json.gz")
    assert all(check["ok"] for check in found["check"] if "ok" in check) and all(m["ok"] for m in found["mistakes"])
    assert all("WRONG" not in str(entry["outcome"]) for entry in found["special"]) and len(found["special"]) == 8


@pytest.mark.parametrize(("phase", "num", "stated"), [("fwd", 44, 2.06), ("bwd", 38, 1.81), ("call", 14, 1.96)])
def test_kernels_of_rows_are_as_fast_as_their_note_says(phase, num, stated):
    rows = [Row(**row) for row in recorded("kernels_race3.json.gz")["race"]]
    ratios = [best.median_s / ours.median_s for ours, best in paired(rows) if ours.phase == phase]
    assert len(ratios) == num
    assert geometric_mean(ratios) == pytest.approx(stated, abs=0.005)


def test_a_recorded_call_never_took_longer_than_eager():
    rows = [Row(**row) for row in recorded("kernels_race3.json.gz")["race"] if row["phase"] == "call"]
    assert all(best.median_s > ours.median_s for ours, best in paired(rows))


def test_recorded_calls_took_the_host_less_than_pytorchs_with_and_without_a_gradient():
    host = {entry["what"]: entry["host_s"] for entry in recorded("kernels_race3.json.gz")["host"]}
    for ours, theirs in (("rms_norm", "F.rms_norm"), ("layer_norm", "F.layer_norm"), ("softmax", "torch.softmax")):
        assert host[ours] < 9e-6 and host[ours] < host[theirs]
        assert host[f"{ours} with gradient"] < host[f"{theirs} with gradient"]


def test_recorded_linear_cross_entropy_takes_a_quarter_of_the_memory_and_no_more_time():
    found = {}
    for entry in recorded("kernels_race3.json.gz")["memory"]:
        if entry["cols"] == 128256:
            found.setdefault(entry["who"], {}).update(entry)
    ours, theirs = found["ridgeline"], found["eager"]
    assert ours["above_inputs_bytes"] <= 0.25 * theirs["above_inputs_bytes"]
    assert statistics.median(ours["s"]) <= statistics.median(theirs["s"])


@pytest.mark.parametrize(
    ("part", "ours", "phase", "word", "stated"),
    [
        ("forward", "ridgeline", "fwd", "d=128 causal=True", 1.08),
        ("forward", "ridgeline", "fwd", "d=128 causal=False", 1.00),
        ("backward", "two kernels", "bwd", "", 0.90),
        ("backward", "fused", "bwd", "causal=False", 1.00),
        ("encoders", "ridgeline", "fwd", "", 0.87),
        ("encoders", "ridgeline", "bwd", "", 0.93),
    ],
)
def test_the_second_attention_race_is_as_the_note_says(part, ours, phase, word, stated):
    assert geometric_mean(against_cudnn("attention_race2.json.gz", part, ours, phase, word)) == pytest.approx(
        stated, abs=0.006
    )


def against_cudnn(name, part, ours, phase, word):
    """Our rate over cuDNN's, case by case, of a recorded attention race."""
    rates = {}
    for row in recorded(name)["parts"][part]:
        case = row.get("case") or f"rows={row.get('rows')} causal={row.get('causal')}"
        if row.get("phase") == phase and "tflops" in row and word in case:
            rates.setdefault(case, {})[row["contender"]] = row["tflops"]
    ratios = [of[ours] / of["CUDNN_ATTENTION"] for of in rates.values() if "CUDNN_ATTENTION" in of]
    assert ratios
    return ratios


@pytest.mark.parametrize(
    ("part", "ours", "phase", "word", "stated"),
    [
        ("forward", "ridgeline", "fwd", "d=128 causal=True", 1.10),
        ("forward", "ridgeline", "fwd", "d=128 causal=False", 1.01),
        ("forward", "ridgeline", "fwd", "d=64", 0.99),
        ("backward", "two kernels", "bwd", "causal=True", 0.986),
        ("backward", "two kernels", "bwd", "causal=False", 0.941),
        ("backward", "two kernels", "bwd", "", 0.967),
        ("backward", "fused", "bwd", "causal=False", 1.00),
        ("encoders", "ridgeline", "fwd", "", 0.96),
        ("encoders", "ridgeline", "bwd", "", 1.07),
    ],
)
def test_the_third_attention_race_is_as_the_note_says(part, ours, phase, word, stated):
    assert geometric_mean(against_cudnn("attention_race3.json.gz", part, ours, phase, word)) == pytest.approx(
        stated, abs=0.006
    )


def test_everything_checked_in_the_third_attention_race_was_right():
    parts = recorded("attention_race3.json.gz")["parts"]
    checks = [row for rows in parts.values() for row in rows if "ok" in row]
    assert len([row for row in parts["checks"] if "ok" in row]) == 174 and all(row["ok"] for row in checks)


def test_latent_blocks_and_wide_heads_are_as_the_fourth_race_says():
    parts = recorded("attention_race4.json.gz")["parts"]
    checks = [row for rows in parts.values() for row in rows if "ok" in row]
    assert len([row for row in parts["checks"] if "ok" in row]) == 176 and all(row["ok"] for row in checks)
    took = {}
    for row in parts["latent"]:
        if "median_s" in row:
            took.setdefault(row["case"], {})[row["contender"]] = row["median_s"]
    gains = [min(s for who, s in of.items() if who not in ("default", "eager")) / of["default"] for of in took.values()]
    assert (
        len(gains) == 5 and min(gains) == pytest.approx(1.29, abs=0.02) and max(gains) == pytest.approx(2.14, abs=0.02)
    )
    assert against_cudnn("attention_race4.json.gz", "variants", "ridgeline", "fwd", "192")[0] == pytest.approx(
        1.13, abs=0.006
    )


def test_a_bare_read_of_a_small_cache_stays_below_85_percent_of_a_copy():
    rows = [row for row in recorded("attention_race3.json.gz")["parts"]["reading"] if row.get("case") == "67108864"]
    copied = max(
        row["bytes_per_s"]
        for row in recorded("attention_race3.json.gz")["parts"]["reading"]
        if row.get("what") == "copy"
    )
    assert {row["lines"] for row in rows} == {"dirty", "clean"}
    assert all(row["bytes_per_s"] < 0.8 * copied for row in rows)


def decoding(name, part, contender, lines):
    """Microseconds of a configuration of paged or latent decoding, by case."""
    return {
        row["case"]: row["median_s"] * 1e6
        for row in recorded(name)["parts"][part]
        if row.get("contender") == contender and row.get("lines") == lines
    }


def test_every_way_to_cut_and_read_a_paged_cache_was_right_in_the_fifth_attention_race():
    parts = recorded("attention_race5.json.gz")["parts"]
    checks = [row for rows in parts.values() for row in rows if "ok" in row]
    assert len(checks) == 257 and all(row["ok"] for row in checks)
    assert "illegal instruction" in parts["leaving"][1]["note"], "a policy on threads' own copies"


def test_the_copy_engine_reads_a_paged_cache_faster_and_what_leaves_the_l2_first_even_more():
    case = "(1, 32, 8, 32768, 16, False)"
    ways = {"threads": "(2, 64, 4, 4, 2, False)", "stays": "(2, 64, 4, 3, 2, False, True)",
            "leaves": "(2, 64, 4, 3, 2, True, True)"}  # fmt: skip
    took = {
        (way, lines): decoding("attention_race5.json.gz", "fed", contender, lines)[case]
        for way, contender in ways.items()
        for lines in ("dirty", "clean")
    }
    assert took["threads", "dirty"] > took["stays", "dirty"] > took["leaves", "dirty"] == pytest.approx(46.7, abs=0.1)
    assert took["threads", "clean"] > took["stays", "clean"] > took["leaves", "clean"] == pytest.approx(41.6, abs=0.1)


def test_what_was_checked_of_attention_was_right_but_for_one_case_that_is_named():
    checks = [row for row in recorded("attention_race2.json.gz")["parts"]["checks"] if "ok" in row]
    wrong = [row["case"] for row in checks if not row["ok"]]
    assert len(checks) == 537 and wrong == ["float32 b=2 h=6 k=2 s=300 d=80 page=32 uneven=True"]


def test_kernels_as_they_are_now_were_right_on_the_device():
    checks = recorded("kernels_check5.json.gz")["check"]
    found = {name: [c for c in checks if c.get("primitive") == name and "ok" in c] for name in CHECKED}
    assert {name: len(rows) for name, rows in found.items()} == CHECKED
    assert all(row["ok"] for rows in found.values() for row in rows)
    products = [row for row in recorded("decode_checks2.json.gz") if row["what"] == "check"]
    assert len(products) == 172 and all(row["ok"] for row in products)


CHECKED = {
    "cross_entropy": 80, "dropout_add": 54, "rms_norm_quant": 24, "layer_norm_quant": 24, "softmax": 88,
    "embedding_bags_update": 6,
}  # fmt: skip


@pytest.mark.parametrize(("phase", "stated"), [("fwd", 1.40), ("bwd", 1.91)])
def test_the_sixth_race_is_as_its_note_says(phase, stated):
    rows = [Row(**row) for row in recorded("kernels_race6.json.gz")["race"]]
    ratios = [best.median_s / ours.median_s for ours, best in paired(rows) if ours.phase == phase]
    assert len(ratios) == 27
    assert geometric_mean(ratios) == pytest.approx(stated, abs=0.005)


@pytest.mark.parametrize("cols", [32768, 65536, 131072, 262144])
def test_long_softmax_rows_were_read_once(cols):
    found = recorded("kernels_race6.json.gz")
    row = figures("kernels_race6.json.gz", "softmax", "bwd", cols=cols)["ridgeline"]
    assert row.bytes_per_s / found["copy_bytes_per_s"] > 0.95


def test_every_check_of_the_sixth_run_was_right_and_every_wrong_kernel_rejected():
    found = recorded("kernels_race6.json.gz")
    assert len(found["check"]) == 1218 and all(check["ok"] for check in found["check"])
    assert len(found["mistakes"]) == 20 and all(mistake["ok"] for mistake in found["mistakes"])


def test_the_profiler_and_the_race_agree_but_for_launches_and_events():
    found = recorded("kernels_race6.json.gz")
    inside = {
        (entry["primitive"], entry["case"].partition(" ")[2], entry["phase"]): sum(entry["kernels_s"].values())
        for entry in found["split"]
    }
    rows = [Row(**row) for row in found["race"] if row["contender"] == "ridgeline" and row["phase"] != "call"]
    gaps = [row.median_s - inside[row.primitive, row.sizes, row.phase] for row in rows]
    assert len(gaps) == 54 and 2e-6 < statistics.median(gaps) < 4e-6


@pytest.mark.parametrize(
    ("name", "phase", "sizes", "stated"),
    [
        ("softmax", "fwd", {"cols": 65536}, 0.84),
        ("softmax", "bwd", {"cols": 262144}, 0.97),
        ("adamw_8bit", "fwd", {"list": "gpt2"}, 0.92),
        ("quantize", "fwd", {"cols": 14336}, 0.95),
        ("layer_norm_quant", "fwd", {"cols": 768}, 0.70),
    ],
)
def test_the_seventh_race_reached_the_stated_share_of_the_copy(name, phase, sizes, stated):
    copy = recorded("kernels_race7.json.gz")["copy_bytes_per_s"]
    row = figures("kernels_race7.json.gz", name, phase, **sizes)["ridgeline"]
    assert row.bytes_per_s / copy == pytest.approx(stated, abs=0.006)


def test_the_one_wrong_check_of_the_seventh_run_is_the_one_its_note_names():
    found = recorded("kernels_race7.json.gz")
    wrong = [(check["primitive"], check["case"]) for check in found["check"] if not check.get("ok", True)]
    assert wrong == [("rms_norm", "float32 rows=300 cols=24576")]
    assert len(found["mistakes"]) == 23 and all(mistake["ok"] for mistake in found["mistakes"])
    assert all("WRONG" not in entry["outcome"] for entry in found["special"]) and len(found["special"]) == 2


def test_a_bare_copy_of_134_megabytes_reaches_four_fifths_of_the_copy_of_a_gigabyte():
    found = recorded("kernels_race8.json.gz")
    shares = {
        round(entry["moved_bytes"] / 1e6): entry["moved_bytes"] / entry["s"] / found["copy_bytes_per_s"]
        for entry in found["floor"]
    }
    assert shares[67] == pytest.approx(0.65, abs=0.006) and shares[134] == pytest.approx(0.81, abs=0.006)
    assert shares[268] == pytest.approx(0.90, abs=0.006) and shares[537] == pytest.approx(0.97, abs=0.006)


@pytest.mark.parametrize(
    ("name", "phase", "sizes", "stated"),
    [
        ("cross_entropy", "fwd", {"cols": 50257, "rows": 8192}, 0.94),
        ("cross_entropy", "bwd", {"cols": 50257, "rows": 8192}, 0.90),
        ("cross_entropy", "fwd", {"cols": 1000}, 0.68),
        ("group_norm", "fwd", {"batch": 4, "channels": 512}, 0.74),
    ],
)
def test_the_eighth_race_reached_the_stated_share_of_the_copy(name, phase, sizes, stated):
    copy = recorded("kernels_race8.json.gz")["copy_bytes_per_s"]
    row = figures("kernels_race8.json.gz", name, phase, **sizes)["ridgeline"]
    assert row.bytes_per_s / copy == pytest.approx(stated, abs=0.006)


def test_torch_compile_took_part_in_the_eighth_race_and_won_only_what_the_log_says():
    rows = [Row(**row) for row in recorded("kernels_race8.json.gz")["compiled"] if row["median_s"]]
    cases = {(row.primitive, row.sizes, row.phase): {} for row in rows}
    for row in rows:
        cases[row.primitive, row.sizes, row.phase][row.contender] = row.median_s
    lost = {name: found for name, found in cases.items() if found["compiled"] < 0.995 * found["ridgeline"]}
    assert len(cases) == 17
    assert {(name, phase) for name, _, phase in lost} == {("softmax", "bwd"), ("swiglu", "fwd"), ("swiglu", "bwd")}


def ninth():
    entries = recorded("kernels_race9.json.gz")["race"]
    return [Row(**{key: math.nan if value is None else value for key, value in row.items()}) for row in entries]


@pytest.mark.parametrize(("phase", "number", "stated"), [("fwd", 70, 2.62), ("bwd", 58, 1.88), ("call", 16, 1.98)])
def test_the_ninth_race_is_as_its_note_says(phase, number, stated):
    ratios = [best.median_s / ours.median_s for ours, best in paired(ninth()) if ours.phase == phase]
    assert len(ratios) == number
    assert geometric_mean(ratios) == pytest.approx(stated, abs=0.006)


@pytest.mark.parametrize(
    ("name", "phase", "sizes", "stated"),
    [
        ("cross_entropy", "fwd", "rows=8192 cols=50257", 0.94),
        ("cross_entropy", "bwd", "rows=262144 cols=256", 0.91),
        ("rms_norm", "bwd", "rows=32768 cols=4099", 0.90),
        ("rms_norm", "bwd", "rows=65536 cols=2048", 0.94),
        ("layer_norm", "fwd", "rows=32768 cols=4099", 0.57),
        ("softmax", "fwd", "rows=8192 cols=20000", 0.94),
        ("softmax", "fwd", "rows=512 cols=262144", 0.84),
        ("softmax", "bwd", "rows=4096 cols=50257", 0.83),
    ],
)
def test_the_ninth_race_reached_the_stated_share_of_the_copy(name, phase, sizes, stated):
    (row,) = [
        row
        for row in ninth()
        if (row.primitive, row.phase, row.sizes, row.contender) == (name, phase, sizes, "ridgeline")
        and row.dtype == "bfloat16"
    ]
    copy = recorded("kernels_race9.json.gz")["copy_bytes_per_s"]
    assert row.bytes_per_s / copy == pytest.approx(stated, abs=0.006)


def heads_over_the_best_rival(name):
    """Ours over the best rival's speed by case and phase, of attention raced by head dim."""
    races = [row for row in recorded(name) if "median_s" in row and row["case"].count(",") == 5]
    found = {}
    for row in races:
        found.setdefault((row["case"], row["phase"]), {})[row["contender"]] = row["tflops"]
    return {of: by["ridgeline"] / max(by["CUDNN_ATTENTION"], by["FLASH_ATTENTION"]) for of, by in found.items()}


def test_attention_by_head_dim_lost_where_the_note_says_and_was_right_everywhere():
    checks = [row for row in recorded("heads1.json.gz") if "ok" in row]
    assert len(checks) == 22 and all(row["ok"] for row in checks)
    found = heads_over_the_best_rival("heads1.json.gz")
    assert len(found) == 22
    lost = {case for (case, phase), ratio in found.items() if phase == "fwd" and ratio < 1.0}
    assert lost == {"(4, 32, 8, 4096, 192, True)", "(2, 16, 16, 3000, 192, False)"}
    assert min(ratio for (_, phase), ratio in found.items() if phase == "bwd") > 0.91


def test_heads_of_192_are_as_fast_as_cudnn_in_128_and_64_columns():
    checks = [row for row in recorded("heads2.json.gz") if "ok" in row]
    assert len(checks) == 10 and all(row["ok"] for row in checks)
    found = heads_over_the_best_rival("heads2.json.gz")
    assert len(found) == 4 and min(found.values()) > 0.975


def test_no_call_took_the_host_longer_than_pytorchs_and_repeated_ones_gave_the_same_bits():
    rows = recorded("host_calls1.json.gz")["rows"]
    assert len(rows) == 12 and all(row["ok"] and row["has_direct"] for row in rows)
    for row in rows:
        assert row["repeated_s"][1] < row["python_s"][1]
        assert row["pytorch_s"] is None or row["repeated_s"][1] < row["pytorch_s"][1], row["call"]
    small = {row["call"]: row["repeated_s"][1] for row in rows if "gradient" not in row["call"]}
    assert max(value for call, value in small.items() if "latent" not in call) < 9.9e-6


def test_where_a_backward_passes_time_goes_is_what_the_note_says():
    """A pass that reads two tensors and writes one is as fast as a copy; the last sums take 2 to 6 µs of every pass."""
    rows = recorded("norm_parts1.json.gz")["rows"]
    assert len(rows) == 20
    for row in rows:
        took = row["s"]
        assert took["bare"] < 1.01 * took["walked"] < 1.01 * took["full"]
        assert 0.93 < took["add"] / took["copy"] < 1.05
        assert 1.9e-6 < took["full"] - took["walked"] < 5.6e-6


def random_race(seed):
    path = FOLDER.parents[2] / "benchmarks" / "race_random.py"
    if not path.exists():
        pytest.skip("benchmarks are not here")
    spec = importlib.util.spec_from_file_location("race_random", path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    found = recorded(f"rows_random{seed}.json.gz")
    return found, {(row["primitive"], row["phase"]): row for row in made.shares(found)}


@pytest.mark.parametrize(
    ("seed", "name", "phase", "large", "reach", "as_large", "over_best"),
    [(1, "layer_norm", "bwd", 26, 2, 4, 1.70), (2, "layer_norm", "bwd", 27, 1, 8, 1.81),
     (1, "rms_norm", "fwd", 21, 11, 20, 1.12), (2, "rms_norm", "bwd", 23, 6, 9, 2.13),
     (2, "softmax", "fwd", 23, 9, 17, 1.81), (2, "layer_norm", "fwd", 24, 7, 20, 1.36),
     (3, "layer_norm", "bwd", 27, 6, 12, 2.20), (3, "rms_norm", "bwd", 23, 10, 18, 2.07),
     (4, "layer_norm", "bwd", 26, 3, 13, 2.10), (4, "rms_norm", "bwd", 23, 6, 16, 2.145),
     (4, "softmax", "fwd", 29, 10, 24, 2.21), (4, "softmax", "bwd", 29, 23, 29, 2.225)],
)  # fmt: skip
def test_random_shapes_of_row_kernels_stand_as_the_note_says(seed, name, phase, large, reach, as_large, over_best):
    found, told = random_race(seed)
    row = told[name, phase]
    assert not found["wrong"] and len(found["errors"]) == (26 if seed == 3 else 0), "no time was left for 26 shapes"
    assert (row["large"], row["reach"], row["reach_as_large"]) == (large, reach, as_large)
    assert row["over_best"] == pytest.approx(over_best, abs=0.005)


@pytest.mark.parametrize(
    ("kernel", "case", "before", "now"),
    [("layer_norm.backward", "bfloat16 rows=8192 cols=12289", 591, 200),
     ("rms_norm.backward", "bfloat16 rows=8192 cols=12289", 356, 193),
     ("layer_norm.backward", "bfloat16 rows=16384 cols=5120", 156, 132),
     ("layer_norm.forward", "bfloat16 rows=65536 cols=1536", 115, 98),
     ("rms_norm.backward", "float32 rows=4096 cols=12288", 322, 156),
     ("layer_norm.backward", "bfloat16 rows=16384 cols=5003", 170, 137),
     ("rms_norm.backward", "float16 rows=65536 cols=642", 108, 80),
     ("layer_norm.backward", "float32 rows=3332 cols=10234", 173, 127),
     ("rms_norm.backward", "float32 rows=4531 cols=14336", 382, 221),
     ("rms_norm.backward", "bfloat16 rows=16384 cols=7001", 193, 186),
     ("softmax.forward", "bfloat16 rows=65536 cols=1232", 101, 79)],
)  # fmt: skip
def test_configurations_of_the_last_sweeps_took_what_the_note_says(kernel, case, before, now):
    sweeps = [recorded(f"rows_sweep{i}.json.gz")["rows"] for i in (11, 12, 13, 14)]
    rows = [
        row for sweep in sweeps for row in sweep if (row["kernel"], row["case"]) == (kernel, case) and row["config"]
    ]
    assert not any(row["wrong"] for row in rows)
    took = sorted(1e6 * row["s"] for row in rows)
    assert took[0] == pytest.approx(now, abs=1.0) and any(abs(each - before) < 1.0 for each in took)


@pytest.mark.parametrize(
    ("name", "phase", "num", "stated"),
    [("softmax", "fwd", 3, 1.14), ("softmax", "bwd", 3, 0.98), ("swiglu", "fwd", 2, 1.00), ("swiglu", "bwd", 2, 0.99),
     ("cross_entropy", "fwd", 2, 2.48), ("cross_entropy", "bwd", 2, 1.13), ("rms_norm", "fwd", 2, 0.92),
     ("rms_norm", "bwd", 2, 1.53), ("layer_norm", "fwd", 2, 1.05), ("layer_norm", "bwd", 2, 1.26)],
)  # fmt: skip
def test_kernels_stand_beside_max_autotune_as_the_note_says(name, phase, num, stated):
    rows = [Row(**row) for row in recorded("rows_compiled4.json.gz")["race"]]
    assert {"compiled", "eager", "liger"} <= {row.contender for row in rows}
    mine = [(ours, best) for ours, best in paired(rows) if (ours.primitive, ours.phase) == (name, phase)]
    ratios = [best.median_s / ours.median_s for ours, best in mine]
    assert len(ratios) == num and geometric_mean(ratios) == pytest.approx(stated, abs=0.005)


@cache
def families_race(name):
    path = FOLDER.parents[2] / "benchmarks" / "race_families.py"
    if not path.exists():
        pytest.skip("benchmarks are not here")
    spec = importlib.util.spec_from_file_location("race_families", path)
    made = sys.modules["race_families"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    found = recorded(f"{name}.json.gz")
    return found, {(row["family"], row["phase"]): row for row in made.shares(found)}


@pytest.mark.parametrize(
    ("which", "family", "phase", "num", "over_best", "lost"),
    [("random1", "embedding_bag", "fwd", 5, 1.19, 2), ("random1", "linear_cross_entropy", "step", 5, 0.90, 4),
     ("random1", "attention", "fwd", 5, 1.06, 0), ("random1", "attention", "bwd", 5, 0.92, 4),
     ("random1", "dot_interaction", "bwd", 5, 20.03, 0), ("random1", "qk_norm_rope", "bwd", 5, 12.91, 0),
     ("again1", "linear_cross_entropy", "step", 7, 1.61, 2), ("again1", "embedding_bag", "fwd", 7, 2.09, 1),
     ("again1", "group_norm_silu", "bwd", 7, 2.39, 0), ("again1", "relu2", "bwd", 7, 2.99, 0),
     ("random2", "embedding_bag", "bwd", 8, 1.62, 0), ("random2", "varlen_attention", "fwd", 7, 1.06, 2),
     ("random2", "attention", "fwd", 8, 1.08, 0), ("random2", "attention", "bwd", 8, 0.94, 7),
     ("random2", "linear_cross_entropy", "step", 8, 1.80, 0), ("random2", "cross_layer", "bwd", 8, 1.37, 1),
     ("random2", "swiglu", "bwd", 8, 1.82, 0), ("random2", "dropout_add", "call step", 4, 1.20, 0)],
)  # fmt: skip
def test_random_shapes_of_other_families_stand_as_the_note_says(which, family, phase, num, over_best, lost):
    found, told = families_race(f"families_{which}")
    row = told[family, phase]
    assert not found["wrong"] and {error["error"] for error in found["errors"]} <= {"no time left"}
    assert (row["num"], row["lost"]) == (num, lost)
    assert row["over_best"] == pytest.approx(over_best, abs=0.005)


@pytest.mark.parametrize(
    ("kernel", "case", "before", "now"),
    [("group_norm.flat", "bfloat16 batch=128 channels=2048 side=7 groups=32", 184.1, 25.5),
     ("group_norm.tile", "bfloat16 batch=128 channels=1024 side=14 groups=32", 170.9, 75.4),
     ("group_norm.streamed", "float32 batch=64 channels=640 side=16 groups=32", 33.2, 26.1),
     ("softmax.forward", "bfloat16 rows=65536 cols=1232", 99.0, 79.2),
     ("softmax.forward", "float32 rows=65536 cols=177", 43.6, 29.5)],
)  # fmt: skip
def test_short_groups_and_rows_took_what_the_note_says(kernel, case, before, now):
    rows = [row for row in recorded("blocks_sweep3.json.gz")["rows"] if (row["kernel"], row["case"]) == (kernel, case)]
    assert not any(row["wrong"] for row in rows)
    took = [1e6 * row["s"] for row in rows if row["config"] is not None]
    assert min(took) == pytest.approx(now, abs=0.06) and any(abs(each - before) < 0.06 for each in took)


@pytest.mark.parametrize(
    ("kernel", "case", "before", "now"),
    [("embedding_bag.order", "rows=165772 dim=128 length=1", 97.5, 63.9),
     ("embedding_bag.order", "rows=474085 dim=48 length=8", 116.0, 67.6),
     ("group_norm.backward_streamed", "float16 batch=512 channels=128 side=20 groups=32", 85.3, 50.7),
     ("group_norm.backward_streamed", "bfloat16 batch=197 channels=128 side=36 groups=8", 127.6, 79.2),
     ("cross_entropy.forward", "bfloat16 rows=25054 cols=3191", 75.2, 61.5),
     ("cross_entropy.forward", "float32 rows=16384 cols=3191", 74.3, 62.0)],
)  # fmt: skip
def test_orders_pieces_and_odd_losses_took_what_the_note_says(kernel, case, before, now):
    rows = [row for row in recorded("blocks_sweep4.json.gz")["rows"] if row["kernel"] == kernel and case in row["case"]]
    assert not any(row["wrong"] for row in rows)
    took = [1e6 * row["s"] for row in rows if row["config"] is not None and "bare" not in row["config"]]
    assert min(took) == pytest.approx(now, abs=0.06) and any(abs(each - before) < 0.06 for each in took)


@pytest.mark.parametrize(
    ("phase", "case", "config", "took_us", "times"),
    [("fwd", "float16 tables=1 batch=381 rows=4334", (1, 16, 4, True), 14.8, 1.23),
     ("fwd", "float32 tables=1 batch=2834 rows=25786", (1, 16, 1, True), 9.6, 2.36),
     ("fwd", "bfloat16 tables=1 batch=370 rows=1922", (1, 8, 4, True), 11.0, 1.30),
     ("fwd", "float32 tables=1 batch=1091 rows=45936", (1, 16, 1, True), 7.1, 2.18),
     ("fwd", "bfloat16 tables=1 batch=256 rows=60000", (1, 32, 8, True), 23.1, 2.45),
     ("bwd", "batch=6970 rows=4314 dim=64 length=50 mode=sum index=int32", (512, 7, 16, 4, 2), 88.5, 1.72),
     ("bwd", "float32 tables=1 batch=61582 rows=4484", (512, 7, 16, 4, 8), 54.2, 2.82),
     ("bwd", "float16 tables=1 batch=65536 rows=2000", (512, 6, 16, 4, 4), 230.7, 1.79),
     ("bwd", "float16 rows=3906 cols=17731", None, 72.7, 1.17), ("bwd", "float16 rows=245 cols=1948", None, 4.4, 1.07),
     ("fwd", "bfloat16 batch=8192 dim=845", None, 65.9, 2.38), ("fwd", "float32 list=four small", None, 8.9, 1.06),
     ("fwd", "float16 batch=65536 dim=429", None, 173.9, 2.14),
     ("step", "bfloat16 rows=1578 cols=50280 hidden=4096", None, 2869.8, 1.07)],
)  # fmt: skip
def test_long_bags_orders_and_odd_ends_took_what_the_note_says(phase, case, config, took_us, times):
    rows = [row for row in recorded("tables_sweep1.json.gz")["rows"] if row["phase"] == phase and case in row["case"]]
    assert rows and not any(row["wrong"] for row in rows)
    mine = [row for row in rows if row["config"] == config or (config and row["config"] not in (None, "eager")
            and tuple(row["config"].values()) == config)]  # fmt: skip
    eager = next(row["s"] for row in rows if row["config"] == "eager")
    assert 1e6 * mine[0]["s"] == pytest.approx(took_us, abs=0.06)
    assert eager / mine[0]["s"] == pytest.approx(times, abs=0.01)


@cache
def real_race(seed):
    folder = FOLDER.parents[2] / "benchmarks"
    if not (folder / "real_rows.py").exists():
        pytest.skip("benchmarks are not here")
    for name in ("race_families", "real_rows"):
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        made = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
    found = recorded(f"rows_real{seed}.json.gz")
    return found, list(made.standings(found))


@pytest.mark.parametrize(
    ("seed", "phase", "num", "large", "possible", "reach", "as_large"),
    [(1, "fwd", 182, 109, 63, 53, 96), (1, "bwd", 126, 79, 68, 57, 68), (2, "fwd", 169, 89, 55, 49, 77),
     (2, "bwd", 117, 68, 55, 47, 57)],
)  # fmt: skip
def test_shapes_of_models_reach_the_figures_as_the_note_says(seed, phase, num, large, possible, reach, as_large):
    found, told = real_race(seed)
    rows = [row for row in told if row["phase"] == phase]
    assert not found["wrong"] and not found["errors"]
    sums = [sum(row[key] for row in rows) for key in ("num", "large", "possible", "reach", "reach_as_large")]
    assert sums == [num, large, possible, reach, as_large]


@pytest.mark.parametrize(("phase", "num", "stated", "lost"), [("fwd", 126, 1.39, 15), ("bwd", 126, 1.64, 6)])
def test_shapes_of_models_stand_beside_eager_and_liger_as_the_note_says(phase, num, stated, lost):
    _, told = real_race(1)
    others = ("rms_norm_quant", "layer_norm_quant", "quantize", "adamw")
    ratios = [ratio for row in told if row["phase"] == phase and row["family"] not in others for ratio in row["beside"]]
    assert len(ratios) == num and sum(ratio < 1.0 for ratio in ratios) == lost
    assert geometric_mean(ratios) == pytest.approx(stated, abs=0.005)


@pytest.mark.parametrize(
    ("which", "kernel", "case", "before", "now"),
    [(21, "rms_norm.forward", "bfloat16 rows=4854 cols=18432", 118, 88),
     (21, "layer_norm.forward", "bfloat16 rows=4096 cols=18432", 124, 81),
     (21, "layer_norm.backward", "float16 rows=1088 cols=18432", 61, 47),
     (20, "layer_norm.backward", "bfloat16 rows=4096 cols=16384", 242, 144),
     (20, "layer_norm.backward", "bfloat16 rows=2048 cols=18432", 201, 89),
     (21, "rms_norm.forward", "float16 rows=65536 cols=1152", 82.5, 74.4),
     (20, "layer_norm_quant", "bfloat16 rows=4096 cols=8192 kind=float8_e4m3fn block=128", 44.4, 32.8),
     (20, "layer_norm_quant", "bfloat16 rows=24000 cols=3584 kind=int8 block=0", 79.4, 73.1),
     (21, "layer_norm_quant", "float32 rows=16384 cols=1280 kind=float8_e4m3fn block=128", 42.9, 33.3)],
)  # fmt: skip
def test_configurations_for_rows_of_models_took_what_the_note_says(which, kernel, case, before, now):
    found = recorded(f"rows_sweep{which}.json.gz")
    rows = [row for row in found["rows"] if (row["kernel"], row["case"]) == (kernel, case) and row["config"]]
    took = [1e6 * row["s"] for row in rows]
    assert not any(row["wrong"] for row in found["rows"])
    assert min(took) == pytest.approx(now, abs=0.6) and any(s == pytest.approx(before, abs=0.6) for s in took)
