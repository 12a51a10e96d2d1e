"""Prepares a search: times eager, finds out whether it is random and what memory it needs, and collects the facts."""

from __future__ import annotations

import contextlib
import os
import sys
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import nn

from ridgeline.engine.capture.probe import asking
from ridgeline.engine.example_inputs import RandomState, leaves
from ridgeline.engine.shallow_clone import shallow_clone
from ridgeline.optimizer.in_place.channels_last import channels_last_layers
from ridgeline.optimizer.receipt import (
    WINNER,
    Step,
)
from ridgeline.optimizer.search.blocks import (
    grouped_frac,
    groups,
    has_head,
    has_long_rows,
    is_checkpointed,
    num_products,
    unlike_frac,
)
from ridgeline.optimizer.search.facts import (
    IMPORTS_S,
    Facts,
)
from ridgeline.optimizer.search.forecast import forecast, known_device
from ridgeline.optimizer.search.problem import device_name
from ridgeline.optimizer.search.redundant_arguments import simplified
from ridgeline.optimizer.search.timing import compare, held_bytes, reserved_bytes

if TYPE_CHECKING:
    from ridgeline.optimizer.search.search import Search


TRACER = "torch._dynamo"
UNPRICED = "not priced: what is left of the budget is for candidates"


def prepare(search: Search) -> None:
    problem = search.problem
    random = RandomState()
    search.eager_s = search.track.settle(problem.model)
    search.random = draws_random(search, random) and results_vary(search, random)
    search.memory.base_bytes, search.memory.base_reserved = held_bytes(problem.device), reserved_bytes(problem.device)
    extra = search.track.extra_bytes(problem.model)
    search.memory.eager_bytes = None if extra is None else search.memory.base_bytes + extra
    search.memory.eager_reserved = search.track.reserved_bytes(problem.model)
    if search.memory.limit_bytes is None and problem.mode == "train":
        search.memory.limit_bytes = search.memory.eager_bytes
    timed = search.track.race({"eager": search.eager}, search.budget.race_s())["eager"]
    search.eager_s = timed.median_s
    even = compare(timed, timed)
    search.record(search.eager, WINNER, "", timed=timed, peak=search.memory.eager_bytes, comparison=even)
    search.steps.append(Step("eager", search.eager_s))
    # Pricing needs time (on a slow host the first calls took seconds), and imports PyTorch's tracer: 2.5 s in a new
    # process.
    tracer_s = 0.0 if TRACER in sys.modules else IMPORTS_S[TRACER]
    if search.budget.left_s() > 0.6 * problem.budget_s and tracer_s <= 0.25 * problem.budget_s:
        price(search)
    else:
        search.notes.append(UNPRICED)


def draws_random(search: Search, before: RandomState) -> bool:
    """Whether a call draws random numbers."""
    before.restore()
    note_queries(search)
    moved = before.moved()  # before restoring the model, whose state includes generators
    search.track.restore()
    before.restore()
    return moved


def note_queries(search: Search) -> None:
    """Make one call, and note what the model's code queries besides tensor values."""
    model, ready = search.problem.model, search.problem.inputs.copied()
    with asking(ready.tensors(), chain(model.parameters(), model.buffers())) as asked:
        search.track.run(model, ready)
    search.asked = tuple(sorted(asked))


def results_vary(search: Search, before: RandomState) -> bool:
    """Whether the random numbers show in the results: layers dropped with probability zero draw them too.

    With few samples most runs may drop none, so up to 32 seeds are tried for a second.
    """
    first = seeded(search, 1)
    seeds = range(2, 2 + max(1, min(32, int(1.0 / max(search.eager_s, 1e-6)))))
    varies = False
    for seed in seeds:
        again = seeded(search, seed)
        varies = varies or len(again) != len(first) or not all(map(torch.equal, first, again))
        if varies:
            break
    before.restore()
    return varies


def seeded(search: Search, seed: int) -> list[torch.Tensor]:
    """The results of a call after seeding."""
    torch.manual_seed(seed)
    ready = search.problem.inputs.copied()
    with torch.set_grad_enabled(search.problem.mode == "train"):  # a forward may differentiate
        found = [t.detach().clone() for _, t in leaves(search.problem.model(*ready.args, **ready.kwargs))]
    search.track.restore()
    return found


def price(search: Search) -> None:
    device = known_device(search.problem.device)
    if device is None:
        search.notes.append(f"not priced: no description of {device_name(search.problem.device)}")
        return
    found = forecast(search.problem.model, search.problem.inputs, search.problem.mode, search.problem.loss, device)
    if isinstance(found, str):
        search.notes.append(found)
    else:
        search.forecast = found


def price_late(search: Search) -> None:
    """Price the model after the candidates, if a short budget had no time before and has half a second now."""
    if UNPRICED in search.notes and TRACER in sys.modules and search.budget.left_s() > 0.5:
        search.notes.remove(UNPRICED)
        price(search)


def facts_of(search: Search) -> Facts:
    model = search.problem.model
    parts = () if search.track.state.rebinds else substitutable(model, search.problem.device)
    return Facts(
        mode=search.problem.mode,
        cuda=search.problem.device.type == "cuda",
        eager_s=search.eager_s,
        groups=() if search.track.state.rebinds or is_checkpointed(model) else tuple(groups(model)),
        unlike_frac=unlike_frac(groups(model)),
        num_leaves=sum(1 for m in model.modules() if not any(True for _ in m.children())),
        has_conv=bool(channels_last_layers(model)) and search.problem.device.type == "cuda",
        substitutable=parts,
        has_cache=search.problem.inputs.has_cache,
        unmasked=simplified(model, search.problem.inputs.args, search.problem.inputs.kwargs) is not None,
        forecast=search.forecast,
        budget_s=search.problem.budget_s,
        num_products=num_products(model, groups(model)),
        num_threads=compile_threads(),
        input_bytes=sum(tensor.nbytes for tensor in search.problem.inputs.tensors()),
        num_convs=sum(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules()),
        convolves=any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules()),
        grouped_frac=grouped_frac(model, groups(model)),
        long_rows=has_long_rows(model),
        groups_channels=any(isinstance(module, nn.GroupNorm) for module in model.modules()),
        random=search.random,
        headed="loss" not in parts and has_head(model),
        host_s=search.track.host_s(model) if search.problem.mode == "infer" else 0.0,
        recurrent=any(isinstance(module, nn.RNNBase) for module in model.modules()),
        import_s=sum(seconds for name, seconds in IMPORTS_S.items() if name not in sys.modules),
    )


def compile_threads() -> int:
    """The number of Inductor's compile processes; its default if it is not imported.

    Importing it for the exact number takes 5.0 s with PyTorch's tracer (H200).
    """
    config = sys.modules.get("torch._inductor.config")
    if config is not None:
        return max(1, int(config.compile_threads or 1))
    asked = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(asked)) if asked.isdigit() else min(32, usable)


def substitutable(model: nn.Module, device: torch.device) -> tuple[str, ...]:
    """The parts of this model that kernels of ours can replace."""
    if device.type != "cuda":
        return ()
    from ridgeline.optimizer.in_place.substitution import PARTS, apply

    found = []
    for part in PARTS:
        with contextlib.suppress(Exception):  # a part that is not recognized stays
            if apply(shallow_clone(model), (part,)).replaced:
                found.append(part)
    return tuple(found)
