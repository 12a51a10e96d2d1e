"""Which candidates to try, in which order, and what each is expected to cost and to bring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ridgeline.optimizer.candidate import ACTIVATION_BUDGET, Built, Candidate
from ridgeline.optimizer.forecast import Forecast
from ridgeline.optimizer.receipt import FAILED, LARGE, MEASURED, SKIPPED, Entry
from ridgeline.optimizer.regions import Group
from ridgeline.optimizer.rewrites import recommended, rewrites

AUTOTUNE_LEAST_MATRIX_FRAC = 0.3
"""Tuning products pays where they are at least this share of the time."""
AUTOTUNE_TIMES = 3.0
GENERATED_TUNED = (("coordinate_descent_tuning", True), ("max_autotune_pointwise", True))
"""Inductor tries more launch configurations of the kernels it generates."""
FLOOR_REACHED = 1.05
"""This close to the floor there is nothing left to search for."""
KERNELS_A_LEAF = 2.5
"""Kernels a leaf module launches in eager mode, where nothing was priced: what the workloads of benchmarks/ show."""
CAPTURE_S, TRACE_S = 1.0, 2.0
TRACE_KERNEL_S = 0.012
"""Tracing and rewriting, without any compiler; kernels of ours that are used for the first time come on top."""
MOST_ABLATIONS = 3
KEPT_FRAC = 0.5
STOCK = "torch.compile"
OWED_TIMES = 2.5
GRAPHED = " + graph"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the ladder is made of."""

    mode: str
    cuda: bool
    eager_s: float
    groups: tuple[Group, ...]
    num_leaves: int
    unlike_frac: float  # share of the kernels that are left when equal blocks are counted once
    has_conv: bool
    substitutable: tuple[str, ...]  # parts that kernels can be put in place of
    unmasked: bool  # whether a mask among the inputs hides nothing
    has_cache: bool  # whether a key-value cache is among the inputs
    forecast: Forecast | None
    budget_s: float

    @property
    def num_kernels(self) -> float:
        per_leaf = KERNELS_A_LEAF * (3 if self.mode == "train" else 1)
        return self.forecast.num_kernels if self.forecast else per_leaf * self.num_leaves


@dataclass(frozen=True, slots=True)
class Rung:
    """A candidate to try, the seconds it is expected to take to make, and the call time the cost model expects."""

    candidate: Candidate
    cost_s: float
    predicted_s: float | None = None


class Climber(Protocol):
    """What the ladder looks at while it is climbed."""

    best: Built
    entries: dict[str, Entry]


class Ladder:
    """Cheap candidates first, then compilers by expected gain a second; later rungs use what earlier ones showed."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.scale = 1.0  # measured over estimated compile time
        self.device = "cuda" if facts.cuda else "cpu"
        self.kind = "inference" if facts.mode == "infer" else "training"

    def rungs(self, search: Climber) -> Iterator[Rung]:
        """What promises most a second comes first: what needs no compiler, then blocks or the whole, then rivals."""
        yield from self._captured(search)
        layout = search.best.candidate.layout
        whole = self._inductor("compiled" if layout == "keep" else "compiled channels last", layout, "model")
        if self.facts.groups:  # most of what compiling the whole would bring, for a fraction of its time
            yield from self._block_rungs(search)
        yield from self._kernels_in_place()
        if self._at_the_floor(search):
            return
        if not self.facts.groups:
            yield from self._family(search, whole, self._compile_s("model"))
        yield from self._stock(search)
        if self.facts.groups and not self._at_the_floor(search):
            yield from self._family(search, whole, self._compile_s("model"))
        if not self.facts.groups and not self.facts.has_cache:
            yield from self._rewritten(search)
        yield from self._tuned(search, layout)
        yield from self._ablations(search, "model")

    def owed_s(self, rung: Rung, search: Climber) -> float:
        """Seconds to keep for torch.compile while it is not measured: the guarantee rests on it.

        Where the budget is less than a few times its compilation, the candidate at hand promises more and goes first.
        """
        stock_s = self._compile_s("model")
        measured = STOCK in search.entries or rung.candidate.compiler == "stock"
        return 0.0 if measured or self.facts.budget_s < OWED_TIMES * stock_s else stock_s

    def _captured(self, search: Climber) -> Iterator[Rung]:
        """Candidates without a compiler. A decoding step is many small products: its rewrites bring the most."""
        facts = self.facts
        if facts.has_cache or not facts.cuda:
            yield from self._rewritten(search)
        if facts.cuda:
            plain = Candidate(name="graph", graphed=True, tries_convolutions=self._tries())
            yield self._rung(plain, CAPTURE_S, "cudagraph")
        if facts.has_conv:
            last = Candidate(name="channels last", layout="channels_last", tries_convolutions=self._tries())
            yield self._graphed(last, CAPTURE_S)

    def _rewritten(self, search: Climber) -> Iterator[Rung]:
        chosen = recommended(self.kind, "none", self.device)
        if chosen:
            yield from self._family(search, Candidate(name="rewrites", rewrites=chosen), self._trace_s("model"))

    def _block_rungs(self, search: Climber) -> Iterator[Rung]:
        chosen = recommended(self.kind, "none", self.device)
        if chosen:
            rewritten = replace(self._blocks(), name="rewritten blocks", rewrites=chosen, compiler="none")
            yield from self._family(search, rewritten, self._trace_s("blocks"))
        yield from self._family(search, self._blocks(), self._compile_s("blocks"))
        yield from self._ablations(search, "blocks")

    def _kernels_in_place(self) -> Iterator[Rung]:
        kernels = Candidate(name="kernels", substituted=self.facts.substitutable)
        if not kernels.substituted:
            return
        if self.facts.mode == "train":
            yield self._rung(kernels, CAPTURE_S, "cudagraph")
        if self.facts.cuda:
            yield self._graphed(kernels, CAPTURE_S)

    def _blocks(self) -> Candidate:
        blocks = self._inductor("blocks", "keep", "blocks")
        if "attention" not in self.facts.substitutable or self.facts.unmasked:
            return blocks
        # Masks are made outside of blocks, and eager code makes them by looking at values, which no graph can.
        return replace(blocks, name="blocks and attention", substituted=("attention",))

    def narrow_rungs(self, search: Climber, name: str, narrow: tuple[tuple[str, str], ...]) -> Iterator[Rung]:
        """Layers in fewer bits, rewritten; and lowered by Inductor, where the best so far is."""
        rewritten = (*recommended(self.kind, "none", self.device), "narrow")
        yield from self._family(search, Candidate(name=name, rewrites=rewritten, narrow=narrow), self._trace_s("model"))
        if search.best.candidate.compiler != "none" and not search.best.candidate.narrow:
            whole = self._inductor(f"{name}, compiled", search.best.candidate.layout, "model")
            lowered = replace(whole, rewrites=(*whole.rewrites, "narrow"), narrow=narrow)
            yield from self._family(search, lowered, self._compile_s("model"))

    def took(self, rung: Rung, spent_s: float) -> None:
        """Compilers are as slow as this host lets them be: the first one tells."""
        if rung.candidate.compiler != "none" and rung.cost_s > 2 * CAPTURE_S:
            self.scale = max(0.25, min(5.0, self.scale * spent_s / rung.cost_s))

    def _family(self, search: Climber, candidate: Candidate, cost_s: float) -> Iterator[Rung]:
        """A compiled candidate, captured where that works; in training with and without, for memory's sake."""
        if self.facts.mode == "train" or not self.facts.cuda:
            yield self._rung(candidate, cost_s, "compiled")
            status = search.entries[candidate.name].status
            if status in (FAILED, SKIPPED):
                return
            bounded = ACTIVATION_BUDGET in dict(candidate.options)
            if status == LARGE and candidate.compiler == "inductor" and not bounded:
                yield from self._family(search, self._recomputing(candidate), cost_s)
                return
            cost_s = CAPTURE_S
        if self.facts.cuda:
            graphed = self._graphed(candidate, cost_s)
            yield graphed
            if self.facts.mode == "infer" and search.entries[graphed.candidate.name].status == FAILED:
                yield self._rung(candidate, CAPTURE_S, "compiled")

    def _recomputing(self, candidate: Candidate) -> Candidate:
        """The same, keeping half of the activations: the cheap half is computed again."""
        return replace(candidate, name=f"{candidate.name}, recomputing", options=((ACTIVATION_BUDGET, KEPT_FRAC),))

    def _stock(self, search: Climber) -> Iterator[Rung]:
        stock = Candidate(name=STOCK, compiler="stock")
        yield self._rung(stock, self._compile_s("model"), "compiled")
        if self.facts.cuda and search.entries[stock.name].status not in (FAILED, SKIPPED):
            yield self._graphed(stock, CAPTURE_S)

    def _inductor(self, name: str, layout: str, scope: str) -> Candidate:
        chosen = recommended(self.kind, "inductor", self.device)
        return Candidate(name=name, rewrites=chosen, compiler="inductor", layout=layout, scope=scope,
                         tries_convolutions=self._tries())  # fmt: skip

    def _tries(self) -> bool:
        """In a graph cuDNN's choice is made once, so it may take its time; a call made anew would choose anew."""
        return self.facts.has_conv and self.facts.mode == "infer" and self.facts.cuda

    def _ablations(self, search: Climber, scope: str) -> Iterator[Rung]:
        """Without one family at a time, from the best so far, where it is a compiled candidate with several.

        Those with a kernel of ours come first: they end a compiler's fusions, and may cost more than they bring.
        """
        tried: set[str] = set()
        while len(tried) < MOST_ABLATIONS:
            best = search.best.candidate
            if best.compiler != "inductor" or best.scope != scope:
                return
            matched = search.best.report.counts()
            left = [name for name in matched if name not in tried and rewrites()[name].exact != "bits"]
            if not left:
                return
            name = min(left, key=lambda each: (not rewrites()[each].needs_kernels, -matched[each]))
            tried.add(name)
            rest = tuple(each for each in best.rewrites if each != name)
            fewer = replace(best, name=f"{best.name.removesuffix(GRAPHED)} − {name}", rewrites=rest)
            yield self._rung(self._named(fewer), self._compile_s(scope), "compiled")

    def _tuned(self, search: Climber, layout: str) -> Iterator[Rung]:
        """Products tuned where they matter, else generated kernels; and torch.compile's own tuning, as a rival."""
        if not self.facts.cuda:
            return
        forecast = self.facts.forecast
        plain = self._blocks() if self.facts.groups else self._inductor("", layout, "model")
        if forecast and forecast.matrix_frac < AUTOTUNE_LEAST_MATRIX_FRAC:
            tuned = replace(plain, name="tuned", options=GENERATED_TUNED)
            yield from self._family(search, tuned, 2 * self._compile_s(plain.scope))
            return
        tuned = replace(plain, name="tuned", compiler="inductor-autotune")
        yield from self._family(search, tuned, AUTOTUNE_TIMES * self._compile_s(plain.scope))
        if self.facts.mode == "infer":
            rival = Candidate(name="torch.compile max-autotune", compiler="stock-autotune")
            yield self._rung(rival, AUTOTUNE_TIMES * self._compile_s("model"), "compiled")

    def _at_the_floor(self, search: Climber) -> bool:
        entry = search.entries.get(search.best.candidate.name)
        if not self.facts.forecast or entry is None or entry.status not in MEASURED or not entry.measured_s:
            return False
        return entry.measured_s <= FLOOR_REACHED * self.facts.forecast.floor_s

    def _compile_s(self, scope: str) -> float:
        """Seconds to compile: some anyway, some for every kernel, more for every kernel that is not like another.

        Measured on a host with a GPU: ResNet-50 21 s (404 kernels, all different), a decoding step of 32 equal layers
        36 s (1,700), eight layers of prefill 24 s (330), three others compiling beside. Where C++ is compiled, more.
        """
        first_s, each_s, unlike_s = (6.0, 0.015, 0.03) if self.facts.cuda else (6.0, 0.02, 0.06)
        return self.scale * (first_s + each_s * self._kernels(scope) + unlike_s * self._kernels("blocks"))

    def _kernels(self, scope: str) -> float:
        """Kernels that a compiler sees: of equal blocks those of one."""
        return self.facts.num_kernels * (self.facts.unlike_frac if scope == "blocks" else 1.0)

    def _trace_s(self, scope: str) -> float:
        return TRACE_S + TRACE_KERNEL_S * self._kernels(scope)

    def _graphed(self, candidate: Candidate, cost_s: float) -> Rung:
        execution = "compiled" if candidate.compiles else "cudagraph"
        return self._rung(self._named(replace(candidate, graphed=self.facts.cuda)), cost_s, execution)

    def _named(self, candidate: Candidate) -> Candidate:
        return replace(candidate, name=candidate.name + GRAPHED) if candidate.graphed else candidate

    def _rung(self, candidate: Candidate, cost_s: float, execution: str) -> Rung:
        forecast: Any = self.facts.forecast
        predicted_s = forecast.expected_s.get(execution) if forecast else None
        if self.facts.unmasked and not candidate.compiler.startswith("stock"):
            candidate = replace(candidate, unmasked=True)
        return Rung(candidate, cost_s, predicted_s)
