"""The stages of a search in their order, with the condition of each and its expected gain per second.

A stage proposes candidates (``stages.py``); the search builds, times and proves each before it asks for the next, so
that later stages depend on earlier results. Skipped stages are recorded with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ridgeline.optimizer.search import stages as propose
from ridgeline.optimizer.search.candidate import Candidate
from ridgeline.optimizer.search.facts import DEFAULT_BUDGET_S, GRAPHED, STOCK, Facts, Progress, Proposal
from ridgeline.optimizer.search.proposals import Proposals

Reason = Callable[[Proposals, Progress], str]


@dataclass(frozen=True, slots=True)
class Stage:
    """A named stage of a search. ``skip`` returns the reason to skip it, or an empty string.

    ``saved_frac`` is the share of eager's time that its candidates save (median of the recorded searches), ``price``
    the seconds that the first takes to build: within short budgets, stages with both are sorted by their ratio.
    """

    name: str
    propose: Callable[[Proposals, Progress], Iterator[Proposal]]
    skip: Reason = lambda make, search: ""
    saved_frac: float = 0.0
    price: Callable[[Proposals], float] | None = None


def unless(reason: str, applies: Callable[[Proposals], bool]) -> Reason:
    """Skip a stage for this reason unless the predicate holds."""
    return lambda make, search: "" if applies(make) else reason


def _compiled_whole(make: Proposals, search: Progress) -> str:
    name = make.whole().name
    return "was tried before" if search.entries.keys() & {name, name + GRAPHED} else ""


def _rewrites_beside_blocks(make: Proposals, search: Progress) -> str:
    facts = make.facts
    if not facts.groups:
        return "no block repeats"
    if make.blocks_failed(search):
        return ""
    # Swin's layers on large images are outside of blocks, as are wav2vec2's first and largest layers: a quick trace of
    # the whole may win.
    quick = make.prices.trace_s("model") <= 0.15 * facts.budget_s
    return "" if facts.mode == "infer" and (facts.grouped_frac < 0.9 or quick) else "blocks are nearly all of the model"


def _whole_of_blocks(make: Proposals, search: Progress) -> str:
    if not make.facts.groups:
        return "no block repeats"
    if make.is_at_the_floor(search):
        return "the best so far is at its floor"
    return "was tried before" if make.is_made(search, make.whole()) else ""


def _torch_compile(make: Proposals, search: Progress) -> str:
    return "was tried before" if STOCK in search.entries else ""


def _torch_compile_early(make: Proposals, search: Progress) -> str:
    if not make.facts.groups:
        return "no block repeats"
    return "" if make.cannot_capture(search) else "the step can be captured"


def _compiled_blocks(make: Proposals, search: Progress) -> str:
    if not make.facts.groups:
        return "no block repeats"
    return "the whole was compiled" if make.is_measured(search, make.whole()) else ""


def _rewritten_blocks(make: Proposals, search: Progress) -> str:
    if not make.facts.groups:
        return "no block repeats"
    training = make.facts.mode == "train"
    return "" if training or not make.is_measured(search, Candidate(name="rewrites")) else "the whole was rewritten"


def _head_fits(make: Proposals) -> bool:
    # Whisper's whole step took 21 s of 55 to compile and exceeded eager's memory: nothing was left for its blocks.
    both_s = make.prices.whole_s() + make.prices.compile_s("blocks")
    return bool(make.facts.groups) and make.facts.headed and both_s <= 0.5 * make.facts.budget_s


BLOCKS = unless("no block repeats", lambda make: bool(make.facts.groups))
NO_BLOCKS = unless("blocks repeat", lambda make: not make.facts.groups)
ON_DEVICE = unless("no CUDA device", lambda make: make.facts.cuda)
FLOOR = "the floor"

FIRST = (
    # A decoding step has many small GEMMs, and a host has no CUDA graphs: rewrites gain the most.
    Stage("rewrites, first", propose.rewrites_as_laid, unless(
        "kernels are captured first", lambda m: (m.facts.has_cache and not m.facts.groups) or not m.facts.cuda)),
    # A loop over steps takes as long to capture as it takes to run.
    Stage("kernels in place of scans", propose.kernels, unless("no scan", lambda m: m.scans())),
    Stage("captured as it is", propose.as_it_is, unless(
        "no CUDA device, or a scan", lambda m: m.facts.cuda and not m.scans())),
    Stage("channels last", propose.channels_last, unless("no convolution to lay", lambda m: m.facts.has_conv)),
    Stage("choose a layout", propose.choose_layout),
)  # fmt: skip

INFERENCE = (
    *FIRST,
    Stage("torch.compile, in a short budget", propose.torch_compile, unless(
        "blocks repeat, or the budget is long", lambda m: m.is_hasty())),
    # Takes seconds, and brings most of what a compiler would bring to a network of convolutions.
    Stage("rewrites of convolutions", propose.rewrites_of_all, unless(
        "no convolutions, or blocks repeat", lambda m: m.facts.has_conv and not m.facts.groups)),
    # The fastest candidate of every decoding step measured, which short budgets must reach.
    Stage("rewrites of a decoding step", propose.rewrites_as_laid, unless("no decoding step", lambda m: m.decodes())),
    Stage("rewritten blocks", propose.rewritten_blocks, _rewritten_blocks, 0.47, lambda m: m.prices.trace_s("blocks")),
    Stage("compiled blocks", propose.compiled_blocks, _compiled_blocks, 0.65, lambda m: m.prices.compile_s("blocks")),
    # A decoding step has few rows to reread.
    Stage("compiled blocks, rows in registers", propose.rows_in_registers, unless("no long rows in blocks", lambda m: (
        bool(m.facts.groups) and m.facts.long_rows and not m.facts.has_cache and m.facts.cuda))),
    Stage("rewrites beside blocks", propose.rewrites_of_all, _rewrites_beside_blocks, 0.52,
          lambda m: m.prices.trace_s("model")),
    Stage("kernels in place", propose.kernels, unless("tried before", lambda m: not m.scans()), 0.48, lambda m: 1.1),
    Stage(FLOOR, propose.nothing),
    Stage("compiled whole", propose.compiled_whole,
          lambda m, s: "blocks repeat" if m.facts.groups else _compiled_whole(m, s)),
    # The reserve for torch.compile is kept.
    Stage("compiled whole, of which blocks are a part", propose.whole_as_its_blocks, unless(
        "blocks are nearly all of the model", lambda m: bool(m.facts.groups) and m.facts.grouped_frac < 0.9)),
    Stage(STOCK, propose.torch_compile, _torch_compile),
    Stage("compiled whole, of blocks", propose.whole_as_its_blocks, _whole_of_blocks),
    Stage("compiled whole without kernels of ours", propose.without_kernels),
    # Rewrites across blocks, also for what was compiled before.
    Stage("rewrites of all", propose.rewrites_of_all, unless("tried before, or a decoding step", lambda m: not (
        m.facts.has_conv and not m.facts.groups) and not m.facts.has_cache)),
    Stage("tuned", propose.tuned, ON_DEVICE),  # takes minutes, unpredictably: after everything the guarantee needs
    Stage("blocks without one rewrite", propose.ablated_blocks),
    Stage("the whole without one rewrite", propose.ablated_whole),
    Stage("torch.compile's own tuning", propose.max_autotune, ON_DEVICE),
)  # fmt: skip

TRAINING = (
    *FIRST,
    # Takes seconds and one trace, which compiled candidates reuse.
    Stage("kernels in place of parts", propose.kernels, NO_BLOCKS),
    Stage("rewrites of the whole", propose.rewrites_of_all, NO_BLOCKS),
    Stage("torch.compile, where steps cannot be captured", propose.torch_compile, _torch_compile_early),
    Stage("compiled whole with its head", propose.whole_with_its_head, unless("no large head", _head_fits)),
    # Before rewritten blocks, so that a short budget reaches them: they were faster in every step measured.
    Stage("compiled blocks", propose.compiled_blocks, _compiled_blocks),
    Stage("rewritten blocks", propose.rewritten_blocks, _rewritten_blocks),
    Stage("rewrites beside blocks", propose.rewrites_of_all, _rewrites_beside_blocks),
    Stage("kernels in place", propose.kernels, BLOCKS),  # rewritten blocks were faster in all steps measured
    Stage(FLOOR, propose.nothing),
    # The backward doubles compile times: torch.compile is measured before other compiled candidates.
    Stage(STOCK, propose.torch_compile, _torch_compile),
    Stage("compiled whole", propose.compiled_whole, _compiled_whole),
    Stage("blocks without one rewrite, first", propose.ablated_blocks),
    Stage("rewrites of all", propose.rewrites_of_all, unless(
        "blocks repeat, or a cache", lambda m: not m.facts.groups and not m.facts.has_cache)),
    Stage("tuned", propose.tuned, ON_DEVICE),
    Stage("blocks without one rewrite", propose.ablated_blocks),
    Stage("the whole without one rewrite", propose.ablated_whole),
)  # fmt: skip


class Stages:
    """Runs the stages of one search, and records which were skipped and why."""

    def __init__(self, facts: Facts) -> None:
        self.facts, self.make = facts, Proposals(facts)
        self.skipped: list[tuple[str, str]] = []

    def proposals(self, search: Progress) -> Iterator[Proposal]:
        """Candidates in the order in which they are tried."""
        at_floor = False
        for stage in self.order():
            reason = stage.skip(self.make, search)
            if at_floor and stage.name != STOCK:
                reason = "the best so far is at its floor"
            if reason:
                self.skipped.append((stage.name, reason))
                continue
            at_floor = at_floor or (stage.name == FLOOR and self.make.is_at_the_floor(search))
            yield from stage.propose(self.make, search)

    def order(self) -> Sequence[Stage]:
        """The stages for this model; within a short budget those with a known gain are sorted by gain per second."""
        facts = self.facts
        if self.is_short:
            return (Stage("a function of few kernels", propose.few_kernels),)
        stages = list(INFERENCE if facts.mode == "infer" else TRAINING)
        if facts.mode == "infer" and facts.groups and facts.cuda and facts.budget_s < DEFAULT_BUDGET_S:
            known = [i for i, stage in enumerate(stages) if stage.price is not None]
            gain = {i: stages[i].saved_frac / max(0.1, stages[i].price(self.make)) for i in known}  # type: ignore[misc]
            best = [stages[i] for i in sorted(known, key=lambda i: -gain[i])]
            for i, stage in zip(known, best, strict=True):
                stages[i] = stage
        return stages

    @property
    def is_short(self) -> bool:
        """Whether there is only one op and its surroundings to compile."""
        return self.make.is_short

    def fewer_bits(self, search: Progress, name: str, narrow: tuple[tuple[str, str], ...]) -> Iterator[Proposal]:
        """Quantized layers: the last stage, after everything that costs no accuracy."""
        return propose.fewer_bits(self.make, search, name, narrow)
