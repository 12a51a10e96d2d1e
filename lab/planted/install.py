"""Puts the outcome of record.py where tests replay it from; a later outcome replaces the cases it has.

python -m lab.planted install OUT [OUT…] --into data/recordings/h200/SUITE
"""

from __future__ import annotations

import argparse
import gzip
import json
import pickle
import tarfile
from pathlib import Path
from typing import Any

from ridgeline.trace.compact import packed, unpacked
from ridgeline.trace.pickled import plain_data

KEPT = ("median_s", "low_s", "high_s", "num")
AGAIN = "again_"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("outcomes", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, required=True)
    args = parser.parse_args()
    args.into.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Any] = {}
    environment: dict[str, Any] = {}
    for outcome in args.outcomes:
        document = json.loads(gzip.decompress((outcome / "timings.json.gz").read_bytes()))
        environment = document["environment"]
        traced = _extract(outcome / "traces.tar", args.into)
        done = {name: fact for name, fact in document["timed"].items() if fact["event"] == "done"}
        rows |= {name: _row(name, fact) for name, fact in done.items() if name in traced or name.startswith(AGAIN)}
    listing = {"environment": environment} | _sorted(rows)
    (args.into / "cases.json").write_text(json.dumps(listing, indent=1) + "\n", encoding="utf-8")
    print(f"{len(rows)} programs, {sum(f.stat().st_size for f in args.into.iterdir()) / 1e6:.1f} MB in {args.into}")


def _sorted(rows: dict[str, Any]) -> dict[str, list[Any]]:
    """Cases, healthy programs (one version) and second fixes (timed alone), each by name."""
    found: dict[str, list[Any]] = {"cases": [], "healthy": [], "again": []}
    for name, row in sorted(rows.items()):
        kind = "healthy" if "planted" not in row else "again" if name.startswith(AGAIN) else "cases"
        found[kind].append(row | ({"of": name.removeprefix(AGAIN)} if kind == "again" else {}))
    return {kind: listed for kind, listed in found.items() if listed}


def _row(name: str, fact: dict[str, Any]) -> dict[str, Any]:
    timed = [variant for variant in ("planted", "fixed") if variant in fact]
    steps = {variant: {key: round(fact[variant][key], 7) for key in KEPT} for variant in timed}
    return {"name": name, "cause": fact["cause"], "change": fact["change"], **steps}


def _extract(path: Path, into: Path) -> set[str]:
    """Traces go in without what identifies the machine; the names of the cases that have all of theirs."""
    found: dict[str, set[str]] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            content = tar.extractfile(member)
            if content is None:
                continue
            if member.name.endswith(".json.xz"):
                name, variant = member.name.removesuffix(".json.xz").rsplit(".", 1)
                (into / member.name).write_bytes(_anonymous(content.read(), member.name))
                found.setdefault(name, set()).add(variant)
            elif member.name == "memory_snapshot.pickle.gz":
                (into / member.name).write_bytes(_short_paths(gzip.decompress(content.read())))
    return {name for name, variants in found.items() if variants >= {"fixed"}}


def _anonymous(data: bytes, name: str) -> bytes:
    document = unpacked(data, name)
    events = document.pop("traceEvents")
    for event in events:
        event.get("args", {}).pop("kernel_file", None)
    return packed({key: value for key, value in document.items() if key not in ("host_name", "trace_id")}, events)


def _short_paths(data: bytes) -> bytes:
    """The snapshot with files named from their package or folder on."""

    def shorter(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: _short(inner) if key == "filename" else shorter(inner) for key, inner in value.items()}
        return [shorter(inner) for inner in value] if isinstance(value, list) else value

    return gzip.compress(pickle.dumps(shorter(plain_data(data, "snapshot")), protocol=4), 9, mtime=0)


def _short(file: str) -> str:
    for root in ("site-packages/", "dist-packages/", "lab/"):
        if root in file:
            return ("lab/" if root == "lab/" else "") + file.split(root, 1)[1]
    return file.rsplit("/", 1)[-1]


if __name__ == "__main__":
    main()
