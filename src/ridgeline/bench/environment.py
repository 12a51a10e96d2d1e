"""What a measurement was taken on: hardware and software, without anything that identifies a person or place."""

from __future__ import annotations

import platform
from typing import Any


def environment() -> dict[str, Any]:
    """Device, driver and library versions of this process."""
    import torch

    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        props = torch.cuda.get_device_properties(0)
        found |= {
            "device": props.name,
            "num_sms": props.multi_processor_count,
            "memory_bytes": props.total_memory,
            "l2_bytes": getattr(props, "L2_cache_size", None),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "capability": list(torch.cuda.get_device_capability()),
        }
    return found
