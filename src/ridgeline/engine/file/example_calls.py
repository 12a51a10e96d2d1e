"""Inputs for engines and imported models: drawn for a shape, or read from ``.npy`` files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.errors import InputError


def drawn_for(shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> list[Tensor]:
    """Normal floats, and zeros for integers and flags, which are legal as indices wherever they are used."""
    made = []
    for place, (shape, name) in enumerate(zip(shapes, dtypes, strict=True)):
        dtype = getattr(torch, name.removeprefix("torch."))
        generator = torch.Generator().manual_seed(place)
        made.append(torch.randn(tuple(shape), generator=generator).to(dtype) if dtype.is_floating_point
                    else torch.zeros(tuple(shape), dtype=dtype))  # fmt: skip
    return made


def read_arrays(files: Mapping[str, str], names: Sequence[str]) -> list[Tensor]:
    """One tensor a name."""
    made = []
    for name in names:
        if name not in files:
            raise InputError(f"--inputs has no {name!r}: write {name}:file.npy")
        try:
            made.append(torch.from_numpy(np.load(files[name], allow_pickle=False)))
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"cannot read {files[name]}: {error}") from None
    return made


def as_array(x: Any) -> Any:
    """A tensor as an array; types that numpy lacks become float32."""
    x = x.detach().cpu()
    lacks = x.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    return (x.float() if lacks else x).numpy()
