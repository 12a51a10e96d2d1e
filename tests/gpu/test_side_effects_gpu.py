"""What calls leave on a model in inference, left by CUDA graphs too."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn

import ridgeline as rl
from ridgeline.engine.replay.inference import graph_inference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


class Attentive(nn.Module):
    """Layers that keep their maps of attention, and a router's choice beside them."""

    def __init__(self, width=64, layers=4):
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.route, self.chosen = nn.Linear(width, 8), None
        for layer in self.qkv:
            layer.map = None

    def forward(self, x):
        for layer in self.qkv:
            q, k, v = layer(x).chunk(3, -1)
            weights = (q @ k.transpose(1, 2) * 0.125).softmax(-1)
            layer.map = weights
            x = x + weights @ v
        self.chosen = self.route(x).argmax(-1)
        return x


def _left(model):
    return [*(layer.map for layer in model.qkv), model.chosen]


@pytest.mark.parametrize("length", [16, 512], ids=["copied", "lent"])
def test_replays_leave_maps_and_choices(length):
    torch.manual_seed(0)
    model, x = Attentive().cuda().eval(), torch.randn(4, length, 64, device="cuda")
    with torch.no_grad():
        fast = graph_inference(model, (x,), {}, model)
        assert _left(model) == [None] * 5
        kept = []
        for _ in range(6):
            x = torch.randn_like(x)
            found = [fast(x), *_left(model)]
            kept.append((found, [each.clone() for each in found]))
            expected = [model(x), *_left(model)]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for held, copies in kept:
        torch.testing.assert_close(held, copies, rtol=0, atol=0)
    assert fast.replays >= 5, fast.misses


def test_a_search_records_a_model_that_keeps_its_maps():
    torch.manual_seed(0)
    model, x = Attentive(layers=12).cuda().eval(), torch.randn(4, 64, 64, device="cuda")
    with torch.no_grad():
        fast = rl.optimize(model, (x,), budget_s=20, use_cache=False)
        assert "graph" in fast.receipt.winner, fast.receipt
        for _ in range(4):
            x = torch.randn_like(x)
            found = [fast(x), *_left(model)]
            expected = [model(x), *_left(model)]
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)
