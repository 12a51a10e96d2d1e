"""The recorder: every operator eager PyTorch dispatches, in order, with values, lifetimes, module and source line."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.capture import shadows
from ridgeline.capture.facade import HOST, facade
from ridgeline.capture.shadows import give_shadow, outside_modes, shadow_of
from ridgeline.capture.translate import (
    Call,
    Meaning,
    UnknownOp,
    base_name,
    dtype_name,
    is_composite,
    is_mutable,
    is_view,
    meaning_of,
    target_of,
)
from ridgeline.dtypes import dtype
from ridgeline.errors import CaptureError
from ridgeline.graph import Kind, Phase, TensorType
from ridgeline.graph.declared import checked_cost, declared_cost

aten = torch.ops.aten
_VALUE = "_rl_value"
_HOST = "_rl_host"
_MADE_BY = "_rl_made_by"  # sequence number of the autograd node whose backward made a tensor
_TORCH_ROOT = str(Path(torch.__file__).parent)
_OWN_ROOT = str(Path(__file__).parent)


_NEEDS_DATA = frozenset({"UnsupportedOperatorException", "DataDependentOutputException", "DynamicOutputShapeException",
                         "UnsupportedFakeTensorException", "UnsupportedMutationAliasingException"})  # fmt: skip


class OpFailed(CaptureError, RuntimeError):
    """An operator that does not take what the model gave it: the model would fail in a real run too."""


@dataclass(slots=True)
class RawValue:
    """A value while recording: ``root`` owns the storage; kinds become known as the step unfolds."""

    type: TensorType
    kind: Kind
    alias: int | None
    name: str = ""
    storage_bytes: int | None = None


@dataclass(slots=True)
class RawNode:
    """A recorded dispatch."""

    op: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    attrs: dict[str, Any]
    phase: Phase
    module: str
    source: str
    target: str
    frees: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Storage:
    root: int
    ref: Any


class Recorder(TorchDispatchMode):
    """A dispatch mode that sits above the fake one and writes down what runs."""

    supports_higher_order_operators = True

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()
        self.fake_mode = fake_mode
        self.nodes: list[RawNode] = []
        self.values: list[RawValue] = []
        self.assumptions: dict[str, None] = {}
        self.phase = Phase.FORWARD
        self.recording = False
        self.module_stack: list[str] = []
        self.num_calls = 0
        self.constants: dict[int, tuple[Any, torch.Tensor]] = {}
        self._storages: dict[int, _Storage] = {}
        self._types: dict[Any, TensorType] = {}
        self._origin: list[tuple[str, str]] = []  # module and source of each autograd node, by sequence number
        self._first_origin = -1
        self._last_backward = ("", "")
        self._last_place: tuple[int, int] = (0, 0)  # frame and instruction of the last op that was no detach
        self._place_now: tuple[int, int] = (0, 0)
        self._engine = False
        self._wanted: torch.device | None = None
        self.sole_owner: tuple[int, int] | None = None  # reference counts of a tensor only autograd holds
        self._expansions: dict[Any, Callable[..., Any]] = {}

    # --- dispatch ---------------------------------------------------------------------------------------------------

    def meet(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What PyTorch calls for every dispatch."""
        if func is torch.ops.prim.device.default:
            # What C++ is told: cpu:0 stands for the accelerator and cpu for the host, so that the two stay apart there
            # too
            t = args[0]
            if not isinstance(t, FakeTensor):
                return t.device
            return HOST if _HOST in t.__dict__ else _ACCELERATOR_BELOW
        if isinstance(func, torch._ops.HigherOrderOperator):
            module, source = self.place()
            name = func.name() if callable(func.name) else func.name
            fix = (
                "call a plain operator instead (scaled_dot_product_attention for flex_attention), or wrap the kernel "
                "with torch.library.custom_op and declare its cost with @ridgeline.cost_of"
            )
            raise CaptureError(
                f"higher-order operator {name!r} in module {module!r}, {source}, hides what it runs: {fix}"
            )
        if func.namespace == "profiler":
            return func(*args, **(kwargs or {}))
        frame = sys._getframe(1)
        self._place_now = (id(frame), frame.f_lasti)
        self._engine = frame.f_code.co_name == "_engine_run_backward"
        outside, facade.inside = facade.inside, True
        try:
            return self._dispatch(func, args, kwargs or {})
        finally:
            facade.inside = outside

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        args, kwargs = self._with_fakes(func, args, kwargs)
        if func is aten.detach.default and self._is_saving():
            return self._share(func(*args, **kwargs), args[0])
        expansion = self._expansions.get(func)
        if expansion is not None:
            with self:
                return expansion(*args, **kwargs)
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if func is aten.add.Tensor and self._engine:
            kept = self._accumulated(args, kwargs)
            if kept is not None:
                self._run(aten.add_.Tensor, kept, {})
                return kept[0]
        self._wanted = kwargs.get("device")
        if func is aten._to_copy.default and self._already_there(args[0], kwargs):
            return self._share(aten.detach.default(args[0]), args[0])
        if self._wanted is not None and self._wanted != HOST:
            kwargs = {**kwargs, "device": HOST}
        return self._run(func, args, kwargs)

    def expand_with(self, func: Any, expansion: Callable[..., Any]) -> None:
        """Record ``func`` as what ``expansion`` dispatches instead of as one op."""
        self._expansions[func] = expansion

    def _with_fakes(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Tensors of the caller met on the way are replaced by fakes that stand for them."""
        if func is aten.lift_fresh.default and not self._is_mine(args[0]):
            # What `torch.tensor(...)` just made: host memory, whose value is known while it is small
            fake = self.fake_like(args[0])
            fake.__dict__[_HOST] = True
            return (fake,), kwargs
        if all(self._is_mine(t) for t in _tensors(args, kwargs)):
            return args, kwargs
        return self._adopted(args), self._adopted(kwargs)

    def _is_mine(self, t: torch.Tensor) -> bool:
        """A fake of this capture, not one that a cache of the model kept from an earlier one."""
        return isinstance(t, FakeTensor) and t.fake_mode is self.fake_mode

    def _adopted(self, tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            return tree if self._is_mine(tree) else self.adopt(tree, Kind.CONSTANT)
        if isinstance(tree, (list, tuple)):
            return type(tree)([self._adopted(item) for item in tree])
        if isinstance(tree, dict):
            return {key: self._adopted(item) for key, item in tree.items()}
        return tree

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        ins = _tensors(args, kwargs)
        handler = _DATA_DEPENDENT.get(base_name(func))
        if handler is not None:
            answer = handler(self, func, args, kwargs, ins)
            if answer is not NotImplemented:
                return answer
        try:
            out = func(*args, **kwargs)
        except CaptureError:
            raise
        except Exception as error:
            raise self._failure(func, ins, error) from error
        outs = _tensors((out,), {})
        if self._shadowed(func, ins, outs) and shadows.follow(func, args, kwargs, ins, outs):
            self.assume(shadows.ROUTING)
        if self.recording:
            self.record(func, args, kwargs, ins, outs)
        return out

    @staticmethod
    def _shadowed(func: Any, ins: list[torch.Tensor], outs: list[torch.Tensor]) -> bool:
        """Cheap test that skips the common case: floats nobody knows."""
        if not ins:
            return True
        if any("_rl_shadow" in t.__dict__ for t in ins):
            return True
        return any(o.dtype is torch.int64 for o in outs)

    def _failure(self, func: Any, ins: list[torch.Tensor], error: Exception) -> Exception:
        """The error a person can act on: which op, where, and what to do."""
        if not isinstance(error, RuntimeError) or isinstance(error, CaptureError):
            return error
        module, source = self.place()
        name, where = func._schema.name, f"module {module or '(top level)'!r}, {source}"
        if type(error).__name__ in _NEEDS_DATA or isinstance(error, NotImplementedError):
            if func.namespace in ("aten", "prims"):
                return CaptureError(f"operator {name!r} called in {where}, needs data that only a run would know: "
                                    "pass real integer inputs, or keep the decision out of the step")  # fmt: skip
            return CaptureError(
                f"operator {name!r} called in {where}, cannot run without data: give it a fake implementation "
                f"(torch.library.register_fake({name!r})) and declare its cost with @ridgeline.cost_of({name!r})"
            )
        types = ", ".join(str(self.type_of(t)) for t in ins)
        return OpFailed(f"operator {name!r} called in {where}, does not take {types}: {error}")

    # --- places -----------------------------------------------------------------------------------------------------

    def place(self) -> tuple[str, str]:
        """Module and source line of what is running: in backward, those of the forward op it differentiates."""
        module = self.module_stack[-1] if self.module_stack else ""
        node = torch._C._current_autograd_node()
        if node is None or module:
            return module, self._source()
        at = node._sequence_nr() - self._first_origin
        found = self._origin[at] if 0 <= at < len(self._origin) else None
        if found is not None:
            self._last_backward = found
        return self._last_backward

    @staticmethod
    def _source() -> str:
        frame: Any = sys._getframe(3)
        while frame is not None and _is_internal(frame.f_code.co_filename):
            frame = frame.f_back
        return f"{Path(frame.f_code.co_filename).stem}:{frame.f_lineno}" if frame is not None else ""

    def _is_saving(self) -> bool:
        """Whether a detach is autograd keeping a tensor (a fake-tensor artifact) rather than a call of the model.

        Autograd saves outputs at the very instruction that ran the op; a model's own detach is another instruction.
        """
        node = torch._C._current_autograd_node()
        if self._engine and node is not None:
            return not node.name().endswith("AccumulateGrad")
        return self._place_now == self._last_place

    # --- gradients that meet ----------------------------------------------------------------------------------------

    def _accumulated(self, args: Any, kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(sum, addend) where autograd adds a gradient to one it has: in place if nothing else holds the one kept.

        Autograd never does so on tensor subclasses such as fakes, so what it would do is decided here by its rule.
        """
        node = torch._C._current_autograd_node()
        if kwargs or len(args) != 2 or node is None or not isinstance(args[1], torch.Tensor):
            return None
        kept, fresh = args
        if kept.shape != fresh.shape or kept.dtype != fresh.dtype:
            return None
        if self.sole_owner is None:
            self.sole_owner = _owners(kept)
        if kept.__dict__.get(_MADE_BY) == node._sequence_nr():
            return None  # a term of a gradient formula
        if self._is_sole(kept):
            return kept, fresh
        return (fresh, kept) if self._is_sole(fresh) else None

    def _is_sole(self, t: torch.Tensor) -> bool:
        mine, sole = _owners(t), self.sole_owner
        return sole is not None and mine[0] <= sole[0] and mine[1] <= sole[1] and _is_dense(t)

    # --- host and accelerator ---------------------------------------------------------------------------------------

    def _already_there(self, t: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """A move to the accelerator of what is already there: nothing runs."""
        if self._wanted is None or self._wanted == HOST or _HOST in t.__dict__:
            return False
        same_type = kwargs.get("dtype") in (None, t.dtype)
        return same_type and kwargs.get("memory_format") in (None, torch.preserve_format)

    def _makes_host(self, ins: list[torch.Tensor], func: Any) -> bool:
        """Whether the result lives in host memory: made there, or computed from nothing but what is there."""
        wanted = self._wanted
        if func is aten.lift_fresh.default:
            return True
        if wanted is not None:
            return bool(wanted == HOST)
        return bool(ins) and all(_HOST in t.__dict__ for t in ins)

    # --- values -----------------------------------------------------------------------------------------------------

    def type_of(self, t: torch.Tensor) -> TensorType:
        key = (t.shape, t.stride() if t.layout is torch.strided else None, t.dtype)
        found = self._types.get(key)
        if found is None:
            found = TensorType(tuple(map(int, t.shape)), dtype(dtype_name(t.dtype)), _layout(t))
            self._types[key] = found
        return found

    def value_of(self, t: torch.Tensor, kind: Kind = Kind.ACTIVATION, name: str = "", of: int | None = None) -> int:
        """The id of a tensor's value, made on first sight; sharing a known storage makes it an alias."""
        found = t.__dict__.get(_VALUE)
        if found is not None:
            return int(found)
        return self._new_value(t, kind, name, of)

    def _new_value(self, t: torch.Tensor, kind: Kind, name: str, of: int | None) -> int:
        storage = t.untyped_storage()
        known = self._storages.get(storage._cdata)
        made = len(self.values)
        type_ = self.type_of(t)
        if known is not None:
            alias = of if of is not None and self._root(of) == known.root else known.root
            self.values.append(RawValue(type_, self.values[known.root].kind, alias, name))
        else:
            num_bytes = storage.nbytes()
            self.values.append(RawValue(type_, kind, None, name, num_bytes if num_bytes != type_.num_bytes else None))
            ref = weakref.ref(storage, partial(self._died, storage._cdata, made))
            self._storages[storage._cdata] = _Storage(made, ref)
        t.__dict__[_VALUE] = made
        return made

    def _root(self, value: int) -> int:
        while (alias := self.values[value].alias) is not None:
            value = alias
        return value

    def _died(self, cdata: int, root: int, _: Any) -> None:
        self._storages.pop(cdata, None)
        if self.recording and self.nodes:
            self.nodes[-1].frees.append(root)

    def root_of(self, t: torch.Tensor) -> int:
        return self._root(self.value_of(t))

    def _share(self, out: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """An artifact: the same tensor under another object."""
        if _HOST in source.__dict__:
            out.__dict__[_HOST] = True
        else:
            out.__dict__[_VALUE] = self.value_of(source)
        give_shadow(out, shadow_of(source))
        return out

    def adopt(self, t: torch.Tensor, kind: Kind, name: str = "", *, requires_grad: bool | None = None) -> torch.Tensor:
        """The fake that stands for a tensor of the caller; integers keep their values."""
        memo = self.constants.get(id(t))
        if memo is not None:
            return memo[1]
        fake = self.fake_like(t)
        if requires_grad or (requires_grad is None and t.requires_grad and t.is_leaf):
            fake.requires_grad_(True)
        self.value_of(fake, kind, name)
        self.constants[id(t)] = (t, fake)
        return fake

    def fake_like(self, t: torch.Tensor) -> torch.Tensor:
        """An unrecorded fake with the metadata of ``t`` and, for real small integers, its values."""
        with outside_modes():
            size, stride, dt = tuple(t.shape), t.stride(), t.dtype
            real = self._known_value(t, name="")
            with self.fake_mode:
                fake = torch.empty_strided(size, stride, dtype=dt, device="cpu")
        give_shadow(fake, real)
        return fake

    @staticmethod
    def _known_value(t: torch.Tensor, name: str) -> torch.Tensor | None:
        if t.dtype.is_floating_point or t.dtype.is_complex:
            small = t.numel() <= shadows.MAX_FLOAT_CONSTANT_ELEMENTS and not t.requires_grad
            return None if t.is_meta or isinstance(t, FakeTensor) or not small else t.detach().cpu().clone()
        if not shadows.affordable(t):
            return None
        if t.is_meta or isinstance(t, FakeTensor):
            return torch.zeros(tuple(t.shape), dtype=t.dtype)
        return t.detach().cpu().clone()

    def fake_of(self, real: torch.Tensor) -> torch.Tensor:
        """A fake whose value is ``real``, which the recorder computed itself."""
        with outside_modes(), self.fake_mode:
            fake = torch.empty_strided(tuple(real.shape), real.stride(), dtype=real.dtype, device="cpu")
        if shadows.affordable(real):
            give_shadow(fake, real)
        return fake

    def look_at(self, real: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """A fake with the value ``real`` that counts as a view of ``source``."""
        fake = self.fake_of(real)
        fake.__dict__[_VALUE] = len(self.values)
        self.values.append(RawValue(self.type_of(fake), Kind.ACTIVATION, self.value_of(source)))
        return fake

    # --- recording --------------------------------------------------------------------------------------------------

    def record(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        ins: list[torch.Tensor],
        outs: list[torch.Tensor],
        meaning: Meaning | None = None,
    ) -> None:
        """Write one node down."""
        if func is not aten.detach.default:
            self._last_place = self._place_now
        place = self.place()
        # Autograd nodes made since the last op belong to this place
        current = torch.autograd._get_sequence_nr()
        if self._first_origin < 0:
            self._first_origin = current
        missing = current - self._first_origin - len(self._origin)
        if missing > 0:
            self._origin.extend([place] * missing)
        if any(t.layout is not torch.strided for t in outs):
            raise CaptureError(f"a sparse tensor is made in module {place[0]!r}, {place[1]}: captures know dense "
                               "tensors only, so build the layer with sparse=False")  # fmt: skip
        inputs = tuple([self.value_of(t) for t in ins if _HOST not in t.__dict__])
        if meaning is None:
            meaning = self._meaning(func, args, kwargs, ins, outs, place)
        op, attrs = meaning
        op, attrs = self._homed(func, op, attrs, ins, outs)
        on_host = (bool(outs) and _HOST in outs[0].__dict__) or op == "host"
        outputs = () if on_host else self._outputs(func, args, inputs, ins, outs)
        if self.num_calls:
            attrs["calls"], self.num_calls = self.num_calls, 0
        if self._engine:
            node = torch._C._current_autograd_node()
            if node is not None:
                for out in outs:
                    out.__dict__[_MADE_BY] = node._sequence_nr()
        self.nodes.append(RawNode(op, inputs, outputs, attrs, self.phase, place[0], place[1], target_of(func)))

    def _homed(
        self, func: Any, op: str, attrs: dict[str, Any], ins: list[torch.Tensor], outs: list[torch.Tensor]
    ) -> Meaning:
        """Work of the host thread and copies over the link are told apart from work of the accelerator."""
        to_host = self._makes_host(ins, func)
        from_host = bool(ins) and all(_HOST in t.__dict__ for t in ins)
        if not to_host and not from_host:
            return op, attrs
        if func is aten._to_copy.default and from_host != to_host:
            attrs = {"fn": "to", "direction": "d2h" if to_host else "h2d"}
            op = "transfer"
        elif from_host or not ins:
            op, attrs = "host", {"fn": str(attrs.get("fn", op))}
        if to_host:
            for out in outs:
                out.__dict__[_HOST] = True
        return op, attrs

    def _outputs(
        self, func: Any, args: Any, inputs: tuple[int, ...], ins: list[torch.Tensor], outs: list[torch.Tensor]
    ) -> tuple[int, ...]:
        """New values of the outputs; an output that is an input, or looks at one's storage, is its alias."""
        if not is_mutable(func):
            of = inputs[0] if inputs and is_view(func) else None
            return tuple([self._output(out, of) for out in outs if _HOST not in out.__dict__])
        written = outs or _written(func, ins, args)
        made = []
        for out in written:
            if _HOST in out.__dict__:
                continue
            before = out.__dict__.pop(_VALUE, None)
            made.append(self._new_value(out, Kind.ACTIVATION, "", before))
        return tuple(made)

    def _output(self, out: torch.Tensor, of: int | None) -> int:
        if _VALUE in out.__dict__:  # an op that handed its input back
            before = out.__dict__.pop(_VALUE)
            return self._new_value(out, Kind.ACTIVATION, "", before)
        return self._new_value(out, Kind.ACTIVATION, "", of)

    def _meaning(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        ins: list[torch.Tensor],
        outs: list[torch.Tensor],
        place: tuple[str, str],
    ) -> Meaning:
        rule = meaning_of(func)
        if rule is None:
            return self._declared(func, args, kwargs, ins, outs, place)
        call = Call(base_name(func), func._overloadname, args, kwargs, ins, outs)
        op, attrs = rule(call)
        if is_mutable(func) and op in ("pointwise", "copy", "fill", "random", "scatter"):
            attrs["inplace"] = True
        return op, attrs

    def _declared(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        ins: list[torch.Tensor],
        outs: list[torch.Tensor],
        place: tuple[str, str],
    ) -> Meaning:
        name = func._schema.name
        if declared_cost(name) is None:
            raise UnknownOp(name, *place)
        plain = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False) if not _holds_tensor(v)}
        plain |= {key: v for key, v in kwargs.items() if not _holds_tensor(v)}
        cost = checked_cost(name, tuple(map(self.type_of, ins)), tuple(map(self.type_of, outs)), plain)
        typed = next((t for t in (*ins, *outs) if t.dtype.is_floating_point), None)
        return "custom", {
            "name": name,
            "dtype": str(self.type_of(typed).dtype) if typed is not None else "fp32",
            **cost,
        }

    def assume(self, text: str) -> None:
        self.assumptions[text] = None

    # --- modules ----------------------------------------------------------------------------------------------------

    @contextmanager
    def inside(self, module: str) -> Iterator[None]:
        """Ops run inside belong to ``module``."""
        self.num_calls += 1
        self.module_stack.append(module)
        try:
            yield
        finally:
            self.module_stack.pop()


# Set from outside the class body: PyTorch wraps a mode's method in compiler guards, which hide the caller's frame.
Recorder.__torch_dispatch__ = Recorder.meet  # type: ignore[method-assign]


def _owners(t: torch.Tensor) -> tuple[int, int]:
    """How many hold the tensor and its storage, the machinery of this call included."""
    holders = t._use_count() if hasattr(t, "_use_count") else 0
    return holders, torch._C._storage_Use_Count(t.untyped_storage()._cdata)  # type: ignore[attr-defined]


def _is_dense(t: torch.Tensor) -> bool:
    """Every element of a stretch of memory once, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


_ACCELERATOR_BELOW = torch.device("cpu", 0)


def _layout(t: torch.Tensor) -> str:
    """``contiguous``, ``channels_last``, ``transposed`` (the last dim is not the dense one) or ``strided``, from the
    strides of dims longer than one."""
    if t.layout is not torch.strided:
        return "strided"
    if _is_packed(t, range(t.dim())):
        return "contiguous"
    if t.dim() in (4, 5) and _is_packed(t, [0, *range(2, t.dim()), 1]):
        return "channels_last"
    innermost = next((dim for dim in reversed(range(t.dim())) if t.shape[dim] > 1), None)
    return "transposed" if innermost is not None and t.stride(innermost) > 1 else "strided"


def _is_packed(t: torch.Tensor, order: Any) -> bool:
    expected = 1
    for dim in reversed(list(order)):
        if t.shape[dim] != 1:
            if t.stride(dim) != expected:
                return False
            expected *= t.shape[dim]
    return True


_INTERNAL: dict[str, bool] = {}


def _is_internal(filename: str) -> bool:
    found = _INTERNAL.get(filename)
    if found is None:
        found = filename.startswith((_TORCH_ROOT, _OWN_ROOT, "<")) or "/contextlib.py" in filename
        _INTERNAL[filename] = found
    return found


def _tensors(args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for item in args:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            found.extend(_tensors(item, {}))
    for item in kwargs.values():
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            found.extend(_tensors(item, {}))
    return found


def _holds_tensor(value: Any) -> bool:
    return bool(_tensors((value,), {}))


def _written(func: Any, ins: list[torch.Tensor], args: Any) -> list[torch.Tensor]:
    """Tensors an op without outputs writes: its first list, or its first tensor."""
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
    if not writes or not args:
        return []
    return list(args[0]) if isinstance(args[0], (list, tuple)) else ins[:1]


# --- ops whose result hangs on data ---------------------------------------------------------------------------------

_Handler = Callable[[Recorder, Any, Any, dict[str, Any], list[torch.Tensor]], Any]
_DATA_DEPENDENT: dict[str, _Handler] = {}


def _on(names: str) -> Callable[[_Handler], _Handler]:
    def register(fn: _Handler) -> _Handler:
        for name in names.split():
            _DATA_DEPENDENT[name] = fn
        return fn

    return register


@_on("_local_scalar_dense")
def _item(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any], ins: list[torch.Tensor]) -> Any:
    t = args[0]
    if rec.recording:
        rec.record(func, args, kwargs, ins, [])
    known = shadow_of(t)
    if known is not None:
        with outside_modes():
            return known.item()
    module, source = rec.place()
    answer: Any = 1.0 if t.dtype.is_floating_point else False if t.dtype is torch.bool else 1
    rec.assume(
        f"item() of unknown {dtype_name(t.dtype)} data at {source or module or 'top level'} is taken as {answer}"
    )
    return answer


@_on("any all _is_any_true _is_all_true")
def _truth(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any], ins: list[torch.Tensor]) -> Any:
    if shadow_of(ins[0]) is not None:
        return NotImplemented
    out = func(*args, **kwargs)
    if rec.recording:
        rec.record(func, args, kwargs, ins, [out])
    answer = "all" in base_name(func)
    if shadows.affordable(out):
        with outside_modes():
            give_shadow(out, torch.full(tuple(out.shape), answer))
    rec.assume("checks over unknown floats pass: any(...) is False, all(...) is True")
    return out


@_on("histc")
def _histc(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any], ins: list[torch.Tensor]) -> Any:
    """CUDA counts integers too; here they are counted as floats."""
    t = args[0]
    if t.dtype.is_floating_point:
        return NotImplemented
    known = shadow_of(t)
    bins = args[1] if len(args) > 1 else kwargs.get("bins", 100)
    with outside_modes():
        real = (
            torch.zeros(bins, dtype=t.dtype) if known is None else func(known.float(), *args[1:], **kwargs).to(t.dtype)
        )
    out = rec.fake_of(real)
    if rec.recording:
        rec.record(func, args, kwargs, ins, [out])
    return out


@_on("_ctc_loss")
def _ctc_loss(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any], ins: list[torch.Tensor]) -> Any:
    """A loss per sequence, and the alphas over the longest target that backward needs."""
    log_probs, targets = args[0], args[1]
    batch = log_probs.shape[1] if log_probs.dim() == 3 else 1
    longest = targets.shape[1] if targets.dim() == 2 else -(-targets.shape[0] // max(batch, 1))
    with outside_modes():
        loss = torch.empty((batch,), dtype=log_probs.dtype, device="meta")
        alphas = torch.empty((batch, log_probs.shape[0], 2 * longest + 1), dtype=log_probs.dtype, device="meta")
    outs = [rec.fake_like(loss), rec.fake_like(alphas)]
    if rec.recording:
        rec.record(func, args, kwargs, ins, outs)
    return tuple(outs)


@_on("native_layer_norm native_batch_norm _native_batch_norm_legit")
def _kept_wide(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any], ins: list[torch.Tensor]) -> Any:
    """CUDA keeps the statistics of half-precision rows in fp32."""
    if args[0].dtype not in (torch.float16, torch.bfloat16):
        return NotImplemented
    out, *kept = func(*args, **kwargs)
    with outside_modes():
        metas = [torch.empty(tuple(t.shape), dtype=torch.float32, device="meta") for t in kept]
    outs = [out, *[rec.fake_like(t) for t in metas]]
    for t in outs:
        give_shadow(t, None)
    if rec.recording:
        rec.record(func, args, kwargs, ins, outs)
    return tuple(outs)


@_on("_nested_tensor_from_mask_left_aligned")
def _left_aligned(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any], ins: list[torch.Tensor]) -> Any:
    rec.assume("padded batches of nn.TransformerEncoder are run padded, not as nested tensors")
    return False


@_on("_pack_padded_sequence")
def _pack_padded(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any], ins: list[torch.Tensor]) -> Any:
    """Rows of all sequences, step by step; how many there are the lengths say."""
    x, lengths = args[0], shadow_of(args[1])
    if lengths is None:
        return NotImplemented
    with outside_modes():
        sizes = [int((lengths > step).sum()) for step in range(int(lengths.max()))]
        data = torch.empty((sum(sizes), *x.shape[2:]), dtype=x.dtype, device="meta")
        batch_sizes = torch.tensor(sizes)
    outs = [rec.fake_like(data), rec.fake_of(batch_sizes)]
    outs[1].__dict__[_HOST] = True
    if rec.recording:
        rec.record(func, args, kwargs, ins, outs)
    return tuple(outs)


@_on("equal")
def _equal(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any], ins: list[torch.Tensor]) -> Any:
    if rec.recording:
        rec.record(func, args, kwargs, ins, [])
    if all(shadow_of(t) is not None for t in ins):
        return shadows.run_real(func, args, kwargs)
    rec.assume("torch.equal over unknown data is False")
    return False


@_on("nonzero masked_select _unique2 unique_dim unique_consecutive bincount repeat_interleave argwhere")
def _sized_by_data(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any], ins: list[torch.Tensor]) -> Any:
    name = base_name(func)
    deciding = ins[1:2] if name == "masked_select" else ins[:1]
    for t in deciding:
        if shadow_of(t) is None:
            # Data nobody knows, taken as every other element true (masks) or as 0, 1, 2, … (integers)
            if not shadows.affordable(t) or t.dtype.is_floating_point:
                module, source = rec.place()
                raise CaptureError(
                    f"{name}() of unknown data in module {module!r}, {source}, decides a shape: "
                    "pass real integer inputs, or keep the decision out of the captured step"
                )
            with outside_modes():
                counted = torch.arange(t.numel())
                value = (counted % 2 == 0) if t.dtype is torch.bool else counted
                give_shadow(t, value.to(t.dtype).reshape(tuple(t.shape)))
            rec.assume(f"{name}() of a mask over unknown floats: every other element is taken as true")
    if name == "masked_select":
        mask = shadow_of(ins[1])
        assert mask is not None
        with outside_modes():
            shape = torch.broadcast_shapes(tuple(ins[0].shape), tuple(mask.shape))
            num = int(mask.expand(shape).sum())
            out = torch.empty(num, dtype=ins[0].dtype, device="meta")
        fake = rec.fake_like(out)
        give_shadow(fake, None)
        if rec.recording:
            rec.record(func, args, kwargs, ins, [fake])
        return fake
    real = shadows.run_real(func, args, kwargs)
    flat = [real] if isinstance(real, torch.Tensor) else list(real)
    fakes = [rec.fake_of(r) for r in flat]
    if rec.recording:
        rec.record(func, args, kwargs, ins, fakes)
    return fakes[0] if isinstance(real, torch.Tensor) else tuple(fakes)


@_on("index _unsafe_index")
def _index(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any], ins: list[torch.Tensor]) -> Any:
    """A boolean mask is turned into positions first, as the library does: a nonzero, then a gather."""
    indices = args[1]
    if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return NotImplemented
    positions: list[Any] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            positions.append(index)
            continue
        where = _sized_by_data(rec, aten.nonzero.default, (index,), {}, [index])
        known = shadow_of(where)
        assert known is not None
        with outside_modes():
            columns = [c.contiguous() for c in known.unbind(1)]
        positions.extend(rec.look_at(c, where) for c in columns)
    return rec._run(func, (args[0], positions, *args[2:]), kwargs)
