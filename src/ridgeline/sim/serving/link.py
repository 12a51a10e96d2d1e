"""Collectives as serving engines run them: small messages through peers' memory, the rest by the library."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from ridgeline.cost.time.chip import Floats
from ridgeline.hardware import Cluster, Device, cluster_of
from ridgeline.sim.collectives import collective_s

PEER_S = 0.35e-6
"""What each further rank adds to it."""
TWO_SHOT_S = 8.0e-6
"""Reduce-scatter and all-gather in one kernel."""
LINK_FRAC = 0.72
"""Share of a link's rate that large messages reach."""
SAMPLES = 24
"""Message sizes at which the library is asked; between them, straight lines."""


@dataclass(frozen=True, slots=True)
class Fabric:
    """What ``num`` ranks of one group have between them."""

    num: int
    cluster: Cluster = field(repr=False)
    reads_peers: bool = True  # whether the engine has kernels of its own for that

    @property
    def has_peers(self) -> bool:
        """Whether ranks read each other's memory: all in one switched or meshed scale-up domain."""
        joined = self.num <= self.cluster.domain_size and not self.cluster.scale_up.kind.startswith("pcie")
        return self.reads_peers and joined

    def all_reduce_s(self, num_bytes: ArrayLike) -> Floats:
        """Every rank ends with the sum of all."""
        size, n = np.asarray(num_bytes, dtype=np.float64), self.num
        if n == 1:
            return np.zeros_like(size)
        library_s = self._library_s("all_reduce", size)
        if not self.has_peers:
            return library_s
        rate = self.cluster.scale_up.bandwidth_bytes_per_s * LINK_FRAC
        # An all-reduce in which every rank reads all others' data: two barriers through peer memory
        one_s = 4.0e-6 + PEER_S * n + (n - 1) * size / rate
        two_s = TWO_SHOT_S + PEER_S * n + 2 * (n - 1) / n * size / rate
        return np.asarray(np.minimum(np.minimum(one_s, two_s), library_s))

    def exchange_s(self, num_bytes: ArrayLike) -> Floats:
        """Gather or scatter of ``num_bytes`` in all, an equal share from each rank."""
        size, n = np.asarray(num_bytes, dtype=np.float64), self.num
        if n == 1:
            return np.zeros_like(size)
        library_s = self._library_s("all_gather", size)
        if not self.has_peers:
            return library_s
        rate = self.cluster.scale_up.bandwidth_bytes_per_s * LINK_FRAC
        return np.asarray(np.minimum(TWO_SHOT_S + PEER_S * n + (n - 1) / n * size / rate, library_s))

    def send_s(self, num_bytes: float) -> float:
        """From one pipeline stage to the next."""
        if self.num == 1:
            return 0.0
        pair = self.cluster.group(2, self.num - 1)
        return collective_s("send_recv", max(num_bytes, 1.0), pair, self.cluster).expected_s

    def _library_s(self, kind: str, size: Floats) -> Floats:
        """The library's time, asked at a few sizes: one question costs microseconds and tables have thousands."""
        low, high = max(1.0, float(size.min())), max(2.0, float(size.max()))
        few = np.geomspace(low, high, SAMPLES) if size.size > SAMPLES else np.maximum(size, 1.0)
        points = np.unique(few)
        group = self.cluster.group(self.num)
        found = [collective_s(kind, float(p), group, self.cluster).expected_s for p in points]
        return np.interp(size, points, found)


def fabric(device: Device, num: int, *, reads_peers: bool = True) -> Fabric:
    """The ranks of one group, packed onto as few hosts as they fill."""
    return Fabric(num, cluster_of(device, num), reads_peers)
