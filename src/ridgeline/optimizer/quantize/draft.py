"""A program that is being changed: steps replaced, weights derived, and how they are derived written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ridgeline.engine.file.contents import Contents
from ridgeline.engine.file.execute import Resolver, function_of
from ridgeline.engine.file.export import mapped, pruned, renumbered
from ridgeline.engine.file.program import Input, Program, Step


class Draft:
    """Changes to the general program of an engine. ``contents`` makes the engine of it."""

    def __init__(self, contents: Contents) -> None:
        self.base = contents.base or contents.programs[-1]
        self.start = contents
        self.steps: list[Step] = list(self.base.steps)
        self.weights: dict[str, Tensor] = dict(contents.weights)
        self.constants: set[str] = set(contents.constants)
        self.frozen: set[str] = set()  # derived by more than a recipe
        self._recipe: list[tuple[str, list[Any], dict[str, Any], str]] = []  # op, arguments, their names, result

    def derive(self, name: str, op: str, *args: Any, **kwargs: Any) -> str:
        """A weight made of others by an op; the name under which it is known."""
        resolver = Resolver(torch.device("cpu"))
        values = [self.weights[a["w"]] if isinstance(a, dict) and "w" in a else resolver.constant(a) for a in args]
        named = {key: resolver.constant(value) for key, value in kwargs.items()}
        self.weights[name] = function_of(op)(*values, **named)
        self._recipe.append((op, list(args), kwargs, name))
        return name

    def constant(self, name: str, value: Tensor) -> str:
        """A tensor that calibration found, and no checkpoint has."""
        self.weights[name] = value
        self.constants.add(name)
        return name

    def freeze(self, name: str, value: Tensor) -> str:
        """A weight that is made of others by more than ops: an engine with one is not refitted."""
        self.weights[name] = value
        self.frozen.add(name)
        return name

    def contents(self) -> Contents:
        """The engine's contents with the program as it is now. Weights that nobody reads any more are left out."""
        general = pruned(Program(self.base.inputs, tuple(self.steps), self.base.outputs, self.base.dims))
        used = general.weight_names()
        recipe = self._as_program(used)
        changed = general.to_json() != self.base.to_json()
        return replace(
            self.start, programs=(general,), base=self.base if changed else None, recipe=recipe,
            weights={n: value for n, value in self.weights.items() if n in used or self._is_source(n, recipe)},
            constants=frozenset(n for n in self.constants if n in used or self._is_source(n, recipe)),
        )  # fmt: skip

    def _is_source(self, name: str, recipe: Program | None) -> bool:
        """Whether the recipe or the model's own program reads a constant, which no checkpoint can give them."""
        read = {*self.base.weight_names(), *(i.name for i in recipe.inputs)} if recipe else self.base.weight_names()
        return name in self.constants and name in read

    def _as_program(self, used: frozenset[str]) -> Program | None:
        """The recipe of the derived weights that are used."""
        if not self._recipe:
            return None
        made = {result for *_, result in self._recipe}
        sources = dict.fromkeys(a["w"] for _, args, _, _ in self._recipe for a in args
                                if isinstance(a, dict) and "w" in a and a["w"] not in made)  # fmt: skip
        numbers = {name: i for i, name in enumerate(sources)}
        inputs = tuple(Input(n, str(self.weights[n].dtype).removeprefix("torch."), tuple(self.weights[n].shape))
                       for n in sources)  # fmt: skip
        steps = []
        for op, args, kwargs, result in self._recipe:
            numbers[result] = len(numbers)
            given = tuple({"v": numbers[a["w"]]} if isinstance(a, dict) and "w" in a else a for a in args)
            steps.append(Step(op, given, kwargs, (numbers[result],)))
        wanted = [name for name in made if name in used]
        outputs = {"dict": [[name, {"v": numbers[name]}] for name in sorted(wanted)]}
        return pruned_inputs(pruned(Program(inputs, tuple(steps), outputs))) if wanted else None


def pruned_inputs(program: Program) -> Program:
    """Without inputs that no step reads."""
    read = {number for step in program.steps for number in step.values()}
    kept = [i for i in range(len(program.inputs)) if i in read]
    order = {old: new for new, old in enumerate([*kept, *range(len(program.inputs), program.num_values)])}
    steps = tuple(renumbered(step, lambda n: order[n]) for step in program.steps)
    return Program(tuple(program.inputs[i] for i in kept), steps, mapped(program.outputs, lambda n: order[n]))


def fold_batch_norms(draft: Draft) -> int:
    """Put the scale and shift of a batch norm into the convolution before it; how many were folded."""
    readers: dict[int, int] = {}
    for step in draft.steps:
        for number in step.values():
            readers[number] = readers.get(number, 0) + 1
    makers = {step.out[0]: i for i, step in enumerate(draft.steps)}
    count = 0
    for place, norm in enumerate(draft.steps):
        if norm.op != "aten::batch_norm.default" or norm.args[5] is not False or not isinstance(norm.args[0], dict):
            continue
        at = makers.get(norm.args[0].get("v", -1))
        conv = draft.steps[at] if at is not None else None
        held = all(isinstance(a, dict) and "w" in a for a in norm.args[1:5])
        if conv is None or at is None or conv.op not in CONVOLUTIONS or readers[conv.out[0]] != 1 or not held:
            continue
        args = [*conv.args, *([None] if len(conv.args) == 2 else [])]
        if not (isinstance(args[1], dict) and "w" in args[1]):
            continue
        scale, shift, mean, variance = norm.args[1:5]
        name = args[1]["w"]
        derive = lambda part, op, *given: {"w": draft.derive(f"{name}.folded.{part}", op, *given)}  # noqa: B023
        factor = derive("factor", "aten::mul.Tensor", scale, derive("rsqrt", "aten::rsqrt.default",
                        derive("variance", "aten::add.Scalar", variance, norm.args[7])))  # fmt: skip
        dims = draft.weights[name].dim() - 1
        tall = derive("tall", "aten::reshape.default", factor, [-1, *[1] * dims])
        args[1] = derive("weight", "aten::mul.Tensor", args[1], tall)
        moved = derive("moved", "aten::sub.Tensor", args[2], mean) if args[2] is not None else derive(
            "moved", "aten::neg.default", mean)  # fmt: skip
        args[2] = derive("bias", "aten::addcmul.default", shift, moved, factor)
        draft.steps[place] = replace(norm, op=conv.op, args=tuple(args), kwargs=conv.kwargs, module=conv.module)
        count += 1
    return count


CONVOLUTIONS = tuple(f"aten::conv{n}d.default" for n in (1, 2, 3))


def timed(call: Callable[[], Any], clock: Callable[[], float], rounds: int = 7, enough_s: float = 0.2) -> float:
    """The least of several runs, two at least, after one that is not counted; no more once they took long enough."""
    call()
    took = list[float]()
    while len(took) < 2 or (len(took) < rounds and sum(took) < enough_s):
        began = clock()
        call()
        took.append(clock() - began)
    return min(took)


def linears(steps: Sequence[Step], weights: dict[str, Tensor]) -> list[int]:
    """Steps that multiply by a weight of the checkpoint."""
    return [
        i for i, step in enumerate(steps)
        if step.op == "aten::linear.default" and isinstance(step.args[1], dict) and "w" in step.args[1]
        and weights[step.args[1]["w"]].dim() == 2 and weights[step.args[1]["w"]].dtype == torch.float32
    ]  # fmt: skip
