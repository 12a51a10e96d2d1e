"""One optimizer step: micro-batches forward and backward, clipping, update; one CUDA graph where that is possible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.llm.model.decoder import Decoder
from ridgeline.llm.train.optimizer import Held, gradient_norm, hand_over_gradients, local_gradient, scale_gradients
from ridgeline.llm.train.parallel import Layout


@dataclass(slots=True)
class Batch:
    """A step's micro-batches [micro-batches, …] on the device, and the tokens of all ranks that have a target."""

    tensors: dict[str, Tensor]
    longest: int
    longest_key: int
    num_targets: int

    @property
    def num_micro(self) -> int:
        return len(self.tensors["x"])

    def micro(self, index: int) -> dict[str, Any]:
        return {**{name: tensor[index] for name, tensor in self.tensors.items()}, "longest": self.longest,
                "longest_key": self.longest_key}  # fmt: skip


@dataclass(slots=True)
class StepResult:
    loss: Tensor  # mean over the tokens of all ranks
    balance: Tensor  # mean balance loss of a micro-batch and layer; 0 without experts
    busiest: Tensor  # rows of the busiest expert over those of the mean one, mean over layers; 0 without experts
    norm: Tensor  # of all gradients, before clipping
    stop: bool = False  # some rank was asked to stop


class TrainStep:
    """Runs steps of the stages that a rank holds."""

    def __init__(
        self,
        parts: list[Decoder],
        layout: Layout,
        held: list[Held],
        optimizers: list[torch.optim.Optimizer],
        clip: float,
        balance_coef: float,
        bias_rate: float,
        graph: bool,
    ) -> None:
        self.parts, self.layout, self.held, self.optimizers = parts, layout, held, optimizers
        self.clip, self.balance_coef, self.bias_rate = clip, balance_coef, bias_rate
        self.world = layout.plan.world
        self.blocks = [block for part in parts for block in part.moe_blocks()]
        self.num_moe_layers = sum(parts[0].config.moe_layers) if parts else 0
        # Gradients of bfloat16 weights are summed over micro-batches in float32
        self.sums: dict[str, Tensor] = {}
        self._accumulates = self.world == layout.plan.tp * layout.plan.pp and any(
            one.param.dtype == torch.bfloat16 for one in held
        )
        self._hooked = False
        self._graphs = _Graphs(self) if graph else None
        self._schedules: dict[int, Any] = {}

    def run(self, batch: Batch, stop: bool = False) -> StepResult:
        """One step. The learning rate is what the optimizers' groups say."""
        if self._graphs is not None:
            return self._graphs.run(batch)
        stats = self.compute(batch)
        if self.world > 1:
            stats = torch.cat((stats, torch.tensor([float(stop)], device=stats.device)))
            dist.all_reduce(stats)
            stop = bool(stats[3])
        norm = self.update()
        return StepResult(stats[0], stats[1], stats[2], norm, stop)

    def compute(self, batch: Batch) -> Tensor:
        """Gradients of every micro-batch; returns this rank's part of the loss and of the balance loss."""
        device = batch.tensors["x"].device
        micro = batch.num_micro * self.layout.plan.dp
        for block in self.blocks:
            block.balance_weight = self.balance_coef / (micro * self.num_moe_layers)
            block.balance_losses.clear()
            block.load.zero_()
        if batch.num_micro > 1 and self._accumulates and not self._hooked:
            self._keep_sums()
        total = torch.zeros(1, dtype=torch.float32, device=device)
        if self.layout.plan.pp > 1:
            losses: list[Tensor] = []
            self._pipelined(batch, losses)
            for loss in losses:
                total += loss.detach()
        else:
            (model,) = self.parts
            for index in range(batch.num_micro):
                if hasattr(model, "set_requires_gradient_sync"):
                    model.set_requires_gradient_sync(index == batch.num_micro - 1 or self.layout.plan.zero == 3)
                loss = model(**batch.micro(index)) / batch.num_targets
                loss.sum().backward()
                total += loss.detach()
        balance = [loss for block in self.blocks for loss in block.balance_losses]
        # This stage's share of the layers, and this rank's of the micro-batches
        layers, zero = len(self.blocks) / max(1, self.num_moe_layers), torch.zeros((), device=device)
        mean = torch.stack(balance).mean() * layers / self.layout.plan.dp if balance else zero
        shares = self.layout.plan.tp  # tensor-parallel ranks all have the same
        ranks = self.layout.plan.dp * self.layout.plan.cp  # which all find the same
        busiest = self._balance_experts() * layers / ranks if self.blocks else zero
        return torch.stack([x.float() / shares for x in (total.sum(), mean, busiest)])

    @torch.no_grad()
    def _balance_experts(self) -> Tensor:
        """How much more than the mean the busiest expert got. Biased routers favor those that got less from now on."""
        loads = torch.stack([block.load for block in self.blocks])
        for group in (self.layout.data, self.layout.groups.context):
            if group is not None:
                dist.all_reduce(loads, group=group)
        excess = loads / loads.float().mean(1, keepdim=True).clamp(min=1.0)
        for block, over in zip(self.blocks, excess, strict=True):
            if block.of.correction and self.bias_rate:
                block.gate.e_score_correction_bias -= self.bias_rate * (over - 1).sign()
        return excess.amax(1).mean()

    def update(self) -> Tensor:
        hand_over_gradients(self.held, self.sums)
        first: Any = self.optimizers[0]
        fused = getattr(first, "max_norm", None) is not None
        if not fused:
            norm = gradient_norm(self.held, self.world, self.layout.device)
            if self.clip > 0:
                scale_gradients(self.held, norm, self.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        if fused:
            norm = first.norm
        for one in self.held:
            one.param.grad = one.part.grad = None
        for total in self.sums.values():
            total.zero_()
        return norm

    def _keep_sums(self) -> None:
        """Add each gradient to a float32 sum as soon as a micro-batch has made it, and let go of it."""
        self._hooked = True
        for one in self.held:
            grad = one.param.to_local() if hasattr(one.param, "to_local") else one.param
            total = self.sums[one.block.name] = torch.zeros_like(grad, dtype=torch.float32)

            def add(param: Tensor, total: Tensor = total) -> None:
                assert param.grad is not None
                total.add_(local_gradient(param, param.grad))
                param.grad = None

            one.param.register_post_accumulate_grad_hook(add)

    def _pipelined(self, batch: Batch, losses: list[Tensor], schedule: str | None = None) -> None:
        made = self._schedules.get(batch.num_micro)
        if made is None:
            made = self._schedules[batch.num_micro] = self._schedule(batch)
        kwargs = {name: tensor.flatten(0, 1) for name, tensor in batch.tensors.items() if name != "x"}
        kwargs |= {"longest": batch.longest, "longest_key": batch.longest_key}
        args = (batch.tensors["x"].flatten(),) if self.parts[0].embed_tokens is not None else ()
        last = self.parts[-1].lm_head is not None
        count = torch.full((batch.num_micro,), float(batch.num_targets), device=self.layout.device)
        made.step(
            *args, **kwargs, target=count if last else None, losses=losses if last else None, return_outputs=False
        )

    def _schedule(self, batch: Batch) -> Any:
        from torch.distributed import pipelining

        plan, config = self.layout.plan, self.parts[0].config
        tokens = batch.tensors["x"].shape[1]
        dtype = torch.bfloat16 if any(o.param.dtype == torch.bfloat16 for o in self.held) else torch.float32
        stages = []
        for chunk, part in enumerate(self.parts):
            hidden = torch.empty(tokens, config.hidden, dtype=dtype, device="meta", requires_grad=True)
            index, num = self.layout.stage + chunk * plan.pp, plan.pp * plan.vp
            given = torch.empty(tokens, dtype=torch.int64, device="meta") if index == 0 else hidden
            made = torch.empty(1, device="meta", requires_grad=True) if index == num - 1 else hidden
            stages.append(pipelining.PipelineStage(
                part, index, num, self.layout.device, input_args=(given,), output_args=(made,),
                group=self.layout.pipeline,
            ))  # fmt: skip
        options: dict[str, Any] = {"loss_fn": lambda loss, count: loss.sum() / count[0], "scale_grads": False}
        if plan.vp > 1:
            return pipelining.ScheduleInterleaved1F1B(stages, batch.num_micro, **options)
        kind = pipelining.ScheduleGPipe if plan.schedule == "gpipe" else pipelining.Schedule1F1B
        return kind(stages[0], batch.num_micro, **options)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """The sum of the loss over this rank's part of a batch, without gradients."""
        for part in self.parts:
            part.eval()
        if self.layout.plan.pp > 1:
            with torch.enable_grad():  # the schedule runs stages as in training; no gradient is kept
                losses: list[Tensor] = []
                self._pipelined(batch, losses)
            for one in self.held:
                one.param.grad = None
            total = torch.stack([loss.detach().sum() for loss in losses]).sum() * batch.num_targets if losses else None
        else:
            total = torch.stack([self.parts[0](**batch.micro(i)).sum() for i in range(batch.num_micro)]).sum()
        for part in self.parts:
            part.train()
        found = torch.zeros((), device=self.layout.device) if total is None else total.float() / self.layout.plan.tp
        if self.world > 1:
            dist.all_reduce(found)
        return found


class _Graphs:
    """Whole steps captured as CUDA graphs, one for each shape of a batch. Inputs are copied into fixed tensors."""

    def __init__(self, step: TrainStep) -> None:
        self.step = step
        self._made: dict[Any, tuple[Any, Batch, Tensor, Tensor, Tensor]] = {}
        self._pool: Any = None
        self._warm = 0

    def run(self, batch: Batch) -> StepResult:
        shapes = {name: tuple(tensor.shape) for name, tensor in batch.tensors.items()}
        key = (*sorted(shapes.items()), batch.longest, batch.longest_key)
        made = self._made.get(key)
        if made is None:
            # Steps before the first capture make the optimizer's states and choose kernels: they count as steps
            if self._warm < 3:
                self._warm += 1
                return self._eager(batch)
            made = self._made[key] = self._capture(batch)
            return self._replay(made, batch)
        return self._replay(made, batch)

    def _eager(self, batch: Batch) -> StepResult:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            stats = self.step.compute(batch)
            norm = self.step.update()
        torch.cuda.current_stream().wait_stream(side)
        return StepResult(stats[0], stats[1], stats[2], norm)

    def _capture(self, batch: Batch) -> tuple[Any, Batch, Tensor, Tensor, Tensor]:
        fixed = Batch({n: t.clone() for n, t in batch.tensors.items()}, batch.longest, batch.longest_key, 1)
        count = torch.ones((), device=self.step.layout.device)
        fixed.num_targets = count  # type: ignore[assignment]  # divided by on the device
        graph = torch.cuda.CUDAGraph()
        for optimizer in self.step.optimizers:
            generator = getattr(optimizer, "generator", None)
            if generator is not None:
                graph.register_generator_state(generator)
        with torch.cuda.graph(graph, pool=self._pool):
            stats = self.step.compute(fixed)
            norm = self.step.update()
        self._pool = graph.pool()
        return graph, fixed, count, stats, norm

    def _replay(self, made: tuple[Any, Batch, Tensor, Tensor, Tensor], batch: Batch) -> StepResult:
        graph, fixed, count, stats, norm = made
        for name, tensor in batch.tensors.items():
            fixed.tensors[name].copy_(tensor, non_blocking=True)
        count.fill_(batch.num_targets)
        graph.replay()
        loss, balance, busiest = stats.clone()
        return StepResult(loss, balance, busiest, norm.clone())
