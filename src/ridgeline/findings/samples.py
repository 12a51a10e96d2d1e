"""Samples that a network is asked about one by one: the same pass many times a round, each over another piece of one
tensor, or over a sample that got a dim for its batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from ridgeline.findings.replay import Index
from ridgeline.findings.scene import BACKWARD, Scene
from ridgeline.findings.shapes import is_shape, parsed
from ridgeline.trace.kind import Kind

MANY_PASSES = 6
CUTS = frozenset(
    f"aten::{name}" for name in ("split", "split_with_sizes", "chunk", "tensor_split", "unbind", "slice", "narrow")
)
ENTERS = r"^aten::(linear|matmul|addmm|mm|conv\w*|embedding(_bag)?|\w*layer_norm|rms_norm|batch_norm|group_norm|lstm|gru)$"
"""Where a network begins to work on what it is given."""
PASS_KERNELS = 10
"""Of one pass, at least: less is a loop over tensors, or an expert."""
ALIKE, MOSTLY, COVERED = 0.25, 0.75, 0.5
"""Passes differ by so much, so many of them do not differ by more, and of the kernels outside of backward passes so many
are theirs."""
Shape = tuple[int, ...]


def passes_over_samples(scene: Scene) -> float:
    """How many passes of a round are over pieces of one tensor or over samples by themselves; 0 where there are none, or
    sizes were not recorded. Moments of a sequence are pieces along another dim, and one state that is changed again and
    again has no pieces."""
    if "shapes" not in scene.trace.extra:
        return 0.0
    calls = _calls(scene)
    given = [(scene.trace.words[int(scene.trace.name[row])], _tensors(scene, row)) for row in calls.tolist()]
    found = (len(starts) for starts in _series(scene, calls, given) if _are_passes(scene, starts))
    return max(found, default=0) / scene.num_rounds


def _calls(scene: Scene) -> Index:
    """Ops that a program called itself, outside of backward passes, in their order."""
    ops = scene.of_kind(Kind.OP)
    ops = ops[np.isin(scene.trace.thread[ops], scene.main_threads)]
    inner = np.isin(scene.trace.parent[ops], ops)
    ops = ops[~inner & ~scene.words_like(r"evaluate_function|Backward\d*$|^Optimizer\.")[scene.trace.name[ops]]]
    return ops[np.argsort(scene.start_ns[ops], kind="stable")]


def _tensors(scene: Scene, row: int) -> tuple[Shape, ...]:
    return tuple(tuple(shape) for shape in parsed(scene.trace.text("shapes", row)) if is_shape(shape) and shape)


def _series(
    scene: Scene, calls: Index, given: Sequence[tuple[str, tuple[Shape, ...]]]
) -> Iterator[list[int]]:
    """Times at which passes may begin: ops that are given a piece of a tensor, as often as it has pieces, and ops that
    are given a sample with a dim of its own, once after each that was made."""
    enters = scene.words_like(ENTERS)[scene.trace.name[calls]]
    whole = {shapes[0] for name, shapes in given if name in CUTS and shapes and shapes[0][0] >= MANY_PASSES}
    samples, fresh = defaultdict[int, list[int]](list), set[Shape]()
    pieces = defaultdict[tuple[str, Shape], list[int]](list)
    for row, (name, shapes), enter in zip(calls.tolist(), given, enters.tolist(), strict=True):
        if name == "aten::unsqueeze" and shapes:
            fresh.add((1, *shapes[0]))
        if not enter:
            continue
        for shape in dict.fromkeys(shapes):
            pieces[name, shape].append(int(scene.start_ns[row]))
            if shape in fresh:
                samples[len(shape)].append(int(scene.start_ns[row]))
                fresh.discard(shape)
    yield from samples.values()
    for (_, shape), starts in pieces.items():
        num = len(starts) / scene.num_rounds
        if any(all_[1:] == shape[1:] and abs(all_[0] - num * shape[0]) <= 0.1 * all_[0] for all_ in whole):
            yield starts


def _are_passes(scene: Scene, starts: Sequence[int]) -> bool:
    """Whether about as many kernels follow each, enough for a network, and most of what is launched."""
    if len(starts) < MANY_PASSES * scene.num_rounds:
        return False
    launches = np.sort(scene.launch_ns[~scene.under(BACKWARD) & (scene.work_kind == int(Kind.KERNEL))])
    follow = np.diff(np.searchsorted(launches, np.sort(starts)))
    usual = float(np.median(follow))
    alike = np.abs(follow - usual) <= ALIKE * usual
    return usual >= PASS_KERNELS and bool(alike.mean() >= MOSTLY) and usual * len(starts) >= COVERED * len(launches)
