"""On a GPU a receipt tells the time of a model's parts before and after, and the parts make up the call."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn

import ridgeline as rl
from ridgeline.engine.example_inputs import Inputs
from ridgeline.optimizer.backend import Report
from ridgeline.optimizer.search.candidate import Built, Candidate, build
from ridgeline.optimizer.search.order import Stages
from ridgeline.optimizer.search.stages import as_it_is
from ridgeline.optimizer.search.time_by_part import IDLE, partition, recorded, split
from ridgeline.optimizer.search.timing import Track


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block(width) for _ in range(4)), nn.Linear(width, 512)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net().cuda().bfloat16().eval()


def _x(rows: int = 4096) -> Tensor:
    return torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_the_receipt_has_parts_that_make_up_the_call(model: Net, mode: str, monkeypatch: Any) -> None:
    model.train(mode == "train")
    if mode == "train":  # compilers of a training step may take all of the time that parts are recorded in
        monkeypatch.setattr(Stages, "proposals", lambda stages, search: as_it_is(stages.make, search))
    fast = rl.optimize(model, (_x(),), mode=mode, budget_s=20, use_cache=False)
    receipt = fast.receipt
    assert receipt.parts, receipt.notes
    assert sum(part.eager_s for part in receipt.parts) == pytest.approx(receipt.eager_s, rel=0.15)
    mlp = next(part for part in receipt.parts if part.name.startswith("layers.*.mlp"))
    busy_s = sum(part.eager_s for part in receipt.parts if part.name != IDLE)  # the host may be what eager waits for
    assert mlp.eager_s > 0.4 * busy_s and mlp.floor_s is not None and mlp.basis
    assert mlp.final_s is not None and mlp.final_s > 0.9 * mlp.floor_s


@pytest.mark.parametrize("scope", ["model", "blocks"])
@pytest.mark.parametrize("compiler", ["none", "inductor"])
def test_kernels_of_a_captured_candidate_find_their_parts(model: Net, scope: str, compiler: str) -> None:
    inputs = Inputs((_x(),))
    track = Track(model, inputs, "infer", None, torch.device("cuda"))
    track.settle(model)
    parts = partition(model)
    eager = recorded(track, Built(Candidate(name="eager"), model, Report()))
    candidate = Candidate(name="c", rewrites=("views",), compiler=compiler, scope=scope, graphed=True)
    found = recorded(track, build(candidate, model, inputs, "infer"))
    assert found.busy_s == pytest.approx(eager.busy_s, rel=0.4)
    named = split(found, parts, "Net")
    inside = sum(s for (part, _), s in named.items() if part.startswith("layers"))
    if compiler == "none":
        assert sum(s for (part, _), s in named.items() if part == "layers.*.mlp") > 0.4 * found.busy_s
    if compiler == "none" or scope == "blocks":
        assert inside > 0.8 * found.busy_s
