"""The race with torch.compile(mode="max-autotune") taking part, compiled by several processes before the clock starts.

    python benchmarks/race_compiled.py --out results --budget-s 300 --go results/go

Compiling needs a minute and more of many cores and hardly the GPU, racing needs the GPU alone and seconds: every
process compiles its cases, says so, and waits until the file ``--go`` is there (no ``--go``: until all are ready, or
only ``--race-s`` seconds are left). Then they race one after the other; who is not ready by then takes no part.
"""

from __future__ import annotations

import argparse
import fcntl
import gzip
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]
FILE = "compiled.json.gz"
CASES: dict[str, tuple[int, ...]] = {
    "rms_norm": (0, 6, 8),
    "layer_norm": (0, 5),
    "softmax": (0, 3, 5),
    "cross_entropy": (0, 4),
    "swiglu": (0,),
    "group_norm": (1,),
    "qk_norm_rope": (0,),
    "rms_norm_quant": (0,),
    "dropout_add": (0,),
    "dot_interaction": (0,),
    "cross_layer": (0,),
}
"""Which of a function's races; a process takes one function."""


def told(out: Path, name: str, **what: Any) -> None:
    """One more line of what a process did, written at once."""
    with (out / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(what, default=str) + "\n")


def prepared(name: str, trial: Any, of: Any, device: Any) -> Any:
    """Contenders of a case, each run once in every phase, so that nothing is compiled later."""
    import torch

    from ridgeline.bench.contenders import contenders
    from ridgeline.bench.race import runner

    callers = contenders(name, trial, compiled=True, liger=True)
    args = trial.make(of, device, torch.Generator(device).manual_seed(0))
    for phase in trial.phases:
        runner(callers["compiled"], args, phase, trial.constants)()
    torch.cuda.synchronize()
    return callers


def child(out: Path, name: str, indices: list[int], go: Path, until_s: float) -> None:
    import torch

    import ridgeline.kernels  # noqa: F401
    from ridgeline.bench.race import Course, race
    from ridgeline.kernels.contract import trials

    trial, device, ready = trials()[name][1], torch.device("cuda"), []
    torch._dynamo.config.recompile_limit = 64
    for index in indices:
        began = time.perf_counter()
        of = trial.races[index]
        try:
            ready.append((of, prepared(name, trial, of, device)))
            told(out, name, compiled=str(of), took_s=time.perf_counter() - began)
        except Exception as error:
            told(out, name, failed=str(of), error=f"{type(error).__name__}: {str(error)[:300]}",
                 trace=traceback.format_exc()[-1200:])  # fmt: skip
        torch.cuda.empty_cache()
    if go.exists():
        return told(out, name, failed="all", error="compiled after the race had begun")
    (out / f"{name}.ready").touch()
    while not go.exists() and time.time() < until_s:
        time.sleep(0.1)
    with (out / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        course = Course(device)
        for of, callers in ready:
            if time.time() > until_s:
                break
            try:
                for row in race(name, of, course, phases=trial.phases, compiled=True, callers=callers):
                    told(out, name, row=row.to_dict())
            except Exception as error:
                told(out, name, failed=str(of), error=f"race: {type(error).__name__}: {str(error)[:300]}")
            torch.cuda.empty_cache()


def gathered(out: Path, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"race": [], "compiled": [], "errors": []}
    for name in names:
        path = out / f"{name}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else []:
            entry = json.loads(line)
            if "row" in entry:
                found["race"].append(entry["row"])
            else:
                found["errors" if "failed" in entry else "compiled"].append({"primitive": name, **entry})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=300.0)
    parser.add_argument("--go", type=Path, help="races begin when this file is there")
    parser.add_argument("--race-s", type=float, default=30.0, help="seconds the races may take")
    parser.add_argument("--most", type=int, default=9, help="cases of a function")
    parser.add_argument("--names", default=",".join(CASES))
    parser.add_argument("--path", action="append", default=[], help="folder for the import path, for Liger")
    parser.add_argument("--child", default="")
    parser.add_argument("--until-s", type=float, default=0.0)
    parser.add_argument("--work", type=Path, default=None, help="where processes leave notes; a folder beside --out")
    asked = parser.parse_args()
    sys.path[:0] = asked.path
    work = asked.work or asked.out.parent / f"{asked.out.name}-work"
    work.mkdir(parents=True, exist_ok=True)
    go = asked.go or work / "go"
    if asked.child:
        return child(work, asked.child, list(CASES[asked.child])[: asked.most], go, asked.until_s)
    until_s = time.time() + asked.budget_s
    names = asked.names.split(",")
    env = dict(os.environ) | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(work / "inductor"))
    command = [sys.executable, __file__, "--out", str(asked.out), "--work", str(work), "--go", str(go)]
    command += [f"--path={folder}" for folder in asked.path] + ["--until-s", str(until_s), "--most", str(asked.most)]
    logs = [(work / f"{name}.log").open("w") for name in names]
    runs = [
        subprocess.Popen([*command, "--child", name], env=env, stdout=log, stderr=log)
        for name, log in zip(names, logs, strict=True)
    ]
    pairs = list(zip(names, runs, strict=True))
    while not go.exists() and time.time() < until_s - asked.race_s:
        if asked.go is None and all((work / f"{name}.ready").exists() or run.poll() is not None for name, run in pairs):
            break
        time.sleep(0.2)
    for name, run in pairs:  # still compiling: it would disturb the others
        if not (work / f"{name}.ready").exists() and run.poll() is None:
            run.kill()
            told(work, name, failed="all", error="not compiled in time")
    go.touch()
    for run in runs:
        try:
            run.wait(max(1.0, until_s + 20 - time.time()))
        except subprocess.TimeoutExpired:
            run.kill()
    asked.out.mkdir(parents=True, exist_ok=True)
    found = gathered(work, names)
    (asked.out / FILE).write_bytes(gzip.compress(json.dumps(found).encode()))
    print(
        f"{len(found['race'])} rows, {len(found['compiled'])} cases compiled, {len(found['errors'])} failed", flush=True
    )


if __name__ == "__main__":
    main()
