"""A mixture of experts: the router, experts as stacked weights, and their exchange between ranks.

Shapes: T tokens, N chosen rows (T · k), E experts, M hidden size, I intermediate size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.llm.model.blocks import Mlp, gated
from ridgeline.llm.model.collectives import Group, Groups, copy_to, exchange_rows, rank, size, sum_over
from ridgeline.llm.model.config import ModelConfig, Moe
from ridgeline.llm.model.expert_rows import combine, places_of, spread


class Router(nn.Module):
    """Scores of every expert, and the few that each token goes to."""

    def __init__(self, hidden: int, of: Moe) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(of.num_experts, hidden))
        self.bias = nn.Parameter(torch.empty(of.num_experts)) if of.bias else None
        if of.correction:
            self.register_buffer("e_score_correction_bias", torch.empty(of.num_experts, dtype=torch.float32))
        self.of = of

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights and indices [T, k] of the chosen experts, and the probabilities [T, E] they were chosen by."""
        of, wide = self.of, torch.promote_types(x.dtype, torch.float32)
        if of.score == "sigmoid":
            logits = F.linear(x.to(wide), self.weight.to(wide))
        else:  # these families route by a product in the model's own type
            logits = F.linear(x, self.weight, self.bias).to(wide)
        scores = logits.sigmoid() if of.score == "sigmoid" else logits.softmax(-1)
        ranked = scores
        if of.correction:
            ranked = scores + self.e_score_correction_bias.to(wide)
            groups = ranked.unflatten(-1, (of.num_groups, -1))
            kept = groups.topk(2, -1)[0].sum(-1).topk(of.top_groups, -1)[1]
            allowed = torch.zeros_like(groups[..., 0]).scatter_(1, kept, 1.0).bool()
            ranked = groups.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
        index = ranked.topk(of.top_k, -1)[1]
        chosen = logits.gather(1, index).softmax(-1) if of.score == "chosen" else scores.gather(1, index)
        if of.normalize:
            chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
        if of.score == "sigmoid":
            scores = scores / scores.sum(-1, keepdim=True)
        return (chosen * of.scale).to(x.dtype), index, scores


class Experts(nn.Module):
    """Gated MLPs as stacked weights. A rank holds a slice of the experts and, of each, a slice of its hidden units."""

    def __init__(self, hidden: int, of: Moe, activation: str, groups: Groups) -> None:
        super().__init__()
        experts, width = of.num_experts // size(groups.expert), of.intermediate // size(groups.tensor)
        self.gate_proj = nn.Parameter(torch.empty(experts, width, hidden))
        self.up_proj = nn.Parameter(torch.empty(experts, width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))
        first, unit = rank(groups.expert) * experts, rank(groups.tensor) * width
        # Where these slices lie in the whole weights: what initialization and checkpoints go by
        total, units = of.num_experts, of.intermediate
        self.blocks: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
            "gate_proj": ((total, units, hidden), (first, unit, 0)),
            "up_proj": ((total, units, hidden), (first, unit, 0)),
            "down_proj": ((total, hidden, units), (first, 0, unit)),
        }
        if of.bias:
            self.gate_bias = nn.Parameter(torch.empty(experts, width))
            self.up_bias = nn.Parameter(torch.empty(experts, width))
            self.down_bias = nn.Parameter(torch.empty(experts, hidden))
            self.blocks["gate_bias"] = self.blocks["up_bias"] = ((total, units), (first, unit))
            self.blocks["down_bias"] = ((total, hidden), (first, 0))
        self.of, self.activation, self.groups = of, activation, groups

    def forward(self, x: Tensor, weights_Tk: Tensor, index_Tk: Tensor) -> Tensor:
        k, group = index_Tk.shape[1], self.groups.tensor
        x, weights_Tk = copy_to(x, group), copy_to(weights_Tk, group)
        chosen = index_Tk.flatten()
        order = chosen.argsort(stable=True)
        counts = torch.zeros(self.of.num_experts, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        self.counts = counts  # of every expert, here
        place = places_of(order)
        rows = spread(x, place, k)
        if size(self.groups.expert) > 1:
            y = self._dispatched(rows, counts, self.groups.expert)
        else:
            y = self._run(rows, counts)
        return sum_over(combine(y, place, k, weights_Tk), group)

    def _dispatched(self, rows: Tensor, counts: Tensor, group: Group) -> Tensor:
        """Send each row to the rank of its expert, and what the expert makes of it back."""
        ranks = size(group)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        sent = counts.view(ranks, -1).sum(1).tolist()
        per_source = arriving.view(ranks, -1)
        received = per_source.sum(1).tolist()
        rows = exchange_rows(rows, received, sent, group)
        # Rows come sorted by source, then expert; products want them by expert
        expert = torch.arange(per_source.shape[1], device=rows.device).repeat(ranks)
        order = expert.repeat_interleave(per_source.flatten()).argsort(stable=True)
        place = places_of(order)
        y = self._run(spread(rows, place, 1), per_source.sum(0))
        return exchange_rows(combine(y, place, 1), sent, received, group)

    def _run(self, rows_NM: Tensor, counts_E: Tensor) -> Tensor:
        """Every expert on its rows, which lie one expert after the other."""
        if rows_NM.is_cuda and rows_NM.dtype == torch.bfloat16 and not self.of.bias:
            ends = counts_E.cumsum(0).to(torch.int32)  # stays on the device: nothing waits, and a graph can hold it

            def product(x: Tensor, weight: Tensor) -> Tensor:
                return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)

            return product(
                self._gated(product(rows_NM, self.gate_proj), product(rows_NM, self.up_proj)), self.down_proj
            )
        parts, start = [], 0
        tensor = self.groups.tensor
        for e, count in enumerate(counts_E.tolist()):
            rows, start = rows_NM[start : start + count], start + count
            biases: list[Any] = [None, None, None]
            if self.of.bias:
                shared = copy_to(self.down_bias, tensor) / size(tensor)  # added once over ranks that sum
                biases = [self.gate_bias[e], self.up_bias[e], shared[e]]
            gate = F.linear(rows, self.gate_proj[e], biases[0])
            up = F.linear(rows, self.up_proj[e], biases[1])
            parts.append(F.linear(self._gated(gate, up), self.down_proj[e], biases[2]))
        return torch.cat(parts)

    def _gated(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.of.clamp is None:
            return gated(gate, up, self.activation)
        gain, limit = self.of.clamp
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * gain))


class _Balanced(torch.autograd.Function):
    """``y`` as it is; in the backward pass the balance loss starts from its own weight."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.save_for_backward(loss)
        ctx.weight = weight
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (loss,) = ctx.saved_tensors
        return grad, torch.full_like(loss, ctx.weight), None


class MoeMlp(nn.Module):
    """Routed experts, and those that every token goes through."""

    def __init__(self, config: ModelConfig, groups: Groups) -> None:
        super().__init__()
        assert config.moe is not None
        self.of, self.context_group = config.moe, groups.context
        self.gate = Router(config.hidden, config.moe)
        self.experts = Experts(config.hidden, config.moe, config.activation, groups)
        shared = config.moe.shared_intermediate
        self.shared_experts = Mlp(config.hidden, shared, config.activation) if shared else None
        self.balance_weight = 0.0  # of the balance loss of one micro-batch; the trainer sets it
        self.balance_losses: list[Tensor] = []
        # Rows that each expert got in a step. What is recomputed counts twice, for every expert alike
        self.register_buffer("load", torch.zeros(config.moe.num_experts, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        weights, index, scores = self.gate(x)
        y = self.experts(x, weights, index)
        if self.training and torch.is_grad_enabled():
            self.load += self.experts.counts
        if self.training and self.balance_weight:
            loss = self._balance_loss(scores, index)
            self.balance_losses.append(loss.detach())
            y = _Balanced.apply(y, loss, self.balance_weight)
        return y if self.shared_experts is None else y + self.shared_experts(x)

    def _balance_loss(self, scores_TE: Tensor, index_Tk: Tensor) -> Tensor:
        """Switch Transformer's loss over the tokens of a micro-batch: 1 · k where experts get equally many.

        With context parallelism the counts are those of all ranks; each rank adds the part of its own probabilities.
        """
        counts = torch.zeros_like(scores_TE[0]).scatter_add_(
            0, index_Tk.flatten(), torch.ones_like(index_Tk.flatten(), dtype=scores_TE.dtype)
        )
        group = self.context_group
        if size(group) > 1:
            dist.all_reduce(counts, group=group)
        tokens = scores_TE.shape[0] * size(group)
        return self.of.num_experts * (counts / tokens * scores_TE.sum(0) / tokens).sum()
