"""``optimize`` and its parts: named graph rewrites, kernels of ours, a torch.compile backend, the search and receipts.

Importing this package registers ``torch.compile(model, backend="ridgeline")``, also if PyTorch has already collected
the backends of installed packages; otherwise PyTorch finds it by its entry point.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import entry_points

if importlib.util.find_spec("torch") is None:
    from ridgeline.errors import MissingExtra

    raise MissingExtra("torch", "kernels", "ridgeline.optimizer")

_registry = sys.modules.get("torch._dynamo.backends.registry")
for _point in entry_points(group="torch_dynamo_backends") if _registry is not None else ():
    if _point.name == "ridgeline":
        _registry._BACKENDS.setdefault(_point.name, _point)  # type: ignore[union-attr]
