"""How long ranks take to exchange data: the algorithms a library would try on a cluster, and the fastest of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.basis import Basis, worst
from ridgeline.errors import InputError, nearest
from ridgeline.hardware import Cluster, Group
from ridgeline.sim.coefficients import Coefficients, coefficients

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv", "barrier")
_WORDS = {"alltoall": "all_to_all", "allreduce": "all_reduce", "allgather": "all_gather", "sendrecv": "send_recv",
          "reducescatter": "reduce_scatter", "p2p": "send_recv", "send": "send_recv", "recv": "send_recv",
          "bcast": "broadcast"}  # fmt: skip
Z90 = 1.645
EXPLICIT = frozenset({"hierarchical"})
"""What a program builds out of several groups and libraries do not choose by themselves: taken only when named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTime:
    """Seconds of one collective with its 90 % interval, and the load it puts on links and SMs.

    Bytes are what one device (``scale_up_bytes``) or one host (``scale_out_bytes``) sends in one direction.
    """

    kind: str
    expected_s: float
    low_s: float
    high_s: float
    floor_s: float  # bytes over nominal bandwidth, no latency
    latency_s: float  # the part that does not shrink with bandwidth
    basis: Basis
    algorithm: str
    scale_up_bytes: float
    scale_out_bytes: float
    num_sms: int


class _Way(NamedTuple):
    """One algorithm on one group: latency, and on each level the bytes, the nominal rate and the share reached."""

    algorithm: str
    latency_s: float
    up_bytes: float  # sent by one device, its own copy included
    up_frac: float
    up_pipeline_s: float
    out_bytes: float  # sent by one domain
    out_frac: float
    out_bytes_per_s: float  # of one domain, nominal
    moved_bytes: float  # sent by one device over the scale-up links, without copies


@dataclass(frozen=True, slots=True)
class _Place:
    """A group on a cluster, with the rates it can use."""

    size: float  # message, bytes
    group: Group
    cluster: Cluster
    coef: Coefficients

    @property
    def up_bytes_per_s(self) -> float:
        """Scale-up bandwidth of one device that this group can use."""
        up, ranks = self.cluster.scale_up, self.group.per_domain
        if up.topology == "mesh" and up.domain_size > 1:  # a link for each pair: absent peers leave theirs idle
            return up.bandwidth_bytes_per_s * min(1.0, max(1, ranks - 1) / (up.domain_size - 1))
        if up.is_torus:
            return up.bandwidth_bytes_per_s * torus_share(self.cluster, ranks)
        return up.bandwidth_bytes_per_s

    @property
    def host_bytes_per_s(self) -> float:
        """Network bandwidth of one host that this group can use, after its siblings and the taper of the tree."""
        out, group = self.cluster.scale_out, self.group
        total = out.num_nics * out.nic_bandwidth_bytes_per_s
        if total <= 0.0:
            raise InputError(
                f"{self.cluster.name}: the group spans {group.num_domains} domains and the hosts have no NIC; "
                "give them some, as in 'nics=8 scaleout=400Gb'"
            )
        alone = group.per_host * max(out.nic_bandwidth_bytes_per_s, total / self.cluster.host.num_devices)
        taper = out.oversubscription if group.num_hosts > 1 else 1.0
        return min(total / group.num_sharing, alone) / taper

    @property
    def domain_bytes_per_s(self) -> float:
        """Network bandwidth of one domain, all its NICs."""
        return self.host_bytes_per_s * self.hosts_per_domain if self.group.num_domains > 1 else math.inf

    @property
    def rails_bytes_per_s(self) -> float:
        """The same for a ring or tree, which drives only so many rails of a wide domain at once."""
        if self.group.num_domains == 1:
            return math.inf
        rails = self.coef.network.max_rails * self.cluster.scale_out.nic_bandwidth_bytes_per_s
        return min(self.domain_bytes_per_s, max(rails, self.host_bytes_per_s))

    @property
    def step_s(self) -> float:
        """One hop over the scale-up links, small message."""
        return self.cluster.scale_up.latency_s

    @property
    def hop_s(self) -> float:
        """One hop over the network, with the proxy thread that posts it."""
        return self.cluster.scale_out.latency_s

    @property
    def hosts_per_domain(self) -> int:
        return max(1, self.group.per_domain // self.group.per_host)


def collective_s(
    kind: str, num_bytes: float, group: Group, cluster: Cluster, algorithm: str | None = None
) -> CollectiveTime:
    """The time of one collective; the fastest feasible algorithm unless one is named.

    ``num_bytes`` is the whole buffer, as nccl-tests counts it: what every rank holds before an all-reduce,
    reduce-scatter, broadcast or all-to-all, and after an all-gather; the message of a send.
    """
    return timed(kind, num_bytes, group, cluster, coefficients(cluster), algorithm)


def timed(
    kind: str, num_bytes: float, group: Group, cluster: Cluster, coef: Coefficients, algorithm: str | None = None
) -> CollectiveTime:
    """The same with coefficients of one's own, as a fit needs it."""
    name = _kind(kind)
    if num_bytes < 0:
        raise InputError(f"{name}: a message cannot have {num_bytes} bytes")
    if group.num_ranks == 1:
        return _free(name)
    place = _Place(4.0 if name == "barrier" else float(num_bytes), group, cluster, coef)
    ways = _chosen(name, list(_WAYS[name](place)), place, algorithm)
    return min((_timed(name, way, place) for way in ways), key=lambda found: found.expected_s)


def _chosen(kind: str, ways: list[_Way], place: _Place, algorithm: str | None) -> list[_Way]:
    """The ways a library would weigh, or the one that was named."""
    if algorithm is None:
        rings = kind == "all_reduce" and _only_rings(place)
        return [way for way in ways if (way.algorithm == "ring" if rings else way.algorithm not in EXPLICIT)]
    chosen = [way for way in ways if way.algorithm == algorithm]
    if not chosen:
        known = ", ".join(way.algorithm for way in ways)
        raise InputError(
            f"{kind} of {place.group} cannot run as {algorithm!r} on {place.cluster.name}; it can as {known}"
        )
    return chosen


def algorithms(kind: str, group: Group, cluster: Cluster) -> tuple[str, ...]:
    """The algorithms feasible for such a group, in no order."""
    if group.num_ranks == 1:
        return ("none",)
    place = _Place(1.0, group, cluster, coefficients(cluster))
    return tuple(way.algorithm for way in _WAYS[_kind(kind)](place))


def torus_sides(cluster: Cluster, num_ranks: int) -> tuple[int, ...]:
    """How far ``num_ranks`` neighbors reach along each axis of the torus, longest axis first."""
    left, reached = num_ranks, list[int]()
    for side in cluster.torus_dims:
        if left <= 1:
            break
        reached.append(min(side, left))
        left = -(-left // side)
    return tuple(reached)


def torus_share(cluster: Cluster, num_ranks: int) -> float:
    """The share of a chip's torus links that ``num_ranks`` neighbors use: whole axes count, a partial one half."""
    sides = cluster.torus_dims
    used = sum(1.0 if reach == side > 2 else 0.5 for reach, side in zip(torus_sides(cluster, num_ranks), sides))
    return max(used, 0.5) / max(1, len(sides))


def _kind(kind: str) -> str:
    word = kind.strip().lower().replace("-", "_")
    name = _WORDS.get(word.replace("_", ""), word)
    if name not in KINDS:
        raise InputError(f"unknown collective {kind!r}{nearest(word, KINDS)}")
    return name


def _free(kind: str) -> CollectiveTime:
    """A group of one has nothing to exchange."""
    return CollectiveTime(kind=kind, expected_s=0.0, low_s=0.0, high_s=0.0, floor_s=0.0, latency_s=0.0,
                          basis=Basis.MEASURED, algorithm="none", scale_up_bytes=0.0, scale_out_bytes=0.0,
                          num_sms=0)  # fmt: skip


def _timed(kind: str, way: _Way, place: _Place) -> CollectiveTime:
    """Latency, then the slower of the levels: its transfer, and what cutting it into chunks costs."""
    up_nominal_s = way.up_bytes / place.up_bytes_per_s
    out_nominal_s = way.out_bytes / way.out_bytes_per_s if way.out_bytes else 0.0
    up_s, out_s = up_nominal_s / way.up_frac, out_nominal_s / way.out_frac
    link, network = place.coef.link, place.coef.network
    up_s += chunking_s(up_s, way.up_pipeline_s, link.chunk_bytes / (place.up_bytes_per_s * way.up_frac))
    out_s += chunking_s(out_s, network.pipeline_s, network.chunk_bytes / (way.out_bytes_per_s * way.out_frac))
    expected_s = way.latency_s + max(up_s, out_s)
    crosses = place.group.num_domains > 1
    spread = max(link.spread_frac, network.spread_frac) if crosses else link.spread_frac
    floor_s = max(way.moved_bytes / place.up_bytes_per_s, out_nominal_s)
    return CollectiveTime(
        kind=kind, expected_s=expected_s, low_s=max(floor_s, expected_s * math.exp(-Z90 * spread)),
        high_s=expected_s * math.exp(Z90 * spread), floor_s=floor_s, latency_s=way.latency_s,
        basis=worst((link.basis, network.basis) if crosses else (link.basis,)),
        algorithm=way.algorithm, scale_up_bytes=way.moved_bytes, scale_out_bytes=way.out_bytes / place.hosts_per_domain,
        num_sms=_sms(place, up_s, out_s),
    )  # fmt: skip


def chunking_s(transfer_s: float, cost_s: float, largest_s: float) -> float:
    """What cutting a transfer into chunks adds: each costs ``cost_s``, and the pipeline fills with the first.

    The best number of chunks adds 2·√(cost·transfer); buffers limit a chunk to ``largest_s``, from where on every
    further chunk costs its share and the loss is one of bandwidth.
    """
    if transfer_s <= 0.0 or cost_s <= 0.0:
        return 0.0
    best_s = math.sqrt(cost_s * transfer_s)
    return 2.0 * best_s if best_s <= largest_s else cost_s * transfer_s / largest_s + largest_s


def _sms(place: _Place, up_s: float, out_s: float) -> int:
    """A transfer that the network bounds needs fewer SMs, in proportion to the rate it moves data at."""
    if place.cluster.device.kind != "gpu":
        return 0  # other accelerators move data with engines of their own
    return max(2, round(place.coef.link.num_sms * min(1.0, 0.25 + 0.75 * up_s / max(up_s, out_s, 1e-12))))


# Each way returns what one device sends inside its domain and one domain sends outside; n ranks in N domains of g.


def _all_reduce(place: _Place) -> Iterator[_Way]:
    link, group = place.coef.link, place.group
    n, domains, per = group.num_ranks, group.num_domains, group.per_domain
    ring_up = 2 * (n - 1) / n * place.size if per > 1 else 0.0
    copy = link.copy_frac * place.size / n if per > 1 else 0.0
    out = 2 * (n - 1) / n * place.size if domains > 1 else 0.0
    yield _way(place, "ring", _ring_latency_s(place, 2), ring_up, copy, out)
    if domains > 1:
        tree_out = place.size * (1.0 if domains == 2 else 2.0)
        hops = 2 * math.ceil(math.log2(domains))
        tree_up = 2 * (per - 1) / per * place.size
        latency_s = link.call_s + 2 * (per - 1) * place.step_s + hops * place.hop_s
        yield _way(place, "tree", latency_s, tree_up, copy, tree_out)
        level_out = 2 * (domains - 1) / domains * place.size  # each rank's shard over its own rail
        yield _way(place, "hierarchical", 3 * link.call_s + latency_s, tree_up, copy, level_out)
        if _reduces_in_switch(place):
            latency_s = link.switch_call_s + hops * place.hop_s
            yield _switch_way(place, "switch_tree", latency_s, tree_out)
        if place.cluster.scale_out.reduces_in_switch:
            latency_s = link.call_s + 2 * (per - 1) * place.step_s + 2 * place.hop_s
            yield _way(place, "sharp", latency_s, tree_up, copy, place.size)
    elif _reduces_in_switch(place):
        yield _switch_way(place, "switch", link.switch_call_s, 0.0)


def _only_rings(place: _Place) -> bool:
    """Large messages between domains of many hosts, more than two of them, as long as hops do not cost far more than
    the transfer: half a gibibyte between 1,440 GPUs in 20 racks takes the 7.1 ms of a ring over all of them, of which
    2,878 hops are 3.7, where a tree would take 3.3; 144 GPUs in two racks take a tree's time (coreweave/nccl-tests)."""
    if place.hosts_per_domain == 1 or place.group.num_domains <= 2:
        return False
    return _ring_latency_s(place, 2) < 2.0 * (2.0 * place.size / place.rails_bytes_per_s)


def _reduces_in_switch(place: _Place) -> bool:
    """The libraries set up in-switch groups from three ranks on."""
    return place.cluster.scale_up.reduces_in_switch and place.group.per_domain > 2


def _switch_way(place: _Place, name: str, latency_s: float, out: float) -> _Way:
    """Each rank's data goes into the switch once and its part of the sum comes out, then the other way around."""
    link, per = place.coef.link, place.group.per_domain
    moved = (1 + 1 / per) * place.size
    frac = link.switch_frac if place.hosts_per_domain == 1 else link.wide_switch_frac
    return _Way(name, latency_s, moved, frac, link.switch_pipeline_s, out, place.coef.network.frac,
                place.rails_bytes_per_s, moved)  # fmt: skip


def _gather_like(place: _Place) -> Iterator[_Way]:
    """All-gather, and reduce-scatter which is the same in reverse."""
    n, per = place.group.num_ranks, place.group.per_domain
    moved = (n - 1) / n * place.size
    copy = place.coef.link.copy_frac * place.size / n
    out = moved if place.group.num_domains > 1 else 0.0
    yield _way(place, "ring", _ring_latency_s(place, 1), moved if per > 1 else 0.0, copy if per > 1 else 0.0, out)
    if place.group.num_domains > 1:
        hops = math.ceil(math.log2(place.group.num_domains))
        link, domains = place.coef.link, place.group.num_domains
        latency_s = link.call_s + (per - 1) * place.step_s + hops * place.hop_s
        sent = (domains - 1) / domains * place.size  # every domain sends its part to all others, in log steps
        yield _way(place, "parallel_tree", latency_s, moved if per > 1 else 0.0, copy if per > 1 else 0.0,
                   max(sent, out))  # fmt: skip


def _broadcast(place: _Place) -> Iterator[_Way]:
    group = place.group
    out = place.size if group.num_domains > 1 else 0.0
    up = place.size if group.per_domain > 1 else 0.0
    yield _way(place, "ring", _ring_latency_s(place, 1), up, 0.0, out)
    hops = math.ceil(math.log2(group.num_domains)) if group.num_domains > 1 else 0
    latency_s = (
        place.coef.link.call_s + math.ceil(math.log2(max(2, group.per_domain))) * place.step_s + hops * place.hop_s
    )
    yield _way(place, "tree", latency_s, 2 * up, 0.0, 2 * out)  # an inner rank feeds two


def _all_to_all(place: _Place) -> Iterator[_Way]:
    link, group = place.coef.link, place.group
    n, per = group.num_ranks, group.per_domain
    inside, outside = (per - 1) / n * place.size, (n - per) / n * place.size
    peers_s = link.direct_step_s * math.log2(max(2, n))
    if group.num_domains > 1:
        peers_s += place.hop_s * (1 + 0.25 * math.log2(group.num_domains))
    copy = link.copy_frac * place.size / n
    if place.cluster.scale_up.is_torus:  # messages cross a quarter of each ring on average, links shared by all
        inside *= max(1.0, sum(side / 4 for side in torus_sides(place.cluster, per)))
    load = (inside + copy, link.direct_frac, link.direct_pipeline_s, outside * per,
            place.coef.network.direct_frac, place.domain_bytes_per_s, inside)  # fmt: skip
    yield _Way("direct", link.direct_call_s + peers_s, *load)
    yield _Way("eager", link.call_s + peers_s + place.size / n / link.eager_bytes_per_s, *load)


def _send_recv(place: _Place) -> Iterator[_Way]:
    link, network = place.coef.link, place.coef.network
    if place.group.per_domain > 1:
        yield _Way("direct", link.call_s, place.size, link.p2p_frac, 0.0, 0.0, network.p2p_frac, math.inf, place.size)
    else:
        yield _Way("direct", link.call_s + place.hop_s, 0.0, link.p2p_frac, 0.0, place.size, network.p2p_frac,
                   place.host_bytes_per_s, 0.0)  # fmt: skip


def _ring_latency_s(place: _Place, rounds: int) -> float:
    """Every chunk visits every rank ``rounds`` times; hops between domains cost what the network takes."""
    group, link = place.group, place.coef.link
    outer = rounds * (group.num_domains - 1)
    inner = rounds * (group.num_ranks - group.num_domains)
    return link.call_s + inner * place.step_s + outer * place.hop_s


def _way(place: _Place, name: str, latency_s: float, moved: float, copy: float, out: float) -> _Way:
    link = place.coef.link
    return _Way(name, latency_s, moved + copy, link.ring_frac, link.pipeline_s, out, place.coef.network.frac,
                place.rails_bytes_per_s, moved)  # fmt: skip


_WAYS: dict[str, Callable[[_Place], Iterator[_Way]]] = {
    "all_reduce": _all_reduce,
    "barrier": _all_reduce,
    "all_gather": _gather_like,
    "reduce_scatter": _gather_like,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
    "send_recv": _send_recv,
}
