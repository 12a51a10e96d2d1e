"""Pickles are read as plain data; whatever would run code is refused."""

from __future__ import annotations

import os
import pickle
import pickletools
import random
import time
from contextlib import suppress

import pytest

from ridgeline.errors import InputError
from ridgeline.trace.pickled import MAX_DEPTH, plain_data

PLAIN = {
    "text": "größe \u2028 x" * 40,
    "numbers": [0, 1, -1, 255, 256, 65536, -(2**31), 2**31, 2**63, -(2**70), 1.5, float("inf")],
    "flags": [True, False, None],
    "nested": {"a": [(1, 2), (), (1,), (1, 2, 3), (1, 2, 3, 4)], "b": {"c": {}}, 7: b"bytes", "long": "x" * 70_000},
}


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_plain_data_comes_back_as_pickle_would_give_it(protocol):
    assert plain_data(pickle.dumps(PLAIN, protocol), "x") == PLAIN


def test_protocol_2_reads_as_well():
    plain = {"text": "x", "numbers": [1, 2.5, 2**40], "pair": (1, None)}
    assert plain_data(pickle.dumps(plain, 2), "x") == plain


def test_shared_values_are_shared_and_not_copied():
    inner = [1]
    found = plain_data(pickle.dumps([inner, inner]), "x")
    assert found[0] is found[1]


class Evil:
    def __reduce__(self):
        return os.system, ("exit 1",)


@pytest.mark.parametrize("value", [Evil(), {"segments": [Evil()]}, time.struct_time(range(9)), {1, 2}, 1 + 2j, len])
def test_nothing_is_imported_or_called(value):
    with pytest.raises(InputError, match="not plain data"):
        plain_data(pickle.dumps(value), "x")


RUNS_CODE = "GLOBAL STACK_GLOBAL REDUCE BUILD INST OBJ NEWOBJ NEWOBJ_EX PERSID BINPERSID EXT1 EXT2 EXT4"


@pytest.mark.parametrize("name", RUNS_CODE.split())
def test_every_opcode_that_can_run_code_is_refused(name):
    code = next(op.code for op in pickletools.opcodes if op.name == name).encode("latin-1")
    with pytest.raises(InputError, match=f"opcode {name} "):
        plain_data(b"\x80\x04" + code + b"os\nsystem\n.", "x")


def test_deep_nesting_and_huge_integers_are_refused():
    with pytest.raises(InputError, match="nested more than"):
        plain_data(b"\x80\x04" + b"(" * (MAX_DEPTH + 1), "x")
    with pytest.raises(InputError, match="an integer of"):
        plain_data(b"\x80\x04\x8b\xff\xff\xff\x7f", "x")


def test_a_cut_or_mutated_pickle_is_an_error_or_plain_data():
    good = pickle.dumps(PLAIN["nested"])
    draw = random.Random(0)
    for _ in range(2000):
        data = bytearray(good[: draw.randrange(len(good))] if draw.random() < 0.5 else good)
        for _ in range(draw.randrange(4)):
            data[draw.randrange(len(data))] = draw.randrange(256) if data else 0
        with suppress(InputError):
            plain_data(bytes(data), "x")
