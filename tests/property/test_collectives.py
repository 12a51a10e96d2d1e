"""Laws of collectives: bytes are conserved, more bytes never faster, more bandwidth never slower, one rank is free."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.hardware import Cluster, Group, cluster
from ridgeline.sim.collectives import KINDS, collective_s

NAMES = ("h100-sxm*1024", "gb200-nvl72*4", "l40s*32", "a100*64", "tpu-v5p*512", "mi300x*64", "p5*8", "v100*16")
clusters = st.sampled_from(NAMES).map(cluster)
kinds = st.sampled_from(KINDS)
sizes = st.floats(1.0, 1e11)


@st.composite
def places(draw: st.DrawFn) -> tuple[Cluster, Group]:
    found = draw(clusters)
    stride = draw(st.sampled_from([1, 2, 4, 8]))
    most = found.num_devices // stride
    num = draw(st.sampled_from([n for n in (2, 4, 8, 16, 64, 256) if n <= most]))
    return found, found.group(num, stride)


@given(places(), kinds, sizes, st.floats(1.0, 100.0))
def test_more_bytes_are_never_faster(place: tuple[Cluster, Group], kind: str, size: float, factor: float) -> None:
    found, group = place
    first = collective_s(kind, size, group, found)
    assert collective_s(kind, size * factor, group, found).expected_s >= first.expected_s * (1 - 1e-12)


@given(places(), kinds, sizes, st.floats(1.0, 10.0), st.sampled_from(["up", "out"]))
def test_more_bandwidth_is_never_slower(
    place: tuple[Cluster, Group], kind: str, size: float, factor: float, level: str
) -> None:
    found, group = place
    if level == "up":
        more = replace(found.scale_up, bandwidth_bytes_per_s=found.scale_up.bandwidth_bytes_per_s * factor)
        faster = replace(found, scale_up=more)
    else:
        rate = found.scale_out.nic_bandwidth_bytes_per_s * factor
        faster = replace(found, scale_out=replace(found.scale_out, nic_bandwidth_bytes_per_s=rate))
    before, after = (collective_s(kind, size, group, c).expected_s for c in (found, faster))
    assert after <= before * (1 + 1e-12)


@given(places(), kinds, sizes)
def test_the_interval_holds_the_expectation_and_nothing_beats_the_wire(
    place: tuple[Cluster, Group], kind: str, size: float
) -> None:
    found = collective_s(kind, size, place[1], place[0])
    assert found.floor_s <= found.low_s <= found.expected_s <= found.high_s
    assert found.num_sms >= 0 and found.expected_s > 0


@given(clusters, kinds, sizes)
def test_a_group_of_one_is_free(found: Cluster, kind: str, size: float) -> None:
    time = collective_s(kind, size, found.group(1), found)
    assert time.expected_s == time.scale_up_bytes == time.scale_out_bytes == 0


@given(st.sampled_from([2, 3, 4, 5, 6, 7, 8]), sizes)
def test_a_ring_conserves_bytes(num_ranks: int, size: float) -> None:
    """What all ranks send together is what all of them must receive: n−1 parts each to gather, twice that to reduce."""
    found = cluster("a100*8")
    gather = collective_s("all_gather", size, found.group(num_ranks), found)
    scatter = collective_s("reduce_scatter", size, found.group(num_ranks), found)
    reduce = collective_s("all_reduce", size, found.group(num_ranks), found)
    assert gather.scale_up_bytes * num_ranks == pytest.approx((num_ranks - 1) * size)
    assert reduce.scale_up_bytes == pytest.approx(gather.scale_up_bytes + scatter.scale_up_bytes)


@given(st.sampled_from([16, 64, 256, 1024]), sizes)
def test_an_all_to_all_sends_every_part_but_its_own(num_ranks: int, size: float) -> None:
    found = cluster("h100-sxm*1024")
    time = collective_s("all_to_all", size, found.group(num_ranks), found)
    sent = 8 * time.scale_up_bytes + time.scale_out_bytes  # of one host
    assert sent == pytest.approx(8 * (num_ranks - 1) / num_ranks * size)
