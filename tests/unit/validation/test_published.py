"""Published files: recognized by their header, every row judged or set aside with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ridgeline.errors import InputError
from ridgeline.validation import collectives
from ridgeline.validation.registry import PUBLISHED, check_published, published_kind
from ridgeline.validation.verdict import Judged, Row

HEADER = (
    "source,collective,device,num_devices,nodes,devices_per_node,intra_link,inter_link,dtype,message_bytes,algo,time_us,"
    "algbw_GBps,busbw_GBps,software,provenance,notes"
)
GOOD = "lab,all_reduce,H100-SXM-80GB,8,1,8,NVLink4,,fp16,33554432,,200,,,nccl-tests,read,"
SLOW = "lab,all_gather,H100-SXM-80GB,8,1,8,NVLink4,,fp16,33554432,,900,,,nccl-tests,read,"
BUS = "other,all_reduce,H200-SXM-141GB,8,1,8,NVLink4,,fp16,8589934592,NVLS,,,473.1,nccl-tests,read,"
UNKNOWN = "lab,all_reduce,100GbE TCP,16,2,8,,,fp16,33554432,,200,,,nccl-tests,read,"
NETWORK = "lab,all_reduce,H100-SXM-80GB,16,2,8,NVLink4,n/s,fp16,33554432,,200,,,nccl-tests,read,"
ODD = "lab,all_reduce,L40S,8,1,8,PCIe,,fp16,33554432,,200,,,nccl-tests,read,ANOMALOUS: exclude"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "collectives.csv"
    path.write_text("\n".join([HEADER, GOOD, SLOW, BUS, UNKNOWN, NETWORK, ODD]) + "\n")
    return path


def test_a_file_is_known_by_its_header(file: Path, tmp_path: Path) -> None:
    kind = published_kind(file)
    assert kind is not None and kind.name == "collectives"
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    assert published_kind(other) is None
    with pytest.raises(InputError, match="none of the published files"):
        check_published(other)


def test_headers_are_told_apart(shared_published: Path) -> None:
    for kind in PUBLISHED:
        found = published_kind(shared_published / f"{kind.name}.csv")
        assert found is kind


def test_every_row_is_judged_or_set_aside(file: Path) -> None:
    check = check_published(file)
    assert [row.row for row in check.rows] == [2, 3, 4]
    assert {row.row: row.why.split(" (")[0] for row in check.unused} == {
        5: "no device is named",
        6: "the network between the hosts is not stated",
        7: "the file marks this row as anomalous",
    }


def test_scores_are_by_source_and_the_worst_first(file: Path) -> None:
    check = check_published(file)
    found = check.to_dict()
    assert found["by"]["lab"]["n"] == 2 and found["by"]["other"]["mape"] < 0.03
    assert check.worst(1)[0].metric == "all_gather" and check.worst(1)[0].error < -0.8
    assert found["all"]["n"] == 3 and not found["rows"][1]["inside"]


def test_a_profiler_adds_waiting_but_for_the_smallest_messages_of_a_pair() -> None:
    def predicted(num: int, size: int) -> float:
        columns = dict(zip(HEADER.lower().split(","), GOOD.split(","), strict=True))
        columns |= {"num_devices": str(num), "devices_per_node": str(num), "message_bytes": str(size)}
        (verdict,) = collectives.judge([Row(2, columns | {"software": "torch profiler kernel time"})])
        assert isinstance(verdict, Judged)
        return verdict.predicted

    assert predicted(2, 2048) < 15e-6 and predicted(4, 2048) >= 40e-6 and predicted(2, 1_000_000) >= 40e-6


def test_numbers_of_a_row_are_numbers_or_nothing() -> None:
    row = Row(2, {"a": "1,024", "b": "n/s", "c": "nan"})
    assert (row.number("a"), row.number("b"), row.number("c"), row.number("d")) == (1024.0, None, None, None)


def test_published_collectives_hold(shared_published: Path) -> None:
    """The figure of the issue: a mean absolute error of at most 12 %."""
    check = check_published(shared_published / "collectives.csv")
    assert check.all is not None
    assert check.all.n >= 620 and check.all.mape < 0.08 and abs(check.all.bias) < 0.03
    assert 0.85 < check.all.coverage < 0.97


def test_verdicts_on_numpy_numbers_are_json():
    judged = Judged(
        row=1, key="k", source="s", what="w", metric="m", unit="s", measured=1.0, predicted=np.float64(1.1),
        low=np.float64(0.9), high=np.float64(1.3),
    )  # fmt: skip
    assert json.loads(json.dumps(judged.to_dict()))["inside"] is True
