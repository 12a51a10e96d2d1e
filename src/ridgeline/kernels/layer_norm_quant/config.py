"""Launch configurations of the quantizing LayerNorm: those of the quantizing RMSNorm."""

from __future__ import annotations

from ridgeline.kernels.rms_norm_quant.config import Tile, default

__all__ = ["Tile", "default"]
