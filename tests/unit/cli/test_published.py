"""`ridgeline validate` on a published file: scores by source, what was set aside, and what changed since."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

HEADER = (
    "source,collective,device,num_devices,nodes,devices_per_node,intra_link,inter_link,dtype,message_bytes,algo,time_us,"
    "algbw_GBps,busbw_GBps,software,provenance,notes"
)
ROWS = (
    "lab,all_reduce,H100-SXM-80GB,8,1,8,NVLink4,,fp16,33554432,,200,,,nccl-tests,read,",
    "lab,all_reduce,100GbE TCP,16,2,8,,,fp16,33554432,,200,,,nccl-tests,read,",
)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path / "home"))
    path = tmp_path / "collectives.csv"
    path.write_text("\n".join([HEADER, *ROWS]) + "\n")
    return path


def test_a_published_file_is_judged_by_source(file: Path, ridgeline) -> None:
    ran = ridgeline("validate", str(file))
    assert ran.code == 0 and "lab" in ran.out and "no device is named" in ran.out


def test_json_has_scores_rows_and_what_was_not_used(file: Path, ridgeline) -> None:
    found = json.loads(ridgeline("validate", str(file), "--json").out)
    assert set(found["all"]) == {"n", "mape", "median_ape", "bias", "coverage"}
    assert found["by"]["lab"]["n"] == 1 and found["unused"][0]["row"] == 3
    assert "against" not in found
    again = json.loads(ridgeline("validate", str(file), "--json").out)
    assert again["against"]["changed"] == []


def test_results_are_kept_unless_told_not_to(file: Path, ridgeline) -> None:
    kept = file.parent / "home" / "validations" / "collectives.csv.jsonl"
    ridgeline("validate", str(file), "--no-store")
    assert not kept.exists()
    ridgeline("validate", str(file))
    assert len(kept.read_text().splitlines()) == 1
    record = json.loads(kept.read_text())
    record["rows"] = {key: [pair[0], 2 * pair[1]] for key, pair in record["rows"].items()}
    kept.write_text(json.dumps(record) + "\n")
    ran = ridgeline("validate", str(file), "--against", "last")
    assert "1 rows better, 0 worse" in ran.out and "Changed" in ran.out


def test_an_unknown_date_is_named(file: Path, ridgeline) -> None:
    ran = ridgeline("validate", str(file), "--against", "1999")
    assert ran.code == 2 and "no kept validation" in ran.err


def test_several_files_give_a_line_each_and_name_what_is_no_file_of_results(file: Path, ridgeline) -> None:
    other, junk = file.with_name("again.csv"), file.with_name("junk.csv")
    other.write_text(file.read_text())
    junk.write_text("a,b\n1,2\n")
    both = ridgeline("validate", str(file), str(other))
    assert both.code == 0 and "collectives.csv" in both.out and "again.csv" in both.out
    ran = ridgeline("validate", str(file), str(junk))
    assert ran.code == 1 and "has no column 'kind'" in " ".join(ran.out.split())
    found = json.loads(ridgeline("validate", str(file), str(junk), "--json").out)
    assert found["files"][str(file)]["all"]["n"] == 1 and str(junk) in found["refused"]
    refused = ridgeline("validate", str(file), str(other), "--against", "last")
    assert refused.code == 2 and "name one" in refused.err
