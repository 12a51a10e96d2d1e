"""A model and its inputs on fake tensors for the time of a capture, and put back exactly as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ridgeline.capture.inputs import Spec
from ridgeline.capture.recorder import Recorder
from ridgeline.capture.shadows import give_shadow, outside_modes
from ridgeline.errors import CaptureError
from ridgeline.graph import Kind

_TORCH_DTYPES = {"fp64": "float64", "fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16",
                 "fp8": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}  # fmt: skip
_PLAIN = (str, bytes, int, float, bool, type(None), torch.dtype, torch.device, torch.Size, type)


def torch_dtype(name: str) -> torch.dtype:
    """PyTorch's element type for one of ours."""
    found = getattr(torch, _TORCH_DTYPES.get(name, name), None)
    if not isinstance(found, torch.dtype):
        raise CaptureError(f"PyTorch has no element type for {name!r}: choose another for the input")
    return found


def unwrapped(model: Any) -> nn.Module:
    """The module inside ``torch.compile``'s and data parallelism's wrappers, which run the same operators."""
    if not isinstance(model, nn.Module):
        raise CaptureError(f"a {type(model).__name__} is no torch.nn.Module: wrap what it does in a module's forward")
    while True:
        inner = getattr(
            model,
            "_orig_mod",
            model.module if type(model).__name__ in ("DistributedDataParallel", "DataParallel") else None,
        )
        if inner is None:
            return model
        model = inner


@contextmanager
def on_fakes(model: nn.Module, rec: Recorder, training: bool) -> Iterator[None]:
    """Parameters and buffers are fakes inside; afterwards every module's attributes are what they were."""
    modules = list(model.modules())
    kept = [(m, dict(m.__dict__), dict(m._parameters), dict(m._buffers)) for m in modules]
    caches = [
        (cache, copy.copy(cache))
        for _, attributes, *_ in kept
        for cache in attributes.values()
        if type(cache) in (dict, list)
    ]
    try:
        _swap(model, rec)
        for m in modules:
            m.training = training
        yield
    finally:
        for m, attributes, parameters, buffers in kept:
            m._parameters.clear()
            m._parameters.update(parameters)
            m._buffers.clear()
            m._buffers.update(buffers)
            m.__dict__.clear()
            m.__dict__.update(attributes)
        for cache, before in caches:
            _restore(cache, before)


def _restore(cache: Any, before: Any) -> None:
    """A model's own dict or list as it was: what a capture put there are fakes."""
    if len(cache) == len(before) and all(a is b for a, b in zip(_held(cache), _held(before), strict=True)):
        return
    cache.clear()
    if isinstance(cache, dict):
        cache.update(before)
    else:
        cache.extend(before)


def _held(cache: Any) -> list[Any]:
    return list(cache.values()) if isinstance(cache, dict) else list(cache)


def _swap(model: nn.Module, rec: Recorder) -> None:
    for path, module in model.named_modules():
        module._parameters = dict(module._parameters)
        module._buffers = dict(module._buffers)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = _fake_parameter(parameter, rec, f"{path}.{name}" if path else name)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = rec.adopt(buffer, Kind.BUFFER, f"{path}.{name}" if path else name)
        if isinstance(module, nn.RNNBase):
            names = module._flat_weights_names
            module.__dict__["_flat_weights"] = [getattr(module, n, None) for n in names]


def _fake_parameter(parameter: Any, rec: Recorder, name: str) -> Any:
    if isinstance(parameter, nn.parameter.UninitializedTensorMixin):
        raise CaptureError(f"parameter {name!r} is lazy and has no shape yet: run the model once before capturing it")
    memo = rec.constants.get(id(parameter))
    if memo is not None:
        return memo[1]
    like: torch.Tensor = parameter
    if getattr(parameter, "runs_contiguous", False):  # of a file, transposed when the model first runs
        like = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    fake = nn.Parameter(rec.fake_like(like), requires_grad=parameter.requires_grad)
    give_shadow(fake, None)
    marks = {key: mark for key, mark in vars(parameter).items() if not isinstance(mark, torch.Tensor)}
    fake.__dict__.update({key: mark for key, mark in marks.items() if key not in fake.__dict__})
    rec.value_of(fake, Kind.PARAM, name)
    rec.constants[id(parameter)] = (parameter, fake)
    return fake


@contextmanager
def module_paths(model: nn.Module, rec: Recorder) -> Iterator[None]:
    """Every module call is counted and gives its path to what runs inside."""
    paths = {id(m): name for name, m in model.named_modules()}
    original: Callable[..., Any] = nn.Module.__call__

    def tracked(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = paths.get(id(module)) or getattr(module, "import_path", None)
        if path is None:
            outer = rec.module_stack[-1] if rec.module_stack else ""
            path = f"{outer}.{type(module).__name__}" if outer else type(module).__name__
        rec.num_calls += 1
        rec.module_stack.append(path)
        try:
            return original(module, *args, **kwargs)
        finally:
            rec.module_stack.pop()

    nn.Module.__call__ = tracked  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


class Rewriter:
    """Containers and objects rebuilt with every tensor in them replaced; what holds none is handed back as it is."""

    def __init__(self, replace: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.replace = replace
        self.memo: dict[int, tuple[Any, Any]] = {}

    def leaf(self, item: Any, name: str) -> Any:
        return self.replace(item)

    def rewritten(self, item: Any, name: str = "") -> Any:
        if isinstance(item, (torch.Tensor, Spec)):
            return self.leaf(item, name)
        if isinstance(item, (*_PLAIN, nn.Module)) or (callable(item) and not hasattr(item, "__dict__")):
            return item
        if id(item) not in self.memo:
            self.memo[id(item)] = (item, item)
            self.memo[id(item)] = (item, self._container(item, name))
        return self.memo[id(item)][1]

    def _container(self, item: Any, name: str) -> Any:
        if isinstance(item, dict):
            made = copy.copy(item)
            for key, value in item.items():
                made[key] = self.rewritten(value, _dotted(name, key))
            return made
        if isinstance(item, tuple) and hasattr(item, "_fields"):
            return type(item)(*[self.rewritten(v, _dotted(name, f)) for f, v in zip(item._fields, item, strict=True)])
        if isinstance(item, (list, tuple)):
            return type(item)([self.rewritten(value, _dotted(name, i)) for i, value in enumerate(item)])
        return self._object(item, name) if hasattr(item, "__dict__") else item

    def _object(self, item: Any, name: str) -> Any:
        """A shallow copy whose tensors are replaced, when it holds any; the object itself otherwise."""
        pairs = [(key, value, self.rewritten(value, _dotted(name, key))) for key, value in list(vars(item).items())]
        changed = {key: made for key, value, made in pairs if _differs(value, made)}
        if not changed:
            return item
        copied = copy.copy(item)
        for key, value in changed.items():
            object.__setattr__(copied, key, value)
        return copied


def _differs(before: Any, after: Any) -> bool:
    if before is after:
        return False
    if type(before) in (list, tuple) and len(before) == len(after):
        return any(_differs(b, a) for b, a in zip(before, after, strict=True))
    if type(before) is dict and before.keys() == after.keys():
        return any(_differs(before[k], after[k]) for k in before)
    return True


def _dotted(name: str, part: Any) -> str:
    return f"{name}.{part}" if name else str(part)


class InputConverter(Rewriter):
    """Turns whatever a model is called with into fakes: tensors, specs, containers, caches and other objects."""

    def __init__(self, rec: Recorder, bindings: Mapping[str, int]) -> None:
        super().__init__(lambda t: t)
        self.rec, self.bindings = rec, bindings
        self.seen: dict[int, tuple[Any, torch.Tensor]] = {}

    def leaf(self, item: Any, name: str) -> Any:
        if id(item) not in self.seen:
            made = self._spec(item, name) if isinstance(item, Spec) else self._tensor(item, name)
            self.seen[id(item)] = (item, made)
        return self.seen[id(item)][1]

    def _tensor(self, item: torch.Tensor, name: str) -> torch.Tensor:
        fake = self.rec.fake_like(item)
        if item.requires_grad:
            fake.requires_grad_(True)
        self.rec.value_of(fake, Kind.INPUT, name)
        if item.is_meta and "mask" in name and not item.dtype.is_floating_point:
            with outside_modes():
                give_shadow(fake, torch.ones(tuple(item.shape), dtype=item.dtype))
        return fake

    def _spec(self, item: Spec, name: str) -> torch.Tensor:
        shape = item.bound(self.bindings, name)
        with outside_modes():
            meta = torch.empty(shape, dtype=torch_dtype(item.dtype.name), device="meta")
            fake = self._tensor(meta, name)
            if item.fill is not None:
                give_shadow(fake, torch.full(shape, item.fill, dtype=meta.dtype))
        return fake
