"""JSON schemas of what the commands print with ``--json``, made from sample runs.

    python -m lab.schemas [COMMAND …] [--check]

writes ``src/ridgeline/cli/schemas/COMMAND.json``. A key that every sample has is required; types are those that any
sample had. What a schema says of keys that depend on data (sources, kinds, phases) is one schema for all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lab import ROOT
from ridgeline.api import simulate
from ridgeline.cli.app import run
from ridgeline.sim.timeline import timeline_of
from ridgeline.trace import write_chrome

FOLDER = ROOT / "src" / "ridgeline" / "cli" / "schemas"
TRACE = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], "traceEvents": [
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0.0, "dur": 90.0,
     "args": {"External id": 1, "Input Dims": [[4096, 4096], [4096, 4096]], "Input type": ["float", "float"]}},
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 10.0, "dur": 5.0,
     "args": {"correlation": 7, "External id": 1}},
    {"ph": "X", "cat": "kernel", "name": "sgemm_128x128", "pid": 0, "tid": 7, "ts": 100.0, "dur": 900.0,
     "args": {"correlation": 7, "stream": 7, "device": 0, "External id": 1}},
    {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "pid": 0, "tid": 7, "ts": 1200.0,
     "dur": 300.0, "args": {"correlation": 8, "stream": 7, "device": 0, "bytes": 1048576}},
]}  # fmt: skip
MEASURED = """kind,dtype,phase,library,shape,measured_s
gemm,bf16,fwd,cublas,m=4096;n=4096;k=4096,2.2e-4
add,bf16,fwd,aten,n=4096;c=4096,3.0e-5
gemm,bf16,fwd,cublas,m=1;n=2,1e-6
"""
COLUMNS = "source collective device num_devices nodes devices_per_node intra_link inter_link message_bytes time_us"
PUBLISHED = f"""{",".join(COLUMNS.split())},software,busbw_gbps
nccl,all_reduce,8x H100 SXM,8,1,8,nvlink4,,1 GiB,350.0,nccl-tests,
nccl,all_reduce,abacus,8,1,8,nvlink4,,1 GiB,350.0,nccl-tests,
"""
PLAN = "--on h100-sxm*8 --global-batch 32 --seq 512"
SERVE = "llama3-8b --on h200*1 --isl 64 --osl 16"
SAMPLES: Mapping[str, Sequence[str]] = {
    "predict": ["resnet50", "llama3-8b --mode decode --batch 2"],
    "predict of several devices": ["bert-large --on h200 --on h100-sxm"],
    "simulate": [f"llama3-8b {PLAN} --tp 4", f"gpt2-xl {PLAN} --pp 2 --tokens 1T"],
    "plan": [f"gpt2-xl {PLAN} --top 2"],
    "serve": [f"{SERVE} --requests 8", f"{SERVE} --concurrency 4 --slo-ttft 0.2 --sweep"],
    "serve --search": [f"{SERVE} --precision fp8 --search"],
    "explain": ["{trace}", "{simulated}"],
    "diff": ["{trace} {other}"],
    "gate": ["--baseline {runs} --runs {runs}"],
    "validate of operators": ["{measured}"],
    "validate of published results": ["{published}", "{published}"],  # the second has one to compare with
    "price": ["h200", "h200 --assume margin=0.5"],
    "devices": [""],
    "devices of one name": ["h200"],
    "clusters": [""],
    "clusters of one name": ["h100-sxm*16"],
    "models": [""],
    "models of one name": ["bert-large"],
}  # fmt: skip
"""Arguments by command and, where it has several, by layout; files in braces are written for the run."""
MAPS = {"by", "by_metric", "by_kind", "intervals", "memory", "numbers", "parts", "slo", "idle_causes",
        "defaults", "options", "outcomes", "critical_path_ms", "categories_ms"}
"""Keys whose own keys depend on data."""


def sample_files(folder: Path) -> dict[str, str]:
    """The files that samples read, by their name in ``SAMPLES``."""
    shorter = json.loads(json.dumps(TRACE))
    shorter["traceEvents"][2]["dur"] = 700.0
    contents = {"trace": json.dumps(TRACE), "other": json.dumps(shorter), "measured": MEASURED, "published": PUBLISHED,
                "runs": json.dumps([[0.101, 0.1, 0.102], [0.1, 0.101, 0.103]])}  # fmt: skip
    found = {}
    for name, text in contents.items():
        path = folder / (f"{name}.csv" if name in ("measured", "published") else f"{name}.json")
        path.write_text(text)
        found[name] = str(path)
    step = simulate("llama3-8b", "h100-sxm*8", tp=4, pp=2, global_batch=8, seq=256)
    found["simulated"] = str(write_chrome(timeline_of(step), folder / "simulated.json"))
    return found


def documents(command: str, files: Mapping[str, str]) -> dict[str, list[Any]]:
    """What the samples of a command print, by layout, with nothing kept from before."""
    found: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as home, patch.dict(os.environ, {"RIDGELINE_HOME": home}):
        for layout in (name for name in SAMPLES if name.split()[0] == command):
            for sample in SAMPLES[layout]:
                argv = [command, *sample.format(**files).split(), "--json"]
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed):
                    code = run(argv)
                if not printed.getvalue():
                    raise SystemExit(f"ridgeline {' '.join(argv)} printed nothing (exit code {code})")
                found.setdefault(layout, []).append(json.loads(printed.getvalue()))
    return found


def schema_of(values: Sequence[Any], name: str = "") -> dict[str, Any]:
    """One schema of all values."""
    kinds = {_kind(value) for value in values}
    made: dict[str, Any] = {}
    if kinds and kinds != {"null"}:  # what no sample has may be anything
        made["type"] = sorted(kinds)[0] if len(kinds) == 1 else sorted(kinds)
    objects = [value for value in values if isinstance(value, dict)]
    if objects and name in MAPS:
        inner = [value for each in objects for value in each.values()]
        return made | ({"additionalProperties": schema_of(inner)} if inner else {})
    if objects:
        keys = list(dict.fromkeys(key for each in objects for key in each))
        made["properties"] = {key: schema_of([e[key] for e in objects if key in e], key) for key in keys}
        made["required"] = [key for key in keys if all(key in each for each in objects)]
    items = [item for value in values if isinstance(value, list) for item in value]
    if items:
        made["items"] = schema_of(items)
    return made


def _kind(value: Any) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def schema(command: str, found: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """The schema of a command's documents, one for each layout; the tag is fixed."""
    made = []
    for layout, printed in found.items():
        one = schema_of(printed)
        one["properties"]["schema"] = {"const": f"ridgeline.{command}/1"}
        made.append({"title": f"ridgeline {layout}", **one})
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return head | (made[0] if len(made) == 1 else {"title": f"ridgeline {command}", "anyOf": made})


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("commands", nargs="*", metavar="COMMAND")
    arguments.add_argument("--check", action="store_true", help="write nothing; say which files would change")
    given = arguments.parse_args()
    changed = []
    with tempfile.TemporaryDirectory() as folder:
        files = sample_files(Path(folder))
        for command in given.commands or dict.fromkeys(name.split()[0] for name in SAMPLES):
            text = json.dumps(schema(command, documents(command, files)), indent=1, ensure_ascii=False) + "\n"
            path = FOLDER / f"{command}.json"
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                changed.append(path.name)
                if not given.check:
                    path.write_text(text, encoding="utf-8")
    print(f"changed: {', '.join(changed) or 'none'}")
    sys.exit(bool(changed and given.check))


if __name__ == "__main__":
    main()
