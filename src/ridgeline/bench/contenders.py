"""Who a primitive races against: PyTorch eager, PyTorch compiled, and Liger-Kernel where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ridgeline.kernels.contract import Trial

Call = Callable[..., Any]

GRADIENT_IN_FORWARD = frozenset({("liger", "cross_entropy"), ("liger", "linear_cross_entropy")})
"""Whose forward pass does the work of the backward: only the two together compare."""


def contenders(name: str, trial: Trial, *, compiled: bool, liger: bool) -> dict[str, Call]:
    """Callables of the same arguments by name, ours first."""
    theirs = trial.raced or trial.eager
    found: dict[str, Call] = {"ridgeline": trial.timed or trial.call, "eager": theirs}
    if compiled:
        found["compiled"] = compiled_form(theirs)
    ligers = liger_form(name) if liger else None
    if ligers is not None:
        found["liger"] = ligers
    return found


def compiled_form(call: Call) -> Call:
    """``torch.compile`` at its best: every tuning, without graphs, whose input copies would only cost it time."""
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # the race asks for the same gradient again and again
    return torch.compile(call, mode="max-autotune-no-cudagraphs", dynamic=False)


def liger_form(name: str) -> Call | None:
    """Liger's kernel for a primitive with our arguments, or None where it has none or is not installed."""
    build = _LIGER.get(name)
    if build is None:
        return None
    try:
        return build()
    except ImportError:
        return None


def _rms_norm() -> Call:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return lambda x, w, eps=1e-6: LigerRMSNormFunction.apply(x, w, eps, 0.0, "llama", False)


def _add_rms_norm() -> Call:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return lambda x, r, w, eps=1e-6: LigerFusedAddRMSNormFunction.apply(x, r, w, eps, 0.0, "llama", False)


def _layer_norm() -> Call:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return lambda x, w, b, eps=1e-5: LigerLayerNormFunction.apply(x, w, b, eps)


def _softmax() -> Call:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return lambda x: LigerSoftmaxFunction.apply(x)


def _cross_entropy() -> Call:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    return lambda x, t: LigerCrossEntropyFunction.apply(x, t, None)[0]  # overwrites x with its gradient


def _linear_cross_entropy() -> Call:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return lambda x, w, t: LigerFusedLinearCrossEntropyFunction.apply(x, w, t)[0]


def _swiglu() -> Call:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return lambda a, b: LigerSiLUMulFunction.apply(a, b)


def _geglu() -> Call:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return lambda a, b: LigerGELUMulFunction.apply(a, b)


def _relu2() -> Call:
    from liger_kernel.ops.relu_squared import LigerReLUSquaredFunction

    return lambda x: LigerReLUSquaredFunction.apply(x)


def _rope() -> Call:
    from liger_kernel.ops.rope import LigerRopeFunction

    return lambda q, k, cos, sin: LigerRopeFunction.apply(q, k, cos, sin)


def _group_norm() -> Call:
    from liger_kernel.ops.group_norm import LigerGroupNormFunction

    def run(x: Any, groups: int, w: Any, b: Any, eps: float = 1e-5) -> Any:
        channels = x.shape[1]
        return LigerGroupNormFunction.apply(x, w, b, channels, groups, eps)

    return run


_LIGER: dict[str, Callable[[], Call]] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "layer_norm": _layer_norm,
    "softmax": _softmax,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "swiglu": _swiglu,
    "geglu": _geglu,
    "relu2": _relu2,
    "rope": _rope,
    "group_norm": _group_norm,
}
