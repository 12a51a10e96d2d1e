"""Programs: what an imported model runs for one set of input shapes, as a graph of PyTorch calls.

An importer's body is run once per input signature. What depends on shapes and small constants alone is computed on the
host while it runs; every other call is recorded on meta tensors and becomes a node of an FX graph, which runs, compiles
and captures like any module's forward. A body that needs data only a run has is run as it is, every time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes as outside_modes
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from ridgeline.capture.inputs import Dim, Spec
from ridgeline.capture.model import torch_dtype
from ridgeline.capture.shadows import shadow_of
from ridgeline.errors import ModelFileError

MAX_HOST_BYTES = 1 << 26
"""What one node may compute while a model is planned; larger results are left to the run."""
MAX_STEPS = 100_000
"""Nodes that are run to plan a model, loops unrolled."""


class Host:
    """A value known while the model is planned: a real tensor in host memory."""

    __slots__ = ("t",)

    def __init__(self, t: torch.Tensor) -> None:
        self.t = t


class NeedsData(Exception):
    """A body asked for data that a plan does not have."""

    def __init__(self, inputs: frozenset[str], why: str) -> None:
        super().__init__(why)
        self.inputs = inputs


_METHODS = {
    getattr(torch.Tensor, name): name for name in dir(torch.Tensor)
    if callable(getattr(torch.Tensor, name, None)) and name not in ("__getitem__", "__class__")
}  # fmt: skip
"""How a tensor's methods are called, by the function that stands for each."""


class Trace(TorchFunctionMode):
    """Writes down PyTorch's calls on meta tensors, at the level they are called."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.device = device
        self.nodes: dict[int, fx.Node] = {}
        self.kept: list[torch.Tensor] = []  # an id is a tensor's while it lives
        self.constants: dict[str, torch.Tensor] = {}
        self.scope = ""

    def placeholder(self, name: str, like: torch.Tensor) -> torch.Tensor:
        node = self.graph.placeholder(f"arg_{len(self.nodes)}")
        return self.own(node, torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta"))

    def own(self, node: fx.Node, t: torch.Tensor) -> torch.Tensor:
        self.nodes[id(t)] = node
        self.kept.append(t)
        node.meta.update(shape=tuple(t.shape), stride=t.stride(), dtype=t.dtype, scope=self.scope)
        return t

    def constant(self, t: torch.Tensor) -> torch.Tensor:
        name = f"constant_{len(self.constants)}"
        self.constants[name] = t
        node = self.graph.get_attr(name)
        return self.own(node, torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        tensors = (
            [out]
            if isinstance(out, torch.Tensor)
            else ([t for t in out if isinstance(t, torch.Tensor)] if isinstance(out, (list, tuple)) else [])
        )
        if not tensors or not any(t.is_meta for t in tensors):
            return out
        if len(self.nodes) > MAX_STEPS:
            raise ModelFileError(f"the model runs more than {MAX_STEPS:,} operators: split it, or export its loops")
        node = self._node(func, args, kwargs)
        if isinstance(out, torch.Tensor):
            if id(out) in self.nodes:  # handed back as it was
                return out
            self.own(node, out)
        else:
            node.meta["scope"] = self.scope
            for i, t in enumerate(out):
                if isinstance(t, torch.Tensor):
                    self.own(self.graph.call_function(operator.getitem, (node, i)), t)
        return out

    def _node(self, func: Any, args: Any, kwargs: Any) -> fx.Node:
        def mapped(tree: Any) -> Any:
            if isinstance(tree, torch.Tensor):
                if id(tree) not in self.nodes:
                    return self.nodes[id(self.constant(tree))] if not tree.is_meta else self._unknown(func)
                return self.nodes[id(tree)]
            if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
                return type(tree)(mapped(item) for item in tree)
            if isinstance(tree, torch.Size):
                return tuple(tree)
            if isinstance(tree, dict):
                return {key: mapped(item) for key, item in tree.items()}
            return self.device if isinstance(tree, torch.device) and tree.type == "meta" else tree

        args, kwargs = mapped(tuple(args)), mapped(dict(kwargs))
        if func in _METHODS:
            return self.graph.call_method(_METHODS[func], args, kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self.graph.call_function(getattr, (args[0], func.__self__.__name__))
        if name == "__getitem__":
            return self.graph.call_function(operator.getitem, args)
        return self.graph.call_function(func, args, kwargs)

    @staticmethod
    def _unknown(func: Any) -> Any:
        raise AssertionError(f"{func} takes a meta tensor that was not recorded")

    def inputs_of(self, t: torch.Tensor) -> set[fx.Node]:
        """Placeholders that decide a tensor's value."""
        found: set[fx.Node] = set()
        seen: set[fx.Node] = set()
        todo = [self.nodes[id(t)]]
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.op == "placeholder":
                found.add(node)
            todo.extend(node.all_input_nodes)
        return found


class Context:
    """What a body may ask for while it runs: weights, constants, values of the host."""

    def __init__(self, model: Imported, device: torch.device, trace: Trace | None) -> None:
        self.model, self.device, self.trace = model, device, trace
        self.steps = 0
        self.origins: dict[int, tuple[str, bool]] = {}  # meta tensor → name, whether a weight
        self._weights: dict[str, torch.Tensor] = {}
        self._constants: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def static(self) -> bool:
        return self.trace is not None

    def weight(self, name: str) -> torch.Tensor:
        """A weight as the calls see it."""
        if name not in self._weights:
            t = self.model.tensor(name)
            if self.trace is not None:
                node = self.trace.graph.placeholder(f"weight_{len(self._weights)}")
                node.meta["weight"] = name
                # Placeholders come first in a graph, whenever a weight is met
                t = self.trace.own(node, torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"))
                self.origins[id(t)] = (name, True)
            self._weights[name] = t
        return self._weights[name]

    def constant(self, t: torch.Tensor) -> torch.Tensor:
        """A value of the host as one of the device."""
        found = self._constants.get(id(t))
        if found is None:
            made = self.trace.constant(t) if self.trace is not None else t.to(self.device)
            found = self._constants[id(t)] = (t, made)
        return found[1]

    def host(self, value: Any, where: str) -> torch.Tensor:
        """The data of a value, for what decides shapes and branches."""
        if isinstance(value, Host):
            return value.t
        t: torch.Tensor = value
        if self.trace is None:
            if isinstance(t, FakeTensor):
                known = shadow_of(t)
                if known is None:
                    raise ModelFileError(f"{where} needs data that only a run would know: shapes or branches hang on "
                                         "it; give the input's values, or run the model itself")  # fmt: skip
                return known
            with outside_modes():
                return t.detach().cpu()
        name, is_weight = self.origins.get(id(t), ("", False))
        if is_weight:
            return self.model.refs[name].read()
        nodes = self.trace.inputs_of(t)
        names = {node.meta.get("input") for node in nodes if "weight" not in node.meta}
        raise NeedsData(frozenset(n for n in names if n), where)

    def step(self, where: str) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise ModelFileError(f"{where}: more than {MAX_STEPS:,} nodes run to plan the model, loops unrolled: "
                                 "shorten its loops")  # fmt: skip


@contextmanager
def plain() -> Iterator[None]:
    """Calls inside are PyTorch's own on real tensors, whatever captures around."""
    if _len_torch_dispatch_stack() == 0:
        yield
        return
    with outside_modes():
        yield


class Program(fx.GraphModule):
    """The calls for one signature. Inputs are those of the model, then the weights it reads."""

    weight_names: tuple[str, ...]
    stats: dict[str, int]


class Scope(fx.GraphModule):
    """The calls of one module of the original network; ``import_path`` is its name there."""

    import_path: str


@dataclass(frozen=True, slots=True)
class OpRow:
    """What an importer makes of one kind of op; ``why`` is empty where it is supported."""

    op: str
    count: int
    why: str = ""
    example: str = ""


Body = Callable[[Context, dict[str, Any]], Sequence[Any]]


class Weights(nn.Module):
    """A module that only holds: its parameters, and further such modules."""


class Imported(nn.Module):
    """A model file as a module: ``inputs`` and ``outputs`` with named dims, weights mapped, ATen calls when run."""

    def __init__(self, name: str, form: str, body: Body, inputs: Mapping[str, Any], outputs: Sequence[str],
                 refs: Mapping[str, Any], *, buffers: Collection[str] = (),
                 turned: Collection[str] = ()) -> None:  # fmt: skip
        super().__init__()
        self.import_name, self.import_format = name, form
        self.inputs, self.outputs = dict(inputs), tuple(outputs)
        self.refs = dict(refs)
        self._body = body
        self._places: dict[str, tuple[nn.Module, str]] = {}
        for path, ref in self.refs.items():
            self._place(path, ref.read(), path in buffers)
        self._turned = set(turned)
        self._mark()
        self.survey: list[OpRow] = []
        self.raises = True
        self.host_inputs: tuple[str, ...] = ()
        self.dynamic = False
        self.why_dynamic = ""
        self._programs: dict[Any, Program] = {}
        self._captured = False
        self.training = False

    def _place(self, path: str, t: torch.Tensor, is_buffer: bool) -> None:
        """Register a weight under its name in the file, dots as modules."""
        holder: nn.Module = self
        *folders, leaf = [part or "_" for part in path.split(".")]
        for depth, folder in enumerate(folders):
            found = holder._modules.get(folder)
            if found is None:
                if hasattr(holder, folder) or depth > 30:
                    holder, leaf = self, path.replace(".", "/")
                    break
                found = Weights()
                found.training = False
                holder.add_module(folder, found)
            holder = found
        if hasattr(holder, leaf):
            holder, leaf = self, path.replace(".", "/")
            while hasattr(holder, leaf):
                leaf += "_"
        if not is_buffer and (t.dtype.is_floating_point or t.dtype.is_complex):
            wanted = t.dtype.itemsize > 1
            holder.register_parameter(leaf, nn.Parameter(t, requires_grad=wanted))
        else:
            holder.register_buffer(leaf, t)
        self._places[path] = (holder, leaf)

    def _mark(self) -> None:
        """Weights that the file holds transposed are copied on the first run; captures see that layout before."""
        for name in self._turned:
            self.tensor(name).runs_contiguous = True  # type: ignore[attr-defined]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _turn(self) -> None:
        for name in list(self._turned):
            t = self.tensor(name)
            if isinstance(t, FakeTensor) or t.is_meta:
                return
            with plain(), torch.no_grad():
                t.data = t.data.contiguous()
            self._turned.discard(name)

    def tensor(self, name: str) -> torch.Tensor:
        """A weight by its name in the file."""
        holder, leaf = self._places[name]
        return getattr(holder, leaf)  # type: ignore[no-any-return]

    @property
    def num_params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = self._given(args, kwargs)
        if self._turned:
            self._turn()
        if self.dynamic:
            return self._packed(self._run(given))
        key = self._key(given)
        program = self._programs.get(key)
        if program is None:
            program = self._planned(key, given)
            if program is None:
                return self._packed(self._run(given))
        weights = [self.tensor(name) for name in program.weight_names]
        return self._packed(program(*given.values(), *weights))

    def _packed(self, outs: Any) -> Any:
        return outs[0] if len(outs) == 1 else tuple(outs)

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        names = list(self.inputs)
        if len(args) + len(kwargs) != len(names) or any(k not in names[len(args) :] for k in kwargs):
            raise ModelFileError(f"{self.import_name} takes {', '.join(names) or 'no inputs'}, in this order or "
                                 f"by name: not {len(args)} and {list(kwargs)}")  # fmt: skip
        return {name: args[i] if i < len(args) else kwargs[name] for i, name in enumerate(names)}

    def _key(self, given: dict[str, Any]) -> Any:
        made = [
            (tuple(t.shape), t.dtype, t.device) if isinstance(t, torch.Tensor) else ("", None, None)
            for t in given.values()
        ]
        values = [tuple(_data(given[name]).reshape(-1).tolist()) for name in self.host_inputs]
        return (*made, *values)

    def _run(self, given: dict[str, Any]) -> Sequence[Any]:
        """The body itself on what was given."""
        device = next((t.device for t in given.values() if isinstance(t, torch.Tensor)), torch.device("cpu"))
        context = Context(self, device, None)
        return [_output(value, context) for value in self._body(context, dict(given))]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _planned(self, key: Any, given: dict[str, Any]) -> Program | None:
        """The program of a signature; None where every run must be one of the body."""
        if any(not isinstance(t, torch.Tensor) for t in given.values()):
            self.dynamic, self.why_dynamic = True, "inputs that are no tensors"
            return None
        metas = {name: (tuple(t.shape), t.stride(), t.dtype, t.device) for name, t in given.items()}
        # While a capture runs, tensors say they are on a device that is not there: constants stay on the host
        self._captured = any(isinstance(t, FakeTensor) for t in given.values())
        data = {name: _data(given[name]) for name in self.host_inputs}
        while True:
            try:
                program = self._trace(metas, data)
            except NeedsData as needed:
                if (
                    not needed.inputs
                    or needed.inputs <= set(data)
                    or any(given[n].dtype.is_floating_point or given[n].numel() > 4096 for n in needed.inputs)
                ):
                    self.dynamic, self.why_dynamic = True, str(needed)
                    return None
                self.host_inputs = tuple(n for n in self.inputs if n in needed.inputs or n in self.host_inputs)
                data = {name: _data(given[name]) for name in self.host_inputs}
                key = self._key(given)
                continue
            self._programs[key] = program
            return program

    def _trace(self, metas: Mapping[str, Any], data: Mapping[str, torch.Tensor]) -> Program:
        from ridgeline.capture.importers.raising import raised

        device = next((m[3] for m in metas.values()), None)
        if device is None:
            device = next((t.device for t in self.parameters()), torch.device("cpu"))
        trace = Trace(device)
        context = Context(self, device, trace)
        with outside_modes(), torch.no_grad(), trace:
            values: dict[str, Any] = {}
            for name, (shape, stride, dtype, _) in metas.items():
                like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
                made = trace.placeholder(name, like)
                trace.nodes[id(made)].meta["input"] = name
                context.origins[id(made)] = (name, False)
                values[name] = Host(data[name]) if name in data else made
            outs = [_output(value, context) for value in self._body(context, values)]
        if any(not isinstance(t, torch.Tensor) for t in outs):
            raise NeedsData(frozenset(), "outputs that are no tensors")
        results = tuple(trace.nodes[id(t)] for t in outs)
        trace.graph.output(results)
        _placeholders_first(trace.graph)
        if self.raises:
            with plain():
                raised(trace.graph, trace.constants, lambda name: self.refs[name].read(), self.import_format)
        return _program(trace, torch.device("cpu") if self._captured else device)

    @property
    def input_specs(self) -> tuple[Any, ...]:
        """What ``capture`` takes where no inputs are given."""
        for name, value in self.inputs.items():
            if not isinstance(value, Spec):
                raise ModelFileError(f"{self.import_name}: the shape of input {name!r} is not in the file: "
                                     "give the inputs, as args=(…)")  # fmt: skip
        return tuple(self.inputs.values())

    @property
    def dims(self) -> list[str]:
        """Names of the dims that are bound when the model is captured."""
        found = [d.name for value in self.inputs.values() if isinstance(value, Spec) for d in value.shape
                 if isinstance(d, Dim)]  # fmt: skip
        return list(dict.fromkeys(found))

    def example(
        self, bindings: Mapping[str, int], device: str | torch.device = "cpu", seed: int = 0
    ) -> tuple[Any, ...]:
        """Inputs to run it with: normal floats, zeros for integers and ones for masks."""
        generator = torch.Generator().manual_seed(seed)
        made = []
        for name, value in zip(self.inputs, self.input_specs):
            shape, dtype = value.bound(bindings, name), torch_dtype(value.dtype.name)
            if dtype.is_floating_point:
                made.append(torch.randn(shape, generator=generator).to(dtype).to(device))
            else:
                made.append((torch.ones if "mask" in name else torch.zeros)(shape, dtype=dtype, device=device))
        return tuple(made)

    def fill(self, device: str | torch.device = "cpu", seed: int = 0) -> Imported:
        """Draw weights that the file does not hold, so that the model can be run and timed."""
        generator = torch.Generator().manual_seed(seed)
        for holder, leaf in self._places.values():
            t = getattr(holder, leaf)
            if t.is_meta:
                made = torch.randn(t.shape, generator=generator) / max(t[0].numel() if t.dim() else 1, 1) ** 0.5
                made = (made.abs() if leaf == "var" else made).to(t.dtype)
                is_parameter = leaf in holder._parameters
                setattr(holder, leaf, nn.Parameter(made, t.requires_grad) if is_parameter else made)
        return self.to(device)

    def __getstate__(self) -> Any:
        raise ModelFileError(f"{self.import_name} is mapped from its file: load it again with ridgeline.load")

    def __deepcopy__(self, memo: Any) -> Imported:
        made: Imported = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        nn.Module.__init__(made)
        import copy

        shared = {"_body", "refs", "inputs", "outputs", "import_name", "import_format"}
        for name, value in self.__dict__.items():
            made.__dict__[name] = value if name in shared else {} if name == "_programs" else copy.deepcopy(value, memo)
        made._mark()
        return made


def _data(t: torch.Tensor) -> torch.Tensor:
    if isinstance(t, FakeTensor):
        known = shadow_of(t)
        if known is None:
            raise ModelFileError("the model's shapes hang on the values of an integer input: pass its real values")
        return known
    if t.is_meta:
        return torch.zeros(t.shape, dtype=t.dtype)
    with plain():
        return t.detach().cpu()


def _output(value: Any, context: Context) -> Any:
    if isinstance(value, Host):
        return context.constant(value.t)
    if isinstance(value, list):
        return [_output(item, context) for item in value]
    return value


def has_effects(node: fx.Node) -> bool:
    """Whether a node must stay though nothing reads it."""
    schema = getattr(node.target, "_schema", None)
    return node.op in ("placeholder", "output") or (schema is not None and bool(schema.is_mutable))


def _placeholders_first(graph: fx.Graph) -> None:
    """Inputs, then weights, in front of everything else."""
    holders = [node for node in graph.nodes if node.op == "placeholder"]
    ordered = [n for n in holders if "weight" not in n.meta] + [n for n in holders if "weight" in n.meta]
    first = next(iter(graph.nodes))
    for node in ordered:
        if node is not first:
            first.prepend(node)
        else:
            first = node.next


def _program(trace: Trace, device: torch.device) -> Program:
    graph = trace.graph
    graph.eliminate_dead_code(is_impure_node=has_effects)
    # Weights that nothing reads after raising are not asked for
    for node in list(graph.nodes):
        if node.op == "placeholder" and "weight" in node.meta and not node.users:
            graph.erase_node(node)
    root = nn.Module()
    with plain():
        for node in graph.nodes:
            if node.op == "get_attr":
                root.register_buffer(str(node.target), trace.constants[str(node.target)].to(device))
    made = Program(root, _scoped(graph, root), class_name="Program")
    made.weight_names = tuple(
        n.meta["weight"] for n in made.graph.nodes if n.op == "placeholder" and "weight" in n.meta
    )
    made.training = False
    return made


def _scoped(graph: fx.Graph, root: nn.Module) -> fx.Graph:
    """The graph with each run of calls from one module of the network as a module of its own."""
    body = [n for n in graph.nodes if n.op in ("call_function", "call_method")]
    runs: list[list[fx.Node]] = []
    for node in body:
        if runs and runs[-1][0].meta.get("scope", "") == node.meta.get("scope", ""):
            runs[-1].append(node)
        else:
            runs.append([node])
    if len(runs) < 2:
        return graph
    made = fx.Graph()
    outer: dict[fx.Node, fx.Node] = {}
    owner = {node: at for at, run in enumerate(runs) for node in run}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            outer[node] = made.node_copy(node)
            outer[node].meta = dict(node.meta)
    used = {arg for node in graph.nodes if node.op == "output" for arg in node.all_input_nodes}
    for at, run in enumerate(runs):
        scope = run[0].meta.get("scope", "")
        if not scope:
            for node in run:
                outer[node] = made.node_copy(node, lambda n: outer[n])
            continue
        inner = fx.Graph()
        needs = dict.fromkeys(a for node in run for a in node.all_input_nodes if owner.get(a) != at)
        local = {need: inner.placeholder(f"x{i}") for i, need in enumerate(needs)}
        for node in run:
            local[node] = inner.node_copy(node, lambda n, local=local: local[n])
        gives = [n for n in run if n in used or any(owner.get(u) != at for u in n.users)]
        inner.output(tuple(local[n] for n in gives) if len(gives) != 1 else local[gives[0]])
        part = Scope(nn.Module(), inner, class_name="Scope")
        part.import_path = scope
        part.training = False
        name = f"scope_{at}"
        root.add_module(name, part)
        call = made.call_module(name, tuple(outer[need] for need in needs))
        if len(gives) == 1:
            outer[gives[0]] = call
        else:
            for i, node in enumerate(gives):
                outer[node] = made.call_function(operator.getitem, (call, i))
    last = next(node for node in graph.nodes if node.op == "output")
    made.output(fx.map_arg(last.args[0], lambda n: outer[n]))
    return made
