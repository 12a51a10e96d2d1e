"""``ridgeline llm``: train a language model, tokenize text."""

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
