"""Devices as data: what each one can do, where every number comes from, and ones that do not exist yet."""

from ridgeline.hardware.catalog import device, devices
from ridgeline.hardware.device import Device, Link, MemoryLevel, Peak, Provenance

__all__ = ["Device", "Link", "MemoryLevel", "Peak", "Provenance", "device", "devices"]
