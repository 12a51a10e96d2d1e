"""Control flow and sequences: branches decided on the host, loops unrolled while a model is planned."""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.capture.importers.onnx.registry import Call, items, op
from ridgeline.capture.importers.program import Host

MAX_TRIPS = 10_000


def _truth(n: Call, value: Any, what: str) -> bool:
    data = n.ctx.host(value, f"{what} of {n.where}")
    if data.numel() != 1:
        raise n.wrong(f"{what} has {data.numel()} values instead of one")
    return bool(data.reshape(()))


@op("If", raw=True)
def _if(n: Call, env: Any, condition: Any) -> Any:
    branch = n.get("then_branch" if _truth(n, condition, "the condition") else "else_branch")
    return tuple(n.evaluate.run(n.ctx, branch, {}, env, n.evaluate.model.opsets))


def _scanned(n: Call, rows: list[Any]) -> Any:
    if rows and all(isinstance(row, Host) for row in rows):
        return Host(torch.stack([row.t for row in rows]))
    if not rows:
        return Host(torch.empty(0))
    return torch.stack([n.ctx.constant(row.t) if isinstance(row, Host) else row for row in rows])


@op("Loop", raw=True)
def _loop(n: Call, env: Any, trips: Any = None, condition: Any = None, *carried: Any) -> Any:
    body = n.get("body")
    limit = (
        int(n.ctx.host(trips, f"the trip count of {n.where}").reshape(-1)[0]) if trips is not None else MAX_TRIPS + 1
    )
    going = condition is None or _truth(n, condition, "the condition")
    state, num = list(carried), len(carried)
    rows: list[list[Any]] = [[] for _ in range(len(body.outputs) - 1 - num)]
    at = 0
    while going and at < limit:
        if at >= MAX_TRIPS:
            raise n.wrong(f"runs more than {MAX_TRIPS:,} times")
        step = [Host(torch.tensor(at)), Host(torch.tensor(True)), *state]
        given = {value.name: step[i] for i, value in enumerate(body.inputs) if i < len(step)}
        going_on, *outs = n.evaluate.run(n.ctx, body, given, env, n.evaluate.model.opsets)
        state = outs[:num]
        for row, out in zip(rows, outs[num:]):
            row.append(out)
        at += 1
        if at < limit:
            going = _truth(n, going_on, "the condition")
    return (*state, *[_scanned(n, row) for row in rows])


@op("Scan", raw=True)
def _scan(n: Call, env: Any, *values: Any) -> Any:
    body, num_scanned = n.get("body"), n.integer("num_scan_inputs")
    if n.opset < 9:
        lengths, *rest = values
        if lengths is not None:
            raise n.wrong("sequence lengths of op set 8 are not supported: convert the model to op set 9 or newer")
        batches = rest[0].t.shape[0] if isinstance(rest[0], Host) else rest[0].shape[0]
        made = [_scan_once(n, env, body, num_scanned, [_row(n, v, 0, b) for v in rest]) for b in range(batches)]
        return tuple(_scanned(n, [m[i] for m in made]) for i in range(len(made[0])))
    return tuple(_scan_once(n, env, body, num_scanned, list(values)))


def _row(n: Call, value: Any, axis: int, at: int) -> Any:
    if isinstance(value, Host):
        return Host(torch.select(value.t, axis, at))
    return torch.select(value, axis, at)


def _scan_once(n: Call, env: Any, body: Any, num_scanned: int, values: list[Any]) -> list[Any]:
    state, scanned = values[: len(values) - num_scanned], values[len(values) - num_scanned :]
    in_axes = n.ints("scan_input_axes") or [0] * num_scanned
    backward = n.ints("scan_input_directions") or n.ints("directions") or [0] * num_scanned
    num_out = len(body.outputs) - len(state)
    out_axes = n.ints("scan_output_axes") or [0] * num_out
    out_backward = n.ints("scan_output_directions") or [0] * num_out
    shapes = [v.t.shape if isinstance(v, Host) else v.shape for v in scanned]
    length = shapes[0][in_axes[0]]
    if length > MAX_TRIPS:
        raise n.wrong(f"runs {length:,} times, more than {MAX_TRIPS:,}")
    rows: list[list[Any]] = [[] for _ in range(num_out)]
    for at in range(length):
        given = [*state]
        for value, axis, back in zip(scanned, in_axes, backward):
            given.append(_row(n, value, axis, length - 1 - at if back else at))
        named = {v.name: given[i] for i, v in enumerate(body.inputs)}
        outs = n.evaluate.run(n.ctx, body, named, env, n.evaluate.model.opsets)
        state = outs[: len(state)]
        for row, out in zip(rows, outs[len(state) :]):
            row.append(out)
    made = []
    for row, axis, back in zip(rows, out_axes, out_backward):
        stacked = _scanned(n, row[::-1] if back else row)
        if axis:
            t = stacked.t if isinstance(stacked, Host) else stacked
            moved = torch.movedim(t, 0, axis)
            stacked = Host(moved) if isinstance(stacked, Host) else moved
        made.append(stacked)
    return [*state, *made]


@op("SequenceMap", raw=True)
def _sequence_map(n: Call, env: Any, *values: Any) -> Any:
    body = n.get("body")
    length = len(values[0])
    outs: list[list[Any]] = [[] for _ in body.outputs]
    for at in range(length):
        given = {v.name: values[i][at] if isinstance(values[i], list) else values[i] for i, v in enumerate(body.inputs)}
        for row, out in zip(outs, n.evaluate.run(n.ctx, body, given, env, n.evaluate.model.opsets)):
            row.append(out)
    return tuple(outs)


@op("SequenceEmpty", raw=True)
def _sequence_empty(n: Call, env: Any) -> Any:
    return ([],)


@op("SequenceConstruct", raw=True)
def _sequence_construct(n: Call, env: Any, *values: Any) -> Any:
    return (list(values),)


@op("SequenceLength", raw=True)
def _sequence_length(n: Call, env: Any, values: Any) -> Any:
    return (Host(torch.tensor(len(values))),)


def _position(n: Call, values: list[Any], at: Any, *, past_end: bool = False) -> int:
    index = int(n.ctx.host(at, f"the position of {n.where}"))
    limit = len(values) + past_end
    if not -len(values) <= index < limit:
        raise n.wrong(f"position {index} of a sequence of {len(values)}")
    return index + len(values) if index < 0 else index


@op("SequenceAt", raw=True)
def _sequence_at(n: Call, env: Any, values: Any, at: Any) -> Any:
    return (values[_position(n, values, at)],)


@op("SequenceInsert", raw=True)
def _sequence_insert(n: Call, env: Any, values: Any, item: Any, at: Any = None) -> Any:
    index = len(values) if at is None else _position(n, values, at, past_end=True)
    return ([*values[:index], item, *values[index:]],)


@op("SequenceErase", raw=True)
def _sequence_erase(n: Call, env: Any, values: Any, at: Any = None) -> Any:
    index = len(values) - 1 if at is None else _position(n, values, at)
    return ([*values[:index], *values[index + 1 :]],)


@op("ConcatFromSequence")
def _concat_from_sequence(n: Call, values: Any) -> Any:
    return torch.stack(values, n.integer("axis")) if n.integer("new_axis") else torch.cat(values, n.integer("axis"))


@op("SplitToSequence", raw=True)
def _split_to_sequence(n: Call, env: Any, x: Any, sizes: Any = None) -> Any:
    t = x.t if isinstance(x, Host) else x
    axis, keep = n.integer("axis"), bool(n.integer("keepdims", 1))
    if sizes is None:
        parts = [torch.narrow(t, axis, i, 1) if keep else torch.select(t, axis, i) for i in range(t.shape[axis])]
    else:
        data = n.ctx.host(sizes, f"the sizes of {n.where}")
        parts = list(torch.split(t, int(data) if data.dim() == 0 else items(data), axis))
    return ([Host(part) for part in parts] if isinstance(x, Host) else parts,)
