"""Repeated blocks of a model, which are compiled once, and device time by kind of kernel."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ridgeline.bench.clock import device_events
from ridgeline.optimizer.receipt import Region
from ridgeline.optimizer.search.timing import Contender, Track


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks of one kind and size."""

    kind: type[nn.Module]
    paths: tuple[str, ...]
    blocks: tuple[nn.Module, ...]

    @property
    def num_params(self) -> int:
        return sum(p.numel() for block in self.blocks for p in block.parameters())


def groups(model: nn.Module) -> list[Group]:
    """The outermost repeated blocks, if they hold at least half of the parameters outside of embedding tables."""
    found = list(_groups(model, ""))
    tables = {id(p) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for p in m.parameters()}
    total = sum(p.numel() for p in model.parameters() if id(p) not in tables)
    share = sum(group.num_params for group in found) / total if total else 0.0
    return found if share >= 0.5 else []


def unlike_frac(found: list[Group]) -> float:
    """The share of a model's kernels that is left when equal blocks are counted once, plus 5 % for the other layers."""
    return min(1.0, sum(1 / len(group.blocks) for group in found) + 0.05) if found else 1.0


def grouped_frac(model: nn.Module, found: list[Group]) -> float:
    """The share of leaf modules that are in repeated blocks."""
    return sum(map(_num_leaves, (block for group in found for block in group.blocks))) / max(1, _num_leaves(model))


def _num_leaves(module: nn.Module) -> int:
    return sum(1 for part in module.modules() if next(part.children(), None) is None)


def has_long_rows(model: nn.Module) -> bool:
    """Whether a norm has rows of 1,025 to 16,384 elements: Inductor can hold them in registers, and by default rereads
    rows above 1,024."""
    others = (nn.GroupNorm, nn.modules.batchnorm._NormBase)
    for part in model.modules():
        if "norm" not in type(part).__name__.lower() or isinstance(part, others):
            continue
        weight = _weight(part)
        shape = getattr(part, "normalized_shape", None) or (() if weight is None else weight.shape)
        if isinstance(shape, tuple) and len(shape) == 1 and 1024 < shape[0] <= 16384:
            return True
    return False


def num_products(model: nn.Module, found: list[Group]) -> int:
    """The number of distinct weight shapes of GEMMs and convolutions, in one block of each kind: what gets tuned."""
    parts = [part for group in found for part in group.blocks[0].modules()] if found else list(model.modules())
    weights = [_weight(part) for part in parts if not isinstance(part, nn.Embedding)]
    return len({tuple(weight.shape) for weight in weights if weight is not None and weight.dim() > 1})


def _weight(part: nn.Module) -> nn.Parameter | None:
    """A layer's own weight; ``named_parameters`` also works for scripted modules."""
    return next((each for name, each in part.named_parameters(recurse=False) if name == "weight"), None)


def is_checkpointed(model: nn.Module) -> bool:
    """Whether blocks use activation checkpointing through transformers' ``gradient_checkpointing``."""
    return any(getattr(part, "gradient_checkpointing", False) is True for part in model.modules())


def has_head(model: nn.Module) -> bool:
    """Whether a linear layer outside of repeated blocks has at least 16,384 outputs: the head of a vocabulary."""
    inside = {id(part) for group in groups(model) for block in group.blocks for part in block.modules()}
    return any(isinstance(part, nn.Linear) and part.out_features >= 16384 for part in model.modules()
               if id(part) not in inside)  # fmt: skip


def _groups(module: nn.Module, path: str) -> Iterator[Group]:
    alike: dict[Any, list[tuple[str, nn.Module]]] = {}
    children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        for name, child in children:
            sizes = tuple((key, tuple(p.shape), p.dtype) for key, p in child.named_parameters())
            alike.setdefault((type(child), sizes), []).append((name, child))
    taken: set[int] = set()
    for same in alike.values():
        block = same[0][1]  # compound, and running its class's own forward
        compound = _num_leaves(block) > 1 and not isinstance(block, (nn.ModuleList, nn.ModuleDict))
        if len(same) >= 3 and compound and "forward" not in vars(block):
            taken |= {id(block) for _, block in same}
            yield Group(type(same[0][1]), tuple(name for name, _ in same), tuple(block for _, block in same))
    for name, child in children:
        if id(child) not in taken:
            yield from _groups(child, name)


PRODUCTS, ATTENTION, CONVOLUTIONS = "products", "attention", "convolutions"
KINDS = (
    (PRODUCTS, r"^triton_tem_|^triton_mm"),
    ("reductions", r"^triton_(?:red|per)_"),
    ("pointwise", r"^triton_poi_"),
    ("copies", r"memcpy|memset|copy_kernel|catarray|direct_copy|cat_batched"),
    (ATTENTION, r"flash|fmha|attention|attn|sdpa|splitkv"),
    (CONVOLUTIONS, r"conv|fprop|dgrad|wgrad|cudnn_infer|nchwtonhwc|nhwctonchw|im2col|winograd"),
    (PRODUCTS, r"gemm|gemv|nvjet|cutlass|cublas|_mm_|splitk|linear|matmul|dot_kernel|skinny|::(?:add|ba?dd)?b?mm\b"),
    ("norms", r"norm|welford|rms|batch_?norm|bn_fw|bn_bw"),
    ("softmax and losses", r"softmax|cross_entropy|nll"),
    ("embeddings", r"embedding|gather|index_?select|indexfunc|scatter|bag"),
    ("optimizer", r"multi_tensor|adam|foreach"),
    ("reductions", r"reduce|argmax|topk|sort|scan|cumsum"),
)
_KINDS = [(name, re.compile(pattern, re.IGNORECASE)) for name, pattern in KINDS]
REST = "pointwise"


def kind_of(kernel: str) -> str:
    """The kind of a kernel, from its name."""
    return next((name for name, pattern in _KINDS if pattern.search(kernel)), REST)


def regions_of(track: Track, eager: Contender, final: Contender, stock: Contender | None) -> tuple[Region, ...]:
    """Device time of one call by kind of kernel: eager, result and torch.compile, the longest in eager first."""
    before, after = by_kind(track, eager), by_kind(track, final)
    beside = by_kind(track, stock) if stock is not None else None
    names = sorted({*before, *after, *(beside or {})}, key=lambda name: -before.get(name, _NONE).seconds)
    return tuple(
        Region(name, before.get(name, _NONE).seconds, after.get(name, _NONE).seconds,
               beside.get(name, _NONE).seconds if beside is not None else None,
               before.get(name, _NONE).num, after.get(name, _NONE).num,
               beside.get(name, _NONE).num if beside is not None else None,
               before.get(name, _NONE).main, after.get(name, _NONE).main,
               beside.get(name, _NONE).main if beside is not None else "")
        for name in names
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels of one kind in one call: total time, count, and the name of the longest."""

    seconds: float = 0.0
    num: int = 0
    main: str = ""


_NONE = Kernels()


def short_name(kernel: str) -> str:
    """A kernel's name without its return type, its namespaces and its template arguments."""
    found = re.match(r"^(?:void\s+)?([\w:~]+)", kernel)
    return (found.group(1).rpartition("::")[2] if found else kernel)[:60]


def by_kind(track: Track, contender: Contender) -> dict[str, Kernels]:
    """Profile one call and total its kernels by kind."""
    from torch.profiler import ProfilerActivity, profile

    with contender.switched() as call, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler warns about schedules, which are not used here
        track.turn_s(call, 1)
        prof = profile(activities=[ProfilerActivity.CUDA])
        track.once(call, prof)  # only the call is profiled; its state is restored outside
    return tallied((name, seconds) for _, name, seconds in device_events(prof))


def tallied(events: Iterable[tuple[str, float]]) -> dict[str, Kernels]:
    """Kernels and their seconds by kind."""
    kinds: dict[str, dict[str, list[float]]] = {}
    for name, seconds in events:
        kinds.setdefault(kind_of(name), {}).setdefault(short_name(name), []).append(seconds)
    return {kind: Kernels(sum(map(sum, names.values())), sum(map(len, names.values())),
                          max(names, key=lambda name: sum(names[name]))) for kind, names in kinds.items()}  # fmt: skip
