"""What each stage of a search proposes; ``order.py`` has the stages in their order, and why one is left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ridgeline.optimizer.receipt import FAILED, LARGE, MEASURED, SKIPPED
from ridgeline.optimizer.rewrites import recommended, rewrites
from ridgeline.optimizer.search.candidate import Candidate
from ridgeline.optimizer.search.facts import AS_IT_IS, GRAPHED, PLAIN, STOCK, Progress, Proposal
from ridgeline.optimizer.search.prices import AGAIN_FRAC, CAPTURE_S
from ridgeline.optimizer.search.proposals import Proposals

AUTOTUNE_LEAST_MATRIX_FRAC = 0.3
"""Tuning products pays where they are at least this share of the time."""
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
OWN_CONVOLUTIONS = ("convolution-chain",)
"""Rewrites that take convolutions away from Inductor, which lays out what surrounds cuDNN's as they want it."""
TRIED_S = 0.4
"""Seconds to try three of cuDNN's algorithms for each pass of a convolution in training, laid channels last: ResNet-18
took 6.3 s (20 of them), EfficientNet-B0 32 (81), MobileNetV3 28 (52), depthwise ones the longest."""
TUNED_TIMES = 3.0
"""A few kernels tuned take this many times what they take to compile: 4.1 and 0.7 s, 3.9 and 1.3, 17.7 and 5.1."""
MOST_ABLATIONS = 3
MOST_COPIED_FRAC = 0.02
HOST_S = 3e-4
"""Calls much longer than what the host needs for a few launches gain nothing from being recorded."""
HOST_FRAC = 0.3
"""Longer ones do where the host is busy for this share of them: recurrent layers start thousands of kernels."""
WAITS = "the host waits for a value"
"""What a recording says that failed for this."""


def few_kernels(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """Few kernels: torch.compile first, then our own, then both together; recorded where the host shows.

    torch.compile takes a second or two of what is this small, and the guarantee rests on it: kernels of ours are
    compiled and raced for longer, and would use up a short budget before it. A recorded call copies what lies
    elsewhere: large inputs of short calls are better read where they are.
    """
    facts = make.facts
    copies_little = facts.copies_s <= MOST_COPIED_FRAC * facts.eager_s
    host_shows = facts.eager_s < 20 * HOST_S or facts.host_s > HOST_FRAC * facts.eager_s
    records = facts.cuda and copies_little and host_shows
    if records:
        plain = Candidate(name=PLAIN, graphed=True, tries_convolutions=make.tries())
        yield make.proposal(plain, CAPTURE_S, "cudagraph")
    chosen = recommended(make.kind, "none", make.device)
    whole = replace(make.inductor("compiled", "keep", "model"), tries_convolutions=False, straight=True)
    rewritten = Candidate(name="rewrites", rewrites=chosen, straight=True, substituted=make.traceable())
    for candidate in (Candidate(name=STOCK, compiler="stock"), rewritten, whole):
        compiled_s = make.prices.compile_s("model") if candidate.compiler == "stock" else make.prices.whole_s()
        cost_s = make.prices.trace_s("model") if candidate.compiler == "none" else compiled_s
        yield make.proposal(candidate, cost_s, "compiled")
        entry = search.entries[candidate.name]
        changed = candidate.compiler != "none" or bool(entry.rewrites)
        if records and changed and entry.status not in (FAILED, SKIPPED):
            yield make.graphed(candidate, CAPTURE_S)
    if facts.convolves:
        # cuDNN's convolutions where Inductor wants them, their algorithms chosen by timing. Inductor lays channels last
        # by itself; the model's own weights stay as they are.
        library = tuple(name for name in whole.rewrites if name not in OWN_CONVOLUTIONS)
        timed = replace(whole, name="compiled, convolutions timed", rewrites=library,
                        options=(*whole.options, ("timed_convolutions", True)))  # fmt: skip
        yield make.proposal(timed, make.prices.compile_s("model"), "compiled")
    entry = search.entries[whole.name]
    if search.best.candidate.name == STOCK and (entry.rewrites or entry.status not in MEASURED):
        yield make.proposal(replace(whole, name=AS_IT_IS, rewrites=()), CAPTURE_S, "compiled")
    tuned = replace(whole, name="tuned", options=(*whole.options, *GENERATED_TUNED))
    yield make.proposal(tuned, TUNED_TIMES * make.prices.compile_s("model"), "compiled")


def as_it_is(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """The model's own kernels, captured.

    Where the host waits for a value (the longest of some lengths, whether a mask hides anything), the value is guessed
    to be what it was, here and in all captures that follow; every replay compares.
    """
    plain = Candidate(name=PLAIN, graphed=True, tries_convolutions=make.tries())
    yield make.proposal(plain, CAPTURE_S, "cudagraph")
    entry = search.entries.get(PLAIN)
    if make.facts.mode == "infer" and entry is not None and entry.status == FAILED and WAITS in entry.reason:
        make.guesses = True
        yield make.proposal(replace(plain, name=f"{PLAIN}, guessing", guesses=True), CAPTURE_S, "cudagraph")


def channels_last(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """Convolution weights channels last; in training with the seconds that cuDNN's algorithms are tried for."""
    last = Candidate(name="channels last", layout="channels_last", tries_convolutions=make.tries())
    tried_s = TRIED_S * make.facts.num_convs if make.facts.mode == "train" else 0.0
    if make.facts.mode == "train" and make.is_unrecordable(search):  # the same code cannot be captured laid otherwise
        yield make.proposal(last, CAPTURE_S + tried_s, "eager")
    else:
        yield make.graphed(last, CAPTURE_S + tried_s)


def choose_layout(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """The layout that was faster; channels last where only rewrites make it so."""
    facts = make.facts
    wanted = facts.groups_channels and facts.has_conv and facts.mode == "infer" and facts.cuda
    make.layout = "channels_last" if wanted else search.best.candidate.layout
    yield from ()


def rewrites_as_laid(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """All rewrites for this device, without a compiler, in the model's own layout."""
    yield from make.rewritten(search)


def rewrites_of_all(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """All rewrites for this device, without a compiler, in the layout that was faster."""
    yield from make.rewritten(search, make.layout)


def kernels(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """Kernels in place of parts of the model, without a trace."""
    yield from make.kernels_in_place(search)


def rewritten_blocks(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """Repeated blocks rewritten once, without a compiler."""
    yield from make.rewritten_blocks(search, make.layout)


def compiled_blocks(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """Repeated blocks compiled once: most of what compiling the whole brings, for a fraction of its time."""
    yield from make.family(search, make.blocks(make.layout), make.prices.compile_s("blocks"))
    yield from make.with_experts(search, make.blocks(make.layout), make.prices.compile_s("blocks"))


def rows_in_registers(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """Compiled blocks with the rows of norms held in registers."""
    blocks = make.blocks(make.layout)
    held = replace(blocks, name=f"{blocks.name}, rows held", options=(*blocks.options, *_known(ROWS_HELD)))
    yield from make.family(search, held, make.prices.compile_s("blocks"))


def compiled_whole(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """The whole compiled with rewrites; in training beside a measured torch.compile only what matches is news."""
    facts, whole = make.facts, make.whole()
    if facts.mode == "train" and not facts.groups and search.entries[STOCK].status in MEASURED:
        whole = replace(whole, options=(("matched", True),))
    yield from make.family(search, whole, make.prices.whole_s())
    yield from make.with_experts(search, whole, make.prices.whole_s())


def whole_with_its_head(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """The whole compiled before its blocks, where a training step spends much of its time in a vocabulary's head."""
    yield from make.family(search, make.whole(), make.prices.whole_s())


def whole_as_its_blocks(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """The whole compiled as its blocks were best."""
    yield from make.family(search, make.as_tuned(make.whole(), search), make.prices.whole_s())


def torch_compile(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """torch.compile as anyone gets it, captured as a whole; else in pieces, as its own mode records them."""
    stock = Candidate(name=STOCK, compiler="stock")
    yield make.proposal(stock, make.prices.compile_s("model"), "compiled")
    if make.facts.cuda and search.entries[stock.name].status not in (FAILED, SKIPPED, LARGE):
        yield make.graphed(replace(stock, tries_convolutions=make.tries()), CAPTURE_S)
        if make.facts.mode == "infer" and search.entries[STOCK + GRAPHED].status == FAILED:
            pieces = Candidate(name="torch.compile in pieces", compiler="stock-pieces")
            yield make.proposal(pieces, AGAIN_FRAC * make.prices.compile_s("model"), "compiled")


def without_kernels(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """The whole without kernels of ours, where with them it is behind torch.compile: they end Inductor's fusions.

    A diffusion network's norms over groups took 0.82 of its pace, and its attention, which Inductor leaves written
    out, was lost with them (H200).
    """
    whole = make.whole()
    names = (whole.name + GRAPHED, whole.name)
    entry = next((search.entries[name] for name in names if name in search.entries), None)
    if entry is None or entry.status not in MEASURED or not search.best.candidate.is_stock:
        return
    kept = tuple(name for name in whole.rewrites if not rewrites()[name].needs_kernels)
    brings = [name for name in entry.rewrites if name in kept and rewrites()[name].exact != "bits"]
    if brings and any(name not in kept for name in entry.rewrites):
        plainer = replace(make.inductor("compiled, no kernels of ours", "keep", "model"), rewrites=kept)
        yield from make.family(search, plainer, make.prices.whole_s())


def _ablations(make: Proposals, search: Progress, scope: str) -> Iterator[Proposal]:
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
        yield make.proposal(make.named(fewer), make.prices.compile_s(scope), "compiled")


def ablated_blocks(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """Compiled blocks without one rewrite at a time."""
    yield from _ablations(make, search, "blocks")


def ablated_whole(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """The compiled whole without one rewrite at a time."""
    yield from _ablations(make, search, "model")


def tuned(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """The best that Inductor lowered so far, with products tuned where they matter, else generated kernels."""
    layout = make.layout
    forecast, best = make.facts.forecast, search.best.candidate
    plain = make.blocks(layout) if make.facts.groups else make.inductor("", layout, "model")
    plain = replace(best, graphed=False) if best.compiler == "inductor" else plain
    if best.is_stock and best.compiler == "stock":  # nothing of ours was ahead of it
        plain = replace(make.inductor("", "keep", "model"), rewrites=())
    cost_s = make.prices.compile_s(plain.scope)
    few_products = forecast is not None and forecast.matrix_frac < AUTOTUNE_LEAST_MATRIX_FRAC
    if make.facts.mode == "train":  # products of many rows are the library's, and there are three times as many
        yield from make.family(search, replace(plain, name="tuned", options=GENERATED_TUNED), 4 * cost_s)
        return
    if not few_products:
        options = _and(plain.options, _known(PRODUCTS_TUNED))
        products = replace(plain, name="tuned", compiler="inductor-autotune", options=options)
        yield from make.family(search, products, cost_s + make.prices.tune_s())
        if make.is_made(search, products):
            return
    # Generated kernels: all that is left to tune where products are few, or would take minutes.
    few = make.prices.kernels(plain.scope) <= MOST_WALKED_KERNELS
    options = _and(plain.options, GENERATED_TUNED if few else POINTWISE_TUNED)
    yield from make.family(search, replace(plain, name="tuned kernels", options=options), 2 * cost_s)


def max_autotune(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """torch.compile's own tuning, for the guarantee, where there is time for it."""
    rival = Candidate(name="torch.compile max-autotune", compiler="stock-autotune")
    yield make.proposal(rival, make.prices.compile_s("model") + 2 * make.prices.tune_s(), "compiled")


def fewer_bits(
    make: Proposals, search: Progress, name: str, narrow: tuple[tuple[str, str], ...]
) -> Iterator[Proposal]:
    """Layers in fewer bits, rewritten; and lowered by Inductor, where the best so far is."""
    rewritten = (*recommended(make.kind, "none", make.device), "narrow")
    plain = Candidate(name=name, rewrites=rewritten, narrow=narrow)
    yield from make.family(search, plain, make.prices.trace_s("model"))
    if search.best.candidate.compiler != "none" and not search.best.candidate.narrow:
        whole = make.inductor(f"{name}, compiled", search.best.candidate.layout, "model")
        lowered = replace(whole, rewrites=(*whole.rewrites, "narrow"), narrow=narrow)
        yield from make.family(search, lowered, make.prices.compile_s("model"))


def _and(options: tuple[tuple[str, Any], ...], more: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    """Options and more of them, which count where both name one: eager's dice stay eager's."""
    return tuple({**dict(options), **dict(more)}.items())


def _known(options: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    """Those that this release of Inductor has."""
    from torch._inductor import config

    return tuple((name, value) for name, value in options if name in config._config)  # type: ignore[attr-defined]


def nothing(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """A stage that only looks at what was found."""
    yield from ()
