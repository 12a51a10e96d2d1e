"""What is known of every request while a simulation runs, as plain columns."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ridgeline.errors import InputError
from ridgeline.sim.serving.workload import Workload


@dataclass(slots=True)
class Requests:
    """Columns by request; ``nan`` is what has not happened yet."""

    isl: list[int]
    osl: list[int]
    prefix: list[int]
    prefix_tokens: list[int]
    arrival_s: list[float]
    seen_s: list[float]  # when the scheduler may first see it
    first_s: list[float]
    done_s: list[float]
    target: list[int]  # tokens its prompt has to put into the cache
    cached: list[int]  # of those, how many are there
    reused: list[int]  # of those, how many came from another request
    made: list[int]  # output tokens made before it was preempted
    taken: list[int]  # cache reserved at admission
    joined: list[int]  # tick at which it began to decode

    def refuse(self, request: int, capacity: int) -> None:
        raise InputError(
            f"request {request + 1} needs {self.isl[request]:,} + {self.osl[request]:,} tokens of cache and a whole "
            f"replica holds {capacity:,}: use more devices a replica, a narrower cache, or shorter requests"
        )


def requests_of(workload: Workload) -> Requests:
    n = len(workload)
    prefix = workload.prefix.tolist() if workload.prefix is not None else [-1] * n
    shared = workload.prefix_tokens.tolist() if workload.prefix_tokens is not None else [0] * n
    isl = workload.isl.tolist()
    shared = [min(tokens, length) for tokens, length in zip(shared, isl, strict=True)]
    unknown = [math.nan] * n
    zeros = np.zeros(n, dtype=np.int64).tolist
    return Requests(
        isl, workload.osl.tolist(), prefix, shared, list(unknown), list(unknown), list(unknown), list(unknown),
        list(isl), zeros(), zeros(), zeros(), zeros(), zeros(),
    )  # fmt: skip
