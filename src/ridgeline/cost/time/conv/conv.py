"""Time of convolutions: what cuDNN and ATen launch for a shape, kernel by kernel.

A dense convolution is an implicit GEMM over channels-last tensors: rows are pixels, columns output channels, and the
inner loop walks filter taps and input channels. Tiles quantize the grid, waves quantize the tiles. Tensors that are not
channels-last are transposed before and after by kernels of their own, often as costly as the arithmetic. A pointwise
convolution is a plain GEMM. Single precision runs on the vector units, depthwise filters on stencil kernels, and
groups that no kernel takes whole are run one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, exp
from typing import Any

from ridgeline.cost.calibration import calibration_of
from ridgeline.cost.call import ITEMSIZE, Call, Coef, Time, family, family_of, memory_floor_s, selection
from ridgeline.cost.correction import gemm_attention as residue
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.time.conv.cudnn_choice import Shape, choose
from ridgeline.cost.time.conv.implicit_gemm import (
    CLUSTERED,
    VECTOR,
    Choice,
    Problem,
    clusters_at_once,
    implicit_s,
    is_shared,
    waves_of,
)
from ridgeline.cost.time.gemm import calls as matmul
from ridgeline.cost.time.gemm.simt import COEFFICIENTS, classic_timing
from ridgeline.errors import CostError
from ridgeline.hardware import device

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
    "residue_frac": 1.0,  # share of the factor learned for single kernels that applies (cost/residue.py)
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
    # Pointwise products of rows on 2 bytes, as cuBLAS runs them: see cost/classic.py for the names.
    "odd1.depth_area": 10090.0, "odd1.depth_s": 2.211e-08, "odd1.dram_frac": 0.3575, "odd1.eff_frac": 0.1811,
    "odd1.exposed_frac": 0.6416, "odd1.half_area": 10490.0, "odd1.l2_frac": 0.5833, "odd1.launch_s": 1.525e-06,
    "odd1.power_frac": 0.9, "odd1.ramp_bytes": 1041000.0, "odd1.ramp_s": 2.484e-06, "odd1.splitk_s": 3e-06,
    "odd1.start_area": 164.6, "odd1.start_s": 5.78e-08, "odd1.store_s": 3.07e-11,
    # And of rows on 4 or 8 bytes.
    "odd2.depth_area": 172900.0, "odd2.depth_s": 7.55e-09, "odd2.dram_frac": 0.4506, "odd2.eff_frac": 0.3847,
    "odd2.exposed_frac": 0.2791, "odd2.half_area": 6546.0, "odd2.l2_frac": 0.7, "odd2.launch_s": 1.117e-06,
    "odd2.power_frac": 0.9, "odd2.ramp_bytes": 1289000.0, "odd2.ramp_s": 5.178e-06, "odd2.splitk_s": 3e-06,
    "odd2.start_area": 69.7, "odd2.start_s": 2.536e-07, "odd2.store_s": 4.137e-11,
    # What cuDNN is known to take, by way and pass: see cost/implicit.py for the names. Assumed, not fitted: all of
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

_TMA_ARCHS = ("hopper", "blackwell")
_WIDE_SIDE = 7
"""From this filter side on, the TMA kernels are not offered for the forward pass and the weight gradient."""
_FOURIER_FLOPS = 1e11
"""From here on, single-precision 3 x 3 passes and input gradients are done by Fourier transforms."""
_SHARED_DEPTH = 4500
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


def _conv(call: Call, d: dict[str, int]) -> Conv:
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
        return self.chip.arch in _TMA_ARCHS


Cost = tuple[float, int]
"""Seconds and number of kernels."""


def _sum(*costs: Cost) -> Cost:
    return sum(cost[0] for cost in costs), sum(cost[1] for cost in costs)


def _both(a: float, b: float) -> float:
    """The slower of two overlapping activities, a little more when they are equal."""
    return float((a**4 + b**4) ** 0.25)


def _padded(channels: int) -> int:
    """Channels as the matrix units take them, in eights."""
    return -(-channels // 8) * 8


# Layout transforms


def _transform(site: Site, n: int, c: int, px: int, itemsize: float, fresh: bool) -> Cost:
    """Channels-first to channels-last, or back for a tensor that the kernel before has just written (``fresh``)."""
    coef = site.coef
    size = n * c * px * itemsize
    held = site.held(size)
    cold = (1.0 - held) if fresh else 1.0 - site.warm_frac
    tile = coef["transform_tile_cycles"] * (1.0 + coef["transform_back"] * cold * fresh)
    busy = site.cycles_s(tile * n * -(-c // 32) * -(-px // 32) / site.chip.num_sms)
    start = coef["transform_start_cycles"] + coef["transform_miss_cycles"] * cold
    return site.cycles_s(start) + _both(busy, site.dram_s(size * (cold + 1.0 - held), "transform_dram_frac")), 1


def _x(site: Site, conv: Conv, fresh: bool = False) -> Cost:
    return _transform(site, conv.n, conv.c, conv.in_px, conv.itemsize, fresh)


def _y(site: Site, conv: Conv, fresh: bool = False) -> Cost:
    return _transform(site, conv.n, conv.o, conv.out_px, conv.itemsize, fresh)


def _w(site: Site, conv: Conv, fresh: bool = False) -> Cost:
    if conv.taps == 1:
        return 0.0, 0
    return _transform(site, conv.o, conv.c // conv.groups, conv.taps, conv.itemsize, fresh)


def _generic_transform(site: Site, n: int, c: int, px: int) -> Cost:
    """Any strides to any strides, with padding: what groups of odd width need."""
    tiles = n * -(-c // 32) * -(-px // 32)
    busy = site.coef["generic_start_cycles"] + site.coef["generic_tile_cycles"] * tiles / site.chip.num_sms
    return site.cycles_s(busy), 1


def _memset(site: Site, num_bytes: float = 0.0) -> Cost:
    return site.cycles_s(site.coef["memset_cycles"]) + num_bytes / site.chip.dram_bytes_per_s, 1


def _widened(site: Site, conv: Conv, px: int, channels: int) -> Cost:
    """A channels-last tensor widened to whole eights of channels before a kernel, or cut back after it."""
    if not conv.channels_last or channels % 8 == 0:
        return 0.0, 0
    elements = conv.n * px * _padded(channels)
    busy_s = site.cycles_s(site.coef["transform_start_cycles"] + elements * site.coef["pad_cycles"] / site.chip.num_sms)
    return _sum((busy_s, 1), _memset(site, elements * conv.itemsize))


def _odd_filters(site: Site, conv: Conv) -> Cost:
    """Filters whose number does not come in eights are rearranged by the generic transform."""
    if conv.channels_last or conv.o % 8 == 0:
        return 0.0, 0
    elements = conv.o * conv.c * conv.taps
    return site.cycles_s(site.coef["filter_start_cycles"] + elements * site.coef["filter_cycles"]), 1


# Implicit GEMM on the matrix units


@dataclass(frozen=True, slots=True)
class Loop:
    """An implicit GEMM: rows x columns of output, ``repeat`` times over; taps x channels of inner loop; bytes moved."""

    rows: int
    columns: int
    channels: int
    taps: float
    read_bytes: float
    written_bytes: float
    effort: float = 1.0
    repeat: int = 1
    segment: str = "segment"
    stride: int = 1


Tile = tuple[int, int, int, bool]
"""Rows, columns and depth of a tile, and whether TMA feeds it."""


def _tile(loop: Loop, wide: bool, tma: bool) -> Tile:
    """The tile that the library's heuristic takes most often for a problem of this size."""
    rows, columns, channels = loop.rows, loop.columns, loop.channels
    squares = -(-rows // 128) * -(-columns // 128)
    if wide or not tma or channels < 16:
        return _copy_tile(columns, squares)
    if loop.taps <= 1.0:
        return _single_tap_tile(rows, columns, channels, squares)
    small = -(-rows // 64) * -(-columns // 64)
    if columns <= 32:
        return _column_tile(channels, squares, small)
    if loop.stride > 2 and rows >= 300:
        return _skipping_tile(columns, channels)
    if channels < 64:
        return _shallow_tile(rows, columns, channels, squares, loop.taps in (4, 16))
    if columns <= 64:
        return _narrow_tile(rows, channels)
    if small <= 150:
        return (64, 64, 64, channels >= 128)
    return (64, 128, 64, True) if squares <= 66 else _large_tile(loop, squares)


def _large_tile(loop: Loop, squares: int) -> Tile:
    rows, columns, channels = loop.rows, loop.columns, loop.channels
    if 0 < columns % 128 <= 64 and rows >= 4000:
        return (256, 64, 32, True)
    if squares >= 780 and columns >= 1024 and channels >= 768:
        return (128, 256, 64, True)
    if squares >= 780 and loop.taps * channels >= 1700 and columns >= 384 and (columns <= 512 or channels >= 640):
        return (256, 128, 64, True)
    return (128, 128, 64, True)


def _copy_tile(columns: int, squares: int) -> Tile:
    if columns <= 32:
        return (64, 32, 64, False)
    if squares <= 20:
        return (64, 64, 64, False)
    return (128, 128, 32, False) if columns > 64 else (256, 64, 32, False)


def _single_tap_tile(rows: int, columns: int, channels: int, squares: int) -> Tile:
    if channels <= 48:
        return (64, 128, 32 if channels <= 32 else 64, True) if squares > 700 else (64, 64, 64, False)
    return (128, 128, 64, True) if squares > 16 or (channels >= 1024 and rows > 500) else (64, 64, 64, False)


def _skipping_tile(columns: int, channels: int) -> Tile:
    """Strides of three and more: no small tiles."""
    if channels < 64:
        return (128, 128, 32, True)
    if columns <= 64:
        return (256, 64, 64, True)
    return (256, 128, 64, True) if channels >= 320 and columns >= 384 else (128, 128, 64, True)


def _column_tile(channels: int, squares: int, small: int) -> Tile:
    if channels < 64:
        return (64, 64, 32, False) if squares <= 60 else (128, 32, 32, False)
    return (64, 64, 64, True) if small <= 132 else (64, 32, 64, False)


def _narrow_tile(rows: int, channels: int) -> Tile:
    if rows <= 24000:
        return (64, 64, 64, channels >= 128)
    return (256, 64, 32, True) if channels >= 128 else (128, 64, 64, True)


def _shallow_tile(rows: int, columns: int, channels: int, squares: int, even: bool) -> Tile:
    if even and columns > 64 and squares > 32:
        return (128, 128, 64, True)
    if squares <= 32:
        return (64, 64, 64 if channels > 24 and columns > 64 else 32, False)
    if squares <= 200 or rows <= 14000:
        return (64, 128 if columns > 64 else 64, 32, False)
    return (128, 128, 32, True) if columns > 64 and channels <= 32 else (256, 64, 32, True)


def _loop_s(site: Site, loop: Loop, tile: Tile, dtype: str, segmented: bool = False) -> float:
    """Seconds of one implicit GEMM with a given tile; ``segmented`` lets several SMs share a tile's inner loop."""
    coef, chip = site.coef, site.chip
    high, wide, deep, tma = tile
    way = "tma" if tma else "copy"
    frac = coef[way + "_frac" if site.tma else "copy_native_frac"]
    peak_macs = chip.tensor_flops_per_s[dtype] / (2.0 * chip.num_sms * chip.clock_hz)
    steps = loop.taps * -(-loop.channels // deep)
    step_bytes = (high + wide) * deep * ITEMSIZE[dtype]
    step = max(high * wide * deep / (peak_macs * frac), step_bytes / coef[way + "_bytes_per_cycle"])
    if not tma:
        step = max(step, coef["copy_step_cycles"])
    step *= loop.effort
    if tma and loop.channels % 32 and loop.channels % deep:
        step *= 1.0 + coef["tma_ragged"]
    tiles = -(-loop.rows // high) * -(-loop.columns // wide) * loop.repeat
    area = high * wide / 16384.0
    start, per_sm = coef[way + "_start_cycles"], float(-(-tiles // chip.num_sms))
    if tma:
        start += coef["tma_fill_cycles"] * area
    if segmented:
        start += coef[loop.segment + "_cycles"]
        per_sm = max(tiles / chip.num_sms, 1.0 / max(steps, 1.0)) * coef[loop.segment + "_loop"]
    busy = site.cycles_s(per_sm * (steps * step + coef[way + "_tile_cycles"] * area))
    cache_s = tiles * steps * step_bytes / (coef["loop_l2_frac"] * chip.l2_bytes_per_s)
    memory_s = site.dram_s(loop.read_bytes + loop.written_bytes, "loop_dram_frac")
    memory_s += site.ramp_s(loop.read_bytes, "ramp_cycles")
    return site.cycles_s(start) + _both(max(busy, cache_s), memory_s)


def _gemm_loop(site: Site, loop: Loop, tile: Tile, dtype: str, splittable: bool) -> Cost:
    """One kernel, or the variant that shares tiles between SMs where the library would gain by it."""
    plain = _loop_s(site, loop, tile, dtype), 1
    if tile[3] and loop.repeat == 1 and -(-loop.rows // tile[0]) * -(-loop.columns // tile[1]) > 2 * site.chip.num_sms:
        plain = _sum(plain, _memset(site))  # the counter from which a persistent grid draws its tiles
    if not splittable or loop.taps * loop.channels < _SHARED_DEPTH:
        return plain
    return min(plain, (_loop_s(site, loop, tile, dtype, True), 2))


def _cold(site: Site, conv: Conv, num_bytes: float) -> float:
    """Bytes of an operand that come from DRAM: transforms leave channels-first operands in L2."""
    return num_bytes * (1.0 - (site.warm_frac if conv.channels_last else site.held(num_bytes)))


def _forward_loop(site: Site, conv: Conv) -> Cost:
    read = _cold(site, conv, conv.touched_bytes) + _cold(site, conv, conv.weight_bytes)
    loop = Loop(conv.n * conv.out_px, conv.o, _padded(conv.c), conv.taps, read, conv.output_bytes, stride=conv.stride)
    tile = _tile(loop, conv.side >= _WIDE_SIDE, site.tma)
    return _gemm_loop(site, loop, tile, conv.dtype, tile[3] and conv.stride <= 2)


def _input_grad_loop(site: Site, conv: Conv) -> Cost:
    """Rows are input pixels; under a stride each of them meets only its share of the taps, in all but small kernels."""
    rows, columns, channels = conv.n * conv.in_px, _padded(conv.c), _padded(conv.o)
    read = _cold(site, conv, conv.output_bytes) + _cold(site, conv, conv.weight_bytes)
    if conv.stride > 1 and conv.taps > 1 and -(-rows // 128) * -(-columns // 128) <= 24:
        loop = Loop(rows, columns, channels, conv.taps, read, conv.input_bytes, site.coef["small_grad"])
        return _loop_s(site, loop, (64, 64, 64, False), conv.dtype), 1
    share = conv.stride**conv.rank if conv.stride > 1 else 1
    effort = site.coef["strided_grad"] if conv.stride > 1 else 1.0
    loop = Loop(rows, columns, channels, conv.taps / share, read, conv.input_bytes, effort)
    tile = _input_grad_tile(site, conv, loop)
    return _gemm_loop(site, loop, tile, conv.dtype, tile[3])


def _input_grad_tile(site: Site, conv: Conv, loop: Loop) -> Tile:
    if conv.stride > 2:
        return (128, 64, 64, False)
    if loop.channels <= 32 and loop.columns >= 384:
        return _flat_tile(loop)
    if loop.columns <= 32 and loop.channels >= 64 and loop.rows >= 80_000 and site.tma:
        return (256, 64, 32, True)
    return _tile(loop, False, site.tma)


def _flat_tile(loop: Loop) -> Tile:
    """Many input channels from few output channels."""
    if -(-loop.rows // 128) * -(-loop.columns // 128) <= 32:
        return (64, 64, 32, False)
    return (128, 64, 32 if loop.rows <= 60_000 else 64, False)


def _weight_grad_loop(site: Site, conv: Conv) -> Cost:
    """Rows are output channels, columns taps x input channels, the inner loop runs over all output pixels."""
    read = _cold(site, conv, conv.touched_bytes) + _cold(site, conv, conv.output_bytes)
    channels = _padded(conv.c)
    tile = _weight_tile(conv, site.tma and conv.side < _WIDE_SIDE)
    effort = site.coef["weight_grad"] if tile[3] else 1.0
    columns, repeat = (channels, conv.taps) if tile[3] else (channels * conv.taps, 1)
    loop = Loop(conv.o, columns, conv.n * conv.out_px, 1.0, read, conv.weight_bytes, effort, repeat,
                "weight_segment")  # fmt: skip
    return _gemm_loop(site, loop, tile, conv.dtype, True)


def _weight_tile(conv: Conv, tma: bool) -> Tile:
    """Weight gradients take wide tiles where there are many filters; short loops take the kernels that start fast."""
    columns, pixels = conv.c * conv.taps, conv.n * conv.out_px
    if not tma or pixels <= 128:
        return (256, 64, 32, False) if conv.o > 64 else (64, 64, 64, False)
    if pixels <= 1000 and conv.o * columns <= 800_000:
        return (64, 32, 64, False)
    if conv.o >= 256 and -(-conv.o // 128) * -(-columns // 128) >= 400:
        return (256, 128, 64, True)
    return (64 if conv.o <= 64 else 128, 64 if columns <= 800 or conv.c <= 96 else 128, 64, True)


# Kernels that cuDNN's heuristic is known to take


_LEARNED_ARCH, _MEASURED = "hopper", "h200"
_SMS = 132
_TILED = ("tma", "tma_strided", "copy", "copy_strided", "analytic", "warp", "warp_strided", "plain")
_SKIPPING = ("tma_strided", "copy", "copy_strided", "warp_strided")
"""Input gradients that visit, under a stride, only the taps which meet a pixel."""


@selection
def _pass(coef: Coef, group: str) -> dict[str, float]:
    """The coefficients of one pass by one way of computing, such as ``tma.fwd``."""
    start = len(group) + 1
    return {name[start:]: value for name, value in coef.items() if name.startswith(group + ".")}


_WIDEST_ASKED = 11
"""Side of the widest filters that the heuristic was asked about; the patches of vision transformers are wider."""


def _chosen(site: Site, conv: Conv, op: str) -> list[Choice]:
    """What cuDNN takes for a pass, where its heuristic has been asked: what each tree of its answers says."""
    if site.chip.arch != _LEARNED_ARCH or conv.dtype not in ("bf16", "fp16", "tf32", "fp32"):
        return []
    found = choose(Shape(op, conv.dtype, conv.channels_last, conv.n, conv.c, conv.o, conv.groups, conv.taps, conv.side,
                         conv.stride, conv.pad, max(1, conv.in_px // conv.width), conv.width, conv.out_px))  # fmt: skip
    patch = conv.side > _WIDEST_ASKED and conv.groups == 1 and conv.rank == 2
    return [Choice("copy", 128, 128, 32) if patch and one.way in ("indexed", "vector") else one for one in found]


_SAY = (3.0, 1.0, 1.0, 1.0)
"""Weight of the trees' votes: the first grew from far more answers (least error where 7,200 answers judge)."""


def _likely(costs: Sequence[Cost | None]) -> Cost | None:
    """Of what several trees say, the time that is missed least on average, as a share of the time that passes.

    That is the median with each time weighing its inverse: told twice what passes, a call is off by all of it, told
    half of it by a half.
    """
    known = sorted((cost, say / cost[0]) for cost, say in zip(costs, _SAY, strict=False) if cost is not None)
    half, seen = 0.5 * sum(weight for _, weight in known), 0.0
    for cost, weight in known:
        seen += weight
        if seen >= half:
            return cost
    return None


def _problem(site: Site, conv: Conv, choice: Choice, op: str) -> Problem:
    """The implicit GEMM of a pass: rows are pixels, or output channels for the weight gradient."""
    x, y, w = (_cold(site, conv, size) for size in (conv.touched_bytes, conv.output_bytes, conv.weight_bytes))
    wide, size = _padded(conv.c), conv.itemsize
    if op == "fwd":
        return Problem(conv.n * conv.out_px, conv.o, wide, conv.taps, x + w, conv.output_bytes, size)
    if op == "dgrad":
        share = conv.stride**conv.rank if choice.way in _SKIPPING else 1
        return Problem(conv.n * conv.in_px, wide, _padded(conv.o), conv.taps / share, y + w, conv.input_bytes, size)
    columns, repeat = (wide, conv.taps) if choice.way in CLUSTERED else (wide * conv.taps, 1)
    return Problem(conv.o, columns, conv.n * conv.out_px, 1.0, x + y, conv.weight_bytes, size, repeat)


def kernel_features(conv: Conv, choice: Choice, problem: Problem) -> list[float]:
    """A kernel's problem and choice, as the factor learned for it asks for them; nothing of what is warm."""
    high, wide, pixels, inner = max(1, choice.rows), max(1, choice.columns), conv.n * conv.out_px, conv.c * conv.taps
    tiles = -(-problem.rows // high) * -(-problem.columns // wide) * problem.repeat * choice.split
    work = problem.rows * problem.columns * problem.channels * problem.taps * problem.repeat
    return [float(conv.dtype == "tf32"), float(conv.channels_last), conv.n, conv.c, conv.o, conv.taps, conv.side,
            conv.stride, conv.out_px, conv.in_px, pixels, conv.n * conv.in_px, inner, conv.o * conv.taps,
            pixels * inner, pixels * conv.o, problem.rows, problem.columns, problem.channels,
            problem.channels * problem.taps, work, choice.rows, choice.columns, choice.depth,
            choice.cluster_rows * choice.cluster_columns, choice.split, tiles, tiles / _SMS, tiles / _SMS % 1.0,
            problem.rows % high, problem.columns % wide, problem.channels % 64,
            *_grid_features(conv, choice, problem)]  # fmt: skip


def _grid_features(conv: Conv, choice: Choice, problem: Problem) -> list[float]:
    """How tiles lie in clusters, and clusters in waves."""
    high, wide = max(1, choice.rows), max(1, choice.columns)
    down, across = -(-problem.rows // high), -(-problem.columns // wide) * problem.repeat
    steps = problem.taps * -(-problem.channels // max(1, choice.depth))
    at_once = clusters_at_once(_SMS, choice.cluster_rows * choice.cluster_columns)
    waves = -(-down // choice.cluster_rows) * -(-across // choice.cluster_columns) / at_once
    return [choice.cluster_rows, choice.cluster_columns, float(choice.shared), waves, waves % 1.0, -(-waves // 1.0),
            float(is_shared(choice, waves, steps)), steps, down, across, down % choice.cluster_rows,
            across % choice.cluster_columns, problem.rows * problem.columns / (down * across * high * wide),
            float(conv.dtype == "fp16")]  # fmt: skip


def _left_over(site: Site, conv: Conv, choice: Choice, op: str, problem: Problem) -> float:
    """What a kernel takes over what its structure says, where that was learned: on the measured architecture."""
    share = site.coef["residue_frac"]
    if not share or conv.groups > 1 or site.chip.arch != _LEARNED_ARCH:
        return 1.0
    trees = residue.kernel_trees(f"{choice.way}.{op}")
    return exp(share * residue.logs(trees, [kernel_features(conv, choice, problem)])[0]) if trees else 1.0


def _kernel(site: Site, conv: Conv, choice: Choice, op: str, problem: Problem) -> Cost:
    """The kernel itself with what it needs cleared before and added up after."""
    coef = _pass(site.coef, f"{choice.way}.{op}")
    main = implicit_s(site.chip, coef, problem, choice, conv.dtype) * _left_over(site, conv, choice, op, problem), 1
    if choice.way in CLUSTERED:
        waves, steps = waves_of(site.chip, problem, choice), problem.taps * -(-problem.channels // choice.depth)
        if is_shared(choice, waves, steps):
            return _sum((site.cycles_s(site.coef["share_init_cycles"]), 1), main)
        return _sum(_memset(site), main) if waves > 2.0 else main
    if choice.split == 1:
        return main
    if choice.way == "copy" and op == "wgrad":
        partial = choice.split * problem.rows * problem.columns * 4.0
        added_s = partial / (site.coef["reduce_frac"] * site.chip.l2_bytes_per_s)
        return _sum(_memset(site), main, (site.cycles_s(site.coef["reduce_cycles"]) + added_s, 1))
    return _sum(_memset(site), main)


def _tiles(site: Site, conv: Conv, choice: Choice, op: str) -> Cost:
    """A pass by tiles over channels-last tensors, between the transforms that make and unmake them."""
    main = _kernel(site, conv, choice, op, _problem(site, conv, choice, op))
    if not conv.channels_last:
        order = {"fwd": (_x, _w, _y), "dgrad": (_w, _y, _x), "wgrad": (_x, _y, _w)}[op]
        main = _sum(order[0](site, conv), order[1](site, conv), main, order[2](site, conv, fresh=True))
    if choice.way == "plain":
        return main
    widened = _sum(_widened(site, conv, conv.in_px, conv.c), _widened(site, conv, conv.out_px, conv.o))
    if op == "dgrad" and choice.way == "copy" and conv.stride > 1:
        main = _sum(main, (conv.input_bytes / site.coef["fold_bytes_per_s"], 1))
    odd = _odd_filters(site, conv) if op != "wgrad" else (0.0, 0)
    num_cleared = int(bool(conv.c % 8 or conv.o % 8)) if conv.channels_last else 2 * (conv.c % 8 > 0)
    return _sum(main, widened, odd, *[_memset(site)] * num_cleared)


_VECTOR_TILES = {"vector.fwd": (64, 32), "indexed.fwd": (256, 64), "scatter.dgrad": (64, 64), "atomic.wgrad": (32, 32),
                 "indexed.wgrad": (128, 32)}  # fmt: skip
"""Tiles of the older kernels of the vector units that suit their recorded times best."""
_VECTOR_DEPTH, _FEWEST = 8, 264
"""Depth of their steps, and blocks below which a weight gradient's inner loop is sliced."""


def _vector_problem(site: Site, conv: Conv, choice: Choice, op: str) -> Problem:
    """The same on vector units, where taps and channels make one inner loop and nothing is padded."""
    cold, out, inner = 1.0 - site.warm_frac, conv.n * conv.out_px, conv.c * conv.taps
    x, y, w = conv.touched_bytes, conv.output_bytes, conv.weight_bytes
    if op == "fwd":
        return Problem(out, conv.o, inner, 1.0, cold * (x + w), y, conv.itemsize)
    if op == "wgrad":
        return Problem(conv.o, inner, out, 1.0, cold * (x + y), w, conv.itemsize)
    deep = conv.o * conv.taps
    rows, columns, depth = (out, inner, conv.o) if choice.way == "scatter" else (conv.n * conv.in_px, conv.c, deep)
    return Problem(rows, columns, depth, 1.0, cold * (y + w), conv.input_bytes, conv.itemsize)


def _vector_choice(site: Site, conv: Conv, choice: Choice, op: str) -> tuple[Choice, Problem]:
    """The choice with its tile and slices, and what it works on."""
    group, problem = f"{choice.way}.{op}", _vector_problem(site, conv, choice, op)
    rows, columns = _VECTOR_TILES.get(group) or (choice.rows, choice.columns)
    split = 1
    if group in ("atomic.wgrad", "indexed.wgrad"):
        tiles = -(-problem.rows // rows) * -(-problem.columns // columns)
        split = max(1, min(-(-problem.channels // 256), -(-_FEWEST // tiles)))
    return Choice(choice.way, rows, columns, _VECTOR_DEPTH, split=split), problem


def _vector_kernel(site: Site, conv: Conv, choice: Choice, op: str) -> Cost:
    taken, problem = _vector_choice(site, conv, choice, op)
    alone_s = implicit_s(site.chip, _pass(site.coef, f"{choice.way}.{op}"), problem, taken, conv.dtype)
    main = alone_s * _left_over(site, conv, taken, op, problem), 1
    if choice.way == "scatter":
        return _sum(_memset(site, conv.input_bytes), main)
    return _sum(_memset(site), main) if taken.split > 1 else main


def _vector_way(site: Site, conv: Conv, choice: Choice, op: str) -> Cost:
    """A pass on the vector units, with the transforms to the layout it is written for."""
    main = _vector_kernel(site, conv, choice, op)
    as_first = op != "wgrad" and choice.way in ("simt", "indexed", "scatter")
    as_last = op == "wgrad" and choice.way == "simt"
    if (as_first and conv.channels_last) or (as_last and not conv.channels_last):
        order = {"fwd": (_x, _w, _y), "dgrad": (_w, _y, _x), "wgrad": (_x, _y, _w)}[op]
        return _sum(order[0](site, conv), order[1](site, conv), main, order[2](site, conv, fresh=True))
    return main


def _block(choice: Choice, op: str) -> int:
    """Channels of a tile into which narrow groups are packed, as many as fit."""
    return min(choice.rows, choice.columns) if op == "wgrad" else choice.columns


def _group_problem(site: Site, conv: Conv, choice: Choice, op: str) -> Problem:
    """All groups in one kernel: several to a tile where they are narrow, else each in its own tiles."""
    size, block = _group_size(conv), _block(choice, op)
    whole = _problem(site, conv, choice, op)
    if size <= block:
        blocks = -(-conv.groups // (block // size))
        if op == "wgrad":
            return replace(whole, rows=block, columns=block, repeat=blocks * conv.taps)
        return replace(whole, columns=block, channels=block, repeat=blocks)
    wide, tall = _padded(conv.c // conv.groups), _padded(conv.o // conv.groups)
    if op == "wgrad":
        return replace(whole, rows=tall, columns=wide, repeat=conv.groups * conv.taps)
    columns, channels = (tall, wide) if op == "fwd" else (wide, tall)
    return replace(whole, columns=columns, channels=channels, repeat=conv.groups)


def _joint_groups(site: Site, conv: Conv, choice: Choice, op: str) -> Cost:
    """All groups in one kernel, between the transforms that bring them to its width."""
    wide, tall, size = conv.c // conv.groups, conv.o // conv.groups, _group_size(conv)
    seconds, kernels = _kernel(site, conv, choice, op, _group_problem(site, conv, choice, op))
    if size < _block(choice, op):
        tall_tile = op != "wgrad" and choice.rows > 64
        seconds *= site.coef.get("packed_tall" if tall_tile else f"packed_{op}_{choice.way}", 1.0)
    return _sum(_group_transforms(site, conv, wide == size, tall == size), (seconds, kernels))


_CROWDED = 0.45
"""What is added to the duration of a kernel that fills the chip by those beside it."""
_STREAMS = 8
"""Groups that the library puts side by side, each on a stream of its own (379 recorded timelines)."""


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel of one group: its seconds alone, and the share of the chip that its blocks fill."""

    seconds: float
    fill: float = 1.0


def _side_by_side(site: Site, steps: Sequence[Step], groups: int) -> Cost:
    """Every group's kernels, eight groups at a time, step by step: one beside another as far as the chip takes them in.

    Told the kernels' own durations, the span of 101 recorded loops is met within 13 %.
    """
    if site.coef["streams"] == 1.0:
        return groups * sum(step.seconds * (1.0 + _CROWDED * step.fill) for step in steps), groups * len(steps)
    least_s, start_s = site.cycles_s(site.coef["stream_issue_cycles"]), site.cycles_s(site.coef["stream_start_cycles"])
    gap_s, total_s = site.cycles_s(site.coef["stream_gap_cycles"]), 0.0
    rounds, left = divmod(groups, _STREAMS)
    for step in steps:
        issue_s = max(least_s, step.fill * (step.seconds - start_s))
        total_s += rounds * (step.seconds + max(gap_s, (_STREAMS - 1) * issue_s))
        total_s += step.seconds + max(gap_s, (left - 1) * issue_s) if left else 0.0
    return total_s, groups * len(steps)


def _filled(site: Site, tiles: int, area: float) -> float:
    """Share of the chip that a kernel's tiles fill, small ones several to an SM."""
    beside = max(1.0, min(site.coef["stream_blocks"], 32768.0 / area))
    return min(1.0, tiles / (beside * site.chip.num_sms))


def _spread(site: Site, n: int, channels: int, px: int) -> float:
    """The same for a copy, whose blocks move 32 by 32 elements."""
    return min(1.0, n * -(-channels // 32) * -(-px // 32) / (4.0 * site.chip.num_sms))


def _is_odd(conv: Conv, channels: int) -> bool:
    return channels % (8 if conv.itemsize <= 2 else 4) > 0


def _cut_out(site: Site, one: Conv, channels: int, px: int) -> Step:
    """A group's channels cut out of a channels-last tensor, or put back, where they come in whole eights."""
    size = one.n * px * channels * one.itemsize
    return Step(site.cycles_s(site.coef["slice_cycles"]) + size / site.coef["slice_bytes_per_s"])


def _rearranged(site: Site, n: int, channels: int, px: int) -> Step:
    """The same where they do not, by the transform from any strides to any: few channels leave its tiles empty."""
    start_s, full = site.cycles_s(site.coef["generic_start_cycles"]), channels / (32.0 * -(-channels // 32))
    busy_s = _generic_transform(site, n, channels, px)[0] - start_s
    return Step(start_s + busy_s * (0.08 + 0.92 * full), max(0.5, _spread(site, n, channels, px)))


def _tensor_steps(site: Site, conv: Conv, op: str) -> list[Step]:
    """What brings a group's tensors to the kernel and its result back, as 640 recorded loops have it."""
    one = _one_group(conv)
    odd_in, odd_out = _is_odd(conv, one.c), _is_odd(conv, one.o)
    odd = odd_in or odd_out
    memset = Step(_memset(site)[0], 0.1)
    if conv.channels_last:
        steps = [(_rearranged(site, one.n, c, px) if bad else _cut_out(site, one, c, px))
                 for c, px, bad in ((one.c, one.in_px, odd_in), (one.o, one.out_px, odd_out))]  # fmt: skip
        if odd:
            padded = Step(site.cycles_s(site.coef["pad_start_cycles"]), 0.1)
            steps.append(padded if conv.taps > 1 else _rearranged(site, one.o, one.c, 1))
    else:
        steps = [Step(_x(site, one)[0]), Step(_y(site, one, fresh=op == "fwd")[0])]
        if odd_out and op != "wgrad":
            steps.append(_rearranged(site, one.o, one.c, one.taps))
        elif conv.taps > 1 or odd:
            steps.append(Step(_transform(site, one.o, one.c, one.taps, one.itemsize, op == "wgrad")[0], 0.2))
    num_cleared = {"fwd": 2 if odd_in else int(odd_out), "dgrad": 2 if odd_out else int(odd_in),
                   "wgrad": int(odd_in) + int(odd_out)}[op]  # fmt: skip
    return steps + [memset] * num_cleared


def _apart_groups(site: Site, conv: Conv, choice: Choice, op: str) -> Cost:
    """One group beside another: each is cut out or transposed, computed, and put back."""
    one = _one_group(conv)
    problem = _problem(site, one, choice, op)
    seconds, kernels = _kernel(site, one, choice, op, problem)
    tiles = -(-problem.rows // choice.rows) * -(-problem.columns // choice.columns) * choice.split
    small = Step(_memset(site)[0], 0.1)
    name = "apart_long" if conv.taps > _LONG_FILTER else f"apart_{op}_{choice.way}"
    main_s = (seconds - (kernels - 1) * small.seconds) * site.coef.get(name, 1.0)
    steps = [Step(main_s, _filled(site, tiles, choice.rows * choice.columns))]
    steps += [small] * (kernels - 1) + _tensor_steps(site, conv, op)
    return _side_by_side(site, steps, conv.groups)


def _turned(site: Site, one: Conv, channels: int, px: int) -> Step:
    """Single-precision tensors of one group, copied between strides an element a thread."""
    cycles = site.coef["turn_cycles"] + one.n * px * channels * site.coef["turn_element_cycles"]
    return Step(site.cycles_s(cycles), _spread(site, one.n, channels, px))


def _vector_apart(site: Site, conv: Conv, choice: Choice, op: str) -> Cost:
    """One group beside another on the vector units."""
    one = _one_group(conv)
    taken, problem = _vector_choice(site, one, choice, op)
    seconds, kernels = _vector_kernel(site, one, choice, op)
    tiles = -(-problem.rows // taken.rows) * -(-problem.columns // taken.columns) * taken.split
    small = Step(_memset(site)[0], 0.1)
    main_s = (seconds - (kernels - 1) * small.seconds) * site.coef.get(f"apart_{op}_{choice.way}", 1.0)
    steps = [Step(main_s, _filled(site, tiles, taken.rows * taken.columns))]
    steps += [small] * (kernels - 1) + _vector_steps(site, conv, choice, op)
    return _side_by_side(site, steps, conv.groups)


def _vector_steps(site: Site, conv: Conv, choice: Choice, op: str) -> list[Step]:
    """Copies around the vector kernels: tensors of the other layout, or of the channels of one group."""
    one = _one_group(conv)
    moved = [Step(_x(site, one)[0]), Step(_y(site, one)[0])]
    filters = Step(_transform(site, one.o, one.c, one.taps, one.itemsize, op == "wgrad")[0], 0.2)
    if op == "wgrad":
        if choice.way == "simt":
            return [*moved, filters]
        return [_cut_out(site, one, one.c, one.in_px), _cut_out(site, one, one.o, one.out_px)] * conv.channels_last
    if choice.way == "vector":
        return []
    if conv.channels_last:
        return [*moved, filters] if conv.taps > 1 and choice.way != "indexed" else moved
    if choice.way == "simt":
        return [_turned(site, one, one.c, one.in_px), _turned(site, one, one.o, one.out_px)]
    return [Step(_memset(site)[0], 0.1)] if choice.way == "indexed" else []


def _beside(site: Site, groups: int, tiles: int) -> float:
    """How many groups run beside each other: the library puts them on several streams, where a chip has room."""
    room = 2.0 * site.chip.num_sms / max(1, tiles)
    return max(1.0, min(float(groups), site.coef["streams"], room))


_WIDEST_JOINT = 256
"""Channels of a group beyond which no kernel takes all groups (30 of 30 recordings, and 2 of 700 below)."""


def _groups_by_choice(site: Site, conv: Conv, op: str) -> Cost | None:
    """A pass in groups by the kernel that cuDNN is known to take; None where that is not known."""
    return _likely([_groups_by(site, conv, op, choice) for choice in _chosen(site, conv, op)])


def _groups_by(site: Site, conv: Conv, op: str, choice: Choice) -> Cost | None:
    """The same told the choice."""
    if choice.way == "shared":
        return _shared_weight_grad(site, conv)
    if choice.way == "direct":
        return _direct_groups(site, conv, op)
    if choice.way in _TILED and site.on_matrix_units(conv):
        wide = max(conv.c, conv.o) // conv.groups > _WIDEST_JOINT
        joint = choice.way not in ("copy", "copy_strided", "analytic") and not wide
        return (_joint_groups if joint else _apart_groups)(site, conv, choice, op)
    if choice.way in ("fourier", "winograd"):
        return _saving_apart(site, conv, choice, op)
    if choice.way not in VECTOR:
        return None
    return _vector_apart(site, conv, choice, op)


def _saving_apart(site: Site, conv: Conv, choice: Choice, op: str) -> Cost:
    """One group beside another by a way that saves multiplications."""
    one = replace(_one_group(conv), channels_last=False)
    seconds, kernels = _saved(site, one, choice, op)
    moved = _vector_steps(site, conv, Choice("simt"), "fwd") if conv.channels_last else []
    return _side_by_side(site, [Step(seconds / kernels)] * kernels + moved, conv.groups)


# Pointwise convolutions

_GEMM_TILES = ((64, 32), (64, 64), (128, 128), (128, 256))


@dataclass(frozen=True, slots=True)
class Product:
    """``batch`` products of m x k by k x n, the bytes they move, and whether several SMs may share an inner loop."""

    batch: int
    m: int
    n: int
    k: int
    read_bytes: float
    written_bytes: float
    split: bool = False


def _gemm_s(site: Site, product: Product, dtype: str, unaligned: bool = False) -> float:
    """Seconds of a GEMM: the best tile, or the bytes."""
    coef, chip = site.coef, site.chip
    frac = coef["gemm_odd_frac" if unaligned else "gemm_frac"]
    rate = frac * chip.tensor_flops_per_s[dtype] / (2.0 * chip.num_sms * chip.clock_hz)
    item_per_cycle = ITEMSIZE[dtype] / coef["gemm_bytes_per_cycle"]
    best, steps = 1e30, -(-product.k // 64)
    for high, wide in _GEMM_TILES:
        step = max(high * wide * 64 / rate, (high + wide) * 64 * item_per_cycle) + coef["gemm_step_cycles"]
        waves = product.batch * -(-product.m // high) * -(-product.n // wide) / chip.num_sms
        shared = max(steps * waves, min(steps, coef["gemm_split_depth"] / 64.0))
        passes = shared if product.split else steps * ceil(waves)
        best = min(best, passes * step)
    memory = site.dram_s(product.read_bytes + product.written_bytes, "gemm_dram_frac")
    memory = memory * (coef["gemm_odd"] if unaligned else 1.0) + site.ramp_s(product.read_bytes, "gemm_ramp_cycles")
    return site.cycles_s(coef["gemm_start_cycles"]) + float((site.cycles_s(best) ** 3 + memory**3) ** (1.0 / 3.0))


@lru_cache(maxsize=16)
def _product_coef(dtype: str, ramp: float) -> Coef:
    """What products were fitted to where convolutions were, with this share of their DRAM ramp."""
    coef = calibration_of(device(_MEASURED)).coef(family_of("gemm"), Call("gemm", dtype))[0]
    return {name: value * ramp if name.endswith("ramp_s") else value for name, value in coef.items()}


def product_of(conv: Conv, op: str) -> tuple[str, dict[str, Any]]:
    """The library's product of a pointwise pass, as a call: one for each image where channels come first.

    Images whose rows are aligned take as long as one product of all their pixels: the filters are read once.
    """
    px, rows = conv.in_px, conv.n * conv.in_px
    if conv.channels_last:
        m, n, k, layout = {"fwd": (rows, conv.o, conv.c, "nt"), "dgrad": (rows, conv.c, conv.o, "nn"),
                           "wgrad": (conv.o, conv.c, rows, "tn")}[op]  # fmt: skip
        return "gemm", {"m": m, "n": n, "k": k, "layout": layout}
    m, n, k, layout = {"fwd": (conv.o, px, conv.c, "nn"), "dgrad": (conv.c, px, conv.o, "tn"),
                       "wgrad": (conv.o, conv.c, px, "nt")}[op]  # fmt: skip
    if op != "wgrad" and _product_alignment(conv) == 8:
        return "gemm", {"m": m, "n": rows, "k": k, "layout": layout}
    return "bmm", {"b": conv.n, "m": m, "n": n, "k": k, "layout": layout}


def product_features(conv: Conv, dims: dict[str, Any]) -> list[float]:
    """A pointwise pass's product, as the factor learned for it asks for it."""
    b, m, n, k = dims.get("b", 1), dims["m"], dims["n"], dims["k"]
    return [float(conv.dtype == "tf32"), float(conv.channels_last), _product_alignment(conv), conv.in_px % 8,
            conv.c % 8, conv.o % 8, b, m, n, k, b * m * n, b * m * n * k, m * n, b * (m * k + n * k + m * n), b * n * k,
            m * k, min(m, n), -(-m // 128) * -(-n // 128) * b / _SMS, -(-m // 64) * -(-n // 64) * b / _SMS, n % 64,
            m % 64, k % 64]  # fmt: skip


def library_product(site: Site, conv: Conv, op: str) -> Cost:
    """A pointwise pass as the library of products runs it, before what was learned of these products."""
    kind, dims = product_of(conv, op)
    chip = site.chip if site.chip.origin else replace(site.chip, origin=_MEASURED)
    time = matmul.model(Call(kind, conv.dtype, "fwd", "cublas", tuple(dims.items())), chip,
                        _product_coef(conv.dtype, site.coef["ramp_s"]), site.warm_frac)  # fmt: skip
    if op == "wgrad" and conv.dtype == "tf32" and not conv.channels_last:  # few products with such loops were recorded
        return min(time.busy_s, _long_product_s(site, conv)), time.num_kernels
    return time.busy_s, time.num_kernels


def _long_product_s(site: Site, conv: Conv) -> float:
    """The product of a pointwise weight gradient, its inner loop shared by SMs where it may be."""
    read, pixels = (conv.input_bytes + conv.output_bytes) * (1.0 - site.warm_frac), conv.n * conv.in_px
    if conv.channels_last:
        product = Product(1, conv.o, conv.c, pixels, read, conv.weight_bytes, pixels >= 4096)
    else:
        slowed = round(conv.in_px * _misalignment(site, conv))
        product = Product(conv.n, conv.o, conv.c, slowed, read, conv.n * conv.o * conv.c * 4.0)
    return _gemm_s(site, product, conv.dtype, _odd(conv))


def _learned_product(site: Site, conv: Conv, op: str) -> Cost | None:
    """The same times that factor; None where products of convolutions were not measured."""
    if site.chip.arch != _LEARNED_ARCH or conv.dtype not in ("bf16", "fp16", "tf32"):
        return None
    seconds, kernels = library_product(site, conv, op)
    trees, share = residue.kernel_trees(f"product.{op}"), site.coef["residue_frac"]
    if trees is None or not share:
        return seconds, kernels
    log = residue.logs(trees, [product_features(conv, product_of(conv, op)[1])])[0]
    return seconds * exp(share * log), kernels


def _misalignment(site: Site, conv: Conv) -> float:
    """Slowdown of a GEMM over channels-first images whose rows do not start on 16 bytes."""
    row_bytes = conv.in_px * conv.itemsize
    if conv.channels_last or row_bytes % 16 == 0:
        return 1.0
    return site.coef["gemm_half_aligned" if row_bytes % 8 == 0 else "gemm_unaligned"]


def _odd(conv: Conv) -> bool:
    """Rows of channels off 16 bytes: those of the filters, and of the images where channels come last."""
    return bool(conv.c % 8 or (conv.o % 8 and conv.channels_last))


def _pointwise(site: Site, conv: Conv, op: str) -> Cost:
    """A forward pass or an input gradient of one tap as products."""
    if (known := _learned_product(site, conv, op)) is not None:
        return known
    read_bytes, written_bytes = conv.input_bytes + conv.weight_bytes, conv.output_bytes
    columns, depth = conv.o, conv.c
    if op == "dgrad":
        read_bytes, written_bytes = conv.output_bytes + conv.weight_bytes, conv.input_bytes
        columns, depth = conv.c, conv.o
    batch, rows = (1, conv.n * conv.in_px) if conv.channels_last else (conv.n, conv.in_px)
    if conv.itemsize <= 2 and _product_alignment(conv) < 8:
        return _odd_product(site, conv, batch, rows, columns, depth)
    slowed = round(depth * _misalignment(site, conv))
    product = Product(batch, rows, columns, slowed, read_bytes * (1.0 - site.warm_frac), written_bytes)
    return _gemm_s(site, product, conv.dtype, _odd(conv)), 1


def _product_alignment(conv: Conv) -> int:
    """Elements up to eight by which rows of images and filters are aligned."""
    rows = (conv.c, conv.o) if conv.channels_last else (conv.c, conv.in_px)
    return next(step for step in (8, 4, 2, 1) if all(row % step == 0 for row in rows))


def _odd_product(site: Site, conv: Conv, batch: int, rows: int, columns: int, depth: int) -> Cost:
    """The kernels of older generations that the library of products runs for rows off 16 bytes."""
    group = "odd1." if _product_alignment(conv) == 1 else "odd2."
    coef = {name: site.coef[group + name] for name in COEFFICIENTS}
    timing = classic_timing(site.chip, coef, b=batch, m=rows, n=columns, k=depth, dtype=conv.dtype,
                            warm_frac=site.warm_frac)  # fmt: skip
    return float(timing.expected_s[0]), int(timing.num_kernels[0])


def _pointwise_weight_grad(site: Site, conv: Conv) -> Cost:
    """Images, or stretches of pixels, each give a partial gradient; a second kernel adds them up."""
    reduce_s = site.cycles_s(site.coef["gemm_reduce_cycles"])
    if (known := _learned_product(site, conv, "wgrad")) is not None:
        return known if conv.channels_last else _sum(known, (reduce_s, 1))
    if conv.channels_last:
        split = conv.n * conv.in_px >= 4096
        return _long_product_s(site, conv) + reduce_s * split, 1 + split
    partial = conv.n * conv.o * conv.c * 4.0
    if conv.itemsize <= 2 and _product_alignment(conv) < 8:
        return _sum(_odd_product(site, conv, conv.n, conv.o, conv.c, conv.in_px), (reduce_s, 1))
    moved_s = site.dram_s(partial * (1.0 - site.held(partial)), "gemm_dram_frac")
    return _long_product_s(site, conv) + reduce_s + moved_s, 2


def _transposed_product(conv: Conv) -> bool:
    """Channels-first weight gradients of one tap that are transposed first: small images, or few input channels."""
    small = conv.in_px <= 256 and min(conv.c, conv.o) >= 192
    lopsided = conv.in_px >= 3136 and conv.c <= 48 and conv.o >= 384
    return not conv.channels_last and not _odd(conv) and (small or lopsided)


def _small_images(conv: Conv) -> bool:
    """Channels-first images too small for a GEMM each, in a batch large enough to transpose instead."""
    enough = 256 if conv.in_px <= 100 else 400
    return not conv.channels_last and conv.in_px <= 200 and conv.n >= 16 and min(conv.c, conv.o) >= enough


# Vector units


_SIMT_TILES = ((32, 32, "simt_narrow_frac"), (256, 64, "simt_wide_frac"))
_SIMT_DEEP = 1700
"""From this depth of the inner loop on, the library takes its small SIMT tiles."""


def _simt_s(site: Site, rows: int, columns: int, depth: int) -> float:
    """A convolution as SIMT tiles: large ones for throughput, small ones to fill the chip."""
    coef, chip = site.coef, site.chip
    macs = chip.vector_flops_per_s / (2.0 * chip.num_sms * chip.clock_hz)
    steps, best = -(-depth // 8), 1e30
    for high, wide, frac in _SIMT_TILES if depth < _SIMT_DEEP else _SIMT_TILES[:1]:
        per_sm = -(-(-(-rows // high) * -(-columns // wide)) // chip.num_sms)
        step = max(coef["simt_step_cycles"], per_sm * high * wide * 8 / (macs * coef[frac]))
        best = min(best, steps * step + per_sm * high * wide * coef["simt_store_cycles"])
    return site.cycles_s(coef["simt_start_cycles"] + best)


def _vector(site: Site, seconds: float, moved_bytes: float) -> Cost:
    return site.cycles_s(site.coef["simt_start_cycles"]) + _both(seconds, site.dram_s(moved_bytes, "loop_dram_frac")), 1


def _fourier(conv: Conv) -> bool:
    return conv.side == 3 and conv.stride == 1 and conv.flops > _FOURIER_FLOPS


_TILE = 32
"""Side of the tiles whose spectra an input gradient multiplies; a forward pass takes whole images."""


def _spectrum(conv: Conv) -> int:
    """Side of the transforms of a forward pass: a power of two that holds image and filter."""
    height = max(1, conv.in_px // conv.width)
    return max(16, 1 << (max(height, conv.width) + conv.side - 2).bit_length())


def num_fourier_tiles(conv: Conv) -> int:
    step = max(1, _TILE + 1 - conv.side)
    return -(-max(1, conv.in_px // conv.width) // step) * -(-conv.width // step)


def _whole(size: int) -> int:
    """Rows or columns of a product of spectra, in the tiles of 32 that compute it."""
    return -(-size // 32) * 32


def fourier_terms(conv: Conv, op: str) -> dict[str, float]:
    """What a pass through Fourier transforms is made of: spectra of images, filters and results, and their products."""
    if op == "dgrad":
        tiles, points = num_fourier_tiles(conv), _TILE * (_TILE / 2 + 1)
        return {"tile": tiles, "input": tiles * conv.n * conv.c * points, "filter": tiles * conv.c * conv.o * points,
                "output": tiles * conv.n * conv.o * points,
                "product": tiles * _whole(conv.n) * _whole(conv.c) * conv.o * points}  # fmt: skip
    side = _spectrum(conv)
    points, large = side * (side / 2 + 1), float(side > _TILE)
    filters, outputs = conv.c * conv.o * points, conv.n * conv.o * points
    return {"start": 1.0, "input": conv.n * conv.c * points, "filter": filters, "output": outputs,
            "flip": float(conv.c * conv.o), "product": conv.c * _whole(conv.n) * _whole(conv.o) * points,
            "large_filter": large * filters, "large_output": large * outputs}  # fmt: skip


def _by_fourier(site: Site, conv: Conv, op: str) -> Cost:
    """Images and filters transformed, spectra multiplied by a library's product, results transformed back."""
    coef = _pass(site.coef, f"fourier.{op}")
    seconds = sum(coef[name] * value for name, value in fourier_terms(conv, op).items())
    seconds *= _MEASURED_VECTOR_FLOPS_PER_S / site.chip.vector_flops_per_s
    main = seconds, 1 + 3 * num_fourier_tiles(conv) if op == "dgrad" else 5 + 3 * (_spectrum(conv) > _TILE)
    if not conv.channels_last:
        return main
    return _sum(_x(site, conv), _w(site, conv), main, _y(site, conv, fresh=True))


def winograd_terms(conv: Conv) -> dict[str, float]:
    """The same for a weight gradient of transformed tiles: images, gradients, their products, filters."""
    return {"start": 1.0, "input": float(conv.n * conv.in_px * conv.c), "output": float(conv.n * conv.out_px * conv.o),
            "filter": float(conv.c * conv.o), "product": float(conv.n * conv.out_px * conv.c * conv.o),
            "deep": float(conv.n * conv.out_px)}  # fmt: skip


def _by_winograd(site: Site, conv: Conv) -> Cost:
    coef = _pass(site.coef, "winograd.wgrad")
    seconds = sum(coef[name] * value for name, value in winograd_terms(conv).items())
    main = seconds * _MEASURED_VECTOR_FLOPS_PER_S / site.chip.vector_flops_per_s, 4
    if not conv.channels_last:
        return main
    return _sum(_x(site, conv), _y(site, conv), main, _w(site, conv, fresh=True))


def _saving(site: Site, conv: Conv, way: str) -> Cost:
    """Ways that save multiplications: tiles are transformed, multiplied by a library's product, transformed back."""
    own = conv.input_bytes + conv.output_bytes + conv.weight_bytes
    work_s = conv.flops / (site.coef[f"{way}_gain"] * site.chip.vector_flops_per_s)
    seconds, _ = _vector(site, work_s, site.coef[f"{way}_bytes"] * own)
    seconds += 4.0 * site.cycles_s(site.coef["simt_start_cycles"])
    if not conv.channels_last:
        return seconds, 5
    return _sum(_x(site, conv), _w(site, conv), (seconds, 5), _y(site, conv, fresh=True))


def _simt_forward(site: Site, conv: Conv) -> Cost:
    if _fourier(conv):
        return conv.flops / (site.coef["fourier_gain"] * site.chip.vector_flops_per_s), 4
    moved = conv.touched_bytes + conv.weight_bytes + conv.output_bytes
    seconds = _simt_s(site, conv.n * conv.out_px, conv.o, conv.c * conv.taps)
    return _both(seconds, site.dram_s(moved, "loop_dram_frac")), 1


def _simt_input_grad(site: Site, conv: Conv) -> Cost:
    """The faster of a gather over input pixels and a scatter from output pixels; by transforms when much is saved."""
    coef, peak = site.coef, site.chip.vector_flops_per_s
    filled = min(1.0, conv.o / coef["simt_grad_channels"])
    if _fourier(conv):
        return conv.flops / (coef["fourier_gain"] * peak), 4
    moved = 2.0 * conv.input_bytes + conv.weight_bytes + conv.output_bytes
    alone_s = site.cycles_s(coef["simt_grad_step_cycles"] * conv.o)
    scatter, _ = _vector(site, max(alone_s, conv.flops / (coef["simt_grad_frac"] * filled * peak)), moved)
    gather = _simt_s(site, conv.n * conv.in_px, conv.c, conv.o * conv.taps)
    return (scatter, 2) if scatter < gather else (gather, 1)


def _simt_weight_grad(site: Site, conv: Conv) -> Cost:
    coef, peak = site.coef, site.chip.vector_flops_per_s
    own = conv.input_bytes + conv.output_bytes + conv.weight_bytes
    if conv.side == 3 and conv.stride == 1 and min(conv.c, conv.o) > 16:
        seconds, _ = _vector(site, conv.flops / (coef["winograd_gain"] * peak), coef["winograd_bytes"] * own)
        return seconds + 3.0 * site.cycles_s(coef["simt_start_cycles"]), 4
    frac = coef["simt_atomic_frac" if conv.taps == 1 else "simt_atomic_taps"] * min(1.0, conv.o / 32.0)
    atomic, _ = _vector(site, conv.flops / (frac * peak), own)
    gather = _simt_s(site, conv.o, conv.c * conv.taps, conv.n * conv.out_px), 1
    if not conv.channels_last:
        gather = _sum(_x(site, conv), _y(site, conv), gather, _w(site, conv, fresh=True))
    return min(_sum((atomic, 1), _memset(site)), gather)


# Depthwise stencils


def _stencil(site: Site, elements: float, each: float, moved_bytes: float, latency: float = 0.0) -> Cost:
    busy = max(site.cycles_s(elements * each / site.chip.num_sms), site.cycles_s(latency))
    return site.cycles_s(site.coef["stencil_start_cycles"]) + _both(busy, site.dram_s(moved_bytes, "gemm_dram_frac")), 1


def _linear(site: Site, kind: str, taps: int) -> float:
    return site.coef[f"stencil_{kind}cycles"] + taps * site.coef[f"stencil_{kind}tap_cycles"]


def _last(site: Site, kind: str, conv: Conv, taps: int) -> float:
    """Cycles of an element, channels last, where filters wider than five are not held in registers."""
    return _linear(site, kind, taps) * (site.coef["stencil_last_large"] if conv.side > 5 else 1.0)


_SPECIAL_BATCH = 8
"""From this batch on, the library has channels-last kernels written for the filter's side (159 of 162 recordings)."""


def _tiled(conv: Conv) -> bool:
    """Whether PyTorch hands a channels-first depthwise filter to cuDNN: its own rule, for half precision alone."""
    half = conv.dtype == "fp16" and conv.rank == 2 and conv.c >= 32 and conv.o == conv.c
    if not half or conv.side not in (1, 3, 5) or conv.width < 7:
        return False
    if conv.stride != 2:
        return conv.stride == 1
    if conv.n == 1:
        return conv.side > 1 or conv.width <= 28
    if conv.side == 1:
        return conv.n <= 16 and conv.c >= 128 and conv.width <= 7
    return conv.c >= 512 or (conv.c >= 256 and conv.width >= 28)


def _leaps(conv: Conv) -> bool:
    """Strides that no channels-last stencil takes: the kernel of any groups runs (6 of 6 recordings, 0 of 260)."""
    return conv.stride > min(2, conv.side)


def _stencil_forward(site: Site, conv: Conv) -> Cost:
    coef = site.coef
    elements, moved = conv.n * conv.out_px * conv.o, conv.input_bytes * (1.0 - site.warm_frac) + conv.output_bytes
    if conv.channels_last and _leaps(conv):
        return _direct_groups(site, conv)
    if conv.channels_last:
        skipped = max(1.0, conv.in_px / conv.out_px) ** coef["stencil_last_stride"]
        if conv.itemsize > 2:
            return _stencil(site, elements, _linear(site, "last_wide_", conv.taps) * skipped, moved)
        latency = coef["stencil_last_first_cycles"] + conv.taps * coef["stencil_last_latency_cycles"]
        if conv.n < _SPECIAL_BATCH:
            skipped = max(1.0, conv.in_px / conv.out_px) ** coef["stencil_general_stride"]
            skipped *= coef["stencil_general_large"] if conv.side > 5 else 1.0
            return _stencil(site, elements, _linear(site, "general_", conv.taps) * skipped, moved, latency)
        each = _last(site, "last_", conv, conv.taps)
        return _stencil(site, elements, each * skipped, moved, latency)
    if _tiled(conv):
        skipped = max(1.0, conv.in_px / conv.out_px) ** coef["stencil_tiled_stride"]
        return _stencil(site, elements, _linear(site, "tiled_", conv.taps) * skipped, moved)
    if conv.rank == 2 and conv.side in (3, 5):
        return _stencil(site, elements, _linear(site, "", conv.taps), moved)
    latency = conv.taps * coef["stencil_any_tap_latency_cycles"]
    return _stencil(site, elements, _linear(site, "any_", conv.taps), moved, latency)


def _stencil_input_grad(site: Site, conv: Conv) -> Cost:
    moved = conv.output_bytes * (1.0 - site.warm_frac) + conv.input_bytes
    elements, taps = conv.n * conv.in_px * conv.c, conv.taps * max(1, conv.o // conv.c)
    if conv.channels_last:
        plain = site.coef["stencil_last_plain"] if conv.stride > 2 else 1.0  # the kernel that takes any stride
        if conv.itemsize > 2:
            return _stencil(site, elements, _linear(site, "last_wide_grad_", taps) * plain, moved)
        return _stencil(site, elements, _last(site, "last_grad_", conv, taps) * plain, moved)
    if _tiled(conv) and conv.stride == 1:
        return _stencil(site, elements, _linear(site, "tiled_grad_", taps), moved)
    unrolled = conv.rank == 2 and conv.side in (3, 5) and conv.stride <= 2
    return _stencil(site, elements, _linear(site, "grad_" if unrolled else "any_grad_", taps), moved)


def _last_weight_grad(site: Site, conv: Conv, moved: float) -> Cost:
    """Channels last: tiles whose partial sums are reduced; a direct kernel where no tile fits."""
    coef, elements = site.coef, conv.n * conv.out_px * conv.o
    if conv.stride > 2:
        return _direct_groups(site, conv, "wgrad")
    if conv.itemsize > 2:
        tiled = _stencil(site, elements, _linear(site, "last_wide_grad_", conv.taps), moved)
        tiled = _sum(tiled, _memset(site), (site.cycles_s(coef["stencil_last_reduce_cycles"]), 1))
        direct = _direct_groups(site, conv, "wgrad")
        told = [direct if choice.way == "direct" else tiled for choice in _chosen(site, conv, "wgrad")]
        return _likely(told) or (direct if conv.side > 5 else tiled)
    each = _last(site, "last_weight_", conv, conv.taps) * (1.0 + 0.25 * (conv.in_px / conv.out_px - 1.0))
    each *= max(1.0, coef["stencil_last_weight_rows"] / (conv.n * conv.o))
    return _sum(_stencil(site, elements, each, moved), _memset(site))


def _stencil_weight_grad(site: Site, conv: Conv) -> Cost:
    """Channels first: a block for each channel and tap, a warp for each image of the batch, 32 pixels a step."""
    coef, chip = site.coef, site.chip
    moved = (conv.output_bytes + conv.input_bytes) * (1.0 - site.warm_frac)
    if conv.channels_last:
        return _last_weight_grad(site, conv, moved)
    if _tiled(conv) and conv.stride == 1:
        return _stencil(site, conv.n * conv.out_px * conv.o, _linear(site, "tiled_weight_", conv.taps), moved)
    blocks, warps, image_steps = conv.o * conv.taps, min(conv.n, 8), -(-conv.out_px // 32)
    alone = -(-conv.n // warps) * image_steps * coef["stencil_weight_latency_cycles"]
    resident = max(1, min(32, 64 // warps)) * chip.num_sms
    latency = alone * -(-blocks // resident)
    return _stencil(site, blocks * conv.n * image_steps, coef["stencil_weight_step_cycles"], moved, latency)


def stencil_features(conv: Conv) -> list[float]:
    """A depthwise pass, as the factor learned for it asks for it."""
    out, given = conv.n * conv.out_px, conv.n * conv.in_px
    return [float(conv.dtype == "fp16"), conv.itemsize, float(conv.channels_last), conv.n, conv.c, conv.o // conv.c,
            conv.taps, conv.side, conv.stride, conv.in_px, conv.out_px, conv.width, out, given, out * conv.o,
            given * conv.c, out * conv.o * conv.taps, float(_tiled(conv)), conv.c % 8, conv.c % 32, conv.width % 8,
            conv.n * conv.c, conv.c * conv.taps]  # fmt: skip


def stencil(site: Site, conv: Conv, op: str) -> Cost:
    """A depthwise pass before what was learned of such."""
    return {"fwd": _stencil_forward, "dgrad": _stencil_input_grad, "wgrad": _stencil_weight_grad}[op](site, conv)


def _learned_stencil(site: Site, conv: Conv, op: str) -> Cost:
    """The same times that factor, on the measured architecture; wide weight gradients, of several kinds, have none."""
    seconds, kernels = stencil(site, conv, op)
    trees, share = residue.kernel_trees(f"stencil.{op}"), site.coef["residue_frac"]
    several = op == "wgrad" and conv.channels_last and conv.itemsize > 2
    if trees is None or not share or site.chip.arch != _LEARNED_ARCH or conv.rank != 2 or several:
        return seconds, kernels
    return seconds * exp(share * residue.logs(trees, [stencil_features(conv)])[0]), kernels


# Groups


_MEASURED_VECTOR_FLOPS_PER_S = 66.9e12
"""Of the chip whose direct kernels were measured."""
_HELD_PX = 1024
"""Pixels of an output image up to which a weight gradient is made from shared memory (16 of 17 recordings)."""
_FAR_FASTER = 0.45
"""Share of the usual way's time below which the direct kernel is taken (least mean error over 1,700 recordings)."""
_WIDEST_GROUP, _MANY_FILTERS = 82, 1344
"""Filters of a group beyond which groups run one after another, and of all groups beyond which they are packed."""
_LONG_FILTER = 49
"""Filters with more taps than this (speech encoders' positional ones) run group by group."""
_ANALYTIC = 3.3
"""Their kernels work out every address: slower by this (one recorded speech encoder)."""
_FEW_ROWS, _LITTLE = 8000, 2000
"""Output pixels below which wide groups, and groups of sixteen and more, are not packed."""


def _group_size(conv: Conv) -> int:
    """Channels a group takes in a packed tile: the next power of two that holds its inputs and its outputs."""
    return max(4, 1 << (max(conv.c, conv.o) // conv.groups - 1).bit_length())


def _packed(conv: Conv) -> bool:
    """Whether one kernel takes all groups of 16-bit tensors, packed block-diagonally into 64-wide tiles."""
    wide, tall, rows = conv.c // conv.groups, conv.o // conv.groups, conv.n * conv.out_px
    if conv.taps == 1:
        return max(wide, tall) <= 12 and conv.groups > 2
    if conv.taps > _LONG_FILTER or (conv.groups == 2 and wide < 64) or tall > _WIDEST_GROUP:
        return False
    if conv.o > _MANY_FILTERS:
        return True
    if conv.side == 3:
        apart = wide >= 64 and rows < _FEW_ROWS and not conv.channels_last
        return not (apart or (wide >= 16 and conv.groups <= 4 and rows < _LITTLE))
    return wide < 32 if conv.side < _WIDE_SIDE else wide < 16 or (wide < 24 and rows >= _FEW_ROWS)


def _grouped_forward(site: Site, conv: Conv) -> Cost:
    wide, tall = conv.c // conv.groups, conv.o // conv.groups
    if not site.on_matrix_units(conv):
        return _wide_type_groups(site, conv)
    if wide < 4 or tall == 1:
        return _narrow_groups(site, conv)
    if _packed(conv):
        return _packed_groups(site, conv, conv.n * conv.out_px)
    if conv.taps > _LONG_FILTER:
        rows = conv.n * conv.out_px
        single = Loop(rows, tall, wide, conv.taps, conv.touched_bytes / conv.groups, conv.output_bytes / conv.groups)
        each_s = _ANALYTIC * _loop_s(site, single, (64, 64, 64, False), conv.dtype)
        each_s += 3 * site.cycles_s(site.coef["group_start_cycles"])
        return conv.groups * each_s, 4 * conv.groups
    return _looped_groups(site, conv, conv.n * conv.out_px)


def _packed_groups(site: Site, conv: Conv, rows: int) -> Cost:
    """One kernel over all groups, between transforms that bring them to the width of a packed tile."""
    wide, tall, size = conv.c // conv.groups, conv.o // conv.groups, _group_size(conv)
    tiles = -(-conv.groups // max(1, 64 // size)) * -(-size // 64)
    loop = Loop(rows, 64, 64 * -(-size // 64), conv.taps, conv.touched_bytes, conv.output_bytes, repeat=tiles)
    inner = _loop_s(site, loop, (64, 64, 64, site.tma), conv.dtype), 1
    return _sum(_group_transforms(site, conv, size == wide, size == tall), inner)


def _group_transforms(site: Site, conv: Conv, whole_in: bool, whole_out: bool) -> Cost:
    size = _group_size(conv)
    parts = [] if whole_in and whole_out else [_generic_transform(site, conv.o, conv.c // conv.groups, conv.taps)]
    for whole, channels, px in ((whole_in, conv.c, conv.in_px), (whole_out, conv.o, conv.out_px)):
        if conv.channels_last and not whole:
            parts.append(_generic_transform(site, conv.n, channels, px))
        if not whole:
            parts.append(_memset(site, conv.n * px * conv.groups * size * conv.itemsize))
    if not conv.channels_last:
        parts += [_x(site, conv), _y(site, conv, fresh=True)]
    return _sum(*parts)


def _one_group(conv: Conv) -> Conv:
    return replace(conv, c=conv.c // conv.groups, o=conv.o // conv.groups, groups=1)


def _looped_groups(site: Site, conv: Conv, rows: int) -> Cost:
    """Wide groups one after another: each is cut out or transposed, convolved, and put back."""
    one = _one_group(conv)
    loop = Loop(rows, one.o, one.c, conv.taps, one.touched_bytes, one.output_bytes)
    tile = _copy_tile(one.o, -(-rows // 128) * -(-one.o // 128))
    inner = _loop_s(site, loop, tile, conv.dtype) + site.cycles_s(site.coef["group_start_cycles"])
    moved = _sum(_x(site, one), _y(site, one, fresh=True))
    if not conv.channels_last:
        moved = _sum(moved, _w(site, one))
    return conv.groups * (inner + moved[0]), conv.groups * (1 + moved[1])


def _vector_groups(site: Site, conv: Conv) -> Cost:
    """A vector kernel for each group: an inner loop of its own depth, sixteen output channels at a time."""
    one, coef = _one_group(conv), site.coef
    depth, rows = one.c * conv.taps, conv.n * conv.out_px
    work_s = 2.0 * rows * -(-one.o // 16) * 16 * depth / (coef["group_vector_frac"] * site.chip.vector_flops_per_s)
    each_s = site.cycles_s(coef["group_vector_start_cycles"])
    each_s += max(work_s, site.cycles_s(coef["group_depth_cycles"] * depth))
    tiles = -(-rows // 64) * -(-one.o // 32)
    return conv.groups * each_s / _beside(site, conv.groups, tiles // 4), conv.groups


def _engine_groups(site: Site, conv: Conv) -> Cost:
    """The same over channels-last tensors, by a kernel that takes one output pixel a thread."""
    depth, rows = conv.c // conv.groups * conv.taps, conv.n * conv.out_px
    work = max(site.coef["group_engine_depth_cycles"] * depth, rows * depth * site.coef["group_engine_row_cycles"])
    beside = _beside(site, conv.groups, -(-rows // 64) * -(-(conv.o // conv.groups) // 32) // 4)
    return conv.groups * site.cycles_s(site.coef["group_start_cycles"] + work) / beside, conv.groups


def _sectors(channels: int, itemsize: float) -> float:
    """Share of a warp's lanes that load sectors of their own when neighbors are ``channels`` elements apart."""
    return min(1.0, channels * itemsize / 32.0)


def _met(conv: Conv) -> float:
    """Share of the taps that meet a pixel: those over the edge of a small image are skipped."""
    lost = conv.pad * (conv.pad + 1) / (conv.stride * conv.side)
    wide = max(1.0, conv.width / conv.stride)
    return max(0.2, 1.0 - lost / wide) * max(0.2, 1.0 - lost * wide / conv.out_px)


def direct_terms(conv: Conv, op: str) -> dict[str, float]:
    """What the time of the kernel that takes any groups is made of: an output element, or a weight, to a thread."""
    last, wide, tall = float(conv.channels_last), conv.c // conv.groups, conv.o // conv.groups
    if op == "wgrad":
        weights, pixels = float(conv.o * wide * conv.taps), float(conv.n * conv.out_px)
        rows, product = conv.n * -(-conv.in_px // (conv.width * conv.stride)), weights * pixels
        return {"start": 1.0, "weight": weights, "pixel": pixels, "row": float(rows), "product": product,
                "wide_in": last * product * _met(conv) * _sectors(conv.c * conv.stride, conv.itemsize),
                "wide_out": last * product * _met(conv) * _sectors(conv.o, conv.itemsize)}  # fmt: skip
    elements, depth, given, made = conv.n * conv.out_px * conv.o, wide, conv.c * conv.stride, conv.o
    if op == "dgrad":
        elements, depth, given, made = conv.n * conv.in_px * conv.c, tall, conv.o, conv.c
    product = float(elements * depth * conv.taps)
    return {"start": 1.0, "element": elements * (_sectors(made, conv.itemsize) if last else 1.0),
            "channel": float(elements * depth), "product": product,
            "strided": elements * depth * float(conv.stride > 1),
            "chain": float(depth * conv.taps), "depth": float(depth),
            "wide": last * product * _sectors(given, conv.itemsize)}  # fmt: skip


def _direct_groups(site: Site, conv: Conv, op: str = "fwd") -> Cost:
    """One kernel that takes any groups; other chips follow their vector peak."""
    if op == "wgrad" and _held_whole(conv):
        return _shared_weight_grad(site, conv)
    coef = _pass(site.coef, f"direct.{op}.{'last' if conv.channels_last else 'first'}")
    seconds = sum(coef[name] * value for name, value in direct_terms(conv, op).items())
    return seconds * _MEASURED_VECTOR_FLOPS_PER_S / site.chip.vector_flops_per_s, 1


def shared_terms(conv: Conv) -> dict[str, float]:
    """The same for the weight gradient of 16 bits that holds tiles of images in shared memory."""
    weights, pixels = float(conv.o * (conv.c // conv.groups) * conv.taps), float(conv.n * conv.out_px)
    elements = float(conv.n * (conv.out_px * conv.o + conv.in_px * conv.c))
    return {"start": 1.0, "weight": weights, "image": float(conv.n), "pixel": pixels, "tap": pixels * conv.taps,
            "channel": pixels * conv.o * (conv.c // conv.groups), "last": elements * conv.channels_last,
            "strided": elements * float(conv.stride > 1)}  # fmt: skip


def _shared_weight_grad(site: Site, conv: Conv) -> Cost:
    coef = _pass(site.coef, "shared.wgrad")
    seconds = sum(coef[name] * value for name, value in shared_terms(conv).items())
    return seconds * _MEASURED_VECTOR_FLOPS_PER_S / site.chip.vector_flops_per_s, 1


def _held_whole(conv: Conv) -> bool:
    """Weight gradients of 16 bits whose images are small enough to be held in shared memory."""
    small = conv.out_px <= _HELD_PX and conv.stride <= 2 and 1 < conv.side <= _WIDE_SIDE
    return conv.itemsize <= 2 and small and conv.o > 12 and conv.groups == 1


def _unless_direct(usual: Cost, direct: Cost) -> Cost:
    """The library does not run groups one after another where its direct kernel is so much faster."""
    return direct if direct[0] < _FAR_FASTER * usual[0] else usual


def _narrow_groups(site: Site, conv: Conv) -> Cost:
    """16-bit groups of up to three channels, or of one output channel."""
    wide, tall = conv.c // conv.groups, conv.o // conv.groups
    if tall == 1 and wide > 8:
        return _packed_groups(site, conv, conv.n * conv.out_px) if conv.side == 3 else _vector_groups(site, conv)
    if conv.channels_last:
        direct = tall == 1 or (conv.taps == 1 and tall <= wide)
        return _direct_groups(site, conv) if direct else _engine_groups(site, conv)
    direct = 1 < conv.side < _WIDE_SIDE and tall <= wide
    return _direct_groups(site, conv) if direct else _vector_groups(site, conv)


def _wide_type_groups(site: Site, conv: Conv) -> Cost:
    """Single precision: pointwise groups in great number directly, others one after another where that is faster."""
    wide, tall = conv.c // conv.groups, conv.o // conv.groups
    if conv.taps == 1 and conv.groups >= 32:
        return _direct_groups(site, conv)
    if not conv.channels_last:
        return min(_vector_groups(site, conv), _direct_groups(site, conv))
    if conv.taps > 1 and wide >= 16 and (max(wide, tall) >= 24 or conv.side >= _WIDE_SIDE):
        one = _one_group(conv)
        inner = _simt_s(site, conv.n * conv.out_px, tall, wide * conv.taps), 1
        each = _sum(_x(site, one), _w(site, one), inner, _y(site, one, fresh=True))
        return conv.groups * each[0], conv.groups * each[1]
    return min(_engine_groups(site, conv), _direct_groups(site, conv))


def _pointwise_groups(site: Site, conv: Conv, rows: int, packed: bool) -> Cost:
    """Gradients of one tap: a product for each group, or all groups in one kernel."""
    if packed:
        return _packed_groups(site, conv, rows)
    each = site.coef["group_matrix_cycles"] + rows * site.coef["group_row_cycles"]
    return conv.groups * site.cycles_s(each), 4 * conv.groups


def _grouped_input_grad(site: Site, conv: Conv) -> Cost:
    if conv.taps > 1 or not site.on_matrix_units(conv):
        return _grouped_grad(site, conv, conv.n * conv.in_px)
    wide = conv.c // conv.groups
    packed = 22 < wide <= 36 if conv.stride > 1 else wide <= 6 and conv.groups > 24
    return _pointwise_groups(site, conv, conv.n * conv.in_px, packed)


def _grouped_weight_grad(site: Site, conv: Conv) -> Cost:
    rows = conv.n * conv.out_px
    if conv.taps > 1 or not site.on_matrix_units(conv):
        return _grouped_grad(site, conv, rows)
    few = conv.stride > 1 and rows <= 11_000
    if few and not conv.channels_last:
        return _direct_groups(site, conv, "wgrad")
    return _pointwise_groups(site, conv, rows, few)


def _grouped_grad(site: Site, conv: Conv, rows: int) -> Cost:
    """Gradients of several taps, of the input or of the weight, whose kernels differ little in what they cost."""
    wide, tall = conv.c // conv.groups, conv.o // conv.groups
    if not site.on_matrix_units(conv):
        return _wide_type_group_grad(site, conv)
    apart = wide >= 64 and conv.groups >= 32 and rows < 2 * _FEW_ROWS
    if apart or (conv.groups == 2 and wide < 64) or (wide <= 2 < tall and conv.groups >= 8 and not conv.channels_last):
        return min(_looped_groups(site, conv, rows), _packed_groups(site, conv, rows))
    return _packed_groups(site, conv, rows)


def _wide_type_group_grad(site: Site, conv: Conv) -> Cost:
    """Group by group: an atomic weight gradient or a scatter, and transposes where the taps are few."""
    coef, one = site.coef, _one_group(conv)
    share = min(1.0, one.o / 32.0)
    each_s = one.flops / (coef["simt_atomic_frac"] * share * site.chip.vector_flops_per_s)
    if conv.taps == 1 and not conv.channels_last:
        each_s += (one.input_bytes + one.output_bytes) / (2.0 * coef["group_transpose_bytes_per_s"])
    return conv.groups * (each_s + site.cycles_s(coef["group_grad_cycles"])), 2 * conv.groups


# Which kernels run


def _input_grad_tiles(site: Site, conv: Conv) -> Cost:
    loop = _sum(_input_grad_loop(site, conv), _grad_widened(site, conv), _odd_filters(site, conv))
    return loop if conv.channels_last else _sum(_w(site, conv), _y(site, conv), loop, _x(site, conv, fresh=True))


def _weight_grad_tiles(site: Site, conv: Conv) -> Cost:
    loop = _sum(_weight_grad_loop(site, conv), _grad_widened(site, conv))
    return loop if conv.channels_last else _sum(_x(site, conv), _y(site, conv), loop, _w(site, conv, fresh=True))


def _input_grad_product(site: Site, conv: Conv) -> Cost:
    return _pointwise(site, conv, "dgrad")


def _left_in_place(conv: Conv) -> bool:
    """Channels-first 16-bit tensors of few channels whose transforms would cost more than vector units do.

    Read off 360 recordings: 3 x 3 filters (31 of 35), single taps under a stride (18 of 18), odd channels (37 of 38).
    """
    elements = conv.n * conv.in_px * conv.c
    if conv.channels_last or conv.rank != 2:
        return False
    if conv.c % 8:
        return conv.side in (3, 5) and conv.c * conv.taps <= 153 and conv.flops <= 7.4e8
    if conv.taps == 1 and conv.stride > 1:
        return conv.c < 52 and conv.out_px > 178 and (conv.n > 29 or conv.c <= 13)
    if conv.side != 3:
        return False
    small = conv.n * conv.out_px * conv.o <= 22.5e6 and conv.n * conv.out_px <= 115_000
    return (conv.c <= 12 and small) or (elements <= 12_500 and conv.o > 570)


def _vector_pass(site: Site, conv: Conv) -> Cost:
    """16-bit tensors read where they lie by kernels of the vector units, no transform."""
    depth_s = site.cycles_s(site.coef["vector_depth_cycles"] * conv.c * conv.taps)
    seconds, kernels = _image_forward(site, conv)
    start_s = site.cycles_s(site.coef["simt_start_cycles"])
    return start_s + _both(seconds - start_s, depth_s), kernels


def _as_product(site: Site, conv: Conv, op: str) -> Cost:
    return _pointwise_weight_grad(site, conv) if op == "wgrad" else _pointwise(site, conv, op)


def _by_choice(site: Site, conv: Conv, op: str) -> Cost | None:
    """A dense pass by the kernel cuDNN is known to take; None where that is not known or is a library's product."""
    costs = [_dense_by(site, conv, op, choice) for choice in _chosen(site, conv, op)]
    return None if 2 * costs.count(None) > len(costs) else _likely(costs)


def _dense_by(site: Site, conv: Conv, op: str, choice: Choice) -> Cost | None:
    """The same told the choice."""
    if choice.way == "product":
        aligned = conv.pointwise and site.on_matrix_units(conv) and _misalignment(site, conv) == 1.0
        return _as_product(site, conv, op) if aligned else None
    if choice.way in _TILED and site.on_matrix_units(conv):
        return _tiles(site, conv, choice, op)
    if choice.way in ("direct", "shared"):
        return _direct_groups(site, conv, op) if choice.way == "direct" else _shared_weight_grad(site, conv)
    if choice.way in VECTOR:
        return _vector_way(site, conv, choice, op)
    return _saved(site, conv, choice, op) if choice.way in ("fourier", "winograd") else None


def _saved(site: Site, conv: Conv, choice: Choice, op: str) -> Cost:
    """A dense pass by transforms."""
    if choice.way == "fourier" and op != "wgrad" and conv.rank == 2:
        return _by_fourier(site, conv, op)
    if choice.way == "winograd" and op == "wgrad" and conv.side == 3 and conv.rank == 2:
        return _by_winograd(site, conv)
    return _saving(site, conv, choice.way)


def _forward(site: Site, conv: Conv) -> Cost:
    if conv.depthwise:
        return _learned_stencil(site, conv, "fwd")
    if conv.groups == 1 and (known := _by_choice(site, conv, "fwd")) is not None:
        return known
    if conv.groups > 1:
        known = _groups_by_choice(site, conv, "fwd")
        return known or _unless_direct(_grouped_forward(site, conv), _direct_groups(site, conv))
    if not site.on_matrix_units(conv):
        plain = _simt_forward(site, conv)
        if not conv.channels_last or (conv.c <= 16 and not conv.pointwise):  # few channels: read where they lie
            return plain
        return _sum(_x(site, conv), _w(site, conv), plain, _y(site, conv, fresh=True))
    product = _pointwise(site, conv, "fwd") if conv.pointwise else None
    if product and not _small_images(conv) and _misalignment(site, conv) == 1.0:
        return product
    if _left_in_place(conv):
        return _vector_pass(site, conv)
    whole = _forward_loop(site, conv)
    if not conv.channels_last:
        whole = _sum(_x(site, conv), _w(site, conv), whole, _y(site, conv, fresh=True))
    if product and not _small_images(conv):  # rows off 16 bytes: a slow product, or images transposed first
        return min(product, whole)
    whole = _sum(whole, _odd_filters(site, conv), _widened(site, conv, conv.out_px, conv.o))
    return whole if conv.c % 8 == 0 else min(_image_forward(site, conv), _sum(whole, _widen(site, conv)))


def _widen(site: Site, conv: Conv) -> Cost:
    """Zeros for the channels that fill up eights, for images and filters; channels-first transforms write the rest."""
    if conv.channels_last:
        return _sum(_widened(site, conv, conv.in_px, conv.c), _w(site, conv), _memset(site))
    return _sum(_memset(site, conv.n * conv.in_px * _padded(conv.c) * conv.itemsize), _memset(site))


def _image_forward(site: Site, conv: Conv) -> Cost:
    """Few input channels and no padding: 16-bit tensors convolved on the vector units."""
    work = 2.0 * conv.n * conv.out_px * conv.o * (-(-conv.c * conv.taps // 8) * 8)
    seconds = work / (site.coef["simt_image_frac"] * site.chip.vector_flops_per_s)
    return _vector(site, seconds, conv.touched_bytes + conv.output_bytes)


def _input_grad(site: Site, conv: Conv) -> Cost:
    if conv.depthwise:
        return _learned_stencil(site, conv, "dgrad")
    if conv.groups == 1 and (known := _by_choice(site, conv, "dgrad")) is not None:
        return known
    if conv.groups > 1:
        known = _groups_by_choice(site, conv, "dgrad")
        return known or _unless_direct(_grouped_input_grad(site, conv), _direct_groups(site, conv, "dgrad"))
    if not site.on_matrix_units(conv):
        plain = _simt_input_grad(site, conv)
        return _sum(_y(site, conv), _w(site, conv), plain, _x(site, conv, fresh=True)) if conv.channels_last else plain
    if conv.pointwise:
        return _input_grad_product(site, conv)
    return _input_grad_tiles(site, conv)


def _grad_widened(site: Site, conv: Conv) -> Cost:
    return _sum(_widened(site, conv, conv.in_px, conv.c), _widened(site, conv, conv.out_px, conv.o))


def _weight_grad(site: Site, conv: Conv) -> Cost:
    if conv.depthwise:
        return _learned_stencil(site, conv, "wgrad")
    if conv.groups == 1 and (known := _by_choice(site, conv, "wgrad")) is not None:
        return known
    if conv.groups > 1:
        known = _groups_by_choice(site, conv, "wgrad")
        return known or _unless_direct(_grouped_weight_grad(site, conv), _direct_groups(site, conv, "wgrad"))
    if not site.on_matrix_units(conv):
        return _simt_weight_grad(site, conv)
    if conv.pointwise and not _transposed_product(conv):
        return _pointwise_weight_grad(site, conv)
    return _weight_grad_tiles(site, conv)


def _swapped(conv: Conv) -> Conv:
    """The convolution whose input gradient a transposed convolution is."""
    return replace(conv, c=conv.o, o=conv.c, in_px=conv.out_px, out_px=conv.in_px)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a call runs, and what it cannot avoid: passes over the multiplications, bytes read, bytes written."""

    cost: Cost
    passes: int
    read_bytes: float
    written_bytes: float


def _forward_parts(site: Site, conv: Conv, transposed: bool) -> Parts:
    if transposed:
        return Parts(_input_grad(site, conv), 1, conv.output_bytes + conv.weight_bytes, conv.input_bytes)
    return Parts(_forward(site, conv), 1, conv.touched_bytes + conv.weight_bytes, conv.output_bytes)


def _backward_parts(site: Site, conv: Conv, transposed: bool, of_input: bool, of_weight: bool) -> Parts:
    """The gradients asked for; those of a transposed convolution are a forward pass and a weight gradient."""
    given, made = (conv.touched_bytes, conv.output_bytes) if transposed else (conv.output_bytes, conv.input_bytes)
    costs: list[Cost] = []
    read, written = given, 0.0
    if of_input:
        costs.append((_forward if transposed else _input_grad)(site, conv))
        read, written = read + conv.weight_bytes, written + made
    if of_weight:
        costs.append(_weight_grad(site, conv))
        read, written = read + (made if transposed else conv.touched_bytes), written + conv.weight_bytes
    return Parts(_sum(*costs), len(costs), read, written)


def _peak_flops_per_s(site: Site, conv: Conv) -> float:
    """Reachable by no kernel: the matrix peak at its highest clock, or vector units with multiplications saved."""
    if site.on_matrix_units(conv):
        return 1.1 * site.chip.tensor_flops_per_s[conv.dtype]
    return 4.0 * site.chip.vector_flops_per_s


def _time(site: Site, conv: Conv, parts: Parts) -> Time:
    compute_s = parts.passes * conv.flops / _peak_flops_per_s(site, conv)
    memory_s = memory_floor_s(site.chip, parts.read_bytes, parts.written_bytes, site.warm_frac)
    floor_s = max(compute_s, memory_s)
    saved_s = site.cycles_s(site.coef["miss_cycles"]) * site.warm_frac if parts.cost[1] == parts.passes else 0.0
    busy_s = max(parts.cost[0] - saved_s, 0.5 * parts.cost[0], floor_s)
    bound = "latency" if floor_s < 0.2 * busy_s else "compute" if compute_s > memory_s else "memory"
    return Time(busy_s, floor_s, bound, parts.cost[1])


@family("conv", "conv conv1d conv2d conv3d", DEFAULTS)
def model(call: Call, chip: Chip, coef: Coef, warm_frac: float) -> Time:
    """Time of a convolution, forward or backward, by the kernels the library runs for it."""
    d = call.dims()
    conv, site = _conv(call, d), Site(chip, coef, warm_frac)
    if min(conv.n, conv.c, conv.o, conv.in_px, conv.out_px, conv.taps) <= 0:
        return Time(0.0, 0.0, "latency", 0)
    transposed = bool(d.get("transposed", 0))
    if transposed:
        conv = _swapped(conv)
    time = _run(site, conv, call.phase, d, transposed)
    if 1 < conv.groups < conv.c and time.num_kernels > conv.groups:
        apart = _run(replace(site, coef=_one_stream(coef, "")), conv, call.phase, d, transposed)
        return time._replace(beside=max(1.0, apart.busy_s / time.busy_s))
    return time


@selection
def _one_stream(coef: Coef, _: str) -> dict[str, float]:
    """The same kernels, none beside another."""
    return {**coef, "streams": 1.0}


def _run(site: Site, conv: Conv, phase: str, d: dict[str, int], transposed: bool) -> Time:
    if phase == "fwd":
        return _time(site, conv, _forward_parts(site, conv, transposed))
    return _time(site, conv, _backward_parts(site, conv, transposed, bool(d.get("dgrad", 1)), bool(d.get("wgrad", 1))))
