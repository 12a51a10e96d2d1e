"""Named rewrites of FX graphs, one module per family; ``order.py`` lists them in their order."""

from importlib import import_module

from ridgeline.optimizer.rewrites.order import ORDER
from ridgeline.optimizer.rewrites.registry import (
    Match,
    Rewrite,
    Worth,
    arrange,
    chosen,
    recommended,
    rewrite,
    rewrites,
)

for _name, _module in ORDER:
    import_module(f"{__name__}.{_module}")
arrange([name for name, _ in ORDER])

__all__ = ["Match", "Rewrite", "Worth", "chosen", "recommended", "rewrite", "rewrites"]
