"""AdamW over lists of tensors: steps counted, gradients clipped and everything updated without a word from the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ridgeline.errors import KernelError
from ridgeline.kernels import tensor_lists, tuning
from ridgeline.kernels.adamw import config, kernel, reference
from ridgeline.kernels.adamw.reference import Rule
from ridgeline.kernels.contract import DTYPES, Case, Laps, Trial, case, declare
from ridgeline.kernels.grad_norm import reference as norm_reference
from ridgeline.kernels.grad_norm.op import NormPlan, list_reason, sizes_of, split, with_grads
from ridgeline.kernels.launcher import INTERPRETING, Kernel, Plans, launchable
from ridgeline.kernels.rows import cdiv

_PREPARE = Kernel(kernel.adamw_prepare)
_UPDATE = Kernel(kernel.adamw_update, vectors=("length",))
_UPDATE_8BIT = Kernel(kernel.adamw_update_8bit, vectors=("length",))
_plans = Plans()
PREPARE_BLOCK, SHARES = 128, 4096


@dataclass(frozen=True, slots=True)
class State:
    """What AdamW keeps for a parameter; scales are there where the moments have eight bits."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    master: Tensor | None = None
    exp_avg_scale: Tensor | None = None
    exp_avg_sq_scale: Tensor | None = None

    @property
    def bits(self) -> int:
        """Of a moment: 32, 8 with scales, or 16 where they have the type of a 16-bit parameter."""
        return 8 * self.exp_avg.element_size()


@dataclass(frozen=True, slots=True)
class Scaling:
    """A gradient scaler's two numbers, on the device."""

    found_inf: Tensor
    grad_scale: Tensor


class UpdatePlan:
    """The update of one list of parameters with their states: one launch for all that are alike."""

    def __init__(self, params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[State]) -> None:
        self.device, on = params[0].get_device(), params[0].device
        total = sum(p.numel() for p in params)
        kinds = [_kind(p, g, state) for p, g, state in zip(params, grads, states, strict=True)]
        bits = min(state.bits for state in states)
        self.chosen = tuning.choose("adamw", {"total": total, "bits": bits}, config.update(bits))
        block = max(self.chosen.block, reference.GROUP)
        length = tensor_lists.chunk_length(total, block, self.chosen.longest, self.device)
        self.layout = tensor_lists.Layout(kinds, [p.numel() for p in params], length, on)
        self.rows = [tensor_lists.numbers(_table(group, params, states), on) for group in self.layout.groups]
        self.factors = [
            torch.empty(3 * len(group.members), dtype=torch.float32, device=on) for group in self.layout.groups
        ]
        self.shared = torch.empty(3, dtype=torch.float32, device=on)
        firsts = [states[group.members[0]].exp_avg for group in self.layout.groups]
        self.likes = [torch.empty(8, dtype=moment.dtype, device=on) for moment in firsts]
        self._prepares: dict[Any, list[Any]] = {}
        self._updates: dict[tuple[bool, bool], list[Any]] = {}
        self.early = not INTERPRETING

    def run(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        tables: Sequence[Tensor],
        share: Tensor | None,
        rule: Rule,
        max_norm: float,
        lr: Tensor | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        """Count, work out factors, update; the norm is left in ``shared[0]`` where ``share`` has its parts."""
        prepares, updates = self.bind(params, grads, share, lr, scaling, rule.maximize)
        none = self.shared
        numbers = (max_norm, rule.lr, rule.weight_decay, math.log2(rule.beta1), math.log2(rule.beta2))
        for prepare, rows, factors, group in zip(prepares, self.rows, self.factors, self.layout.groups, strict=True):
            prepare(
                rows, factors, self.shared, none if share is None else share, none if lr is None else lr,
                none if scaling is None else scaling.found_inf, none if scaling is None else scaling.grad_scale,
                len(group.members), 0 if share is None else share.numel(), *numbers,
            )  # fmt: skip
        weights = (rule.beta1, 1 - rule.beta1, rule.beta2, 1 - rule.beta2, rule.eps)
        for update, rows, factors, table, group, like in zip(
            updates, self.rows, self.factors, tables, self.layout.groups, self.likes, strict=True
        ):
            i, kinds = group.members[0], () if like.element_size() == 1 else (like,)
            update(
                rows, table, group.sizes, group.chunks.table, factors, self.shared, params[i], grads[i], *kinds,
                group.chunks.length, *weights,
            )  # fmt: skip

    def bind(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], share: Tensor | None, lr: Tensor | None,
        scaling: Scaling | None, maximize: bool,
    ) -> tuple[list[Any], list[Any]]:  # fmt: skip
        """The launches for arguments of these kinds, ready to be made."""
        key = (share is not None, None if lr is None else lr.dtype, scaling is not None)
        if key not in self._prepares:
            self._prepares[key] = [self._bind_prepare(i, lr, *key) for i in range(len(self.rows))]
        kind = (maximize, share is not None)
        if kind not in self._updates:
            self._updates[kind] = [self._bind_update(i, params, grads, *kind) for i in range(len(self.rows))]
        return self._prepares[key], self._updates[kind]

    def _bind_prepare(self, i: int, lr: Tensor | None, clip: bool, lr_type: Any, scaled: bool) -> Any:
        none = self.shared
        num = len(self.layout.groups[i].members)
        return _PREPARE.bind(
            (self.rows[i], self.factors[i], none, none, none if lr is None else lr, none, none, num, 1, *(0.5,) * 5),
            grid=(cdiv(num, PREPARE_BLOCK),),
            constants={"CLIP": clip, "LR_TENSOR": lr_type is not None, "SCALED": scaled, "BLOCK": PREPARE_BLOCK,
                       "SHARES": SHARES, "EARLY": self.early, "DEPENDENT": self.early and clip},
            num_warps=4,
            device=self.device,
        )  # fmt: skip

    def _bind_update(
        self, i: int, params: Sequence[Tensor], grads: Sequence[Tensor], maximize: bool, clip: bool
    ) -> Any:
        group = self.layout.groups[i]
        kind: Any = group.kind
        _, _, master, bits, is_aligned = kind
        first, sizes, chunks = group.members[0], group.sizes, group.chunks
        kinds: tuple[Tensor, ...] = ()
        constants = {"MASTER": master, "MAXIMIZE": maximize, "ALIGNED": is_aligned, "BACKWARDS": clip,
                     "DEPENDENT": self.early}  # fmt: skip
        if bits > 8:  # where all streams have 16 bits, lanes read eight elements of each
            narrow = not master and max(params[first].element_size(), grads[first].element_size(), bits // 8) == 2
            kinds, constants["LANE"] = (self.likes[i],), 8 if narrow else 4
        return (_UPDATE_8BIT if bits == 8 else _UPDATE).bind(
            (self.rows[i], sizes, sizes, chunks.table, self.factors[i], self.shared, params[first], grads[first],
             *kinds, chunks.length, *(0.5,) * 5),
            grid=(chunks.num,),
            constants={**constants, "BLOCK": self.chosen.block},
            num_warps=self.chosen.num_warps,
            device=self.device,
            vector=16,
        )  # fmt: skip


def _kind(p: Tensor, g: Tensor, state: State) -> tuple[Any, ...]:
    """What a launch may not mix: types, whether there is a master, bits of the moments, alignment."""
    all_of = [p, g, state.exp_avg, state.exp_avg_sq, *([] if state.master is None else [state.master])]
    is_aligned = all(t.data_ptr() % 16 == 0 for t in all_of)
    return p.dtype, g.dtype, state.master is not None, state.bits, is_aligned


def _table(group: tensor_lists.Group, params: Sequence[Tensor], states: Sequence[State]) -> list[int]:
    found: list[int] = []
    for i in group.members:
        s = states[i]
        row = (params[i], s.exp_avg, s.exp_avg_sq, s.master, s.exp_avg_scale, s.exp_avg_sq_scale, s.step)
        found += [0 if t is None else t.data_ptr() for t in row]
    return found


def state_reason(params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[State]) -> str | None:
    """Why these cannot be updated by kernels, or None."""
    reason = list_reason([*params, *grads])
    if reason is not None:
        return reason
    for i, (p, g, s) in enumerate(zip(params, grads, states, strict=True)):
        like = [g, *([] if s.master is None else [s.master]), s.exp_avg, s.exp_avg_sq]
        if any(t.shape != p.shape or t.stride() != p.stride() for t in like):
            return f"parameter {i}, its gradient and its state differ in shape or in the order of their elements"
        kinds = {s.exp_avg.dtype, s.exp_avg_sq.dtype}
        if s.exp_avg_scale is None and kinds not in ({torch.float32}, {p.dtype}):
            return (f"the moments of parameter {i} are {s.exp_avg.dtype}; they are float32, of the parameter's type, "
                    "or int8 and uint8 codes")  # fmt: skip
        if s.step.dtype != torch.float32 or s.step.numel() != 1:
            return f"the step of parameter {i} is no float32 scalar"
    return None


def update_on_host(p: Tensor, g: Tensor, state: State, rule: Rule, factor: Tensor | float) -> None:
    """The reference in float32, in place: what runs where there is no kernel."""
    state.step.add_(1)
    m, v = state.exp_avg, state.exp_avg_sq
    if state.exp_avg_scale is not None and state.exp_avg_sq_scale is not None:
        m, v = reference.decoded(m, v, state.exp_avg_scale, state.exp_avg_sq_scale)
    old = p if state.master is None else state.master
    new, m, v = reference.step(old.float(), g.float() * factor, m.float(), v.float(), float(state.step), rule)
    p.copy_(new)
    if state.master is not None:
        state.master.copy_(new)
    if state.exp_avg_scale is None or state.exp_avg_sq_scale is None:
        state.exp_avg.copy_(m)
        state.exp_avg_sq.copy_(v)
        return
    codes = reference.coded(m, v)
    targets = (state.exp_avg, state.exp_avg_sq, state.exp_avg_scale, state.exp_avg_sq_scale)
    for target, value in zip(targets, codes, strict=True):
        target.copy_(value)


# --- the functional form -----------------------------------------------------------------------------------------


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    max_norm: float | None = None,
    maximize: bool = False,
) -> Tensor:
    """One AdamW step over lists, in place; moments and steps are float32 whatever the parameters are.

    With ``max_norm`` gradients count as clipped to it, without being written; returns their norm (zero without).
    """
    lists_of = (list(params), list(grads), list(exp_avgs), list(exp_avg_sqs), list(state_steps))
    numbers = (lr, beta1, beta2, eps, weight_decay, -1.0 if max_norm is None else max_norm)
    args: tuple[Any, ...] = (*lists_of, *map(float, numbers), maximize)
    return ADAMW.op(*args) if is_dynamo_compiling() else _adamw(*args)


def _adamw(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    steps: list[Tensor], lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, max_norm: float,
    maximize: bool,
) -> Tensor:  # fmt: skip
    rule = Rule(lr, beta1, beta2, eps, weight_decay, maximize)
    states = [State(m, v, step) for m, v, step in zip(exp_avgs, exp_avg_sqs, steps, strict=True)]
    return stepped(params, grads, states, rule, max_norm)


class Steps:
    """Steps without clipping over parameters and states that stay where they are; gradients may lie anywhere.

    Raises KernelError where kernels cannot take them. Kernels are compiled and loaded here, for rates that are numbers
    and for rates in float32 on the device, and only tables are held: a call launches, and may be recorded.
    """

    def __init__(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[State], maximize: bool = False
    ) -> None:
        reason = state_reason(params, grads, states)
        if reason is not None:
            raise KernelError(f"adamw: {reason}")
        self._plan = UpdatePlan(params, grads, states)
        self._kinds = [[torch.empty(8, dtype=t.dtype, device=t.device) for t in each] for each in (params, grads)]
        for rate in (None, torch.zeros((), device=params[0].device)):
            self._plan.bind(self._kinds[0], self._kinds[1], None, rate, None, maximize)

    def tables(self, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Where these gradients lie, on the device: of the types and alignment of the first ones."""
        return self._plan.layout.tables(tensor_lists.addresses(grads))

    def __call__(self, tables: Sequence[Tensor], rule: Rule, lr: Tensor | None = None) -> None:
        self._plan.run(self._kinds[0], self._kinds[1], tables, None, rule, -1.0, lr)


def stepped(params: list[Tensor], grads: list[Tensor], states: list[State], rule: Rule, max_norm: float) -> Tensor:
    """One step over lists; ``max_norm`` below zero: no clipping. Returns the norm."""
    if not params:
        return torch.zeros(())
    if not launchable(params[0]):
        return on_host(params, grads, states, rule, max_norm)
    found = tensor_lists.addresses(grads)
    key = (
        tensor_lists.addresses(params), tensor_lists.addresses([s.master for s in states if s.master is not None]),
        tuple(address & 15 for address in found), params[0].get_device(),
        tuple((p.dtype, g.dtype, p.numel()) for p, g in zip(params, grads, strict=True)),
        *(tensor_lists.addresses([getattr(s, name) for s in states]) for name in ("exp_avg", "exp_avg_sq", "step")),
    )  # fmt: skip
    known = _plans.get(key)
    if known is None:
        reason = state_reason(params, grads, states)
        if reason is not None:
            raise KernelError(f"adamw: {reason}")
        known = _plans[key] = (UpdatePlan(params, grads, states), NormPlan(grads, found))
    plan, norm = known
    share = norm.shares(grads, norm.layout.tables(found)) if max_norm >= 0 else None
    plan.run(params, grads, plan.layout.tables(found), share, rule, max_norm)
    return plan.shared[0].clone()


def on_host(params: list[Tensor], grads: list[Tensor], states: list[State], rule: Rule, max_norm: float) -> Tensor:
    norm, factor = torch.zeros((), device=params[0].device), 1.0
    if max_norm >= 0:
        norm = norm_reference.norm(grads).to(torch.float32)
        factor = float((max_norm / (norm + 1e-6)).clamp(max=1.0))
    for p, g, state in zip(params, grads, states, strict=True):
        update_on_host(p, g, state, rule, factor)
    return norm


def _adamw_8bit(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    exp_avg_scales: list[Tensor], exp_avg_sq_scales: list[Tensor], steps: list[Tensor], lr: float, beta1: float,
    beta2: float, eps: float, weight_decay: float, max_norm: float, maximize: bool,
) -> Tensor:  # fmt: skip
    rule = Rule(lr, beta1, beta2, eps, weight_decay, maximize)
    columns = zip(exp_avgs, exp_avg_sqs, steps, exp_avg_scales, exp_avg_sq_scales, strict=True)
    states = [State(m, v, step, None, m_scale, v_scale) for m, v, step, m_scale, v_scale in columns]
    return stepped(params, grads, states, rule, max_norm)


# --- the declaration ---------------------------------------------------------------------------------------------

RULE = Rule(lr=1e-2, weight_decay=0.1)
"""What trials step with: large enough that every term shows."""


def _fake(params: Sequence[Tensor], *_: Any) -> Tensor:
    return params[0].new_empty((), dtype=torch.float32)


def _cost(num_lists: int) -> Any:
    """Everything is read once; all but the gradients, the second list, is written once."""

    def cost(inputs: tuple[Any, ...], outputs: tuple[Any, ...], **_: Any) -> dict[str, float]:
        num = len(inputs) // num_lists
        read = sum(t.num_bytes for t in inputs)
        grads = inputs[num : 2 * num]
        written = read - sum(t.num_bytes for t in grads)
        return {"flops": 14.0 * sum(t.numel for t in grads), "read_bytes": read, "written_bytes": written}

    return cost


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    sizes, dtype = sizes_of(of), getattr(torch, of.dtype)

    def drawn() -> Tensor:
        return torch.randn(sum(sizes), device=on, dtype=torch.float32, generator=generator)

    p, g, m, v = drawn(), drawn(), 0.3 * drawn(), 0.5 * drawn().square()
    if of.get("own", False):  # moments of the parameter's type, as torch.optim.AdamW keeps them
        m, v = m.to(dtype), v.to(dtype)
    return p.to(dtype), g.to(dtype), m, v, sizes, of.get("step", 10), of["max_norm"], of.get("master", False)


def _call(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, sizes: tuple[int, ...], num: int, max_norm: float, master: bool,
    bits: int = 32,
) -> tuple[Tensor, ...]:  # fmt: skip
    """One step from step ``num - 1`` on copies: (parameters, moments, norm)."""
    params, grads, ms, vs = (split(t.detach(), sizes) for t in (p, g, m, v))
    steps = [torch.full((), num - 1.0, device=p.device) for _ in sizes]
    masters = [one.float() if master else None for one in params]
    if bits == 32:
        states = [State(*each) for each in zip(ms, vs, steps, masters, strict=True)]
    else:
        codes = [reference.coded(a, b) for a, b in zip(ms, vs, strict=True)]
        columns = zip(codes, steps, masters, strict=True)
        states = [State(c[0], c[1], step, one, c[2], c[3]) for c, step, one in columns]
    norm = stepped(params, grads, states, RULE, max_norm)
    if bits == 8:
        pairs = [reference.decoded(s.exp_avg, s.exp_avg_sq, s.exp_avg_scale, s.exp_avg_sq_scale) for s in states]  # type: ignore[arg-type]
        ms, vs = [a for a, _ in pairs], [b for _, b in pairs]
    return torch.cat(params), torch.cat(ms), torch.cat(vs), norm


def _clipped(g: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
    if max_norm < 0:
        return g, torch.zeros((), dtype=torch.float32, device=g.device)
    wide = g if g.dtype == torch.float64 else g.float()
    norm = wide.norm()
    return wide * (max_norm / (norm + 1e-6)).clamp(max=1.0), norm


def _form(run: Any, bits: int, rounded: bool) -> Any:
    """A reference of one tensor as a function of the trial's arguments; eight-bit moments where asked."""

    def flat_form(
        p: Tensor, g: Tensor, m: Tensor, v: Tensor, sizes: tuple[int, ...], num: int, max_norm: float, _: bool
    ) -> tuple[Tensor, ...]:
        clipped, norm = _clipped(g, max_norm)
        parts = [split(t, sizes) for t in (p, clipped, m, v)]
        found = []
        for one_p, one_g, one_m, one_v in zip(*parts, strict=True):
            if bits == 8:
                one_m, one_v = reference.decoded(*reference.coded(one_m, one_v))
            one_p, one_m, one_v = run(one_p, one_g, one_m, one_v, num, RULE)
            if bits == 8 and rounded:
                one_m, one_v = reference.decoded(*reference.coded(one_m, one_v))
            found.append((one_p, one_m, one_v))
        return *(torch.cat([each[i] for each in found]) for i in range(3)), norm

    return flat_form


def _params(sizes: Sequence[int], dtype: torch.dtype, on: torch.device, generator: Any) -> list[Tensor]:
    return with_grads(sizes, dtype, on, generator)


def _laps(of: Case, on: torch.device, generator: torch.Generator) -> Laps:
    """Ours against ``torch.optim.AdamW(fused=True)``, with ``clip_grad_norm_`` before it where gradients are clipped.

    Parameters of 16 bits have a master copy here; PyTorch's way to the same is a step on float32 copies.
    """
    from ridgeline.kernels.adamw.optimizer import AdamW

    sizes, dtype, bits = sizes_of(of), getattr(torch, of.dtype), of.get("bits", 32)
    if of.get("own", False):
        return _own_laps(sizes, dtype, on, generator)
    bound = of["max_norm"] if of["max_norm"] >= 0 else None
    narrow = dtype != torch.float32
    ours = _params(sizes, dtype, on, generator)
    made = AdamW(ours, 1e-4, max_norm=bound, state_bits=bits, master_weights=narrow)
    theirs = _params(sizes, torch.float32, on, generator)
    fused = torch.optim.AdamW(theirs, 1e-4, fused=True)
    sources = [(p.detach().to(dtype), p.grad.to(dtype)) for p in theirs] if narrow else []  # type: ignore[union-attr]

    def eager() -> None:
        if narrow:
            torch._foreach_copy_([p.grad for p in theirs], [g for _, g in sources])
        if bound is not None:
            torch.nn.utils.clip_grad_norm_(theirs, bound)
        fused.step()
        if narrow:
            torch._foreach_copy_([p for p, _ in sources], [p.detach() for p in theirs])

    item, total = dtype.itemsize, sum(sizes)
    moments = 16 if bits == 32 else 4
    moved = total * (item + moments + (2 * item if not narrow else item + 8) + (item if bound is not None else 0))
    return Laps({"ridgeline": made.step, "eager": eager}, moved)


def _own_laps(sizes: Sequence[int], dtype: torch.dtype, on: torch.device, generator: torch.Generator) -> Laps:
    """Moments of the parameters' type on both sides: what ``torch.optim.AdamW`` does with 16-bit parameters.

    Steps know where tensors lie and hold none of them: let go, ours would become PyTorch's moments, and a variance that
    is another's mean, negative, takes the slow way through roots and divisions.
    """
    ours, theirs = (_params(sizes, dtype, on, generator) for _ in range(2))
    states = [State(torch.zeros_like(p), torch.zeros_like(p), torch.zeros((), device=on)) for p in ours]
    grads = [p.grad for p in ours if p.grad is not None]
    steps = Steps([p.detach() for p in ours], grads, states)
    tables = steps.tables(grads)
    fused = torch.optim.AdamW(theirs, 1e-4, fused=True)

    def step(held: Any = (ours, grads, states)) -> None:
        steps(tables, RULE)

    return Laps({"ridgeline": step, "eager": fused.step}, 7 * dtype.itemsize * sum(sizes))


CHECKS = tuple(
    case(dtype, list=name, step=num, max_norm=bound, master=master and dtype != "float32")
    for dtype in DTYPES
    for name, num, bound, master in (("odd", 1, -1.0, False), ("odd", 3, 1.0, True), ("few", 1000, 1e4, False))
)
OWN_CHECKS = tuple(
    case(dtype, list=name, step=num, max_norm=-1.0, own=True)
    for dtype in ("bfloat16", "float16")
    for name, num in (("odd", 3), ("few", 1000))
)
CONSTANTS = (0, 1, 2, 3)
RACES = (
    case("float32", list="gpt2", max_norm=-1.0), case("float32", list="gpt2", max_norm=1.0),
    case("float32", list="resnet50", max_norm=-1.0), case("bfloat16", list="llama1b", max_norm=-1.0, master=True),
    case("bfloat16", list="llama1b", max_norm=1.0, master=True),
    case("bfloat16", list="llama1b", max_norm=-1.0, own=True), case("bfloat16", list="gpt2", max_norm=-1.0, own=True),
)  # fmt: skip

ADAMW = declare(
    name="adamw",
    summary="an AdamW step over a list of parameters in one launch, gradients clipped on the way",
    schema="(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs,"
    " Tensor(d!)[] state_steps, float lr, float beta1, float beta2, float eps, float weight_decay, float max_norm,"
    " bool maximize) -> Tensor",
    forward=_adamw,
    fake=_fake,
    reference=reference.step,
    support=lambda params, grads, *_: list_reason([*params, *grads]),
    cost=_cost(5),
    trial=Trial(
        make=_make,
        call=_call,
        eager=_form(reference.eager, 32, True),
        reference=_form(reference.step, 32, True),
        mistakes={
            "decay in the gradient": _form(reference.coupled, 32, True),
            "bias not corrected": _form(reference.uncorrected, 32, True),
            "one step behind": _form(reference.behind, 32, True),
        },
        checks=CHECKS + OWN_CHECKS,
        races=RACES,
        small=(case("float32", list="head", max_norm=-1.0),),
        phases=("fwd",),
        constants=CONSTANTS,
        laps=_laps,
        layouts=False,
    ),
)
ADAMW_8BIT = declare(
    name="adamw_8bit",
    summary="an AdamW step with moments in eight bits and a scale for every 256 of them",
    schema="(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs,"
    " Tensor(d!)[] exp_avg_scales, Tensor(e!)[] exp_avg_sq_scales, Tensor(f!)[] state_steps, float lr, float beta1,"
    " float beta2, float eps, float weight_decay, float max_norm, bool maximize) -> Tensor",
    forward=_adamw_8bit,
    fake=_fake,
    reference=reference.step,
    support=lambda params, grads, *_: list_reason([*params, *grads]),
    cost=_cost(7),
    trial=Trial(
        make=_make,
        call=partial(_call, bits=8),
        eager=_form(reference.eager, 8, True),
        reference=_form(reference.step, 8, False),
        mistakes={
            "decay in the gradient": _form(reference.coupled, 8, True),
            "codes of another scale": _form(reference.misscaled, 8, False),
        },
        checks=CHECKS,
        times_eager=1.1,
        races=(
            case("float32", list="gpt2", max_norm=-1.0, bits=8),
            case("bfloat16", list="llama1b", max_norm=1.0, bits=8, master=True),
        ),
        phases=("fwd",),
        constants=CONSTANTS,
        laps=_laps,
        layouts=False,
    ),
)
