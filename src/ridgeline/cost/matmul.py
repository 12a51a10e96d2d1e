"""Matrix products as calls: dense, batched and grouped, forward and backward, on the GEMM time model."""

from __future__ import annotations

from ridgeline.cost.call import Call, Coef, Time, family
from ridgeline.cost.chip import BOUND_NAMES, Chip
from ridgeline.cost.gemm import gemm_timing

Problem = tuple[int, int, int, int]  # b, m, n, k


@family("gemm", "gemm bmm grouped_gemm", {})
def model(call: Call, chip: Chip, coef: Coef, warm_frac: float) -> Time:
    """One product, or the two products of its gradients."""
    times = [_product(problem, call, chip, coef, warm_frac) for problem in _problems(call)]
    longest = max(times, key=lambda t: t.busy_s)
    return Time(sum(t.busy_s for t in times), sum(t.floor_s for t in times), longest.bound, sum(t.num_kernels for t in times))


def _problems(call: Call) -> list[Problem]:
    dims = call.dims()
    if call.kind == "grouped_gemm":
        groups, m, n, k = dims["groups"], dims["m"], dims["n"], dims["k"]
        if dims.get("reduction"):
            return [(groups, m, n, max(1, k // groups))]
        return [(groups, max(1, m // groups), n, k)]
    b, m, n, k = dims.get("b", 1), dims["m"], dims["n"], dims["k"]
    return [(b, m, n, k)] if call.phase == "fwd" else [(b, m, k, n), (b, k, n, m)]


def _product(problem: Problem, call: Call, chip: Chip, coef: Coef, warm_frac: float) -> Time:
    b, m, n, k = problem
    dtype = call.dtype if call.dtype == "fp32" or call.dtype in chip.tensor_flops_per_s else "fp32"
    timing = gemm_timing(chip, coef, b=b, m=m, n=n, k=k, dtype=dtype, warm_frac=warm_frac)
    return Time(float(timing.expected_s[0]), float(timing.floor_s[0]), BOUND_NAMES[int(timing.bound[0])])
