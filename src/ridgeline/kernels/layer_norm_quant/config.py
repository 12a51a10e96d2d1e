"""Launch configurations of the quantizing LayerNorm: those of the quantizing RMSNorm."""

from __future__ import annotations

from ridgeline.kernels.rms_norm_quant.config import Tile, access, default

__all__ = ["Tile", "access", "default"]
