"""What the dashboard answers: exact frontiers, exact what-ifs, and nothing to those who should not ask."""

from __future__ import annotations

import csv
import io
import json

import numpy as np
import pytest

import ridgeline as rl
from ridgeline.errors import InputError
from ridgeline.store.store import Store
from ridgeline.study.frontier import frontier
from ridgeline.study.run import opened
from ridgeline.web.dash import points
from ridgeline.web.dash.app import FILES, application, serve
from ridgeline.web.dash.guard import Guard
from ridgeline.web.report import asset

starlette = pytest.importorskip("starlette.testclient")
from tests.unit.web.conftest import HOSTILE

TOKEN = "a-token-of-some-length"


@pytest.fixture(scope="module")
def client(kept):
    return starlette.TestClient(application(kept), base_url="http://127.0.0.1:8750")


def columns_of(body: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    length = int.from_bytes(body[:4], "little")
    head, at, found = json.loads(body[4 : 4 + length]), 4 + length, {}
    for column in head["columns"]:
        kind = np.dtype("<" + column["type"])
        found[column["name"]] = np.frombuffer(body, kind, head["rows"], at)
        at += -(-head["rows"] * kind.itemsize // 8) * 8
    assert at == len(body)
    return head, found


class TestData:
    def test_history_has_the_levels_of_the_store(self, client):
        thing = next(t for t in client.get("/api/home").json()["things"] if t["runs"] == 12)
        found = client.get("/api/history", params={"kind": thing["kind"], "thing": thing["thing"]}).json()
        assert [level[:2] for level in found["levels"]] == [[0, 8], [8, 12]]
        assert found["regressed"] and found["change"] == pytest.approx(1.12, rel=0.01)

    def test_the_drawn_frontier_is_that_of_all_points(self, client, kept):
        with Store(kept) as store:
            study = opened(store, "chips")
        where = {"x": "tpot", "y": "usd_per_mtoken"}
        for sure in (False, True):
            body = client.get("/api/studies/chips/sample", params={**where, **({"sure": "1"} if sure else {})}).content
            head, columns = columns_of(body)
            best = columns["#"][(columns["#flags"] & 2) > 0]
            assert sorted(best) == sorted(study.frontier(sure))
            assert columns["#count"].sum() == head["points"] == len(study)

    def test_every_column_comes_with_the_same_points(self, client, kept):
        params = {"x": "sms", "y": "tpot", "every": "1"}
        head, columns = columns_of(client.get("/api/studies/chips/sample", params=params).content)
        with Store(kept) as store:
            table = store.table(store.study("chips").id)
        np.testing.assert_allclose(columns["step_s"], table["step_s"][columns["#"]].astype("f4"))
        words = next(c["words"] for c in head["columns"] if c["name"] == "reason")
        assert [words[int(code)] for code in columns["reason"]] == table["reason"][columns["#"]].tolist()

    def test_rows_are_filtered_and_sorted_over_all_points(self, client, kept):
        params = {"where": json.dumps({"sms": [120, 160], "tpot": [None, 0.02]}), "only": "all", "sort": "tpot_s",
                  "down": "1", "limit": 5}  # fmt: skip
        found = client.get("/api/studies/chips/rows", params=params).json()
        with Store(kept) as store:
            table = store.table(store.study("chips").id)
        match = np.flatnonzero((table["sms"] >= 120) & (table["sms"] <= 160) & (table["tpot_s"] <= 0.02))
        assert found["total"] == len(match) > 5
        assert [row[found["names"].index("tpot_s")] for row in found["rows"]] == sorted(
            table["tpot_s"][match], reverse=True)[:5]  # fmt: skip
        everything = client.get("/api/studies/chips/rows").json()["total"]
        client.get("/api/studies/chips/rows", params={"where": json.dumps({"sms": [120, 120]})})
        assert client.get("/api/studies/chips/rows").json()["total"] == everything  # a filter leaves nothing behind

    def test_csv_holds_the_chosen_points_and_no_formula(self, client):
        text = client.get(f"/api/studies/{self.running(client)}/points.csv", params={"only": "all"}).text
        lines = list(csv.reader(io.StringIO(text)))
        assert len(lines) > 100
        assert lines[1][-1] == "'=cmd()"
        assert lines[2][-1] == HOSTILE
        for line in lines[1:]:
            assert not any(cell[:1] in ("=", "+", "@") for cell in line)

    def running(self, client) -> str:
        return next(s["id"] for s in client.get("/api/studies").json() if s["name"] == HOSTILE)

    def test_a_study_that_grows_is_read_again(self, kept, tmp_path):
        with Store(str(tmp_path / "s.db")) as store, Store(kept) as other:
            whole, tables = opened(other, "chips"), points.Tables()
            row = store.add_study("s", whole.spec.to_dict(), "c", whole.row.columns, num_chunks=2, num_points=104)
            halves = [{n: v[:50] for n, v in whole.columns.items()}, {n: v[50:] for n, v in whole.columns.items()}]
            store.add_chunk(row.id, 0, halves[0])
            assert points.summary(store, tables, "s")["points"] == 50
            points.sample(store, tables, "s", "tpot", "usd_per_mtoken", sure=False, every=True)
            store.add_chunk(row.id, 1, halves[1])
            found = points.summary(store, tables, "s")
            assert (found["points"], found["state"]) == (len(whole), "running")
            body = points.sample(store, tables, "s", "tpot", "usd_per_mtoken", sure=False, every=True)
            assert columns_of(body)[1]["#count"].sum() == len(whole)

    def test_a_study_without_points_or_of_another_version_is_still_shown(self, kept, tmp_path):
        with Store(str(tmp_path / "s.db")) as store:
            store.add_study("empty", {}, "c", ("a", "reason"), num_chunks=1, num_points=9)
            found = points.summary(store, points.Tables(), "empty")
            assert (found["points"], found["readable"]) == (0, False)
            body = points.sample(store, points.Tables(), "empty", "a", "a", sure=False, every=True)
            assert columns_of(body)[0]["rows"] == 0

    def test_striking_out_what_a_few_beat_loses_no_row_of_the_frontier(self):
        rng = np.random.default_rng(0)
        costs = np.round(rng.lognormal(0, 1, (60_000, 2)), 2)
        costs[:50, 0] = np.inf
        kept = points._not_beaten_by_a_few(costs)
        assert len(kept) < 20_000
        assert kept[frontier(costs[kept])].tolist() == frontier(costs).tolist()

    def test_two_points_differ_op_by_op_as_why_says(self, client, kept):
        found = client.get("/api/compare", params={"a": "point:chips:0", "b": "point:chips:103"}).json()
        with Store(kept) as store:
            real = opened(store, "chips").why(0, 103)
        assert found["ops"][0] == real[0]
        assert {row[0] for row in found["settings"]} >= {"hbm_bandwidth", "sms"}

    def test_two_runs_differ_in_numbers_settings_and_documents(self, client):
        runs = client.get("/api/runs", params={"kind": "predict", "limit": 20}).json()
        a, b = [r["id"] for r in runs if r["subject"] == "llama3-8b"][:2]
        found = client.get("/api/compare", params={"a": f"run:{a}", "b": f"run:{b[:12]}"}).json()
        assert found["numbers"][0][0] == "step_s"
        assert [row[0] for row in found["rest"] if row[0].startswith("rows")] == ["rows[mlp].expected_s"]

    def test_serving_curves_and_receipts(self, client):
        run = client.get("/api/runs", params={"kind": "serve search"}).json()[0]["id"]
        curve = client.get(f"/api/runs/{run}").json()["curve"]
        assert [(one["user"], one["frontier"], one["keeps_slo"]) for one in curve] == [(50.0, True, True),
                                                                                      (30.0, False, False)]  # fmt: skip
        receipt = client.get("/api/runs", params={"kind": "optimize"}).json()[0]["id"]
        page = client.get(f"/reports/run/{receipt}")
        assert page.status_code == 200 and "<img" not in page.text
        assert client.get(f"/reports/run/{run}").status_code == 400

    def test_a_point_has_its_full_report(self, client, kept):
        page = client.get("/reports/point/chips/7")
        policy = page.headers["content-security-policy"]
        assert policy.startswith("sandbox allow-scripts;") and "'sha256-" in policy
        assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]
        with Store(kept) as store:
            step_s = opened(store, "chips").point(7)["step_s"]
        assert f'"expected_s":{step_s!r}'[:24] in page.text

    @pytest.mark.parametrize(
        ("path", "says"),
        [("/api/studies/chip", "chips"), ("/api/runs/zz", "no run"), ("/api/studies/chips/points/9999", "no point"),
         ("/api/studies/chips/sample?x=tpt&y=sms", "tpot"), ("/api/studies/chips/rows?where=[", "JSON"),
         ("/api/studies/chips/rows?where={%22sms%22:3}", "filter"), ("/api/history?kind=a&thing=b", "no run"),
         ("/api/what-if?model=llama3-8", "llama3-8b"), ("/api/what-if?x.hbm_bandwidth=1e9", "factor"),
         ("/api/what-if?on=/etc/passwd", "/etc/passwd"), ("/reports/point/chips/99999", "counted from 0"),
         ("/api/runs?limit=x", "cannot read"), ("/api/compare?a=point:chips:x&b=run:1", "point:STUDY:NUMBER")],
    )  # fmt: skip
    def test_a_mistake_is_one_line(self, client, path, says):
        answer = client.get(path)
        assert answer.status_code == 400
        assert says in answer.json()["error"]


class TestWhatIf:
    @pytest.mark.parametrize(
        "asked",
        [{"model": "llama3-70b", "mode": "train", "x.hbm_bandwidth": "2"},
         {"model": "llama3-8b", "mode": "decode", "batch": "4", "on": "mi300x", "execution": "cudagraph",
          "x.clock": "0.8", "x.l2_bandwidth": "1.5", "x.tdp": "0.9", "x.sms": "1.25"},
         {"model": "bert-base", "seq": "128", "x.peak": "2"}],
    )  # fmt: skip
    def test_the_page_says_what_predict_says(self, client, asked):
        found = client.get("/api/what-if", params=asked).json()
        options = {k: int(v) if v.isdigit() else v for k, v in asked.items()
                   if k not in ("model", "on", "execution") and not k.startswith("x.")}  # fmt: skip
        changes = [f"{'tensor.bf16' if k == 'x.peak' else k[2:]}={v}x" for k, v in asked.items() if k.startswith("x.")]
        on = " ".join([asked.get("on", "h200"), *changes])
        real = rl.predict(asked["model"], on, asked.get("execution", "eager"), **options)
        assert found["device"] == real.device.name
        after = found["after"]
        assert [after["step_s"], after["busy_s"], after["energy_j"], after["usd"]] == pytest.approx(
            [real.expected_s, real.busy_s, real.energy_j, real.usd], rel=1e-12)  # fmt: skip
        name = next(k[2:] for k in asked if k.startswith("x."))
        if len(changes) == 1:  # its own curve goes through one as the prediction without changes does
            assert found["curves"][name][8] == pytest.approx(found["before"]["step_s"], rel=1e-9)


class TestGuard:
    @pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8750", "", "10.0.0.5", "[2001:db8::1]"])
    def test_another_host_name_is_refused(self, client, host):
        assert client.get("/api/home", headers={"host": host}).status_code == 421

    @pytest.mark.parametrize("host", ["127.0.0.1:8750", "localhost:1", "[::1]:8750", "LOCALHOST"])
    def test_loopback_names_are_taken(self, client, host):
        assert client.get("/api/home", headers={"host": host}).status_code == 200

    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
    def test_nothing_writes(self, client, method):
        assert client.request(method, "/api/home").status_code == 405

    def test_another_site_cannot_ask(self, client):
        assert client.get("/api/home", headers={"sec-fetch-site": "cross-site"}).status_code == 403
        assert client.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200  # a link leads here
        assert client.get("/api/home", headers={"sec-fetch-site": "same-origin"}).status_code == 200

    @pytest.mark.parametrize("path", ["/", "/api/home", "/static/main.js", "/static/none", "/nowhere", "/api/runs/zz"])
    def test_every_answer_has_the_headers(self, client, path):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in headers

    def test_a_token_is_needed_and_leaves_the_address(self, kept):
        client = starlette.TestClient(application(kept, "0.0.0.0", TOKEN), base_url="http://10.1.2.3:8750")
        assert client.get("/api/home").status_code == 401
        assert client.get("/static/main.js").status_code == 401
        assert client.get("/?token=wrong-token-of-same-").status_code == 401
        assert client.get("/api/home", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
        first = client.get(f"/what-if?model=bert-base&token={TOKEN}", follow_redirects=False)
        assert first.status_code == 303 and first.headers["location"] == "/what-if?model=bert-base"
        cookie = first.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert client.get("/api/home").status_code == 200  # by the cookie
        away = client.get(f"//evil.example/?token={TOKEN}", follow_redirects=False, headers={"cookie": ""})
        assert not away.headers.get("location", "/").startswith("//")

    def test_names_of_others_are_refused_on_other_hosts_too(self):
        guard = Guard(None, "0.0.0.0", TOKEN)
        assert guard.knows("10.1.2.3:8750") and guard.knows("localhost:8750")
        assert not guard.knows("evil.example")
        assert Guard(None, "lab.example", TOKEN).knows("lab.example:8750")

    def test_another_host_without_a_token_is_refused(self, kept):
        with pytest.raises(InputError, match="--token"):
            application(kept, "0.0.0.0")
        with pytest.raises(InputError, match="16 letters"):
            application(kept, "0.0.0.0", "short")
        with pytest.raises(InputError, match="cannot listen"):
            serve(kept, "203.0.113.1", 0, TOKEN, print)


def test_no_asset_reads_markup_or_asks_elsewhere():
    own = [name for name in FILES.values() if name.startswith("dash/") and name.endswith(".js")]
    text = "".join(asset(name) for name in [*own, "dash/index.html"])
    for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "new Function", "http://"):
        assert word not in text.replace("http://www.w3.org/", "")
    assert "<script>" not in text and "onclick=" not in asset("dash/index.html")


def test_the_vendored_library_carries_its_license():
    assert "MIT" in asset("vendor/uPlot.LICENSE")
    assert asset("vendor/uPlot.iife.min.js").startswith("/*! https://github.com/leeoniya/uPlot")


def test_bytes_of_columns_start_at_multiples_of_eight():
    body = points.packed({"rows": 3}, {"a": (np.arange(3, dtype="<f4"), None), "b": (np.arange(3, dtype="u1"), ["x"])})
    head, found = columns_of(body)
    assert found["a"].tolist() == [0, 1, 2] and found["b"].tolist() == [0, 1, 2]
    assert head["columns"][1]["words"] == ["x"]


def test_only_the_last_tables_stay(kept):
    tables = points.Tables(keep=1)
    with Store(kept) as store:
        for row in store.studies():
            points.summary(store, tables, row.id)
    assert len(tables.kept) == 1
