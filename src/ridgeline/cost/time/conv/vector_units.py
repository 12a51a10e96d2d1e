"""Convolutions on the vector units, by Fourier and Winograd transforms."""

from __future__ import annotations

from ridgeline.cost.time.conv.implicit_gemm import (
    Choice,
)
from ridgeline.cost.time.conv.problem import (
    FOURIER_FLOPS,
    MEASURED_VECTOR_FLOPS_PER_S,
    Conv,
    Cost,
    Site,
    both_costs,
    memset_cost,
    pass_choice,
    sum_costs,
    w_transform,
    x_transform,
    y_transform,
)

_SIMT_TILES = ((32, 32, "simt_narrow_frac"), (256, 64, "simt_wide_frac"))


def simt_s(site: Site, rows: int, columns: int, depth: int) -> float:
    """A convolution as SIMT tiles: large ones for throughput, small ones to fill the chip."""
    coef, chip = site.coef, site.chip
    macs = chip.vector_flops_per_s / (2.0 * chip.num_sms * chip.clock_hz)
    steps, best = -(-depth // 8), 1e30
    # From this depth of the inner loop on, the library takes its small SIMT tiles
    for high, wide, frac in _SIMT_TILES if depth < 1700 else _SIMT_TILES[:1]:
        per_sm = -(-(-(-rows // high) * -(-columns // wide)) // chip.num_sms)
        step = max(coef["simt_step_cycles"], per_sm * high * wide * 8 / (macs * coef[frac]))
        best = min(best, steps * step + per_sm * high * wide * coef["simt_store_cycles"])
    return site.cycles_s(coef["simt_start_cycles"] + best)


def vector_cost(site: Site, seconds: float, moved_bytes: float) -> Cost:
    return site.cycles_s(site.coef["simt_start_cycles"]) + both_costs(
        seconds, site.dram_s(moved_bytes, "loop_dram_frac")
    ), 1


def _fourier(conv: Conv) -> bool:
    return conv.side == 3 and conv.stride == 1 and conv.flops > FOURIER_FLOPS


_TILE = 32
"""Side of the tiles whose spectra an input gradient multiplies; a forward pass takes whole images."""


def _spectrum(conv: Conv) -> int:
    """Side of the transforms of a forward pass: a power of two that holds image and filter."""
    height = max(1, conv.in_px // conv.width)
    return max(16, 1 << (max(height, conv.width) + conv.side - 2).bit_length())


def num_fourier_tiles(conv: Conv) -> int:
    step = max(1, _TILE + 1 - conv.side)
    return -(-max(1, conv.in_px // conv.width) // step) * -(-conv.width // step)


def _whole(size: int) -> int:
    """Rows or columns of a product of spectra, in the tiles of 32 that compute it."""
    return -(-size // 32) * 32


def fourier_terms(conv: Conv, op: str) -> dict[str, float]:
    """What a pass through Fourier transforms is made of: spectra of images, filters and results, and their products."""
    if op == "dgrad":
        tiles, points = num_fourier_tiles(conv), _TILE * (_TILE / 2 + 1)
        return {"tile": tiles, "input": tiles * conv.n * conv.c * points, "filter": tiles * conv.c * conv.o * points,
                "output": tiles * conv.n * conv.o * points,
                "product": tiles * _whole(conv.n) * _whole(conv.c) * conv.o * points}  # fmt: skip
    side = _spectrum(conv)
    points, large = side * (side / 2 + 1), float(side > _TILE)
    filters, outputs = conv.c * conv.o * points, conv.n * conv.o * points
    return {"start": 1.0, "input": conv.n * conv.c * points, "filter": filters, "output": outputs,
            "flip": float(conv.c * conv.o), "product": conv.c * _whole(conv.n) * _whole(conv.o) * points,
            "large_filter": large * filters, "large_output": large * outputs}  # fmt: skip


def _by_fourier(site: Site, conv: Conv, op: str) -> Cost:
    """Images and filters transformed, spectra multiplied by a library's product, results transformed back."""
    coef = pass_choice(site.coef, f"fourier.{op}")
    seconds = sum(coef[name] * value for name, value in fourier_terms(conv, op).items())
    seconds *= MEASURED_VECTOR_FLOPS_PER_S / site.chip.vector_flops_per_s
    main = seconds, 1 + 3 * num_fourier_tiles(conv) if op == "dgrad" else 5 + 3 * (_spectrum(conv) > _TILE)
    if not conv.channels_last:
        return main
    return sum_costs(x_transform(site, conv), w_transform(site, conv), main, y_transform(site, conv, fresh=True))


def winograd_terms(conv: Conv) -> dict[str, float]:
    """The same for a weight gradient of transformed tiles: images, gradients, their products, filters."""
    return {"start": 1.0, "input": float(conv.n * conv.in_px * conv.c), "output": float(conv.n * conv.out_px * conv.o),
            "filter": float(conv.c * conv.o), "product": float(conv.n * conv.out_px * conv.c * conv.o),
            "deep": float(conv.n * conv.out_px)}  # fmt: skip


def _by_winograd(site: Site, conv: Conv) -> Cost:
    coef = pass_choice(site.coef, "winograd.wgrad")
    seconds = sum(coef[name] * value for name, value in winograd_terms(conv).items())
    main = seconds * MEASURED_VECTOR_FLOPS_PER_S / site.chip.vector_flops_per_s, 4
    if not conv.channels_last:
        return main
    return sum_costs(x_transform(site, conv), y_transform(site, conv), main, w_transform(site, conv, fresh=True))


def _saving(site: Site, conv: Conv, way: str) -> Cost:
    """Ways that save multiplications: tiles are transformed, multiplied by a library's product, transformed back."""
    own = conv.input_bytes + conv.output_bytes + conv.weight_bytes
    work_s = conv.flops / (site.coef[f"{way}_gain"] * site.chip.vector_flops_per_s)
    seconds, _ = vector_cost(site, work_s, site.coef[f"{way}_bytes"] * own)
    seconds += 4.0 * site.cycles_s(site.coef["simt_start_cycles"])
    if not conv.channels_last:
        return seconds, 5
    return sum_costs(
        x_transform(site, conv), w_transform(site, conv), (seconds, 5), y_transform(site, conv, fresh=True)
    )


def simt_forward(site: Site, conv: Conv) -> Cost:
    if _fourier(conv):
        return conv.flops / (site.coef["fourier_gain"] * site.chip.vector_flops_per_s), 4
    moved = conv.touched_bytes + conv.weight_bytes + conv.output_bytes
    seconds = simt_s(site, conv.n * conv.out_px, conv.o, conv.c * conv.taps)
    return both_costs(seconds, site.dram_s(moved, "loop_dram_frac")), 1


def simt_input_grad(site: Site, conv: Conv) -> Cost:
    """The faster of a gather over input pixels and a scatter from output pixels; by transforms when much is saved."""
    coef, peak = site.coef, site.chip.vector_flops_per_s
    filled = min(1.0, conv.o / coef["simt_grad_channels"])
    if _fourier(conv):
        return conv.flops / (coef["fourier_gain"] * peak), 4
    moved = 2.0 * conv.input_bytes + conv.weight_bytes + conv.output_bytes
    alone_s = site.cycles_s(coef["simt_grad_step_cycles"] * conv.o)
    scatter, _ = vector_cost(site, max(alone_s, conv.flops / (coef["simt_grad_frac"] * filled * peak)), moved)
    gather = simt_s(site, conv.n * conv.in_px, conv.c, conv.o * conv.taps)
    return (scatter, 2) if scatter < gather else (gather, 1)


def simt_weight_grad(site: Site, conv: Conv) -> Cost:
    coef, peak = site.coef, site.chip.vector_flops_per_s
    own = conv.input_bytes + conv.output_bytes + conv.weight_bytes
    if conv.side == 3 and conv.stride == 1 and min(conv.c, conv.o) > 16:
        seconds, _ = vector_cost(site, conv.flops / (coef["winograd_gain"] * peak), coef["winograd_bytes"] * own)
        return seconds + 3.0 * site.cycles_s(coef["simt_start_cycles"]), 4
    frac = coef["simt_atomic_frac" if conv.taps == 1 else "simt_atomic_taps"] * min(1.0, conv.o / 32.0)
    atomic, _ = vector_cost(site, conv.flops / (frac * peak), own)
    gather = simt_s(site, conv.o, conv.c * conv.taps, conv.n * conv.out_px), 1
    if not conv.channels_last:
        gather = sum_costs(
            x_transform(site, conv), y_transform(site, conv), gather, w_transform(site, conv, fresh=True)
        )
    return min(sum_costs((atomic, 1), memset_cost(site)), gather)


def saved(site: Site, conv: Conv, choice: Choice, op: str) -> Cost:
    """A dense pass by transforms."""
    if choice.way == "fourier" and op != "wgrad" and conv.rank == 2:
        return _by_fourier(site, conv, op)
    if choice.way == "winograd" and op == "wgrad" and conv.side == 3 and conv.rank == 2:
        return _by_winograd(site, conv)
    return _saving(site, conv, choice.way)
