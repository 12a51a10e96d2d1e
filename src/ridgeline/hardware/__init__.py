"""Devices and clusters as data: what each can do, where every number comes from, and ones that do not exist yet."""

from ridgeline.hardware.catalog import device, devices
from ridgeline.hardware.cluster import Cluster, Group, Host, ScaleOut, ScaleUp
from ridgeline.hardware.clusters import cluster, cluster_of, systems
from ridgeline.hardware.device import Device, Link, MemoryLevel, Peak, Provenance

__all__ = [
    "Cluster",
    "Device",
    "Group",
    "Host",
    "Link",
    "MemoryLevel",
    "Peak",
    "Provenance",
    "ScaleOut",
    "ScaleUp",
    "cluster",
    "cluster_of",
    "device",
    "devices",
    "systems",
]
