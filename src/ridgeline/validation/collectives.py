"""Published times and bandwidths of collectives beside ours: which cluster a row means, and what it measured."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ridgeline.errors import InputError, RidgelineError
from ridgeline.hardware import Cluster, Group, cluster
from ridgeline.sim.collectives import CollectiveTime, collective_s
from ridgeline.sim.expert import Routing, distinct, exchange_s
from ridgeline.validation.publications import publications
from ridgeline.validation.spelling import byte_size, plain
from ridgeline.validation.verdict import Judged, Row, Unused

_BUS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
    "send_recv": lambda n: 1.0,
    "broadcast": lambda n: 1.0,
}
_KINDS = {plain(kind): kind for kind in _BUS} | {"p2p": "send_recv"}
_KEY = (
    "source", "collective", "device", "num_devices", "nodes", "message_bytes", "algo", "software", "intra_link",
    "inter_link", "dtype",
)  # fmt: skip
_TOKENS = re.compile(r"(\d+)\s*tokens x (\d+) x top-(\d+)(?: \(top-(\d+) groups\))?")


class Question(NamedTuple):
    """What a row asks: a group of ranks on a cluster."""

    cluster: Cluster
    group: Group


def judge(rows: Sequence[Row]) -> Iterator[Judged | Unused]:
    """Each row beside the collective it describes."""
    for row in rows:
        try:
            yield _judged(row)
        except RidgelineError as error:
            yield Unused(row=row.line, source=row.text("source"), why=str(error))


def _judged(row: Row) -> Judged:
    if "anomalous" in row.text("notes").lower():
        raise InputError("the file marks this row as anomalous (peer access was probably off on that host)")
    if row.text("collective").startswith("moe_"):
        return _judged_exchange(row)
    kind = _KINDS.get(plain(row.text("collective").removesuffix("_perf")), "")
    if not kind:
        raise InputError(f"collective {row.text('collective')!r} is not modeled")
    asked = question(row)
    num_bytes = message_bytes(row)
    time_s = measured_s(row, kind, asked.group.num_ranks, num_bytes)
    found = collective_s(kind, num_bytes, asked.group, asked.cluster, algorithm(row, kind))
    more_s = _host_s(row, found, asked.cluster)
    return _verdict(row, kind, found, time_s, more_s)


def _verdict(row: Row, kind: str, found: CollectiveTime, time_s: float, more_s: float = 0.0) -> Judged:
    what = (
        f"{kind} {row.text('message_bytes')} B, {row.text('num_devices')}× {row.text('device')}"
        f" in {row.text('nodes')} ({found.algorithm})"
    )
    key = "|".join(row.text(name) for name in _KEY)
    return Judged(
        row=row.line, key=key, source=row.text("source"), what=what, metric=kind, unit="s", measured=time_s,
        predicted=found.expected_s + more_s, low=found.low_s + 0.5 * more_s, high=found.high_s + 1.5 * more_s,
    )  # fmt: skip


def question(row: Row) -> Question:
    """The cluster and group that a row's columns describe."""
    ranks, hosts, per_host = row.number("num_devices"), row.number("nodes"), row.number("devices_per_node")
    if ranks is None or ranks < 2:
        raise InputError("the number of devices is not stated")
    if hosts is None:
        raise InputError(f"the number of hosts is not stated ({row.text('nodes')!r})")
    per_host = per_host or ranks / hosts
    name = system_of(row.text("device"))
    place = cluster(f"{name}*8" if hosts == 1 and not name.startswith("gb") else f"{name}*{_room(name, ranks, hosts)}")
    changes = "" if hosts == 1 or _one_domain(place, ranks) else _network(row, place)
    if changes:
        place = cluster(f"{place.name} {changes}")
    per_domain = min(ranks, place.scale_up.domain_size) if place.scale_up.domain_size > per_host else per_host
    group = Group(num_ranks=int(ranks), per_host=int(per_host), per_domain=int(per_domain), num_sharing=1)
    return Question(place, group)


def system_of(device: str) -> str:
    """The device or host that a free description means."""
    found = publications("devices")["system"].choose({"text": device.lower()})
    if found:
        return str(found["system"])
    raise InputError(f"no device is named ({device!r})")


def _room(name: str, ranks: float, hosts: float) -> int:
    """Enough whole hosts: instances are counted by the host, devices by the device."""
    is_host = cluster(name).num_devices > 1
    if name.startswith("gb"):
        return -(-int(ranks) // 4) * 4
    return int(hosts) if is_host else max(8 * int(hosts), -(-int(ranks) // 8) * 8)


def _one_domain(place: Cluster, ranks: float) -> bool:
    """A rack-wide domain joins hosts without a network."""
    return place.host.num_devices < place.scale_up.domain_size >= ranks


def _network(row: Row, place: Cluster) -> str:
    """The network between hosts as changes of the cluster; what is not stated is not guessed."""
    inside = row.text("intra_link").lower()
    text = row.text("inter_link").lower() or (inside if "rdma" in inside else "")
    if text == "n/s" or not (text or "dgx" in row.text("device").lower()):  # a DGX has a network that is known
        raise InputError("the network between the hosts is not stated")
    changes = _nics(text, place)
    if "sharp" in text:
        changes.append("sharp=1")
    fabric = next((kind for word, kind in (("efa", "efa"), ("roce", "roce"), ("tcp", "ethernet")) if word in text), "")
    known = place.scale_out.kind.startswith(fabric)  # an instance knows which generation of EFA it has
    return " ".join(changes + ([] if known else [f"fabric={fabric}"]))


def _nics(text: str, place: Cluster) -> list[str]:
    """NICs and their speed as far as the text gives them: ``8x400Gb/s``, ``400Gb/s per GPU``, ``3200Gb/s per node``."""
    count = re.search(r"(\d+)\s*x\s*(\d+)\s*gb", text)
    each = re.search(r"(\d+)\s*gb(?:it)?(?:/s|ps)? per (?:gpu|device)", text)
    total = re.search(r"(\d+)\s*gb(?:it)?(?:/s|ps)? .*per (?:node|host)", text)
    single = re.search(r"(\d+)\s*gbe\b", text)
    if count:
        return [f"nics={count.group(1)}", f"scaleout={count.group(2)}Gb"]
    if each:
        return [f"nics={place.host.num_devices}", f"scaleout={each.group(1)}Gb"]
    if total and "efa" not in text:
        return [f"nics={place.host.num_devices}", f"scaleout={int(total.group(1)) / place.host.num_devices:g}Gb"]
    return ["nics=1", f"scaleout={single.group(1)}Gb"] if single else []


def message_bytes(row: Row) -> float:
    """The message of a row; a saturated one stands for a large size."""
    if "saturated" in row.text("message_bytes"):
        return float(1 << 33)  # 8 GiB, the size saturated runs end with
    size = byte_size(row.text("message_bytes"))
    if size is None or size <= 0:
        raise InputError(f"the message size is not a number of bytes: {row.text('message_bytes')!r}")
    return size


def measured_s(row: Row, kind: str, ranks: int, num_bytes: float) -> float:
    """The time of a row, as given or from its bus bandwidth."""
    time_us = row.number("time_us")
    if time_us is not None and time_us > 0:
        return time_us * 1e-6
    bus = row.number("busbw_gbps")
    if bus is None or bus <= 0:
        raise InputError("neither a time nor a bus bandwidth is given")
    decimals = len(row.text("busbw_gbps").partition(".")[2])
    if 0.5 * 10**-decimals / bus > 0.10:  # rounding alone may be off by more than a tenth
        raise InputError(f"a bus bandwidth of {bus} GB/s has too few digits to be compared")
    return _BUS[kind](ranks) * num_bytes / (bus * 1e9)


def algorithm(row: Row, kind: str) -> str | None:
    """The algorithm a row names; None leaves the choice to us, as the library had it."""
    text = row.text("algo").lower() or ("ring" if "(ring)" in row.text("intra_link").lower() else "")
    if kind != "all_reduce" or not text:
        return None
    return "ring" if text.startswith("ring") else "switch" if text.startswith("nvls") else None


def _host_s(row: Row, found: CollectiveTime, place: Cluster) -> float:
    """What the way of measuring adds to the collective itself."""
    said = publications("collectives")["host"].choose({
        "software": row.text("software").lower(), "kind": found.kind, "link": place.scale_up.kind,
        "ranks": row.number("num_devices") or 0, "message_bytes": message_bytes(row),
    })  # fmt: skip
    return float(max(said["add_s"], said["shortest_s"] - found.expected_s))


def _judged_exchange(row: Row) -> Judged:
    """Rows of expert-parallel libraries give a time, or the bandwidth of their bottleneck or of all they were asked."""
    kind = row.text("collective")
    size = _TOKENS.search(row.text("message_bytes"))
    if size is None:
        raise InputError(f"cannot read the tokens from {row.text('message_bytes')!r}")
    tokens, hidden, topk = (int(size.group(i)) for i in (1, 2, 3))
    token_bytes = hidden * 2.0 if "combine" in kind else hidden * (1 + 4 / 128)  # fp8 with one fp32 scale for 128
    limit = int(size.group(4)) if size.group(4) else None
    routing = Routing(num_tokens=tokens, hidden_bytes=token_bytes, topk=topk, max_domains=limit)
    asked = question(row)
    found = exchange_s(routing, asked.group, asked.cluster, "low_latency" if "low" in kind else "throughput")
    time_us = row.number("time_us")
    time_s = time_us * 1e-6 if time_us else _counted_bytes(routing, asked) / (_bus(row) * 1e9)
    return _verdict(row, kind, found, time_s)


def _bus(row: Row) -> float:
    bus = row.number("busbw_gbps")
    if bus is None or bus <= 0:
        raise InputError("neither a time nor a bandwidth is given")
    return bus


def _counted_bytes(routing: Routing, asked: Question) -> float:
    """The bytes a published bandwidth counts: copies to every domain, or to every rank of one, own included."""
    group, sent = asked.group, routing.num_tokens * routing.hidden_bytes
    if group.num_domains > 1:
        reach = min(group.num_domains, routing.max_domains or group.num_domains)
        return sent * distinct(reach, routing.topk)
    return sent * distinct(group.per_domain, routing.topk)
