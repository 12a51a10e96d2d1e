"""What a span is: work on a device, a call on the host, or a mark that covers others."""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """One of a closed set; a span's kind says which totals it enters."""

    OTHER = 0
    KERNEL = 1  # computes on a device
    COMMUNICATION = 2  # a collective or point-to-point kernel on a device
    MEMCPY = 3  # a copy engine's work
    MEMSET = 4
    RUNTIME = 5  # a CUDA, HIP or driver API call
    OP = 6  # a framework operator on the host
    ANNOTATION = 7  # record_function, NVTX; on a device: the stretch its kernels cover
    PYTHON = 8  # a frame of a recorded Python stack
    STEP = 9  # one iteration of a loop
    SYNC = 10  # a recorded wait of a stream, event or context
    GC = 11  # garbage collection
    DATALOADER = 12  # the host fetches the next batch
    OVERHEAD = 13  # the profiler's own work
    BUBBLE = 14  # a planned wait in a simulated schedule
    ALLOCATION = 15  # memory held, from its allocation until it is freed


#: Kinds that keep a device busy.
WORK = (Kind.KERNEL, Kind.COMMUNICATION, Kind.MEMCPY, Kind.MEMSET)
