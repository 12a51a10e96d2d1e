"""Plants causes, measures what fixing them brings, and records traces of both; one command for a GPU machine.

    python benchmarks/planted/run.py --out FOLDER --budget 400
    python benchmarks/planted/run.py --out FOLDER --budget 185 --suite fresh
    python benchmarks/planted/run.py --out FOLDER --budget 100 --suite trials --warm-first 30 --timed-frac 0.8 \\
        --case-limit 13

Writes ``timings.json.gz`` (step times of every case, planted and fixed) and ``traces.tar`` (reduced Kineto traces, xz).
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

from shrink import shrink, shrink_log

HERE = Path(__file__).resolve().parent
CASE_LIMIT_S = 75.0
TIMED_FRAC = 0.6
"""Of the budget, at most, for step times."""
SPARES = 3
"""Processes that have imported everything: importing takes ten seconds on a slow host."""
# Cases with the causes most asked for come first: a short budget cuts the tail.
ORDER = (
    "loader_no_workers item_each_layer tiny_kernels_train pageable_copy pinned_copy_in_line empty_cache_each_step "
    "collect_each_step fp32_matmul nchw_conv adamw_loop small_batch attention_spelled_out padded_batch fp32_logits "
    "zero_grad_memset logging_each_step recompute autocast_weights vocab_50257 affinity_one_core streamed_weights "
    "sample_on_host graph_breaks pointwise_chain recompile_each_shape tiny_kernels_decode item_each_gradient "
    "index_backward dense_embedding_gradient attention_dense_mask hidden_2731 loader_one_worker ema_loop "
    "synchronize_each_block small_copies"
).split()
FRESH = (
    "speech_without_workers experts_asked rotary_decode frames_pageable embeddings_in_line unet_empties_cache "
    "graph_collected convolutions_in_fp32 plain_channels_first adam_tensor_by_tensor sentences_two_by_two "
    "encoder_spelled_out padded_to_limit many_languages_fp32 tables_zeroed losses_written convolutions_recomputed "
    "encoder_autocast vocab_32001 clicks_on_two_cores experts_streamed thresholds_on_host group_norm_spelled_out "
    "cells_frame_by_frame messages_indexed table_of_sellers encoder_all_true_mask clicks_two_workers "
    "gradients_clamped_one_by_one stages_timed columns_one_by_one tokens_masked_in_python "
    "healthy_rotary_training healthy_convolutions healthy_encoder_inference healthy_graph_decode healthy_ranker "
    "healthy_messages healthy_loader healthy_diffusion_transformer layers_counted lengths_compiled "
    "again_nchw_conv again_small_batch again_sample_on_host again_pageable_copy again_small_copies "
    "again_logging_each_step again_padded_batch again_loader_no_workers again_graph_breaks"
).split()
THIRD = (
    "again_nchw_conv again_small_batch again_sample_on_host again_pageable_copy again_small_copies "
    "again_healthy_ranker stages_watched decoder_collected metrics_written denoised_eagerly encoder_adamw_loop "
    "transformer_autocast encoder_recomputed ranker_in_fp32 documents_one_by_one long_encoder_by_hand "
    "spectrograms_pageable norm_and_gelu_by_hand pictures_one_worker again_healthy_rotary_training "
    "again_logging_each_step again_padded_batch again_loader_no_workers"
).split()
FOURTH = (
    "infinities_looked_for experts_located losses_printed boxes_sorted_on_host pictures_scaled_on_host "
    "reviews_without_workers workers_started_each_epoch clips_pageable series_in_line constants_made_anew "
    "diffusion_in_fp32 segmenter_channels_first windows_by_hand norms_in_fp32 transcripts_of_51865 chances_in_fp32 "
    "prompts_padded vision_checkpointed rates_for_each_layer cache_emptied_for_each_request transcript_token_by_token "
    "policy_updated_in_small_steps averages_by_name slides_in_pieces "
    "healthy_graphed_training healthy_gpt_training healthy_resnet healthy_embedding_server healthy_fed_training "
    "again_denoised_eagerly again_spectrograms_pageable again_documents_one_by_one again_long_encoder_by_hand "
    "again_columns_one_by_one healthy_compiled_block again_rotary_decode"
).split()
REST = (
    "again_healthy_graphed_training again_policy_updated_in_small_steps again_columns_one_by_one "
    "again_spectrograms_pageable healthy_embedding_server healthy_fed_training healthy_compiled_block"
).split()
"""Of the fourth, what its first run had no time for, or what it left to ask."""
FIFTH = (
    "levels_asked answers_attend_by_hand hidden_5461 committee_one_by_one momentum_tensor_by_tensor features_pageable "
    "gates_recomputed pictures_embedded_under_autocast words_zeroed photos_two_workers served_channels_first "
    "neighbors_sought_on_host segmenter_collected again_healthy_graphed_training healthy_embedding_server "
    "healthy_fed_training again_policy_updated_in_small_steps again_columns_one_by_one"
).split()
SIXTH = (
    "again_clips_pageable again_diffusion_in_fp32 again_experts_located again_workers_started_each_epoch "
    "healthy_mixed_resnet healthy_mixed_gpt healthy_prefill healthy_wide_decode healthy_unet_training healthy_listener "
    "healthy_sparse_ranker healthy_biased_windows healthy_orthogonal_updates healthy_averaged_training "
    "healthy_committee launches_in_a_crowd weights_cast_for_each_piece vectors_pageable weights_needed_by_nobody "
    "gradients_scaled_for_bf16 clips_channels_first norms_one_by_one logits_shifted_in_fp32 "
    "again_slides_in_pieces again_cache_emptied_for_each_request again_averages_by_name again_vision_checkpointed "
    "healthy_compiled_block again_policy_compiled again_rotary_decode healthy_compiled_training "
    "again_frames_pageable again_padded_to_limit again_boxes_sorted_on_host again_losses_printed "
    "again_prompts_padded again_pictures_embedded_under_autocast again_answers_attend_by_hand again_photos_two_workers"
).split()
SIXTH_REST = (
    "again_vectors_pageable again_launches_in_a_crowd again_diffusion_read_later again_vision_checkpointed "
    "healthy_committee healthy_compiled_block again_rotary_decode again_policy_compiled "
    "again_weights_cast_for_each_piece again_gradients_scaled_for_bf16 again_losses_printed again_prompts_padded "
    "again_pictures_embedded_under_autocast again_answers_attend_by_hand again_epochs_endless again_frames_pageable "
    "again_padded_to_limit healthy_compiled_training again_photos_two_workers again_boxes_sorted_on_host "
    "again_tables_zeroed again_healthy_graph_decode again_adam_tensor_by_tensor again_norms_one_by_one"
).split()
"""Of the sixth, what its first run had no time for, and what it left to ask."""
SEVENTH = (
    "healthy_graph_convolutions healthy_recurrence healthy_adapters healthy_two_towers healthy_painter_and_critic "
    "healthy_guided_sampler healthy_picture_server healthy_choosing_experts healthy_half_precision healthy_mixer "
    "healthy_perplexity healthy_waves pictures_changed_one_by_one losses_summed_on_host nodes_masked_in_each_layer "
    "stock_layers_in_fp32 upscaler_channels_first lion_one_by_one latents_attend_by_einsum smoothed_in_fp32 "
    "adapters_under_autocast skipgrams_dense features_of_1433 mish_in_steps mixer_in_segments "
    "confusion_counted_on_host requests_one_by_one texts_read_in_the_loop batches_never_pinned healthy_streamed_text"
).split()
EIGHTH = (
    "again_losses_summed_on_host again_requests_one_by_one again_confusion_counted_on_host "
    "healthy_windows healthy_autoencoder healthy_points healthy_rays healthy_gates healthy_least_squares "
    "healthy_search healthy_masked_words healthy_long_context healthy_value_learning probe_under_autocast "
    "buyers_and_goods_dense boxes_cut_one_by_one slopes_added_by_hand rmsprop_tensor_by_tensor "
    "losses_asked_if_finite healthy_graphed_parts again_healthy_recurrence"
).split()
EIGHTH_REST = ["again_buyers_and_goods_dense", "again_healthy_points"]
NINTH = (
    "healthy_spoken healthy_boxes healthy_outlines healthy_counted_evaluation healthy_masked_patches "
    "healthy_preferences healthy_local_prefill healthy_beams healthy_worlds healthy_sessions healthy_clusters "
    "healthy_potential healthy_density healthy_accumulated worlds_asked_if_over worlds_moved_eagerly "
    "spoken_in_segments pyramid_channels_first hardswish_in_steps patches_in_fp32 scans_in_line chat_attends_by_hand "
    "preferences_in_fp32 sessions_of_500 nadam_tensor_by_tensor fields_copied_one_by_one centers_moved_on_host "
    "texts_accumulated_one_by_one visits_parsed_in_the_loop healthy_full_memory healthy_compiled_training "
    "again_healthy_graph_decode again_adam_tensor_by_tensor"
).split()
TENTH = (
    "again_centers_moved_on_host again_fields_copied_one_by_one again_pyramid_channels_first again_patches_in_fp32 "
    "again_nadam_tensor_by_tensor again_texts_accumulated_one_by_one again_worlds_asked_if_over "
    "healthy_results_a_step_later healthy_taught healthy_two_views healthy_conjugate_gradients healthy_motion "
    "healthy_ensemble healthy_retrieval answers_picked norms_by_formula views_zeroed retrieved_under_autocast "
    "beams_collected again_visits_parsed_in_the_loop again_healthy_boxes again_spoken_in_segments again_healthy_spoken "
    "again_letters_on_host"
).split()
ELEVENTH = (
    "healthy_state_space healthy_retention healthy_grouped_experts healthy_drafted healthy_rewarded "
    "healthy_translated healthy_chunked_prefill healthy_reranker healthy_in_eight_bits healthy_snapshots "
    "healthy_queries healthy_space_and_time healthy_heard_on_device healthy_faces healthy_judged_while_training "
    "healthy_forecast healthy_crossed_features healthy_tables healthy_atoms healthy_operator healthy_process "
    "healthy_physics clips_checkpointed gains_computed_on_host lengths_asked_in_each_layer kinds_indexed "
    "positions_judged_eagerly masks_fetched depths_channels_first molecules_of_300 frames_few_by_few "
    "denoised_under_autocast sharpness_tensor_by_tensor bias_added_by_hand healthy_heat healthy_compiled_server "
    "focal_loss_by_formula healthy_packed_texts again_answers_picked again_beams_collected "
    "again_retrieved_under_autocast again_views_zeroed windows_cut_by_one_worker again_adam_tensor_by_tensor"
).split()
TWELFTH = (
    "healthy_masked_diffusion healthy_two_critics healthy_soft_clusters healthy_multiple_choice healthy_codes "
    "healthy_population healthy_updated_in_backward healthy_beside_each_other norms_in_fp32_by_hand "
    "cache_emptied_between_phases codes_in_line responses_in_fp32 walked_eagerly again_gains_computed_on_host "
    "again_healthy_crossed_features again_healthy_state_space healthy_spins again_windows_in_graph "
    "again_windows_cut_by_one_worker"
).split()
THIRTEENTH = (
    "healthy_slots healthy_soft_experts healthy_reversible healthy_judged_at_every_layer healthy_accumulated_mixed "
    "healthy_columns_mixed healthy_plain_descent healthy_deblurred healthy_principal healthy_factors "
    "healthy_cached_decode healthy_bags healthy_streamed_frames healthy_hashed_grid healthy_grouped_sums "
    "healthy_raw_sound healthy_modern_convolutions healthy_augmented healthy_dreams healthy_written_weights "
    "healthy_varlen healthy_hub_training healthy_hub_padded ends_asked_for_every_token hub_under_autocast "
    "hub_checkpointed augmented_channels_first hashes_indexed columns_pageable layers_updated_one_by_one "
    "healthy_compiled_stages healthy_whole_numbers healthy_sparse_solver healthy_scripted "
    "again_healthy_multiple_choice again_windows_in_graph"
).split()
FOURTEENTH = (
    "healthy_drafted_trees healthy_own_kernels healthy_large_contrast healthy_hardened healthy_energies "
    "healthy_private healthy_flows healthy_masked_convolutions healthy_vocoder healthy_listwise healthy_nonnegative "
    "healthy_many_spectra healthy_fake_quantized again_healthy_raw_sound again_columns_pageable "
    "healthy_hub_translator again_healthy_hub_padded again_mask_laid_out healthy_hub_pairs "
    "again_layers_updated_one_by_one again_ends_asked_for_every_token"
).split()
FOURTEENTH_REST = (
    "again_healthy_vocoder again_healthy_fake_quantized again_healthy_hub_translator again_healthy_hub_pairs"
).split()
"""What the fourteenth left to ask."""
FIFTEENTH = (
    "healthy_mixed_heads healthy_weights_seen healthy_padded_exact healthy_frozen_memory healthy_tied_words "
    "healthy_odd_rows healthy_signs_kept healthy_buckets healthy_volumes healthy_assigned healthy_styles "
    "healthy_in_and_out healthy_edges_weighed healthy_columns_sorted healthy_boosted healthy_transport healthy_filters "
    "healthy_chains_sampled healthy_curvature healthy_adjoint healthy_inner_steps healthy_hub_words healthy_hub_sight "
    "healthy_hub_hearing healthy_hub_pictures hub_attends_eagerly groups_split_by_list four_passes_zeroed "
    "goods_dense_beside_towers adadelta_tensor_by_tensor squeezed_channels_first targets_drawn_in_the_loop "
    "hub_decoder_in_steps healthy_half_zero"
).split()
SIXTEENTH = (
    "healthy_speech_blocks healthy_read_both_ways healthy_narrow_keys healthy_dropped healthy_few_ask_many "
    "healthy_equalized healthy_neighbors_drawn healthy_two_tasks healthy_far_and_near healthy_grown healthy_hub_shared "
    "healthy_hub_matched again_healthy_hub_words again_healthy_hub_hearing again_four_passes_zeroed "
    "again_squeezed_channels_first again_healthy_inner_steps again_hub_decoder_in_steps"
).split()
SEVENTEENTH = (
    "healthy_tuned_pictures healthy_tuned_adapters healthy_tuned_summaries healthy_tuned_experts "
    "healthy_remembered_words healthy_judged healthy_drawn_words healthy_tuned_outlines healthy_averaged_diffusion "
    "healthy_restored healthy_student_and_teacher healthy_seen_in_tf32 healthy_tuned_clips healthy_columns_attend "
    "healthy_foretold healthy_policy_near_the_old healthy_relations healthy_compiled_words healthy_compiled_sight "
    "counts_read_after_each_batch seen_in_fp32 restored_channels_first words_checkpointed words_tensor_by_tensor "
    "series_pageable again_healthy_speech_blocks again_healthy_far_and_near healthy_tuned_texts "
    "texts_collated_in_the_loop"
).split()
SEVENTEENTH_REST = (
    "again_healthy_speech_blocks again_healthy_policy_near_the_old again_words_tensor_by_tensor "
    "again_healthy_far_and_near again_healthy_averaged_diffusion again_healthy_tuned_adapters "
    "again_healthy_compiled_words series_pageable"
).split()
"""Of the seventeenth, what its first run did not reach, and what it left to ask."""
EIGHTEENTH = (
    "proteins_read_in_the_loop tiles_pageable features_probed_in_line annotations_one_by_one negatives_drawn_in_python "
    "rounds_until_it_settles blocks_timed_by_hooks scalars_written_every_step negatives_mined_on_host "
    "orbits_followed_eagerly lamb_weight_by_weight answers_learned_two_by_two windows_then_emptied "
    "molecules_then_collected genes_in_fp32 cells_outlined_channels_first letters_attend_by_hand code_judged_in_fp32 "
    "words_of_250002 reviews_padded_to_the_limit distances_indexed factors_dense slopes_set_to_zero "
    "sounds_checkpointed queries_under_autocast blocks_offloaded waves_in_steps blocks_that_log_compiled "
    "healthy_wide_sight healthy_grouped_pictures healthy_foreseen healthy_replayed_control healthy_pairs_told_apart "
    "healthy_counted_at_the_end healthy_questions_answered healthy_copied_ahead healthy_compiled_blocks"
).split()
EIGHTEENTH_REST = (
    "healthy_counted_at_the_end healthy_questions_answered healthy_copied_ahead healthy_compiled_blocks "
    "again_healthy_foreseen again_orbits_followed_eagerly again_genes_in_fp32 again_healthy_tuned_experts "
    "again_words_checkpointed texts_collated_in_the_loop"
).split()
"""Of the eighteenth, what its first run did not reach, and what it and the seventeenth left to ask."""
NINETEENTH = (
    "fields_out_of_arrays films_in_line texts_moved_one_by_one moves_out_of_a_list friends_drawn_in_python "
    "lengths_tried_until_one_helps confusions_printed particles_drawn_again_on_host parses_then_collected "
    "requests_under_a_bound voices_one_by_one plans_made_eagerly weights_that_nobody_reads codes_and_one_that_hides "
    "taught_in_fp32 speech_filled_to_thirty_seconds atoms_filled_to_the_largest graphs_told_by_index "
    "pieces_of_words_dense critics_zeroed_in_place teacher_fetched_every_step adapters_fetched_for_each_request "
    "healthy_swapped_words healthy_queue healthy_crops healthy_mobile healthy_smooth_critic healthy_merged_tokens "
    "healthy_shared_keys healthy_spoken_lengths healthy_captions healthy_weather_foretold "
    "control_learned_in_a_crowd gestures_on_two_cores colors_changed_in_steps features_of_a_network_that_drops "
    "steps_counted_in_the_network"
).split()
NINETEENTH_REST = (
    "features_of_a_network_that_drops steps_counted_in_the_network again_plans_padded again_taught_in_fp32 "
    "again_lengths_tried_until_one_helps again_particles_drawn_again_on_host again_plans_made_eagerly "
    "again_healthy_questions_answered texts_collated_in_the_loop "
    "again_adapters_judged_as_they_are again_healthy_drawn_words again_norms_one_by_one"
).split()
"""What programs of it and of suites before may be told or were told, done."""
TWENTIETH = (
    "visits_parsed_by_a_generator pictures_uploaded_as_they_come features_fetched_in_line "
    "molecules_moved_piece_by_piece nearness_asked_of_every_batch words_timed_one_by_one histograms_of_every_norm "
    "priorities_kept_in_numpy samples_spoken_one_by_one anchors_summed_weight_by_weight students_taught_four_by_four "
    "belief_weight_by_weight frames_drawn_then_emptied episodes_then_collected rays_in_fp32 boards_channels_first "
    "sounds_attend_as_first_published points_joined_to_every_layer partition_squared_in_fp32 speakers_indexed "
    "crossed_features_dense experts_zeroed_in_place weights_loaded_for_each_customer adapters_checkpointed "
    "answers_rewarded_under_autocast beats_filtered_in_the_loop scans_unpacked_on_one_core batches_made_by_a_thread "
    "healthy_long_prompts healthy_boards healthy_served_pictures healthy_experts healthy_films healthy_policy_replayed "
    "healthy_translated_words healthy_student_of_two healthy_hearts balls_turned_in_steps "
    "layers_that_look_before_they_clip pairs_filled_to_512 healthy_hub_sounds "
    "pictures_compiled_for_every_size"
).split()
TWENTY_FIRST = (
    "healthy_noted_songs healthy_tags_judged healthy_flow_averaged healthy_rates_by_depth healthy_survivors "
    "healthy_prefixed healthy_questions_packed healthy_multiples_of_eight healthy_songs_sung "
    "healthy_fingerprints_mixed healthy_fields_in_tf32 healthy_one_scan healthy_flow_followed healthy_crossed_clicks "
    "healthy_roads healthy_columns_ahead healthy_turned_maps healthy_spared_memory healthy_games_in_memory "
    "healthy_turned_keys"
).split()
"""Nothing but programs that are well."""
TWENTY_SECOND = (
    "lines_of_text_by_one_worker radar_unpacked_under_taskset log_mels_before_the_copy points_of_a_lidar_in_double "
    "chunks_sent_when_needed phones_repeated_by_utterance sampler_compares_its_timestep activations_told_to_a_logger "
    "paths_summed_word_by_word adam_leaf_by_leaf episodes_one_at_a_time phases_that_free_memory callback_that_collects "
    "mixer_of_series_in_fp32 wide_residuals_channels_first heads_in_a_list spectra_of_2049_bins smoothing_laid_out "
    "facts_of_many_things_dense slopes_zeroed_by_hand blocks_wrapped_to_recompute items_through_convolutions_of_one "
    "backbone_learns_for_nothing reviews_filled_to_the_limit healthy_scores_streamed_in healthy_book_read_at_once "
    "healthy_broad_words healthy_deep_filters healthy_bags_looked_up healthy_filter_in_double "
    "healthy_loss_read_each_step healthy_pairs_in_one_square healthy_broad_layer healthy_bytes_from_workers "
    "lattice_in_steps norm_left_out_of_compilation"
).split()
TWENTY_THIRD = (
    "tomograms_by_one_worker tremors_bound_to_a_rank screens_as_tensors fine_level_kept_on_the_host "
    "worst_places_counted_by_picture sound_coded_in_anomaly_mode previews_saved_every_step cells_grown_step_by_step "
    "residues_under_amsgrad crops_passed_apart graphs_that_free_after_updates captions_tidied_after "
    "views_correlated_in_fp32 joints_channels_first painted_by_slices codes_against_one_hot purchases_zeroed_by_list "
    "weather_by_an_old_recipe prompt_of_a_model_that_rests episodes_filled_to_the_longest_allowed "
    "healthy_long_scores healthy_near_to_all healthy_shown_ahead healthy_halved_pictures healthy_fields_squeezed "
    "samples_by_mixtures layers_with_a_stopwatch"
).split()
TWENTY_FOURTH = (
    "replicas_swapped_in_turn states_followed_frame_by_frame windows_outlined_in_turn reads_filled_to_512 "
    "depths_out_of_an_array shards_scored_as_they_come heads_a_slice_at_a_time answers_judged_by_one_hot "
    "heat_noted_at_every_move calls_unpacked_on_one_core clouds_viewed_by_two_workers targets_sent_to_each_head "
    "teacher_gives_its_memory_back tasks_tidied_up_after views_decorrelated_in_fp32 centers_channels_first "
    "adan_of_the_paper selu_of_the_paper slopes_begun_with_zeros labels_for_pixels_computed_twice healthy_long_memory "
    "healthy_committee_in_blocks healthy_vectors_fetched_beside healthy_modes_in_tf32 healthy_two_halves_of_a_batch "
    "stages_timed_while_compiled teacher_colder_every_step"
).split()
TWENTY_FIFTH = (
    "replay_mapped_from_a_file activations_saved_on_the_host cameras_moved_one_by_one tokens_that_stand_out_by_mask "
    "hops_waited_for ratios_of_every_weight ridge_solved_by_numpy chains_moved_eagerly slow_slopes_one_by_one "
    "attributions_point_by_point amsgrad_after_the_paper chunks_that_release_memory twins_correlated_in_fp32 "
    "detector_channels_first residues_by_the_reference_kernel masses_in_10001_bins surprise_by_one_hot "
    "slopes_begun_as_zeros layers_run_again panoramas_in_squares pictures_told_twice events_counted_in_numpy "
    "request_that_collects sketches_by_two_workers genomes_on_a_share_of_the_cores "
    "healthy_large_filters healthy_two_broad_batches healthy_demand_in_tf32 healthy_prompts_of_a_broad_model "
    "healthy_scores_read_a_turn_later healthy_experts_side_by_side healthy_inverse_by_products "
    "healthy_columns_by_workers film_graded_under_a_stopwatch"
).split()
AHEAD = {
    "twentieth": (
        "transformers.models.bert.modeling_bert",
        "transformers.models.audio_spectrogram_transformer.modeling_audio_spectrogram_transformer",
    ),
    "trials": (
        "transformers.models.llama.modeling_llama",
        "transformers.models.t5.modeling_t5",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
    ),
}
"""What takes long to import, and is imported while the first phase runs."""
TRIALS = (
    "again_healthy_crossed_clicks again_healthy_prefixed again_plans_padded again_healthy_questions_answered "
    "again_speech_filled_to_thirty_seconds again_partition_squared_in_fp32 again_healthy_inner_steps "
    "again_particles_drawn_again_on_host again_taught_in_fp32 again_plans_made_eagerly again_healthy_drawn_words "
    "healthy_turned_keys again_adapters_judged_as_they_are again_healthy_tuned_summaries again_experts_norms_compiled "
    "again_scans_unpacked_on_one_core again_healthy_tuned_experts"
).split()
"""What fixed and healthy programs were told and nobody has tried, done; what brings most, and imports no hub, first."""
TRIALS_REST = (
    "again_reviews_filled_to_the_limit again_sampler_compares_its_timestep again_blocks_wrapped_to_recompute "
    "again_paths_summed_word_by_word"
).split()
"""What fixed programs of the twenty-second suite were told."""
LEFT = (
    "again_padded_in_order again_pictures_in_graph again_tables_zeroed healthy_compiled_training "
    "again_adam_tensor_by_tensor again_healthy_graph_decode"
).split()
"""What the runs of the sixth suite had no time for."""
SUITES = {
    "first": ORDER, "fresh": FRESH, "third": THIRD, "fourth": FOURTH, "rest": REST, "fifth": FIFTH, "sixth": SIXTH,
    "sixth-rest": SIXTH_REST, "seventh": SEVENTH, "eighth": EIGHTH, "eighth-rest": EIGHTH_REST, "ninth": NINTH,
    "tenth": TENTH, "eleventh": ELEVENTH, "twelfth": TWELFTH, "thirteenth": THIRTEENTH,
    "fourteenth": FOURTEENTH, "fourteenth-rest": FOURTEENTH_REST, "fifteenth": FIFTEENTH, "sixteenth": SIXTEENTH,
    "seventeenth": SEVENTEENTH, "seventeenth-rest": SEVENTEENTH_REST, "eighteenth": EIGHTEENTH,
    "eighteenth-rest": EIGHTEENTH_REST, "nineteenth": NINETEENTH, "nineteenth-rest": NINETEENTH_REST,
    "twentieth": TWENTIETH, "twenty-first": TWENTY_FIRST, "twenty-second": TWENTY_SECOND,
    "twenty-third": TWENTY_THIRD, "twenty-fourth": TWENTY_FOURTH, "twenty-fifth": TWENTY_FIFTH,
    "trials": TRIALS, "trials-rest": TRIALS_REST, "left": LEFT,
}  # fmt: skip


class Phase:
    """One kind of measurement over all cases, in a child that is replaced when a case hangs or kills it."""

    def __init__(self, name: str, folder: Path, args: argparse.Namespace, end_s: float) -> None:
        self.name, self.folder, self.args, self.end_s = name, folder, args, end_s
        self.log, self.read = folder / f"{name}.jsonl", 0
        self.done: dict[str, dict[str, Any]] = {}
        self.current, self.since_s = "", time.time()
        self.ready: list[tuple[Path, subprocess.Popen[bytes]]] = []

    def prepare(self, num: int = 1) -> None:
        """Start children that import what they need, and wait to be told their cases: they open no device before. The
        next one takes over at once where a case hangs or kills the one before."""
        ahead = AHEAD.get(self.args.suite, ())
        for i in range(num):
            awaited = self.folder / f"{self.name}.awaited{i}"
            self.ready.append((awaited, self._start([], "--after", str(awaited), "--ahead", *ahead)))

    def _begin(self, cases: list[str]) -> subprocess.Popen[bytes]:
        if not self.ready:
            return self._start(cases)
        awaited, child = self.ready.pop(0)
        partial = awaited.with_suffix(".part")
        partial.write_text(" ".join(cases))
        partial.rename(awaited)
        self.current, self.since_s = "", time.time()
        return child

    def end(self) -> None:
        """Nothing waits any longer."""
        for _, child in self.ready:
            self._stop(child)
        self.ready = []

    def run(self, on_done: Any) -> None:
        left = list(self.args.cases)
        while left and time.time() < self.end_s:
            child, before = self._begin(left), len(self.done)
            while child.poll() is None and not self._overdue():
                time.sleep(0.2)
                self._collect(on_done)
            if child.poll() is None:
                self._stop(child)
            self._collect(on_done)
            died = self.current or (left[0] if len(self.done) == before else "")
            if died and (child.returncode or time.time() > self.end_s):
                self.done.setdefault(died, {"event": "failed", "error": "killed, crashed or out of time"})
            left = [name for name in left if name not in self.done]

    def _start(self, cases: list[str], *more: str) -> subprocess.Popen[bytes]:
        env = os.environ | _caches(self.args.cache or tempfile.mkdtemp(dir=self.folder))
        if self.name == "trace":
            env["TORCH_TRACE"] = str(self.folder / "torch_trace")
        self.current, self.since_s = "", time.time()
        command = [sys.executable, str(HERE / "measure.py"), self.name, *cases, "--folder", str(self.folder), *more]
        command += ["--device", self.args.device] + (["--tiny"] if self.args.tiny else [])
        output = (self.folder / f"{self.name}.out").open("ab")
        return subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)

    def _overdue(self) -> bool:
        return time.time() > self.end_s or time.time() - self.since_s > self.args.case_limit

    def _stop(self, child: subprocess.Popen[bytes]) -> None:
        """The child and its loader workers are one session: they end together."""
        os.killpg(child.pid, 9)
        child.wait()

    def _collect(self, on_done: Any) -> None:
        lines = self.log.read_text().splitlines()[self.read :] if self.log.exists() else []
        for line in lines:
            self.read += 1
            fact = json.loads(line)
            self.current, self.since_s = (fact["case"] if fact["event"] == "began" else ""), time.time()
            if fact["event"] in ("done", "failed"):
                self.done[fact["case"]] = fact
                took = f"{fact.get('case_s', 0):.1f} s"
                print(f"{self.name:6} {fact['case']:28} {fact['event']} {took} {fact.get('error', '')}", flush=True)
                on_done(fact)


def main() -> None:
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="planted-"))
    began = time.time()
    if args.warm:
        _warm(args, folder, _compiling(args.cases), args.budget)
        return
    timed_s = args.warm_first + (args.budget - args.warm_first) * args.timed_frac
    timing = Phase("time", folder, args, began + timed_s)
    tracing = Phase("trace", folder, args, began + args.budget * 0.97)
    if args.warm_first:
        _warm_first(args, folder, timing)
    tracing.prepare()
    timing.run(lambda fact: _write_timings(args, timing.done, {}))
    timing.end()
    args.cases = [name for name in args.cases if timing.done.get(name, {}).get("traced")]
    with ProcessPoolExecutor(6) as pool:
        jobs: list[Future[int]] = []
        tracing.run(lambda fact: jobs.extend(_shrink_jobs(pool, folder, fact, timing.done)))
        for job in jobs:
            job.result()
    tracing.end()
    _pack(args, folder)
    _write_timings(args, timing.done, tracing.done)
    print(_table(timing.done, tracing.done))
    shutil.rmtree(folder, ignore_errors=True)


def _caches(folder: Path | str) -> dict[str, str]:
    return {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}


def _compiling(cases: list[str]) -> list[str]:
    """Those of the cases that compile; asked in a child, so that this process stays light."""
    asked = "from suite import CASES; print(*(name for name, case in CASES.items() if case.compiles))"
    known = subprocess.run([sys.executable, "-c", asked], cwd=HERE, capture_output=True, text=True).stdout.split()
    return [name for name in cases if name in known]


def _warm_first(args: argparse.Namespace, folder: Path, timing: Phase) -> None:
    """Fills the cache while nothing is timed, and imports meanwhile; what did not get ready is timed last, so that it
    takes nothing from the others. Which programs compile is known once they are imported: those that do not are ready
    then."""
    args.cache = args.cache or folder / "cache"
    timing.prepare(SPARES)
    ready = _warm(args, folder, args.cases, args.warm_first)
    args.cases.sort(key=lambda name: name not in ready)


def _warm(args: argparse.Namespace, folder: Path, cases: list[str], seconds: float) -> list[str]:
    """A process for each program; what is not ready in time is ended. Those that are."""
    more = ["--folder", str(folder), "--device", args.device] + (["--tiny"] if args.tiny else [])
    children = {}
    for name in cases:
        command = [sys.executable, str(HERE / "measure.py"), "warm", name, *more]
        children[name] = subprocess.Popen(command, env=os.environ | _caches(args.cache), start_new_session=True)
    end_s = time.time() + seconds
    for name, child in children.items():
        try:
            child.wait(max(0.1, end_s - time.time()))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
        print(f"warm   {name:28} {child.wait()}", flush=True)
    notes = (folder / "warm.jsonl").read_text() if (folder / "warm.jsonl").exists() else ""
    print(notes or "nothing got ready")
    facts = [json.loads(line) for line in notes.splitlines() if line.endswith("}")]
    return [fact["case"] for fact in facts if fact["event"] == "done"]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=400.0, help="seconds for everything")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the control flow")
    parser.add_argument("--suite", choices=SUITES, default="first")
    parser.add_argument("--case-limit", type=float, default=CASE_LIMIT_S, help="seconds for one case")
    parser.add_argument("--cache", type=Path, help="where compiled code is kept (not where compiling is timed)")
    parser.add_argument("--warm", action="store_true", help="only fill the cache, all programs side by side")
    parser.add_argument("--warm-first", type=float, default=0.0, help="seconds of the budget to fill the cache in")
    parser.add_argument("--timed-frac", type=float, default=TIMED_FRAC, help="of what is left, for step times")
    parser.add_argument("--cases", nargs="+", help="these alone, in place of a suite")
    args = parser.parse_args()
    args.cases = args.cases or list(SUITES[args.suite])
    return args


def _shrink_jobs(
    pool: ProcessPoolExecutor, folder: Path, fact: dict[str, Any], timed: dict[str, Any]
) -> list[Future[int]]:
    if fact["event"] != "done":
        return []
    jobs = []
    for variant in (name for name in ("planted", "fixed", "stack", "plain", "planted-plain") if name in fact):
        source = folder / fact[variant]["file"]
        first = "planted" if "planted" in fact else "fixed"
        of = {"stack": first, "plain": "fixed", "planted-plain": "planted"}.get(variant, variant)
        facts = {
            "unprofiled_step_s": timed[fact["case"]][of]["median_s"],
            "unprofiled_spread_s": (timed[fact["case"]][of]["high_s"] - timed[fact["case"]][of]["low_s"]) / 2,
            "profiled_step_s": fact[variant]["profiled_mean_s"],
            "python_stack": variant == "stack",
            "clock_hz": timed[fact["case"]][of]["clock_hz"],
            "energy_j": timed[fact["case"]][of]["energy_j"],
            **fact[of]["facts"],
        }
        jobs.append(pool.submit(shrink, source, folder / f"{source.name}.xz", facts))
    return jobs


def _pack(args: argparse.Namespace, folder: Path) -> None:
    with tarfile.open(args.out / "traces.tar", "w") as tar:
        for path in sorted(folder.glob("*.json.xz")):
            tar.add(path, arcname=path.name)
        for path in sorted((folder / "torch_trace").glob("*.log")) if (folder / "torch_trace").exists() else []:
            short = path.with_suffix(".short")
            short.write_text(shrink_log(path))
            _add_small(tar, short, f"torch_trace/{path.name}.gz")
        snapshot = folder / "memory_snapshot.pickle"
        if snapshot.exists():
            _add_small(tar, snapshot, "memory_snapshot.pickle.gz")
        for name in ("time.out", "trace.out"):
            if (folder / name).exists():
                _add_small(tar, folder / name, f"{name}.gz")


def _add_small(tar: tarfile.TarFile, path: Path, name: str, limit_bytes: int = 1_500_000) -> None:
    packed = path.parent / (path.name + ".gz")
    packed.write_bytes(gzip.compress(path.read_bytes(), 9))
    if packed.stat().st_size <= limit_bytes:
        tar.add(packed, arcname=name)


def _write_timings(args: argparse.Namespace, timed: dict[str, Any], traced: dict[str, Any]) -> None:
    with gzip.open(args.out / "timings.json.gz", "wt") as out:
        json.dump({"environment": _environment(), "timed": timed, "traced": traced}, out)


def _environment() -> dict[str, Any]:
    """What the children ran on; asked in a child, so that this process never opens the device."""
    if not _KNOWN:
        _KNOWN.update(json.loads(subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True).stdout))
    return _KNOWN | {"python": sys.version.split()[0], "num_cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d")}


ASK = """
import json, torch
there = torch.cuda.is_available()
name = torch.cuda.get_device_name() if there else "cpu"
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "device": name}))
"""
_KNOWN: dict[str, Any] = {}


def _table(timed: dict[str, Any], traced: dict[str, Any]) -> str:
    head = f"{'case':28} {'cause':34} {'planted':>9} {'fixed':>9} {'gain':>9} {'profiled':>9} traced"
    rows = [_row(name, fact, traced.get(name, {})) for name, fact in timed.items()]
    done = [fact for fact in timed.values() if fact["event"] == "done" and "planted" in fact]
    gains = [fact["planted"]["median_s"] / fact["fixed"]["median_s"] for fact in done]
    foot = f"{len(gains)} cases, median speedup {statistics.median(gains):.2f}×" if gains else "no case"
    return "\n".join([head, *rows, foot])


def _row(name: str, fact: dict[str, Any], traced: dict[str, Any]) -> str:
    if fact["event"] != "done":
        return f"{name:28} failed: {fact.get('error', '')[:90]}"
    fixed = fact["fixed"]["median_s"] * 1e3
    planted = fact.get("planted", fact["fixed"])["median_s"] * 1e3
    profiled = traced.get("planted", traced.get("fixed", {})).get("profiled_mean_s", float("nan")) * 1e3
    figures = "  ".join(f"{value:8.2f}" for value in (planted, fixed, planted - fixed, profiled))
    return f"{name:28} {fact['cause']:34} {figures}  {traced.get('event', 'no')} {traced.get('error', '')[:60]}"


if __name__ == "__main__":
    main()
