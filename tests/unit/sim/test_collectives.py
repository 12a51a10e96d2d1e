"""Collectives: the algorithm chosen, the loads it puts on links, and figures that were measured elsewhere."""

from __future__ import annotations

import pytest

from ridgeline.basis import Basis
from ridgeline.errors import InputError
from ridgeline.hardware import Group, cluster
from ridgeline.plan import Plan
from ridgeline.sim.collectives import algorithms, chunking_s, collective_s, torus_share
from ridgeline.sim.expert import Routing, distinct, exchange_s
from ridgeline.sim.pieces import exchange, groups_of

H100 = cluster("h100-sxm*1024")
NODE = H100.group(8)


def bus_bytes_per_s(num_bytes: float, num_ranks: int, seconds: float) -> float:
    return 2 * (num_ranks - 1) / num_ranks * num_bytes / seconds


def test_a_large_all_reduce_of_eight_hopper_gpus_runs_in_the_switch() -> None:
    found = collective_s("all_reduce", 2**33, NODE, H100)
    assert found.algorithm == "switch"
    assert bus_bytes_per_s(2**33, 8, found.expected_s) == pytest.approx(475e9, rel=0.03)  # 473 to 480 are published


def test_without_the_switch_it_is_a_ring_and_slower() -> None:
    found = collective_s("all_reduce", 2**33, NODE, H100, "ring")
    assert bus_bytes_per_s(2**33, 8, found.expected_s) == pytest.approx(366e9, rel=0.03)
    plain = cluster("h100-sxm*1024 nvls=0")
    assert collective_s("all_reduce", 2**33, plain.group(8), plain).expected_s == pytest.approx(found.expected_s)


def test_across_hosts_the_network_bounds_and_both_levels_carry_their_bytes() -> None:
    found = collective_s("all_reduce", 1e9, H100.group(1024), H100)
    assert found.scale_out_bytes == pytest.approx(2e9)  # a tree: up and down once
    assert found.expected_s > 2e9 / 400e9


def test_siblings_share_the_network_of_a_host() -> None:
    shared = collective_s("all_gather", 1e9, H100.group(128, stride=8), H100)
    alone = collective_s("all_gather", 1e9, H100.group(128, stride=8, alone=True), H100)
    assert shared.expected_s == pytest.approx(alone.expected_s)  # one NIC for each GPU: nobody is in the way
    four = cluster("h100-sxm*1024 nics=4")
    busy, idle = (collective_s("all_gather", 1e9, four.group(128, stride=8, alone=a), four) for a in (False, True))
    assert busy.expected_s > 1.8 * idle.expected_s


def test_a_tapered_tree_costs_its_taper() -> None:
    tapered = cluster("h100-sxm*1024 oversubscription=2")
    full = collective_s("all_to_all", 1e9, H100.group(1024), H100).expected_s
    assert collective_s("all_to_all", 1e9, tapered.group(1024), tapered).expected_s > 1.8 * full


def test_in_network_reduction_halves_what_the_network_carries() -> None:
    sharp = cluster("h100-sxm*1024 sharp=1")
    found = collective_s("all_reduce", 1e9, sharp.group(1024), sharp, "sharp")
    assert found.scale_out_bytes == pytest.approx(1e9)


def test_a_hierarchical_all_reduce_is_taken_only_when_named() -> None:
    group = H100.group(64)
    by_hand = collective_s("all_reduce", 1e9, group, H100, "hierarchical")
    assert by_hand.scale_out_bytes == pytest.approx(2 * 7 / 8 * 1e9)  # reduce-scatter inside, rails across, gather
    assert collective_s("all_reduce", 1e9, group, H100).algorithm in ("ring", "tree", "switch_tree")


def test_large_messages_between_many_racks_take_a_ring_and_small_ones_do_not() -> None:
    many, two = cluster("gb200*1440"), cluster("gb200*144")
    large = collective_s("all_reduce", float(1 << 29), many.group(1440), many)
    assert large.algorithm == "ring"
    assert large.expected_s == pytest.approx(7.11e-3, rel=0.08)
    assert collective_s("all_reduce", 4096.0, many.group(1440), many).algorithm != "ring"
    assert collective_s("all_reduce", float(1 << 30), two.group(144), two).algorithm != "ring"
    assert collective_s("all_reduce", float(1 << 29), many.group(1440), many, "hierarchical").expected_s > 0.0


def test_small_messages_cost_latency_that_grows_with_ranks() -> None:
    times = [collective_s("all_reduce", 1024, H100.group(n), H100, "ring").expected_s for n in (2, 4, 8)]
    assert times[0] < times[1] < times[2] < 20e-6


def test_a_torus_uses_the_axes_a_group_covers() -> None:
    pod = cluster("tpu-v5p*4096")
    assert torus_share(pod, 16) == pytest.approx(1 / 3)
    assert torus_share(pod, 4096) == 1.0
    assert torus_share(pod, 8) == pytest.approx(1 / 6)  # half an axis has no wrap-around


def test_a_mesh_leaves_the_links_of_absent_peers_idle() -> None:
    host = cluster("mi300x*8")
    pair, all_of_them = (collective_s("all_gather", 1e9, host.group(n), host) for n in (2, 8))
    assert pair.expected_s > 3 * all_of_them.expected_s


def test_a_technology_without_coefficients_borrows_and_says_so() -> None:
    odd = cluster("h100-sxm*8 scale_up_kind=photons")
    found = collective_s("all_reduce", 1e8, odd.group(8), odd)
    assert found.basis is Basis.ASSUMED
    known = collective_s("all_reduce", 1e8, H100.group(8), H100)
    assert found.high_s / found.low_s > known.high_s / known.low_s


def test_mistakes_are_named() -> None:
    with pytest.raises(InputError, match="did you mean 'all_reduce'"):
        collective_s("al_reduce", 1.0, NODE, H100)
    with pytest.raises(InputError, match="cannot run as 'torus'"):
        collective_s("all_reduce", 1.0, NODE, H100, "torus")
    with pytest.raises(InputError, match="cannot have"):
        collective_s("all_reduce", -1.0, NODE, H100)
    without = cluster("h100-sxm*16 nics=0")
    with pytest.raises(InputError, match="no NIC"):
        collective_s("all_reduce", 1e6, without.group(16), without)


def test_chunks_cost_most_where_the_message_is_as_long_as_the_pipeline() -> None:
    assert chunking_s(1e-3, 1e-5, 1.0) == pytest.approx(2e-4)
    assert chunking_s(1.0, 1e-5, 1e-3) == pytest.approx(1e-2 + 1e-3)
    assert chunking_s(0.0, 1e-5, 1e-3) == 0.0


def test_algorithms_are_listed_by_where_ranks_sit() -> None:
    assert set(algorithms("all_reduce", NODE, H100)) == {"ring", "switch"}
    assert "tree" in algorithms("all_reduce", H100.group(16), H100)
    assert algorithms("all_reduce", H100.group(1), H100) == ("none",)


def test_tokens_travel_once_to_each_domain_when_forwarded() -> None:
    host = cluster("hgx-h800*8")
    routing = Routing(num_tokens=4096, hidden_bytes=7168.0, topk=8, max_domains=4)
    group = Group(num_ranks=64, per_host=8, per_domain=8)
    forwarded, direct = (exchange_s(routing, group, host, mode) for mode in ("throughput", "low_latency"))
    assert forwarded.scale_out_bytes < 0.5 * direct.scale_out_bytes
    assert forwarded.scale_up_bytes > direct.scale_up_bytes


def test_low_latency_dispatch_meets_the_published_times() -> None:
    """DeepEP dd758caf4518, docs/legacy.md: 128 tokens of 7168 fp8, top 8, on H800 with one 400 Gb/s NIC each."""
    host = cluster("hgx-h800*32")
    routing = Routing(num_tokens=128, hidden_bytes=7168 * (1 + 4 / 128), topk=8)
    for ranks, time_us in ((16, 118), (32, 155), (64, 173), (256, 194)):
        group = Group(num_ranks=ranks, per_host=8, per_domain=8)
        assert exchange_s(routing, group, host, "low_latency").expected_s == pytest.approx(time_us * 1e-6, rel=0.12)


def test_distinct_places_are_at_most_all_of_them() -> None:
    assert distinct(8, 1) == pytest.approx(1.0)
    assert 5.0 < distinct(8, 8) < 5.5
    assert distinct(4, 1000) == pytest.approx(4.0)


def test_a_ring_of_links_needs_more_than_two_chips_to_close() -> None:
    pod = cluster("tpu-v4-pod")
    assert len(pod.torus_dims) == 3
    assert torus_share(pod, 2) == pytest.approx(0.5 / 3)


def test_ranks_of_an_all_to_all_send_outside_what_their_domain_does_not_hold() -> None:
    found = collective_s("all_to_all", 1e9, H100.group(16), H100)
    assert found.scale_up_bytes == pytest.approx(7 / 16 * 1e9)
    assert found.scale_out_bytes == pytest.approx(8 * 8 / 16 * 1e9)


def test_a_broadcast_tree_feeds_two_where_a_ring_feeds_one() -> None:
    ring, tree = (collective_s("broadcast", 1e9, H100.group(16), H100, way) for way in ("ring", "tree"))
    assert (ring.scale_up_bytes, tree.scale_up_bytes) == (1e9, 2e9)
    assert (ring.scale_out_bytes, tree.scale_out_bytes) == (1e9, 2e9)


def test_the_interval_of_a_collective_is_as_wide_upward_as_downward() -> None:
    found = collective_s("all_reduce", 2**16, NODE, H100)
    assert found.low_s * found.high_s == pytest.approx(found.expected_s**2)


def test_a_ring_of_context_ranks_passes_its_pieces_on_one_time_less_than_ranks() -> None:
    groups = groups_of(H100, Plan(cp=4))
    seconds, _, _ = exchange("ring", 4e8, "cp", groups, H100)
    assert seconds == pytest.approx(3 * collective_s("send_recv", 1e8, groups["ring"], H100).expected_s)


def test_ranks_that_hold_the_same_experts_are_as_far_apart_as_experts_are_spread() -> None:
    wide = groups_of(H100, Plan(tp=2, etp=2, ep=4, dp=8))
    assert wide["edp"] == H100.group(2, stride=8)


def test_two_chips_along_an_axis_close_no_ring() -> None:
    """Eight chips lie two by two by two: their axes have one link where a ring would have two."""
    small = cluster("tpu-v4-pod").resized(8)
    assert small.torus_dims == (2, 2, 2)
    assert torus_share(small, 8) == pytest.approx(0.5)


def test_tokens_reach_each_domain_once_and_every_rank_with_an_expert_there() -> None:
    routing = Routing(num_tokens=100, hidden_bytes=10.0, topk=8, max_domains=2)
    found = exchange_s(routing, Group(num_ranks=32, per_host=8, per_domain=8), H100)
    hit = distinct(2, 8)
    assert found.scale_out_bytes == pytest.approx(1000 * hit * 3 / 4 * 8)
    assert found.scale_up_bytes == pytest.approx(1000 * hit * distinct(8, 8 / hit) * 7 / 8)
    straight = exchange_s(routing, Group(num_ranks=32, per_host=8, per_domain=8), H100, "low_latency")
    assert straight.scale_up_bytes == pytest.approx(8000 * 7 / 32)
    assert straight.scale_out_bytes == pytest.approx(8000 * 24 / 32 * 8)


def test_an_exchange_of_experts_takes_as_long_as_the_slower_of_its_links() -> None:
    group = Group(num_ranks=64, per_host=8, per_domain=8)
    routing = Routing(num_tokens=4096, hidden_bytes=7168.0, topk=8)
    plain = exchange_s(routing, group, H100)
    links = exchange_s(routing, group, cluster("h100-sxm*1024 scaleup=0.001x"))
    network = exchange_s(routing, group, cluster("h100-sxm*1024 scaleout=1e6x"))
    assert network.expected_s < plain.expected_s, "the network is the slower one"
    assert plain.expected_s < links.expected_s
    faster = exchange_s(routing, group, cluster("h100-sxm*1024 scaleup=2x"))
    assert faster.expected_s == pytest.approx(plain.expected_s), "links are not"
