"""What an importer makes of a model: ops, sizes, and how far its results are from another runtime's."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ridgeline.capture.importers.program import Imported, OpRow
from ridgeline.capture.inputs import Dim, Spec
from ridgeline.errors import RidgelineError

MAX_COMPARED_BYTES = 8 << 30
"""Weights above which results are not compared: both runtimes would hold them."""


def summary(model: Imported) -> dict[str, Any]:
    """The model's ops, parameters, inputs and outputs."""
    return {
        "name": model.import_name,
        "format": model.import_format,
        "num_params": model.num_params,
        "weight_bytes": sum(ref.num_bytes for ref in model.refs.values()),
        "inputs": {name: _described(value) for name, value in model.inputs.items()},
        "outputs": list(model.outputs),
        "dims": model.dims,
        "ops": [
            {"op": r.op, "count": r.count, "supported": not r.why, "why": r.why, "example": r.example}
            for r in model.survey
        ],
    }


def missing(model: Imported) -> list[OpRow]:
    """Kinds of ops that no importer runs."""
    return [row for row in model.survey if row.why]


def _described(value: Any) -> str:
    if not isinstance(value, Spec):
        return str(getattr(value, "kind", "unknown"))
    return f"{value.dtype}[{', '.join(d.name if isinstance(d, Dim) else str(d) for d in value.shape)}]"


def compared(model: Imported, path: Path, bindings: Mapping[str, int]) -> dict[str, Any]:
    """Largest difference of each output from ONNX Runtime's CPU provider, relative to its largest value."""
    if importlib.util.find_spec("onnxruntime") is None:
        return {"with": None, "why": "ONNX Runtime is not installed: pip install onnxruntime"}
    if sum(ref.num_bytes for ref in model.refs.values()) > MAX_COMPARED_BYTES:
        return {"with": None, "why": f"the weights take more than {MAX_COMPARED_BYTES / 1e9:.0f} GB"}
    import onnxruntime  # type: ignore[import-untyped]

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    given = model.example(bindings)
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        feed = {name: value.numpy() for name, value in zip(model.inputs, given)}
        theirs = session.run(list(model.outputs), feed)
    except Exception as error:  # whatever it raises is its answer
        told = next(iter(str(error).splitlines()), type(error).__name__)
        return {"with": "onnxruntime " + onnxruntime.__version__, "why": f"it does not run the model: {told[:200]}"}
    with torch.no_grad():
        try:
            ours = model(*given)
        except RidgelineError as error:
            return {"with": None, "why": str(error)}
    outputs: dict[str, Any] = {}
    for name, mine, other in zip(model.outputs, [ours] if len(model.outputs) == 1 else ours, theirs):
        a, b = mine.double(), torch.as_tensor(other).double()
        if a.shape != b.shape:
            outputs[name] = {"error": f"shape {list(a.shape)} instead of {list(b.shape)}"}
            continue
        size = float(b.abs().max()) if b.numel() else 0.0
        outputs[name] = {"max_abs": float((a - b).abs().max()) if b.numel() else 0.0, "largest": size}
    return {"with": "onnxruntime " + onnxruntime.__version__, "outputs": outputs}
