"""A convolution as the time models see it: its sizes, where it runs, and the transforms of layouts around it."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ridgeline.cost.call import ITEMSIZE, Call, Coef, selection
from ridgeline.cost.time.chip import Chip
from ridgeline.errors import CostError

DEFAULTS: Coef = {
    # Layout transforms: a block moves a tile of 32 channels by 32 pixels through shared memory.
    "transform_start_cycles": 2730.0,  # launch to last exit of a transform with nothing to move
    "transform_miss_cycles": 1020.0,  # added when the source is not in L2
    "transform_tile_cycles": 399.0,  # one SM's time for a tile, however full it is
    "transform_back": 0.152,  # extra tile time towards channels-first when the source is not in L2
    "transform_dram_frac": 0.898,  # share of the DRAM bandwidth
    "transform_held": 0.61,  # share of the L2 in which just-written bytes are found again
    "generic_tile_cycles": 2060.0,  # tile time of the generic transform that pads or splits groups
    "generic_start_cycles": 14700.0,  # its start
    "filter_start_cycles": 16100.0,  # generic transform of an odd number of filters
    "filter_cycles": 0.0106,  # and per element
    "fold_bytes_per_s": 6.1e11,  # rate at which an input gradient computed on folded pixels is unfolded
    "pad_cycles": 0.68,  # one SM's time for an element of a tensor widened to whole eights of channels
    "memset_cycles": 2490.0,  # one small memset
    "miss_cycles": 900.0,  # saved at the start of a lone kernel whose first loads hit the L2
    # Tensor-core implicit GEMM fed by TMA (Hopper and later).
    "tma_start_cycles": 9210.0,  # launch, descriptors, pipeline fill, epilogue drain
    "tma_frac": 0.915,  # share of the matrix peak inside the main loop
    "tma_bytes_per_cycle": 87.4,  # operand bytes an SM takes in per clock
    "tma_ragged": 0.432,  # extra loop time when the channels do not fill whole 64-byte rows
    "tma_fill_cycles": 1710.0,  # added to the start by the first 128 x 128 tile
    "tma_tile_cycles": 1780.0,  # epilogue of a 128 x 128 tile
    # Tensor-core implicit GEMM fed by asynchronous copies (Ampere kernels).
    "copy_start_cycles": 6110.0,  # launch, pipeline fill, epilogue drain
    "copy_frac": 0.52,  # share of the matrix peak inside the main loop, on chips whose peak needs TMA
    "copy_native_frac": 0.8,  # the same where they are the fastest path (assumed: no recordings)
    "copy_bytes_per_cycle": 36.3,  # operand bytes an SM gathers per clock
    "copy_step_cycles": 232.0,  # least time of a step of the inner loop
    "copy_tile_cycles": 3850.0,  # prologue and epilogue of a 128 x 128 tile
    # Shared by both.
    "loop_l2_frac": 1.07,  # operand traffic over the nominal L2 bandwidth (above 1: multicast within a cluster)
    "loop_dram_frac": 0.576,  # share of the DRAM bandwidth an implicit GEMM reaches
    "ramp_cycles": 9650.0,  # lost while DRAM reaches its steady rate, in full for a long kernel
    "segment_cycles": 39000.0,  # set-up and fix-up when one tile's loop is shared by several SMs
    "weight_segment_cycles": 25300.0,  # the same for a weight gradient
    "segment_loop": 1.03,  # loop time of a shared tile over a whole one
    "weight_segment_loop": 1.45,  # the same for a weight gradient, against weight_grad
    "strided_grad": 1.83,  # loop time of the input gradient of a strided convolution over a plain one
    "small_grad": 0.426,  # loop time of small ones, which visit every tap, over a plain one
    "weight_grad": 0.884,  # loop time of the weight gradient over a forward pass with the same tile fed by TMA
    # Pointwise convolutions as GEMM.
    "ramp_s": 1.0,  # share of the ramp of the library's products; less between the kernels of a model
    "gemm_start_cycles": 5360.0,  # launch, pipeline fill, epilogue drain
    "gemm_frac": 0.84,  # share of the matrix peak
    "gemm_bytes_per_cycle": 100.0,  # operand bytes an SM takes in per clock
    "gemm_step_cycles": 26.9,  # barrier cost of a 64-deep step
    "gemm_dram_frac": 0.744,  # share of the DRAM bandwidth
    "gemm_ramp_cycles": 3040.0,  # lost while DRAM reaches its steady rate, in full for a long kernel
    "gemm_half_aligned": 7.44,  # slowdown when rows of an image are 8-byte but not 16-byte aligned
    "gemm_unaligned": 14.4,  # and when they are not even that
    "gemm_odd": 2.06,  # slowdown of the bytes when channels do not come in eights
    "gemm_odd_frac": 0.154,  # share of the matrix peak then
    "gemm_split_depth": 455.0,  # shortest inner loop that a weight gradient is split into
    "gemm_reduce_cycles": 3530.0,  # kernel that adds the partial weight gradients
    # Single precision on the vector units.
    "simt_start_cycles": 6290.0,  # launch and drain
    "simt_wide_frac": 0.633,  # share of the vector peak, 256 x 64 tiles
    "simt_narrow_frac": 0.402,  # the same, 32 x 32 tiles
    "simt_step_cycles": 561.0,  # one 8-deep step of a lone block
    "simt_store_cycles": 0.547,  # prologue and epilogue of a tile, per output element
    "simt_grad_frac": 0.666,  # share of the vector peak, input gradient with at least simt_grad_channels channels
    "simt_grad_channels": 253.0,  # output channels that fill its inner tile
    "simt_grad_step_cycles": 130.0,  # and its time for one output channel in a lone block
    "residue_frac": 1.0,  # share of the factor learned for single kernels that applies
    "simt_atomic_frac": 0.107,  # share of the vector peak, weight gradient by atomics, one tap
    "simt_atomic_taps": 0.201,  # the same with more taps, whose input is reused
    "fourier_bytes": 8.35,  # bytes moved by the transforms over the tensors' own
    "fourier_gain": 0.561,  # work saved, and share of the peak reached, by Fourier transforms of large problems
    "winograd_gain": 3.6,  # multiplications saved, and share of the peak reached, by transformed 3 x 3 filters
    "winograd_bytes": 13.8,  # bytes moved by the transforms over the tensors' own
    "vector_depth_cycles": 163.0,  # one element of the inner loop of a lone block of such an image
    "simt_image_frac": 0.202,  # share of the vector peak when a 16-bit image has too few channels for a matrix unit
    # Depthwise stencils, in cycles of an SM for one element (and one tap of it).
    "stencil_start_cycles": 4600.0,  # launch to exit of a stencil with little to do
    "stencil_cycles": 1.38,  # channels first, unrolled filter of side 3 or 5
    "stencil_tap_cycles": 0.127,  # and per tap
    "stencil_any_cycles": 1.95,  # channels first, any filter
    "stencil_any_tap_cycles": 0.149,  # and per tap
    "stencil_any_tap_latency_cycles": 170.0,  # one tap of one thread, filters that are not unrolled
    "stencil_tiled_cycles": 0.4,  # channels first in fp16: tiles in shared memory
    "stencil_tiled_tap_cycles": 0.0477,  # and per tap
    "stencil_tiled_stride": 0.4,  # its work per output grows with the inputs skipped, to this power
    "stencil_grad_cycles": 3.84,  # input gradient, channels first, unrolled
    "stencil_grad_tap_cycles": 0.0625,  # and per tap
    "stencil_any_grad_cycles": 2.0,  # input gradient, channels first, any filter
    "stencil_any_grad_tap_cycles": 0.2,  # and per tap
    "stencil_weight_step_cycles": 13.5,  # weight gradient, channels first: 32 pixels of one image by a warp
    "stencil_weight_latency_cycles": 309.0,  # the same for a lone warp
    "stencil_last_cycles": 0.159,  # channels last
    "stencil_last_tap_cycles": 0.0322,  # and per tap
    "stencil_last_stride": 0.602,  # its work per output grows with the inputs skipped, to this power
    "stencil_last_first_cycles": 3780.0,  # least time of one thread
    "stencil_last_latency_cycles": 292.0,  # and of a tap of it
    "stencil_general_cycles": 0.042,  # channels last, batches of fewer than eight
    "stencil_general_tap_cycles": 0.068,  # and per tap
    "stencil_general_large": 1.72,  # times this with filters wider than five
    "stencil_general_stride": 0.366,  # its work per output grows with the inputs skipped, to this power
    "stencil_last_grad_cycles": 0.253,  # input gradient, channels last
    "stencil_last_grad_tap_cycles": 0.0799,  # and per tap
    "stencil_last_weight_cycles": 0.553,  # weight gradient, channels last
    "stencil_last_weight_tap_cycles": 0.015,  # and per tap
    "stencil_last_weight_rows": 960.0,  # images x channels that fill the chip
    "stencil_last_large": 1.16,  # all of them with filters wider than five
    "stencil_last_plain": 3.2,  # input gradient, channels last, strides above two
    "stencil_last_wide_cycles": 0.0185,  # channels last in single precision
    "stencil_last_wide_tap_cycles": 0.0664,  # and per tap
    "stencil_last_wide_grad_cycles": 0.0759,  # either gradient, channels last in single precision
    "stencil_last_wide_grad_tap_cycles": 0.0668,  # and per tap
    "stencil_last_reduce_cycles": 16000.0,  # joining the tiles' weight gradients
    "stencil_tiled_grad_cycles": 0.0958,  # input gradient, channels first in fp16
    "stencil_tiled_grad_tap_cycles": 0.0566,  # and per tap
    "stencil_tiled_weight_cycles": 1.08,  # weight gradient, channels first in fp16
    "stencil_tiled_weight_tap_cycles": 0.0716,  # and per tap
    # Groups.
    "group_start_cycles": 3240.0,  # added to each group's kernel when groups run one after another
    "group_vector_start_cycles": 13400.0,  # one group's vector kernel, nothing to do
    "group_vector_frac": 0.145,  # its share of the vector peak
    "group_depth_cycles": 252.0,  # and its time for one element of the inner loop
    "group_engine_depth_cycles": 160.0,  # the channels-last kernel's time for one element of the inner loop
    "group_engine_row_cycles": 0.0144,  # and, the chip being full, for one of one output pixel
    "group_matrix_cycles": 32600.0,  # one group's kernels for a pointwise gradient
    "group_row_cycles": 0.669,  # and per pixel
    "group_grad_cycles": 23700.0,  # one group's kernels for a gradient in single precision
    "group_transpose_bytes_per_s": 87500000000.0,  # rate of the transposes of pointwise ones
    # The kernel that takes any groups directly, and the one of weight gradients from shared memory: seconds for each of
    # the terms that ``direct_terms`` and ``shared_terms`` count.
    "direct.fwd.first.start": 0, "direct.fwd.first.element": 0, "direct.fwd.first.channel": 3.57e-12,
    "direct.fwd.first.product": 6.72e-13, "direct.fwd.first.strided": 7.52e-13, "direct.fwd.first.chain": 9.2e-08,
    "direct.fwd.first.depth": 1.56e-07, "direct.fwd.first.wide": 0,
    "direct.fwd.last.start": 1.23e-07, "direct.fwd.last.element": 1.84e-11, "direct.fwd.last.channel": 2.36e-12,
    "direct.fwd.last.product": 0, "direct.fwd.last.strided": 0, "direct.fwd.last.chain": 1.91e-07,
    "direct.fwd.last.depth": 2.77e-07, "direct.fwd.last.wide": 1.85e-12,
    "direct.dgrad.first.start": 1.31e-06, "direct.dgrad.first.element": 5.22e-12,
    "direct.dgrad.first.channel": 4.55e-13, "direct.dgrad.first.product": 9.11e-13, "direct.dgrad.first.strided": 0,
    "direct.dgrad.first.chain": 1.36e-07, "direct.dgrad.first.depth": 2.16e-07, "direct.dgrad.first.wide": 0,
    "direct.dgrad.last.start": 2.16e-06, "direct.dgrad.last.element": 1.37e-11, "direct.dgrad.last.channel": 0,
    "direct.dgrad.last.product": 1.04e-12, "direct.dgrad.last.strided": 0, "direct.dgrad.last.chain": 9.28e-08,
    "direct.dgrad.last.depth": 2.62e-07, "direct.dgrad.last.wide": 3.57e-14,
    "direct.wgrad.first.start": 1.3e-06, "direct.wgrad.first.weight": 2.18e-10, "direct.wgrad.first.pixel": 2.87e-09,
    "direct.wgrad.first.row": 9.31e-09, "direct.wgrad.first.product": 1.69e-12, "direct.wgrad.first.wide_in": 0,
    "direct.wgrad.first.wide_out": 0,
    "direct.wgrad.last.start": 0, "direct.wgrad.last.weight": 1.24e-10, "direct.wgrad.last.pixel": 3.27e-09,
    "direct.wgrad.last.row": 1.14e-09, "direct.wgrad.last.product": 0, "direct.wgrad.last.wide_in": 4.13e-12,
    "direct.wgrad.last.wide_out": 2.6e-12,
    "shared.wgrad.start": 1.83e-06, "shared.wgrad.weight": 2.09e-10, "shared.wgrad.image": 6.85e-08,
    "shared.wgrad.pixel": 3.71e-10, "shared.wgrad.tap": 5.12e-11, "shared.wgrad.channel": 2.16e-12,
    "shared.wgrad.last": 5.52e-12, "shared.wgrad.strided": 1.95e-12,
    # Fourier transforms, in seconds for each of the terms of ``fourier_terms``.
    "fourier.fwd.start": 1.76e-05, "fourier.fwd.input": 5.07e-12, "fourier.fwd.filter": 2.41e-12,
    "fourier.fwd.output": 5.07e-12, "fourier.fwd.flip": 7.35e-10, "fourier.fwd.product": 1.86e-13,
    "fourier.fwd.large_filter": 6.57e-12, "fourier.fwd.large_output": 1.47e-11,
    "fourier.dgrad.tile": 1.38e-05, "fourier.dgrad.input": 8.19e-12, "fourier.dgrad.filter": 2.37e-12,
    "fourier.dgrad.output": 6.85e-12, "fourier.dgrad.product": 1.53e-13,
    "winograd.wgrad.start": 8.09e-06, "winograd.wgrad.input": 6.62e-12, "winograd.wgrad.output": 5.14e-12,
    "winograd.wgrad.filter": 9.77e-11, "winograd.wgrad.product": 8.2e-14, "winograd.wgrad.deep": 1.18e-09,
    # Pointwise products of rows on 2 bytes, as cuBLAS runs them: see cost/time/gemm/simt.py for the names.
    "odd1.depth_area": 10090.0, "odd1.depth_s": 2.211e-08, "odd1.dram_frac": 0.3575, "odd1.eff_frac": 0.1811,
    "odd1.exposed_frac": 0.6416, "odd1.half_area": 10490.0, "odd1.l2_frac": 0.5833, "odd1.launch_s": 1.525e-06,
    "odd1.power_frac": 0.9, "odd1.ramp_bytes": 1041000.0, "odd1.ramp_s": 2.484e-06, "odd1.splitk_s": 3e-06,
    "odd1.start_area": 164.6, "odd1.start_s": 5.78e-08, "odd1.store_s": 3.07e-11,
    # And of rows on 4 or 8 bytes.
    "odd2.depth_area": 172900.0, "odd2.depth_s": 7.55e-09, "odd2.dram_frac": 0.4506, "odd2.eff_frac": 0.3847,
    "odd2.exposed_frac": 0.2791, "odd2.half_area": 6546.0, "odd2.l2_frac": 0.7, "odd2.launch_s": 1.117e-06,
    "odd2.power_frac": 0.9, "odd2.ramp_bytes": 1289000.0, "odd2.ramp_s": 5.178e-06, "odd2.splitk_s": 3e-06,
    "odd2.start_area": 69.7, "odd2.start_s": 2.536e-07, "odd2.store_s": 4.137e-11,
    # What cuDNN is known to take, by way and pass: see implicit_gemm.py for the names. Assumed, not fitted: all of
    # `analytic` (six recorded kernels), and splits that stand at 3000 and 0.1 (no recorded kernel of theirs is split).
    "analytic.dgrad.start": 8860, "analytic.dgrad.fill": 302, "analytic.dgrad.tile": 2180, "analytic.dgrad.dram": 1.2,
    "analytic.dgrad.ramp": 4000, "analytic.dgrad.frac": 0.25, "analytic.dgrad.bytes": 45, "analytic.dgrad.step": 180,
    "analytic.dgrad.power": 2.99, "analytic.dgrad.l2": 1.69, "analytic.dgrad.even": 0.05, "analytic.dgrad.odd": 0.1,
    "analytic.dgrad.split": 3000, "analytic.dgrad.split_each": 0.1,
    "analytic.fwd.start": 8860, "analytic.fwd.fill": 302, "analytic.fwd.tile": 2180, "analytic.fwd.dram": 1.2,
    "analytic.fwd.ramp": 4000, "analytic.fwd.frac": 0.25, "analytic.fwd.bytes": 45, "analytic.fwd.step": 180,
    "analytic.fwd.power": 2.99, "analytic.fwd.l2": 1.69, "analytic.fwd.even": 0.05, "analytic.fwd.odd": 0.1,
    "analytic.fwd.split": 3000, "analytic.fwd.split_each": 0.1,
    "atomic.wgrad.start": 2.24e+04, "atomic.wgrad.fill": 301, "atomic.wgrad.tile": 506, "atomic.wgrad.dram": 0.462,
    "atomic.wgrad.ramp": 3730, "atomic.wgrad.frac": 0.696, "atomic.wgrad.bytes": 1e+05, "atomic.wgrad.step": 505,
    "atomic.wgrad.power": 0.833, "atomic.wgrad.l2": 1.39, "atomic.wgrad.even": 0, "atomic.wgrad.odd": 0,
    "atomic.wgrad.split": 0, "atomic.wgrad.split_each": 0,
    "copy.dgrad.start": 5920, "copy.dgrad.fill": 279, "copy.dgrad.tile": 2140, "copy.dgrad.dram": 0.385,
    "copy.dgrad.ramp": 3840, "copy.dgrad.frac": 0.522, "copy.dgrad.bytes": 33.9, "copy.dgrad.step": 180,
    "copy.dgrad.power": 1.58, "copy.dgrad.l2": 4.39, "copy.dgrad.even": 0.0356, "copy.dgrad.odd": 0.0518,
    "copy.dgrad.split": 3000, "copy.dgrad.split_each": 0.1,
    "copy.fwd.start": 5480, "copy.fwd.fill": 145, "copy.fwd.tile": 2560, "copy.fwd.dram": 0.928,
    "copy.fwd.ramp": 7910, "copy.fwd.frac": 0.542, "copy.fwd.bytes": 34.2, "copy.fwd.step": 180,
    "copy.fwd.power": 1.14, "copy.fwd.l2": 29.5, "copy.fwd.even": 0.0382, "copy.fwd.odd": 0.0654,
    "copy.fwd.split": 3000, "copy.fwd.split_each": 0.1,
    "copy.wgrad.start": 6360, "copy.wgrad.fill": 282, "copy.wgrad.tile": 2040, "copy.wgrad.dram": 1.77,
    "copy.wgrad.ramp": 3800, "copy.wgrad.frac": 0.341, "copy.wgrad.bytes": 24.7, "copy.wgrad.step": 180,
    "copy.wgrad.power": 2.07, "copy.wgrad.l2": 1.22, "copy.wgrad.even": 0, "copy.wgrad.odd": 0,
    "copy.wgrad.split": 2570, "copy.wgrad.split_each": 0.105,
    "copy_strided.dgrad.start": 1.12e+04, "copy_strided.dgrad.fill": 300, "copy_strided.dgrad.tile": 7100,
    "copy_strided.dgrad.dram": 1.16, "copy_strided.dgrad.ramp": 4030, "copy_strided.dgrad.frac": 0.494,
    "copy_strided.dgrad.bytes": 27.6, "copy_strided.dgrad.step": 180, "copy_strided.dgrad.power": 4.31,
    "copy_strided.dgrad.l2": 2.31, "copy_strided.dgrad.even": 0.0389, "copy_strided.dgrad.odd": 0.03,
    "copy_strided.dgrad.split": 3000, "copy_strided.dgrad.split_each": 0.1,
    "indexed.fwd.start": 6900, "indexed.fwd.fill": 304, "indexed.fwd.tile": 8200, "indexed.fwd.dram": 0.776,
    "indexed.fwd.ramp": 2940, "indexed.fwd.frac": 0.467, "indexed.fwd.bytes": 1e+05, "indexed.fwd.step": 1000,
    "indexed.fwd.power": 2.9, "indexed.fwd.l2": 1.47, "indexed.fwd.even": 0, "indexed.fwd.odd": 0,
    "indexed.fwd.split": 0, "indexed.fwd.split_each": 0,
    "indexed.wgrad.start": 3370, "indexed.wgrad.fill": 297, "indexed.wgrad.tile": 510, "indexed.wgrad.dram": 0.359,
    "indexed.wgrad.ramp": 3200, "indexed.wgrad.frac": 0.436, "indexed.wgrad.bytes": 1e+05, "indexed.wgrad.step": 1530,
    "indexed.wgrad.power": 0.928, "indexed.wgrad.l2": 1.88, "indexed.wgrad.even": 0, "indexed.wgrad.odd": 0,
    "indexed.wgrad.split": 0, "indexed.wgrad.split_each": 0,
    "plain.fwd.start": 5290, "plain.fwd.fill": 299, "plain.fwd.tile": 4250, "plain.fwd.dram": 0.759,
    "plain.fwd.ramp": 4470, "plain.fwd.frac": 0.675, "plain.fwd.bytes": 95, "plain.fwd.step": 600,
    "plain.fwd.power": 2.28, "plain.fwd.l2": 1.76, "plain.fwd.even": 0.0563, "plain.fwd.odd": 0.0574,
    "plain.fwd.split": 3000, "plain.fwd.split_each": 0.1,
    "plain.wgrad.start": 1.06e+04, "plain.wgrad.fill": 300, "plain.wgrad.tile": 1860, "plain.wgrad.dram": 0.541,
    "plain.wgrad.ramp": 4100, "plain.wgrad.frac": 0.5, "plain.wgrad.bytes": 8.36, "plain.wgrad.step": 180,
    "plain.wgrad.power": 1.7, "plain.wgrad.l2": 1.68, "plain.wgrad.even": 0, "plain.wgrad.odd": 0,
    "plain.wgrad.split": 2000, "plain.wgrad.split_each": 0.125,
    "scatter.dgrad.start": 6250, "scatter.dgrad.fill": 301, "scatter.dgrad.tile": 2.21e+04,
    "scatter.dgrad.dram": 0.32, "scatter.dgrad.ramp": 2980, "scatter.dgrad.frac": 0.601, "scatter.dgrad.bytes": 1e+05,
    "scatter.dgrad.step": 1440, "scatter.dgrad.power": 4.36, "scatter.dgrad.l2": 1.67, "scatter.dgrad.even": 0,
    "scatter.dgrad.odd": 0, "scatter.dgrad.split": 0, "scatter.dgrad.split_each": 0,
    "simt.dgrad.start": 5730, "simt.dgrad.fill": 300, "simt.dgrad.tile": 1.24e+04, "simt.dgrad.dram": 0.621,
    "simt.dgrad.ramp": 1920, "simt.dgrad.frac": 0.369, "simt.dgrad.bytes": 1e+05, "simt.dgrad.step": 1120,
    "simt.dgrad.power": 4.33, "simt.dgrad.l2": 1.57, "simt.dgrad.even": 0, "simt.dgrad.odd": 0, "simt.dgrad.split": 0,
    "simt.dgrad.split_each": 0,
    "simt.fwd.start": 5930, "simt.fwd.fill": 576, "simt.fwd.tile": 5040, "simt.fwd.dram": 0.44, "simt.fwd.ramp": 3070,
    "simt.fwd.frac": 0.631, "simt.fwd.bytes": 1e+05, "simt.fwd.step": 1050, "simt.fwd.power": 2.26,
    "simt.fwd.l2": 0.331, "simt.fwd.even": 0, "simt.fwd.odd": 0, "simt.fwd.split": 0, "simt.fwd.split_each": 0,
    "simt.wgrad.start": 5390, "simt.wgrad.fill": 300, "simt.wgrad.tile": 443, "simt.wgrad.dram": 0.75,
    "simt.wgrad.ramp": 2980, "simt.wgrad.frac": 0.651, "simt.wgrad.bytes": 1e+05, "simt.wgrad.step": 666,
    "simt.wgrad.power": 1.06, "simt.wgrad.l2": 1.85, "simt.wgrad.even": 0, "simt.wgrad.odd": 0, "simt.wgrad.split": 0,
    "simt.wgrad.split_each": 0,
    "tma.dgrad.start": 7930, "tma.dgrad.fill": 3330, "tma.dgrad.tile": 1100, "tma.dgrad.dram": 11.3,
    "tma.dgrad.ramp": 7630, "tma.dgrad.idle": 0.109, "tma.dgrad.even": 0.179, "tma.dgrad.odd": 0.318,
    "tma.dgrad.l2": 1.89, "tma.dgrad.power": 1.15, "tma.dgrad.share": 1.42e+04, "tma.dgrad.share_loop": 1.42,
    "tma.dgrad.frac": 1.96, "tma.dgrad.step": 46, "tma.dgrad.high": 0.00501, "tma.dgrad.wide": 0.00184,
    "tma.fwd.start": 8890, "tma.fwd.fill": 520, "tma.fwd.tile": 1780, "tma.fwd.dram": 1.4, "tma.fwd.ramp": 9990,
    "tma.fwd.idle": 0.0427, "tma.fwd.even": 0.113, "tma.fwd.odd": 0.321, "tma.fwd.l2": 1.16, "tma.fwd.power": 1.79,
    "tma.fwd.share": 1.95e+04, "tma.fwd.share_loop": 1.42, "tma.fwd.frac": 1.43, "tma.fwd.step": 63,
    "tma.fwd.high": 0.00231, "tma.fwd.wide": 0.000502,
    "tma.wgrad.start": 8440, "tma.wgrad.fill": 437, "tma.wgrad.tile": 1370, "tma.wgrad.dram": 1.45,
    "tma.wgrad.ramp": 2.88e+04, "tma.wgrad.idle": 0.0115, "tma.wgrad.even": 0, "tma.wgrad.odd": 0,
    "tma.wgrad.l2": 1.06, "tma.wgrad.power": 2.38, "tma.wgrad.share": 1.95e+04, "tma.wgrad.share_loop": 1.21,
    "tma.wgrad.frac": 1.13, "tma.wgrad.step": 58.5, "tma.wgrad.high": 0.001, "tma.wgrad.wide": 0.0014,
    "tma_strided.dgrad.start": 1.21e+04, "tma_strided.dgrad.fill": 1780, "tma_strided.dgrad.tile": 1860,
    "tma_strided.dgrad.dram": 1.49, "tma_strided.dgrad.ramp": 2.86e+04, "tma_strided.dgrad.idle": 0.542,
    "tma_strided.dgrad.even": 0.152, "tma_strided.dgrad.odd": 0.195, "tma_strided.dgrad.l2": 0.999,
    "tma_strided.dgrad.power": 1.7, "tma_strided.dgrad.share": 1.2e+04, "tma_strided.dgrad.share_loop": 1.2,
    "tma_strided.dgrad.frac": 2.68, "tma_strided.dgrad.step": 236, "tma_strided.dgrad.high": 0.00648,
    "tma_strided.dgrad.wide": 0.00328,
    "vector.fwd.start": 5990, "vector.fwd.fill": 295, "vector.fwd.tile": 4310, "vector.fwd.dram": 0.231,
    "vector.fwd.ramp": 1520, "vector.fwd.frac": 0.343, "vector.fwd.bytes": 1e+05, "vector.fwd.step": 2050,
    "vector.fwd.power": 1.41, "vector.fwd.l2": 2.25, "vector.fwd.even": 0, "vector.fwd.odd": 0, "vector.fwd.split": 0,
    "vector.fwd.split_each": 0,
    "warp.dgrad.start": 6070, "warp.dgrad.fill": 233, "warp.dgrad.tile": 5060, "warp.dgrad.dram": 0.699,
    "warp.dgrad.ramp": 4860, "warp.dgrad.frac": 0.5, "warp.dgrad.bytes": 33.5, "warp.dgrad.step": 180,
    "warp.dgrad.power": 3.06, "warp.dgrad.l2": 2.98, "warp.dgrad.even": 0.0301, "warp.dgrad.odd": 0.141,
    "warp.dgrad.split": 3000, "warp.dgrad.split_each": 0.1,
    "warp.fwd.start": 5590, "warp.fwd.fill": 359, "warp.fwd.tile": 3370, "warp.fwd.dram": 0.465,
    "warp.fwd.ramp": 5940, "warp.fwd.frac": 0.479, "warp.fwd.bytes": 33, "warp.fwd.step": 180, "warp.fwd.power": 2.89,
    "warp.fwd.l2": 3.78, "warp.fwd.even": 0.0719, "warp.fwd.odd": 0.238, "warp.fwd.split": 1.38e+04,
    "warp.fwd.split_each": 0.138,
    "warp.wgrad.start": 5440, "warp.wgrad.fill": 289, "warp.wgrad.tile": 3140, "warp.wgrad.dram": 0.998,
    "warp.wgrad.ramp": 3970, "warp.wgrad.frac": 0.477, "warp.wgrad.bytes": 28.1, "warp.wgrad.step": 180,
    "warp.wgrad.power": 1.63, "warp.wgrad.l2": 3.03, "warp.wgrad.even": 0, "warp.wgrad.odd": 0,
    "warp.wgrad.split": 3.24e+04, "warp.wgrad.split_each": 0.116,
    "warp_strided.dgrad.start": 8490, "warp_strided.dgrad.fill": 319, "warp_strided.dgrad.tile": 7450,
    "warp_strided.dgrad.dram": 1.2, "warp_strided.dgrad.ramp": 4000, "warp_strided.dgrad.frac": 0.475,
    "warp_strided.dgrad.bytes": 33.2, "warp_strided.dgrad.step": 180, "warp_strided.dgrad.power": 4.35,
    "warp_strided.dgrad.l2": 2.38, "warp_strided.dgrad.even": 0.0501, "warp_strided.dgrad.odd": 0.168,
    "warp_strided.dgrad.split": 2.23e+04, "warp_strided.dgrad.split_each": 0.102,
    # several groups to a tile, over one: medians of 620 kernels; tall tiles have over 64 rows
    "packed_fwd_tma": 0.851, "packed_fwd_warp": 0.845, "packed_dgrad_tma": 1.3, "packed_dgrad_warp": 0.82,
    "packed_dgrad_warp_strided": 0.86, "packed_wgrad_tma": 0.906, "packed_wgrad_warp": 0.901, "packed_tall": 1.4,
    # Groups side by side on streams, and the copies around each of them.
    "stream_issue_cycles": 1530.0,  # from one kernel's start to the next one's on another stream
    "stream_start_cycles": 8550.0,  # of a kernel's own time that another kernel hides
    "stream_gap_cycles": 2100.0,  # between two kernels of one stream
    "stream_blocks": 5.64,  # small tiles of several kernels that an SM holds
    # one group's kernel over that of a dense convolution of its size
    "apart_fwd_copy": 0.993, "apart_fwd_analytic": 0.712, "apart_fwd_vector": 0.985, "apart_fwd_indexed": 0.394,
    "apart_fwd_simt": 0.916, "apart_dgrad_copy": 0.93, "apart_dgrad_copy_strided": 0.748, "apart_dgrad_analytic": 1.0,
    "apart_dgrad_scatter": 1.08, "apart_dgrad_simt": 0.613, "apart_wgrad_copy": 0.696, "apart_wgrad_atomic": 0.854,
    "apart_wgrad_simt": 1.0, "apart_wgrad_indexed": 1.0,
    "apart_long": 1.83,  # with filters of over 49 taps (one speech encoder)
    "slice_cycles": 2140.0,  # cutting a group out of channels-last tensors, nothing to move
    "slice_bytes_per_s": 8.67e+11,  # and the rate of it
    "pad_start_cycles": 2980.0,  # widening the filters of a group
    "turn_cycles": 3350.0,  # copying a single-precision tensor from strides to strides
    "turn_element_cycles": 0.116,  # and for an element, all SMs together
    "streams": 2.09,  # groups that run beside each other where cuDNN's choice is not known; 1: nothing does
    "share_init_cycles": 3180.0,  # clearing what SMs that share a tile add up in
    "reduce_cycles": 4000.0,  # adding up the slices of a weight gradient
    "reduce_frac": 0.375,  # and the share of the L2 bandwidth its bytes reach
}
WIDE_SIDE = 7
"""From this filter side on, the TMA kernels are not offered for the forward pass and the weight gradient."""
FOURIER_FLOPS = 1e11
"""From here on, single-precision 3 x 3 passes and input gradients are done by Fourier transforms."""
SHARED_DEPTH = 4500
"""From this depth of the inner loop on, several SMs may share a tile."""
_RAMP_BYTES = 20e6
"""Read traffic at which half of the DRAM ramp has been lost."""


@dataclass(frozen=True, slots=True)
class Conv:
    """A convolution in the terms its kernels see: counts of pixels and taps, whatever the number of dimensions."""

    n: int
    c: int
    o: int
    groups: int
    in_px: int
    out_px: int
    taps: int
    side: int
    stride: int
    rank: int
    channels_last: bool
    dtype: str
    itemsize: float
    width: int  # of the input; that of a square one where only its pixels are known
    pad: int = 0

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.c

    @property
    def pointwise(self) -> bool:
        return self.taps == 1 and self.stride == 1

    @property
    def touched_bytes(self) -> float:
        """Input that the filter reaches: a stride wider than the filter skips the rest."""
        return self.n * min(self.in_px, self.out_px * self.taps) * self.c * self.itemsize

    @property
    def input_bytes(self) -> float:
        return self.n * self.in_px * self.c * self.itemsize

    @property
    def output_bytes(self) -> float:
        return self.n * self.out_px * self.o * self.itemsize

    @property
    def weight_bytes(self) -> float:
        return self.o * (self.c // self.groups) * self.taps * self.itemsize

    @property
    def flops(self) -> float:
        return 2.0 * self.n * self.out_px * self.o * (self.c // self.groups) * self.taps


_SPATIAL = {"conv1d": ("l",), "conv2d": ("h", "w"), "conv3d": ("t", "h", "w")}


def conv_of_call(call: Call, d: dict[str, int]) -> Conv:
    if call.dtype not in ITEMSIZE:
        raise CostError(f"{call.kind}: no convolution time model for dtype {call.dtype!r}")
    try:
        return _flat(call, d) if call.kind == "conv" else _spatial(call, d)
    except KeyError as missing:
        raise CostError(f"{call.kind} needs the dimension {missing}; it has {', '.join(d) or 'none'}") from None


def _flat(call: Call, d: dict[str, int]) -> Conv:
    taps, rank = d["kernel_elems"], max(1, d["spatial_rank"])
    side, wide, out = (round(size ** (1.0 / rank)) for size in (taps, d["in_px"], d["out_px"]))
    pad = max(0, ceil(((out - 1) * d["stride_max"] + side - wide) / 2))  # that of a square image
    return Conv(d["n"], d["c"], d["o"], d["groups"], d["in_px"], d["out_px"], taps, side, d["stride_max"], rank,
                bool(d["nhwc"]), call.dtype, ITEMSIZE[call.dtype], d.get("width", wide), pad)  # fmt: skip


def _spatial(call: Call, d: dict[str, int]) -> Conv:
    names, side, stride = _SPATIAL[call.kind], d["k"], d["stride"]
    pad = d.get("padding", side // 2)
    in_px = out_px = 1
    for name in names:
        in_px *= d[name]
        out_px *= max(0, (d[name] + 2 * pad - side) // stride + 1)
    return Conv(d["n"], d["c"], d["o"], d.get("groups", 1), in_px, out_px, side ** len(names), side, stride, len(names),
                bool(d.get("nhwc", 0)), call.dtype, ITEMSIZE[call.dtype], d[names[-1]], pad)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Site:
    """Where a kernel runs: the chip, the coefficients and how much of the input is already in L2."""

    chip: Chip
    coef: Coef
    warm_frac: float

    def cycles_s(self, cycles: float) -> float:
        return cycles / self.chip.clock_hz

    def dram_s(self, num_bytes: float, frac: str) -> float:
        return num_bytes / (self.coef[frac] * self.chip.dram_bytes_per_s)

    def held(self, num_bytes: float) -> float:
        """Share of just-written bytes that the next kernel still finds in L2."""
        return max(0.0, 1.0 - num_bytes / (self.coef["transform_held"] * self.chip.l2_bytes))

    def ramp_s(self, read_bytes: float, cycles: str) -> float:
        return self.cycles_s(self.coef[cycles] * read_bytes / (read_bytes + _RAMP_BYTES))

    def on_matrix_units(self, conv: Conv) -> bool:
        return conv.dtype != "fp32" and conv.dtype in self.chip.tensor_flops_per_s

    @property
    def tma(self) -> bool:
        return self.chip.arch in ("hopper", "blackwell")  # architectures with TMA


Cost = tuple[float, int]
"""Seconds and number of kernels."""


def sum_costs(*costs: Cost) -> Cost:
    return sum(cost[0] for cost in costs), sum(cost[1] for cost in costs)


def both_costs(a: float, b: float) -> float:
    """The slower of two overlapping activities, a little more when they are equal."""
    return float((a**4 + b**4) ** 0.25)


def padded_channels(channels: int) -> int:
    """Channels as the matrix units take them, in eights."""
    return -(-channels // 8) * 8


def layout_transform(site: Site, n: int, c: int, px: int, itemsize: float, fresh: bool) -> Cost:
    """Channels-first to channels-last, or back for a tensor that the kernel before has just written (``fresh``)."""
    coef = site.coef
    size = n * c * px * itemsize
    held = site.held(size)
    cold = (1.0 - held) if fresh else 1.0 - site.warm_frac
    tile = coef["transform_tile_cycles"] * (1.0 + coef["transform_back"] * cold * fresh)
    busy = site.cycles_s(tile * n * -(-c // 32) * -(-px // 32) / site.chip.num_sms)
    start = coef["transform_start_cycles"] + coef["transform_miss_cycles"] * cold
    return site.cycles_s(start) + both_costs(busy, site.dram_s(size * (cold + 1.0 - held), "transform_dram_frac")), 1


def x_transform(site: Site, conv: Conv, fresh: bool = False) -> Cost:
    return layout_transform(site, conv.n, conv.c, conv.in_px, conv.itemsize, fresh)


def y_transform(site: Site, conv: Conv, fresh: bool = False) -> Cost:
    return layout_transform(site, conv.n, conv.o, conv.out_px, conv.itemsize, fresh)


def w_transform(site: Site, conv: Conv, fresh: bool = False) -> Cost:
    if conv.taps == 1:
        return 0.0, 0
    return layout_transform(site, conv.o, conv.c // conv.groups, conv.taps, conv.itemsize, fresh)


def generic_transform(site: Site, n: int, c: int, px: int) -> Cost:
    """Any strides to any strides, with padding: what groups of odd width need."""
    tiles = n * -(-c // 32) * -(-px // 32)
    busy = site.coef["generic_start_cycles"] + site.coef["generic_tile_cycles"] * tiles / site.chip.num_sms
    return site.cycles_s(busy), 1


def memset_cost(site: Site, num_bytes: float = 0.0) -> Cost:
    return site.cycles_s(site.coef["memset_cycles"]) + num_bytes / site.chip.dram_bytes_per_s, 1


def widened_sum(site: Site, conv: Conv, px: int, channels: int) -> Cost:
    """A channels-last tensor widened to whole eights of channels before a kernel, or cut back after it."""
    if not conv.channels_last or channels % 8 == 0:
        return 0.0, 0
    elements = conv.n * px * padded_channels(channels)
    busy_s = site.cycles_s(site.coef["transform_start_cycles"] + elements * site.coef["pad_cycles"] / site.chip.num_sms)
    return sum_costs((busy_s, 1), memset_cost(site, elements * conv.itemsize))


def odd_filters(site: Site, conv: Conv) -> Cost:
    """Filters whose number does not come in eights are rearranged by the generic transform."""
    if conv.channels_last or conv.o % 8 == 0:
        return 0.0, 0
    elements = conv.o * conv.c * conv.taps
    return site.cycles_s(site.coef["filter_start_cycles"] + elements * site.coef["filter_cycles"]), 1


SMS = 132


@selection
def pass_choice(coef: Coef, group: str) -> dict[str, float]:
    """The coefficients of one pass by one way of computing, such as ``tma.fwd``."""
    start = len(group) + 1
    return {name[start:]: value for name, value in coef.items() if name.startswith(group + ".")}


MEASURED_VECTOR_FLOPS_PER_S = 66.9e12
"""Of the chip whose direct kernels were measured."""
LONG_FILTER = 49
"""Filters with more taps than this (speech encoders' positional ones) run group by group."""


def group_size(conv: Conv) -> int:
    """Channels a group takes in a packed tile: the next power of two that holds its inputs and its outputs."""
    return max(4, 1 << (max(conv.c, conv.o) // conv.groups - 1).bit_length())
