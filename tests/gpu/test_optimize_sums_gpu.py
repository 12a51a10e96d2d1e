"""Odd products, images made larger and sums by an index on a real GPU: every way of a race, and recorded."""

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

import torch.nn.functional as F

from ridgeline.engine.replay.inference import graph_inference
from ridgeline.optimizer.backend import Report, compiled
from ridgeline.optimizer.in_place import padded_linear as padding
from ridgeline.optimizer.rewrites.conv import resize as resizes
from ridgeline.optimizer.rewrites.rows import index_add as sums

DEVICE = torch.device("cuda")


def every_way(monkeypatch, contest):
    """What each way of every race gave."""
    seen = []
    own = contest.run

    def run(key, ways, device):
        if not torch._C._cuda_isCurrentStreamCapturing():
            seen.append({name: way() for name, way in ways.items()})
        return own(key, ways, device)

    monkeypatch.setattr(contest, "run", run)
    return seen


def rewritten_and_recorded(call, args, rewrite):
    """What a rewritten call gives, run and recorded, for two sets of arguments."""
    torch._dynamo.reset()
    report = Report()
    with torch.no_grad():
        run = compiled(call, rewrites=(rewrite,), compiler="none", report=report)
        run(*args[0])
        assert report.matches
        recorded = graph_inference(run, args[0], {}, Called(call))
        return [(run(*each).clone(), recorded(*each).clone(), call(*each)) for each in args]


class Called(torch.nn.Module):
    """A function as a model, for whoever watches one."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, *args):
        return self.call(*args)


def near(found, meant, most):
    return float((found.double() - meant.double()).norm() / meant.double().norm()) < most


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [30522, 50257])
def test_every_way_of_an_odd_product(monkeypatch, outputs, bias):
    torch.manual_seed(0)
    seen = every_way(monkeypatch, padding.CONTEST)
    weight = torch.randn(outputs, 256, device=DEVICE, dtype=torch.bfloat16) / 16
    shift = torch.randn(outputs, device=DEVICE, dtype=torch.bfloat16) if bias else None
    args = [(torch.randn(2, 200, 256, device=DEVICE, dtype=torch.bfloat16),) for _ in range(2)]
    found = rewritten_and_recorded(lambda x: F.linear(x, weight, shift), args, "odd-products")
    assert {"padded", "plain", "parts, copied", "parts, without_padding"} <= set(seen[0])
    for way in seen[0].values():
        assert way.is_contiguous() and near(way.view(2, 200, -1), found[0][2], 6e-3)
    for run, recorded, plain in found:
        assert near(run, plain, 6e-3) and torch.equal(run, recorded) and run.stride() == plain.stride()


def test_every_way_to_make_an_image_larger(monkeypatch):
    torch.manual_seed(0)
    seen = every_way(monkeypatch, resizes.CONTEST)
    args = [(torch.randn(2, 96, 33, 40, device=DEVICE, dtype=torch.bfloat16).to(memory_format=torch.channels_last),)
            for _ in range(2)]  # fmt: skip
    found = rewritten_and_recorded(lambda x: F.interpolate(x, (120, 160), mode="bilinear"), args, "resizes")
    assert set(seen[0]) == {"library", "ours"} and near(seen[0]["ours"], seen[0]["library"], 6e-3)
    for run, recorded, plain in found:
        assert near(run, plain, 6e-3) and torch.equal(run, recorded) and run.stride() == plain.stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_way_of_a_sum_by_an_index(monkeypatch, dtype):
    torch.manual_seed(0)
    seen = every_way(monkeypatch, sums.CONTEST)

    def layers(x, source, target):
        for _ in range(2):
            x = torch.tanh(torch.zeros_like(x).index_add_(0, target, x[source]))
        return x

    def drawn():
        source, target = (torch.randint(0, 3000, (40_000,), device=DEVICE) for _ in range(2))
        return torch.randn(3000, 128, device=DEVICE, dtype=dtype), source, target

    args = [drawn(), drawn()]
    wide = [layers(x.double(), source, target) for x, source, target in args]
    found = rewritten_and_recorded(layers, args, "index-sums")
    most = 3e-2 if dtype is torch.bfloat16 else 1e-5
    assert set(seen[0]) == {"library", "bags"} and near(seen[0]["bags"], seen[0]["library"], most)
    for (run, recorded, plain), meant in zip(found, wide, strict=True):
        assert near(run, meant, most) and near(recorded, meant, most) and near(plain, meant, most)
