"""Depthwise convolutions: stencils."""

from __future__ import annotations

from math import exp

from ridgeline.cost.correction import gemm_attention as residue
from ridgeline.cost.time.conv.groups import direct_groups
from ridgeline.cost.time.conv.kernel_choice import LEARNED_ARCH, chosen_kernel, likely_cost
from ridgeline.cost.time.conv.problem import Conv, Cost, Site, both_costs, memset_cost, sum_costs


def _stencil(site: Site, elements: float, each: float, moved_bytes: float, latency: float = 0.0) -> Cost:
    busy = max(site.cycles_s(elements * each / site.chip.num_sms), site.cycles_s(latency))
    return site.cycles_s(site.coef["stencil_start_cycles"]) + both_costs(
        busy, site.dram_s(moved_bytes, "gemm_dram_frac")
    ), 1


def _linear(site: Site, kind: str, taps: int) -> float:
    return site.coef[f"stencil_{kind}cycles"] + taps * site.coef[f"stencil_{kind}tap_cycles"]


def _last(site: Site, kind: str, conv: Conv, taps: int) -> float:
    """Cycles of an element, channels last, where filters wider than five are not held in registers."""
    return _linear(site, kind, taps) * (site.coef["stencil_last_large"] if conv.side > 5 else 1.0)


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


def _stencil_forward(site: Site, conv: Conv) -> Cost:
    coef = site.coef
    elements, moved = conv.n * conv.out_px * conv.o, conv.input_bytes * (1.0 - site.warm_frac) + conv.output_bytes
    # Strides that no channels-last stencil takes: the kernel of any groups runs (6 of 6 recordings, 0 of 260)
    if conv.channels_last and (conv.stride > min(2, conv.side)):
        return direct_groups(site, conv)
    if conv.channels_last:
        skipped = max(1.0, conv.in_px / conv.out_px) ** coef["stencil_last_stride"]
        if conv.itemsize > 2:
            return _stencil(site, elements, _linear(site, "last_wide_", conv.taps) * skipped, moved)
        latency = coef["stencil_last_first_cycles"] + conv.taps * coef["stencil_last_latency_cycles"]
        # From this batch on, the library has channels-last kernels written for the filter's side (159 of 162
        # recordings).
        if conv.n < 8:
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
        return direct_groups(site, conv, "wgrad")
    if conv.itemsize > 2:
        tiled = _stencil(site, elements, _linear(site, "last_wide_grad_", conv.taps), moved)
        tiled = sum_costs(tiled, memset_cost(site), (site.cycles_s(coef["stencil_last_reduce_cycles"]), 1))
        direct = direct_groups(site, conv, "wgrad")
        told = [direct if choice.way == "direct" else tiled for choice in chosen_kernel(site, conv, "wgrad")]
        return likely_cost(told) or (direct if conv.side > 5 else tiled)
    each = _last(site, "last_weight_", conv, conv.taps) * (1.0 + 0.25 * (conv.in_px / conv.out_px - 1.0))
    each *= max(1.0, coef["stencil_last_weight_rows"] / (conv.n * conv.o))
    return sum_costs(_stencil(site, elements, each, moved), memset_cost(site))


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


def learned_stencil(site: Site, conv: Conv, op: str) -> Cost:
    """The same times that factor, on the measured architecture; wide weight gradients, of several kinds, have none."""
    seconds, kernels = stencil(site, conv, op)
    trees, share = residue.kernel_trees(f"stencil.{op}"), site.coef["residue_frac"]
    several = op == "wgrad" and conv.channels_last and conv.itemsize > 2
    if trees is None or not share or site.chip.arch != LEARNED_ARCH or conv.rank != 2 or several:
        return seconds, kernels
    return seconds * exp(share * residue.logs(trees, [stencil_features(conv)])[0]), kernels
