"""PyTorch's encoder over padded rows: what is put in its place returns what eager code does, and can be traced."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

sys.path.insert(0, str(Path(__file__).parent))
from recorder import TapeExecutor

from ridgeline.engine.replay.inference import graph_inference
from ridgeline.optimizer.backend import Report, compiled
from ridgeline.optimizer.in_place import attention_registry as hooks
from ridgeline.optimizer.in_place.substitution import apply, revert
from ridgeline.optimizer.rewrites import recommended


class Reader(nn.Module):
    """Words, an encoder that hides padding, and all rows returned."""

    def __init__(self, last: bool, **given: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **given)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(32) if last else None)

    def forward(self, ids: Tensor) -> Tensor:
        return self.encoder(self.words(ids), src_key_padding_mask=ids == 0)


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.setattr(hooks, "RUNS_ON", frozenset({"cuda", "cpu"}))


def _ids(kind: str) -> Tensor:
    ids = torch.randint(1, 50, (3, 12))
    if kind == "behind":
        ids[1, 7:], ids[2, 1:] = 0, 0
    elif kind == "before":
        ids[1, :5] = 0
    return ids


@pytest.mark.parametrize("kind", ["behind", "before", "nothing"])
@pytest.mark.parametrize("last", [False, True])
def test_padded_rows_are_what_eager_code_makes_of_them(kind: str, last: bool) -> None:
    model, ids, report = Reader(last).eval(), _ids(kind), Report()
    with torch.no_grad():
        meant = model(ids)
        assert apply(model, ("encoders",)).counts() == {
            "an encoder that packs padded rows → an encoder over all rows": 1
        }
        torch.testing.assert_close(model(ids), meant, rtol=1e-4, atol=1e-5)
        fast = compiled(model, rewrites=recommended("inference", "none", "cuda"), report=report, fullgraph=True)
        torch.testing.assert_close(fast(ids), meant, rtol=1e-4, atol=1e-5)
    assert report.counts().get("multi-head") == 2, report.refusals
    revert(model)
    assert "forward" not in vars(model.encoder)


def test_an_encoder_over_all_rows_is_captured_and_replays_other_paddings() -> None:
    model, ids = Reader(False).eval(), _ids("behind")
    with torch.no_grad():
        meant = [model(each) for each in (ids, ids.roll(1, 0), ids.flip(1))]
        apply(model, ("encoders",))
        graphed = graph_inference(model, (ids,), {}, model, executor=TapeExecutor())
        found = [graphed(each) for each in (ids, ids.roll(1, 0), ids.flip(1))]
    for a, b in zip(found, meant, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_calls_that_are_not_packed_are_left_to_pytorch() -> None:
    model = Reader(False).eval()
    x, hidden = torch.randn(2, 6, 32), torch.zeros(2, 6, dtype=torch.bool)
    hidden[1, 4:] = True
    meant = model.encoder(x, src_key_padding_mask=hidden)  # gradients are asked for: padded rows keep their values
    apply(model, ("encoders",))
    torch.testing.assert_close(model.encoder(x, src_key_padding_mask=hidden), meant)
    assert float(meant[1, 4:].abs().sum()) > 0
    with torch.no_grad():
        assert float(model.encoder(x, src_key_padding_mask=hidden)[1, 4:].abs().sum()) == 0
    trained = Reader(False).train()
    assert not apply(trained, ("encoders",)).replaced
