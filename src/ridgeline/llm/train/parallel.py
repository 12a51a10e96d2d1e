"""How a decoder is laid out over ranks: meshes, tensor-parallel plans, sharded data parallelism, pipeline stages.

Ranks are ordered pipeline · data · context · tensor, tensor innermost. Data and context ranks share weights: FSDP2
shards them over ``zero``'s groups and sums gradients. Experts are spread over neighbors among those ranks.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ridgeline.errors import PlanError
from ridgeline.llm.model.blocks import LatentAttention
from ridgeline.llm.model.collectives import ALONE, Groups
from ridgeline.llm.model.config import ModelConfig
from ridgeline.llm.model.decoder import Decoder
from ridgeline.llm.model.moe import MoeMlp
from ridgeline.llm.model.weights import Source, fill
from ridgeline.plan import Plan


@dataclass(frozen=True, slots=True)
class Layout:
    """This process among the others. Meshes are None where a single process runs."""

    plan: Plan
    device: torch.device
    rank: int = 0
    tensor: DeviceMesh | None = None
    shard: DeviceMesh | None = None  # what FSDP shards (and replicates) over; None without data or context ranks
    expert_shard: DeviceMesh | None = None
    pipeline: Any = None  # process groups
    data: Any = None
    groups: Groups = ALONE

    @property
    def data_rank(self) -> int:
        return self.rank // (self.plan.cp * self.plan.tp) % self.plan.dp

    @property
    def context_rank(self) -> int:
        return self.rank // self.plan.tp % self.plan.cp

    @property
    def stage(self) -> int:
        return self.rank // (self.plan.dp * self.plan.cp * self.plan.tp)


def set_up(plan: Plan, device: str) -> Layout:
    """Join the other processes that ``torchrun`` started, and make the plan's groups."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind.startswith("cuda") and not torch.cuda.is_available():
        raise PlanError("device is cuda and PyTorch finds none here; set device = 'cpu'")
    if plan.world != world:
        sizes = f"dp={plan.dp} tp={plan.tp} pp={plan.pp} cp={plan.cp}"
        rest, left = divmod(world, plan.tp * plan.pp * plan.cp)
        cure = f"; dp={rest} uses all" if rest and not left else ""
        raise PlanError(
            f"the plan {sizes} is for {plan.world} processes and {world} run{cure}: "
            f"torchrun --nproc-per-node {plan.world} -m ridgeline llm train …"
        )
    if world == 1:
        return Layout(plan, torch.device(kind))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    on = torch.device("cuda", local) if kind == "cuda" else torch.device(kind)
    if on.type == "cuda":
        torch.cuda.set_device(on)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if on.type == "cuda" else "gloo")
    shared = plan.dp * plan.cp
    size = 1 if plan.zero == 0 else plan.sharders
    axes = init_device_mesh(on.type, (plan.pp, plan.dp, plan.cp, plan.tp), mesh_dim_names=("pp", "dp", "cp", "tp"))
    sharing = init_device_mesh(
        on.type, (plan.pp, shared // size, size, plan.tp), mesh_dim_names=("pp", "copies", "shards", "tp")
    )
    expert_shard = expert = None
    if plan.ep > 1:
        copies = shared // plan.ep
        shards = copies if plan.zero else 1
        experts = init_device_mesh(
            on.type, (plan.pp, copies // shards, shards, plan.ep, plan.tp),
            mesh_dim_names=("pp", "copies", "shards", "ep", "tp"),
        )  # fmt: skip
        expert = experts.get_group("ep")
        expert_shard = experts["copies", "shards"] if shards < copies else experts["shards"]
    groups = Groups(
        axes.get_group("tp") if plan.tp > 1 else None, axes.get_group("cp") if plan.cp > 1 else None, expert
    )
    shard = None
    if shared > 1:
        shard = sharing["copies", "shards"] if size < shared else sharing["shards"]
    return Layout(
        plan, on, dist.get_rank(), sharing["tp"] if plan.tp > 1 else None, shard, expert_shard,
        axes.get_group("pp") if plan.pp > 1 else None, axes.get_group("dp") if plan.dp > 1 else None, groups,
    )  # fmt: skip


def stage_layers(num_layers: int, num_stages: int) -> list[range]:
    """Consecutive layers of each stage, the first stages one more where they do not divide."""
    each, more = divmod(num_layers, num_stages)
    cuts = [0]
    for stage in range(num_stages):
        cuts.append(cuts[-1] + each + (stage < more))
    return [range(a, b) for a, b in itertools.pairwise(cuts)]


def build_parts(
    config: ModelConfig, layout: Layout, source: Source, dtype: torch.dtype, compute: torch.dtype, prepare: Any
) -> list[Decoder]:
    """The stages this rank runs (one without a pipeline), filled from ``source`` and laid out, a layer at a time.

    ``prepare`` changes modules of a stage before they get weights: adapters, fp8.
    """
    plan = layout.plan
    stages = stage_layers(config.num_layers, plan.pp * plan.vp)
    parts = []
    for chunk in range(plan.vp):
        index = layout.stage + chunk * plan.pp
        last = index == len(stages) - 1
        part = Decoder(
            config, layers=stages[index], first=index == 0, last=last, groups=layout.groups, device="meta", dtype=dtype
        )
        prepare(part)
        _lay_out(part, layout, source, compute)
        parts.append(part)
    return parts


def _lay_out(part: Decoder, layout: Layout, source: Source, compute: torch.dtype) -> None:
    if layout.tensor is not None:
        split_tensors(part, layout.tensor)
    sharded: dict[str, Any] = {}
    if layout.shard is not None:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
        sharded = {"mp_policy": policy, "reshard_after_forward": layout.plan.zero >= 3}
    # A layer gets memory and weights, and is sharded at once: the whole model never has to fit on one device
    for name, layer in part.layers.items():
        layer.to_empty(device=layout.device)
        fill(layer, source, f"layers.{name}.")
        if layout.shard is not None:
            if layout.expert_shard is not None and isinstance(layer.mlp, MoeMlp):
                _shard(layer.mlp.experts, layout.expert_shard, sharded)
            _shard(layer, layout.shard, sharded)
    for name, module in (("embed_tokens.", part.embed_tokens), ("norm.", part.norm), ("lm_head.", part.lm_head)):
        if module is not None and next(module.parameters()).is_meta:
            module.to_empty(device=layout.device)
            fill(module, source, name)
    if part.config.tied and part.embed_tokens is not None and part.lm_head is not None:
        part.lm_head.weight = part.embed_tokens.weight  # to_empty made two of it
    if layout.shard is not None:
        _shard(part, layout.shard, {**sharded, "reshard_after_forward": False})


def _shard(module: nn.Module, mesh: DeviceMesh, options: dict[str, Any]) -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    fully_shard(module, mesh=mesh, **options)
    assert isinstance(module, FSDPModule)
    # Losses are divided by the tokens of all ranks already: gradients are summed
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def split_tensors(part: Decoder, mesh: DeviceMesh) -> None:
    """Heads and hidden units over the tensor-parallel ranks, the vocabulary at both ends; the rest on each."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if part.embed_tokens is not None:
        parallelize_module(part.embed_tokens, mesh, RowwiseParallel(input_layouts=Replicate()))
    if part.lm_head is not None:
        parallelize_module(part.lm_head, mesh, ColwiseParallel())
    for layer in part.layers.values():
        split = ("q_b_proj", "q_proj", "kv_b_proj") if isinstance(layer.self_attn, LatentAttention) else (
            "q_proj", "k_proj", "v_proj")  # fmt: skip
        plan: dict[str, Any] = {
            f"self_attn.{name}": ColwiseParallel() for name in split if hasattr(layer.self_attn, name)
        }
        plan["self_attn.o_proj"] = RowwiseParallel()
        mlp = "mlp.shared_experts." if isinstance(layer.mlp, MoeMlp) else "mlp."
        if not isinstance(layer.mlp, MoeMlp) or layer.mlp.shared_experts is not None:
            plan |= {f"{mlp}gate_proj": ColwiseParallel(), f"{mlp}up_proj": ColwiseParallel(),
                     f"{mlp}down_proj": RowwiseParallel()}  # fmt: skip
        parallelize_module(layer, mesh, plan)
