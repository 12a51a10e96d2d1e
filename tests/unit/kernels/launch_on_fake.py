"""Run by test_launcher in a process of its own, with a stand-in for the CUDA driver."""

import ctypes
import struct
import sys

import pytest
import torch

from ridgeline.errors import KernelError
from ridgeline.kernels import launcher
from ridgeline.kernels.compiler import Compiled

fake = ctypes.CDLL(sys.argv[1])
fake.fake_arg.restype = ctypes.c_uint64
native = launcher.native()

handle = launcher._load(0, Compiled("kernel", b"cubin", 4, 1000), False)
x = torch.ones(5)
fake.fake_set_num_args(6)
seen = []
plan = native.plan(handle, 5, 3, 2, False, lambda device: seen.append(device) or 77)
native.launch(plan, x, 12, 2**40, 0.5, None, -1)
assert [fake.fake_last(i) for i in range(6)] == [3, 2, 1, 128, 1000, 77]
assert seen == [5], "the current stream of the plan's device is asked for at every launch"
assert fake.fake_last(6) == 1, "the device's context is current while it launches"
assert fake.fake_arg(0) == x.data_ptr()
assert fake.fake_arg(1) == 12
assert fake.fake_arg(2) == 2**40
assert fake.fake_arg(3) == struct.unpack("<I", struct.pack("<f", 0.5))[0]
assert fake.fake_arg(4) == 0
assert fake.fake_arg(5) == 2**64 - 1

assert not fake.fake_early(), "kernels wait for each other unless told otherwise"
native.launch(native.plan(handle, 0, 4, 2, True, lambda device: 78), x, 12, 2**40, 0.5, None, -1)
assert fake.fake_early(), "a dependent kernel says so to the driver"
assert [fake.fake_last(i) for i in range(6)] == [4, 2, 1, 128, 1000, 78]
assert fake.fake_arg(0) == x.data_ptr() and fake.fake_arg(2) == 2**40

fake.fake_set_num_args(3)  # the two scratch pointers follow the arguments
one = native.plan(handle, 0, 1, 1, False, lambda device: 0)
native.launch(one, 5)
assert [fake.fake_arg(i) for i in range(3)] == [5, 0, 0]

native.launch(native.plan(handle, 0, 0, 1, False, lambda device: 0), 6)  # an empty grid launches nothing
assert fake.fake_arg(0) == 5

for call, word in (
    (lambda: launcher._load(0, Compiled("absent", b"cubin", 4, 0), False), "cannot be loaded"),
    (lambda: launcher._load(9, Compiled("kernel", b"cubin", 4, 0), False), "cuda:9"),
):
    with pytest.raises(KernelError, match=word):
        call()
fake.fake_set_num_args(0)
refused = native.plan(handle, 0, 999, 1, False, lambda device: 0)
for bad in ((), (one, object()), (refused,), (one, *range(65)), (native.plan(handle, 0, 1, 1, False, lambda device: "x"),)):
    with pytest.raises((TypeError, RuntimeError, AttributeError)):
        native.launch(*bad)
print("launched")
