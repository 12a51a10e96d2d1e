"""Time of copies between host and device: the bus, and what pageable memory costs on the way."""

from __future__ import annotations

from ridgeline.cost.call import Call, Coef, Time, family
from ridgeline.cost.time.chip import Chip

DEFAULTS: Coef = {
    "link_bytes_per_s": 64e9,  # PCIe 5 x16, one way: nothing copies faster (a device on another bus is assumed alike)
    "pinned_bytes_per_s": 55e9,  # from and to pinned memory, large copies
    "staged_bytes_per_s": 44e9,  # small ones of pageable memory, which the driver has staged beforehand
    "staged_bytes": 1.5e6,  # up to this size
    "pageable_bytes_per_s": 12e9,  # larger ones, the staging being part of the copy
    "start_s": 1.9e-6,  # duration of a copy of next to nothing
}


@family("transfer", "transfer", DEFAULTS)
def model(call: Call, chip: Chip, coef: Coef, warm_frac: float) -> Time:
    dims = call.dims()
    num_bytes = dims["num_bytes"]
    pageable = "staged_bytes_per_s" if num_bytes <= coef["staged_bytes"] else "pageable_bytes_per_s"
    rate = coef["pinned_bytes_per_s" if dims.get("pinned") else pageable]
    return Time(coef["start_s"] + num_bytes / rate, num_bytes / coef["link_bytes_per_s"], "link")
