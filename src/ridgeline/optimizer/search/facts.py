"""The facts on model, call and machine that stages depend on, and the proposal type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ridgeline.optimizer.receipt import Entry
from ridgeline.optimizer.search.blocks import Group
from ridgeline.optimizer.search.candidate import Built, Candidate
from ridgeline.optimizer.search.forecast import Forecast

COMPILING_S = 45.0
"""From this budget on something will be compiled, so the compiler is imported first."""
IMPORTS_S = {"torch._dynamo": 2.5, "torch._inductor.compile_fx": 1.5}
"""Import times of PyTorch's tracer and compiler in a new process."""
STOCK = "torch.compile"
DEFAULT_BUDGET_S = 120.0
"""From this budget on torch.compile is always measured, however long it takes to build (in training: started)."""
AS_IT_IS = "compiled as it is"
"""The code of torch.compile without rewrites and past its guards: both guard checks together take 30 to 50 µs more than
ours alone, which shows in a call of half a millisecond."""
PLAIN, GRAPHED = "graph", " + graph"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Properties of model, call and machine that the stages depend on."""

    mode: str
    cuda: bool
    eager_s: float
    groups: tuple[Group, ...]
    num_leaves: int
    unlike_frac: float  # share of the kernels that is left when equal blocks are counted once
    has_conv: bool  # whether weights can be made channels last
    substitutable: tuple[str, ...]  # parts that kernels of ours can replace
    unmasked: bool  # whether a mask among the inputs hides nothing
    has_cache: bool  # whether a key-value cache is among the inputs
    forecast: Forecast | None
    budget_s: float
    num_products: int = 6  # GEMMs of different sizes, in one block of each kind
    num_threads: int = 16  # compile processes
    input_bytes: int = 0
    num_convs: int = 0
    convolves: bool = False  # whether there are convolutions, in whatever layout
    grouped_frac: float = 1.0  # share of the layers that are in repeated blocks
    long_rows: bool = False  # whether norms have longer rows than Inductor holds in registers by default
    groups_channels: bool = False  # whether there is a GroupNorm, whose eager kernel undoes channels last
    random: bool = False  # whether results depend on random numbers
    headed: bool = False  # whether a vocabulary's head is outside of blocks, and its loss is not replaced
    host_s: float = 0.0  # until an eager call returns
    recurrent: bool = False  # whether there are recurrent layers, which compilers do not trace
    import_s: float = 0.0  # to import the missing parts of PyTorch's compiler

    @property
    def copies_s(self) -> float:
        """Seconds that a captured call takes to copy its inputs, at an H200's 4.2e12 B/s (lab/notes/rows.md)."""
        return 2 * self.input_bytes / 4.0e12

    @property
    def num_kernels(self) -> float:
        """Kernels that a compiler would see. Unless priced, 2.5 per leaf module; of recurrent layers it sees none."""
        per_leaf = 2.5 * (3 if self.mode == "train" else 1)
        if self.forecast is None and self.cuda and not self.recurrent and self.mode == "infer":
            # A model written as one function has one leaf; eager takes at most 15 µs of the host per kernel.
            return max(per_leaf * self.num_leaves, self.host_s / 1.5e-5)
        if self.forecast is None or self.recurrent:
            return per_leaf * self.num_leaves
        return self.forecast.num_kernels if self.forecast.num_seen is None else self.forecast.num_seen


@dataclass(frozen=True, slots=True)
class Proposal:
    """A candidate with the expected build time, and the call time that the cost model predicts."""

    candidate: Candidate
    cost_s: float
    predicted_s: float | None = None


class Progress(Protocol):
    """The results of earlier stages that later ones read."""

    best: Built
    entries: dict[str, Entry]
