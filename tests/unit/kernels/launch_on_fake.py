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
fake.fake_map.restype = ctypes.c_uint64
native = launcher.native()

handle = launcher._load(0, Compiled("kernel", b"cubin", 4, 1000), False)
x = torch.ones(5)
fake.fake_set_num_args(6)
seen = []
plan = native.plan(handle, 5, 3, 2, lambda device: seen.append(device) or 77, False, ())
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

fake.fake_set_num_args(3)  # the two scratch pointers follow the arguments
one = native.plan(handle, 0, 1, 1, lambda device: 0, False, ())
native.launch(one, 5)
assert [fake.fake_arg(i) for i in range(3)] == [5, 0, 0]

native.launch(native.plan(handle, 0, 0, 1, lambda device: 0, False, ()), 6)  # an empty grid launches nothing
assert fake.fake_arg(0) == 5

dependent = native.plan(handle, 0, 4, 3, lambda device: 9, True, ())
native.launch(dependent, 7)
assert fake.fake_dependent() == 1 and [fake.fake_last(i) for i in range(6)] == [4, 3, 1, 128, 1000, 9]

# Programs that start together: the driver is told how many, and allows more than eight a kernel.
together = native.plan(handle, 0, 12, 1, lambda device: 9, False, (), 4)
native.launch(together, 7)
assert fake.fake_cluster() == 4 and [fake.fake_last(i) for i in range(6)] == [12, 1, 1, 128, 1000, 9]
assert fake.fake_dependent() == 1 and fake.fake_large_clusters() == 0
assert native.fitting(together, 4) == 33 and native.fitting(together, 8) == 16
assert native.parts(together)[4] is False and native.parts(one)[4] is True, "direct calls leave it to the launcher"
native.launch(native.plan(handle, 0, 32, 1, lambda device: 9, True, (), 16), 7)
assert fake.fake_cluster() == 16 and fake.fake_large_clusters() == 1
for unfit in (5, 0):
    with pytest.raises(ValueError, match="multiple"):
        native.plan(handle, 0, 12, 1, lambda device: 9, False, (), unfit)

# A tensor that is read in blocks: its map, shape and strides take the place of one argument.
halves = torch.zeros(4, 64, 128, dtype=torch.bfloat16)
cut = launcher.Blocks(halves[0], (64, 128), (128, 1), (32, 128))
mapped = native.plan(handle, 0, 1, 1, lambda device: 0, False, ((1, cut.described()), (2, cut.described())))
first = native.plan(handle, 0, 1, 1, lambda device: 0, False, ((0, cut.described()),))
fake.fake_set_num_args(9)
native.launch(first, halves[0], 11, 12, 13)
assert [fake.fake_map(i) for i in range(10)] == [9, 2, halves[0].data_ptr(), 128, 64, 256, 64, 32, 3, 2]
assert [fake.fake_arg(i) for i in range(1, 9)] == [64, 128, 128, 1, 11, 12, 13, 0]
encoded = fake.fake_encoded()
native.launch(first, halves[0], 11, 12, 13)
assert fake.fake_encoded() == encoded, "the map of an address is kept"
native.launch(first, halves[2], 11, 12, 13)
assert fake.fake_encoded() == encoded + 1 and fake.fake_map(2) == halves[2].data_ptr()
fake.fake_set_num_args(12)
native.launch(mapped, 5, halves[1], halves[3], 6)
assert [fake.fake_arg(i) for i in (0, 2, 3, 7, 8, 11)] == [5, 64, 128, 64, 128, 6]
with pytest.raises(RuntimeError, match="cuTensorMapEncodeTiled"):
    native.launch(first, halves.view(-1)[1:], 11, 12, 13)

for call, word in (
    (lambda: launcher._load(0, Compiled("absent", b"cubin", 4, 0), False), "cannot be loaded"),
    (lambda: launcher._load(9, Compiled("kernel", b"cubin", 4, 0), False), "cuda:9"),
):
    with pytest.raises(KernelError, match=word):
        call()
fake.fake_set_num_args(0)
refused = native.plan(handle, 0, 999, 1, lambda device: 0, False, ())
nowhere = native.plan(handle, 0, 1, 1, lambda device: "x", False, ())
for bad in ((), (one, object()), (refused,), (one, *range(65)), (nowhere,)):
    with pytest.raises((TypeError, RuntimeError, AttributeError)):
        native.launch(*bad)
print("launched")
