"""Whether float32 may be multiplied in TensorFloat-32 here: PyTorch's settings, whichever way a person made them.

PyTorch has two ways to say so (``allow_tf32`` and ``set_float32_matmul_precision``; ``fp32_precision``), and reading
the first raises an error as soon as the second has been used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

_KINDS = ("matmul", "conv", "rnn")
_of, _set = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
ASKED = tuple(partial(_of, *of) for of in (("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "matmul")))
"""The questions that ``settings`` answers."""


def products_round() -> bool:
    """Whether matrix products on a GPU may use TensorFloat-32."""
    return _of("cuda", "matmul") == "tf32"


def convolutions_round() -> bool:
    """Whether convolutions on a GPU may use TensorFloat-32, which is PyTorch's default."""
    return _of("cuda", "conv") == "tf32"


def settings() -> tuple[str, ...]:
    """How float32 is multiplied on a GPU and, as products go, on the host; what nobody set is what "ieee" says."""
    return tuple("ieee" if (said := ask()) == "none" else said for ask in ASKED)


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Matrix products, convolutions and recurrent layers on a GPU in this precision inside: "ieee" or "tf32"."""
    kept = [_of("cuda", kind) for kind in _KINDS]
    for kind in _KINDS:
        _set("cuda", kind, precision)
    try:
        yield
    finally:
        for kind, before in zip(_KINDS, kept):
            _set("cuda", kind, before)
