"""The C launcher, on a stand-in for the CUDA driver."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ridgeline.errors import KernelError
from ridgeline.kernels import cross_entropy, launcher, rms_norm

HERE = Path(__file__).parent
needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="builds a stand-in for libcuda with gcc")


@needs_compiler
def test_a_launch_hands_the_driver_grid_stream_and_arguments(tmp_path):
    fake = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", str(fake), str(HERE / "fake_cuda.c")], check=True)
    env = dict(os.environ) | {"LD_LIBRARY_PATH": str(tmp_path), "RIDGELINE_KERNEL_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, str(HERE / "launch_on_fake.py"), str(fake)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "launched" in done.stdout


@needs_compiler
def test_the_launcher_is_built_once(tmp_path):
    first = launcher.build_native(tmp_path)
    stamp = first.stat().st_mtime_ns
    assert launcher.build_native(tmp_path) == first and first.stat().st_mtime_ns == stamp
    assert {path.name for path in tmp_path.iterdir()} == {first.name, f"{first.name}.sha256"}


def test_without_a_compiler_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(KernelError, match="install gcc"):
        launcher.build_native(tmp_path)


def test_a_vector_needs_aligned_addresses_and_lengths():
    assert launcher.vector_of(2, 0x1000, 4096, 8200) == 8
    assert launcher.vector_of(4, 0x1000, 4096, 12) == 4
    assert launcher.vector_of(2, 0x1002, 4096) == 1
    assert launcher.vector_of(2, 0x1000, 4097) == 1
    assert launcher.vector_of(2, 0x1000, 4098, 4096) == 2 and launcher.vector_of(2, 0x1000, 4100) == 4
    assert launcher.is_widest(8, 2) and not launcher.is_widest(4, 2)


def test_integers_past_two_billion_become_wide():
    assert launcher.type_of(2**31 - 1) == "i32"
    assert launcher.type_of(2**31) == "i64"
    assert launcher.type_of(0.5) == "fp32"
    assert launcher.type_of(torch.empty(1, dtype=torch.bfloat16)) == "*bf16"


def test_pointers_that_may_lie_anywhere_promise_nothing():
    logits = torch.empty(64, 1000, device="meta", dtype=torch.bfloat16)
    with launcher.collecting() as found:
        cross_entropy(logits, torch.empty(64, device="meta", dtype=torch.long))
    promised = dict(found[0].divisible)
    assert found[0].kernel == "cross_entropy_short" and "x_ptr" in promised and "target_ptr" not in promised


def test_plans_do_not_grow_without_end(monkeypatch):
    monkeypatch.setattr(launcher, "MAX_PLANS", 3)
    plans = launcher.Plans()
    for i in range(10):
        plans[i] = i
    assert len(plans) <= 3 and 9 in plans
    launcher._all_plans.remove(plans)


def test_collecting_tells_what_would_be_launched_and_launches_nothing():
    x, w = torch.empty(64, 4096, device="meta", dtype=torch.bfloat16), torch.empty(4096, device="meta")
    with launcher.collecting() as found:
        rms_norm(x, w, 1e-6)
    assert [variant.kernel for variant in found] == ["rms_norm_forward"]
    assert dict(found[0].types)["weight_ptr"] == "*fp32"
    assert dict(found[0].constants)["SAVE"] is False
    assert dict(found[0].divisible)["cols"] == 8
    with launcher.collecting(aligned=False) as found:
        rms_norm(x, w, 1e-6)
    assert found[0].divisible == ()


def test_what_nobody_reads_goes_to_one_place_a_device_unless_it_is_large_or_a_graph_would_own_it(monkeypatch):
    made = []
    monkeypatch.setattr(launcher, "_sinks", {})
    monkeypatch.setattr(launcher, "_sink", lambda device: made.append(device) or torch.empty(8))
    assert launcher.sink(10, -1) is None and launcher.sink(launcher.SINK_BYTES // 4 + 1, 0) is None and not made
    with launcher.rehearsing():
        assert launcher.sink(10, 0) is None and not made
    found = launcher.sink(10, 0)
    assert found is not None and launcher.is_sink(found.data_ptr()) and not launcher.is_sink(found.data_ptr() + 4)
    with launcher.rehearsing():
        assert launcher.sink(10, 0) is not None, "a graph may use what was there before it"
