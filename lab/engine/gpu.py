"""Engines on a GPU, checked and timed: ``python -m lab.engine gpu --out OUT``, nine minutes at most.

A model is a process: build at level 2, save, load, the bits beside ``optimize``'s, a thousand calls with the same bits,
then times in turns (engine, ``optimize``, AOTInductor with max-autotune, torch.compile with CUDA graphs, XLA where the
model has a twin in JAX), the cold start of a new process, and the C runner where the program holds kernels alone. Each
phase is a line in ``OUT/MODEL.jsonl`` when it ends, so that whatever stops the run loses the phase at most;
``OUT/engine.json`` and the table are made of those lines again after every model and by ``--table``.

Models compile together and hold a lock while they are timed. ``--device cpu --tiny`` runs every phase on small models.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MODELS = ("encoder-twin", "mlp-twin", "bert-large-1x128", "resnet50-128", "gated-twin", "conv-twin", "vit-large-64",
          "convnext-base-64", "efficientnet-b0-64", "dlrm-8192", "whisper-large-encoder-8", "swin-base-32")  # fmt: skip
PHASES = ("build", "same_bits", "optimize", "cold", "compile", "xla", "runner", "aoti")
"""Those that matter most first; max-autotune takes what is left."""
COLD = """
import json, sys, time, torch
began = time.perf_counter()
from ridgeline.engine.file.engine import Engine
from ridgeline.engine.file.inspect import example_of
imported = time.perf_counter()
engine = Engine.load(sys.argv[1], sys.argv[2])
inputs = example_of(engine, engine.contents.programs[-1])
loaded = time.perf_counter()
engine.on_inputs(inputs)
if sys.argv[2] != "cpu":
    torch.cuda.synchronize()
answered = time.perf_counter()
print(json.dumps({"import_s": imported - began, "load_s": loaded - imported, "first_s": answered - loaded,
                  "total_s": answered - began}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("engine-gpu"))
    parser.add_argument("--total-s", type=float, default=530.0, help="Everything ends within this.")
    parser.add_argument("--budget-s", type=float, default=40.0, help="Of each build.")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--phases", nargs="*", default=list(PHASES), choices=PHASES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="Small models in place of these, to try every phase.")
    parser.add_argument("--calls", type=int, default=1000, help="Whose bits are compared.")
    parser.add_argument("--table", action="store_true", help="Only the table of what OUT holds.")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.one:
        Model(asked).run()
    elif asked.table:
        print(table(asked.out))
    else:
        launch(asked)


def launch(asked: argparse.Namespace) -> None:
    """One process a model, ``jobs`` at a time, until the time is up."""
    until = time.monotonic() + asked.total_s
    waiting, running = list(asked.models), dict[str, subprocess.Popen[bytes]]()
    environment = {
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 4) // asked.jobs)), **os.environ,
    }  # fmt: skip
    options = [f"--{name.replace('_', '-')}={getattr(asked, name)}" for name in ("out", "budget_s", "device", "calls")]
    options += ["--tiny"] * asked.tiny
    while (waiting or running) and time.monotonic() < until - 3:
        while waiting and len(running) < asked.jobs and time.monotonic() < until - 20:
            name = waiting.pop(0)
            command = [sys.executable, "-m", "lab.engine.gpu", "--one", name, "--until", str(until), *options,
                       "--phases", *asked.phases]  # fmt: skip
            with (asked.out / f"{name}.log").open("wb") as log:
                running[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        for name in [name for name, process in running.items() if process.poll() is not None]:
            code = running.pop(name).returncode
            print(f"{until - time.monotonic():5.0f} s left, {name} ended with {code}", flush=True)
            table(asked.out)
        time.sleep(0.1)
    for process in running.values():
        process.kill()
        process.wait()
    print(table(asked.out))


class Model:
    """One model's phases."""

    def __init__(self, asked: argparse.Namespace) -> None:
        import torch

        self.asked, self.torch, self.cuda = asked, torch, asked.device != "cpu"
        self.file = asked.out / f"{asked.one}.jsonl"
        self.file.unlink(missing_ok=True)
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "m.ridge"
        self.model, self.args, self.kwargs = workload(asked.one, asked.device, asked.tiny)
        self.engine: Any = None
        self.fast: Any = None

    def run(self) -> None:
        for phase in self.asked.phases:
            left = self.asked.until - time.monotonic()
            if left < 5:
                self.tell(phase, {"skipped": "out of time"})
                continue
            began = time.monotonic()
            try:
                with self.torch.no_grad():
                    found = getattr(self, phase)()
            except Exception as error:  # the next phase may still be measured
                found = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
            self.tell(phase, {**found, "took_s": round(time.monotonic() - began, 3)})
        shutil.rmtree(self.folder, ignore_errors=True)

    def tell(self, phase: str, found: dict[str, Any]) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps({"model": self.asked.one, "phase": phase, **found}) + "\n")

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """The device for this process alone."""
        with (self.asked.out / "device.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def synchronize(self) -> None:
        if self.cuda:
            self.torch.cuda.synchronize()

    def timed(self, calls: dict[str, Callable[[], Any]], rounds: int = 12) -> dict[str, float]:
        """Seconds of a call, contenders in turns: the median over rounds of the mean of some calls."""
        with self.turn():
            num = dict[str, int]()
            for name, call in calls.items():
                call()
                self.synchronize()
                began = time.perf_counter()
                call()
                self.synchronize()
                num[name] = max(1, min(200, int(0.02 / max(1e-6, time.perf_counter() - began))))
            took: dict[str, list[float]] = {name: [] for name in calls}
            for turn in range(2 if self.asked.tiny else rounds):
                order = list(calls) if turn % 2 else list(reversed(calls))
                for name in order:
                    began = time.perf_counter()
                    for _ in range(num[name]):
                        calls[name]()
                    self.synchronize()
                    took[name].append((time.perf_counter() - began) / num[name])
        return {name: statistics.median(found) for name, found in took.items()}

    def ours(self) -> Any:
        return self.engine(*self.args, **self.kwargs)

    def beside(self, name: str, call: Callable[[], Any]) -> dict[str, Any]:
        """A rival's time in turns with the engine's, and how far its outputs are from the model's."""
        return {"times_s": self.timed({"engine": self.ours, name: call}), "rms": self.apart(call())}

    def apart(self, found: Any) -> float:
        from ridgeline.bench.verdict import error_of
        from ridgeline.engine.file.proof import flat

        pairs = zip(flat(found), flat(self.model(*self.args, **self.kwargs)), strict=False)
        return max((error_of(a.double(), b.double()).rms_frac for a, b in pairs if a.is_floating_point()), default=0.0)

    # The phases, in order

    def build(self) -> dict[str, Any]:
        import ridgeline as rl
        from ridgeline.engine.file.engine import Engine

        began = time.perf_counter()
        made = rl.build(self.model, self.args, self.kwargs, level=2, budget_s=self.asked.budget_s, name=self.asked.one)
        build_s = time.perf_counter() - began
        made.save(self.path)
        self.engine = Engine.load(self.path, self.asked.device)
        self.ours()
        steps = [step.op.partition("::")[0] for step in self.engine.contents.programs[0].steps]
        return {
            "build_s": build_s, "winner": made.receipt.get("winner"), "receipt_notes": made.receipt.get("notes"),
            "bytes": self.path.stat().st_size, "weight_bytes": made.weight_bytes,
            "verified": bool(self.engine.verify()), "issued": self.engine.contents.programs[0].issued,
            "notes": self.engine.notes,
            "steps": {space: steps.count(space) for space in sorted(set(steps))}, "rms": self.apart(self.ours()),
        }  # fmt: skip

    def same_bits(self) -> dict[str, Any]:
        """The same bits in many calls, and what a call costs the host."""
        from ridgeline.engine.file.proof import flat

        first = [x.clone() for x in flat(self.ours())]
        other = 0
        for _ in range(self.asked.calls):
            other += not all(self.torch.equal(a, b) for a, b in zip(first, flat(self.ours()), strict=True))
        enqueue = []
        with self.turn():
            for _ in range(200):
                self.synchronize()
                began = time.perf_counter()
                self.ours()
                enqueue.append(time.perf_counter() - began)
        return {"calls": self.asked.calls, "calls_with_other_bits": other, "enqueue_least_s": min(enqueue),
                "enqueue_median_s": statistics.median(enqueue)}  # fmt: skip

    def optimize(self) -> dict[str, Any]:
        import ridgeline as rl
        from ridgeline.engine.file.proof import flat

        self.fast = rl.optimize(self.model, self.args, self.kwargs, budget_s=self.asked.budget_s)  # known by the build
        call = lambda: self.fast(*self.args, **self.kwargs)
        equal = [self.torch.equal(a, b) for a, b in zip(flat(self.ours()), flat(call()), strict=True)]
        times = self.timed({"engine": self.ours, "optimize": call,
                            "eager": lambda: self.model(*self.args, **self.kwargs)})  # fmt: skip
        return {"bits_of_optimize": all(equal), "times_s": times}

    def cold(self) -> dict[str, Any]:
        found = []
        for _ in range(2):
            with self.turn():
                done = subprocess.run([sys.executable, "-c", COLD, str(self.path), self.asked.device], check=False,
                                      capture_output=True, text=True, timeout=120)  # fmt: skip
            if done.returncode:
                return {"error": done.stderr[-500:]}
            found.append(json.loads(done.stdout.splitlines()[-1]))
        return {"first": found[0], "warm": found[1]}

    def compile(self) -> dict[str, Any]:
        mode = "reduce-overhead" if self.cuda else "default"
        fast = self.torch.compile(self.model, mode=mode)
        return self.beside("compile", lambda: fast(*self.args, **self.kwargs))

    def aoti(self) -> dict[str, Any]:
        """AOTInductor with max-autotune, as it is and replayed as a CUDA graph; the better of the two counts."""
        torch = self.torch
        exported = torch.export.export(self.model, self.args, self.kwargs, strict=False)
        package = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(self.folder / "m.pt2"), inductor_configs={"max_autotune": True}
        )
        loaded = torch._inductor.aoti_load_package(package)
        calls: dict[str, Callable[[], Any]] = {"aoti": lambda: loaded(*self.args, **self.kwargs)}
        rms = self.apart(calls["aoti"]())
        if self.cuda:
            graph = torch.cuda.CUDAGraph()
            with contextlib.suppress(RuntimeError):
                with torch.cuda.graph(graph):
                    calls["aoti"]()
                calls["aoti_graph"] = graph.replay
        return {"times_s": self.timed({"engine": self.ours, **calls}), "rms": rms}

    def xla(self) -> dict[str, Any]:
        if not self.asked.one.endswith("-twin"):
            return {"skipped": "no twin in JAX"}
        call, first = twin_in_jax(self.asked.one, self.model, self.args)
        return {**self.beside("xla", call), "rms": self.apart(self.torch.from_numpy(first))}

    def runner(self) -> dict[str, Any]:
        """The C runner where the program holds kernels alone: its size, cold start, call and bits."""
        from ridgeline.engine.file.export_cuda import export_cuda
        from ridgeline.engine.file.proof import flat

        source, data = export_cuda(self.engine, self.folder)
        program = self.folder / "run"
        subprocess.run(["gcc", "-O2", "-DRIDGELINE_MAIN", "-o", program, source, "-ldl"], check=True)
        raw = lambda tensors: b"".join(
            x.contiguous().reshape(-1).view(self.torch.uint8).cpu().numpy().tobytes() for x in tensors
        )
        given = raw(flat([*self.args, *self.kwargs.values()]))
        with self.turn():
            began = time.perf_counter()
            done = subprocess.run([program, data, "1000"], input=given, capture_output=True, check=False)
            whole_s = time.perf_counter() - began
        if done.returncode:
            return {"error": done.stderr.decode(errors="replace")[-500:]}
        return {**json.loads(done.stderr.splitlines()[-1]), "process_s": whole_s, "bytes": program.stat().st_size,
                "bits_of_engine": done.stdout == raw(flat(self.ours()))}  # fmt: skip


def workload(name: str, device: str, tiny: bool) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The model with its inputs: a twin, one of ``lab.optimize``'s, or a small stand-in for it."""
    import torch

    torch.manual_seed(0)
    kind = name.removesuffix("-twin") if name.endswith("-twin") else "encoder" if tiny else ""
    if not kind:
        from lab.optimize.models import built

        work = built(name, device)
        return work["model"], work["args"], work["kwargs"]
    model, x = twin(kind, tiny)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return model.to(device, dtype).eval(), (x.to(device, dtype),), {}


def twin(kind: str, tiny: bool) -> tuple[Any, Any]:
    """Models that are also written in JAX: four layers of one kind, and their input."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    dim, rows = (32, 16) if tiny else (1024, 1024)

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.other = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
            self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

        def forward(self, x: Any) -> Any:
            batch, length, _ = x.shape
            heads = self.qkv(self.norm(x)).view(batch, length, 3, dim // 16 if tiny else 16, -1)
            q, k, v = heads.permute(2, 0, 3, 1, 4)
            x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
            return x + self.down(F.gelu(self.up(self.other(x))))

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(dim, eps=1e-6)
            self.gate, self.up = (nn.Linear(dim, 4 * dim, bias=False) for _ in range(2))
            self.down = nn.Linear(4 * dim, dim, bias=False)

        def forward(self, x: Any) -> Any:
            y = self.norm(x)
            return x + self.down(F.silu(self.gate(y)) * self.up(y))

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

        def forward(self, x: Any) -> Any:
            return self.b(torch.relu(self.a(x)))

    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

        def forward(self, x: Any) -> Any:
            return torch.relu(x + self.b(torch.relu(self.a(x))))

    channels = 8 if tiny else 256
    kinds: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
        "encoder": (Encoder, (2 if tiny else 16, rows // 8, dim)), "gated": (Gated, (rows, dim)),
        "mlp": (Mlp, (rows, dim)), "conv": (Conv, (2, channels, 8, 8) if tiny else (64, channels, 28, 28)),
    }  # fmt: skip
    layer, shape = kinds[kind]
    return nn.Sequential(*(layer() for _ in range(4))), torch.randn(shape)


def twin_in_jax(name: str, model: Any, args: tuple[Any, ...]) -> tuple[Callable[[], Any], Any]:
    """The same function jitted by XLA over the model's weights: a call that waits, and its first result."""
    import jax
    import jax.numpy as jnp

    def moved(x: Any) -> Any:
        held = jnp.asarray(x.detach().float().cpu().numpy())
        return held.astype(jnp.bfloat16) if "bfloat16" in str(x.dtype) else held

    def product(x: Any, p: dict[str, Any], key: str) -> Any:
        y = x @ p[f"{key}.weight"].T
        return y + p[f"{key}.bias"] if f"{key}.bias" in p else y

    def layer_norm(x: Any, p: dict[str, Any], key: str) -> Any:
        wide = x.astype(jnp.float32)
        y = (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)
        return (y * p[f"{key}.weight"] + p[f"{key}.bias"]).astype(x.dtype)

    def encoder(x: Any, p: dict[str, Any]) -> Any:
        batch, length, dim = x.shape
        heads = dim // 16 if dim < 512 else 16
        q, k, v = jnp.moveaxis(product(layer_norm(x, p, "norm"), p, "qkv").reshape(batch, length, 3, heads, -1), 2, 0)
        y = jax.nn.dot_product_attention(q, k, v).reshape(x.shape)
        x = x + product(y, p, "out")
        return x + product(jax.nn.gelu(product(layer_norm(x, p, "other"), p, "up"), approximate=False), p, "down")

    def gated(x: Any, p: dict[str, Any]) -> Any:
        wide = x.astype(jnp.float32)
        y = (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * p["norm.weight"]
        return x + product(jax.nn.silu(product(y, p, "gate")) * product(y, p, "up"), p, "down")

    def mlp(x: Any, p: dict[str, Any]) -> Any:
        return product(jax.nn.relu(product(x, p, "a")), p, "b")

    def conv(x: Any, p: dict[str, Any]) -> Any:
        def one(x: Any, key: str) -> Any:
            y = jax.lax.conv_general_dilated(x, p[f"{key}.weight"], (1, 1), "SAME")
            return y + p[f"{key}.bias"][:, None, None]

        return jax.nn.relu(x + one(jax.nn.relu(one(x, "a")), "b"))

    layer = {"encoder": encoder, "gated": gated, "mlp": mlp, "conv": conv}[name.removesuffix("-twin")]
    weights = [{key: moved(value) for key, value in part.state_dict().items()} for part in model]
    x = moved(args[0])

    @jax.jit
    def whole(x: Any, weights: Any) -> Any:
        for held in weights:
            x = layer(x, held)
        return x

    import numpy as np

    return lambda: whole(x, weights).block_until_ready(), np.array(whole(x, weights).astype(jnp.float32))


def table(out: Path) -> str:
    """What was measured so far as text, and all of it in ``engine.json``."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(out.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # the last line of a process that was killed
                entry = json.loads(line)
                found.setdefault(entry["model"], {})[entry["phase"]] = entry
    (out / "engine.json").write_text(json.dumps(found, indent=1, sort_keys=True))
    rows, ratios = list[str](), dict[str, list[float]]()
    for name, phases in found.items():
        said = [f"{name:26}"]
        build = phases.get("build", {})
        said.append(str(build.get("winner") or build.get("error", "no build"))[:60])
        said += ["" if build.get("issued", True) else "(not recorded)"]
        for phase, rival in (("optimize", "optimize"), ("compile", "compile"), ("aoti", "aoti"), ("xla", "xla")):
            times = phases.get(phase, {}).get("times_s")
            if times:
                best = min(seconds for who, seconds in times.items() if who.startswith(rival))
                ratios.setdefault(rival, []).append(best / times["engine"])
                said.append(f"{rival}/engine {best / times['engine']:.3f}")
        bits, cold = phases.get("same_bits", {}), phases.get("cold", {}).get("warm", {})
        said += [f"{bits['calls_with_other_bits']}/{bits['calls']} other bits, enqueue "
                 f"{bits['enqueue_least_s'] * 1e6:.1f} us"] if "calls_with_other_bits" in bits else []  # fmt: skip
        said += [f"cold {cold['total_s']:.2f} s"] if cold else []
        run = phases.get("runner", {})
        said += [f"C call {run['start_s'] * 1e6:.1f} us, open {run['open_s']:.2f} s"] if "open_s" in run else []
        errors = [f"{phase}: {entry['error'][:80]}" for phase, entry in phases.items() if "error" in entry]
        rows.append("  ".join(part for part in [*said, *errors] if part))
    for rival, values in ratios.items():
        mean = math.exp(sum(map(math.log, values)) / len(values))
        rows.append(f"{rival}/engine: geometric mean {mean:.3f}, least {min(values):.3f}, {len(values)} models")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
