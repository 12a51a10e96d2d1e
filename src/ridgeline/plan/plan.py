"""How a training step is mapped onto a cluster: parallelism, schedule, precision, recomputation and overlap."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble", "dualpipe")
CP_KINDS = ("ring", "all-gather")
OPTIMIZERS = ("adamw", "sgd", "adamw-8bit", "adamw-no-master")
"""AdamW and SGD with fp32 master weights; AdamW with moments of 8 bits; AdamW in the precision of the parameters alone,
as ``torch.optim.AdamW`` steps a bf16 model."""
DISPATCHES = ("all-to-all", "drop", "deep", "hybrid")
"""Plain exchange whose sizes the host must learn; fixed capacity; one copy a host, sizes learned; one copy, no wait."""
OFFLOADS = ("none", "optimizer", "activations")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One parallel plan. Sizes of the axes multiply to the number of devices: dp · tp · pp · cp.

    ``zero`` is what data-parallel ranks share out: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters
    (FSDP); ``shard_group`` limits that to groups of so many ranks (hybrid sharding; 0 is all of them). ``ep`` spreads
    experts over ranks of the data, context and tensor axes; ``etp`` splits each expert.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    vp: int = 1  # model chunks a stage holds (interleaved)
    zero: int = 0
    shard_group: int = 0
    schedule: str = "1f1b"
    cp_kind: str = "ring"
    sequence_parallel: bool = True
    micro_batch: int = 1
    global_batch: int = 1
    recompute: str = "none"  # none, selective, full, or selective:mlp+layernorm …
    recompute_layers: int = 0  # of each stage; 0 is all of them
    offload: str = "none"
    precision: str = "bf16"
    overlap_grads: bool = True
    overlap_params: bool = True
    overlap_tp: bool = False
    overlap_ep: bool = False
    optimizer: str = "adamw"
    reduce_dtype: str = "fp32"  # gradients travel as this
    gather_dtype: str = ""  # and parameters as this; empty is what products read
    narrow_params: bool = False  # weights kept and gathered in the recipe's narrow type alone
    narrow_activations: bool = False  # inputs of elementwise gradients kept in eight bits
    attention: str = ""  # library of the attention kernels: cudnn, fa2, fa3; empty is the framework's choice
    narrow_attention: bool = False  # attention multiplies in eight bits as well
    execution: str = "compiled"  # how kernels are made and launched: eager, compiled (fused), cudagraph
    replayed: bool = False  # whole steps are recorded once as a graph: the host launches nothing
    dispatch: str = "all-to-all"  # how tokens reach experts: all-to-all, drop, deep, hybrid
    expert_imbalance: float = 1.0  # rows of the busiest expert rank over the mean

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def num_micro_batches(self) -> int:
        """Gradient accumulation: micro-batches each data-parallel rank works through in a step."""
        return max(1, self.global_batch // (self.dp * self.micro_batch))

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts."""
        return max(1, self.dp * self.cp * self.tp // (self.ep * self.etp))

    @property
    def sharders(self) -> int:
        """Ranks over which states are shared out: data and context parallel ones, or a smaller group."""
        whole = self.dp * self.cp
        return whole if self.zero == 0 or not self.shard_group else math.gcd(whole, self.shard_group)

    def key(self) -> tuple[Any, ...]:
        """What decides a rank's graph for one micro-batch; plans that share it share their prices."""
        return (
            self.tp, self.cp, self.ep, self.etp, self.sequence_parallel and self.tp > 1, self.micro_batch,
            self.recompute, self.precision, self.execution, self.cp_kind, self.expert_imbalance, self.attention,
            self.dispatch, self.narrow_activations, self.narrow_attention, self.world > 1,
        )  # fmt: skip

    def words(self) -> str:
        """The plan on one line, in the words of the command line; what is trivial is left out."""
        sizes = [f"{name}={getattr(self, name)}" for name in ("dp", "tp", "pp", "vp", "cp", "ep", "etp")
                 if getattr(self, name) > 1]  # fmt: skip
        sizes += [f"zero={self.zero}"] if self.zero else []
        sizes += [f"group={self.shard_group}"] if self.zero and self.shard_group else []
        sizes += [f"schedule={self.schedule}"] if self.pp > 1 else []
        sizes += [f"mbs={self.micro_batch}", f"gbs={self.global_batch}"]
        some = f" of {self.recompute_layers} layers" if self.recompute_layers else ""
        sizes += [f"recompute={self.recompute}{some}"] if self.recompute != "none" else []
        sizes += [f"offload={self.offload}"] if self.offload != "none" else []
        return " ".join([*sizes, self.precision])

    def to_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}
