"""Products of a few rows, decoding and float32 products on a real GPU: numbers, bits, and recorded steps."""

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from ridgeline import kernels
from ridgeline.bench.check import check_case
from ridgeline.engine.replay.inference import graph_inference
from ridgeline.kernels import launcher, tuning
from ridgeline.kernels.cache_append.op import append
from ridgeline.kernels.contract import trials
from ridgeline.kernels.linear.config import Linear
from ridgeline.optimizer.rewrites.attention.decode import attended
from ridgeline.optimizer.rewrites.linear.few_rows import product

DEVICE = torch.device("cuda")
NAMES = ("linear", "linear_gated", "decode_attention", "matmul")


def drawn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device=DEVICE, dtype=dtype) * shape[-1] ** -0.5


@pytest.mark.parametrize(("name", "of"), [(name, of) for name in NAMES for of in trials()[name][1].checks], ids=str)
def test_kernels_agree_with_their_references(name, of):
    for finding in check_case(name, of, DEVICE, 3):
        assert finding.ok, finding


@pytest.mark.parametrize(
    "chosen",
    [
        Linear("row", 2, 512, 2),
        Linear("row", 8, 1024, 4),
        Linear("tile", 16, 256, 1, 4),
        Linear("tile", 64, 128, 4, 4, 3),
    ],
    ids=str,
)
def test_every_way_to_cut_a_product_gives_the_same_answer(chosen):
    x, w, g = drawn(5, 1000), drawn(600, 1000), drawn(1000)
    meant = kernels.linear(x.double().cpu(), w.double().cpu(), norm_weight=g.double().cpu())
    with tuning.forced("linear", chosen):
        found = kernels.linear(x, w, norm_weight=g)
    assert (found.double().cpu() - meant).norm() / meant.norm() < 4e-3


def chained(x, weights):
    for w in weights:
        x = product(x, w, None, None, x, 1e-6, 0.0, "none", False, True)
    return x


def test_kernels_that_start_early_compute_the_same_bits_every_time():
    weights = [drawn(1024, 1024) for _ in range(12)]
    x = drawn(1, 1024)
    meant = chained(x, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert launcher.recording()
        found = chained(x, weights)
    for _ in range(50):
        x.copy_(drawn(1, 1024))
        meant = chained(x, weights)
        graph.replay()
        assert torch.equal(found, meant) or (found - meant).abs().max() < 1e-2 * meant.abs().max()
    before = found.clone()
    for _ in range(50):
        graph.replay()
        assert torch.equal(found, before)


def test_kernels_that_start_early_may_follow_copies_and_fills_in_a_capture():
    """In a graph those are no kernels, and nothing can start before they have ended."""
    w, x, q = drawn(1024, 1024), drawn(1, 1024), drawn(1, 8, 1, 128)
    keys, values = drawn(2, 1, 2, 300, 128).unbind(0)
    lengths = torch.tensor([200], device=DEVICE)

    def run():
        moved = x.clone()
        found = product(moved, w, None, None, None, 1e-6, 0.0, "none", False, True)
        room = torch.zeros(1, 8, 1, 128, device=DEVICE, dtype=torch.bfloat16)
        room.copy_(q)
        return found, attended(room, keys, values, None, None, False, lengths)

    meant = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(20):
        graph.replay()
    for a, b in zip(found, meant, strict=True):
        assert (a.double() - b.double()).norm() <= 0.01 * b.double().norm()


class Chain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(drawn(1024, 1024) for _ in range(4))

    def forward(self, x):
        return chained(x, self.weights)


def test_a_captured_call_starts_its_kernels_early_whatever_the_model_is_told_of_the_capture(monkeypatch):
    started, bound = [], launcher._bound

    def noted(handle, device, grid_x, grid_y, dependent, *rest):
        started.append(dependent)
        return bound(handle, device, grid_x, grid_y, dependent, *rest)

    launcher.forget_plans()
    monkeypatch.setattr(launcher, "_bound", noted)
    model, x = Chain(), drawn(1, 1024)
    with torch.no_grad():
        meant = model(x)
        assert started and not any(started)
        graphed = graph_inference(model, (x,), {}, model)
        assert any(started)
        found = graphed(x)
    assert graphed.replays == 1 and (found - meant).abs().max() < 1e-2 * meant.abs().max()


def test_new_keys_and_values_land_where_index_copy_puts_them():
    caches, others = (torch.zeros(2, 3, 4, 100, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    index, new = torch.tensor([7, 99], device=DEVICE), drawn(2, 3, 2, 4, 128).transpose(2, 3)
    append(caches[0], caches[1], index, new[0], new[1])
    for cache, part in zip(others, new, strict=True):
        cache.index_copy_(2, index, part)
    assert torch.equal(caches, others)


def test_infinities_do_not_pass_for_numbers_in_float32_products():
    a, b = torch.rand(512, 512, device=DEVICE), torch.rand(512, 512, device=DEVICE)
    a[3, 5] = float("inf")
    b[7, 9] = float("nan")
    found, meant = kernels.matmul(a, b), a @ b
    assert torch.equal(found.isfinite(), meant.isfinite())
