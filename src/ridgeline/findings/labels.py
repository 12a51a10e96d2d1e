"""What causes of idle time are called where people read them; JSON and tables for programs keep the short names."""

from __future__ import annotations

IDLE_WORDS = {
    "dataloader": "data loader",
    "gc": "garbage collection",
    "recompile": "compilation",
    "allocator": "allocator",
    "pageable_copy": "copies of pageable memory",
    "pinned_copy": "copies of pinned memory",
    "synchronization": "the host waited for the device",
    "launch_bound": "the host had not launched yet",
    "device_gap": "between queued kernels",
    "device_copy": "copies on the device",
    "communication": "communication",
    "straggler": "waiting for another rank",
    "unrecorded": "work that was not recorded",
    "bubble": "pipeline bubble",
    "unknown": "not known",
}
_IDLE = "idle: "


def idle_words(cause: str) -> str:
    return IDLE_WORDS.get(cause, cause)


def spoken(key: str) -> str:
    """A row of a comparison: ``idle: launch_bound`` in words, everything else as it is."""
    return _IDLE + idle_words(key.removeprefix(_IDLE)) if key.startswith(_IDLE) else key
