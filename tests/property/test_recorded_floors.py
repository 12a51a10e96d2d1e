"""No recorded op is faster than its floor, as far as a floor knows which operands are different memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ridgeline.profiler.floors import with_floors
from ridgeline.profiler.ops import site_of
from ridgeline.resources import data_dir
from ridgeline.trace import Trace, read

RECORDINGS = sorted((data_dir() / "recordings" / "h200").glob("*/*.planted.json.xz"))[::6]


@pytest.mark.parametrize("file", RECORDINGS, ids=lambda file: f"{file.parent.name}/{file.name.split('.')[0]}")
def test_no_recorded_op_is_faster_than_its_floor(file: Path):
    trace, _ = with_floors(read(file, cache=False))
    assert [found for found in _below(trace) if found[1] > 1.05] == []


def _below(trace: Trace) -> Iterator[tuple[str, float, str]]:
    """Ops, their floor over what they took, and their shapes."""
    floor_s = trace.extra["floor_s"]
    works = np.flatnonzero(trace.gpu & np.isfinite(floor_s) & (trace.launch >= 0))
    ops = trace.parent[trace.launch[works]]
    works, ops = works[ops >= 0], ops[ops >= 0]
    least_s = np.bincount(ops, floor_s[works], len(trace))
    taken_s = np.bincount(ops, trace.duration_s[works], len(trace))
    for op in np.unique(ops[least_s[ops] > taken_s[ops]]).tolist():
        shapes = trace.text("shapes", op)
        given = [
            int(np.prod(shape)) for shape in json.loads(shapes) if shape and all(isinstance(n, int) for n in shape)
        ]
        one_memory = 2.0 if len(given) > len(set(given)) else 1.0  # x * x, or x.mT @ x, reads one tensor once
        yield trace.words[int(trace.name[op])], float(least_s[op] / taken_s[op]) / one_memory, shapes


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("aten::mul", [[4096, 4096], [4096, 4096]]),
        ("aten::add", [[4096, 4096], [4096, 4096], []]),
        ("aten::exp", [[4096, 4096]]),
        ("aten::mm", [[4096, 4096], [4096, 4096]]),
        ("aten::addmm", [[4096], [4096, 4096], [4096, 4096], [], []]),
    ],
)
def test_what_an_op_writes_into_is_not_read(op, arguments):
    def read_bytes(shapes) -> float:
        dtypes = ["float" if shape else "Scalar" for shape in shapes]
        concrete = ["" if shape else "1" for shape in shapes]
        site = site_of(op, json.dumps(shapes), json.dumps(dtypes), "", json.dumps(concrete))
        assert site is not None
        return site.read_bytes

    assert read_bytes([*arguments, [4096, 4096]]) == read_bytes(arguments)


def test_packed_sequences_need_no_more_than_as_many_of_equal_lengths():
    packed = [[40_000, 16, 64]] * 3 + [[193], [193]] + [[]] * 6
    dtypes = ["c10::BFloat16"] * 3 + ["int"] * 2 + ["Scalar"] * 6
    concrete = ["", "", "", "", "", "64", "64", "0.", "False", "False", ""]
    site = site_of("aten::_flash_attention_forward", json.dumps(packed), json.dumps(dtypes), "", json.dumps(concrete))
    assert site is not None and (site.attrs["b"], site.attrs["s"]) == (192, 208)
