"""A candidate: what it changes in a model, how it is built, and how it is released."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ridgeline.engine import autocast as casts
from ridgeline.engine.capture.cuda_graph import growing
from ridgeline.engine.capture.host_constants import compiled_as_ever
from ridgeline.engine.example_inputs import Inputs, leaves
from ridgeline.engine.replay.compiled import shortcut
from ridgeline.engine.replay.inference import Graphed, graph_inference
from ridgeline.engine.replay.training import graph_training
from ridgeline.engine.shallow_clone import shallow_clone
from ridgeline.errors import NotGraphable, OptimizeError
from ridgeline.optimizer.backend import Report, Traced
from ridgeline.optimizer.compile.cache_slots import Place
from ridgeline.optimizer.compile.module_labels import in_block
from ridgeline.optimizer.in_place.channels_last import ChannelsLastWeights, make_channels_last
from ridgeline.optimizer.in_place.dense_residual import contiguous_entry
from ridgeline.optimizer.in_place.substitution import apply
from ridgeline.optimizer.precision.weight_bank import RefreshedCall, WeightBank
from ridgeline.optimizer.search.blocks import Group, groups
from ridgeline.optimizer.search.redundant_arguments import simplified

Call = Callable[..., Any]
RECOMPILE_LIMIT = 64
MOST_VARIANTS = 6
"""Graphs that blocks of one kind may need: shifted windows, first and last blocks, graph breaks."""
ACTIVATION_BUDGET = "activation_memory_budget"
"""Inductor's option for the share of activations that a compiled training step keeps; the rest is recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A candidate. ``stock`` is plain ``torch.compile``; scope ``blocks`` compiles repeated blocks once."""

    name: str
    rewrites: tuple[str, ...] = ()
    compiler: str = "none"
    options: tuple[tuple[str, Any], ...] = ()
    graphed: bool = False
    layout: str = "keep"
    substituted: tuple[str, ...] = ()  # parts of the model replaced by kernels of ours
    scope: str = "model"
    unmasked: bool = False  # drops masks that hide nothing, after checking their values in every call
    tries_convolutions: bool = False  # cuDNN times its algorithms before the capture
    narrow: tuple[tuple[str, str], ...] = ()  # quantized linear layers and their formats
    straight: bool = False  # the compiled graph is called without its guards, if it is a single graph
    grows: bool = False  # captured into expandable segments
    guesses: bool = False  # values read by the host are assumed unchanged, and compared after every replay

    @property
    def compiles(self) -> bool:
        return self.compiler != "none" or bool(self.rewrites)

    @property
    def needs_clone(self) -> bool:
        """Whether it replaces forwards or weights of single modules, which happens on a clone of the model."""
        return bool(self.substituted) or self.layout != "keep" or (self.compiles and self.scope == "blocks")

    @property
    def holds_places(self) -> bool:
        """Whether it depends on the addresses of weights, and must be captured again after they moved."""
        return self.graphed or self.straight

    @property
    def is_stock(self) -> bool:
        """Whether it runs the code of torch.compile with default settings, with or without its guards."""
        same = self.compiler == "inductor" and self.scope == "model" and self.layout == "keep"
        return self.compiler == "stock" or (same and not (self.rewrites or self.options or self.narrow))

    @property
    def tunes(self) -> bool:
        """Whether a compiler benchmarks alternatives while building it, which takes an unpredictable time."""
        generated = ("max_autotune_pointwise", "coordinate_descent_tuning")
        return self.compiler.endswith("autotune") or any(dict(self.options).get(name) for name in generated)

    @property
    def complexity(self) -> int:
        """How much it changes the model; of two equally fast candidates the simpler one is returned."""
        cost = {"none": 0, "stock": 2, "stock-pieces": 4, "stock-autotune": 4, "inductor": 3, "inductor-autotune": 5}
        made = 10 * cost[self.compiler] + 5 * bool(self.rewrites) + 4 * bool(self.substituted)
        return made + 2 * self.graphed + (self.layout != "keep") + 100 * bool(self.narrow)

    def formats(self) -> dict[str, int]:
        """The number of layers per format."""
        return dict(Counter(format for _, format in self.narrow))

    def to_dict(self) -> dict[str, Any]:
        lists = {"rewrites": list(self.rewrites), "substituted": list(self.substituted)}
        return asdict(self) | {"options": dict(self.options), "narrow": [list(pair) for pair in self.narrow]} | lists

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Candidate:
        options = tuple(sorted(found["options"].items()))
        tuples = {name: tuple(found[name]) for name in ("rewrites", "substituted")}
        narrow = tuple((name, format) for name, format in found.get("narrow", ()))
        return cls(**{**found, **tuples, "options": options, "narrow": narrow})

    def changes(self, matched: Mapping[str, int] | None = None) -> list[str]:
        """Its changes in words, in the order of their application; ``matched`` counts the matches of each rewrite."""
        compiler = {
            "none": "",
            "stock": "torch.compile, default settings",
            "stock-pieces": 'torch.compile, mode="reduce-overhead": its graphs captured one by one, results copied',
            "stock-autotune": 'torch.compile, mode="max-autotune", results copied',
            "inductor": "lowered by Inductor",
            "inductor-autotune": "lowered by Inductor, GEMMs tuned",
        }[self.compiler]
        found = ["masks that hide nothing left out, after a check of them in every call"] if self.unmasked else []
        found += ["convolution weights channels last"] if self.layout != "keep" else []
        found += ["cuDNN's algorithms timed"] if self.tries_convolutions else []
        found += [f"our kernels in place of {', '.join(self.substituted)}"] if self.substituted else []
        if self.narrow:
            found += [f"fewer bits: {', '.join(f'{format} ×{num}' for format, num in self.formats().items())}"]
        if self.rewrites:
            named = ", ".join(f"{name} ×{num}" for name, num in (matched or {}).items())
            found += [f"rewrites: {named}" if named else "rewrites" if matched is None else "no rewrite matched"]
        found += [compiler + (", repeated blocks once" if self.scope == "blocks" else "")] if compiler else []
        past = self.straight and not self.graphed
        found += ["called past the compiler's guards, our guard check instead"] if past else []
        guessed = ", values read by the host guessed and compared" if self.guesses else ""
        return found + ([f"the whole call as one CUDA graph{guessed}"] if self.graphed else []) or ["nothing"]


@dataclass(slots=True)
class Built:
    """A candidate ready to be called. It leaves nothing on the model itself but the packed weights of rewrites."""

    candidate: Candidate
    call: Call
    report: Report
    build_s: float = 0.0
    kept_bytes: int = 0
    reserved_bytes: int = 0  # of a graph: its pool and everything else, gaps included
    inner: Call | None = None  # the call before wrappers and capture
    places: tuple[int, ...] = ()  # addresses of the weights at capture
    bank: WeightBank | None = None  # quantized weights
    laid: ChannelsLastWeights | None = None  # channels-last copies of convolution weights

    @contextlib.contextmanager
    def switched(self) -> Iterator[Call]:
        """The call, as the timing harness wants it."""
        yield self.call

    def moved(self, model: nn.Module) -> bool:
        """Whether weights have moved since the capture."""
        return self.places != places_of(model)

    def release(self) -> None:
        """Release the captured graph and its memory; compiled code stays."""
        if self.candidate.graphed:
            self.call = _gone

    def forget_trials(self) -> None:
        """Release captures that were made for the inputs of a proof."""
        for call in (self.call, getattr(self.call, "call", None)):
            if isinstance(call, Graphed):
                call.forget_others()

    def undo(self) -> None:
        """Release everything: packed weights, captured graphs, compiled code."""
        self.report.undo()
        self.call, self.inner = _gone, None


def _gone(*args: Any, **kwargs: Any) -> Any:
    raise OptimizeError("this candidate was released after it lost")


def places_of(model: nn.Module) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))


def build(
    candidate: Candidate,
    model: nn.Module,
    inputs: Inputs,
    mode: str,
    *,
    base: Built | None = None,
    loss: Call | None = None,
    traces: Traces | None = None,
) -> Built:
    """Build a candidate and run it once, so that all lazy initialization is done. Inputs may be written to.

    ``base`` is a built candidate that differs only in the capture: its compiled code is reused. ``traces`` hold the
    tracer's results of earlier candidates.
    """
    began = time.perf_counter()
    built = Built(candidate, model, base.report if base else Report())
    if candidate.narrow:
        built.bank = base.bank if base else WeightBank(model, dict(candidate.narrow))
    unmasked = Unmasked(model, inputs) if candidate.unmasked else None
    given = unmasked.inputs if unmasked else inputs
    try:
        with _quiet():
            if base is not None:
                built.call = built.inner = base.call if base.inner is None else base.inner
                built.laid = base.laid
            else:
                callee = shallow_clone(model) if candidate.needs_clone else model
                if candidate.layout != "keep":
                    built.laid = make_channels_last(callee, model, differentiable=mode != "infer")
                if candidate.substituted:
                    apply(callee, candidate.substituted)
                built.call = built.inner = _compiled(built, callee, traces or Traces())
                if candidate.compiles:
                    _run_first(built, given, mode)
            if candidate.graphed:
                with growing(candidate.grows):
                    _capture(built, model, given, mode, loss)
            elif candidate.straight:
                ready = given.reused()
                with contextlib.suppress(NotGraphable):  # several graphs keep their guards
                    built.call = shortcut(built.call, ready.args, dict(ready.kwargs), model)
                built.places = places_of(model)
    except BaseException:
        if base is None:
            built.undo()
        raise
    if built.laid is not None and isinstance(built.call, Graphed):
        built.call.before = built.laid.refresh
    elif built.laid is not None:
        built.call = RefreshedCall(built.call, built.laid)
    if built.bank is not None:
        built.call = RefreshedCall(built.call, built.bank)
    if unmasked:
        unmasked.call, built.call = built.call, unmasked
    built.build_s = time.perf_counter() - began
    return built


class Unmasked:
    """Calls a candidate without masks that hide nothing; if one does hide something, calls the model itself."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        found = simplified(model, inputs.args, inputs.kwargs)
        if found is None:
            raise OptimizeError("every mask of this call hides something")
        args, kwargs, self.holds = found
        self.model, self.call, self.inputs = model, _gone, Inputs(args, kwargs)
        self.names = frozenset(name for name in inputs.kwargs if name not in kwargs)
        self.places = frozenset(i for i, value in enumerate(inputs.args) if args[i] is not value)
        self.lock = threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.call, Graphed) and self.call.is_pure:
            with self.lock:
                answer = self.holds.asked(args, kwargs)
                if answer is not None:  # a call without side effects may start before the answer is known
                    result = self._bare(args, kwargs)
                    return result if answer() else self.model(*args, **kwargs)
        if not self.holds(args, kwargs):
            return self.model(*args, **kwargs)
        return self._bare(args, kwargs)

    def _bare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call without its masks."""
        kept = [None if i in self.places else value for i, value in enumerate(args)]
        return self.call(*kept, **{name: value for name, value in kwargs.items() if name not in self.names})


@contextlib.contextmanager
def timed_convolutions(most: int | None) -> Iterator[None]:
    """Let cuDNN time its algorithms, all of them or the first ``most`` of its heuristics."""
    library = torch.backends.cudnn
    kept, limit = library.benchmark, library.benchmark_limit
    library.benchmark = True
    if most is not None and limit is not None:  # None without cuDNN
        library.benchmark_limit = most
    try:
        yield
    finally:
        library.benchmark = kept
        if limit is not None:
            library.benchmark_limit = limit


def capture_again(built: Built, model: nn.Module, inputs: Inputs, mode: str, loss: Call | None) -> None:
    """Capture the same graph again after weights have moved."""
    unmasked = Unmasked(model, inputs) if built.candidate.unmasked else None
    with _quiet():
        run_once(model if built.inner is None else built.inner, unmasked.inputs if unmasked else inputs, mode)
    again = build(built.candidate, model, inputs, mode, base=built, loss=loss)
    built.call, built.places = again.call, again.places


def _capture(built: Built, model: nn.Module, inputs: Inputs, mode: str, loss: Call | None) -> None:
    """Capture the call; afterwards the graph needs only the weights at their addresses."""
    ready, call = inputs.reused(), built.call
    if isinstance(call, nn.Module) and call is not model:
        call = _in_python(call)
    # Of cuDNN's ten algorithms three are timed in training: a channels-last step of EfficientNet took 48 s of a budget
    # of 50 to time them all (81 convolutions, three passes each), a U-Net's 20 s.
    limit = 3 if mode == "train" else None
    timed = timed_convolutions(limit) if built.candidate.tries_convolutions else contextlib.nullcontext()
    with timed, torch.set_grad_enabled(mode != "infer"):
        if mode == "infer":
            built.call = graph_inference(call, ready.args, dict(ready.kwargs), model, guesses=built.candidate.guesses)
        else:
            built.call = graph_training(call, ready.args, dict(ready.kwargs), model, loss=loss)
        built.places = places_of(model)


def _in_python(clone: nn.Module) -> Call:
    """A clone as a plain Python function, which the capture may trace."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return clone(*args, **kwargs)

    run.in_python = True  # type: ignore[attr-defined]
    return run


def _run_first(built: Built, inputs: Inputs, mode: str) -> None:
    """Make the call that compiles, and count graph breaks and recompilations of stock torch.compile."""
    broken = torch._dynamo.utils.counters["graph_break"]
    before = dict(broken)
    with _budgeted(built.candidate):
        run_once(built.call, inputs, mode)
    if built.candidate.compiler.startswith("stock"):
        found = {why: num - before.get(why, 0) for why, num in broken.items()}
        built.report.breaks.update({why: num for why, num in found.items() if num > 0})
        compiled_once = _num_graphs()
        run_once(built.call, inputs, mode)
        built.report.recompiles = _num_graphs() - compiled_once


def _num_graphs() -> int:
    """The number of graphs that Dynamo has handed to compilers so far."""
    return int(torch._dynamo.utils.counters["stats"].get("unique_graphs", 0))


@contextlib.contextmanager
def _budgeted(candidate: Candidate) -> Iterator[None]:
    """``activation_memory_budget`` is read when a graph is split into forward and backward, not by Inductor."""
    import torch._functorch.config as split

    budget = dict(candidate.options).get(ACTIVATION_BUDGET)
    with split.patch(activation_memory_budget=budget) if budget is not None else contextlib.nullcontext():
        yield


def run_once(call: Call, inputs: Inputs, mode: str) -> None:
    """One call, and in training its backward, which compiles lazily; ``.grad`` is left alone."""
    ready = inputs.reused()
    with torch.set_grad_enabled(mode != "infer"):
        output = call(*ready.args, **ready.kwargs)
    found = [tensor for _, tensor in leaves(output) if tensor.requires_grad] if mode == "train" else []
    if found:
        wanted = _leaves_behind(found)
        with casts.off():
            torch.autograd.grad([t.sum() for t in found], wanted, allow_unused=True)


def _leaves_behind(outputs: list[Any]) -> list[Any]:
    """The leaf tensors that a backward would accumulate gradients into."""
    found, waiting, seen = [], [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return found


class Traces:
    """Traced functions by what was traced, shared by all candidates of a search."""

    def __init__(self) -> None:
        self._found: dict[Any, Traced] = {}

    def of(self, what: Any, function: Callable[[], Call]) -> Traced:
        if what not in self._found:
            self._found[what] = Traced(function())
        return self._found[what]


def _compiled(built: Built, callee: nn.Module, traces: Traces) -> Call:
    candidate, report = built.candidate, built.report
    if not candidate.compiles:
        return callee
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    if candidate.compiler.startswith("stock"):
        _forget_sizes()
    if candidate.compiler == "stock":
        return torch.compile(callee)
    modes = {"stock-pieces": "reduce-overhead", "stock-autotune": "max-autotune"}  # these capture graph by graph
    if candidate.compiler in modes:
        return _owned(torch.compile(callee, mode=modes[candidate.compiler]))
    chosen: dict[str, Any] = {"rewrites": candidate.rewrites, "compiler": candidate.compiler, "report": report}
    options = {key: value for key, value in candidate.options if key != ACTIVATION_BUDGET}
    options |= {"narrow": built.bank} if built.bank is not None else {}
    if candidate.scope == "blocks":

        def runner(group: Group) -> Call:
            traced = traces.of(group.paths, partial(_block_runner, group.kind))
            return traced.lowered(options=options, **chosen)

        return compile_blocks(callee, runner, report)
    same = ("model", candidate.layout, candidate.substituted)  # equal clones share one trace
    return traces.of(same, lambda: callee).lowered(options=options, **chosen)


def _owned(call: Call) -> Call:
    """A call that clones its results: the next replay of PyTorch's own CUDA graphs overwrites them."""

    def run(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        found = call(*args, **kwargs)
        flat, spec = tree_flatten(found)
        if sum(isinstance(each, torch.Tensor) for each in flat) != sum(1 for _ in leaves(found)):
            raise OptimizeError("results are inside of objects, where PyTorch's CUDA graphs would overwrite them")
        return tree_unflatten([each.clone() if isinstance(each, torch.Tensor) else each for each in flat], spec)

    return run


def _forget_sizes() -> None:
    """Clear the shapes that Dynamo remembers, so that torch.compile behaves as in a new process.

    A size that differs from an earlier call is compiled as dynamic, into slower code. Dynamo identifies functions by
    file, line and name alone, so two models executed as text (``<string>``, line 13, ``forward``) share their sizes.
    """
    forget = getattr(sys.modules.get("torch._dynamo.pgo"), "reset_code_state", None)
    if forget is not None:
        forget()


def compile_blocks(
    clone: nn.Module, compiler: Callable[[Group], Call], report: Report | None = None
) -> nn.Module:
    """Replace the forwards of a clone's repeated blocks by what ``compiler`` makes of each kind of block."""
    found = groups(clone)
    for group in found:
        run = compiler(group)
        path = f"{group.paths[0].rpartition('.')[0]}.*".lstrip(".")
        for block in group.blocks:
            vars(block)["forward"] = _block_forward(run, block, path, MOST_VARIANTS * len(found), report)
    return clone


def _block_forward(run: Call, block: nn.Module, path: str, most_graphs: int, report: Report | None) -> Call:
    place, laid = Place(block), contiguous_entry(block)

    def forward(*args: Any, **kwargs: Any) -> Any:
        # Blocks that look equal but differ (by a layer number, say) would be compiled one by one.
        if report is not None and report.graphs > most_graphs:
            raise OptimizeError(f"blocks of one kind are compiled to more than {MOST_VARIANTS} graphs")
        with in_block(path):
            given, named = tuple(map(laid, args)), {name: laid(value) for name, value in kwargs.items()}
            with compiled_as_ever():
                return place.call(run, block, given, named)

    return forward


def _block_runner(kind: type[nn.Module]) -> Call:
    """A separate function per kind of block, so that the compiled variants of one do not fill the cache of another.

    It gets the globals of the block's own code: a tracer imports what it meets in another module by that module's
    name, which a script has not.
    """

    own = kind.forward

    def looked_up(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return kind.forward(block, *args, **kwargs)

    def known(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return own(block, *args, **kwargs)

    run = known if _is_opaque(kind) else looked_up
    home = getattr(inspect.unwrap(own), "__globals__", None)
    return run if home is None else types.FunctionType(run.__code__, home, run.__name__, None, run.__closure__)


def _is_opaque(kind: type[nn.Module]) -> bool:
    """Whether Dynamo was told to put calls of this class into graphs untraced, as Diffusers does for its blocks."""
    from torch._dynamo import trace_rules

    asked = getattr(trace_rules, "is_callable_allowed", None)
    return asked is not None and bool(asked(kind))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings of compilers and their tuning tables."""
    kept = _printing(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _printing(kept)


def _printing(wanted: bool) -> bool:
    """Set whether Inductor prints its tuning tables, without importing it; returns what was set before.

    No configuration is changed, because all of it is part of the key of Inductor's disk cache: with another setting a
    search would find nothing that a plain torch.compile left on disk (31.6 s for a detector, 8.4 with the cache, H200).
    """
    select_algorithm: Any = sys.modules.get("torch._inductor.select_algorithm")
    if select_algorithm is None:
        return wanted
    kept = bool(getattr(select_algorithm, "PRINT_AUTOTUNE", wanted))
    select_algorithm.PRINT_AUTOTUNE = wanted
    return kept
