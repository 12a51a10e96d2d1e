"""The commands and their options; each hands over to a module that is loaded when it is used."""

from __future__ import annotations

import inspect
import io
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ridgeline.cli import llm
from ridgeline.cli.engine_options import engine
from ridgeline.errors import InputError, RidgelineError, nearest

app = typer.Typer(
    name="ridgeline",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="How fast can your model run, how fast does it run, and why is there a gap.",
    epilog="Environment: RIDGELINE_STORE (where results are kept), RIDGELINE_HOME (caches and the default store), "
    "RIDGELINE_CACHE (searches of optimize), RIDGELINE_KERNEL_CACHE, RIDGELINE_KERNEL_PACK and RIDGELINE_KERNEL_TUNING "
    "(compiled kernels and their launches), NO_COLOR (no colors).",
)
app.add_typer(llm.app, name="llm")

EXTRAS = {
    "torch": "torch", "triton": "kernels", "transformers": "hf", "timm": "hf", "diffusers": "hf", "scipy": "study",
    "pyarrow": "study", "jax": "jax", "ray": "ray", "optuna": "search", "psycopg": "postgres", "starlette": "dash",
    "uvicorn": "dash", "tokenizers": "llm",
}  # fmt: skip
"""What is installed with which extra, for a command that turns out to need it."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON in SI units and nothing else.")]


def _choose_store(url: str | None) -> str | None:
    from ridgeline.cli.keep import choose

    return choose(url)


StoreTo = Annotated[
    str | None,
    typer.Option("--store", envvar="RIDGELINE_STORE", callback=_choose_store, show_envvar=False, metavar="URL",
                 help="Keep the result: a file, postgresql://…, or 'default' [RIDGELINE_STORE]."),
]  # fmt: skip
Dims = Annotated[
    list[str] | None,
    typer.Option("--dim", help="Size of a named dim of a model file, such as batch=8. Repeat for more."),
]


def _models(incomplete: str) -> list[str]:
    """Names of the zoo, for the shell."""
    from ridgeline.models import models

    return [card.name for card in models() if card.name.startswith(incomplete)]


def _devices(incomplete: str) -> list[str]:
    from ridgeline.hardware import devices

    return [name for name in devices() if name.startswith(incomplete)]


On = Annotated[
    list[str],
    typer.Option("--on", autocompletion=_devices,
                 help="Device, with changes if you like: 'h200 hbm_bandwidth=2x'. Repeat to compare."),
]  # fmt: skip


def run(argv: Sequence[str]) -> int:
    """Run a command line; every mistake of a user becomes one line on stderr and exit code 2."""
    flags = {"-q": "quiet", "--quiet": "quiet", "-v": "verbose", "--verbose": "verbose"}
    said = {flags[word] for word in _leading(argv) if word in flags}
    rest = argv[len(_leading(argv)) :]
    command = rest[0] if rest else ""
    try:
        # An unknown command suggests the nearest, whatever the version of typer
        known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
        known |= {group.name for group in app.registered_groups if group.name}
        if command and command not in known:
            raise InputError(f"no command {command!r}{nearest(command, known)}")
        from ridgeline.cli import draw

        draw.schema_name = command
        with redirect_stderr(io.StringIO()) if "quiet" in said else nullcontext(), _timed("verbose" in said):
            code = typer.main.get_command(app).main(args=list(argv), prog_name="ridgeline", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except RidgelineError as error:
        if "verbose" in said:
            traceback.print_exception(error)
        return _fail(str(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the interpreter's last flush is quiet
        return 141  # the reader closed the pipe
    except (KeyboardInterrupt, typer.Abort):
        return 130  # interrupted, as shells say it
    except typer.Exit as error:
        return error.exit_code
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in EXTRAS:
            raise
        return _fail(f"{command} needs {library}: pip install 'ridgeline[{EXTRAS[library]}]'")
    except Exception as error:
        message = _usage(error, command)
        if message is None:
            raise
        return _fail(message) if message else 0


def _leading(argv: Sequence[str]) -> Sequence[str]:
    """The options before the command."""
    return argv[: next((i for i, word in enumerate(argv) if not word.startswith("-")), len(argv))]


@contextmanager
def _timed(wanted: bool) -> Iterator[None]:
    began_s = time.perf_counter()
    yield
    if wanted:
        print(f"took {time.perf_counter() - began_s:.2f} s", file=sys.stderr)


def _usage(error: Exception, command: str) -> str | None:
    """The text of an error about options and commands (their class differs between versions of typer), else None."""
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error)
        return ""
    described = getattr(error, "format_message", None)
    if described is None:
        return None
    message = described().strip().removesuffix(".")
    asked = f"ridgeline {command} --help" if command else "ridgeline --help"
    return message if "?" in message else f"{message}; `{asked}` lists what there is"


def _fail(message: str) -> int:
    from ridgeline.cli.draw import printable

    message, colored = printable(message), sys.stderr.isatty() and "NO_COLOR" not in os.environ
    print(f"\x1b[1;31merror:\x1b[0m {message}" if colored else f"error: {message}", file=sys.stderr)
    return 2  # a mistake of the user


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
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress, no notes: results and errors only.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Time taken; for errors, where they arose.")] = False,
) -> None:
    pass


def _given(**options: Any) -> dict[str, Any]:
    """What was written on the command line: an option left out is the zoo's to fill in."""
    return {name: value for name, value in options.items() if value is not None}


@app.command()
def predict(
    model: Annotated[
        str,
        typer.Argument(help="Name of the zoo, model file (.onnx, .pt2, …), saved graph, or script.py:function.",
                       autocompletion=_models),
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
    dim: Dims = None,
    by: Annotated[str, typer.Option(help="Break down by op, module, phase, bound, kernel or basis.")] = "op",
    top: Annotated[int, typer.Option(min=0, help="Rows in each table.")] = 12,
    json: Json = False,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained report to this file.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a timeline for Perfetto to this file.")] = None,
    store: StoreTo = None,
) -> None:
    """Predict time, memory, energy and money of one step of a model."""
    from ridgeline.cli.predict import Wish, predict_and_show
    from ridgeline.cli.source import dims_of

    options = _given(batch=batch, seq=seq, kv=kv, image=image, mode=mode, precision=precision, optimizer=optimizer)
    options |= {"dims": dims_of(dim)} if dim else {}
    predict_and_show(Wish(model, tuple(on), options, tuple(option or ()), execution, by, top, json, html, trace))


@app.command("import")
def import_model(
    file: Annotated[Path, typer.Argument(help="Model file: ONNX, .pt2, Caffe, GGUF, safetensors.")],
    check: Annotated[bool, typer.Option("--check", help="List ops and compare results with ONNX Runtime.")] = False,
    dim: Dims = None,
    save: Annotated[Path | None, typer.Option(help="Write the captured graph (.json.gz) to this file.")] = None,
    json: Json = False,
) -> None:
    """Say what an importer makes of a model file: ops, parameters, inputs with their dims, and what is missing."""
    from ridgeline.cli.importing import import_and_show
    from ridgeline.cli.source import dims_of

    if not import_and_show(file, check, dims_of(dim or ()), save, json):
        raise typer.Exit(1)


@app.command()
def devices(
    name: Annotated[
        str | None,
        typer.Argument(help="One device, with changes if you like; all of them without.", autocompletion=_devices),
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
    name: Annotated[
        str | None, typer.Argument(help="One network; all of them without.", autocompletion=_models)
    ] = None,
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
    store: StoreTo = None,
) -> None:
    """Measure this machine's GPU (operators, host costs, power) and fit a calibration of its own."""
    from ridgeline.cli.calibrate import record_all

    record_all(out, budget_s, seed, name)


@app.command()
def validate(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE…",
            help="CSV with the columns kind, dtype, phase, library, shape, measured_s and optionally cache;"
            " or a file of published results (collectives, training, inference, serving). Several give a line each.",
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
    from ridgeline.cli.keep import choose
    from ridgeline.cli.validate import Wish, validate_files

    choose(os.environ.get("RIDGELINE_STORE"))
    if validate_files(files, Wish(on, worst, json, against, keep)):
        raise typer.Exit(1)


@app.command()
def explain(
    trace_files: Annotated[
        list[str],
        typer.Argument(
            metavar="TRACE…",
            help="Kineto or Chrome JSON, Nsight Systems SQLite, a folder of ranks, memory files, or TORCH_TRACE logs.",
        ),
    ],
    on: Annotated[str | None, typer.Option("--on", help="Device, when the trace does not name it.")] = None,
    top: Annotated[int | None, typer.Option(min=0, help="Findings (5) or rows of a table (30) to print.")] = None,
    json: Json = False,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained report to this file.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write an annotated timeline for Perfetto to this file.")] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option("--what-if", help="Try a change: kernel=gemm:2x, overlap=communication, workers=4, remove=RULE…"),
    ] = None,
    table: Annotated[
        str,
        typer.Option(help="kernels, ops, modules, collectives, ranks, copies, streams, steps or waterfall, in rows."),
    ] = "",
    by: Annotated[
        list[str] | None, typer.Option(help="Group the table by this too: module, op, shapes, rank, step, stream…")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the table to this CSV file.")] = None,
    rank: Annotated[int | None, typer.Option(help="The rank to look into.")] = None,
    step: Annotated[int | None, typer.Option(help="This step alone.")] = None,
    between: Annotated[str | None, typer.Option("--range", help="A stretch of time alone: 1.2s..1.5s.")] = None,
    annotation: Annotated[str, typer.Option(help="The ranges of this name alone, each as a step.")] = "",
    model: Annotated[
        str, typer.Option(help="What was run (zoo name, saved graph, script.py:function): is more done than it needs?")
    ] = "",
    option: Annotated[list[str] | None, typer.Option(help="An option of the model, such as mode=infer.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="TRACE is a folder: explain files as they arrive.")] = False,
    store: StoreTo = None,
) -> None:
    """Explain a recorded run: where the time went, why, what to change and how much that brings."""
    from ridgeline.cli.explain import Wish, explain_and_show, watch_and_show

    wish = Wish(
        tuple(trace_files), on, top, json, html, trace, tuple(what_if or ()), table, tuple(by or ()), csv, rank, step,
        between, annotation, model, tuple(option or ()),
    )  # fmt: skip
    watch_and_show(wish) if watch else explain_and_show(wish)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(help="First run: a trace (measured, simulated, predicted) or a folder of ranks.")],
    b: Annotated[str, typer.Argument(help="Second run.")],
    top: Annotated[int, typer.Option(min=0, help="Changes to print.")] = 15,
    json: Json = False,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained report to this file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write Markdown, for a pull request, to this file.")] = None,
    store: StoreTo = None,
) -> None:
    """Compare two runs by module and op: what got slower, by how much, and why."""
    from ridgeline.cli.diff import diff_and_show

    diff_and_show(a, b, top, json, html, markdown)


@app.command()
def gate(
    baseline: Annotated[Path, typer.Option(help="Folder with a trace a run, a JSON file of step times, or store:TAG.")],
    runs: Annotated[Path, typer.Option(help="The same of the runs to judge.")],
    max_regression: Annotated[str, typer.Option("--max-regression", help="Slowdown allowed, as 3%.")] = "3%",
    json: Json = False,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained report to this file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write Markdown, for a pull request, to this file.")] = None,
    store: StoreTo = None,
) -> None:
    """Fail (exit code 1) when runs are slower than the baseline by more than allowed, and say why."""
    from ridgeline.cli.gate import gate_and_show

    raise typer.Exit(gate_and_show(baseline, runs, max_regression, json, html, markdown))


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def profile(
    target: Annotated[str, typer.Argument(help="Python script, module with -m, or model file (.onnx, .pt2, …).")],
    args: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.")] = None,
    module: Annotated[bool, typer.Option("-m", help="The target is a module, as in python -m.")] = False,
    out: Annotated[Path, typer.Option(help="Where the trace goes.")] = Path("trace.json"),
    steps: Annotated[int, typer.Option(min=1, help="Steps to record.")] = 3,
    warmup: Annotated[int | None, typer.Option(min=0, help="Steps to let pass; found by itself without.")] = None,
    step_on: Annotated[str, typer.Option(help="Count calls of package.module:function as steps.")] = "",
    stack: Annotated[
        bool, typer.Option(help="One more step with the Python stack, for lines outside of modules.")
    ] = False,
    power: Annotated[bool, typer.Option(help="Sample power and clocks beside the run.")] = True,
    memory: Annotated[bool, typer.Option(help="Record every allocation.")] = False,
    dim: Dims = None,
    top: Annotated[int, typer.Option(min=0, help="Rows in the table.")] = 12,
    json: Json = False,
    store: StoreTo = None,
) -> None:
    """Run a script and record its steady steps: shapes, modules, lines, power, with the recording's own cost."""
    from ridgeline.cli.profile import Asked, profile_and_show

    if target.startswith("-"):  # options of ours end where the script begins: one that is not ours is read as a script
        known = [f"--{name.replace('_', '-')}" for name in inspect.signature(profile).parameters]
        raise InputError(f"profile has no option {target!r}{nearest(target.split('=')[0], known)}")
    options = {"steps": steps, "warmup": warmup, "stack": stack, "power": power, "memory": memory}
    asked = Asked(target, tuple(args or ()), module, out, step_on, options, top, json, tuple(dim or ()))
    code = profile_and_show(asked)
    if code:
        raise typer.Exit(code)


@app.command()
def kernels(
    action: Annotated[str, typer.Argument(help="list, race, check, pack or tune.")] = "list",
    names: Annotated[list[str] | None, typer.Argument(help="Which kernels; all of them without.")] = None,
    out: Annotated[Path | None, typer.Option(help="File of a race, or folder of a pack.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that compile a pack.")] = 1,
    compiled: Annotated[bool, typer.Option(help="Race against torch.compile too: seconds a case.")] = True,
    json: Json = False,
    store: StoreTo = None,
) -> None:
    """List the kernels; race or check them on this GPU; compile them ahead of time; tune their launches."""
    from ridgeline.cli.kernels import run_action

    run_action(action, names or [], out, jobs, compiled, json)


app.command(name="engine")(engine)


@app.command()
def simulate(
    model: Annotated[
        str, typer.Argument(help="Name of the zoo, model file, saved training graph, or script.py:function.",
                            autocompletion=_models)
    ],
    on: Annotated[str, typer.Option("--on", help="Cluster: 'h100-sxm*16384', 'gb200*72 scaleout=800Gb'.")],
    tp: Annotated[int, typer.Option(help="Tensor parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    vp: Annotated[int, typer.Option(help="Model chunks a stage (interleaved schedule).")] = 1,
    cp: Annotated[int, typer.Option(help="Context parallel ranks.")] = 1,
    dp: Annotated[int | None, typer.Option(help="Data parallel ranks; what is left unless told.")] = None,
    ep: Annotated[int, typer.Option(help="Expert parallel ranks.")] = 1,
    etp: Annotated[int, typer.Option(help="Tensor parallel ranks of an expert.")] = 1,
    zero: Annotated[int | None, typer.Option(help="Shared out: 1 optimizer, 2 gradients, 3 parameters.")] = None,
    shard_group: Annotated[int, typer.Option("--shard-group", help="Hybrid sharding: ranks that share; 0 is all.")] = 0,
    schedule: Annotated[str | None, typer.Option(help="1f1b, gpipe, interleaved, zero-bubble or dualpipe.")] = None,
    cp_kind: Annotated[str, typer.Option("--cp-kind", help="ring or all-gather.")] = "ring",
    sequence_parallel: Annotated[bool, typer.Option("--sp/--no-sp", help="Norms and residuals split too.")] = True,
    micro_batch: Annotated[int, typer.Option("--micro-batch", help="Sequences a micro-batch.")] = 1,
    dim: Dims = None,
    global_batch: Annotated[int | None, typer.Option("--global-batch", help="Sequences a step.")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens a sequence.")] = None,
    recompute: Annotated[str, typer.Option(help="none, selective, full, or selective:mlp+layernorm.")] = "none",
    recompute_layers: Annotated[int, typer.Option("--recompute-layers", help="Only so many a stage; 0 is all.")] = 0,
    offload: Annotated[str, typer.Option(help="none, optimizer or activations.")] = "none",
    precision: Annotated[str, typer.Option(help="bf16, fp16, fp32, tf32, fp8, mxfp8 or nvfp4.")] = "bf16",
    overlap_grads: Annotated[bool, typer.Option("--overlap-grads/--no-overlap-grads")] = True,
    overlap_params: Annotated[bool, typer.Option("--overlap-params/--no-overlap-params")] = True,
    overlap_tp: Annotated[bool | None, typer.Option("--overlap-tp/--no-overlap-tp")] = None,
    overlap_ep: Annotated[bool, typer.Option("--overlap-ep/--no-overlap-ep")] = False,
    optimizer: Annotated[
        str | None,
        typer.Option(help="adamw, sgd, adamw-8bit or adamw-no-master; adamw with fp32 masters, on one device without."),
    ] = None,
    attention: Annotated[str, typer.Option(help="Attention library: cudnn, fa2 or fa3.")] = "",
    execution: Annotated[str | None, typer.Option(help="eager, compiled (fused kernels) or cudagraph.")] = None,
    dispatch: Annotated[str | None, typer.Option(help="Tokens to experts: all-to-all, drop, deep, hybrid.")] = None,
    replayed: Annotated[bool, typer.Option("--replayed", help="Whole steps are one recorded graph.")] = False,
    imbalance: Annotated[float, typer.Option(help="Rows of the busiest expert rank over the mean.")] = 1.0,
    stack: Annotated[str, typer.Option(help="Software generation; the newest fitted on the device unless told.")] = "",
    tokens: Annotated[str | None, typer.Option(help="Whole run of so many tokens: 15T.")] = None,
    straggler: Annotated[float, typer.Option(help="One rank computes so many times slower.")] = 1.0,
    slow_link: Annotated[float, typer.Option("--slow-link", help="Links of one stage are so many times slower.")] = 1.0,
    at_stage: Annotated[int, typer.Option("--at-stage", help="Stage of the straggler or the slow link.")] = 0,
    json: Json = False,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained report to this file.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a timeline for Perfetto to this file.")] = None,
    store: StoreTo = None,
) -> None:
    """Simulate a training step on a cluster: time, MFU, memory, communication, bubble, energy and money."""
    from ridgeline.cli.simulate import Wish, simulate_and_show

    choices = _given(
        tp=tp, pp=pp, vp=vp, cp=cp, ep=ep, etp=etp, shard_group=shard_group, cp_kind=cp_kind, dp=dp, zero=zero,
        sequence_parallel=sequence_parallel, micro_batch=micro_batch, recompute=recompute, offload=offload,
        recompute_layers=recompute_layers,
        precision=precision, overlap_grads=overlap_grads, overlap_params=overlap_params, overlap_ep=overlap_ep,
        optimizer=optimizer, attention=attention, expert_imbalance=imbalance, schedule=schedule, dispatch=dispatch,
        global_batch=global_batch, overlap_tp=overlap_tp, execution=execution, replayed=replayed,
    )  # fmt: skip
    wish = Wish(model, on, choices, seq, stack, tokens, straggler, slow_link, at_stage, json, html, trace)
    simulate_and_show(replace(wish, dims=tuple(dim or ())))


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="Name of the zoo, or a model file.", autocompletion=_models)],
    on: Annotated[str, typer.Option("--on", help="Cluster: 'h100-sxm*1024'.")],
    dim: Dims = None,
    global_batch: Annotated[int, typer.Option("--global-batch", help="Sequences a step.")] = 1024,
    seq: Annotated[int | None, typer.Option(help="Tokens a sequence.")] = None,
    precision: Annotated[str, typer.Option(help="bf16, fp16, fp32, fp8, mxfp8 or nvfp4.")] = "bf16",
    stack: Annotated[str, typer.Option(help="Software generation; the newest fitted on the device unless told.")] = "",
    tp: Annotated[list[int] | None, typer.Option(help="Only these; repeat for several.")] = None,
    pp: Annotated[list[int] | None, typer.Option(help="Only these.")] = None,
    cp: Annotated[list[int] | None, typer.Option(help="Only these.")] = None,
    ep: Annotated[list[int] | None, typer.Option(help="Only these.")] = None,
    vp: Annotated[list[int] | None, typer.Option(help="Only these.")] = None,
    micro_batch: Annotated[list[int] | None, typer.Option("--micro-batch", help="Only these.")] = None,
    zero: Annotated[list[int] | None, typer.Option(help="Only these; 1 and 3 unless told.")] = None,
    recompute: Annotated[list[str] | None, typer.Option(help="Only these.")] = None,
    schedule: Annotated[list[str] | None, typer.Option(help="Schedules without chunks; 1f1b unless told.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Plans to show.")] = 5,
    json: Json = False,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained report to this file.")] = None,
    store: StoreTo = None,
) -> None:
    """Search the legal parallel plans of a model on a cluster: the best few, why they win, what matters."""
    from ridgeline.cli.plan import Wish, plan_and_show

    space = {
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "ep": ep,
        "vp": vp,
        "micro_batch": micro_batch,
        "zero": zero,
        "recompute": recompute,
        "schedule": schedule,
    }
    chosen = {name: tuple(values or ()) for name, values in space.items()}
    plan_and_show(Wish(model, on, global_batch, seq, precision, stack, chosen, top, json, html, tuple(dim or ())))


@app.command()
def serve(
    model: Annotated[
        str, typer.Argument(help="Zoo name, hub path such as org/Model, or a config.json.", autocompletion=_models)
    ],
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
        str,
        typer.Option(
            help="vllm, vllm-0.17, vllm-0.11, sglang, sglang-0.5.6, trtllm, trtllm-1.1, trtllm-engine or "
            "fastertransformer."
        ),
    ] = "vllm",
    setting: Annotated[
        list[str] | None, typer.Option("--setting", help="Engine setting, such as chunk_tokens=4096. Repeat for more.")
    ] = None,
    concurrency: Annotated[int | None, typer.Option(help="Requests kept in flight.")] = None,
    rate: Annotated[float | None, typer.Option(help="Poisson arrivals a second.")] = None,
    users: Annotated[
        int | None, typer.Option(min=1, help="With --search: the fewest devices for so many requests in flight.")
    ] = None,
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
    store: StoreTo = None,
) -> None:
    """Simulate a serving deployment: latencies, throughput, cache, energy and money under load."""
    from ridgeline.cli.serve import Load, Output, search_and_show, serve_and_show
    from ridgeline.cli.settings import settings_of
    from ridgeline.sim.serving.compose import Wanted
    from ridgeline.sim.serving.metrics import Slo

    load = Load(concurrency, rate, batch, trace_file, isl, osl, requests, burst, ratio, seed, users)
    wanted = Wanted(
        tp=tp, pp=pp, ep=ep, attention_dp=attention_dp, precision=precision, kv=kv, engine=engine,
        settings=settings_of(setting or []), disaggregated=disagg, draft=draft, accept_frac=accept,
    )  # fmt: skip
    show = search_and_show if find else serve_and_show
    show(model, on, load, Slo(slo_ttft, slo_tpot, slo_e2e), wanted, Output(json, html, trace, sweep))


@app.command()
def optimize(
    source: Annotated[
        str,
        typer.Argument(
            help="Model file, script.py:function that returns (model, args, kwargs), or a receipt (.json) to draw."
        ),
    ],
    dim: Dims = None,
    mode: Annotated[str, typer.Option(help="infer or train.")] = "infer",
    budget_s: Annotated[float, typer.Option("--budget-s", help="Seconds to search.")] = 120.0,
    error_budget: Annotated[
        float | None,
        typer.Option(help="Relative error results may have, for fewer bits: 0.01 is 1 %; none unless said."),
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option("--memory-limit", help="Such as '40 GB'; in training what eager needs unless told.")
    ] = None,
    cache: Annotated[bool, typer.Option("--cache/--no-cache", help="Use and keep searches on disk.")] = True,
    json: Json = False,
    html: Annotated[Path | None, typer.Option(help="Write the receipt as a self-contained page to this file.")] = None,
    store: StoreTo = None,
) -> None:
    """Make a model faster with proof: search, verify, measure, explain; never slower, never silently wrong."""
    from ridgeline.cli.optimize import Asked, draw_receipt, optimize_and_show

    if source.endswith(".json"):
        draw_receipt(Path(source), html)
    else:
        dims = tuple(dim or ())
        optimize_and_show(Asked(source, mode, budget_s, memory_limit, error_budget, cache, json, html, dims))


@app.command()
def store(
    action: Annotated[str, typer.Argument(help="show, init, migrate, check, import, export, gc or tag.")] = "show",
    words: Annotated[list[str] | None, typer.Argument(help="Files to import; or a run and its tag.")] = None,
    url: Annotated[str | None, typer.Option("--store", help="File or postgresql://…; else RIDGELINE_STORE.")] = None,
    lines: Annotated[Path | None, typer.Option(help="Export everything as JSON lines that import reads.")] = None,
    parquet: Annotated[Path | None, typer.Option(help="Export tables as Parquet to this folder.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Export tables as CSV to this folder.")] = None,
    json: Json = False,
) -> None:
    """Look after the store of predictions, measurements and studies."""
    from ridgeline.cli.store import Asked, run_action

    code = run_action(Asked(action=action, words=tuple(words or ()), url=url, parquet=parquet, csv=csv, lines=lines,
                            json=json))  # fmt: skip
    if code:
        raise typer.Exit(code)


@app.command()
def history(
    subject: Annotated[str | None, typer.Argument(help="Model, script or trace; all of them without.")] = None,
    metric: Annotated[str, typer.Option(help="Which number; time of a step unless told.")] = "",
    on: Annotated[str, typer.Option("--on", help="Only this device.")] = "",
    kind: Annotated[str, typer.Option(help="Only predict, simulate, serve, profile, optimize, …")] = "",
    max_regression: Annotated[str, typer.Option("--max-regression", help="Change for the worse allowed.")] = "3%",
    top: Annotated[int, typer.Option(min=1, help="Rows to show.")] = 20,
    url: Annotated[str | None, typer.Option("--store", help="File or postgresql://…")] = None,
    json: Json = False,
) -> None:
    """List what is kept, or one number over time with its changes; exit code 1 when the newest is a regression."""
    from ridgeline.cli.history import Asked, show_history

    code = show_history(Asked(subject=subject, metric=metric, device=on, kind=kind, max_regression=max_regression,
                              top=top, url=url, json=json))  # fmt: skip
    if code:
        raise typer.Exit(code)


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(help="Ids, tags, or subjects (their newest run).")],
    metric: Annotated[list[str] | None, typer.Option(help="Only these numbers; repeat for several.")] = None,
    url: Annotated[str | None, typer.Option("--store", help="File or postgresql://…")] = None,
    json: Json = False,
) -> None:
    """Put stored runs side by side, with ratios to the first."""
    from ridgeline.cli.compare import compare_and_show

    compare_and_show(runs, metric or [], url, json)


@app.command()
def study(
    words: Annotated[
        list[str],
        typer.Argument(metavar="MODEL|SPEC|ACTION…", help="Zoo name, spec.toml, or list, show, why, export, rm."),
    ],
    on: Annotated[str, typer.Option("--on", help="Device or cluster the study begins from.")] = "h200",
    vary: Annotated[list[str] | None, typer.Option(help="Axis: sms=100..240/4, l2=1x..4x, batch=1,2,4,…,512.")] = None,
    minimize: Annotated[list[str] | None, typer.Option(help="Objective, such as usd_per_mtoken.")] = None,
    maximize: Annotated[list[str] | None, typer.Option(help="Objective to make large.")] = None,
    subject_to: Annotated[
        list[str] | None, typer.Option("--subject-to", help="Condition, such as 'fits and tpot<40ms'.")
    ] = None,
    option: Annotated[list[str] | None, typer.Option("--option", help="What is fixed: mode=decode, tp=8.")] = None,
    keep: Annotated[list[str] | None, typer.Option("--keep", help="Further measures to keep of every point.")] = None,
    evaluator: Annotated[str, typer.Option(help="predict, simulate or serve.")] = "predict",
    execution: Annotated[str, typer.Option(help="eager, compiled or cudagraph.")] = "eager",
    budget: Annotated[float, typer.Option(help="Points at most.")] = 10_000,
    sampler: Annotated[str, typer.Option(help="auto, grid, random, sobol, nsga2 or optuna.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of the samplers.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    ray: Annotated[str, typer.Option(help="Ray cluster: local, auto or host:port.")] = "",
    url: Annotated[str | None, typer.Option("--store", help="File or postgresql://…; else RIDGELINE_STORE.")] = None,
    name: Annotated[str, typer.Option(help="What to keep it as.")] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what was interrupted.")] = False,
    sure: Annotated[bool, typer.Option("--sure", help="Also points beaten only within their intervals.")] = False,
    top: Annotated[int, typer.Option(min=1, help="Rows to show.")] = 15,
    csv: Annotated[Path | None, typer.Option(help="Write all points to this CSV file.")] = None,
    parquet: Annotated[Path | None, typer.Option(help="Write all points to this Parquet file.")] = None,
    json: Json = False,
) -> None:
    """Explore designs: sweep chips, models, plans and prices; frontier, sensitivities, reasons."""
    from ridgeline.cli.study import Asked, options_of, run_study

    code = run_study(Asked(
        words=tuple(words), on=on, evaluator=evaluator, execution=execution, options=options_of(option or []),
        vary=tuple(vary or ()), minimize=tuple(minimize or ()), maximize=tuple(maximize or ()),
        subject_to=tuple(subject_to or ()), keep=tuple(keep or ()), budget=int(budget), sampler=sampler, seed=seed,
        workers=workers, ray=ray, url=url, name=name, resume=resume, sure=sure, top=top, csv=csv, parquet=parquet,
        json=json,
    ))  # fmt: skip
    if code:
        raise typer.Exit(code)


@app.command()
def dash(
    url: Annotated[str | None, typer.Option("--store", help="File or postgresql://…; else RIDGELINE_STORE.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8750,
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback need a token.")] = "127.0.0.1",
    token: Annotated[
        str, typer.Option(envvar="RIDGELINE_DASH_TOKEN", show_envvar=False,
                          help="What a browser must show [RIDGELINE_DASH_TOKEN].")
    ] = "",
) -> None:
    """Look at a store in a browser: runs, studies, receipts, what-if. Local, and writes nothing."""
    from ridgeline.cli.draw import console
    from ridgeline.web.dash.app import serve

    serve(url, host, port, token, lambda text: console().print(text, highlight=False, markup=False, soft_wrap=True))


@app.command()
def schema(
    command: Annotated[str, typer.Argument(help="Command; without one, those that have a schema.")] = "",
) -> None:
    """Print the JSON schema of what a command prints with --json."""
    folder = Path(__file__).parent / "schemas"
    known = sorted(path.stem for path in folder.glob("*.json"))
    if command and command not in known:
        raise InputError(f"no schema {command!r}{nearest(command, known)}")
    print((folder / f"{command}.json").read_text(encoding="utf-8").strip() if command else "\n".join(known))


@app.command()
def price(
    device: Annotated[str, typer.Argument(help="Device, with changes if you like: 'h200 sms=160 hbm_bandwidth=2x'.")],
    assume: Annotated[list[str] | None, typer.Option("--assume", help="An assumption: margin=0.5.")] = None,
    as_: Annotated[str, typer.Option("--as", help="vendor-price, cost-plus or internal.")] = "vendor-price",
    top: Annotated[int, typer.Option(min=0, help="Assumptions to list.")] = 8,
    json: Json = False,
    store: StoreTo = None,
) -> None:
    """Price a chip, real or imagined: area, yield, bill of materials, dollars an hour, carbon, with intervals."""
    from ridgeline.cli.price import price_and_show
    from ridgeline.cli.settings import settings_of

    price_and_show(device, settings_of(assume or []), as_, top, json)
