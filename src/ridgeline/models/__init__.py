"""The zoo: named networks as small graph builders that need no framework."""

import sys
from types import ModuleType

from ridgeline.models.card import ModelCard
from ridgeline.models.zoo import build, models

__all__ = ["ModelCard", "build", "models"]


class _Room(ModuleType):
    """``ridgeline.models`` is this package once something imported it; called, it still lists the zoo."""

    def __call__(self) -> list[ModelCard]:
        return models()


sys.modules[__name__].__class__ = _Room
