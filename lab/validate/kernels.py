"""How far predictions of products and attention are from published single figures, on devices of many generations.

    python -m lab.validate.kernels ../shared/published/kernels.csv [--device v100-sxm2-16gb]

Most of these devices have nothing but a datasheet here: what their architecture's kin do, adapted, stands in. Products
are those of DeepBench (column by column, so that its m is our n), NeuSight, vidur and a hunt for the best shape of many
accelerators; attention is FlashAttention's own figures. Rows of serving frameworks' tables are judged by
``lab/validate/tables.py``.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ridgeline.errors import RidgelineError
from ridgeline.validation.operators import predict_call

DEVICES = {
    "A100-SXM-80GB": "a100-sxm-80gb", "A100-SXM4-80GB": "a100-sxm-80gb", "A40": "a40", "AMD MI300X": "mi300x",
    "AMD MI325X": "mi325x", "H100-SXM-80GB": "h100-sxm", "H100-SXM5-80GB": "h100-sxm", "Intel Gaudi 2": "gaudi2",
    "Intel Gaudi 3": "gaudi3", "NVIDIA A100 80GB PCIe": "a100-pcie-80gb", "NVIDIA A100 PCIe": "a100-pcie-80gb",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb", "NVIDIA B200 SXM": "b200", "NVIDIA GB200 SXM": "gb200",
    "NVIDIA GH200 SXM": "gh200-144gb", "NVIDIA H100 80GB HBM3": "h100-sxm", "NVIDIA H100 SXM": "h100-sxm",
    "NVIDIA L4": "l4", "P100": "p100-sxm2", "T4": "t4", "Tesla P100-PCIE-16GB": "p100-pcie", "Tesla T4": "t4",
    "Tesla V100-PCIE-32GB": "v100-pcie-32gb", "V100 (DGX-1)": "v100-sxm2-16gb",
}  # fmt: skip
SOURCES = ("DeepBench", "NeuSight", "vidur", "ml-engineering", "flash-attention")
LIBRARIES = {"FlashAttention-2": "fa2", "FlashAttention-3": "fa3", "cuDNN": "cudnn"}
UNITS_S = {"ms": 1e-3, "us": 1e-6, "s": 1.0, "as in file (ms expected)": 1e-3}
PASSES = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}  # operations over those of the forward pass


@dataclass(frozen=True, slots=True)
class Figure:
    """A published time of one call, or of its two passes together."""

    source: str
    device: str
    kind: str
    dtype: str
    phase: str
    library: str
    shape: dict[str, object]
    measured_s: float


def figures(path: Path) -> Iterator[Figure]:
    with path.open() as file:
        for row in csv.DictReader(file):
            source, device = row["source"].partition(":")[2].split("/")[1], DEVICES.get(row["device"])
            if source not in SOURCES or device is None:
                continue
            op = row["op"].partition(" ")[0]
            found = (
                _product(row, op) if op in ("gemm", "linear", "bmm") else _attention(row) if op == "attention" else None
            )
            if found is not None:
                kind, phase, library, shape, measured_s = found
                yield Figure(source, device, kind, _dtype(row["dtype"]), phase, library, shape, measured_s)


def _dtype(text: str) -> str:
    return "fp8" if "fp8" in text else re.split(r"[ /]", text)[0]


def _product(row: dict[str, str], op: str) -> tuple[str, str, str, dict[str, object], float] | None:
    sizes = {name.lower(): int(value) for name, value in re.findall(r"\b([BMNK])=(\d+)", row["layout_or_params"])}
    if row["m"]:
        sizes = {name: int(float(row[name])) for name in "mnk"}
    if "m" not in sizes:
        return None
    shape: dict[str, object] = {name: sizes[name] for name in ("bmnk" if op == "bmm" else "mnk")}
    if sides := re.findall(r"\^([NT])", row["layout_or_params"]):  # BLAS counts columns: the result is transposed
        left, right = (side.lower() for side in sides)
        shape = {"m": sizes["n"], "n": sizes["m"], "k": sizes["k"], "layout": right + left}
    if row["metric"] == "tflops":
        work = 2.0 * sizes.get("b", 1) * sizes["m"] * sizes["n"] * sizes["k"]
        measured_s = work / float(row["value"]) / 1e12
    else:
        measured_s = float(row["value"]) * UNITS_S[row["unit"]]
    return "bmm" if op == "bmm" else "gemm", "fwd", "cublas", shape, measured_s


def _attention(row: dict[str, str]) -> tuple[str, str, str, dict[str, object], float] | None:
    library = LIBRARIES.get(row["library"])
    if library is None or not row["heads"]:
        return None
    names = {"b": "batch", "h": "heads", "hkv": "kv_heads", "s": "seq_q", "skv": "seq_kv", "d": "head_dim"}
    sizes = {short: int(float(row[name])) for short, name in names.items()}
    causal = row["causal"] == "yes"
    work = 4.0 * sizes["b"] * sizes["h"] * sizes["s"] * sizes["skv"] * sizes["d"] * (0.5 if causal else 1.0)
    seconds = PASSES[row["direction"]] * work / float(row["value"]) / 1e12
    return "attention", row["direction"], library, {**sizes, "causal": int(causal)}, seconds


def off(figure: Figure) -> tuple[float, bool]:
    """Predicted over published time, less one; and whether the interval holds the published one."""
    told = [
        predict_call(figure.device, figure.kind, figure.dtype, phase, figure.library, figure.shape)
        for phase in figure.phase.split("+")
    ]
    low_s, high_s = sum(t.low_s for t in told), sum(t.high_s for t in told)
    return sum(t.expected_s for t in told) / figure.measured_s - 1, low_s <= figure.measured_s <= high_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="")
    options = parser.parse_args()
    groups = defaultdict(list)
    for figure in figures(options.file):
        if options.device in ("", figure.device):
            try:
                groups[figure.source, figure.device, figure.kind, figure.dtype].append(off(figure))
            except RidgelineError as error:
                print("not priced:", figure, error)
    for key, found in sorted(groups.items()):
        errors, inside = np.array([e for e, _ in found]), np.mean([i for _, i in found])
        text = f"mean {np.abs(errors).mean():6.1%}  median {np.median(np.abs(errors)):6.1%}  bias {errors.mean():+6.1%}"
        print(f"{' '.join(key):48s} n {len(errors):4d}  {text}  inside {inside:.0%}")


if __name__ == "__main__":
    main()
