"""Makes candidates with their expected build times for the stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ridgeline.optimizer.backend import UNCHANGED
from ridgeline.optimizer.receipt import FAILED, LARGE, MEASURED, SKIPPED
from ridgeline.optimizer.rewrites import recommended
from ridgeline.optimizer.search.candidate import ACTIVATION_BUDGET, Candidate
from ridgeline.optimizer.search.facts import DEFAULT_BUDGET_S, GRAPHED, PLAIN, STOCK, Facts, Progress, Proposal
from ridgeline.optimizer.search.prices import CAPTURE_S, Prices


class Proposals:
    """Makes the candidates of one search; ``layout`` is the faster one, once both were tried."""

    def __init__(self, facts: Facts) -> None:
        self.facts, self.prices = facts, Prices(facts)
        self.guesses = False
        self.layout = "keep"
        self.device = "cuda" if facts.cuda else "cpu"
        self.kind = "inference" if facts.mode == "infer" else "training"

    def whole(self) -> Candidate:
        """The whole model lowered by Inductor with our rewrites."""
        name = "compiled" if self.layout == "keep" else "compiled channels last"
        return self.inductor(name, self.layout, "model")

    @property
    def is_short(self) -> bool:
        """Whether the model is at most 24 kernels: one op and its surroundings, which compile in seconds."""
        facts = self.facts
        single = facts.mode == "infer" and facts.cuda and not facts.groups and not facts.has_cache
        return single and not self.scans() and facts.num_kernels <= 24

    def owed_s(self, proposal: Proposal, search: Progress) -> float:
        """Seconds reserved for torch.compile while it is not measured, because the guarantee depends on it.

        Nothing is reserved if the budget is less than twice its compile time (1.5 times for inference within less than
        the default budget): the candidate at hand promises more then.
        """
        stock_s = self.prices.compile_s("model")
        measured = STOCK in search.entries or proposal.candidate.compiler == "stock"
        hasty = self.facts.mode == "infer" and self.facts.budget_s < DEFAULT_BUDGET_S
        return 0.0 if measured or self.facts.budget_s < (1.5 if hasty else 2.0) * stock_s else stock_s

    def rewritten(self, search: Progress, layout: str = "keep") -> Iterator[Proposal]:
        chosen = recommended(self.kind, "none", self.device)
        if chosen and not search.entries.keys() & {"rewrites", "rewrites" + GRAPHED}:
            whole = Candidate(name="rewrites", rewrites=chosen, layout=layout, tries_convolutions=self.tries(),
                              substituted=self.traceable())  # fmt: skip
            yield from self.family(search, whole, self.prices.trace_s("model"))

    def rewritten_blocks(self, search: Progress, layout: str) -> Iterator[Proposal]:
        chosen = recommended(self.kind, "none", self.device)
        if chosen:
            rewritten = replace(self.blocks(layout), name="rewritten blocks", rewrites=chosen, compiler="none")
            yield from self.family(search, rewritten, self.prices.trace_s("blocks"))

    def with_experts(self, search: Progress, compiled: Candidate, cost_s: float) -> Iterator[Proposal]:
        """A candidate with our sort of tokens by expert and our sum over a token's experts.

        In four layers of Qwen 3's experts (2,048 tokens, eight experts each; 5.7 ms by Inductor) the sums take 435 µs
        where memory bandwidth allows 80, and the sort of 64-bit numbers takes 186 (H200).
        """
        if "experts" in self.facts.substitutable and self.facts.mode == "infer" and self.facts.cuda:
            parts = (*compiled.substituted, "experts")
            more = replace(compiled, name=f"{compiled.name} and experts", substituted=parts)
            yield from self.family(search, more, cost_s)

    def is_measured(self, search: Progress, candidate: Candidate) -> bool:
        """Whether a candidate was timed, captured or not."""
        entries = [search.entries.get(name) for name in (candidate.name, candidate.name + GRAPHED)]
        return any(entry is not None and entry.status in MEASURED for entry in entries)

    def is_made(self, search: Progress, candidate: Candidate) -> bool:
        """Whether a candidate was built, or failed to build."""
        entries = [search.entries.get(name) for name in (candidate.name, candidate.name + GRAPHED)]
        return any(entry is not None and entry.status != SKIPPED for entry in entries)

    def kernels_in_place(self, search: Progress) -> Iterator[Proposal]:
        kernels = Candidate(name="kernels", substituted=self.facts.substitutable)
        if not kernels.substituted:
            return
        if self.facts.mode == "train" and not self.captures(search):
            yield self.proposal(kernels, CAPTURE_S, "cudagraph")
        elif self.facts.cuda:
            yield self.graphed(kernels, CAPTURE_S)

    def scans(self) -> bool:
        """Whether the model has a scan that our kernel, which has no backward, can replace."""
        return "scan" in self.facts.substitutable and self.facts.mode == "infer"

    def blocks(self, layout: str) -> Candidate:
        """Compiled blocks, with kernels of ours for what is outside of blocks.

        Masks are made outside, by eager code that reads their values, which a CUDA graph cannot. In training, the loss
        of a large vocabulary makes several float32 copies of the logits, and an odd vocabulary slows the last GEMM.
        """
        wanted = [] if self.facts.unmasked or self.facts.has_cache else ["attention"]
        wanted += ["loss", "padding"] if self.facts.mode == "train" else ["padding", "patches"]
        parts = tuple(part for part in wanted if part in self.facts.substitutable)
        blocks = self.inductor("blocks", layout, "blocks")
        return replace(blocks, name=" and ".join(("blocks", *parts)), substituted=parts) if parts else blocks

    def family(self, search: Progress, candidate: Candidate, cost_s: float) -> Iterator[Proposal]:
        """A compiled candidate, captured if possible; uncaptured if that fails, in training also to save memory."""
        if self.facts.mode == "train" and not self.captures(search):
            yield from self._uncaptured(search, candidate, cost_s)
            if self.facts.cuda and search.entries[candidate.name].status not in (FAILED, SKIPPED, LARGE):
                yield self.graphed(candidate, CAPTURE_S)
            return
        if not self.facts.cuda:
            yield self.proposal(candidate, cost_s, "compiled")
            return
        graphed = self.graphed(candidate, cost_s)
        yield graphed
        entry = search.entries[graphed.candidate.name]
        status = entry.status
        if status == LARGE and self.facts.mode == "train":
            yield from self._uncaptured(search, candidate, CAPTURE_S)
            if candidate.scope == "blocks" and not self.is_made(search, self._recomputing(candidate)):
                yield from self._kept_less(search, candidate)
        elif status == FAILED and UNCHANGED not in entry.reason:
            yield self.proposal(candidate, CAPTURE_S, "compiled")

    def _uncaptured(self, search: Progress, candidate: Candidate, cost_s: float) -> Iterator[Proposal]:
        """The compiled candidate without capture; if it needs too much memory, with half of the activations."""
        yield self.proposal(candidate, cost_s, "compiled")
        if search.entries[candidate.name].status == LARGE:
            yield from self._kept_less(search, candidate)

    def _kept_less(self, search: Progress, candidate: Candidate) -> Iterator[Proposal]:
        """The candidate with half of the activations kept; captured, it may need no more memory than eager."""
        if candidate.compiler == "inductor" and ACTIVATION_BUDGET not in dict(candidate.options):
            yield from self.family(search, self._recomputing(candidate), self.prices.compile_s(candidate.scope))

    def cannot_capture(self, search: Progress) -> bool:
        """Whether a step cannot be captured because the host reads values inside it.

        Compiled blocks gain most together with a capture; without one torch.compile, which saves more host time, was
        ahead. A detector's blocks took 13 s to build and were 0.92 of eager, torch.compile was 1.35 and had no time
        left (H200).
        """
        entry = search.entries.get(PLAIN)
        return self.facts.cuda and entry is not None and entry.status == FAILED

    def captures(self, search: Progress) -> bool:
        """Whether the model could be captured: then every candidate is tried captured first."""
        entry = search.entries.get(PLAIN)
        return self.facts.cuda and entry is not None and entry.status not in (FAILED, SKIPPED, LARGE)

    def _recomputing(self, candidate: Candidate) -> Candidate:
        """The candidate with half of the activations recomputed in the backward."""
        return replace(candidate, name=f"{candidate.name}, recomputing", options=((ACTIVATION_BUDGET, 0.5),))

    def inductor(self, name: str, layout: str, scope: str) -> Candidate:
        chosen = recommended(self.kind, "inductor", self.device)
        # Inductor then draws the random numbers that eager PyTorch draws: the same seed gives the same result.
        same_rng = (("fallback_random", True),) if self.facts.random and self.facts.mode == "infer" else ()
        parts = self.traceable() if scope == "model" else ()
        return Candidate(name=name, rewrites=chosen, compiler="inductor", layout=layout, scope=scope, options=same_rng,
                         tries_convolutions=self.tries(), substituted=parts)  # fmt: skip

    def traceable(self) -> tuple[str, ...]:
        """Parts to be replaced before a whole model is traced: a traced encoder computes other values in padded rows
        than an eager one."""
        wanted = self.facts.mode == "infer" and "encoders" in self.facts.substitutable
        return ("encoders",) if wanted else ()

    def tries(self) -> bool:
        """Whether cuDNN may time its algorithms: in a graph it chooses once.

        In training it takes 0.2 s per convolution, of at most half the budget: MobileNetV3's plain capture took 9.7 s
        for it (52 convolutions), SegFormer's 10.7.
        """
        facts = self.facts
        tried_s = 0.2 * facts.num_convs if facts.mode == "train" else 0.0
        return (facts.has_conv or facts.convolves) and facts.cuda and tried_s <= 0.5 * facts.budget_s

    def as_tuned(self, whole: Candidate, search: Progress) -> Candidate:
        """The whole model with the options that were best for its blocks: tuned kernels are cached."""
        best = search.best.candidate
        if best.compiler not in ("inductor", "inductor-autotune"):
            return whole
        return replace(whole, compiler=best.compiler, options=best.options, rewrites=best.rewrites)

    def is_at_the_floor(self, search: Progress) -> bool:
        """Whether the best so far is within 5 % of the floor."""
        entry = search.entries.get(search.best.candidate.name)
        if not self.facts.forecast or entry is None or entry.status not in MEASURED or not entry.measured_s:
            return False
        floor_s = self.facts.forecast.floor_s  # a result below it does less work than the floor assumes
        return floor_s <= entry.measured_s <= 1.05 * floor_s

    def graphed(self, candidate: Candidate, cost_s: float) -> Proposal:
        execution = "compiled" if candidate.compiles else "cudagraph"
        recorded = replace(candidate, graphed=self.facts.cuda, guesses=self.guesses and self.facts.cuda)
        return self.proposal(self.named(recorded), cost_s, execution)

    def named(self, candidate: Candidate) -> Candidate:
        return replace(candidate, name=candidate.name + GRAPHED) if candidate.graphed else candidate

    def proposal(self, candidate: Candidate, cost_s: float, execution: str) -> Proposal:
        forecast: Any = self.facts.forecast
        predicted_s = forecast.expected_s.get(execution) if forecast else None
        if self.facts.unmasked and not candidate.compiler.startswith("stock"):
            candidate = replace(candidate, unmasked=True)
        return Proposal(candidate, cost_s, predicted_s)

    def blocks_failed(self, search: Progress) -> bool:
        """Whether blocks that look equal could not be compiled as such."""
        tried = [entry for name, entry in search.entries.items() if "blocks" in name]
        return bool(tried) and all(entry.status == FAILED for entry in tried)

    def is_hasty(self) -> bool:
        """Whether torch.compile comes first: within less than the default budget nothing else ensures that it is
        measured, and captured it is most of what our compilation would bring.

        RegNet and ShuffleNet had 15 and 25 seconds (KernelBench 3/27, 3/29); autotuning their convolutions took 11 and
        30 of them, and the results took 1.3 and 1.1 times as long as torch.compile's.
        """
        facts = self.facts
        return facts.mode == "infer" and facts.cuda and not facts.groups and facts.budget_s < DEFAULT_BUDGET_S

    def decodes(self) -> bool:
        """Whether it is a decoding step, which gains beyond its blocks: masks become lengths, positions are shared.

        Llama 8B took 4.77 ms where its rewritten blocks took 5.53 and its compiled ones 4.85.
        """
        return self.facts.has_cache and self.facts.cuda and bool(self.facts.groups) and self.facts.mode == "infer"
