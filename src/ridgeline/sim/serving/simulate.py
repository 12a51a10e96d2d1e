"""From a deployment and a workload to what its users would see: latencies, throughput, cache, energy and money."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ridgeline.basis import Basis
from ridgeline.cost import energy
from ridgeline.cost.calibration import calibration_of
from ridgeline.errors import InputError
from ridgeline.hardware import Device
from ridgeline.sim.serving.anatomy import Anatomy
from ridgeline.sim.serving.deployment import (
    Layout,
    Precision,
    cache_bytes_per_token,
    cache_tokens,
    check,
)
from ridgeline.sim.serving.engine import Engine
from ridgeline.sim.serving.link import LINK_FRAC
from ridgeline.sim.serving.oracle import Oracle, oracle
from ridgeline.sim.serving.run import run_of
from ridgeline.sim.serving.state import Requests, requests_of
from ridgeline.sim.serving.step import rank_of
from ridgeline.sim.serving.worker import Speculation, Worker
from ridgeline.sim.serving.workload import Workload


@dataclass(frozen=True, slots=True)
class Pool:
    """``replicas`` equal instances of the model."""

    layout: Layout
    replicas: int = 1

    @property
    def num_devices(self) -> int:
        return self.layout.num_devices * self.replicas


@dataclass(frozen=True, slots=True)
class Deployment:
    """Everything that decides how requests are served; with ``prefill`` the prompts have instances of their own."""

    anatomy: Anatomy
    device: Device
    precision: Precision
    engine: Engine
    pool: Pool
    prefill: Pool | None = None
    speculation: Speculation | None = None
    cache_tokens: int = 0  # of one replica; 0 is what fits beside the weights

    @property
    def num_devices(self) -> int:
        return self.pool.num_devices + (self.prefill.num_devices if self.prefill else 0)


@dataclass(frozen=True, slots=True)
class Served:
    """A finished simulation: columns by request, samples over time, and what the devices spent."""

    deployment: Deployment
    workload: Workload
    requests: Requests
    arrival_s: np.ndarray[tuple[int], np.dtype[np.float64]]
    first_s: np.ndarray[tuple[int], np.dtype[np.float64]]
    done_s: np.ndarray[tuple[int], np.dtype[np.float64]]
    capacity_tokens: int
    samples: dict[str, list[float]]
    spans: list[tuple[int, float, float, int, int, int]]
    energy_j: float
    iterations: int
    preemptions: int
    left_tokens: float  # still in the caches when the last request is done, kept prefixes aside: none
    basis: Basis
    notes: tuple[str, ...] = field(default=())


def simulate(deployment: Deployment, workload: Workload, *, max_spans: int = 0) -> Served:
    """Serve every request of the workload and see when its tokens come."""
    requests = requests_of(workload)
    longest = int((workload.isl + workload.osl).max())
    entry, decoders = _workers(deployment, requests, workload, longest)
    coef = deployment.engine.coef
    run = run_of(
        workload, entry, decoders, requests, request_s=coef["request_s"], token_s=coef["token_s"] / len(entry),
        transfer_s=_transfer_s(deployment) if decoders else (0.0, 0.0), max_spans=max_spans,
    )  # fmt: skip
    run.loop()
    done = np.array(requests.done_s)
    if np.isnan(done).any():
        raise InputError(f"{int(np.isnan(done).sum())} requests were never served: the cache of a replica is too small")
    sampled = run.sampled
    samples = {"at_s": sampled.at_s, "held": sampled.held, "running": [float(v) for v in sampled.running],
               "waiting": [float(v) for v in sampled.waiting]}  # fmt: skip
    pool = decoders or entry
    spent_j = _energy_j(deployment, entry, decoders, float(done.max()))
    return Served(
        deployment, workload, requests, np.array(requests.arrival_s), np.array(requests.first_s), done,
        sum(w.capacity for w in pool), samples, run.spans.rows, spent_j,
        sum(w.iterations for w in run.workers), sum(w.preemptions for w in run.workers),
        sum(w.held for w in run.workers), max(calibration_of(deployment.device).basis, deployment.engine.basis),
    )  # fmt: skip


def oracle_of(deployment: Deployment, pool: Pool, workload: Workload) -> Oracle:
    """The iteration times of one instance of ``pool``."""
    check(deployment.anatomy, pool.layout)
    rank = rank_of(
        deployment.anatomy, deployment.device, pool.layout, deployment.precision,
        reads_peers=deployment.engine.reads_peers, ragged=deployment.engine.ragged,
    )  # fmt: skip
    groups = pool.layout.attention_dp
    longest = int((workload.isl + workload.osl).max())
    spread = 1 + (deployment.speculation.draft if deployment.speculation else 0)
    most = min(deployment.engine.max_sequences * groups, len(workload))
    most = min(most, workload.concurrency or most)
    slack = 0 if deployment.engine.chunked else int(workload.isl.max())
    chunk = min(deployment.engine.chunk_tokens, int(workload.isl[:most].sum()) + longest)
    beams = deployment.speculation is not None and deployment.speculation.is_beams
    return oracle(rank, deployment.engine, most * spread, longest, chunk + slack, 1 if beams else spread)


def _workers(
    deployment: Deployment, requests: Requests, workload: Workload, longest: int
) -> tuple[list[Worker], list[Worker]]:
    pool, prefill = deployment.pool, deployment.prefill
    main = oracle_of(deployment, pool, workload)
    capacity = _capacity(deployment, pool)
    if prefill is None:
        return [Worker(main, capacity, requests, deployment.speculation) for _ in range(pool.replicas)], []
    front = oracle_of(deployment, prefill, workload)
    room = _capacity(deployment, prefill)
    return (
        [Worker(front, room, requests, decodes=False) for _ in range(prefill.replicas)],
        [Worker(main, capacity, requests, deployment.speculation, prefills=False) for _ in range(pool.replicas)],
    )


def _capacity(deployment: Deployment, pool: Pool) -> int:
    """Tokens the caches of one replica hold, all attention groups together."""
    if deployment.cache_tokens:
        return deployment.cache_tokens
    engine = deployment.engine
    slots = min(256, engine.max_sequences)
    found = cache_tokens(
        deployment.anatomy, pool.layout, deployment.precision, deployment.device, engine.memory_frac,
        engine.counts_free, slots,
    )  # fmt: skip
    return found * pool.layout.attention_dp


def _transfer_s(deployment: Deployment) -> tuple[float, float]:
    """(fixed, a token) of moving a cache: over the scale-up domain where it holds both pools, else the network."""
    layout = deployment.pool.layout
    out = deployment.device.links.get("scale_out") or deployment.device.link("pcie")
    up = deployment.device.links.get("scale_up")
    near = up is not None and deployment.num_devices <= up.domain_size
    rate = (up.bandwidth_bytes_per_s if near and up else out.bandwidth_bytes_per_s) * LINK_FRAC
    per_token = cache_bytes_per_token(deployment.anatomy, layout, deployment.precision)
    # Handing a request from one pool to the other: messages, registration and the first copy
    return 0.015, per_token / rate


def _energy_j(deployment: Deployment, entry: list[Worker], decoders: list[Worker], wall_s: float) -> float:
    """Joules of all devices over the run, idle ones included."""
    coef = {**energy.DEFAULTS, **calibration_of(deployment.device).power}
    watts = deployment.device.tdp_w
    pools = [(deployment.prefill, entry), (deployment.pool, decoders)] if decoders else [(deployment.pool, entry)]
    total = 0.0
    for pool, workers in pools:
        assert pool is not None
        for worker in workers:
            activity = energy.Activity(worker.busy_s, worker.matrix_s, worker.dram_s)
            total += energy.energy_j(activity, wall_s, coef, watts, watts) * pool.layout.num_devices
    return total
