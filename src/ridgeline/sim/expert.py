"""Sending tokens to their experts and back: what crosses the network and the scale-up links, and how long it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ridgeline.basis import Basis, worst
from ridgeline.errors import InputError, nearest
from ridgeline.hardware import Cluster, Group
from ridgeline.sim.coefficients import coefficients
from ridgeline.sim.collectives import Z90, CollectiveTime

MODES = ("throughput", "low_latency")
NETWORK_FRAC, LINK_FRAC = 0.88, 0.79
"""Shares of NIC and NVLink that DeepEP's tables reach (44 of 50 GB/s, 158 of 200 GB/s)."""
NUM_SMS = {"throughput": 20, "low_latency": 24}


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """One rank's tokens, each to ``topk`` experts spread evenly over the group, in at most ``max_domains`` of them."""

    num_tokens: int
    hidden_bytes: float  # of one token as sent, with its scales
    topk: int
    max_domains: int | None = None  # node-limited routing, as DeepSeek-V3's four

    @property
    def logical_bytes(self) -> float:
        """Every token once for every expert it goes to."""
        return self.num_tokens * self.topk * self.hidden_bytes


def distinct(num_boxes: int, num_balls: float) -> float:
    """Boxes expected to be hit by ``num_balls`` thrown evenly: a token travels once to each place that needs it."""
    return num_boxes * (1.0 - math.pow(1.0 - 1.0 / num_boxes, num_balls))


def exchange_s(routing: Routing, group: Group, cluster: Cluster, mode: str = "throughput") -> CollectiveTime:
    """The time of one dispatch (or combine, its reverse) of a rank's tokens over an expert-parallel group.

    ``throughput`` sends a token once to each domain and forwards it there; ``low_latency`` sends it straight to every
    expert's rank, as decoding does.
    """
    if mode not in MODES:
        raise InputError(f"unknown mode of an expert exchange {mode!r}{nearest(mode, MODES)}")
    if group.num_ranks == 1:
        return _time("none", 0.0, 0.0, 0.0, 0.0, group, cluster, 0)
    loads = _direct_loads if mode == "low_latency" else _forwarded_loads
    up, out = loads(routing, group)
    # A kernel that posts one write a token and expert, and waits for all (fitted on DeepEP's table of 8 to 256 ranks).
    # Notify, count and copy kernels around a dispatch that forwards inside the host (assumed)
    call_s = 20e-6 if mode == "low_latency" else 60e-6
    up_s = up / cluster.scale_up.bandwidth_bytes_per_s
    out_s = out / _rank_network_bytes_per_s(group, cluster) if out else 0.0
    return _time(mode, call_s, up_s, out_s, up, group, cluster, NUM_SMS[mode], out * group.per_host)


def _direct_loads(routing: Routing, group: Group) -> tuple[float, float]:
    """Bytes one rank sends inside its domain and outside, one copy for every expert."""
    n, per = group.num_ranks, group.per_domain
    return routing.logical_bytes * (per - 1) / n, routing.logical_bytes * (n - per) / n


def _forwarded_loads(routing: Routing, group: Group) -> tuple[float, float]:
    """One copy for every other domain that a token needs, and one for every rank there."""
    domains, per = group.num_domains, group.per_domain
    reach = min(domains, routing.max_domains or domains)
    hit = distinct(reach, routing.topk) if reach < domains or domains > 1 else 1.0
    sent = routing.num_tokens * routing.hidden_bytes
    ranks_each = distinct(per, routing.topk / hit)
    return sent * hit * ranks_each * (per - 1) / per, sent * hit * (domains - 1) / domains


def _rank_network_bytes_per_s(group: Group, cluster: Cluster) -> float:
    out = cluster.scale_out
    total = out.num_nics * out.nic_bandwidth_bytes_per_s / out.oversubscription
    if total <= 0:
        raise InputError(f"{cluster.name}: experts are spread over hosts that have no NIC; give them some, as nics=8")
    return min(total / (group.num_sharing * group.per_host), max(out.nic_bandwidth_bytes_per_s, total / group.per_host))


def _time(
    algorithm: str, call_s: float, up_s: float, out_s: float, up: float, group: Group, cluster: Cluster,
    num_sms: int, out: float = 0.0,
) -> CollectiveTime:  # fmt: skip
    coef = coefficients(cluster)
    expected_s = call_s + max(up_s / LINK_FRAC, out_s / NETWORK_FRAC)
    spread = max(0.15, coef.network.spread_frac if out_s else 0.0)
    floor_s = max(up_s, out_s)
    return CollectiveTime(
        kind="expert_exchange", expected_s=expected_s, floor_s=floor_s, latency_s=call_s,
        low_s=max(floor_s, expected_s * math.exp(-Z90 * spread)), high_s=expected_s * math.exp(Z90 * spread),
        basis=worst((Basis.FITTED, coef.network.basis)) if out_s else Basis.FITTED, algorithm=algorithm,
        scale_up_bytes=up, scale_out_bytes=out, num_sms=num_sms,
    )  # fmt: skip
