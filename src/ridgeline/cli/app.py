"""The commands and their options; each hands over to a module that is loaded when it is used."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ridgeline.errors import InputError, RidgelineError, nearest

FAILED, INTERRUPTED, PIPE_CLOSED = 2, 130, 141

app = typer.Typer(
    name="ridgeline",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="How fast can your model run, how fast does it run, and why is there a gap.",
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON in SI units and nothing else.")]
On = Annotated[
    list[str],
    typer.Option("--on", help="Device, with changes if you like: 'h200 hbm_bandwidth=2x'. Repeat to compare."),
]


def run(argv: Sequence[str]) -> int:
    """Run a command line; every mistake of a user becomes one line on stderr and exit code 2."""
    try:
        _check_command(argv)
        code = typer.main.get_command(app).main(args=list(argv), prog_name="ridgeline", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except RidgelineError as error:
        return _fail(str(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the interpreter's last flush is quiet
        return PIPE_CLOSED
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except typer.Exit as error:
        return error.exit_code
    except Exception as error:
        message = _usage(error)
        if message is None:
            raise
        return _fail(message) if message else 0


def _check_command(argv: Sequence[str]) -> None:
    """An unknown command suggests the nearest, whatever the version of typer."""
    known = {command.callback.__name__ for command in app.registered_commands if command.callback}
    if argv and not argv[0].startswith("-") and argv[0] not in known:
        raise InputError(f"no command {argv[0]!r}{nearest(argv[0], known)}")


def _usage(error: Exception) -> str | None:
    """The text of an error about options and commands (their class differs between versions of typer), else None."""
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error)
        return ""
    described = getattr(error, "format_message", None)
    if described is None:
        return None
    message = described().strip().removesuffix(".")
    return message if "?" in message else f"{message}; `ridgeline --help` lists what there is"


def _fail(message: str) -> int:
    colored = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    print(f"\x1b[1;31merror:\x1b[0m {message}" if colored else f"error: {message}", file=sys.stderr)
    return FAILED


def _show_version(wanted: bool) -> None:
    if wanted:
        from ridgeline import __version__

        print(f"ridgeline {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


def _given(**options: Any) -> dict[str, Any]:
    """What was written on the command line: an option left out is the zoo's to fill in."""
    return {name: value for name, value in options.items() if value is not None}


@app.command()
def predict(
    model: Annotated[
        str, typer.Argument(help="Name of the zoo, saved graph (.json, .json.gz), or script.py:function.")
    ],
    on: On = ["h200"],  # noqa: B006  (typer reads it once)
    batch: Annotated[int | None, typer.Option(help="Samples or sequences a step.")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens a sequence.")] = None,
    kv: Annotated[int | None, typer.Option(help="Tokens already in the cache when decoding.")] = None,
    image: Annotated[int | None, typer.Option(help="Pixels a side.")] = None,
    mode: Annotated[str | None, typer.Option(help="infer, prefill, decode or train.")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp16, fp32, tf32 or fp8.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="adamw, adamw_fused, sgd or none.")] = None,
    execution: Annotated[str, typer.Option(help="eager, compiled or cudagraph.")] = "eager",
    option: Annotated[
        list[str] | None, typer.Option("--option", help="Further option of the network, as key=value.")
    ] = None,
    by: Annotated[str, typer.Option(help="Break down by op, module, phase, bound, kernel or basis.")] = "op",
    top: Annotated[int, typer.Option(min=0, help="Rows in each table.")] = 12,
    json: Json = False,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained report to this file.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a timeline for Perfetto to this file.")] = None,
) -> None:
    """Predict time, memory, energy and money of one step of a model."""
    from ridgeline.cli.predict import Wish, predict_and_show

    options = _given(batch=batch, seq=seq, kv=kv, image=image, mode=mode, precision=precision, optimizer=optimizer)
    predict_and_show(Wish(model, tuple(on), options, tuple(option or ()), execution, by, top, json, html, trace))


@app.command()
def devices(
    name: Annotated[
        str | None, typer.Argument(help="One device, with changes if you like; all of them without.")
    ] = None,
    json: Json = False,
) -> None:
    """List the devices, or every number of one with where it comes from."""
    from ridgeline.cli.catalog import show_devices

    show_devices(name, json)


@app.command()
def clusters(
    name: Annotated[
        str | None, typer.Argument(help="One cluster, such as 'h100-sxm*1024 scaleout=400Gb'; all systems without.")
    ] = None,
    json: Json = False,
) -> None:
    """List hosts, racks and pods, or every number of one cluster with where it comes from."""
    from ridgeline.cli.clusters import show_clusters

    show_clusters(name, json)


@app.command()
def models(
    name: Annotated[str | None, typer.Argument(help="One network; all of them without.")] = None,
    json: Json = False,
) -> None:
    """List the networks of the zoo, or what can be asked of one."""
    from ridgeline.cli.catalog import show_models

    show_models(name, json)


@app.command()
def calibrate(
    out: Annotated[Path, typer.Option(help="Folder for the recordings.")],
    budget_s: Annotated[float, typer.Option("--budget-s", min=10, help="Seconds to spend on operators.")] = 330.0,
    seed: Annotated[int, typer.Option(help="Which sample of shapes to measure.")] = 0,
    name: Annotated[str | None, typer.Option(help="Device that is measured; else the driver's name.")] = None,
) -> None:
    """Measure this machine's GPU (operators, host costs, power) and fit a calibration of its own."""
    from ridgeline.cli.calibrate import record_all

    record_all(out, budget_s, seed, name)


@app.command()
def validate(
    file: Annotated[
        Path,
        typer.Argument(
            help="CSV with the columns kind, dtype, phase, library, shape, measured_s and optionally cache;"
            " or a file of published results (collectives, training, inference, serving)."
        ),
    ],
    on: Annotated[str, typer.Option("--on", help="Device the operators were measured on.")] = "h200",
    worst: Annotated[int, typer.Option(min=0, help="Worst cases to list.")] = 10,
    json: Json = False,
    against: Annotated[
        str | None, typer.Option(help="Published files: list what changed since 'last', or since a date as kept.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--store/--no-store", help="Published files: keep the result to compare with later.")
    ] = True,
) -> None:
    """Compare predictions with measurements of yours, or with published results."""
    from ridgeline.cli.validate import validate_and_show

    validate_and_show(file, on, worst, json, against, keep)


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="Zoo name, hub path such as org/Model, or a config.json.")],
    on: Annotated[str, typer.Option("--on", help="Cluster, such as 'h200*8'.")] = "h200*8",
    tp: Annotated[int, typer.Option(help="Tensor-parallel width; 0 is the least that fits.")] = 0,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    ep: Annotated[int, typer.Option(help="Expert-parallel width.")] = 0,
    attention_dp: Annotated[int, typer.Option("--attention-dp", help="Groups that split the requests' attention.")] = 1,
    precision: Annotated[
        str, typer.Option(help="bf16, fp16, fp8, fp8_block, int8, int8_wo, int4_wo, nvfp4 or mxfp4.")
    ] = "",
    kv: Annotated[str, typer.Option(help="Cache in bf16, fp16, fp8 or int8.")] = "",
    engine: Annotated[
        str, typer.Option(help="vllm, sglang, trtllm, trtllm-1.1, trtllm-engine or fastertransformer.")
    ] = "vllm",
    setting: Annotated[
        list[str] | None, typer.Option("--setting", help="Engine setting, such as chunk_tokens=4096. Repeat for more.")
    ] = None,
    concurrency: Annotated[int | None, typer.Option(help="Requests kept in flight.")] = None,
    rate: Annotated[float | None, typer.Option(help="Poisson arrivals a second.")] = None,
    batch: Annotated[int | None, typer.Option(help="One static batch of this size.")] = None,
    trace_file: Annotated[Path | None, typer.Option("--trace-file", help="Recorded requests, CSV or JSONL.")] = None,
    isl: Annotated[int, typer.Option(min=1, help="Input tokens.")] = 1024,
    osl: Annotated[int, typer.Option(min=1, help="Output tokens.")] = 1024,
    requests: Annotated[int | None, typer.Option(min=1, help="How many requests in all.")] = None,
    burst: Annotated[float, typer.Option(help="Squared variation of arrival gaps; 1 is Poisson.")] = 1.0,
    ratio: Annotated[float, typer.Option(help="Lengths are drawn from this share of the nominal one up to it.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Of lengths and arrivals.")] = 0,
    disagg: Annotated[str, typer.Option(help="Prefill and decode apart: 2x4+1x8.")] = "",
    draft: Annotated[int, typer.Option(min=0, help="Speculative decoding: tokens drafted a step.")] = 0,
    accept: Annotated[float, typer.Option(min=0, max=1, help="Share of drafts accepted.")] = 0.7,
    slo_ttft: Annotated[float, typer.Option("--slo-ttft", help="Seconds to the first token.")] = float("inf"),
    slo_tpot: Annotated[float, typer.Option("--slo-tpot", help="Seconds per output token.")] = float("inf"),
    slo_e2e: Annotated[float, typer.Option("--slo-e2e", help="Seconds end to end.")] = float("inf"),
    find: Annotated[bool, typer.Option("--search", help="Find the cheapest deployment that keeps the SLO.")] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="Also show other concurrencies.")] = False,
    json: Json = False,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained report to this file.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a timeline for Perfetto to this file.")] = None,
) -> None:
    """Simulate a serving deployment: latencies, throughput, cache, energy and money under load."""
    from ridgeline.cli.serve import Load, Output, search_and_show, serve_and_show
    from ridgeline.cli.settings import settings_of
    from ridgeline.sim.serving.compose import Wanted
    from ridgeline.sim.serving.metrics import Slo

    load = Load(concurrency, rate, batch, trace_file, isl, osl, requests, burst, ratio, seed)
    wanted = Wanted(
        tp=tp, pp=pp, ep=ep, attention_dp=attention_dp, precision=precision, kv=kv, engine=engine,
        settings=settings_of(setting or []), disaggregated=disagg, draft=draft, accept_frac=accept,
    )  # fmt: skip
    show = search_and_show if find else serve_and_show
    show(model, on, load, Slo(slo_ttft, slo_tpot, slo_e2e), wanted, Output(json, html, trace, sweep))
