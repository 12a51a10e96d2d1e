"""The static test files of openxla/stablehlo on the importer.

    python lab/importers/stablehlo_suite.py FOLDER [--only TEXT] [--show 20]

FOLDER is stablehlo/testdata of a checkout. The files end in custom calls that check a result against what is expected;
the operands of these calls become the outputs of the program, which are compared here: equal, within 0.001, or within
three units in the last place, as stablehlo-translate has it. Files with dynamic shapes are not counted.
"""

from __future__ import annotations

import argparse
import collections
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from ridgeline.capture.importers.stablehlo import Reader, made_of
from ridgeline.errors import RidgelineError

ULPS = 3
"""Units in the last place that ``check.expect_close`` allows."""


def differs(kind: str, got: torch.Tensor, wanted: torch.Tensor) -> str:
    """How a result differs from what is expected; empty where it does not."""
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        return f"{got.dtype}{list(got.shape)} instead of {wanted.dtype}{list(wanted.shape)}"
    if got.is_complex():
        got, wanted = torch.view_as_real(got.resolve_conj()), torch.view_as_real(wanted.resolve_conj())
    if not got.is_floating_point():
        return "" if torch.equal(got, wanted) else "is not equal"
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    if kind == "check.expect_almost_eq":
        same |= (got.double() - wanted.double()).abs() <= 1e-3
    elif kind == "check.expect_close":
        whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.dtype.itemsize]
        a, b = (t.contiguous().view(whole) for t in (got, wanted))
        a, b = (torch.where(t < 0, torch.iinfo(whole).min - t, t).to(torch.int64) for t in (a, b))
        same |= ((a - b).abs() <= ULPS) & ~got.isnan() & ~wanted.isnan()
    if bool(same.all()):
        return ""
    most = float((got - wanted).double().abs().nan_to_num(0).max())
    return f"{int((~same).sum())} of {same.numel()} elements differ, by up to {most:.3g}"


def outcome(path: Path) -> str:
    """What became of a file: passed, or why not."""
    try:
        body = Reader(path.name).read(path.read_bytes())
    except RidgelineError as error:
        return f"not read: {error}"
    main = body.functions["main"]
    checks = [n for n in main.nodes if str(n.attrs.get("call_target_name", "")).startswith("check.")]
    if not checks:
        return "not read: no check"
    main.nodes = [n for n in main.nodes if n not in checks]
    main.results = [value for n in checks for value in n.inputs]
    model = made_of(body, path.stem)
    try:
        with torch.no_grad():
            made = model(*model.example({}))
    except RidgelineError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"raises: {type(error).__name__}: {str(error)[:200]}"
    for check, got, wanted in zip(checks, made[::2], made[1::2]):
        why = differs(check.attrs["call_target_name"], got, wanted)
        if why:
            return f"wrong: {check.attrs['call_target_name']} {why}"
    return "passed" + (" (run, not planned)" if model.dynamic else "")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--show", type=int, default=20)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    files = [p for p in sorted(options.folder.glob("*.mlir")) if options.only in p.name]
    files = [p for p in files if "dynamic" not in p.stem or p.stem.startswith(("dynamic_slice", "dynamic_update"))]
    found: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
    for path in files:
        result: Any = outcome(path)
        found[result.split(":")[0]].append((path.name, result))
    for kind, rows in sorted(found.items()):
        print(f"{kind}: {len(rows)} of {len(files)}")
        for name, why in rows[: 0 if kind.startswith("passed") else options.show]:
            print(f"    {name}: {why[:260]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
