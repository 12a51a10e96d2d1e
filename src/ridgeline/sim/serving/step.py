"""The operators of one engine iteration on one rank, priced by the cost model for many batch sizes at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ridgeline.basis import Basis
from ridgeline.cost.calibration import calibration_of
from ridgeline.cost.price import STREAMING_FRAC
from ridgeline.cost.time.attention.tiles import attention_timing
from ridgeline.cost.time.chip import Chip, Floats, chip_of
from ridgeline.cost.time.gemm.tiles import gemm_timing, itemsize
from ridgeline.hardware import Device
from ridgeline.sim.serving.anatomy import Anatomy, Layers, Mixer
from ridgeline.sim.serving.deployment import KV_BYTES, Format, Layout, Precision
from ridgeline.sim.serving.experts import ROUTED_KERNELS, SHORT_KERNELS, Grouped, coefficients, crowding, experts_s
from ridgeline.sim.serving.link import Fabric, fabric

PARTS = ("gemm", "experts", "decode", "prefill", "link", "small")
"""Where the time of an iteration goes."""
DECODE_LIBRARY = {"blackwell": "trtllm_decode", "ada": "fa2_decode"}
PREFILL_LIBRARY = {"blackwell": "trtllm", "ada": "fa2_paged", "ampere": "flashinfer"}
STREAM_FRAC = 0.75  # share of DRAM bandwidth that norms, activations and copies reach
LATENT_DRAM_FRAC, LATENT_TENSOR_FRAC, LATENT_S = 0.75, 0.55, 8e-6
"""Decoding over a latent cache, as FlashMLA and its kin do: published 660 TFLOP/s and 3,000 GB/s on an H800."""
LATENT_TILE = 64
SCORE_TENSOR_FRAC = 0.4  # share of the fp8 peak at which an index scores keys
LATENT_VIEWS, RECURRENT_VIEWS = 60, 60
"""Splits, views, small copies and checks around latent attention, and slow launches of a recurrence's chunk kernels:
only a host without compiled graphs notices them. With 20 a layer, a prompt of DeepSeek took the hosts of two engines
2.5 times as long an operator as one of gpt-oss. Set on published runs of DeepSeek, GLM-5 and Qwen3.5."""
RAGGED_KERNELS, RAGGED_VIEWS = 12, 60
"""Sorts, histograms and scans by which the first ragged products of Triton route four-bit experts where the hardware
has no such format, and what an eager host does for them. Set on published runs of gpt-oss on Hopper, one device to
eight: 12 µs short a layer and step, 60 ms a prompt."""
SCAN_HEAD_S, SCAN_TOKEN_S = 1.6e-9, 25e-9
"""Chunked gated recurrences: a token and value head where many run side by side, and a token of one sequence, whose
chunks follow each other. Kernel tables of ai-dynamo/aiconfigurator (gdn, TensorRT-LLM 1.3 and SGLang 0.5.14; B200 and
H200 differ by 3 %): 8,192 tokens and 16 heads take 0.39 ms alone and 0.22 ms beside three others."""
PIECES = Mapping[str, Floats]


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of a deployment, with everything that pricing its operators needs."""

    anatomy: Anatomy
    device: Device
    layout: Layout
    precision: Precision
    chip: Chip
    inner: Fabric  # ranks that share a layer's attention
    outer: Fabric  # ranks that share its experts
    ragged: bool = False  # four-bit experts by the first ragged products of Triton

    @property
    def basis(self) -> Basis:
        return max(calibration_of(self.device).basis, self.device.basis_of("dram.bandwidth"))


def rank_of(
    anatomy: Anatomy, device: Device, layout: Layout, precision: Precision, *, reads_peers: bool = True,
    ragged: bool = False,
) -> Rank:  # fmt: skip
    inner, outer = (fabric(device, num, reads_peers=reads_peers) for num in (layout.tp, layout.width))
    unpacked = precision.experts.name == "mxfp4" and device.arch != "blackwell"
    return Rank(anatomy, device, layout, precision, chip_of(device), inner, outer, ragged and unpacked)


def _dtype_of(rank: Rank, form: Format) -> str:
    """The matrix dtype a format runs in here: hardware without it multiplies in bf16 after unpacking."""
    wanted = form.dtype if form.dtype in rank.chip.tensor_flops_per_s else "bf16"
    return wanted if wanted in rank.chip.tensor_flops_per_s else "fp16"


def product_s(rank: Rank, form: Format, m: ArrayLike, n: float, k: float, b: float = 1) -> Floats:
    """A product whose weights stream from DRAM beside warm activations; narrow weights are unpacked on the way."""
    rows = np.maximum(np.atleast_1d(np.asarray(m, dtype=np.float64)), 1.0)
    dtype = _dtype_of(rank, form)
    entry = calibration_of(rank.device).entry("gemm", dtype) or calibration_of(rank.device).entry("gemm", "bf16") or {}
    coef = dict(entry.get("coef", {}))
    if "ramp_s" in coef:
        coef["ramp_s"] *= STREAMING_FRAC
    size = itemsize(dtype)
    inputs, weights = b * rows * k * size, b * n * k * size
    kept = np.where(inputs < rank.chip.l2_bytes / 2, inputs, 0.0)
    saved = max(0.0, 1 - form.weight_bytes / size)
    warm = (kept + weights * saved) / (inputs + weights)
    timing = gemm_timing(rank.chip, coef, b=b, m=rows, n=max(n, 1), k=max(k, 1), dtype=dtype, warm_frac=warm,
                         library=entry.get("library", "cublas"))  # fmt: skip
    return timing.expected_s


@dataclass(slots=True)
class Sum:
    """Adds up the parts of a group of layers: seconds by part, small kernels and the bytes they move apart."""

    parts: dict[str, Floats]
    kernels: float = 0.0
    calls: float = 0.0  # operators a host without graphs has to launch
    views: float = 0.0  # what it does besides where nothing is compiled

    def add(self, part: str, seconds: Floats, times: float = 1.0) -> None:
        self.parts[part] = self.parts.get(part, 0.0) + seconds * times
        self.calls += times


def attention_side(rank: Rank, tokens: Floats) -> Sum:
    """Everything a layer does for the tokens of one attention group, but for the attention itself."""
    total = Sum({})
    for group in rank.anatomy.layers:
        _projections(rank, group, tokens, total)
        total.add("link", rank.inner.all_reduce_s(tokens * rank.anatomy.hidden * 2.0), group.count)
        fused = _norms_fused(rank, rank.inner)
        _stream(rank, total, tokens * rank.anatomy.hidden * 2.0 * 4, 0 if fused else 1, group.count)
    return total


def _norms_fused(rank: Rank, group: Fabric) -> bool:
    """Whether a sum over ranks ends in the next norm: kernels of Blackwell's libraries that every engine turned on."""
    return rank.chip.arch == "blackwell" and group.num > 1 and group.has_peers


def _stream(rank: Rank, total: Sum, num_bytes: Floats, kernels: float, times: float) -> None:
    """Norms, activations, rotations, quantization: short kernels that stream."""
    total.add("small", np.asarray(num_bytes / (STREAM_FRAC * rank.chip.dram_bytes_per_s)), times)
    total.kernels += kernels * times
    total.calls += (kernels - 1) * times  # the bytes above counted as one


def _projections(rank: Rank, group: Layers, tokens: Floats, total: Sum) -> None:
    m, h, tp, form = group.mixer, rank.anatomy.hidden, rank.layout.tp, rank.precision.dense
    quants = 2 if form.quantizes else 0
    shapes: tuple[tuple[float, float, float], ...]
    if m.recurrence:
        r = m.recurrence
        width, value = (2 * r.key_heads + 2 * r.value_heads) * r.dim / tp, r.value_heads * r.dim / tp
        shapes = ((width, h, 1.0), (2 * r.value_heads / tp, h, 1.0), (h, value, 1.0))
        total.views += group.count * RECURRENT_VIEWS
        _stream(rank, total, tokens * width * 2 * 4, 9 + quants, group.count)
    elif m.latent:
        shapes = _latent_shapes(m, h, tp)
        total.views += group.count * LATENT_VIEWS
        _stream(rank, total, tokens * (m.latent.q_rank + h) * 2 * 2, 6 + quants + (8 if m.index else 0), group.count)
    else:
        kv = max(m.kv_heads, tp) / tp
        width = (m.heads / tp * (2 if m.gated else 1) + 2 * kv) * m.dim
        shapes = ((width, h, 1.0), (h, m.heads / tp * m.dim, 1.0))
        _stream(rank, total, tokens * width * 2 * 3, 2 + quants, group.count)
    if m.normed_across:
        total.add("link", rank.inner.all_reduce_s(tokens * 8.0), group.count)
        # squares, their sum over ranks, and the scaling of queries and keys that are normed over all heads
        _stream(rank, total, tokens * (m.heads + m.kv_heads) * m.dim / tp * 2.0 * 4, 4, group.count)
    for n, k, b in shapes:
        total.add("gemm", product_s(rank, form, tokens, n, k, b), group.count)


def _latent_shapes(m: Mixer, h: int, tp: int) -> tuple[tuple[float, float, float], ...]:
    """(n, k, batch) of the products around latent attention, keys and values absorbed."""
    low, heads = m.latent, m.heads / tp
    assert low is not None
    shapes = [
        (low.q_rank + low.kv_rank + low.rope, h, 1.0),
        (heads * (low.nope + low.rope), low.q_rank, 1.0),
        (low.kv_rank, low.nope, heads),
        (low.value, low.kv_rank, heads),
        (h, heads * low.value, 1.0),
    ]
    if m.index:
        shapes += [(m.index.heads * m.index.dim, low.q_rank, 1.0), (m.index.dim + m.index.heads, h, 1.0)]
    return tuple(shapes)


def expert_side(rank: Rank, tokens: Floats) -> Sum:
    """The feed-forward half of every layer, for the tokens of all attention groups together."""
    total = Sum({})
    for group in rank.anatomy.layers:
        (_experts if group.experts else _feed_forward)(rank, group, tokens, total)
        _meet(rank, group, tokens, total)
        fused = rank.layout.attention_dp == 1 and _norms_fused(rank, rank.outer)
        own = tokens / rank.layout.attention_dp
        _stream(rank, total, own * rank.anatomy.hidden * 2.0 * 4, 0 if fused else 1, group.count)
    return total


def _meet(rank: Rank, group: Layers, tokens: Floats, total: Sum) -> None:
    """What joins the ranks behind a feed-forward: a sum, or an exchange both ways when requests are split."""
    num_bytes = tokens * rank.anatomy.hidden * 2.0
    if rank.layout.attention_dp == 1:
        total.add("link", rank.outer.all_reduce_s(num_bytes), group.count)
    else:
        total.add("link", 2 * rank.outer.exchange_s(num_bytes * _sent_frac(rank, group)), group.count)


def _sent_frac(rank: Rank, group: Layers) -> float:
    """Share of all tokens a rank receives: all of them within a host, beyond it those that picked its experts."""
    ranks = rank.layout.width
    # up to so many, engines gather all tokens everywhere; wider groups send each where it is needed
    if group.experts is None or ranks <= 8:
        return 1.0
    return 1 - (1 - 1 / ranks) ** group.experts.top


def _feed_forward(rank: Rank, group: Layers, tokens: Floats, total: Sum, width: float = 0.0) -> None:
    form, h, ranks = rank.precision.dense, rank.anatomy.hidden, rank.layout.width
    ffn = (width or group.ffn) / ranks
    sides = 2 if rank.anatomy.gated else 1
    total.add("gemm", product_s(rank, form, tokens, sides * ffn, h), group.count)
    total.add("gemm", product_s(rank, form, tokens, h, ffn), group.count)
    _stream(rank, total, tokens * ffn * 2 * 3, 1 + (2 if form.quantizes else 0), group.count)


def _experts(rank: Rank, group: Layers, tokens: Floats, total: Sum) -> None:
    e, h, layout, form = group.experts, rank.anatomy.hidden, rank.layout, rank.precision.experts
    assert e is not None
    sides = 3 if rank.anatomy.gated else 2
    here = e.num / layout.ep
    local = Grouped(h, e.ffn / layout.moe_tp, here, e.top / layout.ep * crowding(layout.ep, here), sides)
    dtype = "fp8" if form.name == "mxfp4" and rank.chip.arch == "blackwell" else _dtype_of(rank, form)
    kind = form.name if dtype == form.dtype else "mxfp4"  # unpacked on the way, or with eight-bit inputs
    coef = coefficients(rank.chip.arch, kind)
    peak = rank.chip.peak_flops_per_s(dtype)
    total.add("experts", experts_s(rank.chip, coef, local, tokens, form.weight_bytes, peak), group.count)
    router = Format("bf16", 2.0, "bf16")
    mine = tokens / layout.attention_dp
    total.add("gemm", product_s(rank, router, mine, e.num, h), group.count)
    short = ROUTED_KERNELS if rank.chip.arch == "blackwell" else SHORT_KERNELS
    if rank.ragged:
        short += RAGGED_KERNELS
        total.views += group.count * (RAGGED_VIEWS - RAGGED_KERNELS)
    _stream(rank, total, mine * e.num * 4.0, 2 + short, group.count)
    if e.shared:
        _feed_forward(rank, group, tokens, total, width=e.shared)


def head_s(rank: Rank, sequences: Floats) -> Floats:
    """Logits of one token a sequence, gathered over ranks, and sampling."""
    n = rank.anatomy.vocab / rank.layout.tp
    form = Format("bf16", 2.0, "bf16")
    moved = rank.inner.exchange_s(sequences * rank.anatomy.vocab * 2.0)
    read_s = sequences * rank.anatomy.vocab * 4.0 / (STREAM_FRAC * rank.chip.dram_bytes_per_s)
    return product_s(rank, form, sequences, n, rank.anatomy.hidden) + moved + read_s + 30e-6


def decode_attention_s(rank: Rank, sequences: Floats, context: Floats, tokens_each: int = 1) -> Floats:
    """``tokens_each`` new tokens for each of ``sequences`` with ``context`` tokens before, over all layers."""
    b, ctx = np.broadcast_arrays(np.maximum(sequences, 1.0), np.maximum(context, 1.0))
    total = np.zeros(b.shape)
    for group in rank.anatomy.layers:
        total += group.count * _decode_layer_s(rank, group.mixer, b, ctx, tokens_each)
    return total


def _decode_layer_s(rank: Rank, m: Mixer, b: Floats, ctx: Floats, tokens_each: int) -> Floats:
    if m.recurrence:  # a state is kept behind every draft, for the ones that are refused
        moved = (1 + tokens_each) * b * m.state_bytes(rank.layout.tp)
        return np.asarray(4e-6 + moved / (STREAM_FRAC * rank.chip.dram_bytes_per_s))
    if m.latent:
        return _latent_decode_s(rank, m, b, ctx, tokens_each)
    entry, library = _attention_entry(rank, "decode", m.window)
    kv_dtype = "fp8" if KV_BYTES[rank.precision.kv] == 1 else "bf16"
    tp = rank.layout.tp
    timing = attention_timing(
        rank.chip, entry.get("coef", {}), b=b.ravel(), h=m.heads / tp, hkv=max(m.kv_heads, tp) / tp, s=1,
        skv=ctx.ravel(), d=m.dim, window=m.window, library=library, dtype="bf16", kv_dtype=kv_dtype,
    )  # fmt: skip
    return timing.expected_s.reshape(b.shape)


def _attention_entry(rank: Rank, phase: str, window: int) -> tuple[Mapping[str, Mapping[str, float]], str]:
    """Coefficients and kernel of serving attention: the device's own if they were fitted there, else its kin's."""
    arch = rank.chip.arch
    chosen = DECODE_LIBRARY.get(arch, "decode") if phase == "decode" else PREFILL_LIBRARY.get(arch, "fa3")
    entries = calibration_of(rank.device).families.get("attention", {})
    # Where the tables' kernel for an eight-bit cache gains little; engines bring better ones, priced by their bytes.
    suffix = "_fp8kv" if KV_BYTES[rank.precision.kv] == 1 and arch not in ("hopper",) else ""
    local = "_window" if 0 < window <= 1024 else ""  # longer windows hardly ever cut a context short
    for name in (f"{phase}{local}{suffix}", f"{phase}{suffix}", phase):
        if name in entries:
            return entries[name], entries[name].get("library", chosen)
    return {}, chosen


def _latent_decode_s(rank: Rank, m: Mixer, b: Floats, ctx: Floats, tokens_each: int) -> Floats:
    """All heads share one compressed key-value row: heavy on arithmetic for a decoding kernel."""
    low, heads, size = m.latent, m.heads / rank.layout.tp * tokens_each, KV_BYTES[rank.precision.kv]
    assert low is not None
    seen = np.minimum(ctx, m.index.top) if m.index else ctx
    wide = low.kv_rank + low.rope
    dtype = "fp8" if size == 1 and "fp8" in rank.chip.tensor_flops_per_s else "bf16"
    peak = rank.chip.peak_flops_per_s(dtype) * LATENT_TENSOR_FRAC
    padded = max(heads, 16.0 if rank.chip.arch == "blackwell" else LATENT_TILE)
    math_s = 2 * b * padded * seen * (wide + low.kv_rank) / peak
    read_s = b * seen * wide * size / (rank.chip.dram_bytes_per_s * LATENT_DRAM_FRAC)
    scored_s = np.zeros(b.shape)
    if m.index:
        score = 2 * b * ctx * m.index.heads * m.index.dim / (rank.chip.peak_flops_per_s("fp8") * SCORE_TENSOR_FRAC)
        scored_s = 12e-6 + np.maximum(score, b * ctx * m.index.dim / (rank.chip.dram_bytes_per_s * LATENT_DRAM_FRAC))
    return np.asarray(LATENT_S + np.hypot(math_s, read_s) + scored_s)


def prefill_attention_s(rank: Rank, new: Floats, past: Floats) -> Floats:
    """``new`` tokens of one sequence on top of ``past`` cached ones, over all layers, beside other sequences."""
    s, before = np.broadcast_arrays(np.maximum(new, 1.0), np.maximum(past, 0.0))
    total = np.zeros(s.shape)
    for group in rank.anatomy.layers:
        total += group.count * _prefill_layer_s(rank, group.mixer, s, before)
    return total


def _prefill_layer_s(rank: Rank, m: Mixer, s: Floats, past: Floats) -> Floats:
    tp = rank.layout.tp
    if m.recurrence:
        heads = m.recurrence.value_heads / tp * (m.recurrence.dim / 128)
        return np.asarray(30e-6 + s * max(SCAN_HEAD_S * heads, SCAN_TOKEN_S))
    entry, library = _attention_entry(rank, "prefill", m.window)
    d, dv, hkv = float(m.dim), float(m.dim), max(m.kv_heads, tp) / tp
    if m.latent:
        d, dv, hkv = float(m.latent.nope + m.latent.rope), float(m.latent.value), m.heads / tp
    if m.index:
        return _indexed_prefill_s(rank, m, s, past)
    seen = past + s
    # the marginal sequence: four beside four others, so that a launch and a ragged last wave are shared
    times = [
        attention_timing(
            rank.chip, entry.get("coef", {}), b=b, h=m.heads / tp, hkv=hkv, s=s.ravel(), skv=seen.ravel(), d=d, dv=dv,
            window=m.window, library=library,
        ).expected_s
        for b in (4, 8)
    ]  # fmt: skip
    each_s = np.maximum((times[1] - times[0]) / 4, times[1] / 16).reshape(s.shape)
    return np.asarray(each_s + _expand_s(rank, m, seen) if m.latent else each_s)


def _indexed_prefill_s(rank: Rank, m: Mixer, s: Floats, past: Floats) -> Floats:
    """Every query attends to its own picks in the latent space; tiles hold 64 heads, however few there are."""
    low, index = m.latent, m.index
    assert low is not None and index is not None
    seen = np.minimum(past + s / 2, index.top)
    heads = max(m.heads / rank.layout.tp, LATENT_TILE)
    math_s = (
        2 * s * heads * seen * (2 * low.kv_rank + low.rope) / (rank.chip.peak_flops_per_s("bf16") * LATENT_TENSOR_FRAC)
    )
    scored = 2 * s * (past + s / 2) * index.heads * index.dim
    return np.asarray(20e-6 + math_s + scored / (rank.chip.peak_flops_per_s("fp8") * SCORE_TENSOR_FRAC))


def _expand_s(rank: Rank, m: Mixer, seen: Floats) -> Floats:
    """Keys and values of the whole context from their compressed form."""
    low, heads = m.latent, m.heads / rank.layout.tp
    assert low is not None
    flops = 2 * seen * low.kv_rank * heads * (low.nope + low.value)
    written = seen * heads * (low.nope + low.value) * 2.0
    return np.asarray(
        flops / (rank.chip.peak_flops_per_s("bf16") * 0.6) + written / (STREAM_FRAC * rank.chip.dram_bytes_per_s)
    )
