"""Model files of every format under the commands that take a model."""

from __future__ import annotations

import json
import struct

import pytest
from typer.testing import CliRunner

from ridgeline.cli.app import app

torch = pytest.importorskip("torch")


def pt2(folder):
    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    dims = ({0: torch.export.Dim("batch", max=64)},)
    torch.export.save(torch.export.export(net, (torch.randn(4, 16),), dynamic_shapes=dims), folder / "net.pt2")
    return folder / "net.pt2", ["--dim", "batch=8"]


def caffe(folder):
    (folder / "net.prototxt").write_text("""
input: "data" input_dim: 2 input_dim: 3 input_dim: 8 input_dim: 8
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv" convolution_param { num_output: 4 kernel_size: 3 } }
layer { name: "fc" type: "InnerProduct" bottom: "conv" top: "fc" inner_product_param { num_output: 5 } }
""")
    return folder / "net.prototxt", []


def gguf(folder):
    text = lambda word: struct.pack("<Q", len(word)) + word.encode()
    facts = {"block_count": 2, "attention.head_count": 4, "attention.head_count_kv": 2}
    names = {"token_embd": (64, 32), "output_norm": (32,)}
    for i in range(2):
        names |= {f"blk.{i}.attn_q": (32, 32), f"blk.{i}.attn_k": (16, 32), f"blk.{i}.attn_v": (16, 32),
                  f"blk.{i}.attn_output": (32, 32), f"blk.{i}.ffn_gate": (64, 32), f"blk.{i}.ffn_up": (64, 32),
                  f"blk.{i}.ffn_down": (32, 64), f"blk.{i}.attn_norm": (32,), f"blk.{i}.ffn_norm": (32,)}  # fmt: skip
    head = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    head += b"".join(text(f"llama.{key}") + struct.pack("<II", 4, value) for key, value in facts.items())
    at = 0
    for name, dims in names.items():
        head += text(name + ".weight") + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims[::-1], 1, at)
        at += 2 * torch.Size(dims).numel()
    path = folder / "net.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, len(names), 1 + len(facts)) + head + b"\0" * at)
    return path, ["--seq", "16"]


def done(*args):
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


@pytest.mark.parametrize("make", [pt2, caffe, gguf])
def test_a_model_file_is_predicted(make, tmp_path):
    path, sizes = make(tmp_path)
    assert json.loads(done("predict", path, "--on", "h200", *sizes, "--json"))["expected_s"] > 0


@pytest.mark.parametrize("make", [pt2, caffe])
def test_a_model_file_is_simulated_and_becomes_an_engine_that_runs(make, tmp_path):
    path, sizes = make(tmp_path)
    assert json.loads(done("simulate", path, "--on", "h200*8", *sizes, "--json"))["step_s"] > 0
    engine = tmp_path / "net.rle"
    done("engine", "build", path, "-o", engine, *sizes, "--level", "0")
    assert "float32" in done("engine", "run", engine)
