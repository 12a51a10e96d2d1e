"""A few hundred damaged files, chosen by number: an answer or a refusal, never a crash."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def fuzzer():
    from lab.fuzz import traces

    return traces


def test_damaged_files_are_answered_or_refused(fuzzer):
    counts = fuzzer.fuzz(num=300, seconds=float("inf"), seed=1, more=[])
    assert counts["crashed"] == 0
    assert min(counts["refused"], counts["partial"]) > 20


def test_a_bomb_is_unpacked_no_further_than_an_event_may_be_long(tmp_path, monkeypatch):
    import gzip

    from ridgeline.errors import InputError
    from ridgeline.trace import events, read

    monkeypatch.setattr(events, "_MAX_CARRY_BYTES", 4 << 20)
    (tmp_path / "bomb.json.gz").write_bytes(gzip.compress(b'{"traceEvents": [{"name": "' + b"a" * (40 << 20)))
    with pytest.raises(InputError, match="no end of an event within 4 MiB"):
        read(tmp_path / "bomb.json.gz")
