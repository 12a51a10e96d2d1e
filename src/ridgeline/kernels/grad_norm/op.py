"""The norm of a list of gradients and clipping by it: two launches for the norm, one more to scale, no wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ridgeline.errors import KernelError
from ridgeline.kernels import tensor_lists, tuning
from ridgeline.kernels.contract import DTYPES, Case, Laps, Trial, case, declare
from ridgeline.kernels.grad_norm import config, kernel, reference
from ridgeline.kernels.launcher import Kernel, Plans, launchable, overlaps
from ridgeline.kernels.rows import FLOATS, template

_SHARES = Kernel(kernel.norm_shares, vectors=("length",))
_TOTAL = Kernel(kernel.norm_total)
_SCALE = Kernel(kernel.scale_all, vectors=("length",))
_plans = Plans()


def grad_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all elements of all tensors, as a float32 scalar on their device."""
    found = list(tensors)
    if is_dynamo_compiling() or any(type(t) not in (Tensor, torch.nn.Parameter) for t in found):
        return GRAD_NORM.op(found)
    return _norm(found)


def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients of ``parameters`` in place so that their norm is at most ``max_norm``; returns the norm.

    As ``torch.nn.utils.clip_grad_norm_`` for the 2-norm; nothing waits for the device unless ``error_if_nonfinite``.
    """
    if norm_type != 2.0:
        raise KernelError("clip_grad_norm_: kernels know the 2-norm; use torch.nn.utils.clip_grad_norm_ for others")
    params = [parameters] if isinstance(parameters, Tensor) else parameters
    grads = [p.grad for p in params if p.grad is not None]
    if not grads:
        return torch.zeros(())
    total = CLIP.op(grads, float(max_norm)) if is_dynamo_compiling() else _clip(grads, float(max_norm))
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError("the norm of the gradients is not finite, so they cannot be clipped")
    return total


# --- running -----------------------------------------------------------------------------------------------------


class NormPlan:
    """The norm of lists like one: a launch a type, all shares into one array."""

    def __init__(self, tensors: Sequence[Tensor], found: Sequence[int]) -> None:
        self.device = tensors[0].get_device()
        total = sum(t.numel() for t in tensors)
        widest = max(t.element_size() for t in tensors)
        chosen = tuning.choose("grad_norm", {"total": total, "itemsize": widest}, config.norm(widest))
        length = tensor_lists.chunk_length(total, chosen.block, chosen.longest, self.device)
        kinds = [(t.dtype, address % 16 == 0) for t, address in zip(tensors, found, strict=True)]
        self.layout = tensor_lists.Layout(kinds, [t.numel() for t in tensors], length, tensors[0].device)
        self.num_shares = self.layout.num_chunks
        self.like = template((max(1, self.num_shares),), torch.float32, tensors[0].device)
        self.early = overlaps(sum(t.nbytes for t in tensors))
        self.runs = [self._bind(group, tensors, chosen) for group in self.layout.groups]

    def _bind(self, group: tensor_lists.Group, tensors: Sequence[Tensor], chosen: config.Pass) -> Any:
        like, sizes, chunks = tensors[group.members[0]], group.sizes, group.chunks
        return _SHARES.bind(
            (sizes, sizes, chunks.table, self.like, like, chunks.length),
            grid=(chunks.num,),
            constants={"ALIGNED": group.kind[1], "BLOCK": chosen.block, "EARLY": self.early},  # type: ignore[index]
            num_warps=chosen.num_warps,
            device=self.device,
            vector=16,
        )

    def shares(self, tensors: Sequence[Tensor], tables: Sequence[Tensor]) -> Tensor:
        """The sum of squares of every chunk."""
        share = torch.empty_like(self.like, memory_format=torch.contiguous_format)
        start = 0
        for run, table, group in zip(self.runs, tables, self.layout.groups, strict=True):
            part = share[start:] if start else share
            run(table, group.sizes, group.chunks.table, part, tensors[group.members[0]], group.chunks.length)
            start += group.chunks.num
        return share


class ClipPlan:
    """Norm, factor and scaling of lists like one."""

    def __init__(self, tensors: Sequence[Tensor], found: Sequence[int]) -> None:
        self.norm = NormPlan(tensors, found)
        share = self.norm.like
        self.pair = template((2,), torch.float32, tensors[0].device)
        # total block
        self.total = _TOTAL.bind(
            (share, self.pair, self.norm.num_shares, 1.0),
            grid=(1,),
            constants={"BLOCK": 4096, "DEPENDENT": self.norm.early},
            num_warps=8,
            device=self.norm.device,
        )
        self.scales = [self._bind(group, tensors) for group in self.norm.layout.groups]

    def _bind(self, group: tensor_lists.Group, tensors: Sequence[Tensor]) -> Any:
        like, sizes, chunks = tensors[group.members[0]], group.sizes, group.chunks
        chosen = tuning.choose("grad_scale", {"itemsize": like.element_size()}, config.scale(like.element_size()))
        return _SCALE.bind(
            (sizes, sizes, chunks.table, self.pair, like, chunks.length),
            grid=(chunks.num,),
            constants={"ALIGNED": group.kind[1], "BLOCK": min(chosen.block, chunks.length),  # type: ignore[index]
                       "DEPENDENT": self.norm.early},
            num_warps=chosen.num_warps,
            device=self.norm.device,
            vector=16,
        )  # fmt: skip

    def run(self, tensors: Sequence[Tensor], found: tuple[int, ...], max_norm: float, scale: bool) -> Tensor:
        tables = self.norm.layout.tables(found)
        share = self.norm.shares(tensors, tables)
        pair = torch.empty_like(self.pair, memory_format=torch.contiguous_format)
        self.total(share, pair, self.norm.num_shares, max_norm)
        if scale:
            for run, table, group in reversed([*zip(self.scales, tables, self.norm.layout.groups, strict=True)]):
                like = tensors[group.members[0]]
                run(table, group.sizes, group.chunks.table, pair, like, group.chunks.length)
        return pair[0]


def plan_of(tensors: Sequence[Tensor], found: tuple[int, ...]) -> ClipPlan:
    """The plan for lists like this: the same sizes, types and alignments in the same order."""
    key = tuple((t.numel(), t.dtype, address & 15) for t, address in zip(tensors, found, strict=True))
    key = (tensors[0].get_device(), *key)
    plan = _plans.get(key)
    if plan is None:
        reason = list_reason(tensors)
        if reason is not None:
            raise KernelError(f"grad_norm: {reason}")
        plan = _plans[key] = ClipPlan(tensors, found)
    return plan


def list_reason(tensors: Sequence[Tensor]) -> str | None:
    """Why a list of tensors has no kernel, or None."""
    for i, t in enumerate(tensors):
        if t.dtype not in FLOATS:
            return f"tensor {i} is {t.dtype}; kernels take float32, float16 and bfloat16"
        if not dense(t):
            return f"tensor {i} has gaps between its elements; make it contiguous"
        if t.device != tensors[0].device:
            return f"tensors 0 and {i} are on {tensors[0].device} and {t.device}"
    return None


def dense(t: Tensor) -> bool:
    """Whether a tensor's elements fill one stretch of memory, in whatever order."""
    return t.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(t)


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    tensors = [t for t in tensors if t.numel()]
    if not tensors:
        return torch.zeros((), dtype=torch.float32)
    if not launchable(tensors[0]):
        return reference.norm(tensors).to(torch.float32)
    tensors = [t if dense(t) else t.contiguous() for t in tensors]
    found = tensor_lists.addresses(tensors)
    return plan_of(tensors, found).run(tensors, found, 1.0, False)


def _clip(tensors: Sequence[Tensor], max_norm: float) -> Tensor:
    tensors = [t for t in tensors if t.numel()]
    if not tensors:
        return torch.zeros((), dtype=torch.float32)
    if not launchable(tensors[0]):
        total, scaled = reference.clipped(tensors, max_norm)
        for t, value in zip(tensors, scaled, strict=True):
            t.copy_(value)
        return total.to(torch.float32)
    found = tensor_lists.addresses(tensors)
    return plan_of(tensors, found).run(tensors, found, max_norm, True)


# --- the declaration ---------------------------------------------------------------------------------------------


def _fake(tensors: Sequence[Tensor], *_: Any) -> Tensor:
    return tensors[0].new_empty((), dtype=torch.float32)


def split(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Tensors of these sizes, each in memory of its own."""
    return [part.clone() for part in flat.split(list(sizes))]


def sizes_of(of: Case) -> tuple[int, ...]:
    """What a list called ``of["list"]`` holds."""
    return LISTS[of["list"]]


LISTS: dict[str, tuple[int, ...]] = {
    "odd": (1, 7, 4096, 10_001, 3, 70_000),
    "few": (300, 5_000, 33),
    "gpt2": (38_597_376, 786_432, *(768, 768, 1_769_472, 2_304, 589_824, 768, 768, 768, 2_359_296, 3_072, 2_359_296,
                                    768) * 12, 768, 768),
    "resnet50": (9_408, 64, 64, *(4_096, 64, 64, 36_864, 64, 64, 16_384, 256, 256) * 3,
                 *(65_536, 128, 128, 147_456, 128, 128, 65_536, 512, 512) * 4,
                 *(262_144, 256, 256, 589_824, 256, 256, 262_144, 1_024, 1_024) * 6,
                 *(1_048_576, 512, 512, 2_359_296, 512, 512, 1_048_576, 2_048, 2_048) * 3, 2_048_000, 1_000),
    "llama1b": (262_144_000, *(4_194_304, 1_048_576, 1_048_576, 4_194_304, 16_777_216, 16_777_216, 16_777_216, 2_048,
                               2_048) * 16, 2_048),
    "head": (2048 * 512, 512, 512 * 256, 256, 256, 1),
}  # fmt: skip


def _make(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    sizes = sizes_of(of)
    flat = torch.randn(sum(sizes), device=on, dtype=torch.float32, generator=generator).to(getattr(torch, of.dtype))
    return flat, sizes, of["max_norm"]


def _call(flat: Tensor, sizes: tuple[int, ...], max_norm: float) -> tuple[Tensor, Tensor]:
    parts = split(flat.detach(), sizes)
    total = CLIP.op(parts, max_norm) if parts[0].dtype not in FLOATS else _clip(parts, max_norm)
    return total, torch.cat(parts)


def _over(run: Any) -> Any:
    """A reference over lists as a function of one flat tensor."""

    def flat_form(flat: Tensor, sizes: tuple[int, ...], max_norm: float) -> tuple[Tensor, Tensor]:
        total, parts = run(split(flat.detach(), sizes), max_norm)
        return total, torch.cat(parts)

    return flat_form


def with_grads(sizes: Sequence[int], dtype: torch.dtype, on: torch.device, generator: Any) -> list[Tensor]:
    """Parameters that have gradients."""
    params = []
    for size in sizes:
        p = torch.nn.Parameter(torch.empty(size, device=on, dtype=dtype).uniform_(-1, 1))
        p.grad = torch.randn(size, device=on, dtype=torch.float32, generator=generator).to(dtype)
        params.append(p)
    return params


def _laps(of: Case, on: torch.device, generator: torch.Generator) -> Laps:
    """The norm stays above what it is clipped to, so that every lap reads and writes everything."""
    sizes, dtype = sizes_of(of), getattr(torch, of.dtype)
    ours, theirs = (with_grads(sizes, dtype, on, generator) for _ in range(2))

    def lap(params: list[Tensor], clip: Any) -> Any:
        limit = [1.0]

        def run() -> Any:
            limit[0] *= 0.99
            return clip(params, limit[0])

        return run

    size = sum(sizes) * dtype.itemsize
    eager = torch.nn.utils.clip_grad_norm_
    return Laps({"ridgeline": lap(ours, clip_grad_norm_), "eager": lap(theirs, eager)}, 3 * size)


GRAD_NORM = declare(
    name="grad_norm",
    summary="the 2-norm of a list of tensors",
    schema="(Tensor[] tensors) -> Tensor",
    forward=_norm,
    fake=_fake,
    reference=reference.norm,
    support=lambda tensors, *_: list_reason(tensors),
    cost=lambda inputs, outputs, **_: {"flops": 2.0 * sum(t.numel for t in inputs)},
)
CLIP = declare(
    name="clip_grad_norm_",
    summary="gradients scaled in place so that their norm is at most a bound",
    schema="(Tensor(a!)[] tensors, float max_norm) -> Tensor",
    forward=_clip,
    fake=_fake,
    reference=reference.clipped,
    support=lambda tensors, *_: list_reason(tensors),
    cost=lambda inputs, outputs, **_: {
        "flops": 3.0 * sum(t.numel for t in inputs),
        "read_bytes": 2 * sum(t.num_bytes for t in inputs),
        "written_bytes": sum(t.num_bytes for t in inputs),
    },
    trial=Trial(
        make=_make,
        call=_call,
        eager=_over(reference.eager),
        reference=_over(reference.clipped),
        mistakes={"a tensor lost": _over(reference.one_lost), "a tail unscaled": _over(reference.tail_unscaled)},
        checks=tuple(
            case(dtype, list=name, max_norm=bound) for dtype in DTYPES for name, bound in (("odd", 1e4), ("few", 1.0))
        ),
        races=(
            case("float32", list="gpt2", max_norm=1.0), case("bfloat16", list="llama1b", max_norm=1.0),
            case("float32", list="resnet50", max_norm=1.0),
        ),
        small=(case("float32", list="head", max_norm=1.0),),
        phases=("fwd",),
        constants=(0,),
        laps=_laps,
        layouts=False,
    ),
)  # fmt: skip
