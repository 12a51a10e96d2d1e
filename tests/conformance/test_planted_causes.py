"""Causes planted in programs on an H200: named first or second, the gain within its interval, gone with the fix."""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from lab.planted.recordings import InjectedCase, control_programs, injected_cases, suite_folder, second_fixes
from lab.planted.score import GENERAL, NAMES, WEIGHTY_FRAC, Score, found_in, score
from ridgeline.errors import InputError
from ridgeline.findings.context.context import TraceContext
from ridgeline.findings.explain import findings_of
from ridgeline.findings.finding import Finding
from ridgeline.findings.replay.calibration import DEVICE_SLACK, HOST_SLACK
from ridgeline.profiler.floors import device_of
from ridgeline.trace import Trace, read

EVERY = (
    *("planted", "fresh", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh"),
    *("twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth", "seventeenth", "eighteenth", "nineteenth"),
    *("twentieth", "twenty-first", "twenty-second", "twenty-third", "twenty-fourth", "twenty-fifth"),
)
SUITES = EVERY if os.environ.get("RIDGELINE_EVERY_SUITE") else EVERY[-3:]
"""The others take six minutes more, and are replayed where asked for."""
TRIALS = suite_folder(suite="trials")
"""What programs of all suites were told, done (`benchmarks/planted/trials.py`)."""
NO_CAUSE = {
    *("messages_indexed", "losses_asked_if_finite", "worlds_asked_if_over", "hashes_indexed"),
    *("distances_indexed", "scalars_written_every_step", "lengths_tried_until_one_helps"),
    "film_graded_under_a_stopwatch",
}
"""InjectedCase, but the fix made it no faster (few indices are the same; the device hides the question, or the host is so
late that the answer is there, 0.49 ± 2.30 of 13.6 ms; choosing on the device costs more than asking, −0.64 ± 0.74 of
3.3 ms; a compiled whole is slower than its pieces, −2.77 ± 0.01 of 13.6 ms): rules must stay silent, or promise from
nothing on."""
TRUE = {
    ("pageable_copy", "exposed-copies"),  # the batch is copied on the compute stream
    ("small_copies", "exposed-copies"),
    ("frames_pageable", "exposed-copies"),  # brought 0.47 of 10.2 ms
    ("adam_tensor_by_tensor", "pointwise-chains"),  # gates and SiLU in eager mode; tried where it was not found again
    ("gradients_clamped_one_by_one", "pointwise-chains"),
    ("rotary_decode", "pointwise-chains"),  # rotary positions in eager mode; brought 1.15 of 5.18 ms
    ("vocab_32001", "pointwise-chains"),
    ("healthy_rotary_training", "pointwise-chains"),
    ("healthy_graph_decode", "pointwise-chains"),
    ("clicks_on_two_cores", "misaligned-sizes"),  # towers of 142, 884, 85 and 164 inputs
    ("clicks_two_workers", "misaligned-sizes"),
    ("columns_one_by_one", "misaligned-sizes"),
    ("tables_zeroed", "misaligned-sizes"),
    ("healthy_ranker", "misaligned-sizes"),
    ("decoder_collected", "pointwise-chains"),  # rotary positions in eager mode
    ("documents_one_by_one", "pointwise-chains"),
    ("denoised_eagerly", "channels-first"),  # brought 0.20 of 2.92 ms
    ("spectrograms_pageable", "channels-first"),  # brought 1.26 of 17.8 ms
    ("clips_pageable", "exposed-copies"),  # brought 0.51 of 2.97 ms
    ("diffusion_in_fp32", "unfused-optimizer"),  # brought 1.10 of 22.96 ms
    ("experts_located", "synchronization"),  # brought 0.37 of 7.96 ms
    ("policy_updated_in_small_steps", "tensor-cores-unused"),  # brought 0.15 of 1.55 ms
    ("policy_updated_in_small_steps", "pointwise-chains"),  # brought 0.49 of 1.54 ms
    ("workers_started_each_epoch", "data-loader"),  # an endless epoch brought 13.35 of 43.0 ms
    ("healthy_graphed_training", "channels-first"),  # brought 4.36 of 24.3 ms
    ("vision_checkpointed", "channels-first"),  # brought 2.93 of 18.2 ms
    ("vectors_pageable", "exposed-copies"),  # brought 1.80 of 5.61 ms
    ("gradients_scaled_for_bf16", "pointwise-chains"),  # brought 4.61 of 24.2 ms
    ("weights_cast_for_each_piece", "pointwise-chains"),  # brought 5.85 of 34.6 ms
    ("confusion_counted_on_host", "misaligned-sizes"),  # 21 classes; brought 0.22 of 4.26 ms
    ("healthy_boxes", "pointwise-chains"),  # overlaps of 512 boxes in six passes; brought 0.64 of 6.61 ms
    ("healthy_crossed_features", "pointwise-chains"),  # sums and products backward; brought 2.73 of 17.5 ms
    ("healthy_state_space", "pointwise-chains"),  # around Fourier transforms; brought 2.25 of 35.6 ms
    ("gains_computed_on_host", "misaligned-sizes"),  # a value of one column; brought 0.12 of 3.06 ms
    ("columns_pageable", "exposed-copies"),  # brought 2.36 of 5.88 ms
    ("healthy_raw_sound", "channels-first"),  # flat pictures in place of five convolutions along time: 4.57 of 57.1 ms
    ("healthy_hub_padded", "attention"),  # texts one behind the other brought 2.39 of 16.7 ms
    ("healthy_vocoder", "channels-first"),  # brought 0.35 of 2.50 ms
    ("healthy_fake_quantized", "pointwise-chains"),  # brought 0.63 of 13.8 ms
    ("healthy_far_and_near", "pointwise-chains"),  # roots, signs and exponents of distances: 3.24 of 7.41 ms
    ("healthy_speech_blocks", "channels-first"),  # depthwise convolutions along time as flat pictures: 8.62 of 42.4 ms
    ("healthy_averaged_diffusion", "pointwise-chains"),  # group norms, SiLU and casts in steps: 31.4 of 58.0 ms
    ("healthy_policy_near_the_old", "launch-bound"),  # from a graph 10.8 of 19.1 ms
    ("healthy_tuned_adapters", "pointwise-chains"),  # a hub's decoder, its layers compiled: 17.6 of 51.8 ms
    ("words_checkpointed", "pointwise-chains"),  # a hub's decoder, its layers compiled: 12.9 of 61.5 ms
    ("words_tensor_by_tensor", "pointwise-chains"),
    ("genes_in_fp32", "pointwise-chains"),  # a loss in six passes, compiled: 0.58 of 4.37 ms
    ("orbits_followed_eagerly", "tensor-cores-unused"),  # products of 6 µs in a graph, in bf16: 0.86 of 2.12 ms
    ("healthy_foreseen", "launch-bound"),  # cells of cuDNN from a graph: 8.10 of 15.2 ms
    ("words_checkpointed", "logits"),  # the hub's loss makes logits fp32: 1.77 of 63.3 ms
    ("words_tensor_by_tensor", "logits"),
    ("healthy_compiled_words", "logits"),  # so does autocast: 4.8 of 68.7 ms of kernels are gone outside of it
    ("healthy_crossed_clicks", "pointwise-chains"),  # compiled: 1.40 of 11.5 ms
    ("healthy_drawn_words", "pointwise-chains"),  # rotary positions and gates inside of a graph: 5.01 of 24.9 ms
    ("healthy_inner_steps", "launch-bound"),  # 4.64 of 17.5 ms
    ("healthy_prefixed", "attention"),  # FlexAttention with a mask of blocks: 0.94 of 17.0 ms
    ("healthy_questions_answered", "launch-bound"),  # PyTorch's own layers on a slow host: 12.6 of 26.5 ms
    ("healthy_tuned_experts", "logits"),  # the hub's loss makes logits fp32: 0.96 of 31.9 ms
    ("partition_squared_in_fp32", "logits"),  # a loss that is compiled: 3.35 of 11.5 ms
    ("plans_made_eagerly", "pointwise-chains"),  # inside of a graph, kernels of 2 µs: 0.39 of 1.18 ms
    ("speech_filled_to_thirty_seconds", "padding"),  # 40 % of the tokens still: 9.47 of 19.6 ms
    ("blocks_wrapped_to_recompute", "pointwise-chains"),  # norms shifted and scaled, compiled: 4.18 of 18.6 ms
    ("paths_summed_word_by_word", "pointwise-chains"),  # inside of a graph, kernels of 1 µs: 1.74 of 2.89 ms
    ("healthy_points", "pointwise-chains"),  # the largest of 2,048 points, backward in three passes: 3.2 of 18.6 ms
}
"""What is found in programs without a planted cause and is so: `benchmarks/2026-11-15-findings.md` says how we know."""
UNTRIED = {
    ("healthy_tuned_adapters", "logits"),  # the hub's loss in fp32: 1.05 ± 2.47 of 51.7 ms, 0.56 to 3.37 promised
    ("healthy_tuned_summaries", "attention"),  # 9.6 ± 13.9 of 71.8 ms, up to 13.6 promised
    ("healthy_tuned_experts", "pointwise-chains"),  # 1.10 ± 3.19 of 28.3 ms, 2.74 to 9.08 promised
    ("particles_drawn_again_on_host", "pointwise-chains"),  # −0.12 ± 0.34 of 0.60 ms, 0.04 to 0.14 promised
    ("healthy_tuned_summaries", "tensor-cores-unused"),  # its products
    ("healthy_tuned_texts", "attention"),  # padded texts, a sixth of them padding
    ("scans_unpacked_on_one_core", "host-contention"),  # eight threads unpack in the process that launches
    ("sampler_compares_its_timestep", "pointwise-chains"),  # 0.63 ± 0.14 of 12.8 ms, 0.75 to 3.00 promised
    ("chains_moved_eagerly", "pointwise-chains"),  # 0.13 to 0.82 of 5.8 ms, inside of a graph
    ("reviews_filled_to_the_limit", "padding"),  # −0.22 ± 1.13 of 9.5 ms, 0.44 to 3.93 promised
}
"""What is found there and has evidence, and nobody has tried the advice, or the trial varied by more than was promised:
neither true nor false."""


@cache
def _allowed() -> set[tuple[str, str]]:
    """What programs without a planted cause may be told: what is true, what nobody has tried, and not what trials have
    shown to be false. A trial in which nothing was told says nothing."""
    found = [(case, score(_planted_alone(case))) for case in _second_fixes(TRIALS)]
    false = {pair for case, one in found if _is_refuted(one) for pair in _told(case)}
    return TRUE | (UNTRIED - false)


def _is_refuted(one: Score) -> bool:
    """Whether a trial brought less than was promised, whatever its steps vary by."""
    return one.finding is not None and one.gain_ms + one.noise_ms < one.finding.low_ms


def _second_fixes(*folders: Path) -> list[InjectedCase]:
    recorded = [folder for folder in folders if (folder / "cases.json").exists()]
    return [case for folder in recorded for case in second_fixes(folder, *map(_folder, EVERY))]


def _folder(suite: str) -> Path:
    return suite_folder(suite=suite)


def _told(case: InjectedCase) -> set[tuple[str, str]]:
    return {(case.of, rule) for rule in NAMES[case.cause]}


def _planted_alone(case: InjectedCase) -> InjectedCase:
    """What is found after a second fix is not asked here."""
    return replace(case, files={"planted": case.files["planted"]})


BELOW = {
    *("words_tensor_by_tensor", "activations_told_to_a_logger", "heat_noted_at_every_move"),
    "previews_saved_every_step",
}
"""Third, behind two larger ones (a hub's pointwise kernels, and its logits in fp32); first, by the name of the values
that are read for it (twice), or of the tensor that is worked on at the host (a preview that is compressed)."""
MISSED = {
    "again_columns_one_by_one",  # traced in one run and timed in another, whose host was half as slow again
    "again_weights_cast_for_each_piece",  # compiling brought 5.85 ms, 4.71 at most were promised
    "again_healthy_hub_translator",  # −0.9 ± 4.2 ms: under capture the hub leaves fused attention
    "again_healthy_averaged_diffusion",  # 31.4 of 58.0 ms, where 15.1 at most are promised: norms are joined as well
    "again_words_checkpointed",  # 12.9 of 61.5 ms by compiling, where 10.1 at most are promised
    "again_healthy_compiled_words",  # 13.8 ± 12.6 of 94 ms, where the host decides and 1.4 at most are promised
    "again_policy_compiled",  # 0.49 where 0.39 at most were promised
    "again_pictures_embedded_under_autocast",  # 0.28 of 8.16 from a graph, where the device decides
    "again_padded_in_order",  # 9.6 of 70.8 ms by sorted data, and nothing was said
    "again_healthy_points",  # 3.2 of 18.6 ms, and nothing is said: its three passes are of different lengths
    "again_gradients_scaled_for_bf16",  # 4.61 where 3.78 at most are promised
    "again_fields_copied_one_by_one",  # 0.36 of 1.27 ms from a graph; found where the host was slower
    "again_texts_accumulated_one_by_one",  # 2.0 of 11.4 ms likewise
    "again_visits_parsed_in_the_loop",  # 1.2 of 11.5 ms likewise
    "again_pyramid_channels_first",  # 0.47 ± 0.56 of 7.7 ms likewise
    "again_losses_summed_on_host",  # 5.0 of 38.0 ms; found where the host was slower, in the run before
    "again_retrieved_under_autocast",  # 0.32 of 1.67 ms: a slow host is told from 7.5 % at worst on
    "again_averages_by_name",  # 2.62 ms likewise
    "again_blocks_wrapped_to_recompute",  # 4.18 where 3.66 at most are promised: norms are joined as well
    "again_reviews_filled_to_the_limit",  # `UNTRIED`: less than noise
    "again_sampler_compares_its_timestep",  # 0.63 where 0.75 at least are promised
    "again_losses_printed",  # 2.71 ms likewise
    "again_small_batch",  # 2.58 ± 1.92 of 11.99 ms likewise
    "again_scans_unpacked_on_one_core",  # 2.21 ± 1.70 of 18.0 ms; found where the host was slower
    "again_experts_norms_compiled",  # 1.10 ± 3.19 of 28.3 ms, where 2.74 at least are promised
    "again_particles_drawn_again_on_host",  # −0.12 ± 0.34 of 0.60 ms, where 0.04 at least are promised
    "again_speech_filled_to_thirty_seconds",  # 9.47 of 19.6 ms, where 9.19 at most are promised
}
"""True, but for the first two; the interval did not hold."""


@pytest.fixture(scope="module", params=SUITES)
def scores(request) -> list[Score]:
    try:
        cases = injected_cases(suite_folder(suite=request.param))
    except InputError as error:
        pytest.skip(str(error))
    if not cases:
        pytest.skip("a suite of healthy programs")
    return [score(case) for case in cases if case.name not in NO_CAUSE]


def test_nine_of_ten_causes_are_named_first_or_second(scores):
    missed = [found.case for found in scores if not found.named and found.case not in BELOW]
    assert len(scores) >= 5 and len(missed) <= len(scores) // 10, missed


def test_four_of_five_intervals_hold_the_realized_gain(scores):
    missed = [(found.case, round(found.gain_ms, 2)) for found in scores if not found.held]
    assert len(missed) <= len(scores) // 5, missed


def test_half_of_the_intervals_are_narrower_than_the_gain(scores):
    """Of the thirteenth suite's six gains two are hardly more than what their hosts vary by (13.5 ± 5.3, 1.7 ± 2.0)."""
    noisy = any(found.noise_ms > 0.8 * found.gain_ms for found in scores)
    assert statistics.median(found.width for found in scores if found.width is not None) < (1.2 if noisy else 1.0)


def test_a_cause_is_no_longer_named_once_it_is_fixed(scores):
    """Padding is halved by its fix, not gone; a host-bound program may stay host-bound; four fixes leave a part."""
    still = {found.case for found in scores if found.still_named and found.cause not in ("padding", "host-bound")}
    left = {"experts_located", "workers_started_each_epoch", "taught_in_fp32", "partition_squared_in_fp32"}
    assert still <= left


def test_what_fixed_runs_are_told_beside_a_slow_host_is_true_of_them(scores):
    others = {(found.case, rule) for found in scores for rule, _ in found.others if rule not in GENERAL}
    assert others <= _allowed(), others - _allowed()


def test_every_planted_cause_has_a_rule(scores):
    assert {found.cause for found in scores} <= NAMES.keys()


HEALTHY = [
    program
    for folder in (*map(_folder, SUITES), TRIALS)
    if folder != _folder(EVERY[0]) and folder.exists()  # it has none
    for program in control_programs(folder)
]


@pytest.mark.parametrize("program", HEALTHY, ids=lambda program: program.name)
def test_healthy_programs_are_told_nothing_that_is_not_so(program):
    found = {(program.name, rule) for rule, _ in found_in(program)}
    assert found <= _allowed(), found - _allowed()


STACKED = sorted(file for folder in (*map(_folder, SUITES), TRIALS) for file in folder.glob("healthy_*.stack.json.xz"))


@pytest.mark.parametrize("file", STACKED, ids=lambda file: file.name.split(".")[0])
def test_healthy_programs_recorded_with_their_stack_are_told_nothing_that_is_not_so(file):
    """Every call of Python is recorded, which stretches what lies between launches."""
    name, trace = file.name.removesuffix(".stack.json.xz"), read(file, cache=False)
    found = findings_of(TraceContext(trace, device_of(trace)))
    weighty = {(name, finding.rule) for finding in found if finding.step_frac > WEIGHTY_FRAC}
    assert weighty <= _allowed(), weighty - _allowed()


@pytest.fixture(scope="module")
def tried() -> list[Score]:
    """Second fixes; what is found after them is not asked here."""
    if SUITES != EVERY:
        pytest.skip("of all suites together: RIDGELINE_EVERY_SUITE=1 asks for them")
    return [score(_planted_alone(case)) for case in _second_fixes(*map(_folder, EVERY[2:]), TRIALS)]


def test_second_fixes_bring_what_was_promised_of_the_fixed_programs(tried):
    found = tried
    named = [one for one in found if one.finding is not None and one.case not in MISSED]
    assert len(named) >= 9 and all(one.held for one in named), [one.case for one in named if not one.held]
    silent = [one for one in found if one.finding is None and one.case not in MISSED]
    assert all(one.gain_ms < 0.05 * one.step_ms for one in silent), [one.case for one in silent]


def test_what_was_tried_of_fixed_and_healthy_programs_was_true(tried):
    """The advice was taken, and brought at least the low end and more than noise."""
    named = [one for one in tried if one.finding is not None and one.finding.step_frac > WEIGHTY_FRAC]
    false = {one.case for one in named if not one.confirmed}
    known = {"again_columns_one_by_one", "again_healthy_ranker", "again_healthy_tuned_experts"}  # 0.36 ± 1.72 of 27.4
    known |= {"again_adapters_judged_as_they_are", "again_experts_norms_compiled"}  # `UNTRIED`: less than noise
    known |= {"again_healthy_tuned_summaries", "again_particles_drawn_again_on_host"}
    known |= {"again_reviews_filled_to_the_limit", "again_sampler_compares_its_timestep"}
    assert len(named) >= 15 and false <= known, false


def test_intervals_would_have_held_nine_of_ten_of_what_was_promised_blind():
    """What rules promised before they had seen a suite, with the noise and the slack that intervals have now."""
    calibration = _calibration()
    folders = [suite_folder(suite=suite) for suite in ("fresh", "third")]
    promises = [promise for folder in folders for promise in calibration.promises(folder)]
    assert sum(promise.score <= 0 for promise in promises) == 41  # the noise alone
    slack = {True: HOST_SLACK, False: DEVICE_SLACK}
    assert len(promises) == 51 and sum(promise.score <= slack[promise.of_host] for promise in promises) >= 45


def _calibration():
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "planted_calibration.py"
    if not path.exists():
        pytest.skip("benchmarks are not here")
    spec = importlib.util.spec_from_file_location("planted_calibration", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["planted_calibration"] = module
    spec.loader.exec_module(module)
    return module


def test_waking_the_thread_that_prepares_an_optimizer_is_no_host_code():
    """2.3 ms between the last kernel of a backward pass and the first of an update over lists, half of it inside."""
    case = next(case for case in injected_cases(suite_folder(suite="eighteenth")) if case.name.startswith("lamb_"))
    trace = case.trace("fixed")
    assert "host-code" not in [finding.rule for finding in findings_of(TraceContext(trace, device_of(trace)))]


def test_a_cause_that_costs_nothing_is_not_found():
    cases = [case for suite in ("fresh", "eighth", "thirteenth") for case in injected_cases(suite_folder(suite=suite))]
    for case in (case for case in cases if case.name in NO_CAUSE):
        assert case.gain_s < 0 and score(case).place is None


def test_a_training_loop_at_the_power_its_board_is_built_for_is_told_nothing():
    """Recorded by ``ridgeline profile benchmarks/planted/heavy.py``, with clocks and power beside the kernels."""
    trace = read(suite_folder(suite="seventh") / "heavy.json.gz", cache=False)
    assert {"clock_hz", "power_w"} <= trace.counters.keys()
    assert findings_of(TraceContext(trace, device_of(trace))) == []


PLAIN = ("fp32_matmul", "nchw_conv", "hidden_2731", "zero_grad_memset")
ROUNDS = 3
"""Of a program in a plain recording, which has no marks: all of them are one step."""
UNNAMED_PLAINLY = {"ninth": {"preferences_in_fp32"}, "eleventh": {"denoised_under_autocast"}}
"""Casts cannot be told from copies without shapes."""
MISSED_PLAINLY = {
    "ninth": {"centers_moved_on_host", "visits_parsed_in_the_loop"},
    "eleventh": {"gains_computed_on_host", "windows_cut_by_one_worker"},
}


@pytest.mark.parametrize("suite", ["ninth", "eleventh"])
def test_of_plain_recordings_nine_in_ten_causes_are_named_and_most_gains_are_inside(suite):
    """No shapes, no marks of steps, and nobody timed them."""
    folder = suite_folder(suite=suite)
    cases = {case.name: case for case in injected_cases(folder) if case.name not in NO_CAUSE}
    named, held = set(), set()
    for file in sorted(folder.glob("*.planted-plain.json.xz")):
        case = cases.get(file.name.split(".")[0])
        found = _untimed(read(file, cache=False))[:2] if case else []
        ours = next((finding for finding in found if case and finding.rule in NAMES[case.cause]), None)
        if case and ours:
            named.add(case.name)
            if ours.low_ms <= ROUNDS * case.gain_s * 1e3 <= ours.high_ms:
                held.add(case.name)
    assert cases.keys() - named <= UNNAMED_PLAINLY[suite]
    assert cases.keys() - held <= UNNAMED_PLAINLY[suite] | MISSED_PLAINLY[suite]


@pytest.mark.parametrize("name", PLAIN)
def test_of_a_recording_nobody_timed_the_cause_is_named_and_the_fixed_program_is_told_nothing(name):
    """The device decides these fixed steps; under the profiler their hosts were slower than it."""
    case = next(case for case in injected_cases(suite_folder(suite="planted")) if case.name == name)
    planted, fixed = (_untimed(case.trace(variant)) for variant in ("planted", "fixed"))
    assert any(finding.rule in NAMES[case.cause] for finding in planted[:2])
    assert [finding.rule for finding in fixed if finding.step_frac > WEIGHTY_FRAC] == []


def _untimed(trace: Trace) -> list[Finding]:
    """Findings of a trace without anything that Ridgeline's own recorder wrote into it."""
    bare = replace(trace, meta={key: value for key, value in trace.meta.items() if key != "ridgeline"})
    return findings_of(TraceContext(bare, device_of(bare)))


PLAINLY = sorted(file for suite in SUITES for file in suite_folder(suite=suite).glob("*.plain.json.xz"))
SLOW_HOST = {  # as recorded: the device is busy a third of 0.9 ms, 45 of 14 and 12 of 29 ms
    ("buyers_and_goods_dense", "launch-bound"), ("worlds_asked_if_over", "launch-bound"),
    ("nadam_tensor_by_tensor", "launch-bound"), ("answers_picked", "launch-bound"),
    ("windows_cut_by_one_worker", "launch-bound"),
}  # fmt: skip


@pytest.mark.parametrize("file", PLAINLY, ids=lambda file: file.name.split(".")[0])
def test_well_written_programs_recorded_as_most_people_do_are_told_nothing_that_is_not_so(file):
    """No shapes, no schedule, no marks of steps, nobody timed them."""
    name = file.name.removesuffix(".plain.json.xz")
    found = {(name, finding.rule) for finding in _untimed(read(file, cache=False)) if finding.step_frac > WEIGHTY_FRAC}
    assert found <= _allowed() | SLOW_HOST, found - _allowed()
