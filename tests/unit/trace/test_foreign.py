"""Profiles of other tools: XPlane files are read, others are answered with the command that converts them."""

from __future__ import annotations

import pytest

from ridgeline.errors import InputError
from ridgeline.trace import Kind, read
from ridgeline.trace.foreign import CONVERSIONS


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def plane(name: str, lines: dict[str, list[tuple[str, int, int]]]) -> bytes:
    """A plane whose events are (name, offset, duration) in picoseconds; lines start at one microsecond."""
    words = sorted({word for events in lines.values() for word, _, _ in events})
    out = field(2, name)
    for label, events in lines.items():
        line = field(2, label) + field(3, 1000)
        for word, offset, lasts in events:
            line += field(4, field(1, words.index(word) + 1) + field(2, offset) + field(3, lasts))
        out += field(3, line)
    for number, word in enumerate(words, start=1):
        out += field(4, field(1, number) + field(2, field(1, number) + field(2, word)))
    return field(1, out)


def test_planes_of_devices_and_of_the_host_become_spans(tmp_path):
    device = {"Stream #13(Compute)": [("fusion_1", 0, 2_000_000), ("ncclDevKernel_AllReduce", 3_000_000, 1_000_000)],
              "Stream #14(Memcpy)": [("MemcpyD2H", 0, 500_000)], "XLA Ops": [("fusion", 0, 2_000_000)]}  # fmt: skip
    host = {"python": [("$train.py:7 step", 0, 9_000_000)], "worker": [("cuLaunchKernel", 0, 100_000)]}
    file = tmp_path / "vm.xplane.pb"
    file.write_bytes(plane("/device:GPU:0", device) + plane("/host:CPU", host) + plane("/host:metadata", {}))
    trace = read(file, cache=False)
    kinds = {trace.words[int(trace.name[i])]: Kind(int(trace.kind[i])) for i in range(len(trace))}
    assert kinds == {
        "fusion_1": Kind.KERNEL, "ncclDevKernel_AllReduce": Kind.COMMUNICATION, "MemcpyD2H": Kind.MEMCPY,
        "$train.py:7 step": Kind.PYTHON, "cuLaunchKernel": Kind.RUNTIME,
    }  # fmt: skip
    assert sorted(set(trace.stream[trace.gpu].tolist())) == [13, 14]
    first = trace.words.index("fusion_1")
    assert trace.start_ns[trace.name == first].tolist() == [1000]
    assert trace.duration_s[trace.name == first].tolist() == [pytest.approx(2e-6)]


@pytest.mark.parametrize("data", [b"\x0a\xff", b"\x0a\x05ab", b"\xff" * 12, b"hello, this is text"])
def test_what_is_no_xplane_is_refused(tmp_path, data):
    file = tmp_path / "bad.xplane.pb"
    file.write_bytes(data)
    with pytest.raises(InputError, match="no XSpace"):
        read(file, cache=False)


@pytest.mark.parametrize("ending", CONVERSIONS)
def test_foreign_files_are_answered_with_a_command(tmp_path, ending):
    file = tmp_path / f"run{ending}"
    file.write_bytes(b"x")
    with pytest.raises(InputError, match="convert it: ") as caught:
        read(file)
    assert "{" not in str(caught.value)
