"""Fit what serving engines and their kernels cost, all of them together, to published serving runs and maximum load.

    python -m lab.fit.engines ../shared/published [--derivatives d.npz] [--rounds 2] [--left-out] [--write]

Every logarithm of a coefficient is a sum of effects: of all engines, an architecture, an engine, the pair, a generation
of the engine, and that on the architecture; kernels have one more by format (or kind of attention) and architecture.
Each effect is drawn to nothing by a prior, so that a generation that few models were run on follows its relatives.
None is of a row or a model. A run's own derivatives by its local coefficients are simulated once (about twenty minutes
on one core, kept in ``--derivatives``), its errors after every round; the rest is linear algebra, which makes leaving
out cheap. ``--left-out`` leaves out whole models, whole sources and random thirds, fits without them and simulates the
rows left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ridgeline.errors import RidgelineError
from ridgeline.resources import data_dir
from ridgeline.sim.serving.metrics import metrics
from ridgeline.sim.serving.simulate import Deployment, simulate
from ridgeline.sim.serving.workload import closed
from ridgeline.validation import inference_llm, serving_ttft_tpot
from ridgeline.validation.measurements import read_table
from ridgeline.validation.verdict import Row

Floats = NDArray[np.float64]
Labels = Mapping[str, str]
SPREAD = {
    "gemm": 0.35, "experts": 0.35, "decode": 0.4, "prefill": 0.4, "link": 0.2, "kernel_s": 0.6, "iteration_s": 0.5,
    "sequence_s": 1.5, "mixed_s": 1.5, "call_s": 2.0, "request_s": 1.0, "token_s": 3.0, "rank_s": 1.5,
    "draft_s": 1.5, "gemm_many": 0.3, "experts_many": 0.3, "link_many": 0.3,
}  # fmt: skip
"""How far each coefficient may stray, in logarithms, before the prior costs as much as a miss does. Like the shares
below, doubled or halved one after the other where that helped models, sources and thirds that were left out."""
START = {
    "gemm": 1.0, "experts": 1.1, "decode": 1.05, "prefill": 1.1, "link": 1.3, "kernel_s": 1.8e-6, "iteration_s": 6e-4,
    "sequence_s": 4e-6, "mixed_s": 3e-3, "call_s": 27e-6, "request_s": 0.025, "token_s": 4e-6, "rank_s": 2e-5,
    "draft_s": 2e-5, "gemm_many": 1.0, "experts_many": 1.0, "link_many": 1.0,
}  # fmt: skip
NAMES = tuple(START)
LEVELS: dict[str, tuple[float, Callable[[Labels], str]]] = {
    "all": (0.25, lambda of: "all"),
    "architecture": (0.18, lambda of: of["arch"]),
    "engine": (0.7, lambda of: of["engine"]),
    "engine on architecture": (0.7, lambda of: f"{of['engine']}/{of['arch']}"),
    "generation": (0.35, lambda of: of["generation"]),
    "generation on architecture": (0.35, lambda of: f"{of['generation']}/{of['arch']}"),
}
"""Effects that every coefficient has: how wide, as a share of its spread, and what it is of."""
KERNEL_WIDTH = 2.0
KERNELS = {"gemm": "dense", "gemm_many": "dense", "experts": "experts", "experts_many": "experts",
           "decode": "attention", "prefill": "attention"}  # fmt: skip
STEP, SOFT, PRIOR, TTFT_WEIGHT = 0.1, 0.12, 2.0, 0.6
FAR = 0.7  # log errors beyond this pull no harder
FEW_ROUNDS = 4  # of requests a slot that a derivative is simulated with under load


@dataclass(frozen=True)
class Sample:
    """One published run with what its coefficients depend on."""

    run: serving_ttft_tpot.Run
    of: Labels
    doubted: frozenset[str]

    @property
    def measured(self) -> tuple[float, float]:
        ttft, tpot = np.log(self.run.ttft_s), np.log(self.run.tpot_s)
        return (np.nan if "ttft_mean" in self.doubted else ttft, np.nan if "tpot_mean" in self.doubted else tpot)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for runs that are simulated alike."""
        d, work = self.run.deployment, self.run.workload
        return (d.anatomy.layers, d.device.name, d.precision, d.pool, d.speculation, replace(d.engine, coef={}),
                work.concurrency, int(work.isl.max()), int(work.osl.max()))  # fmt: skip


@dataclass(frozen=True)
class Loaded:
    """One published rate of an engine at maximum load: no first token, and seconds an output token of all requests."""

    case: inference_llm.Case
    of: Labels

    @property
    def measured(self) -> tuple[float, float]:
        return np.nan, float(np.log(self.case.measured_s))

    @property
    def key(self) -> tuple[object, ...]:
        d, work = self.case.deployment, self.case.workload
        return (d.anatomy.layers, d.device.name, d.precision, d.pool, replace(d.engine, coef={}), len(work),
                int(work.isl.max()), int(work.osl.max()))  # fmt: skip


def loaded(folder: Path) -> list[Loaded]:
    """Maximum load of engines that are also served, on architectures they are fitted for."""
    found = []
    for line, record in read_table(folder / "inference_llm.csv")[1]:
        try:
            case = inference_llm.case_of(Row(line, record))
        except (RidgelineError, ValueError):
            continue
        d = case.deployment
        if d.engine.name == "trtllm" and case.metric == "token" and d.device.arch in ("hopper", "blackwell"):
            found.append(Loaded(case, {**labels_of(d), "source": "trtllm/maximum load"}))
    return found


def samples(folder: Path) -> list[Sample]:
    """Aggregated runs that can be simulated, each measured one once."""
    records = [record for _, record in read_table(folder / "serving_ttft_tpot.csv")[1]]
    doubts = serving_ttft_tpot.contradictions(records)
    found: dict[tuple[float, float], Sample] = {}
    for index, record in enumerate(records):
        try:
            run = serving_ttft_tpot.run_of_row(record)
        except (RidgelineError, ValueError, KeyError):
            continue
        doubted = frozenset(metric for metric in ("ttft_mean", "tpot_mean") if (index, metric) in doubts)
        if run.mode == "agg":
            found.setdefault((run.ttft_s, run.tpot_s), Sample(run, labels(run), doubted))
    return list(found.values())


def labels(run: serving_ttft_tpot.Run) -> Labels:
    return {**labels_of(run.deployment), "source": f"{run.row['backend']}/{run.row['system']}"}


def labels_of(d: Deployment) -> dict[str, str]:
    name, same = d.engine.name, d.anatomy.name.replace("deepseek-r1", "deepseek-v3")  # two names of one model
    return {
        "engine": name.partition("-")[0], "generation": name, "arch": d.device.arch, "dense": d.precision.dense.name,
        "experts": d.precision.experts.name, "attention": d.anatomy.attention, "model": same,
    }  # fmt: skip


def rate_seen(sample: Loaded, coef: Mapping[str, float]) -> tuple[float, float]:
    base, without = sample.case.deployment, {"request_s": 0.0, "token_s": 0.0}  # nobody waits at a front end
    made = replace(base, engine=replace(base.engine, coef={**coef, **without}, own_kernels=True))
    try:
        found = inference_llm.seconds_of(sample.case, metrics(simulate(made, sample.case.workload)))
    except RidgelineError:
        return (np.nan, np.nan)
    return np.nan, float(np.log(found))


def seen(sample: Sample | Loaded, coef: Mapping[str, float], rounds: int = 0) -> tuple[float, float]:
    """Logarithms of the simulated times to the first token and per other token."""
    if isinstance(sample, Loaded):
        return rate_seen(sample, coef)
    run, base = sample.run, sample.run.deployment
    made = replace(base, engine=replace(base.engine, coef=coef, own_kernels=True))
    work = run.workload
    if rounds and work.concurrency >= 64:
        isl, osl, ratio = int(run.row["isl"]), int(run.row["osl"]), serving_ttft_tpot.LENGTH_RATIO
        work = closed(work.concurrency, isl, osl, num=rounds * work.concurrency, ratio=ratio)
    try:
        found = metrics(simulate(made, work))
    except RidgelineError:
        return (np.nan, np.nan)
    return float(np.log(found.ttft_s.mean)), float(np.log(found.tpot_s.mean))


def simulated(of: Sequence[Sample | Loaded], coefs: Sequence[Mapping[str, float]]) -> Floats:
    known: dict[object, tuple[float, float]] = {}
    rows = []
    for sample, coef in zip(of, coefs, strict=True):
        key = (sample.key, tuple(coef.values()))
        if key not in known:
            known[key] = seen(sample, coef)
        rows.append(known[key])
    return np.array(rows)


def derivatives(of: Sequence[Sample | Loaded], coefs: Sequence[Mapping[str, float]]) -> Floats:
    """Of both times by every local coefficient, all in logarithms: (row, time, coefficient)."""
    known: dict[object, Floats] = {}
    for at, (sample, coef) in enumerate(zip(of, coefs, strict=True)):
        if sample.key not in known:
            start = np.array(seen(sample, coef, FEW_ROUNDS))
            moved = [seen(sample, {**coef, n: coef[n] * np.exp(STEP)}, FEW_ROUNDS) for n in NAMES]
            known[sample.key] = np.nan_to_num((np.array(moved) - start).T / STEP)
        if at % 100 == 99:
            print(f"  derivatives: {at + 1} of {len(of)} rows", flush=True)
    return np.array([known[sample.key] for sample in of])


@dataclass(frozen=True)
class Effect:
    """One number the fit may move: of which coefficient, at which level, for whom."""

    name: str
    level: str
    whom: str


def effects_of(name: str, of: Labels) -> Iterator[Effect]:
    for level, (_, whom) in LEVELS.items():
        yield Effect(name, level, whom(of))
    if name in KERNELS:
        yield Effect(name, "kernel", f"{of[KERNELS[name]]}/{of['arch']}")


def width_of(effect: Effect) -> float:
    share = KERNEL_WIDTH if effect.level == "kernel" else LEVELS[effect.level][0]
    return SPREAD[effect.name] * share


@dataclass
class Joint:
    """All effects of all rows, and how the rows' times follow them around where they stand."""

    effects: list[Effect]
    matrix: Floats  # (rows × 2, effects): log times by effects
    weight: Floats
    origin: Floats  # where the effects stand
    prior: float = PRIOR

    @classmethod
    def of(cls, rows: Sequence[Sample | Loaded], slope: Floats, prior: float = PRIOR) -> Joint:
        place: dict[Effect, int] = {}
        for row in rows:
            for name in NAMES:
                for effect in effects_of(name, row.of):
                    place.setdefault(effect, len(place))
        matrix = np.zeros((len(rows), 2, len(place)))
        for at, row in enumerate(rows):
            for i, name in enumerate(NAMES):
                for effect in effects_of(name, row.of):
                    matrix[at, :, place[effect]] = slope[at, :, i]
        weight = np.tile([TTFT_WEIGHT, 1.0], len(rows))
        return cls(list(place), matrix.reshape(len(rows) * 2, -1), weight, np.zeros(len(place)), prior)

    def fit(self, rest: Floats, kept: NDArray[np.bool_]) -> Floats:
        """The effects that fit ``rest`` (log errors at the origin) of the rows ``kept``: relative errors, robustly."""
        used = np.repeat(kept, 2) & np.isfinite(rest.ravel())
        a, weight = self.matrix[used], self.weight[used]
        b = rest.ravel()[used] - a @ self.origin
        pull = self.prior / np.array([width_of(e) for e in self.effects]) ** 2
        x = self.origin.copy()
        for _ in range(40):
            off = np.clip(b + a @ x, -FAR, FAR)
            missed, grown = np.expm1(off), np.exp(off)
            soft = weight**2 / np.sqrt(1 + (weight * missed / SOFT) ** 2)
            steep = a * grown[:, None]
            hessian = (steep * soft[:, None]).T @ steep + np.diag(pull)
            step = -np.linalg.solve(hessian, steep.T @ (soft * missed) + pull * x)
            x = x + np.clip(step, -0.5, 0.5)
            if np.abs(step).max() < 3e-3:
                break
        return x

    def coefficients(self, x: Floats, of: Labels) -> dict[str, float]:
        value = dict(zip(self.effects, x.tolist(), strict=True))
        return {n: START[n] * float(np.exp(sum(value.get(e, 0.0) for e in effects_of(n, of)))) for n in NAMES}


def folds(rows: Sequence[Sample | Loaded], how: str, seed: int = 0) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """(name, rows left out): every model, every source, or three random thirds."""
    if how == "third":
        part = np.random.default_rng(seed).permutation(len(rows)) % 3
        yield from ((f"third {k + 1} of draw {seed + 1}", part == k) for k in range(3))
        return
    named = np.array([row.of[how] for row in rows])
    yield from ((str(name), named == name) for name in sorted(set(named)))


def left_out(rows: Sequence[Sample | Loaded], joint: Joint, rest: Floats, how: str, seed: int = 0) -> Floats:
    """Log errors of every row, simulated under coefficients that were fitted without it and its like."""
    found = np.full((len(rows), 2), np.nan)
    measured = np.array([row.measured for row in rows])
    for name, out in folds(rows, how, seed):
        x = joint.fit(rest, ~out)
        chosen = [row for row, o in zip(rows, out, strict=True) if o]
        found[out] = simulated(chosen, [joint.coefficients(x, row.of) for row in chosen]) - measured[out]
        print(f"    {how} {name}: {told(found[out])}", flush=True)
    return found


def left_out_linear(rows: Sequence[Sample | Loaded], joint: Joint, rest: Floats, how: str, seed: int = 0) -> Floats:
    """The same by derivatives, without a simulation."""
    found = np.full((len(rows), 2), np.nan)
    for _, out in folds(rows, how, seed):
        moved = (joint.matrix @ (joint.fit(rest, ~out) - joint.origin)).reshape(-1, 2)
        found[out] = (rest + moved)[out]
    return found


def curve(
    rows: Sequence[Sample | Loaded], joint: Joint, rest: Floats, draws: int = 5
) -> Iterator[tuple[float, Floats]]:
    """(share of rows fitted, log errors of the others), the times by derivatives instead of simulations."""
    for share in (0.03, 0.1, 0.3, 0.67, 0.9):
        found = []
        for seed in range(draws):
            kept = np.random.default_rng(seed).random(len(rows)) < share
            moved = (joint.matrix @ (joint.fit(rest, kept) - joint.origin)).reshape(-1, 2)
            found.append((rest + moved)[~kept])
        yield share, np.concatenate(found)


def told(rest: Floats) -> str:
    missed = np.abs(np.expm1(rest))
    parts = [f"{name} mean {np.nanmean(missed[:, i]):.1%} median {np.nanmedian(missed[:, i]):.1%}"
             for i, name in enumerate(("ttft", "tpot")) if np.isfinite(missed[:, i]).any()]  # fmt: skip
    return f"{len(rest)} rows, " + ", ".join(parts)


def width(rest: Floats) -> tuple[float, float]:
    """Log half-widths that hold nine of ten runs: first tokens, and all others."""
    first, other = np.nanquantile(np.abs(rest), 0.9, axis=0)
    return float(first), float(other)


def write(joint: Joint, x: Floats, rows: Sequence[Sample | Loaded], rest: Floats) -> None:
    """Every generation's sets, for both architectures, into data/engines.toml; kernels' into data/kernels.toml."""
    value = dict(zip(joint.effects, x.tolist(), strict=True))
    path = data_dir() / "engines.toml"
    text = path.read_text(encoding="utf-8")
    for generation in sorted({e.whom for e in joint.effects if e.level == "generation"}):
        for arch in ("hopper", "blackwell"):
            of = {"engine": generation.partition("-")[0], "generation": generation, "arch": arch}
            levels = [(level, whom(of)) for level, (_, whom) in LEVELS.items()]
            coef = {n: START[n] * np.exp(sum(value.get(Effect(n, *at), 0.0) for at in levels)) for n in NAMES}
            mine = [row.of["generation"] == generation and row.of["arch"] == arch for row in rows]
            first, other = width(rest[mine] if any(mine) else rest)
            coef |= {"width": float(f"{other:.2f}"), "first_width": float(f"{first:.2f}")}
            text = _replaced(text, generation, arch, coef)
    path.write_text(text, encoding="utf-8")
    _write_kernels({e: v for e, v in value.items() if e.level == "kernel"})


def _replaced(text: str, generation: str, arch: str, coef: Mapping[str, float]) -> str:
    title = f'"{generation}"' if "." in generation else generation
    head = f"[{title}.coef.{arch}]\n"
    body = "".join(f"{n} = {float(f'{v:.3g}')!r}\n" for n, v in coef.items())
    if head not in text:
        return f"{text.rstrip()}\n\n{head}{body}"
    begin = text.index(head) + len(head)
    end = text.find("\n\n", begin)
    rest = text[end:].lstrip("\n") if end >= 0 else ""
    return text[:begin] + body + (f"\n{rest}" if rest else "")


def _write_kernels(found: Mapping[Effect, float]) -> None:
    lines = ["# What kernels of serving engines take over what the cost model says, by format or kind of attention;",
             "# fitted with the engines' coefficients by lab/fit/engines.py."]  # fmt: skip
    for arch in sorted({e.whom.partition("/")[2] for e in found}):
        for name in KERNELS:
            some = {e.whom.partition("/")[0]: v for e, v in found.items() if e.name == name and e.whom.endswith(arch)}
            if some:
                lines += ["", f"[{arch}.{name}]", *(f"{kind} = {np.exp(v):.3f}" for kind, v in sorted(some.items()))]
    (data_dir() / "kernels.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def slopes(rows: Sequence[Sample | Loaded], kept: Path | None) -> Floats:
    """Derivatives where every engine is alike: those kept, or new ones."""
    if kept and kept.exists():
        found: Floats = np.load(kept)["slope"]
        if found.shape != (len(rows), 2, len(NAMES)):
            raise SystemExit(f"{kept} holds derivatives of other rows or coefficients: remove it")
        return found
    made = derivatives(rows, [START] * len(rows))
    if kept:
        np.savez(kept, slope=made)
    return made


def search(rows: Sequence[Sample | Loaded], joint: Joint, rounds: int) -> tuple[Floats, Floats]:
    """(log errors where the effects stand after all rounds but the last, the effects after it)."""
    measured = np.array([row.measured for row in rows])
    x = joint.origin
    for number in range(rounds):
        joint.origin = x
        rest = simulated(rows, [joint.coefficients(x, row.of) for row in rows]) - measured
        print(f"round {number + 1}: {told(rest)}", flush=True)
        x = joint.fit(rest, np.ones(len(rows), dtype=bool))
    return rest, x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("published", type=Path)
    parser.add_argument("--derivatives", type=Path, help="keep them here, or start from those kept")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prior", type=float, default=PRIOR)
    parser.add_argument("--left-out", action="store_true")
    parser.add_argument("--draws", type=int, default=2, help="how often random thirds are drawn")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    rows: list[Sample | Loaded] = [*samples(options.published), *loaded(options.published)]
    joint = Joint.of(rows, slopes(rows, options.derivatives), options.prior)
    rest, x = search(rows, joint, options.rounds)
    measured = np.array([row.measured for row in rows])
    fitted = simulated(rows, [joint.coefficients(x, row.of) for row in rows]) - measured
    print(f"{len(joint.effects)} effects, all rows: {told(fitted)}", flush=True)
    if options.write:
        write(joint, x, rows, fitted)
    for share, missed in curve(rows, joint, rest) if options.left_out else ():
        print(f"  {share:.0%} of the rows fitted, five draws; the others: {told(missed)}", flush=True)
    for how in ("model", "source", "third") if options.left_out else ():
        for seed in range(options.draws if how == "third" else 1):
            print(f"  left out by {how}: {told(left_out(rows, joint, rest, how, seed))}", flush=True)


if __name__ == "__main__":
    main()
