"""The command ``ridgeline engine`` and its options, in Ridgeline's spelling and in trtexec's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def engine(
    action: Annotated[
        str, typer.Argument(help="build, run, bench, inspect, verify, refit, compare, convert or export-c.")
    ],
    sources: Annotated[
        list[str] | None, typer.Argument(help="Model (script.py:function, or a file), engine files, or a checkpoint.")
    ] = None,
    onnx: Annotated[str | None, typer.Option("--onnx", help="Model in ONNX, as the first argument.")] = None,
    load: Annotated[str | None, typer.Option("--loadEngine", help="Engine, as the first argument.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", "--saveEngine", help="File to write.")] = None,
    shapes: Annotated[str | None, typer.Option("--shapes", help="batch=1,8,64, or x:8x3x224x224,y:8x7.")] = None,
    dim: Annotated[list[str] | None, typer.Option("--dim", help="A dim's size, as batch=8.")] = None,
    min_shapes: Annotated[str | None, typer.Option("--minShapes", help="Smallest shapes: x:1x3x224x224.")] = None,
    opt_shapes: Annotated[str | None, typer.Option("--optShapes", help="Shapes to be fastest at.")] = None,
    max_shapes: Annotated[str | None, typer.Option("--maxShapes", help="Largest shapes.")] = None,
    error_budget: Annotated[float | None, typer.Option(help="Relative error results may have, for fewer bits.")] = None,
    fp16: Annotated[bool, typer.Option("--fp16", help="Allow an error budget of 1 %.")] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="Allow an error budget of 2 %.")] = False,
    fp8: Annotated[bool, typer.Option("--fp8", help="Allow an error budget of 5 %.")] = False,
    int8: Annotated[bool, typer.Option("--int8", help="Allow an error budget of 5 %.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Allow an error budget of 5 %.")] = False,
    budget_s: Annotated[float, typer.Option("--budget-s", help="Seconds to build.")] = 60.0,
    level: Annotated[
        int | None, typer.Option("--level", "--builderOptimizationLevel", help="0 exports, 1 times, 2 searches.")
    ] = None,
    timings: Annotated[
        Path | None, typer.Option("--timings", "--timingCacheFile", help="Timing table to read and write.")
    ] = None,
    error_on_miss: Annotated[
        bool, typer.Option("--errorOnTimingCacheMiss", help="Fail instead of measuring what the table lacks.")
    ] = False,
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:0.")] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Run device code of a file that was made elsewhere.")] = False,
    memory_limit: Annotated[str | None, typer.Option("--memory-limit", help="Most that values may need.")] = None,
    weight_budget: Annotated[
        str | None, typer.Option("--weight-budget", "--weightStreamingBudget", help="Weights held on the device.")
    ] = None,
    inputs: Annotated[str | None, typer.Option("--inputs", "--loadInputs", help="x:x.npy,y:y.npy.")] = None,
    outputs: Annotated[Path | None, typer.Option("--outputs", "--exportOutput", help="Results, as .npz.")] = None,
    iterations: Annotated[int, typer.Option("--iterations", help="Least number of calls.")] = 10,
    duration: Annotated[float, typer.Option("--duration", help="Seconds to measure.")] = 3.0,
    warmup: Annotated[float, typer.Option("--warmUp", "--warmup", help="Milliseconds before.")] = 200.0,
    anyway: Annotated[
        bool, typer.Option("--useCudaGraph", "--noDataTransfers", help="What is done anyway: inputs lie on the device.")
    ] = False,
    times: Annotated[bool, typer.Option("--times", "--dumpProfile", help="Time each step.")] = False,
    on: Annotated[str | None, typer.Option("--on", help="Device to predict for.")] = None,
    ir: Annotated[str | None, typer.Option("--ir", help="ttgir, ptx or sass of the kernels in the file.")] = None,
    kernel: Annotated[str | None, typer.Option("--kernel", help="Of this kernel.")] = None,
    to: Annotated[str, typer.Option("--to", help="onnx or compressed-tensors.")] = "onnx",
    json: Annotated[bool, typer.Option("--json", help="Print JSON in SI units and nothing else.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained page to this file.")] = None,
) -> None:
    """Build, run, bench, inspect, verify, refit and compare engines: models as one file."""
    from ridgeline.cli.engine import Asked, run_action

    first = [source for source in (onnx, load) if source]
    flags = {"fp16": fp16, "bf16": bf16, "fp8": fp8, "int8": int8, "best": best}
    asked = Asked(
        action=action, sources=(*first, *(sources or ())), out=out, error_budget=error_budget, budget_s=budget_s,
        shapes={"shapes": shapes or "", "min": min_shapes or "", "opt": opt_shapes or "", "max": max_shapes or ""},
        dims=tuple(dim or ()),
        precisions=[name for name, wanted in flags.items() if wanted], level=level, timings=timings,
        error_on_miss=error_on_miss, device=device, trust=trust, memory_limit=memory_limit,
        weight_budget=weight_budget, inputs=inputs, outputs=outputs, iterations=iterations, duration_s=duration,
        warmup_ms=warmup, times=times, on=on, ir=ir, kernel=kernel, html=html, json=json, to=to,
    )  # fmt: skip
    if code := run_action(asked):
        raise typer.Exit(code)
