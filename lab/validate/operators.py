"""How far operator predictions are from the recordings, by kind; and the intervals that follow.

    python -m lab.validate.operators [--device h200] [--unseen | --blind [SEED] | --older] [--warm]
                                            [--worst KIND] [--write]

Event time is predicted where events were recorded (forward), kernel time elsewhere. ``--write`` puts the 90 % widths
into the calibration.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from functools import cache
from typing import Any

import numpy as np

from lab.fit.recordings import event_to_busy_s, load_operators, update_calibration
from lab.record.surveys import general_points
from ridgeline.bench.fitting import intervals, sample
from ridgeline.cost import host
from ridgeline.cost.call import Call
from ridgeline.cost.price import Pricer, pricer_of
from ridgeline.cost.time.gemm.calls import alignment
from ridgeline.errors import RidgelineError
from ridgeline.hardware import device
from ridgeline.validation.operators import predict_call


def errors(rows: list[dict[str, Any]], pricer: Pricer) -> list[dict[str, Any]]:
    coef = {**host.DEFAULTS, **pricer.calibration.host}
    found = []
    for row in rows:
        call = Call(row["kind"], row["dtype"], row["phase"], row["library"], tuple(row["shape"].items()))
        try:
            price = pricer.price(call)
        except RidgelineError as error:
            print("not priced:", call, error)
            continue
        more = coef["event_s"] + coef["event_gap_s"] * max(0, price.time.num_kernels - 1)
        measured = event_to_busy_s(row) + coef["event_s"] + coef["event_gap_s"] * max(0, len(row["kernels"]) - 1)
        if _fed_by_host(row):
            told_s = host.between_events_s(row["kind"], price.time.busy_s, price.time.num_kernels, coef)
            more, measured = told_s - price.time.busy_s, row["cold_s"]
        found.append(
            {
                "row": row,
                "sample": sample(row),
                "log": math.log((price.time.busy_s + more) / measured),
                "measured_s": measured,
                "busy_s": price.time.busy_s,
                "width": price.width,
                "family": price.family,
                "below_floor": row["busy_s"] < price.time.floor_s * 0.98,
            }
        )
    return found


MANY_KERNELS = 12
FIRST_ROUND = 6003  # blind samples before have no further convolutions


def _fed_by_host(row: dict[str, Any]) -> bool:
    """Convolutions whose groups are launched one by one: what events read is the host's time as often as not."""
    return row["kind"].startswith("conv") and "cold_s" in row and len(row["kernels"]) > MANY_KERNELS


def warm_errors(rows: list[dict[str, Any]], device_name: str) -> list[dict[str, Any]]:
    """The same for calls repeated without a flush between them: kernel times, events' overhead on both sides."""
    found = []
    for row in rows:
        if row.get("warm_kernels_s", 0.0) <= 0 or row["kind"] not in FOOTPRINTS:
            continue
        shape = {k: v for k, v in row["shape"].items() if k != "layout"}
        if row["dtype"] == "fp32":
            shape["tf32"] = 0  # recorded in full precision
        told = predict_call(device_name, row["kind"], row["dtype"], row["phase"], row["library"], shape, "warm")
        more = host.DEFAULTS["event_s"] + host.DEFAULTS["event_gap_s"] * (len(row["kernels"]) - 1)
        measured = row["warm_kernels_s"] + more
        log, width = math.log(told.expected_s / measured), math.log(told.high_s / told.expected_s)
        found.append({"row": row, "log": log, "measured_s": measured, "width": width, "below_floor": False})
    return found


def table(found: list[dict[str, Any]], key: Any) -> None:
    groups = defaultdict(list)
    for e in found:
        groups[key(e["row"])].append(e)
    for name in sorted(groups, key=str):
        logs = np.array([e["log"] for e in groups[name]])
        ape = np.abs(np.exp(logs) - 1)
        inside = np.mean([abs(e["log"]) <= e["width"] for e in groups[name]])
        below = sum(e["below_floor"] for e in groups[name])
        print(
            f"{name!s:58s} n {len(logs):5d}  MAPE {ape.mean():6.1%}  median {np.median(ape):6.1%}  "
            f"bias {np.mean(np.exp(logs) - 1):+6.1%}  inside {inside:4.0%}"
            + (f"  BELOW FLOOR {below}" if below else "")
        )


FOOTPRINTS = frozenset(
    "gemm bmm attention layer_norm rms_norm softmax gelu add sum_dim0 conv2d embedding_bag cross_entropy topk sort "
    "cumsum".split()
)
ROWWISE = frozenset(
    "layer_norm rms_norm group_norm batch_norm softmax log_softmax gelu silu relu exp add mul add_ div where "
    "masked_fill pow2 cos rsqrt gelu_tanh clamp add_row mul_col cast copy fill dropout sum_dim0 sum_dim1 "
    "mean_dim1 sum_all max_dim1 argmax_dim1 norm_all cross_entropy".split()
)


def class_of(row: dict[str, Any]) -> str:
    """The classes the README reports."""
    kind, shape = row["kind"], row["shape"]
    if kind in ("gemm", "bmm"):
        problem = (shape.get("b", 1), shape["m"], shape["n"], shape["k"], shape.get("layout", "nt"))
        usual = row["dtype"] in ("bf16", "fp16", "fp8") and alignment(problem, row["dtype"]) == 8
        return "1 products, bf16 fp16 fp8, rows of 16 bytes" if usual else "5 products, other types and odd rows"
    if kind == "attention":
        return "2 attention (cuDNN, FlashAttention-2, memory-efficient)"
    if kind in ROWWISE:
        return "3 norms, softmax, losses, pointwise, reductions"
    if kind.startswith("conv"):
        grouped = 1 < shape.get("groups", 1) < shape["c"]
        return "6 convolutions in groups" if grouped else "4 convolutions, dense and depthwise"
    return "7 sort, scan, top-k, embedding, copies, optimizers, pools"


@cache
def _general(seed: int, scale: float = 0.4) -> frozenset[str]:
    """The general sample of a round (``lab/record/blind_round.py``), as text."""
    return frozenset(_text(point.kind, point.dtype, point.phase, point.shape) for point in general_points(seed, scale))


def _text(kind: str, dtype: str, phase: str, shape: dict[str, Any]) -> str:
    return json.dumps([kind, dtype, phase, shape], sort_keys=True)


def _is_general(row: dict[str, Any], seed: int) -> bool:
    if seed < FIRST_ROUND:
        return True
    return _text(row["kind"], row["dtype"], row["phase"], row["shape"]) in _general(seed)


def fitted_families(found: list[dict[str, Any]], device_name: str) -> dict[str, Any]:
    """Families whose defaults were fitted on these recordings: their own entry says so, with the error reached."""
    known = pricer_of(device(device_name)).calibration
    logs = defaultdict(list)
    for e in found:
        logs[e["family"]].append(e["log"])
    own = {k: np.exp(np.array(v)) for k, v in logs.items() if k not in ("gemm", "attention")}
    return {
        k: {
            "all": {
                "coef": dict((known.entry(k) or {}).get("coef", {})),
                "fitted": {
                    "n": len(v),
                    "mape": round(float(np.mean(np.abs(v - 1))), 4),
                    "bias": round(float(np.mean(v - 1)), 4),
                },
            }
        }
        for k, v in own.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--worst", default="")
    parser.add_argument("--warm", action="store_true", help="judge calls that find their inputs in the L2")
    parser.add_argument("--unseen", action="store_true", help="judge on shapes recorded after the models were made")
    parser.add_argument("--blind", type=int, nargs="?", const=2001, help="judge on a sample nobody opens, by class")
    parser.add_argument("--older", action="store_true", help="judge on the first blind sample, opened since")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    judges = {f"blind_seed{options.blind}": bool(options.blind), "blind_seed1003": options.older,
              "unseen_seed*": options.unseen}  # fmt: skip
    pattern = next((name for name, wanted in judges.items() if wanted), "operators_seed*")
    rows = load_operators(options.device, pattern)
    found = warm_errors(rows, options.device) if options.warm else errors(rows, pricer_of(device(options.device)))
    if not options.blind:
        table(found, lambda r: (r["kind"], r["phase"], r["library"]))
        table(found, lambda r: r["dtype"])
    table(found, class_of)
    table(found, lambda r: "all")
    if options.blind and (general := [e for e in found if _is_general(e["row"], options.blind)]) != found:
        print("without the further convolutions:")
        table(general, class_of)
        table(general, lambda r: "all")
    if options.worst and not options.blind:
        for e in sorted((e for e in found if e["row"]["kind"] == options.worst), key=lambda e: -abs(e["log"]))[:25]:
            r = e["row"]
            print(
                f"{math.exp(e['log']):.2f} {e['measured_s'] * 1e6:9.1f} us",
                r["dtype"],
                r["phase"],
                r["library"],
                r["shape"],
                [k[0][:50] for k in r["kernels"]][:3],
            )
    if options.write and not (options.warm or any(judges.values())):
        widths = intervals((e["sample"], e["busy_s"], e["log"]) for e in found)
        update_calibration(options.device, intervals=widths, families=fitted_families(found, options.device))


if __name__ == "__main__":
    main()
