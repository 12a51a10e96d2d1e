"""Seconds of one engine iteration for any mix of decoding sequences and prompt tokens, from a few exact points."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ridgeline.cost.time.chip import Floats
from ridgeline.sim.serving.deployment import KV_BYTES, cache_bytes_per_token, weight_bytes
from ridgeline.sim.serving.engine import Engine, kernel_factors
from ridgeline.sim.serving.link import fabric
from ridgeline.sim.serving.step import (
    Rank,
    Sum,
    attention_side,
    decode_attention_s,
    expert_side,
    head_s,
    prefill_attention_s,
)

CONTEXT_KNOTS = (1.0, 128.0, 512.0, 2048.0, 8192.0, 32768.0, 131072.0, 1048576.0)


def knots(largest: int) -> Floats:
    """Whole numbers from 1 to ``largest``: every one to 16, then in steps of about a seventh."""
    found, value = list(range(1, min(16, largest) + 1)), 16.0
    while value < largest:
        # Neighboring exact points of a table are at most this far apart, above the smallest sizes
        value = min(float(largest), max(value + 1, value * 1.15))
        found.append(round(value))
    return np.unique(np.array(found, dtype=np.float64))


def spread_over(exact: Floats, points: Floats, largest: int) -> list[float]:
    """A table by whole number, straight between exact points; index 0 costs nothing."""
    filled = np.interp(np.arange(largest + 1), points, exact)
    filled[0] = 0.0
    return list(filled.tolist())


@dataclass(frozen=True, slots=True)
class Oracle:
    """Tables that one deployment's iterations are looked up in; ``tokens`` are per attention group or of all groups."""

    rank: Rank
    engine: Engine
    group_s: list[float]  # by tokens of the fullest attention group
    joint_s: list[float]  # by tokens of all groups
    head_s: list[float]  # by sequences that need logits
    decode_s: list[tuple[float, ...]]  # by sequences of a group, then context knot
    prompt_s: list[float]  # attention of a prompt from scratch, by its length
    past_s: float  # a cached token before a chunk
    host_floor_s: float  # an iteration outside graphs lasts at least this
    group_w: tuple[float, float]  # (matrix, DRAM) seconds at peak a token
    weight_peak_s: float  # DRAM seconds at peak for the weights an iteration reads
    stages: int
    hop_s: float  # activations from stage to stage, once through
    host_s: float  # once an iteration, whatever is in it

    def decode_attention_s(self, sequences: int, context: float) -> float:
        """One step of a group's ``sequences`` at mean ``context``."""
        if not sequences:
            return 0.0
        row = self.decode_s[min(sequences, len(self.decode_s) - 1)]
        at = min(max(bisect_right(CONTEXT_KNOTS, context) - 1, 0), len(CONTEXT_KNOTS) - 2)
        low, high = CONTEXT_KNOTS[at], CONTEXT_KNOTS[at + 1]
        return row[at] + (row[at + 1] - row[at]) * (context - low) / (high - low)

    def prompt_attention_s(self, new: int, past: int) -> float:
        """A chunk of ``new`` tokens behind ``past`` cached ones: what the longer prompt costs more."""
        table, end = self.prompt_s, past + new
        if end < len(table):
            return table[end] - table[past] + self.past_s * past
        last = len(table) - 1
        grown = table[last] * (end / last) ** 2
        return grown - (table[past] if past < last else table[last] * (past / last) ** 2) + self.past_s * past

    def steps_s(self, sequences: int, groups: int, context: float, num: int, tokens_each: int = 1) -> float:
        """``num`` decoding steps of ``sequences`` in all, whose mean context grows by one a step."""
        sequences = -(-sequences // self.stages)  # a stage works on one share while the others work on theirs
        mine = -(-sequences // groups)
        coef = self.engine.coef
        fixed = self.group_s[self._cut(mine * tokens_each, self.group_s)]
        fixed += self.joint_s[self._cut(sequences * tokens_each, self.joint_s)] + self.hop_s
        fixed += self.head_s[self._cut(mine * tokens_each, self.head_s)]
        fixed += self.host_s + coef["sequence_s"] * mine  # each attention group has a host process of its own
        fixed += coef["draft_s"] * mine if tokens_each > 1 else 0.0
        attention = self.decode_attention_s(mine, context)
        if num > 1:
            attention = (attention + self.decode_attention_s(mine, context + num - 1)) / 2
        busy = fixed + attention if self.engine.graphed_steps else max(fixed + attention, self.host_floor_s)
        return num * busy

    def mixed_s(
        self, sequences: int, groups: int, context: float, prompts: list[tuple[int, int]], largest: int, done: int,
        tokens_each: int = 1,
    ) -> float:  # fmt: skip
        """An iteration with prompt chunks (new, past) beside decoding; ``largest`` is the fullest group's tokens."""
        coef, parts = self.engine.coef, max(1, min(self.stages, len(prompts)))
        mine = -(-sequences // (groups * self.stages))
        new = sum(chunk for chunk, _ in prompts)
        busy = self.group_s[self._cut(mine * tokens_each + largest // parts, self.group_s)]
        busy += self.joint_s[self._cut((sequences // self.stages) * tokens_each + new // parts, self.joint_s)]
        busy += self.head_s[self._cut(mine * tokens_each + done, self.head_s)] + self.hop_s
        busy += self.decode_attention_s(mine, context)
        attention = sum(self.prompt_attention_s(chunk, past) for chunk, past in prompts)
        busy += attention * (largest / max(new, 1)) / parts
        if not sequences:  # the pipeline fills and drains; where it is full of decoding, parts follow without a gap
            busy *= 1 + (parts - 1) / self.stages
        # Whether an iteration with prompts, so many tokens in all, comes from a graph
        tokens = mine * tokens_each + largest
        engine = self.engine
        is_replayed = engine.graphed_prompts and not 0 < engine.graph_tokens < tokens
        if not is_replayed:
            busy = busy + self.host_floor_s if self._is_recurrent else max(busy, self.host_floor_s)
        # The depth for which an engine's extra cost of prompts is stated; it grows with the depth
        more_s = coef["mixed_s"] * self.rank.anatomy.num_layers / 60
        hosted = -(-(sequences + len(prompts)) // groups)
        drafts_s = coef["draft_s"] * mine if tokens_each > 1 else 0.0
        return busy + self.host_s + more_s + coef["sequence_s"] * hosted + drafts_s

    @property
    def _is_recurrent(self) -> bool:
        """Recurrences are cut into chunks by what the device knows: host and device wait for each other."""
        return self.rank.anatomy.attention == "recurrent"

    @staticmethod
    def _cut(index: int, table: list[float]) -> int:
        return index if index < len(table) else len(table) - 1


def oracle(
    rank: Rank, engine: Engine, max_sequences: int, max_prompt: int, max_chunk: int, tokens_each: int = 1
) -> Oracle:
    """Build the tables: a few dozen exact points each, straight lines between them. ``tokens_each`` is what a sequence
    computes in a step, its drafts among it."""
    groups = rank.layout.attention_dp
    tokens = max_chunk + max_sequences
    coef, stages = coefficients_of(rank, engine), rank.layout.pp

    calls = 2.0 * rank.anatomy.num_layers

    def table(side: Callable[[Rank, Floats], Sum], largest: int) -> list[float]:
        nonlocal calls
        points = knots(largest)
        total = side(rank, points)
        # How much of a host's work besides launches is left where operators are compiled together: calls of whole
        # attention layers stay calls.
        calls += total.calls + total.views * ((1 / 3) if engine.compiled else 1.0)
        never_less = np.maximum.accumulate(weighted(total, points, coef))  # for more tokens
        return spread_over(never_less, points, largest)

    group_s, joint_s = table(attention_side, tokens), table(expert_side, tokens * groups)
    sequences = knots(max(1, -(-max_sequences // groups)))
    contexts = np.array(CONTEXT_KNOTS)
    exact = decode_attention_s(rank, sequences[:, None], contexts[None, :], tokens_each) * coef["decode"]
    whole = np.arange(int(sequences[-1]) + 1)
    columns = [np.interp(whole, sequences, exact[:, i]) for i in range(len(contexts))]
    prompts = knots(max(2, max_prompt))
    lengths = prefill_attention_s(rank, prompts, np.zeros_like(prompts)) * coef["prefill"]
    heads = knots(max(2, max_sequences + 512))
    # What a cached token costs each later chunk of its prompt: its latent form is expanded again
    scale = coef["prefill"]
    size = np.array([4096.0])
    again = prefill_attention_s(rank, size, size * 3) - (
        prefill_attention_s(rank, size * 4, 0 * size) - prefill_attention_s(rank, size * 3, 0 * size)
    )
    past_s = max(0.0, float(again[0]) * scale / float(size[0] * 3))
    weights_s = weight_bytes(rank.anatomy, rank.layout, rank.precision) / rank.chip.dram_bytes_per_s
    # What every draft's own pass adds to the host's time for an iteration outside graphs
    return Oracle(
        rank, engine, group_s, joint_s,
        spread_over(head_s(rank, heads) * coef["gemm"], heads, int(heads[-1])),
        [tuple(float(c[i]) for c in columns) for i in whole],
        spread_over(lengths, prompts, int(prompts[-1])), past_s,
        calls * coef["call_s"] * (1 + 0.12 * (tokens_each - 1)),
        _peak_shares(rank), weights_s, stages, _hop_s(rank),
        coef["iteration_s"] + coef["rank_s"] * (rank.layout.num_devices - 1),
    )  # fmt: skip


def coefficients_of(rank: Rank, engine: Engine) -> dict[str, float]:
    """The engine's coefficients for this rank's kernels."""
    if engine.own_kernels:
        return dict(engine.coef)
    precision = rank.precision
    factors = kernel_factors(rank.chip.arch, precision.dense.name, precision.experts.name, rank.anatomy.attention)
    return {name: value * factors.get(name, 1.0) for name, value in engine.coef.items()}


def weighted(total: Sum, tokens: Floats, coef: Mapping[str, float]) -> Floats:
    """Seconds by part under the engine's coefficients, short kernels with their fixed cost."""
    # Tokens at which a factor is halfway (in logarithms) between those of few and of thousands
    many = tokens / (tokens + 256)
    factor = {part: coef[part] * coef[f"{part}_many"] ** many for part in ("gemm", "experts", "link")}
    fixed = total.kernels * coef["kernel_s"]
    return np.asarray(sum(seconds * factor.get(part, 1.0) for part, seconds in total.parts.items()) + fixed)


def _peak_shares(rank: Rank) -> tuple[float, float]:
    """Seconds a token keeps the matrix units and the DRAM busy at their peaks, for energy."""
    active = 0.0
    for group in rank.anatomy.layers:
        e = group.experts
        routed = 3 * rank.anatomy.hidden * (e.top * e.ffn + e.shared) if e else rank.anatomy.ffn_params(group)
        active += group.count * (rank.anatomy.mixer_params(group.mixer) + routed)
    dtype = rank.precision.experts.dtype
    dtype = dtype if dtype in rank.chip.tensor_flops_per_s else "bf16"
    matrix_s = 2 * active / rank.layout.num_devices / rank.chip.peak_flops_per_s(dtype)
    cache = cache_bytes_per_token(rank.anatomy, rank.layout, rank.precision) * KV_BYTES[rank.precision.kv] / 2
    return matrix_s, cache / rank.chip.dram_bytes_per_s


def _hop_s(rank: Rank) -> float:
    """Activations of a decoding step through all stages."""
    if rank.layout.pp == 1:
        return 0.0
    return fabric(rank.device, rank.layout.num_devices).send_s(rank.anatomy.hidden * 2.0 * 16) * (rank.layout.pp - 1)
