"""A cluster as a value: devices in hosts, hosts in scale-up domains, domains on a network, all with sources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ridgeline.basis import Basis, worst
from ridgeline.errors import HardwareError, nearest
from ridgeline.hardware.device import Device, Provenance

TOPOLOGIES = ("switch", "mesh", "torus2d", "torus3d", "pcie", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine: how many devices it holds and what else is in it."""

    num_devices: int
    num_cpu_sockets: int
    pcie_generation: int
    power_w: float  # what the host draws besides its devices, under load


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleUp:
    """The fast links inside a domain; bandwidth is of one device in one direction, over all its links."""

    kind: str  # the technology, such as nvlink4; coefficients of collectives are kept by it
    topology: str
    bandwidth_bytes_per_s: float
    domain_size: int
    latency_s: float
    reduces_in_switch: bool

    @property
    def is_torus(self) -> bool:
        return self.topology.startswith("torus")

    @property
    def num_torus_dims(self) -> int:
        return int(self.topology[5]) if self.is_torus else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOut:
    """The network between domains: NICs of a host, and the fat tree above them."""

    kind: str  # infiniband, roce, efa, ethernet or dcn
    num_nics: int  # of one host
    nic_bandwidth_bytes_per_s: float
    latency_s: float
    num_rails: int
    num_levels: int
    oversubscription: float  # 1 is a full fat tree; 2 halves what crosses the leaf switches
    reduces_in_switch: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that take part in one collective, by where they sit; build it with ``Cluster.group``.

    ``num_sharing`` is how many groups of a host (this one included) use its NICs at the same time: with tensor
    parallelism of 8 in a host of 8, the data-parallel group has one rank a host and 7 siblings beside it.
    """

    num_ranks: int
    per_host: int
    per_domain: int
    num_sharing: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.per_host <= self.per_domain <= self.num_ranks or self.num_sharing < 1:
            raise HardwareError(f"impossible group: {self}; a host is part of a domain and a domain part of the group")

    @property
    def num_domains(self) -> int:
        return -(-self.num_ranks // self.per_domain)

    @property
    def num_hosts(self) -> int:
        return -(-self.num_ranks // self.per_host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What a plan runs on: equal devices in equal hosts."""

    name: str
    title: str
    system: str  # the file in data/clusters, or generic
    device: Device
    num_devices: int
    host: Host
    scale_up: ScaleUp
    scale_out: ScaleOut
    provenances: Mapping[str, Provenance] = field(hash=False, repr=False)
    parent: str | None = None

    def __post_init__(self) -> None:
        per_host = self.host.num_devices
        if self.num_devices > per_host and self.num_devices % per_host:
            low = self.num_devices // per_host * per_host
            raise HardwareError(
                f"{self.name}: {self.num_devices} devices do not fill hosts of {per_host};"
                f" take {low} or {low + per_host}, or change the host: devices_per_host=…"
            )

    @property
    def num_hosts(self) -> int:
        return -(-self.num_devices // self.host.num_devices)

    @property
    def num_domains(self) -> int:
        return -(-self.num_devices // self.domain_size)

    @property
    def devices_per_host(self) -> int:
        """Devices of one host that belong to this cluster."""
        return min(self.num_devices, self.host.num_devices)

    @property
    def domain_size(self) -> int:
        """Devices that reach one another over the scale-up links."""
        return min(self.num_devices, self.scale_up.domain_size)

    @property
    def scale_out_bytes_per_s(self) -> float:
        """Network bandwidth of one device in one direction, its share of the host's NICs."""
        return self.scale_out.num_nics * self.scale_out.nic_bandwidth_bytes_per_s / self.host.num_devices

    @property
    def torus_dims(self) -> tuple[int, ...]:
        """Sides of the torus that the devices form, longest first; empty without one."""
        if not self.scale_up.is_torus:
            return ()
        return _sides(self.domain_size, self.scale_up.num_torus_dims)

    @property
    def is_imagined(self) -> bool:
        return self.parent is not None

    @property
    def basis(self) -> Basis:
        """The worst basis of any number of the cluster itself (its device has its own)."""
        return worst(found.basis for found in self.provenances.values())

    @property
    def price_usd_per_hour(self) -> float:
        """All devices at the price of one; a cloud's device price includes its host and network."""
        return self.device.price_usd_per_hour * self.num_devices

    def provenance(self, field: str) -> Provenance:
        """Where a number (``scale_out.nic_bandwidth_bytes_per_s``, ``host.num_devices``, …) comes from."""
        if field not in self.provenances:
            raise HardwareError(f"{self.name} has no number {field!r}{nearest(field, self.provenances)}")
        return self.provenances[field]

    def basis_of(self, *fields: str) -> Basis:
        """The worst basis of the fields a result was computed from."""
        return worst(self.provenance(name).basis for name in fields)

    def numbers(self) -> dict[str, float]:
        """Every number by its dotted name, the same names ``provenance`` answers to."""
        return {name: float(getattr(getattr(self, name.partition(".")[0]), name.partition(".")[2])) for name in NUMBERS}

    def group(self, num_ranks: int, stride: int = 1, *, alone: bool = False) -> Group:
        """Ranks ``0, stride, 2·stride, …``, laid out in the order of devices; siblings run beside it unless ``alone``.

        Tensor parallelism of 8 is ``group(8)``; data parallelism outside it ``group(128, stride=8)``. Where the stride
        does not divide a host or a domain, the fullest counts, as in ``group_of``: the first one.
        """
        if num_ranks < 1 or stride < 1 or (num_ranks - 1) * stride >= self.num_devices:
            raise HardwareError(
                f"{self.name}: {num_ranks} ranks with stride {stride} need {(num_ranks - 1) * stride + 1} devices;"
                f" it has {self.num_devices}"
            )
        per_host = min(num_ranks, -(-self.devices_per_host // stride))
        per_domain = max(per_host, min(num_ranks, -(-self.domain_size // stride)))
        sharing = 1 if alone else max(1, self.devices_per_host // per_host)
        return Group(num_ranks=num_ranks, per_host=per_host, per_domain=per_domain, num_sharing=sharing)

    def group_of(self, ranks: Iterable[int], *, alone: bool = False) -> Group:
        """The group of an explicit list of ranks; uneven ones count by their fullest host and domain."""
        members = sorted(set(ranks))
        if not members or members[0] < 0 or members[-1] >= self.num_devices:
            raise HardwareError(f"{self.name} has ranks 0 to {self.num_devices - 1}; asked for {members[:8]}")
        per_host = _fullest(members, self.devices_per_host)
        per_domain = max(per_host, _fullest(members, self.domain_size))
        sharing = 1 if alone else max(1, self.devices_per_host // per_host)
        return Group(num_ranks=len(members), per_host=per_host, per_domain=per_domain, num_sharing=sharing)

    def resized(self, num_devices: int) -> Cluster:
        """The same kind of cluster with another number of devices."""
        if num_devices < 1:
            raise HardwareError(f"{self.name}: a cluster needs at least one device, not {num_devices}")
        name = self.name.replace(f"*{self.num_devices}", f"*{num_devices}", 1)
        return replace(self, name=name, num_devices=num_devices)


NUMBERS = (
    "host.num_devices", "host.num_cpu_sockets", "host.pcie_generation", "host.power_w",
    "scale_up.bandwidth_bytes_per_s", "scale_up.domain_size", "scale_up.latency_s", "scale_up.reduces_in_switch",
    "scale_out.num_nics", "scale_out.nic_bandwidth_bytes_per_s", "scale_out.latency_s", "scale_out.num_rails",
    "scale_out.num_levels", "scale_out.oversubscription", "scale_out.reduces_in_switch",
)  # fmt: skip


def _fullest(members: list[int], size: int) -> int:
    counts: dict[int, int] = {}
    for rank in members:
        counts[rank // size] = counts.get(rank // size, 0) + 1
    return max(counts.values())


def _sides(count: int, num_dims: int) -> tuple[int, ...]:
    """The most cube-like way to lay ``count`` devices out in ``num_dims`` dims, longest side first."""
    if num_dims == 1:
        return (count,)
    best = (count,) + (1,) * (num_dims - 1)
    for side in range(1, round(count ** (1 / num_dims)) + 1):
        if count % side == 0:
            rest = _sides(count // side, num_dims - 1)
            candidate = tuple(sorted((side, *rest), reverse=True))
            if max(candidate) - min(candidate) < max(best) - min(best):
                best = candidate
    return best
