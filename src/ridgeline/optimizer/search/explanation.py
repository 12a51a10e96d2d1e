"""Explains in a receipt why torch.compile is slower than the result, and what separates the result from the floor."""

from __future__ import annotations

from collections.abc import Iterator

from ridgeline.engine.example_inputs import Inputs
from ridgeline.optimizer.receipt import SKIPPED, Entry, Receipt
from ridgeline.units import show_bytes, show_seconds

STOCK = "torch.compile"
NOTICEABLE = 1.03


def explanations(receipt: Receipt, inputs: Inputs) -> Iterator[str]:
    """Sentences on what torch.compile loses to the result."""
    stock = _entry(receipt, STOCK)
    if stock is None or stock.measured_s is None:
        if stock is not None:
            yield f"it was not measured: {stock.reason}"
        return
    if receipt.winner == STOCK or (receipt.stock_s or stock.measured_s) <= receipt.final_s * NOTICEABLE:
        return
    took_s = receipt.stock_s or stock.measured_s
    yield (f"torch.compile takes {show_seconds(took_s)} where eager takes {show_seconds(receipt.eager_s)} and "
           f"the result {show_seconds(receipt.final_s)}:")  # fmt: skip
    yield from _host(receipt, stock)
    yield from _breaks(stock)
    yield from _recompiles(stock)
    yield from _mask(receipt, stock, inputs)
    yield from _attention(receipt)
    yield from _memory(receipt, stock)
    yield from _kernels(receipt)
    if took_s > receipt.eager_s * NOTICEABLE:
        yield from _against_eager(receipt)


def _host(receipt: Receipt, stock: Entry) -> Iterator[str]:
    """Host overhead: guards and launches that a CUDA graph of the same code saves."""
    graphed = _entry(receipt, f"{STOCK} + graph")
    if graphed is None or not graphed.measured_s or not stock.measured_s:
        return
    if graphed.measured_s * NOTICEABLE < stock.measured_s:
        saved_s = stock.measured_s - graphed.measured_s
        yield f"host: the same code replayed as one CUDA graph saves {show_seconds(saved_s)} of guards and launches"


def _breaks(stock: Entry) -> Iterator[str]:
    num = sum(stock.breaks.values())
    if num:
        reason = max(stock.breaks, key=lambda key: stock.breaks[key])
        yield f"graph breaks: {num}, most often because {reason.splitlines()[0][:160]}"


def _recompiles(stock: Entry) -> Iterator[str]:
    if stock.recompiles:
        yield f"recompiles: a second call like the first was compiled anew, to {stock.recompiles} further graphs"


def _attention(receipt: Receipt) -> Iterator[str]:
    """An attention kernel slower than the result's, or none at all."""
    found = next((region for region in receipt.regions if region.name == "attention"), None)
    if found is None or found.num_stock is None:
        return
    ways = ((found.eager_s, found.eager_kernel), (found.final_s, found.final_kernel))
    best_s, best = min((way for way in ways if way[1]), default=(0.0, ""))
    if best and not found.num_stock:
        yield f"attention: no attention kernel; its GEMMs and softmax run separately, where {best} fuses them"
    elif best and (found.stock_s or 0.0) > 1.1 * best_s and found.stock_kernel != best:
        yield (f"attention: {found.stock_kernel} takes {show_seconds(found.stock_s or 0.0)} where {best} takes "
               f"{show_seconds(best_s)}: a mask that is a tensor leaves only kernels that read one")  # fmt: skip


def _against_eager(receipt: Receipt) -> Iterator[str]:
    """Kinds of kernels for which torch.compile takes longer than eager."""
    known = [region for region in receipt.regions if region.stock_s is not None]
    for region in sorted(known, key=lambda each: each.eager_s - (each.stock_s or 0.0))[:2]:
        more_s = (region.stock_s or 0.0) - region.eager_s
        if more_s > 0.02 * receipt.eager_s:
            names = f": {region.stock_kernel} in place of {region.eager_kernel}" if region.eager_kernel not in (
                "", region.stock_kernel) else ""  # fmt: skip
            yield f"slower than eager: {region.name} take {show_seconds(more_s)} longer{names}"


def _mask(receipt: Receipt, stock: Entry, inputs: Inputs) -> Iterator[str]:
    """A padding mask that hides nothing: eager Hugging Face models check its values and drop it, traced code cannot."""
    if stock.measured_s is None or stock.measured_s <= receipt.eager_s * NOTICEABLE:
        return
    for name, tensor in inputs.named():
        if "mask" in name and tensor.dim() == 2 and bool((tensor != 0).all()):
            yield (f"mask: {name} masks nothing; eager code checks its values and drops it, traced code cannot, "
                   "keeps a full mask and loses the attention kernel without one")  # fmt: skip


def _memory(receipt: Receipt, stock: Entry) -> Iterator[str]:
    if stock.peak_bytes and receipt.eager_bytes and stock.peak_bytes > 1.05 * receipt.eager_bytes:
        yield f"memory: {show_bytes(stock.peak_bytes)} where eager needs {show_bytes(receipt.eager_bytes)}"


def _kernels(receipt: Receipt) -> Iterator[str]:
    """Kinds of kernels that take longer under torch.compile than in the result."""
    known = [region for region in receipt.regions if region.stock_s is not None]
    worse = sorted(known, key=lambda region: region.final_s - (region.stock_s or 0.0))
    for region in worse[:3]:
        stock_s = region.stock_s or 0.0
        if stock_s - region.final_s > 0.02 * receipt.final_s:
            yield f"kernels: {region.name} takes {show_seconds(stock_s)}, in the result {show_seconds(region.final_s)}"


def remaining(receipt: Receipt) -> Iterator[str]:
    """What separates the result from the floor."""
    if receipt.floor_s and receipt.final_s < receipt.floor_s and not receipt.narrowed:
        shown = show_seconds(receipt.floor_s)
        yield f"below the floor of {shown}, which is that of the ops as the model writes them: fused, they move less"
    if receipt.floor_s and receipt.final_s > receipt.floor_s:
        gap_s = receipt.final_s - receipt.floor_s
        yield f"{show_seconds(gap_s)} above the floor of {show_seconds(receipt.floor_s)}"
        busy_s = sum(region.final_s for region in receipt.regions)
        if busy_s and receipt.final_s - busy_s > 0.05 * receipt.final_s:
            idle_s = receipt.final_s - busy_s
            yield f"{show_seconds(idle_s)} of it with no kernel running: launches, gaps between kernels or the host"
        if receipt.parts:
            yield from _parts(receipt)
        else:
            yield from _ops(receipt)
    skipped = [entry.name for entry in receipt.entries if entry.status == SKIPPED]
    if skipped:
        yield f"not tried within {receipt.budget_s:.0f} s: {', '.join(skipped)}; a larger budget_s tries them"


def _parts(receipt: Receipt) -> Iterator[str]:
    """The parts of the model farthest above their floors, and what would close the gap."""
    known = [(part.final_s - part.floor_s, part) for part in receipt.parts
             if part.final_s is not None and part.floor_s is not None and part.fix]  # fmt: skip
    for gap_s, part in sorted(known, key=lambda pair: -pair[0])[:3]:
        if gap_s > 0.02 * receipt.final_s:
            floor_s = part.floor_s or 0.0
            yield f"{part.name}: {show_seconds(gap_s)} above its floor of {show_seconds(floor_s)}; {part.fix}"


def _ops(receipt: Receipt) -> Iterator[str]:
    for op, expected_s, floor_s in ((receipt.forecast or {}).get("slowest") or ())[:3]:
        if expected_s - floor_s > 0.02 * receipt.final_s:
            yield f"{op}: {show_seconds(expected_s)} in eager, {show_seconds(floor_s)} at the speed of light"


def _entry(receipt: Receipt, name: str) -> Entry | None:
    return next((entry for entry in receipt.entries if entry.name == name), None)
