"""New weights for an engine: those of a checkpoint, and what the build derived from them, made again."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ridgeline.engine.file import tensors
from ridgeline.engine.file.execute import interpret
from ridgeline.engine.file.program import Program, shown
from ridgeline.engine.file.proof import cases_of, prove
from ridgeline.errors import EngineError, nearest

if TYPE_CHECKING:
    from ridgeline.engine.file.engine import Engine


def refitted(engine: Engine, checkpoint: Any) -> Engine:
    """The same engine with the weights of a checkpoint. Nothing is changed where one is missing, unknown or another,
    or where the result is not as accurate as the model with them."""
    contents = engine.contents
    given = _read(checkpoint)
    known = contents.checkpoint
    # What a search derived from the weights was recorded as values, without a recipe: those programs are left out
    stale = [p for p in contents.programs if p.issued and any(n.startswith("constant.") for n in p.weight_names())]
    if stale:
        note = "refitted: the recorded program holds weights of before, so ATen runs instead; build again for its speed"
        programs = tuple(program for program in contents.programs if program not in stale)
        notes = [*contents.receipt.get("notes", []), note]
        weights = {name: x for name, x in contents.weights.items() if not name.startswith("constant.")}
        contents = replace(contents, programs=programs, receipt={**contents.receipt, "notes": notes}, weights=weights,
                           constants=contents.constants & weights.keys())  # fmt: skip
    if not known:
        raise EngineError(f"{contents.name} was built without names of weights and cannot be refitted: build it again")
    own = set(known) - contents.constants
    missing = sorted(own - set(given) - set(contents.aliases))
    unknown = sorted(set(given) - set(known))
    problems = []
    if missing:
        more = f" and {len(missing) - 5} more" if missing[5:] else ""
        problems.append(f"without {', '.join(map(shown, missing[:5]))}{more}")
    if unknown:
        problems.append(f"with {', '.join(map(shown, unknown[:5]))}, which the model does not have"
                        + nearest(unknown[0], known, num=1))  # fmt: skip
    for name in sorted(own & set(given)):
        dtype, shape = known[name]
        found = given[name]
        if tuple(found.shape) != shape or str(found.dtype) != f"torch.{dtype}":
            problems.append(f"{shown(name)} is {found.dtype} {tuple(found.shape)} instead of torch.{dtype} {shape}")
    for alias, name in contents.aliases.items():
        if alias in given and name in given and not torch.equal(given[alias], given[name]):
            problems.append(
                f"{shown(alias)} and {shown(name)} are one weight of the model and differ in the checkpoint"
            )
    if problems:
        raise EngineError(f"the checkpoint does not fit {contents.name}, which stays as it is: it is "
                          + "; ".join(problems[:5]))  # fmt: skip
    given = {**given, **{alias: given[name] for alias, name in contents.aliases.items() if name in given}}
    made: dict[str, Tensor] = {name: given[name] for name in contents.weights if name in own}
    made |= {name: value for name, value in contents.weights.items() if name in contents.constants}
    if contents.recipe is not None:
        held = {**{n: contents.weights[n] for n in contents.constants if n in contents.weights}, **given}
        made |= derived(contents.recipe, held)
    if lacking := set(contents.weights) - set(made):
        raise EngineError(
            f"{contents.name} has weights without a recipe ({', '.join(sorted(lacking)[:3])}): build it again"
        )
    # The order and the layout of the build, in memory of the engine's own
    fresh = {name: made[name].detach().clone(memory_format=_format(old)) for name, old in contents.weights.items()}
    made_engine = engine.with_contents(replace(contents, weights=fresh, digest=""))
    cases = cases_of(contents.proof, contents.proof_values)
    if not cases:
        return made_engine
    bases = [contents.base] if contents.base else [program for program in contents.programs if not program.issued]
    read = frozenset(name for base in bases for name in base.weight_names())
    sources = {**fresh, **{n: v.clone() for n, v in given.items() if n in read}}
    held = {name: value.to(engine.device) for name, value in sources.items()}
    budget = contents.proof.get("error_budget")
    proof, values, wrong = prove(made_engine, bases, held, cases, budget)
    if wrong:
        raise EngineError(f"{contents.name} with this checkpoint is not as accurate as the model with it, and stays as "
                          f"it is: {'; '.join(wrong[:2])}")  # fmt: skip
    return made_engine.with_contents(replace(made_engine.contents, proof=proof, proof_values=values))


def derived(recipe: Program, sources: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a recipe makes of a checkpoint."""
    with torch.no_grad():
        made = interpret(
            recipe, [sources[i.name].cpu() for i in recipe.inputs], lambda name: sources[name], torch.device("cpu")
        )
    return dict(made)


def _format(like: Tensor) -> torch.memory_format:
    if like.dim() == 4 and not like.is_contiguous() and like.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


def _read(checkpoint: Any) -> dict[str, Tensor]:
    if isinstance(checkpoint, nn.Module):
        return {name: value.detach().cpu() for name, value in checkpoint.state_dict().items()}
    if isinstance(checkpoint, Mapping):
        if not all(isinstance(value, Tensor) for value in checkpoint.values()):
            raise EngineError("a checkpoint is a dictionary of tensors by name")
        return {name: value.detach().cpu() for name, value in checkpoint.items()}
    where = os.fspath(checkpoint)
    try:
        with open(where, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)) if size else memoryview(b"")
    except OSError as error:
        raise EngineError(f"cannot read {where}: {error.strerror or error}") from error
    if bytes(data[:4]) == b"PK\x03\x04" or bytes(data[:1]) == b"\x80":
        raise EngineError(f"{where} is a PyTorch checkpoint (a pickle), which is a program: save its state dict as "
                          "safetensors")  # fmt: skip
    return tensors.unpack(data, where)
