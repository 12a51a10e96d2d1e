"""A second tree of modules over the parameters and buffers of a model, whose forwards may be replaced.

The model itself stays as it is: it computes, compiles and trains as before, whatever its clone runs.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.engine.pytree import empty_like, slots_of

_CONFIGURED = ("_attn_implementation_internal", "_experts_implementation_internal")
"""Attributes by which configurations of transformers name an implementation."""


def shallow_clone(model: nn.Module) -> nn.Module:
    """The model in module objects of its own, over the same parameters, buffers and hooks.

    The dictionaries of parameters, buffers and hooks are shared, so that weights that are tied, updated, loaded or
    assigned later are those of both. Other attributes are copied once, with references to modules of the tree replaced
    by references to their clones. Configurations that select an implementation are copied, too. Scripted modules have
    no Python attributes to copy and are shared.
    """
    return _Cloning(model).clone(model)


class _Cloning:
    def __init__(self, model: nn.Module) -> None:
        self.tree = {id(module) for module in model.modules()}
        self.made: dict[int, Any] = {}

    def clone(self, module: nn.Module) -> Any:
        if id(module) in self.made:
            return self.made[id(module)]
        if isinstance(module, torch.jit.ScriptModule):
            return module
        made: Any = object.__new__(type(module))
        self.made[id(module)] = made
        held = dict(vars(module))
        vars(made).update(held)
        vars(made)["_modules"] = {name: child if child is None else self.clone(child)
                                  for name, child in module._modules.items()}  # fmt: skip
        for name, value in held.items():
            if name not in ("_modules", "_parameters", "_buffers"):
                replaced = self._replaced(value, 0)
                if replaced is not value:
                    vars(made)[name] = replaced
        for name in slots_of(type(module)):
            if hasattr(module, name):
                object.__setattr__(made, name, self._replaced(getattr(module, name), 0))
        return made

    def _replaced(self, value: Any, depth: int) -> Any:
        """The value with modules of the tree and configurations replaced; the value itself where it holds none."""
        if depth > 4:
            return value
        if isinstance(value, nn.Module):
            return self.clone(value) if id(value) in self.tree else value
        if type(value) is types.MethodType and id(value.__self__) in self.tree:
            return types.MethodType(value.__func__, self.clone(value.__self__))
        if type(value) in (list, tuple):
            items = [self._replaced(item, depth + 1) for item in value]
            return type(value)(items) if any(a is not b for a, b in zip(items, value)) else value
        if type(value) is dict:
            found = {key: self._replaced(item, depth + 1) for key, item in value.items()}
            return found if any(found[key] is not value[key] for key in value) else value
        if not isinstance(value, Tensor | type) and any(name in getattr(value, "__dict__", ()) for name in _CONFIGURED):
            return self._configuration(value, depth)
        return value

    def _configuration(self, config: Any, depth: int) -> Any:
        if id(config) not in self.made:
            made = self.made[id(config)] = empty_like(config)
            vars(made).update({name: self._replaced(value, depth + 1) for name, value in vars(config).items()})
        return self.made[id(config)]
