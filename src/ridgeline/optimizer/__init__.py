"""Makes models faster and proves it: named rewrites, kernels in their place, a torch.compile backend, search, receipts.

``import ridgeline`` makes ``torch.compile(model, backend="ridgeline")`` known; importing this makes it known even where
PyTorch had looked for backends before.
"""

from __future__ import annotations

from importlib.metadata import entry_points

try:
    from torch._dynamo.backends import registry
except ImportError as error:
    from ridgeline.errors import MissingExtra

    raise MissingExtra(error.name or "torch", "kernels", "ridgeline.optimizer") from None

for _point in entry_points(group="torch_dynamo_backends"):
    if _point.name == "ridgeline":
        registry._BACKENDS.setdefault(_point.name, _point)
