"""The torch.compile backend "ridgeline": rewrites the traced graph by name, lowers it and says what it did."""

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
from ridgeline.optimizer.rewrites.context import LOWERED_BY, Extra, Scene, is_removable, stand_in, tracing_mode
from ridgeline.optimizer.rewrites.registry import INFERENCE, TRAINING, Match, Rewrite

COMPILERS = ("none", "inductor", "inductor-autotune")
OWN_OPTIONS = ("attention", "matched", "narrow", "pieces", "timed_convolutions")
"""Options that rewrites read, and ``matched``, which wants a graph left alone that none changes; the others are a
compiler's."""
AUTOTUNED: Mapping[str, Any] = {"max_autotune": True, "coordinate_descent_tuning": True}
"""Inductor's options behind ``inductor-autotune``, without its CUDA graphs: those are ours."""
UNCHANGED = "no rewrite matched that changes what is computed: it would be torch.compile"
LEAST_NODES = 50
"""Below, a graph is what is left between the breaks of a model, and says nothing about the rest of it."""
RECOMPILE_LIMIT = 64
"""Dynamo keeps this many compiled variants of a function before it gives up: a search makes more than its usual 8."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Something that looked like a match and was left alone."""

    rewrite: str
    where: str
    why: str


@dataclass(slots=True)
class Report:
    """What happened to a model on its way through the backend: filled while it is compiled."""

    graphs: int = 0
    nodes_before: int = 0
    nodes_after: int = 0
    matches: list[Match] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    breaks: dict[str, int] = field(default_factory=dict)
    casts: int = 0  # of autocast, written into graphs
    recompiles: int = 0  # graphs that a second call like the first was compiled to anew
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
        """Give back what rewrites changed outside the graph: parameters laid side by side get memory of their own."""
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
    """The model behind torch.compile with this backend, specialized to the shapes it sees.

    ``rewrites`` are names (None: those recommended for the mode, the compiler and the device). ``options`` go to the
    compiler, but for ``attention``, which the attention rewrites read, and ``pieces``: False hands it the whole graph
    at once. ``report`` is filled as graphs are compiled.
    """
    return Traced(model, fullgraph=fullgraph).lowered(
        rewrites=rewrites, compiler=compiler, options=options, report=report
    )


class Traced:
    """A function behind torch.compile that is traced once and lowered as often as asked.

    Tracing a large model takes longer than lowering it. Each way to lower it is a call of its own; all of them go
    through the same guards, and every graph behind those runs as the call in progress wants it.
    """

    def __init__(self, model: Any, *, fullgraph: bool = False) -> None:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
        self._desk = Desk()
        self._run = torch.compile(model, backend=self._desk.collected, dynamic=False, fullgraph=fullgraph)

    def lowered(
        self,
        *,
        rewrites: Sequence[str] | None = None,
        compiler: str = "none",
        options: Mapping[str, Any] | None = None,
        report: Report | None = None,
    ) -> Callable[..., Any]:
        """The function lowered this way, as ``compiled`` takes it."""
        _checked(compiler)
        chosen(rewrites or (), INFERENCE)  # an unknown name is told now, not in the middle of a compilation
        way = Way(rewrites, compiler, dict(options or {}), Report() if report is None else report)
        here, traced = self._desk.here, self._run

        def run(*args: Any, **kwargs: Any) -> Any:
            before = getattr(here, "way", None)
            here.way = way
            try:
                return traced(*args, **kwargs)
            finally:
                here.way = before

        return run


class Desk:
    """Where the tracer hands in its graphs. It outlives the model, which it therefore does not know: PyTorch keeps
    every backend it was given until it is reset, and with it whatever the backend holds."""

    def __init__(self) -> None:
        self.here = threading.local()
        self._before = Counter(torch._dynamo.utils.counters["graph_break"])
        self.breaks: dict[str, int] = {}

    def way(self) -> Way:
        """How the call in progress wants its graphs lowered."""
        found: Way = self.here.way
        return found

    def collected(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Graph:
        graph = Graph(self, gm)
        self.breaks = dict(Counter(torch._dynamo.utils.counters["graph_break"]) - self._before)
        graph.lowered(example_inputs)
        return graph


@dataclass(slots=True, eq=False, weakref_slot=True)
class Way:
    """How graphs are lowered, and the report that is filled on the way."""

    rewrites: Sequence[str] | None
    compiler: str
    options: dict[str, Any]
    report: Report


class Graph:
    """A traced graph and what was made of it for each way that was asked for and is still held."""

    def __init__(self, desk: Desk, gm: fx.GraphModule) -> None:
        self.desk, self.gm = desk, _copied(gm)  # the tracer strips its own of what it knows
        self.mode = tracing_mode()
        self.calls: weakref.WeakKeyDictionary[Way, Callable[..., Any]] = weakref.WeakKeyDictionary()

    def __call__(self, *args: Any) -> Any:
        call = self.calls.get(self.desk.way())
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
        """What this graph is for the way of the call in progress; rewrites look at tensors, compilers at stand-ins."""
        way = self.desk.way()
        call = lower(self.gm, inputs, rewrites=way.rewrites, compiler=way.compiler, options=way.options,
                     report=way.report, stand_ins=stand_ins)  # fmt: skip
        way.report.breaks = self.desk.breaks
        self.calls[way] = call
        return call

    def _stand_ins(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs as the tracer knew them: of tensors a compiler would not know that their sizes never change.

        Parameters that were laid out anew since, which guards do not notice, are taken as they lie now.
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
        """The tracer's context as compilers look for it, made again."""
        if self.mode is None:
            return contextlib.nullcontext()
        return torch._guards.tracing(torch._guards.TracingContext(self.mode))


def backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """What ``torch.compile(model, backend="ridgeline", options={"rewrites": […], "compiler": …})`` calls.

    Without ``compiler`` it is Inductor, tuned where ``mode`` begins with ``max-autotune``; other options go to it.
    """
    given = dict(options.pop("options", None) or {}) | options
    tuned = str(given.pop("mode", None) or "").startswith("max-autotune")
    compiler = given.pop("compiler", "inductor-autotune" if tuned else "inductor")
    rewrites, report = given.pop("rewrites", None), given.pop("report", None)
    strange = sorted(given.keys() - OWN_OPTIONS) if compiler == "none" else []
    if strange:
        known = ("compiler", "rewrites", "report", *OWN_OPTIONS)
        raise OptimizeError(f"no option {strange[0]!r} without a compiler{nearest(strange[0], known)}")
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
    """A callable that computes the graph: rewritten, then run as it is or handed to Inductor.

    ``stand_ins`` are what a compiler is told of the inputs, where these are tensors of a call and no tracer is at work.
    """
    _checked(compiler)
    report = Report() if report is None else report
    chosen_options = dict(options or {})
    scene = rewritten(gm, example_inputs, rewrites=rewrites, compiler=compiler, options=chosen_options, report=report)
    if chosen_options.get("matched") and len(gm.graph.nodes) >= LEAST_NODES and not _changes(report):
        raise OptimizeError(UNCHANGED)
    with _as_written(scene):
        call = _lowered(scene, example_inputs if stand_ins is None else stand_ins, compiler, chosen_options)
    if scene.casts is not None and casts.active():
        call = _without_autocast(call)
    if chosen_options.get("timed_convolutions"):
        call = _timing_convolutions(call)
    if not scene.extras and not scene.watches:
        return call
    report.undos.extend(extra.undo for extra in scene.extras if extra.undo is not None)
    return _fed(call, scene, gm.forward)


def _changes(report: Report) -> bool:
    """Whether a rewrite matched that does more than leave out what does nothing."""
    return any(all_rewrites()[match.rewrite].exact != "bits" for match in report.matches)


def rewritten(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    rewrites: Sequence[str] | None = None,
    compiler: str = "none",
    options: Mapping[str, Any] | None = None,
    report: Report | None = None,
) -> Scene:
    """The scene of a graph after its rewrites. The given module is left as it was; what fails is left out."""
    report = Report() if report is None else report
    options = {**(options or {}), LOWERED_BY: compiler}
    training = is_training(example_inputs)
    names = recommended(_mode(training), compiler, _device(example_inputs)) if rewrites is None else rewrites
    report.graphs += 1
    report.nodes_before += len(gm.graph.nodes)
    failed: list[Refusal] = []
    while True:  # a rewrite that fails is left out, and the others start afresh: rare, so no copies are kept for it
        scene = _cast_scene(gm, example_inputs, training, options)
        left_out = {each.rewrite for each in failed}
        wanted = [each for each in chosen(names, scene.mode) if each.name not in left_out]
        with _as_written(scene):
            done, wrong = _done(scene, wanted)
        if wrong is None:
            break
        failed.append(wrong)
    scene.gm.graph.eliminate_dead_code(_is_impure)
    scene.gm.recompile()
    report.matches += done
    report.casts += scene.casts or 0
    report.refusals += [*failed, *(Refusal(*each) for each in scene.refusals)]
    report.nodes_after += len(scene.gm.graph.nodes)
    return scene


def _done(scene: Scene, wanted: Sequence[Rewrite]) -> tuple[list[Match], Refusal | None]:
    """What the rewrites replaced, up to the first that fails or changes what the graph returns."""
    before = _signature(scene)
    done: list[Match] = []
    for each in wanted:
        try:
            found = scene.run(each.name, each.change)
            if scene.relaxed:
                scene.refresh()
        except Exception as error:  # a rewrite that cannot cope leaves the graph alone, and says so
            return done, Refusal(each.name, "", f"{type(error).__name__}: {error}")
        if found and _signature(scene) != before:
            return done, Refusal(each.name, "", "it would change the type or layout of an output")
        done += found
    return done, None


def is_training(example_inputs: Sequence[Any]) -> bool:
    """Whether gradients will be asked of a graph: they are recorded and something it reads requires one."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in example_inputs)


def _mode(training: bool) -> str:
    return TRAINING if training else INFERENCE


def _device(example_inputs: Sequence[Any]) -> str:
    kinds = {x.device.type for x in example_inputs if isinstance(x, Tensor)}
    return "cuda" if "cuda" in kinds else "cpu"


def _checked(compiler: str) -> None:
    if compiler not in COMPILERS:
        raise OptimizeError(f"no compiler {compiler!r}{nearest(compiler, COMPILERS)}")


def _scene(gm: fx.GraphModule, example_inputs: Sequence[Any], training: bool, options: Any) -> Scene:
    return Scene(_copied(gm), list(example_inputs), training, dict(options or {}), autocast=bool(casts.active()))


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    own = fx.GraphModule(gm, _copied_graph(gm))
    own.meta = dict(gm.meta)
    for name in ("_param_name_to_source", "_source_to_user_stacks", "_unstatic_param_names"):
        if hasattr(gm, name):
            setattr(own, name, getattr(gm, name))
    return own


def _cast_scene(gm: fx.GraphModule, example_inputs: Sequence[Any], training: bool, options: Any) -> Scene:
    """The scene with what autocast does written out, or, where that cannot be told, as it was traced."""
    scene, state = _scene(gm, example_inputs, training, options), casts.active()
    if not state and not any(node.target is autocast.ENTER for node in gm.graph.nodes):
        return scene
    scene.casts = autocast.write_out(scene, state)
    if scene.casts is None:
        return _scene(gm, example_inputs, training, options)
    scene.autocast = False
    return scene


def _as_written(scene: Scene) -> Any:
    """Around whatever works out values of a scene: no autocast where it is written out."""
    return casts.off() if scene.casts is not None else contextlib.nullcontext()


def _without_autocast(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with casts.off():
            return call(*args)

    return run


def _copied_graph(gm: fx.GraphModule) -> fx.Graph:
    """The graph again, node for node, with the tracer's notes on where each input came from.

    Not with its weak references to them, which the tracer drops too: a weight that has one cannot be swapped.
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


def _signature(scene: Scene) -> list[tuple[Any, ...]]:
    """Sizes, types and devices of what the graph returns."""
    (output,) = scene.graph.find_nodes(op="output")
    found: list[tuple[Any, ...]] = []
    for leaf in torch.utils._pytree.tree_leaves(output.args):
        value = scene.value(leaf)
        if isinstance(value, Tensor):
            found.append((tuple(value.shape), value.dtype, value.device, value.stride()))
        else:
            found.append((type(value).__name__,))
    return found


def _timing_convolutions(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call with cuDNN's algorithms chosen by timing, once a shape, whatever is set around it."""
    read, write = torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark

    def run(*args: Any) -> Any:
        before = read()
        write(True)
        try:
            return call(*args)
        finally:
            write(before)

    return run


def _is_impure(node: fx.Node) -> bool:
    return not is_removable(node)


def _lowered(scene: Scene, inputs: Sequence[Any], compiler: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    if compiler == "none":
        return nameable(scene.gm)
    from torch._inductor.compile_fx import compile_fx

    own = {key: value for key, value in options.items() if key not in OWN_OPTIONS}
    patches = (dict(AUTOTUNED) if compiler == "inductor-autotune" else {}) | own

    def inductor(gm: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        return compile_fx(gm, examples, config_patches=patches or None)

    chain = compiled_in_pieces(scene, inductor) if options.get("pieces", True) else None
    return chain or inductor(scene.gm, [*inputs, *_stand_ins(scene, inputs)])


def _stand_ins(scene: Scene, inputs: Sequence[Any]) -> list[Tensor]:
    """The further inputs as a compiler needs them, sizes without memory: parameters are laid out when first run.

    Outside a tracer's context there is no mode to make stand-ins in, and the tensors themselves are given.
    """
    mode = tracing_mode()
    if mode is None:
        return [extra.current(inputs) for extra in scene.extras]
    further = scene.graph.find_nodes(op="placeholder")[len(inputs) :]
    return [stand_in(scene.value(node), mode) for node in further]


def _fed(call: Callable[..., Any], scene: Scene, fallback: Callable[..., Any]) -> Callable[..., Any]:
    """The call with its further inputs handed in; the graph as it was traced where what was relied on has changed."""
    extras: tuple[Extra, ...] = tuple(scene.extras)
    watches = tuple(scene.watches)

    def run(*args: Any) -> Any:
        for holds in watches:
            if not holds(args):
                return fallback(*args)
        return call(*args, *(extra.current(args) for extra in extras))

    return run
