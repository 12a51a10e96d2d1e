"""Language models: one decoder definition, its weights in the Hugging Face layout, and training on our kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import torch  # noqa: F401
except ImportError:
    from ridgeline.errors import MissingExtra

    raise MissingExtra("torch", "llm", "ridgeline.llm") from None

if TYPE_CHECKING:
    from ridgeline.llm.model.config import ModelConfig
    from ridgeline.llm.model.decoder import Decoder
    from ridgeline.llm.model.weights import load_model, save_model
    from ridgeline.llm.train.settings import Settings
    from ridgeline.llm.train.trainer import Trained, Trainer, train

_HOME = {
    "Decoder": "model.decoder", "ModelConfig": "model.config", "load_model": "model.weights",
    "save_model": "model.weights", "Settings": "train.settings", "Trained": "train.trainer",
    "Trainer": "train.trainer", "train": "train.trainer",
}  # fmt: skip
__all__ = ["Decoder", "ModelConfig", "Settings", "Trained", "Trainer", "load_model", "save_model", "train"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module 'ridgeline.llm' has no attribute {name!r}")
    # The folder of the same name is imported first and would hide the function
    value = getattr(import_module(f"ridgeline.llm.{_HOME[name]}"), name)
    globals()[name] = value
    return value
