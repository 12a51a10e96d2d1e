"""One decode step of a Hugging Face model with a KV cache of a given length, as ``generate()`` would call it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ridgeline.capture.inputs import spec
from ridgeline.capture.model import Rewriter, unwrapped
from ridgeline.errors import CaptureError, MissingExtra

_STATES = ("past_key_values", "cache_params", "state")


def decode_kwargs(model_or_config: Any, batch: int, kv_len: int) -> dict[str, Any]:
    """Keyword arguments for ``capture``: the next token of each sequence, and a cache that holds ``kv_len`` tokens.

    The cache is the one a prefill of that length leaves behind (run on fake tensors), whatever its kind. A
    configuration stands for the model it describes.
    """
    if batch < 1 or kv_len < 1:
        raise CaptureError(
            f"a decode step needs at least one sequence and one cached token, not batch={batch}, kv_len={kv_len}"
        )
    model = unwrapped(model_or_config if isinstance(model_or_config, nn.Module) else _built(model_or_config))
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return _decoder_step(model, batch, kv_len)
    states = _prefilled(model, {"input_ids": spec((batch, kv_len)), "use_cache": True})
    made: dict[str, Any] = {"input_ids": torch.zeros((batch, 1), dtype=torch.int64), "use_cache": True, **states}
    if _accepts(model, "attention_mask"):
        made["attention_mask"] = torch.ones((batch, kv_len + 1), dtype=torch.int64)
    if _accepts(model, "position_ids"):
        made["position_ids"] = torch.full((batch, 1), kv_len, dtype=torch.int64)
    if _accepts(model, "cache_position"):
        made["cache_position"] = torch.full((1,), kv_len, dtype=torch.int64)
    return made


def _accepts(model: nn.Module, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def _decoder_step(model: nn.Module, batch: int, kv_len: int) -> dict[str, Any]:
    """An encoder-decoder's step: the encoder has run, the decoder goes on."""
    main = str(getattr(model, "main_input_name", "input_ids"))
    if main != "input_ids":
        raise CaptureError(f"{type(model).__name__} is prompted with {main!r}: build its decode step by hand "
                           "(encoder_outputs, decoder_input_ids, past_key_values)")  # fmt: skip
    tokens = spec((batch, kv_len))
    states = _prefilled(model, {"input_ids": tokens, "decoder_input_ids": tokens, "use_cache": True},
                        (*_STATES, "encoder_last_hidden_state"))  # fmt: skip
    hidden = states.pop("encoder_last_hidden_state")
    step = torch.zeros((batch, 1), dtype=torch.int64)
    return {"encoder_outputs": (hidden,), "decoder_input_ids": step, "use_cache": True, **states}


def _prefilled(model: nn.Module, kwargs: dict[str, Any], names: tuple[str, ...] = _STATES) -> dict[str, Any]:
    """What a prefill hands on, as meta tensors."""
    from ridgeline.capture.step import run_unrecorded

    output = run_unrecorded(model, kwargs)
    kept = {name: getattr(output, name) for name in names if getattr(output, name, None) is not None}
    if not set(kept) & set(_STATES):
        raise CaptureError(f"{type(model).__name__} returned no cache: its decode step cannot be built from a prefill")
    return {name: Rewriter(_as_meta).rewritten(value) for name, value in kept.items()}


def _as_meta(t: torch.Tensor) -> torch.Tensor:
    if not isinstance(t, FakeTensor):
        return t
    return torch.empty_strided(tuple(t.shape), t.stride(), dtype=t.dtype, device="meta")


def _built(config: Any) -> nn.Module:
    """The model a configuration describes, without memory."""
    try:
        import transformers
    except ImportError as error:
        raise MissingExtra("transformers", "hf", "a decode step from a configuration") from error
    kind = "AutoModelForSeq2SeqLM" if getattr(config, "is_encoder_decoder", False) else "AutoModelForCausalLM"
    with torch.device("meta"):
        return getattr(transformers, kind).from_config(config)  # type: ignore[no-any-return]
