"""Clusters by the words people type: devices, hosts, racks and pods, changed or not, and what is refused."""

from __future__ import annotations

import pytest

from ridgeline.basis import Basis
from ridgeline.errors import HardwareError
from ridgeline.hardware import Group, cluster, cluster_of, device, systems
from ridgeline.hardware.cluster import NUMBERS
from ridgeline.hardware.system import load_system


@pytest.mark.parametrize("name", systems())
def test_every_number_of_every_system_has_a_source(name: str) -> None:
    found = cluster(name)
    assert set(found.numbers()) == set(found.provenances) == set(NUMBERS)
    assert all(provenance.source for provenance in found.provenances.values())


@pytest.mark.parametrize(
    ("text", "devices", "hosts", "domains"),
    [
        ("h100-sxm*16384", 16384, 2048, 2048),
        ("dgx-h100*128", 1024, 128, 128),
        ("gb200-nvl72*8", 576, 144, 8),
        ("gb200*8", 8, 2, 1),
        ("tpu-v5p*4096", 4096, 1024, 1),
        ("l40s*8", 8, 1, 1),
        ("h200", 1, 1, 1),
        ("h200*4", 4, 1, 1),
        ("dgx-2", 16, 1, 1),
    ],
)
def test_devices_hosts_and_racks_are_counted_each_in_its_own_way(
    text: str, devices: int, hosts: int, domains: int
) -> None:
    found = cluster(text)
    assert (found.num_devices, found.num_hosts, found.num_domains) == (devices, hosts, domains)


def test_systems_the_issue_names_are_there() -> None:
    wanted = "dgx-a100 dgx-h100 hgx-h200 dgx-b200 gb200-nvl72 l40s-host dgx-1-v100 dgx-2 tpu-v5p-pod tpu-v6e-pod"
    assert {*wanted.split(), "mi300x-host"} <= set(systems())


def test_changes_go_to_the_cluster_or_to_its_device() -> None:
    found = cluster("h100-sxm*1024 scaleout=200Gb oversubscription=2 nvlink=2x hbm_bandwidth=2x")
    assert found.scale_out.nic_bandwidth_bytes_per_s == 25e9
    assert found.scale_out.oversubscription == 2
    assert found.scale_up.bandwidth_bytes_per_s == 900e9
    assert found.device.dram.bandwidth_bytes_per_s == 2 * device("h100-sxm").dram.bandwidth_bytes_per_s
    assert found.provenance("scale_out.oversubscription").basis is Basis.ASSUMED
    assert found.is_imagined and not cluster("h100-sxm*1024").is_imagined


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("h100-sxm*12", "take 8 or 16"),
        ("h101-sxm*8", "did you mean"),
        ("h100-sxm*8 scalout=400Gb", "did you mean 'scaleout'"),
        ("h100-sxm*0", "cannot be a count"),
        ("h100-sxm*8 fast", "write each change once"),
        ("h100-sxm*8 oversubscription=0.5", "1 or more"),
        ("h100-sxm*8 nvlink=900GB/s link=2x", "give it once"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_cure(text: str, complaint: str) -> None:
    with pytest.raises(HardwareError, match=complaint):
        cluster(text)


def test_a_device_without_a_file_sits_in_a_generic_host_and_says_so() -> None:
    found = cluster("mi325x*64")
    assert found.system == "generic" and found.num_hosts == 8
    assert found.basis is Basis.ASSUMED


def test_an_imagined_device_keeps_its_usual_host() -> None:
    found = cluster_of(device("h200 hbm_bandwidth=2x"), 64)
    assert found.system == "hgx-h200" and found.num_hosts == 8
    assert cluster(found.device).num_devices == 1


def test_groups_know_how_many_ranks_share_a_host() -> None:
    found = cluster("h100-sxm*16384")
    inside, across = found.group(8), found.group(128, stride=8)
    assert (inside.per_host, inside.num_domains, inside.num_sharing) == (8, 1, 1)
    assert (across.per_host, across.num_domains, across.num_sharing) == (1, 128, 8)
    assert found.group(128, stride=8, alone=True).num_sharing == 1
    assert found.group_of(range(0, 1024, 8)) == across
    assert found.group(16).num_hosts == 2


@pytest.mark.parametrize(("num_ranks", "stride"), [(5, 3), (4, 5), (9, 7), (2, 9), (6, 16), (9, 16), (3, 40), (1, 3)])
@pytest.mark.parametrize("name", ["h100-sxm*64", "gb200-nvl72*2"])
def test_a_stride_that_divides_no_host_counts_the_fullest_host_and_domain(name, num_ranks, stride) -> None:
    found = cluster(name)
    if (num_ranks - 1) * stride < found.num_devices:
        assert found.group(num_ranks, stride) == found.group_of(range(0, num_ranks * stride, stride))


def test_a_rack_is_one_domain_of_many_hosts() -> None:
    group = cluster("gb200-nvl72*2").group(144)
    assert (group.per_host, group.per_domain, group.num_domains, group.num_hosts) == (4, 72, 2, 36)


def test_a_group_larger_than_the_cluster_is_refused() -> None:
    with pytest.raises(HardwareError, match="it has 16"):
        cluster("h100-sxm*16").group(4, stride=8)


@pytest.mark.parametrize(
    ("text", "sides"), [("tpu-v5p*4096", (16, 16, 16)), ("tpu-v6e*256", (16, 16)), ("tpu-v5p*64", (4, 4, 4))]
)
def test_a_torus_is_as_cubic_as_it_can_be(text: str, sides: tuple[int, ...]) -> None:
    assert cluster(text).torus_dims == sides


def test_a_file_without_a_source_is_refused(tmp_path) -> None:
    path = tmp_path / "odd.toml"
    path.write_text('title = "x"\ndevice = "h200"\n[sources]\nrec = ["assumed", "x"]\n[host]\ndevices = 8\n')
    with pytest.raises(HardwareError, match=r"odd\.toml: host\.devices: a number needs its source"):
        load_system(path)


def test_a_group_that_does_not_fill_its_last_domain_still_spans_it() -> None:
    found = Group(num_ranks=12, per_host=4, per_domain=8)
    assert (found.num_domains, found.num_hosts) == (2, 3)
    assert Group(num_ranks=13, per_host=4, per_domain=8).num_hosts == 4


def test_a_device_has_its_share_of_all_the_network_cards_of_its_host() -> None:
    four = cluster("h100-sxm*16 nics=4")
    assert four.scale_out_bytes_per_s == 4 * four.scale_out.nic_bandwidth_bytes_per_s / 8
