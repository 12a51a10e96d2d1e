"""AdamW as it is meant, in the precision of its inputs; PyTorch's own form; and kernels that would be wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 256
"""Elements that share a scale of their eight-bit moments."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The numbers of an AdamW step."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2
    maximize: bool = False


def step(p: Tensor, g: Tensor, m: Tensor, v: Tensor, num: float, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """(parameter, first and second moment) after step ``num``."""
    g = -g if rule.maximize else g
    m = m * rule.beta1 + g * (1 - rule.beta1)
    v = v * rule.beta2 + g * g * (1 - rule.beta2)
    step_size = rule.lr / (1 - rule.beta1**num)
    root = math.sqrt(1 - rule.beta2**num)
    return p * (1 - rule.lr * rule.weight_decay) - step_size * m / (v.sqrt() / root + rule.eps), m, v


def coded(m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Moments in eight bits: (codes of m, codes of v, scales of m, scales of v)."""
    m_blocks, v_blocks = blocks(m), blocks(v)
    m_scale, v_scale = m_blocks.abs().amax(1, keepdim=True), v_blocks.amax(1, keepdim=True)
    m_share = m_blocks.abs() / m_scale.masked_fill(m_scale == 0, 1.0)
    v_share = v_blocks / v_scale.masked_fill(v_scale == 0, 1.0)
    m_code = (127 * m_share.sqrt() + 0.5).floor().to(torch.int8)
    m_code = torch.where(m_blocks < 0, -m_code, m_code)
    v_code = (255 * v_share.sqrt().sqrt() + 0.5).floor().clamp_min((v_blocks > 0).to(v.dtype)).to(torch.uint8)
    size = m.numel()
    return (
        m_code.reshape(-1)[:size].reshape(m.shape), v_code.reshape(-1)[:size].reshape(v.shape),
        m_scale.reshape(-1), v_scale.reshape(-1),
    )  # fmt: skip


def decoded(m: Tensor, v: Tensor, m_scale: Tensor, v_scale: Tensor) -> tuple[Tensor, Tensor]:
    """What the codes stand for."""
    m_share, v_share = blocks(m.to(m_scale.dtype)) / 127, blocks(v.to(v_scale.dtype)) / 255
    wide_m = (m_share * m_share.abs() * m_scale.reshape(-1, 1)).reshape(-1)[: m.numel()]
    wide_v = (v_share.square().square() * v_scale.reshape(-1, 1)).reshape(-1)[: v.numel()]
    return wide_m.reshape(m.shape), wide_v.reshape(v.shape)


def blocks(x: Tensor) -> Tensor:
    """Rows of 256 elements, the last filled up with zeros."""
    flat = x.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % GROUP)).reshape(-1, GROUP)


def eager(p: Tensor, g: Tensor, m: Tensor, v: Tensor, num: float, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """``torch.optim.AdamW`` over a parameter in float32, its fused form where it runs."""
    param = torch.nn.Parameter(p.float().clone())
    param.grad = g.float().clone()
    betas = (rule.beta1, rule.beta2)
    made = torch.optim.AdamW(
        [param], rule.lr, betas, rule.eps, rule.weight_decay, maximize=rule.maximize, fused=True
    )  # fmt: skip
    counted = torch.tensor(num - 1.0, device=p.device)
    made.state[param] = {"step": counted, "exp_avg": m.float().clone(), "exp_avg_sq": v.float().clone()}
    made.step()
    state = made.state[param]
    return param.detach().to(p.dtype), state["exp_avg"].to(m.dtype), state["exp_avg_sq"].to(v.dtype)


def coupled(p: Tensor, g: Tensor, m: Tensor, v: Tensor, num: float, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """Decay added to the gradient, as Adam does it."""
    without = Rule(rule.lr, rule.beta1, rule.beta2, rule.eps, 0.0, rule.maximize)
    return step(p, g + rule.weight_decay * p, m, v, num, without)


def uncorrected(p: Tensor, g: Tensor, m: Tensor, v: Tensor, num: float, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """No bias correction."""
    return step(p, g, m, v, 1e9, rule)


def behind(p: Tensor, g: Tensor, m: Tensor, v: Tensor, num: float, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """Bias corrected by the next step's powers."""
    return step(p, g, m, v, num + 1, rule)


def misscaled(p: Tensor, g: Tensor, m: Tensor, v: Tensor, num: float, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """Codes read with their neighbors' scales."""
    p, m, v = step(p, g, m, v, num, rule)
    m_code, v_code, m_scale, v_scale = coded(m, v)
    return p, *decoded(m_code, v_code, m_scale.roll(1), v_scale.roll(1))
