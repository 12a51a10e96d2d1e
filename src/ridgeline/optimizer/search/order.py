"""Which candidates to try, in which order, and what each is expected to cost and to bring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ridgeline.optimizer.backend import UNCHANGED
from ridgeline.optimizer.receipt import FAILED, LARGE, MEASURED, SKIPPED, Entry
from ridgeline.optimizer.rewrites import recommended, rewrites
from ridgeline.optimizer.search.blocks import Group
from ridgeline.optimizer.search.candidate import ACTIVATION_BUDGET, Built, Candidate
from ridgeline.optimizer.search.forecast import Forecast

AUTOTUNE_LEAST_MATRIX_FRAC = 0.3
"""Tuning products pays where they are at least this share of the time."""
TUNE_CPU_S = 120.0
"""Seconds of all processors together to try the ways to compute one product: BERT's four took over 80 s of four."""
GENERATED_TUNED = (("coordinate_descent_tuning", True), ("max_autotune_pointwise", True))
"""Inductor tries more launch configurations of the kernels it generates."""
POINTWISE_TUNED = (("max_autotune_pointwise", True),)
"""The same without walking from one configuration to the next, which compiles one at a time: what whole networks of
dozens of kernels can afford."""
MOST_WALKED_KERNELS = 60
PRODUCTS_TUNED = (("coordinate_descent_tuning", False), ("triton.enable_persistent_tma_matmul", True))
"""Products alone, in parallel processes: walking from one launch configuration to the next compiles one at a time."""
ROWS_HELD = (("triton.multi_kernel", 1),)
"""Inductor makes a second form of its reductions, which holds a row in registers, and takes the faster when first run.
By itself it does so up to 1,024 elements; DiT's norms (1,152) and Whisper's (1,280) read their rows twice: 1.8 of 15
ms, and 3.9 ms where our kernels take 1.9 (H200)."""
CONVOLUTIONS_TIMED = (("timed_convolutions", True),)
OWN_CONVOLUTIONS = ("convolution-chain", "conv-activation")
"""Rewrites that take convolutions away from Inductor, which lays out what surrounds cuDNN's as they want it."""
EAGERS_DICE = (("fallback_random", True),)
"""Inductor draws the numbers that eager PyTorch would draw: the same seed gives the same result."""
FLOOR_REACHED = 1.05
"""This close to the floor there is nothing left to search for."""
KERNELS_A_LEAF = 2.5
"""Kernels a leaf module launches in eager mode, where nothing was priced: as in lab/workloads.py."""
HOST_A_KERNEL_S = 1.5e-5
"""What the host takes to start one in eager mode, at most: a model written as one function has a single leaf, and may
be long all the same."""
COMPILING_S = 45.0
"""A budget in which something will be compiled, so that the compiler may as well be imported before all else."""
IMPORTS_S = {"torch._dynamo": 2.5, "torch._inductor.compile_fx": 1.5}
"""PyTorch's tracer and compiler, imported by a process that has not compiled yet."""
FEW_S, FEW_KERNEL_S = 1.5, 0.25
"""Seconds to compile a function of a few kernels, and each of them. torch.compile took 1.3 s for problems of the first
level of KernelBench (median of 72; nine in ten below 2.9) and 2.7 for the second's (98; 5.8), a dozen others compiling
beside (H200)."""
CAPTURE_S, TRACE_S = 1.0, 2.0
TRACE_KERNEL_S, RACED_KERNEL_S = 0.004, 0.008
"""Tracing and rewriting, without any compiler: a decoding step of 1,690 kernels takes 8.0 s (H200, three others
compiling beside), Swin 6.3 (600), DiT 2.7 (655). Convolutions of ours are raced when they are first run: EfficientNet
8.8 s (362), U-Net 10.5 (1,019), ResNet-50 5.7 (391)."""
TRIED_S = 0.4
"""Seconds to try three of cuDNN's algorithms for each pass of a convolution in training, laid channels last: ResNet-18
took 6.3 s (20 of them), EfficientNet-B0 32 (81), MobileNetV3 28 (52), depthwise ones the longest."""
TRIED_AS_IT_IS_S, TRIED_FRAC = 0.2, 0.5
"""The same in the layout a model has, and the share of a budget that it may take: MobileNetV3's plain recording took
9.7 s to make for this (52 convolutions), SegFormer's 10.7, which ten seconds do not have."""
TUNED_TIMES = 3.0
"""A few kernels tuned take this many times what they take to compile: 4.1 and 0.7 s, 3.9 and 1.3, 17.7 and 5.1."""
MOST_ABLATIONS = 3
MOST_SHORT_KERNELS = 24
"""Up to so many kernels a model is one op and what surrounds it: compiling it takes seconds, and all is tried."""
COPY_BYTES_PER_S = 4.0e12
"""What an H200 copies: 4.24e12 measured, lab/notes/rows.md."""
MOST_COPIED_FRAC = 0.02
HOST_S = 3e-4
"""Calls much longer than what the host needs for a few launches gain nothing from being recorded."""
HOST_FRAC = 0.3
"""Longer ones do where the host is busy for this share of them: recurrent layers start thousands of kernels."""
KEPT_FRAC = 0.5
MOST_GROUPED_FRAC = 0.9
"""Where fewer layers than this are in equal blocks, compiling those leaves too much as it is."""
QUICK_FRAC = 0.15
"""A trace of the whole that takes less of the budget is rewritten before torch.compile is measured, and may be what
wins: wav2vec2's first and largest layers are in no block, and were left as they are for want of seven seconds."""
BOTH_FRAC = 0.5
"""Where the whole and its blocks take more of the budget, blocks come first: Whisper's step as a whole took 21 s of 55
to compile and kept more than eager does, and nothing was left for its blocks."""
STOCK = "torch.compile"
OWED_TIMES, HASTY_TIMES = 2.0, 1.5
"""Where the budget is so many times its compilation, torch.compile's share of it is kept from all others; the second
for inference within less than the default, where nothing else makes sure that it is measured."""
DEFAULT_BUDGET_S = 120.0
"""A budget in which torch.compile is always measured, however long it takes to make (in training: begun)."""
AGAIN_FRAC = 0.6
"""Of what torch.compile took, what compiling the same model another way takes: most kernels are on disk by then. Of 71
problems of KernelBench the median is 0.3, nine in ten are below 0.64 (H200)."""
AS_IT_IS = "compiled as it is"
"""What torch.compile makes, without our rewrites and past its guards: these and our own look at a call take 30 to 50 µs
more than our look alone, which a call of half a millisecond feels."""
PLAIN, GRAPHED = "graph", " + graph"
WAITS = "the host waits for a value"
"""What a recording says that failed for this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the ladder is made of."""

    mode: str
    cuda: bool
    eager_s: float
    groups: tuple[Group, ...]
    num_leaves: int
    unlike_frac: float  # share of the kernels that are left when equal blocks are counted once
    has_conv: bool  # whether weights can be laid channels last
    substitutable: tuple[str, ...]  # parts that kernels can be put in place of
    unmasked: bool  # whether a mask among the inputs hides nothing
    has_cache: bool  # whether a key-value cache is among the inputs
    forecast: Forecast | None
    budget_s: float
    num_products: int = 6  # of different sizes, in one block of each kind
    num_threads: int = 16  # that compile beside each other
    input_bytes: int = 0
    num_convs: int = 0  # layers that convolve
    convolves: bool = False  # whether there are convolutions at all, in whatever layout
    grouped_frac: float = 1.0  # share of the layers that are in blocks of which there are several
    long_rows: bool = False  # whether norms have longer rows than Inductor holds in registers
    groups_channels: bool = False  # whether GroupNorm stands between them, which as it is undoes channels last
    random: bool = False  # whether results depend on random numbers
    headed: bool = False  # whether a vocabulary's head is outside of blocks, and no part of ours takes over its loss
    host_s: float = 0.0  # until an eager call returns
    recurrent: bool = False  # whether there are recurrent layers, which no compiler looks into
    import_s: float = 0.0  # to import what this process does not have yet of PyTorch's compiler

    @property
    def copies_s(self) -> float:
        """Seconds that a recorded call takes to copy inputs which lie elsewhere than those it was recorded with."""
        return 2 * self.input_bytes / COPY_BYTES_PER_S

    @property
    def num_kernels(self) -> float:
        """Kernels that a compiler would see: of recurrent layers it sees none of the thousands of their steps."""
        per_leaf = KERNELS_A_LEAF * (3 if self.mode == "train" else 1)
        if self.forecast is None and self.cuda and not self.recurrent and self.mode == "infer":
            return max(per_leaf * self.num_leaves, self.host_s / HOST_A_KERNEL_S)
        if self.forecast is None or self.recurrent:
            return per_leaf * self.num_leaves
        return self.forecast.num_kernels if self.forecast.num_seen is None else self.forecast.num_seen


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
        self.import_s = facts.import_s
        self.stock_made = False
        self.guesses = False
        self.device = "cuda" if facts.cuda else "cpu"
        self.kind = "inference" if facts.mode == "infer" else "training"

    def rungs(self, search: Climber) -> Iterator[Rung]:
        """What promises most a second comes first: what needs no compiler, then blocks or the whole, then rivals."""
        if self.is_short:
            yield from self._short_rungs(search)
            return
        yield from self._captured(search)
        layout = self._layout(search)
        if self._hasty():
            yield from self._stock(search)
        convnet = self.facts.has_conv and self.facts.mode == "infer" and not self.facts.groups
        if convnet:  # seconds, and most of what a compiler would bring to a network of convolutions
            yield from self._rewritten(search, layout)
        whole = self._inductor("compiled" if layout == "keep" else "compiled channels last", layout, "model")
        training = self.facts.mode == "train"
        if training and not self.facts.groups:  # seconds, and one trace, which what is compiled stands on too
            yield from self._kernels_in_place(search)
            yield from self._rewritten(search, layout)
        if self._decodes():  # the fastest of every decoding step measured, and what a short budget has to reach
            yield from self._rewritten(search)
        early = training and bool(self.facts.groups) and self._unrecordable(search)
        if early:
            yield from self._stock(search)
        if self.facts.groups:  # most of what compiling the whole would bring, for a fraction of its time
            yield from self._block_rungs(search, layout, whole)
            outside = self.facts.grouped_frac < MOST_GROUPED_FRAC  # Swin's large images, say
            quick = self._trace_s("model") <= QUICK_FRAC * self.facts.budget_s
            if (not training and (outside or quick)) or self._blocks_failed(search):  # before compilers of the whole
                yield from self._rewritten(search, layout)
        if self.facts.groups if training else not self._scans():  # rewritten blocks beat them in all steps measured
            yield from self._kernels_in_place(search)
        if self._at_the_floor(search):
            if not self._hasty() and not early:
                yield from self._stock(search)
            return
        if training:  # the backward doubles what compilers take: torch.compile is measured before all else they make
            if not early:
                yield from self._stock(search)
            if not self.facts.groups and search.entries[STOCK].status in MEASURED:  # the same, but for what matches
                whole = replace(whole, options=(("matched", True),))
        if (training or not self.facts.groups) and not search.entries.keys() & {whole.name, whole.name + GRAPHED}:
            yield from self._family(search, whole, self._whole_s())
            yield from self._with_experts(search, whole, self._whole_s())
        if training:
            yield from self._ablations(search, "blocks")
        else:
            if self.facts.groups and self.facts.grouped_frac < MOST_GROUPED_FRAC:  # torch.compile's share is kept
                yield from self._family(search, self._as_tuned(whole, search), self._whole_s())
            if not self._hasty():
                yield from self._stock(search)
        if not training and self.facts.groups and not self._at_the_floor(search) and not self._is_made(search, whole):
            yield from self._family(search, self._as_tuned(whole, search), self._whole_s())
        if not training:
            yield from self._without_kernels(search, whole)
        if not convnet and not self.facts.has_cache and not (training and self.facts.groups):
            yield from self._rewritten(search, layout)  # across blocks, what a compiler was tried on too
        yield from self._tuned(search, layout)  # minutes that no price foretells: after what the guarantee rests on
        for scope in ("blocks", "model"):
            yield from self._ablations(search, scope)
        yield from self._rival()

    def _decodes(self) -> bool:
        """Whether the whole shows more than its blocks: masks that become lengths, places that are counted together.

        Llama 8B took 4.77 ms where its blocks, rewritten, took 5.53 and compiled 4.85.
        """
        return self.facts.has_cache and self.facts.cuda and bool(self.facts.groups) and self.facts.mode == "infer"

    def _hasty(self) -> bool:
        """Whether torch.compile comes before all that is made of the whole: within less than the default budget nothing
        else makes sure of it, and recorded it is most of what compiling our way would bring.

        RegNet and ShuffleNet had 15 and 25 seconds (KernelBench 3/27, 3/29), their convolutions were raced for 11 and
        30 of them, and what was returned took 1.3 and 1.1 times what torch.compile takes.
        """
        facts = self.facts
        return facts.mode == "infer" and facts.cuda and not facts.groups and facts.budget_s < DEFAULT_BUDGET_S

    def _layout(self, search: Climber) -> str:
        """The layout that was faster; channels last where only rewrites make it so."""
        wanted = self.facts.groups_channels and self.facts.has_conv and self.facts.mode == "infer" and self.facts.cuda
        return "channels_last" if wanted else search.best.candidate.layout

    def _blocks_failed(self, search: Climber) -> bool:
        """Whether blocks that look alike could not be compiled as such."""
        tried = [entry for name, entry in search.entries.items() if "blocks" in name]
        return bool(tried) and all(entry.status == FAILED for entry in tried)

    @property
    def is_short(self) -> bool:
        """Whether all there is to compile is one op and what surrounds it."""
        facts = self.facts
        single = facts.mode == "infer" and facts.cuda and not facts.groups and not facts.has_cache
        return single and not self._scans() and facts.num_kernels <= MOST_SHORT_KERNELS

    def _short_rungs(self, search: Climber) -> Iterator[Rung]:
        """Few kernels: torch.compile first, then our own, then both together; recorded where the host shows.

        torch.compile takes a second or two of what is this small, and the guarantee rests on it: kernels of ours are
        compiled and raced for longer, and would use up a short budget before it. A recorded call copies what lies
        elsewhere: large inputs of short calls are better read where they are.
        """
        facts = self.facts
        copies_little = facts.copies_s <= MOST_COPIED_FRAC * facts.eager_s
        host_shows = facts.eager_s < 20 * HOST_S or facts.host_s > HOST_FRAC * facts.eager_s
        records = facts.cuda and copies_little and host_shows
        if records:
            plain = Candidate(name=PLAIN, graphed=True, tries_convolutions=self._tries())
            yield self._rung(plain, CAPTURE_S, "cudagraph")
        chosen = recommended(self.kind, "none", self.device)
        whole = replace(self._inductor("compiled", "keep", "model"), tries_convolutions=False, straight=True)
        rewritten = Candidate(name="rewrites", rewrites=chosen, straight=True, substituted=self._traceable())
        for candidate in (Candidate(name=STOCK, compiler="stock"), rewritten, whole):
            compiled_s = self._compile_s("model") if candidate.compiler == "stock" else self._whole_s()
            cost_s = self._trace_s("model") if candidate.compiler == "none" else compiled_s
            yield self._rung(candidate, cost_s, "compiled")
            entry = search.entries[candidate.name]
            changed = candidate.compiler != "none" or bool(entry.rewrites)
            if records and changed and entry.status not in (FAILED, SKIPPED):
                yield self._graphed(candidate, CAPTURE_S)
        if facts.convolves:
            yield from self._convolving(whole)
        entry = search.entries[whole.name]
        if search.best.candidate.name == STOCK and (entry.rewrites or entry.status not in MEASURED):
            yield self._rung(replace(whole, name=AS_IT_IS, rewrites=()), CAPTURE_S, "compiled")
        tuned = replace(whole, name="tuned", options=(*whole.options, *GENERATED_TUNED))
        yield self._rung(tuned, TUNED_TIMES * self._compile_s("model"), "compiled")

    def _convolving(self, whole: Candidate) -> Iterator[Rung]:
        """cuDNN's convolutions where Inductor wants them, their algorithms chosen by timing.

        Inductor lays channels last by itself; the model's own weights stay as they are, for whoever calls it beside.
        """
        library = tuple(name for name in whole.rewrites if name not in OWN_CONVOLUTIONS)
        options = (*whole.options, *CONVOLUTIONS_TIMED)
        timed = replace(whole, name="compiled, convolutions timed", rewrites=library, options=options)
        yield self._rung(timed, self._compile_s("model"), "compiled")

    def owed_s(self, rung: Rung, search: Climber) -> float:
        """Seconds to keep for torch.compile while it is not measured: the guarantee rests on it.

        Where the budget is less than a few times its compilation, the candidate at hand promises more and goes first.
        """
        stock_s = self._compile_s("model")
        measured = STOCK in search.entries or rung.candidate.compiler == "stock"
        hasty = self.facts.mode == "infer" and self.facts.budget_s < DEFAULT_BUDGET_S
        return 0.0 if measured or self.facts.budget_s < (HASTY_TIMES if hasty else OWED_TIMES) * stock_s else stock_s

    def _captured(self, search: Climber) -> Iterator[Rung]:
        """Candidates without a compiler. A decoding step is many small products: its rewrites bring the most."""
        facts = self.facts
        if (facts.has_cache and not facts.groups) or not facts.cuda:
            yield from self._rewritten(search)
        if self._scans():  # a loop over steps: recording it as it is would take as long as it does
            yield from self._kernels_in_place(search)
        elif facts.cuda:
            plain = Candidate(name=PLAIN, graphed=True, tries_convolutions=self._tries())
            yield self._rung(plain, CAPTURE_S, "cudagraph")
            yield from self._guessing(search, plain)
        if facts.has_conv:
            last = Candidate(name="channels last", layout="channels_last", tries_convolutions=self._tries())
            tried_s = TRIED_S * facts.num_convs if facts.mode == "train" else 0.0
            if facts.mode == "train" and self._unrecordable(search):  # the same code cannot be recorded laid otherwise
                yield self._rung(last, CAPTURE_S + tried_s, "eager")
            else:
                yield self._graphed(last, CAPTURE_S + tried_s)

    def _guessing(self, search: Climber, plain: Candidate) -> Iterator[Rung]:
        """Where the host waits for a value (the longest of some lengths, whether a mask hides anything), it is guessed
        to be what it was, here and in all recordings that follow; every replay compares."""
        entry = search.entries.get(PLAIN)
        waits = entry is not None and entry.status == FAILED and WAITS in entry.reason
        if self.facts.mode == "infer" and waits:
            self.guesses = True
            yield self._rung(replace(plain, name=f"{PLAIN}, guessing", guesses=True), CAPTURE_S, "cudagraph")

    def _rewritten(self, search: Climber, layout: str = "keep") -> Iterator[Rung]:
        chosen = recommended(self.kind, "none", self.device)
        if chosen and not search.entries.keys() & {"rewrites", "rewrites" + GRAPHED}:
            whole = Candidate(name="rewrites", rewrites=chosen, layout=layout, tries_convolutions=self._tries(),
                              substituted=self._traceable())  # fmt: skip
            yield from self._family(search, whole, self._trace_s("model"))

    def _block_rungs(self, search: Climber, layout: str, whole: Candidate) -> Iterator[Rung]:
        """Blocks rewritten, then compiled; with all that surrounds them where a training step spends much of it there.

        In training compiled blocks come first, so that a short budget reaches them: they were the faster in every step
        measured (Llama 1B 52.7 and 58.3 ms, ViT-B 17.7 and 20.2, ConvNeXt 15.1 and 18.6), and take six seconds.
        """
        training = self.facts.mode == "train"
        if not training and not self._is_measured(search, Candidate(name="rewrites")):  # the same and more
            yield from self._rewritten_blocks(search, layout)
        both_s = self._whole_s() + self._compile_s("blocks")
        if self.facts.headed and training and both_s <= BOTH_FRAC * self.facts.budget_s:
            yield from self._family(search, whole, self._whole_s())
        if not self._is_measured(search, whole):
            yield from self._family(search, self._blocks(layout), self._compile_s("blocks"))
            yield from self._with_experts(search, self._blocks(layout), self._compile_s("blocks"))
        if training:
            yield from self._rewritten_blocks(search, layout)
        many = self.facts.long_rows and not self.facts.has_cache  # a decoding step has few rows to read twice
        if many and self.facts.cuda and self.facts.mode == "infer":
            yield from self._held(search, self._blocks(layout))

    def _rewritten_blocks(self, search: Climber, layout: str) -> Iterator[Rung]:
        chosen = recommended(self.kind, "none", self.device)
        if chosen:
            rewritten = replace(self._blocks(layout), name="rewritten blocks", rewrites=chosen, compiler="none")
            yield from self._family(search, rewritten, self._trace_s("blocks"))

    def _with_experts(self, search: Climber, compiled: Candidate, cost_s: float) -> Iterator[Rung]:
        """The same with our sort of tokens by expert and our sum over a token's experts.

        Of four layers of Qwen 3's experts (2,048 tokens, eight experts each), 5.7 ms by Inductor, its sums take 435 µs
        where memory takes 80, and a sort of 64-bit numbers 186 (H200).
        """
        if "experts" in self.facts.substitutable and self.facts.mode == "infer" and self.facts.cuda:
            parts = (*compiled.substituted, "experts")
            more = replace(compiled, name=f"{compiled.name} and experts", substituted=parts)
            yield from self._family(search, more, cost_s)

    def _without_kernels(self, search: Climber, whole: Candidate) -> Iterator[Rung]:
        """The whole without kernels of ours, where with them it is behind torch.compile: they end Inductor's fusions.

        A diffusion network's norms over groups took 0.82 of its pace, and its attention, which Inductor leaves written
        out, was lost with them (H200).
        """
        names = (whole.name + GRAPHED, whole.name)
        entry = next((search.entries[name] for name in names if name in search.entries), None)
        if entry is None or entry.status not in MEASURED or not search.best.candidate.is_stock:
            return
        kept = tuple(name for name in whole.rewrites if not rewrites()[name].needs_kernels)
        brings = [name for name in entry.rewrites if name in kept and rewrites()[name].exact != "bits"]
        if brings and any(name not in kept for name in entry.rewrites):
            plainer = replace(self._inductor("compiled, no kernels of ours", "keep", "model"), rewrites=kept)
            yield from self._family(search, plainer, self._whole_s())

    def _held(self, search: Climber, blocks: Candidate) -> Iterator[Rung]:
        """The same with rows of norms in registers."""
        held = replace(blocks, name=f"{blocks.name}, rows held", options=(*blocks.options, *_known(ROWS_HELD)))
        yield from self._family(search, held, self._compile_s("blocks"))

    def _is_measured(self, search: Climber, candidate: Candidate) -> bool:
        """Whether a candidate was timed, recorded or not."""
        entries = [search.entries.get(name) for name in (candidate.name, candidate.name + GRAPHED)]
        return any(entry is not None and entry.status in MEASURED for entry in entries)

    def _is_made(self, search: Climber, candidate: Candidate) -> bool:
        """Whether a candidate was built, or could not be."""
        entries = [search.entries.get(name) for name in (candidate.name, candidate.name + GRAPHED)]
        return any(entry is not None and entry.status != SKIPPED for entry in entries)

    def _kernels_in_place(self, search: Climber) -> Iterator[Rung]:
        kernels = Candidate(name="kernels", substituted=self.facts.substitutable)
        if not kernels.substituted:
            return
        if self.facts.mode == "train" and not self._captures(search):
            yield self._rung(kernels, CAPTURE_S, "cudagraph")
        elif self.facts.cuda:
            yield self._graphed(kernels, CAPTURE_S)

    def _scans(self) -> bool:
        """Whether the model has a scan that our kernel takes the place of: it has no backward."""
        return "scan" in self.facts.substitutable and self.facts.mode == "infer"

    def _blocks(self, layout: str) -> Candidate:
        blocks, parts = self._inductor("blocks", layout, "blocks"), self._beside_blocks()
        return replace(blocks, name=" and ".join(("blocks", *parts)), substituted=parts) if parts else blocks

    def _beside_blocks(self) -> tuple[str, ...]:
        """What is outside of blocks and worth a kernel of ours.

        Masks are made outside, and eager code makes them by looking at values, which no graph can. The loss of a large
        vocabulary in training makes several float32 copies of the logits, and an odd one slows the last product.
        """
        wanted = [] if self.facts.unmasked or self.facts.has_cache else ["attention"]
        wanted += ["loss", "padding"] if self.facts.mode == "train" else ["padding", "patches"]
        return tuple(part for part in wanted if part in self.facts.substitutable)

    def narrow_rungs(self, search: Climber, name: str, narrow: tuple[tuple[str, str], ...]) -> Iterator[Rung]:
        """Layers in fewer bits, rewritten; and lowered by Inductor, where the best so far is."""
        rewritten = (*recommended(self.kind, "none", self.device), "narrow")
        yield from self._family(search, Candidate(name=name, rewrites=rewritten, narrow=narrow), self._trace_s("model"))
        if search.best.candidate.compiler != "none" and not search.best.candidate.narrow:
            whole = self._inductor(f"{name}, compiled", search.best.candidate.layout, "model")
            lowered = replace(whole, rewrites=(*whole.rewrites, "narrow"), narrow=narrow)
            yield from self._family(search, lowered, self._compile_s("model"))

    def took(self, rung: Rung, spent_s: float) -> None:
        """Compilers are as slow as this host lets them be: the first tells; what tunes spends its time elsewhere."""
        if rung.candidate.compiler in ("stock", "inductor") and rung.cost_s > CAPTURE_S:
            self.scale, self.import_s = max(0.25, min(5.0, self.scale * spent_s / rung.cost_s)), 0.0
            self.stock_made = self.stock_made or rung.candidate.compiler == "stock"

    def _family(self, search: Climber, candidate: Candidate, cost_s: float) -> Iterator[Rung]:
        """A compiled candidate, captured where that works, else as it is; in training also where memory forbids it."""
        if self.facts.mode == "train" and not self._captures(search):
            yield from self._uncaptured(search, candidate, cost_s)
            if self.facts.cuda and search.entries[candidate.name].status not in (FAILED, SKIPPED, LARGE):
                yield self._graphed(candidate, CAPTURE_S)
            return
        if not self.facts.cuda:
            yield self._rung(candidate, cost_s, "compiled")
            return
        graphed = self._graphed(candidate, cost_s)
        yield graphed
        entry = search.entries[graphed.candidate.name]
        status = entry.status
        if status == LARGE and self.facts.mode == "train":
            yield from self._uncaptured(search, candidate, CAPTURE_S)
            if candidate.scope == "blocks" and not self._is_made(search, self._recomputing(candidate)):
                yield from self._kept_less(search, candidate)
        elif status == FAILED and UNCHANGED not in entry.reason:
            yield self._rung(candidate, CAPTURE_S, "compiled")

    def _uncaptured(self, search: Climber, candidate: Candidate, cost_s: float) -> Iterator[Rung]:
        """As compiled; where that keeps too much, the same keeping half."""
        yield self._rung(candidate, cost_s, "compiled")
        if search.entries[candidate.name].status == LARGE:
            yield from self._kept_less(search, candidate)

    def _kept_less(self, search: Climber, candidate: Candidate) -> Iterator[Rung]:
        """What a compiler makes of it that keeps half: recorded, it may need no more than eager, whose gaps move."""
        if candidate.compiler == "inductor" and ACTIVATION_BUDGET not in dict(candidate.options):
            yield from self._family(search, self._recomputing(candidate), self._compile_s(candidate.scope))

    def _unrecordable(self, search: Climber) -> bool:
        """Whether the host decides inside of a step, so that nothing of it can be recorded.

        Most of what compiled blocks gain is gained together with a recording; without one torch.compile, which leaves
        more of the host out, was ahead. A detector's blocks took 13 s to make and were 0.92 of eager, torch.compile was
        1.35 and had no time left (H200).
        """
        entry = search.entries.get(PLAIN)
        return self.facts.cuda and entry is not None and entry.status == FAILED

    def _captures(self, search: Climber) -> bool:
        """Whether the model could be captured as it is: then every candidate is tried captured first."""
        entry = search.entries.get(PLAIN)
        return self.facts.cuda and entry is not None and entry.status not in (FAILED, SKIPPED, LARGE)

    def _recomputing(self, candidate: Candidate) -> Candidate:
        """The same, keeping half of the activations: the cheap half is computed again."""
        return replace(candidate, name=f"{candidate.name}, recomputing", options=((ACTIVATION_BUDGET, KEPT_FRAC),))

    def _stock(self, search: Climber) -> Iterator[Rung]:
        stock = Candidate(name=STOCK, compiler="stock")
        yield self._rung(stock, self._compile_s("model"), "compiled")
        if self.facts.cuda and search.entries[stock.name].status not in (FAILED, SKIPPED, LARGE):
            yield self._graphed(replace(stock, tries_convolutions=self._tries()), CAPTURE_S)
            yield from self._pieces(search)

    def _pieces(self, search: Climber) -> Iterator[Rung]:
        """Where a call cannot be recorded whole, since the host decides inside of it, what torch.compile records of it
        piece by piece: max-autotune does so too, and takes minutes."""
        if self.facts.mode == "infer" and search.entries[STOCK + GRAPHED].status == FAILED:
            pieces = Candidate(name="torch.compile in pieces", compiler="stock-pieces")
            yield self._rung(pieces, AGAIN_FRAC * self._compile_s("model"), "compiled")

    def _inductor(self, name: str, layout: str, scope: str) -> Candidate:
        chosen = recommended(self.kind, "inductor", self.device)
        own_dice = EAGERS_DICE if self.facts.random and self.facts.mode == "infer" else ()
        parts = self._traceable() if scope == "model" else ()
        return Candidate(name=name, rewrites=chosen, compiler="inductor", layout=layout, scope=scope, options=own_dice,
                         tries_convolutions=self._tries(), substituted=parts)  # fmt: skip

    def _traceable(self) -> tuple[str, ...]:
        """What must be put in place of before a whole model is traced: traced as they are, encoders compute other
        values in padded rows than they do by themselves."""
        wanted = self.facts.mode == "infer" and "encoders" in self.facts.substitutable
        return ("encoders",) if wanted else ()

    def _tries(self) -> bool:
        """In a graph cuDNN's choice is made once, so it may take its time; a call made anew would choose anew."""
        facts = self.facts
        tried_s = TRIED_AS_IT_IS_S * facts.num_convs if facts.mode == "train" else 0.0
        return (facts.has_conv or facts.convolves) and facts.cuda and tried_s <= TRIED_FRAC * facts.budget_s

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
        """The best that Inductor lowered so far, with products tuned where they matter, else generated kernels."""
        if not self.facts.cuda:
            return
        forecast, best = self.facts.forecast, search.best.candidate
        plain = self._blocks(layout) if self.facts.groups else self._inductor("", layout, "model")
        plain = replace(best, graphed=False) if best.compiler == "inductor" else plain
        if best.is_stock and best.compiler == "stock":  # nothing of ours was ahead of it
            plain = replace(self._inductor("", "keep", "model"), rewrites=())
        cost_s = self._compile_s(plain.scope)
        few_products = forecast is not None and forecast.matrix_frac < AUTOTUNE_LEAST_MATRIX_FRAC
        if self.facts.mode == "train":  # products of many rows are the library's, and there are three times as many
            yield from self._family(search, replace(plain, name="tuned", options=GENERATED_TUNED), 4 * cost_s)
            return
        if not few_products:
            options = _and(plain.options, _known(PRODUCTS_TUNED))
            tuned = replace(plain, name="tuned", compiler="inductor-autotune", options=options)
            yield from self._family(search, tuned, cost_s + self._tune_s())
            if self._is_made(search, tuned):
                return
        yield from self._generated(search, plain, cost_s)

    def _generated(self, search: Climber, plain: Candidate, cost_s: float) -> Iterator[Rung]:
        """Generated kernels tuned: all that is left to tune where products are few, or would take minutes."""
        few = self._kernels(plain.scope) <= MOST_WALKED_KERNELS
        options = _and(plain.options, GENERATED_TUNED if few else POINTWISE_TUNED)
        yield from self._family(search, replace(plain, name="tuned kernels", options=options), 2 * cost_s)

    def _as_tuned(self, whole: Candidate, search: Climber) -> Candidate:
        """The whole model as its blocks were best: what was tuned once is remembered."""
        best = search.best.candidate
        if best.compiler not in ("inductor", "inductor-autotune"):
            return whole
        return replace(whole, compiler=best.compiler, options=best.options, rewrites=best.rewrites)

    def _rival(self) -> Iterator[Rung]:
        """torch.compile's own tuning, for the guarantee, where there is time for it."""
        if self.facts.cuda and self.facts.mode == "infer":
            rival = Candidate(name="torch.compile max-autotune", compiler="stock-autotune")
            yield self._rung(rival, self._compile_s("model") + 2 * self._tune_s(), "compiled")

    def _at_the_floor(self, search: Climber) -> bool:
        entry = search.entries.get(search.best.candidate.name)
        if not self.facts.forecast or entry is None or entry.status not in MEASURED or not entry.measured_s:
            return False
        floor_s = self.facts.forecast.floor_s  # below it, it is the floor of work that is no longer done
        return floor_s <= entry.measured_s <= FLOOR_REACHED * floor_s

    def _compile_s(self, scope: str) -> float:
        """Seconds to compile: some anyway, some for every kernel, more for every kernel that is not like another.

        Measured on a host with a GPU: ResNet-50 21 s (404 kernels, all different), a decoding step of 32 equal layers
        36 s (1,700), eight layers of prefill 24 s (330), three others compiling beside. Where C++ is compiled, more; in
        training too: ResNet-50 44 s (813), GPT-2 medium 57 s (1,749). Training's blocks alone take less: Llama 1B's
        5.6 s (145 kernels), GPT-2's 6.8 (110), ViT-B's 4.3 (60), the four kinds of ConvNeXt 11.2 (270).
        """
        if scope == "blocks" and self.facts.mode == "train" and self.facts.cuda:
            first_s = 3.0 if self.facts.budget_s >= COMPILING_S else 6.0  # the compiler is imported with the first
            return self.scale * (first_s + 0.03 * self._kernels("blocks"))
        first_s, each_s, unlike_s = (6.0, 0.015, 0.03) if self.facts.cuda else (6.0, 0.02, 0.06)
        each_s *= 5 / 3 if self.facts.mode == "train" else 1
        many_s = first_s + each_s * self._kernels(scope) + unlike_s * self._kernels("blocks")
        if self.facts.mode == "train" or not self.facts.cuda:
            return self.scale * many_s
        few_s = FEW_S + FEW_KERNEL_S * self._kernels(scope) + self.import_s
        return self.scale * min(many_s, few_s)

    def _whole_s(self) -> float:
        """Seconds to compile the whole model with a backend of ours: a trace of all, and equal blocks once."""
        if not self.facts.groups:
            return (AGAIN_FRAC if self.stock_made and self.facts.mode == "infer" else 1.0) * self._compile_s("model")
        return min(self._compile_s("model"), self._trace_s("model") + self._compile_s("blocks"))

    def _tune_s(self) -> float:
        """Seconds to try the ways to compute every product."""
        return self.facts.num_products * TUNE_CPU_S / self.facts.num_threads

    def _kernels(self, scope: str) -> float:
        """Kernels that a compiler sees: of equal blocks those of one."""
        return self.facts.num_kernels * (self.facts.unlike_frac if scope == "blocks" else 1.0)

    def _trace_s(self, scope: str) -> float:
        if self.facts.mode == "train":  # kernels of a step, of which a tracer sees the forward's
            return TRACE_S + TRACE_KERNEL_S * self._kernels(scope)
        raced_s = RACED_KERNEL_S if self.facts.convolves else 0.0
        return TRACE_S + (TRACE_KERNEL_S + raced_s) * self._kernels(scope)

    def _graphed(self, candidate: Candidate, cost_s: float) -> Rung:
        execution = "compiled" if candidate.compiles else "cudagraph"
        recorded = replace(candidate, graphed=self.facts.cuda, guesses=self.guesses and self.facts.cuda)
        return self._rung(self._named(recorded), cost_s, execution)

    def _named(self, candidate: Candidate) -> Candidate:
        return replace(candidate, name=candidate.name + GRAPHED) if candidate.graphed else candidate

    def _rung(self, candidate: Candidate, cost_s: float, execution: str) -> Rung:
        forecast: Any = self.facts.forecast
        predicted_s = forecast.expected_s.get(execution) if forecast else None
        if self.facts.unmasked and not candidate.compiler.startswith("stock"):
            candidate = replace(candidate, unmasked=True)
        return Rung(candidate, cost_s, predicted_s)


def _and(options: tuple[tuple[str, Any], ...], more: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    """Options and more of them, which count where both name one: eager's dice stay eager's."""
    return tuple({**dict(options), **dict(more)}.items())


def _known(options: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    """Those that this release of Inductor has."""
    from torch._inductor import config

    return tuple((name, value) for name, value in options if name in config._config)  # type: ignore[attr-defined]
