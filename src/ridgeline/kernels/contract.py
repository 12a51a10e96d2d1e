"""What makes a function a primitive: one declaration, from which every view of it follows.

A declaration names the functions that only the op's author can write (what runs, what it would return, what it costs,
what it should have computed). From it come a ``torch.library`` op with fake and autograd registrations, an eager path
that goes around the dispatcher, a support query, a price for ``predict``, tests and a benchmark.

Three routes lead to a kernel. Tracing (compile, export, fake tensors, tensor subclasses) takes the registered op. An
eager call that needs a gradient takes an ``autograd.Function`` made from the same functions. An eager call that needs
none goes straight to the launch. Under functorch's transforms, which see through no custom op, the reference runs.
Eager calls that come again with the same description are repeated in C++ (``direct``), with or without a gradient.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ridgeline.errors import KernelError, nearest
from ridgeline.graph.declared import CostFn, cost_of
from ridgeline.kernels.call_cache import attach, noting
from ridgeline.kernels.compiler import POINTER_ALIGNMENT_BYTES
from ridgeline.kernels.launcher import launchable

NAMESPACE = "ridgeline_kernels"
DTYPES = ("float32", "bfloat16", "float16")
Tensors = Any
"""A tensor, or a tuple of them: what an op returns."""

_active_modes = torch._C._len_torch_dispatch_stack
_active_transforms = torch._C._are_functorch_transforms_active
_grad_enabled = torch.is_grad_enabled
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_SCALARS = frozenset({float, int, bool, str, type(None)})


@dataclass(frozen=True, slots=True)
class Support:
    """The answer to "can you run this?": yes, or no with the reason."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return "yes" if self.ok else f"no, because {self.reason}"


@dataclass(frozen=True, slots=True)
class Case:
    """One problem of a primitive: sizes by name, and the floating-point type of its tensors."""

    dtype: str
    sizes: tuple[tuple[str, Any], ...]

    def __getitem__(self, name: str) -> Any:
        return dict(self.sizes)[name]

    def get(self, name: str, default: Any = None) -> Any:
        return dict(self.sizes).get(name, default)

    def __str__(self) -> str:
        return " ".join([self.dtype, *(f"{name}={value}" for name, value in self.sizes)])


def case(dtype: str, **sizes: Any) -> Case:
    return Case(dtype, tuple(sizes.items()))


COMMON_WIDTHS = (64, 128, 256, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192, 12288, 16384)
"""Hidden sizes that models have: a pack holds the kernels of rows this long."""


def common_rows() -> tuple[Case, ...]:
    """Few and many rows of every common width, in every type."""
    return tuple(case(d, rows=rows, cols=cols) for d in DTYPES for cols in COMMON_WIDTHS for rows in (8, 1024, 16384))


@dataclass(frozen=True, slots=True)
class Laps:
    """The race of an op that changes its arguments: each contender with state of its own, ready to run again."""

    runs: Mapping[str, Callable[[], Any]]  # ours is "ridgeline"
    num_bytes: int  # the fewest that a lap must move
    compilable: Callable[[], Any] | None = None  # what torch.compile may take part with


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How a primitive is checked and raced, all from its declaration.

    ``make`` draws fresh arguments of ``call``; ``call`` is the public function, ``eager`` PyTorch's own form of it in
    the same precision and ``reference`` the same thing in whatever precision its inputs have. ``mistakes`` are
    plausible wrong kernels: the tolerance has to reject each.
    """

    make: Callable[[Case, torch.device, torch.Generator], tuple[Any, ...]]
    call: Callable[..., Any]
    eager: Callable[..., Any]
    reference: Callable[..., Any]
    mistakes: Mapping[str, Callable[..., Any]]
    checks: Sequence[Case]
    races: Sequence[Case]
    raced: Callable[..., Any] | None = None  # what PyTorch users write, where ``eager`` had to be something else
    timed: Callable[..., Any] | None = None  # what is timed of ours, where ``call`` does more so that it can be checked
    small: Sequence[Case] = ()
    packs: Sequence[Case] = ()  # further cases whose kernels a pack holds
    phases: tuple[str, ...] = ("fwd", "bwd")  # "step" where the forward pass already does work of the backward
    layouts: bool = True  # whether other layouts of the inputs are checked too
    deterministic: bool = True
    constants: tuple[int, ...] = ()  # arguments that are tables or state: nobody asks for their gradient
    forward_bytes: Callable[..., int] | None = None  # (args, outputs) where "each tensor once" is not what must move
    backward_bytes: Callable[..., int] | None = None
    times_eager: float | None = None  # the error allowed, in PyTorch's: less than two where rounding is all there is
    laps: Callable[[Case, torch.device, torch.Generator], Laps] | None = None  # where a call changes its arguments


@dataclass(eq=False, slots=True, kw_only=True)
class Primitive:
    """A declared primitive. Calling it takes the fastest route that is right for the arguments."""

    name: str
    summary: str
    schema: str
    forward: Callable[..., Tensors]
    infer: Callable[..., Tensors]
    fake: Callable[..., Tensors]
    reference: Callable[..., Tensors]
    support: Callable[..., str | None]
    num_results: int
    setup: Callable[..., None] | None = None
    backward: Callable[..., Any] | None = None
    trials: Mapping[str, Trial] = field(default_factory=dict)
    op: Any = None
    function: Any = field(default=None, repr=False)
    repeats: bool = False
    multiplies: bool = False
    keyed: bool = False
    front: Callable[..., Any] | None = None
    direct: Any = field(default=None, repr=False)
    quick: Any = field(default=None, repr=False)
    known: set[tuple[Any, ...]] = field(default_factory=set, repr=False)

    def __call__(self, *args: Any) -> Any:
        if is_dynamo_compiling():
            return self.traced(*args)
        return (self.direct or self.slow)(*args)

    def slow(self, *args: Any) -> Any:
        """The same in Python: the first calls of a shape, and whatever is unusual."""
        needs_grad = here = elsewhere = False
        for value in args:
            kind = type(value)
            if kind is _Tensor or kind is _Parameter:
                if value.requires_grad:
                    needs_grad = True
                if value.is_cuda:
                    here = True
                else:
                    elsewhere = True
            elif kind not in _SCALARS:  # a fake tensor, a distributed one, or another subclass
                return self.traced(*args)
        if not self.keyed or (here and elsewhere):
            self._meet(args)
        if _active_transforms():
            return self.composed(*args)
        if _active_modes() and not noting():
            return self.traced(*args)
        if needs_grad and _grad_enabled():
            return self._shown(self.function.apply(*args)) if self.function is not None else self.traced(*args)
        return self.infer(*args)

    def _meet(self, args: tuple[Any, ...]) -> None:
        """Types, shapes and devices that were not seen yet are checked: launch plans are kept by less than all."""
        looks: list[Any] = []
        for value in args:
            if isinstance(value, torch.Tensor):
                looks += (value.dtype, value.shape, value.get_device())
            elif value is None:
                looks.append(None)
        if (seen := tuple(looks)) in self.known:
            return
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        if any(launchable(value) for value in tensors):
            self.check(*args)
            if (reason := _apart(tensors)) is not None:
                raise KernelError(f"{self.name}: {reason}")
        # max known
        if len(self.known) >= 4096:
            self.known.clear()
        self.known.add(seen)

    def checked(self, *args: Any) -> Tensors:
        """What the registered op runs: the forward function, on types and shapes that were checked."""
        self._meet(args)
        return self.forward(*args)

    def traced(self, *args: Any) -> Any:
        """The registered op: what compilers and tracers see."""
        return self._shown(self.op(*args))

    def composed(self, *args: Any) -> Any:
        """The reference as plain PyTorch: what functorch can differentiate, batch and push forward."""
        wide = [value.float() if _is_narrow(value) else value for value in args]
        dtype = next(value.dtype for value in args if isinstance(value, torch.Tensor))
        shown = self._shown(self.reference(*wide))
        return tuple(o.to(dtype) for o in shown) if isinstance(shown, tuple) else shown.to(dtype)

    def _shown(self, outputs: Any) -> Any:
        """What the caller asked for, without what only the backward pass needs."""
        if not isinstance(outputs, (tuple, list)):
            return outputs
        return outputs[0] if self.num_results == 1 else tuple(outputs[: self.num_results])

    def supports(self, *args: Any) -> Support:
        """Whether kernels run these arguments."""
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        try:
            reason = self.support(*args) or _where(tensors)
        except (TypeError, AttributeError, IndexError, RuntimeError, ValueError) as error:
            reason = f"these are not the arguments of {self.name}{self.schema.partition(' ->')[0]}: {error}"
        return Support(reason is None, reason or "")

    def check(self, *args: Any) -> None:
        """Refuse what no kernel was written for, saying why."""
        reason = self.support(*args)
        if reason is not None:
            raise KernelError(f"{self.name}: {reason}")

    def check_out(self, out: torch.Tensor, *args: Any) -> None:
        """Refuse a tensor for the result that is not exactly as the result would be, or where a gradient is wanted."""
        self._meet(args)
        meant, tensors = self.fake(*args), [value for value in args if isinstance(value, torch.Tensor)]
        alike = (out.shape, out.dtype, out.device) == (meant.shape, meant.dtype, meant.device)
        if not alike or not out.is_contiguous() or out.data_ptr() % POINTER_ALIGNMENT_BYTES:
            kind = f"{meant.dtype} {tuple(meant.shape)} on {meant.device}, contiguous from a multiple of 16 bytes on"
            raise KernelError(f"{self.name}: out must be {kind}, and is {out.dtype} {tuple(out.shape)} on {out.device}")
        if _grad_enabled() and any(value.requires_grad for value in (out, *tensors)):
            raise KernelError(f"{self.name}: out= does not record gradients; call it under torch.no_grad()")

    def on_host(self, *args: Any) -> Tensors:
        """The reference on CPU tensors, in float32 or better, with the types and layouts the kernel would return."""
        meant = self.fake(*args)
        outputs = self.reference(*[_upcast(value) for value in args])
        if isinstance(meant, torch.Tensor):
            return meant.copy_(outputs)
        return tuple(empty.copy_(found) for found, empty in zip(outputs, meant, strict=True))


_primitives: dict[str, Primitive] = {}
attach(lambda: list(_primitives.values()))


def declare(
    *,
    name: str,
    summary: str,
    schema: str,
    forward: Callable[..., Tensors],
    fake: Callable[..., Tensors],
    reference: Callable[..., Tensors],
    support: Callable[..., str | None],
    cost: CostFn,
    infer: Callable[..., Tensors] | None = None,
    num_results: int = 1,
    setup: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    trial: Trial | None = None,
    trials: Mapping[str, Trial] | None = None,
    repeats: bool = False,
    multiplies: bool = False,
    keyed: bool = False,
    front: Callable[..., Any] | None = None,
) -> Primitive:
    """Declare a primitive under ``ridgeline_kernels::name``; a second declaration of a name is an error.

    ``forward`` returns what the schema says; ``infer`` only the results a caller sees, where that is cheaper.
    ``setup`` and ``backward`` are those of ``torch.library.register_autograd``. One trial is named as the primitive;
    an op with several public functions gives ``trials`` by their names. ``repeats`` says that ``forward``, ``infer``
    and ``backward`` only allocate and launch through ``Kernel.bind``, so that calls may be repeated without Python;
    ``multiplies`` that products by PyTorch's ``mm`` and ``addmm`` are among what they do, and that nothing but the
    description of a call decides which.
    ``keyed`` says that its plans are kept by the type and shape of every argument, so that nobody else has to look.
    ``front`` is what a public function of positional arguments does before it calls the primitive: with the same
    description of its arguments it has to hand over the same tensors and numbers, outside autocast. Its calls that come
    again go from there to C++ (``quick``).
    """
    if name in _primitives:
        raise KernelError(f"primitive {name!r} is declared twice")
    made = Primitive(
        name=name,
        summary=summary,
        schema=schema,
        forward=forward,
        infer=infer or (lambda *args: made._shown(forward(*args))),
        fake=fake,
        reference=reference,
        support=support,
        num_results=num_results,
        setup=setup,
        backward=backward,
        trials=({name: trial} if trial else {}) | dict(trials or {}),
        repeats=repeats,
        multiplies=multiplies,
        keyed=keyed,
        front=front,
    )
    _registered(made)
    made.op = getattr(getattr(torch.ops, NAMESPACE), name).default
    if backward is not None:
        made.function = _autograd_function(made)
    cost_of(f"{NAMESPACE}::{name}")(cost)
    _primitives[name] = made
    return made


def _registered(made: Primitive) -> None:
    changed = re.findall(r"Tensor\(\w!\)\S* (\w+)", made.schema)
    op = torch.library.custom_op(f"{NAMESPACE}::{made.name}", made.checked, mutates_args=changed, schema=made.schema)
    op.register_fake(made.fake)
    if made.backward is not None:
        op.register_autograd(made.backward, setup_context=made.setup)


def _autograd_function(made: Primitive) -> Any:
    """The eager gradient path: the registered op's functions without the dispatcher around them.

    A gradient of the gradient is refused, not silently zero: where one is being recorded, the backward primitive takes
    its registered op, which has no derivative.
    """

    def forward(ctx: Any, *args: Any) -> Any:
        # One method, not forward and setup_context: with two, PyTorch binds the arguments by signature at every call.
        outputs = made.forward(*args)
        made.setup(ctx, args, outputs)  # type: ignore[misc]
        return outputs

    body = {
        "forward": staticmethod(forward),
        "backward": staticmethod(made.backward),  # type: ignore[arg-type]
    }
    return type(f"{made.name}_function", (torch.autograd.Function,), body)


def primitives() -> Mapping[str, Primitive]:
    """Every declared primitive by name, backward passes included."""
    return _primitives


def primitive(name: str) -> Primitive:
    if name not in _primitives:
        raise KernelError(f"no primitive {name!r}{nearest(name, _primitives)}")
    return _primitives[name]


def trials() -> Mapping[str, tuple[Primitive, Trial]]:
    """Every public function that is checked and raced, by name."""
    return {name: (made, trial) for made in _primitives.values() for name, trial in made.trials.items()}


def _is_narrow(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _upcast(value: Any) -> Any:
    return value.detach().float() if _is_narrow(value) else value


def _where(tensors: Iterable[torch.Tensor]) -> str | None:
    """Why tensors lie where no kernel can reach them together, or None."""
    tensors = list(tensors)
    if (reason := _apart(tensors)) is not None:
        return reason
    found = next((t.device for t in tensors), torch.device("cpu"))
    if found.type != "cuda":
        return f"its tensors are on {found}; kernels need a CUDA device, the reference runs instead"
    major, minor = torch.cuda.get_device_capability(found)
    if (major, minor) < (8, 0):
        return f"{found} has compute capability {major}.{minor}; 8.0 is the least"
    return None


def _apart(tensors: Iterable[torch.Tensor]) -> str | None:
    """That tensors are on different devices, or None."""
    devices = {t.device for t in tensors}
    return f"its tensors are on different devices: {', '.join(sorted(map(str, devices)))}" if len(devices) > 1 else None


def elementwise_cost(flops_per_element: float) -> CostFn:
    """The price of a memory-bound op: every tensor moved once, a few operations on each element of the largest."""

    def cost(inputs: tuple[Any, ...], outputs: tuple[Any, ...], **kwargs: Any) -> dict[str, float]:
        return {"flops": flops_per_element * max((t.numel for t in (*inputs, *outputs)), default=0)}

    return cost
