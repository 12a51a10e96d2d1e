"""TensorFlow SavedModels: converted to ONNX by tf2onnx in a process of its own, where both are installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ridgeline.capture.importers.program import Imported
from ridgeline.errors import ModelFileError

PYTHON = "RIDGELINE_TENSORFLOW_PYTHON"
"""Variable that names the interpreter of an environment with tensorflow and tf2onnx, if it is not this one."""


def load_saved_model(path: Path, opset: int = 18, **_: Any) -> Imported:
    """The model in a SavedModel folder."""
    from ridgeline.capture.importers.onnx import load_onnx

    told = f"python -m tf2onnx.convert --saved-model {path} --opset {opset} --output model.onnx"
    python = os.environ.get(PYTHON, "")
    lacking = [name for name in ("tensorflow", "tf2onnx") if importlib.util.find_spec(name) is None]
    if lacking and not python:
        raise ModelFileError(f"{path} is a TensorFlow SavedModel, and {' and '.join(lacking)} is not installed here: "
                             f"name the python that has them in {PYTHON}, or convert it there with `{told}` and "
                             "import the result")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "model.onnx"
        command = [python or sys.executable, "-m", "tf2onnx.convert", "--saved-model", str(path.resolve()),
                   "--opset", str(opset), "--output", str(made)]  # fmt: skip
        surroundings = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"}
        if python:  # packages of this environment are not its
            surroundings.pop("PYTHONPATH", None)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=surroundings)
        except subprocess.TimeoutExpired as error:
            raise ModelFileError(f"converting {path} took more than half an hour: convert it with `{told}`") from error
        except OSError as error:
            raise ModelFileError(f"{PYTHON} names {python!r}, which does not run: {error.strerror}") from error
        if done.returncode or not made.exists():
            last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no word of why")
            raise ModelFileError(f"tf2onnx cannot convert {path}: {last[:300]}")
        model = load_onnx(made)
        model.import_name, model.import_format = path.resolve().name, "tensorflow"
        return model  # mapped: the file may go, its memory stays
