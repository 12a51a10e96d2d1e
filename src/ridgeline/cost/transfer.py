"""Time of copies between host and device: the bus, and what pageable memory costs on the way."""

from __future__ import annotations

from ridgeline.cost.call import Call, Coef, Time, family
from ridgeline.cost.chip import Chip

DEFAULTS: Coef = {
    "link_bytes_per_s": 64e9,  # PCIe 5 x16, one way: nothing copies faster (a device on another bus is assumed alike)
    "pinned_bytes_per_s": 55e9,  # reached from pinned memory on an H200's host
    "pageable_bytes_per_s": 12e9,  # through the driver's staging buffer (assumed, not measured)
    "start_s": 1.5e-6,  # duration of a copy of next to nothing
}


@family("transfer", "transfer", DEFAULTS)
def model(call: Call, chip: Chip, coef: Coef, warm_frac: float) -> Time:
    dims = call.dims()
    rate = coef["pinned_bytes_per_s" if dims.get("pinned") else "pageable_bytes_per_s"]
    return Time(coef["start_s"] + dims["num_bytes"] / rate, dims["num_bytes"] / coef["link_bytes_per_s"], "link")
