"""A model captured from PyTorch is partitioned like one of the zoo."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import ridgeline as rl
from ridgeline.plan import Plan, partition
from ridgeline.plan.legality import facts_of


class Layer(torch.nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = torch.nn.LayerNorm(hidden), torch.nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.o = (torch.nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.up, self.down = torch.nn.Linear(hidden, 4 * hidden), torch.nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        b, s, h = x.shape
        y = self.ln1(x)
        q, k, v = (f(y).view(b, s, self.heads, h // self.heads).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, s, h))
        return x + self.down(torch.nn.functional.gelu(self.up(self.ln2(x))))


class Tiny(torch.nn.Module):
    def __init__(self, layers: int = 8, hidden: int = 512, heads: int = 8, vocab: int = 4096) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(vocab, hidden)
        self.layers = torch.nn.ModuleList([Layer(hidden, heads) for _ in range(layers)])
        self.head = torch.nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.fixture(scope="module")
def graph():
    with torch.device("meta"):
        model = Tiny().to(torch.bfloat16)
    return rl.capture(model, (torch.zeros(1, 1024, dtype=torch.long, device="meta"),), mode="train")


def test_facts_are_read_off_a_captured_graph(graph):
    facts = facts_of(graph)
    assert (facts.layers, facts.heads, facts.seq) == (8, 8, 1024)


def test_products_are_split_by_columns_and_rows(graph):
    local = partition(graph, Plan(tp=2, dp=1)).graph
    shapes = {n.module.rsplit(".", 1)[-1]: (n.attrs["n"], n.attrs["k"]) for n, _ in local.nodes()
              if n.op == "matmul" and n.phase == "forward"}  # fmt: skip
    assert shapes["q"] == (256, 512)
    assert shapes["o"] == (512, 256)
    assert shapes["up"] == (1024, 512)
    assert shapes["down"] == (512, 1024)


def test_one_device_simulated_is_what_predict_says(graph):
    told = rl.predict(graph, on="h100-sxm")
    assert rl.simulate(graph, "h100-sxm*1").step_s == pytest.approx(told.expected_s, rel=1e-6)


@pytest.mark.parametrize("choices", [{"tp": 2, "pp": 2}, {"zero": 3}, {"tp": 2, "recompute": "full"}, {"cp": 2}])
def test_plans_apply_to_it(graph, choices):
    step = rl.simulate(graph, "h100-sxm*8", global_batch=16, **choices)
    assert sum(step.parts.values()) == pytest.approx(step.step_s)
