"""Puts the outcome of run.py where tests replay it from.

python benchmarks/planted/install.py OUT [OUT…] --into data/recordings/h200/planted
"""

from __future__ import annotations

import argparse
import gzip
import json
import tarfile
from pathlib import Path
from typing import Any

KEPT = ("median_s", "low_s", "high_s", "num")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("outcomes", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, required=True)
    args = parser.parse_args()
    args.into.mkdir(parents=True, exist_ok=True)
    cases: dict[str, Any] = {}
    environment: dict[str, Any] = {}
    for outcome in args.outcomes:
        document = json.loads(gzip.decompress((outcome / "timings.json.gz").read_bytes()))
        environment = document["environment"]
        traced = {name for name, fact in document["traced"].items() if fact["event"] == "done"}
        cases |= {name: _row(name, document["timed"][name]) for name in document["timed"] if name in traced}
        _extract(outcome / "traces.tar", args.into)
    listing = {"environment": environment, "cases": list(cases.values())}
    (args.into / "cases.json").write_text(json.dumps(listing, indent=1) + "\n", encoding="utf-8")
    print(f"{len(cases)} cases, {sum(f.stat().st_size for f in args.into.iterdir()) / 1e6:.1f} MB in {args.into}")


def _row(name: str, fact: dict[str, Any]) -> dict[str, Any]:
    steps = {variant: _rounded(fact[variant]) for variant in ("planted", "fixed")}
    return {"name": name, "cause": fact["cause"], "change": fact["change"], **steps}


def _rounded(measured: dict[str, Any]) -> dict[str, Any]:
    return {key: round(measured[key], 7) for key in KEPT}


def _extract(path: Path, into: Path) -> None:
    with tarfile.open(path) as tar:
        for member in tar.getmembers():
            wanted = member.name.endswith(".json.xz") or member.name.startswith(("torch_trace/", "memory_snapshot"))
            content = tar.extractfile(member) if wanted else None
            if content is not None:
                name = "compile_log.gz" if member.name.startswith("torch_trace/") else Path(member.name).name
                (into / name).write_bytes(content.read())


if __name__ == "__main__":
    main()
