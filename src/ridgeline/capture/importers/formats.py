"""Which importer reads a file: by what is in it, not by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ridgeline.errors import ModelFileError

Reader = Callable[..., Any]


def reader_of(path: Path) -> Reader:
    """The importer of a file or folder."""
    if path.is_dir():
        if (path / "saved_model.pb").exists():
            from ridgeline.capture.importers.saved_model import load_saved_model

            return load_saved_model
        from ridgeline.capture.importers.headers import load_folder

        return load_folder
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror}") from error
    if head[:4] == b"PK\x03\x04":
        return _zip_reader(path)
    if head[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        raise ModelFileError(f"{path.name} is a pickle, which runs code when opened: make the module in Python and "
                             "save it with torch.export.save, or its weights as safetensors")  # fmt: skip
    if head[:4] == b"GGUF" or path.suffix == ".safetensors" or path.name == "config.json":
        from ridgeline.capture.importers import headers

        if head[:4] == b"GGUF":
            return headers.load_gguf
        return headers.load_safetensors if path.suffix == ".safetensors" else headers.load_config
    from ridgeline.capture.importers import mlir
    from ridgeline.capture.importers.stablehlo import is_exported, load_stablehlo

    if head[:4] == mlir.BYTECODE or path.suffix in (".mlir", ".mlirbc", ".stablehlo") or is_exported(head):
        return load_stablehlo
    if path.suffix in (".prototxt", ".pbtxt", ".caffemodel"):
        from ridgeline.capture.importers.caffe import load_caffemodel, load_prototxt

        return load_caffemodel if path.suffix == ".caffemodel" else load_prototxt
    from ridgeline.capture.importers.onnx import load_onnx

    return load_onnx


def _zip_reader(path: Path) -> Reader:
    from ridgeline.capture.importers.pt2 import Archive, load_pt2

    members = Archive(path).members
    if "constants.pkl" in members or any(name.startswith("code/") for name in members):
        raise ModelFileError(f"{path.name} is TorchScript, a pickle of code that is no longer developed: export the "
                             "module itself with torch.export.export and torch.export.save")  # fmt: skip
    if "data.pkl" in members:
        raise ModelFileError(f"{path.name} is a pickle, which runs code when opened: make the module in Python and "
                             "save it with torch.export.save, or its weights as safetensors")  # fmt: skip
    return load_pt2
