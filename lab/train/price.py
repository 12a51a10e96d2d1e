"""What the race's steps should take on a device, kernel by kernel beside its floor: ``python -m lab.train price``."""

from __future__ import annotations

import argparse
import re
from collections import defaultdict

import torch

from lab.train.race import MODELS
from ridgeline.cost.estimate import estimate
from ridgeline.hardware import device
from ridgeline.llm.model.config import ModelConfig
from ridgeline.llm.model.decoder import Decoder
from ridgeline.llm.train.precision import prepare_modules
from ridgeline.llm.train.recompute import set_recompute
from ridgeline.llm.train.report import captured, flops_per_token, forecast
from ridgeline.llm.train.settings import Settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--device", default="h200")
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--sequences", type=int, help="of a micro-batch and a step; the race's unless told")
    parser.add_argument("--rows", type=int, default=30)
    given = parser.parse_args()
    on = device(given.device)
    for name in given.models.split(","):
        of = MODELS[name]
        config, length, micro = ModelConfig.from_hf(of["config"]), of["length"], given.sequences or of["micro"]
        settings = Settings.of({"model": "", "out": "", "steps": 1, "data": {}, "batch": {"micro": micro},
                                "precision": {"fp8": bool(of.get("fp8"))}})  # fmt: skip

        def change(part: Decoder, settings: Settings = settings) -> None:
            prepare_modules(part, settings)
            set_recompute(part, given.recompute)

        num = (given.sequences or of["sequences"]) // micro
        whole = forecast(
            config, length, micro, num, on, torch.bfloat16, given.recompute, of["optimizer"], change=change
        )
        tokens = num * micro * length
        share = flops_per_token(config, length) * tokens / whole.step_s / on.peak_flops_per_s("tensor", "bf16")
        speed = tokens / whole.step_s
        print(f"\n{name}, {tokens:,} tokens a step: {1e3 * whole.step_s:.1f} ms, {speed:,.0f} tokens/s, "
              f"MFU {100 * share:.1f} %, {whole.peak_bytes / 1e9:.1f} GB")  # fmt: skip
        totals: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for num_layers, sign in ((1, 2 - config.num_layers), (2, config.num_layers - 1)):
            for row in estimate(
                captured(config, num_layers, length, micro, torch.bfloat16, change), on, "cudagraph"
            ).rows():
                key = re.sub(r"layers\.\d+\.?", "", row.module) or "decoder", row.op, row.phase
                totals[key][0] += sign * num * row.expected_s
                totals[key][1] += sign * num * row.floor_s
        print(f"{'ms':>9} {'floor':>9}  where")
        for (where, op, phase), (spent, floor) in sorted(totals.items(), key=lambda item: -item[1][0])[: given.rows]:
            print(f"{1e3 * spent:9.2f} {1e3 * floor:9.2f}  {where} {op} {phase}")
        update_s = whole.step_s - sum(spent for spent, _ in totals.values())
        print(f"{1e3 * update_s:9.2f} {'':9}  update, and what lies between kernels")


if __name__ == "__main__":
    main()
