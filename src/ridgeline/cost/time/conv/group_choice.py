"""Convolutions in groups by the kernels that cuDNN takes: all groups in one, or side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ridgeline.cost.time.conv.groups import direct_groups, group_transforms, one_group, shared_weight_grad
from ridgeline.cost.time.conv.implicit_gemm import (
    VECTOR,
    Choice,
    Problem,
)
from ridgeline.cost.time.conv.kernel_choice import (
    TILED,
    chosen_kernel,
    kernel_cost,
    likely_cost,
    problem_of,
    vector_choice,
    vector_kernel,
)
from ridgeline.cost.time.conv.problem import (
    LONG_FILTER,
    Conv,
    Cost,
    Site,
    generic_transform,
    group_size,
    layout_transform,
    memset_cost,
    padded_channels,
    sum_costs,
    x_transform,
    y_transform,
)
from ridgeline.cost.time.conv.vector_units import saved


def _block(choice: Choice, op: str) -> int:
    """Channels of a tile into which narrow groups are packed, as many as fit."""
    return min(choice.rows, choice.columns) if op == "wgrad" else choice.columns


def _group_problem(site: Site, conv: Conv, choice: Choice, op: str) -> Problem:
    """All groups in one kernel: several to a tile where they are narrow, else each in its own tiles."""
    size, block = group_size(conv), _block(choice, op)
    whole = problem_of(site, conv, choice, op)
    if size <= block:
        blocks = -(-conv.groups // (block // size))
        if op == "wgrad":
            return replace(whole, rows=block, columns=block, repeat=blocks * conv.taps)
        return replace(whole, columns=block, channels=block, repeat=blocks)
    wide, tall = padded_channels(conv.c // conv.groups), padded_channels(conv.o // conv.groups)
    if op == "wgrad":
        return replace(whole, rows=tall, columns=wide, repeat=conv.groups * conv.taps)
    columns, channels = (tall, wide) if op == "fwd" else (wide, tall)
    return replace(whole, columns=columns, channels=channels, repeat=conv.groups)


def _joint_groups(site: Site, conv: Conv, choice: Choice, op: str) -> Cost:
    """All groups in one kernel, between the transforms that bring them to its width."""
    wide, tall, size = conv.c // conv.groups, conv.o // conv.groups, group_size(conv)
    seconds, kernels = kernel_cost(site, conv, choice, op, _group_problem(site, conv, choice, op))
    if size < _block(choice, op):
        tall_tile = op != "wgrad" and choice.rows > 64
        seconds *= site.coef.get("packed_tall" if tall_tile else f"packed_{op}_{choice.way}", 1.0)
    return sum_costs(group_transforms(site, conv, wide == size, tall == size), (seconds, kernels))


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
        # What is added to the duration of a kernel that fills the chip by those beside it
        return groups * sum(step.seconds * (1.0 + 0.45 * step.fill) for step in steps), groups * len(steps)
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
    busy_s = generic_transform(site, n, channels, px)[0] - start_s
    return Step(start_s + busy_s * (0.08 + 0.92 * full), max(0.5, _spread(site, n, channels, px)))


def _tensor_steps(site: Site, conv: Conv, op: str) -> list[Step]:
    """What brings a group's tensors to the kernel and its result back, as 640 recorded loops have it."""
    one = one_group(conv)
    odd_in, odd_out = _is_odd(conv, one.c), _is_odd(conv, one.o)
    odd = odd_in or odd_out
    memset = Step(memset_cost(site)[0], 0.1)
    if conv.channels_last:
        steps = [(_rearranged(site, one.n, c, px) if bad else _cut_out(site, one, c, px))
                 for c, px, bad in ((one.c, one.in_px, odd_in), (one.o, one.out_px, odd_out))]  # fmt: skip
        if odd:
            padded = Step(site.cycles_s(site.coef["pad_start_cycles"]), 0.1)
            steps.append(padded if conv.taps > 1 else _rearranged(site, one.o, one.c, 1))
    else:
        steps = [Step(x_transform(site, one)[0]), Step(y_transform(site, one, fresh=op == "fwd")[0])]
        if odd_out and op != "wgrad":
            steps.append(_rearranged(site, one.o, one.c, one.taps))
        elif conv.taps > 1 or odd:
            steps.append(Step(layout_transform(site, one.o, one.c, one.taps, one.itemsize, op == "wgrad")[0], 0.2))
    num_cleared = {"fwd": 2 if odd_in else int(odd_out), "dgrad": 2 if odd_out else int(odd_in),
                   "wgrad": int(odd_in) + int(odd_out)}[op]  # fmt: skip
    return steps + [memset] * num_cleared


def _apart_groups(site: Site, conv: Conv, choice: Choice, op: str) -> Cost:
    """One group beside another: each is cut out or transposed, computed, and put back."""
    one = one_group(conv)
    problem = problem_of(site, one, choice, op)
    seconds, kernels = kernel_cost(site, one, choice, op, problem)
    tiles = -(-problem.rows // choice.rows) * -(-problem.columns // choice.columns) * choice.split
    small = Step(memset_cost(site)[0], 0.1)
    name = "apart_long" if conv.taps > LONG_FILTER else f"apart_{op}_{choice.way}"
    main_s = (seconds - (kernels - 1) * small.seconds) * site.coef.get(name, 1.0)
    steps = [Step(main_s, _filled(site, tiles, choice.rows * choice.columns))]
    steps += [small] * (kernels - 1) + _tensor_steps(site, conv, op)
    return _side_by_side(site, steps, conv.groups)


def _turned(site: Site, one: Conv, channels: int, px: int) -> Step:
    """Single-precision tensors of one group, copied between strides an element a thread."""
    cycles = site.coef["turn_cycles"] + one.n * px * channels * site.coef["turn_element_cycles"]
    return Step(site.cycles_s(cycles), _spread(site, one.n, channels, px))


def _vector_steps(site: Site, conv: Conv, choice: Choice, op: str) -> list[Step]:
    """Copies around the vector kernels: tensors of the other layout, or of the channels of one group."""
    one = one_group(conv)
    moved = [Step(x_transform(site, one)[0]), Step(y_transform(site, one)[0])]
    filters = Step(layout_transform(site, one.o, one.c, one.taps, one.itemsize, op == "wgrad")[0], 0.2)
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
    return [Step(memset_cost(site)[0], 0.1)] if choice.way == "indexed" else []


def groups_by_choice(site: Site, conv: Conv, op: str) -> Cost | None:
    """A pass in groups by the kernel that cuDNN is known to take; None where that is not known."""
    return likely_cost([_groups_by(site, conv, op, choice) for choice in chosen_kernel(site, conv, op)])


def _groups_by(site: Site, conv: Conv, op: str, choice: Choice) -> Cost | None:
    """The same told the choice."""
    if choice.way == "shared":
        return shared_weight_grad(site, conv)
    if choice.way == "direct":
        return direct_groups(site, conv, op)
    if choice.way in TILED and site.on_matrix_units(conv):
        # Channels of a group beyond which no kernel takes all groups (30 of 30 recordings, and 2 of 700 below)
        wide = max(conv.c, conv.o) // conv.groups > 256
        joint = choice.way not in ("copy", "copy_strided", "analytic") and not wide
        return (_joint_groups if joint else _apart_groups)(site, conv, choice, op)
    if choice.way in ("fourier", "winograd"):
        return _saving_apart(site, conv, choice, op)
    if choice.way not in VECTOR:
        return None
    # One group beside another on the vector units
    one = one_group(conv)
    taken, problem = vector_choice(site, one, choice, op)
    seconds, kernels = vector_kernel(site, one, choice, op)
    tiles = -(-problem.rows // taken.rows) * -(-problem.columns // taken.columns) * taken.split
    small = Step(memset_cost(site)[0], 0.1)
    main_s = (seconds - (kernels - 1) * small.seconds) * site.coef.get(f"apart_{op}_{choice.way}", 1.0)
    steps = [Step(main_s, _filled(site, tiles, taken.rows * taken.columns))]
    steps += [small] * (kernels - 1) + _vector_steps(site, conv, choice, op)
    return _side_by_side(site, steps, conv.groups)


def _saving_apart(site: Site, conv: Conv, choice: Choice, op: str) -> Cost:
    """One group beside another by a way that saves multiplications."""
    one = replace(one_group(conv), channels_last=False)
    seconds, kernels = saved(site, one, choice, op)
    moved = _vector_steps(site, conv, Choice("simt"), "fwd") if conv.channels_last else []
    return _side_by_side(site, [Step(seconds / kernels)] * kernels + moved, conv.groups)
