"""Time of convolutions: what cuDNN and ATen launch for a shape, kernel by kernel.

A dense convolution is an implicit GEMM over channels-last tensors: rows are pixels, columns output channels, and the
inner loop walks filter taps and input channels. Tiles quantize the grid, waves quantize the tiles. Tensors that are not
channels-last are transposed before and after by kernels of their own, often as costly as the arithmetic. A pointwise
convolution is a plain GEMM. Single precision runs on the vector units, depthwise filters on stencil kernels, and
groups that no kernel takes whole are run one after another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.cost.call import Call, Coef, Time, family, memory_floor_s, selection
from ridgeline.cost.time.chip import Chip
from ridgeline.cost.time.conv.depthwise import learned_stencil
from ridgeline.cost.time.conv.group_choice import groups_by_choice
from ridgeline.cost.time.conv.groups import (
    direct_groups,
    grouped_forward,
    grouped_input_grad,
    grouped_weight_grad,
    shared_weight_grad,
    unless_direct,
)
from ridgeline.cost.time.conv.implicit_gemm import (
    VECTOR,
    Choice,
)
from ridgeline.cost.time.conv.kernel_choice import TILED, by_tiles, chosen_kernel, likely_cost, vector_way
from ridgeline.cost.time.conv.matrix_units import forward_loop, input_grad_loop, weight_grad_loop
from ridgeline.cost.time.conv.pointwise import (
    misalignment,
    pointwise_forward,
    pointwise_weight_grad,
    small_images,
    transposed_product,
)
from ridgeline.cost.time.conv.problem import (
    DEFAULTS,
    Conv,
    Cost,
    Site,
    both_costs,
    conv_of_call,
    memset_cost,
    odd_filters,
    padded_channels,
    sum_costs,
    w_transform,
    widened_sum,
    x_transform,
    y_transform,
)
from ridgeline.cost.time.conv.vector_units import saved, simt_forward, simt_input_grad, simt_weight_grad, vector_cost


def _input_grad_tiles(site: Site, conv: Conv) -> Cost:
    loop = sum_costs(input_grad_loop(site, conv), _grad_widened(site, conv), odd_filters(site, conv))
    return (
        loop
        if conv.channels_last
        else sum_costs(w_transform(site, conv), y_transform(site, conv), loop, x_transform(site, conv, fresh=True))
    )


def _weight_grad_tiles(site: Site, conv: Conv) -> Cost:
    loop = sum_costs(weight_grad_loop(site, conv), _grad_widened(site, conv))
    return (
        loop
        if conv.channels_last
        else sum_costs(x_transform(site, conv), y_transform(site, conv), loop, w_transform(site, conv, fresh=True))
    )


def _input_grad_product(site: Site, conv: Conv) -> Cost:
    return pointwise_forward(site, conv, "dgrad")


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
    return start_s + both_costs(seconds - start_s, depth_s), kernels


def _as_product(site: Site, conv: Conv, op: str) -> Cost:
    return pointwise_weight_grad(site, conv) if op == "wgrad" else pointwise_forward(site, conv, op)


def _by_choice(site: Site, conv: Conv, op: str) -> Cost | None:
    """A dense pass by the kernel cuDNN is known to take; None where that is not known or is a library's product."""
    costs = [_dense_by(site, conv, op, choice) for choice in chosen_kernel(site, conv, op)]
    return None if 2 * costs.count(None) > len(costs) else likely_cost(costs)


def _dense_by(site: Site, conv: Conv, op: str, choice: Choice) -> Cost | None:
    """The same told the choice."""
    if choice.way == "product":
        aligned = conv.pointwise and site.on_matrix_units(conv) and misalignment(site, conv) == 1.0
        return _as_product(site, conv, op) if aligned else None
    if choice.way in TILED and site.on_matrix_units(conv):
        return by_tiles(site, conv, choice, op)
    if choice.way in ("direct", "shared"):
        return direct_groups(site, conv, op) if choice.way == "direct" else shared_weight_grad(site, conv)
    if choice.way in VECTOR:
        return vector_way(site, conv, choice, op)
    return saved(site, conv, choice, op) if choice.way in ("fourier", "winograd") else None


def _forward(site: Site, conv: Conv) -> Cost:
    if conv.depthwise:
        return learned_stencil(site, conv, "fwd")
    if conv.groups == 1 and (known := _by_choice(site, conv, "fwd")) is not None:
        return known
    if conv.groups > 1:
        known = groups_by_choice(site, conv, "fwd")
        return known or unless_direct(grouped_forward(site, conv), direct_groups(site, conv))
    if not site.on_matrix_units(conv):
        plain = simt_forward(site, conv)
        if not conv.channels_last or (conv.c <= 16 and not conv.pointwise):  # few channels: read where they lie
            return plain
        return sum_costs(x_transform(site, conv), w_transform(site, conv), plain, y_transform(site, conv, fresh=True))
    product = pointwise_forward(site, conv, "fwd") if conv.pointwise else None
    if product and not small_images(conv) and misalignment(site, conv) == 1.0:
        return product
    if _left_in_place(conv):
        return _vector_pass(site, conv)
    whole = forward_loop(site, conv)
    if not conv.channels_last:
        whole = sum_costs(x_transform(site, conv), w_transform(site, conv), whole, y_transform(site, conv, fresh=True))
    if product and not small_images(conv):  # rows off 16 bytes: a slow product, or images transposed first
        return min(product, whole)
    whole = sum_costs(whole, odd_filters(site, conv), widened_sum(site, conv, conv.out_px, conv.o))
    return whole if conv.c % 8 == 0 else min(_image_forward(site, conv), sum_costs(whole, _widen(site, conv)))


def _widen(site: Site, conv: Conv) -> Cost:
    """Zeros for the channels that fill up eights, for images and filters; channels-first transforms write the rest."""
    if conv.channels_last:
        return sum_costs(widened_sum(site, conv, conv.in_px, conv.c), w_transform(site, conv), memset_cost(site))
    return sum_costs(
        memset_cost(site, conv.n * conv.in_px * padded_channels(conv.c) * conv.itemsize), memset_cost(site)
    )


def _image_forward(site: Site, conv: Conv) -> Cost:
    """Few input channels and no padding: 16-bit tensors convolved on the vector units."""
    work = 2.0 * conv.n * conv.out_px * conv.o * (-(-conv.c * conv.taps // 8) * 8)
    seconds = work / (site.coef["simt_image_frac"] * site.chip.vector_flops_per_s)
    return vector_cost(site, seconds, conv.touched_bytes + conv.output_bytes)


def _input_grad(site: Site, conv: Conv) -> Cost:
    if conv.depthwise:
        return learned_stencil(site, conv, "dgrad")
    if conv.groups == 1 and (known := _by_choice(site, conv, "dgrad")) is not None:
        return known
    if conv.groups > 1:
        known = groups_by_choice(site, conv, "dgrad")
        return known or unless_direct(grouped_input_grad(site, conv), direct_groups(site, conv, "dgrad"))
    if not site.on_matrix_units(conv):
        plain = simt_input_grad(site, conv)
        return (
            sum_costs(y_transform(site, conv), w_transform(site, conv), plain, x_transform(site, conv, fresh=True))
            if conv.channels_last
            else plain
        )
    if conv.pointwise:
        return _input_grad_product(site, conv)
    return _input_grad_tiles(site, conv)


def _grad_widened(site: Site, conv: Conv) -> Cost:
    return sum_costs(widened_sum(site, conv, conv.in_px, conv.c), widened_sum(site, conv, conv.out_px, conv.o))


def _weight_grad(site: Site, conv: Conv) -> Cost:
    if conv.depthwise:
        return learned_stencil(site, conv, "wgrad")
    if conv.groups == 1 and (known := _by_choice(site, conv, "wgrad")) is not None:
        return known
    if conv.groups > 1:
        known = groups_by_choice(site, conv, "wgrad")
        return known or unless_direct(grouped_weight_grad(site, conv), direct_groups(site, conv, "wgrad"))
    if not site.on_matrix_units(conv):
        return simt_weight_grad(site, conv)
    if conv.pointwise and not transposed_product(conv):
        return pointwise_weight_grad(site, conv)
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
    return Parts(sum_costs(*costs), len(costs), read, written)


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
    conv, site = conv_of_call(call, d), Site(chip, coef, warm_frac)
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
