"""Convolutions in groups of channels where no recorded choice says which kernels run."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.cost.time.conv.matrix_units import Loop, copy_tile, loop_s
from ridgeline.cost.time.conv.problem import (
    LONG_FILTER,
    MEASURED_VECTOR_FLOPS_PER_S,
    WIDE_SIDE,
    Conv,
    Cost,
    Site,
    generic_transform,
    group_size,
    memset_cost,
    pass_choice,
    sum_costs,
    w_transform,
    x_transform,
    y_transform,
)
from ridgeline.cost.time.conv.vector_units import simt_s


def _beside(site: Site, groups: int, tiles: int) -> float:
    """How many groups run beside each other: the library puts them on several streams, where a chip has room."""
    room = 2.0 * site.chip.num_sms / max(1, tiles)
    return max(1.0, min(float(groups), site.coef["streams"], room))


_WIDEST_GROUP, _MANY_FILTERS = 82, 1344
"""Filters of a group beyond which groups run one after another, and of all groups beyond which they are packed."""
_FEW_ROWS, _LITTLE = 8000, 2000
"""Output pixels below which wide groups, and groups of sixteen and more, are not packed."""


def _packed(conv: Conv) -> bool:
    """Whether one kernel takes all groups of 16-bit tensors, packed block-diagonally into 64-wide tiles."""
    wide, tall, rows = conv.c // conv.groups, conv.o // conv.groups, conv.n * conv.out_px
    if conv.taps == 1:
        return max(wide, tall) <= 12 and conv.groups > 2
    if conv.taps > LONG_FILTER or (conv.groups == 2 and wide < 64) or tall > _WIDEST_GROUP:
        return False
    if conv.o > _MANY_FILTERS:
        return True
    if conv.side == 3:
        apart = wide >= 64 and rows < _FEW_ROWS and not conv.channels_last
        return not (apart or (wide >= 16 and conv.groups <= 4 and rows < _LITTLE))
    return wide < 32 if conv.side < WIDE_SIDE else wide < 16 or (wide < 24 and rows >= _FEW_ROWS)


def grouped_forward(site: Site, conv: Conv) -> Cost:
    wide, tall = conv.c // conv.groups, conv.o // conv.groups
    if not site.on_matrix_units(conv):
        return _wide_type_groups(site, conv)
    if wide < 4 or tall == 1:
        return _narrow_groups(site, conv)
    if _packed(conv):
        return _packed_groups(site, conv, conv.n * conv.out_px)
    if conv.taps > LONG_FILTER:
        rows = conv.n * conv.out_px
        single = Loop(rows, tall, wide, conv.taps, conv.touched_bytes / conv.groups, conv.output_bytes / conv.groups)
        # Their kernels work out every address: slower by this (one recorded speech encoder)
        each_s = 3.3 * loop_s(site, single, (64, 64, 64, False), conv.dtype)
        each_s += 3 * site.cycles_s(site.coef["group_start_cycles"])
        return conv.groups * each_s, 4 * conv.groups
    return _looped_groups(site, conv, conv.n * conv.out_px)


def _packed_groups(site: Site, conv: Conv, rows: int) -> Cost:
    """One kernel over all groups, between transforms that bring them to the width of a packed tile."""
    wide, tall, size = conv.c // conv.groups, conv.o // conv.groups, group_size(conv)
    tiles = -(-conv.groups // max(1, 64 // size)) * -(-size // 64)
    loop = Loop(rows, 64, 64 * -(-size // 64), conv.taps, conv.touched_bytes, conv.output_bytes, repeat=tiles)
    inner = loop_s(site, loop, (64, 64, 64, site.tma), conv.dtype), 1
    return sum_costs(group_transforms(site, conv, size == wide, size == tall), inner)


def group_transforms(site: Site, conv: Conv, whole_in: bool, whole_out: bool) -> Cost:
    size = group_size(conv)
    parts = [] if whole_in and whole_out else [generic_transform(site, conv.o, conv.c // conv.groups, conv.taps)]
    for whole, channels, px in ((whole_in, conv.c, conv.in_px), (whole_out, conv.o, conv.out_px)):
        if conv.channels_last and not whole:
            parts.append(generic_transform(site, conv.n, channels, px))
        if not whole:
            parts.append(memset_cost(site, conv.n * px * conv.groups * size * conv.itemsize))
    if not conv.channels_last:
        parts += [x_transform(site, conv), y_transform(site, conv, fresh=True)]
    return sum_costs(*parts)


def one_group(conv: Conv) -> Conv:
    return replace(conv, c=conv.c // conv.groups, o=conv.o // conv.groups, groups=1)


def _looped_groups(site: Site, conv: Conv, rows: int) -> Cost:
    """Wide groups one after another: each is cut out or transposed, convolved, and put back."""
    one = one_group(conv)
    loop = Loop(rows, one.o, one.c, conv.taps, one.touched_bytes, one.output_bytes)
    tile = copy_tile(one.o, -(-rows // 128) * -(-one.o // 128))
    inner = loop_s(site, loop, tile, conv.dtype) + site.cycles_s(site.coef["group_start_cycles"])
    moved = sum_costs(x_transform(site, one), y_transform(site, one, fresh=True))
    if not conv.channels_last:
        moved = sum_costs(moved, w_transform(site, one))
    return conv.groups * (inner + moved[0]), conv.groups * (1 + moved[1])


def _vector_groups(site: Site, conv: Conv) -> Cost:
    """A vector kernel for each group: an inner loop of its own depth, sixteen output channels at a time."""
    one, coef = one_group(conv), site.coef
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


def direct_groups(site: Site, conv: Conv, op: str = "fwd") -> Cost:
    """One kernel that takes any groups; other chips follow their vector peak."""
    if op == "wgrad" and _held_whole(conv):
        return shared_weight_grad(site, conv)
    coef = pass_choice(site.coef, f"direct.{op}.{'last' if conv.channels_last else 'first'}")
    seconds = sum(coef[name] * value for name, value in direct_terms(conv, op).items())
    return seconds * MEASURED_VECTOR_FLOPS_PER_S / site.chip.vector_flops_per_s, 1


def shared_terms(conv: Conv) -> dict[str, float]:
    """The same for the weight gradient of 16 bits that holds tiles of images in shared memory."""
    weights, pixels = float(conv.o * (conv.c // conv.groups) * conv.taps), float(conv.n * conv.out_px)
    elements = float(conv.n * (conv.out_px * conv.o + conv.in_px * conv.c))
    return {"start": 1.0, "weight": weights, "image": float(conv.n), "pixel": pixels, "tap": pixels * conv.taps,
            "channel": pixels * conv.o * (conv.c // conv.groups), "last": elements * conv.channels_last,
            "strided": elements * float(conv.stride > 1)}  # fmt: skip


def shared_weight_grad(site: Site, conv: Conv) -> Cost:
    coef = pass_choice(site.coef, "shared.wgrad")
    seconds = sum(coef[name] * value for name, value in shared_terms(conv).items())
    return seconds * MEASURED_VECTOR_FLOPS_PER_S / site.chip.vector_flops_per_s, 1


def _held_whole(conv: Conv) -> bool:
    """Weight gradients of 16 bits whose images are small enough to be held in shared memory."""
    # Pixels of an output image up to which a weight gradient is made from shared memory (16 of 17 recordings)
    small = conv.out_px <= 1024 and conv.stride <= 2 and 1 < conv.side <= WIDE_SIDE
    return conv.itemsize <= 2 and small and conv.o > 12 and conv.groups == 1


def unless_direct(usual: Cost, direct: Cost) -> Cost:
    """The library does not run groups one after another where its direct kernel is so much faster."""
    # Share of the usual way's time below which the direct kernel is taken (least mean error over 1,700 recordings).
    return direct if direct[0] < 0.45 * usual[0] else usual


def _narrow_groups(site: Site, conv: Conv) -> Cost:
    """16-bit groups of up to three channels, or of one output channel."""
    wide, tall = conv.c // conv.groups, conv.o // conv.groups
    if tall == 1 and wide > 8:
        return _packed_groups(site, conv, conv.n * conv.out_px) if conv.side == 3 else _vector_groups(site, conv)
    if conv.channels_last:
        direct = tall == 1 or (conv.taps == 1 and tall <= wide)
        return direct_groups(site, conv) if direct else _engine_groups(site, conv)
    direct = 1 < conv.side < WIDE_SIDE and tall <= wide
    return direct_groups(site, conv) if direct else _vector_groups(site, conv)


def _wide_type_groups(site: Site, conv: Conv) -> Cost:
    """Single precision: pointwise groups in great number directly, others one after another where that is faster."""
    wide, tall = conv.c // conv.groups, conv.o // conv.groups
    if conv.taps == 1 and conv.groups >= 32:
        return direct_groups(site, conv)
    if not conv.channels_last:
        return min(_vector_groups(site, conv), direct_groups(site, conv))
    if conv.taps > 1 and wide >= 16 and (max(wide, tall) >= 24 or conv.side >= WIDE_SIDE):
        one = one_group(conv)
        inner = simt_s(site, conv.n * conv.out_px, tall, wide * conv.taps), 1
        each = sum_costs(x_transform(site, one), w_transform(site, one), inner, y_transform(site, one, fresh=True))
        return conv.groups * each[0], conv.groups * each[1]
    return min(_engine_groups(site, conv), direct_groups(site, conv))


def _pointwise_groups(site: Site, conv: Conv, rows: int, packed: bool) -> Cost:
    """Gradients of one tap: a product for each group, or all groups in one kernel."""
    if packed:
        return _packed_groups(site, conv, rows)
    each = site.coef["group_matrix_cycles"] + rows * site.coef["group_row_cycles"]
    return conv.groups * site.cycles_s(each), 4 * conv.groups


def grouped_input_grad(site: Site, conv: Conv) -> Cost:
    if conv.taps > 1 or not site.on_matrix_units(conv):
        return _grouped_grad(site, conv, conv.n * conv.in_px)
    wide = conv.c // conv.groups
    packed = 22 < wide <= 36 if conv.stride > 1 else wide <= 6 and conv.groups > 24
    return _pointwise_groups(site, conv, conv.n * conv.in_px, packed)


def grouped_weight_grad(site: Site, conv: Conv) -> Cost:
    rows = conv.n * conv.out_px
    if conv.taps > 1 or not site.on_matrix_units(conv):
        return _grouped_grad(site, conv, rows)
    few = conv.stride > 1 and rows <= 11_000
    if few and not conv.channels_last:
        return direct_groups(site, conv, "wgrad")
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
    coef, one = site.coef, one_group(conv)
    share = min(1.0, one.o / 32.0)
    each_s = one.flops / (coef["simt_atomic_frac"] * share * site.chip.vector_flops_per_s)
    if conv.taps == 1 and not conv.channels_last:
        each_s += (one.input_bytes + one.output_bytes) / (2.0 * coef["group_transpose_bytes_per_s"])
    return conv.groups * (each_s + site.cycles_s(coef["group_grad_cycles"])), 2 * conv.groups
