"""Quantizes the linear layers of a given list, each in its format, fused if they share their input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from ridgeline.kernels import add_rms_norm, quantized_linear
from ridgeline.kernels.quantized_linear.op import QUANTIZED_LINEAR
from ridgeline.optimizer.precision.formats import WEIGHT_ONLY, bf16_linear, fp8_linear, tf32_linear
from ridgeline.optimizer.precision.weight_bank import Packed, WeightBank
from ridgeline.optimizer.rewrites.context import Extra, GraphContext, is_written
from ridgeline.optimizer.rewrites.op_names import Call, call
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite

if TYPE_CHECKING:
    from ridgeline.optimizer.rewrites.linear.few_rows import Found

_RUNS: dict[str, Callable[..., Any]] = {"tf32": tf32_linear, "bf16": bf16_linear, "fp8": fp8_linear}


def narrow_product(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    residual: Tensor | None,
    eps: float,
    offset: float,
    activation: str,
    gated: bool,
) -> Tensor:
    return quantized_linear(
        x, weight, scale, bias, norm_weight=norm_weight, residual=residual, eps=eps, offset=offset,
        activation=activation, gated=gated,
    )  # fmt: skip


@rewrite(
    "narrow",
    summary="linear layers of a given list are quantized (only within an error_budget)",
    modes=(INFERENCE,),
    worth=Worth(eager=1.0, compiled=1.0, basis="never recommended: it changes results, and is asked for by name"),
    exact="reordered",
)
def narrow(ctx: GraphContext) -> list[Match]:
    bank = ctx.options.get("narrow")
    if ctx.training or ctx.autocast or not isinstance(bank, WeightBank):
        return []
    _split_norms(ctx, bank)
    made = [node for group in _groups(ctx, bank) if (node := _joined(ctx, bank, group)) is not None]
    found = []
    for node, what in made:  # after all layers, because ops around one may belong to another
        wide, around = _wider(ctx, node) if node.target is narrow_product else (node, "")
        found.append(ctx.match(wide, what + around))
    return found


def _split_norms(ctx: GraphContext, bank: WeightBank) -> None:
    """Split fused sums and norms before few-row GEMMs, which fuse both."""
    from ridgeline.optimizer.rewrites.linear.few_rows import (
        _split_sum_and_norm,  # imported here, because that module is registered later
    )

    for node in ctx.nodes:
        if node.op == "call_function" and node.target is add_rms_norm:
            readers = [reader for user in node.users if user.args[1:] == (0,) for reader in user.users]
            if any(_format(ctx, bank, call(reader)) in WEIGHT_ONLY for reader in readers):
                _split_sum_and_norm(ctx, node)


def _format(ctx: GraphContext, bank: WeightBank, read: Call | None) -> str | None:
    """The format of a node: a linear layer of the list that nothing in the graph writes to."""
    if read is None or read.op != "linear" or not isinstance(read["weight"], fx.Node):
        return None
    found = bank.format_of(ctx.real(read["weight"]))
    return None if found is None or is_written(ctx, read["weight"]) else found


def _groups(ctx: GraphContext, bank: WeightBank) -> list[list[fx.Node]]:
    """Layers of the list by input, format and bias; a layer whose result is returned stays alone."""
    by_input: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in ctx.nodes:
        read = call(node)
        format = _format(ctx, bank, read)
        if read is None or format is None:
            continue
        alone = any(user.op == "output" for user in node.users) or len(read["weight"].users) > 1
        key = (read["input"], format, read.get("bias") is None, node if alone else None)
        by_input.setdefault(key, []).append(node)
    return list(by_input.values())


def _joined(ctx: GraphContext, bank: WeightBank, layers: list[fx.Node]) -> tuple[fx.Node, str] | None:
    """The layers as one GEMM in their format, and its description; read only now, after earlier replacements."""
    group = [read for node in layers if (read := call(node)) is not None]
    first = min(group, key=lambda read: ctx.position(read.node))
    last = max(group, key=lambda read: ctx.position(read.node))
    weights, biases = [read["weight"] for read in group], [read.get("bias") for read in group]
    nodes = [read.node for read in group]
    if not ctx.unchanged((first["input"], *weights, *biases), nodes, last.node):
        return None
    format = bank.format_of(ctx.real(weights[0]))
    assert format is not None
    packed = bank.packed([ctx.real(weight) for weight in weights], format)  # type: ignore[misc]
    made = _with_extra_inputs(ctx, packed, [ctx.input_index(weight) for weight in weights])  # type: ignore[misc]
    bias = None if biases[0] is None else _bias(ctx, first.node, biases)
    wide = _emitted(ctx, first.node, format, first["input"], made, bias)
    new = _split(ctx, first.node, group, wide)
    for read, part in zip(group, new, strict=True):
        ctx.replace_any_layout(read.node, part)
    for node in nodes:
        ctx.discard(node)
    what = f"{len(group)} × " if len(group) > 1 else ""
    return wide, f"{format}: {what}{ctx.shape(wide.args[0])} → {packed.tensors[0].shape[0]}"


def _emitted(ctx: GraphContext, at: fx.Node, format: str, x: Any, made: Sequence[fx.Node], bias: Any) -> fx.Node:
    if format in WEIGHT_ONLY:
        return ctx.emit(at, narrow_product, x, *made, bias, None, None, 1e-6, 0.0, "none", False)
    return ctx.emit(at, _RUNS[format], x, *made, bias)


def _split(ctx: GraphContext, at: fx.Node, group: list[Call], wide: fx.Node) -> list[fx.Node]:
    from ridgeline.optimizer.rewrites.linear.horizontal_fusion import (
        columns,  # imported here, because that module is registered later
    )

    if len(group) == 1:
        return [wide]
    sizes = [(ctx.shape(read["weight"]) or (0,))[0] for read in group]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [ctx.emit(at, columns, wide, start, size) for start, size in zip(starts, sizes, strict=True)]


def _bias(ctx: GraphContext, at: fx.Node, biases: Sequence[Any]) -> fx.Node:
    return biases[0] if len(biases) == 1 else ctx.emit(at, torch.cat, list(biases))


def _with_extra_inputs(ctx: GraphContext, packed: Packed, indices: Sequence[int]) -> list[fx.Node]:
    """The quantized tensors as further inputs of the graph, checked before every run.

    If a module's parameter was replaced since, its weight is quantized again.
    """

    def current(place: int) -> Any:
        def fed(args: Sequence[Any]) -> Tensor:
            if place == 0:
                given = tuple(args[index] for index in indices)
                if any(a is not b for a, b in zip(given, packed.parameters, strict=True)):
                    packed.parameters = given
                packed.refresh()
            return packed.tensors[place]

        return fed

    number = len(ctx.extras)
    return [
        ctx.extra_input(tensor, Extra(f"narrow_{number}_{place}", current(place)))
        for place, tensor in enumerate(packed.tensors)
    ]


def _wider(ctx: GraphContext, node: fx.Node) -> tuple[fx.Node, str]:
    """A few-row GEMM fused with the norm before it, and the gate, activation and sum after it, if present."""
    from ridgeline.optimizer.rewrites.linear import (
        few_rows as products,  # imported here, because that module is registered later
    )

    x, weight, scale, bias = node.args[:4]
    found = products.Found(x, weight, bias, node, (node,))  # type: ignore[arg-type]
    for step in (products._with_norm, products._with_gate, products._with_activation, products._with_sum):
        wider = step(ctx, found)
        if wider is not None and _runs(ctx, wider, scale):
            found = wider
    if found.inside == (node,):
        return node, ""
    new = ctx.emit(found.out, narrow_product, *_arguments(found, scale))
    if not ctx.replace(found.out, new):
        return node, ""
    ctx.discard(found.out)
    around = [
        "RMSNorm" if found.norm_weight is not None else "",
        f"{found.activation} gate" if found.gated else found.activation.replace("none", ""),
        "sum" if found.residual is not None else "",
    ]
    return new, "".join(f" + {each}" for each in around if each)


def _arguments(found: Found, scale: Any) -> tuple[Any, ...]:
    x, weight, *rest = found.arguments()
    return (x, weight, scale, *rest)


def _runs(ctx: GraphContext, found: Found, scale: Any) -> bool:
    """Whether the kernel supports these arguments, and they are unchanged since they were read."""
    given = _arguments(found, scale)
    if QUANTIZED_LINEAR.support(*(ctx.value(each) for each in given)) is not None:
        return False
    leaves = [each for each in given if isinstance(each, fx.Node)]
    before = all(ctx.position(leaf) < ctx.position(found.out) for leaf in leaves)
    return before and ctx.unchanged(leaves, found.inside, found.out)
