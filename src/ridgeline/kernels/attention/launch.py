"""Launches of attention's kernels: what depends on shapes alone is worked out once and kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels import launcher
from ridgeline.kernels.attention import config, gradient, kernel, order, reference
from ridgeline.kernels.launcher import INTERPRETING, Blocks, Kernel, Plans, carved, num_sms
from ridgeline.kernels.rows import cdiv, clamp, power_of_two, template

LOG2_E = math.log2(math.e)
ALIGNMENT_BYTES = 16
VECTOR = 8
"""16-byte accesses of 16-bit elements: head dims and row strides are multiples of it."""

_LOOSE = ("mask_ptr", "sink_ptr", "q_starts", "k_starts", "order")
_ORDER = Kernel(order.attention_order, loose=("starts_ptr", "order_ptr"))
_FORWARD = Kernel(kernel.attention_forward, vectors=("d", "o_b", "o_h", "o_l"), loose=_LOOSE)
_PREPARE = Kernel(
    gradient.attention_prepare, vectors=("d", "o_b", "o_h", "o_l", "do_b", "do_h", "do_l"), loose=("q_starts",)
)
_QUERIES = Kernel(gradient.attention_queries, vectors=("d", "g_b", "g_h", "g_l"), loose=_LOOSE)
_KEYS = Kernel(
    gradient.attention_keys,
    vectors=("d", "dv_dim", "dk_b", "dk_h", "dk_l", "dv_b", "dv_h", "dv_l"),
    loose=_LOOSE,
    dependent=True,
)
_FUSED = Kernel(
    gradient.attention_fused,
    vectors=("d", "dk_b", "dk_h", "dk_l", "dv_b", "dv_h", "dv_l"),
    loose=_LOOSE,
)
_ROUNDED = Kernel(gradient.attention_rounded, vectors=("d", "g_b", "g_h", "g_l"))
_SUM = Kernel(gradient.attention_sum, vectors=("size", "o_b", "o_h", "o_l", "d"))
_plans = Plans()


@dataclass(frozen=True, slots=True)
class Problem:
    """What a call asks for besides its tensors; ``longest_*`` are 0 where all sequences have one length."""

    is_causal: bool
    left: int
    right: int
    scale: float
    softcap: float
    shift: int
    longest_q: int = 0
    longest_k: int = 0
    deterministic: bool = True

    @property
    def band(self) -> int:
        """0: every key is seen; 1: a row's keys end somewhere; 2: they begin somewhere too."""
        return 2 if self.left >= 0 else 1 if self.is_causal or self.right >= 0 else 0

    def edges(self, rows: int, keys: int) -> tuple[int, int]:
        """Row i sees keys i + lo to i + hi."""
        right = 0 if self.is_causal else self.right
        far = rows + keys
        return self.shift - self.left if self.left >= 0 else -far, self.shift + right if right >= 0 else far

    @property
    def numbers(self) -> tuple[float, float]:
        """The factor of scores in base 2, and the one before the cap (which takes twice its argument, in base 2)."""
        if self.softcap:
            return self.softcap * LOG2_E, 2 * LOG2_E * self.scale / self.softcap
        return self.scale * LOG2_E, 0.0


def on_device(q: Tensor) -> bool:
    """These kernels run on a GPU only: Triton's interpreter does not know the instructions they are made of."""
    return (q.is_cuda or launcher.collects()) and not INTERPRETING


def arranged(x: Tensor, dim: int) -> Tensor:
    """An empty [batch, heads, rows, dim] tensor with heads inside rows where ``x`` has them there."""
    batch, heads, rows, _ = x.shape
    if heads > 1 and x.stride(1) < x.stride(2):
        return x.new_empty((batch, rows, heads, dim)).transpose(1, 2)
    return x.new_empty((batch, heads, rows, dim))


def reachable(x: Tensor) -> Tensor:
    """The tensor as the copy engine can read it: dense rows that start on 16 bytes; a copy where they do not."""
    if is_reachable(x):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def is_reachable(x: Tensor) -> bool:
    steps = [stride * x.element_size() for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
    if x.stride(3) != 1 or any(step % ALIGNMENT_BYTES or step == 0 for step in steps):
        return False
    return x.is_meta or x.data_ptr() % ALIGNMENT_BYTES == 0


def blocks(x: Tensor, rows: int, width: int) -> Blocks:
    """[1, 1, rows, width] blocks of a [batch, heads, rows, head dim] tensor in any layout."""
    strides = tuple(step if size > 1 else VECTOR for size, step in zip(x.shape, x.stride(), strict=True))
    return Blocks(x, tuple(x.shape), (*strides[:3], 1), (1, 1, rows, width))


def numbers(x: Tensor, num: int) -> Blocks:
    return Blocks(x, (x.numel(),), (1,), (num,))


def key_of(
    settings: tuple[Any, ...], tensors: tuple[Tensor, ...], extras: tuple[Tensor | None, ...]
) -> tuple[Any, ...]:
    """Everything a plan depends on; whether rows start on 16 bytes is asked of all addresses at once."""
    pointers = 0
    found: list[Any] = []
    for x in tensors:
        pointers |= x.data_ptr()
        found += (x.dtype, x.shape, x.stride())
    kinds = [None if x is None else (x.dtype, x.shape, x.stride()) for x in extras]
    return settings, tensors[0].get_device(), pointers % ALIGNMENT_BYTES, *found, *kinds


class Empty:
    """A [batch, heads, rows, dim] tensor to be made again and again; a dense one at half of what ``torch.empty`` costs
    the host, and any in one allocation that a repeated call can make again."""

    def __init__(self, like: Tensor) -> None:
        self.dense = like.is_contiguous()
        self.template, self.strides = template(like.shape, like.dtype, like.device), like.stride()

    def __call__(self) -> Tensor:
        if self.dense:
            return torch.empty_like(self.template)
        like = self.template
        return torch.empty_strided(like.shape, self.strides, dtype=like.dtype, device=like.device)


class Order:
    """The list of tiles of sequences of different length, made anew for every call: lengths are the device's."""

    def __init__(
        self, starts: Tensor, heads: int, rows: int, longest: int, block: int, group: int, *, backwards: bool
    ) -> None:
        batch = starts.shape[0] - 1
        capacity = heads * (rows // block + batch)
        self.rest = (batch, heads, longest, group, capacity)
        self.template = template((1 + capacity,), torch.int32, starts.device)
        sequences, together = power_of_two(batch), heads if group % heads == 0 else 1
        self.start = _ORDER.bind(
            (starts, self.template, *self.rest),
            grid=(batch, heads // together),
            constants={"BLOCK": block, "BACKWARDS": backwards, "SEQUENCES": sequences,
                       "LEVELS": clamp(2048 // sequences, 1, 16), "HEADS": power_of_two(together)},
            num_warps=4,
            device=starts.get_device(),
        )  # fmt: skip

    def __call__(self, starts: Tensor) -> Tensor:
        made = torch.empty_like(self.template)
        self.start(starts, made, *self.rest)
        return made


class _Plan:
    """What the forward and the backward pass work out alike."""

    def __init__(
        self, of: Problem, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None,
        q_starts: Tensor | None,
    ) -> None:  # fmt: skip
        self.batch, self.heads, self.rows, self.dim = q.shape
        self.key_heads, self.keys, self.value_dim = k.shape[1], k.shape[2], v.shape[3]
        self.device = q.get_device()
        self.sms = num_sms(self.device)
        self.varlen = q_starts is not None
        if q_starts is not None:
            self.batch = q_starts.shape[0] - 1
        self.longest_q, self.longest_k = of.longest_q or self.rows, of.longest_k or self.keys
        lo, hi = of.edges(self.longest_q, self.longest_k)
        self.span = (lo, hi, 1 if self.varlen else 0)
        self.scale, self.pre = of.numbers
        self.wide = (config.padded(self.dim), config.padded(self.value_dim))
        self.band = of.band
        self.mask_step = 0 if mask is None else mask.stride(0)
        self.constants = {
            "D": self.wide[0], "DV": self.wide[1], "BAND": of.band, "KEYMASK": mask is not None,
            "CAPPED": of.softcap > 0, "VARLEN": self.varlen,
        }  # fmt: skip

    def tiles(self, block: int) -> int:
        return config.num_tiles(self.longest_q, self.batch * self.heads, block)

    def row_order(self, q_starts: Tensor | None, of: config.Attention) -> Order | None:
        """What lists tiles of query rows; nothing where all sequences have one length."""
        if q_starts is None:
            return None
        return Order(q_starts, self.heads, self.rows, self.longest_q, of.rows, self.group(of), backwards=False)

    def group(self, of: config.Attention) -> int:
        """Heads whose tiles of query rows go side by side."""
        if self.varlen:
            most = config.listed_together(self.keys, self.key_heads, self.dim + self.value_dim, self.batch)
            return most * (self.heads // self.key_heads)
        lengths = config.row_lengths(self.longest_q, self.longest_k, *self.span[:2], of)
        return config.heads_together(
            self.batch * self.heads, self.heads // self.key_heads, self.longest_k, max(self.dim, self.value_dim),
            lengths, self.sms,
        )  # fmt: skip


class Forward(_Plan):
    """One launch: tiles of query rows."""

    def __init__(
        self, of: Problem, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, mask: Tensor | None,
        sinks: Tensor | None, q_starts: Tensor | None, k_starts: Tensor | None,
    ) -> None:  # fmt: skip
        super().__init__(of, q, k, v, mask, sinks, q_starts)
        chosen = config.forward(self.dim, self.value_dim)
        width, rest = config.columns(self.dim, self.value_dim)
        values, others = config.value_columns(self.dim, self.value_dim)
        self.rest = (
            self.batch, self.heads, self.key_heads, self.rows, self.keys, self.longest_q, *self.span, self.value_dim,
            self.mask_step, *o.stride()[:3], self.group(chosen), self.scale, self.pre,
        )  # fmt: skip
        self.order = self.row_order(q_starts, chosen)
        self.start = _FORWARD.bind(
            (
                blocks(q, 64, width), blocks(q, 64, rest or width), blocks(k, chosen.keys, width),
                blocks(k, chosen.keys, rest or width), blocks(v, chosen.keys, values),
                blocks(v, chosen.keys, others or values), o, lse,
                *(lse if x is None else x for x in (mask, sinks, q_starts, k_starts, q_starts)), *self.rest,
            ),
            grid=(config.programs(self.tiles(chosen.rows), self.sms),),
            constants={
                **self.constants, "BM": chosen.rows, "BN": chosen.keys, "STAGES": chosen.stages,
                "SINK": sinks is not None, "Q_STAGES": chosen.query_stages, "D": width, "E": rest,
                "DV": values, "F": others,
            },
            max_registers=config.MAX_REGISTERS,
            num_warps=4,
            device=self.device,
            vector=VECTOR,
        )  # fmt: skip

        self.output, self.sums = Empty(o), template(lse.shape, lse.dtype, lse.device)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, q_starts: Tensor | None,
        k_starts: Tensor | None, sums: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        o, lse = self.output(), None if sums else launcher.sink(self.sums.numel(), self.device)
        lse = torch.empty_like(self.sums) if lse is None else lse
        listed = None if self.order is None or q_starts is None else self.order(q_starts)
        self.start(q, q, k, k, v, v, o, lse, mask, sinks, q_starts, k_starts, listed, *self.rest)
        return o, lse

    @classmethod
    def of(
        cls, settings: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None,
        q_starts: Tensor | None, k_starts: Tensor | None, check: Callable[[], None], sums: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Output and log-sum-exp, by the plan of these shapes or a new one; without ``sums`` the second is nobody's."""
        mask = _dense_mask(mask)
        key = key_of(settings, (q, k, v), (mask, sinks, q_starts, k_starts))
        plan = _plans.get(key)
        if plan is not None:
            return plan.run(q, k, v, mask, sinks, q_starts, k_starts, sums)  # type: ignore[no-any-return]
        check()
        o = arranged(q, v.shape[3])
        usable = reachable(q), reachable(k), reachable(v)
        if any(mine is not given for mine, given in zip(usable, (q, k, v), strict=True)):
            found, lse = cls.of(settings, *usable, mask, sinks, q_starts, k_starts, check, sums)
            return (found if found.stride() == o.stride() else o.copy_(found)), lse
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        if o.numel() == 0:
            return o, lse
        if k.shape[2] == 0:
            return o.zero_(), _empty_sum(lse, sinks)
        plan = _plans[key] = cls(Problem(*settings), q, k, v, o, lse, mask, sinks, q_starts, k_starts)
        return plan.run(q, k, v, mask, sinks, q_starts, k_starts, sums)


def _dense_mask(mask: Tensor | None) -> Tensor | None:
    """Keys of a mask one after the other."""
    return mask if mask is None or mask.stride(1) == 1 or mask.shape[1] <= 1 else mask.contiguous()


def _empty_sum(lse: Tensor, sinks: Tensor | None) -> Tensor:
    """The log-sum-exp over no keys."""
    return lse.fill_(float("-inf")) if sinks is None else lse.copy_(sinks.float()[None, :, None].expand_as(lse))


class Backward(_Plan):
    """Row sums first, then dQ, then dK and dV, which heads that share keys add up from parts."""

    def __init__(
        self, of: Problem, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
        grads: tuple[Tensor, ...], mask: Tensor | None, sinks: Tensor | None, q_starts: Tensor | None,
        k_starts: Tensor | None,
    ) -> None:  # fmt: skip
        super().__init__(of, q, k, v, mask, sinks, q_starts)
        self.scale_out = of.scale
        self.batches = q.shape[0]
        self.padded = 64 * (cdiv(self.rows, 64) + (self.batch if self.varlen else 0))
        self.num_sums = self.batches * self.heads * self.padded
        buffer = q.new_empty((2, self.num_sums), dtype=torch.float32)  # delta, then the log-sum-exp in base 2
        self.buffer, self.none = template(buffer.shape, buffer.dtype, q.device), template((0,), q.dtype, q.device)
        self.grads = [Empty(x) for x in grads]
        dq, dk, dv = grads
        self.fused = (
            not of.deterministic
            and config.fits_fused(self.dim, self.value_dim, of.softcap > 0, self.varlen)
            and config.prefers_fused(of.band, self.rows)
        )
        self._bind_prepare(do, o, lse, buffer, q_starts)
        if self.fused:
            self._bind_fused(of, do, q, k, v, dq, dk, dv, buffer, mask)
        else:
            self._bind_queries(of, do, q, k, v, dq, buffer, mask, q_starts, k_starts)
            self._bind_keys(of, do, q, k, v, dk, dv, buffer, mask, q_starts, k_starts)

    def _sum(self, q: Tensor) -> Tensor:
        """dQ in float32, rows padded to whole blocks: what programs add to; nothing where one program has them all."""
        rows = self.num_sums if self.fused else 0
        return q.new_empty((rows, self.wide[0]), dtype=torch.float32)

    def _bind_prepare(self, do: Tensor, o: Tensor, lse: Tensor, buffer: Tensor, q_starts: Tensor | None) -> None:
        self.prepare_rest = (
            *o.stride()[:3], *do.stride()[:3], self.heads, self.rows, self.padded, self.value_dim, self.dim
        )  # fmt: skip
        starts = lse if q_starts is None else q_starts
        self.prepare = _PREPARE.bind(
            (o, do, lse, buffer[0], buffer[1], buffer[:1], starts, *self.prepare_rest),
            grid=(cdiv(self.longest_q, 64), self.batch * self.heads),
            constants={
                "D": self.wide[1], "ROWS": 64, "VARLEN": self.varlen, "ZERO": self.fused, "DQ": self.wide[0],
            },
            num_warps=4,
            device=self.device,
            vector=VECTOR,
        )  # fmt: skip

    def _bind_queries(
        self, of: Problem, do: Tensor, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, buffer: Tensor,
        mask: Tensor | None, q_starts: Tensor | None, k_starts: Tensor | None,
    ) -> None:  # fmt: skip
        chosen = config.queries(self.dim, self.value_dim, of.band, of.softcap > 0)
        self.queries_rest = (
            self.padded, self.batch, self.heads, self.key_heads, self.rows, self.keys, self.longest_q, *self.span,
            self.dim, self.mask_step, *dq.stride()[:3], self.group(chosen), self.scale, self.pre, self.scale_out,
        )  # fmt: skip
        self.order = self.row_order(q_starts, chosen)
        self.queries = _QUERIES.bind(
            (
                blocks(q, chosen.rows // 2, self.wide[0]), blocks(do, chosen.rows // 2, self.wide[1]),
                blocks(k, chosen.keys, self.wide[0]), blocks(v, chosen.keys, self.wide[1]), dq, buffer[1], buffer[0],
                *(buffer if x is None else x for x in (mask, q_starts, k_starts, q_starts)), *self.queries_rest,
            ),
            grid=(config.programs(self.tiles(chosen.rows), self.sms),),
            constants={**self.constants, "BM": chosen.rows, "BN": chosen.keys, "STAGES": chosen.stages},
            max_registers=config.MAX_REGISTERS,
            num_warps=4,
            device=self.device,
            vector=VECTOR,
        )  # fmt: skip

    def _bind_keys(
        self, of: Problem, do: Tensor, q: Tensor, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor, buffer: Tensor,
        mask: Tensor | None, q_starts: Tensor | None, k_starts: Tensor | None,
    ) -> None:  # fmt: skip
        chosen = config.keys(self.dim, self.value_dim, of.softcap > 0)
        tiles = config.num_tiles(self.longest_k, self.batch * self.key_heads, chosen.keys)
        self.split = self._split(chosen)
        part_k, part_v = self._parts(dk), self._parts(dv)
        self.key_order = None
        if k_starts is not None:
            parts = self.key_heads * self.split
            self.key_order = Order(
                k_starts, parts, self.keys, self.longest_k, chosen.keys, self.batch * parts, backwards=self.band == 1
            )
        self.keys_rest = (
            self.padded, self.batch, self.heads, self.key_heads, self.split, self.rows, self.keys, self.longest_k,
            *self.span, self.dim, self.value_dim, self.mask_step, *part_k.stride()[:3], *part_v.stride()[:3],
            self.parts_together(chosen), self.scale, self.pre, self.scale_out,
        )  # fmt: skip
        self.keys_start = _KEYS.bind(
            (
                blocks(q, chosen.rows, self.wide[0]), blocks(k, chosen.keys, self.wide[0]),
                blocks(v, chosen.keys, self.wide[1]), blocks(do, chosen.rows, self.wide[1]),
                numbers(buffer[1], chosen.rows), numbers(buffer[0], chosen.rows), part_k, part_v,
                *(buffer if x is None else x for x in (mask, q_starts, k_starts, k_starts)), *self.keys_rest,
            ),
            grid=(config.programs(tiles * self.split, self.sms),),
            constants={
                **self.constants, "BM": chosen.rows, "BN": chosen.keys, "STAGES": chosen.stages,
                "WIDE": config.is_wide(self.dim, self.value_dim),
            },
            max_registers=config.MAX_REGISTERS,
            num_warps=4,
            device=self.device,
            vector=VECTOR,
        )  # fmt: skip
        if self.split > 1:
            self.sum_k, self.sum_v = self._bind_sum(part_k, dk), self._bind_sum(part_v, dv)

    def _bind_fused(
        self, of: Problem, do: Tensor, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
        buffer: Tensor, mask: Tensor | None,
    ) -> None:  # fmt: skip
        chosen, width = config.FUSED, self.wide[0]
        tiles = config.num_tiles(self.keys, self.batch * self.key_heads, chosen.keys)
        self.split = self._split(chosen)
        part_k, part_v, total = self._parts(dk), self._parts(dv), self._sum(q)
        self.fused_rest = (
            self.padded, self.batch, self.heads, self.key_heads, self.split, self.rows, self.keys, *self.span[:2],
            self.dim, self.mask_step, *part_k.stride()[:3], *part_v.stride()[:3],
            self.parts_together(chosen), self.scale, self.scale_out,
        )  # fmt: skip
        whole = Blocks(total, tuple(total.shape), (width, 1), (chosen.rows, width // 2))
        self.fused_start = _FUSED.bind(
            (
                blocks(q, chosen.rows, width), blocks(k, chosen.keys, width), blocks(v, chosen.keys, width),
                blocks(do, chosen.rows, width), numbers(buffer[1], chosen.rows), numbers(buffer[0], chosen.rows), whole,
                part_k, part_v, buffer if mask is None else mask, *self.fused_rest,
            ),
            grid=(config.programs(tiles * self.split, self.sms),),
            constants={
                "BM": chosen.rows, "BN": chosen.keys, "D": width, "STAGES": chosen.stages, "BUFFERS": 1,
                "BAND": of.band, "KEYMASK": mask is not None,
            },
            max_registers=config.MAX_REGISTERS,
            num_warps=4,
            device=self.device,
            vector=VECTOR,
        )  # fmt: skip
        self.rounded_rest = (self.heads, self.rows, self.padded, self.dim, *dq.stride()[:3], self.scale_out)
        self.rounded = _ROUNDED.bind(
            (total, dq, *self.rounded_rest),
            grid=(cdiv(self.rows, 64), self.batch * self.heads),
            constants={"D": width, "ROWS": 64},
            num_warps=4,
            device=self.device,
            vector=VECTOR,
        )
        if self.split > 1:
            self.sum_k, self.sum_v = self._bind_sum(part_k, dk), self._bind_sum(part_v, dv)

    def parts_together(self, of: config.Attention) -> int:
        """Groups of heads whose blocks of keys go side by side."""
        return config.parts_together(self.batch * self.key_heads * self.split, self._key_lengths(of), self.sms)

    def _key_lengths(self, of: config.Attention) -> tuple[int, ...]:
        return config.key_lengths(self.longest_q, self.longest_k, *self.span[:2], of)

    def _split(self, of: config.Attention) -> int:
        """How many programs share the heads of a block of keys."""
        groups, ratio = self.batch * self.key_heads, self.heads // self.key_heads
        if self.varlen:
            mean = (self.keys - self.longest_k) / max(1, self.batch - 1)
            rest = tuple(config.key_lengths(*(max(1, round(mean)),) * 2, *self.span[:2], of))
            return config.listed_split(self._key_lengths(of), rest, self.batch - 1, self.key_heads, ratio, self.sms)
        return config.key_split(self._key_lengths(of), groups, ratio, self.sms)

    def _parts(self, grad: Tensor) -> Tensor:
        """Where dK or dV goes first: partial sums of a few heads each, or at once where it belongs."""
        if self.split == 1:
            return grad
        shape = (grad.shape[0], self.key_heads * self.split, grad.shape[2], grad.shape[3])
        return grad.new_empty(shape, dtype=torch.float32)

    def _bind_sum(self, part: Tensor, grad: Tensor) -> tuple[Any, tuple[int, ...]]:
        rest = (self.key_heads, grad.shape[2] * grad.shape[3], *grad.stride()[:3], grad.shape[3])
        run = _SUM.bind(
            (part, grad, *rest),
            grid=(cdiv(rest[1], 4096), grad.shape[0] * self.key_heads),
            constants={"SPLIT": self.split, "BLOCK": 4096},
            num_warps=4,
            device=self.device,
            vector=VECTOR,
        )
        return run, rest

    @classmethod
    def of(
        cls, settings: tuple[Any, ...], do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
        mask: Tensor | None, sinks: Tensor | None, q_starts: Tensor | None, k_starts: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of q, k, v and the sinks, by the plan of these shapes or a new one."""
        mask = _dense_mask(mask)
        key = key_of(settings, (q, k, v, do, o), (mask, sinks, q_starts, k_starts))
        plan = _plans.get(key)
        if plan is not None:
            return plan.run(do, q, k, v, o, lse, mask, sinks, q_starts, k_starts)  # type: ignore[no-any-return]
        grads = tuple(arranged(x, x.shape[3]) for x in (q, k, v))
        if q.numel() == 0 or k.numel() == 0:
            dsinks = reference.sink_gradient(torch.zeros_like(lse), lse, sinks)
            return (*(g.zero_() for g in grads), dsinks)  # type: ignore[return-value]
        given = (do, q, k, v)
        usable = reachable(do), reachable(q), reachable(k), reachable(v)
        if any(mine is not theirs for mine, theirs in zip(usable, given, strict=True)):
            found = cls.of(settings, *usable, o, lse, mask, sinks, q_starts, k_starts)
            return (*_laid_as(grads, found[:3]), found[3])  # type: ignore[return-value]
        plan = _plans[key] = cls(Problem(*settings), do, q, k, v, o, lse, grads, mask, sinks, q_starts, k_starts)
        return plan.run(do, q, k, v, o, lse, mask, sinks, q_starts, k_starts)

    def run(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, mask: Tensor | None,
        sinks: Tensor | None, q_starts: Tensor | None, k_starts: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        dq, dk, dv = (made() for made in self.grads)
        buffer = torch.empty_like(self.buffer)
        delta, lse2 = carved(buffer, self.num_sums, self.num_sums)
        total = self._sum(q) if self.fused else buffer
        self.prepare(o, do, lse, delta, lse2, total, q_starts, *self.prepare_rest)
        part_k, part_v = self._parts(dk), self._parts(dv)
        if self.fused:
            self.fused_start(q, k, v, do, lse2, delta, total, part_k, part_v, mask, *self.fused_rest)
            self.rounded(total, dq, *self.rounded_rest)
        else:
            listed, listed_keys = self._listed(q_starts, k_starts)
            self.queries(q, do, k, v, dq, lse2, delta, mask, q_starts, k_starts, listed, *self.queries_rest)
            self.keys_start(
                q, k, v, do, lse2, delta, part_k, part_v, mask, q_starts, k_starts, listed_keys, *self.keys_rest
            )
        if self.split > 1:
            for (run, rest), part, grad in ((self.sum_k, part_k, dk), (self.sum_v, part_v, dv)):
                run(part, grad, *rest)
        if sinks is None:
            return dq, dk, dv, torch.empty_like(self.none)
        return dq, dk, dv, self._sinks(o, do, lse, buffer[0], sinks)

    def _listed(self, q_starts: Tensor | None, k_starts: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Both lists before the first kernel that reads one: the second starts before the first has ended."""
        if q_starts is None or k_starts is None or self.order is None or self.key_order is None:
            return None, None
        return self.order(q_starts), self.key_order(k_starts)

    def _sinks(self, o: Tensor, do: Tensor, lse: Tensor, delta: Tensor, sinks: Tensor) -> Tensor:
        if self.varlen:  # its row sums lie with gaps
            delta = (o.float() * do.float()).sum(-1)
        else:
            delta = delta.view(self.batches, self.heads, self.padded)[:, :, : self.rows]
        return reference.sink_gradient(delta, lse, sinks.float()).to(sinks.dtype)


def _laid_as(meant: tuple[Tensor, ...], found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Results where the declaration said they would be, copied only if they lie otherwise."""
    return tuple(f if f.stride() == m.stride() else m.copy_(f) for m, f in zip(meant, found, strict=True))
