"""Where the seconds of a search go, of training most of all: on a made-up clock, with what candidates took on a device.

``torch.compile`` has to be measured within the default budget wherever its compilation fits into it at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from ridgeline.engine.example_inputs import Inputs
from ridgeline.optimizer.backend import Report
from ridgeline.optimizer.compile.deadline import OutOfTime
from ridgeline.optimizer.receipt import SKIPPED, SLOWER
from ridgeline.optimizer.search import search as searching
from ridgeline.optimizer.search.blocks import groups
from ridgeline.optimizer.search.budget import Budget
from ridgeline.optimizer.search.builds import Builds, family_of
from ridgeline.optimizer.search.candidate import Built, Candidate
from ridgeline.optimizer.search.facts import STOCK, Facts, Proposal
from ridgeline.optimizer.search.forecast import Forecast
from ridgeline.optimizer.search.order import Stages
from ridgeline.optimizer.search.problem import Problem
from ridgeline.optimizer.search.search import Search

PREPARED_S, JUDGED_S, FIRST_PROOF_S = 7.0, 3.0, 4.0
"""Before the first candidate; memory, race and proof of one; the reference."""


@dataclass(frozen=True, slots=True)
class Network:
    """Seconds as measured (H200, other jobs on its host; lab/notes/training-steps.md)."""

    eager_s: float
    num_kernels: int
    num_blocks: int  # 0: none repeat
    traced_s: float  # one block, or the model
    blocks_s: float
    stock_s: float


NETWORKS = {
    "gpt2-medium": Network(0.055, 1749, 24, 2.4, 6.8, 57.0), "llama1b": Network(0.079, 2199, 16, 2.3, 5.6, 42.0),
    "bert-large": Network(0.049, 1595, 24, 2.5, 6.0, 63.0), "vit-base": Network(0.025, 627, 12, 2.1, 4.3, 25.0),
    "convnext-tiny": Network(0.026, 900, 4, 1.7, 11.2, 52.0), "resnet50": Network(0.019, 813, 0, 2.9, 0.0, 44.0),
    "dlrm": Network(0.011, 993, 0, 0.5, 0.0, 12.0),
}  # fmt: skip
LARGE = {
    "t5-base": Network(0.147, 3878, 24, 3.0, 10.0, 116.0), "u-net": Network(0.045, 1421, 0, 8.0, 0.0, 72.0),
    "efficientnet": Network(0.043, 948, 0, 4.0, 0.0, 97.0), "twice as many": Network(0.060, 2100, 0, 6.0, 0.0, 90.0),
}  # fmt: skip
"""Those that take torch.compile most of the default budget or more, the last made up."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Run:
    """A search whose candidates take the seconds of a network, and are all slower than the one before."""

    def __init__(
        self, monkeypatch: Any, network: Network, budget_s: float, mode: str = "train", leader: str = "",
        tuned_s: float = 200.0,
    ) -> None:  # fmt: skip
        self.network, self.now_s, self.order = network, PREPARED_S, list[str]()
        self.leader, self.tuned_s = leader, tuned_s
        monkeypatch.setattr(Budget, "left_s", lambda budget: budget_s - self.now_s)
        monkeypatch.setattr(Builds, "built", self.built)
        monkeypatch.setattr(Search, "judge", self.judged)
        monkeypatch.setattr(searching, "within", self.within)
        model = nn.Sequential(*[Block() for _ in range(network.num_blocks)])
        self.search = Search(Problem(model=model, inputs=Inputs((torch.zeros(1, 4),)), mode=mode,
                                     device=torch.device("cpu"), budget_s=budget_s))  # fmt: skip
        self.search.eager_s, self.search._prover = network.eager_s, None
        found = tuple(groups(model)) if network.num_blocks else ()
        unlike = min(1.0, 1 / network.num_blocks + 0.05) if found else 1.0
        forecast = Forecast("h200", 0.2 * network.eager_s, {}, network.eager_s, 1e-3, network.num_kernels, 0.5, (), 0.0)
        facts = Facts(mode=mode, cuda=True, eager_s=network.eager_s, groups=found, num_leaves=100,
                      unlike_frac=unlike, has_conv=False, substitutable=("norm",), unmasked=False, has_cache=False,
                      forecast=forecast, budget_s=budget_s)  # fmt: skip
        stages = Stages(facts)
        for proposal in stages.proposals(self.search):
            self.search._evaluate(proposal, stages)

    def seconds(self, candidate: Candidate) -> float:
        network = self.network
        if candidate.tunes and self.search.problem.mode == "infer":
            return self.tuned_s
        if candidate.compiler == "stock":
            return network.stock_s if not candidate.graphed else 1.0
        if candidate.compiler == "none":
            return network.traced_s if candidate.rewrites else 1.5
        if dict(candidate.options).get("matched"):  # nothing does, and that is known after the trace
            return network.traced_s
        return network.blocks_s + (0.0 if candidate.scope == "blocks" else 9.0)  # a trace, equal blocks once

    @contextlib.contextmanager
    def within(self, seconds: float | None, *, importing: bool = True) -> Iterator[None]:
        self.limit_s = seconds
        yield

    def built(self, candidate: Candidate) -> Built:
        spent_s, limit_s = self.seconds(candidate), self.limit_s
        if limit_s is not None and spent_s > limit_s:
            self.now_s += limit_s
            raise OutOfTime("not made within")
        self.now_s += spent_s
        built = Built(candidate, self.search.problem.model, Report(), build_s=spent_s)
        if candidate.compiles:
            self.search.builds.families[family_of(candidate)] = built
        return built

    def judged(self, built: Built, proposal: Any) -> None:
        self.now_s += JUDGED_S + (FIRST_PROOF_S if not self.order else 0.0)
        self.search._prover = object()  # type: ignore[assignment]
        self.order.append(built.candidate.name)
        self.search.record(built, SLOWER, "")
        if built.candidate.name == self.leader:
            self.search.best = built


@pytest.mark.parametrize("name", NETWORKS)
def test_torch_compile_is_measured_within_the_default_budget(monkeypatch: Any, name: str) -> None:
    run = Run(monkeypatch, NETWORKS[name], 120.0)
    assert run.search.entries[STOCK].status == SLOWER, run.order
    assert run.order[0] == "graph" and run.now_s < 120.0
    before = run.order[: run.order.index(STOCK)]
    assert any(each.startswith(("rewritten blocks", "rewrites")) for each in before), "what needs no compiler is first"


@pytest.mark.parametrize("name", [name for name, network in NETWORKS.items() if network.num_blocks])
def test_a_short_budget_reaches_compiled_blocks(monkeypatch: Any, name: str) -> None:
    """Llama 1B was returned at 0.977 of torch.compile after 30 s that ended before its blocks were compiled."""
    run = Run(monkeypatch, NETWORKS[name], 30.0)
    assert "blocks + graph" in run.order and run.now_s < 30.0, run.order


def test_a_short_budget_finds_the_large_gain_first(monkeypatch: Any) -> None:
    """SegFormer-B3 with 45 s was returned at 14.2 ms: its rewrites, 6.8 ms after six seconds, had no time left."""
    run = Run(monkeypatch, Network(0.0205, 700, 8, 8.0, 16.8, 30.2), 45.0, "infer")
    assert run.order[:2] == ["graph", "kernels + graph"] and run.order.index("rewrites + graph") <= 4, run.order
    assert run.now_s <= 1.1 * 45.0


def test_where_it_does_not_fit_the_receipt_says_so(monkeypatch: Any) -> None:
    run = Run(monkeypatch, NETWORKS["bert-large"], 40.0)
    entry = run.search.entries[STOCK]
    assert entry.status == SKIPPED and "needs about" in entry.reason and run.now_s < 40.0
    assert {"graph", "rewritten blocks + graph"} <= set(run.order)


def _slowed(network: Network, times: float) -> Network:
    return replace(network, traced_s=times * network.traced_s, blocks_s=times * network.blocks_s,
                   stock_s=times * network.stock_s)  # fmt: skip


CLOSING_FRAC = 0.15
"""Of the budget, what the last race and the winner's last proofs take."""


@pytest.mark.parametrize("times", [0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("name", [*NETWORKS, *LARGE])
def test_a_budget_is_kept_within_a_quarter_however_slow_compilers_are(
    monkeypatch: Any, name: str, times: float
) -> None:
    """On a host that is twice as slow, EfficientNet's torch.compile would have ended after 240 s of 120."""
    for mode in ("train", "infer"):
        for budget_s in (45.0, 60.0, 120.0):
            run = Run(monkeypatch, _slowed((NETWORKS | LARGE)[name], times), budget_s, mode)
            assert run.now_s + CLOSING_FRAC * budget_s <= 1.25 * budget_s + JUDGED_S, (mode, budget_s, run.order)
            assert run.search.entries[STOCK].status in (SLOWER, SKIPPED)


@pytest.mark.parametrize("name", [name for name, network in (NETWORKS | LARGE).items() if not network.num_blocks])
def test_where_nothing_else_is_left_to_try_torch_compile_is_begun_whatever_its_price(
    monkeypatch: Any, name: str
) -> None:
    """A network of 2,100 kernels was returned after 29 of 120 s, since torch.compile was priced at 121."""
    run = Run(monkeypatch, (NETWORKS | LARGE)[name], 120.0)
    assert run.search.entries[STOCK].status == SLOWER, run.order
    late = Run(monkeypatch, replace((NETWORKS | LARGE)[name], stock_s=500.0), 120.0)
    entry = late.search.entries[STOCK]
    assert entry.status == SKIPPED and entry.reason == "not made within"


@pytest.mark.parametrize("name", NETWORKS)
def test_in_inference_torch_compile_is_measured_and_captured_within_the_default_budget(
    monkeypatch: Any, name: str
) -> None:
    """Nobody is told that a result is as fast as the better of two without the other having run."""
    run = Run(monkeypatch, NETWORKS[name], 120.0, "infer")
    assert run.search.entries[STOCK].status == SLOWER and STOCK + " + graph" in run.order, run.order


@pytest.mark.parametrize("name", ["dlrm", "resnet50"])
def test_where_torch_compile_leads_its_tuning_is_tried_for_as_long_as_there_is_time(
    monkeypatch: Any, name: str
) -> None:
    """Products of other sizes are tuned for a minute or for four: what is left of the budget says for how long."""
    given = (monkeypatch, replace(NETWORKS[name], num_kernels=200, stock_s=20.0), 120.0, "infer")
    late = Run(*given, STOCK + " + graph")
    assert late.search.entries["tuned + graph"].reason == "not made within" and late.now_s <= 120.0
    ours = Run(*given, "rewrites + graph")
    assert "needs about" in ours.search.entries["tuned + graph"].reason
    quick = Run(*given, STOCK + " + graph", tuned_s=30.0)
    assert "tuned + graph" in quick.order and quick.now_s <= 120.0


@pytest.mark.parametrize(("budget_s", "cuda", "compiler", "limit_s"), [
    (10.0, False, "inductor", 12.0), (10.0, False, "stock", 12.0), (10.0, False, "none", None),
    (10.0, True, "inductor", None), (120.0, False, "inductor", None),
])  # fmt: skip
def test_within_a_short_budget_a_cpp_compiler_is_given_up_half_of_it_late(
    monkeypatch: Any, budget_s: float, cuda: bool, compiler: str, limit_s: float | None
) -> None:
    """A search of 10 s took 27 on two cores that others used: the first compilation of a machine."""
    monkeypatch.setattr(Budget, "left_s", lambda budget: budget_s - 3.0)
    search = Search(Problem(model=nn.Linear(4, 4), inputs=Inputs((torch.zeros(1, 4),)), mode="infer",
                            device=torch.device("cpu"), budget_s=budget_s))  # fmt: skip
    stages = Stages(replace(_plain_facts(budget_s), cuda=cuda))
    assert search.budget.host_limit_s(Proposal(Candidate(name="compiled", compiler=compiler), 7.0), stages) == limit_s


def _plain_facts(budget_s: float) -> Facts:
    return Facts(mode="infer", cuda=False, eager_s=1e-4, groups=(), num_leaves=3, unlike_frac=1.0, has_conv=False,
                 substitutable=(), unmasked=False, has_cache=False, forecast=None, budget_s=budget_s)  # fmt: skip
