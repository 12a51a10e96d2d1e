"""Studies on a real Ray cluster of two nodes in this machine, one of which is lost, and a worker too."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

from ridgeline.store.store import Store
from ridgeline.study import workers as places
from ridgeline.study.run import Spec, run
from ridgeline.study.space import Space

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster():
    try:
        import ray
        from ray.cluster_utils import Cluster
    except ImportError:
        if os.environ.get("RIDGELINE_REQUIRE_SERVICES") == "1":
            pytest.fail("Ray is not installed here")
        pytest.skip("Ray is not installed here")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = made.add_node(num_cpus=1)
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made, second
    ray.shutdown()
    made.shutdown()


def _slow_square(given, number, points):
    """Each worker notes its process; one of them dies in the middle of its first chunk."""
    with open(os.path.join(given["folder"], f"{number}-{os.getpid()}-{time.monotonic_ns()}"), "w"):
        pass
    dying = os.path.join(given["folder"], "died")
    if number == 2 and not os.path.exists(dying):
        with open(dying, "w"):
            os.kill(os.getpid(), signal.SIGKILL)
    return {"x": np.array([number * number])}


def test_a_worker_and_a_node_are_lost_and_the_table_is_whole(cluster, tmp_path):
    made, second = cluster
    tasks, found, lost = [(number, None) for number in range(16)], {}, False
    for number, columns in places.on_ray(_slow_square, {"folder": str(tmp_path)}, tasks, "auto", 2):
        found[number] = columns["x"].tolist()
        if len(found) == 4 and not lost:
            made.remove_node(second, allow_graceful=False)
            lost = True
    assert lost
    assert (tmp_path / "died").exists()
    assert found == {number: [number * number] for number in range(16)}


def test_a_study_on_ray_has_the_table_of_one_process(cluster):
    space = Space("llama3-8b", options={"mode": "decode"}, vary={"l2": "1x..3x:20", "hbm_bandwidth": "1x..4x:30"})
    spec = Spec(space, minimize=("tpot",))
    assert spec.num_chunks > 1
    with Store(":memory:") as store:
        one, many = run(spec, store, "one"), run(spec, store, "many", ray="auto", workers=2)
    for name, values in one.columns.items():
        np.testing.assert_array_equal(values, many.columns[name])
