"""A kernel that only reads memory: the fastest that a cache of a given size can be read."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl


@triton.jit
def read_all(data_ptr, out_ptr, num, BLOCK: tl.constexpr, STAGES: tl.constexpr, POLICY: tl.constexpr):
    """Every CTA sums blocks of its own and writes one number."""
    total = tl.zeros([BLOCK], tl.int32)
    for block in tl.range(tl.program_id(0), tl.cdiv(num, BLOCK), tl.num_programs(0), num_stages=STAGES):
        at = block * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(data_ptr + at, mask=at < num, other=0, eviction_policy=POLICY)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))


def run(data: torch.Tensor, programs_per_sm: int, block: int, stages: int, policy: str) -> Callable[[], None]:
    """A call that reads these int32 numbers once; ``policy`` is the L2 eviction policy."""
    programs = programs_per_sm * torch.cuda.get_device_properties(data.device).multi_processor_count
    out = torch.empty(programs, dtype=torch.int32, device=data.device)
    warps = 8 if block >= 16384 else 4

    def read() -> None:
        read_all[(programs,)](data, out, data.numel(), BLOCK=block, STAGES=stages, POLICY=policy, num_warps=warps)

    read()
    assert int(out.sum()) == int(data.sum()), "not everything was read"
    return read
