"""Collectives as serving engines run them: small messages through peers' memory, large ones in rings or switches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ridgeline.cost.chip import Floats
from ridgeline.hardware import Device

ONE_SHOT_S = 4.0e-6
"""An all-reduce in which every rank reads all others' data: two barriers through peer memory."""
PEER_S = 0.35e-6
"""What each further rank adds to it."""
TWO_SHOT_S = 8.0e-6
"""Reduce-scatter and all-gather in one kernel."""
RING_S = 12.0e-6
"""A library's collective on one host, per launch."""
HOP_S = 5.0e-6
"""Each crossing of the network between hosts."""
LINK_FRAC = 0.72
"""Share of a link's rate that large messages reach."""


@dataclass(frozen=True, slots=True)
class Fabric:
    """What ``num`` ranks of one group have between them."""

    num: int
    link_bytes_per_s: float
    hosts: int
    host_bytes_per_s: float
    peers: bool

    def all_reduce_s(self, num_bytes: ArrayLike) -> Floats:
        """Every rank ends with the sum of all."""
        size, n = np.asarray(num_bytes, dtype=np.float64), self.num
        if n == 1:
            return np.zeros_like(size)
        rate = self.link_bytes_per_s * LINK_FRAC
        ring_s = RING_S + 2 * (n - 1) / n * size / rate
        if self.hosts > 1:
            across = 2 * (self.hosts - 1) / self.hosts * size / (self.host_bytes_per_s * LINK_FRAC)
            return np.asarray(ring_s + across + 2 * (self.hosts - 1) * HOP_S)
        if not self.peers:
            return np.asarray(ring_s + (n - 1) * HOP_S)
        one_s = ONE_SHOT_S + PEER_S * n + (n - 1) * size / rate
        two_s = TWO_SHOT_S + PEER_S * n + 2 * (n - 1) / n * size / rate
        return np.minimum(one_s, np.minimum(two_s, ring_s))

    def exchange_s(self, num_bytes: ArrayLike) -> Floats:
        """Gather or scatter of ``num_bytes`` in all, an equal share from each rank: half of an all-reduce."""
        size, n = np.asarray(num_bytes, dtype=np.float64), self.num
        if n == 1:
            return np.zeros_like(size)
        inside_s = TWO_SHOT_S + PEER_S * n + (n - 1) / n * size / (self.link_bytes_per_s * LINK_FRAC)
        if self.hosts == 1:
            return np.asarray(inside_s)
        across = (self.hosts - 1) / self.hosts * size / (self.host_bytes_per_s * LINK_FRAC)
        return np.asarray(inside_s + across + (self.hosts - 1) * HOP_S)

    def send_s(self, num_bytes: ArrayLike) -> Floats:
        """One rank to another, over the network when the group spans hosts."""
        rate = self.link_bytes_per_s if self.hosts == 1 else self.host_bytes_per_s
        return np.asarray(HOP_S + np.asarray(num_bytes, dtype=np.float64) / (rate * LINK_FRAC))


def fabric(device: Device, num: int) -> Fabric:
    """The ranks of one group, packed onto as few hosts as the scale-up domain allows."""
    up = device.links.get("scale_up") or device.link("pcie")
    domain = up.domain_size if up.name == "scale_up" else 8
    hosts = -(-num // max(1, domain))
    inside = min(num, domain)
    out = device.links.get("scale_out") or device.link("pcie")
    peers = up.name == "scale_up"
    return Fabric(num, up.bandwidth_bytes_per_s, hosts, out.bandwidth_bytes_per_s * inside, peers)
