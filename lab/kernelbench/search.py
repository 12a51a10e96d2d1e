"""Searches many problems of KernelBench concurrently, and times each with all other workers stopped.

Workers import once and search one problem after another. One lock is held by the process that uses the device; it is
released while a candidate is traced and compiled. The decisive timing is made at the end of each search and after it:
eager, ``torch.compile`` and the result of ``ridgeline.optimize`` in turns, while all other workers are stopped
(SIGSTOP), so that neither their kernels nor their Python interfere. The last race of the search itself is timed so,
too. Budgets count seconds in which a worker neither waits for the lock nor is stopped.

Results are compared with eager PyTorch's on two other draws of the inputs: wrong if they differ by more than 1e-3 of
the largest value and are not *close*, that is elementwise within 1e-4, absolute and relative (the benchmark's own rule
for float32, which eager PyTorch itself may break against float64: it convolves in TensorFloat-32). The search's own
proof is against float64. If ``torch.compile`` is wrong by this rule, it does not count as a rival. Adversarial checks
do what a harness may also do: keep results, pass other layouts and addresses, write other weights, record gradients,
inspect inputs and strides.

With ``--go`` workers import and wait for a file. Meanwhile separate processes compile the problems named by ``--warm``,
to fill the compilers' disk caches, possibly beside other users of the device; they end when the file exists.

``--folder`` is a checkout of the public benchmark (``level1`` to ``level3``); without it the problems of
``lab/kernelbench/problems.py`` are taken. ``--problems`` are names in order; without them every n-th of each level. A
name may include a dtype or other sizes: ``2/33:bfloat16``, ``2/33:float16``, ``2/33:ieee`` (float32 without
TensorFloat-32), ``2/33:odd``, ``2/33:halved``, ``2/33:odd,bfloat16``.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import gzip
import importlib
import json
import math
import mmap
import os
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lab.kernelbench import problems as like

MARK = like.MARK
EACH_S = {"1": 9.0, "2": 12.0, "3": 30.0}
LAST_S, ROUNDS = 0.25, 40
"""Seconds of the last comparison, and the most rounds."""
SLICE_S = 4e-3
LONGEST_STOP_S = 8.0
DEVICE_BYTES, AHEAD = 138e9, 60
"""Device memory for all workers, and how many waiting problems are checked for one that fits."""
RIGHT, CLOSE = 1e-3, 1e-4
HALF_RIGHT, HALF_CLOSE = 2e-2, 1e-2
"""The same for 16 bits, where the benchmark's own tolerance is 1e-2."""
WRONGS = ("a result changed when the next was made", "inputs changed", "other strides of the inputs", "other weights",
          "inputs that start between two accesses", "gradients recorded")  # fmt: skip
MAX_CHECKED_BYTES = 3 << 30
"""The largest inputs that are copied for checks."""
SHARED_BYTES = 24
"""Three shared numbers: seconds that workers were stopped, since when they are, and when the run ends."""
LONGEST_WAIT_S = 540.0
COMPILE_S = {1: 6.0, 2: 12.0, 3: 15.0}
"""Seconds for torch.compile after a search that had no time for it."""


WARM_JOBS, WARM_FRAC = 4, 0.05
"""Processes that compile early, and the share of the device's memory for each."""
WORTH_S = {"1": 14.0, "2": 18.0, "3": 35.0}
"""The least seconds for a problem, by level."""


class Still(like.Turn):
    """The lock, and stopping of all other workers; the seconds they were stopped are shared."""

    def __init__(self, lock: str, shared: str) -> None:
        super().__init__(lock)
        self.others = Path(shared + ".pids")
        self.doing, self.since, self.held_s = "else", 0.0, dict[str, float]()
        with open(shared, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), SHARED_BYTES)

    @property
    def stopped_s(self) -> float:
        return float(struct.unpack("d", self.memory[:8])[0])

    @property
    def until(self) -> float:
        return float(struct.unpack("d", self.memory[16:])[0])

    def take(self) -> None:
        held, before = self.held, self.stopped_s
        super().take()
        self.waited_s -= self.stopped_s - before  # counted as stops
        self.since = self.since if held else time.perf_counter()

    def give(self) -> None:
        self.account()
        super().give()

    def account(self) -> None:
        """Attribute the seconds the lock was held to the current activity."""
        now = time.perf_counter()
        if self.held:
            self.held_s[self.doing] = self.held_s.get(self.doing, 0.0) + now - self.since
        self.since = now

    def doing_so(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, with its lock time attributed to this name."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.account()
            before, self.doing = self.doing, what
            try:
                return call(*args, **kwargs)
            finally:
                self.account()
                self.doing = before

        return run

    def beside(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call with the lock released."""

        def run(*args: Any, **kwargs: Any) -> Any:
            held = self.held
            self.give()
            try:
                return call(*args, **kwargs)
            finally:
                if held:
                    self.take()

        return run

    @contextlib.contextmanager
    def apart(self, compiles: bool = True) -> Iterator[None]:
        """Hold device and host alone inside the context."""
        held = self.held
        self.take()
        began = time.time()
        self.memory[8:16] = struct.pack("d", began)
        signal_all(self.others, signal.SIGSTOP, but=os.getpid())
        try:
            time.sleep(0.002)
            yield
        finally:
            signal_all(self.others, signal.SIGCONT, but=os.getpid())
            self.memory[:16] = struct.pack("dd", self.stopped_s + time.time() - began, 0.0)
            if not held:
                self.give()


def signal_all(pids: Path, sent: signal.Signals, but: int = 0) -> None:
    """Send a signal to the workers of this run."""
    for pid in json.loads(pids.read_text()) if pids.exists() else []:
        if pid != but:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sent)


def share_the_device(turn: Still) -> None:
    """Last races run alone, builds without the lock; a search's clock stops while others hold the device."""
    from ridgeline.engine import autotune as contest
    from ridgeline.optimizer.search import budget, builds, prepare, search
    from ridgeline.optimizer.search import last_race as ending

    for name in search.COMPILERS:
        importlib.import_module(name)
    left_s, race, last_race = budget.Budget.left_s, search.Track.race, ending.LastRace.last_race

    def outside_s() -> float:
        return turn.waited_s + turn.stopped_s

    def left(self: Any) -> float:
        return left_s(self) + outside_s() - self.__dict__.setdefault("outside_before_s", outside_s())

    def last(self: Any) -> Any:
        self.search.track.is_last = True
        return last_race(self)

    def raced(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "is_last", False):
            with turn.apart():
                return race(self, *args, **kwargs)
        return race(self, *args, **kwargs)

    budget.Budget.left_s, ending.LastRace.last_race, search.Track.race = left, last, raced
    search.regions = lambda search, stock: ()  # no breakdown by kind of kernel
    search.parts = lambda search, eager, best: ()
    budget.LEAST_RACE_S, budget.RACE_FRAC, budget.LAST_RACE_FRAC = 0.06, 0.008, 0.02
    ending.LEAST_RACE_S, ending.LAST_RACE_FRAC = 0.06, 0.02
    contest.raced = turn.here(turn.doing_so("races of ops", contest.raced))
    builds.build, prepare.substitutable = turn.beside(builds.build), turn.beside(prepare.substitutable)
    prepare.price, search.receipt_of = turn.beside(prepare.price), turn.beside(search.receipt_of)
    note_the_lock(turn)


def note_the_lock(turn: Still) -> None:
    """Account the lock time by activity."""
    from ridgeline.optimizer.search import builds, search

    kinds = {"races": (search.Track, "race"), "first calls": (search.Track, "settle"),
             "eager": (search, "prepare"), "memory": (search.Search, "_peak_bytes"),
             "references": (search.Prover, "__init__"), "proofs": (search.Search, "prove"),
             "recordings": (search.Search, "recapture"), "making": (builds.Builds, "made")}  # fmt: skip
    for what, (owner, name) in kinds.items():
        setattr(owner, name, turn.doing_so(what, getattr(owner, name)))


@dataclass(slots=True)
class Row:
    """The result of one problem."""

    level: int
    name: str
    verdict: str = "failed"
    winner: str = ""
    note: str = ""
    eager_s: float = math.nan
    compiled_s: float = math.nan
    ours_s: float = math.nan
    over_eager: float = math.nan
    over_compiled: float = math.nan
    errors: list[float] = field(default_factory=list)
    right: bool = False
    close: bool = False
    compiled_error: float = math.nan
    compiled_right: bool = True
    search: dict[str, Any] = field(default_factory=dict)
    spent_s: float = 0.0
    waited_s: float = 0.0
    stopped_s: float = 0.0


class Case:
    """A model on the device, its inputs, other inputs, and its original state."""

    def __init__(self, problem: like.Problem, device: torch.device, scale: float) -> None:
        self.device = device
        self.model, self.args = self._made(problem, scale, 0)
        self.state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.problem, self.scale = problem, scale

    def _made(self, problem: like.Problem, scale: float, seed: int) -> tuple[nn.Module, tuple[Any, ...]]:
        torch.manual_seed(seed)
        with torch.device(self.device):
            model, args = problem.make(like.Scale(scale))
        return model.to(self.device), tuple(x.to(self.device) if isinstance(x, Tensor) else x for x in args)

    def others(self, seed: int) -> tuple[Any, ...]:
        return self._made(self.problem, self.scale, seed)[1]

    def run(self, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """A call from the original state with fixed random numbers."""
        self.model.load_state_dict(self.state)
        torch.manual_seed(7)
        return call(*args)


def looked_at(problem: like.Problem, device: torch.device, asked: argparse.Namespace, turn: Still) -> Row:
    """Search, compare and time one problem."""
    import ridgeline

    row, began = Row(problem.level, problem.name), time.perf_counter()
    waited_s, stopped_s = turn.waited_s, turn.stopped_s
    turn.held_s = {}
    case = Case(problem, device, asked.scale)
    turn.take()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        budget_s = asked.each_s.get(problem.name) or asked.each_s[str(problem.level)]
        fast = ridgeline.optimize(case.model, case.args, budget_s=budget_s, use_cache=False)
        row.winner, row.search = fast.receipt.winner, told(fast.receipt)
        row.right, row.close, row.errors = turn.doing_so("comparison", compared)(case, fast, turn)
        if fast.receipt.final_s:
            say(as_searched(row, fast.receipt), early=True)
        row.search["adversarial"] = turn.doing_so("comparison", adversarial_checks)(case, fast)
        row.right = row.right and not any(word in WRONGS for word in row.search["adversarial"])
        calls = {"eager": case.model, "ours": fast}
        stock = turn.beside(compiled)(case, fast.receipt, turn.until)
        calls |= {"compiled": stock} if callable(stock) else {}
        row.note = stock if isinstance(stock, str) else ""
        if callable(stock):
            found = turn.doing_so("comparison", compared)(case, stock, turn, seeds=(11,))
            row.compiled_right, row.compiled_error = found[0], found[2][0]
        judged(row, turn.doing_so("last timing", timed)(case, calls, turn))
    turn.account()
    row.search["held_s"] = dict(turn.held_s)
    row.spent_s, row.waited_s = time.perf_counter() - began, turn.waited_s - waited_s
    row.stopped_s = turn.stopped_s - stopped_s
    row.search["fallbacks"] = dict(fast.fallbacks)
    return row


def as_searched(row: Row, receipt: Any) -> Row:
    """The row by the search's own last race, which also ran alone; written before torch.compile is compiled for the
    table, in case the run ends meanwhile."""
    found = replace(row, eager_s=receipt.eager_s, ours_s=receipt.final_s, note="by its search", verdict="no rival")
    found.over_eager = receipt.eager_s / receipt.final_s
    if receipt.stock_s is not None:
        found.compiled_s, found.over_compiled = receipt.stock_s, receipt.stock_s / receipt.final_s
        over, noise = min(found.over_eager, found.over_compiled), like.NOISE_FRAC
        found.verdict = "faster" if over > 1 + noise else "slower" if over < 1 - noise else "even"
    found.verdict = found.verdict if row.right else "WRONG"
    return found


def told(receipt: Any) -> dict[str, Any]:
    tried = [{"name": e.name, "status": e.status, "reason": e.reason[:160], "s": e.measured_s, "build_s": e.build_s,
              "rewrites": dict(e.rewrites)} for e in receipt.entries]  # fmt: skip
    return {"tried": tried, "notes": list(receipt.notes)[:6], "contests": like.contests(), "spent_s": receipt.spent_s,
            "verdict": receipt.verdict, "eager_s": receipt.eager_s, "stock_s": receipt.stock_s,
            "final_s": receipt.final_s}  # fmt: skip


def compared(
    case: Case, fast: Callable[..., Any], turn: Still, seeds: tuple[int, ...] = (11, 12)
) -> tuple[bool, bool, list[float]]:
    """Whether results agree with eager's on other inputs, are close, and the largest differences over the largest."""
    found = []
    for seed in seeds:
        args = turn.beside(case.others)(seed)
        meant = detached(case.run(case.model, args))
        got = detached(case.run(fast, args))
        found.append(agreed(got, meant))
        del args, meant, got
    return all(each[0] for each in found), all(each[1] for each in found), [each[2] for each in found]


def adversarial_checks(case: Case, fast: Callable[..., Any]) -> list[str]:
    """Failures under what a harness may also do: other inputs, layouts and weights; a check that raises is reported."""
    try:
        return run_adversarial_checks(case, fast)
    except Exception as error:
        return [f"not tried: {error!r}"[:200]]


def run_adversarial_checks(case: Case, fast: Callable[..., Any]) -> list[str]:
    if sum(x.nbytes for x in case.args if isinstance(x, Tensor)) > MAX_CHECKED_BYTES:
        return []
    found = []
    before = [x.clone() if isinstance(x, Tensor) else x for x in case.args]
    kept = case.run(fast, case.args)
    told = detached(kept)
    others = case.others(13)
    case.run(fast, others)  # a result must survive later calls
    if not all(map(like_bits, detached(kept), told)):
        found.append(WRONGS[0])
    if not all(torch.equal(a, b) for a, b in zip(before, case.args, strict=True) if isinstance(a, Tensor)):
        found.append(WRONGS[1])
    meant = detached(case.run(case.model, case.args))
    for laid, wrong in ((turned_around, WRONGS[2]), (shifted, WRONGS[4])):
        if not agreed(detached(case.run(fast, tuple(map(laid, case.args)))), meant)[0]:
            found.append(wrong)
    with torch.enable_grad():
        if not agreed(detached(case.run(fast, case.args)), meant)[0]:
            found.append(WRONGS[5])
    found += [] if same_strides(kept, case.run(case.model, case.args)) else ["other strides of the results"]
    return found + other_weights(case, fast)


def other_weights(case: Case, fast: Callable[..., Any]) -> list[str]:
    """Write weights of another seed into the optimized model."""
    state = case.state
    drawn, _ = case._made(case.problem, case.scale, 5)
    case.state = {name: tensor.clone() for name, tensor in drawn.state_dict().items()}
    try:
        meant, got = detached(case.run(case.model, case.args)), detached(case.run(fast, case.args))
        return [] if agreed(got, meant)[0] else [WRONGS[3]]
    finally:
        case.state = state
        case.model.load_state_dict(state)


def turned_around(x: Any) -> Any:
    """The same numbers in a transposed layout."""
    return x.mT.contiguous().mT if isinstance(x, Tensor) and x.dim() > 1 else x


def shifted(x: Any) -> Any:
    """The same numbers one element further in memory: unaligned."""
    if not isinstance(x, Tensor) or not x.is_contiguous():
        return x
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def like_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num()) if a.is_floating_point() else torch.equal(a, b)


def same_strides(a: Any, b: Any) -> bool:
    """Whether two results have equal strides, except for dims of one element."""
    pairs = zip(*([x for x in torch.utils._pytree.tree_leaves(each) if isinstance(x, Tensor)] for each in (a, b)),
                strict=True)  # fmt: skip
    laid = [[[(n, s) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1] for x in pair] for pair in pairs]
    return all(one == two for one, two in laid)


def detached(result: Any) -> list[Tensor]:
    return [x.detach().clone() for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, Tensor)]


def agreed(got: list[Tensor], meant: list[Tensor]) -> tuple[bool, bool, float]:
    if len(got) != len(meant):
        return False, False, math.inf
    pairs = list(zip(got, meant, strict=True))
    judged = [like._alike(a, b, HALF_RIGHT if b.dtype.itemsize == 2 else RIGHT) for a, b in pairs]
    near = [a.shape == b.shape and a.dtype == b.dtype and close(a, b) for a, b in pairs]
    right = all(each or is_near for (each, _), is_near in zip(judged, near, strict=True))  # zeros but for rounding
    return right, all(near), max((error for _, error in judged), default=0.0)


def close(a: Tensor, b: Tensor) -> bool:
    near = HALF_CLOSE if b.dtype.itemsize == 2 else CLOSE
    return torch.allclose(a, b, near, near, equal_nan=True) if b.is_floating_point() else torch.equal(a, b)


def compiled(case: Case, receipt: Any, until: float) -> Any:
    """The model behind torch.compile with default settings, called once; or the reason why there is none."""
    level = case.problem.level
    if receipt.stock_s is None and until - time.time() < COMPILE_S[level]:
        return "no time for torch.compile"
    try:
        stock = torch.compile(case.model)
        case.run(stock, case.args)
        return stock
    except Exception as error:
        return f"torch.compile: {repr(error)[:160]}"


def timed(case: Case, calls: dict[str, Any], turn: Still) -> dict[str, list[float]]:
    """Seconds per call of each, a number for every round, in turns, alone on the device; each call is synchronized."""
    from ridgeline.optimizer.search.timing import in_turn

    sync = torch.cuda.synchronize if case.device.type == "cuda" else (lambda: None)

    def visit(call: Callable[..., Any], num: int) -> float:
        sync()
        began = time.perf_counter()
        for _ in range(num):
            call(*case.args)
            sync()
        return (time.perf_counter() - began) / num

    for call in calls.values():  # warm-up
        visit(call, 2)
    found: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls.items())
    with turn.apart():
        num = {name: max(1, min(50, math.ceil(SLICE_S / visit(call, 2)))) for name, call in order}
        began = time.perf_counter()
        for i in range(ROUNDS):
            for name, call in in_turn(order, i):
                found[name].append(visit(call, num[name]))
            if i >= 4 and time.perf_counter() - began > LAST_S:
                break
    return found


def judged(row: Row, found: dict[str, list[float]]) -> None:
    """Faster, even or slower: the median of the rounds' ratios against the better rival."""

    def ratio(rival: str) -> float:
        return statistics.median(a / b for a, b in zip(found[rival], found["ours"], strict=True))

    row.eager_s, row.ours_s = statistics.median(found["eager"]), statistics.median(found["ours"])
    row.over_eager = ratio("eager")
    if "compiled" in found:
        row.compiled_s, row.over_compiled = statistics.median(found["compiled"]), ratio("compiled")
    row.search["rounds"] = found
    rivals = [row.over_eager, *([row.over_compiled] if row.compiled_right else [])]
    over = min(each for each in rivals if not math.isnan(each))
    noise = like.NOISE_FRAC
    row.verdict = "faster" if over > 1 + noise else "slower" if over < 1 - noise else "even"
    if "compiled" not in found:
        row.verdict = "no rival"
    elif not row.compiled_right:
        row.note = f"torch.compile is {row.compiled_error:.0e} from eager: only eager is a rival"
    if not row.right:
        row.verdict = "WRONG"


def warm_up(device: torch.device) -> None:
    """A tiny search, for imports and lazy initialization."""
    import ridgeline

    with torch.no_grad(), contextlib.suppress(Exception):
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh()).to(device)
        ridgeline.optimize(model, (torch.rand(8, 64, device=device),), budget_s=4.0, use_cache=False)
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()  # imported modules are not traversed by the collections of every search


def work(asked: argparse.Namespace) -> None:
    """Run problems named on standard input, a line each; writes a line of JSON for each."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    turn = Still(asked.lock, asked.shared)
    share_the_device(turn)
    warm_up(device)
    print(MARK + json.dumps({"ready": os.getpid()}), flush=True)
    for line in sys.stdin:
        problem = like.called(line.strip())
        torch.backends.cudnn.allow_tf32 = "ieee" not in problem.name
        try:
            row = looked_at(problem, device, asked, turn)
        except Exception as error:  # a failure is a result too
            row = Row(problem.level, problem.name, note=repr(error)[:400])
        finally:
            turn.give()
        say(row)
        forget(device)


def say(row: Row, *, early: bool = False) -> None:
    made = {name: getattr(row, name) for name in row.__slots__} | ({"early": True} if early else {})
    print(MARK + json.dumps(made, default=str), flush=True)


def warm(problem: like.Problem, asked: argparse.Namespace) -> None:
    """Compile a problem early, by torch.compile and by us, to fill the disk caches."""
    from ridgeline.optimizer.backend import compiled as lowered

    os.nice(5)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(WARM_FRAC)
    case = Case(problem, device, asked.scale)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case.run(torch.compile(case.model), case.args)
        case.run(lowered(case.model, compiler="inductor"), case.args)


def forget(device: torch.device) -> None:
    """Release what a problem leaves in this process."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# the parent ---------------------------------------------------------------------------------------------------------


class Worker:
    """A process that gets one problem at a time."""

    def __init__(self, asked: argparse.Namespace, place: Path, num: int, lock: str, shared: str) -> None:
        passed = ["--scale", str(asked.scale), "--out", str(asked.out), "--worker", "--lock", lock, "--shared", shared]
        passed += ["--folder", str(asked.folder)] if asked.folder else []
        passed += ["--each-s", json.dumps(asked.each_s)]
        settings = {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "2"}
        self.log, self.seen, self.doing, self.since = place / f"{num}.log", 0, "", 0.0
        self.ready = False
        with self.log.open("w") as file:
            self.process = subprocess.Popen([sys.executable, "-m", __spec__.name, *passed],
                                            stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT,
                                            env={**os.environ, **settings})  # fmt: skip

    def tell(self, name: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name}\n".encode())
        self.process.stdin.flush()
        self.doing, self.since = name, time.time()

    def news(self) -> list[dict[str, Any]]:
        """Rows since the last call."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.startswith(MARK)]
        found = [json.loads(line.removeprefix(MARK)) for line in lines[self.seen :]]
        self.seen = len(lines)
        self.ready = self.ready or bool(found)
        told = [each for each in found if "ready" not in each]
        if any(not each.get("early") for each in told):
            self.doing = ""
        return told

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


def needed_bytes(problem: like.Problem) -> float:
    """Peak memory of a search: copies of the inputs, results, and all of it in float64."""
    try:
        with torch.device("meta"), torch.no_grad():
            model, args = problem.make(like.Scale(1.0))
            model, args = model.to("meta"), [x.to("meta") if isinstance(x, Tensor) else x for x in args]
            recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())  # these run for seconds
            outs = [] if recurrent else torch.utils._pytree.tree_leaves(model(*args))
        held = sum(p.nbytes for p in model.parameters())
        through = sum(x.nbytes for x in (*args, *outs) if isinstance(x, Tensor))
        return 2e9 + 3.0 * held + 4.0 * through
    except Exception:  # a model that cannot be built on meta counts as medium
        return 1e10


def lead(asked: argparse.Namespace) -> None:
    """Start workers, assign problems while memory allows, and collect their results."""
    asked.out.mkdir(parents=True, exist_ok=True)
    print(f"torch {torch.__version__}, searches of {asked.each_s} s by level, {asked.jobs} workers", flush=True)
    place = Path(tempfile.mkdtemp())
    lock = os.environ.get("RIDGELINE_DEVICE_LOCK") or str(place / "device.lock")
    shared = place / "stopped"
    shared.write_bytes(bytes(SHARED_BYTES))
    workers = [Worker(asked, place, i, lock, str(shared)) for i in range(asked.jobs)]
    Path(f"{shared}.pids").write_text(json.dumps([worker.process.pid for worker in workers]))
    waiting = [(problem.name, needed_bytes(problem)) for problem in chosen(asked)]
    total, rows = len(waiting), dict[str, dict[str, Any]]()
    needs = dict(waiting)
    until = begin(asked, workers, shared)
    while time.time() < until and any(worker.alive for worker in workers):
        news = [row for worker in workers for row in worker.news()]
        rows |= {row["name"]: row for row in news}
        hand_out(workers, waiting, needs, until - time.time())
        revive(workers, shared)
        if news:
            write(asked.out, list(rows.values()))
            print(f"{time.strftime('%H:%M:%S')} {len(rows)} of {total}", flush=True)
        if not waiting and not any(worker.doing for worker in workers if worker.alive):
            break
        time.sleep(0.1)
    end(workers, shared)
    rows |= {row["name"]: row for worker in workers for row in worker.news()}
    write(asked.out, list(rows.values()))
    for worker in workers:
        if worker.seen <= 1 or worker.process.returncode not in (0, -9):
            print(f"{worker.log.name} ({worker.process.returncode}): {worker.log.read_text()[-1500:]}")
    summed_up(list(rows.values()))


def begin(asked: argparse.Namespace, workers: list[Worker], shared: Path) -> float:
    """When the run ends. With ``--go`` the clock starts when that file exists, after all imports."""
    waited_from, warmers = time.time(), Warmers(asked)
    while asked.go and not asked.go.exists() and time.time() - waited_from < LONGEST_WAIT_S:
        warmers.go_on()
        time.sleep(0.05)
    warmers.end()
    until = time.time() + asked.budget_s
    with shared.open("r+b") as file:
        file.seek(16)
        file.write(struct.pack("d", until))
    for worker in workers:
        worker.news()
    ready = sum(worker.ready for worker in workers)
    print(f"{time.strftime('%H:%M:%S')} {ready} workers ready after {time.time() - waited_from:.0f} s", flush=True)
    return until


class Warmers:
    """Processes that compile one problem each, a few at a time."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.waiting = asked.warm.split(";") if asked.warm and asked.go else []
        self.command = [sys.executable, "-m", __spec__.name, "--scale", str(asked.scale), "--out", str(asked.out)]
        self.command += ["--folder", str(asked.folder)] if asked.folder else []
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.done: list[str] = []

    def go_on(self) -> None:
        for name, process in list(self.running.items()):
            if process.poll() is not None:
                self.done.append(f"{name}{'' if process.returncode == 0 else ' (failed)'}")
                del self.running[name]
        while self.waiting and len(self.running) < WARM_JOBS:
            name = self.waiting.pop(0)
            self.running[name] = subprocess.Popen([*self.command, "--warm-one", name], stdin=subprocess.DEVNULL,
                                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                                  start_new_session=True)  # fmt: skip

    def end(self) -> None:
        """Kill them and their child processes."""
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self.done or self.running:
            print(f"compiled early: {', '.join(self.done)}; ended: {', '.join(self.running)}", flush=True)


def hand_out(workers: list[Worker], waiting: list[tuple[str, float]], needs: dict[str, float], left_s: float) -> None:
    waiting[:] = [each for each in waiting if left_s > level_of(WORTH_S, each[0])]
    used = sum(needs[worker.doing] for worker in workers if worker.doing and worker.alive)
    for worker in workers:
        if not (worker.ready and worker.alive and not worker.doing):
            continue
        fitting = [each for each in waiting[:AHEAD] if used == 0 or used + each[1] < DEVICE_BYTES]
        if fitting:
            waiting.remove(fitting[0])
            worker.tell(fitting[0][0])
            used += fitting[0][1]


def level_of(by_level: dict[str, float], name: str) -> float:
    """The value for the level of a problem of the public benchmark, ``2/33``; the middle one for ours."""
    return by_level.get(name.split("/")[0], by_level["2"])


def revive(workers: list[Worker], shared: Path) -> None:
    """Continue workers that were stopped by one that has ended or is waiting for them."""
    began = struct.unpack("ddd", shared.read_bytes())[1]
    if (began and time.time() - began > LONGEST_STOP_S) or any(not worker.alive for worker in workers):
        signal_all(Path(f"{shared}.pids"), signal.SIGCONT)


def end(workers: list[Worker], shared: Path) -> None:
    for worker in workers:
        if worker.alive:
            worker.process.kill()
    for worker in workers:
        worker.process.wait()


def write(out: Path, rows: list[dict[str, Any]]) -> None:
    with gzip.open(out / "kernelbench_apart.json.gz", "wt") as file:
        json.dump(rows, file)


def summed_up(rows: list[dict[str, Any]]) -> None:
    for r in sorted(rows, key=lambda r: (r["level"], len(r["name"]), r["name"])):
        errors = max(r["errors"], default=math.nan)
        print(f"{r['name']:24} eager {r['eager_s'] * 1e3:8.3f} ms  compiled {r['compiled_s'] * 1e3:8.3f}  ours "
              f"{r['ours_s'] * 1e3:8.3f}  {r['verdict']:8} {r['over_eager']:6.2f} {r['over_compiled']:6.2f}  "
              f"{r['winner']:28} {errors:.1e}{' ' if r['close'] else '!'} ({r['compiled_error']:.0e}) "
              f"{r['spent_s']:4.0f} s ({r['waited_s']:.0f}, {r['stopped_s']:.0f}) {r['note'][:90]}")  # fmt: skip
    kinds: dict[str, float] = {}
    for r in rows:
        for kind, seconds in r["search"].get("held_s", {}).items():
            kinds[kind] = kinds.get(kind, 0.0) + seconds
    shown = sorted(kinds.items(), key=lambda pair: -pair[1])
    print("the lock was held for " + ", ".join(f"{kind} {seconds:.0f} s" for kind, seconds in shown))
    words = ("faster", "even", "slower", "WRONG", "no rival", "failed")
    print(f"{len(rows)} problems: " + ", ".join(f"{sum(r['verdict'] == word for r in rows)} {word}" for word in words))


def chosen(asked: argparse.Namespace) -> list[like.Problem]:
    if asked.problems:
        return [like.called(name.strip()) for name in asked.problems.split(";")]
    left_out = set(asked.without.split(";"))
    kept = [problem for problem in like.PROBLEMS if problem.name not in left_out]
    return [problem for start in range(asked.sample) for problem in kept[start :: asked.sample]][: asked.most]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="a checkout of the public benchmark")
    parser.add_argument("--problems", default="", help="names in order, with semicolons between")
    parser.add_argument("--without", default="", help="names to leave out, with semicolons between")
    parser.add_argument("--sample", type=int, default=1)
    parser.add_argument("--most", type=int, default=1000)
    parser.add_argument("--budget-s", type=float, default=200.0)
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--scale", type=float, default=1.0, help="of the sizes of our own problems")
    parser.add_argument("--each-s", default=json.dumps(EACH_S), help="seconds of a search by level or name, as JSON")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--go", type=Path, help="a file: workers import, and begin when it is there")
    parser.add_argument("--warm", default="", help="names to compile while that file is waited for, as --problems")
    parser.add_argument("--warm-one", default="", help=argparse.SUPPRESS)
    for name in ("--lock", "--shared"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.each_s = {level: float(seconds) for level, seconds in json.loads(asked.each_s).items()}
    if asked.folder:
        like.read_folder(asked.folder)
    if asked.warm_one:
        warm(like.called(asked.warm_one), asked)
    else:
        work(asked) if asked.worker else lead(asked)


if __name__ == "__main__":
    main()
