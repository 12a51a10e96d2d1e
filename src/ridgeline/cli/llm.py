"""``ridgeline llm``: train a language model, say what a step will take, tokenize text, convert weights."""

from __future__ import annotations

import dataclasses
import os
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from ridgeline.errors import InputError, RidgelineError

app = typer.Typer(no_args_is_help=True, help="Train language models on our kernels.")


@app.command()
def train(
    settings: Annotated[Path, typer.Argument(help="Settings of the run (.toml).")],
    change: Annotated[
        list[str] | None, typer.Option("--set", help="Another value of a setting, such as optimizer.lr=1e-4; repeat.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Profile a steady step and list findings.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON in SI units and nothing else.")] = False,
) -> None:
    """Train a language model; every step with its speed beside the device's limit and our prediction."""
    train_and_show(settings, tuple(change or ()), explain, json)


@app.command()
def tokenize(
    text: Annotated[list[str], typer.Argument(help="Shards: .jsonl, .parquet or .txt; patterns may be quoted.")],
    tokenizer: Annotated[Path, typer.Option(help="A tokenizer.json.")],
    out: Annotated[Path, typer.Option(help="Token file to write.")],
    eos: Annotated[str, typer.Option(help="Token that ends a document; the usual one unless told.")] = "",
    column: Annotated[str, typer.Option(help="Field of JSONL, or column of parquet.")] = "text",
) -> None:
    """Write text as a token file, which training reads by memory map."""
    tokenize_and_show(text, tokenizer, out, eos, column)


@app.command()
def predict(
    settings: Annotated[Path, typer.Argument(help="Settings of the run (.toml).")],
    on: Annotated[list[str] | None, typer.Option("--on", help="A device, such as h200; repeat for several.")] = None,
    change: Annotated[list[str] | None, typer.Option("--set", help="Another value of a setting; repeat.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON in SI units and nothing else.")] = False,
) -> None:
    """Say what a step will take and need on one or several devices, with and without recomputation."""
    predict_and_show(settings, tuple(on or ("h200",)), tuple(change or ()), json)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A run, one of its checkpoints, or a Hugging Face folder.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    to: Annotated[str, typer.Option(help="hf (safetensors) or dcp (PyTorch's distributed checkpoint).")] = "hf",
) -> None:
    """Write the weights of a checkpoint in the layout of transformers, or of PyTorch's distributed checkpoints."""
    convert_and_show(source, out, dtype, to)


def train_and_show(path: Path, changes: tuple[str, ...], explain: bool, json: bool) -> None:
    """Train, print a line a step (on stderr with ``--json``), and explain a steady step if asked."""
    from ridgeline.cli import draw
    from ridgeline.llm import Settings, Trainer

    settings = Settings.load(path, dict(map(_change, changes)))
    first = os.environ.get("RANK", "0") == "0"
    trainer = Trainer(settings, lambda text: print(text, file=sys.stderr if json else sys.stdout, flush=True))
    recording: Any = None
    if explain and first:
        from ridgeline.api import profile

        recording = profile(steps=2, warmup=min(5, max(1, settings.steps // 3)))
        with recording:
            found = trainer.run(profile=recording)
    else:
        found = trainer.run()
    if not first:
        return
    if json:
        draw.print_json({
            "steps": [dataclasses.asdict(line) for line in found.steps], "evaluations": found.evaluations,
            "weights": str(found.weights) if found.weights else None, "stopped": found.stopped, "notes": found.notes,
            "forecast": dataclasses.asdict(found.forecast) if found.forecast else None,
        })  # fmt: skip
    if recording is not None:
        _show_findings(recording, json)


def predict_and_show(path: Path, devices: tuple[str, ...], changes: tuple[str, ...], json: bool) -> None:
    """A row a device and kind of recomputation, of the compute that one rank does."""
    from rich.table import Table

    from ridgeline.cli import draw
    from ridgeline.hardware import device
    from ridgeline.llm import Settings
    from ridgeline.llm.model.config import ModelConfig
    from ridgeline.llm.train.report import flops_per_token, forecasts

    settings = Settings.load(path, dict(map(_change, changes)))
    config, plan = ModelConfig.load(settings.model), settings.plan
    rows = []
    for on in map(device, devices):
        limit = on.peak_flops_per_s("tensor", "bf16") * plan.world
        for one in forecasts(settings, config, on):
            speed = settings.batch.sequences * settings.batch.length / one.step_s
            share = flops_per_token(config, settings.batch.length) * speed / limit
            rows.append({**dataclasses.asdict(one), "fits": one.fits, "tokens_per_s": speed, "mfu_frac": share})
    if json:
        draw.print_json({"forecasts": rows})
        return
    table = Table(box=None)
    for column in ("device", "recompute", "step", "tokens/s", "MFU", "memory"):
        table.add_column(column, justify="left" if column in ("device", "recompute") else "right")
    for row in rows:
        fits = "" if row["fits"] else " does not fit"
        table.add_row(row["device"], row["recompute"], f"{1e3 * row['step_s']:.1f} ms", f"{row['tokens_per_s']:,.0f}",
                      f"{100 * row['mfu_frac']:.1f} %", f"{row['peak_bytes'] / 1e9:.1f} GB{fits}")  # fmt: skip
    draw.console().print(table)
    if plan.world > 1:
        print(f"of each of {plan.world} ranks, without what they send to one another: `ridgeline simulate` adds that")


def convert_and_show(source: Path, out: Path, dtype: str, to: str) -> None:
    from ridgeline.llm.train.convert import convert

    for note in convert(source, out, dtype, to):
        print(f"note: {note}")
    print(f"weights: {out}")


def _show_findings(recording: Any, json: bool) -> None:
    from ridgeline.api import explain

    if recording.trace is None:
        print("note: too few steps to find a steady one; raise `steps`", file=sys.stderr)
        return
    try:
        found = explain(recording.trace)
    except RidgelineError as error:
        print(f"note: the recorded step cannot be explained: {error}", file=sys.stderr)
        return
    if json:
        from ridgeline.cli import draw

        draw.print_json(found.to_dict())
    else:
        from ridgeline.cli.explain import show

        show(found, 5)


def _change(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign:
        raise InputError(f"--set {text!r} is not name=value")
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value.strip()


def tokenize_and_show(text: list[str], tokenizer: Path, out: Path, eos: str, column: str) -> None:
    from ridgeline.llm.data.loader import documents_of
    from ridgeline.llm.data.tokens import fingerprint, write_token_file
    from ridgeline.llm.train.checks import tokenizer_of

    found = tokenizer_of(str(tokenizer))
    names = (
        [eos] if eos else ["<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|im_end|>", "<｜end▁of▁sentence｜>"]
    )
    end = next((i for i in map(found.token_to_id, names) if i is not None), None)
    if end is None:
        raise InputError(f"{tokenizer} has no token {eos or 'that is known to end documents'!r}: say which with --eos")
    documents = (found.encode(document, add_special_tokens=False).ids for document in documents_of(text, column))
    info = write_token_file(
        out, documents, vocab_size=found.get_vocab_size(), eos=end, tokenizer=fingerprint(tokenizer)
    )
    print(f"{out}: {info.num_tokens:,} tokens of {info.vocab_size:,}")
