"""What the structure of a call alone on the device leaves over: a bounded factor for norms, sums, sorts and attention.

The time models of these families know start-up, bytes, instructions and waves; each kind still misses by a few percent
in ways that are regular in its shape: how long a function's own arithmetic takes before the first store, when a row
changes from a warp to a block, how a last wave fills. Trees as in ``residue`` learn the logarithm of that factor, one
set for each kind and pass (``lab/fit/rows_correction.py``), from calls between events with a flushed cache. Calls are
told apart by their shape alone, so that neither an imagined bandwidth nor a warmer cache moves the factor, and it
applies to calls between events only: among the kernels of a model nothing was learned of it.
"""

from __future__ import annotations

from functools import lru_cache

from ridgeline.cost.call import ITEMSIZE, Call
from ridgeline.cost.correction.gemm_attention import LEFT_OVER, attention_features, logs, trees_in
from ridgeline.cost.time.attention.calls import PLANNED, plan_of
from ridgeline.cost.time.chip import Chip, chip_of
from ridgeline.hardware import device

KINDS = frozenset(
    "attention layer_norm rms_norm softmax gelu add sum_dim0 cross_entropy embedding_bag topk sort cumsum".split()
)
"""Kinds that were recorded often enough."""
_GROUPS = ("fa2_fwd", "fa2_decode", "fa2_split", "fa2_bwd", "cudnn_fwd", "cudnn_bwd", "cudnn_decode", "efficient_fwd",
           "efficient_bwd")  # fmt: skip


def pool_of(call: Call) -> str:
    """Under which name a call's trees are kept; none for calls that have no trees."""
    if call.kind not in KINDS or call.library == "inductor":
        return ""
    if call.kind != "attention":
        return f"{call.kind}.{call.phase}"
    return f"attention.{call.library}.{call.phase}" if call.library in PLANNED else ""


def features(call: Call, num_sms: int) -> list[float]:
    """Sizes, what they leave over in vectors, blocks and waves."""
    if call.kind == "attention":
        return _of_attention(call, num_sms)
    dims, size = call.dims(), ITEMSIZE[call.dtype]
    n, c = dims.get("n", dims.get("b", 1)), dims.get("c", dims.get("v", dims.get("d", 1)))
    if call.kind in ("sort", "cumsum"):
        n, c = dims.get("c", 1), dims["n"]
    k, row_bytes = dims.get("k", dims.get("l", 0)), c * size
    found = [size, float(call.dtype == "fp16"), n, c, k, dims.get("v", 0), n * c, row_bytes, n * row_bytes,
             row_bytes % 16, row_bytes % 128, c % 1024, c % 4096, n % 4, n % 64, n % num_sms, n / num_sms,
             n * max(1, k), n * row_bytes * max(1, k), (1 << (c - 1).bit_length()) / c, n / c]  # fmt: skip
    # Rows of a wave, as multiples of the SMs
    return found + [-(-n // (num_sms * wave)) * num_sms * wave / n for wave in (1, 2, 4)]


def _of_attention(call: Call, num_sms: int) -> list[float]:
    dims = call.dims()
    plan = plan_of(dims, call.library, call.phase, num_sms, ITEMSIZE[call.dtype])
    launch = plan.launch
    waves = launch.tiles / (num_sms * launch.tiling.resident)
    return [*attention_features(dims, num_sms), float(_GROUPS.index(plan.group)), dims.get("causal", 0),
            dims.get("mask", 0), launch.tiles, waves, waves % 1.0, launch.mean_blocks, launch.max_blocks, plan.splits,
            float(launch.is_ragged), float(call.dtype == "fp16")]  # fmt: skip


def log_of(call: Call, chip: Chip) -> float:
    """Logarithm of what a call takes over what its structure says, on a measured chip or one imagined from it."""
    pool, origin = pool_of(call), chip.origin
    if not pool:
        return 0.0
    num_sms = chip.num_sms if chip.name == origin else _sms_of(origin)
    trees = trees_in(LEFT_OVER).get(f"{origin}/{pool}")
    return logs(trees, [features(call, num_sms)])[0] if trees is not None else 0.0


@lru_cache(maxsize=32)
def _sms_of(name: str) -> int:
    return chip_of(device(name)).num_sms
