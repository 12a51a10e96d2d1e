"""Rows as other people write them: devices, counts, formats, metrics; and rows that nobody could read."""

from __future__ import annotations

import pytest

from ridgeline.validation.registry import PUBLISHED, check_rows
from ridgeline.validation.spelling import byte_size, catalog_name, is_no, number_format, whole_number
from ridgeline.validation.training_llm import case_of, flops_per_token, measured_s
from ridgeline.validation.verdict import Judged, Row, Unused

ROW = {"config_id": "a", "source": "somewhere", "model": "LLAMA2-7B", "layers": "32", "hidden": "4096", "heads": "32",
       "kv_heads": "32", "ffn": "11008", "vocab": "32000", "seq": "4096", "device": "H100-SXM-80GB (DGX-H100)",
       "num_devices": "8", "tp": "1", "pp": "1", "cp": "1", "ep": "1", "mbs": "1", "gbs": "128", "precision": "FP8",
       "software": "NeMo 24.07", "metric": "tokens_per_s_per_device", "value": "16934", "unit": "tokens/s/GPU",
       "optimizer_sharding": "distributed optimizer"}  # fmt: skip


def row(**columns: str) -> Row:
    return Row(2, ROW | columns)


@pytest.mark.parametrize(("text", "number"), [
    ("8192", 8192), ("8,192", 8192), ("8K", 8192), ("8192 tokens", 8192), ("~64 GPUs", 64), ("4.0", 4), ("1M", 1 << 20),
    ("4.5", None), ("many", None), ("", None), ("8 or 16", None), ("-3", None),
])  # fmt: skip
def test_a_count_is_read_as_people_write_it(text, number):
    assert whole_number(text) == number


def test_messages_are_powers_of_two_whatever_their_unit_is_called():
    assert byte_size("32 MiB") == byte_size("32MB") == byte_size("33,554,432") == 33554432
    assert byte_size("2K") == 2048
    assert byte_size("large") is None


def test_formats_that_say_two_things_are_not_guessed():
    assert number_format("bfloat16") == number_format("AMP") == "fp16"
    assert number_format("fp8,fp16,int8") is None


def test_no_is_said_in_many_ways():
    assert all(is_no(text) for text in ("no", "None (ACT_CKPT unset)", "False", "0", "n/a LoRA"))
    assert not any(is_no(text) for text in ("", "yes", "not stated", "selective"))


def test_a_device_is_found_by_its_words_or_by_the_catalog_and_never_by_an_override():
    assert catalog_name("NVIDIA H20 (96 GB)", "training_llm") == "h20"
    assert catalog_name("h20 sms=2x", "training_llm") is None
    assert catalog_name("x" * 400, "training_llm") is None


@pytest.mark.parametrize("columns", [
    {"device": "NVIDIA H100 80GB HBM3"}, {"device": "8x h100 sxm5"}, {"precision": "fp8 (E4M3)"}, {"seq": "4K"},
    {"num_devices": "8 GPUs"}, {"cp": "", "ep": ""}, {"recompute": "None"}, {"metric": "tokens/s/GPU"},
    {"software": "NVIDIA NeMo Framework 24.07"}, {"software": "nemo 24.07 container"},
])  # fmt: skip
def test_another_spelling_of_a_row_is_the_same_run(columns):
    case, other = case_of(row()), case_of(row(**columns))
    assert other == case
    assert measured_s(row(**columns), other) == measured_s(row(), case)


def test_a_step_may_be_told_in_seconds_milliseconds_sequences_or_tokens():
    case = case_of(row())
    told = [("step_time_s", "3.9", "s"), ("iteration_time_ms", "3900", "ms"), ("sequences_per_s", f"{128 / 3.9}", ""),
            ("tokens_per_s", f"{128 * 4096 / 3.9}", "tokens/s")]  # fmt: skip
    assert [measured_s(row(metric=m, value=v, unit=u), case) for m, v, u in told] == pytest.approx([3.9] * 4)


def test_nemo_counts_causal_attention_once_since_autumn_2025():
    before, since = (row(software=f"NeMo {release}", seq="65536") for release in ("25.04", "25.09"))
    half = flops_per_token(before, case_of(before)) - flops_per_token(since, case_of(since))
    assert half == pytest.approx(6.0 * 32 * 4096 * 65536)


def test_nemo_fine_tunes_on_short_documents_and_nemotron_is_not_gated():
    tuned, plain = case_of(row(model="LLAMA2-7B [SFT]")), case_of(row())
    assert tuned.config.windows == (128,)
    assert plain.config.windows == (0,)
    assert case_of(row(model="LLAMA2-7B [SFT]", software="Megatron-Bridge NeMo 26.06")).config.windows == (0,)
    assert not case_of(row(model="Nemotron-8B", ffn="16384", vocab="256000")).config.gated


def test_attention_in_eight_bits_is_read_off_the_recipe():
    sparse = {"model": "Qwen3_30B_a3B", "experts": "128", "topk": "8", "precision": "MXFP8", "device": "GB300 (NVL72)"}
    assert case_of(row(**sparse, software="Megatron-Bridge NeMo 26.06")).plan.narrow_attention
    assert not case_of(row(**sparse, software="Megatron-Bridge NeMo 26.04")).plan.narrow_attention
    assert not case_of(row()).plan.narrow_attention


def test_a_micro_batch_nobody_states_holds_no_more_tokens_than_recipes_do():
    short, long = (case_of(row(mbs="", seq=seq, gbs="512")).plan.micro_batch for seq in ("2048", "32768"))
    assert (short, long) == (4, 1)


@pytest.mark.parametrize("name", [kind.name for kind in PUBLISHED])
@pytest.mark.parametrize("cell", ["", "nan", "-1", "1e999", "a=b", "x" * 300, "0", "[]"])
def test_a_row_of_nonsense_is_set_aside_and_stops_nothing(name, cell):
    kind = next(kind for kind in PUBLISHED if kind.name == name)
    columns = dict.fromkeys({*kind.columns, *ROW}, cell)
    found = check_rows(name, [Row(2, columns), Row(3, columns | {"source": "elsewhere"})])
    assert found
    assert all(isinstance(verdict, Unused) and verdict.why for verdict in found)


def test_one_strange_row_leaves_the_others_judged():
    found = check_rows("training_llm", [row(), row(layers="0"), row(heads="7")])
    assert isinstance(found[0], Judged)
    assert len(found) == 3
    assert sum(isinstance(verdict, Unused) for verdict in found) == 2
