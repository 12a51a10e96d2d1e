"""What a search knows of a model, its call and its machine before it begins, and what stages propose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ridgeline.optimizer.receipt import Entry
from ridgeline.optimizer.search.blocks import Group
from ridgeline.optimizer.search.candidate import Built, Candidate
from ridgeline.optimizer.search.forecast import Forecast

KERNELS_A_LEAF = 2.5
"""Kernels a leaf module launches in eager mode, where nothing was priced: as in lab/workloads.py."""
HOST_A_KERNEL_S = 1.5e-5
"""What the host takes to start one in eager mode, at most: a model written as one function has a single leaf, and may
be long all the same."""
COMPILING_S = 45.0
"""A budget in which something will be compiled, so that the compiler may as well be imported before all else."""
IMPORTS_S = {"torch._dynamo": 2.5, "torch._inductor.compile_fx": 1.5}
"""PyTorch's tracer and compiler, imported by a process that has not compiled yet."""
COPY_BYTES_PER_S = 4.0e12
"""What an H200 copies: 4.24e12 measured, lab/notes/rows.md."""
STOCK = "torch.compile"
DEFAULT_BUDGET_S = 120.0
"""A budget in which torch.compile is always measured, however long it takes to make (in training: begun)."""
AS_IT_IS = "compiled as it is"
"""What torch.compile makes, without our rewrites and past its guards: these and our own look at a call take 30 to 50 µs
more than our look alone, which a call of half a millisecond feels."""
PLAIN, GRAPHED = "graph", " + graph"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the stages of a search depend on."""

    mode: str
    cuda: bool
    eager_s: float
    groups: tuple[Group, ...]
    num_leaves: int
    unlike_frac: float  # share of the kernels that are left when equal blocks are counted once
    has_conv: bool  # whether weights can be laid channels last
    substitutable: tuple[str, ...]  # parts that kernels can be put in place of
    unmasked: bool  # whether a mask among the inputs hides nothing
    has_cache: bool  # whether a key-value cache is among the inputs
    forecast: Forecast | None
    budget_s: float
    num_products: int = 6  # of different sizes, in one block of each kind
    num_threads: int = 16  # that compile beside each other
    input_bytes: int = 0
    num_convs: int = 0  # layers that convolve
    convolves: bool = False  # whether there are convolutions at all, in whatever layout
    grouped_frac: float = 1.0  # share of the layers that are in blocks of which there are several
    long_rows: bool = False  # whether norms have longer rows than Inductor holds in registers
    groups_channels: bool = False  # whether GroupNorm stands between them, which as it is undoes channels last
    random: bool = False  # whether results depend on random numbers
    headed: bool = False  # whether a vocabulary's head is outside of blocks, and no part of ours takes over its loss
    host_s: float = 0.0  # until an eager call returns
    recurrent: bool = False  # whether there are recurrent layers, which no compiler looks into
    import_s: float = 0.0  # to import what this process does not have yet of PyTorch's compiler

    @property
    def copies_s(self) -> float:
        """Seconds that a recorded call takes to copy inputs which lie elsewhere than those it was recorded with."""
        return 2 * self.input_bytes / COPY_BYTES_PER_S

    @property
    def num_kernels(self) -> float:
        """Kernels that a compiler would see: of recurrent layers it sees none of the thousands of their steps."""
        per_leaf = KERNELS_A_LEAF * (3 if self.mode == "train" else 1)
        if self.forecast is None and self.cuda and not self.recurrent and self.mode == "infer":
            return max(per_leaf * self.num_leaves, self.host_s / HOST_A_KERNEL_S)
        if self.forecast is None or self.recurrent:
            return per_leaf * self.num_leaves
        return self.forecast.num_kernels if self.forecast.num_seen is None else self.forecast.num_seen


@dataclass(frozen=True, slots=True)
class Proposal:
    """A candidate to try, the seconds it is expected to take to make, and the call time the cost model expects."""

    candidate: Candidate
    cost_s: float
    predicted_s: float | None = None


class Progress(Protocol):
    """What later stages see of earlier ones."""

    best: Built
    entries: dict[str, Entry]
