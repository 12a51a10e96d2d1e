"""Serving engines as data: how each one schedules, and what its software costs on each generation of devices."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from ridgeline.basis import Basis
from ridgeline.cost.time.chip import related_archs
from ridgeline.errors import CalibrationError, InputError, nearest
from ridgeline.hardware import Device
from ridgeline.resources import data_dir

COEFFICIENTS = {
    "gemm": "time of dense products over what the cost model says",
    "experts": "time of fused experts over what their model says",
    "decode": "time of decoding attention over what the cost model says",
    "prefill": "time of prefill attention over what the cost model says",
    "link": "time of collectives over what their model says",
    "kernel_s": "each short kernel (norm, rotation, activation, quantization) beside its bytes",
    "iteration_s": "once an iteration on the critical path: scheduling, inputs, launch, sampled tokens back",
    "sequence_s": "each running sequence in an iteration: bookkeeping and detokenization that shows",
    "mixed_s": "what an iteration with prompt tokens takes longer, a model of 60 layers in mind",
    "call_s": "host time an operator needs where an iteration is not replayed from a graph; they bind when longer",
    "request_s": "from a request's arrival to the scheduler and back with its first token, beside the iterations",
    "token_s": "serial front-end time a prompt token (tokenizer, transport)",
    "rank_s": "once an iteration for every further device of an instance: inputs sent to it, and the wait for the last",
    "draft_s": "host time each sequence needs in a step that checks drafts",
    "gemm_many": "what the factor of dense products gains from few tokens to thousands",
    "experts_many": "the same of fused experts",
    "link_many": "the same of collectives",
}


@dataclass(frozen=True, slots=True)
class Engine:
    """One generation of a serving engine: its policy, and coefficients for a device."""

    name: str
    title: str
    mixed: bool  # prompt tokens share iterations with decoding ones; else prompts go first, alone
    chunked: bool  # a prompt may be cut to fill an iteration
    chunk_tokens: int
    max_sequences: int
    memory_frac: float  # of the device's memory for weights and cache, or for the cache of what weights leave
    counts_free: bool
    reserves: bool  # admits a request only when its whole output fits
    graphed_prompts: bool  # iterations with prompt tokens are replayed from graphs as well
    graphed_steps: bool  # decoding steps are replayed from graphs
    reads_peers: bool  # sums small messages through peers' memory instead of the communication library
    block_tokens: int
    graph_tokens: int = 0  # the most tokens an iteration that is replayed may hold; 0 is any number
    ragged: bool = False  # four-bit experts by the first ragged products of Triton, on hardware without the format
    ahead: bool = False  # plans an iteration while the one before it runs: who comes then waits for both
    poll_steps: int = 1  # decoding steps between looks at the queue
    hold_steps: int = 0  # decoding steps a lone prompt is held back for others to join it
    hold_prompts: int = 0  # prompts that end the wait; 0 is as many as fill an iteration
    compiled: bool = False  # the model's operators are compiled together: the host sees little but kernels
    own_kernels: bool = False  # compiled for the model; else those of the libraries that all engines share
    cold_s: int = 0  # compiling kernels at the first prompt, on a fresh server
    cold_chunk_s: int = 0  # compiling kernels when an iteration is first full of prompt tokens, on a fresh server
    coef: Mapping[str, float] = field(default_factory=dict, hash=False)
    basis: Basis = Basis.ASSUMED
    width: float = 0.5  # log half-width that held 90 % of published runs
    first_width: float = 1.0  # the same of first tokens

    def change(self, **settings: Any) -> Engine:
        """The same engine with other settings, as its command line would take them."""
        given = ("name", "title", "coef", "basis", "width", "first_width")
        known = {f for f in self.__dataclass_fields__ if f not in given}
        for name, value in settings.items():
            if name not in known:
                raise InputError(f"engine setting {name!r} is unknown{nearest(name, known)}")
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise InputError(f"engine setting {name}={value} must be at least 1")
        return replace(self, **settings)


@lru_cache(maxsize=2)
def _table(file: str = "engines.toml") -> dict[str, Any]:
    path = data_dir() / file
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise CalibrationError(f"table {path.name} cannot be read ({error}): reinstall ridgeline") from None


def engines() -> list[str]:
    return sorted(_table())


def engine(name: str, device: Device) -> Engine:
    """The engine called ``name`` on ``device``: fitted for its architecture, else with that of its kin."""
    table = _table()
    if name not in table:
        raise InputError(f"no serving engine {name!r}{nearest(name, table)}")
    entry = table[name]
    sets: Mapping[str, Mapping[str, Any]] = entry["coef"]
    found = next((arch for arch in (device.arch, *related_archs(device.arch)) if arch in sets), next(iter(sets)))
    exact = found == device.arch and device.parent is None
    basis = Basis.FITTED if exact else Basis.ASSUMED
    coef = {**DEFAULTS, **{k: v for k, v in sets[found].items() if k in COEFFICIENTS}}
    wider = 1.0 if exact else 1.5
    width = float(sets[found].get("width", 0.5)) * wider
    first = float(sets[found].get("first_width", 2 * width / wider)) * wider
    policy = {k: v for k, v in entry.items() if k in Engine.__dataclass_fields__ and k != "coef"}
    return Engine(name=name, coef=coef, basis=basis, width=width, first_width=first, **policy)


DEFAULTS: Mapping[str, float] = {
    "gemm": 1.0, "experts": 1.0, "decode": 1.0, "prefill": 1.0, "link": 1.0, "kernel_s": 1.6e-6,
    "iteration_s": 0.6e-3, "sequence_s": 3e-6, "mixed_s": 2e-3, "call_s": 25e-6, "request_s": 0.03, "token_s": 2e-6,
    "rank_s": 0.0, "draft_s": 0.0, "gemm_many": 1.0, "experts_many": 1.0, "link_many": 1.0,
}  # fmt: skip


def kernel_factors(arch: str, dense: str, experts: str, attention: str) -> dict[str, float]:
    """What kernels of these formats and this kind of attention take over what the cost model says, under any engine."""
    table: dict[str, dict[str, float]] = _table("kernels.toml").get(arch, {})
    kinds = {"gemm": dense, "gemm_many": dense, "experts": experts, "experts_many": experts, "decode": attention,
             "prefill": attention}  # fmt: skip
    return {part: float(table.get(part, {}).get(kind, 1.0)) for part, kind in kinds.items()}
