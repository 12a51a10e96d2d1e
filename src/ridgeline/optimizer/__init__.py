"""Makes models faster and proves it: named rewrites, kernels in their place, a torch.compile backend, search, receipts.

``import ridgeline`` makes ``torch.compile(model, backend="ridgeline")`` known; importing this makes it known even where
PyTorch had looked for backends before.
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
    if _point.name == "ridgeline":  # PyTorch may have looked before; where it has not, it will find it by itself
        _registry._BACKENDS.setdefault(_point.name, _point)  # type: ignore[union-attr]
