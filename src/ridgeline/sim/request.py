"""A training step as a person asks for it: a model by name, a cluster by name, a plan by its choices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ridgeline.errors import InputError, PlanError, nearest
from ridgeline.graph import Graph
from ridgeline.hardware import Cluster
from ridgeline.hardware import cluster as cluster_named
from ridgeline.models import build
from ridgeline.plan import Plan
from ridgeline.plan.legality import check, facts_of
from ridgeline.sim.generation import default_stack, stack_of
from ridgeline.sim.step import Step, Trouble, simulate_step


def simulated(
    model: Graph | str,
    on: str | Cluster,
    plan: Plan | None,
    *,
    stack: str,
    trouble: Trouble | None,
    seq: int | None,
    choices: Mapping[str, Any],
) -> Step:
    """One step under a plan that is given whole, or by its choices."""
    cluster = cluster_named(on) if isinstance(on, str) else on
    precision = plan.precision if plan else choices.get("precision", "bf16")
    found = stack_of(stack or default_stack(cluster.device, cluster.num_devices, precision), cluster.device)
    chosen = plan or plan_of(cluster, {**found.choices, **choices})
    graph = training_graph(model, chosen.micro_batch, seq, precision)
    check(chosen, facts_of(graph), cluster)
    return simulate_step(graph, chosen, cluster, found, trouble=trouble)


def plan_of(cluster: Cluster, choices: Mapping[str, Any]) -> Plan:
    """A plan from the choices a person made; data parallelism takes the devices that are left."""
    known = [f.name for f in fields(Plan)]
    for name in choices:
        if name not in known:
            raise PlanError(f"a plan has no choice {name!r}{nearest(name, known)}")
    inner = math.prod(max(1, choices.get(axis, 1)) for axis in ("tp", "pp", "cp"))
    dp = max(1, choices.get("dp") or cluster.num_devices // inner)
    given = {"dp": dp, "global_batch": dp * choices.get("micro_batch", 1), **choices}
    if dp * max(1, choices.get("cp", 1)) > 1 and "zero" not in choices:
        given["zero"] = 1
    if choices.get("vp", 1) > 1 and "schedule" not in choices:
        given["schedule"] = "interleaved"
    if cluster.num_devices == 1:  # as ``predict`` has it: PyTorch's own optimizer, no master weights
        given.setdefault("execution", "eager")
        if choices.get("precision", "bf16") in ("bf16", "fp16") and "optimizer" not in choices:
            given |= {"optimizer": "adamw-no-master", "reduce_dtype": choices.get("precision", "bf16")}
    if choices.get("tp", 1) > 1 and "overlap_tp" not in choices:
        given["overlap_tp"] = True
    return Plan(**given)


def training_graph(model: Graph | str, micro_batch: int, seq: int | None, precision: str) -> Graph:
    if isinstance(model, Graph):
        if model.mode != "train":
            raise InputError(f"simulate takes a training graph, and {model.name} was captured for {model.mode}")
        return model
    wide = precision if precision in ("fp16", "fp32", "tf32") else "bf16"
    return build(model, batch=micro_batch, mode="train", precision=wide, seq=seq)
