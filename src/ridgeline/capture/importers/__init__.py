"""Models of every framework as modules that issue PyTorch calls."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.errors import InputError, MissingExtra, ModelFileError, nearest

if TYPE_CHECKING:
    from ridgeline.capture.importers.program import Imported
    from ridgeline.graph import Graph

__all__ = ["SUFFIXES", "bindings_of", "captured", "load"]

SUFFIXES = (".onnx", ".pt2", ".mlir", ".mlirbc", ".stablehlo", ".prototxt", ".caffemodel", ".gguf", ".safetensors",
            ".pt", ".pth", ".torchscript")  # fmt: skip
"""Names that are model files on the command line; what a file holds is found by looking into it."""

_ALSO_CALLED = {"batch": ("batch_size", "N", "n", "bs", "B", "b"),
                "seq": ("seq_len", "sequence", "sequence_length", "seq_length", "S")}  # fmt: skip


def load(path: str | os.PathLike[str], **options: Any) -> Imported:
    """A model file as a module: its inputs keep their named dims, its weights stay in the file until they are used."""
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("PyTorch", "torch", "importing a model")
    source = Path(path)
    if not source.exists():
        raise ModelFileError(f"cannot read {source}: no such file")
    from ridgeline.capture.importers.formats import reader_of

    return reader_of(source)(source, **options)


def bindings_of(model: Imported, options: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of a model's dims: those in ``dims``, and ``batch`` and ``seq`` by what exporters call them."""
    from ridgeline.capture.inputs import Dim, Spec

    known = model.dims
    asked = {name: size for name, size in options.items() if name not in ("dims", "mode", "optimizer")}
    asked |= options.get("dims") or {}
    found: dict[str, int] = {}
    for name, size in asked.items():
        names = [n for n in (name, *_ALSO_CALLED.get(name, ())) if n in known]
        if not names and name in ("batch", "seq"):  # exporters number dims: the first is the batch, the second tokens
            at = ("batch", "seq").index(name)
            shapes = [value.shape for value in model.inputs.values() if isinstance(value, Spec)]
            dims = {shape[at] for shape in shapes if len(shape) > at}
            names = [dim.name for dim in dims if isinstance(dim, Dim)] if len(dims) == 1 else []
        if names:
            found[names[0]] = size
        elif not (name == "batch" and size == 1):
            told = f"{nearest(name, known)}; its sizes are in the file" if known else ": all its sizes are in the file"
            raise InputError(f"{model.import_name} has no dim {name!r}{told}")
    missing = [name for name in known if name not in found]
    if missing:
        raise InputError(f"{model.import_name} leaves {', '.join(missing)} open: give sizes, as "
                         + " ".join(f"--dim {name}=8" for name in missing[:3])
                         + f" or dims={{{missing[0]!r}: 8}}")  # fmt: skip
    return found


def runnable(path: str | os.PathLike[str], dims: Mapping[str, int]) -> tuple[Imported, tuple[Any, ...], dict[str, Any]]:
    """A model file on the accelerator, if there is one, with inputs made up at the sizes given."""
    import torch

    model = load(path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.fill(device), model.example(bindings_of(model, {"dims": dims}), device), {}


def captured(model: Imported, options: Mapping[str, Any]) -> Graph:
    """The graph of an imported model at the sizes that were asked for."""
    from ridgeline.capture import capture

    mode = options.get("mode", "infer")
    if mode not in ("infer", "train"):
        raise InputError(f"an imported model has no mode {mode!r}: infer or train")
    return capture(model, mode=mode, optimizer=options.get("optimizer", "adamw"), name=model.import_name,
                   bindings=bindings_of(model, options))  # fmt: skip
