"""``ridgeline clusters``: the hosts, racks and pods there are, and everything about one of them."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from ridgeline.cli import draw
from ridgeline.hardware import Cluster, cluster, systems
from ridgeline.sim.collectives import collective_s
from ridgeline.units import show_bytes, show_seconds


def show_clusters(name: str | None, as_json: bool) -> None:
    """All systems in a table, or every number of one cluster with its basis and source."""
    if as_json:
        found = [cluster(name)] if name else [cluster(each) for each in systems()]
        documents = [_document(each) for each in found]
        draw.print_json(documents[0] if name else documents)
    elif name:
        _show_one(cluster(name))
    else:
        _show_all()


def _document(found: Cluster) -> dict[str, Any]:
    numbers = {
        key: {"value": value, "basis": str(found.provenance(key).basis), "source": found.provenance(key).source}
        for key, value in found.numbers().items()
    }
    return {
        "name": found.name, "title": found.title, "system": found.system, "device": found.device.name,
        "num_devices": found.num_devices, "num_hosts": found.num_hosts, "domain_size": found.domain_size,
        "num_domains": found.num_domains, "torus_dims": list(found.torus_dims), "parent": found.parent,
        "scale_up": found.scale_up.kind, "topology": found.scale_up.topology, "scale_out": found.scale_out.kind,
        "price_usd_per_hour": found.price_usd_per_hour, "numbers": numbers,
    }  # fmt: skip


def _show_all() -> None:
    made = draw.table(
        "",
        ("system", "left"),
        ("device", "left"),
        ("host", "right"),
        ("domain", "right"),
        ("link", "left"),
        ("link", "right"),
        ("network", "right"),
    )
    for each in map(cluster, systems()):
        made.add_row(
            each.system, each.device.name, str(each.host.num_devices), str(each.scale_up.domain_size),
            each.scale_up.kind, _rate(each.scale_up.bandwidth_bytes_per_s), _rate(each.scale_out_bytes_per_s),
        )  # fmt: skip
    out = draw.console()
    out.print(made)
    out.print("devices in a host and in a scale-up domain; rates of one device in one direction", style=draw.DIM)
    out.print("'dgx-h100*128' is 128 hosts, 'h100-sxm*1024' as many devices in their usual host", style=draw.DIM)


def _show_one(found: Cluster) -> None:
    out = draw.console()
    shape = " × ".join(map(str, found.torus_dims))
    out.print(Text(f"{found.name}: {found.title}", style="bold"))
    out.print(
        f"{found.num_devices:,} × {found.device.name} in {found.num_hosts:,} hosts, {found.num_domains:,} scale-up"
        f" domains of {found.domain_size:,}{f' ({shape} torus)' if shape else ''}\n"
    )
    made = draw.table("", ("number", "left"), ("value", "right"), ("basis", "left"), ("source", "left"))
    made.columns[3].no_wrap = False
    for key, value in found.numbers().items():
        basis, source = found.provenance(key)
        made.add_row(key, _value(key, value), str(basis), source)
    out.print(made)
    if found.num_devices > 1:
        out.print()
        out.print(_collectives(found))


def _collectives(found: Cluster) -> Any:
    """What all-reduces of a few sizes take, inside a domain and over everything."""
    groups = [("a domain", found.group(found.domain_size))] if found.domain_size > 1 else []
    if found.num_domains > 1:
        groups.append(("all", found.group(found.num_devices)))
    made = draw.table(
        "All-reduce", ("bytes", "right"), ("over", "left"), ("time", "right"), ("90 %", "right"), ("by", "left")
    )
    for size in (1e4, 1e6, 1e8, 1e10):
        for over, group in groups:
            time = collective_s("all_reduce", size, group, found)
            span = f"{show_seconds(time.low_s)} – {show_seconds(time.high_s)}"
            made.add_row(show_bytes(size), over, show_seconds(time.expected_s), span, time.algorithm)
    return made


def _value(key: str, value: float) -> str:
    if key.endswith("bytes_per_s"):
        return _rate(value)
    if key.endswith("_s"):
        return show_seconds(value)
    return f"{value:g} W" if key.endswith("_w") else f"{value:g}"


def _rate(bytes_per_s: float) -> str:
    return f"{show_bytes(bytes_per_s)}/s"
