"""One step of a model, run on fake tensors and written down as a graph: forward, backward, optimizer."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ridgeline.capture.cuda_eager import cuda_eager
from ridgeline.capture.expansions import expand_fast_paths
from ridgeline.capture.facade import accelerator_facade
from ridgeline.capture.fold import folded
from ridgeline.capture.model import InputConverter, module_paths, on_fakes, unwrapped
from ridgeline.capture.recorder import Recorder
from ridgeline.errors import CaptureError, nearest
from ridgeline.graph import RESIDENT, Graph, Kind, Node, Phase, Value

OptimizerChoice = str | Callable[..., Any] | None


def capture_step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mode: str,
    optimizer: OptimizerChoice,
    loss: Callable[..., Any] | None,
    name: str | None,
    bindings: Mapping[str, int],
    autocast: str | None,
    fold: bool,
) -> Graph:
    """Run one step and return its graph."""
    if mode not in ("infer", "train"):
        raise CaptureError(f"mode {mode!r} is not one of 'infer' and 'train'")
    model = unwrapped(model)
    rec = Recorder(FakeTensorMode())
    with _surroundings(model, rec, mode == "train"):
        fake_args, fake_kwargs = _on_fakes(rec, args, kwargs, bindings)
        runner = _Training(model, rec, optimizer, loss) if mode == "train" else _Inference(model, rec)
        keep = runner.run(fake_args, fake_kwargs, autocast)
        outputs = [rec.root_of(t) for t in _tensors_in(keep) if "_rl_host" not in t.__dict__]
        rec.recording = False
    graph = _finished(rec, outputs, name or type(model).__name__, mode)
    return folded(graph) if fold else graph


def _on_fakes(
    rec: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any], bindings: Mapping[str, int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs as fakes; nothing but them keeps the fakes alive, so that a cache that is replaced dies."""
    converter = InputConverter(rec, bindings)
    made = tuple(converter.rewritten(a, str(i)) for i, a in enumerate(args))
    return made, {key: converter.rewritten(value, key) for key, value in kwargs.items()}


def run_unrecorded(model: nn.Module, kwargs: Mapping[str, Any]) -> Any:
    """The output of a forward pass in eval mode, on fakes."""
    rec = Recorder(FakeTensorMode())
    with _surroundings(model, rec, training=False):
        _, fake_kwargs = _on_fakes(rec, (), kwargs, {})
        return model(**fake_kwargs)


@contextmanager
def _surroundings(model: nn.Module, rec: Recorder, training: bool) -> Iterator[None]:
    """Everything that makes the process look like eager CUDA, undone in the end."""
    collecting = gc.isenabled()
    with ExitStack() as stack:
        rng = torch.get_rng_state()
        stack.callback(torch.set_rng_state, rng)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_quiet())
        stack.enter_context(_no_tracing_seen())
        stack.enter_context(cuda_eager())
        stack.enter_context(on_fakes(model, rec, training))
        stack.enter_context(module_paths(model, rec))
        expand_fast_paths(rec)
        stack.enter_context(torch.set_grad_enabled(training))
        stack.enter_context(rec.fake_mode)
        stack.enter_context(rec)
        stack.enter_context(accelerator_facade())
        gc.disable()
        stack.callback(gc.enable if collecting else gc.disable)
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """The fake mode logs a traceback for every op that fails; the error we raise says it better."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _no_tracing_seen() -> Iterator[None]:
    """Libraries that treat fake tensors as a sign of tracing must behave as in a real run."""
    library: Any = sys.modules.get("transformers.utils.import_utils")
    original = getattr(library, "is_fake_tensor", None)
    if original is None:
        yield
        return
    library.is_fake_tensor = lambda x: False
    try:
        yield
    finally:
        library.is_fake_tensor = original


class _Inference:
    def __init__(self, model: nn.Module, rec: Recorder) -> None:
        self.model, self.rec = model, rec

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], autocast: str | None) -> Any:
        self.rec.recording = True
        with _autocasting(autocast):
            return self.model(*args, **kwargs)


class _Training:
    def __init__(
        self, model: nn.Module, rec: Recorder, optimizer: OptimizerChoice, loss: Callable[..., Any] | None
    ) -> None:
        self.model, self.rec, self.loss = model, rec, loss
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = made_optimizer(optimizer, self.parameters)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], autocast: str | None) -> Any:
        # See on a small sum of gradients what reference counts a tensor has that only autograd holds
        x = torch.zeros(2, requires_grad=True)
        (x.sin() + x.cos()).sum().backward()
        self._reach_steady_state()
        self.rec.recording = True
        with _autocasting(autocast):
            output = self.model(*args, **kwargs)
            loss = scalar_loss(output, self.loss)
        self.rec.phase = Phase.BACKWARD
        del output
        loss.backward()
        for p in self.parameters:
            if p.grad is not None:
                self.rec.values[self.rec.root_of(p.grad)].kind = Kind.GRAD
        self.rec.phase = Phase.OPTIMIZER
        if self.optimizer is not None:
            self.optimizer.step()
        return loss

    def _reach_steady_state(self) -> None:
        """A first, unrecorded step makes the optimizer's states, as every step after the first finds them."""
        if self.optimizer is None:
            return
        for p in self.parameters:
            p.grad = torch.empty_like(p)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, FakeTensor):
                    group = self.optimizer.param_groups[0]
                    if key == "step" and not group.get("fused") and not group.get("capturable"):
                        value.__dict__["_rl_host"] = True
                    else:
                        self.rec.value_of(value, Kind.STATE, key)


def _autocasting(autocast: str | None) -> Any:
    from ridgeline.capture.model import torch_dtype
    from ridgeline.dtypes import dtype

    if autocast is None:
        return ExitStack()
    return torch.autocast("cuda", dtype=torch_dtype(dtype(autocast).name))


_OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-4, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-4, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=1e-4, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, foreach=True),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2, foreach=True),
}  # fmt: skip


def made_optimizer(choice: OptimizerChoice, parameters: list[Any]) -> Any:
    """The optimizer by name, by the caller's own factory, or none."""
    if choice is None or not parameters:
        return None
    if callable(choice):
        return choice(parameters)
    if choice not in _OPTIMIZERS:
        raise CaptureError(
            f"unknown optimizer {choice!r}{nearest(choice, _OPTIMIZERS)}; or pass a function of the parameters"
        )
    return _OPTIMIZERS[choice](parameters)


def scalar_loss(output: Any, loss: Callable[..., Any] | None) -> torch.Tensor:
    """What backward starts from: the caller's loss, the model's own, or the mean of its output."""
    if loss is not None:
        return loss(output)  # type: ignore[no-any-return]
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own if own.dim() == 0 else own.mean()
    if (
        isinstance(output, Mapping)
        and output
        and all(isinstance(v, torch.Tensor) and v.dim() == 0 for v in output.values())
    ):
        return sum(output.values())  # type: ignore[return-value]
    candidates = [t for t in _tensors_in(output) if t.is_floating_point() and t.requires_grad]
    if not candidates:
        raise CaptureError("the model's output holds no floating tensor that depends on a trainable parameter: "
                           "pass loss=callable(output), or capture with mode='infer'")  # fmt: skip
    first = candidates[0]
    return first if first.dim() == 0 else first.float().mean()


def _tensors_in(tree: Any, seen: set[int] | None = None) -> list[torch.Tensor]:
    """Every tensor a result holds, through containers and plain objects such as caches."""
    seen = set() if seen is None else seen
    if isinstance(tree, torch.Tensor):
        return [tree] if isinstance(tree, FakeTensor) else []
    if id(tree) in seen or isinstance(tree, (str, bytes, int, float, type(None), type, nn.Module)):
        return []
    seen.add(id(tree))
    if isinstance(tree, Mapping):
        return [t for value in tree.values() for t in _tensors_in(value, seen)]
    if isinstance(tree, (list, tuple, set)):
        return [t for value in tree for t in _tensors_in(value, seen)]
    if hasattr(tree, "__dict__") and not callable(tree):
        return [t for value in vars(tree).values() for t in _tensors_in(value, seen)]
    return []


def _finished(rec: Recorder, outputs: list[int], name: str, mode: str) -> Graph:
    """The flat immutable graph of a recording."""
    values = tuple(_values(rec))
    items = tuple(Node(n.op, n.inputs, n.outputs, n.attrs, n.phase, n.module, n.source, n.target, tuple(n.frees))
                  for n in rec.nodes)  # fmt: skip
    inputs = tuple(v.id for v in values if v.kind is Kind.INPUT and v.alias is None)
    meta: dict[str, Any] = {
        "framework": f"torch {torch.__version__.split('+')[0]}",
        "assumptions": list(rec.assumptions),
    }
    donated = [f for n in rec.nodes for f in n.frees if values[f].kind in RESIDENT]
    if donated:
        meta["donated"] = donated
    return Graph(name, values, items, inputs, tuple(dict.fromkeys(outputs)), mode, meta)


def _values(rec: Recorder) -> Iterator[Value]:
    for i, raw in enumerate(rec.values):
        root = rec.values[rec._root(i)]
        yield Value(i, raw.type, root.kind, raw.alias, 1, raw.name, raw.storage_bytes)
