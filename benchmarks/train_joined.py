"""Recorded training steps with and without one rewrite, in turns, on one GPU: what a rewrite is worth by itself.

    python benchmarks/train_joined.py --out OUT --rewrite side-by-side --only llama1b-train-4x1024 --total-s 90
    python benchmarks/train_joined.py --table OUT/train_joined.json.gz

Repeated blocks are compiled once with the rewrites a search takes, masks and losses as it puts them, the whole call is
recorded; forward and backward are timed in turns with the same but for one rewrite. Where nothing is dropped at
random, the gradients of the two are compared.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]
import optimize_train
from train_memory import each_model

DEFAULT = ("llama1b-train-4x1024", "bert-large-train-16x512", "t5-base-train-8x512")
ROUNDS, STEPS = 7, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--rewrite", default="side-by-side")
    parser.add_argument("--only", nargs="*", default=list(DEFAULT))
    parser.add_argument("--total-s", type=float, default=90.0, help="No model is begun after this.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--table", type=Path, default=None, help="Only print what a file of results says.")
    asked = parser.parse_args()
    each_model(asked, "train_joined.json.gz", lambda name, found: _raced(name, asked, found), _table)


def _raced(name: str, asked: argparse.Namespace, found: dict[str, Any]) -> None:
    work = optimize_train._built(name, asked.device)
    made = {way: _made(work, asked, way == "with") for way in ("with", "without")}
    found |= {"rewrites": {way: built.report.counts() for way, built in made.items()},
              "build_s": {way: built.build_s for way, built in made.items()}}  # fmt: skip
    steps = {way: optimize_train._stepping(work, built.call, _Nothing(work["model"])) for way, built in made.items()}
    found["seconds"] = {way: [] for way in made}
    for turn in range(ROUNDS + 1):
        for way, step in steps.items():
            with made[way].switched():
                step()
                seconds = optimize_train._timed(step, STEPS)
            found["seconds"][way] += [seconds] if turn else []
    found["reserved_bytes"] = {way: _pool(built.call) for way, built in made.items()}
    if not _draws(work):
        found["apart"] = _apart(*(_gradients(work, built) for built in made.values()))
    found["losses"] = {way: _loss(work, built) for way, built in made.items()}
    for built in made.values():
        built.undo()
    del made, steps
    optimize_train._freed()


class _Nothing:
    """An optimizer that only clears gradients."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.model.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        """Nothing: passes alone are timed."""


def _made(work: dict[str, Any], asked: argparse.Namespace, wanted: bool) -> Any:
    """Blocks as a search makes them, with the rewrite or without."""
    import torch

    from ridgeline.engine.example_inputs import Inputs
    from ridgeline.optimizer.rewrites import recommended
    from ridgeline.optimizer.search.candidate import Candidate, build

    kept = [name for name in recommended("training", "inductor", asked.device) if name != asked.rewrite]
    masked = "attention_mask" in work["kwargs"]
    rewrites = (*kept, *([asked.rewrite] if wanted else []))
    candidate = Candidate(name="blocks", rewrites=rewrites, compiler="inductor", scope="blocks", unmasked=masked,
                          substituted=_beside(work, masked, asked.device), graphed=asked.device == "cuda")  # fmt: skip
    torch._dynamo.reset()
    return build(candidate, work["model"], Inputs(work["args"], work["kwargs"]), "train", loss=work["loss"])


def _beside(work: dict[str, Any], masked: bool, device: str) -> tuple[str, ...]:
    """What is outside of blocks and has kernels of ours, as searches choose it."""
    from ridgeline.optimizer.in_place.substitution import apply, revert

    found = []
    for part in ("attention", "loss", "padding") if device == "cuda" else ():
        if apply(work["model"], (part,)).replaced and not (masked and part == "attention"):
            found.append(part)
        revert(work["model"])
    return tuple(found)


def _pool(call: Any) -> int:
    inner = getattr(call, "call", call) if not hasattr(call, "pool_bytes") else call
    return int(inner.pool_bytes()) if hasattr(inner, "pool_bytes") else 0


def _draws(work: dict[str, Any]) -> bool:
    import torch

    return any(isinstance(part, torch.nn.Dropout) and part.p > 0 for part in work["model"].modules())


def _loss(work: dict[str, Any], built: Any) -> float:
    import torch

    torch.manual_seed(1)
    with built.switched():
        value = optimize_train._stepping(work, built.call, _Nothing(work["model"]))()
    work["model"].zero_grad(set_to_none=True)
    return float(value)


def _gradients(work: dict[str, Any], built: Any) -> list[Any]:
    with built.switched():
        optimize_train._stepping(work, built.call, _Nothing(work["model"]))()
    found = [None if p.grad is None else p.grad.float().cpu() for p in work["model"].parameters()]
    work["model"].zero_grad(set_to_none=True)
    return found


def _apart(ours: list[Any], others: list[Any]) -> float:
    """The largest distance between two gradients of a parameter, relative to their length."""
    pairs = [(a, b) for a, b in zip(ours, others, strict=True) if b is not None]
    return max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs)


def _table(found: dict[str, Any]) -> list[str]:
    """What was found, as Markdown."""
    lines = ["| model | without | with | gain | rounds won | pool without, with | gradients apart | matches |",
             f"|{'---|' * 8}"]  # fmt: skip
    for name, each in found.items():
        lines.append(_row(name, each) if each.get("seconds", {}).get("with") else f"| {name} | {each.get('error')!r} |")
    return lines


def _row(name: str, each: dict[str, Any]) -> str:
    ours, others = each["seconds"]["with"], each["seconds"]["without"]
    medians = [1e3 * statistics.median(seconds) for seconds in (others, ours)]
    won = sum(a < b for a, b in zip(ours, others, strict=True))
    pools = [each["reserved_bytes"][way] / 1e9 for way in ("without", "with")] if "reserved_bytes" in each else [0, 0]
    apart = f"{each['apart']:.1e}" if "apart" in each else "–"
    memory, matches = f"{pools[0]:.2f}, {pools[1]:.2f} GB", str(each["rewrites"]["with"])
    cells = (name, f"{medians[0]:.2f} ms", f"{medians[1]:.2f} ms", f"{medians[0] / medians[1]:.3f}",
             f"{won} of {len(ours)}", memory, apart, matches)  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
