"""Functions of Triton and Gluon are read when they are first used, and are then what Triton's own decorators make."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton.language as tl
from triton.experimental import gluon

import ridgeline.kernels  # noqa: F401  (declares everything)
from ridgeline.kernels import function
from ridgeline.kernels.function import Function, GluonFunction, names_of
from ridgeline.kernels.launcher import INTERPRETING, _kernels

pytestmark = pytest.mark.skipif(INTERPRETING, reason="Triton's interpreter has functions of its own")


def _inner(x):
    return x * 2.0


def _outer(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, _doubled(tl.load(x_ptr + at, mask=at < n)), mask=at < n)


_doubled = Function(_inner)


@pytest.mark.parametrize(("kind", "own"), [(Function, triton.jit), (GluonFunction, gluon.jit)])
def test_what_is_read_is_what_tritons_own_decorator_makes(kind, own) -> None:
    late, meant = kind(_outer), own(_outer)
    assert vars(late)["unread"] and late.__name__ == "_outer" and names_of(late) == meant.arg_names
    assert vars(late)["unread"] and late.is_gluon() == meant.is_gluon()
    assert late.cache_key == meant.cache_key and not vars(late)["unread"]
    assert (late.arg_names, late.constexprs, late.src) == (meant.arg_names, meant.constexprs, meant.src)
    assert vars(meant).keys() <= vars(late).keys() and isinstance(late, type(meant))


def test_what_a_function_lacks_is_an_attribute_error_and_one_that_cannot_be_read_is_asked_again() -> None:
    late = Function(_inner)
    assert not hasattr(late, "nothing") and not vars(late)["unread"] and copy.copy(late).cache_key == late.cache_key
    space: dict[str, object] = {}
    exec("def nowhere(x):\n    return x\n", space)
    lost = Function(space["nowhere"])
    for _ in range(2):
        with pytest.raises(ValueError, match="Python file"):
            _ = lost.arg_names


def test_many_threads_read_a_function_once(monkeypatch) -> None:
    read, late, found = [], Function(_outer), []
    before = function.JITFunction.__init__
    monkeypatch.setattr(function.JITFunction, "__init__", lambda self, fn: (read.append(fn), before(self, fn))[1])
    threads = [threading.Thread(target=lambda: found.append(tuple(late.arg_names))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read) == 1 and found == [("x_ptr", "n", "BLOCK")] * 8


def test_an_import_reads_none_and_registers_every_op() -> None:
    ask = ("import torch, ridgeline.kernels as k; from ridgeline.kernels.launcher import _kernels\n"
           "print(sum(not vars(each.function)['unread'] for each in _kernels.values()), len(_kernels) > 100,"
           " all(hasattr(torch.ops.ridgeline_kernels, n) for n in k.primitives()), len(k.primitives()))")  # fmt: skip
    said = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    assert said[:3] == ["0", "True", "True"] and int(said[3]) > 50


def test_arguments_of_every_kernel_are_those_that_triton_reads() -> None:
    for kernel in list(_kernels.values())[::12]:
        assert kernel.names == kernel.function.arg_names
