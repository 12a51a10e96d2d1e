"""The backward pass of embedding bags as the optimizer's step: rows are updated where their gradients are summed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.contract import Case, Laps, Trial, declare
from ridgeline.kernels.embedding_bag import config, reference
from ridgeline.kernels.embedding_bag.op import bags, drawn_bags, drawn_tables, make, per_table, reason
from ridgeline.kernels.embedding_bag.reference import OPTIMIZERS, Rule
from ridgeline.kernels.embedding_bag.sums import Sorted, apply_rows, bags_of
from ridgeline.kernels.launcher import Plans, launchable
from ridgeline.kernels.rows import FLOATS

_met = Plans()


def _ordered(
    weight: Tensor, indices: Tensor, offsets: Tensor, starts: Tensor | None, factors: Tensor | None, num_tables: int,
    mean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(rows from the smallest on, where they stood or their bags, the bag of each index, its share)."""
    if not launchable(weight):
        return ORDER.on_host(weight, indices, offsets, starts, factors, num_tables, mean)  # type: ignore[no-any-return]
    found = Sorted(weight, indices, offsets, starts, factors, num_tables, mean, -1)
    none = found.keys.new_empty(0, dtype=torch.float32)
    return found.keys, found.order, found.bags, none if found.shares is None else found.shares


def _ordered_fake(
    weight: Tensor, indices: Tensor, offsets: Tensor, starts: Tensor | None, factors: Tensor | None, num_tables: int,
    mean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    n, (num_rows, _) = indices.numel(), weight.shape
    keys = indices.new_empty(n, dtype=torch.int32 if num_rows < 2**31 - 1 else torch.int64)
    order = indices.new_empty(n, dtype=torch.int32 if n and config.order(n, num_rows).block else torch.int64)
    shares = indices.new_empty(n if mean or factors is not None else 0, dtype=torch.float32)
    return keys, order, indices.new_empty(n, dtype=torch.int32), shares


def _ordered_meant(
    weight: Tensor, indices: Tensor, offsets: Tensor, starts: Tensor | None, factors: Tensor | None, num_tables: int,
    mean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rows, bags, lengths = reference.rows_and_bags(indices, offsets, starts, num_tables)
    keys, places = torch.where((indices >= 0) & (rows < weight.shape[0]), rows, weight.shape[0]).sort(stable=True)
    if not mean and factors is None:
        direct = rows.numel() and config.order(rows.numel(), weight.shape[0]).block
        return keys, bags[places] if direct else places, bags, weight.new_empty(0)
    return keys, places, bags, reference.shares(indices, bags, lengths, factors, mean, -1)


def update_bags(
    weight: Tensor, first: Tensor, second: Tensor, step: Tensor, grad: Tensor, indices: Tensor, offsets: Tensor,
    starts: Tensor | None, factors: Tensor | None, num_tables: int, mean: bool, optimizer: str, lr: float, eps: float,
    decay: float, beta1: float, beta2: float,
) -> None:  # fmt: skip
    """One optimizer step on the rows that were used, in place."""
    rule = Rule(optimizer, lr, eps, decay, beta1, beta2)
    step.add_(1.0)
    if launchable(weight):
        given = (weight, first, second, step, grad, indices, offsets, starts, factors)
        looks = tuple(None if t is None else (t.shape, t.dtype, t.get_device()) for t in given)
        if (key := (optimizer, num_tables, mean, weight.is_contiguous(), *looks)) not in _met:
            UPDATE.check(*given, num_tables, mean, optimizer)
            _met[key] = True
        keys, order, of, shares = ORDER(weight, indices, offsets, starts, factors, num_tables, mean)
        found = Sorted.of(keys, order, of, shares, bags_of(offsets, num_tables)[1], num_tables)
        apply_rows(found, grad, weight, first, second, step, rule)
        return
    wide = weight.detach().float()
    scaled = None if factors is None else factors.float()
    dense, _ = reference.backward(grad.float(), wide, indices, offsets, starts, scaled, num_tables, mean, -1, False)
    rows = reference.rows_and_bags(indices, offsets, starts, num_tables)[0]
    touched = torch.zeros(weight.shape[0], dtype=torch.bool, device=weight.device).index_fill(0, rows, True)
    new = reference.updated(wide, first, second, dense, touched, float(step), rule)
    for target, value in zip((weight, first, second), new, strict=True):
        target.copy_(value)


def _update_support(
    weight: Tensor, first: Tensor, second: Tensor, step: Tensor, grad: Tensor, indices: Tensor, offsets: Tensor,
    starts: Tensor | None = None, factors: Tensor | None = None, num_tables: int = 1, mean: bool = False,
    optimizer: str = "", *_: Any,
) -> str | None:  # fmt: skip
    if weight.dtype == torch.uint8 or grad.dtype not in FLOATS:
        return f"tables of {weight.dtype} with gradients of {grad.dtype} are not trained"
    if step.dtype != torch.float32 or first.dtype != torch.float32 or second.dtype != torch.float32:
        return "steps and states are float32"
    if optimizer and (first.shape, second.shape) != state_shapes(optimizer, *weight.shape):
        return f"states {tuple(first.shape)} and {tuple(second.shape)} are not those of {optimizer} for these rows"
    refused = reason(weight, indices, offsets, starts, factors, None, num_tables)
    meant = ((offsets.numel() - 1) // max(1, num_tables), num_tables * weight.shape[-1])
    return refused or (None if grad.shape == meant else f"the gradient is {tuple(grad.shape)}, the bags are {meant}")


def _update_cost(inputs: tuple[Any, ...], outputs: tuple[Any, ...], **_: Any) -> dict[str, float]:
    """Rows and their state read and written for every index; keys sorted in four passes."""
    weight, first, second, indices = inputs[0], inputs[1], inputs[2], inputs[5]
    row_bytes = sum(t.num_bytes for t in (weight, first, second)) / max(1, weight.shape[0])
    moved = indices.numel * row_bytes
    read = moved + indices.numel * (4 * weight.shape[1] + 100)
    return {"flops": 8.0 * indices.numel * weight.shape[1], "read_bytes": read, "written_bytes": moved}


def state_shapes(optimizer: str, rows: int, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of an optimizer's two states, both float32."""
    if optimizer == "adam":
        return (rows, dim), (rows, dim)
    return ((rows,), (1,)) if optimizer == "rowwise_adagrad" else ((1,), (1,))


def _make_step(of: Case, on: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
    weight, indices, offsets, starts, factors, tables, mode, *_ = make(of, on, generator)
    batch, dim = of["batch"], of["dim"]
    grad = torch.randn(batch, tables * dim, device=on, dtype=torch.float32, generator=generator)
    shapes = state_shapes(of["optimizer"], weight.shape[0], dim)
    first, second = (torch.rand(shape, device=on, dtype=torch.float32, generator=generator) for shape in shapes)
    rest = (indices, offsets, starts, factors, tables, mode, of["optimizer"])
    return weight, first, second, grad.to(weight.dtype), *rest


def trial_rule(optimizer: str) -> Rule:
    return Rule(optimizer, 0.05, 1e-8, 0.01)


def _update_call(
    weight: Tensor, first: Tensor, second: Tensor, grad: Tensor, indices: Tensor, offsets: Tensor,
    starts: Tensor | None, factors: Tensor | None, tables: int, mode: str, optimizer: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Step three on copies."""
    new, grown, more = (t.detach().clone() for t in (weight, first, second))
    rule = trial_rule(optimizer)
    factors = None if factors is None else factors.detach()
    step = torch.full((), 2.0, device=weight.device)
    update_bags(new, grown, more, step, grad.detach(), indices, offsets, starts, factors, tables, mode == "mean",
                optimizer, rule.lr, rule.eps, rule.decay, rule.beta1, rule.beta2)  # fmt: skip
    return new, grown, more


def _update_form(dense_of: Any) -> Any:
    """A reference from how it sums the rows' gradients."""

    def form(
        weight: Tensor, first: Tensor, second: Tensor, grad: Tensor, indices: Tensor, offsets: Tensor,
        starts: Tensor | None, factors: Tensor | None, tables: int, mode: str, optimizer: str,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        kind = weight.dtype
        wide = [t if t is None or t.dtype == torch.float64 else t.float() for t in (weight, grad, factors)]
        given = (wide[1], wide[0], indices, offsets, starts, wide[2], tables, mode == "mean", -1)
        rows = reference.rows_and_bags(indices, offsets, starts, tables)[0]
        touched = torch.zeros(weight.shape[0], dtype=torch.bool, device=weight.device).index_fill(0, rows, True)
        new, *states = reference.updated(wide[0], first, second, dense_of(*given), touched, 3.0, trial_rule(optimizer))  # type: ignore[arg-type]
        return new.to(kind), states[0], states[1]

    return form


def _dense(*given: Any) -> Tensor:
    found: Any = reference.backward
    return found(*given, False)[0]


def _overwritten(*given: Any) -> Tensor:
    """Of a row used several times only one gradient counts."""
    rows, by_index, share, _ = reference.row_grads(*given)
    return torch.zeros_like(given[1]).index_copy(0, rows, by_index * share.unsqueeze(-1))


def _unshared(*given: Any) -> Tensor:
    """Sums as if every gradient came from the bag before."""
    return _dense(given[0].roll(1, 0), *given[1:])


def _update_laps(of: Case, on: torch.device, generator: torch.Generator) -> Laps:
    """Forward, backward and step of all tables: ours against sparse gradients and PyTorch's optimizer."""
    from ridgeline.kernels.embedding_bag.module import EmbeddingBags

    indices, offsets, _ = drawn_bags(of, on, generator)
    tables, dim, batch, optimizer = of["tables"], of["dim"], of["batch"], of["optimizer"]
    ours = EmbeddingBags([of["rows"]] * tables, dim, optimizer=optimizer, lr=1e-3, device=on)
    made = [torch.nn.Parameter(w) for w in drawn_tables(of, on, generator)]
    kinds = {"sgd": torch.optim.SGD, "rowwise_adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam}
    theirs = kinds[optimizer](made, lr=1e-3)
    parts = per_table(indices, offsets, tables)
    grad = torch.randn(batch, tables * dim, device=on)

    def eager() -> None:
        functional = torch.nn.functional
        found = [
            functional.embedding_bag(i, w, o, mode="sum", sparse=True) for w, (i, o) in zip(made, parts, strict=True)
        ]
        torch.cat(found, 1).backward(grad)
        theirs.step()
        theirs.zero_grad()

    def lap() -> None:
        ours(indices, offsets).backward(grad)

    row = dim * 4
    states = {"sgd": 0, "rowwise_adagrad": 4, "adam": 2 * row}[optimizer]
    used = reference.rows_and_bags(indices, offsets, ours.starts, tables)[0].unique().numel()
    moved = indices.numel() * (2 * row) + 2 * grad.nbytes + used * 2 * (row + states)
    return Laps({"ridgeline": lap, "eager": eager}, moved)


ORDER = declare(
    name="embedding_order",
    summary="indices of embedding bags in the order of their rows, as a step on these rows takes them",
    schema="(Tensor weight, Tensor indices, Tensor offsets, Tensor? starts, Tensor? sample_weights, int num_tables,"
    " bool mean) -> (Tensor, Tensor, Tensor, Tensor)",
    forward=_ordered,
    fake=_ordered_fake,
    reference=_ordered_meant,
    support=lambda weight, indices, offsets, starts=None, factors=None, num_tables=1, *_: reason(
        weight, indices, offsets, starts, factors, None, num_tables
    ),
    cost=lambda inputs, outputs, **_: {"flops": 10.0 * inputs[1].numel, "read_bytes": 50.0 * inputs[1].numel},
    num_results=4,
    repeats=True,
)
UPDATE = declare(
    name="embedding_bags_update",
    summary="the backward pass of embedding bags with the optimizer's step in it: no gradient is ever written",
    schema="(Tensor(a!) weight, Tensor(b!) first, Tensor(c!) second, Tensor(d!) step, Tensor grad, Tensor indices,"
    " Tensor offsets, Tensor? starts, Tensor? sample_weights, int num_tables, bool mean, str optimizer, float lr,"
    " float eps, float decay, float beta1, float beta2) -> ()",
    forward=update_bags,
    fake=lambda *_: None,
    reference=reference.updated,
    support=_update_support,
    cost=_update_cost,
    trial=Trial(
        make=_make_step,
        call=_update_call,
        eager=_update_form(_dense),
        reference=_update_form(_dense),
        mistakes={"duplicates lost": _update_form(_overwritten), "another bag": _update_form(_unshared)},
        checks=tuple(
            bags(dtype, *sizes, optimizer=optimizer, **more)
            for dtype in ("float32", "float16")
            for optimizer in OPTIMIZERS[1:]
            for sizes, more in (
                ((3, 33, 100, 64, 5), {"index": "int32", "mode": "mean"}), ((4, 65, 1000, 128, 20), {"skewed": True}),
                ((2, 40, 30, 96, 8), {"weighted": True}), ((2, 200, 9, 32, 40), {}),
            )
        ),
        races=(
            bags("float32", 26, 4096, 100_000, 128, 10, optimizer="rowwise_adagrad"),
            bags("float32", 26, 4096, 100_000, 128, 10, optimizer="sgd"),
            bags("float32", 26, 16384, 100_000, 64, 1, optimizer="adam"),
            bags("float32", 26, 4096, 100_000, 128, 10, optimizer="rowwise_adagrad", skewed=True),
        ),
        phases=("step",),
        constants=tuple(range(8)),
        laps=_update_laps,
        layouts=False,
    ),
)  # fmt: skip
