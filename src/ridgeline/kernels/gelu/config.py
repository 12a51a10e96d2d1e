"""Launch configuration of GELU: the gated units', over one long row."""

from __future__ import annotations

from ridgeline.kernels.gated.config import Pointwise, default

__all__ = ["Pointwise", "default"]
