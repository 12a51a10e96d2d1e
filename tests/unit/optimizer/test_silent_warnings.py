"""Looks that only end in a warning do not keep a call from being recorded on the way that it takes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

from recorder import TapeExecutor
from torch import Tensor, nn

from ridgeline.engine.capture.silent_warnings import hushed, only_warns
from ridgeline.engine.replay.inference import graph_inference
from ridgeline.errors import NotGraphable

SAID: list[str] = []


class Pretrained(nn.Module):
    def warn_if_padding_and_no_attention_mask(self, ids: Tensor, mask: Tensor | None) -> None:
        if mask is None and 0 in ids:
            SAID.append("padded")


class Encoder(Pretrained):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        self.warn_if_padding_and_no_attention_mask(ids, mask)
        return self.embed(ids).cumsum(-2)


class Branching(Encoder):
    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        found = super().forward(ids, mask)
        return found + 1 if bool((ids == 3).any()) else found


@pytest.fixture(autouse=True)
def transformers(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", SimpleNamespace(PreTrainedModel=Pretrained))
    SAID.clear()


def test_a_look_for_padding_is_left_out_of_captures() -> None:
    model, method = Encoder().eval(), vars(Pretrained)["warn_if_padding_and_no_attention_mask"]
    fast = graph_inference(model, (torch.randint(1, 9, (2, 5)),), {}, model, executor=TapeExecutor())
    assert fast._studio._hushed and not fast._studio._told
    assert vars(Pretrained)["warn_if_padding_and_no_attention_mask"] is method
    for low in (1, 0):
        ids = torch.randint(low, 9, (2, 5))
        assert torch.equal(fast(ids), model(ids))
    assert fast.replays == 2 and not fast.misses


def test_values_that_decide_are_still_refused() -> None:
    model = Branching().eval()
    with pytest.raises(NotGraphable, match="the host waits"):
        graph_inference(model, (torch.randint(1, 3, (2, 5)),), {}, model, executor=TapeExecutor())


def test_without_transformers_nothing_is_hushed(monkeypatch: Any) -> None:
    model, ids = Encoder(), torch.zeros(1, 2, dtype=torch.int64)
    with hushed():
        model(ids)
    assert not SAID
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils")
    with hushed():
        model(ids)
    assert SAID == ["padded"]
    assert not only_warns(ValueError("elsewhere")) and not only_warns(None)
