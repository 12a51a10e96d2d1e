"""ONNX graphs run node by node: on the host what shapes and constants decide, as PyTorch calls the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ridgeline.capture.importers.onnx.file import AttrRef, Function, Node, OnnxGraph, OnnxModel
from ridgeline.capture.importers.onnx.registry import FIRST_OPSET, LAST_OPSET, OPS, Call, Op
from ridgeline.capture.importers.program import MAX_HOST_BYTES, Context, Host, NeedsData, OpRow, plain
from ridgeline.capture.importers.weights import TensorRef
from ridgeline.errors import ModelFileError, RidgelineError, nearest


class Evaluator:
    """The body of an imported ONNX model."""

    def __init__(self, model: OnnxModel) -> None:
        self.model = model
        self.weights: dict[str, TensorRef] = {}
        self.buffers: set[str] = set()
        self._hosts: dict[int, torch.Tensor] = {}
        self._refs: dict[int, str] = {}
        self.turned: set[str] = set()
        self.elements = {v.name: v.element for v in model.graph.inputs}
        self._sort(model.graph)

    def adopt(self, graph: OnnxGraph) -> None:
        """Give every large constant of the graph a name as a weight."""
        reads: dict[str, set[tuple[str, int]]] = {}
        for node in graph.nodes:
            for i, name in enumerate(node.inputs):
                reads.setdefault(name, set()).add((node.domain + node.op, i))
            for name in _captured(node):
                reads.setdefault(name, set()).add(("", 0))
        for name, ref in graph.weights.items():
            # A linear layer's weight, which exporters transpose: given back as the layer had it
            is_linear = reads.get(name) == {("MatMul", 1)} and len(ref.shape) == 2 and ref.dtype.is_floating_point
            self._adopt(name, ref, is_linear)
            self.elements[name] = ref.element
        for node in graph.nodes:
            if node.op == "BatchNormalization":  # statistics are no parameters
                kept = [graph.weights[name] for name in node.inputs[3:5] if name in graph.weights]
                self.buffers |= {self._refs[id(ref)] for ref in kept if id(ref) in self._refs}
            for key, value in node.attrs.items():
                if isinstance(value, TensorRef):
                    self._adopt(node.outputs[0] if node.outputs and key == "value" else f"{node.name}.{key}", value)
                for inner in value if isinstance(value, list) else [value]:
                    if isinstance(inner, OnnxGraph):
                        self.adopt(inner)

    def _adopt(self, name: str, ref: TensorRef, is_linear: bool = False) -> None:
        if is_host(ref):
            return
        name = name.strip("/").replace("/", ".") or "weight"
        while name in self.weights:
            name += "_"
        self.weights[name] = ref
        self._refs[id(ref)] = name
        if is_linear:
            self.turned.add(name)
            self.weights[name] = replace(ref, shape=ref.shape[::-1], read=lambda: ref.read().t())

    def _sort(self, graph: OnnxGraph, outer: frozenset[str] = frozenset()) -> None:
        """Nodes in an order that can run; an input nobody makes and a cycle are errors."""
        made = {v.name for v in graph.inputs} | set(graph.weights) | set(graph.texts) | set(outer) | {""}
        where = self.model.path
        waiting, nodes = list(graph.nodes), list[Node]()
        for node in waiting:
            for name in node.outputs:
                if name and name in made:
                    raise ModelFileError(f"{where}: {node.told()} makes {name!r}, which is made twice: export it again")
        known = {name for node in waiting for name in node.outputs} | made
        producers: dict[str, int] = {}
        for at, node in enumerate(waiting):
            for name in node.outputs:
                if name and name in producers:
                    raise ModelFileError(f"{where}: {node.told()} makes {name!r}, which is made twice: export it again")
                producers[name] = at
        needs = [[*node.inputs, *_captured(node)] for node in waiting]
        for node, names in zip(waiting, needs):
            for name in names:
                if name not in known:
                    raise ModelFileError(f"{where}: {node.told()} reads {name!r}, which nothing makes: export it again")
        state = [0] * len(waiting)
        for start in range(len(waiting)):
            todo = [start]
            while todo:
                at = todo[-1]
                if state[at] == 2:
                    todo.pop()
                    continue
                before = [producers[n] for n in needs[at] if n in producers and n not in made]
                pending = [b for b in before if state[b] != 2]
                if state[at] == 1 or not pending:
                    if any(state[b] == 1 for b in pending) or (pending and state[at] == 1):
                        raise ModelFileError(f"{where}: {waiting[at].told()} needs its own result: the graph is cyclic")
                    state[at] = 2
                    nodes.append(waiting[at])
                    todo.pop()
                else:
                    if any(state[b] == 1 for b in pending):
                        raise ModelFileError(f"{where}: {waiting[at].told()} needs its own result: the graph is cyclic")
                    state[at] = 1
                    todo.extend(pending)
        graph.nodes[:] = nodes
        for value in graph.outputs:
            if value.name not in known:
                raise ModelFileError(f"{where}: output {value.name!r} is made by nothing: export it again")
        inside = frozenset(known)
        for node in nodes:
            for attr in node.attrs.values():
                for inner in attr if isinstance(attr, list) else [attr]:
                    if isinstance(inner, OnnxGraph):
                        self._sort(inner, inside)

    # --- running ----------------------------------------------------------------------------------------------------

    def __call__(self, ctx: Context, inputs: Mapping[str, Any]) -> Sequence[Any]:
        return self.run(ctx, self.model.graph, dict(inputs), {}, self.model.opsets)

    def run(self, ctx: Context, graph: OnnxGraph, inputs: dict[str, Any], outer: Mapping[str, Any],
            opsets: Mapping[str, int]) -> list[Any]:  # fmt: skip
        """The outputs of a graph; names it does not define are those around it."""
        env = dict(outer)
        for name, ref in graph.weights.items():
            env[name] = self.constant(ctx, ref)
        env.update(graph.texts)
        env.update(inputs)
        self._nodes(ctx, graph.nodes, env, opsets, {v.name for v in graph.outputs} | set(outer))
        return [env[v.name] for v in graph.outputs]

    def constant(self, ctx: Context, ref: Any) -> Any:
        """A tensor of the file: a value of the host while small, else a weight."""
        if not isinstance(ref, TensorRef):
            return ref[1]
        if not is_host(ref):
            name = self._refs[id(ref)]
            return ctx.weight(name).t() if name in self.turned else ctx.weight(name)
        found = self._hosts.get(id(ref))
        if found is None:
            with plain():
                found = self._hosts[id(ref)] = ref.read()
        return Host(found)

    def _nodes(self, ctx: Context, nodes: list[Node], env: dict[str, Any], opsets: Mapping[str, int],
               kept: set[str]) -> None:  # fmt: skip
        last: dict[str, int] = {}
        for at, node in enumerate(nodes):
            for name in (*node.inputs, *_captured(node)):
                last[name] = at
        for at, node in enumerate(nodes):
            outs = self.node(ctx, node, env, opsets)
            for name, value in zip(node.outputs, outs):
                if name:
                    env[name] = value
            if not ctx.static:
                for name in node.inputs:
                    if last.get(name) == at and name not in kept:
                        env.pop(name, None)

    def node(self, ctx: Context, node: Node, env: dict[str, Any], opsets: Mapping[str, int]) -> Sequence[Any]:
        where = f"{self.model.path}: {node.told()}"
        ctx.step(where)
        function = self.model.functions.get((node.domain, node.op))
        args = [env[name] if name else None for name in node.inputs]
        if function is not None:
            return self._call(ctx, function, node, args, where)
        if ctx.trace is not None:
            ctx.trace.scope = node.scope
        op = OPS.get((node.domain, node.op))
        if op is None:
            raise unknown(node, opsets, where)
        call = Call(node, opsets.get(node.domain, 1), ctx, where, self)
        try:
            outs = op.fn(call, env, *args) if op.raw else self._apply(ctx, call, op, args)
        except (RidgelineError, NeedsData):
            raise
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError, KeyError, OverflowError,
                AttributeError, NotImplementedError, ArithmeticError, RecursionError) as error:  # fmt: skip
            told = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise ModelFileError(f"{where} does not take {', '.join(map(_shown, args))}: {told[:300]}") from error
        outs = outs if isinstance(outs, tuple) else (outs,)
        if len(outs) < len([name for name in node.outputs if name]):
            raise ModelFileError(f"{where}: output {node.outputs[len(outs)]!r} is not supported for this op: "
                                 "export the model without it")  # fmt: skip
        return outs

    def _call(self, ctx: Context, function: Function, node: Node, args: list[Any], where: str) -> Sequence[Any]:
        """A function of the model's own, with the attributes of this call put in."""
        given = {**function.defaults, **node.attrs}

        def filled(body: Node) -> Node:
            attrs = {}
            for key, value in body.attrs.items():
                if isinstance(value, AttrRef):
                    if value.name not in given:
                        continue
                    value = given[value.name]
                attrs[key] = value
            return Node(body.op, body.domain, f"{node.name}/{body.name}", body.inputs, body.outputs, attrs, node.scope)

        if len(args) > len(function.inputs):
            raise ModelFileError(f"{where} gives {len(args)} inputs to a function of {len(function.inputs)}")
        padded = args + [None] * (len(function.inputs) - len(args))
        env = dict(zip(function.inputs, padded))
        if ctx.steps and getattr(self, "_depth", 0) > 50:
            raise ModelFileError(f"{where}: functions call each other more than 50 deep")
        self._depth = getattr(self, "_depth", 0) + 1
        try:
            nodes = [filled(body) for body in function.nodes]
            for body in nodes:
                for value in body.attrs.values():
                    if isinstance(value, TensorRef) and not is_host(value) and id(value) not in self._refs:
                        raise ModelFileError(f"{where}: a function holds a large constant: inline the functions first")
            self._nodes(ctx, nodes, env, {**self.model.opsets, **function.opsets}, set(function.outputs))
        finally:
            self._depth -= 1
        missing = [name for name in function.outputs if name not in env]
        if missing:
            raise ModelFileError(f"{where}: its function does not make {missing[0]!r}: the file is damaged")
        return tuple(env[name] for name in function.outputs)

    def _apply(self, ctx: Context, call: Call, op: Op, args: list[Any]) -> Any:
        """The op on the host where all it takes is known there, else as calls."""
        if not op.eager and all(_is_host(arg) for arg in args):
            plains = [_unwrapped(arg) for arg in args]
            with plain():
                if _affordable(call, op, plains):
                    return _wrapped(op.fn(call, *plains))
        call.device = torch.device("meta") if ctx.static else ctx.device
        given: list[Any] = []
        scalar = op.scalars and len(args) == 2
        for i, arg in enumerate(args):
            if i in op.host and arg is not None:
                given.append(
                    ctx.host(arg, f"input {i + 1} of {call.where}") if not isinstance(arg, np.ndarray) else arg
                )
            elif i in op.known and isinstance(arg, Host):
                given.append(arg.t)
            elif scalar and isinstance(arg, Host) and (number := _number(arg.t, args[1 - i])) is not None:
                given.append(number)
            else:
                given.append(_placed(arg, ctx))
        if not ctx.static and op.grows:
            _within_memory(call, op, given)
        return op.fn(call, *given)


def is_host(ref: TensorRef) -> bool:
    """Whether a constant is small enough to be known on the host: it may decide a shape or a branch."""
    if ref.dtype in (torch.int64, torch.int32, torch.bool):
        return ref.numel <= 1 << 20  # positions, sizes and masks
    return ref.numel <= (4 if ref.dtype.is_floating_point else 64)


def unknown(node: Node, opsets: Mapping[str, int], where: str) -> ModelFileError:
    """What to say of an op that is not in the table."""
    domain = node.domain or "ai.onnx"
    known = [name for d, name in OPS if d == node.domain]
    return ModelFileError(f"{where}: op {node.op!r} of domain {domain!r}, version {opsets.get(node.domain, 1)}, is not "
                          f"supported{nearest(node.op, known) if known else ''}; replace it by supported ops, or give "
                          "the model a function of this name that says what it does")  # fmt: skip


def survey(model: OnnxModel) -> list[OpRow]:
    """Every kind of op of the model, graphs inside of nodes included, with what is missing."""
    found: dict[tuple[str, str], list[Node]] = {}
    todo = list(model.graph.nodes) + [node for function in model.functions.values() for node in function.nodes]
    while todo:
        node = todo.pop()
        found.setdefault((node.domain, node.op), []).append(node)
        for value in node.attrs.values():
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, OnnxGraph):
                    todo += inner.nodes
    rows = []
    for (domain, name), nodes in sorted(found.items()):
        known = (domain, name) in OPS or (domain, name) in model.functions
        why = "" if known else f"op set {model.opsets.get(domain, 1)} of {domain or 'ai.onnx'}: not in the table"
        shown = f"{domain}.{name}" if domain else name
        rows.append(OpRow(shown, len(nodes), why, nodes[-1].name or (nodes[-1].outputs or [""])[0]))
    return rows


def check_opsets(model: OnnxModel) -> None:
    """Refuse versions whose ops mean something else than the table's."""
    version = model.opsets.get("")
    if version is None and any(node.domain == "" for node in model.graph.nodes):
        raise ModelFileError(f"{model.path} does not say which version of the op set it uses: export it again")
    if version is not None and not FIRST_OPSET <= version <= LAST_OPSET:
        raise ModelFileError(
            f"{model.path} uses op set {version}; supported are {FIRST_OPSET} to {LAST_OPSET}: export "
            f"it with opset_version={LAST_OPSET}, or convert it with onnx.version_converter"
        )


def _captured(node: Node) -> list[str]:
    """Names a node's graphs read from around it."""
    found: list[str] = []
    for value in node.attrs.values():
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, OnnxGraph):
                own = {v.name for v in inner.inputs} | set(inner.weights) | set(inner.texts)
                own |= {name for n in inner.nodes for name in n.outputs}
                reads = [name for n in inner.nodes for name in (*n.inputs, *_captured(n))]
                reads += [v.name for v in inner.outputs]
                found += [name for name in reads if name and name not in own]
    return found


def _is_host(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_host(item) for item in value)
    return value is None or isinstance(value, (Host, np.ndarray))


def _unwrapped(value: Any) -> Any:
    if isinstance(value, list):
        return [_unwrapped(item) for item in value]
    return value.t if isinstance(value, Host) else value


def _wrapped(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Host(value)
    return type(value)(_wrapped(item) for item in value) if isinstance(value, (list, tuple)) else value


def _placed(value: Any, ctx: Context) -> Any:
    if isinstance(value, list):
        return [_placed(item, ctx) for item in value]
    return ctx.constant(value.t) if isinstance(value, Host) else value


def _number(t: torch.Tensor, other: Any) -> Any:
    """A single element as a Python number, where the result is the same."""
    if t.numel() != 1 or not isinstance(other, torch.Tensor) or other.dtype != t.dtype or t.dim() > other.dim():
        return None
    return t.item() if t.dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64,
                                   torch.int32, torch.bool) else None  # fmt: skip


def _affordable(call: Call, op: Op, args: list[Any]) -> bool:
    """Whether the host may compute it now: sizes are tried on meta tensors before memory is asked for."""
    product = 1
    for arg in args:
        for item in arg if isinstance(arg, list) else [arg]:
            if isinstance(item, torch.Tensor):
                product *= max(item.numel(), 1)
    if not op.grows and product <= 1 << 20:
        return True
    call.device = torch.device("meta")
    try:
        metas = [a.to("meta") if isinstance(a, torch.Tensor) and i not in op.host else a for i, a in enumerate(args)]
        out = op.fn(call, *metas)
    except (RuntimeError, NotImplementedError):
        return product <= 1 << 20
    finally:
        call.device = torch.device("cpu")
    outs = out if isinstance(out, (list, tuple)) else (out,)
    num_bytes = sum(o.numel() * o.dtype.itemsize for o in outs if isinstance(o, torch.Tensor))
    return num_bytes <= MAX_HOST_BYTES


def _within_memory(call: Call, op: Op, args: list[Any]) -> None:
    """Refuse what no machine holds before the allocator is asked."""
    device, call.device = call.device, torch.device("meta")
    try:
        metas = [a.to("meta") if isinstance(a, torch.Tensor) and i not in op.host else a for i, a in enumerate(args)]
        with plain():
            out = op.fn(call, *metas)
    except (RuntimeError, NotImplementedError, RidgelineError):
        return
    finally:
        call.device = device
    for o in out if isinstance(out, (list, tuple)) else (out,):
        if isinstance(o, torch.Tensor) and o.numel() * o.dtype.itemsize > 1 << 36:
            raise call.wrong(f"asks for {o.numel() * o.dtype.itemsize / 1e9:,.0f} GB: no such tensor is made")


def _shown(value: Any) -> str:
    if isinstance(value, Host):
        value = value.t
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"string{list(value.shape)}"
    return f"a sequence of {len(value)}" if isinstance(value, list) else "nothing"
