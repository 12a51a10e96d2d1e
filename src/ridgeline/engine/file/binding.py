"""From a call's arguments to the tensors that a program takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import EngineError, nearest


class Binding:
    """Finds the inputs of a program among positional and named arguments, and refuses what is not built."""

    def __init__(self, signature: Mapping[str, Any], inputs: tuple[Any, ...]) -> None:
        self.names: list[str] = signature["names"]
        self.wanted: dict[str, Any] = dict(zip(self.names, signature["args"], strict=True)) | dict(signature["kwargs"])
        self.inputs = inputs
        direct = [{"input": i} for i in range(len(inputs))]
        self.is_plain = list(self.wanted.values()) == direct and len(self.names) == len(direct)
        """Whether every argument is one tensor, in order: calls then need no binding."""

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        if len(args) > len(self.names):
            raise EngineError(f"the engine takes {len(self.names)} positional arguments "
                              f"({', '.join(self.names) or 'none'}), not {len(args)}")  # fmt: skip
        given = dict(zip(self.names, args, strict=False))
        for name, value in kwargs.items():
            if name not in self.wanted:
                raise EngineError(f"the engine has no input {name!r}{nearest(name, self.wanted)}")
            if name in given:
                raise EngineError(f"input {name!r} is given twice")
            given[name] = value
        made: list[Any] = [None] * len(self.inputs)
        for name, want in self.wanted.items():
            if name not in given and want != {"constant": None}:
                if "constant" in want:
                    continue  # what it was built with
                raise EngineError(f"input {name!r} is missing: the engine takes {', '.join(self.wanted)}")
            self._fill(made, name, want, given.get(name))
        return made

    def _fill(self, made: list[Any], path: str, want: Any, value: Any) -> None:
        kind, inner = next(iter(want.items()))
        if kind == "input":
            made[inner] = tensor_of(value, path)
        elif kind == "constant":
            if type(value) is not type(inner) or value != inner:
                raise EngineError(f"input {path!r} is {value!r}, and the engine was built for {inner!r}: build again, "
                                  "with that value")  # fmt: skip
        elif kind == "list":
            if not isinstance(value, (list, tuple)) or len(value) != len(inner):
                raise EngineError(f"input {path!r} is a list or tuple of {len(inner)}")
            for i, each in enumerate(inner):
                self._fill(made, f"{path}.{i}", each, value[i])
        else:
            if not isinstance(value, Mapping) or set(value) != set(inner):
                raise EngineError(f"input {path!r} is a dictionary of {', '.join(inner)}")
            for name, each in inner.items():
                self._fill(made, f"{path}.{name}", each, value[name])


def tensor_of(value: Any, name: str) -> Tensor:
    """A tensor, or anything that shares its memory as one (numpy, dlpack)."""
    if isinstance(value, Tensor):
        return value
    try:
        if hasattr(value, "__array_interface__"):
            return torch.from_numpy(value)
        if hasattr(value, "__dlpack__"):
            return torch.from_dlpack(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise EngineError(f"input {name!r} cannot be read as a tensor: {error}") from error
    raise EngineError(
        f"input {name!r} is a {type(value).__name__}: hand over a tensor, an array or anything with dlpack"
    )
