"""What collectives reach of a link: few numbers for each technology, fitted and kept in ``data/collectives.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from ridgeline.basis import Basis
from ridgeline.errors import CalibrationError
from ridgeline.hardware import Cluster
from ridgeline.resources import data_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCoefficients:
    """A scale-up technology: what a call costs, and which share of the link each algorithm reaches."""

    call_s: float  # launch, first synchronization and completion of a collective kernel
    switch_call_s: float  # the same for a reduction inside the switch, whose steps do not grow with ranks
    wide_switch_frac: float  # in-switch reduction in a domain of several hosts
    ring_frac: float  # share of the nominal bandwidth in one direction
    switch_frac: float
    direct_frac: float  # all-to-all and sends
    direct_step_s: float  # of an all-to-all, for each doubling of the peers
    direct_call_s: float  # the same as call_s for large messages between pairs, which hand over buffers first
    eager_bytes_per_s: float  # small messages to one peer, flags and data in the same words: low latency, low rate
    p2p_frac: float
    copy_frac: float  # moving a rank's own part, as a share of the time the link would take for it
    pipeline_s: float  # cost of one chunk of a ring
    chunk_bytes: float  # the largest chunk, all channels together
    switch_pipeline_s: float
    direct_pipeline_s: float
    num_sms: int  # SMs that a bandwidth-bound collective occupies
    spread_frac: float  # standard deviation of ln(measured / expected)
    basis: Basis
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCoefficients:
    """A scale-out technology: which share of the NICs is reached (the latency of a hop is the cluster's)."""

    frac: float  # ring and tree
    direct_frac: float  # all-to-all
    p2p_frac: float
    pipeline_s: float
    chunk_bytes: float
    max_rails: int  # NICs of one scale-up domain that a ring or tree drives at once
    spread_frac: float
    basis: Basis
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """Both levels of one cluster."""

    link: LinkCoefficients
    network: NetworkCoefficients


def coefficients(cluster: Cluster) -> Coefficients:
    """The coefficients of the cluster's technologies; one without any takes those of the nearest, as assumed."""
    return _coefficients(cluster.scale_up.kind, cluster.scale_up.topology, cluster.scale_out.kind)


@cache
def _coefficients(link: str, topology: str, network: str) -> Coefficients:
    tables = _tables()
    return Coefficients(
        link=LinkCoefficients(**_entry(tables["links"], link, tables["like"].get(topology, "nvlink4"))),
        network=NetworkCoefficients(**_entry(tables["networks"], network, "infiniband")),
    )


def _entry(table: dict[str, dict[str, Any]], name: str, like: str) -> dict[str, Any]:
    if name in table:
        entry = dict(table[name])
        return {**entry, "basis": Basis.parse(entry["basis"])}
    found = dict(table[like])
    spread = max(0.25, 2 * found["spread_frac"])
    return {**found, "basis": Basis.ASSUMED, "spread_frac": spread, "source": f"as {like}: {name} has none"}


@cache
def _tables() -> dict[str, Any]:
    path = data_dir() / "collectives.json"
    try:
        tables: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{path.name}: cannot be read: {error}; reinstall the package") from error
    return tables
