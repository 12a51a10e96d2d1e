"""Linear layers of a few rows: the norm before it, and the gate and the sum after it, are part of one kernel."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.kernels import add_rms_norm, geglu, linear, rms_norm, swiglu
from ridgeline.kernels.launcher import overlapped, recording
from ridgeline.kernels.linear.config import MAX_ROWS
from ridgeline.kernels.linear.op import LINEAR
from ridgeline.optimizer.rewrites.context import GraphContext, is_written
from ridgeline.optimizer.rewrites.linear.horizontal_fusion import columns
from ridgeline.optimizer.rewrites.op_names import Call, call
from ridgeline.optimizer.rewrites.registry import INFERENCE, Match, Worth, rewrite


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    residual: Tensor | None,
    eps: float,
    offset: float,
    activation: str,
    gated: bool,
    early: bool,
) -> Tensor:
    """Our kernel; during a capture it prefetches its weight before the kernel before it has ended (``early``).

    Nothing in the graph writes the weight. What ran before the graph is unknown, so the first layer is never early.
    """
    with overlapped(early and recording()):
        return linear(
            x, weight, bias, norm_weight=norm_weight, residual=residual, eps=eps, offset=offset, activation=activation,
            gated=gated,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Found:
    """A linear layer with the ops around it; ``inside`` are the nodes that one kernel replaces."""

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    out: fx.Node
    inside: tuple[fx.Node, ...]
    norm_weight: fx.Node | None = None
    residual: fx.Node | None = None
    eps: float = 1e-6
    offset: float = 0.0
    activation: str = "none"
    gated: bool = False

    def arguments(self) -> tuple[Any, ...]:
        return (
            self.x, self.weight, self.bias, self.norm_weight, self.residual, self.eps, self.offset, self.activation,
            self.gated,
        )  # fmt: skip


@rewrite(
    "products",
    summary=f"linear layers of at most {MAX_ROWS} rows become our kernels, with norm, gate and sum inside",
    modes=(INFERENCE,),
    worth=Worth(eager=1.3, compiled=1.2, basis="lab/notes/attention.md"),
    exact="reordered",
    needs_kernels=True,
)
def products(ctx: GraphContext) -> list[Match]:
    if ctx.training or ctx.autocast:
        return []
    for node in ctx.nodes:
        if node.op == "call_function" and node.target is add_rms_norm:
            _split_sum_and_norm(ctx, node)
    found: list[Match] = []
    for node in ctx.nodes:
        read = _read(ctx, node)
        if read is not None and (match := _put(ctx, read, early=bool(found))) is not None:
            found.append(match)
    return found


def _split_sum_and_norm(ctx: GraphContext, both: fx.Node) -> None:
    """Split a fused sum and norm: the sum is fused with the GEMM before, the norm with those after."""
    parts = {user.args[1]: user for user in both.users if user.target is operator.getitem}
    normed, summed = parts.get(0), parts.get(1)
    if normed is None or len(parts) != len(both.users):
        return
    if not normed.users or not all(_read(ctx, user, norm=False) for user in normed.users):
        return
    a, b, weight, eps = both.args
    offset = both.kwargs["offset"]
    total = ctx.emit(both, torch.add, a, b)
    norm = ctx.emit(both, rms_norm, total, weight, eps, offset=offset)
    normed.replace_all_uses_with(norm)
    ctx.discard(normed)
    if summed is not None:
        summed.replace_all_uses_with(total)
        ctx.discard(summed)


def _read(ctx: GraphContext, node: fx.Node, norm: bool = True) -> Found | None:
    """A linear layer that the kernel supports, with the ops it can fuse."""
    read = call(node)
    if read is None or read.op != "linear" or not isinstance(read["weight"], fx.Node):
        return None
    shape, weight = ctx.shape(read["input"]), ctx.tensor(read["weight"])
    # Smaller weights are not what a GEMM's time depends on.
    if shape is None or weight is None or weight.numel() < 1 << 16 or is_written(ctx, read["weight"]):
        return None
    if torch.Size(shape[:-1]).numel() > MAX_ROWS or torch.Size(shape).numel() == 0:
        return None
    found = Found(read["input"], read["weight"], read.get("bias"), node, (node,))
    if not _runs(ctx, found):
        return None
    for step in (_with_norm, _with_gate, _with_activation, _with_sum) if norm else ():
        wider = step(ctx, found)
        if wider is not None and _runs(ctx, wider):
            found = wider
    return found


def _runs(ctx: GraphContext, found: Found) -> bool:
    """Whether the kernel supports these arguments, and they are unchanged since they were read."""
    if LINEAR.support(*(ctx.value(each) for each in found.arguments())) is not None:
        return False
    leaves = [each for each in found.arguments() if isinstance(each, fx.Node)]
    before = all(ctx.position(leaf) < ctx.position(found.out) for leaf in leaves)
    return before and ctx.unchanged(leaves, found.inside, found.out)


def _with_norm(ctx: GraphContext, found: Found) -> Found | None:
    node = found.x
    if node.op != "call_function" or node.target is not rms_norm:
        return None
    x, weight, eps = node.args
    if weight is None:
        return None
    offset = node.kwargs.get("offset", 0.0)
    return replace(found, x=x, norm_weight=weight, eps=eps, offset=offset, inside=(node, *found.inside))


def _with_gate(ctx: GraphContext, found: Found) -> Found | None:
    """act(first half) · second half, of one GEMM for both."""
    halves = [half for user in found.out.users for half in _halves(ctx, user, found.out)]
    if len({half for half, _ in halves}) != 2 or len(halves) != 2 or not _only_halves(found.out, halves):
        return None
    gate, up = (next(node for half, node in halves if half == wanted) for wanted in (0, 1))
    for user in gate.users:
        kind, inside = _gate_of(user, gate, up)
        if kind is not None and len(up.users) == 1 and len(gate.users) == 1:
            taken = (*found.inside, gate, up, *inside)
            return replace(found, out=inside[-1], activation=kind, gated=True, inside=taken)
    return None


def _halves(ctx: GraphContext, node: fx.Node, wide: fx.Node) -> list[tuple[int, fx.Node]]:
    """The halves of the last dim that a user takes: (0 or 1, node)."""
    width = (ctx.shape(wide) or (0,))[-1]
    if node.target is columns and node.args[2] * 2 == width and node.args[1] in (0, width // 2):
        return [(int(node.args[1] != 0), node)]
    read = call(node)
    last = len(ctx.shape(wide) or ()) - 1
    if read is None or read.op not in ("chunk", "split") or read.get("dim", 0) not in (-1, last):
        return []
    size = -(-width // read["chunks"]) if read.op == "chunk" else read["split_size"]
    sizes = list(size) if isinstance(size, (list, tuple)) else [size]
    if width % 2 or set(sizes) != {width // 2}:
        return []
    return [(user.args[1], user) for user in node.users if user.target is operator.getitem]


def _only_halves(wide: fx.Node, halves: list[tuple[int, fx.Node]]) -> bool:
    """Whether nothing else reads the GEMM."""
    known = {node for _, node in halves} | {node.args[0] for _, node in halves}
    return all(user in known for user in wide.users)


def _gate_of(node: fx.Node, gate: fx.Node, up: fx.Node) -> tuple[str | None, tuple[fx.Node, ...]]:
    """The activation of a gate, as our kernel or as a product, and its nodes."""
    if node.target is swiglu and tuple(node.args) == (gate, up):
        return "silu", (node,)
    if node.target is geglu and tuple(node.args[:2]) == (gate, up):
        tanh = (node.args[2] if len(node.args) > 2 else node.kwargs.get("approximate", "tanh")) == "tanh"
        return "gelu_tanh" if tanh else "gelu", (node,)
    kind = _activation_of(call(node))
    if kind is None or len(node.users) != 1:
        return None, ()
    user = next(iter(node.users))
    read = call(user)
    if read is None or read.op != "mul" or {read["input"], read["other"]} != {node, up}:
        return None, ()
    return kind, (node, user)


def _activation_of(read: Call | None) -> str | None:
    if read is None or read.op not in ("silu", "gelu", "relu"):
        return None
    return "gelu_tanh" if read.op == "gelu" and read.get("approximate", "none") == "tanh" else read.op


def _with_activation(ctx: GraphContext, found: Found) -> Found | None:
    user = _only_user(found.out)
    kind = _activation_of(call(user))
    if user is None or kind is None or found.gated:
        return None
    return replace(found, out=user, activation=kind, inside=(*found.inside, user))


def _with_sum(ctx: GraphContext, found: Found) -> Found | None:
    user = _only_user(found.out)
    read = call(user)
    if user is None or read is None or read.op != "add" or read.given.get("alpha") not in (None, 1):
        return None
    other = read["other"] if read["input"] is found.out else read["input"]
    if not isinstance(other, fx.Node) or other is found.out or ctx.shape(other) != ctx.shape(found.out):
        return None
    return replace(found, out=user, residual=other, inside=(*found.inside, user))


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _put(ctx: GraphContext, found: Found, early: bool) -> Match | None:
    new = ctx.emit(found.out, product, *found.arguments(), early)
    if not ctx.replace(found.out, new):
        return None
    ctx.discard(found.out)
    around = [
        "RMSNorm" if found.norm_weight is not None else "",
        f"{found.activation} gate" if found.gated else found.activation.replace("none", ""),
        "sum" if found.residual is not None else "",
    ]
    sizes = f"{ctx.shape(found.x)} × {ctx.shape(found.weight)}"
    return ctx.match(new, " + ".join([f"product {sizes}", *(each for each in around if each)]))
