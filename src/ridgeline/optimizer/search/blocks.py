"""Parts of a model: blocks that repeat and can be compiled once, and device time by kind of kernel."""

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

LEAST_REPEATS = 3
HELD, MOST_HELD = 1024, 16384
"""Elements of a row that Inductor holds in registers by itself, and those it can."""
VOCABULARY = 16384
LEAST_SHARE = 0.5
"""Blocks are worth compiling alone where they hold at least this share of the parameters outside of tables."""


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
    """The outermost blocks that repeat, if they make up most of the model; else nothing."""
    found = list(_groups(model, ""))
    tables = {id(p) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for p in m.parameters()}
    total = sum(p.numel() for p in model.parameters() if id(p) not in tables)
    share = sum(group.num_params for group in found) / total if total else 0.0
    return found if share >= LEAST_SHARE else []


def unlike_frac(found: list[Group]) -> float:
    """About the share of a model that is left when equal blocks are counted once; the rest of it is a twentieth."""
    return min(1.0, sum(1 / len(group.blocks) for group in found) + 0.05) if found else 1.0


def grouped_frac(model: nn.Module, found: list[Group]) -> float:
    """The share of layers that are in blocks of which there are several."""
    return sum(map(_num_leaves, (block for group in found for block in group.blocks))) / max(1, _num_leaves(model))


def _num_leaves(module: nn.Module) -> int:
    return sum(1 for part in module.modules() if next(part.children(), None) is None)


def has_long_rows(model: nn.Module) -> bool:
    """Whether a norm has rows that a compiler would read twice."""
    others = (nn.GroupNorm, nn.modules.batchnorm._NormBase)
    for part in model.modules():
        if "norm" not in type(part).__name__.lower() or isinstance(part, others):
            continue
        weight = _weight(part)
        shape = getattr(part, "normalized_shape", None) or (() if weight is None else weight.shape)
        if isinstance(shape, tuple) and len(shape) == 1 and HELD < shape[0] <= MOST_HELD:
            return True
    return False


def num_products(model: nn.Module, found: list[Group]) -> int:
    """Matrix products and convolutions of different sizes, in blocks where a model is made of them: what is tuned."""
    parts = [part for group in found for part in group.blocks[0].modules()] if found else list(model.modules())
    weights = [_weight(part) for part in parts if not isinstance(part, nn.Embedding)]
    return len({tuple(weight.shape) for weight in weights if weight is not None and weight.dim() > 1})


def _weight(part: nn.Module) -> nn.Parameter | None:
    """A layer's own, asked for in a way that a scripted one answers too."""
    return next((each for name, each in part.named_parameters(recurse=False) if name == "weight"), None)


def is_checkpointed(model: nn.Module) -> bool:
    """Whether blocks are computed again in the backward, by transformers' switch: as they are, wherever they ran."""
    return any(getattr(part, "gradient_checkpointing", False) is True for part in model.modules())


def has_head(model: nn.Module) -> bool:
    """Whether a layer outside of repeated blocks has an output for every word of a vocabulary."""
    inside = {id(part) for group in groups(model) for block in group.blocks for part in block.modules()}
    return any(isinstance(part, nn.Linear) and part.out_features >= VOCABULARY for part in model.modules()
               if id(part) not in inside)  # fmt: skip


def _groups(module: nn.Module, path: str) -> Iterator[Group]:
    alike: dict[Any, list[tuple[str, nn.Module]]] = {}
    children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        for name, child in children:
            alike.setdefault(_shape(child), []).append((name, child))
    taken: set[int] = set()
    for same in alike.values():
        if len(same) >= LEAST_REPEATS and _eligible(same[0][1]):
            taken |= {id(block) for _, block in same}
            yield Group(type(same[0][1]), tuple(name for name, _ in same), tuple(block for _, block in same))
    for name, child in children:
        if id(child) not in taken:
            yield from _groups(child, name)


def _shape(block: nn.Module) -> tuple[Any, ...]:
    return type(block), tuple((name, tuple(p.shape), p.dtype) for name, p in block.named_parameters())


def _eligible(block: nn.Module) -> bool:
    """Compound modules whose forward is their class's own."""
    callable_ = not isinstance(block, (nn.ModuleList, nn.ModuleDict))
    return _num_leaves(block) > 1 and callable_ and "forward" not in vars(block)


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
    """What a kernel does, by its name."""
    return next((name for name, pattern in _KINDS if pattern.search(kernel)), REST)


def regions_of(track: Track, eager: Contender, final: Contender, stock: Contender | None) -> tuple[Region, ...]:
    """Device time of one call by kind of kernel: eager, the result and torch.compile, largest first."""
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
    """Kernels of one kind in one call: their time, their number, and the one that takes the most."""

    seconds: float = 0.0
    num: int = 0
    main: str = ""


_NONE = Kernels()
_TEMPLATE = re.compile(r"^(?:void\s+)?([\w:~]+)")


def short_name(kernel: str) -> str:
    """A kernel's name without its return type, its namespaces and its template arguments."""
    found = _TEMPLATE.match(kernel)
    return (found.group(1).rpartition("::")[2] if found else kernel)[:60]


def by_kind(track: Track, contender: Contender) -> dict[str, Kernels]:
    """Seconds, number and the main one of the kernels of one call, by kind."""
    from torch.profiler import ProfilerActivity, profile

    with contender.switched() as call, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's, about cycles that we do not have
        track.turn_s(call, 1)
        prof = profile(activities=[ProfilerActivity.CUDA])
        track.once(call, prof)  # nothing but the call: what it writes is put back outside
    return tallied((name, seconds) for _, name, seconds in device_events(prof))


def tallied(events: Iterable[tuple[str, float]]) -> dict[str, Kernels]:
    """Kernels and their seconds by kind."""
    kinds: dict[str, dict[str, list[float]]] = {}
    for name, seconds in events:
        kinds.setdefault(kind_of(name), {}).setdefault(short_name(name), []).append(seconds)
    return {kind: Kernels(sum(map(sum, names.values())), sum(map(len, names.values())),
                          max(names, key=lambda name: sum(names[name]))) for kind, names in kinds.items()}  # fmt: skip
