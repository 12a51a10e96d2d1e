"""Traces stored by column come back event by event."""

from __future__ import annotations

import json
import lzma
import random
from contextlib import suppress

import pytest

from ridgeline.errors import InputError
from ridgeline.trace import read
from ridgeline.trace.compact import packed, unpacked


def events(num=200):
    draw = random.Random(0)
    made = [{"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}}]
    at = 1.7e9
    for i in range(num):
        at += draw.randrange(1, 9000) / 1000
        args = (
            {"External id": i * 3, "Input Dims": [[draw.randrange(4), 8], []]}
            if i % 3
            else {"correlation": i, "stream": 7}
        )
        made.append({"ph": "X", "cat": "cpu_op" if i % 3 else "kernel", "name": f"op {i % 5}", "pid": 7, "tid": i % 2,
                     "ts": round(at, 3), "dur": draw.randrange(5000) / 1000, "args": args})  # fmt: skip
    return made


def test_every_event_comes_back_with_its_nanoseconds():
    head, made = {"schemaVersion": 1, "ridgeline": {"a": [1]}}, events()
    found = unpacked(packed(head, made), "x")
    assert found.pop("traceEvents") == made
    assert found == head


def test_the_front_door_reads_them(tmp_path):
    path = tmp_path / "t.json.xz"
    path.write_bytes(packed({"ridgeline": {"unprofiled_step_s": 0.5}}, events()))
    plain = tmp_path / "t.json"
    plain.write_text(json.dumps({"traceEvents": events()}))
    trace, other = read(path, cache=False), read(plain, cache=False)
    assert trace.meta["ridgeline"] == {"unprofiled_step_s": 0.5}
    assert trace.duration_s.tolist() == other.duration_s.tolist() and trace.gpu.sum() == other.gpu.sum() > 0


@pytest.mark.parametrize("data", [b"", b"\xfd7zXZ\x00 broken", packed({}, [])[:-9]])
def test_damaged_files_are_refused(data):
    with pytest.raises(InputError, match=r"stored by column|incomplete"):
        unpacked(data, "x")


def test_damaged_columns_are_an_error_that_says_so():
    document = json.loads(lzma.decompress(packed({}, events(20))))
    draw = random.Random(1)
    for _ in range(200):
        broken = json.loads(json.dumps(document))
        part = draw.choice([broken, broken["tables"][0], broken["tables"][-1]])
        part[draw.choice(sorted(part))] = draw.choice([None, 3, "x", [], {}, [["w", 10**9]], ["w", -(10**9)]])
        with suppress(InputError):  # and nothing else
            assert isinstance(unpacked(lzma.compress(json.dumps(broken).encode()), "x")["traceEvents"], list)


def test_one_cut_short_and_one_that_unpacks_without_end_are_refused(monkeypatch):
    whole = packed({}, events())
    with pytest.raises(InputError, match="incomplete"):
        unpacked(whole[: len(whole) // 2], "x")
    monkeypatch.setattr("ridgeline.trace.compact.MAX_BYTES", 1000)
    with pytest.raises(InputError, match="more than"):
        unpacked(whole, "x")
