"""The store, by one suite for SQLite and Postgres."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ridgeline.errors import InputError
from ridgeline.store import transfer
from ridgeline.store.database import Postgres, StoreError, shown, url_of
from ridgeline.store.record import Metric, Record, artifact, metrics_of
from ridgeline.store.schema import VERSION
from ridgeline.store.store import Store, pack, unpack


def record(step_s: float = 0.01, *, measured: bool = False, at: str = "2026-01-01T00:00:00", **more: object) -> Record:
    fields = {
        "kind": "profile" if measured else "predict", "subject": "llama", "device": "h200", "measured": measured,
        "settings": {"batch": 8, "execution": "eager"}, "at": at, "git": "abc", "environment": {"python": "3.11"},
        "metrics": (Metric(name="step_s", value=step_s, low=step_s * 0.9, high=step_s * 1.1, basis="fitted"),),
        "document": {"step_s": step_s, "notes": ["é"]},
    }  # fmt: skip
    return Record(**{**fields, **more})


def test_a_run_comes_back_as_it_was_kept(url):
    with Store(url) as store:
        made = record()
        assert store.add(made)
        assert not store.add(made), "the same run twice is one run"
        (found,) = store.runs(subject="llama")
        assert (found.id, found.thing, found.metrics, found.settings) == (
            made.id, made.thing, made.metrics, made.settings)  # fmt: skip
        assert store.document(found.id) == made.document
        assert store.run(made.id[:8]).id == made.id


def test_a_measurement_of_the_same_thing_is_found_and_the_newest_counts(url):
    with Store(url) as store:
        store.add(record(0.02, measured=True, at="2026-01-01T00:00:00"))
        store.add(record(0.03, measured=True, at="2026-01-02T00:00:00"))
        store.add(record(0.5, measured=True, settings={"batch": 9}))
        run, metric = store.measurement(record().thing, "step_s")
        assert (metric.value, run.at[:10]) == (0.03, "2026-01-02")
        assert store.measurement(record().thing, "energy_j") is None


def test_tags_move_and_name_runs(url):
    with Store(url) as store:
        first, second = record(0.1), record(0.2)
        store.add(first)
        store.add(second)
        store.tag("main", first.id)
        store.tag("main", second.id)
        assert store.run("main").id == second.id
        with pytest.raises(StoreError, match="no run 'zebra'"):
            store.run("zebra")


def test_chunks_are_kept_once_and_read_in_order(url):
    with Store(url) as store:
        study = store.add_study("sweep", {"axes": [1]}, "v1", ["x", "why"], num_chunks=2, num_points=5)
        assert store.add_study("sweep", {"axes": [1]}, "v1", ["x", "why"], num_chunks=2, num_points=5).id == study.id
        assert store.add_study("sweep", {"axes": [1]}, "v2", ["x"], num_chunks=2, num_points=5).id != study.id
        assert store.add_chunk(study.id, 1, {"x": np.array([3.0, 4.0]), "why": np.array(["", "no memory"])})
        assert store.add_chunk(study.id, 0, {"x": np.array([0.0, 1.0, 2.0]), "why": np.array(["", "", ""])})
        assert not store.add_chunk(study.id, 0, {"x": np.array([9.0]), "why": np.array([""])})
        table = store.table(study.id)
        assert table["x"].tolist() == [0, 1, 2, 3, 4]
        assert table["why"].tolist() == ["", "", "", "", "no memory"]
        with pytest.raises(StoreError, match=r"no study 'sweeep'.*did you mean 'sweep'"):
            store.study("sweeep")


def test_an_exception_inside_a_transaction_takes_everything_back(url):
    with Store(url) as store:

        def fail_after_adding() -> None:
            with store.database.transaction():
                store.add(record())
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail_after_adding()
        assert store.counts()["run"] == 0
        assert store.add(record())


def test_a_former_schema_is_migrated_with_its_rows(url):
    with Store(url, migrate=False) as store:
        store.database.migrate(to=1)
        assert store.add(record())
        with pytest.raises(StoreError, match="run `ridgeline store migrate`"):
            Store(url)
        assert store.database.migrate() == (1, VERSION)
        assert store.database.migrate() == (VERSION, VERSION)
    with Store(url) as store:
        assert store.runs()[0].id == record().id
        assert store.counts()["study"] == 0


def test_a_newer_schema_is_refused_and_not_touched(url):
    with Store(url) as store:
        store.add(record())
        store.database.execute("INSERT INTO schema_version (version) VALUES (?)", (VERSION + 1,))
    for migrate in (True, False):
        with pytest.raises(StoreError, match=f"has schema {VERSION + 1}.*update ridgeline") as caught:
            with Store(url, migrate=migrate) as store:
                store.database.migrate()
        assert "\n" not in str(caught.value)
        assert "s3cret" not in str(caught.value)


WRITER = """
import sys, numpy as np
from ridgeline.store.store import Store
with Store(sys.argv[1]) as store:
    study = store.add_study("four", {}, "v", ["x"], num_chunks=40, num_points=400)
    for number in range(int(sys.argv[2]), 40, 2):  # two writers for every chunk
        store.add_chunk(study.id, number, {"x": np.arange(10.0) + 10 * number})
"""


def test_four_processes_write_at_once_and_nothing_is_lost_or_doubled(url):
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, url, str(n % 2)]) for n in range(4)]
    assert [writer.wait(timeout=1800) for writer in writers] == [0, 0, 0, 0]
    with Store(url) as store:
        (study,) = store.studies()
        assert store.table(study.id)["x"].tolist() == list(range(400))
        assert store.check() == []


def test_what_is_exported_is_imported_elsewhere_with_equal_content(url, tmp_path):
    with Store(url) as store:
        store.add(record())
        store.tag("main", record().id)
        study = store.add_study("sweep", {"a": 1}, "v", ["x"], num_chunks=1, num_points=2)
        store.add_chunk(study.id, 0, {"x": np.array([1.5, np.nan])})
        store.set_state(study.id, "done")
        transfer.export_lines(store, tmp_path / "all.jsonl")
    with Store(tmp_path / "other.db") as other:
        assert transfer.import_lines(other, tmp_path / "all.jsonl", record) == (2, 0)
        assert transfer.import_lines(other, tmp_path / "all.jsonl", record) == (0, 2)
        assert other.run("main").id == record().id
        assert other.studies()[0].state == "done"
        np.testing.assert_array_equal(other.table(study.id)["x"], [1.5, np.nan])


def test_a_broken_line_imports_nothing(url, tmp_path):
    path = tmp_path / "broken.jsonl"
    with Store(url) as store:
        store.add(record())
        transfer.export_lines(store, path)
    line = json.loads(path.read_text().splitlines()[0])
    line["run"]["subject"] = "forged"
    path.write_text(path.read_text() + json.dumps(line))
    with Store(tmp_path / "other.db") as other:
        with pytest.raises(InputError, match=r"line 2.*does not have its id.*nothing was imported"):
            transfer.import_lines(other, path, record)
        assert other.counts()["run"] == 0


def test_unused_rows_are_collected_and_the_used_are_not(url):
    with Store(url) as store:
        store.add(record())
        study = store.add_study("gone", {}, "v", ["x"], num_chunks=1, num_points=1)
        store.add_chunk(study.id, 0, {"x": np.array([1.0])})
        store.remove_study(study.id)
        store.database.execute("INSERT INTO document (hash, body) VALUES (?, ?)", ("f" * 32, b"x"))
        assert store.collect()["document"] == 1
        assert store.document(record().id) == record().document


def test_check_tells_damaged_chunks_and_lost_traces(url, tmp_path):
    trace = tmp_path / "trace.json"
    trace.write_text("{}")
    with Store(url) as store:
        store.add(record(artifacts=(artifact("trace", trace),)))
        study = store.add_study("s", {}, "v", ["x"], num_chunks=1, num_points=1)
        store.add_chunk(study.id, 0, {"x": np.array([1.0])})
        assert store.check() == []
        store.database.execute("UPDATE chunk SET body = ?", (b"damaged",))
        trace.unlink()
        wrong = " ".join(store.check())
        assert "does not have its hash" in wrong
        assert "is gone" in wrong


def test_csv_defuses_what_a_spreadsheet_would_compute(url, tmp_path):
    with Store(url) as store:
        store.add(record(subject="=HYPERLINK(1)"))
        transfer.export_tables(store, tmp_path, "csv")
    with (tmp_path / "runs.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert row["subject"] == "'=HYPERLINK(1)"
    assert transfer.defused("-x") == "'-x"
    assert transfer.defused("x=1") == "x=1"


def test_parquet_has_every_metric(url, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    with Store(url) as store:
        store.add(record())
        transfer.export_tables(store, tmp_path, "parquet")
    assert parquet.read_table(tmp_path / "metrics.parquet").to_pylist()[0]["value"] == 0.01


def test_a_database_that_is_down_is_one_line_without_the_password(monkeypatch):
    pytest.importorskip("psycopg")
    monkeypatch.setattr("ridgeline.store.database.time.sleep", lambda seconds: None)
    for address in ("postgresql://me:hunter2@127.0.0.1:9/db", "postgresql://me@127.0.0.1:9/db?password=hunter2"):
        with pytest.raises(StoreError, match="cannot reach the store") as caught:
            Postgres(address)
        assert "hunter2" not in str(caught.value)
        assert "\n" not in str(caught.value)
        assert caught.value.__cause__ is None
    assert shown("postgresql://me:hunter2@h/db") == "postgresql://me@h/db"


def test_a_wrong_password_is_not_shown(postgres):
    with pytest.raises(StoreError) as caught:
        Postgres(postgres.replace("s3cret-word", "wr0ng-word"))
    assert "wr0ng-word" not in str(caught.value)


def test_a_file_that_is_no_database_is_one_line(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("these are notes and no database " * 100)
    with pytest.raises(StoreError, match="not a database; name another file"):
        Store(path)
    with pytest.raises(StoreError, match="no store of the kind 'mysql'"):
        Store("mysql://host/db")


def test_the_default_lies_where_the_platform_keeps_user_data(monkeypatch, tmp_path):
    monkeypatch.delenv("RIDGELINE_STORE", raising=False)
    monkeypatch.delenv("RIDGELINE_HOME", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert url_of() == str(tmp_path / "ridgeline" / "store.db")
    monkeypatch.setenv("RIDGELINE_STORE", "elsewhere.db")
    assert (url_of(), url_of("given.db")) == ("elsewhere.db", "given.db")
    assert Path(url_of("default")).name == "store.db"


@pytest.mark.parametrize(
    "values",
    [
        np.arange(1000) % 7 * 0.1, np.array([np.nan, np.inf, -np.inf, 0.0] * 100), np.arange(5, dtype=np.int64),
        np.array([], dtype=float), np.array(["a", "", "é"] * 200), np.array([True, False] * 300),
    ],
)  # fmt: skip
def test_columns_are_packed_without_loss(values):
    found = unpack(pack({"x": values, "y": values}), ["x"])
    assert list(found) == ["x"]
    np.testing.assert_array_equal(found["x"], values)


def test_metrics_of_a_document_are_its_numbers_with_their_intervals():
    made = {m.name: m for m in metrics_of({
        "expected_s": 2.0, "interval_s": [1.0, 3.0], "basis": "fitted", "fits": True, "name": "x", "bad": float("nan"),
        "ttft_s": {"mean": 0.2, "low": 0.1, "high": 0.3, "p50": 0.19}, "usd": 1, "intervals": {"usd": [0.5, 2.0]},
    })}  # fmt: skip
    assert set(made) == {"step_s", "ttft_s.mean", "ttft_s.p50", "usd"}
    assert (made["step_s"].low, made["ttft_s.mean"].high, made["usd"].high) == (1.0, 0.3, 2.0)
