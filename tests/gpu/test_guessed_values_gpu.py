"""Values that the host reads, guessed in CUDA graphs: right while they are what they were, and where they are not."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn

import ridgeline as rl
from ridgeline.engine.replay.inference import GUESSED, graph_inference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


class Spoken(nn.Module):
    """A mask made of lengths, the longest of which the host asks for, and a branch on what the mask hides."""

    def __init__(self, width: int = 64, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(layers)
        )
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x, lengths):
        places = torch.arange(int(lengths.max()), device=x.device)[None] < lengths[:, None]
        for layer in self.layers:
            x = x + layer(x)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        if not places.all():
            x = x.masked_fill(~places[..., None], 0.0)
        return x * f"{lengths.sum()}".count("1")


@pytest.fixture(name="case")
def _case():
    torch.manual_seed(0)
    model = Spoken().cuda().eval()
    return model, torch.randn(4, 11, 64, device="cuda"), torch.tensor([11, 9, 4, 7], device="cuda")


def _same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_guessed_values_are_compared_by_every_replay(case):
    model, x, lengths = case
    with torch.no_grad():
        graphed = graph_inference(model, (x, lengths), {}, model, guesses=True)
        for _ in range(3):
            x = torch.randn_like(x)
            _same(graphed(x, lengths), model(x, lengths))
        assert graphed.replays == 3 and not graphed.misses
        for others in ([11, 9, 4, 6], [11, 11, 11, 11], [11, 8, 5, 7]):
            given = torch.tensor(others, device="cuda")
            _same(graphed(x, given), model(x, given))
        assert graphed.misses == {GUESSED: 2} and graphed.replays == 4  # the last adds up to the same


def test_a_search_returns_what_the_model_does_whatever_the_host_reads(case):
    model, x, lengths = case
    fast = rl.optimize(model, (x, lengths), budget_s=40, use_cache=False)
    with torch.no_grad():
        for others in ([11, 9, 4, 7], [11, 3, 3, 3], [11, 11, 11, 11]):
            given, again = torch.tensor(others, device="cuda"), torch.randn_like(x)
            _same(fast(again, given), model(again, given))
    assert fast.receipt.over_best > 0.9, str(fast.receipt)
