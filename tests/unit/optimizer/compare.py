"""Two worlds, one eager and one optimized, made alike and put through the same calls."""

from __future__ import annotations

import contextlib
import random
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from adversarial import Case
from torch import Tensor, nn

from ridgeline.engine.drop_in import Optimized, Plan, RunsEagerly
from ridgeline.engine.pytree import attributes
from ridgeline.engine.replay.inference import Graphed, graph_inference
from ridgeline.errors import NotGraphable

NUM_CALLS = 4


def seed(value: int) -> None:
    random.seed(value)
    torch.manual_seed(value)


def build(case: Case, device: torch.device) -> Any:
    seed(7)
    model = case.model().to(device)
    return model.train(case.train)


def inputs(case: Case, device: torch.device, call: int) -> Any:
    seed(100 + call)
    return case.inputs(device)


def optimize(case: Case, model: Any, device: torch.device, executor: Any) -> tuple[Any, str, Graphed | None]:
    """The model with a plan if one can be recorded, and the reason if not."""
    args, kwargs = inputs(case, device, 0)
    try:
        with case.around(device):
            graphed = graph_inference(model, args, kwargs, model, executor=executor)
    except NotGraphable as error:
        return Optimized(model), str(error), None
    return Optimized(model, [Plan(graphed.signature, graphed)]), "", graphed


def check(case: Case, device: torch.device, make_executor: Callable[[], Any]) -> str:
    """Puts a case through its calls; returns what was done, raises AssertionError on any difference."""
    eager, model = build(case, device), build(case, device)
    before = snapshot(model)
    fast, reason, graphed = optimize(case, model, device, make_executor())
    if case.raises is None:
        assert alike(snapshot(model), before, exact=True), "recording left a trace"
    if case.refused:
        assert graphed is None, "was recorded, though it must not be"
        assert re.search(case.refused, reason), reason
    else:
        assert graphed is not None, f"was refused: {reason}"
    if not case.state:
        return f"refused: {reason}"
    kept: list[tuple[Any, Any, Any]] = []
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", RunsEagerly)
        for call in range(1, NUM_CALLS + 1):
            kept.append(_call(case, eager, fast, device, call))
    for mine, theirs, exact in kept:
        assert alike(mine, theirs, exact=exact), "a result changed after it was handed out"
    return _verdict(case, graphed, reason, fast, case.missed_elsewhere if device.type != "cpu" else "")


def _call(case: Case, eager: Any, fast: Any, device: torch.device, call: int) -> tuple[Any, Any, Any]:
    results = []
    for model in (eager, fast):
        if case.between is not None:
            case.between(model, call)
        args, kwargs = inputs(case, device, call)
        seed(1000 + call)
        with case.around(device):
            result = _outcome(case, model, args, kwargs)
        results.append((result, args, kwargs, case.observed(model), random.random(), torch.rand(2, device=device)))
    theirs, mine = results
    assert alike(mine[0], theirs[0], exact=case.exact), f"call {call}: the result differs"
    assert alike(mine[1:3], theirs[1:3], exact=case.exact), f"call {call}: the inputs differ afterwards"
    assert alike(mine[3:], theirs[3:], exact=True), f"call {call}: the state differs afterwards"
    assert alike(snapshot(fast), snapshot(eager), exact=case.exact), f"call {call}: the model's state differs"
    assert aliases(mine[:3]) == aliases(theirs[:3]), f"call {call}: other tensors share memory"
    return mine[0], theirs[0], case.exact


def _outcome(case: Case, model: Any, args: Any, kwargs: Any) -> Any:
    if case.raises is None:
        result = model(*args, **kwargs)
        return list(result) if isinstance(result, Iterator) else result
    with contextlib.suppress(case.raises):
        model(*args, **kwargs)
        raise AssertionError("did not raise")
    return "raised"


def _verdict(case: Case, graphed: Graphed | None, reason: str, fast: Any, expected: str) -> str:
    if graphed is None:
        return f"refused: {reason}"
    missed = " | ".join([*fast.fallbacks, *graphed.misses])
    if expected or case.missed:
        assert re.search(expected or case.missed, missed), missed or "replayed, though something had changed"
        return f"missed: {missed}"
    assert not missed, missed
    assert graphed.replays == NUM_CALLS
    return "replayed"


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def tensors(value: Any, seen: set[int] | None = None) -> list[Tensor]:
    seen = set() if seen is None else seen
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, nn.Module | type):
        return []
    found: list[Tensor] = []
    if isinstance(value, dict):
        items = list(value.values())
    elif isinstance(value, list | tuple):
        items = list(value)
    else:
        items = []
    for item in [*items, *(attributes(value) or {}).values()] if not callable(value) else items:
        found += tensors(item, seen)
    return found


def aliases(value: Any) -> list[tuple[int, int]]:
    """Which of the tensors share memory with which, and which are one object."""
    found = tensors(value)
    first: dict[int, int] = {}
    return [(first.setdefault(t.untyped_storage()._cdata if t.layout is torch.strided else id(t), i), i)
            for i, t in enumerate(found)]  # fmt: skip


def alike(a: Any, b: Any, *, exact: bool, seen: set[tuple[int, int]] | None = None) -> bool:
    """Same types, same structure, same numbers, same layout."""
    seen = set() if seen is None else seen
    if (id(a), id(b)) in seen or a is b:
        return True
    seen.add((id(a), id(b)))
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and _same_tensor(a, b, exact)
    if isinstance(a, np.ndarray | torch.Generator):
        return type(a) is type(b) and _same_contents(a, b)
    if type(a) is not type(b) and not (isinstance(a, Optimized) or isinstance(b, Optimized)):
        return False
    if isinstance(a, dict):
        if list(a) != list(b) or not all(alike(a[key], b[key], exact=exact, seen=seen) for key in a):
            return False
    elif isinstance(a, list | tuple):
        if len(a) != len(b) or not all(alike(x, y, exact=exact, seen=seen) for x, y in zip(a, b)):
            return False
    elif attributes(a) is None or isinstance(a, type) or callable(a):
        return a == b or a != a
    held, others = attributes(a) or {}, attributes(b) or {}
    return list(held) == list(others) and all(alike(held[k], others[k], exact=exact, seen=seen) for k in held)


def _same_contents(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Generator):
        return torch.equal(a.get_state(), b.get_state())
    return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True)


def _same_tensor(a: Tensor, b: Tensor, exact: bool) -> bool:
    if any(getattr(a, name) != getattr(b, name) for name in ("shape", "dtype", "device", "layout", "requires_grad")):
        return False
    if a.layout is torch.strided and a.numel() and a.stride() != b.stride():
        return False
    a, b = a.detach(), b.detach()
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if exact:
        return torch.equal(a, b) or bool(((a == b) | (a != a) & (b != b)).all())
    return torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)
