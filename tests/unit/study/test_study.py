"""Studies from end to end: tables, reasons, kills, workers, what changed."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ridgeline as rl
from ridgeline.errors import InputError
from ridgeline.store.store import Store
from ridgeline.study import workers as places
from ridgeline.study.frontier import hypervolume
from ridgeline.study.run import Spec, evaluate_chunk, infeasible, opened, run


def space(**vary):
    return rl.Space("llama3-8b", on="h200", execution="cudagraph", options={"mode": "decode"},
                    vary=vary or {"hbm_bandwidth": "1x..4x:7", "sms": "100..140/20", "batch": "1,4,16"})  # fmt: skip


def test_a_study_says_of_every_point_what_predict_says():
    found = rl.study(space(), minimize=("tpot", "usd_per_mtoken"), keep="area_mm2")
    assert len(found) == 63
    for number in (0, 17, 62):
        point = found.point(number)
        alone = rl.predict("llama3-8b", on=f"h200 hbm_bandwidth={point['hbm_bandwidth']!r}x sms={point['sms']:.0f}",
                           execution="cudagraph", mode="decode", batch=int(point["batch"]))  # fmt: skip
        assert point["step_s"] == pytest.approx(alone.expected_s, rel=1e-9)
        assert (point["step_s.low"], point["step_s.high"]) == pytest.approx(alone.interval_s, rel=1e-9)
        assert point["energy_j"] == pytest.approx(alone.energy_j, rel=1e-9)
        price = rl.price(f"h200 hbm_bandwidth={point['hbm_bandwidth']!r}x sms={point['sms']:.0f}")
        assert point["area_mm2"] == pytest.approx(price["area_mm2"].value)
        dollars = price["usd_per_hour"].value / 3600 * alone.expected_s / point["batch"] * 1e6
        assert point["usd_per_mtoken"] == pytest.approx(dollars, rel=1e-9)


def test_infeasible_points_are_kept_with_their_reason():
    found = rl.study(space(memory="20GB,141GB", batch="1,256", idle="50,5000"), minimize="tpot",
                     subject_to=("fits and tpot<30ms", "batch>0"))  # fmt: skip
    assert len(found) == 8
    assert found.outcomes["not fits"] == 1
    assert sum(count for reason, count in found.outcomes.items() if "idle power" in reason) == 4
    assert np.isnan(found.columns["step_s"][np.char.find(found.columns["reason"], "idle") >= 0]).all()
    assert set(found.frontier()) <= set(found.feasible)


def test_no_feasible_point_is_one_line_that_says_how_near_they_came():
    found = rl.study(space(), minimize="tpot", subject_to="tpot<1us")
    assert len(found.feasible) == 0
    said = infeasible(found)
    assert "all 63 points are infeasible: 63: not tpot<1us (tpot_s from" in said
    assert "\n" not in said


def test_an_option_that_cannot_be_is_a_reason_and_not_an_end():
    found = rl.study(space(batch="1,2", precision="bf16,fp3"), minimize="tpot")
    assert sum(count for reason, count in found.outcomes.items() if "no precision 'fp3'" in reason) == 2
    assert len(found.feasible) == 2


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"minimize": "tpo"}, "predict gives no 'tpo'.*did you mean 'tpot'"), ({"sampler": "grids"}, "no sampler"),
        ({"budget": 5, "sampler": "grid"}, "63 points, more than the budget of 5"), ({"budget": 0}, "one or more"),
        ({"sampler": "nsga2"}, "needs an objective"), ({"ray": "10.0.0.5:6379"}, "no token is set"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(more, said, monkeypatch):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(InputError, match=said) as caught:
        rl.study(space(), **more)
    assert "\n" not in str(caught.value)


def test_a_spec_that_changed_is_refused_and_nothing_is_lost(tmp_path):
    rl.study(space(batch="1,2"), minimize="tpot", store=tmp_path / "s.db", name="a")
    with pytest.raises(InputError, match=r"another spec .*batch: 1,2 → 1,4.*nothing was changed"):
        rl.study(space(batch="1,4"), minimize="tpot", store=tmp_path / "s.db", name="a")
    with Store(tmp_path / "s.db") as store:
        assert opened(store, "a").columns["batch"].tolist() == [1, 2]


def test_points_of_two_versions_of_the_models_never_mix(tmp_path, monkeypatch):
    monkeypatch.setattr("ridgeline.study.run.code_version", lambda: "older")
    spec = Spec(space(), minimize=("tpot",))
    with Store(tmp_path / "s.db") as store:
        row = store.add_study("a", spec.to_dict(), "older", spec.columns(), num_chunks=1, num_points=63)
        monkeypatch.setattr("ridgeline.study.run.code_version", lambda: "newer")
        with pytest.raises(InputError, match="other model code"):
            run(spec, store, "a", resume=True)
        store.set_state(row.id, "done")
        assert len(run(spec, store, "a")) == 63
        assert len(store.studies("a")) == 2


@pytest.mark.parametrize("sampler", ["random", "sobol", "nsga2", "optuna"])
def test_a_sampler_gives_the_same_points_again(sampler):
    if sampler == "optuna":
        pytest.importorskip("optuna")
    made = [rl.study(space(), minimize=("tpot", "area"), sampler=sampler, budget=32, seed=5) for _ in range(2)]
    for name, values in made[0].columns.items():
        np.testing.assert_array_equal(values, made[1].columns[name])
    other = rl.study(space(), minimize=("tpot", "area"), sampler=sampler, budget=32, seed=6)
    assert any((values != other.columns[name]).any() for name, values in made[0].columns.items() if name != "reason")


def test_processes_give_the_table_that_one_process_gives(tmp_path):
    spec = Spec(space(l2="1x..3x:9", hbm_bandwidth="1x..4x:9", batch="1,2,4,8"), minimize=("tpot",))
    assert spec.num_chunks > 1
    with Store(":memory:") as store:
        one, two = run(spec, store, "one"), run(spec, store, "two", workers=2)
    for name, values in one.columns.items():
        np.testing.assert_array_equal(values, two.columns[name])


KILLED = """
import sys, os, signal
import ridgeline as rl
from ridgeline.store.store import Store
from ridgeline.study.run import Spec, run
from tests_spec import spec
left = [int(sys.argv[2])]
class Killing(Store):
    def add_chunk(self, *given):
        if not left[0]:
            self.database.execute("BEGIN IMMEDIATE")  # in the middle of a transaction
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return super().add_chunk(*given)
with Killing(sys.argv[1]) as store:
    run(spec(sys.argv[3]), store, "k", resume=True)
"""
SPEC = """
import ridgeline as rl
from ridgeline.study.run import Spec
def spec(sampler):
    vary = {"l2": "1x..3x:8", "hbm_bandwidth": "1x..4x:16", "sms": "100..145/5"}
    space = rl.Space("llama3-8b", options={"mode": "decode"}, vary=vary)
    return Spec(space, minimize=("tpot", "area"), sampler=sampler, budget=1280 if sampler == "grid" else 500)
"""


@pytest.mark.parametrize("sampler", ["grid", "nsga2"])
def test_killed_three_times_and_resumed_the_table_is_the_same(tmp_path, sampler):
    (tmp_path / "tests_spec.py").write_text(SPEC)
    source = Path(rl.__file__).parent.parent
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{source}", "OMP_NUM_THREADS": "1"}
    for number in (1, 0, 3):
        done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "s.db"), str(number), sampler], env=env,
                              timeout=1800, check=False)  # fmt: skip
        assert done.returncode == -signal.SIGKILL
    namespace: dict[str, object] = {}
    exec(SPEC, namespace)
    spec = namespace["spec"](sampler)  # type: ignore[operator]
    with Store(tmp_path / "s.db") as store:
        assert len(store.chunk_numbers(store.study("k").id)) == 4
        with pytest.raises(InputError, match="interrupted after 4 chunks: give --resume"):
            run(spec, store, "k")
        resumed = run(spec, store, "k", resume=True)
        assert store.check() == []
    with Store(":memory:") as store:
        whole = run(spec, store, "k")
    for name, values in whole.columns.items():
        np.testing.assert_array_equal(values, resumed.columns[name])


DIES_ONCE = """
import os, signal
def evaluate(given, number, points):
    if number == 3 and not os.path.exists(given["flag"]):
        with open(given["flag"], "w"):
            os.kill(os.getpid(), signal.SIGKILL)
    return {"x": [number]}
"""


def test_a_worker_that_dies_loses_nothing(tmp_path, monkeypatch):
    flag = tmp_path / "died"
    (tmp_path / "dies_once.py").write_text(DIES_ONCE)  # processes import this module, which needs nothing, and not ours
    monkeypatch.syspath_prepend(tmp_path)
    evaluate = importlib.import_module("dies_once").evaluate
    found = dict(places.processes(evaluate, {"flag": str(flag)}, [(number, None) for number in range(6)], 2))
    assert flag.exists()
    assert {number: columns["x"] for number, columns in found.items()} == {n: [n] for n in range(6)}


def test_a_search_reaches_the_exhaustive_hypervolume_with_a_twentieth_of_the_evaluations():
    vary = {"hbm_bandwidth": "1x..4x:12", "sms": "100..220/15", "l2": "1x..4x:8", "batch": "1,2,4,…,32"}
    whole = rl.study(space(**vary), minimize=("tpot", "usd_per_mtoken"), budget=10**6)
    quick = rl.study(space(**vary), minimize=("tpot", "usd_per_mtoken"), sampler="nsga2", budget=len(whole) // 20)
    reference = np.nanmax(whole.costs(), axis=0)
    share = hypervolume(quick.costs(), reference) / hypervolume(whole.costs(), reference)
    assert share >= 0.99, f"{share:.4f} of the hypervolume with {len(quick)} of {len(whole)} points"


def test_sensitivities_find_the_axis_that_matters():
    made = space(batch="1,2,4,8,16,32", memory="100GB,120GB,141GB")
    found = rl.study(made, minimize=("energy_j_per_token", "tpot"))
    shares = found.sensitivities()["energy_j_per_token"]
    assert shares["batch"] > 0.95
    assert shares["memory"] < 0.02


def test_why_adds_up_to_the_difference():
    found = rl.study(space(), minimize="tpot")
    a, b = 0, 62
    rows = found.why(a, b)
    assert sum(row["delta_s"] for row in rows) == pytest.approx(
        found.point(b)["step_s"] - found.point(a)["step_s"], rel=0.02)  # fmt: skip
    assert abs(rows[0]["delta_s"]) == max(abs(row["delta_s"]) for row in rows)


def test_accuracy_is_an_objective_where_it_was_measured():
    errors = {"bf16": 0.001, "fp8": 0.012}
    found = rl.study(space(precision="bf16,fp8,fp16"), minimize=("tpot", "error"), errors=errors)
    by = dict(zip(found.columns["precision"], found.columns["reason"], strict=True))
    assert by["fp16"] == "no measured output error of llama3-8b in fp16"
    assert sorted(found.columns["precision"][found.frontier()].tolist()) == ["bf16", "fp8"]


def test_plans_and_deployments_are_points_too():
    vary = {"tp": "2,4", "zero": "1,3", "pp": "2"}
    space = rl.Space("llama3-8b", on="h100-sxm*16", evaluator="simulate", options={"global_batch": 64}, vary=vary)
    plans = rl.study(space, maximize="mfu", minimize="peak")
    assert len(plans) == 4
    load = {"isl": 128, "osl": 32, "requests": 16}
    vary = {"tp": "1,2", "concurrency": "2,8"}
    space = rl.Space("llama3-8b", on="h200*2", evaluator="serve", options=load, vary=vary)
    served = rl.study(space, minimize=("tpot", "usd_per_mtoken"))
    assert len(served.feasible) == 4
    assert served.columns["usd_per_mtoken"].min() > 0


def test_a_chunk_is_the_same_wherever_it_is_evaluated():
    spec = Spec(space(), minimize=("tpot",))
    a, b = evaluate_chunk(spec.to_dict(), 0, None), evaluate_chunk(spec.to_dict(), 0, None)
    assert all((a[name] == b[name]).all() for name in a)
    assert places.refuse_without_token("127.0.0.1:6379") is None
