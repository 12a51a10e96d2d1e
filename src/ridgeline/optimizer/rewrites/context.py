"""The graph that is rewritten: values, aliasing, legal moves, new nodes, new inputs and their updates."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.optimizer.rewrites.op_names import call
from ridgeline.optimizer.rewrites.registry import INFERENCE, TRAINING, Match

_SWITCHES = tuple(
    found
    for name in ("_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode", "set_autocast_enabled")
    if (found := getattr(torch._C, name, None)) is not None
) + (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)
"""Nodes that change the meaning of later ones: nothing is moved past them."""
_IN_PLACE = (
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.iand, operator.ior, operator.ipow,
    operator.ixor, operator.ifloordiv, operator.imod, operator.imatmul, operator.setitem,
)  # fmt: skip


LOWERED_BY = "lowered_by"
"""The option with the name of the compiler that will lower the graph; what a compiler fuses is left to it."""
SMALL = 1 << 18
"""With fewer elements our softmax and cross-entropy are slower than PyTorch's: 0.84-0.91x, lab/notes/rows.md."""


@dataclass(slots=True)
class Extra:
    """A further input of the rewritten graph, derived from others and kept up to date.

    ``current(args)`` is called before every run with the graph's arguments: it returns the tensor, recomputed if its
    sources have changed.
    """

    name: str
    current: Callable[[Sequence[Any]], Tensor]
    undo: Callable[[], None] | None = None


@dataclass(slots=True, eq=False)
class GraphContext:
    """An FX graph with everything known about it; rewrites change the graph only through its methods."""

    gm: fx.GraphModule
    example_inputs: Sequence[Any]
    training: bool
    options: dict[str, Any] = field(default_factory=dict)
    extras: list[Extra] = field(default_factory=list)
    watches: list[Callable[[Sequence[Any]], bool]] = field(default_factory=list)
    refusals: list[tuple[str, str, str]] = field(default_factory=list)
    autocast: bool = False
    casts: int | None = None  # number of autocast's casts written out: the graph then runs without autocast
    relaxed: bool = False
    notes: dict[Any, Any] = field(default_factory=dict)
    _positions: dict[fx.Node, int] = field(default_factory=dict)
    _written: dict[fx.Node, tuple[Any, Any, list[tuple[fx.Node, Any]], set[int]]] = field(default_factory=dict)
    _rewrite: str = ""

    @property
    def graph(self) -> fx.Graph:
        return self.gm.graph

    @property
    def mode(self) -> str:
        return TRAINING if self.training else INFERENCE

    @property
    def nodes(self) -> list[fx.Node]:
        return list(self.gm.graph.nodes)

    # values ------------------------------------------------------------------------------------------------------

    def value(self, node: Any) -> Any:
        """The tracer's value of a node: a fake tensor, or a tree of them; other objects are returned unchanged."""
        return node.meta.get("example_value") if isinstance(node, fx.Node) else node

    def tensor(self, node: Any) -> Tensor | None:
        found = self.value(node)
        return found if isinstance(node, fx.Node) and isinstance(found, Tensor) else None

    def shape(self, node: Any) -> tuple[int, ...] | None:
        """The shape of a tensor-valued node; None if it is no tensor or has a symbolic size."""
        found = self.tensor(node)
        if found is None or not all(isinstance(size, int) for size in found.shape):
            return None
        return tuple(found.shape)

    def dtype(self, node: Any) -> torch.dtype | None:
        found = self.tensor(node)
        return None if found is None else found.dtype

    def is_small(self, node: Any) -> bool:
        """Whether a tensor on a GPU is so small that its kernel costs only a launch, so that ours gain nothing."""
        found = self.tensor(node)
        return found is not None and found.device.type == "cuda" and found.numel() < SMALL

    def real(self, node: Any) -> Tensor | None:
        """The tensor passed for a placeholder when the graph was traced."""
        if not isinstance(node, fx.Node) or node.op != "placeholder":
            return None
        index = self.input_index(node)
        found = self.example_inputs[index] if index is not None and index < len(self.example_inputs) else None
        return found if isinstance(found, Tensor) and not _is_fake(found) else None

    def input_index(self, node: fx.Node) -> int | None:
        if "inputs" not in self.notes:
            self.notes["inputs"] = {each: at for at, each in enumerate(self.graph.find_nodes(op="placeholder"))}
        return self.notes["inputs"].get(node)

    def is_state(self, node: Any) -> bool:
        """Whether a node is a parameter or a buffer of the model, according to the tracer's source."""
        if not isinstance(node, fx.Node) or node.op != "placeholder":
            return False
        name = str(node.target)
        return isinstance(self.real(node), torch.nn.Parameter) or "_parameters_" in name or "_buffers_" in name

    # order and mutation ------------------------------------------------------------------------------------------

    def position(self, node: fx.Node) -> int:
        if node not in self._positions:
            self._positions = {each: index for index, each in enumerate(self.graph.nodes)}
        return self._positions[node]

    def unchanged(self, inputs: Iterable[Any], inside: Iterable[fx.Node], at: fx.Node) -> bool:
        """Whether reading ``inputs`` at ``at`` gives the values that the nodes inside read at their positions.

        Nothing between them may write to memory that an input shares, or switch gradient or autocast modes.
        """
        barriers = self._barriers()
        if not barriers:
            return True
        start = min((self.position(node) for node in inside), default=self.position(at))
        memory = {owner for node in inputs for owner in self.memory(node)}
        for node in barriers:
            if not start < self.position(node) < self.position(at):
                continue
            if node.target in _SWITCHES:
                return False
            written = self.written(node)
            if written is not None and clash(memory, written):
                return False
        return True

    def _barriers(self) -> list[fx.Node]:
        """The nodes that write in place or switch a mode; cached, because no rewrite adds or removes one."""
        if "barriers" not in self.notes:
            self.notes["barriers"] = [n for n in self.graph.nodes if n.target in _SWITCHES or _mutates(n)]
        return self.notes["barriers"]

    def writers(self) -> list[fx.Node]:
        """The nodes that write in place, in order."""
        return [node for node in self._barriers() if node.target not in _SWITCHES]

    def erase_writer(self, node: fx.Node) -> None:
        """Remove an in-place node that has been replaced."""
        self.graph.erase_node(node)
        self.notes.pop("barriers", None)
        self._positions.clear()

    def written(self, node: fx.Node) -> set[int] | None:
        """The storages that a node writes: None for none, an empty set if unknown."""
        known = self._written.get(node)
        if known is not None and known[0] is node.args and known[1] is node.kwargs and all(
            self.value(each) is was for each, was in known[2]
        ):
            return known[3]
        if not _mutates(node):
            return None
        reached = _first_written(node)
        owners: set[int] = set()  # stays empty for calls whose effects are unknown
        for arg in reached:
            owners |= self.memory(arg)
        self._written[node] = (node.args, node.kwargs, [(each, self.value(each)) for each in reached], owners)
        return owners

    def memory(self, node: Any) -> set[int]:
        """The storages of a node's value, according to the aliasing of fake tensors."""
        found: set[int] = set()
        for leaf in _leaves(self.value(node)) if isinstance(node, fx.Node) else ():
            if isinstance(leaf, Tensor):
                found.add(_storage(leaf))
        return found

    # changes -----------------------------------------------------------------------------------------------------

    def emit(self, before: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call before a node, and compute its value on fake tensors."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args, kwargs)
        for key in ("nn_module_stack", "stack_trace", "source_fn_stack"):
            if key in before.meta:
                node.meta[key] = before.meta[key]
        node.meta["example_value"] = self.fake_value(target, args, kwargs)
        node.meta["ridgeline"] = self._rewrite or "emitted"
        self._positions.clear()
        return node

    def fake_value(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The value of a call on fake tensors."""
        given, named = fx.node.map_arg((args, kwargs), lambda node: self.value(node))
        mode = _mode_among(_leaves((given, named)))
        with torch.no_grad(), contextlib.nullcontext() if mode is None else mode:
            made = target(*given, **named)
        if self.training:
            _require_gradients(_leaves(made), _leaves((given, named)))
        return made

    def refresh(self) -> None:
        """Recompute values after a change of layout; raises if a node can no longer be computed."""
        changed: set[fx.Node] = {node for node in self.graph.nodes if node.meta.pop("replace_any_layout", False)}
        for node in self.graph.nodes:
            stale = any(each in changed for each in node.all_input_nodes)
            if node.op not in ("call_function", "call_method") or not stale or _mutates(node):
                continue
            before = self.value(node)
            if any(not isinstance(leaf, Tensor) for leaf in _leaves(before)):
                continue
            node.meta["example_value"] = self._again(node)
            if not _same_layouts(before, self.value(node)):
                changed.add(node)
        self.relaxed = False

    def replace_any_layout(self, old: fx.Node, new: fx.Node) -> None:
        """Replace ``old`` by ``new`` although their layouts may differ; later values are recomputed."""
        new.meta["replace_any_layout"] = not _same_layouts(self.value(old), self.value(new))
        self.relaxed = self.relaxed or new.meta["replace_any_layout"]
        old.replace_all_uses_with(new)
        self._positions.clear()

    def _again(self, node: fx.Node) -> Any:
        if node.op == "call_method":
            return self.fake_value(
                lambda this, *args, **kwargs: getattr(this, str(node.target))(*args, **kwargs), node.args, node.kwargs
            )
        return self.fake_value(node.target, node.args, node.kwargs)  # type: ignore[arg-type]

    def replace(self, old: fx.Node, new: fx.Node) -> bool:
        """Replace ``old`` by ``new`` if shape, dtype and strides are equal; otherwise remove ``new``."""
        if not self.alike(old, new):
            self.discard(new)
            return False
        old.replace_all_uses_with(new)
        self._positions.clear()
        return True

    def same_shape(self, old: fx.Node, new: fx.Node) -> bool:
        """Whether two values have the same shape, dtype and device, for users that take any layout."""
        a, b = self.value(old), self.value(new)
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            return False
        same = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
        return same and (_same_strides(a, b) or not self._layout_matters(old))

    def _layout_matters(self, node: fx.Node) -> bool:
        """Whether a user of a node may fail or differ with another layout: views, outputs, and unknown ops."""
        for user in node.users:
            read = call(user)
            if read is None or read.op not in (*_ANY_LAYOUT, *_VIEWS):
                return True
            if read.op in _VIEWS and self._layout_matters(user):
                return True
        return False

    def alike(self, old: fx.Node, new: fx.Node) -> bool:
        a, b = self.value(old), self.value(new)
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            return False
        same = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
        return same and _same_strides(a, b)

    def discard(self, node: fx.Node) -> None:
        """Erase an unused node, and those that only it used."""
        if node.users or node.op in ("placeholder", "output") or node._erased:
            return
        inputs = list(node.all_input_nodes)
        if not is_removable(node) and not _ours(node):
            return
        self.graph.erase_node(node)
        self._positions.clear()
        for each in inputs:
            self.discard(each)

    def retire(self, node: fx.Node) -> None:
        """Erase a replaced node even if it draws random numbers, which would run for nothing."""
        node.meta["ridgeline"] = self._rewrite or "replaced"
        self.discard(node)

    def extra_input(self, like: Tensor, extra: Extra) -> fx.Node:
        """Add a placeholder to the graph, which ``extra`` supplies before every run."""
        last = list(self.graph.find_nodes(op="placeholder"))[-1]
        with self.graph.inserting_after(last):
            node = self.graph.placeholder(extra.name)
        node._dynamo_source = None  # type: ignore[attr-defined]
        node.meta["example_value"] = self._stand_in(like)
        node.meta["extra"] = extra
        self.extras.append(extra)
        self._positions.clear()
        self.notes.pop("inputs", None)
        return node

    def _stand_in(self, like: Tensor) -> Tensor:
        """A fake tensor with the shape, dtype and layout of a tensor, on the device of the graph's inputs."""
        mode = _mode_of(self)
        device = next((x.device for x in self.example_inputs if isinstance(x, Tensor)), like.device)
        device = device if like.is_meta else like.device
        if mode is None:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
        with mode:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)

    def refuse(self, node: fx.Node, why: str) -> None:
        """Record why a possible match was left alone."""
        self.refusals.append((self._rewrite, where(node), why))

    def match(self, node: fx.Node, what: str) -> Match:
        return Match(self._rewrite, where(node), what)

    def run(self, name: str, change: Callable[[GraphContext], list[Match]]) -> list[Match]:
        """Run one rewrite over the graph, and remove dead nodes."""
        self._rewrite = name
        found = change(self)
        if found:
            self.graph.lint()
        return found


def where(node: fx.Node) -> str:
    """The path of the module that a node came from, as in ``named_modules``."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])
    for noise in ("L['self']", "L['block']", "L['fn']", "L['args'][0]", "['", "']", "_modules", "self."):
        path = path.replace(noise, "." if noise == "['" else "")
    return ".".join(part for part in path.split(".") if part)


def _is_fake(value: Tensor) -> bool:
    from torch._subclasses import FakeTensor

    return isinstance(value, FakeTensor)


def _mode_of(ctx: GraphContext) -> Any:
    return _mode_among([node.meta.get("example_value") for node in ctx.nodes])


def _mode_among(values: Sequence[Any]) -> Any:
    """The fake mode of the tracer's values, which may differ from that of the compilation in progress."""
    return next((value.fake_mode for value in values if isinstance(value, Tensor) and _is_fake(value)), None)


def _leaves(tree: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(tree)


def _require_gradients(made: list[Any], given: list[Any]) -> None:
    """Let results of tensors that require gradients require them too, as compilers of later pieces need."""
    if not any(isinstance(each, Tensor) and each.requires_grad for each in given):
        return
    known = set(map(id, given))
    for each in made:
        if isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex()) and id(each) not in known:
            each.requires_grad_()


def _same_layouts(a: Any, b: Any) -> bool:
    """Whether two values, or trees of them, have equal shapes, dtypes and strides."""
    pairs = list(zip(_leaves(a), _leaves(b), strict=False))
    return len(_leaves(a)) == len(_leaves(b)) and all(
        isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape and x.dtype == y.dtype
        and _same_strides(x, y)
        for x, y in pairs
    )  # fmt: skip


def _same_strides(a: Tensor, b: Tensor) -> bool:
    """Whether two layouts are equal: strides of dims with one element do not count."""
    return all(x == y for size, x, y in zip(a.shape, a.stride(), b.stride(), strict=True) if size > 1)


def is_removable(node: fx.Node) -> bool:
    """Whether an unused node can be removed: it only returns a value, and draws no random numbers."""
    if _ours(node):
        return True
    found = call(node)
    if found is None or _mutates(node):
        return node.op == "call_function" and node.target in _MAKERS
    if found.op == "dropout":
        return found.get("training", True) is False or found.get("p", 0.5) == 0
    return not (found.op == "attention" and found.get("dropout_p", 0.0) != 0)


_MAKERS = (torch.arange, torch.ones, torch.zeros, torch.full, torch.tensor, torch.finfo, torch.empty)


def _ours(node: fx.Node) -> bool:
    """Whether a rewrite made the node: those have no side effects."""
    return bool(node.meta.get("ridgeline"))


def _mutates(node: fx.Node) -> bool:
    """Whether a node writes to an argument, as far as known; unknown functions of torch do not."""
    if node.op == "call_method":
        name = str(node.target)
        return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__iadd__", "__imul__")
    if node.op != "call_function":
        return node.op == "call_module"
    if node.target in _IN_PLACE or "out" in node.kwargs or node.kwargs.get("inplace") is True:
        return True
    if isinstance(node.target, (torch._ops.HigherOrderOperator, torch._ops.OpOverloadPacket)):
        return True
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return bool(schema.is_mutable)
    if getattr(node.target, "__module__", "") == "_operator":
        return False  # and_ and or_ end like in-place methods
    name = getattr(node.target, "__name__", "")
    if name.endswith("_") and not name.endswith("__"):
        return True
    if name in ("batch_norm", "instance_norm") and (node.kwargs.get("training") or node.kwargs.get("use_input_stats")):
        return True
    return name in _INPLACE_FLAG and len(node.args) > _INPLACE_FLAG[name] and node.args[_INPLACE_FLAG[name]] is True


_INPLACE_FLAG = {
    "relu": 1, "silu": 1, "relu6": 1, "hardswish": 1, "hardsigmoid": 1, "mish": 1, "selu": 1, "elu": 2, "celu": 2,
    "leaky_relu": 2, "hardtanh": 3, "dropout": 3, "dropout1d": 3, "dropout2d": 3, "dropout3d": 3, "alpha_dropout": 3,
    "feature_alpha_dropout": 3, "threshold": 3, "rrelu": 4, "batch_norm": 5, "instance_norm": 5,
}  # fmt: skip
"""The position of arguments that make a function write: batch norm updates its running statistics in training."""


def tracing_mode() -> Any:
    """The fake mode of the compilation in progress; None outside of one."""
    context = torch._guards.TracingContext.try_get()
    return None if context is None else context.fake_mode


def stand_in(like: Tensor, mode: Any) -> Tensor:
    """A fake tensor with the shape, layout and dtype of a tensor, without aliases."""
    with mode:
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return made.requires_grad_() if like.requires_grad else made


def is_switch(node: fx.Node) -> bool:
    """Whether a node changes the meaning of later ones: gradient mode, inference mode, autocast."""
    return node.target in _SWITCHES


def _first_written(node: fx.Node) -> list[fx.Node]:
    """The arguments that an in-place node may write to."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return []
    if getattr(node.target, "__name__", "") in ("batch_norm", "instance_norm"):
        return [arg for arg in node.args[1:3] if isinstance(arg, fx.Node)]
    out = node.kwargs.get("out")
    if isinstance(out, fx.Node):
        return [out]
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return _declared(node, schema) or list(node.all_input_nodes)
    return [arg for arg in node.args[:1] if isinstance(arg, fx.Node)] or list(node.all_input_nodes)


def _declared(node: fx.Node, schema: Any) -> list[fx.Node]:
    """The arguments that an op writes according to its schema."""
    found = []
    for at, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
            found += [leaf for leaf in _leaves(value) if isinstance(leaf, fx.Node)]
    return found


_ANY_LAYOUT = ("attention", "cat", "stack", "matmul", "bmm", "mm", "linear", "contiguous", "reshape", "flatten",
               "layer_norm")  # fmt: skip
"""Ops that take any layout, and return their own."""
_VIEWS = (
    "transpose",
    "permute",
    "getitem",
    "unsqueeze",
    "squeeze",
    "expand",
    "chunk",
    "split",
    "unbind",
    "t",
    "mT",
    "detach",
)


def is_written(ctx: GraphContext, node: fx.Node) -> bool:
    """Whether anything in the graph writes to the memory of a node's value."""
    barriers = ctx._barriers()
    memory = ctx.memory(node) if barriers else set()
    for each in barriers:
        written = ctx.written(each)
        if written is not None and clash(memory, written):
            return True
    return False


ANYWHERE = -1


def _storage(leaf: Tensor) -> int:
    """The storage of a fake tensor; unknown for functorch wrappers."""
    try:
        return leaf.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return ANYWHERE


def clash(memory: set[int], written: set[int]) -> bool:
    """Whether a write may reach some memory: always if either is unknown."""
    return not written or ANYWHERE in memory or ANYWHERE in written or bool(memory & written)
