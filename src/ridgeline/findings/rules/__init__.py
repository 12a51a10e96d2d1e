"""Every rule of the house; importing a module registers its rules."""

from ridgeline.findings.rules import (
    communication,
    copies,
    fusion,
    host,
    limits,
    memory,
    optimizer,
    passes,
    power,
    products,
    waits,
)

__all__ = [
    "communication", "copies", "fusion", "host", "limits", "memory", "optimizer", "passes", "power", "products",
    "waits",
]  # fmt: skip
