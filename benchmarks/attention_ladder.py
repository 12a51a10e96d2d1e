"""The steps of attention's backward pass that docs/guide/attention.md tells of, measured again on the GPU at hand.

    python benchmarks/attention_ladder.py [--rows 4096 8192]

The first step is a kernel that was given up: dK, dV and dQ in one, dQ added to memory with atomics by the warps that
compute it; ``not added`` leaves the additions out (its dQ is wrong) and shows what they cost.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ridgeline.kernels.attention import config, op
from ridgeline.kernels.attention.kernel import _barriers, _feed_keys, _first_rows, _store


@gluon.jit
def _fused_step(c: gl.constexpr, i, it, bh, k, v, k_cols, q_smem, do_smem, ds_smem, lse_smem, delta_smem, bars, ds_bars,
                dk, dv, dq_ptr, adding, scale, key, padded, S, shift, MASK: gl.constexpr, BM: gl.constexpr,
                D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, DTYPE: gl.constexpr):
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty = bars
    ds_full, ds_empty = ds_bars
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    A_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    Q_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D // 2, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, A_L, 2)
    COL: gl.constexpr = gl.SliceLayout(0, S_L)
    stage, turn = it % STAGES, (it // STAGES) & 1
    q = q_smem.index(stage).reshape([BM, D])
    do = do_smem.index(stage).reshape([BM, D])
    zero = gl.zeros([64, BM], gl.float32, S_L)
    mbarrier.wait(q_full.index(stage), turn)
    s_on_its_way = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(do_full.index(stage), turn)
    dp_on_its_way = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, [s_on_its_way])
    p = gl.exp2(s * scale - gl.expand_dims(lse_smem.index(stage).load(COL), 0))
    if MASK:
        seen = gl.expand_dims(key, 1) < S
        if CAUSAL:
            row = i * BM + gl.arange(0, BM, COL)
            seen = seen & (gl.expand_dims(key, 1) <= gl.expand_dims(row, 0) + shift)
        p = gl.where(seen, p, 0.0)
    dv_on_its_way = warpgroup_mma(gl.convert_layout(p.to(DTYPE), LEFT), do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, [dp_on_its_way])
    ds = (p * (dp - gl.expand_dims(delta_smem.index(stage).load(COL), 0))).to(DTYPE)
    mbarrier.wait(ds_empty.index(0), (it & 1) ^ 1)
    ds_smem.slice(c * 64, 64, dim=0).store(ds)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(0), count=1)
    dk_on_its_way = warpgroup_mma(gl.convert_layout(ds, LEFT), q, dk, is_async=True)
    mbarrier.wait(ds_full.index(0), it & 1)
    none = gl.zeros([BM, D // 2], gl.float32, Q_L)
    dq_on_its_way = warpgroup_mma(ds_smem.permute((1, 0)), k_cols, none, use_acc=False, is_async=True)
    dv = warpgroup_mma_wait(2, [dv_on_its_way])
    mbarrier.arrive(do_empty.index(stage), count=1)
    dk = warpgroup_mma_wait(1, [dk_on_its_way])
    mbarrier.arrive(q_empty.index(stage), count=1)
    dq = warpgroup_mma_wait(0, [dq_on_its_way])
    mbarrier.arrive(ds_empty.index(0), count=1)
    if adding:  # known at run time only: else the compiler drops the product with the additions
        to_row = gl.arange(0, BM, gl.SliceLayout(1, Q_L))
        to_col = gl.arange(0, D // 2, gl.SliceLayout(0, Q_L))
        at = dq_ptr + (bh.to(gl.int64) * padded + i * BM) * D + c * (D // 2)  # padded rows: no mask, no branches
        gl.atomic_add(at + gl.expand_dims(to_row * D, 1) + gl.expand_dims(to_col, 0), dq, sem="relaxed")
    return dk, dv, it + 1


@gluon.jit
def _fused_rows(c: gl.constexpr, dq_ptr, dk_ptr, dv_ptr, q_smem, k_smem, v_smem, do_smem, ds_smem, lse_smem,
                delta_smem, bars,
                ds_bars, items, parts, H, K, L, S, shift, d, padded, adding, scale, scale_out,
                BM: gl.constexpr,
                BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, DTYPE: gl.constexpr):
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty = bars
    A_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    num_m, ratio = (L + BM - 1) // BM, H // K
    keys = k_smem.index(0).reshape([BN, D])
    k = keys.slice(c * 64, 64, dim=0)
    k_cols = keys.slice(c * (D // 2), D // 2, dim=1)
    v = v_smem.index(0).reshape([BN, D]).slice(c * 64, 64, dim=0)
    it = 0
    local = 0
    for index in range(gl.program_id(0), items, gl.num_programs(0)):
        n, part = index // parts, index % parts
        key0 = n * BN + c * 64
        key = key0 + gl.arange(0, 64, gl.SliceLayout(1, S_L))
        first = _first_rows(n, shift, L, BM, BN, CAUSAL)
        edge = num_m if (n + 1) * BN > S else first
        if CAUSAL:
            edge = max(edge, min(max((n + 1) * BN - shift + BM - 1, 0) // BM, num_m))
        mbarrier.wait(kv_full.index(0), local & 1)
        dk = gl.zeros([64, D], gl.float32, A_L)
        dv = gl.zeros([64, D], gl.float32, A_L)
        for r in range(ratio):
            bh = part // K * H + part % K * ratio + r
            for i in range(first, edge):
                dk, dv, it = _fused_step(c, i, it, bh, k, v, k_cols, q_smem, do_smem, ds_smem, lse_smem, delta_smem,
                                         bars,
                                         ds_bars, dk, dv, dq_ptr, adding, scale, key, padded, S, shift, True, BM, D,
                                         STAGES,
                                         CAUSAL, DTYPE)
            for i in range(edge, num_m):
                dk, dv, it = _fused_step(c, i, it, bh, k, v, k_cols, q_smem, do_smem, ds_smem, lse_smem, delta_smem,
                                         bars,
                                         ds_bars, dk, dv, dq_ptr, adding, scale, key, padded, S, shift, False, BM, D,
                                         STAGES,
                                         CAUSAL, DTYPE)
        mbarrier.arrive(kv_empty.index(0), count=1)
        local += 1
        _store(dk_ptr, dk * scale_out, part, key0, S, d, D)
        _store(dv_ptr, dv, part, key0, S, d, D)


@gluon.jit
def fused(q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dq_ptr, dk_ptr, dv_ptr, padded, B, H, K, L, S, shift,
          d, scale,
          adding, scale_out, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
          CAUSAL: gl.constexpr):
    DTYPE: gl.constexpr = q_desc.dtype
    k_smem = gl.allocate_shared_memory(DTYPE, [1, 1, 1, BN, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [1, 1, 1, BN, D], v_desc.layout)
    q_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BM, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BM, D], do_desc.layout)
    ds_smem = gl.allocate_shared_memory(DTYPE, [BN, BM], gl.NVMMASharedLayout.get_default_for([BN, BM], DTYPE))
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BM], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BM], delta_desc.layout)
    bars = (_barriers(1, 1), _barriers(1, 2), _barriers(STAGES, 1), _barriers(STAGES, 2), _barriers(STAGES, 1),
            _barriers(STAGES, 2))
    ds_bars = (_barriers(1, 2), _barriers(1, 2))
    parts = B * K
    items = (S + BN - 1) // BN * parts
    gl.warp_specialize([
        (_fused_rows, (0, dq_ptr, dk_ptr, dv_ptr, q_smem, k_smem, v_smem, do_smem, ds_smem, lse_smem, delta_smem,
        bars, ds_bars,
                       items, parts, H, K, L, S, shift, d, padded, adding, scale, scale_out, BM, BN, D, STAGES, CAUSAL,
                       DTYPE)),
        (_fused_rows, (1, dq_ptr, dk_ptr, dv_ptr, q_smem, k_smem, v_smem, do_smem, ds_smem, lse_smem, delta_smem,
        bars, ds_bars,
                       items, parts, H, K, L, S, shift, d, padded, adding, scale, scale_out, BM, BN, D, STAGES, CAUSAL,
                       DTYPE)),
        (_feed_keys, (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, q_smem, k_smem, v_smem, do_smem, lse_smem,
                      delta_smem, bars, padded, items, parts, H, K, 1, L, shift, BM, BN, D, STAGES, CAUSAL)),
    ], [4, 1], [240, 24])  # fmt: skip


def fused_backward(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, causal: bool, add: bool) -> tuple[Any, ...]:
    """dQ in float32 with padded rows, dK and dV: the kernel that was given up."""
    batch, heads, rows, dim = q.shape
    delta, lse2, padded = op._prepared(do, o, lse)
    dq = torch.zeros(batch, heads, padded, dim, device=q.device, dtype=torch.float32)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    chosen, scale = config.KEYS, dim**-0.5
    blocks = config.num_tiles(k.shape[2], batch * k.shape[1], chosen.keys)
    fused[(config.programs(blocks, op.num_sms(q.get_device())),)](
        op._blocks(q, chosen.rows), op._blocks(k, chosen.keys), op._blocks(v, chosen.keys), op._blocks(do, chosen.rows),
        op._numbers(lse2, chosen.rows), op._numbers(delta, chosen.rows), dq, dk, dv, padded, batch, heads, k.shape[1],
        rows,
        k.shape[2], 0, dim, scale * op.LOG2_E, 2 if add else 0, scale, BM=chosen.rows, BN=chosen.keys,
        D=config.padded(dim),
        STAGES=chosen.stages, CAUSAL=causal, num_warps=4, maxnreg=168,
    )  # fmt: skip
    return dq, dk, dv


def two_kernels(args: tuple[Any, ...], causal: bool, keys: int) -> Callable[[], Any]:
    """The backward pass as it is, with dQ's keys in blocks of this size."""

    def run() -> Any:
        before = config.QUERIES
        config.QUERIES = replace(before, keys=keys)
        try:
            return op._backward(*args, causal, args[1].shape[-1] ** -0.5, 0)
        finally:
            config.QUERIES = before

    return run


def climb(rows: int, causal: bool) -> dict[str, float]:
    """TFLOP/s of every step at 64 query and 8 key heads of 128."""
    from race_attention import contenders, gradients

    from ridgeline.bench.race import Course

    course = Course(torch.device("cuda"), rounds=9)
    draw = [torch.randn(1, heads, rows, 128, device="cuda", dtype=torch.bfloat16) for heads in (64, 8, 8, 64)]
    q, k, v = (x.requires_grad_() for x in draw[:3])
    theirs = contenders(q, k, v, causal)["cudnn"]()
    with torch.no_grad():
        o, lse = op._forward(q.detach(), k.detach(), v.detach(), causal, 128**-0.5, 0)
        args = (draw[3], q.detach(), k.detach(), v.detach(), o, lse)
    runs = {
        "fused, added": lambda: fused_backward(*args, causal, True),
        "fused, not added": lambda: fused_backward(*args, causal, False),
        "two kernels, 64 keys": two_kernels(args, causal, 64),
        "two kernels, 128 keys": two_kernels(args, causal, 128),
        "cudnn": gradients(theirs, (q, k, v), draw[3]),
    }
    flops = 10 * 64 * rows * rows * 128 * (0.5 if causal else 1.0)
    return {name: flops / statistics.median(took) / 1e12 for name, took in course.turns(runs).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 8192])
    for rows in parser.parse_args().rows:
        for causal in (True, False):
            print(rows, "causal" if causal else "full", {k: round(v) for k, v in climb(rows, causal).items()},
                  flush=True)


if __name__ == "__main__":
    main()
