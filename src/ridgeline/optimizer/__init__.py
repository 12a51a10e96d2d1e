"""Makes models faster and proves it: named rewrites, kernels in their place, a torch.compile backend, search, receipts.

Importing it makes ``torch.compile(model, backend="ridgeline")`` known; an installed Ridgeline is found without that.
"""

from __future__ import annotations

from typing import Any

try:
    from torch._dynamo import register_backend
except ImportError as error:
    from ridgeline.errors import MissingExtra

    raise MissingExtra(error.name or "torch", "kernels", "ridgeline.optimizer") from None


@register_backend(name="ridgeline")
def _ridgeline(gm: Any, example_inputs: Any, **options: Any) -> Any:
    from ridgeline.optimizer.backend import backend

    return backend(gm, example_inputs, **options)
