"""Recurrent layers: PyTorch's own kernels where they are the same, else step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ridgeline.capture.importers.onnx.registry import Call, items, op

MAX_STEPS = 4096


def _activations(n: Call, defaults: list[str]) -> list[Callable[[Any], Any]]:
    names = n.texts("activations") or defaults
    alphas, betas = list(n.get("activation_alpha") or []), list(n.get("activation_beta") or [])

    def made(name: str) -> Callable[[Any], Any]:
        key = name.lower()
        takes_a = key in ("affine", "leakyrelu", "thresholdedrelu", "scaledtanh", "hardsigmoid", "elu")
        takes_b = key in ("affine", "scaledtanh", "hardsigmoid")
        start = {"leakyrelu": 0.01, "hardsigmoid": 0.2}.get(key, 1.0)
        a = alphas.pop(0) if takes_a and alphas else start
        b = betas.pop(0) if takes_b and betas else {"hardsigmoid": 0.5, "affine": 0.0}.get(key, 1.0)
        table: dict[str, Callable[[Any], Any]] = {
            "relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "softsign": F.softsign,
            "softplus": F.softplus, "affine": lambda x: a * x + b, "leakyrelu": lambda x: F.leaky_relu(x, a),
            "thresholdedrelu": lambda x: F.threshold(x, a, 0.0), "scaledtanh": lambda x: a * torch.tanh(b * x),
            "hardsigmoid": lambda x: torch.clamp(a * x + b, 0, 1), "elu": lambda x: F.elu(x, a),
        }  # fmt: skip
        if key not in table:
            raise n.wrong(f"activation {name!r} is not known")
        return table[key]

    return [made(name) for name in names]


def _rolled(n: Call, gates: int, x: Any, w: Any, r: Any, b: Any, lengths: Any, h0: Any, c0: Any, p: Any) -> Any:
    if n.text("direction", "forward") not in ("forward", "reverse", "bidirectional"):
        raise n.wrong(f"direction {n.text('direction')!r} is not known")
    kind, hidden = n.node.op, r.shape[-1]
    if n.integer("layout"):
        x = x.transpose(0, 1)
        h0, c0 = (None if t is None else t.transpose(0, 1) for t in (h0, c0))
    steps, batch = x.shape[0], x.shape[1]
    dirs = w.shape[0]
    quick = _native(n, x, w, r, b, lengths, h0, c0, p)
    if quick is not None:
        y, h, c = quick
    else:
        if steps > MAX_STEPS:
            raise n.wrong(f"{steps} steps with these settings run one by one: at most {MAX_STEPS} are supported")
        per = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}[kind]
        acts = _activations(n, per * dirs)
        outs, lasts, cells = [], [], []
        for d in range(dirs):
            back = n.text("direction", "forward") == "reverse" or d == 1
            h = x.new_zeros((batch, hidden)) if h0 is None else h0[d]
            c = x.new_zeros((batch, hidden)) if c0 is None else c0[d]
            made = _direction(n, kind, x, w[d], r[d], None if b is None else b[d], None if p is None else p[d],
                              lengths, h, c, back, acts[d * len(per) : (d + 1) * len(per)])  # fmt: skip
            outs.append(made[0])
            lasts.append(made[1])
            cells.append(made[2])
        y, h, c = torch.stack(outs, 1), torch.stack(lasts), torch.stack(cells)
    if n.integer("layout"):
        y, h, c = y.permute(2, 0, 1, 3), h.transpose(0, 1), c.transpose(0, 1)
    return (y, h, c) if kind == "LSTM" else (y, h)


def _direction(n: Call, kind: str, x: Any, w: Any, r: Any, b: Any, p: Any, lengths: Any, h: Any, c: Any, back: bool,
               acts: list[Any]) -> Any:  # fmt: skip
    hidden, clip = r.shape[-1], n.get("clip")
    wb, rb = (None, None) if b is None else (b[: b.shape[0] // 2], b[b.shape[0] // 2 :])
    projected = F.linear(x, w, wb)
    limit = None if lengths is None else [int(v) for v in items(lengths)]

    def clipped(t: Any) -> Any:
        return t if not clip else torch.clamp(t, -clip, clip)

    rows: list[Any] = [None] * x.shape[0]
    for at in range(x.shape[0] - 1, -1, -1) if back else range(x.shape[0]):
        now = projected[at]
        old_h, old_c = h, c
        if kind == "RNN":
            h = acts[0](clipped(now + F.linear(h, r, rb)))
        elif kind == "LSTM":
            i, o, f, g = torch.split(now + F.linear(h, r, rb), hidden, -1)
            pi, po, pf = (None, None, None) if p is None else torch.split(p, hidden, -1)
            i = acts[0](clipped(i if pi is None else i + pi * c))
            f = acts[0](clipped(f if pf is None else f + pf * c)) if not n.integer("input_forget") else 1 - i
            c = f * c + i * acts[1](clipped(g))
            h = acts[0](clipped(o if po is None else o + po * c)) * acts[2](c)
        else:
            z, q, g = torch.split(now, hidden, -1)
            rz, rq, rg = torch.split(r, hidden, 0)
            bz, bq, bg = (None, None, None) if rb is None else torch.split(rb, hidden, 0)
            z = acts[0](clipped(z + F.linear(h, rz, bz)))
            q = acts[0](clipped(q + F.linear(h, rq, bq)))
            if n.integer("linear_before_reset"):
                g = acts[1](clipped(g + q * F.linear(h, rg, bg)))
            else:
                g = acts[1](clipped(g + F.linear(q * h, rg, bg)))
            h = (1 - z) * g + z * h
        if limit is not None and any(v != x.shape[0] for v in limit):
            keep = torch.tensor([[at < v] for v in limit])
            keep = n.ctx.constant(keep) if x.is_meta else keep.to(x.device)
            rows[at] = torch.where(keep, h, torch.zeros_like(h))
            h, c = torch.where(keep, h, old_h), torch.where(keep, c, old_c)
        else:
            rows[at] = h
    return torch.stack(rows), h, c


ORDER = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
"""PyTorch's gates as positions among ONNX's: input forget cell output, reset update new."""


def _native(n: Call, x: Any, w: Any, r: Any, b: Any, lengths: Any, h0: Any, c0: Any, p: Any) -> Any:
    """PyTorch's own layer, where gates and settings are its."""
    kind, hidden, dirs = n.node.op, r.shape[-1], w.shape[0]
    plain_acts = {"RNN": ["tanh"], "GRU": ["sigmoid", "tanh"], "LSTM": ["sigmoid", "tanh", "tanh"]}[kind]
    acts = [a.lower() for a in n.texts("activations") or plain_acts * dirs]
    kinds = {"RNN": "rnn_tanh", "GRU": "gru", "LSTM": "lstm"}
    if kind == "RNN" and acts == ["relu"] * dirs:
        kinds["RNN"], acts = "rnn_relu", plain_acts * dirs
    full = lengths is None or all(int(v) == x.shape[0] for v in items(lengths))
    if (
        acts != plain_acts * dirs
        or p is not None
        or n.get("clip")
        or not full
        or not x.dtype.is_floating_point
        or (n.integer("input_forget") or (kind == "GRU" and not n.integer("linear_before_reset")))
    ):
        return None
    back = n.text("direction", "forward") == "reverse"
    order = ORDER[kind]

    def sorted_gates(t: Any) -> Any:
        if len(order) == 1:
            return t
        parts = torch.split(t, hidden, 0)
        return torch.cat([parts[g] for g in order], 0)

    flat: list[Any] = []
    for d in range(dirs):
        flat += [sorted_gates(w[d]), sorted_gates(r[d])]
        if b is not None:
            half = b.shape[1] // 2
            flat += [sorted_gates(b[d, :half]), sorted_gates(b[d, half:])]
    start = x.new_zeros((dirs, x.shape[1], hidden)) if h0 is None else h0
    given = torch.flip(x, [0]) if back else x
    if kind == "LSTM":
        cell = x.new_zeros((dirs, x.shape[1], hidden)) if c0 is None else c0
        y, h, c = torch.lstm(given, (start, cell), flat, b is not None, 1, 0.0, False, dirs == 2, False)
    else:
        y, h = getattr(torch, kinds[kind])(given, start, flat, b is not None, 1, 0.0, False, dirs == 2, False)
        c = h
    y = torch.flip(y, [0]) if back else y
    return y.reshape(x.shape[0], x.shape[1], dirs, hidden).transpose(1, 2), h, c


@op("LSTM", host=(4,))
def _lstm(n: Call, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h0: Any = None, c0: Any = None,
          p: Any = None) -> Any:  # fmt: skip
    return _rolled(n, 4, x, w, r, b, lengths, h0, c0, p)


@op("GRU", host=(4,))
def _gru(n: Call, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h0: Any = None) -> Any:
    return _rolled(n, 3, x, w, r, b, lengths, h0, None, None)


@op("RNN", host=(4,))
def _rnn(n: Call, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h0: Any = None) -> Any:
    return _rolled(n, 1, x, w, r, b, lengths, h0, None, None)
