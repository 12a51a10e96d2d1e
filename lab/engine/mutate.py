"""Mutated engine files: each must be refused with one of our errors, or run.

``python -m lab.engine mutate m.ridge --count 10000`` runs them in child processes with an address-space limit, and
prints how many ran, were refused, raised something else, hung or crashed.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import random
import resource
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 1 << 31, 1 << 40, (1 << 62) + 1, -(1 << 62), 1 << 80, 0.5, 1e308, "", "x",
    "aten::add.Tensor",
    "aten::full.default", "aten::arange.default", "aten::matmul.default", "aten::cat.default", "aten::expand.default",
    "size::mul",
    "size::floordiv", "engine::int8_linear", "aten::repeat.default", "aten::as_strided.default",
    "aten::empty.memory_format", [],
    [[]], [1, 2], [1 << 20, 1 << 20], {}, {"v": 0}, {"v": 1}, {"v": 1 << 23}, {"w": "0.weight"}, {"dtype": "float64"},
    {"dtype": "bool"}, {"dtype": "int8"}, {"float": "nan"}, {"device": "engine"}, {"tuple": [{"v": 0}]},
    "float64", "int64", "F64", "BOOL",
]  # fmt: skip


def mutations(source: Path, rng: random.Random, count: int, target: Path) -> Iterator[Path]:
    """Write one mutated file after another to ``target``."""
    whole = source.read_bytes()
    with zipfile.ZipFile(source) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    for _ in range(count):
        kind = rng.random()
        if kind < 0.15:
            target.write_bytes(_bytes(whole, rng))
        elif kind < 0.9:
            name = rng.choice([n for n in members if n.endswith(".json")] + ["program.json"] * 4)
            document = json.loads(members[name])
            for _ in range(rng.choice((1, 1, 1, 2, 4))):
                document = _json(document, rng)
            _seal(target, {**members, name: json.dumps(document).encode()}, keep=name == "manifest.json")
        else:
            name = rng.choice([n for n in members if n.endswith(".safetensors")])
            _seal(target, {**members, name: _safetensors(members[name], rng)})
        yield target


def _bytes(data: bytes, rng: random.Random) -> bytes:
    made = bytearray(data)
    kind = rng.randrange(4)
    if kind == 0:
        return bytes(made[: rng.randrange(len(made))])
    if kind == 1:
        a, b = sorted(rng.randrange(len(made)) for _ in range(2))
        del made[a : min(b, a + 500)]
    elif kind == 2:
        # The directory at the end decides what is read
        for _ in range(rng.randrange(1, 8)):
            made[-rng.randrange(1, min(600, len(made)))] = rng.randrange(256)
    else:
        for _ in range(rng.randrange(1, 16)):
            made[rng.randrange(len(made))] = rng.randrange(256)
    return bytes(made)


def _json(document: Any, rng: random.Random) -> Any:
    """The document with one place changed, removed or copied from another one."""
    places: list[tuple[Any, Any]] = []

    def walk(item: Any) -> None:
        pairs = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
        for key, value in list(pairs):
            places.append((item, key))
            walk(value)

    walk(document)
    if not places:
        return copy.deepcopy(rng.choice(ODD))
    owner, key = rng.choice(places)
    kind = rng.random()
    if kind < 0.5:
        owner[key] = copy.deepcopy(rng.choice(ODD))
    elif kind < 0.6 and isinstance(owner[key], int):
        owner[key] += rng.choice((-1, 1, 16, 1 << 33))
    elif kind < 0.7:
        del owner[key]
    elif kind < 0.9:
        other, name = rng.choice(places)
        owner[key] = (
            json.loads(json.dumps(other[name]))
            if name in (other if isinstance(other, dict) else range(len(other)))
            else 1
        )
    elif isinstance(owner, list):
        owner.insert(key, json.loads(json.dumps(owner[key])))
    return document


def _safetensors(data: bytes, rng: random.Random) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    if rng.random() < 0.3:
        return struct.pack("<Q", rng.choice((0, 1, length - 1, length + 64, 1 << 62))) + data[8:]
    header = _json(json.loads(data[8 : 8 + length]), rng)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def _seal(target: Path, members: dict[str, bytes], keep: bool = False) -> None:
    """Write members with digests that agree, as an attacker would."""
    from ridgeline.engine.file import container

    if not keep:
        manifest = json.loads(members["manifest.json"])
        rest = {name: data for name, data in members.items() if name != "manifest.json"}
        manifest["members"] = {n: {"bytes": len(d), "sha256": hashlib.sha256(d).hexdigest()} for n, d in rest.items()}
        members = {"manifest.json": json.dumps(manifest).encode(), **rest}
    container.write(target, members)


def tried(path: Path, memory_limit: str = "64 MB") -> str:
    """Load, call, verify and inspect; anything but our own errors is raised."""
    import warnings

    from ridgeline.engine.file.engine import Engine
    from ridgeline.engine.file.inspect import example_of
    from ridgeline.errors import RidgelineError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            engine = Engine.load(path, memory_limit=memory_limit)
            engine.verify()
            str(engine.inspect())
            engine.on_inputs(example_of(engine, engine.contents.programs[-1]))
        except RidgelineError:
            return "refused"
    return "ran"


def _child(source: Path, seed: int, count: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    rng, outcomes, slowest = random.Random(seed), Counter[str](), 0.0
    tried(source)  # imports what is imported once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with tempfile.TemporaryDirectory() as folder:
        for path in mutations(source, rng, count, Path(folder) / "m.ridge"):
            began = time.process_time()
            try:
                outcomes[tried(path)] += 1
            except Exception as error:
                outcomes["raised"] += 1
                kept = Path(tempfile.gettempdir()) / f"mutated-{seed}-{outcomes['raised']}.ridge"
                kept.write_bytes(path.read_bytes())
                print(f"{kept}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
            slowest = max(slowest, time.process_time() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"outcomes": outcomes, "slowest_s": slowest, "peak_bytes": peak - before}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--each", type=int, default=500, help="files a child process tries")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child is not None:
        _child(asked.source, asked.child, asked.each)
        return
    total, slowest, peak = Counter[str](), 0.0, 0
    for seed in range(0, asked.count, asked.each):
        command = [
            sys.executable,
            "-m",
            "lab.engine.mutate",
            str(asked.source),
            "--each",
            str(asked.each),
            "--child",
            str(seed),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            total["crashed"] += 1
            print(f"seed {seed}: exit {done.returncode}", file=sys.stderr)
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        total.update(found["outcomes"])
        slowest, peak = max(slowest, found["slowest_s"]), max(peak, found["peak_bytes"])
    print(
        f"{sum(total.values()):,} files: {dict(total)}; slowest {slowest:.2f} s of CPU, "
        f"{peak / 1e6:.0f} MB more than the source needs"
    )


if __name__ == "__main__":
    main()
