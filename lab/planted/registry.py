"""Cases with one injected cause each, and control programs without one: how they are declared and registered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a transformer."""

    width: int = 1024
    layers: int = 8
    heads: int = 16
    vocab: int = 50304
    hidden: int = 0
    causal: bool = True


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a case runs, and whether at toy size."""

    device: str
    tiny: bool

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def pick(self, full: Any, toy: Any) -> Any:
        return toy if self.tiny else full

    def shape(self, **sizes: Any) -> Shape:
        toy = {"width": 32, "layers": 2, "heads": 2, "vocab": 97 if sizes.get("vocab", 0) % 8 else 96}
        toy |= {"hidden": 43 if sizes["hidden"] % 8 else 48} if sizes.get("hidden") else {}
        return Shape(**(sizes | toy if self.tiny else sizes))

    def place(self, make: Callable[[], nn.Module], dtype: torch.dtype = torch.bfloat16) -> Any:
        """The module, its weights drawn where they will live; batch norms keep fp32 as cuDNN wants them."""
        with torch.device(self.device):
            module = make().to(dtype)
        for part in module.modules():
            part.float() if isinstance(part, nn.BatchNorm2d) else None
        return module

    def pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self.cuda else tensor

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class Program:
    """Something that runs step by step; ``scope`` holds while it runs, ``close`` ends what it started."""

    step: Step
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    close: Callable[[], None] = lambda: None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Case:
    """A cause, the change that removes it, and how to build either program."""

    name: str
    cause: str
    change: str
    build: Callable[[Setting, bool], Program]
    suite: str  # the folder of its recordings
    rounds: int = 2
    warmup: int = 4
    steps: int = 9
    compiles: bool = False
    planted_steps: int = 0
    variants: tuple[str, ...] = ("planted", "fixed")
    stack: bool = True  # the planted program is also recorded with its Python stack
    traced: bool = True
    plain: bool = False  # also recorded without shapes, schedule and marks of steps
    both: bool = False  # the planted program compiles as well, and is warmed up


CASES: dict[str, Case] = {}


def case(cause: str, change: str, **plan: Any) -> Callable[[Callable[[Setting, bool], Program]], Any]:
    """Registers the function below as a case with this cause, and the change that removes it."""

    def register(build: Callable[[Setting, bool], Program]) -> Callable[[Setting, bool], Program]:
        if build.__name__ in CASES:
            raise ValueError(f"two cases are named {build.__name__}")
        CASES[build.__name__] = Case(build.__name__, cause, change, build, **plan)
        return build

    return register


@contextmanager
def running(programs: list[Program]) -> Iterator[None]:
    """Ends what the programs started, whatever happened."""
    with ExitStack() as stack:
        for program in programs:
            stack.callback(program.close)
        yield
