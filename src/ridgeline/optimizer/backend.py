"""The torch.compile backend "ridgeline": rewrites a traced graph, lowers it, and reports what was rewritten."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.engine import autocast as casts
from ridgeline.engine.replay.compiled import Heard, heard_on_this_thread
from ridgeline.errors import OptimizeError, nearest
from ridgeline.optimizer.compile.module_labels import nameable
from ridgeline.optimizer.compile.pieces import compiled_in_pieces
from ridgeline.optimizer.rewrites import autocast, chosen, recommended
from ridgeline.optimizer.rewrites import rewrites as all_rewrites
from ridgeline.optimizer.rewrites.context import LOWERED_BY, Extra, GraphContext, is_removable, stand_in, tracing_mode
from ridgeline.optimizer.rewrites.registry import INFERENCE, TRAINING, Match, Rewrite

COMPILERS = ("none", "inductor", "inductor-autotune")
OWN_OPTIONS = ("attention", "matched", "narrow", "pieces", "timed_convolutions")
"""Options of ours, as opposed to Inductor's. ``matched`` rejects a graph in which no rewrite matches."""
AUTOTUNED: Mapping[str, Any] = {"max_autotune": True, "coordinate_descent_tuning": True}
"""Inductor's options behind ``inductor-autotune``; its CUDA graphs stay off, because we capture."""
UNCHANGED = "no rewrite matched that changes what is computed: it would be torch.compile"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A possible match that a rewrite left alone, and why."""

    rewrite: str
    where: str
    why: str


@dataclass(slots=True)
class Report:
    """What the backend did to a model, filled during compilation."""

    graphs: int = 0
    nodes_before: int = 0
    nodes_after: int = 0
    matches: list[Match] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    breaks: dict[str, int] = field(default_factory=dict)
    casts: int = 0  # autocast's casts written into graphs
    recompiles: int = 0  # graphs compiled by a second call like the first
    undos: list[Callable[[], None]] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """How often each rewrite matched."""
        return dict(Counter(match.rewrite for match in self.matches))

    def places(self, rewrite: str) -> list[str]:
        """The modules in which a rewrite matched."""
        return [match.where for match in self.matches if match.rewrite == rewrite]

    def as_dict(self) -> dict[str, Any]:
        return {
            "graphs": self.graphs,
            "nodes_before": self.nodes_before,
            "nodes_after": self.nodes_after,
            "matches": [{"rewrite": m.rewrite, "where": m.where, "what": m.what} for m in self.matches],
            "refusals": [{"rewrite": r.rewrite, "where": r.where, "why": r.why} for r in self.refusals],
            "breaks": dict(self.breaks),
        }

    def undo(self) -> None:
        """Undo changes outside of the graph: concatenated parameters get memory of their own again."""
        while self.undos:
            self.undos.pop()()

    def __str__(self) -> str:
        counts = ", ".join(f"{name} ×{num}" for name, num in self.counts().items()) or "nothing rewritten"
        breaks = f"; {sum(self.breaks.values())} graph breaks" if self.breaks else ""
        return f"{self.graphs} graphs, {self.nodes_before} → {self.nodes_after} nodes: {counts}{breaks}"


def compiled(
    model: Any,
    *,
    rewrites: Sequence[str] | None = None,
    compiler: str = "none",
    options: Mapping[str, Any] | None = None,
    report: Report | None = None,
    fullgraph: bool = False,
) -> Callable[..., Any]:
    """The model behind torch.compile with this backend, specialized to the shapes it is called with.

    ``rewrites`` are names (None: those recommended for mode, compiler and device). ``options`` go to the compiler,
    except ``attention``, which the attention rewrites read, and ``pieces``: False compiles the graph as a whole.
    ``report`` is filled as graphs are compiled.
    """
    return Traced(model, fullgraph=fullgraph).lowered(
        rewrites=rewrites, compiler=compiler, options=options, report=report
    )


class Traced:
    """A function behind torch.compile that is traced once and lowered in several ways.

    Tracing a large model takes longer than lowering it. Each lowering has a callable of its own; all share the guards,
    and every graph behind them runs as the call in progress was lowered.
    """

    def __init__(self, model: Any, *, fullgraph: bool = False) -> None:
        # Dynamo compiles at most so many variants of a function; a search needs more than the default 8.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        self._collector = GraphCollector()
        self._run = torch.compile(model, backend=self._collector.collected, dynamic=False, fullgraph=fullgraph)

    def lowered(
        self,
        *,
        rewrites: Sequence[str] | None = None,
        compiler: str = "none",
        options: Mapping[str, Any] | None = None,
        report: Report | None = None,
    ) -> Callable[..., Any]:
        """The function lowered this way; arguments as for ``compiled``."""
        _checked(compiler)
        chosen(rewrites or (), INFERENCE)  # reports an unknown name now, not in the middle of a compilation
        lowering = Lowering(rewrites, compiler, dict(options or {}), Report() if report is None else report)
        here, traced = self._collector.here, self._run

        def run(*args: Any, **kwargs: Any) -> Any:
            before = getattr(here, "lowering", None)
            here.lowering = lowering
            try:
                return traced(*args, **kwargs)
            finally:
                here.lowering = before

        return run


class GraphCollector:
    """The backend that receives Dynamo's graphs. It holds no model, because PyTorch keeps every backend alive until
    it is reset."""

    def __init__(self) -> None:
        self.here = threading.local()
        self._before = Counter(torch._dynamo.utils.counters["graph_break"])
        self.breaks: dict[str, int] = {}

    def lowering(self) -> Lowering:
        """How the call in progress wants its graphs lowered."""
        found: Lowering = self.here.lowering
        return found

    def collected(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Graph:
        graph = Graph(self, gm)
        self.breaks = dict(Counter(torch._dynamo.utils.counters["graph_break"]) - self._before)
        graph.lowered(example_inputs)
        return graph


@dataclass(slots=True, eq=False, weakref_slot=True)
class Lowering:
    """How graphs are lowered, and the report to fill."""

    rewrites: Sequence[str] | None
    compiler: str
    options: dict[str, Any]
    report: Report


class Graph:
    """A traced graph, and its compiled callables by lowering."""

    def __init__(self, collector: GraphCollector, gm: fx.GraphModule) -> None:
        self.collector, self.gm = collector, _copied(gm)  # Dynamo strips the metadata of its own graph
        self.mode = tracing_mode()
        self.calls: weakref.WeakKeyDictionary[Lowering, Callable[..., Any]] = weakref.WeakKeyDictionary()

    def __call__(self, *args: Any) -> Any:
        call = self.calls.get(self.collector.lowering())
        if call is None:
            with self._tracing():
                call = self.lowered(args, self._stand_ins(args))
        heard: list[Heard] | None = heard_on_this_thread()
        if heard is None:
            return call(*args)
        returned = call(*args)
        heard.append(Heard(call, args, returned))
        return returned

    def lowered(self, inputs: Sequence[Any], stand_ins: Sequence[Any] | None = None) -> Callable[..., Any]:
        """Lower the graph for the call in progress; rewrites read real tensors, compilers fake ones."""
        wanted = self.collector.lowering()
        call = lower(self.gm, inputs, rewrites=wanted.rewrites, compiler=wanted.compiler, options=wanted.options,
                     report=wanted.report, stand_ins=stand_ins)  # fmt: skip
        wanted.report.breaks = self.collector.breaks
        self.calls[wanted] = call
        return call

    def _stand_ins(self, inputs: Sequence[Any]) -> list[Any]:
        """The tracer's fake inputs, whose sizes a compiler may take as static.

        A parameter with another layout since tracing, which guards do not notice, gets a new fake tensor.
        """
        known = [node.meta.get("example_value") for node in self.gm.graph.find_nodes(op="placeholder")]
        return [self._stand_in(given, value) for given, value in zip(inputs, known, strict=True)]

    def _stand_in(self, given: Any, known: Any) -> Any:
        if not isinstance(given, Tensor) or not isinstance(known, Tensor):
            return given if known is None else known
        if self.mode is None or (given.shape == known.shape and given.stride() == known.stride()):
            return known
        return stand_in(given, self.mode)

    def _tracing(self) -> contextlib.AbstractContextManager[Any]:
        """The tracer's context, which compilers look for."""
        if self.mode is None:
            return contextlib.nullcontext()
        return torch._guards.tracing(torch._guards.TracingContext(self.mode))


def backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """The entry point of ``torch.compile(model, backend="ridgeline", options={"rewrites": […], "compiler": …})``.

    The compiler is Inductor by default, tuned if ``mode`` begins with ``max-autotune``; other options go to it.
    """
    given = dict(options.pop("options", None) or {}) | options
    tuned = str(given.pop("mode", None) or "").startswith("max-autotune")
    compiler = given.pop("compiler", "inductor-autotune" if tuned else "inductor")
    rewrites, report = given.pop("rewrites", None), given.pop("report", None)
    unknown = sorted(given.keys() - OWN_OPTIONS) if compiler == "none" else []
    if unknown:
        known = ("compiler", "rewrites", "report", *OWN_OPTIONS)
        raise OptimizeError(f"no option {unknown[0]!r} without a compiler{nearest(unknown[0], known)}")
    return lower(gm, example_inputs, rewrites=rewrites, compiler=compiler, options=given, report=report)


def lower(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    rewrites: Sequence[str] | None = None,
    compiler: str = "none",
    options: Mapping[str, Any] | None = None,
    report: Report | None = None,
    stand_ins: Sequence[Any] | None = None,
) -> Callable[..., Any]:
    """Rewrite a graph, and run it as it is or compile it by Inductor.

    ``stand_ins`` are fake tensors for a compiler, if the inputs are real tensors of a call outside of tracing.
    """
    _checked(compiler)
    report = Report() if report is None else report
    chosen_options = dict(options or {})
    ctx = rewritten(gm, example_inputs, rewrites=rewrites, compiler=compiler, options=chosen_options, report=report)
    matched = any(all_rewrites()[match.rewrite].exact != "bits" for match in report.matches)
    # Smaller graphs are fragments between graph breaks, which say nothing about the rest of the model.
    if chosen_options.get("matched") and len(gm.graph.nodes) >= 50 and not matched:
        raise OptimizeError(UNCHANGED)
    with _as_written(ctx):
        call = _lowered(ctx, example_inputs if stand_ins is None else stand_ins, compiler, chosen_options)
    if ctx.casts is not None and casts.active():
        call = _without_autocast(call)
    if chosen_options.get("timed_convolutions"):
        call = _timing_convolutions(call)
    if not ctx.extras and not ctx.watches:
        return call
    report.undos.extend(extra.undo for extra in ctx.extras if extra.undo is not None)
    return _with_extra_inputs(call, ctx, gm.forward)


def rewritten(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    rewrites: Sequence[str] | None = None,
    compiler: str = "none",
    options: Mapping[str, Any] | None = None,
    report: Report | None = None,
) -> GraphContext:
    """Rewrite a copy of a graph, and return its context. Rewrites that fail are left out."""
    report = Report() if report is None else report
    options = {**(options or {}), LOWERED_BY: compiler}
    training = is_training(example_inputs)
    mode = TRAINING if training else INFERENCE
    names = recommended(mode, compiler, _device(example_inputs)) if rewrites is None else rewrites
    report.graphs += 1
    report.nodes_before += len(gm.graph.nodes)
    failed: list[Refusal] = []
    while True:  # if a rewrite fails, start again without it: failures are rare, so no copies are kept for them
        ctx = _context_with_casts(gm, example_inputs, training, options)
        left_out = {each.rewrite for each in failed}
        wanted = [each for each in chosen(names, ctx.mode) if each.name not in left_out]
        with _as_written(ctx):
            done, wrong = _run_rewrites(ctx, wanted)
        if wrong is None:
            break
        failed.append(wrong)
    ctx.gm.graph.eliminate_dead_code(lambda node: not is_removable(node))
    ctx.gm.recompile()
    report.matches += done
    report.casts += ctx.casts or 0
    report.refusals += [*failed, *(Refusal(*each) for each in ctx.refusals)]
    report.nodes_after += len(ctx.gm.graph.nodes)
    return ctx


def _run_rewrites(ctx: GraphContext, wanted: Sequence[Rewrite]) -> tuple[list[Match], Refusal | None]:
    """Run rewrites until one fails or changes the type of an output; returns the matches and that failure."""
    before = _signature(ctx)
    done: list[Match] = []
    for each in wanted:
        try:
            found = ctx.run(each.name, each.change)
            if ctx.relaxed:
                ctx.refresh()
        except Exception as error:  # reported, and left out
            return done, Refusal(each.name, "", f"{type(error).__name__}: {error}")
        if found and _signature(ctx) != before:
            return done, Refusal(each.name, "", "it would change the type or layout of an output")
        done += found
    return done, None


def is_training(example_inputs: Sequence[Any]) -> bool:
    """Whether gradients are recorded and an input requires one."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in example_inputs)


def _device(example_inputs: Sequence[Any]) -> str:
    kinds = {x.device.type for x in example_inputs if isinstance(x, Tensor)}
    return "cuda" if "cuda" in kinds else "cpu"


def _checked(compiler: str) -> None:
    if compiler not in COMPILERS:
        raise OptimizeError(f"no compiler {compiler!r}{nearest(compiler, COMPILERS)}")


def _context(gm: fx.GraphModule, example_inputs: Sequence[Any], training: bool, options: Any) -> GraphContext:
    return GraphContext(_copied(gm), list(example_inputs), training, dict(options or {}), autocast=bool(casts.active()))


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    own = fx.GraphModule(gm, _copied_graph(gm))
    own.meta = dict(gm.meta)
    for name in ("_param_name_to_source", "_source_to_user_stacks", "_unstatic_param_names"):
        if hasattr(gm, name):
            setattr(own, name, getattr(gm, name))
    return own


def _context_with_casts(
    gm: fx.GraphModule, example_inputs: Sequence[Any], training: bool, options: Any
) -> GraphContext:
    """The context with autocast's casts written into the graph, or as traced if they cannot be determined."""
    ctx, state = _context(gm, example_inputs, training, options), casts.active()
    if not state and not any(node.target is autocast.ENTER for node in gm.graph.nodes):
        return ctx
    ctx.casts = autocast.write_out(ctx, state)
    if ctx.casts is None:
        return _context(gm, example_inputs, training, options)
    ctx.autocast = False
    return ctx


def _as_written(ctx: GraphContext) -> Any:
    """The context in which values of the graph are computed: without autocast if its casts are written out."""
    return casts.off() if ctx.casts is not None else contextlib.nullcontext()


def _without_autocast(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with casts.off():
            return call(*args)

    return run


def _copied_graph(gm: fx.GraphModule) -> fx.Graph:
    """Copy a graph with the metadata on where each input came from.

    ``grapharg`` is left out: its weak references prevent swapping a weight, and Dynamo drops it too.
    """
    graph = fx.Graph()
    table: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(gm.graph, table)
    for old, new in table.items():
        new.meta = {name: note for name, note in old.meta.items() if name != "grapharg"}
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source  # type: ignore[attr-defined]
    last = next(iter(gm.graph.find_nodes(op="output")))
    made = graph.output(output)
    made.meta = dict(last.meta)
    return graph


def _signature(ctx: GraphContext) -> list[tuple[Any, ...]]:
    """Shapes, strides, dtypes and devices of the outputs."""
    (output,) = ctx.graph.find_nodes(op="output")
    found: list[tuple[Any, ...]] = []
    for leaf in torch.utils._pytree.tree_leaves(output.args):
        value = ctx.value(leaf)
        if isinstance(value, Tensor):
            found.append((tuple(value.shape), value.dtype, value.device, value.stride()))
        else:
            found.append((type(value).__name__,))
    return found


def _timing_convolutions(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call with cuDNN's algorithms chosen by timing, once per shape."""
    read, write = torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark

    def run(*args: Any) -> Any:
        before = read()
        write(True)
        try:
            return call(*args)
        finally:
            write(before)

    return run


def _lowered(ctx: GraphContext, inputs: Sequence[Any], compiler: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    if compiler == "none":
        return nameable(ctx.gm)
    from torch._inductor.compile_fx import compile_fx

    own = {key: value for key, value in options.items() if key not in OWN_OPTIONS}
    patches = (dict(AUTOTUNED) if compiler == "inductor-autotune" else {}) | own

    def inductor(gm: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        return compile_fx(gm, examples, config_patches=patches or None)

    chain = compiled_in_pieces(ctx, inductor) if options.get("pieces", True) else None
    return chain or inductor(ctx.gm, [*inputs, *_stand_ins(ctx, inputs)])


def _stand_ins(ctx: GraphContext, inputs: Sequence[Any]) -> list[Tensor]:
    """Fake tensors for the further inputs: parameters are concatenated only at the first run.

    Outside of a tracer's context there is no fake mode, and real tensors are used.
    """
    mode = tracing_mode()
    if mode is None:
        return [extra.current(inputs) for extra in ctx.extras]
    further = ctx.graph.find_nodes(op="placeholder")[len(inputs) :]
    return [stand_in(ctx.value(node), mode) for node in further]


def _with_extra_inputs(call: Callable[..., Any], ctx: GraphContext, fallback: Callable[..., Any]) -> Callable[..., Any]:
    """The call with its further inputs; falls back to the graph as traced if a constant it relied on has changed."""
    extras: tuple[Extra, ...] = tuple(ctx.extras)
    watches = tuple(ctx.watches)

    def run(*args: Any) -> Any:
        for holds in watches:
            if not holds(args):
                return fallback(*args)
        return call(*args, *(extra.current(args) for extra in extras))

    return run
