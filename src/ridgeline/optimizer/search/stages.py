"""What each stage of a search proposes; ``order.py`` lists the stages and the conditions under which they run."""

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

GENERATED_TUNED = (("coordinate_descent_tuning", True), ("max_autotune_pointwise", True))
"""Inductor benchmarks more launch configurations of the kernels that it generates."""
POINTWISE_TUNED = (("max_autotune_pointwise", True),)
"""The same without coordinate descent, which compiles one configuration at a time: affordable for whole networks."""
ROWS_HELD = (("triton.multi_kernel", 1),)
"""Inductor makes a second version of its reductions that holds a row in registers, and benchmarks both when first run.
By default it does so up to 1,024 elements; DiT's norms (1,152) and Whisper's (1,280) reread their rows: 1.8 of 15
ms, and 3.9 ms where our kernels take 1.9 (H200)."""
OWN_CONVOLUTIONS = ("convolution-chain",)
"""Rewrites that replace cuDNN's convolutions, whose layouts Inductor propagates."""
WAITS = "the host waits for a value"
"""The reason of a capture that failed because of a device-to-host copy."""


def few_kernels(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """torch.compile first, then our rewrites, then both together; captured where host time matters.

    torch.compile takes a second or two for so small a model, and the guarantee depends on it; kernels of ours take
    longer to compile and autotune. A captured call copies its inputs, which costs more than it gains for large ones.
    """
    facts = make.facts
    copies_little = facts.copies_s <= 0.02 * facts.eager_s
    # Calls much longer than a few launches take gain nothing from a capture.
    host_shows = facts.eager_s < 20 * 3e-4 or facts.host_s > 0.3 * facts.eager_s  # recurrent layers launch thousands
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
        # cuDNN's convolutions, their algorithms chosen by timing, as Inductor lays them out; the weights stay.
        library = tuple(name for name in whole.rewrites if name not in OWN_CONVOLUTIONS)
        timed = replace(whole, name="compiled, convolutions timed", rewrites=library,
                        options=(*whole.options, ("timed_convolutions", True)))  # fmt: skip
        yield make.proposal(timed, make.prices.compile_s("model"), "compiled")
    entry = search.entries[whole.name]
    if search.best.candidate.name == STOCK and (entry.rewrites or entry.status not in MEASURED):
        yield make.proposal(replace(whole, name=AS_IT_IS, rewrites=()), CAPTURE_S, "compiled")
    # Tuning a few kernels takes about three times their compilation: 4.1 and 0.7 s, 3.9 and 1.3, 17.7 and 5.1.
    tuned = replace(whole, name="tuned", options=(*whole.options, *GENERATED_TUNED))
    yield make.proposal(tuned, 3.0 * make.prices.compile_s("model"), "compiled")


def as_it_is(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """Capture the model's own kernels.

    Where the host waits for a value (the longest of some lengths, whether a mask hides anything), the value is guessed
    to be unchanged, here and in all later captures; every replay compares.
    """
    plain = Candidate(name=PLAIN, graphed=True, tries_convolutions=make.tries())
    yield make.proposal(plain, CAPTURE_S, "cudagraph")
    entry = search.entries.get(PLAIN)
    if make.facts.mode == "infer" and entry is not None and entry.status == FAILED and WAITS in entry.reason:
        make.guesses = True
        yield make.proposal(replace(plain, name=f"{PLAIN}, guessing", guesses=True), CAPTURE_S, "cudagraph")


def channels_last(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """Convolution weights channels last. In training three of cuDNN's algorithms are timed per pass: ResNet-18 took
    6.3 s (20 convolutions), EfficientNet-B0 32 (81), MobileNetV3 28 (52), depthwise ones the longest."""
    last = Candidate(name="channels last", layout="channels_last", tries_convolutions=make.tries())
    tried_s = 0.4 * make.facts.num_convs if make.facts.mode == "train" else 0.0
    if make.facts.mode == "train" and make.cannot_capture(search):  # then it cannot be captured in this layout either
        yield make.proposal(last, CAPTURE_S + tried_s, "eager")
    else:
        yield make.graphed(last, CAPTURE_S + tried_s)


def choose_layout(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """Choose the faster layout, or channels last if only the rewrites' GroupNorm allows it."""
    facts = make.facts
    wanted = facts.groups_channels and facts.has_conv and facts.mode == "infer" and facts.cuda
    make.layout = "channels_last" if wanted else search.best.candidate.layout
    yield from ()


def rewrites_as_laid(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """All rewrites without a compiler, in the model's own layout."""
    yield from make.rewritten(search)


def rewrites_of_all(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """All rewrites without a compiler, in the faster layout."""
    yield from make.rewritten(search, make.layout)


def kernels(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """Kernels of ours in parts of the model, without tracing."""
    yield from make.kernels_in_place(search)


def rewritten_blocks(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """Repeated blocks rewritten once, without a compiler."""
    yield from make.rewritten_blocks(search, make.layout)


def compiled_blocks(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """Repeated blocks compiled once: most of the gain of compiling the whole in a fraction of its time."""
    yield from make.family(search, make.blocks(make.layout), make.prices.compile_s("blocks"))
    yield from make.with_experts(search, make.blocks(make.layout), make.prices.compile_s("blocks"))


def rows_in_registers(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """Compiled blocks whose norms hold their rows in registers."""
    blocks = make.blocks(make.layout)
    held = replace(blocks, name=f"{blocks.name}, rows held", options=(*blocks.options, *_known(ROWS_HELD)))
    yield from make.family(search, held, make.prices.compile_s("blocks"))


def compiled_whole(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """The whole compiled with rewrites; in training, once torch.compile is measured, only if a rewrite matches."""
    facts, whole = make.facts, make.whole()
    if facts.mode == "train" and not facts.groups and search.entries[STOCK].status in MEASURED:
        whole = replace(whole, options=(("matched", True),))
    yield from make.family(search, whole, make.prices.whole_s())
    yield from make.with_experts(search, whole, make.prices.whole_s())


def whole_with_its_head(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """The whole compiled before its blocks, if a training step spends much of its time in a vocabulary's head."""
    yield from make.family(search, make.whole(), make.prices.whole_s())


def whole_as_its_blocks(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """The whole compiled with the options that were best for its blocks."""
    yield from make.family(search, make.as_tuned(make.whole(), search), make.prices.whole_s())


def torch_compile(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """torch.compile with default settings, captured as a whole, or if that fails by its reduce-overhead mode."""
    stock = Candidate(name=STOCK, compiler="stock")
    yield make.proposal(stock, make.prices.compile_s("model"), "compiled")
    if make.facts.cuda and search.entries[stock.name].status not in (FAILED, SKIPPED, LARGE):
        yield make.graphed(replace(stock, tries_convolutions=make.tries()), CAPTURE_S)
        if make.facts.mode == "infer" and search.entries[STOCK + GRAPHED].status == FAILED:
            pieces = Candidate(name="torch.compile in pieces", compiler="stock-pieces")
            yield make.proposal(pieces, AGAIN_FRAC * make.prices.compile_s("model"), "compiled")


def without_kernels(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """The whole without kernels of ours, if with them it is behind torch.compile: they end Inductor's fusions.

    A diffusion network's GroupNorm kernels made it 0.82 times as fast, and hid the gain of its fused attention, which
    Inductor does not recognize (H200).
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
    """The best so far without one rewrite at a time, up to three, if it is compiled with several.

    Rewrites with a kernel of ours come first: they end a compiler's fusions, and may cost more than they gain.
    """
    tried: set[str] = set()
    while len(tried) < 3:
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
    """The best that Inductor lowered so far with tuned GEMMs if they matter, else with tuned generated kernels."""
    layout = make.layout
    forecast, best = make.facts.forecast, search.best.candidate
    plain = make.blocks(layout) if make.facts.groups else make.inductor("", layout, "model")
    plain = replace(best, graphed=False) if best.compiler == "inductor" else plain
    if best.is_stock and best.compiler == "stock":  # nothing of ours was ahead of it
        plain = replace(make.inductor("", "keep", "model"), rewrites=())
    cost_s = make.prices.compile_s(plain.scope)
    few_products = forecast is not None and forecast.matrix_frac < 0.3
    if make.facts.mode == "train":  # GEMMs of many rows are cuBLAS's, and there are three times as many
        yield from make.family(search, replace(plain, name="tuned", options=GENERATED_TUNED), 4 * cost_s)
        return
    if not few_products:
        # GEMMs alone, benchmarked in parallel processes: coordinate descent compiles one configuration at a time.
        products_tuned = (("coordinate_descent_tuning", False), ("triton.enable_persistent_tma_matmul", True))
        options = _and(plain.options, _known(products_tuned))
        products = replace(plain, name="tuned", compiler="inductor-autotune", options=options)
        yield from make.family(search, products, cost_s + make.prices.tune_s())
        if make.is_made(search, products):
            return
    # Generated kernels are all that is left to tune if GEMMs are few, or would take minutes.
    few = make.prices.kernels(plain.scope) <= 60
    options = _and(plain.options, GENERATED_TUNED if few else POINTWISE_TUNED)
    yield from make.family(search, replace(plain, name="tuned kernels", options=options), 2 * cost_s)


def max_autotune(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """torch.compile with its own tuning, for the guarantee, if there is time for it."""
    rival = Candidate(name="torch.compile max-autotune", compiler="stock-autotune")
    yield make.proposal(rival, make.prices.compile_s("model") + 2 * make.prices.tune_s(), "compiled")


def fewer_bits(
    make: Proposals, search: Progress, name: str, narrow: tuple[tuple[str, str], ...]
) -> Iterator[Proposal]:
    """Quantized layers with rewrites; and lowered by Inductor, if the best so far is."""
    rewritten = (*recommended(make.kind, "none", make.device), "narrow")
    plain = Candidate(name=name, rewrites=rewritten, narrow=narrow)
    yield from make.family(search, plain, make.prices.trace_s("model"))
    if search.best.candidate.compiler != "none" and not search.best.candidate.narrow:
        whole = make.inductor(f"{name}, compiled", search.best.candidate.layout, "model")
        lowered = replace(whole, rewrites=(*whole.rewrites, "narrow"), narrow=narrow)
        yield from make.family(search, lowered, make.prices.compile_s("model"))


def _and(options: tuple[tuple[str, Any], ...], more: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    """Merge options; the later ones win."""
    return tuple({**dict(options), **dict(more)}.items())


def _known(options: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    """The options that this release of Inductor has."""
    from torch._inductor import config

    return tuple((name, value) for name, value in options if name in config._config)  # type: ignore[attr-defined]


def nothing(make: Proposals, search: Progress) -> Iterator[Proposal]:
    """Propose nothing: the stage only checks whether the floor is reached."""
    yield from ()
