"""``ridgeline llm`` as a user calls it: text to tokens, a forecast, steps, weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")

from typer.testing import CliRunner

from ridgeline.cli.llm import app
from ridgeline.errors import InputError
from ridgeline.llm.data.tokens import TokenFile


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    words = {"<eos>": 0, "the": 1, "cat": 2, "sat": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    texts = ["the cat sat", "the cat", "sat the cat sat the cat"] * 30
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = {"model_type": "llama", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 32, "eos_token_id": 0,
              "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
              "max_position_embeddings": 32}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "run.toml").write_text(
        'model = "config.json"\nout = "run"\nsteps = 2\ntokenizer = "tokenizer.json"\ndevice = "cpu"\n'
        '[data]\ntokens = "corpus.bin"\n[batch]\nlength = 16\nsequences = 2\n[precision]\ncompute = "float32"\n'
    )
    return tmp_path


def _run(*args: str) -> str:
    done = CliRunner().invoke(app, list(args), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_text_becomes_tokens_a_forecast_steps_and_weights(folder: Path) -> None:
    corpus, run = folder / "corpus.bin", str(folder / "run.toml")
    tokenizer = str(folder / "tokenizer.json")
    assert "420 tokens of 4" in _run(
        "tokenize", str(folder / "*.jsonl"), "--tokenizer", tokenizer, "--out", str(corpus)
    )
    assert TokenFile(corpus).tokens[:8].tolist() == [1, 2, 3, 0, 1, 2, 0, 3]
    pytest.importorskip("triton")
    forecast = json.loads(_run("predict", run, "--on", "h200", "--set", "recompute=none", "--json"))["forecasts"]
    assert [(row["recompute"], row["fits"]) for row in forecast] == [("none", True)]
    assert "step 2  loss" in _run("train", run, "--set", "save_dtype=float32")
    _run("convert", str(folder / "run"), str(folder / "weights"), "--dtype", "float16")
    assert (folder / "weights/model.safetensors").stat().st_size > 2000


def test_commands_say_what_is_wrong(folder: Path) -> None:
    tokenizer = str(folder / "tokenizer.json")
    with pytest.raises(InputError, match="no shards match"):
        _run("tokenize", str(folder / "b*.jsonl"), "--tokenizer", tokenizer, "--out", "x.bin")
    with pytest.raises(InputError, match="has no token '</s>'"):
        _run("tokenize", str(folder / "a.jsonl"), "--tokenizer", tokenizer, "--out", "x.bin", "--eos", "</s>")
    with pytest.raises(InputError, match="did you mean 'bfloat16'"):
        _run("convert", str(folder), str(folder / "out"), "--dtype", "bf16")
    with pytest.raises(InputError, match="name=value"):
        _run("train", str(folder / "run.toml"), "--set", "steps")
