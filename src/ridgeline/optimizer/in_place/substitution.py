"""Replaces parts of a Hugging Face model by kernels in place; ``revert`` restores the model exactly."""

from __future__ import annotations

import inspect
import types
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.engine import autocast as casts
from ridgeline.errors import OptimizeError, nearest
from ridgeline.kernels import geglu, layer_norm, rms_norm, rope, selective_scan, swiglu
from ridgeline.kernels.contract import primitive
from ridgeline.kernels.cross_entropy.op import CROSS_ENTROPY
from ridgeline.optimizer.in_place import attention_registry as hooks
from ridgeline.optimizer.in_place import expert_registry as experts
from ridgeline.optimizer.in_place import padded_encoder as encoders
from ridgeline.optimizer.in_place import patch_embedding as patches
from ridgeline.optimizer.in_place.attributes import place
from ridgeline.optimizer.in_place.padded_linear import forward_of, is_odd
from ridgeline.optimizer.in_place.recognition import Gated, Norm, gated_of, norm_of, rotary_of, scan_of

PARTS = ("attention", "norm", "gate", "rotary", "loss", "padding", "patches", "scan", "experts", "encoders")


@dataclass(frozen=True, slots=True)
class Replaced:
    """One replacement: the module's path, what it was and what computes it now."""

    where: str
    what: str
    by: str


@dataclass(slots=True)
class Applied:
    """What ``apply`` replaced in a model, and what it left alone and why."""

    replaced: list[Replaced] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    undos: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def counts(self) -> dict[str, int]:
        return dict(Counter(f"{each.what} → {each.by}" for each in self.replaced))

    def __str__(self) -> str:
        lines = [f"{num:4d} × {what}" for what, num in self.counts().items()] or ["nothing replaced"]
        lines += [f"   left: {where}: {why}" for where, why in self.left]
        return "\n".join(lines)


_applied: weakref.WeakKeyDictionary[nn.Module, Applied] = weakref.WeakKeyDictionary()


def apply(model: nn.Module, parts: Sequence[str] = PARTS) -> Applied:
    """Replace ``parts`` of a model by our kernels: attention, norm, gate, rotary, loss, padding, patches, scan,
    experts, encoders.

    Modules are recognized by running them on random inputs before anything is replaced. Attention goes through
    transformers' registries. Calls that a kernel does not support run as before. ``revert`` undoes all of it. Copies
    and saved models have no kernels of ours.
    """
    if isinstance(parts, str):
        raise OptimizeError(f"apply: parts is a list of names: write parts=[{parts!r}]")
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise OptimizeError(f"apply: no part {unknown[0]!r}{nearest(unknown[0], PARTS)}")
    if not isinstance(model, nn.Module):
        raise OptimizeError(f"apply wants a torch.nn.Module, not {type(model).__name__}")
    if model in _applied:
        raise OptimizeError("apply: this model has kernels already; revert it first")
    done = Applied()
    for part in (name for name in PARTS if name in parts):
        _PUT[part](model, done)
    _applied[model] = done
    return done


def revert(model: nn.Module) -> None:
    """Undo ``apply``: restore every attribute and forward. A model without kernels of ours is left alone."""
    if not isinstance(model, nn.Module):
        raise OptimizeError(f"revert wants a torch.nn.Module, not {type(model).__name__}")
    done = _applied.pop(model, None)
    while done is not None and done.undos:
        done.undos.pop()()


def _put_attention(model: nn.Module, done: Applied) -> None:
    configs = _attention_configs(model)
    if configs is None:
        return
    hooks.register()
    for path, config, flash in configs:
        before = config._attn_implementation_internal
        if before != "sdpa":
            done.left.append((path or "model", f"its attention is {before!r}, not 'sdpa'"))
            continue
        if not flash:
            done.left.append((path or "model", "its code does not take the masks of flash attention"))
            continue
        done.undos.append(place(config, "_attn_implementation_internal", hooks.NAME))
        done.replaced.append(Replaced(path, "attention 'sdpa'", "attention 'ridgeline'"))


def _attention_configs(model: nn.Module) -> list[tuple[str, Any, bool]] | None:
    """Every configuration of a transformers model that says which attention to use, once; None for other models."""
    found: dict[int, tuple[str, Any, bool]] = {}
    for path, module in model.named_modules():
        config = getattr(module, "config", None)
        allowed = getattr(type(module), "_can_set_attn_implementation", None)
        if config is None or allowed is None or not hasattr(config, "_attn_implementation_internal"):
            continue
        if allowed() and id(config) not in found:
            found[id(config)] = (path, config, bool(getattr(module, "_supports_flash_attn", False)))
    return list(found.values()) if found else None


def _override(module: nn.Module, function: Callable[..., Any], done: Applied) -> None:
    """Replace the forward of one module; the undo restores its class's, or the one set before."""
    done.undos.append(place(module, "forward", types.MethodType(function, module)))
    done.undos.append(place(module, _REPLICATE, types.MethodType(_replica, module)))


_REPLICATE = "_replicate_for_data_parallel"


def _replica(self: nn.Module) -> nn.Module:
    """Data-parallel replicas use their class's forward: ours is bound to the original and its weights."""
    made = getattr(type(self), _REPLICATE)(self)
    for name in ("forward", _REPLICATE, "__reduce_ex__"):
        made.__dict__.pop(name, None)
    return made


def _as_found(module: nn.Module, forward: Callable[..., Any], called: Sequence[str] = ()) -> Callable[..., Any]:
    """The forward, guarded by what the module was recognized from: its plain attributes, its functions, children that
    are computed but not called, and its class's forward. If those change, the module's own forward runs."""
    original = type(module).forward
    settings = _settings(module)
    functions = [(name, held) for name, held in vars(module).items() if isinstance(held, _FUNCTIONS)]
    parts = [(name, type(part), _settings(part)) for name, part in module._modules.items()
             if name not in called and part is not None]  # fmt: skip

    def same(self: Any) -> bool:
        for name, value in settings:
            if getattr(self, name, None) != value:
                return False
        for name, held in functions:
            if getattr(self, name, None) is not held:
                return False
        return all(_is_part(self._modules.get(name), kind, inner) for name, kind, inner in parts)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # Dynamo guards the class
            return forward(self, *args, **kwargs) if same(self) else original(self, *args, **kwargs)
        written = type(self).forward
        return forward(self, *args, **kwargs) if written is original and same(self) else written(self, *args, **kwargs)

    return run


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_SETTINGS = (int, float, bool, str, tuple, type(None))


def _settings(module: nn.Module) -> list[tuple[str, Any]]:
    """Plain public attributes."""
    return [(name, value) for name, value in vars(module).items()
            if isinstance(value, _SETTINGS) and not name.startswith("_") and name != "training"]  # fmt: skip


def _is_part(part: Any, kind: type[nn.Module], settings: list[tuple[str, Any]]) -> bool:
    """Whether a child that is computed but not called has its class and attributes, and no hooks."""
    if not isinstance(part, nn.Module) or type(part) is not kind:
        return False
    if part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__:
        return False
    return all(getattr(part, name, None) == value for name, value in settings)


def _by_class(model: nn.Module, recognize: Callable[[nn.Module], Any], key: Callable[[nn.Module], Any]) -> Any:
    """(path, module, what it is) for every recognized module; equal modules are tried once."""
    known: dict[Any, Any] = {}
    for path, module in list(model.named_modules()):
        if "forward" in module.__dict__:
            continue
        alike = (type(module), *key(module))
        if alike not in known:
            known[alike] = recognize(module)
        if known[alike] is not None:
            yield path, module, known[alike]


def _numbers(module: nn.Module) -> tuple[Any, ...]:
    """What distinguishes modules of one class: plain attributes, sizes and dtypes of parameters."""
    plain = (int, float, bool, str, type(None))
    attributes = sorted((k, v) for k, v in vars(module).items() if isinstance(v, plain) and not k.startswith("_"))
    parameters = [(name, tuple(p.shape), p.dtype, p.device.type) for name, p in module.named_parameters()]
    children = [(name, type(child), tuple(sorted((k, str(v)) for k, v in vars(child).items()
                                                 if isinstance(v, (int, float, str)))))
                for name, child in module.named_children()]  # fmt: skip
    return tuple(attributes), tuple(parameters), tuple(children)


def _put_norm(model: nn.Module, done: Applied) -> None:
    for path, module, norm in _by_class(model, norm_of, _numbers):
        _override(module, _as_found(module, _norm_forward(norm, type(module).forward)), done)
        done.replaced.append(Replaced(path, type(module).__name__, f"{'layer' if norm.centered else 'rms'}_norm"))


def _norm_forward(norm: Norm, original: Callable[..., Any]) -> Callable[..., Any]:
    eps, centered, offset = norm.eps, norm.centered, norm.offset

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        weight = self.weight
        # Autocast may return float32 from a norm, where a kernel keeps the dtype of its input.
        if x is None or x.device.type not in hooks.RUNS_ON or x.dtype != weight.dtype or (
                x.dtype != torch.float32 and torch.is_autocast_enabled(x.device.type)):
            return original(self, *args, **kwargs)
        if centered:
            return layer_norm(x, weight, getattr(self, "bias", None), eps)
        return rms_norm(x, weight, eps, offset=offset)

    return forward


def _put_gate(model: nn.Module, done: Applied) -> None:
    for path, module, gated in _by_class(model, gated_of, _numbers):
        own = (gated.gate, gated.up, gated.down)
        _override(module, _as_found(module, _gated_forward(gated, type(module).forward), own), done)
        done.replaced.append(Replaced(path, type(module).__name__, "swiglu" if gated.activation == "silu" else "geglu"))


def _gated_forward(gated: Gated, original: Callable[..., Any]) -> Callable[..., Any]:
    name, approximate = gated.activation, gated.activation.removeprefix("gelu_")
    support = primitive("gated").support

    def joined(gate: Tensor, up: Tensor) -> Tensor:
        return swiglu(gate, up) if name == "silu" else geglu(gate, up, approximate)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if x is None or x.device.type not in hooks.RUNS_ON or (gated.drops and self.training):
            return original(self, *args, **kwargs)
        modules = self._modules
        if gated.halves == "apart":
            gate, up = modules[gated.gate](x), modules[gated.up](x)
        else:
            first, second = modules[gated.gate](x).chunk(2, -1)
            gate, up = (first, second) if gated.halves == "first" else (second, first)
        if support(gate, up) is not None:
            return original(self, *args, **kwargs)
        return modules[gated.down](joined(gate, up))

    return forward


def _put_rotary(model: nn.Module, done: Applied) -> None:
    """Replace the rotary function in the globals of attention forwards, for this model alone."""
    known: dict[Any, bool | None] = {}
    for path, module in list(model.named_modules()):
        forward = module.__dict__.get("forward", type(module).forward)
        plain = isinstance(forward, types.FunctionType) and forward.__closure__ is None
        name = _rotary_name(forward) if plain else None
        if name is None:
            continue
        function = forward.__globals__[name]
        if function not in known:
            known[function] = rotary_of(function)
        if known[function] is None:
            done.left.append((path, f"{name} is no rotary embedding our kernel knows"))
            continue
        _override(module, _with_global(forward, name, _rotary(function, bool(known[function]))), done)
        done.replaced.append(Replaced(path, name, "rope"))


def _rotary_name(forward: types.FunctionType) -> str | None:
    """The name of the global function of q, k, cos and sin that a forward calls."""
    for name in forward.__code__.co_names:
        found = forward.__globals__.get(name)
        if isinstance(found, types.FunctionType) and found.__code__.co_varnames[:4] == ("q", "k", "cos", "sin"):
            return name
    return None


def _with_global(function: types.FunctionType, name: str, value: Any) -> types.FunctionType:
    """A copy of a function with one global replaced."""
    scope = {**function.__globals__, name: value}
    made = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    return made


def _rotary(original: Callable[..., Any], interleaved: bool) -> Callable[..., Any]:
    support = primitive("rope").support

    def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        heads_dim = kwargs.get("unsqueeze_dim", 1)
        plain = q.device.type in hooks.RUNS_ON and not args and set(kwargs) <= {"unsqueeze_dim"} and heads_dim in (1, 2)
        whole = cos.shape[-1] == q.shape[-1]  # partial rotations stay with the original
        if not plain or not whole or q.dtype != cos.dtype:
            return original(q, k, cos, sin, *args, **kwargs)
        if interleaved:
            cos, sin = cos[..., ::2], sin[..., ::2]
        if support(q, k, cos, sin, interleaved, 3 - heads_dim) is not None:
            return original(q, k, cos, sin, *args, **kwargs)
        return rope(q, k, cos, sin, interleaved=interleaved, sequence_dim=3 - heads_dim)

    return apply_rotary


def _put_padding(model: nn.Module, done: Applied) -> None:
    cast = casts.enters(model)
    for path, module in list(model.named_modules()):
        if "forward" not in module.__dict__ and is_odd(module, cast):
            _override(module, forward_of(type(module).forward, hooks.RUNS_ON), done)
            done.replaced.append(Replaced(path, "an odd linear layer", "padded_linear"))


def _put_patches(model: nn.Module, done: Applied) -> None:
    for path, module in list(model.named_modules()):
        if "forward" not in module.__dict__ and patches.is_patch_layer(module):
            _override(module, _as_found(module, patches.forward_of(type(module).forward, hooks.RUNS_ON)), done)
            done.replaced.append(Replaced(path, "a convolution that cuts patches", "patched"))


def _put_encoders(model: nn.Module, done: Applied) -> None:
    for path, module in list(model.named_modules()):
        if "forward" not in module.__dict__ and encoders.packs_rows(module):
            _override(module, encoders.forward_of(type(module).forward, hooks.RUNS_ON), done)
            done.replaced.append(Replaced(path, "an encoder that packs padded rows", "an encoder over all rows"))


def _put_scan(model: nn.Module, done: Applied) -> None:
    """Replace selective scans that loop over steps, for this model alone."""
    known: dict[Any, bool] = {}
    for path, module in list(model.named_modules()):
        forward = module.__dict__.get("forward", type(module).forward)
        inner = inspect.unwrap(forward) if isinstance(forward, types.FunctionType) else None
        name = _scan_name(inner) if isinstance(inner, types.FunctionType) else None
        if name is None or not isinstance(inner, types.FunctionType):
            continue
        function = inner.__globals__[name]
        if function not in known:
            known[function] = scan_of(function)
        made = _with_inner(forward, inner, _with_global(inner, name, _scan(function))) if known[function] else None
        if made is None:
            done.left.append((path, f"{name} is no scan our kernel knows"))
            continue
        _override(module, made, done)
        done.replaced.append(Replaced(path, name, "selective_scan"))


def _scan_name(forward: types.FunctionType) -> str | None:
    """The name of the global function of x, delta, A, B and C that a forward calls."""
    for name in forward.__code__.co_names:
        found = inspect.unwrap(forward.__globals__.get(name, _scan_name))
        names = found.__code__.co_varnames if isinstance(found, types.FunctionType) else ()
        if names[2:5] == ("A", "B", "C") and "delta_softplus" in names:
            return name
    return None


def _with_inner(outer: Any, inner: Any, new: types.FunctionType) -> types.FunctionType | None:
    """A decorated function around another inner function; None if its closure does not contain the inner one."""
    if outer is inner:
        return new
    cells = outer.__closure__ or ()
    made = [_with_inner(c.cell_contents, inner, new) if _closes(c, inner) else None for c in cells]
    if not any(found is not None for found in made):
        return None
    closure = tuple(cell if found is None else types.CellType(found) for cell, found in zip(cells, made, strict=True))
    again = types.FunctionType(outer.__code__, outer.__globals__, outer.__name__, outer.__defaults__, closure)
    again.__kwdefaults__ = outer.__kwdefaults__
    return again


def _closes(cell: Any, inner: Any) -> bool:
    try:
        held = cell.cell_contents
    except ValueError:  # an empty cell
        return False
    return isinstance(held, types.FunctionType) and inspect.unwrap(held) is inner


def _scan(original: Callable[..., Any]) -> Callable[..., Any]:
    support = primitive("selective_scan").support

    def scan(
        x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Any = None, z: Any = None, delta_bias: Any = None,
        delta_softplus: bool = False, return_last_state: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        given = (x, delta, A, B, C, D, z, delta_bias)
        asks = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
        if asks or x.device.type not in hooks.RUNS_ON or torch.is_autocast_enabled("cuda") or support(*given):
            return original(*given, delta_softplus=delta_softplus, return_last_state=return_last_state, **kwargs)
        y, last = selective_scan(*given, delta_softplus)
        return (y, last) if return_last_state else y

    return scan


def _put_loss(model: nn.Module, done: Applied) -> None:
    """transformers' causal and masked losses on the logits' own dtype, without a float32 copy."""
    named = [(path, module) for path, module in model.named_modules()
             if isinstance(getattr(type(module), "loss_function", None), property)]  # fmt: skip
    if not named:  # importing transformers takes seconds
        return
    try:
        from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss, ForMaskedLMLoss
    except ImportError:
        return
    for path, module in named:
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if "_loss_function" in module.__dict__ or code is None or "loss_function" not in code.co_names:
            continue
        # Without the property's warning for modules without a loss.
        present = LOSS_MAPPING.get(getattr(module, "loss_type", None) or "ForCausalLM")
        if present is ForCausalLMLoss or present is ForMaskedLMLoss:
            ours = _loss(present, shifted=present is ForCausalLMLoss)
            done.undos.append(place(module, "_loss_function", ours))
            done.replaced.append(Replaced(path, present.__name__, "cross_entropy"))


def _loss(original: Callable[..., Any], shifted: bool) -> Callable[..., Any]:
    def loss(
        logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, ignore_index: int = -100,
        shift_labels: Tensor | None = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        rest = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index, **kwargs}
        if shifted:
            rest["shift_labels"] = shift_labels
        target = labels
        if shifted and shift_labels is not None:
            target = shift_labels
        elif shifted:  # a causal model's labels move by one position; the last row has none
            target = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        target = target.reshape(-1).contiguous().to(logits.device)
        flat = logits.reshape(-1, vocab_size)
        if logits.device.type not in hooks.RUNS_ON or CROSS_ENTROPY.support(flat, target) is not None:
            return original(logits, labels, vocab_size, **rest)
        reduction = "mean" if num_items_in_batch is None else "sum"
        found = CROSS_ENTROPY(flat, target, ignore_index, 0.0, 0.0, reduction, True)
        if num_items_in_batch is None:
            return found
        return found / (
            num_items_in_batch.to(found.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch
        )

    return loss


def _put_experts(model: nn.Module, done: Applied) -> None:
    """transformers' mixtures of experts, through its registry."""
    found: dict[int, tuple[str, Any]] = {}
    for path, module in model.named_modules():
        config = getattr(module, "config", None)
        if hasattr(module, "has_gate") and hasattr(module, "num_experts") and hasattr(
            config, "_experts_implementation_internal"
        ):  # fmt: skip
            found.setdefault(id(config), (path, config))
    if not found or not experts.register():
        return
    for path, config in found.values():
        before = config._experts_implementation_internal
        if before not in experts.REPLACED:
            done.left.append((path, f"its experts are {before!r}, not one of {', '.join(experts.REPLACED)}"))
            continue
        done.undos.append(place(config, "_experts_implementation_internal", hooks.NAME))
        done.replaced.append(Replaced(path, f"experts {before!r}", "experts 'ridgeline'"))


_PUT: dict[str, Callable[[nn.Module, Applied], None]] = {
    "attention": _put_attention,
    "norm": _put_norm,
    "gate": _put_gate,
    "rotary": _put_rotary,
    "loss": _put_loss,
    "experts": _put_experts,
    "padding": _put_padding,
    "patches": _put_patches,
    "scan": _put_scan,
    "encoders": _put_encoders,
}
