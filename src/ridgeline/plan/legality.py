"""Whether a plan can be: every rule says what is wrong, and how to change the plan so that it is right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from ridgeline.errors import PlanError, nearest
from ridgeline.graph import Block, Graph, Kind, Phase
from ridgeline.hardware import Cluster
from ridgeline.plan.plan import CP_KINDS, DISPATCHES, OFFLOADS, OPTIMIZERS, SCHEDULES, Plan
from ridgeline.plan.precision import RECIPES
from ridgeline.plan.shard import sequence_of, unsplittable

EXECUTIONS = ("eager", "compiled", "cudagraph")
WORDS = {"schedule": SCHEDULES, "cp_kind": CP_KINDS, "offload": OFFLOADS, "dispatch": DISPATCHES,
         "optimizer": OPTIMIZERS, "precision": tuple(RECIPES), "execution": EXECUTIONS}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Facts:
    """What of a model a plan must respect."""

    layers: int
    heads: int
    kv_heads: int
    seq: int
    experts: int
    vocab: int
    whole: str = ""  # an op that nothing says how to split, if there is one: such a model is only replicated


def facts_of(graph: Graph) -> Facts:
    """Read off the graph: layers from its blocks, heads from attention, experts from grouped products."""
    layers = heads = kv = experts = vocab = 0
    for item in graph.items:
        nodes = item.nodes if isinstance(item, Block) else (item,)
        repeat = item.repeat if isinstance(item, Block) else 1
        for node in nodes:
            if node.phase is not Phase.FORWARD:
                continue
            a = node.attrs
            if node.op == "attention":
                heads, kv = int(a["h"]), int(a["hkv"])
                layers += repeat
            elif node.op == "softmax" and isinstance(item, Block) and len(graph.type_of(node.inputs[0]).shape) == 4:
                heads = kv = graph.type_of(node.inputs[0]).shape[1]
                layers += repeat
            elif node.op == "grouped_matmul":
                experts = int(a["groups"])
            elif node.op == "embedding" and graph.values[node.inputs[1]].kind is Kind.INPUT:
                vocab = max(vocab, int(a["rows"]))
    if not layers:
        layers = max((i.repeat for i in graph.items if isinstance(i, Block)), default=1)
    return Facts(layers, heads, kv, sequence_of(graph), experts, vocab, unsplittable(graph))


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a plan cannot be, and the plan with just that put right (the same plan where nobody can)."""

    why: str
    cure: Plan


Rule = Callable[[Plan, Facts, Cluster], Iterator[Problem]]


def problems(plan: Plan, facts: Facts, cluster: Cluster) -> list[Problem]:
    """Everything that is wrong with a plan for a model on a cluster."""
    wrong = list(_numbers(plan, facts, cluster))
    return wrong or [problem for rule in RULES for problem in rule(plan, facts, cluster)]


def check(plan: Plan, facts: Facts, cluster: Cluster) -> None:
    """Refuse an illegal plan, with every reason and the nearest legal one."""
    found = problems(plan, facts, cluster)
    if not found:
        return
    near = nearest_legal(plan, facts, cluster)
    hint = f"the nearest legal plan: {near.words()}" if near is not None else "no legal plan is near"
    raise PlanError("this plan cannot be: " + "; ".join(p.why for p in found) + f". {hint}")


def nearest_legal(plan: Plan, facts: Facts, cluster: Cluster) -> Plan | None:
    """Put one thing right after the other until nothing is wrong."""
    for _ in range(24):
        found = problems(plan, facts, cluster)
        if not found:
            return plan
        cured = next((p.cure for p in found if p.cure != plan), None)
        if cured is None:
            return None
        plan = cured
    return None


def _with(plan: Plan, name: str, value: Any) -> Plan:
    """The plan with one choice, given by name, changed."""
    return replace(plan, **{name: value})


def _closest(wanted: int, legal: list[int]) -> int:
    return min(legal, key=lambda n: (abs(n - wanted), n)) if legal else 1


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _numbers(plan: Plan, facts: Facts, cluster: Cluster) -> Iterator[Problem]:
    for field in fields(plan):
        value = getattr(plan, field.name)
        least = 0 if field.name in ("zero", "shard_group", "recompute_layers") else 1
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            yield Problem(f"{field.name}={value} is below {least}", _with(plan, field.name, least))
    if plan.zero > 3:
        yield Problem(f"zero={plan.zero}: stages are 0 to 3", replace(plan, zero=3))
    if plan.expert_imbalance < 1.0:
        yield Problem(f"expert_imbalance={plan.expert_imbalance} is below 1, a perfect balance",
                      replace(plan, expert_imbalance=1.0))  # fmt: skip


def _words(plan: Plan, facts: Facts, cluster: Cluster) -> Iterator[Problem]:
    for name, known in WORDS.items():
        value = getattr(plan, name)
        if value not in known:
            yield Problem(f"unknown {name} {value!r}{nearest(value, known)}", _with(plan, name, known[0]))
    if plan.recompute not in ("none", "selective", "full") and not plan.recompute.startswith("selective:"):
        yield Problem(f"unknown recompute {plan.recompute!r}; known: none, selective, full, selective:mlp+layernorm …",
                      replace(plan, recompute="full"))  # fmt: skip


def _whole(plan: Plan, facts: Facts, cluster: Cluster) -> Iterator[Problem]:
    for name in ("tp", "cp"):
        value = getattr(plan, name)
        if facts.whole and value > 1:
            yield Problem(f"{name}={value}: nothing says how to split {facts.whole}", _with(plan, name, 1))


def _heads(plan: Plan, facts: Facts, cluster: Cluster) -> Iterator[Problem]:
    if facts.heads and facts.heads % plan.tp:
        legal = [d for d in _divisors(facts.heads) if d <= cluster.num_devices]
        yield Problem(f"tp={plan.tp} does not divide {facts.heads} heads",
                      replace(plan, tp=_closest(plan.tp, legal)))  # fmt: skip
    kv = facts.kv_heads
    if kv and kv % plan.tp and plan.tp % kv:
        legal = [d for d in _divisors(facts.heads) if kv % d == 0 or d % kv == 0]
        yield Problem(f"tp={plan.tp} neither divides {kv} key-value heads nor is a multiple of them",
                      replace(plan, tp=_closest(plan.tp, legal)))  # fmt: skip


def _sequence(plan: Plan, facts: Facts, cluster: Cluster) -> Iterator[Problem]:
    if not facts.seq:
        return
    halves = 2 * plan.cp if plan.cp > 1 else 1
    if facts.seq % halves:
        legal = [d for d in _divisors(facts.seq) if facts.seq % (2 * d) == 0]
        yield Problem(f"cp={plan.cp} needs a sequence of a multiple of {halves}, not {facts.seq}",
                      replace(plan, cp=_closest(plan.cp, legal)))  # fmt: skip
    elif plan.sequence_parallel and plan.tp > 1 and facts.seq % (plan.tp * plan.cp):
        yield Problem(f"sequence parallelism splits {facts.seq} tokens over {plan.tp * plan.cp} ranks unevenly",
                      replace(plan, sequence_parallel=False))  # fmt: skip


def _experts(plan: Plan, facts: Facts, cluster: Cluster) -> Iterator[Problem]:
    if not facts.experts:
        if plan.ep > 1 or plan.etp > 1:
            yield Problem(f"ep={plan.ep}, etp={plan.etp}: the model has no experts", replace(plan, ep=1, etp=1))
        return
    if facts.experts % plan.ep:
        yield Problem(f"ep={plan.ep} does not divide {facts.experts} experts",
                      replace(plan, ep=_closest(plan.ep, _divisors(facts.experts))))  # fmt: skip
    ranks = plan.dp * plan.cp * plan.tp
    if ranks % (plan.ep * plan.etp):
        legal = [d for d in _divisors(facts.experts) if ranks % (d * plan.etp) == 0]
        cure = replace(plan, ep=_closest(plan.ep, legal)) if legal else replace(plan, ep=1, etp=1)
        yield Problem(f"ep·etp = {plan.ep * plan.etp} does not divide the {ranks} ranks of a stage", cure)
    if plan.tp > 1 and not plan.sequence_parallel:
        yield Problem("experts under tensor parallelism need sequence parallelism (tokens would be routed tp times)",
                      replace(plan, sequence_parallel=True))  # fmt: skip


def _pipeline(plan: Plan, facts: Facts, cluster: Cluster) -> Iterator[Problem]:
    if plan.pp > facts.layers:
        legal = [d for d in _divisors(cluster.num_devices) if d <= facts.layers]
        yield Problem(f"pp={plan.pp} stages for {facts.layers} layers", replace(plan, pp=_closest(plan.pp, legal)))
        return
    if plan.vp > 1 and plan.pp == 1:
        yield Problem(f"vp={plan.vp} interleaves a pipeline, and there is none", replace(plan, vp=1))
    elif plan.pp * plan.vp > facts.layers + 2:
        yield Problem(f"pp·vp = {plan.pp * plan.vp} chunks for {facts.layers} layers",
                      replace(plan, vp=max(1, facts.layers // plan.pp)))  # fmt: skip
    if plan.vp > 1 and plan.schedule in ("zero-bubble", "dualpipe"):
        yield Problem(f"the {plan.schedule} schedule holds its own chunks, not vp={plan.vp}", replace(plan, vp=1))
    if plan.vp > 1 and plan.pp > 1 and plan.num_micro_batches % plan.pp:
        rounds = max(1, round(plan.num_micro_batches / plan.pp))
        yield Problem(f"the interleaved schedule walks micro-batches in groups of pp={plan.pp}, and each rank has "
                      f"{plan.num_micro_batches}",
                      replace(plan, global_batch=rounds * plan.pp * plan.dp * plan.micro_batch))  # fmt: skip
    if plan.schedule == "dualpipe" and (plan.pp % 2 or plan.num_micro_batches % 2):
        yield Problem(f"dualpipe needs even stages and micro-batches, not {plan.pp} and {plan.num_micro_batches}",
                      replace(plan, schedule="1f1b"))  # fmt: skip


def _batch(plan: Plan, facts: Facts, cluster: Cluster) -> Iterator[Problem]:
    unit = plan.dp * plan.micro_batch
    if plan.global_batch % unit:
        near = max(1, round(plan.global_batch / unit)) * unit
        yield Problem(f"a global batch of {plan.global_batch} is no multiple of dp·micro-batch = {unit}",
                      replace(plan, global_batch=near))  # fmt: skip


def _devices(plan: Plan, facts: Facts, cluster: Cluster) -> Iterator[Problem]:
    if plan.world == cluster.num_devices:
        return
    inner = plan.tp * plan.pp * plan.cp
    why = f"dp·tp·pp·cp = {plan.world} ranks on {cluster.num_devices} devices"
    if cluster.num_devices % inner == 0:
        yield Problem(why, replace(plan, dp=cluster.num_devices // inner))
        return
    for name in ("pp", "cp", "tp"):
        others = inner // getattr(plan, name)
        if cluster.num_devices % others == 0:
            legal = _divisors(cluster.num_devices // others)
            size = _closest(getattr(plan, name), legal)
            yield Problem(why, replace(_with(plan, name, size), dp=cluster.num_devices // (others * size)))
            return
    yield Problem(why, replace(plan, pp=1, cp=1, tp=math.gcd(plan.tp, cluster.num_devices),
                               dp=cluster.num_devices // math.gcd(plan.tp, cluster.num_devices)))  # fmt: skip


def _sharding(plan: Plan, facts: Facts, cluster: Cluster) -> Iterator[Problem]:
    ranks = plan.dp * plan.cp
    if plan.shard_group and ranks % plan.shard_group:
        yield Problem(f"a sharding group of {plan.shard_group} does not divide {ranks} data-parallel ranks",
                      replace(plan, shard_group=_closest(plan.shard_group, _divisors(ranks))))  # fmt: skip


def _precision(plan: Plan, facts: Facts, cluster: Cluster) -> Iterator[Problem]:
    """Narrow products need matrix units for them, and block scales need Blackwell's."""
    device, compute = cluster.device, RECIPES[plan.precision].compute if plan.precision in RECIPES else ""
    if compute not in ("fp8", "fp4"):
        return
    if ("tensor", compute) not in device.peaks:
        yield Problem(f"{device.name} has no {compute} matrix units for precision {plan.precision}",
                      replace(plan, precision="fp8" if ("tensor", "fp8") in device.peaks else "bf16"))  # fmt: skip
    elif plan.precision == "mxfp8" and device.vendor == "NVIDIA" and not device.arch.startswith("blackwell"):
        yield Problem(f"{device.name} has no block scales: mxfp8 needs Blackwell", replace(plan, precision="fp8"))


RULES: tuple[Rule, ...] = (_words, _whole, _heads, _sequence, _devices, _experts, _pipeline, _batch, _sharding,
                           _precision)  # fmt: skip
