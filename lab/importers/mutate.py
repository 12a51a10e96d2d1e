"""Damaged and hostile model files: each must end in one of our errors, or in a module, within bounded time and memory.

    python lab/importers/mutate.py [--num 10000] [--formats onnx,pt2,…] [--seed 0]

A seed file of each format is made here; every mutation flips bits, cuts, repeats, or puts extreme numbers in.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from ridgeline.errors import RidgelineError


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3)
        self.line = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.line(torch.relu(self.conv(x)).mean((2, 3))), -1)


def onnx_seed(folder: Path) -> bytes:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = torch.Generator().manual_seed(0)
    w = numpy_helper.from_array(torch.randn(8, 3, 3, 3, generator=rng).numpy(), "w")
    shape = numpy_helper.from_array(torch.tensor([0, -1]).numpy(), "shape")
    branch = helper.make_graph(
        [helper.make_node("Relu", ["c"], ["t"])], "then", [], [helper.make_tensor_value_info("t", 1, None)]
    )
    other = helper.make_graph(
        [helper.make_node("Neg", ["c"], ["e"])], "else", [], [helper.make_tensor_value_info("e", 1, None)]
    )
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Constant", [], ["yes"], value=helper.make_tensor("v", TensorProto.BOOL, [], [True])),
        helper.make_node("If", ["yes"], ["r"], then_branch=branch, else_branch=other),
        helper.make_node("Resize", ["r", "", "s"], ["z"], mode="linear"),
        helper.make_node("Constant", [], ["s"], value_floats=[1.0, 1.0, 2.0, 2.0]),
        helper.make_node("Reshape", ["z", "shape"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", 1, ["batch", 3, 8, 8])],
                              [helper.make_tensor_value_info("y", 1, None)], [w, shape])  # fmt: skip
    return onnx.helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]).SerializeToString()


def pt2_seed(folder: Path) -> bytes:
    path = folder / "seed.pt2"
    torch.export.save(torch.export.export(Net().eval(), (torch.randn(2, 3, 8, 8),)), path)
    return path.read_bytes()


PROTOTXT = b"""name: "net" # a comment
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 8 kernel_size: 3 pad: 1 stride: 1 group: 1 } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "pool" type: "Pooling" bottom: "conv" top: "pool" pooling_param { pool: AVE kernel_size: 2 stride: 2 } }
layer { name: "fc" type: "InnerProduct" bottom: "pool" top: "fc" inner_product_param { num_output: 5 } }
layer { name: "prob" type: "Softmax" bottom: "fc" top: "prob" }
"""


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field of protobuf."""
    out = bytearray()
    for value in (number << 3 | 2, len(content)):
        while value > 0x7F:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
    return bytes(out) + content


def caffemodel_seed(folder: Path) -> bytes:
    (folder / "model.prototxt").write_bytes(PROTOTXT)

    def blob(*dims: int) -> bytes:
        values = torch.arange(torch.Size(dims).numel(), dtype=torch.float32) / 100
        return field(7, field(5, values.numpy().tobytes()) + field(7, field(1, bytes(dims))))

    layers = [("conv", blob(8, 3, 3, 3) + blob(8)), ("fc", blob(5, 127)[:0] + field(7, field(5, b"\0" * 4 * 640)
               + field(7, field(1, b"\x05\x80\x01"))) + blob(5))]  # fmt: skip
    return b"".join(field(100, field(1, name.encode()) + blobs) for name, blobs in layers)


def gguf_seed(folder: Path) -> bytes:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, 2, 2)
    head += text("general.architecture") + struct.pack("<I", 8) + text("llama")
    head += text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b")
    for name, dims, kind, at in (("a.weight", (32, 4), 2, 0), ("b.weight", (8,), 0, 96)):
        head += (
            text(name)
            + struct.pack("<I", len(dims))
            + struct.pack(f"<{len(dims)}Q", *dims)
            + struct.pack("<IQ", kind, at)
        )
    return head + b"\0" * 256


def safetensors_seed(folder: Path) -> bytes:
    header = {"a": {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]},
              "b": {"dtype": "BF16", "shape": [16], "data_offsets": [128, 160]}}  # fmt: skip
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"\0" * 160


MLIR = b"""module @jit_f {
  func.func public @main(%arg0: tensor<4x8xf32>) -> (tensor<4x8xf32>) {
    %cst = stablehlo.constant dense<5.000000e-01> : tensor<4x8xf32>
    %w = stablehlo.constant dense<"0x0000803F000000400000404000008040"> : tensor<2x2xf32>
    %0 = stablehlo.dot_general %arg0, %arg0, contracting_dims = [1] x [1] : (tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<4x4xf32>
    %1 = stablehlo.tanh %0 : tensor<4x4xf32>
    %2 = stablehlo.dot_general %1, %arg0, contracting_dims = [1] x [0] : (tensor<4x4xf32>, tensor<4x8xf32>) -> tensor<4x8xf32>
    %3 = stablehlo.slice %2 [0:2, 0:8:2] : (tensor<4x8xf32>) -> tensor<2x4xf32>
    %4 = stablehlo.broadcast_in_dim %3, dims = [0, 1] : (tensor<2x4xf32>) -> tensor<2x4xf32>
    %5 = stablehlo.multiply %2, %cst : tensor<4x8xf32>
    return %5 : tensor<4x8xf32>
  }
}
"""  # noqa: E501


SEEDS: dict[str, tuple[str, Callable[[Path], bytes]]] = {
    "onnx": ("model.onnx", onnx_seed), "pt2": ("model.pt2", pt2_seed),
    "prototxt": ("net.prototxt", lambda folder: PROTOTXT), "caffemodel": ("model.caffemodel", caffemodel_seed),
    "gguf": ("model.gguf", gguf_seed), "safetensors": ("model.safetensors", safetensors_seed),
    "mlir": ("net.mlir", lambda folder: MLIR),
}  # fmt: skip


def mutated(seed: bytes, rng: random.Random) -> bytes:
    """One to eight changes to a file."""
    out = bytearray(seed)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        if not out:
            break
        at, how = rng.randrange(len(out)), rng.randrange(8)
        if how == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            out[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif how == 2:
            del out[at:]
        elif how == 3:
            del out[at : at + rng.randrange(1, 64)]
        elif how == 4:
            end = min(at + rng.randrange(1, 200), len(out))
            out[at:at] = out[at:end]
        elif how == 5:
            out[at : at + 8] = rng.choice((b"\xff" * 8, b"\xff" * 7 + b"\x7f", b"\0" * 8))
        elif how == 6:
            out[at:at] = rng.randbytes(rng.randrange(1, 16))
        else:
            digits = [i for i, byte in enumerate(out) if 48 <= byte <= 57]
            if digits:
                i = rng.choice(digits)
                out[i : i + 1] = rng.choice((b"-1", b"0", b"99999999999999999999", b"1e400", b"4294967296"))
    return bytes(out)


def verdict(path: Path) -> str:
    """``loaded``, ``refused``, or what went wrong."""
    import ridgeline as rl

    try:
        model = rl.load(path)
        if model.import_format in ("onnx", "torch.export", "caffe", "stablehlo"):
            rl.capture(model, bindings=dict.fromkeys(model.dims, 2))
    except RidgelineError:
        return "refused"
    except MemoryError:
        return "memory"
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {str(error)[:100]}"
    return "loaded"


def campaign(form: str, num: int, seed: int, folder: Path) -> tuple[Counter[str], float]:
    """Verdicts of mutations, and the CPU time of the slowest."""
    name, make = SEEDS[form]
    original = make(folder)
    rng = random.Random(f"{form}{seed}")
    (folder / name).write_bytes(original)
    verdict(folder / name)  # libraries are imported once, and not by a mutation
    found: Counter[str] = Counter()
    slowest = 0.0
    for _ in range(num):
        path = folder / name
        path.write_bytes(mutated(original, rng))
        began = time.process_time()
        result = verdict(path)
        slowest = max(slowest, time.process_time() - began)
        if result not in ("loaded", "refused") and found[result] == 0:
            (folder.parent / f"failed-{form}-{len(found)}{path.suffix}").write_bytes(path.read_bytes())
        found[result] += 1
    return found, slowest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=10_000)
    parser.add_argument("--formats", default=",".join(SEEDS))
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    bad = 0
    for form in asked.formats.split(","):
        with tempfile.TemporaryDirectory() as folder:
            found, slowest = campaign(form, asked.num, asked.seed, Path(folder))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        print(f"{form}: {dict(found)}; slowest {slowest:.2f} s CPU; peak {peak:,.0f} MB", flush=True)
        bad += sum(num for what, num in found.items() if what not in ("loaded", "refused"))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
