"""One way to run a model faster: what it changes, how it is built, and how it is switched on and off."""

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
from ridgeline.optimizer.in_place.channels_last import LaidWeights, lay_channels_last
from ridgeline.optimizer.in_place.dense_residual import entry_of
from ridgeline.optimizer.in_place.substitution import apply
from ridgeline.optimizer.precision.weight_bank import Bank, Narrowed
from ridgeline.optimizer.search.blocks import Group, groups
from ridgeline.optimizer.search.redundant_arguments import simplified

Call = Callable[..., Any]
COMPILERS = ("none", "stock", "stock-pieces", "stock-autotune", "inductor", "inductor-autotune")
LAYOUTS = ("keep", "channels_last")
RECOMPILE_LIMIT = 64
MOST_VARIANTS = 6
"""Graphs that blocks of one kind may need: shifted windows, first and last ones, graph breaks."""
MOST_TRIED = 3
"""Algorithms of a convolution that are timed for training, of ten by default: a channels-last step of EfficientNet took
48 s of a budget of 50 to try them all (81 convolutions, three passes each), a U-Net's 20 s."""
TUNING = ("max_autotune_pointwise", "coordinate_descent_tuning")
"""Options of Inductor that have it time the kernels it generates."""
ACTIVATION_BUDGET = "activation_memory_budget"
"""The share of activations a compiled training step may keep; what is beyond is recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What is changed. ``stock`` is ``torch.compile`` as anyone gets it; ``blocks`` compiles repeated blocks once."""

    name: str
    rewrites: tuple[str, ...] = ()
    compiler: str = "none"
    options: tuple[tuple[str, Any], ...] = ()
    graphed: bool = False
    layout: str = "keep"
    substituted: tuple[str, ...] = ()  # parts of the model that kernels are put in place of
    scope: str = "model"
    unmasked: bool = False  # masks that hide nothing are left out, and looked at before every call
    tries_convolutions: bool = False  # cuDNN times its algorithms before one is recorded
    narrow: tuple[tuple[str, str], ...] = ()  # linear layers in fewer bits, and their formats
    straight: bool = False  # the compiled graph is called without its guards, where it is one
    grows: bool = False  # recorded into memory that grows, which has no gaps between segments
    guesses: bool = False  # values that the host reads are taken to be what they were, and compared by every replay

    @property
    def compiles(self) -> bool:
        return self.compiler != "none" or bool(self.rewrites)

    @property
    def needs_clone(self) -> bool:
        """Whether forwards or weights of single modules are replaced, which happens on a clone of the model."""
        return bool(self.substituted) or self.layout != "keep" or (self.compiles and self.scope == "blocks")

    @property
    def holds_places(self) -> bool:
        """Whether it knows weights by their addresses, and has to be made again where they have moved."""
        return self.graphed or self.straight

    @property
    def is_stock(self) -> bool:
        """Whether what runs is what torch.compile makes: its own, or the same past its guards."""
        same = self.compiler == "inductor" and self.scope == "model" and self.layout == "keep"
        return self.compiler == "stock" or (same and not (self.rewrites or self.options or self.narrow))

    @property
    def tunes(self) -> bool:
        """Whether a compiler times ways to compute while it makes this: nobody knows before for how long."""
        return self.compiler.endswith("autotune") or any(dict(self.options).get(name) for name in TUNING)

    @property
    def complexity(self) -> int:
        """How much is done to the model; of two that are equally fast, the simpler is returned."""
        ladder = {"none": 0, "stock": 2, "stock-pieces": 4, "stock-autotune": 4, "inductor": 3, "inductor-autotune": 5}
        made = 10 * ladder[self.compiler] + 5 * bool(self.rewrites) + 4 * bool(self.substituted)
        return made + 2 * self.graphed + (self.layout != "keep") + 100 * bool(self.narrow)

    def formats(self) -> dict[str, int]:
        """How many layers have each format."""
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
        """What it does, in words, in the order in which it is done; ``matched`` is how often each rewrite did."""
        compiler = {
            "none": "",
            "stock": "torch.compile, default settings",
            "stock-pieces": 'torch.compile, mode="reduce-overhead": its graphs recorded one by one, results copied',
            "stock-autotune": 'torch.compile, mode="max-autotune", results copied',
            "inductor": "lowered by Inductor",
            "inductor-autotune": "lowered by Inductor, products tuned",
        }[self.compiler]
        found = ["masks that hide nothing left out, after a look at them in every call"] if self.unmasked else []
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
        found += ["called past the compiler's guards, the model watched instead"] if past else []
        guessed = ", values that the host reads guessed and compared" if self.guesses else ""
        return found + ([f"the whole call as one CUDA graph{guessed}"] if self.graphed else []) or ["nothing"]


@dataclass(slots=True)
class Built:
    """A candidate ready to be called. Nothing of it is on the model itself, but for rewrites' packed weights."""

    candidate: Candidate
    call: Call
    report: Report
    build_s: float = 0.0
    kept_bytes: int = 0
    reserved_bytes: int = 0  # of a graph: what its pool and everything else needs, gaps included
    inner: Call | None = None  # what is called or was captured, without what stands before it
    places: tuple[int, ...] = ()  # where the weights were when it was captured
    bank: Bank | None = None  # weights in fewer bits
    laid: LaidWeights | None = None  # convolution weights channels last, of a clone's own

    @contextlib.contextmanager
    def switched(self) -> Iterator[Call]:
        """The call, for whoever times contenders."""
        yield self.call

    def moved(self, model: nn.Module) -> bool:
        """Whether weights are elsewhere than when the graph was captured."""
        return self.places != places_of(model)

    def release(self) -> None:
        """Let go of the captured graph and its memory; what was compiled stays."""
        if self.candidate.graphed:
            self.call = _gone

    def forget_trials(self) -> None:
        """Let go of recordings that were made where a proof's inputs lay."""
        for call in (self.call, getattr(self.call, "call", None)):
            if isinstance(call, Graphed):
                call.forget_others()

    def undo(self) -> None:
        """Give back everything: weights' places, captured graphs, compiled code."""
        self.report.undo()
        self.call, self.inner = _gone, None


def _gone(*args: Any, **kwargs: Any) -> Any:
    raise OptimizeError("this candidate was taken apart after it lost")


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
    """Make a candidate and run it once, so that everything lazy about it is done. The inputs may be written to.

    ``base`` is a candidate that differs in nothing but the graph: what it compiled is used again. ``traces`` are those
    of candidates before, which differ in what was done to them.
    """
    began = time.perf_counter()
    built = Built(candidate, model, base.report if base else Report())
    if candidate.narrow:
        built.bank = base.bank if base else Bank(model, dict(candidate.narrow))
    unmasked = Unmasked(model, inputs) if candidate.unmasked else None
    given = unmasked.inputs if unmasked else inputs
    try:
        with _quiet():
            if base is not None:
                built.call = built.inner = base.call if base.inner is None else base.inner
                built.laid = base.laid
            else:
                built.call = built.inner = _compiled(built, _callee(built, model, mode), traces or Traces())
                if candidate.compiles:
                    _run_first(built, given, mode)
            if candidate.graphed:
                with growing(candidate.grows):
                    _capture(built, model, given, mode, loss)
            elif candidate.straight:
                _straighten(built, model, given)
    except BaseException:
        if base is None:
            built.undo()
        raise
    if built.laid is not None and isinstance(built.call, Graphed):
        built.call.before = built.laid.refresh
    elif built.laid is not None:
        built.call = Narrowed(built.call, built.laid)
    if built.bank is not None:
        built.call = Narrowed(built.call, built.bank)
    if unmasked:
        unmasked.call, built.call = built.call, unmasked
    built.build_s = time.perf_counter() - began
    return built


class Unmasked:
    """A call without the masks that hide nothing; where one does hide something, the model itself."""

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
                if answer is not None:  # what changes nothing outside may start before the masks are known
                    result = self._bare(args, kwargs)
                    return result if answer() else self.model(*args, **kwargs)
        if not self.holds(args, kwargs):
            return self.model(*args, **kwargs)
        return self._bare(args, kwargs)

    def _bare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call without its masks."""
        kept = [None if i in self.places else value for i, value in enumerate(args)]
        return self.call(*kept, **{name: value for name, value in kwargs.items() if name not in self.names})


def _callee(built: Built, model: nn.Module, mode: str) -> nn.Module:
    """The model, or a clone of it with the candidate's kernels and layouts in place."""
    candidate = built.candidate
    if not candidate.needs_clone:
        return model
    clone = shallow_clone(model)
    if candidate.layout != "keep":
        built.laid = lay_channels_last(clone, model, differentiable=mode != "infer")
    if candidate.substituted:
        apply(clone, candidate.substituted)
    return clone


@contextlib.contextmanager
def timed_convolutions(most: int | None) -> Iterator[None]:
    """cuDNN times its algorithms, or the first so many of those that it proposes."""
    library = torch.backends.cudnn
    kept, limit = library.benchmark, library.benchmark_limit
    library.benchmark = True
    if most is not None and limit is not None:  # none without cuDNN
        library.benchmark_limit = most
    try:
        yield
    finally:
        library.benchmark = kept
        if limit is not None:
            library.benchmark_limit = limit


def capture_again(built: Built, model: nn.Module, inputs: Inputs, mode: str, loss: Call | None) -> None:
    """The same graph over weights that are elsewhere now; what lays weights its own way does so before."""
    unmasked = Unmasked(model, inputs) if built.candidate.unmasked else None
    with _quiet():
        run_once(model if built.inner is None else built.inner, unmasked.inputs if unmasked else inputs, mode)
    again = build(built.candidate, model, inputs, mode, base=built, loss=loss)
    built.call, built.places = again.call, again.places


def _capture(built: Built, model: nn.Module, inputs: Inputs, mode: str, loss: Call | None) -> None:
    """Record the call; afterwards the graph needs only the weights where they were."""
    ready, call = inputs.reused(), built.call
    if isinstance(call, nn.Module) and call is not model:
        call = _in_python(call)
    limit = MOST_TRIED if mode == "train" else None
    timed = timed_convolutions(limit) if built.candidate.tries_convolutions else contextlib.nullcontext()
    with timed, torch.set_grad_enabled(mode != "infer"):
        if mode == "infer":
            built.call = graph_inference(call, ready.args, dict(ready.kwargs), model, guesses=built.candidate.guesses)
        else:
            built.call = graph_training(call, ready.args, dict(ready.kwargs), model, loss=loss)
        built.places = places_of(model)


def _in_python(clone: nn.Module) -> Call:
    """A clone as a call whose Python may be looked at while it is recorded."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return clone(*args, **kwargs)

    run.in_python = True  # type: ignore[attr-defined]
    return run


def _straighten(built: Built, model: nn.Module, inputs: Inputs) -> None:
    """Past the guards where the call is one graph; where it is not, as it is."""
    ready = inputs.reused()
    with contextlib.suppress(NotGraphable):
        built.call = shortcut(built.call, ready.args, dict(ready.kwargs), model)
    built.places = places_of(model)


def _run_first(built: Built, inputs: Inputs, mode: str) -> None:
    """The call that compiles; what stock torch.compile could not trace is counted, as our own backend does itself."""
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
    """Graphs that PyTorch's tracer has handed to compilers so far."""
    return int(torch._dynamo.utils.counters["stats"].get("unique_graphs", 0))


@contextlib.contextmanager
def _budgeted(candidate: Candidate) -> Iterator[None]:
    """``activation_memory_budget`` is read when a graph is split into forward and backward, not by Inductor."""
    import torch._functorch.config as split

    budget = dict(candidate.options).get(ACTIVATION_BUDGET)
    with split.patch(activation_memory_budget=budget) if budget is not None else contextlib.nullcontext():
        yield


def run_once(call: Call, inputs: Inputs, mode: str) -> None:
    """A call, and in training its backward, which is compiled when it is first asked for; gradients are left alone."""
    ready = inputs.reused()
    with torch.set_grad_enabled(mode != "infer"):
        output = call(*ready.args, **ready.kwargs)
    found = [tensor for _, tensor in leaves(output) if tensor.requires_grad] if mode == "train" else []
    if found:
        wanted = _leaves_behind(found)
        with casts.off():
            torch.autograd.grad([t.sum() for t in found], wanted, allow_unused=True)


def _leaves_behind(outputs: list[Any]) -> list[Any]:
    """The tensors that gradients would be accumulated into."""
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
    """What was traced of one model, by what was handed to the tracer: all candidates of a search share it."""

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
    if candidate.compiler in _RECORDING:
        return _owned(torch.compile(callee, mode=_RECORDING[candidate.compiler]))
    chosen: dict[str, Any] = {"rewrites": candidate.rewrites, "compiler": candidate.compiler, "report": report}
    options = {key: value for key, value in candidate.options if key != ACTIVATION_BUDGET}
    options |= {"narrow": built.bank} if built.bank is not None else {}
    if candidate.scope == "blocks":

        def runner(group: Group) -> Call:
            traced = traces.of(group.paths, partial(_block_runner, group.kind))
            return traced.lowered(options=options, **chosen)

        return compile_blocks(callee, runner, report)
    same = ("model", candidate.layout, candidate.substituted)  # equal clones share what was traced of the first
    return traces.of(same, lambda: callee).lowered(options=options, **chosen)


_RECORDING = {"stock-pieces": "reduce-overhead", "stock-autotune": "max-autotune"}
"""Modes of torch.compile that record its graphs one by one."""


def _owned(call: Call) -> Call:
    """A call whose results are its caller's: those of PyTorch's own recordings lie where the next call writes."""

    def run(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        found = call(*args, **kwargs)
        flat, spec = tree_flatten(found)
        if sum(isinstance(each, torch.Tensor) for each in flat) != sum(1 for _ in leaves(found)):
            raise OptimizeError("results are inside of objects, where PyTorch's recordings would write over them")
        return tree_unflatten([each.clone() if isinstance(each, torch.Tensor) else each for each in flat], spec)

    return run


def _forget_sizes() -> None:
    """Have PyTorch's tracer forget the sizes it met, so that torch.compile is what it is in a new process.

    Sizes that differ from those of an earlier call are compiled as variables, into slower code; and functions are told
    apart by file, line and name alone, so that one model's sizes are taken for another's where both are executed as
    text (``<string>``, line 13, ``forward``).
    """
    forget = getattr(sys.modules.get("torch._dynamo.pgo"), "reset_code_state", None)
    if forget is not None:
        forget()


def compile_blocks(
    clone: nn.Module, compiler: Callable[[Group], Call], report: Report | None = None
) -> nn.Module:
    """Puts what ``compiler`` makes of each kind of block in place of the forwards of a clone's repeated blocks."""
    found = groups(clone)
    for group in found:
        run = compiler(group)
        path = f"{group.paths[0].rpartition('.')[0]}.*".lstrip(".")
        for block in group.blocks:
            vars(block)["forward"] = _block_forward(run, block, path, MOST_VARIANTS * len(found), report)
    return clone


def _block_forward(run: Call, block: nn.Module, path: str, most_graphs: int, report: Report | None) -> Call:
    place, laid = Place(block), entry_of(block)

    def forward(*args: Any, **kwargs: Any) -> Any:
        # Blocks that look alike and are not (they ask for their number, say) would be compiled one by one.
        if report is not None and report.graphs > most_graphs:
            raise OptimizeError(f"blocks of one kind are compiled to more than {MOST_VARIANTS} graphs")
        with in_block(path):
            given, named = tuple(map(laid, args)), {name: laid(value) for name, value in kwargs.items()}
            with compiled_as_ever():
                return place.call(run, block, given, named)

    return forward


def _block_runner(kind: type[nn.Module]) -> Call:
    """A function of its own for each kind of block, so that the compiler's variants of one do not fill the other's.

    It stands among the globals of the block's own code: what a tracer meets in another module it imports by that
    module's name, and a file that was run rather than imported has none.
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
    """Whether a tracer was told to put calls of this class into graphs as they are: it then reads no method of it.

    Diffusers says so of its blocks, which were left as they are for it.
    """
    from torch._dynamo import trace_rules

    asked = getattr(trace_rules, "is_callable_allowed", None)
    return asked is not None and bool(asked(kind))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Compilers warn about what a search does on purpose, and print what they tune."""
    kept = _printing(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _printing(kept)


def _printing(wanted: bool) -> bool:
    """Whether Inductor prints its tuning tables; says what was set before. Importing it for that would take seconds.

    Its settings stay as they are: all of them are in the names under which it keeps what it compiled. With another one
    a search found nothing of what anybody's torch.compile had left on disk (31.6 s for a detector, 8.4 for the same
    from disk, H200), nor others anything of the search's.
    """
    select_algorithm: Any = sys.modules.get("torch._inductor.select_algorithm")
    if select_algorithm is None:
        return wanted
    kept = bool(getattr(select_algorithm, "PRINT_AUTOTUNE", wanted))
    select_algorithm.PRINT_AUTOTUNE = wanted
    return kept
