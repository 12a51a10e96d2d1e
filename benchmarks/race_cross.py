"""The cross layer and what it is made of, in turns with PyTorch: forward, and the gradient alone.

    python benchmarks/race_cross.py --out DIR [--budget-s 20]
    python benchmarks/race_cross.py --out DIR --floor [--budget-s 20]
    python benchmarks/race_cross.py --show FILE

Beside ours and eager: the matrix products alone (what nobody can do without) and a copy of the fewest bytes that the
layer must move. With ``--floor`` many sizes, float32 with TensorFloat-32 and without it, and the products by halves:
what would have to be reached for twice PyTorch's speed. (A first recording has ``halves`` apart: float32 with its
products made of halves.)
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

CASES = (
    ("bfloat16", 16384, 512, 0), ("bfloat16", 65536, 256, 0), ("bfloat16", 16384, 1024, 0), ("float32", 16384, 1024, 0),
    ("bfloat16", 4096, 1024, 0), ("float32", 16384, 512, 0), ("bfloat16", 16384, 3456, 256),
    ("float32", 16384, 3456, 256), ("bfloat16", 65536, 512, 0), ("bfloat16", 8192, 2048, 0), ("float32", 8192, 2048, 0),
    ("bfloat16", 16384, 1024, 64), ("float32", 65536, 256, 0), ("bfloat16", 16384, 3456, 0),
    ("bfloat16", 4096, 4096, 512), ("float32", 4096, 1024, 0), ("bfloat16", 32768, 768, 192),
    ("bfloat16", 16384, 768, 0), ("float32", 4096, 256, 0), ("bfloat16", 4096, 256, 0),
)  # fmt: skip
"""Type, batch, columns, rank (0: the full matrix)."""


def named(of: tuple[Any, ...]) -> Any:
    from ridgeline.kernels.contract import case

    dtype, batch, dim, rank = of
    return case(dtype, batch=batch, dim=dim, rank=rank)


def variants(floor: bool = False) -> list[Any]:
    """Everything of ours that is launched."""
    from ridgeline.kernels.variants import variants_of

    sizes = [named(("float32" if of[0] == "tf32" else of[0], *of[1:])) for of in FLOOR] if floor else map(named, CASES)
    return list(dict.fromkeys(variants_of("cross_layer", list(sizes))))


def forward_runs(args: tuple[Any, ...], trial: Any) -> dict[str, Callable[[], Any]]:
    import torch

    _, x, weight, bias, down = (*args, None)[:5]

    def products() -> Any:
        return torch.addmm(bias, x if down is None else x @ down.mT, weight.mT)

    target = torch.empty(trial.forward_bytes(args) // 2, dtype=torch.uint8, device=x.device)
    source = torch.zeros_like(target)
    runs = {"eager": partial(trial.eager, *args), "ridgeline": partial(trial.call, *args), "products": products,
            "copy": lambda: target.copy_(source)}  # fmt: skip
    return {name: without_gradient(run) for name, run in runs.items()}


def without_gradient(run: Callable[[], Any]) -> Callable[[], Any]:
    import torch

    def inner() -> Any:
        with torch.no_grad():
            return run()

    return inner


def backward_runs(args: tuple[Any, ...], trial: Any) -> dict[str, Callable[[], Any]]:
    import torch

    from ridgeline.bench.race import runner

    _, x, weight, _, down = (*args, None)[:5]
    runs = {"eager": runner(trial.eager, args, "bwd"), "ridgeline": runner(trial.call, args, "bwd")}
    dy = torch.randn_like(x)

    def products() -> Any:
        if down is None:
            return dy @ weight, dy.mT @ x
        inner = dy @ weight
        return inner, inner @ down, dy.mT @ inner, inner.mT @ x

    target = torch.empty(3 * x.nbytes, dtype=torch.uint8, device=x.device)
    source = torch.zeros_like(target)
    runs |= {"products": without_gradient(products), "copy": without_gradient(lambda: target.copy_(source))}
    return runs


def errors(args: tuple[Any, ...], trial: Any) -> dict[str, float]:
    """Largest miss of each against float64, as a share of the largest result."""
    import torch

    with torch.no_grad():
        meant = trial.reference(*(x[:512].double() if x.shape[0] == args[0].shape[0] and i < 2 else x.double()
                                  for i, x in enumerate(args)))  # fmt: skip
        runs = {"eager": trial.eager, "ridgeline": trial.call}
        found = {name: run(*args)[:512].double() for name, run in runs.items()}
    return {name: float((y - meant).abs().max() / meant.abs().max()) for name, y in found.items()}


def gradient_errors(args: tuple[Any, ...], trial: Any) -> dict[str, list[float]]:
    """The same for every gradient, of the first 4,096 rows."""
    import torch

    few = [x[:4096] if i < 2 else x for i, x in enumerate(args)]

    def gradients(call: Any, wide: bool) -> list[Any]:
        leaves = [(x.double() if wide else x).detach().clone().requires_grad_() for x in few]
        out = call(*leaves)
        seed = torch.randn(out.shape, device=out.device, generator=torch.Generator(out.device).manual_seed(5))
        return list(torch.autograd.grad(out, leaves, seed.to(few[0].dtype).to(out.dtype)))

    meant = gradients(trial.reference, True)
    return {name: [float((a.double() - b).abs().max() / b.abs().max())
                   for a, b in zip(gradients(call, False), meant, strict=True)]
            for name, call in (("eager", trial.eager), ("ridgeline", trial.call))}  # fmt: skip


def rows_of(of: tuple[Any, ...], course: Any) -> Iterator[dict[str, Any]]:
    import torch

    from ridgeline.kernels.contract import trials

    trial = trials()["cross_layer"][1]
    args = trial.make(named(of), torch.device("cuda"), torch.Generator("cuda").manual_seed(1))
    yield {"case": str(of), "errors": errors(args, trial)}
    if of[0] == "float32":
        yield {"case": f"{of} gradients", "errors": gradient_errors(args, trial)}
    for phase, make in (("fwd", forward_runs), ("bwd", backward_runs)):
        runs = make(args, trial)
        for who, samples in course.turns(runs).items():
            yield {"case": str(of), "phase": phase, "contender": who, "num": len(samples),
                   "median_s": statistics.median(samples), "low_s": min(samples)}  # fmt: skip


def measured(end: float, rounds: int, cases: tuple[Any, ...] = CASES) -> Iterator[dict[str, Any]]:
    """Rows of every case until the time is up; a case that fails says so."""
    import torch

    from ridgeline.bench.race import Course

    course = Course(torch.device("cuda"), rounds=rounds)
    for of in cases:
        if time.perf_counter() > end:
            return
        try:
            yield from rows_of(of, course)
        except Exception:
            yield {"case": str(of), "note": traceback.format_exc()[-1500:]}


FLOOR = tuple(
    (kind, batch, dim, rank)
    for batch in (16384, 2048, 65536)
    for dim, rank in ((512, 0), (1024, 0), (256, 0), (3456, 256), (1024, 64), (3456, 0))
    for kind in ("bfloat16", "float32", "tf32")
    if batch * dim * (rank or dim) < 2.2e11 and (batch < 65536 or dim < 3456)
)
"""Kind of arithmetic, batch, columns, rank: sizes of DCN v2 as people train it."""


def halved(args: tuple[Any, ...], phase: str) -> Callable[[], Any]:
    """The products of a pass alone, each made of halves."""
    import torch

    from ridgeline.kernels.cross_layer.op import _product

    _, x, weight, bias, down = (*args, None)[:5]
    dy = torch.randn_like(x)

    def run() -> Any:
        if phase == "fwd":
            return _product(x if down is None else _product(x, down.mT), weight.mT, bias)
        if down is None:
            return _product(dy, weight), _product(dy.mT, x)
        inner = _product(dy, weight)
        return inner, _product(inner, down), _product(dy.mT, inner), _product(inner.mT, x)

    return without_gradient(run)


def floor_rows(end: float, rounds: int, kinds: list[str]) -> Iterator[dict[str, Any]]:
    """Eager, ours, the products alone by whoever is faster at them, and a copy of the fewest bytes."""
    import torch

    from ridgeline.bench.race import Course
    from ridgeline.kernels.contract import trials
    from ridgeline.kernels.tensorfloat import products_in

    course, trial = Course(torch.device("cuda"), rounds=rounds), trials()["cross_layer"][1]
    for of in (of for of in FLOOR if of[0] in kinds):
        if time.perf_counter() > end:
            return
        kind = "float32" if of[0] == "tf32" else of[0]
        args = trial.make(named((kind, *of[1:])), torch.device("cuda"), torch.Generator("cuda").manual_seed(1))
        with products_in("tf32" if of[0] == "tf32" else "ieee"):
            for phase, make in (("fwd", forward_runs), ("bwd", backward_runs)):
                runs = make(args, trial) | ({"halves alone": halved(args, phase)} if of[0] == "float32" else {})
                for who, samples in course.turns(runs).items():
                    yield {"case": str(of), "phase": phase, "contender": who, "num": len(samples),
                           "median_s": statistics.median(samples), "low_s": min(samples)}  # fmt: skip


TILES = {
    ("bfloat16", 2048, 1024): ((128, 128, 64, 8, 3), (128, 64, 64, 4, 4), (64, 128, 64, 4, 4), (64, 64, 64, 4, 4)),
    ("bfloat16", 2048, 512): ((128, 64, 64, 4, 4), (64, 64, 64, 4, 4), (64, 128, 64, 4, 4)),
    ("bfloat16", 4096, 512): ((128, 64, 64, 4, 4), (64, 64, 64, 4, 4), (128, 128, 64, 8, 3)),
    ("bfloat16", 1024, 1024): ((128, 64, 64, 4, 4), (64, 64, 64, 4, 4), (64, 128, 64, 4, 4)),
    ("bfloat16", 4096, 1024): ((128, 128, 64, 8, 3), (128, 64, 64, 4, 4), (128, 256, 64, 8, 3)),
}
"""Kind, batch, columns: rows, columns and terms of a tile, warps and stages."""


def tiled(of: tuple[Any, ...], args: tuple[Any, ...], y: Any) -> dict[str, Callable[[], Any]]:
    """The layer by tiles of each size, and the last step of its gradients."""
    from ridgeline.kernels import tuning
    from ridgeline.kernels.cross_layer import config, op

    x0, x, weight, bias = args
    found = {}
    for ways in TILES[of]:
        with tuning.forced("cross_layer.product", config.Product(*ways)):
            layer = op._plan_product(x, weight, x0, x, bias, cross=True, save=False, turned=False)
            found[f"layer {ways}"] = partial(layer, x, weight, x0, x, bias, y, y)
            added = op._plan_product(x, weight, x0, x0, None, cross=False, save=False, turned=True)
            found[f"add {ways}"] = partial(added, x, weight, x0, x0, None, y, y)
    return found


ENDLESS = ((8192, 1024, 0), (256, 3456, 0), (16383, 512, 0), (16384, 1024, 256), (16384, 1024, 64))


def endless_rows() -> Iterator[dict[str, Any]]:
    """Float32 layers of rows with infinities and NaN, and their gradients: the same places as PyTorch's."""
    import torch

    from ridgeline.kernels.contract import trials

    trial = trials()["cross_layer"][1]
    for batch, dim, rank in ENDLESS:
        of = named(("float32", batch, dim, rank))
        args = trial.make(of, torch.device("cuda"), torch.Generator("cuda").manual_seed(1))
        args[1][5, 3], args[1][7, 1], args[1][11, 2] = float("inf"), float("inf"), -float("inf")
        args[1][9, 4] = torch.zeros((), device="cuda") / 0.0
        leaves = [each.clone().requires_grad_() for each in args]
        both = []
        for call in (trial.call, trial.eager):
            y = call(*leaves)
            both.append([y.detach(), *torch.autograd.grad(y.sum(), leaves)])
        same = [bool(torch.equal(a.isnan(), b.isnan()) and torch.equal(a[a.isinf()], b[b.isinf()]))
                for a, b in zip(*both, strict=True)]  # fmt: skip
        yield {"case": f"{of} endless", "ok": all(same), "note": f"{same}, {int(both[0][0].isinf().sum())} infinities"}


def tile_rows(end: float, rounds: int) -> Iterator[dict[str, Any]]:
    """Tiles beside eager: how far from float64 first, as a share of eager's own miss, then times."""
    import torch

    from ridgeline.bench.race import Course
    from ridgeline.kernels.contract import trials
    from ridgeline.kernels.tensorfloat import products_in

    trial = trials()["cross_layer"][1]
    for of in TILES:
        if time.perf_counter() > end:
            return
        kind, batch, dim = of
        args = trial.make(named((kind, batch, dim, 0)), torch.device("cuda"), torch.Generator("cuda").manual_seed(1))
        x0, x, weight, _ = args
        y = torch.empty_like(x)
        runs = tiled(of, args, y)
        with products_in("ieee"):
            eager = {"layer": partial(trial.eager, *args), "add": partial(torch.addmm, x0, x, weight)}
            wide = [each.double() for each in args]
            meant = {"layer": trial.reference(*wide), "add": torch.addmm(wide[0], wide[1], wide[2])}
            for name, run in runs.items():
                y.fill_(float("nan"))
                run()
                what = name.split()[0]
                theirs = (eager[what]().double() - meant[what]).norm()
                off = float((y.double() - meant[what]).norm() / theirs)
                yield {"case": str(of), "what": name, "ok": off < 2.0, "note": f"{off:.2f} of eager's error"}
            runs |= {f"{name} eager": run for name, run in eager.items() if f"{name} " in " ".join(runs) + " "}
            for who, samples in Course(torch.device("cuda"), rounds=rounds).turns(runs).items():
                yield {"case": str(of), "phase": "tiles", "contender": who, "num": len(samples),
                       "median_s": statistics.median(samples), "low_s": min(samples)}  # fmt: skip


def tile_variants() -> list[Any]:
    import torch

    from ridgeline.kernels.launcher import collecting

    with collecting() as found:
        for of in TILES:
            x = torch.empty(*of[1:], dtype=getattr(torch, of[0]), device="meta")
            tiled(of, (x, x, x.new_empty(of[2], of[2]), x.new_empty(of[2])), x)
    return list(dict.fromkeys(found))


def floors(rows: list[dict[str, Any]]) -> Iterator[str]:
    """What the products and the fewest bytes take, one after the other or at once, and what of PyTorch that leaves."""
    yield "| case | phase | eager | ours | × | products | by halves | copy | × at once | × one after the other |"
    yield f"|{'---|' * 10}"
    for key in dict.fromkeys((row["case"], row["phase"]) for row in rows):
        mine = {row["contender"]: 1e6 * row["median_s"] for row in rows if (row["case"], row["phase"]) == key}
        eager, copy = mine["eager"], mine["copy"]
        best = min(mine["products"], mine.get("halves alone", mine["products"]))
        by_halves = f"{mine['halves alone']:.1f}" if "halves alone" in mine else "–"
        yield (f"| {' '.join(map(str, ast.literal_eval(key[0])))} | {key[1]} | {eager:.1f} | {mine['ridgeline']:.1f} | "
               f"{eager / mine['ridgeline']:.2f} | {mine['products']:.1f} | {by_halves} | {copy:.1f} | "
               f"{eager / max(best, copy):.2f} | {eager / (best + copy):.2f} |")  # fmt: skip


RESIDENT = {(256, 0): ((4, 2), (6, 2)), (3456, 256): ((6, 1), (6, 2)), (1024, 64): ((4, 2),)}
"""Stages and ends of products whose rows stay in shared memory, by columns and rank."""
RESIDENT_CASES = (("bfloat16", 65536, 256, 0), ("bfloat16", 16384, 3456, 256), ("bfloat16", 16384, 1024, 64))


def add_plans(of: tuple[Any, ...], a: Any, weight: Any, x: Any) -> dict[str, Any]:
    """Plans of ``a @ weight + x`` by configuration; each fills the tensors it is given."""
    from race_attention import instead

    from ridgeline.kernels.cross_layer import config, op

    found = {"tiles": op._plan_product(a, weight, x, x, None, cross=False, save=False, turned=True)}
    for ways in RESIDENT[of[2:]]:
        with instead(config, "resident", partial(_given, config.Resident(*ways))):
            found[str(ways)] = op._plan_resident(a, weight, x)
    return found


def miss(found: Any, meant: Any) -> float:
    return float((found.float() - meant.float()).norm() / meant.float().norm())


def _given(value: Any, **_: Any) -> Any:
    return value


def added(of: tuple[Any, ...], on: str) -> tuple[Any, Any, Any]:
    """What the last step of the gradients is given."""
    import torch

    _, batch, dim, rank = of
    shapes = (batch, rank or dim), (rank or dim, dim), (batch, dim)
    a, weight, x = (torch.randn(*shape, device=on).bfloat16() for shape in shapes)
    return a, weight, x


def resident_variants() -> list[Any]:
    from ridgeline.kernels.launcher import collecting

    with collecting() as found:
        for of in RESIDENT_CASES:
            add_plans(of, *added(of, "meta"))
    return list(dict.fromkeys(found))


def resident_rows(end: float, rounds: int) -> Iterator[dict[str, Any]]:
    """Products whose rows stay in shared memory beside those in tiles: the same results asked for, then timed."""
    import torch

    from ridgeline.bench.race import Course

    course = Course(torch.device("cuda"), rounds=rounds)
    for of in RESIDENT_CASES:
        if time.perf_counter() > end:
            return
        a, weight, x = added(of, "cuda")
        meant, runs = torch.addmm(x, a, weight), {}
        for name, plan in add_plans(of, a, weight, x).items():
            y = torch.full_like(x, float("nan"))
            runs[name] = partial(plan, a, weight, x, x, None, y, y)
            runs[name]()
            again = y.clone()
            runs[name]()
            same, off = torch.equal(y, again), miss(y, meant)
            yield {"case": f"{of} add", "what": name, "ok": same and off < 2e-3,
                   "note": f"off by {off:.1e}, same bits {same}"}  # fmt: skip
        for who, samples in course.turns(runs).items():
            yield {"case": str(of), "phase": "add", "contender": who, "num": len(samples),
                   "median_s": statistics.median(samples), "low_s": min(samples)}  # fmt: skip


def shown(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Microseconds, and eager's over ours and over the best of ours."""
    names = ("eager", "ridgeline", "halves", "products", "copy")
    yield f"| case | phase | {' | '.join(names)} | eager / ours |\n|{'---|' * 8}"
    timed = [row for row in rows if "median_s" in row]
    for key in dict.fromkeys((row["case"], row["phase"]) for row in timed):
        mine = {row["contender"]: 1e6 * row["median_s"] for row in timed if (row["case"], row["phase"]) == key}
        cells = [f"{mine[name]:.1f}" if name in mine else "–" for name in names]
        best = mine["eager"] / min(mine[name] for name in ("ridgeline", "halves") if name in mine)
        yield f"| {key[0]} | {key[1]} | {' | '.join(cells)} | {mine['eager'] / mine['ridgeline']:.2f} ({best:.2f}) |"
    yield from (f"- {row['case']}: {row.get('errors') or row.get('note')}" for row in rows if "median_s" not in row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget-s", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--floor", action="store_true", help="many sizes, beside what nobody can do without")
    parser.add_argument("--tiles", action="store_true", help="tiles of the product side by side")
    parser.add_argument("--kinds", nargs="*", default=["bfloat16", "float32", "tf32"], help="of the floor")
    parser.add_argument("--show", type=Path)
    options = parser.parse_args()
    if options.show:
        with gzip.open(options.show, "rt") as file:
            found = json.load(file)
        if found.get("floor"):
            print("\n".join(floors(found["rows"])))
            return
        print("\n".join(shown(found.get("parts", {}).get("cross") or found["rows"])))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    end = time.perf_counter() + options.budget_s
    if options.floor:
        to, found = "cross_floor.json.gz", floor_rows(end, options.rounds, options.kinds)
    elif options.tiles:
        to, found = "cross_tiles.json.gz", chain(tile_rows(end, options.rounds), endless_rows())
    else:
        to, found = "cross.json.gz", measured(end, options.rounds)
    for row in found:
        rows.append(row)
        print(json.dumps(row), flush=True)
        if len(rows) % 8 == 0:
            (options.out / to).write_bytes(gzip.compress(json.dumps({"rows": rows, "floor": options.floor}).encode()))
    (options.out / to).write_bytes(gzip.compress(json.dumps({"rows": rows, "floor": options.floor}).encode()))


if __name__ == "__main__":
    main()
