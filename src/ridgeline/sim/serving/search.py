"""Looking for the cheapest deployment that keeps an SLO, and the frontier of throughput against latency."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ridgeline.errors import RidgelineError
from ridgeline.hardware import cluster
from ridgeline.sim.serving.anatomy import Anatomy
from ridgeline.sim.serving.command import launch_command
from ridgeline.sim.serving.compose import Wanted, deployment_of, model_named
from ridgeline.sim.serving.metrics import Metrics, Slo, metrics, steady
from ridgeline.sim.serving.simulate import Deployment, Pool, simulate
from ridgeline.sim.serving.workload import Workload, closed, opened

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
KEPT_FRAC = 0.95
"""Share of requests that must keep the SLO."""


@dataclass(frozen=True, slots=True)
class Need:
    """What has to be served: lengths, and a rate, a number of users, or whatever concurrency is cheapest."""

    isl: int
    osl: int
    slo: Slo
    rate_per_s: float = 0.0
    burst: float = 1.0
    ratio: float = 1.0
    users: int = 0  # requests in flight at all times, whatever the number of devices


@dataclass(frozen=True, slots=True)
class Candidate:
    """One point that was tried: figures, or the reason it cannot be."""

    title: str
    precision: str
    num_devices: int
    concurrency: int
    found: Metrics | None = None
    keeps: bool = False
    why: str = ""
    command: str = ""  # what starts one replica


@dataclass(frozen=True, slots=True)
class Searched:
    """Every candidate, the cheapest that keeps the SLO, and those no other beats."""

    candidates: tuple[Candidate, ...]
    best: Candidate | None
    frontier: tuple[Candidate, ...]


Tell = Callable[[int, int], None]


def search(model: str | Anatomy, on: str, need: Need, wanted: Wanted, tell: Tell | None = None) -> Searched:
    """Try every sensible layout of ``on`` (for a rate or users: with as few replicas as keep the SLO)."""
    made = model_named(model) if isinstance(model, str) else model
    layouts = list(_layouts(made, cluster(on).num_devices, wanted))
    tried: list[Candidate] = []
    for index, choice in enumerate(layouts):
        sized = need.rate_per_s or need.users
        tried += _by_replicas(made, on, need, choice) if sized else _by_concurrency(made, on, need, choice)
        if tell:
            tell(index + 1, len(layouts))
    keeping = [c for c in tried if c.found and c.keeps]
    best = min(keeping, key=lambda c: c.found.usd_per_million_output if c.found else 0.0, default=None)
    return Searched(tuple(tried), best, frontier(tried))


def frontier(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Candidates that no other beats in both tokens a second and device, and tokens a second and user."""
    kept: list[Candidate] = []
    best = -1.0
    ranked = [c for c in candidates if c.found]
    ranked.sort(key=lambda c: (-_user(c), -_device(c)))
    for candidate in ranked:
        if _device(candidate) > best:
            best = _device(candidate)
            kept.append(candidate)
    return tuple(kept)


def _user(candidate: Candidate) -> float:
    return candidate.found.tokens_per_s_per_user if candidate.found else 0.0


def _device(candidate: Candidate) -> float:
    return candidate.found.output_tokens_per_s_per_device if candidate.found else 0.0


def _layouts(made: Anatomy, num_devices: int, wanted: Wanted) -> Iterator[Wanted]:
    widths = [wanted.tp] if wanted.tp else [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= num_devices]
    precisions = [wanted.precision] if wanted.precision else _precisions(made)
    for name in precisions:
        for width in widths:
            yield replace(wanted, tp=width, ep=1, attention_dp=1, precision=name)
            for prefill, decode in ((1, 1), (1, 2), (2, 1)):  # prompts on instances of their own
                if (prefill + decode) * width <= num_devices and not wanted.disaggregated:
                    split = f"{prefill}x{width}+{decode}x{width}"
                    yield replace(wanted, tp=width, ep=1, attention_dp=1, precision=name, disaggregated=split)
            if made.is_sparse and width > 1 and not wanted.ep:
                yield replace(wanted, tp=width, ep=width, attention_dp=1, precision=name)
                yield replace(wanted, tp=1, ep=width, attention_dp=width, precision=name)


def _precisions(made: Anatomy) -> list[str]:
    return ["mxfp4"] if made.name.startswith("gpt-oss") else ["bf16", "fp8_block" if made.is_sparse else "fp8"]


def _title(wanted: Wanted, replicas: int) -> str:
    parts = [f"{wanted.disaggregated} apart" if wanted.disaggregated else f"tp {wanted.tp}"]
    parts = [f"dp {wanted.attention_dp}"] if wanted.attention_dp > 1 else parts
    parts += [f"ep {wanted.ep}"] if wanted.ep > 1 else []
    return (f"{replicas} × " if replicas > 1 else "") + " ".join(parts)


def _num_devices(wanted: Wanted) -> int:
    """Devices of one replica: those of its prefill and decode instances, where they are apart."""
    each = wanted.tp * wanted.attention_dp * wanted.pp
    if not wanted.disaggregated:
        return each
    return sum(
        int(count) * int(width) for count, width in (part.split("x") for part in wanted.disaggregated.split("+"))
    )


def _refused(wanted: Wanted, error: RidgelineError) -> Candidate:
    return Candidate(_title(wanted, 1), wanted.precision, _num_devices(wanted), 0, why=str(error))


def _alone(made: Anatomy, on: str, wanted: Wanted) -> Deployment:
    """One replica of the layout."""
    layout_devices = _num_devices(wanted)
    name, _, rest = on.partition("*")
    changes = rest.partition(" ")[2]
    return deployment_of(made, f"{name}*{layout_devices}{' ' + changes if changes else ''}", wanted)


def _by_concurrency(made: Anatomy, on: str, need: Need, wanted: Wanted) -> list[Candidate]:
    """One replica under more and more load, until it stops gaining; then the most load that keeps the SLO, by halving
    the step between the last that did and the first that did not."""
    found: dict[int, Candidate] = {}
    deployment: Deployment

    def at(concurrency: int) -> Candidate:
        work = closed(concurrency, need.isl, need.osl, ratio=need.ratio)
        found[concurrency] = _tried(deployment, work, need, wanted, concurrency, 1)
        return found[concurrency]

    try:
        deployment = _alone(made, on, wanted)
        for last, concurrency in zip((0, *CONCURRENCIES), CONCURRENCIES, strict=False):
            if last and _device(at(concurrency)) < 1.02 * _device(found[last]):
                break
            if not last:
                at(concurrency)
        loads = sorted(found)
        pairs = [(low, high) for low, high in pairwise(loads)
                 if found[low].keeps and not found[high].keeps]  # fmt: skip
        for low, high in pairs[-1:]:
            while high > 1.1 * low and high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if at(middle).keeps else (low, middle)
    except RidgelineError as error:
        return [*found.values(), _refused(wanted, error)]
    return [found[concurrency] for concurrency in sorted(found)]


def _tried(
    deployment: Deployment, work: Workload, need: Need, wanted: Wanted, concurrency: int, replicas: int
) -> Candidate:
    served = simulate(deployment, work)
    found = metrics(served, need.slo, skip=steady(served))
    keeps = found.good_frac >= KEPT_FRAC and not found.waiting_at_end
    return Candidate(_title(wanted, replicas), wanted.precision, deployment.num_devices, concurrency, found, keeps,
                     command=launch_command(deployment))  # fmt: skip


def _by_replicas(made: Anatomy, on: str, need: Need, wanted: Wanted) -> list[Candidate]:
    """The fewest replicas that keep the SLO at the rate or for the users: doubled until they do, then halved back."""
    try:
        one = _alone(made, on, wanted)
    except RidgelineError as error:
        return [_refused(wanted, error)]
    most = max(1, cluster(on).num_devices // one.num_devices)
    tried: dict[int, Candidate] = {}

    def keeps(replicas: int) -> bool:
        if need.users:
            work = closed(need.users, need.isl, need.osl, ratio=need.ratio)
        else:
            # Requests of a search at a rate: a minute of them, within reason
            enough = int(min(4000, max(200, 60 * need.rate_per_s)))
            work = opened(need.rate_per_s, need.isl, need.osl, num=enough, burst=need.burst, ratio=need.ratio)
        prefill = one.prefill and Pool(one.prefill.layout, one.prefill.replicas * replicas)
        wide = replace(one, pool=Pool(one.pool.layout, one.pool.replicas * replicas), prefill=prefill)
        tried[replicas] = _tried(wide, work, need, wanted, need.users, replicas)
        return tried[replicas].keeps

    low, high = 0, 1
    while not keeps(high) and high < most:
        low, high = high, min(most, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if keeps(middle) else (middle, high)
    return [tried[replicas] for replicas in sorted(tried)]
