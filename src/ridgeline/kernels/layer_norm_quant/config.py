"""Launch configurations of the quantizing LayerNorm: those of the quantizing RMSNorm."""

from __future__ import annotations

from ridgeline.kernels.rms_norm_quant.config import Forward, default

__all__ = ["Forward", "default"]
