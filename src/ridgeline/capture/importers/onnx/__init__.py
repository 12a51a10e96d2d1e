"""ONNX models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ridgeline.capture.importers.onnx import (  # noqa: F401  (each registers its ops)
    control,
    elementwise,
    neural,
    quantized,
    recurrent,
    shapes,
    spatial,
)
from ridgeline.capture.importers.onnx.evaluate import Evaluator, check_opsets, survey
from ridgeline.capture.importers.onnx.file import ELEMENT_TYPES, OnnxModel, ValueType, read_bytes, read_model
from ridgeline.capture.importers.program import Imported
from ridgeline.capture.inputs import Dim, Spec, spec
from ridgeline.errors import ModelFileError

__all__ = ["load_bytes", "load_onnx", "made_of"]


def load_onnx(path: Path) -> Imported:
    """The model in a file."""
    return made_of(read_model(path), path.stem)


def load_bytes(data: bytes, name: str = "model", folder: Path | None = None) -> Imported:
    """The model in memory."""
    return made_of(read_bytes(data, name, folder), name)


def made_of(model: OnnxModel, name: str) -> Imported:
    """The module of a model that was read."""
    check_opsets(model)
    evaluator = Evaluator(model)
    evaluator.adopt(model.graph)
    given = [v for v in model.graph.inputs if v.name not in model.graph.weights and v.name not in model.graph.texts]
    inputs = {value.name: _spec(value) for value in given}
    outputs = [value.name for value in model.graph.outputs]
    made = Imported(name, "onnx", evaluator, inputs, outputs, evaluator.weights, buffers=evaluator.buffers,
                    turned=evaluator.turned)  # fmt: skip
    made.onnx = model  # type: ignore[assignment]
    made.survey = survey(model)
    return made


def _spec(value: ValueType) -> Any:
    """An input as ``capture`` takes it: unknown dims get names of their own."""
    if value.kind != "tensor" or value.element not in ELEMENT_TYPES:
        return value
    if value.dims is None:
        return value
    if len(set(value.dims)) > 64:
        raise ModelFileError(f"input {value.name!r} has {len(value.dims)} dims, which cannot be")
    dims = [Dim(f"{value.name}.{i}") if d is None else Dim(d) if isinstance(d, str) else d
            for i, d in enumerate(value.dims)]  # fmt: skip
    dtype = ELEMENT_TYPES[value.element]
    from ridgeline.dtypes import dtype as named

    made: Spec = spec(dims, named(str(dtype)))
    return made
