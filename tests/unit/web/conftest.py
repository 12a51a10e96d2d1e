"""A store with what a dashboard shows, and names that try to be markup."""

from __future__ import annotations

import os
import shutil

import pytest

from ridgeline.store.record import Metric, Record
from ridgeline.store.store import Store
from ridgeline.study.run import Spec, run
from ridgeline.study.space import Space

HOSTILE = "</script><img src=x onerror=alert(1)>'\"&\u2028"


@pytest.fixture(scope="session")
def chromium() -> str:
    """Debian's browser, with playwright to drive it."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        found = None
    if found is None:
        if os.environ.get("RIDGELINE_REQUIRE_SERVICES") == "1":
            pytest.fail("RIDGELINE_REQUIRE_SERVICES=1, and there is no chromium with playwright here")
        pytest.skip("no chromium with playwright here")
    return found


@pytest.fixture(scope="session")
def kept(tmp_path_factory) -> str:
    """A file with runs of several kinds, a finished study and one that is under way."""
    url = str(tmp_path_factory.mktemp("dash") / "runs.db")
    with Store(url) as store:
        for day in range(1, 13):
            value = 0.008 * (1 + 0.002 * (day % 3)) * (1.12 if day > 8 else 1)
            store.add(_record(at=f"2026-11-{day:02d}T10:00:00.000000+00:00", metrics=(
                Metric(name="step_s", value=value, low=0.007, high=0.01, basis="fitted"),),
                document={"step_s": value, "rows": [{"module": "mlp", "expected_s": value / 2}]}))  # fmt: skip
        store.add(_record(subject=HOSTILE, kind="predict", settings={"mode": HOSTILE}, document={HOSTILE: HOSTILE}))
        load = {"tokens_per_s_per_user": 50.0, "output_tokens_per_s_per_device": 900.0, "ttft_s": {"mean": 0.1},
                "tpot_s": {"mean": 0.02}, "usd_per_million_output": 0.4}  # fmt: skip
        one = {"title": "tp8", "precision": "fp8", "concurrency": 4, "keeps_slo": True, "found": load}
        two = {**one, "concurrency": 8, "found": {**load, "tokens_per_s_per_user": 30.0}, "keeps_slo": False}
        store.add(_record(kind="serve search", document={"candidates": [one, two], "frontier": [one], "best": one}))
        store.add(_record(kind="optimize", subject="model.py:f", measured=True, document={
            "model": HOSTILE, "device": "h200", "mode": "infer", "inputs": "x", "winner": "compiled", "eager_s": 2e-3,
            "final_s": 1e-3, "stock_s": None, "speedup": 2.0, "speedup_low": 1.9, "speedup_high": 2.1, "entries": [],
            "changes": [], "notes": []}))  # fmt: skip
        space = Space("llama3-8b", vary={"hbm_bandwidth": "1x..4x/0.25", "sms": "100..240/20"},
                      options={"mode": "decode"})  # fmt: skip
        spec = Spec(space, minimize=("usd_per_mtoken", "tpot"), subject_to=("tpot<0.0193",))
        run(spec, store, "chips")
        row = store.add_study(HOSTILE, spec.to_dict(), "other code", spec.columns(), num_chunks=2, num_points=208)
        for _, columns in list(store.chunks(store.study("chips").id))[:1]:
            columns["reason"] = columns["reason"].astype("U80")
            columns["reason"][:3] = ["=cmd()", HOSTILE, "not tpot<0.01"]
            store.add_chunk(row.id, 0, columns)
    return url


def _record(**given: object) -> Record:
    whole = {"kind": "predict", "subject": "llama3-8b", "device": "h200", "git": "abc", "environment": {},
             "settings": {"mode": "decode", "batch": 8}, "metrics": (Metric(name="step_s", value=0.01),),
             "document": {}, "at": "2026-11-18T10:00:00.000000+00:00"}  # fmt: skip
    return Record(**{**whole, **given})  # type: ignore[arg-type]
