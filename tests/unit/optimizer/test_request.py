"""``rl.optimize`` from a person's side: mistakes are named, results are drop-ins, second calls remember."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

import ridgeline as rl
from ridgeline.cli.app import run as main
from ridgeline.engine.example_inputs import Inputs
from ridgeline.errors import InputError, OptimizeError
from ridgeline.optimizer import memo as cache
from ridgeline.optimizer import request
from ridgeline.optimizer.receipt import Receipt
from ridgeline.optimizer.search.candidate import Candidate
from ridgeline.optimizer.search.facts import Proposal
from ridgeline.optimizer.search.order import Stages
from ridgeline.web.optimize import render_receipt, write_receipt


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.fixture(autouse=True)
def _short_ladder(monkeypatch: Any, tmp_path: Path) -> None:
    """One candidate without a compiler of C++, which would take its time here."""
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    proposal = Proposal(Candidate(name="rewrites", rewrites=("identity", "views")), 0.1)
    monkeypatch.setattr(Stages, "proposals", lambda self, search: iter([proposal]))
    request._alive.clear()


def _optimized(model: nn.Module | None = None, **given: Any) -> Any:
    return rl.optimize((model or Net()).eval(), (torch.randn(2, 8),), budget_s=5, **given)


def test_the_result_is_a_drop_in_with_a_receipt() -> None:
    model = Net().eval()
    fast = rl.optimize(model, (torch.randn(2, 8),), budget_s=5)
    x = torch.randn(2, 8)
    with torch.no_grad():
        assert torch.allclose(fast(x), model(x), atol=1e-6)
        assert torch.allclose(fast(torch.ones(7, 8)), model(torch.ones(7, 8)), atol=1e-6), "other sizes run eagerly"
    assert list(fast.parameters())[0] is list(model.parameters())[0]
    assert fast.receipt.winner in ("eager", "rewrites") and "rewrites" in str(fast.receipt)


@pytest.mark.parametrize(("given", "said"), [
    ({"mode": "fast"}, "infer"),
    ({"budget_s": -1}, "budget_s"),
    ({"error_budget": 1.5}, "between 0 and 1"),
    ({"error_budget": 0.1, "mode": "train"}, "inference only"),
    ({"args": torch.ones(1)}, "tuple"),
])  # fmt: skip
def test_mistakes_are_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptimizeError, match=said):
        rl.optimize(Net(), **{"args": (torch.ones(1, 8),), **given})


def test_unknown_options_suggest_known_ones() -> None:
    with pytest.raises(InputError, match="budget_s"):
        rl.optimize(Net(), (torch.ones(1, 8),), budget=3)


def test_no_module_and_no_values_are_refused() -> None:
    with pytest.raises(OptimizeError, match="Module"):
        rl.optimize(lambda x: x, (torch.ones(1),))
    with pytest.raises(OptimizeError, match="meta"):
        rl.optimize(Net().to("meta"), (torch.ones(1, 8),))


def test_a_step_shared_with_other_processes_is_refused() -> None:
    """A result without its wrapper would train alone, and no number of one process tells."""
    wrapped = nn.DataParallel(Net())
    for model in (wrapped, nn.Sequential(wrapped)):
        with pytest.raises(OptimizeError, match="DataParallel acts around every call"):
            rl.optimize(model, (torch.randn(2, 8),), mode="train", budget_s=1, use_cache=False)


def test_the_second_call_remembers_the_first(monkeypatch: Any) -> None:
    model = Net().eval()
    args = (torch.randn(2, 8),)
    first = rl.optimize(model, args, budget_s=5)
    monkeypatch.setattr(request, "search", lambda problem: pytest.fail("searched again"))
    second = rl.optimize(model, args, budget_s=5)
    assert second.receipt.cached and second.receipt.winner == first.receipt.winner
    del first, second
    again = rl.optimize(Net().eval(), args, budget_s=5)
    assert again.receipt.cached, "another model of the same code and sizes"


@pytest.mark.parametrize(("status", "again"), [("skipped", True), ("slower", False), ("wrong", False)])
def test_a_search_without_time_for_torch_compile_does_not_answer_for_a_longer_one(status: str, again: bool) -> None:
    """Searches of 70 and 120 seconds share what is remembered, and in the second torch.compile is always measured."""
    model, x = Net().eval(), torch.randn(2, 8)
    receipt = rl.optimize(model, (x,), budget_s=5, use_cache=False).receipt
    stock = replace(receipt.entries[-1], name="torch.compile", status=status)
    shorter = replace(receipt, entries=(*receipt.entries, stock), budget_s=70.0)
    assert request._is_enough(shorter, 120.0) is not again
    assert request._is_enough(shorter, 70.0) and request._is_enough(shorter, 65.0)


def test_another_size_type_setting_or_code_is_searched_anew() -> None:
    model, inputs = Net(), Inputs((torch.randn(2, 8),))
    key = cache.key_of(model, inputs, {"mode": "infer"})
    assert key == cache.key_of(Net(), Inputs((torch.randn(2, 8),)), {"mode": "infer"}), "values do not matter"
    others = [
        cache.key_of(Net(32), inputs, {"mode": "infer"}),
        cache.key_of(model, Inputs((torch.randn(3, 8),)), {"mode": "infer"}),
        cache.key_of(model, inputs, {"mode": "train"}),
        cache.key_of(Net().bfloat16(), inputs, {"mode": "infer"}),
        cache.key_of(nn.Sequential(model), inputs, {"mode": "infer"}),
        cache.key_of(model, Inputs((torch.randn(2, 8),), {"flag": True}), {"mode": "infer"}),
    ]
    assert len({key, *others}) == 7


FUNCTION = """
import torch
from torch import nn

GAIN = {gain}

def shaped(x):
    return torch.{shape}(x)

class Model(nn.Module):
    def forward(self, x):
        return torch.{name}(shaped(x), dim={dim}) * GAIN
"""


def test_code_that_was_run_is_known_by_its_names_constants_globals_and_what_it_calls() -> None:
    """Softmax and its logarithm have the same instructions; their files may be gone, or never have been."""

    def key(**changed: Any) -> str:
        names: dict[str, Any] = {}
        exec(FUNCTION.format(**{"gain": 1.0, "shape": "relu", "name": "softmax", "dim": 1} | changed), names)
        return cache.key_of(names["Model"](), Inputs((torch.randn(2, 8),)), {})

    others = [key(name="log_softmax"), key(dim=0), key(gain=2.0), key(shape="tanh")]
    assert key() == key() and len({key(), *others}) == 5


def test_a_damaged_record_is_no_record(tmp_path: Path) -> None:
    _optimized()
    (file,) = (tmp_path / "optimize").glob("*.json")
    file.write_text("{")
    assert cache.load(file.stem) is None
    request._alive.clear()
    assert not _optimized().receipt.cached


def test_a_receipt_survives_its_json_and_is_drawn(tmp_path: Path) -> None:
    receipt = _optimized().receipt
    again = Receipt.from_dict(json.loads(receipt.to_json()))
    assert again.to_dict() == receipt.to_dict() and str(again) == str(receipt)
    assert "none against torch.compile" in receipt.guarantee and receipt.guarantee in str(receipt)
    page = render_receipt(receipt.to_dict())
    assert "http" not in page.split("<script", 1)[0].replace("http-equiv", "") and receipt.winner in page
    assert write_receipt(receipt.to_dict(), tmp_path / "r.html").stat().st_size > 5000
    with pytest.raises(InputError, match="cannot write"):
        write_receipt(receipt.to_dict(), tmp_path / "no" / "r.html")


SCRIPT = """
import torch
def make():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 4), (torch.randn(2, 4),), {}
def alone():
    return 3
"""


def test_the_command_prints_a_table_a_page_and_json(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "net.py").write_text(SCRIPT)
    page = tmp_path / "r.html"
    assert main(["optimize", f"{tmp_path}/net.py:make", "--budget-s", "5", "--html", str(page), "--json"]) == 0
    receipt = json.loads(capsys.readouterr().out)
    assert receipt["model"] == "Linear" and page.exists()
    (tmp_path / "receipt.json").write_text(json.dumps(receipt))
    assert main(["optimize", f"{tmp_path}/receipt.json"]) == 0
    assert "Everything that was tried" in capsys.readouterr().out


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "net.py").write_text(SCRIPT)
    (tmp_path / "other.json").write_text("[]")
    for source, said in (("net.py", "script.py:function"), (f"{tmp_path}/net.py:alone", "(model, args, kwargs)"),
                         (f"{tmp_path}/other.json", "no receipt")):  # fmt: skip
        assert main(["optimize", source]) == 2
        assert said in capsys.readouterr().err


def test_a_search_that_fails_leaves_statistics_and_random_numbers_alone(monkeypatch: Any) -> None:
    def failing(problem: Any) -> Any:
        raise RuntimeError("no search today")

    monkeypatch.setattr(request, "search", failing)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).train()
    before, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    fast = rl.optimize(model, (torch.randn(4, 8, generator=torch.Generator().manual_seed(1)),), mode="train")
    assert fast.receipt.winner == "eager" and any("no search today" in note for note in fast.receipt.notes)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values(), strict=True))
    assert torch.equal(torch.get_rng_state(), drawn)
