"""The zoo: named networks as small graph builders that need no framework."""

from ridgeline.models.card import ModelCard
from ridgeline.models.zoo import build, models

__all__ = ["ModelCard", "build", "models"]
