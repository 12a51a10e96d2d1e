"""Calls that are repeated without Python, on a stand-in for the CUDA driver."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ridgeline.errors import KernelError
from ridgeline.kernels import call_cache

HERE = Path(__file__).parent
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or shutil.which("gcc") is None, reason="builds a stand-in for libcuda and an extension"
)


@needs_compiler
def test_a_call_that_comes_again_is_repeated_without_python_gradients_included(tmp_path):
    fake = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", str(fake), str(HERE / "fake_cuda.c")], check=True)
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nexec g++ "$@" -O0\n')  # optimizing PyTorch's headers takes a minute
    compiler.chmod(0o755)
    env = dict(os.environ) | {
        "CXX": str(compiler),
        "LD_LIBRARY_PATH": str(tmp_path),
        "RIDGELINE_KERNEL_CACHE": str(tmp_path / "cache"),
        "RIDGELINE_KERNEL_PACK": str(tmp_path / "none"),
    }
    command = [sys.executable, str(HERE / "call_cache_on_fake.py"), str(fake)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "repeated" in done.stdout


def test_the_name_of_the_extension_says_what_it_was_built_for(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    call_cache.file_name.cache_clear()
    other = call_cache.file_name()
    monkeypatch.undo()
    call_cache.file_name.cache_clear()
    assert call_cache.file_name() != other


def test_without_a_compiler_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(KernelError, match=r"install g\+\+"):
        call_cache.build(tmp_path)


def test_a_compiler_that_fails_is_quoted(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(KernelError, match="could not be built"):
        call_cache.build(tmp_path)


def test_an_op_that_computes_something_besides_its_kernels_is_not_noted():
    notes = call_cache.Notes((torch.ones(4), None, 2.0))
    with notes:
        torch.empty(3)
        torch.ones(4) + 1
    assert "add" in notes.strange or "ones" in notes.strange
    with pytest.raises(call_cache.Unrepeatable):
        notes.plan((), 0, True)


def test_an_address_is_told_by_the_tensor_it_lies_in():
    x, y = torch.zeros(8), torch.zeros(8)
    notes = call_cache.Notes((x, 3, y))
    assert notes.param(y) == (2, 0)
    with notes:
        scratch = torch.empty(4)
    assert notes.param(call_cache.launcher.Pointer(scratch.data_ptr() + 12)) == (3, 12)
    with pytest.raises(call_cache.Unrepeatable, match="neither an argument"):
        notes.param(x[1:])
    assert notes.param(-1) == (-1, 2**64 - 1)
    assert notes.param(0.5) == (-1, 0x3F000000)
    assert notes.param(None) == (-1, 0)
    with pytest.raises(call_cache.Unrepeatable, match="neither an argument"):
        notes.param(torch.zeros(8))
