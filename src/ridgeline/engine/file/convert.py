"""An engine's narrow weights in other formats: compressed-tensors, which vLLM reads, and ONNX with Q/DQ nodes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ridgeline.engine.file import tensors
from ridgeline.engine.file.program import Program, Step, leaves
from ridgeline.errors import EngineError, MissingExtra

if TYPE_CHECKING:
    from ridgeline.engine.file.engine import Engine


def to_compressed_tensors(engine: Engine, folder: str | os.PathLike[str]) -> list[Path]:
    """Write ``model.safetensors`` and a ``config.json`` with a quantization_config.

    Layers of signed bytes are written as weights and scales an output (int-quantized), those of four bits packed eight
    to an int32 (pack-quantized). Scales of channels that were folded for the activations stay in the engine: a layer
    that has them is refused.
    """
    program, held = engine.contents.programs[-1], engine.contents.weights
    made, groups = dict[str, Tensor](), dict[str, list[str]]()
    narrow = set[str]()
    for step in program.steps:
        if step.op not in ("engine::int8_linear", "engine::int4_linear"):
            continue
        names = [a["w"] if isinstance(a, dict) and "w" in a else None for a in step.args]
        source = str(names[1]).rpartition(".int")[0].removesuffix(".weight")
        narrow |= {name for name in names[1:4] if name}
        q, scale = held[str(names[1])], held[str(names[2])]
        if step.op == "engine::int8_linear":
            inverse = held[str(names[3])]
            if inverse.numel() > 1 and float(inverse.max() / inverse.min()) > 1 + 1e-5:
                raise EngineError(f"{source}: its input channels are scaled (SmoothQuant), which compressed-tensors "
                                  "cannot say: build with objective='size' for weights alone")  # fmt: skip
            made |= {f"{source}.weight": q, f"{source}.weight_scale": (scale * inverse.mean()).unsqueeze(1)}
            groups.setdefault("int8", []).append(source)
        elif names[3] is not None or (len(step.args) > 5 and step.args[5]):
            raise EngineError(f"{source}: its channels are scaled or rotated, which compressed-tensors cannot say")
        else:
            made |= packed_int4(source, q, scale)
            groups.setdefault("int4", []).append(source)
    for name, tensor in held.items():
        if name not in narrow and name not in engine.contents.constants:
            made[name] = tensor
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
        with (target / "model.safetensors").open("wb") as file:
            for part in tensors.pack(made, {"format": "pt"}):
                file.write(part)
        config = {"quantization_config": quantization_config(groups)}
        (target / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True), encoding="utf-8")
    except OSError as error:
        raise EngineError(f"cannot write {target}: {error.strerror or error}") from error
    return [target / "model.safetensors", target / "config.json"]


def packed_int4(source: str, weight: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """Four bits, unsigned with an offset of 8, eight to an int32 along a row."""
    low, high = (weight & 15).to(torch.int64), (weight >> 4).to(torch.int64)
    q = torch.stack((low, high), -1).reshape(weight.shape[0], -1, 8)
    words = (q << torch.arange(0, 32, 4)).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    shape = torch.tensor([weight.shape[0], 2 * weight.shape[1]], dtype=torch.int64)
    return {f"{source}.weight_packed": words, f"{source}.weight_scale": scale, f"{source}.weight_shape": shape}


def quantization_config(groups: Mapping[str, list[str]]) -> dict[str, Any]:
    made = {}
    for place, (name, layers) in enumerate(sorted(groups.items())):
        four = name == "int4"
        weights = {"num_bits": 4 if four else 8, "type": "int", "symmetric": True, "dynamic": False,
                   "strategy": "group" if four else "channel", "group_size": 32 if four else None}  # fmt: skip
        made[f"group_{place}"] = {"targets": layers, "weights": weights, "input_activations": None}
    form = (
        "mixed-precision"
        if len(groups) > 1
        else {"int4": "pack-quantized"}.get(next(iter(groups), ""), "int-quantized")
    )
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": made, "ignore": [],
            "quantization_status": "compressed"}  # fmt: skip


def to_qdq_onnx(engine: Engine, path: str | os.PathLike[str]) -> Path:
    """Write the program as ONNX, opset 17, products of bytes as Q/DQ pairs around MatMul. Programs of products, norms,
    activations, additions and reshapes are written; another op is an error that names it."""
    try:
        import onnx
        from onnx import TensorProto, helper, numpy_helper
    except ImportError:
        raise MissingExtra("onnx", "onnx", "writing ONNX") from None
    program = engine.contents.programs[-1]
    writer = _Writer(program, engine.contents.weights, helper, numpy_helper, TensorProto)
    for step in program.steps:
        writer.step(step)
    model = helper.make_model(writer.graph(engine.name), opset_imports=[helper.make_opsetid("", 20)], ir_version=9,
                              producer_name="ridgeline")  # fmt: skip
    onnx.checker.check_model(model)
    onnx.save(model, os.fspath(path))
    return Path(path)


class _Writer:
    """From steps to nodes."""

    UNARY = {
        "relu": "Relu",
        "sigmoid": "Sigmoid",
        "tanh": "Tanh",
        "exp": "Exp",
        "sqrt": "Sqrt",
        "neg": "Neg",
        "erf": "Erf",
    }
    BINARY = {"add": "Add", "mul": "Mul", "sub": "Sub", "div": "Div"}

    def __init__(self, program: Program, weights: Mapping[str, Tensor], helper: Any, arrays: Any, kinds: Any) -> None:
        self.program, self.weights = program, weights
        self.helper, self.arrays, self.kinds = helper, arrays, kinds
        self.nodes, self.held = list[Any](), dict[str, Any]()
        self.names = {i: given.name for i, given in enumerate(program.inputs)}

    def name(self, value: Any) -> str:
        if isinstance(value, dict) and "v" in value:
            return self.names[value["v"]]
        if isinstance(value, dict) and "w" in value:
            return self.constant(value["w"], self.weights[value["w"]])
        raise EngineError("an argument that is no tensor stands where ONNX takes one")

    def constant(self, name: str, value: Tensor) -> str:
        if name not in self.held:
            self.held[name] = self.arrays.from_array(value.detach().cpu().contiguous().numpy(), name)
        return name

    def number(self, name: str, value: float) -> str:
        return self.constant(name, torch.tensor(value, dtype=torch.float32))

    def node(self, kind: str, inputs: list[str], out: str, **attributes: Any) -> str:
        self.nodes.append(self.helper.make_node(kind, inputs, [out], name=f"{kind}_{len(self.nodes)}", **attributes))
        return out

    def step(self, step: Step) -> None:
        out = f"v{step.out[0]}" if step.out else ""
        base = step.op.partition("::")[2].partition(".")[0]
        args = list(step.args)
        if step.op == "engine::int8_linear":
            self.int8(step, out)
        elif base in ("linear", "bf16_linear") and isinstance(args[1], dict) and "w" in args[1]:
            weight = self.weights[args[1]["w"]].float()
            y = self.node(
                "MatMul", [self.name(args[0]), self.constant(args[1]["w"] + ".t", weight.t())], out + ".product"
            )
            bias = args[2] if len(args) > 2 else None
            held = self.constant(f"{bias['w']}.f", self.weights[bias["w"]].float()) if bias else None
            self.node("Add", [y, held], out) if held else self.node("Identity", [y], out)
        elif base in self.UNARY and step.op.startswith("aten::"):
            self.node(self.UNARY[base], [self.name(args[0])], out)
        elif base == "gelu":
            self.node("Gelu", [self.name(args[0])], out, approximate=step.kwargs.get("approximate", "none"))
        elif base in ("silu",):
            self.node("Mul", [self.name(args[0]), self.node("Sigmoid", [self.name(args[0])], out + ".gate")], out)
        elif base in self.BINARY and not step.kwargs:
            pair = [
                self.name(a) if isinstance(a, dict) else self.number(f"{out}.{i}", float(a))
                for i, a in enumerate(args[:2])
            ]
            self.node(self.BINARY[base], pair, out)
        elif base == "layer_norm" and len(args[1]) == 1:
            given = [self.name(a) for a in (args[0], *args[2:4]) if a is not None]
            self.node("LayerNormalization", given, out, axis=-1, epsilon=float(args[4]) if len(args) > 4 else 1e-5)
        elif base in ("softmax", "log_softmax"):
            self.node("Softmax" if base == "softmax" else "LogSoftmax", [self.name(args[0])], out, axis=int(args[1]))
        elif base in ("dropout", "clone", "contiguous", "detach"):
            self.node("Identity", [self.name(args[0])], out)
        else:
            raise EngineError(f"{step.op} ({step.module or 'top'}) is not written to ONNX")
        self.names[step.out[0]] = out

    def int8(self, step: Step, out: str) -> None:
        """Channels scaled, input and weight through Q/DQ, product, bias."""
        x, weight, scale, inverse = step.args[:4]
        q, total, each = (self.weights[a["w"]] for a in (weight, scale, inverse))
        unit = float(1 / each.mean())
        y = self.node("Mul", [self.name(x), self.constant(f"{out}.channels", each * unit)], out + ".scaled")
        step_name, zero = (
            self.number(f"{out}.step", unit),
            self.constant(f"{out}.zero", torch.zeros((), dtype=torch.int8)),
        )
        y = self.node("QuantizeLinear", [y, step_name, zero], out + ".q")
        y = self.node("DequantizeLinear", [y, step_name, zero], out + ".dq")
        w = self.node("DequantizeLinear", [self.constant(weight["w"], q), self.constant(f"{out}.rows", total / unit),
                                           self.constant(f"{out}.zeros", torch.zeros(len(total), dtype=torch.int8))],
                      out + ".weight", axis=0)  # fmt: skip
        w = self.node("Transpose", [w], out + ".weight.t", perm=[1, 0])
        bias = step.args[4] if len(step.args) > 4 else None
        y = self.node("MatMul", [y, w], out + ".product")
        self.node("Add", [y, self.name(bias)], out) if bias else self.node("Identity", [y], out)

    def graph(self, name: str) -> Any:
        kinds = {
            "float32": self.kinds.FLOAT,
            "int64": self.kinds.INT64,
            "int32": self.kinds.INT32,
            "bool": self.kinds.BOOL,
        }
        inputs = [
            self.helper.make_tensor_value_info(i.name, kinds[i.dtype], list(i.shape)) for i in self.program.inputs
        ]
        found = [x["v"] for x in leaves(self.program.outputs) if isinstance(x, dict) and "v" in x]
        types = {
            number: kind for step in self.program.steps for number, kind in zip(step.out, step.types, strict=False)
        }
        outputs = []
        for number in found:
            dims = types.get(number, "float32[]").partition("[")[2].rstrip("]")
            shape = [int(d) if d.isdigit() else d for d in dims.split(", ") if d]
            outputs.append(self.helper.make_tensor_value_info(self.names[number], self.kinds.FLOAT, shape))
        return self.helper.make_graph(self.nodes, name, inputs, outputs, list(self.held.values()))
