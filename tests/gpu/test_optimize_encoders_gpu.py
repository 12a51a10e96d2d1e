"""PyTorch's encoder over padded rows on a GPU: packed by itself, over all rows by ours, in a graph as well."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from ridgeline.engine.replay.inference import graph_inference
from ridgeline.optimizer.backend import Report, compiled
from ridgeline.optimizer.in_place.substitution import apply, revert
from ridgeline.optimizer.rewrites import recommended


class Reader(nn.Module):
    def __init__(self, activation: str) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True, activation=activation)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.encoder(self.words(ids), src_key_padding_mask=ids == 0)


def _apart(found: Tensor, meant: Tensor) -> float:
    return float((found.float() - meant.float()).norm() / meant.float().norm())


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_padded_rows_are_what_eager_code_makes_of_them(activation: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Reader(activation).eval().to("cuda", torch.bfloat16)
    ids = torch.randint(1, 50, (8, 128), device="cuda")
    for row, kept in enumerate((128, 100, 64, 33, 127, 1, 90, 77)):
        ids[row, kept:] = 0
    other = ids.flip(0)
    with torch.no_grad():
        meant, turned = model(ids), model(other)
        assert float(meant[2, 64:].abs().sum()) == 0
        apply(model, ("encoders",))
        report = Report()
        fast = compiled(model, rewrites=recommended("inference", "none", "cuda"), report=report, fullgraph=True)
        assert _apart(model(ids), meant) < 0.03 and _apart(fast(ids), meant) < 0.03
        graphed = graph_inference(model, (ids,), {}, model)
        assert _apart(graphed(ids), meant) < 0.03 and _apart(graphed(other), turned) < 0.03
    assert report.counts().get("multi-head") == 2, report.refusals
    revert(model)
