"""What a step should cost: floating-point operations a token, the device's peak, our prediction of the same step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from ridgeline.graph import Graph
from ridgeline.hardware import Device
from ridgeline.llm.model.config import ModelConfig
from ridgeline.llm.model.decoder import Decoder, packed_inputs
from ridgeline.llm.train.precision import prepare_modules
from ridgeline.llm.train.recompute import MODES, set_recompute
from ridgeline.llm.train.settings import Settings


def flops_per_token(config: ModelConfig, length: int) -> float:
    """Of forward and backward: six a weight that a token meets, and the products of causal attention, counted half."""
    hidden, heads = config.hidden, config.num_heads
    weights, attention = float(config.vocab_size * hidden), 0.0
    for layer in range(config.num_layers):
        if (of := config.latent) is not None:
            query = hidden * of.q_rank + of.q_rank * heads * config.head_dim if of.q_rank else (
                hidden * heads * config.head_dim)  # fmt: skip
            weights += query + hidden * (of.kv_rank + of.rope_dim) + heads * of.value_dim * hidden
            weights += of.kv_rank * heads * (of.nope_dim + of.value_dim)
        else:
            weights += 2 * hidden * (heads + config.num_kv_heads) * config.head_dim
        moe = config.moe
        if moe is not None and config.is_moe(layer):
            weights += hidden * moe.num_experts + 3 * hidden * (moe.top_k * moe.intermediate + moe.shared_intermediate)
        else:
            weights += 3 * hidden * config.intermediate
        seen = length / 2
        if window := config.window(layer):
            seen = min(seen, window * (1 - window / (2 * length))) if window < length else seen
        attention += 2 * heads * (config.head_dim + config.value_dim) * seen
    return 6 * weights + 3 * attention


def device_model(device: torch.device) -> Device | None:
    """The device's data, where we have any of it."""
    if device.type != "cuda":
        return None
    from ridgeline.profiler.floors import device_called

    return device_called(torch.cuda.get_device_name(device))


@dataclass(frozen=True, slots=True)
class Forecast:
    """A step as predicted: time of all its micro-batches and its update, and the most memory it needs."""

    step_s: float
    peak_bytes: float
    recompute: str
    device: str
    usable_bytes: float  # of the device: the rest is the driver's, the libraries' and what lies between blocks

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.usable_bytes


def captured(
    config: ModelConfig,
    num_layers: int,
    length: int,
    micro: int,
    dtype: torch.dtype,
    change: Callable[[Decoder], None] = lambda part: None,
) -> Graph:
    """Forward and backward of a micro-batch through the last layers of a model, as a graph; ``change`` prepares it."""
    from ridgeline.capture import capture

    kinds = config.moe_layers[-num_layers:] if config.moe_layers else ()
    short = replace(config, num_layers=num_layers, moe_layers=kinds, windows=config.windows[:num_layers])
    model = Decoder(short, device="meta", dtype=dtype)
    change(model)
    tokens = torch.zeros(length * micro, dtype=torch.int64)
    return capture(
        model, (tokens,), {**packed_inputs([length] * micro), "targets": tokens}, mode="train", optimizer=None,
        loss=lambda loss: loss.sum(),
    )  # fmt: skip


def forecast(
    config: ModelConfig,
    length: int,
    micro: int,
    num_micro: int,
    device: Device,
    dtype: torch.dtype,
    recompute: str = "none",
    optimizer: str = "adamw",
    execution: str = "cudagraph",
    change: Callable[[Decoder], None] = lambda part: None,
) -> Forecast:
    """Predict one step of the whole model on one device.

    A model of one and one of two of its layers are captured and priced; the rest of the depth is their difference. The
    update is what the fused kernel moves, at nine tenths of the memory's bandwidth.
    """
    from ridgeline.cost.estimate import estimate

    def price(num_layers: int) -> tuple[float, float]:
        found = estimate(captured(config, num_layers, length, micro, dtype, change), device, execution)
        return found.expected_s, found.peak_bytes

    one, two = price(1), price(2)
    depth = config.num_layers - 1
    whole = Decoder(config)
    change(whole)
    num_params = sum(p.numel() for p in whole.parameters() if p.requires_grad)
    # Of a weight: moments, a float32 master of a narrow one, and where micro-batches add up a float32 sum
    wide = dtype == torch.float32
    state_bytes = (2 if optimizer == "adamw-8bit" else 8) + (0 if wide else 4)
    sum_bytes = 0 if wide or num_micro == 1 else 4
    moved_bytes = 2 * state_bytes + (8 if wide else 2) + (sum_bytes or dtype.itemsize)
    update_s = num_params * moved_bytes / (0.9 * device.dram.bandwidth_bytes_per_s)
    step_s = num_micro * (one[0] + (two[0] - one[0]) * depth) + update_s
    peak = one[1] + (two[1] - one[1]) * depth + num_params * (state_bytes + sum_bytes)
    return Forecast(step_s, peak, recompute, device.name, 0.94 * device.dram.capacity_bytes)


def forecasts(settings: Settings, config: ModelConfig, device: Device) -> Iterator[Forecast]:
    """One rank's step with as little recomputation as possible, then with more, or with what settings ask for.

    Ranks that share a model's tensors or layers take equal parts of its time and memory, without what they send.
    """
    plan, batch, compute = settings.plan, settings.batch, getattr(torch, settings.precision.compute)
    asked, shares = settings.recompute, plan.tp * plan.pp * plan.cp
    if asked == "auto" and plan.recompute != "none":
        asked = plan.recompute.partition(":")[0]
    for mode in MODES if asked == "auto" else (asked,):

        def change(part: Decoder, mode: str = mode) -> None:
            prepare_modules(part, settings)
            set_recompute(part, mode)

        one = forecast(
            config, batch.length, batch.micro, batch.sequences // (batch.micro * plan.dp), device, compute, mode,
            settings.optimizer.kind, "cudagraph" if settings.graph and plan.world == 1 else "eager", change,
        )  # fmt: skip
        yield replace(one, step_s=one.step_s / shares, peak_bytes=one.peak_bytes / shares)
